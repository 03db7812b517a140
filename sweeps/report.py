"""Draw what a sweep measured, and write it as a page with what limits each run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from storage.safe_files import replacing
from sweeps import results
from sweeps.results import ADVICE, SETTINGS, Limit, Row, find_limits, group_by, noise, step_seconds

# ---------------------------------------------------------------------------------------------
# Figures

STYLE_SHEET = "tableau-colorblind10"  # the first six colours stand out on white
MARKS, HATCHES = "os^DvPX*<>dhp", ("", "//", "..", "xx", "--", "oo")  # the same in grey
RC_PARAMS: Any = {"font.size": 9, "axes.grid": True, "axes.axisbelow": True}
RC_PARAMS |= {"grid.color": "#dddddd", "legend.frameon": False, "legend.handlelength": 3}
RC_PARAMS |= {"savefig.dpi": 160, "savefig.bbox": "tight"}  # the legend enlarges the picture
CAPTIONS = {
    "throughput": "Images/s of the whole job: medians of the measured steps. Bars: half the "
    "distance of their quartiles, at least the 5 % by which runs differ from day to day. Dashed: "
    "the speed of the fewest ranks that were measured, multiplied, on a CPU by at most its cores.",
    "options": "Images/s by FSDP1's backward prefetch and `limit_all_gathers`.",
    "io": "Seconds per step: training on images (real), on one batch kept on the device (syn), "
    "reading alone (io).",
}


def sharding(row: Row) -> str:
    """Name the sharding of a row, like `hybrid 2`."""
    grouped = row["mode"].startswith("hybrid") and row.get("group")
    return f"{row['mode']} {row['group']}" if grouped else row["mode"]


def series_labels(rows: Sequence[Row]) -> list[str]:
    """Label each row: its sharding, its caveat, and all else in which the rows differ."""
    same = {"model", "mode", "group", "limit_all_gathers", "prefetch"}
    columns = [name for name in ("source", "run_mode", *SETTINGS) if name not in same]
    shown = [n for n in columns if len({r[n] for r in rows if r.get(n) is not None}) > 1]
    shown.append("caveat")
    labels = []
    for row in rows:
        known = [(n, row[n]) for n in shown if row.get(n) is not None]
        texts = [f"{n} {value}" if n in SETTINGS else str(value) for n, value in known]
        labels.append(sharding(row) + f" ({', '.join(texts)})" * bool(texts))
    return labels


def new_figure(panels: int, width: float) -> tuple[Any, list[Any]]:
    """Make a figure of panels, each so many inches wide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.6, width * panels), 3.2), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def device_axis(panel: Any, worlds: Iterable[int]) -> None:
    """Make the x axis that of numbers of devices, in powers of two."""
    ticks = sorted({*worlds})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(world) for world in ticks], fontsize=8)
    panel.set_xticks([], minor=True)
    panel.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)


def value_axis(panel: Any) -> None:
    """Make the y axis logarithmic if it spans a decade; it has three labels in either case."""
    from matplotlib.ticker import LogLocator

    low, high = panel.dataLim.minposy, panel.dataLim.ymax
    if high < 10 * low:
        panel.set_ylim(0, 1.1 * high)
        return
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(10, (1, 2, 5) if high < 1000 * low else (1,)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_yticks([], minor=True)


def draw_throughput(rows: Sequence[Row]) -> Any:
    """Draw a panel per model and a line per sharding over devices; None without a result."""
    rows = [r for r in rows if r.get("images_per_second") and r["run_mode"] != "io"]
    rows = [r for r in rows if {*r["studies"]} - {"options", "io"}]
    models = group_by(rows, lambda row: row["model"])
    labels = dict(zip(map(id, rows), series_labels(rows), strict=True))
    order = list(dict.fromkeys(labels.values()))
    figure, panels = new_figure(len(models), 3.4) if models else (None, [])
    for panel, (model, mine) in zip(panels, models.items(), strict=True):
        mine.sort(key=lambda row: row["world_size"])
        for label, some in group_by(mine, lambda row: labels[id(row)]).items():
            number, xs = order.index(label), [row["world_size"] for row in some]
            look: Any = {"color": f"C{number % 6}", "marker": MARKS[number % len(MARKS)]}
            rates = [row["images_per_second"] for row in some]
            bars = [row["images_per_second"] * noise(row) for row in some]
            panel.errorbar(xs, rates, bars, label=label, capsize=2, lw=1.2, ms=5, **look)
            planned = [row.get("planned_images_per_second", np.nan) for row in some]
            if not np.isnan(planned).all():
                panel.plot(xs, planned, ":", mfc="none", **look)
                panel.plot([], [], "ko:", mfc="none", label="planned")
            panel.plot(xs, [row.get("ideal", np.nan) for row in some], "k--", lw=1, label="ideal")
        device_axis(panel, (row["world_size"] for row in mine))
        value_axis(panel)
        cpu = all(row.get("device") == "cpu" for row in mine)
        panel.set(title=model, ylabel="images/s", xlabel="ranks (CPU)" if cpu else "GPUs or GCDs")
    return figure


# by group of bars and name of a bar: its value, and by how much that is uncertain
Bars = dict[str, dict[str, tuple[float, float]]]


def draw_bars(groups: Bars, unit: str) -> Any:
    """Draw groups of bars; None without any."""
    if not groups:
        return None
    figure, (panel,) = new_figure(1, 1.0 + 1.4 * len(groups))
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    for i, name in enumerate(series):
        found = [group.get(name, (np.nan, np.nan)) for group in groups.values()]
        heights, errors = zip(*found, strict=True)
        xs = np.arange(len(groups)) + 0.8 * ((i + 0.5) / len(series) - 0.5)
        look: Any = {"label": name, "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "black"}
        panel.bar(xs, heights, 0.8 / len(series), yerr=errors, capsize=2, **look)
    panel.set_xticks(range(len(groups)), list(groups))
    panel.grid(axis="x", visible=False)
    panel.set_ylabel(unit)
    return figure


def draw_figures(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draw each figure for which there are rows as NAME.png; return the names."""
    from matplotlib import style

    folder.mkdir(parents=True, exist_ok=True)
    options: Bars = {}
    for row in rows:
        if "options" in row["studies"] and (rate := row.get("images_per_second")):
            title = f"{row['model']}, {row['world_size']} ranks\n{sharding(row)}\n{row['source']}"
            name = row["prefetch"] + ", limited" * row["limit_all_gathers"]
            options.setdefault(title, {})[name] = rate, rate * noise(row)
    inputs: Bars = {}
    for some, limit in find_limits(rows):
        if {"real", "io"} & {row["run_mode"] for row in some} and limit.word != "memory":
            first = f"{some[0]['model']}, {some[0]['world_size']} ranks\n{sharding(some[0])}"
            took = {row["run_mode"]: (step_seconds(row), noise(row)) for row in some}
            group = {mode: (seconds, seconds * share) for mode, (seconds, share) in took.items()}
            inputs[f"{first}\n{limit.word}"] = group
    with style.context([STYLE_SHEET, RC_PARAMS]):
        figures = {
            "throughput": draw_throughput(rows),
            "options": draw_bars(options, "images/s"),
            "io": draw_bars(inputs, "seconds per step"),
        }
        figures = {name: figure for name, figure in figures.items() if figure}
        for name, figure in figures.items():
            entries: dict[str, Any] = {}
            for panel in figure.axes:
                entries = dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True)) | entries
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": 2}
            figure.legend(entries.values(), entries.keys(), **place)
            figure.savefig(folder / f"{name}.png")
    return list(figures)


# ---------------------------------------------------------------------------------------------
# The page


COLUMNS = {  # of the table of points: column of the rows, format
    "ranks": ("world_size", ""),
    "images/s": ("images_per_second", ".1f"),
    "lower quartile": ("images_per_second_q1", ".1f"),
    "upper": ("images_per_second_q3", ".1f"),
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
    shares = [f"{parts[n] / sum(parts.values()):.0%}" if n in parts else "-" for n in names]
    return [ids, f"**{limit.word}**", *shares, limit.why, ADVICE[limit.word]]


def point_cells(row: Row, out: Path) -> list[str]:
    """Format a point by COLUMNS, with a link to its log."""
    log, name = f"runs/{row['id']}/log.jsonl", row["id"]
    why = row.get("reason") or row.get("caveat")
    cells = [f"[{name}]({log})" if (out / log).exists() else name]
    cells.append(row["state"] + (f": {why}" if why else ""))
    for column, form in COLUMNS.values():
        cells.append("-" if row.get(column) is None else format(row[column], form))
    return cells


def page_lines(rows: Sequence[Row], figures: Sequence[str], out: Path) -> Iterator[str]:
    """Format the whole page."""
    states = Counter(row["state"] for row in rows).items()
    hosts = {f"{r['host']} ({r.get('device')}, {r['cores']} cores)" for r in rows if r.get("host")}
    yield f"# Sweep: {', '.join(dict.fromkeys(row['source'] for row in rows))}\n"
    yield f"{date.today()}: {', '.join(f'{n} {state}' for state, n in states)}."
    yield f"\nMeasured on {', '.join(sorted(hosts)) or 'other hosts'}."
    for name in figures:
        yield f"\n![{name}](figures/{name}.png)\n\n{CAPTIONS[name]}"
    yield "\n## What limits it\n\nShares of a step.\n"
    limits = find_limits(rows)
    header = ["points", "limit", "compute", "communication", "input", "how it was found", "try"]
    yield from markdown_table(header, [limit_cells(*f) for f in limits if f[1].word != "unknown"])
    if count := sum(limit.word == "unknown" for _, limit in limits):
        yield f"\nOf {count} settings too little was measured: try {ADVICE['unknown']}."
    yield "\n## Every point\n"
    header = ["point and log", "state", *COLUMNS]
    yield from markdown_table(header, [point_cells(row, out) for row in rows])


def write_page(folders: Sequence[Path], out: Path | None) -> None:
    """Draw the points of some folders, and write their page; ValueError if there are none."""
    rows = [row for folder in folders for row in results.read_rows(folder)]
    if not any(row.get("images_per_second") for row in rows):
        raise ValueError(f"{folders[0]} has no finished point to draw: run the sweep further")
    results.add_ideal(rows)
    if not out:  # several sweeps, or one that is only results: not into one of them
        one = len(folders) == 1 and (folders[0] / "points.jsonl").exists()
        name = "_and_".join(folder.resolve().name.removeprefix("sweep_") for folder in folders)
        out = folders[0] if one else Path(f"sweep_{name}")
    figures = draw_figures(rows, out / "figures")
    results.write_lines(out / "results.jsonl", rows)
    with replacing(f"{out}/report.md") as stream:
        stream.writelines(f"{line}\n".encode() for line in page_lines(rows, figures, out))
    print(f"report: {out / 'report.md'}")
