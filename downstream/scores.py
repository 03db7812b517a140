"""Score the frozen features of a model beside two baselines: its random weights, and raw pixels.

`probe.py knn` lets the most similar training images vote, `probe.py linear` trains a linear layer.
All ranks compute features, rank 0 scores them. Shapes: N images, Q of them to test on, D width.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import data
import mesh
import vit
from downstream import classifiers
from downstream.images import open_eval_loader
from downstream.weights import Pretrained, build_pretrained, random_weights, read_pretrained
from runtime import agreement
from runtime.config import filled, number, whole
from runtime.device_batches import worker_count
from runtime.image_source import check_folder, list_folder
from runtime.process import print_error, throttled_progress, usage_error
from storage.safe_files import replacing

HELP = "score frozen features: knn without training, linear by a linear classifier"
BATCH = 64  # images; always as many, so that any number of ranks computes the same bits
PIXELS_SIDE = 16  # of the smaller image that is the raw-pixel baseline
SETTINGS = ("k", "epochs", "blr", "features", "split")  # shown beside the scores
COLUMNS = {  # of the table, by the keys of a score: heads and formats; the last two are of `linear`
    "top1": ("top-1", "5.1f"),
    "top5": ("top-5", "5.1f"),
    "training_top1": ("training top-1", "14.1f"),
    "training_loss": ("training loss", "13.3f"),
}
Say = Callable[[str], None]
Source = tuple[str, int | None]  # a name in the table, the seed of random weights
Share = tuple[list[int], Tensor]  # images that a rank could read, by index; their features (n, D)


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
    workers = "processes that read images, per rank (default: cores - 1, at most 6)"
    add("--workers", type=whole(0), metavar="N", help=workers)
    add("--out", type=filled, default="probe", metavar="DIR", help="for the scores (default probe)")
    if parser.prog.endswith("knn"):
        add("--k", type=whole(1), default=20, metavar="K", help="neighbours that vote (default 20)")
        return
    epochs = f"default {classifiers.EPOCHS}, more on a small set: what shows two million images"
    add("--epochs", type=whole(1), metavar="N", help=epochs)
    add("--blr", type=number(0), default=0.1, help="lr = blr x batch / 256 (default 0.1)")


def run(args: argparse.Namespace) -> int:
    """Encode by all ranks, score on rank 0, one source after the other -> exit status."""
    try:
        ranks = mesh.read_ranks(os.environ)
        device = mesh.pick_device(args.device, ranks)
        mesh.init_ranks(ranks, device, timeout_minutes=120)  # in which rank 0 trains a classifier
    except (ValueError, RuntimeError) as error:
        return usage_error(str(error), local=True, program="probe.py")
    say: Say = partial(print, flush=True) if ranks.rank == 0 else lambda text: None
    random = [("random weights", seed) for seed in range(args.seeds)]
    status, scores = 0, list[dict[str, Any]]()
    try:
        inputs = agreement.run_on_all_ranks(partial(read_inputs, args, say))
        for source in [("trained", None), *random, ("raw pixels", None)]:
            encode_own = partial(encode_share, args, source, inputs, ranks, device, say)
            shares: Any = agreement.gather_to_rank0(agreement.run_on_all_ranks(encode_own))
            score_all = partial(score_source, args, source, inputs[1], shares, device)
            scores += agreement.run_on_rank0(score_all)
        agreement.run_on_rank0(partial(report_scores, args, inputs[0], scores))
    except agreement.AgreedError as error:
        status = error.status
        if ranks.rank == 0:
            print_error(str(error), "probe.py")
    dist.barrier()  # rank 0 serves the store: it leaves last
    dist.destroy_process_group()
    return status


# --- Features


def read_inputs(args: argparse.Namespace, say: Say) -> tuple[Pretrained, list[Any]]:
    """Read the model; list --data, and --test if it is given. ValueError or OSError."""
    pretrained, folders = read_pretrained(args.run), []
    for flag, path in ("--data", args.data), ("--test", args.test):
        if path:
            check_folder(path, flag)
            folders.append(list_folder(path, None, say)[0])
            if not len(folders[-1].classes):
                raise ValueError(f"{path} has no classes: a score needs a folder for each class")
    class_numbers(folders[-1], folders[0])
    return pretrained, folders


def class_numbers(test: Any, train: Any) -> list[int]:
    """Return the number in training of each class of the test images; ValueError without one."""
    if unknown := sorted({*test.classes} - {*train.classes}):
        some = ", ".join(unknown[:5])
        raise ValueError(f"{test.root} has classes that {train.root} does not have: {some}")
    return [train.classes.index(name) for name in test.classes]


def encode_share(
    args: argparse.Namespace,
    source: Source,
    inputs: tuple[Pretrained, list[Any]],
    ranks: mesh.Ranks,
    device: torch.device,
    say: Say,
) -> list[Share]:
    """Encode this rank's images of each folder, and name those that cannot be read.

    OSError where a disk or a worker process fails, ValueError where features are not finite.
    """
    (name, seed), (pretrained, folders) = source, inputs
    size, stats = args.img_size or pretrained.img_size, pretrained.stats
    workers, share = worker_count(args.workers, ranks), (ranks.rank, ranks.world_size)
    model, shares = None, list[Share]()
    if name != "raw pixels":
        weights = pretrained if seed is None else random_weights(pretrained, seed)
        model = build_pretrained(weights, device, size)
    for files in folders:
        progress = throttled_progress(say, f"features of {name}, {files.root}, rank 0")
        indices, rows = list[int](), [torch.empty(0)]
        for batch in open_eval_loader(files, size, BATCH, workers, stats, share=share):
            for index, reason in batch.bad if name == "trained" else []:
                print(f"warning: {files.path(index)} is left out: {reason}", flush=True)
            if batch.indices:
                images = batch.images.to(device)
                rows.append(encode(model, images, stats, args.features == "cls"))
                indices += batch.indices
            progress(len(indices))
        shares.append((indices, torch.cat(rows)))
    return shares


@torch.inference_mode()
def encode(model: vit.ViTMAE | None, images: Tensor, stats: data.ChannelStats, cls: bool) -> Tensor:
    """Compute the features (B, D) fp32 of images (B, C, H, W) as loaded, on the CPU.

    They are the class token after the final norm, or the mean of the patch tokens, with all patches
    visible; without a model, small pixels. A GPU computes in bf16. ValueError for NaN or infinity.
    """
    images = data.normalize(images, stats)
    if model is None:
        return F.adaptive_avg_pool2d(images, PIXELS_SIDE).flatten(1).cpu()
    patches = vit.patchify(images, model.config.patch)  # (B, L, P*P*C)
    keep = torch.arange(patches.shape[1], device=images.device).expand(len(images), -1)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        tokens = model.encode(patches, keep).float()  # (B, 1+L, D)
    features = (tokens[:, 0] if cls else tokens[:, 1:].mean(dim=1)).cpu()
    if not features.isfinite().all():
        raise ValueError("the features of the model are NaN or infinite")
    return features


def join_shares(files: Any, train: Any, shares: Sequence[Share]) -> tuple[Tensor, np.ndarray]:
    """Join what all ranks have encoded of a folder, in its order -> features (N, D), labels (N,).

    Labels are class numbers of `train`, -1 without a class. ValueError where all are unreadable.
    """
    indices = np.array([index for own, _ in shares for index in own], np.int64)
    if not len(indices):
        raise ValueError(f"none of the {len(files)} images in {files.root} can be read")
    order, numbers = indices.argsort(), np.array([*class_numbers(files, train), -1])  # -1: the last
    labels = numbers[np.asarray(files.labels, np.int64)[indices[order]]]
    return torch.cat([rows for _, rows in shares])[order], labels


# --- Scores


def split_per_class(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split rows by their labels (N,) into training and test rows, each sorted; -1 is in neither.

    Each class gives the same share, rounded, but one image at least to either; a single one trains.
    """
    draw, train = np.random.default_rng(seed), []
    for label in range(labels.max() + 1):
        rows = np.flatnonzero(labels == label)
        count = max(1, min(round(share * len(rows)), len(rows) - 1))
        train.append(draw.permutation(rows)[:count])
    chosen = np.sort(np.concatenate(train))
    return chosen, np.setdiff1d(np.flatnonzero(labels >= 0), chosen)


def score_source(
    args: argparse.Namespace,
    source: Source,
    folders: Sequence[Any],
    shares: Sequence[list[Share]],
    device: torch.device,
) -> list[dict[str, Any]]:
    """Train and test a classifier on the features of one source, for each seed -> its scores."""
    (name, own_seed), classes, scores = source, len(folders[0].classes), list[dict[str, Any]]()
    parts = zip(folders, zip(*shares, strict=True), strict=True)
    joined = [join_shares(files, folders[0], own) for files, own in parts]
    (features, labels), (queries, truths) = joined[0], joined[-1]
    for seed in range(args.seeds) if own_seed is None else [own_seed]:
        train, test = np.flatnonzero(labels >= 0), np.flatnonzero(truths >= 0)
        if args.split is not None:
            train, test = split_per_class(labels, args.split, seed)
        bank, target = features[train].to(device), torch.from_numpy(labels[train])
        asked, truth = queries[test].to(device), torch.from_numpy(truths[test])
        votes, facts = score_queries(args, classes, bank, target, asked, seed)
        facts |= {"source": name, "seed": seed, "test_images": len(test)}
        scores.append(facts | measure(votes, truth))
    return scores


def score_queries(
    args: argparse.Namespace, classes: int, bank: Tensor, labels: Tensor, queries: Tensor, seed: int
) -> tuple[Tensor, dict[str, Any]]:
    """Score queries (Q, D) by features (N, D) -> (Q, classes) float64, facts of the training."""
    if args.command == "knn":
        return classifiers.nearest_vote(bank, labels, queries, classes, args.k), {}
    progress = throttled_progress(partial(print, flush=True), "linear classifier")
    options: Any = {"epochs": args.epochs, "blr": args.blr, "seed": seed, "progress": progress}
    model, losses = classifiers.train_linear(bank, labels, classes, **options)
    with torch.inference_mode():
        own, scores = (model(x).double().cpu() for x in (bank, queries))
    return scores, {
        "training_top1": 100 * (own.argmax(dim=1) == labels).double().mean().item(),
        "training_loss": F.cross_entropy(own, labels).item(),
        "converged": classifiers.has_converged(losses),
    }


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
