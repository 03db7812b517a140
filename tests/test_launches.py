"""Other launches than a plain srun or torchrun: restarts, salloc's shell, an OUT not shared."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from ranks import free_port, join, on_ranks, read_log, single_environment

import checkpoint
import mesh

CPU = torch.device("cpu")

# --- torchrun --max-restarts


def one_attempt(agent_port: int) -> tuple[float, str]:
    """On a rank, as torchrun starts it: join, and add up."""
    os.environ["MASTER_PORT"] = str(agent_port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    join()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return total.item(), os.environ["MASTER_PORT"]


def test_an_attempt_meets_nothing_of_the_one_before(tmp_path):
    """Whose addresses torchrun's store keeps."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(2):
        found = on_ranks(2, partial(one_attempt, agent.port), tmp_path / str(attempt), 60)
        assert [total for total, _ in found] == [2.0, 2.0]
        assert agent.port not in [int(port) for _, port in found]


# Each file of TROUBLE is one: how, the rank, the step, from 0. It happens once.
TROUBLED = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.set_num_threads(1)
import train_fsdp
step = train_fsdp.train_step

def troubled(training, guard, number, *args, **kwargs):
    for name in os.listdir(os.environ["TROUBLE"]):
        how, rank, at = name.split(".")
        if rank == os.environ["RANK"] and int(at) == number:
            os.unlink(os.path.join(os.environ["TROUBLE"], name))
            if how == "crash":
                os._exit(9)
            time.sleep(10**6)
    return step(training, guard, number, *args, **kwargs)

train_fsdp.train_step = troubled
if __name__ == "__main__":
    raise SystemExit(train_fsdp.main(sys.argv[1:]))
"""
FLAGS = (
    "--model tiny:depth=1 --img-size 32 --device cpu --precision fp32 --global-batch 4 --workers 0 "
    "--mode full_shard --steps 12 --log-every 1 --save-every 2 --timeout 15 "
    f"--data {ROOT}/examples/tiles/train"
).split()


def torchrun(folder: Path, *flags: str) -> subprocess.Popen:
    """Two ranks together, of the script that meets trouble."""
    script = folder / "troubled.py"
    script.write_text(TROUBLED)
    env = single_environment() | {"TROUBLE": str(folder / "trouble"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(script), *FLAGS]
    output = open(folder / "output", "ab")  # noqa: SIM115
    command += ["--out", str(folder / "out")]
    return subprocess.Popen(command, env=env, stdout=output, stderr=output, cwd=ROOT)


@pytest.mark.full
@pytest.mark.parametrize(
    ("nodes", "trouble"), [(1, ["crash.0.5"]), (2, ["crash.1.3", "hang.0.6", "crash.0.9"])]
)
def test_a_run_that_torchrun_restarts_is_one_run(nodes, trouble, tmp_path):
    (tmp_path / "trouble").mkdir()
    for name in trouble:
        (tmp_path / "trouble" / name).touch()
    if nodes == 1:
        where = [["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]]
    else:
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        meet += ["--rdzv-id", "mae", "--local-addr", "127.0.0.1", "--nnodes", "2"]
        where = [[*meet, "--nproc-per-node", "1"]] * 2
    agents = [torchrun(tmp_path, "--max-restarts", "3", *flags) for flags in where]
    statuses = [agent.wait(timeout=500) for agent in agents]
    output = (tmp_path / "output").read_text()
    assert not any(statuses) and (tmp_path / "out" / "done").exists(), output[-3000:]
    _, steps, end = read_log(tmp_path / "out" / "log.jsonl")
    assert end["reason"] == "done" and steps[-1]["step"] == 12


# --- a shell of a Slurm job

SHELL = {  # what salloc's interactive step sets: the step is none of srun's
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
SPECIAL = [str(2**32 - number) for number in (3, 4, 5, 6)]  # pending, external, batch, interactive


@pytest.mark.parametrize("step", SPECIAL)
def test_a_shell_of_a_job_is_no_task_of_srun(step):
    shell = SHELL | {"SLURM_STEP_ID": step, "SLURM_JOB_NUM_NODES": "1"}
    for one in ({"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}, {"SLURM_TASKS_PER_NODE": "1"}):
        ranks = mesh.read_ranks(shell | one)
        assert (ranks.world_size, ranks.launcher, ranks.rendezvous) == (1, "single", {})
    for several in ({"SLURM_NTASKS": "4"}, {"SLURM_JOB_NUM_NODES": "2"}):
        with pytest.raises(RuntimeError, match=r"type `srun python`, .* `srun -n1 python`"):
            mesh.read_ranks(shell | several)
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert mesh.read_ranks(shell | {"SLURM_NTASKS": "4"} | torchrun).launcher == "torchrun"


def test_one_task_of_srun_in_a_larger_job_is_one_process():
    step = SHELL | {"SLURM_STEP_ID": "3", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "4(x2)"}
    ranks = mesh.read_ranks(step | {"SLURM_JOB_NUM_NODES": "2"})
    assert (ranks.rank, ranks.world_size) == (0, 1)


# --- an OUT that the nodes do not share


def save_each_to_its_own() -> str:
    """On each of two ranks: a save to a folder of its own; what all of them are told."""
    torch.set_num_threads(1)
    ranks = mesh.read_ranks(os.environ)
    mesh.init_ranks(ranks, CPU, timeout_minutes=1)
    torch.manual_seed(0)
    grid = mesh.build_mesh((1, 2), CPU)
    model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(4, 4), mesh=grid["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    own = Path(os.environ["FOLDER"], f"node{ranks.rank}")
    try:
        checkpoint.save(own, 1, model, optimizer)
    except OSError as error:
        assert not checkpoint.list_checkpoints(own)
        return str(error)
    finally:
        dist.barrier()
    return "saved"


def test_a_save_to_folders_that_are_not_shared_has_failed(tmp_path):
    for told in on_ranks(2, save_each_to_its_own, tmp_path):
        assert "save to a folder that all nodes share" in told
