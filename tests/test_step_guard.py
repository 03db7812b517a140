"""runtime/agreement.py: which steps all ranks skip, and what each learns of the others."""

import operator
from functools import partial

import pytest
import torch
from ranks import join, on_ranks

from runtime.agreement import StepGuard, StepVerdict

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
# name: (max_skips, scaled, {(rank, step): loss}, {step: norm on all ranks},
#        steps skipped, of 0 to 6; consecutive bad steps after each)
FINITE = {
    "all finite": (0, False, {}, {}, "0000000", "0000000"),
    "one loss": (0, False, {(2, 4): NAN}, {}, "0000111", "0000123"),
    "a loss and the norm with it": (0, False, {(2, 4): NAN}, {4: NAN}, "0000111", "0000123"),
    "infinite at once": (0, False, {(1, 0): INF}, {}, "1111111", "1234567"),
    "two ranks": (0, False, {(0, 5): NAN, (1, 3): -INF}, {}, "0001111", "0001234"),
    "the norm alone": (0, False, {}, {2: INF}, "0011111", "0012345"),
    "scaled, infinite norms": (0, True, {}, {0: INF, 3: NAN}, "1001000", "0000000"),
    "scaled, a loss": (0, True, {(2, 4): NAN}, {1: INF}, "0100111", "0000123"),
    "one may be skipped": (1, False, {(2, 4): NAN}, {}, "0000100", "0000100"),
    "two apart": (1, False, {(2, 1): NAN, (0, 3): INF}, {}, "0101000", "0101000"),
    "one too many": (1, False, {(2, 1): NAN, (0, 2): INF}, {}, "0111111", "0123456"),
    "loss, then norm": (2, False, {(1, 1): NAN}, {2: NAN}, "0110000", "0120000"),
    "scaled, between": (2, True, {(1, 1): NAN, (1, 3): NAN}, {2: INF}, "0111000", "0101000"),
}
FLAGS = {  # (rank, step)
    "stop": {(1, 3), (1, 4)},
    "save": {(0, 5)},
    "no_batch": {(2, 7), (0, 8), (2, 8)},
}


def three_ranks():
    """By name: for each step whether it is skipped, the verdict of the one before and its own."""
    rank, found = join(), {}
    for name, (max_skips, scaled, losses, norms, *_) in FINITE.items():
        guard = StepGuard(CPU, max_skips)
        found[name] = []
        for step in range(9):  # in the last two a rank has no batch
            loss = torch.tensor(losses.get((rank, step), 1.0))
            norm = torch.tensor(norms.get(step, 1.0))
            guard.stop_requested = partial(operator.contains, FLAGS["stop"], (rank, step))
            guard.save_due = partial(operator.contains, FLAGS["save"], (rank, step))
            guard.loader_error = OSError() if (rank, step) in FLAGS["no_batch"] else None
            skip = guard.vote(loss, norm, scaled)
            assert (skip.shape, skip.dtype) == ((), torch.float32)
            found[name].append((skip.item(), guard.read(step - 1), guard.read(step)))
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return on_ranks(3, three_ranks, tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("name", FINITE)
def test_all_ranks_skip_the_same_steps_and_know_why(three, name):
    _, scaled, losses, norms, skips, rows = FINITE[name]
    for rank, found in enumerate(three):
        for step, (skip, before, now) in enumerate(found[name]):
            assert skip == float((skips + "11")[step]), step
            assert now == StepVerdict(
                own_loss=(rank, step) in losses,
                loss=any((r, step) in losses for r in range(3)),
                norm=step in norms and not scaled,
                consecutive=int(rows[min(step, 6)]),
                **{
                    flag: any((r, step) in where for r in range(3)) for flag, where in FLAGS.items()
                },
            )
            assert step == 0 or before == found[name][step - 1][2]
