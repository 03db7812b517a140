"""Find the images of a run: rank 0 lists them, every rank then has the same list.

All but plain folders is in storage/, which a copy of the trainer may lack.
"""

import os
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import data
from runtime import agreement


def check_folder(folder: str) -> None:
    """Raise ValueError where this rank does not see --data."""
    if folder != "synthetic" and not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}: give --data the folder of images")


def find_images(
    folder: str, out: str | None, global_batch: int, say: Callable[[str], None]
) -> tuple[Any, dict[str, Any], int]:
    """List --data -> (images or None for synthetic ones, what a resume compares, steps per epoch).

    The list is kept in `out`, where one is given. ValueError where there are too few images. A copy
    of the trainer without the folder storage/ reads plain folders only.
    """
    check_folder(folder)
    files: Any = None
    names = None
    if folder != "synthetic":
        try:
            from storage import image_list
        except ModuleNotFoundError:
            if os.path.exists(os.path.join(folder, "pack.index")):
                raise ValueError(
                    f"{folder} is a pack: to read it, copy the folder storage/ too"
                ) from None
            files = data.scan(folder)
            names = f"names {zlib.crc32(os.fsencode('/'.join(files.names))):08x}"
        else:
            files = image_list.find_list(folder, out, say)
            names = image_list.fingerprint(files, times=False)
    count = data.SYNTHETIC_IMAGES if files is None else len(files)
    steps = data.steps_per_epoch(count, global_batch)
    return files, {"images": count, "image_names_and_sizes": names}, steps


def share_images(folder: str, out: str, global_batch: int) -> tuple[Any, dict[str, Any], int]:
    """Do as `find_images` on rank 0, and give every rank the same list. Collective."""

    def find() -> tuple[str | None, dict[str, Any], int]:
        files, facts, steps = find_images(folder, out, global_batch, partial(print, flush=True))
        return getattr(files, "index_file", None), facts, steps

    agreement.run_on_all_ranks(partial(check_folder, folder))
    index, facts, steps = agreement.run_on_rank0(find)
    if folder == "synthetic":
        return None, facts, steps
    load: Callable[[], Any] = partial(data.scan, folder)  # where there is no storage/
    if index:
        from storage.image_list import load_index

        load = partial(load_index, index, folder)  # one file, which all processes map
    return agreement.run_on_all_ranks(load), facts, steps
