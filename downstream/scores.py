"""Score the frozen features of a model beside two baselines: its random weights, and raw pixels.

`probe.py knn` lets the most similar training images vote, `probe.py linear` trains a linear layer.
Shapes: N images, Q of them to test on, D width.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import data
import mesh
import vit
from downstream import classifiers
from downstream.images import open_eval_loader
from downstream.weights import Pretrained, build_pretrained, random_weights, read_pretrained
from runtime.config import filled, number, whole
from runtime.device_batches import worker_count
from runtime.image_source import check_folder, list_folder
from runtime.process import throttled_progress
from storage.safe_files import replacing

HELP = "score frozen features: knn without training, linear by a linear classifier"
BATCH = 64  # images
PIXELS_SIDE = 16  # of the smaller image that is the raw-pixel baseline
SETTINGS = ("k", "epochs", "blr", "features", "split")  # shown beside the scores
COLUMNS = {  # of the table, by the keys of a score: heads and formats; the last two are of `linear`
    "top1": ("top-1", "5.1f"),
    "top5": ("top-5", "5.1f"),
    "training_top1": ("training top-1", "14.1f"),
    "training_loss": ("training loss", "13.3f"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `knn` or `linear`, whichever the parser is for."""
    add = parser.add_argument
    test = parser.add_mutually_exclusive_group(required=True)
    test.add_argument("--test", type=filled, metavar="DIR", help="test on it, train on --data")
    share = "train on this share of each class of --data, test on the rest"
    test.add_argument("--split", type=number(0, 1), metavar="SHARE", help=share)
    add("--features", choices=("cls", "mean"), default="cls", help="class token (default) or mean")
    seeds = "average over N seeds: of split, random weights, training (default 1)"
    add("--seeds", type=whole(1), default=1, metavar="N", help=seeds)
    workers = "processes that read images (default: cores - 1, at most 6)"
    add("--workers", type=whole(0), metavar="N", help=workers)
    add("--out", type=filled, default="probe", metavar="DIR", help="for the scores (default probe)")
    if parser.prog.endswith("knn"):
        add("--k", type=whole(1), default=20, metavar="K", help="neighbours that vote (default 20)")
        return
    epochs = f"default {classifiers.EPOCHS}, more on a small set: what shows two million images"
    add("--epochs", type=whole(1), metavar="N", help=epochs)
    add("--blr", type=number(0), default=0.1, help="lr = blr x batch / 256 (default 0.1)")


def run(args: argparse.Namespace) -> int:
    """Encode all images by each source, then score each -> exit status; ValueError or OSError."""
    pretrained, folders = read_pretrained(args.run), list[Any]()
    for flag, path in ("--data", args.data), ("--test", args.test):
        if path:
            check_folder(path, flag)
            folders.append(list_folder(path, None, print)[0])
    numbers = torch.tensor(class_numbers(folders[-1], folders[0]))
    device, seeds = mesh.pick_device(args.device, mesh.read_ranks({})), range(args.seeds)
    random = [random_weights(pretrained, seed) for seed in seeds]
    models = [build_pretrained(p, device, args.img_size) for p in (pretrained, *random)]
    encoded = [encode_folder(args, pretrained, [*models, None], files) for files in folders]
    (banks, labels), (queries, truths) = encoded[0], encoded[-1]
    truths, scores = numbers[truths], list[dict[str, Any]]()
    for seed in seeds:
        for name, i in ("trained", 0), ("random weights", 1 + seed), ("raw pixels", -1):
            train, test = (banks[i].to(device), labels), (queries[i].to(device), truths)
            facts = score_features(args, train, test, len(folders[0].classes), seed)
            scores.append({"source": name, "seed": seed} | facts)
    report_scores(args, pretrained, scores)
    return 0


# --- Features


def class_numbers(test: Any, train: Any) -> list[int]:
    """Return the number in training of each class of the test images.

    ValueError where there is none, or an image has no class.
    """
    for files in train, test:
        if min(files.labels) < 0:
            raise ValueError(f"{files.root} has images outside of a folder of their class")
    if unknown := sorted({*test.classes} - {*train.classes}):
        some = ", ".join(unknown[:5])
        raise ValueError(f"{test.root} has classes that {train.root} does not have: {some}")
    return [train.classes.index(name) for name in test.classes]


def encode_folder(
    args: argparse.Namespace, pretrained: Pretrained, models: Sequence[Any], files: Any
) -> tuple[list[Tensor], Tensor]:
    """Encode the images that can be read -> features (N, D) of each model, labels (N,), on the CPU.

    Names the others. ValueError where there are only such.
    """
    size, stats = args.img_size or pretrained.img_size, pretrained.stats
    workers = worker_count(args.workers, mesh.read_ranks({}))
    progress = throttled_progress(print, f"features of {files.root}")
    device = next(models[0].parameters()).device
    indices, rows = list[int](), list[list[Tensor]]()
    for batch in open_eval_loader(files, size, BATCH, workers, stats):
        for index, reason in batch.bad:
            print(f"warning: {files.path(index)} is left out: {reason}")
        if batch.indices:
            images = data.normalize(batch.images.to(device), stats)
            rows.append([encode(model, images, args.features == "cls") for model in models])
            indices += batch.indices
        progress(len(indices))
    if not rows:
        raise ValueError(f"none of the {len(files)} images in {files.root} can be read")
    labels = torch.tensor([int(files.labels[index]) for index in indices])
    return [torch.cat(own) for own in zip(*rows, strict=True)], labels


@torch.inference_mode()
def encode(model: vit.ViTMAE | None, images: Tensor, cls: bool) -> Tensor:
    """Compute the features (B, D) fp32 of normalised images (B, C, H, W), on the CPU.

    They are the class token after the final norm, or the mean of the patch tokens, with all patches
    visible; without a model, small pixels. A GPU computes in bf16.
    """
    if model is None:
        return F.adaptive_avg_pool2d(images, PIXELS_SIDE).flatten(1).cpu()
    patches = vit.patchify(images, model.config.patch)  # (B, L, P*P*C)
    keep = torch.arange(patches.shape[1], device=images.device).expand(len(images), -1)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        tokens = model.encode(patches, keep).float()  # (B, 1+L, D)
    return (tokens[:, 0] if cls else tokens[:, 1:].mean(dim=1)).cpu()


# --- Scores


def split_per_class(labels: Tensor, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split rows by their labels (N,) into training and test rows, each sorted.

    Each class gives the same share, rounded, but one image at least to either; a single one trains.
    """
    draw, train = np.random.default_rng(seed), []
    for label in range(int(labels.max()) + 1):
        rows = np.flatnonzero(labels == label)
        count = max(1, min(round(share * len(rows)), len(rows) - 1))
        train.append(draw.permutation(rows)[:count])
    chosen = np.sort(np.concatenate(train))
    return chosen, np.setdiff1d(np.arange(len(labels)), chosen)


def score_features(
    args: argparse.Namespace,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    seed: int,
) -> dict[str, Any]:
    """Train a classifier on features (N, D) with labels (N,), and test it on others -> its scores.

    With --split both are taken from `train`.
    """
    (bank, labels), (queries, truths) = train, test
    if args.split is not None:
        chosen, others = split_per_class(labels, args.split, seed)
        bank, labels, queries, truths = bank[chosen], labels[chosen], bank[others], labels[others]
    facts: dict[str, Any] = {"test_images": len(truths)}
    if args.command == "knn":
        votes = classifiers.nearest_vote(bank, labels, queries, classes, args.k)
        return facts | measure(votes, truths)
    options = {"epochs": args.epochs, "blr": args.blr, "seed": seed}
    model, losses = classifiers.train_linear(bank, labels, classes, **options)
    with torch.inference_mode():
        own, found = (model(x).double().cpu() for x in (bank, queries))
    facts["training_top1"] = 100 * (own.argmax(dim=1) == labels).double().mean().item()
    facts["training_loss"] = F.cross_entropy(own, labels).item()
    facts["converged"] = classifiers.has_converged(losses)
    return facts | measure(found, truths)


def measure(values: Tensor, labels: Tensor) -> dict[str, float]:
    """Compare scores (Q, classes) with labels (Q,) -> top-1 and top-5 in percent.

    Of equal scores the class listed first counts; a class with the score -inf is never a hit.
    """
    ranked, order = values.sort(dim=1, descending=True, stable=True)
    hits = (order == labels[:, None]) & (ranked > -torch.inf)  # (Q, classes)
    return {f"top{n}": (hits[:, :n].any(1).double() * 100).mean().item() for n in (1, 5)}


def report_scores(
    args: argparse.Namespace, pretrained: Pretrained, scores: Sequence[dict[str, Any]]
) -> None:
    """Print a table, one line per source with means over the seeds; write all to OUT/NAME.json."""
    settings = {key: getattr(args, key) for key in SETTINGS if getattr(args, key, None)}
    what = ", ".join(f"{key} {value}" for key, value in settings.items())
    columns = [key for key in COLUMNS if key in scores[0]]
    heads = "   ".join(COLUMNS[key][0] for key in columns)
    seeds = ", ".join(map(str, range(args.seeds)))
    print(f"{args.command} ({what}): {scores[0]['test_images']} test images")
    print(f"  {'':16} {heads}   top-1 of seed {seeds}")
    means: dict[str, dict[str, float]] = {}
    for source in dict.fromkeys(score["source"] for score in scores):
        own = [score for score in scores if score["source"] == source]
        mean = means[source] = {key: sum(s[key] for s in own) / len(own) for key in columns}
        numbers = "   ".join(f"{mean[key]:{COLUMNS[key][1]}}" for key in columns)
        each = " ".join(f"{score['top1']:.1f}" for score in own)
        print(f"  {source:16} {numbers}   {each}")
    if early := {score["source"] for score in scores if not score.get("converged", True)}:
        advice = "scores may change with more --epochs or a larger --blr"
        print(f"warning: not converged: {', '.join(sorted(early))}; {advice}")
    about = {"run": pretrained.name, "step": pretrained.step, "data": args.data, "test": args.test}
    path = Path(args.out, f"{args.command}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(str(path)) as file:
        found = about | settings | {"mean": means, "scores": scores}
        file.write(json.dumps(found, indent=2).encode())
    print(f"{path}: each seed", flush=True)
