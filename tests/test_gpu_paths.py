"""What a GPU will do, counted on a CPU: fake tensors on a cuda device, a profiler, mocked names."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import vit
from planner.machines import MACHINES
from planner.memory import block_memory
from planner.traffic import PlannedRun, model_units

CPU = torch.device("cpu")
SMALL = vit.ViTConfig(64, 2, 256, 4, 8, decoder_width=64, decoder_depth=2, decoder_heads=4)


@pytest.fixture
def cuda_autocast():
    """Autocast to bf16 of a GPU that is not there: `torch.autocast` would refuse."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


class NormDtypes(TorchDispatchMode):
    """Collect the dtypes of what layer norms read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_layer_norm.default:
            self.found.append({a.dtype for a in args if isinstance(a, Tensor)})
        return func(*args, **(kwargs or {}))


# --- norms


def test_autocast_on_a_gpu_keeps_norms_in_bf16(cuda_autocast):
    """A bf16 GPU kernel, whose input is saved as it is: no fp32 copy of a token anywhere."""
    saved: list[Tensor] = []
    batch, tokens, width = 2, 10, 64

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with FakeTensorMode(), NormDtypes() as norms:
        with torch.device("cuda"):
            block = vit.Block(width, 4, 256)
            x = torch.empty(batch, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            x = x + block.mlp(block.norm2(x + block.norm1(x)))  # without attention's own copies
    assert norms.found == [{torch.bfloat16}] * 2 and x.dtype == torch.bfloat16
    fp32 = [t.shape for t in saved if t.dtype == torch.float32 and t.numel() > batch * tokens]
    assert fp32 == []


def test_norms_are_pytorchs_in_fp32_and_fsdps_in_bf16():
    """The values are those of nn.LayerNorm; of bf16 tokens, with its weights in bf16."""
    torch.manual_seed(0)
    mine, theirs = vit.LayerNorm(64, eps=1e-6), torch.nn.LayerNorm(64, eps=1e-6)
    for p in mine.parameters():
        torch.nn.init.normal_(p)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(3, 5, 64)
    assert torch.equal(mine(x), theirs(x))
    low = x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = mine(low)
    assert found.dtype == torch.bfloat16 and torch.equal(found, theirs.bfloat16()(low))


def test_the_plan_counts_no_fp32_copies_for_autocast():
    def saved(mode: str) -> int:
        run = PlannedRun(SMALL, mode, 1, 8, 64, 0.75)
        return block_memory(run, model_units(SMALL, False)[1], MACHINES["dgx-h100"]).saved

    assert saved("ddp") == saved("full_shard")


# --- attention


def test_attention_copies_no_gradient_in_backward():
    """Beyond the one that joins the gradients of q, k and v for the product that made them."""
    attention = vit.Attention(64, 4)
    attention.always_fused = True
    x = torch.randn(2, 10, 64, requires_grad=True)
    grad = torch.randn(2, 10, 64)
    loss = (attention(x) * grad).sum()
    with profile() as profiler:
        loss.backward()
    calls: Counter[str] = Counter()
    event: Any
    for event in profiler.events():
        calls[event.name] += 1
    assert calls["aten::cat"] + calls["aten::stack"] <= 2 and calls["aten::clone"] == 0
