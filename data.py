"""Load images: file listing, assignment to ranks, decoding, crops, batches.

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
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

EXTENSIONS = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".npy")
ARRAY_DTYPES = ("uint8", "uint16", "float32")
SUBSTITUTES = 16  # unreadable images in a row before the run is stopped
# Bytes that decoding one image may take. It replaces Pillow's limit of pixels, which would refuse a
# JPEG that is read at an eighth of its size in a sixty-fourth of the memory.
MEMORY_BUDGET = 2**30
# Errors of the file itself, not of the node: Pillow cannot decode it (no errno), it has vanished,
# it may not be read, it is a link to itself, or a socket.
FILE_ERRNOS = (None, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENXIO)
PNG_METADATA = {b"eXIf", b"tEXt", b"zTXt", b"iTXt", b"acTL"}  # that may tell an orientation
JPEG_TABLES = (0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE)  # segments before that of the frame
LOG_ASPECT = torch.tensor([3 / 4, 4 / 3]).log().tolist()  # of crops, width : height

AnyImage = Image.Image | np.ndarray  # an array is (C, H, W), of one of ARRAY_DTYPES


class ChannelStats(NamedTuple):
    """Mean and deviation per channel of a data set: of values as stored, of uint8 in [0, 1]."""

    mean: tuple[float, ...]  # C of them
    std: tuple[float, ...]
    dtype: str = "uint8"  # of all images, one of ARRAY_DTYPES


IMAGENET = ChannelStats((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # as in the MAE recipe

# ---------------------------------------------------------------------------------------------
# Which files there are


class ImageSource(Protocol):
    """What a loader needs of a data set: an `ImageFolder`, or a class of your own."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> bytes | AnyImage: ...  # a file's content, or decoded; OSError


@dataclass(frozen=True)
class ImageFolder:
    """The images below one folder, sorted by the bytes of their relative paths."""

    root: str
    names: list[str]  # paths relative to root
    labels: list[int]  # indices into classes; -1 for an image that lies in root itself
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """Return the path of an image, for messages and for `read`."""
        return os.path.join(self.root, self.names[index])

    def read(self, index: int) -> bytes:
        """Read an image file whole; OSError if it cannot be read."""
        with open(self.path(index), "rb", buffering=0) as file:
            return file.read()


def scan(root: str, visit: Callable[[str, int], None] | None = None) -> ImageFolder:
    """List the images below `root`: a class tree of any depth, a flat folder, or a mixture.

    The class of an image is the name of the folder it lies in (all 51 leaf names of Million-AID
    differ), numbered in sorted order; folders of one name are one class. Skips hidden files and
    folders; follows symbolic links, but not to a folder around them. Calls `visit` with the path of
    each folder and the number of images in it. Raises OSError where a folder is missing or may not
    be read, and ValueError where there is no image.
    """

    def fail(error: OSError) -> None:
        raise error  # a folder skipped in silence would renumber the classes

    def leads_up(folder: str, name: str) -> bool:
        here, there = os.path.realpath(folder), os.path.realpath(os.path.join(folder, name))
        return os.path.join(here, "").startswith(os.path.join(there, ""))

    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no folder {root}: give --data the folder of your images")
    names: list[str] = []
    for folder, subfolders, files in os.walk(root, onerror=fail, followlinks=True):
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and not leads_up(folder, n)]
        images = [n for n in files if n.lower().endswith(EXTENSIONS) and not n.startswith(".")]
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else os.path.join(relative, "")
        names += [prefix + name for name in images]
        if visit:
            visit(folder, len(images))
    if not names:
        raise ValueError(f"no images found in {root}: looked for {' '.join(EXTENSIONS)}")
    names.sort(key=os.fsencode)  # the same order in every locale
    leaves = [name.rpartition(os.sep)[0].rpartition(os.sep)[2] for name in names]
    classes = tuple(sorted(set(leaves) - {""}))
    number = {leaf: i for i, leaf in enumerate(classes)} | {"": -1}
    return ImageFolder(root, names, [number[leaf] for leaf in leaves], classes)


# ---------------------------------------------------------------------------------------------
# Which rank reads which image when


def steps_per_epoch(images: int, global_batch: int) -> int:
    """Count the whole global batches of an epoch; ValueError if there is not even one."""
    if global_batch > images:
        raise ValueError(
            f"a global batch of {global_batch} is larger than the data set of {images} images: "
            f"use fewer ranks or a --batch that keeps the global batch at {images} or less"
        )
    return images // global_batch


class ImageOrder:
    """The image at each position: every epoch is a new permutation, drawn from (seed, epoch).

    The last incomplete global batch of an epoch is left out.
    """

    def __init__(self, images: int, global_batch: int, seed: int) -> None:
        self.images, self.seed = images, seed
        self.epoch_samples = steps_per_epoch(images, global_batch) * global_batch
        self.epoch, self.permutation = -1, np.empty(0, np.int32)

    def image_at(self, position: int) -> int:
        """Return the index of the image at `position`."""
        epoch, offset = divmod(position, self.epoch_samples)
        if epoch != self.epoch:
            everything = np.arange(self.images, dtype=np.int32)
            self.permutation = np.random.default_rng((self.seed, epoch)).permutation(everything)
            self.epoch = epoch
        return int(self.permutation[offset])


def deal(step: int, global_batch: int, local_batch: int, world_size: int) -> np.ndarray:
    """Deal the positions of one step -> (accumulation steps, world_size, B) int64.

    Each rank in turn gets one local batch, then again for the next accumulation step. All ranks
    together read each position once, in every sharding mode: a hybrid group shards parameters,
    never the batch. ValueError where the batch does not divide.
    """
    if global_batch % (local_batch * world_size):
        raise ValueError(
            f"a global batch of {global_batch} is not a multiple of {world_size} ranks x "
            f"{local_batch} images"
        )
    positions = np.arange(step * global_batch, (step + 1) * global_batch)
    return positions.reshape(-1, world_size, local_batch)


@dataclass(frozen=True)
class RankBatchSampler:
    """The local batches of one rank, as lists of (position, image index).

    The index is looked up here, so that no worker needs to hold the permutation.
    """

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
                yield [(position, self.order.image_at(position)) for position in positions]


# ---------------------------------------------------------------------------------------------
# One image


def open_image(
    content: bytes | AnyImage, budget: int = MEMORY_BUDGET
) -> tuple[AnyImage, tuple[int, int]]:
    """Open what a source has read -> it, not decoded yet, and its (width, height) when upright.

    ValueError where it is no image, or where decoding takes more than `budget` bytes.
    """
    file = content if isinstance(content, bytes) else b""
    if file.startswith(b"\x93NUMPY"):
        content = open_array(file)
    if isinstance(content, np.ndarray):
        if content.ndim != 3 or not content.size or content.dtype.name not in ARRAY_DTYPES:
            what = f"{content.dtype} of shape {content.shape}"
            raise ValueError(f"an array must be (C, H, W) {' or '.join(ARRAY_DTYPES)}, not {what}")
        height, width = content.shape[1:]
        check_memory(4 * content.size, (width, height), budget)  # as float32
        if content.dtype.kind == "f" and not np.isfinite(content).all():
            raise ValueError("NaN or infinite pixels")
        return content, (width, height)
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # `budget` replaces it
    try:
        image = content if isinstance(content, Image.Image) else Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        what = f"begins with {file[:16]!r}" if file else "is empty"
        raise ValueError(f"not an image: the file {what}") from None
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    width, height = image.size
    if width * height == 0:
        raise ValueError("no pixels")
    if image.format != "JPEG":  # which may be decoded smaller; `orientation` may decode a PNG whole
        check_memory(4 * width * height, image.size, budget)
    # Zeros at the end are what an interrupted copy leaves: decoded, the rest is grey, without an
    # error. The last end marker must follow the last start of a scan (ITU-T T.81, table B.1).
    elif file.endswith(b"\0") and file.rfind(b"\xff\xd9") <= file.rfind(b"\xff\xda"):
        raise ValueError("truncated: zeros where the end of the JPEG should be")
    return image, (height, width) if orientation(image) in (5, 6, 7, 8) else (width, height)


def orientation(image: Image.Image) -> int:
    """Return how an image is turned, 1 to 8, by its EXIF data; 1 is upright."""
    if is_plain_png(image):  # of any other PNG, getexif decodes all pixels first
        return 1
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def is_plain_png(image: Image.Image) -> bool:
    """Tell whether this is a PNG in memory, not cut off, without metadata or further images."""
    if not (isinstance(image, PngImageFile) and isinstance(image.fp, io.BytesIO)):
        return False
    file, at, chunks = image.fp.getvalue(), 8, set()
    while at + 8 <= len(file):
        size, name = struct.unpack_from(">I4s", file, at)
        chunks.add(name)
        at += size + 12
    return b"IEND" in chunks and not chunks & PNG_METADATA


def open_array(content: bytes) -> np.ndarray:
    """View the pixels of a .npy file; ValueError where they are not what its header says."""
    stream = io.BytesIO(content)
    try:
        np.lib.format.read_magic(stream)  # 1.0 is what np.save writes
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=1000)
        # np.load would allocate whatever the header says; this refuses objects too
        pixels = np.frombuffer(content, dtype, offset=stream.tell())
        return pixels.reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # a hostile header raises even MemoryError, in the parser
        raise ValueError(f"damaged .npy file: {error}") from None


def check_memory(needed: int, size: tuple[int, int], budget: int) -> None:
    """Raise ValueError where decoding needs more bytes than `budget`; `size`: (width, height)."""
    if needed > budget:
        raise ValueError(
            f"{size[0]} x {size[1]} pixels take {needed / 2**30:.1f} GiB to decode, more than "
            f"{budget / 2**30:.1f}: make it smaller by `prepare.py pack --max-side`"
        )


def reduction(image: Image.Image, crop: Sequence[int], side: int) -> int:
    """Return 1, 2, 4 or 8: how much smaller a JPEG may be decoded so that its crop has `side`."""
    # A turned image, rare here, is decoded whole: the last pixel of a reduced one may be a part of
    # a pixel, and turning would bring it to the front and shift all others.
    if image.format != "JPEG" or orientation(image) != 1:
        return 1
    return max(scale for scale in (1, 2, 4, 8) if scale == 1 or min(crop[2:]) >= scale * side)


def reduce_crop(crop: Sequence[int], reduce: int) -> tuple[int, int, int, int]:
    """Round a crop (top, left, height, width) to the pixels of an image decoded at 1/`reduce`."""
    top, left, bottom, right = (
        round(n / reduce) for n in (crop[0], crop[1], crop[0] + crop[2], crop[1] + crop[3])
    )
    return top, left, bottom - top, right - left


def skip_rows(image: Image.Image, top: int, bottom: int) -> None:
    """Let only these rows of a file in memory be decoded, if it can: all others are undefined then.

    A turned image, or a file that is cut off, is decoded whole: that is how the damage is found.
    """
    if not isinstance(image, ImageFile.ImageFile) or orientation(image) != 1:
        return
    if image.format == "TIFF":  # of many strips, unless it is compressed
        last = max((strip[2] for strip in image.tile), default=0)  # by its place in the file
        boxes = [strip[1] or (0, 0, *image.size) for strip in image.tile]
        needed = [box[1] < bottom and box[3] > top for box in boxes]
        image.tile = [t for t, use in zip(image.tile, needed, strict=True) if use or t[2] == last]
    elif is_plain_png(image) and not image.info.get("interlace"):
        clip_rows(image, bottom)
    elif image.format == "JPEG":  # whose decoder stops at the height that its header gives
        image.decodermaxblock = 2**30  # the file at once: its parts would be joined again and again
        rows = bottom // 16 * 16 + 32  # whole blocks, and one more that the last row's colour needs
        with cast(io.BytesIO, image.fp).getbuffer() as file:
            at = 2
            while file[at] == 0xFF and file[at + 1] in JPEG_TABLES:
                at += 2 + int.from_bytes(file[at + 2 : at + 4], "big")
            frame = file[at] == 0xFF and file[at + 1] in (0xC0, 0xC1, 0xC2)  # ITU-T T.81, B.2.2
            if rows < image.height and frame and file[-2:] == b"\xff\xd9":
                file[at + 5 : at + 7] = rows.to_bytes(2, "big")
                clip_rows(image, rows)


def clip_rows(image: ImageFile.ImageFile, rows: int) -> None:
    """Tell Pillow to expect so many rows from its decoder."""
    codec, _, offset, options = image.tile[0]
    image.tile = [cast(Any, (codec, (0, 0, image.width, rows), offset, options))]


def decode(image: Image.Image, reduce: int = 1, budget: int = MEMORY_BUDGET) -> Image.Image:
    """Decode to upright RGB, a JPEG at 1/1, 1/2, 1/4 or 1/8 of its size (`reduce`).

    16-bit grey is scaled to 8 bits, transparent pixels are blended with black. Raises whatever
    Pillow raises for a broken or truncated image; ValueError for 32-bit pixels, or where more than
    `budget` bytes are needed.
    """
    whole, file_format = image.size, image.format
    if reduce > 1:
        image.draft(None, (whole[0] // reduce, whole[1] // reduce))
    needed = 4 * image.width * image.height  # Pillow's RGB takes four bytes per pixel
    if image.info.get("progressive"):  # all coefficients, 2 bytes each, before the first pixel
        needed += 6 * whole[0] * whole[1]
    check_memory(needed, whole, budget)
    if orientation(image) != 1:  # upright, that would only copy it
        image = ImageOps.exif_transpose(image)
    # older Pillows open a 16-bit PNG as "I"
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PNG"):
        grey = np.asarray(image) // 257  # `convert` would clip at 255
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32-bit image with an unknown range of values")
    if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    if image.mode != "RGB":
        return image.convert("RGB")
    image.load()
    return image


def crop_and_resize(image: AnyImage, crop: Sequence[int], side: int) -> Tensor:
    """Cut out (top, left, height, width), resize it -> (C, side, side) uint8 or float32.

    Bicubic with antialiasing, as by torchvision's v2.functional.resized_crop of a tensor.
    """
    top, left, height, width = crop
    if isinstance(image, Image.Image):
        pixels = np.array(image.crop((left, top, left + width, top + height)))  # (H, W, C)
        part = torch.from_numpy(pixels).permute(2, 0, 1)  # channels last, PyTorch's fastest here
    else:  # few of PyTorch's kernels take uint16, all take float32
        dtype = np.uint8 if image.dtype == np.uint8 else np.float32
        whole = image[:, top : top + height, left : left + width]
        part = torch.from_numpy(whole.astype(dtype, order="C"))
    return F.interpolate(part[None], [side, side], mode="bicubic", antialias=True)[0]


class LoadStats(NamedTuple):
    """What reading took, of one image or of several together, in one loader process."""

    bytes: int = 0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    resize_seconds: float = 0.0
    collate_seconds: float = 0.0


def total(stats: Iterable[LoadStats]) -> LoadStats:
    """Add statistics, field by field."""
    return LoadStats(*map(sum, zip(LoadStats(), *stats, strict=True)))


class Sample(NamedTuple):
    """One image as it is trained on."""

    image: Tensor  # (C, H, W) uint8; float32 where the images are uint16 or float32
    noise: Tensor  # (L,) float32, the masking order: a random permutation of 0 .. L-1
    image_id: int  # index in the data set
    bad: list[tuple[int, str]]  # (image_id, reason): unreadable images that this one replaces
    stats: LoadStats


def draw_augmentation(
    seed: int, position: int, patches: int, width: int, height: int
) -> tuple[Tensor, bool, tuple[int, int, int, int]]:
    """Draw masking noise (L,), flip, and crop (top, left, height, width) from (seed, position).

    The crop is of 20 to 100 % of the area, and half of the images are flipped: the recipe of MAE
    (arXiv 2111.06377, appendix A.1). Torch's own generator is not used.
    """
    word = np.random.SeedSequence((seed, position)).generate_state(1)[0]
    generator = torch.Generator().manual_seed(int(word))
    noise = torch.randperm(patches, generator=generator).float()
    flip = bool(torch.rand((), generator=generator) < 0.5)
    return noise, flip, draw_crop(generator, width, height)


def draw_crop(generator: torch.Generator, width: int, height: int) -> tuple[int, int, int, int]:
    """Draw a crop (top, left, height, width) of 3:4 to 4:3, the largest in the middle if none fits.

    From the same generator torchvision's RandomResizedCrop draws the same.
    """
    for _ in range(10):
        area = width * height * torch.empty(1).uniform_(0.2, 1.0, generator=generator).item()
        aspect = torch.empty(1).uniform_(*LOG_ASPECT, generator=generator).exp().item()
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(height - h + 1, (), generator=generator))
            left = int(torch.randint(width - w + 1, (), generator=generator))
            return top, left, h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


class LocalBatch(NamedTuple):
    """The samples of one rank in one accumulation step."""

    image: Tensor  # (B, C, H, W) uint8 or float32, as in Sample
    noise: Tensor  # (B, L) float32
    image_ids: list[int]  # B of them
    bad: list[tuple[int, str]]  # as in Sample, of all samples
    stats: LoadStats


@dataclass(eq=False)
class Images(Dataset[Sample]):
    """Samples by (position, image index).

    A JPEG is decoded at the smallest scale that its crop allows, the crop rounded to that scale's
    pixels; `exact` decodes it at full size, as torchvision would, and more slowly. Of one crop,
    pixels differ by less than 1 of 255 in the mean.
    """

    files: ImageSource
    order: ImageOrder
    img_size: int
    patches: int
    exact: bool = False
    stats: ChannelStats = IMAGENET  # an image of other channels or type counts as unreadable

    def __getitem__(self, place: tuple[int, int]) -> Sample:
        """Load an image; for an unreadable one the next good one of the order stands in.

        The substitute gets the crop, flip and mask of this position. Raises RuntimeError after
        SUBSTITUTES unreadable images in a row, and any error that is not the file's own.
        """
        position, index = place
        bad: list[tuple[int, str]] = []
        while len(bad) < SUBSTITUTES:
            try:
                return self.load(position, index)._replace(bad=bad)
            except Exception as error:  # Pillow raises many kinds for a broken file
                number = getattr(error, "errno", None)
                if isinstance(error, MemoryError) or number not in FILE_ERRNOS:
                    raise  # of this node: another rank may not have it, and streams would differ
                bad.append((index, f"{type(error).__name__}: {error}"))
            index = self.order.image_at(position + len(bad))
        raise RuntimeError(
            f"{SUBSTITUTES} images in a row could not be read, the last one number {bad[-1][0]} "
            f"({bad[-1][1]})"
        )

    def load(self, position: int, index: int) -> Sample:
        """Load one image as it looks at this position; raises what reading and decoding raise."""
        started = time.perf_counter()
        content = self.files.read(index)
        read = time.perf_counter()
        image, size = open_image(content)
        found = (len(image), image.dtype.name) if isinstance(image, np.ndarray) else (3, "uint8")
        if found != (wanted := (len(self.stats.mean), self.stats.dtype)):
            text = "{} channels of {}, not {} of {}: see `prepare.py stats`"
            raise ValueError(text.format(*found, *wanted))
        noise, flip, crop = draw_augmentation(self.order.seed, position, self.patches, *size)
        reduce, encoded = 1, len(content) if isinstance(content, bytes) else 0  # bytes
        del content  # or `skip_rows` would have to copy it
        if isinstance(image, Image.Image):
            if encoded:
                reduce = 1 if self.exact else reduction(image, crop, self.img_size)
                skip_rows(image, crop[0], crop[0] + crop[2])
            image, crop = decode(image, reduce), reduce_crop(crop, reduce)
        decoded = time.perf_counter()
        pixels = crop_and_resize(image, crop, self.img_size)
        pixels = pixels.flip(-1) if flip else pixels
        resized = time.perf_counter()
        stats = LoadStats(encoded, read - started, decoded - read, resized - decoded)
        return Sample(pixels, noise, index, [], stats)

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> LocalBatch:
        """Load a batch, in a worker into shared memory: what a DataLoader calls."""
        started = time.perf_counter()
        dtype = torch.uint8 if self.stats.dtype == "uint8" else torch.float32
        side = self.img_size
        image = torch.empty(len(places), len(self.stats.mean), side, side, dtype=dtype)
        noise = torch.empty(len(places), self.patches)
        if get_worker_info():  # the other process would get a copy
            image.share_memory_()
            noise.share_memory_()
        seconds = time.perf_counter() - started
        ids, bad, every = [], [], []
        for i, place in enumerate(places):
            sample = self[place]
            started = time.perf_counter()
            image[i], noise[i] = sample.image, sample.noise
            seconds += time.perf_counter() - started
            ids.append(sample.image_id)
            bad += sample.bad
            every.append(sample.stats)
        stats = total([LoadStats(collate_seconds=seconds), *every])
        return LocalBatch(image, noise, ids, bad, stats)


# ---------------------------------------------------------------------------------------------
# Batches


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
) -> DataLoader[Sample]:
    """Make a loader of the `LocalBatch`es of one rank for these steps, accumulation steps in turn.

    One iterator covers all steps, so workers start once, not once per epoch. Images must have the
    channels and type of `stats`, which `normalize` needs too. With workers, `files` is pickled.
    ValueError where the global batch is larger than the data set.
    """
    order = ImageOrder(len(files), global_batch, seed)
    return DataLoader(
        Images(files, order, img_size, patches, exact, stats),
        batch_sampler=RankBatchSampler(order, global_batch, local_batch, rank, world_size, steps),
        num_workers=workers,
        collate_fn=LocalBatch._make,  # a copy of the tuple: `Images` makes whole batches
        # A forked worker would inherit the threads, locks and devices of this process; one from the
        # fork server has imported modules only.
        multiprocessing_context="forkserver" if workers else None,
        generator=torch.Generator(),  # or each iterator would draw from the global one
        pin_memory=pin_memory,
        prefetch_factor=4 if workers else None,
    )


def normalize(images: Tensor, stats: ChannelStats = IMAGENET) -> Tensor:
    """(B, C, H, W) as loaded -> float32, normalised; ValueError where `stats` is of other C."""
    if images.shape[1] != len(stats.mean):
        raise ValueError(f"images of {images.shape[1]} channels, statistics of {len(stats.mean)}")
    x = images.float() / 255 if images.dtype == torch.uint8 else images.clone()
    for channel, mean, std in zip(x.unbind(1), stats.mean, stats.std, strict=True):
        channel.sub_(mean).div_(std)  # by numbers: a tensor of them would stall the device
    return x
