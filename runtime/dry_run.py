"""Simulate rank 0 of a job in one CPU process, forward and backward once, before it is queued.

    python train_fsdp.py --model 15b --mode hybrid --group 4 --dry-run --world-size 512

The process group is fake and sends nothing; the tensors are fake: they have shapes but no memory.
Flags, mesh, wrapping, forward and backward are those of the real run; the optimizer's states are
added by arithmetic. The result is the peak memory of a rank, beside the planned one. Only FSDP2 is
simulated, not DDP or FSDP1. Four imports are private parts of PyTorch, there in torch 2.10 to 2.15.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import mesh
import vit
from planner.machines import read_machine
from planner.memory import GIB, MEMORY_PARTS
from runtime import agreement, image_source
from runtime.config import Config
from runtime.process import print_error
from runtime.resume import list_newest_first, read_run_state
from runtime.run import Run, resolve, with_images
from runtime.start_record import describe, start_record

CPU = torch.device("cpu")  # a fake GPU would need a driver; shapes and bytes are the same


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
    Returns the exit status: 0, 2 if refused, 3 if the plan says that the memory does not suffice.
    """
    world = 0 if config.world_size is None else config.world_size
    try:
        # nodes are those of launch_frontier.sh, of --machine, or Frontier's
        machine = read_machine("frontier" if config.machine is None else config.machine)
        node = os.environ.get("LOCAL_WORLD_SIZE", machine.ranks_per_node)
        ranks = mesh.Ranks(0, world, 0, min(int(node), world), "dry run", {})
        image_source.check_folders(config)
        run = resolve(config, world, ranks.local_world_size)
        with fake_world(world):
            run, plan = describe_run(run, ranks)
            peak = None
            if config.fsdp == 2 and config.run_mode != "io":
                peak = simulate(run, build, forward_backward)
    except (ValueError, OSError, agreement.AgreedError) as error:
        print_error(str(error))
        return 2
    if peak and plan:
        how = "simulated"
        if config.compile:
            how += " without --compile"
        print_peak(how, {category: size / GIB for category, size in peak.items()})
        print_peak("planned", {part: plan["memory_gib"][part] for part in MEMORY_PARTS})
    else:
        print("flags, mesh and batch are checked, but only an FSDP2 step is simulated")
    return 3 if plan and plan["verdict"] == "NO" else 0


def describe_run(run: Run, ranks: mesh.Ranks) -> tuple[Run, dict[str, Any] | None]:
    """Print what a real run would, in its order and with its errors; return run and plan."""
    config = run.config
    print(f"dry run: rank 0 of {ranks.world_size}, on nodes of {ranks.local_world_size} ranks")
    _, facts = image_source.find_images(config, run.global_batch)
    run = with_images(run, facts)
    read_run_state(list_newest_first(run, print, dry_run=True), run, print)
    device = None  # that of the machine
    if config.device == "cpu":
        device = CPU
    elif torch.cuda.is_available() and not config.machine:
        device = torch.device("cuda")  # which the job will have too
    start = start_record(run, device, partial(print, "warning:"))
    print(*describe(start), sep="\n")
    return run, start["planned"]


def print_peak(how: str, gib: Mapping[str, float]) -> None:
    """Print what is held at the peak, and of what: the largest part first."""
    largest = sorted(gib, key=gib.__getitem__, reverse=True)
    parts = ", ".join(f"{name} {gib[name]:.2f}" for name in largest if gib[name] >= 0.005)
    print(f"one step of rank 0, {how}: {sum(gib.values()):.2f} GiB at the peak ({parts})")


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a fake default process group, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- One step


def use_fused_attention(model: torch.nn.Module) -> None:
    """Let a model on fake CPU tensors attend as on a GPU, where attention is always fused."""
    for module in model.modules():
        if isinstance(module, vit.Attention):
            module.always_fused = True


def simulate(
    run: Run, build: Callable[..., Any], forward_backward: Callable[..., torch.Tensor]
) -> dict[str, int]:
    """Run one step on fake tensors, inside `fake_world`, without torch.compile.

    Returns the bytes at the peak, by the categories of PyTorch's tracker.
    """
    run = replace(run, config=replace(run.config, compile=False))
    config = run.config
    side = config.img_size
    batch = run.local_batch
    grid = mesh.build_mesh(run.mesh_shape, CPU)
    with fake_tensors():
        training = build(run, grid, resuming=True)
        model = training.model
        if config.device != "cpu":
            use_fused_attention(model)
        shape = (batch, config.channels, side, side)
        stats = run.pixel_stats
        dtype = torch.uint8 if stats.dtype == "uint8" else torch.float32
        images = [torch.empty(shape, dtype=dtype) for _ in range(config.accum)]
        batches = [(x, torch.empty(batch, run.patches)) for x in images]
        tracker: Any = FSDPMemTracker(model)
        tracker.track_inputs(tuple(batches))
        with tracker:

            def reset_tracker(*_: Any) -> None:  # otherwise it refuses a second forward pass
                tracker.reset_mod_stats()

            model.register_forward_pre_hook(reset_tracker, prepend=True)
            forward_backward(training, batches)
        peak = tracker.get_tracker_snapshot("peak")[CPU]
    found = {category.value: size for category, size in peak.items() if category != "Total"}
    # AdamW's fused step takes no memory but its states, which exist from the second step on: two
    # moments per value, one step count per tensor
    states = 2 * found["Sharded Param"] + 4 * len([*model.parameters()])
    return found | {"OptState": states}
