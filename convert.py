"""Take a pretrained model to another library, or bring one from there.

    python convert.py out/run model.pth --to official              the layout of the MAE release
    python convert.py out/run encoder.safetensors --to timm        or .pth; the encoder alone
    python convert.py out/run folder --to transformers             for ViTMAE's from_pretrained
    python convert.py vit_mae_folder model.pth --to official       from one layout to another

The first argument is a run, one of its checkpoints, or what any of these commands, the official
MAE, timm or transformers wrote; `train_fsdp.py --init-from` and probe.py read the same.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint import atomic_write
from runtime import process
from runtime.config import Parser, model_config, nonempty
from runtime.pretrained import DECODER, Pretrained, read_pretrained, say_assumed
from runtime.weight_files import CONFIG, NAMES, NORM_EPS, NOTE, Said


def write_pretrained(pretrained: Pretrained, out: Path, layout: str) -> None:
    """Write the weights in a layout, and under the key `pretrained` what the model is.

    `official`: a file of torch.save with the weights under "model". `timm`: the same of the encoder
    alone. `transformers`: a folder. ValueError for a model that the library does not have, or where
    there is something at `out`; OSError, and nothing is left there, where writing fails.
    """
    if pretrained.config.gated_mlp and layout != "timm":
        raise ValueError(f"{pretrained.name} has a gated MLP, which only timm has: --to timm")
    if out.exists():
        raise ValueError(f"{out} is there already: give another name, or remove it")
    note = note_of(pretrained)
    weights: dict[str, Tensor] = {}
    for name, tensor in pretrained.weights.items():
        if layout != "timm" or not name.startswith(DECODER):
            weights[name] = tensor
    with tempfile.TemporaryDirectory(prefix=".convert_", dir=out.parent) as folder:
        new = Path(folder, out.name)  # renamed when it is complete
        if layout == "transformers":
            new.mkdir()
            write_json(transformers_config(pretrained), new / "config.json")
            if pretrained.stats.dtype == "uint8":
                write_json(image_processor(pretrained), new / "preprocessor_config.json")
            write_weights(to_transformers(weights), new / "model.safetensors", note)
        else:
            write_weights(weights, new, note)
        new.rename(out)


def note_of(pretrained: Pretrained) -> Said:
    """Describe a model as weight_files.py reads it, without what was assumed."""
    note: Said = {"config": asdict(pretrained.config), "step": pretrained.step}
    for field in "img_size", "norm_pix_loss", "mask_ratio":
        if field not in pretrained.assumed:
            note[field] = getattr(pretrained, field)
    if "stats" not in pretrained.assumed:
        note["channel_mean"] = pretrained.stats.mean
        note["channel_std"] = pretrained.stats.std
        note["image_dtype"] = pretrained.stats.dtype
    return note


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write a file of JSON; OSError."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_weights(weights: dict[str, Tensor], path: Path, note: dict[str, Any]) -> None:
    """Write a file of safetensors, if it is so called, or of torch.save; OSError."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save

        # safetensors takes neither channels_last tensors nor two tensors that share memory
        own = {}
        for name, tensor in weights.items():
            own[name] = tensor.clone(memory_format=torch.contiguous_format)
        path.write_bytes(save(own, {"format": "pt", NOTE: json.dumps(note)}))
        return
    with atomic_write(path) as file:
        torch.save({"model": weights, NOTE: note}, file)


def to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights of ours for transformers' ViTMAE and take q, k and v apart."""
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".qkv." in name:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                result[transformers_name(name.replace(".qkv.", f".{part}."))] = piece
        else:
            result[transformers_name(name)] = tensor
    if any(name.startswith("decoder.") for name in result):
        return result
    return {name.removeprefix("vit."): tensor for name, tensor in result.items()}  # ViTMAEModel


def transformers_name(name: str) -> str:
    """Return the name in transformers' ViTMAEForPreTraining of one of our weights."""
    for ours, theirs in NAMES:
        name = re.sub(rf"\b{re.escape(ours)}", theirs, name)
    return name


def transformers_config(pretrained: Pretrained) -> dict[str, Any]:
    """Return the content of config.json, where it differs from the defaults of transformers."""
    architecture = "ViTMAEModel"
    if pretrained.has_decoder:
        architecture = "ViTMAEForPreTraining"
    config = {
        "architectures": [architecture],
        "model_type": "vit_mae",
        "layer_norm_eps": NORM_EPS,
        "image_size": pretrained.img_size,
        "decoder_intermediate_size": 4 * pretrained.config.decoder_width,
        "norm_pix_loss": pretrained.norm_pix_loss,
        "mask_ratio": pretrained.mask_ratio,
    }
    for ours, theirs in CONFIG.items():
        config[theirs] = getattr(pretrained.config, ours)
    return config


def image_processor(pretrained: Pretrained) -> dict[str, Any]:
    """Return the content of preprocessor_config.json, for transformers' ViTImageProcessor."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": pretrained.img_size, "width": pretrained.img_size},
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": pretrained.stats.mean,
        "image_std": pretrained.stats.std,
    }


def timm_line(pretrained: Pretrained, path: str) -> str:
    """Return the line of Python that loads a file in timm, which has no such model by name."""
    c = pretrained.config
    gated = ""
    if c.gated_mlp:
        gated = 'mlp_layer=timm.layers.SwiGLU, act_layer="silu", '
    return (
        f'timm.create_model("vit_base_patch16_224", img_size={pretrained.img_size}, '
        f"patch_size={c.patch}, embed_dim={c.width}, depth={c.depth}, num_heads={c.heads}, "
        f"mlp_ratio={c.mlp_width} / {c.width}, {gated}in_chans={c.channels}, num_classes=0, "
        f'checkpoint_path="{path}")'
    )


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; SystemExit with status 2 for bad usage."""
    parser = Parser("convert.py", doc=__doc__)
    add = parser.add_argument
    add("source", type=nonempty, metavar="RUN_OR_FILE", help="run, checkpoint, or weights")
    add("out", type=nonempty, metavar="OUT", help="file or folder to write")
    add("--to", choices=("official", "timm", "transformers"), required=True, help="layout to write")
    size = "where the source does not say: tiny:heads=6"
    add("--model", type=nonempty, metavar="SIZE", help=size)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line -> exit status: 1 where it failed, 2 for bad usage."""
    args = read_arguments(argv)
    size = None
    try:
        if args.model:
            size = model_config(args.model)
        pretrained = read_pretrained(args.source, size)
        write_pretrained(pretrained, Path(args.out), args.to)
    except (ValueError, ImportError, OSError) as error:
        process.print_error(str(error), "convert.py")
        return 2 if isinstance(error, ValueError) else 1
    say_assumed(pretrained, "img_size", "norm_pix_loss", "mask_ratio", "stats")
    print(f"{args.out}: {args.to}, from {args.source}")
    if args.to == "timm":
        print(f"load it with\n{timm_line(pretrained, args.out)}")
    return 0


if __name__ == "__main__":
    process.ignore_output_errors()
    raise SystemExit(main())
