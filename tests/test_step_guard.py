"""StepGuard of runtime/agreement.py: which steps all ranks skip, and what each learns of it."""

import math

import pytest
import torch
from ranks import join, on_ranks

from runtime.agreement import StepGuard, StepRequests

CPU = torch.device("cpu")
NAN = float("nan")
INF = float("inf")
# name: (max_skips, scaled, {(rank, step): loss}, {step: norm on all ranks},
#        steps skipped, of 0 to 6; consecutive bad steps after each)
FINITE = {
    "all finite": (0, False, {}, {}, "0000000", "0000000"),
    "one loss": (0, False, {(2, 4): NAN}, {}, "0000111", "0000123"),
    "two ranks": (0, False, {(0, 5): NAN, (1, 3): -INF}, {}, "0001111", "0001234"),
    "the norm alone": (0, False, {}, {2: INF}, "0011111", "0012345"),
    "scaled, infinite norms": (0, True, {}, {0: INF, 3: NAN}, "1001000", "0000000"),
    "scaled, a loss": (0, True, {(2, 4): NAN}, {1: INF}, "0100111", "0000123"),
    "two apart": (1, False, {(2, 1): NAN, (0, 3): INF}, {}, "0101000", "0101000"),
    "one too many": (1, False, {(2, 1): NAN, (0, 2): INF}, {}, "0111111", "0123456"),
    "scaled, between": (2, True, {(1, 1): NAN, (1, 3): NAN}, {2: INF}, "0111000", "0101000"),
}
FLAGS = {  # (rank, step)
    "stop": {(1, 3), (1, 4)},
    "save": {(0, 5)},
    "no_batch": {(2, 7)},
    "bad_images": {(0, 2), (2, 2)},
}


def three_ranks():
    """By name: whether each step is skipped, and its verdict."""
    rank = join()
    found = {}
    for name, (max_skips, scaled, losses, norms, *_) in FINITE.items():
        guard = StepGuard(CPU, max_skips)
        found[name] = []
        for step in range(8):  # in the last one a rank has no batch
            loss = torch.tensor(losses.get((rank, step), float(rank)))
            norm = torch.tensor(norms.get(step, 1.0))
            requests = StepRequests(
                stop=(rank, step) in FLAGS["stop"],
                save=(rank, step) in FLAGS["save"],
                no_batch=(rank, step) in FLAGS["no_batch"],
                bad_images=(rank, step) in FLAGS["bad_images"],
            )
            skip = guard.check_step(loss, norm, requests, scaled=scaled)
            verdicts = guard.read_results()
            assert len(verdicts) == 1
            found[name].append((skip.item(), verdicts[0]))
            # the host of a GPU would read late
            guard.done = guard.checked
            guard.end_reason = ""
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return on_ranks(3, three_ranks, tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("name", FINITE)
def test_all_ranks_skip_the_same_steps_and_know_why(three, name):
    _, _, losses, _, skips, rows = FINITE[name]
    for rank, found in enumerate(three):
        for step, (skip, verdict) in enumerate(found[name]):
            assert skip == float((skips + "1")[step]), step
            bad = [r for r in range(3) if (r, step) in losses]
            assert verdict.step == step and verdict.local_loss_nonfinite == (rank in bad)
            assert not math.isfinite(verdict.loss) if bad else verdict.loss == pytest.approx(1.0)
            assert verdict.bad_loss == bool(bad)
            assert verdict.consecutive == int(rows[min(step, 6)])
            for flag, where in FLAGS.items():
                assert getattr(verdict, flag) == any((r, step) in where for r in range(3)), flag


class Event:
    """In the place of a GPU's."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


@pytest.mark.parametrize("late", [False, True])
def test_a_late_reader_settles_the_same_steps(late):
    """As for a GPU, whose verdicts are read one step later, but for a stop, a save, the end."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    guard = StepGuard(CPU, max_skips=1)
    guard.late = late
    guard.copied = [Event(), Event()]

    def settled(loss: float | None = None, wait: bool = False, **flags: bool) -> list[int]:
        if loss is not None:
            guard.check_step(torch.tensor(loss), torch.tensor(1.0), StepRequests(**flags))
        return [verdict.step for verdict in guard.read_results(wait)]

    try:
        assert settled(1.0) == ([] if late else [0])
        assert settled(NAN) == ([0] if late else [1])
        assert settled(wait=True) == ([1] if late else [])
        assert guard.done == 2 and guard.skipped == 1 and not guard.end_reason
        assert settled(1.0, stop=True) == ([] if late else [2])
        assert settled(1.0) == ([2, 3] if late else [3])
        assert guard.stop and guard.done == 4  # what is applied by then is what is saved
        assert settled(NAN) + settled(NAN) == [4, 5]
        assert guard.end_reason == "nan" and guard.done == 5 and guard.consecutive == 2
    finally:
        torch.distributed.destroy_process_group()
