"""mesh.py: launchers' variables, devices, the mesh's groups."""

import os
import re

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

import mesh

CPU = torch.device("cpu")

# --- ranks

# Rank 6 of 8 on two nodes of four, and rank 17 of 20 on nodes of 8, 8 and 4
TORCHRUN = {
    "RANK": "6",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "17",
    "SLURM_NTASKS": "20",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "8(x2),4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "3442",
}
ONE_NODE = {  # rank 2 of 4, nothing exported by hand
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "4",
}


def without(environ, *names):
    return {k: v for k, v in environ.items() if k not in names}


def numbers(environ):
    """(rank, world size, local rank, ranks on the node, node, launcher)"""
    r = mesh.read_ranks(environ)
    return r.rank, r.world_size, r.local_rank, r.local_world_size, r.node, r.launcher


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, (6, 8, 2, 4, 1, "torchrun")),
        (without(TORCHRUN, "GROUP_RANK"), (6, 8, 2, 4, 1, "torchrun")),
        (SRUN, (17, 20, 1, 4, 2, "srun")),
        (SRUN | {"SLURM_PROCID": "9", "SLURM_NODEID": "1"}, (9, 20, 1, 8, 1, "srun")),
        (ONE_NODE, (2, 4, 2, 4, 0, "srun")),
        # a step of a part of the job: the job's own counts stand beside the step's
        (
            ONE_NODE | {"SLURM_TASKS_PER_NODE": "8(x4)", "SLURM_STEP_TASKS_PER_NODE": "4"},
            (2, 4, 2, 4, 0, "srun"),
        ),
        # `srun torchrun`: Slurm counts agents, two here, and this one is the second
        (
            ONE_NODE
            | {
                "SLURM_NTASKS": "2",
                "SLURM_TASKS_PER_NODE": "1(x2)",
                "SLURM_PROCID": "1",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "1",
            }
            | TORCHRUN,
            (6, 8, 2, 4, 1, "torchrun"),
        ),
        ({}, (0, 1, 0, 1, 0, "single")),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "3442"}, (0, 1, 0, 1, 0, "single")),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1"}, (0, 1, 0, 1, 0, "single")),
        ({"SLURM_NTASKS": "4"}, (0, 1, 0, 1, 0, "single")),  # a preset for srun, outside of any job
    ],
)
def test_read_ranks(environ, expected):
    assert numbers(environ) == expected


def test_all_ranks_of_an_uneven_slurm_job():
    nodes = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    for rank, (node, local) in enumerate(nodes):
        environ = SRUN | {
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local),
            "SLURM_NTASKS": "7",
            "SLURM_TASKS_PER_NODE": "3(x2),1",
        }
        assert numbers(environ) == (rank, 7, local, (3, 3, 1)[node], node, "srun")


def test_one_node_under_srun_needs_no_address():
    def meet(**changes):
        environ = ONE_NODE | changes
        before = dict(environ)
        init = mesh.read_ranks(environ).init
        assert environ == before
        return init["MASTER_ADDR"], int(init["MASTER_PORT"])

    assert meet()[0] == "127.0.0.1"
    assert meet() == meet(SLURM_PROCID="0", SLURM_LOCALID="0")  # all ranks meet in one place
    steps = [meet(SLURM_STEP_ID=str(step))[1] for step in range(6)]
    jobs = [meet(SLURM_JOB_ID=str(job))[1] for job in (77, 78, 79, 1234567, 1234568)]
    assert len(set(steps)) == 6
    assert len(set(jobs)) == 5
    assert all(1024 < port < 32768 for port in steps + jobs)  # below what systems hand out
    assert meet(MASTER_ADDR="10.0.0.9", MASTER_PORT="4000") == ("10.0.0.9", 4000)


def test_given_addresses_are_kept():
    for environ, port in ((TORCHRUN, "29500"), (SRUN, "3442")):
        init = mesh.read_ranks(environ).init
        assert (init["MASTER_ADDR"], init["MASTER_PORT"]) == ("10.0.0.1", port)


REQUIRED = [
    *((TORCHRUN, name, "torchrun") for name in TORCHRUN if name != "GROUP_RANK"),
    *((SRUN, name, "srun") for name in SRUN if name[:5] == "SLURM" and name[-3:] != "_ID"),
    *((SRUN, name, f"`export {name}=") for name in ("MASTER_ADDR", "MASTER_PORT")),
]


@pytest.mark.parametrize(("environ", "name", "setter"), REQUIRED)
def test_a_missing_variable_is_named_with_who_sets_it(environ, name, setter):
    sentence = f"^the environment variable {name} is missing; it is set by .*{re.escape(setter)}"
    for incomplete in (without(environ, name), environ | {name: ""}):
        with pytest.raises(RuntimeError, match=sentence):
            mesh.read_ranks(incomplete)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_one_variable_of_torchrun_is_no_single_process(name):
    with pytest.raises(RuntimeError, match=f"is missing; it is set by torchrun, .* {name} is set$"):
        mesh.read_ranks({name: "0"})


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "²", "\u0661", "1_0", "9" * 5000])
@pytest.mark.parametrize(
    ("environ", "name"),
    [(e, n) for e, n, _ in REQUIRED if n != "MASTER_ADDR" and "TASKS_" not in n],
)
def test_a_variable_that_is_no_number_is_named(environ, name, value):
    with pytest.raises(
        RuntimeError, match=f"^{name} is '{value[:30]}.*, but must be a whole number from "
    ):
        mesh.read_ranks(environ | {name: value})


@pytest.mark.parametrize("environ", [TORCHRUN, SRUN, ONE_NODE])
@pytest.mark.parametrize("port", ["0", "65536", "99999999"])
def test_a_port_that_is_none_is_named(environ, port):
    with pytest.raises(RuntimeError, match=f"^MASTER_PORT is '{port}', .* from 1 to 65535; set by"):
        mesh.read_ranks(environ | {"MASTER_PORT": port})


def test_a_group_rank_that_is_no_number_is_named():
    with pytest.raises(RuntimeError, match="GROUP_RANK is 'x'"):
        mesh.read_ranks(TORCHRUN | {"GROUP_RANK": "x"})


@pytest.mark.parametrize("text", ["8x2", "8(2)", "8,", "(x2)", "eight"])
def test_tasks_per_node_that_cannot_be_read_are_named(text):
    with pytest.raises(RuntimeError, match=f"tasks per node are {re.escape(repr(text))}"):
        mesh.read_ranks(SRUN | {"SLURM_TASKS_PER_NODE": text})


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_NTASKS": "21"},
        {"SLURM_TASKS_PER_NODE": "8(x3)"},
        {"SLURM_TASKS_PER_NODE": "20"},  # and node 2
        {"SLURM_NODEID": "3"},
        {"SLURM_TASKS_PER_NODE": "1(x99999999999)"},  # no list so long is made
        {"SLURM_TASKS_PER_NODE": ",".join(["1(x99999999999)"] * 5000)},
    ],
)
def test_slurm_variables_that_disagree(changes):
    with pytest.raises(RuntimeError, match="Slurm's variables disagree: tasks per node"):
        mesh.read_ranks(SRUN | changes)


def test_ranks_dealt_out_to_the_nodes_in_turn_are_refused():
    """`srun --distribution=cyclic`: the mesh would take ranks of two nodes for neighbours."""
    cyclic = {
        "SLURM_NTASKS": "4",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
    }
    with pytest.raises(RuntimeError):
        mesh.read_ranks(SRUN | cyclic)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8, local rank 2 of 4: .*torchrun"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "rank 6 of 8, local rank 4 of 4: .*torchrun"),
        (ONE_NODE | {"SLURM_PROCID": "4"}, "rank 4 of 4, local rank 2 of 4: .*srun"),
        (ONE_NODE | {"SLURM_LOCALID": "4"}, "rank 2 of 4, local rank 4 of 4: .*srun"),
    ],
)
def test_a_rank_must_be_smaller_than_its_count(environ, text):
    with pytest.raises(RuntimeError, match=text):
        mesh.read_ranks(environ)


def test_a_node_of_no_ranks_is_refused():
    with pytest.raises(RuntimeError):
        mesh.read_ranks(without(TORCHRUN, "GROUP_RANK") | {"LOCAL_WORLD_SIZE": "0"})


def test_the_batch_shell_of_a_slurm_job_is_no_single_process():
    """Slurm sets PROCID and the like there too, but no step."""
    shell = without(ONE_NODE, "SLURM_STEP_ID") | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    with pytest.raises(RuntimeError, match=r"1 nodes and 4 tasks.* not started by srun: type"):
        mesh.read_ranks(shell)


def test_the_batch_shell_of_two_nodes_is_no_single_process():
    """`#SBATCH --nodes=2` alone: Slurm sets no SLURM_NTASKS."""
    shell = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
    with pytest.raises(RuntimeError, match="srun"):
        mesh.read_ranks(shell)


def test_cpu_cores(monkeypatch):
    """Slurm binds a rank to cores of its own; other launchers leave it all of the node's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)), raising=False)
    assert mesh.cpu_cores(mesh.read_ranks(SRUN)) == 24
    assert mesh.cpu_cores(mesh.read_ranks(TORCHRUN)) == 6  # 4 ranks on the node
    assert mesh.cpu_cores(mesh.read_ranks({})) == 24
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert mesh.cpu_cores(mesh.read_ranks(TORCHRUN)) == 1


# --- devices


def local(rank, count):
    """A rank of the second of two nodes of `count` ranks."""
    counts = {"WORLD_SIZE": str(2 * count), "LOCAL_WORLD_SIZE": str(count)}
    return mesh.read_ranks(TORCHRUN | counts | {"RANK": str(count + rank), "LOCAL_RANK": str(rank)})


@pytest.fixture
def gpus(monkeypatch):
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_no_gpu(gpus):
    gpus(0)
    assert mesh.pick_device("auto", local(1, 2)) == CPU
    assert mesh.pick_device("cpu", local(1, 2)) == CPU
    with pytest.raises(ValueError, match=r"^--device cuda: no GPU is visible .*--device cpu$"):
        mesh.pick_device("cuda", local(1, 2))


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_rank_that_sees_one_gpu_takes_it(gpus, name):
    gpus(1)
    picked = [mesh.pick_device(name, local(rank, 8)) for rank in range(8)]
    assert picked == [torch.device("cuda", 0)] * 8
    assert mesh.pick_device("cpu", local(3, 8)) == CPU


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_rank_that_sees_all_gpus_takes_its_own(gpus, name):
    gpus(8)
    for count in (8, 4):
        picked = [mesh.pick_device(name, local(rank, count)).index for rank in range(count)]
        assert picked == list(range(count))


def test_more_ranks_than_gpus(gpus):
    gpus(4)
    sentence = "^8 ranks on this node share 4 GPUs: start 4 ranks per node, or use --device cpu$"
    for name in ("auto", "cuda"):
        with pytest.raises(ValueError, match=sentence):
            mesh.pick_device(name, local(0, 8))
    assert mesh.pick_device("cpu", local(0, 8)) == CPU


# --- the mesh


def test_check_group_names_the_sizes_that_fit():
    for group in (1, 2, 3, 4, 6, 12):
        mesh.check_group(12, group)
    twelve, eight = "1, 2, 3, 4, 6, 12", "1, 2, 4, 8"
    wrong = [(5, 12, twelve), (24, 12, twelve), (0, 8, eight), (3, 7, "1, 7"), (-1, 1, "1")]
    for group, world, sizes in wrong:
        sentence = f"^{world} ranks cannot be split into shard groups of {group}: use {sizes}$"
        with pytest.raises(ValueError, match=sentence):
            mesh.check_group(world, group)


# shard group: (nodes of 1, 2, 3, 4, 6 and 8 ranks) whose edge some group reaches over
STRADDLES = {
    1: (False, False, False, False, False, False),
    2: (True, False, True, False, False, False),
    3: (True, True, False, True, False, True),
    4: (True, True, True, False, True, False),
    6: (True, True, True, True, False, True),
    8: (True, True, True, True, True, False),
}


def test_straddles():
    for group, expected in STRADDLES.items():
        assert tuple(mesh.straddles(group, node) for node in (1, 2, 3, 4, 6, 8)) == expected


# --- several ranks


def test_a_single_process_needs_no_address(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    mesh.init_ranks(mesh.read_ranks({}), CPU)
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        assert mesh.build_mesh((1, 1), CPU).shape == (1, 1)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def fake_rank():
    """Make this process one rank of many, whose collectives do nothing."""

    def become(rank, world):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "rows"),  # the shard groups
    [
        ((2, 4), [[0, 1, 2, 3], [4, 5, 6, 7]]),  # the example in mesh.py's docstring
        ((4, 2), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ((1, 8), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ((8, 1), [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_the_mesh_is_the_one_of_the_docstring(fake_rank, shape, rows):
    for rank in range(8):
        fake_rank(rank, 8)
        grid = mesh.build_mesh(shape, CPU)
        groups = [grid.get_group(dimension) for dimension in ("replicate", "shard")]
        row = next(row for row in rows if rank in row)
        column = [row_[row.index(rank)] for row_ in rows]
        assert [dist.get_process_group_ranks(group) for group in groups] == [column, row]


def test_a_mesh_of_another_size_is_refused(fake_rank):
    fake_rank(3, 8)
    with pytest.raises(ValueError, match="8 ranks cannot be split into shard groups of 3: use 1"):
        mesh.build_mesh((2, 3), CPU)
    with pytest.raises(ValueError, match="a 2 x 2 mesh does not hold 8 ranks"):
        mesh.build_mesh((2, 2), CPU)


def joined():
    """Join the others; the rank, the world size and the sum of all ranks as gloo finds it."""
    mesh.init_ranks(mesh.read_ranks(os.environ), CPU, timeout_minutes=1)
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    found = dist.get_rank(), dist.get_world_size(), total.item()
    dist.destroy_process_group()
    return found


def test_init_ranks_joins_all_ranks(tmp_path):
    assert on_ranks(3, joined, tmp_path) == [(0, 3, 3.0), (1, 3, 3.0), (2, 3, 3.0)]
