"""The log of a run, by rank 0: log.jsonl for programs, lines on the terminal for people.

With --tensorboard the numbers of each step also go to OUT/tensorboard.
"""

import json
import math
import os
import re
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any, TextIO

import torch
from torch.profiler import record_function

from runtime.agreement import Verdict, gather_to_rank0, run_on_rank0
from runtime.devices import device_memory, device_power, peak_flops
from runtime.run import Run


class Log:
    """Write log.jsonl, one object per line, and the terminal; silent on all ranks but 0."""

    def __init__(self, file: TextIO | None) -> None:
        self.file = file
        self.scalars: Any = None  # TensorBoard's writer, with --tensorboard

    def say(self, text: str) -> None:
        """Print a line on the terminal."""
        if self.file:
            print(text, flush=True)

    def say_all(self, lines: Iterable[str]) -> None:
        """Print lines on the terminal."""
        for line in lines:
            self.say(line)

    def warn(self, text: str) -> None:
        """Print a warning on the terminal."""
        self.say(f"warning: {text}")

    def write(self, event: str, **record: Any) -> None:
        """Add a line to log.jsonl; one that the disk refuses waits in memory."""
        if self.file:
            clean = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in record.items()
            }  # JSON has no NaN
            text = json.dumps({"event": event, **clean}, ensure_ascii=False)
            # bytes of a file name that are not text, as the terminal shows them
            text = re.sub("[\ud800-\udfff]", lambda byte: rf"\\u{ord(byte[0]):04x}", text)
            try:
                self.file.write(text + "\n")
                self.file.flush()
            except OSError as error:
                self.warn(f"log.jsonl cannot be written now: {error}")
            if self.scalars and "step" in clean:
                self._write_scalars(event, clean)

    def _write_scalars(self, event: str, record: dict[str, Any]) -> None:
        """Write the numbers of a step's record for TensorBoard, each under EVENT/KEY."""
        numbers = {k: v for k, v in record.items() if type(v) in (int, float) and k != "step"}
        with self._tensorboard() as scalars:
            for key, value in numbers.items():
                scalars.add_scalar(f"{event}/{key}", value, record["step"])

    def picture(self, name: str, pixels: Any, step: int) -> None:
        """Show an image, an array (H, W, 3) uint8, in TensorBoard, if that is on."""
        if self.scalars:
            with self._tensorboard() as scalars:
                scalars.add_image(name, pixels, step, dataformats="HWC")

    @contextmanager
    def _tensorboard(self) -> Iterator[Any]:
        try:
            yield self.scalars
            self.scalars.flush()
        except OSError as error:  # a full disk: the run does not end for want of a curve
            self.scalars = None
            self.warn(f"TensorBoard's file cannot be written any more: {error}")

    def begin(self, run: Run, device: torch.device) -> None:
        """Log the steps of this run, which trains on this device."""
        self.run, self.device = run, device

    def step(
        self, step: int, loss: float, norm: float, lr: float, meter: "Meter", bad_images: Any
    ) -> None:
        """Log a step, counted from 0, which ends an interval of the meter."""
        run, device = self.run, self.device
        seconds, waited = meter.interval(step + 1)
        trained = run.config.run != "io"
        steps, rate = run.steps, run.global_batch / seconds
        per_rank = rate / run.world_size
        flops_per_image = run.flops_per_image() if trained else None
        flops = flops_per_image and per_rank * flops_per_image
        recomputed = run.flops_per_image(recomputed=True)
        peak = peak_flops(device)[0]
        memory = device_memory(device)
        grad_norm = norm if trained else None
        self.write(
            "step",
            step=step + 1,
            epoch=step // run.epoch_steps,
            loss=loss if trained else None,
            grad_norm=grad_norm,
            lr=lr,
            step_seconds=seconds,
            data_seconds=waited,
            images_per_second=rate,
            images_per_second_per_rank=per_rank,
            tflops_per_rank=flops and flops / 1e12,
            hardware_tflops_per_rank=per_rank * recomputed / 1e12 if flops and recomputed else None,
            mfu=flops / peak if flops and peak else None,
            **memory,
            **device_power(device),
            bad_images=bad_images.count,
        )
        shown = ""
        if trained:
            shown = f"loss {loss:7.4f}  norm {grad_norm:8.3f}  lr {lr:.2e}  "
        gib = memory["peak_allocated_gib"]
        left = timedelta(seconds=min(round(seconds * (steps - step - 1)), 10**9))
        self.say(
            f"step {step + 1:{len(str(steps))}}/{steps}  {shown}{rate:8.1f} img/s  "
            f"{'' if gib is None else f'{gib:6.2f} GiB  '}data wait {1e3 * waited:7.1f} ms "
            f"{waited / seconds:4.0%}  ETA {left}"
        )

    def first_step(self, run: Run, step: int, loss: float) -> None:
        """Say that the first step is made: a sign of life where the first line may be minutes away.

        `step` counts from 0, `loss` () is this rank's.
        """
        if self.file and run.config.run != "io":
            self.say(
                f"first step: {step + 1} of {run.steps}, loss {loss:.4f}; a line "
                f"follows every {run.config.log_every} steps"
            )

    def skip(self, step: int, verdict: Verdict, images: list[str]) -> str:
        """Log a step that was not applied: which ranks, which images; return a message. Collective.

        `images` are the paths of this rank's part of the batch, or none where another rank's loss
        was at fault.
        """
        every = gather_to_rank0((verdict.own_loss, images)) or []
        ranks = [rank for rank, (own_loss, _) in enumerate(every) if own_loss]
        paths = [path for _, paths in every for path in paths]
        if verdict.bad_loss:
            named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
            text = f"the loss is not finite at step {step + 1} on rank {named}"
        else:
            text = f"the gradient norm is not finite at step {step + 1}, though the losses are"
        if verdict.consecutive > 1:
            text += f", {verdict.consecutive} consecutive bad steps"
        what = "loss" if verdict.bad_loss else "gradient norm"
        self.write(
            "skip",
            step=step + 1,
            what=what,
            ranks=ranks,
            images=paths,
            in_a_row=verdict.consecutive,
        )
        more = f" and {len(paths) - 3} more, all in log.jsonl" if len(paths) > 3 else ""
        self.warn(f"{text}: optimizer step skipped; images {', '.join(paths[:3])}{more}")
        return text


def open_log(out: str) -> Log:
    """Open the log in the folder `out` to append, on rank 0; AgreedError if not. Collective."""
    path, log = os.path.join(out, "log.jsonl"), Log(None)

    def make() -> None:
        try:
            os.makedirs(out, exist_ok=True)
            if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would block
                raise ValueError(f"{path} is no regular file: move it away, or give another --out")
            log.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"{error}: give --out a folder that can be made") from None
        with open(path, "rb") as old:
            size = old.seek(0, os.SEEK_END)
            old.seek(max(size - 1, 0))
            # the run before may have been killed while it wrote
            log.file.write("\n" if old.read().strip() else "")

    run_on_rank0(make)
    return log


def open_tensorboard(log: Log, run: Run, begin: int) -> None:
    """Write what follows step `begin` to OUT/tensorboard too; AgreedError if not. Collective.

    TensorBoard then hides what an earlier start of this run has written of later steps.
    """

    def make() -> None:
        from torch.utils.tensorboard import SummaryWriter

        if log.file:
            folder = os.path.join(run.config.out, "tensorboard", run.config.run)
            log.scalars = SummaryWriter(folder, purge_step=begin + 1)

    run_on_rank0(make)


def rename_old_log(log: Log, out: str) -> None:
    """Rename an earlier run's log, where this run begins at step 0. Collective.

    AgreedError, status 1, where that cannot be done.
    """
    path = os.path.join(out, "log.jsonl")

    def rename() -> str | None:
        if log.file is None or not os.path.getsize(path):
            return None
        names = (os.path.join(out, f"log.{i}.jsonl") for i in count(1))
        other = next(name for name in names if not os.path.lexists(name))
        log.file.close()
        os.rename(path, other)
        log.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        return other

    if other := run_on_rank0(rename):
        log.say(f"note: this run begins at step 0; the log of an earlier one is now {other}")


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
        self.losses: deque[float] = deque(maxlen=10)
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
