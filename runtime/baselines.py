"""Baselines: the losses that a model has to beat."""

import torch
import torch.distributed as dist
from torch import Tensor

import data
import vit
from runtime.device_batches import Batch
from runtime.run import Run


def losses_of_guesses(run: Run, images: Tensor, mask: Tensor) -> Tensor:
    """Compute what a model has to beat (2, B): the losses of predicting zero and a mean colour.

    The colour, one number per channel, is the mean of the patches that the image shows, as the loss
    sees them: with --norm-pix-loss each is normalised before, so that zero is its own mean grey.
    `images` (B, C, H, W) are normalised; of the `mask` (B, L) 1 is removed.
    """
    size, norm_pix = run.model.patch, run.config.norm_pix_loss
    target = vit.reconstruction_target(vit.patchify(images, size), norm_pix)  # (B, L, P*P*C)
    shown = (1 - mask)[..., None] / (1 - mask[0]).sum()  # all images show equally many
    pixels = (target * shown).sum(1, keepdim=True).unflatten(-1, (-1, images.shape[1]))
    colour = pixels.mean(2).repeat(1, 1, size**2)  # (B, 1, P*P*C), the same for each patch
    guesses = torch.zeros_like(colour), colour
    return torch.stack([vit.loss_of_each(images, g, mask, size, norm_pix) for g in guesses])


def baselines(run: Run, batch: Batch) -> dict[str, float]:
    """Average `losses_of_guesses` over a step's batch of all ranks, with its masks. Collective."""
    losses, kept = [], vit.kept_patches(run.patches, run.config.mask_ratio)
    for images, noise in batch.parts:
        images = data.normalize(images, run.channel_stats or data.IMAGENET)
        mask = (noise.argsort(1).argsort(1) >= kept).float()  # as of `ViTMAE.forward`
        losses.append(losses_of_guesses(run, images, mask).mean(1))
    mean = torch.stack(losses).mean(0) / run.world_size
    dist.all_reduce(mean)
    return dict(zip(("loss_of_zero", "loss_of_mean_colour"), mean.tolist(), strict=True))
