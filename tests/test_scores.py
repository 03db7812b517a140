"""probe.py knn and linear: equal to scikit-learn, beside both baselines."""

import errno
import json
import math
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import top_k_accuracy_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch.nn import functional as F

import data
import probe
from downstream import scores
from runtime.eval_images import open_eval_loader
from runtime.pretrained import build_pretrained, random_weights, read_pretrained
from storage.image_list import ImageList

CPU = torch.device("cpu")
TILES = ROOT / "examples" / "tiles"


def clusters(rows: int, classes: int, width: int, noise: float, seed: int):
    """Features (N, D) fp32 around one point per class, and their labels."""
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    labels = draw.integers(classes, size=rows)
    values = centres[labels] + noise * draw.normal(size=(rows, width))
    return torch.from_numpy(values.astype(np.float32)), torch.from_numpy(labels)


# --- the two classifiers


def scikit_knn(k: int) -> KNeighborsClassifier:
    weights = lambda distance: np.exp((1 - distance) / 0.07)  # noqa: E731
    return KNeighborsClassifier(k, weights=weights, algorithm="brute", metric="cosine")


@pytest.mark.parametrize("at_a_time", [2**27, 10_000], ids=["whole", "blocks"])
@pytest.mark.parametrize("k", [1, 20])
def test_knn_equals_scikit_learn(at_a_time, k, monkeypatch):
    monkeypatch.setattr(scores, "SIMILARITIES", at_a_time)
    (bank, labels), (queries, truth) = clusters(2000, 7, 24, 1.5, 1), clusters(500, 7, 24, 1.5, 2)
    expected = scikit_knn(k).fit(bank.double(), labels).predict_proba(queries)
    votes = scores.nearest_vote(bank, labels, queries, 7, k).clamp(min=0)
    np.testing.assert_allclose(votes / votes.sum(dim=1, keepdim=True), expected, atol=1e-4)
    assert 0.5 < (votes.argmax(dim=1) == truth).double().mean() < 0.99


def test_few_images_have_few_neighbours_and_equal_rows_do_not_stop_it():
    bank, labels = torch.ones(3, 4), torch.tensor([2, 1, 2])
    votes = scores.nearest_vote(bank, labels, torch.zeros(2, 4), 4, k=20)
    assert votes.tolist() == [[-math.inf, 1.0, 2.0, -math.inf]] * 2


def test_the_linear_probe_reaches_logistic_regression():
    (x, y), (test, truth) = clusters(2000, 6, 32, 3.0, 3), clusters(4000, 6, 32, 3.0, 4)
    x, test = x * 50 + 1000, test * 50 + 1000  # BatchNorm makes the scale no matter
    scale = StandardScaler().fit(x)
    theirs = LogisticRegression(max_iter=1000).fit(scale.transform(x), y)
    expected = 100 * theirs.score(scale.transform(test), truth)
    model, _ = scores.train_linear(x, y, 6)
    found = 100 * (model(test).argmax(dim=1) == truth).double().mean()
    assert 60 < expected < 97 and abs(found - expected) <= 1, (found, expected)


def test_a_seed_decides_everything_and_too_few_steps_are_noticed():
    x, y = clusters(300, 3, 8, 1.0, 5)
    train = partial(scores.train_linear, x, y, 3, epochs=20, batch=64)
    (first, losses), (same, _), (other, _) = train(seed=0), train(seed=0), train(seed=1)
    assert torch.equal(first(x), same(x)) and not torch.equal(first(x), other(x))
    assert len(losses) == 20 * 4
    _, losses = scores.train_linear(x, y, 3, epochs=30)  # of one step: LARS has hardly begun
    assert not scores.has_converged(losses)
    assert scores.has_converged(torch.linspace(0, 30, 100).neg().exp())
    assert not scores.has_converged(torch.linspace(1, 2, 100))


@pytest.mark.parametrize("shape", [(2, 3), (2,)])  # a bias is trained as by SGD
def test_lars_is_the_formula(shape):
    p, grad = torch.nn.Parameter(torch.rand(shape) + 0.5), torch.rand(shape)
    expected, velocity = p.detach().clone(), 0
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.9)
    for _ in range(2):
        p.grad = grad.clone()
        ratio = 0.001 * expected.norm() / grad.norm() if len(shape) > 1 else 1
        velocity = 0.9 * velocity + ratio * grad
        expected = expected - 0.5 * velocity
        scores.scale_gradient(p)
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected)


def test_a_gradient_whose_norm_underflows_moves_nothing():
    p = torch.nn.Parameter(torch.ones(2, 3))
    p.grad = torch.full((2, 3), 1e-25)
    scores.scale_gradient(p)
    assert torch.equal(p - 0.5 * p.grad, torch.ones(2, 3))


# --- what is scored


def test_a_split_takes_a_share_of_each_class_by_its_seed():
    labels = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([50, 20, 2]))
    train, test = scores.split_per_class(labels, 0.1, 0)
    assert np.bincount(labels[train]).tolist() == [5, 2, 1]
    assert sorted([*train, *test]) == list(range(72))
    assert not np.array_equal(train, scores.split_per_class(labels, 0.1, 1)[0])
    assert np.array_equal(train, scores.split_per_class(labels, 0.1, 0)[0])


def test_scores_are_those_of_scikit_learn_and_no_vote_is_no_hit():
    draw = np.random.default_rng(0)
    values, truth = draw.normal(size=(200, 9)), draw.integers(9, size=200)
    found = scores.top_accuracies(torch.from_numpy(values), torch.from_numpy(truth))
    for key, k in (("top1", 1), ("top5", 5)):
        assert found[key] == pytest.approx(100 * top_k_accuracy_score(truth, values, k=k))
    nothing = torch.full((1, 9), -torch.inf)
    assert scores.top_accuracies(nothing, torch.tensor([0]))["top5"] == 0


# --- the command


SOURCES = ("trained", "random weights", "raw pixels")


def command(name: str, path: Path, *more: object) -> list[str]:
    argv = [name, path, "--data", TILES / "train", "--device", "cpu", "--workers", 0, *more]
    return [*map(str, argv)]


def table(out: Path, name: str = "knn") -> dict:
    return json.loads((out / f"{name}.json").read_text())


HELD = ("--test", TILES / "heldout")


def test_scores_stand_beside_both_baselines(run, tmp_path, capsys):
    more = *HELD, "--features", "mean", "--seeds", 2, "--out", tmp_path
    assert probe.main(command("knn", run[0], *more)) == 0
    printed, found = capsys.readouterr().out.splitlines(), table(tmp_path)
    order = [(s["source"], s["seed"]) for s in found["scores"]]
    assert found["step"] == 2 and sorted(order) == [
        (n, seed) for n in sorted(SOURCES) for seed in (0, 1)
    ]
    for source, mean in found["mean"].items():
        assert any(source in line and f"{mean['top1']:.1f}" in line for line in printed)
    # by hand, with scikit-learn
    pretrained, labels = read_pretrained(run[0]), []
    weights = pretrained, random_weights(pretrained, 1)
    expected = {name: [] for name in SOURCES}
    for folder in ("train", "heldout"):
        files = data.scan(str(TILES / folder))
        loader = open_eval_loader(files, 32, 50, 0)
        pixels = data.normalize(torch.cat([batch.images for batch in loader]))
        labels.append(files.labels)
        expected["raw pixels"].append(F.avg_pool2d(pixels, 2).flatten(1).numpy())
        for name, own in zip(SOURCES, weights, strict=False):
            tokens = build_pretrained(own, CPU).features(pixels).detach()
            expected[name].append(tokens[:, 1:].mean(dim=1).numpy())
    for score in [score for score in found["scores"] if score["seed"] == 1]:
        train, test = (rows.astype(np.float64) for rows in expected[score["source"]])
        hits = scikit_knn(20).fit(train, labels[0]).predict(test) == labels[1]
        assert score["top1"] == pytest.approx(100 * hits.mean(), abs=1.6), score  # an image


def test_how_a_linear_classifier_was_trained_stands_beside_its_score(run, tmp_path, capsys):
    argv = command("linear", run[0], *HELD, "--out", tmp_path)
    assert probe.main([*argv, "--epochs", "30"]) == 0
    assert "not converged: random weights, raw pixels, trained;" in capsys.readouterr().out
    assert probe.main([*argv, "--epochs", "1000", "--blr", "30"]) == 0
    printed, found = capsys.readouterr().out, table(tmp_path, "linear")
    assert "training top1" in printed and "trained; scores may" not in printed
    for source, mean in found["mean"].items():
        (line,) = (ln for ln in printed.splitlines() if ln.strip().startswith(source))
        assert f"{mean['training_top1']:.4g}" in line and f"{mean['training_loss']:.4g}" in line
        assert mean["training_top1"] > 90 and 0 <= mean["training_loss"] < 0.5


def test_an_unreadable_image_is_named_and_left_out(run, tmp_path, capsys):
    tiles, out = shutil.copytree(TILES / "heldout", tmp_path / "tiles"), tmp_path / "out"
    first, *_, last = sorted(tiles.glob("*/*.jpg"))
    for path in (first, last):
        path.write_bytes(b"nothing")
    argv = command("knn", run[0], "--data", tiles, "--split", 0.5, "--out", out)
    assert probe.main(argv) == 0
    printed = capsys.readouterr().out
    assert f"{first} is left out" in printed and f"{last} is left out" in printed
    assert table(out)["scores"][0]["test_images"] == 64 - 2 - 32
    for path in tiles.glob("*/*.jpg"):
        path.write_bytes(b"nothing")
    assert probe.main(argv) == 2
    assert "none of the 64 images" in capsys.readouterr().err


def test_what_is_wrong_is_one_sentence(run, tmp_path, capsys):
    more, flat = tmp_path / "more", tmp_path / "flat"
    shutil.copytree(TILES / "heldout", more / "tiles")
    one, single = tmp_path / "one", tmp_path / "single"
    for folder in (more / "else", flat, one / "ice", one / "sea", single / "ice"):
        folder.mkdir(parents=True)
        shutil.copy(next(TILES.glob("train/ice/*")), folder)
    (tmp_path / "a link").symlink_to(TILES / "train")
    shutil.copytree(TILES / "train", tmp_path / "a copy")
    weights = dict(read_pretrained(run[0]).weights)
    torch.save(weights | {"norm.bias": torch.full((40,), math.nan)}, tmp_path / "broken.pth")
    for path, changed, words in (
        (run[0], ["--test", more], "does not have: else"),
        (run[0], ["--test", tmp_path / "nowhere"], "give --test the folder"),
        (run[0], ["--test", TILES / "train"], "the model is trained: give other images"),
        (run[0], ["--test", tmp_path / "a link"], "the model is trained: give other images"),
        (run[0], ["--test", tmp_path / "a copy"], "the model is trained: give other images"),
        (run[0], ["--data", TILES, "--test", TILES / "heldout"], "the model is trained"),
        (run[0], ["--split", 0.5, "--img-size", 33], "multiple of the patch size"),
        (run[0], ["--split", 0.5, "--data", flat], "outside of a folder of their class"),
        (run[0], ["--split", 0.5, "--data", one], "leaves no image to test on"),
        (run[0], ["--split", 0.5, "--data", single], "a score needs two"),
        (tmp_path / "nothing", ["--split", 0.5], "give the --out of a run"),
        (tmp_path / "broken.pth", ["--split", 0.5], "norm.bias is not finite"),
    ):
        assert probe.main(command("knn", path, *changed)) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, error


def test_other_images_of_the_same_names_and_sizes_may_be_tested_on(run, tmp_path):
    folders = [tmp_path / name for name in ("train", "test")]
    for folder, shade in zip(folders, (0, 9), strict=True):
        for name in ("ice", "sea"):
            (folder / name).mkdir(parents=True)
            for i in range(3):
                pixels = np.full((32, 32, 3), 20 * i + shade, np.uint8)
                Image.fromarray(pixels).save(folder / name / f"{i}.bmp")
    sizes = [{path.stat().st_size for path in folder.rglob("*.bmp")} for folder in folders]
    assert sizes[0] == sizes[1] and len(sizes[0]) == 1
    flags = ["--data", folders[0], "--test", folders[1], "--k", 1, "--out", tmp_path / "out"]
    assert probe.main(command("knn", run[0], *flags)) == 0


def test_an_error_of_the_node_is_no_unreadable_image(run, tmp_path, monkeypatch, capsys):
    """Scores of those images alone that could be opened would be wrong."""
    read = ImageList.read

    def failing(files, index):
        if index >= 10:
            raise OSError(errno.EMFILE, "Too many open files")
        return read(files, index)

    monkeypatch.setattr(ImageList, "read", failing)
    assert probe.main(command("knn", run[0], *HELD, "--out", tmp_path)) == 1
    assert "Too many open files" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_classes_are_said_and_folders_that_look_like_none_are_warned_of(run, tmp_path, capsys):
    argv = command("knn", run[0], "--split", 0.5, "--out", tmp_path / "out")
    assert probe.main(argv) == 0
    printed = capsys.readouterr().out
    classes = data.scan(str(TILES / "train")).classes
    assert f"{len(classes)} classes of" in printed and classes[0] in printed
    assert "do not look like classes" not in printed
    for part, source in ("images", "ice"), ("masks", "desert"):
        shutil.copytree(TILES / "train" / source, tmp_path / "tree" / part)
    argv = command("knn", run[0], "--split", 0.5, "--data", tmp_path / "tree")
    assert probe.main([*argv, "--out", str(tmp_path / "out")]) == 0
    assert "images, masks do not look like classes" in capsys.readouterr().out
