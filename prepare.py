"""Getting a data set ready: list it, find what is broken, pack it, copy it to node-local disk.

    python prepare.py index DIR                      list it once, beside it in DIR.index
    python prepare.py scan DIR                       decode everything, name what is broken
    python prepare.py pack SRC DST --max-side 512    tar shards with an index; --data DST trains

A parallel file system serves a hundred large files better than a million small ones: pack where you
can, from a login node or a job of one node. `pack` may be stopped and started again. Needs data.py.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: Ctrl-C meanwhile ends the program without a traceback.
    import os
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import csv
import errno
import fcntl
import io
import json
import os
import random
import shutil
import sys
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import data
from runtime import terminal
from runtime.ranges import Parser, filled, whole

BAD_COLUMNS = ("path", "reason", "step")
CHECKED_FILES = 200  # whose size and time are looked at before an index is believed
PACK_BUDGET = 8 * data.MEMORY_BUDGET  # for one image: here are fewer processes than in a run
RESERVE = 0.05  # of a node-local disk, left free

# ---------------------------------------------------------------------------------------------
# The list of files, made once


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


def find_images(folder: str, out: str | None, say: Callable[[str], None]) -> data.ImageFiles:
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


# ---------------------------------------------------------------------------------------------
# What is broken


def problem_of(files: data.ImageFiles, index: int) -> str | None:
    """Why training could not read an image, if so."""
    try:
        image, _ = data.open_image(files.read(index))
        data.decode(image, reduce=8 if image.format == "JPEG" else 1)  # damage shows at any scale
    except Exception as error:  # Pillow raises many kinds for a broken file
        if getattr(error, "errno", None) not in (*data.FILE_ERRNOS, errno.EIO):
            raise  # too many open files, a file system that went away: not the image's fault
        return f"{type(error).__name__}: {error}"
    return None


def problems_of(files: data.ImageFiles, some: range) -> list[tuple[int, str]]:
    """Of some images, by index."""
    found = ((index, problem_of(files, index)) for index in some)
    return [(index, problem) for index, problem in found if problem]


def in_processes(
    work: Callable[[Any], Any], parts: Iterable[Any], workers: int
) -> Iterator[tuple[Any, Any]]:
    """(part, work(part)) as they are done; RuntimeError where a worker process dies."""
    pool = ProcessPoolExecutor(
        workers, data.fork_server(), initializer=data.start_worker, initargs=(0,)
    )
    try:
        running = {pool.submit(work, part): part for part in parts}
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process was killed, perhaps for want of memory: the same command goes on, "
            "with fewer --workers if need be"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def append_rows(path: str, rows: Sequence[tuple[str, str, int | None]]) -> None:
    """Lines for a list of bad images, with a heading where it is new; OSError.

    They are path, reason and the step that met it, if one did.
    """
    if not rows:
        return
    new = not os.path.exists(path)
    with (
        data.naming(path),
        open(path, "a", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.writer(file)
        if new:
            writer.writerow(BAD_COLUMNS)
        writer.writerows(rows)


def scan(folder: str, out: str, workers: int, say: Callable[[str], None]) -> int:
    """Decode every image; name the broken ones, also in the file `out`; returns how many."""
    files = data.scan(folder, told_often(say, "listing"))
    progress, done, broken = told_often(say, "reading"), 0, 0
    parts = [range(first, min(first + 64, len(files))) for first in range(0, len(files), 64)]
    for part, found in in_processes(partial(problems_of, files), parts, workers):
        rows = [(files.path(index), reason, None) for index, reason in found]
        if rows:
            append_rows(out, rows)
        for path, reason, _ in rows:
            say(f"{path}: {reason}")
        done, broken = done + len(part), broken + len(rows)
        progress(done)
    say(f"{broken} of {len(files)} images cannot be read" + (f": see {out}" if broken else ""))
    return broken


# ---------------------------------------------------------------------------------------------
# Packing


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


def fingerprint(files: data.ImageFiles, times: bool = True) -> str:
    """A number of all names and sizes, and of the times of their last change."""
    value = 0
    for array in (files.names, files.ends, files.sizes, *([files.times] if times else [])):
        value = zlib.crc32(array.data, value)
    return f"{value:08x}"


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


# ---------------------------------------------------------------------------------------------
# Node-local copies


class Staged:
    """Images that a node reads from the shared file system once; from then on from its own disk.

    Two files in `folder`, named by the data set: one takes the images in the order in which they
    come, the other tells where each lies (N + 2 numbers, mapped by all processes of the node: 0 or
    its place + 1; then where the next goes, and how much fits). Who needs an image that another
    process is just reading waits for it. What does not fit is read where it was.
    """

    def __init__(self, files: data.ImageFiles, folder: str) -> None:
        """OSError where the folder cannot be written."""
        self.files, self.folder, count = files, folder, len(files)
        os.makedirs(folder, exist_ok=True)
        stem = os.path.join(folder, f"images-{fingerprint(files)}")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.content = os.open(f"{stem}.staged", flags, 0o600)
        self.table = os.open(f"{stem}.table", flags, 0o600)
        self.mutex = threading.Lock()  # file locks part processes, not threads
        size = 8 * (count + 2)
        with self.locked(count):
            fresh = os.fstat(self.table).st_size != size
            os.ftruncate(self.table, size)
        self.places = np.memmap(f"{stem}.table", np.int64, "r+", shape=(count + 2,))
        if fresh:
            disk = shutil.disk_usage(folder)
            self.places[count + 1] = max(0, disk.free - int(RESERVE * disk.total))

    def __reduce__(self) -> tuple[Any, ...]:
        return Staged, (self.files, self.folder)

    def __del__(self) -> None:
        for name in ("content", "table"):
            if hasattr(self, name):
                os.close(getattr(self, name))

    def __len__(self) -> int:
        return len(self.files)

    @property
    def labels(self) -> np.ndarray:
        return self.files.labels

    @contextmanager
    def locked(self, number: int) -> Iterator[None]:
        """Keep the other processes of the node off one image, or off the table's end."""
        fcntl.lockf(self.table, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self.table, fcntl.LOCK_UN, 1, number)

    def read(self, index: int) -> bytes:
        """As ImageFiles.read."""
        if not self.places[index]:
            with self.locked(index):
                if not self.places[index]:
                    content = self.files.read(index)
                    self.keep(index, content)
                    return content
        place, size = int(self.places[index]) - 1, int(self.files.sizes[index])
        return os.pread(self.content, size, place)

    def keep(self, index: int, content: bytes) -> None:
        """Copy to the node's disk, if there is room and the file is as it was listed."""
        end, size = len(self.files), len(content)
        if size == 0 or size != self.files.sizes[index]:
            return
        with self.mutex, self.locked(end):
            place, room = int(self.places[end]), int(self.places[end + 1])
            if place + size > room:
                return
            self.places[end] = place + size
        try:
            written = 0
            while written < size:
                written += os.pwrite(self.content, content[written:], place + written)
        except OSError:  # somebody else has filled the disk: what is there stays, no more comes
            self.places[end + 1] = place
            return
        self.places[index] = place + 1  # last: before that nobody reads it

    def shortage(self) -> str | None:
        """A sentence where the disk will not hold all."""
        room, whole = int(self.places[-1]), int(self.files.sizes.sum())
        if room >= whole:
            return None
        return (
            f"{self.folder} has room for {room / 2**30:.2f} of {whole / 2**30:.2f} GiB: the images "
            "that come first are staged, the others read from where they are"
        )

    def fill(self, wanted: Callable[[], np.ndarray], threads: int = 4) -> None:
        """Copy the images of these numbers until all are there or the disk is full."""
        todo = wanted()

        def copy(index: int) -> None:
            if not self.places[index] and self.places[-2] < self.places[-1]:
                with suppress(Exception):  # who needs it in training finds and tells it
                    self.read(index)

        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(todo), 1000):
                list(pool.map(copy, todo[first : first + 1000].tolist()))


def wanted_on_node(
    count: int,
    seed: int,
    global_batch: int,
    local_batch: int,
    world_size: int,
    ranks: range,
    steps: range,
) -> np.ndarray:
    """The numbers, in order, of all images that some of these ranks will read in these steps."""
    images = data.Images(_Counted(count), 1, 1, seed, global_batch)
    wanted = np.zeros(count, bool)
    epoch_steps = images.epoch_samples // global_batch
    offset = np.arange(images.epoch_samples)
    reader = offset % global_batch // local_batch % world_size
    mine = (reader >= ranks.start) & (reader < ranks.stop)
    for epoch in range(steps.start // epoch_steps, -(-steps.stop // epoch_steps)):
        images.index(epoch * images.epoch_samples)  # draws the epoch's order
        step = epoch * epoch_steps + offset // global_batch
        now = mine & (step >= steps.start) & (step < steps.stop)
        wanted[images.order[: len(offset)][now]] = True
        if wanted.all():
            break
    return np.flatnonzero(wanted)


class _Counted:
    """A data set of which only the number of images matters."""

    labels = np.empty(0, np.int32)

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> bytes:
        raise AssertionError("its images are not to be read")


def _fill(staged: Staged, wanted: Callable[[], np.ndarray]) -> None:
    data.start_worker(0)  # ends with the rank that started it
    os.nice(10)
    staged.fill(wanted)


def fill_in_background(staged: Staged, wanted: Callable[[], np.ndarray]) -> Any:
    """Start the process that fills a node's disk; it ends when it is done, or with this one."""
    process = data.fork_server().Process(target=_fill, args=(staged, wanted), daemon=True)
    process.start()
    return process


# ---------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The three commands; exit status 1 where images are broken or it failed, 2 for bad usage."""
    parser = Parser("prepare.py", description="List, check and pack images.")
    commands = parser.add_subparsers(dest="command", required=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for name, helped in (
        ("index", "list the images once, in DIR.index, which training then uses"),
        ("scan", "decode every image and name the broken ones"),
        ("pack", "put all images into tar shards, which training reads with --data DST"),
    ):
        command = commands.add_parser(name, help=helped)
        command.add_argument(
            "dir", type=filled, metavar="SRC" if name == "pack" else "DIR", help="of images"
        )
        if name != "index":
            command.add_argument(
                "--workers",
                type=whole(1, 1024),
                default=cores,
                metavar="N",
                help="processes (default: the cores)",
            )
    command = commands.choices["pack"]
    command.add_argument("out", type=filled, metavar="DST", help="folder of the shards")
    command.add_argument(
        "--max-side",
        type=whole(1, 2**16),
        metavar="PIXELS",
        help="make larger images so small (default: copy all as they are)",
    )
    command.add_argument("--quality", type=whole(1, 100), default=90, help="of JPEG (default 90)")
    command.add_argument(
        "--shard-mib",
        type=whole(1, 2**20),
        metavar="MIB",
        help="of source a shard (default: a 64th of all, 16 to 1024)",
    )
    command = commands.choices["scan"]
    command.add_argument(
        "--out",
        type=filled,
        default="bad_images.csv",
        metavar="FILE",
        help="what is broken is appended to it (default bad_images.csv)",
    )
    args = parser.parse_args(argv)

    def say(text: str) -> None:
        print(text, flush=True)

    folder = args.dir.rstrip("/") or "/"
    try:
        if args.command == "scan":
            return 1 if scan(folder, args.out, args.workers, say) else 0
        if args.command == "pack":
            pack(folder, args.out, args.max_side, args.quality, args.shard_mib, args.workers, say)
        else:
            files = data.scan(folder, told_often(say, "listing"))
            data.save_index(files, f"{folder}.index")
            say(f"{folder}.index: {len(files)} images, {len(files.classes)} classes")
    except KeyboardInterrupt:
        print("prepare.py: interrupted; the same command goes on", file=sys.stderr)
        return 130
    except (OSError, ValueError, RuntimeError) as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # main says how it goes on
    terminal.make_safe()
    raise SystemExit(main())
