"""Show which ranks are near each other: a picture of the mesh, warnings, a timed all-gather.

    srun python -m runtime.topology --mode hybrid --group 2

This is the pre-flight check of launch_frontier.sh. It takes train_fsdp.py's flags, in the folder of
train_fsdp.py, and shows on which host and device each rank runs, which ranks share a copy of the
parameters, and how fast each of these shard groups gathers 16 MiB.
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

from mesh import Ranks, build_mesh, init_ranks, pick_device, read_ranks
from runtime import flags, terminal
from runtime.ranges import number

# The GCD of local rank 0, 1, ... 7 under Frontier's srun line (`-c7 --gpus-per-task=1
# --gpu-bind=closest`). GCDs 0 1, 2 3, 4 5, 6 7 are a package: 200 GB/s each way inside. Between the
# packages of a pair below run two links, 100 GB/s, between others one or none; off the node a GCD
# has 12.5 GB/s. So neighbours in rank are neighbours by wire, and no rank needs another number.
GCD_ORDER = (4, 5, 2, 3, 6, 7, 0, 1)
PAIRS = ({4, 5, 2, 3}, {6, 7, 0, 1})
REACH = ("one device", "one package", "two packages with a double link", "one node")


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    rank: int
    node: int
    local_rank: int
    host: str
    device: str
    gcd: int | None  # of the node's eight, on MI250X or wherever Slurm says so
    pci: str  # address; empty where not known


def find_place(ranks: Ranks, device: torch.device, environ: Mapping[str, str]) -> Place:
    """This process's own place."""
    host = environ.get("SLURMD_NODENAME") or platform.node()
    index, gcd, pci, name = ranks.local_rank, None, "", ""
    if device.type == "cuda":
        index, known = device.index or 0, torch.cuda.get_device_properties(device)
        name = known.name
        numbers = [getattr(known, f"pci_{n}_id", -1) for n in ("domain", "bus", "device")]
        if min(numbers) >= 0:  # not in every build
            pci = "{:04x}:{:02x}:{:02x}".format(*numbers)
    if "MI250" in name or (device.type == "cpu" and environ.get("ROCR_VISIBLE_DEVICES")):
        gcd = visible_gcd(environ, index)
    return Place(ranks.rank, ranks.node, ranks.local_rank, host, str(device), gcd, pci)


def visible_gcd(environ: Mapping[str, str], index: int) -> int | None:
    """The node's own number of the device that this process sees as `index`; None if not told.

    ROCr leaves a process some of the node's devices, HIP some of those; each counts from 0 again.
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


def reach(places: Sequence[Place]) -> int:
    """How far apart ranks are: an index of REACH, and one more for each further node."""
    nodes, gcds = {p.node for p in places}, {p.gcd for p in places}
    if len(nodes) > 1:
        return len(REACH) - 2 + len(nodes)
    if len(places) == 1:
        return 0
    if None in gcds:
        return 3
    if len({gcd // 2 for gcd in gcds if gcd is not None}) == 1:
        return 1
    return 2 if any(gcds <= pair for pair in PAIRS) else 3


def least_reach(size: int, local_world_size: int, gcds: bool) -> int:
    """The smallest `reach` that so many ranks can have, on nodes of MI250X (`gcds`) or others."""
    if size == 1:
        return 0
    nodes = -(-size // local_world_size)
    near = 1 if size <= 2 else 2 if size <= 4 else 3
    return len(REACH) - 2 + nodes if nodes > 1 else near if gcds else 3


def reach_text(level: int) -> str:
    """`reach` in words."""
    return REACH[level] if level < len(REACH) else f"{level - len(REACH) + 2} nodes"


def some(numbers: Sequence[int]) -> str:
    """0 1 2 3, or 0 1 2 .. 15 where there are more."""
    shown = [str(n) for n in numbers]
    return " ".join(shown if len(shown) < 5 else [*shown[:3], "..", shown[-1]])


def picture(places: Sequence[Place], shape: Sequence[int]) -> Iterator[str]:
    """Lines: every rank, its place and its groups; of more than four nodes three are shown."""
    replicas, size = shape
    nodes = sorted({p.node for p in places})
    on = f"{len(places)} ranks on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    yield f"mesh {replicas} x {size} (replicate x shard): {on}"
    shown = nodes if len(nodes) < 5 else [*nodes[:2], nodes[-1]]
    rows = [["rank", "host", "local", "device", "GCD", "PCI", "shard group", "replicate group"]]
    for p in places:
        row, column = divmod(p.rank, size)
        if p.node in shown:
            rows.append(
                [
                    str(p.rank),
                    p.host,
                    str(p.local_rank),
                    p.device,
                    "" if p.gcd is None else str(p.gcd),
                    p.pci,
                    f"{row}: {some(range(row * size, (row + 1) * size))}",
                    f"{column}: {some(range(column, len(places), size))}",
                ]
            )
        elif p.node == shown[-1] - 1 and p.local_rank == 0:
            rows.append(["..", f"{len(nodes) - 3} more nodes", *[""] * 6])
    used = [i for i in range(8) if any(row[i] for row in rows[1:])]  # no empty column
    wide = [max(len(row[i]) for row in rows) for i in range(8)]
    for cells in rows:
        yield "  ".join(cells[i].ljust(wide[i]) for i in used).rstrip()


def warnings_of(places: Sequence[Place], shape: Sequence[int]) -> Iterator[str]:
    """What there is to say of how far shard groups reach; ValueError where ranks share a device."""
    taken: dict[tuple[int, str], int] = {}
    for p in places:
        own = p.pci if p.pci else None if p.gcd is None else f"GCD {p.gcd}"
        other = taken.setdefault((p.node, own), p.rank) if own else p.rank
        if other != p.rank:
            raise ValueError(
                f"ranks {other} and {p.rank} share one device, {own} of {p.host}: "
                "give srun `--gpus-per-task=1 --gpu-bind=closest`"
            )
    size = shape[1]
    gcds = all(p.gcd is not None for p in places)
    least = least_reach(size, max(p.local_rank for p in places) + 1, gcds)
    groups = [places[i : i + size] for i in range(0, len(places), size)]
    far = [(reach(group), i) for i, group in enumerate(groups) if reach(group) > least]
    if not far:
        yield f"shard groups: {shape[0]} of {size} ranks, each in {reach_text(least)}"
        return
    level, worst = max(far, key=lambda one: (one[0], -one[1]))
    ranks = some([p.rank for p in groups[worst]])
    use = "give srun `--gpu-bind=closest` and 8 ranks a node"
    if gcds and all(p.local_rank < 8 and p.gcd == GCD_ORDER[p.local_rank] for p in places):
        use = "take a --group of 1, 2, 4 or 8"
    elif level >= len(REACH):
        use = "take a --group that divides the ranks of a node, or is a multiple of them"
    yield (
        f"warning: {len(far)} of {shape[0]} shard groups reach further than they have to: group "
        f"{worst} (ranks {ranks}) is in {reach_text(level)}, {size} ranks can be in "
        f"{reach_text(least)}: {use}"
    )


def topology(
    ranks: Ranks, device: torch.device, shape: Sequence[int], environ: Mapping[str, str]
) -> list[str]:
    """The picture of the mesh and what is wrong with it, on rank 0; no lines elsewhere. Collective.

    ValueError, on all ranks, where two of them have one device.
    """
    if ranks.world_size == 1:
        return []
    mine, lines, problem = find_place(ranks, device, environ), list[str](), [""]
    places: list[Place] | None = [mine] * ranks.world_size if ranks.rank == 0 else None
    dist.gather_object(mine, places)
    if places:
        try:
            lines = [*picture(places, shape), *warnings_of(places, shape)]
        except ValueError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem)
    if problem[0]:
        raise ValueError(problem[0])
    return lines


def time_all_gather(shape: tuple[int, int], device: torch.device, mib: int = 16) -> list[float]:
    """Seconds that each shard group needs to gather `mib` MiB, all at once. Collective.

    The slowest rank of a group counts, in the middle one of five rounds. What arrives is checked:
    RuntimeError, on all ranks, where it is not what the ranks of the group sent.
    """
    group = build_mesh(shape, device).get_group("shard")
    members = dist.get_process_group_ranks(group)
    piece = torch.full((mib * 2**18 // shape[1],), float(dist.get_rank()), device=device)  # fp32
    whole = torch.empty(piece.numel() * shape[1], device=device)
    rounds = []
    for _ in range(7):  # the first two connect
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, piece, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rounds.append(time.perf_counter() - start)
    sent = torch.tensor(members, dtype=torch.float32, device=device)[:, None]  # (ranks, 1)
    right = bool((whole.view(shape[1], -1) == sent).all())
    every: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, statistics.median(rounds[2:]) if right else math.inf)
    if math.inf in every:
        raise RuntimeError(f"an all-gather brought wrong numbers to rank {every.index(math.inf)}")
    return [max(every[i : i + shape[1]]) for i in range(0, len(every), shape[1])]


def slow_groups(seconds: Sequence[float], factor: float = 2.0) -> list[int]:
    """Groups that need more than `factor` times what the middle group needs."""
    middle = statistics.median_low(seconds)
    return [i for i, s in enumerate(seconds) if s > factor * middle]


def timing_lines(seconds: Sequence[float], size: int, mib: int = 16) -> Iterator[str]:
    """What `time_all_gather` found, in words."""
    if size == 1:
        yield "all-gather: nothing to time, every rank is a shard group of its own"
        return
    rate = mib * 2**20 * (size - 1) / size / statistics.median_low(seconds) / 1e9
    yield (
        f"all-gather of {mib} MiB among {size} ranks, all groups at once: {1e3 * min(seconds):.2f} "
        f"to {1e3 * max(seconds):.2f} ms, in the middle {rate:.2f} GB/s into a rank"
    )
    for group in slow_groups(seconds):
        yield (
            f"warning: shard group {group} (ranks {some(range(group * size, (group + 1) * size))}) "
            f"is slow: {1e3 * seconds[group]:.2f} ms"
        )


# ---------------------------------------------------------------------------------------------
# Command line


def main(argv: Sequence[str] | None = None) -> int:
    """Look at the mesh of a command before it burns node-hours; 1 where it fails, 2 refused."""
    parser = flags.build_parser("runtime.topology")
    parser.description = (
        "Show the mesh that train_fsdp.py would use with the same flags, and time a small "
        "all-gather in every shard group. Nothing is read, trained or written."
    )
    parser.add_argument(
        "--minutes", type=number(0.01, 1440), default=3, help="wait for all ranks (default 3)"
    )
    args = flags.settled(parser, parser.parse_args(argv))
    rank, status = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0", 2
    try:
        ranks = read_ranks(os.environ)
        rank, device = str(ranks.rank), pick_device(args.device, ranks)
        shape = flags.sizes(args, ranks.world_size, ranks.local_world_size)[1]
        if rank == "0":
            print(
                f"python {platform.python_version()}, torch {torch.__version__}, CUDA "
                f"{torch.version.cuda}, HIP {torch.version.hip}",
                flush=True,
            )
        status = 1
        init_ranks(ranks, device, args.minutes)
        for line in topology(ranks, device, shape, os.environ):
            print(line, flush=True)
        seconds = time_all_gather(shape, device)
    except (RuntimeError, ValueError, OSError) as error:
        # Rank 0 speaks for all; the first to leave has the launcher end the others, so they wait a
        # little, and then say what may be their own trouble.
        if rank != "0":
            time.sleep(5)
        text = str(error).splitlines()[0]
        print(f"runtime.topology: error: rank {rank}: {text}", file=sys.stderr, flush=True)
        return status
    if rank == "0":
        for line in timing_lines(seconds, shape[1]):
            print(line, flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    terminal.make_safe()
    raise SystemExit(main())
