"""Fine-tune a pretrained encoder as a classifier, in any sharding mode, on any number of ranks.

Flags shared with train_fsdp.py keep their meaning, and its training loop is used, so ranks, log,
checkpoints, bad steps and stops work alike. The same command continues an interrupted run.
Shapes: B images, L patches, D width, as in vit.py.
"""

import argparse
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
import mesh
import shard
import vit
from downstream.scores import class_numbers
from runtime import image_source, process
from runtime.agreement import run_on_all_ranks, run_on_rank0
from runtime.config import (
    RESULT,
    Config,
    Parser,
    add_flags,
    flag,
    make_config,
    number,
    pair_below_one,
)
from runtime.device_batches import Batch, open_batches
from runtime.evaluation import Evaluation
from runtime.monitor import Monitor
from runtime.pretrained import Pretrained, read_pretrained, say_assumed, value_of
from runtime.resume import list_newest_first, resume
from runtime.run import Run, with_images
from runtime.session import Session, manual_gc, run_session
from runtime.start_record import versions
from storage.classes import describe_classes
from train_fsdp import Training, train

HELP = "train the encoder as a classifier"
# Flags of train_fsdp.py that make sense only in pretraining, or that probe.py itself defines.
LEFT_OUT = {
    "channels",
    "data",
    "device",
    "dry_run",
    "eval_data",
    "img_size",
    "init_from",
    "machine",
    "mask_ratio",
    "model",
    "norm_pix_loss",
    "profile",
    "run_mode",
    "steps",
    "tensorboard",
    "tp",
    "world_size",
}


@dataclass(frozen=True)
class Tuning(Config):
    """The flags of fine-tuning: those of pretraining, a few with other defaults, and more."""

    default_blr: ClassVar[float] = 5e-4
    blr: float | None = flag(None, "lr = blr x global batch / 256 (default 5e-4)", RESULT)
    betas: tuple[float, float] = flag((0.9, 0.999), "of AdamW", RESULT, type=pair_below_one)
    epochs: int = flag(50, "passes over the data", RESULT)
    out: str = flag("finetuned", "log and checkpoints go here", group="output")
    test: str = flag(None, "images to score after each epoch", group="fine-tuning", required=True)
    layer_decay: float = flag(0.65, "lr: block / next block", RESULT, type=number(1e-3, 1))
    label_smoothing: float = flag(0.1, "of the cross-entropy", RESULT, type=number(0, 0.99))


@dataclass(frozen=True)
class TuningRun(Run):
    """What follows from the flags, the ranks and the data."""

    config: Tuning
    classes: int = 0

    def flops_per_image(self) -> int | None:
        """Return None: the log counts FLOPs of pretraining, and fine-tuning has other ones."""
        return None

    def record(self) -> dict[str, Any]:
        """Return the flags and what follows from them; the plan is for an encoder without masks."""
        return super().record() | {"encoder_only": True, "mask_ratio": 0.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this subcommand."""
    add_flags(parser, Tuning, LEFT_OUT)


def run(args: argparse.Namespace) -> int:
    """Fine-tune -> exit status: 0 done or stopped, 1 failed, 2 refused; ValueError, OSError."""
    received = process.listen_for_signals()
    pretrained = read_pretrained(args.run)
    image_source.check_folder(args.test, "--test", args.out)
    defaults = {row.name: row.default for row in fields(Tuning)}
    flags = argparse.Namespace(**defaults | vars(args))
    # recorded, so that the classifier of another model is not resumed
    flags.init_from = os.path.realpath(args.run)
    # spelled out, because a model of other code may have any shape
    shape = ",".join(f"{name}={value:d}" for name, value in vars(pretrained.config).items())
    flags.model = f"base:{shape}"
    flags.channels = pretrained.config.channels
    if flags.img_size is None:
        flags.img_size = pretrained.img_size
    config = make_config(Parser("probe.py"), flags, Tuning)
    return run_session(config, partial(run_tuning, pretrained), received)


# --- The model, sharded, with its optimizer


class Classifier(vit.ViTMAE):
    """A ViTMAE with a norm and a linear layer on its tokens instead of a decoder."""

    def __init__(self, config: vit.ViTConfig, img_size: int, classes: int) -> None:
        """Classify the mean of the patches of an image."""
        super().__init__(config, img_size)
        for name in ("embed", "blocks", "norm", "pred", "pos_embed"):
            delattr(self, f"decoder_{name}")
        del self.mask_token
        self.fc_norm = self.norm  # applied after the mean, not before it
        self.norm = cast(Any, nn.Identity())
        self.head = nn.Linear(config.width, classes)

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        """Classify normalised images (B, C, H, W) -> logits (B, classes)."""
        tokens = self.features(images)  # (B, 1+L, D)
        return self.head(self.fc_norm(tokens[:, 1:].mean(dim=1)))


def classifier_value(
    pretrained: Pretrained, seed: int, name: str, shape: torch.Size, device: torch.device
) -> Tensor:
    """Return the initial value of a parameter or buffer: pretrained, except for the head."""
    if name.startswith("head."):  # small, so the encoder's first gradients are small too
        return vit.initial_value(pretrained.config, name, shape, seed, device) * 0.01
    return value_of(pretrained, name.removeprefix("fc_"), shape)


def decayed_names(model: nn.Module) -> set[str]:
    """List the parameters that weight decay applies to, as in timm and in MAE's recipe."""
    return shard.weight_decay_names(model) - {"cls_token", "pos_embed"}


def depth_scale(name: str, depth: int, layer_decay: float) -> float:
    """Return the factor on the learning rate of a parameter, by its name in the unwrapped model.

    Each of the `depth` blocks has `layer_decay` times the rate of the next one, down to the patch
    embedding: layers near the pixels change least (BEiT, arXiv 2106.08254).
    """
    layers_above = 0
    if name.startswith("blocks."):
        _, number, *_ = name.split(".")
        layers_above = depth - int(number)
    elif name.startswith(("patch_embed.", "cls_token")):
        layers_above = depth + 1
    return layer_decay**layers_above


def build_tuning(
    run: TuningRun, pretrained: Pretrained, device: torch.device, resuming: bool
) -> Training:
    """Build, shard and, unless `resuming`, initialise the model, with its AdamW. Collective."""
    c = run.config
    with torch.device("meta"):
        model: nn.Module = Classifier(run.vit_config, c.img_size, run.classes)
    decay = decayed_names(model)
    init_fn = None
    if not resuming:
        init_fn = partial(classifier_value, pretrained, c.seed)
    model = shard.apply(
        model,
        str(c.mode),
        mesh.build_mesh(run.mesh_shape, device),
        block_classes={vit.Block},
        init_fn=init_fn,
        uninitialized=resuming,
        options=run.sharding_options(),
    )
    optimizer = shard.build_optimizer(
        model,
        str(c.mode),
        decay,
        lr=run.peak_lr,
        weight_decay=c.weight_decay,
        betas=c.betas,
        lr_scale=partial(depth_scale, depth=run.vit_config.depth, layer_decay=c.layer_decay),
    )
    scaler = shard.build_scaler(model, device, run.dtype)

    def compute_loss(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = micro_batch
        logits = model(data.normalize(images, run.pixel_stats)).float()  # (B, classes)
        return F.cross_entropy(logits, labels, label_smoothing=c.label_smoothing)

    return Training(model, optimizer, scaler, compute_loss, run.dtype, c.clip)


# --- One step


def labelled(run: TuningRun, files: Any, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Replace the noise of each batch by the labels (B,) of its images (B, C, H, W)."""
    for batch in batches:
        labels = torch.tensor([int(files.labels[i]) for i in batch.image_ids])
        images = [images for images, _ in batch.micro_batches]
        labels = labels.to(images[0].device, non_blocking=True)
        micro_batches = list(zip(images, labels.chunk(run.config.accum), strict=True))
        yield replace(batch, micro_batches=micro_batches)


# --- Scores


def find_test_images(config: Tuning, train: Any, stats: data.ChannelStats) -> tuple[Any, list[int]]:
    """List the images of --test -> them, and `class_numbers` of their classes."""
    test = image_source.list_eval_images(config.test, config)
    image_source.check_some_images(test, stats)
    return test, class_numbers(test, train)


@dataclass
class Scores(Evaluation):
    """Score a model on the test images."""

    numbers: list[int]  # what `class_numbers` returns

    def values_of(self, images: Tensor, indices: list[int]) -> Tensor:
        """Classify images (B, C, H, W) -> loss, top-1 hit, top-5 hit (3, B). Collective."""
        numbers = [self.numbers[self.files.labels[i]] for i in indices]
        labels = torch.tensor(numbers, device=images.device)
        with shard.autocast(self.model, images.device, self.run.dtype):
            logits = self.model(images).float()  # (B, classes)
        hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # (B, 5)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return torch.stack([losses, hits[:, 0].float(), hits.any(dim=1).float()])

    def report(self, step: int, count: int, means: list[float]) -> None:
        """Log the means of loss, top-1 and top-5 over `count` images."""
        log = self.session.log
        loss, top1, top5 = means
        log.write("scores", step=step, test_images=count, test_loss=loss, top1=top1, top5=top5)
        text = f"test loss {loss:.4f}, top-1 {top1:.2%}, top-5 {top5:.2%}"
        log.say(f"epoch {step // self.run.epoch_steps}: {text}")


# --- The run


def run_tuning(pretrained: Pretrained, plain_run: Run, session: Session) -> None:
    """Do one run, on every rank; AgreedError, the same on all ranks, if it fails."""
    config: Any = plain_run.config
    device = session.device
    stats = pretrained.stats
    session.claim_folder(config.out)
    step = run_on_rank0(lambda: pretrained.step)  # rank 0's

    def check_step() -> None:
        if pretrained.step != step:
            what = f"{pretrained.name} is still being trained: the ranks have read different steps"
            raise ValueError(f"{what}: give one of its step_... folders")

    run_on_all_ranks(check_step)
    # `stats`: images are normalised as in pretraining, whatever their own mean is
    find = partial(image_source.find_images, config, plain_run.global_batch, stats)
    files, facts = run_on_rank0(find)
    test, numbers = run_on_rank0(partial(find_test_images, config, files, stats))
    classes = run_on_rank0(partial(describe_classes, files))
    image_source.check_same_pack(files)
    image_source.check_same_pack(test)
    run = TuningRun(**vars(with_images(plain_run, facts)), classes=len(files.classes))
    session.run = run

    log = session.log
    saved = list_newest_first(run, log.say)
    log.open(run, device)
    training = build_tuning(run, pretrained, device, resuming=bool(saved))
    checkpoints = resume(saved, run, session, training)
    open_scores = partial(Scores, run, session, training.model, test, numbers)
    if checkpoints.finished(open_scores):
        return

    loaded = open_batches(run, session, files, range(checkpoints.begin, run.steps))
    batches = labelled(run, files, loaded)
    monitor = Monitor(run, session, files, checkpoints, first=next(batches), rest=batches)
    start = run.record() | {"peak_lr": run.peak_lr, "epoch_steps": run.epoch_steps}
    start["begin"] = checkpoints.begin
    log.write("start", **start, pretrained=pretrained.name, versions=versions())
    say_assumed(pretrained, "img_size", "stats", say=log.say)
    for line in classes:
        log.say(line)
    monitor.evaluate_every = run.epoch_steps
    monitor.evaluation = open_scores()
    with manual_gc():
        ended = train(run, training, monitor)
    monitor.finish(*ended)
