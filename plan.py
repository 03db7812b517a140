"""Plan a run before it is queued: its memory, traffic and time, by arithmetic alone.

    python plan.py --model 15b --mode hybrid --group 4 --world-size 512 --batch 32 --memory-gib 64
    python plan.py --model 15b --world-size 1024 --compare      # every mode and group, best first
    python plan.py --model 15b --group 4 --explain              # where the memory goes
    python plan.py --model 3b --world-size 64 --simulate        # and one step of the real code
    torchrun --nproc-per-node 8 plan.py --measure mine.json     # then: --machine mine.json

It takes all flags of train_fsdp.py, and needs neither a GPU nor other processes, except to
--measure. Memory is that of live tensors (CUDA's max_memory_allocated); `peak_active` also counts
freed memory that another stream still uses, as under FSDP1. The step time is a lower bound: nothing
waits for data, a slow rank or a disk. What a machine can do is in machines.py.
"""

import json
import math
import os
import sys
from argparse import Namespace
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any

import torch

import machines
import mesh
import shard
import train_fsdp
import vit
from machines import LINKS, Machine, ring_links, rings_leaving_node, wire_bytes
from run import refuse

GIB = 2**30
FP32 = 4  # bytes per element of parameters, gradients and each of AdamW's two states
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# --- The run and its units


@dataclass
class PlannedRun:
    """The flags on which memory, traffic and time of a step depend, named as in train_fsdp.py."""

    config: vit.ViTConfig
    mode: str
    world_size: int
    batch: int  # images per rank and accumulation step
    img_size: int
    mask_ratio: float
    group: int | None = None  # ranks per shard group; hybrid modes only
    fsdp: int = 2  # 1 or 2, the engine; ignored by ddp and zero1
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
    image_dtype: str = "uint8"  # of the images that the loader yields

    @classmethod
    def from_flags(cls, config: vit.ViTConfig, flags: Mapping[str, Any]) -> "PlannedRun":
        """Pick the fields from complete flags; a flag that is None or absent has its default."""
        known = {field.name for field in fields(cls)}
        given = {name: flag for name, flag in flags.items() if name in known and flag is not None}
        return cls(config, **given)

    def __post_init__(self) -> None:
        """Derive the engine, the mesh and the number of tokens."""
        row = shard.STRATEGIES[self.mode]
        # ranks that hold the same shard, and ranks that together hold one copy of the model
        self.replicate, self.shard = mesh.mesh_shape(row.shard_over, self.world_size, self.group)
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
        self.patches = vit.patch_count(c, self.img_size)
        kept = vit.count_visible(self.patches, self.mask_ratio)
        # of each part: tokens per image, with cls, their width, and the heads of attention
        self.tokens = {"root": self.patches, "encoder": 1 + kept, "decoder": 1 + self.patches}
        self.widths = {"encoder": c.width, "decoder": c.decoder_width}
        self.heads = {"root": 0, "encoder": c.heads, "decoder": c.decoder_heads}


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: those of a block, or of the root."""

    part: str  # root, encoder or decoder
    count: int  # the blocks of a part are alike: one Unit stands for all of them
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

        FSDP2 pads dim 0 of every parameter to a multiple of the shard group; FSDP1 aligns each to
        16 bytes and pads their end (torch/distributed/fsdp: _fsdp_param.py, _flat_param.py).
        """
        if run.engine == "ddp":
            return self.numel
        total = 0
        if run.engine == "fsdp2":
            for rows, *columns in self.shapes:
                total += round_up(rows, run.shard) * math.prod(columns)
            return total
        for size in self.sizes:
            total = round_up(total, 16 // run.compute_bytes) + size
        ranks = run.shard if run.shard > 1 else run.world_size  # FSDP1 pads no_shard by the world
        return round_up(total, ranks)


def round_up(number: int, multiple: int) -> int:
    """Round a number up to a multiple of another."""
    return math.ceil(number / multiple) * multiple


@lru_cache(maxsize=64)
def model_units(config: vit.ViTConfig, encoder_only: bool) -> tuple[Unit, ...]:
    """List the root, then the blocks of each part."""
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
            shapes[part].append(tuple(parameter.shape))
    counts = {"root": 1, "encoder": config.depth, "decoder": config.decoder_depth}
    return tuple(Unit(p, counts[p], tuple(found)) for p, found in shapes.items() if found)


def run_units(run: PlannedRun) -> tuple[Unit, ...]:
    """List the units of this run: a single one under --wrap root. DDP is planned block by block."""
    units = model_units(run.config, run.encoder_only)
    if run.wrap == "block" or run.engine == "ddp":
        return units
    # The root's parameters come last, as in the module: FSDP1 aligns all but the last one.
    root, *blocks = units
    shapes: list[tuple[int, ...]] = []
    for unit in (*blocks, root):
        shapes += unit.shapes * unit.count
    return (Unit("root", 1, tuple(shapes)),)


# --- What a step sends: without the norm, the check for bad steps and the log, a few numbers


@dataclass(frozen=True)
class Collective:
    """`count` equal collectives in one step, each on a full tensor of `payload` bytes."""

    kind: str  # all_gather, reduce_scatter, all_reduce or broadcast
    what: str  # part of the model, "bucket" or "parameters"
    payload: int
    count: int
    ranks: int  # in its group
    stride: int  # from one rank of the group to the next


def collectives(run: PlannedRun) -> list[Collective]:
    """List the collectives of a step on parameters and gradients, except those of a single rank."""
    found = ddp_collectives(run) if run.engine == "ddp" else fsdp_collectives(run)
    return [c for c in found if c.ranks > 1]


def fsdp_collectives(run: PlannedRun) -> Iterator[Collective]:
    """Yield the all-gathers before forward and backward, and the reductions after it.

    The root is not freed in between. Each accumulation step sends all of that, except that FSDP2
    all-reduces over replicas only in the last one (shard.accumulation).
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
            ("all_gather", numel * run.compute_bytes, gathers, ranks, 1),
            ("reduce_scatter", numel * size, run.accum, ranks, 1),
            ("all_reduce", numel // ranks * size, reduces, run.replicate, ranks),
        ):
            yield Collective(kind, unit.part, payload, unit.count * times, group, stride)


def ddp_collectives(run: PlannedRun) -> Iterator[Collective]:
    """Yield one all-reduce per bucket, in the last accumulation step.

    Under ZeRO-1 each rank then broadcasts the parameters that it has updated.
    """
    world = run.world_size
    size = BYTES[run.reduce_dtype]
    for numel, count in Counter(ddp_buckets(run)).items():
        yield Collective("all_reduce", "bucket", numel * size, count, world, 1)
    if run.zero1:  # one broadcast from each rank; their sizes differ a little
        numel, more = divmod(sum(u.numel * u.count for u in run_units(run)), world)
        for size, count in ((numel + 1) * FP32, more), (numel * FP32, world - more):
            yield Collective("broadcast", "parameters", size, count, world, 1)


def ddp_buckets(run: PlannedRun) -> list[int]:
    """Count the elements of each bucket: parameters fill it in reverse order until it is full.

    The first is full at 1 MiB, all others at 25 MiB; or all at `bucket_cap_mb`. DDP orders a few
    parameters differently, so single buckets may differ, but their sum does not.
    """
    cap = int((run.bucket_cap_mb or 25) * 2**20)
    limit = cap if run.bucket_cap_mb else 2**20
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


# --- What a rank holds
#
# Of n parameters (ZeRO, arXiv 1910.02054, figure 1): 4 n bytes in fp32, 4 n of gradients, 8 n of
# AdamW's states, each in full or divided by the ranks of a shard group. On top come full parameters
# of the units in use, and the activations. The peak is the largest sum of what is live at a moment.

MEMORY_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "unsharded",  # parameters that are gathered or cast for use, and gradients not yet reduced
    "activations",
    "reduction",  # buffers of gradient collectives
    "inputs",
    "workspace",
)


@dataclass(frozen=True)
class BlockMemory:
    """The bytes of the activations of one block, for the local batch."""

    e: int  # one tensor (B, T, D)
    saved: int  # between forward and backward, under the run's --ac
    forward: int  # the most that is live inside forward, beyond what is saved
    backward: list[tuple[int, int]]  # (activations, parameter gradients) at moments of backward


def block_memory(run: PlannedRun, unit: Unit, machine: Machine) -> BlockMemory:
    """Count the activations of a block for the local batch.

    Autograd saves in vit.Block: the input of every layer with weights, of GELU and of the norms
    (with each token's mean and deviation), and q, k, v, output and log-sum-exp of the attention.
    With f, one tensor (B, T, MLP width), that is 8 e + 2 f, or 8 e + 4 f for a gated MLP. Backward
    frees them one after another; the gradients of parameters stay until they are reduced.
    """
    c = run.config
    width = run.widths[unit.part]
    heads = run.heads[unit.part]
    hidden = 4 * width
    gates = 1
    if unit.part == "encoder":
        hidden = c.mlp_width
        gates = 2 if c.gated_mlp else 1
    tokens = run.batch * run.tokens[unit.part]
    size = run.compute_bytes
    e = tokens * width * size
    f = tokens * hidden * size
    # flash attention on a GPU pads the features of a head
    padded = tokens * heads * round_up(width // heads, machine.head_multiple) * size
    out = padded
    if padded != e:  # proj takes a copy without the padding
        out += e
    sums = FP32 * tokens * heads  # log-sum-exp
    norms = 2 * (2 * FP32 * tokens)  # mean and deviation of each token, for both norms
    kept = 4 * e + 3 * padded + out + 2 * gates * f + sums + norms
    saved = {
        "none": kept,
        "full": e,
        # what --ac selective keeps: outputs of attention and of matmuls that do not narrow
        "selective": 5 * e + padded + sums + gates * f,
    }[run.ac]
    # Some of the MLP's tensors are also among the saved ones, and must not count twice. With a
    # decoder they may: then the peak of forward is at the loss, not in a block.
    twice = 0
    if run.encoder_only:
        twice = {"none": 1 + gates, "selective": gates, "full": 0}[run.ac]
    forward = 2 * e + (1 + gates - twice) * f
    matrices = [math.prod(shape) * size for shape in unit.shapes if len(shape) > 1]
    attention = sum(matrices[:2])
    mlp = sum(matrices[2:])
    backward = [
        (kept + e + gates * f, matrices[-1]),  # at GELU: gradients before and after it
        (kept + 2 * e - gates * f, mlp),  # at the first layer of the MLP
        (kept + 3 * e - 2 * gates * f, mlp + attention // 4),  # at the attention: of q, k, v
        (kept - e - 2 * gates * f, attention + mlp),  # at qkv
    ]
    return BlockMemory(e, saved, forward, backward)


# What FSDP1 has freed, but another stream still uses (record_stream), in units of one block's bf16
# parameters: fitted to the published figures of `base` and `3b` (examples/published).
PENDING_EARLY_UNITS = 2.0  # when backward begins: gathered parameters
PENDING_LATE_UNITS = 8.5  # when it ends: gradients of the blocks before, up to a limit
PENDING_NO_SHARD_BYTES = 5.3  # bytes per parameter: without gathers the host runs ahead freely


@dataclass(frozen=True)
class MemorySnapshot:
    """The bytes that are live at one moment of a step, by the parts of MEMORY_PARTS."""

    name: str
    bytes: dict[str, float]
    pending: float = 0.0  # bytes that are freed, but still used by another stream

    @property
    def total(self) -> float:
        """Sum over all parts."""
        return sum(self.bytes.values())


class StepMemory:
    """Walk through a step and count the bytes that are live at each moment.

    The lists have an item per block, the encoder's first. The blocks of a part are alike, so the
    largest of all moments is at an end of a part: only the blocks at `ends` are walked through.
    """

    def __init__(self, run: PlannedRun, machine: Machine) -> None:
        self.run = run
        self.blocks: list[Unit] = []
        self.memory: list[BlockMemory] = []
        _, *parts = model_units(run.config, run.encoder_only)
        for part in parts:
            self.blocks.extend(repeat(part, part.count))
            self.memory.extend(repeat(block_memory(run, part, machine), part.count))
        root, *units = run_units(run)
        self.root = root.padded(run)  # elements
        self.unit: list[int] = []  # elements of each block's unit; empty under --wrap root
        for unit in units:
            self.unit.extend(repeat(unit.padded(run), unit.count))
        self.all = self.root + sum(self.unit)
        self.count = len(self.blocks)
        self.depth = run.config.depth
        self.names = [f"blocks.{i}" for i in range(self.depth)]
        self.names += [f"decoder_blocks.{i}" for i in range(self.count - self.depth)]
        around = (0, 1, self.depth - 2, self.depth - 1, self.depth, self.depth + 1)
        self.ends = sorted({*around, self.count - 2, self.count - 1} & {*range(self.count)})
        # FSDP1's NO_SHARD gathers nothing; like DDP it uses fp32 parameters in place
        self.no_gather = run.engine == "fsdp1" and run.shard == 1
        in_place = (run.engine == "ddp" or self.no_gather) and run.precision == "fp32"
        # bytes per element of the gathered or cast copy of a parameter that is in use
        self.cast = 0 if in_place else run.compute_bytes
        self.values = run.config.channels * run.img_size**2  # in an image
        self.pixels = FP32 * run.batch * self.values  # bytes of the images as fp32
        self.on_device = 0 if run.cpu_offload else 1  # share of parameters, gradients and states
        self.states = self.step_states(machine)

    # -- parts

    def step_states(self, machine: Machine) -> dict[str, float]:
        """Count what is live all the time."""
        run = self.run
        c = run.config
        tables = FP32 * (1 + run.patches) * (c.width + (0 if run.encoder_only else c.decoder_width))
        pixel = 1 if run.image_dtype == "uint8" else FP32  # bytes of a value in a loaded image
        images = run.accum * run.batch * (pixel * self.values + FP32 * run.patches)
        return {
            "parameters": FP32 * self.all / run.shard * self.on_device,
            "optimizer": 2 * FP32 * states_held(run) * self.on_device,
            "inputs": tables + images,
            "workspace": machine.workspace_gib * GIB,
        }

    def gathered_in_forward(self, position: int) -> float:
        """Count the full parameters in forward of block `position`; past the last, in the loss."""
        run = self.run
        last = min(position, self.count - 1)
        latest = sum(self.unit[last : last + 1])
        live = sum(self.unit[: position + 1])  # if nothing is freed after use
        if self.no_gather:
            live = latest
        elif run.reshard:
            live = sum(self.unit[position : position + 1])
        if run.engine == "fsdp2" and run.shard > 1:
            # FSDP2 keeps the output of a gather until the next gather
            live += latest if latest else self.root
        if run.forward_prefetch:
            live += sum(self.unit[position + 1 : position + 2])
        return (self.root + live) * self.cast

    def gathered_in_backward(self, position: int) -> float:
        """Count the full parameters while block `position` runs backward."""
        first = 0
        if self.no_gather:
            first = position
        elif self.run.reshard:
            first = position if self.run.prefetch == "none" else max(0, position - 1)
        return (self.root + sum(self.unit[first : position + 1])) * self.cast

    def gradients(self, done: float) -> float:
        """Count the reduced gradients once units of `done` elements are through the last backward.

        With accumulation, those of the earlier accumulation steps exist too. FSDP2 keeps them in
        the reduce dtype while they wait for their all-reduce.
        """
        run = self.run
        if run.buckets:
            return FP32 * self.all  # the buckets hold the gradients all the time
        before = 0 if run.accum == 1 else self.all - done
        size = BYTES[run.reduce_dtype] if run.replicated else FP32
        return (FP32 * done + size * before) / run.shard * self.on_device

    def reduce_buffers(self, position: int) -> float:
        """Count the buffers of gradient collectives when the blocks after `position` are done.

        FSDP2 holds the input of a reduce-scatter until the next one, and with a 16-bit reduce dtype
        each all-reduced shard until the end of backward. DDP then compresses a copy of a bucket.
        """
        run = self.run
        size = BYTES[run.reduce_dtype]
        if run.buckets:
            return max(ddp_buckets(run)) * size if size < FP32 else 0
        if run.engine != "fsdp2":
            return 0
        held: float = sum(self.unit[position + 1 : position + 2]) * size
        if size < FP32 and run.replicated:
            held += sum(self.unit[position + 1 :]) / run.shard * size
        return held

    def saved_activations(self, position: int) -> float:
        """Count what the blocks before `position` and the layers outside the blocks have saved."""
        run = self.run
        pixels = run.config.channels * run.config.patch**2
        patch = pixels * run.compute_bytes + 8  # embedded, and its index
        total = run.batch * (run.tokens["encoder"] - 1) * patch
        total += sum(memory.saved for memory in self.memory[:position])
        e = self.memory[0].e
        if run.encoder_only:
            return total + (e if position == self.count else 0)
        if position > self.depth:
            total += 2 * e  # the encoder's last norm: its input and output
        if position == self.count:  # the decoder's norm, the difference to the target
            total += 2 * self.memory[-1].e + self.pixels
        return total

    def pending(self, position: int) -> float:
        """Count the freed memory that another stream still uses at a block's backward (FSDP1)."""
        run = self.run
        if run.engine != "fsdp1" or not self.unit:
            return 0.0
        late = 1 - position / max(1, self.count - 1)
        if run.shard == 1:
            return late * PENDING_NO_SHARD_BYTES * sum(block.numel for block in self.blocks)
        units = PENDING_EARLY_UNITS + late * (PENDING_LATE_UNITS - PENDING_EARLY_UNITS)
        return max(self.unit) * run.compute_bytes * units

    def root_gradients(self, position: int) -> float:
        """Count the unreduced gradients of the root, which under --wrap root has all blocks."""
        if self.unit:
            return self.root * self.cast
        size = self.run.compute_bytes
        inside = [block.numel for block in self.blocks]
        alone = max(0, self.root * self.cast - sum(inside) * size)
        return alone + sum(inside[position + 1 :]) * size

    # -- moments

    def snapshot(self, name: str, pending: float = 0.0, **parts: float) -> MemorySnapshot:
        """Add these parts to the states, which are live all the time."""
        sizes = dict.fromkeys(MEMORY_PARTS, 0.0) | self.states
        for part, size in parts.items():
            sizes[part] += size
        return MemorySnapshot(name, sizes, pending)

    def snapshots(self) -> Iterator[MemorySnapshot]:
        """Walk through the last accumulation step: forward, loss, backward, optimizer."""
        before = self.gradients(0) if self.run.accum > 1 or self.run.buckets else 0
        # fp32 images and, for the loss, their patches
        inputs = (1 if self.run.encoder_only else 2) * self.pixels
        loss = 0 if self.run.encoder_only else 2.5 * self.pixels
        for position in (*self.ends, self.count):
            name = "loss"
            inside = loss
            if position < self.count:
                name = f"forward of {self.names[position]}"
                inside = self.memory[position].saved + self.memory[position].forward
            yield self.snapshot(
                name,
                gradients=before,
                unsharded=self.gathered_in_forward(position),
                activations=self.saved_activations(position) + inside,
                inputs=inputs,
            )
        for position in reversed(self.ends):
            yield from self.backward(position)
        if self.run.engine != "ddp":
            yield self.reduction("root", -1, self.root, self.root * self.cast)
        yield self.snapshot("optimizer step", gradients=self.gradients(self.all))

    def backward(self, position: int) -> Iterator[MemorySnapshot]:
        """Walk through one block's backward and the reduction of its gradients."""
        run = self.run
        name = self.names[position]
        memory = self.memory[position]
        saved = self.saved_activations(position)
        live = self.gathered_in_backward(position) + self.root_gradients(position)
        largest = max(self.blocks[position].sizes)
        for activations, gradients in memory.backward:
            if run.engine == "ddp":  # gradients are fp32, and stay where they are written
                allocated = run.buckets or run.accum > 1  # before this backward pass
                gradients = FP32 * (largest if allocated else gradients // run.compute_bytes)
                gradients += largest * run.compute_bytes if run.autocast else 0
            yield self.snapshot(
                f"backward of {name}",
                self.pending(position),
                gradients=self.gradients(sum(self.unit[position + 1 :])),
                unsharded=live + gradients,
                activations=saved + activations,
                reduction=self.reduce_buffers(position),
            )
        if run.engine != "ddp" and self.unit:
            yield self.reduction(name, position, self.unit[position], live, saved + 2 * memory.e)

    def reduction(
        self, name: str, position: int, numel: int, unsharded: float, activations: float = 0
    ) -> MemorySnapshot:
        """Count what is live while the gradients of a unit are reduced.

        They take the place of its parameters in `unsharded`. The blocks after `position` are done.
        """
        run = self.run
        size = BYTES[run.reduce_dtype]
        copy = size if run.engine == "fsdp2" or size != run.compute_bytes else 0
        done = sum(self.unit[position + 1 :])
        return self.snapshot(
            f"reduction of {name}",
            self.pending(max(position, 0)),
            gradients=self.gradients(done if run.engine == "fsdp2" else done + numel),
            unsharded=unsharded,
            activations=activations,
            reduction=numel * copy,
        )


def states_held(run: PlannedRun) -> float:
    """Count the elements of the parameters whose optimizer states a rank holds."""
    units = run_units(run)
    if run.zero1:  # ZeroRedundancyOptimizer assigns whole tensors
        equal = sum(unit.numel * unit.count for unit in units) / run.world_size
        return max(equal, *(max(unit.sizes) for unit in units))
    return sum(unit.padded(run) * unit.count for unit in units) / run.shard


def host_bytes(run: PlannedRun) -> float:
    """Count the bytes of a rank in host memory with --cpu-offload.

    Each parameter and gradient is pinned, rounded up to a power of two; AdamW's moments are not.
    """
    total = 0
    for unit in run_units(run):
        for shape in unit.shapes:
            size = FP32 * math.ceil(shape[0] / run.shard) * math.prod(shape[1:])
            pinned = 2 ** (size - 1).bit_length()
            total += unit.count * (2 * pinned + 2 * size)
    return total


# --- How long it takes


def forward_backward_seconds(run: PlannedRun, machine: Machine) -> float:
    """Estimate the seconds of forward and backward of a step, over all accumulation steps."""
    image_seconds = measured_image_seconds if machine.parts else fitted_image_seconds
    passes = 4 / 3 if run.ac == "full" else 1  # forward runs again: 4 passes instead of 3
    return run.accum * run.batch * image_seconds(run, machine) * passes


def fitted_image_seconds(run: PlannedRun, machine: Machine) -> float:
    """Estimate the seconds that one image takes, without checkpointing, from fitted constants.

    Matmuls reach a share of the peak; all else takes a constant time per token and block.
    """
    peak = machine.peak_flops
    if run.precision == "fp32":
        peak *= machine.fp32_share
    _, *parts = model_units(run.config, run.encoder_only)
    tokens = sum(run.tokens[unit.part] * unit.count for unit in parts)
    seconds = run_flops(run) / (peak * machine.efficiency)
    return seconds + tokens * machine.token_layer_seconds


def run_flops(run: PlannedRun) -> int:
    """Count the FLOPs of forward and backward per image."""
    config = run.config
    if run.encoder_only:
        config = replace(config, decoder_width=0, decoder_depth=0)
    return vit.flops_per_image(config, run.img_size, run.mask_ratio)


def measured_image_seconds(run: PlannedRun, machine: Machine) -> float:
    """Add up the seconds that one image takes, without checkpointing, on a measured machine.

    ValueError if it was not measured for the blocks of this run.
    """
    total = 0.0
    for unit in model_units(run.config, run.encoder_only):
        sizes = (unit.numel, run.heads[unit.part], run.tokens[unit.part])
        key = machines.part_key(run.engine, run.precision, *sizes)
        if key not in machine.parts:
            raise ValueError(
                f"--machine {machine.name} was measured for other blocks ({machine.measured}): "
                f"add those of this run, by plan.py --measure FILE and its flags (no {key})"
            )
        total += unit.count * machine.parts[key]
    return total


def collective_seconds(machine: Machine, world_size: int, c: Collective) -> float:
    """Estimate the seconds of one collective: launch, hops, then bytes over the slowest link."""
    shares = ring_links(machine, world_size, c.ranks, c.stride)
    used = [level for level, share in zip(LINKS, shares, strict=True) if share]
    speeds = {level: machine.link_speed(level, c.kind) for level in used}
    rates = {level: speed.bytes_per_second for level, speed in speeds.items()}
    if "network" in rates:
        rates["network"] /= rings_leaving_node(machine, world_size, c.ranks, c.stride)
    widest = speeds[used[-1]]
    hops = machines.hop_count(c.kind, c.ranks)
    if c.what == "parameters":
        # ZeRO-1's broadcasts, one from each rank in turn, follow each other around the ring: n of
        # them make about 2n hops, not n each
        hops = min(hops, 2)
    seconds = widest.launch_seconds + hops * widest.hop_seconds
    return seconds + wire_bytes(c.kind, c.payload, c.ranks) / min(rates.values())


def optimizer_seconds(run: PlannedRun, machine: Machine) -> float:
    """Estimate the seconds of a step's gradient norm, check for bad values, and AdamW."""
    rate = machine.optimizer_bytes_per_second
    if run.cpu_offload:
        rate = machine.host_bytes_per_second
    seconds = 28 * states_held(run) / rate  # AdamW reads 16 bytes a parameter and writes 12
    if run.engine != "ddp":
        tensors = sum(len(unit.shapes) * unit.count for unit in run_units(run))
        seconds += tensors * machine.tensor_seconds
    return seconds + machine.step_seconds


def step_time(run: PlannedRun, machine: Machine) -> dict[str, float]:
    """Estimate the seconds of a step and of its parts.

    Of the communication that could overlap with compute, `hidden_share` does; under --wrap root
    none, as the only unit is gathered before forward and reduced after backward. With each doubling
    of its nodes a job loses a little more time (`doubling_loss`), whatever it sends.
    """
    compute = forward_backward_seconds(run, machine)
    communication = alone = 0.0
    for c in collectives(run):
        seconds = c.count * collective_seconds(machine, run.world_size, c)
        communication += seconds
        if c.what == "root" and run.wrap == "root":
            alone += seconds
    optimizer = optimizer_seconds(run, machine)
    exposed = communication - min(communication - alone, compute) * machine.hidden_share
    nodes = max(1.0, run.world_size / machine.ranks_per_node)
    step = (compute + exposed + optimizer) * (1 + machine.doubling_loss * math.log2(nodes))
    return {
        "compute": compute,
        "communication": communication,  # all collectives, one after another
        "exposed": exposed,  # the part of it that does not overlap with compute
        "optimizer": optimizer,
        "step": step,
    }


# --- The plan: verdict, largest batch, comparison

# Memory outside of tensors, by experience
CONTEXT_GIB = 1.5  # of the device, and the buffers of RCCL or NCCL
FRAGMENTATION = 0.04  # of the allocator, as a share of the peak
VERDICTS = ("FITS", "TIGHT", "NO")  # fits with the whole margin, only with the context, not at all
MAX_IMAGES = 2**20  # largest local batch that is tried


class Plan:
    """Memory, traffic and time of one run."""

    def __init__(self, run: PlannedRun, machine: Machine, memory_gib: float | None = None) -> None:
        """Plan for a rank with `memory_gib` of memory, by default the machine's."""
        self.run = run
        self.machine = machine
        self.memory_gib = machine.memory_gib if memory_gib is None else memory_gib
        self.snapshots = list(StepMemory(run, machine).snapshots())
        self.peak = max(self.snapshots, key=lambda moment: moment.total)
        self.peak_gib = self.peak.total / GIB  # live tensors, CUDA's max_memory_allocated
        self.peak_active_gib = max(s.total + s.pending for s in self.snapshots) / GIB
        self.margin_gib = CONTEXT_GIB + FRAGMENTATION * self.peak_gib  # what FITS leaves free
        self.verdict = "NO"
        if self.peak_gib + self.margin_gib <= self.memory_gib:
            self.verdict = "FITS"
        elif self.peak_gib + CONTEXT_GIB <= self.memory_gib:
            self.verdict = "TIGHT"
        self.seconds = step_time(run, machine)
        step = self.seconds["step"]
        alone = self.seconds["compute"] + self.seconds["optimizer"]
        self.images_per_second = run.world_size * run.batch * run.accum / step  # of all ranks
        self.efficiency = alone / step  # speed of a rank, as a share of one that sends nothing
        self.label = run.mode if run.group is None else f"{run.mode} {run.group}"

    @cached_property
    def max_local_batch(self) -> int:
        """The largest local batch with the verdict FITS, 0 if there is none."""

        def too_large(batch: int) -> bool:
            other = Plan(replace(self.run, batch=batch), self.machine, self.memory_gib)
            return other.verdict != "FITS"

        return bisect_left(range(1, MAX_IMAGES), True, key=too_large)

    @property
    def fit(self) -> str:
        """The verdict and its reason, in a sentence."""
        peak = f"{self.verdict}: {self.peak_gib:.1f} GiB at the peak ({self.peak.name})"
        margin = f"{self.margin_gib:.1f} margin, of {self.memory_gib:.4g}"
        return f"{peak} + {margin}; largest local batch {self.max_local_batch}"

    def mfu(self, images_per_second: float) -> float:
        """Return the share of the machine's peak FLOP/s that all ranks reach at this speed."""
        peak = self.run.world_size * self.machine.peak_flops
        return images_per_second * run_flops(self.run) / peak

    def json(self) -> dict[str, Any]:
        """Collect all numbers under the keys of `plan.py --json`, on which other programs rely."""
        run = self.run
        memory = {part: size / GIB for part, size in self.peak.bytes.items()}
        payload = Counter[str]()
        count = Counter[str]()
        for c in collectives(run):
            payload[c.kind] += c.payload * c.count
            count[c.kind] += c.count
        return {
            "params": sum(u.numel * u.count for u in model_units(run.config, run.encoder_only)),
            "memory_gib": memory | {"peak": self.peak_gib, "peak_active": self.peak_active_gib},
            "host_gib": {"--cpu-offload": host_bytes(run) / GIB} if run.cpu_offload else {},
            "available_gib": self.memory_gib,
            "verdict": self.verdict,
            "max_local_batch": self.max_local_batch,
            "traffic_bytes_per_rank": link_bytes(run, self.machine),
            "payload_bytes": dict(payload),
            "collectives": dict(count),
            "seconds": self.seconds,
            "step_seconds_lower_bound": self.seconds["step"],
            "images_per_second_upper_bound": self.images_per_second,
            "efficiency": self.efficiency,
            "machine": self.machine.name,
        }


def group_sizes(run: PlannedRun, machine: Machine) -> list[int]:
    """List the sizes of shard groups to compare: those that divide a node, or fill whole nodes."""
    node = machine.ranks_per_node
    sizes = mesh.divisors(run.world_size)[1:-1]  # 1 and all ranks are modes of their own
    return [group for group in sizes if node % group == 0 or group % node == 0]


def compare(base: Plan) -> list[Plan]:
    """Plan the same run in every mode and group; the fastest first, those that do not fit last.

    Options that a mode lacks get their defaults.
    """
    run = base.run
    plans = []
    for mode, row in shard.STRATEGIES.items():
        sharded = row.engine == "fsdp"
        offload = run.cpu_offload and sharded
        cap = None if sharded else run.bucket_cap_mb
        groups: list[int | None] = [None]
        if row.shard_over == "group":
            groups = [*group_sizes(run, base.machine)]
        for group in groups:
            planned = replace(run, mode=mode, group=group, cpu_offload=offload, bucket_cap_mb=cap)
            plans.append(Plan(planned, base.machine, base.memory_gib))
    return sorted(plans, key=lambda plan: (VERDICTS.index(plan.verdict), -plan.images_per_second))


# --- What is printed


def summary_lines(plan: Plan) -> Iterator[str]:
    """Describe a plan in a few lines."""
    run = plan.run
    found = plan.json()
    parts = plan.peak.bytes.items()
    gib = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts if size >= 0.05 * GIB)
    by_kind = found["traffic_bytes_per_rank"].values()  # each by link
    sent = {link: sum(by_link[link] for by_link in by_kind) for link in LINKS}
    links = ", ".join(f"{link} {size / 1e9:.1f}" for link, size in sent.items())
    yield (
        f"{found['params']:,} parameters, {plan.label}, {run.replicate} x {run.shard} ranks of "
        f"{plan.machine.name}, local batch {run.batch}"
    )
    yield plan.fit
    yield f"memory   GiB: {gib}"
    for flag, size in found["host_gib"].items():
        yield f"host     GiB per rank for {flag}: {size:.1f}, pinned blocks rounded up"
    count = sum(found["collectives"].values())
    yield f"traffic  GB per rank and step: {links}; {count} collectives"
    yield (
        "step     {step:.2f} s: compute {compute:.2f}, optimizer {optimizer:.2f}, exposed "
        "communication {exposed:.2f} of {communication:.2f}".format(**plan.seconds)
    )
    speed = plan.images_per_second
    mfu = plan.mfu(speed)
    yield f"speed    at most {speed:.0f} img/s, efficiency {plan.efficiency:.0%}, MFU {mfu:.0%}"


def comparison_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Format the table of `--compare`; "exposed s" is communication that compute does not hide."""
    yield (
        f"{'mode':19}{'verdict':7}{'peak GiB':>9}{'img/s':>9}{'step s':>9}{'exposed s':>11}"
        f"{'optimizer s':>13}{'network GB':>12}"
    )
    for plan in plans:
        by_kind = link_bytes(plan.run, plan.machine).values()
        sent = sum(by_link["network"] for by_link in by_kind)
        time = plan.seconds
        yield (
            f"{plan.label:19}{plan.verdict:7}{plan.peak_gib:9.1f}{plan.images_per_second:9.0f}"
            f"{time['step']:9.3f}{time['exposed']:11.3f}{time['optimizer']:13.3f}{sent / 1e9:12.2f}"
        )


def explanation_lines(plan: Plan) -> Iterator[str]:
    """Format the table of `--explain`: memory by part, at the largest moment of each phase."""
    yield "GiB at the largest moment of each phase of a step"
    yield f"{'moment':28}" + "".join(f"{part[:11]:>12}" for part in MEMORY_PARTS) + f"{'sum':>9}"
    found: dict[str, MemorySnapshot] = {}
    for s in plan.snapshots:
        phase, _, _ = s.name.partition(" ")
        if s.total > found.setdefault(phase, s).total:
            found[phase] = s
    for s in found.values():
        cells = "".join(f"{s.bytes[part] / GIB:12.3f}" for part in MEMORY_PARTS)
        yield f"{s.name:28}{cells}{s.total / GIB:9.3f}"


# --- The command line


def build_parser(prog: str = "plan.py") -> train_fsdp.Parser:
    """Build the parser of train_fsdp.py with the flags of plan.py added."""
    parser = train_fsdp.build_parser(prog, str(__doc__))
    add = parser.add_argument_group("the plan itself").add_argument
    add("--world-size", type=train_fsdp.number(1, kind=int), help="ranks (default: a node)")
    known = ", ".join(machines.MACHINES)
    add("--machine", default="frontier", help=f"{known}; or a file of --measure")
    gib = train_fsdp.number(0.1, 10**6)
    add("--memory-gib", type=gib, help="per rank (default: the machine's; in a job its GPU's)")
    add("--encoder-only", action="store_true", help="a plain ViT, no MAE decoder")
    add("--compare", action="store_true", help="every mode and group, best first")
    add("--explain", action="store_true", help="where the memory goes")
    add("--json", action="store_true", help="one JSON object")
    add("--simulate", action="store_true", help="one step of the real code too")
    add("--measure", type=train_fsdp.path, metavar="FILE", help="time this model on this machine")
    return parser


def read_command(
    argv: Sequence[str], node_ranks: int | None = None, prog: str = "plan.py"
) -> tuple[Namespace, Plan]:
    """Parse a command -> its complete flags, its plan; one sentence and status 2 if it is refused.

    `node_ranks`: the ranks on each node, by default as many as a node of the machine has.
    """
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    if args.measure:
        raise SystemExit(measure(args))
    try:
        return args, make_plan(args, node_ranks)
    except ValueError as error:
        parser.error(str(error))


def make_plan(args: Namespace, node_ranks: int | None = None) -> Plan:
    """Complete the flags of a run, and plan it; ValueError, one sentence, if it is refused."""
    machine = machines.read_machine(args.machine)
    memory_gib = args.memory_gib
    in_job = "LOCAL_WORLD_SIZE" in os.environ  # launch_frontier.sh sets it
    if in_job and memory_gib is None and torch.cuda.is_available():  # the GPU that will be used
        memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    node_ranks = node_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if node_ranks:
        machine = machines.with_ranks_per_node(machine, node_ranks)
    world_size = args.world_size or machine.ranks_per_node
    mask_ratio = args.mask_ratio
    if args.encoder_only:  # a plain ViT may see all patches, but train_fsdp.py refuses that
        args.mask_ratio = 0.75
    device_type = "cpu" if args.device == "cpu" else "cuda"  # the job's, not this computer's
    train_fsdp.complete(args, world_size, machine.ranks_per_node, device_type)
    args.mask_ratio = mask_ratio
    # images are not looked at: rather more memory than less
    flags = vars(args) | {"image_dtype": "uint8" if args.channels == 3 else "float32"}
    run = PlannedRun.from_flags(train_fsdp.model_config(args), flags)
    return Plan(run, machine, memory_gib)


def measure(args: Namespace) -> int:
    """Measure this machine with the ranks that the launcher started; return the exit status."""
    try:
        ranks = mesh.read_ranks(os.environ)
        device = mesh.pick_device(args.device, ranks)
        args.device = device.type
        args.world_size = ranks.world_size
        found = make_plan(args, ranks.local_world_size)
        mesh.init_ranks(ranks, device)
        machines.measure(args, found.run, ranks, device)
    except (ValueError, OSError, RuntimeError) as error:
        return refuse(str(error), "plan.py")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; return the exit status: 2 if the flags are refused, 3 if the run does not fit.

    Tables (--compare) and --json hold the verdict, so their status is 0.
    """
    args, plan = read_command(sys.argv[1:] if argv is None else argv)
    if args.simulate:
        import simulate  # which imports this file

        return simulate.dry_run(args, plan)
    plans = compare(plan) if args.compare else [plan]
    if args.json:
        rows = [p.json() | {"mode": p.label} for p in plans]
        print(json.dumps(rows if args.compare else plan.json()))
        return 0
    if args.explain:
        print(*explanation_lines(plan), "", sep="\n")
    lines = comparison_lines(plans) if args.compare else summary_lines(plan)
    print(*lines, sep="\n")
    if plan.machine.name != "frontier" and not plan.machine.measured:
        print("note     times are estimates: plan.py --measure FILE measures a machine")
    return 0 if args.compare else exit_status(args, plan)


def exit_status(args: Namespace, plan: Plan) -> int:
    """Return 3 if a run does not fit; a CPU's memory is that of all programs, so 0 for it."""
    return 3 if plan.verdict == "NO" and args.device != "cpu" else 0


if __name__ == "__main__":
    sys.exit(main())
