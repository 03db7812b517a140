"""What a device can do: peak FLOP/s, precision, memory, and whether a run fits.

To add a device: one row of PEAK_FLOPS, which planner/machines.py reads too.
"""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from runtime.run import Run  # which imports the flags, and they this file

# Dense bf16 peak of one device as torch numbers them, in FLOP/s. One MI250X is two devices (GCDs).
# The first part that occurs in torch's name of it counts: longer names before their beginnings.
PEAK_FLOPS = {
    "MI250X": (191.5e12, "OLCF Frontier user guide, per GCD"),
    "MI250": (181e12, "AMD MI250 data sheet, 362.1 per card, per GCD"),
    "MI210": (181e12, "AMD MI210 data sheet"),
    "MI300A": (980.6e12, "AMD MI300A data sheet"),
    "MI300X": (1307.4e12, "AMD MI300X data sheet"),
    "MI325X": (1307.4e12, "AMD MI325X data sheet"),
    "A100": (312e12, "NVIDIA A100 data sheet"),
    "H100 PCIe": (756e12, "NVIDIA H100 data sheet, PCIe"),
    "H100 NVL": (835.5e12, "NVIDIA H100 NVL data sheet"),
    "H100": (989e12, "NVIDIA H100 data sheet, SXM"),
    "H200": (989e12, "NVIDIA H200 data sheet, SXM"),  # GH200 too
    "RTX 4090 D": (147.1e12, "NVIDIA Ada whitepaper, 114 of the RTX 4090's 128 multiprocessors"),
    "RTX 4090": (165.2e12, "NVIDIA Ada whitepaper, fp32 accumulation"),
    "GB200": (2500e12, "NVIDIA GB200 data sheet, half of two GPUs' 5000"),
    "B200": (2250e12, "NVIDIA DGX B200 data sheet, an eighth of 18000"),
}


def peak_flops(device: torch.device) -> tuple[float | None, str]:
    """Return the device's peak dense bf16 FLOP/s and its source, or (None, reason) if unknown."""
    if device.type != "cuda":
        return None, "not known for a CPU"
    name = torch.cuda.get_device_name(device)
    for part, known in PEAK_FLOPS.items():
        if part in name and "Laptop" not in name:  # slower GPUs of the same name
            return known
    return None, f"not known for {name}"


FAST_STEP = 1e11  # FLOPs: not a second on most CPUs
PRODUCTS_SHARE = 0.5  # of the speed of large matrix products that a step reaches


def default_precision(gpu: bool) -> tuple[str, str]:
    """Return the default of --precision and why: most CPUs are slower in bf16 than in fp32.

    A Xeon with AVX512-BF16 alone is too: a step of `base` took 3.4 s, and 2.1 s in fp32.
    """
    if gpu:
        return "bf16", "a GPU has bf16 arithmetic"
    with suppress(OSError):  # not Linux
        if re.search(r"\b(amx_bf16|bf16)\b", Path("/proc/cpuinfo").read_text()):  # x86, Arm
            return "bf16", "this CPU has fast bf16 arithmetic"
    return "fp32", "this CPU has no fast bf16 arithmetic"


def cpu_step_seconds(run: "Run", device: torch.device) -> float | None:
    """Estimate the seconds of a step on this CPU by a few matrix products; None for a fast one."""
    flops = (run.flops_per_image() or 0) * run.local_batch * run.config.accum / run.config.tp
    if device.type != "cpu" or run.config.run_mode == "io" or flops < FAST_STEP:
        return None
    a = torch.ones(768, 768, dtype=run.dtype)
    a @ a  # the first is slower
    start = time.perf_counter()
    for _ in range(5):
        a @ a
    return flops * (time.perf_counter() - start) / (5 * 2 * 768**3) / PRODUCTS_SHARE


def rank_memory_gib(device: torch.device, node_ranks: int) -> float:
    """Return the memory of a rank in GiB: that of its GPU, or an equal part of its host's.

    Of a container (cgroup v2) its limit.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / 2**30
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return total / 2**30 / node_ranks


def planned(
    run: "Run", device: torch.device | None, warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """Estimate memory and traffic of a run as plan.py does; None, with a warning, if it fails.

    The plan is for the known machine nearest to `device`, Frontier for None or a CPU. `verdict` and
    `fit`, a sentence, are None for a run without a model and for a CPU, whose memory is shared.
    """
    fits = (device is None or device.type == "cuda") and run.config.run_mode != "io"
    try:
        plan, sentence = _plan(run, device, rank_memory_gib(device, 1) if device and fits else None)
        return plan.json() | ({"fit": sentence} if fits else {"fit": None, "verdict": None})
    except Exception as error:  # an estimate decides nothing: no run ends for want of it
        warn(f"no plan of memory and traffic: {type(error).__name__}: {error}")
        return None


def advise_out_of_memory(run: "Run", device: torch.device, node_ranks: int) -> str:
    """Say in half a sentence what the plan says of a run that ran out of memory, and would fit."""
    if run.config.run_mode == "io":
        return "use fewer --workers or a smaller --batch"
    try:
        return f"plan: {_plan(run, device, rank_memory_gib(device, node_ranks), ran_out=True)[1]}"
    except Exception as error:  # perhaps for want of memory
        return f"try a smaller --batch with --accum, or --ac full (no plan: {error})"


def _plan(
    run: "Run", device: torch.device | None, memory_gib: float | None, ran_out: bool = False
) -> tuple[Any, str]:
    """Return the plan of a run, and what it says in a sentence."""
    from planner import estimate, machines, traffic

    machine = machines.nearest_machine(peak_flops(device)[0] if device else None, memory_gib)
    flags = traffic.PlannedRun.from_flags(run.model, run.record())
    plan = estimate.Plan(flags, machine, memory_gib)
    return plan, estimate.describe_fit(plan, ran_out)


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that a GPU or the host has no memory left."""
    # PyTorch's allocators have a type of error of their own on a GPU only; NCCL and cuBLAS none
    words = r"out of memory|can't allocate memory|STATUS_ALLOC_FAILED"
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and bool(re.search(words, str(error))))


def device_memory(device: torch.device) -> dict[str, float | int | None]:
    """Return the peak GiB of this rank's GPU since the start, and the allocator's retries."""
    if device.type != "cuda":
        return dict.fromkeys(("peak_allocated_gib", "peak_reserved_gib", "alloc_retries"))
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }
