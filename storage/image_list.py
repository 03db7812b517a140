"""The list of a million images: made once, kept in a file that all processes map into memory."""

import io
import os
import random
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

import data
from runtime.process import throttled_progress
from storage.safe_files import naming, regular, replacing

PACK_INDEX = "pack.index"  # in the folder of a pack, beside its shards
INDEX_FORMAT = 1
CHECKED_FILES = 200  # whose size and time are compared before a list is trusted


@dataclass(frozen=True)
class ImageList:
    """The images below one folder, or of a pack of them: a data.ImageSource.

    A few blocks of memory, no Python object per image. With an `index_file` a copy of the list in
    another process is that file mapped into memory: a million images take 80 MB of a node, once.
    """

    root: str
    names: np.ndarray  # uint8, all relative paths, one after the other
    ends: np.ndarray  # (N,) int64, where in `names` each of them ends
    labels: np.ndarray  # (N,) int32, index into classes, -1 for images that lie in root itself
    sizes: np.ndarray  # (N,) int64, bytes of the file
    times: np.ndarray  # (N,) int64, time of the last change, ns
    classes: tuple[str, ...]
    folders: dict[str, tuple[int, int]]  # relative path: time of the last change, images in it
    shards: tuple[str, ...] = ()  # of a pack: its tar files,
    shard: np.ndarray | None = None  # (N,) int32, which of them an image lies in,
    start: np.ndarray | None = None  # (N,) int64, and at which byte it starts
    index_file: str | None = None
    opened: dict[int, io.FileIO] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.ends)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.index_file:
            return load_index, (self.index_file, self.root)
        values = [getattr(self, f.name) for f in fields(self) if f.name != "opened"]
        return ImageList, tuple(values)

    def name(self, index: int) -> str:
        """Return an image's path relative to the folder, or within the pack."""
        first = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.names[first : int(self.ends[index])].tobytes())

    def path(self, index: int) -> str:
        """Return an image's path for messages; in a pack, that of the shard and the member."""
        place = (self.shards[self.shard[index]],) if self.shard is not None else ()
        return os.path.join(self.root, *place, self.name(index))

    def read(self, index: int) -> bytes:
        """Read a whole image file; OSError, or ValueError where a shard is truncated."""
        if self.shard is None or self.start is None:
            path = self.path(index)
            with naming(path), open(path, "rb", buffering=0, opener=regular) as file:
                return file.read()
        number, size = int(self.shard[index]), int(self.sizes[index])
        # Not mapped: a parallel file system would be asked for one page at a time.
        if number not in self.opened:
            shard = os.path.join(self.root, self.shards[number])
            self.opened[number] = io.FileIO(shard, opener=regular)
        with naming(self.shards[number]):
            content = os.pread(self.opened[number].fileno(), size, int(self.start[index]))
        if len(content) < size:
            shard = self.shards[number]
            raise ValueError(f"shard {shard} is truncated: run prepare.py pack again, it resumes")
        return content


def list_images(root: str, progress: Callable[[int], None] | None = None) -> ImageList:
    """List a folder as `data.scan` does, and the sizes and times of its files; or load a pack's."""
    if os.path.exists(os.path.join(root, PACK_INDEX)):
        return load_index(os.path.join(root, PACK_INDEX), root)
    folders: dict[str, tuple[int, int]] = {}
    count = 0

    def visit(folder: str, images: int) -> None:
        nonlocal count
        folders[os.path.relpath(folder, root)] = (os.stat(folder).st_mtime_ns, images)
        count += images
        if progress:
            progress(count)

    found = data.scan(root, visit)
    paths = [os.fsencode(name) for name in found.names]

    def status(some: list[bytes]) -> np.ndarray:
        rows = np.zeros((len(some), 2), np.int64)
        for i, path in enumerate(some):
            try:
                it = os.stat(os.path.join(os.fsencode(root), path))
            except OSError as error:
                if error.errno not in data.FILE_ERRNOS:
                    raise
                continue  # a link to nothing: reading it will fail
            rows[i] = it.st_size, it.st_mtime_ns
        return rows

    with ThreadPoolExecutor(16) as threads:  # a parallel file system takes long for each
        parts = [paths[first : first + 1000] for first in range(0, len(paths), 1000)]
        sizes, times = np.concatenate(list(threads.map(status, parts))).T.copy()  # (N,) each
    return ImageList(
        root,
        names=np.frombuffer(b"".join(paths), np.uint8),
        ends=np.cumsum([len(path) for path in paths], dtype=np.int64),
        labels=np.array(found.labels, np.int32),
        sizes=sizes,
        times=times,
        classes=found.classes,
        folders=folders,
    )


def save_index(files: ImageList, path: str) -> ImageList:
    """Write a list to one file, and return it mapped from there."""
    left_out = ("root", "index_file", "opened")  # root may differ where the file is read
    values = {f.name: getattr(files, f.name) for f in fields(files) if f.name not in left_out}
    # an array becomes a tensor, whose storage torch.load can map; the rest is plain
    plain = {
        k: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v
        for k, v in (values | {"format": INDEX_FORMAT}).items()
    }
    content = io.BytesIO()  # torch.save to a full disk says neither that nor which disk
    torch.save(plain, content)
    with replacing(path) as stream:
        stream.write(content.getbuffer())
    return load_index(os.path.abspath(path), files.root)


def load_index(path: str, root: str) -> ImageList:
    """Map a list that `save_index` wrote, of images that are in `root` now.

    ValueError where it is no such file. Nothing in the file is executed.
    """
    with open(path, "rb", buffering=0, opener=regular):
        pass  # torch.load would wait for the other end of a FIFO
    try:
        # PyTorch finds files by UTF-8 paths only; of another file every process has a copy
        mapped = path.encode(errors="replace") == os.fsencode(path)
        with nullcontext(path) if mapped else open(path, "rb") as source:
            loaded: dict[str, Any] = torch.load(
                source, mmap=mapped, weights_only=True, map_location="cpu"
            )
        if loaded.pop("format") != INDEX_FORMAT:
            raise ValueError("another format")
        values: Any = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in loaded.items()}
        return ImageList(root, **values, index_file=path)
    except OSError:
        raise
    except Exception as error:
        what = type(error).__name__  # torch.load's own text advises to load it unsafely
        raise ValueError(
            f"{path} is not an index written by prepare.py, or is damaged ({what}): create it again"
        ) from None


def outdated(files: ImageList) -> str | None:
    """Say why a list no longer describes its folder, as far as a fast check shows; else None.

    Each folder must have its time of change and its number of images, a sample of the files their
    sizes and times; each shard of a pack must have its length.
    """
    if files.shard is not None and files.start is not None:
        needed = np.zeros(len(files.shards), np.int64)
        np.maximum.at(needed, files.shard, files.start + files.sizes)
        for name, size in zip(files.shards, needed.tolist(), strict=True):
            path = os.path.join(files.root, name)
            if not os.path.isfile(path) or os.path.getsize(path) < size:
                return f"{path} is missing or truncated: run prepare.py pack again, it resumes"
        return None
    for folder, (changed, _) in files.folders.items():
        try:
            now = os.stat(os.path.join(files.root, folder)).st_mtime_ns
        except OSError:
            return f"the folder {folder} is gone"
        if now != changed:
            return f"the folder {folder} has changed"
    if sum(count for _, count in files.folders.values()) != len(files):
        return "it is incomplete"
    for index in random.Random(0).sample(range(len(files)), min(CHECKED_FILES, len(files))):
        with suppress(OSError):  # a link to nothing: zeros then as now
            status = os.stat(files.path(index))
            if (status.st_size, status.st_mtime_ns) != (files.sizes[index], files.times[index]):
                return f"{files.name(index)} has changed"
    return None


def find_list(folder: str, out: str | None, say: Callable[[str], None]) -> ImageList:
    """Load the list of a folder from beside it or from `out`, if it is up to date; else make it.

    A new list is kept in `out`; without `out` nothing is written. Raises as `list_images`, and
    ValueError for a damaged pack.
    """
    folder = folder.rstrip("/") or "/"
    kept = os.path.join(out or "", "images.index")
    packed = os.path.exists(os.path.join(folder, PACK_INDEX))
    for path in [os.path.join(folder, PACK_INDEX)] if packed else [f"{folder}.index", kept]:
        if os.path.exists(path):
            try:
                files = load_index(path, folder)
                problem = outdated(files)
            except (OSError, ValueError) as error:
                problem = str(error)
            if problem is None:
                return files
            if packed:
                raise ValueError(problem)
            say(f"ignoring {path}: {problem}")
    files = list_images(folder, throttled_progress(say, "listing"))
    if out is None:
        return files
    os.makedirs(out, exist_ok=True)
    return save_index(files, kept)


def fingerprint(files: ImageList, times: bool = True) -> str:
    """Compute a checksum of all names and sizes, and of the times of their last change."""
    value = 0
    for array in (files.names, files.ends, files.sizes, *([files.times] if times else [])):
        value = zlib.crc32(array.data, value)
    return f"{value:08x}"
