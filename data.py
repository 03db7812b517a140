"""Load images: file listing, assignment to ranks, crops, batches, decoding.

Every random draw is a function of (seed, position), where the position counts the samples of the
whole job since its first step. So no rank, worker or sampler keeps a state: one integer says where
a run is, and any number of ranks and workers sees the same images, crops, flips and masks.
Copy this one file: `for batch in build_loader(scan("tiles"), img_size=96, ...)` needs nothing else.
Shapes: B images of a local batch, C channels, H x W pixels, L patches.

Importing this file changes four settings of the process: `Image.MAX_IMAGE_PIXELS` of Pillow is
raised to 2**29 and `ImageFile.MAXBLOCK` to 2**20, Pillow's log of TIFF files is switched off, and
PyTorch's warning that an array is not writable is ignored.
"""

import errno
import io
import math
import os
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
ARRAY_DTYPES = ("uint8", "uint16", "float32")
LARGEST_IMAGE = 2**32  # bytes of the decoded pixels of one image
NUMPY_START = b"\x93NUMPY"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # of TIFF and BigTIFF
MAX_UNREADABLE_IN_A_ROW = 16  # images; after so many the run is stopped
LOG_ASPECT = torch.tensor([3 / 4, 4 / 3]).log().tolist()  # of crops, width : height
AnyImage = Image.Image | np.ndarray  # an array is (C, H, W), of one of ARRAY_DTYPES
Image.MAX_IMAGE_PIXELS = 2**29  # Pillow refuses images of twice as many: 4 GiB decoded
ImageFile.MAXBLOCK = 2**20  # or Pillow decodes and converts 64 KiB at a time, which is slower
TiffImagePlugin.logger.setLevel("CRITICAL")  # it prints what `open_image` raises
warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it


class ChannelStats(NamedTuple):
    """Mean and deviation per channel of a data set: of values as stored, of uint8 in [0, 1]."""

    mean: tuple[float, ...]  # C of them
    std: tuple[float, ...]
    dtype: str = "uint8"  # of all images, one of ARRAY_DTYPES


IMAGENET = ChannelStats((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # as in the MAE recipe

# --- Which files there are


class ImageSource(Protocol):
    """What a loader needs of a data set: an `ImageFolder`, or a class of your own."""

    def __len__(self) -> int: ...
    def path(self, index: int) -> str: ...  # a name for messages
    def read(self, index: int) -> bytes | AnyImage: ...  # a whole file, or decoded; OSError


@dataclass(frozen=True)
class ImageFolder:
    """The images below one folder, sorted by the bytes of their relative paths: an ImageSource."""

    root: str
    names: list[str]  # paths relative to root
    labels: list[int]  # indices into classes; -1 for an image that lies in root itself
    classes: tuple[str, ...]
    left_out: dict[str, int] = field(default_factory=dict)  # why: how many files

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

    Skips what is hidden; follows symbolic links, but lists no folder twice. With `include` only the
    images that match one of these patterns, and none that matches one of `exclude`, as `matches`
    says. Tells `progress` how many images are listed. OSError where a folder cannot be listed,
    ValueError where there is no image.
    """
    names: list[str] = []
    # A pattern that excludes nothing is listed too: it may be misspelt.
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
            message += ": a pattern is a whole name of a file or folder, or *part_of_it*"
        raise ValueError(message)
    names.sort(key=os.fsencode)  # the same order in every locale
    labels, classes = classes_by_folder(names)
    return ImageFolder(root, names, labels, classes, dict(left_out))


def walk_files(root: str) -> Iterator[str]:
    """Yield the relative path of each file below `root` that is not hidden; OSError."""

    def fail(error: OSError) -> None:
        raise error  # a folder skipped in silence would renumber the classes

    listed = set()
    # The folders above count as listed, so that a link upwards lists nothing.
    for folder in Path(root).resolve().parents:
        info = os.stat(folder)
        listed.add((info.st_ino, info.st_dev))
    for path, subfolders, files in os.walk(root, onerror=fail, followlinks=True):
        info = os.stat(path)
        key = (info.st_ino, info.st_dev)
        if key in listed:
            subfolders.clear()
            continue
        listed.add(key)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in files:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(path, name), root)


def reason_to_leave_out(name: str, include: Sequence[str], exclude: Sequence[str]) -> str | None:
    """Say why a file, by its relative path, is not listed; None for an image that is."""
    if not name.lower().endswith(EXTENSIONS):
        _, ending = os.path.splitext(name)
        return ending.lower() if ending else "without an ending"
    if include and not any(matches(name, pattern) for pattern in include):
        return f"not included by {' or '.join(include)}"
    for pattern in exclude:
        if matches(name, pattern):
            return f"excluded by {pattern}"
    return None


def matches(name: str, pattern: str) -> bool:
    """Tell whether a relative path matches a pattern of *, ? and [abc].

    A pattern without a slash is compared with the name of the file and of each folder above it, one
    with a slash with the whole path, in which * matches slashes too.
    """
    if "/" in pattern:
        return fnmatchcase(name, pattern)
    return any(fnmatchcase(part, pattern) for part in name.split("/"))


def describe_counts(counts: dict[str, int]) -> str:
    """List what was counted, the most frequent first: `8 .xml, 2 excluded by masks`."""
    return ", ".join(f"{count} {what}" for what, count in Counter(counts).most_common())


def classes_by_folder(names: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """Number the classes of images by their relative paths -> labels, class names.

    The class is the name of the folder that an image lies in; folders of one name are one class.
    Where all folders have the same name (CLASS/images/x.jpg), it is the folder above. The label is
    -1 for an image that lies in no folder.
    """
    folders = [os.path.dirname(name) for name in names]
    class_folder = {folder: folder for folder in folders if folder}
    while len(set(class_folder.values())) > 1:
        leaves = {os.path.basename(folder) for folder in class_folder.values()}
        above = {folder: os.path.dirname(own) for folder, own in class_folder.items()}
        if len(leaves) > 1 or "" in above.values():
            break
        class_folder = above
    leaf = {folder: os.path.basename(own) for folder, own in class_folder.items()}
    classes = tuple(sorted(set(leaf.values())))
    number = {name: i for i, name in enumerate(classes)}
    labels = [number[leaf[folder]] if folder else -1 for folder in folders]
    return labels, classes


# --- Which rank reads which image when


def steps_per_epoch(images: int, global_batch: int) -> int:
    """Count the whole global batches of an epoch; ValueError if there is not even one."""
    if global_batch > images:
        raise ValueError(f"global batch {global_batch} is larger than the data set of {images}")
    return images // global_batch


class ImageOrder:
    """The image at each position: an epoch is a permutation, less its last incomplete batch."""

    def __init__(self, images: int, global_batch: int, seed: int) -> None:
        self.images = images
        self.seed = seed
        self.epoch_samples = steps_per_epoch(images, global_batch) * global_batch
        self.epoch = -1  # none yet
        self.permutation = np.empty(0, np.int64)

    def image_at(self, position: int) -> int:
        """Return the index of the image at `position`."""
        epoch, offset = divmod(position, self.epoch_samples)
        if epoch != self.epoch:
            self.permutation = np.random.default_rng((self.seed, epoch)).permutation(self.images)
            self.epoch = epoch
        return int(self.permutation[offset])


def step_positions(step: int, global_batch: int, local_batch: int, world_size: int) -> np.ndarray:
    """Assign the positions of one step to ranks -> (accumulation steps, world_size, B) int64.

    Each rank in turn gets one local batch, then again for the next accumulation step. All ranks
    together read each position once, in every sharding mode: a hybrid group shards parameters,
    never the batch.
    """
    positions = np.arange(step * global_batch, (step + 1) * global_batch)
    return positions.reshape(-1, world_size, local_batch)


@dataclass(frozen=True)
class RankBatchSampler:
    """The local batches of one rank, as lists of (position, image index)."""

    order: ImageOrder
    global_batch: int
    local_batch: int
    rank: int
    world_size: int
    steps: range

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self.steps:
            every = step_positions(step, self.global_batch, self.local_batch, self.world_size)
            for positions in every[:, self.rank].tolist():  # B integers
                # Looked up here, so that no worker needs to hold the permutation.
                yield [(position, self.order.image_at(position)) for position in positions]


# --- Augmentation


def draw_augmentation(
    seed: int, position: int, patches: int, width: int, height: int
) -> tuple[Tensor, bool, tuple[int, int, int, int]]:
    """Draw masking noise (L,), flip and crop (top, left, height, width) as in MAE, appendix A.1."""
    word = np.random.SeedSequence((seed, position)).generate_state(1)[0]
    generator = torch.Generator().manual_seed(int(word))
    noise = torch.randperm(patches, generator=generator).float()  # the smallest stay visible
    flip = torch.rand((), generator=generator).item() < 0.5
    return noise, flip, draw_crop(generator, width, height)


def draw_crop(generator: torch.Generator, width: int, height: int) -> tuple[int, int, int, int]:
    """Draw a crop (top, left, height, width) of 3:4 to 4:3, as torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * torch.empty(1).uniform_(0.2, 1.0, generator=generator).item()
        aspect = torch.empty(1).uniform_(*LOG_ASPECT, generator=generator).exp().item()
        w = round(math.sqrt(area * aspect))
        h = round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(height - h + 1, (), generator=generator))
            left = int(torch.randint(width - w + 1, (), generator=generator))
            return top, left, h, w
    # None fits: the largest one in the middle.
    w = min(width, round(height * 4 / 3))
    h = min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


# --- Samples and batches


class Sample(NamedTuple):
    """One image as it looks at its position."""

    image: Tensor  # (C, H, W) uint8; float32 where the images are uint16 or float32
    noise: Tensor  # (L,) float32, masking noise: a random permutation of 0 .. L-1
    image_id: int  # index in the data set
    bad: list[tuple[int, str]]  # (image_id, reason): unreadable images that it replaces


class MicroBatch(NamedTuple):
    """The samples of one rank in one accumulation step."""

    image: Tensor  # (B, C, H, W) uint8; float32 where the images are uint16 or float32
    noise: Tensor  # (B, L) float32, masking noise: random permutations of 0 .. L-1
    image_ids: list[int]  # B indices in the data set
    bad: list[tuple[int, str]]  # (image_id, reason): unreadable images that these replace


@dataclass(eq=False)
class Images(Dataset[Any]):  # so that the loader may be annotated by its batches
    """The samples by (position, image index); `exact` as in `crop_and_resize`."""

    files: ImageSource
    order: ImageOrder
    img_size: int
    patches: int
    exact: bool = False
    stats: ChannelStats = IMAGENET  # an image of other channels or type counts as unreadable

    def __getitem__(self, place: tuple[int, int]) -> Sample:
        """Load an image, or if it is unreadable the next one of the order, with the same draws.

        OSError after MAX_UNREADABLE_IN_A_ROW; errors that are not the file's fault are passed on.
        """
        position, index = place
        bad: list[tuple[int, str]] = []
        while len(bad) < MAX_UNREADABLE_IN_A_ROW:
            try:
                image, noise = self.load(position, index)
                return Sample(image, noise, index, bad)
            except Exception as error:  # Pillow raises many kinds for a broken file
                if not is_file_error(error):
                    raise
                bad.append((index, describe_file_error(error)))
            index = self.order.image_at(position + len(bad))
        last_index, reason = bad[-1]
        last = f"{self.files.path(last_index)} ({reason})"
        raise OSError(f"{len(bad)} images in a row could not be read, the last: {last}")

    def load(self, position: int, index: int) -> tuple[Tensor, Tensor]:
        """Load one image as it looks at this position -> its pixels and noise, as in `Sample`.

        Raises what reading and decoding raise.
        """
        content = self.files.read(index)
        image, size = open_image(content, self.stats)
        noise, flip, crop = draw_augmentation(self.order.seed, position, self.patches, *size)
        exact = self.exact or not isinstance(content, bytes)
        pixels = crop_and_resize(image, crop, self.img_size, exact)
        if flip:
            pixels = pixels.flip(-1)
        return pixels, noise


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Stack samples; in a worker into shared memory, as PyTorch's default does with tensors."""
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
    local_batch: int,
    steps: range,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    pin_memory: bool = False,
    exact: bool = False,
    stats: ChannelStats = IMAGENET,
) -> DataLoader[MicroBatch]:
    """Make the DataLoader of one rank: a batch per accumulation step of each of `steps`, in turn.

    One iterator covers all steps, so workers start once, not once per epoch. Images must have the
    channels and type of `stats`. ValueError where the global batch is larger than the data set.
    """
    order = ImageOrder(len(files), global_batch, seed)
    return DataLoader(
        Images(files, order, img_size, patches, exact, stats),
        batch_sampler=RankBatchSampler(order, global_batch, local_batch, rank, world_size, steps),
        num_workers=workers,
        collate_fn=collate,
        # A forked worker would inherit the threads, locks and devices of this process; one from the
        # fork server has imported modules only.
        multiprocessing_context="forkserver" if workers else None,
        generator=torch.Generator(),  # or each iterator would draw from the global one
        pin_memory=pin_memory,
        prefetch_factor=4 if workers else None,
    )


def normalize(images: Tensor, stats: ChannelStats = IMAGENET) -> Tensor:
    """Normalise (B, C, H, W) as loaded -> float32; ValueError where `stats` is of other C."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images.clone()
    for channel, mean, std in zip(x.unbind(1), stats.mean, stats.std, strict=True):
        channel.sub_(mean).div_(std)  # by numbers: a tensor of them would stall the device
    return x


# --- One image: files and arrays to pixels


class NotAPictureError(ValueError):
    """The file holds more than a picture: `prepare.py pack` makes an array of it."""


# What of an image Pillow shows completely. Its other modes are deeper than 8 bits, or not RGB.
PICTURE_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
UNSIGNED = 1  # a sample format of TIFF
REDUCED_OR_MASK = 1 | 4  # bits of a subfile type: an overview, or a mask, of another page


def is_file_error(error: Exception) -> bool:
    """Tell whether a file is to blame: it cannot be decoded, found or read.

    Any other error is this node's, and another rank may not have it.
    """
    if isinstance(error, (MemoryError, ImportError)) or "DefaultCPUAllocator" in str(error):
        return False
    number = getattr(error, "errno", None)
    if number is None:  # not from the operating system
        return True
    return number in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP)


def describe_file_error(error: Exception) -> str:
    """Say in one line why a file is unreadable."""
    return f"{type(error).__name__}: {error}"


def open_image(
    content: bytes | AnyImage, stats: ChannelStats | None = None
) -> tuple[AnyImage, tuple[int, int]]:
    """Open what a source has read -> it, not decoded yet, and its (width, height).

    NaN of an array is nodata: with `stats` it is filled with the mean of the channel. ValueError,
    or what Pillow and numpy raise, where it is damaged, too large or not as `stats`;
    NotAPictureError where it holds what training on a tree does not read.
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
    """Open a file by Pillow, not decoded yet; ValueError where it is none or cut off."""
    try:
        image = Image.open(io.BytesIO(content))
    except UnidentifiedImageError:  # which names an object in memory
        if content.startswith(TIFF_STARTS):
            raise NotAPictureError(
                "TIFF that is not an image to Pillow: broken, or for `prepare.py pack`"
            ) from None
        raise ValueError("not an image that Pillow reads") from None
    # Zeros at the end are what an interrupted copy leaves: decoded, the rest is grey, without an
    # error. The last end marker must follow the last start of a scan (ITU-T T.81, B.1).
    zeros = image.format == "JPEG" and content.endswith(b"\0")
    if zeros and content.rfind(b"\xff\xd9") <= content.rfind(b"\xff\xda"):
        raise ValueError("truncated: zeros where the end of the JPEG should be")
    return image


def open_array(content: bytes) -> np.ndarray:
    """Map the array of a .npy file, without a copy; ValueError where it is damaged."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, by_columns, dtype = np.lib.format.read_array_header_2_0(file)
    count = math.prod(shape)
    if count * dtype.itemsize > LARGEST_IMAGE:
        raise ValueError(f"an array of {shape} {dtype} is larger than 4 GiB")
    # Objects, and more values than the file has, are ValueErrors too.
    values = np.frombuffer(content, dtype, count, file.tell())
    return values.reshape(shape, order="F" if by_columns else "C")


def check_array(image: np.ndarray) -> None:
    """ValueError where it is not (C, H, W) of a type that training takes, or shows nothing."""
    if image.ndim != 3 or not image.size or image.dtype.name not in ARRAY_DTYPES:
        raise ValueError(describe_wrong_array(image))
    check_shape(image.shape)
    if image.dtype.kind == "f":
        check_pixels(image)


def check_shape(shape: tuple[int, ...]) -> None:
    """ValueError where three sizes look like those of (H, W, C)."""
    height, width, channels = shape
    if channels <= 4 < min(height, width):  # a picture of four columns is none
        raise NotAPictureError(
            f"{shape} looks like (H, W, C): `prepare.py pack` makes (C, H, W) of it"
        )
    if 3 * channels <= min(height, width):
        raise ValueError(f"{shape} looks like (H, W, C): save it as (C, H, W)")


def check_pixels(channels: Iterable[np.ndarray]) -> None:
    """ValueError where a pixel of the channels (H, W) is infinite, or all are NaN."""
    empty = True
    for channel in channels:
        if np.isinf(channel).any():
            raise ValueError("infinite pixels")
        empty = empty and np.isnan(channel).all()
    if empty:
        raise ValueError("nodata (NaN) in all pixels")


def describe_wrong_array(image: np.ndarray) -> str:
    """Say what an array has instead of (C, H, W) of a type that training takes, and what to do."""
    kind = f"an array {image.shape} of {image.dtype}"
    if image.ndim not in (2, 3) or not image.size:
        return f"{kind} is not one image: save each image as (C, H, W) in a file of its own"
    return f"{kind} is not (C, H, W) of {ARRAY_DTYPES}: `prepare.py pack` converts it"


def fill_nodata(image: np.ndarray, stats: ChannelStats) -> np.ndarray:
    """Replace NaN in (C, H, W) float32 by the mean of its channel; a copy where there is any."""
    missing = np.isnan(image)
    if not missing.any():
        return image
    mean = np.array(stats.mean, np.float32)[:, None, None]
    return np.where(missing, mean, image)


def check_picture(image: Image.Image) -> None:
    """NotAPictureError where an opened file holds more than its pixels in RGB would show."""
    found = None
    if image.format == "TIFF" and getattr(image, "tag_v2", None):
        found = describe_tiff(image)
    elif image.format == "JPEG2000":
        found = describe_jpeg2000(image)
    if found:
        raise NotAPictureError(f"{found}: no picture, `prepare.py pack` makes an array of it")


def describe_tiff(image: Any) -> str | None:
    """Say what an opened TIFF holds beyond a picture; None where there is nothing."""
    tags = image.tag_v2
    samples = tags.get(Tag.SamplesPerPixel, 1)
    bits = max(tags.get(Tag.BitsPerSample, (1,)))
    if set(tags.get(Tag.SampleFormat, (UNSIGNED,))) != {UNSIGNED}:
        return f"TIFF of {samples} bands of signed, floating-point or complex numbers"
    shown = image.mode in PICTURE_MODES and samples == len(image.getbands())
    if bits > 8 or not shown:
        return f"TIFF of {samples} bands of {bits} bits"
    places = (Tag.StripOffsets, Tag.StripByteCounts, Tag.TileOffsets, Tag.TileByteCounts)
    if any(0 in tags.get(tag, ()) for tag in places):  # Pillow would show other bytes of the file
        return "TIFF that leaves out tiles without a value"
    pages = count_pages(image)
    if pages > 1:
        return f"TIFF of {pages} pages of one size"
    return None


def count_pages(image: Any) -> int:
    """Count the pages of a TIFF that have the size of the first, without overviews and masks."""
    size = image.tag_v2.get(Tag.ImageWidth), image.tag_v2.get(Tag.ImageLength)
    pages = 1
    for page in other_pages(image):
        same = (page.get(Tag.ImageWidth), page.get(Tag.ImageLength)) == size
        if same and not page.get(Tag.NewSubfileType, 0) & REDUCED_OR_MASK:
            pages += 1
    return pages


def other_pages(image: Any) -> Iterator[Any]:
    """Yield the tags of each page of a TIFF after the first."""
    file = image.fp
    directory = image.tag_v2
    if file is None:  # decoded already, by who made the image
        return
    file.seek(0)
    header = file.read(16)
    if header[2] != 43 and header[3] != 43:  # no BigTIFF, whose header is twice as long
        header = header[:8]
    seen = set()
    while directory.next and directory.next not in seen:
        seen.add(directory.next)  # a chain may end in a circle
        file.seek(directory.next)
        directory = TiffImagePlugin.ImageFileDirectory_v2(header)
        directory.load(file)
        yield directory


def describe_jpeg2000(image: Any) -> str | None:
    """Say what an opened JPEG 2000 file holds beyond a picture; None where there is nothing."""
    if image.fp is None:
        return None
    image.fp.seek(0)
    components, bits, signed = jpeg2000_kind(image.fp.read())
    image.fp.seek(0)
    if components == len(image.getbands()) and bits == 8 and not signed:
        return None
    return f"JPEG 2000 of {components} bands of {bits} bits"


def jpeg2000_kind(content: bytes) -> tuple[int, int, bool]:
    """Read how many components a JPEG 2000 file has, the bits of the first, whether it is signed.

    By the marker of its sizes (ITU-T T.800, A.5.1), behind that of the start of the codestream.
    """
    start = content.find(b"\xff\x4f\xff\x51")
    if start < 0:
        raise ValueError("JPEG 2000 without a codestream")
    components = int.from_bytes(content[start + 40 : start + 42], "big")
    depth = content[start + 42]
    return components, (depth & 127) + 1, depth > 127


def decode(image: Image.Image, reduce: int = 1) -> Image.Image:
    """Decode to RGB, a JPEG at 1/1, 1/2, 1/4 or 1/8 of its size (`reduce`).

    Scales 16-bit grey to 8 bits, blends transparent pixels with black. Raises whatever Pillow
    raises for a broken image, ValueError for 32-bit pixels; NotAPictureError where the last band of
    a TIFF or JPEG 2000 is infrared, say, and only called transparency.
    """
    if reduce > 1:
        image.draft(None, (image.width // reduce, image.height // reduce))
    if image.mode.startswith("I;16"):
        grey = np.asarray(image) // 257  # `convert` would clip at 255
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32-bit image with an unknown range of values")
    if image.has_transparency_data:
        if image.format in ("TIFF", "JPEG2000"):
            check_alpha(image)
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    image.load()
    if image.mode != "RGB":
        image = image.convert("RGB")
    return image


def check_alpha(image: Image.Image) -> None:
    """NotAPictureError where transparency has values other than 0 and 255."""
    counts = image.convert("RGBA").getchannel("A").histogram()
    if any(counts[1:255]):
        bands = f"{len(image.getbands())} bands, the last called transparency, which it is not"
        raise NotAPictureError(f"{image.format} of {bands}: `prepare.py pack` makes an array of it")


def crop_and_resize(image: AnyImage, crop: Sequence[int], side: int, exact: bool = False) -> Tensor:
    """Decode, cut out (top, left, height, width), resize -> (C, side, side) uint8 or float32.

    Bicubic with antialiasing, as by torchvision's v2.functional.resized_crop of a tensor. A JPEG
    is decoded at the smallest scale that its crop allows: faster than at full size, as torchvision
    does and `exact` too, and on average less than 1 of 255 different.
    """
    top, left, height, width = crop
    if isinstance(image, Image.Image):
        reduce = 1
        if image.format == "JPEG" and not exact:
            fits = max(1, min(height, width) // side)
            reduce = max(scale for scale in (1, 2, 4, 8) if scale <= fits)
        edges = (left, top, left + width, top + height)
        x0, y0, x1, y1 = [round(n / reduce) for n in edges]
        pixels = np.asarray(decode(image, reduce).crop((x0, y0, x1, y1)))  # (H, W, C)
        part = torch.from_numpy(pixels).permute(2, 0, 1)  # channels last, PyTorch's fastest here
    else:  # few of PyTorch's kernels take uint16, all take float32
        dtype = np.uint8 if image.dtype == np.uint8 else np.float32
        pixels = image[:, top : top + height, left : left + width]
        part = torch.from_numpy(pixels.astype(dtype, order="C"))
    return F.interpolate(part[None], [side, side], mode="bicubic", antialias=True)[0]
