"""The images of a run: found by rank 0, the same list on all ranks."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import data
from runtime import agreement
from storage import image_list


def find_images(
    folder: str, out: str | None, global_batch: int, say: Callable[[str], None]
) -> tuple[data.ImageFiles | None, dict[str, Any], int]:
    """(files or None for synthetic images, what a resume compares of them, steps per epoch).

    The list of files is kept in `out`, where one is given. ValueError where there are too few.
    """
    check_folder(folder)
    files = image_list.find_list(folder, out, say) if folder != "synthetic" else None
    images = len(files) if files else data.SYNTHETIC_IMAGES
    names = image_list.fingerprint(files, times=False) if files else None
    found = {"images": images, "image_names_and_sizes": names}
    return files, found, data.steps_per_epoch(images, global_batch)


def check_folder(folder: str) -> None:
    """Refuse a --data that this rank does not see: ValueError."""
    if folder != "synthetic" and not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}: give --data the folder of images")


def share_images(
    folder: str, out: str, global_batch: int
) -> tuple[data.ImageFiles | None, dict[str, Any], int]:
    """As `find_images`, which rank 0 does; every rank then maps the same list. Collective."""

    def find() -> tuple[str | None, dict[str, Any], int]:
        files, found, steps = find_images(folder, out, global_batch, partial(print, flush=True))
        return files.index_file if files else None, found, steps

    agreement.run_on_all_ranks(partial(check_folder, folder))
    index, found, steps = agreement.run_on_rank0(find)
    load = partial(data.load_index, index or "", folder)
    return agreement.run_on_all_ranks(load) if index else None, found, steps
