"""Keep the images that a node has read on the node's own disk."""

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

import data
import mesh
from runtime import agreement
from runtime.config import Run
from runtime.device_batches import signals_blocked
from storage.image_list import fingerprint

RESERVE = 0.05  # of a node-local disk, left free


class Staged:
    """Images that a node reads from the shared file system once; from then on from its own disk.

    Two files in `folder`, named by the data set: one takes the images in the order in which they
    come, the other tells where each lies (N + 2 numbers, mapped by all processes of the node: 0 or
    its place + 1; then where the next goes, and how much fits). Who needs an image that another
    process is just reading waits for it. What does not fit is read where it was.
    """

    def __init__(self, files: data.ImageFiles, folder: str) -> None:
        """OSError where the folder cannot be written."""
        self.files, self.folder, count = files, folder, len(files)
        os.makedirs(folder, exist_ok=True)
        stem = os.path.join(folder, f"images-{fingerprint(files)}")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.content = os.open(f"{stem}.staged", flags, 0o600)
        self.table = os.open(f"{stem}.table", flags, 0o600)
        self.mutex = threading.Lock()  # file locks part processes, not threads
        size = 8 * (count + 2)
        with self.locked(count):
            fresh = os.fstat(self.table).st_size != size
            os.ftruncate(self.table, size)
        self.places = np.memmap(f"{stem}.table", np.int64, "r+", shape=(count + 2,))
        if fresh:
            disk = shutil.disk_usage(folder)
            self.places[count + 1] = max(0, disk.free - int(RESERVE * disk.total))

    def __reduce__(self) -> tuple[Any, ...]:
        return Staged, (self.files, self.folder)

    def __del__(self) -> None:
        for name in ("content", "table"):
            if hasattr(self, name):
                os.close(getattr(self, name))

    def __len__(self) -> int:
        return len(self.files)

    @property
    def labels(self) -> np.ndarray:
        return self.files.labels

    @contextmanager
    def locked(self, number: int) -> Iterator[None]:
        """Keep the other processes of the node off one image, or off the table's end."""
        fcntl.lockf(self.table, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self.table, fcntl.LOCK_UN, 1, number)

    def read(self, index: int) -> bytes:
        """As ImageFiles.read."""
        if not self.places[index]:
            with self.locked(index):
                if not self.places[index]:
                    content = self.files.read(index)
                    self.keep(index, content)
                    return content
        place, size = int(self.places[index]) - 1, int(self.files.sizes[index])
        return os.pread(self.content, size, place)

    def keep(self, index: int, content: bytes) -> None:
        """Copy to the node's disk, if there is room and the file is as it was listed."""
        end, size = len(self.files), len(content)
        if size == 0 or size != self.files.sizes[index]:
            return
        with self.mutex, self.locked(end):
            place, room = int(self.places[end]), int(self.places[end + 1])
            if place + size > room:
                return
            self.places[end] = place + size
        try:
            written = 0
            while written < size:
                written += os.pwrite(self.content, content[written:], place + written)
        except OSError:  # somebody else has filled the disk: what is there stays, no more comes
            self.places[end + 1] = place
            return
        self.places[index] = place + 1  # last: before that nobody reads it

    def shortage(self) -> str | None:
        """A sentence where the disk will not hold all."""
        room, whole = int(self.places[-1]), int(self.files.sizes.sum())
        if room >= whole:
            return None
        return (
            f"{self.folder} has room for {room / 2**30:.2f} of {whole / 2**30:.2f} GiB: the images "
            "that come first are staged, the others read from where they are"
        )

    def fill(self, wanted: Callable[[], np.ndarray], threads: int = 4) -> None:
        """Copy the images of these numbers until all are there or the disk is full."""
        todo = wanted()

        def copy(index: int) -> None:
            if not self.places[index] and self.places[-2] < self.places[-1]:
                with suppress(Exception):  # who needs it in training finds and tells it
                    self.read(index)

        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(todo), 1000):
                list(pool.map(copy, todo[first : first + 1000].tolist()))


def stage(
    run: Run, files: data.ImageFiles, ranks: mesh.Ranks, say: Callable[[str], None], steps: range
) -> Staged:
    """The same images by way of a node-local folder, which one process a node begins to fill.

    ValueError, on all ranks, where some rank cannot write there. Collective.
    """
    staged = agreement.run_on_all_ranks(partial(Staged, files, str(run.config.stage_dir)))
    first = ranks.rank - ranks.local_rank
    if ranks.local_rank == 0:
        mine = partial(
            wanted_on_node,
            run.images,
            run.config.seed,
            run.global_batch,
            run.local_batch,
            run.world_size,
            range(first, first + ranks.local_world_size),
            steps,
        )
        with signals_blocked():
            fill_in_background(staged, mine)
    told = agreement.gather_to_rank0(staged.shortage() if ranks.local_rank == 0 else None) or []
    for text in sorted({text for text in told if text})[:3]:
        say(f"warning: {text}")
    return staged


def wanted_on_node(
    count: int,
    seed: int,
    global_batch: int,
    local_batch: int,
    world_size: int,
    ranks: range,
    steps: range,
) -> np.ndarray:
    """The numbers, in order, of all images that some of these ranks will read in these steps."""
    images = data.Images(_Counted(count), 1, 1, seed, global_batch)
    wanted = np.zeros(count, bool)
    epoch_steps = images.epoch_samples // global_batch
    offset = np.arange(images.epoch_samples)
    reader = offset % global_batch // local_batch % world_size
    mine = (reader >= ranks.start) & (reader < ranks.stop)
    for epoch in range(steps.start // epoch_steps, -(-steps.stop // epoch_steps)):
        images.index(epoch * images.epoch_samples)  # draws the epoch's order
        step = epoch * epoch_steps + offset // global_batch
        now = mine & (step >= steps.start) & (step < steps.stop)
        wanted[images.order[: len(offset)][now]] = True
        if wanted.all():
            break
    return np.flatnonzero(wanted)


class _Counted:
    """A data set of which only the number of images matters."""

    labels = np.empty(0, np.int32)

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> bytes:
        raise AssertionError("its images are not to be read")


def _fill(staged: Staged, wanted: Callable[[], np.ndarray]) -> None:
    data.start_worker(0)  # ends with the rank that started it
    os.nice(10)
    staged.fill(wanted)


def fill_in_background(staged: Staged, wanted: Callable[[], np.ndarray]) -> Any:
    """Start the process that fills a node's disk; it ends when it is done, or with this one."""
    process = data.fork_server().Process(target=_fill, args=(staged, wanted), daemon=True)
    process.start()
    return process
