"""Run many training jobs; write a page with figures, and what limits each run.

    python sweep.py quick                                   # minutes on a laptop, page included
    python sweep.py io --models base --data DIR             # real, syn, io: what limits a run?
    python sweep.py options --models 5b --nodes 8 --sbatch "-A PROJECT"   # through Slurm
    python sweep.py scaling --models base,3b,15b --nodes 1,2,4,8 --sbatch "-A PROJECT"
    python sweep.py scaling -- --img-size 96                # flags for every point
    python sweep.py report DIR                              # how far it is, and the page
    python sweep.py report examples/published               # the published runs and their plans

A point is a run of train_fsdp.py, started by torchrun or, in a Slurm job, by launch_frontier.sh.
One job for each number of nodes runs its points one after another. The same command runs what is
missing: what has ended is in DIR/runs/POINT/result.json. What cannot fit according to plan.py is
skipped. Flags after `--` are those of every point in DIR. The page needs matplotlib.
"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import median
from subprocess import STDOUT, Popen, TimeoutExpired
from typing import Any

import torch

import plan
import run
import train_fsdp
from checkpoint import atomic_write

HERE = Path(__file__).resolve().parent
TRAIN = HERE / "train_fsdp.py"

# A point: its flags, its plan, later its state and what its run measured
Row = dict[str, Any]

# --- Studies: the points of a sweep

Layout = tuple[int, int]  # nodes, and ranks per node

LENGTH = "--steps 60 --log-every 5"
ON_A_CPU = "--img-size 64 --batch 8 --precision fp32 --device cpu --steps 32 --log-every 2"
DEFAULT_NODES = [1, 2, 4, 8]
STUDIES = {  # what varies
    "quick": "a few points of the other three, on one node",
    "options": "sharding, prefetch and limit_all_gathers of FSDP1, on the largest number of nodes",
    "scaling": "every sharding, on more and more ranks with the same local batch (weak scaling)",
    "io": "training on images, on one batch kept on the device (syn), reading alone (io)",
}
DEFAULT_MODELS = {"quick": "base", "options": "5b", "scaling": "base,1b,3b,5b,15b", "io": "base"}


def study_flags(study: str, layout: Layout) -> Iterator[str]:
    """Yield the flags of the points of a study for one model and layout."""
    nodes, ranks = layout
    world_size = nodes * ranks

    def hybrids(*groups: int) -> list[str]:
        possible = [n for n in sorted({*groups}) if 1 < n < world_size and world_size % n == 0]
        return [f"hybrid --group {n}" for n in possible]

    if study == "io":
        mode = "full_shard" if world_size > 1 else "no_shard"
        for run_mode in ("real", "syn", "io"):
            yield f"--mode {mode} --run-mode {run_mode}"
    elif study == "scaling":
        shardings = ["ddp", "no_shard"]
        if world_size > 1:  # one rank has nothing to shard
            shardings += ["shard_grad_op", "full_shard", *hybrids(2, 4, ranks, 2 * ranks)]
        for sharding in shardings:
            yield f"--mode {sharding} --run-mode syn"
    elif world_size > 1:  # options: one rank holds every shard, and gathers nothing
        shardings = ["full_shard", *hybrids(2, 2 * ranks)]
        prefetches = ("none", "backward_pre", "backward_post")
        limits = ("--no-limit-all-gathers", "--limit-all-gathers")
        for sharding, prefetch, limit in product(shardings, prefetches, limits):
            yield f"--mode {sharding} --fsdp 1 --prefetch {prefetch} {limit} --run-mode syn"


def study_points(
    study: str, models: Sequence[str], layouts: Sequence[Layout], data: str
) -> Iterator[tuple[str, Layout, list[str]]]:
    """Yield each point: its study, its layout, its flags; `layouts` begin with one rank."""
    if study == "quick":
        few = [layout for layout in layouts if layout <= (1, 2)]
        for point in study_points("scaling", models, layouts, data):
            if "shard_grad_op" not in point[-1]:
                yield point
        yield from study_points("options", models, few, data)
        yield from study_points("io", models, few, data)
        return
    if study == "options":
        layouts = layouts[-1:]
    for model, layout in product(models, layouts):
        for flags in study_flags(study, layout):
            words = f"--model {model} {flags} {LENGTH}".split()
            if study == "io" and "syn" not in words:
                words += ["--data", data]  # a path may have blanks: it is not split
            yield study, layout, words


def choose_layouts(args: argparse.Namespace) -> list[Layout]:
    """List the layouts of the command line, from one rank to the largest; ValueError."""
    in_slurm = args.sbatch is not None
    if args.nodes is not DEFAULT_NODES and (not in_slurm or args.what == "quick"):
        raise ValueError("--nodes are for jobs of options, scaling and io: add --sbatch FLAGS")
    here = torch.cuda.device_count() or 4
    ranks = args.ranks or (8 if in_slurm else here)
    if in_slurm and args.what != "quick":
        return [(1, 1), *((nodes, ranks) for nodes in sorted(args.nodes))]
    powers = [2**i for i in range(ranks.bit_length())]  # up to `ranks`
    return [(1, count) for count in sorted({*powers, ranks})]


# --- The plan of a point

SHARDING = ("mode", "group", "fsdp", "prefetch", "limit_all_gathers")


def plan_point(study: str, layout: Layout, words: list[str], machine: str | None) -> Row:
    """Make the row of a point, its plan included; SystemExit for refused flags."""
    nodes, ranks = layout
    train_fsdp.build_parser("sweep.py").parse_args(words)  # plan.py has more flags
    gpu = torch.cuda.is_available()
    planning = [*words, "--world-size", str(nodes * ranks)]
    if machine:
        planning += ["--machine", machine]
    else:  # of this host, only the memory is known
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
        if gpu:  # not mem_get_info: it would make this process hold memory of the GPU
            memory = torch.cuda.get_device_properties(0).total_memory
        planning += ["--memory-gib", str(memory / 2**30)]
    flags, planned = plan.read_command(planning, node_ranks=ranks)
    row: Row = {name: getattr(flags, name) for name in ("model", "run_mode", "accum", *SHARDING)}
    row |= {"studies": [study], "words": words, "nodes": nodes, "ranks": ranks}
    row |= {"world_size": nodes * ranks, "batch": planned.run.batch, "fit": ""}
    row["id"] = point_name(row)
    if flags.run_mode == "io":  # it has no model
        return row
    row["planned_gib"] = planned.peak_gib
    # a CPU has no memory that only a GPU's libraries take: there the margin says nothing
    if machine or gpu or planned.peak_gib > planned.memory_gib:
        row["fit"] = planned.fit
    if machine:
        row["planned_images_per_second"] = planned.images_per_second
        row["mfu_at_one_image_per_second"] = planned.mfu(1)
    return row


def point_name(row: Row) -> str:
    """Return the name of a point's folder, from all that varies in a sweep but --data."""
    group = row["group"] if row["group"] else ""
    words = [row["model"], f"{row['mode']}{group}", f"{row['nodes']}x{row['ranks']}"]
    words.append(row["run_mode"])
    if row["fsdp"] == 1:
        limit = "limit" if row["limit_all_gathers"] else "no_limit"
        words += ["fsdp1", row["prefetch"], limit]
    return re.sub(r"[^\w-]", "_", "-".join(words))


# --- The folder of a sweep: points.jsonl; runs/POINT with the log, output and result of each


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON, one a line, completely or not at all."""
    with atomic_write(path) as stream:
        for row in rows:
            stream.write(f"{json.dumps(row)}\n".encode())


def read_lines(path: Path) -> list[Row]:
    """Read what `write_lines` wrote; no rows where there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def group_by(rows: Iterable[Row], *columns: str) -> dict[tuple, list[Row]]:
    """Group rows by the values of some columns, None where a row has none, in their order."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        key = tuple(row.get(column) for column in columns)
        groups.setdefault(key, []).append(row)
    return groups


def add_points(out: Path, rows: Sequence[Row], added: list[str]) -> list[Row]:
    """Add points to a sweep; return each once, with all its studies; ValueError if flags differ."""
    known = {row["id"]: row for row in read_lines(out / "points.jsonl")}
    first = next(iter(known.values()), {"added": added})
    for row in rows:
        same = known.setdefault(row["id"], row)
        if first["added"] != added or same["words"] != row["words"]:
            raise ValueError(f"{out} has {row['id']} with other flags: give another --out")
        row["added"] = added
        row["studies"] = sorted({*same["studies"], *row["studies"]})
        known[row["id"]] = row
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "points.jsonl", known.values())
    return [known[name] for name in dict.fromkeys(row["id"] for row in rows)]


def with_state(out: Path, row: Row) -> Row:
    """Add to a point its state, the reason, and the result of its run if that has ended."""
    for result in read_lines(out / "runs" / row["id"] / "result.json"):
        return row | result
    if row["fit"].startswith("NO"):
        return row | {"state": "skipped", "reason": f"plan.py: {row['fit']}"}
    return row | {"state": "waiting", "reason": ""}


# --- One run, and its result

WARM_UP = 0.25  # of the steps, and at least one line: clocks, caches, compilers
OUT_OF_MEMORY = re.compile("out.?of.?memory|allocate memory|MemoryError|oom.kill", re.I)


def command_of(row: Row, folder: Path, in_job: bool) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a run, here or in a Slurm job."""
    words = [*row["words"], "--resume", "none", "--save-every", "none", "--out", str(folder)]
    if in_job:
        # a point is short: it is not requeued
        environ = {"AGAIN": "no", "PREFLIGHT": "no"} | os.environ
        environ |= {"SCRIPTS": str(HERE), "TASKS_PER_NODE": str(row["ranks"])}
        if not environ.keys() & {"CONDA_ENV", "ENV_TARBALL", "PYTHON"}:
            environ["PYTHON"] = sys.executable
        return ["bash", str(HERE / "launch_frontier.sh"), *words], environ
    environ = {"OMP_NUM_THREADS": "1"} | os.environ
    command = [sys.executable]
    if row["ranks"] > 1:  # the address: this host's own name may not resolve
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(row["ranks"]), "--"]
    else:  # without torchrun, it would take the ranks of a job around the sweep for its own
        environ = {name: text for name, text in environ.items() if not name.startswith("SLURM_")}
    return [*command, str(TRAIN), *words], environ


def end_run(child: Popen) -> None:
    """Ask a run to end, as a launcher does, and kill it if it does not within a minute."""
    with suppress(ProcessLookupError):  # torchrun passes it on to its ranks, srun too
        os.killpg(child.pid, signal.SIGTERM)
    try:
        child.wait(60)
    except TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def run_point(out: Path, row: Row, limit: int, in_job: bool = False) -> Row:
    """Run a point for at most `limit` seconds, write its result.json, and return its row."""
    folder = out / "runs" / row["id"]
    shutil.rmtree(folder, ignore_errors=True)  # of a sweep that was interrupted
    folder.mkdir(parents=True)
    command, environ = command_of(row, folder, in_job)
    late = False
    with open(folder / "output.txt", "wb") as output:
        # a session of its own: Ctrl-C is for the sweep
        child = Popen(
            command, env=environ, cwd=HERE, stdout=output, stderr=STDOUT, start_new_session=True
        )
        try:
            child.wait(limit)
        except TimeoutExpired:
            late = True
        finally:
            end_run(child)
    result = read_result(folder, child.returncode, late) | {"host": os.uname().nodename}
    write_lines(folder / "result.json", [result])
    return with_state(out, row)


def read_result(folder: Path, code: int, late: bool) -> Row:
    """Return the state of a run that has ended with the exit status `code`, and its speed.

    `late`: it was ended because of --limit. The speed is the median of the logged steps after the
    warm-up; of a run that only reads images the mean, for batches arrive together.
    """
    log = group_by(read_lines(folder / "log.jsonl"), "event")
    *_, end = log.get(("end",), [{}])
    if end.get("reason") != "done":
        lines = (folder / "output.txt").read_text(errors="replace").splitlines()
        lines.append(end.get("problem") or f"exit status {code}: see output.txt")
        # before the time limit: if one rank runs out of memory, the others wait for it until then
        for line in lines:
            if OUT_OF_MEMORY.search(line):
                return {"state": "out of memory", "reason": line.strip()}
        reason = "it took longer than --limit" if late else lines[-1]
        return {"state": "failed", "reason": reason}
    *_, start = log[("start",)]
    row = {"state": "done", "reason": "", "device": start["device"]}
    steps = log.get(("step",), [])
    measured = [line for line in steps[1:] if line["step"] > WARM_UP * start["steps"]]
    if start["run_mode"] == "io":
        row["images_per_second"] = end["images_per_second"]
    elif measured:
        row["images_per_second"] = median([line["images_per_second"] for line in measured])
        row["peak_allocated_gib"] = measured[-1].get("peak_allocated_gib")
        row["alloc_retries"] = measured[-1].get("alloc_retries")
    return row


# --- What limits a run

DAY_TO_DAY = 0.05  # runs with the same flags differ by this much from day to day
MEMORY_STATES = ("out of memory", "skipped")


def add_shares(rows: Sequence[Row]) -> None:
    """Add to each run its seconds per step; if it trains, its share of the peak and of the ideal.

    The ideal is the speed per rank of the model's fastest `syn` run on the fewest ranks.
    """
    measured = [row for row in rows if row.get("images_per_second")]
    for row in measured:
        row["rank_speed"] = row["images_per_second"] / row["world_size"]
        row["step_seconds"] = row["batch"] * row.get("accum", 1) / row["rank_speed"]
    trained = [row for row in measured if row["run_mode"] != "io"]
    for some in group_by(trained, "model").values():
        syn = [row for row in some if row["run_mode"] == "syn" and not row.get("caveat")]
        syn.sort(key=lambda row: (row["world_size"], -row["rank_speed"]))
        for row in some:
            if "mfu_at_one_image_per_second" in row:
                row["mfu"] = row["images_per_second"] * row["mfu_at_one_image_per_second"]
            for reference in syn[:1]:
                row["ideal"] = reference["rank_speed"] * row["world_size"]
                row["ideal_ranks"] = reference["world_size"]
                row["efficiency"] = row["images_per_second"] / row["ideal"]


def find_bottlenecks(rows: Sequence[Row]) -> list[Row]:
    """Find what limits each setting, from its real, syn and io runs, after `add_shares`.

    Each is a row with the ids of the points, the limit, the reason, and the shares of a step.
    """
    ended = []
    for row in rows:
        known = row.get("images_per_second") or row["state"] in MEMORY_STATES
        if known and row["studies"] != ["options"] and not row.get("caveat"):
            ended.append(row)
    found = []
    for some in group_by(ended, "model", "world_size", "nodes", *SHARDING).values():
        found.append({"id": " ".join(row["id"] for row in some)} | find_bottleneck(some))
    return found


def find_bottleneck(rows: Sequence[Row]) -> Row:
    """Find the largest part of a step of one setting, and the share of each cause if known.

    Causes are compute (what one rank alone takes), communication (the rest of `syn`), input (what
    `real` takes longer than `syn`; or the loader alone takes longer than that), and memory.
    """
    for row in rows:
        if row["state"] in MEMORY_STATES:
            return {"limit": "memory", "reason": row["reason"]}
        if row.get("alloc_retries"):
            return {"limit": "memory", "reason": "CUDA's allocator ran out, and tried again"}
    runs = {row["run_mode"]: row for row in rows}
    seconds = {mode: row["step_seconds"] for mode, row in runs.items()}
    times = ", ".join(f"{mode} {value:.3g}" for mode, value in seconds.items())
    reason = f"seconds per step: {times}"
    if "syn" not in seconds:
        return {"limit": "unknown", "reason": reason}
    syn = seconds["syn"]
    io = seconds.get("io", 0.0)
    real = seconds.get("real", max(syn, io))
    uncertain = DAY_TO_DAY * sum(seconds.values())
    if max(syn, io) - real > uncertain:
        reason += ": real cannot take less than syn or io, its parts"
        return {"limit": "unknown", "reason": reason}
    waited = max(0.0, real - syn)
    slow_input = min(io, real) > syn + uncertain
    row = runs["syn"]
    world_size, ideal_ranks = (row[name] for name in ("world_size", "ideal_ranks"))
    compute = syn  # one rank sends nothing
    if world_size > 1:
        if ideal_ranks == world_size:  # nothing says how much of `syn` is communication
            known = slow_input or waited > real / 2
            return {"limit": "input" if known else "unknown", "reason": reason}
        compute = syn * min(row["efficiency"], 1)
        reason += f", syn without communication {compute:.3g}"
    parts = {"compute": compute, "communication": syn - compute, "input": waited}
    largest = "input" if slow_input else max(parts, key=parts.__getitem__)
    if largest == "compute" and 1 < ideal_ranks < world_size:
        return {"limit": "unknown", "reason": f"{reason}, communication included"}
    shares = {cause: seconds / sum(parts.values()) for cause, seconds in parts.items()}
    return {"limit": largest, "reason": reason} | shares


# --- Figures

STYLE_SHEET = "tableau-colorblind10"  # the first six colours stand out on white
COLOURS = 6
MARKERS = "os^DvPX*<>dhp"  # they tell the same lines apart in grey
RC_PARAMS = {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "legend.handlelength": 3,
    "savefig.dpi": 160,
    "savefig.bbox": "tight",  # the legend enlarges the picture
}
CAPTIONS = {
    "scaling": "Images/s per rank: medians of the measured steps. Bars: the 5 % by which runs "
    "differ from day to day. Dashed, if measured: the speed of the fewest ranks. Dotted, if "
    "planned: the plan.",
    "options": "Seconds per step by FSDP1's backward prefetch and `limit_all_gathers`.",
    "io": "Seconds per step: training on images (real), on one batch kept on the device (syn), "
    "reading alone (io).",
}


def line_label(row: Row) -> str:
    """Return the name of a line: the sharding, like `hybrid 2`, and why it is doubted."""
    label = f"{row['mode']} {row['group']}" if row["group"] else row["mode"]
    return f"{label} ({row['caveat']})" if "caveat" in row else label


def device_axis(panel: Any, counts: Iterable[int]) -> None:
    """Label the x axis with numbers of devices, in powers of two."""
    ticks = sorted(set(counts))
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
    panel.set_xticks([], minor=True)
    panel.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)


def draw_lines(rows: Sequence[Row], figure: Any) -> None:
    """Draw a panel per model and a line per sharding: images/s per rank, over ranks."""
    models = group_by(rows, "model")
    figure.set_size_inches(max(4.6, 3.4 * len(models)), 3.2)
    panels = figure.subplots(1, len(models), squeeze=False).flatten()
    labels = [*dict.fromkeys(line_label(row) for row in rows)]
    legend: dict[str, Any] = {}
    for panel, (model, of_model) in zip(panels, models.items(), strict=True):
        for i, label in enumerate(labels):
            line = [row for row in of_model if line_label(row) == label]
            if line:
                legend[label] = draw_line(panel, line, f"C{i % COLOURS}", MARKERS[i % len(MARKERS)])
        device_axis(panel, [row["world_size"] for row in of_model])
        panel.set(title=model[0], ylabel="images/s per rank", xlabel="ranks", ylim=(0, None))
    names = legend.keys()
    figure.legend(legend.values(), names, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2)


def draw_line(panel: Any, rows: Sequence[Row], color: str, marker: str) -> Any:
    """Draw images/s per rank with error bars, the plan and the ideal; return the legend's entry."""
    rows = sorted(rows, key=itemgetter("world_size"))
    ranks = [row["world_size"] for row in rows]
    measured, planned, ideal = (  # NaN is not drawn
        [row.get(column, math.nan) / row["world_size"] for row in rows]
        for column in ("images_per_second", "planned_images_per_second", "ideal")
    )
    bars = [DAY_TO_DAY * speed for speed in measured]
    panel.plot(ranks, planned, color=color, marker=marker, linestyle=":", markerfacecolor="none")
    panel.plot(ranks, ideal, color="black", linestyle="--", linewidth=1)
    return panel.errorbar(ranks, measured, bars, color=color, marker=marker, capsize=2)


def draw_bars(rows: Sequence[Row], figure: Any) -> None:
    """Draw a bar for the seconds per step of each row."""
    rows = sorted(rows, key=itemgetter("world_size"))
    seconds = [row["step_seconds"] for row in rows]
    figure.set_size_inches(6, 0.6 + 0.2 * len(rows))
    panel = figure.subplots()
    panel.barh(range(len(rows)), seconds, xerr=[DAY_TO_DAY * s for s in seconds], capsize=2)
    panel.set_yticks(range(len(rows)), [row["id"] for row in rows], fontsize=7)
    panel.invert_yaxis()
    panel.set_xlabel("seconds per step")


def draw_figures(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draw each study for which there are rows as STUDY.png; return their names."""
    from matplotlib import style
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with style.context([STYLE_SHEET, RC_PARAMS]):
        for study in CAPTIONS:
            some = [r for r in rows if study in r["studies"] and r.get("images_per_second")]
            if some:
                figure = Figure(layout="constrained")
                draw = draw_lines if study == "scaling" else draw_bars
                draw(some, figure)
                figure.savefig(folder / f"{study}.png")
                drawn.append(study)
    return drawn


# --- The page

LIMITS = {  # of a table: heading; column of the rows, format
    "points": ("id", ""),
    "limit": ("limit", ""),
    "compute": ("compute", ".0%"),
    "communication": ("communication", ".0%"),
    "input": ("input", ".0%"),
    "how it was found": ("reason", ""),
}
POINTS = {
    "point": ("id", ""),
    "state": ("state", ""),
    "ranks": ("world_size", ""),
    "images/s": ("images_per_second", ".1f"),
    "planned": ("planned_images_per_second", ".1f"),
    "of the ideal": ("efficiency", ".0%"),
    "MFU": ("mfu", ".0%"),
    "peak GiB": ("peak_allocated_gib", ".2f"),
    "planned GiB": ("planned_gib", ".2f"),
    "why": ("reason", ""),
    "doubt": ("caveat", ""),
}


def markdown_table(columns: Mapping[str, tuple[str, str]], rows: Iterable[Row]) -> Iterator[str]:
    """Format the lines of a table; what a row lacks is a dash."""
    yield "| " + " | ".join(columns) + " |"
    yield "| " + " | ".join(["---"] * len(columns)) + " |"
    for row in rows:
        cells = []
        for name, form in columns.values():
            value = row.get(name)
            cells.append("-" if value is None else format(value, form).replace("|", "/"))
        yield "| " + " | ".join(cells) + " |"


def page_lines(title: str, rows: Sequence[Row], figures: Sequence[str]) -> Iterator[str]:
    """Format the whole page."""
    hosts = {f"{row['host']} ({row.get('device')})" for row in rows if "host" in row}
    where = ", ".join(sorted(hosts)) if hosts else "other hosts"
    yield f"# Sweep: {title}\n"
    yield f"{date.today()}: {len(rows)} points, on {where}."
    for name in figures:
        yield f"\n![{name}](figures/{name}.png)\n\n{CAPTIONS[name]}"
    yield "\n## What limits it\n\nShares of a step.\n"
    if any(row.get("device") == "cpu" for row in rows):
        yield "Ranks share the cores of a CPU: waiting for a core counts as communication.\n"
    found = find_bottlenecks(rows)
    known = [row for row in found if row["limit"] != "unknown"]
    yield from markdown_table(LIMITS, known)
    unknown = len(found) - len(known)
    if unknown:
        yield f"\nOf {unknown} settings too little was measured: add real, syn, io, and one rank."
    yield "\n## Every point\n\nThe log of a point is runs/POINT/log.jsonl.\n"
    yield from markdown_table(POINTS, rows)


def write_page(folder: Path, out: Path | None = None) -> None:
    """Print the states of a sweep's points, draw them, and write their page; ValueError if none.

    `folder` is that of a sweep, or holds a results.jsonl alone, like that of the published runs.
    """
    title = folder.resolve().name
    rows = [with_state(folder, row) for row in read_lines(folder / "points.jsonl")]
    if out is None:
        out = folder if rows else Path(f"sweep_{title}")
    if not rows:
        rows = read_lines(folder / "results.jsonl")
    states = Counter(row["state"] for row in rows)
    print(", ".join(f"{count} {state}" for state, count in states.items()))
    for row in rows:
        if row["state"] not in ("done", "waiting"):
            print(f"{row['state']:14}{row['id']:50} {row['reason']}")
    if states["failed"]:
        print("the same command with --retry runs again what has failed")
    if not any(row.get("images_per_second") for row in rows):
        raise ValueError(f"{folder} has no finished point to draw")
    add_shares(rows)
    figures = draw_figures(rows, out / "figures")
    write_lines(out / "results.jsonl", rows)
    with atomic_write(out / "report.md") as stream:
        for line in page_lines(title, rows, figures):
            stream.write(f"{line}\n".encode())
    print(f"report: {out / 'report.md'}")


# --- Commands


def submit(out: Path, rows: Sequence[Row], limit: int, sbatch: str) -> None:
    """Submit a job for each number of nodes; it runs its points one after another."""
    command = [sys.executable, str(HERE / "sweep.py"), "run", str(out), "--limit", str(limit)]
    # not --wrap: its sh may be one that loses the shell function `module`
    script = f"#!/bin/bash\nexec {shlex.join(command)}"
    for (nodes,), some in group_by(rows, "nodes").items():
        minutes = min(120, math.ceil(len(some) * limit / 60) + 5)  # 120: Frontier's, below 92 nodes
        flags = ["-J", "sweep", "-t", str(minutes), "-o", f"{out}/job-%j.txt"]
        flags.append("--network=disable_rdzv_get")  # as in launch_frontier.sh
        flags += [*shlex.split(sbatch), "-N", str(nodes)]
        done = subprocess.run(["sbatch", *flags], input=script, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"sbatch refused: {done.stderr.strip()}")
        print(f"{done.stdout.strip()}: {len(some)} points on {nodes} nodes", flush=True)


def run_rows(out: Path, rows: Sequence[Row], limit: int, in_job: bool = False) -> None:
    """Run those points, all on as many nodes, that have not ended; ValueError if another does."""
    with run.lock_folder(str(out / "locks" / f"{rows[0]['nodes']}-nodes")):
        rows = [row for row in rows if with_state(out, row)["state"] == "waiting"]
        for i, row in enumerate(rows, 1):
            print(f"[{i}/{len(rows)}] {row['id']:50}", end=" ", flush=True)
            row = run_point(out, row, limit, in_job)
            speed = f"{row.get('images_per_second', math.nan):.1f} img/s"
            print(f"{row['state']}  {row['reason'] if row['reason'] else speed}", flush=True)


def run_sweep(args: argparse.Namespace, added: list[str]) -> int:
    """Plan the points, run or submit those that have not ended; return the exit status."""
    in_slurm = args.sbatch is not None
    machine = args.machine if args.machine or not in_slurm else "frontier"
    small = args.what == "quick" and not in_slurm and not torch.cuda.is_available()
    models = args.models or ("tiny" if small else DEFAULT_MODELS[args.what])
    if small:
        added = [*ON_A_CPU.split(), *added]
    data = args.data
    if data != "synthetic":
        if not os.path.isdir(data):
            raise ValueError(f"there is no folder {data}: give --data the folder of images")
        data = os.path.abspath(data)  # points run in another folder
    ours = [word for word in added if word.startswith(("--out", "--resume", "--save-every"))]
    if ours:
        raise ValueError(f"a sweep sets {ours[0]} itself: leave it out")
    out = args.out.resolve()
    rows = []
    layouts = choose_layouts(args)
    for study, layout, words in study_points(args.what, models.split(","), layouts, data):
        rows.append(plan_point(study, layout, [*words, *added], machine))
    if not rows:
        raise ValueError("options needs several ranks: one rank has nothing to gather")
    rows = add_points(out, rows, added)
    print(f"{len(rows)} points in {out}", flush=True)
    for row in rows:
        if args.retry and with_state(out, row)["state"] == "failed":
            shutil.rmtree(out / "runs" / row["id"])
    if in_slurm:
        waiting = [row for row in rows if with_state(out, row)["state"] == "waiting"]
        submit(out, waiting, args.limit, args.sbatch)
        return 0
    run_rows(out, rows, args.limit)
    write_page(out)
    return int(any(with_state(out, row)["state"] == "failed" for row in rows))


def node_counts(text: str) -> list[int]:
    """Read numbers of nodes, like 1,2,4: an argparse type."""
    return [int(word) for word in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = train_fsdp.Parser("sweep.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    tiles = str(HERE / "examples" / "tiles" / "train")
    for name, about in STUDIES.items():
        add = commands.add_parser(name, help=about, allow_abbrev=False).add_argument
        add("--out", type=Path, default=f"sweep_{name}", metavar="DIR", help="(%(default)s)")
        add("--models", metavar="A,B", help=f"({DEFAULT_MODELS[name]})")
        add("--nodes", type=node_counts, default=DEFAULT_NODES, help="of the jobs (1,2,4,8)")
        add("--ranks", type=int, metavar="N", help="per node (jobs 8; here the GPUs, or 4)")
        add("--data", default=tiles, metavar="DIR", help="images of real and io (tiles here)")
        text = "through Slurm, with these flags of sbatch; environment of launch_frontier.sh"
        add("--sbatch", metavar="FLAGS", help=text)
        add("--machine", metavar="NAME", help="for plan.py (with --sbatch frontier; else memory)")
        add("--limit", type=int, default=900, metavar="SECONDS", help="per point (%(default)s)")
        add("--retry", action="store_true", help="run again what failed")
    job = commands.add_parser("run", help="what a job of --sbatch does")
    job.add_argument("dir", type=Path, metavar="DIR")
    job.add_argument("--limit", type=int, required=True, metavar="SECONDS")
    page = commands.add_parser("report", help="write the page of DIR, or of examples/published")
    page.add_argument("dir", type=Path, metavar="DIR")
    page.add_argument("--out", type=Path, metavar="DIR", help="(DIR; sweep_published)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run or show a sweep; exit status 1 if a point failed, 2 for bad input."""
    words = [*argv, "--"]
    cut = words.index("--")
    added = words[cut + 1 : -1]  # flags of train_fsdp.py, for every point
    args = build_parser().parse_args(words[:cut])
    try:
        if args.what in STUDIES:
            return run_sweep(args, added)
        if added:
            raise ValueError(f"{args.what} plans no points: leave out the flags after --")
        if args.what == "report":
            write_page(args.dir, args.out)
            return 0
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 0))
        rows = [row for row in read_lines(args.dir / "points.jsonl") if row["nodes"] == nodes]
        if not rows:
            raise ValueError(f"no points of {nodes} nodes: run is what a job of --sbatch does")
        run_rows(args.dir.resolve(), rows, args.limit, in_job=True)
        return 0
    except (ValueError, OSError, ImportError) as error:
        return run.refuse(str(error), "sweep.py")
    except KeyboardInterrupt:  # run_point has ended its run
        print("\nsweep.py: stopped: the same command continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main(sys.argv[1:]))
