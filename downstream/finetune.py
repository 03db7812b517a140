"""Fine-tune a pretrained encoder as a classifier, in any sharding mode, on any number of ranks.

Flags shared with train_fsdp.py keep their meaning, and its training loop is used, so that ranks,
log, checkpoints, bad steps and stops work alike. The same command continues an interrupted run.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import data
import mesh
import shard
from downstream.classifier import (
    Classifier,
    build_layerwise_adamw,
    drop_path_scales,
    initial_classifier_value,
    mix,
    seed_of,
    unit_classes,
)
from downstream.images import open_eval_loader
from downstream.pretrained import Pretrained, check_fits, read_pretrained
from runtime import image_source, process
from runtime.agreement import run_on_rank0
from runtime.config import FIELDS, Config, Parser, add_flags, flag, make_config, number, whole
from runtime.device_batches import Batch, open_batches
from runtime.log import open_log
from runtime.record import Monitor, versions
from runtime.resume import list_newest_first, resume
from runtime.run import Run, with_images
from runtime.session import Session, manual_gc, run_session
from train_fsdp import Training, train

HELP = "train the encoder, or its last blocks, as a classifier"
# Flags that only pretraining has, and those that all subcommands of probe.py have
LEFT_OUT = {
    *("model", "channels", "mask_ratio", "norm_pix_loss", "run_mode", "steps", "tensorboard"),
    *("profile", "dry_run", "world_size", "data", "eval_data", "init_from", "img_size", "device"),
}
# images (B, C, H, W) as loaded, labels (B,), scales of drop path (B, depth, 2) or None, the seed
# of MixUp and CutMix
MicroBatch = tuple[Tensor, Tensor, Tensor | None, int]


@dataclass(frozen=True)
class Tuning(Config):
    """The flags of fine-tuning: those of pretraining, a few with other defaults, and more."""

    blr: float = flag(5e-4, "lr = blr x global batch / 256", "result")
    epochs: int = flag(50, "passes over the data", "result")
    out: str = flag("finetuned", "log and checkpoints go here", group="output")
    test: str = flag(None, "images to score after each epoch", group="fine-tuning", required=True)
    freeze_blocks: int = flag(
        0, "first blocks to freeze, with the patch embedding and cls", "result", type=whole(0)
    )
    pool: Literal["mean", "cls"] = flag(
        "mean", "classify the mean of the patches, or cls", "result"
    )
    layer_decay: float = flag(
        0.65, "lr of a block, as a share of the next one's", "result", type=number(1e-3, 1)
    )
    drop_path: float = flag(
        0.1, "share of branches that the last block leaves out", "result", type=number(0, 0.99)
    )
    label_smoothing: float = flag(0.1, "of the cross-entropy", "result", type=number(0, 0.99))
    mixup: float = flag(0.0, "alpha of MixUp; 0: none", "result")
    cutmix: float = flag(0.0, "alpha of CutMix; 0: none", "result")


@dataclass(frozen=True)
class TuningRun(Run):
    """What follows from the flags, the ranks and the data."""

    config: Tuning
    classes: int = 0

    def flops_per_image(self, recomputed: bool = False) -> int | None:
        """Return None: the FLOPs of pretraining, which the log would show, are not those here."""
        return None

    def record(self) -> dict[str, Any]:
        """Return the flags and what follows; what is planned is a plain ViT on whole images."""
        return super().record() | {"encoder_only": True, "mask_ratio": 0.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this subcommand."""
    add_flags(parser, Tuning, LEFT_OUT)


@process.errors_name("probe.py")
def run(args: argparse.Namespace) -> int:
    """Fine-tune; return the exit status: 0 done or stopped, 1 failed, 2 refused."""
    received = process.collect()
    try:
        pretrained = read_pretrained(args.run)
        if Path(args.run).resolve().is_relative_to(Path(args.out).resolve()):
            raise ValueError(f"--out {args.out} holds the pretrained model: give another folder")
        depth, img_size = pretrained.config.depth, args.img_size or pretrained.img_size
        if args.freeze_blocks > depth:
            raise ValueError(f"--freeze-blocks {args.freeze_blocks}: the model has {depth} blocks")
        check_fits(pretrained, pretrained.config, img_size)
        image_source.check_folder(args.test, "--test", args.out)
    except (OSError, ValueError) as error:
        return process.usage_error(str(error))
    # the model of other code may have a shape of its own
    shape = ",".join(f"{name}={getattr(pretrained.config, name):d}" for name in FIELDS)
    known = {row.name: row.default for row in fields(Tuning)} | vars(args)
    known |= {"run_mode": "real", "model": pretrained.size or f"base:{shape}"}
    known |= {"channels": pretrained.config.channels}
    known |= {"img_size": img_size, "norm_pix_loss": pretrained.norm_pix_loss}
    parser = Parser(process.PROGRAM)
    config = make_config(parser, argparse.Namespace(**known), Tuning)
    return run_session(config, partial(run_tuning, pretrained), received)


# ---------------------------------------------------------------------------------------------
# One step


def label_parts(run: TuningRun, files: Any, rank: int, batch: Batch, step: int) -> list[MicroBatch]:
    """Give this rank's images of a step their labels, and what drop path leaves out of them.

    That is drawn from seed and position alone: the same on any number of ranks.
    """
    config, device = run.config, batch.parts[0][0].device
    drawn: list[Tensor | None] = [None] * config.accum
    labels = torch.tensor([int(files.labels[i]) for i in batch.image_ids], device=device)
    if config.drop_path:
        depth, frozen, images = run.model.depth, config.freeze_blocks, run.global_batch
        scales = drop_path_scales(config.drop_path, depth, frozen, images, config.seed, step)
        dealt = data.deal(0, images, run.local_batch, run.world_size)[:, rank]  # (accum, B)
        drawn = list(scales[torch.from_numpy(dealt)].to(device))
    images_of = (images for images, _ in batch.parts)
    seeds = [seed_of(config.seed, step, i) for i in range(config.accum)]
    return list(zip(images_of, labels.chunk(config.accum), drawn, seeds, strict=True))


def build_loss(run: TuningRun) -> Callable[[nn.Module, MicroBatch], Tensor]:
    """Make the function of a training step that computes the loss () of a micro-batch."""
    config = run.config

    def loss_of(model: nn.Module, part: MicroBatch) -> Tensor:
        pixels, labels, scales, seed = part
        images, targets = data.normalize(pixels, run.channel_stats), labels
        if config.mixup or config.cutmix:
            images, targets = mix(images, labels, run.classes, config.mixup, config.cutmix, seed)
        logits = model(images, scales).float()  # (B, classes)
        return F.cross_entropy(logits, targets, label_smoothing=config.label_smoothing)

    return loss_of


# ---------------------------------------------------------------------------------------------
# Scores


def classes_in(test: Any, train: Any) -> list[int]:
    """Return the number in training of each class of the test images; ValueError without one."""
    for what, files in ("--data", train), ("--test", test):
        if min(files.labels) < 0:
            raise ValueError(f"{what} {files.root} has images outside of a folder of their class")
    number_of = {name: i for i, name in enumerate(train.classes)}
    unknown = [name for name in test.classes if name not in number_of]
    if unknown:
        known = f"--data has {len(number_of)} classes: {', '.join(list(number_of)[:8])} ..."
        raise ValueError(f"--test {test.root} has a class {unknown[0]} without training: {known}")
    return [number_of[name] for name in test.classes]


@torch.no_grad()
def score(
    model: nn.Module, run: Run, session: Session, files: Any, numbers: list[int], workers: int
) -> dict[str, float]:
    """Classify the test images -> number, loss, top-1, top-5; the same on any ranks. Collective.

    `numbers` are those of `classes_in`. Images that cannot be read are left out.
    """
    device, world, side = session.device, run.world_size, run.config.img_size
    mine = range(session.ranks.rank, len(files), world)
    stats, size = run.channel_stats, run.local_batch
    batches = open_eval_loader(files, side, size, workers, stats, mine)
    number_of = torch.tensor(numbers, device=device)
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    # every rank calls the model equally often: each call gathers parameters from all
    for _ in range(math.ceil(math.ceil(len(files) / world) / size)):
        session.heartbeat("scoring")
        batch = next(batches, None)
        found = batch if batch and batch.indices else None
        images = found.images if found else torch.zeros(1, run.model.channels, side, side)
        with shard.autocast(model, device, run.dtype):
            logits = model(data.normalize(images.to(device), stats)).float()  # (B, classes)
        if found:
            labels = number_of[found.labels.to(device)]  # (B,)
            hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # (B, 5)
            losses = F.cross_entropy(logits, labels, reduction="none")
            counted = torch.ones_like(losses), losses, hits[:, 0], hits.any(dim=1)
            sums += torch.stack([values.double().sum() for values in counted])
    dist.all_reduce(sums)
    read, *totals = sums.tolist()
    means = [total / max(read, 1) for total in totals]
    return {"test_images": int(read)} | dict(zip(("test_loss", "top1", "top5"), means, strict=True))


@dataclass
class Scores:
    """Score a model on the test images after the last step of each epoch."""

    run: TuningRun
    session: Session
    model: nn.Module
    files: Any
    numbers: list[int]  # as of `classes_in`
    workers: int
    scores: dict[str, float] = field(default_factory=dict)

    def due(self, step: int, saved: bool) -> bool:
        """Tell whether an epoch ends after so many steps."""
        return step % self.run.epoch_steps == 0

    def __call__(self, step: int) -> None:
        """Log the scores after so many steps. Collective."""
        log = self.session.log
        self.scores = score(
            self.model, self.run, self.session, self.files, self.numbers, self.workers
        )
        log.write("scores", step=step, **self.scores)
        text = "test loss {test_loss:.4f}, top-1 {top1:.2%}, top-5 {top5:.2%}"
        log.say(f"epoch {step // self.run.epoch_steps}: {text.format(**self.scores)}")


# ---------------------------------------------------------------------------------------------
# The run


def build_meta_classifier(run: TuningRun) -> Classifier:
    """Build the classifier on the meta device: shapes without memory."""
    c = run.config
    with torch.device("meta"):
        return Classifier(run.model, c.img_size, run.classes, c.pool, c.freeze_blocks)


def shard_classifier(
    model: nn.Module, run: TuningRun, pretrained: Pretrained, device: torch.device, new: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard the meta model; return it with pretrained values and its optimizer. Collective.

    Where it is not `new`, a checkpoint has to give it its values.
    """
    config, mode, frozen = run.config, str(run.config.mode), run.config.freeze_blocks
    decay = shard.weight_decay_names(model)
    model = shard.apply(
        model,
        mode,
        mesh.build_mesh(run.mesh_shape, device),
        block_classes=unit_classes(frozen),
        values=partial(initial_classifier_value, pretrained, config.seed)
        if new
        else shard.undefined,
        options=run.sharding_options(),
    )
    optimizer = build_layerwise_adamw(
        model,
        mode,
        decay,
        depth=run.model.depth,
        layer_decay=config.layer_decay,
        lr=run.lr,
        weight_decay=config.weight_decay,
    )
    return model, optimizer


def run_tuning(pretrained: Pretrained, plain_run: Run, session: Session) -> str | None:
    """Make one run, on every rank; return an error message where it has failed."""
    config: Any = plain_run.config
    ranks, device = session.ranks, session.device
    session.lock_folder(config.out)
    files, found = image_source.share_images(config, plain_run.global_batch)
    test_files = image_source.share_eval_images(replace(config, eval_data=config.test))
    session.log = log = open_log(config.out)
    numbers = run_on_rank0(partial(classes_in, test_files, files))
    # normalised as in pretraining, whatever the mean of these images is
    found["channel_stats"] = pretrained.stats
    plain_run = run_on_rank0(partial(with_images, plain_run, **found))
    run = TuningRun(**vars(plain_run), classes=len(files.classes))

    saved = list_newest_first(run, log.say)
    meta = build_meta_classifier(run)
    trained = sum(p.numel() for p in meta.parameters() if p.requires_grad)
    model, optimizer = shard_classifier(meta, run, pretrained, device, new=not saved)
    scaler = shard.build_scaler(model, device, run.dtype)
    saves = resume(saved, run, session, model, optimizer, scaler)
    if saves.begin >= run.steps:
        saves.report_finished()
        return None
    session.where_saved = saves.where

    loaded = open_batches(run, session, files, range(saves.begin, run.steps))
    batches = (
        replace(batch, parts=cast(Any, label_parts(run, files, ranks.rank, batch, step)))
        for step, batch in enumerate(loaded, saves.begin)
    )
    monitor = Monitor(run, session, files, saves)
    start = run.record() | {"lr": run.lr, "epoch_steps": run.epoch_steps, "begin": saves.begin}
    start |= {"pretrained": pretrained.name, "trained_parameters": trained}
    log.begin(run, device, saves.begin)
    log.write("start", **start, versions=versions())
    log.say(f"{pretrained.name}: {trained:,} parameters train; {run.classes} classes")
    monitor.evaluation = Scores(run, session, model, test_files, numbers, loaded.workers)
    training = Training(model, optimizer, scaler, build_loss(run), run.dtype, config.clip)
    with manual_gc():
        ended = train(run, session, training, monitor, batches, saves)
    monitor.end_record = monitor.evaluation.scores
    return monitor.finish(saves, ended)
