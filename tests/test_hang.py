"""A hang, a death, a bug of one rank, a signal, a lost launcher: how each ends all processes."""

import atexit
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Timer

import pytest
from conftest import ROOT
from PIL import Image
from ranks import (
    NANO,
    TILES,
    TINY_ARGV,
    become,
    environment,
    fork_server,
    free_port,
    processes_of,
    read_log,
    run_script,
)

import data
import mesh
import run
import train_fsdp
import vit

TRAIN = (
    f"--model nano --img-size 32 --batch 2 --steps 3 --log-every 1 --save-every 1 --device cpu "
    f"--workers 0 --mode full_shard --timeout 6 --data {TILES}"
).split()


# --- a fault of one of two ranks


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


def train_with(fault, rank, argv):
    """Train on a rank; rank 1 with a fault of its own."""
    vit.MODELS["nano"] = NANO
    step = train_fsdp.train_step
    find_images = run.find_images

    def faulty_step(training, guard, number, *args):
        if number == 1:
            fault()
        step(training, guard, number, *args)

    if fault is never_joins:
        run.LONG = 1  # the limit of the start is that of a step
    if rank and fault is never_joins:
        mesh.init_ranks = sleep_first
    elif rank and fault is reads_for_ever:
        run.find_images = lambda *given: SlowImages(find_images(*given))
        data.fingerprint = lambda files: None
    elif rank:
        train_fsdp.train_step = faulty_step
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
        more = ["--steps", "20", "--workers", "1"] if fault is reads_for_ever else []
        for rank in range(2):
            work = partial(train_with, fault, rank, [*TRAIN, *more, "--out", str(own / "out")])
            given = environment(rank, 2, port), own / str(rank), work
            ranks[fault, rank] = fork_server().Process(target=become, args=given)
            ranks[fault, rank].start()
    for (_, rank), process in ranks.items():
        process.join(30 if rank else 120)  # after rank 0 has ended
        process.kill()
        process.join()
    for fault, (wanted, stack, sentence) in FAULTS.items():
        folder = tmp_path / fault.__name__
        text, own = [(folder / str(rank)).read_text() for rank in range(2)]
        assert [ranks[fault, rank].exitcode for rank in range(2)] == [1, wanted], text + own
        assert ("Traceback" in own) == (fault is bug), own
        (told,) = re.findall(r"(?m)^train_fsdp.py: error: (.*)", text)
        assert re.match(sentence, told), text
        if stack:
            stacks = folder / "out" / "stacks"
            assert stack in (stacks / "rank_1.txt").read_text()
            assert "train_fsdp.py" in (stacks / "rank_0.txt").read_text()
        if fault not in (never_joins, reads_for_ever):
            end = json.loads((folder / "out" / "log.jsonl").read_text().splitlines()[-1])
            assert (end["event"], end["reason"]) == ("end", "failed") and end["problem"] in told


# --- signals, and a launcher that is killed: runs of one process, all at once

LONG_RUN = ["train_fsdp.py", *TINY_ARGV, "--steps", "100000", "--log-every", "1"]
BAD = [b"b\xe4d.jpg", "壊れた.jpg".encode()]  # no UTF-8; not latin-1


def on_a_poor_terminal(argv):
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="latin-1")
    run_script(argv)


def below_a_launcher(argv):
    """As torchrun does: the run is a child of this process."""
    if os.fork():
        time.sleep(1000)
    run_script(argv)


def started(folder: Path, work, *flags: str, **environ: str):
    """Start such a run, whose worker and output are its own -> its process."""
    argv = [*LONG_RUN, *flags, "--out", str(folder)]
    folder.mkdir()
    given = environment(0, 1, free_port()) | environ, folder / "output", partial(work, argv)
    process = fork_server().Process(target=become, args=given)
    process.start()
    return process


def wait_for(file: Path, text: str) -> None:
    deadline = time.monotonic() + 90
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def test_a_signal_saves_and_ends_a_run_and_none_outlives_its_launcher(tmp_path):
    """Also a signal that comes while Python still imports torch, which takes seconds.

    One run has images and files that are none, with names that its terminal cannot print.
    """
    images = tmp_path / "images"
    images.mkdir()
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(images / f"{number}.png")
    for name in BAD:
        Path(os.fsdecode(os.fsencode(images) + b"/" + name)).write_bytes(b"no image")
    usr1, term, interrupt, twice, orphan = (tmp_path / n for n in ("u", "t", "i", "2", "o"))
    argv = [sys.executable, *LONG_RUN, "--batch", "2", "--out", str(usr1)]
    environ = environment(0, 1, free_port())
    importing = subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
    few = ["--batch", "2", "--workers", "1"]
    bad = ["--data", str(images), "--max-bad", "1"]
    runs = {
        term: started(term, on_a_poor_terminal, *few, *bad),
        interrupt: started(interrupt, run_script, *few),
        twice: started(twice, run_script, "--batch", "512"),  # a step takes seconds
        orphan: started(orphan, below_a_launcher, *few, TORCHELASTIC_RUN_ID="x"),
    }
    time.sleep(0.5)
    importing.send_signal(signal.SIGUSR1)
    wait_for(twice / "log.jsonl", '"start"')
    for _ in range(2):
        os.kill(runs[twice].pid, signal.SIGINT)
        time.sleep(0.3)
    wait_for(orphan / "log.jsonl", '"step": 2,')
    runs[orphan].kill()
    for folder, number in {interrupt: signal.SIGINT, term: signal.SIGTERM}.items():
        wait_for(folder / "log.jsonl", '"step": 5,')
        os.killpg(runs[folder].pid, number)  # as a launcher does: to its loader's worker too
    for process in runs.values():
        process.join(60)
    assert importing.wait(60) == 0
    ended = {usr1: 0, term: 0, interrupt: 0, twice: -signal.SIGINT, orphan: -signal.SIGKILL}
    for folder, status in ended.items():
        output = "" if folder == usr1 else (folder / "output").read_text()
        assert folder == usr1 or runs[folder].exitcode == status, (output, status)
        _, _, end = read_log(folder / "log.jsonl")
        if status == 0:
            assert end["reason"] == "signal" and not (folder / "done").exists()
            assert (folder / f"step_{end['steps']:08d}").is_dir()
        else:
            assert not list(folder.glob("step_*"))
        assert ("press again" in output) == (folder in (interrupt, twice)), output
    listed = (term / "bad_images.csv").read_bytes()
    assert [listed.count(os.fsencode(images) + b"/" + name) for name in BAD] == [1, 1]
    wait_for(orphan / "output", "torchrun is gone")
    deadline = time.monotonic() + 30
    while processes_of(runs[orphan].pid):  # neither the rank nor its worker
        assert time.monotonic() < deadline
        time.sleep(0.1)


# --- a folder has one run at a time


def killed_with_a_lock(folder):
    lock = run.lock_folder(folder)
    killed()
    lock.close()


def test_of_runs_that_start_at_once_one_has_the_folder(tmp_path):
    """After a run that was killed, too."""
    folder = str(tmp_path / "out")
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


def test_a_run_in_a_folder_in_use_is_refused_before_it_writes(tmp_path, monkeypatch, capsys):
    """But a requeued job waits for what is left of itself."""
    lock = run.lock_folder(str(tmp_path))
    argv = [*TINY_ARGV, *["--run", "io", "--steps", "1", "--batch", "4", "--data"], TILES]
    argv += ["--out", str(tmp_path)]
    assert train_fsdp.main(argv) == 2
    printed = capsys.readouterr().err
    assert "in use by another run" in printed and printed.count("\n") == 1
    assert os.listdir(tmp_path) == [".lock"]
    Timer(0.3, lock.close).start()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train_fsdp.main(argv) == 0
