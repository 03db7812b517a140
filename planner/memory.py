"""What is live on one rank at each moment of a step.

With n parameters, G ranks in a shard group, AdamW and mixed precision, a rank holds (Rajbhandari et
al., ZeRO, arXiv 1910.02054, figure 1): 4 n bytes of fp32 parameters, 4 n of gradients, 8 n of
optimizer states, each whole or divided by G as the strategy says. Full parameters of the units in
use and the activations, which depend on the batch, come on top. The peak is the largest sum of what
is live at one moment, not the sum of all.

Memory is that of a CUDA (ROCm) device with flash attention, whose kernels pad the features of a
head to a multiple of 8. Live tensors are CUDA's max_memory_allocated; `pending_bytes` is freed
memory that another stream still uses, as under FSDP1. All sizes are in bytes.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import vit
from planner.machines import Machine
from planner.traffic import BYTES, FP32, PlannedRun, Unit, ddp_buckets, model_units, run_units

GIB = 2**30
MEMORY_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "unsharded",  # parameters gathered or cast for use, and gradients that are not reduced yet
    "activations",
    "reduction",  # buffers of gradient collectives
    "inputs",
    "workspace",
)


@dataclass(frozen=True)
class BlockMemory:
    """Activations of one block: B images, T tokens each, width D, MLP width M.

    Counted in vit.Block: autograd saves the input of every layer that has weights, of GELU and of
    the norms (with mean and deviation of each token), and q, k, v, output and log-sum-exp of the
    attention. With e = one tensor of width D and f = one of width M that is 8 e + 2 f, or 8 e + 4 f
    for a gated MLP; under autocast the norms save fp32 copies of their inputs. Of these, with
    tensor parallelism, four e are whole: inputs of norms, of qkv and of the MLP.
    """

    e: int
    e_part: int  # of its heads
    f: int
    gates: int  # 2 where the MLP is gated, else 1
    all_saved: int  # without checkpointing; what recomputation brings back
    saved: int  # between forward and backward under `--ac`
    forward: int  # largest live size inside forward, beyond what is saved


def block_memory(run: PlannedRun, part: str, machine: Machine) -> BlockMemory:
    """Count the activations of an "encoder" or "decoder" block for the local batch."""
    c = run.config
    width, heads, hidden, gated = c.decoder_width, c.decoder_heads, 4 * c.decoder_width, False
    if part == "encoder":
        width, heads, hidden, gated = c.width, c.heads, c.mlp_width, c.gated_mlp
    tokens, size = run.batch * run.tokens(part), run.compute_bytes
    multiple = machine.head_multiple
    head = -(-width // heads // multiple) * multiple
    e, f, gates = tokens * width * size, tokens * hidden // run.tp * size, 2 if gated else 1
    e_part, padded = e // run.tp, tokens * heads // run.tp * head * size
    out = padded + (e_part if padded != e_part else 0)  # a padded output is copied for the next
    sums = FP32 * tokens * heads // run.tp  # log-sum-exp
    norms = 2 * (2 * FP32 * tokens) + (2 * (2 * e - e) if run.autocast else 0)
    all_saved = 4 * e + 3 * padded + out + 2 * gates * f + sums + norms
    saved = {
        "none": all_saved,
        "full": e,
        # shard._keep_matmuls: results of attention and of matmuls that do not narrow
        "selective": 2 * e + 3 * e_part + padded + sums + gates * f,
    }[run.ac]
    forward = 2 * e + (1 + gates) * f
    return BlockMemory(e, e_part, f, gates, all_saved, saved, forward)


def block_backward(run: PlannedRun, memory: BlockMemory, unit: Unit) -> list[tuple[int, int]]:
    """(activations, parameter gradients) at the moments of a block's backward.

    Saved or recomputed activations are freed one after the other as their gradients appear; the
    gradients of the block's parameters appear one by one and stay until they are reduced.
    """
    e, gates, saved = memory.e, memory.gates, memory.all_saved
    hidden = gates * memory.f
    shapes = unit.parameters.values()
    matrices = [math.prod(s) * run.compute_bytes for s in shapes if len(s) > 1]
    attention, mlp, total = sum(matrices[:2]), sum(matrices[2:]), sum(matrices)
    return [
        (saved + e + hidden, matrices[-1]),  # GELU: its input, the gradients before and after it
        (saved + 2 * e - hidden, mlp),  # first layer of the MLP
        # attention: the gradients of q, k, v
        (saved + 3 * memory.e_part - 2 * hidden, mlp + attention // 4),
        (saved - e - 2 * hidden, total),  # qkv
    ]


@dataclass(frozen=True)
class MemorySnapshot:
    """What is live at one moment of a step, in bytes by part of MEMORY_PARTS."""

    name: str
    bytes: dict[str, float]

    @property
    def total(self) -> float:
        """Sum over all parts."""
        return sum(self.bytes.values())


class StepMemory:
    """Walk through a step block by block and count what is live at each moment."""

    def __init__(self, run: PlannedRun, machine: Machine) -> None:
        self.run, self.machine = run, machine
        self.blocks = model_units(run.config, run.encoder_only, tp=run.tp)[1:]
        self.units = run_units(run)  # the root first
        self.root = self.units[0]
        # Parameters of each block by the number of the unit that holds them, 0 for the root
        at = {name: i for i, unit in enumerate(self.units) for name in unit.parameters}
        self.held = [Counter[int]() for _ in self.blocks]
        for block, held in zip(self.blocks, self.held, strict=True):
            for name, shape in block.parameters.items():
                held[at[name]] += math.prod(shape)
        # The first block that needs each unit; of a layer between blocks the one that follows
        self.first = [0] * len(self.units)
        following = len(self.blocks)
        for i in range(len(self.units) - 1, 0, -1):
            following = next((p for p, held in enumerate(self.held) if i in held), following)
            self.first[i] = following
        self.memory = {p: block_memory(run, p, machine) for p in ("encoder", "decoder")}
        self.numel = {u.name: u.padded(run) for u in self.units}
        self.all = sum(self.numel.values())
        self.trained = sum(self.numel[u.name] for u in self.units if u.trains)
        self.values = run.config.channels * run.img_size**2  # of an image
        self.pixels = FP32 * run.batch * self.values  # the images as fp32
        self.on_device = 0 if run.cpu_offload else 1  # share of the states

    # -- parts

    def states(self) -> dict[str, float]:
        """What is live all the time."""
        run, c = self.run, self.run.config
        states = largest_partition(run) if run.mode == "zero1" else self.trained / run.shard
        patches = vit.patch_count(c, run.img_size)
        rows = 1 + patches + (run.freeze_blocks > 0)  # the frozen class token
        tables = FP32 * rows * (c.width + (0 if run.encoder_only else c.decoder_width))
        images = run.accum * run.batch * (run.pixel_bytes * self.values + FP32 * patches)
        return {
            "parameters": FP32 * self.all / run.shard * self.on_device,
            "optimizer": 2 * FP32 * states * self.on_device,
            "inputs": tables + images,
            "workspace": self.machine.workspace_gib * GIB,
        }

    def unsharded(self, *units: Unit) -> float:
        """Full parameters of these units in the computing dtype."""
        if self.run.engine == "ddp" and not self.run.autocast:
            return 0
        if self.run.engine == "fsdp1" and self.run.shard == 1 and self.run.precision == "fp32":
            return 0  # used in place
        if self.run.engine == "ddp":  # autocast keeps its casts for backward alone
            units = tuple(unit for unit in units if unit.trains)
        return sum(self.numel[u.name] for u in units) * self.run.compute_bytes

    def block_units(self, position: int, recomputed: bool = False) -> tuple[Unit, ...]:
        """List the units that a block needs gathered at one time: of several the largest.

        When it is recomputed, FSDP2 gathers all of them and keeps them for its backward.
        """
        units = tuple(self.units[i] for i in self.held[position] if i)
        if recomputed and self.run.ac != "none" and self.run.engine == "fsdp2":
            return units
        return tuple(sorted(units, key=lambda unit: unit.numel)[-1:])

    def gathered_params(self, position: int) -> float:
        """Full parameters while block `position` runs backward."""
        run, here = self.run, self.block_units(position, recomputed=True)
        every = [i for i in self.held[position] if i]
        own = min(every, default=bisect_left(self.first, position, 1))
        before = self.units[1:own]
        if run.engine == "fsdp1" and run.shard == 1:
            return self.unsharded(self.root, *here)
        if not run.reshard:
            return self.unsharded(self.root, *before, *(self.units[i] for i in every))
        ahead = before[-1:] if run.prefetch != "none" else ()
        if run.engine == "fsdp1":  # FSDP2 prefetches a frozen unit too
            ahead = tuple(unit for unit in ahead if unit.trains)
        return self.unsharded(self.root, *ahead, *here)

    def gradients(self, done: Sequence[Unit]) -> float:
        """Reduced gradients when these units have completed the last backward.

        With accumulation those of the earlier micro-steps exist too; FSDP2 keeps them in the
        reduce dtype while they wait for their all-reduce.
        """
        run = self.run
        if run.buckets:
            return FP32 * self.trained  # which are the gradients
        ready = sum(self.numel[u.name] for u in done if u.trains)
        before = 0 if run.accum == 1 else self.trained - ready
        size = BYTES[run.reduce_dtype] if run.replicated else FP32
        return (FP32 * ready + size * before) / run.shard * self.on_device

    def reduce_buffers(self, done: Sequence[Unit]) -> float:
        """Buffers of gradient collectives, apart from the gradients.

        FSDP2 holds the input of the last reduce-scatter until the next, and with a 16-bit reduce
        dtype each all-reduced shard until the end of backward (_fsdp_param_group.py).
        """
        run, size = self.run, BYTES[self.run.reduce_dtype]
        if run.buckets:  # the compression hook's copy of one
            return max(ddp_buckets(run)) * size if size < FP32 else 0
        if run.engine != "fsdp2" or not done:
            return 0
        held: float = self.numel[done[0].name] * size
        if size < FP32 and run.replicated:
            held += sum(self.numel[u.name] for u in done) / run.shard * size
        return held

    def saved_activations(self, position: int) -> float:
        """Activations that blocks before `position` and the layers around the blocks save."""
        trained = self.blocks[self.run.freeze_blocks : position]
        blocks = sum(self.memory[unit.part].saved for unit in trained)
        return blocks + self.edge_activations(position)

    def forward_activations(self, position: int) -> float:
        """Activations inside of a block's forward pass, with those that it saves."""
        run, memory = self.run, self.memory[self.blocks[position].part]
        if position < run.freeze_blocks:
            return memory.e + memory.forward  # its input, which nothing saves
        # Of the MLP's tensors some are saved ones. With a decoder, whose loss is the peak of
        # forward, they count twice.
        saved = {"none": 1 + memory.gates, "selective": memory.gates, "full": 0}[run.ac]
        twice = saved * memory.f if run.encoder_only else 0
        return memory.saved + memory.forward - twice

    def edge_activations(self, position: int) -> float:
        """Activations that embedding, norms, head and loss save until block `position` runs."""
        run, size = self.run, self.run.compute_bytes
        visible, pixels = run.tokens("encoder") - 1, run.config.channels * run.config.patch**2
        total = run.batch * visible * (pixels * size + 8)  # patches embedded, their indices
        total = 0 if run.freeze_blocks else total
        e = self.memory["encoder"].e
        if run.encoder_only:
            return total + (e if position == len(self.blocks) else 0)
        if position > run.config.depth:
            total += 2 * e  # in and out of the last norm
        if position == len(self.blocks):  # decoder's norm, difference to the target
            total += 2 * self.memory["decoder"].e + self.pixels
        return total

    # -- moments

    def snapshot(self, name: str, **parts: float) -> MemorySnapshot:
        """Add these parts to the states."""
        found = dict.fromkeys(MEMORY_PARTS, 0.0) | self.states()
        for key, value in parts.items():
            found[key] += value
        return MemorySnapshot(name, found)

    def snapshots(self) -> Iterator[MemorySnapshot]:
        """Walk through the last accumulation step: forward, loss, backward, optimizer."""
        before = self.gradients(()) if self.run.accum > 1 or self.run.buckets else 0
        # fp32 images and, for the loss, their patches
        inputs = (1 if self.run.encoder_only else 2) * self.pixels
        for position, block in enumerate(self.blocks):
            yield self.snapshot(
                f"forward of {block.name}",
                gradients=before,
                unsharded=self.forward_units(position),
                activations=self.saved_activations(position) + self.forward_activations(position),
                inputs=inputs,
            )
        count = len(self.blocks)
        loss = 0 if self.run.encoder_only else 2.5 * self.pixels
        yield self.snapshot(
            "loss",
            gradients=before,
            unsharded=self.forward_units(count),
            activations=self.saved_activations(count) + loss,
            inputs=inputs,
        )
        for position in range(count - 1, self.run.freeze_blocks - 1, -1):
            yield from self.backward(position)
        if self.run.engine != "ddp":
            yield self.reduction(self.root, self.units[1:], self.unsharded(self.root))
        yield self.snapshot("optimizer step", gradients=self.gradients(self.units))

    def forward_units(self, position: int) -> float:
        """Full parameters while block `position` runs forward (past the last block: the loss)."""
        run, loss = self.run, position == len(self.blocks)
        used = self.units[1 : bisect_right(self.first, position, 1)]
        here = () if loss else self.block_units(position)
        live = used  # all that were used stay, unless they are freed after use
        if run.engine == "fsdp1" and run.shard == 1:
            live = here or used[-1:]
        elif run.engine != "ddp" and run.reshard:
            live = here
        total = self.unsharded(self.root, *live)
        if run.engine == "fsdp2" and run.shard > 1:
            # the output of its gather lives until the next
            total += self.unsharded(*(here or used[-1:] or (self.root,)))
        if run.forward_prefetch:
            total += self.unsharded(*self.units[len(used) + 1 : len(used) + 2])
        return total

    def backward(self, position: int) -> Iterator[MemorySnapshot]:
        """Walk through one block's backward and the reduction of its gradients."""
        run, block, held = self.run, self.blocks[position], self.held[position]
        done = self.units[bisect_right(self.first, position, 1) :]
        saved, memory = self.saved_activations(position), self.memory[block.part]
        unsharded = self.gathered_params(position)
        # gradients that are not reduced yet: those of the root so far, of later blocks in this unit
        later = self.held[position + 1 :]
        root_gradients = self.root_gradients(sum(other[0] for other in later))
        unreduced = sum(other[i] for other in later for i in held if i) * run.compute_bytes
        largest = max(map(math.prod, block.parameters.values()))
        for activations, gradients in block_backward(run, memory, block):
            if run.engine == "ddp":  # straight to where they stay, as fp32
                there = run.buckets or run.accum > 1
                gradients = FP32 * (largest if there else gradients // run.compute_bytes)
                gradients += largest * run.compute_bytes if run.autocast else 0
            yield self.snapshot(
                f"backward of {block.name}",
                gradients=self.gradients(done),
                unsharded=unsharded + gradients + unreduced + root_gradients,
                activations=saved + activations,
                reduction=self.reduce_buffers(done),
            )
        complete = [self.units[i] for i in held if i and self.first[i] == position]
        if run.engine != "ddp" and complete:  # the units' last backward
            unit = max(complete, key=lambda unit: unit.numel)
            live, around = unsharded + root_gradients, saved + 2 * memory.e
            yield self.reduction(unit, done, live, around)

    def root_gradients(self, numel: int) -> float:
        """Unreduced gradients of the root: of `numel` parameters in blocks, and of all others."""
        inside = sum(held[0] for held in self.held)
        size = self.run.compute_bytes
        return max(0, self.unsharded(self.root) - inside * size) + numel * size

    def reduction(
        self, unit: Unit, done: Sequence[Unit], unsharded: float, activations: float = 0
    ) -> MemorySnapshot:
        """Count what is live while the gradients of a unit are reduced, after those of `done`.

        Its parameters are freed by then; its gradients take their place in `unsharded`. FSDP2 frees
        these too before it makes their shard.
        """
        run, size = self.run, BYTES[self.run.reduce_dtype]
        copy = size if run.engine == "fsdp2" or size != run.compute_bytes else 0
        return self.snapshot(
            f"reduction of {unit.name}",
            gradients=self.gradients(done if run.engine == "fsdp2" else (*done, unit)),
            unsharded=unsharded,
            activations=activations,
            reduction=self.reduce_buffers(()) + self.numel[unit.name] * copy,
        )


@lru_cache(maxsize=64)  # each moment of a step has it
def largest_partition(run: PlannedRun) -> int:
    """Count the parameters of the rank that has most under ZeRO-1.

    ZeroRedundancyOptimizer gives whole parameters, the largest first, each to the rank that has
    least so far; decaying parameters first, then the others.
    """
    units = [unit for unit in run_units(run) if unit.trains]
    shapes = [shape for unit in units for shape in unit.parameters.values()]
    load = [0] * min(run.world_size, len(shapes))
    for decays in (True, False):
        for numel in sorted((math.prod(s) for s in shapes if (len(s) > 1) == decays), reverse=True):
            heapq.heapreplace(load, load[0] + numel)
    return max(load)


# Memory that FSDP1 has freed but another stream still uses (record_stream) counts in peak_active.
# Fitted on the published figures of `base` and `3b` (examples/published), in bf16 units of a block:
PENDING_EARLY_UNITS = 2.0  # when backward begins: gathers
PENDING_LATE_UNITS = 8.5  # when it ends: gradients of earlier blocks, up to a limit
PENDING_NO_SHARD_BYTES = 5.3  # per parameter: no gather limits how far the host runs ahead


def pending_bytes(run: PlannedRun, snapshot: MemorySnapshot) -> float:
    """Freed memory that another stream still uses, in backward; none under FSDP2 and DDP."""
    if run.engine != "fsdp1" or not snapshot.name.startswith(("backward", "reduction")):
        return 0.0
    units = run_units(run)[1:]
    names = [unit.name for unit in model_units(run.config, run.encoder_only)[1:]]
    name = snapshot.name.rpartition(" ")[2]  # of a block, of a part of one, of the root
    position = next((i for i, n in enumerate(names) if f"{name}.".startswith(f"{n}.")), 0)
    done = 1 - position / max(1, len(names) - 1)
    if run.shard == 1:
        return done * PENDING_NO_SHARD_BYTES * sum(unit.numel for unit in units)
    unit = max((unit.padded(run) for unit in units), default=0) * run.compute_bytes
    return unit * (PENDING_EARLY_UNITS + done * (PENDING_LATE_UNITS - PENDING_EARLY_UNITS))
