"""Take a pretrained model to another library, or bring one from there.

    python convert.py out/run model.pth                           layout of the MAE release
    python convert.py out/run encoder.safetensors --to timm       or .pth; the encoder alone
    python convert.py out/run folder --to transformers            for ViTMAE's from_pretrained
    python convert.py model.pth start --to checkpoint             to train it: --resume start/step_*

The first argument is a run, one of its checkpoints, what these commands wrote, or weights of the
official MAE, timm or transformers. No code in a file is run. vit.ViTMAE uses the names of the
official MAE and of timm, so only weights of transformers are renamed.
"""

import argparse
import json
import math
import pickle
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import checkpoint
import data
import mesh
import vit

Weights = dict[str, Tensor]  # by the names of vit.ViTMAE
Known = dict[str, Any]  # what is known of a model, by the names of a run's flags, and "step"
FLAGS: tuple[str, ...] = ("model", "channels", "img_size", "norm_pix_loss", "mask_ratio")
FLAGS += ("channel_mean", "channel_std", "image_dtype")
DECODER = ("decoder_", "mask_token")  # how the names of a decoder's weights begin
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

# --- Read weights, whatever wrote them


def read_source(path: Path) -> tuple[Weights, Known]:
    """Read a run, a checkpoint, a file or a folder -> weights, and what it says of them."""
    if not path.exists():
        raise ValueError(f"there is no {path}: give a run, a checkpoint, or weights")
    if (path / "config.json").exists():
        return read_transformers(path)
    if path.is_dir():
        weights, facts = checkpoint.read_weights(path)
        return weights, known_of(facts)
    return read_file(path)


def known_of(facts: dict[str, Any]) -> Known:
    """Return what a run's checkpoint, or a file of convert.py, says of its model."""
    flags = facts.get("run_state", {}).get("flags", {})
    known = {key: flags[key] for key in FLAGS if flags.get(key) is not None}
    return known | {"step": facts.get("step")}


def read_file(path: Path) -> tuple[Weights, Known]:
    """Read a file -> its tensors by name, without a classifier's head, and what it says of them."""
    if path.suffix == ".safetensors":
        tensors, known = read_safetensors(path)
    else:
        tensors, known = read_torch_file(path)
    weights: Weights = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path}: {name} is not a tensor but {type(tensor).__name__}")
        clean = re.sub(r"^(module\.|_orig_mod\.)+", "", name)  # of DDP and torch.compile
        if not clean.startswith("head."):
            weights[clean] = tensor
    return weights, known


def read_safetensors(path: Path) -> tuple[Weights, Known]:
    """Read a file of safetensors -> its tensors by name, and what convert.py said of them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
    except SafetensorError as error:
        raise ValueError(f"{path} is no file of safetensors: {error}") from None
    if metadata and "facts" in metadata:
        return weights, known_of(json.loads(metadata["facts"]))
    return weights, {}


def read_torch_file(path: Path) -> tuple[Weights, Known]:
    """Read a file of torch.save -> its tensors by name, and what it says of them."""
    try:  # the official training code saves its arguments, a Namespace
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (EOFError, RuntimeError, pickle.UnpicklingError):
        why = "it is damaged, of an old format, or contains more than weights"
        raise ValueError(f"torch.load(weights_only=True) refuses {path}: {why}") from None
    weights = found
    # a moving average before the weights themselves, as timm does
    for key in "state_dict_ema", "model_ema", "state_dict", "model":
        if found.get(key):
            weights = found[key]
            break
    arguments = vars(found.get("args", argparse.Namespace()))
    known = {key: arguments[key] for key in ("norm_pix_loss", "mask_ratio") if key in arguments}
    return weights, known | known_of(found)


# --- transformers


def read_transformers(folder: Path) -> tuple[Weights, Known]:
    """Read a folder of a vit_mae model -> weights by our names, and what it says of them."""
    file = folder / "model.safetensors"
    if not file.exists():
        file = folder / "pytorch_model.bin"
    if not file.exists():
        advice = 'model.save_pretrained(..., max_shard_size="100GB") writes one file'
        raise ValueError(f"{folder} has no model.safetensors and no pytorch_model.bin: {advice}")
    config = json.loads((folder / "config.json").read_bytes())
    if config.get("model_type") != "vit_mae":
        what = f"{folder}/config.json is not of a vit_mae model of transformers"
        raise ValueError(f"{what}: of timm, give the file of weights, with --model")
    known = read_transformers_config(config, folder)
    processor = folder / "preprocessor_config.json"
    if processor.exists():
        known |= read_image_processor(json.loads(processor.read_bytes()), config["num_channels"])
    theirs, _ = read_file(file)
    return from_transformers(theirs), known


def read_transformers_config(config: Known, folder: Path) -> Known:
    """Return what the config.json of a vit_mae model says; ValueError for another architecture."""
    if config.get("hidden_act", "gelu") not in ("gelu", "gelu_python"):  # others approximate it
        raise ValueError(f"{folder}: hidden_act is {config['hidden_act']!r}, here 'gelu'")
    epsilon = config.get("layer_norm_eps", 1e-12)
    if not 0 <= epsilon <= LARGEST_EPS:
        raise ValueError(f"{folder}: the epsilon of its norms is {epsilon:g}, here {NORM_EPS:g}")
    missing = sorted(set(CONFIG.values()) - set(config))
    if missing:
        raise ValueError(f"{folder}: {', '.join(missing)} is missing in config.json")
    sizes = {field: config[key] for field, key in CONFIG.items()}
    img_size = config.get("image_size", 224)  # this and the next two: transformers' defaults
    for name, value in ("patch_size", sizes["patch"]), ("image_size", img_size):
        if not isinstance(value, int):
            raise ValueError(f"{folder}: {name} is {value}, but one whole number is needed")
    return {
        "model": model_name(vit.ViTConfig(**sizes)),
        "channels": sizes["channels"],
        "img_size": img_size,
        "norm_pix_loss": config.get("norm_pix_loss", False),
        "mask_ratio": config.get("mask_ratio", 0.75),
    }


def read_image_processor(config: Known, channels: int) -> Known:
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


def from_transformers(weights: Weights) -> Weights:
    """Rename the weights of transformers' ViTMAE and join q, k, v."""
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
        parts = [found.pop(name.replace(".q.", f".{part}."), torch.empty(0)) for part in "qkv"]
        found[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    return found


def to_transformers(weights: Weights) -> Weights:
    """Rename weights of ours for transformers' ViTMAE and take q, k and v apart."""
    result: Weights = {}
    for ours, tensor in weights.items():
        parts = {ours: tensor}
        if ".qkv." in ours:
            names = [ours.replace(".qkv.", f".{part}.") for part in "qkv"]
            parts = dict(zip(names, tensor.chunk(3), strict=True))
        for name, part in parts.items():
            for our_part, their_part in NAMES:
                name = re.sub(rf"\b{re.escape(our_part)}", their_part, name)
            if "mask_token" not in weights:
                name = name.removeprefix("vit.")  # for a ViTMAEModel
            result[name] = part
    return result


# --- A model: what is not known is assumed, and said; what cannot be is refused


@dataclass(frozen=True)
class Model:
    """Hold the weights of a model, and what it is."""

    weights: Weights  # without a decoder if it has none
    config: vit.ViTConfig
    flags: Known  # all of FLAGS
    step: int | None  # optimizer steps trained
    assumed: dict[str, str]  # a flag that the source does not state -> what was assumed

    @property
    def facts(self) -> dict[str, Any]:
        """Return what a file says of its model, as in checkpoint.py: not what is assumed."""
        flags = {key: value for key, value in self.flags.items() if key not in self.assumed}
        return {"step": self.step, "run_state": {"flags": flags, "scaler": None}}


def read_model(path: Path, size: str | None = None, img_size: int | None = None) -> Model:
    """Read a model, of this `size` if the source does not say it; ValueError or OSError.

    `img_size`: the pixels of images for which its positions are resampled.
    """
    weights, known = read_source(path)
    for name in "patch_embed.proj.weight", "pos_embed":
        if name not in weights:
            raise ValueError(f"{path}: {name} is missing: it has no weights of a ViT or an MAE")
    channels = weights["patch_embed.proj.weight"].shape[1]
    own = known.get("model", size)
    if not own:
        sizes = ", ".join(vit.MODELS)
        raise ValueError(f"{path} does not say its size: give --model {sizes} or base:depth=6")
    config = vit.model_config(own, channels)
    if size and vit.model_config(size, channels) != config:
        raise ValueError(f"{path} is {own}, not --model {size}")
    side = math.isqrt(weights["pos_embed"].shape[1] - 1)
    flags = known | {"model": model_name(config), "channels": channels}
    flags.setdefault("img_size", config.patch * side)
    check_weights(path, weights, config, flags["img_size"])
    assumed: dict[str, str] = {}
    square = vit.sincos_positions(config.width, side)
    if "img_size" not in known and not torch.allclose(weights["pos_embed"], square, atol=1e-2):
        assumed["square"] = "its images were square"
    assume(flags, assumed)
    if img_size:
        flags["img_size"] = img_size
        side = math.isqrt(vit.patch_count(config, img_size))
        for name in [name for name in weights if "pos_embed" in name]:
            weights[name] = vit.resize_positions(weights[name], side)
    return Model(weights, config, flags, flags.pop("step", None), assumed)


def assume(flags: Known, assumed: dict[str, str]) -> None:
    """Add the `flags` that are not known, and say in `assumed` what they are."""
    if "norm_pix_loss" not in flags:
        flags["norm_pix_loss"] = True  # as in the paper
        assumed["norm_pix_loss"] = "it predicts normalised patches"
    if "mask_ratio" not in flags:
        flags["mask_ratio"] = 0.75
        assumed["mask_ratio"] = "its mask ratio was 0.75"
    if "channel_mean" not in flags and flags["channels"] == 3:
        flags["channel_mean"], flags["channel_std"], flags["image_dtype"] = data.IMAGENET
        assumed["channel_mean"] = "its images had the mean and deviation of ImageNet"
    elif "channel_mean" not in flags:
        flags["channel_mean"] = (0.0,) * flags["channels"]
        flags["channel_std"] = (1.0,) * flags["channels"]
        flags["image_dtype"] = "float32"
        assumed["statistics"] = "its images were not normalised"


def check_weights(path: Path, weights: Weights, config: vit.ViTConfig, img_size: int) -> None:
    """Raise ValueError unless they are those of a model, perhaps without a decoder, and finite."""
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"{path}: {name} is of {tensor.dtype}, or not finite")
    with torch.device("meta"):
        model = vit.ViTMAE(config, img_size)
    try:
        missing, unknown = model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        _, first, *_ = str(error).split("\n\t")
        raise ValueError(f"{path} is not {model_name(config)}: {first}") from None
    if unknown:
        what = "this model, which has no classifier, LayerScale or register tokens"
        raise ValueError(f"{path}: {unknown[0]} is no weight of {what}")
    if "mask_token" not in weights:
        missing = [name for name in missing if not name.startswith(DECODER)]
    if missing:
        raise ValueError(f"{path}: {missing[0]} is missing")


def model_name(config: vit.ViTConfig) -> str:
    """Return a size as --model has it: `base`, or `base:depth=6`; without the channels."""
    changed: dict[str, int] = {}
    for name, row in vit.MODELS.items():
        if replace(row, channels=config.channels) == config:
            return name
    for field, value in vars(config).items():
        if field != "channels" and value != getattr(vit.MODELS["base"], field):
            changed[field] = int(value)
    return "base:" + ",".join(f"{field}={value}" for field, value in changed.items())


# --- Write


def write_model(model: Model, out: Path, layout: str) -> None:
    """Write a model in a layout, with what is known of it.

    `official`: a file with the weights under "model". `timm`: the same of the encoder alone.
    `transformers`: a folder. `checkpoint`: OUT/step_00000000. ValueError for a model that the
    library does not have, or where there is something at `out`; OSError where writing fails.
    """
    if model.config.gated_mlp and layout in ("official", "transformers"):
        raise ValueError("its MLP is gated, which this library does not have: --to timm has it")
    if out.exists():
        raise ValueError(f"{out} is there already: give another name, or remove it")
    if layout == "checkpoint":
        write_checkpoint(model, out)
    elif layout == "transformers":
        out.mkdir()
        write_weights(to_transformers(model.weights), model.facts, out / "model.safetensors")
        (out / "config.json").write_text(json.dumps(transformers_config(model), indent=2))
        if model.flags["image_dtype"] == "uint8":
            processor = json.dumps(image_processor(model), indent=2)
            (out / "preprocessor_config.json").write_text(processor)
    elif layout == "timm":
        weights = {n: t for n, t in model.weights.items() if not n.startswith(DECODER)}
        write_weights(weights, model.facts, out)
    else:
        write_weights(model.weights, model.facts, out)


def write_checkpoint(model: Model, out: Path) -> None:
    """Write a checkpoint of step 0, without optimizer states; a missing decoder is a new one."""
    whole = vit.ViTMAE(model.config, model.flags["img_size"])
    whole.load_state_dict(model.weights, strict=False)
    mesh.init_ranks(mesh.read_ranks({}), torch.device("cpu"))
    # only what weights show: the loss and the statistics are for the new run to choose
    flags = {key: model.flags[key] for key in ("model", "channels", "img_size")}
    try:
        checkpoint.save(out, 0, whole, None, {"flags": flags, "scaler": None})
    finally:
        torch.distributed.destroy_process_group()


def write_weights(weights: Weights, facts: dict[str, Any], path: Path) -> None:
    """Write a file of safetensors, if it is so called, or of torch.save; OSError."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save

        # safetensors takes no two tensors that share memory
        own = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
        with checkpoint.atomic_write(path) as file:
            file.write(save(own, {"format": "pt", "facts": json.dumps(facts)}))
    else:
        with checkpoint.atomic_write(path) as file:
            torch.save({"model": weights} | facts, file)


def transformers_config(model: Model) -> dict[str, Any]:
    """Return the content of config.json, where it differs from the defaults of transformers."""
    architecture = "ViTMAEModel"
    if "mask_token" in model.weights:
        architecture = "ViTMAEForPreTraining"
    config = {
        "architectures": [architecture],
        "model_type": "vit_mae",
        "layer_norm_eps": NORM_EPS,
        "image_size": model.flags["img_size"],
        "decoder_intermediate_size": 4 * model.config.decoder_width,
        "norm_pix_loss": model.flags["norm_pix_loss"],
        "mask_ratio": model.flags["mask_ratio"],
    }
    return config | {theirs: getattr(model.config, ours) for ours, theirs in CONFIG.items()}


def image_processor(model: Model) -> dict[str, Any]:
    """Return the content of preprocessor_config.json, for transformers' ViTImageProcessor."""
    side = model.flags["img_size"]
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": side, "width": side},
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": model.flags["channel_mean"],
        "image_std": model.flags["channel_std"],
    }


def timm_line(model: Model, path: Path) -> str:
    """Return the line of Python that loads a file in timm, which has no such model by name."""
    c = model.config
    gated = 'mlp_layer=timm.layers.SwiGLU, act_layer="silu", ' if c.gated_mlp else ""
    return (
        f'timm.create_model("vit_base_patch16_224", img_size={model.flags["img_size"]}, '
        f"patch_size={c.patch}, embed_dim={c.width}, depth={c.depth}, num_heads={c.heads}, "
        f"mlp_ratio={c.mlp_width} / {c.width}, {gated}in_chans={c.channels}, num_classes=0, "
        f'checkpoint_path="{path}")'
    )


# --- Command line


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    about, *more = str(__doc__).split("\n\n")
    parser = argparse.ArgumentParser("convert.py", description=about, allow_abbrev=False)
    parser.epilog = "\n\n".join(more[:2])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    layouts = ("official", "timm", "transformers", "checkpoint")
    add("source", type=Path, metavar="SOURCE", help="run, checkpoint, file or folder of weights")
    add("out", type=Path, metavar="OUT", help="new file, or folder, to write")
    add("--to", choices=layouts, default="official", help="layout to write (default official)")
    add("--model", metavar="SIZE", help="where the source does not say: base, or tiny:heads=6")
    add("--img-size", type=int, metavar="PIXELS", help="resample the positions for such images")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line -> exit status: 1 where it failed, 2 for bad usage."""
    args = build_parser().parse_args(argv)
    try:
        model = read_model(args.source, args.model, args.img_size)
        write_model(model, args.out, args.to)
    except (ValueError, ImportError, OSError) as error:
        print(f"convert.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if model.assumed:
        assumed = ", ".join(model.assumed.values())
        print(f"note: {args.source} does not say it, so it is assumed that {assumed}")
    print(f"{args.out}: {args.to}, from {args.source}")
    if args.to == "timm":
        print(f"load it with\n{timm_line(model, args.out)}")
    if args.to == "checkpoint":
        size = f"--model {model_name(model.config)} --img-size {model.flags['img_size']}"
        print(f"train it with {size} --resume {args.out}/step_00000000")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
