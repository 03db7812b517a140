"""--profile: some steps of rank 0 under PyTorch's profiler, and where their time goes.

`RunProfile` leaves in OUT/profile a trace (for https://ui.perfetto.dev or chrome://tracing).
`shares` reads from it where the time goes: every moment belongs to one kind, so the kinds add up to
the step.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.profiler import profile, schedule

from runtime.log import Meter
from runtime.run import Run
from runtime.session import Session

WARM = 5  # steps before those in the trace: blocks are compiled, memory settles
KINDS = ("compute", "communication", "optimizer", "data", "idle")
DATA, OPTIMIZER = "wait for data", "Optimizer.step#"  # names of ranges; the latter is PyTorch's own
COLLECTIVES = ("ncclDevKernel", "ncclKernel", "rccl", "mscclKernel", "gloo:")  # at work
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Operators that compute, on a CPU: what wraps them (autograd's functions, hooks) may also wait.
CPU_WORK = ("aten::", "mkldnn::", "vit_mae::", "fsdp::", "CompiledFunction", "## Call Compiled")


class RunProfile:
    """Profile some steps of this process; the loop calls `step` after each of its steps."""

    def __init__(self, run: Run, session: Session, meter: Meter) -> None:
        """Start the profiler's schedule; the meter's clock stops while it starts and writes."""
        self.log, self.meter, self.begin = session.log, meter, meter.begin
        self.path = Path(run.config.out, "profile", "rank_00000.json.gz")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints lines of its own
        if meter.begin + WARM >= run.steps:
            self.log.warn("--profile: too few steps are left")
        # in the step before the first it is slow: it begins
        plan = schedule(wait=WARM - 1, warmup=1, active=run.config.profile or 1, repeat=1)
        self.profiler = profile(schedule=plan, on_trace_ready=self._write, acc_events=True)
        self.profiler.start()
        atexit.register(self.profiler.stop)  # a run that ends while it records would crash

    def step(self) -> None:
        """End one step, its wait for data included."""
        with self.meter.paused():
            self.profiler.step()

    def _write(self, profiler: profile) -> None:
        try:
            self.path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self.path))
            found = shares(read_trace(self.path))
        except (OSError, ValueError, RuntimeError) as error:  # a full disk: training continues
            self.log.warn(f"no profile: {type(error).__name__}: {error}")
            return
        first, total = self.begin + WARM + 1, sum(found.values())
        self.log.write("profile", first_step=first, **found)
        shown = ", ".join(f"{kind} {s:.4f} ({s / total:.1%})" for kind, s in found.items())
        self.log.say(f"profile from step {first}, in {self.path}; seconds per step: {shown}")


# --- Where the time goes


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace file that have a duration."""
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if "dur" in event]


def shares(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Compute seconds per step of each kind from the trace of some steps; see above.

    Their time begins with the first wait for data and ends with the last event that counts.
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

    spans = [(e["ts"], e["ts"] + e["dur"], what) for e in events if (what := role(e))]
    edges = sorted(edge for a, b, what in spans for edge in ((a, 1, what), (b, -1, what)))
    waits = [start for start, _, what in spans if what == "data"]  # one in each step
    now, found, running = min(waits), dict.fromkeys(KINDS, 0.0), Counter[str]()
    for moment, change, what in edges:
        if running["work"]:
            kind = "optimizer" if running["update"] else "compute"
        else:
            kind = next((k for k in ("communication", "data") if running[k]), "idle")
        found[kind] += max(0, moment - now)
        now = max(now, moment)
        running[what] += change
    return {kind: microseconds / 1e6 / len(waits) for kind, microseconds in found.items()}
