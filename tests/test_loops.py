"""shard.py under loops of other people: the same as in one process, or refused at once."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import full_parameters, join, on_ranks
from small_model import CPU
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F

import mesh
import shard

BATCH = 8
DAILY = [("zero1", 2), ("full_shard", 1), ("full_shard", 2)]
ALL_ROWS = [*DAILY, ("ddp", 2), ("hybrid", 1), ("hybrid", 2), ("no_shard", 1), ("no_shard", 2)]
ALL_ROWS += [("shard_grad_op", 2)]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Two heads; a call uses one of them, or both."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(width, 2) for _ in range(2)])

    def forward(self, x: Tensor, head: int | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if head is not None:
            return self.heads[head](x)
        return self.heads[0](x) + self.heads[1](x)


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


class Place:
    """Where a loop runs: this rank's part of each batch, and how a model is sharded."""

    def __init__(self, mode: str | None = None, fsdp: int = 2, **options: Any) -> None:
        self.mode = mode  # None: one process, no sharding
        self.options = shard.ShardingOptions(fsdp=fsdp, param_dtype=torch.float32, **options)
        self.rank = dist.get_rank() if mode else 0
        self.world = dist.get_world_size() if mode else 1

    def shard(self, model: nn.Module, blocks: Any = (Block,)) -> nn.Module:
        if self.mode is None:
            return model
        shard_over = shard.STRATEGIES[self.mode].shard_over
        group = self.world // 2 if shard_over == "group" else None
        grid = mesh.build_mesh(mesh.mesh_shape(shard_over, self.world, group), CPU)
        return shard.apply(model, self.mode, grid, block_classes=set(blocks), options=self.options)

    def optimizer(self, parameters: Any, kind: Any = torch.optim.AdamW, **rates: Any) -> Any:
        """An epsilon that keeps gradients of nothing but rounding from moving anything."""
        rates = rates or {"lr": 1e-2, "eps": 1e-4}
        if self.mode == "zero1":
            return ZeroRedundancyOptimizer(parameters, kind, **rates)
        return kind(parameters, **rates)

    def batch(self, step: int) -> Tensor:
        x = torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(step))
        return x[self.rank :: self.world]


def loss_of(model: nn.Module, x: Tensor, head: int | None = None) -> Tensor:
    return (model(x, head) - x[:, :2]).square().mean()


# --- loops that must train as in one process; each returns the models that it trained


def accumulate(place: Place) -> list[nn.Module]:
    """Three micro-batches a step, clipped, by a schedule."""
    model = place.shard(make())
    optimizer = place.optimizer([*model.parameters()])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(5):
        for i in range(3):
            with shard.accumulation(model, last=i == 2, uses_all=True):
                (loss_of(model, place.batch(3 * step + i)) / 3).backward()
        shard.clip_grad_norm(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [model]


def two_optimizers(place: Place) -> list[nn.Module]:
    model = place.shard(make())
    named = [*model.named_parameters()]
    heads = [p for name, p in named if "heads" in name]
    others = [p for name, p in named if "heads" not in name]
    optimizers = [place.optimizer(heads, torch.optim.SGD, lr=0.1), place.optimizer(others)]
    for step in range(5):
        loss_of(model, place.batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def evaluate(place: Place) -> list[nn.Module]:
    """Evaluated between backward and step, and between steps."""
    model = place.shard(make())
    optimizer = place.optimizer([*model.parameters()])
    for step in range(5):
        loss_of(model, place.batch(step)).backward()
        with torch.no_grad():
            model(place.batch(100))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(place.batch(200))
    return [model]


def teacher(place: Place) -> list[nn.Module]:
    """A second model follows the first, and is only evaluated: its values must not be old ones."""
    model = place.shard(make())
    slow = place.shard(make(1))
    optimizer = place.optimizer([*model.parameters()])
    for step in range(5):
        x = place.batch(step)
        with torch.no_grad():
            target = slow(x)
        (model(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(slow.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.5)
    return [model, slow]


def one_head_a_step(place: Place) -> list[nn.Module]:
    """A head is unused in every other step, on all ranks."""
    model = place.shard(make())
    optimizer = place.optimizer([*model.parameters()], torch.optim.SGD, lr=0.1)
    for step in range(5):
        loss_of(model, place.batch(step), head=step % 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def freeze(place: Place) -> list[nn.Module]:
    """The embedding is frozen before sharding; FSDP1 needs a unit that is frozen as a whole."""
    model = make()
    for p in model.blocks[0].parameters():
        p.requires_grad = False
    model = place.shard(model)
    optimizer = place.optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(5):
        loss_of(model, place.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


Loop = Callable[[Place], list[nn.Module]]
LOOPS: list[tuple[Loop, dict[str, Any]]] = [
    (accumulate, {}),
    (accumulate, {"ac": "full"}),
    (two_optimizers, {}),
    (evaluate, {}),
    (teacher, {}),
    (freeze, {}),
    (one_head_a_step, {"find_unused_parameters": True}),
]


def runs_in(loop: Loop, mode: str, fsdp: int) -> bool:
    """Tell whether a row can run a loop: see the manual for those that cannot."""
    fsdp1 = fsdp == 1
    if loop is one_head_a_step:  # FSDP1 refuses the option, and FSDP2 has it from torch 2.14 on
        return not fsdp1 and shard.applicable_options(mode, fsdp)["find_unused_parameters"]
    return not (fsdp1 and loop in (teacher, evaluate))  # it has no public way to free


def differences(rows: list[tuple[str, int]]) -> list[tuple[str, float]]:
    """On every rank: how far the parameters of each loop are from those of one process."""
    join()
    found = []
    for loop, options in LOOPS:
        expected = [dict(model.named_parameters()) for model in loop(Place())]
        for mode, fsdp in rows:
            if not runs_in(loop, mode, fsdp):
                continue
            apart = 0.0
            models = loop(Place(mode, fsdp, **options))
            for model, values in zip(models, expected, strict=True):
                for name, value in full_parameters(model).items():
                    apart = max(apart, (value - values[name]).abs().max().item())
            found.append((f"{loop.__name__} {mode} fsdp{fsdp} {options}", apart))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("world", "rows"),
    [
        pytest.param(2, DAILY, marks=pytest.mark.slow),
        pytest.param(4, ALL_ROWS, marks=pytest.mark.full),
    ],
)
def test_ordinary_loops_train_as_in_one_process(tmp_path, world, rows):
    for found in on_ranks(world, partial(differences, rows), tmp_path):
        assert len(found) > len(LOOPS)
        assert not [(case, apart) for case, apart in found if apart > 2e-5]


# --- what is refused in the first steps, or at the call


def steps(place: Place, model: nn.Module, count: int = 5, call: Any = None, **kind: Any) -> None:
    optimizer = place.optimizer([*model.parameters()], **kind)
    for step in range(count):
        loss_of(call or model, place.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def module_of_ddp() -> None:
    place = Place("ddp")
    model = place.shard(make())
    steps(place, model, call=model.module)


def edited_by_one_rank(mode: str) -> None:
    place = Place(mode)
    model = place.shard(make())
    optimizer = place.optimizer([*model.parameters()])
    for step in range(3):
        loss_of(model, place.batch(step)).backward()
        optimizer.step()
        if place.rank == 1:
            with torch.no_grad():
                next(model.parameters()).mul_(1.01)


def step_before_the_last_micro_batch(mode: str) -> None:
    place = Place(mode)
    model = place.shard(make())
    optimizer = place.optimizer([*model.parameters()])
    with shard.accumulation(model, last=False, uses_all=True):
        loss_of(model, place.batch(0)).backward()
    optimizer.step()


def other_models_on_the_ranks() -> None:
    place = Place("full_shard")
    place.shard(Net(6 + dist.get_rank()))


def other_options_on_the_ranks() -> None:
    place = Place("full_shard", ac=("none", "full")[dist.get_rank()])
    place.shard(make())


REFUSED = [
    (module_of_ddp, "replicas hold different parameters"),
    (partial(edited_by_one_rank, "ddp"), "replicas hold different parameters"),
    (partial(edited_by_one_rank, "no_shard"), "replicas hold different parameters"),
    (partial(step_before_the_last_micro_batch, "ddp"), "replicas hold different parameters"),
    (partial(step_before_the_last_micro_batch, "no_shard"), "no gradient|replicas hold different"),
    (other_models_on_the_ranks, "given different models"),
    (other_options_on_the_ranks, "given different models, modes or options"),
]


def errors() -> list[str]:
    """On every rank: what each case of REFUSED raises."""
    join()
    found = []
    for loop, _ in REFUSED:
        try:
            loop()
            found.append("nothing")
        except RuntimeError as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_what_would_train_wrongly_is_refused_on_all_ranks(tmp_path):
    for found in on_ranks(2, errors, tmp_path):
        for (loop, words), error in zip(REFUSED, found, strict=True):
            assert re.search(words, error), (loop, error)


@pytest.mark.parametrize(("mode", "fsdp"), [("full_shard", 2), ("no_shard", 2), ("ddp", 2)])
def test_a_parameter_without_a_gradient_is_refused(single, mode, fsdp):
    """Unless the loop says that some may be unused."""
    for allowed in (False, True):
        if allowed and not shard.applicable_options(mode, fsdp)["find_unused_parameters"]:
            continue
        place = Place(mode, fsdp, find_unused_parameters=allowed)
        model = place.shard(make())
        optimizer = place.optimizer([*model.parameters()])
        loss_of(model, place.batch(0), head=1).backward()
        if allowed:
            optimizer.step()
            continue
        with pytest.raises(RuntimeError, match=r"heads\.0\.\w+ has no gradient"):
            optimizer.step()


def test_a_closure_may_compute_the_gradients(single):
    place = Place("full_shard")
    model = place.shard(make())
    optimizer = place.optimizer([*model.parameters()], torch.optim.SGD, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, place.batch(0))
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("mode", ["full_shard", "hybrid_grad_op", "no_shard"])
def test_an_optimizer_from_before_is_refused(single, mode):
    place = Place("full_shard")
    model = make()
    early = place.optimizer([*model.parameters()])
    model = place.shard(model)
    loss_of(model, place.batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"built before shard\.apply: build it afterwards"):
        early.step()


def test_fsdp1_measures_the_norm_of_the_applied_model_only(single):
    for options in ({}, {"wrap": "root"}):
        place = Place("full_shard", 1, **options)
        model = place.shard(make())
        loss_of(model, place.batch(0)).backward()
        expected = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert shard.clip_grad_norm(model).item() == pytest.approx(expected.item())
        for other in (nn.Sequential(model), model.module):
            with pytest.raises(ValueError, match=r"the model that shard\.apply returned"):
                shard.clip_grad_norm(other)


def test_a_model_that_nobody_trains_is_freed(single):
    """The hooks of its first steps must not keep it."""
    import gc
    import weakref

    model = Place("full_shard").shard(make())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# --- after the third step


@contextmanager
def calls_into_shard() -> Iterator[list[str]]:
    """List the functions of shard.py that are called inside, by Python's own profiler."""
    called: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == shard.__file__:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


def calls_by_step() -> list[tuple[str, list[int]]]:
    """In each mode: how often five steps call a function of shard.py."""
    join()
    found: list[tuple[str, list[int]]] = []
    for mode in ("ddp", "full_shard"):
        place = Place(mode)
        model = place.shard(make())
        optimizer = place.optimizer([*model.parameters()])
        counts: list[int] = []
        for step in range(5):
            with calls_into_shard() as called:
                loss_of(model, place.batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            counts.append(len(called))
        found.append((mode, counts))
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_after_the_third_step_nothing_of_ours_runs(tmp_path):
    """But for the hook that asks, once a forward pass, whether FSDP2 will have a backward pass."""
    for mode, counts in on_ranks(1, calls_by_step, tmp_path)[0]:
        assert min(counts[:3]) > 1, (mode, counts)
        assert counts[-1] <= (mode == "full_shard"), (mode, counts)


# --- models and arguments that are refused before anything is sharded


def with_hook() -> nn.Module:
    model = make()
    model.embed.weight.register_hook(lambda gradient: gradient)
    return model


def with_child(name: str, module: nn.Module) -> nn.Module:
    model = make()
    model.add_module(name, module)
    return model


def with_parameter(*shape: int) -> nn.Module:
    model = make()
    model.extra = nn.Parameter(torch.zeros(shape))
    return model


def shared_between_blocks() -> nn.Module:
    model = make()
    model.blocks[1].up = model.blocks[0].up
    return model


def tied_to_the_root() -> nn.Module:
    model = make()
    model.heads[0].bias = nn.Parameter(torch.zeros(6))
    model.blocks[2].down.bias = model.heads[0].bias
    return model


WRONG: list[tuple[Callable[[], nn.Module], str, dict[str, Any], str]] = [
    (lambda: make().bfloat16(), "hybrid", {}, "not fp32: call model.float"),
    (partial(with_child, "module", nn.Linear(2, 2)), "ddp", {}, "rename the submodule `module`"),
    (with_parameter, "full_shard", {}, "extra has no rows to shard"),
    (partial(with_parameter, 0, 3), "hybrid", {"fsdp": 1}, "extra has no rows to shard"),
    (with_hook, "full_shard", {}, "has a hook, which would be lost"),
    (shared_between_blocks, "full_shard", {}, "two units, blocks.0 and blocks.1: .* or ddp"),
    (tied_to_the_root, "full_shard", {"fsdp": 1}, "is in two units, "),
    (make, "zero3", {}, "there is no mode zero3: use one of ddp, zero1"),
    (make, "ddp", {"cpu_offload": True}, "cpu_offload True does not apply to mode ddp"),
    (make, "full_shard", {"cpu_offload": True, "fsdp": 1}, "does not apply to .* of FSDP1"),
    (make, "ddp", {"wrap": "root"}, "wrap root does not apply to mode ddp"),
    (make, "full_shard", {"bucket_cap_mb": 1.0}, "bucket_cap_mb 1.0 does not apply"),
    (make, "full_shard", {"prefetch": "backward_post"}, "is for FSDP1 only"),
    (make, "full_shard", {"limit_all_gathers": False}, "does not apply to .* of FSDP2"),
    (make, "full_shard", {"fsdp": 1, "find_unused_parameters": True}, "does not apply"),
    (make, "full_shard", {"cpu_offload": True, "param_dtype": torch.float16}, "miss overflows"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_cannot_be_sharded_rightly_gets_one_sentence(single, case):
    build, mode, given, words = WRONG[case]
    options = shard.ShardingOptions(**given)
    with pytest.raises(ValueError, match=words) as caught:
        shard.apply(build(), mode, single, block_classes={Block}, options=options)
    assert "\n" not in str(caught.value)


def test_a_mesh_of_another_mode_is_refused():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = torch.testing._internal.distributed.fake_pg.FakeStore()
    dist.init_process_group("fake", rank=0, world_size=4, store=store)
    try:
        for mode, shape in (("full_shard", (2, 2)), ("ddp", (2, 2)), ("no_shard", (1, 4))):
            with pytest.raises(ValueError, match="does not fit mode"):
                shard.apply(make(), mode, mesh.build_mesh(shape, CPU), block_classes={Block})
    finally:
        dist.destroy_process_group()
