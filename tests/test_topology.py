"""runtime/topology.py: the table of ranks, devices that two share, the timed all-gather."""

import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, join, on_ranks, run_script, start_ranks

import mesh
from runtime import topology
from runtime.agreement import AgreedError

CPU = torch.device("cpu")


def test_two_ranks_on_one_device():
    """Partitions of one GPU have its address, but names of their own."""

    def check(*gpus):
        topology.check_devices_differ(
            [(f"n{node}", "0", f"cuda:0 {address}", uuid) for node, address, uuid in gpus]
        )

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
    times = topology.time_all_gather((2, 2), CPU)
    os.environ["SLURMD_NODENAME"] = "here"
    table = topology.describe_topology(ranks, CPU, (2, 2))
    topology.find_placement = lambda *_: ("n0", str(rank), "cuda:0 d1", "")
    with pytest.raises(AgreedError, match=r"^ranks 0 and 1 share one device") as shared:
        topology.describe_topology(ranks, CPU, (2, 2))
    return times, table, shared.value.status


def test_slow_groups_and_shared_devices_on_ranks(tmp_path):
    found = on_ranks(4, gather_on_four, tmp_path)
    for (_, slow), _, status in found:
        assert slow.startswith("warning: shard group 1 (ranks 2 to 3) is slow: 5") and status == 2
    assert " ".join(found[0][1][-1].split()) == "3 here 3 cpu 1: 2 3 1: 1 3"


def test_the_command_prints_our_lines_and_no_other(tmp_path):
    """On two ranks, with the flags of training, and nothing of PyTorch's in between."""
    flags = f"--device cpu --mode full_shard --model 3b --data {tmp_path} --resume PATH"
    command = ["-m", "runtime.topology", *flags.split()]
    start_ranks(2, partial(run_script, command), tmp_path / "ranks", free_port(), 120)
    head, names, *table, last = (tmp_path / "ranks/rank0.txt").read_text().splitlines()
    assert head == "mesh 1 x 2 (replicate x shard): 2 ranks on 1 node" and "host" in names
    assert [row.split()[0] for row in table] == ["0", "1"] and last.startswith("all-gather of 16")
    assert not (tmp_path / "ranks/rank1.txt").read_text()
