"""The dry run against real runs, against arithmetic by hand, and what it refuses."""

import math
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from parity import TILES
from ranks import environment

import train_fsdp
import vit
from planner import dry_run, memory
from planner.traffic import PlannedRun, collectives

TINY = ["--model", "tiny", "--img-size", "32", "--batch", "2", "--device", "cpu", "--workers", "0"]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """No launcher's variables from the shell that runs the tests."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def dry(ranks: int, flags: str) -> int:
    """Start a dry run of the tiny model on so many ranks."""
    return train_fsdp.main(
        [*TINY, *flags.split(), "--dry-run", "--world-size", str(ranks), "--out", "never-made"]
    )


def simulated(ranks: int, flags: str, monkeypatch) -> tuple[dry_run.Simulation, PlannedRun]:
    """What a dry run found, and the same run for plan.py."""
    found = []
    simulate = dry_run.simulate

    def step(run, *parts):
        planned = PlannedRun.from_flags(run.model, run.record())
        found.append((simulate(run, *parts), planned))
        return found[-1][0]

    with monkeypatch.context() as patch:
        patch.setattr(dry_run, "simulate", step)
        assert dry(ranks, flags) == 0
    return found[0]


@pytest.mark.parametrize(
    "flags",
    [
        "--mode full_shard --accum 2 --ac full --reduce-dtype bf16 --prefetch none --clip 1",
        "--mode hybrid --group 2 --accum 2",
        *(
            pytest.param(f"--mode {flags}", marks=pytest.mark.full)
            for flags in (
                "shard_grad_op",
                "hybrid_grad_op --group 2",
                "no_shard --accum 2",
                "hybrid --group 2 --wrap root --ac full",
            )
        ),
    ],
)
def test_collectives_are_those_of_the_plan(flags, monkeypatch):
    """Which are those of a real run (test_plan.py). Left out are the norm and the vote."""
    simulation, run = simulated(4, flags, monkeypatch)
    sizes = {"shard": run.shard, "replicate": run.replicate, "world": 4}
    found = Counter(
        (c.kind, sizes[c.group], c.size)
        for c in simulation.collectives
        if c.size > 1000 and sizes[c.group] > 1
    )
    expected: Counter = Counter()
    for c in collectives(run):
        expected[c.kind, c.ranks, c.payload] += c.count
    assert found == expected


@pytest.mark.parametrize(
    ("ranks", "flags", "group"),
    [
        pytest.param(4, "--mode full_shard", 4, marks=pytest.mark.full),
        pytest.param(6, "--mode hybrid --group 3", 3, marks=pytest.mark.full),
        pytest.param(4, "--mode no_shard", 1, marks=pytest.mark.full),
        (64, "--mode hybrid --group 8 --accum 2", 8),
        (5, "--mode shard_grad_op --ac full", 5),
    ],
)
def test_what_a_rank_keeps_is_what_arithmetic_says(ranks, flags, group, monkeypatch):
    """fp32 parameters and gradients, two moments of AdamW: of the first of `group` shards."""
    shapes = [p.shape for p in vit.ViTMAE(vit.MODELS["tiny"], 32).parameters()]
    rows = [math.ceil(s[0] / group) * s[1:].numel() for s in shapes]  # FSDP2 cuts dimension 0
    s, _ = simulated(ranks, flags, monkeypatch)
    assert s.after["Sharded Param"] == s.peak["Sharded Param"] == 4 * sum(rows)
    assert s.after["Sharded Grad"] == 4 * sum(rows) >= s.peak["Sharded Grad"]
    assert s.after["OptState"] == s.peak["OptState"] == 8 * sum(rows) + 4 * len(rows)
    tables = 4 * (1 + 4 * 4) * (192 + 128)  # positions of 16 patches and cls, both widths
    assert s.after["Buffer"] == tables
    accum = 2 if "accum" in flags else 1
    assert s.after["Inputs"] == accum * 2 * (3 * 32 * 32 + 4 * 16)  # uint8 images, fp32 noise
    whole = [n for n in ("Unsharded Param", "All Gather", "Reduce Scatter") if s.after[n]]
    assert not whole and sum(s.after.values()) < sum(s.peak.values())
    assert {*s.peak} <= {name for names, _ in dry_run.ROWS.values() for name in names}
    parts = [part for _, parts in dry_run.ROWS.values() for part in parts]
    assert sorted(parts) == sorted(memory.MEMORY_PARTS)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (3, "--group 2"),
        (12, ""),
        (3, "--mode full_shard --global-batch 16"),
        (3, "--img-size 30"),
        (3, "--mask-ratio 0"),
        (1, "--data nowhere"),
        (3, "--mode ddp --group 3"),
        (3, "--keep 0"),
        (1, f"--data {TILES} --batch 200"),
        (1, "--resume nothing-here"),
    ],
)
def test_a_command_that_would_fail_fails_with_the_same_sentence(ranks, flags, monkeypatch, capsys):
    argv = [*TINY, *flags.split()]
    if "--global-batch" in flags:
        del argv[argv.index("--batch") : argv.index("--batch") + 2]

    def run(more: list[str]) -> tuple[int, str]:
        try:
            status = train_fsdp.main(argv + more)
        except SystemExit as leave:
            status = leave.code
        return status, capsys.readouterr().err

    dry = run(["--dry-run", "--world-size", str(ranks)])
    if ranks > 1:
        for name, value in environment(0, ranks, 1).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(8, ranks)))
    real = run([])
    assert real[0] == 2 and real[1].count("\n") == 1
    assert dry == real


def test_flags_that_a_checkpoint_forbids_are_refused(tmp_path, capsys):
    argv = [*TINY, "--steps", "2", "--save-every", "2", "--out", str(tmp_path / "out")]
    dry = ["--dry-run", "--world-size", "1"]
    assert train_fsdp.main(argv) == 0 and (tmp_path / "out" / "step_00000002").is_dir()

    def written() -> dict[Path, int]:
        paths = (tmp_path / "out").rglob("*")
        return {p: p.stat().st_mtime_ns for p in paths if p.name != "log.jsonl"}

    before = written()
    capsys.readouterr()
    for more in (["--seed", "1"], ["--resume", "none"]):
        assert train_fsdp.main([*argv, *more, *dry]) == 2
        refused = capsys.readouterr().err
        assert train_fsdp.main([*argv, *more]) == 2
        assert capsys.readouterr().err == refused
    assert train_fsdp.main([*argv, "--mode", "full_shard", *dry]) == 0
    out = capsys.readouterr().out
    assert "step_00000002 at step 2; changed: " in out and "mode ddp -> full_shard" in out
    assert "no step is left to do" in out
    assert written() == before


def test_it_is_one_process_without_a_launcher(monkeypatch, capsys):
    """A batch script may start it before srun, which sets SLURM_JOB_ID and the like."""
    for name, value in {"JOB_ID": "7", "NTASKS": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert dry(16, "--mode ddp") == 0
    for name in ("STEP_ID", "PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4")
    with pytest.raises(SystemExit) as leave:
        dry(8, "")
    assert leave.value.code == 2 and "without torchrun, srun" in capsys.readouterr().err


# --- what is printed


@pytest.mark.parametrize(
    ("flags", "columns"),
    [
        (f"--data {TILES} --mode hybrid --group 2 --accum 2 --ac full", 3),
        ("--mode ddp", 1),
        ("--mode full_shard --fsdp 1", 1),
    ],
)
def test_memory_is_planned_and_simulated(flags, columns, tmp_path, monkeypatch, capsys):
    """At the peak, after backward, planned; of an engine that is not simulated the plan alone."""
    monkeypatch.chdir(tmp_path)
    assert dry(4, flags) == 0
    assert list(tmp_path.iterdir()) == [] and not dist.is_initialized()
    out = capsys.readouterr().out
    assert "4 ranks on cpu, mesh" in out and "batch: 2 images x 4 ranks x" in out
    assert ("one step of rank 0, simulated" in out) == (columns == 3)
    assert ("but only an FSDP2 step is simulated" in out) == (columns == 1)
    table = out.partition("memory per rank, GiB")[2].splitlines()[1:]
    rows = {name: [float(x) for x in sizes] for name, *sizes in map(str.split, table[:7])}
    assert [*rows] == [*dry_run.ROWS, "all"] and len(rows["all"]) == columns
    sums = [sum(column) for column in zip(*(rows[row] for row in dry_run.ROWS), strict=True)]
    assert rows["all"] == pytest.approx(sums, abs=0.0031)
    assert re.search(r"  all_(reduce|gather): planned \d+ of [\d,]+ bytes", out)
    assert (", simulated " in out.partition(" bytes")[2]) == (columns == 3)


def test_auto_is_the_gpu_of_the_job(capsys):
    """A login node has none; --cpu-offload and --compile are shown as they will be."""
    assert dry(16, "--device auto --cpu-offload --compile --group 4") == 0
    out = capsys.readouterr().out
    assert "16 ranks on a GPU each, mesh 4 x 4" in out and "on nodes of 8 ranks" in out
    assert "one step of rank 0, simulated, without --compile" in out
    assert "parameters, gradients and optimizer are host memory" in out
