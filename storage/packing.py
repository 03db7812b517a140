"""Pack the images of a folder into tar shards with an index: few large files instead of a million.

A shard gets its name when it is whole, so an interrupted pack resumes with those that are missing.
"""

import io
import json
import os
import tarfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

import data
from runtime.image_source import stats_file
from storage.checking import Say, for_each, write_stats
from storage.image_list import ImageList, fingerprint, list_images, make_table, save_index
from storage.safe_files import replacing
from storage.tiff import read_bands

Change = Callable[[bytes], tuple[bytes, str]]  # see `repack`


def repack(content: bytes, max_side: int | None, quality: int) -> tuple[bytes, str]:
    """Return an image as a pack holds it, and how its name must end: "" for a copy.

    Its longer side is at most `max_side`; TIFF of many bands becomes an array (C, H, W).
    """
    bands = read_bands(content)
    if bands is None and max_side is None:
        return content, ""
    image, size = data.open_image(content if bands is None else bands)
    side, packed = min(max(size), max_side or max(size)), io.BytesIO()
    if side == max(size) and bands is None:
        return content, ""
    if isinstance(image, np.ndarray):
        np.save(packed, shrink(image, side))
        return packed.getvalue(), ".npy"
    fits = [scale for scale in (1, 2, 4, 8) if max(size) >= 2 * scale * side]
    rgb = data.decode(image, max(fits, default=1))  # two pixels for each that stays
    rgb.thumbnail((side, side), Image.Resampling.BICUBIC)
    rgb.save(packed, "JPEG", quality=quality)
    return packed.getvalue(), ".jpg"


def shrink(array: np.ndarray, side: int) -> np.ndarray:
    """Resize an array (C, H, W) so that its longer side is `side`; the dtype stays."""
    if side == max(array.shape[1:]):
        return array
    size = [max(1, n * side // max(array.shape[1:])) for n in array.shape[1:]]
    whole = torch.from_numpy(array.astype(np.float32, order="C"))[None]
    pixels = F.interpolate(whole, size, mode="bicubic", antialias=True)[0]
    if array.dtype.kind == "u":  # bicubic goes beyond the range at edges
        pixels = pixels.round().clamp(0, np.iinfo(array.dtype).max)
    return pixels.numpy().astype(array.dtype)


def write_shard(files: ImageList, shard: str, images: range, change: Change) -> None:
    """Write one shard, whose images are what `change` makes of them.

    An image that cannot be read, or made smaller, becomes an empty file, so that it is found
    unreadable again in training, and all others keep their numbers. Raises any error that is not
    the file's own.
    """
    with replacing(shard) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for index in images:
            name, content, ending = files.name(index), b"", ""
            try:
                content, ending = change(files.read(index))
            except Exception as error:  # Pillow raises many kinds for a broken file
                data.file_fault(error)
                if isinstance(error, FileNotFoundError) and files.table[index]["size"]:
                    raise  # it was listed: a file system that goes away is no broken image
            info = tarfile.TarInfo(name if name.lower().endswith(ending) else name + ending)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def pack_shard(
    shards: dict[range, str], change: Change, files: ImageList, images: range
) -> list[tuple[bytes, int, int]]:
    """Write the shard of these images unless it is there -> name, size and start of each."""
    try:
        with tarfile.open(shards[images], "r:") as archive:  # ":" for not compressed
            found = archive.getmembers()
    except (FileNotFoundError, tarfile.TarError):  # new, or damaged since
        found = []
    if len(found) == len(images):
        return [(os.fsencode(member.name), member.size, member.offset_data) for member in found]
    write_shard(files, shards[images], images, change)
    return pack_shard(shards, change, files, images)


def begin_pack(target: str, settings: dict[str, Any]) -> None:
    """Make the folder, or remove from it the index and what a killed process left half written.

    ValueError where it was started from other images or with other options, as pack.json says.
    """
    os.makedirs(target, exist_ok=True)
    kept, text = Path(target, "pack.json"), json.dumps(settings)
    if kept.exists() and kept.read_text() != text:
        what = "was started from other images or with other options"
        raise ValueError(f"{target} {what}: delete it, or pack into another folder")
    with replacing(str(kept)) as stream:
        stream.write(text.encode())
    for path in (*Path(target).glob(".shard-*"), Path(target, "pack.index")):
        path.unlink(missing_ok=True)


def pack(
    source: str,
    target: str,
    workers: int,
    say: Say,
    *,
    max_side: int | None = None,
    quality: int = 90,
    shard_mib: int | None = None,
) -> None:
    """Put the images of a folder into tar shards, in their order, with an index; resumes.

    Images whose longer side is above `max_side` become JPEGs, or arrays, of that side; TIFF of many
    bands becomes arrays; all others are copied byte by byte. Statistics of the source come along;
    of arrays they are measured if there are none. ValueError where the target was started from
    other images or with other options, or is the source.
    """
    if os.path.realpath(source) == os.path.realpath(target):
        raise ValueError(f"{target} holds the images themselves: pack into another folder")
    files = list_images(source, say)
    sizes = files.table["size"]
    if shard_mib is None:  # so many that all workers have one to write, but of no more than 1 GiB
        shard_mib = min(max(int(sizes.sum()) // 2**26, 16), 1024)
    settings = {"images": fingerprint(files), "max_side": max_side, "quality": quality}
    begin_pack(target, settings | {"shard_mib": shard_mib})
    _, firsts = np.unique((np.cumsum(sizes) - 1).clip(0) // (shard_mib * 2**20), return_index=True)
    parts = [range(*pair) for pair in zip(firsts, [*firsts[1:], len(files)], strict=True)]
    shards = {part: os.path.join(target, f"shard-{i:06}.tar") for i, part in enumerate(parts)}
    if there := sum(map(os.path.exists, shards.values())):
        say(f"{there} of {len(parts)} shards are there already")
    work = partial(pack_shard, shards, partial(repack, max_side=max_side, quality=quality))
    found = list(for_each(work, files, workers, say, parts))
    carried, measured = Path(stats_file(files.root)), os.path.join(target, "stats.json")
    if carried.exists():
        with replacing(measured) as stream:
            stream.write(carried.read_bytes())
    columns = map(list, zip(*chain.from_iterable(found), strict=True))
    names, stored, starts = columns  # of all images
    numbers = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    table = make_table(names, files.labels, stored, numbers, starts)
    packed = ImageList(target, table, files.classes, tuple(map(os.path.basename, shards.values())))
    save_index(packed, os.path.join(target, "pack.index"))
    what = f"{sum(stored) / 2**30:.3f} GiB of {sizes.sum() / 2**30:.3f}"
    count = f"{len(files)} images in {len(parts)} shards"
    say(f"{target}: {count}, {what}, {stored.count(0)} unreadable")
    arrays = sum(name.endswith(b".npy") for name in names)
    if 2 * arrays > len(names) and not os.path.exists(measured):
        write_stats(target, workers, say)
