"""Failed saves: a warning or a clean end, no hang, and the older checkpoints load."""

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import FULL
from ranks import Result, Run, bound_by_permissions, run_ranks
from test_checkpoint import SMALL, good, names, one_process  # noqa: F401 - fixtures
from test_train import changed

import checkpoint
import train_fsdp
from runtime.log import Log

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
ARGV = changed(SMALL, model="nano", steps="6", keep="9", mode="full_shard")
EIO = r"OSError: \[Errno 5\] Input/output error"

# fault in tests/ranks.py: the rank that it strikes (-1: all), the sentence
ALL_FAULTS = {
    "limit": (1, r"OSError: \[Errno 27\] File too large.* \(rank 1\)"),
    "in the way": (0, r"FileExistsError: .*\(rank 0\)"),
    "permission": (-1, r"PermissionError: \[Errno 13\] .*\(rank 0\)"),
    "read-only": (0, r"OSError: \[Errno 30\] Read-only .*\(rank 0\)"),
    "written": (0, rf"{EIO} \(rank 0\)"),
    "fsync": (1, rf"{EIO} \(rank 1\)"),
    "metadata": (0, rf"{EIO} \(rank 0\)"),
    "rename": (0, rf"{EIO} \(rank 0\)"),
    "latest": (0, rf"{EIO} \(rank 0\)"),
}
EVERYDAY = {"limit", "latest"}  # the others in make test-all only
FAULTS = {fault: how for fault, how in ALL_FAULTS.items() if FULL or fault in EVERYDAY}
LAST = {"limit": 0, "permission": -1} | ({"manifest": 0} if FULL else {})


def can_mount() -> bool:
    """Whether this process may mount a file system."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        mounted = subprocess.run(command, capture_output=True).returncode == 0
        if mounted:
            subprocess.run(["umount", folder], check=True)
        return mounted


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of 45 MB: room for one checkpoint of 27 MB (`tiny`)."""
    if not can_mount():
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=45m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: step")]


def the_error(text: str) -> str:
    """The one error that a run ended with (DCP of some versions warns of PyTorch's own calls)."""
    (error,) = [line for line in text.splitlines() if line.startswith("train_fsdp.py: error: ")]
    assert "Traceback" not in text
    return error


def steps(*numbers: int) -> list[str]:
    return [f"step_{n:08d}" for n in numbers]


@pytest.fixture(scope="module")
def results(once) -> tuple[Path, dict[str, Result]]:
    """(folder with an --out per name, result per name): all runs, in one set of processes."""
    return once("failures", all_results)


def all_results(out: Path) -> tuple[Path, dict[str, Result]]:
    every = changed(ARGV, save_every="1")
    runs = {"uninterrupted": Run(every, params=False)}
    for fault, (rank, _) in FAULTS.items():
        if fault == "read-only" and not can_mount():
            continue
        again = Run(every, params=False, to=str(out / fault))
        runs[fault] = replace(again, fault=fault, fault_rank=rank, fault_saves=(1, 3, 4))
        runs[f"{fault} resumed"] = again
    for fault, rank in LAST.items():
        runs[f"{fault} last"] = Run(
            ARGV, params=False, fault=fault, fault_rank=rank, fault_saves=(2,)
        )
    # the save that a signal asks for is the last one too
    runs["signal"] = replace(runs["limit last"], signal_rank=1, signal_step=2, fault_saves=(1,))
    runs["list"] = Run(ARGV, params=False, fault="list", fault_rank=0, fault_saves=(1,))
    runs = {name: replace(run, to=run.to or str(out / name)) for name, run in runs.items()}
    try:
        found = run_ranks(2, list(runs.values()), out / "ranks", timeout=400)
    finally:  # of a rank that was killed
        subprocess.run(["umount", "--lazy", out / "read-only"], capture_output=True)
    return out, dict(zip(runs, found, strict=True))


@linux
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_failed_saves_keep_the_older_checkpoints_and_end_the_run_cleanly(fault, results):
    """Once: a warning. Twice in a row: all ranks end with 1. The same command then resumes."""
    out, found = results
    if fault not in found:
        pytest.skip("only root can make a folder a read-only file system")
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
        assert line.endswith("; the run continues, the older checkpoints are kept"), line
    assert struck.status == [1, 1]
    assert re.search(f"error: step 5 was not saved: .*{sentence}", the_error(struck.errors))

    # the older checkpoints load, and the losses are those of a run without failures
    assert resumed.status == [0, 0], resumed.errors
    begin = 5 if fault == "latest" else 3  # only `latest` was not written
    assert f"{fault}/step_{begin:08d} at step {begin}" in resumed.output
    assert "warning" not in resumed.output
    assert [(s["step"], s["loss"]) for s in resumed.steps] == expected[:5] + expected[begin:]
    reasons = re.findall(r'"reason": "(\w+)"', (folder / "log.jsonl").read_text())
    assert reasons == ["save", "done"] and (folder / "done").exists()
    # `latest` is written last: the new checkpoint is there
    assert names(folder) == (steps(*range(1, 7)) if fault == "latest" else steps(1, 3, 4, 5, 6))
    for name in names(folder):
        assert checkpoint.verify(folder / name) > 0, name


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f"{fault} last" for fault in LAST), "signal"])
def test_the_last_save_must_not_fail(name, results):
    out, found = results
    folder, result = out / name, found[name]
    assert result.status == [1, 1] and result.end["reason"] == "save"
    assert "was not saved" in the_error(result.errors)
    assert names(folder) == (steps(2) if name == "signal" else steps(2, 4))
    assert not (folder / "done").exists()
    newest = names(folder)[-1]
    assert checkpoint.verify(folder / newest) > 0
    assert (folder / "latest").read_text().strip() == newest


@linux
@pytest.mark.slow
def test_leftovers_that_cannot_be_listed_do_not_fail_a_save(results):
    """Rank 0, which removes them while the others wait, cannot list the folder."""
    out, found = results
    assert found["list"].status == [0, 0] and not warnings(found["list"].output)
    assert names(out / "list") == steps(2, 4, 6)


@linux
@pytest.mark.slow
def test_a_full_disk(tmpfs, tmp_path):
    """A really full one. The partial checkpoint is removed."""
    argv = changed(ARGV, model="tiny", keep="1")
    failed, resumed = run_ranks(
        2,
        [
            Run(argv, params=False, to=str(tmpfs)),
            Run(changed(argv, save_every="100"), params=False, to=str(tmpfs)),
        ],
        tmp_path / "ranks",
    )
    assert failed.status == [1, 1]
    (line,) = warnings(failed.output)
    assert "step 4 was not saved" in line and "[Errno 28] No space left on device" in line
    assert "step 6 was not saved" in the_error(failed.errors)
    assert "step_00000002 at step 2" in resumed.output and resumed.status == [1, 1]
    assert names(tmpfs) == ["step_00000002"]
    assert checkpoint.verify(tmpfs / "step_00000002") > 0


@linux
def test_log_lines_are_kept_until_the_log_can_be_written(tmp_path, capsys):
    """A file size limit for a while: the run continues, and each line is written once, later."""
    log = open_log_alone(tmp_path)
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


def open_log_alone(folder: Path) -> Log:
    return Log(open(folder / "log.jsonl", "a", encoding="utf-8"))


@linux
def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path, tmpfs, capsys):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    for folder, reason in (
        (closed, "Permission denied"),
        (closed / "new", "Permission denied"),
        (tmpfs, "Read-only"),
        (tmpfs / "new", "Read-only"),
    ):
        with bound_by_permissions() if folder != tmpfs else contextlib.nullcontext():
            assert train_fsdp.main([*SMALL, "--out", str(folder)]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("train_fsdp.py: error: ") and printed.err.count("\n") == 1
        assert reason in printed.err and str(folder) in printed.err
    assert not list(Path(closed).iterdir())


@linux
def test_consolidate_leaves_no_partial_file(good, tmpfs, tmp_path, capsys):  # noqa: F811
    """A sentence that names the file; the older file stays."""
    (tmpfs / "model.pth").write_text("old")
    (tmpfs / "model.pth.new").write_text("of a run that was killed")
    (tmpfs / "fill").write_bytes(bytes(44 * 2**20 + 900_000))

    def consolidate(out: Path) -> tuple[int, str]:
        status = checkpoint.main(["consolidate", str(good), str(out)])
        error = capsys.readouterr().err.splitlines()[-1]
        assert "error: " in error and str(out.parent) in error
        return status, error

    status, error = consolidate(tmpfs / "model.pth")
    assert status == 1 and "model.pth was not written: [Errno 28] No space left" in error
    assert sorted(p.name for p in tmpfs.iterdir()) == ["fill", "model.pth"]
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    status, error = consolidate(tmpfs / "model.pth")
    assert status == 1 and "Read-only file system" in error
    assert (tmpfs / "model.pth").read_text() == "old"
    (tmp_path / "file").touch()
    for out in (tmp_path / "none" / "model.pth", tmp_path / "file" / "model.pth"):
        status, error = consolidate(out)
        assert status == 1 and f"{out} was not written: [Errno " in error


def test_a_missing_folder_is_bad_usage(good, tmp_path, capsys):  # noqa: F811
    (tmp_path / "file").touch()
    for argv in (["ls"], ["verify"], ["consolidate"]):
        for name in ("none", "file"):
            more = [str(tmp_path / "model.pth")] if argv == ["consolidate"] else []
            with pytest.raises(SystemExit, match="2"):
                checkpoint.main([*argv, str(tmp_path / name), *more])
            assert f"there is no folder {tmp_path / name}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        checkpoint.main(["consolidate", str(good), str(tmp_path)])
    assert "is a folder: give the file to write" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
