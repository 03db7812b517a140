"""Find this process's rank, choose its device, start the process group, build the device mesh.

Slurm (srun) or torchrun starts the ranks; without either there is a single process. The ranks form
a grid, the mesh: a row is a shard group (its ranks together hold one copy of the parameters), and a
column is a replicate group (its ranks hold the same shard). Here are eight ranks on two nodes of
four, with `--mode hybrid --group 4`:

                      shard 0  1  2  3
        replicate 0         0  1  2  3      node 0
                  1         4  5  6  7      node 1

Ranks are numbered node by node, and all nodes have equally many (`check_nodes`), so neighbours in a
row are on the same node, or on neighbouring nodes. In order: the mesh, the ranks, the device, the
process group. "Collective": all ranks must call the function, and wait for each other in it. Copy
this one file: it needs only torch.
"""

import math
import os
import resource
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("replicate", "shard")

# --- The mesh


def divisors(number: int) -> list[int]:
    """List the divisors of a positive integer in ascending order: the possible sizes of groups."""
    return [n for n in range(1, number + 1) if number % n == 0]


def default_group(world_size: int, local_world_size: int) -> int:
    """Return the default size of a shard group: a node's ranks, whose links are the fastest."""
    return min(max(local_world_size, 1), world_size)


def mesh_shape(shard_over: str, world_size: int, group: int | None = None) -> tuple[int, int]:
    """Return the mesh shape (replicas, ranks per shard group) of a sharding strategy.

    `shard_over` tells which ranks share one copy of the parameters: "none" (each rank has its own
    copy), "world" (all ranks) or "group" (`group` ranks). In shard.py it is a column of STRATEGIES.
    ValueError if they do not fit together.
    """
    if (shard_over == "group") != bool(group):
        raise ValueError(
            "the hybrid modes need `group`, the number of ranks that share one copy, and no other "
            "mode takes it"
        )
    if shard_over == "none":
        return world_size, 1
    if shard_over == "world":
        return 1, world_size
    assert group  # as checked above
    if world_size % group:
        sizes = ", ".join(map(str, divisors(world_size)))
        what = f"{world_size} ranks cannot be split into shard groups of {group}"
        raise ValueError(f"{what}: use {sizes}, or start a different number of ranks")
    return world_size // group, group


def build_mesh(shape: tuple[int, int], device: torch.device) -> DeviceMesh:
    """Build the mesh of all ranks, with the dimensions "replicate" and "shard".

    `shape` is what `mesh_shape` returns. ValueError if its product is not the world size.
    Collective, after `init_ranks`.
    """
    if math.prod(shape) != dist.get_world_size():
        raise ValueError(f"a mesh of {shape} does not fit {dist.get_world_size()} ranks")
    return init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)


# --- The ranks


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job, by default that of a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # on this node
    local_world_size: int = 1  # ranks on this node
    launcher: str = "single"  # or "torchrun", "srun"
    # MASTER_ADDR and MASTER_PORT; empty for a single process, unless torchrun started it
    rendezvous: Mapping[str, str] = field(default_factory=dict)


# What torchrun sets for each rank
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """Read the ranks from torchrun's variables, or else from srun's; with neither, return one rank.

    RuntimeError if a launcher's variables are incomplete, or for a single process in a Slurm job of
    several tasks or nodes, which surely is a mistake.
    """
    # first: under `srun torchrun`, Slurm's variables count the torchrun processes, not the ranks
    if all(name in environ for name in TORCHRUN):
        return _torchrun_ranks(environ)
    # even if a job script has exported some of torchrun's names, such as WORLD_SIZE
    if _started_by_srun(environ):
        return _slurm_ranks(environ)
    if environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        return _torchrun_ranks(environ)  # it raises, and names a variable that is missing
    several_tasks = environ.get("SLURM_NTASKS", "1") != "1"
    several_nodes = environ.get("SLURM_JOB_NUM_NODES", "1") != "1"
    if "SLURM_JOB_ID" in environ and (several_tasks or several_nodes):
        raise RuntimeError(
            "this Slurm job has several tasks or nodes, but this process was not started by srun: "
            "type `srun python`, or, for one process, `srun -n1 python`"
        )
    return Ranks()  # a single process


def _started_by_srun(environ: Mapping[str, str]) -> bool:
    """Tell whether srun started this process, rather than the job's own shell.

    Each srun is a step of the job, numbered from 0. The 16 largest numbers are reserved for other
    things: salloc's shell, sbatch's script, an ssh session.
    """
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < 2**32 - 16


def _torchrun_ranks(environ: Mapping[str, str]) -> Ranks:
    try:
        rank = int(environ["RANK"])
        world_size = int(environ["WORLD_SIZE"])
        local_rank = int(environ["LOCAL_RANK"])
        local_world_size = int(environ["LOCAL_WORLD_SIZE"])
        rendezvous = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    except KeyError as error:
        raise RuntimeError(
            f"the variable {error}, which torchrun sets, is missing: start the ranks with "
            "torchrun, or, for a single process, unset RANK, WORLD_SIZE and LOCAL_RANK"
        ) from None
    return Ranks(rank, world_size, local_rank, local_world_size, "torchrun", rendezvous)


def _slurm_ranks(environ: Mapping[str, str]) -> Ranks:
    try:
        rank = int(environ["SLURM_PROCID"])
        world_size = int(environ["SLURM_NTASKS"])
        local_rank = int(environ["SLURM_LOCALID"])
        # a step may have fewer tasks than its job
        per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_TASKS_PER_NODE"]
    except KeyError as error:
        raise RuntimeError(f"the variable {error}, which srun sets, is missing") from None
    count, _, _ = per_node.partition("(")  # "8(x2)": 8 ranks on each of two nodes
    if "," in per_node or world_size % int(count):  # "8(x2),4": nodes differ
        raise RuntimeError(
            f"Slurm counts {world_size} ranks, and {per_node} on the nodes: start all ranks with "
            "one srun, equally many on each node, as with --ntasks-per-node"
        )
    local_world_size = int(count)
    if world_size == 1:  # it needs no port, which several runs in a step would share
        return Ranks(launcher="srun")
    defaults: dict[str, str] = {}
    if local_world_size == world_size:
        # the address is known; other jobs may share the node, so the port depends on the job
        job = f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
        port = 20000 + zlib.crc32(job.encode()) % 10000
        defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    given = defaults | dict(environ)  # the user's own values win
    try:
        rendezvous = {name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    except KeyError as error:
        raise RuntimeError(
            f"the variable {error} is missing: on several nodes, type "
            "`export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1) "
            "MASTER_PORT=3442` before srun"
        ) from None
    return Ranks(rank, world_size, local_rank, local_world_size, "srun", rendezvous)


# --- The device


def process_cores() -> int:
    """Count the CPU cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pick_device(name: str, ranks: Ranks) -> torch.device:
    """Choose the device for `auto`, `cpu` or `cuda` (ROCm too); ValueError if GPUs are missing."""
    count = torch.cuda.device_count() if name != "cpu" else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise ValueError("--device cuda: no GPU is visible to this process; use --device cpu")
    # If one GPU is visible, it is this rank's own (`--gpus-per-task=1`); if ranks do share it, NCCL
    # raises an error. If several are visible, each rank needs one.
    if 1 < count < ranks.local_world_size:
        raise ValueError(
            f"{ranks.local_world_size} ranks on this node share {count} GPUs: "
            f"start {count} ranks per node, or use --device cpu"
        )
    return torch.device("cuda", 0 if count == 1 else ranks.local_rank)


# --- The process group


def init_ranks(ranks: Ranks, device: torch.device, timeout_minutes: float = 20) -> None:
    """Start the default process group: nccl (RCCL on ROCm) for GPU tensors, gloo for CPU tensors.

    RuntimeError if a rank does not join in time, or for what `check_nodes` refuses. Collective.
    """
    timeout = timedelta(minutes=timeout_minutes)
    on_gpu = device.type == "cuda"
    # Let gloo connect two ranks when they first communicate. By default it connects all pairs.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # Allow as many open files as possible: rank 0 still has a connection to every rank.
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if on_gpu:
        torch.cuda.set_device(device)
    store: dist.Store = dist.HashStore()  # enough for a single process: it opens no port
    if ranks.rendezvous:
        os.environ.update(ranks.rendezvous)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            # torchrun's store keeps the addresses of earlier attempts: rank 0 serves a new one
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            os.environ["MASTER_PORT"] = str(int(ranks.rendezvous["MASTER_PORT"]) + 1)
        stores = dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout)
        store, _, _ = next(stores)  # it yields (store, rank, world size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        # with it NCCL connects now, not in the first collective
        device_id=device if on_gpu and ranks.rendezvous else None,
    )
    check_nodes(ranks)


def check_nodes(ranks: Ranks) -> None:
    """Raise RuntimeError on all ranks unless they are numbered node by node. Collective.

    All nodes must have equally many, or shard groups would be spread over nodes, and slow.
    """
    on_node = ranks.local_world_size
    misplaced = ranks.rank % on_node != ranks.local_rank
    found = torch.tensor([on_node, -on_node, int(misplaced)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    most, minus_fewest, any_misplaced = found.tolist()
    if most != -minus_fewest:
        have = f"the nodes have from {-minus_fewest} to {most} ranks"
        raise RuntimeError(f"{have}: start equally many on each node")
    if any_misplaced:
        raise RuntimeError(
            "ranks are not numbered node by node, so shard groups would be spread over nodes: give "
            "srun `--distribution=block`, and do not set another order of nodes or tasks"
        )
