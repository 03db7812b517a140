"""Build transformers' ViT-MAE with our shapes, and the steps that the benchmarks compare."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

import data
import mesh
import train_fsdp
import vit
from runtime import weight_files
from runtime.agreement import StepGuard
from runtime.config import DTYPES, Config
from runtime.run import resolve


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


def draw_batch(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw one rank's images (B, 3, H, W) uint8 and masking noise (B, L)."""
    side, patches = config.img_size, vit.patch_count(vit.MODELS[config.model], config.img_size)
    images = torch.randint(0, 256, (config.batch or 1, 3, side, side), dtype=torch.uint8)
    return images.to(device), torch.rand(len(images), patches).to(device)


def train_fsdp_step(config: Config, device: torch.device) -> Callable[[], None]:
    """Make a step of train_fsdp.py, with all that it does: gradient norm, vote on bad values."""
    world_size = dist.get_world_size()
    run = resolve(config, world_size, world_size)
    training = train_fsdp.build_training(run, mesh.build_mesh(run.mesh_shape, device))
    batch = draw_batch(config, device)
    return partial(train_fsdp.train_step, training, StepGuard(device), [batch], lr=1e-5)


def transformers_step(model: nn.Module, config: Config, device: torch.device) -> Callable[[], None]:
    """Make a plain step of transformers' model, which may be in DDP."""

    def loss_of(images: Tensor, noise: Tensor) -> Tensor:
        return model(pixel_values=images, noise=noise).loss

    return plain_step(loss_of, model.parameters(), config, device)


def plain_step(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    parameters: Iterable[Tensor],
    config: Config,
    device: torch.device,
) -> Callable[[], None]:
    """Make a step with nothing but PyTorch: autocast, forward, backward, fused AdamW."""
    images, noise = draw_batch(config, device)
    trained = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), fused=True)
    dtype = DTYPES[str(config.precision)]

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = loss_of(data.normalize(images), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
