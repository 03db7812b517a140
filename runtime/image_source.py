"""Find the images of a run: rank 0 lists them, every rank then has the same list.

All but plain folders is in storage/, which a copy of the trainer may lack.
"""

import json
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

import data
from runtime import agreement
from runtime.config import Config

SIDE = 256  # pixels


@dataclass(frozen=True)
class SyntheticImages:
    """Smooth random pictures of uint8 from (seed, index), learnable: a data.ImageSource."""

    seed: int
    channels: int = 3
    count: int = 1_000_848  # as many as Million-AID has: train 10,000 + test 990,848

    def __len__(self) -> int:
        return self.count

    def path(self, index: int) -> str:
        """Return a name for messages."""
        return f"synthetic image {index}"

    def read(self, index: int) -> Image.Image | np.ndarray:
        """Make a picture: RGB, or an array (C, H, W)."""
        draw = np.random.default_rng((self.seed, index))
        coarse = draw.integers(0, 256, (8, 8, self.channels), dtype=np.uint8)
        channels = (Image.fromarray(coarse[..., c].copy()) for c in range(self.channels))
        smooth = [channel.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for channel in channels]
        if self.channels == 3:
            return Image.merge("RGB", smooth)
        return np.stack([np.asarray(channel) for channel in smooth])


EVAL_FOLDER = "eval"  # in --out: the list of --eval-data, and pictures


def check_folder(folder: str, flag: str = "--data") -> None:
    """Raise ValueError where this rank does not see a folder of images."""
    if not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}: give {flag} the folder of images")


def check_folders(config: Config) -> None:
    """Raise ValueError where this rank does not see --data or --eval-data."""
    if config.data != "synthetic":
        check_folder(config.data)
    if config.eval_data is not None:
        check_folder(config.eval_data, "--eval-data")


def list_folder(folder: str, out: str | None, say: Callable[[str], None]) -> tuple[Any, str]:
    """List the images of a folder or pack -> (images, fingerprint of their names and sizes).

    The list is kept in `out`, where one is given. ValueError where there are none. A copy of the
    trainer without the folder storage/ reads plain folders only.
    """
    check_folder(folder)
    try:
        from storage import image_list
    except ModuleNotFoundError:
        if is_pack(folder):
            text = f"{folder} is a pack: to read it, copy the folder storage/ too"
            raise ValueError(text) from None
        plain = data.scan(folder)
        return plain, f"names {zlib.crc32(os.fsencode('/'.join(plain.names))):08x}"
    files = image_list.find_list(folder, out, say)
    return files, image_list.fingerprint(files, times=False)


def find_images(
    config: Config, out: str | None, global_batch: int, say: Callable[[str], None]
) -> tuple[Any, dict[str, Any], int]:
    """List --data -> (images, what `with_images` needs to know of them, steps per epoch).

    Keeps the list and raises as `list_folder`; ValueError too where there are too few images, or as
    `find_stats`.
    """
    folder = config.data
    files: Any = SyntheticImages(config.seed, config.channels)
    names: str | None = None
    if folder != "synthetic":
        files, names = list_folder(folder, out, say)
    steps = data.steps_per_epoch(len(files), global_batch)
    stats = find_stats(folder, config.channels)
    if folder != "synthetic" and stats is data.IMAGENET:
        check_first_image(files)
    facts = {"images": len(files), "image_names_and_sizes": names, "channel_stats": stats}
    return files, facts, steps


def share_images(config: Config, global_batch: int) -> tuple[Any, dict[str, Any], int]:
    """Do as `find_images` on rank 0, and give every rank the same list. Collective."""

    def find() -> tuple[str | None, dict[str, Any], int]:
        say = partial(print, flush=True)
        files, facts, steps = find_images(config, config.out, global_batch, say)
        return getattr(files, "index_file", None), facts, steps

    agreement.run_on_all_ranks(partial(check_folders, config))
    if config.eval_data:
        share_eval_images(config)  # refused now, if at all
    index, facts, steps = agreement.run_on_rank0(find)
    if config.data == "synthetic":
        return SyntheticImages(config.seed, config.channels), facts, steps
    return agreement.run_on_all_ranks(partial(_load_list, config.data, index)), facts, steps


def share_eval_images(config: Config) -> Any:
    """List --eval-data on rank 0, and give every rank the same list. Collective."""
    folder = str(config.eval_data)

    def find() -> str | None:
        kept = os.path.join(config.out, EVAL_FOLDER)
        files, _ = list_folder(folder, kept, partial(print, flush=True))
        return getattr(files, "index_file", None)

    return agreement.run_on_all_ranks(partial(_load_list, folder, agreement.run_on_rank0(find)))


def _load_list(folder: str, index: str | None) -> Any:
    """Load the list that rank 0 has made; without one, where there is no storage/, make it."""
    if index is None:
        return data.scan(folder)
    from storage.image_list import load_index

    return load_index(index, folder)  # one file, which all processes map


# ---------------------------------------------------------------------------------------------
# Mean and deviation of each channel


def is_pack(folder: str) -> bool:
    """Tell whether `folder` is a pack of images, not a tree of files."""
    return os.path.exists(os.path.join(folder, "pack.index"))


def stats_file(folder: str) -> str:
    """Return where `prepare.py stats` keeps its result: in a pack, beside any other folder.

    A file in a tree of images would make the list of its files outdated.
    """
    return os.path.join(folder, "stats.json") if is_pack(folder) else f"{folder}.stats.json"


def find_stats(folder: str, channels: int) -> data.ChannelStats:
    """Read the statistics of the images in `folder`, ImageNet's for RGB images without any.

    ValueError where there are none for so many channels, or the file is damaged.
    """
    if folder == "synthetic":
        made = data.ChannelStats((0.5,) * channels, (0.25,) * channels)
        return data.IMAGENET if channels == 3 else made
    folder = folder.rstrip("/") or "/"
    path, command = stats_file(folder), f"`python prepare.py stats {folder}`"
    if not os.path.lexists(path):
        if channels == 3:
            return data.IMAGENET
        raise ValueError(f"--channels {channels} needs their mean and deviation: type {command}")
    stats = read_stats(path)
    if stats is None:
        raise ValueError(f"{path} is damaged: write it again by {command}")
    if len(stats.mean) != channels:
        raise ValueError(
            f"{path} is of images with {len(stats.mean)} channels, not {channels}: give --channels "
            f"{len(stats.mean)}, or if the images have changed, type {command}"
        )
    return stats


def check_first_image(files: Any) -> None:
    """Raise ValueError where the first image is an array that ImageNet's statistics do not fit.

    One that cannot be read is no reason: others stand in for it, and it is listed.
    """
    try:
        image, _ = data.open_image(files.read(0))
    except Exception:  # Pillow raises many kinds for a broken file
        return
    if isinstance(image, np.ndarray) and (len(image), image.dtype) != (3, np.uint8):
        raise ValueError(
            f"{files.path(0)} has {len(image)} channels of {image.dtype}: type `python prepare.py "
            f"stats {files.root}`, and give --channels the number that it prints"
        )


def read_stats(path: str) -> data.ChannelStats | None:
    """Read a file of `prepare.py stats`; None where it is none."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        text = file.read(10**6)
    try:
        found = json.loads(text)
        mean, std = (tuple(map(float, found[key])) for key in ("mean", "std"))
        dtype = data.ARRAY_DTYPES[data.ARRAY_DTYPES.index(found["dtype"])]
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    sound = len(mean) == len(std) > 0 and all(map(math.isfinite, mean + std)) and min(std) > 0
    return data.ChannelStats(mean, std, dtype) if sound else None
