"""Evaluate a model on held-out images, all ranks together; the losses that it has to beat.

Pretraining does so after each save and after the last step, but not when a signal stops the run. It
takes each image of --eval-data that matches --include and --exclude once. The numbers are the same
for any mode and any number of ranks: an image's crop is its centre, its mask depends only on the
seed and its index, and the losses of single images (`vit.loss_per_image`) are summed over all ranks
and divided by their number.
"""

from dataclasses import dataclass
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
from runtime.device_batches import Batch, worker_count
from runtime.eval_images import fixed_noise, open_eval_loader
from runtime.image_source import check_same_pack, list_eval_images
from runtime.run import Run
from runtime.session import Session

ASK_EVERY = 5  # batches between two questions whether a signal asks some rank to stop


def baseline_losses(run: Run, images: Tensor, mask: Tensor) -> Tensor:
    """Compute what a model has to beat (2, B): the losses of predicting zero and a mean colour.

    The colour, one number per channel, is the mean of the visible patches, as the loss sees them:
    with --norm-pix-loss each patch is normalised first, so zero stands for its own mean grey.
    `images` (B, C, H, W) are normalised; `mask` (B, L) is 1 for a removed patch.
    """
    patch = run.vit_config.patch
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


@dataclass
class Evaluation:
    """Evaluate a model on the images of --eval-data, all ranks together.

    Another evaluation has its own `values_of` and `report`.
    """

    run: Run
    session: Session
    model: nn.Module
    files: Any

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        """Report the means over all images after training `step` steps. Collective.

        All ranks call the model equally often, on whole local batches. Images that cannot be read
        are left out, named and counted; if none can be read, nothing is reported. A signal ends
        this early, so that the run saves in time, unless all steps are trained, and saved.
        """
        run = self.run
        config = run.config
        device = self.session.device
        stats = run.pixel_stats
        size = run.local_batch
        loader = open_eval_loader(
            self.files,
            config.img_size,
            size,
            worker_count(config.workers, self.session.ranks),
            stats,
            exact=config.exact_decode,
            any_error=True,  # a momentary disk error must not end training
            share=(self.session.ranks.rank // config.tp, run.data_ranks),
        )
        # A rank that runs out of images calls the model again on its previous batch.
        shape = (size, run.vit_config.channels, config.img_size, config.img_size)
        images = torch.zeros(shape, device=device)
        sums = torch.zeros((), dtype=torch.float64, device=device)
        bad: list[tuple[int, str]] = []
        self.model.eval()
        for number, batch in enumerate(loader):
            self.session.heartbeat("evaluating", step - 1)
            if number % ASK_EVERY == 0 and step < run.steps and self.asked_to_stop():
                self.model.train()
                self.session.log.warn(f"asked to stop: step {step} is not evaluated")
                return
            bad += batch.bad.items()
            count = len(batch.indices)
            if count:
                images[:count] = data.normalize(batch.images.to(device), stats)
            values = self.values_of(images, batch.indices + [0] * (size - count))[:, :count]
            sums = sums + F.pad(values.double().sum(1), (1, 0), value=count)  # (1 + V,)
        self.model.train()
        dist.all_reduce(sums)
        self.name_bad(bad)
        if sums[0] > 0:  # the ranks of a tensor-parallel group have the same images
            self.report(step, int(sums[0]) // config.tp, (sums[1:] / sums[0]).tolist())

    def asked_to_stop(self) -> bool:
        """Tell whether a signal asks some rank to stop. Collective."""
        asked = torch.tensor(float(bool(self.session.signals)), device=self.session.device)
        dist.all_reduce(asked)
        return asked.item() > 0

    def name_bad(self, bad: list[tuple[int, str]]) -> None:
        """Name the images that some rank could not read. Collective."""
        every = gather_to_rank0(bad) or []  # rank 0 names them
        left_out = {image for found in every for image in found}
        if left_out:
            some = ", ".join(f"{self.files.path(i)} ({why})" for i, why in sorted(left_out)[:5])
            count = f"{len(left_out)} of {len(self.files)} held-out images"
            self.session.log.warn(f"{count} cannot be read: {some}")

    def values_of(self, images: Tensor, indices: list[int]) -> Tensor:
        """Compute V values of each normalised image (B, C, H, W) -> (V, B). Collective.

        Here they are the loss of the model and the two of `baseline_losses`.
        """
        run = self.run
        config = run.config
        device = self.session.device
        noise = fixed_noise(config.seed, indices, run.patches).to(device)
        with shard.autocast(self.model, device, run.dtype):
            _, prediction, mask = self.model(images, config.mask_ratio, noise)
        patch = run.vit_config.patch
        losses = vit.loss_per_image(images, prediction, mask, patch, config.norm_pix_loss)
        return torch.cat([losses[None], baseline_losses(run, images, mask)])

    def report(self, step: int, count: int, means: list[float]) -> None:
        """Log the means (V) of `values_of` over so many images."""
        log = self.session.log
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


def open_evaluation(run: Run, session: Session, model: nn.Module) -> Evaluation | None:
    """Return the evaluation of --eval-data; None without it, or if nothing is saved. Collective."""
    folder = run.config.eval_data
    if folder is None or run.config.run_mode != "real":
        return None
    files = run_on_rank0(partial(list_eval_images, folder, run.config))
    check_same_pack(files)
    return Evaluation(run, session, model, files)
