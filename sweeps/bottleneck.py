"""Find what limits each point of a sweep: input, compute, communication or memory.

Compared are the runs of one setting: `real` trains on images, `syn` on one batch kept on the
device, `io` reads only; a single rank sends nothing. Or a profile in the log decides. Rows are
those of sweeps/results.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sweeps.results import PROFILE, SETTINGS, SHARDING, Row

Ideal = tuple[float, int]  # images/s of one device, measured on so many ranks


@dataclass(frozen=True)
class Bottleneck:
    """What limits a point, how that was found, what to try; seconds per step by cause."""

    limit: str
    why: str
    advice: str
    compute: float | None = None
    communication: float | None = None
    input: float | None = None


ADVICE = {
    "input": "more workers (`--workers`), images on a nearer disk, fewer and larger files",
    "memory": "a smaller `--batch`, `--ac full`",
    "compute": "not the sharding: `--compile`, `--precision bf16`, no `--ac`",
    "unknown": "the same with `--run real`, `syn` and `io` and on one rank, or with `--profile`",
}
CPU_ADVICE = {
    "input": "images on a nearer disk, fewer and larger files",
    "memory": "a smaller `--batch`, fewer ranks: they share one memory",
    "compute": "a GPU, or a smaller `--model` or `--img-size`",
    "communication": "fewer ranks; the cost of links between GPUs can only be measured on GPUs",
    "unknown": "no more ranks than cores; " + ADVICE["unknown"],
}
ONE_RANK = "one rank alone"
HIDDEN = 1.05  # a real step may take so many times a synthetic one before its input is blamed


# ---------------------------------------------------------------------------------------------
# Which rows are compared


def images_per_step(row: Mapping[str, Any]) -> int:
    """Count the images per step of all ranks."""
    return row["batch"] * (row.get("accum") or 1) * row["world_size"] // (row.get("tp") or 1)


def step_seconds(row: Mapping[str, Any]) -> float:
    """Return the seconds per step."""
    return images_per_step(row) / row["images_per_second"]


def device_count(row: Mapping[str, Any]) -> int:
    """Count the devices that work at once: the ranks, but on a CPU at most its cores."""
    world = row["world_size"]
    if row.get("device") == "cpu" and row.get("cores"):
        return min(world, (row.get("nodes") or 1) * row["cores"])
    return world


def setting_key(row: Mapping[str, Any], but: Sequence[str] = ()) -> tuple:
    """Return what the real, syn and io runs of one setting share; columns in `but` may differ.

    It has the type of the machine, not the host: a job array runs wherever there is room.
    """
    names = ("source", "nodes", "ranks", "world_size", *SETTINGS)
    return tuple(row.get(name) for name in names if name not in but)


def ideal_key(row: Mapping[str, Any]) -> tuple:
    """Return what the points below one ideal line share: all but sharding and devices."""
    return setting_key(row, (*SHARDING, "nodes", "ranks", "world_size"))


def ideal_rates(rows: Iterable[Row]) -> dict[tuple, Ideal]:
    """Find the speed of a device without communication, by ideal_key.

    That is the fastest `syn` run on one rank; if there is none, on the fewest ranks.
    """
    found: dict[tuple, Ideal] = {}
    for row in rows:
        if row["run_mode"] != "syn" or not row.get("images_per_second") or row.get("caveat"):
            continue
        world, rate = row["world_size"], row["images_per_second"] / device_count(row)
        before = found.get(ideal_key(row))
        if before is None or (-world, rate) > (-before[1], before[0]):
            found[ideal_key(row)] = (rate, world)
    return found


def ideal_seconds(row: Row, ideal: Ideal | None) -> tuple[float | None, str]:
    """Return (seconds per step without communication, where that was measured)."""
    if not ideal or 1 < ideal[1] >= row["world_size"]:
        return None, ""
    rate, count = ideal
    source = ONE_RANK if count == 1 else f"on {count} ranks"
    return images_per_step(row) / (rate * device_count(row)), source


# ---------------------------------------------------------------------------------------------
# What limits a row


def find_bottlenecks(rows: Sequence[Row]) -> list[Bottleneck | None]:
    """Find the bottleneck of each row; None without a result, or if it may not be compared."""
    ideal = ideal_rates(rows)
    runs: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row.get("images_per_second"):
            runs.setdefault(setting_key(row), {})[row["run_mode"]] = row
    return [
        find_bottleneck(row, runs.get(setting_key(row), {}), ideal.get(ideal_key(row)))
        if row["state"] in ("done", "out of memory", "skipped")
        and not (row.get("kind") or row.get("caveat"))
        else None
        for row in rows
    ]


def find_bottleneck(row: Row, runs: Mapping[str, Row], ideal: Ideal | None) -> Bottleneck:
    """Find the bottleneck of a row; `runs` are the real, syn and io runs of its setting.

    A step is compute (what one device alone takes), communication (the rest of `syn`) and input
    (what `real` takes longer than `syn`); the largest is the limit. But a loader that alone is
    slower than training without it is the limit, however much of it is hidden. What was not
    measured stays open: ranks that share CPU cores say nothing about communication.
    """
    if row["state"] != "done":
        return bottleneck_of(row, "memory", row.get("reason") or row["state"])
    if row.get("alloc_retries"):
        why = f"the CUDA allocator had to free its cache and retry {row['alloc_retries']} times"
        return bottleneck_of(row, "memory", why)
    if not row.get("images_per_second"):
        return Bottleneck("unknown", "too few steps were measured", "more `--steps`")
    compared = row["run_mode"] != "syn" and {"real", "syn", "io"} <= {*runs}
    if not compared and all(row.get(f"profile_{name}") is not None for name in PROFILE):
        own, sent, optimizer, data, idle = (float(row[f"profile_{name}"]) for name in PROFILE)
        return largest_part(row, "its profile", own + optimizer + idle, sent, data)
    if row["run_mode"] == "io" and not compared:
        return bottleneck_of(row, "unknown", "only reading was run, and nothing to compare it with")
    step, waited = step_seconds(row), row.get("data_seconds") or 0.0
    why, slow_input = f"seconds per step: {row['run_mode']} {step:.3g}", None
    if compared:
        real, syn, io = (step_seconds(runs[name]) for name in ("real", "syn", "io"))
        why = f"seconds per step: real {real:.3g}, syn {syn:.3g}, io {io:.3g}"
        step, waited = max(real, syn), max(0.0, real - syn)
        slow_input = io > syn and real > HIDDEN * syn
    elif waited > 0.01 * step:
        why += f", of which waiting for data {waited:.3g}"

    compute, source = ideal_seconds(row, ideal)
    if row["world_size"] == 1:
        compute, source = step, ONE_RANK
    elif device_count(row) < row["world_size"]:
        compute, why = None, f"{why}; {row['world_size']} ranks share {device_count(row)} cores"
    else:
        why += f", {source} {compute:.3g}" if compute else "; no run on one rank"
    if compute is None:
        return bottleneck_of(row, "input" if slow_input or waited > step / 2 else "unknown", why)
    compute = min(compute, step - waited)
    found = largest_part(row, why, compute, step - waited - compute, waited)
    if slow_input:
        return replace(found, limit="input", advice=advice(row, "input"))
    if found.limit == "input" and slow_input is False:
        text = "fewer `--workers`: reading alone is fast enough, next to the model it lacks cores"
        return replace(found, advice=text)
    if found.limit == "compute" and source != ONE_RANK:
        return bottleneck_of(row, "unknown", f"{why}, communication included")
    return found


def largest_part(row: Row, why: str, compute: float, sent: float, waited: float) -> Bottleneck:
    """Name the largest part of a step, all three in the same unit; one rank sends nothing."""
    limit = max((compute, "compute"), (sent, "communication"), (waited, "input"))[1]
    return bottleneck_of(row, limit, why, compute, sent if row["world_size"] > 1 else None, waited)


def bottleneck_of(row: Row, limit: str, why: str, *parts: float | None) -> Bottleneck:
    """Add the advice that fits the machine and the number of ranks."""
    return Bottleneck(limit, why, advice(row, limit), *parts)


def advice(row: Row, limit: str) -> str:
    """Say what to try next."""
    if row.get("device") == "cpu":
        return CPU_ADVICE[limit]
    if limit == "memory" and (row.get("world_size") or 1) > 1:
        return f"{ADVICE[limit]}, sharding over more ranks (`--group`, `--mode full_shard`)"
    if limit != "communication":
        return ADVICE[limit]
    batch = row.get("max_local_batch") or 0
    more = "a larger local batch" + (f" (planned: up to {batch})" if batch > row["batch"] else "")
    more += ", or `--accum`"
    if row["mode"] in ("ddp", "zero1", "no_shard"):
        return more
    if (row.get("nodes") or 1) > 1:
        return f"`--mode hybrid` with the smallest `--group` that fits, within a node; {more}"
    return f"`--mode ddp` if one rank has the memory; {more}"
