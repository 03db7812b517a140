"""Load images: list, order across ranks, augmentation, batches, one image from file to pixels.

The order of images follows from (seed, epoch); the crop, flip and masking noise of a sample from
(seed, position), its number in the whole job. So nobody keeps any state: with one global batch,
any number of ranks and workers gives the same samples, and a run goes on from any step.
Copy this one file: `for batch in build_loader(scan("tiles"), img_size=96, ...)` needs nothing else.
Shapes: N images, B of a micro-batch (of one rank), C channels, H x W pixels, L patches of an image.
"""

import atexit
import errno
import io
import json
import math
import multiprocessing
import os
import signal
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain
from multiprocessing import forkserver, resource_tracker
from multiprocessing.pool import ThreadPool
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
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # they end a run


class ChannelStats(NamedTuple):
    """Mean and deviation of each channel: of uint8 scaled to [0, 1], of other values as stored."""

    mean: tuple[float, ...]  # C numbers
    std: tuple[float, ...]
    dtype: str = "uint8"  # of every image, one of ARRAY_DTYPES


IMAGENET = ChannelStats((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # as in the MAE recipe


class UnreadableImage(ValueError):
    """An image is broken, or not as training takes it: a loader reads another in its place."""


class NeedsPackingError(UnreadableImage):
    """Training does not take such a file, but `prepare.py pack` may convert it."""


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
    packed: bool = False
    left_out: int = 0  # files below root that are not listed

    def __len__(self) -> int:
        return len(self.table)

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

    With `include`, an image must match one of its patterns; none may match one of `exclude`.
    OSError if a folder cannot be listed; ValueError without images, or for what a pack has not.
    """
    if is_pack(root):
        if include or exclude:
            raise ValueError(f"{root} is a pack, in which none can be chosen: pack only these")
        path = os.path.join(root, "pack.index")
        try:
            return ImageList(root, np.load(path)[["name", "size", "shard", "start"]], True)
        except (ValueError, LookupError, EOFError) as error:
            raise ValueError(f"{path} is damaged ({error}): create it again") from None
    names = []
    left_out = 0
    for name in walk_files(root):
        chosen = matches(name, include) if include else True
        if chosen and name.lower().endswith(EXTENSIONS) and not matches(name, exclude):
            names.append(os.fsencode(name))
        else:
            left_out += 1
    if not names:
        text = f"no images found in {root}, of {left_out} files: looked for {' '.join(EXTENSIONS)}"
        raise ValueError(f"{text} (a pattern must match a whole name: *part* matches a part)")
    names.sort()
    table = np.zeros(len(names), [("name", f"S{max(map(len, names))}"), ("size", "i8")])
    table["name"] = names

    def size(name: bytes) -> int:
        try:
            return os.path.getsize(os.path.join(os.fsencode(root), name))
        except FileNotFoundError:  # a link to nothing
            return 0

    with ThreadPool(16) as threads:  # a parallel file system takes long for each
        table["size"] = threads.map(size, names)
    return ImageList(root, table, left_out=left_out)


def walk_files(root: str) -> Iterator[str]:
    """Yield the relative path of each visible file; follow links, but list no folder twice."""

    def fail(error: OSError) -> None:
        raise error  # a folder skipped silently would change the order of the images

    listed = set()
    for path, subfolders, files in os.walk(root, onerror=fail, followlinks=True):
        real = os.path.realpath(path)
        if real in listed:
            subfolders.clear()  # os.walk enters only what this list still holds
            continue
        listed.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        folder = os.path.relpath(path, root)
        for name in files:
            if not name.startswith("."):
                yield os.path.normpath(f"{folder}/{name}")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a relative path, or a name in it, matches a pattern with *, ? or [abc]."""
    parts = [name, *name.split("/")]
    return any(fnmatchcase(part, pattern) for part in parts for pattern in patterns)


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

    def read(self, index: int) -> np.ndarray:
        """Make a picture (C, 256, 256)."""
        generator = np.random.default_rng((self.seed, index))
        coarse = generator.integers(0, 256, (8, 8, self.channels), dtype=np.uint8)
        channels = [Image.fromarray(np.ascontiguousarray(c)) for c in np.moveaxis(coarse, 2, 0)]
        smooth = [channel.resize((256, 256), Image.Resampling.BICUBIC) for channel in channels]
        return np.stack([np.asarray(channel) for channel in smooth])


def fingerprint(files: ImageList) -> str:
    """Compute a checksum of all names and sizes."""
    checksum = zlib.crc32(files.table["name"].tobytes())
    return f"{zlib.crc32(files.table['size'].tobytes(), checksum):08x}"


def stats_file(folder: str) -> str:
    """Return where `prepare.py stats` keeps the mean and standard deviation of each channel."""
    folder = os.path.realpath(folder)
    # beside a folder, not in it: a new file in it would change the list of its files
    return os.path.join(folder, "stats.json") if is_pack(folder) else f"{folder}.stats.json"


def read_stats(path: str) -> tuple[ChannelStats, str | None]:
    """Read a file of statistics -> them, and the fingerprint of the images, if it has one."""
    try:
        with open(path, "rb") as file:
            found = json.load(file)
        both = np.array([found["mean"], found["std"]], np.float64)  # (2, C)
        usable = both.size and np.isfinite(both).all() and both[1].min() > 0
        if not usable or found["dtype"] not in ARRAY_DTYPES:
            raise ValueError("a mean, a deviation above 0 or the dtype is missing")
        mean, std = both.tolist()
        stats = ChannelStats(tuple(mean), tuple(std), found["dtype"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not as `prepare.py stats` writes it: {error!r}") from None
    return stats, found.get("images")


# --- Which rank reads which image, and when


def steps_per_epoch(image_count: int, global_batch: int) -> int:
    """Count the whole global batches in an epoch; ValueError if there is not even one."""
    if global_batch > image_count:
        most = f"the data set of {image_count} images"
        raise ValueError(f"global batch {global_batch} exceeds {most}")
    return image_count // global_batch


@lru_cache(maxsize=2)  # both at the end of an epoch
def permutation(seed: int, epoch: int, image_count: int) -> np.ndarray:
    """Return the order (N,) int64 of all images in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(image_count)


@dataclass(frozen=True)
class ImageOrder:
    """New permutations, cut to whole global batches; without `shuffle` the list again and again."""

    image_count: int
    global_batch: int
    seed: int
    shuffle: bool = True

    def image_at(self, position: int) -> int:
        """Return the index of the image that is sample number `position` of the job."""
        if not self.shuffle:
            return position % self.image_count
        samples = steps_per_epoch(self.image_count, self.global_batch) * self.global_batch
        epoch, offset = divmod(position, samples)
        return int(permutation(self.seed, epoch, self.image_count)[offset])


def step_positions(
    step: int, global_batch: int, micro_batch_size: int, world_size: int
) -> np.ndarray:
    """Deal out the positions of a step to ranks, in turn: (accumulation steps, world_size, B)."""
    positions = np.arange(step * global_batch, (step + 1) * global_batch)
    return positions.reshape(-1, world_size, micro_batch_size)


@dataclass(frozen=True)
class RankBatchSampler:
    """The positions of one rank, a micro-batch at a time."""

    global_batch: int
    micro_batch_size: int
    rank: int  # among those that read different images
    world_size: int
    steps: range

    def __iter__(self) -> Iterator[list[int]]:
        shape = (self.global_batch, self.micro_batch_size, self.world_size)
        for step in self.steps:
            yield from step_positions(step, *shape)[:, self.rank].tolist()


# --- Samples and batches


def draw_augmentation(
    seed: int, position: int, patches: int, width: int, height: int
) -> tuple[Tensor, bool, tuple[int, int, int, int]]:
    """Draw the masking noise (L,), the flip and the crop (top, left, height, width) of a sample.

    As in the MAE paper, A.1. The crop comes last: it takes more numbers for some sizes of images.
    """
    # a hash of both, so that neighbouring positions draw unrelated numbers
    sample_seed = np.random.SeedSequence((seed, position)).generate_state(1)[0]
    generator = torch.Generator().manual_seed(int(sample_seed))
    noise = torch.randperm(patches, generator=generator).float()  # the smallest stay visible
    flip = torch.rand((), generator=generator).item() < 0.5
    crop = draw_crop(generator, width, height)
    return noise, flip, crop


def draw_crop(generator: torch.Generator, width: int, height: int) -> tuple[int, int, int, int]:
    """Draw a crop (top, left, height, width) as torchvision's RandomResizedCrop(scale=(0.2, 1))."""
    limits = torch.tensor([3 / 4, 4 / 3]).log().tolist()  # in fp32, as in torchvision
    for _ in range(10):
        area = width * height * torch.empty(1).uniform_(0.2, 1.0, generator=generator).item()
        aspect = torch.empty(1).uniform_(*limits, generator=generator).exp().item()
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


class MicroBatch(NamedTuple):
    """The samples of one rank in one accumulation step; or one sample, without the axis B."""

    image: Tensor  # (B, C, H, W) uint8; float32 if the images are uint16 or float32
    noise: Tensor  # (B, L) float32, masking noise: random permutations of 0 .. L-1
    image_ids: list[int]  # B indices in the data set
    bad: list[tuple[int, str]]  # (image_id, reason): unreadable images that these replace


@dataclass(eq=False)
class Images(Dataset[Any]):  # Any: mypy takes a Dataset's items for those of its DataLoader
    """Load a sample by its position in the job; for `exact` see `crop_and_resize`.

    Without `augment` an image is its centre, never flipped; a sample that stands in for another
    image, or is beyond the last, has the image_id -1.
    """

    files: ImageSource
    order: ImageOrder
    img_size: int
    patches: int
    exact: bool = False  # see crop_and_resize
    stats: ChannelStats = IMAGENET  # an image whose channels or dtype differ counts as unreadable
    augment: bool = True

    def __getitem__(self, position: int) -> MicroBatch:
        """Load an image, or else the next readable one in the order, by the same random numbers.

        OSError after MAX_UNREADABLE_IN_A_ROW unreadable images, or if a file system fails.
        """
        bad: list[tuple[int, str]] = []
        while len(bad) < MAX_UNREADABLE_IN_A_ROW:
            index = self.order.image_at(position + len(bad))
            try:
                image, noise = self.load(position, index)
            except UnreadableImage as error:
                bad.append((index, str(error)))
                continue
            own = self.augment or index == position
            return MicroBatch(image, noise, [index if own else -1], bad)
        last = f"{self.files.path(index)} ({bad[-1][1]})"
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
        given = (self.order.seed, position, self.patches)
        noise, flip, crop = draw_augmentation(*given, width, height)
        if not self.augment:
            # As ImageNet's evaluations: the shorter side becomes 256 pixels, and 224 are cut out.
            side = max(1, round(min(width, height) * 224 / 256))
            crop = ((height - side) // 2, (width - side) // 2, side, side)
            flip = False
        # decoding what the source has opened at a smaller scale would change its object
        exact = self.exact or not isinstance(content, bytes)
        pixels = crop_and_resize(image, crop, self.img_size, exact)
        return pixels.flip(-1) if flip else pixels, noise


def collate(samples: Sequence[MicroBatch]) -> MicroBatch:
    """Stack samples into a batch; in a worker, default_collate stacks directly in shared memory."""
    images, noises, ids, bad = zip(*samples, strict=True)
    image = default_collate(list(images))
    return MicroBatch(image, default_collate(list(noises)), [*chain(*ids)], [*chain(*bad)])


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

    A batch that takes longer than `timeout` seconds (0: any time) raises RuntimeError. Without
    `augment`, steps = range(ceil(N / global_batch)) covers all images; leave out image_ids of -1.
    """
    order = ImageOrder(len(files), global_batch, seed, shuffle=augment)
    return DataLoader(
        Images(files, order, img_size, patches, exact, stats, augment),
        batch_sampler=RankBatchSampler(global_batch, micro_batch_size, rank, world_size, steps),
        num_workers=workers,
        collate_fn=collate,
        multiprocessing_context=fork_server() if workers else None,
        worker_init_fn=end_with_parent,
        generator=torch.Generator(),  # otherwise an iterator changes PyTorch's global one
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

    Forked from this process, a worker would inherit its devices and locks. The server and its
    workers block STOP_SIGNALS: a launcher sends them to all, but only this process may act on them.
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
    """Let this worker end when the process that reads from it does, however that ends."""

    def watch() -> None:  # PyTorch watches the fork server, which lives as long as its workers
        parent: Any = multiprocessing.parent_process()
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# --- One image: from a file or array to pixels
# A tree holds pictures that Pillow shows completely as 8-bit RGB, and .npy files (C, H, W). Any
# other raster (more bands, bits or pages, JPEG 2000) is refused: `prepare.py pack` makes arrays.

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF")  # as Pillow names them
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")  # Pillow's, of 8 bits
TIFF_COMPRESSIONS = ("raw", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "packbits")
STACKS = ("images=", '"truncated"')  # of ImageJ and tifffile: one directory for all pages
ENDS = (b"\xff\xd9", b"IEND\xaeB`\x82")  # how a complete JPEG and a complete PNG end
LARGEST_VALUE = 1e30  # a larger magnitude must be a nodata value that nobody declared
PACK = "convert it with `prepare.py pack`"


def is_file_error(error: OSError) -> bool:
    """Tell whether an OSError is about one file; others, as EIO, may be of this node alone."""
    about_a_file = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.EISDIR)
    return error.errno is None or error.errno in about_a_file


@contextmanager
def reading() -> Iterator[None]:
    """Turn what Pillow and numpy raise into UnreadableImage: put only calls of theirs inside."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = 2**29  # for large scenes; Pillow refuses twice as many
    try:
        yield
    except UnidentifiedImageError:
        raise NeedsPackingError(f"not one of {FORMATS}: if it is a raster, {PACK}") from None
    except (NameError, AttributeError, ImportError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and not is_file_error(error):
            raise
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def open_image(
    content: bytes | AnyImage, stats: ChannelStats | None = None
) -> tuple[AnyImage, tuple[int, int]]:
    """Open what `ImageSource.read` returned; return the image, not decoded, and (width, height).

    NaN in an array means nodata, which `stats` replaces by the channel's mean. UnreadableImage if
    the image is damaged, or unlike `stats`; NeedsPackingError if it must be packed first.
    """
    image: Any = content
    if isinstance(content, bytes) and content.startswith(b"\x93NUMPY"):
        with reading():
            image = np.load(io.BytesIO(content), allow_pickle=False)
    elif isinstance(content, bytes):
        image = open_picture(content)
    channels = 3
    dtype = "uint8"
    if isinstance(image, np.ndarray):
        check_array(image)
        channels = len(image)
        dtype = image.dtype.name
    size = image.size if isinstance(image, Image.Image) else image.shape[:0:-1]
    if stats and (channels, dtype) != (len(stats.mean), stats.dtype):
        wanted = f"{len(stats.mean)} of {stats.dtype}: see `prepare.py stats`"
        raise UnreadableImage(f"{channels} channels of {dtype}, not {wanted}")
    if stats and dtype == "float32":
        mean = np.array(stats.mean, np.float32)[:, None, None]
        image = np.where(np.isnan(image), mean, image)
    return image, size


def open_picture(content: bytes) -> Image.Image:
    """Open a picture with Pillow, without decoding it; NeedsPackingError for anything more."""
    with reading():
        # Only these formats: Pillow also takes the start of any HDF5 or GRIB file for an image.
        image: Any = Image.open(io.BytesIO(content), formats=FORMATS)
        turned = image.getexif().get(Tag.Orientation, 1) != 1
    plain = image.mode in MODES
    if image.format == "PNG":
        # its bits: Pillow shows 8 of 16, and misses a transparent colour of 2 or 4
        plain = plain and (content[24] in (1, 8) or image.mode == "P")
    elif image.format == "TIFF":
        plain = not turned and is_plain_tiff(image)  # Pillow would turn it, GDAL not
    if not plain:
        raise NeedsPackingError(f"{image.format} that is not one page of 8-bit RGB or grey: {PACK}")
    # An interrupted copy ends in zeros. Pillow would show what is missing as grey or black.
    zeros = image.format in ("JPEG", "MPO", "PNG") and content.endswith(b"\0")
    if zeros and not content.rstrip(b"\0").endswith(ENDS):
        raise UnreadableImage(f"truncated: zeros where the end of the {image.format} should be")
    return image


def is_plain_tiff(image: Any) -> bool:
    """Tell whether an opened TIFF is one page of 8-bit grey or RGB, which all readers show."""
    tags = image.tag_v2
    places = (Tag.StripOffsets, Tag.StripByteCounts, Tag.TileOffsets, Tag.TileByteCounts)
    about = str(tags.get(Tag.ImageDescription, ""))
    return (
        image.mode in ("L", "RGB")
        and image.info.get("compression") in TIFF_COMPRESSIONS
        and tags.next == 0  # no second page, overview or mask
        and tags.get(Tag.SamplesPerPixel, 1) == len(image.getbands())
        and set(tags.get(Tag.BitsPerSample, ())) == {8}
        and set(tags.get(Tag.SampleFormat, (1,))) == {1}  # unsigned
        and tags.get(Tag.PhotometricInterpretation) in (1, 2)  # black is zero, RGB
        and tags.get(Tag.PlanarConfiguration, 1) == 1  # pixel by pixel
        and tags.get(Tag.FillOrder, 1) == 1
        and not any(0 in tags.get(tag, ()) for tag in places)  # a sparse file omits empty tiles
        and not any(word in about for word in STACKS)
    )


def check_array(image: np.ndarray) -> None:
    """Raise UnreadableImage unless an array (C, H, W) is as training takes it."""
    kind = f"an array of shape {image.shape} and dtype {image.dtype}"
    channels_last = image.ndim == 3 and image.shape[2] <= 4 < min(image.shape[:2])
    if channels_last or image.ndim != 3 or not image.size or image.dtype.name not in ARRAY_DTYPES:
        raise NeedsPackingError(f"{kind} is not (C, H, W) of {' or '.join(ARRAY_DTYPES)}: {PACK}")
    if image.dtype.kind == "f":
        largest = np.abs(image[~np.isnan(image)]).max(initial=0)
        if largest > LARGEST_VALUE or np.isnan(image).all():
            raise UnreadableImage(f"only NaN, or above {LARGEST_VALUE:g}: see pack --nodata=NUMBER")


def decode(image: Any, reduce: int = 1, box: tuple[int, ...] | None = None) -> Image.Image:
    """Decode to RGB, transparent as black, a JPEG at 1/`reduce` of its size; cut to `box`."""
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

    Like torchvision's v2.functional.resized_crop, bicubically. Unless `exact`, a JPEG is decoded at
    the smallest scale at which the crop covers the output: faster, within 1 grey level on average.
    """
    top, left, height, width = crop
    if isinstance(image, Image.Image):
        factors = () if exact or image.format != "JPEG" else (2, 4, 8)
        reduce = max([1, *(f for f in factors if min(height, width) >= f * side)])
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
