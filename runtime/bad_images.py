"""Unreadable images of all ranks: listed once each in bad_images.csv; too many end the run."""

import csv
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import data
from runtime.agreement import gather_to_rank0, run_on_rank0

if TYPE_CHECKING:  # the worker processes of storage/ import this file too
    from runtime.device_batches import Batch
    from runtime.log import Log
    from runtime.run import Run

STAGES = tuple(name for name in data.LoadStats._fields if name.endswith("_seconds"))


def append_rows(path: str, rows: Sequence[tuple[str, str, int | None]]) -> None:
    """Append (path, reason, first step from 1), with a heading where the file is new; OSError."""
    if not rows:
        return
    new = not os.path.exists(path)
    with open(path, "a", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file).writerows([("path", "reason", "step")] * new + list(rows))


class BadImageLog:
    """The bad images of all ranks, and the statistics of this rank's loader."""

    def __init__(self, run: "Run", log: "Log", name_of: Callable[[int], str]) -> None:
        """Continue the list in --out; `name_of` gives the path of an image. Collective."""
        self.path = os.path.join(run.config.out, "bad_images.csv")
        self.run, self.log, self.name_of = run, log, name_of
        self.unreported: list[tuple[str, str, int]] = []  # found by this rank since `sync`
        self.stats = data.LoadStats()
        self.read = 0  # images
        self.too_many: str | None = None  # an error message
        self.known: set[str] = run_on_rank0(self._read_paths)  # kept up to date on rank 0
        self.count = len(self.known)

    def _read_paths(self) -> set[str]:
        if not os.path.exists(self.path):
            return set()
        with open(self.path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            return {row["path"] for row in csv.DictReader(file)}

    def record(self, step: int, batch: "Batch") -> None:
        """Note the bad images of a step's batch, and what it took to load."""
        self.unreported += [(self.name_of(i), reason, step + 1) for i, reason in batch.bad]
        self.stats = data.total([self.stats, batch.stats])
        self.read += len(batch.image_ids)

    def sync(self) -> None:
        """Collect the bad images of all ranks; set `too_many` on all where they are. Collective."""
        every = gather_to_rank0(self.unreported) or []
        self.unreported = []
        self.count = run_on_rank0(lambda: self._list(every))
        images, most = self.run.images, self.run.config.max_bad
        if self.count > most * images:
            allowed = f"more than --max-bad {most:g} allows: they are listed in {self.path}"
            self.too_many = f"{self.count} of {images} images are unreadable, {allowed}"

    def _list(self, every: list[list[tuple[str, str, int]]]) -> int:
        """On rank 0: list the images that are new; count all."""
        new = {row[0]: row for rows in every for row in rows if row[0] not in self.known}
        self.known |= new.keys()
        try:
            append_rows(self.path, list(new.values()))
        except OSError as error:
            self.log.warn(f"{self.path} cannot be written now: {error}")
        if new:
            path, reason, _ = next(iter(new.values()))
            more = f"; {len(new) - 1} more are in {self.path}" if len(new) > 1 else ""
            self.log.warn(f"unreadable image {path} ({reason}): replaced by the next image{more}")
        return len(self.known)

    def report(self, seconds: float, waiting: float) -> list[dict[str, float]]:
        """Return the rows of the record `io` on rank 0, one per rank; [] elsewhere. Collective.

        `waiting` is the share of the loop's `seconds` in which this rank had no batch.
        """
        row = {
            "images_per_second": self.read / seconds,
            "mb_per_second": self.stats.bytes / seconds / 1e6,
            "data_share": waiting,
        } | {stage: getattr(self.stats, stage) / max(self.read, 1) for stage in STAGES}
        return gather_to_rank0(row) or []
