"""--profile: some steps of rank 0 under PyTorch's profiler, and the collectives of one step.

`RunProfile` leaves in OUT/profile a trace (for https://ui.perfetto.dev or chrome://tracing).
`shares` reads from it where the time goes: every moment of the window belongs to one kind, so the
kinds add up to the step.

    optimizer      a kernel (CPU: an operator) runs inside the optimizer's step
    compute        another one runs
    communication  none runs, a collective does: communication that is exposed
    data           none of these, and the loop waits for its next batch
    idle           nothing of these: a GPU waits for Python, a CPU runs it
"""

import atexit
import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import profile, schedule
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:  # tools that read a trace need none of these
    from runtime.log import Meter
    from runtime.run import Run
    from runtime.session import Session

COUNTED = 2  # steps before the one whose collectives are counted: DDP's buckets are final
WARM = 5  # steps before the window: blocks are compiled, memory settles
KINDS = ("compute", "communication", "optimizer", "data", "idle")
DATA, OPTIMIZER = "wait for data", "Optimizer.step#"  # names of ranges; the latter is PyTorch's own
COLLECTIVES = ("ncclDevKernel", "ncclKernel", "rccl", "mscclKernel", "gloo:")  # at work
COMM_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Operators that compute, on a CPU: what wraps them (autograd's functions, hooks) may also wait.
CPU_WORK = ("aten::", "mkldnn::", "vit_mae::", "fsdp::", "CompiledFunction", "## Call Compiled")

# ---------------------------------------------------------------------------------------------
# The window


class RunProfile:
    """Profile some steps of this process; `step(step)` surrounds each step of the loop."""

    def __init__(self, run: "Run", session: "Session", grid: DeviceMesh, meter: "Meter") -> None:
        """Wait for the window; the meter's clock stops while the profiler starts and writes."""
        self.run, self.log, self.device, self.grid = run, session.log, session.device, grid
        self.meter, self.counted, steps = meter, meter.begin + COUNTED, run.config.profile or 0
        self.sent: list[CommEvent] = []
        self.window = range(meter.begin + WARM, meter.begin + WARM + steps)
        if self.window.stop > run.steps:
            self.window = range(0)
            self.log.warn(f"--profile {steps} is left out: fewer than {WARM + steps} steps remain")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints lines of its own
        # in the step before the window it is slow: it begins
        plan = schedule(wait=WARM - 1, warmup=1, active=max(steps, 1), repeat=1)
        self.profiler = profile(schedule=plan, acc_events=True)
        if self.window:
            self.profiler.start()
            atexit.register(self.profiler.stop)  # a run that ends within the window would crash

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surround one step, its wait for data included."""
        with counting(self.grid, self.sent) if step == self.counted else nullcontext():
            yield
        if self.window and step <= self.window[-1]:
            if step in self.window and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # all of the step's kernels are inside
            with self.meter.paused():
                self.profiler.step()
                if step == self.window[-1]:
                    self._write()

    def payload_bytes(self) -> dict[str, int] | None:
        """Return the bytes of whole tensors that a step sends, by kind of collective."""
        return payload(self.sent, self.run.ranks_per_group)

    def _write(self) -> None:
        first, steps = self.window.start, len(self.window)
        path = Path(self.run.config.out, "profile", "rank_00000.json.gz")
        try:
            self.profiler.stop()
            path.parent.mkdir(exist_ok=True)
            self.profiler.export_chrome_trace(str(path))
            found = shares(read_trace(path), steps)
        except (OSError, ValueError, RuntimeError) as error:  # a full disk: training continues
            self.log.warn(f"no profile: {type(error).__name__}: {error}")
            return
        parts = {kind: seconds / sum(found.values()) for kind, seconds in found.items()}
        self.log.write("profile", first_step=first + 1, steps=steps, **found, shares=parts)
        shown = ", ".join(f"{kind} {found[kind]:.4f} ({parts[kind]:.1%})" for kind in KINDS)
        self.log.say(f"profile from step {first + 1}, seconds per step: {shown}")


# ---------------------------------------------------------------------------------------------
# Where the time goes


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace file that have a duration."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [e for e in events if e.get("ph") == "X" and "dur" in e]


def shares(events: Sequence[dict[str, Any]], steps: int) -> dict[str, float]:
    """Compute seconds per step of each kind from the trace of a window of `steps`; see above.

    The window begins with the first wait for data and ends with the last event that counts.
    """
    gpu = any(e.get("cat") == "kernel" for e in events)
    place = "gpu_user_annotation" if gpu else "user_annotation"

    def role(event: dict[str, Any]) -> str | None:
        name, category = event["name"], event.get("cat")
        if name == DATA and category == "user_annotation":
            return "data"
        if name.startswith(OPTIMIZER) and category == place:
            return "update"
        if name.startswith(COLLECTIVES):
            return "communication"
        return "work" if (category in GPU_WORK if gpu else name.startswith(CPU_WORK)) else None

    spans = [(e["ts"], e["ts"] + e["dur"], role(e)) for e in events]
    starts = [(start, 1, what) for start, _, what in spans if what]
    edges = sorted(starts + [(end, -1, what) for _, end, what in spans if what])
    now = min(start for start, _, what in starts if what == "data")
    found, running = dict.fromkeys(KINDS, 0.0), Counter[str]()
    for moment, change, what in edges:
        if running["work"]:
            kind = "optimizer" if running["update"] else "compute"
        else:
            kind = next((k for k in ("communication", "data") if running[k]), "idle")
        found[kind] += max(0, moment - now)
        now = max(now, moment)
        running[what] += change
    return {kind: microseconds / 1e6 / steps for kind, microseconds in found.items()}


# ---------------------------------------------------------------------------------------------
# What a step sends


class CommEvent(NamedTuple):
    """One collective of one rank."""

    kind: str  # one of COMM_KINDS
    group: str  # a dimension of the mesh: "shard", "replicate", "tp"; or "world"
    size: int  # bytes of the whole tensor: after an all-gather, before a reduce-scatter


def counting(grid: DeviceMesh, found: list[CommEvent]) -> Any:
    """Make a context that adds every collective of this process to `found`."""
    from torch.utils._python_dispatch import TorchDispatchMode  # private: not above

    names = reversed(grid.mesh_dim_names or ())
    groups = {str(grid.get_group(name).group_name): name for name in names}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, given: Any = (), named: Any = None
        ) -> Any:
            if DTensor in types:
                return NotImplemented  # comes back as plain local tensors
            result = func(*given, **(named or {}))
            if kind := kind_of(func):
                leaves = [tree_leaves(argument) for argument in [*given, result]]
                sizes = [sum(t.nbytes for t in some if isinstance(t, Tensor)) for some in leaves]
                group = groups.get(_group_name(given), "world")
                found.append(CommEvent(kind, group, max(sizes)))  # the whole tensor is the larger
            return result

    return Counting()


def payload(found: Sequence[CommEvent], sizes: Mapping[str, int]) -> dict[str, int] | None:
    """Sum the bytes by kind, in groups of more than one rank by their `sizes`; None if of none."""
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
    return next((kind for kind in COMM_KINDS if name.startswith(kind.replace("_", ""))), None)


def _group_name(given: Sequence[Any]) -> str:
    for argument in given:
        if isinstance(argument, torch.ScriptObject):  # a process group
            return str(dist.ProcessGroup.unbox(argument).group_name)
    return [argument for argument in given if isinstance(argument, str)][-1]  # or its name
