"""runtime/topology.py: the table of ranks, devices that two share, the timed all-gather."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import join, on_ranks, python

import mesh
from runtime import topology
from runtime.agreement import AgreedError

CPU = torch.device("cpu")


def places(nodes, ranks=8):
    """Ranks of `nodes` nodes, each with a GPU of its own."""
    gpus = [f"cuda:{i} 0000:{i:02x}:00" for i in range(ranks)]
    return [
        topology.Placement(ranks * n + i, f"node{n}", i, gpus[i])
        for n in range(nodes)
        for i in range(ranks)
    ]


def words(line):
    return " ".join(line.split())


def test_the_table_names_groups_and_is_abbreviated():
    lines = topology.format_topology(places(2), (4, 4))
    assert lines[0] == "mesh 4 x 4 (replicate x shard): 16 ranks on 2 nodes" and len(lines) == 18
    assert words(lines[2 + 13]) == "13 node1 5 cuda:5 0000:05:00 3: 12 13 14 15 1: 1 5 9 13"
    split = topology.format_topology(places(1), (1, 4, 2))  # with --tp 2
    assert words(split[2 + 5]).endswith("1: 1 3 5 7 5: 5 2: 4 5")
    lines = topology.format_topology(places(1000), (1000, 8))
    assert len(lines) == 2 + 16 + 1 + 8 and words(lines[2 + 16]) == ".. 7976 more ranks"
    last = "7999 node999 7 cuda:7 0000:07:00 999: 7992 7993 7994 .. 7999 7: 7 15 23 .. 7999"
    assert words(lines[-1]) == last


def test_two_ranks_on_one_device():
    """Partitions of one GPU have its address, but names of their own."""

    def check(*gpus):
        ranks = [
            topology.Placement(rank, f"n{node}", rank, f"cuda:0 {address}", uuid)
            for rank, (node, address, uuid) in enumerate(gpus)
        ]
        topology.check_devices_differ(ranks)

    with pytest.raises(ValueError, match=r"^ranks 0 and 1 share one device, d1 of n0"):
        check((0, "d1", ""), (0, "d1", ""))
    check((0, "d1", ""), (1, "d1", ""))
    check((0, "d1", "MIG-1"), (0, "d1", "MIG-2"))
    check((0, "d1", ""), (0, "d2", ""))


def gather_on_four():
    """The table; times with a slow rank 3; what a shared device leads to, on each rank."""
    rank, real = join(), dist.all_gather
    ranks = mesh.read_ranks(os.environ)

    def slow(*args, **kwargs):
        time.sleep(0.5 if rank == 3 else 0)
        return real(*args, **kwargs)

    dist.all_gather = slow
    seconds = topology.time_all_gather((2, 2), CPU)
    os.environ["SLURMD_NODENAME"] = "here"
    table = topology.describe_topology(ranks, CPU, (2, 2))
    topology.find_placement = lambda *_: topology.Placement(rank, "n0", rank, "cuda:0 d1")
    with pytest.raises(AgreedError, match=r"^ranks 0 and 1 share one device") as shared:
        topology.describe_topology(ranks, CPU, (2, 2))
    return seconds, table, shared.value.status


def test_slow_groups_and_shared_devices_on_ranks(tmp_path):
    for slow, table, status in on_ranks(4, gather_on_four, tmp_path):
        _, *named = topology.format_timing(slow, (2, 2))
        assert len(named) == 1 and "shard group 1 (ranks 2 3)" in named[0]
        assert slow[1] >= 0.5
        assert words(table[-1]) == "3 here 3 cpu 1: 2 3 1: 1 3" and status == 2


def test_the_command_prints_our_lines_and_no_other(tmp_path):
    """By torchrun, with the flags of training, and nothing of PyTorch's in between."""
    flags = "--device cpu --mode full_shard --model 3b --data images --resume PATH"
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m runtime.topology"
    (tmp_path / "images").mkdir()
    printed = python(*launch.split(), *flags.split(), cwd=tmp_path)
    first, head, names, *table, last = printed.splitlines()
    assert f"torch {torch.__version__}" in first
    assert head == "mesh 1 x 2 (replicate x shard): 2 ranks on 1 node" and "host" in names
    assert [row.split()[0] for row in table] == ["0", "1"] and last.startswith("all-gather of 16")
