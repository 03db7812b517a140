"""Say once in a run what slows it down besides its arithmetic: reading images, or the host."""

import numpy as np

from runtime.agreement import StepGuard
from runtime.device_batches import worker_count
from runtime.log import Meter
from runtime.run import Run
from runtime.session import Session

WARM_UP = 10  # steps before the first that counts
COUNTED = 10  # steps that count, at least
MAX_WAITING = 0.1  # share of the time spent waiting for data that gets no warning
HOST_BOUND = 0.9  # share of the steps for which the GPU waited for the host


class LimitWarning:
    """Warn if a run waits for its data, or a GPU for its host; once, on the terminal."""

    def __init__(self, run: Run, session: Session) -> None:
        self.run = run
        self.session = session
        self.done = run.config.run_mode == "io"  # which shows how fast images are read
        self.start: tuple[float, ...] | None = None  # what `check` looks at, after the warm-up

    def check(self, step: int, meter: Meter, guard: StepGuard) -> None:
        """Look at the steps since the warm-up, after the log line of `step`."""
        if self.done or step < meter.first + WARM_UP:
            return
        now = (step, meter.seconds, meter.waited, guard.arrived_before_host)
        if self.start is None:
            self.start = now
        steps, seconds, waited, early = np.subtract(now, self.start).tolist()
        if steps < COUNTED:
            return
        self.done = True
        if waited > MAX_WAITING * seconds:
            workers = worker_count(self.run.config.workers, self.session.ranks)
            self.session.log.warn(
                f"{waited / seconds:.0%} of the time goes by waiting for images, with {workers} "
                "loader workers per rank: raise --workers, one core for each, or pack loose files "
                "with prepare.py pack"
            )
        elif early > HOST_BOUND * steps:
            self.session.log.warn(
                "the GPU finishes each step before the host has started the next: a larger --batch "
                f"(now {self.run.local_batch}) costs little time; --compile starts fewer kernels"
            )
