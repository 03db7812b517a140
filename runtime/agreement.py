"""What all ranks decide together: work that one does for all, and whether a step is applied.

One rank lists the images or opens the log for all; if that fails, every rank raises the same
AgreedError and none is left waiting in a collective. Copy this one file: it needs torch alone.
"""

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class AgreedError(Exception):
    """An error that every rank raises at the same place, with the same text and exit status.

    `status` is 2 where the command or its input is wrong, 1 where the run has failed. `error` is
    what one rank raised, on all of them and with its type, or None.
    """

    def __init__(self, text: str, status: int = 1, error: Exception | None = None) -> None:
        super().__init__(text)
        self.status, self.error = status, error


def run_on_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give every rank its result; AgreedError on all if it raises.

    The status is 2 for a ValueError, 1 for other errors. The traceback of a bug, neither a
    ValueError nor an OSError, is printed on rank 0. Collective.
    """
    found = [_attempt(work) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    result, error = cast("tuple[T, Exception | None]", found[0])
    if error is not None:
        raise _agreed(error)
    return result


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank, each with its own result; AgreedError on all if one raises.

    It carries the error of the lowest rank that has one, as of `run_on_rank0`. Collective.
    """
    result, error = _attempt(work)
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, found in enumerate(errors):
        if found is not None:
            raise _agreed(found, f" (rank {rank})" if len(errors) > 1 else "")
    return cast(T, result)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run `work`; return its result, or None and its error, as one that can be sent."""
    try:
        return work(), None
    except (OSError, ValueError) as error:
        return None, error
    except Exception as error:  # a bug
        traceback.print_exc()
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def _agreed(error: Exception, where: str = "") -> AgreedError:
    return AgreedError(f"{error}{where}", 2 if isinstance(error, ValueError) else 1, error)


def gather_to_rank0(value: T) -> list[T] | None:
    """Gather a value of every rank, in rank order, on rank 0; None on the others. Collective."""
    values: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def mean_over_ranks(values: Tensor) -> list[float]:
    """Average a tensor (n,) over all ranks and read it on the host. Collective."""
    mean = values.detach().double() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.tolist()


class StepVerdict(NamedTuple):
    """What the ranks found in one step; the same on all of them, except `own_loss`."""

    own_loss: bool  # this rank's loss was not finite
    loss: bool  # some rank's loss was not finite
    norm: bool  # the gradient norm was not finite, and the gradient scaler does not explain it
    consecutive: int  # bad steps up to this one without a good one between; 0 after a good one
    stop: bool  # a signal asked some rank to stop
    save: bool  # some rank's clock says that a checkpoint is due
    no_batch: bool  # some rank's data loader has failed: the step was not applied


class StepGuard:
    """Vote in each step whether it is applied, and remember how the run stands.

    A bad step (loss or norm not finite) is not applied. After more than `max_skips` consecutive
    ones none is applied any more, so that the host, which reads late, is never too late. A step
    without some rank's batch is not applied either, and does not count as bad.
    """

    def __init__(self, device: torch.device, max_skips: int = 0) -> None:
        gpu = device.type == "cuda"
        self.max_skips = max_skips
        self.consecutive_bad = torch.zeros((), dtype=torch.int64, device=device)
        # the host's copies of two verdicts, written in turn
        self.host = torch.zeros(2, len(StepVerdict._fields), dtype=torch.int64, pin_memory=gpu)
        self.copied = [torch.cuda.Event(), torch.cuda.Event()] if gpu else None
        self.voted = self.done = 0  # steps voted on, steps whose verdict was read
        # what the next vote says of this rank, besides its loss and norm
        self.stop_requested: Callable[[], bool] = lambda: False
        self.save_due: Callable[[], bool] = lambda: False
        self.loader_error: Exception | None = None
        # what all ranks know, from the verdicts read so far
        self.stop = self.save = False
        self.skipped = self.consecutive = 0
        self.ended = ""  # why no further step can be applied: "data", "nan"
        self.problem: str | None = None  # the last bad step, in a sentence
        self.image_ids: deque[list[int]] = deque(maxlen=2)  # of the last two steps

    def begin(self, step: int, consecutive: int) -> None:
        """Continue before `step`, after so many `consecutive` bad steps of an earlier run."""
        self.voted = self.done = step
        self.consecutive = consecutive
        self.consecutive_bad.fill_(consecutive)

    @contextmanager
    def catch_loader_error(self) -> Iterator[None]:
        """Keep an error of this rank's data loader for the next vote.

        The other ranks must not lose what was trained: all learn of it, save and end together. The
        batch before stands in until then, in steps that are not applied.
        """
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # of the GPU, not the loader
            raise
        except Exception as error:
            self.loader_error = self.loader_error or error  # the first is the cause

    def vote(self, loss: Tensor, norm: Tensor, scaled: bool = False) -> Tensor:
        """Agree after backward on a step: () fp32, 1 where it must not be applied. Collective.

        `loss` and `norm` () are of this rank. With a gradient scaler (`scaled`) an infinite norm is
        how the scale is found: that step is skipped too, but does not count as bad.
        """
        own_loss = ~loss.isfinite()
        infinite = ~norm.isfinite().to(own_loss.device)
        of_this_rank = self.stop_requested(), self.save_due(), self.loader_error is not None
        flags = [torch.full_like(own_loss, flag) for flag in of_this_rank]
        found = torch.stack([own_loss, infinite & (not scaled), *flags]).long()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        bad = found[:2].any() | (self.consecutive_bad > self.max_skips)
        no_batch = found[4] > 0
        counted = torch.where(bad, self.consecutive_bad + 1, 0)
        self.consecutive_bad = torch.where(no_batch, self.consecutive_bad, counted)
        # in the order of StepVerdict
        verdict = torch.cat(
            [own_loss.long()[None], found[:2], self.consecutive_bad[None], found[2:]]
        )
        slot = self.voted % 2
        self.host[slot].copy_(verdict, non_blocking=True)
        if self.copied:
            self.copied[slot].record()
        self.voted += 1
        return (bad | infinite | no_batch).float()

    def read_only_step(self, micro_batches: Any, *, lr: float) -> tuple[Tensor, Tensor]:
        """Vote alone, in the place of a training step, for a run that only reads images."""
        zero = torch.zeros_like(self.consecutive_bad, dtype=torch.float32)
        self.vote(zero, zero)
        return zero, zero

    def read(self, step: int) -> StepVerdict:
        """Read the verdict of one of the last two steps; of the earlier one without waiting."""
        if self.copied:
            self.copied[step % 2].synchronize()
        own_loss, loss, norm, consecutive, *flags = self.host[step % 2].tolist()
        return StepVerdict(bool(own_loss), bool(loss), bool(norm), consecutive, *map(bool, flags))

    def settle(
        self,
        image_ids: list[int],
        wait: bool,
        report_skip: Callable[[int, StepVerdict, list[int]], str],
    ) -> bool:
        """Read the verdicts up to the step before the last vote, or, with `wait`, up to that vote.

        `image_ids` are this rank's images of the last step; `report_skip(step, verdict, image_ids)`
        is called for each bad step, on all ranks, and says what was wrong. Returns whether the
        run can continue.
        """
        self.image_ids.append(image_ids)
        while not self.ended and self.done < self.voted - (not (wait or self.stop or self.save)):
            step = self.done
            verdict = self.read(step)
            self.stop, self.save = self.stop or verdict.stop, self.save or verdict.save
            if verdict.no_batch:
                self.ended = "data"
                break
            self.consecutive = verdict.consecutive
            if verdict.consecutive:
                self.skipped += 1
                ids = self.image_ids[step - self.voted]  # -1 is the last step, -2 the one before
                at_fault = verdict.own_loss or not verdict.loss
                self.problem = report_skip(step, verdict, ids if at_fault else [])
            if verdict.consecutive > self.max_skips:
                self.ended = "nan"
                break
            self.done += 1
        return not self.ended
