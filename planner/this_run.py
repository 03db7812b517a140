"""The plan of a run that is starting: for its log, the dry run, and advice when memory ran out."""

from collections.abc import Mapping
from typing import Any

import torch

import vit
from planner.estimate import Plan, describe_fit
from planner.machines import nearest_machine, read_machine
from planner.traffic import PlannedRun
from runtime import devices


def plan_this_run(
    model: vit.ViTConfig,
    flags: Mapping[str, Any],
    device: torch.device | None,
    node_ranks: int,
    *,
    by_global_batch: bool,
    ran_out: bool,
) -> dict[str, Any]:
    """Plan a run as plan.py does, by its resolved flags (`Run.record`).

    The machine is that of --machine, otherwise the known one nearest to `device`, Frontier for a
    device of None. Memory is that of the device, or an equal part of its host's for each of
    `node_ranks`; the machine's for None. Returns the numbers of `Plan.json` and `fit`: a sentence
    that says whether it fits, and what would fit if it does not or `ran_out` of memory, for a run
    with --global-batch (`by_global_batch`) or with --batch. `verdict` is None for a CPU, whose
    memory other programs use too.
    """
    gib = None
    if device:
        gib = devices.rank_memory_gib(device, node_ranks)
    if flags.get("machine"):
        machine = read_machine(flags["machine"])
    else:
        peak, _ = devices.peak_flops(device)
        machine = nearest_machine(peak, gib)
    plan = Plan(PlannedRun.from_flags(model, flags), machine, gib)
    found = plan.json()
    found["fit"] = describe_fit(plan, by_global_batch, ran_out)
    if device and device.type != "cuda":
        found["verdict"] = None
    return found
