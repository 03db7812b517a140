"""Find the images of a run: rank 0 lists them, every rank then has the same list."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

import data

if TYPE_CHECKING:  # a loader worker imports this file for SyntheticImages
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


def check_folder(folder: str, flag: str = "--data", out: str | None = None) -> None:
    """Raise ValueError where this rank does not see a folder of images, or `out` lies in it."""
    if not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}: give {flag} the folder of images")
    if out and Path(out).resolve().is_relative_to(Path(folder).resolve()):
        raise ValueError(f"--out {out} lies in {flag} {folder}: give a folder outside of it")


def check_folders(config: "Config") -> None:
    """Check --data and --eval-data as `check_folder` does."""
    for flag, folder in (("--data", config.data), ("--eval-data", config.eval_data)):
        if folder not in ("synthetic", None):
            check_folder(str(folder), flag, config.out)


def list_folder(folder: str, out: str | None, say: Callable[[str], None]) -> tuple[Any, str | None]:
    """List a folder or pack, kept in `out` if given -> (images, checksum of names and sizes).

    ValueError where there are none. A copy of the trainer without storage/ reads plain folders.
    """
    check_folder(folder)
    try:
        from storage import image_list
    except ModuleNotFoundError:
        if is_pack(folder):
            raise
        return data.scan(folder), None
    found = image_list.find_list(folder, out, say)
    return found, image_list.fingerprint(found)


def find_images(
    config: "Config", out: str | None, global_batch: int, stats: data.ChannelStats | None = None
) -> tuple[Any, dict[str, Any]]:
    """List --data -> (images, what `with_images` needs to know of them), as `list_folder`.

    ValueError too where there are too few images for a step, or as `find_stats` without `stats`.
    """
    if config.eval_data:
        list_eval_images(config.eval_data, out)  # refused now, if at all
    files, names = SyntheticImages(config.seed, config.channels), None  # type: tuple[Any, Any]
    if config.data != "synthetic":
        files, names = list_folder(config.data, out, print)
    data.steps_per_epoch(len(files), global_batch)  # raises where there is not one
    stats = stats or find_stats(config.data, config.channels)
    return files, {"images": len(files), "image_names_and_sizes": names, "channel_stats": stats}


def list_eval_images(folder: str, out: str | None) -> Any:
    """List held-out images, in `out`/eval if `out` is given, as `list_folder`."""
    return list_folder(folder, out and os.path.join(out, "eval"), print)[0]


def is_pack(folder: str) -> bool:
    """Tell whether `folder` is a pack of images, not a tree of files."""
    return os.path.exists(os.path.join(folder, "pack.index"))


def stats_file(folder: str) -> str:
    """Return where `prepare.py stats` keeps the mean and deviation of each channel."""
    # beside a tree, not in it, where a new file would make the list of its files outdated
    return os.path.join(folder, "stats.json") if is_pack(folder) else f"{folder}.stats.json"


def find_stats(folder: str, channels: int) -> data.ChannelStats:
    """Read the statistics of the images in `folder`, ImageNet's for RGB images without any.

    ValueError where there are none for so many channels.
    """
    path = stats_file(folder.rstrip("/"))
    if folder != "synthetic" and os.path.exists(path):
        found = json.loads(Path(path).read_text())
        if (count := len(found["mean"])) != channels:
            raise ValueError(f"{path} is of {count} channels, not {channels}: see --channels")
        return data.ChannelStats(tuple(found["mean"]), tuple(found["std"]), found["dtype"])
    if channels == 3:
        return data.IMAGENET
    if folder == "synthetic":
        return data.ChannelStats((0.5,) * channels, (0.25,) * channels)
    command = f"`python prepare.py stats {folder}`"
    raise ValueError(f"--channels {channels} needs statistics: type {command}")
