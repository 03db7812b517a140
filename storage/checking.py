"""Read every image of a folder in several processes: which are broken, mean and deviation."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import data
from checkpoint import replacing
from runtime import process
from runtime.image_source import stats_file
from storage.image_list import ImageList, list_images
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
    pool = ProcessPoolExecutor(workers, process.fork_server(), process.start_worker)
    run: Any = pool.map if workers > 1 else map
    try:
        for part, found in zip(columns[-1], run(work, *columns), strict=True):
            done += len(part)
            progress(done)
            yield found
    finally:
        pool.shutdown(cancel_futures=True)


def read_part(files: ImageList) -> tuple[list[str], Any]:
    """Read images -> those that neither training nor `pack` can read, and why; sums of the others.

    Sums are (4, C) float64 by channels and dtype: of counts, means, squares of means, variances. Of
    a large image every k-th row and column counts.
    """
    problems: list[str] = []
    sums: Any = Counter()
    for index in range(len(files)):
        try:
            image, (width, height) = data.open_image(read_bands(files.read(index)))
            if not isinstance(image, np.ndarray):
                image = np.moveaxis(np.asarray(data.decode(image)), 2, 0)
        except Exception as error:  # Pillow raises many kinds for a broken file
            problems.append(f"{files.path(index)}: {type(error).__name__}: {error}")
            continue
        every = max(1, math.isqrt(width * height // LARGE))
        pixels = image[:, ::every, ::every]
        mean = pixels.mean((1, 2), np.float64)  # (C,)
        variance = [channel.var(dtype=np.float64) for channel in pixels]
        sums[len(mean), pixels.dtype.name] += np.stack([mean**0, mean, mean**2, variance])
    return problems, sums


def read_folder(folder: str, workers: int, say: Say) -> tuple[int, list[str], Any]:
    """Read every image of a folder -> how many there are, and what `read_part` finds."""
    files, problems, sums = list_images(folder, say), list[str](), Counter[Any]()
    parts = [files.part(first, first + PART) for first in range(0, len(files), PART)]
    for more, added in for_each(read_part, workers, say, parts):
        problems += more
        sums.update(added)
    return len(files), problems, sums


def check_images(folder: str, workers: int, say: Say) -> int:
    """Decode every image, name the unreadable ones, return their number."""
    images, problems, _ = read_folder(folder, workers, say)
    for problem in problems:
        say(problem)
    say(f"{len(problems)} of {images} images cannot be read")
    return len(problems)


def write_stats(folder: str, workers: int, say: Say) -> None:
    """Measure all images of a folder and write their statistics where training looks for them.

    Every image has the same weight, as in training. Where images differ in channels or type, the
    most frequent kind is measured. ValueError where no image can be read.
    """
    path, (images, problems, sums) = stats_file(folder), read_folder(folder, workers, say)
    if not sums:
        raise ValueError(f"no image in {folder} can be read: {problems[0]}")
    (channels, dtype), most = max(sums.items(), key=lambda item: item[1][0, 0])
    count, means, squares, variances = most  # (C,) each
    scale, mean = 255 if dtype == "uint8" else 1, means / count
    std = np.sqrt(np.maximum((variances + squares) / count - mean**2, 0))
    std[std <= 1e-7 * abs(mean)] = scale  # a constant: less than float32 tells apart
    text = {"mean": (mean / scale).tolist(), "std": (std / scale).tolist(), "dtype": dtype}
    with replacing(Path(path)) as stream:
        stream.write(json.dumps(text).encode())
    say(f"{path}: {int(count[0])} of {images} images, {channels} channels of {dtype}")
