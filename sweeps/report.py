"""One page on a sweep: figures, what limits each point, the table. Markdown, for screen and paper.

python sweep.py report DIR [DIR ...]
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from sweeps import bottleneck, figures, results
from sweeps.drawing import Picture, groups, sharding
from sweeps.results import Row

CAPTIONS = {
    "throughput": "Images/s of the whole job, median and quartiles over the measured steps; "
    "dashed, the speed of one rank, or of the fewest that were measured, multiplied (on a CPU by "
    "no more than its cores).",
    "efficiency": "The same as a share of the dashed line.",
    "memory": "Peak of live tensors (CUDA's max allocated), and what plan.py says; a CPU's is not "
    "measured.",
    "options": "FSDP1's backward prefetch and `limit_all_gathers`.",
    "io": "Seconds per step: training on images, on one batch kept on the device, reading alone. "
    "The dashed line is what one rank alone, or the fewest, take for it; from there to `syn` is "
    "communication.",
    "planned": "Each point beside what plan.py said of it; grey, within 20 %.",
}


def plan_errors(rows: Sequence[Row]) -> Iterator[str]:
    """How far the plan is from what was measured, a line for each model and sharding."""
    for what, measured, planned in (
        ("speed", "images_per_second", "planned_images_per_second"),
        ("memory", "peak_allocated_gib", "planned_gib"),
        ("traffic", "payload_mb", "planned_payload_mb"),
    ):
        some = [row for row in rows if row.get(measured) and row.get(planned)]
        for (model, mode), mine in groups(some, lambda row: (row["model"], sharding(row))).items():
            middle, worst = figures.median_error(mine, measured, planned)
            yield (
                f"{what:8} {model:5} {mode:14} off by {middle:6.1%} in the median, {worst:6.1%} "
                + (f"at worst, {len(mine)} points")
            )


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table."""
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |"


def value(row: Row, name: str, digits: int = 1) -> str:
    """A number of a row, or a dash."""
    found = row.get(name)
    return "-" if found is None else f"{found:.{digits}f}"


def verdict_lines(rows: Sequence[Row]) -> Iterator[str]:
    """A table of what limits what, and what to try next."""
    cells, open_ones = [], Counter[str]()
    for row, found in zip(rows, bottleneck.verdicts(rows), strict=True):
        if not found or "options" in row["study"].split():
            continue
        if found.word == "unknown":
            open_ones[found.advice] += 1
            continue
        parts = [found.compute, found.communication, found.input]
        total = sum(part or 0 for part in parts)
        shares = [f"{part / total:.0%}" if part is not None and total else "-" for part in parts]
        cells.append([row["id"], f"**{found.word}**", *shares, found.why, found.advice])
    heads = ("point", "limit", "compute", "communication", "input", "how it was found", "try next")
    if cells:
        yield from markdown_table(heads, cells)
    for advice, count in open_ones.items():
        yield f"\nOf {count} points too little was measured to tell. Try {advice}."


def point_lines(rows: Sequence[Row], out: Path) -> Iterator[str]:
    """Every point, with the way to its log."""
    cells = []
    for row in rows:
        log = Path(row.get("log") or "")
        name = row["id"]
        if log.is_file():
            name = f"[{name}]({os.path.relpath(log, out)})"
        rate = value(row, "images_per_second")
        if row.get("images_per_second_q1"):
            rate += (
                f" ({value(row, 'images_per_second_q1')} to {value(row, 'images_per_second_q3')})"
            )
        why = row.get("reason") or row.get("caveat")
        state = row["state"] + (f": {why}" if why else "")
        memory = [value(row, "peak_allocated_gib", 2), value(row, "planned_gib", 2)]
        cells.append([name, state, str(row.get("world_size") or "-"), rate, *memory])
    yield from markdown_table(
        ("point and log", "state", "ranks", "images/s (quartiles)", "peak GiB", "planned GiB"),
        cells,
    )


def machines(rows: Sequence[Row]) -> Iterator[str]:
    """Where, when and with what it was measured."""
    names = ("source", "device", "cores", "python", "torch")
    some = [row for row in rows if row.get("started")]
    found = groups(some, lambda row: (*(row.get(name) for name in names), row["started"][:10]))
    for (source, device, cores, python, torch, day), mine in sorted(found.items(), key=str):
        hosts = sorted({row.get("host") or "" for row in mine})
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts, {hosts[0]} to {hosts[-1]}"
        yield (
            f"- {source}: {len(mine)} points on {where} ({device}, {cores} cores), "
            f"Python {python}, torch {torch}, {day}"
        )
    some = [row for row in rows if row.get("caveat")]
    doubts = groups(some, lambda row: (row["source"], sharding(row), row["caveat"]))
    for (source, name, caveat), mine in doubts.items():
        yield f"- {source}: {len(mine)} points of {name} are drawn, but not compared: {caveat}"


def page(rows: Sequence[Row], pictures: Sequence[Picture], out: Path) -> Iterator[str]:
    """The lines of the page."""
    yield f"# Sweep: {', '.join(dict.fromkeys(r['source'] for r in rows))}"
    yield f"\nDrawn {date.today()} by `sweep.py report`."
    yield from machines(rows)
    states = Counter(row["state"] for row in rows)
    yield "\n" + ", ".join(f"{count} {state}" for state, count in states.items()) + "."
    for picture in pictures:
        yield f"\n## {picture.title}\n\n![{picture.title}](figures/{picture.name}.png)\n"
        yield f"{CAPTIONS[picture.name]} ([SVG](figures/{picture.name}.svg); each point with its"
        yield f"run: [{picture.name}.csv](figures/{picture.name}.csv))"
    yield "\n## What limits it\n"
    yield from verdict_lines(rows)
    errors = list(plan_errors(rows))
    if errors:
        yield "\n## The plan against it\n\n```"
        yield from errors
        yield "```"
    yield "\n## Every point\n"
    yield from point_lines(rows, out)


def write(folders: Sequence[Path], out: Path | None, report: bool) -> int:
    """Figures of some folders, and the page; ValueError where there is nothing to draw."""
    sweeps = [folder for folder in folders if (folder / "results.csv").exists()]
    names, rows = Counter(folder.resolve().name for folder in folders), list[Row]()
    if not out and len(folders) > 1:  # in none of theirs: each has a report of its own
        out = Path("sweep_" + "_and_".join(name.removeprefix("sweep_") for name in names))
    out = out or (sweeps[0] if sweeps else Path(f"sweep_{folders[0].resolve().name}"))
    for folder in folders:
        for row in results.read_folder(folder):  # of folders with one name, by their paths
            same = row["source"] == folder.resolve().name and names[row["source"]] > 1
            rows.append(row | {"source": str(folder)} if same else row)
    pictures = figures.draw(rows, out / "figures")
    if not pictures:
        raise ValueError(f"{folders[0]} has no finished point to draw: run the sweep further")
    for line in plan_errors(rows):
        print(line)
    print(f"{', '.join(picture.name for picture in pictures)} in {out / 'figures'}")
    if len(folders) > 1:
        results.write_table(out / "merged.csv", rows, results.COLUMNS)
    if report:
        (out / "report.md").write_text("\n".join(page(rows, pictures, out)) + "\n")
        print(f"report: {out / 'report.md'}")
    return 0
