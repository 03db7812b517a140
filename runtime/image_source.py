"""Find the images of a run: rank 0 lists them, every rank then has the same list."""

import json
import os
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

import data
from runtime import agreement

if TYPE_CHECKING:  # a loader worker imports this file for SyntheticImages
    from runtime.config import Config

SIDE = 256  # pixels
EVAL_FOLDER = "eval"  # in --out: the list of --eval-data


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
    images = os.path.realpath(folder)
    if out and os.path.commonpath([images, os.path.realpath(out)]) == images:
        raise ValueError(f"--out {out} lies in {flag} {folder}: give a folder outside of it")


def check_folders(config: "Config") -> None:
    """Check --data and --eval-data as `check_folder` does; --stage-dir needs a pack."""
    for flag, folder in (("--data", config.data), ("--eval-data", config.eval_data)):
        if folder not in ("synthetic", None):
            check_folder(str(folder), flag, config.out)
    if config.stage_dir and not is_pack(config.data):
        what = f"--stage-dir copies a pack, and --data {config.data} is none"
        raise ValueError(f"{what}: type `python prepare.py pack DIR PACK`, then --data PACK")


def list_folder(folder: str, out: str | None, say: Callable[[str], None]) -> tuple[Any, str]:
    """List a folder or pack, kept in `out` if given -> (images, checksum of names and sizes).

    ValueError where there are none. A copy of the trainer without storage/ reads plain folders.
    """
    check_folder(folder)
    try:
        from storage import image_list
    except ModuleNotFoundError:
        if is_pack(folder):
            raise
        files = data.scan(folder)
        return files, f"names {zlib.crc32(os.fsencode('/'.join(files.names))):08x}"
    found = image_list.find_list(folder, out, say)
    return found, image_list.fingerprint(found)


def find_images(
    config: "Config", out: str | None, global_batch: int, stats: data.ChannelStats | None = None
) -> tuple[Any, dict[str, Any]]:
    """List --data -> (images, what `with_images` needs to know of them), as `list_folder`.

    ValueError too where there are too few images for a step, or as `find_stats` without `stats`.
    """
    files, names = SyntheticImages(config.seed, config.channels), None  # type: tuple[Any, Any]
    if config.data != "synthetic":
        files, names = list_folder(config.data, out, print)
    data.steps_per_epoch(len(files), global_batch)  # raises where there is not one
    if stats is None:
        stats = find_stats(config.data, config.channels)
        if names and stats is data.IMAGENET:
            check_first_image(files)
    return files, {"images": len(files), "image_names_and_sizes": names, "channel_stats": stats}


def share_images(
    config: "Config", global_batch: int, stats: data.ChannelStats | None = None
) -> tuple[Any, dict[str, Any]]:
    """Do as `find_images` on rank 0, and give every rank its result. Collective."""
    if config.eval_data:
        share_eval_images(config)  # refused now, if at all
    return _share(lambda: find_images(config, config.out, global_batch, stats))


def share_eval_images(config: "Config") -> Any:
    """List --eval-data on rank 0, and give every rank the same list. Collective."""
    kept = os.path.join(config.out, EVAL_FOLDER)
    return _share(lambda: list_folder(str(config.eval_data), kept, print))[0]


def _share(find: Callable[[], Any]) -> Any:
    """Call `find` on rank 0 for all; a list is sent as its file's name, which each rank maps."""
    found = agreement.run_on_rank0(lambda: pickle.dumps(find()))
    return agreement.run_on_all_ranks(lambda: pickle.loads(found))


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
    folder = folder.rstrip("/") or "/"
    path, command = stats_file(folder), f"`python prepare.py stats {folder}`"
    if folder == "synthetic" or not os.path.exists(path):
        if channels == 3:
            return data.IMAGENET
        if folder == "synthetic":
            return data.ChannelStats((0.5,) * channels, (0.25,) * channels)
        raise ValueError(f"--channels {channels} needs their mean and deviation: type {command}")
    found = json.loads(Path(path).read_text())
    stats = data.ChannelStats(tuple(found["mean"]), tuple(found["std"]), found["dtype"])
    if (count := len(stats.mean)) != channels:
        what = f"{path} is of images with {count} channels, not {channels}: give --channels {count}"
        raise ValueError(f"{what}, or if the images have changed, type {command}")
    return stats


def check_first_image(files: Any) -> None:
    """Raise ValueError where the first image is an array that ImageNet's statistics do not fit."""
    try:
        image, _ = data.open_image(files.read(0))
    except Exception:  # of many kinds; others stand in for a broken file, and it is listed
        return
    if isinstance(image, np.ndarray) and (len(image), image.dtype) != (3, np.uint8):
        what = f"{files.path(0)} has {len(image)} channels of {image.dtype}"
        command = f"`python prepare.py stats {files.root}`"
        raise ValueError(f"{what}: type {command}, and give --channels the number that it prints")
