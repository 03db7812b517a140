"""Make the points of a sweep: the runs of a study.

A point is a command line of train_fsdp.py, with a number of nodes and of ranks on each of them. If
a flag is given twice, the last one counts.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from runtime.image_source import check_folder


class Layout(NamedTuple):
    """Where a point runs."""

    nodes: int
    ranks: int  # per node


class Point(NamedTuple):
    """One run: the study that wants it, nodes, ranks per node, flags of train_fsdp.py."""

    study: str
    nodes: int
    ranks: int
    words: list[str]


LENGTH = "--steps 60 --log-every 5"
ON_A_CPU = "--img-size 64 --batch 8 --precision fp32 --device cpu --steps 32 --log-every 2"
DEFAULT_MODELS = {"options": "5b", "scaling": "base,1b,3b,5b,15b", "io": "base"}


def make_point(study: str, layout: Layout, flags: str) -> Point:
    """Make a point of a study, of the length that all studies share."""
    return Point(study, layout.nodes, layout.ranks, f"{flags} {LENGTH}".split())


def options_points(models: Sequence[str], layout: Layout) -> Iterator[Point]:
    """Vary sharding x backward prefetch x limit_all_gathers (FSDP1 only).

    A single rank has no points: it holds every shard, and gathers nothing.
    """
    world_size = layout.nodes * layout.ranks
    if world_size == 1:
        return
    shardings = ["full_shard"]
    for group in (2, 2 * layout.ranks):
        if group < world_size and world_size % group == 0:
            shardings.append(f"hybrid --group {group}")
    prefetches = ("none", "backward_pre", "backward_post")
    limits = ("--no-limit-all-gathers", "--limit-all-gathers")
    for model, sharding, prefetch, limit in product(models, shardings, prefetches, limits):
        flags = f"--model {model} --mode {sharding} --fsdp 1 --prefetch {prefetch} {limit}"
        yield make_point("options", layout, f"{flags} --run-mode syn")


def scaling_points(models: Sequence[str], layouts: Sequence[Layout]) -> Iterator[Point]:
    """Run every sharding on more and more devices; the local batch stays (weak scaling)."""
    for model, layout in product(models, layouts):
        world_size = layout.nodes * layout.ranks
        shardings = ["ddp", "no_shard"]
        if world_size > 1:  # one rank has nothing to shard
            shardings += ["shard_grad_op", "full_shard"]
            for group in sorted({2, 4, layout.ranks, 2 * layout.ranks}):
                if 1 < group < world_size and world_size % group == 0:
                    shardings.append(f"hybrid --group {group}")
        for sharding in shardings:
            yield make_point("scaling", layout, f"--model {model} --mode {sharding} --run-mode syn")


def io_points(models: Sequence[str], layouts: Sequence[Layout], data: str) -> Iterator[Point]:
    """Train on images, on one batch kept on the device, and read only (`--run-mode`).

    The points of a single rank measure the compute of a step, because one rank sends nothing.
    """
    for model, layout, run_mode in product(models, layouts, ("real", "syn", "io")):
        mode = "no_shard" if layout == (1, 1) else "full_shard"
        point = make_point("io", layout, f"--model {model} --mode {mode} --run-mode {run_mode}")
        if run_mode != "syn":
            point.words.extend(["--data", data])  # a path may have blanks: it is not split
        yield point


def quick_points(models: Sequence[str], ranks: int, data: str, gpu: bool) -> Iterator[Point]:
    """Run a few points of each study on the GPUs of this node, or on CPU ranks."""
    few = layouts_here(min(2, ranks))
    scaling = scaling_points(models, layouts_here(ranks))
    points = [point for point in scaling if "shard_grad_op" not in point.words]
    points += options_points(models, few[-1])
    points += io_points(models, few, data)
    for point in points:
        if not gpu:
            point.words.extend(ON_A_CPU.split())
        yield point


def layouts_here(ranks: int) -> list[Layout]:
    """List one node with 1, 2, 4, ... ranks, and with `ranks` itself."""
    powers = [2**i for i in range(ranks.bit_length())]  # up to `ranks`
    counts = sorted({*powers, ranks})
    return [Layout(nodes=1, ranks=count) for count in counts]


def study_points(
    study: str, models: str | None, layouts: Sequence[Layout], data: str, gpu: bool
) -> list[Point]:
    """List the points of a study; ValueError, a sentence, for bad input.

    `layouts` go from one rank to the largest; `gpu` says whether this host, or the nodes, have any.
    """
    if not models:
        models = DEFAULT_MODELS.get(study, "base" if gpu else "tiny")
    names = models.split(",")
    largest = layouts[-1]
    if data != "synthetic":
        check_folder(data)
        data = os.path.abspath(data)  # points run in another folder
    if study == "options":
        return list(options_points(names, largest))
    if study == "scaling":
        return list(scaling_points(names, layouts))
    if study == "io":
        return list(io_points(names, layouts, data))
    return list(quick_points(names, largest.ranks, data, gpu))
