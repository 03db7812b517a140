"""The benchmarks of the step run at tiny shapes, and what they compare is the same computation."""

import json
from functools import partial

import pytest
import torch
from ranks import free_port, python, run_script, start_ranks

import vit


@pytest.mark.parametrize("name", ["transformers", "timm"])
def test_peers_compute_what_we_do(name):
    """Loss and the gradient of the images, with our weights."""
    from benchmarks import peers

    config = vit.ViTConfig(48, 2, 96, 4, 4, decoder_width=32, decoder_depth=2, decoder_heads=2)
    mine = vit.ViTMAE(config, 24)
    theirs = getattr(peers, f"{name}_mae")(mine, 0.75)
    generator = torch.Generator().manual_seed(0)
    images, noise = torch.randn(2, 3, 24, 24, generator=generator), torch.randperm(36).float()
    noise = torch.stack([noise, noise.flip(0)])
    results = []
    for loss_of in (lambda x: mine(x, 0.75, noise)[0], lambda x: theirs(x, noise)):
        x = images.clone().requires_grad_()
        loss = loss_of(x)
        loss.backward()
        results.append((loss, x.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_every_part_for_a_gpu_passes_in_small_on_a_cpu(tmp_path):
    """What the day with a GPU depends on; training equals plain PyTorch's in every mode."""
    python("-m", "benchmarks.gpu", "--device", "cpu", "--out", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {*["matrix", "run", "grid", "sharded", "loop", "peers"]}
    assert all(row["ok"] for row in rows)
    matrix = [row for row in rows if row["part"] == "matrix"]
    assert len(matrix) > 30 and all("difference" in row for row in matrix)
    assert "0 failed" in (tmp_path / "report.md").read_text()


@pytest.mark.full
def test_the_step_is_compared_with_the_peers():
    quick = "--model tiny --device cpu --img-size 32 --rounds 1 --threads 1 --batch 2"
    out = python("-m", "benchmarks.step", *quick.split())
    assert "x transformers" in out and "x timm" in out


@pytest.mark.full
def test_bytes_of_sharded_steps_are_those_of_theory_and_of_ddp_of_transformers(tmp_path):
    """Four ranks: our ddp moves what that of transformers' model moves, others what plan says."""
    argv = ["--img-size", "32", "--batch", "2", "--rounds", "1"]
    command = ["-m", "benchmarks.sharded", *argv]
    start_ranks(4, partial(run_script, command), tmp_path, free_port(), 300)
    text = (tmp_path / "rank0.txt").read_text()
    with torch.device("meta"):
        trained = sum(p.numel() for p in vit.ViTMAE(vit.MODELS["tiny"]).parameters())
    lines = {line.split()[0]: line for line in text.splitlines() if "bytes: " in line}
    for name in ("ddp", "transformers"):
        assert f"bytes: all_reduce {4 * trained:,} (" in lines[name]
    assert text.count("(as planned)") == 3 and "NOT" not in text
