"""Pack the images of a folder into tar shards with an index: few large files instead of a million.

The folder gets its name when all of it is there: an interrupted pack leaves none.
"""

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

import data
from runtime.image_source import stats_file
from storage.checking import Say, for_each, write_stats
from storage.image_list import ImageList, list_images, make_table, save_index
from storage.safe_files import replacing
from storage.tiff import read_bands

Change = Callable[[bytes], tuple[bytes, str]]  # see `repack`


def repack(content: bytes, max_side: int | None, quality: int) -> tuple[bytes, str]:
    """Return an image as a pack holds it, and how its name must end: "" for a copy.

    Its longer side is at most `max_side`; TIFF of many bands becomes an array (C, H, W).
    """
    found = read_bands(content)
    if found is content and max_side is None:
        return content, ""
    image, size = data.open_image(found)
    side, packed = min(max(size), max_side or max(size)), io.BytesIO()
    if side == max(size) and found is content:
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


def write_shard(
    folder: Path, shards: dict[range, str], change: Change, files: ImageList, images: range
) -> list[tuple[bytes, int, int]]:
    """Write the shard of these images, as `change` makes them -> name, size and start of each.

    An image that cannot be read, or made smaller, becomes an empty file, so that it is found
    unreadable again in training, and all others keep their numbers. Raises any error that is not
    the file's own.
    """
    shard = str(folder / shards[images])
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
    with tarfile.open(shard) as archive:
        return [(os.fsencode(member.name), member.size, member.offset_data) for member in archive]


def write_pack(
    files: ImageList, folder: Path, change: Change, shard_mib: int | None, workers: int, say: Say
) -> ImageList:
    """Write all shards of a pack and its index; return its list. Statistics come along."""
    sizes = files.table["size"]
    if shard_mib is None:  # so many that all workers have one to write, but of no more than 1 GiB
        shard_mib = min(max(int(sizes.sum()) // 2**26, 16), 1024)
    _, firsts = np.unique((np.cumsum(sizes) - 1).clip(0) // (shard_mib * 2**20), return_index=True)
    parts = [range(*pair) for pair in zip(firsts, [*firsts[1:], len(files)], strict=True)]
    shards = {part: f"shard-{i:06}.tar" for i, part in enumerate(parts)}
    work = partial(write_shard, folder, shards, change)
    found = chain.from_iterable(for_each(work, files, workers, say, parts))
    names, stored, starts = map(list, zip(*found, strict=True))  # of all images
    numbers = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    table = make_table(names, files.labels, stored, numbers, starts)
    if os.path.exists(measured := stats_file(files.root)):
        shutil.copyfile(measured, folder / "stats.json")
    packed = ImageList(str(folder), table, files.classes, tuple(shards.values()))
    return save_index(packed, str(folder / "pack.index"))


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
    """Put the images of a folder into tar shards, in their order, with an index.

    Images whose longer side is above `max_side` become JPEGs, or arrays, of that side; TIFF of many
    bands becomes arrays; all others are copied byte by byte. Statistics of the source come along;
    of arrays they are measured if there are none. ValueError where the target has files already.
    """
    path = Path(target)
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{target} is not empty: pack into a new folder")
    files, change = list_images(source, say), partial(repack, max_side=max_side, quality=quality)
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir(parents=True)
    try:
        packed = write_pack(files, unfinished, change, shard_mib, workers, say)
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    stored = packed.table["size"]
    what = f"{stored.sum() / 2**30:.3f} GiB of {files.table['size'].sum() / 2**30:.3f}"
    count = f"{len(files)} images in {len(packed.shards)} shards"
    broken = (stored == 0).sum()
    why = f", `prepare.py scan {source}` says why" if broken else ""
    say(f"{target}: {count}, {what}, {broken} unreadable{why}")
    arrays = np.char.endswith(packed.table["name"], b".npy").sum()
    if 2 * arrays > len(files) and not (path / "stats.json").exists():
        write_stats(target, workers, say)
