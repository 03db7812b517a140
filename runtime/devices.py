"""What a device can do: peak FLOP/s, memory, power, the kernels of a CPU, whether a run fits.

To add a device: one row of PEAK_FLOPS, which planner/machines.py reads too. Copy this one file: it
needs torch alone.
"""

import os
import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from runtime.run import Run

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


# Up to this many tokens plain attention is faster on a CPU; above, the scores leave the caches.
PLAIN_TOKENS = {torch.bfloat16: 320, torch.float32: 100}

PLAIN_TYPES = (Tensor, nn.Parameter)  # not DTensor, not fake tensors: they have their own rules


@cache
def prefers_onednn() -> bool:
    """Tell whether there is MKL to avoid and oneDNN to use: on a CPU of AMD's, by its vendor id."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        vendor = Path("/proc/cpuinfo").read_text()
    except OSError:  # Windows
        vendor = platform.processor()
    return "AuthenticAMD" in vendor


def apply_to(model: nn.Module) -> None:
    """Give a model the CPU kernels of this file, in place: those that are faster on this machine.

    Attention is replaced in every module with an attribute `attend` (vit.Attention). Names and
    values of parameters do not change. Works on the meta device too; before sharding.
    """
    for module in model.modules():
        if prefers_onednn() and type(module) is nn.Linear:
            module.__class__ = OneDNNLinear
        if hasattr(module, "attend"):
            module.attend = cpu_attention  # type: ignore[assignment]


# ---------------------------------------------------------------------------------------------
# Matrix products


class OneDNNLinear(nn.Linear):
    """nn.Linear, computed by oneDNN where PyTorch would use MKL: (..., D) -> (..., D')."""

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weight, self.bias
        fp32 = x.dtype == w.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if fp32 and x.is_cpu and type(w) in PLAIN_TYPES and type(x) in PLAIN_TYPES:
            return _LinearFunction.apply(x, w, b)  # type: ignore[no-any-return]
        return F.linear(x, w, b)


def _matmul(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x w^T + b: (R, D), (D', D), (D',) -> (R, D'), fp32."""
    if torch.compiler.is_compiling():
        return linear_op(x, w, b)
    return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")  # type: ignore[no-any-return]


# torch.compile has a rule for oneDNN's operator that takes constant weights only; under another
# name the operator is called as it is.
@torch.library.custom_op("vit_mae::linear", mutates_args=())
def linear_op(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """`_matmul` as one operator."""
    return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")  # type: ignore[no-any-return]


@linear_op.register_fake
def _linear_shape(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])  # (R, D')


class _LinearFunction(torch.autograd.Function):
    """F.linear with its gradients; oneDNN's operator has none of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        y = _matmul(x.reshape(-1, x.shape[-1]), w, b)  # (B T, D')
        # As F.linear: not a view to autograd, or FSDP2 warns about views modified in place.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], w.shape[0]])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1])  # (B T, D')
        need_x, need_w, need_b = ctx.needs_input_grad
        dx = _matmul(rows, w.t()).view_as(x) if need_x else None
        dw = _matmul(rows.t(), x.reshape(-1, x.shape[-1]).t()) if need_w else None
        return dx, dw, rows.sum(0) if need_b else None


# ---------------------------------------------------------------------------------------------
# Attention


def cpu_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(E)) v, 3 x (B, N, T, E) -> (B, N, T, E)."""
    if q.is_cpu and q.shape[-2] <= PLAIN_TOKENS.get(q.dtype, 0):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, N, T, T)
        return scores.softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


def attention_kernel(
    heads: int, head_dim: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Name the kernel that computes attention in training: `plain`, or PyTorch's in lower case.

    "math" means that there is no fused kernel: slow, and it keeps T x T scores for backward.
    """
    shape = (1, heads, tokens, head_dim)
    q = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    if q.is_cpu and tokens <= PLAIN_TOKENS.get(dtype, 0):
        return "plain"
    # PyTorch decides by shape, dtype and device of the tensors, and by requires_grad.
    return SDPBackend(torch._fused_sdp_choice(q, q, q)).name.lower().removesuffix("_attention")


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


def device_memory(device: torch.device) -> dict[str, float | int | None]:
    """Return the peak GiB of this rank's GPU since the start, and the allocator's retries."""
    names = ("peak_allocated_gib", "peak_reserved_gib", "alloc_retries")
    if device.type != "cuda":
        return dict.fromkeys(names)
    stats = torch.cuda.memory_stats(device)
    allocated = stats.get("allocated_bytes.all.peak", 0) / 2**30
    reserved = stats.get("reserved_bytes.all.peak", 0) / 2**30
    return dict(zip(names, (allocated, reserved, stats.get("num_alloc_retries", 0)), strict=True))


def device_power(device: torch.device) -> dict[str, float]:
    """Return the watts that this rank's GPU draws, by its driver; {} where torch cannot read them.

    Of both halves of an MI250X at once, by one of them.
    """
    if device.type != "cuda":
        return {}
    try:
        draw = torch.cuda.power_draw(device)
    except Exception:  # no pynvml or amdsmi, or a driver that refuses: errors of many types
        return {}
    # NVIDIA: milliwatts; ROCm: watts so far (pytorch#197553), and no GPU draws 5 W, or 5 kW
    watts = draw if torch.version.hip and draw < 5000 else draw / 1000
    return {"power_watts": watts} if watts else {}
