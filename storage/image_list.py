"""The list of a million images: made once, kept in a file that all processes map into memory."""

import io
import json
import os
import resource
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import IO, Any

import numpy as np

import data
from runtime.process import throttled_progress


@dataclass(frozen=True)
class ImageList:
    """The images below one folder, or of a pack of them: a data.ImageSource.

    It is one array, with no Python object per image. If it has an `index_file`, a copy in another
    process maps that file into memory: a million images take 80 MB, once per node.
    """

    root: str
    table: np.ndarray  # (N,) of `make_table`
    classes: tuple[str, ...]
    shards: tuple[str, ...] = ()  # names of the tar files of a pack
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

    @property
    def sizes(self) -> np.ndarray:
        """Return the bytes of each file (N,)."""
        return self.table["size"]

    def name(self, index: int) -> str:
        """Return an image's path relative to the folder, or within the pack."""
        return os.fsdecode(self.table[index]["name"])

    def path(self, index: int) -> str:
        """Return an image's path for messages; in a pack, the path of the shard and the member."""
        if not self.shards:
            return os.path.join(self.root, self.name(index))
        shard = self.shards[self.table[index]["shard"]]
        return os.path.join(self.root, shard, self.name(index))

    def read(self, index: int) -> bytes:
        """Read a whole image file; OSError if it cannot be read."""
        with self.open(index) as file:
            return file.read()

    def open(self, index: int) -> IO[bytes]:
        """Open an image file, to read parts of it; from a pack, read it into memory. OSError."""
        if not self.shards:
            return open(self.path(index), "rb", buffering=0)
        row = self.table[index]
        file = self.open_shard(self.shards[row["shard"]])
        # Not mapped into memory: that would ask a parallel file system for one page at a time.
        return io.BytesIO(read_range(file.fileno(), int(row["start"]), int(row["size"])))

    def open_shard(self, name: str) -> io.FileIO:
        """Return an open shard of the pack; open it first if necessary.

        Half of the files that a process may open are left for other uses, such as the loader's.
        """
        if name in self.opened:
            return self.opened[name]
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        while self.opened and len(self.opened) >= most // 2:
            oldest = next(iter(self.opened))
            self.opened.pop(oldest).close()
        file = io.FileIO(os.path.join(self.root, name))
        self.opened[name] = file
        return file


def read_range(descriptor: int, start: int, size: int) -> bytes:
    """Read `size` bytes of an open file, or up to its end; Linux reads at most 2 GiB at once."""
    parts = []
    while size > 0:
        part = os.pread(descriptor, size, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def make_table(names: list[bytes], *columns: Any) -> np.ndarray:
    """Make the array of a list (N,): path, class, bytes; in a pack also its shard and place."""
    longest = max(len(name) for name in names)
    kinds = [("name", f"S{longest}"), ("label", "i4"), ("size", "i8")]
    table = np.zeros(len(names), [*kinds, ("shard", "i4"), ("start", "i8")])
    table["name"] = names
    for kind, values in zip(("label", "size", "shard", "start"), columns, strict=False):
        table[kind] = values
    return table


def list_images(
    root: str, out: str | None = None, *, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> ImageList:
    """List a folder as `data.scan` does, and the bytes of its files; or load a pack's list.

    A new list is kept in the folder `out`, if that is given. Prints how many files are left out,
    and why. OSError or ValueError as in `data.scan`.
    """

    def size(name: str) -> int:
        path = os.path.join(root, name)
        return os.path.getsize(path) if os.path.exists(path) else 0  # a link to nothing

    left_out: dict[str, int] = {}
    if is_pack(root):
        files = load_index(os.path.join(root, "pack.index"), root)
        if include or exclude:
            files, left_out = choose(files, include, exclude)
    else:
        found = data.scan(root, throttled_progress("listing"), include=include, exclude=exclude)
        left_out = found.left_out
        with ThreadPool(16) as threads:  # a parallel file system takes long for each size
            sizes = threads.map(size, found.names)
        names = [os.fsencode(name) for name in found.names]
        files = ImageList(root, make_table(names, found.labels, sizes), found.classes)
    if left_out:
        print(f"{root}: {len(files)} images; left out {data.describe_counts(left_out)}")
    if files.index_file or out is None:
        return files
    os.makedirs(out, exist_ok=True)
    return save_index(files, os.path.join(out, "images.index"))


def choose(
    files: ImageList, include: Sequence[str], exclude: Sequence[str]
) -> tuple[ImageList, dict[str, int]]:
    """Return the images of a pack that match the patterns, and {reason: number left out}.

    A pattern chooses the same images as in the folder that was packed: the ending that the pack may
    have added does not count. ValueError if none is chosen.
    """
    rows: list[int] = []
    left_out = Counter({f"excluded by {pattern}": 0 for pattern in exclude})
    for index in range(len(files)):
        name = name_before_packing(files.name(index))
        reason = data.reason_to_leave_out(name, include, exclude)
        if reason:
            left_out[reason] += 1
        else:
            rows.append(index)
    if not rows:
        counts = data.describe_counts(left_out)
        raise ValueError(f"no image in the pack {files.root} is chosen: {counts}")
    table = files.table[rows]
    names = [files.name(index) for index in rows]
    table["label"], classes = data.classes_by_folder(names)
    return replace(files, table=table, classes=classes, index_file=None), left_out


def name_before_packing(name: str) -> str:
    """Return the name of a pack's image without the .jpg or .npy that `pack` may have added."""
    stem, ending = os.path.splitext(name)
    added = ending in (".jpg", ".npy") and stem.lower().endswith(data.EXTENSIONS)
    return stem if added else name


def save_index(files: ImageList, path: str) -> ImageList:
    """Write a list to one file; return the list with that file mapped into memory."""
    from checkpoint import atomic_write  # not above: a loader worker needs no DCP

    with atomic_write(Path(path)) as stream:
        content = io.BytesIO()
        np.save(content, files.table)  # to a real file, it would hide why that cannot be written
        stream.write(content.getbuffer())
        stream.write(json.dumps([files.classes, files.shards]).encode())
    return load_index(os.path.abspath(path), files.root)


def load_index(path: str, root: str) -> ImageList:
    """Map a list that `save_index` wrote into memory; its images are in `root` now.

    ValueError if it is no such file. Nothing in the file is executed.
    """
    try:
        table = np.lib.format.open_memmap(path, mode="r")
        with open(path, "rb") as file:
            file.seek(table.offset + table.nbytes)
            classes, shards = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): create it again") from None
    return ImageList(root, table.view(np.ndarray), tuple(classes), tuple(shards), path)


def fingerprint(files: ImageList) -> str:
    """Compute a checksum of all names and sizes."""
    names = files.table["name"]
    # As wide as the longest needs it: the column of a part of a pack is as wide as all of it.
    longest = np.char.str_len(names).max()
    checksum = zlib.crc32(names.astype(f"S{longest}").tobytes())
    return f"{zlib.crc32(files.table['size'].tobytes(), checksum):08x}"


def lists_overlap(one: ImageList, other: ImageList) -> bool:
    """Tell whether two lists have a file in common, or are copies of each other.

    Copies have the same names and sizes, and three of their images the same content.
    """
    if fingerprint(one) == fingerprint(other):
        sample = (0, len(one) // 2, len(one) - 1)
        return all(one.read(index) == other.read(index) for index in sample)
    roots = os.path.realpath(one.root), os.path.realpath(other.root)
    if os.path.commonpath(roots) not in roots:  # neither folder contains the other
        return False
    found = []
    for files, root in zip((one, other), roots, strict=True):
        names = map(files.name, range(len(files)))
        found.append({os.path.join(root, name) for name in names})
    return not found[0].isdisjoint(found[1])


def is_pack(folder: str) -> bool:
    """Tell whether `folder` is a pack of images, not a folder of image files."""
    return os.path.exists(os.path.join(folder, "pack.index"))


def stats_file(folder: str) -> str:
    """Return where `prepare.py stats` keeps the mean and standard deviation of each channel.

    Every spelling of a folder gives the same path: `.`, a link to it, or a slash at its end.
    """
    folder = os.path.realpath(folder)
    if is_pack(folder):
        return os.path.join(folder, "stats.json")
    # beside a folder, not in it: a new file in it would change the list of its files
    return f"{folder}.stats.json"


def read_stats(path: str) -> tuple[data.ChannelStats, str | None]:
    """Read a file of statistics -> them, and the fingerprint of the images that were measured.

    A file that was written by hand has none. ValueError if training cannot use the statistics.
    """
    with open(path, "rb") as file:
        content = file.read()
    try:
        found = json.loads(content)
        mean = np.array(found["mean"], np.float64)  # (C,), as is `std`
        std = np.array(found["std"], np.float64)
        one_each = mean.ndim == 1 and mean.size > 0 and mean.shape == std.shape
        finite = np.isfinite(mean).all() and np.isfinite(std).all()
        if not one_each or not finite or std.min() <= 0:
            raise ValueError("each channel needs a finite mean, and a deviation above 0")
        if found["dtype"] not in data.ARRAY_DTYPES:
            raise ValueError(f"dtype {found['dtype']!r:.40} is none of {data.ARRAY_DTYPES}")
        stats = data.ChannelStats(tuple(mean.tolist()), tuple(std.tolist()), found["dtype"])
        return stats, found.get("images")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        what = f"{path} is not as `prepare.py stats` writes it ({data.describe_file_error(error)})"
        raise ValueError(f"{what}: remove it and type that, or mend it") from None
