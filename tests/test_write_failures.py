"""Failed saves: a warning or a clean end, no hang, and the older checkpoints load."""

import contextlib
import json
import re
import resource
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


@contextlib.contextmanager
def files_limited(size: int):
    """Let no file of this process grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
    for line, step in zip(warnings(struck.output), (2, 4), strict=True):
        assert re.match(f"warning: step {step} was not saved: .*{sentence}", line), line
    assert struck.status == [1, 1]
    assert re.search(f"error: step 5 was not saved: .*{sentence}", the_error(struck.errors))

    # the older checkpoints load, and the losses are those of a run without failures
    assert resumed.status == [0, 0], resumed.errors
    begin = 5 if fault == "latest" else 3  # `latest` is written last: the checkpoint is there
    assert f"{fault}/step_{begin:08d} at step {begin}" in resumed.output
    assert [(s["step"], s["loss"]) for s in resumed.steps] == expected[:5] + expected[begin:]
    assert names(folder) == (steps(*range(1, 7)) if fault == "latest" else steps(1, 3, 4, 5, 6))
    assert all(checkpoint.verify(folder / name) > 0 for name in names(folder))


@linux
@pytest.mark.slow
def test_one_failed_save_in_the_background_does_not_end_a_run(results):
    out, found = results
    assert found["behind"].status == [0, 0] and names(out / "behind") == steps(4, 6)
    assert "step 2 was not saved" in warnings(found["behind"].output)[0]


@linux
def test_log_lines_are_kept_until_the_log_can_be_written(tmp_path, capsys):
    """A file size limit for a while: the run continues, and each line is written once, later."""
    log = Log(open(tmp_path / "log.jsonl", "a", encoding="utf-8"))  # noqa: SIM115
    with files_limited(10):
        log.write("step", step=1)
    log.write("step", step=2)
    assert "warning: log.jsonl cannot be written now: [Errno 27]" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]


@linux
def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path, capsys):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    with bound_by_permissions():
        assert train_fsdp.main([*SMALL, "--out", str(closed / "new")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("train_fsdp.py: error: ") and printed.err.count("\n") == 1
    assert "Permission denied" in printed.err and str(closed / "new") in printed.err


@linux
def test_consolidate_leaves_no_partial_file(good, tmp_path, capsys):  # noqa: F811
    with files_limited(20_000):
        assert checkpoint.main(["consolidate", str(good), str(tmp_path / "model.pth")]) == 1
    assert "File too large" in capsys.readouterr().err and not list(tmp_path.iterdir())
