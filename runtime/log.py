"""The log of a run, by rank 0: log.jsonl for programs, lines on the terminal for people.

With --tensorboard the numbers of every record that has a step also go to OUT/tensorboard. `Meter`
takes the times that the log shows; `BadImageLog` lists the unreadable images of all ranks.
"""

import csv
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch

from runtime.agreement import StepResult, gather_to_rank0, run_on_rank0
from runtime.devices import device_memory, peak_flops
from runtime.run import Run

CSV: dict[str, Any] = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}


class Meter:
    """Measure the steps of a loop by the host's clock, which stops while `paused`."""

    def __init__(self, begin: int, global_batch: int) -> None:
        """Begin before step `begin`; each step has `global_batch` images of all ranks."""
        self.begin, self.global_batch = begin, global_batch
        self.rates: list[float] = []  # images per second of each interval
        # seconds without a batch: of all steps, and of those before this interval
        self.waited = self.waited_before = 0.0
        self.started = self.interval_start = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the seconds per step: it saves, evaluates, exports."""
        start = time.perf_counter()
        yield
        self.interval_start += time.perf_counter() - start

    def interval(self, done: int) -> tuple[float, float]:
        """End an interval after `done` steps; return seconds per step, and those spent waiting."""
        now, steps = time.perf_counter(), done - self.begin
        seconds = (now - self.interval_start) / steps
        waited = (self.waited - self.waited_before) / steps
        self.rates.append(self.global_batch / seconds)
        self.waited_before, self.begin, self.interval_start = self.waited, done, now
        return seconds, waited

    def summary(self) -> dict[str, float | None]:
        """Return the numbers of the whole loop, by their keys in the log's end record."""
        seconds = time.perf_counter() - self.started
        # the first interval has the warm-up of caches, buckets and compilers
        rate = statistics.median(self.rates[1:] or self.rates) if self.rates else None
        share = self.waited / seconds
        return {"images_per_second": rate, "seconds": seconds, "data_share": share}


class Log:
    """Write the terminal and, once it is open, log.jsonl with one object a line; on rank 0 only."""

    run: Run  # this and the device once it is open
    device: torch.device
    file: TextIO | None = None
    tensorboard: Any = None  # its writer, with --tensorboard

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def open(self, run: Run, device: torch.device) -> None:
        """Append to the log of the runs in --out. Collective; AgreedError if it cannot be."""
        self.run, self.device = run, device
        path = Path(run.config.out, "log.jsonl")

        def open_file() -> None:
            lost = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # a node, in a line
            self.file = open(path, "a")  # noqa: SIM115
            self.file.write("\n" * lost)

        run_on_rank0(open_file)

    def say(self, *lines: str) -> None:
        """Print lines on the terminal."""
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def warn(self, text: str) -> None:
        """Print a warning on the terminal."""
        self.say(f"warning: {text}")

    def write(self, event: str, **record: Any) -> None:
        """Add a line to log.jsonl; one that the disk refuses waits in memory."""
        if not self.file:
            return
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[key] = None  # JSON has no NaN
        try:
            self.file.write(json.dumps({"event": event} | record) + "\n")
            self.file.flush()
            if event == "start" and self.run.config.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                folder = Path(self.run.config.out, "tensorboard", self.run.config.run_mode)
                # an earlier start of this run may have written of later steps: they are hidden
                self.tensorboard = SummaryWriter(folder, purge_step=record["begin"] + 1)
            elif self.tensorboard and "step" in record:
                step = record.pop("step")
                for key, value in record.items():
                    if type(value) in (int, float):
                        self.tensorboard.add_scalar(f"{event}/{key}", value, step)
                self.tensorboard.flush()
        except OSError as error:  # a full disk: no run ends for want of a line or a curve
            self.warn(f"the log cannot be written now: {error}")

    def step(self, result: StepResult, lr: float, meter: Meter) -> None:
        """Log a step and end the meter's interval; the numbers are of all ranks.

        A run that only reads images has no loss, no norm and no FLOPs.
        """
        step, loss, norm = result.step, result.loss, result.norm
        seconds, waited = meter.interval(step + 1)
        run, trained = self.run, self.run.config.run_mode != "io"
        rate, flops = run.global_batch / seconds, run.flops_per_image() if trained else None
        tflops = rate / run.world_size * flops / 1e12 if flops else None
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
        )
        shown = f"loss {loss:7.4f}  norm {norm:8.3f}  lr {lr:.2e}  " if trained else ""
        gib = memory["peak_allocated_gib"]
        left = timedelta(seconds=round(seconds * (run.steps - step - 1)))
        self.say(
            f"step {step + 1:{len(str(run.steps))}}/{run.steps}  {shown}{rate:8.1f} img/s  "
            f"{'' if gib is None else f'{gib:6.2f} GiB  '}data wait {1e3 * waited:7.1f} ms "
            f"{waited / seconds:4.0%}  ETA {left}"
        )


# --- Unreadable images


class BadImageLog:
    """The bad images of all ranks, listed in OUT/bad_images.csv."""

    def __init__(self, run: Run, log: Log, name_of: Callable[[int], str]) -> None:
        """Continue the list in --out; `name_of` gives the path of an image."""
        self.path = os.path.join(run.config.out, "bad_images.csv")
        self.run, self.log, self.name_of = run, log, name_of
        self.unreported: list[tuple[str, str, int]] = []  # found by this rank since `sync`
        self.too_many: str | None = None  # an error message
        self.known: set[str] = set()  # their paths, kept up to date on rank 0
        if log.rank == 0 and os.path.exists(self.path):
            with open(self.path, **CSV) as file:
                self.known = {row["path"] for row in csv.DictReader(file)}

    def sync(self) -> None:
        """Collect the bad images of all ranks; set `too_many` on all where they are. Collective."""
        every = gather_to_rank0(self.unreported) or []
        self.unreported = []
        self.too_many = run_on_rank0(lambda: self._list(every))

    def _list(self, every: list[list[tuple[str, str, int]]]) -> str | None:
        """On rank 0: list the images that are new, with reason and first step; see `too_many`."""
        new = {row[0]: row for rows in every for row in rows if row[0] not in self.known}
        if new:
            path, reason, _ = next(iter(new.values()))
            found = f"unreadable images, replaced by the next: {len(new)}, see {self.path}"
            self.log.warn(f"{found}; the first: {path} ({reason})")
            try:
                with open(self.path, "a", **CSV) as file:
                    heading = [("path", "reason", "step")] * (file.tell() == 0)
                    csv.writer(file).writerows([*heading, *new.values()])
            except OSError as error:  # as of the log
                self.log.warn(f"{self.path} cannot be written now: {error}")
            self.known |= new.keys()
        count, images, allowed = len(self.known), self.run.images, self.run.config.max_bad
        if count <= allowed * images:
            return None
        found = f"{count} of {images} images are unreadable, more than --max-bad {allowed:g} allows"
        return f"{found}: remove them, or raise it; they are listed in {self.path}"
