"""Fit the speeds of a machine to measured times, by non-negative least squares."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.estimate import BlockSize, hop_count
from planner.machines import BlockSpeed, LinkSpeed, Machine, wire_bytes


@dataclass(frozen=True)
class CollectiveTime:
    """How long one collective took on groups of ranks that all sent at once."""

    level: str  # the slowest links that the group uses, of LINKS
    kind: str
    ranks: int  # in each group
    payload: int  # bytes of the full tensor
    seconds: float


def fit_costs(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Find the non-negative costs for which `counts` x costs is nearest to `seconds`.

    Each row of `counts` says how often a measurement contains each cost. The sum of the squared
    relative errors is minimised (non-negative least squares). There are so few costs that every
    subset of them is tried, with the others at 0.
    """
    wanted = np.asarray(seconds, dtype=float)
    rows = np.asarray(counts, dtype=float) / wanted[:, None]
    columns = rows.shape[1]
    best = np.zeros(columns)
    smallest = np.inf
    for number in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), number):
            scale = np.linalg.norm(rows[:, chosen], axis=0)
            scale[scale == 0] = 1.0
            found, *_ = np.linalg.lstsq(rows[:, chosen] / scale, np.ones(len(rows)), rcond=None)
            if (found < 0).any():
                continue
            costs = np.zeros(columns)
            costs[list(chosen)] = found / scale
            error = float(np.square(rows @ costs - 1).sum())
            if error < smallest - 1e-12:
                smallest = error
                best = costs
    return best.tolist()


def fit_block_speed(
    precision: str, times: Sequence[tuple[BlockSize, float]], host_seconds: float
) -> BlockSpeed:
    """Fit the speed of blocks to the seconds of blocks of several sizes."""
    counts = [size.counts() for size, _ in times]
    seconds = [found for _, found in times]
    flop, feature, score, weight, block = fit_costs(counts, seconds)
    if flop == 0:
        # The blocks are too small for matrix products to show. At most these take all the time of
        # the block that has the most FLOPs per second.
        flops = [row[0] for row in counts]
        flop = min(found / done for found, done in zip(seconds, flops, strict=True))
    return BlockSpeed(precision, 1 / flop, feature, score, weight, block, host_seconds)


def fit_link_speeds(
    times: Sequence[CollectiveTime], node_ranks: int, like: Machine
) -> list[LinkSpeed]:
    """Fit launch, hop and rate of each kind of collective on each level of links.

    Groups of one size do not tell a launch from hops: their ratio is then that of `like`.
    """
    found = []
    for level, kind in dict.fromkeys((time.level, time.kind) for time in times):
        some = [time for time in times if time.level == level and time.kind == kind]
        seconds = [time.seconds for time in some]
        sent = [wire_bytes(kind, time.payload, time.ranks) for time in some]
        hops = [hop_count(kind, time.ranks) for time in some]
        if len(set(hops)) > 1:
            counts = [(1, count, size) for count, size in zip(hops, sent, strict=True)]
            launch, hop, byte = fit_costs(counts, seconds)
        else:
            known = like.link_speed(level, kind)
            latency = known.launch_seconds + hops[0] * known.hop_seconds
            factor, byte = fit_costs([(latency, size) for size in sent], seconds)
            launch = factor * known.launch_seconds
            hop = factor * known.hop_seconds
        if byte == 0:
            # Only latency shows. At most, sending takes all the time of the largest collective.
            largest = max(some, key=lambda time: time.payload)
            byte = largest.seconds / wire_bytes(kind, largest.payload, largest.ranks)
        # On the network all ranks of a node send at the same time, each in another group.
        together = node_ranks if level == "network" else 1
        found.append(LinkSpeed(level, kind, together / byte, launch, hop))
    return found
