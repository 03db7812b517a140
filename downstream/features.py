"""Features of a frozen model: computed once, one row per image, in a file that is mapped.

`find_features` returns them, from the file where it is up to date. A file is written under another
name and renamed; the JSON file beside it, written last, says of which weights and images it is.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.functional import rgb_to_grayscale

import data
import vit
from downstream.images import open_eval_loader
from downstream.weights import Pretrained, build_pretrained
from runtime import agreement
from runtime.device_batches import LoaderFailed

BATCH = 64  # images; always as many, so that any number of ranks computes the same bits
PIXELS_SIDE = 16  # of the smaller image that is the raw-pixel baseline
FORMAT = 1  # of the files; raised when older ones would be wrong


class Source(NamedTuple):
    """What turns images into features."""

    name: str  # in a table
    seed: int | None  # of random weights
    identity: str  # the same for the same features of an image
    load: Callable[[], Pretrained] | None  # its weights; None: raw pixels


class FeatureOptions(NamedTuple):
    """How images become features, whatever the weights."""

    img_size: int
    features: str  # "cls" or "mean": the class token, or the mean over the patches
    grey: bool
    stats: data.ChannelStats


class LabelledImages(NamedTuple):
    """The images of one folder, with labels."""

    folder: str
    files: Any  # a data.ImageSource with labels and classes
    fingerprint: str  # of names and sizes


class FeatureFile(NamedTuple):
    """Features (N, D) fp32 of all images of a folder; NaN for those that cannot be read."""

    path: str
    bad: list[tuple[int, str]]  # (index, reason)


class Rows:
    """Some rows of a feature file: `rows[a:b]` reads (b - a, D) fp32 from the mapped file.

    The map is closed after each read: pages that have been read are no memory of this process.
    """

    def __init__(self, path: str, indices: np.ndarray) -> None:
        self.path, self.indices = path, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        return np.load(self.path, mmap_mode="r")[self.indices[places]]  # type: ignore[no-any-return]


def weights_identity(pretrained: Pretrained) -> str:
    """Compute a checksum of the shape and all weights of an encoder."""
    digest = hashlib.sha256(repr(pretrained.config).encode())
    for name, tensor in sorted(pretrained.weights.items()):
        if not name.startswith(("decoder_", "mask_token")):
            digest.update(name.encode())
            digest.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def build_encoder(
    source: Source, options: FeatureOptions, device: torch.device
) -> Callable[[Tensor], np.ndarray]:
    """Make a function: images (B, C, H, W) as loaded -> features (B, D) fp32.

    All patches are visible; tokens are taken after the final norm. A GPU computes in bf16.
    """
    model = None
    if source.load:
        model = build_pretrained(source.load(), device, options.img_size)

    @torch.inference_mode()
    def encode(images: Tensor) -> np.ndarray:
        images = images.to(device)
        if options.grey:
            images = rgb_to_grayscale(images, num_output_channels=3)
        images = data.normalize(images, options.stats)
        if model is None:
            return F.adaptive_avg_pool2d(images, PIXELS_SIDE).flatten(1).cpu().numpy()
        patches = vit.patchify(images, model.config.patch)  # (B, L, P*P*C)
        keep = torch.arange(patches.shape[1], device=device).expand(len(images), -1)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            tokens = model.encode(patches, keep).float()  # (B, 1+L, D)
        chosen = tokens[:, 0] if options.features == "cls" else tokens[:, 1:].mean(dim=1)
        return chosen.cpu().numpy()

    return encode


def find_features(
    source: Source,
    images: LabelledImages,
    options: FeatureOptions,
    folder: Path,
    *,
    device: torch.device,
    workers: int,
    progress: Callable[[int], None],
) -> FeatureFile:
    """Return the features of all images, from a file in `folder` where it is up to date.

    Each rank computes its share, rank 0 writes all of them. Calls `progress` with the number of
    images so far. Collective; AgreedError where images or files cannot be read or written.
    """
    changed = zlib.crc32(np.asarray(getattr(images.files, "times", ())).tobytes())  # of each file
    about = {
        "format": FORMAT,
        "weights": source.identity,
        "options": repr(options),
        "images": [len(images.files), images.fingerprint, changed],
    }
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    path = folder / f"{key}.npy"
    found = agreement.run_on_rank0(lambda: _read_cache(path, about, len(images.files)))
    if found:
        return found
    encode = agreement.run_on_all_ranks(lambda: build_encoder(source, options, device))
    batches = _encoded(images.files, options, encode, workers, progress)
    bad: list[tuple[int, str]] = []
    problem = None
    if dist.get_rank() == 0:
        try:
            bad = _write(path, batches, len(images.files), about)
        except (OSError, ValueError) as error:
            problem = error
    for _ in batches:  # a rank that cannot write any more does not leave the others waiting
        pass

    def result() -> FeatureFile:
        if problem:
            raise problem
        return FeatureFile(str(path), bad)

    return agreement.run_on_rank0(result)


class Encoded(NamedTuple):
    """The features of one batch."""

    indices: list[int]  # of its images, in order,
    values: np.ndarray | None  # and their features (B, D); None where no image can be read
    bad: list[tuple[int, str]]


def _encoded(
    files: Any,
    options: FeatureOptions,
    encode: Callable[[Tensor], np.ndarray],
    workers: int,
    progress: Callable[[int], None],
) -> Iterator[Encoded]:
    """Encode all images, each rank its share; yield the batches in order, on rank 0 only.

    Collective: every rank must take all of them. AgreedError where one fails.
    """
    rank, world, total = dist.get_rank(), dist.get_world_size(), len(files)
    firsts = range(0, total, BATCH)
    mine = [i for first in firsts[rank::world] for i in range(first, min(first + BATCH, total))]
    loader = open_eval_loader(files, options.img_size, BATCH, workers, options.stats, indices=mine)

    def encode_next() -> Encoded:
        try:
            batch = next(loader, None)
        except LoaderFailed as error:
            raise OSError(str(error)) from error
        if batch is None:  # this rank has no more
            return Encoded([], None, [])
        values = encode(batch.images) if batch.indices else None
        return Encoded(batch.indices, values, batch.bad)

    for first in firsts[::world]:  # one batch of each rank: in the order of the images
        yield from agreement.gather_to_rank0(agreement.run_on_all_ranks(encode_next)) or []
        progress(min(first + world * BATCH, total))


def _read_cache(path: Path, about: dict[str, Any], rows: int) -> FeatureFile | None:
    """Find a feature file; None where there is none that is whole and of these images."""
    try:
        found = json.loads(path.with_suffix(".json").read_text())
        shape = np.load(path, mmap_mode="r").shape
        if found["about"] == about and shape == (rows, found["width"]):
            return FeatureFile(str(path), [(int(i), str(reason)) for i, reason in found["bad"]])
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None


def _write(
    path: Path, batches: Iterator[Encoded], total: int, about: dict[str, Any]
) -> list[tuple[int, str]]:
    """Write the rows of batches as they come, then the JSON file -> the unreadable images."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    bad: list[tuple[int, str]] = []
    width, waiting = 0, 0  # rows before the first readable image, whose width is not known yet
    try:
        with open(temporary, "wb") as file:  # not mapped: a full disk would end the process
            for indices, values, unreadable in batches:
                bad += unreadable
                order = sorted([*indices, *(i for i, _ in unreadable)])
                if values is None:
                    waiting += len(order)
                    continue
                if not width:
                    width = values.shape[1]
                    header = {"descr": "<f4", "fortran_order": False, "shape": (total, width)}
                    np.lib.format.write_array_header_1_0(file, header)
                rows = np.full((waiting + len(order), width), np.nan, np.float32)
                places = {index: waiting + place for place, index in enumerate(order)}
                rows[[places[index] for index in indices]] = values
                waiting = 0
                file.write(rows.data)
            if not width:
                raise ValueError(f"none of the {total} images can be read: {bad[0][1]}")
            file.write(np.full((waiting, width), np.nan, np.float32).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary.write_text(json.dumps({"about": about, "width": width, "bad": bad}))
        os.replace(temporary, path.with_suffix(".json"))
    finally:
        temporary.unlink(missing_ok=True)
    return bad
