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
from downstream.layouts import DECODER, infer_config
from downstream.weight_files import read_weights
from runtime.config import model_config

POSITIONS = ("pos_embed", "decoder_pos_embed")


@dataclass(frozen=True)
class Pretrained:
    """Hold the whole weights of one model on the CPU, and what they were trained on."""

    name: str  # the path that was read, or `random`
    config: vit.ViTConfig
    img_size: int
    norm_pix_loss: bool
    stats: data.ChannelStats  # by which its images were normalised
    weights: Mapping[str, Tensor]  # by the names of vit.ViTMAE; an encoder alone has no decoder's
    step: int | None = None  # optimizer steps trained; None: not known
    size: str | None = None  # as --model takes it; None: not known

    @property
    def has_decoder(self) -> bool:
        return "decoder_pred.weight" in self.weights


def read_pretrained(
    path: str | Path, heads: tuple[int | None, int | None] = (None, None)
) -> Pretrained:
    """Read a run (its newest whole checkpoint), one checkpoint, or weights in another layout.

    Those are a file of the official MAE, of timm or of convert.py, and a folder of transformers.
    Tensors of files are mapped into memory, those of a checkpoint read.
    `heads` are those of encoder and decoder where the file does not say. ValueError or OSError, one
    sentence, where there is no such model.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {path}: give the --out of a run, a checkpoint, or a file of weights"
        )
    if (path / checkpoint.MANIFEST).exists():
        return _read_checkpoint(path)
    if not path.is_dir() or (path / "config.json").exists():
        return _read_file(path, *heads)
    problems = []
    for folder in reversed(checkpoint.list_checkpoints(path)):
        try:
            return _read_checkpoint(folder)
        except checkpoint.Damaged as error:
            problems.append(str(error))
    what = "; ".join(problems) or "it contains no step_... and no config.json"
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
    return {
        "config": replace(model_config(size), channels=channels),
        "img_size": int(flags["img_size"]),
        "norm_pix_loss": bool(flags["norm_pix_loss"]),
        "stats": _stats(flags, channels),
        "size": size,
    }


def _stats(said: Mapping[str, Any], channels: int) -> data.ChannelStats:
    if not said.get("channel_mean"):  # also of a checkpoint older than these flags
        if channels == 3:
            return data.IMAGENET
        return data.ChannelStats((0.0,) * channels, (1.0,) * channels, "float32")  # as they are
    mean, std = (tuple(map(float, said[key])) for key in ("channel_mean", "channel_std"))
    if not len(mean) == len(std) == channels or not all(0 < s < math.inf for s in std):
        raise ValueError(f"channel_mean and channel_std are not those of {channels} channels")
    return data.ChannelStats(mean, std, str(said["image_dtype"]))


def _read_file(path: Path, heads: int | None, decoder_heads: int | None) -> Pretrained:
    """Read weights that are no checkpoint, as far as they say what they are."""
    weights, said = read_weights(path)
    counts = [said.get("heads") or heads, said.get("decoder_heads") or decoder_heads]
    step = said.get("step")
    try:
        if not all(n is None or (type(n) is int and n > 0) for n in (*counts, step or None)):
            raise ValueError(f"heads {counts!r:.60} and step {step!r:.40} are no such numbers")
        config, img_size = infer_config(shapes_of(weights), *counts)
        stats = _stats(said, config.channels)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    row = (n for n, c in vit.MODELS.items() if replace(c, channels=config.channels) == config)
    norm_pix_loss = said.get("norm_pix_loss") is not False  # not known: as in the recipe
    found = Pretrained(
        str(path), config, img_size, norm_pix_loss, stats, weights, step, next(row, None)
    )
    check_fits(found, config, img_size)
    return found


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


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights by name."""
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def check_fits(pretrained: Pretrained, config: vit.ViTConfig, img_size: int) -> None:
    """Raise ValueError unless these weights fit a model, reading none of them.

    It names what is another number of heads, or the first weight that is missing, has another shape
    or is too many. Position tables fit images of any size, and a model gets a decoder of its own
    where there is none.
    """
    with torch.device("meta"):
        own = {n: tuple(t.shape) for n, t in vit.ViTMAE(config, img_size).state_dict().items()}
    found = shapes_of(pretrained.weights)
    if not pretrained.has_decoder:
        own = {name: shape for name, shape in own.items() if not name.startswith(DECODER)}
    heads = [(pretrained.config.heads, config.heads)]
    if pretrained.has_decoder:
        heads.append((pretrained.config.decoder_heads, config.decoder_heads))
    for theirs, ours in heads:
        if theirs != ours:
            raise ValueError(f"{pretrained.name} has {theirs} heads, the model {ours}")
    for name in POSITIONS:  # of any square of patches
        rows = (*found.get(name, ()), 0, 0)[1]
        if name in own and rows == 1 + math.isqrt(max(0, rows - 1)) ** 2 > 1:
            own[name] = (1, rows, own[name][2])
    for name in [*own, *sorted(found.keys() - own.keys())]:
        saved, wanted = found.get(name, "missing"), own.get(name, "missing")
        if saved != wanted:
            raise ValueError(f"{pretrained.name}: {name} is {saved}, {wanted} in the model")


def value_of(
    pretrained: Pretrained, name: str, shape: torch.Size, *, config: vit.ViTConfig, seed: int = 0
) -> Tensor:
    """Return the value of one weight of a model that `check_fits`, as vit.initial_value does.

    A decoder that there is none of is drawn by `seed`.
    """
    if name.startswith(DECODER) and not pretrained.has_decoder:
        return vit.initial_value(config, name, shape, seed)
    value = pretrained.weights[name]
    return resize_positions(value, math.isqrt(shape[1] - 1)) if name in POSITIONS else value


def build_pretrained(
    pretrained: Pretrained, device: torch.device, img_size: int | None = None
) -> vit.ViTMAE:
    """Build the whole model with these weights on one device, for images of `img_size` pixels.

    An encoder alone gets a decoder that has not learned anything. ValueError as of `check_fits`;
    also where patches do not fill the image.
    """
    config, img_size = pretrained.config, img_size or pretrained.img_size
    check_fits(pretrained, config, img_size)
    with torch.device("meta"):
        model = vit.ViTMAE(config, img_size, pretrained.norm_pix_loss)
    model.to_empty(device=device)
    for name, own in model.state_dict().items():  # one at a time: no second whole model
        own.copy_(value_of(pretrained, name, own.shape, config=config))
    return model.eval()
