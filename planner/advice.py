"""What would fit where a run does not: changes of its flags, each planned before it is named.

None of them changes the global batch, so that a run may be resumed with any of them.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mesh
import shard
from planner.estimate import Plan, group_sizes, make_plan
from runtime.config import Config

CHECKPOINTING = ("none", "selective", "full")  # --ac, in the order of what it saves
Change = tuple[str, dict[str, Any]]  # (flags, the fields of PlannedRun that they set)


def describe_fit(plan: Plan, config: Config, ran_out: bool = False) -> str:
    """Say in a sentence what a plan says of a run, and what would fit if that does not.

    What has run out of memory needs too much whatever the plan says.
    """
    if plan.verdict == "FITS" and not ran_out:
        return plan.fit
    most = 0.9 * plan.peak_gib if ran_out else math.inf
    return f"{plan.fit}; {what_would_fit(plan, config, most)}"


def what_would_fit(plan: Plan, config: Config, most_gib: float = math.inf) -> str:
    """Name the smallest change of each kind after which the plan says FITS, in half a sentence.

    `config` is that of the run, `most_gib` a limit for the peak. Where no change is enough by
    itself, all are made at once.
    """
    run = plan.run

    def fits(fields: dict[str, Any]) -> bool:
        other = make_plan(replace(run, **fields), plan.machine, plan.memory_gib)
        return other.verdict == "FITS" and other.peak_gib <= most_gib

    kinds = [list(kind(plan, config)) for kind in (smaller_batches, checkpointing, wider_groups)]
    found = [next((flags for flags, fields in kind if fits(fields)), None) for kind in kinds]
    if any(found):
        return "what would fit: " + ", or ".join(flags for flags in found if flags)
    batches, *rest = kinds
    most = [kind[-1] for kind in rest if kind]
    for batch in [[], *([batch] for batch in batches)]:
        changes = [*batch, *most]
        if fits({key: value for _, fields in changes for key, value in fields.items()}):
            return "what would fit: " + " ".join(flags for flags, _ in changes)
    return (
        f"no --batch, --ac or --mode fits on {run.world_size} ranks: use more ranks, or a smaller "
        "--model or --img-size"
    )


def smaller_batches(plan: Plan, config: Config) -> Iterator[Change]:
    """Yield smaller local batches with more accumulation steps, the largest first."""
    images = plan.run.batch * plan.run.accum
    for batch in reversed([n for n in mesh.divisors(images) if n < plan.run.batch]):
        accum = images // batch
        flags = f"--accum {accum}" if config.global_batch else f"--batch {batch} --accum {accum}"
        yield flags, {"batch": batch, "accum": accum}


def checkpointing(plan: Plan, config: Config) -> Iterator[Change]:
    """Yield the choices of --ac that save more activations."""
    for ac in CHECKPOINTING[CHECKPOINTING.index(plan.run.ac) + 1 :]:
        yield f"--ac {ac}", {"ac": ac}


def wider_groups(plan: Plan, config: Config) -> Iterator[Change]:
    """Yield modes that shard more, the smallest shard group first."""
    run, row = plan.run, shard.STRATEGIES[str(config.mode)]
    grouped = row.group == "group"
    if run.data_ranks == 1 or (row.group == "world" and row.reshard):
        return
    without = " (without --bucket-cap-mb)" if config.bucket_cap_mb else ""
    groups = [g for g in group_sizes(run, plan.machine) if g > run.shard]
    if grouped:  # --group stays on the command line
        groups = [*([] if row.reshard else [run.shard]), *groups]
        groups += [run.data_ranks] if run.shard < run.data_ranks else []
    for group in groups:
        flags = "--mode hybrid " * (not (grouped and row.reshard)) + f"--group {group}"
        yield flags + without, {"mode": "hybrid", "group": group, "bucket_cap_mb": None}
    if not grouped:
        fields = {"mode": "full_shard", "group": None, "bucket_cap_mb": None}
        yield f"--mode full_shard{without}", fields
