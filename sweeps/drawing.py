"""Provide what the figures of sweeps are drawn with: pictures, names of series, parts of a panel.

Colours are those of a style sheet for colour-blind readers; marks and hatches say the same without
colour. Needs matplotlib.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from sweeps import results
from sweeps.results import Row

Quartiles = tuple[float, float, float]
Styles = dict[str, tuple[str, str]]  # sharding -> colour, mark

STYLE_SHEET = "tableau-colorblind10"  # the first six colours stand out on white
MARKS = "os^DvPX*<>dhp"
LINES = ("-", "-.", "--")  # one per source
RUN_HATCHES = {"real": "", "syn": "//", "io": ".."}
HATCHES = {"none": "", "backward_pre": "//", "backward_post": ".."}
LETTERS = {"out of memory": "M", "skipped": "S", "timed out": "T", "failed": "F"}
RC_PARAMS: Any = {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.2,
    "lines.markersize": 5,
    "errorbar.capsize": 2,
    "legend.frameon": False,
    "legend.handlelength": 3,
    "savefig.dpi": 160,
    "savefig.bbox": "tight",  # the legend below the panels enlarges the picture
}
PANEL_INCHES = (3.4, 2.9)


class Picture:
    """A figure with panels in rows of three, and the points drawn in it."""

    def __init__(self, name: str, title: str, panels: int) -> None:
        self.name, self.title = name, title
        self.points: list[list[Any]] = []
        self.columns, lines = min(panels, 3), -(-panels // 3)
        size = (max(4.6, PANEL_INCHES[0] * self.columns), PANEL_INCHES[1] * lines)
        self.figure = Figure(figsize=size, layout="constrained")
        grid = list(self.figure.subplots(lines, self.columns, squeeze=False).flatten())
        for empty in grid[panels:]:
            empty.set_axis_off()
        self.panels: list[Axes] = grid[:panels]
        self.figure.suptitle(title)

    def record_point(self, series: str, row: Row, x: Any, y: Any) -> None:
        """Keep a drawn point and where it comes from."""
        self.points.append([self.name, series, x, y, row["id"], row.get("log") or ""])

    def save(self, folder: Path) -> None:
        """Write NAME.png and NAME.csv; logs are relative to the folder above."""
        entries: dict[str, Any] = {}
        for panel in self.panels:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        self.figure.legend(
            entries.values(),
            entries.keys(),
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            ncols=max(2, self.columns),
        )
        self.figure.savefig(folder / f"{self.name}.png")
        names = ("figure", "series", "x", "y", "id", "log")
        table = [dict(zip(names, point, strict=True)) for point in self.points]
        for point in table:
            point["log"] = point["log"] and os.path.relpath(point["log"], folder.parent)
        results.write_table(folder / f"{self.name}.csv", table, names)


# ---------------------------------------------------------------------------------------------
# Series


def group_by(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Group rows by a key, in their order."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def sharding(row: Row) -> str:
    """Name the sharding of a row, like `hybrid 2`."""
    grouped = row["mode"].startswith("hybrid") and row.get("group")
    return f"{row['mode']} {row['group']}" if grouped else row["mode"]


def series_labels(rows: Sequence[Row]) -> list[str]:
    """Label the series of each row: its sharding, its caveat, and all in which the rows differ."""
    same = {"model", "mode", "group", "prefetch", "limit_all_gathers"}
    names = [n for n in ("source", "run_mode", *results.SETTINGS) if n not in same]
    differ = [n for n in names if len({r.get(n) for r in rows if r.get(n) is not None}) > 1]
    labels = []
    for row in rows:
        more = [
            f"{row[n]}" if n in ("source", "run_mode") else f"{n} {results.format_cell(row[n])}"
            for n in differ
            if row.get(n) is not None
        ]
        more += [row["caveat"]] if row.get("caveat") else []
        labels.append(sharding(row) + (f" ({', '.join(more)})" if more else ""))
    return labels


def style_of(row: Row, styles: Styles) -> dict[str, Any]:
    """Return colour and mark of a row's sharding, the same in all pictures of one call."""
    count = len(styles)
    colour, mark = styles.setdefault(sharding(row), (f"C{count % 6}", MARKS[count % len(MARKS)]))
    return {"color": colour, "marker": mark}


def rows_of_study(rows: Sequence[Row], study: str) -> list[Row]:
    """Select the `syn` rows of a study, and the training rows of users' tables."""
    named = {"options", "scaling", "io", "ladder"}
    return [
        row
        for row in rows
        if (row["run_mode"] == "syn" and study in row["study"].split())
        or (row["run_mode"] != "io" and not named & {*row["study"].split()})
    ]


def rate_quartiles(row: Row) -> Quartiles | None:
    """Return (lower quartile, median, upper quartile) of images/s; the median where unknown."""
    middle = row.get("images_per_second")
    if not middle or not row.get("world_size"):
        return None
    lower, upper = row.get("images_per_second_q1"), row.get("images_per_second_q3")
    return lower or middle, middle, upper or middle


# ---------------------------------------------------------------------------------------------
# Parts of a panel


def plain_log(axis: Any, base: float, subs: Sequence[float] = (1.0,)) -> None:
    """Label a logarithmic axis with plain numbers, at `subs` times each power of `base`."""
    axis.set_major_locator(LogLocator(base=base, subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def device_axis(panel: Axes, rows: Iterable[Row]) -> None:
    """Make the x axis that of devices, in powers of two."""
    worlds = sorted({row["world_size"] for row in rows if row.get("world_size")})
    panel.set_xscale("log", base=2)
    panel.set_xticks(worlds, [str(world) for world in worlds], fontsize=8)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(worlds[0] / 1.3, worlds[-1] * 1.3)
    cpu = all(row.get("device") == "cpu" for row in rows)
    panel.set_xlabel("ranks (CPU)" if cpu else "devices (GPUs or GCDs)")


def draw_quartiles(panel: Axes, xs: Sequence[float], values: list[Quartiles], **look: Any) -> None:
    """Draw medians with bars from the lower to the upper quartile."""
    lower = [middle - low for low, middle, _ in values]
    upper = [high - middle for _, middle, high in values]
    panel.errorbar(xs, [middle for _, middle, _ in values], [lower, upper], elinewidth=0.9, **look)


def draw_bar(panel: Axes, x: float, value: Quartiles, **look: Any) -> None:
    """Draw a bar with its quartiles."""
    panel.bar(x, value[1], edgecolor="black", linewidth=0.6, **look)
    draw_quartiles(panel, [x], [value], color="black")


def mark_failed_points(panel: Axes, rows: Sequence[Row], styles: Styles) -> None:
    """Mark each point without a result by a letter at the foot of the panel."""
    marked: Counter[int] = Counter()
    for row in rows:
        if row["state"] in LETTERS and row.get("world_size"):
            letter, world = LETTERS[row["state"]], row["world_size"]
            look = style_of(row, styles) | {"marker": f"$\\mathbf{{{letter}}}$"}
            label = f"{letter}: {row['state']}" + (" by plan" if letter == "S" else "")
            foot = panel.get_xaxis_transform()  # y is a share of the panel's height
            height = 0.05 + 0.08 * marked[world]
            panel.plot(world, height, transform=foot, linestyle="", label=label, **look)
            marked[world] += 1
    if marked:
        panel.margins(y=0.1 + 0.08 * max(marked.values()))
