"""A run that begins again: where it goes on, what it leaves alone, what it says; in one process."""

import json
import math
import shutil
from unittest.mock import patch

import pytest
from checkpoints import names, steps
from conftest import FULL, ROOT
from ranks import NANO, NANO_ARGV, Run, Seen, main_with_signals, poisoned, read_log

import run
import train_fsdp
import vit

HELDOUT = str(ROOT / "examples" / "tiles" / "heldout")
PLAIN = ["--save-every", "2", "--keep", "9", "--log-every", "1"]


@pytest.fixture(autouse=True)
def nano(monkeypatch):
    monkeypatch.setitem(vit.MODELS, "nano", NANO)


def train(out, *flags, received=()) -> int:
    return main_with_signals([*NANO_ARGV, *PLAIN, *flags, "--out", str(out)], received)


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
    assert names(tmp_path)[-1] == f"step_{train_fsdp.MAX_OVERFLOWS:08d}"
    assert train(tmp_path, *flags) == 0
    _, lines, end = read_log(tmp_path / "log.jsonl")
    again = [line["grad_norm"] for line in lines if line["step"] > train_fsdp.MAX_OVERFLOWS]
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
    assert "holds step_00000004 besides --resume" in capsys.readouterr().err
    assert {name: state_of(out / name) for name in names(out)} == before


def test_epochs_are_not_counted_in_batches_of_another_size(tmp_path, capsys):
    flags = ["--epochs", "2", "--global-batch"]
    assert train(tmp_path, *flags, "24", received=AfterSomeSteps(9)) == 0
    assert train(tmp_path, *flags, "48", "--allow-changes") == 2
    error = capsys.readouterr().err
    assert "give --global-batch 24" in error and not (tmp_path / "done").exists()
    assert train(tmp_path, "--steps", "14", "--global-batch", "48", "--allow-changes") == 0


def test_the_last_evaluation_is_made_up_for(tmp_path, capsys):
    flags = ["--steps", "2", "--eval-data", HELDOUT]
    assert train(tmp_path / "whole", *flags) == 0
    with patch.object(run, "evaluate", side_effect=OSError("killed")):
        assert train(tmp_path / "killed", *flags) == 1
    assert names(tmp_path / "killed") == steps(2) and not (tmp_path / "killed/done").exists()
    assert train(tmp_path / "killed", *flags) == 0
    found = [evaluations(tmp_path / name) for name in ("whole", "killed")]
    assert found[0] == found[1] != [] and (tmp_path / "killed/done").exists()
    assert train(tmp_path / "killed", *flags) == 0  # once is enough
    assert evaluations(tmp_path / "killed") == found[1]


def test_a_folder_of_a_run_stands_for_its_newest_checkpoint_and_what_is_missing_is_named(
    tmp_path, capsys
):
    assert train(tmp_path / "old", "--steps", "4") == 0
    flags = ["--steps", "6", "--allow-changes", "--resume"]
    assert train(tmp_path / "new", *flags, str(tmp_path / "old")) == 0
    assert read_log(tmp_path / "new/log.jsonl")[0]["begin"] == 4
    for path in ("nowhere", str(ROOT / "docs")):
        capsys.readouterr()
        assert train(tmp_path / "other", *flags, path) == 2
        assert path in capsys.readouterr().err


def test_a_flag_that_an_older_checkpoint_lacks_had_its_default(tmp_path, monkeypatch, capsys):
    record = run.record
    with monkeypatch.context() as patched:
        patched.setattr(run, "record", lambda args: without(record(args), "mask_ratio"))
        assert train(tmp_path, "--steps", "4", received=AfterSomeSteps(2)) == 0
    assert train(tmp_path, "--steps", "4", "--mask-ratio", "0.5") == 2
    assert "mask_ratio 0.75 -> 0.5" in capsys.readouterr().err
    assert train(tmp_path, "--steps", "4") == 0


def without(flags, name):
    return {key: value for key, value in flags.items() if key != name}


def evaluations(out):
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(r["step"], r["eval_loss"]) for r in records if r["event"] == "eval"]


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
