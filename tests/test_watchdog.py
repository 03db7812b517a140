"""runtime/agreement.py: what all ranks decide together, and who is named when nothing moves."""

import json
import operator
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from conftest import ROOT
from parity import TILES
from ranks import environment, free_port, processes_of, read_log
from test_mesh import CPU, on_ranks, result_or_error

from runtime import agreement
from runtime.step_guard import StepGuard, StepVerdict

# --- once for all


def four_ranks(rank):
    calls = []

    def fail():
        calls.append("fail")
        raise FileNotFoundError(2, "No such file or directory", "/no/such/folder")

    def work():
        calls.append("work")
        return {"files": ["a", "b"], "rank": rank}

    def refuse():
        raise ValueError("no image lies below x")

    def only_two():
        if rank == 2:
            raise PermissionError(13, "Permission denied", "/mnt/x")
        return rank

    return {
        "everywhere": [
            result_or_error(partial(agreement.run_on_all_ranks, do)) for do in (work, only_two)
        ],
        "together": [
            result_or_error(partial(agreement.run_on_rank0, do)) for do in (fail, work, refuse)
        ],
        "nothing": agreement.run_on_rank0(lambda: None),
        "calls": calls,
        "gathered": agreement.gather_to_rank0({"rank": rank}),
        "mean": agreement.mean_over_ranks(torch.tensor([float(rank)])),
    }


@pytest.fixture(scope="module")
def four():
    return on_ranks(4, four_ranks)


def test_together_gives_all_ranks_the_result_or_the_error_of_rank_0(four):
    for rank, told in enumerate(four):
        assert told["together"] == [
            "ValueError: [Errno 2] No such file or directory: '/no/such/folder'",
            {"files": ["a", "b"], "rank": 0},
            "ValueError: no image lies below x",
        ]
        assert told["nothing"] is None
        assert told["calls"] == (["work", "fail", "work"] if rank == 0 else ["work"])


def test_everywhere_gives_each_rank_its_own_result_or_all_the_error_of_one(four):
    problem = "ValueError: [Errno 13] Permission denied: '/mnt/x' (rank 2)"
    for rank, told in enumerate(four):
        assert told["everywhere"] == [{"files": ["a", "b"], "rank": rank}, problem]


def test_mean_over_ranks_and_gathered(four):
    assert [t["mean"] for t in four] == [1.5] * 4  # of 0 to 3
    assert [t["gathered"] for t in four] == [[{"rank": r} for r in range(4)], None, None, None]


# --- every step

NAN, INF = float("nan"), float("inf")
# name: (max_skips, scaled, {(rank, step): loss}, {step: norm on all ranks},
#        steps left out, of 0 to 6; bad steps in a row after each)
FINITE = {
    "all finite": (0, False, {}, {}, "0000000", "0000000"),
    "one loss": (0, False, {(2, 4): NAN}, {}, "0000111", "0000123"),
    "a loss and the norm with it": (0, False, {(2, 4): NAN}, {4: NAN}, "0000111", "0000123"),
    "infinite at once": (0, False, {(1, 0): INF}, {}, "1111111", "1234567"),
    "two ranks": (0, False, {(0, 5): NAN, (1, 3): -INF}, {}, "0001111", "0001234"),
    "the norm alone": (0, False, {}, {2: INF}, "0011111", "0012345"),
    "scaled, infinite norms": (0, True, {}, {0: INF, 3: NAN}, "1001000", "0000000"),
    "scaled, a loss": (0, True, {(2, 4): NAN}, {1: INF}, "0100111", "0000123"),
    "one may be left out": (1, False, {(2, 4): NAN}, {}, "0000100", "0000100"),
    "two apart": (1, False, {(2, 1): NAN, (0, 3): INF}, {}, "0101000", "0101000"),
    "one too many": (1, False, {(2, 1): NAN, (0, 2): INF}, {}, "0111111", "0123456"),
    "loss, then norm": (2, False, {(1, 1): NAN}, {2: NAN}, "0110000", "0120000"),
    "scaled, between": (2, True, {(1, 1): NAN, (1, 3): NAN}, {2: INF}, "0111000", "0101000"),
}
FLAGS = {  # (rank, step)
    "stop": {(1, 3), (1, 4)},
    "save": {(0, 5)},
    "no_batch": {(2, 7), (0, 8), (2, 8)},
}


def three_ranks(rank):
    """By name: for each step whether it is left out, the verdict of the one before and its own."""
    told = {}
    for name, (max_skips, scaled, losses, norms, *_) in FINITE.items():
        check = StepGuard(CPU, max_skips)
        told[name] = []
        for step in range(9):  # in the last two a rank has no batch
            loss = torch.tensor(losses.get((rank, step), 1.0))
            norm = torch.tensor(norms.get(step, 1.0))
            check.stop_requested = partial(operator.contains, FLAGS["stop"], (rank, step))
            check.save_due = partial(operator.contains, FLAGS["save"], (rank, step))
            check.loader_error = OSError() if (rank, step) in FLAGS["no_batch"] else None
            skip = check.vote(loss, norm, scaled)
            assert (skip.shape, skip.dtype) == ((), torch.float32)
            told[name].append((skip.item(), check.read(step - 1), check.read(step)))
    return told


@pytest.fixture(scope="module")
def three():
    return on_ranks(3, three_ranks)


@pytest.mark.parametrize("name", FINITE)
def test_finite_check(three, name):
    _, scaled, losses, norms, skips, rows = FINITE[name]
    for rank, told in enumerate(three):
        for step, (skip, before, now) in enumerate(told[name]):
            assert skip == float((skips + "11")[step]), step
            assert now == StepVerdict(
                own_loss=(rank, step) in losses,
                loss=any((r, step) in losses for r in range(3)),
                norm=step in norms and not scaled,
                consecutive=int(rows[min(step, 6)]),
                **{
                    flag: any((r, step) in where for r in range(3)) for flag, where in FLAGS.items()
                },
            )
            assert step == 0 or before == told[name][step - 1][2]


# --- when nothing moves

WAIT = """
import os, sys, time, torch, torch.distributed as dist
import mesh
from runtime import watchdog
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ranks = mesh.read_ranks(os.environ)
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
mesh.init_ranks(ranks, torch.device("cpu"))
watch = watchdog.Watchdog(rank, world, ranks.init, seconds=2, startup_factor=2, folder="stalled",
                       give_up=lambda text: print("GIVEN UP:", text, flush=True))
def sleeps_here():
    time.sleep(1000)
for step in range(1000):
    watch.heartbeat("reading data", step)
    if (rank, step) in {stuck}:
        sleeps_here()
    watch.heartbeat("training", step)
    dist.all_reduce(torch.ones(3))
    if step == {last}:
        break
    time.sleep(0.05)
{then}
watch.stop()
dist.barrier()
dist.destroy_process_group()
"""


def run_waiting(tmp_path, world, stuck=(), last=-1, then="", stop=None, after=1.5):
    """(status, output) of each rank of WAIT; `stop` gets SIGSTOP after so many seconds."""
    code = WAIT.replace("{stuck}", repr(set(stuck))).replace("{last}", str(last))
    code = code.replace("{then}", then)
    port, processes = free_port(), []
    for rank in range(world):
        with open(tmp_path / f"rank{rank}.txt", "w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    env=environment(rank, world, port),
                    cwd=tmp_path,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        if stop is not None:
            deadline = time.monotonic() + 180
            while "going" not in (tmp_path / "rank0.txt").read_text():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(after)
            processes[stop].send_signal(signal.SIGSTOP)
        statuses = [None if rank == stop else p.wait(90) for rank, p in enumerate(processes)]
    finally:
        for p in processes:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()
    return statuses, [(tmp_path / f"rank{r}.txt").read_text() for r in range(world)]


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_with_its_code(tmp_path):
    status, texts = run_waiting(tmp_path, 3, stuck=[(2, 4)])
    assert status == [1, 1, 1], texts
    assert re.search(
        r"GIVEN UP: no progress for \d+ s: rank 2 \(reading data in step 5, on .*\) is "
        r"stuck, rank 0 \(training in step 5, on .*\) waits",
        texts[0],
    )
    assert "in sleeps_here" in texts[2] and "Thread" in texts[2]
    assert "GIVEN UP" not in texts[1] + texts[2] and "in sleeps_here" not in texts[0] + texts[1]
    for rank in range(3):  # the last collectives of each
        trace = json.loads((tmp_path / "stalled" / f"rank_0000{rank}.json").read_text())
        assert len(trace["entries"]) >= 4 + (rank != 2)
        assert trace["entries"][-1]["profiling_name"] == "gloo:all_reduce"


@pytest.mark.slow
def test_a_limit_grows_by_experience(tmp_path):
    """All save; that may take three times what it once took: 2.5 s, so 7.5 s instead of 2."""
    started = time.monotonic()
    then = """
watch.heartbeat('saving', 3)
time.sleep(2.5)
watch.heartbeat('training', 3)
watch.heartbeat('saving', 9)
if rank:
    sleeps_here()
dist.all_reduce(torch.ones(3))
"""
    status, texts = run_waiting(tmp_path, 3, last=3, then=then)
    assert status == [1, 1, 1], texts
    assert re.search(r"all ranks wait for each other \(saving in step 10, on", texts[0])
    assert time.monotonic() - started > 2.5 + 7.5


@pytest.mark.slow
def test_a_save_may_be_slow_though_the_one_before_was_not(tmp_path):
    then = """
watch.heartbeat('saving', 3); watch.heartbeat('training', 3); watch.heartbeat('saving', 9)
time.sleep(3)
watch.heartbeat('training', 9)
"""
    status, texts = run_waiting(tmp_path, 2, last=3, then=then)
    assert status == [0, 0] and "GIVEN UP" not in "".join(texts), texts


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_named(stopped, tmp_path):
    first = "print('going', flush=True)\nwhile True:\n    watch.heartbeat('training', 7)\n"
    first += "    dist.all_reduce(torch.ones(3))\n    time.sleep(0.05)"
    status, texts = run_waiting(tmp_path, 3, last=3, then=first, stop=stopped)
    assert [s for r, s in enumerate(status) if r != stopped] == [1, 1], texts
    if stopped == 0:
        assert all(
            re.search(
                rf"GIVEN UP: rank 0 does not answer rank {r} \(training in step 8, on", texts[r]
            )
            for r in (1, 2)
        ), texts
    else:
        assert re.search(
            r"rank 1 \(training in step 8, on .*\) stopped sending heartbeats, rank 0 "
            r"\(training in step 8, on .*\) waits",
            texts[0],
        ), texts


@pytest.mark.slow
def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path):
    """Slurm may stop all processes for long (scontrol suspend): that is no standing still."""
    code = WAIT.replace("{stuck}", "set()").replace("{last}", "80").replace("{then}", "")
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(rank, 2, port),
            cwd=tmp_path,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        time.sleep(6)
        for p in processes:
            p.send_signal(signal.SIGSTOP)
        time.sleep(7)
        for p in processes:
            p.send_signal(signal.SIGCONT)
        assert [p.wait(60) for p in processes] == [0, 0]
    finally:
        for p in processes:
            p.kill()


@pytest.mark.slow
def test_a_training_whose_rank_is_stopped_ends_and_can_be_resumed(tmp_path):
    argv = [
        "--model",
        "tiny",
        "--img-size",
        "32",
        "--data",
        TILES,
        "--device",
        "cpu",
        "--workers",
        "0",
        "--precision",
        "fp32",
        "--mode",
        "full_shard",
        "--global-batch",
        "12",
        "--log-every",
        "1",
        "--save-every",
        "2",
        "--timeout",
        "6",
        "--steps",
    ]
    port, processes, log = free_port(), [], tmp_path / "log.jsonl"
    for rank in range(2):
        with open(tmp_path / f"rank{rank}.txt", "w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "train_fsdp.py", *argv, "100000", "--out", str(tmp_path)],
                    env=environment(rank, 2, port),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=ROOT,
                )
            )
    try:
        deadline = time.monotonic() + 90
        while not log.exists() or log.read_text().count('"step"') < 8:
            assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGSTOP)
        assert processes[0].wait(60) == 1
        text = (tmp_path / "rank0.txt").read_text()
        named = re.search(
            r"(?m)^train_fsdp.py: error: no progress for .* rank 1 \(.* in "
            r"step (\d+), on .*\) stopped sending heartbeats",
            text,
        )
        assert named, text
        assert re.search(r"; saved \S+step_\d+; the same command continues from there\n", text)
        _, steps, end = read_log(log)
        assert end["reason"] == "timeout" and "rank 1" in end["problem"]
        # what it told last, a twentieth of --timeout before it was stopped: some steps ago
        assert -10 <= int(named[1]) - steps[-1]["step"] <= 2
        # released, it finds nobody and leaves too
        processes[1].send_signal(signal.SIGCONT)
        assert processes[1].wait(60) == 1
        deadline = time.monotonic() + 45
        while any(processes_of(p.pid) for p in processes):
            assert time.monotonic() < deadline, "processes are left"
            time.sleep(0.1)
    finally:
        for p in processes:
            if processes_of(p.pid):
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    last = steps[-1]["step"]
    clean = {k: v for k, v in environment(0, 1, 0).items() if "RANK" not in k and k != "WORLD_SIZE"}
    done = subprocess.run(
        [
            sys.executable,
            "train_fsdp.py",
            *argv,
            str(last + 3),
            "--out",
            str(tmp_path),
            "--allow-changes",
        ],
        cwd=ROOT,
        env=clean,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "resumed" in done.stdout, done.stderr
    assert (tmp_path / "done").exists()
