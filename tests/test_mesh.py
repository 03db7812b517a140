"""mesh.py: launchers' variables, devices, the mesh's groups."""

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import mesh

CPU = torch.device("cpu")

# --- ranks

# Rank 6 of 8 on two nodes of four, and rank 17 of 24 on three nodes of 8
ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "3442"}
NUMBERS = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"
TORCHRUN = ADDRESS | dict(zip(NUMBERS, "68241", strict=True))
SRUN = ADDRESS | {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "17",
    "SLURM_NTASKS": "24",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "8(x3)",
}
ONE_NODE = {  # rank 2 of 4, nothing exported by hand
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "2",
    "SLURM_TASKS_PER_NODE": "4",
}

ALONE = {  # a single task
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_TASKS_PER_NODE": "1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, (6, 8, 2, 4, "torchrun")),
        (SRUN, (17, 24, 1, 8, "srun")),
        # a step of a part of the job: the job's own counts stand beside the step's
        (
            ONE_NODE | {"SLURM_TASKS_PER_NODE": "8(x4)", "SLURM_STEP_TASKS_PER_NODE": "4"},
            (2, 4, 2, 4, "srun"),
        ),
        # `srun torchrun`: Slurm counts agents
        (ONE_NODE | TORCHRUN, (6, 8, 2, 4, "torchrun")),
        # a job script that exports what torch.distributed needs, before srun or in each task
        (SRUN | {"WORLD_SIZE": "24"}, (17, 24, 1, 8, "srun")),
        (ONE_NODE | ALONE | {"WORLD_SIZE": "4"}, (0, 1, 0, 1, "srun")),  # `srun -n1` in that script
        (SRUN | {"RANK": "17", "WORLD_SIZE": "24", "LOCAL_RANK": "1"}, (17, 24, 1, 8, "srun")),
        ({"SLURM_NTASKS": "4"}, (0, 1, 0, 1, "single")),  # a preset for srun, outside of any job
    ],
)
def test_read_ranks(environ, expected):
    r = mesh.read_ranks(environ)
    found = r.rank, r.world_size, r.local_rank, r.local_world_size, r.launcher
    assert found == expected


def test_one_node_under_srun_needs_no_address():
    """All ranks find the same port, other jobs and steps another one; what is given is kept."""

    def meet(**changes):
        found = mesh.read_ranks(ONE_NODE | changes).rendezvous
        return found["MASTER_ADDR"], int(found["MASTER_PORT"])

    assert meet() == meet(SLURM_PROCID="0", SLURM_LOCALID="0")
    jobs = [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "78"}, {"SLURM_JOB_ID": "1234567"}, {}]
    found = [meet(**job) for job in jobs]
    assert len({*found}) == 4 and {address for address, _ in found} == {"127.0.0.1"}
    assert all(1024 < port < 32768 for _, port in found)  # below what systems hand out
    assert meet(MASTER_ADDR="10.0.0.9", MASTER_PORT="4000") == ("10.0.0.9", 4000)


def test_one_rank_under_srun_needs_no_port():
    """Several runs may start in one step, as from the shell of `srun --pty bash`."""
    for step in ({}, {"SLURM_STEP_TASKS_PER_NODE": "1"}):
        ranks = mesh.read_ranks(ONE_NODE | ALONE | step)
        assert (ranks.world_size, ranks.rendezvous) == (1, {})


@pytest.mark.parametrize(("environ", "launcher"), [(TORCHRUN, "torchrun"), (SRUN, "srun")])
def test_a_missing_variable_is_named_with_who_sets_it(environ, launcher):
    """A job is never taken for a single process."""
    for name in environ.keys() - {"GROUP_RANK", "SLURM_JOB_ID", "SLURM_STEP_ID"}:
        sentence = f"{name}.*, which {launcher} sets, is missing"
        if launcher == "srun" and name in ADDRESS:
            sentence = f"{name}.* is missing: on several nodes, type `export"
        with pytest.raises(RuntimeError, match=sentence):
            mesh.read_ranks({k: v for k, v in environ.items() if k != name})


SHELL = "not started by srun: type `srun python"  # the batch shell of a job
UNEVEN = "start all ranks with one srun, equally many on each node"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({k: v for k, v in ONE_NODE.items() if k != "SLURM_STEP_ID"}, SHELL),
        ({"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2"}, SHELL),  # no SLURM_NTASKS
        (SRUN | {"SLURM_TASKS_PER_NODE": "8(x2),4,4"}, UNEVEN),
        (SRUN | {"SLURM_TASKS_PER_NODE": "10(x2)"}, UNEVEN),
    ],
)
def test_what_srun_did_not_start_on_even_nodes_is_refused(environ, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        mesh.read_ranks(environ)


@pytest.mark.parametrize(
    ("name", "gpus", "picked"),
    [
        ("auto", 0, "cpu"),
        ("cpu", 4, "cpu"),
        ("cuda", 0, ValueError("^--device cuda: no GPU is visible .*--device cpu$")),
        ("auto", 1, "cuda:0"),  # bound to a GPU of its own
        ("cuda", 4, "cuda:2"),  # sees all of the node's
        ("auto", 3, ValueError("^4 ranks on this node share 3 GPUs: start 3 ranks per node")),
    ],
)
def test_pick_device(name, gpus, picked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", Mock(return_value=gpus))
    ranks = mesh.read_ranks(TORCHRUN)  # local rank 2 of 4
    if isinstance(picked, str):
        assert mesh.pick_device(name, ranks) == torch.device(picked)
    else:
        with pytest.raises(ValueError, match=str(picked)):
            mesh.pick_device(name, ranks)


# --- the mesh


def test_mesh_shapes():
    """Groups must divide the world, and only the hybrid modes have them."""
    assert mesh.mesh_shape("none", 8) == (8, 1)
    assert mesh.mesh_shape("world", 8) == (1, 8)
    assert mesh.mesh_shape("group", 8, 2) == (4, 2)
    for shard_over, group in (("world", 2), ("none", 8), ("group", None)):
        with pytest.raises(ValueError, match="the hybrid modes need `group`"):
            mesh.mesh_shape(shard_over, 8, group)
    with pytest.raises(ValueError, match="groups of 3: use 1, 2, 4, 8, or start"):
        mesh.mesh_shape("group", 8, 3)


def test_the_default_group_is_a_node():
    assert [mesh.default_group(16, 8), mesh.default_group(4, 8), mesh.default_group(1, 1)] == [
        8,
        4,
        1,
    ]


def test_the_mesh_is_the_one_of_the_docstring():
    rows = [[0, 1, 2, 3], [4, 5, 6, 7]]
    for rank in range(8):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        grid = mesh.build_mesh((2, 4), CPU)
        groups = [grid.get_group(dimension) for dimension in ("replicate", "shard")]
        column = [row[rank % 4] for row in rows]
        assert [dist.get_process_group_ranks(g) for g in groups] == [column, rows[rank // 4]]
        with pytest.raises(ValueError, match=r"a mesh of \(2, 3\) does not fit 8 ranks"):
            mesh.build_mesh((2, 3), CPU)
        dist.destroy_process_group()
