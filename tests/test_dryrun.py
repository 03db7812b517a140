"""The dry run: what it refuses, as a real run does, what it prints, and how it ends."""

import re

import pytest
import torch.distributed as dist
from conftest import ROOT
from ranks import TINY_ARGV, status_of
from simulated import ROWS

import plan
import simulate
import train_fsdp

TILES = ROOT / "examples" / "tiles" / "train"
TINY = [*TINY_ARGV, "--batch", "2"]


@pytest.mark.parametrize(
    "flags",
    [
        "--fsdp 3",
        "--mode ddp --group 1",
        "--prefetch backward_post",
        "--data nowhere",
        f"--data {TILES} --batch 200",
        "--resume nothing-here",
    ],
)
def test_a_command_that_would_fail_fails_with_the_same_sentence(flags, tmp_path, capfd):
    def run(*more: str) -> tuple[int, str]:
        argv = [*TINY, *flags.split(), "--out", str(tmp_path / "out"), *more]
        return status_of(train_fsdp.main, argv), capfd.readouterr().err

    real = run()
    assert real[0] == 2 and real[1].count("\n") == 1
    assert run("--dry-run", "--world-size", "1") == real


def test_memory_is_planned_and_simulated(tmp_path, monkeypatch, capsys):
    """At the peak, with its parts, by either command. Other engines are only planned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_NTASKS", "4")  # a batch script may start it before srun, in a job
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    flags = "--model base:depth=2,decoder_depth=1 --batch 24 --mode hybrid --group 2 --accum 2"
    argv = [*flags.split(), "--data", str(TILES), "--compile", "--world-size", "4"]
    assert train_fsdp.main([*argv, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert plan.main([*argv, "--simulate"]) == 0
    assert capsys.readouterr().out == said
    assert list(tmp_path.iterdir()) == [] and not dist.is_initialized()
    row = r"one step of rank 0, (\w+): ([\d.]+) GiB at the peak \((.+)\)"
    found = re.findall(row, said)
    assert [how for how, _, _ in found] == ["simulated", "planned"]
    for (_, whole, parts), known in zip(found, (ROWS, ROWS.values()), strict=True):
        sizes = {part: float(size) for part, size in re.findall(r"(\w\D+) ([\d.]+)", parts)}
        assert {*sizes} <= {part for parts in known for part in parts}
        assert float(whole) == pytest.approx(sum(sizes.values()), abs=0.02)
    assert train_fsdp.main([*TINY, "--dry-run", "--mode", "ddp", "--world-size", "4"]) == 0
    assert "GiB at the peak (" not in capsys.readouterr().out.partition("step of rank 0")[2]


@pytest.mark.parametrize(
    ("flags", "status"),
    # a CPU's memory is the host's, which the loaders and other programs use too
    [("--batch 2048", 3), ("--batch 2048 --device cpu", 0), ("--batch 8", 0)],
)
def test_a_dry_run_ends_with_3_where_the_plan_says_no(flags, status, monkeypatch):
    monkeypatch.setattr(simulate, "simulate", lambda args: {})
    argv = ["--model", "huge", "--mode", "full_shard", *flags.split(), "--out", "never-made"]
    assert train_fsdp.main([*argv, "--dry-run", "--world-size", "2"]) == status


@pytest.mark.parametrize("given", [None, 4])
def test_nodes_are_those_of_the_job(given, monkeypatch):
    """launch_frontier.sh says how many ranks a node has; else it is the machine that does."""
    seen = []
    monkeypatch.setattr(simulate, "dry_run", lambda args, planned: seen.append((args, planned)))
    if given:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(given))
    train_fsdp.main(["--model", "3b", "--dry-run", "--world-size", "16"])
    ((args, planned),) = seen
    assert args.group == planned.machine.ranks_per_node == (given or 8)
    sent = planned.json()["traffic_bytes_per_rank"]
    assert sent["all_reduce"]["node"] == sent["all_gather"]["network"] == 0
