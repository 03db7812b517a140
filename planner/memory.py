"""Count the memory that is live on one rank at each moment of a step.

With n parameters, G ranks in a shard group, AdamW and mixed precision, a rank holds (Rajbhandari et
al., ZeRO, arXiv 1910.02054, figure 1): 4 n bytes of fp32 parameters, 4 n of gradients and 8 n of
optimizer states, each of them in full, or divided by G if the strategy shards it. On top come full
parameters of the units in use, and the activations, which depend on the batch. The peak is the
largest sum of what is live at one moment (`StepMemory.snapshots`), not the sum of all of this.

The run and its units are defined in traffic.py (PlannedRun, Unit). estimate.py takes the largest
snapshot and compares it with the memory of the machine.

The device is a GPU with flash attention, whose kernels pad the features of a head to a multiple of
8. Live tensors are what CUDA's max_memory_allocated counts. `pending` is freed memory that another
stream still uses, as under FSDP1. All sizes are in bytes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.machines import Machine
from planner.traffic import (
    BYTES,
    FP32,
    PlannedRun,
    Unit,
    ddp_buckets,
    model_units,
    round_up,
    run_units,
)

GIB = 2**30
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
    """The bytes of the activations of one block, for the local batch.

    Autograd saves in vit.Block: the input of every layer with weights, of GELU and of the norms
    (with each token's mean and deviation), and q, k, v, output and log-sum-exp of the attention.
    Let e be one tensor (B, T, D), and f one (B, T, MLP width): that is 8 e + 2 f, or 8 e + 4 f for
    a gated MLP. Tensor parallelism splits all of these but four e: the inputs of the two norms, of
    qkv and of the MLP.
    """

    e: int
    saved: int  # between forward and backward, under the run's --ac
    forward: int  # the most that is live inside forward, beyond what is saved
    backward: list[tuple[int, int]]  # (activations, parameter gradients) at moments of backward


def block_memory(run: PlannedRun, unit: Unit, machine: Machine) -> BlockMemory:
    """Count the activations of a block for the local batch.

    In backward, saved or recomputed activations are freed one after another, as their gradients
    appear. The gradients of the block's parameters appear one by one, and stay until they are
    reduced.
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
    head = round_up(width // heads, machine.head_multiple)
    e = tokens * width * size
    f = tokens * hidden // run.tp * size
    e_part = e // run.tp
    padded = tokens * heads // run.tp * head * size
    out = padded
    if padded != e_part:  # proj takes a copy without the padding
        out += e_part
    sums = FP32 * tokens * heads // run.tp  # log-sum-exp
    norms = 2 * (2 * FP32 * tokens)  # mean and deviation of each token, for both norms
    kept = 4 * e + 3 * padded + out + 2 * gates * f + sums + norms
    saved = {
        "none": kept,
        "full": e,
        # what shard._keep_matmuls keeps: outputs of attention and of matmuls that do not narrow
        "selective": 2 * e + 3 * e_part + padded + sums + gates * f,
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
        # at the attention: the gradients of q, k, v
        (kept + 3 * e_part - 2 * gates * f, mlp + attention // 4),
        (kept - e - 2 * gates * f, attention + mlp),  # at qkv
    ]
    return BlockMemory(e, saved, forward, backward)


# peak_active also counts memory that FSDP1 has freed, but that another stream still uses
# (record_stream). It is fitted to the published figures of `base` and `3b` (examples/published), in
# units of one block's bf16 parameters.
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
    """Walk through a step and count what is live at each moment.

    Of the run (traffic.PlannedRun), `shard` is the number of ranks that share one copy of the
    model, 1 in ddp and all in full_shard; `reshard` tells whether the full parameters of a block
    are freed after its forward pass.

    The position of a block counts from 0, the encoder's blocks first. The blocks of a part (encoder
    or decoder) are alike, so from one to the next what is live changes by a constant amount. The
    largest of all moments is therefore at an end of a part: only the blocks at `ends` are counted.
    """

    def __init__(self, run: PlannedRun, machine: Machine) -> None:
        self.run = run
        self.machine = machine
        _, *blocks = model_units(run.config, run.encoder_only, run.tp)
        self.blocks = {u.part: u for u in blocks}
        root, *units = run_units(run)
        self.depth = run.config.depth
        self.count = sum(u.count for u in self.blocks.values())
        ends = {0, 1, self.depth - 2, self.depth - 1, self.depth, self.depth + 1}
        self.ends = sorted((ends | {self.count - 2, self.count - 1}) & {*range(self.count)})
        self.memory = {part: block_memory(run, u, machine) for part, u in self.blocks.items()}
        # elements: of the root, of a block's unit (none under --wrap root), of all units
        self.root = root.padded(run)
        self.unit = {u.part: u.padded(run) for u in units}
        self.all = self.root + self.over(0, self.count, self.unit)
        self.numel = {part: u.numel for part, u in self.blocks.items()}
        # FSDP1's NO_SHARD gathers nothing; like DDP it uses fp32 parameters in place
        self.no_gather = run.engine == "fsdp1" and run.shard == 1
        in_place = (run.engine == "ddp" or self.no_gather) and run.precision == "fp32"
        # bytes per element of the gathered or cast copy of a parameter that is in use
        self.cast = 0 if in_place else run.compute_bytes
        self.values = run.config.channels * run.img_size**2  # in an image
        self.pixels = FP32 * run.batch * self.values  # bytes of the images as fp32
        self.on_device = 0 if run.cpu_offload else 1  # share of parameters, gradients and states
        self.states = self.step_states()

    def over(self, first: int, last: int, each: Mapping[str, float]) -> float:
        """Sum `each`, the value of a block by its part, over the blocks first, ..., last - 1."""
        first = max(first, 0)
        last = min(last, self.count)
        encoder = range(first, min(last, self.depth))
        decoder = range(max(first, self.depth), last)
        return len(encoder) * each.get("encoder", 0) + len(decoder) * each.get("decoder", 0)

    # -- parts

    def step_states(self) -> dict[str, float]:
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
            "workspace": self.machine.workspace_gib * GIB,
        }

    def gathered_in_forward(self, position: int) -> float:
        """Count the full parameters while block `position` runs forward.

        Past the last block, it is while the loss is computed.
        """
        run = self.run
        here = self.over(position, position + 1, self.unit)
        last = min(position, self.count - 1)
        latest = self.over(last, last + 1, self.unit)
        if self.no_gather:
            live = latest
        elif run.reshard:
            live = here
        else:  # nothing is freed after use
            live = self.over(0, position + 1, self.unit)
        if run.engine == "fsdp2" and run.shard > 1:
            # FSDP2 keeps the output of a gather until the next gather
            live += latest if latest else self.root
        if run.forward_prefetch:
            live += self.over(position + 1, position + 2, self.unit)
        return (self.root + live) * self.cast

    def gathered_in_backward(self, position: int) -> float:
        """Count the full parameters while block `position` runs backward."""
        first = 0
        if self.no_gather:
            first = position
        elif self.run.reshard:
            first = position if self.run.prefetch == "none" else position - 1
        return (self.root + self.over(first, position + 1, self.unit)) * self.cast

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
        each all-reduced shard until the end of backward (_fsdp_param_group.py).
        """
        run = self.run
        size = BYTES[run.reduce_dtype]
        if run.buckets:
            # with a 16-bit reduce dtype, the compression hook has a copy of one bucket
            return max(ddp_buckets(run)) * size if size < FP32 else 0
        if run.engine != "fsdp2":
            return 0
        held = self.over(position + 1, position + 2, self.unit) * size
        if size < FP32 and run.replicated:
            held += self.over(position + 1, self.count, self.unit) / run.shard * size
        return held

    def saved_activations(self, position: int) -> float:
        """Count what the blocks before `position` and the layers outside the blocks have saved."""
        run = self.run
        size = run.compute_bytes
        e = self.memory["encoder"].e
        visible = run.tokens["encoder"] - 1
        pixels = run.config.channels * run.config.patch**2
        total = self.over(0, position, {part: m.saved for part, m in self.memory.items()})
        total += run.batch * visible * (pixels * size + 8)  # patches embedded, their indices
        if run.encoder_only:
            return total + (e if position == self.count else 0)
        if position > self.depth:
            total += 2 * e  # the encoder's last norm: its input and output
        if position == self.count:  # the decoder's norm, the difference to the target
            total += 2 * self.memory["decoder"].e + self.pixels
        return total

    def pending(self, position: int) -> float:
        """Count the freed memory that another stream still uses at a block's backward (FSDP1)."""
        run = self.run
        late = 1 - position / max(1, self.count - 1)
        if run.engine != "fsdp1":
            return 0.0
        if run.shard == 1:
            inside = self.over(0, self.count, self.numel if self.unit else {})
            return late * PENDING_NO_SHARD_BYTES * inside
        units = PENDING_EARLY_UNITS + late * (PENDING_LATE_UNITS - PENDING_EARLY_UNITS)
        return max(self.unit.values(), default=0) * run.compute_bytes * units

    # -- moments

    def snapshot(self, name: str, pending: float = 0.0, **parts: float) -> MemorySnapshot:
        """Add these parts to the states, which are live all the time."""
        sizes = dict.fromkeys(MEMORY_PARTS, 0.0) | self.states
        for part, size in parts.items():
            sizes[part] += size
        return MemorySnapshot(name, sizes, pending)

    def block(self, position: int) -> tuple[str, str]:
        """Return the name of a block in the model, and its part."""
        if position < self.depth:
            return f"blocks.{position}", "encoder"
        return f"decoder_blocks.{position - self.depth}", "decoder"

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
                block, part = self.block(position)
                name = f"forward of {block}"
                inside = self.memory[part].saved + self.memory[part].forward
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
            yield self.reduce_snapshot("root", -1, self.root, self.root * self.cast)
        yield self.snapshot("optimizer step", gradients=self.gradients(self.all))

    def backward(self, position: int) -> Iterator[MemorySnapshot]:
        """Walk through one block's backward and the reduction of its gradients."""
        run = self.run
        name, part = self.block(position)
        memory = self.memory[part]
        saved = self.saved_activations(position)
        live = self.gathered_in_backward(position) + self.root_gradients(position)
        largest = max(self.blocks[part].sizes)
        for activations, gradients in memory.backward:
            if run.engine == "ddp":  # gradients are fp32, and stay where they are written
                allocated = run.buckets or run.accum > 1  # before this backward pass
                gradients = FP32 * (largest if allocated else gradients // run.compute_bytes)
                gradients += largest * run.compute_bytes if run.autocast else 0
            yield self.snapshot(
                f"backward of {name}",
                self.pending(position),
                gradients=self.gradients(self.over(position + 1, self.count, self.unit)),
                unsharded=live + gradients,
                activations=saved + activations,
                reduction=self.reduce_buffers(position),
            )
        if run.engine != "ddp" and self.unit:
            yield self.reduce_snapshot(name, position, self.unit[part], live, saved + 2 * memory.e)

    def root_gradients(self, position: int) -> float:
        """Count the unreduced gradients of the root, which under --wrap root has all blocks."""
        size = self.run.compute_bytes
        inside = {} if self.unit else self.numel
        every = self.over(0, self.count, inside)
        later = self.over(position + 1, self.count, inside)
        return max(0, self.root * self.cast - every * size) + later * size

    def reduce_snapshot(
        self, name: str, position: int, numel: float, unsharded: float, activations: float = 0
    ) -> MemorySnapshot:
        """Count what is live while the gradients of a unit are reduced.

        The blocks after `position` are done. The unit's parameters are freed by then; its gradients
        take their place in `unsharded`. FSDP2 frees these too before it makes their shard.
        """
        run = self.run
        size = BYTES[run.reduce_dtype]
        copy = size if run.engine == "fsdp2" or size != run.compute_bytes else 0
        done = self.over(position + 1, self.count, self.unit)
        return self.snapshot(
            f"reduction of {name}",
            self.pending(max(position, 0)),
            gradients=self.gradients(done if run.engine == "fsdp2" else done + numel),
            unsharded=unsharded,
            activations=activations,
            reduction=numel * copy,
        )


def states_held(run: PlannedRun) -> float:
    """Count the elements of the parameters whose optimizer states a rank holds.

    Under ZeRO-1 that is about an equal share: ZeroRedundancyOptimizer assigns whole tensors.
    """
    units = run_units(run)
    if run.zero1:
        equal = sum(unit.numel * unit.count for unit in units) / run.world_size
        return max(equal, *(max(unit.sizes) for unit in units))
    return sum(unit.padded(run) * unit.count for unit in units) / run.shard


# --- Host memory
#
# --cpu-offload and --async-save use pinned memory, which a GPU copies to and from at full speed.
# PyTorch rounds each pinned block up to a power of two (see torch.cuda.memory.host_memory_stats): a
# tensor of 9 MB takes 16 MB.


def shards(run: PlannedRun) -> Iterator[tuple[int, int]]:
    """Yield (bytes, count) of the fp32 tensors that hold a rank's parameters.

    FSDP2 shards each parameter, FSDP1 the flat parameter of each unit; DDP shards none.
    """
    for unit in run_units(run):
        if run.engine == "fsdp1":
            yield FP32 * unit.padded(run) // run.shard, unit.count
            continue
        for shape, size in zip(unit.shapes, unit.sizes, strict=True):
            rows = math.ceil(shape[0] / run.shard)
            yield FP32 * rows * (size // shape[0]), unit.count


def host_bytes(run: PlannedRun) -> dict[str, float]:
    """Count the bytes of a rank in host memory, by the flag that needs them.

    --cpu-offload keeps parameters and gradients in pinned memory, AdamW's two moments in ordinary
    memory. --async-save makes a pinned copy of the parameters and moments that this rank holds.
    """
    plain = pinned = 0
    for size, count in shards(run):
        plain += size * count
        pinned += 2 ** (size - 1).bit_length() * count  # the next power of two
    found: dict[str, float] = {}
    if run.cpu_offload:
        found["--cpu-offload"] = 2 * pinned + 2 * plain
    if run.async_save:
        # Under ZeRO-1 a rank holds, and saves, only its share of the moments.
        moments = 2 * FP32 * states_held(run) * pinned / plain
        found["--async-save"] = pinned + moments
    return found
