"""Read all images of a folder in several processes: find broken ones, measure the others."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image

import data
from checkpoint import atomic_write
from runtime import process
from storage.arrays import Bands, declares_missing, has_deep_colours, read_image
from storage.image_list import ImageList, fingerprint, stats_file
from storage.stacking import SceneList

PART = 64  # images that a process reads before it reports
LARGE = 2**22  # pixels; of a larger image only some rows and columns are measured
DEEP = "16-bit "  # how the mode of a 16-bit PNG begins


class Kind(NamedTuple):
    """What images must have in common to be trained on together."""

    channels: int
    dtype: str
    packed_only: bool  # training can read such a file only from a pack
    mode: str = ""  # `picture_mode` of a picture, which training takes as RGB
    about: str = ""  # what the user should know of them

    def __str__(self) -> str:
        text = f"{self.channels} channels of {self.dtype}"
        if self.mode:
            text += f" ({self.mode} pictures)"
        if self.about:
            text += f", {self.about}"
        return f"{text}, for training only from a pack" if self.packed_only else text


def picture_mode(image: Any) -> str:
    """Name what the pixels of a picture, not decoded yet, are: grey, palette, or Pillow's mode."""
    if image.mode.startswith("I;16"):
        return f"{DEEP}grey"
    if has_deep_colours(image):
        return f"{DEEP}{image.mode}"
    if image.mode in ("1", "L", "LA"):
        return "grey"
    if image.mode in ("P", "PA"):
        return "palette"
    return image.mode


def printable(path: str) -> str:
    """Return a path as it is, or in quotes with \\n for a line break and the like."""
    return path if path.isprintable() else repr(path)


@dataclass
class Report:
    """What was found in some images; `add` joins two reports."""

    problems: list[str] = field(default_factory=list)  # a sentence for each unreadable image
    kinds: Counter[Kind] = field(default_factory=Counter)  # kind -> number of images
    first: dict[Kind, str] = field(default_factory=dict)  # kind -> path of one image
    # (channels, dtype) -> (4, C) float64: the number of images, and the sums over them of mean,
    # squared mean and variance, all without pixels that are nodata
    sums: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    values: int = 0  # number of values in float32 arrays
    missing: int = 0  # how many of these are NaN: nodata

    def count(self, kind: Kind, path: str) -> None:
        """Count an image that can be read."""
        self.kinds[kind] += 1
        self.first.setdefault(kind, printable(path))

    def add(self, other: "Report") -> None:
        self.problems += other.problems
        self.kinds.update(other.kinds)
        self.first = other.first | self.first
        for key, sums in other.sums.items():
            self.sums[key] = self.sums.get(key, 0) + sums
        self.values += other.values
        self.missing += other.missing

    def print_kinds(self) -> None:
        """Print how many images there are of each kind, and what to do if they differ."""
        several = len(self.kinds) > 1
        for kind, count in self.kinds.most_common():
            print(f"{count} images: {kind}" + (f", such as {self.first[kind]}" if several else ""))
        if len({(kind.channels, kind.dtype) for kind in self.kinds}) > 1:
            print("training takes one kind: choose it by --include PATTERN or --exclude PATTERN")
            if len({kind.channels for kind in self.kinds}) == 1:
                print("if only some declare missing pixels: `pack --nodata=NUMBER` makes all alike")
        elif several:
            print("training takes all of these: leave out masks by --include or --exclude PATTERN")
        if any(kind.mode.startswith(DEEP) for kind in self.kinds):
            print(f"{DEEP}pictures: training divides their values by 257 (of colours by 256)")
        if self.missing:
            share = self.missing / self.values
            print(f"nodata: {self.missing} of {self.values} values ({share:.2%}), not measured")


def for_each(work: Callable[..., Any], workers: int, *columns: Sequence[Any]) -> Iterator[Any]:
    """Yield the results of work as `map` does, in several processes; with one worker in this one.

    The last column has parts of a list of images. RuntimeError if a worker process dies.
    """
    progress = process.throttled_progress("reading")
    done = 0
    pool = ProcessPoolExecutor(workers, process.fork_server(), process.start_worker)
    run: Any = pool.map if workers > 1 else map
    try:
        for part, found in zip(columns[-1], run(work, *columns), strict=True):
            done += len(part)
            progress(done)
            yield found
    except BrokenProcessPool as error:
        advice = "if host memory ran out, use fewer --workers"
        raise RuntimeError(f"a process that reads images ended: {advice} ({error})") from None
    finally:
        pool.shutdown(cancel_futures=True)


def read_part(nodata: float | None, files: ImageList) -> Report:
    """Read images as `read_image` does, and measure them; for errors see `noting_problems`.

    Only every k-th row and column of a large image is measured.
    """
    report = Report()
    for index in range(len(files)):
        with noting_problems(report, files, index), files.open(index) as file:
            measure_image(file, files.path(index), nodata, report)
    return report


@contextmanager
def noting_problems(report: Report, files: ImageList | SceneList, index: int) -> Iterator[None]:
    """Note that an image cannot be read; pass on errors that are not the file's fault."""
    path = printable(files.path(index))
    try:
        yield
    except MemoryError:
        raise MemoryError(f"{path}: out of memory: use fewer --workers") from None
    except ImportError as error:
        raise ImportError(f"{path}: {error}") from None
    except Exception as error:  # Pillow raises many kinds for a broken file
        lost = isinstance(error, FileNotFoundError) and files.sizes[index] > 0
        if lost or not data.is_file_error(error):
            raise  # a file that has vanished: the file system failed, not the image
        report.problems.append(f"{path}: {data.describe_file_error(error)}")


def measure_image(file: IO[bytes], path: str, nodata: float | None, report: Report) -> None:
    """Add what is found in one image to a report; raise if it cannot be read."""
    image = read_image(file, nodata)
    kind = kind_of(image)
    channels: Iterable[np.ndarray]
    if isinstance(image, Image.Image):
        channels = np.moveaxis(np.asarray(data.decode(image)), 2, 0)
    else:
        channels = image
    sums, values, missing = measure_channels(channels)
    # The image is counted only now, when all of it has been read.
    report.count(kind, path)
    key = (kind.channels, kind.dtype)
    report.sums[key] = report.sums.get(key, 0) + sums
    report.values += values
    report.missing += missing


def kind_of(image: Image.Image | Bands) -> Kind:
    """Return the kind that an image, not decoded yet, has in training."""
    if isinstance(image, Bands):
        return Kind(len(image.bands), image.dtype.name, image.packed_only, about=image.about)
    about = ""
    if declares_missing(image):
        about = "which declares missing pixels but is taken as stored (see `pack --nodata`)"
    return Kind(3, "uint8", packed_only=False, mode=picture_mode(image), about=about)


def measure_channels(channels: Iterable[np.ndarray]) -> tuple[np.ndarray, int, int]:
    """Measure channels (H, W) -> (4, C), the number of float32 values, how many of them are NaN.

    Each channel gives 1, mean, squared mean and variance, or zeros if all of it is NaN.
    """
    found = []
    values = 0
    missing = 0
    for channel in channels:
        stride = max(1, math.isqrt(channel.size // LARGE))
        some = channel[::stride, ::stride]
        if channel.dtype.kind == "f":
            values += channel.size
            missing += int(np.isnan(channel).sum())
            some = some[~np.isnan(some)]
        if some.size:
            mean = some.mean(dtype=np.float64)
            found.append((1, mean, mean**2, some.var(dtype=np.float64)))
        else:
            found.append((0, 0, 0, 0))
    return np.array(found).T, values, missing


def read_folder(files: ImageList, workers: int, nodata: float | None = None) -> Report:
    """Read every image of a list and measure it; `nodata` as in `read_image`."""
    report = Report()
    parts = [files.part(first, first + PART) for first in range(0, len(files), PART)]
    for found in for_each(partial(read_part, nodata), workers, parts):
        report.add(found)
    return report


def save_stats(files: ImageList, report: Report, bands: Sequence[str] = ()) -> None:
    """Write statistics of the images of a report, and names of their bands, for training to find.

    Every image has the same weight, as in training. If images differ in channels or dtype, those of
    the most frequent kind are taken. ValueError if no image can be read.
    """
    if not report.sums:
        raise ValueError(f"no image in {files.root} can be read: {report.problems[0]}")
    key = max(report.sums, key=lambda key: report.sums[key][0].max())
    channels, dtype = key
    count, means, squares, variances = report.sums[key]  # (C,) each
    measured = int(count.max())
    count = np.maximum(count, 1)  # it is 0 for a channel that is nodata in all images
    scale = 255 if dtype == "uint8" else 1
    mean = means / count
    std = np.sqrt(np.maximum((variances + squares) / count - mean**2, 0))
    std[std <= 1e-7 * abs(mean)] = scale  # a constant channel: float32 shows no difference
    text: dict[str, Any] = {
        "mean": (mean / scale).tolist(),
        "std": (std / scale).tolist(),
        "dtype": dtype,
        "images": fingerprint(files),
    }
    if bands:
        text["bands"] = list(bands)
    path = stats_file(files.root)
    with atomic_write(Path(path)) as stream:
        stream.write(json.dumps(text).encode())
    print(f"{path}: {measured} of {len(files)} images, {channels} channels of {dtype}")


def check_can_save_stats(files: ImageList) -> None:
    """Raise OSError if `save_stats` could not write, which would lose the work before it."""
    path = stats_file(files.root)
    if not os.access(os.path.dirname(path), os.W_OK):
        raise OSError(f"{path} cannot be written: the folder is read-only, or not yours")
