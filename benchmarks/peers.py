"""Build the masked autoencoders of other libraries with our shapes and our weights.

`transformers_mae` is Hugging Face's (attention by sdpa). `timm_mae` is built here from timm's patch
embedding and blocks, as in MAE code based on timm. Both compute the loss that vit.ViTMAE computes
for the same images and masking order.
"""

from functools import partial

import timm
import torch
import transformers
from torch import Tensor, nn

import vit


def to_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Translate our names (the official ones) into those of transformers' ViTMAEForPreTraining."""
    fixed = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "mask_token": "decoder.mask_token",
        "decoder_pos_embed": "decoder.decoder_pos_embed",
        "decoder_embed": "decoder.decoder_embed",
        "decoder_norm": "decoder.decoder_norm",
        "decoder_pred": "decoder.decoder_pred",
    }
    layer = {
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.o_proj",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    }
    result = {}
    for name, value in state.items():
        stem, _, leaf = name.rpartition(".")
        if name in fixed:
            result[fixed[name]] = value
        elif stem in fixed:
            result[f"{fixed[stem]}.{leaf}"] = value
        else:
            kind, number, part = stem.split(".", 2)
            base = {"blocks": "vit.layers", "decoder_blocks": "decoder.decoder_layers"}[kind]
            if part == "attn.qkv":
                for which, third in zip("qkv", value.chunk(3), strict=True):
                    result[f"{base}.{number}.attention.{which}_proj.{leaf}"] = third
            else:
                result[f"{base}.{number}.{layer[part]}.{leaf}"] = value
    return result


class TransformersMAE(nn.Module):
    """Give transformers' model the interface of ours; returns the loss alone."""

    def __init__(self, config: vit.ViTConfig, img_size: int, mask_ratio: float) -> None:
        super().__init__()
        c = config
        self.model = transformers.ViTMAEForPreTraining(
            transformers.ViTMAEConfig(
                hidden_size=c.width,
                num_hidden_layers=c.depth,
                num_attention_heads=c.heads,
                intermediate_size=c.mlp_width,
                image_size=img_size,
                patch_size=c.patch,
                decoder_hidden_size=c.decoder_width,
                decoder_num_hidden_layers=c.decoder_depth,
                decoder_num_attention_heads=c.decoder_heads,
                layer_norm_eps=1e-6,
                decoder_intermediate_size=4 * c.decoder_width,
                norm_pix_loss=True,
                mask_ratio=mask_ratio,
                attn_implementation="sdpa",
            )
        )

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """(B, 3, H, W), (B, L) -> loss ()."""
        return self.model(pixel_values=images, noise=noise).loss


def transformers_mae(mine: vit.ViTMAE, mask_ratio: float) -> TransformersMAE:
    """Build transformers' model with the weights of `mine`."""
    theirs = TransformersMAE(mine.config, mine.img_size, mask_ratio)
    theirs.model.load_state_dict(to_transformers(mine.state_dict()), strict=True)
    return theirs


class TimmMAE(nn.Module):
    """An MAE built from timm's parts, with the official release's parameter names."""

    def __init__(self, config: vit.ViTConfig, img_size: int, mask_ratio: float) -> None:
        super().__init__()
        c, self.patch = config, config.patch
        self.patch_embed = timm.layers.PatchEmbed(img_size, c.patch, 3, c.width)
        patches = self.patch_embed.num_patches
        self.kept = vit.kept_patches(patches, mask_ratio)
        block = partial(
            timm.models.vision_transformer.Block,
            qkv_bias=True,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
        )
        gate = {"mlp_layer": timm.layers.SwiGLU, "act_layer": nn.SiLU} if c.gated_mlp else {}
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        self.register_buffer("pos_embed", torch.zeros(1, 1 + patches, c.width))
        self.blocks = nn.ModuleList(
            block(c.width, c.heads, mlp_ratio=c.mlp_width / c.width, **gate) for _ in range(c.depth)
        )
        self.norm = nn.LayerNorm(c.width, eps=1e-6)
        self.decoder_embed = nn.Linear(c.width, c.decoder_width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, c.decoder_width))
        self.register_buffer("decoder_pos_embed", torch.zeros(1, 1 + patches, c.decoder_width))
        self.decoder_blocks = nn.ModuleList(
            block(c.decoder_width, c.decoder_heads, mlp_ratio=4) for _ in range(c.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(c.decoder_width, eps=1e-6)
        self.decoder_pred = nn.Linear(c.decoder_width, 3 * c.patch**2)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """(B, 3, H, W), (B, L) -> loss ()."""
        x = self.patch_embed(images) + self.pos_embed[:, 1:]  # (B, L, D)
        order = noise.argsort(dim=1)
        back, keep = order.argsort(dim=1), order[:, : self.kept]
        x = x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))  # (B, K, D)
        cls = self.cls_token + self.pos_embed[:, :1]
        x = torch.cat([cls.expand(len(x), -1, -1), x], dim=1)  # (B, 1+K, D)
        for layer in self.blocks:
            x = layer(x)
        x = self.decoder_embed(self.norm(x))  # (B, 1+K, Dd)
        masks = self.mask_token.expand(len(x), back.shape[1] - self.kept, -1)
        all_patches = torch.cat([x[:, 1:], masks.to(x.dtype)], dim=1)  # (B, L, Dd), in that order
        all_patches = all_patches.gather(1, back[..., None].expand(-1, -1, x.shape[-1]))
        x = torch.cat([x[:, :1], all_patches], dim=1) + self.decoder_pos_embed  # (B, 1+L, Dd)
        for layer in self.decoder_blocks:
            x = layer(x)
        pred = self.decoder_pred(self.decoder_norm(x))[:, 1:]  # (B, L, P*P*3)
        target = vit.patchify(images, self.patch)
        mean, var = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
        error = ((pred - (target - mean) / (var + 1e-6) ** 0.5) ** 2).mean(-1)  # (B, L)
        mask = (back >= self.kept).to(error.dtype)
        return (error * mask).sum() / mask.sum()


def timm_mae(mine: vit.ViTMAE, mask_ratio: float) -> TimmMAE:
    """Build timm's model with the weights of `mine`."""
    theirs = TimmMAE(mine.config, mine.img_size, mask_ratio)
    theirs.load_state_dict(mine.state_dict(), strict=True)
    return theirs
