"""Score frozen features by k nearest neighbours: nothing is trained.

The k training images whose features have the largest cosine similarity vote for their classes, each
with the weight exp(similarity / 0.07) (Wu et al., arXiv 1805.01978, section 3.4, as DINO and others
do since), or with one vote each.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from downstream.scores import add_score_arguments, run_scores
from runtime.config import whole
from runtime.process import throttled_progress

HELP = "a score without training: k nearest neighbours of frozen features"
TEMPERATURE = 0.07
QUERIES, BANK = 16384, 16384  # rows in memory at a time
STEP = 2048  # queries compared with a block at a time: 128 MiB of similarities


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
    device, k, found = device or torch.device("cpu"), min(k, len(bank)), []
    progress = throttled_progress(partial(print, flush=True), "k-NN, queries against a block")
    done = 0
    for _, some in blocks(queries, QUERIES, device):
        best = torch.empty(len(some), 0, device=device)
        index = torch.empty(len(some), 0, dtype=torch.int64, device=device)
        for first, block in blocks(bank, BANK, device):
            parts = []
            for own, its, x in zip(*(t.split(STEP) for t in (best, index, some)), strict=True):
                values, places = (x @ block.T).topk(min(k, len(block)), dim=1)
                values, places = torch.cat([own, values], 1), torch.cat([its, places + first], 1)
                values, chosen = values.topk(min(k, values.shape[1]), dim=1)
                parts.append((values, places.gather(1, chosen)))
            best, index = (torch.cat(part) for part in zip(*parts, strict=True))
            progress(done := done + len(some))
        found.append((best.cpu(), index.cpu()))
    best, index = (torch.cat(part) for part in zip(*found, strict=True))
    return best, index


def vote(similarity: Tensor, labels: Tensor, classes: int, weighted: bool = True) -> Tensor:
    """Add up the votes of neighbours, (Q, k) similarities and labels -> (Q, classes) float64.

    -inf for a class without a vote.
    """
    similarity = similarity.double()
    weight = (similarity / TEMPERATURE).exp() if weighted else torch.ones_like(similarity)
    votes = torch.zeros(len(labels), classes, dtype=torch.float64).scatter_add(1, labels, weight)
    return votes.masked_fill(votes == 0, -torch.inf)
