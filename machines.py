"""Machines: what a device and the links between devices can do; measuring those at hand.

One rank is one device: on Frontier one GCD, half of an MI250X. Links are inside a package (of two
GCDs), inside a node, or the network. A collective is modelled as a ring in rank order.

`--machine FILE` is JSON that names the nearest known machine and lists what differs, {"like":
"dgx-a100-80", "ranks_per_node": 4}, or one that `plan.py --measure FILE` has written.
"""

import argparse
import itertools
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mesh
import shard
import train_fsdp
from checkpoint import on_rank0

LINKS = ("package", "node", "network")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")

# --- Figures


class LinkSpeed(NamedTuple):
    """How fast one kind of collective is on one level of links."""

    bytes_per_second: float  # sent by a rank; on the network, by all ranks of a node together
    launch_seconds: float  # before the first byte
    hop_seconds: float  # from one rank to the next


@dataclass(frozen=True)
class Machine:
    """The figures of a machine: published ones, then constants; bandwidths are one-way."""

    name: str
    ranks_per_package: int  # ranks joined by the fastest link; 1 if there is no such link
    ranks_per_node: int
    memory_gib: float  # per rank, as PyTorch counts it
    peak_flops: float  # dense bf16, per rank
    package_bytes_per_second: float  # from one rank to the next inside a package
    node_bytes_per_second: float  # from one rank to the next inside a node
    network_bytes_per_second: float  # of a whole node, shared by its ranks
    host_bytes_per_second: float  # between a rank and the memory of its host
    fp32_share: float = 0.25  # fp32 FLOP/s without TF32, as a share of the peak
    # Constants. Frontier's are fitted to published runs, those of NVIDIA's GPUs to one H200, but
    # those of links are guesses.
    efficiency: float = 0.5  # share of the peak that matmuls reach
    token_layer_seconds: float = 1.0e-6  # everything but matmuls: per token and block
    optimizer_bytes_per_second: float = 0.8e12  # AdamW: 28 bytes per parameter
    launch_seconds: float = 50e-6  # of a collective, before its first byte
    hop_seconds: float = 10e-6  # from rank to rank in a ring that leaves the node
    node_hop_seconds: float = 5e-6  # the same inside a node
    bandwidth_share: float = 0.7  # share of the bandwidths above that a collective reaches
    hidden_share: float = 0.9  # of communication that compute could hide, the share it hides
    doubling_loss: float = 0.01  # share of its speed that a step loses per doubling of nodes
    workspace_gib: float = 0.1  # held in the allocator by libraries and the input
    head_multiple: int = 8  # attention kernels pad the features of a head to a multiple of this
    # What `plan.py --measure` found, instead of constants
    measured: str = ""  # where, and for which flags last
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)  # by part_key: s per image
    links: Mapping[str, LinkSpeed] = field(default_factory=dict, hash=False)  # "node all_gather"
    tensor_seconds: float = 0.0  # per step and sharded parameter: norm and AdamW
    step_seconds: float = 0.0  # per step: the norm and the check for bad values

    def link_speed(self, level: str, kind: str) -> LinkSpeed:
        """Return the speed of a kind of collective on one of LINKS: measured, or by constants."""
        measured = self.links.get(f"{level} {kind}")
        if measured:
            return measured
        rate = getattr(self, f"{level}_bytes_per_second") * self.bandwidth_share
        hop = self.hop_seconds if level == "network" else self.node_hop_seconds
        return LinkSpeed(rate, self.launch_seconds, hop)


def part_key(engine: str, precision: str, numel: int, heads: int, tokens: int) -> str:
    """Describe what decides how long a block takes for an image, or the root, with 0 heads."""
    engine = "unsharded" if engine == "ddp" else "FSDP"
    dtype = "fp32" if precision == "fp32" else "bf16"  # fp16 is as fast
    return f"{engine}, {dtype}, {numel} parameters, {heads} heads, {tokens} tokens"


# Sources. MI250X: OLCF's user guide, per GCD; a ring over all 8 GCDs of a node is as slow as its
# slowest edge, one link of 50 GB/s; 4 NICs of 25 GB/s. A100, H100, H200: NVIDIA's data sheets (SXM;
# NVLink 600 or 900 GB/s both ways, 8 NICs of 200 or 400 Gbit/s; memory of 1.555, 2.039, 3.35 and
# 4.8 TB/s). RTX 4090: NVIDIA's Ada whitepaper (fp32 accumulation; memory of 1.008 TB/s); a network
# of 10 Gbit/s. Memory: the capacity in PyTorch's out-of-memory messages, a little less than the
# data sheet's. Host: PCIe's 32 (Gen4) or 64 GB/s (Gen5) less 15 %.
#
# Fitted: least squares of the relative error of the published step times (examples/published) of
# `base` and `3b` on 1 to 8 nodes, all modes but ddp and hybrid of group 1; workspace_gib on their
# memory. 1b and more nodes were not used. The data cannot tell bandwidth_share from
# optimizer_bytes_per_second: they determine only the sum of the two times.
FRONTIER = replace(
    Machine("frontier", 2, 8, 64.0, 191.5e12, 200e9, 50e9, 100e9, 36e9),
    efficiency=0.53,
    token_layer_seconds=1.15e-6,
    optimizer_bytes_per_second=0.35e12,
    hop_seconds=60e-6,
    bandwidth_share=1.0,
    hidden_share=0.93,
    doubling_loss=0.015,
    workspace_gib=0.38,
)


def like_h200(machine: Machine, memory_bytes_per_second: float) -> Machine:
    """Return a machine with the constants of an H200, scaled by the bandwidth of its memory.

    Fitted on one (4.8 TB/s; torch 2.11, bf16, ddp, one rank; benchmarks/gpu.py), within 4 %. Where
    the host launches kernels too slowly, a step takes longer: base at batch 32 36 ms, planned 7.
    """
    share = memory_bytes_per_second / 4.8e12
    return replace(
        machine,
        efficiency=0.55,
        token_layer_seconds=4.2e-8 / share,  # norms, GELU and sums are limited by the memory
        optimizer_bytes_per_second=4.0e12 * share,
    )


# of each peak FLOP/s, links, host, fp32's share
A100 = (312e12, 300e9, 300e9, 200e9, 27e9, 0.0625)
HOPPER = (989e12, 450e9, 450e9, 400e9, 55e9, 0.068)
ADA = (165.2e12, 27e9, 27e9, 1.25e9, 27e9, 0.5)
KNOWN = (
    FRONTIER,
    like_h200(Machine("dgx-a100-40", 1, 8, 39.4, *A100), 1.555e12),
    like_h200(Machine("dgx-a100-80", 1, 8, 79.1, *A100), 2.039e12),
    like_h200(Machine("dgx-h100", 1, 8, 79.1, *HOPPER), 3.35e12),
    like_h200(Machine("dgx-h200", 1, 8, 139.8, *HOPPER), 4.8e12),
    like_h200(Machine("rtx-4090", 1, 1, 23.6, *ADA), 1.008e12),
)
MACHINES = {machine.name: machine for machine in KNOWN}

# --- Machine files


def read_machine(name: str) -> Machine:
    """Find a machine by its name or read a JSON file; ValueError says what is wrong in it."""
    if name in MACHINES:
        return MACHINES[name]
    try:
        values = json.loads(Path(name).read_text())
        like = MACHINES[values.pop("like")]
        links = {key: LinkSpeed(*speed) for key, speed in values.pop("links", {}).items()}
        values = {"name": Path(name).stem, "links": links} | values
        machine = replace(like, **values)
        if not machine.measured:
            check_figures(machine, like)
        return machine
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        known = f"use {', '.join(MACHINES)}, or a file: one of plan.py --measure, or one like"
        example = '{"like": "dgx-a100-80", "ranks_per_node": 4}'
        raise ValueError(f"--machine {name}: {error}; {known} {example}") from None


def check_figures(machine: Machine, like: Machine) -> None:
    """Raise ValueError for what is no number, or a figure that by its size is in another unit."""
    for name, usual in vars(like).items():
        if not isinstance(usual, int | float):
            continue
        value = getattr(machine, name)
        # a thousandth of what is usual, or 50 times as much, is a slip in the unit
        in_unit = type(value) in (int, type(usual)) and value >= 0
        if in_unit and name.endswith(("memory_gib", "_flops", "bytes_per_second", "_per_node")):
            in_unit = usual / 800 <= value <= usual * 50
        if not in_unit:
            unit = "a number of ranks, bytes/s, FLOP/s or GiB"
            raise ValueError(f"{name} {value!r} is far from {like.name}'s {usual:g}, {unit}")


def with_ranks_per_node(machine: Machine, ranks: int) -> Machine:
    """Return the machine as seen by a job that uses `ranks` ranks on each node."""
    # where some package is only partly used, count on no fast link
    package = math.gcd(ranks, machine.ranks_per_package)
    return replace(machine, ranks_per_node=ranks, ranks_per_package=package)


# --- Rings


def ring_neighbours(world_size: int, ranks: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all ranks, and the rank that each sends to, both (N,), if every group is a ring.

    A group has `ranks` ranks, each `stride` after the one before (see mesh.py).
    """
    rank = np.arange(world_size)
    last = rank // stride % ranks == ranks - 1
    following = rank + np.where(last, -(ranks - 1) * stride, stride)  # from last to first
    return rank, following


@lru_cache(maxsize=1024)
def rings_leaving_node(machine: Machine, world_size: int, ranks: int, stride: int) -> int:
    """Return the largest number of rings that leave one node, whose network they share."""
    rank, following = ring_neighbours(world_size, ranks, stride)
    node = rank // machine.ranks_per_node
    leaving = node != following // machine.ranks_per_node
    return int(np.bincount(node[leaving]).max())


@lru_cache(maxsize=1024)
def ring_links(machine: Machine, world_size: int, ranks: int, stride: int) -> tuple[float, ...]:
    """Return which share of all hops in the rings of `ring_neighbours` goes over each of LINKS."""
    rank, following = ring_neighbours(world_size, ranks, stride)
    package, node = (
        float(np.mean(rank // unit == following // unit))
        for unit in (machine.ranks_per_package, machine.ranks_per_node)
    )
    return package, node - package, 1 - node


def hop_count(kind: str, ranks: int) -> int:
    """Count the hops from rank to rank that a collective makes one after another."""
    if kind == "all_reduce":  # up and down the tree that NCCL and RCCL use for an all-reduce
        return 2 * math.ceil(math.log2(ranks))
    return ranks - 1


def wire_bytes(kind: str, payload: float, ranks: int) -> float:
    """Compute the bytes that a rank sends in a collective on a full tensor of `payload` bytes.

    In a ring of n ranks it sends n - 1 of n parts; in an all-reduce, a reduce-scatter and an
    all-gather, twice as much (Patarasuk & Yuan 2009). A broadcast is pipelined: so on average.
    """
    return (2 if kind == "all_reduce" else 1) * payload * (ranks - 1) / ranks


# --- Measuring: plan.py --measure FILE, on the ranks that a launcher started
#
# Measured are collectives of two sizes and, on all ranks at once, steps of the real code on models
# of few blocks, whose differences are the time of a block. The rest is that of --machine.

ROUND_SECONDS = 0.15  # the repetitions of one measurement take about so long
PAYLOADS = {"cpu": (2**16, 24 * 2**20), "cuda": (2**18, 2**27)}  # bytes of two collectives
MORE = 2  # so many blocks has a model more than another


def measure(args: argparse.Namespace, run: Any, ranks: mesh.Ranks, device: torch.device) -> None:
    """Measure this machine for the model and batch of a plan.PlannedRun; write --measure FILE.

    The file keeps what it has of other models. Collective, after mesh.init_ranks; it ends the
    process group. ValueError or OSError on all ranks if the file cannot be written.
    """
    path = args.measure
    before = on_rank0(partial(parts_in, path))
    if args.machine not in MACHINES:
        raise ValueError(f"--machine {args.machine}: name the known machine that is nearest")
    like = MACHINES[args.machine]
    name = "CPU"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks.local_world_size
    fixed: dict[str, Any] = {"head_multiple": 1, "workspace_gib": 0.0, "hidden_share": 0.0}
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
        fixed = {}
    links = measure_links(ranks, device, like)
    steps = measure_steps(args.model, run, device)
    dist.destroy_process_group()
    if ranks.rank > 0:
        return
    parts = steps.pop("parts")
    machine = replace(
        like,
        name=Path(path).stem,
        measured=f"{name}, {ranks.world_size} ranks, torch {torch.__version__}, last {args.model}",
        ranks_per_package=2 if "package all_gather" in links else 1,
        ranks_per_node=ranks.local_world_size,
        memory_gib=memory / 2**30,
        parts=before | parts,
        links=links,
        **fixed,
        **steps,
    )
    known = {"like": args.machine} | asdict(machine)
    Path(path).write_text(json.dumps(known, indent=2) + "\n")
    print(f"written to {path}: use --machine {path}; what was not measured is {like.name}'s")


def parts_in(path: str) -> Mapping[str, float]:
    """Return the parts in a machine's file, none if it is new; ValueError, OSError if it is bad."""
    if path in MACHINES:
        raise ValueError(f"--measure {path} is the name of a known machine: give another file")
    with open(path, "a") as stream:  # before a minute is spent
        return read_machine(path).parts if stream.tell() else {}


def mean_over_ranks(value: float, device: torch.device) -> float:
    """Wait for all ranks; return the mean of their values. Collective."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def mean_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time a call that all ranks make at once: the mean of three rounds, and of all ranks.

    Not the median: a step makes many such calls, and the slow ones among them count. Collective.
    """

    def round_of(repeats: int) -> float:
        mean_over_ranks(0, device)  # otherwise some would have cores and memory for themselves
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return mean_over_ranks((time.perf_counter() - start) / repeats, device)

    round_of(1)
    repeats = max(1, min(50, int(ROUND_SECONDS / round_of(1))))
    return mean(round_of(repeats) for _ in range(3))


def measure_steps(model: str, run: Any, device: torch.device) -> dict[str, Any]:
    """Measure blocks, root and update, unsharded and under FSDP2 on one rank -> fields of Machine.

    AdamW's rate is from what more blocks add to an update; the rest is per step and per parameter.
    """
    # each rank shards with itself alone
    names = ("rank", "replicate", "shard")
    shape = (dist.get_world_size(), 1, 1)
    alone = init_device_mesh(device.type, shape, mesh_dim_names=names)["replicate", "shard"]
    parts = {}
    firsts = []
    encoders = []
    for mode in ("ddp", "full_shard"):
        with mock.patch.object(mesh, "build_mesh", return_value=alone):
            first = time_step(model, (1, 1), mode, run, device)
            deep_encoder = time_step(model, (1 + MORE, 1), mode, run, device)
            deep_decoder = time_step(model, (1, 1 + MORE), mode, run, device)
        encoder = (deep_encoder - first) / MORE
        decoder = (deep_decoder - first) / MORE
        measured = {"root": first - encoder - decoder, "encoder": encoder, "decoder": decoder}
        for part, (seconds, _, numel, _) in measured.items():
            key = part_key(mode, run.precision, round(numel), run.heads[part], run.tokens[part])
            parts[key] = max(0.0, seconds) / run.batch
        firsts.append(first)
        encoders.append(encoder)
    (_, update, numel, tensors), (_, sharded_update, _, _) = firsts
    _, more, more_numel, _ = encoders[0]
    # where noise hides what more blocks add, all of the update is AdamW
    rate = 28 * more_numel / more if more > 0 else 28 * numel / update
    return {
        "parts": parts,
        "optimizer_bytes_per_second": rate,
        "step_seconds": max(0.0, update - 28 * numel / rate),
        "tensor_seconds": max(0.0, sharded_update - update) / tensors,
    }


def time_step(
    model: str, depths: tuple[int, int], mode: str, run: Any, device: torch.device
) -> np.ndarray:
    """Time a step of a model with so many encoder and decoder blocks, on each rank for itself.

    Returns the seconds of forward and backward, those of the update, and how many numbers and
    tensors the parameters have. Collective.
    """
    separator = "," if ":" in model else ":"
    sizes = f"{model}{separator}depth={depths[0]},decoder_depth={depths[1]}"
    words = f"--mode {mode} --img-size {run.img_size} --batch {run.batch} --mask-ratio"
    words += f" {run.mask_ratio} --channels {run.config.channels} --precision {run.precision}"
    args = train_fsdp.parse_flags(["--model", sizes, *words.split()])
    train_fsdp.complete(args, 1, 1, device.type)
    training = train_fsdp.build_training(args, device)
    guard = train_fsdp.Guard(device)
    shape = (run.batch, run.config.channels, run.img_size, run.img_size)
    images = torch.zeros(shape, dtype=torch.uint8, device=device)
    batches = [(images, torch.rand(run.batch, run.patches, device=device))]

    def forward_backward() -> torch.Tensor:
        training.optimizer.zero_grad()
        return train_fsdp.forward_backward(training, batches)

    def update() -> None:
        norm = shard.clip_grad_norm(training.model)
        skip = guard.check(0, loss, norm, train_fsdp.Requests())
        shard.optimizer_step(training.optimizer, skip)

    seconds = mean_seconds(forward_backward, device)
    loss = forward_backward()
    numbers = [p.numel() for p in training.model.parameters()]
    return np.array([seconds, mean_seconds(update, device), sum(numbers), len(numbers)])


def measure_links(ranks: mesh.Ranks, device: torch.device, like: Machine) -> dict[str, LinkSpeed]:
    """Measure collectives inside packages, inside nodes, and over the network. Collective."""
    local = ranks.local_world_size
    nodes = ranks.world_size // local
    groups: dict[str, Any] = {}
    if device.type == "cuda" and like.ranks_per_package == 2 and local % 2 == 0:
        pairs = mesh.build_mesh((ranks.world_size // 2, 2), device)
        groups["package"] = pairs.get_group("shard")
    grid = mesh.build_mesh((nodes, local), device)
    if local > (2 if groups else 1):
        groups["node"] = grid.get_group("shard")
    if nodes > 1:
        groups["network"] = grid.get_group("replicate")
    # newer PyTorch has other names for two collectives
    warnings.filterwarnings("ignore", "`torch.distributed.*_tensor` is deprecated", FutureWarning)
    found = {}
    for level, kind in itertools.product(groups, COLLECTIVES):
        size = groups[level].size()
        payloads = PAYLOADS[device.type]
        short, long = (
            mean_seconds(collective(kind, payload, groups[level], device), device)
            for payload in payloads
        )
        few, many = (wire_bytes(kind, payload, size) for payload in payloads)
        # where noise hides the difference, the larger one bounds it
        byte = max((long - short) / (many - few), 0.5 * long / many)
        # groups of one size do not tell a launch from hops: their ratio is that of `like`
        _, launch, hop = like.link_speed(level, kind)
        latency = launch + hop_count(kind, size) * hop
        factor = max(0.0, short - byte * few) / latency
        # all ranks of a node send over the network at the same time, each in another group
        together = local if level == "network" else 1
        found[f"{level} {kind}"] = LinkSpeed(together / byte, factor * launch, factor * hop)
    return found


def collective(kind: str, payload: int, group: Any, device: torch.device) -> Callable[[], object]:
    """Make a collective on a full tensor of `payload` bytes."""
    piece = torch.ones(math.ceil(payload / 4 / group.size()), device=device)
    whole = torch.ones(len(piece) * group.size(), device=device)
    if kind == "all_gather":
        return partial(dist.all_gather_into_tensor, whole, piece, group=group)
    if kind == "reduce_scatter":
        return partial(dist.reduce_scatter_tensor, piece, whole, group=group)
    if kind == "all_reduce":
        return partial(dist.all_reduce, whole, group=group)
    return partial(dist.broadcast, whole, group=group, group_src=0)
