"""runtime/watchdog.py: a stuck rank is named, nobody hangs, and a folder has one run at a time."""

import itertools
import os
import platform
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Timer

import pytest
import torch
import torch.distributed as dist
from parity import TILES
from ranks import environment, fork_server, free_port

import mesh
import train_fsdp
from runtime import process, watchdog

# --- stopped ranks, of whom tests/test_faults.py has those that are stuck: all scenarios at once,
# since nearly all of their time is waiting


def go_on(watch, folder):
    """Until the file "end" is there."""
    end = torch.zeros(1)
    while not end:
        watch.heartbeat("training", 7)
        dist.all_reduce(end.fill_((folder / "end").exists()))
        print("going", flush=True)
        time.sleep(0.05)


SCENARIOS = {"suspended": (0, 1), "rank 0 stopped": (0,), "rank 1 stopped": (1,)}  # which ranks


def watched(environ, folder):
    """One rank of a scenario."""
    os.setsid()
    rank = int(environ["RANK"])
    for number in (1, 2):
        os.dup2(os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(environ)
    ranks = mesh.read_ranks(os.environ)
    given_up = partial(print, "GIVEN UP:", flush=True)
    watch = watchdog.Watchdog(rank, 2, seconds=2, give_up=given_up)
    mesh.init_ranks(ranks, torch.device("cpu"))
    watch.connect(ranks.init)
    for phase in ("reading data", "training", "ready"):  # known from here on
        watch.heartbeat(phase)
    try:
        go_on(watch, folder)
    except RuntimeError as error:  # a rank left before this one read the verdict
        time.sleep(5)
        watch.exit_now(f"rank {rank}: {error}")
    watch.stop()
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_is_stopped_is_named(tmp_path):
    """But a job that is suspended as a whole (scontrol suspend) continues."""
    processes = {}
    for name in SCENARIOS:
        (tmp_path / name).mkdir()
        port = free_port()
        given = [(environment(rank, 2, port), tmp_path / name) for rank in range(2)]
        processes[name] = [fork_server().Process(target=watched, args=one) for one in given]
        for rank_process in processes[name]:
            rank_process.start()

    def outputs(name):
        paths = [tmp_path / name / f"{rank}.txt" for rank in range(2)]
        return [path.read_text() if path.exists() else "" for path in paths]

    deadline = time.monotonic() + 120
    for name, stopped in SCENARIOS.items():
        while not all("going" in text for text in outputs(name)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # a heartbeat is published every 0.1 s
        for rank in stopped:
            os.kill(processes[name][rank].pid, signal.SIGSTOP)
    time.sleep(4)
    for rank_process in processes["suspended"]:
        os.kill(rank_process.pid, signal.SIGCONT)
    (tmp_path / "suspended" / "end").touch()
    here = r"\(training in step 8, on .*\)"
    # scenario, rank: its status and what it prints
    expected = {
        ("rank 0 stopped", 1): (1, "Timeout"),  # of faulthandler, or of PyTorch
        ("rank 1 stopped", 0): (1, rf"no progress for \d+ s, 1 of 2 ranks stuck: rank 1 {here}"),
        ("suspended", 0): (0, r"(?s)^(?!.*GIVEN UP)"),
        ("suspended", 1): (0, r"(?s)^(?!.*GIVEN UP)"),
    }
    try:
        for (name, rank), (status, printed) in expected.items():
            rank_process = processes[name][rank]
            rank_process.join(max(0, deadline - time.monotonic()))
            text = outputs(name)[rank]
            assert rank_process.exitcode == status and re.search(printed, text), (name, rank, text)
    finally:
        for rank_process in itertools.chain.from_iterable(processes.values()):
            rank_process.kill()


def test_what_takes_long_is_said_once(capsys):
    watch = watchdog.Watchdog(0, 1, seconds=1)
    watch.heartbeat("listing images")
    watch.clock += 9.99
    time.sleep(0.3)
    watch.stop()
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("rank 0: still listing images, on "), told


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
        (lock,) = [lock for lock in pool.map(start, range(8)) if lock]
    with pytest.raises(ValueError, match=f"process {os.getpid()} on {platform.node()}"):
        process.lock_folder(folder)
    lock.close()
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


def test_a_run_in_a_folder_in_use_is_refused_before_it_writes(tmp_path, capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    lock = process.lock_folder(str(tmp_path))
    flags = f"--model tiny --img-size 32 --device cpu --run io --steps 1 --batch 4 --data {TILES}"
    argv = [*flags.split(), "--workers", "0", "--out", str(tmp_path)]
    assert train_fsdp.main(argv) == 2
    printed = capsys.readouterr().err
    assert "in use by another run" in printed and printed.count("\n") == 1
    assert os.listdir(tmp_path) == [".lock"]
    lock.close()
    assert train_fsdp.main(argv) == 0
