"""Ranks and their device mesh: who am I, which device is mine, whom do I share parameters with.

Ranks come from Slurm (srun), from torchrun, or there is one process. They form a grid, the mesh:
a row is a shard group (ranks that together hold one copy of the parameters), a column a replicate
group (ranks that hold the same shard). Eight ranks on two nodes of four, `--mode hybrid --group 4`:

                      shard 0  1  2  3
        replicate 0         0  1  2  3      node 0
                  1         4  5  6  7      node 1

Ranks fill nodes in blocks, so neighbours in a row are neighbours on a node. Every rank reads images
of its own, whatever the mesh.

Copy this one file: it needs torch alone.
"""

import json
import math
import os
import platform
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

MOST_RANKS = 10**6  # more than any machine has


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
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    set_one = next(name for name in names if name in environ)
    by = f"torchrun, which is assumed because {set_one} is set"
    rank, world, local_rank, local_world = whole_numbers(environ, names, by)
    whole_numbers(environ, ["MASTER_PORT"], by, 1, 65535)
    _text(environ, "MASTER_ADDR", by)
    node = rank // max(local_world, 1)
    if "GROUP_RANK" in environ:
        (node,) = whole_numbers(environ, ["GROUP_RANK"], by)
    return Ranks(rank, world, local_rank, local_world, node, "torchrun", environ)


def _slurm_ranks(environ: Mapping[str, str]) -> Ranks:
    names = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"]
    rank, world, local_rank, node = whole_numbers(environ, names, "srun")
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or _text(
        environ, "SLURM_TASKS_PER_NODE", "srun"
    )
    counts = _tasks_per_node(text, world)
    if sum(counts) != world or node >= len(counts):
        raise RuntimeError(
            f"Slurm's variables disagree: tasks per node {text}, SLURM_NTASKS {world}, "
            f"SLURM_NODEID {node}"
        )
    if local_rank < counts[node] and rank < world and rank != sum(counts[:node]) + local_rank:
        raise RuntimeError(
            f"rank {rank} is local rank {local_rank} of node {node}, but ranks must fill the nodes "
            f"{text} in blocks: add `--distribution=block` to srun"
        )
    init = dict(environ)
    if len(counts) == 1:  # all ranks on this node: an address and a port that are this step's own
        step = environ.get("SLURM_STEP_ID") or environ["SLURM_STEPID"]
        own = zlib.crc32(f"{environ.get('SLURM_JOB_ID')}.{step}".encode())
        init["MASTER_ADDR"] = environ.get("MASTER_ADDR") or "127.0.0.1"
        init["MASTER_PORT"] = environ.get("MASTER_PORT") or str(20000 + own % 10000)
    by = "you, for a job of several nodes: `export {}={}` before srun"
    _text(init, "MASTER_ADDR", by.format("MASTER_ADDR", "$(hostname -i)"))
    whole_numbers(init, ["MASTER_PORT"], by.format("MASTER_PORT", "3442"), 1, 65535)
    return Ranks(rank, world, local_rank, counts[node], node, "srun", init)


def _text(environ: Mapping[str, str], name: str, setter: str) -> str:
    if not environ.get(name):
        raise RuntimeError(f"the environment variable {name} is missing; it is set by {setter}")
    return environ[name]


def whole_numbers(
    environ: Mapping[str, str], names: list[str], by: str, low: int = 0, high: int = MOST_RANKS
) -> list[int]:
    """Read environment variables; RuntimeError that names the one out of range and who sets it."""
    for name in names:
        text = _text(environ, name, by)
        if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
            raise RuntimeError(
                f"{name} is {text!r:.40}, but must be a whole number from {low} to {high}; "
                f"set by {by}"
            )
    return [int(environ[name]) for name in names]


def _tasks_per_node(text: str, world: int) -> list[int]:
    """Slurm's "8(x2),4" -> [8, 8, 4]; it ends where there are more nodes than ranks."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,99})\))?", part)
        if not match:
            raise RuntimeError(
                f"Slurm's tasks per node are {text!r:.80}, but should look like 8(x2)"
            )
        counts += [int(match[1])] * min(int(match[2] or 1), world + 1)
        if len(counts) > world:
            break
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
    "MI250": (181e12, "AMD MI250 data sheet, 362.1 a card, per GCD"),
    "MI210": (181e12, "AMD MI210 data sheet"),
    "MI300A": (980.6e12, "AMD MI300A data sheet"),
    "MI300X": (1307.4e12, "AMD MI300X data sheet"),
    "MI325X": (1307.4e12, "AMD MI325X data sheet"),
    "A100": (312e12, "NVIDIA A100 data sheet"),
    "H100 PCIe": (756e12, "NVIDIA H100 data sheet, PCIe"),
    "H100 NVL": (835.5e12, "NVIDIA H100 NVL data sheet"),
    "H100": (989e12, "NVIDIA H100 data sheet, SXM"),
    "H200": (989e12, "NVIDIA H200 data sheet, SXM"),  # GH200 too
    "GB200": (2500e12, "NVIDIA GB200 data sheet, half of two GPUs' 5000"),
    "B200": (2250e12, "NVIDIA DGX B200 data sheet, an eighth of 18000"),
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
    ValueError, on all ranks, where some have a GPU and others the CPU.
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
        store, _, _ = next(dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=wait))
        store.set_timeout(wait)
        check_devices(store, ranks, device)
        dist.init_process_group(
            backend,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=wait,
            store=store,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, OSError) as error:  # torch names the address in some of them only
        raise RuntimeError(f"{address}:{port}: {str(error).splitlines()[0]}") from error
    finally:
        notice.cancel()


def check_devices(store: dist.Store, ranks: Ranks, device: torch.device) -> None:
    """Refuse a job of GPUs and CPUs, whose backends would wait for each other: ValueError.

    It names the ranks, and all of them raise it. Collective.
    """
    store.set(f"device/{ranks.rank}", json.dumps([device.type, platform.node()]))
    if ranks.rank == 0:
        keys = [f"device/{rank}" for rank in range(ranks.world_size)]
        found = [json.loads(text) for text in store.multi_get(keys)]
        without = [f"{i} ({host})" for i, (kind, host) in enumerate(found) if kind == "cpu"]
        problem = ""
        if 0 < len(without) < len(found):
            named = ", ".join(without[:8]) + (" ..." if len(without) > 8 else "")
            problem = (
                f"{len(without)} of {len(found)} ranks found no GPU, the others did: rank {named}; "
                "give --device cpu to all, or leave these nodes out"
            )
        store.set("device/problem", problem)
    problem = store.get("device/problem").decode()
    if problem:
        store.set(f"device/{ranks.rank}/heard", "")
        if ranks.rank == 0:  # it keeps the store
            store.wait([f"device/{rank}/heard" for rank in range(ranks.world_size)])
        raise ValueError(problem)


def check_group(world_size: int, group: int) -> None:
    """Refuse a shard group that does not divide the world: ValueError with the sizes that do."""
    if group < 1 or world_size % group:
        sizes = ", ".join(map(str, divisors(world_size)))
        raise ValueError(f"shard groups of {group} do not divide {world_size} ranks: use {sizes}")


def divisors(number: int) -> list[int]:
    """List the whole numbers that divide it, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


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
