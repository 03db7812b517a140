"""The start of a run: what the log records of it, and what the terminal shows."""

import os
import platform
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import torch

import mesh
import shard
import vit
from runtime import devices
from runtime.agreement import gather_to_rank0
from runtime.device_batches import worker_count
from runtime.run import Run, try_plan
from runtime.session import Session

# The side of the matrices that are multiplied to time a CPU: large enough for full speed, and small
# enough for a CPU that emulates bf16 or fp16, where a product of 768 takes a second.
PRODUCT_SIDE = 384


def start_record(
    run: Run, device: torch.device | None, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Describe a run for the log. A device of None is some GPU."""
    peak, peak_source = devices.peak_flops(device)
    on_gpu = device is None or device.type == "cuda"
    with torch.device("meta"):
        model = vit.ViTMAE(run.vit_config, run.config.img_size)
    mesh_shape = dict.fromkeys(mesh.DIMENSIONS, 1)
    mesh_shape |= zip(mesh.DIMENSIONS, run.mesh_shape, strict=False)  # without tp if it is 1
    return run.record() | {
        "planned": try_plan(run, device, warn),  # memory, traffic and time: computed, not measured
        "peak_lr": run.peak_lr,
        "epoch_steps": run.epoch_steps,
        "device": "cuda" if on_gpu else "cpu",
        "mesh": mesh_shape,
        "params": sum(p.numel() for p in model.parameters()),
        "flops_per_image": run.flops_per_image(),
        "peak_flops_per_rank": peak,
        "peak_flops_source": peak_source,
        "precision_default": ": ".join(devices.default_precision(on_gpu)),
        "cpu_step_seconds": cpu_step_seconds(run, device),
        "versions": versions(),
    }


def cpu_step_seconds(run: Run, device: torch.device | None) -> float | None:
    """Estimate the seconds of a step on a CPU: twice what its matrix products would take."""
    if device is None or device.type != "cpu" or run.config.run_mode == "io":
        return None
    flops = run.flops_per_image()
    if flops is None:
        return None
    a = torch.ones(PRODUCT_SIDE, PRODUCT_SIDE, dtype=run.dtype)
    seconds = min(timeit.repeat("a @ a", globals={"a": a}, number=1, repeat=3))
    images = run.local_batch * run.config.accum
    return 2 * seconds * flops * images / run.config.tp / (2 * PRODUCT_SIDE**3)


def versions() -> dict[str, str | None]:
    """List the versions that decide numbers and speed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def report_start(run: Run, session: Session, begin: int) -> None:
    """Log the start record before step `begin`; print what will run, and where. Collective."""
    rows = gather_to_rank0(rank_row(run, session))
    if rows:  # on rank 0
        log = session.log
        start = start_record(run, session.device, log.warn)
        session.planned = start["planned"]
        start["begin"] = begin
        start["workers"] = worker_count(run.config.workers, session.ranks)
        log.write("start", **start)
        log.say(*describe(start))
        if len(rows) > 1:
            dimensions = mesh.DIMENSIONS[: len(run.mesh_shape)]
            names = "".join(f"{name:>11}" for name in dimensions)
            log.say(f"rank  local  device{names}  host", *rows[:32])


def rank_row(run: Run, session: Session) -> str:
    """Format where this rank runs: on its node, in the mesh."""
    ranks = session.ranks
    host = os.environ.get("SLURMD_NODENAME", platform.node())
    grid = torch.arange(run.world_size).view(run.mesh_shape)
    coordinates = (grid == ranks.rank).nonzero().flatten().tolist()
    cells = "".join(f"{number:11}" for number in coordinates)
    return f"{ranks.rank:4}  {ranks.local_rank:5}  {session.device!s:6}{cells}  {host}"


def describe(start: dict[str, Any]) -> Iterator[str]:
    """Yield the start record as lines: what runs, its arithmetic, what to watch out for."""
    s = start
    ranks = s["world_size"]
    gflop = s["flops_per_image"] / 1e9
    yield f"{s['model']}: {s['params']:,} parameters, {gflop:.1f} GFLOP per image"
    yield f"precision: {s['precision']} (default here {s['precision_default']})"
    shape = {name: size for name, size in s["mesh"].items() if name != "tp" or size > 1}
    sizes = " x ".join(map(str, shape.values()))
    yield f"{ranks} ranks on {s['device']}, mesh {sizes} ({' x '.join(shape)})"
    yield describe_strategy(s)
    who = f"{ranks // s['tp']} data-parallel ranks"
    yield f"batch: {s['batch']} images x {who} x {s['accum']} steps = {s['global_batch']}"
    if s["lr"] is None:
        yield f"lr: {s['blr']:g} x {s['global_batch']} / 256 = {s['peak_lr']:.3g}"
    else:
        yield f"lr: {s['lr']:.3g}"
    if s["planned"] and s["planned"]["verdict"]:
        yield f"plan for {s['planned']['machine']}: {s['planned']['fit']}"
    seconds = s["cpu_step_seconds"]  # None on a GPU
    if seconds and seconds > 5:
        yield (
            f"note: a step takes about {seconds:.0f} s on this CPU; a smaller run: "
            "python train_fsdp.py --model tiny --img-size 96 --out out/tiny"
        )
    yield f"data: {s['data']}, {s['images']} images, {s['epoch_steps']} steps per epoch"
    mean = ", ".join(f"{value:.5g}" for value in s["channel_mean"])
    notes = f" ({s['pixel_notes']})" if s["pixel_notes"] else ""
    yield f"pixels: {s['channels']} channels of {s['image_dtype']}, mean {mean}{notes}"


def describe_strategy(start: dict[str, Any]) -> str:
    """Say what the mode of a start record shards, and what it sends in a step."""
    strategy = shard.STRATEGIES[start["mode"]]
    traffic = "nothing between data-parallel ranks"
    if start["world_size"] > start["tp"]:
        replicas = start["mesh"]["replicate"]
        traffic = strategy.traffic(several_replicas=replicas > 1, one_unit=start["wrap"] == "root")
        if strategy.shard_over != "none" and start["accum"] > 1:
            traffic += f" (--accum: gathers and reduce-scatters {start['accum']} times)"
    return f"{start['mode']}: shards {strategy.shards}; per step: {traffic}"
