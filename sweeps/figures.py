"""The figures of sweeps, published ones among them: PNG for the web, SVG for print.

    python sweep.py figures DIR [DIR ...]

Beside each picture lies a CSV with every drawn point and the log it comes from. Needs matplotlib.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from sweeps import bottleneck
from sweeps.drawing import (
    BLACK,
    BLUE,
    GREEN,
    HATCHES,
    LETTERS,
    LOOK,
    ORANGE,
    SKY,
    Picture,
    bars,
    device_axis,
    error_marks,
    groups,
    labels,
    lost,
    of_study,
    plain_log,
    sharding,
    style,
)
from sweeps.results import Row


def scaling_lines(
    name: str,
    title: str,
    axis: str,
    rows: Sequence[Row],
    value: Callable[[Row], tuple[float, float, float] | None],
    planned: Callable[[Row], float | None],
    known: dict,
    ideal: Callable[[Picture, Axes, list[Row]], None],
) -> Picture | None:
    """A panel for each model: a line for each sharding over the devices, the plan dotted.

    `value` gives (lower, middle, upper) of a row.
    """
    models = groups(of_study(rows, "scaling"), lambda row: row["model"])
    models = {m: rs for m, rs in models.items() if any(value(r) or planned(r) for r in rs)}
    if not models:
        return None
    picture, several = Picture(name, title, len(models)), len({r.get("source") for r in rows}) > 1
    some = [row for mine in models.values() for row in mine]
    named = dict(zip(map(id, some), labels(some, several), strict=True))
    for panel, (model, mine) in zip(picture.panels, models.items(), strict=True):
        device_axis(panel, mine)
        ideal(picture, panel, mine)
        names = [named[id(row)] for row in mine]
        for label in dict.fromkeys(names):
            some = [r for r, name in zip(mine, names, strict=True) if name == label]
            some = sorted((r for r in some if r.get("world_size")), key=lambda r: r["world_size"])
            if not some:
                continue
            colour, mark = style(sharding(some[0]), known)
            old = several and some[0].get("source") == "published"
            drawn = [(r, v) for r in some if (v := value(r))]
            for row, (_, middle, _) in drawn:
                picture.drew(f"{model}: {label}", row, row["world_size"], middle)
            if drawn:
                xs, ys = [r["world_size"] for r, _ in drawn], [v[1] for _, v in drawn]
                panel.plot(
                    xs,
                    ys,
                    color=colour,
                    marker=mark,
                    linestyle="-." if old else "-",
                    label=label,
                    linewidth=1.2,
                )
                error_marks(panel, xs, [v for _, v in drawn], colour)
            forecast = [(r, p) for r in some if (p := planned(r))]
            for row, at in forecast:
                picture.drew(f"{model}: {label}, planned", row, row["world_size"], at)
            if forecast:
                panel.plot(
                    [r["world_size"] for r, _ in forecast],
                    [p for _, p in forecast],
                    color=colour,
                    linestyle=":",
                    marker=mark,
                    markerfacecolor="none",
                    linewidth=1.0,
                    label=None if drawn else label,
                )
                panel.plot(
                    [],
                    [],
                    color=BLACK,
                    linestyle=":",
                    marker="o",
                    markerfacecolor="none",
                    label="hollow, dotted: planned",
                )
        lost(panel, mine, known)
        panel.set_title(model)
        panel.set_ylabel(axis)
    return picture


def throughput(rows: Sequence[Row], known: dict) -> Picture | None:
    """Images/s against devices, the ideal dashed."""
    rates = bottleneck.ideal_rates(rows)

    def ideal(_: Picture, panel: Axes, mine: list[Row]) -> None:
        panel.set_yscale("log")
        plain_log(panel.yaxis, 10)
        key_of = bottleneck.ideal_key
        found = groups((r for r in mine if key_of(r) in rates and r.get("world_size")), key_of)
        for key, some in found.items():
            rate, of = rates[key]
            shown = sorted({(r["world_size"], rate * bottleneck.devices(r)) for r in some})
            source = (
                f", {some[0].get('source')}" if len({r.get("source") for r in rows}) > 1 else ""
            )
            label = f"ideal: {of} rank{'s' * (of > 1)}, multiplied{source}"
            panel.plot(
                [x for x, _ in shown],
                [y for _, y in shown],
                "--",
                color=BLACK,
                linewidth=1,
                label=label,
            )

    return scaling_lines(
        "throughput",
        "Weak scaling: images/s of the whole job",
        "images/s",
        rows,
        spread,
        lambda row: row.get("planned_images_per_second"),
        known,
        ideal,
    )


def spread(row: Row) -> tuple[float, float, float] | None:
    """Quartiles and median of the speed; without quartiles, the median."""
    middle = row.get("images_per_second")
    if not middle or not row.get("world_size"):
        return None
    return (
        row.get("images_per_second_q1") or middle,
        middle,
        row.get("images_per_second_q3") or middle,
    )


def efficiency(rows: Sequence[Row], known: dict) -> Picture | None:
    """Speed of a device against the ideal."""
    rates = bottleneck.ideal_rates(rows)

    def share(row: Row) -> tuple[float, float, float] | None:
        rate, rates_of = spread(row), rates.get(bottleneck.ideal_key(row))
        if not rate or not rates_of:
            return None
        best = rates_of[0] * bottleneck.devices(row)
        return rate[0] / best, rate[1] / best, rate[2] / best

    def ideal(_: Picture, panel: Axes, mine: list[Row]) -> None:
        panel.axhline(1, linestyle="--", color=BLACK, linewidth=1, label="ideal")
        highest = max([s[2] for s in map(share, mine) if s] or [1.0])
        panel.set_ylim(0, max(1.1, 1.05 * highest))

    return scaling_lines(
        "efficiency",
        "Weak scaling: share of the ideal speed",
        "share of ideal",
        rows,
        share,
        lambda row: None,
        known,
        ideal,
    )


def memory(rows: Sequence[Row], known: dict) -> Picture | None:
    """Peak of a device, with its limit."""

    def limit(picture: Picture, panel: Axes, mine: list[Row]) -> None:
        panel.set_yscale("log", base=2)
        plain_log(panel.yaxis, 2)
        limits = {
            (r["world_size"], r["memory_gib"])
            for r in mine
            if r.get("memory_gib") and r.get("world_size")
        }
        values = sorted({gib for _, gib in limits})
        if len(values) == 1:
            panel.axhline(values[0], color=BLACK, linewidth=2, label="memory of a rank")
        elif values:
            panel.plot(
                *zip(*sorted(limits), strict=True),
                color=BLACK,
                linewidth=2,
                label="memory of a rank",
            )
        flat = [r for r in mine if r.get("kind") == "max_allocated" and not r.get("world_size")]
        for i, row in enumerate(flat):  # dashes beside each other, where two lines are one
            label = f"{sharding(row)} ({row.get('caveat') or 'devices not named'})"
            panel.axhline(
                row["peak_allocated_gib"],
                color=style(sharding(row), known)[0],
                linestyle=(5 * i, (5, 5)),
                linewidth=1.6,
                label=label,
            )
            picture.drew(f"{row['model']}: {label}", row, "", row["peak_allocated_gib"])

    def peak(row: Row) -> tuple[float, float, float] | None:
        value = row.get("peak_allocated_gib")
        return (value, value, value) if value else None

    def planned(row: Row) -> float | None:
        return None if row["state"] == "skipped" else row.get("planned_gib")

    return scaling_lines(
        "memory", "Peak memory of a rank", "GiB", rows, peak, planned, known, limit
    )


def options(rows: Sequence[Row], known: dict) -> Picture | None:
    """Backward prefetch and limit_all_gathers, for each sharding."""
    some = [r for r in of_study(rows, "options") if r.get("limit_all_gathers") is not None]
    parts = groups(some, lambda r: (r["model"], r.get("source"), r.get("world_size")))
    if not parts:
        return None
    picture = Picture("options", "Communication options of FSDP1: images/s", len(parts))
    choices = [(p, lim) for p in HATCHES for lim in (False, True)]
    for panel, ((model, source, world), mine) in zip(picture.panels, parts.items(), strict=True):
        modes = list(groups(mine, sharding))
        for i, (prefetch, limit) in enumerate(choices):
            heights = []
            for row in mine:
                if (row.get("prefetch"), bool(row.get("limit_all_gathers"))) != (prefetch, limit):
                    continue
                x = modes.index(sharding(row)) + (i - 2.5) * 0.13
                values = spread(row)
                if values:
                    heights.append((x, *values))
                    name = f"{model}: {prefetch}, {'limit' if limit else 'no limit'}"
                    picture.drew(name, row, sharding(row), values[1])
                elif row["state"] in LETTERS:
                    panel.text(x, 0, LETTERS[row["state"]], ha="center", va="bottom")
            bars(
                panel,
                heights,
                SKY if limit else ORANGE,
                HATCHES[prefetch],
                f"prefetch {prefetch}, {'limit' if limit else 'no limit'}",
                0.12,
            )
        panel.set_xticks(range(len(modes)), modes)
        panel.grid(axis="x", visible=False)
        panel.set_title(f"{model}, {world} ranks" + (f", {source}" if len(parts) > 1 else ""))
        panel.set_ylabel("images/s")
    return picture


def io(rows: Sequence[Row], known: dict) -> Picture | None:
    """Seconds of a step: training, without input, input alone, and on one device alone."""
    together = groups((r for r in rows if spread(r)), bottleneck.key)
    together = {k: rs for k, rs in together.items() if {"real", "io"} & {r["run"] for r in rs}}
    if not together:
        return None
    picture = Picture("io", "What limits a step: real, synthetic, input alone", 1)
    picture.figure.set_figwidth(max(5.0, 1.9 * len(together) + 1.6))
    (panel,), rates = picture.panels, bottleneck.ideal_rates(rows)
    for i, (run, colour, hatch) in enumerate(
        (("real", BLUE, ""), ("syn", ORANGE, "//"), ("io", GREEN, ".."))
    ):
        heights = []
        for place, some in enumerate(together.values()):
            for row in (r for r in some if r["run"] == run):
                lower, middle, upper = spread(row) or (1.0, 1.0, 1.0)
                step = bottleneck.seconds(row)
                heights.append(
                    (place + (i - 1) * 0.25, step * middle / upper, step, step * middle / lower)
                )
                picture.drew(run, row, sharding(row), step)
        bars(panel, heights, colour, hatch, run, 0.23)
    names, words = [], bottleneck.verdicts(rows)
    of = {id(row): word for row, word in zip(rows, words, strict=True)}
    for place, some in enumerate(together.values()):
        row = next((r for r in some if r["run"] == "real"), some[0])
        names.append(
            f"{row['model']}, {row['world_size']} ranks\n{sharding(row)}\n"
            f"limit: {getattr(of[id(row)], 'word', 'unknown')}"
        )
        alone = bottleneck.compute_seconds(row, rates.get(bottleneck.ideal_key(row)))
        if alone[0] is not None:
            panel.hlines(
                alone[0],
                place - 0.4,
                place + 0.4,
                colors=BLACK,
                linestyles="--",
                label=f"compute: {alone[1]}",
            )
    panel.set_xticks(range(len(names)), names)
    panel.grid(axis="x", visible=False)
    panel.set_xlim(-0.6, len(names) - 0.4)
    panel.set_ylabel("seconds per step")
    return picture


def planned(rows: Sequence[Row], known: dict) -> Picture | None:
    """Measured against planned: speed, memory, traffic, as far as both are known."""
    kinds = (
        ("images/s", "images_per_second", "planned_images_per_second"),
        ("GiB at the peak", "peak_allocated_gib", "planned_gib"),
        ("MB in the collectives of a step", "payload_mb", "planned_payload_mb"),
    )
    found = [
        (title, [r for r in rows if r.get(measured) and r.get(plan)], measured, plan)
        for title, measured, plan in kinds
    ]
    found = [entry for entry in found if entry[1]]
    if not found:
        return None
    picture = Picture("planned", "Measured against planned", len(found))
    for panel, (title, some, measured, plan) in zip(picture.panels, found, strict=True):
        panel.set_xscale("log")
        panel.set_yscale("log")
        for name, mine in groups(some, sharding).items():
            colour, mark = style(name, known)
            panel.plot(
                [r[plan] for r in mine],
                [r[measured] for r in mine],
                mark,
                color=colour,
                label=name,
                alpha=0.8,
            )
            for row in mine:
                picture.drew(f"{title}: {name}", row, row[plan], row[measured])
        ends = [v for r in some for v in (r[plan], r[measured])]
        low, high = min(ends) / 1.5, max(ends) * 1.5
        panel.fill_between(
            [low, high],
            [low * 0.8, high * 0.8],
            [low * 1.25, high * 1.25],
            color="#eeeeee",
            label="within 20 %",
            zorder=0,
        )
        panel.plot([low, high], [low, high], "--", color=BLACK, linewidth=1, label="as planned")
        panel.set_xlim(low, high)
        panel.set_ylim(low, high)
        for axis in (panel.xaxis, panel.yaxis):
            plain_log(axis, 10, sparse=high / low > 30)
        panel.set_xlabel("planned")
        panel.set_ylabel("measured")
        panel.set_title(
            f"{title}\nmedian error {median_error(some, measured, plan)[0]:.1%}", fontsize=9
        )
    return picture


def median_error(rows: Iterable[Row], measured: str, plan: str) -> tuple[float, float]:
    """(median, worst) of how far the plan is from what was measured, relative to that."""
    errors = [abs(row[plan] / row[measured] - 1) for row in rows]
    return statistics.median(errors), max(errors)


PICTURES: tuple[Callable[[Sequence[Row], dict], Picture | None], ...] = (
    throughput,
    efficiency,
    memory,
    options,
    io,
    planned,
)


def draw(rows: Sequence[Row], folder: Path) -> list[Picture]:
    """Every picture that the rows have something for."""
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, tuple[str, str]] = {}
    drawn = []
    with matplotlib.rc_context(LOOK):
        for make in PICTURES:
            picture = make(rows, known)
            if picture:
                picture.save(folder)
                drawn.append(picture)
    return drawn
