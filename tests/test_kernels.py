"""runtime/devices.py: the same numbers as PyTorch's own kernels, by other kernels."""

import collections
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import vit
from runtime import devices

CPU = torch.device("cpu")
HAS_ONEDNN = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


@pytest.fixture(autouse=True)
def as_on_amd(monkeypatch):
    """Whatever CPU the tests run on, oneDNN's products are tested."""
    monkeypatch.setattr(devices, "prefers_onednn", lambda: HAS_ONEDNN)


def with_kernels(model: nn.Module) -> nn.Module:
    devices.apply_to(model)
    return model


class Ops(TorchDispatchMode):
    """Counts what is executed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not HAS_ONEDNN, reason="this PyTorch has not both MKL and oneDNN")
@pytest.mark.parametrize("first", [False, True])
def test_fp32_products_go_to_onednn_and_give_the_same(first):
    """`first`: the input needs no gradient, as that of a first layer."""
    torch.manual_seed(0)
    theirs = nn.Linear(48, 20)
    mine = with_kernels(copy.deepcopy(theirs))
    results = []
    for layer in (mine, theirs):
        x = torch.linspace(-1, 1, 2 * 5 * 48).reshape(2, 5, 48).requires_grad_(not first)
        with Ops() as ops:
            y = layer(x)
            y.square().sum().backward()
        results.append((y, layer.weight.grad, layer.bias.grad, x.grad))
        products = ops.seen["mkldnn::_linear_pointwise"], ops.seen["aten::mm"]
        assert products == ((2 if first else 3, 0) if layer is mine else (0, 1 if first else 2))
    for a, b in zip(*results, strict=True):
        if not first or b is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_layer_without_bias_and_frozen_weights():
    """What other models than ours have."""
    theirs = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4))
    theirs[1].weight.requires_grad_(False)
    mine = with_kernels(copy.deepcopy(theirs))
    for model in (mine, theirs):
        model(torch.linspace(-1, 1, 18).reshape(3, 6)).square().sum().backward()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) == (not b.requires_grad)
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)


def test_other_products_are_pytorchs_own():
    layer = with_kernels(nn.Linear(8, 4))
    with Ops() as ops, torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(3, 8)).dtype == torch.bfloat16
    layer.to(torch.float64)(torch.ones(3, 8, dtype=torch.float64))
    assert "mkldnn::_linear_pointwise" not in ops.seen


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("tokens", [50, 197, 400])
def test_attention_is_attention(dtype, close, tokens):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, tokens, 16).to(dtype).requires_grad_() for _ in range(3))
    with Ops() as ops:
        mine = devices.cpu_attention(q, k, v)
    name = devices.attention_kernel(3, 16, tokens, dtype, CPU)
    assert ("aten::bmm" in ops.seen) == (name == "plain") == (tokens <= devices.PLAIN_TOKENS[dtype])
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    torch.testing.assert_close(mine.double(), exact, rtol=close, atol=close)
    g = torch.randn_like(exact)
    ours, right = (torch.autograd.grad(o, (q, k, v), g.to(o.dtype)) for o in (mine, exact))
    for a, b in zip(ours, right, strict=True):
        assert (a - b).norm() <= close * b.norm()


def test_a_model_with_them_is_the_same_model():
    config = vit.ViTConfig(48, 2, 96, 4, 4, decoder_width=32, decoder_depth=2, decoder_heads=2)
    images, noise = torch.randn(2, 3, 24, 24), torch.rand(2, 36)
    plain = vit.ViTMAE(config, 24)
    own = with_kernels(copy.deepcopy(plain))
    new = {type(m) for m in own.modules()} - {type(m) for m in plain.modules()}
    assert new == ({devices.OneDNNLinear} if HAS_ONEDNN else set())
    assert list(plain.state_dict()) == list(own.state_dict())
    for model in (plain, own):
        model(images, 0.75, noise)[0].backward()
    for a, b in zip(plain.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_products_stay_with_mkl_on_other_cpus(monkeypatch):
    monkeypatch.setattr(devices, "prefers_onednn", lambda: False)
    model = with_kernels(vit.ViTMAE(vit.ViTConfig(48, 1, 96, 4, 4), 24))
    assert devices.OneDNNLinear not in map(type, model.modules())
    assert model.blocks[0].attn.attend is devices.cpu_attention


HEAD_DIMS = sorted({(c.heads, c.width // c.heads) for c in vit.MODELS.values()} | {(16, 32)})


@pytest.mark.parametrize(("heads", "dim"), HEAD_DIMS)
def test_every_head_dimension_has_a_kernel(heads, dim):
    """105, of 15b, too; on a CPU fused attention takes them all in fp32 and bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        assert devices.attention_kernel(heads, dim, 50, dtype, CPU) == "plain"
        assert devices.attention_kernel(heads, dim, 1025, dtype, CPU) == "flash"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("heads", "dim"), HEAD_DIMS)
def test_every_head_dimension_has_a_fused_kernel_on_a_gpu(heads, dim):
    for tokens in (50, 257):
        found = devices.attention_kernel(heads, dim, tokens, torch.bfloat16, torch.device("cuda"))
        assert found in ("flash", "efficient", "cudnn")
