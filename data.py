"""Load images: file listing, assignment to ranks, crops, batches, decoding.

The order of images follows from (seed, epoch); the crop, flip and masking noise of a sample follow
from (seed, position), where `position` is its number in the whole job, from 0. So no rank, worker
or sampler keeps any state: the step number says where a run is, and with the same global batch any
number of ranks and workers gives the same images, crops, flips and masks.
Copy this one file: `for batch in build_loader(scan("tiles"), img_size=96, ...)` needs nothing else.
A micro-batch is the images of one rank in one accumulation step. Shapes: B images of a micro-batch,
C channels, H x W pixels, L patches of an image.

Importing this file changes four settings of the process: `Image.MAX_IMAGE_PIXELS` of Pillow is
raised to 2**29 and `ImageFile.MAXBLOCK` to 2**20, Pillow's TIFF logging is switched off, and
PyTorch's warning that an array is not writable is ignored.
"""

import errno
import io
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError
from PIL.ExifTags import Base as Tag
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

EXTENSIONS = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".jp2", ".j2k", ".npy")
FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "WEBP", "JPEG2000")  # as Pillow names them
ARRAY_DTYPES = ("uint8", "uint16", "float32")
LARGEST_IMAGE = 2**32  # one decoded image may take at most this many bytes
# A larger magnitude can only be a nodata value that was not declared: the image is refused.
LARGEST_MEASUREMENT = 1e30
NUMPY_START = b"\x93NUMPY"
BIG_TIFF_STARTS = (b"II+\0", b"MM\0+")  # how BigTIFF files start, in either byte order
TIFF_STARTS = (b"II*\0", b"MM\0*", *BIG_TIFF_STARTS)
JPEG2000_STARTS = (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")  # of .jp2 and .j2k
PREFETCH = 2  # batches that each worker of a loader may read ahead
# This many unreadable images in a row end the run: the folder must be gone. Chance almost never
# makes a row this long, even if half of the images are unreadable and --max-bad allows that.
MAX_UNREADABLE_IN_A_ROW = 256
# Logarithms of the limits of width / height; computed in fp32, as in torchvision.
LOG_ASPECT_LIMITS = torch.tensor([3 / 4, 4 / 3]).log().tolist()
AnyImage = Image.Image | np.ndarray  # an array is (C, H, W), with a dtype in ARRAY_DTYPES
# Pillow refuses an image of more than twice MAX_IMAGE_PIXELS. As RGBA, 2 * 2**29 pixels take
# LARGEST_IMAGE bytes.
Image.MAX_IMAGE_PIXELS = 2**29
ImageFile.MAXBLOCK = 2**20  # Pillow's default, 64 KiB at a time, decodes more slowly
TiffImagePlugin.logger.setLevel("CRITICAL")  # it would print what `open_image` raises anyway
warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it


class ChannelStats(NamedTuple):
    """Mean and standard deviation of each channel of a data set.

    uint8 values are first scaled to [0, 1]; uint16 and float32 values are taken as stored.
    """

    mean: tuple[float, ...]  # C numbers
    std: tuple[float, ...]
    dtype: str = "uint8"  # the dtype of every image, one of ARRAY_DTYPES


IMAGENET = ChannelStats((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # as in the MAE recipe

# --- Finding the image files


class ImageSource(Protocol):
    """What a loader needs from a data set: use `ImageFolder` or a class of your own."""

    def __len__(self) -> int: ...
    def path(self, index: int) -> str: ...  # a name for messages
    # the bytes of a file, or an image that is open already; raises OSError if it cannot be read
    def read(self, index: int) -> bytes | AnyImage: ...


@dataclass(frozen=True)
class ImageFolder:
    """An ImageSource: the images below one folder, sorted by the bytes of their relative paths."""

    root: str
    names: list[str]  # paths relative to root
    labels: list[int]  # indices into classes; -1 for an image directly in root
    classes: tuple[str, ...]
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> number of files

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])

    def read(self, index: int) -> bytes:
        with open(self.path(index), "rb", buffering=0) as file:
            return file.read()


def scan(
    root: str,
    progress: Callable[[int], None] | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> ImageFolder:
    """List the images below `root`: a class tree of any depth, a flat folder, or a mixture.

    Skips hidden files and folders; follows symbolic links, but lists no folder twice. If `include`
    is given, lists only images that match one of its patterns; never lists one that matches a
    pattern of `exclude` (see `matches`). Calls `progress(count)` after each image. OSError if a
    folder cannot be listed, ValueError if there is no image.
    """
    names: list[str] = []
    # Also report a pattern that excluded nothing, with a count of 0: it may be misspelt.
    left_out = Counter({f"excluded by {pattern}": 0 for pattern in exclude})
    for name in walk_files(root):
        reason = reason_to_leave_out(name, include, exclude)
        if reason:
            left_out[reason] += 1
            continue
        names.append(name)
        if progress:
            progress(len(names))
    if not names:
        message = f"no images found in {root}: looked for {' '.join(EXTENSIONS)}"
        if left_out:
            message += f"; left out {describe_counts(left_out)}"
        if include:
            message += ". A pattern must match a whole file or folder name:"
            message += " write *part* to match every name that contains part"
        raise ValueError(message)
    names.sort(key=os.fsencode)  # the same order in every locale
    labels, classes = classes_by_folder(names)
    return ImageFolder(root, names, labels, classes, dict(left_out))


def walk_files(root: str) -> Iterator[str]:
    """Yield the path of each visible file, relative to `root`; OSError for an unreadable folder."""

    def fail(error: OSError) -> None:
        raise error  # a folder skipped silently would change class numbers and image order

    listed = set()
    # Treat the folders above `root` as listed, so that a link to one of them lists nothing.
    for folder in Path(root).resolve().parents:
        info = os.stat(folder)
        listed.add((info.st_ino, info.st_dev))
    for path, subfolders, files in os.walk(root, onerror=fail, followlinks=True):
        info = os.stat(path)
        key = (info.st_ino, info.st_dev)
        if key in listed:
            subfolders.clear()  # os.walk enters only what this list still holds
            continue
        listed.add(key)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in files:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(path, name), root)


def reason_to_leave_out(name: str, include: Sequence[str], exclude: Sequence[str]) -> str | None:
    """Return why the file with this relative path is left out, or None if it is to be listed."""
    if not name.lower().endswith(EXTENSIONS):
        _, ending = os.path.splitext(name)
        return f"with the extension {ending.lower()}" if ending else "without an extension"
    if include and not any(matches(name, pattern) for pattern in include):
        return f"not included by {' or '.join(include)}"
    for pattern in exclude:
        if matches(name, pattern):
            return f"excluded by {pattern}"
    return None


def matches(name: str, pattern: str) -> bool:
    """Tell whether a relative path matches a pattern, which may contain *, ? and [abc].

    A pattern without a slash is compared with the file's name and with each folder's name. A
    pattern with a slash is compared with the whole path; its * matches slashes too.
    """
    if "/" in pattern:
        return fnmatchcase(name, pattern)
    return any(fnmatchcase(part, pattern) for part in name.split("/"))


def describe_counts(counts: dict[str, int]) -> str:
    """List counts, the largest first: `8 with the extension .xml, 2 excluded by masks`."""
    return ", ".join(f"{count} {what}" for what, count in Counter(counts).most_common())


def classes_by_folder(names: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """Derive the classes of images from their relative paths; return labels and class names.

    An image's class is the name of its folder; folders with the same name form one class. If there
    are several folders, all with one name (CLASS/images/x.jpg), those above name the classes. A
    label is an index into the class names, or -1 for an image directly in the root.
    """
    folders = [os.path.dirname(name) for name in names]
    # each folder of images -> the folder that names its class: itself, or one above it
    class_folder = {folder: folder for folder in folders if folder}
    # While there are several class folders, and all have the same name, move each up one level,
    # unless one of them would then be the root.
    while True:
        several = len(set(class_folder.values())) > 1
        same_name = len({os.path.basename(path) for path in class_folder.values()}) == 1
        parents = {folder: os.path.dirname(path) for folder, path in class_folder.items()}
        one_in_root = "" in parents.values()
        if several and same_name and not one_in_root:
            class_folder = parents
        else:
            break
    class_name = {folder: os.path.basename(path) for folder, path in class_folder.items()}
    classes = tuple(sorted(set(class_name.values())))
    number = {name: i for i, name in enumerate(classes)}
    label_of = {folder: number[name] for folder, name in class_name.items()}
    label_of[""] = -1  # directly in the root
    labels = [label_of[folder] for folder in folders]
    return labels, classes


# --- Which rank reads which image, and when


def steps_per_epoch(image_count: int, global_batch: int) -> int:
    """Count the whole global batches in an epoch; ValueError if there is not even one."""
    if global_batch > image_count:
        raise ValueError(
            f"global batch {global_batch} exceeds the data set of {image_count} images"
        )
    return image_count // global_batch


class ImageOrder:
    """The order of images: every epoch is a new permutation, cut to whole global batches."""

    def __init__(self, image_count: int, global_batch: int, seed: int) -> None:
        self.image_count = image_count
        self.seed = seed
        self.epoch_samples = steps_per_epoch(image_count, global_batch) * global_batch
        # caches one epoch's permutation; results do not depend on the order of calls
        self.epoch = -1
        self.permutation = np.empty(0, np.int64)

    def image_at(self, position: int) -> int:
        """Return the index of the image that is sample number `position` of the job."""
        epoch, offset = divmod(position, self.epoch_samples)
        if epoch != self.epoch:
            generator = np.random.default_rng((self.seed, epoch))
            self.permutation = generator.permutation(self.image_count)
            self.epoch = epoch
        return int(self.permutation[offset])


def step_positions(
    step: int, global_batch: int, micro_batch_size: int, world_size: int
) -> np.ndarray:
    """Assign the positions of one step to ranks; return (accumulation steps, world_size, B) int64.

    The ranks take one micro-batch each, in rank order; then one more each for every further
    accumulation step. Steps count from 0. Without accumulation, rank 3 reads the B positions that
    start at step * global_batch + 3 * B, whatever the number of ranks in earlier steps. All ranks
    together read each position once, in every sharding mode: a hybrid group shards parameters,
    never the batch.
    """
    positions = np.arange(step * global_batch, (step + 1) * global_batch)
    return positions.reshape(-1, world_size, micro_batch_size)


@dataclass(frozen=True)
class RankBatchSampler:
    """The micro-batches of one rank, as lists of (position, image index)."""

    order: ImageOrder
    global_batch: int
    micro_batch_size: int
    # data-parallel rank: the ranks of a tensor-parallel group share one, and read the same images
    rank: int
    world_size: int  # number of data-parallel ranks
    steps: range

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self.steps:
            all_positions = step_positions(
                step, self.global_batch, self.micro_batch_size, self.world_size
            )
            own_positions = all_positions[:, self.rank]  # (accumulation steps, B)
            for positions in own_positions.tolist():
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

    It covers 20% to 100% of the area, unless ten draws fail to fit (see below); its aspect ratio
    (width : height) is from 3:4 to 4:3.
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


class Sample(NamedTuple):
    """One training sample: an image after crop, resize and flip."""

    image: Tensor  # (C, H, W) uint8; float32 if the images are uint16 or float32
    noise: Tensor  # (L,) float32, masking noise: a random permutation of 0 .. L-1
    image_id: int  # index in the data set
    bad: list[tuple[int, str]]  # (image_id, reason): unreadable images that it replaces


class MicroBatch(NamedTuple):
    """The samples of one rank in one accumulation step."""

    image: Tensor  # (B, C, H, W) uint8; float32 if the images are uint16 or float32
    noise: Tensor  # (B, L) float32, masking noise: random permutations of 0 .. L-1
    image_ids: list[int]  # B indices in the data set
    bad: list[tuple[int, str]]  # (image_id, reason): unreadable images that these replace


@dataclass(eq=False)
class Images(Dataset[Any]):  # Any: mypy takes a Dataset's items for those of its DataLoader
    """Load a `Sample` by its (position, image index); for `exact` see `crop_and_resize`."""

    files: ImageSource
    order: ImageOrder
    img_size: int
    patches: int
    exact: bool = False
    stats: ChannelStats = IMAGENET  # an image whose channels or dtype differ counts as unreadable

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        """Load an image; if it is unreadable, load the next one in the order instead.

        The replacement gets the same noise and flip, and its crop is drawn from the same random
        numbers. The sample's field `bad` lists the images that it replaces; the trainer's
        runtime/log.py (BadImageLog) lists them in OUT/bad_images.csv. OSError after
        MAX_UNREADABLE_IN_A_ROW unreadable images; errors that are not the file's fault are passed
        on.
        """
        position, index = key
        bad: list[tuple[int, str]] = []
        while len(bad) < MAX_UNREADABLE_IN_A_ROW:
            try:
                image, noise = self.load(position, index)
                return Sample(image, noise, index, bad)
            except Exception as error:  # Pillow raises exceptions of many types
                if not is_file_error(error):
                    raise
                bad.append((index, describe_file_error(error)))
            index = self.order.image_at(position + len(bad))
        last_index, reason = bad[-1]
        last = f"{self.files.path(last_index)} ({reason})"
        raise OSError(f"{len(bad)} images in a row could not be read, the last: {last}")

    def load(self, position: int, index: int) -> tuple[Tensor, Tensor]:
        """Load one image as sample number `position`; return pixels and noise, as in `Sample`.

        Errors from reading and decoding are passed on.
        """
        content = self.files.read(index)
        image, size = open_image(content, self.stats)
        noise, flip, crop = draw_augmentation(self.order.seed, position, self.patches, *size)
        # An image that the source itself has opened is decoded at full size: decoding it smaller,
        # with Pillow's draft(), would change the source's own object.
        exact = self.exact or not isinstance(content, bytes)
        pixels = crop_and_resize(image, crop, self.img_size, exact)
        if flip:
            pixels = pixels.flip(-1)
        return pixels, noise


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Stack samples into a batch; in a worker, default_collate stacks directly in shared memory."""
    return MicroBatch(
        image=default_collate([sample.image for sample in samples]),
        noise=default_collate([sample.noise for sample in samples]),
        image_ids=[sample.image_id for sample in samples],
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
    exact: bool = False,
    stats: ChannelStats = IMAGENET,
) -> DataLoader[MicroBatch]:
    """Make one rank's DataLoader, which yields that rank's micro-batches for each step in `steps`.

    One iterator covers all steps, so workers start once, not once per epoch. Images must have the
    channels and dtype of `stats`. ValueError if the global batch is larger than the data set.
    """
    order = ImageOrder(len(files), global_batch, seed)
    return DataLoader(
        Images(files, order, img_size, patches, exact, stats),
        batch_sampler=RankBatchSampler(
            order, global_batch, micro_batch_size, rank, world_size, steps
        ),
        num_workers=workers,
        collate_fn=collate,
        # A forked worker would inherit this process's open devices, and locks held by threads that
        # do not exist in the worker. A worker started by the fork server inherits only what the
        # server has imported.
        multiprocessing_context="forkserver" if workers else None,
        # without it each new iterator would draw from, and so change, PyTorch's global generator
        generator=torch.Generator(),
        pin_memory=pin_memory,
        prefetch_factor=PREFETCH if workers else None,
    )


def normalize(images: Tensor, stats: ChannelStats = IMAGENET) -> Tensor:
    """Normalise images (B, C, H, W) to float32; ValueError unless `stats` has C channels."""
    # a copy in both cases: it is normalised in place
    x = images.float() / 255 if images.dtype == torch.uint8 else images.clone()
    for channel, mean, std in zip(x.unbind(1), stats.mean, stats.std, strict=True):
        # Python numbers: copying a tensor of them to a GPU would make the host wait
        channel.sub_(mean).div_(std)
    return x


# --- One image: from a file or array to pixels
#
# A *picture* is what 8-bit RGB can show: a photo, a JPEG, a PNG (16 bits are reduced to 8).
# Any other raster (more bands, more bits, several pages) must be an *array* (C, H, W): a .npy file,
# or the output of `prepare.py pack`.


class NeedsPackingError(ValueError):
    """Training cannot read the file as it is, but `prepare.py pack` may be able to convert it."""


# Pillow's modes of 8-bit pictures: each becomes RGB, with alpha composited onto black
PICTURE_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
UNSIGNED = 1  # a value of TIFF's tag SampleFormat
BAND_BY_BAND = 2  # a value of TIFF's tag PlanarConfiguration
WHITE_IS_ZERO = 0  # a value of TIFF's tag PhotometricInterpretation
# Bits of TIFF's tag NewSubfileType: the page is an overview (1) or a mask (4) of another page.
REDUCED_OR_MASK = 1 | 4
START_OF_SCAN = b"\xff\xda"  # these two are markers in a JPEG (ITU-T T.81, B.1)
END_OF_IMAGE = b"\xff\xd9"
END_OF_PNG = b"IEND\xaeB`\x82"  # the name and the checksum of its last chunk
# numpy's kinds of dtypes that hold real numbers: bool, signed, unsigned and floating-point
REAL_KINDS = "biuf"
# These two are advice that error messages end with.
TO_GEOTIFF = "convert it to GeoTIFF (gdal_translate)"
NODATA_ADVICE = "if this value marks missing pixels, declare it: `prepare.py pack --nodata=NUMBER`"


def is_file_error(error: Exception) -> bool:
    """Tell whether an error is the file's fault: it is missing, forbidden, or cannot be decoded.

    Other errors of the operating system (such as EIO), a lack of memory and a missing module come
    from this node: other ranks might not see them. Everything else counts as the file's fault,
    because decoders raise many types.
    """
    # When the host runs out of memory, PyTorch raises a RuntimeError that names its allocator.
    if isinstance(error, (MemoryError, ImportError)) or "DefaultCPUAllocator" in str(error):
        return False
    number = getattr(error, "errno", None)
    if number is None:  # raised while decoding, by Pillow, numpy or this file
        return True
    return number in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP)


def describe_file_error(error: Exception) -> str:
    """Say in one line why a file is unreadable."""
    return f"{type(error).__name__}: {error}"


def open_image(
    content: bytes | AnyImage, stats: ChannelStats | None = None
) -> tuple[AnyImage, tuple[int, int]]:
    """Open what `ImageSource.read` returned; return the image, not decoded, and (width, height).

    NaN in an array means nodata; if `stats` is given, NaN is replaced by the channel's mean.
    ValueError, or an error from Pillow or NumPy, if the image is damaged or too large, or if its
    channels or dtype differ from those of `stats`. NeedsPackingError if it must be packed first.
    """
    image: AnyImage
    if not isinstance(content, bytes):
        image = content
    elif content.startswith(NUMPY_START):
        image = open_array(content)
    else:
        image = open_picture(content)
    if isinstance(image, np.ndarray):
        check_array(image)
        channels, height, width = image.shape
        size = (width, height)
        dtype = image.dtype.name
    else:
        check_picture(image)
        channels = 3
        size = image.size
        dtype = "uint8"
    if stats is None:
        return image, size
    wanted = len(stats.mean)
    if (channels, dtype) != (wanted, stats.dtype):
        kind = f"{channels} channels of {dtype}, not {wanted} of {stats.dtype}"
        raise ValueError(f"{kind}: see `prepare.py stats`")
    if isinstance(image, np.ndarray) and dtype == "float32":
        image = fill_nodata(image, stats)
    return image, size


def open_picture(content: bytes) -> Image.Image:
    """Open a file with Pillow, without decoding it; ValueError if truncated or not an image."""
    try:
        # Only these formats: Pillow also takes the start of any HDF5 or GRIB file for an image.
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:  # its message names only an object in memory
        if content.startswith(TIFF_STARTS):
            raise NeedsPackingError(
                "TIFF that Pillow cannot open: unless it is damaged, try `prepare.py pack`"
            ) from None
        if content.startswith(JPEG2000_STARTS):
            raise ValueError(
                f"JPEG 2000 that Pillow cannot open: unless it is damaged, {TO_GEOTIFF}"
            ) from None
        raise ValueError(f"Pillow cannot open it as {', '.join(FORMATS)}") from None
    check_end(content, image.format)
    if image.format == "JPEG2000" and image.mode in ("P", "PA"):
        raise ValueError(f"JPEG 2000 with a palette, whose colours Pillow mixes up: {TO_GEOTIFF}")
    if image.format == "PNG":
        bit_depth = content[24]  # its place in the header (PNG, 11.2.1)
        check_transparent_colour(image, bit_depth)
    return image


def check_end(content: bytes, kind: str | None) -> None:
    """Raise ValueError if zeros stand where the end of a JPEG or PNG should be.

    An interrupted copy leaves zeros at the end of the file. Pillow would decode the missing rest as
    grey or black, without an error. WebP is not checked: a complete file may end in zeros too.
    """
    if not content.endswith(b"\0"):
        return
    complete = True
    # Pillow calls a JPEG file that holds several pictures MPO, although FORMATS does not list it.
    if kind in ("JPEG", "MPO"):
        # In a complete JPEG the end-of-image marker comes after the last start-of-scan marker.
        complete = content.rfind(END_OF_IMAGE) > content.rfind(START_OF_SCAN)
    elif kind == "PNG":
        complete = END_OF_PNG in content
    if not complete:
        raise ValueError(f"truncated: zeros where the end of the {kind} should be")


def check_transparent_colour(image: Image.Image, bit_depth: int) -> None:
    """Raise ValueError if a PNG marks a colour as transparent with a value that Pillow misreads.

    Pillow scales pixels of 2, 4 and 16 bits to 8, but not that value. Black is 0 at any depth.
    """
    colour = image.info.get("transparency")
    if colour is None or image.mode == "P":  # a palette's colours have alpha values instead
        return
    black = colour in (0, (0, 0, 0))  # in grey or RGB
    if bit_depth in (2, 4, 16) and not black:
        raise ValueError(f"{bit_depth}-bit PNG with a transparent colour: {TO_GEOTIFF}")


def open_array(content: bytes) -> np.ndarray:
    """Return the array in a .npy file, without copying it; ValueError if it is damaged."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(file)
    count = math.prod(shape)
    if count * dtype.itemsize > LARGEST_IMAGE:
        raise ValueError(f"an array of shape {shape} and dtype {dtype} is larger than 4 GiB")
    # frombuffer raises ValueError for an array of objects and for a file that is too short.
    start = file.tell()  # just past the header, which has been read
    values = np.frombuffer(content, dtype, count, start)
    return values.reshape(shape, order="F" if fortran_order else "C")


def check_array(image: np.ndarray) -> None:
    """Raise ValueError unless an array has shape (C, H, W), an allowed dtype and valid pixels."""
    if image.ndim != 3 or not image.size or image.dtype.name not in ARRAY_DTYPES:
        raise ValueError(describe_wrong_array(image))
    check_shape(image.shape)
    if image.dtype.kind == "f":
        check_pixels(image)


def check_shape(shape: tuple[int, ...]) -> None:
    """Raise ValueError if the shape of an array looks like (H, W, C) rather than (C, H, W)."""
    first, second, last = shape  # (C, H, W), unless the last axis holds the bands
    # No image is only 4 pixels wide: these are bands, which `prepare.py pack` moves to the front.
    if last <= 4 and min(first, second) > 4:
        raise NeedsPackingError(f"{shape} looks like (H, W, C): convert it with `prepare.py pack`")
    # A last axis that is this much shorter than the others probably holds bands, not columns. Only
    # the user can tell, so `pack` does not move a last axis that is longer than 4.
    if 3 * last <= min(first, second):
        raise ValueError(f"{shape} looks like (H, W, C): save it as (C, H, W)")


def check_pixels(channels: Iterable[np.ndarray]) -> None:
    """Raise ValueError if a pixel is infinite or above LARGEST_MEASUREMENT, or if all are NaN.

    Each of the `channels` is (H, W).
    """
    only_nodata = True
    for channel in channels:
        largest = np.fmax.reduce(np.abs(channel), axis=None)  # NaN only if all are NaN
        if np.isinf(largest):
            raise ValueError("some pixels are infinite")
        if largest > LARGEST_MEASUREMENT:
            pixel = channel[np.abs(channel) == largest][0]  # with its sign
            raise ValueError(f"pixels with the value {pixel:.8g}: {NODATA_ADVICE}")
        if not np.isnan(largest):
            only_nodata = False
    if only_nodata:
        raise ValueError("nodata (NaN) in all pixels")


def describe_wrong_array(image: np.ndarray) -> str:
    """Say how an array differs from the (C, H, W) that training takes, and what to do."""
    kind = f"an array of shape {image.shape} and dtype {image.dtype}"
    if image.dtype.kind not in REAL_KINDS:
        return f"{kind} holds no real numbers: save it as one of {ARRAY_DTYPES}"
    if image.ndim not in (2, 3) or not image.size:
        return f"{kind} is not one image: save each image as (C, H, W) in a file of its own"
    dtypes = " or ".join(ARRAY_DTYPES)
    return f"{kind} is not (C, H, W) of dtype {dtypes}: `prepare.py pack` converts it"


def fill_nodata(image: np.ndarray, stats: ChannelStats) -> np.ndarray:
    """Return a float32 array (C, H, W) with each NaN replaced by its channel's mean."""
    missing = np.isnan(image)
    if not missing.any():
        return image
    mean = np.array(stats.mean, np.float32)[:, None, None]
    return np.where(missing, mean, image)


def check_picture(image: Image.Image) -> None:
    """Raise NeedsPackingError if an opened TIFF or JPEG 2000 holds more than 8-bit RGB can.

    Makes Pillow decode a TIFF without rotating it.
    """
    found = None
    # an unpickled image still says "TIFF", but has no tags
    if image.format == "TIFF" and getattr(image, "tag_v2", None):
        found = describe_tiff(image)
        if not found:
            ignore_orientation(image)
    elif image.format == "JPEG2000":
        found = describe_jpeg2000(image)
    if found:
        raise NeedsPackingError(f"{found} is not an RGB picture: convert it with `prepare.py pack`")


def ignore_orientation(image: Any) -> None:
    """Keep Pillow from rotating a TIFF while decoding: GDAL and tifffile do not rotate it."""
    if image.fp is None:  # already decoded, by whoever opened the image
        return
    # Pillow's load() rotates the image according to the orientation in getexif(), which it has
    # read from the tags or from XMP.
    image.getexif().pop(Tag.Orientation, None)
    # If the orientation is in the tags, Pillow has already swapped width and height.
    if Tag.Orientation in image.tag_v2:
        image._size = (image.tag_v2[Tag.ImageWidth], image.tag_v2[Tag.ImageLength])


def describe_tiff(image: Any) -> str | None:
    """Describe an opened TIFF that holds more than a picture; None if it is a picture."""
    tags = image.tag_v2
    samples = tags.get(Tag.SamplesPerPixel, 1)
    bits = max(tags.get(Tag.BitsPerSample, (1,)))
    if set(tags.get(Tag.SampleFormat, (UNSIGNED,))) != {UNSIGNED}:
        return f"TIFF with {samples} bands of signed, floating-point or complex numbers"
    if Tag.PhotometricInterpretation not in tags:  # Pillow would show 0 as white, GDAL as black
        return "TIFF without PhotometricInterpretation"
    all_shown = image.mode in PICTURE_MODES and samples == len(image.getbands())
    if bits > 8 or not all_shown:
        return f"TIFF with {samples} bands of {bits} bits"
    # Old programs write 8 bits where the standard asks for 16: Pillow would show black.
    if image.mode == "P" and 0 < max(tags[Tag.ColorMap]) < 256:
        return "TIFF with a palette of 8-bit, not 16-bit, colours"
    # Of bands stored one after another Pillow decodes some kinds wrongly: with alpha, of less than
    # 8 bits, or inverted.
    shows_bands = (
        bits == 8
        and image.mode in ("L", "P", "RGB")
        and tags.get(Tag.FillOrder, 1) == 1
        and tags.get(Tag.PhotometricInterpretation) != WHITE_IS_ZERO
    )
    if tags.get(Tag.PlanarConfiguration, 1) == BAND_BY_BAND and not shows_bands:
        return f"TIFF with {samples} bands of {bits} bits, stored band by band,"
    offsets_and_sizes = (Tag.StripOffsets, Tag.StripByteCounts, Tag.TileOffsets, Tag.TileByteCounts)
    # An omitted strip or tile has offset and size 0; Pillow would decode what is at offset 0.
    omits_tiles = any(0 in tags.get(tag, ()) for tag in offsets_and_sizes)
    if omits_tiles:
        return "sparse TIFF (it omits empty tiles)"
    if is_stack(image) or not all(is_overview_or_mask(page) for page in other_pages(image)):
        return "TIFF of several pages"
    if is_overview_or_mask(tags) and Tag.SubIFDs in tags:
        return "TIFF whose first page is a thumbnail"
    return None


def is_stack(image: Any) -> bool:
    """Tell whether a TIFF's description says that it has several pages, and the file can hold them.

    ImageJ and tifffile may write a stack of pages as one uncompressed block of pixels with a single
    directory. A program that cuts out a piece may copy the description, so the pixels must be there
    too.
    """
    tags = image.tag_v2
    compressed = tags.get(Tag.Compression, 1) != 1
    if compressed or image.fp is None:
        return False
    text = str(tags.get(Tag.ImageDescription, ""))
    page_samples = image.width * image.height * len(image.getbands())
    samples = page_samples  # of all pages
    # "ImageJ=1.54f", then a line "images=5"; or {"shape": [5, 64, 64]}
    by_imagej = re.search(r"^images=(\d+)", text, re.MULTILINE)
    by_tifffile = re.match(r'{"shape": \[([\d, ]+)\]', text)
    if text.startswith("ImageJ=") and by_imagej:
        samples = int(by_imagej[1]) * page_samples
    elif by_tifffile:
        samples = math.prod(int(side) for side in by_tifffile[1].split(","))
    first_byte = tags.get(Tag.StripOffsets, (0,))[0]
    file_bytes = image.fp.seek(0, os.SEEK_END)
    # a picture's samples have 8 bits, a byte each
    return samples > page_samples and first_byte + samples <= file_bytes


def is_overview_or_mask(tags: Any) -> bool:
    """Tell whether the tags of a TIFF's page call it an overview or a mask of another page."""
    return bool(tags.get(Tag.NewSubfileType, 0) & REDUCED_OR_MASK)


def other_pages(image: Any) -> Iterator[Any]:
    """Yield the tags of every page but the first of a TIFF."""
    file = image.fp
    directory = image.tag_v2
    if file is None:  # already decoded, by whoever opened the image
        return
    file.seek(0)
    header = file.read(16)
    if not header.startswith(BIG_TIFF_STARTS):
        header = header[:8]  # only a BigTIFF's header has 16 bytes
    seen = set()
    while directory.next and directory.next not in seen:
        seen.add(directory.next)  # a damaged file may link its pages in a circle
        file.seek(directory.next)
        directory = TiffImagePlugin.ImageFileDirectory_v2(header)
        directory.load(file)
        yield directory


def describe_jpeg2000(image: Any) -> str | None:
    """Describe an opened JPEG 2000 file that holds more than a picture; None if it is one."""
    if getattr(image, "fp", None) is None:  # already decoded, or unpickled
        return None
    image.fp.seek(0)
    components, bits, signed = jpeg2000_kind(image.fp.read())
    image.fp.seek(0)
    if components == len(image.getbands()) and bits == 8 and not signed:
        return None
    return f"JPEG 2000 with {components} bands of {bits} bits"


def jpeg2000_kind(content: bytes) -> tuple[int, int, bool]:
    """Return a JPEG 2000's number of components, and the bit depth and signedness they share.

    They are in the marker segment "image and tile size" (ITU-T T.800, A.5.1), which directly
    follows the start-of-codestream marker. Counting from that marker, bytes 40 and 41 hold the
    number of components. Byte 42, and every third after it, describes a component: bit 7 is 1 if it
    is signed, bits 0 to 6 are its depth in bits, minus 1. ValueError if components differ in depth
    or sign, or are missing.
    """
    start = content.find(b"\xff\x4f\xff\x51")  # both markers
    if start < 0:
        raise ValueError("JPEG 2000 without a codestream")
    components = int.from_bytes(content[start + 40 : start + 42], "big")
    depths = set(content[start + 42 : start + 42 + 3 * components : 3])
    if len(depths) != 1:
        raise ValueError(f"JPEG 2000 whose bands differ in depth or sign: {TO_GEOTIFF}")
    depth = depths.pop()
    return components, (depth & 127) + 1, depth > 127


def decode(image: Image.Image, reduce: int = 1) -> Image.Image:
    """Decode to RGB. A JPEG is decoded at 1/`reduce` of its size; `reduce` is 1, 2, 4 or 8.

    Scales 16-bit grey to 8 bits and composites transparent pixels onto black. Raises whatever
    Pillow raises for a broken image; ValueError for 32-bit pixels and a JPEG 2000 that Pillow
    cannot read; NeedsPackingError if a TIFF or JPEG 2000 labels a data band, such as infrared, as
    transparency.
    """
    if reduce > 1:
        image.draft(None, (image.width // reduce, image.height // reduce))
    try:
        image.load()  # decodes it: otherwise a broken RGB image would raise only in the caller
    except OSError:
        if image.format != "JPEG2000":
            raise
        raise ValueError(
            f"JPEG 2000 that Pillow cannot decode: unless it is damaged, {TO_GEOTIFF}"
        ) from None
    if image.mode.startswith("I;16"):
        grey = np.asarray(image) // 257  # from 65535 to 255; `convert` would clip at 255
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32-bit image with an unknown range of values")
    if image.has_transparency_data:
        if image.format in ("TIFF", "JPEG2000"):
            check_alpha(image)
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    if image.mode != "RGB":
        image = image.convert("RGB")
    return image


def check_alpha(image: Image.Image) -> None:
    """Raise NeedsPackingError if alpha is probably data.

    That is so if it has values other than 0 and 255, or if no pixel is opaque although the colours
    vary.
    """
    bands = image.convert("RGBA")
    counts = bands.getchannel("A").histogram()
    ranges: Any = bands.convert("RGB").getextrema()  # (lowest, highest) of each colour
    hides_all = counts[255] == 0
    colours_vary = any(low < high for low, high in ranges)
    if any(counts[1:255]) or (hides_all and colours_vary):
        found = f"{image.format} with {len(image.getbands())} bands, the last mislabelled as alpha,"
        raise NeedsPackingError(f"{found} is not an RGB picture: convert it with `prepare.py pack`")


def crop_and_resize(image: AnyImage, crop: Sequence[int], side: int, exact: bool = False) -> Tensor:
    """Decode, crop to (top, left, height, width), resize to (C, side, side) uint8 or float32.

    Resizes bicubically with antialiasing, like torchvision's v2.functional.resized_crop on a
    tensor. A JPEG is decoded at the smallest scale at which its crop still covers the output: this
    is faster, and the result differs by less than 1 grey level (of 255) on average. torchvision
    decodes at full size, as this does with `exact`. Set `exact` too if the caller goes on using
    the image, because draft() changes it.
    """
    top, left, height, width = crop
    if isinstance(image, Image.Image):
        reduce = 1
        if image.format == "JPEG" and not exact:
            for factor in (2, 4, 8):
                if min(height, width) >= factor * side:
                    reduce = factor
        box = (
            round(left / reduce),
            round(top / reduce),
            round((left + width) / reduce),
            round((top + height) / reduce),
        )
        cropped = decode(image, reduce).crop(box)
        pixels = np.asarray(cropped)  # (H, W, C)
        # (C, H, W) as a view, channels last in memory: the fastest layout for interpolate
        part = torch.from_numpy(pixels).permute(2, 0, 1)
    else:  # uint16 becomes float32: few of PyTorch's kernels take uint16
        dtype = np.uint8 if image.dtype == np.uint8 else np.float32
        pixels = image[:, top : top + height, left : left + width]
        part = torch.from_numpy(pixels.astype(dtype, order="C"))
    return F.interpolate(part[None], [side, side], mode="bicubic", antialias=True)[0]
