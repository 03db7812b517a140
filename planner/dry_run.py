"""The command of a job, stepped once by one CPU process that plays its rank 0, before it is queued.

    python train_fsdp.py --model 15b --mode hybrid --group 4 --dry-run --world-size 512

The ranks are a process group that sends nothing, the tensors have shapes but no memory; flags,
mesh, wrapping and step are those of the real run. What that shows is what a rank holds at its peak
and every collective it takes part in. Only FSDP2 runs so: the step of other engines is left out.

All that is private in PyTorch stands in `private_parts`, so that the next version breaks one place.
"""

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import data
import mesh
import shard
import vit
from runtime import agreement, image_source
from runtime.assemble import build_meta_model, completed, planned, start_record
from runtime.comm_counter import Collective, Unsupported, counting
from runtime.flags import print_error
from runtime.log import describe
from runtime.resume import candidates, resume

RANKS_PER_NODE = 8  # of Frontier (GCDs) and of DGX machines
CPU = torch.device("cpu")  # a fake GPU would need a driver; shapes and bytes are the same

# Rows of the table of memory: the tracker's categories and plan.py's parts that belong to each.
# Every category and every part stands in one row, so that the rows add up to the last.
PARTS = {
    "parameters": ("Sharded Param",),
    "gradients": ("Sharded Grad",),
    "optimizer": ("OptState",),
    "unsharded": ("Unsharded Param", "All Gather", "Unsharded Grad", "Reduce Scatter"),
    "activations": ("Activation", "Temp", "Buffer", "Inputs"),
    "workspace": (),  # of a GPU's libraries
}
PLANNED_PARTS = {"unsharded": ("unsharded", "reduction"), "activations": ("activations", "inputs")}
ON_HOST = ("parameters", "gradients", "optimizer")  # with --cpu-offload


def private_parts() -> SimpleNamespace:
    """The classes of PyTorch used here that have no public name; Unsupported where one is gone."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise Unsupported(
            f"--dry-run uses parts of PyTorch that are not public, and torch {torch.__version__} "
            f"has not all of them ({error}): it was written for torch 2.10 to 2.15"
        ) from None
    return SimpleNamespace(
        FakeTensorMode=FakeTensorMode,
        FSDPMemTracker=FSDPMemTracker,
        FSDPRefType=_FSDPRefType,
        FakeStore=FakeStore,
    )


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
    """The same command up to one step without numbers; prints a plan, trains and writes nothing.

    `build(model, grid)` as assemble.spread; `gradients` and `update` are the two halves of
    train_fsdp.py's step. Returns the exit status.
    """
    try:
        with pretended_world(ranks.world_size):
            for line in rehearse(flags, config, ranks, shape, lr, build, gradients, update):
                print(line, flush=True)
    except (ValueError, OSError, Unsupported) as error:
        print_error(str(error))
        return 1 if isinstance(error, Unsupported) else 2
    return 0


def rehearse(
    flags: dict[str, Any],
    config: vit.ViTConfig,
    ranks: mesh.Ranks,
    shape: tuple[int, int],
    lr: float,
    build: Callable[..., Any],
    gradients: Callable[..., Tensor],
    update: Callable[..., Tensor],
) -> Iterator[str]:
    """Lines that tell what a real run would be: in the order of `main`, and with its errors."""
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
# Pretended ranks


def fake_ranks(world_size: int, environ: Mapping[str, str]) -> mesh.Ranks:
    """Rank 0 of so many, which fill nodes of LOCAL_WORLD_SIZE (8); launch_frontier.sh sets it."""
    on_node = RANKS_PER_NODE
    if "LOCAL_WORLD_SIZE" in environ:
        (on_node,) = mesh.whole_numbers(environ, ["LOCAL_WORLD_SIZE"], "launch_frontier.sh", low=1)
    on_node = min(on_node, world_size)
    return mesh.Ranks(0, world_size, 0, on_node, 0, "dry run", {})


@contextmanager
def pretended_world(world_size: int) -> Iterator[None]:
    """A default process group of so many ranks, of which this is the first; it sends nothing."""
    parts = private_parts()
    dist.init_process_group("fake", store=parts.FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_folder(path: str) -> None:
    """The OSError that a run would meet which wants to write below `path`, without writing."""
    there = Path(path).absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        code = errno.ENOTDIR if there != Path(path).absolute() else errno.EEXIST
        raise OSError(code, os.strerror(code), path)
    if not os.access(there, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)


def first_samples(loader: DataLoader[Any], workers: int | None) -> Iterator[str]:
    """Lines on what rank 0 reads first, of a loader of train_fsdp.py, and with how many workers."""
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
    """Why the step of this mode, engine and --run is not simulated; None where it can be."""
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
    """What one step of rank 0 showed."""

    peak: dict[str, int]  # bytes by the tracker's categories, at the peak
    after: dict[str, int]  # the same when backward has ended
    collectives: list[Collective]  # in their order


def simulate(
    grid: DeviceMesh,
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer, Any]],
    gradients: Callable[..., Tensor],
    update: Callable[..., Tensor],
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    accum: int,
) -> Simulation:
    """One step on fake tensors, in a pretended world.

    `build()` -> (model wrapped over `grid`, optimizer, scaler); `gradients(model, scaler, batches)`
    -> loss is forward and backward, `update(model, optimizer, scaler, loss)` all that follows.
    `shapes`: (shape, dtype) of each tensor of one accumulation step.
    """
    parts, found = private_parts(), list[Collective]()
    with parts.FakeTensorMode():
        model, optimizer, scaler = build()
        batches = [tuple(torch.empty(s, dtype=t) for s, t in shapes) for _ in range(accum)]
        with counting(grid, found):
            tracker = _tracker(model)
            tracker.track_inputs(tuple(batches))
            with tracker:
                # it takes a second forward pass for a mistake, unless it forgets the first
                forget = model.register_forward_pre_hook(
                    lambda *_: tracker.reset_mod_stats(), prepend=True
                )
                loss = gradients(model, scaler, batches)
                forget.remove()
                after = _snapshot(tracker, "current")
            # Not tracked, because under DTensor the tracker counts whole tensors that only their
            # shapes are taken of; and not stepped, because AdamW's fused step takes no memory but
            # its states, which are there from the second step on.
            optimizer.step = lambda *_: None  # type: ignore[assignment, method-assign]
            update(model, optimizer, scaler, loss)
        states = {"OptState": optimizer_bytes(model)}
    return Simulation(_snapshot(tracker, "peak") | states, after | states, found)


def _tracker(model: nn.Module) -> Any:
    """PyTorch's tracker of memory by category, for units of several blocks too.

    And without its peaks of every module: twice as fast. For one forward and backward pass.
    """

    class Tracker(private_parts().FSDPMemTracker):  # type: ignore[misc]
        memory_tracking: Any

        def _instrument_fsdp_module(self) -> None:
            # As in torch, where every block of a unit would gather and free it: here the unit is
            # gathered before its first block and freed after its last.
            states = {
                id(m._get_fsdp_state()): m for m in model.modules() if isinstance(m, FSDPModule)
            }
            for module in states.values():
                state = cast(Any, module._get_fsdp_state())
                unit = state._fsdp_param_group
                if not unit:
                    continue
                self._instrument_fsdp_sharded_params_grads(unit)
                state._pre_forward_hook_handle.remove()
                state._post_forward_hook_handle.remove()
                state._modules[0].register_forward_pre_hook(
                    self._fsdp_state_pre_forward(module, state._pre_forward),
                    prepend=True,
                    with_kwargs=True,
                )
                state._modules[-1].register_forward_hook(
                    self._fsdp_state_post_forward(module, state._post_forward), always_call=True
                )
                unit.pre_backward = self._fsdp_param_group_pre_backward(module, unit.pre_backward)
                unit.post_backward = self._fsdp_param_group_post_backward(
                    module, unit.post_backward
                )
            for buffer in model.buffers():
                self._update_and_maybe_create_winfos(buffer, private_parts().FSDPRefType.BUFFER)

        def _update_peak_stats(self, peak_state: Any) -> None:
            modules, self.memory_tracking = self.memory_tracking, {}
            super()._update_peak_stats(peak_state)
            self.memory_tracking = modules

    return Tracker(model)


def _snapshot(tracker: Any, which: str) -> dict[str, int]:
    """Bytes by category, "current" or "peak"; of the one device there is."""
    (found,) = tracker.get_tracker_snapshot(which).values()
    return {category.value: size for category, size in found.items() if category != "Total"}


def optimizer_bytes(model: nn.Module) -> int:
    """Of AdamW on this rank: two moments for each value of its shards, a step for each tensor."""
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(2 * t.numel() * t.element_size() + 4 for t in tensors)


# ---------------------------------------------------------------------------------------------
# What is told


def report(
    simulation: Simulation | None,
    plan: Mapping[str, Any] | None,
    shape: tuple[int, int],
    cpu_offload: bool,
) -> Iterator[str]:
    """Lines for the terminal: memory by part, collectives; `plan` as plan.py's --json."""
    yield from _memory_lines(simulation, (plan or {}).get("memory_gib"))
    if simulation and cpu_offload:
        host = sum(part_of(simulation.peak, part) for part in ON_HOST)
        yield f"at the peak {host / 2**30:.3f} GiB of that, {', '.join(ON_HOST)}, are host memory"
    if simulation:
        yield from _collective_lines(simulation.collectives, shape)
    if plan:
        yield from _planned_lines(plan, simulation)


def part_of(memory: Mapping[str, int], name: str) -> int:
    """Bytes of one of PARTS, or of all: "peak"."""
    if name == "peak":
        return sum(memory.values())
    return sum(memory.get(category, 0) for category in PARTS[name])


def _memory_lines(simulation: Simulation | None, plan: Mapping[str, float] | None) -> Iterator[str]:
    """A row for each part, with its categories below; a column for each source there is."""
    moments = [simulation.peak, simulation.after] if simulation else []
    heads = ["at peak", "after backward"] * bool(simulation) + ["planned peak"] * bool(plan)
    if heads:
        yield f"{'memory of a rank, GiB':26}" + "".join(f"{head:>16}" for head in heads)
    for part in [*PARTS, "peak"] if heads else []:
        sizes = [part_of(moment, part) / 2**30 for moment in moments]
        sizes += [sum(plan[name] for name in PLANNED_PARTS.get(part, (part,)))] if plan else []
        label = "all" if part == "peak" else part
        yield f"  {label:24}" + "".join(f"{size:16.3f}" for size in sizes)
        categories = PARTS.get(part, ())
        for category in categories if moments and len(categories) > 1 else ():
            cells = [f"{moment.get(category, 0) / 2**30:16.3f}" for moment in moments]
            yield f"    {category.lower():22}" + "".join(cells)


def _collective_lines(collectives: Sequence[Collective], shape: tuple[int, int]) -> Iterator[str]:
    sizes = {"replicate": shape[0], "shard": shape[1], "world": shape[0] * shape[1]}
    counts = Counter((c.kind, c.group) for c in collectives)
    heads = f"{'in groups of':>18}{'count':>8}{'GiB of whole tensors':>24}"
    yield f"{'collectives of a step':26}{heads}"
    for (kind, group), count in sorted(counts.items()):
        size = sum(c.size for c in collectives if (c.kind, c.group) == (kind, group))
        yield f"  {kind:18}{f'{group}, {sizes[group]}':>24}{count:8}{size / 2**30:24.6f}"


def _planned_lines(plan: Mapping[str, Any], simulation: Simulation | None) -> Iterator[str]:
    found = simulation.collectives if simulation else []
    kinds = chain(plan["payload_bytes"], (c.kind for c in found))
    for kind in dict.fromkeys(kinds):  # each once, in this order
        size, count = plan["payload_bytes"].get(kind, 0), plan["collectives"].get(kind, 0)
        text = f"  {kind}: planned {count} of {size:,} bytes"
        if simulation:
            mine = [c.size for c in found if c.kind == kind]
            text += f", simulated {len(mine)} of {sum(mine):,}"
        yield text
