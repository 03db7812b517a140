"""Whether a run fits into the memory of its ranks: at its start, and when that has run out.

The arithmetic is that of planner/. A copy of the trainer without that folder runs without a plan.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runtime.peak_flops import peak_flops
from runtime.run import Run

# of PyTorch's allocators, whose errors have types of their own on a GPU only, of NCCL and cuBLAS
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|STATUS_ALLOC_FAILED")


def host_gib() -> float:
    """Return the memory of this host in GiB, or the limit of its container (cgroup v2)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return total / 2**30


def rank_memory_gib(device: torch.device, node_ranks: int) -> float:
    """Return the memory of a rank in GiB: that of its GPU, or an equal part of its host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / 2**30
    return host_gib() / node_ranks


def planned(
    run: Run, device: torch.device | None, warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """Estimate memory and traffic of a run as plan.py does; None, with a warning, if it fails.

    The plan is for the known machine that is nearest to `device`, with its own memory, or for
    Frontier if that is None or a CPU. There is no verdict for a CPU, whose memory is the host's,
    shared with the loaders, nor for a run without a model. `fit` says the verdict in a sentence.
    """
    gpu = device is None or device.type == "cuda"
    try:
        plan = _plan(run, device, rank_memory_gib(device, 1) if device and gpu else None)
        found = plan.json() | {"fit": None}
        if not gpu or run.config.run == "io":
            return found | {"verdict": None}
        found["fit"] = plan.fit
        if found["verdict"] != "FITS":
            from planner import advice

            found["fit"] += f"; {advice.what_would_fit(plan, run.config)}"
        return found
    except Exception as error:  # an estimate decides nothing: no run ends for want of it
        warn(f"no plan of memory and traffic: {type(error).__name__}: {error}")
        return None


def _plan(run: Run, device: torch.device | None, memory_gib: float | None) -> Any:
    from planner import estimate, machines, traffic

    machine = machines.nearest_machine(peak_flops(device)[0] if device else None, memory_gib)
    flags = traffic.PlannedRun.from_flags(run.model, run.record())
    return estimate.make_plan(flags, machine, memory_gib)


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that a GPU or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))


def advise_out_of_memory(run: Run, device: torch.device, node_ranks: int) -> str:
    """Say in half a sentence what the plan says of a run that ran out of memory, and would fit."""
    if run.config.run == "io":
        return "use fewer --workers or a smaller --batch"
    try:
        from planner import advice

        plan = _plan(run, device, rank_memory_gib(device, node_ranks))
        # whatever the plan says of this run, what it needs is too much
        return f"plan: {plan.fit}; {advice.what_would_fit(plan, run.config, 0.9 * plan.peak_gib)}"
    except Exception as error:  # perhaps for want of memory
        return (
            "try a smaller --batch with --accum, --ac full or --mode full_shard (no plan: "
            f"{type(error).__name__}: {error})"
        )
