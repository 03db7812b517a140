"""Count what one step sends: the collectives on parameters and gradients, and the bytes per link.

The rules follow shard.py and vit.py, unit by unit. The gradient norm, the check for bad steps and
the log are not counted, because they send only a few numbers, nor are collectives of a single rank.

The bytes in the log (`planned`, under "traffic_bytes_per_rank") are those of `link_bytes`: they are
computed before the run, not measured in it.
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
FP32 = 4  # bytes per element of parameters, gradients and each of AdamW's two states

# --- What is planned


@dataclass
class PlannedRun:
    """The flags on which memory, traffic and time of a step depend, named as in train_fsdp.py.

    ValueError if the group does not fit the mode.
    """

    config: vit.ViTConfig
    mode: str
    world_size: int
    batch: int  # images per rank and accumulation step
    img_size: int
    mask_ratio: float
    group: int | None = None  # ranks per shard group; hybrid modes only
    tp: int = 1  # ranks that split a block
    fsdp: int = 2  # 1 or 2, the engine; ignored by ddp and zero1
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
        """Pick the fields from resolved flags; a flag that is None or absent has its default."""
        known = {field.name for field in fields(cls)}
        given = {name: flag for name, flag in flags.items() if name in known and flag is not None}
        return cls(config, **given)

    def __post_init__(self) -> None:
        """Derive the engine, the mesh and the number of tokens."""
        row = shard.STRATEGIES[self.mode]
        self.data_ranks = self.world_size // self.tp  # groups of ranks with images of their own
        # ranks that hold the same shard, and ranks that together hold one copy of the model
        self.replicate, self.shard = shard.mesh_shape(self.mode, self.data_ranks, self.group)
        # ddp, fsdp1 or fsdp2; ZeRO-1 is DDP with another optimizer
        self.engine = "ddp"
        self.zero1 = row.engine == "zero1"
        if row.engine == "fsdp":
            self.engine = "fsdp1" if self.fsdp == 1 else "fsdp2"
        # whether full parameters are freed after forward, and gathered again in backward
        self.reshard = row.reshard_after_forward and (self.engine == "fsdp2" or self.shard > 1)
        # whether FSDP2 has a mesh of two dimensions, and all-reduces over the first
        self.replicated = self.engine == "fsdp2" and row.shard_over != "world"
        # whether low precision comes from autocast over fp32 parameters
        self.autocast = self.engine == "ddp" and self.precision != "fp32"
        # whether DDP keeps the gradients in buckets; it does not wrap a single rank
        self.buckets = self.engine == "ddp" and self.world_size > 1
        self.compute_bytes = BYTES[self.precision]  # per element in forward and backward
        c = self.config
        self.widths = {"encoder": c.width, "decoder": c.decoder_width}
        self.heads = {"encoder": c.heads, "decoder": c.decoder_heads}
        self.patches = vit.patch_count(c, self.img_size)
        kept = vit.count_visible(self.patches, self.mask_ratio)
        self.tokens = {"encoder": 1 + kept, "decoder": 1 + self.patches}  # per image, with cls


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: those of a block, or of the root.

    The blocks of a part (encoder or decoder) are alike, so one Unit stands for all `count` of them.
    """

    part: str  # root, encoder or decoder
    count: int
    shapes: tuple[tuple[int, ...], ...]  # of each parameter, in the order of the module

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(map(math.prod, self.shapes))

    @property
    def numel(self) -> int:
        """Number of elements of one unit, without padding."""
        return sum(self.sizes)

    def padded(self, run: PlannedRun) -> int:
        """Count the elements, with padding, of the full tensor in the unit's collectives.

        FSDP2 pads dim 0 of every parameter to a multiple of the shard group. FSDP1 joins the
        parameters to a flat one, aligns each to 16 bytes of the compute dtype, and pads the end to
        a multiple of the ranks (torch/distributed/fsdp: _fsdp_param.py, _flat_param.py).
        """
        if run.engine == "fsdp2":
            return sum(
                round_up(rows, run.shard) * math.prod(columns) for rows, *columns in self.shapes
            )
        if run.engine == "ddp":
            return self.numel
        total = 0
        for size in self.sizes:
            total = round_up(total, 16 // run.compute_bytes) + size
        ranks = run.shard if run.shard > 1 else run.world_size  # FSDP1 pads no_shard by the world
        return round_up(total, ranks)


def round_up(number: int, multiple: int) -> int:
    """Round a number up to a multiple of another."""
    return math.ceil(number / multiple) * multiple


@lru_cache(maxsize=64)
def model_units(config: vit.ViTConfig, encoder_only: bool, tp: int = 1) -> tuple[Unit, ...]:
    """List the root, then the blocks of each part, with the shapes on each of `tp` ranks."""
    with torch.device("meta"):  # one block of each part is enough, as all have the same shapes
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
    """List the units of this run: a single one under --wrap root. DDP is planned block by block."""
    units = model_units(run.config, run.encoder_only, run.tp)
    if run.wrap == "block" or run.engine == "ddp":
        return units
    # The root's parameters come last, as in the module: FSDP1 aligns all but the last one.
    root, *blocks = units
    shapes: list[tuple[int, ...]] = []
    for unit in (*blocks, root):
        shapes += unit.shapes * unit.count
    return (Unit("root", 1, tuple(shapes)),)


# --- Collectives


@dataclass(frozen=True)
class PlannedCollective:
    """`count` equal collectives in one step, each on a full tensor of `payload` bytes."""

    kind: str  # all_gather, reduce_scatter, all_reduce or broadcast
    what: str  # part of the model, "bucket", "parameters", ACTIVATIONS or "inputs"
    payload: int
    count: int
    ranks: int  # in its group
    stride: int  # from one rank of the group to the next


def collectives(run: PlannedRun) -> list[PlannedCollective]:
    """List the collectives of a step, except those of a single rank."""
    found = _ddp_collectives(run) if run.engine == "ddp" else _fsdp_collectives(run)
    return [c for c in (*found, *_tp_collectives(run)) if c.ranks > 1]


def _fsdp_collectives(run: PlannedRun) -> Iterator[PlannedCollective]:
    """Yield an all-gather before forward, another before backward, a reduce-scatter after it.

    The second all-gather is only for units that were freed in between, which the root is not. If
    there are replicas, an all-reduce over them follows. Each accumulation step does all of that,
    except that FSDP2 all-reduces only in the last one (shard.accumulation).
    """
    size = BYTES[run.reduce_dtype]
    ranks = run.shard
    reduces = run.accum if run.engine == "fsdp1" and run.shard > 1 else 1
    for unit in run_units(run):
        numel = unit.padded(run)
        gathers = run.accum
        if run.reshard and unit.part != "root":
            gathers = 2 * run.accum
        for kind, payload, times, group, stride in (
            ("all_gather", numel * run.compute_bytes, gathers, ranks, run.tp),
            ("reduce_scatter", numel * size, run.accum, ranks, run.tp),
            ("all_reduce", numel // ranks * size, reduces, run.replicate, ranks * run.tp),
        ):
            yield PlannedCollective(kind, unit.part, payload, unit.count * times, group, stride)


def _tp_collectives(run: PlannedRun) -> Iterator[PlannedCollective]:
    """Yield the all-reduces of a block's activations over the ranks that split it.

    There are four per block: after attention and after the MLP, in forward and in backward.
    Recomputation repeats the one after attention. The first of the ranks broadcasts its inputs to
    the others: normalised images and noise.
    """
    c = run.config
    each = run.accum * (4 if run.ac == "none" else 5)
    _, *blocks = model_units(c, run.encoder_only)
    for unit in blocks:
        size = run.batch * run.tokens[unit.part] * run.widths[unit.part] * run.compute_bytes
        yield PlannedCollective("all_reduce", ACTIVATIONS, size, each * unit.count, run.tp, 1)
    pixels = c.channels * run.img_size**2
    for numel in (pixels, run.patches):
        size = run.batch * numel * FP32
        yield PlannedCollective("broadcast", "inputs", size, run.accum, run.tp, 1)


def _ddp_collectives(run: PlannedRun) -> Iterator[PlannedCollective]:
    """Yield one all-reduce per bucket, in the last accumulation step, and ZeRO-1's broadcasts.

    A bucket is fp32, unless --reduce-dtype has 16 bits: then a compression hook sends it in that
    dtype. Under ZeRO-1 each rank then broadcasts the parameters that it has updated.
    """
    world = run.world_size
    size = BYTES[run.reduce_dtype]
    for numel, count in Counter(ddp_buckets(run)).items():
        yield PlannedCollective("all_reduce", "bucket", numel * size, count, world, 1)
    if run.zero1:  # one broadcast from each rank; their sizes differ a little
        numel, more = divmod(sum(sum(u.sizes) * u.count for u in run_units(run)), world)
        for size, count in ((numel + 1) * FP32, more), (numel * FP32, world - more):
            yield PlannedCollective("broadcast", "parameters", size, count, world, 1)


def ddp_buckets(run: PlannedRun) -> list[int]:
    """Count the elements of each bucket: parameters fill it in reverse order until it is full.

    The first bucket is full at 1 MiB, so that sending starts early, all others at 25 MiB; or all
    are full at `bucket_cap_mb` (torch/nn/parallel/distributed.py). DDP orders a few parameters
    differently, so single buckets may differ, but their sum does not.
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
    """Compute the bytes that a rank sends per step, by kind and link: the mean over all ranks."""
    total: dict[str, dict[str, float]] = {}
    for c in collectives(run):
        shares = ring_links(machine, run.world_size, c.ranks, c.stride)
        by_link = total.setdefault(c.kind, dict.fromkeys(LINKS, 0.0))
        sent = c.count * wire_bytes(c.kind, c.payload, c.ranks)
        for link, share in zip(LINKS, shares, strict=True):
            by_link[link] += sent * share
    return total
