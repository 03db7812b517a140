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
from runtime.run import Run
from runtime.run_plan import plan_run
from runtime.session import Session


def start_record(
    run: Run, device: torch.device | None, node_ranks: int, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Describe a run for the log. A device of None is some GPU; its node has `node_ranks` ranks."""
    peak, peak_source = devices.peak_flops(device)
    on_gpu = device is None or device.type == "cuda"
    with torch.device("meta"):
        model = vit.ViTMAE(run.model, run.config.img_size)
    return run.record() | {
        "planned": plan_run(run, device, node_ranks, warn),
        "lr": run.lr,
        "epoch_steps": run.epoch_steps,
        "device": "cuda" if on_gpu else "cpu",
        "mesh": dict(zip(mesh.DIMENSIONS, (*run.mesh_shape, 1), strict=False)),
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
    a = torch.ones(768, 768, dtype=run.dtype)
    seconds = min(timeit.repeat("a @ a", globals={"a": a}, number=3, repeat=2)) / 3
    images = run.local_batch * run.config.accum
    return 2 * seconds * flops * images / run.config.tp / (2 * 768**3)


def versions() -> dict[str, str | None]:
    """List the versions that decide numbers and speed."""
    gpu = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {"python": platform.python_version(), "torch": torch.__version__} | gpu


def report_start(run: Run, session: Session, begin: int) -> None:
    """Log the start record before step `begin`; print what will run, and where. Collective."""
    rows = gather_to_rank0(table_row(run, session))
    if rows:  # on rank 0
        log = session.log
        start = start_record(run, session.device, session.ranks.local_world_size, log.warn)
        session.planned = start["planned"]
        start |= {"begin": begin, "workers": worker_count(run.config.workers, session.ranks)}
        log.write("start", **start)
        log.say(*describe(start))
        if len(rows) > 1:
            names = "".join(f"{name:>11}" for name in mesh.DIMENSIONS[: len(run.mesh_shape)])
            log.say(f"rank  local  device{names}  host", *rows[:32])


def table_row(run: Run, session: Session) -> str:
    """Format where this rank runs: on its node, in the mesh."""
    ranks, host = session.ranks, os.environ.get("SLURMD_NODENAME") or platform.node()
    grid = torch.arange(run.world_size).view(run.mesh_shape)
    (place,) = (grid == ranks.rank).nonzero().tolist()
    cells = "".join(f"{number:11}" for number in place)
    return f"{ranks.rank:4}  {ranks.local_rank:5}  {session.device!s:6}{cells}  {host}"


def describe(start: dict[str, Any]) -> Iterator[str]:
    """Yield the start record as lines: what runs, its arithmetic, what to watch out for."""
    s, ranks = start, start["world_size"]
    gflop, strategy = s["flops_per_image"] / 1e9, shard.STRATEGIES[s["mode"]]
    yield f"{s['model']}: {s['params']:,} parameters, {gflop:.1f} GFLOP per image"
    yield f"precision: {s['precision']} (default here {s['precision_default']})"
    shape = {name: size for name, size in s["mesh"].items() if name != "tp" or size > 1}
    sizes = " x ".join(map(str, shape.values()))
    yield f"{ranks} ranks on {s['device']}, mesh {sizes} ({' x '.join(shape)})"
    traffic = strategy.traffic if ranks > s["tp"] else "nothing between data-parallel ranks"
    traffic = traffic if s["mesh"]["replicate"] > 1 else traffic.removesuffix(shard.ACROSS)
    if s["wrap"] == "root":  # which stays gathered until backward
        traffic = traffic.replace(shard.GATHER2, shard.GATHER1)
    yield f"{s['mode']}: shards {strategy.shards}; per step: {traffic}"
    who = f"{ranks // s['tp']} data-parallel ranks"
    yield f"batch: {s['batch']} images x {who} x {s['accum']} steps = {s['global_batch']}"
    yield f"lr: {s['blr']:g} x {s['global_batch']} / 256 = {s['lr']:.3g}"
    if s["planned"] and s["planned"]["verdict"]:
        yield f"plan for {s['planned']['machine']}: {s['planned']['fit']}"
    if (s["cpu_step_seconds"] or 0) > 5:
        yield (
            f"note: a step takes about {s['cpu_step_seconds']:.0f} s on this CPU; a smaller run: "
            "python train_fsdp.py --model tiny --img-size 96 --out out/tiny"
        )
    yield f"data: {s['data']}, {s['images']} images, {s['epoch_steps']} steps per epoch"
    mean = ", ".join(f"{value:.5g}" for value in s["channel_mean"] or ())
    yield f"pixels: {s['channels']} channels of {s['image_dtype']}, mean {mean}"
