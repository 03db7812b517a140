"""runtime/devices.py: the device names that torch reports."""

import pytest
import torch

from runtime.devices import peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989e12),
        ("AMD Instinct MI250", 181e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", 147.1e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI100", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peak_flops(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    number, source = peak_flops(torch.device("cuda", 0))
    assert number == peak
    assert (source == f"not known for {name}") == (peak is None)


def test_peak_flops_of_a_cpu_are_not_known():
    assert peak_flops(torch.device("cpu"))[0] is None
