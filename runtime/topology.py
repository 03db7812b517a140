"""Show which ranks are near each other: a table of the mesh, warnings, a timed all-gather.

    srun python -m runtime.topology --mode hybrid --group 2

This is the pre-flight check of launch_frontier.sh. It takes train_fsdp.py's flags and is started in
the same folder. It shows the host and device of each rank, which ranks share one copy of the
parameters, and how fast each of these shard groups gathers 16 MiB. Nothing is read or trained.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: Ctrl-C meanwhile ends the program without a traceback.
    import os
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mesh import DIMENSIONS, Ranks, build_mesh, init_ranks, pick_device, read_ranks
from runtime import process
from runtime.agreement import AgreedError, gather_to_rank0, run_on_rank0
from runtime.config import make_config, number, training_parser
from runtime.run import resolve

# The GCDs of local ranks 0 to 7 under Frontier's srun line (`-c7 --gpus-per-task=1
# --gpu-bind=closest`), from OLCF's Frontier user guide. GCDs 0 1, 2 3, 4 5, 6 7 are a package: 200
# GB/s each way inside. Between the packages of a pair below run two links, 100 GB/s, between others
# one or none; a GCD's share of the network is 12.5 GB/s. So neighbours in rank are neighbours by
# wire, and no rank needs another number.
GCD_ORDER = (4, 5, 2, 3, 6, 7, 0, 1)
NEAR_GCDS = {1: ({4, 5}, {2, 3}, {6, 7}, {0, 1}), 2: ({4, 5, 2, 3}, {6, 7, 0, 1})}  # by span
SPANS = ("one device", "one package", "two packages with a double link", "one node")

# ---------------------------------------------------------------------------------------------
# Where a rank runs


@dataclass(frozen=True)
class Placement:
    """The host and device of one rank."""

    rank: int
    node: int
    local_rank: int
    host: str
    device: str
    gcd: int | None  # 0 to 7, the node's own number; None if this is not an MI250X
    pci: str  # address; empty if unknown


def find_placement(ranks: Ranks, device: torch.device, environ: Mapping[str, str]) -> Placement:
    """Find where this process runs."""
    host = environ.get("SLURMD_NODENAME") or platform.node()
    index, gcd, pci, name = ranks.local_rank, None, "", ""
    if device.type == "cuda":
        index, properties = device.index or 0, torch.cuda.get_device_properties(device)
        name = properties.name
        numbers = [getattr(properties, f"pci_{n}_id", -1) for n in ("domain", "bus", "device")]
        if min(numbers) >= 0:  # not every build of torch has them
            pci = "{:04x}:{:02x}:{:02x}".format(*numbers)
    if "MI250" in name or (device.type == "cpu" and environ.get("ROCR_VISIBLE_DEVICES")):
        gcd = visible_gcd(environ, index)
    return Placement(ranks.rank, ranks.node, ranks.local_rank, host, str(device), gcd, pci)


def visible_gcd(environ: Mapping[str, str], index: int) -> int | None:
    """Return the node's own number of the device that this process sees as `index`, if known.

    ROCr hides some of the node's devices, HIP some of the rest; each numbers what is left from 0.
    """
    left = list(range(8))
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        text = environ.get(name, "")
        if text:
            numbers = [int(n) if re.fullmatch("[0-7]", n) else 8 for n in text.split(",")]  # a UUID
            if max(numbers) >= len(left):
                return None
            left = [left[n] for n in numbers]
    if len(left) == 1:
        return left[0]
    return left[index] if index < len(left) else None


# ---------------------------------------------------------------------------------------------
# How far apart the ranks of a group are


def span(placements: Sequence[Placement]) -> int:
    """Measure how far apart ranks are: an index of SPANS, plus one for each further node."""
    nodes, gcds = {p.node for p in placements}, {p.gcd for p in placements}
    if len(nodes) > 1:
        return len(SPANS) - 2 + len(nodes)
    if len(placements) == 1:
        return 0
    near = (level for level, sets in NEAR_GCDS.items() if any(gcds <= one for one in sets))
    return next(near, len(SPANS) - 1)


def smallest_span(size: int, local_world_size: int, gcds: bool) -> int:
    """Return the smallest `span` that `size` ranks can have, on nodes of MI250X or of others."""
    if size == 1:
        return 0
    nodes = -(-size // local_world_size)
    near = 1 if size <= 2 else 2 if size <= 4 else 3
    return len(SPANS) - 2 + nodes if nodes > 1 else near if gcds else 3


def format_span(level: int) -> str:
    """Put a `span` into words."""
    return SPANS[level] if level < len(SPANS) else f"{level - len(SPANS) + 2} nodes"


def format_ranks(numbers: Sequence[int]) -> str:
    """List up to four ranks as 0 1 2 3, more as 0 1 2 .. 15."""
    shown = [str(n) for n in numbers]
    return " ".join(shown if len(shown) < 5 else [*shown[:3], "..", shown[-1]])


def shard_groups(shape: Sequence[int]) -> list[range]:
    """List the ranks of each shard group of a mesh (replicate, shard), or one with tp too."""
    block, tp = math.prod(shape[1:]), math.prod(shape[2:])  # ranks of a replica, of a tp group
    firsts = range(0, math.prod(shape), block)
    return [range(first + i, first + block, tp) for first in firsts for i in range(tp)]


def format_topology(placements: Sequence[Placement], shape: Sequence[int]) -> Iterator[str]:
    """Yield a table of all ranks, one per line; of more than four nodes three are shown."""
    block, tp = math.prod(shape[1:]), math.prod(shape[2:])
    names, groups = " x ".join(DIMENSIONS[: len(shape)]), shard_groups(shape)
    nodes = sorted({p.node for p in placements})
    where = f"{len(placements)} ranks on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    yield f"mesh {' x '.join(map(str, shape))} ({names}): {where}"
    shown = nodes if len(nodes) < 5 else [*nodes[:2], nodes[-1]]
    heads = ["rank", "host", "local", "device", "GCD", "PCI", "shard group", "replicate group"]
    rows = [[*heads, "tp group"]]
    for p in placements:
        row, column = p.rank // block * tp + p.rank % tp, p.rank % block
        if p.node in shown:
            gcd = "" if p.gcd is None else str(p.gcd)
            shard_group = f"{row}: {format_ranks(groups[row])}"
            replicas_of = f"{column}: {format_ranks(range(column, len(placements), block))}"
            first = p.rank - p.rank % tp
            split_by = f"{first // tp}: {format_ranks(range(first, first + tp))}" if tp > 1 else ""
            cells = [str(p.rank), p.host, str(p.local_rank), p.device, gcd, p.pci]
            rows.append([*cells, shard_group, replicas_of, split_by])
        elif p.node == shown[-1] - 1 and p.local_rank == 0:
            rows.append(["..", f"{len(nodes) - 3} more nodes", *[""] * 7])
    used = [i for i in range(9) if any(row[i] for row in rows[1:])]  # no empty column
    widths = [max(len(row[i]) for row in rows) for i in range(9)]
    for cells in rows:
        yield "  ".join(cells[i].ljust(widths[i]) for i in used).rstrip()


def check_devices_differ(placements: Sequence[Placement]) -> None:
    """Raise ValueError if two ranks use the same device."""
    users: dict[tuple[int, str], int] = {}
    for p in placements:
        name = p.pci if p.pci else None if p.gcd is None else f"GCD {p.gcd}"
        other = users.setdefault((p.node, name), p.rank) if name else p.rank
        if other != p.rank:
            raise ValueError(
                f"ranks {other} and {p.rank} share one device, {name} of {p.host}: "
                "give srun `--gpus-per-task=1 --gpu-bind=closest`"
            )


def placement_warnings(placements: Sequence[Placement], shape: Sequence[int]) -> Iterator[str]:
    """Yield a warning if shard groups span more of the machine than needed, else where they are."""
    size = shape[1]
    gcds = all(p.gcd is not None for p in placements)
    least = smallest_span(size, max(p.local_rank for p in placements) + 1, gcds)
    members = shard_groups(shape)
    groups = [[placements[rank] for rank in group] for group in members]
    wide = [(span(group), i) for i, group in enumerate(groups) if span(group) > least]
    if not wide:
        yield f"shard groups: {len(groups)} of {size} ranks, each in {format_span(least)}"
        return
    level, worst = max(wide, key=lambda one: (one[0], -one[1]))
    advice = "give srun `--gpu-bind=closest` and 8 ranks per node"
    if gcds and all(p.local_rank < 8 and p.gcd == GCD_ORDER[p.local_rank] for p in placements):
        advice = "use a --group of 1, 2, 4 or 8"
    elif level >= len(SPANS):
        advice = "use a --group that divides the ranks of a node, or is a multiple of them"
    yield (
        f"warning: {len(wide)} of {len(groups)} shard groups span more of the machine than needed: "
        f"group {worst} (ranks {format_ranks(members[worst])}) spans "
        f"{format_span(level)}, but {size} ranks fit into {format_span(least)}: {advice}"
    )


def describe_topology(
    ranks: Ranks, device: torch.device, shape: Sequence[int], environ: Mapping[str, str]
) -> list[str]:
    """Return the table and the warnings as lines. Collective.

    Raises AgreedError, status 2, if two ranks use the same device.
    """
    if ranks.world_size == 1:
        return []
    placements = gather_to_rank0(find_placement(ranks, device, environ)) or []

    def lines() -> list[str]:
        check_devices_differ(placements)
        return [*format_topology(placements, shape), *placement_warnings(placements, shape)]

    return run_on_rank0(lines)


# ---------------------------------------------------------------------------------------------
# Timed all-gather


def time_all_gather(shape: tuple[int, ...], device: torch.device, mib: int = 16) -> list[float]:
    """Return the seconds that each shard group needs to gather `mib` MiB. Collective.

    All groups gather at once; a group's time is that of its slowest rank, the median of five
    rounds. Raises RuntimeError, on all ranks, if the data that arrives is not what was sent.
    """
    group = build_mesh(shape, device).get_group("shard")
    members = dist.get_process_group_ranks(group)
    piece = torch.full((mib * 2**18 // shape[1],), float(dist.get_rank()), device=device)  # fp32
    whole = torch.empty(piece.numel() * shape[1], device=device)
    rounds = []
    for _ in range(7):  # the first two open the connections
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, piece, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rounds.append(time.perf_counter() - start)
    sent = torch.tensor(members, dtype=torch.float32, device=device)[:, None]  # (ranks, 1)
    correct = bool((whole.view(shape[1], -1) == sent).all())
    seconds: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(seconds, statistics.median(rounds[2:]) if correct else math.inf)
    if math.inf in seconds:
        rank = seconds.index(math.inf)
        raise RuntimeError(f"an all-gather returned wrong data on rank {rank}: faulty GPU or link?")
    return [max(seconds[rank] for rank in group) for group in shard_groups(shape)]


def slow_groups(seconds: Sequence[float], factor: float = 2.0) -> list[int]:
    """List the groups that need more than `factor` times the median group's seconds."""
    median = statistics.median_low(seconds)
    return [i for i, s in enumerate(seconds) if s > factor * median]


def format_timing(seconds: Sequence[float], shape: Sequence[int], mib: int = 16) -> Iterator[str]:
    """Yield the result of `time_all_gather`, then slow groups."""
    groups, size = shard_groups(shape), shape[1]
    if size == 1:
        yield "all-gather: nothing to time, every rank is its own shard group"
        return
    # A rank receives all but its own part.
    rate = mib * 2**20 * (size - 1) / size / statistics.median_low(seconds) / 1e9
    yield (
        f"all-gather of {mib} MiB among {size} ranks, all groups at once: {1e3 * min(seconds):.2f} "
        f"to {1e3 * max(seconds):.2f} ms, median {rate:.2f} GB/s per rank"
    )
    for group in slow_groups(seconds):
        members, ms = format_ranks(groups[group]), 1e3 * seconds[group]
        yield f"warning: shard group {group} (ranks {members}) is slow: {ms:.2f} ms"


# ---------------------------------------------------------------------------------------------
# Command line


def main(argv: Sequence[str] | None = None) -> int:
    """Check the mesh of a command line; returns 1 if the check fails, 2 if flags are refused."""
    parser = training_parser("runtime.topology")
    parser.description = (
        "Show the mesh that train_fsdp.py would use with the same flags, and time a small "
        "all-gather in every shard group. Nothing is read, trained or written."
    )
    parser.add_argument(
        "--minutes", type=number(0.01, 1440), default=3, help="wait for all ranks (default 3)"
    )
    config = make_config(parser, args := parser.parse_args(argv))
    rank, status = process.rank_of_environment(), 2
    try:
        ranks = read_ranks(os.environ)
        rank, device = str(ranks.rank), pick_device(args.device, ranks)
        shape = resolve(config, ranks.world_size, ranks.local_world_size).mesh_shape
        if rank == "0":
            built_for = f"CUDA {torch.version.cuda}, HIP {torch.version.hip}"
            print(f"python {platform.python_version()}, torch {torch.__version__}, {built_for}")
        status = 1
        init_ranks(ranks, device, args.minutes)
        lines = describe_topology(ranks, device, shape, os.environ)
        if rank == "0":
            print("\n".join(lines))
        seconds = time_all_gather(shape, device)
    except (RuntimeError, ValueError, OSError, AgreedError) as error:
        # The launcher ends all ranks when the first one leaves: rank 0 reports first, the others
        # wait and then report what may be a problem of their own node.
        if rank != "0":
            time.sleep(process.RANK0_REPORT_GRACE_SECONDS)
        text = str(error).splitlines()[0]
        print(f"runtime.topology: error: rank {rank}: {text}", file=sys.stderr, flush=True)
        return status
    if rank == "0":
        for line in format_timing(seconds, shape):
            print(line)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    process.make_safe()
    raise SystemExit(main())
