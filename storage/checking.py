"""Read every image of a folder in several processes: which are broken, mean and deviation."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

import data
from runtime import process
from runtime.image_source import stats_file
from storage.image_list import ImageList, list_images
from storage.safe_files import replacing
from storage.tiff import read_bands

PART = 64  # images that a process reads before it reports
LARGE = 2**22  # pixels of an image, beyond which some of its rows and columns are enough
Say = Callable[[str], None]


def for_each(
    work: Callable[..., Any], workers: int, say: Say, *columns: Sequence[Any]
) -> Iterator[Any]:
    """Yield the results of work as `map` does, in several processes; one worker is this one.

    The last column has parts of a list of images. RuntimeError where a worker process dies.
    """
    progress, done = process.throttled_progress(say, "reading"), 0
    run: Any = map
    with ExitStack() as stack:
        if workers > 1:
            pool = ProcessPoolExecutor(workers, process.fork_server(), process.start_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
            run = pool.map
        for part, found in zip(columns[-1], run(work, *columns), strict=True):
            done += len(part)
            progress(done)
            yield found


def in_parts(files: ImageList) -> list[ImageList]:
    """Cut a list into parts for `for_each`."""
    return [files.part(first, first + PART) for first in range(0, len(files), PART)]


def find_problems(files: ImageList) -> list[str]:
    """Name the images that neither training nor `pack` can read, and why."""
    found = []
    for index in range(len(files)):
        try:
            image, _ = data.open_image(read_bands(files.read(index)))
            if not isinstance(image, np.ndarray):
                data.decode(image, reduce=8)  # damage shows at any scale
        except Exception as error:  # Pillow raises many kinds for a broken file
            found.append(f"{files.path(index)}: {type(error).__name__}: {error}")
    return found


def check_images(folder: str, workers: int, say: Say) -> int:
    """Decode every image, name the unreadable ones, return their number."""
    files, broken = list_images(folder, say), 0
    for problems in for_each(find_problems, workers, say, in_parts(files)):
        broken += len(problems)
        for problem in problems:
            say(problem)
    say(f"{broken} of {len(files)} images cannot be read")
    return broken


# --- Mean and deviation of each channel


def sum_moments(files: ImageList) -> Counter[Any]:
    """Add up images -> (4, C) float64: count, means, squares of means, variances.

    By channels and dtype. Of a large image every k-th row and column counts.
    """
    sums: Any = Counter()
    for index in range(len(files)):
        try:
            image, (width, height) = data.open_image(read_bands(files.read(index)))
            if not isinstance(image, np.ndarray):
                image = np.moveaxis(np.asarray(data.decode(image)), 2, 0)
        except Exception as error:  # Pillow raises many kinds for a broken file
            data.file_fault(error)
        else:
            every = max(1, math.isqrt(width * height // LARGE))
            pixels = image[:, ::every, ::every]
            mean = pixels.mean((1, 2), np.float64)  # (C,)
            variance = [channel.var(dtype=np.float64) for channel in pixels]
            sums[len(mean), pixels.dtype.name] += np.stack([mean**0, mean, mean**2, variance])
    return sums


def write_stats(folder: str, workers: int, say: Say) -> None:
    """Measure all images of a folder and write their statistics where training looks for them.

    Every image has the same weight, as in training. Where images differ in channels or type, the
    most frequent kind is measured. ValueError where no image can be read.
    """
    files, path = list_images(folder, say), stats_file(folder)
    total: Any = Counter()
    for sums in for_each(sum_moments, workers, say, in_parts(files)):
        total.update(sums)
    if not total:
        raise ValueError(f"no image in {folder} can be read: `prepare.py scan` says why")
    (channels, dtype), most = max(total.items(), key=lambda item: item[1][0, 0])
    count, means, squares, variances = most  # (C,) each
    scale, mean = 255 if dtype == "uint8" else 1, means / count
    std = np.sqrt(np.maximum((variances + squares) / count - mean**2, 0))
    std[std <= 1e-7 * abs(mean)] = scale  # a constant: less than float32 tells apart
    text = {"mean": (mean / scale).tolist(), "std": (std / scale).tolist(), "dtype": dtype}
    with replacing(path) as stream:
        stream.write(json.dumps(text).encode())
    say(f"{path}: {int(count[0])} of {len(files)} images, {channels} channels of {dtype}")
    say(f"train with --channels {channels}; of TIFF with many bands, on a pack of them")
