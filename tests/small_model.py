"""A ViTMAE of a few thousand parameters, in any row of shard.py's table, for many tests."""

from functools import partial

import torch
from torch import nn

import shard
import vit

CONFIG = vit.ViTConfig(32, 3, 64, 2, 8, decoder_width=32, decoder_depth=2, decoder_heads=2)
UNITS = 3 + 2 + 1  # encoder blocks, decoder blocks, root
CPU = torch.device("cpu")
FSDP_MODES = ["no_shard", "shard_grad_op", "full_shard", "hybrid", "hybrid_grad_op"]
ROWS = [("ddp", 2), ("zero1", 2)]
ROWS += [(mode, 1) for mode in FSDP_MODES]
ROWS += [(mode, 2) for mode in FSDP_MODES]


def build(mode: str, grid, *, dtype=torch.float32, config=CONFIG, seed=0, **options) -> nn.Module:
    """Build and shard the model on a mesh; `options` are those of shard.ShardingOptions."""
    with torch.device("meta"):
        model = vit.ViTMAE(config, 32)
    return shard.apply(
        model,
        mode,
        grid,
        block_classes={vit.Block},
        init_fn=partial(vit.initial_value, config, seed=seed),
        options=shard.ShardingOptions(param_dtype=dtype, cast_inputs=False, **options),
    )


def batch(seed: int = 0) -> tuple:
    """Draw the arguments of the model: images, mask ratio, noise."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, 32, 32, generator=generator)
    return images, 0.75, torch.rand(2, 16, generator=generator)


def forward_backward(model: nn.Module, seed: int = 0) -> torch.Tensor:
    """Compute the gradients of a batch; return its loss ()."""
    loss, _, _ = model(*batch(seed))
    loss.backward()
    return loss
