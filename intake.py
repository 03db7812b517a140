"""What the input did in a run: which images were bad, and where the time of reading went.

Every rank meets bad images of its own. They are told to all ranks now and then, listed once each in
bad_images.csv by rank 0, and end the run, on all ranks alike, when they are too many.
"""

import csv
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import agree
import prepare

STAGES = ("read", "decode", "resize", "collate")
SHOWN = 5  # bad images that are also named on the terminal, of those told at once
LISTED = 20  # ranks that have a line of their own in a report


class Intake:
    """The bad images of all ranks, and the time that this rank's loader took, in its workers."""

    def __init__(self, path: str, images: int, max_bad: float, say: Callable[[str], None]) -> None:
        """`path` of the list, which a resumed run goes on with. Collective.

        `max_bad` is the share of the `images` of the data set that may be bad.
        """
        self.path, self.images, self.max_bad, self.say = path, images, max_bad, say
        self.pending: list[tuple[str, str, int]] = []  # found here, not told yet
        self.known: set[str] = set()  # on rank 0: paths listed
        self.cost = torch.zeros(5, dtype=torch.float64)  # bytes, seconds of each stage
        self.read = 0  # images
        self.count = agree.together(self._known)

    def _known(self) -> int:
        if os.path.exists(self.path):
            with open(self.path, newline="", encoding="utf-8", errors="surrogateescape") as file:
                self.known = {row["path"] for row in csv.DictReader(file) if row.get("path")}
        return len(self.known)

    def met(self, step: int, bad: list[tuple[str, str]], cost: Tensor, images: int) -> None:
        """A step's batch came in: (path, reason) of what it stands in for, its cost (5,)."""
        self.pending += [(path, reason, step + 1) for path, reason in bad]
        self.cost += cost
        self.read += images

    @property
    def news(self) -> bool:
        """Whether this rank has something to tell."""
        return bool(self.pending)

    def share(self) -> str | None:
        """All ranks tell what they met; a sentence, on all of them, where it is too much.

        Collective.
        """
        every = agree.gathered(self.pending)
        self.pending = []
        self.count, problem = agree.together(partial(self._listed, every or []))
        return problem

    def _listed(self, every: list[list[tuple[str, str, int]]]) -> tuple[int, str | None]:
        """On rank 0: list what is new."""
        fresh = {row[0]: row for rows in every for row in rows if row[0] not in self.known}
        self.known |= fresh.keys()
        try:
            prepare.append_rows(self.path, sorted(fresh.values(), key=lambda row: row[2] or 0))
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
        every = agree.gathered([float(self.read), waiting, *self.cost.tolist()])
        rows = [
            {
                "images_per_second": read / seconds, "mb_per_second": cost[0] / seconds / 1e6,
                "data_share": share,
            } | {f"{name}_seconds": cost[i + 1] / max(read, 1) for i, name in enumerate(STAGES)}
            for read, share, *cost in every or []
        ]  # fmt: skip
        return {"ranks": rows} if rows else {}


def describe(ranks: list[dict[str, float]]) -> Iterator[str]:
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
