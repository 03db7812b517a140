"""The steps that benchmarks compare: that of train_fsdp.py, and one with nothing but PyTorch."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import data
import mesh
import train_fsdp
import vit
from runtime.agreement import StepGuard
from runtime.config import DTYPES, Config
from runtime.run import resolve


def draw_batch(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw one rank's images (B, 3, H, W) uint8 and masking noise (B, L)."""
    assert config.batch
    side = config.img_size
    patches = vit.patch_count(vit.MODELS[config.model], side)
    images = torch.randint(0, 256, (config.batch, 3, side, side), dtype=torch.uint8)
    noise = torch.rand(config.batch, patches)
    return images.to(device), noise.to(device)


def train_fsdp_step(config: Config, device: torch.device) -> Callable[[], None]:
    """Make a step of train_fsdp.py, with all that it does: gradient norm, vote on bad values."""
    world_size = dist.get_world_size()
    run = resolve(config, world_size, world_size)
    training = train_fsdp.build_training(run, mesh.build_mesh(run.mesh_shape, device))
    batch = draw_batch(config, device)
    return partial(train_fsdp.train_step, training, StepGuard(device), [batch], lr=1e-5)


def plain_step(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    parameters: Iterable[Tensor],
    config: Config,
    device: torch.device,
) -> Callable[[], None]:
    """Make a step with nothing but PyTorch: autocast, forward, backward, fused AdamW.

    `loss_of` takes normalised images (B, 3, H, W) and noise (B, L).
    """
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


def our_model_step(config: Config, device: torch.device) -> Callable[[], None]:
    """Make a plain step of our model, without train_fsdp.py or shard.py."""
    model = vit.ViTMAE(vit.MODELS[config.model], config.img_size).to(device)

    def loss_of(images: Tensor, noise: Tensor) -> Tensor:
        loss, _, _ = model(images, config.mask_ratio, noise)
        return loss

    return plain_step(loss_of, model.parameters(), config, device)
