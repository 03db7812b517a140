"""Open the weights that other programs have saved, and read what they say of them.

A file of the official MAE, of timm or of convert.py, a folder of transformers or of timm's
`save_for_hf`. No code in a file is run. Where a configuration asks for something that vit.ViTMAE
does not have, and that the shapes of the weights do not show, it is refused by name.
"""

import argparse
import json
import pickle
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import data
import vit
from runtime.config import model_config

NOTE = "pretrained"  # the key in a file under which convert.py describes the model
NORM_EPS = 1e-6  # of vit.ViTMAE and of the official release; transformers' default is 1e-12
LARGEST_EPS = 1e-5  # beyond it features are not those of the model that was trained

# Our names and those in transformers' files: parts of names, replaced from the first to the last.
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
    ("attn.q.", "attention.attention.query."),
    ("attn.k.", "attention.attention.key."),
    ("attn.v.", "attention.attention.value."),
    ("attn.proj.", "attention.output.dense."),
    ("mlp.fc1.", "intermediate.dense."),
    ("mlp.fc2.", "output.dense."),
)
# Fields of vit.ViTConfig and their keys in a config.json of transformers.
CONFIG = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "patch": "patch_size",
    "channels": "num_channels",
    "decoder_width": "decoder_hidden_size",
    "decoder_depth": "decoder_num_hidden_layers",
    "decoder_heads": "decoder_num_attention_heads",
}
# What vit.ViTMAE can be, of what these configurations can say: the first value is the default.
TRANSFORMERS_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", "gelu_python"),  # the same function; the other GELUs are approximations
    "qkv_bias": (True,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "auto_map": (None,),  # a model with code of its own
}
TIMM_VALUES: dict[str, tuple[Any, ...]] = {
    "act_layer": (None, "gelu"),
    "attn_layer": (None, "", "attn"),
    "block_fn": (None,),
    "class_token": (True,),
    "embed_layer": (None,),
    "embed_norm_layer": (None,),
    "fc_norm": (None, False),
    "final_norm": (True,),
    "init_values": (None,),
    "mlp_layer": (None,),
    "no_embed_class": (False,),
    "norm_layer": (None,),
    "pool_include_prefix": (False,),
    "pos_embed": ("learn",),
    "pre_norm": (False,),
    "proj_bias": (True,),
    "qk_norm": (False,),
    "qkv_bias": (True,),
    "reg_tokens": (0,),
    "scale_attn_norm": (False,),
    "scale_mlp_norm": (False,),
}


@dataclass
class Facts:
    """What a file or a folder says of its weights; None where it says nothing."""

    config: vit.ViTConfig | None = None
    heads: int | None = None  # of the encoder, where the whole configuration is not said
    image_size: tuple[int, int] | None = None  # height and width in pixels
    norm_pix_loss: bool | None = None
    mask_ratio: float | None = None
    stats: data.ChannelStats | None = None  # by which the images were normalised
    step: int | None = None  # optimizer steps trained

    def add(self, other: "Facts") -> None:
        """Take over what is not known yet."""
        for field in fields(self):
            if getattr(self, field.name) is None:
                setattr(self, field.name, getattr(other, field.name))


def facts_of(said: Mapping[str, Any]) -> Facts:
    """Return the facts in a note of convert.py, or in the flags of a run; ValueError."""
    facts = Facts(
        norm_pix_loss=said.get("norm_pix_loss"),
        mask_ratio=said.get("mask_ratio"),
        step=said.get("step"),
    )
    if "config" in said:
        facts.config = vit.ViTConfig(**said["config"])
    elif "model" in said:  # the flags of a run
        facts.config = replace(model_config(said["model"]), channels=said["channels"])
        facts.image_size = pair_of(said["img_size"])
    if said.get("channel_mean"):
        mean = tuple(said["channel_mean"])
        std = tuple(said["channel_std"])
        facts.stats = data.ChannelStats(mean, std, said["image_dtype"])
    return facts


def note_of(facts: Facts) -> dict[str, Any]:
    """Return the note that `facts_of` reads, as JSON takes it."""
    note: dict[str, Any] = {"step": facts.step}
    if facts.config:
        note["config"] = asdict(facts.config)
    if facts.norm_pix_loss is not None:
        note["norm_pix_loss"] = facts.norm_pix_loss
    if facts.mask_ratio is not None:
        note["mask_ratio"] = facts.mask_ratio
    if facts.stats:
        note["channel_mean"] = facts.stats.mean
        note["channel_std"] = facts.stats.std
        note["image_dtype"] = facts.stats.dtype
    return note


# --- Files


def read_weight_file(path: Path) -> tuple[dict[str, Tensor], Facts]:
    """Read a file or a folder -> weights by the names of vit.ViTMAE, and what is said of them.

    ValueError, OSError, or what reading a file of other content raises.
    """
    facts = Facts()
    files = [path]
    if path.is_dir():
        facts = read_config(path)
        files = list_weight_files(path)
    weights: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors, said = read_safetensors(file)
        else:
            tensors, said = read_torch_file(file)
        weights.update(tensors)
        facts.add(said)
    weights = clean_names(weights)
    if any(name.endswith("embeddings.cls_token") for name in weights):
        if facts.config is None:  # neither a config.json nor a note of convert.py
            what = f"the folder {path.parent}, whose config.json says what the model is"
            raise ValueError(f"its weights have transformers' names: give {what}")
        weights = from_transformers(weights)
    return weights, facts


def list_weight_files(folder: Path) -> list[Path]:
    """List the files that hold a folder's weights, as transformers and timm choose them.

    One file before its shards, safetensors before torch.save; other files, such as
    model.fp16.safetensors or shards of an earlier save, are not read. ValueError where there is
    none.
    """
    for name in "model.safetensors", "pytorch_model.bin":
        single = folder / name
        if single.exists():
            return [single]
        index = folder / f"{name}.index.json"
        if index.exists():
            shards = json.loads(index.read_bytes())["weight_map"].values()
            return [folder / shard for shard in sorted(set(shards))]
    raise ValueError("it contains no model.safetensors and no pytorch_model.bin, nor their index")


def read_torch_file(path: Path) -> tuple[dict[str, Tensor], Facts]:
    """Read a file of torch.save -> its tensors by name, and what it says of them.

    Where it has a moving average of the weights too, that is read, as timm does.
    """
    try:  # the official training code saves its arguments, a Namespace
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (EOFError, RuntimeError, pickle.UnpicklingError):
        why = "it is damaged, of an old format, or contains more than weights"
        raise ValueError(f"torch.load(weights_only=True, mmap=True) refuses it: {why}") from None
    weights = found
    for key in "state_dict_ema", "model_ema", "state_dict", "model":
        if found.get(key):
            weights = found[key]
            break
    facts = facts_of(found.get(NOTE, {}))
    if "run_state" in found:  # of `checkpoint.py consolidate`
        facts.add(facts_of(found["run_state"].get("flags", {})))
    arguments = getattr(found.get("args"), "__dict__", {})
    norm_pix_loss = arguments.get("norm_pix_loss")
    mask_ratio = arguments.get("mask_ratio")
    facts.add(Facts(norm_pix_loss=norm_pix_loss, mask_ratio=mask_ratio))
    facts.add(Facts(step=found.get("step")))
    return weights, facts


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], Facts]:
    """Read a file of safetensors -> its tensors by name, and what it says of them."""
    from safetensors import safe_open

    weights: dict[str, Tensor] = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            weights[name] = file.get_tensor(name)
        metadata = file.metadata()
    if metadata and NOTE in metadata:
        return weights, facts_of(json.loads(metadata[NOTE]))
    return weights, Facts()


def clean_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights without a classifier's head, and without what DDP and compile prepend."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        clean = re.sub(r"^(module\.|_orig_mod\.)+", "", name)
        if not clean.startswith("head."):
            found[clean] = tensor
    return found


def from_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' ViTMAE and join q, k, v; KeyError if one is missing."""
    found: dict[str, Tensor] = {}
    for theirs, tensor in weights.items():
        name = theirs
        if not name.startswith(("vit.", "decoder.")):  # a ViTMAEModel, the encoder alone
            name = f"vit.{name}"
        name = name.replace("decoder_encoder.layer.", "decoder_layers.")  # since transformers 5
        for our_part, their_part in NAMES:
            name = re.sub(rf"\b{re.escape(their_part)}", our_part, name)
        found[name] = tensor
    for name in [name for name in found if ".attn.q." in name]:
        parts = [found.pop(name.replace(".q.", f".{part}.")) for part in "qkv"]
        found[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    return found


# --- Configurations


def read_config(folder: Path) -> Facts:
    """Read the config.json of transformers or timm, and what lies beside it; ValueError."""
    config = json.loads((folder / "config.json").read_bytes())
    if isinstance(config, dict) and config.get("model_type") == "vit_mae":
        facts = read_transformers_config(config, folder)
        processor = folder / "preprocessor_config.json"
        if processor.exists():
            content = json.loads(processor.read_bytes())
            facts.stats = read_image_processor(content, config["num_channels"])
        return facts
    if isinstance(config, dict) and "architecture" in config:
        return read_timm_config(config)
    raise ValueError("config.json is not of a vit_mae model of transformers, nor of a vit of timm")


def check_values(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError, by name, for a value that vit.ViTMAE does not have."""
    for key, values in allowed.items():
        found = config.get(key, values[0])
        if found not in values:
            raise ValueError(f"config.json says {key} {found!r}, this model has {values[0]!r}")


def pair_of(value: Any) -> tuple[int, int]:
    """Return (height, width) of a size that may be one number."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return height, width


def read_transformers_config(config: Mapping[str, Any], folder: Path) -> Facts:
    """Return the facts in a config.json of a vit_mae model; KeyError, ValueError."""
    check_values(config, TRANSFORMERS_VALUES)
    ours = {field: config[key] for field, key in CONFIG.items()}
    height, width = pair_of(config["patch_size"])
    if height != width:
        raise ValueError(f"config.json says patches of {height} x {width}: they must be square")
    ours["patch"] = height
    head_width = config.get("head_dim")
    if head_width is not None and head_width * ours["heads"] != ours["width"]:
        raise ValueError(f"config.json says head_dim {head_width}: here heads share the width")
    decoder_mlp = config.get("decoder_intermediate_size", 2048)
    if decoder_mlp != 4 * ours["decoder_width"]:
        what = f"this model has 4 x decoder_hidden_size: {4 * ours['decoder_width']}"
        raise ValueError(f"config.json says decoder_intermediate_size {decoder_mlp}, {what}")
    check_epsilon(config.get("layer_norm_eps", 1e-12), folder)
    for key in "hidden_dropout_prob", "attention_probs_dropout_prob":
        if config.get(key):
            what = "which this code does not have: it matters in training alone"
            print(f"warning: config.json says {key} {config[key]}, {what}", file=sys.stderr)
    return Facts(
        config=vit.ViTConfig(**ours),
        image_size=pair_of(config.get("image_size", 224)),
        norm_pix_loss=config.get("norm_pix_loss", False),  # transformers' default
        mask_ratio=config.get("mask_ratio", 0.75),
    )


def check_epsilon(epsilon: float, folder: Path) -> None:
    """Warn where the epsilon of the norms differs from ours; ValueError where it is large."""
    if epsilon == NORM_EPS:
        return
    what = f"the norms of {folder} have an epsilon of {epsilon:g}, here {NORM_EPS:g}"
    if not 0 <= epsilon <= LARGEST_EPS:
        raise ValueError(f"{what}: this is another model")
    print(f"warning: {what}: features may differ by 2e-3", file=sys.stderr)


def read_image_processor(config: Mapping[str, Any], channels: int) -> data.ChannelStats:
    """Return the statistics in a preprocessor_config.json, for pixels from 0 to 1."""
    mean = [0.0] * channels
    std = [1.0] * channels
    if config.get("do_normalize", True):
        mean = value_per_channel(config["image_mean"], channels)
        std = value_per_channel(config["image_std"], channels)
    scale = 255.0  # pixels are not rescaled: the mean is that of 0 to 255
    if config.get("do_rescale", True):
        scale = 255 * config.get("rescale_factor", 1 / 255)
    if abs(scale - 1) > 1e-6:
        mean = [value / scale for value in mean]
        std = [value / scale for value in std]
    return data.ChannelStats(tuple(mean), tuple(std), "uint8")


def value_per_channel(value: Any, channels: int) -> list[float]:
    """Return the list of a setting that may be one number for all channels."""
    if isinstance(value, int | float):
        return [value] * channels
    return list(value)


def read_timm_config(config: Mapping[str, Any]) -> Facts:
    """Return the facts in a config.json of timm, as `timm.models.save_for_hf` writes it."""
    architecture = config["architecture"]
    if not architecture.startswith(("vit_", "deit_")) or "quickgelu" in architecture:
        raise ValueError(f"config.json says architecture {architecture}: timm's vit_* are read")
    model = config.get("model_args") or {}
    check_values(model, TIMM_VALUES)
    pretrained = config.get("pretrained_cfg") or {}
    facts = Facts(heads=model.get("num_heads"))
    if "img_size" in model:
        facts.image_size = pair_of(model["img_size"])
    elif "input_size" in pretrained:
        facts.image_size = pair_of(pretrained["input_size"][1:])
    if "mean" in pretrained:
        mean = tuple(pretrained["mean"])
        std = tuple(pretrained["std"])
        facts.stats = data.ChannelStats(mean, std, "uint8")
    return facts
