"""Simulate rank 0 of a job in one CPU process, forward and backward once, before it is queued.

    python train_fsdp.py --model 15b --mode hybrid --group 4 --dry-run --world-size 512
    python plan.py --model 15b --mode hybrid --group 4 --simulate --world-size 512

The process group is fake and sends nothing; the tensors are fake: they have shapes but no memory.
Flags, images, mesh, wrapping, forward and backward are those of the real run; the optimizer's
states are added by arithmetic. The result is the peak memory of a rank, beside the planned one.
Only FSDP2 is simulated, not DDP or FSDP1. Three imports are private parts of PyTorch, there in
torch 2.10 to 2.15.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

import mesh
import plan
import run
import train_fsdp
import vit

CPU = torch.device("cpu")  # a fake GPU would need a driver; shapes and bytes are the same


def main(argv: Sequence[str]) -> int:
    """Run a command with --dry-run up to one step; return the exit status (`dry_run`)."""
    words = [word for word in argv if word != "--dry-run"]
    args, planned = plan.read_command(words, prog="train_fsdp.py")
    return dry_run(args, planned)


def dry_run(args: Namespace, planned: plan.Plan) -> int:
    """Check all that a run would, print its plan and a simulated step; train and write nothing.

    Returns the exit status: 0, 1 or 2 if the run would be refused, 3 if the plan says NO.
    """
    try:
        run.check_host(args)
        files = run.find_images(args, args.data)
        run.find_stats(args, files)
        train_fsdp.count_steps(args, len(files))
        run.choose_checkpoints(args)
    except (ValueError, run.Refused) as error:
        return run.refuse(str(error))
    print(f"dry run: rank 0 of {args.world_size}, {len(files)} images in {args.data}")
    print(*plan.summary_lines(planned), sep="\n")
    if planned.run.engine == "fsdp2" and args.run_mode != "io":
        with fake_world(args.world_size):
            peak = simulate(args)
        print_peak("simulated", {part: size / plan.GIB for part, size in peak.items()})
        print_peak("planned", {part: size / plan.GIB for part, size in planned.peak.bytes.items()})
    else:
        print("flags, mesh and batch are checked, but only an FSDP2 step is simulated")
    return plan.exit_status(args, planned)


def print_peak(how: str, gib: Mapping[str, float]) -> None:
    """Print what is held at the peak, and of what: the largest part first."""
    largest = sorted(gib, key=gib.__getitem__, reverse=True)
    parts = ", ".join(f"{name} {gib[name]:.2f}" for name in largest if gib[name] >= 0.005)
    print(f"one step of rank 0, {how}: {sum(gib.values()):.2f} GiB at the peak ({parts})")


# --- One step


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a fake default process group, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulate(
    args: Namespace, forward_backward: Callable[..., Any] = train_fsdp.forward_backward
) -> dict[str, int]:
    """Run one step of complete flags on fake tensors, inside `fake_world`, without torch.compile.

    Returns the bytes at the peak, by the categories of PyTorch's tracker.
    """
    args = copy(args)
    args.compile = False
    grid = mesh.build_mesh(args.mesh_shape, CPU)  # its ranks are values in tensors
    with FakeTensorMode(), mock.patch.object(mesh, "build_mesh", return_value=grid):
        training = train_fsdp.build_training(args, CPU)
        if args.device != "cpu":
            attend_as_a_gpu(training.model)
        shape = (args.batch, args.channels, args.img_size, args.img_size)
        dtype = torch.uint8 if args.channel_stats.dtype == "uint8" else torch.float32
        images = [torch.empty(shape, dtype=dtype) for _ in range(args.accum)]
        batches = [(x, torch.empty(args.batch, args.patches)) for x in images]
        tracker: Any = FSDPMemTracker(training.model)
        tracker.track_inputs(tuple(batches))
        with tracker:

            def reset_tracker(*_: Any) -> None:  # otherwise it refuses a second forward pass
                tracker.reset_mod_stats()

            training.model.register_forward_pre_hook(reset_tracker, prepend=True)
            forward_backward(training, batches)
        peak = tracker.get_tracker_snapshot("peak")[CPU]
    found = {category.value: size for category, size in peak.items() if category != "Total"}
    # AdamW's fused step takes no memory but its states, which exist from the second step on: two
    # moments per value, one step count per tensor
    states = 2 * found["Sharded Param"] + 4 * len([*training.model.parameters()])
    return found | {"OptState": states}


def attend_as_a_gpu(model: torch.nn.Module) -> None:
    """Let a model on fake CPU tensors attend as on a GPU, where attention is always fused."""
    for module in model.modules():
        if isinstance(module, vit.Attention):
            module.always_fused = True
