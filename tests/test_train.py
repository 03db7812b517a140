"""train_fsdp.py: its flags and their errors, its log, its decisions, its runs on several ranks."""

import gc
import json
import math
import os
import re
import shlex
import socket
from pathlib import Path

import pytest
from conftest import ROOT
from parity import ARGV, TILES
from ranks import (
    TINY_ARGV,
    Run,
    environment,
    free_port,
    on_ranks,
    read_log,
    read_records,
    run_ranks,
    status_of,
)

import shard
import train_fsdp
from runtime.config import parse
from runtime.run import resolve

SMALL = [*TINY_ARGV, "--save-every", "none"]
STEP_KEYS = shlex.split(
    "event step epoch loss grad_norm lr step_seconds data_seconds images_per_second "
    "images_per_second_per_rank tflops_per_rank mfu peak_allocated_gib peak_reserved_gib "
    "alloc_retries"
)


# --- flags


def test_errors_are_printed_by_rank_0_alone(monkeypatch, capsys):
    monkeypatch.setattr("runtime.process.RANK0_REPORT_GRACE_SECONDS", 0)
    for flags, ranks in (
        (["--group", "2"], {0: 1, 2: 0}),  # the same on every rank: one line
        (["--group", "2", "--mode", "ddp"], {0: 1, 2: 0}),
        (["--device", "cuda"], {0: 1, 2: 1}),  # perhaps this node's trouble alone
    ):
        for rank, lines in ranks.items():
            for name, value in environment(rank, 3, free_port()).items():
                monkeypatch.setenv(name, value)
            status = status_of(train_fsdp.main, [*SMALL, *flags])
            printed = capsys.readouterr().err
            assert status == 2 and len(printed.splitlines()) == lines, printed
            assert rank == 0 or not lines or printed.endswith("(rank 2)\n")


def test_one_process_has_nothing_to_shard(monkeypatch):
    """Unless FSDP is asked for; what a launcher has started with several ranks is several."""

    def mode(flags: str, ranks: int = 0) -> str:
        with monkeypatch.context() as patch:
            for name, value in environment(0, ranks, 1).items():
                if ranks:
                    patch.setenv(name, value)
            return parse(flags.split()).mode

    assert mode("") == mode("", 1) == "ddp" != mode("", 2)
    assert mode("--dry-run --world-size 1") == "ddp" != mode("--dry-run --world-size 2")
    for flags in ("--group 1", "--fsdp 1", "--prefetch none", "--wrap root"):
        assert mode(flags) == "hybrid", flags
    assert mode("--mode full_shard") == "full_shard"


# --- runs in one process


def test_log_has_every_key_and_numbers_that_agree(tmp_path, monkeypatch):
    argv = [*SMALL, "--data", TILES, "--batch", "64", "--steps", "5", "--log-every", "2"]
    collects = []
    update = shard.optimizer_step
    before = gc.isenabled()

    def watched_update(*args):
        collects.append(gc.isenabled())
        update(*args)

    monkeypatch.setattr(shard, "optimizer_step", watched_update)
    assert train_fsdp.main([*argv, "--out", str(tmp_path)]) == 0
    assert collects == [False] * 5 and gc.isenabled() == before  # no garbage within a step
    start, steps, end = read_log(tmp_path / "log.jsonl")
    assert set(start) >= {"versions", "flops_per_image", *vars(parse(argv))}
    assert start["params"] == 2_263_488 and start["global_batch"] == 64
    assert start["mesh"] == {"replicate": 1, "shard": 1, "tp": 1}
    assert start["peak_lr"] == pytest.approx(1.5e-4 * 64 / 256)
    assert start["peak_flops_per_rank"] is None
    planned = start["planned"]  # of one rank, which holds everything and sends nothing
    assert planned["memory_gib"]["optimizer"] == pytest.approx(8 * 2_263_488 / 2**30, rel=1e-3)
    assert sum(planned["payload_bytes"].values()) == 0
    assert [s["step"] for s in steps] == [2, 4, 5] and [s["epoch"] for s in steps] == [0, 1, 1]
    for s in steps:
        assert [*s] == STEP_KEYS
        assert s["images_per_second"] == pytest.approx(64 / s["step_seconds"])
        tflops = s["images_per_second"] * start["flops_per_image"] / 1e12
        assert s["tflops_per_rank"] == pytest.approx(tflops)
        assert 0 <= s["data_seconds"] < s["step_seconds"]
        assert s["mfu"] is None and s["peak_allocated_gib"] is None
        assert s["loss"] > 0 and s["grad_norm"] > 0
    assert end["reason"] == "done" and end["steps"] == 5
    assert 0.9 < end["loss_of_zero"] < 1 and 0.2 < end["loss_of_mean_colour"] < 0.5


def test_a_second_run_appends_and_a_line_cut_by_a_kill_does_not_spoil_the_next(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event": "step", "lo')
    argv = [*SMALL, "--run", "io", "--batch", "4", "--steps", "1", "--out", str(tmp_path)]
    assert train_fsdp.main(argv) == 0 and train_fsdp.main(argv) == 0
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines[1:]] == ["start", "step", "end"] * 2


def calls_a_deaf_master():
    """It takes the call and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        _, port = deaf.getsockname()
        os.environ.update(environment(1, 2, port))
        train_fsdp.main([*SMALL, "--timeout", "1", "--out", os.environ["FOLDER"]])


@pytest.mark.full
def test_a_master_that_never_answers_is_one_sentence(tmp_path):
    """A stopped rank 0, or another program at its port."""
    with pytest.raises(RuntimeError, match="failed") as found:
        on_ranks(1, calls_a_deaf_master, tmp_path, 60)
    expected = r"rank 1 of 2 has no answer from rank 0 \(waiting for all 2 ranks at 127.0.0.1:"
    assert re.search(rf"(?m)^train_fsdp.py: error: {expected}", str(found.value))


def test_run_syn_keeps_one_batch(tmp_path, monkeypatch):
    seen = []
    step = train_fsdp.train_step

    def watched_step(training, guard, micro_batches, *args, **kwargs):
        (images, _), *_ = micro_batches
        seen.append(images)
        step(training, guard, micro_batches, *args, **kwargs)

    monkeypatch.setattr(train_fsdp, "train_step", watched_step)
    argv = [*SMALL, "--batch", "4", "--steps", "3", "--run", "syn", "--out", str(tmp_path)]
    assert train_fsdp.main(argv) == 0
    assert len(seen) == 3 and len({x.data_ptr() for x in seen}) == 1


# --- several ranks


def poisoned(flags: str, what: str, rank: int, *steps: int) -> Run:
    """A run in which the loss or the gradient of a rank is not finite in these steps, from 0."""
    return Run([*ARGV, "--global-batch", "12", *flags.split()], what, rank, steps)


def test_a_bad_step_on_one_rank_ends_all_and_is_never_applied(tmp_path):
    """Under every engine."""
    runs = [
        poisoned("--steps 6 --log-every 8 --mode full_shard", "loss", 2, 3),
        poisoned("--steps 6 --log-every 8 --mode hybrid --group 1 --fsdp 1", "loss", 1, 3),
        poisoned("--steps 6 --log-every 8 --mode ddp", "gradient", 1, 3),
        poisoned("--steps 6 --log-every 8 --mode zero1", "loss", 0, 3),
        poisoned("--steps 6 --mode full_shard --precision fp16", "gradient", 1, 4),
    ]
    *ended, scaled = run_ranks(3, runs, tmp_path, 240)
    for result, what in zip(ended, ("loss", "loss", "gradient norm", "loss"), strict=True):
        assert result.status == [1, 1, 1] and f"the {what} is not finite at step 4" in result.errors
        assert (result.end["reason"], result.end["steps"]) == ("nan", 3)
        assert result.replicas_differ == 0
        assert result.moved[1] > 0 and result.moved[3:] == [0]
        assert all(tensor.isfinite().all() for tensor in result.params.values())
    assert "step 4 on rank 2" in ended[0].errors
    # with a gradient scaler an infinite norm is a skipped step, no more
    assert scaled.status == [0, 0, 0] and scaled.end["reason"] == "done"
    assert scaled.moved[4] == 0 and all(m > 0 for m in scaled.moved[1:4] + scaled.moved[5:])


def test_bad_steps_are_left_out_up_to_max_skips(tmp_path):
    """Left out alone, named with rank; one too many in a row ends the run."""
    nine = "--steps 9 --max-skips 2 --mode"
    runs = [
        poisoned(f"{nine} full_shard --log-every 4", "loss", 1, 2, 3, 6),
        poisoned(f"{nine} ddp --log-every 9", "gradient", 0, 4),
        poisoned(f"{nine} hybrid --group 1 --fsdp 1", "loss", 1, 2, 3, 4),
    ]
    some, norm, many = run_ranks(2, runs, tmp_path, 240)
    assert some.status == norm.status == [0, 0] and some.end["reason"] == "done"
    assert some.replicas_differ == norm.replicas_differ == many.replicas_differ == 0
    assert [m == 0 for m in some.moved] == [s in (0, 2, 3, 6) for s in range(9)]  # 0: no earlier
    skips = read_records(tmp_path / "0" / "log.jsonl", "skip")
    found = [(s["step"], s["what"], s["ranks"], s["consecutive_bad"]) for s in skips]
    assert found == [(3, "loss", [1], 1), (4, "loss", [1], 2), (7, "loss", [1], 1)]
    assert some.end["skipped"] == 3 and math.isfinite(some.end["loss"])
    assert [s["step"] for s in some.steps if s["loss"] is None] == [4]  # JSON has no NaN

    skips = read_records(tmp_path / "1" / "log.jsonl", "skip")
    found = [(s["step"], s["what"], s["ranks"]) for s in skips]
    assert found == [(5, "gradient norm", [])]  # a norm is everybody's
    assert norm.moved[4] == 0

    assert many.status == [1, 1] and many.end["reason"] == "nan" and many.end["steps"] == 4
    assert "not finite at step 5 on rank 1: lower --blr" in many.errors
    assert many.moved[2:] == [0, 0, 0]


def test_the_command_of_make_demo_is_valid():
    """make test-all runs it."""
    makefile = (ROOT / "Makefile").read_text()
    demo = r"(?s)\ndemo:.*?--nproc-per-node 4 \\\n\s*train_fsdp.py (.*?) --out"
    found = re.search(demo, makefile)
    assert found
    config = parse(found[1].replace("\\\n", " ").split())
    run = resolve(config, world_size=4, node_ranks=4)
    assert (run.mesh_shape, run.global_batch, run.local_batch) == ((2, 2), 24, 6)
    assert Path(ROOT, config.data).is_dir() and Path(ROOT, str(config.eval_data)).is_dir()
