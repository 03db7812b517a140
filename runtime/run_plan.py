"""The plan of a run, for its log, and beside what was measured. Does without planner/."""

from collections.abc import Callable
from typing import Any

import torch

from runtime.run import Run


def plan_run(
    run: Run, device: torch.device | None, warn: Callable[[str], None], ran_out: bool = False
) -> dict[str, Any] | None:
    """Plan a run, as of `plan_this_run`; None without a model and, with a warning, if it fails."""
    if run.config.run_mode == "io":
        return None
    try:
        from planner.this_run import plan_this_run

        return plan_this_run(
            run.model,
            run.record(),
            device,
            run.node_ranks,
            by_global_batch=run.config.global_batch is not None,
            ran_out=ran_out,
        )
    except Exception as error:  # an estimate decides nothing: no run ends for want of it
        warn(f"no plan of memory and traffic: {type(error).__name__}: {error}")
        return None


def beside_plan(
    planned: dict[str, Any], step_seconds: float, peak_gib: float | None
) -> tuple[str, dict[str, float]]:
    """Set a run's median step and peak memory beside its plan -> a sentence, values for the log.

    `peak_gib` is None on a CPU, whose memory is not measured.
    """
    seconds = planned["seconds"]["step"]
    values = {"step_seconds": step_seconds, "planned_step_seconds": seconds}
    text = f"step {step_seconds:.3g} s, planned {seconds:.3g} s ({step_seconds / seconds - 1:+.0%})"
    if peak_gib is not None:
        gib = planned["memory_gib"]["peak"]
        values["planned_peak_gib"] = gib
        text += f"; peak {peak_gib:.2f} GiB, planned {gib:.2f} GiB ({peak_gib / gib - 1:+.0%})"
    return f"measured beside the plan for {planned['machine']}: {text}", values
