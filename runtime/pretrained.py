"""Read a pretrained model, whatever wrote it: its weights, and what it was trained on.

That is a run or a checkpoint of train_fsdp.py, or what weight_files.py reads: a file of the
official MAE, timm or convert.py, a folder of transformers or timm. No code in a file is run.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import checkpoint
import data
import vit
from runtime.config import model_config
from runtime.weight_files import Said, read_weight_file

DECODER = ("decoder_", "mask_token")  # how the names of a decoder's weights begin
OFFICIAL_LARGE = vit.ViTConfig(1024, 24, 4096, 16, 16)  # released too, but no row of vit.MODELS
Shapes = dict[str, tuple[int, ...]]  # name of a weight -> its shape


@dataclass(frozen=True)
class Pretrained:
    """Hold the whole weights of one model on the CPU, and what they were trained on."""

    name: str  # the path that was read
    config: vit.ViTConfig
    img_size: int
    norm_pix_loss: bool
    mask_ratio: float
    stats: data.ChannelStats  # used to normalise its images
    weights: Mapping[str, Tensor]  # names as in vit.ViTMAE; without a decoder if it has none
    step: int | None  # optimizer steps trained; None: not known
    assumed: Mapping[str, str]  # field -> what was assumed, because the source does not say it

    @property
    def has_decoder(self) -> bool:
        return "decoder_pred.weight" in self.weights


def read_pretrained(path: str | Path, size: vit.ViTConfig | None = None) -> Pretrained:
    """Read a run (its newest checkpoint), one checkpoint, or weights in another layout.

    Tensors are read when they are used. `size` is the size of the model, if a file does not say it.
    ValueError or OSError, one sentence, if there is no such model or a weight is not finite.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there is no {path}: give the --out of a run, a checkpoint, or weights")
    try:
        weights: Mapping[str, Tensor]
        if path.is_dir() and not (path / "config.json").exists():
            weights, said = read_run(path)
        else:
            weights, said = read_weight_file(path)
        return make_pretrained(str(path), weights, said, size)
    except (OSError, checkpoint.CorruptCheckpointError):
        raise
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None
    except Exception as error:  # any kind: a file may contain anything
        what = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path}: {what}") from None


def read_run(run: Path) -> tuple[checkpoint.Weights, Said]:
    """Open a checkpoint, or the newest one of a run -> its weights, and what its flags say."""
    folders = [run]
    if not (run / checkpoint.MANIFEST).exists():
        folders = checkpoint.list_checkpoints(run)
    if not folders:
        raise ValueError("it contains no step_... and no config.json")
    weights = checkpoint.Weights(folders[-1])
    return weights, weights.manifest["flags"] | {"step": weights.manifest["step"]}


def make_pretrained(
    name: str, weights: Mapping[str, Tensor], said: Said, size: vit.ViTConfig | None
) -> Pretrained:
    """Check a model's weights; assume what the source does not state. KeyError, ValueError."""
    shapes: Shapes = {}
    for key, tensor in weights.items():
        shapes[key] = tuple(tensor.shape)
        if not tensor.is_floating_point():
            raise ValueError(f"{key} is of type {tensor.dtype}, not floating-point")
        if not tensor.isfinite().all():
            raise ValueError(f"{key} is not finite")
    config = choose_config(shapes, said, size)
    img_size = image_side(shapes["pos_embed"][1], config.patch, said)
    check_shapes(shapes, config, img_size)

    assumed: dict[str, str] = {}
    if "img_size" not in said:
        square = vit.sincos_positions(config.width, img_size // config.patch)
        if not torch.allclose(weights["pos_embed"].float(), square, atol=1e-2):
            assumed["img_size"] = "its images were square"
    norm_pix_loss = said.get("norm_pix_loss")
    if norm_pix_loss is None:
        norm_pix_loss = True  # as in the paper
        assumed["norm_pix_loss"] = "it predicts normalised patches"
    mask_ratio = said.get("mask_ratio")
    if mask_ratio is None:
        mask_ratio = 0.75
        assumed["mask_ratio"] = "its mask ratio was 0.75"
    if said.get("channel_mean"):
        mean = tuple(said["channel_mean"])
        std = tuple(said["channel_std"])
        stats = data.ChannelStats(mean, std, said["image_dtype"])
    else:
        stats, assumed["stats"] = default_stats(config.channels)
    check_said(config, norm_pix_loss, mask_ratio, stats)
    return Pretrained(
        name=name,
        config=config,
        img_size=img_size,
        norm_pix_loss=norm_pix_loss,
        mask_ratio=mask_ratio,
        stats=stats,
        weights=weights,
        step=said.get("step"),
        assumed=assumed,
    )


def choose_config(shapes: Shapes, said: Said, size: vit.ViTConfig | None) -> vit.ViTConfig:
    """Return the stated configuration, or the known one that has these shapes.

    A shape does not show the number of heads. KeyError if a weight is missing, ValueError if no
    known size has such shapes.
    """
    if "config" in said:
        return vit.ViTConfig(**said["config"])
    if "model" in said:  # the flags of a run
        return replace(model_config(said["model"]), channels=said["channels"])
    width, channels, patch, _ = shapes["patch_embed.proj.weight"]
    depth = sum(bool(re.fullmatch(r"blocks\.\d+\.norm1\.weight", name)) for name in shapes)
    if "heads" in said and size and said["heads"] != size.heads:
        raise ValueError(f"it has {said['heads']} heads, but the model given for it {size.heads}")
    if "heads" in said and not size:
        mlp_width = shapes["blocks.0.mlp.fc2.weight"][1]
        gated = "blocks.0.mlp.fc1_g.weight" in shapes
        return vit.ViTConfig(width, depth, mlp_width, said["heads"], patch, gated, channels)
    for row in *vit.MODELS.values(), OFFICIAL_LARGE:
        if not size and (row.width, row.depth) == (width, depth):
            size = row
    if not size:
        advice = "`python convert.py --model` writes a file that says its size"
        raise ValueError(f"no known size has width {width} and depth {depth}: {advice}")
    return replace(size, patch=patch, channels=channels)


def image_side(positions: int, patch: int, said: Said) -> int:
    """Return the side in pixels of the images that positions belong to; ValueError if not square.

    `positions` counts the class token's.
    """
    side = patch * math.isqrt(max(0, positions - 1))
    size = said.get("img_size", side)
    height, width = (size, size) if isinstance(size, int) else size
    if height != width:
        raise ValueError(f"its images have {height} x {width} pixels: they must be square")
    if height % patch or positions != 1 + (height // patch) ** 2:
        what = f"it has {positions} positions, for images of {height} pixels in patches of {patch}"
        raise ValueError(f"{what}: one for the class token and one for each patch are needed")
    return height


def default_stats(channels: int) -> tuple[data.ChannelStats, str]:
    """Return the statistics for a model that says none, and what they are, in words."""
    if channels == 3:
        return data.IMAGENET, "its images were normalised by the mean and deviation of ImageNet"
    mean = (0.0,) * channels
    std = (1.0,) * channels
    return data.ChannelStats(mean, std, "float32"), "its images were not normalised"


def check_said(
    config: vit.ViTConfig, norm_pix_loss: bool, mask_ratio: float, stats: data.ChannelStats
) -> None:
    """Raise ValueError for a statement about the weights that cannot be true."""
    for values in stats.mean, stats.std:
        if len(values) != config.channels:
            raise ValueError(f"it has {config.channels} channels, and statistics of {len(values)}")
        if not all(map(math.isfinite, values)):
            raise ValueError("the mean or deviation of a channel is not finite")
    if min(stats.std) <= 0:
        raise ValueError(f"the deviation of a channel is {min(stats.std)}: it must be above 0")
    if not isinstance(norm_pix_loss, bool):
        raise ValueError(f"norm_pix_loss is {norm_pix_loss!r}: true or false is needed")
    if not 0 <= mask_ratio < 1:
        raise ValueError(f"mask_ratio is {mask_ratio!r}: 0 or more and less than 1 is needed")


def check_shapes(shapes: Shapes, config: vit.ViTConfig, img_size: int) -> None:
    """Raise ValueError unless they are those of a model, perhaps without a decoder."""
    with torch.device("meta"):
        expected = vit.ViTMAE(config, img_size).state_dict()
    unknown = sorted(shapes.keys() - expected.keys())
    if unknown:
        what = "this model, which has no classifier, LayerScale or register tokens"
        raise ValueError(f"{unknown[0]} is no weight of {what}")
    has_decoder = "decoder_pred.weight" in shapes
    for name, tensor in expected.items():
        if name.startswith(DECODER) and not has_decoder:
            continue
        found = shapes.get(name, "missing")
        if found != tuple(tensor.shape):
            raise ValueError(f"{name} is {found}, {tuple(tensor.shape)} in the model")


def say_assumed(pretrained: Pretrained, *names: str, say: Callable[[str], None] = print) -> None:
    """Say which of these fields had to be assumed; say nothing if the source stated them all."""
    assumed = [pretrained.assumed[name] for name in names if name in pretrained.assumed]
    if assumed:
        say(f"note: {pretrained.name} does not say it, so it is assumed that {', '.join(assumed)}")


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
    """Return one weight of a model that `check_fits`; a missing decoder is drawn by `seed`."""
    if name.startswith(DECODER) and not pretrained.has_decoder:
        return vit.initial_value(pretrained.config, name, shape, seed)
    value = pretrained.weights[name]
    if "pos_embed" in name:
        return resize_positions(value, math.isqrt(shape[1] - 1))
    return value


def build_pretrained(
    pretrained: Pretrained, device: torch.device, img_size: int | None = None
) -> vit.ViTMAE:
    """Build the whole model with these weights on one device, for images of `img_size` pixels.

    ValueError if patches do not fill the image.
    """
    if img_size is None:
        img_size = pretrained.img_size
    with torch.device("meta"):
        model = vit.ViTMAE(pretrained.config, img_size, pretrained.norm_pix_loss)
    model.to_empty(device=device)
    for name, own in model.state_dict().items():  # one at a time: no second whole model
        own.copy_(value_of(pretrained, name, own.shape))
    return model.eval()
