"""runtime/watchdog.py: a stuck rank is named, nobody hangs, and a folder has one run at a time."""

import os
import platform
import re
import shlex
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
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


def watched(rank: int) -> watchdog.Watchdog:
    """A watchdog of two ranks that waits for two seconds."""
    watch = watchdog.Watchdog(rank, 2, seconds=2)
    watch.connect(mesh.read_ranks(os.environ).rendezvous)
    return watch


def stop_in_the_middle(rank: int, stops: bool, seconds: int) -> None:
    """Go on for some steps; a rank that `stops` does so in step 50, for so many seconds."""
    watch = watched(rank)
    for phase in ("training", "ready"):  # known from here on
        watch.heartbeat(phase)
    for step in range(100):
        watch.heartbeat("training", step)
        dist.all_reduce(torch.zeros(1))
        time.sleep(0.02)
        if step == 50 and stops:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
    watch.stop()
    dist.barrier()
    dist.destroy_process_group()


def suspended():
    """All ranks stop for twice their limit, as by `scontrol suspend`."""
    stop_in_the_middle(join(), stops=True, seconds=4)


def rank_0_stopped():
    rank = join()
    stop_in_the_middle(rank, stops=rank == 0, seconds=60)


def rank_1_stuck():
    """Rank 1 is, while rank 0 does what may take longer."""
    rank = join()
    watch = watched(rank)
    watch.heartbeat("training")
    watch.heartbeat("training")
    if rank == 0:
        watch.heartbeat("saving")
    time.sleep(60)


def slow():
    """Each step of both ranks takes longer than the limit, the first one too."""
    rank = join()
    watch = watched(rank)
    for step in range(3):
        watch.heartbeat("training", step)
        time.sleep(3.5)
    watch.stop()
    dist.barrier()
    dist.destroy_process_group()


TROUBLES = {  # what two ranks do: what one of them prints
    suspended: "",  # they end well
    slow: "",
    rank_0_stopped: r"no answer from rank 0 \(training in step 52, on",
    # with its stack
    rank_1_stuck: r"(?s)1 of 2 ranks stuck: rank 1 \(training, on.*in rank_1_stuck",
}


def test_a_stuck_or_stopped_rank_is_named_and_a_suspended_job_continues(tmp_path):
    def errors_of(trouble):
        try:
            on_ranks(2, trouble, tmp_path / trouble.__name__, 60)
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(TROUBLES)) as pool:  # at once: most of the time they wait
        found = list(pool.map(errors_of, TROUBLES))
    for errors, expected in zip(found, TROUBLES.values(), strict=True):
        if expected:
            assert re.search(expected, errors), errors
        else:
            assert errors == ""


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
