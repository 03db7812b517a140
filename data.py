"""Images in: which files there are, who reads which one when, decode, augmentation, batches.

Files are a class tree, a flat folder, or a pack of either (tar shards, made by prepare.py).

Every draw is a function of (seed, position), where the position counts the samples of the whole job
since its first step. So no rank, worker or sampler has a state: one integer says where a run is,
and any number of ranks and workers sees the same images, crops, flips and masks.

Copy this one file: `for batch in build_loader(scan("tiles"), img_size=96, ...)` needs nothing else.
Workers touch neither the network nor the device.
"""

import errno
import fcntl
import io
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from multiprocessing import get_context, parent_process
from multiprocessing.reduction import ForkingPickler
from threading import Thread
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torchvision.transforms.functional as TF
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate
from torchvision.transforms import InterpolationMode, RandomResizedCrop

EXTENSIONS = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp")
PACK_INDEX = "pack.index"  # in the folder of a pack, beside its shards
INDEX_FORMAT = 1
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as in the MAE recipe
SYNTHETIC_IMAGES = 1_000_848  # as many as Million-AID has: train 10,000 + test 990,848
SUBSTITUTES = 16  # unreadable images in a row before the run is stopped
# What one image may take while it is decoded, in bytes, instead of Pillow's limit of pixels: a JPEG
# that is read at an eighth of its size takes a sixty-fourth. A node has dozens of workers.
MEMORY_BUDGET = 2**30
# Errors that are the file's own: Pillow cannot decode it (no errno), it has gone, it is not ours, a
# link to itself, a socket.
FILE_ERRNOS = (None, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENXIO)

# ---------------------------------------------------------------------------------------------
# Files


def regular(path: str, flags: int) -> int:
    """An `opener` for `open` that refuses, by a ValueError, what is no regular file.

    Opening a FIFO would wait for its other end, reading a device might never end.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return descriptor


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the path to an OSError that has none: writing to a full disk does not say which disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` once it is written and synced.

    After an error nothing of it is left, and `path` is as it was.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with naming(path):
            with open(temporary, "xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)


# ---------------------------------------------------------------------------------------------
# Which files there are


@dataclass(frozen=True)
class ImageFiles:
    """The images below one folder, in sorted order of their relative paths; or of a pack of them.

    A few blocks of memory, no Python object for each image. With an `index_file` a copy of it in
    another process is that file mapped into memory: a million images cost a node 80 MB once.
    """

    root: str
    names: np.ndarray  # uint8, all relative paths, one after the other
    ends: np.ndarray  # (N,) int64, where in `names` each of them ends
    labels: np.ndarray  # (N,) int32, index into classes, -1 for images that lie in root itself
    sizes: np.ndarray  # (N,) int64, bytes of the file
    times: np.ndarray  # (N,) int64, when it was last changed, in ns
    classes: tuple[str, ...]
    folders: dict[str, tuple[int, int]]  # relative path: when changed, in ns, and images in it
    shards: tuple[str, ...] = ()  # of a pack: its tar files,
    shard: np.ndarray | None = None  # (N,) int32, in which of them an image lies,
    start: np.ndarray | None = None  # (N,) int64, and from which byte on
    index_file: str | None = None
    opened: dict[int, io.FileIO] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.ends)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.index_file:
            return load_index, (self.index_file, self.root)
        values = [getattr(self, f.name) for f in fields(self) if f.name != "opened"]
        return ImageFiles, tuple(values)

    def name(self, index: int) -> str:
        """Its path relative to the folder, or within the pack."""
        first = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.names[first : int(self.ends[index])].tobytes())

    def path(self, index: int) -> str:
        """Its path as a person would look for it; in a pack, that of the shard and the member."""
        place = (self.shards[self.shard[index]],) if self.shard is not None else ()
        return os.path.join(self.root, *place, self.name(index))

    def read(self, index: int) -> bytes:
        """The whole file; OSError where it cannot be read, ValueError where its shard is cut."""
        if self.shard is None or self.start is None:
            path = self.path(index)
            with naming(path), open(path, "rb", buffering=0, opener=regular) as file:
                return file.read()
        number, size = int(self.shard[index]), int(self.sizes[index])
        # By descriptor, not mapped: a map would ask a parallel file system for a page at a time.
        if number not in self.opened:
            shard = os.path.join(self.root, self.shards[number])
            self.opened[number] = io.FileIO(shard, opener=regular)
        with naming(self.shards[number]):
            content = os.pread(self.opened[number].fileno(), size, int(self.start[index]))
        if len(content) < size:
            raise ValueError(f"the shard {self.shards[number]} is cut: pack again, it goes on")
        return content


def scan(root: str, progress: Callable[[int], None] | None = None) -> ImageFiles:
    """The images below `root`: a class tree of any depth, a flat folder, a mixture, or a pack.

    The class of an image is the name of the folder it lies in (all 51 leaf names of Million-AID
    differ), numbered in sorted order; two folders of one name are one class. Images in `root`
    itself have no class. Hidden files and folders are left out; symbolic links are followed, but
    not to a folder around them. `progress` hears, now and then, how many were found. Raises OSError
    where a folder is missing or may not be read, and ValueError where there is no image.
    """

    def refuse(error: OSError) -> None:
        raise error  # a folder left out in silence would renumber the classes

    def leads_up(folder: str, name: str) -> bool:
        here, there = os.path.realpath(folder), os.path.realpath(os.path.join(folder, name))
        return os.path.join(here, "").startswith(os.path.join(there, ""))

    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no folder {root}: give --data the folder of your images")
    if os.path.exists(os.path.join(root, PACK_INDEX)):
        return load_index(os.path.join(root, PACK_INDEX), root)
    found: list[tuple[bytes, str]] = []
    folders: dict[str, tuple[int, int]] = {}
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        changed = os.stat(folder).st_mtime_ns
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and not leads_up(folder, n)]
        relative = os.path.relpath(folder, root)
        leaf = "" if relative == "." else os.path.basename(folder)
        images = [n for n in names if n.lower().endswith(EXTENSIONS) and not n.startswith(".")]
        prefix = "" if relative == "." else os.path.join(relative, "")
        found += [(os.fsencode(prefix + name), leaf) for name in images]
        folders[relative] = (changed, len(images))
        if progress:
            progress(len(found))
    if not found:
        raise ValueError(f"no image lies below {root}: looked for {' '.join(EXTENSIONS)}")
    found.sort()
    classes = tuple(sorted({leaf for _, leaf in found if leaf}))
    number = {leaf: i for i, leaf in enumerate(classes)}
    paths = [path for path, _ in found]
    sizes, times = _sizes_and_times(os.fsencode(root), paths)
    return ImageFiles(
        root,
        names=np.frombuffer(b"".join(paths), np.uint8),
        ends=np.cumsum([len(path) for path in paths], dtype=np.int64),
        labels=np.array([number.get(leaf, -1) for _, leaf in found], dtype=np.int32),
        sizes=sizes,
        times=times,
        classes=classes,
        folders=folders,
    )


def _sizes_and_times(root: bytes, paths: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Of many files, (N,) each; zeros where there is nothing. In threads: it is all waiting."""

    def look(some: list[bytes]) -> np.ndarray:
        seen = np.zeros((len(some), 2), np.int64)
        for i, path in enumerate(some):
            try:
                status = os.stat(os.path.join(root, path))
            except OSError as error:
                if error.errno not in FILE_ERRNOS:
                    raise
                continue  # a link to nothing: it is found out when it is read
            seen[i] = status.st_size, status.st_mtime_ns
        return seen

    with ThreadPoolExecutor(16) as threads:
        parts = [paths[first : first + 1000] for first in range(0, len(paths), 1000)]
        seen = np.concatenate(list(threads.map(look, parts)))  # (N, 2)
    return seen[:, 0].copy(), seen[:, 1].copy()


def save_index(files: ImageFiles, path: str) -> ImageFiles:
    """Keep the list in one file, of which every process maps the same pages; returns it so."""
    values = {f.name: getattr(files, f.name) for f in fields(files)}
    del values["opened"], values["index_file"]
    del values["root"]
    values["format"] = INDEX_FORMAT
    # an array becomes a tensor, whose storage torch.load can map; the rest is plain
    plain = {
        k: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v
        for k, v in values.items()
    }
    content = io.BytesIO()  # torch.save to a full disk says neither that nor which disk
    torch.save(plain, content)
    with replacing(path) as stream:
        stream.write(content.getbuffer())
    return load_index(os.path.abspath(path), files.root)


def load_index(path: str, root: str) -> ImageFiles:
    """What `save_index` kept, mapped into memory; ValueError where it is no such file.

    `root` is where the images are now. Nothing in the file is executed.
    """
    with open(path, "rb", buffering=0, opener=regular):
        pass  # torch.load would wait for the other end of a FIFO
    try:
        # PyTorch finds files by UTF-8 paths only; of another file every process has a copy
        mapped = path.encode(errors="replace") == os.fsencode(path)
        with nullcontext(path) if mapped else open(path, "rb") as source:
            values: dict[str, Any] = torch.load(
                source, mmap=mapped, weights_only=True, map_location="cpu"
            )
        if values.pop("format") != INDEX_FORMAT:
            raise ValueError("another format")
        values["root"] = root
        arrays: dict[str, Any] = {
            k: v.numpy() if isinstance(v, Tensor) else v for k, v in values.items()
        }
        return ImageFiles(**arrays, index_file=path)
    except OSError:
        raise
    except Exception as error:
        what = type(error).__name__  # torch.load's own text advises to load it unsafely
        raise ValueError(f"{path} is no list of ours, or damaged ({what}): make it again") from None


# ---------------------------------------------------------------------------------------------
# Who reads which one when


def steps_per_epoch(images: int, global_batch: int) -> int:
    """Whole global batches in an epoch; ValueError, one sentence, if there is not even one."""
    if global_batch > images:
        raise ValueError(
            f"a global batch of {global_batch} is larger than the data set of {images} images: "
            f"use fewer ranks or a --batch that keeps the global batch at {images} or less"
        )
    return images // global_batch


class Positions(Sampler[list[int]]):
    """The positions that one rank reads, a list for each local batch.

    Step s of the whole job takes the positions s G to (s+1) G - 1, G being the global batch. They
    are dealt out in runs of one local batch: first to every rank in turn, then again for the next
    accumulation step. Thus all ranks together read each position once, in every sharding mode (a
    hybrid group shards parameters, never the batch).
    """

    def __init__(
        self, global_batch: int, local_batch: int, rank: int, world_size: int, steps: range
    ) -> None:
        if global_batch % (local_batch * world_size):
            raise ValueError(
                f"a global batch of {global_batch} is not a multiple of {world_size} ranks x "
                f"{local_batch} images"
            )
        self.global_batch, self.local_batch, self.steps = global_batch, local_batch, steps
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return len(self.steps) * (self.global_batch // (self.local_batch * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            start = step * self.global_batch + self.rank * self.local_batch
            stop = (step + 1) * self.global_batch
            for first in range(start, stop, self.world_size * self.local_batch):
                yield list(range(first, first + self.local_batch))


# ---------------------------------------------------------------------------------------------
# One image


class Sample(NamedTuple):
    """One image of a batch, or, with a first dimension B on every field, the batch."""

    image: Tensor  # (3, H, W) uint8
    noise: Tensor  # (L,) float32, the masking order: a random permutation of 0 .. L-1
    label: int  # class, -1 where there is none
    image_id: int  # which image of the data set
    position: int  # which sample of the job
    crop: Tensor  # (4,) int32: top, left, height, width in source pixels
    flip: bool  # mirrored left to right
    cost: (
        Tensor  # (5,) float64: bytes; seconds to read, decode, resize, collate (a batch: in its 0)
    )
    bad: str  # JSON, [[image_id, reason], ...]: the unreadable ones it stands in for; mostly ""


@contextmanager
def seeded(seed: int, position: int) -> Iterator[None]:
    """Make torch's CPU draws a function of (seed, position), and leave its generator as it was."""
    state = torch.get_rng_state()
    word = np.random.SeedSequence((seed, position)).generate_state(1)[0]
    torch.default_generator.manual_seed(int(word))  # not torch.manual_seed: it touches the devices
    try:
        yield
    finally:
        torch.set_rng_state(state)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any PIL image -> RGB: upright by its EXIF tag, 16 bit scaled to 8, transparent over black."""
    file_format = image.format  # older Pillows open a 16-bit PNG as "I"
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PNG"):
        grey = np.asarray(image) // 257  # `convert` would clip at 255
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels, whose range is not known")
    if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, image)
    return image.convert("RGB")


def open_image(content: bytes, budget: int = MEMORY_BUDGET) -> tuple[Image.Image, tuple[int, int]]:
    """A file's content -> its image, not decoded yet, and its width and height when upright.

    ValueError where it is no image that Pillow knows, or one that takes more than `budget` bytes.
    """
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # `budget` stands for it
    try:
        image = Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        what = f"begins with {content[:16]!r}" if content else "is empty"
        raise ValueError(f"no image: the file {what}") from None
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    width, height = image.size
    if width * height == 0:
        raise ValueError("no pixels")
    # What a copy that was cut off may leave: decoded, it is grey from there on, without an error.
    if image.format == "JPEG" and content.endswith(b"\0") and not _finished(content):
        raise ValueError("truncated: zeros where the end of the JPEG should be")
    if image.format != "JPEG":  # which may be read smaller; a PNG is read whole for its Exif
        check_memory(image, image.size, budget)
    sideways = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return image, (height, width) if sideways else (width, height)


def _finished(jpeg: bytes) -> bool:
    """Whether the last mark of an end (ITU-T T.81, table B.1) follows the last begin of a scan."""
    return jpeg.rfind(b"\xff\xd9") > jpeg.rfind(b"\xff\xda")


def check_memory(image: Image.Image, whole: tuple[int, int], budget: int) -> None:
    """ValueError where decoding at the size of `image`, of a file with `whole`, takes too much."""
    needed = 4 * image.width * image.height  # Pillow's RGB has four bytes a pixel
    if image.info.get("progressive"):
        needed += (
            6 * whole[0] * whole[1]
        )  # all its coefficients, of 2 bytes, before the first pixel
    if needed > budget:
        raise ValueError(
            f"{whole[0]} x {whole[1]} pixels take {needed / 2**30:.1f} GiB to decode, more than "
            f"{budget / 2**30:.1f}: make it smaller by `prepare.py pack --max-side`"
        )


def decode(image: Image.Image, reduce: int = 1, budget: int = MEMORY_BUDGET) -> Image.Image:
    """Decode to upright RGB, a JPEG at 1/1, 1/2, 1/4 or 1/8 of its size (`reduce`).

    Raises whatever Pillow raises for a broken image, of a truncated one too, and ValueError where
    more than `budget` bytes would be needed.
    """
    whole = image.size
    if reduce > 1:
        image.draft(None, (whole[0] // reduce, whole[1] // reduce))
    check_memory(image, whole, budget)
    return to_rgb(image)


def read_rgb(path: str) -> Image.Image:
    """Decode one file to upright RGB; raises as `decode`."""
    with open(path, "rb") as file:
        return decode(open_image(file.read())[0])


def reduction(image: Image.Image, crop: Sequence[int], side: int) -> int:
    """1, 2, 4 or 8: how much smaller a JPEG may be decoded so that its crop keeps `side` pixels."""
    # Turned images, rare here, are decoded whole: the last pixel of a reduced one is a part of a
    # pixel, and turning would bring it to the front, and all others out of place.
    if image.format != "JPEG" or image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        return 1
    return max(scale for scale in (1, 2, 4, 8) if scale == 1 or min(crop[2:]) >= scale * side)


def synthetic_rgb(seed: int, index: int, size: int = 256) -> Image.Image:
    """A smooth random picture, always the same for one (seed, index): learnable, and no file."""
    coarse = np.random.default_rng((seed, index)).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)


class Files(Protocol):
    """What `Images` needs of a data set: `ImageFiles`, or what reads them in another way."""

    @property
    def labels(self) -> np.ndarray: ...  # (N,) int32

    def __len__(self) -> int: ...
    def read(self, index: int) -> bytes: ...


class Images(Dataset[Sample]):
    """Sample by position: which image, its pixels, and its augmentation.

    Each epoch is a new permutation of all images, drawn from (seed, epoch), of which the last
    incomplete global batch is left out. RandomResizedCrop 0.2-1 with bicubic resize, then a flip
    half of the time: the recipe of MAE (arXiv 2111.06377, appendix A.1). A JPEG is decoded at the
    smallest scale that its crop allows, and resized once; `exact` decodes it whole, as torchvision
    would, at half the speed: the pixels differ by about 1 of 255 in the mean.
    """

    def __init__(
        self,
        files: Files | None,
        img_size: int,
        patches: int,
        seed: int,
        global_batch: int,
        exact: bool = False,
    ) -> None:
        self.files, self.img_size, self.patches, self.seed = files, img_size, patches, seed
        self.exact = exact
        self.count = SYNTHETIC_IMAGES if files is None else len(files)
        self.epoch_samples = steps_per_epoch(self.count, global_batch) * global_batch
        self.epoch, self.order = -1, np.empty(0, np.int32)

    def index(self, position: int) -> int:
        """Which image stands at `position`."""
        epoch, offset = divmod(position, self.epoch_samples)
        if epoch != self.epoch:
            everything = np.arange(self.count, dtype=np.int32)
            self.order = np.random.default_rng((self.seed, epoch)).permutation(everything)
            self.epoch = epoch
        return int(self.order[offset])

    def __getitem__(self, place: int | tuple[int, int]) -> Sample:
        """The sample of a position, or of (position, index) where the index is known already.

        For an unreadable image the next good one of the job's order stands in, with the crop, flip
        and mask of this position.
        """
        position, index = place if isinstance(place, tuple) else (place, self.index(place))
        bad: list[tuple[int, str]] = []
        while True:
            try:
                sample = self.sample(position, index)
                return sample._replace(bad=json.dumps(bad)) if bad else sample
            except Exception as error:  # Pillow raises many kinds for a broken file
                number = getattr(error, "errno", None)
                if isinstance(error, MemoryError) or number not in FILE_ERRNOS:
                    raise  # trouble of this node, not of the file: other ranks may not have it
                bad.append((index, f"{type(error).__name__}: {error}"))
            if len(bad) == SUBSTITUTES:
                raise RuntimeError(
                    f"{SUBSTITUTES} images in a row could not be read, the last one "
                    f"number {index} ({bad[-1][1]})"
                )
            index = self.index(position + len(bad))

    def sample(self, position: int, index: int) -> Sample:
        """This image as it looks at this position; raises what reading and decoding raise."""
        clock = [time.perf_counter()]
        content = b"" if self.files is None else self.files.read(index)
        clock.append(time.perf_counter())
        if self.files is None:
            image = synthetic_rgb(self.seed, index)
            width, height = image.size
        else:
            image, (width, height) = open_image(content)
        with seeded(self.seed, position):
            noise = torch.randperm(self.patches).float()
            flip = bool(torch.rand(()) < 0.5)
            blank = torch.empty(1).expand(1, height, width)  # get_params asks for its size only
            crop = RandomResizedCrop.get_params(blank, scale=[0.2, 1.0], ratio=[3 / 4, 4 / 3])
        reduce = 1 if self.exact else reduction(image, crop, self.img_size)
        image = decode(image, reduce)
        clock.append(time.perf_counter())
        size = [self.img_size, self.img_size]
        if reduce == 1:
            image = TF.resized_crop(image, *crop, size, InterpolationMode.BICUBIC)
        else:
            top, left, high, wide = (n / reduce for n in crop)
            box = (left, top, left + wide, top + high)
            image = image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box)
        pixels = TF.pil_to_tensor(TF.hflip(image) if flip else image)  # (3, H, W) uint8
        clock.append(time.perf_counter())
        cost = torch.tensor([len(content), *np.diff(clock), 0.0], dtype=torch.float64)
        label = -1 if self.files is None else int(self.files.labels[index])
        return Sample(
            pixels,
            noise,
            label,
            index,
            position,
            torch.tensor(crop, dtype=torch.int32),
            flip,
            cost,
            "",
        )


# ---------------------------------------------------------------------------------------------
# Batches


class Places(Sampler[list[tuple[int, int]]]):
    """`Positions` with the image that stands at each, so that no worker keeps the whole order."""

    def __init__(self, positions: Positions, index: Callable[[int], int]) -> None:
        self.positions, self.index = positions, index

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self.positions:
            yield [(position, self.index(position)) for position in batch]


def collate(samples: list[Sample]) -> Sample:
    """Samples -> a batch; its images in shared memory, where a worker does it."""
    started = time.perf_counter()
    batch: Any = default_collate(samples)
    batch.cost[0, 4] = time.perf_counter() - started
    return batch


def fork_server() -> Any:
    """Set what the fork server imports before its first start, which decides; returns its context.

    Python has one fork server, so every module that starts workers asks here. What a worker imports
    is memory of its own, what the server has imported is shared by all.
    """
    context = get_context("forkserver")
    # not this module: the server of older Pythons finds only what is installed
    context.set_forkserver_preload(["torch", "torchvision.transforms.functional"])
    return context


def start_worker(worker: int) -> None:
    """Let a loader worker end when the process that reads from it does, and no other way.

    PyTorch's own watch is over the process that forked the worker, which is the fork server; and
    the fork server lives as long as its workers do. Ctrl-C is the reading process's business.
    """

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enlarge_pipes()
    ForkingPickler.register(Tensor, by_value)
    Thread(target=watch, daemon=True).start()


def enlarge_pipes() -> None:
    """Let this process write its messages without waiting for their reader (Linux).

    A worker that is killed in the middle of a message leaves a reader that waits for the rest for
    ever, and a pipe's usual 64 KiB are full after a few batches.
    """
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile, or more than an ordinary user may have
                if stat.S_ISFIFO(os.fstat(int(name)).st_mode):
                    fcntl.fcntl(int(name), fcntl.F_SETPIPE_SZ, 2**20)


def by_value(tensor: Tensor) -> tuple[Any, ...]:
    """How a worker hands a tensor over (as `pickle` wants it): a small one in the message itself.

    In shared memory each costs a file and a connection, half a millisecond of the reading process.
    """
    small = tensor.nbytes < 2**14
    return (torch.from_numpy, (tensor.numpy(),)) if small else reduce_tensor(tensor)


def build_loader(
    files: Files | None,
    *,
    img_size: int,
    patches: int,
    seed: int,
    global_batch: int,
    local_batch: int,
    steps: range,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    pin_memory: bool = False,
    exact: bool = False,
    start_method: str = "forkserver",
) -> DataLoader[Sample]:
    """The local batches of one rank for these steps of the job, accumulation steps one by one.

    `files` None means synthetic images. Batches are `Sample`s whose fields have a first dimension
    B = local_batch: image (B, 3, img_size, img_size) uint8 for `normalize`, noise (B, patches).
    One iterator goes through all steps, so workers start once, not once an epoch. Raises ValueError
    where the batch does not divide or is larger than the data set, or the workers come too late.
    """
    context = None
    if workers:
        # A worker forked from this process inherits its threads and handles: of the network
        # libraries once the ranks have met (a lock that one held is then held for ever), of the
        # device once it was used. One from the fork server has imported modules only.
        if start_method == "fork" and (dist.is_initialized() or torch.cuda.is_initialized()):
            raise ValueError(
                "workers cannot be forked from a process that talks to other ranks or to a GPU: "
                "build and start the loader before init_process_group, or use forkserver"
            )
        context = fork_server() if start_method == "forkserver" else get_context(start_method)
    images = Images(files, img_size, patches, seed, global_batch, exact)
    positions = Positions(global_batch, local_batch, rank, world_size, steps)
    return DataLoader(
        images,
        batch_sampler=Places(positions, images.index),
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=start_worker,
        multiprocessing_context=context,
        generator=torch.Generator(),  # or each iterator would draw from the global one
        pin_memory=pin_memory,
        prefetch_factor=4 if workers else None,
    )


def normalize(images: Tensor) -> Tensor:
    """(B, 3, H, W) uint8 -> float32 with ImageNet's mean and deviation, on the images' device."""
    x = images.float() / 255
    for channel, (mean, std) in enumerate(zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)):
        x[:, channel].sub_(mean).div_(std)  # by numbers: a tensor of them would stall the device
    return x
