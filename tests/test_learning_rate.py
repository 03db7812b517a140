"""--lr, --blr and --betas: what reaches the optimizer."""

import pytest
import torch
from ranks import TINY_ARGV

import mesh
import train_fsdp
from downstream.finetune import Tuning
from runtime.config import fill_defaults, parse
from runtime.dry_run import fake_world
from runtime.image_source import ImageFacts
from runtime.run import Run, resolve, with_images

SMALL = [*TINY_ARGV, "--batch", "64"]


def run_of(*flags: str) -> Run:
    return with_images(resolve(parse([*SMALL, *flags]), 1, 1), ImageFacts(640))


@pytest.mark.parametrize(
    ("flags", "peak"),
    [
        ([], 1.5e-4 * 64 / 256),
        (["--blr", "1e-3"], 1e-3 * 64 / 256),
        (["--lr", "1e-3"], 1e-3),
        (["--lr", "1e-3", "--accum", "4"], 1e-3),  # whatever the global batch is
        (["--lr", "0"], 0.0),
    ],
)
def test_the_peak_of_the_schedule(flags, peak):
    run = run_of("--steps", "100", "--warmup-steps", "10", *flags)
    rates = [train_fsdp.learning_rate(step, run) for step in range(100)]
    assert max(rates) == pytest.approx(peak)
    assert run.record()["lr"] == (float(flags[1]) if "--lr" in flags else None)
    assert (run.record()["blr"] is None) == ("--lr" in flags)  # the log claims one of them


@pytest.mark.parametrize("mode", ["ddp", "full_shard"])
def test_betas_reach_the_optimizer(mode):
    with fake_world(1):
        for flags, betas in ([], (0.9, 0.95)), (["--betas", "0.8,0.99"], (0.8, 0.99)):
            run = run_of("--mode", mode, *flags)
            grid = mesh.build_mesh(run.mesh_shape, torch.device("cpu"))
            groups = train_fsdp.build_training(run, grid).optimizer.param_groups
            assert {group["betas"] for group in groups} == {betas}


@pytest.mark.parametrize("mode", ["ddp", "full_shard"])
def test_the_flags_of_a_resume_hold(mode, tmp_path, monkeypatch):
    """With --allow-changes, not what the checkpoint says: it holds the optimizer's settings."""
    seen = []
    train = train_fsdp.train

    def look(run, training, monitor):
        for group in training.optimizer.param_groups:
            seen.append((group["betas"], group["weight_decay"] > 0))
        return train(run, training, monitor)

    monkeypatch.setattr(train_fsdp, "train", look)
    argv = [*TINY_ARGV, "--mode", mode, "--global-batch", "4", "--out", str(tmp_path)]
    assert train_fsdp.main([*argv, "--steps", "1"]) == 0
    changes = ["--betas", "0.8,0.99", "--weight-decay", "0", "--allow-changes"]
    assert train_fsdp.main([*argv, "--steps", "2", *changes]) == 0
    assert seen == [((0.9, 0.95), True), ((0.9, 0.95), False)] + [((0.8, 0.99), False)] * 2


def test_fine_tuning_has_defaults_of_its_own():
    tuning = fill_defaults(
        Tuning("tiny", 32, test="x", mode="ddp", global_batch=64, precision="fp32")
    )
    assert (tuning.blr, tuning.betas) == (5e-4, (0.9, 0.999))
    assert resolve(tuning, 1, 1).peak_lr == pytest.approx(5e-4 * 64 / 256)
    assert parse(SMALL).blr == 1.5e-4
