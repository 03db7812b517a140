"""A run of train_fsdp.py that begins again: where it goes on, what it refuses, what it leaves."""

import math
import shlex
import shutil
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from checkpoints import SHARD, flip, names, steps
from conftest import FULL, ROOT
from ranks import (
    LEARNING_ARGV,
    NANO,
    NANO_ARGV,
    Run,
    Seen,
    main_with_signals,
    poisoned,
    read_log,
    read_records,
    run_ranks,
)

import checkpoint
import run
import train_fsdp
import vit

PLAIN = ["--save-every", "2", "--keep", "9", "--log-every", "1"]


@pytest.fixture(autouse=True, scope="module")
def nano():
    with patch.dict(vit.MODELS, nano=NANO):
        yield


def train(out, flags: str, received=()) -> int:
    argv = [*NANO_ARGV, *PLAIN, "--out", str(out), *shlex.split(flags)]
    return main_with_signals(argv, received)


class AfterSomeSteps(list):
    """Signals that come after so many looks at them."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    def __bool__(self):
        self.looks -= 1
        return self.looks < 0


@pytest.fixture(scope="module")
def finished(nano, tmp_path_factory):
    """A run of six steps with checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    assert train(folder, "--steps 6") == 0
    assert names(folder) == steps(2, 4, 6) and (folder / "done").exists()
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of it, beside one whose newest checkpoint is damaged."""
    damaged = shutil.copytree(finished, tmp_path / "damaged")
    flip(damaged / "step_00000006" / SHARD)
    return shutil.copytree(finished, tmp_path / "run")


def losses(folder: Path, after: int = 0) -> list[tuple[int, float]]:
    """(step, loss) of the last run in a folder, or of its steps after one."""
    lines = read_records(folder / "log.jsonl")
    begin = max(i for i, line in enumerate(lines) if line["event"] == "start")
    found = [line for line in lines[begin:] if line["event"] == "step" and line["step"] > after]
    return [(line["step"], line["loss"]) for line in found]


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder except the log and the lock, which record each start."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("log.jsonl", ".lock")]
    return {str(p.relative_to(folder)): (p.stat().st_ino, p.read_bytes()) for p in files}


# --- nothing is overwritten or started over in silence


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--seed 6", "was trained with other flags (seed 0 -> 6): "),
        ("--precision bf16", "precision fp32 -> bf16"),
        ("--epochs 2 --global-batch 16 --allow-changes", "give --global-batch 8"),
        ("--img-size 48 --allow-changes --resume {out}/step_00000006", "pos_embed"),
        ("--model nano:depth=1 --allow-changes", "is only in one of"),  # not damage
        ("--resume none", "holds checkpoints of another run"),
        ("--resume {out}/step_00000004", "mv {out}/step_00000006 ELSEWHERE"),
        ("--resume {out}/../damaged/step_00000004", "mv {out}/step_00000006 ELSEWHERE"),
        ("--resume {out}/../damaged --out {out}/new", SHARD),  # what is named has no fallback
        ("--resume {out}/step_00000099", "step_00000099"),
        (f"--resume {ROOT}/docs --out {{out}}/new", f"{ROOT}/docs"),
    ],
)
def test_refused_in_one_sentence_that_leaves_all_files_alone(flags, sentence, folder, capsys):
    before = tree(folder)
    usual = "" if "--epochs" in flags else "--steps 6 "
    assert train(folder, (usual + flags).format(out=folder)) == 2
    said, printed = capsys.readouterr()
    assert "damaged checkpoint" not in said
    assert printed.startswith("train_fsdp.py: error: ") and printed.count("\n") == 1
    assert sentence.format(out=folder) in printed and tree(folder) == before


def test_damage_of_the_newest_is_skipped_and_of_all_refused(folder, finished, capsys):
    damaged = folder.with_name("damaged")
    assert train(damaged, "--steps 6") == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("warning: skipping a damaged")]
    assert "step_00000006" in line and "step_00000004 at step 4" in out
    assert losses(damaged) == losses(finished, after=4)
    assert names(damaged) == steps(2, 4, 6) and checkpoint.verify(damaged / "step_00000006")
    for path in checkpoint.list_checkpoints(damaged):
        flip(path / SHARD)
    before = tree(damaged)
    assert train(damaged, "--steps 6") == 2 and tree(damaged) == before


def test_a_flag_that_an_older_checkpoint_lacks_had_its_default(tmp_path, monkeypatch, capsys):
    record = run.record

    def older(args):
        flags = record(args)
        del flags["mask_ratio"]
        return flags

    with monkeypatch.context() as patched:
        patched.setattr(run, "record", older)
        assert train(tmp_path, "--steps 4", received=AfterSomeSteps(2)) == 0
    assert train(tmp_path, "--steps 4 --mask-ratio 0.5") == 2
    assert "mask_ratio 0.75 -> 0.5" in capsys.readouterr().err
    assert train(tmp_path, "--steps 4") == 0


def test_a_finished_run_has_nothing_to_do_until_it_is_extended(folder):
    before = tree(folder)
    assert train(folder, "--steps 6") == 0 and tree(folder) == before
    assert train(folder, "--steps 20 --allow-changes", received=[signal.SIGTERM]) == 0
    start, _, end = read_log(folder / "log.jsonl")
    assert (start["begin"], end["reason"]) == (6, "signal")
    assert not (folder / "done").exists()


def test_a_named_checkpoint_or_the_newest_of_a_named_run_goes_on_elsewhere(finished, tmp_path):
    assert train(tmp_path / "2", f"--steps 6 --resume {finished}/step_00000002") == 0
    assert losses(tmp_path / "2") == losses(finished, after=2)
    assert train(tmp_path / "6", f"--steps 8 --allow-changes --resume {finished}") == 0
    assert [step for step, _ in losses(tmp_path / "6")] == [7, 8]


def test_the_checkpoint_to_begin_at_is_left_alone(folder):
    """Although nothing was trained after it."""
    for step in steps(4, 6):
        shutil.rmtree(folder / step)
    before = tree(folder / "step_00000002")
    flags = f"--steps 6 --allow-changes --blr 1e-4 --resume {folder}/step_00000002"
    with poisoned(Run([], poison="loss", poison_steps=(0,)), Seen(step=0)):
        assert train(folder, flags) == 1
    assert names(folder) == steps(2) and tree(folder / "step_00000002") == before


# --- a job that its launcher starts again, with the same command

LAUNCHED = {"SLURM": "SLURM_JOB_ID", "TORCHELASTIC": "TORCHELASTIC_RUN_ID"}


@pytest.mark.parametrize("launcher", LAUNCHED if FULL else ["SLURM"])
@pytest.mark.parametrize("resume", ["none", "elsewhere", "in OUT", "before its first save"])
def test_a_job_that_is_started_again_goes_on(launcher, resume, finished, tmp_path, monkeypatch):
    """Which would be refused if the user typed it again."""
    out = tmp_path / "new"
    source = out if resume == "in OUT" else tmp_path / "old"
    begin = 0 if resume == "none" else 2
    shutil.copytree(finished / "step_00000002", source / "step_00000002")
    flags = f"--steps 8 --resume {source}/step_00000002 --allow-changes"
    flags += " --keep 1"  # which may remove what it began with
    if resume == "none":
        flags = "--steps 8 --resume none"
    if resume == "before its first save":
        flags += " --save-every none"
    monkeypatch.setenv(LAUNCHED[launcher], "7")
    assert train(out, flags, received=AfterSomeSteps(3)) == 0
    saved = names(out)
    if resume in ("none", "elsewhere"):
        assert train(out, flags) == 2 and names(out) == saved
    monkeypatch.setenv(f"{launcher}_RESTART_COUNT", "1")
    assert train(out, flags) == 0
    found = [line["step"] for line in read_log(out / "log.jsonl")[1]]
    if saved:
        assert found == list(range(begin + 1, 9))
    else:
        assert found[-6:] == list(range(3, 9)) and len(found) > 6


@pytest.mark.parametrize("launcher", LAUNCHED if FULL else ["SLURM"])
def test_a_job_that_was_refused_is_refused_again(launcher, folder, monkeypatch):
    """torchrun starts ranks again whatever their status was."""
    before = tree(folder)
    monkeypatch.setenv(LAUNCHED[launcher], "7")
    for count in ("0", "1"):
        monkeypatch.setenv(f"{launcher}_RESTART_COUNT", count)
        for resume in ("none", folder.with_name("damaged") / "step_00000002"):
            assert train(folder, f"--steps 8 --allow-changes --resume {resume}") == 2
    assert tree(folder) == before


def test_overflows_that_ended_a_run_leave_no_trace_in_the_next(tmp_path):
    """They lower the fp16 scale until every gradient is 0."""
    flags = "--precision fp16 --steps 50 --save-every 20"
    with poisoned(Run([], poison="gradient", poison_steps=(0,)), Seen(step=0)):
        assert train(tmp_path, flags) == 1
    last = train_fsdp.MAX_OVERFLOWS
    assert names(tmp_path)[-1] == f"step_{last:08d}"
    assert train(tmp_path, flags) == 0
    _, lines, _ = read_log(tmp_path / "log.jsonl")
    norms = [line["grad_norm"] for line in lines if line["step"] > last]
    assert any(math.isfinite(norm) and norm > 1e-3 for norm in norms)


# --- stopped and resumed, on several ranks


@pytest.mark.slow
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """A signal on one rank stops all; then the same ranks, and others, finish the same training."""
    argv = [*LEARNING_ARGV, "--global-batch", "12", "--steps", "6", "--save-every", "9"]
    argv += ["--mode", "full_shard"]
    hybrid = shlex.split("--mode hybrid --fsdp 1 --group 3 --ac full --accum 2")
    others = {"hybrid": argv + hybrid}
    if FULL:
        others["zero1"] = [*argv, "--mode", "zero1"]
    stopped = tmp_path / "stopped"
    struck = Run(argv, params=False, to=str(stopped), signal_rank=1, signal_step=2)
    whole, first = run_ranks(2, [Run(argv), struck], tmp_path / "first")
    assert whole.status == first.status == [0, 0]
    at = first.end["steps"]
    assert at in (3, 4) and first.end["reason"] == "signal"
    assert names(stopped) == steps(at) and not (stopped / "done").exists()
    for name in others:
        shutil.copytree(stopped, tmp_path / name)

    (second,) = run_ranks(2, [Run(argv, to=str(stopped))], tmp_path / "second")
    runs = [Run(flags, to=str(tmp_path / name)) for name, flags in others.items()]
    of_three = run_ranks(3, runs, tmp_path / "three")

    expected = [s["loss"] for s in whole.steps]
    assert second.status == [0, 0] and second.end["reason"] == "done"
    assert [s["step"] for s in second.steps] == list(range(1, 7))
    assert [s["loss"] for s in second.steps] == expected and len({*expected}) == 6
    for name, value in whole.params.items():
        assert torch.equal(second.params[name], value), name
    for result, name in zip(of_three, others, strict=True):
        assert result.status == [0, 0, 0] and result.start["begin"] == at, result.errors
        assert [s["loss"] for s in result.steps] == pytest.approx(expected, rel=1e-6)
        assert result.replicas_differ == 0 and (tmp_path / name / "done").exists()
