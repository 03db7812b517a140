"""The images that a node has read, on its own disk, shared by all its processes.

Loader workers import this file: it needs no other rank.
"""

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from storage.image_list import ImageList, fingerprint

RESERVE = 0.05  # of a node-local disk, left free


class Staged:
    """Images that are copied to the node's disk when they are first read: a data.ImageSource.

    Two files in `folder`, named by the data set: one holds the images in the order in which they
    were read; the table says where each lies, and is mapped by all processes of the node. A process
    that needs an image which another one is reading waits for it. What does not fit is read from
    where it was.
    """

    def __init__(self, files: ImageList, folder: str) -> None:
        """Open or make the two files; OSError where the folder cannot be written."""
        self.files, self.folder, count = files, folder, len(files)
        os.makedirs(folder, exist_ok=True)
        stem = os.path.join(folder, f"images-{fingerprint(files)}")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.content = os.open(f"{stem}.staged", flags, 0o600)
        self.table = os.open(f"{stem}.table", flags, 0o600)
        self.mutex = threading.Lock()  # file locks keep processes apart, not threads
        size = 8 * (count + 2)
        with self.locked(count):
            new = os.fstat(self.table).st_size != size
            os.ftruncate(self.table, size)
        table = np.memmap(f"{stem}.table", np.int64, "r+", shape=(count + 2,))
        self.places = table[:count]  # (N,): 0, or 1 + the byte at which an image begins
        self.space = table[count:]  # (2,): bytes in use, bytes that fit
        if new:
            disk = shutil.disk_usage(folder)
            self.space[1] = max(0, disk.free - int(RESERVE * disk.total))

    def __reduce__(self) -> tuple[Any, ...]:
        return Staged, (self.files, self.folder)

    def __del__(self) -> None:
        for name in ("content", "table"):
            if hasattr(self, name):
                os.close(getattr(self, name))

    def __len__(self) -> int:
        return len(self.files)

    def path(self, index: int) -> str:
        """Return the path of the original."""
        return self.files.path(index)

    @contextmanager
    def locked(self, number: int) -> Iterator[None]:
        """Keep the other processes of the node off one image, or, by N, off the space in use."""
        fcntl.lockf(self.table, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self.table, fcntl.LOCK_UN, 1, number)

    def read(self, index: int) -> bytes:
        """Read an image, from the node's disk if it is there; raises as ImageList.read."""
        if not self.places[index]:
            with self.locked(index):
                if not self.places[index]:
                    content = self.files.read(index)
                    self.keep(index, content)
                    return content
        place, size = int(self.places[index]) - 1, int(self.files.sizes[index])
        return os.pread(self.content, size, place)

    def keep(self, index: int, content: bytes) -> None:
        """Copy an image to the node's disk, if there is room and its size is the listed one."""
        size = len(content)
        if size == 0 or size != self.files.sizes[index]:
            return
        with self.mutex, self.locked(len(self.files)):
            place, room = self.space.tolist()
            if place + size > room:
                return
            self.space[0] = place + size
        try:
            written = 0
            while written < size:
                written += os.pwrite(self.content, content[written:], place + written)
        except OSError:  # another program has filled the disk: what is here stays, no more is added
            self.space[1] = place
            return
        self.places[index] = place + 1  # last: until now no other process reads it

    def shortage(self) -> str | None:
        """Return a sentence where the disk will not hold all images."""
        room, whole = int(self.space[1]), int(self.files.sizes.sum())
        if room >= whole:
            return None
        return (
            f"{self.folder} has room for {room / 2**30:.2f} of {whole / 2**30:.2f} GiB: the images "
            "that come first are staged, the others read from where they are"
        )

    def fill(self, wanted: Callable[[], np.ndarray], threads: int = 4) -> None:
        """Copy these images until all are there or the disk is full."""

        def copy(index: int) -> None:
            if not self.places[index] and self.space[0] < self.space[1]:
                with suppress(Exception):  # training will find the same error, and report it
                    self.read(index)

        todo = wanted()
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(todo), 1000):
                list(pool.map(copy, todo[first : first + 1000].tolist()))
