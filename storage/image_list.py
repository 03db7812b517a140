"""The list of a million images: made once, kept in a file that all processes map into memory."""

import io
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

import data
from runtime.image_source import is_pack
from runtime.process import throttled_progress


@dataclass(frozen=True)
class ImageList:
    """The images below one folder, or of a pack of them: a data.ImageSource.

    One array, no Python object per image. With an `index_file` a copy of the list in another
    process is that file mapped into memory: a million images take 80 MB of a node, once.
    """

    root: str
    table: np.ndarray  # (N,) of `make_table`
    classes: tuple[str, ...]
    shards: tuple[str, ...] = ()  # of a pack: the names of its tar files
    index_file: str | None = None
    opened: dict[str, io.FileIO] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.table)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.index_file:
            return load_index, (self.index_file, self.root)
        return ImageList, (self.root, self.table, self.classes, self.shards)

    def part(self, first: int, last: int) -> "ImageList":
        """Return the images from `first` to before `last`."""
        return replace(self, table=self.table[first:last], classes=(), index_file=None)

    @property
    def labels(self) -> np.ndarray:
        """Return indices into `classes` (N,) int32; -1 for images that lie in root itself."""
        return self.table["label"]

    def name(self, index: int) -> str:
        """Return an image's path relative to the folder, or within the pack."""
        return os.fsdecode(self.table[index]["name"])

    def path(self, index: int) -> str:
        """Return an image's path for messages; in a pack, that of the shard and the member."""
        place = self.shards[self.table[index]["shard"]] if self.shards else ""
        return os.path.join(self.root, place, self.name(index))

    def read(self, index: int) -> bytes:
        """Read a whole image file; OSError."""
        if not self.shards:
            with open(self.path(index), "rb", buffering=0) as file:
                return file.read()
        row = self.table[index]
        shard = os.path.join(self.root, self.shards[row["shard"]])
        if shard not in self.opened:
            self.opened[shard] = io.FileIO(shard)
        # Not mapped: a parallel file system would be asked for one page at a time.
        return os.pread(self.opened[shard].fileno(), int(row["size"]), int(row["start"]))


def make_table(names: list[bytes], *columns: Any) -> np.ndarray:
    """Make the array of a list (N,): path, class, bytes; in a pack, which shard and where in it."""
    kinds = {"name": f"S{max(map(len, names))}", "label": "i4", "size": "i8"}
    table = np.zeros(len(names), [*kinds.items(), ("shard", "i4"), ("start", "i8")])
    for kind, values in zip(table.dtype.names or (), (names, *columns), strict=False):
        table[kind] = values
    return table


def list_images(root: str, say: Callable[[str], None]) -> ImageList:
    """List a folder as `data.scan` does, and the bytes of its files; or load a pack's list."""

    def size(name: str) -> int:
        path = os.path.join(root, name)
        return os.path.getsize(path) if os.path.exists(path) else 0  # a link to nothing

    if is_pack(root):
        return load_index(os.path.join(root, "pack.index"), root)
    found = data.scan(root, throttled_progress(say, "listing"))
    with ThreadPool(16) as threads:  # a parallel file system takes long for each
        sizes = threads.map(size, found.names)
    names = [os.fsencode(name) for name in found.names]
    return ImageList(root, make_table(names, found.labels, sizes), found.classes)


def save_index(files: ImageList, path: str) -> ImageList:
    """Write a list to one file, and return it mapped from there."""
    from checkpoint import replacing  # not above: a loader worker needs no DCP

    with replacing(Path(path)) as stream:
        np.save(stream, files.table)
        stream.write(json.dumps([files.classes, files.shards]).encode())
    return load_index(os.path.abspath(path), files.root)


def load_index(path: str, root: str) -> ImageList:
    """Map a list that `save_index` wrote, of images that are in `root` now.

    ValueError where it is no such file. Nothing in the file is executed.
    """
    try:
        table = np.lib.format.open_memmap(path, mode="r")
        with open(path, "rb") as file:
            file.seek(table.offset + table.nbytes)
            classes, shards = map(tuple, json.load(file))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): create it again") from None
    return ImageList(root, table.view(np.ndarray), classes, shards, path)


def find_list(folder: str, out: str | None, say: Callable[[str], None]) -> ImageList:
    """List a folder, or load the list of a pack; a new list is kept in `out`, if that is given."""
    files = list_images(folder.rstrip("/") or "/", say)
    if files.index_file or out is None:
        return files
    os.makedirs(out, exist_ok=True)
    return save_index(files, os.path.join(out, "images.index"))


def fingerprint(files: ImageList) -> str:
    """Compute a checksum of all names and sizes."""
    names, sizes = (files.table[kind].tobytes() for kind in ("name", "size"))
    return f"{zlib.crc32(sizes, zlib.crc32(names)):08x}"
