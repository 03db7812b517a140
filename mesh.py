"""Find this process's rank, choose its device, start the process group, build the device mesh.

Ranks come from Slurm (srun), from torchrun, or there is one process. They form a grid, the mesh:
a row is a shard group (ranks that together hold one copy of the parameters), a column a replicate
group (ranks that hold the same shard). Eight ranks on two nodes of four, `--mode hybrid --group 4`:

                      shard 0  1  2  3
        replicate 0         0  1  2  3      node 0
                  1         4  5  6  7      node 1

Ranks fill nodes in blocks, so neighbours in a row are neighbours on a node. Every rank reads images
of its own, whatever the mesh. Copy this one file: it needs torch alone.
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


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job; all numbers start at 0."""

    rank: int
    world_size: int
    local_rank: int  # on this node
    local_world_size: int  # ranks on this node
    node: int
    launcher: str  # "torchrun", "srun" or "single"
    init: Mapping[str, str]  # the environment, with MASTER_ADDR and MASTER_PORT added if missing


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """Read the ranks from torchrun's variables, else from srun's, else return a single process.

    Raises RuntimeError, one sentence that names the missing variable and who sets it, if only some
    of a launcher's variables are set: a job is never silently taken for a single process.
    """
    # torchrun first: under `srun torchrun` Slurm's variables count torchrun's agents, not ranks.
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        ranks = _torchrun_ranks(environ)
    elif "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ:
        ranks = _slurm_ranks(environ)
    else:
        # Inside a batch job, but not started by srun: every task but this one would be missing.
        tasks, nodes = environ.get("SLURM_NTASKS", "1"), environ.get("SLURM_JOB_NUM_NODES", "1")
        if "SLURM_JOB_ID" in environ and (tasks, nodes) != ("1", "1"):
            raise RuntimeError(
                f"this Slurm job has {nodes} nodes and {tasks} tasks, but this process was not "
                f"started by srun: type `srun python {os.path.basename(sys.argv[0])} ...`"
            )
        ranks = Ranks(0, 1, 0, 1, 0, "single", environ)
    if ranks.rank >= ranks.world_size or ranks.local_rank >= ranks.local_world_size:
        raise RuntimeError(
            f"rank {ranks.rank} of {ranks.world_size}, local rank {ranks.local_rank} of "
            f"{ranks.local_world_size}: out of range, ranks count from 0 ({ranks.launcher})"
        )
    return ranks


def _torchrun_ranks(environ: Mapping[str, str]) -> Ranks:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    present = next(name for name in names if name in environ)
    setter = f"torchrun, which is assumed because {present} is set"
    rank, world, local_rank, local_world = read_integers(environ, names, setter)
    read_integers(environ, ["MASTER_PORT"], setter, 1, 65535)
    _read_text(environ, "MASTER_ADDR", setter)
    node = rank // max(local_world, 1)
    if "GROUP_RANK" in environ:  # the number of this node's torchrun
        (node,) = read_integers(environ, ["GROUP_RANK"], setter)
    return Ranks(rank, world, local_rank, local_world, node, "torchrun", environ)


def _slurm_ranks(environ: Mapping[str, str]) -> Ranks:
    names = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"]
    rank, world, local_rank, node = read_integers(environ, names, "srun")
    # A step may have fewer tasks than its job: the step's own count comes first.
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    text = text or _read_text(environ, "SLURM_TASKS_PER_NODE", "srun")
    counts = _tasks_per_node(text, world)
    if sum(counts) != world or node >= len(counts):
        raise RuntimeError(
            f"Slurm's variables disagree: tasks per node {text}, SLURM_NTASKS {world}, "
            f"SLURM_NODEID {node}"
        )
    # Round-robin over the nodes would make each shard group, neighbours in rank, span all nodes.
    if local_rank < counts[node] and rank < world and rank != sum(counts[:node]) + local_rank:
        raise RuntimeError(
            f"rank {rank} is local rank {local_rank} of node {node}, but ranks must fill the nodes "
            f"{text} in blocks: add `--distribution=block` to srun"
        )
    init = dict(environ)
    if len(counts) == 1:
        # All ranks are on this node, so the address is known. The port is a hash of job and step,
        # so that two jobs that share the node do not choose the same one.
        step = environ.get("SLURM_STEP_ID") or environ["SLURM_STEPID"]
        number = zlib.crc32(f"{environ.get('SLURM_JOB_ID')}.{step}".encode())
        init["MASTER_ADDR"] = environ.get("MASTER_ADDR") or "127.0.0.1"
        init["MASTER_PORT"] = environ.get("MASTER_PORT") or str(20000 + number % 10000)
    setter = "you, for a job of several nodes: `export {}={}` before srun"
    _read_text(init, "MASTER_ADDR", setter.format("MASTER_ADDR", "$(hostname -i)"))
    read_integers(init, ["MASTER_PORT"], setter.format("MASTER_PORT", "3442"), 1, 65535)
    return Ranks(rank, world, local_rank, counts[node], node, "srun", init)


def _read_text(environ: Mapping[str, str], name: str, setter: str) -> str:
    if not environ.get(name):
        raise RuntimeError(f"the environment variable {name} is missing; it is set by {setter}")
    return environ[name]


def read_integers(
    environ: Mapping[str, str], names: list[str], setter: str, low: int = 0, high: int = 10**6
) -> list[int]:
    """Read environment variables as integers from `low` to `high`.

    Raises RuntimeError that names the first bad variable, its value and its `setter`.
    """
    for name in names:
        text = _read_text(environ, name, setter)
        # Not int(text) alone, which also takes " 1", "1_0" and the digits of other alphabets.
        if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
            raise RuntimeError(
                f"{name} is {text!r:.40}, but must be a whole number from {low} to {high}; "
                f"set by {setter}"
            )
    return [int(environ[name]) for name in names]


def _tasks_per_node(text: str, world: int) -> list[int]:
    """Expand Slurm's "8(x2),4" to [8, 8, 4]; stops at more nodes than `world` ranks."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,99})\))?", part)
        if not match:
            raise RuntimeError(f"Slurm's tasks per node are {text!r:.80}, but must look like 8(x2)")
        counts += [int(match[1])] * min(int(match[2] or 1), world + 1)
        if len(counts) > world:
            break
    return counts


# ---------------------------------------------------------------------------------------------
# Devices


def process_cores() -> int:
    """Count the CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_cores(ranks: Ranks) -> int:
    """Count the CPU cores of this rank, at least 1."""
    # srun binds each rank to cores of its own; other launchers leave it all cores of the node.
    shared_by = 1 if ranks.launcher == "srun" else ranks.local_world_size
    return max(1, process_cores() // shared_by)


def pick_device(name: str, ranks: Ranks) -> torch.device:
    """Choose this rank's device for the name `auto`, `cpu` or `cuda` (ROCm too).

    Raises ValueError if there is no GPU, or fewer than ranks on the node.
    """
    count = torch.cuda.device_count() if name != "cpu" else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise ValueError("--device cuda: no GPU is visible to this process; use --device cpu")
    if 1 < count < ranks.local_world_size:
        raise ValueError(
            f"{ranks.local_world_size} ranks on this node share {count} GPUs: start {count} ranks "
            "per node, or use --device cpu"
        )
    # A rank sees its own GPU alone, numbered 0 (`--gpus-per-task=1`), or all GPUs of its node.
    return torch.device("cuda", 0 if count == 1 else ranks.local_rank)


# ---------------------------------------------------------------------------------------------
# Process group and mesh


def init_ranks(ranks: Ranks, device: torch.device, timeout_minutes: float = 20) -> None:
    """Start the default process group: nccl (RCCL on ROCm) for GPU tensors, gloo for CPU tensors.

    Collective. Waits for all ranks, at most `timeout_minutes`, then raises RuntimeError; prints a
    notice after 30 s. Raises ValueError, on all ranks, if some have a GPU and others have none.
    """
    backend, timeout = "gloo", timedelta(minutes=timeout_minutes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if ranks.launcher == "single":  # an in-process store: no port is opened
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    address, port = ranks.init["MASTER_ADDR"], ranks.init["MASTER_PORT"]
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    text = f"rank {ranks.rank} is waiting at {address}:{port} for all {ranks.world_size} ranks"
    notice = Timer(30, print, [text], {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
    try:
        store, _, _ = next(dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout))
        store.set_timeout(timeout)
        check_devices(store, ranks, device)  # before the group, which would hang on a mixture
        dist.init_process_group(
            backend,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
            store=store,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, OSError) as error:  # not all of torch's messages name the address
        raise RuntimeError(f"{address}:{port}: {str(error).splitlines()[0]}") from error
    finally:
        notice.cancel()


def check_devices(store: dist.Store, ranks: Ranks, device: torch.device) -> None:
    """Refuse a job in which some ranks have a GPU and others use the CPU.

    Collective. Raises ValueError, on all ranks, that names the ranks without a GPU.
    """
    store.set(f"device/{ranks.rank}", json.dumps([device.type, platform.node()]))
    if ranks.rank == 0:
        keys = [f"device/{rank}" for rank in range(ranks.world_size)]
        found = [json.loads(text) for text in store.multi_get(keys)]
        without = [f"{i} ({host})" for i, (kind, host) in enumerate(found) if kind == "cpu"]
        named = ", ".join(without[:8]) + (" ..." if len(without) > 8 else "")
        problem = ""
        if 0 < len(without) < len(found):
            problem = (
                f"{len(without)} of {len(found)} ranks found no GPU, others did: rank {named}; "
                "give --device cpu to all, or leave these nodes out"
            )
        store.set("device/problem", problem)
    problem = store.get("device/problem").decode()
    if problem:
        store.set(f"device/{ranks.rank}/received", "")
        if ranks.rank == 0:  # it hosts the store: it must outlive the others' reads
            store.wait([f"device/{rank}/received" for rank in range(ranks.world_size)])
        raise ValueError(problem)


def check_group(world_size: int, group: int) -> None:
    """Raise ValueError, with the sizes that fit, if `group` does not divide the world."""
    if group < 1 or world_size % group:
        sizes = ", ".join(map(str, divisors(world_size)))
        raise ValueError(
            f"{world_size} ranks cannot be split into shard groups of {group}: use {sizes}"
        )


def divisors(number: int) -> list[int]:
    """List the divisors of a positive integer in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def straddles(group: int, local_world_size: int) -> bool:
    """Check whether any shard group spans several nodes, if all nodes have as many ranks."""
    return group > local_world_size or local_world_size % group != 0


DIMENSIONS = ("replicate", "shard", "tp")  # of a mesh; tp, tensor parallelism, where it is used


def build_mesh(shape: tuple[int, ...], device: torch.device) -> DeviceMesh:
    """Build the mesh of all ranks, with dimensions "replicate" and "shard", or these and "tp".

    `shape` is (number of replicas, ranks per shard group), or these and the ranks that split each
    block, which are neighbours. Collective, after `init_ranks`. Raises ValueError if the shape does
    not hold exactly the world.
    """
    world_size = dist.get_world_size()
    check_group(world_size, shape[1])
    if math.prod(shape) != world_size:
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"a {sizes} mesh does not hold {world_size} ranks")
    return init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS[: len(shape)])
