"""The list of a folder's images, made once, kept in a file that every process maps into memory."""

import os
import random
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

import data

CHECKED_FILES = 200  # whose size and time are looked at before an index is believed


def outdated(files: data.ImageFiles) -> str | None:
    """Why a list is no longer true of its folder, as far as can be seen fast; None where it is.

    Every folder must be as old as it was, and hold as many images; a sample of the files must have
    their sizes and times; of a pack every shard its length.
    """
    if files.shard is not None and files.start is not None:
        for number, name in enumerate(files.shards):
            mine = np.flatnonzero(files.shard == number)
            end = int((files.start[mine] + files.sizes[mine]).max())
            path = Path(files.root, name)
            if not path.is_file() or path.stat().st_size < end:
                return f"{path} is missing or cut: pack again, it goes on where it was"
        return None
    for folder, (changed, _) in files.folders.items():
        try:
            now = os.stat(os.path.join(files.root, folder)).st_mtime_ns
        except OSError:
            return f"the folder {folder} is gone"
        if now != changed:
            return f"the folder {folder} has changed"
    if sum(count for _, count in files.folders.values()) != len(files):
        return "it is not complete"
    for index in random.Random(0).sample(range(len(files)), min(CHECKED_FILES, len(files))):
        with suppress(OSError):  # a link to nothing: zeros then as now
            status = os.stat(files.path(index))
            if (status.st_size, status.st_mtime_ns) != (files.sizes[index], files.times[index]):
                return f"{files.name(index)} has changed"
    return None


def find_list(folder: str, out: str | None, say: Callable[[str], None]) -> data.ImageFiles:
    """The images of a folder from the list that lies beside it or in `out`; else list them there.

    Without `out` nothing is written. Raises as `data.scan`, and ValueError for a damaged pack.
    """
    folder = folder.rstrip("/") or "/"
    packed = os.path.exists(os.path.join(folder, data.PACK_INDEX))
    kept = [f"{folder}.index", os.path.join(out or "", "images.index")]
    for path in [os.path.join(folder, data.PACK_INDEX)] if packed else kept:
        if os.path.exists(path):
            try:
                files = data.load_index(path, folder)
                problem = outdated(files)
            except (OSError, ValueError) as error:
                problem = str(error)
            if problem is None:
                return files
            if packed:
                raise ValueError(problem)
            say(f"{path} is not used: {problem}")
    files = data.scan(folder, told_often(say, "listing"))
    if out is None:
        return files
    os.makedirs(out, exist_ok=True)
    return data.save_index(files, kept[1])


def told_often(say: Callable[[str], None], doing: str, every: float = 5.0) -> Callable[[int], None]:
    """A `progress` that speaks every few seconds, and not at all of what is done at once."""
    started = last = time.monotonic()

    def progress(count: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every:
            last = now
            say(f"{doing}: {count} images, {count / (now - started):.0f} a second")

    return progress


def fingerprint(files: data.ImageFiles, times: bool = True) -> str:
    """A number of all names and sizes, and of the times of their last change."""
    value = 0
    for array in (files.names, files.ends, files.sizes, *([files.times] if times else [])):
        value = zlib.crc32(array.data, value)
    return f"{value:08x}"
