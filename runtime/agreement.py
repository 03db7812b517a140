"""Work that all ranks do together, so that an error on one of them ends all of them alike.

One rank lists the images or opens the log for all; if that fails, every rank raises the same
AgreedError and none is left waiting in a collective. Copy this one file: it needs torch alone.
"""

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class AgreedError(Exception):
    """An error that every rank raises at the same place, with the same text and exit status."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status  # 2: the command or its input is wrong; 1: the run has failed


def run_on_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give every rank its result; AgreedError on all if it raises.

    The status is 2 for a ValueError, 1 for other errors. The traceback of a bug, neither a
    ValueError nor an OSError, is printed on rank 0. Collective.
    """
    result: list = [None, None]
    if dist.get_rank() == 0:
        result = list(_attempt(work))
    dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise AgreedError(*result[1])
    return result[0]


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank, each with its own result; AgreedError on all if one raises.

    It carries the error of the lowest rank that has one, as of `run_on_rank0`. Collective.
    """
    result, error = _attempt(work)
    errors: list[tuple[str, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, found in enumerate(errors):
        if found is not None:
            text, status = found
            raise AgreedError(f"{text} (rank {rank})" if len(errors) > 1 else text, status)
    return result  # type: ignore[return-value]


def _attempt(work: Callable[[], T]) -> tuple[T | None, tuple[str, int] | None]:
    """Run `work`; return its result, or None and (text, exit status) of its error."""
    try:
        return work(), None
    except (OSError, ValueError) as error:
        return None, (str(error), 2 if isinstance(error, ValueError) else 1)
    except Exception as error:  # a bug
        traceback.print_exc()
        return None, (f"{type(error).__name__}: {error}", 1)


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
