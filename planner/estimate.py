"""Does a run fit, with which local batch at most, how much does it send, how fast can it be."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import mesh
import shard
import vit
from planner.machines import MACHINES, Machine, collective_seconds, ring
from planner.memory import GIB, Moment, StepMemory, largest_partition, pending_bytes
from planner.traffic import Run, collectives, link_bytes, model_units, token_count
from runtime import flags

# ---------------------------------------------------------------------------------------------
# Does it fit

# What no tensor shows: the device's context and RCCL's or NCCL's buffers, then the allocator's
# fragmentation as a share of the peak. Experience, not fitted.
CONTEXT_GIB, FRAGMENTATION = 1.5, 0.04


def verdict(peak_gib: float, memory_gib: float) -> str:
    """FITS with the whole margin; TIGHT with the context alone; else NO."""
    if peak_gib * (1 + FRAGMENTATION) + CONTEXT_GIB <= memory_gib:
        return "FITS"
    return "TIGHT" if peak_gib + CONTEXT_GIB <= memory_gib else "NO"


def peak_moment(run: Run, machine: Machine) -> Moment:
    """The moment with most live memory."""
    return max(StepMemory(run, machine).moments(), key=lambda moment: moment.total)


def max_local_batch(run: Run, machine: Machine, memory_gib: float) -> int:
    """The largest local batch with the verdict FITS, 0 if there is none; by halving."""

    def fits(batch: int) -> bool:
        peak = peak_moment(replace(run, local_batch=batch), machine).total / GIB
        return verdict(peak, memory_gib) == "FITS"

    low, high = 0, 1
    while high < 2**20 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ---------------------------------------------------------------------------------------------
# Speed


@dataclass(frozen=True)
class Speed:
    """Seconds of a step: a lower bound, as nothing here waits for data, a slow rank or a disk."""

    compute: float
    communication: float  # of all collectives, one after the other
    exposed: float  # what of it does not run behind compute
    optimizer: float
    step: float


def compute_seconds(run: Run, machine: Machine) -> float:
    """Forward and backward of all accumulation steps.

    Matrix products at a share of the peak, and for all else (norms, GELU, softmax, sums) a time
    for each token and block. Full checkpointing runs the blocks' forward again: 4 passes for 3.
    """
    config = run.config
    if run.encoder_only:
        config = replace(config, decoder_width=0, decoder_depth=0)
    flops = vit.flops_per_image(config, run.img_size, run.mask_ratio)
    tokens = token_count(run, "encoder") * config.depth
    if config.decoder_depth:
        tokens += token_count(run, "decoder") * config.decoder_depth
    again = 4 / 3 if run.ac == "full" else 1
    peak = machine.peak_flops * (1 if run.precision != "fp32" else machine.fp32_share)
    each = flops / (peak * machine.efficiency) + tokens * machine.token_layer_seconds
    return run.accum * run.local_batch * again * each


def speed(run: Run, machine: Machine, measured_ips: float | None = None) -> Speed:
    """Of a step; with `measured_ips`, images/s of one node under the same flags, from there on.

    What could run behind compute does so but for a share; what is longer than compute never can.
    From node to node a job loses a little more, whatever it sends.
    """
    compute = compute_seconds(run, machine)
    communication = sum(
        c.count
        * collective_seconds(
            machine, c.kind, c.payload, ring(machine, run.world_size, c.ranks, c.stride)
        )
        for c in collectives(run)
    )
    held = (
        largest_partition(run)
        if run.mode == "zero1"
        else (sum(u.numel for u in model_units(run.config, run.encoder_only)) / run.shard)
    )
    rate = (
        machine.optimizer_bytes_per_second
        if not run.cpu_offload
        else (machine.host_bytes_per_second)
    )
    optimizer = 28 * held / rate  # reads 4 + 4 + 8, writes 4 + 8 bytes a parameter
    if measured_ips:
        node = one_node(run, machine)
        compute += node.world_size * run.local_batch * run.accum / measured_ips
        compute = max(0.0, compute - speed(node, machine).step)
    hidden = min(communication, compute) * machine.hidden_share
    exposed = communication - hidden
    nodes = max(1.0, run.world_size / machine.ranks_per_node)
    step = (compute + exposed + optimizer) * (1 + machine.doubling_loss * math.log2(nodes))
    return Speed(compute, communication, exposed, optimizer, step)


def one_node(run: Run, machine: Machine) -> Run:
    """The same run on one node; a shard group wider than it becomes the node."""
    ranks = min(machine.ranks_per_node, run.world_size)
    size = min(run.shard, ranks) if run.shard < run.world_size else ranks
    size = size if run.shard > 1 else 1
    return replace(run, replicate=ranks // size, shard=size)


# ---------------------------------------------------------------------------------------------
# The plan


@dataclass(frozen=True)
class Plan:
    """What was found for one run."""

    run: Run
    machine: Machine
    memory_gib: float
    moments: list[Moment] = field(repr=False)
    speed: Speed

    @property
    def peak(self) -> Moment:
        """The moment with most live memory."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak_gib(self) -> float:
        """Live tensors, CUDA's max_memory_allocated."""
        return self.peak.total / GIB

    @property
    def peak_active_gib(self) -> float:
        """Live tensors and freed ones that wait for another stream."""
        return max(m.total + pending_bytes(self.run, m) for m in self.moments) / GIB

    @property
    def verdict(self) -> str:
        """FITS, TIGHT or NO."""
        return verdict(self.peak_gib, self.memory_gib)

    @property
    def images_per_second(self) -> float:
        """Of the whole job, at most."""
        run = self.run
        return run.world_size * run.local_batch * run.accum / self.speed.step

    @property
    def efficiency(self) -> float:
        """Images/s of a rank against one that does the same work alone and sends nothing."""
        return (self.speed.compute + self.speed.optimizer) / self.speed.step

    def json(self) -> dict[str, Any]:
        """The keys that other programs rely on; see `python plan.py --json`."""
        run, sent = self.run, collectives(self.run)
        kinds = sorted({c.kind for c in sent})
        parts = {key: value / GIB for key, value in self.peak.bytes.items()}
        shown = [phase_peak(self.moments, phase) for phase in PHASES]
        return {
            "params": sum(u.numel for u in model_units(run.config, run.encoder_only)),
            "mesh": {"replicate": run.replicate, "shard": run.shard},
            "memory_gib": parts | {"peak": self.peak_gib, "peak_active": self.peak_active_gib},
            "peak_moment": self.peak.name,
            "margin_gib": CONTEXT_GIB + FRAGMENTATION * self.peak_gib,
            "available_gib": self.memory_gib,
            "verdict": self.verdict,
            "max_local_batch": max_local_batch(run, self.machine, self.memory_gib),
            "traffic_bytes_per_rank": link_bytes(run, self.machine),
            "payload_bytes": {
                k: sum(c.payload * c.count for c in sent if c.kind == k) for k in kinds
            },
            "collectives": {k: sum(c.count for c in sent if c.kind == k) for k in kinds},
            "seconds": asdict(self.speed),
            "step_seconds_lower_bound": self.speed.step,
            "images_per_second_upper_bound": self.images_per_second,
            "efficiency": self.efficiency,
            "moments": [
                {"name": m.name, "gib": {k: v / GIB for k, v in m.bytes.items()}} for m in shown
            ],
        }


PHASES = ("forward", "loss", "backward", "reduction", "optimizer")


def phase_peak(moments: Sequence[Moment], phase: str) -> Moment:
    """The largest moment of a phase, the largest of all where the phase has none."""
    found = [m for m in moments if m.name.startswith(phase)] or list(moments)
    return max(found, key=lambda moment: moment.total)


def estimate(
    config: vit.ViTConfig,
    *,
    img_size: int,
    mask_ratio: float,
    mode: str,
    group: int | None,
    fsdp: int | None,
    world_size: int,
    local_batch: int,
    accum: int = 1,
    precision: str = "bf16",
    reduce_dtype: str = "fp32",
    ac: str = "none",
    prefetch: str | None = "backward_pre",
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    cpu_offload: bool = False,
    bucket_cap_mb: float | None = None,
    encoder_only: bool = False,
    memory_gib: float | None = None,
    machine: Machine = MACHINES["frontier"],
    measured_ips: float | None = None,
) -> Plan:
    """The plan of a run, from the flags of train_fsdp.py; ValueError, a sentence, for nonsense.

    `group` is for the hybrid modes, None there: the ranks of a node. `memory_gib` is of one rank,
    None: the machine's. `limit_all_gathers` changes neither bytes nor live memory.
    """
    memory_gib = machine.memory_gib if memory_gib is None else memory_gib
    if mode in shard.STRATEGIES and shard.STRATEGIES[mode].group == "group" and group is None:
        group = min(machine.ranks_per_node, world_size)
    replicate, size = shard.mesh_shape(mode, world_size, group)
    mesh.check_group(world_size, size)
    if not encoder_only:
        flags.check_masking(config, img_size, mask_ratio)
    run = Run(
        config,
        img_size,
        mask_ratio,
        mode,
        fsdp or 2,
        replicate,
        size,
        local_batch,
        accum,
        precision,
        reduce_dtype,
        ac,
        prefetch or "backward_pre",
        forward_prefetch,
        cpu_offload,
        bucket_cap_mb,
        encoder_only,
    )
    return plan_of(run, machine, memory_gib, measured_ips)


def plan_of(
    run: Run, machine: Machine, memory_gib: float, measured_ips: float | None = None
) -> Plan:
    """The plan of a run that makes sense."""
    moments = list(StepMemory(run, machine).moments())
    return Plan(run, machine, memory_gib, moments, speed(run, machine, measured_ips))


# ---------------------------------------------------------------------------------------------
# Comparing


def group_sizes(world_size: int, machine: Machine) -> list[int]:
    """Shard groups worth a look: they divide the world, and a node or are made of whole nodes."""
    node = machine.ranks_per_node
    sizes = mesh.divisors(world_size)[1:-1]
    return [g for g in sizes if node % g == 0 or g % node == 0]


def compare(base: Plan, measured_ips: float | None = None) -> list[Plan]:
    """Every mode and group for the run of a plan, best first; what does not fit last."""
    run, plans = base.run, []
    for mode, row in shard.STRATEGIES.items():
        groups = group_sizes(run.world_size, base.machine) if row.group == "group" else [None]
        for group in groups:
            replicate, size = shard.mesh_shape(mode, run.world_size, group)
            # what the mode has not is left at its default
            offload = run.cpu_offload and row.fsdp1 is not None
            cap = run.bucket_cap_mb if row.fsdp1 is None else None
            other = replace(
                run,
                mode=mode,
                replicate=replicate,
                shard=size,
                cpu_offload=offload,
                bucket_cap_mb=cap,
            )
            plans.append(plan_of(other, base.machine, base.memory_gib, measured_ips))
    order = ["FITS", "TIGHT", "NO"]
    return sorted(plans, key=lambda p: (order.index(p.verdict), -p.images_per_second))


TIE = 0.05  # runs of one setting scatter by more than this from day to day


def reason(plan: Plan, best: Plan) -> str:
    """Why a row of the comparison is not the one to take, or that it is as good."""
    if plan.verdict == "NO":
        over = plan.peak_gib + CONTEXT_GIB - plan.memory_gib
        return f"out: {over:.1f} GiB too much in {plan.peak.name}"
    if plan.verdict == "TIGHT":
        return "fits, but without the margin for fragmentation"
    behind = 1 - plan.images_per_second / best.images_per_second
    if behind <= TIE:
        return "best" if plan is best else f"tie: {behind:.0%} behind"
    why = "exposed communication" if plan.speed.exposed > best.speed.exposed else "optimizer"
    return f"{behind:.0%} slower: {why}"
