"""What limits each point of a sweep, in one word: input, compute, communication or memory.

Found from what was run side by side: `real` trains on images, `syn` on one batch kept on the
device, `io` reads only; one device alone sends nothing. Or from a profile in the log. Rows are
those of results.py. Needs nothing but Python.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results import PROFILE, SETTINGS, SHARDING, Row


@dataclass(frozen=True)
class Verdict:
    """What limits a point, how that was found, what to try; seconds of a step by cause."""

    word: str
    why: str
    advice: str
    compute: float | None = None
    communication: float | None = None
    input: float | None = None


ADVICE = {
    "input": "more workers (`--workers`), images on a nearer disk, fewer and larger files",
    "memory": "a smaller `--batch`, the next larger `--group`, `--ac full`",
    "compute": "not the sharding: `--compile`, `--precision bf16`, no `--ac`",
    "unknown": "measure the same with `--run syn`, and on one device",
}
HIDDEN = 1.05  # a real step may take so many times a synthetic one before its input is blamed


def seconds(row: Mapping[str, Any]) -> float:
    """Of a step."""
    return row["batch"] * (row.get("accum") or 1) * row["world_size"] / row["images_per_second"]


def devices(row: Mapping[str, Any]) -> int:
    """That work at once: the ranks, but on a CPU no more than there are cores."""
    world = row["world_size"]
    if row.get("device") == "cpu" and row.get("cores"):
        return min(world, (row.get("nodes") or 1) * row["cores"])
    return world


def key(row: Mapping[str, Any], but: Sequence[str] = ()) -> tuple:
    """What the real, syn and io runs of one setting have in common; `but` may differ too."""
    names = ("source", "host", "nodes", "ranks", "world_size", *SETTINGS)
    return tuple(row.get(name) for name in names if name not in but)


def ideal_key(row: Mapping[str, Any]) -> tuple:
    """What the points of one ideal line have in common: all but sharding and devices."""
    return key(row, (*SHARDING, "host", "nodes", "ranks", "world_size"))


def ideal_rates(rows: Iterable[Row]) -> dict[tuple, tuple[float, int]]:
    """By ideal_key, (images/s of one device, measured on how many).

    Where communication costs nothing: the fastest `syn` run on one device; else on the fewest.
    """
    found: dict[tuple, tuple[float, int]] = {}
    for row in rows:
        if row["run"] != "syn" or not row.get("images_per_second"):
            continue
        world, rate = row["world_size"], row["images_per_second"] / devices(row)
        before = found.get(ideal_key(row))
        if before is None or (-world, rate) > (-before[1], before[0]):
            found[ideal_key(row)] = (rate, world)
    return found


def verdicts(rows: Sequence[Row]) -> list[Verdict | None]:
    """One for each row that has come to a result."""
    ideal = ideal_rates(rows)
    together: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row.get("images_per_second"):
            together.setdefault(key(row), {})[row["run"]] = row
    return [
        verdict(row, together.get(key(row), {}), ideal.get(ideal_key(row)))
        if row["state"] in ("done", "out of memory", "skipped") and not row.get("kind") else None
        for row in rows
    ]  # fmt: skip


def compute_seconds(row: Row, ideal: tuple[float, int] | None) -> tuple[float | None, str]:
    """(compute of a step, where that is known from): one device, the plan, the fewest devices."""
    if ideal and ideal[1] == 1:
        rate, source = ideal[0], "one device alone"
    elif row.get("planned_compute_seconds"):
        return row["planned_compute_seconds"], "planned compute"
    elif ideal and ideal[1] < row["world_size"]:
        rate, source = ideal[0], f"on {ideal[1]} devices"
    else:
        return None, ""
    return row["batch"] * (row.get("accum") or 1) * row["world_size"] / (
        rate * devices(row)
    ), source


def verdict(row: Row, runs: Mapping[str, Row], ideal: tuple[float, int] | None) -> Verdict:
    """Of one row; `runs` are the real, syn and io runs of its setting, `ideal` of ideal_rates.

    A step is compute (what a device alone takes), communication (what `syn` takes longer) and input
    (what `real` takes longer than that); the largest is the limit. But a loader that alone is
    slower than the training alone is the limit, however much of it is hidden.
    """
    if row["state"] != "done":
        return Verdict("memory", row.get("reason") or row["state"], ADVICE["memory"])
    if row.get("alloc_retries"):
        why = f"the allocator had to start afresh {row['alloc_retries']} times"
        return Verdict("memory", why, ADVICE["memory"])
    if not row.get("images_per_second"):
        return Verdict("unknown", "too few steps were measured", ADVICE["unknown"])
    compute, source = compute_seconds(row, ideal)
    step, waited = seconds(row), row.get("data_seconds") or 0.0
    if row["run"] != "syn" and {"real", "syn", "io"} <= {*runs}:
        real, syn, io = (seconds(runs[name]) for name in ("real", "syn", "io"))
        why = f"seconds a step: real {real:.3g}, syn {syn:.3g}, io {io:.3g}"
        if io > syn and real > HIDDEN * syn:
            compute = min(compute, syn) if compute else syn
            return Verdict("input", why, ADVICE["input"], compute, syn - compute, real - syn)
        step, waited = max(real, syn), max(0.0, real - syn)
    elif all(row.get(f"profile_{name}") is not None for name in PROFILE):
        own, sent, optimizer, data, idle = (float(row[f"profile_{name}"]) for name in PROFILE)
        return largest(row, "its profile", own + optimizer + idle, sent, data)
    elif row["run"] == "io":
        return Verdict("input", "nothing else was run", ADVICE["unknown"])
    else:
        why = f"seconds a step: {row['run']} {step:.3g}"
        why += f", of that waiting for data {waited:.3g}" if waited > 0.01 * step else ""
    if compute is None:
        word = "input" if waited > step / 2 else "unknown"
        return Verdict(word, why + "; no run on one device", ADVICE[word])
    compute = min(compute, step - waited)
    why += f", {source} {compute:.3g}"
    return largest(row, why, compute, step - waited - compute, waited)


def largest(row: Row, why: str, compute: float, sent: float, waited: float) -> Verdict:
    """The verdict that the largest part speaks, all in seconds or in shares."""
    word = max((compute, "compute"), (sent, "communication"), (waited, "input"))[1]
    advice = communication_advice(row) if word == "communication" else ADVICE[word]
    return Verdict(word, why, advice, compute, sent, waited)


def communication_advice(row: Row) -> str:
    """What sends less, or less far."""
    batch = row.get("max_local_batch") or 0
    more = "a larger local batch" + (f" (by plan up to {batch})" if batch > row["batch"] else "")
    if row["mode"] in ("full_shard", "shard_grad_op"):
        return f"`--mode hybrid` with the largest `--group` that stays in a package; {more}"
    if row["mode"].startswith("hybrid") and (row.get("group") or 1) > 2:
        return f"the largest `--group` that stays in a package; {more}"
    return f"{more}, `--accum`"
