"""probe.py reconstruct: what the picture shows, and that nothing of a removed patch leaks."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from ranks import NANO, files_limited
from torchvision.transforms import v2

import data
import probe
import vit
from downstream import reconstruct
from runtime import eval_images as images
from runtime.pretrained import build_pretrained, random_weights, read_pretrained

TILES = ROOT / "examples" / "tiles" / "heldout"


@pytest.mark.parametrize("exact", [False, True])
def test_the_crop_is_that_of_torchvision_and_the_images_come_in_order(exact):
    files = data.scan(str(TILES))
    batches = [*images.open_eval_loader(files, 24, 30, 0, exact=exact)]
    assert [len(b.images) for b in batches] == [30, 30, 4] and not any(b.bad for b in batches)
    indices = list(itertools.chain(*(b.indices for b in batches)))
    assert indices == [*range(64)]
    for pixels, i in zip(torch.cat([b.images for b in batches]), indices, strict=True):
        whole = v2.functional.pil_to_tensor(Image.open(files.path(i)))
        crop = images.centre_crop(whole.shape[2], whole.shape[1])
        expected = v2.functional.resized_crop(whole, *crop, [24, 24], v2.InterpolationMode.BICUBIC)
        assert torch.equal(pixels, expected) == exact  # not exact: decoded at a smaller scale
        assert (pixels.float() - expected.float()).abs().mean() < 2.5  # of 255
    assert images.centre_crop(300, 256) == (16, 38, 224, 224)


def test_a_broken_image_is_left_out_and_workers_and_ranks_change_nothing(tmp_path):
    for i, tile in enumerate(sorted(TILES.glob("*/*_01.jpg"))):
        shutil.copy(tile, tmp_path / f"{i}.jpg")
    (tmp_path / "2.jpg").write_bytes(b"not an image")
    np.save(tmp_path / "1.npy", np.zeros((4, 9, 9), np.uint8))
    files = data.scan(str(tmp_path))
    alone = [*images.open_eval_loader(files, 32, 2, workers=0)]
    by_workers = [*images.open_eval_loader(files, 32, 2, workers=2)]
    broken = {}
    for batch in alone:
        broken |= {files.names[i]: reason for i, reason in batch.bad.items()}
    assert broken.keys() == {"2.jpg", "1.npy"} and "4 channels" in broken["1.npy"]
    assert sum(len(batch.indices) for batch in alone) == len(files) - 2
    for left, right in zip(alone, by_workers, strict=True):
        assert torch.equal(left.images, right.images)
        assert (left.indices, left.bad) == (right.indices, right.bad)

    ranks = [images.open_eval_loader(files, 32, 2, 0, share=(rank, 3)) for rank in range(3)]
    dealt = []
    for step in zip(*ranks, strict=True):  # the last ones may have an empty batch
        dealt += [batch for batch in step if batch.indices or batch.bad]
    assert len(dealt) == len(alone)
    for left, right in zip(alone, dealt, strict=True):
        assert (left.indices, left.bad) == (right.indices, right.bad)


def columns(pixels: torch.Tensor, prediction: torch.Tensor | None, norm_pix: bool = False):
    """The columns, for a prediction or the right one, and where patches are removed (as pixels)."""
    if pixels.dtype == torch.uint8:
        stats = data.IMAGENET
    else:
        channels = range(pixels.shape[1])
        mean = tuple(0.3 for _ in channels)
        std = tuple(2.0 for _ in channels)
        stats = data.ChannelStats(mean, std, "float32")
    removed = (torch.arange(16).expand(2, -1) % 5 > 0).float()
    if prediction is None:
        prediction = vit.patchify(data.normalize(pixels, stats), 8)
    about = SimpleNamespace(config=NANO, norm_pix_loss=norm_pix, stats=stats)
    shown = reconstruct.reconstructions(about, pixels, prediction, removed)
    grid = removed.reshape(2, 1, 4, 4).bool()
    return shown, grid.repeat_interleave(8, 2).repeat_interleave(8, 3)


def test_a_perfect_prediction_of_pixels_is_the_original():
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    shown, hole = columns(pixels, None)
    assert all(torch.equal(shown[:, i], pixels) for i in (0, 3))
    assert torch.equal(shown[:, 1], torch.where(hole, 128, pixels))
    assert torch.equal(shown[:, 2].where(~hole, 0), pixels.where(~hole, 0))
    for channels in (1, 5):  # are stretched
        shown, _ = columns(100 * torch.randn(2, channels, 32, 32), None)
        assert shown[:, 0].amin() == 0 and shown[:, 0].amax() == 255 and shown.shape[2] == 3
        assert torch.equal(shown[:, 0], shown[:, 3])


@pytest.mark.parametrize("norm_pix", [True, False])
def test_nothing_of_a_removed_patch_is_in_the_picture(norm_pix):
    """Other pixels in the removed patches: only the original changes."""
    pixels, others = torch.randint(0, 256, (2, 2, 3, 32, 32), dtype=torch.uint8)
    prediction = torch.randn(2, 16, 192)
    shown, hole = columns(pixels, prediction, norm_pix)
    again, _ = columns(torch.where(hole, others, pixels), prediction, norm_pix)
    assert not torch.equal(shown[:, 0], again[:, 0]) and torch.equal(shown[:, 1:], again[:, 1:])


def test_a_removed_patch_gets_the_mean_of_visible_ones_nearby():
    """Weighted by 1 / distance^4; mean colours are enlarged as by Pillow."""
    target = torch.randn(1, 16, 192)
    removed = torch.ones(1, 16)
    removed[0, [0, 15]] = 0
    rows, places = np.divmod(np.arange(16), 4)
    distance = np.hypot(rows[:, None] - rows[[0, 15]], places[:, None] - places[[0, 15]])
    share = np.maximum(distance, 1) ** -4.0
    share[[0, 15]] = np.eye(2)
    share = torch.tensor(share / share.sum(1, keepdims=True), dtype=torch.float32)  # (16, 2)
    shown = target[0, [0, 15]]
    filled = reconstruct.fill_from_visible(target, removed)
    torch.testing.assert_close(filled[0], share @ shown)
    grid = (share @ shown.reshape(2, 64, 3).mean(1)).numpy()
    interpolated = reconstruct.interpolate(target, removed, 8)
    for c, plane in enumerate(interpolated.squeeze(0).numpy()):
        small = Image.fromarray(grid[:, c].reshape(4, 4))
        larger = np.asarray(small.resize((32, 32), Image.Resampling.BILINEAR))
        np.testing.assert_allclose(plane, larger, atol=1e-5)


def test_the_picture_has_the_psnr_of_the_model_and_of_interpolation(run, tmp_path, capsys):
    out = tmp_path / "picture.png"
    line = ["reconstruct", str(run[0]), "--data", str(TILES), "--images", "4", "--seed", "7"]
    assert probe.main([*line, "--out", str(out)]) == 0
    picture = Image.open(out)
    zoom = 256 // 32
    gap = 16
    assert picture.format == "PNG" and picture.width == 4 * (256 + gap) + gap
    files = data.scan(str(TILES))
    chosen = [0, 16, 32, 48]
    batch = images.EvalImages(files, 32, data.IMAGENET)[chosen]
    model = build_pretrained(read_pretrained(run[0]), torch.device("cpu"))
    with torch.no_grad():
        noise = images.fixed_noise(7, chosen, 16)
        loss, _, _ = model(data.normalize(batch.images), 0.5, noise)  # as in pretraining
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.endswith(f"loss of the removed patches {loss:.4f}")
    pixels = np.asarray(picture)[gap::zoom, gap::zoom][:32].astype(float)
    step = (256 + gap) // zoom
    original, interpolated, filled = (pixels[:, i * step : i * step + 32] for i in (0, 2, 3))
    assert np.array_equal(original, batch.images[0].permute(1, 2, 0))
    errors = [np.mean((x - original) ** 2) for x in (filled, interpolated)]
    by_hand = [f"{20 * np.log10(255 / np.sqrt(error)):.2f} dB" for error in errors]
    assert rows[0].strip() == f"PSNR {by_hand[0]}, interpolation {by_hand[1]}  {files.path(0)}"
    means = np.array([[float(row.split()[i]) for i in (1, 4)] for row in rows])
    assert len(rows) == 5 and np.allclose(means[:4].mean(axis=0), means[4], atol=0.01)


def test_errors_are_one_sentence_and_leave_the_picture_before(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad").mkdir()
    Path("bad/a.jpg").write_bytes(b"no image")
    Path("reconstruct.png").write_bytes(b"before")
    line = ["reconstruct", str(run[0]), "--data", str(TILES)]

    def refused(argv: list[str], words: str, status: int = 2) -> None:
        assert probe.main(argv) == status
        error = capsys.readouterr().err
        assert error.startswith("probe.py: error: ") and words in error and error.count("\n") == 1
        assert Path("reconstruct.png").read_bytes() == b"before" and len([*tmp_path.iterdir()]) == 2

    refused([*line[:3], "nowhere"], "there is no folder nowhere")
    refused([*line[:3], "bad"], "none of the 1 images")
    refused([*line, "--mask-ratio", "0"], "removes no patch")
    refused([*line, "--img-size", "33"], "not a multiple of the patch size 8")
    with files_limited(10_000):  # as on a full disk
        refused(line, "File too large", status=1)
    encoder = replace(random_weights(read_pretrained(run[0])), weights={})
    monkeypatch.setattr(reconstruct, "read_pretrained", Mock(return_value=encoder))
    refused(line, "an encoder without a decoder")
