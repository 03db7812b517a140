"""Compare sharded steps on several ranks with plain DDP of transformers' model: bytes and seconds.

    torchrun --nproc-per-node 4 -m benchmarks.sharded --model tiny --img-size 96 --batch 32

Every contestant makes the same fp32 step on the same images; ours are train_fsdp.train_step in the
modes `ddp`, `full_shard` and `hybrid` with two ranks per group, in FSDP2. `fully_shard` is that of
PyTorch on our model, a unit per block, with AdamW and nothing else: what FSDP2 itself costs.
Counted: the bytes of whole tensors that one step's collectives move, next to those of plan.py.
Timed: steps in interleaved rounds, and the counted collectives alone, one after the other. A
sharded step may be slower than DDP's by as much as its collectives alone are: `allowed` is that
ratio, `x ddp` the measured one.
"""

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import data
import mesh
import shard
import train_fsdp
import vit
from benchmarks import peers
from planner import estimate
from planner.traffic import PlannedRun
from runtime import step_profile
from runtime.agreement import StepGuard
from runtime.config import Config
from runtime.run import resolve

OURS, PLAIN, PEER = ("ddp", "full_shard", "hybrid"), "fully_shard", "transformers"
SMALL = 1000  # bytes: norms and checks, not parameters


def ours(
    mode: str, grid: DeviceMesh, model: str, batch: tuple[Tensor, Tensor], img_size: int
) -> Callable[[], object]:
    """Make a step of train_fsdp in a mode."""
    device, world = batch[0].device, dist.get_world_size()
    group = grid.size(1) if mode == "hybrid" else None
    run = resolve(Config(model, img_size, mode=mode, group=group, precision="fp32"), world, world)
    training = train_fsdp.build_training(run, grid)
    guard = StepGuard(device)

    def step() -> object:
        return train_fsdp.train_step(training, guard, [batch], lr=1e-5)

    return step


def plain(
    grid: DeviceMesh, config: vit.ViTConfig, batch: tuple[Tensor, Tensor], img_size: int
) -> Callable[[], object]:
    """Make a step of PyTorch's FSDP2 and fused AdamW: no gradient norm, no check for NaN."""
    model = vit.ViTMAE(config, img_size)
    vit.initialize(model)
    for block in [*model.blocks, *model.decoder_blocks]:
        fully_shard(block, mesh=grid["shard"])
    fully_shard(model, mesh=grid["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)

    def step() -> object:
        loss, _, _ = model(data.normalize(batch[0]), 0.75, batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def theirs(
    config: vit.ViTConfig, batch: tuple[Tensor, Tensor], img_size: int
) -> Callable[[], object]:
    """Make a step of transformers' model under DDP, with fused AdamW and nothing else."""
    mine = vit.ViTMAE(config, img_size)
    model = DistributedDataParallel(
        peers.transformers_mae(mine, 0.75), gradient_as_bucket_view=True
    )
    groups = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), fused=True)

    def step() -> object:
        loss = model(data.normalize(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def alone(grid: DeviceMesh, sent: Sequence[step_profile.CommEvent], rounds: int) -> float:
    """Time these collectives alone, one after the other; seconds, median of the rounds."""
    groups = {
        "shard": grid.get_group("shard"),
        "replicate": grid.get_group("replicate"),
        "world": dist.group.WORLD,
    }
    work: list[Callable[[], object]] = []
    for c in sent:
        group = groups[c.group]
        whole = torch.zeros(c.size // 4)
        part = torch.zeros(len(whole) // dist.get_world_size(group))
        whole = whole[: len(part) * dist.get_world_size(group)]
        calls: dict[str, Callable[[], object]] = {
            "all_gather": partial(dist.all_gather_into_tensor, whole, part, group),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, group=group),
            "all_reduce": partial(dist.all_reduce, whole, group=group),
        }
        work.append(calls[c.kind])
    return statistics.median(timed(lambda: [call() for call in work]) for _ in range(rounds))


def count_bytes(sent: Sequence[step_profile.CommEvent], grid: DeviceMesh) -> Counter[str]:
    """Sum the bytes by kind of collective; one in a group of a single rank sends nothing."""
    sizes = {name: grid[name].size() for name in ("shard", "replicate")} | {"world": grid.size()}
    counted = Counter[str]()
    for c in sent:
        if sizes[c.group] > 1:
            counted[c.kind] += c.size
    return counted


def timed(work: Callable[[], object]) -> float:
    """Return the seconds from the first rank's start to the last rank's end."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def count_collectives(step: Callable[[], object], grid: DeviceMesh) -> list[step_profile.CommEvent]:
    """Make steps, the last one counted; return its collectives of parameters or gradients."""
    for _ in range(3):  # DDP rebuilds its buckets after the first
        step()
    found: list[step_profile.CommEvent] = []
    with step_profile.counting(grid, found):
        step()
    return [c for c in found if c.size > SMALL]


def time_in_turns(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time each step once per round -> seconds by name."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        names = list(steps)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(timed(steps[name]))
    return seconds


def theory(name: str, counted: Counter[str], args: argparse.Namespace, world: int) -> str:
    """Say whether the bytes are those that plan.py plans, or what DDP's should be."""
    if name in (PEER, PLAIN):
        return "4 bytes per trained parameter" if name == PEER else "a unit per block"
    group = 2 if name == "hybrid" else None
    shape = args.batch, args.img_size
    config = vit.MODELS[args.model]
    run = PlannedRun(config, name, world, *shape, 0.75, group=group, precision="fp32")
    planned = estimate.Plan(run).json()["payload_bytes"]
    return "as planned" if planned == dict(counted) else f"NOT as planned: {planned}"


def parse_args(argv: Sequence[str] | None, world: int) -> argparse.Namespace:
    """Read the command line; exit where the ranks cannot be split into groups of two."""
    parser = argparse.ArgumentParser(description="Sharded steps against DDP of transformers.")
    add = parser.add_argument
    add("--model", choices=vit.MODELS, default="tiny")
    add("--img-size", type=int, default=96, metavar="PIXELS")
    add("--batch", type=int, default=32, metavar="IMAGES", help="per rank and step")
    add("--rounds", type=int, default=10)
    args = parser.parse_args(argv)
    if world % 2:
        parser.error(
            f"{world} ranks cannot be split into groups of two: start it with "
            "torchrun --nproc-per-node 4 -m benchmarks.sharded"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each contestant."""
    torch.set_num_threads(1)
    ranks, device = mesh.read_ranks(os.environ), torch.device("cpu")
    world = ranks.world_size
    args = parse_args(argv, world)
    mesh.init_ranks(ranks, device)
    draw = torch.Generator().manual_seed(ranks.rank)
    images = torch.randint(0, 256, (args.batch, 3, args.img_size, args.img_size), generator=draw)
    config = vit.MODELS[args.model]
    noise = torch.rand(args.batch, vit.patch_count(config, args.img_size), generator=draw)
    batch = images.to(torch.uint8), noise

    built: dict[str, Callable[[], object]] = {}
    grids = {PEER: mesh.build_mesh((world, 1), device)}
    for mode in OURS:
        shape = shard.mesh_shape(mode, world, 2 if mode == "hybrid" else None)
        grids[mode] = mesh.build_mesh(shape, device)
        built[mode] = ours(mode, grids[mode], args.model, batch, args.img_size)
    grids[PLAIN] = grids["full_shard"]
    built[PLAIN] = plain(grids[PLAIN], config, batch, args.img_size)
    built[PEER] = theirs(config, batch, args.img_size)
    sent = {name: count_collectives(step, grids[name]) for name, step in built.items()}
    seconds = time_in_turns(built, args.rounds)
    only = {name: alone(grids[name], sent[name], args.rounds) for name in built}

    if ranks.rank == 0:
        print(
            f"{args.model}, {args.img_size} px, batch {args.batch} on each of {world} ranks, "
            f"fp32, torch {torch.__version__}, {args.rounds} rounds"
        )
        base = statistics.median(seconds[PEER])
        for name, taken in seconds.items():
            counted, median = count_bytes(sent[name], grids[name]), statistics.median(taken)
            allowed = 1 + max(0.0, only[name] - only[PEER]) / base
            sizes = ", ".join(f"{kind} {size:,}" for kind, size in sorted(counted.items()))
            print(
                f"{name:13} {median:7.3f} s ({min(taken):.3f}-{max(taken):.3f})  x ddp "
                f"{median / base:5.2f}, allowed {allowed:5.2f}; collectives alone "
                f"{only[name]:6.3f} s; bytes: {sizes} ({theory(name, counted, args, world)})"
            )
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
