"""Which collectives a process takes part in, and how large they are: of a real step or a fake one.

Every call that PyTorch makes of a process group passes through a dispatch mode, which sees its
arguments; nothing is changed and nothing waits. Copy this one file: it needs torch alone.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


class Unsupported(RuntimeError):
    """This version of PyTorch has not what is needed here."""


@dataclass(frozen=True)
class Collective:
    """One call: its kind, over which groups, the bytes of the tensor that is whole after it.

    Before it, for a reduce-scatter. `group` is "shard", "replicate" or "world".
    """

    kind: str
    group: str
    size: int


def counting(grid: DeviceMesh, found: list[Collective]) -> Any:
    """A context that adds every collective of this process to `found`.

    Unsupported where this version of PyTorch has no dispatch mode under the name of today.
    """
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError as error:
        raise Unsupported(f"torch {torch.__version__}: {error}") from None
    groups = {str(grid.get_group(name).group_name): name for name in ("shard", "replicate")}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, given: Any = (), named: Any = None
        ) -> Any:
            if DTensor in types:
                return NotImplemented  # comes back in pieces, as plain tensors
            result = func(*given, **(named or {}))
            kind = kind_of(func)
            if kind:
                sizes = [_bytes(argument) for argument in [*given, result]]
                group = groups.get(_group_name(given), "world")
                found.append(Collective(kind, group, max(sizes)))  # the whole tensor is the larger
            return result

    return Counting()


def counted_once(
    train: Callable[..., Any], grid: DeviceMesh, found: list[Collective], at: int
) -> Callable[..., Any]:
    """`train(batches, step=...)`, whose collectives go to `found` in step `at`, if they can."""

    def step_and_count(batches: Any, *, step: int, **rest: Any) -> Any:
        if step != at:
            return train(batches, step=step, **rest)
        try:
            context = counting(grid, found)
        except Unsupported:
            context = nullcontext()
        with context:
            return train(batches, step=step, **rest)

    return step_and_count


def payload(found: Sequence[Collective], shape: tuple[int, int]) -> dict[str, int] | None:
    """Bytes of whole tensors by kind, in groups of several ranks; None if nothing was counted.

    `shape` is that of the (replicate, shard) mesh.
    """
    sizes = {"replicate": shape[0], "shard": shape[1], "world": shape[0] * shape[1]}
    kinds = Counter[str]()
    for collective in found:
        if sizes[collective.group] > 1:
            kinds[collective.kind] += collective.size
    return dict(kinds) or None


def kind_of(func: Any) -> str | None:
    """all_gather, reduce_scatter, all_reduce or broadcast; None for other operations."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func.name().partition("::")[2].replace("_", "")
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        if name.startswith(kind.replace("_", "")):
            return kind
    return None


def _bytes(argument: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _group_name(given: Sequence[Any]) -> str:
    """Of the process group among a collective's arguments: an object, or its name as the last."""
    for argument in given:
        if isinstance(argument, torch.ScriptObject):
            return str(dist.ProcessGroup.unbox(argument).group_name)
    return [argument for argument in given if isinstance(argument, str)][-1]
