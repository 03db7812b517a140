"""What one step sends: the collectives of parameters and gradients, and over which links."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

import shard
import vit
from planner.machines import LINKS, Machine, ring, wire_bytes

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FP32 = 4  # bytes: parameters, gradients and each of AdamW's two states are kept in it

# ---------------------------------------------------------------------------------------------
# What is planned


@dataclass(frozen=True)
class Run:
    """The flags of a run that its memory, traffic and time depend on."""

    config: vit.ViTConfig
    img_size: int
    mask_ratio: float
    mode: str
    fsdp: int  # engine, 1 or 2; without meaning for ddp and zero1
    replicate: int
    shard: int
    local_batch: int
    accum: int
    precision: str
    reduce_dtype: str
    ac: str
    prefetch: str
    forward_prefetch: bool
    cpu_offload: bool
    bucket_cap_mb: float | None
    encoder_only: bool

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.replicate * self.shard

    @property
    def engine(self) -> Literal["ddp", "fsdp1", "fsdp2"]:
        """Who wraps the model."""
        if shard.STRATEGIES[self.mode].fsdp1 is None:
            return "ddp"
        return "fsdp1" if self.fsdp == 1 else "fsdp2"

    @property
    def reshard(self) -> bool:
        """Whether whole parameters are freed after forward and gathered again in backward."""
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
        """Of one number in forward and backward."""
        return BYTES[self.precision]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: blocks, or the root with the rest."""

    name: str
    part: Literal["root", "encoder", "decoder"]
    shapes: tuple[tuple[int, ...], ...]  # in the order of the module
    names: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Parameters, without padding."""
        return sum(math.prod(shape) for shape in self.shapes)

    def padded(self, run: Run) -> int:
        """Numbers in the full tensor of its collectives.

        FSDP2 pads dim 0 of every parameter to a multiple of the shard group. FSDP1 aligns every
        parameter of the flat one to 16 bytes of the computing dtype and pads the end to a multiple
        of the ranks (torch/distributed/fsdp: _fsdp_param.py, _flat_param.py).
        """
        if run.engine == "fsdp2":
            group = run.shard
            return sum(-(-s[0] // group) * group * math.prod(s[1:]) for s in self.shapes)
        if run.engine == "ddp":
            return self.numel
        total, aligned = 0, 16 // run.compute_bytes
        for shape in self.shapes:
            total += -total % aligned + math.prod(shape)
        ranks = run.shard if run.shard > 1 else run.world_size  # no_shard is padded all the same
        return total + -total % ranks


@lru_cache(maxsize=64)
def model_units(config: vit.ViTConfig, encoder_only: bool) -> tuple[Unit, ...]:
    """Root first, then each block in the order of forward. On the meta device: no memory."""
    with torch.device("meta"):
        model = vit.ViTMAE(config, config.patch)
    named = [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    if encoder_only:
        named = [(n, s) for n, s in named if not n.startswith(("decoder", "mask_token"))]
    by: dict[str, list[tuple[str, tuple[int, ...]]]] = {"root": []}
    for name, shape in named:
        top, _, rest = name.partition(".")
        key = f"{top}.{rest.split('.')[0]}" if top.endswith("blocks") else "root"
        by.setdefault(key, []).append((name, shape))
    return tuple(
        Unit(key, part_of(key), tuple(shape for _, shape in held), tuple(name for name, _ in held))
        for key, held in by.items()
    )


def run_units(run: Run) -> tuple[Unit, ...]:
    """Root first, then the units of this run's engine: FSDP2 takes small blocks together."""
    root, *blocks = model_units(run.config, run.encoder_only)
    if run.engine != "fsdp2":
        return (root, *blocks)
    ranges = shard.unit_ranges([block.name for block in blocks], [block.numel for block in blocks])
    return (root, *(joined(blocks[unit.start : unit.stop]) for unit in ranges))


def joined(blocks: Sequence[Unit]) -> Unit:
    """Neighbouring blocks as one unit, named after the first and the last."""
    first, last = blocks[0], blocks[-1]
    name = first.name if first is last else f"{first.name}-{last.name.rpartition('.')[2]}"
    return Unit(
        name,
        first.part,
        tuple(shape for block in blocks for shape in block.shapes),
        tuple(name for block in blocks for name in block.names),
    )


def token_count(run: Run, part: str) -> int:
    """Tokens of an image in this part, class token included."""
    patches = vit.patch_count(run.config, run.img_size)
    return 1 + (vit.kept_patches(patches, run.mask_ratio) if part == "encoder" else patches)


def part_of(unit: str) -> Literal["root", "encoder", "decoder"]:
    """Which part of the model a unit belongs to."""
    return "root" if unit == "root" else "decoder" if unit.startswith("decoder") else "encoder"


# ---------------------------------------------------------------------------------------------
# Traffic


@dataclass(frozen=True)
class Collective:
    """`count` collectives of one step on full tensors of `payload` bytes."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    unit: str
    payload: int
    count: int
    ranks: int  # of its group
    stride: int  # from one rank of the group to the next


def collectives(run: Run) -> list[Collective]:
    """What a step sends, in the order of units; those of one rank left out."""
    found = _ddp_collectives(run) if run.engine == "ddp" else _fsdp_collectives(run)
    return [c for c in found if c.ranks > 1]


def _fsdp_collectives(run: Run) -> list[Collective]:
    """Gather before forward, again before backward where it was freed; reduce after backward.

    The root is not freed in between. With accumulation all of that at every micro-step, but the
    all-reduce over replicas: FSDP2 sends it once, FSDP1's hybrid every time (shard.accumulation).
    """
    found = []
    reduce_bytes = BYTES[run.reduce_dtype]
    every_time = run.engine == "fsdp1" and run.shard > 1
    for unit in run_units(run):
        numel = unit.padded(run)
        gathers = 2 if run.reshard and unit.part != "root" else 1
        payload = numel * run.compute_bytes
        found += [
            Collective("all_gather", unit.name, payload, gathers * run.accum, run.shard, 1),
            Collective("reduce_scatter", unit.name, numel * reduce_bytes, run.accum, run.shard, 1),
            Collective(
                "all_reduce",
                unit.name,
                numel // run.shard * reduce_bytes,
                run.accum if every_time else 1,
                run.replicate,
                run.shard,
            ),
        ]
    return found


def _ddp_collectives(run: Run) -> list[Collective]:
    """One all-reduce a bucket, at the last micro-step; ZeRO-1 then sends every new parameter.

    The compression hook of a 16-bit reduce dtype sends buckets in that dtype; else they are fp32.
    """
    world = run.world_size
    found = [
        Collective("all_reduce", f"bucket {i}", numel * BYTES[run.reduce_dtype], 1, world, 1)
        for i, numel in enumerate(ddp_buckets(run))
    ]
    if run.mode == "zero1":
        for unit in model_units(run.config, run.encoder_only):
            for shape, count in Counter(unit.shapes).items():
                payload = math.prod(shape) * FP32
                found.append(Collective("broadcast", unit.name, payload, count, world, 1))
    return found


def ddp_buckets(run: Run) -> list[int]:
    """Numbers in each bucket, from its second step on: filled in the order gradients get ready.

    A bucket is full when it has reached its limit: 25 MiB but 1 MiB for the first, so that sending
    starts early, or `bucket_cap_mb` for all (torch/nn/parallel/distributed.py).
    """
    cap = (run.bucket_cap_mb or 25) * 2**20
    first = cap if run.bucket_cap_mb else 2**20
    buckets, filled = list[int](), 0
    for numel in _ready_order(run):
        filled += numel
        if filled * FP32 >= (cap if buckets else first):
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets


def _ready_order(run: Run) -> Iterator[int]:
    """Sizes of the parameters in the order in which backward is done with them.

    The last used come first; of a layer the bias, under autocast the weight, by when its cast is
    undone. `mask_token` and the decoder's ends stand where they are used, not where defined.
    """
    root, *blocks = model_units(run.config, run.encoder_only)
    named = list(zip(root.names, root.shapes, strict=True))
    for part, ends in (
        ("decoder", ("decoder_pred", "decoder_norm")),
        ("encoder", ("mask_token", "decoder_embed", "norm")),
        ("", ("cls_token", "patch_embed")),
    ):
        for end in ends:
            layer = [shape for name, shape in named if name.split(".")[0] == end]
            weight_first = run.autocast and end != "patch_embed"
            yield from map(math.prod, layer if weight_first else reversed(layer))
        for unit in reversed([unit for unit in blocks if unit.part == part]):
            for i in range(len(unit.shapes) - 2, -1, -2):
                pair = unit.shapes[i : i + 2]
                yield from map(math.prod, pair if run.autocast else reversed(pair))


def link_bytes(run: Run, machine: Machine) -> dict[str, dict[str, float]]:
    """Bytes that a rank sends in a step, by kind and link: the mean over ranks."""
    total: dict[str, dict[str, float]] = {}
    for c in collectives(run):
        where = ring(machine, run.world_size, c.ranks, c.stride)
        by = total.setdefault(c.kind, dict.fromkeys(LINKS, 0.0))
        sent = c.count * wire_bytes(c.kind, c.payload, c.ranks)
        for link, share in zip(LINKS, where.share, strict=True):
            by[link] += sent * share
    return total
