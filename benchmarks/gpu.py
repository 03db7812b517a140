"""Check and measure everything on one GPU: `make bench-gpu`, or in two calls of ten minutes.

    python -m benchmarks.gpu --out DIR                  # a GPU
    python -m benchmarks.gpu --out DIR --device cpu     # the same in small, minutes
    python -m benchmarks.gpu --out DIR --only grid saves    # some of its parts

Each part is a process of its own with a time limit, and each of its rows is written to rows.jsonl
when it is known, so that a failure costs one row and a part that hangs costs its own time. DIR gets
report.md, rows.jsonl and log.txt, what the parts printed. The exit status is 1 if a row failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any

import torch

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m")
COLUMNS = {  # of a table: heading and format
    "batch": ("batch", "d"),
    "images_per_second": ("img/s", ".1f"),
    "tflops": ("TFLOP/s", ".1f"),
    "mfu": ("MFU", ".1%"),
    "step_seconds": ("step s", ".4f"),
    "plan_seconds": ("plan s", ".4f"),
    "host_seconds": ("host s", ".4f"),
    "peak_gib": ("peak GiB", ".2f"),
    "plan_gib": ("plan GiB", ".2f"),
    "reserved_gib": ("reserved", ".2f"),
    "first_step_seconds": ("first step s", ".1f"),
    "ratio": ("x peer", ".2f"),
    "matmul_tflops": ("matmul TFLOP/s", ".0f"),
    "copy_gb_per_second": ("copy GB/s", ".0f"),
    "difference": ("difference", ".1e"),
}


@dataclass(frozen=True)
class Part:
    """One process: what it shows, its limit in seconds on a GPU, its command after `python -m`."""

    name: str
    about: str
    seconds: int
    command: list[str]


def parts(device: str, model: str) -> list[Part]:
    """List the parts in the order of what matters most; in small for a CPU."""
    on = ["--device", device]
    small: list[str] = []
    most: list[str] = []
    large = ["--models", "1b", "3b"]
    if device == "cpu":
        small = ["--models", model, "--img-size", "32"]
        most = ["--most", "2"]
        large = small
    checks = [*TORCHRUN, "benchmarks.gpu_checks"]
    run = ["benchmarks.gpu_checks", "run", *on, "--model", model]

    def speed(name: str, sizes: list[str]) -> list[str]:
        return ["benchmarks.gpu_speed", name, *on, *sizes, *most]

    def limit(name: str) -> list[str]:
        return ["benchmarks.gpu_limits", name, *on, *small]

    return [
        Part("matrix", "training against plain PyTorch", 130, [*checks, "matrix", *on]),
        Part("attention", "its kernels at our shapes", 40, limit("attention")),
        Part("batches", "the device, the host, a plain loop", 90, limit("batches")),
        Part("precision", "bf16 by autocast and by FSDP", 40, limit("precision")),
        Part("run", "end to end", 150, run),
        Part("grid", "sizes and options, one rank", 160, speed("grid", small)),
        Part("sharded", "a rank of eight", 120, speed("sharded", large)),
        Part("loader", "images read by workers", 60, limit("loader")),
        Part("saves", "checkpoints", 150, limit("saves")),
        Part("offload", "parameters on the host", 60, limit("offload")),
        Part("peers", "beside transformers", 130, speed("peers", small)),
        Part("loop", "train_fsdp.py itself", 70, speed("loop", small)),
    ]


def run_part(part: Part, limit: float, folder: Path) -> list[Row]:
    """Run a part for at most `limit` seconds; return its rows, which are written as they come."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        with open(folder / "rows.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        word = "PASS" if row["ok"] else "FAIL"
        print(f"{word}  {part.name}: {row['name']}  {row.get('error', '')}", flush=True)

    def read(stream: IO[str]) -> None:
        for line in stream:
            if line.startswith('{"part"'):
                add(json.loads(line))

    started = time.monotonic()
    with open(folder / "log.txt", "a") as log:
        log.write(f"\n=== {part.name}\n")
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", *part.command],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # so that its ranks and loaders end with it
        )
        assert process.stdout
        reader = Thread(target=read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            status = process.wait(limit)
            problem = f"it ended with status {status}: see log.txt" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"stopped after its {limit:.0f} s"
            process.terminate()  # torchrun ends its ranks, which are in sessions of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(10)
    if problem or not rows:
        add({"part": part.name, "name": "ran to its end", "ok": False, "error": problem})
    print(f"      {part.name}: {time.monotonic() - started:.0f} s", flush=True)
    return rows


# --- The report


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table in Markdown, with the columns that some row has."""
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    yield "| " + " | ".join(["", *(COLUMNS[key][0] for key in shown), "note"]) + " |"
    yield "|" + "---|" * (len(shown) + 2)
    for row in rows:
        cells = ["" if row.get(k) is None else format(row[k], COLUMNS[k][1]) for k in shown]
        note = row.get("error", row.get("note", ""))
        name = row["name"] if row["ok"] else f"FAIL {row['name']}"
        yield "| " + " | ".join([name, *cells, note.replace("\n", " ")]) + " |"


def against_plan(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how far memory and time are from the plan, and constants for the machine's row."""
    for part in "grid", "sharded":
        for key, planned, what in (
            ("peak_gib", "plan_gib", "peak memory"),
            ("step_seconds", "plan_seconds", "step time"),
        ):
            own = [r for r in rows if r["part"] == part and r.get(key) and r.get(planned)]
            off = [r[key] / r[planned] - 1 for r in own]
            if off:
                yield f"- {part}: {what} against the plan {min(off):+.1%} to {max(off):+.1%}"
    rates = next((row for row in rows if row["name"] == "rates"), {})
    best = max((row["mfu"] for row in rows if row.get("mfu")), default=None)
    if rates:
        yield (
            f"- for planner/machines.py: optimizer_bytes_per_second "
            f"{rates['copy_gb_per_second'] * 1e9:.3g}; a large matmul reaches "
            f"{rates['matmul_tflops']:.0f} TFLOP/s"
        )
    if best:
        yield f"- the best MFU, a lower bound of `efficiency` there: {best:.2f}"


def write_report(rows: Sequence[Row], planned: Sequence[Part], device: str, path: Path) -> None:
    """Write report.md: what failed, then a table for each part."""
    name = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    failed = [f"{row['part']}: {row['name']}" for row in rows if not row["ok"]]
    count = f"{len(rows)} rows, {len(failed)} failed"
    if failed:
        count += f": {', '.join(failed)}"
    lines = [f"# {name}, torch {torch.__version__}", "", count, ""]
    if device == "cuda":
        lines += against_plan(rows)
    for part in planned:
        own = [row for row in rows if row["part"] == part.name]
        lines += ["", f"## {part.name}: {part.about}", ""]
        if own:
            lines += table(own)
        else:
            lines.append("not run")
    path.write_text("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and write the report after each of them."""
    parser = argparse.ArgumentParser(description="Check and measure everything on one GPU.")
    add = parser.add_argument
    add("--out", default="out/bench-gpu", metavar="DIR")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--model", help="of the run from end to end (default base; on a CPU tiny)")
    add("--minutes", type=float, default=20, help="start no part later than this (default 20)")
    add("--only", nargs="+", metavar="PART", help="some of the parts")
    args = parser.parse_args(argv)
    gpu = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        parser.error("no GPU is visible: --device cpu runs all of it in small")
    device = "cuda" if gpu else "cpu"
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("")
    (folder / "log.txt").write_text("")
    model = "base" if gpu else "tiny"
    if args.model:
        model = args.model
    chosen = parts(device, model)
    if gpu:  # what a new machine reads from its disk once counts for no part
        subprocess.run([sys.executable, "-c", "import torch, triton, torchvision"], check=False)
    rows: list[Row] = []
    ends = time.monotonic() + 60 * args.minutes
    for part in chosen:
        if args.only and part.name not in args.only:
            continue
        left = ends - time.monotonic()
        if left > 5:
            rows += run_part(part, min(part.seconds, left) if gpu else left, folder)
        write_report(rows, chosen, device, folder / "report.md")
    print(f"{folder}/report.md", flush=True)
    return int(not rows or any(not row["ok"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
