"""sweep.py and what belongs to it. Real runs of train_fsdp.py where it matters what a run does;
a stand-in that writes a log where only the sweep's own doings are looked at."""

import contextlib
import io
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from ranks import single_environment

import plan
import sweep
from sweeps import report, results, studies

sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "examples" / "published")]
import check  # noqa: E402
from rig import Rig, missing  # noqa: E402

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
write(event="start", steps=20, model=flags["--model"], batch=32, accum=1, mode=mode, device="cpu")
for step in range(2, 21, 2):
    time.sleep(float(os.environ.get("NAP", "0")))
    write(event="step", step=step, images_per_second=100 + step, data_seconds=0.0)
good = mode != os.environ.get("FAILS")
write(event="end", reason="done" if good else "nan", problem="the loss is not finite")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """The file that counts the runs of the stand-in; a copy of sweep.py beside it runs it too."""
    shutil.copy(ROOT / "sweep.py", tmp_path)
    monkeypatch.setattr(sweep, "TRAIN", table(tmp_path / "train_fsdp.py", STAND_IN))
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return table(tmp_path / "ran", "")


def table(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def here(*words: object, status: int = 0) -> str:
    """sweep.py in this process; its output."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert sweep.main([str(word) for word in words]) == status, said.getvalue()
    return said.getvalue()


def refused(capsys, *words: object) -> str:
    """The sentence by which sweep.py refuses a command."""
    with pytest.raises(SystemExit) as left:
        sweep.main([str(word) for word in words])
    said = capsys.readouterr().err
    assert left.value.code == 2 and ".py: error: " in said and said.count("\n") == 1
    return said


def wait_for(done, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def states(out: Path) -> list[str]:
    return sorted(row["state"] for row in results.read_rows(out))


# --- points


def words_of(points) -> set[str]:
    return {" ".join([*map(str, p[1:3]), *p.words]).split(" --steps")[0] for p in points}


def test_the_studies_are_what_the_paper_varied():
    """Counted by hand; every flag is one of train_fsdp.py."""
    options = list(studies.options_points(["5b"], studies.Layout(8, 8)))
    modes = {"full_shard", "hybrid --group 2", "hybrid --group 16"}
    assert len(options) == 3 * 3 * 2 == len(words_of(options))
    assert {re.search(r"--mode (.*) --fsdp 1", text)[1] for text in words_of(options)} == modes
    scaling = list(studies.scaling_points(["15b"], [studies.Layout(1, 1), studies.Layout(2, 8)]))
    at_16 = ("ddp", "no_shard", "shard_grad_op", "full_shard")
    at_16 += ("hybrid --group 2", "hybrid --group 4", "hybrid --group 8")
    assert words_of(scaling) == {
        *(f"1 1 --model 15b --mode {mode} --run-mode syn" for mode in ("ddp", "no_shard")),
        *(f"2 8 --model 15b --mode {mode} --run-mode syn" for mode in at_16),
    }
    inputs = list(studies.io_points(["base"], studies.layouts_here(2), "DIR"))
    runs = [(p.ranks, p.words[p.words.index("--run-mode") + 1]) for p in inputs]
    assert runs == [(ranks, run) for ranks in (1, 2) for run in ("real", "syn", "io")]
    for point in (*options, *scaling, *inputs):
        world_size = str(point.nodes * point.ranks)
        plan.plan_parser().parse_args([*point.words, "--world-size", world_size])


def test_one_rank_gathers_nothing_so_no_option_of_it_is_measured():
    quick = studies.study_points("quick", "tiny", studies.layouts_here(1), "synthetic", False)
    assert quick and not any("--fsdp" in point.words for point in quick)


def test_equal_runs_are_one_point_and_the_last_of_two_flags_counts(tmp_path):
    rows = [
        sweep.plan_point(studies.Point(study, 1, 1, words.split()), None)
        for study, words in (
            ("scaling", "--model tiny --run-mode syn --batch 8"),
            ("io", "--run syn --model base --batch=8 --model tiny"),
            ("io", "--run syn --model tiny --batch 9"),
        )
    ]
    first, other = results.add_points(tmp_path, rows)
    assert first["studies"] == ["io", "scaling"] and first["model"] == "tiny"
    assert other["batch"] == 9 and other["id"] != first["id"]
    words = ["--model", "tiny", "--mode", "ddp", "--global-batch", "4096"]
    assert sweep.plan_point(studies.Point("io", 1, 4, words), None)["batch"] == 1024


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("scaling -- --group 2", "--group is for --mode hybrid, hybrid_grad_op"),
        ("nothing", "invalid choice: 'nothing'"),
        ("report", "which sweep? name its folder"),
        ("scaling --nodes 2", "add --sbatch"),
        ("io --data no", "there is no folder no"),
        ("report .", "results.jsonl"),
        ("scaling -- --encoder-only", "--encoder-only is no flag of train_fsdp.py"),
        ("scaling -- --memory-gib 8", "--memory-gib is no flag of train_fsdp.py"),
        (
            "scaling -- --world-size 64",
            "--world-size is no flag of train_fsdp.py, or not one for a sweep",
        ),
        ("scaling -- --resume x", "--resume is no flag of train_fsdp.py, or not one for a sweep"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, *words.split())
    assert not [*tmp_path.iterdir()]  # nothing was run


# --- one run


def planned_point(flags, ranks, machine=None):
    return sweep.plan_point(studies.Point("io", 1, ranks, flags.split()), machine)


def test_a_point_is_planned_as_it_will_run(monkeypatch):
    """With its own ranks on a node; reading has no model; a CPU keeps no memory for itself."""
    hybrid = planned_point("--model 1b --mode hybrid", 4, "frontier")
    alone = planned_point("--model 1b --mode hybrid --group 4", 4, "frontier")
    assert hybrid["planned_gib"] == alone["planned_gib"]
    reading = planned_point("--model 15b --mode no_shard --run-mode io", 1, "rtx-4090")
    assert reading["fit"] == "" and "planned_images_per_second" not in reading
    monkeypatch.setattr(sweep.devices, "rank_memory_gib", lambda device, ranks: 1.0)
    flags = "--model tiny --mode full_shard --precision fp32 --img-size 64 --batch"
    assert planned_point(f"{flags} 8", 4)["fit"] == ""
    assert planned_point(f"{flags} 2000", 4)["fit"].startswith("NO")


def test_different_runs_have_different_labels():
    """Also if a flag is left out in one of them, or is none that a label shows."""
    row = {"mode": "ddp", "model": "base", "world_size": 2, "precision": "bf16"}
    rows = [row, row | {"bucket_cap_mb": 100.0}, row | {"mode": "full_shard"}, row]
    labels = report.series_labels(rows, "model", "world_size")
    assert labels == ["ddp", "ddp (bucket_cap_mb 100.0)", "full_shard", "ddp, run 2"]


def test_medians_and_quartiles_are_those_after_the_warm_up():
    rates = [7.0, 50, 10, 12, 11, 15, 13, 14, 19, 18]
    steps = [{"step": 2 * i + 2, "images_per_second": r} for i, r in enumerate(rates)]
    log = {"start": [{"steps": 20}], "step": steps, "end": [{}]}
    row = results.summarize(log)
    kept = rates[2:]  # of 20 steps, those above 5: the lines of step 6, 8, ...
    names = ("images_per_second_q1", "images_per_second", "images_per_second_q3")
    assert [row[name] for name in names] == statistics.quantiles(kept, n=4, method="inclusive")
    assert results.summarize(log | {"step": steps[:3]})["images_per_second_q1"] == 10
    assert "images_per_second" not in results.summarize(log | {"step": steps[:1]})


@pytest.mark.parametrize(
    ("code", "end", "output", "late", "state"),
    [
        (0, {"reason": "done"}, "out of memory, but not here", False, "done"),
        (1, {"reason": "nan", "problem": "the loss is"}, "", False, "failed"),
        (-15, {}, "", True, "timed out"),
        (1, {"reason": "failed", "problem": "out of memory ("}, "", False, "out of memory"),
        (1, {"reason": "failed"}, "rank 3: out of memory (", False, "out of memory"),
        (1, {}, "torch.OutOfMemoryError: HIP out of memory.", False, "out of memory"),
        (1, {}, "slurmstepd: error: Detected 1 oom_kill event", False, "out of memory"),
    ],
)
def test_each_end_is_classified(code, end, output, late, state):
    log = {"end": [end]} if end else {}
    assert results.classify_end(code, log, output, late)[0] == state


# --- a sweep, without training


@pytest.mark.full
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGKILL, 1), (signal.SIGTERM, 2)])
def test_ended_it_continues_with_what_it_says(tmp_path, stand_in, number, ranks):
    out, killed = tmp_path / "out", number == signal.SIGKILL
    command = ["scaling", "--models", "tiny", "--ranks", str(ranks), "--data", "synthetic"]
    command += ["--out", str(out)]
    program = [sys.executable, str(tmp_path / "sweep.py"), *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = subprocess.Popen(program, env=single_environment() | {"NAP": "0.2"}, **pipes)
    wait_for(lambda: stand_in.read_text().count("\n") == 2 * ranks)
    running.send_signal(number)
    said = running.communicate(timeout=60)[0]
    assert states(out)[: ranks + 1] == [*["done"] * ranks, "unfinished"]
    if not killed:
        assert running.returncode == 128 + number
        assert "the same command with --retry continues" in said and "Traceback" not in said
        for line in stand_in.read_text().splitlines():
            assert not Path("/proc", line.split()[1]).exists()
    if ranks > 1:  # what continues is the same, with more points
        return
    said = here(*command, status=1)
    assert "unfinished" in said and "--retry runs it again" in said
    for _ in range(2):  # the second time nothing is left to run
        here(*command, "--retry")
        ran = [line.split()[0] for line in stand_in.read_text().splitlines()]
        assert ran == ["ddp", "no_shard", "no_shard"]
    # 100 + step, over the steps 6, 8, ... 20: in the middle 113
    rates = [row["images_per_second"] for row in results.read_rows(out)]
    assert rates == [113, 113] and (out / "report.md").exists()
    here("report", out, PUBLISHED, "--out", tmp_path / "both")
    assert (tmp_path / "both/report.md").read_text().startswith("# Sweep: out, published\n")


def test_what_fails_or_cannot_fit_runs_when_asked(tmp_path, stand_in, monkeypatch):
    out = tmp_path / "out"
    command = ["scaling", "--models", "tiny,15b", "--ranks", "1", "--machine", "frontier"]
    monkeypatch.setenv("FAILS", "no_shard")
    for _ in range(2):  # the second time nothing is run
        said = here(*command, "--out", out, status=1)
        assert "the loss is not finite" in said and "--retry" in said
        assert re.search(r"skipped +15b-no_shard\S+ +plan.py: NO: \d+\.\d GiB at .* of 64", said)
        assert states(out) == ["done", "failed", "skipped", "skipped"]
    assert stand_in.read_text().count("\n") == 2
    monkeypatch.setenv("NAP", "60")
    here(*command, "--out", out, "--retry", "--limit", 3, status=1)
    assert states(out) == ["done", "skipped", "skipped", "timed out"]


@pytest.mark.full
def test_a_point_that_is_running_is_not_started_again(tmp_path, stand_in):
    out = tmp_path / "out"
    command = ["scaling", "--models", "tiny", "--ranks", "1", "--data", "synthetic"]
    command += ["--out", str(out)]
    program = [sys.executable, str(tmp_path / "sweep.py"), *command]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(program, env=single_environment() | {"NAP": "60"}, **quiet)
    wait_for(lambda: stand_in.read_text().count("\n") == 1)
    said = here(*command, "--retry", status=1)
    assert "cannot be locked: " in said and states(out) == ["done", "unfinished"]
    assert first.poll() is None
    first.terminate()
    first.wait()
    here(*command, "--retry")
    assert states(out) == ["done", "done"]


@pytest.mark.full
def test_matplotlib_is_asked_for_only_where_it_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib" in refused(capsys, "report", PUBLISHED, "--out", tmp_path)


# --- what limits a run


def row(run: str, rate: float, world: int = 8, **more: object) -> results.Row:
    """Of a local batch of 10: a step takes 10 world / rate seconds."""
    known = {"id": run, "studies": ["io"], "state": "done", "run_mode": run, "world_size": world}
    known |= {"nodes": 1, "mode": "full_shard", "batch": 10, "images_per_second": rate}
    return known | more


ALONE = row("syn", 10, 1, mode="no_shard")  # 1 s of compute
CPU = {"device": "cpu", "cores": 2}


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
        ([row("syn", 20, 8, **CPU), row("syn", 10, 1, **CPU)], "unknown", None),  # they share cores
        ([row("syn", 20), row("syn", 20, 2)], "communication", (1, 3, 0)),
        ([row("syn", 80, alloc_retries=3), ALONE], "memory", None),
        ([row("syn", 0, state="out of memory", reason="x"), ALONE], "memory", None),
        # one of them was disturbed: real 0.29 s, syn 0.91; real below reading alone
        ([row("real", 276), row("syn", 88), row("io", 900), ALONE], "unclear", None),
        ([row("real", 60), row("syn", 70), row("io", 40), ALONE], "unclear", None),
    ],
)
def test_limits_by_hand(rows, word, parts):
    results.add_ideal(rows)
    some, limit = results.find_bottlenecks(rows)[0]
    assert some[0] is rows[0] and limit.name == word and limit.reason
    if parts:
        names = ("compute", "communication", "input")
        assert tuple(limit.seconds.get(name) for name in names) == pytest.approx(parts)


def test_each_way_of_reading_is_a_setting_of_its_own():
    few, many = {"workers": 2}, {"workers": 8}
    rows = [row("syn", 80), ALONE]
    rows += [row("real", 40, **few), row("io", 41, **few)]
    rows += [row("real", 76, **many), row("io", 400, **many)]
    results.add_ideal(rows)
    found = {some[-1].get("workers"): limit.name for some, limit in results.find_bottlenecks(rows)}
    assert found[2] == "input" and found[8] == "compute"
    labels = report.series_labels([r for r in rows if r["run_mode"] == "real"])
    assert len(set(labels)) == 2


def test_sweeps_of_two_machines_are_not_mixed(tmp_path):
    """Although their folders have the same name."""
    alone = []
    for host, rates in ("a", (100, 780)), ("b", (1000, 7000)):
        folder = tmp_path / host / "sweep_scaling"
        folder.mkdir(parents=True)
        rows = [row("syn", rate, world) for rate, world in zip(rates, (1, 8), strict=True)]
        rows = [r | {"id": f"{host}{r['world_size']}", "model": "base", "reason": ""} for r in rows]
        rows = [r | {"studies": ["scaling"], "source": "sweep_scaling"} for r in rows]
        results.write_lines(folder / "results.jsonl", rows)
        results.add_ideal(rows)
        alone += [r["efficiency"] for r in rows]
    folders = [tmp_path / host / "sweep_scaling" for host in "ab"]
    here("report", *folders, "--out", tmp_path)
    joined = [r["efficiency"] for r in results.read_lines(tmp_path / "results.jsonl")]
    assert joined == alone == [1, 0.975, 1, 0.875]


def test_ranks_that_share_cores_are_no_more_devices():
    """The ideal of four ranks on two cores is two of one."""
    rows = [row("syn", 20, 4, **CPU), row("syn", 10, 1, **CPU)]
    results.add_ideal(rows)
    assert [r["ideal"] for r in rows] == [20, 10] and [r["efficiency"] for r in rows] == [1, 1]


# --- the page


def test_the_page_of_the_published_runs(tmp_path):
    """Their curves are nearly ideal where shards stay near; what may not be compared says so."""
    here("report", PUBLISHED, "--out", tmp_path)
    every = results.read_lines(tmp_path / "results.jsonl")
    rows, page = {row["id"]: row for row in every}, (tmp_path / "report.md").read_text()
    assert min(rows[f"3b-hybrid1-{2**n}"]["efficiency"] for n in range(3, 11)) > 0.94
    for model in ("base", "1b", "3b"):
        assert rows[f"{model}-full_shard-16"]["efficiency"] > 0.95
        assert rows[f"{model}-full_shard-1024"]["efficiency"] < 0.4
    for cell in (c for c in check.speed_cells() if c.nodes in (1, 128)):  # today's plan
        name = f"{cell.model}-{cell.mode}{cell.group or ''}-{8 * cell.nodes}"
        assert rows[name]["planned_images_per_second"] == pytest.approx(cell.planned, rel=0.02)
    doubted = [row for row in every if row.get("caveat")]
    assert {(row["mode"], row["group"]) for row in doubted} == {("ddp", None), ("hybrid", 1)}
    limits = results.find_bottlenecks(every)
    assert limits and not any(row in doubted for some, _ in limits for row in some)
    assert any("gradients probably" in label for label in report.series_labels(every))
    assert all(name in page for name in rows)
    for link in re.findall(r"\]\((?!http)(.*?)\)", page):
        assert (tmp_path / link).exists(), link


def test_each_axis_has_three_labels_and_each_line_a_name():
    more = {"model": "base", "source": "x", "studies": ["scaling"]}
    rows = [
        row("syn", rate, world, mode=mode, planned_images_per_second=rate, **more)
        for world, rate in enumerate((400, 8000), 1)
        for mode in ("ddp", "full")
    ]
    results.add_ideal(rows)
    figure = report.draw_throughput(rows)
    FigureCanvasAgg(figure).draw()
    (panel,) = figure.axes
    low, high = panel.get_ylim()
    ticks = [tick for tick in panel.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert sum(bool(tick.label1.get_text()) for tick in ticks) >= 3 and low == 0 and high > 4000
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ddp", "full"]


# --- with training


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_point_runs_inside_an_allocation(ranks, tmp_path, monkeypatch):
    """Of several tasks, which are not its ranks."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    flags = "--model tiny --mode full_shard --run-mode syn --img-size 32 --batch 2 --steps 9"
    flags += " --log-every 1 --device cpu --precision fp32"
    point = studies.Point("io", 1, ranks, flags.split())
    (row,) = results.add_points(tmp_path, [sweep.plan_point(point, None)])
    found = sweep.run_point(tmp_path, row, sweep.build_parser().parse_args(["io"]))
    assert (found["state"], found["world_size"], found["mode"]) == ("done", ranks, "full_shard")
    assert found["images_per_second"] > 0 and found["load_after"] > 0


# --- Slurm

# PYTHON of launch_frontier.sh: rank 0 of train_fsdp.py is the stand-in, the others leave.
RANK = """#!/bin/bash
[ "$SLURM_PROCID" = 0 ] || exit 0
shift 2
exec %s %s "$@"
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed ({missing()})")
def test_scaling_through_slurm_with_a_task_cancelled(tmp_path, stand_in):
    """Arrays by sbatch; every point is run once, what was cancelled again by --retry."""
    python = table(tmp_path / "python", RANK % (sys.executable, tmp_path / "train_fsdp.py"))
    python.chmod(0o755)
    shell = {f"BASH_FUNC_{name}%%": "() { :; }" for name in ("module", "conda")}
    out = tmp_path / "out"
    flags = ["--models", "tiny", "--nodes", "1,2", "--ranks", "2", "--out", str(out)]
    command = [sys.executable, str(ROOT / "sweep.py"), "scaling", *flags, "--sbatch", "-p batch"]
    with Rig() as rig:
        env = rig.environ | shell | {"LMOD_SYSTEM_NAME": "frontier", "PYTHON": str(python)}
        env |= {"RAN": str(stand_in), "NAP": "0.4", "OMP_NUM_THREADS": "1"}

        def submitted(*more: str) -> str:
            done = subprocess.run([*command, *more], env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout

        def listed() -> list[str]:
            return rig.run("squeue", "-hr", "-o", "%i %t", env={}).splitlines()

        said = submitted()
        assert re.findall(r"job \d+: (\d+) points on (\d) nodes", said) == [("6", "1"), ("5", "2")]
        wait_for(lambda: stand_in.read_text().count("\n") >= 2)
        rig.run("scancel", next(line.split()[0] for line in listed() if line.endswith(" R")))
        wait_for(lambda: not listed(), 400)
        assert states(out).count("done") == 10
        submitted("--retry")
        wait_for(lambda: not listed(), 400)
        assert states(out) == ["done"] * 11
        assert stand_in.read_text().count("\n") <= 12  # the cancelled one again, no other
