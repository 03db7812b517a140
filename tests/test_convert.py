"""Weights of any checkpoint, and their exchange: verified by the code of timm and transformers."""

import argparse
import json
import os
import re
import shutil
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import transformers
from ranks import NANO, NANO_ARGV, Run, files_limited, run_ranks
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

import checkpoint
import convert
import data
import vit
from runtime.pretrained import build_pretrained, random_weights, read_pretrained

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


def write_source(config: vit.ViTConfig = NANO, **said) -> None:
    """A file that says of which size its weights are."""
    about = {"config": asdict(config), "step": 7} | said
    torch.save({"model": weights_of(config), "pretrained": about}, "source.pth")


def converted(capsys, *argv: str) -> str:
    """Convert; the last line that is printed, which for timm loads the result."""
    assert convert.main(argv) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()[-1]


def sample(config: vit.ViTConfig) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, config.channels, 32, 32), torch.rand(2, 16)


def build(path: str, config: vit.ViTConfig | None = None, img_size: int | None = None):
    return build_pretrained(read_pretrained(path, config), torch.device("cpu"), img_size)


@torch.no_grad()
def features(model: vit.ViTMAE, images: torch.Tensor) -> torch.Tensor:
    return model.features(images)


def in_order(theirs: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Features of transformers' encoder that masks nothing: its noise orders the patches."""
    order = torch.arange((images.shape[3] // 8) ** 2).expand(2, -1)
    return theirs(images, noise=order).last_hidden_state


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# --- checkpoints of runs


def test_the_newest_checkpoint_of_a_run_is_the_model_that_was_trained(run):
    out, params = run
    for path in out, out / "step_00000002":
        found, model = read_pretrained(path), build(path)
        assert (found.step, found.img_size, found.stats) == (2, 32, data.IMAGENET)
        assert {name for name, _ in model.named_parameters()} == params.keys()
        for name, p in model.named_parameters():
            assert torch.equal(p, params[name]), name
        assert torch.equal(model.pos_embed, vit.sincos_positions(40, 4))
    assert read_pretrained(out / "step_00000001").step == 1
    for name, p in vit.ViTMAE(NANO, 32).named_parameters():
        assert torch.equal(random_weights(found).weights[name], p), name


def test_a_damaged_checkpoint_and_none_are_one_sentence(run):
    out = shutil.copytree(run[0], Path("out"))
    shards = sorted((out / "step_00000002").glob("*.distcp"))
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    for path in out, out / "step_00000002":
        with pytest.raises(
            checkpoint.CorruptCheckpointError, match="out/step_00000002: checksum mismatch"
        ):
            read_pretrained(path)
    for path in out.glob("step_*"):
        shutil.rmtree(path)
    with pytest.raises(ValueError, match="it contains no step_"):
        read_pretrained(out)
    with pytest.raises(ValueError, match="give the --out of a run"):
        read_pretrained("nowhere")


def test_positions_are_resampled_as_by_timm(run):
    model = build(run[0], img_size=56)
    theirs = resample_abs_pos_embed(vit.sincos_positions(40, 4), [7, 7])
    torch.testing.assert_close(model.pos_embed, theirs, rtol=0, atol=1e-6)
    assert model(torch.zeros(1, 3, 56, 56))[0].isfinite()


# --- the three layouts


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
    return model.eval()


def test_official_layout(capsys):
    """Held against the names of the release, on blocks of timm."""
    write_source()
    converted(capsys, "source.pth", "model.pth", "--to", "official")
    (images, _), every = sample(NANO), torch.arange(16).expand(2, -1)
    files = {"model.pth": of_timm_parts(), "back.pth": of_timm_parts()}
    files["model.pth"].load_state_dict(torch.load("model.pth", weights_only=True)["model"])
    torch.save({"model": files["back.pth"].state_dict(), "epoch": 3}, "back.pth")
    for name, theirs in files.items():
        tokens = features(build(name), images)
        assert_close(tokens, theirs.forward_features(images))
        x = theirs.decoder_embed(tokens) + theirs.decoder_pos_embed
        predicted = theirs.decoder_pred(theirs.decoder_norm(theirs.decoder_blocks(x)))[:, 1:]
        assert_close(build(name).decode(tokens, every), predicted)


@pytest.mark.parametrize("name", MODELS)
def test_timm_layout(name, capsys):
    config, file = MODELS[name], f"encoder.{'pth' if name == 'nano' else 'safetensors'}"
    write_source(config)
    line = converted(capsys, "source.pth", file, "--to", "timm")
    images, noise = sample(config)
    theirs = eval(line, {"timm": timm}).eval()
    assert_close(features(build("source.pth"), images), theirs.forward_features(images))
    alone = build(file)  # with a decoder that has not learned anything
    assert_close(features(alone, images), theirs.forward_features(images))
    assert alone(images, 0.75, noise)[0].isfinite()
    # and back: a classifier's head is left out, and the names are those inside of DDP
    call = line.replace("num_classes=0", "num_classes=10").split(", checkpoint_path")[0] + ")"
    theirs = eval(call, {"timm": timm}).eval()
    weights = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({"state_dict": weights, "arch": "vit"}, "theirs.pth")
    assert_close(features(build("theirs.pth", config), images), theirs.forward_features(images))


@pytest.mark.parametrize("name", ["nano", "channels"])
def test_transformers_layout(name, capsys):
    config = MODELS[name]
    write_source(config)
    converted(capsys, "source.pth", "folder", "--to", "transformers")
    images, noise = sample(config)
    theirs = transformers.ViTMAEForPreTraining.from_pretrained("folder").eval()
    result = theirs(images, noise=noise)
    for path in "source.pth", "folder":
        loss, pred, mask = build(path)(images, 0.75, noise)
        assert_close(loss, result.loss)
        assert_close(pred, result.logits)
        assert torch.equal(mask, result.mask)
    # and back: both classes, in one file and in several
    torch.manual_seed(2)
    theirs = transformers.ViTMAEForPreTraining(theirs.config).eval()
    theirs.save_pretrained("theirs", max_shard_size="30KB" if name == "nano" else "9GB")
    loss, _, _ = build("theirs")(images, 0.75, noise)
    assert_close(loss, theirs(images, noise=noise).loss)
    theirs.vit.save_pretrained("encoder")  # an encoder alone
    converted(capsys, "encoder", "again", "--to", "transformers")
    theirs = transformers.ViTMAEModel.from_pretrained("again", mask_ratio=0.0).eval()
    for path in "encoder", "again":
        assert_close(features(build(path), images), in_order(theirs, images))


# --- what a file says of itself


def test_a_file_says_what_it_is(capsys):
    stats = {"channel_mean": [1.0, 2, 3], "channel_std": [4.0, 5, 6], "image_dtype": "uint16"}
    write_source(**stats, norm_pix_loss=False, mask_ratio=0.6)
    written = {"official": "model.pth", "timm": "encoder.safetensors", "transformers": "folder"}
    for layout, name in written.items():
        converted(capsys, "source.pth", name, "--to", layout)
        found = read_pretrained(name)
        assert (found.step, found.config, found.img_size) == (7, NANO, 32)
        assert found.stats == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "uint16")
        assert (found.norm_pix_loss, found.mask_ratio) == (False, 0.6)
    theirs = transformers.ViTMAEConfig.from_pretrained("folder")
    assert (theirs.norm_pix_loss, theirs.mask_ratio) == (False, 0.6)
    # As the official training code saves them:
    arguments = argparse.Namespace(norm_pix_loss=False, mask_ratio=0.6)
    torch.save({"model": weights_of(), "args": arguments}, "args.pth")
    found = read_pretrained("args.pth")
    assert (found.norm_pix_loss, found.mask_ratio) == (False, 0.6)


def test_a_size_that_is_not_known_is_asked_for(capsys):
    thin = replace(NANO, depth=1)
    torch.save(weights_of(thin), "thin.pth")
    argv = ["thin.pth", "new.pth", "--to", "official"]
    for more, sentence in (
        ([], "no known size has width 40 and depth 1"),
        (["--model", "nano:depth=1,decoder_depth=3"], "decoder_blocks.2.norm1.weight is missing"),
    ):
        assert convert.main([*argv, *more]) == 2
        assert sentence in capsys.readouterr().err
    assert convert.main([*argv, "--model", "nano:depth=1"]) == 0
    assert read_pretrained("new.pth").config == thin


def test_another_epsilon_of_the_norms_is_a_warning(capsys):
    write_source()
    converted(capsys, "source.pth", "theirs", "--to", "transformers")
    about = Path("theirs", "config.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"layer_norm_eps": 1e-12}))
    assert convert.main(["theirs", "e.pth", "--to", "timm"]) == 0
    assert "the norms of theirs have an epsilon of 1e-12, here 1e-06" in capsys.readouterr().err


# --- what cannot be written, or read


FULL = "File too large"  # as on a full disk


@pytest.mark.parametrize(
    ("name", "out", "layout", "status", "sentence"),
    [
        ("gated", "folder", "transformers", 2, "a gated MLP, which only timm has"),
        ("nano", "source.pth", "official", 2, "source.pth is there already"),
        ("nano", "no/where.pth", "timm", 1, "No such file or directory"),
        ("nano", "x" * 300, "transformers", 1, "name too long"),
        ("nano", "model.pth", "official", 1, FULL),
        ("nano", "encoder.safetensors", "timm", 1, FULL),
        ("nano", "folder", "transformers", 1, FULL),
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


def save(path: Path, content: dict | str) -> None:
    """Write weights of `nano` with this changed, or a folder with this config.json."""
    if isinstance(content, dict):
        weights = weights_of() | content
        torch.save({"pretrained": weights.pop("note", {}), "model": weights}, path)
    else:
        path.mkdir()
        (path / "config.json").write_text(content)


MEAN = {"channel_mean": [1.0, torch.nan, 1.0], "channel_std": [1.0] * 3, "image_dtype": "uint8"}
WRONG = {
    "code": ({"cls_token": Code()}, "contains more than weights"),
    "a number": ({"cls_token": 3}, "'int' object has no attribute"),
    "LayerScale": ({"blocks.0.ls1.gamma": FORTY}, "gamma is no .* LayerScale"),
    "fc_norm": ({"fc_norm.bias": FORTY}, "fc_norm.bias is no .* classifier"),
    "registers": ({"reg_token": FORTY}, "reg_token is no .* register tokens"),
    "a shape": ({"norm.bias": FORTY[1:]}, r"norm.bias is \(39,\), \(40,\) in the model"),
    "NaN": ({"norm.bias": FORTY * torch.nan}, "norm.bias is not finite"),
    "NaN statistics": ({"note": MEAN}, "the mean or deviation of a channel is not finite"),
    "another model": ('{"model_type": "bert"}', "config.json is not of a vit_mae model"),
    "no width": ('{"model_type": "vit_mae", "layer_norm_eps": 1e-6}', "hidden_size is missing"),
}


@pytest.mark.parametrize("what", [*WRONG, "truncated"])
def test_a_wrong_file_is_one_sentence_that_names_the_fault(what, capsys):
    content, sentence = WRONG.get(what, ({}, "refuses it: it is damaged"))
    path = Path("model.pth")
    save(path, content)
    if what == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    assert convert.main([str(path), "out.pth", "--to", "official"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("convert.py: error: model.pth: ") and error.count("\n") == 1
    assert re.search(sentence, error) and os.listdir() == ["model.pth"]


# --- --init-from


def train(out: Path, init: Path, *argv: str) -> Run:
    """A step with a learning rate of 0: the parameters stay as they begin."""
    flags = [*NANO_ARGV, "--blr", "0", "--save-every", "1", "--init-from", str(init)]
    return Run([*flags, *argv], to=str(out))


@pytest.mark.full
def test_a_run_begins_with_any_layout_and_a_wrong_file_is_refused_before(tmp_path, capsys):
    """A resumed run needs the flag, but not the file."""
    weights, (a, b, c) = weights_of(), (tmp_path / name for name in "abc")
    write_source()
    converted(capsys, "source.pth", "hf", "--to", "transformers")
    converted(capsys, "source.pth", "timm.pth", "--to", "timm")
    save(tmp_path / "heads", {"note": {"config": asdict(NANO) | {"heads": 5}}})
    save(tmp_path / "nan", {"norm.bias": FORTY * torch.nan})
    runs = [
        train(a, tmp_path / "hf", "--mode", "full_shard", "--steps", "1"),
        train(b, tmp_path / "timm.pth", "--mode", "hybrid", "--fsdp", "1", "--steps", "1"),
        train(c, a, "--mode", "ddp", "--steps", "1"),
    ]
    wrong = {
        "heads": "heads is 5, 4 in the model",
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
        assert sentence in result.errors
    shutil.rmtree(tmp_path / "hf")
    runs = [train(a, tmp_path / "hf", "--steps", "2", "--allow-changes"), train(a, b)]
    again, other = run_ranks(1, runs, tmp_path / "again")
    assert again.status == [0] and again.start["begin"] == 1
    assert torch.equal(again.params["norm.bias"], weights["norm.bias"])
    assert other.status == [2] and "init_from" in other.errors and "--allow-changes" in other.errors
