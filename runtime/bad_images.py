"""The input of a run: images found, staged, brought to the device; what was wrong with them.

Every rank meets bad images of its own. They are told to all ranks now and then, listed once each in
bad_images.csv by rank 0, and end the run, on all ranks alike, when they are too many.
"""

import csv
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch import Tensor

import data
import mesh
import prepare
from runtime import agreement

STAGES = ("read", "decode", "resize", "collate")
SHOWN = 5  # bad images that are also named on the terminal, of those told at once
LISTED = 20  # ranks that have a line of their own in a report


# ---------------------------------------------------------------------------------------------
# Found and staged


def find_images(
    folder: str, out: str | None, global_batch: int, say: Callable[[str], None]
) -> tuple[data.ImageFiles | None, dict[str, Any], int]:
    """(files or None for synthetic images, what a resume compares of them, steps per epoch).

    The list of files is kept in `out`, where one is given. ValueError where there are too few.
    """
    check_folder(folder)
    files = prepare.find_images(folder, out, say) if folder != "synthetic" else None
    images = len(files) if files else data.SYNTHETIC_IMAGES
    names = prepare.fingerprint(files, times=False) if files else None
    found = {"images": images, "image_names_and_sizes": names}
    return files, found, data.steps_per_epoch(images, global_batch)


def check_folder(folder: str) -> None:
    """Refuse a --data that this rank does not see: ValueError."""
    if folder != "synthetic" and not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}: give --data the folder of images")


def share_images(
    folder: str, out: str, global_batch: int
) -> tuple[data.ImageFiles | None, dict[str, Any], int]:
    """As `find_images`, which rank 0 does; every rank then maps the same list. Collective."""

    def find() -> tuple[str | None, dict[str, Any], int]:
        files, found, steps = find_images(folder, out, global_batch, partial(print, flush=True))
        return files.index_file if files else None, found, steps

    agreement.run_on_all_ranks(partial(check_folder, folder))
    index, found, steps = agreement.run_on_rank0(find)
    load = partial(data.load_index, index or "", folder)
    return agreement.run_on_all_ranks(load) if index else None, found, steps


def stage(
    files: data.ImageFiles,
    folder: str,
    ranks: mesh.Ranks,
    say: Callable[[str], None],
    wanted: Callable[..., Any],
) -> prepare.Staged:
    """The same images by way of a node-local folder, which one process a node begins to fill.

    ValueError, on all ranks, where some rank cannot write there. Collective.
    """
    staged = agreement.run_on_all_ranks(partial(prepare.Staged, files, folder))
    first = ranks.rank - ranks.local_rank
    if ranks.local_rank == 0:
        mine = partial(wanted, ranks=range(first, first + ranks.local_world_size))
        with signals_blocked():
            prepare.fill_in_background(staged, mine)
    told = agreement.gather_to_rank0(staged.shortage() if ranks.local_rank == 0 else None) or []
    for text in sorted({text for text in told if text})[:3]:
        say(f"warning: {text}")
    return staged


# ---------------------------------------------------------------------------------------------
# To the device


@dataclass(frozen=True)
class Batch:
    """What a rank trains on in one step."""

    parts: list[tuple[Tensor, Tensor]]  # (images, noise) of each accumulation step, on the device
    image_ids: list[int]
    bad: list[tuple[int, str]]  # (image, reason): unreadable, others stand in for them
    cost: Tensor  # (5,) as in data.Sample, of all its images


class NoData(RuntimeError):
    """The loader of this rank came to an end before its time."""


def device_batches(
    loader: Iterable[data.Sample], accum: int, device: torch.device
) -> Iterator[Batch]:
    """The loader's local batches, copied to the device, `accum` of them for each step.

    To a GPU on a stream of its own: asked for while the step before still runs, a batch is there
    when it has ended. NoData where the loader fails.
    """
    beside = torch.cuda.Stream(device) if device.type == "cuda" else None
    with loading(), signals_blocked():
        batches = iter(loader)
    while step := fetch(batches, accum):
        with torch.cuda.stream(beside):  # type: ignore[arg-type] # None: nothing changes
            parts = [
                (b.image.to(device, non_blocking=True), b.noise.to(device, non_blocking=True))
                for b in step
            ]
        if beside:
            steps_stream = torch.cuda.current_stream(device)
            steps_stream.wait_stream(beside)
            for copy in chain.from_iterable(parts):
                copy.record_stream(steps_stream)  # its memory is free when the step is done
        ids: Any = [b.image_id for b in step]  # (B,) each, on the host
        bad = [
            (index, reason)
            for b in step
            for text in b.bad
            if text
            for index, reason in json.loads(text)
        ]
        cost = torch.stack([b.cost.sum(0) for b in step]).sum(0)  # (5,)
        yield Batch(parts, torch.cat(ids).tolist(), bad, cost)


@contextmanager
def loading() -> Iterator[None]:
    """Turn errors of the loader into NoData, but not those of a GPU, whose memory it pins."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, OSError, EOFError) as error:  # a worker was killed, a disk fails
        died = "a DataLoader worker has died: " * isinstance(error, (ConnectionError, EOFError))
        raise NoData(f"{died}{type(error).__name__}: {error}") from error


def fetch(batches: Iterator[data.Sample], count: int) -> list[data.Sample]:
    """The loader's next local batches; fewer at its end."""
    with loading():
        return list(islice(batches, count))


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started meanwhile never get the signals that ask this one to stop.

    A launcher sends them to all processes of a rank, and they must reach the rank's own alone. Set
    twice, because starting multiprocessing's resource tracker unblocks SIGTERM.
    """
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


# ---------------------------------------------------------------------------------------------
# Told


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
        self.count = agreement.run_on_rank0(self._known)

    def _known(self) -> int:
        if os.path.exists(self.path):
            if not os.path.isfile(self.path):  # a FIFO would be waited for
                raise ValueError(f"{self.path} is no file: move it away")
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
        every = agreement.gather_to_rank0(self.pending)
        self.pending = []
        self.count, problem = agreement.run_on_rank0(partial(self._listed, every or []))
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
