"""Load images: list, order across ranks, augmentation, batches, one image from file to pixels.

The order of images follows from (seed, epoch); the crop, flip and masking noise of a sample follow
from (seed, position), where `position` is its number in the whole job, from 0. So no rank, worker
or sampler keeps any state: the step number says where a run is, and with the same global batch any
number of ranks and workers gives the same images, crops, flips and masks.
Copy this one file: `for batch in build_loader(scan("tiles"), img_size=96, ...)` needs nothing else.
A micro-batch is the images of one rank in one accumulation step. Shapes: N images of a data set,
B of a micro-batch, C channels, H x W pixels, L patches of an image.
"""

import atexit
import errno
import io
import json
import math
import multiprocessing
import os
import signal
import struct
import threading
import tokenize
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain
from multiprocessing import forkserver, resource_tracker
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from PIL.ExifTags import Base as Tag
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

EXTENSIONS = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".jp2", ".j2k", ".npy")
ARRAY_DTYPES = ("uint8", "uint16", "float32")
AnyImage = Image.Image | np.ndarray  # an array is (C, H, W), with a dtype in ARRAY_DTYPES
PREFETCH = 2  # batches that each worker of a loader may read ahead
MAX_UNREADABLE_IN_A_ROW = 256  # so many end the run: the folder must be gone
# Logarithms of the limits of width / height; computed in fp32, as in torchvision.
LOG_ASPECT_LIMITS = torch.tensor([3 / 4, 4 / 3]).log().tolist()
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # they end a run


class ChannelStats(NamedTuple):
    """Mean and standard deviation of each channel of a data set.

    uint8 values are first scaled to [0, 1]; uint16 and float32 values are taken as stored.
    """

    mean: tuple[float, ...]  # C numbers
    std: tuple[float, ...]
    dtype: str = "uint8"  # the dtype of every image, one of ARRAY_DTYPES


IMAGENET = ChannelStats((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # as in the MAE recipe


class UnreadableImage(ValueError):
    """An image is broken, or not as training takes it: a loader reads another in its place."""


class NeedsPackingError(UnreadableImage):
    """Training cannot read the file as it is, but `prepare.py pack` may be able to convert it."""


# --- Which images there are


class ImageSource(Protocol):
    """What a loader needs from a data set: use `scan` or a class of your own."""

    def __len__(self) -> int: ...
    def path(self, index: int) -> str: ...  # a name for messages
    # The bytes of a file, or an image that is open already. OSError or UnreadableImage if it cannot
    # be read; any other exception is taken for an error of code, and ends the run.
    def read(self, index: int) -> bytes | AnyImage: ...


@dataclass(frozen=True)
class ImageList:
    """The images of a folder, or of a pack, in one array: an ImageSource.

    The table (N,) has the fields `name`, a path relative to root as bytes, and `size` in bytes; in
    a pack (tar files with an index) also `shard`, the number of its file, and `start` in that file.
    """

    root: str
    table: np.ndarray
    left_out: str = ""  # how many files below root are not listed, and why

    def __len__(self) -> int:
        return len(self.table)

    @property
    def packed(self) -> bool:
        """Tell whether the images are in a pack."""
        return "shard" in (self.table.dtype.names or ())

    @property
    def sizes(self) -> np.ndarray:
        """Return the bytes of each file (N,) int64."""
        return self.table["size"]

    def part(self, first: int, last: int) -> "ImageList":
        """Return the images from `first` to before `last`."""
        return replace(self, table=self.table[first:last])

    def name(self, index: int) -> str:
        """Return an image's path relative to the folder, or within the pack."""
        return os.fsdecode(self.table["name"][index])

    def path(self, index: int) -> str:
        """Return an image's path for messages; there is no such file in a pack."""
        return os.path.join(self.root, self.name(index))

    def read(self, index: int) -> bytes:
        """Read a whole image file; OSError if it cannot be read."""
        if not self.packed:
            with open(self.path(index), "rb", buffering=0) as image:
                return image.read()
        _, size, shard, start = self.table[index].item()
        file = open_shard(os.path.join(self.root, f"shard-{shard:06}.tar"))
        file.seek(start)
        return file.read(size)


@lru_cache(maxsize=512)  # half of the files that a process may usually open
def open_shard(path: str) -> IO[bytes]:
    """Open a file of a pack, once in a process."""
    return open(path, "rb", buffering=8192)


def scan(root: str, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> ImageList:
    """List the images below `root`, or of a pack, sorted by the bytes of their names.

    If `include` is given, lists only images that match one of its patterns; never one that matches
    a pattern of `exclude` (see `matches`). OSError if a folder cannot be listed, ValueError if
    there is no image, or if a pack is damaged or given with patterns.
    """
    if is_pack(root):
        if include or exclude:
            raise ValueError(f"{root} is a pack, in which none can be chosen: pack only these")
        path = os.path.join(root, "pack.index")
        try:
            with open(path, "rb") as file:
                table = np.lib.format.read_array(file)[["name", "size", "shard", "start"]]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}): create it again") from None
        return ImageList(root, table)
    names: list[bytes] = []
    # a count of 0 tells that the patterns may be misspelt
    left_out = Counter({"excluded": 0} if exclude else {})
    for name in walk_files(root):
        if not name.lower().endswith(EXTENSIONS):
            _, ending = os.path.splitext(name)
            left_out[f"with the extension {ending.lower() or 'none'}"] += 1
        elif include and not any(matches(name, pattern) for pattern in include):
            left_out["not included"] += 1
        elif any(matches(name, pattern) for pattern in exclude):
            left_out["excluded"] += 1
        else:
            names.append(os.fsencode(name))
    counts = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
    if not names:
        text = f"no images found in {root}: looked for {' '.join(EXTENSIONS)}; left out: {counts}"
        raise ValueError(f"{text} (a pattern must match a whole name: *part* matches a part)")
    names.sort()
    longest = max(len(name) for name in names)
    table = np.zeros(len(names), [("name", f"S{longest}"), ("size", "i8")])
    table["name"] = names

    def size(name: bytes) -> int:
        path = os.path.join(os.fsencode(root), name)
        return os.path.getsize(path) if os.path.exists(path) else 0  # a link to nothing

    with ThreadPool(16) as threads:  # a parallel file system takes long for each
        table["size"] = threads.map(size, names)
    return ImageList(root, table, counts)


def walk_files(root: str) -> Iterator[str]:
    """Yield the path of each visible file, relative to `root`; OSError for an unreadable folder.

    Follows symbolic links, but lists no folder twice.
    """

    def fail(error: OSError) -> None:
        raise error  # a folder skipped silently would change the order of the images

    # Treat the folders above `root` as listed, so that a link to one of them lists nothing.
    above = [os.stat(folder) for folder in Path(root).resolve().parents]
    listed = {(info.st_ino, info.st_dev) for info in above}
    for path, subfolders, files in os.walk(root, onerror=fail, followlinks=True):
        info = os.stat(path)
        if (info.st_ino, info.st_dev) in listed:
            subfolders.clear()  # os.walk enters only what this list still holds
            continue
        listed.add((info.st_ino, info.st_dev))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        folder = os.path.relpath(path, root)
        visible = [name for name in files if not name.startswith(".")]
        yield from visible if folder == "." else [f"{folder}/{name}" for name in visible]


def matches(name: str, pattern: str) -> bool:
    """Tell whether a relative path matches a pattern, which may contain *, ? and [abc].

    A pattern without a slash is compared with the file's name and with each folder's name. A
    pattern with a slash is compared with the whole path; its * matches slashes too.
    """
    parts = [name] if "/" in pattern else name.split("/")
    return any(fnmatchcase(part, pattern) for part in parts)


def is_pack(folder: str) -> bool:
    """Tell whether `folder` is a pack of images, not a folder of image files."""
    return os.path.exists(os.path.join(folder, "pack.index"))


@dataclass(frozen=True)
class SyntheticImages:
    """Smooth random pictures of uint8 from (seed, index), learnable: an ImageSource."""

    seed: int
    channels: int = 3
    count: int = 1_000_848  # the size of Million-AID: train 10,000 + test 990,848

    def __len__(self) -> int:
        return self.count

    def path(self, index: int) -> str:
        return f"synthetic image {index}"

    def read(self, index: int) -> AnyImage:
        """Make a picture of 256 x 256: RGB, or an array (C, H, W)."""
        generator = np.random.default_rng((self.seed, index))
        coarse = generator.integers(0, 256, (8, 8, self.channels), dtype=np.uint8)
        channels = [Image.fromarray(np.ascontiguousarray(c)) for c in np.moveaxis(coarse, 2, 0)]
        smooth = [channel.resize((256, 256), Image.Resampling.BICUBIC) for channel in channels]
        if self.channels == 3:
            return Image.merge("RGB", smooth)
        return np.stack([np.asarray(channel) for channel in smooth])


# --- Statistics: of which images, and where they are kept


def fingerprint(files: ImageList) -> str:
    """Compute a checksum of all names and sizes."""
    names = files.table["name"]
    # As wide as the longest needs it: the column of a part of a pack is as wide as all of it.
    longest = np.char.str_len(names).max()
    checksum = zlib.crc32(names.astype(f"S{longest}").tobytes())
    return f"{zlib.crc32(files.sizes.tobytes(), checksum):08x}"


def stats_file(folder: str) -> str:
    """Return where `prepare.py stats` keeps the mean and standard deviation of each channel."""
    folder = os.path.realpath(folder)
    # beside a folder, not in it: a new file in it would change the list of its files
    return os.path.join(folder, "stats.json") if is_pack(folder) else f"{folder}.stats.json"


def read_stats(path: str) -> tuple[ChannelStats, str | None]:
    """Read a file of statistics -> them, and the fingerprint of the images that were measured.

    A file that was written by hand has none. ValueError if training cannot use the statistics.
    """
    with open(path, "rb") as file:
        content = file.read()
    try:
        found = json.loads(content)
        both = np.array([found["mean"], found["std"]], np.float64)  # (2, C)
        if both.ndim != 2 or not both.size or not np.isfinite(both).all() or both[1].min() <= 0:
            raise ValueError("each channel needs a finite mean, and a deviation above 0")
        if found["dtype"] not in ARRAY_DTYPES:
            raise ValueError(f"dtype {found['dtype']!r:.40} is none of {ARRAY_DTYPES}")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        what = f"{path} is not as `prepare.py stats` writes it"
        raise ValueError(f"{what} ({error!r}): remove it and type that") from None
    mean, std = both.tolist()
    return ChannelStats(tuple(mean), tuple(std), found["dtype"]), found.get("images")


# --- Which rank reads which image, and when


def steps_per_epoch(image_count: int, global_batch: int) -> int:
    """Count the whole global batches in an epoch; ValueError if there is not even one."""
    if global_batch > image_count:
        raise ValueError(
            f"global batch {global_batch} exceeds the data set of {image_count} images"
        )
    return image_count // global_batch


@lru_cache(maxsize=1)
def permutation(seed: int, epoch: int, image_count: int) -> np.ndarray:
    """Return the order (N,) int64 of all images in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(image_count)


class ImageOrder:
    """The order of images: every epoch is a new permutation, cut to whole global batches.

    Without `shuffle` it is their own order, of all images, again and again.
    """

    def __init__(
        self, image_count: int, global_batch: int, seed: int, shuffle: bool = True
    ) -> None:
        self.image_count = image_count
        self.seed = seed
        self.shuffle = shuffle
        self.epoch_samples = image_count
        if shuffle:
            self.epoch_samples = steps_per_epoch(image_count, global_batch) * global_batch

    def image_at(self, position: int) -> int:
        """Return the index of the image that is sample number `position` of the job."""
        epoch, offset = divmod(position, self.epoch_samples)
        if not self.shuffle:
            return offset
        return int(permutation(self.seed, epoch, self.image_count)[offset])


def step_positions(
    step: int, global_batch: int, micro_batch_size: int, world_size: int
) -> np.ndarray:
    """Assign the positions of one step to ranks; return (accumulation steps, world_size, B) int64.

    The ranks take one micro-batch each, in rank order; then one more each for every further
    accumulation step. So all ranks together read each position once, in every sharding mode.
    """
    positions = np.arange(step * global_batch, (step + 1) * global_batch)
    return positions.reshape(-1, world_size, micro_batch_size)


@dataclass(frozen=True)
class RankBatchSampler:
    """The micro-batches of one rank, as lists of (position, image index)."""

    order: ImageOrder
    global_batch: int
    micro_batch_size: int
    rank: int  # among those that read different images
    world_size: int
    steps: range

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self.steps:
            shape = (self.global_batch, self.micro_batch_size, self.world_size)
            own = step_positions(step, *shape)[:, self.rank]  # (accumulation steps, B)
            for positions in own.tolist():
                # Looked up here, in the main process: a worker draws the permutation only if it
                # has to replace an unreadable image.
                yield [(position, self.order.image_at(position)) for position in positions]


# --- Augmentation


def draw_augmentation(
    seed: int, position: int, patches: int, width: int, height: int
) -> tuple[Tensor, bool, tuple[int, int, int, int]]:
    """Draw the masking noise (L,), the flip and the crop (top, left, height, width) of a sample.

    As in appendix A.1 of the MAE paper.
    """
    # a hash of both, so that neighbouring positions draw unrelated numbers
    sample_seed = np.random.SeedSequence((seed, position)).generate_state(1)[0]
    generator = torch.Generator().manual_seed(int(sample_seed))
    # The crop is drawn last, because the number of draws that it takes depends on the size of the
    # image, which must not affect noise or flip.
    noise = torch.randperm(patches, generator=generator).float()  # the smallest stay visible
    flip = torch.rand((), generator=generator).item() < 0.5
    crop = draw_crop(generator, width, height)
    return noise, flip, crop


def draw_crop(generator: torch.Generator, width: int, height: int) -> tuple[int, int, int, int]:
    """Draw a crop (top, left, height, width) like torchvision's RandomResizedCrop.

    It covers 20% to 100% of the area; its aspect ratio (width : height) is from 3:4 to 4:3.
    """
    for _ in range(10):
        area = width * height * torch.empty(1).uniform_(0.2, 1.0, generator=generator).item()
        log_aspect = torch.empty(1).uniform_(*LOG_ASPECT_LIMITS, generator=generator)
        aspect = log_aspect.exp().item()
        w = round(math.sqrt(area * aspect))
        h = round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(height - h + 1, (), generator=generator))
            left = int(torch.randint(width - w + 1, (), generator=generator))
            return top, left, h, w
    # If none of the ten fits, take the largest centred crop with an allowed aspect ratio.
    w = min(width, round(height * 4 / 3))
    h = min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


# --- Samples and batches


class MicroBatch(NamedTuple):
    """The samples of one rank in one accumulation step; or one sample, without the axis B."""

    image: Tensor  # (B, C, H, W) uint8; float32 if the images are uint16 or float32
    noise: Tensor  # (B, L) float32, masking noise: random permutations of 0 .. L-1
    image_ids: list[int]  # B indices in the data set
    bad: list[tuple[int, str]]  # (image_id, reason): unreadable images that these replace


@dataclass(eq=False)
class Images(Dataset[Any]):  # Any: mypy takes a Dataset's items for those of its DataLoader
    """Load a sample by its (position, image index); for `exact` see `crop_and_resize`.

    Without `augment` an image is its centre, never flipped; a sample that stands in for another
    image, or is beyond the last, has the image_id -1.
    """

    files: ImageSource
    order: ImageOrder
    img_size: int
    patches: int
    exact: bool = False
    stats: ChannelStats = IMAGENET  # an image whose channels or dtype differ counts as unreadable
    augment: bool = True

    def __getitem__(self, key: tuple[int, int]) -> MicroBatch:
        """Load an image; if it is unreadable, load the next one in the order instead.

        The replacement gets the same noise and flip, and its crop is drawn from the same random
        numbers. OSError after MAX_UNREADABLE_IN_A_ROW unreadable images, or if a file system
        fails; errors of code are passed on.
        """
        position, index = key
        bad: list[tuple[int, str]] = []
        while len(bad) < MAX_UNREADABLE_IN_A_ROW:
            try:
                image, noise = self.load(position, index)
            except UnreadableImage as error:
                bad.append((index, str(error)))
                index = self.order.image_at(position + len(bad))
                continue
            if not self.augment and index != position:
                index = -1
            return MicroBatch(image, noise, [index], bad)
        last_index, reason = bad[-1]
        last = f"{self.files.path(last_index)} ({reason})"
        raise OSError(f"{len(bad)} images in a row could not be read, the last: {last}")

    def load(self, position: int, index: int) -> tuple[Tensor, Tensor]:
        """Load one image as sample number `position`; return its pixels and noise."""
        try:
            content = self.files.read(index)
        except OSError as error:
            if not is_file_error(error):
                raise
            raise UnreadableImage(f"{type(error).__name__}: {error}") from error
        image, (width, height) = open_image(content, self.stats)
        seed = self.order.seed
        noise, flip, crop = draw_augmentation(seed, position, self.patches, width, height)
        if not self.augment:
            # As ImageNet's evaluations: the shorter side becomes 256 pixels, and 224 are cut out.
            side = max(1, round(min(width, height) * 224 / 256))
            crop = ((height - side) // 2, (width - side) // 2, side, side)
            flip = False
        # Decoding an image that the source has opened smaller would change the source's object.
        exact = self.exact or not isinstance(content, bytes)
        pixels = crop_and_resize(image, crop, self.img_size, exact)
        if flip:
            pixels = pixels.flip(-1)
        return pixels, noise


def collate(samples: Sequence[MicroBatch]) -> MicroBatch:
    """Stack samples into a batch; in a worker, default_collate stacks directly in shared memory."""
    return MicroBatch(
        image=default_collate([sample.image for sample in samples]),
        noise=default_collate([sample.noise for sample in samples]),
        image_ids=list(chain.from_iterable(sample.image_ids for sample in samples)),
        bad=list(chain.from_iterable(sample.bad for sample in samples)),
    )


def build_loader(
    files: ImageSource,
    *,
    img_size: int,
    patches: int,
    seed: int,
    global_batch: int,
    micro_batch_size: int,
    steps: range,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    pin_memory: bool = False,
    timeout: float = 0,
    exact: bool = False,
    stats: ChannelStats = IMAGENET,
    augment: bool = True,
) -> DataLoader[MicroBatch]:
    """Make one rank's DataLoader, which yields that rank's micro-batches for each step in `steps`.

    One iterator covers all steps, so workers start once, not once per epoch; they end with this
    process. A batch that takes longer than `timeout` seconds (0: any time) raises RuntimeError.
    Images must have the channels and dtype of `stats`. Without `augment`, images come in their own
    order: steps = range(ceil(N / global_batch)) covers all; leave out image_ids of -1 (see
    `Images`). ValueError if the global batch is larger than the data set that is shuffled.
    """
    order = ImageOrder(len(files), global_batch, seed, shuffle=augment)
    return DataLoader(
        Images(files, order, img_size, patches, exact, stats, augment),
        batch_sampler=RankBatchSampler(
            order, global_batch, micro_batch_size, rank, world_size, steps
        ),
        num_workers=workers,
        collate_fn=collate,
        multiprocessing_context=fork_server() if workers else None,
        worker_init_fn=end_with_parent,
        # without it each new iterator would draw from, and so change, PyTorch's global generator
        generator=torch.Generator(),
        pin_memory=pin_memory,
        prefetch_factor=PREFETCH if workers else None,
        timeout=timeout if workers else 0,
    )


def normalize(images: Tensor, stats: ChannelStats = IMAGENET) -> Tensor:
    """Normalise images (B, C, H, W) to float32; ValueError unless `stats` has C channels."""
    # a copy in both cases: it is normalised in place
    x = images.float() / 255 if images.dtype == torch.uint8 else images.clone()
    for channel, mean, std in zip(x.unbind(1), stats.mean, stats.std, strict=True):
        # Python numbers: copying a tensor of them to a GPU would make the host wait
        channel.sub_(mean).div_(std)
    return x


# --- Worker processes


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Start the server that worker processes are forked from, if needed, and return its context.

    Forked from this process, a worker would inherit its open devices, and locks of threads that the
    worker does not have. The server has imported torch and blocks STOP_SIGNALS, as do its workers:
    a launcher sends them to all processes, but only this one may act on them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "PIL.Image"])
    resource_tracker.ensure_running()  # first: its start unblocks SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    atexit.register(kill_workers)
    return context


def kill_workers() -> None:
    """End the workers that are left when this process ends: they block SIGTERM."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def end_with_parent(worker: int = 0) -> None:
    """Let this process, a worker, end when the process that reads from it does, however that ends.

    PyTorch watches the worker's parent: the fork server, which lives as long as its workers do.
    """

    def watch() -> None:
        parent: Any = multiprocessing.parent_process()
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# --- One image: from a file or array to pixels
#
# A tree holds pictures that Pillow shows completely as 8-bit RGB, and arrays: .npy files (C, H, W).
# Any other raster (more bands, more bits, several pages, JPEG 2000) is refused here; GDAL reads it
# in `prepare.py pack`, which writes an array.

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF")  # as Pillow names them
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")  # Pillow's, of 8 bits
TIFF_COMPRESSIONS = ("raw", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "packbits")
ENDS = (b"\xff\xd9", b"IEND\xaeB`\x82")  # how a complete JPEG and a complete PNG end
LARGEST_VALUE = 1e30  # a larger magnitude must be a nodata value that nobody declared
# What Pillow and numpy raise for bad content; a mistake in code mostly raises other types.
CONTENT_ERRORS: tuple[type[Exception], ...] = (OSError, SyntaxError, ValueError, ArithmeticError)
CONTENT_ERRORS += (LookupError, TypeError, EOFError, NotImplementedError, struct.error, zlib.error)
CONTENT_ERRORS += (tokenize.TokenError, Image.DecompressionBombError)
PACK = "convert it with `prepare.py pack`"


def is_file_error(error: OSError) -> bool:
    """Tell whether an OSError is about one file: it is missing, forbidden, or cannot be decoded.

    The others, such as EIO, are about a file system: other ranks might not see them.
    """
    about_a_file = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.EISDIR)
    return error.errno is None or error.errno in about_a_file


@contextmanager
def reading() -> Iterator[None]:
    """Turn what Pillow and numpy raise for bad content into UnreadableImage.

    Put only calls of theirs inside: anything else that raises is an error of code.
    """
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = 2**29  # Pillow refuses twice as many
    try:
        yield
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise NeedsPackingError(f"not one of {known}: if it is a raster, {PACK}") from None
    except CONTENT_ERRORS as error:
        if isinstance(error, OSError) and not is_file_error(error):
            raise
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def open_image(
    content: bytes | AnyImage, stats: ChannelStats | None = None
) -> tuple[AnyImage, tuple[int, int]]:
    """Open what `ImageSource.read` returned; return the image, not decoded, and (width, height).

    NaN in an array means nodata; if `stats` is given, NaN is replaced by the channel's mean.
    UnreadableImage if the image is damaged or too large, or if its channels or dtype differ from
    those of `stats`; NeedsPackingError if it must be packed first.
    """
    image: AnyImage
    if not isinstance(content, bytes):
        image = content
    elif content.startswith(b"\x93NUMPY"):
        with reading():
            image = np.load(io.BytesIO(content), allow_pickle=False)
    else:
        image = open_picture(content)
    if isinstance(image, np.ndarray):
        check_array(image)
        channels, height, width = image.shape
        size = (width, height)
        dtype = image.dtype.name
    else:
        channels = 3
        size = image.size
        dtype = "uint8"
    if not stats:
        return image, size
    if (channels, dtype) != (len(stats.mean), stats.dtype):
        kind = f"{channels} channels of {dtype}, not {len(stats.mean)} of {stats.dtype}"
        raise UnreadableImage(f"{kind}: see `prepare.py stats`")
    if isinstance(image, np.ndarray) and dtype == "float32":
        mean = np.array(stats.mean, np.float32)[:, None, None]
        image = np.where(np.isnan(image), mean, image)
    return image, size


def open_picture(content: bytes) -> Image.Image:
    """Open a picture with Pillow, without decoding it; NeedsPackingError for anything more."""
    with reading():
        # Only these formats: Pillow also takes the start of any HDF5 or GRIB file for an image.
        image: Any = Image.open(io.BytesIO(content), formats=FORMATS)
        exif = image.getexif()
    bits = content[24] if image.format == "PNG" else 8  # in its header (PNG, 11.2.1)
    # Of 2 and 4 bits, Pillow scales the pixels to 8, but not the colour that is transparent.
    misread = bits in (2, 4) and image.mode != "P" and "transparency" in image.info
    if image.mode not in MODES or bits == 16 or misread:
        raise NeedsPackingError(f"{image.format} of mode {image.mode}, {bits} bits: {PACK}")
    if image.format == "TIFF" and not is_plain_tiff(image, exif):
        raise NeedsPackingError(f"TIFF that is not one page of 8-bit grey or RGB: {PACK}")
    # An interrupted copy leaves zeros at the end of the file. Pillow would decode the missing rest
    # of a JPEG or PNG as grey or black, without an error.
    zeros = image.format in ("JPEG", "MPO", "PNG") and content.endswith(b"\0")
    if zeros and not content.rstrip(b"\0").endswith(ENDS):
        raise UnreadableImage(f"truncated: zeros where the end of the {image.format} should be")
    return image


def is_plain_tiff(image: Any, exif: Any) -> bool:
    """Tell whether an opened TIFF is one page of 8-bit grey or RGB, which all readers show."""
    tags = image.tag_v2
    places = (Tag.StripOffsets, Tag.StripByteCounts, Tag.TileOffsets, Tag.TileByteCounts)
    about = str(tags.get(Tag.ImageDescription, ""))
    return (
        image.mode in ("L", "RGB")
        and image.info.get("compression") in TIFF_COMPRESSIONS
        and tags.next == 0  # no second page, overview or mask
        and Tag.SubIFDs not in tags
        and tags.get(Tag.NewSubfileType, 0) == 0
        and tags.get(Tag.SamplesPerPixel, 1) == len(image.getbands())
        and set(tags.get(Tag.BitsPerSample, ())) == {8}
        and set(tags.get(Tag.SampleFormat, (1,))) == {1}  # unsigned
        and tags.get(Tag.PhotometricInterpretation) in (1, 2)  # black is zero, RGB
        and tags.get(Tag.PlanarConfiguration, 1) == 1  # pixel by pixel
        and tags.get(Tag.FillOrder, 1) == 1
        and exif.get(Tag.Orientation, 1) == 1  # Pillow would rotate it, GDAL not
        and not any(0 in tags.get(tag, ()) for tag in places)  # a sparse file omits empty tiles
        and "images=" not in about  # stacks of ImageJ and tifffile, with one directory
        and '"truncated"' not in about
    )


def check_array(image: np.ndarray) -> None:
    """Raise UnreadableImage unless an array (C, H, W) is as training takes it."""
    kind = f"an array of shape {image.shape} and dtype {image.dtype}"
    if image.ndim != 3 or not image.size or image.dtype.name not in ARRAY_DTYPES:
        raise NeedsPackingError(f"{kind} is not (C, H, W) of {' or '.join(ARRAY_DTYPES)}: {PACK}")
    if image.shape[2] <= 4 < min(image.shape[:2]):
        raise NeedsPackingError(f"{kind} looks like (H, W, C): {PACK}")
    if image.dtype.kind != "f":
        return
    if (np.abs(image) > LARGEST_VALUE).any():  # infinity too
        advice = "if they are missing, declare it: `prepare.py pack --nodata=NUMBER`"
        raise UnreadableImage(f"pixels above {LARGEST_VALUE:g}: {advice}")
    if np.isnan(image).all():
        raise UnreadableImage("nodata (NaN) in all pixels")


def decode(image: Any, reduce: int = 1, box: tuple[int, ...] | None = None) -> Image.Image:
    """Decode to RGB, transparent pixels on black; a JPEG at 1/`reduce` of its size (1, 2, 4, 8).

    `box` is the part to return: (left, top, right, bottom) in pixels of that size. UnreadableImage
    if Pillow cannot decode it.
    """
    with reading():
        if reduce > 1:
            image.draft(None, (image.width // reduce, image.height // reduce))
        image.decodermaxblock = 2**20  # Pillow's default, 64 KiB at a time, decodes more slowly
        image.load()  # decodes it: otherwise a broken RGB image would raise only in the caller
        part = image.crop(box) if box else image
    if part.has_transparency_data:
        part = part.convert("RGBA")
        part = Image.alpha_composite(Image.new("RGBA", part.size, (0, 0, 0, 255)), part)
    return part.convert("RGB")


def crop_and_resize(image: AnyImage, crop: Sequence[int], side: int, exact: bool = False) -> Tensor:
    """Decode, crop to (top, left, height, width), resize to (C, side, side) uint8 or float32.

    Resizes bicubically with antialiasing, like torchvision's v2.functional.resized_crop on a
    tensor. A JPEG is decoded at the smallest scale at which its crop still covers the output: this
    is faster, changes `image`, and differs by less than 1 grey level (of 255) on average. With
    `exact` it is decoded at full size, as by torchvision.
    """
    top, left, height, width = crop
    if isinstance(image, Image.Image):
        reduce = 1
        if image.format == "JPEG" and not exact:
            for factor in (2, 4, 8):
                if min(height, width) >= factor * side:
                    reduce = factor
        edges = (left, top, left + width, top + height)
        rgb = decode(image, reduce, tuple(round(edge / reduce) for edge in edges))
        pixels = np.array(rgb)  # (H, W, C), copied
        # (C, H, W) as a view, channels last in memory: the fastest layout for interpolate
        part = torch.from_numpy(pixels).permute(2, 0, 1)
    else:  # uint16 becomes float32: few of PyTorch's kernels take uint16
        dtype = np.uint8 if image.dtype == np.uint8 else np.float32
        pixels = image[:, top : top + height, left : left + width]
        part = torch.from_numpy(pixels.astype(dtype, order="C"))
    return F.interpolate(part[None], [side, side], mode="bicubic", antialias=True)[0]
