"""Mean and deviation of each channel over the images of a folder, written for training."""

import json
import math
from collections.abc import Callable
from functools import partial

import numpy as np

import data
from runtime.image_source import stats_file
from runtime.process import throttled_progress
from storage.checking import PART, parallel_map
from storage.image_list import ImageList, list_images
from storage.safe_files import replacing

Kind = tuple[int, str]  # channels and dtype of an image; (0, "") for one that cannot be read
LARGE = 2**22  # pixels of an image, beyond which some of its rows and columns are enough


def read_pixels(files: ImageList, index: int) -> np.ndarray:
    """Read and decode an image -> (C, H, W), every k-th row and column of a large one."""
    image, (width, height) = data.open_image(files.read(index))
    if not isinstance(image, np.ndarray):
        image = np.moveaxis(np.asarray(data.decode(image)), 2, 0)
    every = max(1, math.isqrt(width * height // LARGE))
    return image[:, ::every, ::every]


def sum_moments(files: ImageList, part: range) -> dict[Kind, np.ndarray]:
    """Add up images, by kind -> (4, C) float64: count, means, squares of means, variances."""
    sums: dict[Kind, np.ndarray] = {}
    for index in part:
        try:
            pixels = read_pixels(files, index)
        except Exception as error:  # Pillow raises many kinds for a broken file
            code = getattr(error, "errno", None)
            if isinstance(error, MemoryError) or code not in data.FILE_ERRNOS:
                raise
            kind, row = (0, ""), np.ones((4, 1))
        else:
            kind = len(pixels), pixels.dtype.name
            mean = pixels.mean((1, 2), np.float64)  # (C,)
            variance = [channel.var(dtype=np.float64) for channel in pixels]
            row = np.stack([np.ones_like(mean), mean, mean**2, variance])
        sums[kind] = sums.get(kind, 0) + row
    return sums


def write_stats(folder: str, workers: int, say: Callable[[str], None]) -> data.ChannelStats:
    """Measure all images of a folder and write their statistics where training looks for them.

    Every image has the same weight, as in training. Where images differ in channels or type, the
    most frequent kind is measured. ValueError where no image can be read.
    """
    files = list_images(folder, throttled_progress(say, "listing"))
    starts = range(0, len(files), PART)
    parts = [range(first, min(first + PART, len(files))) for first in starts]
    progress, done, found = throttled_progress(say, "reading"), 0, {}
    for part, sums in parallel_map(partial(sum_moments, files), parts, workers):
        found[part] = sums
        progress(done := done + len(part))
    total: dict[Kind, np.ndarray] = {}
    for part in parts:  # in one order, so that the sums do not depend on the workers
        for kind, row in found[part].items():
            total[kind] = total.get(kind, 0) + row
    kinds = sorted(total, key=lambda kind: (kind == (0, ""), -total[kind][0, 0], kind))
    if kinds[0] == (0, ""):
        raise ValueError(f"no image in {folder} can be read: `prepare.py scan` says why")
    stats = divide(total[kinds[0]], kinds[0][1])
    count, path = int(total[kinds[0]][0, 0]), stats_file(folder)
    text = stats._asdict() | {"channels": len(stats.mean), "images": count}
    with replacing(path) as stream:
        stream.write(json.dumps(text).encode())
    what = "{} channels of {}".format(*kinds[0])
    say(f"{path}: {count} of {len(files)} images, {what}; train with --channels {kinds[0][0]}")
    for kind in kinds[1:]:
        what = "{} channels of {}".format(*kind) if kind[0] else "cannot be read"
        say(f"left out: {int(total[kind][0, 0])} images ({what})")
    return stats


def divide(sums: np.ndarray, dtype: str) -> data.ChannelStats:
    """Turn sums (4, C) into statistics; the deviation of a constant channel becomes 1."""
    count, means, squares, variances = sums
    mean = means / count
    std = np.sqrt(np.maximum((variances + squares) / count - mean**2, 0))
    scale = 255 if dtype == "uint8" else 1
    rounded = [tuple(float(f"{x / scale:.6g}") for x in values) for values in (mean, std)]
    return data.ChannelStats(rounded[0], tuple(x or 1.0 for x in rounded[1]), dtype)
