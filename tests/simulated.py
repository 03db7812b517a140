"""A step of the dry run, looked at from inside: what it sends and what it holds."""

from argparse import Namespace
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import simulate
import train_fsdp
from machines import MACHINES
from plan import Plan, PlannedRun, collectives

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
# The tracker's categories and, of each row, the parts of the plan
ROWS = {
    ("Sharded Param",): ("parameters",),
    ("Sharded Grad",): ("gradients",),
    ("OptState",): ("optimizer",),
    # where gradients that wait for their reduction are "Temp" for one, "unsharded" for the other
    (
        *("Unsharded Param", "All Gather", "Unsharded Grad", "Reduce Scatter"),
        *("Activation", "Temp", "Buffer", "Inputs"),
    ): ("unsharded", "reduction", "activations", "inputs"),
    (): ("workspace",),  # of a GPU's libraries
}
# heads unpadded, no libraries
AS_A_CPU = replace(MACHINES["frontier"], workspace_gib=0.0, head_multiple=1)


class Watch(TorchDispatchMode):
    """Lists in `sent` each collective with other ranks: (kind, ranks, bytes of its full tensor)."""

    def __init__(self, *namespaces: str) -> None:
        super().__init__()
        self.namespaces = namespaces if namespaces else ("c10d", "_c10d_functional")
        self.sent: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # comes back as plain local tensors
        kwargs = {} if kwargs is None else kwargs
        result = function(*args, **kwargs)
        if function.namespace in self.namespaces:
            self.note(function.name(), args, result)
        return result

    def note(self, name: str, args, result) -> None:
        """List a collective, by its operator's name, unless it is of one rank or only a wait."""
        _, _, operator = name.partition("::")
        plain = operator.replace("_", "")
        kind = next((kind for kind in KINDS if plain.startswith(kind.replace("_", ""))), None)
        if kind is None:
            assert plain == "waittensor", name
            return
        ranks = group_of(args).size()
        if ranks > 1:
            before_or_after = [tree_bytes(argument) for argument in [*args, result]]
            self.sent.append((kind, ranks, max(before_or_after)))

    def forward_backward(self, *given) -> None:
        """The trainer's, in a dry run."""
        with self:
            train_fsdp.forward_backward(*given)


def tree_bytes(tree) -> int:
    """Sum the bytes of the tensors in an argument or a result."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def group_of(args) -> dist.ProcessGroup:
    """Find the group among the arguments of a collective: as an object, or by its name."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    names = [argument for argument in args if isinstance(argument, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1])


def flags_of(command: str, world_size: int) -> Namespace:
    """The complete flags of a run on GPUs, eight on a node."""
    args = train_fsdp.parse_flags(command.split())
    train_fsdp.complete(args, world_size, 8, "cuda")
    return args


def plan_of(args: Namespace, machine=MACHINES["frontier"]) -> Plan:
    return Plan(PlannedRun.from_flags(train_fsdp.model_config(args), vars(args)), machine)


def planned_traffic(run: PlannedRun) -> Counter:
    """How many collectives of each kind, group and size."""
    planned: Counter = Counter()
    for c in collectives(run):
        planned[c.kind, c.ranks, c.payload] += c.count
    return planned


def hold_against_plan(args: Namespace) -> None:
    """The collectives are exactly those planned, each row of memory is so within 3 %."""
    plan = plan_of(args, AS_A_CPU)
    watch = Watch()
    with simulate.fake_world(args.world_size):
        peak = simulate.simulate(args, watch.forward_backward)
    sent = Counter(watch.sent)
    expected = planned_traffic(plan.run)
    assert sent == expected, (sent - expected, expected - sent)
    # the tracker cannot follow the optimizer
    fullest = max(plan.snapshots, key=lambda s: s.total - s.bytes["optimizer"])
    for categories, parts in ROWS.items():
        held = sum(peak[category] for category in categories)
        planned = sum(fullest.bytes[part] for part in parts)
        assert planned == pytest.approx(held, rel=0.03), parts
