"""Where the time of a step goes: some steps under PyTorch's profiler, as a trace and a table.

`Window` wraps the two things a training loop calls, the iterator of batches and the step, and does
nothing before its first step and after its last. Each chosen rank leaves a trace in `folder` (for
https://ui.perfetto.dev or chrome://tracing) and, on a GPU, a snapshot of its memory (for
https://pytorch.org/memory_viz). The table is read from the traces by `shares`: every moment of the
window belongs to one kind, so the kinds add up to the step.

    optimizer      a kernel (CPU: an operator) runs inside the optimizer's step
    compute        another one runs
    communication  none runs, a collective does: communication that is exposed
    data           none of these, and the loop waits for its next batch
    idle           nothing of all that: a GPU waits for Python, a CPU runs it

Copy this one file: it needs torch alone.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

T = TypeVar("T")
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
    """The same time without overlaps, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def common(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """The time that is in both; two results of `union`."""
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
    """How long a result of `union` is."""
    return sum(end - start for start, end in intervals)


# ---------------------------------------------------------------------------------------------
# Reading a trace


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file that have a duration."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [e for e in events if e.get("ph") == "X" and "dur" in e]


def is_collective(event: dict[str, Any]) -> bool:
    """Whether it is a collective at work: NCCL's or RCCL's kernel, gloo's thread."""
    name = event["name"]
    if event.get("cat") == "kernel":
        return name.startswith(("ncclDevKernel", "ncclKernel", "rccl", "mscclKernel"))
    return name.startswith("gloo:")


def shares(events: Sequence[dict[str, Any]], steps: int) -> dict[str, float]:
    """Seconds a step of each kind, from the trace of a window of so many steps; see above.

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
    """(name, seconds a step) of each GPU kernel or CPU operator, longest first.

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


class Window:
    """Profiles steps `first` to `first + steps - 1` on this rank, if it is one of those chosen.

    `report(found)` is called on every rank when the window closes, with `shares` of this rank, None
    where it was not chosen, or a sentence where its trace could not be written or read.
    """

    def __init__(
        self,
        *,
        first: int,
        steps: int,
        rank: int,
        ranks: Sequence[int],
        device: torch.device,
        folder: str,
        report: Callable[[dict[str, float] | str | None], None],
    ) -> None:
        self.first, self.steps, self.rank, self.report = first, steps, rank, report
        self.chosen, self.device, self.folder = rank in ranks, device, Path(folder)
        self.profiler: profile | None = None

    def batches(self, batches: Iterator[T], begin: int) -> Iterator[T]:
        """The same batches, of step `begin` and on; opens the window, and names the waiting."""
        step = begin
        while True:
            if step == self.first - 1 and self.chosen:
                self._open()
            with record_function(DATA):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch
            step += 1

    def train(self, train: Callable[..., T]) -> Callable[..., T]:
        """The same step; closes the window after the last one."""

        def train_and_look(*args: Any, step: int, **rest: Any) -> T:
            result = train(*args, step=step, **rest)
            if self.profiler and self.first - 1 <= step < self.first + self.steps:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # nothing of a step is outside
                self.profiler.step()
            if step == self.first + self.steps - 1:
                self.report(self._close() if self.chosen else None)
            return result

        return train_and_look

    def _open(self) -> None:
        """One step before the first: the profiler itself is slow when it begins."""
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
        except (OSError, ValueError, RuntimeError) as error:  # a full disk: training goes on
            return f"{type(error).__name__}: {error}"
        finally:
            self.profiler = None

    def _write(self) -> dict[str, float]:
        assert self.profiler is not None
        self.profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank_{self.rank:05d}.json.gz"
        self.profiler.export_chrome_trace(str(path))
        if self.device.type == "cuda":
            snapshot = self.folder / f"memory_{self.rank:05d}.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
        return shares(read_trace(path), self.steps)


def table(found: dict[int, dict[str, float]], first: int) -> list[str]:
    """Seconds a step and share of each kind, a line for each rank."""
    titles = {
        "compute": "compute",
        "communication": "exposed comm.",
        "optimizer": "optimizer",
        "data": "data wait",
        "idle": "idle",
    }
    lines = [f"profile from step {first + 1}: seconds a step, and share"]
    lines.append("        " + "".join(f"{titles[kind]:>17}" for kind in KINDS) + f"{'step':>9}")
    for rank, seconds in sorted(found.items()):
        whole = sum(seconds.values())
        cells = "".join(f"{seconds[kind]:10.4f} {seconds[kind] / whole:6.1%}" for kind in KINDS)
        lines.append(f"rank {rank:3}{cells}{whole:9.4f}")
    return lines
