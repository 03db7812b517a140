"""Find the images of a run: rank 0 lists them, every rank then has the same list."""

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

import data
from runtime.agreement import run_on_all_ranks, run_on_rank0
from storage import image_list

if TYPE_CHECKING:  # a loader worker imports this file for SyntheticImages
    from runtime.config import Config

Patterns = Sequence[str] | None  # patterns for the names of images, as in data.scan
SIDE = 256  # pixels
SAMPLED = 16  # at most this many images are read to check a data set before training


@dataclass(frozen=True)
class SyntheticImages:
    """Smooth random pictures of uint8 from (seed, index), learnable: a data.ImageSource."""

    seed: int
    channels: int = 3
    count: int = 1_000_848  # the size of Million-AID: train 10,000 + test 990,848

    def __len__(self) -> int:
        return self.count

    def path(self, index: int) -> str:
        """Return a name for messages."""
        return f"synthetic image {index}"

    def read(self, index: int) -> Image.Image | np.ndarray:
        """Make a picture: RGB, or an array (C, H, W)."""
        generator = np.random.default_rng((self.seed, index))
        coarse = generator.integers(0, 256, (8, 8, self.channels), dtype=np.uint8)
        smooth = []
        for c in range(self.channels):
            channel = Image.fromarray(coarse[..., c].copy())
            smooth.append(channel.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        if self.channels == 3:
            return Image.merge("RGB", smooth)
        return np.stack([np.asarray(channel) for channel in smooth])


class ImageFacts(NamedTuple):
    """What a run needs to know of its images."""

    images: int  # how many
    image_names_and_sizes: str | None = None  # their fingerprint; None for synthetic images
    channel_stats: data.ChannelStats | None = None  # used to normalise them
    pixel_notes: str = ""  # whose statistics those are, for the log


def check_folder(folder: str, flag: str = "--data", out: str | None = None) -> None:
    """Raise ValueError if this rank does not see a folder of images, or if `out` lies in it."""
    if not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}: give {flag} the folder of images")
    if out and Path(out).resolve().is_relative_to(Path(folder).resolve()):
        raise ValueError(f"--out {out} lies in {flag} {folder}: give a folder outside of it")


def check_folders(config: "Config") -> None:
    """Check --data and --eval-data as `check_folder` does."""
    for flag, folder in (("--data", config.data), ("--eval-data", config.eval_data)):
        if folder not in ("synthetic", None):
            check_folder(str(folder), flag, config.out)


def list_folder(
    folder: str, include: Patterns = None, exclude: Patterns = None, out: str | None = None
) -> Any:
    """List a folder or pack, and keep the list in `out` if given; ValueError if it is empty.

    A pack is a folder that holds a `pack.index` (image_list.is_pack). Returns a data.ImageSource.
    """
    check_folder(folder)
    return image_list.list_images(folder, out, include=include or (), exclude=exclude or ())


def find_images(
    config: "Config", global_batch: int, stats: data.ChannelStats | None = None
) -> tuple[Any, ImageFacts]:
    """List --data, in OUT -> (images, what a run needs to know of them); a dry run writes nothing.

    ValueError if there are too few images for a step, if `check_some_images` can read none, or, if
    `stats` are not given, as in `find_stats`.
    """
    held_out = None
    if config.eval_data:
        # now, to fail early if the folder is unusable
        held_out = list_eval_images(config.eval_data, config)
    files: Any = SyntheticImages(config.seed, config.channels)
    names = None
    if config.data != "synthetic":
        out = None if config.dry_run else config.out
        files = list_folder(config.data, config.include, config.exclude, out)
        names = image_list.fingerprint(files)
        with suppress(OSError):  # an image that cannot be read is named later
            if held_out and image_list.lists_overlap(files, held_out):
                print("warning: images of --eval-data are also in --data: the run trains on them")
    data.steps_per_epoch(len(files), global_batch)  # raises if there is not even one
    notes = "as in pretraining"
    if stats is None:
        stats, notes = find_stats(config.data, config.channels, names)
    check_some_images(files, stats)
    return files, ImageFacts(len(files), names, stats, notes)


def check_same_pack(files: Any) -> None:
    """Check that this node's copy of a pack is that of rank 0; AgreedError if not. Collective.

    Each rank opens the pack itself, perhaps on a disk of its node.
    """
    if not isinstance(files, image_list.ImageList) or not files.shards:
        return
    expected = run_on_rank0(partial(image_list.fingerprint, files))

    def check() -> None:
        if image_list.fingerprint(files) != expected:
            where = f"{files.root} on {platform.node()}"
            raise ValueError(f"{where} differs from the pack on the node of rank 0: copy it again")

    run_on_all_ranks(check)


def check_some_images(files: Any, stats: data.ChannelStats) -> None:
    """Read up to SAMPLED images from all over until one fits `stats`; ValueError if none does."""
    count = min(SAMPLED, len(files))
    for i in range(count):
        index = len(files) * i // count
        try:
            image, _ = data.open_image(files.read(index), stats)
            if isinstance(image, Image.Image):
                data.decode(image)
            return
        except Exception as error:  # Pillow raises many kinds for a broken file
            if not data.is_file_error(error):
                raise
            last = f"{files.path(index)} ({data.describe_file_error(error)})"
    raise ValueError(f"none of {count} images can be read, the last: {last}")


def list_eval_images(folder: str, config: "Config") -> Any:
    """List held-out images like those of --data, in OUT/eval; a dry run writes nothing."""
    out = None
    if not config.dry_run:
        out = os.path.join(config.out, "eval")
    return list_folder(folder, config.include, config.exclude, out)


def find_stats(
    folder: str, channels: int, images: str | None = None
) -> tuple[data.ChannelStats, str]:
    """Return the statistics of the images in `folder`, and a note on their origin.

    The note says if they were measured on other images than those of the fingerprint `images`. RGB
    images without statistics get ImageNet's. ValueError if there are none for this number of
    channels.
    """
    path = image_list.stats_file(folder)
    if folder == "synthetic":
        if channels == 3:
            return data.IMAGENET, ""
        return data.ChannelStats(mean=(0.5,) * channels, std=(0.25,) * channels), ""
    if os.path.exists(path):
        stats, measured = image_list.read_stats(path)
        count = len(stats.mean)
        if count != channels:
            raise ValueError(f"{path} is of {count} channels, not {channels}: see --channels")
        if measured and images and measured != images:
            return stats, f"of {path}, measured on other images"
        return stats, f"of {path}"
    if channels == 3:
        return data.IMAGENET, "ImageNet's"
    command = f"`python prepare.py stats {folder}`"
    raise ValueError(f"--channels {channels} needs statistics: type {command}")
