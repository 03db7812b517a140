"""Machines: memory and speed of one device, and the time of a collective on its links.

One rank is one device: on Frontier one GCD, half of an MI250X. Links have three levels: inside a
package (the two GCDs of an MI250X), inside a node, over the network. A collective is modelled as a
ring over the ranks of its group in their order, in which each rank sends to the next; NCCL and RCCL
build such rings, and other algorithms send as many bytes per rank.

`plan.py --machines` prints the table. For a machine of your own write a JSON file with the name of
the nearest one and what differs, {"like": "dgx-a100-80", "ranks_per_node": 4}, and pass it as
`plan.py --machine FILE`; without "like" it needs every field of `Machine` that has no default.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

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
    node_links: int = 1  # such links of a rank inside a node; a group of n ranks uses n - 1 at most
    fp32_share: float = 0.25  # of the peak, without tensor cores and TF32
    # Constants, fitted to measured runs or guessed from experience (see `fitted`):
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
    fitted: tuple[str, ...] = ()  # constants above that were fitted on Frontier; the rest: guesses

    @property
    def guesses(self) -> tuple[str, ...]:
        """The constants that were not fitted on Frontier: guesses, or given in a machine file."""
        return tuple(name for name in CONSTANTS if name not in self.fitted)


_NAMES = [field.name for field in fields(Machine)]
CONSTANTS = tuple(_NAMES[_NAMES.index("efficiency") : _NAMES.index("fitted")])

# Sources. Peaks: runtime/devices.py. Memory: the capacity in PyTorch's out-of-memory messages,
# which is a little less than the data sheet's. Host: PCIe's 32 (Gen4) or 64 GB/s (Gen5) less 15 %.

# NVIDIA's data sheets of the A100 (NVLink 600 GB/s both ways, fp32 19.5 of 312) and of the
# DGX A100 (8 NICs of 200 Gbit/s).
DGX_A100 = Machine(
    name="dgx-a100-40",
    ranks_per_package=1,
    ranks_per_node=8,
    memory_gib=39.4,
    peak_flops=PEAK_FLOPS["A100"][0],
    package_bytes_per_second=300e9,
    node_bytes_per_second=300e9,
    network_bytes_per_second=200e9,
    host_bytes_per_second=27e9,
    fp32_share=0.0625,
)
# NVIDIA's data sheets of the H100 and H200 (NVLink 900 GB/s both ways, fp32 67 of 989) and
# of the DGX (8 NICs of 400 Gbit/s).
DGX_H100 = Machine(
    name="dgx-h100",
    ranks_per_package=1,
    ranks_per_node=8,
    memory_gib=79.1,
    peak_flops=PEAK_FLOPS["H100"][0],
    package_bytes_per_second=450e9,
    node_bytes_per_second=450e9,
    network_bytes_per_second=400e9,
    host_bytes_per_second=55e9,
    fp32_share=0.068,
)
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        # OLCF's user guide: a ring over all 8 GCDs of a node is as slow as its slowest edge, one
        # link of 50 GB/s; 4 NICs of 25 GB/s; fp32 47.9 of 191.5. Fitted: least squares of the
        # relative error of the published step times (examples/published) of `base` and `3b` on 1
        # to 8 nodes, all modes but ddp and hybrid of group 1; workspace_gib on their memory. 1b and
        # more nodes were not used. bandwidth_share and optimizer_bytes_per_second are uncertain:
        # the data determine only their sum.
        Machine(
            name="frontier",
            ranks_per_package=2,
            ranks_per_node=8,
            memory_gib=64.0,
            peak_flops=PEAK_FLOPS["MI250X"][0],
            package_bytes_per_second=200e9,
            node_bytes_per_second=50e9,
            network_bytes_per_second=100e9,
            host_bytes_per_second=36e9,
            efficiency=0.53,
            token_layer_seconds=1.15e-6,
            optimizer_bytes_per_second=0.35e12,
            hop_seconds=60e-6,
            bandwidth_share=1.0,
            hidden_share=0.93,
            doubling_loss=0.015,
            workspace_gib=0.38,
            fitted=(
                "efficiency",
                "token_layer_seconds",
                "optimizer_bytes_per_second",
                "hop_seconds",
                "bandwidth_share",
                "hidden_share",
                "doubling_loss",
                "workspace_gib",
            ),
        ),
        DGX_A100,
        replace(DGX_A100, name="dgx-a100-80", memory_gib=79.1),
        DGX_H100,
        replace(DGX_H100, name="dgx-h200", memory_gib=139.8, peak_flops=PEAK_FLOPS["H200"][0]),
        # AMD's data sheets of the MI300X (fp32 163.4 of 1307.4) and of its platform: a link of 128
        # GB/s both ways between any two of 8. Network: the common 8 NICs of 400 Gbit/s.
        Machine(
            name="mi300x",
            ranks_per_package=1,
            ranks_per_node=8,
            memory_gib=191.9,
            peak_flops=PEAK_FLOPS["MI300X"][0],
            package_bytes_per_second=64e9,
            node_bytes_per_second=64e9,
            network_bytes_per_second=400e9,
            host_bytes_per_second=55e9,
            node_links=7,
            fp32_share=0.125,
        ),
        # NVIDIA's Ada whitepaper (fp32 82.6 of 165.2). One GPU; a network of 10 Gbit/s.
        Machine(
            name="rtx-4090",
            ranks_per_package=1,
            ranks_per_node=1,
            memory_gib=23.6,
            peak_flops=PEAK_FLOPS["RTX 4090"][0],
            package_bytes_per_second=27e9,
            node_bytes_per_second=27e9,
            network_bytes_per_second=1.25e9,
            host_bytes_per_second=27e9,
            fp32_share=0.5,
        ),
    )
}


def nearest_machine(peak_flops: float | None, memory_gib: float | None) -> Machine:
    """Find the machine of a device by its peak bf16 FLOP/s, then its memory; Frontier for None."""
    if peak_flops is None or memory_gib is None:
        return MACHINES["frontier"]
    return min(
        MACHINES.values(),
        key=lambda machine: (
            abs(math.log(machine.peak_flops / peak_flops)),
            abs(math.log(machine.memory_gib / memory_gib)),
        ),
    )


def read_machine(name: str) -> Machine:
    """Find a machine by its name or read a JSON file; ValueError says what is wrong in it."""
    if name in MACHINES:
        return MACHINES[name]
    if not Path(name).is_file():
        raise ValueError(
            f"there is no machine {name}: use one of {', '.join(MACHINES)}, or the path of a "
            "JSON file that describes yours"
        )
    try:
        with open(name, encoding="utf-8") as file:
            values = json.loads(file.read(10**6))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the machine file {name} is not JSON: {error}") from None
    problem = next(_problems(values), None)
    if problem:
        raise ValueError(f"the machine file {name}: {problem}")
    base = _base(values)
    fitted = tuple(field for field in base.get("fitted", ()) if field not in values)
    given = {field: value for field, value in values.items() if field != "like"}
    return Machine(**base | {"name": Path(name).stem, "fitted": fitted} | given)


def _base(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the machine that a file names under "like", none if it names none."""
    return asdict(MACHINES[values["like"]]) if "like" in values else {}


def _problems(values: Any) -> Iterator[str]:
    """Yield what is wrong with the content of a machine file; later checks need the earlier."""
    known = {field.name: field for field in fields(Machine) if field.name != "fitted"}
    needed = [n for n, field in known.items() if field.default is MISSING and n != "name"]
    hint = f'"like", one of {", ".join(MACHINES)}, and what differs'
    if not isinstance(values, dict):
        yield f"it must hold one object with {hint}"
    if "like" in values and values["like"] not in [*MACHINES]:
        yield f"it is like {values['like']!r:.40}, but must have {hint}"
    missing = [n for n in needed if n not in values] if "like" not in values else []
    if missing:
        yield f"it lacks {', '.join(missing)}: give them, or {hint}"
    for key, value in values.items():
        if key == "like":
            continue
        if key not in known:
            yield f"it has the unknown field {key!r:.40}: use like, {', '.join(known)}"
        kind = known[key].type
        if kind is str:
            if not (isinstance(value, str) and value.isprintable()):
                yield f"{key} must be printable text"
            continue
        low, high = (1, 10**6) if kind is int else (0.001, 1e21)
        if key.endswith(("_seconds", "_loss", "workspace_gib", "hidden_share")):
            low, high = 0, 1 if key == "hidden_share" else 1000
        types = int if kind is int else int | float
        if not isinstance(value, types) or isinstance(value, bool) or not low <= value <= high:
            must = f"must be a {'whole ' * (kind is int)}number from {low:g} to {high:g}"
            yield f"{key} is {value!r:.40}, but {must}"
    all_values = _base(values) | values
    if all_values["ranks_per_node"] % all_values["ranks_per_package"]:
        yield "ranks_per_package must divide ranks_per_node"


# ---------------------------------------------------------------------------------------------
# Rings


@dataclass(frozen=True)
class Ring:
    """The ranks of one collective, and which links connect them."""

    ranks: int
    share: tuple[float, float, float]  # of connections by LINKS: mean over all groups of the job
    local: float  # ranks of one group per node


@lru_cache(maxsize=1024)
def build_ring(machine: Machine, world_size: int, ranks: int, stride: int) -> Ring:
    """Place all groups of `ranks` ranks, `stride` apart, that fill the world.

    Shard groups have stride 1, replicate groups the shard group's size (see mesh.py).
    """
    if ranks == 1:
        return Ring(1, (0.0, 0.0, 0.0), 1.0)
    package, node = (
        sum(
            pairs_inside(unit, world_size, ranks * stride, distance)
            for distance in (stride, (ranks - 1) * stride)
        )  # to the right, and from last to first
        for unit in (machine.ranks_per_package, machine.ranks_per_node)
    )
    share = (package / world_size, (node - package) / world_size, 1 - node / world_size)
    local = min(float(ranks), max(1.0, machine.ranks_per_node / stride))
    return Ring(ranks, share, local)


def pairs_inside(unit: int, world_size: int, block: int, distance: int) -> int:
    """Count pairs of ranks, `distance` apart in a block, that share a unit (package or node).

    Blocks and units fill the world in order of rank, so the count of a block depends only on where
    in a unit the block begins: at most `unit` blocks have to be counted.
    """
    starts = max(0, unit - distance)  # positions in a unit whose partner is in it too

    def below(rank: int) -> int:
        return rank // unit * starts + min(rank % unit, starts)

    period = unit // math.gcd(unit, block)
    counts = [below((i + 1) * block - distance) - below(i * block) for i in range(period)]
    whole, rest = divmod(world_size // block, period)
    return whole * sum(counts) + sum(counts[:rest])


def wire_bytes(kind: str, payload: float, ranks: int) -> float:
    """Bytes that a rank sends in a collective on a full tensor of `payload` bytes.

    In a ring a rank sends n - 1 of n parts: (n - 1) / n of the tensor. An all-reduce is a
    reduce-scatter and an all-gather, twice that (Patarasuk & Yuan 2009). In a pipelined broadcast
    all ranks but the last send the tensor once: (n - 1) / n of it on average.
    """
    return (2 if kind == "all_reduce" else 1) * payload * (ranks - 1) / ranks


def collective_seconds(machine: Machine, kind: str, payload: float, ring: Ring) -> float:
    """Seconds of one collective: launch, one latency per hop, bytes over the slowest link."""
    if ring.ranks == 1:
        return 0.0
    package, node, network = ring.share
    rates = [machine.package_bytes_per_second] if package else []
    hop = machine.node_hop_seconds
    if node:
        links = max(1.0, min(machine.node_links, ring.local - 1))
        rates.append(links * machine.node_bytes_per_second)
    if network:  # groups with few ranks on a node share its network with the others
        rates.append(
            machine.network_bytes_per_second * min(1.0, ring.local / machine.ranks_per_node)
        )
        hop = machine.hop_seconds
    hops = ring.ranks - 1
    if kind == "all_reduce":  # up and down a tree: NCCL and RCCL use one for all-reduce
        hops = 2 * math.ceil(math.log2(ring.ranks))
    sent = wire_bytes(kind, payload, ring.ranks)
    return machine.launch_seconds + hops * hop + sent / (min(rates) * machine.bandwidth_share)
