"""Images for evaluation: each once, in order, cut out and masked in the same way every time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

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
    top = (height - side) // 2
    left = (width - side) // 2
    return top, left, side, side


def fixed_noise(seed: int, indices: Sequence[int], patches: int) -> Tensor:
    """Draw the masking noise (B, L) of images from the seed and their indices alone."""
    rows: list[Tensor] = []
    for index in indices:
        noise, _, _ = data.draw_augmentation(seed, index, patches, 1, 1)
        rows.append(noise)
    return torch.stack(rows)


@dataclass(eq=False)
class EvalImages(Dataset[EvalBatch]):
    """Load an `EvalBatch` by the indices of its images; for `exact` see `data.crop_and_resize`.

    An error that is not the file's fault, such as one of a failing disk, is raised, or, with
    `any_error`, leaves out the image like any other.
    """

    files: data.ImageSource
    img_size: int
    stats: data.ChannelStats
    exact: bool = False
    any_error: bool = False

    def __getitem__(self, indices: Sequence[int]) -> EvalBatch:
        """Read, decode and crop images, without augmentation; say why one is left out."""
        good: dict[int, Tensor] = {}
        bad: dict[int, str] = {}
        for index in indices:
            try:
                content = self.files.read(index)
                image, (width, height) = data.open_image(content, self.stats)
                crop = centre_crop(width, height)
                exact = self.exact or not isinstance(content, bytes)  # as in data.Images.load
                good[index] = data.crop_and_resize(image, crop, self.img_size, exact)
            except Exception as error:  # Pillow raises many kinds for a broken file
                if not self.any_error and not data.is_file_error(error):
                    raise
                bad[index] = data.describe_file_error(error)
        images = torch.empty(0)
        if good:
            images = torch.stack([*good.values()])
        return EvalBatch(images, [*good], bad)


def open_eval_loader(
    files: data.ImageSource,
    img_size: int,
    batch: int,
    workers: int,
    stats: data.ChannelStats = data.IMAGENET,
    *,
    exact: bool = False,
    any_error: bool = False,
    share: tuple[int, int] = (0, 1),
) -> Iterator[EvalBatch]:
    """Yield all images in order, up to `batch` in a batch.

    The ranks take batches in turn; `share` is (rank, number of ranks). The last batch of a rank may
    be empty, so that all ranks have the same number of them. An image that cannot be read, or does
    not fit `stats`, is left out and listed in the batch; `any_error` as in `EvalImages`.
    """
    rank, ranks = share
    batches = [*BatchSampler(range(len(files)), batch, drop_last=False)]
    while len(batches) % ranks:
        batches.append([])
    context = process.fork_server() if workers else None
    yield from DataLoader(
        EvalImages(files, img_size, stats, exact, any_error),
        batch_size=None,  # a sample is a batch
        sampler=batches[rank::ranks],
        num_workers=workers,
        multiprocessing_context=context,
        worker_init_fn=process.start_worker,
        generator=torch.Generator(),  # without it, it would draw from the global one
    )
