"""downstream/finetune.py: fine-tuning in every mode equals a plain loop; what is frozen is free."""

import json
import math
import os
import shutil
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from ranks import NANO, agreed_port, full_parameters, on_ranks
from rebuild import blocks
from test_pretrained import train as pretrain
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torchvision.ops import stochastic_depth

import data
import plan
import shard
import vit
from downstream.classifier import (
    Classifier,
    ScaledBlock,
    drop_path_scales,
    initial_classifier_value,
    mix,
)
from downstream.images import open_eval_loader
from downstream.pretrained import build_pretrained, read_pretrained

CPU = torch.device("cpu")
CLASSES, BATCH, EPOCHS, BLR, LAYER_DECAY, SEED = ("desert", "ice", "ocean"), 8, 2, 0.05, 0.5, 3
ARGV = f"--global-batch {BATCH} --epochs {EPOCHS} --blr {BLR} --layer-decay {LAYER_DECAY}".split()
ARGV += f"--seed {SEED} --precision fp32 --workers 0 --device cpu --log-every 1".split()
ARGV += ["--warmup-steps", "2", "--img-size", "48", "--clip", "1"]
STEPS = EPOCHS * 3  # of 24 images

# (name, flags that decide the result, flags that do not)
FROZEN = ("--freeze-blocks 1 --drop-path 0.4", "--freeze-blocks 1 --drop-path 0.4 --pool cls")
CASES = [
    (FROZEN[0], "--mode full_shard --fsdp 1"),
    (FROZEN[1], "--mode full_shard --fsdp 2 --accum 2"),
    ("--drop-path 0.4", "--mode shard_grad_op --fsdp 2"),
    ("--freeze-blocks 2", "--mode zero1"),
]
MORE = [  # on four ranks
    (FROZEN[0], f"--mode {mode} --fsdp {fsdp}{group}")
    for mode in ("no_shard", "shard_grad_op", "full_shard", "hybrid", "hybrid_grad_op")
    for fsdp in (1, 2)
    for group in ([" --group 1", " --group 2"] if "hybrid" in mode else [""])
]
MORE += [(FROZEN[1], f"--mode {mode} --ac full") for mode in ("ddp", "shard_grad_op --fsdp 1")]
MORE += [
    ("--freeze-blocks 2", "--mode full_shard"),
    ("--drop-path 0", "--mode full_shard --fsdp 1"),
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
    """vit.ViTMAE with a linear layer, hooks for drop path, by the names of the classifier."""

    def __init__(self, run: Path, cls: bool) -> None:
        self.model, self.cls, self.scales = (
            build_pretrained(read_pretrained(run), CPU, 48),
            cls,
            None,
        )
        self.norm, self.model.norm = self.model.norm, torch.nn.Identity()
        self.head = torch.nn.Linear(NANO.width, len(CLASSES))
        for name, p in self.head.named_parameters():
            p.data = vit.initial_value(NANO, f"head.{name}", p.shape, SEED) * 0.01
        for i, block in enumerate(self.model.blocks):
            block.attn.register_forward_hook(self.scale_by(i, 0))
            block.mlp.register_forward_hook(self.scale_by(i, 1))

    def scale_by(self, i: int, branch: int):
        def hook(module, _, out):
            return out if self.scales is None else out * self.scales[:, i, branch, None, None]

        return hook

    def __call__(self, images, scales=None):
        self.scales, patches = scales, vit.patchify(data.normalize(images), 8)
        tokens = self.model.encode(patches, torch.arange(36).expand(len(images), -1))
        return self.head(self.norm(tokens[:, 0] if self.cls else tokens[:, 1:].mean(1)))

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        found = {"norm": self.norm, "head": self.head}
        found = {f"{k}.{n}": p for k, part in found.items() for n, p in part.named_parameters()}
        of_decoder = ("decoder", "mask")
        named = self.model.named_parameters()
        return found | {n: p for n, p in named if not n.startswith(of_decoder)}


def plain(run: Path, trees: Path, decisive: str) -> tuple[list[float], list[dict], dict]:
    """Loss of each step, scores after each epoch, final parameters."""
    options = dict(zip(*[iter(decisive.split())] * 2, strict=True))
    frozen, rate = int(options.get("--freeze-blocks", 0)), float(options.get("--drop-path", 0.1))
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
        out = model(batch.image, drop_path_scales(rate, 2, frozen, BATCH, SEED, step))
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
            scores.append({"test_images": 16, "test_loss": loss, "top1": top1, "top5": 1.0})
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
    import probe
    import train_fsdp

    rank, seen = int(os.environ["RANK"]), {}
    original = train_fsdp.train_step, shard.clip_grad_norm
    meeting.mkdir(parents=True, exist_ok=True)
    os.environ["MASTER_PORT"] = agreed_port(meeting, rank)

    def clip(model, *args):
        grads = {shard.original_name(n): p.grad for n, p in model.named_parameters()}
        seen["with gradient"] = {n for n, g in grads.items() if g is not None}
        seen["gradient bytes"] = bytes_of([g for g in grads.values() if g is not None])
        for unit in FSDP1.fsdp_modules(model) if isinstance(model, FSDP1) else []:
            flat = unit._handle.flat_param
            if not flat.requires_grad:
                assert flat.grad is None and getattr(flat, "_saved_grad_shard", None) is None
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
    """Stop FSDP2 by a signal in the fourth step; FSDP1 continues."""
    vit.MODELS["nano"] = NANO
    out, decisive = Path(os.environ["FOLDER"]) / "out", FROZEN[0]
    argv = [command(run, trees, out, decisive, CASES[i][1]) for i in (1, 0)]
    return [one_run(argv[0], out / "first", stop_at=3), one_run(argv[1], out / "second")]


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
        fixed = ("patch_embed", *(f"blocks.{n}." for n in range(frozen)))
        fixed = {n for n in whole if frozen and n.startswith(fixed)}
        for name in fixed:  # they have not moved; all else has
            assert torch.equal(whole[name], pretrained[name]), (case, name)
        for name in whole.keys() - fixed:
            assert name not in pretrained or not torch.equal(whole[name], pretrained[name]), name
        check_memory(world, case, fixed, whole, [rank[i] for rank in ranks])


def check_memory(world: int, case: tuple, fixed: set, whole: dict, seen: list[dict]) -> None:
    """Of all ranks together: gradients and states of what trains, and a little padding."""
    trained = 4 * sum(p.numel() for n, p in whole.items() if n not in fixed)
    mode = case[1].split()[1]
    copies = {"full_shard": 1, "shard_grad_op": 1}.get(mode, world)
    if "--group 2" in case[1]:
        copies = world // 2
    for rank in seen:
        assert not rank["with gradient"] & fixed, case
    gradients = sum(rank["gradient bytes"] for rank in seen)
    # padding of each unit (FSDP1) or parameter (FSDP2) to a multiple of the ranks
    limit = 1.03 * trained + 1000
    assert copies * trained <= gradients <= copies * limit, (case, gradients, trained)
    states = sum(rank["state bytes"] for rank in seen)
    copies = 1 if mode == "zero1" else copies
    assert 2 * copies * trained <= states <= 2 * copies * limit, (case, states, trained)


@pytest.mark.slow
def test_two_ranks_train_as_a_plain_loop_and_what_is_frozen_takes_no_memory(run, trees, tmp_path):
    check(2, CASES, run, trees, tmp_path)


@pytest.mark.slow
def test_a_stopped_run_continues_in_another_engine_as_if_it_had_not(run, trees, tmp_path):
    first, _ = on_ranks(2, partial(stop_and_continue, run, trees), tmp_path, 300)
    assert [seen["status"] for seen in first] == [0, 0]
    reasons = [record["reason"] for record in records(tmp_path / "out", "end")]
    assert reasons == ["signal", "done"]
    assert 0 < records(tmp_path / "out", "start")[1]["begin"] < STEPS
    compare(tmp_path / "out", first[1], plain(run, trees, FROZEN[0]), ("stopped",))


@pytest.mark.full
def test_four_ranks_train_as_a_plain_loop(run, trees, tmp_path):
    check(4, MORE, run, trees, tmp_path)


# --- one process


def test_the_classifier_is_the_encoder_of_the_pretrained_model(run):
    """At another image size. Without scales nothing is left out: that is how it is scored."""
    found = read_pretrained(run)
    whole, images = build_pretrained(found, CPU, 56), torch.randn(2, 3, 56, 56)
    for frozen in 0, 1:
        model = Classifier(found.config, 56, 5, "cls", frozen)
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            shape = value.shape
            value.data = initial_classifier_value(found, 0, name, shape, "cpu")
        tokens = whole.encode(vit.patchify(images, 8), torch.arange(49).expand(2, -1))
        torch.testing.assert_close(model(images), model.head(tokens[:, 0]))
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert ("cls_token" in trained) == ("blocks.0.mlp.fc1.weight" in trained) == (not frozen)
        assert {"blocks.1.mlp.fc1.weight", "norm.weight", "head.bias"} <= trained


def test_drop_path_is_that_of_torchvision_and_the_same_for_every_part_of_a_batch():
    scales = drop_path_scales(0.6, 3, 1, 4000, seed=1, step=2)
    assert scales.shape == (4000, 3, 2) and scales[:, 0].eq(1).all()  # frozen
    torch.testing.assert_close(scales.mean(0), torch.ones(3, 2), rtol=0, atol=0.06)
    torch.testing.assert_close(
        (scales == 0).float().mean((0, 2))[1:], torch.tensor([0.3, 0.6]), rtol=0, atol=0.03
    )
    assert torch.equal(scales, drop_path_scales(0.6, 3, 1, 4000, seed=1, step=2))
    assert not torch.equal(scales, drop_path_scales(0.6, 3, 1, 4000, seed=1, step=3))

    block, x = ScaledBlock(40, 4, 84), torch.randn(8, 5, 40)

    def dropped(seed: int, branch: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(seed)
        return stochastic_depth(branch, 0.5, "row")

    scale = torch.stack([dropped(seed, torch.ones(8, 1))[:, 0] for seed in (0, 1)], dim=1)
    assert scale.unique().tolist() == [0, 2]
    expected = x + dropped(0, block.attn(block.norm1(x)))
    expected = expected + dropped(1, block.mlp(block.norm2(expected)))
    torch.testing.assert_close(block(x, scale), expected)


def test_mixing_mixes_images_and_labels_alike():
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8).contiguous()
    labels = torch.arange(4)
    for alphas in (0.8, 0.0), (0.0, 1.0):
        before = torch.get_rng_state()
        mixed, targets = mix(images, labels, 4, *alphas, seed=5)
        assert torch.equal(before, torch.get_rng_state())
        # the number of an image is its label: of both the same share is the neighbour's
        means = (targets * labels).sum(1)
        torch.testing.assert_close(mixed.mean((1, 2, 3)), means, rtol=0, atol=1e-5)
        assert 0 < targets.max(1).values.min() < 1
        again = mix(images[:2], labels[:2], 4, *alphas, seed=5)[1]  # a rank with a smaller part
        assert torch.equal(again[1], targets[1])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--freeze-blocks", "3"], "--freeze-blocks 3: the model has 2 blocks"),
        (["--test", "nowhere"], "there is no folder nowhere: give --test the folder of images"),
        (["--out", "{run}"], "holds the pretrained model: give another folder"),
        (["--img-size", "33"], "image size 33 is not a multiple of the patch size 8"),
        (["--group", "2", "--mode", "ddp"], "--group is for --mode hybrid"),
        (["--data", "{trees}/test"], "has a class desert without training: --data has 2 classes"),
        (["--test", "{trees}/test/ice"], "has images outside of a folder of their class"),
    ],
)
def test_a_wrong_command_gets_one_sentence(
    run, trees, tmp_path, capsys, monkeypatch, wrong, sentence
):
    import probe
    from downstream import finetune

    monkeypatch.setattr(finetune.process, "collect", list)  # handlers of pytest's own
    argv = command(run, trees, tmp_path / "out")
    argv += [text.format(run=run, trees=trees) for text in wrong]
    if "--data" in wrong:
        argv += ["--test", f"{trees}/train"]
    with suppress(SystemExit):
        assert probe.main(argv) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1, error


def test_the_page_shows_what_the_plan_prints(capsys):
    parts = [content for _, content in blocks((ROOT / "docs/downstream.md").read_text())]
    (at,) = (i for i, content in enumerate(parts) if content.startswith("python plan.py "))
    assert plan.main(parts[at].split()[2:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert parts[at + 1] and {*parts[at + 1].strip().splitlines()} <= {*printed}
