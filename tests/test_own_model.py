"""shard.py with models that are not ours: every engine against a plain loop in one process."""

import functools
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from ranks import full_parameters, join, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F

import checkpoint
import mesh
import shard

CPU = torch.device("cpu")
FSDP_MODES = ["no_shard", "shard_grad_op", "full_shard", "hybrid", "hybrid_grad_op"]
ROWS = [("ddp", 2), ("zero1", 2)] + [(mode, fsdp) for fsdp in (1, 2) for mode in FSDP_MODES]
STEPS, BATCH = 5, 8


# --- models that nobody here wrote, and some that are awkward on purpose


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 8, 3, 2, 24, 48, num_classes=5)


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
    """Tied embedding and head, an fp32 buffer in front of a layer, a dict as output."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.register_buffer("positions", torch.linspace(-1, 1, 6).unsqueeze(1))
        self.before = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, scale: Tensor) -> dict[str, Tensor]:
        x = self.before(self.embed(tokens) + self.positions)
        means = []
        for block in self.blocks:
            x, more = block(x, scale=scale)
            means.append(more["mean"])
        return {"logits": self.head(x), "mean": torch.stack(means).mean()}


class UNet(nn.Module):
    """Convolutions with BatchNorm, stages of growing width, skip connections."""

    def __init__(self) -> None:
        super().__init__()

        def stage(before: int, after: int) -> nn.Module:
            layers = nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()
            return nn.Sequential(*layers)

        self.down = nn.ModuleList([stage(3, 8), stage(8, 12), stage(12, 16)])
        self.up = nn.ModuleList([stage(28, 12), stage(20, 8)])
        self.out = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for stage in self.down:
            x = stage(x if not kept else F.max_pool2d(x, 2))
            kept.append(x)
        for stage, skip in zip(self.up, kept[-2::-1], strict=True):
            x = stage(torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1))
        return self.out(x)


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

    def forward(self, tokens: Tensor, scale: Tensor) -> dict[str, Tensor]:
        assert self.exact.dtype == torch.float64
        x = self.before(self.embed(tokens) + self.positions)
        for block in [*self.blocks[:-1], self.last]:
            x, _ = block(x, scale=scale)
        return {"logits": self.head(x)}


def images_of(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    labels = torch.randint(5, (BATCH,), generator=draw)
    return torch.randn(BATCH, 3, 16, 16, generator=draw) + labels.view(-1, 1, 1, 1) / 4, labels


def classify(model: nn.Module, part: slice, step: int) -> Tensor:
    images, labels = (t[part] for t in images_of(step))
    return F.cross_entropy(model(images).float(), labels)


def segment(model: nn.Module, part: slice, step: int) -> Tensor:
    images, _ = (t[part] for t in images_of(step))
    return F.cross_entropy(model(images).float(), (images.sum(1) > 0).long())


def tokens_of(step: int, part: slice) -> Tensor:
    return torch.randint(30, (BATCH, 6), generator=torch.Generator().manual_seed(step))[part]


def predict(model: nn.Module, part: slice, step: int) -> Tensor:
    tokens = tokens_of(step, part)
    out = model(tokens, scale=torch.tensor(0.5))
    return F.cross_entropy(out["logits"][:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


# name: (the model, its loss for a part of the batch of a step, the classes of its blocks)
MODELS: dict[str, tuple[Callable, Callable[[nn.Module, slice, int], Tensor], set[str]]] = {
    "torchvision vit": (torchvision_vit, classify, {"EncoderBlock"}),
    "language": (Language, predict, {"Block"}),
    "frozen": (frozen_language, predict, {"Block"}),
    "aliases": (Aliases, predict, {"Block"}),
    "batch norm": (UNet, segment, {"Sequential"}),
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
    grid = mesh.build_mesh(shard.mesh_shape(mode, world, group), CPU)
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


def cases(everything: bool) -> list[tuple]:
    """(model, row, row that resumes, optimizer, wrap, dtype): all, or enough for each of them."""
    found = []
    for i, name in enumerate(MODELS):
        for j, row in enumerate(ROWS):
            optimizer = SGD if row[0] != "zero1" and (i + j) % 2 else ADAMW
            others = [r for r in ROWS if optimizer is ADAMW or r[0] != "zero1"]
            then = others[(j + 5) % len(others)]
            wrap = ("block", "root")[(i + (j + 1) // 4) % 2 if j > 1 and name != "aliases" else 0]
            if everything or (i + j) % 6 == 0 or (name == "aliases" and j in (4, 9)):
                found.append((name, row, then, optimizer, wrap, torch.float32))
            if everything and (i + j) % 2:
                found.append((name, row, then, optimizer, wrap, torch.bfloat16))
    return found


def differences(everything: bool) -> dict[tuple, tuple]:
    """On every rank: how far each case is from one process; relative, relative, absolute."""
    out, found = Path(os.environ["FOLDER"]), {}
    for i, (name, row, then, optimizer, wrap, dtype) in enumerate(cases(everything)):
        expected, values = plain(name, optimizer, STEPS)
        model, updates = sharded(
            initialised(name, dist.get_rank()), *row, optimizer, wrap=wrap, param_dtype=dtype
        )
        steps = train(name, model, updates, range(3), dtype)
        if name == "batch norm":  # each rank normalises its own part of the batch
            expected = train(name, *sharded(initialised(name), "ddp", 2, optimizer), range(STEPS))
            values = {}
        if name != "aliases":  # which PyTorch does not load into DDP
            where = checkpoint.save(out / f"case{i}", 3, model, updates)
            model, updates = sharded(initialised(name, 9), *then, optimizer, param_dtype=dtype)
            assert checkpoint.load(where, model, updates)["step"] == 3
        steps += train(name, model, updates, range(3, STEPS), dtype)
        pairs = zip(steps, expected, strict=True)
        apart = [(abs(a - c) / c, abs(b - d) / d) for (a, b), (c, d) in pairs]
        now = full_parameters(model)
        moved = max([(now[n] - value).abs().max().item() for n, value in values.items()] or [0])
        worst = *map(max, zip(*apart, strict=True)), moved
        found[name, row, then, optimizer[0].__name__, wrap, dtype] = worst
    return found


def check(found: dict[tuple, tuple]) -> None:
    for case, apart in found.items():
        allowed = (1e-5, 1e-5, 1e-5) if case[-1] == torch.float32 else (0.02, 0.05, 0.02)
        assert all(a <= b for a, b in zip(apart, allowed, strict=True)), (case, apart)


def all_differences() -> dict[tuple, tuple]:
    join()
    return differences(True)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 4])
def test_all_models_train_as_in_one_process(world, tmp_path):
    for found in on_ranks(world, all_differences, tmp_path, 900):
        check(found)


# --- values


class Meta(nn.Module):
    """Every kind of module that draws its own values, also those of its children; tied weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.norm = nn.BatchNorm1d(5)  # with integers among its buffers
        self.head = nn.Linear(8, 9)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.encoder(self.embed(x))))


def build_meta(cls=Meta) -> nn.Module:
    with torch.device("meta"):
        return cls()


def drawn_values() -> list[dict[str, Tensor]]:
    """On every rank, with a seed of its own: the values of a meta model in some rows."""
    rank = dist.get_rank()
    found = []
    for row in ROWS[::3]:
        torch.manual_seed(7 if rank == 0 else rank)
        model, _ = sharded(build_meta(), *row)
        assert torch.initial_seed() == (7 if rank == 0 else rank)
        buffers = {shard.original_name(n): b.clone() for n, b in model.named_buffers()}
        found.append(full_parameters(model) | buffers)
        assert model(torch.zeros(2, 5, dtype=torch.int64)).isfinite().all()
    return found


class Sometimes(nn.Module):
    """One of its layers is used in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.always(self.seldom(x) if step % 2 else x)


def unused_parameters() -> list[list[float]]:
    """The norms of three steps with DDP, told of unused parameters, and with FSDP2."""
    found = []
    for mode, given in (("ddp", {"find_unused_parameters": True}), ("full_shard", {})):
        torch.manual_seed(0)
        model, optimizer = sharded(Sometimes(), mode, 2, SGD, **given)
        norms = []
        for step in range(3):
            model(torch.ones(2, 4), step).square().sum().backward()
            norms.append(shard.clip_grad_norm(model).item())
            optimizer.step()
            optimizer.zero_grad()
        found.append(norms)
    return found


def unequal_ranks() -> list[str]:
    """On every rank: what is said where the ranks have other models or options."""
    rank, said = dist.get_rank(), []
    grid = mesh.build_mesh((1, 2), CPU)
    for model, ac in (
        (Language(24 + rank), "none"),
        (build_meta(Language) if rank else Language(), "none"),
        (Language(), ("none", "full")[rank]),
    ):
        with pytest.raises(RuntimeError) as caught:
            options = shard.ShardingOptions(ac=ac)
            shard.apply(model, "full_shard", grid, block_classes={Block}, options=options)
        said.append(str(caught.value))
    return said


def facts_of_two_ranks() -> dict:
    """Runs on every rank; what the tests below look at."""
    join()
    jobs = partial(differences, False), drawn_values, unused_parameters, unequal_ranks
    found = {getattr(job, "__name__", "differences"): job() for job in jobs}
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def facts(once):
    return once("facts of own models", partial(on_ranks, 2, facts_of_two_ranks))


@pytest.mark.slow
def test_models_of_others_train_as_in_one_process(facts):
    """Loss, gradient norm and parameters over 5 steps; saved after 3, resumed in another mode.

    Each rank builds its model with another seed: rank 0's values count.
    """
    for rank in facts:
        check(rank["differences"])
        assert {"language", "frozen", "aliases"} <= {case[0] for case in rank["differences"]}


@pytest.mark.slow
def test_values_drawn_by_the_modules_are_the_same_in_every_mode_and_on_every_rank(facts, single):
    torch.manual_seed(7)
    alone, _ = sharded(build_meta(), "full_shard", 2)
    expected = full_parameters(alone) | dict(alone.named_buffers())
    assert expected["encoder.layers.0.self_attn.out_proj.bias"].eq(0).all()  # its parent's choice
    assert expected["norm.running_var"].eq(1).all() and expected["embed.weight"].std() > 0.5
    for rank in facts:
        for values in rank["drawn_values"]:
            assert values.keys() == expected.keys()
            assert all(torch.equal(v, expected[n]) for n, v in values.items())


@pytest.mark.slow
def test_parameters_that_a_step_does_not_use(facts):
    for rank in facts:
        ddp, fsdp2 = rank["unused_parameters"]
        assert ddp == pytest.approx(fsdp2, rel=1e-5)


@pytest.mark.slow
def test_ranks_with_other_models_or_options_are_refused(facts):
    for rank in facts:
        assert len(rank["unequal_ranks"]) == 3
        assert all("given different models" in text for text in rank["unequal_ranks"])


# --- what is refused, in one sentence


@pytest.fixture
def single():
    mesh.init_ranks(mesh.read_ranks({}), CPU)
    yield mesh.build_mesh((1, 1), CPU)
    dist.destroy_process_group()


class NoReset(nn.Module):
    """A model whose scale has no method that would give it a value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("ids", torch.arange(3))
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))


class HalfReset(NoReset):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Twice(nn.Module):
    """One block used by two names' owners: its layer belongs to both blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.blocks[1].up = self.blocks[0].up


class Tied(nn.Module):
    """A block and the root have one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.head = nn.Linear(4, 8)
        self.head.weight = self.blocks[0].up.weight


def named_module() -> nn.Module:
    model = Language()
    model.add_module("module", nn.Linear(2, 2))
    return model


def sharded_model() -> nn.Module:
    grid = mesh.build_mesh((1, 1), CPU)
    return shard.apply(Language(), "full_shard", grid, block_classes={Block})


def with_parameter(*shape: int) -> nn.Module:
    model = Language()
    model.blocks[1].gamma = nn.Parameter(torch.ones(shape))
    return model


def options(**given) -> dict:
    return {"options": shard.ShardingOptions(**given)}


def nothing(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    raise KeyError(name)


ZEROS = {"values": lambda name, shape, device: torch.zeros(shape)}
SCALAR = {"values": lambda name, shape, device: torch.zeros(())}
# the model, the mode, other arguments; the error and the words in it that say what to do
WRONG: list[tuple[Callable, str, dict, type, str]] = [
    (Language, "fulshard", {}, ValueError, "there is no mode fulshard: use one of ddp, zero1, "),
    (Language, "full_shard", {"mesh": (2, 1)}, ValueError, "holds 1 ranks|does not hold 1 ranks"),
    (Language, "full_shard", {"mesh": ("dp", "tp")}, ValueError, "build it with shard.mesh_shape"),
    (Language, "hybrid", {"block_classes": {nn.Conv2d}}, ValueError, r"Block x 3, or set\(\)"),
    (Twice, "full_shard", {}, ValueError, "two units, blocks.0 and blocks.1: choose"),
    (Tied, "full_shard", {}, ValueError, "is in two units, .* or use mode ddp or zero1"),
    (partial(build_meta, NoReset), "ddp", {}, RuntimeError, "pass values.*, ids, scale$"),
    (partial(build_meta, HalfReset), "ddp", options(), RuntimeError, "1.table, ids$"),
    (partial(build_meta, Language), "hybrid", SCALAR, ValueError, r"the shape \(\)"),
    (
        partial(build_meta, Language),
        "ddp",
        {"values": nothing},
        RuntimeError,
        "no value to .*weight",
    ),
    (Language, "full_shard", ZEROS, ValueError, "for a model on meta, but this one has values"),
    (lambda: Language().bfloat16(), "hybrid", {}, ValueError, r"are stored in fp32: .float\(\)"),
    (
        partial(with_parameter),
        "hybrid",
        {},
        ValueError,
        r"1.gamma has the shape \(\), which cannot",
    ),
    (partial(with_parameter, 0), "hybrid", {}, ValueError, r"shape \(0,\), .* use mode ddp"),
    (named_module, "ddp", {}, ValueError, "rename the submodule module"),
    (sharded_model, "full_shard", {}, ValueError, "the model is sharded already"),
    (UNet, "hybrid", options(ac="full"), ValueError, "count each batch twice in BatchNorm"),
    (Language, "hybrid", options(fsdp=3), ValueError, "fsdp is 3, but must be 1 or 2"),
    (Language, "hybrid", options(ac="some"), ValueError, "must be 'none' or 'selective' or 'full'"),
    (Language, "hybrid", options(prefetch="backward_post"), ValueError, "in FSDP1 only"),
    (Language, "hybrid", options(wrap="auto"), ValueError, "must be 'block' or 'root'"),
    (Language, "hybrid", options(limit_all_gathers=False), ValueError, "exists in FSDP1 only"),
    (Language, "hybrid", options(bucket_cap_mb=5), ValueError, "for mode ddp and zero1, not"),
    (
        Language,
        "hybrid",
        options(find_unused_parameters=True),
        ValueError,
        "for mode ddp and zero1",
    ),
    (Language, "ddp", options(cpu_offload=True), ValueError, "hybrid_grad_op, not ddp: leave"),
    (Language, "hybrid", options(cpu_offload=True, param_dtype=torch.float16), ValueError, "fp16"),
    (Language, "zero1", options(forward_prefetch=True), ValueError, "not zero1: leave it out"),
    (
        Language,
        "full_shard",
        {"mesh": (1, 1, 1)},
        ValueError,
        "needs a mesh .'replicate', 'shard'.",
    ),
    (Language, "full_shard", {"split_block": print}, ValueError, "'tp'. that begins with .1, 1."),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_uses_get_one_sentence(single, case):
    build, mode, arguments, error, words = WRONG[case]
    arguments = dict(arguments)
    with pytest.raises(error, match=words) as caught:
        wanted = arguments.pop("mesh", (1, 1))
        if isinstance(wanted[0], str):
            grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=wanted)
        else:
            grid = mesh.build_mesh(wanted, CPU)
        model = build()
        shard.apply(model, mode, grid, **{"block_classes": blocks_of(model)} | arguments)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


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


# --- optimizers that a checkpoint refuses


def test_optimizers_that_cannot_be_saved_are_refused(single, tmp_path):
    model = Language()
    early = torch.optim.AdamW(model.parameters())
    model, _ = sharded(model, "full_shard", 2)
    with pytest.raises(ValueError, match="build it after sharding"):
        checkpoint.save(tmp_path, 1, model, early)
    model, optimizer = sharded(Language(), "zero1", 2, SGD)
    with pytest.raises(ValueError, match="only Adam and AdamW are saved, not SGD"):
        checkpoint.save(tmp_path, 1, model, optimizer)
    model, _ = sharded(Language(), "full_shard", 2)
    adam = torch.optim.Adam(model.parameters(), amsgrad=True)
    where = checkpoint.save(tmp_path, 1, model, adam)
    assert checkpoint.load(where, model, adam)["step"] == 1 and checkpoint.find_newest(tmp_path)
    with pytest.raises(checkpoint.Damaged, match="max_exp_avg_sq"):
        checkpoint.load(where, model, torch.optim.Adam(model.parameters()))
    assert checkpoint.find_newest(tmp_path / "empty") is None


# --- examples/own_model.py, in a folder with copies of what it needs


COPIES = ("shard.py", "mesh.py", "checkpoint.py")


def copies_in(folder: Path) -> Path:
    folder.mkdir()
    for name in (*COPIES, "examples/own_model.py"):
        shutil.copy(ROOT / name, folder)
    return folder


def run_example(copies: Path, jobs: list[tuple]) -> list[list[tuple[float, float]]]:
    """On every rank: (loss, gradient norm) of the steps of each job, the mean over all ranks."""
    for name in ("shard", "mesh", "checkpoint", "own_model"):
        sys.modules.pop(name, None)
    sys.path.insert(0, str(copies))
    example = importlib.import_module("own_model")
    assert example.shard.__file__ == str(copies / "shard.py")
    torch.set_num_threads(1)
    example.mesh.init_ranks(example.mesh.read_ranks(os.environ), CPU)
    example.mesh.build_mesh = functools.cache(example.mesh.build_mesh)  # as in ranks.join
    losses, norms, found = [], [], []
    entropy, clip = F.cross_entropy, example.shard.clip_grad_norm
    leave = dist.destroy_process_group

    def noted(of: list, function: Callable) -> Callable:
        def call(*args):
            of.append(value := function(*args))
            return value

        return call

    with ExitStack() as stack:  # one process group for all jobs
        patch = mock.patch.object
        stack.enter_context(patch(example.mesh, "init_ranks", lambda *_: None))
        stack.enter_context(patch(dist, "destroy_process_group", dist.barrier))
        stack.enter_context(patch(nn.functional, "cross_entropy", noted(losses, entropy)))
        stack.enter_context(patch(example.shard, "clip_grad_norm", noted(norms, clip)))
        for mode, group, fsdp, dtype, steps, out in jobs:
            example.train(mode, group, steps, out, fsdp=fsdp, param_dtype=dtype)
            means = torch.stack([loss.detach() for loss in losses])
            dist.all_reduce(means)
            means /= dist.get_world_size()
            found.append(list(zip(means.tolist(), [n.item() for n in norms], strict=True)))
            losses.clear(), norms.clear()
    leave()
    return found


def check_example(worlds: tuple[int, ...], rows: list, dtype: torch.dtype, folder: Path) -> None:
    """Two steps on each of these numbers of ranks, resumed in the next row each time."""
    tolerance, copies = 1e-5 if dtype == torch.float32 else 0.05, copies_in(folder / "copies")
    alone = [("ddp", None, 2, torch.float32, 2 * len(worlds), str(folder / "alone"))]
    ((expected,),) = on_ranks(1, partial(run_example, copies, alone), folder / "world")
    assert len(expected) == 2 * len(worlds)
    for i, world in enumerate(worlds):
        jobs = []
        for j in range(len(rows)):
            mode, fsdp = rows[(j + 7 * i) % len(rows)]
            group = max(1, world // 2) if "hybrid" in mode else None
            jobs.append((mode, group, fsdp, dtype, 2 * i + 2, str(folder / f"row{j}")))
        for rank in on_ranks(world, partial(run_example, copies, jobs), folder / f"world{i}", 600):
            for job, steps in zip(jobs, rank, strict=True):
                assert len(steps) == 2
                for found, wanted in zip(steps, expected[2 * i :], strict=False):
                    assert found == pytest.approx(wanted, rel=tolerance), job


@pytest.mark.slow
def test_the_example_in_an_empty_folder_trains_as_in_one_process(tmp_path):
    rows = [("ddp", 2), ("full_shard", 1), ("hybrid", 2)]
    check_example((4, 2), rows, torch.float32, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_example_in_every_mode_on_every_number_of_ranks(dtype, tmp_path):
    check_example((4, 2, 1), ROWS, dtype, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("how", ["python", "torchrun"])
def test_the_example_runs_by_each_launcher(how, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv = [*launcher, "own_model.py", "hybrid", "1"] if how == "torchrun" else ["own_model.py"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=copies_in(tmp_path / "copies"),
        env=env | {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("step 20  loss ")
    assert not done.stderr or how == "torchrun"


def test_the_example_is_short():
    assert len((ROOT / "examples" / "own_model.py").read_text().splitlines()) <= 60
