"""Compare planned with measured step times on the CPU cores of this machine.

    python -m benchmarks.plan_speed           # 1, 2 and 4 ranks, about eight minutes
    python -m benchmarks.plan_speed --ranks 2

For each number of ranks `plan.py --measure` measures the machine, then train_fsdp.py's step is
timed in every row and planned with what was measured. The table has the error of each row, its
summary the median and the worst of them, and how many pairs of modes of one model and batch, whose
measured times differ by more than 20 %, are planned in the right order.
"""

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import mesh
import train_fsdp
from planner.estimate import Plan
from planner.machines import read_machine
from planner.traffic import PlannedRun
from runtime.agreement import StepGuard
from runtime.config import Config, fill_defaults
from runtime.run import Run, resolve

ROOT = Path(__file__).resolve().parent.parent
MODES = ("ddp", "zero1", "shard_grad_op", "full_shard", "hybrid")
SMALL_BASE = "base:depth=2,decoder_depth=1"
WARM_UP = 3
DIFFERENCE = 1.2  # of two times whose order counts


@dataclass(frozen=True)
class Case:
    """One row: a run that is timed and planned."""

    ranks: int
    model: str
    img_size: int
    batch: int
    mode: str
    accum: int = 1


def all_cases(ranks: int) -> list[Case]:
    """List the rows of so many ranks."""
    if ranks == 1:
        shapes = (
            ("tiny", 64, 16, 1),
            ("tiny", 96, 16, 1),
            ("tiny", 224, 4, 1),
            (SMALL_BASE, 64, 16, 2),
            (SMALL_BASE, 224, 4, 1),
        )
        return [Case(1, model, side, batch, "ddp", accum) for model, side, batch, accum in shapes]
    found = []
    for mode in MODES:
        found.append(Case(ranks, "tiny", 64, 8, mode))
        found.append(Case(ranks, SMALL_BASE, 128 if ranks == 2 else 64, 4, mode))
    found.append(Case(ranks, "tiny", 160, 2, "ddp"))
    found.append(Case(ranks, "tiny", 160, 2, "hybrid"))
    found.append(Case(ranks, "tiny", 96, 4, "ddp", 2))
    found.append(Case(ranks, "tiny", 96, 4, "full_shard", 2))
    return found


# --- On each rank


def resolved(case: Case) -> Run:
    """Make the run of a row; hybrid groups have two ranks."""
    config = Config(
        case.model,
        img_size=case.img_size,
        mode=case.mode,
        group=2 if case.mode == "hybrid" else None,
        batch=case.batch,
        accum=case.accum,
        device="cpu",
        precision="fp32",
    )
    return resolve(fill_defaults(config), case.ranks, case.ranks)


def step_seconds(run: Run, grid: Any, rounds: int) -> float:
    """Time steps of the trainer -> the median in seconds. Collective."""
    device = torch.device("cpu")
    training = train_fsdp.build_training(run, grid)
    guard = StepGuard(device)
    side = run.config.img_size
    images = torch.randint(0, 256, (run.local_batch, 3, side, side), dtype=torch.uint8)
    batches = [(images, torch.rand(run.local_batch, run.patches))] * run.config.accum
    seconds = []
    for _ in range(WARM_UP + rounds):
        start = time.perf_counter()
        train_fsdp.train_step(training, guard, batches, lr=1e-5)
        guard.read_results()
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARM_UP:])


def planned_seconds(run: Run, machine_file: str) -> dict[str, float]:
    """Plan the times of a run on a machine that was measured."""
    planned = PlannedRun.from_flags(run.vit_config, run.record())
    return Plan(planned, read_machine(machine_file)).seconds


def time_cases(ranks: int, machine_file: str, rounds: int) -> None:
    """Time and plan all rows of these ranks; rank 0 prints them as JSON. Collective."""
    torch.set_num_threads(1)
    place = mesh.read_ranks(os.environ)
    device = torch.device("cpu")
    mesh.init_ranks(place, device)
    grids: dict[tuple[int, ...], Any] = {}
    for case in all_cases(ranks):
        run = resolved(case)
        if run.mesh_shape not in grids:
            grids[run.mesh_shape] = mesh.build_mesh(run.mesh_shape, device)
        measured = step_seconds(run, grids[run.mesh_shape], rounds)
        row = asdict(case) | {"measured": measured}
        row["planned"] = planned_seconds(run, machine_file)
        if place.rank == 0:
            print(json.dumps(row), flush=True)
        gc.collect()
    dist.destroy_process_group()


# --- In the process that starts them


def start_ranks(ranks: int, *words: str) -> str:
    """Run a command on so many ranks of this machine, a thread each; return what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def measure_and_time(ranks: int, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure the machine with so many ranks, then time and plan their rows."""
    machine_file = str(folder / f"cpu-{ranks}.json")
    start = time.perf_counter()
    start_ranks(ranks, "plan.py", "--measure", machine_file, "--device", "cpu")
    print(f"measured {ranks} ranks in {time.perf_counter() - start:.0f} s", flush=True)
    words = ("--inside", machine_file, "--rounds", str(rounds))
    lines = start_ranks(ranks, "-m", "benchmarks.plan_speed", *words).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def table_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format all rows: measured and planned milliseconds, the parts of the plan, the error."""
    head = f"{'ranks':>5} {'model':30}{'px':>4}{'batch':>6}{'accum':>6} {'mode':14}"
    head += f"{'ms':>8}{'plan':>8}{'compute':>9}{'exposed':>9}{'update':>8}{'error':>8}"
    lines = [head]
    for row in rows:
        parts = {name: 1000 * seconds for name, seconds in row["planned"].items()}
        shape = f"{row['ranks']:5} {row['model']:30}{row['img_size']:4}{row['batch']:6}"
        times = f"{1000 * row['measured']:8.0f}{parts['step']:8.0f}{parts['compute']:9.0f}"
        times += f"{parts['exposed']:9.0f}{parts['optimizer']:8.0f}"
        lines.append(f"{shape}{row['accum']:6} {row['mode']:14}{times}{error_of(row):+8.0%}")
    return lines


def error_of(row: dict[str, Any]) -> float:
    """Return the relative error of a planned step."""
    return row["planned"]["step"] / row["measured"] - 1


def pairs_in_order(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Count the pairs of modes that are planned in the right order, and all whose order counts."""
    right = 0
    every = 0
    keys = ("ranks", "model", "img_size", "batch", "accum")
    for one, other in itertools.combinations(rows, 2):
        if any(one[key] != other[key] for key in keys):
            continue
        fast, slow = sorted((one, other), key=lambda row: row["measured"])
        if slow["measured"] > DIFFERENCE * fast["measured"]:
            every += 1
            right += slow["planned"]["step"] > fast["planned"]["step"]
    return right, every


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and its summary."""
    parser = argparse.ArgumentParser(description="Compare planned with measured step times.")
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4])
    add("--rounds", type=int, default=9, help="steps of each row (default 9)")
    add("--out", type=Path, default=Path("out/plan-speed"), help="for the machine files")
    add("--inside", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        time_cases(int(os.environ["WORLD_SIZE"]), args.inside, args.rounds)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for ranks in args.ranks:
        rows += measure_and_time(ranks, args.out.resolve(), args.rounds)
    print(*table_lines(rows), sep="\n")
    errors = [abs(error_of(row)) for row in rows]
    right, every = pairs_in_order(rows)
    print(f"{len(rows)} rows: error {median(errors):.0%} in the median, {max(errors):.0%} at worst")
    print(f"modes that differ by more than 20 %: {right} of {every} pairs in the right order")


if __name__ == "__main__":
    main()
