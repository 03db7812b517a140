"""The log of a run, by rank 0: log.jsonl for programs, lines on the terminal for people.

With --tensorboard the numbers of every record that has a step also go to OUT/tensorboard. `Meter`
takes the times that the log shows.
"""

import json
import math
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.profiler import record_function

from runtime.agreement import run_on_rank0
from runtime.devices import device_memory, device_power, peak_flops
from runtime.run import Run


class Meter:
    """Measure the steps of a loop by the host's clock, which stops while `paused`."""

    def __init__(self, begin: int, global_batch: int) -> None:
        """Begin before step `begin`; each step has `global_batch` images of all ranks."""
        self.begin, self.global_batch = begin, global_batch
        self.losses: deque[float] = deque(maxlen=10)  # of the last steps
        self.rates: list[float] = []  # images per second of each interval
        self.waited = self.waited_before = 0.0  # seconds in this interval, and before it
        self.started = self.interval_start = time.perf_counter()

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        start = time.perf_counter()
        with record_function("wait for data"):  # the name in a profiler's trace
            yield
        self.waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the seconds per step: it saves, evaluates, exports."""
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


class Log:
    """Write log.jsonl, one object per line, and the terminal; silent on all ranks but 0."""

    run: Run  # this and the device from `begin` on
    device: torch.device

    def __init__(self, file: TextIO | None) -> None:
        self.file = file
        self.tensorboard: Any = None  # its writer, with --tensorboard

    def begin(self, run: Run, device: torch.device, step: int) -> None:
        """Learn of the run whose next step is `step`, counted from 0, on `device`.

        TensorBoard then hides what an earlier start of this run has written of later steps.
        """
        self.run, self.device = run, device
        if self.file and run.config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = os.path.join(run.config.out, "tensorboard", run.config.run_mode)
            with self._disk_may_fail(folder):
                self.tensorboard = SummaryWriter(folder, purge_step=step + 1)

    def say(self, *lines: str) -> None:
        """Print lines on the terminal."""
        if self.file and lines:
            print(*lines, sep="\n", flush=True)

    def warn(self, text: str) -> None:
        """Print a warning on the terminal."""
        self.say(f"warning: {text}")

    @contextmanager
    def _disk_may_fail(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk: no run ends for want of a line or a curve
            self.warn(f"{name} cannot be written now: {error}")

    def write(self, event: str, **record: Any) -> None:
        """Add a line to log.jsonl; one that the disk refuses waits in memory."""
        if not self.file:
            return
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[key] = None  # JSON has no NaN
        with self._disk_may_fail("log.jsonl"):
            self.file.write(json.dumps({"event": event} | record, ensure_ascii=False) + "\n")
            self.file.flush()
        if self.tensorboard and "step" in record:
            step = record.pop("step")
            with self._disk_may_fail("TensorBoard's file"):
                for key, value in record.items():
                    if type(value) in (int, float):
                        self.tensorboard.add_scalar(f"{event}/{key}", value, step)
                self.tensorboard.flush()

    def picture(self, name: str, pixels: Any, step: int) -> None:
        """Show an image, an array (H, W, 3) uint8, in TensorBoard, if that is on."""
        if self.tensorboard:
            with self._disk_may_fail("TensorBoard's file"):
                self.tensorboard.add_image(name, pixels, step, dataformats="HWC")

    def step(
        self, step: int, loss: float, norm: float, lr: float, meter: Meter, bad_images: int
    ) -> None:
        """Log a step, counted from 0, and end the meter's interval; the numbers are of all ranks.

        A run that only reads images has no loss, no norm and no FLOPs.
        """
        seconds, waited = meter.interval(step + 1)
        run, trained = self.run, self.run.config.run_mode != "io"
        rate, flops = run.global_batch / seconds, run.flops_per_image()
        tflops = rate / run.world_size * flops / 1e12 if flops and trained else None
        peak, memory = peak_flops(self.device)[0], device_memory(self.device)
        self.write(
            "step",
            step=step + 1,
            epoch=step // run.epoch_steps,
            loss=loss if trained else None,
            grad_norm=norm if trained else None,
            lr=lr,
            step_seconds=seconds,
            data_seconds=waited,
            images_per_second=rate,
            images_per_second_per_rank=rate / run.world_size,
            tflops_per_rank=tflops,
            mfu=1e12 * tflops / peak if tflops and peak else None,
            **memory,
            **device_power(self.device),
            bad_images=bad_images,
        )
        shown = f"loss {loss:7.4f}  norm {norm:8.3f}  lr {lr:.2e}  " if trained else ""
        gib = memory["peak_allocated_gib"]
        left = timedelta(seconds=round(seconds * (run.steps - step - 1)))
        self.say(
            f"step {step + 1:{len(str(run.steps))}}/{run.steps}  {shown}{rate:8.1f} img/s  "
            f"{'' if gib is None else f'{gib:6.2f} GiB  '}data wait {1e3 * waited:7.1f} ms "
            f"{waited / seconds:4.0%}  ETA {left}"
        )


def open_log(out: str) -> Log:
    """Open the log in the folder `out` to append, on rank 0; AgreedError if not. Collective."""
    path, log = Path(out, "log.jsonl"), Log(None)

    def make() -> None:
        try:
            os.makedirs(out, exist_ok=True)
            # bytes of a file name that are no text become question marks: the log is UTF-8
            log.file = open(path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115
            if path.read_bytes()[-1:] not in (b"", b"\n"):  # the run before was killed in a line
                log.file.write("\n")
        except OSError as error:
            raise ValueError(f"{error}: give --out a folder that can be written") from None

    run_on_rank0(make)
    return log


def rename_old_log(log: Log, out: str) -> None:
    """Rename an earlier run's log, where this run begins at step 0; AgreedError. Collective."""
    path = Path(out, "log.jsonl")

    def rename() -> None:
        if log.file and path.stat().st_size:
            other = next(p for i in count(1) if not (p := Path(out, f"log.{i}.jsonl")).exists())
            shutil.copyfile(path, other)
            log.file.truncate(0)
            log.say(f"note: this run begins at step 0; the log of an earlier one is now {other}")

    run_on_rank0(rename)
