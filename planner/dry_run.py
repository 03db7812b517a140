"""Step a job's command once in one CPU process that simulates its rank 0, before it is queued.

    python train_fsdp.py --model 15b --mode hybrid --group 4 --dry-run --world-size 512

The process group is fake and sends nothing; the tensors are fake: they have shapes but no memory.
Flags, mesh, wrapping, forward and backward are those of the real run. The result is what a rank
holds at its peak and the collectives it takes part in. Only FSDP2 is simulated, not DDP or FSDP1.
Six imports are private parts of PyTorch, there in torch 2.10 to 2.15.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import data
import mesh
import vit
from planner.machines import MACHINES
from planner.memory import GIB
from runtime import agreement, image_source
from runtime.config import Config
from runtime.process import print_error
from runtime.record import describe, start_record
from runtime.resume import list_newest_first, read_run_state
from runtime.run import Run, resolve, with_images

COMM_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
CPU = torch.device("cpu")  # a fake GPU would need a driver; shapes and bytes are the same

# Rows of the table of memory: the tracker's categories and the parts of the plan in each. Every one
# is in one row, so that the rows add up to the last.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "parameters": (("Sharded Param",), ("parameters",)),
    "gradients": (("Sharded Grad",), ("gradients",)),
    "optimizer": (("OptState",), ("optimizer",)),
    "unsharded": (
        ("Unsharded Param", "All Gather", "Unsharded Grad", "Reduce Scatter"),
        ("unsharded", "reduction"),
    ),
    "activations": (("Activation", "Temp", "Buffer", "Inputs"), ("activations", "inputs")),
    "workspace": ((), ("workspace",)),  # of a GPU's libraries
}


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors that have a shape but no memory."""
    # With tensor parallelism FSDP2 joins two meshes, which hold the numbers of ranks in tensors.
    join = staticmethod(unset_fake_temporarily()(DeviceMesh._concatenate))
    with FakeTensorMode(), mock.patch.object(DeviceMesh, "_concatenate", join):
        yield


# --- The whole command


def dry_run(
    config: Config, build: Callable[..., Any], forward_backward: Callable[..., torch.Tensor]
) -> int:
    """Run the command up to one step on fake tensors; print a plan, train and write nothing.

    `build` and `forward_backward` are the trainer's `build_training` and `forward_backward`.
    Returns the exit status: 0, 2 refused, 3 where the plan says NO to its memory.
    """
    world = int(config.world_size or 0)
    try:
        # nodes are those of launch_frontier.sh, or Frontier's
        node = os.environ.get("LOCAL_WORLD_SIZE", MACHINES["frontier"].ranks_per_node)
        ranks = mesh.Ranks(0, world, 0, min(int(node), world), 0, "dry run", {})
        image_source.check_folders(config)
        run = resolve(config, world, ranks.local_world_size)
        with fake_world(world):
            run, plan = describe_run(run, ranks)
            simulation = None
            if config.fsdp == 2 and config.run_mode != "io":
                simulation = simulate(run, build, forward_backward)
    except (ValueError, OSError, agreement.AgreedError) as error:
        print_error(str(error))
        return 2
    if simulation and plan:
        print("one step of rank 0, simulated" + ", without --compile" * config.compile)
        print("\n".join(report(simulation, plan)))
    else:
        print("flags, mesh and batch are checked, but only an FSDP2 step is simulated")
    return 3 if plan and plan["verdict"] == "NO" else 0


def describe_run(run: Run, ranks: mesh.Ranks) -> tuple[Run, dict[str, Any] | None]:
    """Print what a real run would, in its order and with its errors; return run and plan."""
    config = run.config
    print(f"dry run: rank 0 of {ranks.world_size}, on nodes of {ranks.local_world_size} ranks")
    _, found = image_source.find_images(config, None, run.global_batch)
    run = with_images(run, **found)
    read_run_state(list_newest_first(run, print), run, print)
    # of the GPU that the job will have, where one is here
    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    device = CPU if config.device == "cpu" else gpu
    start = start_record(run, device, lambda text: print(f"warning: {text}"))
    print(*describe(start), sep="\n")
    return run, start["planned"]


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a fake default process group, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- What a step sends


class CommEvent(NamedTuple):
    """One collective of one rank."""

    kind: str  # one of COMM_KINDS
    ranks: int  # of its group
    size: int  # bytes of the whole tensor: after an all-gather, before a reduce-scatter


class Counting(TorchDispatchMode):
    """List in `found` the collectives of this process with other ranks, as a context."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[CommEvent] = []

    def __torch_dispatch__(self, func: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        """Run an operator, and look whether it is a collective."""
        if DTensor in types:
            return NotImplemented  # comes back as plain local tensors
        result = func(*given, **(named or {}))
        if (kind := kind_of(func)) and (ranks := _group_of(given).size()) > 1:
            leaves = [tree_leaves(argument) for argument in [*given, result]]
            sizes = [sum(t.nbytes for t in some if isinstance(t, Tensor)) for some in leaves]
            self.found.append(CommEvent(kind, ranks, max(sizes)))  # the whole tensor is the larger
        return result


def kind_of(func: Any) -> str | None:
    """Classify as all_gather, reduce_scatter, all_reduce, broadcast; None for other operators."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func.name().partition("::")[2].replace("_", "")
    return next((kind for kind in COMM_KINDS if name.startswith(kind.replace("_", ""))), None)


def _group_of(given: Sequence[Any]) -> dist.ProcessGroup:
    for argument in given:
        if isinstance(argument, torch.ScriptObject):  # a process group
            return dist.ProcessGroup.unbox(argument)
    name: Any = [argument for argument in given if isinstance(argument, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)


# --- One step


@dataclass(frozen=True)
class Simulation:
    """The result of one simulated step of rank 0."""

    peak: dict[str, int]  # bytes by the tracker's categories, at the peak
    after: dict[str, int]  # the same after backward
    collectives: list[CommEvent]  # in their order


def simulate(
    run: Run, build: Callable[..., Any], forward_backward: Callable[..., torch.Tensor]
) -> Simulation:
    """Run one step on fake tensors, inside `fake_world`, without torch.compile."""
    run = replace(run, config=replace(run.config, compile=False))
    config, side, batch = run.config, run.config.img_size, run.local_batch
    grid = mesh.build_mesh(run.mesh_shape, CPU)
    # the tensors are on a CPU, the job may not be: then its attention is the fused one
    cpu = config.device == "cpu"
    with fake_tensors(), nullcontext() if cpu else mock.patch.dict(vit.PLAIN_TOKENS, clear=True):
        training = build(run, grid, resuming=True)
        model = training.model
        shape = (batch, config.channels, side, side)
        stats = run.channel_stats or data.IMAGENET
        dtype = torch.uint8 if stats.dtype == "uint8" else torch.float32
        images = [torch.empty(shape, dtype=dtype) for _ in range(config.accum)]
        batches = [(x, torch.empty(batch, run.patches)) for x in images]
        tracker = FSDPMemTracker(model)
        tracker.track_inputs(tuple(batches))
        with Counting() as counted, tracker:
            # without a reset the tracker refuses a second forward pass
            model.register_forward_pre_hook(lambda *_: tracker.reset_mod_stats(), prepend=True)
            forward_backward(training, batches)
            after = _snapshot(tracker, "current")
    # AdamW's fused step takes no memory but its states, which exist from the second step on: two
    # moments per value, one step count per tensor
    states = {"OptState": 2 * after["Sharded Param"] + 4 * len([*model.parameters()])}
    return Simulation(_snapshot(tracker, "peak") | states, after | states, counted.found)


def _snapshot(tracker: Any, which: str) -> dict[str, int]:
    """Read the bytes by category, "current" or "peak", of the only device."""
    (found,) = tracker.get_tracker_snapshot(which).values()
    return {category.value: size for category, size in found.items() if category != "Total"}


# --- What is printed


def report(simulation: Simulation, plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for the terminal: memory by part, collectives; `plan` as of plan.py --json."""

    def gib(found: Mapping[str, int], names: Sequence[str]) -> float:
        return sum(found.get(name, 0) for name in names) / GIB

    yield f"{'memory per rank, GiB':26}{'at peak':>16}{'after backward':>16}{'planned peak':>16}"
    peak, after, planned = simulation.peak, simulation.after, plan["memory_gib"]
    table: dict[str, tuple[float, ...]] = {
        row: (gib(peak, names), gib(after, names), sum(planned[part] for part in parts))
        for row, (names, parts) in ROWS.items()
    }
    table["all"] = tuple(map(sum, zip(*table.values(), strict=True)))
    for row, sizes in table.items():
        yield f"  {row:24}" + "".join(f"{size:16.3f}" for size in sizes)
    sent, payload, count = simulation.collectives, plan["payload_bytes"], plan["collectives"]
    for kind in dict.fromkeys([*payload, *(c.kind for c in sent)]):  # each once
        found = [c.size for c in sent if c.kind == kind]
        expected = f"planned {count.get(kind, 0)} of {payload.get(kind, 0):,} bytes"
        yield f"  {kind}: {expected}, simulated {len(found)} of {sum(found):,}"
