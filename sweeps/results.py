"""What the runs of a sweep have found: one row a point.

    results.csv     tidy: a row a point; rows of other machines may be appended

Numbers come from log.jsonl alone. The published measurements (examples/published) are read as rows
of the same kind. Needs nothing but Python.
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

from sweeps import attempts

Row = dict[str, Any]

# What makes two runs comparable, by the names of train_fsdp.py's flags.
SETTINGS = (
    "model",
    "img_size",
    "mask_ratio",
    "mode",
    "group",
    "fsdp",
    "prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "cpu_offload",
    "bucket_cap_mb",
    "device",
    "precision",
    "reduce_dtype",
    "ac",
    "compile",
    "batch",
    "accum",
)
SHARDING = (
    "mode",
    "group",
    "fsdp",
    "prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "bucket_cap_mb",
)
MEASURED = (
    "step_seconds",
    "data_seconds",
    "tflops_per_rank",
    "mfu",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "alloc_retries",
)
VERSIONS = ("python", "torch", "torchvision", "cuda", "hip")
PROFILE = ("compute", "communication", "optimizer", "data", "idle")
NUMBERS = (
    "images_per_second",
    "images_per_second_q1",
    "images_per_second_q3",
    "measured_lines",
    *MEASURED,
    *(f"profile_{name}" for name in PROFILE),
    "planned_images_per_second",
    "planned_gib",
    "payload_mb",
    "planned_payload_mb",
    "memory_gib",
    "max_local_batch",
)
COLUMNS = (
    "id",
    "study",
    "state",
    "reason",
    "run",
    "nodes",
    "ranks",
    "world_size",
    *SETTINGS,
    "workers",
    *NUMBERS,
    "source",
    "caveat",
    "host",
    "cores",
    *VERSIONS,
    "started",
    "log",
)
REQUIRED = ("id", "study", "state", "run", "model", "mode", "world_size", "batch")  # of every row
WORDS = ("id", "study", "reason", "model", "host", "source", "caveat", "started", "log", *VERSIONS)
DEFAULTS = {"model": "base", "mode": "hybrid", "batch": 32, "accum": 1}  # of train_fsdp.py
OF_FSDP = ("group", "fsdp", "prefetch", "forward_prefetch", "limit_all_gathers", "cpu_offload")
# Why published rows are left out of every comparison (examples/published/README.md).
CAVEATS = {("ddp", None): "probably not bf16", ("hybrid", 1): "gradients probably not reduced"}
WARM_UP = 0.25  # of the steps, and at least one line: clocks, caches, counted collectives


# ---------------------------------------------------------------------------------------------
# One run


def measured(log: attempts.Log) -> Row:
    """Medians over the lines of a log after its warm-up, and the quartiles of the speed."""
    total = log.start.get("steps") or (log.steps[-1]["step"] if log.steps else 0)
    kept = [s for s in log.steps[1:] if s["step"] > WARM_UP * total]
    rates = sorted(s["images_per_second"] for s in kept)
    row: Row = {"measured_lines": len(kept)}
    if rates:
        quartiles = statistics.quantiles(rates, n=4, method="inclusive") if rates[1:] else rates * 3
        row["images_per_second_q1"], row["images_per_second"], row["images_per_second_q3"] = (
            quartiles
        )
    for name in MEASURED:
        values = [s[name] for s in kept if s.get(name) is not None]
        if values:  # a peak since the start, and what has been counted since, not a mean
            middle = max if name.startswith(("peak", "alloc")) else statistics.median
            row[name] = middle(values)
    return row


def start_of(facts: Mapping[str, Any]) -> str:
    """When an attempt was started, from its state: seconds, UTC."""
    return datetime.fromtimestamp(facts["started"], timezone.utc).isoformat(timespec="seconds")


def row_of(point: Mapping[str, str], folder: Path, state: str, plan: Mapping[str, Any]) -> Row:
    """The row of a point: what was asked, what its newest attempt says, what was planned."""
    row: Row = dict(DEFAULTS) | {k: cell(k, v) for k, v in point.items() if k in COLUMNS}
    nodes, ranks = int(point["nodes"]), int(point["ranks"])
    if nodes * ranks == 1 and not point.get("mode") and not any(map(point.get, OF_FSDP)):
        row["mode"] = "ddp"  # one process has nothing to shard (flags.default_mode)
    row |= {"state": state, "run": point.get("run") or "real", "world_size": nodes * ranks}
    row |= {key: value for key, value in plan.items() if key in COLUMNS}
    made = attempts.attempts(folder)
    if not made or state in ("waiting", "skipped"):
        return row | {"reason": plan.get("why_not", "") if state == "skipped" else ""}
    facts, log = attempts.read_state(made[-1]), attempts.read_log(made[-1] / "log.jsonl")
    row |= {"reason": facts["reason"], "host": facts["host"], "cores": facts["cores"]}
    row |= {"started": start_of(facts), "log": f"runs/{folder.name}/{made[-1].name}/log.jsonl"}
    row |= {key: value for key, value in log.start.items() if key in (*SETTINGS, "workers", "host")}
    row |= {k: v for k, v in (log.start.get("versions") or {}).items() if k in VERSIONS}
    named = (plan.get("asked") or [None])[0] or ""
    if row.get("device") == "cpu" and not named.endswith(".json"):  # the machines known are of GPUs
        row["planned_images_per_second"] = None
    if state == "done":  # what did not come to its end has measured nothing to be compared
        row |= measured(log)
        planned = (log.start.get("planned") or {}).get("payload_bytes")
        sent = log.end.get("payload_bytes")
        if planned and sent:  # of a step; a few scalars that no plan counts are left out
            row["planned_payload_mb"] = sum(planned.values()) / 1e6
            row["payload_mb"] = sum(sent.get(kind, 0) for kind in planned) / 1e6
        seconds = [log.profile.get(name) for name in PROFILE]
        if all(isinstance(value, int | float) for value in seconds):
            row |= {f"profile_{k}": v for k, v in zip(PROFILE, seconds, strict=True)}
    return row


# ---------------------------------------------------------------------------------------------
# Tables


def text_of(value: Any) -> str:
    """A cell: numbers as short as they are exact enough."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_table(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """A CSV file, at once or not at all."""
    with attempts.replacing(path) as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([text_of(row.get(name)) for name in columns] for row in rows)


def cell(name: str, text: str) -> Any:
    """What a cell of a column was written from."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float) if name not in WORDS else ():
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


def read_cells(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cells) of each row of a table that a sweep wrote; ValueError where it was cut.

    A head line in between, of an appended file, holds for the rows below it.
    """
    reader, head = csv.reader(io.StringIO(attempts.read_text(path), newline="")), list[str]()
    try:
        for cells in reader:
            if cells[:1] == ["id"]:
                head = cells
            elif cells and len(cells) == len(head):
                yield reader.line_num, dict(zip(head, cells, strict=True))
            elif cells:
                raise csv.Error(f"it has {len(cells)} cells, its head line {len(head)}")
    except csv.Error as error:
        raise damaged(path, reader.line_num, str(error)) from None


def damaged(path: Path, line: int, why: str) -> ValueError:
    """The sentence for a table that nobody could have meant so."""
    return ValueError(
        f"{path}, line {line} is damaged, {why}: mend it, or move the file away and "
        "give the sweep's command again, which writes it anew"
    )


def read_table(path: Path) -> list[Row]:
    """The rows of a results.csv; ValueError, a sentence, where one is cut or junk."""
    rows = []
    for line, cells in read_cells(path):
        row = {name: cell(name, text) for name, text in cells.items()}
        for name in REQUIRED:
            if row.get(name) is None:
                raise damaged(path, line, f"{name} is missing")
        for name in (*NUMBERS, "nodes", "ranks", "world_size", "batch", "accum", "cores"):
            value = row.get(name) or 0
            if isinstance(value, str) or not math.isfinite(value) or value < 0:
                raise damaged(path, line, f"{name} is {cells[name]!r}, which is no number")
        rows.append(row)
    return rows


def published(folder: Path) -> list[Row]:
    """The rows of examples/published: where each stands is its log."""
    rows: list[Row] = []
    planned = predicted(folder) if (folder / "check.py").exists() else {}
    for name, study in (("throughput", "scaling"), ("prefetch", "options"), ("memory", "scaling")):
        table = folder / f"{name}.csv"
        with open(table, newline="") as file:
            for line, cells in enumerate(csv.DictReader(file), 2):
                if cells.get("kind", "max_allocated") == "max_reserved":
                    continue
                row = {k: cell(k, v) for k, v in cells.items()}
                row |= {"id": f"{name}.csv:{line}", "study": study, "state": "done", "run": "syn"}
                row |= {"source": folder.name, "log": f"{table}:{line}", "batch": 32}
                row |= {"world_size": row["nodes"] and 8 * row["nodes"], "memory_gib": 64.0}
                row["caveat"] = CAVEATS.get((row["mode"], row.get("group")))
                if name == "memory":
                    row["peak_allocated_gib"] = row.pop("gib")
                kind = row.get("kind") or {"throughput": "img/s"}.get(name)
                place = (row["model"], row["mode"], row.get("group"), row["nodes"], kind)
                plan = "planned_gib" if name == "memory" else "planned_images_per_second"
                row[plan] = planned.get(place)
                rows.append(row)
    return rows


def predicted(folder: Path) -> dict[tuple, float]:
    """What the folder's check.py plans for its cells: by model, mode, group, nodes and kind."""
    done = subprocess.run(
        [sys.executable, str(folder / "check.py"), "--json"], text=True, capture_output=True
    )
    if done.returncode:
        raise RuntimeError(f"{folder / 'check.py'} failed: {attempts.last_error(done.stderr)}")
    names = ("model", "mode", "group", "nodes", "kind")
    return {tuple(cell[n] for n in names): cell["planned"] for cell in json.loads(done.stdout)}


def read_folder(folder: Path) -> list[Row]:
    """All rows of a sweep's folder, or of the published data; ValueError where there are none."""
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
