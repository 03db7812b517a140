"""downstream/pretrained.py: any checkpoint becomes one whole model, without ranks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from ranks import Run, run_ranks
from timm.layers import resample_abs_pos_embed

import checkpoint
import vit
from downstream.pretrained import (
    build_pretrained,
    random_weights,
    read_pretrained,
    resize_positions,
)

CPU = torch.device("cpu")
ARGV = ["--model", "nano", "--img-size", "32", "--data", str(ROOT / "examples/tiles/train")]
ARGV += ["--global-batch", "8", "--workers", "0", "--precision", "fp32", "--device", "cpu"]


def train(folder: Path):
    """Two steps of hybrid on four ranks, saved after each; and the parameters at the end."""
    argv = [*ARGV, "--mode", "hybrid", "--group", "2", "--steps", "2", "--save-every", "1"]
    (result,) = run_ranks(4, [Run(argv, to=str(folder / "out"))], folder / "ranks")
    return folder / "out", result.params


@pytest.fixture
def run(once, monkeypatch):
    """A run of four ranks, and its parameters; `nano` is known here too."""
    from ranks import NANO

    monkeypatch.setitem(vit.MODELS, "nano", NANO)
    return once("pretrained", train)


def test_the_newest_checkpoint_of_a_run_is_the_model_that_was_trained(run):
    out, params = run
    for path in out, out / "step_00000002":
        found = read_pretrained(path)
        assert (found.step, found.size, found.img_size, found.norm_pix_loss) == (
            2,
            "nano",
            32,
            True,
        )
        model = build_pretrained(found, CPU)
        assert {name for name, _ in model.named_parameters()} == params.keys()
        for name, p in model.named_parameters():
            assert torch.equal(p, params[name]), name
        assert torch.equal(model.pos_embed, vit.sincos_positions(40, 4))
    assert read_pretrained(out / "step_00000001").step == 1


def test_a_damaged_newest_checkpoint_is_skipped_and_none_is_one_sentence(run, tmp_path):
    out = shutil.copytree(run[0], tmp_path / "out")
    shards = sorted((out / "step_00000002").glob("*.distcp"))
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    assert read_pretrained(out).step == 1
    with pytest.raises(checkpoint.Damaged, match="bytes"):
        read_pretrained(out / "step_00000002")
    shutil.rmtree(out / "step_00000001")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read: .*bytes"):
        read_pretrained(out)
    with pytest.raises(ValueError, match="no step_"):
        read_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="give the --out of a run"):
        read_pretrained(tmp_path / "nowhere")


def test_statistics_and_channels_are_those_of_the_run(run, tmp_path):
    out = shutil.copytree(run[0] / "step_00000002", tmp_path / "step_00000002")
    manifest = json.loads((out / "checkpoint.json").read_text())
    flags = manifest["flags"]
    assert read_pretrained(out).stats.mean == tuple(flags["channel_mean"])
    flags |= {"channel_mean": [7.0, 8.0], "channel_std": [2.0, 3.0], "image_dtype": "uint16"}
    flags |= {"channels": 2}
    manifest["checksum"] = checkpoint._manifest_checksum(manifest)
    (out / "checkpoint.json").write_text(json.dumps(manifest))
    found = read_pretrained(out)
    assert found.stats == ((7.0, 8.0), (2.0, 3.0), "uint16") and found.config.channels == 2
    with pytest.raises(ValueError, match=r"patch_embed.proj.weight is \(40, 3, 8, 8\)"):
        build_pretrained(found, CPU)
    flags["model"] = "unknown"
    manifest["checksum"] = checkpoint._manifest_checksum(manifest)
    (out / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(checkpoint.Damaged, match="not written by train_fsdp"):
        read_pretrained(out)


def test_position_tables_are_resampled_as_by_timm(run):
    table = vit.sincos_positions(40, 4)
    ours, theirs = resize_positions(table, 7), resample_abs_pos_embed(table, [7, 7])
    assert torch.equal(ours[:, 0], table[:, 0])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert resize_positions(table, 4) is table
    model = build_pretrained(read_pretrained(run[0]), CPU, img_size=56)
    torch.testing.assert_close(model.pos_embed, theirs, rtol=0, atol=1e-6)
    loss, _, _ = model(torch.zeros(1, 3, 56, 56))
    assert loss.isfinite()
    with pytest.raises(ValueError, match="multiple of the patch size"):
        build_pretrained(read_pretrained(run[0]), CPU, img_size=57)


def test_random_weights_are_the_initial_ones_and_an_encoder_needs_no_decoder(run):
    found = read_pretrained(run[0])
    baseline = random_weights(found)
    model = build_pretrained(baseline, CPU)
    fresh = vit.ViTMAE(found.config, 32)
    for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q), name
    encoder = {n: t for n, t in found.weights.items() if not n.startswith(("decoder", "mask"))}
    alone = replace(found, weights=encoder)
    assert found.has_decoder and not alone.has_decoder
    whole = build_pretrained(found, CPU), build_pretrained(alone, CPU)
    patches, keep = torch.rand(2, 16, 192), torch.arange(16).expand(2, -1)
    assert torch.equal(*(model.encode(patches, keep) for model in whole))
    del encoder["norm.bias"]
    with pytest.raises(ValueError, match=r"norm.bias is missing"):
        build_pretrained(alone, CPU)
