"""The log of a run, on rank 0: log.jsonl for programs, lines on the terminal for people.

With --tensorboard the numbers of every record that has a step also go to OUT/tensorboard. `Meter`
takes the times that the log shows; `BadImageLog` lists the unreadable images of all ranks.
"""

import csv
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO

import torch

from runtime.agreement import StepResult, gather_to_rank0, run_on_rank0
from runtime.devices import device_memory, peak_flops
from runtime.run import Run

COLUMNS = ["path", "reason", "step"]  # of bad_images.csv


class Meter:
    """Measure the steps of a loop by the host's clock; their times exclude what is `paused`."""

    def __init__(self, begin: int, global_batch: int) -> None:
        """Begin before step `begin`; each step has `global_batch` images of all ranks."""
        self.first = begin
        self.begin = begin  # the step before which this interval began
        self.global_batch = global_batch
        self.seconds = 0.0  # duration of all intervals that have ended
        self.rates: list[float] = []  # images per second of each interval
        self.waited = 0.0  # seconds spent waiting for batches
        self.waited_before = 0.0  # the part of them before this interval
        self.started = time.perf_counter()
        self.interval_start = self.started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block (a save, an evaluation) out of the seconds per step."""
        start = time.perf_counter()
        yield
        self.interval_start += time.perf_counter() - start

    def interval(self, done: int) -> tuple[float, float]:
        """End an interval after `done` steps; return the seconds per step, and those of waiting."""
        now = time.perf_counter()
        steps = done - self.begin
        self.seconds += now - self.interval_start
        seconds = (now - self.interval_start) / steps
        waited = (self.waited - self.waited_before) / steps
        self.rates.append(self.global_batch / seconds)
        self.waited_before = self.waited
        self.begin = done
        self.interval_start = now
        return seconds, waited

    def median_rate(self) -> float | None:
        """Return the images per second of a usual interval, None before any has ended."""
        # the first interval includes the warm-up of caches, buckets and compilers
        measured = self.rates[1:] or self.rates
        return statistics.median(measured) if measured else None

    def mean_rate(self) -> float | None:
        """Return the images per second of all intervals, None before any has ended."""
        images = (self.begin - self.first) * self.global_batch
        return images / self.seconds if self.seconds else None

    def summary(self, reads_only: bool) -> dict[str, float | None]:
        """Return the numbers of the whole loop, by their keys in the log's end record."""
        seconds = time.perf_counter() - self.started
        rate = self.median_rate()
        if reads_only:  # the batches of several workers arrive together, with gaps between
            rate = self.mean_rate()
        return {
            "images_per_second": rate,
            "seconds": seconds,
            "data_wait_fraction": self.waited / seconds,
        }


def last_run_mode(log: bytes) -> str | None:
    """Return the --run-mode of the newest run in a log; None if it has no start record."""
    for line in reversed(log.splitlines()):
        with suppress(ValueError):  # a line that was half written
            record = json.loads(line)
            if record.get("event") == "start":
                return record.get("run_mode")
    return None


class Log:
    """Write to the terminal and, after `open`, to log.jsonl, an object a line; on rank 0 only."""

    run: Run  # this and the next are set by `open`
    device: torch.device
    file: TextIO | None = None
    tensorboard: Any = None  # its writer, with --tensorboard

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def open(self, run: Run, device: torch.device) -> None:
        """Open the log in --out, to append to it. Collective.

        AgreedError if that fails, or if the log there is of another --run-mode: its steps would be
        taken for steps of this run.
        """
        self.run = run
        self.device = device
        path = Path(run.config.out, "log.jsonl")

        def open_file() -> None:
            text = path.read_bytes() if path.exists() else b""
            there = last_run_mode(text)
            if there not in (None, run.config.run_mode):
                what = f"{run.config.out} holds the log of a run with --run-mode {there}"
                raise ValueError(f"{what}: give another --out")
            self.file = open(path, "a")  # noqa: SIM115
            if text and not text.endswith(b"\n"):  # the node was lost while it wrote a line
                self.file.write("\n")

        run_on_rank0(open_file)

    def say(self, *lines: str) -> None:
        """Print lines on the terminal."""
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def warn(self, text: str) -> None:
        """Print a warning on the terminal."""
        self.say(f"warning: {text}")

    def write(self, event: str, **record: Any) -> None:
        """Add a line to log.jsonl; if that fails, the line waits in memory."""
        if not self.file:
            return
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[key] = None  # JSON has no NaN
        try:
            self.file.write(json.dumps({"event": event} | record) + "\n")
            self.file.flush()
            if self.run.config.tensorboard and "step" in record:
                self._write_tensorboard(event, record)
        except OSError as error:  # a full disk: a missing line or curve must not end a run
            self.warn(f"the log cannot be written now: {error}")

    def _write_tensorboard(self, event: str, record: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not self.tensorboard:
            folder = Path(self.run.config.out, "tensorboard", self.run.config.run_mode)
            # hide the later steps that an earlier launch of this run may have written
            self.tensorboard = SummaryWriter(folder, purge_step=record["step"])
        for key, value in record.items():
            if type(value) in (int, float) and key != "step":
                self.tensorboard.add_scalar(f"{event}/{key}", value, record["step"])
        self.tensorboard.flush()

    def step(self, result: StepResult, lr: float, meter: Meter) -> None:
        """Log a step and end the meter's interval; called every --log-every steps.

        Loss and norm are those of this step, over all ranks. Times and rates are means since the
        line before. The time spent waiting for data is rank 0's, and so is the memory
        (`devices.device_memory`: peak_allocated_gib, peak_reserved_gib, alloc_retries).

        On a GPU a result arrives one step late: the rate counts finished steps. A run that only
        reads images has no loss, no norm and no FLOPs.
        """
        run = self.run
        trained = run.config.run_mode != "io"
        done = result.step + 1
        seconds, waited = meter.interval(done)
        rate = run.global_batch / seconds
        flops = run.flops_per_image() if trained else None
        tflops = rate / run.world_size * flops / 1e12 if flops else None
        peak, _ = peak_flops(self.device)
        memory = device_memory(self.device)
        self.write(
            "step",
            step=done,
            epoch=result.step // run.epoch_steps,
            loss=result.loss if trained else None,
            grad_norm=result.norm if trained else None,
            lr=lr,
            step_seconds=seconds,
            data_seconds=waited,
            images_per_second=rate,
            images_per_second_per_rank=rate / run.world_size,
            tflops_per_rank=tflops,
            # of the dense bf16 peak, whatever --precision; see vit.flops_per_image for what counts
            mfu=1e12 * tflops / peak if tflops and peak else None,
            **memory,
        )
        width = len(str(run.steps))
        text = f"step {done:{width}}/{run.steps}  "
        if trained:
            text += f"loss {result.loss:7.4f}  norm {result.norm:8.3f}  lr {lr:.2e}  "
        text += f"{rate:8.1f} img/s  "
        if memory["peak_allocated_gib"] is not None:
            text += f"{memory['peak_allocated_gib']:6.2f} GiB  "
        left = timedelta(seconds=round(seconds * (run.steps - done)))
        text += f"data wait {1e3 * waited:7.1f} ms {waited / seconds:4.0%}  ETA {left}"
        self.say(text)


# --- Unreadable images


class BadImageLog:
    """The bad images of all ranks, listed in OUT/bad_images.csv.

    data.Images replaces an unreadable image and names it in `bad`; Monitor.next_batch adds it to
    `unreported`; `sync`, some steps later, lists those of all ranks. If there are too many,
    `train` saves and ends the run.
    """

    def __init__(self, run: Run, log: Log, name_of: Callable[[int], str]) -> None:
        """Continue the list in --out; `name_of` gives the path of an image."""
        self.path = Path(run.config.out, "bad_images.csv")
        self.run = run
        self.log = log
        self.name_of = name_of
        self.unreported: list[tuple[str, str, int]] = []  # found by this rank since `sync`
        self.problem: str | None = None  # the error message if there are too many
        self.known: set[str] = set()  # their paths, kept up to date on rank 0
        if log.rank == 0 and self.path.exists():
            with self.open("r") as file:
                # A node that was lost may have left no header, or zeros in place of text.
                rows = csv.reader(line.replace("\0", "") for line in file)
                whole = [row for row in rows if len(row) == len(COLUMNS) and row != COLUMNS]
            listed = {row[0] for row in whole}
            if listed:  # count those that are still in the data set, under the same path
                self.known = {path for path in map(name_of, range(run.images)) if path in listed}

    def open(self, mode: str) -> IO[str]:
        """Open the list; a path in it may have any bytes."""
        return open(self.path, mode, newline="", encoding="utf-8", errors="surrogateescape")

    def sync(self) -> None:
        """Collect the bad images of all ranks; set `problem` if there are too many. Collective."""
        every = gather_to_rank0(self.unreported)
        self.unreported = []
        self.problem = run_on_rank0(partial(self._list, every))

    def _list(self, every: Any) -> str | None:
        """List the new images, on rank 0; return an error message if there are too many in all."""
        new = {}
        for rows in every:
            for path, reason, step in rows:
                if path not in self.known:
                    new[path] = path, reason, step
        if new:
            path, reason, _ = next(iter(new.values()))
            found = f"unreadable images, replaced by the next: {len(new)}, see {self.path}"
            self.log.warn(f"{found}; the first: {path} ({reason})")
            try:
                with self.open("a") as file:
                    table = csv.writer(file)
                    if file.tell() == 0:
                        table.writerow(COLUMNS)
                    table.writerows(new.values())
            except OSError as error:  # a full disk: the run continues, as in Log.write
                self.log.warn(f"{self.path} cannot be written now: {error}")
            self.known |= new.keys()
        count = len(self.known)
        images = self.run.images
        allowed = self.run.config.max_bad
        if count <= allowed * images:
            return None
        found = f"{count} of {images} images are unreadable, more than --max-bad {allowed:g} allows"
        return f"{found}: remove them, or raise it; they are listed in {self.path}"
