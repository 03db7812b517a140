"""What one step sends: the collectives of parameters and gradients, and over which links.

The rules follow shard.py and vit.py, unit by unit. The gradient norm, the check for bad steps and
the log send a few numbers each: not counted. Nor are collectives of a single rank.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

import shard
import vit
from planner.machines import LINKS, Machine, ring_links, wire_bytes
from runtime.tensor_parallel import split_shape

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ACTIVATIONS = "activations"  # marks the collectives of tensor parallelism
FP32 = 4  # bytes: parameters, gradients and each of AdamW's two states are kept in it

# --- What is planned


@dataclass
class PlannedRun:
    """What memory, traffic and time of a step depend on: flags of train_fsdp.py, by their names.

    ValueError where mode and group clash.
    """

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
    async_save: bool = False
    bucket_cap_mb: float | None = None
    encoder_only: bool = False
    image_dtype: str = "uint8"

    @classmethod
    def from_flags(cls, config: vit.ViTConfig, flags: Mapping[str, Any]) -> "PlannedRun":
        """Pick the fields from resolved flags; one that is None or absent takes its default."""
        known = {field.name for field in fields(cls)}
        given = {name: flag for name, flag in flags.items() if name in known and flag is not None}
        return cls(config, **given)

    def __post_init__(self) -> None:
        """Add what follows from the fields."""
        row = shard.STRATEGIES[self.mode]
        self.data_ranks = self.world_size // self.tp  # that train on images of their own
        # ranks that hold the same shard, and that together hold one copy
        self.replicate, self.shard = shard.mesh_shape(self.mode, self.data_ranks, self.group)
        self.engine = "ddp"
        if row.engine == "fsdp":
            self.engine = "fsdp1" if self.fsdp == 1 else "fsdp2"
        # full parameters are freed after forward and gathered again in backward
        self.reshard = row.reshard_after_forward and (self.engine == "fsdp2" or self.shard > 1)
        # FSDP2 gets a mesh of two dimensions and all-reduces over the first
        self.replicated = self.engine == "fsdp2" and row.shard_over != "world"
        # low precision comes from autocast over fp32 parameters
        self.autocast = self.engine == "ddp" and self.precision != "fp32"
        # DDP keeps the gradients, in buckets; a single rank is not wrapped
        self.buckets = self.engine == "ddp" and self.world_size > 1
        self.compute_bytes = BYTES[self.precision]  # per number in forward and backward
        patches = vit.patch_count(self.config, self.img_size)
        kept = vit.kept_patches(patches, self.mask_ratio)
        self.tokens = {"encoder": 1 + kept, "decoder": 1 + patches}  # per image, with cls


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: the root's, or those of each block.

    The blocks of a part are alike: `count` units.
    """

    part: str  # root, encoder or decoder
    count: int
    shapes: tuple[tuple[int, ...], ...]  # of each parameter, in the order of the module

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in each parameter."""
        return tuple(map(math.prod, self.shapes))

    @property
    def numel(self) -> int:
        """Number of parameters of one, without padding."""
        return sum(self.sizes)

    def padded(self, run: PlannedRun) -> int:
        """Count the numbers in the full tensor of its collectives.

        FSDP2 pads dim 0 of every parameter to a multiple of the shard group. FSDP1 aligns every
        parameter of the flat one to 16 bytes of the computing dtype and pads the end to a multiple
        of the ranks (torch/distributed/fsdp: _fsdp_param.py, _flat_param.py).
        """
        if run.engine == "fsdp2":
            return sum(-(-s[0] // run.shard) * run.shard * math.prod(s[1:]) for s in self.shapes)
        if run.engine == "ddp":
            return self.numel
        total = 0
        aligned = 16 // run.compute_bytes
        for size in self.sizes:
            total += -total % aligned + size
        ranks = run.shard if run.shard > 1 else run.world_size  # no_shard is padded all the same
        return total + -total % ranks


@lru_cache(maxsize=64)
def model_units(config: vit.ViTConfig, encoder_only: bool, tp: int = 1) -> tuple[Unit, ...]:
    """List the root, then the blocks of each part; shapes are those on each of `tp` ranks."""
    with torch.device("meta"):  # one block of each part
        model = vit.ViTMAE(replace(config, depth=1, decoder_depth=1), config.patch)
    shapes: dict[str, list[tuple[int, ...]]] = {"root": [], "encoder": [], "decoder": []}
    for name, parameter in model.named_parameters():
        if not (encoder_only and name.startswith(("decoder", "mask_token"))):
            part = "root"
            if name.startswith("blocks."):
                part = "encoder"
            elif name.startswith("decoder_blocks."):
                part = "decoder"
            shapes[part].append(split_shape(name, tuple(parameter.shape), tp))
    counts = {"root": 1, "encoder": config.depth, "decoder": config.decoder_depth}
    return tuple(Unit(p, counts[p], tuple(found)) for p, found in shapes.items() if found)


def run_units(run: PlannedRun) -> tuple[Unit, ...]:
    """List the units of this run: under --wrap root one that has all. DDP is planned by blocks."""
    units = model_units(run.config, run.encoder_only, run.tp)
    if run.wrap == "block" or run.engine == "ddp":
        return units
    # as in the module, the root's come last: FSDP1 aligns all but the end
    root, *blocks = units
    shapes: list[tuple[int, ...]] = []
    for unit in (*blocks, root):
        shapes += unit.shapes * unit.count
    return (Unit("root", 1, tuple(shapes)),)


# --- Collectives


@dataclass(frozen=True)
class PlannedCollective:
    """`count` collectives of one step on full tensors of `payload` bytes."""

    kind: str  # all_gather, reduce_scatter, all_reduce or broadcast
    what: str  # part of the model, "bucket", ACTIVATIONS or "inputs"
    payload: int
    count: int
    ranks: int  # in its group
    stride: int  # from one rank of the group to the next


def collectives(run: PlannedRun) -> list[PlannedCollective]:
    """List what a step sends, without collectives of one rank."""
    found = _ddp_collectives(run) if run.engine == "ddp" else _fsdp_collectives(run)
    return [c for c in (*found, *_tp_collectives(run)) if c.ranks > 1]


def _fsdp_collectives(run: PlannedRun) -> Iterator[PlannedCollective]:
    """Gather before forward, again before backward where it was freed; reduce after backward.

    The root is not freed in between. With accumulation all of that in every micro-step, except the
    all-reduce over replicas: FSDP2 sends it once, FSDP1's hybrid every time (shard.accumulation).
    """
    size = BYTES[run.reduce_dtype]
    ranks = run.shard
    reduces = run.accum if run.engine == "fsdp1" and run.shard > 1 else 1
    for unit in run_units(run):
        numel = unit.padded(run)
        count = unit.count
        gathers = run.accum * (1 + (run.reshard and unit.part != "root"))
        for kind, payload, times, group, stride in (
            ("all_gather", numel * run.compute_bytes, gathers, ranks, run.tp),
            ("reduce_scatter", numel * size, run.accum, ranks, run.tp),
            ("all_reduce", numel // ranks * size, reduces, run.replicate, ranks * run.tp),
        ):
            yield PlannedCollective(kind, unit.part, payload, count * times, group, stride)


def _tp_collectives(run: PlannedRun) -> Iterator[PlannedCollective]:
    """All-reduce the activations of each block over the ranks that split it.

    Behind attention and MLP in forward, before both in backward; recomputation repeats the one
    behind attention. Inputs, normalised images and noise, are sent from the first of these ranks.
    """
    c = run.config
    each = run.accum * (4 if run.ac == "none" else 5)
    _, *blocks = model_units(c, run.encoder_only)
    for unit in blocks:
        width = c.decoder_width if unit.part == "decoder" else c.width
        size = run.batch * run.tokens[unit.part] * width * run.compute_bytes
        yield PlannedCollective("all_reduce", ACTIVATIONS, size, each * unit.count, run.tp, 1)
    pixels = c.channels * run.img_size**2
    for numel in (pixels, vit.patch_count(c, run.img_size)):
        size = run.batch * numel * FP32
        yield PlannedCollective("broadcast", "inputs", size, run.accum, run.tp, 1)


def _ddp_collectives(run: PlannedRun) -> Iterator[PlannedCollective]:
    """One all-reduce per bucket, in the last micro-step; ZeRO-1 then sends each rank's parameters.

    The compression hook of a 16-bit reduce dtype sends buckets in that dtype; else they are fp32.
    """
    world = run.world_size
    size = BYTES[run.reduce_dtype]
    for numel, count in Counter(ddp_buckets(run)).items():
        yield PlannedCollective("all_reduce", "bucket", numel * size, count, world, 1)
    if run.mode == "zero1":  # in one piece from each rank; the pieces differ a little
        numel, more = divmod(sum(sum(u.sizes) * u.count for u in run_units(run)), world)
        for size, count in ((numel + 1) * FP32, more), (numel * FP32, world - more):
            yield PlannedCollective("broadcast", "parameters", size, count, world, 1)


def ddp_buckets(run: PlannedRun) -> list[int]:
    """Count the numbers in each bucket, about: parameters in reverse, until a bucket is full.

    A bucket is full when it has reached its limit: 25 MiB but 1 MiB for the first, so that sending
    starts early, or `bucket_cap_mb` for all (torch/nn/parallel/distributed.py). DDP's order differs
    in a few places, its sum does not.
    """
    cap = 25 * 2**20
    limit = 2**20
    if run.bucket_cap_mb:
        cap = int(run.bucket_cap_mb * 2**20)
        limit = cap
    sizes: list[int] = []
    root, *blocks = run_units(run)
    for unit in (*reversed(blocks), root):
        sizes += unit.sizes[::-1] * unit.count
    buckets: list[int] = []
    filled = 0
    for numel in sizes:
        filled += numel
        if filled * FP32 >= limit:
            buckets.append(filled)
            filled = 0
            limit = cap
    if filled:
        buckets.append(filled)
    return buckets


def link_bytes(run: PlannedRun, machine: Machine) -> dict[str, dict[str, float]]:
    """Bytes that a rank sends per step, by kind and link: the mean over ranks."""
    total: dict[str, dict[str, float]] = {}
    for c in collectives(run):
        shares = ring_links(machine, run.world_size, c.ranks, c.stride)
        by_link = total.setdefault(c.kind, dict.fromkeys(LINKS, 0.0))
        sent = c.count * wire_bytes(c.kind, c.payload, c.ranks)
        for link, share in zip(LINKS, shares, strict=True):
            by_link[link] += sent * share
    return total
