"""Count the collectives of a process and their bytes, in a real step or a simulated one.

Every collective that PyTorch calls passes through a dispatch mode, which sees its arguments;
nothing is changed and nothing waits. Copy this one file: it needs torch alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


class Unsupported(RuntimeError):
    """This version of PyTorch lacks what is needed here."""


@dataclass(frozen=True)
class CommEvent:
    """One collective: its kind, its group, the bytes of the whole tensor.

    Whole is the tensor after an all-gather and before a reduce-scatter. `group` is a dimension of
    the mesh ("shard", "replicate") or "world".
    """

    kind: str
    group: str
    size: int


def counting(grid: DeviceMesh, found: list[CommEvent]) -> Any:
    """Make a context that adds every collective of this process to `found`.

    Unsupported where this version of PyTorch has no TorchDispatchMode where it is expected.
    """
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError as error:
        raise Unsupported(f"torch {torch.__version__}: {error}") from None
    groups = {
        str(grid.get_group(name).group_name): name for name in reversed(grid.mesh_dim_names or ())
    }

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, given: Any = (), named: Any = None
        ) -> Any:
            if DTensor in types:
                return NotImplemented  # comes back as plain local tensors
            result = func(*given, **(named or {}))
            kind = kind_of(func)
            if kind:
                sizes = [_bytes(argument) for argument in [*given, result]]
                group = groups.get(_group_name(given), "world")
                found.append(CommEvent(kind, group, max(sizes)))  # the whole tensor is the larger
            return result

    return Counting()


def payload(found: Sequence[CommEvent], sizes: Mapping[str, int]) -> dict[str, int] | None:
    """Sum the bytes of whole tensors by kind, in groups of several ranks; None if there are none.

    `sizes` has the number of ranks of each group, by its name.
    """
    kinds = Counter[str]()
    for collective in found:
        if sizes[collective.group] > 1:
            kinds[collective.kind] += collective.size
    return dict(kinds) or None


def kind_of(func: Any) -> str | None:
    """Classify as all_gather, reduce_scatter, all_reduce, broadcast; None for other operators."""
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
    """Find the process group among a collective's arguments: an object, or its name as the last."""
    for argument in given:
        if isinstance(argument, torch.ScriptObject):
            return str(dist.ProcessGroup.unbox(argument).group_name)
    return [argument for argument in given if isinstance(argument, str)][-1]
