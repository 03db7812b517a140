"""The dry run against real runs, against arithmetic by hand, and what it refuses."""

import ast
import math
import os
import resource
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from parity import TILES
from ranks import agreed_port, environment, on_ranks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_fsdp
import vit
from planner import dry_run, estimate, memory
from planner.traffic import PlannedRun

TINY = ["--model", "tiny", "--img-size", "32", "--batch", "2", "--device", "cpu", "--workers", "0"]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """No launcher's variables from the shell that runs the tests."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def simulated(ranks: int, flags: str, monkeypatch) -> dry_run.Simulation:
    """What a dry run of the tiny model on so many ranks found."""
    found = []
    simulate = dry_run.simulate
    with monkeypatch.context() as patch:
        patch.setattr(dry_run, "simulate", lambda *a: found.append(simulate(*a)) or found[-1])
        argv = [*TINY, *flags.split(), "--dry-run", "--world-size", str(ranks)]
        assert train_fsdp.main([*argv, "--out", "never-made"]) == 0
    (simulation,) = found
    return simulation


# --- collectives: against a real run


CASES = [
    f"--mode {mode} --accum {accum}"
    for mode in (
        "full_shard",
        "shard_grad_op",
        "hybrid --group 2",
        "hybrid_grad_op --group 2",
        "no_shard",
    )
    for accum in (1, 2)
]
CASES += ["--mode full_shard --accum 2 --ac full --reduce-dtype bf16 --prefetch none --clip 1"]
CASES += ["--mode full_shard --wrap root", "--mode hybrid --group 2 --wrap root --ac full"]

# Each operation: its kind, which argument is the full tensor, which the group. One that is not
# here fails the test by its name.
OPERATIONS = {
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::allreduce_": ("all_reduce", 0, 1),
    "_c10d_functional::all_reduce": ("all_reduce", 0, 2),
}
SILENT = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")


class Recorder(TorchDispatchMode):
    """(kind, ranks of the group, bytes of the full tensor) of every collective, in order."""

    def __init__(self, seen: list) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        name = func._schema.name
        if "c10d" in name and name not in SILENT:
            kind, whole, where = OPERATIONS[name]
            group = args[where]
            if isinstance(group, str):
                size = dist.distributed_c10d._resolve_process_group(group).size()
            else:
                size = dist.ProcessGroup.unbox(group).size()
            self.seen.append((kind, size, sum(t.nbytes for t in tree_leaves(args[whole]))))
        return func(*args, **(kwargs or {}))


def real_collectives() -> list[list[tuple[str, int, int]]]:
    """On a gloo rank: those of the second step of every case."""
    rank, original, found = int(os.environ["RANK"]), train_fsdp.train_step, []
    for i, case in enumerate(CASES):
        folder, seen = Path(os.environ["FOLDER"]) / f"case{i}", []
        folder.mkdir(exist_ok=True)
        os.environ["MASTER_PORT"] = agreed_port(folder, rank)

        def train_step(*args, seen=seen, **kwargs):
            with Recorder(seen) if args[3].voted == 1 else nullcontext():
                return original(*args, **kwargs)

        train_fsdp.train_step = train_step
        argv = [*TINY, *case.split(), "--run", "syn", "--steps", "2", "--out", str(folder)]
        assert train_fsdp.main(argv) == 0
        found.append(seen)
    return found


@pytest.mark.full
def test_collectives_are_those_of_a_real_run(tmp_path, monkeypatch):
    """Kind, group, bytes and order, on 4 gloo ranks, for every mode of FSDP2."""
    every = on_ranks(4, real_collectives, tmp_path)
    assert all(rank == every[0] for rank in every)
    for case, real in zip(CASES, every[0], strict=True):
        group = 4 if "--mode full" in case or "--mode shard" in case else 1
        group = int(case.split("--group ")[1][0]) if "--group" in case else group
        sizes = {"shard": group, "replicate": 4 // group, "world": 4}
        fake = simulated(4, case, monkeypatch).collectives
        assert [(c.kind, sizes[c.group], c.size) for c in fake] == real, case
        kinds = {kind for kind, _, _ in real}
        every_kind = {"all_gather", "reduce_scatter", "all_reduce"}
        assert kinds == ({"all_reduce"} if group == 1 else every_kind), case


# --- memory: against arithmetic


@pytest.mark.parametrize(
    ("ranks", "flags", "group"),
    [
        pytest.param(4, "--mode full_shard", 4, marks=pytest.mark.full),
        pytest.param(6, "--mode hybrid --group 3", 3, marks=pytest.mark.full),
        (4, "--mode no_shard", 1),
        (512, "--mode hybrid --group 8 --accum 2", 8),
        (5, "--mode shard_grad_op --ac full", 5),
    ],
)
def test_what_a_rank_keeps_is_what_arithmetic_says(ranks, flags, group, monkeypatch):
    """fp32 parameters and gradients, two moments of AdamW: of the first of `group` shards."""
    shapes = [p.shape for p in vit.ViTMAE(vit.MODELS["tiny"], 32).parameters()]
    rows = [math.ceil(s[0] / group) * s[1:].numel() for s in shapes]  # FSDP2 cuts dimension 0
    s = simulated(ranks, flags, monkeypatch)
    assert s.after["Sharded Param"] == s.peak["Sharded Param"] == 4 * sum(rows)
    assert s.after["Sharded Grad"] == 4 * sum(rows) >= s.peak["Sharded Grad"]
    assert s.after["OptState"] == s.peak["OptState"] == 8 * sum(rows) + 4 * len(rows)
    tables = 4 * (1 + 4 * 4) * (192 + 128)  # positions of 16 patches and cls, both widths
    assert s.after["Buffer"] == tables
    accum = 2 if "accum" in flags else 1
    assert s.after["Inputs"] == accum * 2 * (3 * 32 * 32 + 4 * 16)  # uint8 images, fp32 noise
    whole = [n for n in ("Unsharded Param", "All Gather", "Reduce Scatter") if s.after[n]]
    assert not whole and sum(s.after.values()) < sum(s.peak.values())


def test_checkpointing_saves_activations(monkeypatch):
    flags = "--mode full_shard --img-size 96 --batch 16"
    none, full = (simulated(4, f"{flags} --ac {ac}", monkeypatch) for ac in ("none", "full"))
    mine = [dry_run.row_gib(s.peak)["activations"] for s in (none, full)]
    # 4 blocks of 37 tokens and 2 of 145; all but the one worked on keep their input alone
    assert mine[1] < 0.6 * mine[0] and full.after == none.after


# --- what is refused, as by a real run


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
        (1, "--out /dev/null"),
        (1, "--out /dev/null/below"),
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
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
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
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    assert {p: t for p, t in after.items() if p.name != "log.jsonl"} == {
        p: t for p, t in before.items() if p.name != "log.jsonl"
    }


@pytest.mark.parametrize(
    "variables",
    [
        {f"SLURM_{name}": "0" for name in ("STEP_ID", "PROCID", "LOCALID", "NODEID")}
        | {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"}
    ],
)
def test_a_launcher_is_refused(variables, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as leave:
        train_fsdp.main([*TINY, "--dry-run", "--world-size", "8"])
    sentence = "without torchrun, srun"
    assert leave.value.code == 2 and sentence in capsys.readouterr().err


def test_a_batch_script_may_start_it_before_srun(monkeypatch, capsys):
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "16",
        "SLURM_JOB_NUM_NODES": "2",
    }.items():
        monkeypatch.setenv(name, value)
    argv = [*TINY, "--mode", "ddp", "--dry-run", "--world-size", "16", "--out", "never-made"]
    assert train_fsdp.main(argv) == 0


def test_a_torch_without_the_private_parts_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.distributed._tools.fsdp2_mem_tracker", None)
    assert train_fsdp.main([*TINY, "--dry-run", "--world-size", "8"]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and printed.out == ""
    assert f"torch {torch.__version__} does not have all of them" in printed.err


def test_private_parts_are_imported_where_they_are_used():
    """In a function for each need: another PyTorch must not break a file by its import."""
    allowed = {("planner/dry_run.py", "private_parts"), ("runtime/step_profile.py", "counting")}
    private = (
        "torch._subclasses",
        "torch.testing._internal",
        "torch.distributed._tools",
        "torch.utils._python_dispatch",
    )
    rooms = [
        path for room in ("runtime", "planner", "sweeps") for path in (ROOT / room).glob("*.py")
    ]
    assert len(rooms) > 20
    for path in (*ROOT.glob("*.py"), *rooms):
        name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
        inside = {
            id(node)
            for f in ast.walk(tree)
            if isinstance(f, ast.FunctionDef) and (name, f.name) in allowed
            for node in ast.walk(f)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(private):
                assert id(node) in inside, (name, node.lineno)


# --- what is printed


PLAN = {
    "memory_gib": {
        "parameters": 1.25,
        "gradients": 2.5,
        "optimizer": 3.75,
        "unsharded": 0.5,
        "activations": 4.125,
        "reduction": 0.25,
        "inputs": 0.125,
        "workspace": 0.5,
        "peak": 13.0,
        "peak_active": 14.0,
    },
    "payload_bytes": {"all_gather": 1000, "reduce_scatter": 2000, "all_reduce": 3000},
    "collectives": {"all_gather": 13, "reduce_scatter": 7, "all_reduce": 9},
    "traffic_bytes_per_rank": {},
    "step_seconds_lower_bound": 1.5,
    "verdict": "FITS",
}


def with_a_plan(monkeypatch) -> list:
    """Replace the planner by made-up numbers; returns the list of the runs it will be given."""
    planned = []

    def made_up(run, *machine):
        planned.append(run)
        return types.SimpleNamespace(json=lambda: PLAN, fit="FITS: it does", verdict="FITS")

    monkeypatch.setattr(estimate, "make_plan", made_up)
    return planned


def test_the_plan_is_printed_too_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    runs = with_a_plan(monkeypatch)
    argv = [*TINY, "--data", TILES, "--mode", "hybrid", "--group", "2", "--accum", "2"]
    argv += ["--dry-run", "--world-size", "4", "--out", str(tmp_path / "out")]
    assert train_fsdp.main(argv) == 0
    assert list(tmp_path.iterdir()) == [] and not dist.is_initialized()
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line[:2] == "  " != line[2:4]]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    for line in (
        "dry run: rank 0 of 4, on nodes of 4 ranks",
        "tiny: 2,2",
        "4 ranks on cpu, mesh 2 x 2 (replicate x shard)",
        "batch: 2 images x 4 ranks x 2 steps = 16",
        "lr: 0.00015 x 16 / 256 = 9.37e-06",
        "data: ",
        "rank 0 reads the samples 0 to 1 first",
        "; 0 loader workers",
        "one step of rank 0, simulated",
        "memory per rank, GiB",
        "  all_gather: planned 13 of 1,000 bytes, simulated 26 of ",
    ):
        assert line in out
    planned = [float(rows[part][-1]) for part in dry_run.TABLE_ROWS]
    assert planned == [1.25, 2.5, 3.75, 0.75, 4.25, 0.5] and sum(planned) == 13.0
    assert rows["all"][2] == "13.000" and float(rows["all"][0]) > float(rows["all"][1]) > 0
    # once, for what the log begins with and for the report
    assert runs == [PlannedRun(vit.MODELS["tiny"], "hybrid", 4, 2, 32, 0.75, group=2, accum=2)]


@pytest.mark.parametrize("flags", ["--mode full_shard --ac full --accum 2", "--mode ddp"])
def test_the_rows_of_memory_add_up_to_the_last(flags, capsys):
    """Each column: at the peak, after backward, planned."""
    argv = [*TINY, *flags.split(), "--dry-run", "--world-size", "4", "--out", "never-made"]
    assert train_fsdp.main(argv) == 0
    table = capsys.readouterr().out.partition("memory per rank, GiB")[2].splitlines()[1:]
    words = [line.split() for line in table if line[:2] == "  " != line[2:4]]
    rows = {
        name: [float(size) for size in sizes]
        for name, *sizes in words
        if name in (*dry_run.TABLE_ROWS, "all")
    }
    columns = zip(*(rows[part] for part in dry_run.TABLE_ROWS), strict=True)
    assert rows["all"] == pytest.approx([sum(column) for column in columns], abs=0.0031)


def test_each_part_of_memory_is_in_one_row(monkeypatch):
    peak = simulated(4, "--mode full_shard", monkeypatch).peak
    assert set(peak) <= {category for row in dry_run.TABLE_ROWS.values() for category in row}
    parts = [name for row in dry_run.TABLE_ROWS for name in dry_run.PLANNED_PARTS.get(row, (row,))]
    assert sorted(parts) == sorted(memory.MEMORY_PARTS)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--mode ddp", "--mode ddp: flags, mesh and batch are checked, but only an FSDP2 step"),
        ("--mode zero1", "--mode zero1: flags, mesh and batch are checked"),
        ("--mode full_shard --fsdp 1", "--fsdp 1: flags, mesh and batch are checked"),
        ("--run io", "--run io: no model, no step"),
    ],
)
def test_engines_that_are_not_simulated_are_named_and_planned(flags, reason, monkeypatch, capsys):
    argv = [*TINY, *flags.split(), "--dry-run", "--world-size", "4", "--out", "never-made"]
    assert train_fsdp.main(argv) == 0
    out = capsys.readouterr().out
    assert reason in out and "4 ranks on cpu, mesh" in out
    assert "planned peak" in out and "at peak" not in out and ", simulated" not in out
    with_a_plan(monkeypatch)
    assert train_fsdp.main(argv) == 0
    out = capsys.readouterr().out
    assert "planned peak" in out and "all_gather: planned 13 of 1,000 bytes\n" in out
    assert "after backward" not in out


def test_auto_is_the_gpu_of_the_job(capsys):
    """A login node has none; --cpu-offload and --compile are shown as they will be."""
    argv = [*TINY, "--cpu-offload", "--compile", "--group", "4"]
    argv[argv.index("--device") + 1] = "auto"
    argv += ["--dry-run", "--world-size", "16", "--out", "never-made"]
    assert train_fsdp.main(argv) == 0
    out = capsys.readouterr().out
    assert "16 ranks on a GPU each, mesh 4 x 4" in out and "on nodes of 8 ranks" in out
    assert "one step of rank 0, simulated, without --compile" in out
    assert "parameters, gradients, optimizer, are host memory" in out


@pytest.mark.full
def test_15b_on_512_ranks_takes_no_cluster(tmp_path):
    """In less than 90 s of one core, and 8 GiB."""
    argv = "--model 15b --mode hybrid --group 4 --batch 32 --ac full --dry-run --world-size 512"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "train_fsdp.py", *argv.split(), "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment_alone(),
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime < 90
    assert used.ru_maxrss < 8 * 2**20  # KiB, of the largest child so far
    assert "512 ranks on a GPU each, mesh 128 x 4" in done.stdout
    assert not (tmp_path / "out").exists()
    lines = [line.split() for line in done.stdout.splitlines()]
    (parameters,) = [float(words[1]) for words in lines if words[:1] == ["parameters"]]
    assert parameters == pytest.approx(4 * 14_665_553_484 / 4 / 2**30, rel=1e-3)


def environment_alone() -> dict[str, str]:
    """Of a process that no launcher started."""
    launcher = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    return {k: v for k, v in environment(0, 1, 0).items() if k not in launcher}
