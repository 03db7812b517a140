"""Show where each rank runs, and how fast each shard group gathers: the pre-flight check.

    srun python -m runtime.topology --mode hybrid --group 2

launch_frontier.sh starts it before a run. It takes train_fsdp.py's flags and is started in the same
folder. It shows the host and device of each rank, which ranks share one copy of the parameters, and
how long each of these shard groups takes to gather 16 MiB. Nothing is read or trained.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mesh import DIMENSIONS, Ranks, build_mesh
from runtime import process
from runtime.agreement import AgreedError, gather_to_rank0, run_on_rank0
from runtime.config import make_config, training_parser
from runtime.run import Run
from runtime.session import Session, run_session


@dataclass(frozen=True)
class Placement:
    """The host and device of one rank."""

    rank: int
    node: int
    local_rank: int
    host: str
    device: str
    pci: str = ""  # address of the GPU
    uuid: str = ""  # of the GPU, or of the part of one (MIG, CPX): parts share the address


def find_placement(ranks: Ranks, device: torch.device, environ: Mapping[str, str]) -> Placement:
    """Find where this process runs."""
    host, pci, uuid = environ.get("SLURMD_NODENAME") or platform.node(), "", ""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        numbers = [getattr(gpu, f"pci_{name}_id") for name in ("domain", "bus", "device")]
        pci = "{:04x}:{:02x}:{:02x}".format(*numbers)
        uuid = str(getattr(gpu, "uuid", ""))
    return Placement(ranks.rank, ranks.node, ranks.local_rank, host, str(device), pci, uuid)


def check_devices_differ(placements: Sequence[Placement]) -> None:
    """Raise ValueError if two ranks use the same GPU."""
    users: dict[tuple[int, str, str], int] = {}
    for p in placements:
        other = users.setdefault((p.node, p.pci, p.uuid), p.rank)
        if p.pci and other != p.rank:
            raise ValueError(
                f"ranks {other} and {p.rank} share one device, {p.pci} of {p.host}: "
                "give srun `--gpus-per-task=1 --gpu-bind=closest`"
            )


def shard_groups(shape: Sequence[int]) -> list[range]:
    """List the ranks of each shard group of a mesh (replicate, shard), or one with tp too."""
    block, tp = math.prod(shape[1:]), math.prod(shape[2:])  # ranks of a replica, of a tp group
    firsts = range(0, math.prod(shape), block)
    return [range(first + i, first + block, tp) for first in firsts for i in range(tp)]


def format_ranks(numbers: Sequence[int]) -> str:
    """List up to four ranks as 0 1 2 3, more as 0 1 2 .. 15."""
    shown = [str(n) for n in numbers]
    return " ".join(shown if len(shown) < 5 else [*shown[:3], "..", shown[-1]])


def format_topology(placements: Sequence[Placement], shape: Sequence[int]) -> list[str]:
    """Make a table of the ranks, one per line; of more than four nodes three are shown."""
    world, block, tp = math.prod(shape), math.prod(shape[1:]), math.prod(shape[2:])
    nodes, groups = sorted({p.node for p in placements}), shard_groups(shape)
    hidden = nodes[2:-1] if len(nodes) > 4 else []
    rows = [
        ["rank", "host", "local", "device", "PCI", "shard group", "replicate group", "tp group"]
    ]
    for p in placements:
        row, column, split = p.rank // block * tp + p.rank % tp, p.rank % block, p.rank // tp
        members = [
            f"{row}: {format_ranks(groups[row])}",
            f"{column}: {format_ranks(range(column, world, block))}",
            f"{split}: {format_ranks(range(split * tp, split * tp + tp))}" if tp > 1 else "",
        ]
        if p.node not in hidden:
            rows.append([str(p.rank), p.host, str(p.local_rank), p.device, p.pci, *members])
        elif p.node == hidden[0] and p.local_rank == 0:
            rows.append(["..", f"{len(hidden)} more nodes", *[""] * 6])
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    names = " x ".join(DIMENSIONS[: len(shape)])
    where = f"{world} ranks on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    head = f"mesh {' x '.join(map(str, shape))} ({names}): {where}"
    lines = ["  ".join(map(str.ljust, row, widths)) for row in zip(*columns, strict=True)]
    return [head, *(line.rstrip() for line in lines)]


def describe_topology(
    ranks: Ranks, device: torch.device, shape: Sequence[int], environ: Mapping[str, str]
) -> list[str]:
    """Return the table as lines. Collective; AgreedError, status 2, if two ranks share a GPU."""
    if ranks.world_size == 1:
        return []
    placements = gather_to_rank0(find_placement(ranks, device, environ)) or []

    def lines() -> list[str]:
        check_devices_differ(placements)
        return format_topology(placements, shape)

    return run_on_rank0(lines)


def time_all_gather(shape: tuple[int, ...], device: torch.device) -> list[float]:
    """Return the seconds that each shard group needs to gather 16 MiB. Collective.

    All groups gather at once; a group's time is that of its slowest rank, the median of five
    rounds. AgreedError if the data that arrives is not what was sent.
    """
    group = build_mesh(shape, device).get_group("shard")
    sent = torch.tensor(dist.get_process_group_ranks(group), dtype=torch.float32, device=device)
    piece = torch.full((2**22 // shape[1],), float(dist.get_rank()), device=device)  # fp32
    whole = torch.empty(shape[1], piece.numel(), device=device)
    rounds = []
    for _ in range(7):  # the first two open the connections
        start = time.perf_counter()
        dist.all_gather([*whole], piece, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rounds.append(time.perf_counter() - start)
    correct = bool((whole == sent[:, None]).all())
    seconds = [0.0] * dist.get_world_size()
    dist.all_gather_object(seconds, statistics.median(rounds[2:]) if correct else math.inf)
    if math.inf in seconds:
        rank = seconds.index(math.inf)
        raise AgreedError(f"wrong data of an all-gather on rank {rank}: faulty GPU or link?")
    return [max(seconds[rank] for rank in group) for group in shard_groups(shape)]


def format_timing(seconds: Sequence[float], shape: Sequence[int]) -> Iterator[str]:
    """Yield the result of `time_all_gather`, then the groups that need twice the median's time."""
    size, median = shape[1], statistics.median_low(seconds)
    if size == 1:
        yield "all-gather: nothing to time, every rank is its own shard group"
        return
    rate = 2**24 * (size - 1) / size / median / 1e9  # a rank receives all but its own part
    yield (
        f"all-gather of 16 MiB among {size} ranks, all groups at once: {1e3 * min(seconds):.2f} "
        f"to {1e3 * max(seconds):.2f} ms, median {rate:.2f} GB/s per rank"
    )
    for i, (group, taken) in enumerate(zip(shard_groups(shape), seconds, strict=True)):
        if taken > 2 * median:
            where = f"shard group {i} (ranks {format_ranks(group)})"
            yield f"warning: {where} is slow: {1e3 * taken:.2f} ms"


def check_mesh(run: Run, session: Session) -> None:
    """Print where the ranks of a run are and how fast they gather. Collective; AgreedError."""
    lines = describe_topology(session.ranks, session.device, run.mesh_shape, os.environ)
    if session.ranks.rank == 0:
        built_for = f"CUDA {torch.version.cuda}, HIP {torch.version.hip}"
        print(f"python {platform.python_version()}, torch {torch.__version__}, {built_for}")
        print("\n".join(lines))
    seconds = time_all_gather(run.mesh_shape, session.device)
    if session.ranks.rank == 0:
        print("\n".join(format_timing(seconds, run.mesh_shape)))


def main(argv: Sequence[str] | None = None) -> int:
    """Check the mesh of a command line; return the exit status of `run_session`."""
    parser = training_parser("runtime.topology")
    config = make_config(parser, parser.parse_args(argv))
    with process.errors_name("runtime.topology"):
        return run_session(replace(config, timeout=60), check_mesh)


if __name__ == "__main__":
    process.make_safe()
    raise SystemExit(main())
