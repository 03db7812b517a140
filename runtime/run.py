"""What follows from the flags, the ranks and the data: `Run`, the same on every rank."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

import mesh
import shard
import vit
from runtime.config import DEFAULT_BATCH, DEFAULT_STEPS, DTYPES, Config, model_config, names


@dataclass(frozen=True)
class Run:
    """Hold what follows from the flags, the ranks and the data; the same on every rank."""

    config: Config
    world_size: int
    group: int | None  # ranks of a shard group, in the hybrid modes
    mesh_shape: tuple[int, ...]  # (replicate, shard), with --tp (replicate, shard, tp)
    local_batch: int  # images per rank and accumulation step
    global_batch: int
    patches: int  # of an image
    images: int = 0  # of the data set; this and the rest are known once the images are listed
    image_names_and_sizes: str | None = None  # their fingerprint; None for synthetic images
    channel_stats: Any = None  # data.ChannelStats: plan.py does without that module's torchvision
    steps: int = 0  # optimizer steps
    warmup_steps: int = 0

    @property
    def data_ranks(self) -> int:
        """Count the ranks that train on images of their own: one per tensor-parallel group."""
        return self.world_size // self.config.tp

    def data_rank(self, rank: int) -> int:
        """Return which of them, from 0, has the images of this rank."""
        return rank // self.config.tp

    @property
    def ranks_per_group(self) -> dict[str, int]:
        """Count the ranks of a group in each dimension of the mesh, and of all."""
        dimensions = dict(zip(mesh.DIMENSIONS, self.mesh_shape, strict=False))
        return dimensions | {"world": self.world_size}

    @property
    def lr(self) -> float:
        """Peak learning rate: the base rate scaled to the global batch, as in MAE's recipe."""
        return self.config.blr * self.global_batch / 256

    @property
    def model(self) -> vit.ViTConfig:
        return replace(model_config(self.config.model), channels=self.config.channels)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.precision or "bf16"]

    @property
    def epoch_steps(self) -> int:
        return self.images // self.global_batch

    def flops_per_image(self, recomputed: bool = False) -> int | None:
        """Count the FLOPs of a step per image; `recomputed` ones too, None where none are."""
        c = self.config
        if recomputed and c.ac != "full":
            return None
        return vit.flops_per_image(self.model, c.img_size, c.mask_ratio, recompute=recomputed)

    def sharding_options(self) -> shard.ShardingOptions:
        """Return the options of shard.apply: the flags of the same names, where they are given."""
        known = {option.name for option in fields(shard.ShardingOptions)}
        given = {k: v for k, v in asdict(self.config).items() if k in known and v is not None}
        given |= {"param_dtype": self.dtype, "reduce_dtype": DTYPES[self.config.reduce_dtype]}
        # The model casts the patches itself: their targets stay fp32. It has no dropout.
        return shard.ShardingOptions(**given, cast_inputs=False, preserve_rng_state=False)

    def step_options(self) -> dict[str, Any]:
        """Return the options of train_fsdp.train_step that stay the same in all steps."""
        c = self.config
        options = {"mask_ratio": c.mask_ratio, "clip": c.clip, "dtype": self.dtype}
        return options | ({"stats": self.channel_stats} if self.channel_stats else {})

    def record(self) -> dict[str, Any]:
        """Return the flags and what follows, by the names that checkpoints and the log use."""
        follows = ["group", "world_size", "global_batch", "steps", "warmup_steps"]
        follows += ["images", "image_names_and_sizes"]
        record = asdict(self.config) | {name: getattr(self, name) for name in follows}
        stats, rgb = self.channel_stats, self.config.channels == 3
        return record | {
            "batch": self.local_batch,
            # of images that are not known yet, for a plan: rather more memory than less
            "image_dtype": stats.dtype if stats else "uint8" if rgb else "float32",
            "channel_mean": stats and stats.mean,
            "channel_std": stats and stats.std,
        }


def decisive(config: Config) -> tuple[str, ...]:
    """List the keys of Run.record() that decide the result: a resumed run must have the same.

    Not the path of --data, because the same images may lie elsewhere by now.
    """
    images = ("images", "image_names_and_sizes", "image_dtype", "channel_mean", "channel_std")
    return names("result", table=type(config)) + images


def resolve(config: Config, world_size: int, node_ranks: int) -> Run:
    """Derive the run from the flags for `world_size` ranks; ValueError if they are invalid.

    `node_ranks`, the ranks per node, is the size of a shard group that --group does not give.
    """
    group, tp, model = None, config.tp, model_config(config.model)
    data_ranks = check_tensor_parallel(model, world_size, tp)
    if shard.STRATEGIES[str(config.mode)].group == "group":
        group = config.group or min(max(node_ranks // tp, 1), data_ranks)
    mesh.check_group(data_ranks, group or 1)
    batches = batch_sizes(data_ranks, config.accum, config.batch, config.global_batch)
    patches = vit.patch_count(model, config.img_size)
    shape: tuple[int, ...] = shard.mesh_shape(str(config.mode), data_ranks, group)
    return Run(config, world_size, group, shape + (tp,) * (tp > 1), *batches, patches)


def with_images(
    run: Run, images: int, image_names_and_sizes: str | None, channel_stats: Any
) -> Run:
    """Add what follows from the data; ValueError where the steps are fewer than the warm-up's."""
    config, epoch_steps = run.config, images // run.global_batch
    steps = config.steps or (config.epochs or 0) * epoch_steps or DEFAULT_STEPS
    warmup = steps // 20 if config.warmup_steps is None else config.warmup_steps
    if warmup > steps:
        raise ValueError(f"--warmup-steps {warmup} is more than the {steps} steps of the run")
    found = replace(run, images=images, image_names_and_sizes=image_names_and_sizes)
    return replace(found, channel_stats=channel_stats, steps=steps, warmup_steps=warmup)


def batch_sizes(
    world_size: int, accum: int, batch: int | None, global_batch: int | None
) -> tuple[int, int]:
    """Return (local batch, global batch) in images; ValueError where the latter does not divide."""
    share = world_size * accum
    if global_batch is None:
        return batch or DEFAULT_BATCH, (batch or DEFAULT_BATCH) * share
    if global_batch % share:
        below = max(global_batch // share, 1) * share
        parts = f"{world_size} ranks x {accum} accumulation steps: use {below} or {below + share}"
        raise ValueError(f"--global-batch {global_batch} is not a multiple of {parts}")
    return global_batch // share, global_batch


def check_tensor_parallel(model: vit.ViTConfig, world_size: int, tp: int) -> int:
    """Count the groups of `tp` ranks; ValueError where it does not divide ranks or model."""
    mlps = model.mlp_width, 4 * model.decoder_width
    most = math.gcd(world_size, model.heads, model.decoder_heads, *mlps)
    if most % tp:
        fit = ", ".join(map(str, mesh.divisors(most)))
        raise ValueError(f"--tp {tp} does not divide the ranks, heads and MLP widths: use {fit}")
    return world_size // tp


def check_masking(config: vit.ViTConfig, img_size: int, mask_ratio: float) -> int:
    """Count the patches of an image; ValueError where none of them is left to predict."""
    patches = vit.patch_count(config, img_size)
    if vit.kept_patches(patches, mask_ratio) == patches:
        raise ValueError(f"--mask-ratio {mask_ratio} removes no patch: nothing to learn")
    return patches
