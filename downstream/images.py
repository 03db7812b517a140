"""Images for evaluation: each once, in order, cut out and masked in the same way every time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import data
from runtime import process

Sample = tuple[int, Tensor | str]  # index, pixels (C, H, W) or why there are none


class EvalBatch(NamedTuple):
    """The next images in order, without those that cannot be read: B may be 0."""

    images: Tensor  # (B, C, H, W) uint8 or float32, as loaded: not normalised; or (0,)
    indices: list[int]  # B, of the images in the data set
    bad: list[tuple[int, str]]  # (index, reason) of each image that is left out


def centre_crop(width: int, height: int) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) in pixels: the centre with 224/256 of the shorter side.

    The same as resizing that side to 256 and cutting out 224, as ImageNet's evaluations do.
    """
    side = max(1, round(min(width, height) * 224 / 256))
    return (height - side) // 2, (width - side) // 2, side, side


def fixed_noise(seed: int, indices: Sequence[int], patches: int) -> Tensor:
    """Draw the masking noise (B, L) of images from the seed and their indices alone."""
    return torch.stack([data.draw_augmentation(seed, i, patches, 1, 1)[0] for i in indices])


@dataclass(eq=False)
class EvalImages(Dataset[Sample]):
    """Images by index, without augmentation; `exact` as in `data.crop_and_resize`."""

    files: data.ImageSource
    img_size: int
    stats: data.ChannelStats
    exact: bool = False

    def __getitem__(self, index: int) -> Sample:
        """Read, decode and crop an image; raises only what is not the file's own error."""
        try:
            content = self.files.read(index)
            image, size = data.open_image(content, self.stats)
            exact = self.exact or not isinstance(content, bytes)
            return index, data.crop_and_resize(image, centre_crop(*size), self.img_size, exact)
        except Exception as error:  # Pillow raises many kinds for a broken file
            return index, data.file_fault(error)

    def collate(self, samples: list[Sample]) -> EvalBatch:
        """Stack the images that could be read."""
        good = {index: x for index, x in samples if isinstance(x, Tensor)}
        bad = [(index, x) for index, x in samples if isinstance(x, str)]
        images = torch.stack([*good.values()]) if good else torch.empty(0)
        return EvalBatch(images, [*good], bad)


def open_eval_loader(
    files: data.ImageSource,
    img_size: int,
    batch: int,
    workers: int,
    stats: data.ChannelStats = data.IMAGENET,
    *,
    indices: Sequence[int] | None = None,
    exact: bool = False,
    share: tuple[int, int] = (0, 1),
    skip_failed: bool = False,
) -> Iterator[EvalBatch]:
    """Yield the images `indices` (default: all) in this order, up to `batch` in a batch.

    The batches are dealt to ranks in turn, and a `share` is (rank, number of ranks); its last batch
    may be empty, so that all have equally many. An image that is broken, or does not fit `stats`,
    is left out and listed in the batch. Raises OSError where a disk or a worker process fails;
    with `skip_failed` the rest of the share is left out instead.
    """
    rank, ranks = share
    images, order = EvalImages(files, img_size, stats, exact), indices or range(len(files))
    batches: list[Any] = [order[i : i + batch] for i in range(0, len(order), batch)]
    batches += [[]] * (-len(batches) % ranks)
    rest = batches[rank::ranks]
    try:
        for loaded in DataLoader(
            images,
            batch_sampler=[*rest],
            num_workers=workers,
            collate_fn=images.collate,
            multiprocessing_context=process.fork_server() if workers else None,
            worker_init_fn=process.start_worker,
            generator=torch.Generator(),  # or it would draw from the global one
        ):
            del rest[0]
            yield loaded
    except (OSError, RuntimeError, EOFError, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}"
        if not skip_failed:
            raise OSError(reason) from error
        for unread in rest:
            yield images.collate([(index, reason) for index in unread])
