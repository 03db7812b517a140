"""Read the weights of a pretrained model, and what it was trained on, without ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import checkpoint
import data
import vit
from runtime.model_size import model_config


@dataclass(frozen=True)
class Pretrained:
    """Hold the whole weights of one model on the CPU, and what they were trained on."""

    name: str  # the path that was read, or `random`
    config: vit.ViTConfig
    img_size: int
    norm_pix_loss: bool
    stats: data.ChannelStats  # by which its images were normalised
    weights: dict[str, Tensor]  # by the names of vit.ViTMAE; an encoder alone has no decoder's
    step: int | None = None  # optimizer steps trained; None: not known
    size: str | None = None  # row of vit.MODELS; None: none of them

    @property
    def has_decoder(self) -> bool:
        return "decoder_pred.weight" in self.weights


def read_pretrained(path: str | Path) -> Pretrained:
    """Read a run (its newest whole checkpoint), or the folder of one checkpoint.

    ValueError or OSError, one sentence, where there is no such model.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: give the --out of a run, or a checkpoint")
    if (path / checkpoint.MANIFEST).exists():
        return _read_checkpoint(path)
    problems = []
    for folder in reversed(checkpoint.list_checkpoints(path)):
        try:
            return _read_checkpoint(folder)
        except checkpoint.Damaged as error:
            problems.append(str(error))
    what = "; ".join(problems) or "it contains no step_..."
    raise ValueError(f"no checkpoint in {path} can be read: {what}")


def _read_checkpoint(folder: Path) -> Pretrained:
    """Read a checkpoint of train_fsdp.py; Damaged where it is none."""
    flags = checkpoint.read_manifest(folder).get("flags")
    try:
        shape = _shape_of_run(flags if isinstance(flags, dict) else {})
    except (KeyError, TypeError, ValueError) as error:
        raise checkpoint.Damaged(
            f"{folder} was not written by train_fsdp.py: its flags give no model ({error!r:.80})"
        ) from None
    manifest, weights = checkpoint.read_model(folder)
    return Pretrained(str(folder), weights=weights, step=manifest["step"], **shape)


def _shape_of_run(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Read the flags of a run: what it trained and on what images."""
    size, channels = flags["model"], int(flags.get("channels", 3))
    stats = data.IMAGENET  # also of a checkpoint older than these flags
    if flags.get("channel_mean"):
        mean, std = (tuple(map(float, flags[key])) for key in ("channel_mean", "channel_std"))
        stats = data.ChannelStats(mean, std, str(flags["image_dtype"]))
    return {
        "config": replace(model_config(size), channels=channels),
        "img_size": int(flags["img_size"]),
        "norm_pix_loss": bool(flags["norm_pix_loss"]),
        "stats": stats,
        "size": size,
    }


def random_weights(like: Pretrained, seed: int = 0) -> Pretrained:
    """Draw the initial values of a model that has not learned anything: the baseline of a score."""
    with torch.device("meta"):
        shapes = vit.ViTMAE(like.config, like.img_size).state_dict()
    weights = {n: vit.initial_value(like.config, n, t.shape, seed) for n, t in shapes.items()}
    return replace(like, name="random", weights=weights, step=0)


def resize_positions(table: Tensor, side: int) -> Tensor:
    """Resample a position table (1, 1+L, D) to side*side patches, bicubic; cls keeps its row.

    As fine-tuning at another image size does (arXiv 2010.11929, section 3.2).
    """
    old = math.isqrt(table.shape[1] - 1)
    if old == side:
        return table
    grid = table[:, 1:].float().reshape(1, old, old, -1).permute(0, 3, 1, 2)  # (1, D, old, old)
    grid = F.interpolate(grid, (side, side), mode="bicubic", antialias=True)
    return torch.cat([table[:, :1], grid.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)


def build_pretrained(
    pretrained: Pretrained, device: torch.device, img_size: int | None = None
) -> vit.ViTMAE:
    """Build the whole model with these weights on one device, for images of `img_size` pixels.

    An encoder alone gets a decoder that has not learned anything. ValueError names the first weight
    that is missing or has another shape than the model's; also where patches do not fill the image.
    """
    img_size = img_size or pretrained.img_size
    with torch.device("meta"):
        model = vit.ViTMAE(pretrained.config, img_size, pretrained.norm_pix_loss)
    side = math.isqrt(vit.patch_count(pretrained.config, img_size))
    weights = dict(pretrained.weights)
    for name in {"pos_embed", "decoder_pos_embed"} & weights.keys():
        weights[name] = resize_positions(weights[name], side)
    for name, own in model.state_dict().items():
        if not pretrained.has_decoder and name.startswith(("decoder_", "mask_token")):
            weights[name] = vit.initial_value(pretrained.config, name, own.shape)
        found = tuple(weights[name].shape) if name in weights else "missing"
        if found != tuple(own.shape):
            own_shape = f"{tuple(own.shape)} in the model"
            raise ValueError(f"{pretrained.name}: {name} is {found}, {own_shape}")
    model.to_empty(device=device)
    model.load_state_dict(weights)
    return model.eval()
