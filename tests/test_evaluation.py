"""--eval-data: one number for any mode and number of ranks, and a training that does not notice."""

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from ranks import NANO, NANO_ARGV, Run, main_with_signals, read_records, run_ranks

import checkpoint
import data
import train_fsdp
import vit

TILES = ROOT / "examples" / "tiles"
ARGV = [*NANO_ARGV, "--global-batch", "12", "--blr", "0.01", "--steps", "2", "--save-every", "1"]
ARGV += ["--log-every", "1", "--warmup-steps", "0"]
MODES = [  # where parameters stay gathered between two forward passes, and where they do not
    (2, "shard_grad_op --fsdp 1"),
    (2, "full_shard --exact-decode --no-norm-pix-loss"),
]
MORE = [
    *((2, mode) for mode in ("zero1", "no_shard", "hybrid", "full_shard --fsdp 1")),
    (3, "full_shard --forward-prefetch --ac full"),
    (2, "ddp --compile --accum 2"),
    (2, "shard_grad_op --workers 1"),
    (1, "ddp"),
    (1, "ddp --exact-decode --no-norm-pix-loss"),
]


@pytest.fixture(autouse=True)
def nano(monkeypatch):
    monkeypatch.setitem(vit.MODELS, "nano", NANO)


def held_out(folder: Path, count: int = 14, broken: Sequence[int] = (3,)) -> list[str]:
    """--eval-data with so many images, of which these cannot be read."""
    (folder / "held").mkdir()
    tiles = sorted((TILES / "heldout").glob("*/*.jpg"))
    for i in range(count):
        if i in broken:
            (folder / "held" / f"{i:02d}-broken.jpg").write_bytes(b"no image")
        else:
            shutil.copy(tiles[2 * i], folder / "held" / f"{i:02d}.jpg")
    return ["--eval-data", str(folder / "held")]


LOSSES = ("eval_loss", "loss_of_zero", "loss_of_mean_colour")


def evaluations(log: Path) -> list[tuple[int, tuple[float, ...], int]]:
    """(step, losses of the model, of zero and of the mean colour, images) of each."""
    found = read_records(log, "eval")
    return [(r["step"], tuple(r[key] for key in LOSSES), r["images"]) for r in found]


def guessed(image: np.ndarray, noise: np.ndarray, norm_pix: bool) -> tuple[float, float]:
    """The losses of zero and of the mean colour for an image (3, 32, 32) of 16 patches."""
    patches = image.reshape(3, 4, 8, 4, 8).transpose(1, 3, 2, 4, 0).reshape(16, 192)
    if norm_pix:
        patches = patches - patches.mean(1, keepdims=True)
        patches /= np.sqrt((patches**2).sum(1, keepdims=True) / 191 + 1e-6)
    pixels = patches.reshape(16, 64, 3)
    order = noise.argsort()
    hidden = pixels[order[4:]]
    colour = pixels[order[:4]].mean((0, 1))
    return float((hidden**2).mean()), float(((hidden - colour) ** 2).mean())


@torch.no_grad()
def by_hand(step: Path, folder: Path, exact: bool = False) -> tuple[float, ...]:
    """The loss of vit.ViTMAE on one image after the other, each with its mask; of the guesses."""
    weights, facts = checkpoint.read_weights(step)
    model = vit.ViTMAE(NANO, 32, facts["run_state"]["flags"]["norm_pix_loss"])
    model.load_state_dict(weights)
    files = data.scan(str(folder))
    order = data.ImageOrder(len(files), len(files), 0)
    images = data.Images(files, order, 32, 16, exact, augment=False)
    losses = []
    for i in range(len(files)):
        if "broken" not in files.name(i):
            loaded, noise = images.load(i, i)
            pixels = data.normalize(loaded[None])
            own, _, _ = model(pixels, 0.75, noise[None])
            guesses = guessed(pixels[0].numpy(), noise.numpy(), model.norm_pix_loss)
            losses.append((own.item(), *guesses))
    return tuple(np.mean(losses, axis=0))


def compare(cases: list[tuple[int, str]], folder: Path) -> None:
    """Every case logs the numbers of a single process by hand, and trains as it would without."""
    given = held_out(folder)  # 13 good ones: no multiple of any batch here
    for world in {world for world, _ in cases}:
        modes = [["--mode", *mode.split()] for size, mode in cases if size == world]
        outs = [folder / f"{world}-{i}" for i in range(len(modes))]
        watched = [
            Run([*ARGV, *mode, *given], to=str(out)) for mode, out in zip(modes, outs, strict=True)
        ]
        alone = [Run([*ARGV, *mode]) for mode in modes]
        results = run_ranks(world, watched + alone, folder / str(world))
        for i, (mode, out) in enumerate(zip(modes, outs, strict=True)):
            with_it, without = results[i], results[i + len(modes)]
            assert not any(with_it.status) and not any(without.status), with_it.errors
            found = evaluations(out / "log.jsonl")
            assert [(step, images) for step, _, images in found] == [(1, 13), (2, 13)]
            for step, losses, _ in found:
                exact = "--exact-decode" in mode
                expected = by_hand(out / f"step_{step:08d}", folder / "held", exact)
                assert losses == pytest.approx(expected, abs=1e-6), (world, mode)
            for left, right in zip(with_it.steps, without.steps, strict=True):
                assert (left["loss"], left["grad_norm"]) == (right["loss"], right["grad_norm"])
            torch.testing.assert_close(with_it.params, without.params, rtol=0, atol=0)
            assert "03-broken.jpg" in with_it.output and "13 of 14 images" in with_it.output


def test_the_loss_is_that_of_one_process_by_hand_and_training_does_not_notice(tmp_path):
    compare(MODES, tmp_path)


@pytest.mark.full
def test_in_every_mode(tmp_path):
    compare(MORE, tmp_path)


def test_held_out_images_that_cannot_be_read_end_no_run(tmp_path, capsys):
    line = [*ARGV, *held_out(tmp_path, 18, range(18)), "--out", str(tmp_path / "out")]
    assert train_fsdp.main(line) == 0
    assert "held-out images cannot be read, such as" in capsys.readouterr().out
    assert evaluations(tmp_path / "out" / "log.jsonl") == []


def test_a_run_that_is_asked_to_stop_leaves_without_evaluating(tmp_path):
    argv = [*ARGV, *held_out(tmp_path), "--out", str(tmp_path / "out")]
    assert main_with_signals(argv, [signal.SIGTERM]) == 0
    assert evaluations(tmp_path / "out" / "log.jsonl") == []
    assert train_fsdp.main(argv) == 0
    assert [step for step, *_ in evaluations(tmp_path / "out" / "log.jsonl")] == [2]
