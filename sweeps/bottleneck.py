"""What limits each point of a sweep, in one word: input, compute, communication or memory.

Found from what was run side by side: `real` trains on images, `syn` on one batch kept on the
device, `io` reads only; one device alone sends nothing. Or from a profile in the log. Rows are
those of sweeps/results.py. Needs nothing but Python.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sweeps.results import PROFILE, SETTINGS, SHARDING, Row


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
    "memory": "a smaller `--batch`, `--ac full`",
    "compute": "not the sharding: `--compile`, `--precision bf16`, no `--ac`",
    "unknown": "the same with `--run real`, `syn` and `io` and on one rank, or with `--profile`",
}
CPU_ADVICE = {
    "input": "images on a nearer disk, fewer and larger files",
    "memory": "a smaller `--batch`, fewer ranks: they share one memory",
    "compute": "a GPU, or a smaller `--model` or `--img-size`",
    "communication": "fewer ranks; what the links between GPUs cost, only GPUs can tell",
    "unknown": "no more ranks than cores; " + ADVICE["unknown"],
}
ALONE = "one rank alone"
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
    """What the real, syn and io runs of one setting have in common; `but` may differ too.

    The type of the machine, not the host: the tasks of a job array run wherever there is room.
    """
    names = ("source", "nodes", "ranks", "world_size", *SETTINGS)
    return tuple(row.get(name) for name in names if name not in but)


def ideal_key(row: Mapping[str, Any]) -> tuple:
    """What the points of one ideal line have in common: all but sharding and devices."""
    return key(row, (*SHARDING, "nodes", "ranks", "world_size"))


def ideal_rates(rows: Iterable[Row]) -> dict[tuple, tuple[float, int]]:
    """By ideal_key, (images/s of one device, measured on how many).

    Where communication costs nothing: the fastest `syn` run on one device; else on the fewest.
    """
    found: dict[tuple, tuple[float, int]] = {}
    for row in rows:
        if row["run"] != "syn" or not row.get("images_per_second") or row.get("caveat"):
            continue
        world, rate = row["world_size"], row["images_per_second"] / devices(row)
        before = found.get(ideal_key(row))
        if before is None or (-world, rate) > (-before[1], before[0]):
            found[ideal_key(row)] = (rate, world)
    return found


def verdicts(rows: Sequence[Row]) -> list[Verdict | None]:
    """One for each row that has come to a result; none for what may not be compared."""
    ideal = ideal_rates(rows)
    together: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row.get("images_per_second"):
            together.setdefault(key(row), {})[row["run"]] = row
    return [
        verdict(row, together.get(key(row), {}), ideal.get(ideal_key(row)))
        if row["state"] in ("done", "out of memory", "skipped")
        and not (row.get("kind") or row.get("caveat"))
        else None
        for row in rows
    ]


def compute_seconds(row: Row, ideal: tuple[float, int] | None) -> tuple[float | None, str]:
    """(compute of a step, where that was measured): on one device, else on the fewest."""
    if not ideal or 1 < ideal[1] >= row["world_size"]:
        return None, ""
    rate, count = ideal
    source = ALONE if count == 1 else f"on {count} ranks"
    images = row["batch"] * (row.get("accum") or 1) * row["world_size"]
    return images / (rate * devices(row)), source


def verdict(row: Row, runs: Mapping[str, Row], ideal: tuple[float, int] | None) -> Verdict:
    """Of one row; `runs` are the real, syn and io runs of its setting, `ideal` of ideal_rates.

    A step is compute (what a device alone takes), communication (what `syn` takes longer) and input
    (what `real` takes longer than that); the largest is the limit. But a loader that alone is
    slower than the training alone is the limit, however much of it is hidden. What was not measured
    is left open: ranks that share the cores of a CPU say nothing of compute and communication.
    """
    if row["state"] != "done":
        return limit_of(row, "memory", row.get("reason") or row["state"])
    if row.get("alloc_retries"):
        why = f"the CUDA allocator had to free its cache and retry {row['alloc_retries']} times"
        return limit_of(row, "memory", why)
    if not row.get("images_per_second"):
        return Verdict("unknown", "too few steps were measured", "more `--steps`")
    compared = row["run"] != "syn" and {"real", "syn", "io"} <= {*runs}
    if not compared and all(row.get(f"profile_{name}") is not None for name in PROFILE):
        own, sent, optimizer, data, idle = (float(row[f"profile_{name}"]) for name in PROFILE)
        return largest(row, "its profile", own + optimizer + idle, sent, data)
    if row["run"] == "io" and not compared:
        return limit_of(row, "unknown", "reading alone was run, and nothing to compare it with")
    step, waited = seconds(row), row.get("data_seconds") or 0.0
    why, slow = f"seconds per step: {row['run']} {step:.3g}", None
    if compared:
        real, syn, io = (seconds(runs[name]) for name in ("real", "syn", "io"))
        why = f"seconds per step: real {real:.3g}, syn {syn:.3g}, io {io:.3g}"
        step, waited = max(real, syn), max(0.0, real - syn)
        slow = io > syn and real > HIDDEN * syn
    elif waited > 0.01 * step:
        why += f", of that waiting for data {waited:.3g}"
    return divided(row, why, step, waited, slow, ideal)


def divided(
    row: Row,
    why: str,
    step: float,
    waited: float,
    slow: bool | None,
    ideal: tuple[float, int] | None,
) -> Verdict:
    """The verdict on a step of which `waited` was for input; `slow`: reading alone takes longer."""
    compute, source = compute_seconds(row, ideal)
    if row["world_size"] == 1:
        compute, source = step, ALONE  # sends nothing
    elif devices(row) < row["world_size"]:
        compute, why = None, f"{why}; {row['world_size']} ranks share {devices(row)} cores"
    else:
        why += f", {source} {compute:.3g}" if compute else "; no run on one rank"
    if compute is None:
        return limit_of(row, "input" if slow or waited > step / 2 else "unknown", why)
    compute = min(compute, step - waited)
    found = largest(row, why, compute, step - waited - compute, waited)
    if slow:
        return replace(found, word="input", advice=advice(row, "input"))
    if found.word == "input" and slow is False:
        return replace(
            found,
            advice="fewer `--workers`: reading alone keeps up, beside the model it lacks cores",
        )
    if found.word == "compute" and source != ALONE:
        return limit_of(row, "unknown", f"{why}, communication included")
    return found


def largest(row: Row, why: str, compute: float, sent: float, waited: float) -> Verdict:
    """The verdict for the largest part, all in seconds or in shares; one rank sends nothing."""
    word = max((compute, "compute"), (sent, "communication"), (waited, "input"))[1]
    return limit_of(row, word, why, compute, sent if row["world_size"] > 1 else None, waited)


def limit_of(row: Row, word: str, why: str, *parts: float | None) -> Verdict:
    """A verdict with the advice that fits the machine and its ranks; `parts` as in Verdict."""
    return Verdict(word, why, advice(row, word), *parts)


def advice(row: Row, word: str) -> str:
    """What to try next."""
    if row.get("device") == "cpu":
        return CPU_ADVICE[word]
    if word == "memory" and (row.get("world_size") or 1) > 1:
        return f"{ADVICE[word]}, sharding over more ranks (`--group`, `--mode full_shard`)"
    if word != "communication":
        return ADVICE[word]
    batch = row.get("max_local_batch") or 0  # of a GPU: what sends less, or less far
    more = "a larger local batch" + (f" (by plan up to {batch})" if batch > row["batch"] else "")
    more += ", or `--accum`"
    if row["mode"] in ("ddp", "zero1", "no_shard"):
        return more
    if (row.get("nodes") or 1) > 1:
        return f"`--mode hybrid` with the smallest `--group` that fits, within a node; {more}"
    return f"`--mode ddp` if one rank has the memory; {more}"
