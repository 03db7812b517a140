"""Show where each rank runs, and how fast each shard group gathers: the pre-flight check.

    srun python -m runtime.topology --mode hybrid --group 2

launch_frontier.sh starts it before a run, with train_fsdp.py's flags. Nothing is read or trained.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist

from mesh import DIMENSIONS, Ranks, build_mesh
from runtime import process
from runtime.agreement import gather_to_rank0, run_on_rank0
from runtime.config import make_config, training_parser
from runtime.run import Run
from runtime.session import Session, run_session

Placement = tuple[str, str, str, str]  # of a rank, as of `find_placement`


def find_placement(ranks: Ranks, device: torch.device) -> Placement:
    """Find host, local rank, device and, of a GPU, its address on the PCI bus and its name."""
    host, where, uuid = os.environ.get("SLURMD_NODENAME") or platform.node(), str(device), ""
    if device.type == "cuda":
        gpu: Any = torch.cuda.get_device_properties(device)
        where += f" {gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"
        uuid = str(getattr(gpu, "uuid", ""))  # parts of a GPU (MIG, CPX) share the address
    return host, str(ranks.local_rank), where, uuid


def check_devices_differ(placements: Sequence[Placement]) -> None:
    """Raise ValueError if two ranks use the same GPU."""
    users: dict[tuple[str, str, str], int] = {}
    for rank, (host, _, device, uuid) in enumerate(placements):
        _, _, address = device.partition(" ")
        other = users.setdefault((host, address, uuid), rank)
        if address and other != rank:
            shared = f"ranks {other} and {rank} share one device, {address} of {host}"
            raise ValueError(f"{shared}: give srun `--gpus-per-task=1 --gpu-bind=closest`")


def groups_of(shape: Sequence[int], dimension: int) -> list[list[int]]:
    """List the ranks of each group of a mesh: of dimension 0 replicate, 1 shard, 2 tp."""
    grid = torch.arange(math.prod(shape)).view(*shape[:2], -1)
    return grid.movedim(dimension, -1).flatten(0, 1).tolist()


def describe_topology(ranks: Ranks, device: torch.device, shape: Sequence[int]) -> list[str]:
    """Make a table of the ranks, one per line; of more than 32 ranks 24 are shown. Collective.

    Empty but on rank 0. AgreedError, status 2, if two ranks use the same GPU.
    """
    placements = gather_to_rank0(find_placement(ranks, device)) or []
    run_on_rank0(lambda: check_devices_differ(placements))
    world, nodes = len(placements), len({host for host, *_ in placements})
    if world < 2:
        return []
    table = [["rank", "host", "local", "device"]]
    table += [[str(rank), *p[:3]] for rank, p in enumerate(placements)]
    for dimension in (1, 0, 2)[: len(shape)]:
        table[0].append(f"{DIMENSIONS[dimension]} group")
        for i, group in enumerate(groups_of(shape, dimension)):
            members = shorten(" ".join(map(str, group)), 20, placeholder=" ..")
            for rank in group:
                table[1 + rank].append(f"{i}: {members}")
    if world > 32:
        table[17:-8] = [["..", f"{world - 24} more ranks", *[""] * (len(table[0]) - 2)]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    sizes, named = " x ".join(map(str, shape)), " x ".join(DIMENSIONS[: len(shape)])
    return [f"mesh {sizes} ({named}): {world} ranks on {nodes} node{'s' * (nodes > 1)}", *lines]


def time_all_gather(shape: tuple[int, ...], device: torch.device) -> list[str]:
    """Time how each shard group gathers 16 MiB, all at once. Collective.

    Returns lines: their times, and which groups need twice the median's.
    """
    process_group, size = build_mesh(shape, device).get_group("shard"), shape[1]
    piece = torch.zeros(2**22 // size, device=device)  # fp32
    whole = torch.empty(size, piece.numel(), device=device)
    rounds = []  # seconds
    for _ in range(7):  # the first two open the connections
        start = time.perf_counter()
        dist.all_gather([*whole], piece, group=process_group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rounds.append(time.perf_counter() - start)
    by_rank = [0.0] * dist.get_world_size()
    dist.all_gather_object(by_rank, statistics.median(rounds[2:]))
    groups = groups_of(shape, 1)
    seconds = [max(by_rank[rank] for rank in group) for group in groups]
    median = statistics.median_low(seconds)
    rate = 2**24 * (size - 1) / size / median / 1e9  # a rank receives all but its own part
    times = f"{1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f} ms, median {rate:.2f} GB/s"
    lines = [f"all-gather of 16 MiB among {size} ranks, all groups at once: {times} per rank"]
    for i, group in enumerate(groups):
        if seconds[i] > 2 * median:
            where = f"shard group {i} (ranks {group[0]} to {group[-1]})"
            lines.append(f"warning: {where} is slow: {1e3 * seconds[i]:.2f} ms")
    return lines


def check_mesh(run: Run, session: Session) -> None:
    """Print where the ranks of a run are and how fast they gather. Collective; AgreedError."""
    session.log.say(*describe_topology(session.ranks, session.device, run.mesh_shape))
    if run.mesh_shape[1] > 1:  # or every rank is its own shard group
        session.log.say(*time_all_gather(run.mesh_shape, session.device))


def main(argv: Sequence[str] | None = None) -> int:
    """Check the mesh of a command line; return the exit status of `run_session`."""
    parser = training_parser("runtime.topology", __doc__)
    config = make_config(parser, parser.parse_args(argv))
    return run_session(replace(config, timeout=60), check_mesh)


if __name__ == "__main__":
    process.make_safe()
    raise SystemExit(main())
