"""Score the frozen features of a model beside two baselines: its random weights, and raw pixels.

`probe.py knn` lets the most similar training images vote, `probe.py linear` trains a linear layer.
Shapes: N images to train on, Q to test on, D width of a feature, B images of a batch, L patches.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
import mesh
import vit
from checkpoint import atomic_write
from runtime.config import int_in_range, nonempty, number
from runtime.device_batches import worker_count
from runtime.eval_images import open_eval_loader
from runtime.image_source import check_folder, list_folder
from runtime.pretrained import (
    Pretrained,
    build_pretrained,
    random_weights,
    read_pretrained,
    say_assumed,
)
from runtime.process import throttled_progress
from storage.classes import describe_classes
from storage.image_list import lists_overlap

HELP = "score frozen features: knn without training, linear by a linear classifier"
BATCH = 64  # images
PIXELS_SIDE = 16  # pixels; the images of the raw-pixel baseline are resized to it
TEMPERATURE = 0.07  # scales the weights of k-NN votes
SIMILARITIES = 2**27  # at most so many are computed at once: 512 MiB
EPOCHS = 90
SAMPLES = 2**21  # training sees at least so many images: 90 epochs of 1,000 are far too few
WARMUP_SHARE = 1 / 9  # share of the steps: 10 of 90 epochs
LARS_MOMENTUM = 0.9
LARS_TRUST = 0.001
SETTINGS = ("k", "epochs", "blr", "features", "split", "seeds")  # shown beside the scores
MEASURES = ("top1", "top5", "training_top1", "training_loss")  # shown; the last two by `linear`
Labelled = tuple[Tensor, Tensor]  # features (N, D) and labels (N,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `knn` or `linear`, whichever the parser is for."""
    add = parser.add_argument
    test = parser.add_mutually_exclusive_group(required=True)
    test.add_argument("--test", type=nonempty, metavar="DIR", help="test on it, train on --data")
    share = "train on this share of each class of --data, test on the rest"
    test.add_argument("--split", type=number(0, 1), metavar="SHARE", help=share)
    add("--features", choices=("cls", "mean"), default="cls", help="class token (default) or mean")
    seeds = "average over N seeds: of split, random weights, training (default 1)"
    add("--seeds", type=int_in_range(1), default=1, metavar="N", help=seeds)
    workers = "loader processes (cores - 1, at most 6)"
    add("--workers", type=int_in_range(0), metavar="N", help=workers)
    out = "for the scores (default probe)"
    add("--out", type=nonempty, default="probe", metavar="DIR", help=out)
    if parser.prog.endswith("knn"):
        neighbours = "neighbours that vote (default 20)"
        add("--k", type=int_in_range(1), default=20, metavar="K", help=neighbours)
        return
    epochs = f"default {EPOCHS}, on a small set more, until two million images are seen"
    add("--epochs", type=int_in_range(1), metavar="N", help=epochs)
    add("--blr", type=number(0), default=0.1, help="lr = blr x batch / 256 (default 0.1)")


def run(args: argparse.Namespace) -> int:
    """Encode all images with each model, then score each -> exit status; ValueError, OSError."""
    pretrained = read_pretrained(args.run)
    say_assumed(pretrained, "img_size", "stats")
    train = list_folder(args.data, args.include, args.exclude)
    test = train
    if args.test:
        check_folder(args.test, "--test")
        test = list_folder(args.test, args.include, args.exclude)
    numbers = torch.tensor(class_numbers(test, train))
    for line in describe_classes(train):
        print(line)

    device = mesh.pick_device(args.device, mesh.read_ranks({}))
    models: list[Any] = [build_pretrained(pretrained, device, args.img_size)]
    for seed in range(args.seeds):
        models.append(build_pretrained(random_weights(pretrained, seed), device, args.img_size))
    models.append(None)  # raw pixels
    train_features, train_labels = encode_folder(args, pretrained, models, train)
    test_features = train_features
    test_labels = train_labels
    if test is not train:
        test_features, test_labels = encode_folder(args, pretrained, models, test)
        test_labels = numbers[test_labels]

    scores: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        for source, i in ("trained", 0), ("random weights", 1 + seed), ("raw pixels", -1):
            known = train_features[i].to(device), train_labels
            asked = test_features[i].to(device), test_labels
            facts = score_features(args, known, asked, len(train.classes), seed)
            scores.append({"source": source, "seed": seed} | facts)
    report_scores(args, pretrained, scores)
    return 0


# --- Classes


def class_numbers(test: Any, train: Any) -> list[int]:
    """Return the number that each class of the test images has among the training images.

    ValueError if it is not among them, if an image has no class, or if the test images are some of
    the training images.
    """
    for files in train, test:
        if min(files.labels) < 0:
            raise ValueError(f"{files.root} has images outside of a folder of their class")
    if test is not train and lists_overlap(test, train):
        raise ValueError(
            f"--test {test.root} has images of --data {train.root}, on which the model is trained: "
            "give other images"
        )
    unknown = sorted(set(test.classes) - set(train.classes))
    if unknown:
        some = ", ".join(unknown[:5])
        raise ValueError(f"{test.root} has classes that {train.root} does not have: {some}")
    return [train.classes.index(name) for name in test.classes]


# --- Features


def encode_folder(
    args: argparse.Namespace, pretrained: Pretrained, models: Sequence[Any], files: Any
) -> tuple[list[Tensor], Tensor]:
    """Encode the readable images -> features (N, D) of each model, labels (N,), on the CPU.

    Names the other images. ValueError if no image can be read.
    """
    size = models[0].img_size
    stats = pretrained.stats
    workers = worker_count(args.workers, mesh.read_ranks({}))
    progress = throttled_progress(f"features of {files.root}")
    device = next(models[0].parameters()).device
    indices: list[int] = []
    features: list[list[Tensor]] = [[] for _ in models]
    for batch in open_eval_loader(files, size, BATCH, workers, stats):
        for index, reason in batch.bad.items():
            print(f"warning: {files.path(index)} is left out: {reason}")
        if batch.indices:
            images = data.normalize(batch.images.to(device), stats)
            for own, model in zip(features, models, strict=True):
                own.append(encode(model, images, args.features == "cls"))
            indices.extend(batch.indices)
        progress(len(indices))
    if not indices:
        raise ValueError(f"none of the {len(files)} images in {files.root} can be read")
    labels = torch.tensor([int(files.labels[index]) for index in indices])
    return [torch.cat(own) for own in features], labels


@torch.inference_mode()
def encode(model: vit.ViTMAE | None, images: Tensor, cls: bool) -> Tensor:
    """Compute the features (B, D) fp32 of normalised images (B, C, H, W), on the CPU.

    They are the class token after the final norm, or the mean of the patch tokens; all patches are
    visible. Without a model they are the pixels of a smaller image. A GPU computes in bf16.
    """
    if model is None:
        return F.adaptive_avg_pool2d(images, PIXELS_SIDE).flatten(1).cpu()
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        tokens = model.features(images).float()  # (B, 1+L, D)
    if cls:
        return tokens[:, 0].cpu()
    return tokens[:, 1:].mean(dim=1).cpu()


# --- Classifiers


def nearest_vote(bank: Tensor, labels: Tensor, queries: Tensor, classes: int, k: int) -> Tensor:
    """Let the k rows of `bank` (N, D) most similar to each query (Q, D) vote -> (Q, classes) fp64.

    The similarity is the cosine, the weight of a vote exp(similarity / 0.07), as in Wu et al.
    (arXiv 1805.01978, section 3.4), DINO and others. A class without a vote has -inf.
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


@torch.no_grad()
def scale_gradient(p: Any) -> None:
    """Multiply a parameter's gradient by the parameter's norm over the gradient's norm.

    With SGD this is LARS, as in You, Gitman, Ginsburg (arXiv 1708.03888, algorithm 1). Vectors
    (biases) are trained with plain SGD.
    """
    if p.ndim > 1:
        norm = p.grad.norm()  # may be 0: its squares underflow once the loss is almost 0
        p.grad *= torch.where(norm > 0, LARS_TRUST * p.norm() / norm, 1.0)


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step: a linear warm-up, then a half cosine down to 0."""
    warmup = int(WARMUP_SHARE * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train_linear(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    epochs: int | None = None,
    batch: int = 16384,
    blr: float = 0.1,
    seed: int = 0,
) -> tuple[nn.Module, Tensor]:
    """Train BatchNorm without affine and a linear layer -> the model, the loss of each step (S,).

    This is the protocol of MAE (arXiv 2111.06377, A.1) on features (N, D) with labels (N,): LARS,
    no weight decay, 90 epochs (more on a small set), of which 10 warm up, then a cosine. The seed
    decides the initial values and the order.
    """
    generator = torch.Generator().manual_seed(seed)
    count, width = features.shape
    batch = min(batch, count)
    if epochs is None:
        epochs = max(EPOCHS, math.ceil(SAMPLES / count))
    epoch_steps = count // batch
    peak_lr = blr * batch / 256
    linear = nn.Linear(width, classes)
    nn.init.trunc_normal_(linear.weight, std=0.01, generator=generator)
    nn.init.zeros_(linear.bias)
    model = nn.Sequential(nn.BatchNorm1d(width, eps=1e-6, affine=False), linear)
    model.to(features.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=peak_lr, momentum=LARS_MOMENTUM)
    labels = labels.to(features.device)
    progress = throttled_progress(f"linear classifier, {epochs} epochs of {count} images")
    losses: list[Tensor] = []
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
            rate = rate_at(len(losses), epochs * epoch_steps, peak_lr)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            losses.append(loss.detach())
            progress(len(losses) * batch)
    return model.eval(), torch.stack(losses).cpu()


def has_converged(losses: Tensor) -> bool:
    """Tell from the losses (S,) of a training whether longer training would hardly change them.

    It would change them if more than a tenth of their fall was in the second half, or if they did
    not fall.
    """
    tenth = max(1, len(losses) // 10)
    middle = len(losses) // 2
    first = losses[0]
    half = losses[middle : middle + tenth].mean()
    last = losses[-tenth:].mean()
    return bool(last < first and half - last <= 0.1 * (first - last))


# --- Scores


def split_per_class(labels: Tensor, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split rows by their labels (N,) into training and test rows, each sorted.

    The training rows are the same share of each class, rounded, but each side gets at least one
    image. The only image of a class is for training.
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
    model, losses = train_linear(bank, labels, classes, epochs=args.epochs, blr=args.blr, seed=seed)
    with torch.inference_mode():
        own = model(bank).double().cpu()
        found = model(queries).double().cpu()
    facts["training_top1"] = 100 * (own.argmax(dim=1) == labels).double().mean().item()
    facts["training_loss"] = F.cross_entropy(own, labels).item()
    facts["converged"] = has_converged(losses)
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


def report_scores(
    args: argparse.Namespace, pretrained: Pretrained, scores: Sequence[dict[str, Any]]
) -> None:
    """Print a table, one line per source with means over the seeds; write all to OUT/NAME.json."""
    settings: dict[str, Any] = {}
    for key in SETTINGS:
        value = getattr(args, key, None)
        if value is not None:
            settings[key] = value
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
    early = {score["source"] for score in scores if not score.get("converged", True)}
    if early:
        advice = "scores may change with more --epochs or a larger --blr"
        print(f"warning: not converged: {', '.join(sorted(early))}; {advice}")
    found = {
        "run": pretrained.name,
        "step": pretrained.step,
        "data": args.data,
        "test": args.test,
        **settings,
        "mean": means,
        "scores": scores,
    }
    path = Path(args.out, f"{args.command}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(json.dumps(found, indent=2).encode())
    print(f"{path}: each seed", flush=True)
