"""Pack the images of a folder into tar shards with an index: few large files instead of a million.

The folder gets its name when all of it is there; until then it is NAME.unfinished.
"""

import io
import os
import shutil
import tarfile
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from PIL import Image

import data
from runtime.image_source import stats_file
from storage.checking import Say, for_each, write_stats
from storage.image_list import ImageList, list_images, make_table, save_index
from storage.tiff import read_bands

SHARD_BYTES = 2**28  # of the source of one shard
QUALITY = 90  # of JPEGs that are made smaller


def repack(content: bytes, max_side: int | None) -> tuple[bytes, str]:
    """Return an image as a pack holds it, and how its name must end: "" for a copy.

    A picture's longer side is at most `max_side`; TIFF of many bands becomes an array (C, H, W).
    """
    found, packed = read_bands(content), io.BytesIO()
    if isinstance(found, np.ndarray):
        np.save(packed, found)
        return packed.getvalue(), ".npy"
    if max_side is None:
        return content, ""
    image, size = data.open_image(content)
    if isinstance(image, np.ndarray) or max(size) <= max_side:
        return content, ""
    image.draft(None, (2 * max_side, 2 * max_side))  # of a JPEG: decoded no larger than needed
    rgb = data.decode(image)
    rgb.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    rgb.save(packed, "JPEG", quality=QUALITY)
    return packed.getvalue(), ".jpg"


def write_shard(max_side: int | None, path: Path, files: ImageList) -> list[tuple[bytes, int, int]]:
    """Write a shard of images, as `repack` makes them -> name, size and start of each.

    An image that cannot be read, or made smaller, becomes an empty file, so that it is found
    unreadable again in training, and all others keep their numbers. Raises any error that is not
    the file's own.
    """
    with tarfile.open(path, mode="w") as archive:
        for index in range(len(files)):
            name, content, ending = files.name(index), b"", ""
            try:
                content, ending = repack(files.read(index), max_side)
            except Exception as error:  # Pillow raises many kinds for a broken file
                data.file_fault(error)
                if isinstance(error, FileNotFoundError) and files.table[index]["size"]:
                    raise  # it was listed: a file system that goes away is no broken image
            info = tarfile.TarInfo(name if name.lower().endswith(ending) else name + ending)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    with tarfile.open(path) as archive:
        return [(os.fsencode(member.name), member.size, member.offset_data) for member in archive]


def pack(source: str, target: str, workers: int, say: Say, max_side: int | None = None) -> None:
    """Put the images of a folder into tar shards, in their order, with an index.

    Pictures whose longer side is above `max_side` become JPEGs of that side; TIFF of many bands
    becomes arrays; all others are copied byte by byte. Statistics of the source come along; of
    arrays they are measured if there are none. ValueError where the target has files already.
    """
    path = Path(target)
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{target} is not empty: pack into a new folder")
    files, folder = list_images(source, say), path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was interrupted
    folder.mkdir(parents=True)
    ends = np.cumsum(files.table["size"])
    _, firsts = np.unique((ends - 1).clip(0) // SHARD_BYTES, return_index=True)
    parts = [files.part(*pair) for pair in pairwise([*firsts, len(files)])]
    shards = [folder / f"shard-{i:06}.tar" for i in range(len(parts))]
    write = partial(write_shard, max_side)
    found = chain.from_iterable(for_each(write, workers, say, shards, parts))
    names, sizes, starts = map(list, zip(*found, strict=True))  # of all images
    if not any(sizes):
        raise ValueError(f"no image in {source} can be read: `prepare.py scan {source}` says why")
    numbers = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    table = make_table(names, files.labels, sizes, numbers, starts)
    packed = ImageList(str(folder), table, files.classes, tuple(shard.name for shard in shards))
    save_index(packed, str(folder / "pack.index"))
    if os.path.exists(measured := stats_file(files.root)):
        shutil.copyfile(measured, folder / "stats.json")
    folder.rename(path)
    say(f"{target}: {len(files)} images in {len(shards)} shards, {sum(sizes) / 2**30:.3f} GiB")
    if broken := sizes.count(0):
        say(f"{broken} are unreadable: `prepare.py scan {source}` says why")
    arrays = sum(name.endswith(b".npy") for name in names)
    if 2 * arrays > len(files) and not (path / "stats.json").exists():
        write_stats(target, workers, say)
