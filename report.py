"""One page on a sweep: figures, what limits each point, the table. Markdown, for screen and paper.

python sweep.py report DIR [DIR ...]
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import figures
import results
import verdict
from drawing import Picture, groups, sharding
from results import Row

CAPTIONS = {
    "throughput": "Images/s of the whole job, median and quartiles over the measured steps; "
    "dashed, what as many devices would do that send nothing (on a CPU no more than it has cores).",
    "efficiency": "The same as a share of the dashed line.",
    "memory": "Peak of live tensors (CUDA's max allocated), and what plan.py says; a CPU's is not "
    "measured.",
    "options": "FSDP1's backward prefetch and `limit_all_gathers`.",
    "io": "Seconds of a step: training on images, on one batch kept on the device, reading alone. "
    "The dashed line is what the device alone computes; from there to `syn` is communication.",
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
    cells = []
    for row, found in zip(rows, verdict.verdicts(rows), strict=True):
        if found and "options" not in row["study"].split():
            parts = [found.compute, found.communication, found.input]
            total = sum(part or 0 for part in parts)
            shares = [
                f"{part / total:.0%}" if part is not None and total else "-" for part in parts
            ]
            cells.append([row["id"], f"**{found.word}**", *shares, found.why, found.advice])
    heads = ("point", "limit", "compute", "communication", "input", "how it was found", "try next")
    yield from markdown_table(heads, cells)


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
        state = row["state"] + (f": {row['reason']}" if row.get("reason") else "")
        memory = [value(row, "peak_allocated_gib", 2), value(row, "planned_gib", 2)]
        cells.append([name, state, str(row.get("world_size") or "-"), rate, *memory])
    yield from markdown_table(
        ("point and log", "state", "ranks", "images/s (quartiles)", "peak GiB", "planned GiB"),
        cells,
    )


def machines(rows: Sequence[Row]) -> Iterator[str]:
    """Where, when and with what it was measured."""
    seen = Counter(
        (r.get("source") or "", r.get("host") or "", r.get("device") or "", r.get("cores"),
         r.get("python"), r.get("torch"), str(r.get("started") or "")[:10])
        for r in rows if r.get("started")
    )  # fmt: skip
    for (source, host, device, cores, python, torch, day), count in sorted(seen.items(), key=str):
        yield (f"- {source}: {count} points on {host} ({device}, {cores} cores), Python {python}, "
               f"torch {torch}, {day}")  # fmt: skip


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
    if not folders:
        raise ValueError("which sweep? name its folder, or examples/published")
    sweeps = [folder for folder in folders if (folder / "results.csv").exists()]
    out = out or (sweeps[0] if sweeps else Path(f"sweep_{folders[0].resolve().name}"))
    names, rows = Counter(folder.resolve().name for folder in folders), list[Row]()
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
