"""The benchmarks of the step run at tiny shapes, and what they compare is the same computation."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT
from ranks import environment, free_port, run_script, start_ranks
from test_data import noise_image

import vit


def run(name: str, *argv: str, device: tuple[str, ...] = ("--device", "cpu")) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *argv, *device]
    env = environment(0, 1, 0)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del env[variable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


@pytest.mark.full
def test_step_benchmark():
    out = run(
        "step",
        "--model",
        "tiny",
        "--img-size",
        "32",
        "--batch",
        "2",
        "--rounds",
        "2",
        "--threads",
        "1",
    )
    cases = json.loads(out.splitlines()[-1])["cases"]
    assert [case["precision"] for case in cases] == ["fp32", "bf16"]
    for case in cases:
        assert list(case["found"]) == ["vit", "ddp", "transformers", "timm"]
        for row in case["found"].values():
            assert len(row["step"]) == len(row["forward"]) == 2 and row["peak_gib"] > 0
            assert all(f < s for f, s in zip(row["forward"], row["step"], strict=True))
    assert "x transformers" in out and "x timm" in out


@pytest.mark.full
def test_gpu_benchmark_runs_its_whole_path_on_a_cpu(tmp_path):
    argv = ["--models", "tiny", "--img-size", "32", "--most", "2", "--minutes", "0.9"]
    run("gpu", *argv, "--out", str(tmp_path))
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {(r["compiled"], r["ac"]) for r in rows} == {
        (compiled, ac) for compiled in (False, True) for ac in ("none", "selective", "full")
    }
    by = {(r["compiled"], r["ac"]): r for r in rows}
    assert by[False, "none"]["batch"] == 2 and by[False, "none"]["images_per_second"] > 0
    assert by[True, "full"]["note"] == "not run: out of time"
    text = (tmp_path / "table.txt").read_text()
    assert "over the floor: matmul" in text and "not run: out of time" in text


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
    assert {*lines} == {"ddp", "full_shard", "hybrid", "fully_shard", "transformers"}
    for name in ("ddp", "transformers"):
        assert f"bytes: all_reduce {4 * trained:,} (" in lines[name]
    assert text.count("(as planned)") == 3 and "NOT" not in text


@pytest.mark.full
def test_loop_benchmark():
    data = str(ROOT / "examples" / "tiles" / "train")
    out = run(
        "loop",
        "--img-size",
        "32",
        "--batch",
        "2",
        "--rounds",
        "2",
        "--steps",
        "3",
        "--threads",
        "1",
        "--workers",
        "0",
        "--data",
        data,
    )
    assert "syn / bare:" in out and "real / syn:" in out and "the loop alone" in out


@pytest.mark.full
def test_data_benchmark_leaves_a_broken_file_out_for_the_peers(tmp_path):
    for i in range(70):
        (tmp_path / "tree" / f"class{i % 2}").mkdir(parents=True, exist_ok=True)
        noise_image(i, 60, 40).save(tmp_path / "tree" / f"class{i % 2}" / f"{i}.jpg")
    (tmp_path / "tree/class0/broken.jpg").write_bytes(b"\xff\xd8 no image")
    out = run("data", "--data", str(tmp_path / "tree"), "--rounds", "1", "--steps", "2", device=())
    for name in ("ImageFolder, v1", "timm", "data.py, exact", "data.py, pack"):
        assert len([line for line in out.splitlines() if line.startswith(name)]) == 2
