"""What one step asks of a rank: which collectives, and what is live at each of its moments.

The formulas follow shard.py and vit.py, unit by unit. With n parameters, G ranks in a shard group,
AdamW and mixed precision, a rank holds (Rajbhandari et al., ZeRO, arXiv 1910.02054, figure 1): 4 n
bytes of fp32 parameters, 4 n of gradients, 8 n of optimizer states, each whole or divided by G as
the strategy says; beside them whole parameters of the units in use and the activations, which
depend on the batch. The peak is the largest sum of what is live at one moment, not the sum of all.

Traffic counts the collectives of parameters and gradients. The gradient norm, the check for bad
steps and the log send a few numbers each: not counted. Nor are the collectives of one rank.

Memory is that of a CUDA (ROCm) device with flash attention, whose kernels pad the features of a
head to a multiple of 8. Live tensors are CUDA's max_memory_allocated; `pending_bytes` is freed
memory that waits for another stream, as FSDP1 leaves it.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import vit
from planner.machines import Machine
from planner.traffic import BYTES, FP32, Run, Unit, ddp_buckets, model_units, run_units, token_count

GIB = 2**30

# ---------------------------------------------------------------------------------------------
# Memory


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of activations of one block: B images, T tokens each, width D, MLP width M.

    Counted in vit.Block: autograd keeps the input of every layer that has weights, of GELU and of
    the norms (with mean and deviation of each token), and q, k, v, output and log-sum-exp of the
    attention. With e = one tensor of width D and f = one of width M that is 8 e + 2 f, or 8 e + 4 f
    for a gated MLP; under autocast the norms keep fp32 copies of their inputs.
    """

    e: int
    f: int
    gates: int  # 2 where the MLP is gated, else 1
    whole: int  # kept without checkpointing; what recomputation brings back
    kept: int  # kept between forward and backward under `--ac`
    forward: int  # live inside forward, beyond what is kept, at most


def block_memory(run: Run, part: str, machine: Machine) -> BlockMemory:
    """Of an encoder or decoder block, with the local batch of this run."""
    c = run.config
    width, heads, hidden, gated = c.decoder_width, c.decoder_heads, 4 * c.decoder_width, False
    if part == "encoder":
        width, heads, hidden, gated = c.width, c.heads, c.mlp_width, c.gated_mlp
    tokens, size = run.local_batch * token_count(run, part), run.compute_bytes
    multiple = machine.head_multiple
    head = -(-width // heads // multiple) * multiple
    e, f, gates = tokens * width * size, tokens * hidden * size, 2 if gated else 1
    padded = tokens * heads * head * size
    out = padded + (e if padded != e else 0)  # a padded output is copied for the next layer
    sums = FP32 * tokens * heads  # log-sum-exp
    norms = 2 * (2 * FP32 * tokens) + (2 * (2 * e - e) if run.autocast else 0)
    whole = 4 * e + 3 * padded + out + 2 * gates * f + sums + norms
    kept = {
        "none": whole,
        "full": e,
        # shard._keep_matmuls: results of attention and of products that do not narrow
        "selective": 5 * e + padded + sums + gates * f,
    }[run.ac]
    return BlockMemory(e, f, gates, whole, kept, max(2 * e + (1 + gates) * f, whole - kept))


def block_backward(run: Run, memory: BlockMemory, unit: Unit) -> list[tuple[int, int]]:
    """(activations, gradients of parameters) in bytes at the moments of a block's backward.

    Recomputed or kept activations go one after the other as gradients of activations come, and the
    gradients of the block's parameters come one after the other and stay until they are reduced.
    """
    e, f, gates, whole = memory.e, memory.f, memory.gates, memory.whole
    matrices = [math.prod(s) * run.compute_bytes for s in unit.shapes if len(s) > 1]
    attention, mlp, total = sum(matrices[:2]), sum(matrices[2:]), sum(matrices)
    last = matrices[-1]
    return [
        (whole + e + gates * f, last),  # GELU: its input, the gradients before and after it
        (whole + 2 * e - gates * f, mlp),  # first layer of the MLP
        (whole + 3 * e - 2 * gates * f, mlp + attention // 4),  # attention: 3 e for q, k, v
        (whole - e - 2 * gates * f, total),  # qkv
    ]


@dataclass(frozen=True)
class Moment:
    """What is live at one moment of a step, in bytes by part."""

    name: str
    bytes: dict[str, float]

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(self.bytes.values())


PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "unsharded",
    "activations",
    "reduction",
    "inputs",
    "workspace",
)


class StepMemory:
    """Walks through a step, block by block, and says what is live.

    unsharded: parameters gathered or cast for use, and gradients that are not reduced yet;
    reduction: buffers of gradient collectives.
    """

    def __init__(self, run: Run, machine: Machine) -> None:
        self.run, self.machine = run, machine
        self.blocks = model_units(run.config, run.encoder_only)[1:]
        self.units = run_units(run)  # the root first
        self.root = self.units[0]
        at = {name: i for i, unit in enumerate(self.units) for name in unit.names}
        self.unit_at = [at[block.names[0]] for block in self.blocks]  # of each block: its unit
        self.memory = {p: block_memory(run, p, machine) for p in ("encoder", "decoder")}
        self.numel = {u.name: u.padded(run) for u in self.units}
        self.all = sum(self.numel.values())
        self.pixels = FP32 * 3 * run.local_batch * run.img_size**2  # the images as fp32
        self.offload = 0 if run.cpu_offload else 1

    # -- parts

    def states(self) -> dict[str, float]:
        """What is there all the time."""
        run, c = self.run, self.run.config
        per_rank = self.all / run.shard
        optimizer = 2 * FP32 * per_rank
        if run.mode == "zero1":
            optimizer = 2 * FP32 * largest_partition(run)
        patches = vit.patch_count(c, run.img_size)
        tables = FP32 * (1 + patches) * (c.width + (0 if run.encoder_only else c.decoder_width))
        images = run.accum * run.local_batch * (3 * run.img_size**2 + FP32 * patches)
        return {
            "parameters": FP32 * per_rank * self.offload,
            "optimizer": optimizer * self.offload,
            "inputs": tables + images,
            "workspace": self.machine.workspace_gib * GIB,
        }

    def gathered(self, *units: Unit) -> float:
        """Bytes of whole parameters of these units in the computing dtype."""
        if self.run.engine == "ddp" and not self.run.autocast:
            return 0
        if self.run.engine == "fsdp1" and self.run.shard == 1 and self.run.precision == "fp32":
            return 0  # used in place
        return sum(self.numel[u.name] for u in units) * self.run.compute_bytes

    def resident(self, position: int) -> float:
        """Whole parameters beside the running unit's when block `position` runs backward."""
        run, before = self.run, self.units[1 : self.unit_at[position]]
        if run.engine == "fsdp1" and run.shard == 1:
            return self.gathered(self.root)
        if not run.reshard:
            return self.gathered(self.root, *before)
        ahead = before[-1:] if run.prefetch != "none" else ()
        return self.gathered(self.root, *ahead)

    def gradients(self, done: Sequence[Unit]) -> float:
        """Bytes of reduced gradients when these units have been through the last backward.

        With accumulation those of the micro-steps before are there too; FSDP2 keeps them in the
        reduce dtype where they still wait for their all-reduce.
        """
        run = self.run
        if run.buckets:
            return FP32 * self.all  # which are the gradients
        ready = sum(self.numel[u.name] for u in done)
        before = 0 if run.accum == 1 else self.all - ready
        size = BYTES[run.reduce_dtype] if run.replicated else FP32
        return (FP32 * ready + size * before) / run.shard * self.offload

    def waiting(self, done: Sequence[Unit]) -> float:
        """Bytes of reduction buffers beside them.

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

    def kept(self, position: int) -> float:
        """Activations that blocks before `position` keep, and the ends of the model."""
        return sum(self.memory[u.part].kept for u in self.blocks[:position]) + self.ends(position)

    def ends(self, position: int) -> float:
        """Activations that embedding, norms, head and loss keep when block `position` runs."""
        run, size = self.run, self.run.compute_bytes
        c, batch = run.config, run.local_batch
        visible, pixels = token_count(run, "encoder") - 1, 3 * c.patch**2
        total = batch * visible * (pixels * size + 8)  # patches embedded, their places
        e = self.memory["encoder"].e
        if run.encoder_only:
            return total + (e if position == len(self.blocks) else 0)
        if position > c.depth:
            total += 2 * e  # in and out of the last norm
        if position == len(self.blocks):  # decoder's norm, difference to the target
            total += 2 * self.memory["decoder"].e + self.pixels
        return total

    # -- moments

    def moment(self, name: str, **parts: float) -> Moment:
        """States and these parts."""
        found = dict.fromkeys(PARTS, 0.0) | self.states()
        for key, value in parts.items():
            found[key] += value
        return Moment(name, found)

    def moments(self) -> Iterator[Moment]:
        """Of the last accumulation step: forward, loss, backward, optimizer."""
        before = self.gradients(()) if self.run.accum > 1 or self.run.buckets else 0
        for position, unit in enumerate(self.blocks):
            yield self.moment(
                f"forward of {unit.name}",
                gradients=before,
                unsharded=self.forward_units(position),
                activations=self.kept(position)
                + self.memory[unit.part].kept
                + self.memory[unit.part].forward,
                inputs=2 * self.pixels,
            )
        count = len(self.blocks)
        yield self.moment(
            "loss",
            gradients=before,
            unsharded=self.forward_units(count),
            activations=self.kept(count) + (0 if self.run.encoder_only else 2.5 * self.pixels),
            inputs=2 * self.pixels,
        )
        for position in range(count - 1, -1, -1):
            yield from self.backward(position)
        yield self.moment("optimizer step", gradients=self.gradients(self.units))

    def forward_units(self, position: int) -> float:
        """Whole parameters while block `position` runs forward (past the last: the loss)."""
        run, loss = self.run, position == len(self.blocks)
        used = self.units[1:] if loss else self.units[1 : self.unit_at[position] + 1]
        if run.engine == "ddp" or not run.reshard:
            whole = self.gathered(self.root, *used)
            if run.engine == "fsdp1" and run.shard == 1:
                whole = self.gathered(self.root, *used[-1:])
        else:
            whole = self.gathered(self.root, *(() if loss else used[-1:]))
        if run.engine == "fsdp2" and run.shard > 1 and used:
            whole += self.gathered(used[-1])  # its gather's output stays till the next
        if run.forward_prefetch:
            whole += self.gathered(*self.units[len(used) + 1 : len(used) + 2])
        return whole

    def backward(self, position: int) -> Iterator[Moment]:
        """Moments of one block's backward, and of the reduction of its gradients after it."""
        run, block, at = self.run, self.blocks[position], self.unit_at[position]
        unit, done = self.units[at], self.units[at + 1 :]
        kept, memory = self.kept(position), self.memory[block.part]
        root_gradients = self.gathered(self.root)
        later = [b for b, i in zip(self.blocks, self.unit_at, strict=True) if i == at]
        later = later[later.index(block) + 1 :]  # in the same unit, their gradients not yet reduced
        unreduced = sum(b.numel for b in later) * run.compute_bytes
        for activations, gradients in block_backward(run, memory, block):
            if run.engine == "ddp":  # straight to where they stay, as fp32
                largest = max(math.prod(s) for s in block.shapes)
                there = run.buckets or run.accum > 1
                gradients = FP32 * (largest if there else gradients // run.compute_bytes)
                gradients += largest * run.compute_bytes if run.autocast else 0
            yield self.moment(
                f"backward of {block.name}",
                gradients=self.gradients(done),
                unsharded=self.resident(position)
                + self.gathered(unit)
                + gradients
                + unreduced
                + root_gradients,
                activations=kept + activations,
                reduction=self.waiting(done),
            )
        if run.engine != "ddp" and block.names[0] == unit.names[0]:  # the last to be done
            size = BYTES[run.reduce_dtype]
            copy = size if run.engine == "fsdp2" or size != run.compute_bytes else 0
            yield self.moment(
                f"reduction of {unit.name}",
                gradients=self.gradients((*done, unit)),
                unsharded=self.resident(position) + self.gathered(unit) + root_gradients,
                activations=kept + 2 * memory.e,
                reduction=self.waiting(()) + self.numel[unit.name] * copy,
            )


def largest_partition(run: Run) -> int:
    """Parameters of the rank that has most under ZeRO-1: whole ones, the largest dealt first.

    As ZeroRedundancyOptimizer does, within decaying and other parameters by turns.
    """
    shapes = [s for unit in model_units(run.config, run.encoder_only) for s in unit.shapes]
    load = [0] * min(run.world_size, len(shapes))
    for decays in (True, False):
        for numel in sorted((math.prod(s) for s in shapes if (len(s) > 1) == decays), reverse=True):
            heapq.heapreplace(load, load[0] + numel)
    return max(load)


# Memory that FSDP1 has freed but another stream still uses (record_stream) counts in peak_active.
# Fitted on the published figures of `base` and `3b` (examples/published), in bf16 units of a block:
PENDING_EARLY_UNITS = 2.0  # when backward begins: gathers
PENDING_LATE_UNITS = 8.5  # when it ends: gradients of the blocks before, until a limit
PENDING_NO_SHARD_BYTES = 5.3  # of each parameter: no gather limits how far the host runs ahead


def pending_bytes(run: Run, moment: Moment) -> float:
    """Freed memory that still waits, at a moment of backward; FSDP2 and DDP leave none."""
    if run.engine != "fsdp1" or not moment.name.startswith(("backward", "reduction")):
        return 0.0
    blocks = model_units(run.config, run.encoder_only)[1:]
    names = [unit.name for unit in blocks]
    done = 1 - names.index(moment.name.rpartition(" ")[2]) / max(1, len(names) - 1)
    if run.shard == 1:
        return done * PENDING_NO_SHARD_BYTES * sum(unit.numel for unit in blocks)
    unit = max(unit.padded(run) for unit in blocks) * run.compute_bytes
    return unit * (PENDING_EARLY_UNITS + done * (PENDING_LATE_UNITS - PENDING_EARLY_UNITS))
