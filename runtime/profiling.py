"""The profile of a few steps: --profile."""

import atexit
import gzip
import json
import os
from pathlib import Path

from torch.profiler import profile, schedule

from runtime.log import Meter
from runtime.run import Run
from runtime.session import Session

WARM = 5  # steps before those profiled: blocks are compiled, memory settles


class RunProfile:
    """Profile some steps of this process; the loop calls `step` after each of its steps."""

    def __init__(self, run: Run, session: Session, meter: Meter, steps: int) -> None:
        """Start a schedule of so many steps; the meter's clock stops while the profiler writes."""
        self.log = session.log
        self.meter = meter
        self.first_step = meter.begin + WARM + 1
        folder = Path(run.config.out, "profile")
        self.trace = folder / "rank_00000.json.gz"
        self.table = folder / "rank_00000.txt"
        self.sort_by = "self_device_time_total"
        if session.device.type == "cpu":
            self.sort_by = "self_cpu_time_total"
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # keeps the profiler from printing lines
        # the step before the first is its warm-up, because the profiler is slow when it begins
        plan = schedule(wait=WARM - 1, warmup=1, active=steps, repeat=1)
        self.profiler = profile(schedule=plan, on_trace_ready=self._write, acc_events=True)
        self.profiler.start()
        atexit.register(self.profiler.stop)  # a run that ends while it records would crash

    def step(self) -> None:
        """End one step, its wait for data included."""
        with self.meter.paused():
            self.profiler.step()

    def _write(self, profiler: profile) -> None:
        """Write a trace, for https://ui.perfetto.dev, and a table of the slowest operators."""
        try:
            self.trace.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self.trace))
            with gzip.open(self.trace) as file:
                json.load(file)  # PyTorch says nothing of a full disk
            averages = profiler.key_averages()
            self.table.write_text(averages.table(sort_by=self.sort_by, row_limit=20))
        except (OSError, ValueError, RuntimeError) as error:  # a full disk: training continues
            self.log.warn(f"no profile: {type(error).__name__}: {error}")
            return
        self.log.write("profile", first_step=self.first_step)
        self.log.say(f"profile from step {self.first_step}, in {self.trace} and {self.table}")
