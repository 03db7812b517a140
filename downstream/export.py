"""Write pretrained weights as files that other libraries load."""

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vit
from downstream.layouts import DECODER, to_transformers, transformers_config
from downstream.pretrained import POSITIONS, Pretrained, resize_positions
from downstream.weight_files import NOTE

LAYOUTS = ("official", "timm", "transformers")


def write_pretrained(
    pretrained: Pretrained, out: Path, layout: str, img_size: int | None = None
) -> str:
    """Write the weights in a layout, for images of `img_size` pixels; return how they are loaded.

    `official`: a file of torch.save with the weights under "model". `timm`: the same of the encoder
    alone, or of safetensors where `out` is so called. `transformers`: a folder. Each says what the
    model is under the key `pretrained`. ValueError for a model that the library does not have,
    FileExistsError where there is something at `out`; nothing is left there after an error.
    """
    problem = _why_not(pretrained, out, layout)
    if problem:
        raise ValueError(problem)
    if os.path.lexists(out):
        raise FileExistsError(f"{out} is there already: give another name, or remove it")
    img_size = img_size or pretrained.img_size
    side = int(vit.patch_count(pretrained.config, img_size) ** 0.5)
    about = describe_pretrained(pretrained, img_size)
    weights = {
        name: resize_positions(tensor, side) if name in POSITIONS else tensor
        for name, tensor in pretrained.weights.items()
        if layout != "timm" or not name.startswith(DECODER)
    }
    with tempfile.TemporaryDirectory(prefix=".convert_", dir=out.parent) as folder:
        new = Path(folder, out.name)  # renamed when it is whole
        if layout == "transformers":
            new.mkdir()
            config = transformers_config(pretrained.config, img_size, pretrained.norm_pix_loss)
            kind = "ViTMAEForPreTraining" if pretrained.has_decoder else "ViTMAEModel"
            text = json.dumps({"architectures": [kind], **config}, indent=2)
            (new / "config.json").write_text(text + "\n")
            _save_safetensors(to_transformers(weights), new / "model.safetensors", about)
        elif out.suffix == ".safetensors":
            _save_safetensors(weights, new, about)
        else:
            content = {"model": _separate(weights), NOTE: about}
            torch.save(content | ({"step": about["step"]} if about["step"] else {}), new)
        new.rename(out)
    return loading_line(replace(pretrained, img_size=img_size), out, layout)


def _why_not(pretrained: Pretrained, out: Path, layout: str) -> str | None:
    """Say why a library cannot load the model; None where it can."""
    config, safe = pretrained.config, out.suffix == ".safetensors"
    if config.gated_mlp and layout != "timm":
        return f"{pretrained.name} has a gated MLP, which of all layouts only timm has: --to timm"
    if layout == "official" and config.channels != 3:
        return (
            f"{pretrained.name} is of images with {config.channels} channels, the official release "
            "has 3: use --to timm or --to transformers"
        )
    if layout == "official" and safe:
        return f"{out}: the official code loads files of torch.save: name it .pth"
    if (safe or layout == "transformers") and not find_spec("safetensors"):
        return f"{out} needs the package safetensors: pip install safetensors"
    return None


def describe_pretrained(pretrained: Pretrained, img_size: int) -> dict[str, Any]:
    """Return what a file says of its weights, by the names of the trainer's flags where it can."""
    config, stats = pretrained.config, pretrained.stats
    return {
        "model": pretrained.size,
        "img_size": img_size,
        "heads": config.heads,
        "decoder_heads": config.decoder_heads,
        "norm_pix_loss": pretrained.norm_pix_loss,
        "channel_mean": list(stats.mean),
        "channel_std": list(stats.std),
        "image_dtype": stats.dtype,
        "step": pretrained.step,
        "commit": current_commit(),
    }


def current_commit() -> str | None:
    """Return the git commit of these scripts; None where they are no checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None


def _separate(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give each tensor memory of its own: a view would be saved with all that it is a part of."""
    return {
        name: t if t.untyped_storage().nbytes() == t.nbytes and t.is_contiguous() else t.clone()
        for name, t in weights.items()
    }


def _save_safetensors(weights: dict[str, Tensor], path: Path, about: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(_separate(weights), path, {"format": "pt", NOTE: json.dumps(about)})


def loading_line(pretrained: Pretrained, out: Path, layout: str) -> str:
    """Return the line of Python that loads a written file."""
    c, kind = pretrained.config, "ForPreTraining" if pretrained.has_decoder else "Model"
    if layout == "transformers":
        return f'transformers.ViTMAE{kind}.from_pretrained("{out}")'
    if layout == "official":
        strict = "" if pretrained.has_decoder else ", strict=False"
        return f'model.load_state_dict(torch.load("{out}", weights_only=True)["model"]{strict})'
    gated = 'mlp_layer=timm.layers.SwiGLU, act_layer="silu", ' if c.gated_mlp else ""
    channels = f"in_chans={c.channels}, " if c.channels != 3 else ""
    return (
        f'timm.create_model("vit_base_patch16_224", img_size={pretrained.img_size}, '
        f"patch_size={c.patch}, embed_dim={c.width}, depth={c.depth}, num_heads={c.heads}, "
        f"mlp_ratio={c.mlp_width} / {c.width}, {gated}{channels}num_classes=0, "
        f'checkpoint_path="{out}")'
    )
