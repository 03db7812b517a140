"""From flags to a model that trains: what a real run and a dry run of it have in common."""

import platform
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import mesh
import shard
import vit
from runtime import cpu_kernels
from runtime.flags import DTYPES, STEPS
from runtime.log import versions
from runtime.peak_flops import peak_flops


def completed(flags: dict[str, Any], epoch_steps: int) -> dict[str, Any]:
    """The flags of a run with the numbers that follow from its data; ValueError if they clash."""
    steps = flags["steps"] or (flags["epochs"] or 0) * epoch_steps or STEPS
    warmup = steps // 20 if flags["warmup_steps"] is None else flags["warmup_steps"]
    if warmup > steps:
        raise ValueError(
            f"--warmup-steps {warmup} is more than {steps}, those of --epochs {flags['epochs']}"
        )
    return flags | {"steps": steps, "warmup_steps": warmup}


def build_meta_model(
    config: vit.ViTConfig, img_size: int, norm_pix_loss: bool, device: torch.device
) -> nn.Module:
    """The model, for a device but not on it yet: shapes alone."""
    with torch.device("meta"):
        model = vit.ViTMAE(config, img_size, norm_pix_loss)
    if device.type == "cpu":  # on a GPU PyTorch's own kernels are the fast ones
        cpu_kernels.apply(model)
    return model


def spread(
    model: nn.Module,
    grid: DeviceMesh,
    *,
    seed: int | None,
    device: torch.device,
    mode: str,
    precision: str,
    reduce_dtype: str,
    lr: float,
    weight_decay: float,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler | None]:
    """A blank model -> sharded and initialised (unless `seed` is None); its optimizer and scaler.

    `options` are shard.apply's.
    """
    decay, config = shard.weight_decay_names(model), cast(vit.ViTMAE, model).config
    values = None if seed is None else partial(vit.initial_value, config, seed=seed)
    model = shard.apply(
        model,
        mode,
        grid,
        block_classes={vit.Block},
        initial_value=values,
        device=device,
        param_dtype=DTYPES[precision],
        reduce_dtype=DTYPES[reduce_dtype],
        **options,
    )
    optimizer = shard.build_optimizer(model, mode, decay, lr=lr, weight_decay=weight_decay)
    return model, optimizer, shard.build_scaler(model, device, DTYPES[precision])


def attention_kernels(
    config: vit.ViTConfig, chosen: dict[str, Any], device: torch.device
) -> dict[str, str]:
    """What computes attention in the encoder and in the decoder, which sees all patches."""
    c, dtype = config, DTYPES[chosen["precision"]]
    patches = vit.patch_count(c, chosen["img_size"])
    kept = vit.kept_patches(patches, chosen["mask_ratio"])
    return {
        part: cpu_kernels.attention_kernel(heads, width // heads, tokens + 1, dtype, device)
        for part, heads, width, tokens in (
            ("encoder", c.heads, c.width, kept),
            ("decoder", c.decoder_heads, c.decoder_width, patches),
        )
    }


def start_record(
    chosen: dict[str, Any],
    config: vit.ViTConfig,
    ranks: mesh.Ranks,
    device: torch.device,
    shape: tuple[int, int],
    plan: Mapping[str, Any] | None,
    *,
    params: int,
    lr: float,
    epoch_steps: int,
    begin: int,
    workers: int,
) -> dict[str, Any]:
    """What this run is: its flags (`chosen`, completed), its `planned` and what follows."""
    peak, peak_source = peak_flops(device)
    counted = config, chosen["img_size"], chosen["mask_ratio"]
    keys = ("memory_gib", "payload_bytes", "traffic_bytes_per_rank", "step_seconds_lower_bound")
    return chosen | {
        "planned": {key: plan[key] for key in keys} if plan else None,  # for Frontier's nodes
        "workers": workers,
        "lr": lr,
        "begin": begin,
        "epoch_steps": epoch_steps,
        "launcher": ranks.launcher,
        "local_world_size": ranks.local_world_size,
        "device": device.type,
        "mesh": {"replicate": shape[0], "shard": shape[1], "tp": 1},
        "params": params,
        "flops_per_image": vit.flops_per_image(*counted),
        "hardware_flops_per_image": vit.flops_per_image(*counted, recompute=True)
        if chosen["ac"] == "full"
        else None,
        "peak_flops_per_rank": peak,
        "peak_flops_source": peak_source,
        "sdpa": attention_kernels(config, chosen, device),
        "host": platform.node(),
        "versions": versions(),
    }


def planned(
    config: vit.ViTConfig, flags: Mapping[str, Any], warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """The numbers of plan.py for the same command; None, with a warning, where there are none.

    `flags` are those of train_fsdp.py, completed.
    """
    try:
        from planner import estimate, traffic

        return estimate.make_plan(traffic.PlannedRun.from_flags(config, flags)).json()
    except Exception as error:  # an estimate decides nothing: no run ends for want of it
        warn(f"no plan of memory and traffic: {type(error).__name__}: {error}")
        return None
