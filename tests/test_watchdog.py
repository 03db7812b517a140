"""runtime/watchdog.py: a run whose ranks wait for one that is stuck ends, and names it."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from parity import TILES
from ranks import NANO, environment, fork_server, free_port, processes_of, read_log

import mesh
import train_fsdp
import vit
from runtime import watchdog

# --- without a training: all scenarios at once, since nearly all of their time is waiting


def sleeps_here():
    time.sleep(1000)


def steps(watch, rank, last, stuck=(), stuck_at=-1):
    """Steps 0 to `last`; the ranks in `stuck` never end the phase before one of them."""
    for step in range(last + 1):
        watch.heartbeat("reading data", step)
        if rank in stuck and step == stuck_at:
            sleeps_here()
        watch.heartbeat("training", step)
        dist.all_reduce(torch.ones(3))
        time.sleep(0.05)


def is_stuck(watch, rank):
    steps(watch, rank, 1000, stuck=(2,), stuck_at=4)


def waits_for_all(watch, rank):
    """All save; that may take three times what it once took: 2.5 s, so 7.5 s instead of 2."""
    steps(watch, rank, 3)
    watch.heartbeat("saving", 3)
    time.sleep(2.5)
    watch.heartbeat("training", 3)
    watch.heartbeat("saving", 9)
    print("saving", time.monotonic(), flush=True)
    if rank:
        sleeps_here()
    dist.all_reduce(torch.ones(3))


def saves_slowly(watch, rank):
    """Though the save before was quick."""
    steps(watch, rank, 3)
    watch.heartbeat("saving", 3)
    watch.heartbeat("training", 3)
    watch.heartbeat("saving", 9)
    time.sleep(3)
    watch.heartbeat("training", 9)


def goes_on(watch, rank):
    steps(watch, rank, 3)
    print("going", flush=True)
    steps(watch, rank, 80)


def endless(watch, rank):
    steps(watch, rank, 3)
    print("going", flush=True)
    while True:
        watch.heartbeat("training", 7)
        dist.all_reduce(torch.ones(3))
        time.sleep(0.05)


# name: (ranks, what each does under a watchdog)
SCENARIOS = {
    "stuck": (3, is_stuck),
    "limit": (3, waits_for_all),
    "slow save": (2, saves_slowly),
    "suspended": (2, goes_on),
    "rank 0 stopped": (3, endless),
    "rank 1 stopped": (3, endless),
}
STOPPED = {"suspended": (0, 1), "rank 0 stopped": (0,), "rank 1 stopped": (1,)}


def watched(environ, folder, work):
    """One rank of a scenario."""
    os.setsid()
    rank = int(environ["RANK"])
    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environ, TORCH_FR_BUFFER_SIZE="100")
    ranks = mesh.read_ranks(os.environ)
    mesh.init_ranks(ranks, torch.device("cpu"))
    watch = watchdog.Watchdog(
        rank,
        ranks.world_size,
        ranks.init,
        seconds=2,
        startup_factor=2,
        folder=str(folder / "stalled"),
        give_up=lambda text: print("GIVEN UP:", text, time.monotonic(), flush=True),
    )
    try:
        work(watch, rank)
    except RuntimeError as error:  # a rank left before this one read the verdict
        watch.exit_now(f"rank {rank}: {error}", 5)
    watch.stop()
    dist.barrier()
    dist.destroy_process_group()


def watch_all(folder: Path):
    """Run every scenario: {name: (exit statuses, outputs, the last collectives by rank)}."""
    processes = {}
    for name, (world, work) in SCENARIOS.items():
        (folder / name).mkdir()
        port, processes[name] = free_port(), []
        for rank in range(world):
            given = environment(rank, world, port), folder / name, work
            processes[name].append(fork_server().Process(target=watched, args=given))
            processes[name][-1].start()

    def output(name, rank):
        path = folder / name / f"rank{rank}.txt"
        return path.read_text() if path.exists() else ""

    deadline = time.monotonic() + 240
    try:
        for name, ranks in STOPPED.items():
            while not all("going" in output(name, r) for r in range(SCENARIOS[name][0])):
                assert time.monotonic() < deadline, [output(name, r) for r in range(3)]
                time.sleep(0.05)
            time.sleep(0.5)  # a heartbeat is published every 0.1 s
            for rank in ranks:
                os.kill(processes[name][rank].pid, signal.SIGSTOP)
        time.sleep(5)
        assert all(p.is_alive() for p in processes["suspended"])
        for process in processes["suspended"]:
            os.kill(process.pid, signal.SIGCONT)
        left = [
            (name, rank)
            for name, ranks in processes.items()
            for rank in range(len(ranks))
            if name == "suspended" or rank not in STOPPED.get(name, ())
        ]
        for name, rank in left:
            processes[name][rank].join(max(0, deadline - time.monotonic()))
    finally:
        for ranks in processes.values():
            for process in ranks:
                if process.is_alive():
                    os.killpg(process.pid, signal.SIGKILL)
                    process.join()
    return {
        name: (
            [process.exitcode for process in ranks],
            [output(name, rank) for rank in range(len(ranks))],
            {p.name: json.loads(p.read_text()) for p in (folder / name / "stalled").glob("*.json")},
        )
        for name, ranks in processes.items()
    }


@pytest.fixture(scope="module")
def found(once):
    return once("watchdog", watch_all)


def test_a_rank_that_is_stuck_is_named_with_its_code(found):
    status, texts, collectives = found["stuck"]
    assert status == [1, 1, 1], texts
    assert re.search(
        r"GIVEN UP: no progress for \d+ s: rank 2 \(reading data in step 5, on .*\) is "
        r"stuck, rank 0 \(training in step 5, on .*\) waits",
        texts[0],
    )
    assert "in sleeps_here" in texts[2] and "Thread" in texts[2]
    assert "GIVEN UP" not in texts[1] + texts[2] and "in sleeps_here" not in texts[0] + texts[1]
    for rank in range(3):
        entries = collectives[f"rank_0000{rank}.json"]["entries"]
        assert len(entries) >= 4 + (rank != 2)
        assert entries[-1]["profiling_name"] == "gloo:all_reduce"


def test_a_limit_grows_by_experience(found):
    status, texts, _ = found["limit"]
    assert status == [1, 1, 1], texts
    text = re.search(
        r"(?m)all ranks wait for each other \(saving in step 10, on .* ([\d.]+)$", texts[0]
    )
    begun = re.search(r"saving ([\d.]+)", texts[0])
    assert text and begun and float(text[1]) - float(begun[1]) > 3 * 2.5


def test_a_save_may_be_slow_though_the_one_before_was_not(found):
    status, texts, _ = found["slow save"]
    assert status == [0, 0] and "GIVEN UP" not in "".join(texts), texts


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_named(stopped, found):
    status, texts, _ = found[f"rank {stopped} stopped"]
    assert [s for r, s in enumerate(status) if r != stopped] == [1, 1], texts
    here = r"\(training in step 8, on .*\)"
    if stopped == 0:
        # the first of the two to notice, by whose end the other may lose its connection
        assert any(
            re.search(rf"GIVEN UP: rank 0 does not answer rank {rank} {here}", texts[rank])
            for rank in (1, 2)
        ), texts
    else:
        wanted = rf"rank 1 {here} stopped sending heartbeats, rank 0 {here} waits"
        assert re.search(wanted, texts[0]), texts


def test_a_job_that_is_suspended_as_a_whole_continues(found):
    """Slurm may stop all processes for long (scontrol suspend): nobody is stuck."""
    status, texts, _ = found["suspended"]
    assert status == [0, 0] and "GIVEN UP" not in "".join(texts), texts


# --- with a training

ARGV = (
    f"--model nano --img-size 32 --data {TILES} --device cpu --workers 0 --precision fp32 "
    "--mode full_shard --global-batch 12 --log-every 1 --save-every 2 --timeout 5 --steps"
).split()


def trains(environ, output, argv):
    """A rank of a training."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environ)
    os.chdir(ROOT)
    vit.MODELS["nano"] = NANO
    raise SystemExit(train_fsdp.main(argv))


@pytest.mark.full
def test_a_training_whose_rank_is_stopped_ends_and_can_be_resumed(tmp_path, monkeypatch, capsys):
    port, processes, log = free_port(), [], tmp_path / "log.jsonl"
    argv = [*ARGV, "100000", "--out", str(tmp_path)]
    for rank in range(2):
        given = environment(rank, 2, port), tmp_path / f"rank{rank}.txt", argv
        processes.append(fork_server().Process(target=trains, args=given))
        processes[-1].start()
    try:
        deadline = time.monotonic() + 90
        while not log.exists() or log.read_text().count('"step"') < 8:
            assert time.monotonic() < deadline and all(p.is_alive() for p in processes)
            time.sleep(0.1)
        os.kill(processes[1].pid, signal.SIGSTOP)
        processes[0].join(60)
        text = (tmp_path / "rank0.txt").read_text()
        assert processes[0].exitcode == 1, text
        named = re.search(
            r"(?m)^train_fsdp.py: error: no progress for .* rank 1 \(.* in "
            r"step (\d+), on .*\) stopped sending heartbeats",
            text,
        )
        assert named, text
        assert re.search(r"; saved \S+step_\d+; the same command continues from there\n", text)
        _, logged, end = read_log(log)
        assert end["reason"] == "timeout" and "rank 1" in end["problem"]
        # its last heartbeat was sent a twentieth of --timeout before it was stopped, or less
        assert int(named[1]) <= logged[-1]["step"] + 2
        # released, it finds nobody and leaves too
        os.kill(processes[1].pid, signal.SIGCONT)
        processes[1].join(60)
        assert processes[1].exitcode == 1
        deadline = time.monotonic() + 45
        while any(processes_of(p.pid) for p in processes):
            assert time.monotonic() < deadline, "processes are left"
            time.sleep(0.1)
    finally:
        for p in processes:
            if p.is_alive():
                os.killpg(p.pid, signal.SIGKILL)
            p.join()

    monkeypatch.setitem(vit.MODELS, "nano", NANO)
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    last = logged[-1]["step"]
    argv = [*ARGV, str(last + 3), "--out", str(tmp_path), "--allow-changes"]
    assert train_fsdp.main(argv) == 0
    assert "resumed" in capsys.readouterr().out and (tmp_path / "done").exists()
