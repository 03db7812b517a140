"""Find this process's rank, choose its device, start the process group, build the device mesh.

Slurm (srun) or torchrun starts the ranks; without either there is a single process. The ranks form
a grid, the mesh: a row is a shard group (its ranks together hold one copy of the parameters), and a
column is a replicate group (its ranks hold the same shard). Here are eight ranks on two nodes of
four, with `--mode hybrid --group 4`:

                      shard 0  1  2  3
        replicate 0         0  1  2  3      node 0
                  1         4  5  6  7      node 1

Ranks are numbered node by node, so neighbours in a row are on the same node, or on neighbouring
nodes. In the hybrid modes --group defaults to one node (runtime/run.py). With --tp the mesh has a
third dimension, "tp": ranks that differ only in their place along it split each block and read the
same images; all others read different ones. Copy this one file: it needs only torch.

In docstrings, "Collective" means that every rank must call the function: a rank that has called it
waits for the others.
"""

import math
import os
import resource
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("replicate", "shard", "tp")  # "tp": tensor parallelism


def build_mesh(shape: tuple[int, ...], device: torch.device) -> DeviceMesh:
    """Build the mesh of all ranks, with the dimensions "replicate", "shard" and perhaps "tp".

    `shape` is (replicas, ranks per shard group) or, with tensor parallelism, (replicas, ranks per
    shard group, ranks that split each block). ValueError if its product is not the world size.
    Collective, after `init_ranks`.
    """
    if math.prod(shape) != dist.get_world_size():
        raise ValueError(f"a mesh of {shape} does not fit {dist.get_world_size()} ranks")
    with quiet_gloo():
        return init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS[: len(shape)])


def divisors(number: int) -> list[int]:
    """List the divisors of a positive integer in ascending order: the possible sizes of groups."""
    return [n for n in range(1, number + 1) if number % n == 0]


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
# The variables in which other launchers give their number of processes: Open MPI, MPICH and its
# derivatives (such as PALS), MVAPICH, Flux, jsrun
OTHER_LAUNCHERS = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "FLUX_JOB_SIZE",
    "JSM_NAMESPACE_SIZE",
)


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """Read the ranks from torchrun's variables, or else from srun's; with neither, return one rank.

    RuntimeError if a launcher's variables are incomplete, if Slurm does not number the ranks node
    by node, or if a single process would surely be a mistake: in a Slurm job of several tasks or
    nodes that did not use srun, or if another launcher, such as mpiexec, has started several
    processes.
    """
    # torchrun comes first: under `srun torchrun`, Slurm's variables count the torchrun processes,
    # not the ranks.
    if all(name in environ for name in TORCHRUN):
        return _torchrun_ranks(environ)
    # Then srun, even if a job script has exported some of torchrun's names, such as WORLD_SIZE.
    if _started_by_srun(environ):
        ranks = _slurm_ranks(environ)
        _check_other_counts(environ, OTHER_LAUNCHERS, ranks.world_size)
        # these may come from another launcher, which runs inside an srun task
        if environ.keys() & {"RANK", "LOCAL_RANK"}:
            _check_other_counts(environ, ("WORLD_SIZE",), ranks.world_size)
        return ranks
    if environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        return _torchrun_ranks(environ)  # it raises, and names a variable that is missing
    several_tasks = environ.get("SLURM_NTASKS", "1") != "1"
    several_nodes = environ.get("SLURM_JOB_NUM_NODES", "1") != "1"
    if "SLURM_JOB_ID" in environ and (several_tasks or several_nodes):
        raise RuntimeError(
            "this Slurm job has several tasks or nodes, but this process was not started by srun: "
            "type `srun python`, or, for one process, `srun -n1 python`"
        )
    _check_other_counts(environ, OTHER_LAUNCHERS, 1)
    return Ranks()  # a single process


def _check_other_counts(environ: Mapping[str, str], names: Sequence[str], count: int) -> None:
    """Raise RuntimeError if another launcher's variable gives a different number of processes."""
    for name in names:
        if environ.get(name, "") not in ("", str(count)):
            raise RuntimeError(
                f"the variable {name} says that {environ[name]} processes were started, but here "
                f"the rank would be one of {count}: start the ranks with srun or torchrun alone, "
                f"or export {', '.join(TORCHRUN)} in each process; if {name} is wrong, unset it"
            )


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
        node = int(environ["SLURM_NODEID"])
        # A step may have fewer tasks than its job, so the step's own counts come first.
        if "SLURM_STEP_TASKS_PER_NODE" in environ:
            per_node = environ["SLURM_STEP_TASKS_PER_NODE"]
        else:
            per_node = environ["SLURM_TASKS_PER_NODE"]
    except KeyError as error:
        raise RuntimeError(f"the variable {error}, which srun sets, is missing") from None
    counts = _ranks_per_node(per_node)
    if sum(counts) != world_size:
        raise RuntimeError(
            f"Slurm counts {world_size} ranks, but {per_node} ranks per node add up to "
            f"{sum(counts)}: start all ranks with one srun"
        )
    # If ranks were numbered round-robin over the nodes, the consecutive ranks of a shard group
    # would be on different nodes.
    if rank != sum(counts[:node]) + local_rank:
        raise RuntimeError(
            f"rank {rank} is local rank {local_rank} of node {node}, with {per_node} ranks per "
            "node, so Slurm does not number the ranks node by node: give srun "
            "`--distribution=block`, and do not set another order of nodes or tasks"
        )
    if world_size == 1:
        # It needs no port. The default below depends only on the step: if its one task is a script
        # that starts several runs at once, all of them would take the same port.
        return Ranks(launcher="srun")
    defaults: dict[str, str] = {}
    if len(counts) == 1:
        # All ranks are on one node, so the address is known. Other jobs may share the node, so the
        # port depends on the job.
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
    return Ranks(rank, world_size, local_rank, counts[node], "srun", rendezvous)


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
    # A single visible GPU is either this rank's own (`--gpus-per-task=1`), or the only one of a
    # node with several ranks; in the second case all ranks take it, and NCCL raises an error. If
    # several GPUs are visible, there must be one for each rank.
    if 1 < count < ranks.local_world_size:
        raise ValueError(
            f"{ranks.local_world_size} ranks on this node share {count} GPUs: "
            f"start {count} ranks per node, or use --device cpu"
        )
    return torch.device("cuda", 0 if count == 1 else ranks.local_rank)


def init_ranks(ranks: Ranks, device: torch.device, timeout_minutes: float = 20) -> None:
    """Start the default process group: nccl (RCCL on ROCm) for GPU tensors, gloo for CPU tensors.

    RuntimeError if a rank does not join in time. Collective.
    """
    timeout = timedelta(minutes=timeout_minutes)
    on_gpu = device.type == "cuda"
    # Let gloo connect two ranks when they first communicate. By default it connects all pairs in
    # a group: half a million connections for a thousand ranks, set up through rank 0's store.
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
        # With --max-restarts, torchrun's store keeps the addresses of earlier attempts.
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if restarts > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _use_fresh_store(ranks, timeout)
        stores = dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout)
        store, _, _ = next(stores)  # it yields (store, rank, world size)
    with quiet_gloo():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
            # With a device_id, NCCL connects now, not in the first collective; a single process has
            # nobody to connect to.
            device_id=device if on_gpu and ranks.rendezvous else None,
        )


def _use_fresh_store(ranks: Ranks, timeout: timedelta) -> None:
    """Make `dist.rendezvous` use a new store for this attempt, instead of torchrun's. Collective.

    After a restart, torchrun's store still has the addresses of dead ranks. So all ranks set two
    variables that `dist.rendezvous` reads. MASTER_PORT becomes a free port on rank 0's node, where
    rank 0 will serve the new store. TORCHELASTIC_USE_AGENT_STORE becomes False: True selects
    torchrun's store.
    """
    address = ranks.rendezvous["MASTER_ADDR"]
    torchrun_store = dist.TCPStore(address, int(ranks.rendezvous["MASTER_PORT"]), timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    if ranks.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        torchrun_store.set("port of rank 0", str(port))
        os.environ["MASTER_PORT"] = str(port)
        return
    while time.monotonic() < deadline:
        port = int(torchrun_store.get("port of rank 0"))
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError:
            # Rank 0 starts to listen only once it reaches dist.rendezvous. Until it has set its
            # port, `port` may also be that of an earlier attempt, on which nobody listens any more.
            time.sleep(0.1)
            continue
        os.environ["MASTER_PORT"] = str(port)
        return
    raise RuntimeError(f"rank 0 does not answer at {address}:{port}")


@contextmanager
def quiet_gloo() -> Iterator[None]:
    """Hide the line that gloo prints on stdout for every new group in torch 2.10."""
    fixed_in_torch = torch.__version__ >= "2.11"  # comparing strings is right for 2.10 and above
    # NCCL_DEBUG makes NCCL print to stdout too, and those lines are wanted. In a process that was
    # started without a stdout, sys.stdout is None.
    if fixed_in_torch or "NCCL_DEBUG" in os.environ or not sys.stdout:
        yield
        return
    # gloo, in C++, writes to file descriptor 1, whatever sys.stdout is
    stdout = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
