"""--lr, --blr and --betas: what reaches the optimizer."""

import argparse

import pytest
import torch
from ranks import TINY_ARGV

import run
import train_fsdp

SMALL = [*TINY_ARGV, "--batch", "64"]


def completed(*flags: str) -> argparse.Namespace:
    args = train_fsdp.parse_flags([*SMALL, *flags])
    train_fsdp.complete(args, 1, 1, "cpu")
    train_fsdp.count_steps(args, 640)
    return args


@pytest.mark.parametrize(
    ("flags", "peak"),
    [
        ([], 1.5e-4 * 64 / 256),
        (["--blr", "1e-3"], 1e-3 * 64 / 256),
        (["--lr", "1e-3"], 1e-3),
        (["--lr", "1e-3", "--accum", "4"], 1e-3),  # whatever the global batch is
    ],
)
def test_the_peak_of_the_schedule(flags, peak):
    args = completed("--steps", "100", "--warmup-steps", "10", *flags)
    rates = [train_fsdp.learning_rate(step, args) for step in range(100)]
    assert max(rates) == pytest.approx(peak) and rates[9] == rates[10]
    assert rates[0] == pytest.approx(peak / 10) and rates[-1] < peak / 100
    logged = run.record(args)
    assert logged["lr"] == (float(flags[1]) if "--lr" in flags else None)
    assert (logged["blr"] is None) == ("--lr" in flags)  # the log claims one of them


def test_steps_and_warm_up_follow_from_the_images():
    args = completed("--epochs", "3")
    assert (args.epoch_steps, args.steps, args.warmup_steps) == (10, 30, 1)
    assert completed().steps == 100
    args = completed("--steps", "5", "--warmup-steps", "5")  # the peak is the last step
    assert train_fsdp.learning_rate(4, args) == args.lr


@pytest.mark.parametrize("mode", ["ddp", "full_shard"])
def test_betas_reach_the_optimizer(mode, single):
    for flags, betas in ([], (0.9, 0.95)), (["--betas", "0.8,0.99"], (0.8, 0.99)):
        args = completed("--mode", mode, *flags)
        training = train_fsdp.build_training(args, torch.device("cpu"))
        assert {group["betas"] for group in training.optimizer.param_groups} == {betas}


@pytest.mark.parametrize("mode", ["ddp", "full_shard"])
def test_the_flags_of_a_resume_hold(mode, tmp_path, monkeypatch):
    """With --allow-changes, not what the checkpoint says: it holds the optimizer's settings."""
    seen = []
    train = train_fsdp.train

    def look(args, training, *given):
        for group in training.optimizer.param_groups:
            seen.append((group["betas"], group["weight_decay"] > 0))
        return train(args, training, *given)

    monkeypatch.setattr(train_fsdp, "train", look)
    argv = [*TINY_ARGV, "--mode", mode, "--global-batch", "4", "--out", str(tmp_path)]
    assert train_fsdp.main([*argv, "--steps", "1"]) == 0
    changes = ["--betas", "0.8,0.99", "--weight-decay", "0", "--allow-changes"]
    assert train_fsdp.main([*argv, "--steps", "2", *changes]) == 0
    assert seen == [((0.9, 0.95), True), ((0.9, 0.95), False)] + [((0.8, 0.99), False)] * 2
