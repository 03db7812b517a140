"""probe.py: scores equal to scikit-learn's, a picture in which no removed patch shows."""

import json
import math
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from ranks import NANO, files_limited
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import top_k_accuracy_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from timm.layers import resample_abs_pos_embed
from torch.nn import functional as F
from torchvision.transforms import v2

import data
import probe
import vit

CPU = torch.device("cpu")
TILES = ROOT / "examples" / "tiles"


def clusters(rows: int, classes: int, width: int, noise: float, seed: int):
    """Features (N, D) fp32 around one point per class, and their labels."""
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    labels = draw.integers(classes, size=rows)
    values = centres[labels] + noise * draw.normal(size=(rows, width))
    return torch.from_numpy(values.astype(np.float32)), torch.from_numpy(labels)


# --- the classifiers


def scikit_knn(k: int) -> KNeighborsClassifier:
    def weights(distance):
        return np.exp((1 - distance) / 0.07)

    return KNeighborsClassifier(k, weights=weights, algorithm="brute", metric="cosine")


@pytest.mark.parametrize("at_a_time", [2**27, 10_000], ids=["whole", "blocks"])
@pytest.mark.parametrize("k", [1, 20])
def test_knn_equals_scikit_learn(at_a_time, k, monkeypatch):
    monkeypatch.setattr(probe, "SIMILARITIES", at_a_time)
    bank, labels = clusters(2000, 7, 24, 1.5, 1)
    queries, truth = clusters(500, 7, 24, 1.5, 2)
    expected = scikit_knn(k).fit(bank.double(), labels).predict_proba(queries)
    votes = probe.nearest_vote(bank, labels, queries, 7, k).clamp(min=0)
    np.testing.assert_allclose(votes / votes.sum(dim=1, keepdim=True), expected, atol=1e-4)
    assert 0.5 < (votes.argmax(dim=1) == truth).double().mean() < 0.99


def test_few_images_have_few_neighbours_and_equal_rows_do_not_stop_it():
    votes = probe.nearest_vote(torch.ones(3, 4), torch.tensor([2, 1, 2]), torch.zeros(2, 4), 4, 20)
    assert votes.tolist() == [[-math.inf, 1.0, 2.0, -math.inf]] * 2


def test_the_linear_probe_reaches_logistic_regression_and_its_seed_decides_all(monkeypatch):
    x, y = clusters(2000, 6, 32, 3.0, 3)
    test, truth = clusters(4000, 6, 32, 3.0, 4)
    x = x * 50 + 1000  # BatchNorm makes the scale no matter
    test = test * 50 + 1000
    scale = StandardScaler().fit(x)
    theirs = LogisticRegression(max_iter=1000).fit(scale.transform(x), y)
    expected = 100 * theirs.score(scale.transform(test), truth)
    model = probe.train_linear(x, y, 6)
    found = 100 * (model(test).argmax(dim=1) == truth).double().mean()
    assert 60 < expected < 97 and abs(found - expected) <= 1, (found, expected)
    monkeypatch.setattr(probe, "LARGEST_BATCH", 64)  # more than one batch: their order matters
    first, same, other = [probe.train_linear(x, y, 6, epochs=2, seed=s)(x) for s in (0, 0, 1)]
    assert torch.equal(first, same) and not torch.equal(first, other)


@pytest.mark.parametrize(("shape", "size"), [((2, 3), 1), ((2, 3), 1e-25), ((2,), 1)])
def test_a_gradient_is_scaled_as_by_lars(shape, size):
    """But not that of a bias, nor one whose norm underflows."""
    p = torch.nn.Parameter(torch.rand(shape) + 0.5)
    p.grad = grad = size * torch.rand(shape)
    ratio = 0.001 * p.norm() / grad.norm() if (len(shape), size) == (2, 1) else 1
    expected = ratio * grad
    probe.scale_gradient(p)
    torch.testing.assert_close(p.grad, expected)


def test_a_split_takes_a_share_of_each_class_by_its_seed():
    labels = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([50, 20, 2]))
    train, test = probe.split_per_class(labels, 0.1, 0)
    assert np.bincount(labels[train]).tolist() == [5, 2, 1]
    assert sorted([*train, *test]) == list(range(72))
    for seed in 0, 1:
        again, _ = probe.split_per_class(labels, 0.1, seed)
        assert np.array_equal(train, again) == (seed == 0)


def test_accuracies_are_those_of_scikit_learn_and_no_vote_is_no_hit():
    draw = np.random.default_rng(0)
    values = draw.normal(size=(200, 9))
    truth = draw.integers(9, size=200)
    found = probe.top_accuracies(torch.from_numpy(values), torch.from_numpy(truth))
    for key, k in (("top1", 1), ("top5", 5)):
        assert found[key] == pytest.approx(100 * top_k_accuracy_score(truth, values, k=k))
    nothing = torch.full((1, 9), -torch.inf)
    assert probe.top_accuracies(nothing, torch.tensor([0]))["top5"] == 0


# --- the scores of a run

SOURCES = ("trained", "random weights", "raw pixels")
HELD = ("--test", TILES / "heldout")


def command(name: str, path: Path, *more: object) -> list[str]:
    argv = [name, path, "--data", TILES / "train", "--device", "cpu", "--workers", 0, *more]
    return [*map(str, argv)]


def centre(path: str) -> torch.Tensor:
    """An image as torchvision resizes its centre, 224/256 of its side, to 32 pixels."""
    whole = v2.functional.pil_to_tensor(Image.open(path))
    side = round(min(whole.shape[1:]) * 224 / 256)
    crop = v2.functional.center_crop(whole, side)
    return v2.functional.resize(crop, [32, 32], v2.InterpolationMode.BICUBIC)


def test_scores_stand_beside_both_baselines(run, tmp_path):
    more = *HELD, "--features", "mean", "--seeds", 2, "--out", tmp_path
    assert probe.main(command("knn", run[0], *more)) == 0
    table = json.loads((tmp_path / "knn.json").read_text())
    order = {(score["source"], score["seed"]) for score in table["scores"]}
    assert table["step"] == 2 and order == {(name, seed) for name in SOURCES for seed in (0, 1)}
    # by hand, with torchvision and scikit-learn
    pretrained = probe.read_pretrained(run[0])
    models = [probe.build_model(pretrained, CPU, None, seed) for seed in (None, 1)]
    expected = {name: [] for name in SOURCES}
    labels = []
    for folder in ("train", "heldout"):
        paths = sorted((TILES / folder).glob("*/*.jpg"))
        labels.append([path.parent.name for path in paths])
        pixels = data.normalize(torch.stack([centre(path) for path in paths]))
        expected["raw pixels"].append(F.avg_pool2d(pixels, 2).flatten(1).numpy())
        for name, model in zip(SOURCES, models, strict=False):
            keep_all = torch.arange(16).expand(len(pixels), -1)
            tokens = model.encode(vit.patchify(pixels, 8), keep_all).detach()
            expected[name].append(tokens[:, 1:].mean(dim=1).numpy())
    for score in [score for score in table["scores"] if score["seed"] == 1]:
        train, test = (rows.astype(np.float64) for rows in expected[score["source"]])
        hits = scikit_knn(20).fit(train, labels[0]).predict(test) == np.array(labels[1])
        assert score["top1"] == pytest.approx(100 * hits.mean(), abs=3.2), score  # two images


def test_a_run_is_read_as_it_was_trained_and_at_another_size(run):
    out, params = run
    for path in out, out / "step_00000002":
        pretrained = probe.read_pretrained(path)
        assert (pretrained.step, pretrained.mask_ratio, pretrained.stats) == (2, 0.5, data.IMAGENET)
        for name, p in probe.build_model(pretrained, CPU, None).named_parameters():
            assert torch.equal(p, params[name]), name
    model = probe.build_model(pretrained, CPU, 56)
    theirs = resample_abs_pos_embed(vit.sincos_positions(40, 4), [7, 7])
    torch.testing.assert_close(model.pos_embed, theirs, rtol=0, atol=1e-6)


def test_an_unreadable_image_is_named_and_left_out(run, tmp_path, capsys):
    tiles = shutil.copytree(TILES / "heldout", tmp_path / "tiles")
    first, *_, last = sorted(tiles.glob("*/*.jpg"))
    for path in (first, last):
        path.write_bytes(b"nothing")
    out = tmp_path / "out"
    argv = command("linear", run[0], "--data", tiles, "--split", 0.5, "--epochs", 1, "--out", out)
    assert probe.main(argv) == 0
    printed = capsys.readouterr().out
    assert str(first) in printed and str(last) in printed
    found = json.loads((out / "linear.json").read_text())["scores"][0]
    assert found["test_images"] == 64 - 2 - 32 and 0 <= found["training_top1"] <= 100


def test_class_names_that_differ_in_unicode_form_alone_are_one(run, tmp_path):
    for form, folder in ("NFC", "train"), ("NFD", "test"):
        for name in ("forêt", "sea"):
            (tmp_path / folder / unicodedata.normalize(form, name)).mkdir(parents=True)
            shade = 100 * (name == "sea")
            for i in range(3):  # files of both folders have the same names and sizes
                pixels = np.full((32, 32, 3), 20 * i + shade + 5 * (form == "NFD"), np.uint8)
                path = tmp_path / folder / unicodedata.normalize(form, name) / f"{i}.bmp"
                Image.fromarray(pixels).save(path)
    flags = ["--data", tmp_path / "train", "--test", tmp_path / "test", "--out", tmp_path / "out"]
    assert probe.main(command("knn", run[0], *flags, "--k", 1)) == 0
    assert json.loads((tmp_path / "out/knn.json").read_text())["mean"]["raw pixels"]["top1"] == 100


def test_what_is_wrong_is_one_sentence(run, tmp_path, capsys):
    more = tmp_path / "more"
    shutil.copytree(TILES / "heldout", more / "tiles")
    one, single, flat = tmp_path / "one", tmp_path / "single", tmp_path / "flat"
    for folder in (more / "else", flat, one / "ice", one / "sea", single / "ice"):
        folder.mkdir(parents=True)
        shutil.copy(next(TILES.glob("train/ice/*")), folder)
    shutil.copytree(TILES / "train", tmp_path / "a copy")
    torch.save({"cls_token": torch.zeros(1, 1, 40)}, tmp_path / "theirs.pth")
    state = {"flags": {"model": "nano", "channels": 5, "img_size": 32}}
    torch.save({"model": {}, "step": 0, "run_state": state}, tmp_path / "begun.pth")
    for path, changed, words in (
        (run[0], ["--test", more], "lacks: ['else']"),
        (run[0], ["--test", tmp_path / "nowhere"], "nowhere"),
        (tmp_path / "begun.pth", ["--split", 0.5], "mean and deviation of its 5 channels"),
        (run[0], ["--test", TILES / "train"], "is trained"),
        (run[0], ["--test", tmp_path / "a copy"], "is trained"),
        (run[0], ["--data", TILES, "--test", TILES / "heldout"], "is trained"),
        (run[0], ["--split", 0.5, "--img-size", 33], "multiple of the patch size"),
        (run[0], ["--split", 0.5, "--data", flat], "outside of a folder of their class"),
        (run[0], ["--split", 0.5, "--data", one], "leaves no image to test on"),
        (run[0], ["--split", 0.5, "--data", single], "a score needs two"),
        (run[0], ["--split", 1.5], "between 0 and 1"),
        (tmp_path / "nothing", ["--split", 0.5], "python convert.py"),
        (tmp_path / "theirs.pth", ["--split", 0.5], "theirs.pth model.pth"),
    ):
        status = probe.main(command("knn", path, *changed))
        error = capsys.readouterr().err
        assert status in (1, 2) and error.count("\n") == 1, error
        assert words in error, error


# --- the picture


def columns(pixels: torch.Tensor, prediction: torch.Tensor | None, norm_pix: bool = False):
    """The columns, for a prediction or the right one, and where patches are removed (as pixels)."""
    stats = data.IMAGENET
    if pixels.dtype != torch.uint8:
        channels = pixels.shape[1]
        stats = data.ChannelStats((0.3,) * channels, (2.0,) * channels, "float32")
    removed = (torch.arange(16).expand(2, -1) % 5 > 0).float()
    if prediction is None:
        prediction = vit.patchify(data.normalize(pixels, stats), 8)
    about = probe.Pretrained(NANO, 32, norm_pix, 0.75, stats, {}, 0)
    shown = probe.draw_panels(about, pixels, prediction, removed)
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


def test_a_removed_patch_gets_the_mean_of_visible_ones_by_their_distance():
    target = torch.randn(1, 16, 192)
    removed = torch.ones(1, 16)
    removed[0, [0, 15]] = 0
    rows, places = np.divmod(np.arange(16), 4)
    distance = np.hypot(rows[:, None] - rows[[0, 15]], places[:, None] - places[[0, 15]])
    share = np.maximum(distance, 1) ** -4.0
    share[[0, 15]] = np.eye(2)
    share = torch.tensor(share / share.sum(1, keepdims=True), dtype=torch.float32)  # (16, 2)
    filled = probe.fill_from_visible(target, removed)
    torch.testing.assert_close(filled[0], share @ target[0, [0, 15]])


def test_the_picture_has_the_psnr_of_the_model_and_of_interpolation(run, tmp_path, capsys):
    out = tmp_path / "picture.png"
    line = ["reconstruct", str(run[0]), "--data", str(TILES / "heldout"), "--images", "4"]
    assert probe.main([*line, "--seed", "7", "--out", str(out)]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    paths = sorted((TILES / "heldout").glob("*/*.jpg"))[::16]
    model = probe.build_model(probe.read_pretrained(run[0]), CPU, None)
    pixels = torch.stack([centre(path) for path in paths])
    noise = [data.draw_augmentation(7, i, 16, 256, 256)[0] for i in (0, 16, 32, 48)]
    with torch.no_grad():
        loss, _, _ = model(data.normalize(pixels), 0.5, torch.stack(noise))  # as in pretraining
    assert float(first.split()[-1]) == pytest.approx(loss.item(), abs=0.02)
    panels = np.asarray(Image.open(out))[16::8, 16::8].astype(float)  # 8 pixels for one, 16 between
    original, interpolated, filled = (panels[:32, 34 * i : 34 * i + 32] for i in (0, 2, 3))
    errors = [np.mean((x - original) ** 2) for x in (filled, interpolated)]
    by_hand = [f"{20 * np.log10(255 / np.sqrt(error)):.2f} dB" for error in errors]
    assert rows[0].strip() == f"PSNR {by_hand[0]}, interpolation {by_hand[1]}  {paths[0]}"
    means = np.array([[float(row.split()[i]) for i in (1, 4)] for row in rows])
    assert len(rows) == 5 and np.allclose(means[:4].mean(axis=0), means[4], atol=0.01)


def test_errors_leave_the_picture_before(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad").mkdir()
    Path("bad/a.jpg").write_bytes(b"no image")
    Path("reconstruct.png").write_bytes(b"before")
    line = ["reconstruct", str(run[0]), "--data", str(TILES / "heldout")]

    def refused(argv: list[str], words: str, status: int = 2) -> None:
        assert probe.main(argv) == status
        error = capsys.readouterr().err
        assert error.startswith("probe.py: error: ") and words in error and error.count("\n") == 1
        assert Path("reconstruct.png").read_bytes() == b"before" and len([*tmp_path.iterdir()]) == 2

    refused([*line[:3], "bad"], "images in a row could not be read", status=1)
    with files_limited(10_000):  # as on a full disk
        refused(line, "File too large", status=1)
    encoder = replace(probe.read_pretrained(run[0]), weights={})
    monkeypatch.setattr(probe, "read_pretrained", lambda path: encoder)
    refused(line, "an encoder without a decoder")
