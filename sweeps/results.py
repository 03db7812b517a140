"""Read what the runs of a sweep measured, and find the bottleneck of each setting.

A row is a point of a sweep: its flags, its plan, its state and what its run measured. A sweep keeps
them in DIR/points.jsonl and DIR/runs/ID/result.json; a report joins them in DIR/results.jsonl,
which alone is enough for another report.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoint import atomic_write
from runtime import config

Row = dict[str, Any]

SHARDING = config.names(config.SHARDING)  # the flags that say how a run is sharded
# two runs are compared if these flags are equal
SETTINGS = config.names(config.COMPARED, config.SHARDING)
INPUT = ("data", "workers", "exact_decode")  # flags that change only how images are read
MEMORY_STATES = ("out of memory", "skipped")
OUT_OF_MEMORY = re.compile("out.?of.?memory|allocate memory|MemoryError|oom.kill", re.I)
WARM_UP = 0.25  # of the steps, and at least one line: clocks, caches, compilers

# --- Files


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON, one a line, completely or not at all."""
    with atomic_write(path) as stream:
        for row in rows:
            stream.write(f"{json.dumps(row)}\n".encode())


def read_lines(path: Path) -> list[Row]:
    """Read what `write_lines` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def add_points(out: Path, rows: Sequence[Row]) -> list[Row]:
    """Add points to a sweep; return each of `rows` once, with all studies that it belongs to."""
    path = out / "points.jsonl"
    known: dict[str, Row] = {}
    if path.exists():
        known = {row["id"]: row for row in read_lines(path)}
    added: dict[str, Row] = {}
    for row in rows:
        studies = set(row["studies"])
        if row["id"] in known:
            studies.update(known[row["id"]]["studies"])
        row = row | {"studies": sorted(studies)}
        known[row["id"]] = row
        added[row["id"]] = row
    write_lines(path, known.values())
    return list(added.values())


def with_state(out: Path, row: Row) -> Row:
    """Add to a point its state, the reason, and the result of its run if that has ended."""
    folder = out / "runs" / row["id"]
    result = folder / "result.json"
    if result.exists():
        return row | json.loads(result.read_text())
    if folder.exists():
        reason = "it runs elsewhere, or was interrupted: --retry runs it again"
        return row | {"state": "unfinished", "reason": reason}
    if row["fit"].startswith("NO"):
        return row | {"state": "skipped", "reason": f"plan.py: {row['fit']}"}
    return row | {"state": "waiting", "reason": ""}


def read_rows(out: Path) -> list[Row]:
    """Read all rows of a sweep's folder, or of a results.jsonl alone; OSError for others."""
    if (out / "points.jsonl").exists():
        rows = [with_state(out, row) for row in read_lines(out / "points.jsonl")]
    else:
        rows = read_lines(out / "results.jsonl")
    return [{"source": out.resolve().name} | row for row in rows]


# --- One run


def read_log(path: Path) -> dict[str, list[Row]]:
    """Read the records of a log.jsonl by event; none where there is no such file."""
    if not path.exists():
        return {}
    return group_by(read_lines(path), itemgetter("event"))


def classify_end(code: int, log: dict[str, list[Row]], output: str, late: bool) -> tuple[str, str]:
    """Return (state, reason) of a run that has ended with the exit status `code`.

    `late` says that it was ended because of --limit.
    """
    end = log["end"][-1] if "end" in log else {}
    if end.get("reason") == "done":
        return "done", ""
    lines = output.splitlines()
    lines.append(f"exit status {code}: see output.txt")
    if end.get("problem"):
        lines.append(end["problem"])
    # before the time limit: if one rank runs out of memory, the others wait for it until then
    for line in lines:
        if OUT_OF_MEMORY.search(line):
            return "out of memory", line.strip()
    if late:
        return "timed out", "longer than --limit"
    return "failed", lines[-1]


def summarize(log: dict[str, list[Row]]) -> Row:
    """Summarise a run that is done: its flags, and its speed after the warm-up.

    The speed is the median of the logged steps, with its quartiles (q1, q3). A run that only reads
    images gets its mean speed for all three: batches of several workers arrive together.
    """
    row: Row = dict(log["start"][-1])
    lines = log.get("step", [])[1:]
    measured = [line for line in lines if line["step"] > WARM_UP * row["steps"]]
    if measured:
        rates = [line["images_per_second"] for line in measured]
        q1, median, q3 = np.percentile(rates, (25, 50, 75)).tolist()
        row["images_per_second_q1"] = q1
        row["images_per_second"] = median
        row["images_per_second_q3"] = q3
        row["peak_allocated_gib"] = measured[-1].get("peak_allocated_gib")
        row["alloc_retries"] = measured[-1].get("alloc_retries")
    if row.get("run_mode") == "io":
        for name in ("images_per_second_q1", "images_per_second", "images_per_second_q3"):
            row[name] = log["end"][-1]["images_per_second"]
    return row


# --- The ideal speed: no communication

DAY_TO_DAY = 0.05  # runs with the same flags differ by this much from day to day


def group_by(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Group rows by a key, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def values_of(row: Row, columns: Iterable[str]) -> tuple:
    """Return the values of some columns of a row, None where it has none."""
    return tuple(row.get(column) for column in columns)


def device_count(row: Row) -> int:
    """Count the devices that work at once: the ranks, but on a CPU at most its cores."""
    world_size = row["world_size"]
    if row.get("device") == "cpu" and row.get("cores"):
        return min(world_size, row["nodes"] * row["cores"])
    return world_size


def device_speed(row: Row) -> float:
    """Return the images per second of each device."""
    return row["images_per_second"] / device_count(row)


def step_seconds(row: Row) -> float:
    """Return the median seconds per step."""
    data_ranks = row["world_size"] / row.get("tp", 1)
    images = row["batch"] * row.get("accum", 1) * data_ranks
    return images / row["images_per_second"]


def uncertainty(row: Row) -> float:
    """Return the relative uncertainty of a speed: half its interquartile range, or DAY_TO_DAY."""
    spread = row.get("images_per_second_q3", 0) - row.get("images_per_second_q1", 0)
    return max(DAY_TO_DAY, spread / 2 / row["images_per_second"])


def add_ideal(rows: Sequence[Row]) -> None:
    """Add to each training run the images/s without communication, and its share of them.

    The ideal is the speed per device of the fastest `syn` run on the fewest ranks, times the number
    of devices. It is shared by all rows that differ in sharding and devices only.
    """
    columns = ["source", *(name for name in SETTINGS if name not in SHARDING)]
    setting = partial(values_of, columns=columns)
    syn = []
    for row in rows:
        if row["run_mode"] == "syn" and row.get("images_per_second") and not row.get("caveat"):
            syn.append(row)
    best: dict[tuple, Row] = {}
    for key, some in group_by(syn, setting).items():
        best[key] = min(some, key=lambda row: (row["world_size"], -device_speed(row)))
    for row in rows:
        reference = best.get(setting(row))
        if reference and row.get("images_per_second") and row["run_mode"] != "io":
            row["ideal"] = device_speed(reference) * device_count(row)
            row["ideal_ranks"] = reference["world_size"]
            row["efficiency"] = row["images_per_second"] / row["ideal"]


# --- What limits a run


class Bottleneck(NamedTuple):
    """What limits a setting, how that was found, and the seconds per step by cause if known."""

    name: str  # compute, communication, input, memory; unclear, unknown
    reason: str
    seconds: Mapping[str, float] = {}


def find_bottlenecks(rows: Sequence[Row]) -> list[tuple[list[Row], Bottleneck]]:
    """Find what limits each setting, from its real, syn and io runs, after `add_ideal`."""
    ended = []
    for row in rows:
        known = row.get("images_per_second") or row["state"] in MEMORY_STATES
        if known and row["studies"] != ["options"] and not row.get("caveat"):
            ended.append(row)
    columns = ("source", "world_size", "nodes", *SETTINGS)
    settings: list[list[Row]] = []
    for some in group_by(ended, partial(values_of, columns=columns)).values():
        # a syn run reads no images: it is compared with each way of reading them
        reading = [row for row in some if row["run_mode"] != "syn"]
        ways = dict.fromkeys(values_of(row, INPUT) for row in reading)
        for way in ways:
            belongs = [row["run_mode"] == "syn" or values_of(row, INPUT) == way for row in some]
            settings.append([*compress(some, belongs)])
        if not ways:
            settings.append(some)
    return [(group, find_bottleneck(group)) for group in settings]


def find_bottleneck(rows: Sequence[Row]) -> Bottleneck:
    """Find what limits a setting, from its runs: the largest part of a step.

    Parts are compute (what one device alone takes), communication (the rest of `syn`) and input
    (what `real` takes longer than `syn`). But if the loader alone is slower than training without
    it, the loader is the limit, however much of it is hidden. Measurements that contradict each
    other get no verdict.
    """
    for row in rows:
        if row.get("alloc_retries") or row["state"] in MEMORY_STATES:
            reason = row.get("reason") or "CUDA's allocator ran out, and tried again"
            return Bottleneck("memory", reason)
    runs = {row["run_mode"]: row for row in rows}
    seconds = {mode: step_seconds(row) for mode, row in runs.items()}
    uncertain = sum(seconds[mode] * uncertainty(row) for mode, row in runs.items())
    times = ", ".join(f"{mode} {value:.3g}" for mode, value in seconds.items())
    reason = f"seconds per step: {times}"
    if "syn" not in runs:
        return Bottleneck("unknown", reason)
    syn = seconds["syn"]
    io = seconds.get("io", 0.0)
    real = seconds.get("real", max(syn, io))
    if max(syn, io) - real > uncertain:
        reason += ": real cannot take less than syn or io, its parts"
        return Bottleneck("unclear", reason)
    waited = max(0.0, real - syn)
    slow_input = min(io, real) > syn + uncertain

    row = runs["syn"]
    world_size: int = row["world_size"]
    ideal_ranks: int = row.get("ideal_ranks", world_size)
    if world_size == 1:
        compute = syn  # one rank sends nothing
    elif ideal_ranks >= world_size or device_count(row) < world_size:
        # nothing says how much of `syn` is communication
        name = "input" if slow_input or waited > real / 2 else "unknown"
        return Bottleneck(name, reason)
    else:
        compute = syn * min(row["efficiency"], 1)
        reason += f", syn without communication {compute:.3g}"
    parts = {"compute": compute, "communication": syn - compute, "input": waited}
    largest = max(parts, key=parts.__getitem__)
    if slow_input:
        largest = "input"
    if largest == "compute" and 1 < ideal_ranks < world_size:
        return Bottleneck("unknown", f"{reason}, communication included")
    return Bottleneck(largest, reason, parts)
