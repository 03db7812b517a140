"""Where the time of a step goes: some steps under PyTorch's profiler, as a trace and a table.

`StepProfile` surrounds each step of a training loop and does nothing before its first step and
after its last. It leaves a trace in `folder` (for https://ui.perfetto.dev or chrome://tracing) and,
on a GPU, a snapshot of its memory (for https://pytorch.org/memory_viz). The table is read from the
trace by `shares`: every moment of the window belongs to one kind, so the kinds add up to the step.

    optimizer      a kernel (CPU: an operator) runs inside the optimizer's step
    compute        another one runs
    communication  none runs, a collective does: communication that is exposed
    data           none of these, and the loop waits for its next batch
    idle           nothing of these: a GPU waits for Python, a CPU runs it

Copy this one file: it needs torch alone. The loop names its wait for data by `record_function`.
"""

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._pytree import tree_leaves

from runtime.log import Log
from runtime.run import Run

KINDS = ("compute", "communication", "optimizer", "data", "idle")

WARM = 5  # steps before the window: DDP builds its buckets, blocks are compiled, memory settles

DATA, OPTIMIZER = "wait for data", "Optimizer.step#"  # names of ranges; the latter is PyTorch's own

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

# Operators that compute, on a CPU: what wraps them (autograd's functions, hooks) may also wait.
CPU_WORK = ("aten::", "mkldnn::", "vit_mae::", "fsdp::", "CompiledFunction", "## Call Compiled")


Interval = tuple[float, float]  # from, to


# ---------------------------------------------------------------------------------------------
# Intervals of time


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap; return them in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def common(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Intersect two results of `union`."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: list[Interval]) -> float:
    """Add up a result of `union`."""
    return sum(end - start for start, end in intervals)


# ---------------------------------------------------------------------------------------------
# Reading a trace


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace file that have a duration."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [e for e in events if e.get("ph") == "X" and "dur" in e]


def is_collective(event: dict[str, Any]) -> bool:
    """Tell whether an event is a collective at work: NCCL's or RCCL's kernel, gloo's thread."""
    name = event["name"]
    if event.get("cat") == "kernel":
        return name.startswith(("ncclDevKernel", "ncclKernel", "rccl", "mscclKernel"))
    return name.startswith("gloo:")


def shares(events: Sequence[dict[str, Any]], steps: int) -> dict[str, float]:
    """Compute seconds per step of each kind from the trace of a window of `steps`; see above.

    The window begins with the first wait for data and ends with the last event.
    """

    def times(chosen: Iterable[dict[str, Any]]) -> list[Interval]:
        return union((e["ts"], e["ts"] + e["dur"]) for e in chosen)

    gpu = any(e.get("cat") == "kernel" for e in events)
    waiting = times(e for e in events if e["name"] == DATA and e.get("cat") == "user_annotation")
    place = "gpu_user_annotation" if gpu else "user_annotation"
    updates = times(e for e in events if e["name"].startswith(OPTIMIZER) and e.get("cat") == place)
    collectives = times(e for e in events if is_collective(e))
    if gpu:
        work = times(e for e in events if e.get("cat") in GPU_WORK and not is_collective(e))
    else:
        work = times(e for e in events if e["name"].startswith(CPU_WORK))
    seen = union([*waiting, *updates, *collectives, *work])
    begin = waiting[0][0] if waiting else seen[0][0]
    window = [(begin, seen[-1][1])]

    found, taken = dict[str, float](), list[Interval]()
    for kind, when in (
        ("optimizer", common(work, updates)),
        ("compute", work),
        ("communication", collectives),
        ("data", waiting),
        ("idle", window),
    ):
        more = union([*taken, *common(when, window)])
        found[kind] = (length(more) - length(taken)) / 1e6 / steps  # of microseconds
        taken = more
    return {kind: found[kind] for kind in KINDS}


def by_kernel(events: Sequence[dict[str, Any]], steps: int) -> list[tuple[str, float]]:
    """Rank GPU kernels or CPU operators by (name, seconds per step), longest first.

    An operator without what it calls; kernels that run at the same time count each.
    """
    gpu = any(e.get("cat") == "kernel" for e in events)
    total: dict[str, float] = {}
    if gpu:
        for e in events:
            if e.get("cat") in GPU_WORK:
                total[e["name"]] = total.get(e["name"], 0.0) + e["dur"]
    else:
        open_: dict[Any, list[dict[str, Any]]] = {}
        chosen = [e for e in events if e["name"].startswith(CPU_WORK)]
        for e in sorted(chosen, key=lambda e: (e["ts"], -e["dur"])):
            stack = open_.setdefault(e["tid"], [])
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= e["ts"]:
                stack.pop()
            if stack:
                total[stack[-1]["name"]] -= e["dur"]
            total[e["name"]] = total.get(e["name"], 0.0) + e["dur"]
            stack.append(e)
    ranked = sorted(total.items(), key=lambda item: -item[1])
    return [(name, microseconds / 1e6 / steps) for name, microseconds in ranked]


# ---------------------------------------------------------------------------------------------
# The window


class StepProfile:
    """Profile steps `first` to `first + steps - 1` of this rank, and count one step's collectives.

    The loop runs each step inside `with profile.step(step):`.
    """

    def __init__(
        self,
        begin: int,
        steps: int,
        device: torch.device,
        folder: str,
        count: Callable[[], AbstractContextManager],
        report: Callable[[dict[str, float] | str], None],
    ) -> None:
        """Count at the third step of a process that begins at `begin`, profile from the sixth on.

        `count()` is entered around one step before the window: by then DDP's buckets are final.
        `report(found)` is called when the window closes, with `shares` of the trace, or an error
        message where it could not be written or read.
        """
        self.first, self.steps, self.device, self.folder = begin + WARM, steps, device, Path(folder)
        self.count_at, self.count, self.report = begin + 2, count, report
        self.profiler: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surround one step, its wait for data included."""
        if step == self.first - 1:
            self._open()
        with self.count() if step == self.count_at else nullcontext():
            yield
        if self.profiler:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # all of the step's kernels are inside
            self.profiler.step()
        if step == self.first + self.steps - 1:
            self.report(self._close())

    def _open(self) -> None:
        """Start one step before the first: the profiler itself is slow when it begins."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        plan = schedule(wait=0, warmup=1, active=self.steps, repeat=1)
        self.profiler = profile(activities=activities, schedule=plan, acc_events=True)
        self.profiler.start()

    def _close(self) -> dict[str, float] | str:
        try:
            return self._write()
        except (OSError, ValueError, RuntimeError) as error:  # a full disk: training continues
            return f"{type(error).__name__}: {error}"
        finally:
            self.profiler = None

    def _write(self) -> dict[str, float]:
        assert self.profiler is not None
        self.profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "rank_00000.json.gz"
        self.profiler.export_chrome_trace(str(path))
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory_00000.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        return shares(read_trace(path), self.steps)


def table(seconds: dict[str, float], first: int) -> list[str]:
    """Format seconds per step and share of each kind, profiled on rank 0 from step `first` on."""
    titles = {
        "compute": "compute",
        "communication": "exposed comm.",
        "optimizer": "optimizer",
        "data": "data wait",
        "idle": "idle",
    }
    whole = sum(seconds.values())
    cells = "".join(f"{seconds[kind]:10.4f} {seconds[kind] / whole:6.1%}" for kind in KINDS)
    return [
        f"profile from step {first + 1}: seconds per step, and share",
        "        " + "".join(f"{titles[kind]:>17}" for kind in KINDS) + f"{'step':>9}",
        f"rank   0{cells}{whole:9.4f}",
    ]


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


class RunProfile:
    """Profile some steps of rank 0; `step(step)` surrounds each step of the loop."""

    def __init__(
        self, run: Run, log: Log, device: torch.device, grid: DeviceMesh, steps: range
    ) -> None:
        """`steps` are those that this process trains; too few of them are a warning."""
        self.run, self.log = run, log
        self.events: list[CommEvent] = []
        wanted = run.config.profile or 0
        self.profile = None
        if WARM + wanted > len(steps):
            log.warn(
                f"--profile {wanted} is left out: it needs {WARM + wanted} steps, "
                f"{len(steps)} remain"
            )
            return
        self.profile = StepProfile(
            steps.start,
            wanted,
            device,
            os.path.join(run.config.out, "profile"),
            count=partial(self._counting, grid),
            report=self._report,
        )

    def step(self, step: int) -> AbstractContextManager:
        """Surround one step of the loop."""
        return self.profile.step(step) if self.profile else nullcontext()

    def payload_bytes(self) -> dict[str, int] | None:
        """Return the bytes of whole tensors that a step sends, by kind of collective."""
        return payload(self.events, self.run.ranks_per_group)

    def _counting(self, grid: DeviceMesh) -> AbstractContextManager:
        try:
            return counting(grid, self.events)
        except Unsupported:
            return nullcontext()

    def _report(self, found: dict[str, float] | str) -> None:
        assert self.profile is not None
        if isinstance(found, str):
            self.log.warn(f"no profile: {found}")
            return
        whole, first = sum(found.values()), self.profile.first
        self.log.write(
            "profile",
            first_step=first + 1,
            steps=self.profile.steps,
            ranks=[0],
            **found,
            shares={kind: seconds / whole for kind, seconds in found.items()},
        )
        self.log.say_all(table(found, first))
