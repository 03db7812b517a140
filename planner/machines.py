"""Machines: memory and speed of one device, and the time of a collective on its links.

One rank is one device: on Frontier one GCD, half of an MI250X. Links have three levels: inside a
package (the two GCDs of an MI250X), inside a node, over the network. A collective is modelled as a
ring over the ranks of its group in their order, in which each rank sends to the next; NCCL and RCCL
build such rings, and other algorithms send as many bytes per rank.

For a machine of your own write a JSON file with the name of the nearest one and what differs,
{"like": "dgx-a100-80", "ranks_per_node": 4}, and pass it as `plan.py --machine FILE`.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from runtime.devices import PEAK_FLOPS

LINKS = ("package", "node", "network")


@dataclass(frozen=True)
class Machine:
    """Published figures, then constants; bandwidths are those of one direction."""

    name: str
    ranks_per_package: int  # ranks joined by the fastest link; 1 where there is no such pair
    ranks_per_node: int
    memory_gib: float  # per rank, as PyTorch counts it
    peak_flops: float  # dense bf16, per rank
    package_bytes_per_second: float  # from one rank to the next inside a package
    node_bytes_per_second: float  # from one rank to the next inside a node
    network_bytes_per_second: float  # of a whole node, shared by its ranks
    host_bytes_per_second: float  # between a rank and the memory of its host
    fp32_share: float = 0.25  # of the peak, without tensor cores and TF32
    # Constants: Frontier's are fitted to measured runs, all others are guesses
    efficiency: float = 0.5  # share of the peak that matmuls reach
    token_layer_seconds: float = 1.0e-6  # all else in a block, per token
    optimizer_bytes_per_second: float = 0.8e12  # AdamW: 28 bytes per parameter
    launch_seconds: float = 50e-6  # of a collective, before its first byte
    hop_seconds: float = 10e-6  # from rank to rank in a ring that leaves the node
    node_hop_seconds: float = 5e-6  # the same inside a node
    bandwidth_share: float = 0.7  # of the bandwidths above that a collective reaches
    hidden_share: float = 0.9  # of the communication that could overlap with compute
    doubling_loss: float = 0.01  # of the step's speed per doubling of nodes
    workspace_gib: float = 0.1  # that libraries and the input hold in the allocator
    head_multiple: int = 8  # attention kernels pad the features of a head to a multiple of this


# Sources. Peaks: runtime/devices.py. Memory: the capacity in PyTorch's out-of-memory messages,
# which is a little less than the data sheet's. Host: PCIe's 32 (Gen4) or 64 GB/s (Gen5) less 15 %.
# Frontier: OLCF's user guide; a ring over all 8 GCDs of a node is as slow as its slowest edge, one
# link of 50 GB/s; 4 NICs of 25 GB/s. DGX: NVIDIA's data sheets (NVLink 600 or 900 GB/s both ways, 8
# NICs of 200 or 400 Gbit/s). RTX 4090: NVIDIA's Ada whitepaper; a network of 10 Gbit/s.
#
# Fitted: least squares of the relative error of the published step times (examples/published) of
# `base` and `3b` on 1 to 8 nodes, all modes but ddp and hybrid of group 1; workspace_gib on their
# memory. 1b and more nodes were not used. Of bandwidth_share and optimizer_bytes_per_second the
# data determine only the sum.
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
_PEAK = {name: flops for name, (flops, _) in PEAK_FLOPS.items()}
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        # ranks per package, per node; GiB; bf16 FLOP/s; bytes/s: package, node, network, host
        Machine("frontier", 2, 8, 64.0, _PEAK["MI250X"], 200e9, 50e9, 100e9, 36e9, **FITTED),
        Machine("dgx-a100-40", 1, 8, 39.4, _PEAK["A100"], 300e9, 300e9, 200e9, 27e9, 0.0625),
        Machine("dgx-a100-80", 1, 8, 79.1, _PEAK["A100"], 300e9, 300e9, 200e9, 27e9, 0.0625),
        Machine("dgx-h100", 1, 8, 79.1, _PEAK["H100"], 450e9, 450e9, 400e9, 55e9, 0.068),
        Machine("dgx-h200", 1, 8, 139.8, _PEAK["H200"], 450e9, 450e9, 400e9, 55e9, 0.068),
        Machine("rtx-4090", 1, 1, 23.6, _PEAK["RTX 4090"], 27e9, 27e9, 1.25e9, 27e9, 0.5),
    )
}


def nearest_machine(peak_flops: float | None, memory_gib: float | None) -> Machine:
    """Find the machine of a device by its peak bf16 FLOP/s, then its memory; Frontier for None."""
    if peak_flops is None or memory_gib is None:
        return MACHINES["frontier"]
    return min(
        MACHINES.values(),
        key=lambda m: (abs(m.peak_flops - peak_flops), abs(m.memory_gib - memory_gib)),
    )


def read_machine(name: str) -> Machine:
    """Find a machine by its name or read a JSON file; ValueError says what is wrong in it."""
    if name in MACHINES:
        return MACHINES[name]
    try:
        values = {"name": Path(name).stem, **json.loads(Path(name).read_text())}
        like = MACHINES[values.pop("like")]
        for field, value in values.items():
            if field != "name" and (type(getattr(like, field))(value) != value or value <= 0):
                raise ValueError(f"{field} is {value!r}")
        return replace(like, **values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        known = f"{', '.join(MACHINES)}, or a JSON file with one of these as"
        needed = f'use {known} "like", and the fields of Machine that differ'
        raise ValueError(f"--machine {name}: {error!r}; {needed}") from None


# --- Rings


@lru_cache(maxsize=1024)
def ring_links(
    machine: Machine, world_size: int, ranks: int, stride: int
) -> tuple[float, float, float]:
    """Return the shares of LINKS in the rings of all groups of `ranks`, `stride` apart.

    Shard groups have stride 1, replicate groups the shard group's size (see mesh.py).
    """
    rank = np.arange(world_size)
    last = rank // stride % ranks == ranks - 1
    following = rank + np.where(last, -(ranks - 1) * stride, stride)  # from last to first
    package, node = (
        float(np.mean(rank // unit == following // unit))
        for unit in (machine.ranks_per_package, machine.ranks_per_node)
    )
    return package, node - package, 1 - node


def wire_bytes(kind: str, payload: float, ranks: int) -> float:
    """Bytes that a rank sends in a collective on a full tensor of `payload` bytes.

    In a ring a rank sends n - 1 of n parts: (n - 1) / n of the tensor. An all-reduce is a
    reduce-scatter and an all-gather, twice that (Patarasuk & Yuan 2009). In a pipelined broadcast
    all ranks but the last send the tensor once: (n - 1) / n of it on average.
    """
    return (2 if kind == "all_reduce" else 1) * payload * (ranks - 1) / ranks
