"""A rank that hangs, dies or has a bug ends all ranks; a folder has one run at a time."""

import atexit
import json
import os
import platform
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Timer

import pytest
from conftest import ROOT
from ranks import NANO, TILES, TINY_ARGV, environment, fork_server, free_port

import data
import mesh
import run
import train_fsdp
import vit

TRAIN = (
    f"--model nano --img-size 32 --batch 2 --steps 3 --log-every 1 --save-every 1 --device cpu "
    f"--workers 0 --mode full_shard --timeout 6 --data {TILES}"
).split()


def in_second_step(monkeypatch, fault):
    """Let `fault()` happen in the second step."""
    step = train_fsdp.train_step

    def faulty_step(training, guard, number, *args):
        if number == 1:
            fault()
        step(training, guard, number, *args)

    monkeypatch.setattr(train_fsdp, "train_step", faulty_step)


def bug():
    raise ValueError("igloo")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps_here():
    time.sleep(1000)


def never_joins():
    """Instead of joining the others: before the first collective."""


def reads_for_ever():
    """In its loader's worker."""


LIMIT = r"no step or save has ended in time .*: the stacks of each rank are in \S+/out/stacks"
LOST = r"rank 0 on \S+ lost the connection to another rank"
# what happens on rank 1 of two: (its status, what is in its stack, rank 0's sentence)
FAULTS = {
    bug: (1, None, LOST),
    killed: (-9, None, LOST),
    sleeps_here: (1, "in sleeps_here", LIMIT),
    never_joins: (1, "in sleep_first", LIMIT),
    reads_for_ever: (1, None, "rank 1: the data loader failed: .*timed out"),
}


class SlowImages:
    """Images of which a process reads six, and waits for ever for the next."""

    def __init__(self, files):
        self.files = files
        self.path = files.path
        self.reads = 0

    def __len__(self):
        return len(self.files)

    def read(self, index):
        self.reads += 1
        time.sleep(1000 if self.reads > 6 else 0)
        return self.files.read(index)


def sleep_first(*given, **named):
    time.sleep(1000)


def become(environ, output, fault, argv):
    """A rank that trains, with a fault of its own."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(f"{output}.{number}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environ)
    os.chdir(ROOT)
    vit.MODELS["nano"] = NANO
    if "never_joins" in output:
        run.LONG = 1  # the limit of the start is that of a step
    if fault is never_joins:
        mesh.init_ranks = sleep_first
    elif fault is reads_for_ever:
        find_images = run.find_images
        run.find_images = lambda *given: SlowImages(find_images(*given))
        data.fingerprint = lambda files: None
    elif fault:
        in_second_step(pytest.MonkeyPatch(), fault)
    status = train_fsdp.main(argv)
    sys.stderr.flush()
    atexit._run_exitfuncs()  # as at the end of a program: a process of multiprocessing has none
    os._exit(status)


def test_a_fault_of_one_rank_ends_all(tmp_path):
    """Promptly, whatever it was; of a hang each rank leaves its stacks."""
    ranks = {}
    for fault in FAULTS:  # all at once
        port, own = free_port(), tmp_path / fault.__name__
        own.mkdir()
        more = []
        if fault is reads_for_ever:
            more = ["--steps", "20", "--workers", "1", "--timeout", "8"]
        for rank in range(2):
            argv = [*TRAIN, *more, "--out", str(own / "out")]
            given = environment(rank, 2, port), str(own / str(rank)), fault if rank else None, argv
            ranks[fault, rank] = fork_server().Process(target=become, args=given)
            ranks[fault, rank].start()
    for (_, rank), process in ranks.items():
        process.join(30 if rank else 120)  # after rank 0 has ended
        process.kill()
        process.join()
    for fault, (wanted, stack, sentence) in FAULTS.items():
        folder = tmp_path / fault.__name__
        text, own = [(folder / f"{rank}.2").read_text() for rank in range(2)]
        assert [ranks[fault, rank].exitcode for rank in range(2)] == [1, wanted], text + own
        assert ("Traceback" in own) == (fault is bug), own
        (told,) = re.findall(r"(?m)^train_fsdp.py: error: (.*)", text)
        assert re.match(sentence, told), text
        stacks = folder / "out" / "stacks"
        if stack:
            assert stack in (stacks / "rank_1.txt").read_text()
            assert "train_fsdp.py" in (stacks / "rank_0.txt").read_text()
        if fault not in (never_joins, reads_for_ever):
            end = json.loads((folder / "out" / "log.jsonl").read_text().splitlines()[-1])
            assert (end["event"], end["reason"]) == ("end", "failed") and end["problem"] in told


# --- the folder of a run


def killed_with_a_lock(folder):
    lock = run.lock_folder(folder)
    os.kill(os.getpid(), signal.SIGKILL)
    lock.close()


@pytest.mark.parametrize("before", ["nothing", "a run that was killed"])
def test_of_runs_that_start_at_once_one_has_the_folder(before, tmp_path):
    folder = str(tmp_path / "out")
    if before != "nothing":
        process = fork_server().Process(target=killed_with_a_lock, args=[folder])
        process.start()
        process.join()

    def start(_):
        try:
            return run.lock_folder(folder)
        except ValueError as error:
            assert "in use by another run" in str(error)

    with ThreadPoolExecutor(8) as pool:
        locks = [lock for lock in pool.map(start, range(8)) if lock]
    assert len(locks) == 1
    with pytest.raises(ValueError, match=f"process {os.getpid()} on {platform.node()}"):
        run.lock_folder(folder)
    locks[0].close()
    run.lock_folder(folder).close()


def test_a_requeued_job_waits_for_what_is_left_of_itself(tmp_path, monkeypatch):
    past = run.lock_folder(str(tmp_path))
    Timer(0.5, past.close).start()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run.lock_folder(str(tmp_path)).close()


def test_a_run_in_a_folder_in_use_is_refused_before_it_writes(tmp_path, capsys):
    lock = run.lock_folder(str(tmp_path))
    argv = [*TINY_ARGV, *["--run", "io", "--steps", "1", "--batch", "4", "--data"], TILES]
    argv += ["--out", str(tmp_path)]
    assert train_fsdp.main(argv) == 2
    printed = capsys.readouterr().err
    assert "in use by another run" in printed and printed.count("\n") == 1
    assert os.listdir(tmp_path) == [".lock"]
    lock.close()
    assert train_fsdp.main(argv) == 0
