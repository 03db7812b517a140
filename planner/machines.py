"""Machines: the memory and speed of one device, and the speed of the links between devices.

One rank is one device: on Frontier one GCD, half of an MI250X. There are three levels of links:
inside a package (between the two GCDs of an MI250X), inside a node, and over the network. A
collective is modelled as a ring: each rank of the group sends to the next one in rank order. NCCL
and RCCL build such rings; their other algorithms send as many bytes per rank.

For a machine of your own, write a JSON file and give it by `--machine FILE`. Either let `plan.py
--measure FILE` write it, or name the nearest known machine and list what differs:
{"like": "dgx-a100-80", "ranks_per_node": 4}.
"""

import json
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from runtime.devices import PEAK_FLOPS

LINKS = ("package", "node", "network")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


@dataclass(frozen=True)
class BlockSpeed:
    """How fast a transformer block runs forward and backward in one precision, as measured.

    A block takes its FLOPs / flops_per_second, plus each of the costs below times how often it
    occurs (`BlockSize.counts` in estimate.py). On a GPU it takes at least host_seconds, in which
    the host launches its kernels.
    """

    precision: str
    flops_per_second: float  # of the matrix products
    feature_seconds: float = 0.0  # norms, GELU, sums: per token and feature
    score_seconds: float = 0.0  # attention: per image, head, query and key
    weight_seconds: float = 0.0  # writing the gradients of the weights: per parameter
    block_seconds: float = 0.0  # per block, whatever its size
    host_seconds: float = 0.0  # per block, on the host


@dataclass(frozen=True)
class LinkSpeed:
    """How fast one kind of collective is on one level of links, as measured."""

    level: str  # of LINKS
    kind: str  # of COLLECTIVES
    bytes_per_second: float  # sent by a rank; on the network, by all ranks of a node together
    launch_seconds: float = 0.0  # before the first byte
    hop_seconds: float = 0.0  # from one rank to the next


@dataclass(frozen=True)
class Machine:
    """The figures of a machine: published ones, then constants; bandwidths are for one direction.

    If the machine was measured, `blocks`, `links` and the fields below replace the constants.
    """

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
    # What `plan.py --measure` found; the machines below have none of it
    device: str = "cuda"  # or "cpu", which computes and communicates with the same cores
    measured: str = ""  # where and when, in a few words
    blocks: tuple[BlockSpeed, ...] = ()
    links: tuple[LinkSpeed, ...] = ()
    copy_bytes_per_second: float = 0.0  # copying what FSDP gathers or reduces; 0: not counted
    root_seconds: float = 0.0  # per accumulation step: patches, loss, whatever is not in a block
    unit_seconds: float = 0.0  # per accumulation step and unit: the host's work for FSDP
    tensor_seconds: float = 0.0  # per step and sharded parameter: norm and AdamW
    step_seconds: float = 0.0  # per step: the norm and the check for bad values over all ranks

    def block_speed(self, precision: str) -> BlockSpeed:
        """Return the speed of blocks in a precision; fp16 is as fast as bf16."""
        wanted = "fp32" if precision == "fp32" else "bf16"
        return next(speed for speed in self.blocks if speed.precision == wanted)

    def link_speed(self, level: str, kind: str) -> LinkSpeed:
        """Return the speed of a collective on a level of links: measured, or by the constants."""
        for speed in self.links:
            if speed.level == level and speed.kind == kind:
                return speed
        rates = {
            "package": self.package_bytes_per_second,
            "node": self.node_bytes_per_second,
            "network": self.network_bytes_per_second,
        }
        rate = rates[level] * self.bandwidth_share
        hop = self.hop_seconds if level == "network" else self.node_hop_seconds
        return LinkSpeed(level, kind, rate, self.launch_seconds, hop)


# Sources. Peaks: runtime/devices.py. Memory: the capacity in PyTorch's out-of-memory messages,
# which is a little less than the data sheet's. Host: PCIe's 32 (Gen4) or 64 GB/s (Gen5) less 15 %.
# Frontier: OLCF's user guide; a ring over all 8 GCDs of a node is as slow as its slowest edge, one
# link of 50 GB/s; 4 NICs of 25 GB/s. DGX: NVIDIA's data sheets (NVLink 600 or 900 GB/s both ways, 8
# NICs of 200 or 400 Gbit/s; memory of 1.555, 2.039, 3.35 and 4.8 TB/s). RTX 4090: NVIDIA's Ada
# whitepaper (memory of 1.008 TB/s); a network of 10 Gbit/s.
#
# Fitted: least squares of the relative error of the published step times (examples/published) of
# `base` and `3b` on 1 to 8 nodes, all modes but ddp and hybrid of group 1; workspace_gib on their
# memory. 1b and more nodes were not used. The data cannot tell bandwidth_share from
# optimizer_bytes_per_second: they determine only the sum of the two times.
FITTED: Any = {
    "efficiency": 0.53,
    "token_layer_seconds": 1.15e-6,
    "optimizer_bytes_per_second": 0.35e12,
    "hop_seconds": 60e-6,
    "bandwidth_share": 1.0,
    "hidden_share": 0.93,
    "doubling_loss": 0.015,
    "workspace_gib": 0.38,
}


def nvidia_constants(memory_bytes_per_second: float) -> dict[str, Any]:
    """Return the constants of an NVIDIA GPU: an H200's, scaled by the bandwidth of its memory.

    Fitted on one H200 (4.8 TB/s; torch 2.11, bf16, ddp, one rank): base, huge and 1b at batch 512
    and 3b at 256 are within 4 %. --ac full takes up to 13 % less than planned. Where the host
    launches kernels more slowly than the GPU runs them, a step takes longer: base at batch 32 took
    36 ms, planned 7. benchmarks/gpu.py measured the steps, and a copy of 1 GiB for the optimizer.
    """
    share = memory_bytes_per_second / 4.8e12
    return {
        "efficiency": 0.55,
        "token_layer_seconds": 4.2e-8 / share,  # norms, GELU and sums are limited by the memory
        "optimizer_bytes_per_second": 4.0e12 * share,
    }


_PEAK = {name: flops for name, (flops, _) in PEAK_FLOPS.items()}
# links: package, node, network
_A100 = (300e9, 300e9, 200e9)
_HOPPER = (450e9, 450e9, 400e9)
_A100_40 = nvidia_constants(1.555e12)
_A100_80 = nvidia_constants(2.039e12)
_H100 = nvidia_constants(3.35e12)
_H200 = nvidia_constants(4.8e12)
_ADA = nvidia_constants(1.008e12)
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        # ranks per package, per node; GiB; bf16 FLOP/s; bytes/s: package, node, network, host;
        # fp32's share of the FLOP/s
        Machine("frontier", 2, 8, 64.0, _PEAK["MI250X"], 200e9, 50e9, 100e9, 36e9, **FITTED),
        Machine("dgx-a100-40", 1, 8, 39.4, _PEAK["A100"], *_A100, 27e9, 0.0625, **_A100_40),
        Machine("dgx-a100-80", 1, 8, 79.1, _PEAK["A100"], *_A100, 27e9, 0.0625, **_A100_80),
        Machine("dgx-h100", 1, 8, 79.1, _PEAK["H100"], *_HOPPER, 55e9, 0.068, **_H100),
        Machine("dgx-h200", 1, 8, 139.8, _PEAK["H200"], *_HOPPER, 55e9, 0.068, **_H200),
        Machine("rtx-4090", 1, 1, 23.6, _PEAK["RTX 4090"], 27e9, 27e9, 1.25e9, 27e9, 0.5, **_ADA),
    )
}


def nearest_machine(peak_flops: float | None, memory_gib: float | None) -> Machine:
    """Find the machine of a device by its peak bf16 FLOP/s, then its memory; Frontier for None."""
    if peak_flops is None or memory_gib is None:
        return MACHINES["frontier"]

    def difference(machine: Machine) -> tuple[float, float]:
        return abs(machine.peak_flops - peak_flops), abs(machine.memory_gib - memory_gib)

    return min(MACHINES.values(), key=difference)


# --- Machine files

READ_ME = ("like", "not_measured")  # keys of a machine file that are not fields of Machine


def read_machine(name: str) -> Machine:
    """Find a machine by its name or read a JSON file; ValueError says what is wrong in it."""
    if name in MACHINES:
        return MACHINES[name]
    known = ", ".join(MACHINES)
    path = Path(name)
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        reason = str(error.strerror).lower()
        raise ValueError(
            f"--machine {name}: {reason}; use {known}, or a JSON file (plan.py --measure FILE)"
        ) from None
    except ValueError as error:
        raise ValueError(f"--machine {name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--machine {name} has no {{...}} around its fields")
    if values.get("like") not in [*MACHINES]:
        raise ValueError(f'--machine {name} needs "like", the nearest of {known}')
    given = {field: value for field, value in values.items() if field not in READ_ME}
    try:
        changes = {field: _field_value(field, value) for field, value in given.items()}
    except ValueError as error:
        raise ValueError(f"--machine {name}: {error}") from None
    named = {"name": path.stem} | changes
    return replace(MACHINES[values["like"]], **named)


def _field_value(field: str, value: Any) -> Any:
    """Check the value of a field of Machine in a file; ValueError says what it must be."""
    names = [row.name for row in fields(Machine)]
    if field not in names:
        raise ValueError(f"there is no field {field}; use {', '.join(names)}")
    if field == "blocks":
        return _records(field, value, BlockSpeed)
    if field == "links":
        return _records(field, value, LinkSpeed)
    example = getattr(MACHINES["frontier"], field)
    if isinstance(example, str):
        if not isinstance(value, str):
            raise ValueError(f"{field} must be a text in quotes")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} must be a number without quotes, not {json.dumps(value)}")
    if isinstance(example, int) and value != int(value):
        raise ValueError(f"{field} must be a whole number, not {json.dumps(value)}")
    # In what is measured, 0 means "not counted". A machine without memory or links is a mistake.
    may_be_zero = example == 0 or field in ("hidden_share", "doubling_loss", "workspace_gib")
    if not 0 <= value < float("inf") or (value == 0 and not may_be_zero):
        raise ValueError(f"{field} must be above 0, not {json.dumps(value)}")
    return type(example)(value)


def _records(field: str, values: Any, kind: type) -> tuple[Any, ...]:
    """Read the measured speeds in one field: a list of JSON objects with the fields of `kind`."""
    found = []
    if not isinstance(values, list):
        raise ValueError(f"{field} must be a list")
    for value in values:
        try:
            speed = kind(**value)
        except TypeError:  # a name that is missing or unknown, or no JSON object
            names = sorted(row.name for row in fields(kind))
            raise ValueError(f"{field} must hold objects of {', '.join(names)}") from None
        for name, number in vars(speed).items():
            if name in ("precision", "level", "kind"):
                continue
            if not isinstance(number, int | float) or not 0 <= number < float("inf"):
                raise ValueError(f"{name} in {field} must be a number from 0 up")
            if number == 0 and name in ("flops_per_second", "bytes_per_second"):
                raise ValueError(f"a rate in {field} must be above 0")
        found.append(speed)
    if kind is BlockSpeed and found and {s.precision for s in found} != {"bf16", "fp32"}:
        raise ValueError("blocks must hold bf16 and fp32, once each")
    return tuple(found)


def machine_file(like: Machine, changes: dict[str, Any], not_measured: list[str]) -> str:
    """Format the JSON file of a machine that differs from `like` by `changes`."""
    values = {"like": like.name} | changes | {"not_measured": not_measured}
    text = json.dumps(values, default=vars)  # of a BlockSpeed or LinkSpeed, its fields
    rounded = json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
    return json.dumps(rounded, indent=2) + "\n"


def with_ranks_per_node(machine: Machine, ranks: int) -> Machine:
    """Return the machine as seen by a job that uses `ranks` ranks on each node."""
    package = machine.ranks_per_package
    if ranks % package:  # some package is only partly used: count on no fast link
        package = 1
    return replace(machine, ranks_per_node=ranks, ranks_per_package=package)


# --- Rings


def ring_neighbours(world_size: int, ranks: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all ranks, and the rank that each sends to, both (N,), if every group is a ring.

    A group has `ranks` ranks, each `stride` after the one before: 1 in a shard group, the size of
    a shard group in a replicate group (see mesh.py).
    """
    rank = np.arange(world_size)
    last = rank // stride % ranks == ranks - 1
    following = rank + np.where(last, -(ranks - 1) * stride, stride)  # from last to first
    return rank, following


@lru_cache(maxsize=1024)
def rings_leaving_node(machine: Machine, world_size: int, ranks: int, stride: int) -> int:
    """Return the largest number of rings that leave one node, whose network they share.

    ValueError if none leaves a node.
    """
    rank, following = ring_neighbours(world_size, ranks, stride)
    node = rank // machine.ranks_per_node
    leaving = node != following // machine.ranks_per_node
    return int(np.bincount(node[leaving]).max())


@lru_cache(maxsize=1024)
def ring_links(
    machine: Machine, world_size: int, ranks: int, stride: int
) -> tuple[float, float, float]:
    """Return which share of all hops in the rings of `ring_neighbours` goes over each of LINKS."""
    rank, following = ring_neighbours(world_size, ranks, stride)
    package, node = (
        float(np.mean(rank // unit == following // unit))
        for unit in (machine.ranks_per_package, machine.ranks_per_node)
    )
    return package, node - package, 1 - node


def wire_bytes(kind: str, payload: float, ranks: int) -> float:
    """Compute the bytes that a rank sends in a collective on a full tensor of `payload` bytes.

    In a ring of n ranks, a rank sends n - 1 of the tensor's n parts. An all-reduce is a
    reduce-scatter and an all-gather, so it sends twice as much (Patarasuk & Yuan 2009). In a
    pipelined broadcast every rank but the last sends the whole tensor, (n - 1) / n on average.
    """
    return (2 if kind == "all_reduce" else 1) * payload * (ranks - 1) / ranks
