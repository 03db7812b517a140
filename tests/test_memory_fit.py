"""FITS, TIGHT or NO: at the start, by the dry run, and when memory has run out."""

import re
from unittest.mock import Mock

import pytest
import torch

import plan
import train_fsdp
from planner.estimate import Plan
from runtime import devices
from runtime.config import parse
from runtime.run import resolve, try_plan


@pytest.fixture(autouse=True)
def on_frontier(monkeypatch):
    """A GPU, if any, is Frontier's."""
    monkeypatch.setattr(torch.cuda, "get_device_name", Mock(return_value="AMD Instinct MI250X"))


def named(text: str) -> list[str]:
    """The changes that a sentence names."""
    found = re.search(r"what would fit: ([^;\n]+)", text)
    return found[1].split(", or ") if found else []


def plan_with(flags: str, change: str, world: int, gib: float) -> Plan:
    """The plan of a command and a change of it, by plan.py's parser."""
    _, found = plan.read_command(
        [*flags.split(), *change.split(), "--world-size", str(world), "--memory-gib", str(gib)]
    )
    return found


# flags, ranks, GiB, the flags that are named first
CASES: list[tuple[str, int, float, list[str]]] = [
    ("--model 15b --group 4 --batch 32", 512, 64, ["--batch", "--ac", "--mode"]),
    ("--model 3b --mode ddp --batch 16", 16, 48, ["--mode"]),
    ("--model base --batch 4096 --fsdp 1 --mode no_shard", 4, 40, ["--batch", "--ac"]),
    ("--model 15b --mode hybrid --group 2 --batch 64", 64, 24, []),  # none is enough by itself
]


@pytest.mark.parametrize(("flags", "world", "gib", "first"), CASES)
def test_what_is_named_fits_and_keeps_the_global_batch(flags, world, gib, first, monkeypatch):
    monkeypatch.setattr(devices, "rank_memory_gib", Mock(return_value=gib))
    config = parse([*flags.split(), "--device", "cuda", "--dry-run", "--world-size", str(world)])
    found = try_plan(resolve(config, world, 8), torch.device("cuda"), print)
    before = plan_with(flags, "", world, gib)
    assert found["verdict"] == before.verdict != "FITS" and found["fit"].startswith(before.fit)
    changes = named(found["fit"])
    assert [re.sub(" .*", "", change) for change in changes] == first, found["fit"]
    for change in changes:
        plan = plan_with(flags, change, world, gib)
        assert plan.verdict == "FITS", (change, plan.fit)
        assert plan.run.batch * plan.run.accum == before.run.batch * before.run.accum


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        ("--batch 2048", 3, "\nplan for frontier: NO: "),
        # a CPU's memory is the host's, which the loaders and other programs use too
        ("--batch 2048 --device cpu", 0, ""),
        ("--batch 8", 0, "\nplan for frontier: FITS: "),
    ],
)
def test_a_dry_run_ends_with_3_where_the_plan_says_no(flags, status, said, capsys):
    argv = ["--model", "huge", "--mode", "ddp", *flags.split(), "--out", "never-made"]
    assert train_fsdp.main([*argv, "--dry-run", "--world-size", "2"]) == status
    out = capsys.readouterr().out
    assert said in out and ("GiB at the peak" in out) == bool(said)


def test_out_of_memory_ends_with_what_would_fit(tmp_path, monkeypatch, capsys):
    """As on a GPU of 2.1 GiB; the change that is named is planned."""

    def full(*args, **asked):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 2.1 GiB "
            "of which 1.00 MiB is free. See documentation for Memory Management"
        )

    monkeypatch.setattr(train_fsdp, "train_step", full)
    monkeypatch.setattr(devices, "rank_memory_gib", Mock(return_value=2.1))
    flags = "--img-size 96 --batch 192 --precision bf16"
    argv = ["--model", "tiny", *flags.split(), "--device", "cpu", "--workers", "0", "--steps", "1"]
    status = train_fsdp.main([*argv, "--save-every", "none", "--out", str(tmp_path)])
    errors = capsys.readouterr().err
    # on a busy machine the watchdog says first that the batch of 192 images takes its time
    lines = [line for line in errors.splitlines() if "still reading" not in line]
    assert status == 1 and len(lines) == 1 and "Traceback" not in errors
    assert "rank 0 failed (training in step 1, " in errors
    assert "): out of memory; plan: NO: " in errors and "Tried to allocate 2.00 GiB" in errors
    assert named(errors)
    for change in named(errors):
        assert plan_with(f"--model tiny {flags}", change, 1, 2.1).verdict == "FITS", change
