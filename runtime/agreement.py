"""What all ranks decide together: work that one rank does for all, whether a step is applied.

If one rank fails, every rank raises the same AgreedError. Copy this one file: it needs only torch.
"""

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class AgreedError(Exception):
    """An error that every rank raises at the same place; `error` is what one rank raised.

    The exit status is 2 for a ValueError, which the user can mend, otherwise 1.
    """

    def __init__(self, text: str, error: Exception | None = None) -> None:
        super().__init__(text)
        self.error = error
        self.status = 2 if isinstance(error, ValueError) else 1


def run_on_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give every rank its result; AgreedError on all if it raises.

    A bug's traceback is printed on rank 0. Collective.
    """
    found: list[Any] = [_attempt(work) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    result, error = found[0]
    if error:
        raise AgreedError(str(error), error)
    return result


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's result. Collective.

    If any rank raises, all raise an AgreedError with the error of the lowest such rank.
    """
    result, error = _attempt(work)
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, found in enumerate(errors):
        if found:
            raise AgreedError(f"{found} (rank {rank})" if rank else str(found), found)
    return cast(T, result)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except (OSError, ValueError) as error:
        return None, error
    except Exception as error:  # a bug, perhaps of a type that cannot be sent
        traceback.print_exc()
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def gather_to_rank0(value: T) -> list[T] | None:
    """Gather a value of every rank, in rank order, on rank 0; None on the others. Collective."""
    values: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


# --- Each step


class StepResult(NamedTuple):
    """What the ranks found in one step; the same on all but for `local_loss_nonfinite`."""

    step: int  # from 0
    loss: float  # mean over all ranks
    norm: float  # gradient norm
    consecutive: int  # length of the current streak of bad steps; 0 after a good one
    local_loss_nonfinite: bool  # this rank's loss was not finite
    bad_loss: bool  # some rank's loss was not finite
    stop: bool  # a signal asked some rank to stop
    save: bool  # some rank's clock says that a checkpoint is due
    no_batch: bool  # some rank's data loader has failed: the step was not applied
    bad_images: bool  # some rank has unreadable images to report


class StepRequests(NamedTuple):
    """What one rank asks of all others in a step; the fields are those of `StepResult`.

    Monitor.requests fills it in, StepGuard.check_step tells all ranks, and StepGuard.read_results
    sets `stop` and `save` of the guard, on which train_fsdp.train acts, on all ranks alike.
    """

    stop: bool = False
    save: bool = False
    no_batch: bool = False
    bad_images: bool = False


NO_REQUESTS = StepRequests()

# A gradient scaler begins at 2**16 and halves its scale after a step with a gradient that is
# not finite. After so many in a row the scale is 2**-24, so the overflow must have another cause.
SCALE_EXHAUSTED = 40


class StepGuard:
    """Decide for each step, the same on all ranks, whether it is applied; count the steps.

    One small all-reduce per step gives all ranks the same answer. If on any rank

    - the loss is not finite, or the gradient norm is not finite, the step is bad: it is not
      applied, but counts as done. More than `max_skips` (--max-skips, by default 0) bad steps in a
      row end the run ("nan");
    - only the norm is not finite, and a gradient scaler is used (fp16): the step is not applied
      either, but not bad, unless it is one of more than SCALE_EXHAUSTED in a row;
    - there is no batch: the step is not applied, not done and not bad ("loader_error").

    The host reads a GPU's result one step late, when it has long arrived. So the GPU itself skips
    what follows the bad step that ends the run. The trainer's Monitor logs each bad step; once
    `end_reason` is "nan", it saves the weights from before the last streak of bad steps.
    """

    def __init__(self, device: torch.device, max_skips: int = 0, begin: int = 0) -> None:
        """Begin before step `begin`."""
        self.late = device.type == "cuda"
        self.max_skips = max_skips
        self.bad_so_far = torch.zeros((), dtype=torch.float64, device=device)
        self.nonfinite_norms_so_far = torch.zeros((), dtype=torch.float64, device=device)
        # the host's copies of two results, written in turn; all fields but the step
        fields = len(StepResult._fields) - 1
        self.host = torch.zeros(2, fields, dtype=torch.float64, pin_memory=self.late)
        self.copied: list[torch.cuda.Event] = []
        if self.late:  # blocking: the host sleeps while it waits, and loaders have its core
            self.copied = [torch.cuda.Event(blocking=True), torch.cuda.Event(blocking=True)]
        # results that a GPU had ready when the host asked: the GPU was waiting for the host
        self.arrived_before_host = 0
        self.checked = begin  # steps checked
        self.done = begin  # steps whose result was read
        # what all ranks know, from the results read so far
        self.stop = False
        self.save = False
        self.skipped = 0
        self.consecutive = 0
        self.end_reason = ""  # why no further step can be applied: "loader_error", "nan"

    def check_step(
        self,
        loss: Tensor,
        norm: Tensor,
        requests: StepRequests = NO_REQUESTS,
        *,
        scaled: bool = False,
    ) -> Tensor:
        """Agree on a step after its backward pass; return () fp32, 1 to skip it. Collective.

        `loss` and `norm` () and the `requests` are those of this rank. `scaled`: a gradient scaler
        is used.
        """
        device = self.bad_so_far.device
        loss = loss.detach().to(device).double()
        norm = norm.detach().to(device).double()
        local_nonfinite = ~loss.isfinite()
        nonfinite_norm = ~norm.isfinite()
        self.nonfinite_norms_so_far = torch.where(
            nonfinite_norm, self.nonfinite_norms_so_far + 1, 0
        )
        bad_norm = nonfinite_norm
        if scaled:
            bad_norm = self.nonfinite_norms_so_far > SCALE_EXHAUSTED
        asked = [torch.full_like(nonfinite_norm, flag) for flag in requests]
        mean = loss / dist.get_world_size()
        sums = torch.stack([mean, bad_norm, nonfinite_norm, local_nonfinite, *asked])  # in float64
        dist.all_reduce(sums)
        mean = sums[0]
        any_bad_norm, any_nonfinite_norm, any_bad_loss, *any_asked = sums[1:] > 0
        _, _, any_no_batch, _ = any_asked  # in the order of StepRequests
        bad = any_bad_norm | any_bad_loss | (self.bad_so_far > self.max_skips)
        counted = torch.where(bad, self.bad_so_far + 1, 0)
        self.bad_so_far = torch.where(any_no_batch, self.bad_so_far, counted)
        # all fields of StepResult but the step
        result = [mean, norm, self.bad_so_far, local_nonfinite, any_bad_loss, *any_asked]
        slot = self.checked % 2
        self.host[slot].copy_(torch.stack(result), non_blocking=True)
        if self.late:
            self.copied[slot].record()
        self.checked += 1
        return (bad | any_nonfinite_norm | any_no_batch).float()

    def read_results(self, wait: bool = False) -> list[StepResult]:
        """Read the new results, in order; that of a GPU's last step only with `wait`.

        A result that ends the run (`end_reason`) is the last one.
        """
        results: list[StepResult] = []
        while not self.end_reason:
            ready = self.checked
            # Once a stop or a save is asked for, read all: it concerns every step made so far.
            if self.late and not (wait or self.stop or self.save):
                ready -= 1
            if self.done >= ready:
                break
            result = self._read(self.done)
            results.append(result)
            self.stop = self.stop or result.stop
            self.save = self.save or result.save
            if result.no_batch:
                self.end_reason = "loader_error"
                continue
            self.consecutive = result.consecutive
            if self.consecutive > 0:
                self.skipped += 1
            if self.consecutive > self.max_skips:
                self.end_reason = "nan"
            else:
                self.done += 1
        return results

    def _read(self, step: int) -> StepResult:
        """Return the result of a step from the host's copy, as soon as that has arrived."""
        slot = step % 2
        if self.late:
            if self.copied[slot].query():
                self.arrived_before_host += 1
            self.copied[slot].synchronize()
        loss, norm, consecutive, *flags = self.host[slot].tolist()
        return StepResult(step, loss, norm, int(consecutive), *map(bool, flags))
