"""Build transformers' ViT-MAE with our shapes, and a plain step of it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

import vit
from benchmarks.plain import plain_step
from runtime import weight_files
from runtime.config import Config


def transformers_mae(config: vit.ViTConfig, img_size: int) -> ViTMAEForPreTraining:
    """Build Hugging Face's model, with attention by scaled_dot_product_attention."""
    shapes = {theirs: getattr(config, ours) for ours, theirs in weight_files.CONFIG.items()}
    options = ViTMAEConfig(
        **shapes,
        image_size=img_size,
        decoder_intermediate_size=4 * config.decoder_width,
        layer_norm_eps=weight_files.NORM_EPS,
        norm_pix_loss=True,
        mask_ratio=0.75,
        attn_implementation="sdpa",
    )
    return ViTMAEForPreTraining(options)


def transformers_step(model: nn.Module, config: Config, device: torch.device) -> Callable[[], None]:
    """Make a plain step of transformers' model, which may be in DDP."""

    def loss_of(images: Tensor, noise: Tensor) -> Tensor:
        return model(pixel_values=images, noise=noise).loss

    return plain_step(loss_of, model.parameters(), config, device)
