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
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from ranks import NANO, agreed_port, full_parameters, on_ranks
from test_pretrained import train as pretrain
from torchvision.transforms import v2

import data
import probe
import shard
import train_fsdp
import vit
from downstream import finetune
from downstream.images import open_eval_loader
from downstream.pretrained import build_pretrained, random_weights, read_pretrained

CPU = torch.device("cpu")
CLASSES, BATCH, EPOCHS, BLR, LAYER_DECAY, SEED = ("desert", "ice", "ocean"), 8, 2, 0.05, 0.5, 3
ARGV = f"--global-batch {BATCH} --epochs {EPOCHS} --blr {BLR} --layer-decay {LAYER_DECAY}".split()
ARGV += f"--seed {SEED} --precision fp32 --workers 0 --device cpu --log-every 1".split()
ARGV += ["--warmup-steps", "2", "--img-size", "48", "--clip", "1"]
STEPS = EPOCHS * 3  # of 24 images

# (flags that decide the result, flags that do not)
CASES = [
    ("--freeze-blocks 1 --drop-path 0", "--mode full_shard --fsdp 1"),
    ("--freeze-blocks 1 --drop-path 0 --pool cls", "--mode full_shard --accum 2"),
    ("--drop-path 0", "--mode shard_grad_op --ac full"),
    ("--freeze-blocks 2 --drop-path 0", "--mode zero1"),
]


@pytest.fixture
def run(once, monkeypatch):
    """The folder of a pretrained `nano`."""
    monkeypatch.setitem(vit.MODELS, "nano", NANO)
    return once("pretrained", pretrain)[0]


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


# --- the same training, written out plainly: vit.ViTMAE itself, hooks, one AdamW per parameter


class Plain:
    """vit.ViTMAE with a linear layer, by the names of the classifier."""

    def __init__(self, run: Path, cls: bool) -> None:
        self.model, self.cls = build_pretrained(read_pretrained(run), CPU, 48), cls
        self.norm, self.model.norm = self.model.norm, torch.nn.Identity()
        self.head = torch.nn.Linear(NANO.width, len(CLASSES))
        for name, p in self.head.named_parameters():
            p.data = vit.initial_value(NANO, f"head.{name}", p.shape, SEED) * 0.01

    def __call__(self, images):
        patches = vit.patchify(data.normalize(images), 8)
        tokens = self.model.encode(patches, torch.arange(36).expand(len(images), -1))
        return self.head(self.norm(tokens[:, 0] if self.cls else tokens[:, 1:].mean(1)))

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        found = {"fc_norm": self.norm, "head": self.head}
        found = {f"{k}.{n}": p for k, part in found.items() for n, p in part.named_parameters()}
        of_decoder = ("decoder", "mask")
        named = self.model.named_parameters()
        return found | {n: p for n, p in named if not n.startswith(of_decoder)}


def plain(run: Path, trees: Path, decisive: str) -> tuple[list[float], list[dict], dict]:
    """Loss of each step, scores after each epoch, final parameters."""
    options = dict(zip(*[iter(decisive.split())] * 2, strict=True))
    frozen = int(options.get("--freeze-blocks", 0))
    model = Plain(run, options.get("--pool") == "cls")
    fixed = ("patch_embed", "cls_token", *(f"blocks.{i}." for i in range(frozen)))
    named = model.parameters().items()
    trained = {n: p for n, p in named if not (frozen and n.startswith(fixed))}

    def rate_of(name: str) -> float:
        above = {"patch_embed": 3, "cls_token": 3, "blocks.0": 2, "blocks.1": 1}
        return LAYER_DECAY ** next((k for n, k in above.items() if name.startswith(n)), 0)

    optimizers = {
        n: torch.optim.AdamW([p], betas=(0.9, 0.999), weight_decay=0.05 * (p.ndim > 1))
        for n, p in trained.items()
    }
    files, tests = data.scan(f"{trees}/train"), data.scan(f"{trees}/test")
    settings = {"img_size": 48, "patches": 36, "seed": SEED, "steps": range(STEPS)}
    loader = data.build_loader(files, global_batch=BATCH, local_batch=BATCH, **settings)
    losses, scores, peak = [], [], BLR * BATCH / 256
    for step, batch in enumerate(loader):
        labels = torch.tensor([files.labels[i] for i in batch.image_ids])
        out = model(batch.image)
        target = F.one_hot(labels, 3) * 0.9 + 0.1 / 3
        loss = -(target * out.log_softmax(1)).sum(1).mean()
        gradients = torch.autograd.grad(loss, list(trained.values()))
        norm = torch.stack([g.norm() for g in gradients]).norm()
        lr = (
            [peak / 2, peak][step]
            if step < 2
            else peak * (1 + math.cos(math.pi * (step - 2) / 4)) / 2
        )
        for (name, p), g in zip(trained.items(), gradients, strict=True):
            p.grad = g * (1 / (norm + 1e-6)).clamp(max=1)
            optimizers[name].param_groups[0]["lr"] = lr * rate_of(name)
            optimizers[name].step()
        losses.append(loss.item())
        if step % 3 == 2:
            (batch,) = open_eval_loader(tests, 48, 99, 0)
            labels = torch.tensor([CLASSES.index(tests.classes[i]) for i in batch.labels])
            with torch.no_grad():
                out = model(batch.images)
            top1 = (out.argmax(1) == labels).float().mean().item()
            loss = F.cross_entropy(out, labels).item()
            assert len(labels) == 16
            wanted = {"test_images": 16, "bad_test_images": 0, "test_loss": loss}
            scores.append(wanted | {"top1": top1, "top5": 1.0})
    return losses, scores, {n: p.detach() for n, p in named}


# --- on ranks


def bytes_of(tensors) -> int:
    """Bytes that these tensors hold on this rank; memory that several share counts once."""
    local = [getattr(t, "_local_tensor", t) for t in tensors]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values()
    )


def one_run(argv: list[str], meeting: Path, stop_at: int = -1) -> dict:
    """Run the command as this rank; what was seen: parameters, memory of gradients and states.

    The ranks agree on a port in a folder of their own.
    """
    rank, seen = int(os.environ["RANK"]), {}
    original = train_fsdp.train_step, shard.clip_grad_norm
    meeting.mkdir(parents=True, exist_ok=True)
    os.environ["MASTER_PORT"] = agreed_port(meeting, rank)

    def clip(model, *args):
        grads = {shard.original_name(n): p.grad for n, p in model.named_parameters()}
        seen["with gradient"] = {n for n, g in grads.items() if g is not None}
        seen["gradient bytes"] = bytes_of([g for g in grads.values() if g is not None])
        return original[1](model, *args)

    def step(training, guard, *args, **asked):
        if guard.voted == stop_at and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        original[0](training, guard, *args, **asked)
        inner = getattr(training.optimizer, "optim", training.optimizer)
        states = [t for state in inner.state.values() for t in state.values() if t.ndim]
        seen["state bytes"] = bytes_of(states)
        seen["params"] = full_parameters(training.model)

    with patch.object(train_fsdp, "train_step", step), patch.object(shard, "clip_grad_norm", clip):
        seen["status"] = probe.main(argv)
    return seen


def runs_of_rank(run: Path, trees: Path, cases: list) -> list[dict]:
    vit.MODELS["nano"] = NANO
    out = Path(os.environ["FOLDER"])
    found = []
    for i, flags in enumerate(cases):
        case = out / f"case{i}"
        found.append(one_run(command(run, trees, case, *flags), case))
    return found


def stop_and_continue(run: Path, trees: Path) -> list[dict]:
    """All in one; then stopped by a signal in the fourth step, and continued by FSDP1."""
    vit.MODELS["nano"] = NANO
    folder, decisive = Path(os.environ["FOLDER"]), "--freeze-blocks 1 --drop-path 0.4"
    seen = []
    for name, flags, stop_at in ("one", 2, -1), ("two", 2, 3), ("two", 1, -1):
        argv = command(run, trees, folder / name, decisive, f"--mode full_shard --fsdp {flags}")
        seen.append(one_run(argv, folder / f"meeting{len(seen)}", stop_at))
    return seen


def records(out: Path, event: str) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def compare(out: Path, seen: dict, expected: tuple, case: tuple) -> None:
    """A run with the plain loop: losses, parameters, scores."""
    losses, scores, params = expected
    assert seen["status"] == 0, case
    found = [r["loss"] for r in records(out, "step")]
    assert len(found) == STEPS, case
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=0)
    for score, wanted in zip(records(out, "scores"), scores, strict=True):
        assert {key: score[key] for key in wanted} == pytest.approx(wanted, rel=1e-5), case
    for name, p in seen["params"].items():
        apart = (p - params[name]).abs()
        if name.endswith("qkv.bias"):  # the keys': a gradient of rounding, which AdamW scales up
            apart[NANO.width : 2 * NANO.width] = 0
        assert apart.max() < 1e-5, (case, name, apart.max())


def check(world: int, cases: list, run: Path, trees: Path, folder: Path) -> None:
    pretrained = read_pretrained(run).weights
    expected = {decisive: plain(run, trees, decisive) for decisive in {c[0] for c in cases}}
    ranks = on_ranks(world, partial(runs_of_rank, run, trees, cases), folder, 900)
    for i, case in enumerate(cases):
        for rank in ranks:
            compare(folder / f"case{i}", rank[i], expected[case[0]], case)
        frozen = int(case[0].split()[1]) if "freeze" in case[0] else 0
        whole = ranks[0][i]["params"]
        fixed = ("patch_embed", "cls_token", *(f"blocks.{n}." for n in range(frozen)))
        fixed = {n for n in whole if frozen and n.startswith(fixed)}
        for name in fixed:  # they have not moved; all else has
            assert torch.equal(whole[name], pretrained[name]), (case, name)
        for name in whole.keys() - fixed:
            assert name not in pretrained or not torch.equal(whole[name], pretrained[name]), name
        check_memory(world, case, fixed, whole, [rank[i] for rank in ranks])


def check_memory(world: int, case: tuple, fixed: set, whole: dict, seen: list[dict]) -> None:
    """Of all ranks together: gradients and states of what trains, and a little padding."""
    trained = 4 * sum(p.numel() for n, p in whole.items() if n not in fixed)
    states = sum(rank["state bytes"] for rank in seen)
    assert 2 * trained <= states <= 2 * (1.03 * trained + 1000), (case, states, trained)
    if "--fsdp 1" in case[1]:  # which holds gradients for all parameters of a unit, or for none
        return
    copies = world if "zero1" in case[1] else 1
    for rank in seen:
        assert not rank["with gradient"] & fixed, case
    gradients = sum(rank["gradient bytes"] for rank in seen)
    assert copies * trained <= gradients <= copies * (1.03 * trained + 1000), (case, gradients)


@pytest.mark.slow
def test_two_ranks_train_as_a_plain_loop_and_what_is_frozen_takes_no_memory(run, trees, tmp_path):
    check(2, CASES, run, trees, tmp_path)


@pytest.mark.slow
def test_a_stopped_run_continues_in_another_engine_as_if_it_had_not(run, trees, tmp_path):
    """With drop path: what is left out follows from seed, step and rank."""
    first, _ = on_ranks(2, partial(stop_and_continue, run, trees), tmp_path, 300)
    assert [seen["status"] for seen in first] == [0, 0, 0]
    assert [record["reason"] for record in records(tmp_path / "two", "end")] == ["signal", "done"]
    assert 0 < records(tmp_path / "two", "start")[1]["begin"] < STEPS
    expected = [r["loss"] for r in records(tmp_path / "one", "step")]
    keys = ("test_images", "test_loss", "top1", "top5")
    scores = [{k: r[k] for k in keys} for r in records(tmp_path / "one", "scores")]
    compare(tmp_path / "two", first[2], (expected, scores, first[0]["params"]), ("stopped",))


# --- one process


def classifier(found, *options) -> finetune.Classifier:
    model = finetune.Classifier(found.config, 56, 5, *options)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        value.data = finetune.classifier_value(found, 0, name, value.shape, CPU)
    return model


def test_the_classifier_is_the_encoder_of_the_pretrained_model(run):
    """At another image size; what is frozen are the first blocks and all before."""
    found = read_pretrained(run)
    whole, images = build_pretrained(found, CPU, 56), torch.randn(2, 3, 56, 56)
    tokens = whole.encode(vit.patchify(images, 8), torch.arange(49).expand(2, -1))
    for frozen in 0, 1:
        model = classifier(found, True, frozen)
        torch.testing.assert_close(model(images), model.head(tokens[:, 0]))
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert ("cls_token" in trained) == ("blocks.0.mlp.fc1.weight" in trained) == (not frozen)
        assert {"blocks.1.mlp.fc1.weight", "fc_norm.weight", "head.bias"} <= trained


def test_drop_path_leaves_out_branches_in_training_only(run):
    """Of the last block by its share, fewer before, scaled; never of frozen blocks."""
    found, images = read_pretrained(run), torch.randn(8, 3, 56, 56)
    model, whole = classifier(found, True, 0, 0.5), classifier(found, True)
    torch.testing.assert_close(model.eval()(images), whole(images))
    torch.manual_seed(1)
    out = model.train()(images)
    torch.manual_seed(1)
    drawn = [torch.rand(8, 1, 1) for _ in range(4)]  # of each branch; the first block has a rate 0
    last = whole.blocks[1]
    last.attn.register_forward_hook(lambda *a: a[2] * (drawn[2] < 0.5) * 2)
    last.mlp.register_forward_hook(lambda *a: a[2] * (drawn[3] < 0.5) * 2)
    torch.testing.assert_close(out, whole(images))
    torch.testing.assert_close(
        classifier(found, True, 2, 0.5).train()(images), classifier(found, True)(images)
    )


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixing_is_that_of_torchvision(kind):
    seen, logits = [], torch.randn(4, 5)
    settings = {"mixup": 0.0, "cutmix": 0.0, kind: 0.8, "label_smoothing": 0.1}
    stats = data.ChannelStats((0.0,) * 3, (1.0,) * 3, "float32")
    tuning = SimpleNamespace(config=SimpleNamespace(**settings), classes=5, channel_stats=stats)
    images, labels = torch.randn(4, 3, 8, 8), torch.arange(4)
    model = lambda x: seen.append(x) or logits  # noqa: E731
    loss = finetune.build_loss(tuning)(model, (images, labels, 5))
    torch.manual_seed(5)
    torch.randint(1, ())
    theirs = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[kind](alpha=0.8, num_classes=5)
    mixed, targets = theirs(images, labels)
    assert torch.equal(seen[0], mixed) and not torch.equal(mixed, images)
    log_p = logits.log_softmax(1)
    smooth = -(0.9 * (targets * log_p).sum(1) + 0.1 * log_p.mean(1)).mean()
    torch.testing.assert_close(loss, smooth)


# --- the command, in one process


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.setattr(finetune.process, "collect", list)  # handlers of pytest's own
    return probe.main


def test_test_images_that_cannot_be_read_are_named_and_none_is_refused(
    run, trees, tmp_path, capsys, tune
):
    tests = shutil.copytree(trees / "test", tmp_path / "test")
    *others, last = sorted(tests.glob("*/*.jpg"))
    last.write_bytes(b"nothing")
    argv = command(run, trees, tmp_path / "out", f"--test {tests} --epochs 1 --warmup-steps 0")
    assert tune(argv) == 0
    assert f"1 of 16 test images cannot be read: {last}" in capsys.readouterr().out
    (found,) = records(tmp_path / "out", "scores")
    assert (found["test_images"], found["bad_test_images"]) == (15, 1)
    for path in others:
        path.write_bytes(b"nothing")
    argv[argv.index("--out") + 1] = str(tmp_path / "other")
    assert tune(argv) == 2
    error = capsys.readouterr().err
    assert (
        f"none of the 16 images in --test {tests} can be read" in error and error.count("\n") == 1
    )


def test_twelve_channels_need_no_statistics_of_the_images(run, tmp_path, tune):
    """The model's own are used."""
    like = read_pretrained(run)
    like = replace(like, config=replace(like.config, channels=12))
    torch.save({"model": dict(random_weights(like).weights)}, tmp_path / "12.pth")
    for i in range(16):
        path = tmp_path / "images" / "ab"[i % 2] / f"{i}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.random.default_rng(i).normal(size=(12, 40, 40)).astype(np.float32))
    images = ["--data", str(tmp_path / "images"), "--test", str(tmp_path / "images")]
    argv = ["finetune", str(tmp_path / "12.pth"), *images, *ARGV, "--out", str(tmp_path / "out")]
    assert tune([*argv, "--epochs", "1", "--warmup-steps", "0"]) == 0
    assert records(tmp_path / "out", "scores")[0]["test_images"] == 16


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--freeze-blocks", "3"], "--freeze-blocks 3: the model has 2 blocks"),
        (["--test", "nowhere"], "there is no folder nowhere: give --test the folder of images"),
        (["--out", "{run}"], "holds the pretrained model: give another folder"),
        (["--img-size", "33"], "image size 33 is not a multiple of the patch size 8"),
        (["--tp", "2"], "unrecognized arguments: --tp 2"),
        (["--group", "2", "--mode", "ddp"], "--group is for --mode hybrid"),
        (["--data", "{trees}/test"], "has a class desert without training: --data has 2 classes"),
        (["--test", "{trees}/test/ice"], "has images outside of a folder of their class"),
    ],
)
def test_a_wrong_command_gets_one_sentence(run, trees, tmp_path, capsys, tune, wrong, sentence):
    argv = command(run, trees, tmp_path / "out")
    argv += [text.format(run=run, trees=trees) for text in wrong]
    if "--data" in wrong:
        argv += ["--test", f"{trees}/train"]
    with suppress(SystemExit):
        assert tune(argv) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1, error
