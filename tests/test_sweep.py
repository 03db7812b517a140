"""sweep.py: a stand-in that writes a log where only the sweep's own doings are looked at."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT
from ranks import single_environment

import plan
import sweep
import vit

sys.path.insert(0, str(ROOT / "examples" / "published"))
import check

PUBLISHED = ROOT / "examples" / "published"
# A run without torch: counts itself in $RAN, with its process id, and fails in the mode $FAILS.
STAND_IN = """
import json, os, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
mode = flags["--mode"]
with open(os.environ["RAN"], "a") as ran:
    ran.write(f"{mode} {os.getpid()}\\n")
log = open(os.path.join(flags["--out"], "log.jsonl"), "a")
def write(**record):
    print(json.dumps(record), file=log, flush=True)
write(event="start", steps=20, run_mode=flags["--run-mode"], device="cpu")
for step in range(2, 21, 2):
    time.sleep(float(os.environ.get("NAP", "0")))
    write(event="step", step=step, images_per_second=100 + step)
good = mode != os.environ.get("FAILS")
write(event="end", reason="done" if good else "nan", problem="the loss is not finite")
"""


PROGRAM = """
import pathlib, signal, sys, sweep
sweep.TRAIN = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.exit(sweep.main(sys.argv[2:]))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """The file that counts the runs of the stand-in."""
    monkeypatch.setattr(sweep, "TRAIN", written(tmp_path / "stand_in.py", STAND_IN))
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return written(tmp_path / "ran", "")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def states(out: Path) -> list[str]:
    rows = sweep.read_lines(out / "points.jsonl")
    return sorted(sweep.with_state(out, row)["state"] for row in rows)


def plan_points(study, models, layouts, added=(), machine=None):
    points = sweep.study_points(study, models, layouts, "DIR")
    return [sweep.plan_point(*at, [*words, *added], machine) for *at, words in points]


# --- points


def test_the_studies_are_what_the_paper_varied():
    """Counted by hand; every point has a name of its own."""
    options = plan_points("options", ["tiny"], [(1, 1), (8, 8)])
    found = {(r["mode"], r["group"], r["prefetch"], r["limit_all_gathers"]) for r in options}
    assert len(options) == 3 * 3 * 2 == len(found) and {r["fsdp"] for r in options} == {1}
    assert {r["group"] for r in options} == {None, 2, 16}
    scaling = plan_points("scaling", ["tiny"], [(1, 1), (2, 8)])
    at_16 = ("ddp", "no_shard", "shard_grad_op", "full_shard", "hybrid2", "hybrid4", "hybrid8")
    names = [f"tiny-{mode}-2x8-syn" for mode in at_16]
    assert [r["id"] for r in scaling] == ["tiny-ddp-1x1-syn", "tiny-no_shard-1x1-syn", *names]
    inputs = plan_points("io", ["tiny"], [(1, 1), (1, 2)])
    runs = [(r["ranks"], r["run_mode"], "DIR" in r["words"]) for r in inputs]
    kinds = (("real", True), ("syn", False), ("io", True))
    assert runs == [(ranks, *kind) for ranks in (1, 2) for kind in kinds]
    assert len({r["id"] for r in (*options, *scaling, *inputs)}) == 18 + 9 + 6 - 1  # no_shard on 1


def test_equal_runs_are_one_point_and_a_folder_has_one_set_of_flags(tmp_path):
    quick = plan_points("quick", ["tiny"], [(1, 1), (1, 2)])
    rows = sweep.add_points(tmp_path, quick, [])
    assert len(rows) == len({row["id"] for row in quick}) == len(quick) - 2
    assert {*rows[1]["studies"]} == {"io", "scaling"}
    more = plan_points("scaling", ["tiny"], [(1, 4)])
    assert len(sweep.add_points(tmp_path, more, [])) == 5
    for study in ("quick", "scaling"):
        other = plan_points(study, ["tiny"], [(1, 1)], ["--ac", "full"])
        with pytest.raises(ValueError, match="other flags"):
            sweep.add_points(tmp_path, other, ["--ac", "full"])


BAD = (
    *("nothing", "report", "report .", "report . -- --ac full", "io --data no"),
    *("scaling --nodes 2", "quick --nodes 2 --sbatch x", "options --ranks 1", "scaling --ranks x"),
    *("scaling -- --encoder-only", "scaling -- --memory-gib 8", "scaling -- --world-size 64"),
    *("scaling -- --resume=x", "scaling -- --group 2"),
)


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    try:
        status = sweep.main(words.split())
    except SystemExit as left:
        status = left.code
    assert status == 2 and "error: " in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_point_is_planned_as_it_will_run(tmp_path, monkeypatch):
    """On its own number of ranks; reading has no model; a CPU keeps no memory for itself."""
    text = "--model 1b --mode hybrid --group 4 --run-mode syn --ac full"
    words = text.split()
    row = sweep.plan_point("io", (1, 4), words, "frontier")
    _, planned = plan.read_command([*words, "--world-size", "4", "--machine", "frontier"])
    assert row["planned_gib"] == pytest.approx(planned.peak_gib) and row["fit"].startswith("FITS")
    assert row["planned_images_per_second"] > 0
    flops = vit.flops_per_image(vit.MODELS["1b"], 224)  # of a GCD's 191.5 TFLOP/s, on 4 of them
    assert row["mfu_at_one_image_per_second"] == pytest.approx(flops / 4 / 191.5e12)
    monkeypatch.setenv("SLURM_NTASKS", "8")  # of a job around the sweep: not the ranks of a point
    _, environ = sweep.command_of(row | {"ranks": 1}, tmp_path, in_job=False)
    assert "SLURM_NTASKS" not in environ
    reading = sweep.plan_point("io", (1, 1), ["--model", "15b", "--run-mode", "io"], "rtx-4090")
    assert reading["fit"] == "" and "planned_images_per_second" not in reading
    text = "--model tiny --run-mode syn --img-size 64 --precision fp32 --batch"
    words = text.split()
    assert sweep.plan_point("io", (1, 1), [*words, "8"], None)["fit"] == ""
    assert sweep.plan_point("io", (1, 1), [*words, "9999999"], None)["fit"].startswith("NO")


# --- one run


@pytest.mark.parametrize(
    ("code", "end", "output", "late", "state"),
    [
        (1, {"reason": "nan", "problem": "the loss is"}, "", False, "failed"),
        (-15, {}, "", True, "failed"),
        (1, {"reason": "failed", "problem": "out of memory ("}, "", False, "out of memory"),
        (1, {"reason": "failed"}, "rank 3: out of memory (", False, "out of memory"),
        (1, {}, "torch.OutOfMemoryError: HIP out of memory.", True, "out of memory"),
        (1, {}, "slurmstepd: error: Detected 1 oom_kill event", False, "out of memory"),
    ],
)
def test_each_end_is_classified(tmp_path, code, end, output, late, state):
    written(tmp_path / "log.jsonl", json.dumps({"event": "end", **end}))
    written(tmp_path / "output.txt", output)
    assert sweep.read_result(tmp_path, code, late)["state"] == state


# --- a sweep, without training


@pytest.mark.full
def test_the_same_command_continues(tmp_path, stand_in, capsys):
    """After the sweep was ended in its first point of two ranks."""
    out = tmp_path / "out"
    command = ["scaling", "--models", "tiny", "--ranks", "2", "--out", str(out)]
    program = [sys.executable, "-c", PROGRAM, str(sweep.TRAIN), *command]
    running = subprocess.Popen(program, env=single_environment() | {"NAP": "0.2"}, cwd=ROOT)
    deadline = time.monotonic() + 60
    while stand_in.read_text().count("\n") < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sweep.main(command) == 2 and "in use" in capsys.readouterr().err
    running.send_signal(signal.SIGTERM)
    running.wait(60)
    for line in stand_in.read_text().splitlines():  # what it had started has ended too
        assert not Path("/proc", line.split()[1]).exists()
    assert states(out).count("done") == 2
    for _ in range(2):  # the second time nothing is left to run
        assert sweep.main(command) == 0
        assert stand_in.read_text().count("\n") == 12
    rows = sweep.read_lines(out / "results.jsonl")  # 100 + step, over the steps 6, 8, ... 20
    assert {row["images_per_second"] for row in rows} == {113} and (out / "report.md").exists()


def test_what_fails_or_cannot_fit_runs_when_asked(tmp_path, stand_in, monkeypatch, capsys):
    out = tmp_path / "out"
    command = ["scaling", "--models", "tiny,15b", "--ranks", "1", "--machine", "frontier"]
    command += ["--out", str(out)]
    monkeypatch.setenv("FAILS", "no_shard")
    for _ in range(2):  # the second time nothing is run
        assert sweep.main(command) == 1
        said = capsys.readouterr().out
        assert "the loss is not finite" in said
        assert re.search(r"skipped +15b-no_shard\S+ +plan.py: NO: \d+\.\d GiB at .* of 64", said)
        assert states(out) == ["done", "failed", "skipped", "skipped"]
    assert stand_in.read_text().count("\n") == 2
    monkeypatch.setenv("NAP", "60")
    assert sweep.main([*command, "--retry", "--limit", "2"]) == 1
    assert "longer than --limit" in capsys.readouterr().out
    assert stand_in.read_text().count("\n") == 3


# --- what limits a run


def row(run: str, rate: float, world: int = 8, **more: object) -> sweep.Row:
    """Of a local batch of 10: a step takes 10 world / rate seconds."""
    known = {"id": run, "studies": ["io"], "state": "done", "run_mode": run, "world_size": world}
    known |= {"nodes": 1, "mode": "full_shard", "batch": 10, "images_per_second": rate}
    return known | {"model": "base", "group": None} | more


ALONE = row("syn", 10, 1, mode="no_shard")  # 1 s of compute


@pytest.mark.parametrize(
    ("rows", "word", "parts"),
    [  # seconds of a step: compute, communication, input
        ([row("real", 40), row("syn", 80), row("io", 41), ALONE], "input", (1, 0, 1)),
        ([row("real", 50), row("syn", 80), row("io", 52), ALONE], "input", (1, 0, 0.6)),
        ([row("real", 16), row("syn", 20), row("io", 90), ALONE], "communication", (1, 3, 1)),
        ([row("real", 64), row("syn", 66), row("io", 90), ALONE], "compute", None),
        ([row("syn", 20), ALONE], "communication", (1, 3, 0)),
        ([row("io", 20)], "unknown", None),
        ([row("syn", 5, 1)], "compute", (2, 0, 0)),
        ([row("real", 5, 1), row("syn", 10, 1), row("io", 7, 1)], "input", (1, 0, 1)),
        ([row("syn", 20), row("syn", 20, 2)], "communication", (1, 3, 0)),
        ([row("syn", 80, alloc_retries=3), ALONE], "memory", None),
        ([row("syn", 0, state="out of memory", reason="x"), ALONE], "memory", None),
        # one of them was disturbed: real 0.29 s, syn 0.91; real below reading alone
        ([row("real", 276), row("syn", 88), row("io", 900), ALONE], "unknown", None),
        ([row("real", 60), row("syn", 70), row("io", 40), ALONE], "unknown", None),
    ],
)
def test_limits_by_hand(rows, word, parts):
    rows = [dict(row) for row in rows]
    sweep.add_shares(rows)
    found, *_ = sweep.find_bottlenecks(rows)
    assert found["limit"] == word and found["reason"]
    if parts:
        shares = [found[cause] for cause in ("compute", "communication", "input")]
        assert shares == pytest.approx([part / sum(parts) for part in parts])


# --- the page


def test_the_page_of_the_published_runs(tmp_path):
    """Their curves are nearly ideal where shards stay near; what may not be compared says so."""
    assert sweep.main(["report", str(PUBLISHED), "--out", str(tmp_path)]) == 0
    every = sweep.read_lines(tmp_path / "results.jsonl")
    rows, page = {row["id"]: row for row in every}, (tmp_path / "report.md").read_text()
    assert min(rows[f"3b-hybrid1-{2**n}"]["efficiency"] for n in range(3, 11)) > 0.94
    for model in ("base", "1b", "3b"):
        assert rows[f"{model}-full_shard-16"]["efficiency"] > 0.95
        assert rows[f"{model}-full_shard-1024"]["efficiency"] < 0.4
    for cell in check.cells("images_per_second", "img/s", "images_per_second"):  # today's plan
        if cell["nodes"] in (1, 128):
            known = rows[cell["id"]]["planned_images_per_second"]
            assert known == pytest.approx(cell["planned"], rel=0.02)
    doubted = {row["id"] for row in every if row.get("caveat")}
    assert {name.split("-")[1] for name in doubted} == {"ddp", "hybrid1"}
    limited = [limit["id"] for limit in sweep.find_bottlenecks(every)]
    assert limited and not doubted.intersection(" ".join(limited).split())
    assert all(name in page for name in rows)
    for link in re.findall(r"\]\((?!http)(.*?)\)", page):
        assert (tmp_path / link).exists(), link


# --- Slurm, pretended: sbatch runs its script at once, srun is the stand-in

SBATCH = """#!/bin/bash
while [ "$1" != -N ]; do shift; done
SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=$2 SLURM_CPUS_ON_NODE=8 SLURM_SUBMIT_DIR=. bash
echo "Submitted batch job 1"
"""
SRUN = """#!/bin/bash
while [ "$1" != train_fsdp.py ]; do shift; done
shift
exec %s %s "$@"
"""


@pytest.mark.full
def test_a_job_for_each_number_of_nodes_runs_its_points(tmp_path, stand_in, monkeypatch, capsys):
    """Through launch_frontier.sh; what failed runs again when asked, and nothing else does."""
    programs = tmp_path / "programs"
    programs.mkdir()
    stand = SRUN % (sys.executable, tmp_path / "stand_in.py")
    for name, text in (("sbatch", SBATCH), ("srun", stand)):
        written(programs / name, text).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("MACHINE", "slurm")
    monkeypatch.setenv("FAILS", "shard_grad_op")
    flags = ["--models", "tiny", "--nodes", "1,2", "--ranks", "2", "--out", str(tmp_path / "out")]
    command = ["scaling", *flags, "--sbatch", "-p batch"]
    assert sweep.main(command) == 0
    said = capsys.readouterr().out
    assert re.findall(r"job \d+: (\d+) points on (\d) nodes", said) == [("6", "1"), ("5", "2")]
    assert sorted(Counter(states(tmp_path / "out")).items()) == [("done", 9), ("failed", 2)]
    monkeypatch.delenv("FAILS")
    for more, in_all in ([], 11), (["--retry"], 13):
        assert sweep.main([*command, *more]) == 0
        assert stand_in.read_text().count("\n") == in_all
    assert states(tmp_path / "out") == ["done"] * 11
