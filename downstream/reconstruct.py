"""Draw what a model fills in, beside what interpolation does without any model."""

import argparse
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
from checkpoint import replacing
from downstream.images import EvalImages, fixed_noise
from downstream.weights import Pretrained, build_pretrained, read_pretrained
from runtime.config import filled, number, whole
from runtime.image_source import list_folder
from runtime.run import check_masking

HELP = "a picture: removed patches, filled in"
COLUMNS = ("original", "masked", "interpolation", "prediction")
SIDE = 256  # pixels that an image has in the picture, about; smaller ones are enlarged
GAP = 16  # pixels between images, for the names of the columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this subcommand."""
    add = parser.add_argument
    add("--images", type=whole(1, 64), default=8, metavar="N", help="evenly over the list (8)")
    add("--mask-ratio", type=number(0, 1), metavar="SHARE", help="default: as in pretraining")
    add("--seed", type=whole(0, 2**63 - 1), default=0, help="of the masks (default 0)")
    add("--out", type=filled, default="reconstruct.png", metavar="PNG", help="reconstruct.png")


def run(args: argparse.Namespace) -> int:
    """Write the picture; ValueError or OSError, one sentence, where that is not possible."""
    pretrained = read_pretrained(args.run)
    if not pretrained.has_decoder:
        raise ValueError(f"{args.run} is an encoder without a decoder: it predicts no pixels")
    device = mesh.pick_device(args.device, mesh.read_ranks({}))
    model = build_pretrained(pretrained, device, args.img_size)
    ratio = pretrained.mask_ratio if args.mask_ratio is None else args.mask_ratio
    patches = check_masking(pretrained.config, model.img_size, ratio)
    files, _ = list_folder(args.data, None, print)
    count = min(args.images, len(files))
    chosen = [len(files) * i // count for i in range(count)]
    stats = pretrained.stats
    batch = EvalImages(files, model.img_size, stats)[chosen]
    for index, reason in batch.bad.items():
        print(f"warning: {files.path(index)} is left out: {reason}")
    if not batch.indices:
        raise ValueError(f"none of the {count} images chosen from {args.data} can be read")
    noise = fixed_noise(args.seed, batch.indices, patches).to(device)
    images = data.normalize(batch.images.to(device), stats)
    with torch.inference_mode():
        loss, prediction, mask = model(images, ratio, noise)
    panels = reconstructions(pretrained, batch.images, prediction, mask)
    with replacing(Path(args.out)) as file:
        draw_rows(panels).save(file, "PNG", optimize=True)
    print(f"{args.out}: {len(panels)} images; loss of the removed patches {loss.item():.4f}")
    error = panels[:, 2:].double() - panels[:, :1]  # of interpolation and prediction
    decibels = 10 * torch.log10(255**2 / error.square().mean((2, 3, 4)))  # (B, 2)
    names = [files.path(i) for i in batch.indices]
    for name, row in zip([*names, "mean"], [*decibels, decibels.mean(0)], strict=True):
        print(f"  PSNR {row[1]:.2f} dB, interpolation {row[0]:.2f} dB  {name}")
    return 0


def unpatchify(patches: Tensor, patch: int) -> Tensor:
    """Put patches (B, L, P*P*C) of square images together -> (B, C, H, W), as vit.patchify cut."""
    side = patch * round(patches.shape[1] ** 0.5)
    columns = patches.unflatten(2, (patch**2, -1)).permute(0, 3, 2, 1)  # (B, C, P*P, L)
    return F.fold(columns.flatten(1, 2), side, patch, stride=patch)


def fill_from_visible(values: Tensor, removed: Tensor) -> Tensor:
    """Replace what is known of removed patches by the mean of the visible ones: (B, L, V) -> same.

    `removed` (B, L) is 1 there. Weighted by 1 / distance^4 (Shepard 1968).
    """
    side = round(values.shape[1] ** 0.5)
    place = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()  # (L, 2)
    weight = torch.cdist(place, place).clamp(min=1).pow(-4) * (1 - removed)[:, None]  # (B, L, L)
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

    `prediction` (B, L, P*P*C) and `removed` (B, L) are what the model returned. Visible patches are
    the original's.
    """
    patch, stats = pretrained.config.patch, pretrained.stats
    prediction, removed = prediction.float().cpu(), removed.float().cpu()
    target = vit.patchify(data.normalize(images.cpu(), stats), patch)  # (B, L, P*P*C)
    if pretrained.norm_pix_loss:  # of a removed patch both are estimated: nothing of it leaks
        variance, mean = torch.var_mean(target, dim=-1, keepdim=True)  # (B, L, 1)
        prediction = prediction * fill_from_visible((variance + 1e-6).sqrt(), removed)
        prediction = prediction + fill_from_visible(mean, removed)
    fillings = [interpolate(target, removed, patch), unpatchify(prediction, patch)]
    x = torch.stack([unpatchify(target, patch), *fillings], dim=1)  # (B, 3, C, H, W)
    x = x[:, :, [min(i, len(stats.mean) - 1) for i in range(3)]]  # (B, 3, 3, H, W)
    if stats.dtype == "uint8" and len(stats.mean) == 3:  # can be shown as it is
        std, mean = (torch.tensor(values)[:, None, None] for values in (stats.std, stats.mean))
        x = x * std + mean
    else:
        low, high = x[:, :1].amin((3, 4), keepdim=True), x[:, :1].amax((3, 4), keepdim=True)
        x = (x - low) / (high - low).clamp(min=1e-6)
    original, filled = x.split((1, 2), dim=1)
    hole = unpatchify(removed[..., None].expand(-1, -1, patch**2), patch)[:, None] > 0
    grey = torch.full_like(original, 0.5)
    x = torch.where(hole, torch.cat([original, grey, filled], dim=1), original)
    return (x.clamp(0, 1) * 255).round().to(torch.uint8)


def draw_rows(panels: Tensor) -> Image.Image:
    """Arrange panels (B, 4, 3, H, W) below the names of the columns."""
    zoom = max(1, SIDE // panels.shape[-1])
    big = F.interpolate(panels.flatten(0, 1), scale_factor=zoom)  # nearest: pixel by pixel
    picture = to_pil_image(make_grid(big, len(COLUMNS), padding=GAP, pad_value=255))
    for i, name in enumerate(COLUMNS):
        place = GAP + i * (big.shape[-1] + GAP), 2
        ImageDraw.Draw(picture).text(place, name, fill="black")
    return picture
