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
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from runtime.assemble import build_meta_model, completed, planned, start_record
from runtime.comm_counter import Collective, Unsupported, counting
from runtime.flags import print_error
from runtime.log import describe
from runtime.resume import candidates, resume

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


def private_parts() -> tuple[Any, Any, Any]:
    """Import FakeTensorMode, FSDPMemTracker and FakeStore; Unsupported where one does not exist."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise Unsupported(
            f"--dry-run uses private parts of PyTorch, and torch {torch.__version__} does not "
            f"have all of them ({error}): it was written for torch 2.10 to 2.15"
        ) from None
    return FakeTensorMode, FSDPMemTracker, FakeStore


# ---------------------------------------------------------------------------------------------
# The whole command


def dry_run(
    flags: dict[str, Any],
    config: vit.ViTConfig,
    ranks: mesh.Ranks,
    shape: tuple[int, int],
    lr: float,
    build: Callable[..., Any],
    gradients: Callable[..., Tensor],
    update: Callable[..., Tensor],
) -> int:
    """Run the command up to one step without numbers; print, but train and write nothing.

    `build(model, grid)` as assemble.spread; `gradients` and `update` are the two halves of
    train_fsdp.py's step. Returns the exit status.
    """
    try:
        with fake_world(ranks.world_size):
            for line in run_dry(flags, config, ranks, shape, lr, build, gradients, update):
                print(line, flush=True)
    except (ValueError, OSError, Unsupported) as error:
        print_error(str(error))
        return 1 if isinstance(error, Unsupported) else 2
    return 0


def run_dry(
    flags: dict[str, Any],
    config: vit.ViTConfig,
    ranks: mesh.Ranks,
    shape: tuple[int, int],
    lr: float,
    build: Callable[..., Any],
    gradients: Callable[..., Tensor],
    update: Callable[..., Tensor],
) -> Iterator[str]:
    """Yield lines that describe the real run, in the order of `main`, and raise its errors."""
    yield f"dry run: rank 0 of {ranks.world_size}, on nodes of {ranks.local_world_size} ranks"
    said: list[str] = []
    scan = partial(
        image_source.find_images, flags["data"], None, flags["global_batch"], said.append
    )
    files, images, epoch_steps = agreement.run_on_rank0(scan)
    agreement.run_on_rank0(partial(check_folder, flags["out"]))
    chosen = completed(flags | images | {"dry_run": False}, epoch_steps)
    begin = 0
    if flags["run"] == "real":
        found = candidates(flags["resume"], flags["out"], said.append)
        begin = resume(
            found,
            flags["resume"] == "auto",
            flags["out"],
            None,
            None,
            chosen,
            flags["allow_changes"],
            said.append,
        )["step"]
    yield from said

    gpu = torch.device("cuda" if flags["device"] != "cpu" else "cpu")  # of the job, not of here
    blank = partial(build_meta_model, config, flags["img_size"], flags["norm_pix_loss"], gpu)
    params = sum(p.numel() for p in blank().parameters())
    plan = planned(config, chosen, partial(print, "warning:", flush=True))
    start = start_record(
        chosen,
        config,
        ranks,
        CPU,
        shape,
        plan,
        params=params,
        lr=lr,
        epoch_steps=epoch_steps,
        begin=begin,
        workers=0,
    )
    elsewhere = {} if flags["device"] == "cpu" else {"device": "a GPU each", "sdpa": None}
    yield from describe(start | elsewhere)
    patches = vit.patch_count(config, flags["img_size"])
    loader = data.build_loader(
        files,
        img_size=flags["img_size"],
        patches=patches,
        seed=flags["seed"],
        global_batch=flags["global_batch"],
        local_batch=flags["batch"],
        steps=range(begin, chosen["steps"]),
        world_size=ranks.world_size,
        workers=flags["workers"] or 0,
    )
    yield from first_samples(loader, flags["workers"])

    why_not, simulation = unsimulated(flags["mode"], flags["fsdp"], flags["run"]), None
    if why_not is None:
        grid, side = mesh.build_mesh(shape, CPU), flags["img_size"]
        pixels, noise = (flags["batch"], 3, side, side), (flags["batch"], patches)
        check = agreement.StepGuard  # made in the simulation: its tensors must be fake too
        simulation = simulate(
            grid,
            lambda: build(blank(), grid, seed=None, compile_blocks=False),
            gradients,
            lambda model, optimizer, *rest: update(model, optimizer, check(CPU), *rest),
            [(pixels, torch.uint8), (noise, torch.float32)],
            flags["accum"],
        )
    yield why_not or "one step of rank 0, simulated" + ", without --compile" * flags["compile"]
    yield from report(simulation, plan, shape, flags["cpu_offload"])


# ---------------------------------------------------------------------------------------------
# Fake ranks


def fake_ranks(world_size: int, environ: Mapping[str, str]) -> mesh.Ranks:
    """Make rank 0 of so many, on nodes of LOCAL_WORLD_SIZE (set by launch_frontier.sh) or 8."""
    on_node = MACHINES["frontier"].ranks_per_node
    if "LOCAL_WORLD_SIZE" in environ:
        (on_node,) = mesh.read_integers(environ, ["LOCAL_WORLD_SIZE"], "launch_frontier.sh", low=1)
    on_node = min(on_node, world_size)
    return mesh.Ranks(0, world_size, 0, on_node, 0, "dry run", {})


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a fake default process group, which sends nothing."""
    _, _, fake_store = private_parts()
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_folder(path: str) -> None:
    """Raise the OSError that a run would get from writing below `path`, without writing."""
    there = Path(path).absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        code = errno.ENOTDIR if there != Path(path).absolute() else errno.EEXIST
        raise OSError(code, os.strerror(code), path)
    if not os.access(there, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)


def first_samples(loader: DataLoader[Any], workers: int | None) -> Iterator[str]:
    """Describe what rank 0 reads first from the loader, and with how many workers."""
    sampler, images = loader.batch_sampler, cast(Any, loader.dataset)
    first = next(iter(sampler), None) if sampler else None
    if first is None:
        yield "no step is left to do"
        return
    path = f", {images.files.path(first[0][1])}" if images.files else ""
    count = "its CPU cores less one, at most 6," if workers is None else workers
    numbers = f"{first[0][0]} to {first[-1][0]}"
    yield f"rank 0 reads the samples {numbers} first{path}; {count} loader workers"


def unsimulated(mode: str, fsdp: int | None, run: str) -> str | None:
    """Say why the step of this mode, engine and --run is not simulated; None where it is."""
    if run == "io":
        return "--run io: no model, no step"
    if shard.STRATEGIES[mode].fsdp1 is None or fsdp == 1:
        engine = f"--mode {mode}" if fsdp is None else "--fsdp 1"
        return f"{engine}: flags, mesh and batch are checked, but only an FSDP2 step is simulated"
    return None


# ---------------------------------------------------------------------------------------------
# One step


@dataclass(frozen=True)
class Simulation:
    """The result of one simulated step of rank 0."""

    peak: dict[str, int]  # bytes by the tracker's categories, at the peak
    after: dict[str, int]  # the same after backward
    collectives: list[Collective]  # in their order


def simulate(
    grid: DeviceMesh,
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer, Any]],
    gradients: Callable[..., Tensor],
    update: Callable[..., Tensor],
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    accum: int,
) -> Simulation:
    """Run one step on fake tensors, inside `fake_world`.

    `build()` -> (model wrapped over `grid`, optimizer, scaler); `gradients(model, scaler, batches)`
    -> loss is forward and backward, `update(model, optimizer, scaler, loss)` the rest of the step.
    `shapes`: (shape, dtype) of each tensor of one accumulation step.
    """
    fake_tensor_mode, _, _ = private_parts()
    found: list[Collective] = []
    with fake_tensor_mode():
        model, optimizer, scaler = build()
        batches = [tuple(torch.empty(s, dtype=t) for s, t in shapes) for _ in range(accum)]
        with counting(grid, found):
            tracker = memory_tracker(model)
            tracker.track_inputs(tuple(batches))
            with tracker:
                # without a reset the tracker refuses a second forward pass
                reset = model.register_forward_pre_hook(
                    lambda *_: tracker.reset_mod_stats(), prepend=True
                )
                loss = gradients(model, scaler, batches)
                reset.remove()
                after = _snapshot(tracker, "current")
            # Not tracked: under DTensor the tracker counts full tensors of which only the shape is
            # used. Not stepped: AdamW's fused step takes no memory except its states, which exist
            # from the second step on.
            optimizer.step = lambda *_: None  # type: ignore[assignment, method-assign]
            update(model, optimizer, scaler, loss)
        states = {"OptState": optimizer_bytes(model)}
    return Simulation(_snapshot(tracker, "peak") | states, after | states, found)


def memory_tracker(model: nn.Module) -> Any:
    """Build PyTorch's tracker of memory by category, for units of several blocks.

    PyTorch's own hooks every block of a unit, which would then be gathered and freed with every
    block. Here the hooks are on the first block, the one after forward on the last.
    """
    _, fsdp_tracker, _ = private_parts()

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
    shape: tuple[int, int],
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
        yield from _collective_lines(simulation.collectives, shape)
    if plan:
        yield from _planned_lines(plan, simulation)


def row_gib(memory: Mapping[str, int]) -> dict[str, float]:
    """Convert bytes by category -> GiB by category, by row of the table, and of all."""
    gib = {name: memory.get(name, 0) / GIB for names in TABLE_ROWS.values() for name in names}
    rows = {row: sum(gib[name] for name in names) for row, names in TABLE_ROWS.items()}
    return gib | rows | {"all": sum(gib.values())}


def _collective_lines(collectives: Sequence[Collective], shape: tuple[int, int]) -> Iterator[str]:
    sizes = {"replicate": shape[0], "shard": shape[1], "world": shape[0] * shape[1]}
    counts = Counter((c.kind, c.group) for c in collectives)
    heads = f"{'in groups of':>18}{'count':>8}{'GiB of full tensors':>24}"
    yield f"{'collectives per step':26}{heads}"
    for (kind, group), count in sorted(counts.items()):
        size = sum(c.size for c in collectives if (c.kind, c.group) == (kind, group))
        yield f"  {kind:18}{f'{group}, {sizes[group]}':>24}{count:8}{size / GIB:24.6f}"


def _planned_lines(plan: Mapping[str, Any], simulation: Simulation | None) -> Iterator[str]:
    found = simulation.collectives if simulation else []
    for kind in dict.fromkeys([*plan["payload_bytes"], *(c.kind for c in found)]):  # each once
        size, count = plan["payload_bytes"].get(kind, 0), plan["collectives"].get(kind, 0)
        text = f"  {kind}: planned {count} of {size:,} bytes"
        if simulation:
            sizes = [c.size for c in found if c.kind == kind]
            text += f", simulated {len(sizes)} of {sum(sizes):,}"
        yield text
