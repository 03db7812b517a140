"""What the files of transformers and timm say of a model is read, or refused by name."""

import json
import os
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from conftest import ROOT
from PIL import Image
from ranks import NANO
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from timm.optim import param_groups_weight_decay

import checkpoint
import convert
import data
import probe
import vit
from downstream import finetune
from runtime.pretrained import build_pretrained, read_pretrained

SIZES = {
    "hidden_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 84,
    "patch_size": 8,
    "image_size": 32,
    "decoder_hidden_size": 28,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 112,
    "layer_norm_eps": 1e-6,
}
TIMM = {"embed_dim": 192, "depth": 1, "img_size": 32, "patch_size": 8, "num_classes": 0}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(vit.MODELS, "nano", NANO)


def their_model(folder: str, **changed) -> torch.nn.Module:
    """Save a vit_mae model of transformers with these settings; its weights are random."""
    torch.manual_seed(0)
    config = transformers.ViTMAEConfig(**(SIZES | changed))
    model = transformers.ViTMAEForPreTraining(config).eval()
    model.save_pretrained(folder)
    return model


def change(path: str, **values) -> None:
    file = Path(path)
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def timm_model(folder: str, name: str = "vit_tiny_patch16_224", **changed) -> torch.nn.Module:
    torch.manual_seed(0)
    settings = TIMM | changed
    model = timm.create_model(name, **settings).eval()
    save_for_hf(model, folder, model_args=settings)
    return model


@torch.no_grad()
def features(pretrained, images: torch.Tensor) -> torch.Tensor:
    return build_pretrained(pretrained, torch.device("cpu")).features(images)


# --- config.json of transformers


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu', this model has 'gelu'"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh'"),
        ({"qkv_bias": False}, "qkv_bias False, this model has True"),
        ({"image_size": [32, 72]}, "32 x 72 pixels: they must be square"),
        ({"layer_norm_eps": 1e-3}, "an epsilon of 0.001, here 1e-06"),
        ({"decoder_intermediate_size": 56}, "mlp.fc1.weight is (56, 28), (112, 28) in the model"),
    ],
)
def test_what_our_model_does_not_have_is_refused_by_name(changed, sentence, capsys):
    their_model("theirs", **changed)
    capsys.readouterr()
    assert convert.main(["theirs", "out.pth", "--to", "official"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and sentence in error[0] and not Path("out.pth").exists()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"quantization_config": {"load_in_8bit": True}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
        ({"patch_size": [16, 8]}, "17 positions, for images of 32 pixels in patches of 16"),
        ({"mask_ratio": 1.5}, "mask_ratio is 1.5"),
        ({"norm_pix_loss": "false"}, "norm_pix_loss is 'false'"),
        ({"image_size": 40}, "17 positions, for images of 40 pixels"),
    ],
)
def test_settings_that_contradict_the_weights_are_refused(changed, sentence):
    their_model("theirs")
    change("theirs/config.json", **changed)
    with pytest.raises(ValueError, match=f"theirs: .*{sentence}"):
        read_pretrained("theirs")


def test_settings_that_change_nothing_are_read():
    their_model("theirs")
    plain = read_pretrained("theirs")
    their_model("other", hidden_act="gelu_python", image_size=[32, 32], hidden_dropout_prob=0.1)
    change("other/config.json", patch_size=[8, 8], initializer_range=0.5, use_cache=True)
    other = read_pretrained("other")
    assert (other.config, other.img_size) == (plain.config, 32)


def test_weights_are_floating_point():
    their_model("theirs")
    weights = load_file("theirs/model.safetensors")
    weights["vit.layernorm.weight"] = torch.ones(40, dtype=torch.int8)
    save_file(weights, "theirs/model.safetensors")
    with pytest.raises(ValueError, match=r"norm.weight is of type torch.int8"):
        read_pretrained("theirs")


# --- which files of a folder


def test_the_files_are_those_that_transformers_reads():
    right = their_model("theirs")
    file = Path("theirs/model.safetensors")
    other = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(other, "theirs/model.fp16.safetensors")
    save_file(other, "theirs/model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    Path("theirs/model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(other, "theirs/pytorch_model.bin")
    expected = right.vit.layernorm.bias
    assert torch.equal(read_pretrained("theirs").weights["norm.bias"], expected)
    file.unlink()  # now transformers reads the shards of the index
    loaded = transformers.ViTMAEForPreTraining.from_pretrained("theirs").vit.layernorm.bias
    assert torch.equal(read_pretrained("theirs").weights["norm.bias"], loaded)
    assert torch.equal(loaded, expected + 1)
    Path("theirs/model.safetensors.index.json").unlink()
    assert torch.equal(read_pretrained("theirs").weights["norm.bias"], loaded)
    Path("theirs/pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"contains no model.safetensors"):
        read_pretrained("theirs")


def test_a_file_of_transformers_needs_the_folder_that_says_what_it_is():
    their_model("theirs")
    with pytest.raises(ValueError, match=r"give the folder theirs, whose config\.json"):
        read_pretrained("theirs/model.safetensors")


def test_the_moving_average_of_a_checkpoint_is_read_as_by_timm():
    model = timm.create_model("vit_tiny_patch16_224", **(TIMM | {"depth": 4}))
    average = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": model.state_dict(), "state_dict_ema": average}, "c.pth.tar")
    loaded = timm.models.load_state_dict("c.pth.tar")
    found = read_pretrained("c.pth.tar").weights
    assert torch.equal(found["norm.bias"], loaded["norm.bias"])


@pytest.mark.parametrize("layout", ["timm", "transformers"])
def test_weights_in_any_memory_layout_are_written(layout, capsys):
    weights = vit.ViTMAE(NANO, 32).to(memory_format=torch.channels_last).state_dict()
    weights["norm.bias"] = weights["norm.weight"]  # shared, as where parameters are tied
    torch.save(weights, "last.pth")
    argv = ["last.pth", "out.safetensors", "--to", layout]
    assert convert.main([*argv, "--model", "nano"]) == 0, capsys.readouterr().err
    images = torch.randn(2, 3, 32, 32)
    expected = features(read_pretrained("last.pth"), images)
    torch.testing.assert_close(features(read_pretrained("out.safetensors"), images), expected)


# --- timm


def test_a_folder_of_timm_is_read():
    theirs = timm_model("theirs", num_heads=6)
    found = read_pretrained("theirs")
    assert (found.config.heads, found.config.depth, found.img_size) == (6, 1, 32)
    mean = tuple(theirs.pretrained_cfg["mean"])
    assert found.stats == (mean, tuple(theirs.pretrained_cfg["std"]), "uint8")
    images = torch.randn(2, 3, 32, 32)
    expected = theirs.forward_features(images)
    torch.testing.assert_close(features(found, images), expected, rtol=1e-5, atol=1e-5)
    # as --init-from reads it, which gives the model of the run
    with pytest.raises(ValueError, match="it has 6 heads, but the model given for it 3"):
        read_pretrained("theirs", vit.MODELS["tiny"])
    found = read_pretrained("theirs", replace(vit.MODELS["tiny"], heads=6, depth=1))
    torch.testing.assert_close(features(found, images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"act_layer": "relu"}, "act_layer 'relu'"),
        ({"qkv_bias": False}, "qkv_bias False"),
        ({"img_size": (32, 72)}, "32 x 72 pixels: they must be square"),
        ({"no_embed_class": True}, "no_embed_class True"),
        ({"init_values": 1e-5}, "init_values"),
        ({"norm_layer": "rmsnorm"}, "norm_layer 'rmsnorm'"),
    ],
)
def test_what_timm_has_and_our_model_has_not_is_refused_by_name(changed, sentence):
    timm_model("theirs", num_heads=6, **changed)
    with pytest.raises(ValueError, match=f"theirs: .*{sentence}"):
        read_pretrained("theirs")


# --- positions


def sincos(height: int, width: int) -> torch.Tensor:
    """The fixed positions of MAE (1, 1+L, 192) for a grid of any shape, in numpy."""
    rates = 1 / 10000 ** (np.arange(48) / 48)
    rows = []
    for row in range(height):
        for column in range(width):
            angles = [np.sin(column * rates), np.cos(column * rates)]
            rows.append(np.concatenate([*angles, np.sin(row * rates), np.cos(row * rates)]))
    return torch.tensor(np.stack([np.zeros(192), *rows])[None], dtype=torch.float32)


def test_fixed_positions_of_a_square_are_known_and_others_said_to_be_taken_for_one(capsys):
    weights = vit.ViTMAE(vit.MODELS["tiny"], 48).state_dict()
    weights["pos_embed"] = sincos(6, 6)
    torch.save(weights, "square.pth")
    found = read_pretrained("square.pth")
    assert found.img_size == 48 and "img_size" not in found.assumed
    weights["pos_embed"] = sincos(4, 9)
    torch.save(weights, "wide.pth")
    wide = timm.create_model("vit_tiny_patch16_224", **(TIMM | {"img_size": (32, 72), "depth": 4}))
    torch.save(wide.state_dict(), "learned.pth")
    for name in "wide", "learned":
        assert convert.main([f"{name}.pth", f"{name}2.pth", "--to", "timm", "--model", "tiny"]) == 0
        assert "assumed that its images were square" in capsys.readouterr().out


def test_positions_that_no_square_has_are_refused(capsys):
    no_class = timm.create_model(
        "vit_tiny_patch16_224", **(TIMM | {"no_embed_class": True, "depth": 4})
    )
    torch.save(no_class.state_dict(), "other.pth")
    assert convert.main(["other.pth", "out.pth", "--to", "timm"]) == 2
    assert "it has 16 positions, for images of 24 pixels" in capsys.readouterr().err


# --- statistics, loss


@pytest.mark.parametrize(
    "settings",
    [
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
        {"do_normalize": False},
        {"do_rescale": False, "image_mean": [100.0, 90.0, 80.0], "image_std": [50.0, 60.0, 70.0]},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
    ],
)
def test_images_are_normalised_as_by_the_image_processor(settings):
    their_model("theirs")
    processor = transformers.ViTImageProcessor(do_resize=False, **settings)
    processor.save_pretrained("theirs")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    expected = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    ours = data.normalize(images, read_pretrained("theirs").stats)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_transformers_normalises_as_a_converted_model_says(capsys):
    note = {"channel_mean": [0.1, 0.2, 0.3], "channel_std": [0.4, 0.5, 0.6]}
    weights = vit.ViTMAE(NANO, 32).state_dict()
    note |= {"image_dtype": "uint8", "config": vars(NANO)}
    torch.save({"model": weights, "pretrained": note}, "source.pth")
    assert convert.main(["source.pth", "folder", "--to", "transformers"]) == 0
    processor = transformers.AutoImageProcessor.from_pretrained("folder")
    assert tuple(processor.image_mean) == (0.1, 0.2, 0.3)
    assert tuple(processor.image_std) == (0.4, 0.5, 0.6)
    assert processor.size["height"] == 32


@pytest.mark.parametrize("std", [[1.0, 0.0, 1.0], [1.0, 1.0]])
def test_statistics_that_cannot_be_are_refused(std):
    note = {"channel_mean": [0.0] * len(std), "channel_std": std, "image_dtype": "uint8"}
    note["config"] = vars(NANO)
    torch.save({"model": vit.ViTMAE(NANO, 32).state_dict(), "pretrained": note}, "source.pth")
    with pytest.raises(ValueError, match=r"the deviation of a channel is 0|statistics of 2"):
        read_pretrained("source.pth")


def test_what_is_assumed_is_said_and_not_written_as_known(capsys):
    torch.save(vit.ViTMAE(NANO, 32).state_dict(), "source.pth")
    assert convert.main(["source.pth", "first.pth", "--to", "official", "--model", "nano"]) == 0
    said = "normalised patches, its mask ratio was 0.75, its images were normalised by the mean"
    assert said in capsys.readouterr().out
    assert convert.main(["first.pth", "second.pth", "--to", "official"]) == 0
    assert said in capsys.readouterr().out


def test_consolidate_keeps_what_the_model_was_trained_on(run, capsys):
    tiles = str(ROOT / "examples" / "tiles" / "heldout")
    copy = Path(shutil.copytree(run[0] / "step_00000002", "copy"))
    manifest = json.loads((copy / "checkpoint.json").read_text())
    flags = {"norm_pix_loss": False, "channel_mean": [0.1, 0.2, 0.3]}
    flags |= {"channel_std": [0.4, 0.5, 0.6], "image_dtype": "uint8"}
    manifest["flags"] |= flags
    manifest["checksum"] = 0
    manifest["checksum"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (copy / "checkpoint.json").write_text(json.dumps(manifest))
    expected = read_pretrained(copy)
    assert not expected.norm_pix_loss and expected.mask_ratio == 0.5
    assert checkpoint.main(["consolidate", str(copy), "all.pth"]) == 0
    found = read_pretrained("all.pth")
    for name in ("config", "img_size", "norm_pix_loss", "mask_ratio", "stats", "step", "assumed"):
        assert getattr(found, name) == getattr(expected, name), name
    capsys.readouterr()
    line = ["reconstruct", "all.pth", "--data", tiles, "--images", "1", "--device", "cpu"]
    printed = []
    for flag in [], ["--norm-pix-loss"]:
        assert probe.main([*line, *flag]) == 0
        printed.append(capsys.readouterr().out)
        os.remove("reconstruct.png")
    assert printed[0] != printed[1] and "assumed" not in printed[0]


# --- fine-tuning


def test_weight_decay_leaves_out_what_timm_leaves_out():
    theirs = timm.create_model("vit_tiny_patch16_224", **(TIMM | {"depth": 4, "num_classes": 5}))
    groups = param_groups_weight_decay(theirs, no_weight_decay_list=theirs.no_weight_decay())
    decayed = [p for group in groups if group["weight_decay"] for p in group["params"]]
    expected = {n for n, p in theirs.named_parameters() if any(p is d for d in decayed)}
    with torch.device("meta"):
        ours = finetune.Classifier(vit.MODELS["tiny"], 32, 5)
    assert finetune.decayed_names(ours) == expected
