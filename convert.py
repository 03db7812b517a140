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

from checkpoint import replacing
from downstream.weights import CONFIG, DECODER, NAMES, NORM_EPS, NOTE, Pretrained, read_pretrained
from runtime import process
from runtime.config import Parser, filled, model_config


def write_pretrained(pretrained: Pretrained, out: Path, layout: str) -> None:
    """Write the weights in a layout, and under the key `pretrained` what the model is.

    `official`: a file of torch.save with the weights under "model". `timm`: the same of the encoder
    alone. `transformers`: a folder. ValueError for a model that the library does not have, or where
    there is something at `out`; OSError, and nothing is left there, where writing fails.
    """
    config, stats = pretrained.config, pretrained.stats
    if config.gated_mlp and layout != "timm":
        raise ValueError(f"{pretrained.name} has a gated MLP, which only timm has: --to timm")
    if out.exists():
        raise ValueError(f"{out} is there already: give another name, or remove it")
    about: dict[str, Any] = {"config": asdict(config), "step": pretrained.step}
    about |= {"channel_mean": stats.mean, "channel_std": stats.std, "image_dtype": stats.dtype}
    about |= {"norm_pix_loss": pretrained.norm_pix_loss, "mask_ratio": pretrained.mask_ratio}
    left_out = DECODER if layout == "timm" else ()
    weights = {n: t for n, t in pretrained.weights.items() if not n.startswith(left_out)}
    with tempfile.TemporaryDirectory(prefix=".convert_", dir=out.parent) as folder:
        new = Path(folder, out.name)  # renamed when it is whole
        if layout == "transformers":
            new.mkdir()
            settings = transformers_config(pretrained)
            (new / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
            _save(to_transformers(weights), new / "model.safetensors", about)
        else:
            _save(weights, new, about)
        new.rename(out)


def _save(weights: dict[str, Tensor], path: Path, about: dict[str, Any]) -> None:
    """Write a file of safetensors, if it is so called, or of torch.save; OSError."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save

        path.write_bytes(save(weights, {"format": "pt", NOTE: json.dumps(about)}))
        return
    with replacing(path) as file:
        torch.save({"model": weights, NOTE: about}, file)


def to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights of ours for transformers' ViTMAE: q, k and v apart."""
    result = {}
    for name, tensor in weights.items():
        parts = zip("qkv", tensor.chunk(3), strict=True) if ".qkv." in name else [("", tensor)]
        for part, piece in parts:
            their = name.replace(".qkv.", f".{part}.")
            for ours, theirs in NAMES:
                their = re.sub(rf"\b{re.escape(ours)}", theirs, their)
            result[their] = piece.clone()  # of a view a file would hold the whole
    if any(name.startswith("decoder.") for name in result):
        return result
    return {name.removeprefix("vit."): tensor for name, tensor in result.items()}  # ViTMAEModel


def transformers_config(pretrained: Pretrained) -> dict[str, Any]:
    """Return the content of config.json, where it differs from the defaults of transformers."""
    config = {theirs: getattr(pretrained.config, ours) for ours, theirs in CONFIG.items()}
    kind = "ViTMAEForPreTraining" if pretrained.has_decoder else "ViTMAEModel"
    return config | {
        "architectures": [kind],
        "model_type": "vit_mae",
        "layer_norm_eps": NORM_EPS,
        "image_size": pretrained.img_size,
        "decoder_intermediate_size": 4 * pretrained.config.decoder_width,
        "norm_pix_loss": pretrained.norm_pix_loss,
        "mask_ratio": pretrained.mask_ratio,
    }


def timm_line(pretrained: Pretrained, path: str) -> str:
    """Return the line of Python that loads a file in timm, which has no such model by name."""
    c = pretrained.config
    gated = 'mlp_layer=timm.layers.SwiGLU, act_layer="silu", ' if c.gated_mlp else ""
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
    add("source", type=filled, metavar="RUN_OR_FILE", help="run, checkpoint, or weights")
    add("out", type=filled, metavar="OUT", help="file or folder to write")
    add("--to", choices=("official", "timm", "transformers"), required=True, help="layout to write")
    add("--model", type=filled, metavar="SIZE", help="where the source does not say: tiny:heads=6")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line -> exit status: 1 where it failed, 2 for bad usage."""
    args = read_arguments(argv)
    try:
        size = model_config(args.model) if args.model else None
        pretrained = read_pretrained(args.source, size)
        write_pretrained(pretrained, Path(args.out), args.to)
    except (ImportError, OSError, ValueError) as error:
        process.print_error(str(error), "convert.py")
        return 2 if isinstance(error, ValueError) else 1
    print(f"{args.out}: {args.to}, from {args.source}")
    if args.to == "timm":
        print(f"load it with\n{timm_line(pretrained, args.out)}")
    return 0


if __name__ == "__main__":
    process.make_safe()
    raise SystemExit(main())
