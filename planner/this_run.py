"""Plan a run that is starting: for its log, for --dry-run, and for advice if memory runs out."""

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
    """Plan a run as plan.py does, from its resolved flags (`Run.record`).

    The machine is the one of --machine, or else the known one nearest to `device`, or Frontier if
    `device` is None. A rank's memory is that of its GPU; on a CPU it is the host's, divided by
    `node_ranks`; without a device it is the machine's.

    Returns the numbers of `Plan.json`, and under `fit` a sentence: whether the run fits, and what
    would fit if it does not, or if it `ran_out` of memory. `by_global_batch` tells whether the run
    has --global-batch rather than --batch. `verdict` is None for a CPU, because other programs use
    its memory too.
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
