"""Decode every image of a folder, in many processes, and name those that cannot be read."""

import errno
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import data
from runtime.bad_images import append_rows
from storage.image_list import told_often


def problem_of(files: data.ImageFiles, index: int) -> str | None:
    """Why training could not read an image, if so."""
    try:
        image, _ = data.open_image(files.read(index))
        data.decode(image, reduce=8 if image.format == "JPEG" else 1)  # damage shows at any scale
    except Exception as error:  # Pillow raises many kinds for a broken file
        if getattr(error, "errno", None) not in (*data.FILE_ERRNOS, errno.EIO):
            raise  # too many open files, a file system that went away: not the image's fault
        return f"{type(error).__name__}: {error}"
    return None


def problems_of(files: data.ImageFiles, some: range) -> list[tuple[int, str]]:
    """Of some images, by index."""
    found = ((index, problem_of(files, index)) for index in some)
    return [(index, problem) for index, problem in found if problem]


def in_processes(
    work: Callable[[Any], Any], parts: Iterable[Any], workers: int
) -> Iterator[tuple[Any, Any]]:
    """(part, work(part)) as they are done; RuntimeError where a worker process dies."""
    pool = ProcessPoolExecutor(
        workers, data.fork_server(), initializer=data.start_worker, initargs=(0,)
    )
    try:
        running = {pool.submit(work, part): part for part in parts}
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process was killed, perhaps for want of memory: the same command goes on, "
            "with fewer --workers if need be"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def scan(folder: str, out: str, workers: int, say: Callable[[str], None]) -> int:
    """Decode every image; name the broken ones, also in the file `out`; returns how many."""
    files = data.scan(folder, told_often(say, "listing"))
    progress, done, broken = told_often(say, "reading"), 0, 0
    parts = [range(first, min(first + 64, len(files))) for first in range(0, len(files), 64)]
    for part, found in in_processes(partial(problems_of, files), parts, workers):
        rows = [(files.path(index), reason, None) for index, reason in found]
        if rows:
            append_rows(out, rows)
        for path, reason, _ in rows:
            say(f"{path}: {reason}")
        done, broken = done + len(part), broken + len(rows)
        progress(done)
    say(f"{broken} of {len(files)} images cannot be read" + (f": see {out}" if broken else ""))
    return broken
