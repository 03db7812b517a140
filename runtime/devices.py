"""What a device can do: peak FLOP/s, precision, memory.

To add a device: one row of PEAK_FLOPS, which planner/machines.py reads too.
"""

import os
import re
from pathlib import Path

import torch

# Dense bf16 peak, in FLOP/s, of what torch counts as one device: one MI250X is two (GCDs).
# The first key that is in torch's device name, as whole words, wins. So longer names come before
# their prefixes.
PEAK_FLOPS = {
    "MI250X": (191.5e12, "OLCF Frontier user guide, per GCD"),
    "MI300A": (980.6e12, "AMD MI300A data sheet"),
    "MI300X": (1307.4e12, "AMD MI300X data sheet"),
    "A100": (312e12, "NVIDIA A100 data sheet"),
    "H100 PCIe": (756e12, "NVIDIA H100 data sheet, PCIe"),
    "H100 NVL": (835.5e12, "NVIDIA H100 NVL data sheet"),
    "H100": (989e12, "NVIDIA H100 data sheet, SXM"),
    "H200 NVL": (835.5e12, "NVIDIA H200 data sheet, NVL"),
    "H200": (989e12, "NVIDIA H200 data sheet, SXM"),
    "GH200": (989e12, "NVIDIA GH200 data sheet"),
    "RTX 4090 D": (147.1e12, "NVIDIA Ada whitepaper, 114 of the RTX 4090's 128 multiprocessors"),
    "RTX 4090": (165.2e12, "NVIDIA Ada whitepaper, fp32 accumulation"),
    "GB200": (2500e12, "NVIDIA GB200 data sheet, half of two GPUs' 5000"),
    "B200": (2250e12, "NVIDIA DGX B200 data sheet, an eighth of 18000"),
}


def peak_flops(device: torch.device | None) -> tuple[float | None, str | None]:
    """Return the device's peak dense bf16 FLOP/s and its source; (None, None) if unknown."""
    if device and device.type == "cuda":
        name = device_name(device)
        # a laptop's GPU and an instance of MIG are slower than the whole GPU of that name
        if "Laptop" in name or " MIG " in name:
            return None, None
        for part, known in PEAK_FLOPS.items():
            if re.search(rf"\b{part}\b", name):
                return known
    return None, None


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; that of an MI250X even if ROCm does not know it.

    Without the file amdgpu.ids, as in many containers, every GPU is an "AMD Radeon Graphics".
    """
    name = torch.cuda.get_device_name(device)
    if not name.startswith("AMD Radeon Graphics"):
        return name
    found = torch.cuda.get_device_properties(device)
    architecture = getattr(found, "gcnArchName", "")  # "gfx90a:sramecc+:xnack-"
    # In this architecture only a GCD of an MI250X has 110 compute units; MI250 and MI210 have 104.
    if architecture.startswith("gfx90a") and found.multi_processor_count == 110:
        return "AMD Instinct MI250X"
    return name


def default_precision(gpu: bool) -> tuple[str, str]:
    """Return the default of --precision and why: most CPUs are slower in bf16 than in fp32.

    A Xeon with AVX512-BF16 alone is too: a step of `base` took 3.4 s, and 2.1 s in fp32.
    """
    if gpu:
        return "bf16", "a GPU is fast in it"
    flags = Path("/proc/cpuinfo")  # exists on Linux
    if flags.exists() and re.search(r"\b(amx_bf16|bf16)\b", flags.read_text()):  # x86, Arm
        return "bf16", "this CPU is fast in it"
    return "fp32", "this CPU is slow in bf16"


def rank_memory_gib(device: torch.device, node_ranks: int) -> float:
    """Return the memory of a rank in GiB: that of its GPU, or an equal part of its host's."""
    if device.type == "cuda":
        # not mem_get_info: it would make this process, perhaps a sweep, hold memory of the GPU
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / node_ranks


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that a GPU or the host has no memory left."""
    # words of PyTorch's two allocators (GPU, host), NCCL and cuBLAS; only one has an error type
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
