"""Images for evaluation: each once, in order, cut out and masked in the same way every time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import data
from runtime import process


class EvalBatch(NamedTuple):
    """The next images in order, without those that cannot be read: B may be 0."""

    images: Tensor  # (B, C, H, W) uint8 or float32, as loaded: not normalised; or (0,)
    indices: list[int]  # B, of the images in the data set
    bad: dict[int, str]  # index: reason, of each image that is left out


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
class EvalImages(Dataset[EvalBatch]):
    """Batches by the indices of their images; `exact` as in `data.crop_and_resize`."""

    files: data.ImageSource
    img_size: int
    stats: data.ChannelStats
    exact: bool = False

    def __getitem__(self, indices: Sequence[int]) -> EvalBatch:
        """Read, decode and crop images, without augmentation; say why where it is not possible."""
        good, bad = dict[int, Tensor](), dict[int, str]()
        for index in indices:
            try:
                image, size = data.open_image(self.files.read(index), self.stats)
                crop = centre_crop(*size)
                good[index] = data.crop_and_resize(image, crop, self.img_size, self.exact)
            except Exception as error:  # Pillow raises many kinds for a broken file
                bad[index] = f"{type(error).__name__}: {error}"
        images = torch.stack([*good.values()]) if good else torch.empty(0)
        return EvalBatch(images, [*good], bad)


def open_eval_loader(
    files: data.ImageSource,
    img_size: int,
    batch: int,
    workers: int,
    stats: data.ChannelStats = data.IMAGENET,
    *,
    exact: bool = False,
    share: tuple[int, int] = (0, 1),
) -> Iterator[EvalBatch]:
    """Yield all images in order, up to `batch` in a batch.

    The batches are dealt to ranks in turn, and a `share` is (rank, number of ranks); its last batch
    may be empty, so that all have equally many. An image that cannot be read, or does not fit
    `stats`, is left out and listed in the batch.
    """
    rank, ranks = share
    batches: list[Any] = [some.tolist() for some in torch.arange(len(files)).split(batch)]
    batches += [[]] * (-len(batches) % ranks)
    yield from DataLoader(
        EvalImages(files, img_size, stats, exact),
        batch_size=None,  # a sample is a batch
        sampler=batches[rank::ranks],
        num_workers=workers,
        multiprocessing_context=process.fork_server() if workers else None,
        worker_init_fn=process.start_worker,
        generator=torch.Generator(),  # or it would draw from the global one
    )
