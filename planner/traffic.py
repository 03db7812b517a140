"""What one step sends: the collectives of parameters and gradients, and over which links.

The rules follow shard.py and vit.py, unit by unit. The gradient norm, the check for bad steps and
the log send a few numbers each: not counted. Nor are collectives of a single rank.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch

import shard
import vit
from planner.machines import LINKS, Machine, build_ring, wire_bytes
from runtime.tensor_parallel import split_shape

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ACTIVATIONS = "activations"  # marks the collectives of tensor parallelism
FP32 = 4  # bytes: parameters, gradients and each of AdamW's two states are kept in it

# ---------------------------------------------------------------------------------------------
# What is planned


@dataclass(frozen=True)
class PlannedRun:
    """What memory, traffic and time of a step depend on: flags of train_fsdp.py, by their names."""

    config: vit.ViTConfig
    mode: str
    world_size: int
    batch: int  # images per rank and accumulation step
    img_size: int
    mask_ratio: float
    group: int | None = None  # ranks per shard group; hybrid modes only
    tp: int = 1  # ranks that split a block
    fsdp: int = 2  # engine; without meaning for ddp and zero1
    accum: int = 1
    precision: str = "bf16"
    reduce_dtype: str = "fp32"
    ac: str = "none"
    wrap: str = "block"
    prefetch: str = "backward_pre"
    forward_prefetch: bool = False
    cpu_offload: bool = False
    bucket_cap_mb: float | None = None
    encoder_only: bool = False
    freeze_blocks: int = 0  # first blocks that do not train, nor do patch embedding and cls then
    image_dtype: str = "uint8"

    @classmethod
    def from_flags(cls, config: vit.ViTConfig, flags: Mapping[str, Any]) -> "PlannedRun":
        """Pick the fields from resolved flags; one that is None or absent takes its default."""
        given = {field.name: flags.get(field.name) for field in fields(cls)}
        known = {name: value for name, value in given.items() if value is not None}
        return cls(**known | {"config": config})

    @cached_property
    def mesh_shape(self) -> tuple[int, int]:
        """Ranks per dimension, (replicate, shard); ValueError where mode and group clash."""
        return shard.mesh_shape(self.mode, self.data_ranks, self.group)

    @property
    def data_ranks(self) -> int:
        """Ranks that train on images of their own."""
        return self.world_size // self.tp

    @property
    def replicate(self) -> int:
        """Ranks that hold the same shard."""
        return self.mesh_shape[0]

    @property
    def shard(self) -> int:
        """Ranks that together hold one copy."""
        return self.mesh_shape[1]

    @property
    def engine(self) -> Literal["ddp", "fsdp1", "fsdp2"]:
        """Which wrapper is applied to the model."""
        if shard.STRATEGIES[self.mode].engine != "fsdp":
            return "ddp"
        return "fsdp1" if self.fsdp == 1 else "fsdp2"

    @property
    def reshard(self) -> bool:
        """Whether full parameters are freed after forward and gathered again in backward."""
        return shard.STRATEGIES[self.mode].reshard and (self.engine == "fsdp2" or self.shard > 1)

    @property
    def replicated(self) -> bool:
        """Whether FSDP2 gets a mesh of two dimensions and all-reduces over the first."""
        return self.engine == "fsdp2" and shard.STRATEGIES[self.mode].group != "world"

    @property
    def autocast(self) -> bool:
        """Whether low precision comes from autocast over fp32 parameters, as under DDP."""
        return self.engine == "ddp" and self.precision != "fp32"

    @property
    def buckets(self) -> bool:
        """Whether DDP keeps the gradients, in buckets; a single rank is not wrapped."""
        return self.engine == "ddp" and self.world_size > 1

    @property
    def compute_bytes(self) -> int:
        """Bytes per number in forward and backward."""
        return BYTES[self.precision]

    @property
    def pixel_bytes(self) -> int:
        """Bytes per value of the images that the loader gives, uint8 or else float32."""
        return 1 if self.image_dtype == "uint8" else FP32

    def tokens(self, part: str) -> int:
        """Count the tokens per image in "encoder" or "decoder", class token included."""
        patches = vit.patch_count(self.config, self.img_size)
        return 1 + (vit.kept_patches(patches, self.mask_ratio) if part == "encoder" else patches)


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: blocks, or the root with the rest."""

    name: str
    parameters: Mapping[str, tuple[int, ...]]  # shape by name, in the order of the module
    trains: bool = True  # or else it is frozen

    @property
    def part(self) -> str:
        """Part of the model: root, encoder or decoder."""
        return model_part(self.name)

    @cached_property
    def numel(self) -> int:
        """Number of parameters, without padding."""
        return sum(map(math.prod, self.parameters.values()))

    def padded(self, run: PlannedRun) -> int:
        """Count the numbers in the full tensor of its collectives.

        FSDP2 pads dim 0 of every parameter to a multiple of the shard group. FSDP1 aligns every
        parameter of the flat one to 16 bytes of the computing dtype and pads the end to a multiple
        of the ranks (torch/distributed/fsdp: _fsdp_param.py, _flat_param.py).
        """
        shapes = self.parameters.values()
        if run.engine == "fsdp2":
            return sum(-(-s[0] // run.shard) * run.shard * math.prod(s[1:]) for s in shapes)
        if run.engine == "ddp":
            return self.numel
        total, aligned = 0, 16 // run.compute_bytes
        for shape in shapes:
            total += -total % aligned + math.prod(shape)
        ranks = run.shard if run.shard > 1 else run.world_size  # no_shard is padded all the same
        return total + -total % ranks


def model_part(unit: str) -> str:
    """Which part of the model a unit belongs to, by its name: root, encoder or decoder."""
    return "root" if unit == "root" else "decoder" if unit.startswith("decoder") else "encoder"


@lru_cache(maxsize=64)
def model_units(
    config: vit.ViTConfig,
    encoder_only: bool,
    wrap: str = "block",
    tp: int = 1,
    freeze_blocks: int = 0,
) -> tuple[Unit, ...]:
    """List the root, then the blocks in the order of forward, which `wrap` root leaves in the root.

    Built on the meta device; shapes are those that each of `tp` ranks has. With `freeze_blocks` the
    patch embedding is a unit too, and the frozen class token a buffer (downstream/classifier.py).
    """
    with torch.device("meta"):
        model = vit.ViTMAE(config, config.patch)
    classes = {vit.Block, vit.PatchEmbed} if freeze_blocks else {vit.Block}
    blocks = shard.find_blocks(model, classes) if wrap == "block" else {}
    units: dict[str, dict[str, tuple[int, ...]]] = {"root": {}}
    for name, parameter in model.named_parameters():
        if encoder_only and name.startswith(("decoder", "mask_token")):
            continue
        if freeze_blocks and name == "cls_token":
            continue
        unit = next((block for block in blocks if name.startswith(f"{block}.")), "root")
        units.setdefault(unit, {})[name] = split_shape(name, tuple(parameter.shape), tp)
    frozen = {"patch_embed", *(f"blocks.{i}" for i in range(freeze_blocks))}
    return tuple(Unit(name, found, name not in frozen) for name, found in units.items())


def run_units(run: PlannedRun) -> tuple[Unit, ...]:
    """List the root, then the units of this run; DDP, which has none, is planned block by block."""
    wrap = "block" if run.engine == "ddp" else run.wrap
    return model_units(run.config, run.encoder_only, wrap, run.tp, run.freeze_blocks)


# ---------------------------------------------------------------------------------------------
# Collectives


@dataclass(frozen=True)
class PlannedCollective:
    """`count` collectives of one step on full tensors of `payload` bytes."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    unit: str
    payload: int
    count: int
    ranks: int  # in its group
    stride: int  # from one rank of the group to the next


def collectives(run: PlannedRun) -> list[PlannedCollective]:
    """List what a step sends, in the order of units, without collectives of one rank."""
    found = _ddp_collectives(run) if run.engine == "ddp" else _fsdp_collectives(run)
    return [c for c in (*found, *_tp_collectives(run)) if c.ranks > 1]


def _fsdp_collectives(run: PlannedRun) -> Iterator[PlannedCollective]:
    """Gather before forward, again before backward where it was freed; reduce after backward.

    The root is not freed in between. With accumulation all of that in every micro-step, except the
    all-reduce over replicas: FSDP2 sends it once, FSDP1's hybrid every time (shard.accumulation).
    What is frozen is gathered for forward alone; but FSDP2 prefetches the
    last frozen unit in backward, which does not need it.
    """
    size, ranks = BYTES[run.reduce_dtype], run.shard
    reduces = run.accum if run.engine == "fsdp1" and run.shard > 1 else 1
    units, prefetches = run_units(run), run.engine == "fsdp2" and run.prefetch != "none"
    forward_only = [unit.name for unit in units if not unit.trains]
    forward_only = forward_only[:-1] if prefetches else forward_only
    for unit in units:
        name, numel = unit.name, unit.padded(run)
        again, tp = run.reshard and name not in ("root", *forward_only), run.tp
        gathers = run.accum * (1 + again)
        gathered, part, block = numel * run.compute_bytes, numel // run.shard, run.shard * tp
        yield PlannedCollective("all_gather", name, gathered, gathers, ranks, tp)
        if not unit.trains:
            continue
        yield PlannedCollective("reduce_scatter", name, numel * size, run.accum, ranks, tp)
        yield PlannedCollective("all_reduce", name, part * size, reduces, run.replicate, block)


def _tp_collectives(run: PlannedRun) -> Iterator[PlannedCollective]:
    """All-reduce the activations of each block over the ranks that split it.

    Behind attention and MLP in forward, before both in backward; recomputation repeats the one
    behind attention. Inputs, normalised images and noise, are sent from the first of these ranks.
    """
    c = run.config
    each = run.accum * (4 if run.ac == "none" else 5)
    for unit in model_units(c, run.encoder_only, tp=run.tp)[1:]:
        width = c.decoder_width if unit.part == "decoder" else c.width
        size = run.batch * run.tokens(unit.part) * width * run.compute_bytes
        yield PlannedCollective("all_reduce", f"{unit.name} {ACTIVATIONS}", size, each, run.tp, 1)
    pixels = c.channels * run.img_size**2
    for numel in (pixels, vit.patch_count(c, run.img_size)):
        size = run.batch * numel * FP32
        yield PlannedCollective("broadcast", "inputs", size, run.accum, run.tp, 1)


def _ddp_collectives(run: PlannedRun) -> Iterator[PlannedCollective]:
    """One all-reduce per bucket, in the last micro-step; ZeRO-1 then sends every new parameter.

    The compression hook of a 16-bit reduce dtype sends buckets in that dtype; else they are fp32.
    """
    world, size = run.world_size, BYTES[run.reduce_dtype]
    for i, numel in enumerate(ddp_buckets(run)):
        yield PlannedCollective("all_reduce", f"bucket {i}", numel * size, 1, world, 1)
    trained = [unit for unit in run_units(run) if unit.trains]
    for unit in trained if run.mode == "zero1" else ():
        for shape, count in Counter(unit.parameters.values()).items():
            payload = math.prod(shape) * FP32
            yield PlannedCollective("broadcast", unit.name, payload, count, world, 1)


def ddp_buckets(run: PlannedRun) -> list[int]:
    """Count the numbers in each bucket from the second step on, when they follow backward's order.

    A bucket is full when it has reached its limit: 25 MiB but 1 MiB for the first, so that sending
    starts early, or `bucket_cap_mb` for all (torch/nn/parallel/distributed.py).
    """
    cap = (run.bucket_cap_mb or 25) * 2**20
    limit = cap if run.bucket_cap_mb else 2**20
    buckets, filled = list[int](), 0
    for numel in _ready_order(run):
        filled += numel
        if filled * FP32 >= limit:
            buckets.append(filled)
            filled, limit = 0, cap
    return [*buckets, filled] if filled else buckets


def _ready_order(run: PlannedRun) -> Iterator[int]:
    """Sizes of the parameters in the order in which backward completes their gradients.

    The last used come first; of a layer the bias, under autocast the weight, by when its cast is
    undone. `mask_token` and the decoder's ends come where they are used, not where defined.
    """
    root, *blocks = (unit for unit in run_units(run) if unit.trains)
    for part, ends in (
        ("decoder", ("decoder_pred", "decoder_norm")),
        ("encoder", ("mask_token", "decoder_embed", "norm")),
        ("", ("cls_token", "patch_embed")),
    ):
        for end in ends:
            layer = [s for name, s in root.parameters.items() if name.split(".")[0] == end]
            weight_first = run.autocast and end != "patch_embed"
            yield from map(math.prod, layer if weight_first else reversed(layer))
        for unit in reversed([unit for unit in blocks if unit.part == part]):
            shapes = list(unit.parameters.values())
            for i in range(len(shapes) - 2, -1, -2):
                pair = shapes[i : i + 2]
                yield from map(math.prod, pair if run.autocast else reversed(pair))


def host_copy_bytes(run: PlannedRun) -> float:
    """Bytes that a rank copies per step between host and GPU with --cpu-offload.

    Its fp32 shard before each all-gather, its gradients after each reduce-scatter
    (torch/distributed/fsdp: _fsdp_param.py, _fsdp_collectives.py); read there, not measured.
    """
    size = {"all_gather": run.compute_bytes, "reduce_scatter": BYTES[run.reduce_dtype]}
    copied = [c for c in _fsdp_collectives(run) if c.kind in size] if run.cpu_offload else []
    return sum(c.count * c.payload // size[c.kind] * FP32 / run.shard for c in copied)


def link_bytes(run: PlannedRun, machine: Machine) -> dict[str, dict[str, float]]:
    """Bytes that a rank sends per step, by kind and link: the mean over ranks."""
    total: dict[str, dict[str, float]] = {}
    for c in collectives(run):
        ring = build_ring(machine, run.world_size, c.ranks, c.stride)
        by_link = total.setdefault(c.kind, dict.fromkeys(LINKS, 0.0))
        sent = c.count * wire_bytes(c.kind, c.payload, c.ranks)
        for link, share in zip(LINKS, ring.share, strict=True):
            by_link[link] += sent * share
    return total
