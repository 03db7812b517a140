"""Read every image of a folder in several processes: which are broken, mean and deviation."""

import csv
import io
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

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
    progress, run = throttled_progress(say, "reading"), map  # type: tuple[Any, Any]
    images = range(len(files))
    parts = parts or [images[first : first + PART] for first in images[::PART]]
    with ExitStack() as stack:
        if workers > 1:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            files = save_index(files, f"{folder}/list")  # which they map: none has a copy
            pool = ProcessPoolExecutor(workers, process.fork_server(), process.start_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
            run = pool.map
        try:
            for part, found in zip(parts, run(partial(work, files), parts), strict=True):
                progress(part.stop)
                yield found
        except BrokenProcessPool:
            raise RuntimeError(KILLED) from None


def find_problems(files: ImageList, part: range) -> list[tuple[str, str]]:
    """Return (path, reason) of the images of `part` that neither training nor `pack` can read."""
    found = []
    for index in part:
        try:
            image, _ = data.open_image(read_bands(files.read(index)))
            if not isinstance(image, np.ndarray):
                data.decode(image, reduce=8)  # damage shows at any scale
        except Exception as error:  # Pillow raises many kinds for a broken file
            found.append((files.path(index), f"{type(error).__name__}: {error}"))
    return found


def check_images(folder: str, out: str, workers: int, say: Say) -> int:
    """Decode every image, write the unreadable ones to the CSV file `out`, return their number."""
    if not os.path.isdir(above := os.path.dirname(out) or "."):
        raise ValueError(f"--out {out}: there is no folder {above}")
    files, broken = list_images(folder, say), []
    for rows in for_each(find_problems, files, workers, say):
        for path, reason in rows:
            say(f"{path}: {reason}")
        broken += rows
    if broken or os.path.exists(out):
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("path", "reason"), *broken])
        with replacing(out) as stream:
            stream.write(text.getvalue().encode(errors="surrogateescape"))
    more = f": see {out}" if broken else ""
    say(f"{len(broken)} of {len(files)} images cannot be read{more}")
    return len(broken)


# --- Mean and deviation of each channel


def read_pixels(files: ImageList, index: int) -> tuple[np.ndarray, bool]:
    """Read an image -> (C, H, W), every k-th row and column of a large one; is it TIFF of bands?"""
    content = read_bands(files.read(index))
    image, (width, height) = data.open_image(content)
    if not isinstance(image, np.ndarray):
        image = np.moveaxis(np.asarray(data.decode(image)), 2, 0)
    every = max(1, math.isqrt(width * height // LARGE))
    return image[:, ::every, ::every], not isinstance(content, bytes)


def sum_moments(files: ImageList, part: range) -> Counter[Any]:
    """Add up images -> (4, C) float64: count, means, squares of means, variances.

    By channels, dtype and whether they are TIFF of bands.
    """
    sums: Any = Counter()
    for index in part:
        try:
            pixels, tiff = read_pixels(files, index)
        except Exception as error:  # Pillow raises many kinds for a broken file
            data.file_fault(error)
        else:
            mean = pixels.mean((1, 2), np.float64)  # (C,)
            variance = [channel.var(dtype=np.float64) for channel in pixels]
            sums[len(mean), pixels.dtype.name, tiff] += np.stack([mean**0, mean, mean**2, variance])
    return sums


def write_stats(folder: str, workers: int, say: Say) -> None:
    """Measure all images of a folder and write their statistics where training looks for them.

    Every image has the same weight, as in training. Where images differ in channels or type, the
    most frequent kind is measured. ValueError where no image can be read.
    """
    files, total, path = list_images(folder, say), cast(Any, Counter()), stats_file(folder)
    for sums in for_each(sum_moments, files, workers, say):
        total.update(sums)
    if not total:
        raise ValueError(f"no image in {folder} can be read: `prepare.py scan` says why")
    (channels, dtype, tiff), most = max(total.items(), key=lambda item: item[1][0, 0])
    count, means, squares, variances = most  # (C,) each
    scale, mean = 255 if dtype == "uint8" else 1, means / count
    std = np.sqrt(np.maximum((variances + squares) / count - mean**2, 0))
    std[std <= 1e-7 * abs(mean)] = scale  # a constant: less than float32 tells apart
    text = {"mean": (mean / scale).tolist(), "std": (std / scale).tolist(), "dtype": dtype}
    with replacing(path) as stream:
        stream.write(json.dumps(text).encode())
    say(f"{path}: {int(count[0])} of {len(files)} images, {channels} channels of {dtype}")
    for (others, kind, _), sums in total.items():
        if (others, kind) != (channels, dtype):
            say(f"warning: left out for their {others} channels of {kind}: {int(sums[0, 0])}")
    pack = f"type `python prepare.py pack {folder} PACK`, then " if tiff else ""
    say(f"{pack}train with{' --data PACK' if tiff else ''} --channels {channels}")
