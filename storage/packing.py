"""Pack the images of a folder into tar shards with an index: few large files instead of a million.

A shard gets its name when it is whole, so an interrupted pack resumes with those that are missing.
"""

import errno
import fcntl
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

import data
from runtime.process import throttled_progress
from storage.checking import parallel_map
from storage.image_list import PACK_INDEX, ImageList, fingerprint, list_images, save_index
from storage.safe_files import naming, regular, replacing


@dataclass(frozen=True)
class PackSettings:
    """What decides the content of every shard; kept in pack.json."""

    images: str  # fingerprint of the source
    max_side: int | None  # pixels; larger images become JPEGs of that side
    quality: int  # of these JPEGs
    shard_mib: int  # of source per shard


class Part(NamedTuple):
    """The images of the source that one shard holds."""

    number: int  # of the shard
    images: range

    @property
    def name(self) -> str:
        """Return the file name of the shard."""
        return f"shard-{self.number:06}.tar"


class Members(NamedTuple):
    """What a whole shard holds."""

    names: list[bytes]
    places: np.ndarray  # (N, 2) int64: where each image begins, and its size


def downscale(content: bytes, max_side: int, quality: int) -> bytes | None:
    """Make a JPEG whose longer side is `max_side`; None where the image is not larger than that.

    An array stays one, of the same dtype.
    """
    image, (width, height) = data.open_image(content)
    if max(width, height) <= max_side:
        return None
    packed = io.BytesIO()
    if isinstance(image, np.ndarray):
        np.save(packed, shrink(image, max_side))
        return packed.getvalue()
    fits = [scale for scale in (1, 2, 4, 8) if max(width, height) >= 2 * scale * max_side]
    rgb = data.decode(image, max(fits, default=1))  # two pixels for each that stays
    rgb.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    rgb.save(packed, "JPEG", quality=quality)
    return packed.getvalue()


def shrink(array: np.ndarray, max_side: int) -> np.ndarray:
    """Resize an array (C, H, W) so that its longer side is `max_side`; the dtype stays."""
    size = [max(1, n * max_side // max(array.shape[1:])) for n in array.shape[1:]]
    whole = torch.from_numpy(array.astype(np.float32, order="C"))[None]
    pixels = F.interpolate(whole, size, mode="bicubic", antialias=True)[0]
    if array.dtype.kind == "u":  # bicubic goes beyond the range at edges
        pixels = pixels.round().clamp(0, np.iinfo(array.dtype).max)
    return pixels.numpy().astype(array.dtype)


def write_shard(
    files: ImageList, target: str, settings: PackSettings, part: Part
) -> list[tuple[int, str]]:
    """Write one shard -> (index, reason) of its unreadable images.

    One that cannot be read, or made smaller, becomes an empty file, so that it is found unreadable
    again in training, and all others keep their numbers. Raises any error that is not the file's.
    """
    bad = []
    with (
        replacing(os.path.join(target, part.name)) as stream,
        tarfile.open(fileobj=stream, mode="w") as archive,
    ):
        for index in part.images:
            name, content, packed = files.name(index), b"", None
            try:
                content = files.read(index)
                if settings.max_side:
                    packed = downscale(content, settings.max_side, settings.quality)
            except Exception as error:  # Pillow raises many kinds for a broken file
                code = getattr(error, "errno", None)
                vanished = code == errno.ENOENT and files.times[index] > 0  # it was listed
                if isinstance(error, MemoryError) or code not in data.FILE_ERRNOS or vanished:
                    raise
                content = b""
                bad.append((index, f"{type(error).__name__}: {error}"))
            if content and len(content) != files.sizes[index]:
                raise ValueError(f"{files.path(index)} has changed meanwhile: pack again")
            if packed is not None:
                same = name.lower().endswith((".jpg", ".jpeg", ".npy"))
                content, name = packed, name if same else f"{name}.jpg"
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), int(files.times[index]) // 10**9
            archive.addfile(info, io.BytesIO(content))
    return bad


def read_members(files: ImageList, target: str, max_side: int | None, part: Part) -> Members | None:
    """Read the headers of a shard; None where it is not a whole file as `write_shard` writes it."""
    try:
        with (
            open(os.path.join(target, part.name), "rb", opener=regular) as stream,
            tarfile.open(fileobj=stream, mode="r:") as archive,  # ":" for not compressed
        ):
            found = archive.getmembers()
            rest = os.fstat(stream.fileno()).st_size % tarfile.RECORDSIZE
    except (FileNotFoundError, ValueError, EOFError, tarfile.TarError):
        return None
    if rest or len(found) != len(part.images):
        return None
    endings = ("",) if max_side is None else ("", ".jpg")
    for member, index in zip(found, part.images, strict=True):
        source = files.name(index)
        if member.name not in [source + ending for ending in endings]:
            return None
        if max_side is None and member.size not in (0, files.sizes[index]):
            return None
    places = np.array([(member.offset_data, member.size) for member in found], np.int64)
    return Members([os.fsencode(member.name) for member in found], places)


@contextmanager
def locked_folder(folder: str) -> Iterator[None]:
    """Keep other packing processes out of a folder; ValueError where there is one.

    On a file system without locks this does nothing.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process packs into {folder}: wait for it") from None
        yield
    finally:
        os.close(descriptor)


def begin_pack(target: str, settings: PackSettings) -> None:
    """Write pack.json, or compare an earlier one; ValueError where the shards are of other images.

    Removes what a killed process left half written. Needs the folder's lock.
    """
    kept = os.path.join(target, "pack.json")
    if os.path.lexists(kept) or any(Path(target).glob("shard-*.tar")):
        earlier = None
        with (
            suppress(FileNotFoundError, ValueError, RecursionError),
            open(kept, "rb", opener=regular) as file,
        ):
            earlier = json.load(file)
        if earlier != asdict(settings):
            raise ValueError(
                f"{target} was started from other images or with other options, or its pack.json "
                "is damaged: delete it, or pack into another folder"
            )
    else:
        with replacing(kept) as stream:
            stream.write(json.dumps(asdict(settings)).encode())
    for pattern in (".shard-*", ".pack.*"):  # the temporary files of `replacing`
        for path in Path(target).glob(pattern):
            path.unlink()


def pack(
    source: str,
    target: str,
    max_side: int | None,
    quality: int,
    shard_mib: int | None,
    workers: int,
    say: Callable[[str], None],
) -> ImageList:
    """Put the images of a folder into tar shards, in their order, with an index; resumes.

    Images whose longer side is above `max_side` become JPEGs, or arrays, of that side, all others
    are copied byte by byte. A damaged shard is written again. ValueError where the target was
    started from other images or with other options, or is the source.
    """
    if os.path.realpath(source) == os.path.realpath(target):
        raise ValueError(f"{target} holds the images themselves: pack into another folder")
    files = list_images(source, throttled_progress(say, "listing"))
    if shard_mib is None:  # so many that all workers have one to write, but of no more than 1 GiB
        shard_mib = min(max(int(files.sizes.sum()) // 2**26, 16), 1024)
    settings = PackSettings(fingerprint(files), max_side, quality, shard_mib)
    shard = (np.cumsum(files.sizes) - 1).clip(0) // (shard_mib * 2**20)  # by bytes of the source
    _, first = np.unique(shard, return_index=True)
    ends = [*first[1:].tolist(), len(files)]
    ranges = map(range, first.tolist(), ends)
    parts = [Part(number, images) for number, images in enumerate(ranges)]
    read = partial(read_members, files, target, max_side)
    write = partial(write_shard, files, target, settings)
    os.makedirs(target, exist_ok=True)
    with locked_folder(target):
        begin_pack(target, settings)
        found = {part: read(part) for part in parts}
        todo = [part for part in parts if found[part] is None]
        if todo:  # an earlier index may not fit the shards that are written now
            Path(target, PACK_INDEX).unlink(missing_ok=True)
        for path in filter(os.path.lexists, (os.path.join(target, part.name) for part in todo)):
            say(f"{path} is damaged: it is written again")
        if len(todo) < len(parts):
            say(f"{len(parts) - len(todo)} of {len(parts)} shards are there already")
        progress, done = throttled_progress(say, "packing"), 0
        from runtime.log import append_rows  # not in the worker processes

        ledger = os.path.join(target, "bad_images.csv")
        for part, bad in parallel_map(write, todo, workers):
            with naming(ledger):
                append_rows(ledger, [(files.path(index), reason, None) for index, reason in bad])
            progress(done := done + len(part.images))
        packed = index_pack(files, target, found | {part: read(part) for part in todo})
    say(
        f"{target}: {len(files)} images in {len(parts)} shards, {packed.sizes.sum() / 2**30:.3f} "
        f"GiB of {files.sizes.sum() / 2**30:.3f}, {(packed.sizes == 0).sum()} of them unreadable"
    )
    return packed


def index_pack(files: ImageList, target: str, found: dict[Part, Members | None]) -> ImageList:
    """Write the index of finished shards, by what `read_members` found in each."""
    members = [shard for shard in found.values() if shard]
    if len(members) < len(found):
        raise ValueError(f"the shards in {target} have changed meanwhile: pack again")
    names = [name for shard in members for name in shard.names]
    start, sizes = np.concatenate([shard.places for shard in members]).T.copy()  # (N,) each
    packed = replace(
        files,
        root=target,
        names=np.frombuffer(b"".join(names), np.uint8),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        sizes=sizes,
        folders={},
        shards=tuple(part.name for part in found),
        shard=np.repeat(np.arange(len(found), dtype=np.int32), [len(p.images) for p in found]),
        start=start,
        index_file=None,
        opened={},
    )
    return save_index(packed, os.path.join(target, PACK_INDEX))
