"""--eval-data: one number for any mode and number of ranks, and a training that does not notice."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from ranks import NANO, Result, Run, environment, run_ranks

import data
import train_fsdp
import vit
from downstream.images import EvalImages, fixed_noise
from downstream.pretrained import build_pretrained, read_pretrained
from runtime.evaluation import Evaluation
from runtime.session import Session

TILES = ROOT / "examples" / "tiles"
ARGV = ["--model", "nano", "--img-size", "32", "--data", str(TILES / "train"), "--blr", "0.01"]
ARGV += ["--global-batch", "12", "--workers", "0", "--precision", "fp32", "--device", "cpu"]
ARGV += ["--steps", "3", "--save-every", "1", "--log-every", "1", "--warmup-steps", "0"]
FSDP1 = ["--fsdp", "1"]
MODES = [  # where parameters stay gathered between two forward passes, and where they do not
    (2, ["--mode", "shard_grad_op", *FSDP1]),
    (2, ["--mode", "full_shard"]),
]
UNSHARDED = ("ddp", "zero1", "no_shard")
SHARDED = ("hybrid", "hybrid_grad_op", "full_shard")
MORE = [
    (2, ["--mode", "shard_grad_op"]),
    *((2, ["--mode", mode]) for mode in (*UNSHARDED, *SHARDED)),
    (3, ["--mode", "full_shard"]),
    *((2, ["--mode", mode, *FSDP1]) for mode in ("no_shard", *SHARDED)),
    (3, ["--mode", "shard_grad_op", *FSDP1]),
    (2, ["--mode", "full_shard", "--forward-prefetch", "--ac", "full"]),
    (2, ["--mode", "full_shard", *FSDP1, "--forward-prefetch", "--ac", "selective"]),
    (2, ["--mode", "shard_grad_op", "--compile"]),
    (2, ["--mode", "ddp", "--compile", "--accum", "2"]),
    (2, ["--mode", "shard_grad_op", "--workers", "1", "--async-save"]),
]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """No launcher's variables from the shell that runs the tests; `nano` is known here too."""
    for name in environment(0, 1, 0):
        if name.startswith(("RANK", "WORLD", "LOCAL", "MASTER")):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(vit.MODELS, "nano", NANO)


def held_out(folder: Path) -> list[str]:
    """--eval-data with 13 images, no multiple of any batch here, and one that cannot be read."""
    (folder / "held" / "out").mkdir(parents=True)
    for i, tile in enumerate(sorted((TILES / "heldout").glob("*/*.jpg"))[::5]):
        shutil.copy(tile, folder / "held" / "out" / f"{i:02d}.jpg")
    (folder / "held" / "broken.jpg").write_bytes(b"no image")
    return ["--eval-data", str(folder / "held")]


def evaluations(log: Path) -> list[tuple[int, float, int]]:
    """(step, loss, images) of each."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [(r["step"], r["eval_loss"], r["images"]) for r in records if r["event"] == "eval"]


def by_hand(checkpoint: Path, folder: Path) -> float:
    """The loss of vit.ViTMAE on one image after the other, each with its mask."""
    model = build_pretrained(read_pretrained(checkpoint), torch.device("cpu"))
    files, losses = data.scan(str(folder)), []
    for i in range(len(files)):
        if "broken" not in files.names[i]:
            pixels = EvalImages(files, 32, data.IMAGENET).load(i)[None]
            with torch.no_grad():
                noise = fixed_noise(0, [i], 16)
                losses.append(model(data.normalize(pixels), 0.75, noise)[0].item())
    return float(np.mean(losses))


def compare(cases: list[tuple[int, list[str]]], folder: Path) -> None:
    """Every case logs the numbers of a single process by hand, and trains as it would without."""
    given = held_out(folder)
    for world in {world for world, _ in cases}:
        chosen = [argv for size, argv in cases if size == world]
        runs = [Run([*ARGV, *argv, *more]) for argv in chosen for more in (given, [])]
        results: list[Result] = run_ranks(world, runs, folder / str(world))
        for i, argv in enumerate(chosen):
            watched, alone = results[2 * i : 2 * i + 2]
            assert watched.status == alone.status == [0] * world, watched.errors
            out = folder / str(world) / str(2 * i)
            found = evaluations(out / "log.jsonl")
            assert [(step, images) for step, _, images in found] == [(1, 13), (2, 13), (3, 13)]
            for step, loss, _ in found[1:]:  # --keep 2
                expected = by_hand(out / f"step_{step:08d}", folder / "held")
                assert loss == pytest.approx(expected, abs=1e-6), (world, argv)
            for left, right in zip(watched.steps, alone.steps, strict=True):
                assert (left["loss"], left["grad_norm"]) == (right["loss"], right["grad_norm"])
            assert watched.params.keys() == alone.params.keys() and watched.params
            for name, p in watched.params.items():
                assert torch.equal(p, alone.params[name]), (world, argv, name)
            assert "1 unreadable images left out" in watched.output
            assert "broken.jpg" in watched.output and "eval" not in alone.output


def test_the_loss_is_that_of_one_process_by_hand_and_training_does_not_notice(tmp_path):
    compare(MODES, tmp_path)


@pytest.mark.full
def test_in_every_mode(tmp_path):
    compare(MORE, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("argv", [["--mode", "ddp"], ["--mode", "full_shard"]])
def test_bf16_is_near(argv, tmp_path):
    line = [*ARGV, *held_out(tmp_path), "--precision", "bf16", *argv]
    run_ranks(2, [Run(line)], tmp_path / "ranks")
    for step, loss, _ in evaluations(tmp_path / "ranks" / "0" / "log.jsonl")[1:]:
        folder = tmp_path / "ranks" / "0" / f"step_{step:08d}"
        assert loss == pytest.approx(by_hand(folder, tmp_path / "held"), abs=0.01)


def test_a_signal_ends_an_evaluation_and_the_run_is_saved(tmp_path, monkeypatch, capsys):
    received: list[int] = []
    forward, phases, beat = Evaluation.forward, [], Session.heartbeat

    def signalled(self, batch):
        received.append(15)
        return forward(self, batch)

    def heartbeat(self, phase, step=None):
        phases.append(phase)
        beat(self, phase, step)

    monkeypatch.setattr(Evaluation, "forward", signalled)
    monkeypatch.setattr(Session, "heartbeat", heartbeat)
    line = [*ARGV, *held_out(tmp_path), "--out", str(tmp_path / "out"), "--steps", "9"]
    assert train_fsdp.main(line, received) == 0
    printed = capsys.readouterr().out
    assert "evaluation left out: a signal" in printed
    assert not evaluations(tmp_path / "out" / "log.jsonl")
    assert phases.count("evaluating") == 3 and len(received) == 1
    last = json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[-1])
    assert last["reason"] == "signal" and last["steps"] == 2
    assert (tmp_path / "out" / "step_00000002").exists()


def test_the_picture_the_clock_and_tensorboard(tmp_path, monkeypatch):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    call, clock, taken = Evaluation.__call__, time.perf_counter, 0.0

    def slowly(self, step):
        nonlocal taken
        taken += 1e6
        call(self, step)

    monkeypatch.setattr(Evaluation, "__call__", slowly)
    later = SimpleNamespace(perf_counter=lambda: clock() + taken)
    monkeypatch.setattr("runtime.log.time", later)
    out = tmp_path / "out"
    line = [*ARGV, *held_out(tmp_path), "--out", str(out), "--steps", "2", "--tensorboard"]
    assert train_fsdp.main([*line, "--save-every", "1"]) == 0
    records = [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()]
    assert all(r["step_seconds"] < 1e5 for r in records if r["event"] == "step")
    pictures = sorted((out / "eval").glob("*.png"))
    assert [path.name for path in pictures] == ["step_00000001.png", "step_00000002.png"]
    picture = Image.open(pictures[1])
    assert picture.height > 8 * 160
    read = reader.EventAccumulator(str(out / "tensorboard" / "real"), {"scalars": 0, "images": 0})
    read.Reload()
    found = [(s.step, s.value) for s in read.Scalars("eval/eval_loss")]
    expected = evaluations(out / "log.jsonl")
    assert found == [(step, float(np.float32(loss))) for step, loss, _ in expected]
    shown = read.Images("eval/picture")
    assert [s.step for s in shown] == [1, 2]
    assert (shown[1].width, shown[1].height) == picture.size


def test_a_wrong_folder_is_refused_before_anything_starts(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    line = [*ARGV, "--out", str(tmp_path / "out")]
    for name, words in (("nowhere", "give --eval-data the folder"), ("empty", "no images found")):
        assert train_fsdp.main([*line, "--eval-data", str(tmp_path / name)]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("train_fsdp.py: error: ") and words in printed.err
        assert printed.err.count("\n") == 1 and not printed.out
        assert not (tmp_path / "out").exists()
    monkeypatch.setattr("runtime.config.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as refused:
        train_fsdp.main([*line, "--eval-data", str(tmp_path)])
    assert refused.value.code == 2 and "copy the folder too" in capsys.readouterr().err
