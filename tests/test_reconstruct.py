"""probe.py reconstruct: what the picture shows, and that nothing of a removed patch leaks."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from test_pretrained import run  # noqa: F401 # a fixture
from torchvision.transforms import v2

import data
import probe
import vit
from downstream import images, reconstruct
from downstream.weights import build_pretrained, random_weights, read_pretrained

TILES = ROOT / "examples" / "tiles" / "heldout"


def test_the_crop_is_that_of_torchvision_and_the_images_come_in_order():
    files, chosen = data.scan(str(TILES)), [*range(0, 64, 9)]
    batches = [*images.open_eval_loader(files, 56, 3, 0, indices=chosen)]
    assert [len(b.images) for b in batches] == [3, 3, 2] and not any(b.bad for b in batches)
    assert [i for b in batches for i in b.indices] == chosen
    assert [y for b in batches for y in b.labels] == [files.labels[i] for i in chosen]
    theirs = v2.Compose([v2.Resize(64, v2.InterpolationMode.BICUBIC), v2.CenterCrop(56)])
    for pixels, i in zip(torch.cat([b.images for b in batches]), chosen, strict=True):
        expected = v2.functional.pil_to_tensor(theirs(Image.open(files.path(i)))).float()
        assert (pixels - expected).abs().mean() < 2.5  # of 255; resized once


def test_a_broken_image_is_left_out_and_workers_change_nothing(tmp_path):
    for i, tile in enumerate(sorted(TILES.glob("*/*_01.jpg"))):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        shutil.copy(tile, tmp_path / "ab"[i % 2] / f"{i}.jpg")
    (tmp_path / "a" / "2.jpg").write_bytes(b"not an image")
    np.save(tmp_path / "b" / "1.npy", np.zeros((4, 9, 9), np.uint8))
    files = data.scan(str(tmp_path))
    one, two = ([*images.open_eval_loader(files, 32, 2, n)] for n in (0, 2))
    broken = {files.names[i]: reason for b in one for i, reason in b.bad}
    assert broken.keys() == {"a/2.jpg", "b/1.npy"} and "4 channels" in broken["b/1.npy"]
    assert sum(len(b.indices) for b in one) == len(files) - 2
    for left, right in zip(one, two, strict=True):
        assert torch.equal(left.images, right.images) and left[2:] == right[2:]


def test_noise_is_of_the_seed_and_the_index_alone():
    state = torch.get_rng_state()
    noise = images.fixed_noise(3, [5, 9, 5], 16)
    assert torch.equal(noise[0], noise[2]) and not torch.equal(noise[0], noise[1])
    assert torch.equal(noise[1:2], images.fixed_noise(3, [9], 16))
    assert not torch.equal(noise[1:2], images.fixed_noise(4, [9], 16))
    assert torch.equal(noise.sort(1).values, torch.arange(16.0).expand(3, -1))
    assert torch.equal(state, torch.get_rng_state())


def columns(pixels: torch.Tensor, prediction: torch.Tensor | None, norm_pix: bool = False):
    """The columns, for a prediction or the right one, and where patches are removed (as pixels)."""
    rgb, c = pixels.dtype == torch.uint8, pixels.shape[1]
    stats = data.IMAGENET if rgb else data.ChannelStats((0.3,) * c, (2.0,) * c, "float32")
    removed = (torch.arange(16).expand(2, -1) % 5 > 0).float()
    if prediction is None:
        prediction = vit.patchify(data.normalize(pixels, stats), 8)
    shown = reconstruct.reconstructions(pixels, prediction, removed, 8, norm_pix, stats)
    grid = removed.reshape(2, 1, 4, 4).bool()
    return shown.unbind(1), grid.repeat_interleave(8, 2).repeat_interleave(8, 3)


def test_a_perfect_prediction_of_pixels_is_the_original():
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    (original, masked, predicted, pasted), hole = columns(pixels, None)
    assert all(torch.equal(shown, pixels) for shown in (original, predicted, pasted))
    assert torch.equal(masked, torch.where(hole, 128, pixels))
    for channels in (1, 5):  # are stretched
        (original, _, predicted, _), _ = columns(100 * torch.randn(2, channels, 32, 32), None)
        assert original.amin() == 0 and original.amax() == 255 and original.shape[1] == 3
        assert torch.equal(original, predicted)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_nothing_of_a_removed_patch_is_in_the_picture(norm_pix):
    """Other pixels in the removed patches: only the original changes."""
    pixels, others = torch.randint(0, 256, (2, 2, 3, 32, 32), dtype=torch.uint8)
    prediction = torch.randn(2, 16, 192)
    shown, hole = columns(pixels, prediction, norm_pix)
    again, _ = columns(torch.where(hole, others, pixels), prediction, norm_pix)
    same = [torch.equal(a, b) for a, b in zip(shown, again, strict=True)]
    assert same == [False, True, True, True]


def test_a_removed_patch_gets_the_mean_of_visible_ones_nearby():
    target, removed = torch.randn(1, 16, 192), torch.ones(1, 16)
    removed[0, [0, 15]] = 0
    mean, deviation = reconstruct.estimate_statistics(target, removed)
    torch.testing.assert_close(mean[0, 0, 0], target[0, 0].mean())
    torch.testing.assert_close(deviation[0, 0, 0], target[0, 0].std())
    near, far = 1, 1 / (3**2 + 2**2) ** 2  # patch 1: one step from 0, (3, 2) from 15
    by_hand = (near * mean[0, 0] + far * mean[0, 15]) / (near + far)
    torch.testing.assert_close(mean[0, 1], by_hand)


def test_the_picture_is_a_labelled_png_and_the_loss_is_the_model_s(run, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "picture.png"
    line = ["reconstruct", str(run[0]), "--data", str(TILES), "--images", "4", "--seed", "7"]
    assert probe.main([*line, "--out", str(out)]) == 0
    picture, zoomed = Image.open(out), 32 * (160 // 32)
    assert picture.format == "PNG" and picture.width == 4 * (zoomed + 6) + 6
    files, chosen = data.scan(str(TILES)), [0, 16, 32, 48]
    batch = next(images.open_eval_loader(files, 32, 4, 0, indices=chosen))
    model = build_pretrained(read_pretrained(run[0]), torch.device("cpu"))
    with torch.no_grad():
        noise = images.fixed_noise(7, chosen, 16)
        loss, _, _ = model(data.normalize(batch.images), 0.75, noise)
    assert f"loss of the removed patches {loss:.4f}" in capsys.readouterr().out
    pixels = np.asarray(picture)[16 : 16 + zoomed : 5, 6 : 6 + zoomed : 5]
    assert np.array_equal(pixels, batch.images[0].permute(1, 2, 0))


def test_errors_are_one_sentence(run, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    Path("bad").mkdir()
    Path("bad/a.jpg").write_bytes(b"no image")
    line = ["reconstruct", str(run[0]), "--data", str(TILES)]
    for argv, words in [
        (["reconstruct", "nowhere", "--data", str(TILES)], "there is no nowhere"),
        ([*line[:3], "nowhere"], "there is no folder nowhere"),
        ([*line[:3], "bad"], "none of the 1 images"),
        ([*line, "--mask-ratio", "0"], "removes no patch"),
        ([*line, "--img-size", "33"], "not a multiple of the patch size 8"),
    ]:
        assert probe.main(argv) == 1
        error = capsys.readouterr().err
        assert error.startswith("probe.py: error: ") and words in error and error.count("\n") == 1
    encoder = replace(random_weights(read_pretrained(run[0])), weights={})
    monkeypatch.setattr(reconstruct, "read_pretrained", lambda path: encoder)
    assert probe.main(line) == 1 and not [*tmp_path.glob("*.png")]
    assert "an encoder without a decoder" in capsys.readouterr().err
