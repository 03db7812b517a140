"""Draw what a sweep measured, and write it as a page with what limits each run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint import atomic_write
from sweeps import results
from sweeps.results import (
    INPUT,
    SETTINGS,
    Bottleneck,
    Row,
    find_bottlenecks,
    step_seconds,
    uncertainty,
)

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
    "scaling": "Images/s per rank: medians of the measured steps. Bars: half the distance of their "
    "quartiles, at least the 5 % by which runs differ from day to day. Dashed, if measured: the "
    "speed of the fewest ranks, on a CPU divided among the cores. Dotted, if planned: the plan.",
    "options": "Seconds per step by FSDP1's backward prefetch and `limit_all_gathers`.",
    "io": "Seconds per step: training on images (real), on one batch kept on the device (syn), "
    "reading alone (io).",
}


def series_labels(rows: Sequence[Row], *left_out: str) -> list[str]:
    """Label each row: its sharding, like `hybrid 2`, and all else in which the rows differ."""
    shown = []
    for name in ("source", "run_mode", "world_size", *SETTINGS, *INPUT, "caveat"):
        if name not in ("mode", "group", *left_out) and differs(rows, name):
            shown.append(name)
    labels = []
    times: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        label = row["mode"]
        if row.get("group"):
            label += f" {row['group']}"
        texts = [f"{name} {row[name]}" for name in shown if row.get(name) is not None]
        if texts:
            label += f" ({', '.join(texts)})"
        # rows that differ only in flags that are not compared, such as --steps
        place = label, row.get("model"), row.get("world_size")
        times[place] += 1
        if times[place] > 1:
            label += f", run {times[place]}"
        labels.append(label)
    return labels


def differs(rows: Sequence[Row], name: str) -> bool:
    """Tell whether rows have several values of a setting, or only some rows of a mode have one."""
    given = [row for row in rows if row.get(name) is not None]
    if len({row[name] for row in given}) > 1:
        return True
    without = [row for row in rows if row.get(name) is None]
    return bool({row["mode"] for row in given} & {row["mode"] for row in without})


def device_axis(panel: Any, world_sizes: Iterable[int]) -> None:
    """Label the x axis with numbers of devices, in powers of two."""
    ticks = sorted(set(world_sizes))
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
    panel.set_xticks([], minor=True)
    panel.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)


def draw_throughput(rows: Sequence[Row]) -> Any:
    """Draw a panel per model and a line per sharding: images/s per rank, over ranks."""
    from matplotlib.figure import Figure

    labels = series_labels(rows, "model", "world_size")
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}  # of colour and marker
    lines: dict[str, dict[str, list[Row]]] = {}  # model: label: its rows
    for row, label in zip(rows, labels, strict=True):
        lines.setdefault(row["model"], {}).setdefault(label, []).append(row)
    figure = Figure(figsize=(max(4.6, 3.4 * len(lines)), 3.2), layout="constrained")
    panels = figure.subplots(1, len(lines), squeeze=False).flatten()
    legend: dict[str, Any] = {}
    for panel, (model, of_model) in zip(panels, lines.items(), strict=True):
        for label, line in of_model.items():
            line.sort(key=itemgetter("world_size"))
            legend[label] = draw_line(panel, line, numbers[label])
        device_axis(panel, [row["world_size"] for row in rows if row["model"] == model])
        panel.set(title=model, ylabel="images/s per rank", xlabel="ranks", ylim=(0, None))
    figure.legend(
        legend.values(), legend.keys(), loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2
    )
    return figure


def draw_line(panel: Any, rows: Sequence[Row], number: int) -> Any:
    """Draw images/s per rank with error bars, the plan and the ideal; return the legend's entry."""
    colour = f"C{number % COLOURS}"
    marker = MARKERS[number % len(MARKERS)]
    ranks = np.array([row["world_size"] for row in rows])
    measured = per_rank(rows, "images_per_second")
    bars = measured * [uncertainty(row) for row in rows]
    entry = panel.errorbar(
        ranks, measured, bars, color=colour, marker=marker, capsize=2, linewidth=1.2, markersize=5
    )
    planned = per_rank(rows, "planned_images_per_second")
    panel.plot(ranks, planned, color=colour, marker=marker, linestyle=":", markerfacecolor="none")
    panel.plot(ranks, per_rank(rows, "ideal"), color="black", linestyle="--", linewidth=1)
    return entry


def per_rank(rows: Sequence[Row], column: str) -> np.ndarray:
    """Divide a column by the number of ranks; NaN, which is not drawn, where a row lacks it."""
    return np.array([row.get(column, np.nan) / row["world_size"] for row in rows])


def draw_bars(rows: Sequence[Row]) -> Any:
    """Draw a bar for the seconds per step of each row, and by how much they are uncertain."""
    from matplotlib.figure import Figure

    rows = sorted(rows, key=itemgetter("world_size"))
    seconds = np.array([step_seconds(row) for row in rows])
    errors = seconds * [uncertainty(row) for row in rows]
    figure = Figure(figsize=(6, 0.6 + 0.2 * len(rows)), layout="constrained")
    panel = figure.subplots()
    panel.barh(range(len(rows)), seconds, xerr=errors, capsize=2)
    panel.set_yticks(range(len(rows)), series_labels(rows), fontsize=7)
    panel.invert_yaxis()
    panel.set_xlabel("seconds per step")
    return figure


def draw_figures(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draw each study for which there are rows as STUDY.png; return their names."""
    from matplotlib import style

    draw = {"scaling": draw_throughput, "options": draw_bars, "io": draw_bars}
    measured = [row for row in rows if row.get("images_per_second")]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with style.context([STYLE_SHEET, RC_PARAMS]):
        for study in draw:
            of_study = [row for row in measured if study in row["studies"]]
            if of_study:
                draw[study](of_study).savefig(folder / f"{study}.png")
                drawn.append(study)
    return drawn


# --- The page

COLUMNS = {  # of the table of points: column of the rows, format
    "ranks": ("world_size", ""),
    "images/s": ("images_per_second", ".1f"),
    "planned": ("planned_images_per_second", ".1f"),
    "of the ideal": ("efficiency", ".0%"),
    "peak GiB": ("peak_allocated_gib", ".2f"),
    "planned GiB": ("planned_gib", ".2f"),
    "load": ("load_after", ".1f"),
}
CAUSES = ("compute", "communication", "input")  # what a step consists of


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format the lines of a table."""
    for cells in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def bottleneck_cells(rows: Sequence[Row], bottleneck: Bottleneck) -> list[str]:
    """Format what limits a setting: each part as a share of their sum."""
    ids = " ".join(row["id"] for row in rows)
    shares = ["-"] * len(CAUSES)
    if bottleneck.seconds:
        total = sum(bottleneck.seconds.values())
        shares = [f"{bottleneck.seconds[cause] / total:.0%}" for cause in CAUSES]
    return [ids, f"**{bottleneck.name}**", *shares, bottleneck.reason]


def point_cells(row: Row) -> list[str]:
    """Format a point by COLUMNS."""
    state = row["state"]
    reason = row.get("reason") or row.get("caveat")
    if reason:
        state += f": {reason}"
    cells = [row["id"], state]
    for column, form in COLUMNS.values():
        value = row.get(column)
        cells.append("-" if value is None else format(value, form))
    return cells


def page_lines(rows: Sequence[Row], figures: Sequence[str]) -> Iterator[str]:
    """Format the whole page."""
    sources = dict.fromkeys(row["source"] for row in rows)  # each once, in their order
    hosts = set()
    for row in rows:
        if row.get("host"):
            hosts.add(f"{row['host']} ({row.get('device')}, {row['cores']} cores)")
    yield f"# Sweep: {', '.join(sources)}\n"
    yield f"{date.today()}: {len(rows)} points, on {', '.join(sorted(hosts)) or 'other hosts'}."
    for name in figures:
        yield f"\n![{name}](figures/{name}.png)\n\n{CAPTIONS[name]}"
    yield "\n## What limits it\n\nShares of a step.\n"
    known = []
    unknown = 0
    for some, bottleneck in find_bottlenecks(rows):
        if bottleneck.name == "unknown":
            unknown += 1
        else:
            known.append(bottleneck_cells(some, bottleneck))
    yield from markdown_table(["points", "limit", *CAUSES, "how it was found"], known)
    if unknown:
        yield f"\nOf {unknown} settings too little was measured: add real, syn, io, and one rank."
    yield "\n## Every point\n"
    yield "The log of a point is runs/POINT/log.jsonl.\n"
    yield from markdown_table(["point", "state", *COLUMNS], [point_cells(row) for row in rows])


def write_page(folders: Sequence[Path], out: Path | None) -> Counter[str]:
    """Draw the points of some folders, and write their page; print and return their states.

    ValueError where no point has a result.
    """
    rows: list[Row] = []
    names = Counter(folder.resolve().name for folder in folders)
    for folder in folders:
        found = results.read_rows(folder)
        if names[folder.resolve().name] > 1:  # such as sweep_scaling of two machines
            for row in found:
                row["source"] = str(folder.parent / row["source"])
        rows += found
    states = Counter(row["state"] for row in rows)
    print(", ".join(f"{count} {state}" for state, count in states.items()))
    for row in rows:
        if row["state"] not in ("done", "waiting"):
            print(f"{row['state']:14}{row['id']:50} {row['reason']}")
    if not any(row.get("images_per_second") for row in rows):
        raise ValueError(f"{folders[0]} has no finished point to draw: run it further, or --retry")
    results.add_ideal(rows)
    if not out:
        out = folders[0]
        if not (out / "points.jsonl").exists():  # it holds results alone, such as published ones
            out = Path(f"sweep_{out.resolve().name}")
    figures = draw_figures(rows, out / "figures")
    results.write_lines(out / "results.jsonl", rows)
    with atomic_write(out / "report.md") as stream:
        for line in page_lines(rows, figures):
            stream.write(f"{line}\n".encode())
    print(f"report: {out / 'report.md'}")
    return states
