"""Score frozen features by k nearest neighbours: nothing is trained.

The k training images whose features have the largest cosine similarity vote for their classes, each
with the weight exp(similarity / 0.07) (Wu et al., arXiv 1805.01978, section 3.4, as DINO and others
do since), or with one vote each.
"""

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from downstream.scores import add_score_arguments, run_scores
from runtime.config import whole

HELP = "a score without training: k nearest neighbours of frozen features"
TEMPERATURE = 0.07
QUERIES, BANK = 16384, 16384  # rows in memory at a time
SIMILARITIES = 2**25  # at a time: 128 MiB
# Of a product of unit vectors in bf16: a relative error of 2^-9 in either, in the result, and in
# what it is compared with; a little more for the sum.
BF16_ERROR = 4.5 * 2**-9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this subcommand."""
    add_score_arguments(parser)
    add = parser.add_argument
    add("--k", type=whole(1, 10**6), default=20, metavar="K", help="neighbours that vote (20)")
    add("--vote", choices=("weighted", "majority"), default="weighted", help="default weighted")


def run(args: argparse.Namespace) -> int:
    """Print and write the scores; ValueError or OSError, one sentence, where that fails."""

    def classify(
        bank: Any, labels: Tensor, queries: Any, classes: int, seed: int, device: torch.device
    ) -> Tensor:
        similarity, index = nearest(bank, queries, args.k, device)
        return vote(similarity, labels[index], classes, args.vote == "weighted")

    return run_scores(vars(args), "knn", {"k": args.k, "vote": args.vote}, classify)


def blocks(rows: Any, size: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Read rows (N, D) block by block -> (first row, unit vectors (n, D) fp32)."""
    for first in range(0, len(rows), size):
        values = torch.from_numpy(np.array(rows[first : first + size], np.float32)).to(device)
        yield first, F.normalize(values, dim=1)


def nearest(
    bank: Any, queries: Any, k: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Find the k rows of `bank` (N, D) most similar to each of `queries` (Q, D), by cosine.

    Both are arrays, or have `len` and slices that are arrays. Returns similarities in descending
    order (Q, k) fp32, and the rows' numbers (Q, k) int64, on the CPU; fewer where N is less than k.
    Reads in blocks: needs about 1 GiB, whatever N and Q, for D up to 4096.
    """
    device = device or torch.device("cpu")
    k = min(k, len(bank))
    found = []
    for _, some in blocks(queries, QUERIES, device):
        best = torch.empty(len(some), 0, device=device)
        index = torch.empty(len(some), 0, dtype=torch.int64, device=device)
        for first, block in blocks(bank, BANK, device):
            step = max(1, SIMILARITIES // len(block))
            parts = [
                _merge(best[i : i + step], index[i : i + step], some[i : i + step], block, first, k)
                for i in range(0, len(some), step)
            ]
            best, index = (torch.cat(part) for part in zip(*parts, strict=True))
        found.append((best.cpu(), index.cpu()))
    best, index = (torch.cat(part) for part in zip(*found, strict=True))
    return best, index


def _merge(
    best: Tensor, index: Tensor, queries: Tensor, block: Tensor, first: int, k: int
) -> tuple[Tensor, Tensor]:
    """Keep the k best of what was found so far (Q, k') and of a block of the bank (n, D)."""
    if best.shape[1] == k and _bf16_is_fast(queries.device):
        merged = _merge_screened(best, index, queries, block, first)
        if merged:
            return merged
    values, places = (queries @ block.T).topk(min(k, len(block)), dim=1)
    return _keep_best(best, index, values, places + first, k)


def _keep_best(
    best: Tensor, index: Tensor, values: Tensor, places: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Keep the k best of two sets of similarities (Q, .) with the numbers of their rows."""
    values, places = torch.cat([best, values], 1), torch.cat([index, places], 1)
    values, chosen = values.topk(min(k, values.shape[1]), dim=1)
    return values, places.gather(1, chosen)


def _bf16_is_fast(device: torch.device) -> bool:
    """Tell whether this is a CPU with matrix units for bf16, at several times the rate of fp32."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private, so it may be gone
    return device.type == "cpu" and amx is not None and amx()


def _merge_screened(
    best: Tensor, index: Tensor, queries: Tensor, block: Tensor, first: int
) -> tuple[Tensor, Tensor] | None:
    """Do as `_merge`: find by a product in bf16 which pairs may count, compute these in fp32.

    None where they are many.
    """
    low = queries.bfloat16() @ block.bfloat16().T  # (Q, n)
    row, column = _at_least(low, (best[:, -1:] - BF16_ERROR).bfloat16())
    if len(row) * queries.shape[1] > SIMILARITIES:
        return None
    exact = (queries[row] * block[column]).sum(dim=1)
    counts = torch.bincount(row, minlength=len(queries))
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]  # its number in its row
    shape = len(queries), max(1, int(counts.max()))
    values, places = torch.full(shape, -torch.inf), torch.zeros(shape, dtype=torch.int64)
    values[row, place], places[row, place] = exact, column + first
    return _keep_best(best, index, values, places, best.shape[1])


def _at_least(values: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Find the few of `values` (Q, n) that reach `limit` (Q, 1) -> their rows and columns, sorted.

    Five times as fast as to compare them all: only groups whose maximum reaches it are searched.
    """
    size = math.gcd(values.shape[1], 128)
    groups = values.unflatten(1, (-1, size))
    row, group = (groups.amax(dim=2) >= limit).nonzero(as_tuple=True)
    found, place = (groups[row, group] >= limit[row]).nonzero(as_tuple=True)
    return row[found], group[found] * size + place


def vote(similarity: Tensor, labels: Tensor, classes: int, weighted: bool = True) -> Tensor:
    """Add up the votes of neighbours, (Q, k) similarities and labels -> (Q, classes) float64.

    -inf for a class without a vote.
    """
    similarity = similarity.double()
    weight = (similarity / TEMPERATURE).exp() if weighted else torch.ones_like(similarity)
    votes = torch.zeros(len(labels), classes, dtype=torch.float64).scatter_add(1, labels, weight)
    return votes.masked_fill(votes == 0, -torch.inf)
