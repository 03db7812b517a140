"""Baselines: the losses that a model has to beat."""

import torch
import torch.distributed as dist
from torch import Tensor

import data
import vit
from runtime.device_batches import Batch
from runtime.run import Run


def baseline_losses(run: Run, images: Tensor, mask: Tensor) -> Tensor:
    """Compute what a model has to beat (2, B): the losses of predicting zero and a mean colour.

    The colour, one number per channel, is the mean of the patches that the image shows, as the loss
    sees them: with --norm-pix-loss each is normalised before, so that zero is its own mean grey.
    `images` (B, C, H, W) are normalised; of the `mask` (B, L) 1 is removed.
    """
    patch = run.model.patch
    norm_pix = run.config.norm_pix_loss
    target = vit.reconstruction_target(vit.patchify(images, patch), norm_pix)  # (B, L, P*P*C)
    shown = (1 - mask)[..., None] / (1 - mask[0]).sum()  # all images show equally many
    mean_patch = (target * shown).sum(1, keepdim=True)  # (B, 1, P*P*C)
    mean_pixels = mean_patch.unflatten(-1, (-1, images.shape[1]))  # (B, 1, P*P, C)
    mean_colour = mean_pixels.mean(2).repeat(1, 1, patch**2)  # (B, 1, P*P*C), alike in all patches
    zero = torch.zeros_like(mean_colour)
    loss_of_zero = vit.loss_per_image(images, zero, mask, patch, norm_pix)
    loss_of_mean_colour = vit.loss_per_image(images, mean_colour, mask, patch, norm_pix)
    return torch.stack([loss_of_zero, loss_of_mean_colour])


def average_baselines(run: Run, batch: Batch) -> dict[str, float]:
    """Average `baseline_losses` over a step's batch of all ranks, with its masks. Collective."""
    stats = run.pixel_stats
    losses = []
    for images, noise in batch.micro_batches:
        _, mask = vit.random_masking(noise, run.config.mask_ratio)
        found = baseline_losses(run, data.normalize(images, stats), mask)  # (2, B)
        losses.append(found.mean(1))
    mean = torch.stack(losses).mean(0) / run.world_size
    dist.all_reduce(mean)
    loss_of_zero, loss_of_mean_colour = mean.tolist()
    return {"loss_of_zero": loss_of_zero, "loss_of_mean_colour": loss_of_mean_colour}
