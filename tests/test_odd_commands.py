"""What is mistyped on a command line: one sentence and status 2, before anything starts."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from conftest import ROOT
from ranks import read_log, status_of

import plan
import prepare
import probe
import sweep
import train_fsdp
from runtime import config, devices

PROGRAMS = {
    "train_fsdp.py": train_fsdp,
    "plan.py": plan,
    "prepare.py": prepare,
    "sweep.py": sweep,
    "probe.py": probe,
}


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def refused(program: str, argv: list[str], capsys) -> str:
    """The sentence by which a program refuses a command."""
    started = AssertionError("a process group was started")
    with patch.object(dist, "init_process_group", side_effect=started):
        status = status_of(PROGRAMS[program].main, argv)
    printed = capsys.readouterr()
    assert status == 2 and printed.out == "" and not os.listdir(), (argv, status, printed)
    usage, _, sentence = printed.err.rpartition(": error: ")
    assert "Traceback" not in printed.err and sentence.count("\n") == 1, printed.err
    assert usage.startswith(("usage: ", program)) and len(sentence) < 600, printed.err
    return sentence


BETAS = ("0.9", "0.9,1", "0.9,0.95,0.99", "a,b", "-0.1,0.9", "nan,0.9", "")
# flags of train_fsdp.py, and what the sentence has
TRAINING = [
    ("--mode full_shard --group 2", "--group is for --mode hybrid, hybrid_grad_op"),
    ("--cpu-offload", "but this run is on the CPU"),
    ("--group 2", "1 ranks cannot be split into shard groups of 2"),
    ("--tp 2", "--tp 2 must divide 1 ranks, "),
    ("--tp 3 --dry-run --world-size 8", "--tp 3 must divide 8 ranks"),
    ("--tp 2 --mode ddp --dry-run --world-size 8", "ddp"),
    ("--tp 2 --precision fp16 --dry-run --world-size 8", "--tp does not work with fp16"),
    ("--cpu-offload --precision fp16 --device cuda", "--cpu-offload does not work with fp16"),
    ("--clip 0", "--clip 0 would make every gradient 0: leave it out"),
    ("--clip -1", "argument --clip: '-1' is not a number from 0 up"),
    ("--mask-ratio 0", "--mask-ratio 0.0 removes no patch"),
    ("--batch 8 --global-batch 64", "--batch and --global-batch: give one of them"),
    ("--global-batch 9 --accum 2", "is not a multiple of 1 ranks x 2 accumulation steps"),
    ("--dry-run", "--dry-run and --world-size go together"),
    ("--model giant", "--model giant: 'giant'; use tiny, base"),
    ("--model base:heads=7", "width 768 must be a multiple of 4 and of the number of heads (7)"),
    ("--save-every 30h", "--save-every takes steps (500), minutes (30m), none: '30h'"),
    ("--batch 0", "argument --batch: '0' is not a whole number from 1 up"),
    ("--blr nan", "argument --blr: 'nan' is not a number"),
    ("--lr 1e-3 --blr 1.5e-4", "--blr and --lr: give one of them"),  # a default's value too
    *((f"--betas={betas}", "is not two numbers from 0 to below 1") for betas in BETAS),
    ("--data=", "argument --data: '' is empty: is a shell variable unset?"),
    ("--ste 5", "unrecognized arguments: --ste 5"),  # no abbreviations
]
OTHERS = [
    ("plan.py", "--group 3", "cannot be split into shard groups of 3"),
    ("plan.py", "--machine nowhere", "--machine nowhere: no such file"),
    ("sweep.py", "quick --nodes 1,,2", "'' is not a whole number"),
    ("sweep.py", "quick --nodes 2", "quick does not use --nodes"),
    ("sweep.py", "report . --models tiny", "report does not use --models"),
    ("sweep.py", "report . -- --img-size 96", "leave out the flags after --"),
    ("sweep.py", "options --nodes 1,8 --sbatch x", "options runs on one number of nodes"),
    ("prepare.py", "pack a b --workers 0", "'0' is not a whole number from 1 to 1024"),
    ("probe.py", "knn a", "required: --data"),
    ("probe.py", "finetune a --data b --test c --label-smoothing 1", "not a number from 0 to 0.99"),
]


@pytest.mark.parametrize(("line", "words"), TRAINING)
def test_training(line, words, capsys):
    assert words in refused("train_fsdp.py", ["--device", "cpu", *line.split()], capsys)


@pytest.mark.parametrize(("program", "line", "words"), OTHERS)
def test_the_other_programs(program, line, words, capsys):
    assert words in refused(program, line.split(), capsys)


@pytest.mark.full
def test_a_process_of_its_own_does_the_same():
    command = [sys.executable, ROOT / "train_fsdp.py", "--img-size", "225"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "") and not os.listdir()
    assert done.stderr.startswith("train_fsdp.py: error: image size 225 is not a multiple")


def test_when_to_save():
    read = config.save_interval
    assert (read("500"), read("0.5m"), read("none")) == ((500, None), (None, 30), (None, None))
    for text in ("0", "0m", "nanm", "1.5", ""):
        with pytest.raises(ValueError, match="--save-every takes steps"):
            read(text)


def test_the_annotations_of_the_table_say_how_its_flags_are_read():
    typed = "--fsdp 1 --no-limit-all-gathers --no-norm-pix-loss --compile --clip 1 --profile"
    found = config.parse([*typed.split(), "--run", "syn"])
    assert found.fsdp == 1 and found.limit_all_gathers is found.norm_pix_loss is False
    assert found.compile is True and found.async_save is False and found.profile == 3
    assert (found.clip, found.run_mode) == (1.0, "syn")


@pytest.mark.parametrize(
    ("flags", "cpu_flags", "precision"),
    [
        ("--device cpu", "fpu avx512_bf16 amx_bf16", "bf16"),
        ("--device cpu", "fpu avx512_bf16 bmi1", "fp32"),
        ("--device cpu", "fp asimd bf16 i8mm", "bf16"),  # ARM
        ("--device cpu", None, "fp32"),  # not Linux
        ("--dry-run --world-size 8", "fpu avx2", "bf16"),
        ("--dry-run --world-size 8 --device cpu", "fpu avx2", "fp32"),
    ],
)
def test_precision_is_what_the_device_computes_in(flags, cpu_flags, precision, monkeypatch):
    def read_text(path):
        return f"processor: 0\nflags: {cpu_flags}\n"

    def exists(path):
        return cpu_flags is not None

    monkeypatch.setattr(devices.Path, "exists", exists)
    monkeypatch.setattr(devices.Path, "read_text", read_text)
    assert config.parse(flags.split()).precision == precision


def test_the_start_and_a_refused_resume_name_the_precision(capsys):
    argv = ["--model", "tiny:depth=1", "--img-size", "32", "--device", "cpu", "--workers", "0"]
    argv += ["--batch", "2", "--steps", "1"]
    argv += ["--out", "out"]
    with patch.object(devices, "default_precision", return_value=("bf16", "why")):
        assert train_fsdp.main(argv) == 0
    assert "precision: bf16 (default here bf16: why)" in capsys.readouterr().out
    start, _, _ = read_log(Path("out/log.jsonl"))
    assert start["precision_default"] == "bf16: why"
    with patch.object(devices, "default_precision", return_value=("fp32", "why")):
        assert train_fsdp.main(argv) == 2
    assert "precision bf16 -> fp32" in capsys.readouterr().err
