"""Pack the images of a folder into tar shards with an index: few large files instead of a million.

The folder gets its name when all of it is there; until then it is NAME.unfinished.
"""

import io
import os
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from PIL import Image

import data
from storage.arrays import declares_missing, read_image
from storage.checking import (
    Kind,
    Report,
    Say,
    for_each,
    naming_memory_errors,
    picture_mode,
    read_folder,
    save_stats,
)
from storage.image_list import ImageList, list_images, make_table, save_index
from storage.paths import stats_file
from storage.stacking import SceneList, find_scenes

SHARD_BYTES = 2**28  # of the source of one shard
QUALITY = 90  # of JPEGs that are made smaller
BLOCK = 512  # bytes, of tar


@dataclass(frozen=True)
class PackOptions:
    """How images become members of a pack."""

    max_side: int | None = None  # of pictures, in pixels
    nodata: float | None = None
    bands: tuple[str, ...] = ()  # of scenes whose bands are files; () for images as they are


class Member(NamedTuple):
    """One image of a shard."""

    name: bytes
    size: int  # bytes; 0 where it could not be read
    start: int
    kind: Kind | None  # None where it could not be read,
    problem: str  # for this reason
    declaring: bool  # a picture that says which of its pixels are missing


def repack(content: bytes, options: PackOptions) -> tuple[bytes | np.ndarray, str]:
    """Return an image as a pack holds it, and how its name must end: "" for a copy.

    A picture's longer side is at most `max_side`; what is no picture becomes an array (C, H, W).
    """
    image = read_image(content, options.nodata)
    if isinstance(image, np.ndarray):
        return image, ".npy"
    max_side = options.max_side
    if max_side is None or max(image.size) <= max_side:
        return content, ""
    image.draft(None, (2 * max_side, 2 * max_side))  # of a JPEG: decoded no larger than needed
    rgb = data.decode(image)
    rgb.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    packed = io.BytesIO()
    rgb.save(packed, "JPEG", quality=QUALITY)
    return packed.getvalue(), ".jpg"


def read_member(
    files: ImageList | SceneList, index: int, options: PackOptions
) -> tuple[bytes | np.ndarray, str, str]:
    """Read one image -> what a pack holds, how its name must end, and why it is empty, or "".

    An image that cannot be read, or made smaller, becomes an empty file, so that it is found
    unreadable again in training, and all others keep their numbers. Raises any error that is not
    the file's own.
    """
    try:
        with naming_memory_errors(files.path(index)):
            if isinstance(files, SceneList):
                return files.read(index, options.nodata), ".npy", ""
            content, ending = repack(files.read(index), options)
            return content, ending, ""
    except Exception as error:  # Pillow raises many kinds for a broken file
        if not data.is_file_error(error):
            raise
        listed = isinstance(files, ImageList) and files.table[index]["size"] > 0
        if isinstance(error, FileNotFoundError) and listed:
            raise  # a file system that goes away is no broken image
        return b"", "", data.describe_file_error(error)


def write_shard(options: PackOptions, path: Path, files: ImageList | SceneList) -> list[Member]:
    """Write a shard of images, as `read_member` makes them: a tar file."""
    members = []
    with open(path, "wb") as file:
        for index in range(len(files)):
            content, ending, problem = read_member(files, index, options)
            name = files.name(index)
            if not name.lower().endswith(ending):
                name += ending
            start, size = write_member(file, name, content)
            kind = None
            declaring = False
            if not problem:
                kind, declaring = kind_of_member(content)
            member = Member(os.fsencode(name), size, start, kind, problem, declaring)
            members.append(member)
        file.write(bytes(2 * BLOCK))  # the end of a tar file
    return members


def kind_of_member(content: bytes | np.ndarray) -> tuple[Kind, bool]:
    """Return what training takes a member for, and whether a picture declares missing pixels."""
    if isinstance(content, np.ndarray):
        return Kind(len(content), content.dtype.name, packed_only=False), False
    if content.startswith(b"\x93NUMPY"):  # of a pack that is packed again
        array = data.open_array(content)
        return Kind(len(array), array.dtype.name, packed_only=False), False
    image = data.open_picture(content)
    kind = Kind(3, "uint8", packed_only=False, mode=picture_mode(image))
    return kind, declares_missing(image)


def write_member(file: IO[bytes], name: str, content: bytes | np.ndarray) -> tuple[int, int]:
    """Append a file to a tar file -> where its content starts, and its size in bytes."""
    info = tarfile.TarInfo(name)
    if isinstance(content, np.ndarray):
        header = npy_header(content)
        info.size = len(header) + content.nbytes
    else:
        header = content
        info.size = len(content)
    file.write(info.tobuf(errors="surrogateescape"))
    start = file.tell()
    file.write(header)
    if isinstance(content, np.ndarray):
        for channel in content:  # a copy of one channel at most
            file.write(np.ascontiguousarray(channel).data)
    file.write(bytes(-info.size % BLOCK))
    return start, info.size


def npy_header(array: np.ndarray) -> bytes:
    """Return what a .npy file of (C, H, W) begins with; the channels follow, row by row."""
    about = np.lib.format.header_data_from_array_1_0(array)
    about["fortran_order"] = False
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, about)
    return header.getvalue()


def pack(
    source: str,
    target: str,
    workers: int,
    say: Say,
    options: PackOptions,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> None:
    """Put the images of a folder into tar shards, in their order, with an index.

    Pictures whose longer side is above `max_side` become JPEGs of that side; what is no picture
    becomes arrays; all others are copied byte by byte. With `bands`, the files of a scene's bands
    become one array. Statistics of the source come along; of arrays they are measured if there are
    none. ValueError where the target has files already.
    """
    path = Path(target)
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{target} is not empty: pack into a new folder")
    listed = list_images(source, say, include=include, exclude=exclude)
    files = find_scenes(listed, options.bands, say) if options.bands else listed
    folder = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was interrupted
    folder.mkdir(parents=True)
    parts = split_into_shards(files)
    shards = [folder / f"shard-{i:06}.tar" for i in range(len(parts))]
    found = for_each(partial(write_shard, options), workers, say, shards, parts)
    shard_members = list(found)
    members = list(chain.from_iterable(shard_members))
    report = report_members(files, members)
    for problem in report.problems:
        say(problem)
    if not report.kinds:
        raise ValueError(f"no image in {source} can be read")
    packed = index_members(folder, files, shard_members)
    save_index(packed, str(folder / "pack.index"))
    measured = stats_file(source)
    if os.path.exists(measured) and not options.bands:
        shutil.copyfile(measured, folder / "stats.json")
    folder.rename(path)
    size = sum(member.size for member in members) / 2**30
    say(f"{target}: {len(members)} images in {len(shards)} shards, {size:.3f} GiB")
    report.say_kinds(say)
    if report.problems:
        say(f"{len(report.problems)} of {len(members)} images cannot be read: they are empty files")
    unused = len(members) - report.count_of_most_frequent()
    if unused:
        share = f"{unused} of {len(members)} images ({unused / len(members):.1%})"
        say(f"training on this pack leaves out {share}, and ends if these are above --max-bad")
    arrays = sum(member.name.endswith(b".npy") for member in members)
    if 2 * arrays >= len(members) and not (path / "stats.json").exists():
        packed = list_images(target, say)
        save_stats(packed, read_folder(packed, workers, say), say, options.bands)


def report_members(files: ImageList | SceneList, members: Sequence[Member]) -> Report:
    """Say which kinds of images a pack has, and which of them cannot be read."""
    report = Report()
    for index, member in enumerate(members):
        if member.kind is None:
            report.problems.append(f"{files.path(index)}: {member.problem}")
            continue
        report.kinds[member.kind] += 1
        report.declaring += member.declaring
        if member.kind not in report.first:
            report.first[member.kind] = files.path(index)
    return report


def split_into_shards(files: ImageList | SceneList) -> list[ImageList | SceneList]:
    """Split a list where the files of a shard have SHARD_BYTES."""
    table = files.table if isinstance(files, ImageList) else files.files
    sizes = table["size"].reshape(len(files), -1).sum(axis=1)
    ends = np.cumsum(sizes)
    _, firsts = np.unique((ends - 1).clip(0) // SHARD_BYTES, return_index=True)
    return [files.part(first, last) for first, last in pairwise([*firsts, len(files)])]


def index_members(
    folder: Path, files: ImageList | SceneList, shard_members: Sequence[Sequence[Member]]
) -> ImageList:
    """Make the list of a pack from the members of its shards."""
    members = list(chain.from_iterable(shard_members))
    if isinstance(files, ImageList):
        labels, classes = files.labels, files.classes
    else:
        labels, classes = data.classes_by_folder(files.names)  # type: ignore[assignment]
    table = make_table(
        [member.name for member in members],
        labels,
        [member.size for member in members],
        np.repeat(np.arange(len(shard_members)), [len(some) for some in shard_members]),
        [member.start for member in members],
    )
    shards = tuple(f"shard-{i:06}.tar" for i in range(len(shard_members)))
    return ImageList(str(folder), table, classes, shards)
