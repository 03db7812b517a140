"""Decode every image of a folder, in several processes, and list those that cannot be read."""

import errno
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import numpy as np

import data
from runtime import process
from runtime.process import throttled_progress
from storage.image_list import ImageList, list_images
from storage.safe_files import naming

PART = 64  # images that a process checks before it reports


def find_problem(files: ImageList, index: int) -> str | None:
    """Say why training could not read an image; None if it can."""
    try:
        image, _ = data.open_image(files.read(index))
        if not isinstance(image, np.ndarray):  # damage shows at any scale
            data.decode(image, reduce=8 if image.format == "JPEG" else 1)
    except Exception as error:  # Pillow raises many kinds for a broken file
        if getattr(error, "errno", None) not in (*data.FILE_ERRNOS, errno.EIO):
            raise  # too many open files, a lost file system: not the image's fault
        return f"{type(error).__name__}: {error}"
    return None


def find_problems(files: ImageList, part: range) -> list[tuple[int, str]]:
    """Return (index, reason) of the unreadable images of `part`."""
    found = ((index, find_problem(files, index)) for index in part)
    return [(index, problem) for index, problem in found if problem]


def parallel_map(
    work: Callable[[Any], Any], parts: Iterable[Any], workers: int
) -> Iterator[tuple[Any, Any]]:
    """Yield (part, work(part)) in the order of completion; one worker is this process itself.

    RuntimeError where a worker process dies.
    """
    if workers == 1:
        yield from ((part, work(part)) for part in parts)
        return
    pool = ProcessPoolExecutor(workers, process.fork_server(), initializer=process.start_helper)
    try:
        running = {pool.submit(work, part): part for part in parts}
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process was killed, perhaps for lack of memory: run the same command to "
            "resume, with fewer --workers if needed"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def check_images(folder: str, out: str, workers: int, say: Callable[[str], None]) -> int:
    """Decode every image, list the unreadable ones in the CSV file `out`, return their number."""
    from runtime.log import append_rows  # not in the worker processes

    files = list_images(folder, throttled_progress(say, "listing"))
    progress, done, broken = throttled_progress(say, "reading"), 0, 0
    starts = range(0, len(files), PART)
    parts = [range(first, min(first + PART, len(files))) for first in starts]
    for part, found in parallel_map(partial(find_problems, files), parts, workers):
        rows = [(files.path(index), reason, None) for index, reason in found]
        with naming(out):
            append_rows(out, rows)
        for path, reason, _ in rows:
            say(f"{path}: {reason}")
        done, broken = done + len(part), broken + len(rows)
        progress(done)
    say(f"{broken} of {len(files)} images cannot be read" + (f": see {out}" if broken else ""))
    return broken
