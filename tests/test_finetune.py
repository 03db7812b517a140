"""downstream/finetune.py: fine-tuning in every mode equals a plain loop."""

import json
import math
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from ranks import NANO, agreed_port, full_parameters, on_ranks
from torch import nn

import checkpoint
import data
import probe
import train_fsdp
import vit
from downstream import finetune
from runtime.eval_images import open_eval_loader
from runtime.pretrained import build_pretrained, random_weights, read_pretrained

CPU = torch.device("cpu")
CLASSES, BATCH, EPOCHS, BLR, LAYER_DECAY, SEED = ("desert", "ice", "ocean"), 8, 2, 0.05, 0.5, 3
ARGV = f"--global-batch {BATCH} --epochs {EPOCHS} --blr {BLR} --layer-decay {LAYER_DECAY}".split()
ARGV += f"--seed {SEED} --precision fp32 --workers 0 --device cpu --log-every 1".split()
ARGV += ["--warmup-steps", "2", "--img-size", "48", "--clip", "1"]
STEPS = EPOCHS * 3  # of 24 images
KEYS = ("test_images", "test_loss", "top1", "top5")
UNUSED = ("deco", "mask")  # parameters of the decoder

RUNS = [  # folder, flags, step in which a signal comes
    ("a", "--mode full_shard --fsdp 1", -1),
    ("b", "--mode full_shard --accum 2", -1),
    ("c", "--mode shard_grad_op --ac full", -1),
    ("d", "--mode zero1", -1),
    ("e", "--mode full_shard", 3),
    ("e", "--mode full_shard --fsdp 1", -1),
]


@pytest.fixture
def run(run, monkeypatch):
    """The folder of a pretrained `nano`."""
    monkeypatch.setattr(finetune.process, "listen_for_signals", list)  # handlers of pytest's own
    return run[0]


@pytest.fixture(scope="session")
def trees(tmp_path_factory):
    """Folders train and test with a few tiles; a class of its own number in each."""
    folder = tmp_path_factory.mktemp("trees")
    for part, source, classes in ("train", "train", CLASSES), ("test", "heldout", CLASSES[1:]):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for path in sorted((ROOT / "examples/tiles" / source / name).iterdir())[:8]:
                shutil.copy(path, folder / part / name)
    return folder


def command(run: Path, trees: Path, out: Path, *more: str) -> list[str]:
    argv = ["finetune", str(run), "--data", f"{trees}/train", "--test", f"{trees}/test"]
    return [*argv, *ARGV, "--out", str(out), *" ".join(more).split()]


def records(out: Path, event: str) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


# --- on ranks, and the same training written out plainly: vit.ViTMAE, one AdamW per parameter


def plain(run: Path, trees: Path) -> tuple[list[float], list[dict], dict]:
    """Loss of each step, scores after each epoch, final parameters."""
    encoder, head = build_pretrained(read_pretrained(run), CPU, 48), nn.Linear(NANO.width, 3)
    for name, p in head.named_parameters():
        p.data = vit.initial_value(NANO, f"head.{name}", p.shape, SEED) * 0.01
    norm, encoder.norm = encoder.norm, nn.Identity()
    parts = nn.ModuleDict({"fc_norm": norm, "head": head}), encoder
    trained = {n: p for part in parts for n, p in part.named_parameters() if n[:4] not in UNUSED}

    def logits_of(images):
        tokens = encoder.features(data.normalize(images))
        return head(norm(tokens[:, 1:].mean(1)))

    def rate_of(name: str) -> float:
        above = {"patch_embed": 3, "cls_token": 3, "blocks.0": 2, "blocks.1": 1}
        return LAYER_DECAY ** next((k for n, k in above.items() if name.startswith(n)), 0)

    groups = [
        {
            "params": [p],
            "weight_decay": 0.05 * (p.ndim > 1 and n != "cls_token"),
            "scale": rate_of(n),
        }
        for n, p in trained.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    files, tests = data.scan(f"{trees}/train"), data.scan(f"{trees}/test")
    settings = {"img_size": 48, "patches": 36, "seed": SEED, "steps": range(STEPS)}
    loader = data.build_loader(files, global_batch=BATCH, micro_batch_size=BATCH, **settings)
    losses, scores, peak = [], [], BLR * BATCH / 256
    rates = [peak / 2, *(peak * (1 + math.cos(math.pi * i / 4)) / 2 for i in (0, 0, 1, 2, 3))]
    for step, batch in enumerate(loader):
        labels = torch.tensor([files.labels[i] for i in batch.image_ids])
        target = F.one_hot(labels, 3) * 0.9 + 0.1 / 3
        loss = -(target * logits_of(batch.image).log_softmax(1)).sum(1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), 1)
        for group in optimizer.param_groups:
            group["lr"] = rates[step] * group["scale"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 3 == 2:
            (batch,) = open_eval_loader(tests, 48, 99, 0)
            labels = torch.tensor([CLASSES.index(tests.classes[i]) for i in tests.labels])
            with torch.no_grad():
                out = logits_of(batch.images)
            top1 = (out.argmax(1) == labels).float().mean().item()
            loss = F.cross_entropy(out, labels).item()
            scores.append(dict(zip(KEYS, (len(labels), loss, top1, 1.0), strict=True)))
    return losses, scores, {n: p.detach() for n, p in trained.items()}


def runs_of_rank(run: Path, trees: Path) -> list[dict]:
    """Make all RUNS as this rank -> of each the status, and at its end parameters."""
    vit.MODELS["nano"] = NANO
    folder, rank, found = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), []
    original = train_fsdp.train_step
    for i, (name, others, stop_at) in enumerate(RUNS):
        seen: dict = {}

        def step(training, guard, *args, seen=seen, stop_at=stop_at, **asked):
            if guard.checked == stop_at and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            original(training, guard, *args, **asked)
            seen["params"] = full_parameters(training.model)

        meeting = folder / f"port{i}"
        meeting.mkdir(exist_ok=True)
        os.environ["MASTER_PORT"] = agreed_port(meeting, rank)
        argv = command(run, trees, folder / name, others)
        with patch.multiple(train_fsdp, train_step=step):
            seen["status"] = probe.main(argv)
        found.append(seen)
    return found


@pytest.mark.full
@pytest.mark.slow
def test_two_ranks_train_as_a_plain_loop_and_stops_do_not_matter(run, trees, tmp_path):
    ranks = on_ranks(2, partial(runs_of_rank, run, trees), tmp_path, 900)
    losses, scores, params = plain(run, trees)
    for (name, others, stop_at), *seen in zip(RUNS, *ranks, strict=True):
        assert [rank["status"] for rank in seen] == [0, 0], others
        if stop_at >= 0:
            continue
        found = [r["loss"] for r in records(tmp_path / name, "step")]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=0)
        for score, wanted in zip(records(tmp_path / name, "scores"), scores, strict=True):
            assert {key: score[key] for key in KEYS} == pytest.approx(wanted, rel=1e-5), others
        for rank in seen:
            for key, p in rank["params"].items():
                apart = (p - params[key]).abs()
                if key.endswith("qkv.bias"):  # the keys': rounding, which AdamW scales up
                    apart[NANO.width : 2 * NANO.width] = 0
                assert apart.max() < 1e-5, (others, key)
    assert [record["reason"] for record in records(tmp_path / "e", "end")] == ["signal", "done"]
    assert 0 < records(tmp_path / "e", "start")[1]["begin"] < STEPS


def stopped_while_scored(run: Path, trees: Path) -> int:
    """Fine-tune as this rank; rank 1 alone gets a signal when it scores its first images."""
    vit.MODELS["nano"] = NANO
    received: list[int] = []
    original = finetune.Scores.values_of

    def values_of(scores, images, indices):
        if os.environ["RANK"] == "1":
            received.append(signal.SIGTERM)
        return original(scores, images, indices)

    argv = command(run, trees, Path(os.environ["FOLDER"]) / "out", "--global-batch 2 --accum 1")
    with (
        patch.object(finetune.Scores, "values_of", values_of),
        patch.object(finetune.process, "listen_for_signals", return_value=received),
    ):
        return probe.main(argv)


@pytest.mark.full
@pytest.mark.slow
def test_a_signal_to_one_rank_ends_the_scores_of_all(run, trees, tmp_path):
    assert on_ranks(2, partial(stopped_while_scored, run, trees), tmp_path, 300) == [0, 0]
    (end,) = records(tmp_path / "out", "end")
    assert (end["reason"], end["steps"]) == ("signal", 13) and not records(
        tmp_path / "out", "scores"
    )


# --- the command, in one process


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_signal_ends_scores_early_and_the_run_saves(epoch, run, trees, tmp_path, monkeypatch):
    """They may take longer than the time that is left; after the last step all is saved."""
    received: list[int] = []
    scored: list[int] = []
    original = finetune.Scores.values_of

    def values_of(scores, images, indices):
        scored.append(len(indices))
        if len(scored) == (epoch - 1) * 8 + 1:
            received.append(signal.SIGTERM)
        return original(scores, images, indices)

    monkeypatch.setattr(finetune.process, "listen_for_signals", lambda: received)
    monkeypatch.setattr(finetune.Scores, "values_of", values_of)
    out = tmp_path / "out"
    argv = command(run, trees, out, "--global-batch 2 --accum 1")  # 8 batches of 16 images
    assert probe.main(argv) == 0
    (end,) = records(out, "end")
    steps = 12 * epoch + (epoch == 1)  # of 24 images; one more, which is saved
    assert (end["reason"], end["steps"]) == (("signal", "done")[epoch - 1], steps)
    assert checkpoint.step_of(checkpoint.list_checkpoints(out)[-1]) == steps
    assert [record["step"] for record in records(out, "scores")] == [12, 24][: 2 * (epoch - 1)]
    assert len(scored) == (5, 16)[epoch - 1]
    received.clear()
    assert probe.main(argv) == 0 and records(out, "scores")[-1]["step"] == 24


def test_test_images_that_cannot_be_read_are_named_and_none_is_refused(run, tmp_path, capsys):
    """Of twelve channels, which need no statistics: the model's own are used."""
    like = read_pretrained(run)
    like = replace(like, config=replace(like.config, channels=12))
    torch.save({"model": dict(random_weights(like).weights)}, tmp_path / "12.pth")
    tests = [tmp_path / "test" / "ab"[i % 2] / f"{i:02d}.npy" for i in range(16)]
    for path in tests:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.random.randn(12, 40, 40).astype(np.float32))
    shutil.copytree(tmp_path / "test", tmp_path / "train")
    tests[15].write_bytes(b"nothing")
    argv = command(tmp_path / "12.pth", tmp_path, tmp_path / "out", "--epochs 1 --warmup-steps 0")
    assert probe.main(argv) == 0
    assert f"1 of 16 held-out images cannot be read: {tests[15]}" in capsys.readouterr().out
    (found,) = records(tmp_path / "out", "scores")
    assert found["test_images"] == 15
    shutil.copy(tmp_path / "12.pth", tmp_path / "other.pth")
    other = [argv[0], str(tmp_path / "other.pth"), *argv[2:]]
    assert probe.main(other) == 2  # it would continue the classifier of another model
    error = capsys.readouterr().err
    assert "12.pth -> " in error and error.count("\n") == 1
    for path in tests:
        path.write_bytes(b"nothing")
    assert probe.main([*argv, "--out", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert f"none of 16 images can be read, the last: {tmp_path}" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("--test nowhere", "there is no folder nowhere: give --test the folder of images"),
        ("--img-size 33", "image size 33 is not a multiple of the patch size 8"),
        ("--tp 2", "unrecognized arguments: --tp 2"),
        ("--data {trees}/test --test {trees}/train", "classes that {trees}/test does not have: de"),
        ("--test {trees}/test/ice", "has images outside of a folder of their class"),
    ],
)
def test_a_wrong_command_gets_one_sentence(run, trees, tmp_path, capsys, wrong, sentence):
    with suppress(SystemExit):
        line = command(run, trees, tmp_path / "out", wrong.format(run=run, trees=trees))
        assert probe.main(line) == 2
    error = capsys.readouterr().err
    assert sentence.format(trees=trees) in error and error.count("\n") == 1, error
