"""Split each block over several ranks, and shard what they hold: tensor parallelism and FSDP2.

    python -m examples.tensor_parallel                                               # one process
    torchrun --nproc-per-node 4 -m examples.tensor_parallel --tp 2

All with PyTorch's own parts, on blocks of vit.py. Of n ranks that split a block (Megatron-LM, arXiv
1909.08053), each computes 1/n of the heads of attention and 1/n of the features inside the MLP, for
the same images, and holds only the rows or columns of the matrices that belong to them:

    x -> qkv, fc1 (split by rows) -> heads, GELU -> proj, fc2 (split by columns) -> all-reduce -> x

So a block has two all-reduces of activations (B, T, D) in forward and two in backward: worth it
where sharding alone does not fit, and only between ranks of one node. FSDP2 shards what a rank
holds over the ranks with other images. Whatever the ranks, the printed losses are the same to 1e-5.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel

import mesh
import vit

# `tiny`, but with four heads everywhere, which two or four ranks can share
CONFIG = vit.ViTConfig(192, 4, 768, 4, 8, decoder_width=128, decoder_depth=2, decoder_heads=4)
IMG_SIZE = 32
GLOBAL_BATCH = 16

# Layers of a block by how their weights (out, in) are split. PyTorch names the styles after the
# matrix of the formula x W, which is the transposed weight.
SPLIT: dict[str, parallel.ParallelStyle] = {
    "attn.qkv": parallel.ColwiseParallel(),
    "attn.proj": parallel.RowwiseParallel(),
    "mlp.fc1": parallel.ColwiseParallel(),
    "mlp.fc2": parallel.RowwiseParallel(),
}


def split_block(block: vit.Block, tp: DeviceMesh) -> None:
    """Split a block, which has its full values, over the ranks of `tp`."""
    ranks = tp.size()
    for p in block.attn.qkv.parameters():
        # The rows (3 D, ...) are q, k, v, each head by head. A rank gets contiguous rows, and needs
        # q, k and v of its heads: from (q, k, v) x ranks to ranks x (q, k, v).
        p.data = p.data.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
    block.attn.heads //= ranks
    # None: every rank has the whole values and keeps its part, without communication
    parallel.parallelize_module(block, tp, SPLIT, src_data_rank=None)


def build_model(grid: DeviceMesh, device: torch.device) -> nn.Module:
    """Build the model with the same values on all ranks, then split and shard it."""
    with torch.device("meta"):
        model: Any = vit.ViTMAE(CONFIG, IMG_SIZE)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(vit.initial_value(CONFIG, name, tensor.shape, device=device))
    for block in [*model.blocks, *model.decoder_blocks]:
        if grid["tp"].size() > 1:
            split_block(block, grid["tp"])
        fully_shard(block, mesh=grid["data"])
    fully_shard(model, mesh=grid["data"])
    return model


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Build an AdamW with a group for each mesh: its fused step takes tensors of one mesh."""
    groups: dict[Any, list[Any]] = {}
    for p in model.parameters():  # split ones are on (data, tp), all others on (data,)
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-3, fused=True)


def batch(step: int, part: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw the images (B, C, H, W) and masking noise (B, L) of a part of a step's global batch."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(GLOBAL_BATCH, 3, IMG_SIZE, IMG_SIZE, generator=generator)
    noise = torch.rand(GLOBAL_BATCH, vit.patch_count(CONFIG, IMG_SIZE), generator=generator)
    return images[part].to(device), noise[part].to(device)


def train(tp: int, steps: int) -> None:
    """Train on random images; print the loss of each step."""
    ranks = mesh.read_ranks(os.environ)
    if ranks.world_size % tp or CONFIG.heads % tp or GLOBAL_BATCH % (ranks.world_size // tp):
        heads = f"{CONFIG.heads} heads"
        raise SystemExit(f"--tp {tp} must divide {ranks.world_size} ranks and {heads}")
    device = mesh.pick_device("auto", ranks)
    mesh.init_ranks(ranks, device)
    data_ranks = ranks.world_size // tp
    # neighbours split a block: they exchange most
    grid = init_device_mesh(device.type, (data_ranks, tp), mesh_dim_names=("data", "tp"))
    model = build_model(grid, device)
    optimizer = build_optimizer(model)
    place = grid["data"].get_local_rank()
    part = slice(place, GLOBAL_BATCH, data_ranks)  # the same for all ranks that split a block
    for step in range(steps):
        images, noise = batch(step, part, device)
        loss, _, _ = model(images, 0.75, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.detach().double() / ranks.world_size
        dist.all_reduce(mean_loss)
        if ranks.rank == 0:
            print(f"step {step + 1}  loss {mean_loss:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="ranks that split each block")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    train(args.tp, args.steps)
