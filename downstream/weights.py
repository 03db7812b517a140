"""Read the weights of a pretrained model, whatever wrote them, and what it was trained on.

That is a run or a checkpoint of train_fsdp.py, a file of the official MAE, timm or convert.py, a
folder of transformers. No code in a file is run. The official release and timm's `vit_*` have the
names of vit.ViTMAE; transformers' ViTMAE has others, and q, k and v as three matrices.
"""

import argparse
import json
import math
import pickle
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import checkpoint
import data
import vit
from runtime.config import model_config

DECODER = ("decoder_", "mask_token")  # how the names of a decoder's weights begin
NOTE = "pretrained"  # the key in a file of what convert.py says of a model
NORM_EPS = 1e-6  # of vit.ViTMAE and of the official release; transformers' default is 1e-12
OFFICIAL_LARGE = vit.ViTConfig(1024, 24, 4096, 16, 16)  # released too, but no row of vit.MODELS

# Names of ours and of transformers' files: parts, replaced from the first to the last.
NAMES = (
    ("cls_token", "vit.embeddings.cls_token"),
    ("pos_embed", "vit.embeddings.position_embeddings"),
    ("patch_embed.proj", "vit.embeddings.patch_embeddings.projection"),
    ("blocks.", "vit.encoder.layer."),
    ("norm.", "vit.layernorm."),
    ("mask_token", "decoder.mask_token"),
    ("decoder_blocks.", "decoder_layers."),
    ("decoder_", "decoder.decoder_"),
    ("norm1.", "layernorm_before."),
    ("norm2.", "layernorm_after."),
    *((f"attn.{p[0]}.", f"attention.attention.{p}.") for p in ("query", "key", "value")),
    ("attn.proj.", "attention.output.dense."),
    ("mlp.fc1.", "intermediate.dense."),
    ("mlp.fc2.", "output.dense."),
)
# Fields of vit.ViTConfig in config.json of transformers.
CONFIG = {"width": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads"}
CONFIG |= {f"decoder_{ours}": f"decoder_{theirs}" for ours, theirs in CONFIG.items()}
CONFIG |= {"mlp_width": "intermediate_size", "patch": "patch_size", "channels": "num_channels"}
Shapes = dict[str, tuple[int, ...]]  # by the names of weights


@dataclass(frozen=True)
class Pretrained:
    """Hold the whole weights of one model on the CPU, and what they were trained on."""

    name: str  # the path that was read
    config: vit.ViTConfig
    img_size: int
    norm_pix_loss: bool
    mask_ratio: float
    stats: data.ChannelStats  # by which its images were normalised
    weights: Mapping[str, Tensor]  # by the names of vit.ViTMAE; an encoder alone has no decoder's
    step: int | None  # optimizer steps trained; None: not known

    @property
    def has_decoder(self) -> bool:
        return "decoder_pred.weight" in self.weights


def read_pretrained(path: str | Path, size: vit.ViTConfig | None = None) -> Pretrained:
    """Read a run (its newest checkpoint), one checkpoint, or weights in another layout.

    Tensors are read when they are used. `size` is that of the model where a file does not say.
    ValueError or OSError, one sentence, where there is no such model, or a weight is not finite.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there is no {path}: give the --out of a run, a checkpoint, or weights")
    try:
        of_run = path.is_dir() and not (path / "config.json").exists()
        weights, said = _read_run(path) if of_run else _read_file(path)
        shapes: Shapes = {}
        for name, tensor in weights.items():
            shapes[name] = tuple(tensor.shape)
            if not tensor.isfinite().all():
                raise ValueError(f"{name} is not finite")
        config = _config_of(shapes, said, size)
        stats = _stats_of(said, config.channels)
        img_size = math.isqrt(shapes["pos_embed"][1] - 1) * config.patch
        _check_shapes(shapes, config, img_size)
    except (OSError, checkpoint.Damaged):
        raise
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None
    except Exception as error:  # of any kind: a file may contain anything
        what = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path}: {what}") from None
    task = said.get("norm_pix_loss", True), said.get("mask_ratio", 0.75)  # as in MAE
    return Pretrained(str(path), config, img_size, *task, stats, weights, said.get("step"))


def _config_of(shapes: Shapes, said: dict[str, Any], size: vit.ViTConfig | None) -> vit.ViTConfig:
    """Return the configuration that is said, or a known one of these shapes: none tells heads."""
    if "config" in said:
        return vit.ViTConfig(**said["config"])
    width, channels, patch, _ = shapes["patch_embed.proj.weight"]
    depth = sum(bool(re.fullmatch(r"blocks\.\d+\.norm1\.weight", name)) for name in shapes)
    for row in *vit.MODELS.values(), OFFICIAL_LARGE:
        if (row.width, row.depth) == (width, depth):
            size = size or row
    if not size:
        advice = "`python convert.py --model` writes a file that says its size"
        raise ValueError(f"no known size has width {width} and depth {depth}: {advice}")
    return replace(size, patch=patch, channels=channels)


def _stats_of(said: dict[str, Any], channels: int) -> data.ChannelStats:
    """Return the statistics that are said; without any, ImageNet's for three channels, or none."""
    if not said.get("channel_mean"):
        none = (0.0,) * channels, (1.0,) * channels, "float32"
        return data.IMAGENET if channels == 3 else data.ChannelStats(*none)
    mean, std = tuple(said["channel_mean"]), tuple(said["channel_std"])
    if not all(map(math.isfinite, mean + std)):
        raise ValueError("the mean or deviation of a channel is not finite")
    return data.ChannelStats(mean, std, said["image_dtype"])


def _check_shapes(shapes: Shapes, config: vit.ViTConfig, img_size: int) -> None:
    """Raise ValueError unless they are those of a model, perhaps without a decoder."""
    with torch.device("meta"):
        wants = vit.ViTMAE(config, img_size).state_dict()
    if unknown := sorted(shapes.keys() - wants.keys()):
        what = "this model, which has no classifier, LayerScale or register tokens"
        raise ValueError(f"{unknown[0]} is no weight of {what}")
    for name, tensor in wants.items():
        found, value = shapes.get(name, "missing"), tuple(tensor.shape)
        if found != value and ("decoder_pred.weight" in shapes or not name.startswith(DECODER)):
            raise ValueError(f"{name} is {found}, {value} in the model")


# --- Checkpoints of train_fsdp.py


def _read_run(run: Path) -> tuple[checkpoint.Weights, dict[str, Any]]:
    """Open a checkpoint, or the newest one of a run -> its weights and flags."""
    single = (run / checkpoint.MANIFEST).exists()
    folders = [run] if single else checkpoint.list_checkpoints(run)
    if not folders:
        raise ValueError("it contains no step_... and no config.json")
    weights = checkpoint.Weights(folders[-1])
    flags = weights.manifest["flags"]
    config = replace(model_config(flags["model"]), channels=flags["channels"])
    return weights, flags | {"config": asdict(config), "step": weights.manifest["step"]}


# --- Files of others


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file or a folder -> weights by our names, and what it says of them."""
    files, weights, about = [path], dict[str, Tensor](), dict[str, Any]()
    if path.is_dir():
        about = _read_config(path / "config.json")
        files = [*path.glob("model*.safetensors")] or [*path.glob("pytorch_model*.bin")]
    for file in files:
        read = _read_safetensors if file.suffix == ".safetensors" else _read_torch
        tensors, said = read(file)
        weights, about = weights | tensors, said | about
    weights = {n.removeprefix("module."): t for n, t in weights.items()}  # as DDP names them
    weights = {n: t for n, t in weights.items() if not n.startswith("head.")}
    if any(name.endswith("embeddings.cls_token") for name in weights):
        weights = from_transformers(weights)
    return weights, about


def _read_torch(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of torch.save -> its tensors by name, and what it says of them."""
    try:  # the official training code saves its arguments, a Namespace
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (EOFError, RuntimeError, pickle.UnpicklingError):
        why = "it is damaged, of an old format, or contains more than weights"
        raise ValueError(f"torch.load(weights_only=True, mmap=True) refuses it: {why}") from None
    weights = found.get("model") or found.get("state_dict") or found  # the official code, timm
    args = getattr(found.get("args"), "__dict__", {})
    own = {key: args[key] for key in ("norm_pix_loss", "mask_ratio") if key in args}
    return weights, {"step": found.get("step")} | own | found.get(NOTE, {})


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return weights, json.loads((file.metadata() or {}).get(NOTE, "{}"))


def _read_config(path: Path) -> dict[str, Any]:
    """Read config.json of transformers -> what it says, in the words of convert.py's files."""
    config = json.loads(path.read_bytes())
    if not isinstance(config, dict) or config.get("model_type") != "vit_mae":
        raise ValueError(f"{path.name} is not of a vit_mae model")
    if (epsilon := config.get("layer_norm_eps", 1e-12)) != NORM_EPS:
        what = f"the norms of {path.parent} have an epsilon of {epsilon:g}, here {NORM_EPS:g}"
        print(f"warning: {what}: features may differ by 2e-3", file=sys.stderr)
    about = {ours: config[theirs] for ours, theirs in CONFIG.items()}
    return {"norm_pix_loss": False} | config | {"config": about}  # transformers' default


def from_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' ViTMAE, and join q, k, v; KeyError where one misses."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        name = name if name.startswith(("vit.", "decoder.")) else f"vit.{name}"  # ViTMAEModel
        name = name.replace("decoder_encoder.layer.", "decoder_layers.")  # since transformers 5
        for ours, theirs in NAMES:
            name = re.sub(rf"\b{re.escape(theirs)}", ours, name)
        found[name] = tensor
    for name in [name for name in found if ".attn.q." in name]:
        parts = [name.replace(".q.", f".{part}.") for part in "qkv"]
        found[name.replace(".q.", ".qkv.")] = torch.cat([found.pop(part) for part in parts])
    return found


# --- A model with these weights


def random_weights(like: Pretrained, seed: int = 0) -> Pretrained:
    """Draw the initial values of a model that has not learned anything: the baseline of a score."""
    model = vit.ViTMAE(like.config, like.img_size)
    vit.initialize(model, seed)
    return replace(like, weights=model.state_dict(), step=0)


def resize_positions(table: Tensor, side: int) -> Tensor:
    """Resample positions (1, 1+L, D) to side*side patches, bicubic (arXiv 2010.11929, 3.2)."""
    old = math.isqrt(table.shape[1] - 1)
    if old == side:
        return table
    grid = table[:, 1:].float().reshape(1, old, old, -1).permute(0, 3, 1, 2)  # (1, D, old, old)
    grid = F.interpolate(grid, (side, side), mode="bicubic", antialias=True)
    return torch.cat([table[:, :1], grid.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)


def check_fits(pretrained: Pretrained, config: vit.ViTConfig) -> None:
    """Raise ValueError unless these weights fit a model, perhaps without a decoder."""
    for name, value in vars(config).items():
        own = getattr(pretrained.config, name)
        if own != value and (pretrained.has_decoder or not name.startswith(DECODER)):
            raise ValueError(f"{pretrained.name}: {name} is {own}, {value} in the model")


def value_of(pretrained: Pretrained, name: str, shape: torch.Size, seed: int = 0) -> Tensor:
    """Return one weight of a model that `check_fits`; a decoder that misses is drawn by `seed`."""
    if name.startswith(DECODER) and not pretrained.has_decoder:
        return vit.initial_value(pretrained.config, name, shape, seed)
    value = pretrained.weights[name]
    return resize_positions(value, math.isqrt(shape[1] - 1)) if "pos_embed" in name else value


def build_pretrained(
    pretrained: Pretrained, device: torch.device, img_size: int | None = None
) -> vit.ViTMAE:
    """Build the whole model with these weights on one device, for images of `img_size` pixels.

    ValueError where patches do not fill the image.
    """
    p = pretrained
    with torch.device("meta"):
        model = vit.ViTMAE(p.config, img_size or p.img_size, p.norm_pix_loss)
    model.to_empty(device=device)
    for name, own in model.state_dict().items():  # one at a time: no second whole model
        own.copy_(value_of(p, name, own.shape))
    return model.eval()
