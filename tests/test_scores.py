"""probe.py knn and linear: equal to scikit-learn, on any number of ranks, beside both baselines."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from ranks import NANO, Run, on_ranks, run_ranks
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import top_k_accuracy_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from test_pretrained import ARGV, run  # noqa: F401 # run is a fixture
from torch.nn import functional as F

import data
import probe
import vit
from downstream import features, knn, linear, scores
from downstream.weights import build_pretrained, random_weights, read_pretrained

CPU = torch.device("cpu")
TILES = ROOT / "examples" / "tiles"


def clusters(rows: int, classes: int, width: int, noise: float, seed: int):
    """Features (N, D) around one point per class, and their labels."""
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    labels = draw.integers(classes, size=rows)
    values = centres[labels] + noise * draw.normal(size=(rows, width))
    return values.astype(np.float32), labels


# --- k nearest neighbours


@pytest.mark.parametrize("blocks", [(16384, 16384), (300, 70)], ids=["whole", "blocks"])
def test_knn_equals_scikit_learn(blocks, monkeypatch):
    monkeypatch.setattr(knn, "STEP", blocks[1])
    monkeypatch.setattr(knn, "BANK", blocks[0])
    monkeypatch.setattr(knn, "QUERIES", blocks[1])
    (bank, labels), (queries, _) = clusters(2000, 7, 24, 1.5, 1), clusters(500, 7, 24, 1.5, 2)
    for k in (1, 20):
        similarity, index = knn.nearest(bank, queries, k)
        assert (similarity.diff(dim=1) <= 0).all()
        for name, weights in (
            ("majority", "uniform"),
            ("weighted", lambda distance: np.exp((1 - distance) / 0.07)),
        ):
            theirs = KNeighborsClassifier(k, weights=weights, algorithm="brute", metric="cosine")
            theirs.fit(bank.astype(np.float64), labels)
            votes = knn.vote(similarity, torch.from_numpy(labels)[index], 7, name == "weighted")
            ours = votes.sort(dim=1, descending=True, stable=True).indices[:, 0]
            assert ours.tolist() == theirs.predict(queries).tolist()
            shares = votes.masked_fill(votes == -torch.inf, 0)
            shares /= shares.sum(dim=1, keepdim=True)
            np.testing.assert_allclose(shares, theirs.predict_proba(queries), atol=1e-4)
    assert 0.5 < (ours.numpy() == clusters(500, 7, 24, 1.5, 2)[1]).mean() < 0.99


def test_few_images_have_few_neighbours_and_equal_rows_do_not_stop_it():
    bank, queries = np.ones((3, 4), np.float32), np.zeros((2, 4), np.float32)
    similarity, index = knn.nearest(bank, queries, 20)
    assert similarity.tolist() == [[0.0] * 3] * 2 and sorted(index[0].tolist()) == [0, 1, 2]
    votes = knn.vote(similarity, torch.tensor([[2, 1, 2], [0, 0, 0]]), 4)
    assert votes.argmax(dim=1).tolist() == [2, 0] and votes[0, 0] == -torch.inf


MILLION = """
import resource, sys, time
import numpy as np
import torch
from downstream.features import Rows
from downstream.knn import nearest
torch.set_num_threads(2)
path, (rows, queries, width) = sys.argv[1], map(int, sys.argv[2:])
draw = np.random.default_rng(0)
with open(path, "wb") as file:
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(file, header)
    for first in range(0, rows, 10000):
        file.write(draw.standard_normal((min(10000, rows - first), width), np.float32).data)
started, used = time.monotonic(), time.process_time()
bank, some = Rows(path, np.arange(rows)), Rows(path, np.arange(queries))
similarity, index = nearest(bank, some, 20)
seconds, used = time.monotonic() - started, time.process_time() - used
kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert index[:, 0].tolist() == list(range(queries))  # each is its own neighbour
print(f"{seconds:.0f} s, {used:.0f} s of the cores, {kib / 2**20:.2f} GiB")
assert kib < 4 * 2**20
"""


@pytest.mark.full
def test_knn_of_a_million_features_needs_little_memory(tmp_path):
    """The time is printed: it depends on what else the machine does."""
    numbers = ("1000000", "10000", "1280")  # rows, queries, width
    done = subprocess.run(
        [sys.executable, "-c", MILLION, tmp_path / "f.npy", *numbers],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    (tmp_path / "f.npy").unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr


# --- the linear probe


@pytest.mark.parametrize("optimizer, epochs", [("lars", None), ("sgd", 90)])
def test_the_linear_probe_reaches_logistic_regression(optimizer, epochs):
    (x, y), (test, truth) = clusters(2000, 6, 32, 3.0, 3), clusters(4000, 6, 32, 3.0, 4)
    x, test = x * 50 + 1000, test * 50 + 1000  # BatchNorm makes the scale no matter
    scale = StandardScaler().fit(x)
    theirs = LogisticRegression(max_iter=1000).fit(scale.transform(x), y)
    expected = 100 * theirs.score(scale.transform(test), truth)
    predict = linear.train_linear(x, torch.from_numpy(y), 6, epochs=epochs, optimizer=optimizer)
    found = 100 * (predict(test).argmax(dim=1).numpy() == truth).mean()
    assert 60 < expected < 97 and abs(found - expected) <= 1, (found, expected)


def test_batches_cover_the_set_and_a_seed_decides_everything():
    x, y = clusters(300, 3, 8, 1.0, 5)
    train = lambda seed: linear.train_linear(  # noqa: E731
        x, torch.from_numpy(y), 3, epochs=20, batch=64, optimizer="sgd", seed=seed
    )(x)
    first = train(0)
    assert torch.equal(first, train(0)) and not torch.equal(first, train(1))
    assert (first.argmax(dim=1).numpy() == y).mean() > 0.9


def test_lars_is_the_formula_and_its_rate_warms_up():
    w, b = (torch.nn.Parameter(torch.rand(shape) + 0.5) for shape in ((2, 3), (2,)))
    start = w.detach().clone(), b.detach().clone()
    optimizer = linear.LARS([w, b], lr=0.5)
    grads = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([1.0, 2])
    velocity = [0.0, 0.0]
    for _ in range(2):
        w.grad, b.grad = (g.clone() for g in grads)
        ratio = 0.001 * start[0].norm() / grads[0].norm()
        velocity = [0.9 * velocity[0] + ratio * grads[0], 0.9 * velocity[1] + grads[1]]
        start = start[0] - 0.5 * velocity[0], start[1] - 0.5 * velocity[1]
        optimizer.step()
        torch.testing.assert_close((w.detach(), b.detach()), start)
    rates = [linear.rate_at(step, 90, 2.0) for step in range(90)]
    assert rates[0] == 0.2 and rates[9] == rates[10] == 2.0 and 0 < rates[-1] < 0.01
    assert rates[50] == pytest.approx(1.0)


# --- what is scored


def test_a_split_takes_a_share_of_each_class_by_its_seed():
    labels = np.repeat([0, 1, 2, -1], [50, 20, 2, 5])
    train, test = scores.split_per_class(labels, 0.1, 0)
    assert np.bincount(labels[train]).tolist() == [5, 2, 1]
    assert sorted([*train, *test]) == list(range(72))
    assert not np.array_equal(train, scores.split_per_class(labels, 0.1, 1)[0])
    assert np.array_equal(train, scores.split_per_class(labels, 0.1, 0)[0])


def test_scores_are_those_of_scikit_learn_and_no_vote_is_no_hit():
    draw = np.random.default_rng(0)
    values, truth = draw.normal(size=(200, 9)), draw.integers(9, size=200)
    names = [f"c{i}" for i in range(9)]
    found = scores.measure("x", 0, torch.from_numpy(values), torch.from_numpy(truth), names)
    for key, k in (("top1", 1), ("top5", 5)):
        assert getattr(found, key) == pytest.approx(100 * top_k_accuracy_score(truth, values, k=k))
        own = truth == 4
        expected = top_k_accuracy_score(truth[own], values[own], k=k, labels=range(9))
        assert found.classes["c4"][key] == pytest.approx(100 * expected)
    assert found.classes["c4"]["images"] == own.sum()
    nothing = torch.full((1, 9), -torch.inf)
    assert scores.measure("x", 0, nothing, torch.tensor([0]), names).top5 == 0


# --- the command


def command(name: str, path: Path, out: Path, *more: str) -> list[str]:
    argv = [name, str(path), "--data", str(TILES / "train"), "--out", str(out)]
    return [*argv, "--device", "cpu", "--workers", "0", *more]


def table(out: Path, name: str = "knn") -> dict:
    return json.loads((out / f"{name}.json").read_text())


HELD = ["--test", str(TILES / "heldout")]


def test_scores_stand_beside_both_baselines(run, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "out"
    assert probe.main(command("knn", run[0], out, *HELD, "--features", "mean", "--seeds", "2")) == 0
    printed = capsys.readouterr().out
    found = table(out)
    assert found["step"] == 2 and [(s["source"], s["seed"]) for s in found["scores"]] == [
        (source, seed) for seed in (0, 1) for source in ("trained", "random weights", "raw pixels")
    ]
    for source, mean in found["mean"].items():
        assert any(source in ln and f"{mean['top1']:.1f}" in ln for ln in printed.splitlines())
    rows = [*csv.DictReader((out / "knn.csv").open())]
    assert len(rows) == 6 * (1 + 8) and {row["class"] for row in rows} >= {"desert", "all classes"}
    # by hand, with scikit-learn
    pretrained = read_pretrained(run[0])
    expected = {"trained": [], "random weights": [], "raw pixels": []}
    labels = []
    for folder in ("train", "heldout"):
        files = data.scan(str(TILES / folder))
        loader = features.open_eval_loader(files, 32, 50, 0)
        pixels = data.normalize(torch.cat([batch.images for batch in loader]))
        labels.append(files.labels)
        expected["raw pixels"].append(F.avg_pool2d(pixels, 2).flatten(1).numpy())
        for name, weights in (
            ("trained", pretrained),
            ("random weights", random_weights(pretrained, 1)),
        ):
            model = build_pretrained(weights, CPU)
            states = []
            hook = model.norm.register_forward_hook(lambda *a, to=states: to.append(a[2].detach()))
            model(pixels, mask_ratio=0.0, noise=torch.arange(16.0).expand(len(pixels), -1))
            hook.remove()
            expected[name].append(states[0][:, 1:].mean(dim=1).numpy())
    for score in found["scores"][3:]:  # of seed 1
        theirs = KNeighborsClassifier(
            20, weights=lambda d: np.exp((1 - d) / 0.07), algorithm="brute", metric="cosine"
        ).fit(expected[score["source"]][0].astype(np.float64), labels[0])
        hits = theirs.predict(expected[score["source"]][1].astype(np.float64)) == labels[1]
        assert score["top1"] == pytest.approx(100 * hits.mean(), abs=1.6), score  # an image


def test_features_are_kept_until_something_changes(run, tmp_path, monkeypatch):  # noqa: F811
    tiles, out = shutil.copytree(TILES / "heldout", tmp_path / "tiles"), tmp_path / "out"
    argv = ["knn", str(run[0]), "--data", str(tiles), "--split", "0.5", "--device", "cpu"]
    argv += ["--workers", "0", "--out", str(out)]
    loaded = []

    def counting(*args, **kwargs):
        loaded.append(1)
        return real(*args, **kwargs)

    real = features.open_eval_loader
    monkeypatch.setattr(features, "open_eval_loader", counting)

    def loads(*more: str) -> int:
        loaded.clear()
        assert probe.main([*argv, *more]) == 0
        return len(loaded)

    assert loads() == 3 and loads() == 0
    first = table(out)
    kept = sorted((out / "features").glob("*.npy"))
    assert len(kept) == 3 and len([*(out / "features").iterdir()]) == 6
    assert loads("--features", "mean") == 3 and loads("--grey") == 3
    kept[0].write_bytes(kept[0].read_bytes()[:-4])  # half written
    kept[1].with_suffix(".json").unlink()
    assert loads() == 2 and table(out) == first
    assert loads("--seeds", "2") == 1
    os.utime(next(tiles.glob("desert/*")), (1, 1))
    assert loads() == 3 and table(out) == first
    argv[1] += "/step_00000001"
    assert loads() == 1 and table(out)["step"] == 1


def test_an_unreadable_image_is_left_out_and_bad_input_is_one_sentence(run, tmp_path, capsys):  # noqa: F811
    tiles, out = shutil.copytree(TILES / "heldout", tmp_path / "tiles"), tmp_path / "out"
    first, *_, last = sorted(tiles.glob("*/*.jpg"))
    for path in (first, last):
        path.write_bytes(b"nothing")
    argv = ["knn", str(run[0]), "--data", str(tiles), "--device", "cpu", "--workers", "0"]
    argv += ["--out", str(out)]
    assert probe.main([*argv, "--split", "0.5", "--k", "3"]) == 0
    assert f"{last} is left out" in capsys.readouterr().out
    counted = table(out)["scores"][0]["classes"].values()
    assert sum(row["images"] for row in counted) == 64 - 2 - 32
    (tiles / "else").mkdir()
    shutil.copy(next(TILES.glob("train/ice/*")), tiles / "else")
    for more, wanted in (
        (["--split", "0.5"], "single image"),
        (["--test", str(tmp_path / "nowhere")], "give --test the folder"),
        (["--split", "0.5", "--img-size", "33"], "multiple of the patch size"),
    ):
        assert probe.main([*argv, *more]) == 1
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1 and wanted in error[0], error
    argv[argv.index("--data") + 1] = str(TILES / "train")
    assert probe.main([*argv, "--test", str(tiles)]) == 1
    assert "does not have: else" in capsys.readouterr().err
    flat = tmp_path / "flat"
    flat.mkdir()
    shutil.copy(next(TILES.glob("train/ice/*")), flat)
    argv[argv.index("--data") + 1] = str(flat)
    assert probe.main([*argv, "--split", "0.5"]) == 1
    assert "has no classes" in capsys.readouterr().err


def probe_here() -> int:
    """The command of $PROBE on this rank."""
    torch.set_num_threads(1)
    vit.MODELS["nano"] = NANO
    argv = json.loads(Path(os.environ["FOLDER"], "argv.json").read_text())
    return probe.main(argv)


def probe_on(world: int, argv: list[str], folder: Path) -> list[int]:
    folder.mkdir()
    (folder / "argv.json").write_text(json.dumps(argv))
    return on_ranks(world, probe_here, folder)


@pytest.mark.full
def test_two_ranks_give_the_score_of_one(run, tmp_path):  # noqa: F811
    """Of the same features, bit by bit."""
    pretrained = read_pretrained(run[0])
    tiles = shutil.copytree(TILES / "train", tmp_path / "tiles")
    sorted(tiles.glob("*/*.jpg"))[70].write_bytes(b"nothing")
    found = []
    for world in (1, 2):
        out = tmp_path / f"out{world}"
        argv = ["linear", pretrained.name, "--data", str(tiles), "--split", "0.5", "--epochs", "40"]
        argv += ["--device", "cpu", "--workers", "0", "--out", str(out), "--batch", "32"]
        assert probe_on(world, argv, tmp_path / str(world)) == [0] * world
        files = {p.name: p.read_bytes() for p in (out / "features").glob("*.npy")}
        found.append((table(out, "linear"), files))
    assert found[0] == found[1] and len(found[0][1]) == 3
    argv[1] = str(tmp_path / "nowhere")
    assert probe_on(2, argv, tmp_path / "wrong") == [1, 1]


@pytest.mark.full
def test_a_model_of_eight_hybrid_ranks_is_scored_on_one_and_on_two(tmp_path):
    to = str(tmp_path / "out")
    argv = [*ARGV, "--mode", "hybrid", "--group", "2", "--steps", "2", "--save-every", "2"]
    argv[1] = "tiny"
    run_ranks(8, [Run(argv, to=to)], tmp_path / "ranks")
    found = []
    for world in (1, 2):
        for name in ("knn", "linear"):
            out = tmp_path / f"scores{world}"
            fewer = ["--epochs", "40"] if name == "linear" else []  # the default takes minutes
            argv = command(name, Path(to), out, *HELD, *fewer)
            assert probe_on(world, argv, tmp_path / f"{name}{world}") == [0] * world
            found.append(table(out, name))
    assert found[:2] == found[2:]
