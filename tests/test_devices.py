"""runtime/devices.py: what a device is by its name, attention on a CPU, how long a step takes."""

import pytest
import torch
import torch.nn.functional as F

import vit
from runtime import devices, start_record
from runtime.config import Config
from runtime.run import resolve

CPU = torch.device("cpu")


PEAKS = {
    "AMD Instinct MI250X": 191.5e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA GeForce RTX 4090 D": 147.1e12,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
}


@pytest.mark.parametrize("name", PEAKS)
def test_peak_flops(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert devices.peak_flops(torch.device("cuda", 0))[0] == PEAKS[name]
    assert devices.peak_flops(CPU)[0] is None


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


def test_a_long_step_on_a_cpu_is_announced(monkeypatch):
    """By the time that its products take here; a GPU and --run io measure none."""

    def seconds(device=CPU, model="base", **flags):
        return start_record.cpu_step_seconds(
            resolve(Config(model, mode="ddp", **flags), 1, 1), device
        )

    assert seconds(precision="fp32") > 0
    assert seconds(torch.device("cuda")) is seconds(run_mode="io") is None
    monkeypatch.setattr(
        start_record.timeit, "repeat", lambda *a, globals, number, repeat: [number, 9.0]
    )
    slow = seconds(precision="fp32")  # a product in a second
    flops = 32 * vit.flops_per_image(vit.MODELS["base"], 224, 0.75)
    assert slow == pytest.approx(2 * flops / (2 * 768**3))
