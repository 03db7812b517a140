"""Unreadable images: collected from all ranks now and then, listed once each, limited in number.

Rank 0 lists them in bad_images.csv; too many of them end the run, on all ranks alike. What this
rank's loader took is added up here too.
"""

import csv
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import data
from runtime.agreement import gather_to_rank0, run_on_rank0

if TYPE_CHECKING:  # the worker processes of storage/ import this file too
    from runtime.device_batches import Batch
    from runtime.log import Log

STAGES = tuple(name for name in data.LoadStats._fields if name.endswith("_seconds"))


def append_rows(path: str, rows: Sequence[tuple[str, str, int | None]]) -> None:
    """Append (path, reason, step or None), with a heading where the file is new; OSError.

    The step is the first in which the image was found, counted from 1.
    """
    if not rows:
        return
    new = not os.path.exists(path)
    with open(path, "a", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file).writerows([("path", "reason", "step")] * new + list(rows))


def read_paths(path: str) -> set[str]:
    """Read the paths that are listed, if any."""
    if not os.path.exists(path):
        return set()
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return {row["path"] for row in csv.DictReader(file)}


class BadImageLog:
    """The bad images of all ranks, and the statistics of this rank's loader."""

    def __init__(
        self, out: str, images: int, max_bad: float, log: "Log", name_of: Callable[[int], str]
    ) -> None:
        """Continue the list in the folder `out`. Collective.

        `max_bad` is the share of the `images` of the data set that may be bad; `name_of` gives the
        path of an image.
        """
        self.path = os.path.join(out, "bad_images.csv")
        self.images, self.max_bad, self.log, self.name_of = images, max_bad, log, name_of
        self.unreported: list[tuple[str, str, int]] = []  # found by this rank since `sync`
        self.stats = data.LoadStats()
        self.read = 0  # images
        self.too_many: str | None = None  # an error message
        self.known = run_on_rank0(lambda: read_paths(self.path))  # kept up to date on rank 0
        self.count = len(self.known)

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
        if self.count > self.max_bad * self.images:
            self.too_many = (
                f"{self.count} of {self.images} images are unreadable, more than "
                f"--max-bad {self.max_bad:g} allows: they are listed in {self.path}"
            )

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
        """Return the rows of the record `io`, one per rank; [] on other ranks than 0. Collective.

        `seconds` the loop took, `waiting` is the share of them in which this rank had no batch.
        """
        row = {
            "images_per_second": self.read / seconds,
            "mb_per_second": self.stats.bytes / seconds / 1e6,
            "data_share": waiting,
        } | {stage: getattr(self.stats, stage) / max(self.read, 1) for stage in STAGES}
        return gather_to_rank0(row) or []
