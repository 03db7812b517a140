"""What all ranks decide together: work that one does for all, and whether a step is applied.

Where one fails, every rank raises the same AgreedError. Copy this one file: it needs torch alone.
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

    The exit status is 2 for a ValueError, which is the user's to mend, else 1.
    """

    def __init__(self, text: str, error: Exception | None = None) -> None:
        super().__init__(text)
        self.error, self.status = error, 2 if isinstance(error, ValueError) else 1


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
    """Run `work` on every rank; AgreedError on all if one raises, of the lowest. Collective."""
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


class Verdict(NamedTuple):
    """What the ranks found in one step; the same on all of them, except `own_loss`."""

    step: int  # from 0
    loss: float  # mean over all ranks
    norm: float  # of the gradient
    consecutive: int  # bad steps up to this one without a good one between; 0 after a good one
    own_loss: bool  # this rank's loss was not finite
    bad_loss: bool  # some rank's loss was not finite
    stop: bool  # a signal asked some rank to stop
    save: bool  # some rank's clock says that a checkpoint is due
    no_batch: bool  # some rank's data loader has failed: the step was not applied
    bad_images: bool  # some rank has unreadable images to report


class StepGuard:
    """Vote in each step whether it is applied, and remember how the run stands.

    One small all-reduce per step gives all ranks the same answer. A bad step (loss or norm not
    finite) is not applied, nor is any after more than `max_skips` consecutive ones: the host reads
    the verdict of a GPU one step late, when it has long arrived. A step without some rank's batch
    is not applied either, and does not count as bad.
    """

    def __init__(self, device: torch.device, max_skips: int = 0, begin: int = 0) -> None:
        """Begin before step `begin`."""
        self.late, self.max_skips = device.type == "cuda", max_skips
        self.bad_so_far = torch.zeros((), dtype=torch.float64, device=device)
        # the host's copies of two verdicts, written in turn
        self.host = torch.zeros(2, 9, dtype=torch.float64, pin_memory=self.late)
        self.copied: list[torch.cuda.Event] = []
        if self.late:  # blocking: the host sleeps while it waits, and loaders have its core
            self.copied = [torch.cuda.Event(blocking=True), torch.cuda.Event(blocking=True)]
        # verdicts of a GPU that were there when the host asked: the GPU was waiting for the host
        self.arrived_before_host = 0
        self.voted = self.done = begin  # steps voted on, steps whose verdict was read
        # what all ranks know, from the verdicts read so far
        self.stop = self.save = False
        self.skipped = self.consecutive = 0
        self.ended = ""  # why no further step can be applied: "data", "nan"

    def vote(self, loss: Tensor, norm: Tensor, *, scaled: bool = False, **requests: bool) -> Tensor:
        """Agree after backward on a step: () fp32, 1 where it must not be applied. Collective.

        `loss` and `norm` () are of this rank. A gradient scaler (`scaled`) finds its scale by
        infinite norms: such a step is skipped, but is not bad. `requests` are what else this rank
        has to say: stop, save, no_batch, bad_images, as of `Verdict`.
        """
        device = self.bad_so_far.device
        loss, norm = loss.detach().to(device).double(), norm.detach().to(device).double()
        own_loss, infinite = ~loss.isfinite(), ~norm.isfinite()
        names = ("stop", "save", "no_batch", "bad_images")
        asked = [torch.full_like(own_loss, requests.get(name, False)) for name in names]
        bad_norm = infinite & (not scaled)
        sums = torch.stack([loss / dist.get_world_size(), bad_norm, own_loss, *asked])  # float64
        dist.all_reduce(sums)
        any_rank = sums[1:] > 0
        bad_norm, bad_loss, _, _, no_batch, _ = any_rank
        # an infinite norm that is not bad is fp16's scaler looking for its scale
        bad = bad_norm | bad_loss | (self.bad_so_far > self.max_skips)
        counted = torch.where(bad, self.bad_so_far + 1, 0)
        self.bad_so_far = torch.where(no_batch, self.bad_so_far, counted)
        slot = self.voted % 2
        # the fields of Verdict after its step, in order
        found = torch.stack([sums[0], norm, self.bad_so_far, own_loss, *any_rank[1:]])
        self.host[slot].copy_(found, non_blocking=True)
        if self.late:
            self.copied[slot].record()
        self.voted += 1
        return (bad | infinite | no_batch).float()

    def settle(self, wait: bool = False) -> list[Verdict]:
        """Read the verdicts that are new, in order; of a GPU's last step only with `wait`.

        No verdict follows one that ends the run (`ended`).
        """
        verdicts: list[Verdict] = []
        while not self.ended:
            # all of them, once a stop or a save is asked for: it concerns every step made so far
            late = self.late and not (wait or self.stop or self.save)
            if self.done >= self.voted - late:
                break
            slot = self.done % 2
            if self.late:
                if self.copied[slot].query():
                    self.arrived_before_host += 1
                self.copied[slot].synchronize()
            loss, norm, consecutive, *flags = self.host[slot].tolist()
            verdict = Verdict(self.done, loss, norm, int(consecutive), *map(bool, flags))
            self.stop, self.save = self.stop or verdict.stop, self.save or verdict.save
            if verdict.no_batch:
                self.ended = "data"
            else:
                self.consecutive = verdict.consecutive
                self.skipped += self.consecutive > 0
                self.ended = "nan" if self.consecutive > self.max_skips else ""
            self.done += not self.ended
            verdicts.append(verdict)
        return verdicts
