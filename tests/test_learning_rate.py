"""--lr, --blr and --betas: what reaches the optimizer, and what is refused."""

import pytest
import torch

import mesh
import train_fsdp
from downstream.finetune import Tuning
from runtime.config import Config, fill_defaults, parse
from runtime.dry_run import fake_world
from runtime.image_source import ImageFacts
from runtime.run import Run, resolve, with_images

SMALL = ["--model", "tiny", "--img-size", "32", "--batch", "64", "--device", "cpu"]


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


@pytest.mark.parametrize("blr", ["1e-3", "1.5e-4"])  # its default too
def test_both_rates_are_refused_before_anything_starts(blr, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([*SMALL, "--lr", "1e-3", "--blr", blr])
    assert ended.value.code == 2
    assert "--blr and --lr: give one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["0.9", "0.9,1", "0.9,0.95,0.99", "a,b", "-0.1,0.9", "nan,0.9", ""]
)
def test_betas_that_adamw_does_not_take_are_refused(text, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([*SMALL, f"--betas={text}"])
    assert ended.value.code == 2
    assert "is not two numbers from 0 to below 1" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["ddp", "full_shard"])
def test_betas_reach_the_optimizer(mode):
    with fake_world(1):
        for flags, betas in ([], (0.9, 0.95)), (["--betas", "0.8,0.99"], (0.8, 0.99)):
            run = run_of("--mode", mode, *flags)
            grid = mesh.build_mesh(run.mesh_shape, torch.device("cpu"))
            groups = train_fsdp.build_training(run, grid).optimizer.param_groups
            assert {group["betas"] for group in groups} == {betas}


def test_fine_tuning_has_defaults_of_its_own():
    given = {"mode": "ddp", "global_batch": 64, "precision": "fp32"}
    tuning = fill_defaults(Tuning("tiny", 32, test="x", **given))
    assert (tuning.blr, tuning.betas) == (5e-4, (0.9, 0.999))
    assert resolve(tuning, 1, 1).peak_lr == pytest.approx(5e-4 * 64 / 256)
    assert fill_defaults(Config("tiny", 32, **given)).blr == 1.5e-4
