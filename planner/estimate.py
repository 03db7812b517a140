"""Plan a run: whether it fits, what it sends, how fast it can be at best.

`peak` counts live tensors (CUDA's max_memory_allocated); `peak_active` also counts freed memory
that another stream still uses, as under FSDP1. Neither contains fragmentation, the device's context
and the buffers of RCCL or NCCL: `margin_gib` allows for them. The step time is a lower bound, in
which nothing waits for data, a slow rank or a disk.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

import mesh
import shard
import vit
from planner.machines import (
    LINKS,
    BlockSpeed,
    Machine,
    nearest_machine,
    read_machine,
    ring_links,
    rings_leaving_node,
    wire_bytes,
    with_ranks_per_node,
)
from planner.memory import GIB, StepMemory, host_bytes, states_held
from planner.traffic import (
    ACTIVATIONS,
    PlannedCollective,
    PlannedRun,
    collectives,
    link_bytes,
    model_units,
    run_units,
)
from runtime import devices

# --- Does it fit

# Memory outside of tensors: the device's context and the buffers of RCCL or NCCL, then the
# allocator's fragmentation, as a share of the peak. Both are experience, not fitted.
CONTEXT_GIB = 1.5
FRAGMENTATION = 0.04
VERDICTS = ("FITS", "TIGHT", "NO")  # fits with the whole margin, only with the context, not at all
MAX_IMAGES = 2**20  # largest local batch that is tried


# --- Time


def forward_backward_seconds(run: PlannedRun, machine: Machine) -> float:
    """Estimate the seconds that forward and backward of a step take, over all accumulation steps.

    Full checkpointing runs the forward pass of the blocks again: 4 passes instead of 3.
    """
    passes = 4 / 3 if run.ac == "full" else 1
    if machine.blocks:
        return run.accum * passes * measured_compute_seconds(run, machine)
    return run.accum * run.batch * fitted_image_seconds(run, machine) * passes


def fitted_image_seconds(run: PlannedRun, machine: Machine) -> float:
    """Estimate the seconds that one image takes, without checkpointing, from fitted constants.

    Matmuls reach a share of the peak; everything else (norms, GELU, softmax, sums) takes a constant
    time per token and block.
    """
    config = run.config
    if run.encoder_only:
        config = replace(config, decoder_width=0, decoder_depth=0)
    flops = vit.flops_per_image(config, run.img_size, run.mask_ratio) / run.tp
    peak = machine.peak_flops
    if run.precision == "fp32":
        peak *= machine.fp32_share
    _, *layers = model_units(run.config, run.encoder_only)
    tokens = sum(run.tokens[unit.part] * unit.count for unit in layers)
    return flops / (peak * machine.efficiency) + tokens * machine.token_layer_seconds


def measured_compute_seconds(run: PlannedRun, machine: Machine) -> float:
    """Estimate the seconds of one accumulation step, without checkpointing, on a measured machine.

    The host launches kernels while its GPU computes, so the slower of the two counts. A CPU does
    one after the other, so their sum counts.
    """
    speed = machine.block_speed(run.precision)
    c = run.config
    _, *layers = model_units(c, run.encoder_only, run.tp)
    device = machine.root_seconds
    host = 0.0
    for unit in layers:
        width = run.widths[unit.part]
        heads = run.heads[unit.part]
        tokens = run.tokens[unit.part]
        size = BlockSize(run.batch, tokens, width, heads / run.tp, unit.numel, width // heads)
        device += unit.count * block_seconds(size, speed)
        host += unit.count * speed.host_seconds
    # the layers outside the blocks: embeddings and predictions
    if run.encoder_only:
        c = replace(c, decoder_width=0)
    outside = replace(c, depth=0, decoder_depth=0)
    flops = vit.flops_per_image(outside, run.img_size, run.mask_ratio)
    device += run.batch * flops / speed.flops_per_second
    if run.engine != "ddp":
        host += machine.unit_seconds * sum(unit.count for unit in run_units(run))
    if machine.device == "cpu":
        return device + host
    return max(device, host)


@dataclass(frozen=True)
class BlockSize:
    """The sizes on which the time of one block depends."""

    images: int
    tokens: int  # per image
    width: int
    heads: float  # on this rank
    parameters: int  # on this rank
    head_width: int

    def counts(self) -> tuple[float, ...]:
        """Count FLOPs, features, scores, weights and blocks, for the fields of BlockSpeed."""
        tokens = self.images * self.tokens
        scores = tokens * self.tokens * self.heads
        # 3 passes (backward is twice the forward) of multiply-adds (2 FLOPs each): the matrices,
        # then the scores and the weighted values
        flops = 3 * 2 * (tokens * self.parameters + 2 * scores * self.head_width)
        return flops, tokens * self.width, scores, self.parameters, 1


def block_seconds(size: BlockSize, speed: BlockSpeed) -> float:
    """Estimate the seconds that the device needs for forward and backward of one block."""
    flops, features, scores, weights, one = size.counts()
    return (
        flops / speed.flops_per_second
        + features * speed.feature_seconds
        + scores * speed.score_seconds
        + weights * speed.weight_seconds
        + one * speed.block_seconds
    )


def collective_seconds(machine: Machine, world_size: int, c: PlannedCollective) -> float:
    """Estimate the seconds of one collective: launch, hops, then bytes over the slowest link."""
    shares = ring_links(machine, world_size, c.ranks, c.stride)
    used = [level for level, share in zip(LINKS, shares, strict=True) if share]
    speeds = {level: machine.link_speed(level, c.kind) for level in used}
    rates = {level: speed.bytes_per_second for level, speed in speeds.items()}
    if "network" in rates:
        rates["network"] /= rings_leaving_node(machine, world_size, c.ranks, c.stride)
    widest = speeds[used[-1]]
    hops = hop_count(c.kind, c.ranks)
    if c.what == "parameters":
        # ZeRO-1's broadcasts, one from each rank in turn, follow each other around the ring: n of
        # them make about 2n hops, not n each
        hops = min(hops, 2)
    seconds = widest.launch_seconds + hops * widest.hop_seconds
    seconds += wire_bytes(c.kind, c.payload, c.ranks) / min(rates.values())
    if machine.copy_bytes_per_second and c.what not in (ACTIVATIONS, "inputs", "parameters"):
        # FSDP and DDP copy parameters and gradients from and to the buffer of the collective
        seconds += c.payload / machine.copy_bytes_per_second
    return seconds


def hop_count(kind: str, ranks: int) -> int:
    """Count the hops from rank to rank that a collective makes one after another."""
    if kind == "all_reduce":  # up and down the tree that NCCL and RCCL use for an all-reduce
        return 2 * math.ceil(math.log2(ranks))
    return ranks - 1


def communication_seconds(run: PlannedRun, machine: Machine) -> tuple[float, float]:
    """Estimate the seconds of all collectives of a step, and of those that cannot overlap.

    Two kinds cannot: under --wrap root the only unit is gathered before forward and reduced after
    backward, and each block waits for the all-reduces of tensor parallelism.
    """
    total = exposed = 0.0
    for c in collectives(run):
        seconds = c.count * collective_seconds(machine, run.world_size, c)
        total += seconds
        if c.what == ACTIVATIONS or (c.what == "root" and run.wrap == "root"):
            exposed += seconds
    return total, exposed


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

    Of the communication that can overlap, `hidden_share` does, but no more than compute lasts. With
    each doubling of its nodes a job loses a little more time (`doubling_loss`), whatever it sends.
    """
    compute = forward_backward_seconds(run, machine)
    communication, alone = communication_seconds(run, machine)
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


# --- The plan


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
        self.images_per_second = run.data_ranks * run.batch * run.accum / step  # of all ranks
        self.efficiency = alone / step  # speed of a rank, as a share of one that sends nothing
        self.label = run.mode if run.group is None else f"{run.mode} {run.group}"

    @cached_property
    def max_local_batch(self) -> int:
        """The largest local batch with the verdict FITS, 0 if there is none."""

        def too_large(batch: int) -> bool:
            run = replace(self.run, batch=batch)
            return Plan(run, self.machine, self.memory_gib).verdict != "FITS"

        return bisect_left(range(1, MAX_IMAGES), True, key=too_large)

    @property
    def fit(self) -> str:
        """The verdict and its reason, in a sentence."""
        return (
            f"{self.verdict}: {self.peak_gib:.1f} GiB at the peak ({self.peak.name}) + "
            f"{self.margin_gib:.1f} margin, of {self.memory_gib:.4g}; largest local batch "
            f"{self.max_local_batch}"
        )

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
            "host_gib": {flag: size / GIB for flag, size in host_bytes(run).items()},
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


# --- Comparing


def group_sizes(run: PlannedRun, machine: Machine) -> list[int]:
    """List the sizes of shard groups to compare: those that divide a node, or fill whole nodes."""
    node = max(1, machine.ranks_per_node // run.tp)
    found = []
    for group in mesh.divisors(run.data_ranks):
        alone_or_all = group in (1, run.data_ranks)  # these are modes of their own
        if not alone_or_all and (node % group == 0 or group % node == 0):
            found.append(group)
    return found


def in_mode(run: PlannedRun, mode: str, group: int | None) -> PlannedRun:
    """Change the mode of a run; options that the new mode lacks get their defaults."""
    ddp = shard.STRATEGIES[mode].engine != "fsdp"
    return replace(
        run,
        mode=mode,
        group=group,
        tp=1 if ddp else run.tp,
        cpu_offload=run.cpu_offload and not ddp,
        bucket_cap_mb=run.bucket_cap_mb if ddp else None,
    )


def compare(base: Plan) -> list[Plan]:
    """Plan the same run in every mode and group; the fastest first, those that do not fit last."""
    run = base.run
    plans = []
    for mode, row in shard.STRATEGIES.items():
        if run.tp > 1 and row.engine != "fsdp":  # without tp they would train on more images
            continue
        groups: list[int | None] = [None]
        if row.shard_over == "group":
            groups = [*group_sizes(run, base.machine)]
        for group in groups:
            other = in_mode(run, mode, group)
            plans.append(Plan(other, base.machine, base.memory_gib))
    return sorted(plans, key=lambda plan: (VERDICTS.index(plan.verdict), -plan.images_per_second))


# --- What would fit: changes that keep the global batch, so a run may be resumed with them


def describe_fit(plan: Plan, global_batch: bool, ran_out: bool = False) -> str:
    """Say in a sentence whether the run of a plan fits, and if not, what would fit.

    It names the smallest change of each kind, for a run with --global-batch (`global_batch`) or
    with --batch. A run that `ran_out` of memory does not fit whatever its plan says: then only
    changes are named that lower the planned peak by at least 10%.
    """
    if plan.verdict == "FITS" and not ran_out:
        return plan.fit
    most = 0.9 * plan.peak_gib if ran_out else math.inf
    found: dict[str, str] = {}
    for flags, run in possible_changes(plan, global_batch):
        other = Plan(run, plan.machine, plan.memory_gib)
        if other.verdict == "FITS" and other.peak_gib <= most:
            kind, _, _ = flags.partition(" ")
            found.setdefault(kind, flags)
    if found:
        return f"{plan.fit}; what would fit: {', or '.join(found.values())}"
    return f"{plan.fit}; no --batch, --ac or --mode alone fits: take several, or more ranks"


def possible_changes(plan: Plan, global_batch: bool) -> Iterator[tuple[str, PlannedRun]]:
    """Yield (flags, the run with these flags): in each kind of change, the smallest first.

    The kinds are smaller local batches with more accumulation, more checkpointing, and modes that
    shard more.
    """
    run = plan.run
    images = run.batch * run.accum
    smaller = [n for n in mesh.divisors(images) if n < run.batch]
    if run.engine == "fsdp1" and run.cpu_offload:
        smaller = []  # it cannot accumulate (shard.invalid_options)
    for batch in reversed(smaller):
        accum = images // batch
        flags = f"--accum {accum}" if global_batch else f"--batch {batch} --accum {accum}"
        yield flags, replace(run, batch=batch, accum=accum)
    for ac in ("selective", "full"):
        yield f"--ac {ac}", replace(run, ac=ac)
    without = ", without --bucket-cap-mb" if run.bucket_cap_mb else ""
    for group in (*group_sizes(run, plan.machine), run.data_ranks):
        yield f"--mode hybrid --group {group}{without}", in_mode(run, "hybrid", group)


# --- A run that is starting: for its log, for --dry-run, and for advice if memory runs out


def plan_this_run(run: Any, device: torch.device | None, ran_out: bool) -> dict[str, Any]:
    """Plan a runtime.run.Run as plan.py does -> the numbers of `Plan.json`, and more.

    The machine is the one of --machine, or else the known one nearest to `device`, or Frontier if
    `device` is None. A rank's memory is that of its GPU; on a CPU it is the host's, divided by the
    ranks of a node; without a device it is the machine's.

    Under `fit` is a sentence: whether the run fits, and what would fit if it does not, or if it
    `ran_out` of memory. `verdict` is None for a CPU, because other programs use its memory too.
    """
    gib = None
    if device:
        gib = devices.rank_memory_gib(device, run.node_ranks)
    if run.config.machine:
        machine = read_machine(run.config.machine)
    else:
        peak, _ = devices.peak_flops(device)
        machine = nearest_machine(peak, gib)
    # nodes may have other numbers of GPUs, or a job may use fewer
    if run.world_size > run.node_ranks or run.node_ranks > machine.ranks_per_node:
        machine = with_ranks_per_node(machine, run.node_ranks)
    plan = Plan(PlannedRun.from_flags(run.vit_config, run.record()), machine, gib)
    found = plan.json()
    found["fit"] = describe_fit(plan, run.config.global_batch is not None, ran_out)
    if device and device.type != "cuda":
        found["verdict"] = None
    return found
