"""The plan of a run: does it fit, what does it send, how fast can it be at best.

The plan is made by arithmetic alone, for any number of ranks: no GPU, no process group.
planner/traffic.py and planner/memory.py say what a step needs, planner/machines.py what a machine
gives.

`peak` is live tensors (CUDA's max_memory_allocated); `peak_active` also counts freed memory that
another stream still uses, as under FSDP1. The allocator's fragmentation, the context and RCCL's or
NCCL's buffers are in neither: `margin_gib` stands for them. The step time is a lower bound: nothing
waits for data, a slow rank or a disk.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import mesh
import shard
import vit
from planner.machines import MACHINES, Machine, build_ring, collective_seconds
from planner.memory import GIB, MemorySnapshot, StepMemory, largest_partition, pending_bytes
from planner.traffic import (
    ACTIVATIONS,
    PlannedRun,
    collectives,
    host_copy_bytes,
    link_bytes,
    model_units,
    run_units,
)
from runtime.run import check_masking, check_tensor_parallel

# ---------------------------------------------------------------------------------------------
# Does it fit

# What no tensor shows: the device's context and RCCL's or NCCL's buffers, then the allocator's
# fragmentation as a share of the peak. Experience, not fitted.
CONTEXT_GIB, FRAGMENTATION = 1.5, 0.04
VERDICTS = ("FITS", "TIGHT", "NO")  # with the whole margin, with the context alone, not at all
MOST_IMAGES = 2**20  # largest local batch that is tried


def fit_verdict(peak_gib: float, memory_gib: float) -> str:
    """Compare a peak of live tensors with the memory of a rank: one of VERDICTS."""
    if peak_gib * (1 + FRAGMENTATION) + CONTEXT_GIB <= memory_gib:
        return "FITS"
    return "TIGHT" if peak_gib + CONTEXT_GIB <= memory_gib else "NO"


def max_local_batch(run: PlannedRun, machine: Machine, memory_gib: float) -> int:
    """Find the largest local batch with the verdict FITS, 0 if there is none."""

    def too_large(batch: int) -> bool:
        snapshots = StepMemory(replace(run, batch=batch), machine).snapshots()
        return fit_verdict(max(s.total for s in snapshots) / GIB, memory_gib) != "FITS"

    return bisect_left(range(1, MOST_IMAGES), True, key=too_large)


# ---------------------------------------------------------------------------------------------
# Time


@dataclass(frozen=True)
class StepTime:
    """Seconds per step: a lower bound, as nothing waits for data, a slow rank or a disk."""

    compute: float
    communication: float  # all collectives, one after the other
    exposed: float  # the part of it that does not overlap with compute
    optimizer: float
    step: float


def rank_flops(run: PlannedRun, recompute: bool) -> float:
    """Floating-point operations of a rank per step; with `recompute` those that --ac makes again.

    Of matrix products alone, which --ac selective does not repeat (vit.flops_per_image).
    """
    config, again = run.config, recompute and run.ac == "full"
    if run.encoder_only:
        config = replace(config, decoder_width=0, decoder_depth=0)
    config = replace(config, depth=config.depth - run.freeze_blocks)
    # tensor parallelism splits the blocks, not the layers around them
    ends = replace(config, depth=0, decoder_depth=0)
    around = vit.flops_per_image(ends, run.img_size, run.mask_ratio)
    whole = vit.flops_per_image(config, run.img_size, run.mask_ratio, again)
    trained = (0 if run.freeze_blocks else around) + (whole - around) / run.tp
    return run.accum * run.batch * trained + frozen_flops(run)


def frozen_flops(run: PlannedRun) -> float:
    """Floating-point operations of a rank per step in frozen layers: of their forward pass alone.

    That is half the training of the patch embedding and a third of a block's (vit.flops_per_image).
    """
    ends = replace(run.config, depth=0, decoder_width=0, decoder_depth=0)
    embed, whole = (
        vit.flops_per_image(replace(ends, depth=depth), run.img_size, run.mask_ratio)
        for depth in (0, run.freeze_blocks)
    )
    forward = embed / 2 + (whole - embed) / 3
    return run.accum * run.batch * forward if run.freeze_blocks else 0


def forward_backward_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds per step of forward and backward, over all accumulation steps.

    Matmuls run at a share of the peak; everything else (norms, GELU, softmax, sums) takes a time
    per token and block. Full checkpointing runs the blocks' forward again: 4 passes instead of 3.
    """
    layers = {"encoder": run.config.depth - run.freeze_blocks}
    layers |= {} if run.encoder_only else {"decoder": run.config.decoder_depth}
    tokens = run.accum * run.batch * sum(run.tokens(part) * n for part, n in layers.items())
    passes = 4 / 3 if run.ac == "full" else 1
    peak = machine.peak_flops * (1 if run.precision != "fp32" else machine.fp32_share)
    frozen = frozen_flops(run)
    matmuls = (rank_flops(run, recompute=False) - frozen) / (peak * machine.efficiency)
    seconds = passes * (matmuls + tokens * machine.token_layer_seconds)
    # what is frozen: forward, a third
    tokens = run.accum * run.batch * run.tokens("encoder") * run.freeze_blocks
    forward = frozen / (peak * machine.efficiency) + tokens * machine.token_layer_seconds / 3
    return seconds + forward


def communication_seconds(run: PlannedRun, machine: Machine) -> tuple[float, float]:
    """Seconds per step of all collectives, one after the other, and of those without overlap.

    The root unit is gathered before the forward pass and reduced after the backward pass, when
    there is nothing to compute. Of its collectives only the share of blocks counts, under `wrap`
    root: the layers outside of blocks are small, and the fitted constants have them.
    Each block waits for the sums of tensor parallelism.
    """
    total = of_root = of_activations = 0.0
    for c in collectives(run):
        ring = build_ring(machine, run.world_size, c.ranks, c.stride)
        seconds = c.count * collective_seconds(machine, c.kind, c.payload, ring)
        total += seconds
        of_root += seconds if c.unit == "root" else 0.0
        of_activations += seconds if c.unit.endswith(ACTIVATIONS) else 0.0
    root, outside = run_units(run)[0].numel, model_units(run.config, run.encoder_only)[0].numel
    return total, of_activations + of_root * max(0, root - outside) / root


def optimizer_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds per step of AdamW, which reads 4 + 4 + 8 and writes 4 + 8 bytes per parameter."""
    numel = sum(unit.numel for unit in run_units(run) if unit.trains)
    held = largest_partition(run) if run.mode == "zero1" else numel / run.shard
    on_host = machine.host_bytes_per_second
    return 28 * held / (on_host if run.cpu_offload else machine.optimizer_bytes_per_second)


def step_time(run: PlannedRun, machine: Machine, measured_ips: float | None = None) -> StepTime:
    """Estimate the time of a step.

    Communication overlaps with compute, except for a share of it and for what is longer than
    compute. From node to node a job loses a little more, whatever it sends. With `measured_ips`,
    images/s measured on one node under the same flags, the estimate starts from there.
    """
    compute = forward_backward_seconds(run, machine)
    communication, alone = communication_seconds(run, machine)
    optimizer = optimizer_seconds(run, machine)
    if measured_ips:
        node = one_node(run, machine)
        compute += node.data_ranks * run.batch * run.accum / measured_ips
        compute = max(0.0, compute - step_time(node, machine).step)
    exposed = communication - min(communication - alone, compute) * machine.hidden_share
    nodes = max(1.0, run.world_size / machine.ranks_per_node)
    step = (compute + exposed + optimizer) * (1 + machine.doubling_loss * math.log2(nodes))
    return StepTime(compute, communication, exposed, optimizer, step)


def one_node(run: PlannedRun, machine: Machine) -> PlannedRun:
    """Make the same run on one node; a shard group wider than the node becomes the node."""
    data_ranks = max(1, min(machine.ranks_per_node, run.world_size) // run.tp)
    if run.group is None:
        return replace(run, world_size=data_ranks * run.tp)
    group = min(run.group, data_ranks)
    return replace(run, group=group, world_size=data_ranks // group * group * run.tp)


# ---------------------------------------------------------------------------------------------
# The plan

PHASES = ("forward", "loss", "backward", "reduction", "optimizer")


@dataclass(frozen=True)
class Plan:
    """Memory, traffic and time of one run."""

    run: PlannedRun
    machine: Machine
    memory_gib: float  # per rank
    snapshots: list[MemorySnapshot] = field(repr=False)
    time: StepTime

    @property
    def peak(self) -> MemorySnapshot:
        """The moment with most live memory."""
        return max(self.snapshots, key=lambda snapshot: snapshot.total)

    @property
    def peak_gib(self) -> float:
        """Live tensors, CUDA's max_memory_allocated."""
        return self.peak.total / GIB

    @property
    def peak_active_gib(self) -> float:
        """Live tensors and freed ones that another stream still uses."""
        return max(s.total + pending_bytes(self.run, s) for s in self.snapshots) / GIB

    @property
    def verdict(self) -> str:
        """FITS, TIGHT or NO."""
        return fit_verdict(self.peak_gib, self.memory_gib)

    @property
    def margin_gib(self) -> float:
        """What FITS leaves free beyond the peak."""
        return CONTEXT_GIB + FRAGMENTATION * self.peak_gib

    @cached_property
    def max_local_batch(self) -> int:
        """The largest local batch with the verdict FITS, 0 if there is none."""
        return max_local_batch(self.run, self.machine, self.memory_gib)

    @property
    def fit(self) -> str:
        """The verdict and its reason, in a sentence."""
        return (
            f"{self.verdict}: {self.peak_gib:.1f} GiB at the peak ({self.peak.name}) + "
            f"{self.margin_gib:.1f} margin, of {self.memory_gib:.4g}; largest local batch "
            f"{self.max_local_batch}"
        )

    @property
    def images_per_second(self) -> float:
        """Images per second of the whole job, at most."""
        return self.run.data_ranks * self.run.batch * self.run.accum / self.time.step

    @property
    def efficiency(self) -> float:
        """Images/s of a rank against one that does the same work alone and sends nothing."""
        return (self.time.compute + self.time.optimizer) / self.time.step

    @property
    def label(self) -> str:
        """Mode and group: `hybrid 4`, or the mode alone."""
        return self.run.mode if self.run.group is None else f"{self.run.mode} {self.run.group}"

    def phase_peaks(self) -> list[MemorySnapshot]:
        """Find the largest moment of each of PHASES, the largest of all where it has none."""
        found = []
        for phase in PHASES:
            moments = [s for s in self.snapshots if s.name.startswith(phase)] or self.snapshots
            found.append(max(moments, key=lambda snapshot: snapshot.total))
        return found

    def json(self) -> dict[str, Any]:
        """Collect all numbers, under keys that other programs rely on (`plan.py --json`)."""
        run, sent = self.run, collectives(self.run)
        kinds = sorted({c.kind for c in sent})
        memory = {part: size / GIB for part, size in self.peak.bytes.items()}
        return {
            "params": sum(u.numel for u in model_units(run.config, run.encoder_only)),
            "mesh": {"replicate": run.replicate, "shard": run.shard, "tp": run.tp},
            "memory_gib": memory | {"peak": self.peak_gib, "peak_active": self.peak_active_gib},
            "peak_moment": self.peak.name,
            "margin_gib": self.margin_gib,
            "available_gib": self.memory_gib,
            "verdict": self.verdict,
            "max_local_batch": self.max_local_batch,
            "traffic_bytes_per_rank": link_bytes(run, self.machine),
            "payload_bytes": {
                k: sum(c.payload * c.count for c in sent if c.kind == k) for k in kinds
            },
            "collectives": {k: sum(c.count for c in sent if c.kind == k) for k in kinds},
            "flops_per_rank": rank_flops(run, recompute=False),
            "hardware_flops_per_rank": rank_flops(run, recompute=True),
            "host_copy_bytes_per_rank": host_copy_bytes(run),
            "seconds": asdict(self.time),
            "step_seconds_lower_bound": self.time.step,
            "images_per_second_upper_bound": self.images_per_second,
            "efficiency": self.efficiency,
            "machine": self.machine.name,
            "constants_fitted_on_frontier": self.machine.fitted,
            "constants_guessed": self.machine.guesses,
            "moments": [
                {"name": s.name, "gib": {part: size / GIB for part, size in s.bytes.items()}}
                for s in self.phase_peaks()
            ],
        }


def check_frozen(run: PlannedRun) -> None:
    """Raise ValueError where frozen blocks cannot be planned."""
    frozen, depth = f"--freeze-blocks {run.freeze_blocks}", run.config.depth
    if not run.encoder_only:
        raise ValueError(f"{frozen} is for fine-tuning: add --encoder-only --mask-ratio 0")
    if run.freeze_blocks > depth:
        raise ValueError(f"{frozen}: the model has {depth} blocks")
    if run.tp > 1 or run.wrap != "block":
        raise ValueError(f"{frozen} is planned for whole blocks: leave out --tp and --wrap")


def make_plan(
    run: PlannedRun,
    machine: Machine = MACHINES["frontier"],
    memory_gib: float | None = None,
    measured_ips: float | None = None,
) -> Plan:
    """Plan a run. ValueError, one sentence, where its flags clash.

    `memory_gib` is that of a rank, by default the machine's. `measured_ips`: see `step_time`.
    """
    check_tensor_parallel(run.config, run.world_size, run.tp)
    mesh.check_group(run.data_ranks, run.shard)
    if run.freeze_blocks:
        check_frozen(run)
    if not run.encoder_only:
        check_masking(run.config, run.img_size, run.mask_ratio)
    memory_gib = machine.memory_gib if memory_gib is None else memory_gib
    snapshots = list(StepMemory(run, machine).snapshots())
    return Plan(run, machine, memory_gib, snapshots, step_time(run, machine, measured_ips))


# ---------------------------------------------------------------------------------------------
# Comparing

TIE = 0.05  # runs with the same flags differ by more than this from day to day


def group_sizes(run: PlannedRun, machine: Machine) -> list[int]:
    """List the shard groups to compare: divisors of the ranks that fit into nodes or fill them."""
    node = max(1, machine.ranks_per_node // run.tp)
    sizes = mesh.divisors(run.data_ranks)[1:-1]
    return [g for g in sizes if node % g == 0 or g % node == 0]


def compare(base: Plan, measured_ips: float | None = None) -> list[Plan]:
    """Plan every mode and group for the run of a plan; best first, what does not fit last."""
    run, plans = base.run, []
    for mode, row in shard.STRATEGIES.items():
        grouped, ddp = row.group == "group", row.engine != "fsdp"
        if ddp and run.tp > 1:
            continue
        for group in group_sizes(run, base.machine) if grouped else [None]:
            other = replace(
                run,
                mode=mode,
                group=group,
                # an option that the mode does not have is left at its default
                cpu_offload=run.cpu_offload and not ddp,
                bucket_cap_mb=run.bucket_cap_mb if ddp else None,
            )
            plans.append(make_plan(other, base.machine, base.memory_gib, measured_ips))
    return sorted(plans, key=lambda p: (VERDICTS.index(p.verdict), -p.images_per_second))


def reason(plan: Plan, plans: Sequence[Plan]) -> str:
    """Say why a plan of a comparison is not the one to take, or that it is as good as the first."""
    best = plans[0]
    if plan.verdict == "NO":
        over = plan.peak_gib + CONTEXT_GIB - plan.memory_gib
        return f"out: {over:.1f} GiB too much in {plan.peak.name}"
    if plan.verdict == "TIGHT":
        return "fits, but without the margin for fragmentation"
    behind = 1 - plan.images_per_second / best.images_per_second
    if behind <= TIE:
        return "best" if plan is best else f"tie: {behind:.0%} behind"
    why = "exposed communication" if plan.time.exposed > best.time.exposed else "optimizer"
    return f"{behind:.0%} slower: {why}"
