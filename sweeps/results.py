"""Read what the runs of a sweep measured, and find what limits each of them.

A row is a point of a sweep: its flags, its plan, its state and what its run measured. They lie in
DIR/points.jsonl and DIR/runs/ID/result.json; a report joins them in DIR/results.jsonl, which alone
is enough for another report.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoint import replacing
from runtime.config import names

Row = dict[str, Any]

SETTINGS = names("setting", "sharding")  # two runs are compared where these flags are equal
MEMORY = ("out of memory", "skipped")
OUT_OF_MEMORY = re.compile("out.?of.?memory|allocate memory|MemoryError|oom.kill", re.I)
WARM_UP = 0.25  # of the steps, and at least one line: clocks, caches, compilers

# --- Files


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON, one a line, completely or not at all."""
    with replacing(path) as stream:
        stream.writelines(f"{json.dumps(row)}\n".encode() for row in rows)


def read_lines(path: Path) -> list[Row]:
    """Read what `write_lines` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def add_points(out: Path, rows: Sequence[Row]) -> list[Row]:
    """Add points to a sweep; return each of `rows` once, with all studies that it belongs to."""
    path, new = out / "points.jsonl", dict[str, Row]()
    known = {row["id"]: row for row in (read_lines(path) if path.exists() else [])}
    for row in rows:
        studies = {*known.get(row["id"], row)["studies"], *row["studies"]}
        known[row["id"]] = new[row["id"]] = row | {"studies": sorted(studies)}
    write_lines(path, known.values())
    return list(new.values())


def with_state(out: Path, row: Row) -> Row:
    """Add to a point its state, the reason, and the result of its run if that has ended."""
    folder, state, why = out / "runs" / row["id"], "waiting", ""
    if (folder / "result.json").exists():
        return row | read_lines(folder / "result.json")[0]
    if folder.exists():
        state, why = "unfinished", "it runs elsewhere, or was interrupted: --retry runs it again"
    elif row["fit"].startswith("NO"):
        state, why = "skipped", f"plan.py: {row['fit']}"
    return row | {"state": state, "reason": why}


def read_rows(out: Path) -> list[Row]:
    """Read all rows of a sweep's folder, or of a results.jsonl alone; OSError for others."""
    if (out / "points.jsonl").exists():
        rows = [with_state(out, row) for row in read_lines(out / "points.jsonl")]
    else:
        rows = read_lines(out / "results.jsonl")
    return [{"source": out.resolve().name} | row for row in rows]


# --- One run


def read_log(path: Path) -> dict[str, list[Row]]:
    """Read the records of a log.jsonl, if there is one, by event."""
    return group_by(read_lines(path) if path.exists() else [], lambda record: record["event"])


def outcome(code: int, log: dict[str, list[Row]], output: str, late: bool) -> tuple[str, str]:
    """Return (state, reason) of a run that has ended with the exit status `code`."""
    end = log["end"][-1] if "end" in log else {}
    if end.get("reason") == "done":
        return "done", ""
    lines = [*output.splitlines(), end.get("problem") or f"exit status {code}: see output.txt"]
    # first: where the memory of one rank has run out, the others wait for it until a time limit
    if found := [line for line in lines if OUT_OF_MEMORY.search(line)]:
        return "out of memory", found[0].strip()
    return ("timed out", "longer than --limit") if late else ("failed", lines[-1])


def measured(log: dict[str, list[Row]]) -> Row:
    """Summarise a run that is done: its flags, medians and quartiles after the warm-up."""
    row: Row = dict(log["start"][-1])
    kept = [s for s in log.get("step", [])[1:] if s["step"] > WARM_UP * row["steps"]]
    if kept:
        three = np.percentile([s["images_per_second"] for s in kept], (25, 50, 75)).tolist()
        rates = ("images_per_second_q1", "images_per_second", "images_per_second_q3")
        row |= zip(rates, three, strict=True)
        row |= {name: kept[-1].get(name) for name in ("peak_allocated_gib", "alloc_retries")}
    return row


# --- What limits a run

CLOSE = 0.05  # runs with the same flags differ by this much from day to day


class Limit(NamedTuple):
    """What limits a setting, how that was found, and the seconds per step by cause if known."""

    word: str
    why: str
    parts: Mapping[str, float] = {}


def ideal_key(row: Row) -> tuple:
    """Return what the points below one ideal line share: all but sharding and devices."""
    return tuple(row.get(name) for name in ("source", *SETTINGS) if name not in names("sharding"))


def device_count(row: Row) -> int:
    """Count the devices that work at once: the ranks, but on a CPU at most its cores."""
    cores = row.get("cores") if row.get("device") == "cpu" else None
    return min(row["world_size"], row["nodes"] * cores) if cores else row["world_size"]


def step_seconds(row: Row) -> float:
    """Return the median seconds per step."""
    images = row["batch"] * row.get("accum", 1) * row["world_size"] / row.get("tp", 1)
    return images / row["images_per_second"]


def noise(row: Row) -> float:
    """Return the share by which a speed is uncertain: half its quartiles' distance, or CLOSE."""
    apart = row.get("images_per_second_q3", 0) - row.get("images_per_second_q1", 0)
    return max(CLOSE, apart / 2 / row["images_per_second"])


def add_ideal(rows: Iterable[Row]) -> None:
    """Add to each training run the images/s without communication, and its share of them.

    They are those of the fastest `syn` on the fewest ranks, for as many devices.
    """
    found = [r for r in rows if r["run_mode"] == "syn" and r.get("images_per_second")]
    found.sort(key=lambda r: (-r["world_size"], r["images_per_second"] / device_count(r)))
    runs = {ideal_key(r): r for r in found if not r.get("caveat")}
    for row in rows:
        best = runs.get(ideal_key(row))
        if best and row.get("images_per_second") and row["run_mode"] != "io":
            each = best["images_per_second"] / device_count(best)
            row["ideal"], row["ideal_ranks"] = each * device_count(row), best["world_size"]
            row["efficiency"] = row["images_per_second"] / row["ideal"]


def find_limits(rows: Sequence[Row]) -> list[tuple[list[Row], Limit]]:
    """Find what limits each setting, from its real, syn and io runs, after `add_ideal`."""
    ended = [r for r in rows if r.get("images_per_second") or r["state"] in MEMORY]
    ended = [r for r in ended if r["studies"] != ["options"] and not r.get("caveat")]
    same = ("source", "world_size", "nodes", *SETTINGS)
    settings = group_by(ended, lambda row: tuple(row.get(name) for name in same))
    return [(some, find_limit(some)) for some in settings.values()]


def find_limit(rows: Sequence[Row]) -> Limit:
    """Find what limits a setting, from its runs: the largest part of a step.

    Parts are compute (what one device alone takes), communication (the rest of `syn`) and input
    (what `real` takes longer than `syn`). But a loader that alone is slower than training without
    it is the limit, however much of it is hidden. No verdict where what was measured cannot be.
    """
    for row in rows:
        if row.get("alloc_retries") or row["state"] in MEMORY:
            return Limit("memory", row.get("reason") or "CUDA's allocator ran out, and tried again")
    runs = {row["run_mode"]: row for row in rows}
    took = {mode: step_seconds(row) for mode, row in runs.items()}
    unsure = sum(took[mode] * noise(row) for mode, row in runs.items())
    why = "seconds per step: " + ", ".join(f"{mode} {took[mode]:.3g}" for mode in took)
    if "syn" not in runs:
        return Limit("unknown", why)
    row, syn, io = runs["syn"], took["syn"], took.get("io", 0.0)
    real = took.get("real", max(syn, io))
    if max(syn, io) - real > unsure:
        return Limit("unclear", f"{why}: real cannot take less than syn or io, its parts")
    waited, compute, world = max(0.0, real - syn), syn, row["world_size"]
    slow_input = min(io, real) > syn + unsure
    if world > 1:
        if row.get("ideal_ranks", world) >= world or device_count(row) < world:
            return Limit("input" if slow_input or waited > real / 2 else "unknown", why)
        compute = syn * min(row["efficiency"], 1)
        why += f", syn without communication {compute:.3g}"
    shares = {"compute": compute, "communication": syn - compute, "input": waited}
    first = "input" if slow_input else max(shares, key=lambda name: shares[name])
    if first == "compute" and 1 < row.get("ideal_ranks", 1) < world:
        return Limit("unknown", f"{why}, communication included")
    return Limit(first, why, shares)


def group_by(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Group rows by a key, in their order."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
