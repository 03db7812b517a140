"""Put the images of a folder into tar shards with an index, so that few large files are read."""

import errno
import fcntl
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import data
from runtime.bad_images import append_rows
from storage.checking import in_processes
from storage.image_list import fingerprint, told_often

PACK_BUDGET = 8 * data.MEMORY_BUDGET  # for one image: here are fewer processes than in a run


def smaller(content: bytes, max_side: int, quality: int) -> bytes | None:
    """The image as a JPEG whose longer side is `max_side`; None where it is not larger now."""
    image, (width, height) = data.open_image(content, PACK_BUDGET)
    if max(width, height) <= max_side:
        return None
    fits = [scale for scale in (1, 2, 4, 8) if max(width, height) >= 2 * scale * max_side]
    rgb = data.decode(image, max(fits, default=1), PACK_BUDGET)  # two pixels for each that stays
    rgb.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    packed = io.BytesIO()
    rgb.save(packed, "JPEG", quality=quality)
    return packed.getvalue()


def write_shard(
    files: data.ImageFiles, target: str, max_side: int | None, quality: int, part: tuple[int, range]
) -> list[tuple[int, str]]:
    """Write the images `part[1]` to shard number `part[0]`; returns those that are broken.

    One that cannot be read, or made smaller, is kept as an empty file, so that it is found broken
    again in training, and all others keep their numbers.
    """
    number, some = part
    bad = []
    with (
        data.replacing(os.path.join(target, shard_name(number))) as stream,
        tarfile.open(fileobj=stream, mode="w") as archive,
    ):
        for index in some:
            name, content, packed = files.name(index), b"", None
            try:
                content = files.read(index)
                packed = smaller(content, max_side, quality) if max_side else None
            except Exception as error:  # Pillow raises many kinds for a broken file
                code = getattr(error, "errno", None)
                gone = code == errno.ENOENT and files.times[index] > 0  # it was there
                if isinstance(error, MemoryError) or code not in data.FILE_ERRNOS or gone:
                    raise  # trouble of the disk, not of the file
                content = b""
                bad.append((index, f"{type(error).__name__}: {error}"))
            if content and len(content) != files.sizes[index]:
                raise ValueError(f"{files.path(index)} has changed meanwhile: pack again")
            if packed is not None:
                jpeg = name.lower().endswith((".jpg", ".jpeg"))
                content, name = packed, name if jpeg else f"{name}.jpg"
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), int(files.times[index]) // 10**9
            archive.addfile(info, io.BytesIO(content))
    return bad


def shard_name(number: int) -> str:
    """Of a pack's shards, from 0 on."""
    return f"shard-{number:06}.tar"


def members(
    files: data.ImageFiles, target: str, max_side: int | None, part: tuple[int, range]
) -> tuple[list[bytes], np.ndarray] | None:
    """What shard `part[0]` holds of the images `part[1]`; None where packing wrote no such file.

    Names, and (N, 2) int64: where the content of each begins, and its size.
    """
    number, some = part
    try:
        with (
            open(os.path.join(target, shard_name(number)), "rb", opener=data.regular) as stream,
            tarfile.open(fileobj=stream, mode="r:") as archive,  # ":" for not compressed
        ):
            found = archive.getmembers()
            whole = os.fstat(stream.fileno()).st_size % tarfile.RECORDSIZE == 0
    except (FileNotFoundError, ValueError, EOFError, tarfile.TarError):
        return None
    names = [member.name for member in found]
    places = np.array([(member.offset_data, member.size) for member in found], np.int64)
    if not whole or len(found) != len(some):
        return None
    endings = ("",) if max_side is None else ("", ".jpg")
    sizes = files.sizes[some.start : some.stop]
    pairs = zip(names, (files.name(index) for index in some), strict=True)
    same = all(name in [source + ending for ending in endings] for name, source in pairs)
    if not same or (max_side is None and not np.all((places[:, 1] == sizes) | (places[:, 1] == 0))):
        return None
    return [os.fsencode(name) for name in names], places


@contextmanager
def locked_folder(folder: str) -> Iterator[None]:
    """Keep other packs out of a folder, by a lock; ValueError where there is one.

    On a file system without locks this does nothing.
    """
    here = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(here, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process packs into {folder}: wait for it") from None
        yield
    finally:
        os.close(here)


def begin_pack(target: str, settings: dict[str, Any]) -> None:
    """Keep beside the shards what they are made of; ValueError where they are of something else."""
    kept, left = os.path.join(target, "pack.json"), list(Path(target).glob(".shard-*"))
    if os.path.lexists(kept) or next(Path(target).glob("shard-*.tar"), None):
        then = None
        with (
            suppress(FileNotFoundError, ValueError, RecursionError),
            open(kept, "rb", opener=data.regular) as file,
        ):
            then = json.load(file)
        if then != settings:
            raise ValueError(
                f"{target} was begun from other images or with other options, or its pack.json is "
                "damaged: delete it, or pack into another folder"
            )
    else:
        with data.replacing(kept) as stream:
            stream.write(json.dumps(settings).encode())
    for path in left:
        path.unlink()


def pack(
    source: str,
    target: str,
    max_side: int | None,
    quality: int,
    shard_mib: int | None,
    workers: int,
    say: Callable[[str], None],
) -> data.ImageFiles:
    """Put the images of a folder into tar shards, in their order, with an index; goes on if cut.

    Images whose longer side is above `max_side` become JPEGs of that side, all others are copied
    bit by bit. A shard that is not as it was written is written again. ValueError where the target
    was begun from other images or with other options.
    """
    files = data.scan(source, told_often(say, "listing"))
    if shard_mib is None:  # so many that all workers have one to write, but of no more than 1 GiB
        shard_mib = min(max(int(files.sizes.sum()) // 2**26, 16), 1024)
    settings = {"images": fingerprint(files), "max_side": max_side, "quality": quality}
    settings["shard_mib"] = shard_mib
    shard = (np.cumsum(files.sizes) - 1).clip(0) // (shard_mib * 2**20)  # by bytes of the source
    _, first = np.unique(shard, return_index=True)
    ends = [*first[1:].tolist(), len(files)]
    parts = [(n, range(a, b)) for n, (a, b) in enumerate(zip(first.tolist(), ends, strict=True))]
    listed = partial(members, files, target, max_side)
    os.makedirs(target, exist_ok=True)
    with locked_folder(target):
        begin_pack(target, settings)
        found = {part: listed(part) for part in parts}
        todo = [part for part in parts if found[part] is None]
        for number, _ in todo:
            if os.path.lexists(path := os.path.join(target, shard_name(number))):
                say(f"{path} is damaged: it is written again")
        if len(todo) < len(parts):
            say(f"{len(parts) - len(todo)} of {len(parts)} shards are there already")
        broken = write_shards(files, target, max_side, quality, todo, workers, say)
        found |= {part: listed(part) for part in todo}
        packed = index_pack(files, target, found)
    say(
        f"{target}: {len(files)} images in {len(parts)} shards, {packed.sizes.sum() / 2**30:.3f} "
        f"GiB of {files.sizes.sum() / 2**30:.3f}, {broken} of them unreadable"
    )
    return packed


def write_shards(
    files: data.ImageFiles,
    target: str,
    max_side: int | None,
    quality: int,
    todo: list[tuple[int, range]],
    workers: int,
    say: Callable[[str], None],
) -> int:
    """Write shards, in processes; list the images that are broken, and return how many."""
    progress, done, broken = told_often(say, "packing"), 0, 0
    work = partial(write_shard, files, target, max_side, quality)
    for (_, part), bad in in_processes(work, todo, workers):
        ledger = os.path.join(target, "bad_images.csv")
        append_rows(ledger, [(files.path(index), reason, None) for index, reason in bad])
        done, broken = done + len(part), broken + len(bad)
        progress(done)
    return broken


def index_pack(
    files: data.ImageFiles, target: str, found: dict[tuple[int, range], Any]
) -> data.ImageFiles:
    """Write the index of finished shards, by what `members` found in each."""
    if None in found.values():
        raise ValueError(f"the shards in {target} have changed meanwhile: pack again")
    names = [name for shard_names, _ in found.values() for name in shard_names]
    start, sizes = np.concatenate([places for _, places in found.values()]).T.copy()  # (N,) each
    numbers, counts = zip(*((number, len(part)) for number, part in found), strict=True)
    packed = replace(
        files,
        root=target,
        names=np.frombuffer(b"".join(names), np.uint8),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        sizes=sizes,
        folders={},
        shards=tuple(shard_name(number) for number in numbers),
        shard=np.repeat(np.array(numbers, np.int32), counts),
        start=start,
        index_file=None,
        opened={},
    )
    return data.save_index(packed, os.path.join(target, data.PACK_INDEX))
