"""Draw what a model fills in: original, masked, prediction, prediction among visible patches."""

import argparse
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

import data
import mesh
import vit
from downstream.images import fixed_noise, open_eval_loader
from downstream.weights import build_pretrained, read_pretrained
from runtime.config import filled, number, whole
from runtime.image_source import list_folder
from runtime.run import check_masking

HELP = "a picture: removed patches, filled in"
COLUMNS = ("original", "masked", "prediction", "prediction + visible")
NORM_PIX = (
    "The model predicts each patch without its mean and deviation. Those of removed patches "
    "are not read from the original: they are interpolated from the visible patches."
)
PIXELS = "The model predicts pixels; visible patches are predicted too, but without training."
STRETCHED = "Three channels are shown, each stretched to the range of the original."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this subcommand."""
    add = parser.add_argument
    add("--images", type=whole(1, 64), default=8, metavar="N", help="evenly over the list (8)")
    add("--mask-ratio", type=number(0, 1), default=0.75, metavar="SHARE", help="default 0.75")
    add("--seed", type=whole(0, 2**63 - 1), default=0, help="of the masks (default 0)")
    add("--out", type=filled, default="reconstruct.png", metavar="FILE", help="reconstruct.png")


def run(args: argparse.Namespace) -> int:
    """Write the picture; ValueError or OSError, one sentence, where that is not possible."""
    pretrained = read_pretrained(args.run)
    if not pretrained.has_decoder:
        raise ValueError(f"{args.run} is an encoder without a decoder: it predicts no pixels")
    device = mesh.pick_device(args.device, mesh.read_ranks({}))
    model = build_pretrained(pretrained, device, args.img_size)
    patches = check_masking(pretrained.config, model.img_size, args.mask_ratio)
    files, _ = list_folder(args.data, None, print)
    count = min(args.images, len(files))
    chosen = [len(files) * i // count for i in range(count)]
    batch = next(open_eval_loader(files, model.img_size, count, 0, pretrained.stats, chosen))
    for index, reason in batch.bad:
        print(f"warning: {files.path(index)} is left out: {reason}")
    if not batch.indices:
        raise ValueError(f"none of the {count} images chosen from {args.data} can be read")
    noise = fixed_noise(args.seed, batch.indices, patches)
    images = data.normalize(batch.images.to(device), pretrained.stats)
    with torch.inference_mode():
        loss, prediction, mask = model(images, args.mask_ratio, noise.to(device))
    stats, norm_pix = pretrained.stats, pretrained.norm_pix_loss
    patch = pretrained.config.patch
    panels = reconstructions(batch.images, prediction, mask, patch, norm_pix, stats)
    names = [files.path(i).removeprefix(args.data).strip("/") for i in batch.indices]
    title = (
        f"{pretrained.name}: {args.mask_ratio:.0%} of the patches removed, mask seed {args.seed}, "
        f"loss {loss.item():.4f}"
    )
    picture = draw_rows(panels, names, [title, *notes(norm_pix, stats)])
    picture.save(args.out, optimize=True)
    print(f"{args.out}: {len(names)} images; loss of the removed patches {loss.item():.4f}")
    return 0


def notes(norm_pix: bool, stats: data.ChannelStats) -> list[str]:
    """Say what a picture shows, in sentences for its foot."""
    return [NORM_PIX if norm_pix else PIXELS, *([] if is_rgb(stats) else [STRETCHED])]


def is_rgb(stats: data.ChannelStats) -> bool:
    """Tell whether images can be shown as they are."""
    return stats.dtype == "uint8" and len(stats.mean) == 3


def unpatchify(patches: Tensor, patch: int) -> Tensor:
    """Put patches (B, L, P*P*C) of square images together -> (B, C, H, W), as vit.patchify cut."""
    b, count, values = patches.shape
    side, channels = round(count**0.5), values // patch**2
    x = patches.reshape(b, side, side, patch, patch, channels)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(b, channels, side * patch, side * patch)


def estimate_statistics(target: Tensor, removed: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of patches (B, L, V), two of (B, L, 1), as far as they are known.

    Visible patches have their own. A removed one (`removed` (B, L) is 1 there) gets the mean of the
    visible ones, weighted by 1 / distance^4 (Shepard 1968), so that nothing of it leaks.
    """
    variance, mean = torch.var_mean(target, dim=-1)  # (B, L)
    own = torch.stack([mean, (variance + 1e-6).sqrt()], dim=-1)  # (B, L, 2)
    side = round(target.shape[1] ** 0.5)
    row, column = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)
    place = torch.stack([row, column], dim=-1).float()  # (L, 2)
    weight = torch.cdist(place, place).clamp(min=1).pow(-4) * (1 - removed)[:, None]  # (B, L, L)
    near = weight @ own / weight.sum(-1, keepdim=True)  # (B, L, 2)
    mean, deviation = torch.where(removed[..., None] > 0, near, own).split(1, dim=-1)
    return mean, deviation


def reconstructions(
    images: Tensor,
    prediction: Tensor,
    removed: Tensor,
    patch: int,
    norm_pix: bool,
    stats: data.ChannelStats,
) -> Tensor:
    """Make the four COLUMNS of images (B, C, H, W) as loaded -> (B, 4, 3, H, W) uint8, on the CPU.

    `prediction` (B, L, P*P*C) and `removed` (B, L) are what a model of `patch` pixels returned.
    """
    prediction, removed = prediction.float().cpu(), removed.float().cpu()
    target = vit.patchify(data.normalize(images.cpu(), stats), patch)  # (B, L, P*P*C)
    if norm_pix:
        mean, deviation = estimate_statistics(target, removed)
        prediction = prediction * deviation + mean
    channels = [min(i, len(stats.mean) - 1) for i in range(3)]
    original, predicted = (unpatchify(x, patch)[:, channels] for x in (target, prediction))
    if is_rgb(stats):
        mean, std = (torch.tensor(x)[:, None, None] for x in (stats.mean, stats.std))
        original, predicted = original * std + mean, predicted * std + mean
    else:
        low, high = original.amin((2, 3), keepdim=True), original.amax((2, 3), keepdim=True)
        scale = (high - low).clamp(min=1e-6)
        original, predicted = (original - low) / scale, (predicted - low) / scale
    hole = unpatchify(removed[..., None].expand(-1, -1, patch**2), patch) > 0  # (B, 1, H, W)
    grey = torch.full_like(original, 0.5)
    masked, pasted = torch.where(hole, grey, original), torch.where(hole, predicted, original)
    shown = torch.stack([original, masked, predicted, pasted], dim=1)
    return (shown.clamp(0, 1) * 255).round().to(torch.uint8)


def draw_rows(panels: Tensor, names: Sequence[str], foot: Sequence[str]) -> Image.Image:
    """Arrange panels (B, 4, 3, H, W) with column heads, the names of the images, and a foot."""
    gap, line, side = 6, 16, panels.shape[-1]
    zoom = max(1, 160 // side)  # small images as larger squares, pixel by pixel
    side *= zoom
    big = F.interpolate(panels.flatten(0, 1).float(), scale_factor=zoom)  # nearest
    cells = big.unflatten(0, panels.shape[:2]).to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
    font = ImageFont.load_default()
    width = gap + len(COLUMNS) * (side + gap)
    foot = [part for text in foot for part in wrap(text, width - 2 * gap, font)]
    height = 2 * line + len(names) * (side + line + gap) + len(foot) * line
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)

    def write(x: int, y: int, text: str) -> None:
        plain = text.encode("ascii", "replace").decode()  # the default font may have no others
        pen.text((x, y), plain, fill="black", font=font)

    for column, head in enumerate(COLUMNS):
        write(gap + column * (side + gap), 2, head)
    for i, (row, name) in enumerate(zip(cells, names, strict=True)):
        top = line + i * (side + line + gap)
        for column, cell in enumerate(row):
            picture.paste(Image.fromarray(cell), (gap + column * (side + gap), top))
        write(gap, top + side + 1, name)
    for i, text in enumerate(foot):
        write(gap, height - (len(foot) - i) * line - gap, text)
    return picture


def wrap(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> list[str]:
    """Break a text into lines of at most `width` pixels, at its spaces."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
