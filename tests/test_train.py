"""train_fsdp.py: what follows from its flags, its log, what a few bad images and steps do."""

import gc
import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from images import copy_tiles
from ranks import LEARNING_ARGV, TILES, TINY_ARGV, Run, read_log, read_records, run_ranks

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


def test_what_follows_from_the_flags_and_the_ranks():
    """A flag that does not apply stays None; a rate and a batch may be given in either form."""
    args = completed("--batch 8 --accum 2", 16, "cuda")
    assert (args.mode, args.group, args.mesh_shape) == ("hybrid", 16, (1, 16))
    assert (args.global_batch, args.precision, args.limit_all_gathers) == (256, "bf16", None)
    assert args.lr == train_fsdp.BLR == args.blr
    args = completed("--mode ddp --global-batch 64 --lr 1e-3", 4)
    assert (args.batch, args.lr, args.blr, args.precision) == (16, 1e-3, None, "fp32")
    assert args.fsdp is args.wrap is args.prefetch is args.group is None
    before = vars(args).copy()
    train_fsdp.complete(args, 4, 4, "cpu")
    assert vars(args) == before  # nothing is left to fill in
    # one process has nothing to shard, unless FSDP is asked for
    assert completed("").mode == "ddp" != completed("", 2).mode
    for flags in ("--group 1", "--fsdp 1", "--prefetch none", "--wrap root"):
        assert completed(flags).mode == "hybrid", flags


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    """Bash expands no ~ after an option's =: a folder named ~ would be made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    args = train_fsdp.parse_flags(
        ["--out=~/o", "--data=~/d", "--eval-data=~/e", "--stats=~/s", "--resume=~/r"]
    )
    found = [args.out, args.data, args.eval_data, args.stats, args.resume]
    assert found == [f"{tmp_path}/{name}" for name in "odesr"]


def scheduled(flags: str):
    args = completed(f"--batch 64 {flags}")
    train_fsdp.count_steps(args, 640)
    return args, [train_fsdp.learning_rate(step, args) for step in range(args.steps)]


@pytest.mark.parametrize(
    ("flags", "peak"),
    [
        ("", 1.5e-4 * 64 / 256),
        ("--blr 1e-3", 1e-3 * 64 / 256),
        ("--lr 1e-3 --accum 4", 1e-3),  # whatever the global batch is
    ],
)
def test_the_schedule_has_a_warm_up_a_peak_and_half_a_cosine(flags, peak):
    args, rates = scheduled(f"--steps 100 --warmup-steps 10 {flags}")
    assert max(rates) == pytest.approx(peak) and rates[9] == rates[10]
    assert rates[0] == pytest.approx(peak / 10) and rates[-1] < peak / 100
    assert rates[55] == pytest.approx(peak / 2)
    logged = run.record(args)  # the log claims one of them
    assert (logged["blr"] is None) == ("--lr" in flags) == (logged["lr"] == 1e-3)


def test_steps_and_warm_up_follow_from_the_images():
    args, _ = scheduled("--epochs 3")
    assert (args.epoch_steps, args.steps, args.warmup_steps) == (10, 30, 1)
    args, rates = scheduled("--steps 5 --warmup-steps 5")  # the peak is the last step
    assert rates[4] == args.lr


@pytest.mark.parametrize("mode", ["ddp", "full_shard"])
def test_the_flags_of_a_resume_hold(mode, tmp_path, monkeypatch):
    """With --allow-changes, not what the checkpoint says: it holds the optimizer's settings."""
    seen = []
    train = train_fsdp.train

    def look(args, training, *given):
        for group in training.optimizer.param_groups:
            seen.append((group["betas"], group["weight_decay"] > 0))
        return train(args, training, *given)

    monkeypatch.setattr(train_fsdp, "train", look)
    argv = [*TINY_ARGV, "--mode", mode, "--global-batch", "4", "--out", str(tmp_path)]
    argv += ["--model", "tiny:depth=1,decoder_depth=1"]
    assert train_fsdp.main([*argv, "--steps", "1"]) == 0
    changes = ["--betas", "0.8,0.99", "--weight-decay", "0", "--allow-changes"]
    assert train_fsdp.main([*argv, "--steps", "2", *changes]) == 0
    assert seen == [((0.9, 0.95), True), ((0.9, 0.95), False)] + [((0.8, 0.99), False)] * 2


# --- runs in one process


def test_log_has_every_key_and_numbers_that_agree(tmp_path, monkeypatch):
    argv = [*SMALL, "--data", TILES, "--batch", "64", "--steps", "5", "--log-every", "2"]
    collects = []
    update = shard.optimizer_step

    def watched_update(*args):
        collects.append(gc.isenabled())
        update(*args)

    monkeypatch.setattr(shard, "optimizer_step", watched_update)
    log = tmp_path / "log.jsonl"
    log.write_text('{"event": "end", "lo')  # cut by a kill: it must not spoil the next line
    assert train_fsdp.main([*argv, "--out", str(tmp_path)]) == 0
    assert collects == [False] * 5 and gc.isenabled()  # no garbage is collected within a step
    cut, rest = log.read_text().split("\n", 1)
    assert cut.endswith('"lo')
    log.write_text(rest)
    start, steps, end = read_log(log)
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
        assert s["loss"] > 0 and s["grad_norm"] > 0
    assert end["reason"] == "done" and end["steps"] == 5
    assert 0.9 < end["loss_of_zero"] < 1 and 0.2 < end["loss_of_mean_colour"] < 0.5


def test_run_syn_keeps_one_batch_and_saves_a_profile_alone(tmp_path, monkeypatch):
    seen = []
    step = train_fsdp.train_step

    def watched_step(training, guard, number, micro_batches, *args, **kwargs):
        seen.append(micro_batches[0][0].data_ptr())
        step(training, guard, number, micro_batches, *args, **kwargs)

    monkeypatch.setattr(train_fsdp, "train_step", watched_step)
    flags = "--batch 2 --steps 7 --run syn --profile 2 --out"
    assert train_fsdp.main([*TINY_ARGV, *flags.split(), str(tmp_path)]) == 0
    assert len(seen) == 7 and len({*seen}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "log.jsonl", "profile"}
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
    with torch.device("meta"):
        model = vit.ViTMAE(vit.ViTConfig(96, 2, 100, 4, 8, True, 3, 128, 2, 4), 32)
    argv = [*TINY_ARGV, "--model", size, "--batch", "2"]
    more = ["--mode", "full_shard", "--steps", "1", "--out", str(tmp_path)]
    assert train_fsdp.main([*argv, *more]) == 0
    weights, _ = checkpoint.read_weights(tmp_path)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in weights.items()} == shapes
    capsys.readouterr()
    assert plan.main([*argv, "--world-size", "2", "--json"]) == 0
    start, _, _ = read_log(tmp_path / "log.jsonl")
    assert json.loads(capsys.readouterr().out)["params"] == start["params"]


@pytest.mark.parametrize("bad", [3, 4])
def test_a_few_broken_images_of_a_small_data_set_do_not_end_a_run(bad, tmp_path, capsys):
    """Although one of 24 is more than the default --max-bad, 1 %."""
    copy_tiles(tmp_path / "images", 24)
    for i in range(bad):
        (tmp_path / "images" / f"broken{i}.jpg").write_text("no image")
    flags = [*TINY_ARGV, "--data", str(tmp_path / "images"), "--batch", "8", "--steps", "20"]
    status = train_fsdp.main([*flags, "--out", str(tmp_path / "out")])
    assert status == (1 if bad > 3 else 0)
    lines = (tmp_path / "out" / "bad_images.csv").read_text().splitlines()[1:]
    assert len(lines) == bad and all("/broken" in line for line in lines)
    if bad > 3:
        assert "4 of 28 images are unreadable, more than --max-bad 0.01" in capsys.readouterr().err
        assert train_fsdp.main([*flags, "--max-bad", "0.2", "--out", str(tmp_path / "out")]) == 0


# --- several ranks


def test_a_bad_step_on_one_rank_ends_all_and_is_never_applied(tmp_path):
    """Under every engine. With fp16's scaler an infinite norm is a skipped step, no more."""
    common = [*LEARNING_ARGV, "--global-batch", "12", "--img-size", "32"]
    engines = {  # the step, from 0, and what is not finite in it on which rank
        "--mode full_shard --log-every 8": ("loss", 2, (3,)),
        "--mode hybrid --group 1 --fsdp 1 --log-every 8": ("loss", 1, (3,)),
        "--mode ddp --log-every 8": ("gradient", 1, (3,)),
        "--mode zero1 --log-every 8": ("loss", 0, (3,)),
        "--mode full_shard --precision fp16 --steps 6": ("gradient", 1, (4,)),
    }
    runs = [Run([*common, *flags.split()], *poison) for flags, poison in engines.items()]
    *ended, scaled = run_ranks(3, runs, tmp_path, 240)
    for result, what in zip(ended, ("loss", "loss", "gradient norm", "loss"), strict=True):
        assert result.status == [1, 1, 1] and f"the {what} is not finite at step 4" in result.errors
        assert (result.end["reason"], result.end["steps"]) == ("nan", 3)
        assert result.replicas_differ == 0
        assert result.moved[1] > 0 and result.moved[3:] == [0]
        assert all(tensor.isfinite().all() for tensor in result.params.values())
    assert scaled.status == [0, 0, 0] and scaled.end["reason"] == "done"
    assert scaled.moved[4] == 0 and all(m > 0 for m in scaled.moved[1:4] + scaled.moved[5:])


def test_no_image_of_the_demo_is_of_a_region_that_it_is_scored_on():
    def regions(part: str) -> set[str]:
        tiles = Path(ROOT, "examples", "tiles", part).rglob("*.jpg")
        return {re.sub(r"_\d+$", "", path.stem) for path in tiles}

    assert regions("train") and regions("train").isdisjoint(regions("heldout"))
