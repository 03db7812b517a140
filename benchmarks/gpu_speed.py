"""Measure on one GPU: sizes and options against the plan, sharded steps, what the loop adds.

    python -m benchmarks.gpu_speed grid      # one rank: sizes x compile x activation checkpointing
    python -m benchmarks.gpu_speed sharded   # the memory of a rank of eight, on this one GPU
    python -m benchmarks.gpu_speed loop      # train_fsdp.py itself: its log, its data loader
    python -m benchmarks.gpu_speed peers     # the step beside that of transformers

`benchmarks.gpu` calls them. They print one line of JSON for each case. A rank of eight is simulated
by PyTorch's fake process group: its collectives send nothing and its gathered parameters are
undefined, so that losses mean nothing, but it allocates, copies and computes what a real one does.
"""

import argparse
import contextlib
import gc
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mesh
import plan
import train_fsdp
import vit
from benchmarks.gpu_checks import ROOT, command, emit, log_of
from planner.machines import Machine, nearest_machine
from runtime import devices
from runtime.agreement import StepGuard
from runtime.config import Config
from runtime.run import resolve

WARM = 3
TIMED = 5
SHARDED_WORLD = 8


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Time a call until it returns, and until the device has finished as well."""
    wait(device)
    started = time.perf_counter()
    work()
    returned = time.perf_counter() - started
    wait(device)
    return returned, time.perf_counter() - started


def clear(device: torch.device) -> None:
    """Free the memory of the last case."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def plan_machine(memory_gib: float) -> Machine:
    """Return the known machine that is nearest to this device; Frontier for an unknown one."""
    peak, _ = devices.peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return nearest_machine(peak, memory_gib)


def planned(config: Config, world_size: int, batch: int, memory_gib: float) -> dict[str, Any]:
    """Return what `plan.py --json` says of such a job."""
    argv = ["--model", config.model, "--img-size", str(config.img_size), "--mode", str(config.mode)]
    argv += ["--ac", config.ac, "--world-size", str(world_size), "--batch", str(batch)]
    argv += ["--memory-gib", str(memory_gib), "--machine", plan_machine(memory_gib).name, "--json"]
    argv += ["--group", str(config.group)] if config.group else []
    argv += ["--fsdp", str(config.fsdp)] if config.fsdp else []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        plan.main(argv)
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def largest_batch(config: Config, world_size: int, memory_gib: float, most: int) -> int:
    """Find the largest power of two that fits according to the plan, at most `most`; 0 if none."""
    fits = min(planned(config, world_size, 1, memory_gib)["max_local_batch"], most)
    return 1 << (fits.bit_length() - 1) if fits else 0


def build(config: Config, world_size: int, batch: int, device: torch.device) -> Callable[[], None]:
    """Build a function that makes one step of a case."""
    run = resolve(config, world_size, world_size)
    grid = mesh.build_mesh(run.mesh_shape, device)
    training = train_fsdp.build_training(run, grid)
    guard = StepGuard(device, max_skips=10**6)  # a fake gather gives values that are not finite
    shape = (batch, 3, config.img_size, config.img_size)
    images = torch.randint(0, 256, shape, device=device, dtype=torch.uint8)
    noise = torch.rand(batch, run.patches, device=device)

    def step() -> None:
        train_fsdp.train_step(training, guard, [(images, noise)], lr=1e-5)

    return step


def measure(config: Config, world_size: int, batch: int, device: torch.device) -> dict[str, Any]:
    """Time the steps of a case: seconds, images/s, MFU, peak GiB."""
    clear(device)
    started = time.perf_counter()
    step = build(config, world_size, batch, device)
    step()
    wait(device)
    first = time.perf_counter() - started
    for _ in range(WARM - 1):
        step()
    # the host's time while nothing is queued before it
    host = statistics.median([seconds_of(step, device)[0] for _ in range(3)])
    # several steps in one interval, so that the host may run ahead as it does in training
    wait(device)
    started = time.perf_counter()
    for _ in range(TIMED):
        step()
    wait(device)
    seconds = (time.perf_counter() - started) / TIMED
    flops = vit.flops_per_image(vit.MODELS[config.model], config.img_size) * batch / seconds
    peak, _ = devices.peak_flops(device)
    gpu = device.type == "cuda"
    return {
        "batch": batch,
        "images_per_second": batch / seconds,
        "step_seconds": seconds,
        "host_seconds": host,
        "tflops": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if gpu else None,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30 if gpu else None,
        "first_step_seconds": first,
    }


def attempt(part: str, config: Config, world_size: int, most: int, device: torch.device) -> None:
    """Measure and report a case, with half the batch as long as the memory does not suffice."""
    name = case_name(config)
    memory = 16.0
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        memory = total / 2**30
    notes: list[str] = []
    batch = largest_batch(config, world_size, memory, most)
    while batch:
        promised = planned(config, world_size, batch, memory)
        try:
            found = measure(config, world_size, batch, device)
        except torch.cuda.OutOfMemoryError:
            notes.append(f"out of memory at {batch}")
            batch //= 2
            continue
        except Exception as error:
            traceback.print_exc()
            notes.append(f"{type(error).__name__}: {error}"[:300])
            break
        found["plan_gib"] = promised["memory_gib"]["peak"]
        machine = plan_machine(memory)
        known, _ = devices.peak_flops(device)
        # what is planned is another device's time; and a fake process group sends nothing
        if known == machine.peak_flops and world_size == 1:
            found["plan_seconds"] = promised["step_seconds_lower_bound"]
            notes.append(f"planned for {machine.name}")
        return emit(part, name, True, **found, note=", ".join(notes))
    if not notes:
        notes.append("does not fit according to the plan")
    return emit(part, name, False, error=", ".join(notes))


def case_name(config: Config) -> str:
    """Name a case by its model, mode and what differs from the default."""
    words = [config.model, str(config.mode)]
    if config.fsdp:
        words.append(f"FSDP{config.fsdp}")
    if config.compile:
        words.append("compiled")
    words.append(f"--ac {config.ac}")
    return " ".join(words)


def rates(device: torch.device) -> None:
    """Report the FLOP/s of a large bf16 matmul, and the bytes/s, both ways, of a large copy."""
    side = 512
    count = 2**22
    if device.type == "cuda":
        side = 8192
        count = 2**28
    a = torch.randn(side, side, device=device).bfloat16()
    b = torch.empty(count, device=device)  # fp32
    c = torch.empty_like(b)

    def median_seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(10):
            _, seconds = seconds_of(work, device)
            times.append(seconds)
        return statistics.median(times[2:])

    matmul = 2 * side**3 / median_seconds(partial(torch.matmul, a, a)) / 1e12
    copied = 2 * b.nbytes / median_seconds(partial(c.copy_, b)) / 1e9
    emit("grid", "rates", True, matmul_tflops=matmul, copy_gb_per_second=copied)


def grid(models: Sequence[str], img_size: int, most: int, device: torch.device) -> None:
    """Measure sizes x {eager, compiled} x --ac on one rank, what matters most first."""
    rates(device)
    for compiled, ac in (False, "none"), (False, "full"), (True, "none"), (False, "selective"):
        if compiled and device.type == "cpu":
            continue  # minutes, and nothing of it is a GPU's
        for model in models:
            if compiled and model not in ("base", "1b"):
                continue  # compiling takes longer than the other cases
            config = Config(model, img_size, mode="ddp", precision="bf16", ac=ac, compile=compiled)
            attempt("grid", config, 1, most, device)


def fake_world(device: torch.device) -> None:
    """Make this process rank 0 of eight whose collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SHARDED_WORLD)


def sharded(models: Sequence[str], img_size: int, most: int, device: torch.device) -> None:
    """Measure the memory and the time at the host of one rank of eight."""
    for mode, group in ("full_shard", None), ("hybrid", 4):
        for model, fsdp in itertools.product(models, (2, 1)):
            config = Config(model, img_size, mode=mode, group=group, fsdp=fsdp, precision="bf16")
            attempt("sharded", config, SHARDED_WORLD, most, device)


def loop(model: str, img_size: int, batch: int, device: torch.device) -> None:
    """Run train_fsdp.py: the same batch in each step, more log lines, images that are decoded."""
    gpu = device.type == "cuda"
    steps = "60" if gpu else "8"
    workers = "8" if gpu else "1"
    flags = ["--model", model, "--img-size", str(img_size), "--batch", str(batch), "--mode", "ddp"]
    flags += ["--steps", steps, "--save-every", "none", "--device", device.type]
    cases = {
        "synthetic, --log-every 20": ["--run-mode", "syn", "--log-every", "20"],
        "synthetic, --log-every 1": ["--run-mode", "syn", "--log-every", "1"],
        "images, --log-every 20": ["--data", "examples/tiles/train", "--log-every", "20"],
    }
    cases["images, --log-every 20"] += ["--workers", workers]
    if not gpu:
        del cases["synthetic, --log-every 20"]
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, more) in enumerate(cases.items()):
            out = Path(folder) / str(i)
            argv = command("train_fsdp.py", *flags, *more, "--out", str(out))
            done = subprocess.run(argv, cwd=ROOT, stdout=sys.stderr)
            ends = [row for row in log_of(out) if row.get("event") == "end"]
            rate = ends[-1].get("images_per_second") if ends else None
            emit("loop", name, done.returncode == 0 and rate is not None, images_per_second=rate)


def peers(model: str, img_size: int, batch: int, device: torch.device) -> None:
    """Time one step against that of transformers, in rounds, eager and compiled."""
    from benchmarks import step  # here: it needs that library

    gpu = device.type == "cuda"
    for compiled in (False, True):
        if compiled and not gpu:
            continue
        config = Config(
            model,
            img_size,
            batch=batch,
            mode="ddp",
            precision="bf16",
            compile=compiled,
            device="cuda" if gpu else "cpu",
        )
        found = step.measure(config, rounds=6 if gpu else 1)
        ours = statistics.median(found[step.OURS])
        theirs = statistics.median(found[step.THEIRS])
        name = "compiled" if compiled else "eager"
        emit("peers", name, True, ratio=ours / theirs, images_per_second=ours, batch=batch)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("part", choices=("grid", "sharded", "loop", "peers"))
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--models", nargs="+", choices=vit.MODELS, default=["base", "huge", "1b", "3b"])
    add("--img-size", type=int, default=224, metavar="PIXELS")
    add("--most", type=int, default=512, metavar="IMAGES", help="largest batch (default 512)")
    args = parser.parse_args()
    ranks = mesh.read_ranks({})
    device = mesh.pick_device(args.device, ranks)
    if args.part in ("loop", "peers"):
        part = loop if args.part == "loop" else peers
        return part(args.models[0], args.img_size, min(args.most, 128), device)
    if args.part == "grid":
        mesh.init_ranks(ranks, device)
        grid(args.models, args.img_size, args.most, device)
    else:
        fake_world(device)
        sharded(args.models, args.img_size, args.most, device)
    dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
