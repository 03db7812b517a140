"""convert.py: weights and losses equal to those of timm, transformers and the official formulas."""

import argparse
import json
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from ranks import NANO, NANO_ARGV, files_limited
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

import checkpoint
import convert
import data
import train_fsdp
import vit

MODELS = {
    "nano": NANO,
    "gated": replace(NANO, gated_mlp=True),
    "channels": replace(NANO, channels=5),
}
FORTY = torch.zeros(40)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(vit.MODELS, "nano", NANO)


def weights_of(config: vit.ViTConfig = NANO) -> dict[str, torch.Tensor]:
    """Weights of which no two are alike: biases and norms too are drawn."""
    torch.manual_seed(0)
    state = vit.ViTMAE(config, 4 * config.patch).state_dict()
    return {n: t if "pos_embed" in n else t + 0.05 * torch.randn_like(t) for n, t in state.items()}


def write_source(config: vit.ViTConfig = NANO, **flags) -> None:
    """A file of ours, as `checkpoint.py consolidate` writes it."""
    known = {"model": convert.model_name(config), "channels": config.channels, "img_size": 32}
    facts = {"step": 7, "run_state": {"flags": known | flags, "scaler": None}}
    torch.save({"model": weights_of(config)} | facts, "source.pth")


def converted(capsys, *argv: str) -> str:
    """Convert; the last line that is printed, which for timm loads the result."""
    assert convert.main(argv) == 0
    return capsys.readouterr().out.splitlines()[-1]


def build(path: str, config: vit.ViTConfig = NANO) -> vit.ViTMAE:
    """The model in a file or a folder."""
    found = convert.read_model(Path(path), convert.model_name(config))
    model = vit.ViTMAE(found.config, found.flags["img_size"], found.flags["norm_pix_loss"])
    model.load_state_dict(found.weights, strict="mask_token" in found.weights)
    return model


def sample(config: vit.ViTConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and masking noise."""
    torch.manual_seed(1)
    return torch.randn(2, config.channels, 32, 32), torch.rand(2, 16)


def features(model: vit.ViTMAE, images: torch.Tensor) -> torch.Tensor:
    """Tokens of all patches, in order."""
    patches = model.image_patches(images)
    return model.encode(patches, torch.arange(patches.shape[1]).expand(len(images), -1))


assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


# --- official


def of_timm_parts() -> nn.Module:
    """A masked autoencoder with the names of the official release."""
    c, norm = NANO, partial(nn.LayerNorm, eps=1e-6)
    settings = {"embed_dim": c.width, "depth": c.depth, "num_heads": c.heads, "num_classes": 0}
    model = VisionTransformer(32, c.patch, mlp_ratio=2.1, **settings, norm_layer=norm)
    model.mask_token = nn.Parameter(torch.randn(1, 1, c.decoder_width))
    model.decoder_pos_embed = nn.Parameter(torch.randn(1, 17, c.decoder_width))
    model.decoder_embed = nn.Linear(c.width, c.decoder_width)
    sizes = c.decoder_width, c.decoder_heads
    blocks = (Block(*sizes, qkv_bias=True, norm_layer=norm) for _ in range(c.decoder_depth))
    model.decoder_blocks = nn.Sequential(*blocks)
    model.decoder_norm = norm(c.decoder_width)
    model.decoder_pred = nn.Linear(c.decoder_width, 3 * c.patch**2)
    return model.double().eval()


def loss_of_the_paper(model: nn.Module, images: torch.Tensor, noise: torch.Tensor) -> float:
    """Mask, encode the visible patches, decode all, the mean over removed ones (section 3)."""
    order = noise.argsort(dim=1)
    losses = []
    for image, own in zip(images, order, strict=True):
        seen, hidden = own[:4], own[4:]
        tokens = model.patch_embed(image[None]) + model.pos_embed[:, 1:]
        cls = model.cls_token + model.pos_embed[:, :1]
        encoded = model.norm(model.blocks(torch.cat([cls, tokens[:, seen]], dim=1)))
        embedded = model.decoder_embed(encoded)
        whole = model.mask_token.repeat(1, 17, 1)
        whole[:, 0] = embedded[:, 0]
        whole[:, 1 + seen] = embedded[:, 1:]
        decoded = model.decoder_norm(model.decoder_blocks(whole + model.decoder_pos_embed))
        predicted = model.decoder_pred(decoded)[0, 1:]
        rows = F.unfold(image[None], 8, stride=8)[0].T  # (L, C*P*P)
        target = rows.unflatten(1, (3, 64)).transpose(1, 2).flatten(1)  # (L, P*P*C)
        deviation = (target.var(1, keepdim=True) + 1e-6).sqrt()
        target = (target - target.mean(1, keepdim=True)) / deviation
        losses.append((predicted - target)[hidden].square().mean())
    return torch.stack(losses).mean().item()


def test_the_official_layout_has_the_loss_of_the_paper(capsys):
    """Held against the names of the release, on blocks of timm, both ways."""
    write_source()
    converted(capsys, "source.pth", "model.pth")
    images, noise = sample(NANO)
    theirs = of_timm_parts()
    theirs.load_state_dict(torch.load("model.pth", weights_only=True)["model"])
    other = of_timm_parts()
    arguments = argparse.Namespace(norm_pix_loss=True, mask_ratio=0.6)
    torch.save({"model": other.float().state_dict(), "args": arguments, "epoch": 3}, "back.pth")
    for path, model in ("model.pth", theirs), ("back.pth", other.double()):
        loss, _, _ = build(path).double()(images.double(), 0.75, noise)
        expected = loss_of_the_paper(model, images.double(), noise)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert convert.read_model(Path("back.pth"), "nano").flags["mask_ratio"] == 0.6


# --- timm


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_trains_in_timm_as_here(name, capsys):
    config = MODELS[name]
    file = f"encoder.{'pth' if name == 'nano' else 'safetensors'}"
    write_source(config)
    line = converted(capsys, "source.pth", file, "--to", "timm")
    images, _ = sample(config)
    theirs = eval(line, {"timm": timm})
    theirs.pos_embed.requires_grad_(False)  # fixed here, as in the paper
    ours = build(file, config)
    for model, encode in (theirs, theirs.forward_features), (ours, partial(features, ours)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        encode(images).square().mean().backward()
        optimizer.step()
    assert_close(features(ours, images), theirs.forward_features(images))
    # and back: a classifier's head is left out, and the names are those inside of DDP
    weights = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    head = {"module.head.weight": torch.zeros(10, 40)}
    average = {"state_dict": {}, "state_dict_ema": weights | head}  # read instead, as by timm
    torch.save(average | {"arch": "vit"}, "theirs.pth")
    back = build("theirs.pth", config)
    assert_close(features(back, images), theirs.forward_features(images))


def test_timms_trainer_takes_an_encoder(capsys):
    """The arguments of its train.py: --pretrained --pretrained-path FILE --num-classes 5."""
    write_source()
    line = converted(capsys, "source.pth", "encoder.safetensors", "--to", "timm")
    images, _ = sample(NANO)
    expected = eval(line, {"timm": timm}).forward_features(images)
    overlay = {"file": "encoder.safetensors", "num_classes": -1}
    as_a_trainer = f"pretrained=True, pretrained_cfg_overlay={overlay}, num_classes=5"
    line = re.sub(r"num_classes=0, checkpoint_path=.*\"", as_a_trainer, line)
    model = eval(line, {"timm": timm})
    assert_close(model.forward_features(images), expected)
    assert model(images).shape == (2, 5)


# --- transformers


@pytest.mark.parametrize("name", ["nano", "channels"])
def test_a_model_trains_in_transformers_as_here(name, capsys):
    config = MODELS[name]
    write_source(config, norm_pix_loss=False, mask_ratio=0.6)
    converted(capsys, "source.pth", "folder", "--to", "transformers")
    images, noise = sample(config)
    theirs = transformers.ViTMAEForPreTraining.from_pretrained("folder")
    for name, p in theirs.named_parameters():
        p.requires_grad_("pos" not in name)  # fixed here, as in the paper
    ours = build("source.pth", config)
    back = build("folder", config)
    losses = []
    for model in ours, back, theirs:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):  # the second loss is that of trained weights
            if model is theirs:
                loss = model(images, noise=noise).loss
            else:
                loss, _, _ = model(images, 0.6, noise)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses == pytest.approx(losses[:2] * 3, rel=1e-5) and losses[0] > losses[1]
    theirs = transformers.ViTMAEForPreTraining.from_pretrained("folder")
    theirs.vit.save_pretrained("encoder")  # an encoder alone
    converted(capsys, "encoder", "again", "--to", "transformers")
    encoder = transformers.ViTMAEModel.from_pretrained("again", mask_ratio=0.0)
    order = torch.arange(16).expand(2, -1)  # its noise orders the patches
    found = features(build("encoder", config), images)
    assert_close(found, encoder(images, noise=order).last_hidden_state)


@pytest.mark.parametrize(
    "settings",
    [
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
        {"do_normalize": False},
        {"do_rescale": False, "image_mean": [100.0, 90.0, 80.0], "image_std": [50.0, 60.0, 70.0]},
    ],
)
def test_images_are_normalised_as_by_the_image_processor(settings, capsys):
    write_source()
    converted(capsys, "source.pth", "theirs", "--to", "transformers")
    transformers.ViTImageProcessor(do_resize=False, **settings).save_pretrained("theirs")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    converted(capsys, "theirs", "again", "--to", "transformers")
    for folder in "theirs", "again":  # what is written normalises alike
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        expected = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
        flags = convert.read_model(Path(folder)).flags
        stats = data.ChannelStats(flags["channel_mean"], flags["channel_std"])
        ours = data.normalize(torch.from_numpy(pixels).permute(2, 0, 1)[None], stats)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


# --- what is known of a model, and what is assumed


def test_a_file_says_what_it_is_and_what_is_assumed_is_said(capsys):
    stats = {"channel_mean": [1.0, 2, 3], "channel_std": [4.0, 5, 6], "image_dtype": "uint16"}
    write_source(**stats, norm_pix_loss=False, mask_ratio=0.6)
    known = {"norm_pix_loss": False, "mask_ratio": 0.6, "img_size": 32}
    for layout, name in ("official", "a.pth"), ("timm", "b.safetensors"), ("transformers", "c"):
        assert convert.main(["source.pth", name, "--to", layout]) == 0
        assert "assumed" not in capsys.readouterr().out
        expected = known if layout == "transformers" else known | stats  # it has 8-bit images only
        flags = convert.read_model(Path(name)).flags
        assert flags | expected == flags
    torch.save(weights_of(), "plain.pth")
    said = "normalised patches, its mask ratio was 0.75, its images had the mean"
    for source, name in ("plain.pth", "d.pth"), ("d.pth", "e.pth"):  # and is not written as known
        assert convert.main([source, name, "--model", "nano"]) == 0
        assert said in capsys.readouterr().out
    wide = weights_of() | {"pos_embed": torch.randn(1, 17, 40)}
    torch.save(wide, "wide.pth")
    assert convert.main(["wide.pth", "f.pth", "--model", "nano"]) == 0
    assert "its images were square" in capsys.readouterr().out


def test_a_training_begins_with_weights_of_another_library(capsys, tmp_path):
    """With next to no learning rate; a decoder that an encoder lacks is a new one."""
    write_source()
    converted(capsys, "source.pth", "hf", "--to", "transformers")
    converted(capsys, "hf", "whole", "--to", "checkpoint")
    converted(capsys, "source.pth", "timm.pth", "--to", "timm")
    converted(capsys, "timm.pth", "encoder", "--to", "checkpoint")
    new = vit.ViTMAE(NANO, 32).state_dict()
    for begin, mode in ("whole", "full_shard"), ("encoder", "ddp"):
        flags = f"--mode {mode} --lr 1e-12 --steps 1 --resume {begin}/step_00000000 --out {begin}-1"
        assert train_fsdp.main([*NANO_ARGV, *flags.split()]) == 0
        found, _ = checkpoint.read_weights(f"{begin}-1")
        for name, tensor in weights_of().items():
            if "pos_embed" not in name:
                lacked = begin == "encoder" and name.startswith(convert.DECODER)
                wanted = new[name] if lacked else tensor
                assert_close(found[name], wanted, rtol=0, atol=1e-10)


# --- what cannot be written, or read

FULL = "File too large"  # as on a full disk


@pytest.mark.parametrize(
    ("name", "out", "layout", "status", "sentence"),
    [
        ("gated", "folder", "transformers", 2, "--to timm has it"),
        ("nano", "source.pth", "official", 2, "source.pth is there already"),
        ("nano", "no/where.pth", "timm", 1, "No such file or directory"),
        ("nano", "model.pth", "official", 1, FULL),
        ("nano", "encoder.safetensors", "timm", 1, FULL),
    ],
)
def test_what_cannot_be_written_is_one_sentence(name, out, layout, status, sentence, capsys):
    write_source(MODELS[name])
    before = Path("source.pth").read_bytes()
    with files_limited() if sentence == FULL else nullcontext():
        assert convert.main(["source.pth", out, "--to", layout]) == status
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("convert.py: error: ") and error.count("\n") == 1
    assert os.listdir() == ["source.pth"] and Path("source.pth").read_bytes() == before


class Code:
    def __reduce__(self):
        return os.system, ("touch ran",)


WRONG = {
    "code": ({"cls_token": Code()}, "contains more than weights"),
    "integers": ({"norm.bias": FORTY.to(torch.int8)}, "norm.bias is of torch.int8"),
    "LayerScale": ({"blocks.0.ls1.gamma": FORTY}, "gamma is no .* LayerScale"),
    "a shape": ({"norm.bias": FORTY[1:]}, r"norm.bias.*\[39\].*\[40\]"),
    "NaN": ({"norm.bias": FORTY * torch.nan}, "norm.bias is .*not finite"),
    "depth": ({"blocks.2.norm1.weight": FORTY}, "blocks.2.norm1.weight is no weight"),
    "size": ({"flags": {"model": "tiny"}}, "is tiny, not --model nano"),
    "nothing": ({}, "there is no"),
    "truncated": ({}, "refuses model.pth: it is damaged"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_one_sentence_that_names_the_fault(what, capsys):
    content, sentence = WRONG[what]
    weights = weights_of() | content
    flags = weights.pop("flags", {})
    torch.save({"model": weights, "step": 1, "run_state": {"flags": flags}}, "model.pth")
    if what == "truncated":
        Path("model.pth").write_bytes(Path("model.pth").read_bytes()[:-1000])
    path = "none.pth" if what == "nothing" else "model.pth"
    assert convert.main([path, "out.pth", "--model", "nano"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("convert.py: error: ") and error.count("\n") == 1
    assert re.search(sentence, error) and os.listdir() == ["model.pth"]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu', here 'gelu'"),
        ({"layer_norm_eps": 1e-3}, "epsilon of its norms is 0.001, here 1e-06"),
        ({"image_size": [32, 72]}, "image_size is .*one whole number"),
        ({"model_type": "bert"}, "not of a vit_mae model"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_what_our_model_does_not_have_is_refused_by_name(changed, sentence, capsys):
    write_source()
    converted(capsys, "source.pth", "theirs", "--to", "transformers")
    file = Path("theirs/config.json")
    settings = json.loads(file.read_text()) | changed
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    assert convert.main(["theirs", "out.pth"]) == 2
    error = capsys.readouterr().err
    assert re.search(sentence, error) and error.count("\n") == 1 and not Path("out.pth").exists()


def test_a_consolidated_run_is_what_its_checkpoint_is(run, capsys):
    out, params = run
    assert checkpoint.main(["consolidate", str(out / "step_00000002"), "all.pth"]) == 0
    for path in out, out / "step_00000002", Path("all.pth"):
        found = convert.read_model(path)
        assert (found.step, found.flags["mask_ratio"], found.assumed) == (2, 0.5, {})
        for name, tensor in params.items():
            assert torch.equal(found.weights[name], tensor), name
