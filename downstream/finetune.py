"""Fine-tune a pretrained encoder as a classifier, in any sharding mode, on any number of ranks.

Flags shared with train_fsdp.py keep their meaning, and its training loop is used, so that ranks,
log, checkpoints, bad steps and stops work alike. The same command continues an interrupted run.
Shapes: B images, L patches, D width, as in vit.py.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
import mesh
import shard
import vit
from downstream.images import open_eval_loader
from downstream.scores import class_numbers
from downstream.weights import Pretrained, read_pretrained, value_of
from runtime import image_source, process
from runtime.agreement import run_on_rank0
from runtime.config import Config, Parser, add_flags, flag, make_config, number
from runtime.device_batches import Batch, open_batches
from runtime.evaluation import average_over
from runtime.monitor import Monitor
from runtime.resume import list_newest_first, resume
from runtime.run import Run, with_images
from runtime.session import Session, manual_gc, run_session
from runtime.start_record import versions
from train_fsdp import Training, train

HELP = "train the encoder as a classifier"
# Flags that only pretraining has, and those that all subcommands of probe.py have
LEFT_OUT = {
    *("model", "channels", "mask_ratio", "norm_pix_loss", "run_mode", "steps", "tensorboard"),
    *("profile", "dry_run", "world_size", "data", "eval_data", "init_from", "img_size", "device"),
    *("tp", "machine"),
}


@dataclass(frozen=True)
class Tuning(Config):
    """The flags of fine-tuning: those of pretraining, a few with other defaults, and more."""

    blr: float = flag(5e-4, "lr = blr x global batch / 256", "result")
    epochs: int = flag(50, "passes over the data", "result")
    out: str = flag("finetuned", "log and checkpoints go here", group="output")
    test: str = flag(None, "images to score after each epoch", group="fine-tuning", required=True)
    layer_decay: float = flag(0.65, "lr: block / next block", "result", type=number(1e-3, 1))
    label_smoothing: float = flag(0.1, "of the cross-entropy", "result", type=number(0, 0.99))


@dataclass(frozen=True)
class TuningRun(Run):
    """What follows from the flags, the ranks and the data."""

    config: Tuning
    classes: int = 0

    def flops_per_image(self) -> int | None:
        """Return None: the FLOPs of pretraining, which the log would show, are not those here."""
        return None

    def record(self) -> dict[str, Any]:
        """Return the flags and what follows; what is planned is a plain ViT on whole images."""
        return super().record() | {"encoder_only": True, "mask_ratio": 0.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this subcommand."""
    add_flags(parser, Tuning, LEFT_OUT)


def run(args: argparse.Namespace) -> int:
    """Fine-tune -> exit status: 0 done or stopped, 1 failed, 2 refused; ValueError, OSError."""
    received = process.collect()
    pretrained = read_pretrained(args.run)
    image_source.check_folder(args.test, "--test", args.out)
    # the model of other code may have a shape of its own
    shape = ",".join(f"{name}={value:d}" for name, value in vars(pretrained.config).items())
    known = {row.name: row.default for row in fields(Tuning)} | vars(args)
    known |= {"model": f"base:{shape}", "channels": pretrained.config.channels}
    known |= {"img_size": args.img_size or pretrained.img_size}
    config = make_config(Parser("probe.py"), argparse.Namespace(**known), Tuning)
    return run_session(config, partial(run_tuning, pretrained), received)


# --- The model, sharded, with its optimizer


class Classifier(vit.ViTMAE):
    """A ViTMAE with a norm and a linear layer on its tokens in the place of its decoder."""

    def __init__(self, config: vit.ViTConfig, img_size: int, classes: int) -> None:
        """Classify the mean of the patches of an image."""
        super().__init__(config, img_size)
        for name in ("embed", "blocks", "norm", "pred", "pos_embed"):
            delattr(self, f"decoder_{name}")
        del self.mask_token
        self.fc_norm = self.norm  # after the mean, not before
        self.norm = cast(Any, nn.Identity())
        self.head = nn.Linear(config.width, classes)

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        """Classify normalised images (B, C, H, W) -> logits (B, classes)."""
        patches = vit.patchify(images, self.config.patch)  # (B, L, P*P*C)
        all_of_them = torch.arange(patches.shape[1], device=images.device)
        x = self.encode(patches, all_of_them.expand(len(images), -1))  # (B, 1+L, D)
        return self.head(self.fc_norm(x[:, 1:].mean(dim=1)))


def classifier_value(
    pretrained: Pretrained, seed: int, name: str, shape: torch.Size, device: torch.device
) -> Tensor:
    """Return the initial value of a parameter or buffer: the pretrained one, but for the head."""
    if name.startswith("head."):  # small, so that the first gradients of the encoder are
        return vit.initial_value(pretrained.config, name, shape, seed, device) * 0.01
    return value_of(pretrained, name.removeprefix("fc_"), shape)


def depth_scale(name: str, depth: int, layer_decay: float) -> float:
    """Return the share of the learning rate that a parameter of this original name has.

    That of each of the `depth` blocks is `layer_decay` times that of the next, down to the patch
    embedding: what is near the pixels moves least (BEiT, arXiv 2106.08254).
    """
    if name.startswith("blocks."):
        return layer_decay ** (depth - int(name.split(".")[1]))
    return layer_decay ** (depth + 1) if name.startswith(("patch_embed.", "cls_token")) else 1.0


def build_tuning(
    run: TuningRun, pretrained: Pretrained, device: torch.device, resuming: bool
) -> Training:
    """Build, shard and, unless `resuming`, initialise the model, with its AdamW. Collective."""
    c = run.config
    with torch.device("meta"):
        model: nn.Module = Classifier(run.model, c.img_size, run.classes)
    decay = shard.weight_decay_names(model)
    model = shard.apply(
        model,
        str(c.mode),
        mesh.build_mesh(run.mesh_shape, device),
        block_classes={vit.Block},
        values=shard.undefined if resuming else partial(classifier_value, pretrained, c.seed),
        options=run.sharding_options(),
    )
    optimizer = shard.build_optimizer(
        model,
        str(c.mode),
        decay,
        lr=run.lr,
        weight_decay=c.weight_decay,
        betas=(0.9, 0.999),
        lr_scale=partial(depth_scale, depth=run.model.depth, layer_decay=c.layer_decay),
    )
    scaler = shard.build_scaler(model, device, run.dtype)

    def loss_of(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = part
        logits = model(data.normalize(images, run.channel_stats)).float()  # (B, classes)
        return F.cross_entropy(logits, labels, label_smoothing=c.label_smoothing)

    return Training(model, optimizer, scaler, loss_of, run.dtype, c.clip)


# --- One step


def labelled(run: TuningRun, files: Any, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Give this rank's images (B, C, H, W) as loaded their labels (B,), in place of the noise."""
    for batch in batches:
        labels = torch.tensor([int(files.labels[i]) for i in batch.image_ids])
        images = [images for images, _ in batch.parts]
        own = labels.to(images[0].device, non_blocking=True).chunk(run.config.accum)
        yield replace(batch, parts=list(zip(images, own, strict=True)))


# --- Scores


def check_classes(train: Any, test: Any, img_size: int, stats: data.ChannelStats) -> list[int]:
    """Do as `class_numbers`; ValueError too where no test image can be read."""
    if not any(batch.indices for batch in open_eval_loader(test, img_size, 16, 0, stats)):
        raise ValueError(f"none of the {len(test)} images in --test {test.root} can be read")
    return class_numbers(test, train)


@dataclass
class Scores:
    """Score a model on the test images."""

    run: TuningRun
    session: Session
    model: nn.Module
    files: Any
    numbers: list[int]  # as of `class_numbers`

    def __call__(self, step: int) -> None:
        """Log number of images, loss, top-1 and top-5 after so many steps. Collective."""
        about, log = (self.files, self.run, self.session, self.model), self.session.log
        count, (loss, top1, top5) = average_over(*about, step, self.classify)
        log.write("scores", step=step, test_images=count, test_loss=loss, top1=top1, top5=top5)
        text = f"test loss {loss:.4f}, top-1 {top1:.2%}, top-5 {top5:.2%}"
        log.say(f"epoch {step // self.run.epoch_steps}: {text}")

    def classify(self, images: Tensor, indices: list[int]) -> Tensor:
        """Classify images (B, C, H, W) -> loss, hit, hit in five (3, B). Collective."""
        numbers = [self.numbers[self.files.labels[i]] for i in indices]
        labels = torch.tensor(numbers, device=images.device)
        with shard.autocast(self.model, images.device, self.run.dtype):
            logits = self.model(images).float()  # (B, classes)
        hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # (B, 5)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return torch.stack([losses, hits[:, 0].float(), hits.any(dim=1).float()])


# --- The run


def run_tuning(pretrained: Pretrained, plain_run: Run, session: Session) -> None:
    """Make one run, on every rank; AgreedError where it has failed."""
    config: Any = plain_run.config
    device, stats = session.device, pretrained.stats
    session.lock_folder(config.out)
    # normalised as in pretraining, whatever the mean of these images is
    find = partial(image_source.find_images, config, config.out, plain_run.global_batch, stats)
    files, found = run_on_rank0(find)
    test = run_on_rank0(lambda: image_source.list_eval_images(config.test, config.out))
    numbers = run_on_rank0(partial(check_classes, files, test, config.img_size, stats))
    session.run = run = TuningRun(
        **vars(with_images(plain_run, **found)), classes=len(files.classes)
    )

    log = session.log
    saved = list_newest_first(run, log.say)
    log.open(run, device)
    training = build_tuning(run, pretrained, device, resuming=bool(saved))
    saves = resume(saved, run, session, training)
    if saves.finished():
        return

    loaded = open_batches(run, session, files, range(saves.begin, run.steps))
    monitor = Monitor(run, session, files, saves, labelled(run, files, loaded))
    start = run.record() | {"lr": run.lr, "epoch_steps": run.epoch_steps, "begin": saves.begin}
    log.write("start", **start, pretrained=pretrained.name, versions=versions())
    log.say(f"{pretrained.name}, {run.classes} classes")
    monitor.evaluate_every = run.epoch_steps
    monitor.evaluation = Scores(run, session, training.model, test, numbers)
    with manual_gc():
        ended = train(run, training, monitor)
    monitor.finish(*ended)
