"""Draw what a model fills in for removed patches, beside plain interpolation."""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

import data
import mesh
import vit
from checkpoint import atomic_write
from runtime.config import int_in_range, nonempty, number
from runtime.eval_images import EvalImages, fixed_noise
from runtime.image_source import list_folder
from runtime.pretrained import Pretrained, build_pretrained, read_pretrained, say_assumed
from runtime.run import check_masking

HELP = "a picture: removed patches, filled in"
COLUMNS = ("original", "masked", "interpolation", "prediction")
SIDE = 256  # smaller images are enlarged to about so many pixels
GAP = 16  # pixels between images; the names of the columns stand there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this subcommand."""
    add = parser.add_argument
    images = "evenly over the list (8)"
    add("--images", type=int_in_range(1, 64), default=8, metavar="N", help=images)
    add("--mask-ratio", type=number(0, 1), metavar="SHARE", help="default: as in pretraining")
    norm_pix = "the model predicts normalised patches, or pixels (default: as in pretraining)"
    add("--norm-pix-loss", action=argparse.BooleanOptionalAction, help=norm_pix)
    add("--seed", type=int_in_range(0, 2**63 - 1), default=0, help="of the masks (default 0)")
    add("--out", type=nonempty, default="reconstruct.png", metavar="PNG", help="reconstruct.png")


def run(args: argparse.Namespace) -> int:
    """Write the picture; ValueError or OSError, one sentence, if that is not possible."""
    pretrained = read_for_pictures(args)
    device = mesh.pick_device(args.device, mesh.read_ranks({}))
    model = build_pretrained(pretrained, device, args.img_size)
    patches = check_masking(pretrained.config, model.img_size, pretrained.mask_ratio)
    files = list_folder(args.data, args.include, args.exclude)
    count = min(args.images, len(files))
    chosen = [len(files) * i // count for i in range(count)]
    batch = EvalImages(files, model.img_size, pretrained.stats)[chosen]
    for index, reason in batch.bad.items():
        print(f"warning: {files.path(index)} is left out: {reason}")
    if not batch.indices:
        raise ValueError(f"none of the {count} images chosen from {args.data} can be read")

    noise = fixed_noise(args.seed, batch.indices, patches).to(device)
    images = data.normalize(batch.images.to(device), pretrained.stats)
    with torch.inference_mode():
        loss, prediction, mask = model(images, pretrained.mask_ratio, noise)
    panels = reconstructions(pretrained, batch.images, prediction, mask)
    with atomic_write(Path(args.out)) as file:
        draw_rows(panels).save(file, "PNG", optimize=True)
    print(f"{args.out}: {len(panels)} images; loss of the removed patches {loss.item():.4f}")
    print_psnr(panels, [files.path(i) for i in batch.indices])
    return 0


def read_for_pictures(args: argparse.Namespace) -> Pretrained:
    """Read a model with its decoder, apply the flags, say what is assumed; ValueError."""
    pretrained = read_pretrained(args.run)
    if not pretrained.has_decoder:
        raise ValueError(f"{args.run} is an encoder without a decoder: it predicts no pixels")
    unknown = ["img_size", "stats"]
    if args.mask_ratio is not None:
        pretrained = replace(pretrained, mask_ratio=args.mask_ratio)
    if args.norm_pix_loss is None:
        unknown.append("norm_pix_loss")
    else:
        pretrained = replace(pretrained, norm_pix_loss=args.norm_pix_loss)
    say_assumed(pretrained, *unknown)
    return pretrained


def print_psnr(panels: Tensor, names: list[str]) -> None:
    """Print the PSNR of each image of `panels` (B, 4, 3, H, W) uint8, and their mean."""
    error = panels[:, 2:].double() - panels[:, :1]  # interpolation, prediction
    decibels = 10 * torch.log10(255**2 / error.square().mean((2, 3, 4)))  # (B, 2)
    for name, row in zip([*names, "mean"], [*decibels, decibels.mean(0)], strict=True):
        print(f"  PSNR {row[1]:.2f} dB, interpolation {row[0]:.2f} dB  {name}")


def unpatchify(patches: Tensor, patch: int) -> Tensor:
    """Join the patches (B, L, P*P*C) of square images -> (B, C, H, W); inverts vit.patchify."""
    side = patch * round(patches.shape[1] ** 0.5)
    columns = patches.unflatten(2, (patch**2, -1)).permute(0, 3, 2, 1)  # (B, C, P*P, L)
    return F.fold(columns.flatten(1, 2), side, patch, stride=patch)


def fill_from_visible(values: Tensor, removed: Tensor) -> Tensor:
    """Replace the values (B, L, V) of removed patches with a weighted mean of the visible ones.

    `removed` (B, L) is 1 for a removed patch. A visible patch has the weight 1 / distance^4
    (Shepard 1968).
    """
    side = round(values.shape[1] ** 0.5)
    position = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()  # (L, 2)
    distance = torch.cdist(position, position).clamp(min=1)  # (L, L)
    visible = (1 - removed)[:, None]  # (B, 1, L)
    weight = distance.pow(-4) * visible  # (B, L, L)
    near = weight @ values / weight.sum(-1, keepdim=True)
    return torch.where(removed[..., None] > 0, near, values)


def interpolate(target: Tensor, removed: Tensor, patch: int) -> Tensor:
    """Fill removed patches (B, L, P*P*C) from the colours of the visible ones -> (B, C, H, W)."""
    side = round(target.shape[1] ** 0.5)
    colours = target.unflatten(2, (patch**2, -1)).mean(dim=2)  # (B, L, C)
    grid = fill_from_visible(colours, removed).mT.unflatten(2, (side, side))  # (B, C, side, side)
    return F.interpolate(grid, scale_factor=patch, mode="bilinear")


def reconstructions(
    pretrained: Pretrained, images: Tensor, prediction: Tensor, removed: Tensor
) -> Tensor:
    """Make the COLUMNS of images (B, C, H, W) as loaded -> (B, 4, 3, H, W) uint8, on the CPU.

    `prediction` (B, L, P*P*C) and `removed` (B, L) are what the model returned. Every column
    shows the visible patches of the original.
    """
    patch = pretrained.config.patch
    prediction = prediction.float().cpu()
    removed = removed.float().cpu()
    target = vit.patchify(data.normalize(images.cpu(), pretrained.stats), patch)  # (B, L, P*P*C)
    if pretrained.norm_pix_loss:
        # The mean and deviation of a removed patch are estimated, too: nothing of it may show.
        variance, mean = torch.var_mean(target, dim=-1, keepdim=True)  # (B, L, 1)
        prediction = prediction * fill_from_visible((variance + 1e-6).sqrt(), removed)
        prediction = prediction + fill_from_visible(mean, removed)
    original = unpatchify(target, patch)  # (B, C, H, W)
    interpolation = interpolate(target, removed, patch)
    filled = unpatchify(prediction, patch)
    shown = to_rgb(torch.stack([original, interpolation, filled], dim=1), pretrained.stats)

    hole = unpatchify(removed[..., None].expand(-1, -1, patch**2), patch)[:, None] > 0
    grey = torch.full_like(shown[:, :1], 0.5)
    columns = torch.cat([shown[:, :1], grey, shown[:, 1:]], dim=1)  # (B, 4, 3, H, W)
    columns = torch.where(hole, columns, shown[:, :1])
    columns[:, 0] = shown[:, 0]
    return (columns.clamp(0, 1) * 255).round().to(torch.uint8)


def to_rgb(x: Tensor, stats: data.ChannelStats) -> Tensor:
    """Turn normalised images (B, N, C, H, W) into RGB from 0 to 1 (B, N, 3, H, W).

    The first of N is the original. If the images are not 8-bit RGB, their first three channels are
    stretched to the range of the original.
    """
    channels = len(stats.mean)
    x = x[:, :, [min(i, channels - 1) for i in range(3)]]
    if stats.dtype == "uint8" and channels == 3:
        std = torch.tensor(stats.std)[:, None, None]
        mean = torch.tensor(stats.mean)[:, None, None]
        return x * std + mean
    low = x[:, :1].amin((3, 4), keepdim=True)
    high = x[:, :1].amax((3, 4), keepdim=True)
    return (x - low) / (high - low).clamp(min=1e-6)


def draw_rows(panels: Tensor) -> Image.Image:
    """Arrange panels (B, 4, 3, H, W) below the names of the columns."""
    zoom = max(1, SIDE // panels.shape[-1])
    big = F.interpolate(panels.flatten(0, 1), scale_factor=zoom)  # mode nearest: repeats pixels
    picture = to_pil_image(make_grid(big, len(COLUMNS), padding=GAP, pad_value=255))
    for i, name in enumerate(COLUMNS):
        left = GAP + i * (big.shape[-1] + GAP)
        ImageDraw.Draw(picture).text((left, 2), name, fill="black")
    return picture
