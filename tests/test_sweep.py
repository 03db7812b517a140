"""sweep.py and what belongs to it. Real runs of train_fsdp.py where it matters what a run does;
a stand-in that writes a log where only the sweep's own doings are looked at."""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import slow
from conftest import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from ranks import environment, on_ranks

import sweep
import vit
from planner import estimate
from planner.command import plan_parser
from planner.traffic import PlannedRun
from runtime import config
from runtime.run import batch_sizes
from sweeps import attempts, bottleneck, drawing, figures, ladder, results, studies

PUBLISHED = ROOT / "examples" / "published"
ALONE_EACH = "hybrid 1 (gradients probably not reduced)"
# A run without torch: counts itself in $RAN, then does what --seed orders.
STAND_IN = """
import json, os, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
seed, out = int(flags.get("--seed", 0)), flags["--out"]
with open(os.environ["RAN"], "a") as ran:
    ran.write(f"{seed}\\n")
log = open(os.path.join(out, "log.jsonl"), "a")
def write(**record):
    log.write(json.dumps(record) + "\\n")
    log.flush()
write(event="start", steps=20, model=flags["--model"], run_mode=flags.get("--run-mode", "real"),
      host=os.environ.get("HOST_NAME", "here"),
      versions={"torch": "9.9"}, batch=32, accum=1, mode=flags.get("--mode", "hybrid"),
      world_size=1, device="cpu")
for step in range(2, 21, 2):
    time.sleep(float(os.environ.get("NAP", "0")))
    rate = float(os.environ.get("BASE", "100")) + step + seed
    write(event="step", step=step, images_per_second=rate, step_seconds=0.1, data_seconds=0.0,
          peak_allocated_gib=1.0 + seed)
write(event="end", reason="done", problem=None, steps=20)
"""


def environ(**more: str) -> dict[str, str]:
    """Of a process that is no rank."""
    env = environment(0, 1, 0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del env[name]
    return env | more


def start(*words: object, **more: str) -> subprocess.Popen:
    """sweep.py as a process."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "sweep.py"), *map(str, words)],
        env=environ(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def finish(process: subprocess.Popen, status: int = 0, seconds: float = 300) -> str:
    text = process.communicate(timeout=seconds)[0]
    assert process.returncode == status, text
    return text


def here(*words: object, status: int = 0) -> str:
    """sweep.py in this process; its output."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert sweep.main([str(word) for word in words]) == status, said.getvalue()
    return said.getvalue()


def table(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """(its flags for sweep.py, the file that counts its runs)."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    ran = tmp_path / "ran"
    ran.touch()
    return ["--script", tmp_path / "stand_in.py"], ran


def rows_of(out: Path) -> list[results.Row]:
    return results.read_folder(out)


# --- points


def test_the_studies_are_what_the_paper_varied():
    """Counted by hand; every flag is one of train_fsdp.py, and the plans are those of plan.py."""
    options = studies.with_ids(list(studies.options_points(["5b"], [(8, 8)])), {})
    assert {(p["mode"], p.get("group")) for p in options} == {
        ("full_shard", None),
        ("hybrid", "2"),
        ("hybrid", "16"),
    }
    assert len(options) == 3 * 3 * 2
    scaling = studies.with_ids(
        list(studies.scaling_points(["base", "15b"], [(1, 1), (1, 8), (2, 8)])), {}
    )
    at_16 = {(p["mode"], p.get("group")) for p in scaling if p["nodes"] == "2"}
    groups = {("hybrid", "2"), ("hybrid", "4"), ("hybrid", "8")}
    assert at_16 == groups | {
        (mode, None) for mode in ("ddp", "no_shard", "shard_grad_op", "full_shard")
    }
    inputs = studies.with_ids(list(studies.io_points(["base"], [(1, 1), (1, 2)], "DIR")), {})
    assert [(p["ranks"], p["run_mode"]) for p in inputs] == [
        ("1", "syn"),
        ("1", "syn"),
        ("2", "real"),
        ("2", "syn"),
        ("2", "io"),
    ]
    quick = studies.with_ids(list(studies.quick_points(0, 4, None, "DIR")), {})
    shared = [p for p in quick if len(p["study"].split()) > 1]
    assert {p["ranks"] for p in quick} == {"1", "2", "4"} and shared  # one run serves two studies

    for points in (options, scaling, inputs, quick):
        assert len({p["id"] for p in points}) == len(points)
        for point in points:
            world_size = str(int(point["nodes"]) * int(point["ranks"]))
            plan_parser().parse_args([*studies.flags_from_cells(point), "--world-size", world_size])
    too_large = [p for p in scaling if p["model"] == "15b" and p["mode"] == "no_shard"]
    assert too_large
    assert studies.plan_point(too_large[0], "frontier", None)["verdict"] == "NO"
    point = next(p for p in scaling if p["model"] == "15b" and p.get("group") == "8")
    same = estimate.Plan(PlannedRun(vit.MODELS["15b"], "hybrid", 16, 32, 224, 0.75, group=8))
    found = studies.plan_point(point, "frontier", None)
    assert found["planned_gib"] == same.peak_gib
    assert found["planned_images_per_second"] == same.images_per_second


def test_flags_become_cells_and_cells_flags():
    words = ["--img-size", "32", "--compile", "--no-norm-pix-loss", "--blr=8e-3"]
    cells = studies.cells_from_flags(words)
    assert cells == {"img_size": "32", "compile": "true", "norm_pix_loss": "false", "blr": "8e-3"}
    assert studies.flags_from_cells(
        cells | {"nodes": "1", "ranks": "2", "study": "x", "mode": ""}
    ) == ["--img-size", "32", "--compile", "--no-norm-pix-loss", "--blr", "8e-3"]


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        ("ranks,model\n,tiny\n", [], "line 2: ranks is '', but must be a whole number above zero"),
        ("nodes,ranks\n0,1\n", [], "line 2: nodes is '0', but must be"),
        ("ranks,model\n", [], "has no points"),
        ("ranks,out\n1,here\n", [], "--out is set by the sweep"),
        ("ranks,group,mode\n1,2,ddp\n", [], "--group is for --mode hybrid and hybrid_grad_op"),
        ("ranks,group\n4,3\n", [], "4 ranks cannot be split into shard groups of 3: use 1, 2, 4"),
        ("ranks,colour\n1,red\n", [], "unrecognized arguments: --colour"),
        ("ranks\n1\n", ["--", "red"], "red after -- is not a flag of train_fsdp.py"),
        ("nodes,ranks\n2,1\n", [], "needs 2 nodes: add --sbatch"),
    ],
)
def test_bad_tables_are_refused_in_a_sentence(tmp_path, capsys, text, words, sentence):
    path = table(tmp_path / "mine.csv", text)
    with pytest.raises(SystemExit) as left:
        sweep.main([str(word) for word in (path, "--out", tmp_path / "out", *words)])
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith("sweep.py: error: ") and sentence in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.glob("out/runs/*/1"))  # nothing was run


def test_other_bad_input(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, sentence in (
        (["nothing"], "there is no study nothing"),
        ([tmp_path / "no.csv"], "no.csv cannot be read: No such file"),
        (["figures"], "which sweep? name its folder"),
        (["status"], "which sweep? name its folder"),
        (["point"], "which point? name the folder"),
        (["point", tmp_path], "which point? name the folder"),
        (["point", tmp_path, "x"], "has no point x"),
        (["quick", tmp_path], "quick takes no folder"),
        (["quick", "--models", ","], "--models ',' is not a list of names"),
        (["quick", "--models", "tiny,,base"], "is not a list of names"),
        (["quick", "--ranks", "0"], "--ranks: '0' is not a whole number from 1 to"),
        (["quick", "--ranks", "9" * 99], "--ranks"),
        (["quick", "--limit", "0"], "--limit: '0' is not a number from 1 to"),
        (["quick", "--limit", "nan"], "--limit: 'nan' is not a number"),
        (["quick", "--memory-gib", "-1"], "--memory-gib"),
        (["scaling", "--sbatch", "", "--nodes", "0"], "--nodes: '0' is not a whole number"),
        (["io", "--data", tmp_path / "no"], "is not a folder with images"),
        (["io", "--data", empty], "is not a folder with images"),
        (["quick", "--data", ""], "--data '' is not a folder with images"),
        (["status", tmp_path], "it has no points.csv"),
        (["figures", tmp_path], "has no results.csv: give the --out of a sweep"),
        (["quick", "--script", tmp_path / "no.py"], "no.py not found"),
        (["scaling", "--nodes", "2"], "--nodes needs Slurm, this is one node"),
        ([ROOT / "x.csv", "--ranks", "2"], "--ranks applies to the built-in studies"),
        (["scaling", "--nodes", "1,x"], "'x' is not a whole number from 1 to"),
    ):
        with pytest.raises(SystemExit) as left:
            sweep.main([str(word) for word in words])
        said = capsys.readouterr().err
        assert left.value.code == 2 and sentence in said and len(said.splitlines()) == 1


def test_psutil_is_asked_for_only_where_runs_are_started(tmp_path, stand_in, monkeypatch, capsys):
    points = table(tmp_path / "mine.csv", "ranks,model\n1,tiny\n")
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(SystemExit):
        sweep.main([str(word) for word in (points, "--out", tmp_path / "out", *stand_in[0])])
    assert "python -m pip install psutil" in capsys.readouterr().err
    assert not list((tmp_path / "out/runs").glob("*/*1")) and not stand_in[1].read_text()
    assert "1 waiting" in here("status", tmp_path / "out")


@pytest.mark.full
def test_matplotlib_is_asked_for_only_where_it_draws(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    env = environ()
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "sweep.py", "figures", "examples/published"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "python -m pip install matplotlib" in done.stderr
    (tmp_path / "psutil.py").write_text("raise ModuleNotFoundError(name='psutil')")
    (tmp_path / "points.csv").write_text("id,study,nodes,ranks\n")
    done = subprocess.run([sys.executable, "sweep.py", "status", tmp_path], cwd=ROOT, env=env)
    assert done.returncode == 0


# --- logs


def test_medians_and_quartiles_are_those_of_numpy_after_the_warm_up():
    rates = [7.0, 50, 10, 12, 11, 15, 13, 14, 19, 18]
    steps = [
        {"step": 2 * i + 2, "images_per_second": r, "peak_allocated_gib": i / 2}
        for i, r in enumerate(rates)
    ]
    row = results.measured(attempts.RunLog(start={"steps": 20}, steps=steps))
    kept = rates[2:]  # of 20 steps, those above 5: the lines of step 6, 8, ...
    assert row["measured_lines"] == 8
    assert row["images_per_second"] == np.median(kept) == statistics.median(kept)
    assert row["images_per_second_q1"] == np.percentile(kept, 25)
    assert row["images_per_second_q3"] == np.percentile(kept, 75)
    assert row["peak_allocated_gib"] == 4.5
    alone = results.measured(attempts.RunLog(start={"steps": 4}, steps=steps[:2]))
    assert alone["images_per_second"] == alone["images_per_second_q1"] == 50


def test_a_log_cut_at_any_byte_can_be_read(tmp_path):
    lines = ['{"event": "start", "steps": 4}'] + [
        f'{{"event": "step", "step": {i}, "images_per_second": {i}.5}}' for i in range(4)
    ]
    whole = "\n".join(lines) + "\n"
    path = tmp_path / "log.jsonl"
    for length in range(len(whole)):
        path.write_text(whole[:length])
        log = attempts.read_log(path)
        complete = sum(whole[:length].startswith("\n".join(lines[: n + 1])) for n in range(5))
        assert len(log.steps) == max(0, complete - 1)
        assert (log.broken_line is None) == (
            whole[:length].rstrip("\n") in {"\n".join(lines[:n]) for n in range(6)}
        )


def test_a_profile_in_the_log_decides(tmp_path):
    """As train_fsdp.py --profile writes it, seconds of a step."""
    made = attempts.claim(tmp_path / "id", 1, job=None)
    assert made
    shares = dict(zip(results.PROFILE, (1.0, 4.0, 0.5, 0.0, 0.5), strict=True))
    records = [
        {"event": "start", "steps": 8, "batch": 10, "accum": 1, "mode": "full_shard"},
        {"event": "profile", "steps": 3, "ranks": [0], **shares, "shares": {"data": 0.0}},
        *({"event": "step", "step": s, "images_per_second": 10} for s in (2, 4, 6, 8)),
        {"event": "end", "reason": "done"},
    ]
    (made / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert attempts.finalize(made, 0)["state"] == "done"
    point = {"id": "id", "study": "mine", "nodes": "1", "ranks": "2", "run_mode": "syn"}
    found = results.make_row(point, tmp_path / "id", "done", {})
    assert found["profile_communication"] == 4 and found["images_per_second"] == 10
    limit = bottleneck.find_bottlenecks([found])[0]
    assert limit and (limit.limit, limit.compute, limit.why) == ("communication", 2, "its profile")


@pytest.mark.parametrize(
    ("code", "end", "output", "late", "killed", "state"),
    [
        (0, {"reason": "done"}, "", "", False, "done"),
        (1, {"reason": "nan", "problem": "the loss is"}, "", "", False, "failed"),
        (1, {"reason": "timeout", "problem": "no progress"}, "", "", False, "timed out"),
        (-9, {}, "", "ran longer than", False, "timed out"),
        (1, {"reason": "memory", "problem": "out of memory ("}, "", "", False, "out of memory"),
        (1, {"reason": "timeout"}, "rank 3: out of memory (", "", False, "out of memory"),
        (1, {}, "torch.OutOfMemoryError: HIP out of memory.", "", False, "out of memory"),
        (1, {}, "slurmstepd: error: Detected 1 oom_kill event", "", False, "out of memory"),
        (1, {}, "Signal 9 (SIGKILL) received by PID 7", "", True, "out of memory"),
        (-9, {}, "", "", False, "failed"),
        (2, {}, "train_fsdp.py: error: no", "", False, "failed"),
        (None, {}, "", "", False, "interrupted"),
        (0, {"reason": "signal"}, "", "", False, "interrupted"),
        (None, {"reason": "done"}, "", "", False, "done"),
    ],
)
def test_each_end_is_classified(code, end, output, late, killed, state):
    assert attempts.classify(code, attempts.RunLog(end=end), output, late, killed)[0] == state


def test_a_point_of_which_little_is_known_has_a_row_and_is_drawn(tmp_path):
    """A table may leave flags out, a run may end before its log begins."""
    point = {"id": "one", "study": "mine", "nodes": "1", "ranks": "2"}
    plans = {"planned_gib": 3.0, "memory_gib": 64.0, "why_not": "no"}
    rows = [
        results.make_row(point, tmp_path, state, plans) | {"source": "mine"}
        for state in ("waiting", "skipped", "failed")
    ]
    for ranks, row in (
        ("2", rows[0]),
        ("1", results.make_row(point | {"ranks": "1"}, tmp_path, "waiting", plans)),
    ):
        given = vars(config.parse(["--dry-run", "--world-size", ranks]))
        assert all(row[name] == given[name] for name in ("model", "mode", "accum", "run_mode"))
    assert rows[0]["batch"] == batch_sizes(1, 1, None, None)[0]
    results.write_table(tmp_path / "results.csv", rows, results.COLUMNS)
    again = results.read_folder(tmp_path)
    assert [p.name for p in figures.draw(again, tmp_path / "figures")] == ["memory"]
    assert [v and v.limit for v in bottleneck.find_bottlenecks(again)] == [None, "memory", None]


# --- running, without training


def test_of_many_only_one_claims_an_attempt(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        claims = list(pool.map(lambda _: attempts.claim(tmp_path, 1, job=None), range(64)))
    assert len([c for c in claims if c]) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert attempts.point_state(tmp_path, lambda job: False) == ("running", 1)


def wait_for_runs(count: int, ran: Path, process: subprocess.Popen) -> None:
    """Wait until the stand-in was started `count` times."""
    deadline = time.monotonic() + 300
    while ran.read_text().count("\n") < count:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


def test_killed_and_restarted_no_point_is_lost_or_run_twice_at_once(tmp_path, stand_in):
    script, ran = stand_in
    rows = "".join(f"1,tiny,{seed}\n" for seed in range(4))
    points = table(tmp_path / "mine.csv", "ranks,model,seed\n" + rows)
    command = [points, "--out", tmp_path / "out", *script]
    first = start(*command, RAN=str(ran), NAP="3")
    wait_for_runs(1, ran, first)
    first.kill()  # its run continues
    first.wait()
    (attempt,) = (tmp_path / "out/runs").glob("*-*/1")
    assert attempts.point_state(attempt.parent, lambda job: False) == ("orphaned", 1)
    assert "1 orphaned" in here("status", tmp_path / "out")
    orphan = attempts.read_state(attempt)["child"]
    assert attempts.is_alive(orphan)

    second = start(*command, RAN=str(ran), NAP="0.1")
    wait_for_runs(3, ran, second)  # seed 0 again, then seed 1
    assert not attempts.is_alive(orphan)
    again = attempts.read_state(attempt.with_name("2"))
    assert attempts.read_state(attempt)["ended"] < again["started"]  # never both at once
    second.send_signal(signal.SIGINT)  # ends what it has started, and says how to continue
    said = finish(second, status=130)
    assert "the same command runs what is missing" in said and "Traceback" not in said
    states = [attempts.read_state(p) for p in (tmp_path / "out/runs").glob("*-*/[0-9]*")]
    assert sorted(s["state"] for s in states) == ["done", "interrupted", "interrupted"]
    assert not any(attempts.is_alive(s["child"]) for s in states)

    here(*command)
    assert sorted(ran.read_text().split()) == ["0", "0", "1", "1", "2", "3"]
    rows = rows_of(tmp_path / "out")
    assert [r["state"] for r in rows] == ["done"] * 4
    # 100 + step + seed, over the steps 6, 8, ... 20: in the middle 113
    assert sorted(r["images_per_second"] for r in rows) == [113, 114, 115, 116]
    before = ran.read_text()
    here(*command, "--retry")
    assert ran.read_text() == before
    assert (tmp_path / "out" / "report.md").exists()


def test_what_cannot_fit_is_skipped_without_try(tmp_path, stand_in):
    script, _ = stand_in
    points = table(tmp_path / "mine.csv", "ranks,model,mode\n1,15b,no_shard\n1,tiny,no_shard\n")
    command = [points, "--out", tmp_path / "out", "--memory-gib", "64", *script]
    said = here(*command)
    assert re.search(r"skipped 15b-no_shard\S+: plan.py: \d+\.\d GiB \+ .* of 64.0", said)
    rows = {r["model"]: r for r in rows_of(tmp_path / "out")}
    assert rows["15b"]["state"] == "skipped" and rows["15b"]["planned_gib"] > 64
    assert rows["tiny"]["state"] == "done" and rows["tiny"]["memory_gib"] == 64
    here(*command, "--try")
    assert [r["state"] for r in rows_of(tmp_path / "out")] == ["done", "done"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a finished sweep of one point, and the point's id."""
    folder = tmp_path_factory.mktemp("swept")
    script, out = table(folder / "stand_in.py", STAND_IN), folder / "out"
    points = table(folder / "mine.csv", "ranks,model,run_mode\n1,tiny,syn\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAN", str(folder / "ran"))
        here(points, "--out", out, "--script", script)
    return out, rows_of(out)[0]["id"]


def test_tables_cut_anywhere_are_refused_or_read_and_stay_as_they_are(swept, tmp_path):
    whole = (swept[0] / "results.csv").read_bytes()
    path = tmp_path / "results.csv"
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        refused = whole.index(b"\n") + 1 < length <= whole.rindex(b",")  # in the row
        with (
            pytest.raises(ValueError, match="csv, line 2 is damaged")
            if refused
            else (contextlib.nullcontext())
        ):
            bottleneck.find_bottlenecks(results.read_folder(tmp_path))
        assert path.read_bytes() == whole[:length]


@pytest.mark.parametrize(
    ("name", "fault", "sentence"),
    [
        ("results.csv", b"\xff\x00junk,,,\n", "line 1 is damaged"),
        ("results.csv", b"id,study\nx,y,z\n", "line 2 is damaged, it has 3 cells"),
        ("results.csv", b"id,study\nx,y\n", "line 2 is damaged, state is missing"),
        ("results.csv", "fifo", "is not a regular file"),
        ("results.csv", "folder", "is not a regular file"),
        ("points.csv", "fifo", "is not a regular file"),
        ("points.csv", b"id,study,nodes,ranks\nx,y\n", "line 2 is damaged"),
        ("runs/ID/plan.json", b"{", "plan.json is damaged"),
        ("runs/ID/1/state.json", b"null", "state.json is damaged"),
        ("runs/ID/1/state.json", "fifo", "is not a regular file"),
        ("runs/ID/1/log.jsonl", "fifo", "is not a regular file"),
    ],
)
def test_a_damaged_folder_is_refused_and_not_changed(
    swept, tmp_path, capsys, name, fault, sentence
):
    out = shutil.copytree(swept[0], tmp_path / "out")
    path = out / name.replace("ID", swept[1])
    before = path.read_bytes()
    path.unlink()
    if fault == "fifo":
        os.mkfifo(path)
    elif fault == "folder":
        path.mkdir()
    else:
        path.write_bytes(fault)
    with pytest.raises(SystemExit) as left:
        sweep.main(["report", str(out)])
    said = capsys.readouterr().err
    assert left.value.code == 2 and sentence in said and len(said.splitlines()) == 1
    kept = path.is_fifo() or path.is_dir() or path.read_bytes() == fault
    assert kept and (out / "runs" / swept[1] / "1").exists()
    path.rmdir() if path.is_dir() else path.unlink()
    if name == "results.csv":  # as the sentence says: it is written anew
        here("status", out)
        assert path.read_bytes() == before


def test_a_report_on_several_folders_leaves_theirs(swept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [shutil.copytree(swept[0], tmp_path / f"sweep_{name}") for name in ("a", "b")]
    before = {p: p.read_bytes() for f in folders for p in f.rglob("*") if p.is_file()}
    here("report", *folders)
    assert (tmp_path / "sweep_a_and_b" / "report.md").exists()
    assert {p: p.read_bytes() for f in folders for p in f.rglob("*") if p.is_file()} == before


@pytest.mark.full
def test_a_full_disk_ends_a_sweep_with_a_sentence_and_loses_nothing(tmp_path, stand_in):
    script, ran = stand_in
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a full disk needs root and mount")
    try:
        points = table(tmp_path / "mine.csv", "ranks,model,seed\n1,tiny,0\n1,tiny,1\n1,tiny,2\n")
        command = [points, "--out", disk / "out", *script]
        running = start(*command, RAN=str(ran), NAP="0.3")
        wait_for_runs(2, ran, running)
        filler = disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        said = finish(running, status=1)
        assert "No space left on device" in said.splitlines()[-1] and "Traceback" not in said
        assert str(disk / "out") in said.splitlines()[-1]
        filler.unlink()
        here(*command, "--retry")
        assert [r["state"] for r in rows_of(disk / "out")] == ["done"] * 3
        assert ran.read_text().split().count("0") == 1  # what was done stays done
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_results_of_other_machines_are_appended_and_stay(tmp_path, stand_in, monkeypatch):
    script, _ = stand_in
    points = table(tmp_path / "mine.csv", "ranks,model,run_mode\n1,tiny,syn\n")
    for name, base in (("here", "100"), ("there", "200")):  # the same point, so the same id
        monkeypatch.setenv("HOST_NAME", name)
        monkeypatch.setenv("BASE", base)
        here(points, "--out", tmp_path / name / "sweep", *script)
        time.sleep(1.0 if name == "here" else 0)  # runs differ in their second
    mine, other = tmp_path / "here" / "sweep", tmp_path / "there" / "sweep"
    with open(mine / "results.csv", "a") as file:
        file.write((other / "results.csv").read_text())  # its head line, too
    for command in ("status", "report"):
        here(command, mine)
        rows = rows_of(mine)
        assert [r["images_per_second"] for r in rows] == [113, 213]
        assert [r["source"] for r in rows] == ["sweep", "there"] and rows[0]["id"] == rows[1]["id"]
        found = bottleneck.find_bottlenecks(rows)  # one rank sends nothing
        assert [f and (f.limit, f.communication) for f in found] == [("compute", None)] * 2
        assert sorted(rate for rate, _ in bottleneck.ideal_rates(rows).values()) == [113, 213]
    with open(mine / "results.csv") as file:
        assert file.read().count("tiny-hybrid") == 4  # in id and log of two rows

    (mine / "results.csv").unlink()
    here("figures", mine, other, "--out", tmp_path / "both")
    with open(tmp_path / "both" / "figures" / "throughput.csv") as file:
        drawn = [row for row in csv.DictReader(file) if "planned" not in row["series"]]
    assert {row["series"]: row["y"] for row in drawn} == {
        f"tiny: hybrid ({mine})": "113",
        f"tiny: hybrid ({other})": "213",
    }
    for line, folder in zip(drawn, (mine, other), strict=True):  # a point leads to its run
        log = folder / "runs" / rows[0]["id"] / "1" / "log.jsonl"
        assert line["id"] == rows[0]["id"] and (tmp_path / "both" / line["log"]).samefile(log)


# --- running, with training


@pytest.mark.full
def test_a_point_of_two_ranks_runs_under_torchrun(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    points = table(tmp_path / "mine.csv", "ranks,model,mode,run\n2,tiny,full_shard,syn\n")
    flags = "--img-size 32 --batch 2 --steps 9 --log-every 1 --device cpu --precision fp32"
    here(points, "--out", tmp_path / "out", "--", *flags.split(), "--profile", "1")
    (found,) = rows_of(tmp_path / "out")
    assert (found["state"], found["world_size"], found["mode"]) == ("done", 2, "full_shard")
    assert found["images_per_second"] > 0 and found["payload_mb"] > 0


POINTS = "ranks,steps,log_every,model,seed,batch\n" + "".join(
    f"1,12,2,{model},{seed},{batch}\n"
    for seed, (model, batch) in enumerate([("tiny", 4)] * 4 + [("base", 256)])
)
SMALL = ["--img-size", "32", "--device", "cpu", "--precision", "fp32", "--workers", "0"]
# Really so: what --seed orders happens inside the run.
TROUBLE = f"""
import os, resource, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
import data, train_fsdp
from runtime import log
seed, calls = sys.argv[sys.argv.index("--seed") + 1], []
normalize, write = data.normalize, log.Log.write
def disturbed(images, stats):
    calls.append(1)
    if seed == "1" and len(calls) == 7:
        time.sleep(1000)  # hangs
    return normalize(images, stats) * (float("nan") if seed == "3" and len(calls) > 7 else 1)
def cut(self, event, **record):
    if seed == "2" and record.get("step") == 8:
        self.file.write('{{"event": "step", "step": 8, "lo')
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, event, **record)
data.normalize, log.Log.write = disturbed, cut
if seed == "4":  # 1 GiB more than there is by now, as on a device that is full
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))
sys.argv[0] = "train_fsdp.py"
raise SystemExit(train_fsdp.main())
"""


@pytest.mark.full
@pytest.mark.slow
def test_each_trouble_is_recorded_as_what_it_is(tmp_path):
    script = table(tmp_path / "trouble.py", TROUBLE)
    points = table(tmp_path / "mine.csv", POINTS)
    out = tmp_path / "out"
    said = finish(
        start(
            points, "--out", out, "--script", script, "--limit", 30, "--", "--run", "syn", *SMALL
        ),
        status=1,
    )
    with open(out / "points.csv") as file:
        seeds = {row["id"]: row["seed"] for row in csv.DictReader(file)}
    rows = {seeds[row["id"]]: row for row in rows_of(out)}
    assert {s: r["state"] for s, r in rows.items()} == {
        "0": "done",
        "1": "timed out",
        "2": "failed",
        "3": "failed",
        "4": "out of memory",
    }, said
    assert "its limit of 30 s, after step 6" in rows["1"]["reason"]
    assert "log.jsonl breaks off in line 5, after step 6; exit status -9" in rows["2"]["reason"]
    assert "the loss is not finite at step 8" in rows["3"]["reason"]
    assert "can't allocate memory" in rows["4"]["reason"]
    assert rows["0"]["images_per_second"] > 0 and rows["0"]["world_size"] == 1
    assert all(rows[s]["images_per_second"] is None for s in "1234")
    report = (out / "report.md").read_text()
    assert "1 done, 1 timed out, 2 failed, 1 out of memory." in report
    assert all(row["id"] in report for row in rows.values())
    assert {p.stem for p in (out / "figures").glob("*.png")} >= {"throughput", "efficiency"}


@pytest.mark.full
@pytest.mark.slow
def test_the_bottleneck_is_right_where_the_cause_is_known(tmp_path, monkeypatch):
    """A slow disk, slow links, a slow model, found by real, syn, io and one rank alone."""
    monkeypatch.setenv("SLOW_RUNS", str(tmp_path))
    points = [("1", "syn"), ("2", "real"), ("2", "syn"), ("2", "io")]
    for cause in slow.CAUSES:
        for ranks, run in points:
            assert attempts.claim(tmp_path / cause / f"{ranks}-{run}", 1, job=None)
    for world in (1, 2):
        on_ranks(world, slow.slow_runs, tmp_path / f"on {world}")
    for cause in slow.CAUSES:
        rows = []
        for ranks, run in points:
            folder = tmp_path / cause / f"{ranks}-{run}"
            state = attempts.finalize(folder / "1", 0)["state"]
            point = {"id": folder.name, "study": "io", "nodes": "1", "ranks": ranks}
            point["run_mode"] = run
            rows.append(results.make_row(point, folder, state, {}))
        found = {
            row["id"]: limit and (limit.limit, limit.why)
            for row, limit in zip(rows, bottleneck.find_bottlenecks(rows), strict=True)
        }
        assert found["2-real"][0] == cause, (cause, found)


# --- bottlenecks


def row(run: str, rate: float, world: int = 8, **more: object) -> results.Row:
    """Of a local batch of 10: a step takes 10 world / rate seconds."""
    known = {
        "id": run,
        "study": "io",
        "state": "done",
        "run_mode": run,
        "world_size": world,
        "nodes": 1,
        "mode": "full_shard",
        "batch": 10,
        "images_per_second": rate,
    }
    return known | more


ALONE = row("syn", 10, 1, mode="no_shard")  # 1 s of compute


@pytest.mark.parametrize(
    ("rows", "word", "parts"),
    [  # seconds of a step: compute, communication, input
        ([row("real", 40), row("syn", 80), row("io", 41), ALONE], "input", (1, 0, 1)),
        ([row("real", 50), row("syn", 80), row("io", 52), ALONE], "input", (1, 0, 0.6)),
        ([row("real", 16), row("syn", 20), row("io", 90), ALONE], "communication", (1, 3, 1)),
        ([row("real", 64), row("syn", 66), row("io", 90), ALONE], "compute", None),
        ([row("syn", 20), ALONE], "communication", (1, 3, 0)),
        ([row("syn", 20)], "unknown", (None, None, None)),
        ([row("syn", 60), row("syn", 20, 2)], "unknown", (None, None, None)),
        ([row("io", 20)], "unknown", (None, None, None)),
        ([row("syn", 5, 1), row("syn", 10, 1, mode="ddp")], "compute", (2, None, 0)),
        ([row("real", 5, 1), row("syn", 10, 1), row("io", 7, 1)], "input", (1, None, 1)),
        (
            [row("syn", 20, device="cpu", cores=2), row("syn", 10, 1, device="cpu", cores=2)],
            "unknown",
            (None, None, None),
        ),  # the ranks share the cores
        ([row("real", 10, data_seconds=7.0)], "input", None),
        ([row("real", 10, data_seconds=7.0), ALONE], "input", (1, 0, 7)),
        ([row("syn", 20), row("syn", 20, 2)], "communication", (1, 3, 0)),
        ([row("syn", 80, alloc_retries=3), ALONE], "memory", None),
        ([row("syn", 0, state="out of memory"), ALONE], "memory", None),
        (
            [
                row(
                    "real",
                    40,
                    profile_compute=1,
                    profile_communication=5,
                    profile_optimizer=1,
                    profile_data=1,
                    profile_idle=1,
                )
            ],
            "communication",
            (3, 5, 1),
        ),
    ],
)
def test_bottlenecks_by_hand(rows, word, parts):
    found = bottleneck.find_bottlenecks(rows)[0]
    assert found and found.limit == word and found.advice and found.why
    if parts:
        assert (found.compute, found.communication, found.input) == pytest.approx(parts)


def test_ranks_that_share_cores_are_no_more_devices():
    """The ideal of four ranks on two cores is two of one."""
    alone = row("syn", 10, 1, device="cpu", cores=2, mode="ddp")
    four = row("syn", 20, 4, device="cpu", cores=2)
    ideal = bottleneck.ideal_rates([four, alone])[bottleneck.ideal_key(four)]
    assert bottleneck.ideal_seconds(four, ideal)[0] == pytest.approx(2)


def test_advice_names_what_is_there():
    """What fits the machine and the number of ranks."""
    far = row("syn", 20, 16, nodes=2, max_local_batch=64)
    near, alone = row("syn", 20, max_local_batch=64), row("syn", 10, 1, state="out of memory")
    texts = [
        found.advice for found in bottleneck.find_bottlenecks([far, near, alone, ALONE]) if found
    ]
    for text, words, others in zip(
        texts,
        (("--mode hybrid", "up to 64"), ("--mode ddp", "up to 64"), ("--batch",)),
        (("--mode ddp",), ("--group",), ("--group", "full_shard")),
        strict=False,
    ):
        assert all(word in text for word in words) and not any(word in text for word in others)
    laptop = [
        row("syn", rate, world, device="cpu", cores=2, max_local_batch=4252, mode=mode)
        for rate, world, mode in (
            (69, 1, "no_shard"),
            (100, 1, "ddp"),
            (99, 2, "full_shard"),
            (70, 4, "hybrid"),
        )
    ]
    found_here = [found for found in bottleneck.find_bottlenecks(laptop) if found]
    assert [found.limit for found in found_here] == ["compute"] * 2 + ["communication", "unknown"]
    for found in found_here:
        assert not re.search("batch|group|GCD|package|bf16", found.advice), found
    text = " ".join((*bottleneck.ADVICE.values(), *bottleneck.CPU_ADVICE.values(), *texts))
    help_text = config.training_parser().format_help()
    assert all(flag in help_text for flag in re.findall(r"`(--[a-z-]+)", text))


def test_points_of_a_job_array_are_joined_whatever_their_host(tmp_path):
    """Of one machine type: the verdict is that of one host, the figure has one place for them."""

    def rows(*hosts: str) -> list[results.Row]:
        some = [row("real", 40), row("syn", 80), row("io", 41), ALONE]
        known = {"source": "mine", "device": "cuda", "model": "base", "ranks": 8, "group": None}
        return [r | known | {"host": host} for r, host in zip(some, hosts, strict=True)]

    apart, one = rows("n1", "n2", "n3", "n4"), rows("n1", "n1", "n1", "n1")
    found = bottleneck.find_bottlenecks(apart)
    assert found == bottleneck.find_bottlenecks(one) and found[0] and found[0].limit == "input"
    (picture,) = [p for p in figures.draw(apart, tmp_path) if p.name == "io"]
    assert len(picture.panels[0].get_xticks()) == 1 and len(picture.points) == 3
    assert len(set(drawing.series_labels([apart[1], apart[1] | {"host": "n9"}]))) == 1


# --- figures


@pytest.fixture(scope="module")
def published():
    """Rows of the published measurements; reading them plans each."""
    return results.read_folder(PUBLISHED)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, published):
    """(what `sweep.py report examples/published` printed, its folder)."""
    out = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "read_folder", lambda folder: [dict(row) for row in published])
        return here("report", PUBLISHED, "--out", out), out


def series(out: Path, name: str) -> dict[str, dict[str, float]]:
    """What was drawn: series -> x -> y."""
    found: dict[str, dict[str, float]] = {}
    with open(out / "figures" / f"{name}.csv") as file:
        for line in csv.DictReader(file):
            found.setdefault(line["series"], {})[line["x"]] = float(line["y"])
    return found


def test_published_curves_have_their_shapes(drawn):
    _, out = drawn
    share = series(out, "efficiency")
    assert min(share[f"3b: {ALONE_EACH}"].values()) > 0.94  # nearly ideal
    for model in ("base", "1b", "3b"):
        lines = share[f"{model}: full_shard"]
        assert lines["16"] > 0.95 and lines["1024"] < 0.4  # and falls away
        assert list(lines.values())[4:] == sorted(list(lines.values())[4:], reverse=True)
    with open(PUBLISHED / "throughput.csv") as file:
        rates = {
            (r["model"], r["fsdp_mode_name"], r["gpus"]): float(r["images_per_second"])
            for r in csv.DictReader(file)
        }
    lines = series(out, "throughput")
    assert lines["3b: hybrid 2"]["1024"] == rates["3b", "HYBRID_2GPUs", "1024"]
    assert sum(len(v) for k, v in lines.items() if "planned" not in k) == len(rates)
    best = max(v for (m, _, n), v in rates.items() if (m, n) == ("1b", "8")) / 8  # full_shard's
    assert share["1b: ddp (probably not bf16)"]["512"] == pytest.approx(
        rates["1b", "DDP", "512"] / 512 / best
    )
    assert len(series(out, "options")) == 6
    bars = series(out, "options")["5b: backward_pre, limit"]
    assert bars == {"full_shard": 388, "hybrid 2": 360, "hybrid 16": 352}


def test_what_may_not_be_compared_says_so(drawn, published):
    """In every legend, in the report, and there is no verdict on it."""
    _, out = drawn
    for name in ("throughput", "efficiency", "memory"):
        drawn_names = {line.partition(": ")[2] for line in series(out, name)}
        assert ALONE_EACH in drawn_names and "hybrid 1" not in drawn_names
    report = (out / "report.md").read_text()
    assert "30 points of hybrid 1 are drawn, but not compared: gradients probably not red" in report
    rows = published
    doubted = [r for r in rows if r["mode"] == "ddp" or (r["mode"], r["group"]) == ("hybrid", 1)]
    assert len(doubted) == 60 == sum(bool(r.get("caveat")) for r in rows)
    assert not any(
        found
        for r, found in zip(rows, bottleneck.find_bottlenecks(rows), strict=True)
        if r in doubted
    )
    assert bottleneck.ideal_rates(rows) == bottleneck.ideal_rates(
        [r for r in rows if r not in doubted]
    )


def test_the_plan_is_drawn_with_its_error(drawn):
    said, out = drawn
    lines = series(out, "throughput")
    rates, planned = lines["3b: full_shard"], lines["3b: full_shard, planned"]
    errors = [abs(planned[x] / rates[x] - 1) for x in rates]
    expected = f"{statistics.median(errors):6.1%} in the median, {max(errors):6.1%} at worst"
    assert f"speed    3b    full_shard     off by {expected}, 8 points" in said
    run = PlannedRun(
        vit.MODELS["3b"], "full_shard", 64, 32, 252, 0.0, fsdp=1, ac="full", encoder_only=True
    )
    one = estimate.Plan(run)
    assert planned["64"] == pytest.approx(one.images_per_second, rel=1e-4)
    assert "memory   1b    full_shard" in said
    assert not [k for k in lines if k.startswith(("3b: ddp, p", "3b: hybrid 1, p"))]


def test_pictures_are_whole(drawn):
    _, out = drawn
    report = (out / "report.md").read_text()
    names = re.findall(r"!\[.*?\]\((figures/.*?\.png)\)", report)
    assert [Path(n).stem for n in names] == [
        "throughput",
        "efficiency",
        "memory",
        "options",
        "planned",
    ]
    for name in names:
        with Image.open(out / name) as image:
            assert min(image.size) > 400 and len(image.convert("L").getcolors() or []) > 10
    for link in re.findall(r"\]\((?!http)(.*?)\)", report):
        assert (out / link).exists(), link


def test_texts_do_not_lie_on_each_other(published, tmp_path):
    """Boxes of all texts of a picture, as drawn; every axis has a name, with its unit."""
    rows = published + [
        row(
            "syn",
            rate * w,
            w,
            model="base",
            source="mine",
            device="cuda",
            mode=mode,
            nodes=w // 8,
            study="scaling",
            group=None,
            state=state,
        )
        for w in (8, 16, 32)
        for mode, state, rate in (("full_shard", "done", 70), ("ddp", "out of memory", 0))
    ]
    for picture in figures.draw(rows, tmp_path):
        canvas = FigureCanvasAgg(picture.figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        texts = [
            t
            for panel in picture.panels
            for t in (panel.title, panel.xaxis.label, panel.yaxis.label)
        ]
        for panel in picture.panels:
            for axis in (panel.xaxis, panel.yaxis):
                low, high = sorted(axis.get_view_interval())
                texts += [
                    tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high
                ]
        texts += [t for legend in picture.figure.legends for t in legend.get_texts()]
        boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text()]
        for i, (text, box) in enumerate(boxes):
            for other, another in boxes[:i]:
                assert not box.overlaps(another), (picture.name, text, other)
        assert all(panel.get_ylabel() for panel in picture.panels)
        if picture.name in ("throughput", "efficiency", "memory"):
            legend = [t.get_text() for one in picture.figure.legends for t in one.get_texts()]
            assert any("gradients probably not reduced" in text for text in legend)


def test_every_series_differs_without_colour():
    assert len(set(drawing.MARKS)) == len(drawing.MARKS) > 9
    assert len(set(drawing.HATCHES.values())) == len(drawing.HATCHES)


# --- the ladder


def ladder_row(rung: str, state: str = "done", **more) -> dict:
    cells = {k: results.parse_cell(k, v) for k, v in studies.ladder_rungs()[rung].items()}
    known = {"study": "ladder", "state": state, "model": "1b", "world_size": 8, "id": rung}
    return known | cells | {"planned_gib": 2.0, "max_local_batch": 7} | more


def test_a_ladder_says_what_each_rung_gives():
    rows = [
        ladder_row("no wrapping", "skipped", planned_payload_mb=3.0),
        ladder_row("+ wrapping", images_per_second=50.0, payload_mb=4.0, peak_allocated_gib=1.0),
        ladder_row("+ mixed precision", "out of memory"),
        ladder_row("+ prefetch", images_per_second=80.0),
        ladder_row("+ compile", "waiting", planned_images_per_second=90.0),
        {"study": "scaling", "state": "done", "model": "1b", "world_size": 8},
    ]
    (rungs,) = ladder.ladders(rows).values()
    assert [*rungs] == [row["id"] for row in rows[:-1]]
    table = [dict(zip(ladder.HEADER, cells, strict=True)) for cells in ladder.table_rows(rungs)]
    assert [row["images/s"] for row in table] == [
        *("out of memory (planned)", "50.0", "out of memory", "80.0", "90.0 (planned)")
    ]
    assert [row["as a multiple"] for row in table] == ["-", "1.00", "-", "1.60", "-"]
    sent = "MB of collectives per step"
    assert [row[sent] for row in table[:3]] == ["3.0 (planned)", "4.0", "0"]
    assert [row["ORBIT"] for row in table] == ["out of memory", "1.0", "1.97", "2.4", "-"]


def test_a_ladder_for_other_nodes_is_planned(tmp_path, capsys):
    words = ["ladder", "--models", "3b", "--nodes", "2", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        sweep.main(words)
    assert "give --machine a name of `plan.py --machines`" in capsys.readouterr().err
    assert sweep.main([*words, "--machine", "frontier"]) == 0
    page = (tmp_path / "report.md").read_text()
    _, lines = page.split("## Ladder: 3b, 16 ranks")[1].split("| --- |\n")[:2]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines()[:7]]
    assert [row[0] for row in cells] == [*studies.RUNGS]
    assert all(row[1].endswith("(planned)") for row in cells) and cells[1][2] == "1.00"
    batches = [int(row[5]) for row in cells]
    assert batches[0] < batches[1] < batches[2] < batches[4]
    assert (tmp_path / "figures" / "ladder.png").exists()


@pytest.mark.full
def test_a_ladder_is_climbed_here(tmp_path):
    assert sweep.main(["ladder", "--ranks", "2", "--out", str(tmp_path)]) == 0
    rows = results.read_table(tmp_path / "results.csv")
    assert {row["state"] for row in rows} == {"done"}
    (rungs,) = ladder.ladders(rows).values()
    assert [*rungs] == [*studies.RUNGS][:-1]  # two ranks cannot share the three heads of tiny


def test_commands_of_readme_and_makefile_are_valid():
    text = (
        (ROOT / "README.md").read_text() + (ROOT / "Makefile").read_text() + (sweep.__doc__ or "")
    )
    found = re.findall(r"sweep\.py (.*)", text)
    commands = [c.split("  #")[0].replace("$(GPU_OUT)", "out") for c in found if c[0] != "`"]
    assert len(commands) >= 12
    for command in commands:
        words = command.split(" -- ")[0].replace('"-A PROJECT"', "-APROJECT").split()
        sweep.build_parser().parse_args(
            [w for w in words if w != "--sbatch"]
            if "-APROJECT" not in words
            else [*words[: words.index("--sbatch")], "--sbatch=-A"]
        )


# --- Slurm

sys.path.insert(0, str(ROOT / "tests" / "slurm"))
from rig import Rig, missing  # noqa: E402

# PYTHON of launch_frontier.sh: rank 0 of train_fsdp.py is the stand-in, the others leave.
RANK = """#!/bin/bash
[ "$SLURM_PROCID" = 0 ] || exit 0
shift 2
exec %s %s "$@"
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed ({missing()})")
def test_scaling_through_slurm_killed_in_the_middle(tmp_path, stand_in):
    """Arrays by sbatch; a job, then the sweep itself, is killed; every point ends up run once."""
    _, ran = stand_in
    python = table(tmp_path / "python", RANK % (sys.executable, tmp_path / "stand_in.py"))
    python.chmod(0o755)
    shell = {f"BASH_FUNC_{name}%%": "() { :; }" for name in ("module", "conda")}
    with Rig() as rig:
        env = rig.environ | shell | {"LMOD_SYSTEM_NAME": "frontier"}
        env |= {"RAN": str(ran), "NAP": "0.4", "PYTHON": str(python), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            str(ROOT / "sweep.py"),
            "scaling",
            "--models",
            "tiny",
            "--nodes",
            "1,2",
            "--ranks",
            "2",
            "--out",
            str(tmp_path / "out"),
            "--sbatch",
            "-p batch",
        ]

        def again(**more: str) -> str:
            done = subprocess.run(command, env=env | more, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout

        def wait(until, seconds: float = 120) -> None:
            deadline = time.monotonic() + seconds
            while not until():
                assert time.monotonic() < deadline, again()
                time.sleep(0.2)

        def listed() -> list[str]:
            return rig.run("squeue", "-hr", "-o", "%i %t", env={}).splitlines()

        said = again()
        assert re.findall(r"job \d+: (\d+) points on (\d) nodes", said) == [("6", "1"), ("5", "2")]
        assert "submitted" not in said and "11 queued" in said
        assert not re.findall(r"^job", again(), re.MULTILINE)  # nothing is queued twice
        wait(lambda: ran.read_text().count("\n") >= 2)
        job = next(line.split()[0] for line in listed() if line.endswith(" R"))
        rig.run("scancel", job)
        wait(lambda: not any(line.startswith(f"{job} ") for line in listed()))
        killed = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        again()
        wait(lambda: not listed())
        for _ in range(2):  # a job that was submitted by the killed one is harmless
            again()
            wait(lambda: not listed())
        rows = rows_of(tmp_path / "out")
        assert len(rows) == 11 and {row["state"] for row in rows} == {"done"}
        assert ran.read_text().count("\n") == 12  # the cancelled one again, no other
        made = [
            sorted(p.name for p in (tmp_path / "out" / "runs" / row["id"]).glob("[0-9]*"))
            for row in rows
        ]
        assert sorted(made) == [["1"]] * 10 + [["1", "2"]]
