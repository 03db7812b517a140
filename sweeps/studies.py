"""Make the points of a sweep: the runs of a study.

A point is a command line of train_fsdp.py, with a number of nodes and of ranks on each of them. Of
a flag that is given twice the last counts.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from runtime.image_source import check_folder

Layout = tuple[int, int]  # nodes, ranks per node


class Point(NamedTuple):
    """One run: the study that wants it, nodes, ranks per node, flags of train_fsdp.py."""

    study: str
    nodes: int
    ranks: int
    words: list[str]


LENGTH = "--steps 60 --log-every 5"
ON_A_CPU = "--img-size 64 --batch 8 --precision fp32 --device cpu --steps 32 --log-every 2"
DEFAULT_MODELS = {"options": "5b", "scaling": "base,1b,3b,5b,15b", "io": "base"}  # if not given


def make_point(study: str, layout: Layout, flags: str, *more: str) -> Point:
    """Make a point of a study; `more` are words that may have blanks."""
    return Point(study, *layout, [*f"{flags} {LENGTH}".split(), *more])


def options_points(models: Sequence[str], layout: Layout) -> Iterator[Point]:
    """Vary sharding x backward prefetch x limit_all_gathers (FSDP1 only).

    None on one rank, which holds every shard and gathers nothing.
    """
    world = layout[0] * layout[1]
    groups = [g for g in (2, 2 * layout[1]) if world % g == 0 and g < world]
    shardings = ["full_shard", *(f"hybrid --group {g}" for g in groups)] if world > 1 else []
    prefetches = ("none", "backward_pre", "backward_post")
    for model, mode, prefetch, no in product(models, shardings, prefetches, ("no-", "")):
        flags = f"--fsdp 1 --prefetch {prefetch} --{no}limit-all-gathers --run-mode syn"
        yield make_point("options", layout, f"--model {model} --mode {mode} {flags}")


def scaling_points(models: Sequence[str], layouts: Sequence[Layout]) -> Iterator[Point]:
    """Run every sharding on more and more devices; the local batch stays (weak scaling)."""
    for model, (nodes, ranks) in product(models, layouts):
        world, modes = nodes * ranks, ["ddp", "no_shard"]
        if world > 1:  # one rank has nothing to shard
            groups = [g for g in sorted({2, 4, ranks, 2 * ranks}) if 1 < g < world]
            modes += ["shard_grad_op", "full_shard"]
            modes += [f"hybrid --group {g}" for g in groups if world % g == 0]
        for mode in modes:
            flags = f"--model {model} --mode {mode} --run-mode syn"
            yield make_point("scaling", (nodes, ranks), flags)


def io_points(models: Sequence[str], layouts: Sequence[Layout], data: str) -> Iterator[Point]:
    """Train on images, on one batch kept on the device, and read only (`--run-mode`).

    The points of a single rank measure the compute of a step, because one rank sends nothing.
    """
    for model, layout, run in product(models, layouts, ("real", "syn", "io")):
        mode = "no_shard" if layout == (1, 1) else "full_shard"
        flags = f"--model {model} --mode {mode} --run-mode {run}"
        yield make_point("io", layout, flags, *([] if run == "syn" else ["--data", data]))


def quick_points(models: Sequence[str], ranks: int, data: str, gpu: bool) -> Iterator[Point]:
    """Run a few points of each study on the GPUs of this node, or on CPU ranks."""
    layouts, few = layouts_here(ranks), layouts_here(min(2, ranks))
    found = [p for p in scaling_points(models, layouts) if "shard_grad_op" not in p.words]
    found += options_points(models, few[-1])
    found += io_points(models, few, data)
    for point in found:
        yield point if gpu else point._replace(words=point.words + ON_A_CPU.split())


def layouts_here(ranks: int) -> list[Layout]:
    """List one node with 1, 2, 4, ... ranks, and with `ranks` itself."""
    return [*((1, 2**i) for i in range(ranks.bit_length()) if 2**i < ranks), (1, ranks)]


def study_points(
    what: str, models: str | None, layouts: Sequence[Layout], data: str, gpu: bool
) -> list[Point]:
    """List the points of a study; ValueError, a sentence, for bad input.

    `layouts` go from one rank to the largest; `gpu` says whether this host, or the nodes, have any.
    """
    default = DEFAULT_MODELS.get(what, "base" if gpu else "tiny")
    names = (models or default).split(",")
    if data != "synthetic":
        check_folder(data)
        data = os.path.abspath(data)  # points run in another folder
    studies = {  # generators, of which one is run
        "quick": quick_points(names, layouts[-1][1], data, gpu),
        "options": options_points(names, layouts[-1]),
        "scaling": scaling_points(names, layouts),
        "io": io_points(names, layouts, data),
    }
    return list(studies[what])
