"""Read every image of a folder in several processes: which are broken, mean and deviation."""

import csv
import errno
import io
import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import numpy as np

import data
from runtime import process
from runtime.image_source import stats_file
from runtime.process import throttled_progress
from storage.image_list import ImageList, list_images, save_index
from storage.safe_files import replacing
from storage.tiff import read_bands

PART = 64  # images that a process reads before it reports
LARGE = 2**22  # pixels of an image, beyond which some of its rows and columns are enough
KILLED = "a worker process was killed, perhaps for lack of memory: use fewer --workers"
Say = Callable[[str], None]
Sums = dict[tuple[int, str], Any]  # by channels and dtype of images; (0, ""): cannot be read


def for_each(
    work: Callable[[ImageList, range], Any],
    files: ImageList,
    workers: int,
    say: Say,
    parts: Sequence[range] = (),
) -> Iterator[Any]:
    """Yield work(files, images) of each part in turn; one worker is this process itself.

    RuntimeError where a worker process dies.
    """
    progress, pool, starts = throttled_progress(say, "reading"), None, range(0, len(files), PART)
    parts = parts or [range(first, min(first + PART, len(files))) for first in starts]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run: Any = map
            if workers > 1:
                files = save_index(files, f"{folder}/list")  # which they map: none has a copy
                server, start = process.fork_server(), process.start_worker
                pool = ProcessPoolExecutor(workers, server, start)
                run = pool.map
            for part, found in zip(parts, run(partial(work, files), parts), strict=True):
                progress(part.stop)
                yield found
        except BrokenProcessPool:
            raise RuntimeError(KILLED) from None
        finally:
            if pool:
                pool.shutdown(wait=True, cancel_futures=True)


def find_problems(files: ImageList, part: range) -> list[tuple[str, str, None]]:
    """Return (path, reason, None) of the images of `part` that training could not read."""
    found = []
    for index in part:
        try:
            image, _ = data.open_image(files.read(index))
            if not isinstance(image, np.ndarray):  # damage shows at any scale
                data.decode(image, reduce=8 if image.format == "JPEG" else 1)
        except Exception as error:  # Pillow raises many kinds for a broken file
            bad_sector = getattr(error, "errno", None) == errno.EIO  # training would end there
            reason = str(error) if bad_sector else data.file_fault(error)
            found.append((files.path(index), reason, None))
    return found


def check_images(folder: str, out: str, workers: int, say: Say) -> int:
    """Decode every image, write the unreadable ones to the CSV file `out`, return their number."""
    if not os.path.isdir(above := os.path.dirname(out) or "."):
        raise ValueError(f"--out {out}: there is no folder {above}")
    files, broken = list_images(folder, say), []
    for rows in for_each(find_problems, files, workers, say):
        for path, reason, _ in rows:
            say(f"{path}: {reason}")
        broken += rows
    if broken or os.path.exists(out):
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("path", "reason", "step"), *broken])  # as training does
        with replacing(out) as stream:
            stream.write(text.getvalue().encode(errors="surrogateescape"))
    more = f": see {out}" if broken else ""
    say(f"{len(broken)} of {len(files)} images cannot be read{more}")
    return len(broken)


# --- Mean and deviation of each channel


def read_pixels(files: ImageList, index: int) -> np.ndarray:
    """Read and decode an image -> (C, H, W), every k-th row and column of a large one."""
    content = files.read(index)
    bands = read_bands(content)
    image, (width, height) = data.open_image(content if bands is None else bands)
    if not isinstance(image, np.ndarray):
        image = np.moveaxis(np.asarray(data.decode(image)), 2, 0)
    every = max(1, math.isqrt(width * height // LARGE))
    return image[:, ::every, ::every]


def sum_moments(files: ImageList, part: range) -> Sums:
    """Add up images, by kind -> (4, C) float64: count, means, squares of means, variances."""
    sums: Sums = defaultdict(int)
    for index in part:
        try:
            pixels = read_pixels(files, index)
        except Exception as error:  # Pillow raises many kinds for a broken file
            data.file_fault(error)
            sums[0, ""] += np.ones((4, 1))
        else:
            mean = pixels.mean((1, 2), np.float64)  # (C,)
            variance = [channel.var(dtype=np.float64) for channel in pixels]
            sums[len(mean), pixels.dtype.name] += np.stack([mean**0, mean, mean**2, variance])
    return sums


def write_stats(folder: str, workers: int, say: Say) -> None:
    """Measure all images of a folder and write their statistics where training looks for them.

    Every image has the same weight, as in training. Where images differ in channels or type, the
    most frequent kind is measured. ValueError where no image can be read.
    """
    files, total, path = list_images(folder, say), defaultdict[Any, Any](int), stats_file(folder)
    for sums in for_each(sum_moments, files, workers, say):
        for kind, row in sums.items():
            total[kind] += row
    kinds = sorted(total, key=lambda kind: (kind == (0, ""), -total[kind][0, 0], kind))
    channels, dtype = kinds[0]
    if not channels:
        raise ValueError(f"no image in {folder} can be read: `prepare.py scan` says why")
    count, means, squares, variances = total[kinds[0]]
    scale, mean = 255 if dtype == "uint8" else 1, means / count
    std = np.sqrt(np.maximum((variances + squares) / count - mean**2, 0))
    std[std <= 1e-7 * abs(mean)] = scale  # a constant: less than float32 tells apart
    text = {"mean": (mean / scale).tolist(), "std": (std / scale).tolist(), "dtype": dtype}
    with replacing(path) as stream:
        stream.write(json.dumps(text).encode())
    what = f"{channels} channels of {dtype}; train with --channels {channels}"
    say(f"{path}: {int(count[0])} of {len(files)} images, {what}")
    for kind in kinds[1:]:
        what = "{} channels of {}".format(*kind) if kind[0] else "cannot be read"
        say(f"left out: {int(total[kind][0, 0])} images ({what})")
