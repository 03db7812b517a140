"""Measure sizes x {eager, compiled} x {no, selective, full checkpointing} on one GPU.

    python -m benchmarks.gpu --minutes 5 --out out/bench-gpu            # `make bench-gpu` does more

Each case is train_fsdp.train_step in one process, bf16, with the largest power of two of images
that fits according to the plan (halved if it does not), at most --most. The table has the planned
memory next to the measured one. Then, for each size, where the time of the eager step goes by kind
of kernel, and the floor: the model's FLOPs at the rate that a large bf16 matmul reaches here, and
the optimizer's 28 bytes per parameter at the rate of a large copy. What matters most comes first;
cases that there is no time for are named in the table. Runs on a CPU too, as a test of itself.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import mesh
import train_fsdp
import vit
from planner import estimate
from planner.machines import MACHINES
from planner.traffic import PlannedRun
from runtime import devices, step_profile
from runtime.agreement import StepGuard
from runtime.config import Config
from runtime.run import resolve

WARM, TIMED = 3, 5  # steps
SECONDS = {False: 15.0, True: 60.0}  # per case, roughly: eager, compiled
KINDS = {  # of kernels, by parts of their names; the first match counts
    "matmul": (
        "gemm",
        "nvjet",
        "cutlass",
        "xmma",
        "Cijk",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "linear_pointwise",
    ),
    "attention": ("flash", "fmha", "attention", "attn", "softmax"),
    "optimizer": ("adam", "Adam"),
    "norms": ("layer_norm", "LayerNorm", "layernorm"),
    "copies": ("copy", "Memcpy", "Memset", "cat", "CatArray"),
}
OTHER = "elementwise and the rest"


@dataclass
class Row:
    """One case and its results; None if it did not run."""

    model: str
    compiled: bool
    ac: str
    batch: int = 0
    step_seconds: float | None = None
    images_per_second: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    plan_gib: float | None = None
    first_step_seconds: float | None = None  # with compiling
    note: str = ""


def cases(models: Sequence[str]) -> Iterator[Row]:
    """Yield the grid, what matters most first."""
    for compiled, acs in (
        (False, ("none", "full")),
        (True, ("none",)),
        (False, ("selective",)),
        (True, ("full", "selective")),
    ):
        for ac in acs:
            for model in models:
                yield Row(model, compiled, ac)


def planned(model: str, ac: str, img_size: int, batch: int, memory_gib: float) -> estimate.Plan:
    """The plan of such a case on this GPU."""
    run = PlannedRun(vit.MODELS[model], "ddp", 1, batch, img_size, mask_ratio=0.75, ac=ac)
    return estimate.Plan(run, MACHINES["dgx-h200"], memory_gib)


def largest_batch(model: str, ac: str, img_size: int, memory_gib: float, most: int) -> int:
    """Find the largest power of two that fits according to the plan, at most `most`; 0 if none."""
    fits = min(planned(model, ac, img_size, 1, memory_gib).max_local_batch, most)
    return 1 << (fits.bit_length() - 1) if fits else 0


def build(row: Row, img_size: int, device: torch.device) -> Callable[[], None]:
    """Build a function that makes one step of a case."""
    grid, config = mesh.build_mesh((1, 1), device), vit.MODELS[row.model]
    flags = {"mode": "ddp", "precision": "bf16", "ac": row.ac, "compile": row.compiled}
    options = Config(row.model, img_size, **flags)
    run = resolve(options, 1, 1)
    training = train_fsdp.build_training(run, grid)
    guard = StepGuard(device)
    images = torch.randint(0, 256, (row.batch, 3, img_size, img_size), device=device)
    noise = torch.rand(row.batch, vit.patch_count(config, img_size), device=device)
    batches = [(images.to(torch.uint8), noise)]
    del images

    def step() -> None:
        train_fsdp.train_step(training, guard, batches, lr=1e-5)

    return step


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clear(device: torch.device) -> None:
    """Free the memory of the last case."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(row: Row, img_size: int, device: torch.device, folder: Path | None) -> None:
    """Fill in a row; with `folder`, leave a trace of two steps there."""
    clear(device)
    started = time.perf_counter()
    step = build(row, img_size, device)
    step()
    wait(device)
    row.first_step_seconds = time.perf_counter() - started
    for _ in range(WARM - 1):
        step()
    seconds = []
    for _ in range(TIMED):
        wait(device)
        started = time.perf_counter()
        step()
        wait(device)
        seconds.append(time.perf_counter() - started)
    flops = vit.flops_per_image(vit.MODELS[row.model], img_size)
    row.step_seconds = statistics.median(seconds)
    row.images_per_second = row.batch / row.step_seconds
    row.tflops = row.images_per_second * flops / 1e12
    peak, _ = devices.peak_flops(device)
    row.mfu = row.tflops * 1e12 / peak if peak else None
    if device.type == "cuda":
        row.peak_gib = torch.cuda.max_memory_allocated(device) / 2**30
    if folder:
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
        with profile(activities=activities) as profiler:
            for _ in range(2):
                step()
            wait(device)
        profiler.export_chrome_trace(str(folder / f"{row.model}.json.gz"))


def attempt(
    row: Row, img_size: int, device: torch.device, memory_gib: float, most: int, folder: Path | None
) -> None:
    """Measure a row, with half the batch as long as the memory does not suffice."""
    row.batch = largest_batch(row.model, row.ac, img_size, memory_gib, most)
    while row.batch:
        row.plan_gib = planned(row.model, row.ac, img_size, row.batch, memory_gib).json()[
            "memory_gib"
        ]["peak"]
        try:
            return measure(row, img_size, device, folder)
        except torch.cuda.OutOfMemoryError:
            row.note = f"out of memory at {row.batch}"
            row.batch //= 2
    row.note = row.note or "does not fit according to the plan"
    return None


def rates(device: torch.device) -> tuple[float, float]:
    """Measure the FLOP/s of a large bf16 matmul and the bytes/s, both ways, of a large copy."""
    side = 8192 if device.type == "cuda" else 512
    a = torch.randn(side, side, device=device).bfloat16()
    b = torch.empty(2**28 if device.type == "cuda" else 2**22, device=device)  # fp32
    c = torch.empty_like(b)
    best = []
    for work in (lambda: a @ a, lambda: c.copy_(b)):
        seconds = []
        for _ in range(8):
            wait(device)
            started = time.perf_counter()
            for _ in range(4):
                work()
            wait(device)
            seconds.append((time.perf_counter() - started) / 4)
        best.append(statistics.median(seconds[2:]))
    return 2 * side**3 / best[0], 2 * b.nbytes / best[1]


def kind_of(kernel: str) -> str:
    """Find the kind of a kernel by its name."""
    return next((k for k, parts in KINDS.items() if any(p in kernel for p in parts)), OTHER)


def by_kind(trace: Path) -> dict[str, float]:
    """Sum the seconds per step of each kind of kernel in a trace of two steps.

    On a CPU, where this benchmark is only tried out, operators count, with those that they call.
    """
    found = dict.fromkeys([*KINDS, OTHER], 0.0)
    events = step_profile.read_trace(trace)
    kernels = [e for e in events if e.get("cat") in step_profile.GPU_WORK]
    for e in kernels or [e for e in events if e.get("cat") == "cpu_op"]:
        found[kind_of(e["name"])] += e["dur"] / 2e6  # microseconds of two steps
    return found


def table(rows: Sequence[Row]) -> list[str]:
    """Format the grid as lines."""
    lines = [
        f"{'model':6}{'':10}{'recompute':>11}{'batch':>7}{'img/s':>10}{'TFLOP/s':>9}{'MFU':>7}"
        f"{'GiB':>8}{'plan':>8}{'first step s':>14}  note"
    ]
    for r in rows:
        cells = "".join(
            f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
            for value, width, digits in (
                (r.images_per_second, 10, 1),
                (r.tflops, 9, 1),
                (None if r.mfu is None else 100 * r.mfu, 6, 1),
                (r.peak_gib, 9, 1),
                (r.plan_gib, 8, 1),
                (r.first_step_seconds, 14, 1),
            )
        )
        how = "compiled" if r.compiled else "eager"
        lines.append(f"{r.model:6}{how:10}{r.ac:>11}{r.batch:>7}{cells}  {r.note}")
    return lines


def floor_lines(
    row: Row, kinds: dict[str, float], img_size: int, flops_rate: float, copy_rate: float
) -> list[str]:
    """Format where a step's time goes, the floor, and each kind's part of the gap between them."""
    assert row.step_seconds is not None
    config = vit.MODELS[row.model]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in vit.ViTMAE(config, img_size).parameters())
    matmul = row.batch * vit.flops_per_image(config, img_size) / flops_rate
    updates = 28 * parameters / copy_rate
    gap = row.step_seconds - matmul - updates
    least = {"matmul": matmul, "optimizer": updates}
    over = {kind: seconds - least.get(kind, 0.0) for kind, seconds in kinds.items()}
    over["no kernel"] = max(0.0, row.step_seconds - sum(kinds.values()))
    shares = ", ".join(f"{kind} {1e3 * s:.1f} ms ({s / gap:.0%})" for kind, s in over.items())
    return [
        f"{row.model}, batch {row.batch}: step {1e3 * row.step_seconds:.1f} ms, floor "
        f"{1e3 * (matmul + updates):.1f} (matmul {1e3 * matmul:.1f}, optimizer "
        f"{1e3 * updates:.1f})",
        f"    over the floor: {shares}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write it to table.txt and rows.json."""
    parser = argparse.ArgumentParser(description="Sizes x compile x checkpointing on one GPU.")
    add = parser.add_argument
    add("--models", nargs="+", choices=vit.MODELS, default=["base", "huge", "1b", "3b", "5b"])
    add("--img-size", type=int, default=224, metavar="PIXELS")
    add("--most", type=int, default=512, metavar="IMAGES", help="largest batch (default 512)")
    add("--minutes", type=float, default=7, help="start no case that would end later (default 7)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--out", default="out/bench-gpu", metavar="DIR")
    args = parser.parse_args(argv)
    ends = time.monotonic() + 60 * args.minutes
    ranks = mesh.read_ranks({})
    device = mesh.pick_device(args.device, ranks)
    mesh.init_ranks(ranks, device)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)

    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else "CPU"
    total = torch.cuda.get_device_properties(device).total_memory / 2**30 if gpu else 16.0
    flops_rate, copy_rate = rates(device)
    lines = [
        f"{name}, torch {torch.__version__}, {args.img_size} px, bf16: a matmul reaches "
        f"{flops_rate / 1e12:.0f} TFLOP/s, a copy {copy_rate / 1e9:.0f} GB/s"
    ]
    print(lines[0], flush=True)
    rows, floors = [], list[str]()
    for row in cases(args.models):
        if time.monotonic() + SECONDS[row.compiled] > ends:
            row.note = "not run: out of time"
        else:
            traced = folder if not row.compiled and row.ac == "none" else None
            attempt(row, args.img_size, device, total, args.most, traced)
            if traced and row.step_seconds:
                kinds = by_kind(folder / f"{row.model}.json.gz")
                floors += floor_lines(row, kinds, args.img_size, flops_rate, copy_rate)
        rows.append(row)
        print(table([row])[1], flush=True)
    clear(device)
    lines += [*table(rows), *floors]
    (folder / "table.txt").write_text("\n".join(lines) + "\n")
    (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print("\n".join(["", *lines]), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
