"""Launches by torchrun and Slurm: restarts, the shell of a job, nodes that are not alike."""

import os
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from ranks import free_port, join, on_ranks, read_log, single_environment

import checkpoint
import data
import mesh
import prepare
import run

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


@pytest.mark.full
def test_a_run_that_torchrun_restarts_is_one_run(tmp_path):
    """Two launchers, as on two nodes, of a rank each."""
    script = tmp_path / "troubled.py"
    script.write_text(TROUBLED)
    (tmp_path / "trouble").mkdir()
    for name in ("crash.1.3", "hang.0.6", "crash.0.9"):
        (tmp_path / "trouble" / name).touch()
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command += ["--rdzv-id", "mae", "--local-addr", "127.0.0.1", "--nnodes", "2"]
    command += ["--nproc-per-node", "1", str(script), *FLAGS, "--out", str(tmp_path / "out")]
    env = single_environment() | {"TROUBLE": str(tmp_path / "trouble")}
    with open(tmp_path / "output", "ab") as output:
        given = {"env": env, "stdout": output, "stderr": output, "cwd": ROOT}
        agents = [subprocess.Popen(command, **given) for _ in range(2)]
        statuses = [agent.wait(timeout=500) for agent in agents]
    printed = (tmp_path / "output").read_text()
    assert not any(statuses) and (tmp_path / "out" / "done").exists(), printed[-3000:]
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
    ranks = mesh.read_ranks(shell | {"SLURM_TASKS_PER_NODE": "1"})
    assert (ranks.world_size, ranks.launcher, ranks.rendezvous) == (1, "single", {})
    for several in ({"SLURM_NTASKS": "4"}, {"SLURM_JOB_NUM_NODES": "2"}):
        with pytest.raises(RuntimeError, match=r"type `srun python`, .* `srun -n1 python`"):
            mesh.read_ranks(shell | several)
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert mesh.read_ranks(shell | {"SLURM_NTASKS": "4"} | torchrun).launcher == "torchrun"


# --- nodes that differ

PLACES = {  # (local rank, ranks on the node) of four ranks
    "even": ((0, 2), (1, 2), (0, 2), (1, 2)),
    "one node": ((0, 4), (1, 4), (2, 4), (3, 4)),
    "uneven": ((0, 2), (1, 2), (0, 1), (0, 1)),
    "round robin": ((0, 2), (0, 2), (1, 2), (1, 2)),
}


def said_of(function, *given) -> str:
    """The error message of a call that all ranks make, or an empty text."""
    try:
        function(*given)
    except (RuntimeError, OSError, run.Refused) as error:
        return str(error)
    return ""


def on_four_ranks() -> tuple[list[str], list[str], str]:
    """What each rank says of PLACES, of packs of its own, and of a folder of its own."""
    rank = join()
    folder = Path(os.environ["FOLDER"])
    places = []
    for of_ranks in PLACES.values():
        ranks = mesh.Ranks(rank, 4, *of_ranks[rank], "srun", {})
        places.append(said_of(mesh.check_nodes, ranks))
    packs = []
    scan = data.scan
    for own in ("new", "old" if rank == 1 else "new"):
        data.scan = lambda path, *patterns, own=own: scan(str(folder / own), *patterns)
        no_patterns = Namespace(include=None, exclude=None)
        packs.append(said_of(run.find_images, no_patterns, str(folder / "new")))
    torch.manual_seed(0)
    grid = mesh.build_mesh((1, 4), CPU)
    model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(4, 4), mesh=grid["shard"])
    own_out = folder / f"node{rank}"
    saved = said_of(checkpoint.save, own_out, 1, model, torch.optim.AdamW(model.parameters()))
    assert not checkpoint.list_checkpoints(own_out)
    dist.barrier()
    dist.destroy_process_group()
    return places, packs, saved


def test_nodes_that_differ_are_refused_by_all_ranks(tmp_path):
    """In their number of ranks, in their copy of a pack, in what they see of OUT."""
    tiles = str(ROOT / "examples" / "tiles" / "heldout")
    for name, more in (("new", []), ("old", ["--exclude", "ice"])):
        assert prepare.main(["pack", tiles, str(tmp_path / name), "--workers", "1", *more]) == 0
    for places, (same, other), saved in on_ranks(4, on_four_ranks, tmp_path):
        even, one, uneven, robin = places
        assert even == one == same == ""
        assert "from 1 to 2 ranks: start equally many on each node" in uneven
        assert "not numbered node by node" in robin and "--distribution=block" in robin
        assert "is not the pack that rank 0 sees: copy it again" in other
        assert "save to a folder that all nodes share" in saved
