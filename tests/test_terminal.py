"""Names that a terminal cannot show, and signals: each ends in the right way."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image
from ranks import environment, free_port, read_log

BAD = [b"b\xe4d.jpg", "壊れた.jpg".encode()]  # no UTF-8; not latin-1
TRAIN = shlex.split(
    "train_fsdp.py --model tiny --img-size 32 --batch 2 --log-every 1 --workers 0 --device cpu "
    "--precision fp32 --max-bad 1"
)


def start(out: Path, *flags: str, **environ: str) -> subprocess.Popen[str]:
    """Start a run of one process."""
    return subprocess.Popen(
        [sys.executable, *TRAIN, *flags, "--out", str(out)],
        cwd=ROOT,
        env=environment(0, 1, free_port()) | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def test_a_terminal_that_cannot_show_a_name_ends_no_run(tmp_path):
    """Four images and two files that are none, with names that not every terminal can print."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(folder / f"{number}.png")
    for name in BAD:
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(b"no image")
    flags = ["--data", str(folder), "--steps", "6"]
    run = start(tmp_path / "out", *flags, PYTHONIOENCODING="latin-1")
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    _, steps, end = read_log(tmp_path / "out/log.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6] and end["reason"] == "done"
    listed = (tmp_path / "out/bad_images.csv").read_bytes()
    assert [listed.count(os.fsencode(folder) + b"/" + name) for name in BAD] == [1, 1]


def wait_for(file: Path, text: str) -> None:
    deadline = time.monotonic() + 90
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGUSR1, "imports"), (signal.SIGTERM, "training"), (signal.SIGINT, "training")],
)
def test_a_signal_saves_and_ends_a_run(number, moment, tmp_path):
    """Also one that comes while Python still imports torch, which takes seconds."""
    run = start(tmp_path, "--steps", "100000", "--workers", "1")
    if moment == "training":
        wait_for(tmp_path / "log.jsonl", '"step": 2,')
    else:
        time.sleep(0.5)
    os.killpg(run.pid, number)  # as a launcher does: to its loader's worker too
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    _, _, end = read_log(tmp_path / "log.jsonl")
    assert end["reason"] == "signal"
    assert (tmp_path / f"step_{end['steps']:08d}").is_dir() and not (tmp_path / "done").exists()
    assert ("press again" in output) == (number == signal.SIGINT)


def test_the_second_ctrl_c_ends_a_run_at_once(tmp_path):
    run = start(tmp_path, "--steps", "100000", "--batch", "512")  # a step takes seconds
    wait_for(tmp_path / "log.jsonl", '"start"')
    for _ in range(2):
        run.send_signal(signal.SIGINT)
        time.sleep(0.3)
    run.communicate(timeout=20)
    assert run.returncode == -signal.SIGINT and not list(tmp_path.glob("step_*"))


def test_a_rank_leaves_with_torchrun(tmp_path):
    """Which is its parent, and is killed."""
    command = [sys.executable, *TRAIN]
    start_rank = f"import subprocess, sys; subprocess.call({command} + sys.argv[1:])"
    flags = ["--steps", "100000", "--workers", "1", "--out", str(tmp_path)]
    launcher = subprocess.Popen(
        [sys.executable, "-c", start_rank, *flags],
        cwd=ROOT,
        env=environment(0, 1, free_port()) | {"TORCHELASTIC_RUN_ID": "x"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(tmp_path / "log.jsonl", '"step": 2,')
    launcher.kill()
    output, _ = launcher.communicate(timeout=30)  # open until rank and worker have left
    assert "torchrun is gone" in output
