"""Pack the images of a folder into tar shards with an index: few large files instead of a million.

The folder is called NAME.unfinished until it is complete.
"""

import io
import math
import os
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from PIL import Image

import data
from storage.arrays import Bands, read_image
from storage.checking import (
    Kind,
    Report,
    for_each,
    kind_of,
    noting_problems,
    read_folder,
    save_stats,
)
from storage.image_list import ImageList, list_images, make_table, save_index, stats_file
from storage.stacking import SceneList, find_scenes

SHARD_BYTES = 2**28  # size of the source files that become one shard
QUALITY = 90  # JPEG quality of images that are made smaller
BLOCK = 512  # bytes; tar pads headers and files to it


@dataclass(frozen=True)
class PackOptions:
    """How images become members of a pack."""

    max_side: int | None = None  # longest side of a picture, in pixels
    nodata: float | None = None
    bands: tuple[str, ...] = ()  # bands of scenes that have a file per band; () without scenes


class Member(NamedTuple):
    """One image of a shard."""

    name: str
    size: int  # bytes; 0 if it could not be read
    start: int


class Packed(NamedTuple):
    """One image as a pack holds it."""

    size: int  # bytes
    content: Iterable[bytes | memoryview]  # parts, to be written one after the other
    ending: str  # what its name must end with; "" keeps the name of the file
    kind: Kind


def repack(file: IO[bytes], options: PackOptions) -> Packed:
    """Read an image as a pack holds it; raise if it cannot be read.

    A picture's longer side is at most `max_side`; any other image becomes an array (C, H, W).
    """
    image = read_image(file, options.nodata)
    if isinstance(image, Bands):
        return pack_bands(image)
    kind = kind_of(image)
    max_side = options.max_side
    if max_side is None or max(image.size) <= max_side:
        file.seek(0)
        content = file.read()
        return Packed(len(content), [content], "", kind)
    image.draft(None, (2 * max_side, 2 * max_side))  # decode a JPEG no larger than needed
    rgb = data.decode(image)
    rgb.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    smaller = io.BytesIO()
    rgb.save(smaller, "JPEG", quality=QUALITY)
    return Packed(smaller.tell(), [smaller.getvalue()], ".jpg", kind._replace(mode=rgb.mode))


def pack_bands(bands: Bands) -> Packed:
    """Return bands as a .npy file of an array (C, H, W), each channel made when it is written."""
    about = {"descr": bands.dtype.str, "fortran_order": False, "shape": bands.shape}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, about)
    size = header.tell() + math.prod(bands.shape) * bands.dtype.itemsize
    channels = (np.ascontiguousarray(channel).data for channel in bands)
    kind = kind_of(bands)._replace(packed_only=False)  # training reads it from the pack
    return Packed(size, chain([header.getvalue()], channels), ".npy", kind)


def read_member(files: ImageList | SceneList, index: int, options: PackOptions) -> Packed:
    """Read an image, or a scene, as a pack holds it; raise if it cannot be read."""
    if isinstance(files, SceneList):
        return pack_bands(files.read(index, options.nodata))
    with files.open(index) as file:
        return repack(file, options)


def write_shard(
    options: PackOptions, path: Path, files: ImageList | SceneList
) -> tuple[list[Member], Report]:
    """Write a shard of images, a tar file -> its members, and a report on them.

    An image that cannot be read, or made smaller, becomes an empty file: training finds it
    unreadable again, and all other images keep their numbers. Errors that are not the file's fault
    are passed on.
    """
    members = []
    report = Report()
    with open(path, "wb") as file:
        for index in range(len(files)):
            name = files.name(index)
            size = 0
            content: Iterable[bytes | memoryview] = []
            with noting_problems(report, files, index):
                packed = read_member(files, index, options)
                size = packed.size
                content = packed.content
                report.count(packed.kind, files.path(index))
                if not name.lower().endswith(packed.ending):
                    name += packed.ending
            start = write_member(file, name, size, content)
            members.append(Member(name, size, start))
        file.write(bytes(2 * BLOCK))  # the end of a tar file
    return members, report


def write_member(
    file: IO[bytes], name: str, size: int, content: Iterable[bytes | memoryview]
) -> int:
    """Append a file of `size` bytes to a tar file -> where its content starts."""
    info = tarfile.TarInfo(name)
    info.size = size
    file.write(info.tobuf(errors="surrogateescape"))
    start = file.tell()
    for part in content:
        file.write(part)
    file.write(bytes(-size % BLOCK))
    return start


def pack(
    source: str,
    target: str,
    workers: int,
    options: PackOptions,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> None:
    """Put the images of a folder into tar shards, in their order, with an index.

    Pictures whose longer side is above `max_side` become JPEGs of that side; other pictures are
    copied byte by byte; images that are no pictures become arrays. With `bands`, the files of a
    scene's bands become one array. Statistics are measured if the source has some, or if at least
    half of the pack are arrays. ValueError if the target already has files.
    """
    path = new_folder(target)
    listed = list_images(source, include=include, exclude=exclude)
    files = find_scenes(listed, options.bands) if options.bands else listed
    folder = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)  # left by a command that was interrupted
    folder.mkdir(parents=True)
    parts = split_into_shards(files)
    shards = [folder / f"shard-{i:06}.tar" for i in range(len(parts))]
    shard_members = []
    report = Report()
    for some, found in for_each(partial(write_shard, options), workers, shards, parts):
        shard_members.append(some)
        report.add(found)
    for problem in report.problems:
        print(problem)
    if not report.kinds:
        raise ValueError(f"no image in {source} can be read")
    packed = save_index(index_members(shards, shard_members), str(folder / "pack.index"))
    arrays = np.char.endswith(np.char.lower(packed.table["name"]), b".npy").sum()
    measures = 2 * arrays >= len(packed) or os.path.exists(stats_file(source))
    folder.rename(path)
    packed = list_images(target)
    count = len(packed)
    size = packed.sizes.sum() / 2**30
    print(f"{target}: {count} images in {len(shards)} shards, {size:.3f} GiB")
    report.print_kinds()
    if any(kind.mode for kind in report.kinds):
        print("pictures that fit are copied undecoded: `prepare.py scan` finds the broken ones")
    if report.problems:
        print(f"{len(report.problems)} of {count} images cannot be read: they are empty files")
    if measures:
        save_stats(packed, read_folder(packed, workers), options.bands)


def new_folder(target: str) -> Path:
    """Return the path that a finished pack can be moved to; ValueError if there is something."""
    path = Path(os.path.realpath(target))  # a folder cannot take the place of a link to one
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{target} is not empty: pack into a new folder")
    if path.is_mount() or path == Path.cwd():
        raise ValueError(f"{target} cannot be replaced by a pack: give a new folder in it")
    return path


def split_into_shards(files: ImageList | SceneList) -> list[ImageList | SceneList]:
    """Split a list into parts whose files have about SHARD_BYTES together."""
    ends = np.cumsum(files.sizes)
    _, firsts = np.unique((ends - 1).clip(0) // SHARD_BYTES, return_index=True)
    return [files.part(first, last) for first, last in pairwise([*firsts, len(files)])]


def index_members(shards: Sequence[Path], shard_members: Sequence[Sequence[Member]]) -> ImageList:
    """Make the list of a pack from its shards and the members of each."""
    names, sizes, starts = zip(*chain.from_iterable(shard_members), strict=True)
    counts = [len(members) for members in shard_members]
    shard_numbers = np.repeat(np.arange(len(shards)), counts)
    labels, classes = data.classes_by_folder(names)
    encoded = [os.fsencode(name) for name in names]
    table = make_table(encoded, labels, sizes, shard_numbers, starts)
    shard_names = tuple(shard.name for shard in shards)
    return ImageList(str(shards[0].parent), table, classes, shard_names)
