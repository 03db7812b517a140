"""Evaluate a model on held-out images, all ranks together; the loss of --eval-data.

The numbers are the same for any mode and any number of ranks: crop and mask of an image depend on
the seed and its index alone, and the values of single images are summed over all ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import data
import shard
import vit
from runtime.agreement import gather_to_rank0, run_on_rank0
from runtime.baselines import baseline_losses
from runtime.device_batches import worker_count
from runtime.eval_images import fixed_noise, open_eval_loader
from runtime.image_source import list_eval_images
from runtime.run import Run
from runtime.session import Session


@torch.no_grad()
def average_over(
    files: Any,
    run: Run,
    session: Session,
    model: nn.Module,
    step: int,
    values_of: Callable[[Tensor, list[int]], Tensor],
) -> tuple[int, list[float]]:
    """Average the values of all images of `files` -> number of images, means (V,). Collective.

    `values_of` calls the model on normalised images (B, C, H, W) with these indices, and returns
    their values (V, B). All ranks call it equally often, on whole local batches, after
    training `step` steps. Images that cannot be read are left out, named and counted.
    """
    config = run.config
    device = session.device
    stats = run.pixel_stats
    size = run.local_batch
    loader = open_eval_loader(
        files,
        config.img_size,
        size,
        worker_count(config.workers, session.ranks),
        stats,
        exact=config.exact_decode,
        any_error=True,  # no disk that fails for a moment ends a training run
        share=(session.ranks.rank // config.tp, run.data_ranks),
    )
    # a rank with fewer images than the others calls the model on those of the batch before
    images = torch.zeros(size, run.model.channels, config.img_size, config.img_size, device=device)
    sums = torch.zeros((), dtype=torch.float64, device=device)
    bad: list[tuple[int, str]] = []
    model.eval()
    for batch in loader:
        session.heartbeat("evaluating", step - 1)
        bad += batch.bad.items()
        count = len(batch.indices)
        if count:
            images[:count] = data.normalize(batch.images.to(device), stats)
        values = values_of(images, batch.indices + [0] * (size - count))[:, :count]
        sums = sums + F.pad(values.double().sum(1), (1, 0), value=count)  # (1 + V,)
    model.train()
    dist.all_reduce(sums)
    # the ranks of a tensor-parallel group have the same images, and the same bad ones
    left_out: set[tuple[int, str]] = set()
    every = gather_to_rank0(bad)
    if every:  # on rank 0
        left_out.update(*every)
    if left_out:
        first = sorted(left_out)[:5]
        some = ", ".join(f"{files.path(i)} ({why})" for i, why in first)
        session.log.warn(f"{len(left_out)} of {len(files)} held-out images cannot be read: {some}")
    return int(sums[0]) // config.tp, (sums[1:] / sums[0]).tolist()


class Evaluation:
    """Evaluate a model on the images of --eval-data, all ranks together."""

    def __init__(self, run: Run, session: Session, model: nn.Module) -> None:
        """List the images; AgreedError where there are none. Collective."""
        self.run = run
        self.session = session
        self.model = model
        folder = str(run.config.eval_data)
        self.files = run_on_rank0(partial(list_eval_images, folder, run.config.out, run.config))

    def __call__(self, step: int) -> None:
        """Log the mean loss after so many steps, where an image can be read. Collective."""
        log = self.session.log
        count, means = average_over(
            self.files, self.run, self.session, self.model, step, self.losses_of
        )
        if count:
            loss, zero, colour = means
            log.write(
                "eval",
                step=step,
                eval_loss=loss,
                loss_of_zero=zero,
                loss_of_mean_colour=colour,
                images=count,
            )
            log.say(
                f"evaluation: loss {loss:.4f} (predicting zero {zero:.4f}, the mean colour of the "
                f"visible patches {colour:.4f}) over {count} of {len(self.files)} images"
            )

    def losses_of(self, images: Tensor, indices: list[int]) -> Tensor:
        """Compute the losses (3, B) of the model and of `baseline_losses`. Collective."""
        run = self.run
        config = run.config
        device = self.session.device
        noise = fixed_noise(config.seed, indices, run.patches).to(device)
        with shard.autocast(self.model, device, run.dtype):
            _, prediction, mask = self.model(images, config.mask_ratio, noise)
        losses = vit.loss_per_image(images, prediction, mask, run.model.patch, config.norm_pix_loss)
        return torch.cat([losses[None], baseline_losses(run, images, mask)])
