"""Open the weights that other programs have saved, and read what they say of them.

That is a file of the official MAE, of timm or of convert.py, or a folder of transformers or of
timm's `save_for_hf`. vit.ViTMAE uses the names of the official MAE and of timm, so only weights of
transformers are renamed. No code in a file is run. If a configuration asks for something that
vit.ViTMAE does not have, and that the shapes of the weights do not show, it is refused by name.

What a source says of its weights (`Said`) is a dictionary whose keys are flags and records of a
run: img_size, norm_pix_loss, mask_ratio, channel_mean, channel_std, image_dtype, step. Instead of a
run's model and channels it may have `config`, with the fields of vit.ViTConfig, or only `heads`.
"""

import argparse
import json
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Weights = dict[str, Tensor]
Said = dict[str, Any]
NOTE = "pretrained"  # the key in a file under which convert.py describes the model
NORM_EPS = 1e-6  # that of vit.ViTMAE and the official release; transformers' default is 1e-12
LARGEST_EPS = 1e-5  # with a larger one features are not those of the model that was trained

# Parts of our names and of those in transformers' files, replaced in this order.
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
# The values in a config.json of transformers that vit.ViTMAE supports, by key; the first is
# transformers' default.
TRANSFORMERS_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", "gelu_python"),  # the same function; the other GELUs are approximations
    "qkv_bias": (True,),
    "quantization_config": (None,),
    "auto_map": (None,),  # a model with code of its own
}
# Arguments of timm's models that show in the shapes of the weights, or that change no weight.
TIMM_ARGUMENTS = {
    "depth",
    "embed_dim",
    "global_pool",
    "img_size",
    "in_chans",
    "mlp_ratio",
    "num_classes",
    "num_heads",
    "patch_size",
}

# --- Files


def read_weight_file(path: Path) -> tuple[Weights, Said]:
    """Read a file or a folder -> weights by the names of vit.ViTMAE, what is said of them.

    ValueError, OSError, or any other error that a file of another kind causes.
    """
    said: Said = {}
    files = [path]
    if path.is_dir():
        said = read_config(path)
        files = list_weight_files(path)
    weights: Weights = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors, more = read_safetensors(file)
        else:
            tensors, more = read_torch_file(file)
        weights.update(tensors)
        said = more | said
    weights = clean_names(weights)
    if any(name.endswith("embeddings.cls_token") for name in weights):
        if "config" not in said:  # neither a config.json nor a note of convert.py
            what = f"the folder {path.parent}, whose config.json says what the model is"
            raise ValueError(f"its weights have transformers' names: give {what}")
        weights = from_transformers(weights)
    return weights, said


def list_weight_files(folder: Path) -> list[Path]:
    """List the files that hold a folder's weights, as transformers and timm choose them.

    One file before its shards, safetensors before torch.save; other files, such as
    model.fp16.safetensors or shards of an earlier save, are not read. ValueError if there is none.
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


def read_torch_file(path: Path) -> tuple[Weights, Said]:
    """Read a file of torch.save -> its tensors by name, and what it says of them.

    If it also has a moving average of the weights, that is read instead, as timm does.
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
    said: Said = {}
    if "step" in found:
        said["step"] = found["step"]
    arguments = getattr(found.get("args"), "__dict__", {})
    for key in "norm_pix_loss", "mask_ratio":
        if key in arguments:
            said[key] = arguments[key]
    if "run_state" in found:  # written by `checkpoint.py consolidate`
        said |= found["run_state"].get("flags", {})
    return weights, said | found.get(NOTE, {})


def read_safetensors(path: Path) -> tuple[Weights, Said]:
    """Read a file of safetensors -> its tensors by name, and what it says of them."""
    from safetensors import safe_open

    weights: Weights = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            weights[name] = file.get_tensor(name)
        metadata = file.metadata()
    if metadata and NOTE in metadata:
        return weights, json.loads(metadata[NOTE])
    return weights, {}


def clean_names(weights: Mapping[str, Tensor]) -> Weights:
    """Drop a classifier's head, and the prefixes of DDP and torch.compile."""
    found: Weights = {}
    for name, tensor in weights.items():
        clean = re.sub(r"^(module\.|_orig_mod\.)+", "", name)
        if not clean.startswith("head."):
            found[clean] = tensor
    return found


def from_transformers(weights: Mapping[str, Tensor]) -> Weights:
    """Rename the weights of transformers' ViTMAE and join q, k, v; KeyError if one is missing."""
    found: Weights = {}
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


def read_config(folder: Path) -> Said:
    """Read the config.json of transformers or timm, and files beside it; ValueError."""
    config = json.loads((folder / "config.json").read_bytes())
    if config.get("model_type") == "vit_mae":
        said = read_transformers_config(config, folder)
        processor = folder / "preprocessor_config.json"
        if processor.exists():
            said |= read_image_processor(json.loads(processor.read_bytes()), config["num_channels"])
        return said
    if "architecture" in config:
        return read_timm_config(config)
    raise ValueError("config.json is not of a vit_mae model of transformers, nor of a vit of timm")


def read_transformers_config(config: Said, folder: Path) -> Said:
    """Return what the config.json of a vit_mae model says; KeyError, ValueError.

    The shapes of the weights check the widths that are not in CONFIG.
    """
    for key, values in TRANSFORMERS_VALUES.items():
        found = config.get(key, values[0])
        if found not in values:
            raise ValueError(f"config.json says {key} {found!r}, this model has {values[0]!r}")
    check_epsilon(config.get("layer_norm_eps", 1e-12), folder)
    ours = {field: config[key] for field, key in CONFIG.items()}
    if not isinstance(ours["patch"], int):
        ours["patch"], _ = ours["patch"]  # height and width
    return {
        "config": ours,
        "img_size": config.get("image_size", 224),  # these three: transformers' defaults
        "norm_pix_loss": config.get("norm_pix_loss", False),
        "mask_ratio": config.get("mask_ratio", 0.75),
    }


def check_epsilon(epsilon: float, folder: Path) -> None:
    """Warn if the epsilon of the norms differs from ours; ValueError if it is large."""
    if epsilon == NORM_EPS:
        return
    what = f"the norms of {folder} have an epsilon of {epsilon:g}, here {NORM_EPS:g}"
    if not 0 <= epsilon <= LARGEST_EPS:
        raise ValueError(f"{what}: this is another model")
    print(f"warning: {what}: features may differ by 2e-3", file=sys.stderr)


def read_image_processor(config: Said, channels: int) -> Said:
    """Return the statistics in a preprocessor_config.json, for pixels from 0 to 1."""
    mean = 0.0
    std = 1.0
    if config.get("do_normalize", True):
        mean = config["image_mean"]  # one number, or one per channel
        std = config["image_std"]
    scale = 255.0  # pixels are not rescaled: the mean is that of 0 to 255
    if config.get("do_rescale", True):
        scale *= config.get("rescale_factor", 1 / 255)
    return {
        "channel_mean": (np.broadcast_to(mean, channels) / scale).tolist(),
        "channel_std": (np.broadcast_to(std, channels) / scale).tolist(),
        "image_dtype": "uint8",
    }


def read_timm_config(config: Said) -> Said:
    """Return what a config.json of timm says, as `timm.models.save_for_hf` writes it."""
    architecture = config["architecture"]
    if not architecture.startswith(("vit_", "deit_")) or "quickgelu" in architecture:
        raise ValueError(f"config.json says architecture {architecture}: timm's vit_* are read")
    arguments = config.get("model_args", {})
    for key, value in arguments.items():
        if key not in TIMM_ARGUMENTS and not key.endswith("_rate"):  # dropout rates
            raise ValueError(f"config.json says {key} {value!r}, which this model does not have")
    pretrained = config.get("pretrained_cfg", {})
    said: Said = {}
    if "num_heads" in arguments:
        said["heads"] = arguments["num_heads"]
    if "input_size" in pretrained:
        said["img_size"] = pretrained["input_size"][1:]  # without the channels
    if "img_size" in arguments:
        said["img_size"] = arguments["img_size"]
    if "mean" in pretrained:
        said["channel_mean"] = pretrained["mean"]
        said["channel_std"] = pretrained["std"]
        said["image_dtype"] = "uint8"
    return said
