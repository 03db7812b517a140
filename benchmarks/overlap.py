"""Measure how much a save in the background slows the steps that it overlaps.

    torchrun --nproc-per-node 2 -m benchmarks.overlap --model base --batch 8

Each turn times some steps alone, then starts a save and times the steps until it has ended (the
last one overlaps in part); both kinds alternate, so that they see the same machine. The copy to
host memory, for which training waits, is timed separately. Give each rank one core more than it
has threads: otherwise writing and computing share a core.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import checkpoint
import data
import mesh
import shard
import vit
from runtime import agreement


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time steps during a save against steps alone.")
    parser.add_argument("--model", choices=vit.MODELS, default="base")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8, help="images per rank and step")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--alone", type=int, default=6, help="steps alone per turn")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dir", help="where to save (default: a temporary folder)")
    return parser.parse_args()


def build(
    config: vit.ViTConfig, img_size: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model, sharded over all ranks, and its optimizer."""
    with torch.device("meta"):
        whole = vit.ViTMAE(config, img_size)
    decay = shard.weight_decay_names(whole)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = shard.apply(
        whole,
        "full_shard",
        mesh.build_mesh(shard.mesh_shape("full_shard", dist.get_world_size()), device),
        block_classes={vit.Block},
        values=partial(vit.initial_value, config, seed=0),
        options=shard.ShardingOptions(param_dtype=dtype, cast_inputs=False),
    )
    optimizer = shard.build_optimizer(model, "full_shard", decay, lr=1e-4, weight_decay=0.05)
    return model, optimizer


def timed_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, noise: Tensor
) -> float:
    """Make one step, which ends on all ranks together; return its seconds."""
    started = time.perf_counter()
    loss, _, _ = model(data.normalize(images), 0.75, noise)
    loss.backward()
    shard.optimizer_step(optimizer, torch.zeros((), device=images.device))
    optimizer.zero_grad()
    agreement.mean_over_ranks(loss[None])
    return time.perf_counter() - started


@dataclass
class Seconds:
    """What was measured, in seconds."""

    alone: list[float] = field(default_factory=list)  # of steps
    during: list[float] = field(default_factory=list)  # of steps during a save
    copies: list[float] = field(default_factory=list)  # for which training waits
    saves: list[float] = field(default_factory=list)


def measure(
    saver: checkpoint.Saver, step: Callable[[], float], device: torch.device, turns: int, alone: int
) -> Seconds:
    """Time steps alone and steps during a save, in turns."""
    seconds = Seconds()
    for _ in range(3):
        step()
    saver.save(0, {})  # the first one also makes folders, threads, connections
    for turn in range(turns):
        seconds.alone += [step() for _ in range(alone)]
        started = time.perf_counter()
        saver.save(turn + 1, {}, wait=False)
        seconds.copies.append(time.perf_counter() - started)
        while True:
            seconds.during.append(step())  # began while it was written
            # the same on all ranks: as long as one of them writes
            busy = float(saver.pending is not None and not saver.pending.done())
            if agreement.mean_over_ranks(torch.tensor([busy], device=device))[0] == 0:
                break
        saver.finish()
        seconds.saves.append(time.perf_counter() - started)
    return seconds


def report(model: str, folder: str, seconds: Seconds) -> None:
    """Print the medians."""
    alone, during, copy, save = map(
        statistics.median, (seconds.alone, seconds.during, seconds.copies, seconds.saves)
    )
    size = sum(f.stat().st_size for f in Path(folder).glob("step_*/*")) / 1e9
    print(f"{model} on {dist.get_world_size()} ranks, {size:.2f} GB, torch {torch.__version__}")
    print(f"copy {copy:.2f} s, save {save:.2f} s")
    print(
        f"step alone {alone:.3f} s ({len(seconds.alone)}), during a save {during:.3f} s "
        f"({len(seconds.during)}), ratio {during / alone:.3f}"
    )


def main() -> int:
    """Print the seconds of steps alone, during a save, and of the save itself."""
    args = parse_args()
    ranks = mesh.read_ranks(os.environ)
    device = mesh.pick_device(args.device, ranks)
    mesh.init_ranks(ranks, device)
    gloo = dist.new_group(backend="gloo")
    config = vit.MODELS[args.model]
    model, optimizer = build(config, args.img_size, device)
    images = torch.randint(0, 256, (args.batch, 3, args.img_size, args.img_size), device=device)
    noise = torch.rand(args.batch, vit.patch_count(config, args.img_size), device=device)
    step = partial(timed_step, model, optimizer, images.to(torch.uint8), noise)

    folder = args.dir or agreement.run_on_rank0(tempfile.mkdtemp)
    saver = checkpoint.Saver(folder, model, optimizer, keep=1, group=gloo, background=True)
    seconds = measure(saver, step, device, args.turns, args.alone)
    if ranks.rank == 0:
        report(args.model, folder, seconds)
    dist.barrier()
    if ranks.rank == 0 and not args.dir:
        shutil.rmtree(folder)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
