"""Find this process's rank, choose its device, start the process group, build the device mesh.

Ranks come from Slurm (srun), from torchrun, or there is one process. They form a grid, the mesh:
a row is a shard group (ranks that together hold one copy of the parameters), a column a replicate
group (ranks that hold the same shard). Eight ranks on two nodes of four, `--mode hybrid --group 4`:

                      shard 0  1  2  3
        replicate 0         0  1  2  3      node 0
                  1         4  5  6  7      node 1

Ranks fill nodes in blocks, so neighbours in a row are neighbours on a node; runtime/run.py makes a
row of each node if there is no --group. Every rank reads images of its own, whatever the mesh.
Copy this one file: it needs torch alone.
"""

import math
import os
import resource
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("replicate", "shard", "tp")  # of a mesh; tp, tensor parallelism, where it is used


def build_mesh(shape: tuple[int, ...], device: torch.device) -> DeviceMesh:
    """Build the mesh of all ranks, with dimensions "replicate" and "shard", or these and "tp".

    `shape` is (replicas, ranks per shard group), or these and the neighbours that split each block.
    Collective, after `init_ranks`. ValueError if the shape does not hold exactly the world.
    """
    if math.prod(shape) != dist.get_world_size():
        raise ValueError(f"a mesh of {shape} does not hold {dist.get_world_size()} ranks")
    with quiet_gloo():
        return init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS[: len(shape)])


def divisors(number: int) -> list[int]:
    """List the divisors of a positive integer in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job; all numbers start at 0."""

    rank: int
    world_size: int
    local_rank: int  # on this node
    local_world_size: int  # ranks on this node
    node: int
    launcher: str  # "torchrun", "srun" or "single"
    rendezvous: Mapping[str, str]  # MASTER_ADDR and MASTER_PORT; empty for a single process


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """Read the ranks from torchrun's variables, else from srun's, else return a single process.

    RuntimeError if some of a launcher's variables are missing, or ranks are not in blocks, or in a
    shell of a Slurm job with several tasks: a single process there would be a mistake.
    """
    # torchrun first: under `srun torchrun` Slurm's variables count torchrun's agents, not ranks.
    if environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        return _torchrun_ranks(environ)
    if _started_by_srun(environ):
        return _slurm_ranks(environ)
    if "SLURM_JOB_ID" in environ and (
        environ.get("SLURM_NTASKS", "1") != "1" or environ.get("SLURM_JOB_NUM_NODES", "1") != "1"
    ):  # in the shell of a job: every task but this one would be missing
        job = "this Slurm job has several tasks or nodes"
        advice = "type `srun python`, or, for one process, `srun -n1 python`"
        raise RuntimeError(f"{job}, but this process was not started by srun: {advice}")
    return Ranks(0, 1, 0, 1, 0, "single", {})


def _started_by_srun(environ: Mapping[str, str]) -> bool:
    """Tell whether this process is a task of a step of srun's, not of a job's own shell.

    Slurm counts steps from 0. The largest 16 numbers are other things: salloc's shell, sbatch's
    script, a session of ssh.
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
        setter = "torchrun, as RANK, WORLD_SIZE or LOCAL_RANK is set"
        raise RuntimeError(f"the variable {error} is missing; it is set by {setter}") from None
    node = int(environ.get("GROUP_RANK", rank // local_world_size))  # the number of its torchrun
    return Ranks(rank, world_size, local_rank, local_world_size, node, "torchrun", rendezvous)


def _slurm_ranks(environ: Mapping[str, str]) -> Ranks:
    try:
        rank = int(environ["SLURM_PROCID"])
        world_size = int(environ["SLURM_NTASKS"])
        local_rank = int(environ["SLURM_LOCALID"])
        node = int(environ["SLURM_NODEID"])
        # A step may have fewer tasks than its job: the step's own counts come first.
        if "SLURM_STEP_TASKS_PER_NODE" in environ:
            text = environ["SLURM_STEP_TASKS_PER_NODE"]
        else:
            text = environ["SLURM_TASKS_PER_NODE"]
    except KeyError as error:
        raise RuntimeError(f"the variable {error} is missing; it is set by srun") from None
    counts = _ranks_per_node(text)
    where = f"rank {rank} of {world_size} is local rank {local_rank} of node {node} of {text}"
    if sum(counts) != world_size:
        raise RuntimeError(f"{where}, which are {sum(counts)} ranks: start all by one srun")
    # Round-robin over the nodes would make each shard group, neighbours in rank, span all nodes.
    if rank != sum(counts[:node]) + local_rank:
        advice = "give srun `--distribution=block`, and no order of nodes or tasks of your own"
        raise RuntimeError(f"{where}, not in blocks: {advice}")
    if len(counts) == 1:  # the address is known; two jobs that share the node need two ports
        job = f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
        port = 20000 + zlib.crc32(job.encode()) % 10000
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environ}
    try:
        rendezvous = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    except KeyError as error:
        address = "MASTER_ADDR=$(hostname -i) MASTER_PORT=3442"
        setter = f"srun, an address by you: `export {address}` before srun"
        raise RuntimeError(f"the variable {error} is missing; it is set by {setter}") from None
    return Ranks(rank, world_size, local_rank, counts[node], node, "srun", rendezvous)


def _ranks_per_node(text: str) -> list[int]:
    """Read Slurm's counts: "8(x2),4" means 8, 8 and 4 ranks on three nodes."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, nodes = part.rstrip(")").partition("(x")
        repeats = int(nodes) if nodes else 1
        counts.extend([int(count)] * repeats)
    return counts


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
    if 1 < count < ranks.local_world_size:
        share = f"{ranks.local_world_size} ranks on this node share {count} GPUs"
        raise ValueError(f"{share}: start {count} ranks per node, or use --device cpu")
    # A rank sees its own GPU alone, numbered 0 (`--gpus-per-task=1`), or all GPUs of its node.
    return torch.device("cuda", 0 if count == 1 else ranks.local_rank)


def init_ranks(ranks: Ranks, device: torch.device, timeout_minutes: float = 20) -> None:
    """Start the default process group: nccl (RCCL on ROCm) for GPU tensors, gloo for CPU tensors.

    Collective; RuntimeError if a rank does not come.
    """
    timeout = timedelta(minutes=timeout_minutes)
    on_gpu = device.type == "cuda"
    # Otherwise gloo connects each rank with every other in each group, a thousand with a thousand,
    # and rank 0's store serves the addresses of all to all.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # Rank 0 still talks to all: hundreds of ranks need many files.
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if on_gpu:
        torch.cuda.set_device(device)
    store: dist.Store = dist.HashStore()  # of a single process: no port is opened
    if ranks.rendezvous:
        os.environ.update(ranks.rendezvous)
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if restarts > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _start_own_store(ranks, timeout)
        rendezvous = dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout)
        store, _, _ = next(rendezvous)
    with quiet_gloo():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
            device_id=device if on_gpu and ranks.rendezvous else None,
        )


def _start_own_store(ranks: Ranks, timeout: timedelta) -> None:
    """Let rank 0 serve a store for this attempt alone, and set MASTER_PORT to its port. Collective.

    torchrun's own store lives through its restarts: there the ranks would find the addresses of
    those before them. Its number of restarts does not help: nodes may count differently.
    """
    address = ranks.rendezvous["MASTER_ADDR"]
    shared = dist.TCPStore(address, int(ranks.rendezvous["MASTER_PORT"]), timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    if ranks.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        shared.set("port of rank 0", str(port))
        os.environ["MASTER_PORT"] = str(port)
        return
    while time.monotonic() < deadline:
        # of an attempt before, until rank 0 is there: nobody listens at that port any more
        port = int(shared.get("port of rank 0"))
        with suppress(OSError), socket.create_connection((address, port), timeout=5):
            os.environ["MASTER_PORT"] = str(port)
            return
        time.sleep(0.1)
    raise RuntimeError(f"rank 0 has not come to {address}:{port}")


@contextmanager
def quiet_gloo() -> Iterator[None]:
    """Hide the line that gloo of torch 2.10 prints on stdout for every new group."""
    if torch.__version__ >= "2.11" or "NCCL_DEBUG" in os.environ or not sys.stdout:
        yield  # NCCL_DEBUG prints there as well
        return
    with os.fdopen(os.dup(1)) as stdout, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(stdout.fileno(), 1)
