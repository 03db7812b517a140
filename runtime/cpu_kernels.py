"""Which kernel computes a product or an attention, where PyTorch's own choice is a slow one.

On a GPU nothing is changed: cuBLAS and PyTorch's fused attention are the fast ones there, and this
file only says which of the fused kernels attention gets (`attention_kernel`). On a CPU two choices
are made otherwise (measured by benchmarks/step.py; AMD EPYC Zen 5, two cores, torch 2.15):

- fp32 products: PyTorch sends them to MKL, which does not use all of an AMD core. oneDNN, in the
  same PyTorch, does, and is on par elsewhere: 190 against 400 GFLOP/s.
- attention of few tokens: two plain products and a softmax, 1.5 and 11 ms instead of 8 and 35 of
  the fused kernel in bf16 (50 and 197 tokens), 2.7 instead of 5.6 ms in fp32 (50).

`Linear` and `attention` take the place of nn.Linear and F.scaled_dot_product_attention in a model;
they compute the same, and fall back to them wherever a choice does not apply. Copy this one file:
it needs torch alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

# Up to so many tokens plain attention is faster on a CPU; above, the scores leave the caches.
PLAIN_TOKENS = {torch.bfloat16: 320, torch.float32: 100}
# PyTorch has MKL, and oneDNN to go past it; asked once, because torch.compile cannot ask.
ONEDNN = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
PLAIN = (Tensor, nn.Parameter)  # not DTensor, not fake tensors: they have their own rules

# ---------------------------------------------------------------------------------------------
# Products


class Linear(nn.Linear):
    """nn.Linear, by oneDNN where it would be MKL's: (..., D) -> (..., D')."""

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weight, self.bias
        if x.is_cpu and x.dtype == w.dtype == torch.float32 and _by_onednn(x, w):
            return _Product.apply(x, w, b)  # type: ignore[no-any-return]
        return F.linear(x, w, b)


def _by_onednn(x: Tensor, w: Tensor) -> bool:
    """Whether fp32 products go past MKL: it is there, and they are to stay fp32."""
    return type(w) in PLAIN and type(x) in PLAIN and ONEDNN and not torch.is_autocast_enabled("cpu")


def _product(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x w^T + b: (R, D), (D', D), (D',) -> (R, D'), fp32 on a CPU."""
    if torch.compiler.is_compiling():
        return product_op(x, w, b)
    return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")  # type: ignore[no-any-return]


# torch.compile has a rule of its own for oneDNN's operator, which takes constant weights only;
# behind another name it is called as it is.
@torch.library.custom_op("vit_mae::product", mutates_args=())
def product_op(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """`_product` as one operator."""
    return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")  # type: ignore[no-any-return]


@product_op.register_fake
def _shape_of_product(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])  # (R, D')


class _Product(torch.autograd.Function):
    """The same with its gradients; oneDNN's operator has none of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        y = _product(x.reshape(-1, x.shape[-1]), w, b)  # (B T, D')
        # As F.linear: not a view to autograd, or FSDP2 warns of what is done to views in place.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], w.shape[0]])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, w = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1])  # (B T, D')
        dx = _product(rows, w.t()).view_as(x) if ctx.needs_input_grad[0] else None
        return dx, _product(rows.t(), x.reshape(-1, x.shape[-1]).t()), rows.sum(0)


# ---------------------------------------------------------------------------------------------
# Attention


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(E)) v, 3 x (B, N, T, E) -> (B, N, T, E)."""
    if q.is_cpu and q.shape[-2] <= PLAIN_TOKENS.get(q.dtype, 0):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, N, T, T)
        return scores.softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


def attention_kernel(
    heads: int, head_dim: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> str:
    """What computes `attention` in training: plain, or the name of PyTorch's kernel, in lower case.

    PyTorch is asked with tensors of that shape. "math" stands for no fused kernel at all: slow and,
    with its T x T scores kept for backward, large.
    """
    shape = (1, heads, tokens, head_dim)
    q = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    if q.is_cpu and tokens <= PLAIN_TOKENS.get(dtype, 0):
        return "plain"
    return SDPBackend(torch._fused_sdp_choice(q, q, q)).name.lower().removesuffix("_attention")
