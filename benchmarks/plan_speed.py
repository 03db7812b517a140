"""Compare planned with measured step times on the CPU cores of this machine.

    python -m benchmarks.plan_speed           # 1, 2 and 4 ranks; about ten minutes when idle
    python -m benchmarks.plan_speed --ranks 2

For each number of ranks `plan.py --measure` measures each model of the table at its batch, then
train_fsdp.py's step is timed in every row and planned with what was measured. The summary has the
median and the worst error, and how many pairs of modes of one model and batch, whose measured times
differ by more than 20 %, are planned in the right order.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import machines
import mesh
import plan
import train_fsdp

ROOT = Path(__file__).resolve().parent.parent
MODES = ("ddp", "zero1", "shard_grad_op", "full_shard", "hybrid --group 2")
BASE = "--model base:depth=2,decoder_depth=1"
WARM_UP = 4
ROUNDS = 9
# for so many ranks: flags of the model, and those of its rows
CASES = {
    1: {
        "--model tiny --img-size 64 --batch 16": ["ddp"],
        "--model tiny --img-size 96 --batch 16": ["ddp"],
        "--model tiny --img-size 224 --batch 4": ["ddp"],
        f"{BASE} --img-size 64 --batch 16": ["ddp --accum 2"],
        f"{BASE} --img-size 224 --batch 4": ["ddp"],
    },
    2: {
        "--model tiny --img-size 64 --batch 8": MODES,
        f"{BASE} --img-size 128 --batch 4": MODES,
        "--model tiny --img-size 160 --batch 2": ["ddp", "hybrid --group 2"],
        "--model tiny --img-size 96 --batch 4": ["ddp --accum 2", "full_shard --accum 2"],
    },
    4: {
        "--model tiny --img-size 64 --batch 8": MODES,
        f"{BASE} --img-size 64 --batch 4": MODES,
        "--model tiny --img-size 160 --batch 2": ["ddp", "hybrid --group 2"],
        "--model tiny --img-size 96 --batch 4": ["ddp --accum 2", "full_shard --accum 2"],
    },
}


def step_seconds(args: argparse.Namespace) -> float:
    """Time steps of the trainer -> the median in seconds. Collective."""
    device = torch.device("cpu")
    training = train_fsdp.build_training(args, device)
    guard = train_fsdp.Guard(device)
    shape = (args.batch, 3, args.img_size, args.img_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    batches = [(images, torch.rand(args.batch, args.patches))] * args.accum
    seconds = []
    for step in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        train_fsdp.train_step(training, guard, step, batches, lr=1e-5)
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARM_UP:])


def time_rows(machine_file: str) -> None:
    """Time and plan all rows of these ranks; rank 0 prints them as JSON. Collective."""
    torch.set_num_threads(1)
    ranks = mesh.read_ranks(os.environ)
    mesh.init_ranks(ranks, torch.device("cpu"))
    machine = machines.read_machine(machine_file)
    for model, modes in CASES[ranks.world_size].items():
        for mode in modes:
            flags = f"{model} --mode {mode}"
            args = train_fsdp.parse_flags([*flags.split(), "--precision", "fp32"])
            train_fsdp.complete(args, ranks.world_size, ranks.world_size, "cpu")
            run = plan.PlannedRun.from_flags(train_fsdp.model_config(args), vars(args))
            row = {"ranks": ranks.world_size, "model": model, "mode": mode}
            row |= {"planned": plan.step_time(run, machine), "measured": step_seconds(args)}
            if ranks.rank == 0:
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def start_ranks(ranks: int, words: list[str]) -> list[dict]:
    """Run a command on so many ranks, a thread each; return the JSON objects that it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(ranks), *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Print the table and its summary."""
    parser = argparse.ArgumentParser(description="Compare planned with measured step times.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=CASES)
    parser.add_argument("--out", type=Path, default=Path("out/plan-speed"), help="machine files")
    parser.add_argument("--inside", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        time_rows(args.inside)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for ranks in args.ranks:
        file = args.out.resolve() / f"cpu-{ranks}.json"
        file.unlink(missing_ok=True)
        for model in CASES[ranks]:
            start = time.perf_counter()
            start_ranks(
                ranks, ["plan.py", "--measure", str(file), "--device", "cpu", *model.split()]
            )
            print(f"measured {ranks} ranks, {model}, in {time.perf_counter() - start:.0f} s")
        rows += start_ranks(ranks, ["-m", "benchmarks.plan_speed", "--inside", str(file)])
    errors = []
    for row in rows:
        step, *parts = (
            1000 * row["planned"][part] for part in ("step", "compute", "exposed", "optimizer")
        )
        errors.append(step / 1000 / row["measured"] - 1)
        print(f"{row['ranks']} ranks {row['model']:55} {row['mode']:18}", end=" ")
        print(f"{1000 * row['measured']:.0f} ms, planned {step:.0f}, {errors[-1]:+.0%};", end=" ")
        print("compute {:.0f}, exposed {:.0f}, update {:.0f}".format(*parts))
    sizes = [abs(error) for error in errors]
    print(f"{len(rows)} rows: error {median(sizes):.0%} in the median, {max(sizes):.0%} at worst")
    ordered = []
    for one, other in itertools.combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: row["measured"])
        alike = one["ranks"] == other["ranks"] and one["model"] == other["model"]
        if alike and slow["measured"] > 1.2 * fast["measured"]:
            ordered.append(slow["planned"]["step"] > fast["planned"]["step"])
    print(f"modes that differ by more than 20 %: {sum(ordered)} of {len(ordered)} pairs in order")


if __name__ == "__main__":
    main()
