"""Unreadable images: collected from all ranks now and then, listed once each, limited in number.

Each rank reads images of its own, so each finds bad ones of its own. Rank 0 lists them in
bad_images.csv; too many of them end the run, on all ranks alike. The statistics of this rank's
loader are kept here too.
"""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import data
from runtime import agreement
from runtime.agreement import Verdict
from runtime.device_batches import Batch
from runtime.log import Log

COLUMNS = ("path", "reason", "step")


def append_rows(path: str, rows: Sequence[tuple[str, str, int | None]]) -> None:
    """Append (path, reason, step or None), with a heading where the file is new; OSError.

    The step is the first in which the image was found, counted from 1.
    """
    if not rows:
        return
    new = not os.path.exists(path)
    with open(path, "a", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerows(rows)


def read_paths(path: str) -> set[str]:
    """Read the paths that are listed, if any; ValueError where `path` is no regular file."""
    if not os.path.exists(path):
        return set()
    if not os.path.isfile(path):  # opening a FIFO would not return
        raise ValueError(f"{path} is no file: move it away")
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return {row["path"] for row in csv.DictReader(file) if row.get("path")}


STAGES = ("read", "decode", "resize", "collate")

SHOWN = 5  # bad images of one `sync` that are also named on the terminal

LISTED = 20  # ranks that have a line of their own in a report


class BadImageLog:
    """The bad images of all ranks, and the statistics of this rank's loader."""

    def __init__(
        self, out: str, images: int, max_bad: float, log: Log, name_of: Callable[[int], str]
    ) -> None:
        """Continue the list in the folder `out`. Collective.

        `max_bad` is the share of the `images` of the data set that may be bad; `name_of` gives the
        path of an image. ValueError, on all ranks, where the list is no regular file.
        """
        self.path = os.path.join(out, "bad_images.csv")
        self.images, self.max_bad, self.log, self.name_of = images, max_bad, log, name_of
        self.unreported: list[tuple[str, str, int]] = []  # found by this rank since `sync`
        self.known: set[str] = set()  # on rank 0: paths that are listed
        self.stats = data.LoadStats()
        self.read = 0  # images
        self.too_many: str | None = None  # an error message
        self.count = agreement.run_on_rank0(self._read_list)

    def _read_list(self) -> int:
        self.known = read_paths(self.path)
        return len(self.known)

    def record(self, step: int, batch: Batch) -> None:
        """Note the bad images of a step's batch, and what it took to load."""
        self.unreported += [(self.name_of(i), reason, step + 1) for i, reason in batch.bad]
        self.stats = data.total([self.stats, batch.stats])
        self.read += len(batch.image_ids)

    def log_skipped_step(self, verdict: Verdict, image_ids: list[int]) -> str:
        """Log a step that was not applied and its images, by name; return a message. Collective."""
        return self.log.skip(verdict.step, verdict, [self.name_of(i) for i in image_ids])

    @property
    def pending(self) -> bool:
        """Whether this rank has images to report."""
        return bool(self.unreported)

    def sync(self) -> None:
        """Collect the bad images of all ranks; set `too_many` on all where they are. Collective."""
        every = agreement.gather_to_rank0(self.unreported)
        self.unreported = []
        self.count, self.too_many = agreement.run_on_rank0(partial(self._list, every or []))

    def _list(self, every: list[list[tuple[str, str, int]]]) -> tuple[int, str | None]:
        """On rank 0: list the images that are new."""
        say = self.log.say
        new = {row[0]: row for rows in every for row in rows if row[0] not in self.known}
        self.known |= new.keys()
        try:
            append_rows(self.path, sorted(new.values(), key=lambda row: row[2] or 0))
        except OSError as error:
            say(f"warning: {self.path} cannot be written now: {error}")
        for path, reason, _ in list(new.values())[:SHOWN]:
            say(f"warning: unreadable image {path} ({reason}): replaced by the next image")
        if len(new) > SHOWN:
            say(f"warning: and {len(new) - SHOWN} more unreadable images, see {self.path}")
        problem = None
        if len(self.known) > self.max_bad * self.images:
            problem = (
                f"{len(self.known)} of {self.images} images are unreadable, more than "
                f"--max-bad {self.max_bad:g} allows: they are listed in {self.path}"
            )
        return len(self.known), problem

    def report(self, seconds: float, waiting: float) -> dict[str, Any]:
        """Make the record `io` of the log: one row per rank; {} on other ranks than 0. Collective.

        `seconds` the loop took, `waiting` is the share of them in which this rank had no batch.
        """
        every = agreement.gather_to_rank0((self.read, waiting, self.stats))
        rows = [
            {
                "images_per_second": read / seconds,
                "mb_per_second": stats.bytes / seconds / 1e6,
                "data_share": share,
            }
            | {f"{s}_seconds": getattr(stats, f"{s}_seconds") / max(read, 1) for s in STAGES}
            for read, share, stats in every or []
        ]
        return {"ranks": rows} if rows else {}


def describe_loaders(ranks: list[dict[str, float]]) -> Iterator[str]:
    """Yield the lines of a table of a `report`: the ranks, and the worst value per column."""
    yield "rank   images/s     MB/s  waiting" + "".join(f"{name + ' ms':>12}" for name in STAGES)

    def line(name: str, row: dict[str, float]) -> str:
        stages = "".join(f"{1e3 * row[f'{stage}_seconds']:12.3f}" for stage in STAGES)
        rates = f"{row['images_per_second']:10.1f}{row['mb_per_second']:9.1f}"
        return f"{name:5}{rates}{row['data_share']:9.0%}{stages}"

    for number, row in enumerate(ranks[:LISTED]):
        yield line(str(number), row)
    if len(ranks) > LISTED:
        yield f"... {len(ranks) - LISTED} more, all in log.jsonl"
    worst = {
        key: (min if "per_second" in key else max)(row[key] for row in ranks) for key in ranks[0]
    }
    yield line("worst", worst)
    waits = max(range(len(ranks)), key=lambda rank: ranks[rank]["data_share"])
    yield f"rank {waits} waits most; ms are per image, in one loader process"
