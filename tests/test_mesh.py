"""mesh.py: launchers' variables, devices, the mesh's groups."""

import os
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import mesh
from runtime.device_batches import worker_count

CPU = torch.device("cpu")

# --- ranks

# Rank 6 of 8 on two nodes of four, and rank 17 of 20 on nodes of 8, 8 and 4
ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "3442"}
NUMBERS = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"
TORCHRUN = ADDRESS | dict(zip(NUMBERS, "68241", strict=True))
SRUN = ADDRESS | {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "17",
    "SLURM_NTASKS": "20",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "8(x2),4",
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
        (SRUN, (17, 20, 1, 4, "srun")),
        # a step of a part of the job: the job's own counts stand beside the step's
        (
            ONE_NODE | {"SLURM_TASKS_PER_NODE": "8(x4)", "SLURM_STEP_TASKS_PER_NODE": "4"},
            (2, 4, 2, 4, "srun"),
        ),
        # `srun torchrun`: Slurm counts agents
        (ONE_NODE | TORCHRUN, (6, 8, 2, 4, "torchrun")),
        # a job script that exports what torch.distributed needs, before srun or in each task
        (SRUN | {"WORLD_SIZE": "20"}, (17, 20, 1, 4, "srun")),
        (ONE_NODE | ALONE | {"WORLD_SIZE": "4"}, (0, 1, 0, 1, "srun")),  # `srun -n1` in that script
        (SRUN | {"RANK": "17", "WORLD_SIZE": "20", "LOCAL_RANK": "1"}, (17, 20, 1, 4, "srun")),
        # mpiexec, with torchrun's variables exported in each process
        (TORCHRUN | {"PMI_SIZE": "8", "PMI_RANK": "6"}, (6, 8, 2, 4, "torchrun")),
        (SRUN | {"PMI_SIZE": "20"}, (17, 20, 1, 4, "srun")),  # srun --mpi=pmi2
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": ""}, (0, 1, 0, 1, "single")),
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
MPI = "says that 4 processes were started, but .* one of 1: .* or export RANK, WORLD_SIZE"
CYCLIC = "not number the ranks node by node: give srun `--distribution=block`"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({k: v for k, v in ONE_NODE.items() if k != "SLURM_STEP_ID"}, SHELL),
        ({"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2"}, SHELL),  # no SLURM_NTASKS
        # under mpiexec, flux or jsrun each process would train on its own, in the same folder
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, MPI),
        ({"PMI_SIZE": "4"}, MPI),
        # in the shell of `srun --pty bash`
        (ONE_NODE | ALONE | {"PMI_SIZE": "4"}, MPI),
        (ONE_NODE | ALONE | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, MPI),
        ({"FLUX_JOB_SIZE": "4"}, MPI),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "OMPI_COMM_WORLD_SIZE": "4"}, MPI),
        (SRUN | {"SLURM_TASKS_PER_NODE": "10(x2)"}, CYCLIC),  # another place than the rank's
        (SRUN | {"SLURM_TASKS_PER_NODE": "8(x2)"}, "add up to 16: start all ranks with one srun"),
        (SRUN | {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, CYCLIC),
    ],
)
def test_what_no_known_launcher_started_in_blocks_is_refused(environ, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        mesh.read_ranks(environ)


def test_loader_workers(monkeypatch):
    """Slurm binds a rank to cores of its own; other launchers leave it all of the node's."""
    cores = Mock(return_value=set(range(24)))
    monkeypatch.setattr(os, "sched_getaffinity", cores, raising=False)
    workers = [worker_count(None, mesh.read_ranks(environ)) for environ in (SRUN, TORCHRUN, {})]
    assert workers == [16, 5, 16]  # 4 ranks on the node
    cores.return_value = {0, 1}
    assert worker_count(None, mesh.read_ranks(TORCHRUN)) == 0


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
