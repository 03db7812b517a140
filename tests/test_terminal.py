"""What is behind stdout ends no program; signals are answered at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image
from ranks import environment, fork_server, free_port, read_log, run_script

BAD = [b"b\xe4d.jpg", "壊れた.jpg".encode()]  # no UTF-8; not latin-1


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Four images and two files that are none, with names that not every terminal can print."""
    folder = tmp_path_factory.mktemp("data") / "数"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(folder / f"{number}.png")
    for name in BAD:
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(b"no image")
    return folder


def become(argv, stdout, errors):
    """A program whose stdout is a file, or a pipe that nobody reads where that is None.

    Of a terminal that cannot show all characters.
    """
    os.setsid()
    os.environ.update(environment(0, 1, free_port()))
    os.chdir(ROOT)
    read, write = os.pipe()
    os.close(read)
    os.dup2(write if stdout is None else os.open(stdout, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.stdout = open(1, "w", encoding="latin-1", closefd=False)  # noqa: SIM115
    run_script(argv)


def ended(folder, argv, stdout):
    """(exit status, what it wrote to stderr)."""
    errors = folder / "errors.txt"
    process = fork_server().Process(target=become, args=(argv, stdout, str(errors)))
    process.start()
    process.join(120)
    text = errors.read_text()
    assert process.exitcode is not None and "Traceback" not in text, text
    return process.exitcode, text


TRAIN = (
    "train_fsdp.py --model tiny --img-size 32 --batch 2 --steps 4 --log-every 1 --workers 0 "
    "--device cpu --max-bad 1 --max-skips 1"
)


@pytest.mark.parametrize("behind", [None, "/dev/full"])  # a closed pipe, a full disk
def test_whatever_stdout_is_the_work_is_done(behind, images, tmp_path):
    argv = [*TRAIN.split(), "--data", str(images), "--out", str(tmp_path)]
    status, errors = ended(tmp_path, argv, behind)
    assert status == 0, errors
    _, steps, end = read_log(tmp_path / "log.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert end["reason"] == "done"
    listed = (tmp_path / "bad_images.csv").read_bytes()
    assert [listed.count(os.fsencode(images) + b"/" + name) for name in BAD] == [1, 1]
    assert ended(tmp_path, ["plan.py", "--model", "tiny"], behind) == (0, "")


# --- signals: in processes that do nothing but wait

WAIT = "from runtime import process; r = process.listen_for_signals(); print(1, flush=True); {}"
# As a computation or a collective, from which Python does not return: it waits for a lock that it
# holds. No signal ends that wait, as one would end a sleep. An alarm ends the process in any case.
BUSY = (
    "import ctypes, signal; signal.alarm(60); c = ctypes.CDLL(None); "
    "lock = ctypes.create_string_buffer(128); c.pthread_mutex_init(lock, None); "
    "c.pthread_mutex_lock(lock); c.pthread_mutex_lock(lock)"
)


def start(code, **environ):
    """Start a process that waits as `code` says, once it listens for signals."""
    job = subprocess.Popen(
        [sys.executable, "-c", WAIT.format(code)],
        cwd=ROOT,
        env=environment(0, 1, 0) | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout.readline() == "1\n"
    return job


def test_ctrl_c_answers_at_once_and_the_second_ends_the_process():
    """Other signals say nothing."""
    job = start(BUSY)
    job.send_signal(signal.SIGUSR1)
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGINT)
    job.stderr.readline()
    assert job.stderr.readline().startswith("stopping after this step; press")
    job.send_signal(signal.SIGINT)
    _, text = job.communicate(timeout=20)
    assert "ended without saving" in text and "Traceback" not in text and job.returncode == 130


def printed_by_child(code, **environ):
    """Kill a process whose child waits as `code` says; return what the child prints until its end.

    Its standard output and its standard error.
    """
    child = f"[sys.executable, '-c', {WAIT.format(code)!r}]"
    parent = f"import subprocess, sys, time; subprocess.Popen({child}); time.sleep(60)"
    job = start(parent, **environ)
    assert job.stdout.readline() == "1\n"
    job.kill()
    return job.communicate(timeout=20)  # both are open until the child has left


def test_a_rank_leaves_with_torchrun():
    output, errors = printed_by_child(BUSY, TORCHELASTIC_RUN_ID="x")
    assert output == "" and "torchrun is gone" in errors


def test_a_rank_outlives_a_shell():
    code = "import time; time.sleep(2.5); print('done')"  # it looks for torchrun every second
    output, errors = printed_by_child(code)
    assert output == "done\n" and "torchrun is gone" not in errors
