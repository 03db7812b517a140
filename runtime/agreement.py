"""What all ranks decide together, so that none is left waiting for one that went another way.

An error on rank 0, a loss that is not finite, a request to stop: one rank knows of it first, and
all must take the same branch. And where one rank stands still for good, the others say which it is
and end. Copy this one file: it needs torch alone.
"""

import faulthandler
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread, Timer
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------
# Once for all


def run_on_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give every rank its result, or raise its error on every rank.

    For what one rank must do for all (list a million files, open the log): no rank is left waiting
    for one that has failed. Any error travels as a ValueError with its text; the traceback of a bug
    is printed where it is.
    """
    result: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = work()
        except Exception as error:
            result[1] = _message(error)
    dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise ValueError(result[1])
    return result[0]  # type: ignore[return-value]


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank and give each its own result, or raise on all what failed on any.

    For what each rank must do for itself (its node's disk): a ValueError with the first error's
    text, as of `run_on_rank0`. Collective.
    """
    result, problem = None, None
    try:
        result = work()
    except Exception as error:
        problem = _message(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text is not None:
            raise ValueError(f"{text} (rank {rank})" if len(problems) > 1 else text)
    return result  # type: ignore[return-value]


def _message(error: Exception) -> str:
    """What the other ranks hear of an error. A bug, not written for the user, is printed here."""
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def gather_to_rank0(value: T) -> list[T] | None:
    """On rank 0 every rank's value, by rank; None elsewhere. Collective."""
    values: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def mean_over_ranks(value: Tensor) -> float:
    """The mean of a () tensor over all ranks, read by the host. Collective."""
    value = value.detach().double() / dist.get_world_size()
    dist.all_reduce(value)
    return value.item()


# ---------------------------------------------------------------------------------------------
# Every step


class StepFlags(NamedTuple):
    """What a rank adds to the vote of a step; what one rank raises, all ranks read."""

    stop: bool = False  # a signal asked this rank to stop
    bad_images: bool = False  # it has some to report
    save: bool = False  # by its clock a checkpoint is due
    no_batch: bool = False  # its data loader has failed: the step must not be applied


NO_FLAGS = StepFlags()


class StepVerdict(NamedTuple):
    """What the ranks found in one step; the same on all of them, but for `mine`."""

    mine: bool  # this rank's loss was not finite
    loss: bool  # some rank's loss was not finite
    norm: bool  # the gradient norm was not finite, and it was not the gradient scaler's doing
    in_a_row: int  # bad steps up to this one, in a row; 0 after a good one
    flags: StepFlags  # of all ranks together


class StepGuard:
    """Non-finite losses and norms, and the flags of each rank: all learn of one, none waits.

    A bad step is not applied. The device itself decides that, after one small all-reduce in each
    step; the host reads what was decided a step later, when it has long arrived. After more than
    `max_skips` bad steps in a row none is applied any more, so that the host is never too late.
    A step that lacks some rank's batch is not applied either, and does not count as bad.
    """

    def __init__(self, device: torch.device, max_skips: int = 0) -> None:
        gpu = device.type == "cuda"
        self.max_skips = max_skips
        self.consecutive_bad_steps = torch.zeros((), dtype=torch.int64, device=device)
        size = 4 + len(StepFlags._fields)
        self.host = torch.zeros(2, size, dtype=torch.int64, pin_memory=gpu)  # two steps in turn
        self.copied = [torch.cuda.Event(), torch.cuda.Event()] if gpu else None

    def update(
        self,
        step: int,
        loss: Tensor,
        norm: Tensor,
        scaled: bool = False,
        flags: StepFlags = NO_FLAGS,
    ) -> Tensor:
        """After backward: (), fp32, 1 where this step must not be applied. Collective.

        With a gradient scaler (`scaled`) an infinite norm is how it finds its scale: that step is
        left out too, but does not count as bad.
        """
        mine = ~loss.isfinite()
        infinite = ~norm.isfinite().to(mine.device)
        raised = [torch.full_like(mine, flag) for flag in flags]
        found = torch.stack([mine, infinite & (not scaled), *raised]).long()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        bad = found[:2].any() | (self.consecutive_bad_steps > self.max_skips)
        no_batch = found[2 + StepFlags._fields.index("no_batch")] > 0
        self.consecutive_bad_steps = torch.where(
            no_batch,
            self.consecutive_bad_steps,
            torch.where(bad, self.consecutive_bad_steps + 1, 0),
        )
        # as in StepVerdict
        verdict = torch.cat(
            [mine.long()[None], found[:2], self.consecutive_bad_steps[None], found[2:]]
        )
        self.host[step % 2].copy_(verdict, non_blocking=True)
        if self.copied:
            self.copied[step % 2].record()
        return (bad | infinite | no_batch).float()

    def read(self, step: int) -> StepVerdict:
        """What was found in `step`, the last `update` or the one before.

        Of the one before it is known without waiting for the device.
        """
        if self.copied:
            self.copied[step % 2].synchronize()
        mine, loss, norm, in_a_row, *flags = self.host[step % 2].tolist()
        raised = StepFlags(*map(bool, flags))
        return StepVerdict(bool(mine), bool(loss), bool(norm), in_a_row, raised)


# ---------------------------------------------------------------------------------------------
# When another rank is lost, or nothing moves

# Modules that do nothing but call collectives.
COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")


def is_peer_failure(error: RuntimeError) -> bool | None:
    """Tell whether a collective failed because of another rank; None where it may be a bug here.

    NCCL and the store raise types of their own. Gloo raises a bare RuntimeError, which is known by
    the place: a collective, or, perhaps, the code of FSDP and DDP that calls one, and backward.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    if isinstance(error, dist.DistError):
        return True
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = next((name for name in reversed(modules) if name != "torch._ops"), "")
    if type(error) is not RuntimeError:  # OutOfMemoryError, AcceleratorError
        return False
    if place in COLLECTIVES:
        return True
    maybe = place.startswith(("torch.distributed.", "torch.nn.parallel.", "torch.autograd."))
    return None if maybe else False


@dataclass(frozen=True)
class Place:
    """Where a rank's main thread is, and since when."""

    order: int = 0  # how many times it has moved: the rank with the smallest is behind
    doing: str = "starting"
    step: int | None = None
    since: float = field(default_factory=time.monotonic)


@contextmanager
def exit_if_longer_than(seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Ends this process, status 1, after `give_up()`, where what is inside takes longer.

    For what comes before the watch: a store that takes a call and is then stopped, or is no store
    at all, is waited for by torch without end.
    """

    def leave() -> None:
        give_up()
        os._exit(1)

    timer = Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Watchdog:
    """Ends a run whose ranks wait for one that does not move, and names that rank.

    The main thread says at each turn what it does next (`moved`); a thread of its own tells it to
    the others, by the ranks' store. Who has not moved for `seconds` calls for a judgement: rank 0
    compares the places of all ranks, names those that are silent or behind, and all leave. What a
    rank does for the first time (connecting, compiling), and each save, may take `patience` times
    as long, and anything three times what it has taken before. Time for which the process itself
    was stopped does not count.

    In `folder` every rank leaves its last collectives, where torch recorded them (its flight
    recorder, by TORCH_FR_BUFFER_SIZE); a rank that is behind prints where its code stands.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        environ: Mapping[str, str],
        *,
        seconds: float,
        patience: float,
        folder: str,
        give_up: Callable[[str], None],
    ) -> None:
        """`environ` says where the store is (MASTER_ADDR, MASTER_PORT).

        `give_up` gets the sentence, on rank 0, or on the others where rank 0 is silent.
        """
        self.rank, self.world_size = rank, world_size
        self.seconds, self.patience = seconds, patience
        self.folder, self.give_up = Path(folder), give_up
        self.interval = min(10.0, seconds / 20)
        self.place, self.longest = Place(), dict[str, float]()
        self.last_check = self.grace_start = time.monotonic()
        self.ended, self.leaving = Event(), Lock()
        self.threads: list[Thread] = []
        if world_size > 1:  # else nobody waits: one may stand in a debugger for hours
            # a line of its own to the store, because a call that waits blocks the process group's
            address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
            self.store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
            # two threads, because a store whose rank is stopped gives no answer, not even an error
            self.threads = [Thread(target=work, daemon=True) for work in (self._talk, self._guard)]
        for thread in self.threads:
            thread.start()

    def moved(self, doing: str, step: int | None = None) -> None:
        """The main thread begins something else; all ranks do so in the same order."""
        old, self.place = self.place, Place(self.place.order + 1, doing, step)
        taken = self.place.since - old.since
        self.longest[old.doing] = max(taken, self.longest.get(old.doing, 0.0))

    def stop(self) -> None:
        """No watch any more: to be called before the ranks part."""
        self.ended.set()
        for thread in self.threads:
            thread.join(2 * self.interval)

    def where(self) -> str:
        """What this rank does now, for a message."""
        return _where(self._mine(0))

    def abandon(self, text: str, seconds: float) -> NoReturn:
        """Give up for another reason, unless the watch does so; ranks but 0 after some seconds."""
        if self.rank != 0:
            time.sleep(seconds)
        self.leaving.acquire()
        self.give_up(text)
        os._exit(1)  # without waiting for the threads, which may wait for the lost one

    def _late(self) -> float:
        """Seconds past the limit of what this rank does; negative before that."""
        now, place = time.monotonic(), self.place
        if now - self.last_check > 3 * self.interval + 1:
            self.grace_start = now  # this process was stopped for a while
        self.last_check = now
        longest = self.longest.get(place.doing)
        limit = self.seconds * self.patience
        if longest is not None:
            # a save may be slow though the one before was not: --async-save waits at the last alone
            limit = max(limit if place.doing == "saving" else self.seconds, 3 * longest)
        return now - max(place.since, self.grace_start) - limit

    def _guard(self) -> None:
        while not self.ended.wait(self.interval):
            if self.rank != 0 and self._late() > 10 * self.interval:
                text = f"rank 0 does not answer rank {self.rank} ({self.where()})"
                self._leave([], text)

    def _mine(self, beat: int) -> list:
        place, host = self.place, platform.node()
        return [beat, place.order, place.doing, place.step, host, time.monotonic() - place.since]

    def _talk(self) -> None:
        beat = 0
        with suppress(RuntimeError):  # the store went with rank 0
            while not self.ended.wait(self.interval):
                beat += 1
                self.store.set(f"watchdog/{self.rank}", json.dumps(self._mine(beat)))
                late = self._late() > 0
                if late and self.rank != 0:
                    self.store.set("watchdog/late", str(self.rank))
                if self.rank == 0 and (late or self.store.check(["watchdog/late"])):
                    self._judge(beat)
                elif self.rank != 0 and self.store.check(["watchdog/verdict"]):
                    self._leave(json.loads(self.store.get("watchdog/verdict")), None)

    def _places(self) -> list[list]:
        keys = [f"watchdog/{rank}" for rank in range(self.world_size)]
        there = keys if self.store.check(keys) else [k for k in keys if self.store.check([k])]
        found = dict(zip(there, self.store.multi_get(there), strict=True))
        never = [0, -1, "starting", None, "a host not known", 0.0]
        return [json.loads(found[k]) if k in found else never for k in keys]

    def _judge(self, beat: int) -> None:
        """Rank 0: who is behind? Told to all, unless the run moves on meanwhile."""
        before = self._places()
        self.ended.wait(4 * self.interval)
        self.store.set("watchdog/0", json.dumps(self._mine(beat + 1)))
        after = self._places()
        silent = [r for r in range(self.world_size) if before[r][0] == after[r][0]]
        alive = [r for r in range(self.world_size) if r not in silent]
        if self.ended.is_set() or any(after[r][1] != before[r][1] for r in alive):
            self.store.delete_key("watchdog/late")
            return
        slowest = min(after[r][1] for r in alive)
        behind = silent or [r for r in alive if after[r][1] == slowest]
        seconds = max(after[r][5] for r in (alive if silent else behind))
        text = f"nothing has moved for {seconds:.0f} s: "
        if len(behind) == self.world_size:
            text += f"all ranks wait for each other ({_where(after[0])})"
        else:
            named = "; ".join(f"rank {r} ({_where(after[r])})" for r in behind[:8])
            more = f" and {len(behind) - 8} more" if len(behind) > 8 else ""
            other = next(r for r in alive if r not in behind)
            text += f"{named}{more} {'gave no more sign of life' if silent else 'stands still'}, "
            text += f"rank {other} ({_where(after[other])}) waits"
        self.store.set("watchdog/verdict", json.dumps(behind))
        self._leave(behind, text)

    def _leave(self, behind: list[int], text: str | None) -> None:
        self.leaving.acquire()  # for good: one thread leaves
        trace = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
        with suppress(OSError):
            if trace is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                recorded = trace(includeCollectives=True, onlyActive=False)
                (self.folder / f"rank_{self.rank:05d}.json").write_bytes(recorded)
        if self.rank in behind:
            faulthandler.dump_traceback()
        if text is not None:
            self.give_up(text)
        if self.rank == 0:
            # the others read the verdict from the store that it keeps
            time.sleep(max(2.0, 3 * self.interval))
        os._exit(1)  # the main thread is in a call that does not return


def _where(place: list) -> str:
    _, _, doing, step, host, _ = place
    return f"{doing}{'' if step is None else f' in step {step + 1}'}, on {host}"
