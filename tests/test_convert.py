"""Exchange of weights: verified by the code of timm and transformers, in both directions."""

import argparse
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import transformers
from conftest import ROOT
from ranks import NANO, Run, files_limited, run_ranks
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

import convert
import data
import vit
from downstream.weights import Pretrained, build_pretrained, read_pretrained

CPU = torch.device("cpu")
MODELS = {
    "nano": NANO,
    "gated": replace(NANO, gated_mlp=True),
    "channels": replace(NANO, channels=5),
}


def weights_of(config: vit.ViTConfig, side: int = 4) -> dict[str, torch.Tensor]:
    """Weights of which no two are alike: biases and norms too are drawn."""
    torch.manual_seed(0)
    state = vit.ViTMAE(config, side * config.patch).state_dict()
    return {n: t if "pos_embed" in n else t + 0.05 * torch.randn_like(t) for n, t in state.items()}


def source(config: vit.ViTConfig, folder: Path) -> Path:
    """A file as checkpoint.py consolidate writes it, of a gated model or of any channels too."""
    torch.save({"model": weights_of(config), "step": 7}, folder / "source.pth")
    return folder / "source.pth"


def size(config: vit.ViTConfig) -> str:
    """The fields that --model takes."""
    return "base:" + ",".join(f"{k}={v:d}" for k, v in asdict(config).items() if k != "channels")


SIZE = size(NANO)


def converted(config: vit.ViTConfig, folder: Path, name: str, *argv: str, capsys) -> str:
    """Convert the weights of `config`; the line that is printed for loading them."""
    argv = (str(source(config, folder)), str(folder / name), *argv, "--model", size(config))
    assert convert.main(argv) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()[1]


def sample(config: vit.ViTConfig, side: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    size = side * config.patch
    return torch.randn(2, config.channels, size, size), torch.rand(2, side**2)


def build(path: Path, config: vit.ViTConfig, img_size: int | None = None) -> vit.ViTMAE:
    return build_pretrained(read_pretrained(path, config), CPU, img_size)


@torch.no_grad()
def features(model: vit.ViTMAE, images: torch.Tensor) -> torch.Tensor:
    patches = vit.patchify(images, model.config.patch)
    return model.encode(patches, torch.arange(patches.shape[1]).expand(len(images), -1))


def in_order(theirs: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Features of transformers' encoder that masks nothing: its noise orders the patches."""
    order = torch.arange((images.shape[3] // 8) ** 2).expand(2, -1)
    return theirs(images, noise=order).last_hidden_state


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# --- the official layout, held against one made of timm's parts


def of_timm_parts(config: vit.ViTConfig) -> nn.Module:
    """A masked autoencoder with the names of the official release."""
    c, norm = config, partial(nn.LayerNorm, eps=1e-6)
    settings = {"embed_dim": c.width, "depth": c.depth, "num_heads": c.heads, "num_classes": 0}
    model = VisionTransformer(
        4 * c.patch, c.patch, mlp_ratio=c.mlp_width / c.width, **settings, norm_layer=norm
    )
    model.mask_token = nn.Parameter(torch.randn(1, 1, c.decoder_width))
    model.decoder_pos_embed = nn.Parameter(torch.randn(1, 17, c.decoder_width))
    model.decoder_embed = nn.Linear(c.width, c.decoder_width)
    sizes = c.decoder_width, c.decoder_heads
    blocks = (Block(*sizes, qkv_bias=True, norm_layer=norm) for _ in range(c.decoder_depth))
    model.decoder_blocks = nn.Sequential(*blocks)
    model.decoder_norm = norm(c.decoder_width)
    model.decoder_pred = nn.Linear(c.decoder_width, 3 * c.patch**2)
    return model.eval()


def decode(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """What the decoder makes of tokens of all patches, and of cls."""
    x = model.decoder_embed(tokens) + model.decoder_pos_embed
    return model.decoder_pred(model.decoder_norm(model.decoder_blocks(x)))[:, 1:]


def test_official_layout(tmp_path, capsys):
    line = converted(NANO, tmp_path, "model.pth", "--to", "official", capsys=capsys)
    (images, _), every = sample(NANO), torch.arange(16).expand(2, -1)
    files = {"model.pth": of_timm_parts(NANO), "back.pth": of_timm_parts(NANO)}
    eval(line, {"torch": torch, "model": files["model.pth"]})
    torch.save({"model": files["back.pth"].state_dict(), "epoch": 3}, tmp_path / "back.pth")
    for name, theirs in files.items():
        ours = build(tmp_path / name, NANO)
        tokens = features(ours, images)
        assert_close(tokens, theirs.forward_features(images))
        assert_close(ours.decode(tokens, every), decode(theirs, tokens))


# --- timm


CASES = [("nano", 4), ("nano", 7), ("channels", 4), ("gated", 4)]  # patches along a side


@pytest.mark.parametrize(("name", "side"), CASES)
def test_timm_layout(name, side, tmp_path, capsys):
    config, file = MODELS[name], f"encoder.{'pth' if name == 'nano' else 'safetensors'}"
    argv = ("--to", "timm", "--img-size", str(8 * side))  # positions are resampled
    line = converted(config, tmp_path, file, *argv, capsys=capsys)
    images, noise = sample(config, side)
    theirs = eval(line, {"timm": timm}).eval()
    ours = build(tmp_path / "source.pth", config, 8 * side)
    assert_close(features(ours, images), theirs.forward_features(images))
    alone = build(tmp_path / file, config)  # with a decoder that has not learned anything
    assert_close(features(alone, images), theirs.forward_features(images))
    assert alone(images, 0.75, noise)[0].isfinite()
    # and back: a classifier's head is left out, and the names are those inside of DDP
    call = line.replace("num_classes=0", "num_classes=10").split(", checkpoint_path")[0] + ")"
    theirs = eval(call, {"timm": timm}).eval()
    weights = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({"state_dict": weights, "arch": "vit"}, tmp_path / "theirs.pth")
    ours = build(tmp_path / "theirs.pth", config)
    assert_close(features(ours, images), theirs.forward_features(images))


@pytest.mark.parametrize(("name", "side"), CASES[:3])
def test_transformers_layout(name, side, tmp_path, capsys):
    config, argv = MODELS[name], ("--to", "transformers", "--img-size", str(8 * side))
    line = converted(config, tmp_path, "folder", *argv, capsys=capsys)
    images, noise = sample(config, side)
    theirs = eval(line, {"transformers": transformers}).eval()
    result = theirs(images, noise=noise)
    for path in tmp_path / "source.pth", tmp_path / "folder":
        loss, pred, mask = build(path, config, 8 * side)(images, 0.75, noise)
        assert_close(loss, result.loss)
        assert_close(pred, result.logits)
        assert torch.equal(mask, result.mask)
    # and back: both classes, in one file and in several
    torch.manual_seed(2)
    theirs = transformers.ViTMAEForPreTraining(theirs.config).eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB" if name == "nano" else "9GB")
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")  # names of version 5's modules
    for path in tmp_path / "theirs", tmp_path / "theirs.pth":
        loss, _, _ = build(path, config)(images, 0.75, noise)
        assert_close(loss, theirs(images, noise=noise).loss)
    theirs.vit.save_pretrained(tmp_path / "encoder")
    again = [str(tmp_path / path) for path in ("encoder", "again")]  # an encoder alone
    assert convert.main([*again, "--to", "transformers"]) == 0
    line = capsys.readouterr().out.splitlines()[1].replace(")", ", mask_ratio=0.0)")
    theirs = eval(line, {"transformers": transformers}).eval()
    for path in again:
        assert_close(features(build(path, config), images), in_order(theirs, images))


# --- what a file says of itself


def test_a_file_says_what_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(vit.MODELS, "nano", NANO)
    path = source(NANO, tmp_path)
    stats = {"channel_mean": [1.0, 2, 3], "channel_std": [4.0, 5, 6], "image_dtype": "uint16"}
    about = stats | {"norm_pix_loss": False, "norm_eps": 1e-12}
    torch.save(torch.load(path) | {"pretrained": about}, path)
    written = {"official": "model.pth", "timm": "encoder.safetensors", "transformers": "folder"}
    for layout, name in written.items():
        assert convert.main([str(path), str(tmp_path / name), "--to", layout]) == 0
        found = read_pretrained(tmp_path / name)
        assert (found.step, found.size, found.config, found.img_size) == (7, "nano", NANO, 32)
        assert found.stats == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "uint16")
        assert (found.norm_pix_loss, found.norm_eps) == (False, 1e-12)
    arguments = argparse.Namespace(norm_pix_loss=False)  # as the official training code saves them
    torch.save({"model": weights_of(NANO), "args": arguments}, tmp_path / "args.pth")
    assert read_pretrained(tmp_path / "args.pth").norm_pix_loss is False


def test_the_size_is_said_by_the_file_or_known_or_asked_for(tmp_path, capsys):
    large = vit.ViTConfig(1024, 24, 4096, 16, 16)
    with torch.device("meta"):
        shapes = vit.ViTMAE(large, 64).state_dict()
    torch.save({n: torch.zeros(1).expand(t.shape) for n, t in shapes.items()}, tmp_path / "l.pth")
    assert read_pretrained(tmp_path / "l.pth").config == large
    argv = [str(source(NANO, tmp_path)), str(tmp_path / "new.pth"), "--to", "official"]
    assert convert.main(argv) == 2
    assert "no known size has width 40 and depth 2" in capsys.readouterr().err
    assert convert.main([*argv, "--model", f"{SIZE},decoder_depth=3"]) == 2
    assert "decoder_blocks.2.norm1.weight is missing" in capsys.readouterr().err
    assert convert.main([*argv, "--model", SIZE]) == 0
    assert read_pretrained(tmp_path / "new.pth").config == NANO


@pytest.mark.parametrize("epsilon", [1e-12, 1e-5])
def test_the_epsilon_of_transformers_norms_is_theirs(epsilon, tmp_path, capsys):
    """With tokens as small as those of a model that has learned nothing."""
    small = ("pos_embed", "cls_token", "patch_embed.")
    weights = {n: t * 0.01 if n.startswith(small) else t for n, t in weights_of(NANO).items()}
    torch.save(weights, tmp_path / "small.pth")
    argv = [str(tmp_path / "small.pth"), str(tmp_path / "theirs"), "--to", "transformers"]
    assert convert.main([*argv, "--model", SIZE]) == 0
    about = tmp_path / "theirs" / "config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"layer_norm_eps": epsilon}))
    theirs = transformers.ViTMAEModel.from_pretrained(about.parent, mask_ratio=0.0).eval()
    images, _ = sample(NANO)
    hidden = in_order(theirs, images)
    assert_close(features(build(about.parent, NANO), images), hidden)
    assert convert.main([str(about.parent), str(tmp_path / "e.pth"), "--to", "timm"]) == 0
    assert f"an epsilon of {epsilon:g}" in capsys.readouterr().err
    assert_close(features(build(tmp_path / "e.pth", NANO), images), hidden)


@pytest.mark.parametrize(
    ("name", "out", "layout", "status", "sentence"),
    [
        ("gated", "folder", "transformers", 2, "gated MLP, which of all layouts only timm has"),
        ("channels", "model.pth", "official", 2, "5 channels, the official release 3"),
        ("nano", "model.safetensors", "official", 2, "name it .pth"),
        ("nano", "source.pth", "official", 2, "source.pth is there already"),
        ("nano", "no/where.pth", "timm", 1, "No such file or directory"),
        *(("nano", "x" * 300, layout, 1, "name too long") for layout in ("timm", "transformers")),
    ],
)
def test_what_cannot_be_written_is_one_sentence(
    name, out, layout, status, sentence, tmp_path, capsys
):
    path = source(MODELS[name], tmp_path)
    before = path.read_bytes()
    argv = [str(path), str(tmp_path / out), "--to", layout, "--model", size(MODELS[name])]
    assert convert.main(argv) == status
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("convert.py: error: ") and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["source.pth"] and path.read_bytes() == before


@pytest.mark.parametrize("out", ["model.pth", "encoder.safetensors", "folder"])
def test_a_full_disk_is_one_sentence(out, tmp_path, capsys):
    layout = {"model.pth": "official", "folder": "transformers"}.get(out, "timm")
    argv = [str(source(NANO, tmp_path)), str(tmp_path / out), "--to", layout, "--model", SIZE]
    with files_limited():
        assert convert.main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("convert.py: error: ") and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["source.pth"]


def test_safetensors_is_asked_for_where_it_is_needed(tmp_path, capsys, monkeypatch):
    converted(NANO, tmp_path, "folder", "--to", "transformers", capsys=capsys)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setattr("convert.find_spec", lambda name: None)
    for name, out, layout in ("folder", "a", "official"), ("source.pth", "b", "transformers"):
        argv = [str(tmp_path / name), str(tmp_path / out), "--to", layout, "--model", SIZE]
        assert convert.main(argv) == 2
        assert "needs the package safetensors: pip install" in capsys.readouterr().err


# --- files that are wrong, or hostile


class Code:
    def __reduce__(self):
        return os.system, ("touch ran",)


def save(path: Path, content: dict | str) -> None:
    """Write weights of `nano` with this changed, or a folder with this config.json."""
    if isinstance(content, dict):
        weights = weights_of(NANO) | content
        torch.save({"pretrained": weights.pop("note", {}), "model": weights}, path)
    else:
        path.mkdir()
        os.mkfifo(path / "config.json") if not content else None
        (path / "config.json").write_text(content) if content else None


MEAN = {"channel_mean": [1.0, torch.nan, 1.0], "channel_std": [1.0] * 3, "image_dtype": "uint8"}
FORTY = torch.zeros(40)
WRONG = {
    "code": ({"cls_token": Code()}, "asks for posix.system"),
    "a number": ({"cls_token": 3}, "'cls_token' is a int, not a tensor"),
    "LayerScale": ({"blocks.0.ls1.gamma": FORTY}, "gamma is .* LayerScale"),
    "fc_norm": ({"fc_norm.bias": FORTY}, "fc_norm.bias is .* classifier"),
    "registers": ({"reg_token": FORTY}, "reg_token is .* register tokens"),
    "a shape": ({"norm.bias": FORTY[1:]}, r"norm.bias is \(39,\), \(40,\) in the model"),
    "NaN": ({"norm.bias": FORTY * torch.nan}, "norm.bias is not finite"),
    "NaN statistics": ({"note": MEAN}, "channel_mean is not 3 finite numbers"),
    "a FIFO": ("", "no checkpoint in it can be read"),
    "a list": ("[1]", "config.json is no JSON object"),
    "another model": ('{"model_type": "bert"}', "is of bert with gelu, not of vit_mae"),
    "no width": ('{"model_type": "vit_mae"}', "hidden_size is missing"),
}


@pytest.mark.parametrize("what", [*WRONG, "truncated"])
def test_a_wrong_file_is_one_sentence_that_names_the_fault(what, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, sentence = WRONG.get(what, ({}, "no weights that run no code"))
    path = tmp_path / "model.pth"
    save(path, content)
    if what == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    assert convert.main([str(path), "out.pth", "--to", "official", "--model", SIZE]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"convert.py: error: {path}: ") and error.count("\n") == 1
    assert re.search(sentence, error) and [*tmp_path.iterdir()] == [path]


# --- --init-from


def train(out: Path, init: Path, *argv: str) -> Run:
    """A step with a learning rate of 0: the parameters stay as they begin."""
    common = "--model nano --img-size 32 --global-batch 4 --workers 0 --precision fp32 --blr 0"
    flags = f"{common} --device cpu --save-every 1 --data {ROOT / 'examples/tiles/train'}".split()
    return Run([*flags, "--init-from", str(init), *argv], to=str(out))


def test_a_run_begins_with_any_layout_and_a_wrong_file_is_refused_before(tmp_path, monkeypatch):
    """A resumed run needs the flag, but not the file."""
    monkeypatch.setitem(vit.MODELS, "nano", NANO)
    weights, (a, b, c) = weights_of(NANO), (tmp_path / name for name in "abc")
    pretrained = Pretrained("x", NANO, 32, True, data.IMAGENET, weights)
    convert.write_pretrained(pretrained, tmp_path / "hf", "transformers")
    convert.write_pretrained(pretrained, tmp_path / "timm.pth", "timm", img_size=40)
    save(tmp_path / "heads", {"note": {"config": asdict(NANO) | {"heads": 5}}})
    save(tmp_path / "nan", {"norm.bias": FORTY * torch.nan})
    runs = [
        train(a, tmp_path / "hf", "--mode", "full_shard", "--steps", "1"),
        train(b, tmp_path / "timm.pth", "--mode", "hybrid", "--fsdp", "1", "--steps", "1"),
        train(c, a, "--mode", "ddp", "--steps", "1"),
    ]
    wrong = {
        "heads": "has 5 heads, the model 4",
        "nan": "nan: norm.bias is not finite",
        "no": "there is no",
    }
    refused = [train(tmp_path / f"out-{name}", tmp_path / name) for name in wrong]
    found = run_ranks(2, [*runs, *refused], tmp_path / "ranks")
    for result, whole in zip(found, (True, False, True), strict=False):
        assert result.status == [0, 0] and result.replicas_differ == 0, result.errors
        for name, p in result.params.items():
            drawn = not whole and name.startswith(("decoder", "mask"))
            begin = vit.initial_value(NANO, name, p.shape) if drawn else weights[name]
            assert torch.equal(p, begin), name
    for result, sentence in zip(found[3:], wrong.values(), strict=True):
        assert result.status == [2, 2] and not result.steps and "Traceback" not in result.errors
        assert "--init-from: " in result.errors and sentence in result.errors
    shutil.rmtree(tmp_path / "hf")
    runs = [train(a, tmp_path / "hf", "--steps", "2", "--allow-changes"), train(a, b)]
    again, other = run_ranks(1, runs, tmp_path / "again")
    assert again.status == [0] and again.start["begin"] == 1
    assert torch.equal(again.params["norm.bias"], weights["norm.bias"])
    assert other.status == [2] and "init_from" in other.errors and "--allow-changes" in other.errors
