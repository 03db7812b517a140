"""What a device can do: peak FLOP/s, precision, memory, and whether a run fits.

To add a device: one row of PEAK_FLOPS, which planner/machines.py reads too.
"""

import os
import re
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from runtime.run import Run  # which imports the flags, and they this file

# Dense bf16 peak of one device as torch numbers them, in FLOP/s. One MI250X is two devices (GCDs).
# The first part that occurs in torch's name of it counts: longer names before their beginnings.
PEAK_FLOPS = {
    "MI250X": (191.5e12, "OLCF Frontier user guide, per GCD"),
    "MI300A": (980.6e12, "AMD MI300A data sheet"),
    "MI300X": (1307.4e12, "AMD MI300X data sheet"),
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


def peak_flops(device: torch.device | None) -> tuple[float | None, str | None]:
    """Return the device's peak dense bf16 FLOP/s and its source, or twice None if unknown."""
    if device and device.type == "cuda":
        name = device_name(device)
        # slower than the whole GPU of the name: one in a laptop, and an instance of MIG
        if "Laptop" in name or " MIG " in name:
            return None, None
        for part, known in PEAK_FLOPS.items():
            if part in name:
                return known
    return None, None


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; of an MI250X also where ROCm does not know it.

    Without the file amdgpu.ids, as in many containers, every GPU is an "AMD Radeon Graphics".
    """
    name = torch.cuda.get_device_name(device)
    if not name.startswith("AMD Radeon Graphics"):
        return name
    found = torch.cuda.get_device_properties(device)
    architecture = getattr(found, "gcnArchName", "")  # "gfx90a:sramecc+:xnack-"
    # of this architecture only the GCD of an MI250X has 110 compute units: MI250 and MI210 have 104
    if architecture.startswith("gfx90a") and found.multi_processor_count == 110:
        return "AMD Instinct MI250X"
    return name


def default_precision(gpu: bool) -> tuple[str, str]:
    """Return the default of --precision and why: most CPUs are slower in bf16 than in fp32.

    A Xeon with AVX512-BF16 alone is too: a step of `base` took 3.4 s, and 2.1 s in fp32.
    """
    if gpu:
        return "bf16", "a GPU is fast in it"
    flags = Path("/proc/cpuinfo")  # of Linux
    if flags.exists() and re.search(r"\b(amx_bf16|bf16)\b", flags.read_text()):  # x86, Arm
        return "bf16", "this CPU is fast in it"
    return "fp32", "this CPU is slow in bf16"


def cpu_step_seconds(run: "Run", device: torch.device | None) -> float | None:
    """Estimate the seconds of a step on a CPU: twice what its matrix products would take."""
    if device is None or device.type != "cpu" or run.config.run_mode == "io":
        return None
    flops = (run.flops_per_image() or 0) * run.local_batch * run.config.accum / run.config.tp
    a = torch.ones(768, 768, dtype=run.dtype)
    seconds = min(timeit.repeat(lambda: a @ a, number=3, repeat=2)) / 3
    return 2 * seconds * flops / (2 * 768**3)


def rank_memory_gib(device: torch.device, node_ranks: int) -> float:
    """Return the memory of a rank in GiB: that of its GPU, or an equal part of its host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / node_ranks


def planned(
    run: "Run", device: torch.device | None, warn: Callable[[str], None], ran_out: bool = False
) -> dict[str, Any] | None:
    """Plan a run as plan.py does; None without a model and, with a warning, if it fails.

    The plan is for the known machine nearest to `device`, Frontier for None. `fit` says in a
    sentence what it says, and what would fit, if it does not or `ran_out` of memory. `verdict` is
    None for a CPU, whose memory other programs use too.
    """
    if run.config.run_mode == "io":
        return None
    try:
        from planner import estimate, machines, traffic

        gib = rank_memory_gib(device, run.node_ranks) if device else None
        machine = machines.nearest_machine(peak_flops(device)[0], gib)
        flags = traffic.PlannedRun.from_flags(run.model, run.record())
        plan = estimate.Plan(flags, machine, gib)
        fit = estimate.describe_fit(plan, bool(run.config.global_batch), ran_out)
        found = plan.json() | {"fit": fit}
    except Exception as error:  # an estimate decides nothing: no run ends for want of it
        warn(f"no plan of memory and traffic: {type(error).__name__}: {error}")
        return None
    return found if device is None or device.type == "cuda" else found | {"verdict": None}


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that a GPU or the host has no memory left."""
    # of PyTorch's allocators for a GPU and the host, NCCL and cuBLAS: only one has its own type
    words = r"out of memory|can't allocate memory|STATUS_ALLOC_FAILED"
    return isinstance(error, MemoryError) or bool(re.search(words, str(error)))


def device_memory(device: torch.device) -> dict[str, float | int | None]:
    """Return the peak GiB of this rank's GPU since the start, and the allocator's retries."""
    if device.type != "cuda":
        return dict.fromkeys(("peak_allocated_gib", "peak_reserved_gib", "alloc_retries"))
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }
