"""Check and measure everything on one GPU, in nine minutes: `make bench-gpu`.

    python -m benchmarks.gpu --out DIR                      # a GPU
    python -m benchmarks.gpu --out DIR --device cpu         # the same in small, a rehearsal
    python -m benchmarks.gpu --out DIR --only sizes saves   # some of its parts

Each part is a process of its own with a time limit, and each of its rows is written to rows.jsonl
when it is known, so that a failure costs one row and a part that hangs costs its own time. DIR gets
report.md, rows.jsonl and log.txt, what the parts printed. The exit status is 1 if a row failed.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import checkpoint
import mesh
import plan
import simulate
import train_fsdp
from benchmarks import step
from benchmarks.gpu_matrix import Cases, Row, matrix

ROOT = Path(__file__).resolve().parent.parent
TILES = "examples/tiles/train"

# --- Sizes: speed, memory and the plan


def machine_of(device: torch.device) -> str:
    """Name the known machine that has this device; the empty text if there is none."""
    known = {"H200": "dgx-h200", "H100": "dgx-h100", "A100": "dgx-a100-80", "MI250X": "frontier"}
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return next((machine for part, machine in known.items() if part in name), "")


def planned(words: str, device: torch.device, world_size: int = 1) -> plan.Plan:
    """Plan a run on this device, or for a rehearsal in 16 GiB."""
    gib = 16.0
    if device.type == "cuda":
        gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    words += f" --machine {machine_of(device) or 'dgx-h100'} --world-size {world_size}"
    _, found = plan.read_command([*words.split(), "--memory-gib", str(gib)])
    return found


def waiting_for(device: torch.device) -> Callable[[], object]:
    """Return what waits for the device."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def measure(words: str, most: int, device: torch.device, world_size: int = 1) -> Row:
    """Time steps of the largest power of two up to `most` images that fit by the plan.

    Of the device, of the host alone, in images/s and MFU; peak GiB.
    """
    wait = waiting_for(device)
    fits = min(most, planned(f"{words} --batch 1", device, world_size).max_local_batch)
    if not fits:
        raise ValueError("no image fits by the plan")
    words += f" --batch {1 << (fits.bit_length() - 1)}"
    its_plan = planned(words, device, world_size)
    args = step.flags(words, device)
    take = step.our_step(args, device)
    several(take, wait)
    started = time.perf_counter()
    take()
    row: Row = {"batch": args.batch, "host_seconds": time.perf_counter() - started}
    row["step_seconds"] = several(take, wait)
    row["images_per_second"] = args.batch / row["step_seconds"]
    if machine_of(device) and world_size == 1:  # a fake process group sends nothing
        row["mfu"] = its_plan.mfu(row["images_per_second"])
        row["planned_seconds"] = its_plan.seconds["step"]
    row["planned_gib"] = its_plan.peak_gib
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        if row["host_seconds"] > 0.9 * row["step_seconds"]:
            row["note"] = "limited by the host"
    return row


def several(work: Callable[[], object], wait: Callable[[], object], count: int = 5) -> float:
    """Time calls in one interval, so that the host may run ahead: seconds of one."""
    wait()
    started = time.perf_counter()
    for _ in range(count):
        work()
    wait()
    return (time.perf_counter() - started) / count


def sizes(device_name: str) -> Cases:
    """Measure sizes, batches, activation checkpointing and compiled blocks, on one rank."""
    device = step.start(device_name)
    runs = [("tiny --img-size 32", (2, 4)), ("tiny --img-size 32 --ac full", (2,))]
    if device.type == "cuda":
        runs = [("base", (32, 64, 128, 512)), ("huge", (128, 512)), ("1b", (128, 512))]
        runs += [("3b", (256,)), ("1b --ac full", (512,)), ("3b --ac full", (512,))]
        runs += [("base --compile", (32, 128, 512)), ("1b --compile", (512,))]
        runs += [("1b --mode full_shard --cpu-offload", (32,))]
    for model, most in runs:
        words = f"--mode ddp --precision bf16 --model {model}"
        for batch in most:
            yield f"{model} {batch}", partial(measure, words, batch, device)


def sharded(device_name: str) -> Cases:
    """Measure the memory, and the host's time, of one rank of eight in PyTorch's fake group."""
    device = mesh.pick_device(device_name, mesh.read_ranks({}))
    runs = [("tiny --img-size 32", 2)]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        runs = [("1b", 256), ("3b", 256)]
    with simulate.fake_world(8):
        for model, most in runs:
            for mode in ("full_shard", "hybrid --group 4", "full_shard --fsdp 1"):
                words = f"--model {model} --mode {mode} --precision bf16"
                yield f"{model} {mode}", partial(measure, words, most, device, 8)


def measured_plan(device_name: str) -> Cases:
    """Plan with what plan.py --measure finds here, and compare the time of a step."""
    device = step.start(device_name)
    words = "--model tiny --img-size 32 --precision fp32 --device cpu"
    batch = 4
    if device.type == "cuda":
        words = "--model base --precision bf16"
        batch = 128

    def compare() -> Row:
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/here.json"
            like = ["--machine", machine_of(device) or "dgx-h100"]
            command("plan.py", "--measure", file, *like, *words.split(), "--batch", str(batch))
            argv = f"{words} --batch {batch} --mode ddp --machine {file} --world-size 1"
            _, its_plan = plan.read_command(argv.split())
        row = measure(f"{words} --mode ddp", batch, device)
        row["planned_seconds"] = its_plan.seconds["step"]
        off = abs(row["planned_seconds"] / row["step_seconds"] - 1)
        return row | {"ok": off <= 0.15 or device.type == "cpu"}

    yield "a step by --measure", compare


# --- Peers, the loop, saves, the loader


def peers(device_name: str) -> Cases:
    """Compare a step with the peers of benchmarks.step, each row from turns in one process."""
    device = step.start(device_name)
    runs = ["--model tiny --img-size 32 --batch 2"]
    if device.type == "cuda":
        runs = ["--model base --batch 128", "--model base --batch 32", "--model huge --batch 64"]
        runs.append("--model base --batch 128 --compile")
    names = ("train_fsdp.py ddp", "plain PyTorch", "transformers")

    def compare(words: str) -> Row:
        found = step.rates(names, f"{words} --precision bf16", device, rounds=4, repeat=5)
        ours, plain, theirs = (median(found[name]) for name in names)
        return {"images_per_second": ours, "plain": ours / plain, "transformers": ours / theirs}

    for words in runs:
        yield words, partial(compare, words)


def command(*argv: str, stop_after: int = 0, out: str = "") -> None:
    """Run a script of the top level; RuntimeError if it fails.

    With `stop_after` the run in `out` is sent SIGUSR1 once it has logged so many steps.
    """
    process = subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdout=sys.stderr)
    while stop_after and process.poll() is None:
        if sum(row["event"] == "step" for row in log_of(out)) >= stop_after:
            process.send_signal(signal.SIGUSR1)
            break
        time.sleep(0.1)
    if process.wait():
        raise RuntimeError(f"status {process.returncode}: see log.txt")


def log_of(out: str) -> list[Row]:
    """Read the log of a run, if it has one yet."""
    path = Path(out, "log.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def loop(device_name: str) -> Cases:
    """Run train_fsdp.py: beside its bare step, with images, stopped and resumed."""
    device = step.start(device_name)
    batch = 4
    words = "--model tiny --img-size 32 --steps 12 --workers 1 --precision fp32"
    if device.type == "cuda":
        batch = 128
        words = "--model base --steps 60 --workers 12 --precision bf16"
    words += f" --mode ddp --batch {batch} --device {device.type}"
    take = step.our_step(step.flags(words, device), device)
    wait = waiting_for(device)
    several(take, wait)
    bare = several(take, wait)
    del take

    def run(more: str) -> Row:
        with tempfile.TemporaryDirectory() as out:
            command("train_fsdp.py", *words.split(), *more.split(), "--out", out)
            *_, end = log_of(out)
        rate = end["images_per_second"]
        return {"images_per_second": rate, "share": rate / batch * bare}

    def stop_and_resume() -> Row:
        with tempfile.TemporaryDirectory() as out:
            more = f"--data {TILES} --log-every 1 --out {out} --mode full_shard"
            argv = ["train_fsdp.py", *words.split(), *more.split()]
            command(*argv, stop_after=2, out=out)
            command(*argv)
            ends = [row["reason"] for row in log_of(out) if row["event"] == "end"]
        return {"note": ", ".join(ends), "ok": ends == ["signal", "done"]}

    for more in ("--run-mode syn", f"--data {TILES}", f"--data {TILES} --run-mode io"):
        yield more, partial(run, more)
    yield "stopped by a signal, and resumed", stop_and_resume


def saves(device_name: str) -> Cases:
    """Time saving and loading a checkpoint beside torch.save of the same bytes."""
    device = step.start(device_name)

    def compare(model: str) -> Row:
        words = f"--model {model} --batch 2 --mode full_shard --precision bf16"
        args = step.flags(words, device)
        training = train_fsdp.build_training(args, device)
        guard = train_fsdp.Guard(device)
        train_fsdp.train_step(training, guard, 0, [step.draw_batch(args, device)], lr=1e-5)
        wait = waiting_for(device)
        both = training.model, training.optimizer
        weights: Any = [*training.model.parameters()]
        tensors = [p.to_local().cpu() for p in weights] * 3  # and AdamW's two states
        size = sum(t.nbytes for t in tensors)
        with tempfile.TemporaryDirectory() as folder:
            save = several(partial(checkpoint.save, folder, 1, *both), wait, count=2)
            saved = Path(folder, "step_00000001")
            load = several(partial(checkpoint.load, saved, *both), wait, count=2)
            plain = partial(torch.save, [t.clone() for t in tensors], f"{folder}/plain.pt")
            beside = several(plain, wait, count=2)
        row = {"step_seconds": save, "gb_per_second": size / save / 1e9, "plain": beside / save}
        return row | {"note": f"loaded in {load:.2f} s"}

    models = ("base", "1b") if device.type == "cuda" else ("tiny",)
    for model in models:
        yield model, partial(compare, model)


# --- Parts, each in a process of its own

PARTS: dict[str, tuple[str, int, Callable[[str], Cases]]] = {  # what it shows, seconds on a GPU
    "matrix": ("training against plain PyTorch in fp32", 110, matrix),
    "sizes": ("one rank, beside the plan", 170, sizes),
    "peers": ("how many times as fast as theirs, the same batch and precision", 90, peers),
    "sharded": ("a rank of eight, beside the plan", 50, sharded),
    "loop": ("train_fsdp.py itself; share: of the speed of its bare step", 60, loop),
    "saves": ("checkpoints; plain: how many times as fast as torch.save", 40, saves),
    "plan": ("the plan after plan.py --measure", 40, measured_plan),
}


def add_row(folder: Path, **row: Any) -> None:
    """Append a row to rows.jsonl, and print it."""
    with open(folder / "rows.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    word = "PASS" if row["ok"] else "FAIL"
    print(f"{word}  {row['part']}: {row['name']}  {row.get('error', '')}", flush=True)


def run_cases(part: str, device_name: str, folder: Path) -> None:
    """Measure the rows of a part; one that fails leaves the others alone."""
    _, _, cases = PARTS[part]
    for name, work in cases(device_name):
        row: Row = {"part": part, "name": name, "ok": True}
        try:
            row |= work()
        except Exception as error:
            traceback.print_exc()
            row |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
        add_row(folder, **row)
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def run_part(part: str, limit: float, device_name: str, folder: Path) -> None:
    """Run a part in a process of its own for at most `limit` seconds."""
    argv = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--device", device_name]
    environ = dict(os.environ)
    if part == "matrix":  # as under torchrun: such a rank binds its process group to its GPU
        environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    argv += ["--out", str(folder)]
    with open(folder / "log.txt", "a") as log:
        process = subprocess.Popen(argv, cwd=ROOT, env=environ, stderr=log, start_new_session=True)
        try:
            status = f"status {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            status = f"stopped after its {limit:.0f} s"
        with suppress(ProcessLookupError):  # what it has started, if not all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
    if status != "status 0":
        add_row(folder, part=part, name="ran to its end", ok=False, error=status)


def report_lines(rows: Sequence[Row], device_name: str) -> Iterator[str]:
    """Format report.md: what failed, how far the plan is off, then a table for each part."""
    name = "CPU" if device_name == "cpu" else torch.cuda.get_device_name()
    failed = [f"{row['part']}: {row['name']}" for row in rows if not row["ok"]]
    yield f"# {name}, torch {torch.__version__}\n"
    yield f"{len(rows)} rows, {len(failed)} failed. {', '.join(failed)}"
    for key, other in (("peak_gib", "planned_gib"), ("step_seconds", "planned_seconds")):
        off = [row[key] / row[other] - 1 for row in rows if key in row and other in row]
        if off:
            yield f"\n{key} against the plan: {min(off):+.1%} to {max(off):+.1%}"
    for part, (about, _, _) in PARTS.items():
        some = [row for row in rows if row["part"] == part]
        shown: dict[str, None] = {}  # the numbers of its rows, in their order
        for row in some:
            shown |= {key: None for key, value in row.items() if type(value) in (int, float)}
        if some:
            yield f"\n## {part}: {about}\n"
            yield "| | " + " | ".join([*(key.replace("_", " ") for key in shown), "note"]) + " |"
            yield "|" + "---|" * (len(shown) + 2)
        for row in some:
            cells = [f"{row[key]:.4g}" if key in row else "" for key in shown]
            note = str(row.get("error", row.get("note", ""))).replace("\n", " ")
            title = row["name"] if row["ok"] else f"FAIL {row['name']}"
            yield "| " + " | ".join([title, *cells, note]) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and write the report after each of them."""
    parser = argparse.ArgumentParser(description="Check and measure everything on one GPU.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/bench-gpu"), metavar="DIR")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--minutes", type=float, default=9, help="start no part later than this (default 9)")
    add("--only", nargs="+", choices=PARTS, default=[*PARTS], help="some of the parts")
    add("--part", choices=PARTS, help="what the processes do that this one starts")
    args = parser.parse_args(argv)
    gpu = args.device != "cpu" and torch.cuda.is_available()
    device_name = "cuda" if gpu else "cpu"
    if args.device == "cuda" and not gpu:
        parser.error("no GPU is visible: --device cpu runs all of it in small")
    if args.part:
        run_cases(args.part, device_name, args.out)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("rows.jsonl", "log.txt"):
        (args.out / name).write_text("")
    ends = time.monotonic() + 60 * args.minutes
    if gpu:  # what a new machine reads from its disk once counts for no part
        subprocess.run([sys.executable, "-c", "import torch, triton, torchvision"], check=False)
    rows: list[Row] = []
    for part in args.only:
        _, seconds, _ = PARTS[part]
        left = ends - time.monotonic()
        if left > 5 or not gpu:
            run_part(part, min(seconds, left) if gpu else 1200, device_name, args.out)
        rows = [json.loads(line) for line in (args.out / "rows.jsonl").read_text().splitlines()]
        lines = report_lines(rows, device_name)
        (args.out / "report.md").write_text("\n".join(lines) + "\n")
    print(f"{args.out}/report.md")
    return int(not rows or any(not row["ok"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
