"""Layouts of other libraries: which names their weights have, and what their shapes say.

The official MAE release and timm's `vit_*` (its encoder) use the names of vit.ViTMAE. transformers'
ViTMAE has others, and q, k and v as three matrices.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import vit

DECODER = ("decoder_", "mask_token")  # how the names of a decoder's weights begin
OFFICIAL_LARGE = vit.ViTConfig(1024, 24, 4096, 16, 16)  # released too, but no row of vit.MODELS

# Ours: that of transformers' files. Version 5 renames the modules, and writes these names still.
_OUTSIDE = {
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
_STACKS = {"blocks": "vit.encoder.layer", "decoder_blocks": "decoder.decoder_layers"}
_INSIDE = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.q": "attention.attention.query",
    "attn.k": "attention.attention.key",
    "attn.v": "attention.attention.value",
    "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_NEWER = {  # names of version 5's modules
    r"^decoder\.decoder_encoder\.layer\.": "decoder.decoder_layers.",
    r"^vit\.layers\.": "vit.encoder.layer.",
    r"\.attention\.q_proj\.": ".attention.attention.query.",
    r"\.attention\.k_proj\.": ".attention.attention.key.",
    r"\.attention\.v_proj\.": ".attention.attention.value.",
    r"\.attention\.o_proj\.": ".attention.output.dense.",
    r"\.mlp\.fc1\.": ".intermediate.dense.",
    r"\.mlp\.fc2\.": ".output.dense.",
}


def _their_name(name: str) -> str:
    """Return what transformers calls a weight of ours; q, k and v have a name each."""
    if block := re.fullmatch(r"(\w+blocks|blocks)\.(\d+)\.(.+)\.(weight|bias)", name):
        stack, index, part, leaf = block.groups()
        return f"{_STACKS[stack]}.{index}.{_INSIDE[part]}.{leaf}"
    part, _, leaf = name.rpartition(".") if name not in _OUTSIDE else (name, "", "")
    return f"{_OUTSIDE[part]}.{leaf}" if leaf else _OUTSIDE[part]


def _our_name(theirs: str) -> str:
    """Return our name of a weight of transformers'; KeyError where it is none of ViTMAE."""
    name = theirs if theirs.startswith(("vit.", "decoder.")) else f"vit.{theirs}"  # ViTMAEModel
    for pattern, older in _NEWER.items():
        name = re.sub(pattern, older, name)
    outside = {v: k for k, v in _OUTSIDE.items()}
    if block := re.fullmatch(r"([a-z_.]+)\.(\d+)\.(.+)\.(weight|bias)", name):
        stack, index, part, leaf = block.groups()
        stacks, inside = ({v: k for k, v in t.items()} for t in (_STACKS, _INSIDE))
        return f"{stacks[stack]}.{index}.{inside[part]}.{leaf}"
    if name in outside:
        return outside[name]
    part, _, leaf = name.rpartition(".")
    return f"{outside[part]}.{leaf}"


def from_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' ViTMAE; q, k and v become one.

    ValueError names the first weight that is none of ViTMAE, or the first of q, k, v that misses.
    """
    found, sources = dict[str, str](), dict[str, list[str]]()
    for theirs in weights:
        try:
            found[_our_name(theirs)] = theirs
        except KeyError:
            raise ValueError(f"{theirs} is no weight of transformers' ViTMAE") from None
    for name in found:
        fused = re.sub(r"\.attn\.[qkv]\.", ".attn.qkv.", name)
        parts = [re.sub(r"\.attn\.qkv\.", f".attn.{p}.", fused) for p in "qkv"]
        wanted = [name] if fused == name else parts
        for missing in [part for part in wanted if part not in found]:
            raise ValueError(f"{_their_name(missing)} is missing")
        sources[fused] = [found[part] for part in wanted]

    for names in sources.values():  # three that cannot be one
        for other in names[1:]:
            if weights[other].shape != weights[names[0]].shape or not weights[other].ndim:
                raise ValueError(f"{other} has another shape than {names[0]}")
    merged = {name: [weights[theirs] for theirs in names] for name, names in sources.items()}
    return {n: torch.cat(parts) if len(parts) > 1 else parts[0] for n, parts in merged.items()}


def to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights of ours for transformers' ViTMAE: q, k and v apart, each a view."""
    result = {}
    for name, tensor in weights.items():
        if ".attn.qkv." in name:
            for part, third in zip("qkv", tensor.chunk(3), strict=True):
                result[_their_name(name.replace(".qkv.", f".{part}."))] = third
        else:
            result[_their_name(name)] = tensor
    if any(name.startswith("decoder.") for name in result):
        return result
    return {name.removeprefix("vit."): tensor for name, tensor in result.items()}  # ViTMAEModel


def transformers_config(config: vit.ViTConfig, img_size: int, norm_pix_loss: bool) -> dict:
    """Return the content of config.json, but for `architectures`."""
    return {
        "model_type": "vit_mae",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-6,
        "image_size": img_size,
        "patch_size": config.patch,
        "num_channels": config.channels,
        "qkv_bias": True,
        "decoder_hidden_size": config.decoder_width,
        "decoder_num_hidden_layers": config.decoder_depth,
        "decoder_num_attention_heads": config.decoder_heads,
        "decoder_intermediate_size": 4 * config.decoder_width,
        "mask_ratio": 0.75,
        "norm_pix_loss": norm_pix_loss,
    }


def about_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read config.json -> heads, decoder_heads, norm_pix_loss; ValueError for another model."""
    for key, wanted in ("model_type", "vit_mae"), ("hidden_act", "gelu"):
        if config.get(key, wanted if key != "model_type" else None) != wanted:
            raise ValueError(f"{key} is {config.get(key)!r:.40}, not {wanted!r}")
    epsilon = config.get("layer_norm_eps", 1e-12)  # of 1e-12 too: what it adds is less than noise
    if not (isinstance(epsilon, float) and 0 <= epsilon <= 1e-6):
        raise ValueError(f"layer_norm_eps is {epsilon!r:.40}, this model's is 1e-6")
    return {
        "heads": config.get("num_attention_heads", 12),
        "decoder_heads": config.get("decoder_num_attention_heads", 16),
        "norm_pix_loss": config.get("norm_pix_loss", False),
    }


def infer_config(
    shapes: Mapping[str, tuple[int, ...]], heads: int | None, decoder_heads: int | None
) -> tuple[vit.ViTConfig, int]:
    """Work out a model from the shapes of its weights -> its config, and the image size in pixels.

    Heads are in no shape: None takes those of the same row of vit.MODELS or of the official ViT-L.
    ValueError where there is none; it names the weight that is missing or has no sense.
    """
    unknown = (
        "nothing says how many {} its model has: `python convert.py FILE NEW --to official --{} N` "
        "writes a file that does"
    )

    def sides(name: str, count: int) -> tuple[int, ...]:
        shape = shapes.get(name)
        if shape is None:
            raise ValueError(f"{name} is missing")
        if len(shape) != count or not all(shape):
            raise ValueError(f"{name} is {shape}, which is no shape of this weight")
        return shape

    def depth(stack: str) -> int:
        return sum(bool(re.fullmatch(rf"{stack}\.\d+\.norm1\.weight", n)) for n in shapes)

    width, channels, patch, across = sides("patch_embed.proj.weight", 4)
    if patch != across:
        raise ValueError(f"patch_embed.proj.weight is of patches of {patch} x {across}, not square")
    side = math.isqrt(sides("pos_embed", 3)[1] - 1)
    if side < 1 or shapes["pos_embed"][1] != 1 + side**2:
        raise ValueError(f"pos_embed is {shapes['pos_embed']}: not cls and a square of patches")
    gated, mlp_width = "blocks.0.mlp.fc1_g.weight" in shapes, sides("blocks.0.mlp.fc2.weight", 2)[1]
    rows = [*vit.MODELS.values(), OFFICIAL_LARGE]
    encoder = (width, depth("blocks"), mlp_width, gated)
    row = next((r for r in rows if (r.width, r.depth, r.mlp_width, r.gated_mlp) == encoder), None)
    decoder = row or OFFICIAL_LARGE  # what an encoder alone gets
    if "decoder_pred.weight" in shapes:
        small = (sides("decoder_embed.weight", 2)[0], depth("decoder_blocks"))
        same = (r for r in rows if (r.decoder_width, r.decoder_depth) == small)
        known = next(same, None)
        if not (decoder_heads or known):
            raise ValueError(unknown.format("decoder heads", "decoder-heads"))
        many = decoder_heads or (known or OFFICIAL_LARGE).decoder_heads
        decoder = replace(
            OFFICIAL_LARGE, decoder_width=small[0], decoder_depth=small[1], decoder_heads=many
        )
    if not (heads or row):
        raise ValueError(unknown.format("heads", "heads"))
    config = replace(
        decoder,
        width=width,
        depth=encoder[1],
        mlp_width=mlp_width,
        heads=heads or (row or OFFICIAL_LARGE).heads,
        patch=patch,
        gated_mlp=gated,
        channels=channels,
    )
    return config, side * patch
