"""A run that begins again: where it goes on, what it leaves alone, what it says; in one process."""

import json
import math
import shutil
import time
from unittest.mock import patch

import pytest
from checkpoints import names, steps
from conftest import FULL, ROOT
from ranks import NANO, NANO_ARGV, Run, Seen, poisoned, read_log

import checkpoint
import train_fsdp
import vit
from runtime import evaluation
from runtime.agreement import SCALE_EXHAUSTED

HELDOUT = str(ROOT / "examples" / "tiles" / "heldout")
PLAIN = ["--save-every", "2", "--keep", "9", "--log-every", "1"]


@pytest.fixture(autouse=True)
def nano(monkeypatch):
    monkeypatch.setitem(vit.MODELS, "nano", NANO)


def train(out, *flags, received=()) -> int:
    return train_fsdp.main([*NANO_ARGV, *PLAIN, *flags, "--out", str(out)], received)


class AfterSomeSteps(list):
    """Signals that come after so many looks at them."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    def __bool__(self):
        self.looks -= 1
        return self.looks < 0


def state_of(folder):
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}


def test_overflows_that_ended_a_run_leave_no_trace_in_the_next(tmp_path):
    """They had lowered the fp16 scale to 2**-25, and every gradient of the next run was 0."""
    flags = ["--precision", "fp16", "--steps", "60", "--save-every", "20"]
    always = Run([], poison="gradient", poison_steps=(0,))
    with poisoned(always, Seen(step=0)):
        assert train(tmp_path, *flags) == 1
    assert names(tmp_path)[-1] == f"step_{SCALE_EXHAUSTED:08d}"
    assert train(tmp_path, *flags) == 0
    _, lines, end = read_log(tmp_path / "log.jsonl")
    again = [line["grad_norm"] for line in lines if line["step"] > SCALE_EXHAUSTED]
    finite = [norm for norm in again if math.isfinite(norm)]
    assert len(finite) >= 10 and min(finite) > 1e-3 and end["reason"] == "done"


def test_the_checkpoint_to_begin_at_is_left_alone(tmp_path):
    """Although nothing was trained after it."""
    assert train(tmp_path, "--steps", "4") == 0
    shutil.rmtree(tmp_path / "step_00000004")
    before = state_of(tmp_path / "step_00000002")
    flags = ["--steps", "4", "--allow-changes", "--blr", "1e-4"]
    always = Run([], poison="loss", poison_steps=(0,))
    with poisoned(always, Seen(step=0)):
        assert train(tmp_path, *flags, "--resume", str(tmp_path / "step_00000002")) == 1
    assert names(tmp_path) == steps(2) and state_of(tmp_path / "step_00000002") == before


LAUNCHED = {"SLURM": "SLURM_JOB_ID", "TORCHELASTIC": "TORCHELASTIC_RUN_ID"}


@pytest.mark.parametrize("launcher", LAUNCHED if FULL else ["SLURM"])
@pytest.mark.parametrize("resume", ["none", "elsewhere", "in OUT"])
def test_a_job_that_is_started_again_goes_on(launcher, resume, tmp_path, monkeypatch, capsys):
    """With the same command, which would be refused if the user typed it again."""
    old, out = tmp_path / "old", tmp_path / "new"
    assert train(old, "--steps", "2") == 0
    flags = ["--steps", "8", "--resume", "none"]
    begin = 0
    if resume != "none":
        folder = old if resume == "elsewhere" else out
        flags = ["--steps", "8", "--allow-changes", "--resume", str(folder / "step_00000002")]
        begin = 2
    if resume == "in OUT":
        old.rename(out)
        flags += ["--keep", "1"]  # which removes what it began with
    monkeypatch.setenv(LAUNCHED[launcher], "7")
    assert train(out, *flags, received=AfterSomeSteps(3)) == 0
    saved = names(out)
    capsys.readouterr()
    if resume != "in OUT":
        assert train(out, *flags) == 2 and names(out) == saved
    monkeypatch.setenv(f"{launcher}_RESTART_COUNT", "1")
    assert train(out, *flags) == 0
    assert f"resumed {out}/{saved[-1]}" in capsys.readouterr().out
    seen = [line["step"] for line in read_log(out / "log.jsonl")[1]]
    assert seen[-6:] == list(range(3, 9)) and seen[0] == (1 if resume != "elsewhere" else 3)
    assert len(seen) == 8 - begin or resume == "in OUT"


@pytest.mark.parametrize("launcher", LAUNCHED if FULL else ["SLURM"])
def test_a_job_that_was_refused_is_refused_again(launcher, tmp_path, monkeypatch):
    """torchrun starts ranks again whatever their status was."""
    old, out = tmp_path / "old", tmp_path / "new"
    assert train(old, "--steps", "2") == train(out, "--steps", "4") == 0
    before = {name: state_of(out / name) for name in names(out)}
    monkeypatch.setenv(LAUNCHED[launcher], "7")
    for count in ("0", "1"):
        monkeypatch.setenv(f"{launcher}_RESTART_COUNT", count)
        for resume in ("none", str(old / "step_00000002")):
            assert train(out, "--steps", "8", "--allow-changes", "--resume", resume) == 2
    assert {name: state_of(out / name) for name in names(out)} == before


def test_a_job_started_again_before_its_first_save_begins_where_it_was_told(tmp_path, monkeypatch):
    assert train(tmp_path / "old", "--steps", "4") == 0
    out = tmp_path / "new"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    path = str(tmp_path / "old/step_00000004")
    flags = ["--steps", "6", "--allow-changes", "--resume", path, "--save-every", "none"]
    assert train(out, *flags, received=AfterSomeSteps(1)) == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train(out, *flags) == 0
    assert [line["step"] for line in read_log(out / "log.jsonl")[1]][-2:] == [5, 6]


def test_checkpoints_of_another_run_are_not_removed(tmp_path, capsys):
    """--keep would, once the run that begins elsewhere has saved twice."""
    old, out = tmp_path / "old", tmp_path / "out"
    assert train(old, "--steps", "6") == train(out, "--steps", "4", "--seed", "1") == 0
    before = {name: state_of(out / name) for name in names(out)}
    flags = ["--steps", "12", "--allow-changes", "--keep", "1"]
    assert train(out, *flags, "--resume", str(old / "step_00000006")) == 2
    assert "step_00000004, perhaps of another run: give another --out" in capsys.readouterr().err
    assert {name: state_of(out / name) for name in names(out)} == before


def test_the_steps_of_another_run_mode_are_kept_out_of_a_log(tmp_path, capsys):
    assert train(tmp_path, "--steps", "2") == 0
    before = (tmp_path / "log.jsonl").read_bytes()
    assert train(tmp_path, "--steps", "2", "--run-mode", "io") == 2
    assert "holds the log of a run with --run-mode real: give" in capsys.readouterr().err
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_images_that_are_held_out_and_trained_on_are_said(tmp_path, capsys):
    tiles = ROOT / "examples" / "tiles"
    flags = ["--steps", "1", "--eval-data", HELDOUT, "--data"]
    assert train(tmp_path / "1", *flags, str(tiles)) == 0
    assert "images of --eval-data are also in --data" in capsys.readouterr().out
    assert train(tmp_path / "2", *flags, str(tiles / "train")) == 0
    assert "images of --eval-data" not in capsys.readouterr().out


def test_epochs_are_not_counted_in_batches_of_another_size(tmp_path, capsys):
    flags = ["--epochs", "2", "--global-batch"]
    assert train(tmp_path, *flags, "24", received=AfterSomeSteps(9)) == 0
    assert train(tmp_path, *flags, "48", "--allow-changes") == 2
    error = capsys.readouterr().err
    assert "give --global-batch 24, or --steps" in error and not (tmp_path / "done").exists()
    assert train(tmp_path, "--steps", "14", "--global-batch", "48", "--allow-changes") == 0


def test_the_last_evaluation_is_made_up_for(tmp_path, capsys):
    flags = ["--steps", "2", "--eval-data", HELDOUT]
    assert train(tmp_path / "whole", *flags) == 0
    with patch.object(evaluation.Evaluation, "__call__", side_effect=OSError("killed")):
        assert train(tmp_path / "killed", *flags) == 1
    assert names(tmp_path / "killed") == steps(2) and not (tmp_path / "killed/done").exists()
    assert train(tmp_path / "killed", *flags) == 0
    found = [evaluations(tmp_path / name) for name in ("whole", "killed")]
    assert found[0] == found[1] != [] and (tmp_path / "killed/done").exists()
    assert train(tmp_path / "killed", *flags) == 0  # once is enough
    assert evaluations(tmp_path / "killed") == found[1]


def evaluations(out):
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(r["step"], r["eval_loss"]) for r in records if r["event"] == "eval"]


def test_what_is_on_disk_is_said(tmp_path, capsys):
    old = tmp_path / "old"
    assert train(old, "--steps", "2") == 0
    step = old / "step_00000002"
    for out, flags, words in (
        (old, ["--resume", str(step)], f"all 2 steps; saved {step}"),
        (old, ["--save-every", "none"], f"began at {step}, nothing saved"),
        (tmp_path / "new", ["--resume", str(step)], f"began at {step}, nothing saved"),
    ):
        capsys.readouterr()
        assert train(out, "--steps", "2", *flags) == 0
        assert words in capsys.readouterr().out
    assert not (tmp_path / "new/done").exists()


@pytest.mark.full
def test_a_save_in_the_background_is_waited_for_when_a_process_fails(tmp_path, capsys):
    write = checkpoint.Saver._write
    step = train_fsdp.train_step

    def slow(self, *work):
        time.sleep(1)
        return write(self, *work)

    def fails(training, guard, *rest):
        if guard.checked == 2:
            raise ValueError("a bug")
        step(training, guard, *rest)

    with patch.object(checkpoint.Saver, "_write", slow):
        with patch.object(train_fsdp, "train_step", fails):
            assert train(tmp_path, "--steps", "9", "--async-save") == 1
        assert f"a bug; saved {tmp_path}/step_00000002" in capsys.readouterr().err
        assert train(tmp_path, "--steps", "9", "--async-save") == 0
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["event"] == "save"] == [2, 4, 6, 8, 9]


@pytest.mark.full
def test_bad_images_that_are_gone_do_not_count(tmp_path, capsys):
    tiles = sorted((ROOT / "examples/tiles/train").rglob("*.jpg"))[:40]
    root = tmp_path / "tiles"
    root.mkdir()
    for i, tile in enumerate(tiles):
        shutil.copy(tile, root / f"{i:02}.jpg")
    for i in range(3):
        (root / f"bad{i}.jpg").write_text("no image")
    flags = ["--data", str(root), "--steps", "30", "--max-bad", "0.05", "--global-batch", "8"]
    assert train(tmp_path / "out", *flags) == 1
    assert "3 of 43 images are unreadable" in capsys.readouterr().err
    for i in range(2):  # as the sentence says
        (root / f"bad{i}.jpg").unlink()
    assert train(tmp_path / "out", *flags, "--allow-changes") == 0
    moved = tmp_path / "moved"
    root.rename(moved)
    flags[1] = str(moved)
    flags[3] = "60"
    assert train(tmp_path / "out", *flags, "--allow-changes") == 0
