"""A classifier made of a pretrained encoder: which parts of it train, and at which rate.

The names of the encoder's parameters are those of vit.ViTMAE. Like it, the model knows nothing of
ranks; shard.apply shards it. Shapes: B images, L patches, D width, as in vit.py.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import shard
import vit
from downstream.weights import Pretrained, value_of


class ScaledBlock(vit.Block):
    """A block whose two branches can be scaled or left out, per sample: (B, T, D) -> (B, T, D)."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """`scale` (B, 2) multiplies what attention and MLP add to x; None adds them as they are."""
        if scale is None:
            return super().forward(x)
        attention, mlp = scale.to(x.dtype)[:, :, None, None].unbind(1)  # 2 x (B, 1, 1)
        x = x + attention * self.attn(self.norm1(x))
        return x + mlp * self.mlp(self.norm2(x))


class Classifier(nn.Module):
    """The encoder on all patches, the mean of the patches or cls, a norm, a linear layer."""

    cls_token: Tensor  # (1, 1, D)
    pos_embed: Tensor  # (1, 1+L, D)

    def __init__(
        self, config: vit.ViTConfig, img_size: int, classes: int, pool: str, frozen_blocks: int
    ) -> None:
        """Build it without values; with `frozen_blocks` > 0 so many, and all before, do not train.

        `pool` is "mean" or "cls". ValueError where patches do not fill the image.
        """
        super().__init__()
        c = self.config = config
        self.pool = pool
        self.patch_embed = vit.PatchEmbed(c.patch, c.width, c.channels)
        self.blocks = nn.ModuleList(
            ScaledBlock(c.width, c.heads, c.mlp_width, c.gated_mlp) for _ in range(c.depth)
        )
        self.norm = nn.LayerNorm(c.width, eps=1e-6)
        self.head = nn.Linear(c.width, classes)
        self.register_buffer("pos_embed", torch.empty(1, 1 + vit.patch_count(c, img_size), c.width))
        # A frozen token is a buffer, as the positions are: FSDP1 holds gradients for all parameters
        # of a unit or for none, and the token is in the unit of norm and head.
        if frozen_blocks:
            self.register_buffer("cls_token", torch.empty(1, 1, c.width))
            for part in (self.patch_embed, *self.blocks[:frozen_blocks]):
                part.requires_grad_(False)
        else:
            self.cls_token = nn.Parameter(torch.empty(1, 1, c.width))

    def forward(self, images: Tensor, scales: Tensor | None = None) -> Tensor:
        """Classify normalised images (B, C, H, W) -> logits (B, classes).

        `scales` (B, depth, 2) of `drop_path_scales` is for training only.
        """
        x = self.patch_embed(vit.patchify(images, self.config.patch))  # (B, L, D)
        pos = self.pos_embed
        cls = (self.cls_token + pos[:, :1]).to(x.dtype).expand(len(x), -1, -1)  # (B, 1, D)
        x = torch.cat([cls, x + pos[:, 1:].to(x.dtype)], dim=1)  # (B, 1+L, D)
        for i, block in enumerate(self.blocks):
            x = block(x, None if scales is None else scales[:, i])
        x = x[:, 1:].mean(dim=1) if self.pool == "mean" else x[:, 0]  # (B, D)
        return self.head(self.norm(x))


def unit_classes(frozen_blocks: int) -> set[type[nn.Module]]:
    """Return the classes of the blocks for shard.apply: what is frozen is in units of its own."""
    return {ScaledBlock, vit.PatchEmbed} if frozen_blocks else {ScaledBlock}


def initial_classifier_value(
    pretrained: Pretrained, seed: int, name: str, shape: torch.Size, device: torch.device
) -> Tensor:
    """Return the initial value of a parameter or buffer: the pretrained one, but for the head."""
    if name.startswith("head."):  # small, so that the first gradients of the encoder are
        return vit.initial_value(pretrained.config, name, shape, seed, device) * 0.01
    return value_of(pretrained, name, shape, config=pretrained.config)


def drop_path_scales(
    rate: float, depth: int, frozen_blocks: int, images: int, seed: int, step: int
) -> Tensor:
    """Draw which branches a step leaves out of which blocks -> (images, depth, 2) fp32.

    One row per image of the global batch, so that its draw does not depend on the number of ranks.

    A branch is left out with a probability that grows linearly from 0 in the first block to `rate`
    in the last; one that stays is scaled so that the mean is as without (stochastic depth, arXiv
    1603.09382). Frozen blocks are always whole.
    """
    stays = 1 - torch.linspace(0, rate, depth)  # (depth,)
    stays[:frozen_blocks] = 1
    draw = torch.Generator().manual_seed(seed_of(seed, step))
    drawn = torch.rand(images, depth, 2, generator=draw)
    return (drawn < stays[:, None]) / stays[:, None]


def seed_of(seed: int, step: int, part: int = 0) -> int:
    """Return the seed of what all ranks draw alike in a step, or in an accumulation step of it."""
    return int(np.random.SeedSequence((seed, step, part)).generate_state(1)[0])


def layer_number(name: str, depth: int) -> int:
    """Return the layer of a parameter: 0 embedding and cls, then the blocks, depth + 1 the rest."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return 0 if name.startswith(("patch_embed.", "cls_token")) else depth + 1


def build_layerwise_adamw(
    model: nn.Module,
    mode: str,
    decay: Collection[str],
    *,
    depth: int,
    layer_decay: float,
    lr: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Build a fused AdamW, betas (0.9, 0.999), for the parameters that train.

    Each group has an "lr_scale", layer_decay^(depth + 1 - layer), to multiply its rate with: what
    is near the pixels moves least (BEiT, arXiv 2106.08254). `decay` has the original names of the
    parameters with weight decay.
    """
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for wrapped_name, p in model.named_parameters():
        name = shard.original_name(wrapped_name)
        if p.requires_grad:
            groups.setdefault((layer_number(name, depth), name in decay), []).append(p)
    described = [
        {
            "params": parameters,
            "weight_decay": weight_decay * decays,
            "lr_scale": layer_decay ** (depth + 1 - layer),
        }
        for (layer, decays), parameters in groups.items()
    ]
    if shard.STRATEGIES[mode].engine == "zero1":
        return ZeroRedundancyOptimizer(described, torch.optim.AdamW, lr=lr, fused=True)
    return torch.optim.AdamW(described, lr=lr, fused=True)


def mix(
    images: Tensor, labels: Tensor, classes: int, mixup: float, cutmix: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Mix each image with its neighbour, by MixUp or CutMix -> images, labels (B, classes).

    Images (B, C, H, W) and labels (B,) are of one local batch, so that the pairs depend on the
    number of ranks. One of the two is drawn where both alphas are above 0.
    """
    from torchvision.transforms import v2

    kinds: list[nn.Module] = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    kinds += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return kinds[int(torch.randint(len(kinds), ()))](images, labels)
