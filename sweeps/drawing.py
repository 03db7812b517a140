"""What the figures of sweeps are drawn with: colours, marks, axes, names of series, files.

Colours are those of Okabe and Ito, which the colour-blind tell apart; marks and hatches say the
same without colour. Needs matplotlib.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from sweeps import results
from sweeps.results import Row

BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK, GREY = (
    "#000000",
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
    "#808080",
)
STYLES: dict[str, tuple[str, str]] = {  # colour, mark
    "ddp": (GREY, "x"),
    "zero1": (GREY, "+"),
    "no_shard": (ORANGE, "s"),
    "shard_grad_op": (PINK, "v"),
    "full_shard": (RED, "o"),
    "hybrid 1": (SKY, "^"),
    "hybrid 2": (BLUE, "D"),
    "hybrid 4": (GREEN, "P"),
    "hybrid 8": (BLACK, "*"),
}
OTHERS = [(GREEN, "<"), (BLACK, ">"), (PINK, "h"), (SKY, "d"), (BLUE, "p"), (ORANGE, "X")]
HATCHES = {"none": "", "backward_pre": "//", "backward_post": ".."}
LETTERS = {"out of memory": "M", "skipped": "S", "timed out": "T", "failed": "F"}
LOOK: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.fontsize": 8,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "savefig.dpi": 160,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 5,
    "svg.hashsalt": "sweep",
    "legend.handlelength": 3,
    "hatch.linewidth": 0.6,
    "errorbar.capsize": 2,
}


class Picture:
    """A figure of panels in rows of three, and the points drawn in it."""

    def __init__(self, name: str, title: str, panels: int) -> None:
        self.name, self.title = name, title
        self.points: list[list[Any]] = []
        columns, lines = min(panels, 3), -(-panels // 3)
        self.figure = Figure(
            figsize=(max(4.6, 3.3 * columns), 2.9 * lines + 0.4), layout="constrained"
        )
        grid = self.figure.subplots(lines, columns, squeeze=False).flatten()
        for empty in grid[panels:]:
            empty.set_axis_off()
        self.panels: list[Axes] = list(grid[:panels])
        self.figure.suptitle(title, fontsize=11)

    def drew(self, series: str, row: Row, x: Any, y: Any) -> None:
        """Remember where a drawn point comes from."""
        self.points.append([self.name, series, x, y, row["id"], row.get("log") or ""])

    def save(self, folder: Path) -> None:
        """PNG, SVG and CSV; logs as seen from the folder above."""
        entries: dict[str, Any] = {}
        for panel in self.panels:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        if entries:
            inches = 0.65 + 0.056 * max(map(len, entries))  # of the longest label, and its mark
            columns = max(1, int(self.figure.get_figwidth() / inches))
            lines = -(-len(entries) // columns)
            self.figure.set_figheight(self.figure.get_figheight() + 0.18 * lines)
            self.figure.legend(
                entries.values(),
                entries.keys(),
                loc="outside lower center",
                ncols=columns,
                frameon=False,
            )
        self.figure.savefig(folder / f"{self.name}.png")
        self.figure.savefig(folder / f"{self.name}.svg", metadata={"Date": None})
        names = ("figure", "series", "x", "y", "id", "log")
        table = [dict(zip(names, point, strict=True)) for point in self.points]
        for point in table:
            point["log"] = point["log"] and os.path.relpath(point["log"], folder.parent)
        results.write_table(folder / f"{self.name}.csv", table, names)


# ---------------------------------------------------------------------------------------------
# What belongs together


def groups(rows: Iterable[Row], name: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by a name, in their order."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(name(row), []).append(row)
    return found


def sharding(row: Row) -> str:
    """`hybrid 2`."""
    grouped = row["mode"].startswith("hybrid") and row.get("group")
    return f"{row['mode']} {row['group']}" if grouped else row["mode"]


def labels(rows: Sequence[Row], source: bool) -> list[str]:
    """Of the series that each row belongs to: its sharding, and in what else the rows differ.

    `source`: where it comes from in any case.
    """
    but = {"model", "mode", "group", "prefetch", "limit_all_gathers"}
    names = [n for n in ("source", "run", *results.SETTINGS) if n not in but]
    differ = [n for n in names if len({r.get(n) for r in rows if r.get(n) is not None}) > 1]
    if source:
        differ = ["source", *(n for n in differ if n != "source")]
    found = []
    for row in rows:
        more = [
            f"{row[n]}" if n in ("source", "run") else f"{n} {results.text_of(row[n])}"
            for n in differ
            if row.get(n) is not None
        ]
        more += [row["caveat"]] if row.get("caveat") else []
        found.append(sharding(row) + (f" ({', '.join(more)})" if more else ""))
    return found


def style(name: str, known: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """(colour, mark) of a sharding, the same in every picture of one call."""
    if name not in known:
        known[name] = STYLES.get(name) or OTHERS[len(known) % len(OTHERS)]
    return known[name]


def of_study(rows: Sequence[Row], study: str) -> list[Row]:
    """The `syn` rows of a study, and all that train of tables of one's own."""
    named = {"options", "scaling", "io"}
    return [
        row
        for row in rows
        if (row["run"] == "syn" and study in row["study"].split())
        or (row["run"] != "io" and not named & {*row["study"].split()})
    ]


def device_axis(panel: Axes, rows: Iterable[Row]) -> None:
    """Devices, in powers of two."""
    worlds = sorted({row["world_size"] for row in rows if row.get("world_size")})
    panel.set_xscale("log", base=2)
    panel.set_xticks(
        worlds, [str(world) for world in worlds], fontsize=9 if worlds[6:] == [] else 7.5
    )
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(worlds[0] / 1.3, worlds[-1] * 1.3)
    cpu = all(row.get("device") == "cpu" for row in rows)
    panel.set_xlabel("ranks (CPU)" if cpu else "devices (GPUs or GCDs)")


def plain_log(axis: Any, base: float, sparse: bool = False) -> None:
    """A logarithmic axis with plain numbers: each power of 2, or 1, 2, 5, 10, or each power."""
    steps = (1.0, 2.0, 5.0) if base == 10 and not sparse else (1.0,)
    axis.set_major_locator(LogLocator(base=base, subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def lost(panel: Axes, rows: Sequence[Row], known: dict) -> None:
    """A letter at the foot for each point without a number."""
    some = [r for r in rows if r["state"] in LETTERS and r.get("world_size")]
    at: dict[Any, int] = {}
    for row in some:
        letter, world = LETTERS[row["state"]], row["world_size"]
        at[world] = at.get(world, -1) + 1
        panel.plot(
            world,
            0.05 + 0.08 * at[world],
            transform=panel.get_xaxis_transform(),
            marker=f"$\\mathbf{{{letter}}}$",
            color=style(sharding(row), known)[0],
            linestyle="",
            markersize=6,
            label=f"{letter}: {row['state']}" + (" by plan" if letter == "S" else ""),
        )
    low, high = panel.get_ylim()
    if some and panel.get_yscale() == "log":  # room for them
        panel.set_ylim(low / (high / low) ** (0.08 * (1 + max(at.values()))), high)


def error_marks(
    panel: Axes, xs: Sequence[float], values: Sequence[tuple[float, float, float]], colour: str
) -> None:
    """From lower to upper quartile, where those are known."""
    for x, (lower, middle, upper) in zip(xs, values, strict=True):
        if lower < upper:
            panel.errorbar(
                [x],
                [middle],
                yerr=[[middle - lower], [upper - middle]],
                color=colour,
                linewidth=0.9,
            )


def bars(
    panel: Axes,
    heights: Sequence[tuple[float, float, float, float]],
    colour: str,
    hatch: str,
    label: str,
    width: float,
) -> None:
    """Bars at (x, lower, height, upper)."""
    if heights:
        panel.bar(
            [h[0] for h in heights],
            [h[2] for h in heights],
            width,
            color=colour,
            hatch=hatch,
            edgecolor=BLACK,
            linewidth=0.6,
            label=label,
        )
        error_marks(panel, [h[0] for h in heights], [h[1:] for h in heights], BLACK)
