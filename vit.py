"""ViT-MAE: a vision transformer that learns by filling in removed patches (arXiv 2111.06377).

The model alone: it knows nothing about ranks or files. Sharding is applied from outside (shard.py).
Copy this one file and `ViTMAE(MODELS["base"])` is a complete, initialised model.

Short names, in shapes and in code:
    B batch, C channels, H W image side in pixels, P patch side in pixels,
    L patches per image (`length`), K patches that stay visible, T tokens in a block,
    D width, N heads, E features per head (D / N), Dd width of the decoder
In docstrings, `a -> b` means that a function takes `a` and returns `b`; () is the shape of a
scalar; and "ValueError if ..." names the error that is raised.
"""

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

# --- Sizes


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a model; `width` and `decoder_width` are multiples of 4 and of their head counts."""

    width: int  # features of a token
    depth: int  # blocks
    mlp_width: int
    heads: int
    patch: int  # pixels
    gated_mlp: bool = False
    channels: int = 3  # in an image
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16

    def __post_init__(self) -> None:
        pairs = [(self.width, self.heads), (self.decoder_width, self.decoder_heads)]
        for width, heads in pairs:
            if width % heads or width % 4:  # sincos_positions splits the width into four parts
                raise ValueError(
                    f"width {width} must be a multiple of 4 and of the number of heads ({heads})"
                )


# The six sizes in table 1 of arXiv 2404.11706, and `tiny` for a laptop. `5b` reaches its published
# 5B parameters only with a gated MLP (three matrices): a plain MLP would give it 3.8B.
MODELS = {
    #                  width depth mlp_width heads patch
    "tiny": ViTConfig(192, 4, 768, 3, 8, decoder_width=128, decoder_depth=2, decoder_heads=4),
    "base": ViTConfig(768, 12, 3072, 12, 16),
    "huge": ViTConfig(1280, 32, 5120, 16, 14),
    "1b": ViTConfig(1536, 32, 6144, 16, 14),
    "3b": ViTConfig(2816, 32, 11264, 32, 14),
    "5b": ViTConfig(1792, 56, 15360, 16, 14, gated_mlp=True),
    "15b": ViTConfig(5040, 48, 20160, 48, 14),
}


def model_config(text: str, channels: int = 3) -> ViTConfig:
    """Return a row of MODELS by its name, or with changes: `base:depth=6,mlp_width=1536`.

    ValueError for a name or a field that there is not.
    """
    name, _, changes = text.partition(":")
    values: dict[str, Any] = {"channels": channels}
    try:
        for change in filter(None, changes.split(",")):
            field, value = change.split("=")
            values[field] = int(value)
            if values[field] < 1 and field != "gated_mlp":
                raise ValueError(f"{field} must be at least 1")
        return replace(MODELS[name], **values)
    except (KeyError, TypeError, ValueError) as error:
        known = f"use {', '.join(MODELS)}, or as base:depth=6,mlp_width=1536"
        raise ValueError(f"--model {text}: {error}; {known}") from None


def patch_count(config: ViTConfig, img_size: int) -> int:
    """Count the patches of a square image of `img_size` x `img_size` pixels.

    ValueError if the image size is not a multiple of the patch size.
    """
    patch = config.patch
    if img_size < patch or img_size % patch:
        raise ValueError(f"image size {img_size} is not a multiple of the patch size {patch}")
    return (img_size // patch) ** 2


def count_visible(length: int, mask_ratio: float) -> int:
    """Count the patches that stay visible: L (1 - ratio), rounded down.

    ValueError if that is 0, or if the ratio is outside [0, 1).
    """
    # + 1e-6 because 100 * (1 - 0.9) is 9.999... in floating point
    visible = int(length * (1 - mask_ratio) + 1e-6)
    if not 0 <= mask_ratio < 1:
        raise ValueError(f"mask ratio {mask_ratio} must be at least 0 and below 1")
    if visible < 1:
        raise ValueError(f"mask ratio {mask_ratio} leaves none of the {length} patches visible")
    return visible


def block_multiply_adds(tokens: int, width: int, mlp_width: int, gated: bool = False) -> int:
    """Count the multiply-adds of the matrix products in one block's forward pass on one image."""
    mlp_matrices = 3 if gated else 2
    linear = 4 * width**2 + mlp_matrices * width * mlp_width  # per token: qkv (3), proj (1), MLP
    attention = 2 * tokens * width  # per token: q k^T, and the scores times v
    return tokens * (linear + attention)


def flops_per_image(config: ViTConfig, img_size: int = 224, mask_ratio: float = 0.75) -> int:
    """Count the floating-point operations needed to train on one image, forward and backward.

    Only matrix products count. Recomputation by activation checkpointing does not.
    """
    length = patch_count(config, img_size)
    visible = count_visible(length, mask_ratio)
    patch_values = config.channels * config.patch**2
    decoder_width = config.decoder_width
    # multiply-adds of the forward pass; 1 + patches: the cls token passes through the blocks too
    patch_embed = visible * patch_values * config.width
    block = block_multiply_adds(1 + visible, config.width, config.mlp_width, config.gated_mlp)
    decoder_embed = (1 + visible) * config.width * decoder_width
    decoder_block = block_multiply_adds(1 + length, decoder_width, 4 * decoder_width)
    decoder_pred = length * decoder_width * patch_values
    # Backward, each layer has a product for the gradient of its input and one for that of its
    # weights. Images need no gradient, so patch_embed costs two products, other layers three.
    blocks = config.depth * block + config.decoder_depth * decoder_block
    multiply_adds = 2 * patch_embed + 3 * (blocks + decoder_embed + decoder_pred)
    return 2 * multiply_adds  # a multiply-add is two operations


# --- Patches, positions, masking


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images (B, C, H, W) into patches (B, L, P*P*C), each ordered by row, column, channel."""
    b, c, h, w = images.shape
    x = images.reshape(b, c, h // patch, patch, w // patch, patch)
    x = x.permute(0, 2, 4, 3, 5, 1)  # (B, H/P, W/P, P, P, C)
    return x.reshape(b, -1, patch * patch * c)  # (B, L, P*P*C)


def reconstruction_target(patches: Tensor, norm_pix_loss: bool) -> Tensor:
    """Turn patches (B, L, P*P*C) into what the model must predict, in fp32.

    With `norm_pix_loss` each patch is normalised by its own mean and variance.
    """
    patches = patches.float()
    if not norm_pix_loss:
        return patches
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)  # (B, L, 1), unbiased
    return (patches - mean) / (variance + 1e-6).sqrt()


def random_masking(noise: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor]:
    """Choose the patches that stay visible: those with the smallest values of `noise` (B, L).

    Returns their indices, `keep_ids` (B, K), and the mask (B, L), fp32: 1 for a removed patch, 0
    for a visible one. ValueError if no patch stays visible.
    """
    length = noise.shape[1]
    visible = count_visible(length, mask_ratio)
    keep_ids = noise.argsort(dim=1)[:, :visible]  # (B, K)
    mask = torch.ones(noise.shape, device=noise.device).scatter(1, keep_ids, 0.0)  # (B, L)
    return keep_ids, mask


def loss_per_image(
    images: Tensor, pred: Tensor, mask: Tensor, patch: int, norm_pix_loss: bool
) -> Tensor:
    """Compute the loss of each image (B,), for evaluation and baselines.

    The errors of the patches are computed in fp32, their mean over removed patches in float64.

    `pred` and `mask` are what `ViTMAE.forward` returns for `images`, along with the batch loss.
    """
    target = reconstruction_target(patchify(images, patch), norm_pix_loss)
    error = (pred.float() - target).square().mean(dim=-1).double()  # (B, L)
    return (error * mask).sum(dim=1) / mask.sum(dim=1)


def baseline_losses(images: Tensor, mask: Tensor, patch: int, norm_pix_loss: bool) -> Tensor:
    """Compute what a model has to beat (2, B): the losses of predicting zero and a mean colour.

    The colour, one number per channel, is the mean of the visible patches, as the loss sees them:
    with `norm_pix_loss` each patch is normalised first, so zero stands for its own mean grey.
    `images` (B, C, H, W) are normalised; `mask` (B, L) is 1 for a removed patch.
    """
    target = reconstruction_target(patchify(images, patch), norm_pix_loss)  # (B, L, P*P*C)
    shown = (1 - mask)[..., None] / (1 - mask[0]).sum()  # all images show equally many
    mean_patch = (target * shown).sum(1, keepdim=True)  # (B, 1, P*P*C)
    mean_pixels = mean_patch.unflatten(-1, (-1, images.shape[1]))  # (B, 1, P*P, C)
    mean_colour = mean_pixels.mean(2).repeat(1, 1, patch**2)  # (B, 1, P*P*C), alike in all patches
    zero = torch.zeros_like(mean_colour)
    losses = [
        loss_per_image(images, guess, mask, patch, norm_pix_loss) for guess in (zero, mean_colour)
    ]
    return torch.stack(losses)


def sincos_positions(width: int, side: int) -> Tensor:
    """Compute the fixed 2-D position table (1, 1 + side*side, D), fp32; entry 0, for cls, is zero.

    In each entry the first half of D encodes the patch's column, the second half its row. In each
    half the sines come first, then the cosines, at the frequencies 1 / 10000^(i / (D/4)).
    """
    frequency = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    x_angle = column.reshape(-1, 1) * frequency  # (L, D/4)
    y_angle = row.reshape(-1, 1) * frequency  # (L, D/4)
    waves = [x_angle.sin(), x_angle.cos(), y_angle.sin(), y_angle.cos()]
    table = torch.cat(waves, dim=1)  # (L, D)
    table = F.pad(table, (0, 0, 1, 0))  # (1+L, D): zeros for cls
    return table.float().unsqueeze(0)  # (1, 1+L, D)


def resize_positions(table: Tensor, side: int) -> Tensor:
    """Resample positions (1, 1+L, D) to side*side patches, bicubic (arXiv 2010.11929, 3.2)."""
    old = math.isqrt(table.shape[1] - 1)
    if old == side:
        return table
    grid = table[:, 1:].float().reshape(1, old, old, -1).permute(0, 3, 1, 2)  # (1, D, old, old)
    grid = F.interpolate(grid, (side, side), mode="bicubic", antialias=True)
    patches = grid.flatten(2).transpose(1, 2).to(table.dtype)  # (1, L, D)
    return torch.cat([table[:, :1], patches], dim=1)


# --- Layers. Modules and parameters are named as in the official MAE release.


class LayerNorm(nn.LayerNorm):
    """LayerNorm that keeps its input's dtype, even under autocast: (B, T, D) -> (B, T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        # On a GPU, autocast would convert x to fp32 and save that copy for backward. The kernel
        # computes mean and variance in fp32 whatever the dtype of x, so casting the weights is
        # enough, as FSDP does.
        weight = self.weight.to(x.dtype)
        bias = self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


# Up to so many tokens, plain attention is faster on a CPU than PyTorch's fused kernel: the scores
# fit in the caches. A step of `base` is 1.4 times as fast (Intel Xeon, torch 2.15).
PLAIN_ATTENTION_MAX_TOKENS = {torch.bfloat16: 320, torch.float32: 100}


def attend(q: Tensor, k: Tensor, v: Tensor, always_fused: bool = False) -> Tensor:
    """Compute softmax(q k^T / sqrt(E)) v: 3 x (B, N, T, E) -> (B, N, T, E).

    With `always_fused` a CPU uses PyTorch's fused attention for short sequences too.
    """
    tokens, features = q.shape[-2:]  # T, E
    if q.is_cpu and not always_fused and tokens <= PLAIN_ATTENTION_MAX_TOKENS.get(q.dtype, 0):
        scale = features**-0.5  # 1 / sqrt(E)
        scores = (q * scale) @ k.transpose(-2, -1)  # (B, N, T, T)
        return scores.softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """Multi-head self-attention with one fused qkv matrix: (B, T, D) -> (B, T, D)."""

    always_fused = False  # see `attend`; --dry-run sets it, to simulate a GPU on a CPU

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        qkv = self.qkv(x).reshape(b, t, 3, self.heads, -1)  # (B, T, 3, N, E)
        # Transposing before unbinding gives the same, but its backward copies all three gradients.
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # 3 x (B, N, T, E)
        x = attend(q, k, v, self.always_fused)  # (B, N, T, E)
        return self.proj(x.transpose(1, 2).reshape(b, t, -1))  # (B, T, D)


class Mlp(nn.Module):
    """Two linear layers with a GELU in between: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class GatedMlp(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202), named as in timm: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1_g = nn.Linear(width, hidden)
        self.fc1_x = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1_g(x)) * self.fc1_x(x))


class Block(nn.Module):
    """Pre-norm transformer block: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int, mlp_width: int, gated: bool = False) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = LayerNorm(width, eps=1e-6)
        self.mlp = GatedMlp(width, mlp_width) if gated else Mlp(width, mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """Embed the given patches as tokens: (B, K, P*P*C) -> (B, K, D)."""

    def __init__(self, patch: int, width: int, channels: int = 3) -> None:
        super().__init__()
        # a convolution: its weight has the shape of the official release
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, patches: Tensor) -> Tensor:
        # The convolution is computed as a matrix product, so that removed patches cost nothing.
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)  # (D, P*P*C)
        return F.linear(patches.to(weight.dtype), weight, self.proj.bias)


class ViTMAE(nn.Module):
    """Masked autoencoder: an encoder for the visible patches, a small decoder for all patches."""

    pos_embed: Tensor  # (1, 1+L, D)
    decoder_pos_embed: Tensor  # (1, 1+L, Dd)

    def __init__(self, config: ViTConfig, img_size: int = 224, norm_pix_loss: bool = True) -> None:
        """Build the model and initialise it with seed 0; on the meta device, build it alone."""
        super().__init__()
        length = patch_count(config, img_size)
        self.config = config
        self.img_size = img_size
        self.norm_pix_loss = norm_pix_loss

        self.patch_embed = PatchEmbed(config.patch, config.width, config.channels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, config.mlp_width, config.gated_mlp)
            for _ in range(config.depth)
        )
        self.norm = LayerNorm(config.width, eps=1e-6)
        self.decoder_embed = nn.Linear(config.width, config.decoder_width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.decoder_width))
        self.decoder_blocks = nn.ModuleList(
            Block(config.decoder_width, config.decoder_heads, 4 * config.decoder_width)
            for _ in range(config.decoder_depth)
        )
        self.decoder_norm = LayerNorm(config.decoder_width, eps=1e-6)
        self.decoder_pred = nn.Linear(config.decoder_width, config.channels * config.patch**2)

        # Buffers, not frozen parameters: they are neither sharded nor given to the optimizer.
        self.register_buffer("pos_embed", torch.empty(1, 1 + length, config.width))
        self.register_buffer("decoder_pos_embed", torch.empty(1, 1 + length, config.decoder_width))
        if not self.cls_token.is_meta:
            initialize(self)

    def image_patches(self, images: Tensor) -> Tensor:
        """Cut images into patches (B, L, P*P*C); ValueError if the images do not fit the model."""
        size = (self.config.channels, self.img_size, self.img_size)
        if images.shape[1:] != size:
            given = tuple(images.shape[1:])
            raise ValueError(f"this model takes images of shape {size}, not {given}")
        return patchify(images, self.config.patch)

    def encode(self, patches: Tensor, keep_ids: Tensor) -> Tensor:
        """Encode the patches whose indices are `keep_ids`: (B, L, P*P*C), (B, K) -> (B, 1+K, D)."""
        pos = self.pos_embed  # (1, 1+L, D)
        index = keep_ids.unsqueeze(-1)  # (B, K, 1), broadcast over the values of a patch
        # The selected patches are not assigned to a variable, which would keep them in memory.
        x = self.patch_embed(patches.take_along_dim(index, dim=1))  # (B, K, D)
        x = x + pos[:, 1:].take_along_dim(index, dim=1).to(x.dtype)
        cls = (self.cls_token + pos[:, :1]).to(x.dtype)  # (1, 1, D)
        x = torch.cat([cls.expand(len(x), -1, -1), x], dim=1)  # (B, 1+K, D)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def decode(self, tokens: Tensor, keep_ids: Tensor) -> Tensor:
        """Predict all patches: encoded tokens (B, 1+K, D), `keep_ids` (B, K) -> (B, L, P*P*C)."""
        pos = self.decoder_pos_embed  # (1, 1+L, Dd)
        b = len(tokens)
        length = pos.shape[1] - 1
        x = self.decoder_embed(tokens)  # (B, 1+K, Dd)
        # Each encoded token goes to the place of its patch, cls to place 0. All other places hold
        # the mask token.
        place = F.pad(keep_ids + 1, (1, 0), value=0)  # (B, 1+K), cls first
        index = place.unsqueeze(-1).expand_as(x)  # (B, 1+K, Dd)
        mask_tokens = self.mask_token.to(x.dtype).expand(b, 1 + length, -1)  # (B, 1+L, Dd)
        x = mask_tokens.scatter(1, index, x)  # (B, 1+L, Dd)
        x = x + pos.to(x.dtype)
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x[:, 1:]))  # (B, L, P*P*C)

    def forward(
        self, images: Tensor, mask_ratio: float = 0.75, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mask, encode, decode: (B, C, H, W) -> loss (), predictions (B, L, P*P*C), mask (B, L).

        Images must be normalised and floating-point; ValueError if they do not fit the model. The K
        patches with the smallest `noise` (B, L) stay visible; mask is 1 for a removed patch. Loss
        and mask are fp32.
        """
        patches = self.image_patches(images)  # (B, L, P*P*C)
        if noise is None:  # in training, data.py draws it for each image
            noise = torch.rand(patches.shape[:2], device=images.device)
        keep_ids, mask = random_masking(noise, mask_ratio)  # (B, K), (B, L)

        pred = self.decode(self.encode(patches, keep_ids), keep_ids)  # (B, L, P*P*C)
        target = reconstruction_target(patches, self.norm_pix_loss)
        error = (pred.float() - target).square().mean(dim=-1)  # (B, L), fp32 in every precision
        loss = (error * mask).sum() / mask.sum()  # the mean over the removed patches
        return loss, pred, mask


# --- Initial values


def initial_value(
    config: ViTConfig, name: str, shape: torch.Size, seed: int = 0, device: Device = "cpu"
) -> Tensor:
    """Return the initial fp32 value of a parameter or position table of unsharded shape `shape`.

    As in the official release: matrices are Xavier uniform (the patch kernel taken as a matrix
    (D, C*P*P), qkv as one), biases 0, except the patch embedding's, which has PyTorch's default,
    LayerNorm weights 1, cls and mask tokens normal with standard deviation 0.02. A GPU and a CPU
    draw different numbers. KeyError if the last part of the name is unknown.
    """
    leaf = name.split(".")[-1]  # "weight" of "blocks.0.attn.qkv.weight"
    if leaf in ("pos_embed", "decoder_pos_embed"):  # (1, 1 + side * side, width)
        side = math.isqrt(shape[1] - 1)
        return sincos_positions(shape[-1], side).to(device)
    value = torch.empty(shape, device=device)
    # a generator for each name: a value depends neither on the order of calls nor on the rank
    name_seed = zlib.crc32(f"{seed}/{name}".encode())
    generator = torch.Generator(device).manual_seed(name_seed)
    if leaf in ("cls_token", "mask_token"):
        return value.normal_(std=0.02, generator=generator)
    if name == "patch_embed.proj.bias":
        fan_in = config.channels * config.patch**2
        bound = 1 / math.sqrt(fan_in)  # as in nn.Conv2d
        return value.uniform_(-bound, bound, generator=generator)
    if leaf == "weight" and len(shape) > 1:
        fan_in = shape[1:].numel()
        fan_out = shape[0]
        bound = math.sqrt(6 / (fan_in + fan_out))  # Glorot & Bengio 2010, eq. 16
        return value.uniform_(-bound, bound, generator=generator)
    if leaf == "weight":  # of a LayerNorm
        return value.fill_(1.0)
    if leaf == "bias":
        return value.fill_(0.0)
    raise KeyError(f"no initial value for the parameter {name}")


@torch.no_grad()
def initialize(model: ViTMAE, seed: int = 0) -> None:
    """Initialise all parameters and buffers in place; the model must not be sharded or on meta."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.copy_(initial_value(model.config, name, tensor.shape, seed))
