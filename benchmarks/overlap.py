"""Measure how much a save in the background slows the steps that it overlaps.

    torchrun --nproc-per-node 2 -m benchmarks.overlap --model base --batch 8

Each turn times some steps alone, then starts a save and times the steps until it has ended (the
last one overlaps in part); both kinds alternate, so that they see the same machine. The copy to
host memory, for which training waits, is timed separately. Give each rank one core more than it
has threads: otherwise writing and computing share a core.
"""

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import data
import mesh
import shard
import vit
from runtime import agreement


def main() -> int:
    parser = argparse.ArgumentParser(description="Time steps during a save against steps alone.")
    parser.add_argument("--model", choices=vit.MODELS, default="base")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8, help="images per rank and step")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--alone", type=int, default=6, help="steps alone per turn")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dir", help="where to save (default: a temporary folder)")
    args = parser.parse_args()

    ranks = mesh.read_ranks(os.environ)
    device = mesh.pick_device(args.device, ranks)
    mesh.init_ranks(ranks, device)
    gloo = dist.new_group(backend="gloo")
    config = vit.MODELS[args.model]
    with torch.device("meta"):
        whole = vit.ViTMAE(config, args.img_size)
    decay = shard.weight_decay_names(whole)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = shard.apply(
        whole,
        "full_shard",
        mesh.build_mesh(shard.mesh_shape("full_shard", ranks.world_size), device),
        device=device,
        block_classes={vit.Block},
        initial_value=partial(vit.initial_value, config, seed=0),
        options=shard.ShardingOptions(param_dtype=dtype, cast_inputs=False),
    )
    optimizer = shard.build_optimizer(model, "full_shard", decay, lr=1e-4, weight_decay=0.05)
    images = torch.randint(0, 256, (args.batch, 3, args.img_size, args.img_size), device=device)
    noise = torch.rand(args.batch, vit.patch_count(config, args.img_size), device=device)
    nothing = torch.zeros((), device=device)

    def step() -> float:
        """Return the seconds of one step, which ends on all ranks together."""
        started = time.perf_counter()
        loss, _, _ = model(data.normalize(images), 0.75, noise)
        loss.backward()
        shard.optimizer_step(optimizer, nothing)
        optimizer.zero_grad()
        agreement.mean_over_ranks(loss[None])
        return time.perf_counter() - started

    folder = args.dir or agreement.run_on_rank0(tempfile.mkdtemp)
    saver = checkpoint.Saver(folder, model, optimizer, keep=1, group=gloo, background=True)
    alone, during, copies, saves = [], [], [], []
    for _ in range(3):
        step()
    saver.save(0, {})  # the first one also makes folders, threads, connections
    for turn in range(args.turns):
        alone += [step() for _ in range(args.alone)]
        started = time.perf_counter()
        saver.save(turn + 1, {}, wait=False)
        copies.append(time.perf_counter() - started)
        writing = True
        while writing:
            during.append(step())  # began while it was written
            # the same on all ranks: as long as one of them writes
            busy = torch.tensor(float(saver.pending is not None and not saver.pending.done()))
            writing = agreement.mean_over_ranks(busy.to(device)[None])[0] > 0
        saver.finish()
        saves.append(time.perf_counter() - started)
    if ranks.rank == 0:
        medians = [statistics.median(kind) for kind in (alone, during or [float("nan")])]
        size = sum(f.stat().st_size for f in Path(folder).glob("step_*/*")) / 1e9
        print(f"{args.model} on {ranks.world_size} ranks, {size:.2f} GB, torch {torch.__version__}")
        print(f"copy {statistics.median(copies):.2f} s, save {statistics.median(saves):.2f} s")
        print(
            f"step alone {medians[0]:.3f} s ({len(alone)}), during a save {medians[1]:.3f} s "
            f"({len(during)}), ratio {medians[1] / medians[0]:.3f}"
        )
    dist.barrier()
    if ranks.rank == 0 and not args.dir:
        for path in sorted(Path(folder).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        Path(folder).rmdir()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
