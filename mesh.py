"""Ranks and their device mesh: who am I, which device is mine, whom do I share parameters with.

Ranks come from Slurm (srun), from torchrun, or there is one process. They form a grid, the mesh:
a row is a shard group (ranks that together hold one copy of the parameters), a column a replicate
group (ranks that hold the same shard). Eight ranks on two nodes of four, `--mode hybrid --group 4`:

                      shard 0  1  2  3
        replicate 0         0  1  2  3      node 0
                  1         4  5  6  7      node 1

Ranks fill nodes in blocks, so neighbours in a row are neighbours on a node. Every rank reads images
of its own, whatever the mesh. Copy this one file: it needs torch alone.
"""

import os
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from threading import Timer

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# ---------------------------------------------------------------------------------------------
# Ranks


@dataclass(frozen=True)
class Ranks:
    """Where this process stands in the job. Ranks of a node share the node; numbers from 0."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int  # ranks on this node
    node: int
    launcher: str  # "torchrun", "srun" or "single"
    init: Mapping[str, str]  # the environment that a process group needs, completed


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """Ranks from torchrun's variables, else from srun's, else a single process.

    torchrun goes first, since under `srun torchrun` Slurm's variables count its agents. Raises
    RuntimeError, one sentence that names the missing variable and who sets it, when a launcher's
    variables are there in part; a job is never silently taken for a single process.
    """
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        ranks = _torchrun_ranks(environ)
    elif "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ:
        ranks = _slurm_ranks(environ)
    else:
        tasks, nodes = environ.get("SLURM_NTASKS", "1"), environ.get("SLURM_JOB_NUM_NODES", "1")
        if "SLURM_JOB_ID" in environ and (tasks, nodes) != ("1", "1"):
            raise RuntimeError(
                f"this Slurm job has {nodes} nodes and {tasks} tasks, but this process was not "
                "started by srun: type `srun python train_fsdp.py ...`"
            )
        ranks = Ranks(0, 1, 0, 1, 0, "single", environ)
    if ranks.rank >= ranks.world_size or ranks.local_rank >= ranks.local_world_size:
        raise RuntimeError(
            f"rank {ranks.rank} of {ranks.world_size}, local rank {ranks.local_rank} of "
            f"{ranks.local_world_size}: a rank must be smaller than its count ({ranks.launcher})"
        )
    return ranks


def _torchrun_ranks(environ: Mapping[str, str]) -> Ranks:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
    set_one = next(name for name in names if name in environ)
    by = f"torchrun, which is assumed because {set_one} is set"
    rank, world, local_rank, local_world, _ = _integers(environ, names, by)
    _text(environ, "MASTER_ADDR", by)
    node = rank // max(local_world, 1)
    if "GROUP_RANK" in environ:
        (node,) = _integers(environ, ["GROUP_RANK"], by)
    return Ranks(rank, world, local_rank, local_world, node, "torchrun", environ)


def _slurm_ranks(environ: Mapping[str, str]) -> Ranks:
    names = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"]
    rank, world, local_rank, node = _integers(environ, names, "srun")
    counts = _tasks_per_node(
        environ.get("SLURM_STEP_TASKS_PER_NODE") or _text(environ, "SLURM_TASKS_PER_NODE", "srun")
    )
    if sum(counts) != world or node >= len(counts):
        raise RuntimeError(
            f"Slurm's variables disagree: tasks per node {counts}, SLURM_NTASKS {world}, "
            f"SLURM_NODEID {node}"
        )
    if local_rank < counts[node] and rank < world and rank != sum(counts[:node]) + local_rank:
        raise RuntimeError(
            f"rank {rank} is local rank {local_rank} of node {node}, but ranks must fill the nodes "
            f"{counts} in blocks: add `--distribution=block` to srun"
        )
    init = dict(environ)
    if len(counts) == 1:  # all ranks on this node: an address and a port that are this step's own
        step = environ.get("SLURM_STEP_ID") or environ["SLURM_STEPID"]
        own = zlib.crc32(f"{environ.get('SLURM_JOB_ID')}.{step}".encode())
        init["MASTER_ADDR"] = environ.get("MASTER_ADDR") or "127.0.0.1"
        init["MASTER_PORT"] = environ.get("MASTER_PORT") or str(20000 + own % 10000)
    for name, value in (("MASTER_ADDR", "$(hostname -i)"), ("MASTER_PORT", "3442")):
        _text(init, name, f"you, for a job of several nodes: `export {name}={value}` before srun")
    return Ranks(rank, world, local_rank, counts[node], node, "srun", init)


def _text(environ: Mapping[str, str], name: str, setter: str) -> str:
    if not environ.get(name):
        raise RuntimeError(f"the environment variable {name} is missing; it is set by {setter}")
    return environ[name]


def _integers(environ: Mapping[str, str], names: list[str], by: str) -> list[int]:
    for name in names:
        if not _text(environ, name, by).isdigit():
            raise RuntimeError(f"{name} is {environ[name]!r}, but must be a number; set by {by}")
    return [int(environ[name]) for name in names]


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's "8(x2),4" -> [8, 8, 4]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise RuntimeError(f"Slurm's tasks per node are {text!r}, but should look like 8(x2)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def cpu_cores(ranks: Ranks) -> int:
    """CPU cores of this rank: those Slurm bound it to, else its part of what a node's ranks see."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    return cores if ranks.launcher == "srun" else max(1, cores // ranks.local_world_size)


# ---------------------------------------------------------------------------------------------
# Devices


def pick_device(name: str, ranks: Ranks) -> torch.device:
    """`auto`, `cpu` or `cuda` (ROCm too) -> this rank's device.

    A rank may see one device, its own, always numbered 0 (`--gpus-per-task=1`), or all of its
    node's. Raises ValueError where there is none or too few.
    """
    count = torch.cuda.device_count() if name != "cpu" else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise ValueError("--device cuda: no GPU is visible to this process; use --device cpu")
    if 1 < count < ranks.local_world_size:
        raise ValueError(
            f"{ranks.local_world_size} ranks on this node share {count} GPUs: start {count} ranks "
            "a node, or use --device cpu"
        )
    return torch.device("cuda", 0 if count == 1 else ranks.local_rank)


# Dense bf16 peak of one device as torch numbers them, in FLOP/s, from the makers' data sheets. One
# MI250X is two devices (GCDs): 191.5e12 each (OLCF Frontier user guide), not 383e12.
PEAK_FLOPS = {
    "MI250X": (191.5e12, "OLCF Frontier user guide, per GCD"),
    "MI300A": (980.6e12, "AMD MI300A data sheet"),
    "MI300X": (1307.4e12, "AMD MI300X data sheet"),
    "A100": (312e12, "NVIDIA A100 data sheet"),
    "H100 PCIe": (756e12, "NVIDIA H100 data sheet, PCIe"),
    "H100 NVL": (835.5e12, "NVIDIA H100 NVL data sheet"),
    "H100": (989e12, "NVIDIA H100 data sheet, SXM"),
    "H200": (989e12, "NVIDIA H200 data sheet, SXM"),
}


def peak_flops(device: torch.device) -> tuple[float | None, str]:
    """Peak dense bf16 FLOP/s of the device and the source; (None, why) where it is not known."""
    if device.type != "cuda":
        return None, "not known for a CPU"
    name = torch.cuda.get_device_name(device)
    for part, known in PEAK_FLOPS.items():
        if part in name:
            return known
    return None, f"not known for {name}"


# ---------------------------------------------------------------------------------------------
# Process group and mesh


def init_ranks(ranks: Ranks, device: torch.device, timeout_minutes: float = 20) -> None:
    """Start the default process group: nccl (RCCL on ROCm) for GPU tensors, gloo for CPU ones.

    Waits for all ranks, at most `timeout_minutes`, then RuntimeError; says so where it takes long.
    """
    backend, wait = "gloo", timedelta(minutes=timeout_minutes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if ranks.launcher == "single":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
        return
    address, port = ranks.init["MASTER_ADDR"], ranks.init["MASTER_PORT"]
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    text = f"rank {ranks.rank} waits at {address}:{port} for all of {ranks.world_size} ranks"
    notice = Timer(30, print, [text], {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
    try:
        dist.init_process_group(
            backend, rank=ranks.rank, world_size=ranks.world_size, timeout=wait,
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
    finally:
        notice.cancel()


def check_group(world_size: int, group: int) -> None:
    """Refuse a shard group that does not divide the world: ValueError with the sizes that do."""
    if group < 1 or world_size % group:
        sizes = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"shard groups of {group} do not divide {world_size} ranks: use {', '.join(sizes)}"
        )


def straddles(group: int, local_world_size: int) -> bool:
    """Whether a shard group reaches over the edge of a node, all nodes having as many ranks."""
    return group > local_world_size or local_world_size % group != 0


def build_mesh(shape: tuple[int, int], device: torch.device) -> DeviceMesh:
    """The mesh of all ranks, dimensions "replicate" and "shard"; shape = (replicas, ranks a group).

    Collective: every rank calls it, after `init_ranks`. Raises ValueError where the shape does not
    hold exactly the world.
    """
    replicate, shard = shape
    check_group(dist.get_world_size(), shard)
    if replicate * shard != dist.get_world_size():
        raise ValueError(f"a mesh of {replicate} x {shard} is not {dist.get_world_size()} ranks")
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
