"""A step of the dry run, looked at from inside: what it sends and what it holds."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from planner.estimate import Plan
from planner.machines import MACHINES
from planner.traffic import PlannedRun, collectives
from runtime import dry_run
from runtime.run import Run
from train_fsdp import build_training, forward_backward

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
        self.namespaces = namespaces or ("c10d", "_c10d_functional")
        self.sent: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # comes back as plain local tensors
        result = function(*args, **(kwargs or {}))
        name = function.name().partition("::")[2].replace("_", "")
        if function.namespace in self.namespaces and name != "waittensor":
            (kind,) = (kind for kind in KINDS if name.startswith(kind.replace("_", "")))
            leaves = [tree_leaves(argument) for argument in [*args, result]]
            sizes = [sum(t.nbytes for t in some if isinstance(t, torch.Tensor)) for some in leaves]
            if (ranks := group_of(args).size()) > 1:
                self.sent.append((kind, ranks, max(sizes)))  # before or after it
        return result

    def forward_backward(self, *given) -> None:
        """The trainer's, in a dry run; `after` are bytes by the tracker's categories."""
        tracker = _get_current_dispatch_mode()
        with self:
            forward_backward(*given)
        (found,) = tracker.get_tracker_snapshot("current").values()
        self.after = {c.value: size for c, size in found.items() if c != "Total"}


def group_of(args) -> dist.ProcessGroup:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    name = [argument for argument in args if isinstance(argument, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)


def simulated(run: Run) -> tuple[dict[str, int], Watch]:
    """The bytes at the peak of a step by the tracker's categories, and what was seen inside."""
    with dry_run.fake_world(run.world_size):
        return dry_run.simulate(run, build_training, (watch := Watch()).forward_backward), watch


def planned_traffic(run: PlannedRun) -> Counter:
    """How many collectives of each kind, group and size."""
    return Counter((c.kind, c.ranks, c.payload) for c in collectives(run) for _ in range(c.count))


def hold_against_plan(run: Run) -> None:
    """The collectives are exactly those planned, each row of memory is so within 3 %."""
    plan = Plan(PlannedRun.from_flags(run.model, run.record()), AS_A_CPU)
    peak, watch = simulated(run)
    sent, expected = Counter(watch.sent), planned_traffic(plan.run)
    assert sent == expected, (sent - expected, expected - sent)
    # the tracker cannot follow the optimizer
    planned = max(plan.snapshots, key=lambda s: s.total - s.bytes["optimizer"]).bytes
    for categories, parts in ROWS.items():
        held = sum(peak[category] for category in categories)
        assert sum(planned[part] for part in parts) == pytest.approx(held, rel=0.03), parts
