"""What a run leaves behind, however it ends: its weights, `done`, its log, a sentence."""

import itertools
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import names, steps
from conftest import ROOT
from kill import kill
from ranks import Result, Run, run_ranks

import checkpoint
import run as run_module
import train_fsdp

TILES = ROOT / "examples" / "tiles" / "train"
BATCH = 8
ARGV = (
    f"--model tiny --img-size 32 --device cpu --precision fp32 --workers 0 --global-batch {BATCH} "
    "--seed 3 --blr 1e-2 --clip 1 --steps 6 --log-every 1"
).split()
SHARDED = [*ARGV, "--model", "nano", "--mode", "full_shard", "--data", str(TILES)]  # on ranks
NAN = {"poison": "loss", "poison_rank": 1, "poison_steps": (3, 4)}
EIO = "OSError: [Errno 5] Input/output error"


def losses(result: Result) -> list[tuple[int, float]]:
    return [(s["step"], s["loss"]) for s in result.steps]


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: step")]


def the_error(text: str) -> str:
    """The one line of ours on stderr of rank 0."""
    (error,) = [line for line in text.splitlines() if line.startswith("train_fsdp.py: error: ")]
    assert "Traceback" not in text and "gloo" not in text
    return error


@pytest.fixture(scope="module")
def ended(once) -> tuple[Path, dict[str, Result]]:
    """(folder with an --out per name, what came of each run): two ranks, one set of processes."""
    return once("ended", all_endings)


def all_endings(out: Path) -> tuple[Path, dict[str, Result]]:
    broken = out / "broken"
    broken.mkdir()
    for i, tile in enumerate(sorted(TILES.rglob("*.jpg"))[: 5 * BATCH - 1]):
        shutil.copy(tile, broken / f"{i:02d}.jpg")
    (broken / "junk.jpg").write_text("no image")
    (out / "folder" / "done").mkdir(parents=True)
    images = [*SHARDED, "--data", str(broken), "--max-bad"]
    plain, bad = Run(SHARDED, params=False, plain=True), SHARDED
    lost = [*SHARDED, "--log-every", "9"]
    every = [*SHARDED, "--keep", "9", "--save-every", "1"]
    runs = {
        "plain": plain,
        "time": replace(plain, argv=[*lost, "--keep", "9"], due_rank=1),
        "nan": replace(plain, argv=bad, **NAN),
        "nan resumed": replace(plain, argv=bad, to=str(out / "nan")),
        "lost": replace(plain, argv=lost, lost_rank=1, lost_step=3),
        "bad images": replace(plain, argv=[*images, "0"]),
        "folder": plain,
        "limit": replace(plain, argv=every, full_saves=(1, 3, 4)),
    }
    runs = {name: replace(run, to=run.to or str(out / name)) for name, run in runs.items()}
    found = run_ranks(2, list(runs.values()), out / "ranks", timeout=400)
    return out, dict(zip(runs, found, strict=True))


# name: exit status, reason, steps that are on disk, whether `done` is there, the last line
ENDED = {
    "plain": (0, "done", (6,), True, "saved {out}/step_00000006"),
    "time": (0, "done", (1, 2, 3, 4, 5, 6), True, "saved {out}/step_00000006"),
    "nan": (1, "nan", None, False, "saved {out}/step_00000003"),
    "lost": (1, "loader_error", None, False, "saved {out}/step_00000003"),
    "bad images": (1, "bad_images", None, False, "saved {out}/step_0000000"),
    "limit": (1, "save_failed", None, False, "saved {out}/step_00000003"),
}


@pytest.mark.parametrize("name", ENDED)
def test_where_the_weights_are(name, ended):
    out, found = ended
    status, reason, saved, done, line = ENDED[name]
    result, folder = found[name], out / name
    assert result.status == [status, status], result.errors
    # of a run that was resumed afterwards, the end before
    ends = [json.loads(text) for text in (folder / "log.jsonl").read_text().splitlines()]
    assert next(e for e in ends if e["event"] == "end")["reason"] == reason
    if saved is not None:
        assert names(folder) == steps(*saved)
        assert all(checkpoint.verify(folder / step) for step in names(folder))
        assert (folder / "done").exists() == done
    assert result.output.splitlines()[-1].startswith(line.format(out=folder))
    assert not status or the_error(result.errors)


def test_a_run_that_failed_goes_on_as_if_it_had_not(ended):
    """From its last good step, and no step is trained or counted twice."""
    out, found = ended
    whole = losses(found["plain"])
    assert len(whole) == len(set(whole)) == 6
    resumed = found["nan resumed"]
    assert resumed.status == [0, 0] and resumed.start["begin"] == 3
    assert losses(resumed)[-3:] == whole[3:] and (out / "nan" / "done").exists()
    assert f"rank 1: the data loader failed: {EIO}" in the_error(found["lost"].errors)
    # a `done` that cannot be removed is everyone's sentence before the first step
    refused = found["folder"]
    assert refused.status == [1, 1] and not refused.steps and not names(out / "folder")
    assert f"{out}/folder/done" in the_error(refused.errors)


def test_failed_saves_keep_the_older_checkpoints_and_end_the_run_cleanly(ended):
    """Once: a warning. Twice in a row: all ranks end with 1."""
    out, found = ended
    struck, folder = found["limit"], out / "limit"
    # saves 2, 4 and 5 fail: the first two are warnings, the third ends the run
    sentence = r"was not saved: .*File too large"
    for line, step in zip(warnings(struck.output), (2, 4), strict=True):
        assert re.match(f"warning: step {step} {sentence}", line), line
    assert struck.status == [1, 1]
    assert re.search(f"error: step 5 {sentence}", the_error(struck.errors))
    assert all(checkpoint.verify(folder / name) for name in names(folder))
    assert names(folder) == steps(1, 3)


# --- one process


class Clock:
    """In the place of run.py's `time`: a second is over whenever it is asked for a duration."""

    perf_counter = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.seconds = itertools.count()

    def monotonic(self) -> int:
        return next(self.seconds)


def test_saving_by_the_clock(tmp_path, monkeypatch):
    """A clock that runs a second whenever it is asked: 3 s are over in the fourth step."""
    monkeypatch.setattr(run_module, "time", Clock())
    flags = ["--save-every", "0.05m", "--steps", "9", "--keep", "9", "--out", str(tmp_path)]
    assert train_fsdp.main([*ARGV, *flags]) == 0
    assert names(tmp_path) == steps(4, 8, 9)


@pytest.mark.full
def test_nothing_is_lost_whatever_kills_a_run(tmp_path):
    """A handful of the rounds of kill.py, which runs a hundred."""
    assert kill(3, 2878, tmp_path) == []
