"""runtime/watchdog.py: a stuck rank is named, nobody hangs, and a folder has one run at a time."""

import os
import platform
import shlex
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Timer

import pytest
import torch
import torch.distributed as dist
from parity import TILES
from ranks import TINY_ARGV, fork_server, join, on_ranks

import mesh
import train_fsdp
from runtime import process, watchdog

# --- tests/test_faults.py has ranks that are stuck or stopped


def stopped(suspended):
    """A rank that is stopped: all for twice their limit (scontrol suspend), or rank 0 for good."""
    rank = join()
    watch = watchdog.Watchdog(rank, 2, seconds=2)
    watch.connect(mesh.read_ranks(os.environ).init)
    for phase in ("training", "ready"):  # known from here on
        watch.heartbeat(phase)
    for step in range(100):
        watch.heartbeat("training", step)
        dist.all_reduce(torch.zeros(1))
        time.sleep(0.02)
        if step == 50 and (suspended or rank == 0):
            if suspended:
                subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
    watch.stop()
    dist.barrier()
    dist.destroy_process_group()


def test_a_job_that_was_suspended_continues(tmp_path):
    on_ranks(2, partial(stopped, True), tmp_path, 60)


def test_a_rank_0_that_is_stopped_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"no answer from rank 0 \(training in step 52, on"):
        on_ranks(2, partial(stopped, False), tmp_path, 60)


def stuck():
    """Rank 1 is, while rank 0 does what may take longer."""
    rank = join()
    watch = watchdog.Watchdog(rank, 2, seconds=2)
    watch.connect(mesh.read_ranks(os.environ).init)
    for phase in ("training", "training", "saving")[: 3 - rank]:
        watch.heartbeat(phase)
    time.sleep(60)


def test_a_stuck_rank_is_named_whatever_rank_0_does(tmp_path):
    with pytest.raises(RuntimeError, match=r"1 of 2 ranks stuck: rank 1 \(training, on") as found:
        on_ranks(2, stuck, tmp_path, 60)
    assert "in stuck" in str(found.value)  # its stack


def test_what_takes_long_is_said_once(capsys):
    watch = watchdog.Watchdog(0, 1, seconds=1)
    watch.heartbeat("listing images")
    watch.clock += 9.99
    time.sleep(0.3)
    watch.stop()
    told = capsys.readouterr().err
    assert told.startswith("rank 0: still listing images, on ") and told.count("\n") == 1, told


# --- the folder of a run


def killed(folder):
    lock = process.lock_folder(folder)
    os.kill(os.getpid(), signal.SIGKILL)
    lock.close()


@pytest.mark.parametrize("before", ["nothing", "a run that was killed"])
def test_of_runs_that_start_at_once_one_has_the_folder(before, tmp_path):
    folder = str(tmp_path / "out")
    if before != "nothing":
        run = fork_server().Process(target=killed, args=[folder])
        run.start()
        run.join()

    def start(_):
        try:
            return process.lock_folder(folder)
        except ValueError as error:
            assert "in use by another run" in str(error)

    with ThreadPoolExecutor(8) as pool:
        locks = [lock for lock in pool.map(start, range(8)) if lock]
    assert len(locks) == 1
    with pytest.raises(ValueError, match=f"process {os.getpid()} on {platform.node()}"):
        process.lock_folder(folder)
    locks[0].close()
    process.lock_folder(folder).close()


def test_a_requeued_job_waits_for_what_is_left_of_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    past = process.lock_folder(str(tmp_path))
    Timer(1.5, past.close).start()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(ValueError, match=r"in use by another run .*, Slurm job 77"):
        process.lock_folder(str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    process.lock_folder(str(tmp_path)).close()


def test_a_run_in_a_folder_in_use_is_refused_before_it_writes(tmp_path, capsys):
    lock = process.lock_folder(str(tmp_path))
    flags = shlex.split("--run io --steps 1 --batch 4 --data")
    argv = [*TINY_ARGV, *flags, TILES, "--out", str(tmp_path)]
    assert train_fsdp.main(argv) == 2
    printed = capsys.readouterr().err
    assert "in use by another run" in printed and printed.count("\n") == 1
    assert os.listdir(tmp_path) == [".lock"]
    lock.close()
    assert train_fsdp.main(argv) == 0
