"""--eval-data: the loss over held-out images, and what the model fills in, at every save.

The number is the same for any mode and any number of ranks: crop and mask of an image depend on the
seed and its index alone, and the losses of single images are summed over all ranks.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import data
import shard
import vit
from downstream.images import EvalBatch, fixed_noise, open_eval_loader
from downstream.reconstruct import draw_rows, reconstructions
from runtime.agreement import gather_to_rank0
from runtime.device_batches import LoaderFailed, worker_count
from runtime.image_source import EVAL_FOLDER, share_eval_images
from runtime.record import losses_of_guesses
from runtime.run import Run
from runtime.session import Session
from storage.safe_files import replacing

PICTURED = 8  # images of a picture, where a local batch has so many


class Evaluation:
    """Evaluate a model on the images of --eval-data, all ranks together."""

    def __init__(self, run: Run, session: Session, model: nn.Module) -> None:
        """List the images; AgreedError where there are none. Collective."""
        self.run, self.session, self.model = run, session, model
        self.stats = run.channel_stats or data.IMAGENET
        self.folder = os.path.join(run.config.out, EVAL_FOLDER)
        self.files = share_eval_images(run.config)
        # shuffled, so that the first ones are of many classes
        self.order = np.random.default_rng(run.config.seed).permutation(len(self.files))

    def __call__(self, step: int) -> None:
        """Log the mean loss after so many steps, and draw the first images. Collective.

        Unreadable images are left out; without any other there is no result.
        """
        start, log, device = time.perf_counter(), self.session.log, self.session.device
        # images; losses of the model, of predicting zero, of the mean colour
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        first: tuple[EvalBatch, Tensor, Tensor] | None = None
        bad: list[tuple[int, str]] = []
        self.model.eval()
        for batch in self.batches():
            self.session.heartbeat("evaluating", step - 1)
            losses, prediction, mask = self.forward(batch)
            sums += torch.cat([losses.new_tensor([losses.shape[1]]), losses.sum(1)])
            bad += batch.bad
            first = first or ((batch, prediction, mask) if batch.indices else None)
        self.model.train()
        dist.all_reduce(sums)
        left_out = sorted({pair for found in gather_to_rank0(bad) or [] for pair in found})
        for index, reason in left_out[:1]:
            what = f"such as {self.files.path(index)} ({reason})"
            log.warn(f"{len(left_out)} unreadable images left out of the evaluation, {what}")
        count = int(sums[0]) // self.run.config.tp  # its ranks had the same images
        used, seconds = f"{count} of {len(self.files)} images", time.perf_counter() - start
        if not count:
            log.warn(f"no evaluation: {used} can be read")
            return
        loss, zero, colour = (sums[1:] / sums[0]).tolist()
        found = {"eval_loss": loss, "loss_of_zero": zero, "loss_of_mean_colour": colour}
        log.write("eval", step=step, **found, images=count, seconds=seconds)
        log.say(
            f"evaluation: loss {loss:.4f} (predicting zero {zero:.4f}, the mean colour of the "
            f"visible patches {colour:.4f}) over {used}, in {seconds:.1f} s"
        )
        if self.session.ranks.rank == 0 and first:
            self.save_picture(step, loss, *first)

    def batches(self) -> Iterator[EvalBatch]:
        """Yield the batches of this rank; empty ones at the end, so that all have equally many."""
        run, ranks, size = self.run, self.session.ranks, self.run.local_batch
        order, side = self.order.tolist(), run.config.img_size
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        own = parts[run.data_rank(ranks.rank) :: run.data_ranks]
        workers, nothing = worker_count(run.config.workers, ranks), torch.empty(0)
        indices = [index for part in own for index in part]
        options: Any = {"indices": indices, "exact": run.config.exact_decode}
        loader = open_eval_loader(self.files, side, size, workers, self.stats, **options)
        for i in range(-(-len(parts) // run.data_ranks)):
            bad: list[tuple[int, str]] = []
            batch = None
            try:
                batch = next(loader, None)
            except LoaderFailed as error:  # and has no more: training needs none of its images
                bad = [(index, str(error)) for part in own[i:] for index in part]
            yield batch or EvalBatch(nothing, nothing, [], bad)

    @torch.no_grad()
    def forward(self, batch: EvalBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses (3, B), predictions (B, L, P*P*C) and mask (B, L) of a batch. Collective.

        The losses are those of the model and of `losses_of_guesses`. The model sees a whole local
        batch even of no image: all ranks take part in its collectives.
        """
        run, device = self.run, self.session.device
        c, side, count = run.model, run.config.img_size, len(batch.indices)
        x = torch.zeros(run.local_batch, c.channels, side, side, device=device)
        noise = torch.zeros(run.local_batch, run.patches, device=device)
        if count:
            x[:count] = data.normalize(batch.images.to(device), self.stats)
            noise[:count] = fixed_noise(run.config.seed, batch.indices, run.patches)
        with shard.autocast(self.model, device, run.dtype):
            _, prediction, mask = self.model(x, run.config.mask_ratio, noise)
        losses = vit.loss_of_each(x, prediction, mask, c.patch, run.config.norm_pix_loss)
        losses = torch.cat([losses[None], losses_of_guesses(run, x, mask)])
        return losses[:, :count], prediction[:count], mask[:count]

    def save_picture(
        self, step: int, loss: float, batch: EvalBatch, prediction: Tensor, mask: Tensor
    ) -> None:
        """Write the picture of the first images to OUT/eval."""
        run, log, norm_pix = self.run, self.session.log, self.run.config.norm_pix_loss
        images, predicted, masked = (x[:PICTURED] for x in (batch.images, prediction, mask))
        patch, stats = run.model.patch, self.stats
        panels = reconstructions(images, predicted, masked, patch, norm_pix, stats)
        paths = [self.files.path(i) for i in batch.indices[:PICTURED]]
        names = [os.path.relpath(path, self.files.root) for path in paths]
        title = f"step {step}, {run.config.mask_ratio:.0%} of the patches removed, loss {loss:.4f}"
        picture = draw_rows(panels, names, title)
        try:
            os.makedirs(self.folder, exist_ok=True)
            with replacing(os.path.join(self.folder, f"step_{step:08d}.png")) as file:
                picture.save(file, "PNG", optimize=True)
        except OSError as error:  # a full disk: the run does not end for want of a picture
            log.warn(f"the picture of step {step} cannot be written: {error}")
