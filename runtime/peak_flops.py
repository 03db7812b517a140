"""Look up the peak FLOP/s of a GPU, for the model FLOPs utilisation (MFU) in the log.

To add a device: one row of PEAK_FLOPS, which planner/machines.py reads too. Copy this one file: it
needs torch alone.
"""

import torch

# Dense bf16 peak of one device as torch numbers them, in FLOP/s, from the makers' data sheets. One
# MI250X is two devices (GCDs): 191.5e12 each (OLCF Frontier user guide), not 383e12. The first part
# that occurs in torch's name of the device counts, so longer names come before their beginnings.
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
