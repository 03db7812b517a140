"""Failed saves: a warning or a clean end, no hang, and the older checkpoints load."""

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import FULL
from ranks import Result, Run, bound_by_permissions, run_ranks
from test_checkpoint import SMALL, good, names, one_process, steps  # noqa: F401 - fixtures
from test_train import changed

import checkpoint
import train_fsdp
from runtime.log import Log

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
ARGV = changed(SMALL, model="nano", steps="6", keep="9", mode="full_shard")
EIO = r"OSError: \[Errno 5\] Input/output error"

# fault in tests/ranks.py: the rank that it strikes (-1: all), the sentence
FAULTS = {
    "limit": (1, r"OSError: \[Errno 27\] File too large.* \(rank 1\)"),
    "latest": (0, rf"{EIO} \(rank 0\)"),
}
if FULL:
    FAULTS |= {
        "permission": (-1, r"PermissionError: \[Errno 13\] .*\(rank 0\)"),
        "fsync": (1, rf"{EIO} \(rank 1\)"),
        "metadata": (0, rf"{EIO} \(rank 0\)"),
        "rename": (0, rf"{EIO} \(rank 0\)"),
    }


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of 45 MB: room for one checkpoint of 27 MB (`tiny`)."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=45m", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: step")]


def the_error(text: str) -> str:
    """The one error that a run ended with."""
    (error,) = [line for line in text.splitlines() if line.startswith("train_fsdp.py: error: ")]
    assert "Traceback" not in text
    return error


@pytest.fixture(scope="module")
def results(once) -> tuple[Path, dict[str, Result]]:
    """(folder with an --out per name, result per name): all runs, in one set of processes."""
    return once("failures", all_results)


def all_results(out: Path) -> tuple[Path, dict[str, Result]]:
    every = changed(ARGV, save_every="1")
    runs = {"uninterrupted": Run(every, params=False)}
    for fault, (rank, _) in FAULTS.items():
        again = Run(every, params=False, to=str(out / fault))
        runs[fault] = replace(again, fault=fault, fault_rank=rank, fault_saves=(1, 3, 4))
        runs[f"{fault} resumed"] = again
    runs["last"] = Run(ARGV, params=False, fault="limit", fault_rank=0, fault_saves=(2,))
    # the save that a signal asks for is the last one too
    runs["signal"] = replace(runs["last"], signal_rank=1, signal_step=2, fault_saves=(1,))
    behind = [*changed(ARGV, save_every="2"), "--async-save"]
    runs["behind"] = Run(behind, params=False, full_rank=1, full_saves=(0,))
    runs = {name: replace(run, to=run.to or str(out / name)) for name, run in runs.items()}
    found = run_ranks(2, list(runs.values()), out / "ranks", timeout=400)
    return out, dict(zip(runs, found, strict=True))


@linux
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_failed_saves_keep_the_older_checkpoints_and_end_the_run_cleanly(fault, results):
    """Once: a warning. Twice in a row: all ranks end with 1. The same command then resumes."""
    out, found = results
    folder, (_, sentence) = out / fault, FAULTS[fault]
    expected = [(s["step"], s["loss"]) for s in found["uninterrupted"].steps]
    assert found["uninterrupted"].status == [0, 0] and len(set(expected)) == 6

    # saves 2, 4 and 5 fail: the first two are warnings, the third ends the run
    struck, resumed = found[fault], found[f"{fault} resumed"]
    lines = warnings(struck.output)
    assert len(lines) == 2, lines
    for line, step in zip(lines, (2, 4), strict=True):
        assert re.search(sentence, line), line
        assert line.startswith(f"warning: step {step} was not saved: "), line
    assert struck.status == [1, 1]
    assert re.search(f"error: step 5 was not saved: .*{sentence}", the_error(struck.errors))

    # the older checkpoints load, and the losses are those of a run without failures
    assert resumed.status == [0, 0], resumed.errors
    begin = 5 if fault == "latest" else 3  # `latest` is written last: the checkpoint is there
    assert f"{fault}/step_{begin:08d} at step {begin}" in resumed.output
    assert [(s["step"], s["loss"]) for s in resumed.steps] == expected[:5] + expected[begin:]
    assert names(folder) == (steps(*range(1, 7)) if fault == "latest" else steps(1, 3, 4, 5, 6))
    for name in names(folder):
        assert checkpoint.verify(folder / name) > 0, name


@linux
@pytest.mark.slow
def test_the_last_save_must_not_fail(results):
    out, found = results
    for name, left in (("last", steps(2, 4)), ("signal", steps(2))):
        assert found[name].status == [1, 1] and found[name].end["reason"] == "save"
        assert "was not saved" in the_error(found[name].errors)
        assert names(out / name) == left and not (out / name / "done").exists()
        assert checkpoint.verify(out / name / left[-1]) > 0
        assert (out / name / "latest").read_text().strip() == left[-1]


@linux
@pytest.mark.slow
def test_one_failed_save_in_the_background_does_not_end_a_run(results):
    out, found = results
    assert found["behind"].status == [0, 0] and names(out / "behind") == steps(4, 6)
    assert "step 2 was not saved" in warnings(found["behind"].output)[0]


@linux
@pytest.mark.slow
def test_a_full_disk(tmpfs, tmp_path):
    """A really full one. The partial checkpoint is removed."""
    argv = changed(ARGV, model="tiny", keep="1")
    (failed,) = run_ranks(2, [Run(argv, params=False, to=str(tmpfs))], tmp_path / "ranks")
    assert failed.status == [1, 1]
    (line,) = warnings(failed.output)
    assert "step 4 was not saved" in line and "[Errno 28] No space left on device" in line
    assert "step 6 was not saved" in the_error(failed.errors)
    assert names(tmpfs) == steps(2) and checkpoint.verify(tmpfs / "step_00000002") > 0


@linux
def test_log_lines_are_kept_until_the_log_can_be_written(tmp_path, capsys):
    """A file size limit for a while: the run continues, and each line is written once, later."""
    log = Log(open(tmp_path / "log.jsonl", "a", encoding="utf-8"))  # noqa: SIM115
    log.write("step", step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        log.write("step", step=2)
        log.write("step", step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write("step", step=4)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "warning: log.jsonl cannot be written now: [Errno 27]" in lines[0]
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]


@linux
def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path, tmpfs, capsys):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    for folder, reason in ((closed / "new", "Permission denied"), (tmpfs / "new", "Read-only")):
        with bound_by_permissions() if folder.parent == closed else contextlib.nullcontext():
            assert train_fsdp.main([*SMALL, "--out", str(folder)]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("train_fsdp.py: error: ") and printed.err.count("\n") == 1
        assert reason in printed.err and str(folder) in printed.err


@linux
def test_consolidate_leaves_no_partial_file(good, tmpfs, capsys):  # noqa: F811
    (tmpfs / "fill").write_bytes(bytes(44 * 2**20 + 900_000))
    assert checkpoint.main(["consolidate", str(good), str(tmpfs / "model.pth")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert [p.name for p in tmpfs.iterdir()] == ["fill"]
