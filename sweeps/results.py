"""Collect what the runs of a sweep measured: results.csv, one row per point.

Rows of other machines may be appended. Numbers come from log.jsonl alone. The published
measurements (examples/published) are read as rows of the same kind.
"""

import csv
import io
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from runtime.config import DEFAULT_BATCH, Config, names
from sweeps import attempts

Row = dict[str, Any]

SETTINGS = names("setting", "sharding")  # the flags that make two runs comparable: equal in both
SHARDING = names("sharding")  # of these, what the lines of a figure differ in
DEFAULTS = {"model": Config.model, "mode": "hybrid", "batch": DEFAULT_BATCH, "accum": Config.accum}
# Columns copied from a run's log. Peaks and counters grow: their maximum is kept, else the median.
STEP_COLUMNS = ["step_seconds", "data_seconds", "tflops_per_rank", "mfu"]
GROWING_COLUMNS = ["peak_allocated_gib", "peak_reserved_gib", "alloc_retries"]
PROFILE = ["compute", "communication", "optimizer", "data", "idle"]  # seconds per step
VERSIONS = ["python", "torch", "torchvision", "cuda", "hip"]
RATES = ["images_per_second", "images_per_second_q1", "images_per_second_q3"]
PLANS = ["planned_images_per_second", "planned_gib", "payload_mb", "planned_payload_mb"]
PLANS = [*PLANS, "memory_gib", "max_local_batch"]
PROFILE_COLUMNS = [f"profile_{name}" for name in PROFILE]
NUMBERS = [*RATES, "measured_lines", *STEP_COLUMNS, *GROWING_COLUMNS, *PROFILE_COLUMNS, *PLANS]
IDENTITY = ["id", "study", "state", "reason", "run_mode", "nodes", "ranks", "world_size"]
ORIGIN = ["source", "caveat", "host", "cores", *VERSIONS, "started", "log"]
COLUMNS = [*IDENTITY, *SETTINGS, "workers", *NUMBERS, *ORIGIN]
# in every row
REQUIRED = ("id", "study", "state", "run_mode", "model", "mode", "world_size", "batch")
TEXTS = {"id", "study", "reason", "model", "host", "source", "caveat", "started", "log", *VERSIONS}
# Why these published rows are not compared with others (examples/published/README.md).
CAVEATS = {("ddp", None): "probably not bf16", ("hybrid", 1): "gradients probably not reduced"}
WARM_UP = 0.25  # of the steps, and at least one line: clocks, caches, counted collectives


# ---------------------------------------------------------------------------------------------
# One run


def measured(log: attempts.RunLog) -> Row:
    """Summarise the lines of a log after its warm-up: medians, and quartiles of the speed."""
    total = log.start.get("steps") or (log.steps[-1]["step"] if log.steps else 0)
    kept = [s for s in log.steps[1:] if s["step"] > WARM_UP * total]
    rates = [s["images_per_second"] for s in kept]
    row: Row = {"measured_lines": len(kept)}
    if rates:
        quartiles = statistics.quantiles(rates, n=4, method="inclusive") if rates[1:] else rates * 3
        middle, lower, upper = RATES
        row |= zip((lower, middle, upper), quartiles, strict=True)
    for name in (*STEP_COLUMNS, *GROWING_COLUMNS):
        values = [s[name] for s in kept if s.get(name) is not None]
        if values:
            row[name] = max(values) if name in GROWING_COLUMNS else statistics.median(values)
    return row


def start_time(state: Mapping[str, Any]) -> str:
    """Format when an attempt was started: UTC, to the second."""
    return datetime.fromtimestamp(state["started"], timezone.utc).isoformat(timespec="seconds")


def make_row(point: Mapping[str, str], folder: Path, state: str, plan: Mapping[str, Any]) -> Row:
    """Make the row of a point: its flags, its plan, and what its newest attempt measured."""
    row: Row = DEFAULTS | {k: parse_cell(k, v) for k, v in point.items() if k in COLUMNS}
    world_size = int(point["nodes"]) * int(point["ranks"])
    fsdp = {*SHARDING, "cpu_offload"} - {"mode", "bucket_cap_mb"}
    if world_size == 1 and not point.get("mode") and not any(map(point.get, fsdp)):
        row["mode"] = "ddp"  # one process has nothing to shard (config.fill_defaults)
    row |= {"state": state, "run_mode": point.get("run_mode") or "real", "world_size": world_size}
    row |= {key: value for key, value in plan.items() if key in COLUMNS}
    made = attempts.list_attempts(folder)
    if not made or state in ("waiting", "skipped"):
        return row | {"reason": plan.get("why_not", "") if state == "skipped" else ""}
    known, log = attempts.read_state(made[-1]), attempts.read_log(made[-1] / "log.jsonl")
    row |= {"reason": known["reason"], "host": known["host"], "cores": known["cores"]}
    row |= {"started": start_time(known), "log": f"runs/{folder.name}/{made[-1].name}/log.jsonl"}
    row |= {key: value for key, value in log.start.items() if key in (*SETTINGS, "workers", "host")}
    row |= {k: v for k, v in (log.start.get("versions") or {}).items() if k in VERSIONS}
    machine = (plan.get("asked") or [None])[0] or ""
    if row.get("device") == "cpu" and not machine.endswith(".json"):  # known machines have GPUs
        row["planned_images_per_second"] = None
    if state == "done":  # a run that ended early has no comparable speed
        row |= measured(log)
        row |= {f"profile_{k}": v for k, v in log.profile.items() if k in PROFILE}
        planned = (log.start.get("planned") or {}).get("payload_bytes")
        sent = log.end.get("payload_bytes")
        if planned and sent:  # per step, without the few scalars that no plan counts
            row["planned_payload_mb"] = sum(planned.values()) / 1e6
            row["payload_mb"] = sum(sent.get(kind, 0) for kind in planned) / 1e6
    return row


# ---------------------------------------------------------------------------------------------
# Tables


def format_cell(value: Any) -> str:
    """Write a value as the text of a cell; floats with six digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def parse_cell(name: str, text: str) -> Any:
    """Read the text of a cell in column `name`; an empty cell is None."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float) if name not in TEXTS else ():
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


def write_table(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write a CSV file, completely or not at all."""
    with attempts.atomic_write(path) as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([format_cell(row.get(name)) for name in columns] for row in rows)


def read_cells(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line, cells) of a table that a sweep wrote; ValueError if a row was cut.

    A header line in between, from an appended file, holds for the rows below it.
    """
    reader, header = csv.reader(io.StringIO(attempts.read_text(path), newline="")), list[str]()
    try:
        for cells in reader:
            if cells[:1] == ["id"]:
                header = cells
            elif cells and len(cells) == len(header):
                yield reader.line_num, dict(zip(header, cells, strict=True))
            elif cells:
                raise csv.Error(f"it has {len(cells)} cells, its header line {len(header)}")
    except csv.Error as error:
        raise damaged(path, reader.line_num, str(error)) from None


def damaged(path: Path, line: int, why: str) -> ValueError:
    """Make the error for a broken table."""
    return ValueError(
        f"{path}, line {line} is damaged, {why}: repair it, or move the file away and "
        "run the sweep's command again to write it again"
    )


def read_table(path: Path) -> list[Row]:
    """Read the rows of a results.csv; ValueError, a sentence, for a broken row."""
    rows = []
    for line, cells in read_cells(path):
        row = {name: parse_cell(name, text) for name, text in cells.items()}
        for name in REQUIRED:
            if row.get(name) is None:
                raise damaged(path, line, f"{name} is missing")
        for name in (*NUMBERS, "nodes", "ranks", "world_size", "batch", "accum", "cores"):
            value = row.get(name) or 0
            if isinstance(value, str) or not math.isfinite(value) or value < 0:
                raise damaged(path, line, f"{name} is {cells[name]!r}, which is not a number")
        rows.append(row)
    return rows


def published(folder: Path) -> list[Row]:
    """Read the rows of examples/published; the log of a row is its place in the CSV file."""
    rows: list[Row] = []
    plans = published_plans(folder) if (folder / "check.py").exists() else {}
    for name, study in (("throughput", "scaling"), ("prefetch", "options"), ("memory", "scaling")):
        table = folder / f"{name}.csv"
        with open(table, newline="") as file:
            for line, cells in enumerate(csv.DictReader(file), 2):
                if cells.get("kind", "max_allocated") == "max_reserved":
                    continue
                row = {k: parse_cell(k, v) for k, v in cells.items()}
                row |= {"id": f"{name}.csv:{line}", "study": study}
                row |= {"state": "done", "run_mode": "syn"}
                row |= {"source": folder.name, "log": f"{table}:{line}", "batch": 32}
                row |= {"world_size": row["nodes"] and 8 * row["nodes"], "memory_gib": 64.0}
                row["caveat"] = CAVEATS.get((row["mode"], row.get("group")))
                if name == "memory":
                    row["peak_allocated_gib"] = row.pop("gib")
                kind = row.get("kind") or {"throughput": "img/s"}.get(name)
                place = (row["model"], row["mode"], row.get("group"), row["nodes"], kind)
                plan = "planned_gib" if name == "memory" else "planned_images_per_second"
                row[plan] = plans.get(place)
                rows.append(row)
    return rows


def published_plans(folder: Path) -> dict[tuple, float]:
    """Plan the published runs by the folder's check.py: by model, mode, group, nodes and kind."""
    done = subprocess.run(
        [sys.executable, str(folder / "check.py"), "--json"], text=True, capture_output=True
    )
    if done.returncode:
        raise RuntimeError(f"{folder / 'check.py'} failed: {attempts.last_error(done.stderr)}")
    columns = ("model", "mode", "group", "nodes", "kind")
    return {tuple(cell[n] for n in columns): cell["planned"] for cell in json.loads(done.stdout)}


def read_folder(folder: Path) -> list[Row]:
    """Read all rows of a sweep's folder or of examples/published; ValueError if it is neither."""
    if (folder / "results.csv").exists():
        rows = read_table(folder / "results.csv")
        for row in rows:
            row["source"] = row.get("source") or folder.resolve().name
            row["log"] = row["log"] and str(folder / row["log"])
        return rows
    if (folder / "throughput.csv").exists():
        return published(folder)
    raise ValueError(
        f"{folder} has no results.csv: give the --out of a sweep, or examples/published"
    )
