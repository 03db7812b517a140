"""Checkpoints of the small model: made, named and damaged, for many tests."""

from pathlib import Path

import small_model
import torch
import torch.distributed as dist
from small_model import CONFIG, CPU
from torch.distributed.device_mesh import DeviceMesh

import checkpoint
import mesh
import shard
import vit

SHARD = "__0_0.distcp"  # what rank 0 writes


def mesh_of(mode: str, group: int | None = None) -> DeviceMesh:
    """Build the mesh of a mode on the ranks that there are, with groups of so many."""
    over = shard.STRATEGIES[mode].shard_over
    return mesh.build_mesh(mesh.mesh_shape(over, dist.get_world_size(), group), CPU)


def build(mode="full_shard", *, seed=0, config=CONFIG):
    """Build a sharded model and its optimizer on the ranks that there are."""
    with torch.device("meta"):
        decay = shard.weight_decay_names(vit.ViTMAE(config, 32))
    model = small_model.build(mode, mesh_of(mode), config=config, seed=seed)
    return model, shard.build_optimizer(model, mode, decay, lr=1e-3, weight_decay=0.05)


def save_one(folder: Path) -> Path:
    """Save a checkpoint of one rank, trained a little; return its folder."""
    mesh.init_ranks(mesh.read_ranks({}), CPU)
    model, optimizer = build()
    small_model.forward_backward(model)
    optimizer.step()
    saved = checkpoint.save(folder, 2, model, optimizer)
    dist.destroy_process_group()
    return saved


def names(folder: Path) -> list[str]:
    """List the checkpoints in a folder, unfinished and damaged ones too."""
    return sorted(p.name for p in folder.iterdir() if "step_" in p.name)


def steps(*numbers: int) -> list[str]:
    """Name the checkpoints after these steps."""
    return [f"step_{n:08d}" for n in numbers]


def flip(path: Path, bit: int | None = None) -> None:
    """Flip one bit of a file, by default in its middle."""
    content = bytearray(path.read_bytes())
    place = len(content) // 2 if bit is None else bit // 8
    content[place] ^= 1 << (bit or 0) % 8
    path.write_bytes(content)
