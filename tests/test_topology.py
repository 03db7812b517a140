"""runtime/topology.py: which ranks are near each other, the picture, the timed all-gather."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from ranks import environment, free_port, on_ranks

import mesh
from runtime import topology
from runtime.agreement import AgreedError

CPU = torch.device("cpu")
FRONTIER = (4, 5, 2, 3, 6, 7, 0, 1)  # OLCF's map of local ranks to GCDs


def places(nodes, order=FRONTIER, ranks=8):
    """Ranks of `nodes` nodes, with GCDs in this order, or none."""
    return [
        topology.Placement(
            rank=ranks * n + i,
            node=n,
            local_rank=i,
            host=f"node{n}",
            device="cpu",
            gcd=order[i] if order else None,
            pci="",
        )
        for n in range(nodes)
        for i in range(ranks)
    ]


def warnings_for(placements, group):
    topology.check_devices_differ(placements)
    return list(topology.placement_warnings(placements, (len(placements) // group, group)))


@pytest.mark.parametrize(
    ("environ", "index", "gcd"),
    [
        ({}, 3, 3),
        ({"ROCR_VISIBLE_DEVICES": "6"}, 0, 6),
        ({"ROCR_VISIBLE_DEVICES": "6"}, 4, 6),  # a CPU run has no device number, but a local rank
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 5, 5),
        ({"ROCR_VISIBLE_DEVICES": "4,5,2,3"}, 2, 2),
        ({"ROCR_VISIBLE_DEVICES": "4,5,2,3"}, 4, None),
        ({"ROCR_VISIBLE_DEVICES": "4,5,2,3", "HIP_VISIBLE_DEVICES": "1"}, 0, 5),
        ({"HIP_VISIBLE_DEVICES": "7"}, 0, 7),
        ({"ROCR_VISIBLE_DEVICES": "GPU-d1f2"}, 0, None),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "2"}, 0, None),
        ({"ROCR_VISIBLE_DEVICES": ""}, 1, 1),
    ],
)
def test_visible_gcd(environ, index, gcd):
    assert topology.visible_gcd(environ, index) == gcd


@pytest.mark.parametrize(
    ("order", "group", "where"),
    [
        (FRONTIER, 1, "one device"),
        (FRONTIER, 2, "one package"),
        (FRONTIER, 4, "two packages with a double link"),
        (FRONTIER, 8, "one node"),
        (FRONTIER, 16, "2 nodes"),
        (FRONTIER, 32, "4 nodes"),
        (None, 2, "one node"),
        (None, 16, "2 nodes"),
    ],
)
def test_groups_that_are_as_near_as_can_be(order, group, where):
    count = 32 // group
    assert warnings_for(places(4, order), group) == [
        f"shard groups: {count} of {group} ranks, each in {where}"
    ]


FAR = [
    # GCDs in numerical order, as srun without --gpu-bind=closest deals them out
    (
        range(8),
        8,
        4,
        "4 of 4 shard groups",
        "group 0 (ranks 0 1 2 3) spans one node",
        "two packages with a double link: give srun `--gpu-bind=closest`",
    ),
    (
        (4, 2, 5, 3, 6, 0, 7, 1),
        8,
        2,
        "8 of 8 shard",
        "group 0 (ranks 0 1) spans two packages with",
        "fit into one package: give srun `--gpu-bind=closest`",
    ),
    # groups over the edge of a node
    (
        FRONTIER,
        6,
        4,
        "2 of 3 shard groups",
        "group 1 (ranks 4 5 6 7) spans 2 nodes",
        "4 ranks fit into two packages with a double link: use a --group of 1, 2, 4 or 8",
    ),
    (
        None,
        6,
        4,
        "1 of 3 shard groups",
        "group 1 (ranks 4 5 6 7) spans 2 nodes",
        "fit into one node: use a --group that divides the ranks of a node, or is a multiple",
    ),
]


@pytest.mark.parametrize(("order", "ranks", "group", "count", "which", "advice"), FAR)
def test_groups_that_reach_too_far(order, ranks, group, count, which, advice):
    order = None if order is None else tuple(order)
    (sentence,) = warnings_for(places(2, order, ranks), group)
    assert sentence.startswith(f"warning: {count}")
    assert which in sentence and advice in sentence


def test_two_ranks_on_one_device():
    where = places(2, (4, 5, 2, 3, 6, 7, 0, 4))
    with pytest.raises(ValueError, match=r"^ranks 0 and 7 share one device, GCD 4 of node0: give"):
        warnings_for(where, 2)
    where = ("cuda:0", None, "0000:d1:00")
    same = [topology.Placement(r, r // 2, r % 2, f"n{r // 2}", *where) for r in (0, 1)]
    with pytest.raises(ValueError, match=r"^ranks 0 and 1 share one device, 0000:d1:00 of n0"):
        warnings_for(same, 1)
    apart = [topology.Placement(r, r, 0, f"n{r}", *where) for r in (0, 1)]
    assert len(warnings_for(apart, 1)) == 1  # one address, two nodes


def words(line):
    return " ".join(line.split())


def test_the_picture_of_two_nodes():
    lines = list(topology.format_topology(places(2), (4, 4)))
    assert lines[0] == "mesh 4 x 4 (replicate x shard): 16 ranks on 2 nodes"
    assert words(lines[1]) == "rank host local device GCD shard group replicate group"
    assert len(lines) == 18
    assert words(lines[2 + 13]) == "13 node1 5 cpu 7 3: 12 13 14 15 1: 1 5 9 13"


def test_the_picture_of_many_nodes_is_abbreviated():
    lines = list(topology.format_topology(places(1000), (1000, 8)))
    assert len(lines) == 2 + 8 + 8 + 1 + 8
    assert words(lines[2]) == "0 node0 0 cpu 4 0: 0 1 2 .. 7 0: 0 8 16 .. 7992"
    assert words(lines[2 + 16]) == ".. 997 more nodes"
    last = "7999 node999 7 cpu 1 999: 7992 7993 7994 .. 7999 7: 7 15 23 .. 7999"
    assert words(lines[-1]) == last


def test_slow_groups():
    assert topology.slow_groups([1.0, 1.1, 0.9, 2.5, 1.0]) == [3]
    assert topology.slow_groups([1.0, 3.0]) == [1]
    assert topology.slow_groups([1.0, 1.9, 1.0]) == [] == topology.slow_groups([5.0])
    lines = list(topology.format_timing([0.001, 0.002, 0.01], (3, 4)))
    assert "1.00 to 10.00 ms, median 6.29 GB/s per rank" in lines[0]  # 12 MiB in 2 ms
    assert lines[1:] == ["warning: shard group 2 (ranks 8 9 10 11) is slow: 10.00 ms"]
    assert list(topology.format_timing([0.1] * 4, (4, 1))) == [
        "all-gather: nothing to time, every rank is its own shard group"
    ]


# --- on ranks


def join():
    ranks = mesh.read_ranks(os.environ)
    torch.set_num_threads(1)
    mesh.init_ranks(ranks, CPU, timeout_minutes=1)
    return ranks


def gather_on_four():
    """Times of all groups; again with a slow rank 3; and what a broken all-gather leads to."""
    ranks, real = join(), dist.all_gather_into_tensor
    told = [topology.time_all_gather((2, 2), CPU, mib=1)]

    def slow(*args, **kwargs):
        time.sleep(0.3 if ranks.rank == 3 else 0)
        return real(*args, **kwargs)

    def broken(whole, piece, group):
        real(whole, piece + (ranks.rank == 2), group=group)

    dist.all_gather_into_tensor = slow
    told.append(topology.time_all_gather((2, 2), CPU, mib=1))
    dist.all_gather_into_tensor = broken
    try:
        told.append(topology.time_all_gather((2, 2), CPU, mib=1))
    except RuntimeError as error:
        told.append(str(error))
    finally:
        dist.all_gather_into_tensor = real
    shared = dict(os.environ, ROCR_VISIBLE_DEVICES="3")
    own = dict(os.environ, ROCR_VISIBLE_DEVICES=str(FRONTIER[ranks.rank]))
    for environ in (shared, own):
        try:
            told.append(topology.describe_topology(ranks, CPU, (2, 2), environ))
        except AgreedError as error:
            told.append(str(error))
    return told


def test_a_slow_group_is_named_and_wrong_numbers_are_an_error(tmp_path):
    told = on_ranks(4, gather_on_four, tmp_path)
    times, slow = told[0][0], told[0][1]
    assert len(times) == 2 and min(times) > 0
    assert slow[1] >= 0.3 and topology.slow_groups([slow[0], slow[1]]) == [1]
    for rank, mine in enumerate(told):
        assert mine[2].startswith("an all-gather returned wrong data on rank 2")
        assert mine[3].startswith("ranks 0 and 1 share one device, GCD 3 of ")  # on every rank
        assert mine[4] == told[0][4], rank
    assert told[0][4][-1] == "shard groups: 2 of 2 ranks, each in one package"
    json.dumps(told)  # plain numbers and words


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--group 3", "rank 0: 1 ranks cannot be split into shard groups of 3: use 1"),
        ("--device cuda", "rank 0: --device cuda: no GPU is visible"),
        ("--mode typo", "argument --mode: invalid choice: 'typo'"),
        ("--blr -1", "argument --blr: '-1' is not a number from 0 up"),
        ("--mode ddp --group 2", "--group is for --mode hybrid and"),
    ],
)
def test_the_command_refuses_what_training_refuses(flags, text, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    argv = flags.split() if "--device" in flags else ["--device", "cpu", *flags.split()]
    try:
        status = topology.main(argv)
    except SystemExit as exit_:
        status = exit_.code
    printed = capsys.readouterr()
    assert status == 2 and printed.err.startswith("runtime.topology: error: ")
    assert text in printed.err


def test_the_command_takes_the_flags_of_training(tmp_path):
    """By a single process, from another folder than that of the scripts."""
    env = environment(0, 1, free_port())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del env[name]
    flags = "--device cpu --mode ddp --model 3b --data DIR --resume PATH"
    done = subprocess.run(
        [sys.executable, "-m", "runtime.topology", *flags.split()],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert f"torch {torch.__version__}" in done.stdout and "nothing to time" in done.stdout
