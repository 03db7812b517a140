"""train_fsdp.py: its flags and their errors, its log, its decisions, its runs on several ranks."""

import gc
import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from ranks import (
    LEARNING_ARGV,
    TILES,
    TINY_ARGV,
    Run,
    environment,
    free_port,
    read_log,
    read_records,
    run_ranks,
    status_of,
)

import checkpoint
import plan
import run
import shard
import train_fsdp
import vit

SMALL = [*TINY_ARGV, "--save-every", "none"]
STEP_KEYS = shlex.split(
    "event step epoch loss grad_norm lr step_seconds data_seconds images_per_second "
    "images_per_second_per_rank tflops_per_rank peak_allocated_gib peak_reserved_gib alloc_retries"
)


# --- flags


def completed(flags: str, ranks: int = 1, device: str = "cpu"):
    args = train_fsdp.parse_flags(flags.split())
    train_fsdp.complete(args, ranks, ranks, device)
    return args


def test_errors_are_printed_by_rank_0_alone(monkeypatch, capsys):
    monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
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


def test_one_process_has_nothing_to_shard():
    """Unless FSDP is asked for; what a launcher has started with several ranks is several."""
    assert completed("").mode == "ddp" != completed("", 2).mode
    for flags in ("--group 1", "--fsdp 1", "--prefetch none", "--wrap root"):
        assert completed(flags).mode == "hybrid", flags
    assert completed("--mode full_shard").mode == "full_shard"


def test_what_follows_from_the_flags_and_the_ranks():
    """A flag that does not apply stays None; a rate and a batch may be given in either form."""
    args = completed("--batch 8 --accum 2", 16, "cuda")
    assert (args.mode, args.group, args.mesh_shape) == ("hybrid", 16, (1, 16))
    assert (args.global_batch, args.precision, args.limit_all_gathers) == (256, "bf16", None)
    assert args.lr == train_fsdp.BLR == args.blr
    args = completed("--mode ddp --global-batch 64 --lr 1e-3", 4)
    assert (args.batch, args.lr, args.blr, args.precision) == (16, 1e-3, None, "fp32")
    assert args.fsdp is args.wrap is args.prefetch is args.group is None
    assert completed("--mode full_shard --fsdp 1", 2).limit_all_gathers is True
    before = vars(args).copy()
    train_fsdp.complete(args, 4, 4, "cpu")
    assert vars(args) == before  # nothing is left to fill in


def test_there_are_not_many_flags():
    flags = [action.option_strings for action in train_fsdp.build_parser()._actions]
    # 48 of the plan, and --exclude, which users have in their commands
    assert len([names for names in flags if "--help" not in names]) <= 49


def test_the_demo_of_the_makefile_is_valid():
    """make test-all runs it."""
    makefile = (ROOT / "Makefile").read_text()
    found = re.search(r"(?s)\ndemo:.*?train_fsdp.py (.*?) --out", makefile)
    assert found
    args = completed(found[1].replace("\\\n", " "), 4)
    assert (args.global_batch, args.batch) == (24, 6)
    assert Path(ROOT, args.data).is_dir() and Path(ROOT, str(args.eval_data)).is_dir()


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    """Bash expands no ~ after an option's =: a folder named ~ would be made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    args = train_fsdp.parse_flags(
        ["--out=~/o", "--data=~/d", "--eval-data=~/e", "--stats=~/s", "--resume=~/r"]
    )
    found = [args.out, args.data, args.eval_data, args.stats, args.resume]
    assert found == [f"{tmp_path}/{name}" for name in "odesr"]


# --- runs in one process


def test_log_has_every_key_and_numbers_that_agree(tmp_path, monkeypatch):
    argv = [*SMALL, "--data", TILES, "--batch", "64", "--steps", "5", "--log-every", "2"]
    collects = []
    update = shard.optimizer_step

    def watched_update(*args):
        collects.append(gc.isenabled())
        update(*args)

    monkeypatch.setattr(shard, "optimizer_step", watched_update)
    assert train_fsdp.main([*argv, "--out", str(tmp_path)]) == 0
    assert collects == [False] * 5 and gc.isenabled()  # no garbage is collected within a step
    start, steps, end = read_log(tmp_path / "log.jsonl")
    assert set(start) >= {"versions", "flops_per_image", *vars(train_fsdp.parse_flags(argv))}
    assert start["params"] == 2_263_488 and start["global_batch"] == 64
    assert start["mesh"] == {"replicate": 1, "shard": 1}
    assert start["peak_lr"] == pytest.approx(1.5e-4 * 64 / 256) and start["lr"] is None
    assert [s["step"] for s in steps] == [2, 4, 5] and [s["epoch"] for s in steps] == [0, 1, 1]
    for s in steps:
        assert [*s] == STEP_KEYS
        assert s["images_per_second"] == pytest.approx(64 / s["step_seconds"])
        tflops = s["images_per_second"] * start["flops_per_image"] / 1e12
        assert s["tflops_per_rank"] == pytest.approx(tflops)
        assert 0 <= s["data_seconds"] < s["step_seconds"]
        assert s["peak_allocated_gib"] is None
        assert s["loss"] > 0 and s["grad_norm"] > 0
    assert end["reason"] == "done" and end["steps"] == 5
    assert 0.9 < end["loss_of_zero"] < 1 and 0.2 < end["loss_of_mean_colour"] < 0.5


def test_a_second_run_appends_and_a_line_cut_by_a_kill_does_not_spoil_the_next(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event": "step", "lo')
    argv = [*SMALL, "--run", "io", "--batch", "4", "--steps", "1", "--out", str(tmp_path)]
    assert train_fsdp.main(argv) == 0 and train_fsdp.main(argv) == 0
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines[1:]] == ["start", "step", "end"] * 2


def test_run_syn_keeps_one_batch_and_saves_nothing(tmp_path, monkeypatch):
    seen = []
    step = train_fsdp.train_step

    def watched_step(training, guard, number, micro_batches, *args, **kwargs):
        seen.append(micro_batches[0][0].data_ptr())
        step(training, guard, number, micro_batches, *args, **kwargs)

    monkeypatch.setattr(train_fsdp, "train_step", watched_step)
    argv = [*TINY_ARGV, "--batch", "4", "--steps", "3", "--run", "syn", "--out", str(tmp_path)]
    assert train_fsdp.main(argv) == 0
    assert len(seen) == 3 and len({*seen}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "log.jsonl"}


def test_a_profile_of_some_steps(tmp_path):
    argv = [*SMALL, "--batch", "2", "--steps", "7", "--profile", "2", "--out", str(tmp_path)]
    assert train_fsdp.main(argv) == 0
    found = read_records(tmp_path / "log.jsonl", "profile")
    assert found == [{"event": "profile", "first_step": 6}]
    trace, table = (tmp_path / "profile" / f"rank_00000.{end}" for end in ("json.gz", "txt"))
    with gzip.open(trace) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if "dur" in event]
    assert names.count("Optimizer.step#AdamW.step") == 2
    assert "aten::mm " in table.read_text()


def test_tensorboard_reads_what_the_log_says(tmp_path):
    """Of a run that was resumed in its middle too, whose last step is made twice."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    argv = [*TINY_ARGV, "--tensorboard", "--data", TILES, "--out", str(tmp_path)]
    argv += shlex.split("--batch 4 --steps 3 --log-every 1 --save-every 2")
    assert train_fsdp.main(argv) == 0
    shutil.rmtree(tmp_path / "step_00000003")
    assert train_fsdp.main(argv) == 0
    steps = {r["step"]: r for r in read_records(tmp_path / "log.jsonl", "step")}  # the last counts
    read = reader.EventAccumulator(str(tmp_path / "tensorboard" / "real"), {"scalars": 0})
    read.Reload()
    for key in ("loss", "grad_norm", "lr", "images_per_second"):
        curve = [(e.step, e.value) for e in read.Scalars(f"step/{key}")]
        assert curve == [(step, float(np.float32(steps[step][key]))) for step in (1, 2, 3)]


def test_a_size_of_ones_own_is_trained_saved_and_planned(tmp_path, capsys):
    size = "tiny:depth=2,width=96,mlp_width=100,heads=4,gated_mlp=1"
    model = vit.ViTMAE(vit.ViTConfig(96, 2, 100, 4, 8, True, 3, 128, 2, 4), 32)
    argv = [*TINY_ARGV, "--model", size, "--batch", "2"]
    more = ["--mode", "full_shard", "--steps", "1", "--out", str(tmp_path)]
    assert train_fsdp.main([*argv, *more]) == 0
    weights, _ = checkpoint.read_weights(tmp_path)
    assert {n: t.shape for n, t in weights.items()} == {
        n: t.shape for n, t in model.state_dict().items()
    }
    capsys.readouterr()
    assert plan.main([*argv, "--world-size", "2", "--json"]) == 0
    count = sum(p.numel() for p in model.parameters())
    start, _, _ = read_log(tmp_path / "log.jsonl")
    assert json.loads(capsys.readouterr().out)["params"] == start["params"] == count


# --- several ranks


def poisoned(flags: str, what: str, rank: int, *steps: int) -> Run:
    """A run in which the loss or the gradient of a rank is not finite in these steps, from 0."""
    return Run([*LEARNING_ARGV, "--global-batch", "12", *flags.split()], what, rank, steps)


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
    # with a gradient scaler an infinite norm is a skipped step, no more
    assert scaled.status == [0, 0, 0] and scaled.end["reason"] == "done"
    assert scaled.moved[4] == 0 and all(m > 0 for m in scaled.moved[1:4] + scaled.moved[5:])
