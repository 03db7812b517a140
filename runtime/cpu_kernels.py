"""Replace the slow matrix products and attention of a model on a CPU; name the attention kernel.

PyTorch's own choices are the fast ones on a GPU. On a CPU two are not (measured on two cores with
torch 2.15):

- fp32 matrix products go to MKL, which does not use all of an AMD core; oneDNN, in the same
  PyTorch, does: 190 against 400 GFLOP/s on an EPYC, Zen 5. On an Intel Xeon MKL is the faster: with
  oneDNN a training step of `tiny` or `base` takes 1.2 times as long.
- fused attention is slow for few tokens. On the EPYC two matrix products and a softmax take 1.5 and
  11 ms instead of 8 and 35 in bf16 (50 and 197 tokens), 2.7 instead of 5.6 ms in fp32 (50 tokens).
  On the Xeon a step in bf16 is 1.4 (`base`, batch 8) to 1.9 times as fast (`tiny`, 96 pixels).

`apply_to` edits a finished model from outside; what it computes stays the same. Copy this one file:
it needs torch alone.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

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
