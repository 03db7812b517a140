"""Step a job's command once in one CPU process that simulates its rank 0, before it is queued.

    python train_fsdp.py --model 15b --mode hybrid --group 4 --dry-run --world-size 512

The process group is fake and sends nothing; the tensors are fake: they have shapes but no memory.
Flags, mesh, wrapping and step are those of the real run. The result is what a rank holds at its
peak and every collective it takes part in. Only FSDP2 steps are simulated, not those of DDP or
FSDP1.

Private parts of PyTorch are imported in `private_parts` alone, so that a new version breaks one
place.
"""

import errno
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import data
import mesh
import shard
import vit
from planner.machines import MACHINES
from planner.memory import GIB
from runtime import agreement, image_source
from runtime.agreement import StepGuard
from runtime.config import Config
from runtime.devices import planned
from runtime.process import print_error
from runtime.record import describe, start_record
from runtime.resume import list_newest_first, read_run_state
from runtime.run import Run, check_masking, resolve, with_images
from runtime.step_profile import CommEvent, counting

CPU = torch.device("cpu")  # a fake GPU would need a driver; shapes and bytes are the same

# Rows of the table of memory, each with the tracker's categories that belong to it. Every category
# and every part of the plan is in one row, so that the rows add up to the last.
TABLE_ROWS = {
    "parameters": ("Sharded Param",),
    "gradients": ("Sharded Grad",),
    "optimizer": ("OptState",),
    "unsharded": ("Unsharded Param", "All Gather", "Unsharded Grad", "Reduce Scatter"),
    "activations": ("Activation", "Temp", "Buffer", "Inputs"),
    "workspace": (),  # of a GPU's libraries
}
PLANNED_PARTS = {"unsharded": ("unsharded", "reduction"), "activations": ("activations", "inputs")}
ON_HOST = ("parameters", "gradients", "optimizer")  # with --cpu-offload


class Unsupported(RuntimeError):
    """This version of PyTorch lacks what is needed here."""


def private_parts() -> tuple[Any, Any, Any, Any]:
    """Import private parts of PyTorch; Unsupported where one does not exist.

    FakeTensorMode, a context without it, FSDPMemTracker and FakeStore.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise Unsupported(
            f"--dry-run uses private parts of PyTorch, and torch {torch.__version__} does not "
            f"have all of them ({error}): it was written for torch 2.10 to 2.15"
        ) from None
    return FakeTensorMode, unset_fake_temporarily, FSDPMemTracker, FakeStore


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors that have a shape but no memory."""
    fake_tensor_mode, without, _, _ = private_parts()
    # With tensor parallelism FSDP2 joins two meshes, which hold the numbers of ranks in tensors.
    join = staticmethod(without()(DeviceMesh._concatenate))
    with fake_tensor_mode(), mock.patch.object(DeviceMesh, "_concatenate", join):
        yield


# ---------------------------------------------------------------------------------------------
# The whole command


def dry_run(
    config: Config, build: Callable[..., Any], forward_backward: Callable[..., torch.Tensor]
) -> int:
    """Run the command up to one step on fake tensors; print a plan, train and write nothing.

    `build` and `forward_backward` are the trainer's `build_training` and `forward_backward`.
    Returns the exit status: 0, 1 failed, 2 refused, 3 where the plan says NO to its memory.
    """
    try:
        ranks = fake_ranks(int(config.world_size or 0), os.environ)
    except RuntimeError as error:  # LOCAL_WORLD_SIZE
        print_error(str(error))
        return 2
    try:
        image_source.check_folders(config)
        run = resolve(config, ranks.world_size, ranks.local_world_size)
        check_masking(run.model, config.img_size, config.mask_ratio)
        with fake_world(ranks.world_size):
            verdict = run_dry(run, ranks, lambda run: simulate(run, build, forward_backward))
    except (ValueError, OSError, Unsupported, agreement.AgreedError) as error:
        print_error(str(error))
        return 1 if isinstance(error, Unsupported) else 2
    return 3 if verdict == "NO" else 0


def run_dry(run: Run, ranks: mesh.Ranks, step_once: Callable[[Run], "Simulation"]) -> str | None:
    """Print what a real run would be, in its order and with its errors; return the verdict."""
    say = partial(print, flush=True)
    config = replace(run.config, dry_run=False)
    say(f"dry run: rank 0 of {ranks.world_size}, on nodes of {ranks.local_world_size} ranks")
    files, found = image_source.find_images(config, None, run.global_batch, say)
    check_out_writable(config.out)
    run = with_images(replace(run, config=config), **found)
    state = read_run_state(list_newest_first(run, say), run, say)

    # of the GPU that the job will have, where one is here
    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    plan = planned(
        run, CPU if config.device == "cpu" else gpu, lambda text: say(f"warning: {text}")
    )
    start = start_record(run, ranks, CPU, plan, begin=state["step"], workers=0)
    elsewhere = {} if config.device == "cpu" else {"device": "a GPU each"}
    for line in describe(start | elsewhere):
        say(line)
    loader = data.build_loader(
        files,
        img_size=config.img_size,
        patches=run.patches,
        seed=config.seed,
        global_batch=run.global_batch,
        local_batch=run.local_batch,
        steps=range(state["step"], run.steps),
        world_size=run.data_ranks,
        workers=config.workers or 0,
        stats=run.channel_stats or data.IMAGENET,
    )
    for line in first_samples(loader, config.workers):
        say(line)

    why_not = unsimulated(config)
    simulation = None if why_not else step_once(run)
    say(why_not or "one step of rank 0, simulated" + ", without --compile" * config.compile)
    for line in report(simulation, plan, run.ranks_per_group, config.cpu_offload):
        say(line)
    return plan["verdict"] if plan else None


# ---------------------------------------------------------------------------------------------
# Fake ranks


def fake_ranks(world_size: int, environ: Mapping[str, str]) -> mesh.Ranks:
    """Make rank 0 of so many, on nodes of LOCAL_WORLD_SIZE (set by launch_frontier.sh) or 8."""
    on_node = int(environ.get("LOCAL_WORLD_SIZE", MACHINES["frontier"].ranks_per_node))
    on_node = min(on_node, world_size)
    return mesh.Ranks(0, world_size, 0, on_node, 0, "dry run", {})


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a fake default process group, which sends nothing."""
    *_, fake_store = private_parts()
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_out_writable(path: str) -> None:
    """Raise the ValueError that a run gets where --out cannot be made, without making it."""
    folder = there = Path(path).absolute()
    while not there.exists():
        there = there.parent
    code = 0
    if not there.is_dir():
        code = errno.EEXIST if there == folder else errno.ENOTDIR
    elif not os.access(there, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code:
        error = OSError(code, os.strerror(code), path)
        raise ValueError(f"{error}: give --out a folder that can be written")


def first_samples(loader: DataLoader[Any], workers: int | None) -> Iterator[str]:
    """Describe what rank 0 reads first from the loader, and with how many workers."""
    sampler, images = loader.batch_sampler, cast(Any, loader.dataset)
    first = next(iter(sampler), None) if sampler else None
    if first is None:
        yield "no step is left to do"
        return
    path = f", {images.files.path(first[0][1])}"
    count = "its CPU cores less one, at most 6," if workers is None else workers
    numbers = f"{first[0][0]} to {first[-1][0]}"
    yield f"rank 0 reads the samples {numbers} first{path}; {count} loader workers"


def unsimulated(config: Config) -> str | None:
    """Say why the step of this mode, engine and --run is not simulated; None where it is."""
    if config.run_mode == "io":
        return "--run io: no model, no step"
    if shard.STRATEGIES[str(config.mode)].engine != "fsdp" or config.fsdp == 1:
        engine = f"--mode {config.mode}" if config.fsdp is None else "--fsdp 1"
        return f"{engine}: flags, mesh and batch are checked, but only an FSDP2 step is simulated"
    return None


# ---------------------------------------------------------------------------------------------
# One step


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
    found: list[CommEvent] = []
    # the tensors are on a CPU, the job may not be: then its attention is the fused one
    cpu = config.device == "cpu"
    with fake_tensors(), nullcontext() if cpu else mock.patch.dict(vit.PLAIN_TOKENS, clear=True):
        training = build(run, grid, resuming=True)
        model, scaler = training.model, training.scaler
        guard = StepGuard(CPU)  # here, so that its tensors are fake too
        shape = (batch, config.channels, side, side)
        stats = run.channel_stats or data.IMAGENET
        dtype = torch.uint8 if stats.dtype == "uint8" else torch.float32
        images = [torch.empty(shape, dtype=dtype) for _ in range(config.accum)]
        batches = [(x, torch.empty(batch, run.patches)) for x in images]
        with counting(grid, found):
            tracker = memory_tracker(model)
            tracker.track_inputs(tuple(batches))
            with tracker:
                # without a reset the tracker refuses a second forward pass
                reset = model.register_forward_pre_hook(
                    lambda *_: tracker.reset_mod_stats(), prepend=True
                )
                loss = forward_backward(training, batches)
                reset.remove()
                after = _snapshot(tracker, "current")
            # Not tracked: under DTensor the tracker counts full tensors of which only the shape is
            # used. Not stepped: AdamW's fused step takes no memory except its states, which exist
            # from the second step on.
            if scaler:
                scaler.unscale_(training.optimizer)
            norm = shard.clip_grad_norm(model, config.clip or math.inf)
            guard.vote(loss, norm, scaled=scaler is not None)
        states = {"OptState": optimizer_bytes(model)}
    return Simulation(_snapshot(tracker, "peak") | states, after | states, found)


def memory_tracker(model: nn.Module) -> Any:
    """Build PyTorch's tracker of memory by category, for units of several blocks.

    PyTorch's own hooks every block of a unit, which would then be gathered and freed with every
    block. Here the hooks are on the first block, the one after forward on the last.
    """
    _, _, fsdp_tracker, _ = private_parts()

    def unit(module: Any) -> Sequence[nn.Module]:
        return module._get_fsdp_state()._modules

    class Tracker(fsdp_tracker):  # type: ignore[misc, valid-type]
        memory_tracking: Any

        def _fsdp_state_pre_forward(self, module: Any, hook: Any) -> Any:
            if module is unit(module)[0]:
                return super()._fsdp_state_pre_forward(module, hook)
            return lambda _, args, kwargs: (args, kwargs)

        def _fsdp_state_post_forward(self, module: Any, hook: Any) -> Any:
            if module is unit(module)[-1]:
                return super()._fsdp_state_post_forward(unit(module)[0], hook)
            return lambda _, args, output: output

        def _fsdp_param_group_pre_backward(self, module: Any, hook: Any) -> Any:
            first = module is unit(module)[0]
            return super()._fsdp_param_group_pre_backward(module, hook) if first else hook

        def _fsdp_param_group_post_backward(self, module: Any, hook: Any) -> Any:
            first = module is unit(module)[0]
            return super()._fsdp_param_group_post_backward(module, hook) if first else hook

        def _update_peak_stats(self, peak_state: Any) -> None:
            # without the peaks of every module, which nobody reads: half the time
            modules, self.memory_tracking = self.memory_tracking, {}
            super()._update_peak_stats(peak_state)
            self.memory_tracking = modules

    return Tracker(model)


def _snapshot(tracker: Any, which: str) -> dict[str, int]:
    """Read the bytes by category, "current" or "peak", of the only device."""
    (found,) = tracker.get_tracker_snapshot(which).values()
    return {category.value: size for category, size in found.items() if category != "Total"}


def optimizer_bytes(model: nn.Module) -> int:
    """Count AdamW's states on this rank: two moments per value, one step count per tensor."""
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(2 * t.numel() * t.element_size() + 4 for t in tensors)


# ---------------------------------------------------------------------------------------------
# What is printed


def report(
    simulation: Simulation | None,
    plan: Mapping[str, Any] | None,
    group_sizes: Mapping[str, int],
    cpu_offload: bool,
) -> Iterator[str]:
    """Yield lines for the terminal: memory by part, collectives; `plan` as of plan.py --json."""
    columns: dict[str, Mapping[str, float]] = {}
    if simulation:
        columns["at peak"] = row_gib(simulation.peak)
        columns["after backward"] = row_gib(simulation.after)
    if plan:
        gib = plan["memory_gib"]
        parts = {row: PLANNED_PARTS.get(row, (row,)) for row in TABLE_ROWS}
        planned_gib = {row: sum(gib[part] for part in names) for row, names in parts.items()}
        columns["planned peak"] = planned_gib | {"all": gib["peak"]}
    if columns:
        yield f"{'memory per rank, GiB':26}" + "".join(f"{head:>16}" for head in columns)
    for row, categories in [*TABLE_ROWS.items(), ("all", ())] if columns else []:
        yield f"  {row:24}" + "".join(f"{column[row]:16.3f}" for column in columns.values())
        for name in categories if simulation and len(categories) > 1 else ():
            cells = [f"{column[name]:16.3f}" for column in columns.values() if name in column]
            yield f"    {name.lower():22}" + "".join(cells)
    if simulation and cpu_offload:
        host = sum(columns["at peak"][row] for row in ON_HOST)
        yield f"at the peak {host:.3f} GiB of that, {', '.join(ON_HOST)}, are host memory"
    if simulation:
        yield from _simulated_lines(simulation.collectives, group_sizes)
    if plan:
        found = simulation.collectives if simulation else []
        sent = [c for c in found if group_sizes[c.group] > 1]  # a rank alone sends nothing
        yield from _planned_lines(plan, sent if simulation else None)


def row_gib(memory: Mapping[str, int]) -> dict[str, float]:
    """Convert bytes by category -> GiB by category, by row of the table, and of all."""
    gib = {name: memory.get(name, 0) / GIB for names in TABLE_ROWS.values() for name in names}
    rows = {row: sum(gib[name] for name in names) for row, names in TABLE_ROWS.items()}
    return gib | rows | {"all": sum(gib.values())}


def _simulated_lines(
    collectives: Sequence[CommEvent], group_sizes: Mapping[str, int]
) -> Iterator[str]:
    counts = Counter((c.kind, c.group) for c in collectives)
    heads = f"{'in groups of':>18}{'count':>8}{'GiB of full tensors':>24}"
    yield f"{'collectives per step':26}{heads}"
    for (kind, group), count in sorted(counts.items()):
        size = sum(c.size for c in collectives if (c.kind, c.group) == (kind, group))
        yield f"  {kind:18}{f'{group}, {group_sizes[group]}':>24}{count:8}{size / GIB:24.6f}"


def _planned_lines(plan: Mapping[str, Any], found: Sequence[CommEvent] | None) -> Iterator[str]:
    kinds = [*plan["payload_bytes"], *(c.kind for c in found or ())]
    for kind in dict.fromkeys(kinds):  # each once
        size, count = plan["payload_bytes"].get(kind, 0), plan["collectives"].get(kind, 0)
        text = f"  {kind}: planned {count} of {size:,} bytes"
        if found is not None:
            sizes = [c.size for c in found if c.kind == kind]
            text += f", simulated {len(sizes)} of {sum(sizes):,}"
        yield text
