"""Score the frozen features of a model beside two baselines: its random weights, and raw pixels.

What knn and linear have in common: flags, features, splits, the table on the terminal, and the
files with all numbers.
"""

import argparse
import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import mesh
import vit
from downstream.features import (
    FeatureFile,
    FeatureOptions,
    LabelledImages,
    Rows,
    Source,
    find_features,
    weights_identity,
)
from downstream.weights import Pretrained, random_weights, read_pretrained
from runtime import agreement
from runtime.config import filled, number, whole
from runtime.image_source import check_folder, list_folder
from runtime.process import throttled_progress

# (training rows, their labels (N,), test rows, classes, seed, device) -> scores (Q, classes)
Classify = Callable[[Rows, Tensor, Rows, int, int, torch.device], Tensor]


@dataclass(frozen=True)
class Task:
    """What is scored on what: the flags that knn and linear have in common."""

    run: str
    data: str
    test: str | None
    split: float | None
    features: str
    grey: bool
    img_size: int | None
    device: str
    seed: int
    seeds: int
    workers: int | None
    out: str | None

    @property
    def all_seeds(self) -> range:
        return range(self.seed, self.seed + self.seeds)

    @property
    def folder(self) -> Path:
        """Where results go: --out, or a folder below `probe` with the name of the run."""
        parts = [part for part in Path(self.run).parts if part not in ("/", "..")]
        return Path(self.out) if self.out else Path("probe", *parts)


@dataclass(frozen=True)
class Score:
    """The scores of one source of features with one seed, in percent."""

    source: str
    seed: int
    top1: float
    top5: float
    classes: dict[str, dict[str, float]]  # of each class: images, top1, top5


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that knn and linear have in common."""
    add = parser.add_argument
    test = parser.add_mutually_exclusive_group(required=True)
    test.add_argument("--test", type=filled, metavar="DIR", help="test on it, train on --data")
    test.add_argument(
        "--split",
        type=number(0, 1),
        metavar="SHARE",
        help="train on this share of each class of --data, drawn by the seed; test on the rest",
    )
    add("--features", choices=("cls", "mean"), default="cls", help="class token (default) or mean")
    add("--grey", action="store_true", help="make the images grey first")
    add("--seed", type=whole(0, 2**31), default=0, help="of split, random weights, training (0)")
    add("--seeds", type=whole(1, 100), default=1, metavar="N", help="seeds to average over (1)")
    add(
        "--workers",
        type=whole(0, 1024),
        metavar="N",
        help="processes that read images, per rank (default: cores - 1, at most 8)",
    )
    add("--out", type=filled, metavar="DIR", help="for scores and features (default probe/RUN)")


def run_scores(
    flags: Mapping[str, Any], name: str, settings: dict[str, Any], classify: Classify
) -> int:
    """Compute features with all ranks, then score them on rank 0 -> exit status.

    ValueError or OSError, one sentence, where that is not possible.
    """
    task = Task(**{field.name: flags[field.name] for field in fields(Task)})
    try:
        ranks = mesh.read_ranks(os.environ)
        device = mesh.pick_device(task.device, ranks)
        mesh.init_ranks(ranks, device)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    problem = None
    try:
        pretrained = agreement.run_on_all_ranks(partial(read_pretrained, task.run))
        found = compute_features(task, pretrained, ranks, device)
    except agreement.AgreedError as error:
        problem = str(error)
    dist.barrier()  # rank 0 serves the store: it leaves last
    dist.destroy_process_group()
    if ranks.rank:
        return 1 if problem else 0
    if problem:
        raise ValueError(problem)
    scores = score_sources(task, found, classify, device)
    print(format_table(name, scores, settings, task), flush=True)
    about: dict[str, Any] = {
        "run": pretrained.name,
        "step": pretrained.step,
        "command": name,
        **settings,
    }
    about |= {key: getattr(task, key) for key in ("data", "test", "split", "features", "grey")}
    write_scores(task.folder, name, about, scores)
    return 0


# ---------------------------------------------------------------------------------------------
# Features


@dataclass(frozen=True)
class Features:
    """The features of one source: of --data, and of --test if it is given."""

    source: Source
    train: tuple[LabelledImages, FeatureFile]
    test: tuple[LabelledImages, FeatureFile] | None


def list_sources(pretrained: Pretrained, seeds: Sequence[int]) -> list[Source]:
    """Return what is scored: the model, its random weights by each seed, raw pixels."""
    sources = [Source("trained", None, weights_identity(pretrained), lambda: pretrained)]
    for seed in seeds:
        identity = f"{pretrained.config} {seed}"
        load = partial(random_weights, pretrained, seed)
        sources.append(Source("random weights", seed, identity, load))
    return [*sources, Source("raw pixels", None, "pixels", None)]


def compute_features(
    task: Task, pretrained: Pretrained, ranks: mesh.Ranks, device: torch.device
) -> list[Features]:
    """Find or compute the features of every source. Collective; AgreedError where that fails."""

    def say(text: str) -> None:
        if ranks.rank == 0:
            print(text, flush=True)

    def check() -> FeatureOptions:
        img_size = task.img_size or pretrained.img_size
        vit.patch_count(pretrained.config, img_size)
        if task.grey and (pretrained.config.channels, pretrained.stats.dtype) != (3, "uint8"):
            raise ValueError("--grey needs a model of RGB images")
        return FeatureOptions(img_size, task.features, task.grey, pretrained.stats)

    options = agreement.run_on_all_ranks(check)
    folders = {"--data": task.data} | ({"--test": task.test} if task.test else {})
    images = [
        agreement.run_on_all_ranks(partial(list_images_of, folder, flag, say))
        for flag, folder in folders.items()
    ]
    agreement.run_on_all_ranks(partial(check_classes, images))
    workers = task.workers
    if workers is None:
        workers = min(8, mesh.cpu_cores(ranks) - 1)
    found: list[Features] = []
    for source in list_sources(pretrained, task.all_seeds):
        files = []
        for one in images:
            progress = throttled_progress(say, f"features of {source.name}, {one.folder}")
            file = find_features(
                source,
                one,
                options,
                task.folder / "features",
                device=device,
                workers=workers,
                progress=progress,
            )
            files.append((one, file))
        if not found:
            for one, file in files:
                for index, reason in file.bad:
                    say(f"warning: {one.files.path(index)} is left out: {reason}")
        found.append(Features(source, files[0], files[1] if task.test else None))
    return found


def list_images_of(folder: str, flag: str, say: Callable[[str], None]) -> LabelledImages:
    """List the class tree of a flag; ValueError where its images have no classes."""
    check_folder(folder, flag)
    files, fingerprint = list_folder(folder, None, say)
    if not len(files.classes):
        raise ValueError(f"{folder} has no classes: a score needs a folder for each class")
    return LabelledImages(folder, files, fingerprint)


def check_classes(images: Sequence[LabelledImages]) -> None:
    """Raise ValueError where one folder cannot be split, or the second has other classes."""
    first, *second = images
    counts = np.bincount(np.asarray(first.files.labels) + 1)[1:]
    if not second and 1 in counts:
        name = first.files.classes[counts.tolist().index(1)]
        raise ValueError(f"class {name} of {first.folder} has a single image: it cannot be split")
    for one in second:
        if unknown := sorted({*one.files.classes} - {*first.files.classes}):
            some = ", ".join(unknown[:5])
            raise ValueError(f"{one.folder} has classes that {first.folder} does not have: {some}")


# ---------------------------------------------------------------------------------------------
# Scores


def split_per_class(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split rows by their labels (N,) into training and test rows, each sorted.

    Each class gives the same share, rounded, but at least one image to either. Rows with label -1
    are in neither. A class of a single image is for training.
    """
    draw, train = np.random.default_rng(seed), []
    for label in range(labels.max() + 1):
        rows = np.flatnonzero(labels == label)
        count = max(1, min(round(share * len(rows)), len(rows) - 1))
        train.append(draw.permutation(rows)[:count])
    chosen = np.sort(np.concatenate(train))
    return chosen, np.setdiff1d(np.flatnonzero(labels >= 0), chosen)


def labels_of(images: LabelledImages, file: FeatureFile, classes: Sequence[str]) -> np.ndarray:
    """Return the labels (N,) int64 by the numbers of `classes`; -1 for unreadable images too."""
    number_of = np.array([*(classes.index(name) for name in images.files.classes), -1])
    labels = number_of[np.asarray(images.files.labels, np.int64)]  # -1 is the last
    labels[[index for index, _ in file.bad]] = -1
    return labels


def score_sources(
    task: Task, found: list[Features], classify: Classify, device: torch.device
) -> list[Score]:
    """Train and test a classifier on the features of every source, once for each seed."""
    scores = []
    for seed in task.all_seeds:
        for features in found:
            if features.source.seed not in (None, seed):
                continue
            images, file = features.train
            classes = images.files.classes
            labels = labels_of(images, file, classes)
            if features.test:
                train = np.flatnonzero(labels >= 0)
                test_labels, test_file = labels_of(*features.test, classes), features.test[1]
                test = np.flatnonzero(test_labels >= 0)
            else:
                train, test = split_per_class(labels, task.split or 0, seed)
                test_labels, test_file = labels, file
            if not len(train) or not len(test):
                raise ValueError("no image with a class is left to train on, or to test on")
            bank, queries = Rows(file.path, train), Rows(test_file.path, test)
            target = torch.from_numpy(test_labels[test])
            values = classify(
                bank, torch.from_numpy(labels[train]), queries, len(classes), seed, device
            )
            scores.append(measure(features.source.name, seed, values, target, classes))
    return scores


def measure(
    source: str, seed: int, values: Tensor, labels: Tensor, classes: Sequence[str]
) -> Score:
    """Compare scores (Q, classes) with labels (Q,); of equal ones the class listed first counts.

    A class with the score -inf is never a hit.
    """
    ranked, order = values.sort(dim=1, descending=True, stable=True)
    hits = (order == labels[:, None]) & (ranked > -torch.inf)  # (Q, classes)
    top1, top5 = (hits[:, :n].any(dim=1).double() * 100 for n in (1, 5))  # (Q,)
    table = {}
    for number_of, name in enumerate(classes):
        own = labels == number_of
        if own.any():
            table[name] = {
                "images": int(own.sum()),
                "top1": top1[own].mean().item(),
                "top5": top5[own].mean().item(),
            }
    return Score(source, seed, top1.mean().item(), top5.mean().item(), table)


def average(scores: Sequence[Score]) -> dict[str, dict[str, float]]:
    """Average top-1 and top-5 over the seeds, for each source in order."""
    table = {}
    for source in dict.fromkeys(score.source for score in scores):
        own = [score for score in scores if score.source == source]
        table[source] = {key: sum(getattr(s, key) for s in own) / len(own) for key in TOPS}
    return table


TOPS = ("top1", "top5")


def format_table(name: str, scores: Sequence[Score], settings: dict[str, Any], task: Task) -> str:
    """Format the scores, one line per source: means over the seeds, then top-1 of each seed."""
    seeds = list(dict.fromkeys(score.seed for score in scores))
    images = sum(int(row["images"]) for row in scores[0].classes.values())
    what = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
    head = f"{name} ({what}, features {task.features}{', grey' * task.grey}): {images} test images"
    lines = [head, f"  {'':16} top-1   top-5   top-1 of seed {', '.join(map(str, seeds))}"]
    for source, mean in average(scores).items():
        each = " ".join(f"{s.top1:.1f}" for s in scores if s.source == source)
        lines.append(f"  {source:16} {mean['top1']:5.1f}   {mean['top5']:5.1f}   {each}")
    return "\n".join(lines)


def write_scores(folder: Path, name: str, about: dict[str, Any], scores: Sequence[Score]) -> None:
    """Write NAME.json and NAME.csv, one row per source, seed and class."""
    folder.mkdir(parents=True, exist_ok=True)
    document = about | {"mean": average(scores), "scores": [asdict(score) for score in scores]}
    (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "seed", "class", "images", *TOPS])
        for score in scores:
            total = sum(int(row["images"]) for row in score.classes.values())
            rows = {"all classes": {"images": total, "top1": score.top1, "top5": score.top5}}
            for key, row in (rows | score.classes).items():
                writer.writerow([score.source, score.seed, key, *row.values()])
    print(f"{folder / name}.csv and .json: per class and seed")
