"""downstream/finetune.py: fine-tuning in every mode equals a plain loop; what is frozen is free."""

import json
import math
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from ranks import NANO, agreed_port, full_parameters, on_ranks
from torch import nn
from torchvision.transforms import v2

import data
import probe
import train_fsdp
import vit
from downstream import classifiers, finetune
from downstream.images import open_eval_loader
from downstream.weights import build_pretrained, random_weights, read_pretrained

CPU = torch.device("cpu")
CLASSES, BATCH, EPOCHS, BLR, LAYER_DECAY, SEED = ("desert", "ice", "ocean"), 8, 2, 0.05, 0.5, 3
ARGV = f"--global-batch {BATCH} --epochs {EPOCHS} --blr {BLR} --layer-decay {LAYER_DECAY}".split()
ARGV += f"--seed {SEED} --precision fp32 --workers 0 --device cpu --log-every 1".split()
ARGV += ["--warmup-steps", "2", "--img-size", "48", "--clip", "1"]
STEPS = EPOCHS * 3  # of 24 images
KEYS = ("test_images", "test_loss", "top1", "top5")
UNUSED = ("deco", "mask")  # parameters of the decoder

RUNS = [  # folder, frozen blocks, share of drop path, other flags, step in which a signal comes
    ("a", 1, 0, "--mode full_shard --fsdp 1", -1),
    ("b", 1, 0, "--mode full_shard --accum 2", -1),
    ("c", 0, 0, "--mode shard_grad_op --ac full", -1),
    ("d", 2, 0, "--mode zero1", -1),
    ("e", 1, 0.4, "--mode full_shard", -1),
    ("f", 1, 0.4, "--mode full_shard", 3),
    ("f", 1, 0.4, "--mode full_shard --fsdp 1", -1),
]


@pytest.fixture
def run(run, monkeypatch):
    """The folder of a pretrained `nano`."""
    monkeypatch.setattr(finetune.process, "collect", list)  # handlers of pytest's own
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


def fixed_names(names, frozen: int) -> set[str]:
    first = ("patch_embed", "cls_token", *(f"blocks.{i}." for i in range(frozen)))
    return {n for n in names if frozen and n.startswith(first)}


def plain(run: Path, trees: Path, frozen: int) -> tuple[list[float], list[dict], dict]:
    """Loss of each step, scores after each epoch, final parameters."""
    encoder, head = build_pretrained(read_pretrained(run), CPU, 48), nn.Linear(NANO.width, 3)
    for name, p in head.named_parameters():
        p.data = vit.initial_value(NANO, f"head.{name}", p.shape, SEED) * 0.01
    norm, encoder.norm = encoder.norm, nn.Identity()
    parts = nn.ModuleDict({"fc_norm": norm, "head": head}), encoder
    named = {n: p for part in parts for n, p in part.named_parameters() if n[:4] not in UNUSED}
    trained = {n: named[n] for n in named.keys() - fixed_names(named, frozen)}

    def logits_of(images):
        patches = vit.patchify(data.normalize(images), 8)
        tokens = encoder.encode(patches, torch.arange(36).expand(len(images), -1))
        return head(norm(tokens[:, 1:].mean(1)))

    def rate_of(name: str) -> float:
        above = {"patch_embed": 3, "cls_token": 3, "blocks.0": 2, "blocks.1": 1}
        return LAYER_DECAY ** next((k for n, k in above.items() if name.startswith(n)), 0)

    groups = [
        {"params": [p], "weight_decay": 0.05 * (p.ndim > 1), "scale": rate_of(n)}
        for n, p in trained.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    files, tests = data.scan(f"{trees}/train"), data.scan(f"{trees}/test")
    settings = {"img_size": 48, "patches": 36, "seed": SEED, "steps": range(STEPS)}
    loader = data.build_loader(files, global_batch=BATCH, local_batch=BATCH, **settings)
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
    return losses, scores, {n: p.detach() for n, p in named.items()}


def runs_of_rank(run: Path, trees: Path) -> list[dict]:
    """Make all RUNS as this rank -> of each the status, and at its end parameters and memory."""
    vit.MODELS["nano"] = NANO
    folder, rank, found = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), []
    original = train_fsdp.train_step
    for i, (name, frozen, drop, others, stop_at) in enumerate(RUNS):
        seen: dict = {}

        def step(training, guard, *args, seen=seen, stop_at=stop_at, **asked):
            if guard.voted == stop_at and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            original(training, guard, *args, **asked)
            inner = getattr(training.optimizer, "optim", training.optimizer)
            states = [t for state in inner.state.values() for t in state.values() if t.ndim]
            own = sum(getattr(t, "_local_tensor", t).numel() for t in states)
            seen |= {"states": own, "params": full_parameters(training.model)}

        meeting = folder / f"port{i}"
        meeting.mkdir(exist_ok=True)
        os.environ["MASTER_PORT"] = agreed_port(meeting, rank)
        decisive = f"--freeze-blocks {frozen} --drop-path {drop}"
        argv = command(run, trees, folder / name, decisive, others)
        with patch.multiple(train_fsdp, train_step=step):
            seen["status"] = probe.main(argv)
        found.append(seen)
    return found


@pytest.mark.slow
def test_two_ranks_train_as_a_plain_loop_frozen_parts_are_free_and_stops_do_not_matter(
    run, trees, tmp_path
):
    ranks = on_ranks(2, partial(runs_of_rank, run, trees), tmp_path, 900)
    pretrained = read_pretrained(run).weights
    for (name, frozen, drop, others, stop_at), *seen in zip(RUNS, *ranks, strict=True):
        assert [rank["status"] for rank in seen] == [0, 0], others
        if stop_at >= 0:
            continue
        if not drop:
            losses, scores, params = plain(run, trees, frozen)
        elif name == "e":  # with which a stopped run is compared
            losses = [r["loss"] for r in records(tmp_path / name, "step")]
            scores = [{key: r[key] for key in KEYS} for r in records(tmp_path / name, "scores")]
            params = seen[0]["params"]
        found = [r["loss"] for r in records(tmp_path / name, "step")]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=0)
        for score, wanted in zip(records(tmp_path / name, "scores"), scores, strict=True):
            assert {key: score[key] for key in KEYS} == pytest.approx(wanted, rel=1e-5), others
        fixed = fixed_names(params, frozen)
        for rank in seen:
            for key, p in rank["params"].items():
                apart = (p - params[key]).abs()
                if key.endswith("qkv.bias"):  # the keys': rounding, which AdamW scales up
                    apart[NANO.width : 2 * NANO.width] = 0
                assert apart.max() < 1e-5, (others, key)
                moved = key not in pretrained or not torch.equal(p, pretrained[key])
                assert moved == (key not in fixed), (others, key)
        # memory of both ranks: what trains, and a little padding
        numbers = sum(p.numel() for key, p in params.items() if key not in fixed)
        assert 2 * numbers <= sum(rank["states"] for rank in seen) <= 2.06 * numbers + 500, others
    assert [record["reason"] for record in records(tmp_path / "f", "end")] == ["signal", "done"]
    assert 0 < records(tmp_path / "f", "start")[1]["begin"] < STEPS


# --- one process


def classifier(found, *options) -> classifiers.Classifier:
    model = classifiers.Classifier(found.config, 56, 5, *options)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        value.data = classifiers.classifier_value(found, 0, name, value.shape, CPU)
    return model


def test_drop_path_leaves_out_branches_in_training_only(run):
    """Of the last block by its share, fewer before, scaled; never of frozen blocks."""
    found, images = read_pretrained(run), torch.randn(8, 3, 56, 56)
    model, whole = classifier(found, 0, 0.5), classifier(found)
    torch.testing.assert_close(model.eval()(images), whole(images))
    torch.manual_seed(1)
    out = model.train()(images)
    torch.manual_seed(1)
    drawn = [torch.rand(8, 1, 1) for _ in range(4)]  # of each branch; the first block has a rate 0
    last = whole.blocks[1]
    last.attn.register_forward_hook(lambda *a: a[2] * (drawn[2] < 0.5) * 2)
    last.mlp.register_forward_hook(lambda *a: a[2] * (drawn[3] < 0.5) * 2)
    torch.testing.assert_close(out, whole(images))
    torch.testing.assert_close(classifier(found, 2, 0.5).train()(images), classifier(found)(images))


@pytest.mark.parametrize("kind", [v2.MixUp, v2.CutMix])
def test_mixing_is_that_of_torchvision(kind):
    images, labels, logits = torch.randn(4, 3, 8, 8), torch.arange(4), torch.randn(4, 5)
    settings = {"mixup": 0.0, "cutmix": 0.0, kind.__name__.lower(): 0.8, "label_smoothing": 0.1}
    stats = data.ChannelStats((0.0,) * 3, (1.0,) * 3, "float32")
    tuning = SimpleNamespace(config=SimpleNamespace(**settings), classes=5, channel_stats=stats)
    model = Mock(return_value=logits)
    loss = finetune.build_loss(tuning)(model, (images, labels, 5))
    torch.manual_seed(5)
    torch.randint(1, ())
    mixed, targets = kind(alpha=0.8, num_classes=5)(images, labels)
    assert torch.equal(model.call_args[0][0], mixed) and not torch.equal(mixed, images)
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets, label_smoothing=0.1))


# --- the command, in one process


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
    for path in tests:
        path.write_bytes(b"nothing")
    assert probe.main([*argv, "--out", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert f"none of the 16 images in --test {tmp_path}" in error and error.count("\n") == 1


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
