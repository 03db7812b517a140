"""runtime/devices.py: what a device is by its name, attention on a CPU, how long a step takes."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import vit
from runtime import devices, start_record
from runtime.config import Config
from runtime.run import resolve

CPU = torch.device("cpu")
# name, architecture, compute units: peak
PEAKS = {
    ("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", 110): 191.5e12,
    ("AMD Radeon Graphics", "gfx90a:sramecc+:xnack-", 110): 191.5e12,  # nameless
    ("AMD Radeon Graphics", "gfx90a:sramecc+:xnack-", 104): None,  # MI250 or MI210
    ("AMD Radeon Graphics", "gfx1103", 12): None,  # in a laptop
    ("NVIDIA H100 PCIe", "", 114): 756e12,
    ("NVIDIA H100 80GB HBM3", "", 132): 989e12,
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "", 16): None,
    ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "", 42): None,
    ("NVIDIA GeForce RTX 4090 D", "", 114): 147.1e12,
    ("NVIDIA H200 NVL", "", 132): 835.5e12,
    ("NVIDIA GH200 480GB", "", 132): 989e12,
    ("NVIDIA A100-SXM4-80GB", "", 108): 312e12,
    ("NVIDIA RTX A1000", "", 18): None,
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "", 76): None,
}


@pytest.mark.parametrize(("name", "architecture", "units"), PEAKS)
def test_peak_flops(name, architecture, units):
    gpu = SimpleNamespace(gcnArchName=architecture, multi_processor_count=units)
    with (
        patch.object(torch.cuda, "get_device_name", return_value=name),
        patch.object(torch.cuda, "get_device_properties", return_value=gpu),
    ):
        peak, _ = devices.peak_flops(torch.device("cuda", 0))
    assert peak == PEAKS[name, architecture, units]
    assert devices.peak_flops(CPU) == (None, None)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("tokens", [50, 197, 400])
def test_attention_is_attention(dtype, close, tokens):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, tokens, 16).to(dtype).requires_grad_() for _ in range(3))
    mine = vit.attend(q, k, v)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    torch.testing.assert_close(mine.double(), exact, rtol=close, atol=close)
    g = torch.randn_like(exact)
    ours, right = (torch.autograd.grad(o, (q, k, v), g.to(o.dtype)) for o in (mine, exact))
    for a, b in zip(ours, right, strict=True):
        assert (a - b).norm() <= close * b.norm()


def test_a_long_step_on_a_cpu_is_announced():
    """By the time that its products take here; a GPU and --run io measure none."""

    def seconds(device=CPU, **flags):
        run = resolve(Config("base", mode="ddp", **flags), 1, 1)
        return start_record.cpu_step_seconds(run, device)

    assert seconds(precision="fp32") > 0
    assert seconds(torch.device("cuda")) is None
    assert seconds(run_mode="io") is None
    with patch.object(start_record.timeit, "repeat", return_value=[1.0, 9.0]):
        slow = seconds(precision="fp32")  # a product in a second
    flops = 32 * vit.flops_per_image(vit.MODELS["base"], 224, 0.75)
    assert slow == pytest.approx(2 * flops / (2 * start_record.PRODUCT_SIDE**3))
