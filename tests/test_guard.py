"""Guard of train_fsdp.py: which steps all ranks skip, and what each learns of it."""

import math

import pytest
import torch
from ranks import join, on_ranks

from train_fsdp import Guard, Requests

CPU = torch.device("cpu")
NAN = float("nan")
INF = float("inf")
# name: (scaled, {(rank, step): loss}, {step: norm on all ranks}, steps skipped, of 0 to 6)
FINITE = {
    "all finite": (False, {}, {}, "0000000"),
    "one loss": (False, {(2, 4): NAN}, {}, "0000111"),
    "two ranks": (False, {(0, 5): NAN, (1, 3): -INF}, {}, "0001111"),
    "the norm alone": (False, {}, {2: INF}, "0011111"),
    "scaled, infinite norms": (True, {}, {0: INF, 3: NAN}, "1001000"),
    "scaled, a loss": (True, {(2, 4): NAN}, {1: INF}, "0100111"),
}
FLAGS = {  # (rank, step)
    "stop": {(1, 3), (1, 4)},
    "save": {(0, 5)},
    "no_batch": {(2, 7)},
    "bad_images": {(0, 2), (2, 2)},
}


def three_ranks():
    """By name: whether each step is skipped, and its result."""
    rank = join()
    found = {}
    for name, (scaled, losses, norms, _) in FINITE.items():
        guard = Guard(CPU)
        found[name] = []
        for step in range(8):  # in the last one a rank has no batch
            loss = torch.tensor(losses.get((rank, step), float(rank)))
            norm = torch.tensor(norms.get(step, 1.0))
            asked = Requests(**{flag: (rank, step) in where for flag, where in FLAGS.items()})
            skip = guard.check(step, loss, norm, asked, scaled)
            (result,) = guard.results(wait=False)
            found[name].append((skip.item(), result))
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return on_ranks(3, three_ranks, tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("name", FINITE)
def test_all_ranks_skip_the_same_steps_and_know_why(three, name):
    scaled, losses, norms, skips = FINITE[name]
    for found in three:
        for step, (skip, result) in enumerate(found[name]):
            assert result.step == step and skip == float((skips + "1")[step]), step
            bad = any((rank, step) in losses for rank in range(3))
            assert not math.isfinite(result.loss) if bad else result.loss == pytest.approx(1.0)
            assert bool(result.bad_norm) == (step in norms)
            assert bool(result.bad) == (bad or (step in norms and not scaled))
            for flag, where in FLAGS.items():
                asking = sum((rank, step) in where for rank in range(3))
                assert getattr(result, flag) == asking, flag


class Event:
    """In the place of a GPU's."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


@pytest.mark.parametrize("late", [False, True])
def test_a_late_reader_gets_the_same_results(late, single, monkeypatch):
    """As for a GPU, whose results are read one step later, but for a stop, a save, the end."""
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: Event())
    guard = Guard(CPU)
    guard.late = late
    one = torch.tensor(1.0)

    def read(step: int | None = None, wait: bool = False, **asked: bool) -> list[int]:
        if step is not None:
            guard.check(step, one, one, Requests(**asked))
        return [result.step for result in guard.results(wait)]

    assert read(0) == ([] if late else [0])
    assert read(1) == ([0] if late else [1])
    assert read(wait=True) == ([1] if late else [])
    assert read(2, stop=True) == ([] if late else [2])
    assert read(3) == ([2, 3] if late else [3])  # what is applied by then is what is saved
