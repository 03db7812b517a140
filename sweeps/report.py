"""Write a Markdown page on a sweep: figures, what limits each point, a table of all points.

python sweep.py report DIR [DIR ...]
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from sweeps import bottleneck, figures, ladder, results
from sweeps.drawing import Picture, group_by, sharding
from sweeps.results import Row

CAPTIONS = {
    "throughput": "Images/s of the whole job: median and quartiles over the measured steps. "
    "Dashed: the speed of one rank, or of the fewest ranks that were measured, multiplied (on a "
    "CPU by at most its cores).",
    "efficiency": "The same as a share of the dashed line.",
    "memory": "Peak of live tensors (CUDA's max allocated), and the peak that plan.py computes. "
    "On a CPU it is not measured.",
    "options": "FSDP1's backward prefetch and `limit_all_gathers`.",
    "io": "Seconds per step: training on images, on one batch kept on the device, reading alone. "
    "The dashed line is the time of one rank alone, or of the fewest ranks; from there to `syn` is "
    "communication.",
    "ladder": "Images/s of each rung, as a multiple of that with wrapping; M: out of memory, S: by "
    "plan. ORBIT's are published for 113B parameters on 512 GPUs, where tensor parallelism is part "
    "of every rung (arXiv 2404.14712).",
    "planned": "Each point compared with its plan; grey: within 20 %.",
}


def plan_errors(rows: Sequence[Row]) -> Iterator[str]:
    """Format the error of the plan: a line for each quantity, model and sharding."""
    for what, (_, measured, planned) in zip(
        ("speed", "memory", "traffic"), figures.PLANNED_KINDS, strict=True
    ):
        both = [row for row in rows if row.get(measured) and row.get(planned)]
        for (model, mode), some in group_by(both, lambda r: (r["model"], sharding(r))).items():
            middle, worst = figures.median_error(some, measured, planned)
            yield (
                f"{what:8} {model:5} {mode:14} off by {middle:6.1%} in the median, {worst:6.1%} "
                f"at worst, {len(some)} points"
            )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format the lines of a table."""
    for cells in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def format_number(row: Row, name: str, digits: int = 1) -> str:
    """Format a number of a row; a dash where there is none."""
    return "-" if row.get(name) is None else f"{row[name]:.{digits}f}"


def bottleneck_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Format what limits each point, and what to try next."""
    cells, unknown = [], Counter[str]()
    for row, found in zip(rows, bottleneck.find_bottlenecks(rows), strict=True):
        if not found or "options" in row["study"].split():
            continue
        if found.limit == "unknown":
            unknown[found.advice] += 1
            continue
        parts = [found.compute, found.communication, found.input]
        total = sum(part or 0 for part in parts)
        shares = [f"{part / total:.0%}" if part is not None and total else "-" for part in parts]
        cells.append([row["id"], f"**{found.limit}**", *shares, found.why, found.advice])
    header = ("point", "limit", "compute", "communication", "input", "how it was found", "try next")
    if cells:
        yield from markdown_table(header, cells)
    for advice, count in unknown.items():
        yield f"\nFor {count} points too little was measured. Try {advice}."


def point_lines(rows: Sequence[Row], out: Path) -> Iterator[str]:
    """Format every point, with a link to its log."""
    cells = []
    for row in rows:
        log, name = Path(row.get("log") or ""), row["id"]
        if log.is_file():
            name = f"[{name}]({os.path.relpath(log, out)})"
        rate = format_number(row, "images_per_second")
        if row.get("images_per_second_q1"):
            low, high = (format_number(row, f"images_per_second_{q}") for q in ("q1", "q3"))
            rate += f" ({low} to {high})"
        why = row.get("reason") or row.get("caveat")
        state = row["state"] + (f": {why}" if why else "")
        memory = [format_number(row, k, 2) for k in ("peak_allocated_gib", "planned_gib")]
        cells.append([name, state, str(row.get("world_size") or "-"), rate, *memory])
    header = ("point and log", "state", "ranks", "images/s (quartiles)", "peak GiB", "planned GiB")
    yield from markdown_table(header, cells)


def machine_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Format where, when and with which versions the points were measured, and their caveats."""
    names = ("source", "device", "cores", "python", "torch")
    started = [row for row in rows if row.get("started")]
    found = group_by(started, lambda row: (*(row.get(name) for name in names), row["started"][:10]))
    for (source, device, cores, python, torch, day), some in sorted(found.items(), key=str):
        hosts = sorted({row.get("host") or "" for row in some})
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts, {hosts[0]} to {hosts[-1]}"
        yield (
            f"- {source}: {len(some)} points on {where} ({device}, {cores} cores), "
            f"Python {python}, torch {torch}, {day}"
        )
    doubted = [row for row in rows if row.get("caveat")]
    found = group_by(doubted, lambda row: (row["source"], sharding(row), row["caveat"]))
    for (source, name, caveat), some in found.items():
        yield f"- {source}: {len(some)} points of {name} are drawn, but not compared: {caveat}"


def page_lines(rows: Sequence[Row], pictures: Sequence[Picture], out: Path) -> Iterator[str]:
    """Format the whole page."""
    yield f"# Sweep: {', '.join(dict.fromkeys(row['source'] for row in rows))}"
    yield f"\nDrawn {date.today()} by `sweep.py report`."
    yield from machine_lines(rows)
    states = Counter(row["state"] for row in rows)
    yield "\n" + ", ".join(f"{count} {state}" for state, count in states.items()) + "."
    for picture in pictures:
        file = f"figures/{picture.name}"
        yield f"\n## {picture.title}\n\n![{picture.title}]({file}.png)\n"
        yield f"{CAPTIONS[picture.name]} Each point with its run: [{picture.name}.csv]({file}.csv)."
    for name, rungs in ladder.ladders(rows).items():
        yield f"\n## Ladder: {name}\n"
        yield from markdown_table(ladder.HEADER, list(ladder.table_rows(rungs)))
    yield "\n## What limits it\n"
    yield from bottleneck_lines(rows)
    if errors := list(plan_errors(rows)):
        yield "\n## Error of the plan\n\n```"
        yield from errors
        yield "```"
    yield "\n## Every point\n"
    yield from point_lines(rows, out)


def write(folders: Sequence[Path], out: Path | None, page: bool) -> int:
    """Draw the points of some folders, and write their page; ValueError if there are none."""
    sweeps = [folder for folder in folders if (folder / "results.csv").exists()]
    names, rows = Counter(folder.resolve().name for folder in folders), list[Row]()
    if not out and len(folders) > 1:  # not into one of them: each has a report of its own
        out = Path("sweep_" + "_and_".join(name.removeprefix("sweep_") for name in names))
    out = out or (sweeps[0] if sweeps else Path(f"sweep_{folders[0].resolve().name}"))
    for folder in folders:
        for row in results.read_folder(folder):
            if row["source"] == folder.resolve().name and names[row["source"]] > 1:
                row["source"] = str(folder)  # two folders have one name
            rows.append(row)
    pictures = figures.draw(rows, out / "figures")
    if not pictures:
        raise ValueError(f"{folders[0]} has no finished point to draw: run the sweep further")
    for line in plan_errors(rows):
        print(line)
    print(f"{', '.join(picture.name for picture in pictures)} in {out / 'figures'}")
    if len(folders) > 1:
        results.write_table(out / "merged.csv", rows, results.COLUMNS)
    if page:
        (out / "report.md").write_text("\n".join(page_lines(rows, pictures, out)) + "\n")
        print(f"report: {out / 'report.md'}")
    return 0
