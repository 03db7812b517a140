"""Draw what a sweep measured, and write it as a page with what limits each run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint import replacing
from sweeps import results
from sweeps.results import SETTINGS, Limit, Row, find_limits, group_by, noise, step_seconds

# --- Figures

STYLE_SHEET = "tableau-colorblind10"  # the first six colours stand out on white
MARKS = "os^DvPX*<>dhp"  # the same in grey
RC_PARAMS: Any = {"font.size": 9, "axes.grid": True, "axes.axisbelow": True}
RC_PARAMS |= {"grid.color": "#dddddd", "legend.frameon": False, "legend.handlelength": 3}
RC_PARAMS |= {"savefig.dpi": 160, "savefig.bbox": "tight"}  # the legend enlarges the picture
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
    columns = ("source", "run_mode", "world_size", *SETTINGS, "caveat")
    shown = [n for n in columns if len({r[n] for r in rows if r.get(n) is not None}) > 1]
    shown = [name for name in shown if name not in ("mode", "group", *left_out)]
    labels = []
    for row in rows:
        texts = [f"{name} {row[name]}" for name in shown if row.get(name) is not None]
        sharding = f"{row['mode']} {row.get('group') or ''}".strip()
        labels.append(sharding + f" ({', '.join(texts)})" * bool(texts))
    return labels


def device_axis(panel: Any, worlds: Iterable[int]) -> None:
    """Make the x axis that of numbers of devices, in powers of two."""
    ticks = sorted({*worlds})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(world) for world in ticks], fontsize=8)
    panel.set_xticks([], minor=True)
    panel.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)


def draw_throughput(rows: Sequence[Row]) -> Any:
    """Draw a panel per model and a line per sharding: images/s per rank, over ranks."""
    from matplotlib.figure import Figure

    models = group_by(rows, lambda row: row["model"])
    labels = dict(zip(map(id, rows), series_labels(rows, "model", "world_size"), strict=True))
    order, entries = list(dict.fromkeys(labels.values())), dict[str, Any]()
    figure = Figure(figsize=(max(4.6, 3.4 * len(models)), 3.2), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for panel, (model, mine) in zip(panels, models.items(), strict=True):
        mine.sort(key=lambda row: row["world_size"])
        for label, some in group_by(mine, lambda row: labels[id(row)]).items():
            number, xs = order.index(label), np.array([row["world_size"] for row in some])
            look: Any = {"color": f"C{number % 6}", "marker": MARKS[number % len(MARKS)]}
            names = ("images_per_second", "planned_images_per_second", "ideal")
            rates, planned, ideal = ([r.get(name, np.nan) for r in some] / xs for name in names)
            bars = rates * [noise(row) for row in some]
            entries[label] = panel.errorbar(xs, rates, bars, capsize=2, lw=1.2, ms=5, **look)
            panel.plot(xs, planned, ":", mfc="none", **look)
            panel.plot(xs, ideal, "k--", lw=1)
        device_axis(panel, (row["world_size"] for row in mine))
        panel.set(title=model, ylabel="images/s per rank", xlabel="ranks", ylim=(0, None))
    place: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": 2}
    figure.legend(entries.values(), entries.keys(), **place)
    return figure


def draw_bars(rows: Sequence[Row]) -> Any:
    """Draw a bar for the seconds per step of each row, and by how much they are uncertain."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 0.6 + 0.2 * len(rows)), layout="constrained")
    rows = sorted(rows, key=lambda row: row["world_size"])
    panel, took = figure.subplots(), np.array([step_seconds(row) for row in rows])
    panel.barh(range(len(rows)), took, xerr=took * [noise(row) for row in rows], capsize=2)
    panel.set_yticks(range(len(rows)), series_labels(rows), fontsize=7)
    panel.invert_yaxis()
    panel.set_xlabel("seconds per step")
    return figure


def draw_figures(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draw each study for which there are rows as STUDY.png; return their names."""
    from matplotlib import style

    draw = {"scaling": draw_throughput, "options": draw_bars, "io": draw_bars}
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with style.context([STYLE_SHEET, RC_PARAMS]):
        for study in draw:
            if mine := [r for r in rows if study in r["studies"] and r.get("images_per_second")]:
                draw[study](mine).savefig(folder / f"{study}.png")
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


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format the lines of a table."""
    for cells in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def limit_cells(rows: Sequence[Row], limit: Limit) -> list[str]:
    """Format what limits a setting: each part as a share of their sum."""
    parts, ids = limit.parts, " ".join(row["id"] for row in rows)
    names = ("compute", "communication", "input")
    shares = [f"{parts[n] / sum(parts.values()):.0%}" if parts else "-" for n in names]
    return [ids, f"**{limit.word}**", *shares, limit.why]


def point_cells(row: Row) -> list[str]:
    """Format a point by COLUMNS."""
    why = row.get("reason") or row.get("caveat")
    cells = [row["id"], row["state"] + (f": {why}" if why else "")]
    for column, form in COLUMNS.values():
        cells.append("-" if row.get(column) is None else format(row[column], form))
    return cells


def page_lines(rows: Sequence[Row], figures: Sequence[str]) -> Iterator[str]:
    """Format the whole page."""
    hosts = {f"{r['host']} ({r.get('device')}, {r['cores']} cores)" for r in rows if r.get("host")}
    yield f"# Sweep: {', '.join(dict.fromkeys(row['source'] for row in rows))}\n"
    yield f"{date.today()}: {len(rows)} points, on {', '.join(sorted(hosts)) or 'other hosts'}."
    for name in figures:
        yield f"\n![{name}](figures/{name}.png)\n\n{CAPTIONS[name]}"
    yield "\n## What limits it\n\nShares of a step.\n"
    limits = find_limits(rows)
    header = ["points", "limit", "compute", "communication", "input", "how it was found"]
    yield from markdown_table(header, [limit_cells(*f) for f in limits if f[1].word != "unknown"])
    if count := sum(limit.word == "unknown" for _, limit in limits):
        yield f"\nOf {count} settings too little was measured: add real, syn, io, and one rank."
    yield "\n## Every point\n"
    yield "The log of a point is runs/POINT/log.jsonl.\n"
    yield from markdown_table(["point", "state", *COLUMNS], [point_cells(row) for row in rows])


def write_page(folders: Sequence[Path], out: Path | None) -> Counter[str]:
    """Draw the points of some folders, and write their page; print and return their states.

    ValueError where no point has a result.
    """
    rows = [row for folder in folders for row in results.read_rows(folder)]
    states = Counter(row["state"] for row in rows)
    print(", ".join(f"{count} {state}" for state, count in states.items()))
    for row in rows:
        if row["state"] not in ("done", "waiting"):
            print(f"{row['state']:14}{row['id']:50} {row['reason']}")
    if not any(row.get("images_per_second") for row in rows):
        raise ValueError(f"{folders[0]} has no finished point to draw: run it further, or --retry")
    results.add_ideal(rows)
    if not out:  # not into a folder of results alone
        first = folders[0]
        out = first if (first / "points.jsonl").exists() else Path(f"sweep_{first.resolve().name}")
    figures = draw_figures(rows, out / "figures")
    results.write_lines(out / "results.jsonl", rows)
    with replacing(out / "report.md") as stream:
        stream.writelines(f"{line}\n".encode() for line in page_lines(rows, figures))
    print(f"report: {out / 'report.md'}")
    return states
