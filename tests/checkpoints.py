"""Checkpoints of the small model, and the names of their folders."""

from pathlib import Path

import small_model
import torch
import torch.distributed as dist
from small_model import CONFIG, CPU

import checkpoint
import mesh
import shard
import vit


def build(mode="full_shard", fsdp=2, group=None, *, seed=0, ac="none", config=CONFIG):
    """Build a sharded model and its optimizer on the ranks that there are."""
    with torch.device("meta"):
        decay = shard.weight_decay_names(vit.ViTMAE(config, 32))
    grid = mesh.build_mesh(
        mesh.mesh_shape(shard.STRATEGIES[mode].shard_over, dist.get_world_size(), group), CPU
    )
    model = small_model.build(mode, grid, config=config, seed=seed, fsdp=fsdp, ac=ac)
    return model, shard.build_optimizer(model, mode, decay, lr=1e-3, weight_decay=0.05)


def train(model, optimizer, steps) -> list[float]:
    """The losses of these steps; a step's images are the same on every rank of every world."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 32, 32, generator=generator)
        loss, _, _ = model(images, 0.75, torch.rand(4, 16, generator=generator))
        loss.backward()
        shard.clip_grad_norm(model, 1.0)
        shard.optimizer_step(optimizer, torch.tensor(0.0))
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_one(folder: Path) -> Path:
    """Save a checkpoint of one rank after two steps; return its folder."""
    mesh.init_ranks(mesh.read_ranks({}), CPU)
    model, optimizer = build()
    train(model, optimizer, range(2))
    saved = checkpoint.save(folder, 2, model, optimizer)
    dist.destroy_process_group()
    return saved


def names(folder: Path) -> list[str]:
    """List the checkpoints in a folder, unfinished and damaged ones too."""
    return sorted(p.name for p in folder.iterdir() if "step_" in p.name)


def steps(*numbers: int) -> list[str]:
    """Name the checkpoints after these steps."""
    return [f"step_{n:08d}" for n in numbers]
