"""Make the points of a sweep, from a built-in study or a CSV file, and plan each of them.

A point is a row of a table: `nodes`, `ranks` (per node), `study`, and any flag of train_fsdp.py.
"""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import mesh
from runtime.config import model_config
from runtime.run import check_tensor_parallel
from sweeps.attempts import last_error, read_text

Point = dict[str, str]
Layout = tuple[int, int]  # nodes, ranks per node

OWN_COLUMNS = ("id", "study", "nodes", "ranks")  # all other columns are flags
RESERVED = ("out", "resume", "save_every", "async_save", "dry_run", "world_size")  # set by sweeps
LENGTH = {"steps": "60", "log_every": "5"}
PREFETCHES = ("none", "backward_pre", "backward_post")
DEFAULT_MODELS = {  # without --models
    "options": "5b",
    "scaling": "base,1b,3b,5b,15b",
    "io": "base",
    "ladder": "base",
}
# What each rung of the study `ladder` adds to the one before. A technique more is a row more.
RUNGS: dict[str, Point] = {
    "no wrapping": {"wrap": "root", "precision": "fp32", "prefetch": "none"},
    "+ wrapping": {"wrap": "block"},
    "+ mixed precision": {"precision": "bf16"},
    "+ prefetch": {"prefetch": "backward_pre"},
    "+ activation checkpointing": {"ac": "full"},
    "+ compile": {"compile": "true"},
    "+ tensor parallelism": {"tp": "2"},
}
CPU_SIZE = {"img_size": "64", "batch": "8", "precision": "fp32", "device": "cpu"}
CPU_LENGTH = {"steps": "32", "log_every": "2"}


# ---------------------------------------------------------------------------------------------
# Studies


def powers_up_to(largest: int) -> list[int]:
    """List 1, 2, 4, ... and `largest` itself."""
    powers = [2**i for i in range(largest.bit_length()) if 2**i < largest]
    return [*powers, largest]


def make_point(study: str, model: str, layout: Layout, **cells: str) -> Point:
    """Make a point of a study; empty cells mean that a flag is left out."""
    nodes, ranks = map(str, layout)
    return {"study": study, "nodes": nodes, "ranks": ranks, "model": model, **cells, **LENGTH}


def options_points(models: Sequence[str], layouts: Sequence[Layout]) -> Iterator[Point]:
    """Vary sharding x backward prefetch x limit_all_gathers (FSDP1 only) on the largest layout."""
    nodes, ranks = layouts[-1]
    world = nodes * ranks
    groups = [g for g in (2, 2 * ranks) if world % g == 0 and g < world]
    shardings = [("full_shard", ""), *(("hybrid", str(g)) for g in groups)]
    choices = itertools.product(models, shardings, PREFETCHES, ("false", "true"))
    for model, (mode, group), prefetch, limit in choices:
        flags = {"mode": mode, "group": group, "fsdp": "1", "run_mode": "syn"}
        flags |= {"prefetch": prefetch, "limit_all_gathers": limit}
        yield make_point("options", model, layouts[-1], **flags)


def scaling_points(models: Sequence[str], layouts: Sequence[Layout]) -> Iterator[Point]:
    """Run every sharding on more and more devices; the local batch stays (weak scaling)."""
    for model, (nodes, ranks) in itertools.product(models, layouts):
        world = nodes * ranks
        groups = [g for g in sorted({2, 4, ranks, 2 * ranks}) if 1 < g < world > 1]
        modes = [(m, "") for m in ("ddp", "no_shard", "shard_grad_op", "full_shard")]
        modes += [("hybrid", str(g)) for g in groups if world % g == 0]
        for mode, group in modes if world > 1 else modes[:2]:  # one rank has nothing to shard
            yield make_point(
                "scaling", model, (nodes, ranks), mode=mode, group=group, run_mode="syn"
            )


def io_points(models: Sequence[str], layouts: Sequence[Layout], data: str) -> Iterator[Point]:
    """Train on images, on one batch kept on the device, and read only (`--run real, syn, io`).

    The points of a single rank measure the compute of a step, because one rank sends nothing.
    """
    for model, layout in itertools.product(models, layouts):
        one_rank = layout == (1, 1)
        for mode in ("ddp", "no_shard") if one_rank else ("full_shard",):
            baseline = mode == "ddp" or (one_rank and len(layouts) > 1)
            for run in ("syn",) if baseline else ("real", "syn", "io"):
                images = "" if run == "syn" else data
                yield make_point("io", model, layout, mode=mode, run_mode=run, data=images)


def ladder_rungs() -> dict[str, Point]:
    """Return all flags of each rung: its own, and those of the rungs before it."""
    cells = itertools.accumulate(RUNGS.values(), lambda before, added: before | added)
    return dict(zip(RUNGS, cells, strict=True))


def ladder_points(models: Sequence[str], layout: Layout) -> Iterator[Point]:
    """Add one technique after the other, at the same local batch; tp where it divides the model."""
    for model, cells in itertools.product(models, ladder_rungs().values()):
        with contextlib.suppress(ValueError):
            if "tp" in cells:
                check_tensor_parallel(model_config(model), math.prod(layout), int(cells["tp"]))
            yield make_point("ladder", model, layout, mode="full_shard", run_mode="syn", **cells)


def quick_points(gpus: int, ranks: int, models: str | None, data: str) -> Iterator[Point]:
    """Run a few points of each study on the GPUs of this node, or on 1, 2 and 4 CPU ranks."""
    names = (models or ("base" if gpus else "tiny")).split(",")
    layouts, pair = [(1, r) for r in powers_up_to(ranks)], (1, min(2, ranks))
    modes = ("ddp", "no_shard", "full_shard", "hybrid")
    found = [p for p in scaling_points(names, layouts) if p["mode"] in modes]
    found += options_points(names, [pair])
    found += io_points(names, list(dict.fromkeys([(1, 1), pair])), data)
    yield from (point | ({} if gpus else CPU_SIZE | CPU_LENGTH) for point in found)


def choose_points(
    what: str,
    models: str | None,
    nodes: Sequence[int] | None,
    ranks: int | None,
    data: str,
    slurm: bool,
) -> list[Point]:
    """List the points of a study or of a CSV file; ValueError, a sentence, for bad input."""
    if what.endswith(".csv"):
        for flag, value in {"--models": models, "--nodes": nodes, "--ranks": ranks}.items():
            if value:
                raise ValueError(f"{flag} applies to the built-in studies: {what} has a column")
        return read_points(Path(what))
    if what not in ("quick", *DEFAULT_MODELS):
        raise ValueError(
            f"there is no study {what}: use quick, options, scaling, io, ladder, a CSV file, or "
            "status, figures, report with a folder"
        )
    if nodes and not slurm and what != "ladder":  # which is planned where it cannot run
        raise ValueError("--nodes needs Slurm, this is one node: add --sbatch FLAGS")
    if models is not None and not all(models.split(",")):
        raise ValueError(f"--models {models!r} is not a list of names like base,3b")
    if what in ("quick", "io"):
        data = image_folder(data)
    gpus = 0 if slurm else local_gpus()[0]
    per_node = ranks or (8 if slurm else gpus or min(4, max(2, mesh.process_cores())))
    layouts = [(1, 1), *((n, per_node) for n in nodes or (1, 2, 4, 8))]
    layouts = list(dict.fromkeys(layouts)) if slurm else [(1, r) for r in powers_up_to(per_node)]
    names = (models or DEFAULT_MODELS.get(what, "")).split(",")
    if what == "quick":
        return list(quick_points(gpus, ranks or gpus or 4, models, data))
    if what == "options":
        return list(options_points(names, layouts))
    if what == "ladder":
        if slurm or nodes:
            return list(ladder_points(names, (max(nodes or [1]), ranks or 8)))
        small = {k: v for k, v in CPU_SIZE.items() if k != "precision"} | CPU_LENGTH
        found = ladder_points(names if gpus or models else ["tiny"], (1, per_node))
        return [point | ({} if gpus else small) for point in found]
    if what == "scaling":
        return list(scaling_points(names, layouts))
    ends = list(dict.fromkeys((layouts[0], layouts[-1])))
    return list(io_points(names, layouts if slurm else ends, data))


def image_folder(data: str) -> str:
    """Make --data absolute, as points run in another folder; ValueError for an empty folder."""
    if data == "synthetic":
        return data
    if not any(files for _, _, files in os.walk(data)):
        raise ValueError(f"--data {data!r} is not a folder with images: name one, or synthetic")
    return os.path.abspath(data)


# ---------------------------------------------------------------------------------------------
# Tables and flags


def read_points(path: Path) -> list[Point]:
    """Read the points of a user's CSV file; ValueError, a sentence, for rows that are not."""
    try:
        lines = csv.DictReader(read_text(path).splitlines(keepends=True))
        rows = [{k.strip(): (v or "").strip() for k, v in row.items() if k} for row in lines]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except csv.Error as error:
        raise ValueError(f"{path} is not a table: {error}") from None
    for line, row in enumerate(rows, 2):
        row.setdefault("nodes", "1")
        row.setdefault("study", path.stem)
        for name in ("nodes", "ranks"):
            if not re.fullmatch("[1-9][0-9]{0,5}", row.get(name, "")):
                raise ValueError(
                    f"{path}, line {line}: {name} is {row.get(name, '')!r}, but must be a whole "
                    "number above zero (`ranks` is per node)"
                )
    if not rows:
        raise ValueError(f"{path} has no points: a header line with ranks and flags, then rows")
    return rows


def cells_from_flags(words: Sequence[str]) -> Point:
    """Convert `--img-size 96 --compile --no-norm-pix-loss` to the cells of a table."""
    cells: Point = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            name = name.replace("-", "_")
            off = name.startswith("no_") and not given
            name = name.removeprefix("no_") if off else name
            cells[name] = value if given else "false" if off else "true"
        elif name and cells[name] == "true":
            cells[name] = word
        else:
            raise ValueError(f"{word} after -- is not a flag of train_fsdp.py")
    return cells


def flags_from_cells(point: Mapping[str, str]) -> list[str]:
    """Convert a point to the command-line flags of train_fsdp.py."""
    words = []
    for name, value in point.items():
        flag = name.replace("_", "-")
        if name in OWN_COLUMNS or not value:
            continue
        if value in ("true", "false"):
            words += [f"--{flag}" if value == "true" else f"--no-{flag}"]
        else:
            words += [f"--{flag}", value]
    return words


def with_ids(points: Sequence[Point], extra: Mapping[str, str]) -> list[Point]:
    """Add `extra` cells and an id to each point; equal points of several studies become one.

    An id is a readable name and a hash of all flags: the same run has the same id everywhere.
    """
    found: dict[str, Point] = {}
    for point in points:
        cells = {k: v for k, v in {**point, **extra}.items() if v and k not in ("id", "study")}
        if "run" in cells:  # the short form of the flag
            cells["run_mode"] = cells.pop("run")
        for name in RESERVED:
            if name in cells:
                raise ValueError(f"--{name.replace('_', '-')} is set by the sweep: leave it out")
        text = json.dumps(sorted(cells.items()))
        name = f"{cells.get('model', 'base')}-{cells.get('mode', 'hybrid')}{cells.get('group', '')}"
        name += f"-{cells['nodes']}x{cells['ranks']}-{cells.get('run_mode', 'real')}"
        name += f"-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
        studies = {*found.get(name, {}).get("study", "").split(), *point["study"].split()}
        found[name] = {"id": name, "study": " ".join(sorted(studies)), **cells}
    return list(found.values())


# ---------------------------------------------------------------------------------------------
# Planning


def plan_point(
    point: Mapping[str, str], machine: str | None, memory_gib: float | None
) -> dict[str, Any]:
    """Plan a point by plan.py: what results.csv keeps of it; ValueError for refused flags.

    plan.py takes the command line of train_fsdp.py and refuses what that refuses.
    """
    from planner.command import read_command  # only planning needs it

    world_size = int(point["nodes"]) * int(point["ranks"])
    words = [*flags_from_cells(point), "--world-size", str(world_size)]
    words += ["--machine", machine] if machine else []
    words += ["--memory-gib", f"{memory_gib:.3f}"] if memory_gib else []
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            _, plan = read_command(words)
    except SystemExit:
        raise ValueError(f"point {point['id']}: {last_error(errors.getvalue())}") from None
    found = plan.json()
    peak, margin, limit = found["memory_gib"]["peak"], found["margin_gib"], found["available_gib"]
    kept = {"verdict": found["verdict"], "planned_gib": peak, "memory_gib": limit}
    kept["max_local_batch"] = found["max_local_batch"]
    kept["planned_payload_mb"] = sum(found["payload_bytes"].values()) / 1e6
    kept["why_not"] = f"plan.py: {peak:.1f} GiB + {margin:.1f} margin, of {limit:.1f}"
    if machine:  # the default machine's speed says nothing about this host
        kept["planned_images_per_second"] = found["images_per_second_upper_bound"]
    return kept


def local_gpus() -> tuple[int, float]:
    """(number of GPUs of this host, memory of the first in GiB); (0, 0.0) without any."""
    gpus = torch.cuda.device_count()
    return gpus, torch.cuda.get_device_properties(0).total_memory / 2**30 if gpus else 0.0
