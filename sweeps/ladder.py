"""Compare the rungs of a ladder: each run adds one technique to the run before it.

A rung that cannot run here has the numbers of plan.py, marked as planned. Out of memory is a
result.
"""

from collections.abc import Iterator, Sequence

from sweeps import drawing
from sweeps.drawing import Picture, Quartiles, Styles, rate_quartiles
from sweeps.results import Row, format_cell
from sweeps.studies import ladder_rungs

# Wang et al., ORBIT, arXiv 2404.14712: speed with 113B parameters on 512 GPUs, FSDP and tensor
# parallelism together on every rung, as a multiple of that with wrapping; None is out of memory.
PUBLISHED: dict[str, float | None] = {
    "no wrapping": None,
    "+ wrapping": 1.0,
    "+ mixed precision": 1.97,
    "+ prefetch": 2.4,
    "+ activation checkpointing": 5.7,
}
BASE_RUNG = "+ wrapping"  # whose speed is 1
HEADER = (
    *("rung", "images/s", "as a multiple", "peak GiB", "planned GiB"),
    *("largest batch (planned)", "MB of collectives per step", "ORBIT"),
)


def rung_of(row: Row) -> str | None:
    """Name the rung of a row by its flags; None for a row of another study."""
    rungs = ladder_rungs() if "ladder" in row["study"].split() else {}
    for rung, cells in reversed(rungs.items()):
        if all(format_cell(row.get(name)) == value for name, value in cells.items()):
            return rung
    return None


def ladders(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Group the rows of this study by model, ranks and source: a row for each rung, in order."""
    found: dict[str, dict[str, Row]] = {}
    for rung in ladder_rungs():
        for row in rows:
            if rung_of(row) == rung:
                names = (row["model"], f"{row['world_size']} ranks", row.get("source"))
                found.setdefault(", ".join(name for name in names if name), {})[rung] = row
    return found


def multiple(rungs: dict[str, Row], rung: str) -> tuple[Quartiles | None, bool]:
    """Return the speed of a rung as a multiple of that of BASE_RUNG, and whether it is planned."""
    row, base = rungs[rung], rungs.get(BASE_RUNG, {})
    if row["state"] in ("waiting", "queued"):
        rate, unit = (r.get("planned_images_per_second") for r in (row, base))
        return (rate / unit, rate / unit, rate / unit) if rate and unit else None, True
    found, unit = rate_quartiles(row), base.get("images_per_second")
    if not found or not unit:
        return None, False
    low, middle, high = found
    return (low / unit, middle / unit, high / unit), False


def table_rows(rungs: dict[str, Row]) -> Iterator[list[str]]:
    """Yield the cells of each rung, by HEADER."""
    for rung, row in rungs.items():
        speed, planned = multiple(rungs, rung)
        rate = row.get("planned_images_per_second" if planned else "images_per_second")
        shown = f"{rate:.1f}" if rate else row["state"]
        shown += " (planned)" if planned or row["state"] == "skipped" else ""
        shown = shown.replace("skipped", "out of memory")
        sent, plan = row.get("payload_mb"), row.get("planned_payload_mb")
        traffic = f"{sent:.1f}" if sent else f"{plan:.1f} (planned)" if plan else "0"
        memory = [row.get(name) for name in ("peak_allocated_gib", "planned_gib")]
        theirs = PUBLISHED.get(rung, "-")
        yield [
            *(rung, shown, f"{speed[1]:.2f}" if speed else "-"),
            *("-" if gib is None else f"{gib:.2f}" for gib in memory),
            *(str(row.get("max_local_batch", "-")), traffic),
            "out of memory" if theirs is None else f"{theirs}",
        ]


def draw_ladder(rows: Sequence[Row], _: Styles) -> Picture | None:
    """Draw the speed of each rung beside the published one."""
    found = ladders(rows)
    if not found:
        return None
    picture = Picture("ladder", "Speed, as a multiple of that with wrapping", len(found))
    for panel, (name, rungs) in zip(picture.panels, found.items(), strict=True):
        for x, (rung, row) in enumerate(rungs.items()):
            speed, planned = multiple(rungs, rung)
            if speed:
                look = {"hatch": "//", "label": "planned"} if planned else {"label": "measured"}
                drawing.draw_bar(panel, x - 0.2, speed, width=0.38, color="C0", **look)
                picture.record_point(name, row, rung, speed[1])
            elif row["state"] in drawing.LETTERS:
                letter = drawing.LETTERS[row["state"]]
                panel.text(x - 0.2, 0, letter, ha="center", va="bottom")
            theirs = PUBLISHED.get(rung, 0.0)
            label = "ORBIT, 113B on 512 GPUs (arXiv 2404.14712)"
            panel.bar(x + 0.2, theirs or 0, width=0.38, color="C1", label=label)
            if theirs is None:
                panel.text(x + 0.2, 0, "M", ha="center", va="bottom")
        panel.set_xticks(range(len(rungs)), list(rungs), rotation=30, ha="right", fontsize=7)
        panel.grid(axis="x", visible=False)
        panel.set(title=name, ylabel="times as fast")
    return picture
