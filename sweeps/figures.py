"""Draw the figures of sweeps by matplotlib: a PNG file each, and a CSV of the points in it.

    python sweep.py figures DIR [DIR ...]

The CSV names the log of every drawn point.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes

from sweeps import bottleneck, drawing, ladder
from sweeps.drawing import Picture, Quartiles, Styles, group_by, rate_quartiles, sharding
from sweeps.results import Row


def median_error(rows: Iterable[Row], measured: str, plan: str) -> tuple[float, float]:
    """Return (median, largest) relative error of the plan."""
    errors = [abs(row[plan] / row[measured] - 1) for row in rows]
    return statistics.median(errors), max(errors)


# ---------------------------------------------------------------------------------------------
# Weak scaling: throughput, efficiency, memory


@dataclass(frozen=True)
class Chart:
    """What a figure over the number of devices shows."""

    name: str
    title: str
    unit: str
    value: Callable[[Row], Quartiles | None]
    planned: Callable[[Row], float | None]
    decorate: Callable[[Picture, Axes, list[Row]], None]  # scale, ideal line, limit


def draw_chart(chart: Chart, rows: Sequence[Row], styles: Styles) -> Picture | None:
    """Draw a panel per model and a line per sharding, the plan dotted."""
    models = group_by(drawing.rows_of_study(rows, "scaling"), lambda row: row["model"])
    models = {
        model: mine
        for model, mine in models.items()
        if any(chart.value(row) or chart.planned(row) for row in mine)
    }
    if not models:
        return None
    picture = Picture(chart.name, chart.title, len(models))
    drawn = [row for mine in models.values() for row in mine]
    labels = dict(zip(map(id, drawn), drawing.series_labels(drawn), strict=True))
    for panel, (model, mine) in zip(picture.panels, models.items(), strict=True):
        panel.set(title=model, ylabel=chart.unit)
        drawing.device_axis(panel, mine)
        chart.decorate(picture, panel, mine)
        named = group_by((r for r in mine if r.get("world_size")), lambda row: labels[id(row)])
        sources = list(dict.fromkeys(row.get("source") for row in drawn))
        for label, some in named.items():
            some = sorted(some, key=lambda row: row["world_size"])
            line = drawing.LINES[sources.index(some[0].get("source")) % len(drawing.LINES)]
            look = drawing.style_of(some[0], styles) | {"linestyle": line}
            draw_series(chart, picture, panel, label, some, look)
        drawing.mark_failed_points(panel, mine, styles)
    return picture


def draw_series(
    chart: Chart, picture: Picture, panel: Axes, label: str, rows: list[Row], look: Any
) -> None:
    """Draw the measured line of a series, and the planned one."""
    name = f"{rows[0]['model']}: {label}"
    measured = [(row, value) for row in rows if (value := chart.value(row))]
    if measured:
        xs, values = [row["world_size"] for row, _ in measured], [v for _, v in measured]
        drawing.draw_quartiles(panel, xs, values, label=label, **look)
    for row, value in measured:
        picture.record_point(name, row, row["world_size"], value[1])
    planned = [(row, rate) for row in rows if (rate := chart.planned(row))]
    if planned:
        xs, ys = [row["world_size"] for row, _ in planned], [rate for _, rate in planned]
        hollow: Any = {"linestyle": ":", "markerfacecolor": "none", "linewidth": 1.0}
        panel.plot(xs, ys, label=None if measured else label, **(look | hollow))
        panel.plot([], [], color="black", marker="o", label="hollow, dotted: planned", **hollow)
    for row, rate in planned:
        picture.record_point(f"{name}, planned", row, row["world_size"], rate)


def draw_throughput(rows: Sequence[Row], styles: Styles) -> Picture | None:
    """Draw images/s over devices, the ideal dashed."""
    rates, key = bottleneck.ideal_rates(rows), bottleneck.ideal_key
    several = len({row.get("source") for row in rows}) > 1

    def ideal(_: Picture, panel: Axes, mine: list[Row]) -> None:
        panel.set_yscale("log")
        drawing.plain_log(panel.yaxis, 10, (1.0, 2.0, 5.0))
        comparable = [row for row in mine if key(row) in rates and row.get("world_size")]
        for setting, some in group_by(comparable, key).items():
            rate, count = rates[setting]
            counts = {row["world_size"]: bottleneck.device_count(row) for row in some}
            label = f"ideal: {count} rank{'s' * (count > 1)}, multiplied"
            label += f", {some[0].get('source')}" if several else ""
            line = [(world, rate * devices) for world, devices in sorted(counts.items())]
            panel.plot(*zip(*line, strict=True), "--", color="black", linewidth=1, label=label)

    def planned(row: Row) -> float | None:
        return row.get("planned_images_per_second")

    title = "Weak scaling: images/s of the whole job"
    chart = Chart("throughput", title, "images/s", rate_quartiles, planned, ideal)
    return draw_chart(chart, rows, styles)


def draw_efficiency(rows: Sequence[Row], styles: Styles) -> Picture | None:
    """Draw the speed per device as a share of the ideal one."""
    rates = bottleneck.ideal_rates(rows)

    def share(row: Row) -> Quartiles | None:
        quartiles, ideal_rate = rate_quartiles(row), rates.get(bottleneck.ideal_key(row))
        if not quartiles or not ideal_rate:
            return None
        low, middle, high = quartiles
        best = ideal_rate[0] * bottleneck.device_count(row)
        return low / best, middle / best, high / best

    def ideal(_: Picture, panel: Axes, mine: list[Row]) -> None:
        panel.axhline(1, linestyle="--", color="black", linewidth=1, label="ideal")
        panel.set_ylim(0, max([1.1, *(1.05 * found[2] for found in map(share, mine) if found)]))

    title = "Weak scaling: share of the ideal speed"
    chart = Chart("efficiency", title, "share of ideal", share, lambda row: None, ideal)
    return draw_chart(chart, rows, styles)


def draw_memory(rows: Sequence[Row], styles: Styles) -> Picture | None:
    """Draw the peak memory per rank, and its limit."""

    def limit(picture: Picture, panel: Axes, mine: list[Row]) -> None:
        panel.set_yscale("log", base=2)
        drawing.plain_log(panel.yaxis, 2)
        known = [row for row in mine if row.get("memory_gib") and row.get("world_size")]
        limits = sorted({(row["world_size"], row["memory_gib"]) for row in known})
        look: Any = {"color": "black", "linewidth": 2, "label": "memory per rank"}
        if len({gib for _, gib in limits}) == 1:
            panel.axhline(limits[0][1], **look)
        elif limits:
            panel.plot(*zip(*limits, strict=True), **look)
        flat = [r for r in mine if r.get("kind") == "max_allocated" and not r.get("world_size")]
        for i, row in enumerate(flat):  # published without device counts; shift the dashes
            label = f"{sharding(row)} ({row.get('caveat') or 'devices not named'})"
            look = {"color": drawing.style_of(row, styles)["color"], "linestyle": (5 * i, (5, 5))}
            panel.axhline(row["peak_allocated_gib"], linewidth=1.6, label=label, **look)
            picture.record_point(f"{row['model']}: {label}", row, "", row["peak_allocated_gib"])

    def peak(row: Row) -> Quartiles | None:
        gib = row.get("peak_allocated_gib")
        return (gib, gib, gib) if gib else None

    def planned(row: Row) -> float | None:
        return None if row["state"] == "skipped" else row.get("planned_gib")

    chart = Chart("memory", "Peak memory per rank", "GiB", peak, planned, limit)
    return draw_chart(chart, rows, styles)


# ---------------------------------------------------------------------------------------------
# Options, input, plan


def draw_options(rows: Sequence[Row], _: Styles) -> Picture | None:
    """Draw images/s for each backward prefetch and limit_all_gathers, by sharding."""
    some = [
        r for r in drawing.rows_of_study(rows, "options") if r.get("limit_all_gathers") is not None
    ]
    parts = group_by(some, lambda r: (r["model"], r.get("source"), r.get("world_size")))
    if not parts:
        return None
    picture = Picture("options", "Communication options of FSDP1: images/s", len(parts))
    for panel, ((model, source, world), mine) in zip(picture.panels, parts.items(), strict=True):
        modes = list(group_by(mine, sharding))
        for row in mine:
            prefetch, limit = row.get("prefetch") or "none", row["limit_all_gathers"]
            place = 2 * list(drawing.HATCHES).index(prefetch) + limit
            x = modes.index(sharding(row)) + 0.13 * (place - 2.5)
            if value := rate_quartiles(row):
                name = f"{prefetch}, {'limit' if limit else 'no limit'}"
                look = {"color": f"C{int(limit)}", "hatch": drawing.HATCHES[prefetch]}
                drawing.draw_bar(panel, x, value, width=0.12, label=f"prefetch {name}", **look)
                picture.record_point(f"{model}: {name}", row, sharding(row), value[1])
            elif row["state"] in drawing.LETTERS:
                panel.text(x, 0, drawing.LETTERS[row["state"]], ha="center", va="bottom")
        panel.set_xticks(range(len(modes)), modes)
        panel.grid(axis="x", visible=False)
        title = f"{model}, {world} ranks" + (f", {source}" if len(parts) > 1 else "")
        panel.set(title=title, ylabel="images/s")
    return picture


def draw_io(rows: Sequence[Row], _: Styles) -> Picture | None:
    """Draw the seconds per step of real, syn and io runs, and of one rank alone."""
    settings = group_by((row for row in rows if rate_quartiles(row)), bottleneck.setting_key)
    settings = {k: rs for k, rs in settings.items() if {"real", "io"} & {r["run_mode"] for r in rs}}
    if not settings:
        return None
    picture = Picture("io", "What limits a step: real, synthetic, input alone", 1)
    picture.figure.set_figwidth(max(5.0, 1.9 * len(settings) + 1.6))
    (panel,), rates = picture.panels, bottleneck.ideal_rates(rows)
    limits = dict(zip(map(id, rows), bottleneck.find_bottlenecks(rows), strict=True))
    names = []
    for place, some in enumerate(settings.values()):
        for row in some:
            i, step = list(drawing.RUN_HATCHES).index(row["run_mode"]), bottleneck.step_seconds(row)
            low, middle, high = rate_quartiles(row) or (1.0, 1.0, 1.0)
            value = (step * middle / high, step, step * middle / low)
            mode = row["run_mode"]
            look = {"color": f"C{i}", "hatch": drawing.RUN_HATCHES[mode], "label": mode}
            drawing.draw_bar(panel, place + 0.25 * (i - 1), value, width=0.23, **look)
            picture.record_point(mode, row, sharding(row), step)
        row = next((row for row in some if row["run_mode"] == "real"), some[0])
        limit = getattr(limits[id(row)], "limit", "unknown")
        names.append(f"{row['model']}, {row['world_size']} ranks\n{sharding(row)}\nlimit: {limit}")
        alone, source = bottleneck.ideal_seconds(row, rates.get(bottleneck.ideal_key(row)))
        if alone is not None:
            ends, label = (place - 0.4, place + 0.4), f"compute: {source}"
            panel.plot(ends, (alone, alone), "--", color="black", label=label)
    panel.set_xticks(range(len(names)), names)
    panel.grid(axis="x", visible=False)
    panel.set(xlim=(-0.6, len(names) - 0.4), ylabel="seconds per step")
    return picture


PLANNED_KINDS = (  # unit, measured column, planned column
    ("images/s", "images_per_second", "planned_images_per_second"),
    ("GiB at the peak", "peak_allocated_gib", "planned_gib"),
    ("MB of collectives per step", "payload_mb", "planned_payload_mb"),
)


def draw_planned(rows: Sequence[Row], styles: Styles) -> Picture | None:
    """Draw measured against planned speed, memory and traffic."""
    kinds = [
        (kind, [r for r in rows if r.get(kind[1]) and r.get(kind[2])]) for kind in PLANNED_KINDS
    ]
    kinds = [(kind, some) for kind, some in kinds if some]
    if not kinds:
        return None
    picture = Picture("planned", "Measured against planned", len(kinds))
    for panel, ((unit, measured, plan), some) in zip(picture.panels, kinds, strict=True):
        panel.set(xscale="log", yscale="log", xlabel=f"planned {unit}", ylabel="measured")
        for name, mine in group_by(some, sharding).items():
            xs, ys = [r[plan] for r in mine], [r[measured] for r in mine]
            look = drawing.style_of(mine[0], styles)
            panel.plot(xs, ys, linestyle="", label=name, alpha=0.8, **look)
            for row in mine:
                picture.record_point(f"{unit}: {name}", row, row[plan], row[measured])
        values = [v for r in some for v in (r[plan], r[measured])]
        ends = low, high = min(values) / 1.5, max(values) * 1.5
        band = [0.8 * v for v in ends], [1.25 * v for v in ends]
        panel.fill_between(ends, *band, color="#eeeeee", label="within 20 %", zorder=0)
        panel.plot(ends, ends, "--", color="black", linewidth=1, label="as planned")
        panel.set(xlim=ends, ylim=ends)
        for axis in (panel.xaxis, panel.yaxis):
            drawing.plain_log(axis, 10, (1.0,) if high / low > 30 else (1.0, 2.0, 5.0))
        error = median_error(some, measured, plan)[0]
        panel.set_title(f"{unit}\nmedian error {error:.1%}", fontsize=9)
    return picture


FIGURES = (
    *(draw_throughput, draw_efficiency, draw_memory),
    *(draw_options, draw_io, ladder.draw_ladder, draw_planned),
)


def draw(rows: Sequence[Row], folder: Path) -> list[Picture]:
    """Draw every figure for which there are rows."""
    folder.mkdir(parents=True, exist_ok=True)
    styles: Styles = {}
    with style.context([drawing.STYLE_SHEET, drawing.RC_PARAMS]):
        pictures = [picture for make in FIGURES if (picture := make(rows, styles))]
        for picture in pictures:
            picture.save(folder)
    return pictures
