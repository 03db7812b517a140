"""Load images: file listing, assignment to ranks, crops, batches, decoding.

Every random draw is a function of (seed, position), where the position counts the samples of the
whole job since its first step. So no rank, worker or sampler keeps a state: one integer says where
a run is, and any number of ranks and workers sees the same images, crops, flips and masks.
Copy this one file: `for batch in build_loader(scan("tiles"), img_size=96, ...)` needs nothing else.
Shapes: B images of a local batch, C channels, H x W pixels, L patches.
"""

import errno
import io
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

EXTENSIONS = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".npy")
ARRAY_DTYPES = ("uint8", "uint16", "float32")
SUBSTITUTES = 16  # unreadable images in a row before the run is stopped
LOG_ASPECT = torch.tensor([3 / 4, 4 / 3]).log().tolist()  # of crops, width : height
AnyImage = Image.Image | np.ndarray  # an array is (C, H, W), of one of ARRAY_DTYPES
Image.MAX_IMAGE_PIXELS = 2**29  # Pillow refuses images of twice as many: 4 GiB decoded
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

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])

    def read(self, index: int) -> bytes:
        with open(self.path(index), "rb", buffering=0) as file:
            return file.read()


def scan(root: str, progress: Callable[[int], None] | None = None) -> ImageFolder:
    """List the images below `root`: a class tree of any depth, a flat folder, or a mixture.

    The class of an image is the name of its folder. Skips what is hidden; follows symbolic links,
    but lists no folder twice. Tells `progress` how many images are listed. OSError where a folder
    cannot be listed, ValueError where there is no image.
    """

    def fail(error: OSError) -> None:
        raise error  # a folder skipped in silence would renumber the classes

    names: list[str] = []
    # by (inode, device); with those above, so that a link upwards lists nothing
    listed = {os.stat(folder)[1:3] for folder in Path(root).resolve().parents}
    for folder, subfolders, files in os.walk(root, onerror=fail, followlinks=True):
        if (place := os.stat(folder)[1:3]) in listed:
            subfolders.clear()
            continue
        listed.add(place)
        subfolders[:] = sorted(n for n in subfolders if not n.startswith("."))
        images = [n for n in files if n.lower().endswith(EXTENSIONS) and not n.startswith(".")]
        names += [os.path.relpath(os.path.join(folder, name), root) for name in images]
        if progress:
            progress(len(names))
    if not names:
        raise ValueError(f"no images found in {root}: looked for {' '.join(EXTENSIONS)}")
    names.sort(key=os.fsencode)  # the same order in every locale
    leaves = [os.path.basename(os.path.dirname(name)) for name in names]
    classes = tuple(sorted({*leaves} - {""}))
    number = {leaf: i for i, leaf in enumerate(classes)} | {"": -1}
    return ImageFolder(root, names, [number[leaf] for leaf in leaves], classes)


# --- Which rank reads which image when


def steps_per_epoch(images: int, global_batch: int) -> int:
    """Count the whole global batches of an epoch; ValueError if there is not even one."""
    if global_batch > images:
        raise ValueError(f"global batch {global_batch} is larger than the data set of {images}")
    return images // global_batch


class ImageOrder:
    """The image at each position: an epoch is a permutation, less its last incomplete batch."""

    def __init__(self, images: int, global_batch: int, seed: int) -> None:
        self.images, self.seed = images, seed
        self.epoch_samples = steps_per_epoch(images, global_batch) * global_batch
        self.epoch, self.permutation = -1, np.empty(0, np.int64)

    def image_at(self, position: int) -> int:
        """Return the index of the image at `position`."""
        epoch, offset = divmod(position, self.epoch_samples)
        if epoch != self.epoch:
            self.permutation = np.random.default_rng((self.seed, epoch)).permutation(self.images)
            self.epoch = epoch
        return int(self.permutation[offset])


def deal(step: int, global_batch: int, local_batch: int, world_size: int) -> np.ndarray:
    """Deal the positions of one step -> (accumulation steps, world_size, B) int64.

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
            dealt = deal(step, self.global_batch, self.local_batch, self.world_size)
            for positions in dealt[:, self.rank].tolist():  # B integers
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
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(height - h + 1, (), generator=generator))
            left = int(torch.randint(width - w + 1, (), generator=generator))
            return top, left, h, w
    # None fits: the largest one in the middle.
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


# --- Samples and batches


class LocalBatch(NamedTuple):
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

    def __getitem__(self, place: tuple[int, int]) -> tuple[Any, ...]:
        """Load an image, or if it is unreadable the next one of the order, with the same draws.

        Return what `load` does, the image's index and what it replaces. OSError after
        SUBSTITUTES in a row; raises any error that is not the file's own.
        """
        position, index = place
        bad: list[tuple[int, str]] = []
        while len(bad) < SUBSTITUTES:
            try:
                return *self.load(position, index), index, bad
            except Exception as error:  # Pillow raises many kinds for a broken file
                bad.append((index, file_fault(error)))
            index = self.order.image_at(position + len(bad))
        last = f"{self.files.path(bad[-1][0])} ({bad[-1][1]})"
        raise OSError(f"{SUBSTITUTES} images in a row could not be read, the last: {last}")

    def load(self, position: int, index: int) -> tuple[Tensor, Tensor]:
        """Load one image as it looks at this position; raises what reading and decoding raise."""
        content = self.files.read(index)
        image, size = open_image(content, self.stats)
        noise, flip, crop = draw_augmentation(self.order.seed, position, self.patches, *size)
        exact = self.exact or not isinstance(content, bytes)
        pixels = crop_and_resize(image, crop, self.img_size, exact)
        return pixels.flip(-1) if flip else pixels, noise


def collate(samples: Sequence[tuple[Any, ...]]) -> LocalBatch:
    """Stack samples; in a worker into shared memory, as PyTorch's default does with tensors."""
    images, noise = default_collate([sample[:2] for sample in samples])
    _, _, image_ids, bad = zip(*samples, strict=True)
    return LocalBatch(images, noise, list(image_ids), [*chain(*bad)])


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
) -> DataLoader[LocalBatch]:
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


def file_fault(error: Exception) -> str:
    """Say why a file is unreadable; raise an error of this node, as other ranks may not have it."""
    own = None, errno.ENOENT, errno.ENOTDIR, errno.EACCES  # it cannot be decoded, found or read
    if isinstance(error, (MemoryError, ImportError)) or getattr(error, "errno", None) not in own:
        raise error
    return f"{type(error).__name__}: {error}"


def open_image(
    content: bytes | AnyImage, stats: ChannelStats | None = None
) -> tuple[AnyImage, tuple[int, int]]:
    """Open what a source has read -> it, not decoded yet, and its (width, height).

    ValueError, or what Pillow and numpy raise, where it is damaged, too large or not as `stats`.
    """
    image: AnyImage
    if not isinstance(content, bytes):
        image = content
    elif content.startswith(b"\x93NUMPY"):
        image = np.load(io.BytesIO(content), allow_pickle=False)
    else:
        try:
            image = Image.open(io.BytesIO(content))
            image.decodermaxblock = len(content)  # or Pillow decodes 64 KiB at a time
        except UnidentifiedImageError:  # which names an object in memory
            what = "not an image that Pillow reads"
            raise ValueError(f"{what} (TIFF of many bands: `prepare.py pack`)") from None
        # Zeros at the end are what an interrupted copy leaves: decoded, the rest is grey, without
        # an error. The last end marker must follow the last start of a scan (ITU-T T.81, B.1).
        zeros = image.format == "JPEG" and content.endswith(b"\0")
        if zeros and content.rfind(b"\xff\xd9") <= content.rfind(b"\xff\xda"):
            raise ValueError("truncated: zeros where the end of the JPEG should be")
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or not image.size or image.dtype.name not in ARRAY_DTYPES:
            raise ValueError(f"not (C, H, W) of {ARRAY_DTYPES}: {image.dtype} {image.shape}")
        if image.dtype.kind == "f" and not np.isfinite(image).all():
            raise ValueError("NaN or infinite pixels")
        kind, size = (len(image), image.dtype.name), (image.shape[2], image.shape[1])
    else:
        kind, size = (3, "uint8"), image.size
    if stats and kind != (wanted := (len(stats.mean), stats.dtype)):
        text = "{} channels of {}, not {} of {}: see `prepare.py stats`"
        raise ValueError(text.format(*kind, *wanted))
    return image, size


def decode(image: Image.Image, reduce: int = 1) -> Image.Image:
    """Decode to RGB, a JPEG at 1/1, 1/2, 1/4 or 1/8 of its size (`reduce`).

    Scales 16-bit grey to 8 bits, blends transparent pixels with black. Raises whatever Pillow
    raises for a broken image, ValueError for 32-bit pixels.
    """
    if reduce > 1:
        image.draft(None, (image.width // reduce, image.height // reduce))
    if image.mode.startswith("I;16"):
        grey = np.asarray(image) // 257  # `convert` would clip at 255
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32-bit image with an unknown range of values")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def crop_and_resize(image: AnyImage, crop: Sequence[int], side: int, exact: bool = False) -> Tensor:
    """Decode, cut out (top, left, height, width), resize -> (C, side, side) uint8 or float32.

    Bicubic with antialiasing, as by torchvision's v2.functional.resized_crop of a tensor. A JPEG
    is decoded at the smallest scale that its crop allows: faster than at full size, as torchvision
    does and `exact` too, and on average less than 1 of 255 different.
    """
    top, left, height, width = crop
    if isinstance(image, Image.Image):
        whole = exact or image.format != "JPEG"
        fits = 1 if whole else max(1, min(height, width) // side)
        reduce = max(scale for scale in (1, 2, 4, 8) if scale <= fits)
        x0, y0, x1, y1 = (round(n / reduce) for n in (left, top, left + width, top + height))
        pixels = np.asarray(decode(image, reduce).crop((x0, y0, x1, y1)))  # (H, W, C)
        part = torch.from_numpy(pixels).permute(2, 0, 1)  # channels last, PyTorch's fastest here
    else:  # few of PyTorch's kernels take uint16, all take float32
        dtype = np.uint8 if image.dtype == np.uint8 else np.float32
        pixels = image[:, top : top + height, left : left + width]
        part = torch.from_numpy(pixels.astype(dtype, order="C"))
    return F.interpolate(part[None], [side, side], mode="bicubic", antialias=True)[0]
