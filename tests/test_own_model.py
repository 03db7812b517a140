"""shard.py with models that are not ours: every engine against a plain loop in one process."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from ranks import full_parameters, join, on_ranks, python
from small_model import CPU
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torchvision.models import VisionTransformer

import checkpoint
import mesh
import shard

STEPS, BATCH = 5, 8


# --- models that nobody here wrote, and some that are awkward on purpose


class Block(nn.Module):
    """Returns a tuple; its table is a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("table", torch.arange(width) / width)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = x + self.down(F.gelu(self.up(self.norm(x) + self.table.to(x.dtype)))) * scale
        return x, {"mean": x.mean()}


class Language(nn.Module):
    """Tied embedding and head, a dict as output."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.register_buffer("positions", torch.linspace(-1, 1, 6).unsqueeze(1))
        self.before = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, scale: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        x = self.before(x + self.positions.to(x.dtype))
        means = []
        for block in self.layers():
            x, more = block(x, scale=scale)
            means.append(more["mean"])
        return {"logits": self.head(x), "mean": torch.stack(means).mean()}

    def layers(self) -> list[nn.Module]:
        return [*self.blocks]


def batch_norm() -> nn.Module:
    """Stages of growing width."""

    def stage(before: int, after: int) -> nn.Module:
        convolution = nn.Conv2d(before, after, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(stage(3, 8), stage(8, 12), stage(12, 16), nn.Flatten(), nn.Linear(64, 5))


def frozen_language() -> nn.Module:
    """Partial fine-tuning: all but the last block and the layer in front is frozen."""
    model = Language()
    for name, p in model.named_parameters():
        p.requires_grad = name.startswith(("blocks.2", "before"))
    return model


class Aliases(Language):
    """Its last block has a second name, which forward uses; one of its buffers is fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.blocks[-1]
        self.register_buffer("exact", torch.full((), 1 / 3, dtype=torch.float64))

    def layers(self) -> list[nn.Module]:
        assert self.exact.dtype == torch.float64
        return [*self.blocks[:-1], self.last]


def classify(model: nn.Module, part: slice, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    labels = torch.randint(5, (BATCH,), generator=draw)
    images = torch.randn(BATCH, 3, 16, 16, generator=draw) + labels.view(-1, 1, 1, 1) / 4
    return F.cross_entropy(model(images[part]).float(), labels[part])


def predict(model: nn.Module, part: slice, step: int) -> Tensor:
    tokens = torch.randint(30, (BATCH, 6), generator=torch.Generator().manual_seed(step))[part]
    out = model(tokens, scale=torch.tensor(0.5))
    return F.cross_entropy(out["logits"][:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


# name: (the model, its loss for a part of the batch of a step, the classes of its blocks)
MODELS: dict[str, tuple[Callable, Callable[[nn.Module, slice, int], Tensor], set[str]]] = {
    "torchvision": (partial(VisionTransformer, 16, 8, 3, 2, 24, 48), classify, {"EncoderBlock"}),
    "language": (Language, predict, {"Block"}),
    "frozen": (frozen_language, predict, {"Block"}),
    "aliases": (Aliases, predict, {"Block"}),
    "batch norm": (batch_norm, classify, {"Sequential"}),
}


def initialised(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name][0]()


def blocks_of(model: nn.Module) -> set[type[nn.Module]]:
    wanted = set().union(*(names for _, _, names in MODELS.values()), {"TransformerEncoderLayer"})
    return {type(m) for m in model.modules() if type(m).__name__ in wanted}


# The epsilon is large so that gradients of nothing but rounding (a key's bias) move nothing
ADAMW = (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4})
SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})


def plain(name: str, optimizer: tuple, steps: int) -> tuple[list, dict[str, Tensor]]:
    """(loss, gradient norm) of each step over the whole batch in one process; final parameters."""
    model, found = initialised(name), []
    trained = [p for p in model.parameters() if p.requires_grad]
    update = optimizer[0](trained, **optimizer[1])
    for step in range(steps):
        loss = MODELS[name][1](model, slice(None), step)
        loss.backward()
        found.append((loss.item(), nn.utils.clip_grad_norm_(trained, 0.5).item()))
        update.step()
        update.zero_grad()
    return found, {n: p.detach() for n, p in model.named_parameters()}


def sharded(model: nn.Module, mode: str, fsdp: int, optimizer: tuple = ADAMW, **options) -> tuple:
    """The model on the ranks that there are, in groups of half of them, and its optimizer."""
    world = dist.get_world_size()
    group = max(1, world // 2) if "hybrid" in mode else None
    grid = mesh.build_mesh(mesh.mesh_shape(shard.STRATEGIES[mode].shard_over, world, group), CPU)
    options = {"param_dtype": torch.float32, **options}
    chosen, blocks = shard.ShardingOptions(fsdp=fsdp, **options), blocks_of(model)
    model = shard.apply(model, mode, grid, block_classes=blocks, options=chosen)
    trained = [p for p in model.parameters() if p.requires_grad]
    if mode == "zero1":
        return model, ZeroRedundancyOptimizer(trained, optimizer[0], **optimizer[1])
    return model, optimizer[0](trained, **optimizer[1])


def train(name: str, model, optimizer, steps: range, dtype=torch.float32) -> list:
    """(loss, gradient norm) of each step, the mean over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part, found = slice(rank * BATCH // world, (rank + 1) * BATCH // world), []
    for step in steps:
        with shard.autocast(model, CPU, dtype):
            loss = MODELS[name][1](model, part, step)
        loss.backward()
        norm = shard.clip_grad_norm(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        found.append((loss.item() / world, norm.item()))
    return found


# --- parity, and a checkpoint in the middle


FP32, BF16 = torch.float32, torch.bfloat16
# the model, mode and engine, those that resume, optimizer
CASES: list[tuple] = [
    ("torchvision", ("ddp", 2), ("hybrid", 1), ADAMW, "block", FP32),
    ("torchvision", ("hybrid_grad_op", 1), ("hybrid_grad_op", 2), ADAMW, "root", FP32),
    ("torchvision", ("shard_grad_op", 1), ("full_shard", 2), SGD, "root", BF16),
    ("language", ("hybrid", 1), ("hybrid", 2), ADAMW, "block", FP32),
    ("language", ("no_shard", 2), ("full_shard", 1), SGD, "block", FP32),
    ("language", ("no_shard", 1), ("shard_grad_op", 2), SGD, "root", BF16),
    ("frozen", ("full_shard", 1), ("full_shard", 2), ADAMW, "root", FP32),
    ("frozen", ("hybrid", 2), ("shard_grad_op", 1), ADAMW, "block", FP32),
    ("frozen", ("zero1", 2), ("hybrid_grad_op", 1), ADAMW, "block", BF16),
    ("aliases", ("shard_grad_op", 1), ("full_shard", 2), ADAMW, "block", FP32),
    ("aliases", ("full_shard", 2), ("ddp", 2), SGD, "block", FP32),
    ("aliases", ("ddp", 2), ("hybrid", 2), SGD, "block", BF16),
    ("batch norm", ("no_shard", 1), ("no_shard", 2), ADAMW, "block", FP32),
    ("batch norm", ("shard_grad_op", 2), ("zero1", 2), ADAMW, "block", FP32),
    ("batch norm", ("hybrid_grad_op", 2), ("hybrid_grad_op", 1), SGD, "root", FP32),
]


def differences(cases: list[tuple]) -> list[tuple[float, float, float]]:
    """On every rank: how far each case is from one process; relative, relative, absolute."""
    join()
    out, found = Path(os.environ["FOLDER"]), []
    for i, (name, row, then, optimizer, wrap, dtype) in enumerate(cases):
        expected, values = plain(name, optimizer, STEPS)
        model, updates = sharded(
            initialised(name, dist.get_rank()), *row, optimizer, wrap=wrap, param_dtype=dtype
        )
        steps = train(name, model, updates, range(3), dtype)
        if name == "batch norm":  # each rank normalises its own part of the batch
            expected = train(name, *sharded(initialised(name), "ddp", 2, optimizer), range(STEPS))
            values = {}
        where = checkpoint.save(out / f"case{i}", 3, model, updates)
        model, updates = sharded(initialised(name, 9), *then, optimizer, param_dtype=dtype)
        assert checkpoint.load(where, model, updates)["step"] == 3
        steps += train(name, model, updates, range(3, STEPS), dtype)
        pairs = zip(steps, expected, strict=True)
        apart = [(abs(a - c) / c, abs(b - d) / d) for (a, b), (c, d) in pairs]
        now = full_parameters(model)
        moved = max([(now[n] - value).abs().max().item() for n, value in values.items()] or [0])
        found.append((*map(max, zip(*apart, strict=True)), moved))
    dist.destroy_process_group()
    return found


# every model, every engine and both optimizers
DAILY = [CASES[i] for i in (1, 4, 8, 10, 13)]
THE_REST = [case for case in CASES if case not in DAILY]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [pytest.param(DAILY, id="daily"), pytest.param(THE_REST, id="rest", marks=pytest.mark.full)],
)
def test_models_of_others_train_as_in_one_process(tmp_path, cases):
    """Loss, gradient norm and parameters over 5 steps; saved after 3, resumed in another mode.

    Each rank builds its model with another seed: rank 0's values count.
    """
    for found in on_ranks(2, partial(differences, cases), tmp_path):
        for case, apart in zip(cases, found, strict=True):
            allowed = (1e-5, 1e-5, 1e-5) if case[-1] == FP32 else (0.02, 0.05, 0.02)
            assert all(a <= b for a, b in zip(apart, allowed, strict=True)), (case, apart)


# --- what is refused, in one sentence


def build_meta() -> nn.Module:
    with torch.device("meta"):
        return Language()


def zeros(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    return torch.zeros(shape, device=device)


def apply(model, mode, grid, values=None, options=None, blocks=None) -> nn.Module:
    blocks, options = blocks or blocks_of(model), options or shard.ShardingOptions()
    return shard.apply(model, mode, grid, block_classes=blocks, init_fn=values, options=options)


# the model, the mode, other arguments, the words that say what to do
WRONG: list[tuple[Callable, str, dict, str]] = [
    (Language, "hybrid", {"blocks": {nn.Conv2d}}, r"set\(\), or some of Block, "),
    (build_meta, "hybrid", {}, "a model on meta, and only such a model"),
    (Language, "full_shard", {"values": zeros}, "a model on meta, and only such a model"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_uses_get_one_sentence(single, case):
    build, mode, arguments, words = WRONG[case]
    with pytest.raises(ValueError, match=words) as caught:
        apply(build(), mode, single, **arguments)
    assert "\n" not in str(caught.value)


def test_what_is_on_meta_gets_its_values_once(single):
    """Tied parameters stay tied, buffers too get values, and no name is asked for twice."""
    asked = []

    def ones(name, shape, device):
        asked.append(name)
        return torch.ones(shape, device=device)

    model = apply(build_meta(), "ddp", single, ones)
    assert model.head.weight is model.embed.weight and len(set(asked)) == len(asked)
    assert all(t.eq(1).all() for t in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("ac", ["full", "selective"])
def test_recomputed_dropout_is_the_same(single, ac):
    norms = []
    for how in ("none", ac):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
        model = nn.TransformerEncoder(layer, 2)
        model, _ = sharded(model, "full_shard", 2, ac=how)
        torch.manual_seed(1)
        model(torch.ones(2, 3, 16)).square().mean().backward()
        norms.append(shard.clip_grad_norm(model).item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_blocks_are_the_outermost_modules_of_their_classes():
    outer = ["before", "blocks.0", "blocks.1", "blocks.2", "head"]  # not the layers in a block
    assert [*shard.find_blocks(Language(), {Block, nn.Linear})] == outer
    assert [*shard.find_blocks(Aliases(), {Block})] == ["blocks.0", "blocks.1", "blocks.2"]
    assert shard.find_blocks(Language(), set()) == {}


def test_an_optimizer_from_before_cannot_be_saved(single, tmp_path):
    model = Language()
    early = torch.optim.AdamW(model.parameters())
    model, _ = sharded(model, "full_shard", 2)
    with pytest.raises(ValueError, match=r"build it from the sharded model.parameters"):
        checkpoint.save(tmp_path, 1, model, early)


# --- examples/own_model.py, in a folder with copies of what it needs


def norms(printed: str) -> dict[int, float]:
    """The gradient norm, of all ranks, by step."""
    lines = [line.split() for line in printed.splitlines() if line.startswith("step ")]
    return {int(words[1]): float(words[-1]) for words in lines}


@pytest.mark.full
def test_the_example_in_an_empty_folder(tmp_path):
    """By python, and, from the checkpoint of its tenth step on, by torchrun on two ranks."""
    for name in ("shard.py", "mesh.py", "checkpoint.py", "examples/own_model.py"):
        shutil.copy(ROOT / name, tmp_path)
    alone = norms(python("own_model.py", cwd=tmp_path, alone=True))
    assert [*alone] == [*range(1, 21)]
    shutil.rmtree(tmp_path / "out" / "step_00000020")
    (tmp_path / "out" / "latest").write_text("step_00000010\n")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    two = *launcher, "own_model.py", "hybrid", "1"
    split = norms(python(*two, cwd=tmp_path, alone=True))
    assert split == pytest.approx({step: alone[step] for step in range(11, 21)}, rel=0.05)
