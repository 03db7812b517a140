"""Measure the start of a training run: seconds until its first step, memory of its loader workers.

    python -m benchmarks.start                    # one process, and 8 ranks
    python -m benchmarks.start --against DIR      # in turns with the code of another checkout

Seconds are counted from the command. Memory is what a loader worker has for itself (USS):
what it shares with the process that it was forked from is not counted. Needs psutil.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent.parent
IMAGES = HERE / "examples" / "tiles" / "train"
FLAGS = f"--model tiny:depth=1,decoder_depth=1 --device cpu --precision fp32 --data {IMAGES} "
FLAGS += "--batch 4 --workers 2"
# What a line says -> what is ready when it is printed
LINES = {"data: ": "list of images", r"(first )?step\W+1[ /]": "first step"}


def import_seconds(code: Path) -> float:
    """Measure the seconds that importing the trainer takes in a new process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import train_fsdp"], cwd=code, check=True)
    return time.perf_counter() - started


def run(code: Path, flags: str, ranks: int = 1) -> Iterator[tuple[str, psutil.Process]]:
    """Start a run of so many ranks; yield each line that it prints, and its process."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-u", *(launcher if ranks > 1 else []), "train_fsdp.py"]
        command += [*FLAGS.split(), *flags.split(), "--out", out]
        with psutil.Popen(
            command, cwd=code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as program:
            for line in program.stdout:
                yield line, program
        if program.returncode:
            raise SystemExit(f"{code}: the run failed with status {program.returncode}")


def worker_memory(code: Path) -> float:
    """Return the median MiB that a loader worker has for itself after 150 batches."""
    found = 0.0
    for line, program in run(code, "--run-mode io --img-size 224 --steps 200 --log-every 50"):
        if re.match(r"step\s+150/", line):
            children = program.children(recursive=True)
            workers = [p for p in children if "forkserver" in str(p.cmdline()) and not p.children()]
            found = statistics.median(p.memory_full_info().uss for p in workers) / 2**20
    return found


def start(code: Path, ranks: int) -> dict[str, float]:
    """Return the seconds from the command of a run until each of LINES."""
    found: dict[str, float] = {}
    started = time.perf_counter()
    for line, _ in run(code, "--steps 1 --img-size 32 --save-every none", ranks):
        for text, name in LINES.items():
            if re.match(text, line):
                found.setdefault(name, time.perf_counter() - started)
    return found


def rows(codes: dict[str, Path], ranks: int, rounds: int) -> Iterator[str]:
    """Lines of a table: medians of `rounds`, in which the checkouts take turns."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in codes}
    for _ in range(rounds):
        for name, code in codes.items():
            found = {"imports": import_seconds(code)} | start(code, ranks)
            seen[name].append(found | {"worker MiB": worker_memory(code)})
    for name, values in seen.items():
        medians = {key: statistics.median(v[key] for v in values) for key in values[0]}
        cells = "".join(f"{value:16.1f}" for value in medians.values())
        yield f"{ranks:5}  {name:8}{cells}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    codes = {"here": HERE} | ({"against": args.against.resolve()} if args.against else {})
    names = ("imports", *LINES.values(), "worker MiB")
    print("ranks  code    " + "".join(f"{name:>16}" for name in names))
    for ranks in args.ranks:
        for line in rows(codes, ranks, args.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
