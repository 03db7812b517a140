"""What is mistyped on a command line: one sentence and status 2, before anything starts."""

import math
import os
from unittest.mock import patch

import pytest
import torch.distributed as dist
from conftest import ROOT
from images import copy_tiles
from ranks import TINY_ARGV, status_of

import run
import train_fsdp

BETAS = ("0.9", "0.9,1", "nan,0.9")
# flags, and what the sentence has
MISTYPED = {
    "--mode full_shard --group 2": "--group does not apply to --mode full_shard",
    "--mode ddp --fsdp 2": "--fsdp does not apply to --mode ddp",  # the default's value too
    "--mode full_shard --limit-all-gathers": "does not apply to --mode full_shard with --fsdp 2",
    "--mode full_shard --cpu-offload": "but this run is on the CPU",
    "--group 2": "1 ranks cannot be split into shard groups of 2",
    "--mask-ratio 0": "--mask-ratio 0.0 removes no patch",
    "--lr 1e-3 --blr 1.5e-4": "--blr: not allowed with argument --lr",
    "--global-batch 9 --accum 2": "is not a multiple of 1 ranks x 2 accumulation steps",
    "--model giant": "--model giant: 'giant'; use tiny, base",
    "--model base:heads=7": "width 768 must be a multiple of 4 and of the number of heads (7)",
    "--save-every 30h": "--save-every takes steps (500), minutes (30m) or none, not 30h",
    "--batch 0": "argument --batch: '0' is not a whole number from 1 up",
    "--lr 0": "argument --lr: '0' is not a number",
    "--out=": "argument --out: '' is empty: is a shell variable unset?",
    "--ste 5": "unrecognized arguments: --ste 5",  # no abbreviations
    "--stats nothing.json": "there is no nothing.json: see --stats",
    "--data nowhere": "there is no folder nowhere: give --data",
} | {f"--betas={betas}": "is not two numbers below 1" for betas in BETAS}


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def refused(argv: list[str], capsys) -> str:
    """The sentence by which a command is refused."""
    status = status_of(train_fsdp.main, argv)
    printed = capsys.readouterr()
    assert status == 2 and printed.out == "", (argv, status, printed)
    usage, _, sentence = printed.err.rpartition(": error: ")
    assert "Traceback" not in printed.err and sentence.count("\n") == 1, printed.err
    assert usage.startswith(("usage: ", "train_fsdp.py")) and len(sentence) < 600, printed.err
    return sentence


@pytest.mark.parametrize("line", MISTYPED)
def test_a_command_that_cannot_be_meant(line, capsys):
    started = AssertionError("a process group was started")
    with patch.object(dist, "init_process_group", side_effect=started):
        sentence = refused(["--device", "cpu", *line.split()], capsys)
    assert MISTYPED[line] in sentence and not os.listdir()


# flags for a folder of eight images, and what the sentence has
UNFIT = {
    "--global-batch 9": "global batch 9 exceeds the data set of 8 images",
    "--batch 2 --warmup-steps 3 --steps 2": "--warmup-steps 3 is more than the 2 steps of the run",
    "--batch 2 --channels 4": "--channels 4 needs statistics: type `python prepare.py stats images",
    "--batch 2 --include nothing": "no images found in images",
    "--batch 2 --resume nowhere": "nowhere: there is no such folder",
    "--batch 2 --resume images": "images",  # no checkpoint
    "--batch 2 --out file/new": "Not a directory",
    "--batch 2 --out images/out": "--out images/out lies in --data images",
}


@pytest.mark.parametrize("line", UNFIT)
def test_a_command_that_does_not_fit_its_images(line, tmp_path, capsys):
    copy_tiles(tmp_path / "images", 8)
    (tmp_path / "file").touch()
    assert UNFIT[line] in refused([*TINY_ARGV, "--data", "images", *line.split()], capsys)
    assert not list(tmp_path.glob("out/step_*"))


def test_when_to_save():
    read = run.save_interval
    assert (read("500"), read("0.5m")) == ((500, math.inf), (math.inf, 30))
    assert read("none") == (math.inf, math.inf)
    for text in ("0", "0m", "nanm", "1.5", ""):
        with pytest.raises(ValueError, match="--save-every takes steps"):
            read(text)


def test_a_temporary_folder_too_long_for_sockets(monkeypatch, capsys):
    """Loader processes would fail to start, without naming it."""
    monkeypatch.setattr(run.tempfile, "gettempdir", lambda: "/long" * 20)
    flags = ["--data", f"{ROOT}/examples/tiles/train", "--workers", "1"]
    assert "TMPDIR /long" in refused([*TINY_ARGV, *flags], capsys)
