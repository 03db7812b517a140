"""The clocks of the training loop: seconds per step, waiting for data, and the last losses.

Copy this one file: it needs torch alone.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import record_function

DATA_WAIT = "wait for data"  # name of the range in a profiler's trace


def compile_seconds() -> float:
    """Return the seconds that torch.compile has taken in this process so far."""
    return torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0)


class Meter:
    """Measure the steps of a loop; the clock is the host's and stops while `paused`."""

    def __init__(self, begin: int, global_batch: int) -> None:
        """Begin before step `begin`; each step has `global_batch` images of all ranks."""
        self.begin = begin
        self.global_batch = global_batch
        self.rates: list[float] = []  # images per second of each interval
        self.losses: deque[Tensor] = deque(maxlen=10)  # () each, on the device
        self.waited = self.waited_before = 0.0  # seconds in this interval, and before it
        self.started = self.interval_start = time.perf_counter()

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        start = time.perf_counter()
        with record_function(DATA_WAIT):
            yield
        self.waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the seconds per step: it logs, or saves."""
        start = time.perf_counter()
        yield
        self.interval_start += time.perf_counter() - start

    def interval(self, done: int) -> tuple[float, float]:
        """End an interval after `done` steps; return seconds per step, and those spent waiting."""
        now, steps = time.perf_counter(), done - self.begin
        seconds, waited = (now - self.interval_start) / steps, self.waited / steps
        self.rates.append(self.global_batch / seconds)
        self.waited_before += self.waited
        self.waited, self.begin, self.interval_start = 0.0, done, now
        return seconds, waited

    def summary(self) -> dict[str, float | None]:
        """Return the numbers of the whole loop, by their keys in the log's end record."""
        seconds = time.perf_counter() - self.started
        # the first interval has the warm-up of caches, buckets and compilers
        rate = statistics.median(self.rates[1:] or self.rates) if self.rates else None
        return {
            "images_per_second": rate,
            "step_seconds": self.global_batch / rate if rate else None,
            "seconds": seconds,
            "data_share": (self.waited_before + self.waited) / seconds,
        }
