"""What follows from the flags, the ranks and the data: `Run`, the same on every rank."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

import mesh
import shard
import vit
from runtime.config import DEFAULT_BATCH, DEFAULT_STEPS, DTYPES, Config, model_config

if TYPE_CHECKING:  # plan.py does without these modules
    import data
    from runtime.image_source import ImageFacts


@dataclass(frozen=True)
class Run:
    """The flags and what follows from them; resolve() makes one, with_images() adds the data."""

    config: Config
    world_size: int
    group: int | None  # ranks of a shard group, in the hybrid modes
    mesh_shape: tuple[int, ...]  # (replicate, shard), with --tp (replicate, shard, tp)
    local_batch: int  # images per rank and accumulation step
    global_batch: int
    patches: int  # patches of an image
    node_ranks: int = 1  # ranks on the node that has most
    images: int = 0  # size of the data set; this and the rest are known once it is listed
    image_names_and_sizes: str | None = None  # their fingerprint; None for synthetic images
    channel_stats: "data.ChannelStats | None" = None
    pixel_notes: str = ""  # whose statistics those are, for the log
    steps: int = 0  # optimizer steps
    warmup_steps: int = 0

    @property
    def data_ranks(self) -> int:
        """Count the ranks that train on images of their own: one per tensor-parallel group."""
        return self.world_size // self.config.tp

    @property
    def peak_lr(self) -> float:
        """Peak learning rate: --lr, or --blr scaled to the global batch, as in MAE's recipe."""
        if self.config.lr is not None:
            return self.config.lr
        blr = self.config.default_blr if self.config.blr is None else self.config.blr
        return blr * self.global_batch / 256

    @property
    def vit_config(self) -> vit.ViTConfig:
        return replace(model_config(self.config.model), channels=self.config.channels)

    @property
    def dtype(self) -> torch.dtype:
        if self.config.precision is None:  # not resolved: as on a GPU
            return torch.bfloat16
        return DTYPES[self.config.precision]

    @property
    def pixel_stats(self) -> "data.ChannelStats":
        """Return the statistics that normalise the images, ImageNet's until they are listed."""
        if self.channel_stats is None:
            import data  # plan.py does without that module

            return data.IMAGENET
        return self.channel_stats

    @property
    def epoch_steps(self) -> int:
        return self.images // self.global_batch

    def flops_per_image(self) -> int | None:
        """Count the FLOPs of a step per image, without those of recomputed activations."""
        return vit.flops_per_image(self.vit_config, self.config.img_size, self.config.mask_ratio)

    def sharding_options(self) -> shard.ShardingOptions:
        """Return the options of shard.apply: the flags of the same names that are given."""
        given: dict[str, Any] = {}
        for option in fields(shard.ShardingOptions):
            value = getattr(self.config, option.name, None)
            if value is not None:
                given[option.name] = value
        given["param_dtype"] = self.dtype
        given["reduce_dtype"] = DTYPES[self.config.reduce_dtype]
        # The model casts the patches itself: their targets stay fp32. It has no dropout.
        return shard.ShardingOptions(**given, cast_inputs=False, preserve_rng_state=False)

    def record(self) -> dict[str, Any]:
        """Return the flags and what follows, by the names that checkpoints and the log use."""
        follows = ["group", "world_size", "global_batch", "steps", "warmup_steps"]
        follows += ["images", "image_names_and_sizes", "pixel_notes"]
        record = asdict(self.config)
        for name in follows:
            record[name] = getattr(self, name)
        record["batch"] = self.local_batch
        stats = self.channel_stats
        if stats:
            record["image_dtype"] = stats.dtype
        elif self.config.channels == 3:
            record["image_dtype"] = "uint8"
        else:  # not known yet, for a plan: rather more memory than less
            record["image_dtype"] = "float32"
        record["channel_mean"] = stats.mean if stats else None
        record["channel_std"] = stats.std if stats else None
        return record


def resolve(config: Config, world_size: int, node_ranks: int) -> Run:
    """Derive the run of so many ranks; ValueError if it is invalid.

    In the hybrid modes the `node_ranks` of a node share one copy, because the links within a node
    are usually faster than the network; --group overrides this.
    """
    mode = str(config.mode)
    tp = config.tp
    group = config.group
    model = model_config(config.model)
    widths = model.heads, model.decoder_heads, model.mlp_width, 4 * model.decoder_width
    if math.gcd(world_size, *widths) % tp:
        heads = f"{model.heads} and {model.decoder_heads} heads"
        raise ValueError(f"--tp {tp} must divide {world_size} ranks, {heads}, and the MLP widths")
    data_ranks = world_size // tp
    if group is None and shard.STRATEGIES[mode].shard_over == "group":
        group = min(max(node_ranks // tp, 1), data_ranks)
    shape: tuple[int, ...] = shard.mesh_shape(mode, data_ranks, group)
    if tp > 1:
        shape += (tp,)
    share = data_ranks * config.accum
    batch = DEFAULT_BATCH if config.batch is None else config.batch
    total = batch * share if config.global_batch is None else config.global_batch
    if total % share:
        parts = f"{data_ranks} ranks x {config.accum} accumulation steps"
        raise ValueError(f"--global-batch {total} is not a multiple of {parts}")
    patches = check_masking(model, config.img_size, config.mask_ratio)
    local_batch = total // share
    return Run(config, world_size, group, shape, local_batch, total, patches, node_ranks)


def resolve_on_nodes(config: Config, world_size: int, fewest: int, most: int) -> Run:
    """Derive the run of ranks on nodes that have from `fewest` to `most` of them.

    ValueError, the same on all ranks, if it is invalid, or if it needs to know what a node is.
    """
    hybrid = shard.STRATEGIES[str(config.mode)].shard_over == "group"
    if fewest < most and hybrid and not config.group:
        sizes = ", ".join(map(str, mesh.divisors(world_size // config.tp)))
        uneven = f"the nodes have from {fewest} to {most} ranks, so --group has no default"
        advice = f"type --group N with one of {sizes}, or start as many ranks on each node"
        raise ValueError(f"{uneven}: {advice}")
    return resolve(config, world_size, most)


def with_images(run: Run, facts: "ImageFacts") -> Run:
    """Add what is known of the images, and what follows from it."""
    config = run.config
    if config.steps is not None:
        steps = config.steps
    elif config.epochs is not None:
        steps = config.epochs * (facts.images // run.global_batch)
    else:
        steps = DEFAULT_STEPS
    warmup_steps = config.warmup_steps
    if warmup_steps is None:
        warmup_steps = steps // 20
    return replace(run, steps=steps, warmup_steps=warmup_steps, **facts._asdict())


def check_masking(config: vit.ViTConfig, img_size: int, mask_ratio: float) -> int:
    """Count the patches of an image; ValueError if none is left to predict."""
    patches = vit.patch_count(config, img_size)
    if vit.count_visible(patches, mask_ratio) == patches:
        raise ValueError(f"--mask-ratio {mask_ratio} removes no patch: nothing to learn")
    return patches


def try_plan(
    run: Run, device: torch.device | None, warn: Callable[[str], None], ran_out: bool = False
) -> dict[str, Any] | None:
    """Plan a run with `plan_this_run`; None without a model or, with a warning, if that fails."""
    if run.config.run_mode == "io":
        return None
    try:
        from planner.estimate import plan_this_run  # the trainer does without planner/

        return plan_this_run(run, device, ran_out)
    except Exception as error:  # the plan is only an estimate: a run must not fail without it
        warn(f"no plan of memory and traffic: {type(error).__name__}: {error}")
        return None
