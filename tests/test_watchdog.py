"""runtime/watchdog.py: a stuck rank is named, nobody hangs, and a folder has one run at a time."""

import errno
import os
import platform
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
import torch.distributed as dist
from parity import TILES
from ranks import environment, fork_server, free_port

import mesh
import train_fsdp
from runtime import watchdog

# --- stuck ranks: all scenarios at once, since nearly all of their time is waiting


def sleeps_here():
    time.sleep(1000)


def steps(watch, last):
    for step in range(last + 1):
        watch.heartbeat("reading data", step)
        watch.heartbeat("training", step)
        dist.all_reduce(torch.ones(3))
        time.sleep(0.05)


def is_stuck(watch, rank):
    steps(watch, 3)
    watch.heartbeat("reading data", 4)
    if rank == 1:
        sleeps_here()
    watch.heartbeat("training", 4)
    dist.all_reduce(torch.ones(3))


def goes_on(watch, rank):
    """A save may take four times as long as a step, though the one before was quick."""
    for seconds in (0, 4):
        steps(watch, 3)
        watch.heartbeat("saving", 3)
        time.sleep(seconds)
    print("going", flush=True)
    steps(watch, 80)


def endless(watch, rank):
    steps(watch, 3)
    print("going", flush=True)
    while True:
        watch.heartbeat("training", 7)
        dist.all_reduce(torch.ones(3))
        time.sleep(0.05)


# name: (what each of two ranks does under a watchdog, the ranks that are stopped meanwhile)
SCENARIOS = {
    "stuck": (is_stuck, ()),
    "suspended": (goes_on, (0, 1)),
    "rank 0 stopped": (endless, (0,)),
    "rank 1 stopped": (endless, (1,)),
}


def watched(environ, folder, work):
    """One rank of a scenario."""
    os.setsid()
    rank = int(environ["RANK"])
    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environ)
    ranks = mesh.read_ranks(os.environ)
    watch = watchdog.Watchdog(rank, ranks.world_size, seconds=2)
    watch.give_up = lambda text: print("GIVEN UP:", text, flush=True)
    mesh.init_ranks(ranks, torch.device("cpu"))
    watch.connect(ranks.init)
    try:
        work(watch, rank)
    except RuntimeError as error:  # a rank left before this one read the verdict
        time.sleep(5)
        watch.exit_now(f"rank {rank}: {error}")
    watch.stop()
    dist.barrier()
    dist.destroy_process_group()


def watch_all(folder: Path):
    """Run every scenario: {name: (exit statuses, outputs)}."""
    processes = {}
    for name, (work, _) in SCENARIOS.items():
        (folder / name).mkdir()
        port = free_port()
        given = [(environment(rank, 2, port), folder / name, work) for rank in range(2)]
        processes[name] = [fork_server().Process(target=watched, args=one) for one in given]
        for process in processes[name]:
            process.start()

    def outputs(name):
        paths = [folder / name / f"rank{rank}.txt" for rank in range(2)]
        return [path.read_text() if path.exists() else "" for path in paths]

    deadline = time.monotonic() + 120
    try:
        for name, (_, stopped) in SCENARIOS.items():
            while stopped and not all("going" in text for text in outputs(name)):
                assert time.monotonic() < deadline, outputs(name)
                time.sleep(0.05)
            time.sleep(0.5 if stopped else 0)  # a heartbeat is published every 0.1 s
            for rank in stopped:
                os.kill(processes[name][rank].pid, signal.SIGSTOP)
        time.sleep(4)
        for process in processes["suspended"]:
            assert process.is_alive()
            os.kill(process.pid, signal.SIGCONT)
        for name, (_, stopped) in SCENARIOS.items():
            for rank in range(2):
                if name == "suspended" or rank not in stopped:
                    processes[name][rank].join(max(0, deadline - time.monotonic()))
    finally:
        for process in [p for ranks in processes.values() for p in ranks if p.is_alive()]:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
    return {name: ([p.exitcode for p in processes[name]], outputs(name)) for name in SCENARIOS}


@pytest.fixture(scope="module")
def found(once):
    return once("watchdog", watch_all)


def test_a_rank_that_is_stuck_is_named_with_its_code(found):
    status, texts = found["stuck"]
    assert status == [1, 1], texts
    named = r"GIVEN UP: no progress for \d+ s: rank 1 \(reading data in step 5, on .*\) is stuck"
    assert re.search(rf"{named}, rank 0 \(training in step 5, on .*\) waits", texts[0])
    assert "in sleeps_here" in texts[1] and "Thread" in texts[1]
    assert "GIVEN UP" not in texts[1] and "in sleeps_here" not in texts[0]


def test_a_rank_that_is_stopped_is_named(found):
    here = r"\(training in step 8, on .*\)"
    status, texts = found["rank 0 stopped"]
    assert status[1] == 1 and re.search(f"has no answer from rank 0 {here}: it is", texts[1]), texts
    status, texts = found["rank 1 stopped"]
    wanted = rf"rank 1 {here} stopped sending heartbeats, rank 0 {here} waits"
    assert status[0] == 1 and re.search(wanted, texts[0]), texts


def test_a_job_that_is_suspended_as_a_whole_continues(found):
    """Slurm may stop all processes for long (scontrol suspend): nobody is stuck."""
    status, texts = found["suspended"]
    assert status == [0, 0] and "GIVEN UP" not in "".join(texts), texts


def test_what_takes_long_is_said_and_less_and_less_often(capsys):
    watch = watchdog.Watchdog(0, 1, seconds=1)
    watch.patience["listing images"] = 0.2
    watch.heartbeat("listing images")
    time.sleep(1)
    watch.stop()
    told = capsys.readouterr().err.splitlines()
    assert 1 <= len(told) <= 3 and told[0].startswith("rank 0: listing images, on "), told


# --- the folder of a run


@pytest.fixture
def hosts(monkeypatch):
    """hosts(name, flock): from here on this is that host, with or without flock."""

    def no_flock(file, how):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    flock = watchdog.fcntl.flock

    def become(name, there=True):
        monkeypatch.setattr(platform, "node", lambda: name)
        monkeypatch.setattr(watchdog.fcntl, "flock", flock if there else no_flock)

    return become


@pytest.mark.parametrize("flock", [True, False])
@pytest.mark.parametrize("other", ["a", "b"])
def test_a_second_run_is_refused_while_the_first_lives(flock, other, tmp_path, hosts):
    hosts("a", flock)
    first, ended = watchdog.FolderLock(str(tmp_path), settle=0.1), Event()

    def renew():
        while not ended.wait(0.05):
            assert first.renew() is None

    thread = Thread(target=renew)
    thread.start()
    try:
        hosts(other, flock)
        who = rf"in use by another run \(process {os.getpid()} on a\): .* remove {tmp_path}/.lock"
        with pytest.raises(ValueError, match=who):
            watchdog.FolderLock(str(tmp_path), patience=5, settle=0.1)
    finally:
        ended.set()
        thread.join()
    first.release()
    watchdog.FolderLock(str(tmp_path), patience=0, settle=0.1).release()


@pytest.mark.parametrize("flock", [True, False])
def test_no_folder_is_locked_by_a_run_that_is_dead(flock, tmp_path, hosts):
    """Killed, its record stays; on another host the file system may even keep its lock."""
    hosts("a", flock)
    dead = watchdog.FolderLock(str(tmp_path), settle=0)
    hosts("b", flock)
    again = watchdog.FolderLock(str(tmp_path), patience=0.5, settle=0.1)
    # should it have been asleep instead, it ends before it writes over the other's checkpoints
    assert "in use by another run" in dead.renew()
    assert again.renew() is None
    if not flock:  # on the same host no sign of life is waited for
        process = fork_server().Process(target=int)
        process.start()
        process.join()
        again._write(again.owner | {"pid": process.pid})
        watchdog.FolderLock(str(tmp_path), patience=60, settle=0.1)


@pytest.mark.parametrize("flock", [True, False])
def test_of_runs_that_start_at_once_one_has_the_folder(flock, tmp_path, hosts):
    hosts("a", flock)

    def start(number):
        try:
            lock = watchdog.FolderLock(str(tmp_path), patience=2, settle=0.5)
        except ValueError:
            return False
        for _ in range(30):
            assert lock.renew() is None
            time.sleep(0.1)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(start, range(8))) == 1


def test_a_run_in_a_folder_in_use_is_refused_before_it_writes(tmp_path, capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(watchdog.FolderLock.__init__, "__defaults__", (0.5, 0.1))
    lock = watchdog.FolderLock(str(tmp_path))
    flags = f"--model tiny --img-size 32 --device cpu --run io --steps 1 --batch 4 --data {TILES}"
    argv = [*flags.split(), "--workers", "0", "--out", str(tmp_path)]
    assert train_fsdp.main(argv) == 2
    printed = capsys.readouterr().err
    assert "in use by another run" in printed and printed.count("\n") == 1
    assert os.listdir(tmp_path) == [".lock"]
    lock.release()
    assert train_fsdp.main(argv) == 0
