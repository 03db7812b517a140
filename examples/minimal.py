"""Pretrain a ViT-MAE in any sharding mode: copy vit.py, data.py, mesh.py and shard.py beside this.
    python minimal.py --data DIR                                                # one process
    torchrun --nproc-per-node 4 minimal.py --data DIR --mode hybrid --group 2   # two copies
    srun python minimal.py --data DIR --mode full_shard                         # Slurm
The losses are those of train_fsdp.py with the same flags. It lacks what keeps a long run alive:
checkpoints, a log, signals, a check of each step, a watchdog."""

import argparse
import math
import os
import warnings
from functools import partial

import torch
import torch.distributed as dist

import data
import mesh
import shard
import vit


def learning_rate(step: int, steps: int, peak_lr: float) -> float:
    warmup = steps // 20
    if step < warmup:
        return peak_lr * (step + 1) / warmup
    return peak_lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train(args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore", "FSDP2-wrapped .* returned a view")  # nobody writes into it
    ranks = mesh.read_ranks(os.environ)  # from srun, torchrun or neither
    device = mesh.pick_device("auto", ranks)
    mesh.init_ranks(ranks, device)
    dtype = getattr(torch, args.dtype)
    config = vit.MODELS[args.model]
    global_batch = args.batch * ranks.world_size
    peak_lr = 1.5e-4 * global_batch / 256

    # A model of shapes alone. Each block gets its values, the same on all ranks, and is sharded.
    with torch.device("meta"):
        model = vit.ViTMAE(config, args.img_size)
    decay = shard.weight_decay_names(model)  # before sharding: it looks at full shapes
    shard_over = shard.STRATEGIES[args.mode].shard_over
    shape = mesh.mesh_shape(shard_over, ranks.world_size, args.group)
    grid = mesh.build_mesh(shape, device)
    model = shard.apply(
        model,
        args.mode,
        grid,
        block_classes={vit.Block},
        init_fn=partial(vit.initial_value, config),
        options=shard.ShardingOptions(param_dtype=dtype, cast_inputs=False),  # vit.py casts inputs
    )
    optimizer = shard.build_optimizer(model, args.mode, decay, lr=peak_lr, weight_decay=0.05)

    # Every rank reads images of its own, whatever the mode.
    loader = data.build_loader(
        data.scan(args.data),
        img_size=args.img_size,
        patches=vit.patch_count(config, args.img_size),
        seed=0,
        global_batch=global_batch,
        micro_batch_size=args.batch,
        steps=range(args.steps),
        rank=ranks.rank,
        world_size=ranks.world_size,
        workers=args.workers,
    )
    for step, batch in enumerate(loader):
        images = data.normalize(batch.image.to(device))  # (B, C, H, W) float32
        noise = batch.noise.to(device)  # (B, L): it decides which patches are removed
        with shard.autocast(model, device, dtype):  # for ddp and zero1: FSDP casts by itself
            loss, _, _ = model(images, 0.75, noise)
        loss.backward()
        norm = shard.clip_grad_norm(model)  # measured over all shards, not clipped
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, peak_lr)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.detach().double() / ranks.world_size
        dist.all_reduce(mean_loss)
        if ranks.rank == 0:
            progress = f"step {step + 1}/{args.steps}"
            print(f"{progress}  loss {mean_loss:.17g}  norm {norm:.9g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--model", default="tiny", choices=vit.MODELS)
    parser.add_argument("--img-size", type=int, default=96)
    parser.add_argument("--mode", default="full_shard", choices=shard.STRATEGIES)
    parser.add_argument("--group", type=int, help="hybrid modes: ranks that share one copy")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1, help="loader processes per rank")
    train(parser.parse_args())
