"""See what a pretrained model has learned: a picture, or a score of its features.

    python probe.py reconstruct RUN --data DIR          removed patches, filled in
    python probe.py knn RUN --data DIR --test DIR       the most similar images vote
    python probe.py linear RUN --data DIR --test DIR    a linear classifier, trained on features

RUN is the --out folder of train_fsdp.py, one of its checkpoints, or a file of `checkpoint.py
consolidate` or convert.py. Shapes as in vit.py; N images to train on, Q to test on.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

import checkpoint
import data
import mesh
import vit

BATCH = 64  # images that are encoded at once

# --- The model


@dataclass(frozen=True)
class Pretrained:
    """The whole weights of one model on the CPU, and what they were trained on."""

    config: vit.ViTConfig
    img_size: int  # pixels
    norm_pix_loss: bool
    mask_ratio: float
    stats: data.ChannelStats  # used to normalise its images
    weights: Mapping[str, Tensor]  # names as in vit.ViTMAE; without a decoder if it has none
    step: int  # optimizer steps trained


def read_pretrained(path: str) -> Pretrained:
    """Read a run (its newest checkpoint), one checkpoint, or a file; ValueError, OSError."""
    advice = f"if another library wrote it, type python convert.py {path} model.pth"
    try:
        weights, facts = checkpoint.read_weights(path)
    except ValueError as error:
        raise ValueError(f"{error}: {advice}") from None
    flags = facts["run_state"].get("flags", {})
    if "model" not in flags:
        raise ValueError(f"{path} does not say what model it is: {advice}")
    stats = data.IMAGENET
    if flags.get("channel_mean"):
        mean = tuple(flags["channel_mean"])
        stats = data.ChannelStats(mean, tuple(flags["channel_std"]), flags["image_dtype"])
    elif flags["channels"] != 3:
        what = f"its {flags['channels']} channels: train it first, by train_fsdp.py --resume"
        raise ValueError(f"{path} does not say mean and deviation of {what}")
    return Pretrained(
        config=vit.model_config(flags["model"], flags["channels"]),
        img_size=flags["img_size"],
        norm_pix_loss=flags.get("norm_pix_loss", True),  # these two are as in the paper
        mask_ratio=flags.get("mask_ratio", 0.75),
        stats=stats,
        weights=weights,
        step=facts["step"],
    )


def build_model(
    pretrained: Pretrained, device: torch.device, img_size: int | None, seed: int | None = None
) -> vit.ViTMAE:
    """Build the model on one device, for images of `img_size` pixels (None: as trained).

    With a `seed` it has learned nothing. A decoder that it lacks is a new one.
    """
    if img_size is None:
        img_size = pretrained.img_size
    with torch.device("meta"):
        model = vit.ViTMAE(pretrained.config, img_size, pretrained.norm_pix_loss)
    model.to_empty(device=device)
    for name, own in model.state_dict().items():  # one at a time: no second whole model
        missing = name.startswith(("decoder_", "mask_token")) and name not in pretrained.weights
        if missing or seed is not None:
            value = vit.initial_value(pretrained.config, name, own.shape, seed or 0)
        else:
            value = pretrained.weights[name]
        if "pos_embed" in name:
            value = vit.resize_positions(value, math.isqrt(own.shape[1] - 1))
        own.copy_(value)
    return model.eval()


# --- Classes


def find_classes(train: Any, test: Any) -> tuple[list[str], Tensor, Tensor]:
    """Return the names of the classes, and their numbers for all images of both lists (N,), (Q,).

    An image's class is its folder. ValueError if there are fewer than two, if the test images have
    others, or if they are training images: one folder lies in the other, or is a copy of it.
    """
    classes: list[list[str]] = []
    for files in (train, test):
        folders = [os.path.dirname(files.name(i)) for i in range(len(files))]
        if "" in folders:
            raise ValueError(f"{files.root} has images outside of a folder of their class")
        # file systems differ in the Unicode form of a name
        classes.append([normalize("NFC", os.path.basename(folder)) for folder in folders])
    of_train, of_test = classes
    names = sorted({*of_train})
    if len(names) < 2:
        what = f"{train.root} has {len(names)} classes, but a score needs two"
        raise ValueError(f"{what}: give a folder with one folder of images per class")
    unknown = sorted({*of_test} - {*names})
    if unknown:
        raise ValueError(f"{test.root} has classes that {train.root} lacks: {unknown[:5]}")
    roots = [os.path.realpath(files.root) for files in (train, test)]
    same = os.path.commonpath(roots) in roots
    if not same and data.fingerprint(train) == data.fingerprint(test):  # names and sizes
        same = all(train.read(i) == test.read(i) for i in (0, len(train) // 2, len(train) - 1))
    if same and test is not train:
        what = f"{test.root} has images of {train.root}, on which the classifier is trained"
        raise ValueError(f"{what}: give --test other images")
    numbers = {name: i for i, name in enumerate(names)}
    train_labels, test_labels = (torch.tensor([numbers[name] for name in own]) for own in classes)
    return names, train_labels, test_labels


# --- Features

PIXELS_SIDE = 16  # pixels; the images of the raw-pixel baseline are resized to it


@torch.inference_mode()
def encode(model: vit.ViTMAE | None, images: Tensor, cls: bool) -> Tensor:
    """Compute the features (B, D) fp32 of normalised images (B, C, H, W), on the CPU.

    They are the class token after the final norm, or the mean of the patch tokens; all patches are
    visible. Without a model they are the pixels of a smaller image. A GPU computes in bf16.
    """
    if model is None:
        return F.adaptive_avg_pool2d(images, PIXELS_SIDE).flatten(1).cpu()
    patches = model.image_patches(images)  # (B, L, P*P*C)
    all_visible = torch.arange(patches.shape[1], device=images.device).expand(len(images), -1)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        tokens = model.encode(patches, all_visible).float()  # (B, 1+L, D)
    if cls:
        return tokens[:, 0].cpu()
    return tokens[:, 1:].mean(dim=1).cpu()


def encode_all(
    args: argparse.Namespace, stats: data.ChannelStats, models: Sequence[Any], files: Any
) -> tuple[list[Tensor], list[int]]:
    """Encode the readable images -> features (N, D) of each model, on the CPU, and their indices.

    The others are named.
    """
    loader = data.build_loader(
        files,
        img_size=models[0].img_size,
        patches=1,  # the masking noise is not used
        seed=0,
        global_batch=BATCH,
        micro_batch_size=BATCH,
        steps=range(math.ceil(len(files) / BATCH)),
        workers=args.workers,
        stats=stats,
        augment=False,
    )
    indices: list[int] = []
    bad: dict[int, str] = {}
    features: list[list[Tensor]] = [[] for _ in models]
    for batch in loader:
        bad |= dict(batch.bad)
        rows = [row for row, index in enumerate(batch.image_ids) if index >= 0]
        indices += [batch.image_ids[row] for row in rows]
        images = data.normalize(batch.image[rows].to(models[0].cls_token.device), stats)
        for own, model in zip(features, models, strict=True):
            own.append(encode(model, images, args.features == "cls"))
        if len(features[0]) % 100 == 0:
            print(f"features of {files.root}: {len(indices)} images", flush=True)
    for index, reason in bad.items():
        print(f"warning: {files.path(index)} is left out: {reason}")
    return [torch.cat(own) for own in features], indices


# --- k nearest neighbours

TEMPERATURE = 0.07  # scales the weights of votes
SIMILARITIES = 2**27  # at most so many are computed at once: 512 MiB


def nearest_vote(bank: Tensor, labels: Tensor, queries: Tensor, classes: int, k: int) -> Tensor:
    """Let the k rows of `bank` (N, D) most similar to each query (Q, D) vote -> (Q, classes) fp64.

    A vote weighs exp(cosine similarity / 0.07) (Wu et al., arXiv 1805.01978, section 3.4). A class
    without a vote has -inf.
    """
    bank = F.normalize(bank, dim=1)
    queries = F.normalize(queries, dim=1)
    k = min(k, len(bank))
    votes: list[Tensor] = []
    for some in queries.split(max(1, SIMILARITIES // len(bank))):
        similarity, index = (some @ bank.T).topk(k)  # 2 x (some, k)
        weight = (similarity.double() / TEMPERATURE).exp().cpu()
        vote = torch.zeros(len(some), classes, dtype=torch.float64)
        votes.append(vote.scatter_add(1, labels[index.cpu()], weight))
    found = torch.cat(votes)
    return found.masked_fill(found == 0, -torch.inf)


# --- A linear classifier, trained as in MAE (arXiv 2111.06377, A.1)

LARGEST_BATCH = 16384
EPOCHS = 90
SAMPLES = 2**21  # training sees at least so many images: 90 epochs of 1,000 are far too few
WARMUP_SHARE = 1 / 9  # share of the steps: 10 of 90 epochs
LARS_TRUST = 0.001


@torch.no_grad()
def scale_gradient(p: Any) -> None:
    """Turn SGD into LARS (arXiv 1708.03888, algorithm 1), except for vectors, the biases."""
    if p.ndim > 1:
        norm = p.grad.norm()  # may be 0: its squares underflow once the loss is almost 0
        p.grad *= torch.where(norm > 0, LARS_TRUST * p.norm() / norm, 1.0)


def train_linear(
    features: Tensor,
    labels: Tensor,
    classes: int,
    epochs: int | None = None,
    blr: float = 0.1,
    seed: int = 0,
) -> nn.Module:
    """Train BatchNorm without affine and a linear layer on features (N, D) with labels (N,).

    90 epochs, or more on a small set. The seed decides the initial values and the order.
    """
    generator = torch.Generator().manual_seed(seed)
    count, width = features.shape
    batch = min(LARGEST_BATCH, count)
    if epochs is None:
        epochs = max(EPOCHS, math.ceil(SAMPLES / count))
    epoch_steps = count // batch
    peak_lr = blr * batch / 256
    linear = nn.Linear(width, classes)
    nn.init.trunc_normal_(linear.weight, std=0.01, generator=generator)
    nn.init.zeros_(linear.bias)
    model = nn.Sequential(nn.BatchNorm1d(width, eps=1e-6, affine=False), linear)
    model.to(features.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=peak_lr, momentum=0.9)
    labels = labels.to(features.device)
    steps = epochs * epoch_steps
    warmup = int(WARMUP_SHARE * steps)
    step = 0
    batches: Sequence[Any] = [slice(None)]  # all images, whose order then does not matter
    for _ in range(epochs):
        if batch < count:
            order = torch.randperm(count, generator=generator).to(features.device)
            batches = order.split(batch)[:epoch_steps]
        for some in batches:
            loss = F.cross_entropy(model(features[some]), labels[some])
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                scale_gradient(p)
            rate = peak_lr * (step + 1) / max(1, warmup)
            if step >= warmup:
                rate = peak_lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            step += 1
    return model.eval()


# --- Scores

SETTINGS = ("k", "epochs", "blr", "features", "split", "seeds")  # shown beside the scores
MEASURES = ("top1", "top5", "training_top1", "training_loss")  # the last two are of `linear`
Labelled = tuple[Tensor, Tensor]  # features (N, D) and labels (N,)


def score(args: argparse.Namespace) -> None:
    """Encode all images with each model, score each, print and save the scores."""
    pretrained = read_pretrained(args.run)
    train = data.scan(args.data)
    test = data.scan(args.test) if args.test else train
    classes, train_labels, test_labels = find_classes(train, test)
    print(f"{len(train)} images of {len(classes)} classes: {', '.join(classes[:5])}, ...")
    device = mesh.pick_device(args.device, mesh.read_ranks({}))
    models: list[Any] = [build_model(pretrained, device, args.img_size)]
    for seed in range(args.seeds):
        models.append(build_model(pretrained, device, args.img_size, seed))
    models.append(None)  # raw pixels
    train_features, indices = encode_all(args, pretrained.stats, models, train)
    train_labels = train_labels[indices]
    test_features = train_features
    if args.test:
        test_features, indices = encode_all(args, pretrained.stats, models, test)
    test_labels = test_labels[indices]
    scores: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        for source, i in ("trained", 0), ("random weights", 1 + seed), ("raw pixels", -1):
            known = train_features[i].to(device), train_labels
            asked = test_features[i].to(device), test_labels
            facts = score_features(args, known, asked, len(classes), seed)
            scores.append({"source": source, "seed": seed} | facts)
    report_scores(args, pretrained.step, scores)


def split_per_class(labels: Tensor, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split rows by their labels (N,): a share of each class for training, the rest for a test.

    Each side gets at least one; the only image of a class is for training.
    """
    generator = np.random.default_rng(seed)
    train: list[np.ndarray] = []
    for label in range(int(labels.max()) + 1):
        rows = generator.permutation(np.flatnonzero(labels == label))
        count = max(1, min(round(share * len(rows)), len(rows) - 1))
        train.append(rows[:count])
    chosen = np.sort(np.concatenate(train))
    return chosen, np.setdiff1d(np.arange(len(labels)), chosen)


def score_features(
    args: argparse.Namespace, train: Labelled, test: Labelled, classes: int, seed: int
) -> dict[str, Any]:
    """Train a classifier on features (N, D) with labels (N,), test it on others -> its scores.

    With --split both are taken from `train`.
    """
    bank, labels = train
    queries, truths = test
    if args.split is not None:
        chosen, others = split_per_class(labels, args.split, seed)
        queries = bank[others]
        truths = labels[others]
        bank = bank[chosen]
        labels = labels[chosen]
    if not len(truths):
        raise ValueError("--split leaves no image to test on: every class has one image")
    facts: dict[str, Any] = {"test_images": len(truths)}
    if args.command == "knn":
        return facts | top_accuracies(nearest_vote(bank, labels, queries, classes, args.k), truths)
    model = train_linear(bank, labels, classes, args.epochs, args.blr, seed)
    with torch.inference_mode():
        own = model(bank).double().cpu()
        found = model(queries).double().cpu()
    facts["training_top1"] = 100 * (own.argmax(dim=1) == labels).double().mean().item()
    facts["training_loss"] = F.cross_entropy(own, labels).item()
    return facts | top_accuracies(found, truths)


def top_accuracies(values: Tensor, labels: Tensor) -> dict[str, float]:
    """Compare scores (Q, classes) with labels (Q,) -> top-1 and top-5 in percent.

    Among equal scores the class listed first counts; a class with the score -inf is never a hit.
    """
    ranked, order = values.sort(dim=1, descending=True, stable=True)
    hits = (order == labels[:, None]) & (ranked > -torch.inf)  # (Q, classes)
    return {
        "top1": 100 * hits[:, :1].any(dim=1).double().mean().item(),
        "top5": 100 * hits[:, :5].any(dim=1).double().mean().item(),
    }


def report_scores(args: argparse.Namespace, step: int, scores: Sequence[dict[str, Any]]) -> None:
    """Print a table, one line per source with means over the seeds; write all to OUT/NAME.json."""
    flags = {key: value for key, value in vars(args).items() if value is not None}
    settings = {key: flags[key] for key in SETTINGS if key in flags}
    what = ", ".join(f"{key} {value}" for key, value in settings.items())
    print(f"{args.command} ({what}): {scores[0]['test_images']} test images")
    means: dict[str, dict[str, float]] = {}
    for source in dict.fromkeys(score["source"] for score in scores):
        own = [score for score in scores if score["source"] == source]
        mean = {key: fmean(score[key] for score in own) for key in MEASURES if key in own[0]}
        means[source] = mean
        numbers = ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in mean.items())
        each = " ".join(f"{score['top1']:.1f}" for score in own)
        print(f"  {source:14}  {numbers}; top1 of each seed {each}")
    found = {"run": args.run, "step": step, "data": args.data, "test": args.test}
    found |= settings | {"mean": means, "scores": scores}
    path = Path(args.out, f"{args.command}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with checkpoint.atomic_write(path) as file:
        file.write(json.dumps(found, indent=2).encode())
    print(f"{path}: each seed", flush=True)


# --- A picture

COLUMNS = ("original", "masked", "interpolation", "prediction")
SIDE = 256  # smaller images are enlarged to about so many pixels
GAP = 16  # pixels between images; the names of the columns stand there


def reconstruct(args: argparse.Namespace) -> None:
    """Draw what a model fills in for removed patches, beside plain interpolation."""
    pretrained = read_pretrained(args.run)
    if "mask_token" not in pretrained.weights:
        raise ValueError(f"{args.run} is an encoder without a decoder: it predicts no pixels")
    if args.norm_pix_loss is not None:
        pretrained = replace(pretrained, norm_pix_loss=args.norm_pix_loss)
    device = mesh.pick_device(args.device, mesh.read_ranks({}))
    model = build_model(pretrained, device, args.img_size)
    patches = vit.patch_count(pretrained.config, model.img_size)
    files = data.scan(args.data)
    order = data.ImageOrder(len(files), 1, args.seed, shuffle=False)
    images = data.Images(
        files, order, model.img_size, patches, stats=pretrained.stats, augment=False
    )
    count = min(args.images, len(files))  # evenly over the list
    chosen = [len(files) * i // count for i in range(count)]
    batch = data.collate([images[index] for index in chosen])
    for index, reason in batch.bad:
        print(f"warning: {files.path(index)} is left out, another in its place: {reason}")
    pixels = batch.image  # (B, C, H, W)
    noise = batch.noise.to(device)  # (B, L)
    with torch.inference_mode():
        normal = data.normalize(pixels.to(device), pretrained.stats)
        loss, prediction, mask = model(normal, pretrained.mask_ratio, noise)
    panels = draw_panels(pretrained, pixels, prediction, mask)
    with checkpoint.atomic_write(Path(args.out)) as file:
        draw_rows(panels).save(file, "PNG", optimize=True)
    print(f"{args.out}: {len(panels)} images; loss of the removed patches {loss.item():.4f}")
    difference = panels[:, 2:].double() - panels[:, :1]  # of interpolation and prediction
    decibels = 10 * torch.log10(255**2 / difference.square().mean((2, 3, 4)))  # (B, 2)
    names = [files.path(index) if index >= 0 else "another" for index in batch.image_ids]
    for name, (plain, own) in zip([*names, "mean"], [*decibels, decibels.mean(0)], strict=True):
        print(f"  PSNR {own:.2f} dB, interpolation {plain:.2f} dB  {name}")


def draw_panels(
    pretrained: Pretrained, images: Tensor, prediction: Tensor, removed: Tensor
) -> Tensor:
    """Make the COLUMNS of images (B, C, H, W) as loaded -> (B, 4, 3, H, W) uint8, on the CPU.

    `prediction` (B, L, P*P*C) and `removed` (B, L) are what the model returned.
    """
    patch = pretrained.config.patch
    prediction = prediction.float().cpu()
    removed = removed.float().cpu()
    target = vit.patchify(data.normalize(images.cpu(), pretrained.stats), patch)  # (B, L, P*P*C)
    if pretrained.norm_pix_loss:
        # The mean and deviation of a removed patch are estimated, too: nothing of it may show.
        variance, mean = torch.var_mean(target, dim=-1, keepdim=True)  # (B, L, 1)
        prediction = prediction * fill_from_visible((variance + 1e-6).sqrt(), removed)
        prediction = prediction + fill_from_visible(mean, removed)
    original = unpatchify(target, patch)  # (B, C, H, W)
    interpolation = interpolate(target, removed, patch)
    filled = unpatchify(prediction, patch)
    shown = to_rgb(torch.stack([original, interpolation, filled], dim=1), pretrained.stats)
    hole = unpatchify(removed[..., None].expand(-1, -1, patch**2), patch)[:, None] > 0
    grey = torch.full_like(shown[:, :1], 0.5)
    columns = torch.cat([shown[:, :1], grey, shown[:, 1:]], dim=1)  # (B, 4, 3, H, W)
    columns = torch.where(hole, columns, shown[:, :1])
    columns[:, 0] = shown[:, 0]
    return (columns.clamp(0, 1) * 255).round().to(torch.uint8)


def unpatchify(patches: Tensor, patch: int) -> Tensor:
    """Join the patches (B, L, P*P*C) of square images -> (B, C, H, W); inverts vit.patchify."""
    side = patch * round(patches.shape[1] ** 0.5)
    columns = patches.unflatten(2, (patch**2, -1)).permute(0, 3, 2, 1)  # (B, C, P*P, L)
    return F.fold(columns.flatten(1, 2), side, patch, stride=patch)


def fill_from_visible(values: Tensor, removed: Tensor) -> Tensor:
    """Replace the values (B, L, V) of patches where `removed` (B, L) is 1.

    By a mean of the visible ones, weighted by 1 / distance^4 (Shepard 1968).
    """
    side = round(values.shape[1] ** 0.5)
    position = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()  # (L, 2)
    distance = torch.cdist(position, position).clamp(min=1)  # (L, L)
    visible = (1 - removed)[:, None]  # (B, 1, L)
    weight = distance.pow(-4) * visible  # (B, L, L)
    near = weight @ values / weight.sum(-1, keepdim=True)
    return torch.where(removed[..., None] > 0, near, values)


def interpolate(target: Tensor, removed: Tensor, patch: int) -> Tensor:
    """Fill removed patches (B, L, P*P*C) from the colours of the visible ones -> (B, C, H, W)."""
    side = round(target.shape[1] ** 0.5)
    colours = target.unflatten(2, (patch**2, -1)).mean(dim=2)  # (B, L, C)
    grid = fill_from_visible(colours, removed).mT.unflatten(2, (side, side))  # (B, C, side, side)
    return F.interpolate(grid, scale_factor=patch, mode="bilinear")


def to_rgb(x: Tensor, stats: data.ChannelStats) -> Tensor:
    """Turn normalised images (B, N, C, H, W) into RGB from 0 to 1 (B, N, 3, H, W).

    Those that are not 8-bit RGB are stretched to the range of the first of N, the original.
    """
    channels = len(stats.mean)
    x = x[:, :, [min(i, channels - 1) for i in range(3)]]
    if stats.dtype == "uint8" and channels == 3:
        std = torch.tensor(stats.std)[:, None, None]
        mean = torch.tensor(stats.mean)[:, None, None]
        return x * std + mean
    low = x[:, :1].amin((3, 4), keepdim=True)
    high = x[:, :1].amax((3, 4), keepdim=True)
    return (x - low) / (high - low).clamp(min=1e-6)


def draw_rows(panels: Tensor) -> Image.Image:
    """Arrange panels (B, 4, 3, H, W) below the names of the columns."""
    zoom = max(1, SIDE // panels.shape[-1])
    big = F.interpolate(panels.flatten(0, 1), scale_factor=zoom)  # mode nearest: repeats pixels
    picture = to_pil_image(make_grid(big, len(COLUMNS), padding=GAP, pad_value=255))
    for i, name in enumerate(COLUMNS):
        left = GAP + i * (big.shape[-1] + GAP)
        ImageDraw.Draw(picture).text((left, 2), name, fill="black")
    return picture


# --- Command line


def positive(text: str) -> int:
    """Return a whole number from 1 up, as an argparse type."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all subcommands."""
    about, examples, *_ = str(__doc__).split("\n\n")
    parser = argparse.ArgumentParser("probe.py", description=about, epilog=examples)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "reconstruct": "a picture: removed patches, filled in",
        "knn": "score features without training",
        "linear": "score features by a linear classifier",
    }
    for name, help in helps.items():
        add = commands.add_parser(name, help=help, allow_abbrev=False).add_argument
        add("run", metavar="RUN", help="--out of a run, a checkpoint, or a file")
        add("--data", required=True, metavar="DIR", help="folder of images, or a pack")
        add("--img-size", type=positive, metavar="PIXELS", help="default: as in pretraining")
        add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
        if name == "reconstruct":
            add("--images", type=positive, default=8, metavar="N", help="default 8")
            norm_pix = "it predicts normalised patches, or pixels (default: as in pretraining)"
            add("--norm-pix-loss", action=argparse.BooleanOptionalAction, help=norm_pix)
            add("--seed", type=int, default=0, help="of the masks (default 0)")
            add("--out", default="reconstruct.png", metavar="PNG", help="the picture")
            continue
        add("--test", metavar="DIR", help="test on it, train on --data")
        share = "train on this share of each class of --data, test on the rest"
        add("--split", type=float, metavar="SHARE", help=share)
        add("--features", choices=("cls", "mean"), default="cls", help="class token, or mean")
        seeds = "average over N seeds: of split, random weights, training (default 1)"
        add("--seeds", type=positive, default=1, metavar="N", help=seeds)
        cores = min(16, mesh.process_cores() - 1)
        add("--workers", type=int, default=cores, metavar="N", help="processes that read images")
        add("--out", default="probe", metavar="DIR", help="for the scores (probe)")
        if name == "knn":
            add("--k", type=positive, default=20, help="neighbours that vote (default 20)")
        else:
            epochs = f"default {EPOCHS}, on a small set more, until two million images are seen"
            add("--epochs", type=positive, metavar="N", help=epochs)
            add("--blr", type=float, default=0.1, help="lr = blr x batch / 256 (default 0.1)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand -> exit status: 1 where it failed, 2 for bad usage."""
    args = build_parser().parse_args(argv)
    try:
        if args.command == "reconstruct":
            reconstruct(args)
        elif (args.test is None) == (args.split is None):
            raise ValueError("give either --test DIR or --split SHARE")
        elif args.split is not None and not 0 < args.split < 1:
            raise ValueError(f"--split {args.split} must be between 0 and 1")
        else:
            score(args)
    except (ValueError, OSError) as error:
        print(f"probe.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
