"""One rank's trouble is a sentence, and ends all ranks; a bug keeps its traceback, where it is."""

import json
import os
import re
import resource
import signal
import sys
import time

import pytest
import torch
from conftest import ROOT
from parity import TILES
from ranks import NANO, environment, fork_server, free_port

import prepare
import train_fsdp
import vit

TRAIN = (
    f"--model nano --img-size 32 --batch 2 --steps 3 --log-every 1 --workers 0 --device cpu "
    f"--mode full_shard --timeout 6 --data {TILES}"
).split()


def in_second_step(monkeypatch, fault):
    """Let `fault()` happen in the second step."""
    original = train_fsdp.Monitor.next_batch

    def next_batch(self, step):
        if step == 1:
            self.session.heartbeat("reading data", step)
            fault()
        return original(self, step)

    monkeypatch.setattr(train_fsdp.Monitor, "next_batch", next_batch)


def bug():
    raise ValueError("igloo")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps_here():
    time.sleep(1000)


def stopped():
    time.sleep(1)  # its last heartbeat is published
    os.kill(os.getpid(), signal.SIGSTOP)


LOST = r"rank 0 failed \(training in step 2, on .*\): lost connection to another rank: "
STUCK = r"no progress for \d+ s, 1 of 2 ranks stuck: rank 1 \(reading data in step 2, on .*\)"
# what happens on rank 1 of two: (its status, what it prints, rank 0's sentence)
FAULTS = {
    bug: (1, r"(?s)Traceback.*\nValueError: igloo.*error: rank 1 failed \(reading", LOST),
    killed: (-9, "", LOST),
    sleeps_here: (1, "in sleeps_here", STUCK),
    stopped: (-9, "", STUCK),
}


def become(environ, output, fault, argv):
    """A rank that trains, with a fault of its own."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(f"{output}.{number}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environ)
    os.chdir(ROOT)
    vit.MODELS["nano"] = NANO
    in_second_step(pytest.MonkeyPatch(), fault)
    sys.exit(train_fsdp.main(argv))


def test_a_fault_of_one_rank_ends_all(tmp_path):
    """Promptly, whatever was raised; the others say where they were, and what is saved."""
    ranks = {}
    for fault in FAULTS:  # all at once
        port, own = free_port(), tmp_path / fault.__name__
        own.mkdir()
        for rank in range(2):
            given = environment(rank, 2, port), str(own / str(rank)), fault if rank else int
            given = *given, [*TRAIN, "--save-every", "1", "--out", str(own / "out")]
            ranks[fault, rank] = fork_server().Process(target=become, args=given)
            ranks[fault, rank].start()
    for (fault, rank), process in ranks.items():
        if fault is stopped and rank:
            process.kill()  # a stopped process cannot end
        process.join(15 if rank else 100)  # after rank 0 has ended
        process.kill()
        process.join()
    for fault, (wanted, printed, sentence) in FAULTS.items():
        folder = tmp_path / fault.__name__
        text, own = [(folder / f"{rank}.2").read_text() for rank in range(2)]
        assert [ranks[fault, rank].exitcode for rank in range(2)] == [1, wanted], text + own
        assert re.search(printed, own), own
        assert "Traceback" not in text and ("Traceback" in own) == (fault is bug)
        (told,) = re.findall(r"(?m)^train_fsdp.py: error: (.*)", text)
        assert re.match(sentence, told), text
        assert re.search(r"; saved \S+step_0*1; the same command continues from there$", told)
        end = json.loads((folder / "out" / "log.jsonl").read_text().splitlines()[-1])
        assert (end["event"], end["reason"]) == ("end", "failed") and end["problem"] in told


def test_memory_that_has_run_out_is_a_sentence_with_advice(tmp_path, monkeypatch, capsys):
    def gpu_error():
        raise torch.OutOfMemoryError("HIP out of memory")

    monkeypatch.setitem(vit.MODELS, "nano", NANO)
    in_second_step(monkeypatch, gpu_error)
    assert train_fsdp.main([*TRAIN, "--save-every", "none", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert re.search(r"error: rank 0 failed \(.*\): out of memory; plan: FITS: .*; HIP out", error)
    assert "Traceback" not in error


def start_with_few_files(worker):
    """In a loader worker: it may open four files."""
    file = os.open(os.devnull, os.O_RDONLY)
    os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (file + 4, file + 4))


def test_open_files_that_have_run_out_are_no_broken_images(tmp_path, monkeypatch, capsys):
    """In a loader worker, of a pack that has a shard for each image."""
    monkeypatch.setattr("storage.packing.SHARD_BYTES", 1)
    pack = str(tmp_path / "pack")
    assert prepare.main(["pack", f"{TILES}/ice", pack, "--workers", "1"]) == 0
    monkeypatch.setitem(vit.MODELS, "nano", NANO)
    monkeypatch.setattr("runtime.process.start_worker", start_with_few_files)
    argv = [*TRAIN, "--batch", "8", "--workers", "1", "--save-every", "none", "--data", pack]
    assert train_fsdp.main([*argv, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert re.search(r"rank 0 failed \(.*\): OSError: \[Errno 24\] Too many open files", error)
