"""ViT-MAE: a vision transformer that learns by filling in removed patches (arXiv 2111.06377).

The model alone: it knows nothing of ranks, devices or files. Sharding is applied from the outside
(shard.py). Copy this one file and `ViTMAE(MODELS["base"])` is a complete, initialised model.

One-letter names, in shapes and in code:
    B batch, C channels (3), H W image side in pixels, P patch side in pixels, L patches an image,
    K patches that stay visible, T tokens of whatever goes through a block, D width, N heads,
    E head dim (D / N)
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------
# Sizes


@dataclass(frozen=True)
class ViTConfig:
    """The shape of one model; widths in features, `patch` in pixels."""

    width: int
    depth: int
    mlp_width: int
    heads: int
    patch: int
    gated_mlp: bool = False
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16


# The six sizes of arXiv 2404.11706, table 1, and `tiny` for a laptop. The published 5B count is
# only met with a gated MLP (three matrices instead of two), so `5b` has one; the same dimensions
# with a plain MLP are `replace(MODELS["5b"], gated_mlp=False)`, 3.8B.
MODELS: dict[str, ViTConfig] = {
    #                  width depth mlp_width heads patch
    "tiny": ViTConfig(192, 4, 768, 3, 8, decoder_width=128, decoder_depth=2, decoder_heads=4),
    "base": ViTConfig(768, 12, 3072, 12, 16),
    "huge": ViTConfig(1280, 32, 5120, 16, 14),
    "1b": ViTConfig(1536, 32, 6144, 16, 14),
    "3b": ViTConfig(2816, 32, 11264, 32, 14),
    "5b": ViTConfig(1792, 56, 15360, 16, 14, gated_mlp=True),
    "15b": ViTConfig(5040, 48, 20160, 48, 14),
}


def patch_count(config: ViTConfig, img_size: int) -> int:
    """Patches of a square image, `img_size` pixels a side; ValueError unless they fit exactly."""
    if img_size < config.patch or img_size % config.patch:
        below = max(1, img_size // config.patch) * config.patch
        raise ValueError(
            f"image size {img_size} is not a multiple of the patch size {config.patch}: "
            f"use {below} or {below + config.patch}"
        )
    return (img_size // config.patch) ** 2


def kept_patches(patches: int, mask_ratio: float) -> int:
    """Patches that stay visible: int(L (1 - ratio)), safe from 100 * (1 - 0.9) = 9.999...

    ValueError unless at least one patch stays. A ratio of 0 keeps all (features, no loss).
    """
    kept = int(patches * (1 - mask_ratio) + 1e-6)
    if not 0 <= mask_ratio < 1 or kept < 1:
        raise ValueError(
            f"mask ratio {mask_ratio} leaves {max(kept, 0)} of {patches} patches visible: "
            f"at least one must stay and the ratio must lie in [0, 1)"
        )
    return kept


def flops_per_image(
    config: ViTConfig, img_size: int = 224, mask_ratio: float = 0.75, recompute: bool = False
) -> int:
    """Floating-point operations of one training image, forward and backward, by formula.

    Matrix products only, 2 operations a multiply-add, backward twice the forward; the images need
    no gradient, so the patch embedding's backward is counted once. What is computed a second time
    is no part of the model's work; `recompute` counts it too: the blocks' forward, but for the
    last product of each, which nobody needs again (torch stops before it).
    """

    def blocks(tokens: int, width: int, mlp_width: int, depth: int, mlp_matrices: int) -> int:
        linear = 4 * width * width + mlp_matrices * width * mlp_width  # qkv, proj, MLP
        attention = 2 * tokens * width  # scores and weighted values
        return 2 * depth * tokens * (linear + attention)

    c, patches = config, patch_count(config, img_size)
    kept = kept_patches(patches, mask_ratio)
    pixels = 3 * c.patch**2
    embed = 2 * kept * pixels * c.width
    encoder = blocks(kept + 1, c.width, c.mlp_width, c.depth, 3 if c.gated_mlp else 2)
    decoder = blocks(patches + 1, c.decoder_width, 4 * c.decoder_width, c.decoder_depth, 2)
    ends = 2 * (kept + 1) * c.width * c.decoder_width + 2 * patches * c.decoder_width * pixels
    again = 0
    if recompute:
        last = 2 * c.depth * (kept + 1) * c.width * c.mlp_width
        last += 2 * c.decoder_depth * (patches + 1) * c.decoder_width * 4 * c.decoder_width
        again = encoder + decoder - last
    return 2 * embed + 3 * (encoder + decoder + ends) + again


# ---------------------------------------------------------------------------------------------
# Patches, positions, masking


def patchify(images: Tensor, patch: int) -> Tensor:
    """(B, 3, H, W) -> (B, L, P*P*3), each patch in the order (row, column, channel)."""
    b, c, h, w = images.shape
    x = images.reshape(b, c, h // patch, patch, w // patch, patch)
    x = x.permute(0, 2, 4, 3, 5, 1)  # (B, H/P, W/P, P, P, C)
    return x.reshape(b, -1, patch * patch * c)  # (B, L, P*P*C)


def unpatchify(patches: Tensor, patch: int) -> Tensor:
    """(B, L, P*P*3) -> (B, 3, H, W), the inverse of `patchify` for square images."""
    b, length, values = patches.shape
    side, c = math.isqrt(length), values // patch**2
    x = patches.reshape(b, side, side, patch, patch, c)
    x = x.permute(0, 5, 1, 3, 2, 4)  # (B, C, H/P, P, W/P, P)
    return x.reshape(b, c, side * patch, side * patch)  # (B, C, H, W)


def reconstruction_target(patches: Tensor, norm_pix: bool) -> Tensor:
    """(B, L, P*P*3) pixels -> fp32 target of the same shape.

    With `norm_pix` each patch is normalised by its own mean and unbiased variance (MAE, section
    4.2): then predicting zero everywhere costs a loss of about 1.
    """
    patches = patches.float()
    if not norm_pix:
        return patches
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)  # (B, L, 1), N - 1
    return (patches - mean) / (variance + 1e-6).sqrt()


def sincos_positions(width: int, side: int) -> Tensor:
    """(1, 1 + side*side, D) fp32 table of fixed 2-D positions; the first row, for cls, is zero.

    The first half of the features encodes the column, the second the row (the released weights
    have them so), each half sin then cos at frequencies 1 / 10000^(i / (D/4)).
    """
    if width % 4:
        raise ValueError(f"width {width} is not a multiple of 4, which 2-D sin-cos positions need")
    frequency = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = [axis.reshape(-1, 1) * frequency for axis in (column, row)]  # 2 x (L, D/4)
    table = torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1)  # (L, D)
    return F.pad(table, (0, 0, 1, 0)).float().unsqueeze(0)  # (1, 1+L, D)


def rows(x: Tensor, index: Tensor) -> Tensor:
    """Take the rows `index` (B, K) of each sample of x (B, L, D) -> (B, K, D)."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


# ---------------------------------------------------------------------------------------------
# Layers. The names of modules and parameters are those of the official MAE release.


@dataclass(frozen=True)
class Kernels:
    """What computes the two costly things, should the caller know better than PyTorch."""

    linear: type[nn.Linear] = nn.Linear
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = F.scaled_dot_product_attention


PYTORCH = Kernels()


class Attention(nn.Module):
    """Multi-head self-attention with one fused qkv matrix: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int, kernels: Kernels) -> None:
        super().__init__()
        self.heads, self.attend = heads, kernels.attend
        self.qkv = kernels.linear(width, 3 * width)
        self.proj = kernels.linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(x).reshape(b, t, 3, self.heads, d // self.heads)  # (B, T, 3, N, E)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # 3 x (B, N, T, E)
        x = self.attend(q, k, v)  # (B, N, T, E)
        return self.proj(x.transpose(1, 2).reshape(b, t, d))  # (B, T, D)


class Mlp(nn.Module):
    """Two matrices with a GELU between: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, hidden: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.fc1 = linear(width, hidden)
        self.fc2 = linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class GatedMlp(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202), names as in timm: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, hidden: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.fc1_g = linear(width, hidden)
        self.fc1_x = linear(width, hidden)
        self.fc2 = linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1_g(x)) * self.fc1_x(x))


class Block(nn.Module):
    """Pre-norm transformer block: (B, T, D) -> (B, T, D)."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_width: int,
        gated: bool = False,
        kernels: Kernels = PYTORCH,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, kernels)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = (GatedMlp if gated else Mlp)(width, mlp_width, kernels.linear)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """Patches to tokens: (B, K, P*P*3) -> (B, K, D).

    A matrix product over patches already cut out, so that only the visible ones are embedded and
    no convolution library is needed; `proj` keeps the shape of the convolution in the release.
    """

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, patches: Tensor) -> Tensor:
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)  # (D, P*P*3), row column channel
        return F.linear(patches.to(weight.dtype), weight, self.proj.bias)


class ViTMAE(nn.Module):
    """Masked autoencoder: encoder on the visible patches, small decoder on all of them."""

    pos_embed: Tensor  # (1, 1+L, D)
    decoder_pos_embed: Tensor  # (1, 1+L, Dd)

    def __init__(
        self,
        config: ViTConfig,
        img_size: int = 224,
        norm_pix_loss: bool = True,
        kernels: Kernels = PYTORCH,
    ) -> None:
        """Build and, unless on the meta device, initialise (seed 0; see `initialize`).

        Raises ValueError when the patch size does not divide `img_size`.
        """
        super().__init__()
        c = self.config = config
        side = math.isqrt(patch_count(c, img_size))
        self.img_size, self.norm_pix_loss = img_size, norm_pix_loss

        self.patch_embed = PatchEmbed(c.patch, c.width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, c.width))
        self.blocks = nn.ModuleList(
            Block(c.width, c.heads, c.mlp_width, c.gated_mlp, kernels) for _ in range(c.depth)
        )
        self.norm = nn.LayerNorm(c.width, eps=1e-6)

        self.decoder_embed = kernels.linear(c.width, c.decoder_width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, c.decoder_width))
        self.decoder_blocks = nn.ModuleList(
            Block(c.decoder_width, c.decoder_heads, 4 * c.decoder_width, kernels=kernels)
            for _ in range(c.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(c.decoder_width, eps=1e-6)
        self.decoder_pred = kernels.linear(c.decoder_width, 3 * c.patch**2)

        # Fixed tables: buffers, not frozen parameters, because a sharded unit must not mix
        # parameters with and without gradient. Stored in fp32, cast where they are used.
        self.register_buffer("pos_embed", torch.empty(1, 1 + side**2, c.width))
        self.register_buffer("decoder_pos_embed", torch.empty(1, 1 + side**2, c.decoder_width))
        if not self.cls_token.is_meta:
            initialize(self)

    def encode(self, patches: Tensor, keep: Tensor) -> Tensor:
        """All patches (B, L, P*P*3) and the indices that stay (B, K) -> tokens (B, 1+K, D)."""
        pos = self.pos_embed
        x = self.patch_embed(rows(patches, keep))  # (B, K, D)
        x = x + rows(pos[:, 1:].expand(len(x), -1, -1), keep).to(x.dtype)
        cls = (self.cls_token + pos[:, :1]).to(x.dtype)  # (1, 1, D)
        x = torch.cat([cls.expand(len(x), -1, -1), x], dim=1)  # (B, 1+K, D)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def decode(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """Encoder output (B, 1+K, D) and its patch indices (B, K) -> predictions (B, L, P*P*3)."""
        pos = self.decoder_pos_embed
        b, length = len(tokens), pos.shape[1] - 1
        x = self.decoder_embed(tokens)  # (B, 1+K, Dd), Dd the decoder's width
        # Put each visible token where its patch belongs, row 0 being cls; the rest are mask tokens.
        place = F.pad(keep + 1, (1, 0)).unsqueeze(-1).expand_as(x)  # (B, 1+K, Dd)
        empty = self.mask_token.to(x.dtype).expand(b, 1 + length, -1)  # (B, 1+L, Dd)
        x = empty.scatter(1, place, x) + pos.to(x.dtype)  # (B, 1+L, Dd)
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x[:, 1:]))  # (B, L, P*P*3)

    def forward(
        self, images: Tensor, mask_ratio: float = 0.75, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, 3, H, W) normalised float images -> fp32 loss (), pred (B, L, P*P*3), mask (B, L).

        `noise` (B, L) gives the masking order: the K smallest stay. Mask 1 = removed. The loss is
        the squared error of the removed patches, averaged over their values; NaN if none is.
        """
        patches = patchify(images, self.config.patch)  # (B, L, P*P*3)
        b, length, _ = patches.shape
        if length != self.pos_embed.shape[1] - 1:
            raise ValueError(
                f"images {tuple(images.shape)} do not fit this model, built for "
                f"(B, 3, {self.img_size}, {self.img_size})"
            )
        if noise is None:
            noise = torch.rand(b, length, device=images.device)
        keep = noise.argsort(dim=1)[:, : kept_patches(length, mask_ratio)]  # (B, K)
        mask = torch.ones(b, length, device=images.device).scatter(1, keep, 0.0)  # (B, L)

        pred = self.decode(self.encode(patches, keep), keep)  # (B, L, P*P*3)
        target = reconstruction_target(patches, self.norm_pix_loss)
        error = (pred.float() - target).square().mean(dim=-1)  # (B, L), fp32 in every precision
        return (error * mask).sum() / mask.sum(), pred, mask


# ---------------------------------------------------------------------------------------------
# Initial values


def initial_value(config: ViTConfig, name: str, shape: torch.Size, seed: int = 0) -> Tensor:
    """The whole fp32 initial value of the parameter or position table `name`, on the CPU.

    A function of its arguments alone, drawn from a generator of its own: it does not matter who
    asks, in which order, or whether only a shard is kept. Values as in the official release:
    xavier uniform for matrices (the patch kernel as (D, 3*P*P), qkv as one), zero biases (but
    PyTorch's default for the patch kernel's), LayerNorm 1 and 0, tokens normal with std 0.02.
    KeyError for a name that this model does not have.
    """
    leaf, ndim = name.split(".")[-1], len(shape)
    if leaf in ("pos_embed", "decoder_pos_embed"):
        return sincos_positions(shape[-1], math.isqrt(shape[1] - 1))
    value = torch.empty(shape)
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    if leaf in ("cls_token", "mask_token"):
        return value.normal_(std=0.02, generator=draw)
    if name == "patch_embed.proj.bias":
        bound = 1 / math.sqrt(3 * config.patch**2)  # nn.Conv2d: 1 / sqrt(fan in)
        return value.uniform_(-bound, bound, generator=draw)
    if leaf == "bias":
        return value.zero_()
    if leaf == "weight" and ndim == 1:
        return value.fill_(1.0)
    if leaf == "weight":
        bound = math.sqrt(6 / (shape[0] + shape[1:].numel()))  # Glorot & Bengio 2010, eq. 16
        return value.uniform_(-bound, bound, generator=draw)
    raise KeyError(f"no initial value is known for the parameter {name}")


@torch.no_grad()
def initialize(model: "ViTMAE", seed: int = 0) -> None:
    """Fill every parameter and buffer of a materialised, unsharded model in place."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.copy_(initial_value(model.config, name, tensor.shape, seed))
