"""downstream/weights.py: any checkpoint becomes one whole model, without ranks."""

import shutil

import pytest
import torch
from timm.layers import resample_abs_pos_embed

import checkpoint
import data
import vit
from downstream.weights import build_pretrained, random_weights, read_pretrained

CPU = torch.device("cpu")


def test_the_newest_checkpoint_of_a_run_is_the_model_that_was_trained(run):
    out, params = run
    for path in out, out / "step_00000002":
        found = read_pretrained(path)
        about = (found.step, found.size, found.img_size, found.stats)
        assert about == (2, "nano", 32, data.IMAGENET)
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
    with pytest.raises(checkpoint.Damaged):
        read_pretrained(out / "step_00000002")
    shutil.rmtree(out / "step_00000001")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read"):
        read_pretrained(out)
    with pytest.raises(ValueError, match="give the --out of a run"):
        read_pretrained(tmp_path / "nowhere")


def test_images_of_another_size(run):
    """Positions are resampled as by timm."""
    model = build_pretrained(read_pretrained(run[0]), CPU, 56)
    theirs = resample_abs_pos_embed(vit.sincos_positions(40, 4), [7, 7])
    torch.testing.assert_close(model.pos_embed, theirs, rtol=0, atol=1e-6)
    assert model(torch.zeros(1, 3, 56, 56))[0].isfinite()


def test_random_weights_are_the_initial_ones(run):
    found = read_pretrained(run[0])
    model, fresh = build_pretrained(random_weights(found), CPU), vit.ViTMAE(found.config, 32)
    for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q), name
