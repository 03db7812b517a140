"""Images in: which files there are, who reads which one when, decode, augmentation, batches.

Every draw is a function of (seed, position), where the position counts the samples of the whole job
since its first step. So no rank, worker or sampler has a state: one integer says where a run is,
and any number of ranks and workers sees the same images, crops, flips and masks.

Copy this one file: `for batch in build_loader(scan("tiles"), img_size=96, ...)` needs nothing else.
Workers touch neither the network nor the device.
"""

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch
import torchvision.transforms.functional as TF
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import InterpolationMode, RandomResizedCrop

EXTENSIONS = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as in the MAE recipe
SYNTHETIC_IMAGES = 1_000_848  # as many as Million-AID has: train 10,000 + test 990,848
SUBSTITUTES = 16  # unreadable images in a row before the run is stopped
# Errors that are the file's own: Pillow cannot decode it (no errno), it has gone, it is not ours.
FILE_ERRNOS = (None, errno.ENOENT, errno.EACCES)

# ---------------------------------------------------------------------------------------------
# Which files there are


@dataclass(frozen=True)
class ImageFiles:
    """The images below one folder, in sorted order of their relative paths.

    Paths are one fixed-width numpy array, not a list: a million of them are one block of memory.
    """

    root: str
    paths: np.ndarray  # (N,) bytes, relative to root
    labels: np.ndarray  # (N,) int32, index into classes, -1 for images that lie in root itself
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.paths[index]))


def scan(root: str) -> ImageFiles:
    """List the images below `root`: a class tree of any depth, a flat folder, or a mixture.

    The class of an image is the name of the folder it lies in (all 51 leaf names of Million-AID
    differ), numbered in sorted order; two folders of one name are one class. Images in `root`
    itself have no class. Hidden files and folders are left out; symbolic links are followed, but
    not to a folder around them. Raises OSError where a folder is missing or may not be read, and
    ValueError where there is no image.
    """

    def refuse(error: OSError) -> None:
        raise error  # a folder left out in silence would renumber the classes

    def leads_up(folder: str, name: str) -> bool:
        here, there = os.path.realpath(folder), os.path.realpath(os.path.join(folder, name))
        return os.path.join(here, "").startswith(os.path.join(there, ""))

    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no folder {root}: give --data the folder of your images")
    found: list[tuple[bytes, str]] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and not leads_up(folder, n)]
        relative = os.path.relpath(folder, root)
        leaf = "" if relative == "." else os.path.basename(folder)
        for name in names:
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                found.append((os.fsencode(os.path.normpath(os.path.join(relative, name))), leaf))
    if not found:
        raise ValueError(f"no image lies below {root}: looked for {' '.join(EXTENSIONS)}")
    found.sort()
    classes = tuple(sorted({leaf for _, leaf in found if leaf}))
    number = {leaf: i for i, leaf in enumerate(classes)}
    labels = np.array([number.get(leaf, -1) for _, leaf in found], dtype=np.int32)
    return ImageFiles(root, np.array([path for path, _ in found]), labels, classes)


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


def read_rgb(path: str) -> Image.Image:
    """Decode one file to RGB; raises whatever Pillow raises for a broken one.

    Pillow takes more than 179 million pixels for an attack: such an image counts as broken.
    """
    with Image.open(path) as image:
        return to_rgb(image)


def synthetic_rgb(seed: int, index: int, size: int = 256) -> Image.Image:
    """A smooth random picture, always the same for one (seed, index): learnable, and no file."""
    coarse = np.random.default_rng((seed, index)).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)


class Images(Dataset[Sample]):
    """Sample by position: which image, its pixels, and its augmentation.

    Each epoch is a new permutation of all images, drawn from (seed, epoch), of which the last
    incomplete global batch is left out. RandomResizedCrop 0.2-1 with bicubic resize, then a flip
    half of the time: the recipe of MAE (arXiv 2111.06377, appendix A.1).
    """

    def __init__(
        self, files: ImageFiles | None, img_size: int, patches: int, seed: int, global_batch: int
    ) -> None:
        self.files, self.img_size, self.patches, self.seed = files, img_size, patches, seed
        self.count = SYNTHETIC_IMAGES if files is None else len(files)
        self.epoch_samples = steps_per_epoch(self.count, global_batch) * global_batch
        self.epoch, self.order = -1, np.empty(0, np.int64)

    def index(self, position: int) -> int:
        """Which image stands at `position`."""
        epoch, offset = divmod(position, self.epoch_samples)
        if epoch != self.epoch:
            self.order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
            self.epoch = epoch
        return int(self.order[offset])

    def source(self, position: int) -> tuple[int, Image.Image]:
        """The image at `position`, or the next good one after it, and its index."""
        for other in range(position, position + SUBSTITUTES):
            index = self.index(other)
            if self.files is None:
                return index, synthetic_rgb(self.seed, index)
            path = self.files.path(index)
            try:
                return index, read_rgb(path)
            except Exception as error:  # Pillow raises many kinds for a broken file
                number = getattr(error, "errno", None)
                if isinstance(error, MemoryError) or number not in FILE_ERRNOS:
                    raise  # trouble of this node, not of the file: other ranks may not have it
                reason = f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"unreadable image {path} ({reason}): the next one stands in", stacklevel=2
                )
        raise RuntimeError(
            f"{SUBSTITUTES} images in a row could not be read, the last one {path} ({reason})"
        )

    def __getitem__(self, position: int) -> Sample:
        index, image = self.source(position)
        with seeded(self.seed, position):
            noise = torch.randperm(self.patches).float()
            flip = bool(torch.rand(()) < 0.5)
            box = RandomResizedCrop.get_params(image, scale=[0.2, 1.0], ratio=[3 / 4, 4 / 3])
        size = [self.img_size, self.img_size]
        image = TF.resized_crop(image, *box, size, InterpolationMode.BICUBIC)
        pixels = TF.pil_to_tensor(TF.hflip(image) if flip else image)  # (3, H, W) uint8
        label = -1 if self.files is None else int(self.files.labels[index])
        crop = torch.tensor(box, dtype=torch.int32)
        return Sample(pixels, noise, label, index, position, crop, flip)


# ---------------------------------------------------------------------------------------------
# Batches


def end_with_parent(worker: int) -> None:
    """Let a loader worker end when the process that reads from it is killed.

    PyTorch's own watch is over the process that forked the worker, which is the fork server; and
    the fork server lives as long as its workers do.
    """

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()


def build_loader(
    files: ImageFiles | None,
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
) -> DataLoader[Sample]:
    """The local batches of one rank for these steps of the job, accumulation steps one by one.

    `files` None means synthetic images. Batches are `Sample`s whose fields have a first dimension
    B = local_batch: image (B, 3, img_size, img_size) uint8 for `normalize`, noise (B, patches).
    Raises ValueError where the batch does not divide or is larger than the data set.
    """
    context = None
    if workers:
        # A worker forked from this process would inherit the threads and handles of the network
        # libraries and of the device; one from the fork server has imported modules only.
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", "torchvision.transforms.functional"])
    return DataLoader(
        Images(files, img_size, patches, seed, global_batch),
        batch_sampler=Positions(global_batch, local_batch, rank, world_size, steps),
        num_workers=workers,
        worker_init_fn=end_with_parent,
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
