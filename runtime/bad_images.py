"""Unreadable images: collected from all ranks now and then, listed once each, limited in number.

Every rank meets bad images of its own. They are told to all ranks now and then, listed once each in
bad_images.csv by rank 0, and end the run, on all ranks alike, when they are too many.
"""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import data
from runtime import agreement
from runtime.device_batches import Batch
from runtime.log import Log
from runtime.step_guard import StepVerdict

BAD_COLUMNS = ("path", "reason", "step")
STAGES = ("read", "decode", "resize", "collate")
SHOWN = 5  # bad images that are also named on the terminal, of those told at once
LISTED = 20  # ranks that have a line of their own in a report


def append_rows(path: str, rows: Sequence[tuple[str, str, int | None]]) -> None:
    """Lines for a list of bad images, with a heading where it is new; OSError.

    They are path, reason and the step that met it, if one did.
    """
    if not rows:
        return
    new = not os.path.exists(path)
    with (
        data.naming(path),
        open(path, "a", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.writer(file)
        if new:
            writer.writerow(BAD_COLUMNS)
        writer.writerows(rows)


class BadImageLog:
    """The bad images of all ranks, and the time that this rank's loader took, in its workers."""

    def __init__(
        self, out: str, images: int, max_bad: float, log: Log, name_of: Callable[[int], str]
    ) -> None:
        """Continue the list in the folder `out`. Collective.

        `max_bad` is the share of the `images` of the data set that may be bad; `name_of` gives the
        path of an image.
        """
        self.path = os.path.join(out, "bad_images.csv")
        self.images, self.max_bad, self.log, self.name_of = images, max_bad, log, name_of
        self.say = log.say
        self.unreported: list[tuple[str, str, int]] = []  # found by this rank since `sync`
        self.known: set[str] = set()  # on rank 0: paths listed
        self.cost = torch.zeros(5, dtype=torch.float64)  # bytes, seconds of each stage
        self.read = 0  # images
        self.too_many: str | None = None  # an error message
        self.count = agreement.run_on_rank0(self._known)

    def _known(self) -> int:
        if os.path.exists(self.path):
            if not os.path.isfile(self.path):  # a FIFO would be waited for
                raise ValueError(f"{self.path} is no file: move it away")
            with open(self.path, newline="", encoding="utf-8", errors="surrogateescape") as file:
                self.known = {row["path"] for row in csv.DictReader(file) if row.get("path")}
        return len(self.known)

    def record(self, step: int, batch: Batch) -> None:
        """Note the bad images of a step's batch, and what it took to load."""
        self.unreported += [(self.name_of(i), reason, step + 1) for i, reason in batch.bad]
        self.cost += batch.cost
        self.read += len(batch.image_ids)

    def log_skipped_step(self, step: int, verdict: StepVerdict, image_ids: list[int]) -> str:
        """Log a step that was not applied and its images, by name; return a message. Collective."""
        return self.log.skip(step, verdict, [self.name_of(i) for i in image_ids])

    @property
    def pending(self) -> bool:
        """Whether this rank has images to report."""
        return bool(self.unreported)

    def sync(self) -> None:
        """Collect the bad images of all ranks; set `too_many` on all where they are. Collective."""
        every = agreement.gather_to_rank0(self.unreported)
        self.unreported = []
        self.count, self.too_many = agreement.run_on_rank0(partial(self._listed, every or []))

    def _listed(self, every: list[list[tuple[str, str, int]]]) -> tuple[int, str | None]:
        """On rank 0: list what is new."""
        fresh = {row[0]: row for rows in every for row in rows if row[0] not in self.known}
        self.known |= fresh.keys()
        try:
            append_rows(self.path, sorted(fresh.values(), key=lambda row: row[2] or 0))
        except OSError as error:
            self.say(f"warning: {self.path} cannot be written now: {error}")
        for path, reason, _ in list(fresh.values())[:SHOWN]:
            self.say(f"warning: unreadable image {path} ({reason}): the next one stands in")
        if len(fresh) > SHOWN:
            self.say(f"warning: and {len(fresh) - SHOWN} more unreadable images, see {self.path}")
        problem = None
        if len(self.known) > self.max_bad * self.images:
            problem = (
                f"{len(self.known)} of {self.images} images are unreadable, more than "
                f"--max-bad {self.max_bad:g} allows: they are listed in {self.path}"
            )
        return len(self.known), problem

    def report(self, seconds: float, waiting: float) -> dict[str, Any]:
        """What each rank read and how long it waited; on rank 0, {} on the others. Collective.

        `seconds` of the loop, `waiting` the share of them in which this rank had no batch.
        """
        every = agreement.gather_to_rank0([float(self.read), waiting, *self.cost.tolist()])
        rows = [
            {
                "images_per_second": read / seconds,
                "mb_per_second": cost[0] / seconds / 1e6,
                "data_share": share,
            }
            | {f"{name}_seconds": cost[i + 1] / max(read, 1) for i, name in enumerate(STAGES)}
            for read, share, *cost in every or []
        ]
        return {"ranks": rows} if rows else {}


def describe_loaders(ranks: list[dict[str, float]]) -> Iterator[str]:
    """Lines of a table of `report`: the ranks, and the worst of them in each column."""
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
    yield f"rank {waits} waits most; ms are an image's, in one loader process"
