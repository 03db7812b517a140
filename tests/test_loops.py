"""Ordinary training loops around shard.apply, in every mode, against plain PyTorch in one process.

A loop is written once, in plain PyTorch. One process runs it without shard.py, over the batches of
all ranks; then each rank runs it over its own batch, with a sharded model.
"""

from __future__ import annotations

import gc
import io
import math
import random
import re
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import full_parameters, join, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import mesh
import shard

CPU = torch.device("cpu")
SWITCH = hasattr(shard.FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.14


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


class Net(nn.Module):
    """An embedding, blocks, and two heads of which a call uses one."""

    def __init__(self, inputs: int = 6, outputs: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.heads = nn.ModuleList([nn.Linear(8, outputs), nn.Linear(8, outputs)])

    def forward(self, x: Tensor, head: int = 0, task: str = "predict") -> Tensor:
        return getattr(self, task)(x, head)

    def predict(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.blocks(self.embed(x)))

    def predict_both(self, x: Tensor, head: int) -> Tensor:
        return self.predict(x, 0) + self.predict(x, 1)

    def features(self, x: Tensor, head: int) -> Tensor:
        return self.blocks(self.embed(x)) * self.embed.bias


class OneHead(Net):
    """Uses all of its parameters in every call."""

    def __init__(self, inputs: int = 6, outputs: int = 3) -> None:
        super().__init__(inputs, outputs)
        self.heads = nn.ModuleList([nn.Linear(8, outputs)])


DECAYED = {"embed.weight", "blocks.0.fc.weight", "blocks.1.fc.weight", "heads.0.weight"}


def build(kind: type[nn.Module] = OneHead, seed: int = 0, **sizes: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind(**sizes)


def batch(rank: int, step: int, width: int = 6) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


# --- how a loop runs: plainly, for all ranks, or sharded, for this one


@dataclass
class Place:
    ranks: list[int]  # whose batches this process trains on
    apply: Callable[..., nn.Module] = lambda model, **options: model
    accumulation: Callable[..., AbstractContextManager] = lambda model, last: nullcontext()
    optimizer: Callable[..., Any] = lambda parameters, kind, **rates: kind(parameters, **rates)

    def backward(self, loss_of: Callable[[int], Tensor]) -> None:
        """The mean over ranks, by DDP or FSDP if there is one rank here."""
        for rank in self.ranks:
            (loss_of(rank) / len(self.ranks)).backward()

    def backward_of(self, model: nn.Module, step: int, *arguments: Any, **options: Any) -> None:
        """The mean square of what a model makes of the batches of a step."""

        def loss_of(rank: int) -> Tensor:
            return model(batch(rank, step), *arguments, **options).square().mean()

        self.backward(loss_of)


def adamw(place: Place, parameters: Any) -> torch.optim.Optimizer:
    return place.optimizer(parameters, torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4)


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


# --- the loops: each returns its models


def evaluate(place: Place, gradients: bool = False, moved: bool = False) -> list[nn.Module]:
    """Evaluate, then build the optimizer; evaluate again, then train on, then before the end."""
    model = place.apply(build())
    if moved:  # to where it is already
        model.to("cpu")
        model.float()

    def measure() -> None:
        model.eval()
        with torch.no_grad():
            model(batch(0, 99))
        model.train()

    measure()
    optimizer = adamw(place, model.parameters())
    for step in range(4):
        place.backward_of(model, step)
        measure()  # between backward and the step, too
        if gradients:
            model(batch(0, 98))  # but no backward pass
        update(optimizer)
        measure()
    return [model]


def heads_alternate(place: Place) -> list[nn.Module]:
    """Each micro-batch uses one head."""
    model = place.apply(build(Net), unused=True)
    optimizer = adamw(place, model.parameters())
    for step in range(3):
        for i in range(2):
            with place.accumulation(model, last=i == 1):
                place.backward_of(model, 10 * step + i, head=i)
        update(optimizer)
    return [model]


def heads_by_rank(place: Place) -> list[nn.Module]:
    """Each rank uses one head, in every second micro-batch the other one."""
    model = place.apply(build(Net), unused=True, differs=True)
    optimizer = adamw(place, model.parameters())
    for step in range(3):
        for i in range(2):
            with place.accumulation(model, last=i == 1):

                def loss_of(rank: int, step: int = step, i: int = i) -> Tensor:
                    head = (rank + i) % 2
                    return model(batch(rank, step), head).mean()

                place.backward(loss_of)
        update(optimizer)
    return [model]


def teacher(place: Place, no_grad: bool = True) -> list[nn.Module]:
    """A mean teacher that is evaluated in every step, then moved towards the student."""
    student = place.apply(build())
    ema = place.apply(build(seed=1).requires_grad_(False))
    optimizer = adamw(place, student.parameters())
    for step in range(4):

        def loss_of(rank: int, step: int = step) -> Tensor:
            x = batch(rank, step)
            with torch.no_grad() if no_grad else nullcontext():
                target = ema(x)
            return F.mse_loss(student(x + 0.1), target)

        place.backward(loss_of)
        update(optimizer)
        with torch.no_grad():
            for old, new in zip(ema.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.3)
    return [student, ema]


def freeze(place: Place) -> list[nn.Module]:
    """The embedding and the first block are frozen for two steps, after an evaluation."""
    model = place.apply(build(), unused=True)
    optimizer = place.optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(5):
        with torch.no_grad():
            model(batch(0, 99))
        for name, p in model.named_parameters():
            if "embed" in name or "blocks.0" in name:
                p.requires_grad_(step not in (1, 2))
        place.backward_of(model, step)
        update(optimizer)
    return [model]


def scheduler(place: Place) -> list[nn.Module]:
    model = place.apply(build())
    optimizer = adamw(place, model.parameters())
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, 5, cycle_momentum=False)
    for step in range(4):
        place.backward_of(model, step)
        update(optimizer)
        rates.step()
    return [model]


def two_optimizers(place: Place) -> list[nn.Module]:
    """The head has an optimizer of its own, which makes a step every second time."""
    model = place.apply(build())
    named = list(model.named_parameters())
    body = adamw(place, [p for name, p in named if "heads" not in name])
    head = adamw(place, [p for name, p in named if "heads" in name])
    for step in range(4):
        place.backward_of(model, step)
        update(body)
        if step % 2:
            update(head)
    return [model]


def gan(place: Place) -> list[nn.Module]:
    """The discriminator is frozen in the generator's step, and its weights are clipped."""
    generator = place.apply(build(inputs=4, outputs=6))
    critic = place.apply(build(seed=1, outputs=1), unused=True)
    updates = [adamw(place, model.parameters()) for model in (generator, critic)]
    for step in range(3):
        critic.requires_grad_(True)

        def critic_loss(rank: int, step: int = step) -> Tensor:
            with torch.no_grad():
                made = generator(batch(rank, step, 4))
            return critic(made).mean() - critic(batch(rank, step)).mean()

        place.backward(critic_loss)
        update(updates[1])
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.2, 0.2)
        critic.requires_grad_(False)

        def generator_loss(rank: int, step: int = step) -> Tensor:
            made = generator(batch(rank, step, 4))
            return -critic(made).mean()

        place.backward(generator_loss)
        update(updates[0])
    return [generator, critic]


def edited_gradients(place: Place) -> list[nn.Module]:
    """Gradients are changed element by element between backward and the step."""
    model = place.apply(build())
    optimizer = adamw(place, model.parameters())
    for step in range(3):
        place.backward_of(model, step)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)
        update(optimizer)
    return [model]


def edited_weights(place: Place) -> list[nn.Module]:
    """Whole rows of a weight are normalised between steps, after an evaluation."""
    model = place.apply(build())
    optimizer = adamw(place, model.parameters())
    for step in range(3):
        place.backward_of(model, step)
        update(optimizer)
        with torch.no_grad():
            model(batch(0, 99))
            whole: Any = nullcontext()
            if isinstance(model, FullyShardedDataParallel):
                whole = FullyShardedDataParallel.summon_full_params(model)
            with whole:
                for name, p in model.named_parameters():
                    if "heads" in name and name.endswith("weight"):
                        p.copy_(F.normalize(p, dim=-1))
    return [model]


def other_method(place: Place) -> list[nn.Module]:
    """Another method is called by forward."""
    model = place.apply(build(Net), unused=True)
    # SGD without momentum: the heads are not used, and FSDP1 gives them a gradient of zero
    optimizer = place.optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(3):
        place.backward_of(model, step, task="features")
        update(optimizer)
    return [model]


def two_calls(place: Place) -> list[nn.Module]:
    """Two calls with gradients and one without before a backward pass."""
    model = place.apply(build())
    optimizer = adamw(place, model.parameters())
    for step in range(3):

        def loss_of(rank: int, step: int = step) -> Tensor:
            out = [model(batch(rank, step)), model(batch(rank, step + 10))]
            with torch.no_grad():
                target = model(batch(rank, step + 20))
            return F.mse_loss(out[0], target) + F.mse_loss(out[1], target)

        place.backward(loss_of)
        update(optimizer)
    return [model]


def zero_grad_after_the_call(place: Place, set_to_none: bool = True) -> list[nn.Module]:
    """The model clears its gradients between a call and its backward pass."""
    model = place.apply(build())
    optimizer = place.optimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        outputs = [model(batch(rank, step)) for rank in place.ranks]
        model.zero_grad(set_to_none)
        for out in outputs:
            (out.square().mean() / len(outputs)).backward()
        optimizer.step()
    return [model]


def generator_cleared_after_its_call(place: Place) -> list[nn.Module]:
    """As in PyTorch's tutorial of a GAN: the generator is called, then the discriminator steps."""
    generator = place.apply(build(inputs=4, outputs=6))
    discriminator = place.apply(build(seed=1))
    optimizers = [
        place.optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        for model in (generator, discriminator)
    ]
    for step in range(3):
        fakes = {rank: generator(batch(rank, step, 4)) for rank in place.ranks}

        def real_and_fake(rank: int, step: int = step, fakes: Any = fakes) -> Tensor:
            both = torch.cat([batch(rank, step + 10), fakes[rank].detach()])
            return discriminator(both).square().mean()

        def fooled(rank: int, fakes: Any = fakes) -> Tensor:
            return (discriminator(fakes[rank]) - 1).square().mean()

        discriminator.zero_grad()
        place.backward(real_and_fake)
        optimizers[1].step()
        generator.zero_grad()
        place.backward(fooled)
        optimizers[0].step()
    return [generator, discriminator]


class OnADictionary(Block):
    """Writes into the dictionary that it is given, and returns it."""

    def forward(self, state: Any) -> Any:
        state["x"] = super().forward(state["x"])
        return state


class PassesADictionary(OneHead):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(OnADictionary(), OnADictionary())

    def forward(self, x: Any, *_: Any) -> Tensor:
        state = self.blocks({"x": self.embed(x.pop("image"))})
        return self.heads[0](state["x"]) * x["weight"]


def dictionaries(place: Place) -> list[nn.Module]:
    """The model takes a part out of its input, and its blocks pass a dictionary along."""
    model = place.apply(build(PassesADictionary))
    optimizer = adamw(place, model.parameters())
    for step in range(3):

        def loss_of(rank: int, step: int = step) -> Tensor:
            return model({"image": batch(rank, step), "weight": 2}).square().mean()

        place.backward(loss_of)
        update(optimizer)
    return [model]


def adapters(place: Place) -> list[nn.Module]:
    """All but the biases of the blocks and the head is frozen before apply, as with LoRA."""
    model = build()
    for name, p in model.named_parameters():
        p.requires_grad_("heads" in name or "fc.bias" in name)
    model = place.apply(model)
    optimizer = adamw(place, [p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        place.backward_of(model, step)
        update(optimizer)
    return [model]


def checkpoint_around(place: Place) -> list[nn.Module]:
    """A checkpoint is around the whole model."""
    model = place.apply(build())
    optimizer = adamw(place, model.parameters())
    for step in range(3):

        def loss_of(rank: int, step: int = step) -> Tensor:
            x = batch(rank, step).requires_grad_()
            return checkpoint(model, x, use_reentrant=False).square().mean()

        place.backward(loss_of)
        update(optimizer)
    return [model]


def fp64_batches(place: Place) -> list[nn.Module]:
    """The model itself rounds its inputs, which are of fp64; FSDP leaves them to it."""
    model = place.apply(build(OfFp64))
    optimizer = adamw(place, model.parameters())
    for step in range(3):
        for rank in place.ranks:
            x = batch(rank, step).double() / 3
            (model(x).square().mean() / len(place.ranks)).backward()
        update(optimizer)
    return [model]


class OfFp64(OneHead):
    """Computes a part of its input in fp64: 1e9 (x - rounded x), which fp32 has not."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        rest = (x - x.float().double()) * 1e6
        return super().forward((x + rest).float())


def returned_parameter(place: Place) -> list[nn.Module]:
    """A call without gradients returns a parameter, which is used after it."""
    model = place.apply(build(ReturnsEmbedding))
    optimizer = adamw(place, model.parameters())
    for step in range(3):
        with torch.no_grad():
            _, code = model(batch(0, 50 + step))
        for rank in place.ranks:
            loss = (model(batch(rank, step))[0] - code.detach().mean()).square().mean()
            (loss / len(place.ranks)).backward()
        update(optimizer)
    return [model]


class ReturnsEmbedding(OneHead):
    def forward(self, x: Tensor, *_: Any) -> Any:
        return super().forward(x), self.embed.weight


LOOPS: dict[str, Callable[[Place], list[nn.Module]]] = {
    "evaluate": evaluate,
    "evaluate with gradients": partial(evaluate, gradients=True),
    "evaluate with gradients, moved": partial(evaluate, gradients=True, moved=True),
    "zero_grad after the call": zero_grad_after_the_call,
    "zeros after the call": partial(zero_grad_after_the_call, set_to_none=False),
    "a generator cleared after its call": generator_cleared_after_its_call,
    "dictionaries": dictionaries,
    "heads alternate": heads_alternate,
    "heads by rank": heads_by_rank,
    "teacher": teacher,
    "teacher, frozen only": partial(teacher, no_grad=False),
    "freeze": freeze,
    "scheduler": scheduler,
    "two optimizers": two_optimizers,
    "gan": gan,
    "edited gradients": edited_gradients,
    "edited weights": edited_weights,
    "other method": other_method,
    "two calls": two_calls,
    "adapters": adapters,
    "checkpoint around the model": checkpoint_around,
    "batches in fp64": fp64_batches,
    "a returned parameter": returned_parameter,
}
NO_BACKWARD = "evaluate with gradients"  # after the last call before a step: no FSDP1
MODES = [(mode, fsdp) for mode in shard.STRATEGIES for fsdp in (1, 2)]
ROWS = [row for row in MODES if row not in (("ddp", 1), ("zero1", 1))]
DAILY = [("ddp", 2), ("shard_grad_op", 1), ("hybrid_grad_op", 2)]


def apply_in(mode: str, fsdp: int, model: nn.Module, **needs: bool) -> nn.Module:
    """The model in a mode; `needs` says what the loop does: unused, or differs by rank."""
    engine = shard.STRATEGIES[mode].engine
    options: dict[str, Any] = {}
    if engine == "fsdp":
        options["fsdp"] = fsdp
    if (engine != "fsdp" and needs.get("unused")) or (fsdp == 2 and needs.get("differs")):
        options["find_unused_parameters"] = True
    world = dist.get_world_size()
    group = world // 2 if "hybrid" in mode else None
    return shard.apply(
        model,
        mode,
        mesh.build_mesh(shard.mesh_shape(mode, world, group), CPU),
        block_classes={Block},
        options=shard.ShardingOptions(param_dtype=torch.float32, **options),
    )


def zero1_optimizer(parameters: Any, kind: type, **rates: Any) -> torch.optim.Optimizer:
    options = {"parameters_as_bucket_view": True}
    return ZeroRedundancyOptimizer(list(parameters), kind, **options, **rates)


def compare_loops(rows: list[tuple[str, int]]) -> dict[tuple, float | str]:
    """On every rank: how far each loop is from plain PyTorch, in each mode; or its error."""
    join()
    if dist.get_world_size() == 2:
        refuse_loops()
        evaluate_in_bf16()
        step_in_a_hook()
        average_by_torch()
        decay_by_original_names()
        train_with_whole_tensors()
        measure_by_a_method()
        follow_by_a_method()
        go_on_after_an_exception()
        call_methods_in_methods()
        name_after_compiling()
        prune_in_ddp()
        train_on_one_rank()
        use_up_models()
        keep_attributes_of_parameters()
    expected = divide_by_the_largest(Place(list(range(dist.get_world_size())))).state_dict()
    now = full_parameters(divide_by_the_largest(place_of("full_shard")))
    for name, value in expected.items():
        torch.testing.assert_close(now[name], value)
    expected = train_by_muon(Place(list(range(dist.get_world_size())))).state_dict()
    now = full_parameters(train_by_muon(place_of("full_shard")))
    for name, value in expected.items():  # it computes in bf16; three steps change 0.06
        torch.testing.assert_close(now[name], value, rtol=0, atol=0.015)
    found: dict[tuple, float | str] = {}
    for name, loop in LOOPS.items():
        expected = [
            {n: p.detach() for n, p in model.named_parameters()}
            for model in loop(Place(list(range(dist.get_world_size()))))
        ]
        for mode, fsdp in rows:
            fsdp2 = fsdp == 2 and shard.STRATEGIES[mode].engine == "fsdp"
            if name == "heads by rank" and fsdp2 and not SWITCH:
                continue
            try:
                apart = 0.0
                for model, values in zip(loop(place_of(mode, fsdp)), expected, strict=True):
                    now = full_parameters(model)
                    assert now.keys() == values.keys()
                    for key, value in values.items():
                        apart = max(apart, (now[key] - value).abs().max().item())
                found[name, mode, fsdp] = apart
            except Exception as error:
                found[name, mode, fsdp] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return found


def check_loops(world: int, rows: list[tuple[str, int]], folder: Any) -> None:
    for found in on_ranks(world, partial(compare_loops, rows), folder):
        for (name, mode, fsdp), apart in found.items():
            if fsdp == 1 and name.startswith(NO_BACKWARD):
                assert "FSDP1 needs a backward() before a step" in str(apart), (name, mode)
            else:
                assert isinstance(apart, float) and apart < 1e-5, (name, mode, fsdp, apart)
        assert len(found) >= len(rows) * (len(LOOPS) - 1)


# --- loops that are refused, by one sentence, before a wrong step


class MovesTeacher(OneHead):
    """Moves a teacher inside of its own forward pass; `how` writes to the teacher."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.ema = nn.Linear(6, 8).requires_grad_(False)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        out = super().forward(x) + self.ema(x).mean()
        with torch.no_grad():
            for old, new in zip(self.ema.parameters(), self.embed.parameters(), strict=True):
                if self.how == "lerp_":
                    old.lerp_(new, 0.5)
                elif self.how == "data.mul_":
                    old.data.mul_(0.5).add_(new.detach().data, alpha=0.5)
                else:
                    old.data = old.data * 0.5 + new.data * 0.5
        return out


class Clamps(Block):
    """Changes its trained weight in its own forward pass; `how` is a way of writing it."""

    def __init__(self, how: str = "data.clamp_") -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "data.clamp_":
            self.fc.weight.data.clamp_(-0.1, 0.1)
        else:
            self.fc.weight.data = self.fc.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


class Tempered(OneHead):
    """Divides by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return super().forward(x) / self.temperature


class Hidden:
    """Not a container that PyTorch knows."""

    def __init__(self, out: Tensor) -> None:
        self.out = out


class ReturnsAnObject(OneHead):
    def forward(self, x: Tensor, *_: Any) -> Any:
        return Hidden(super().forward(x))


class MakesWeights(OneHead):
    """Its head makes the weights of a block."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        made = {"fc.bias": self.heads[0](self.embed(x)).mean() * torch.ones(8)}
        return torch.func.functional_call(self.blocks[0], made, (self.embed(x),))


class Counting(Block):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


def sharded(mode: str, model: nn.Module, blocks: Any = (Block,), **options: Any) -> nn.Module:
    world = dist.get_world_size()
    grid = mesh.build_mesh(shard.mesh_shape(mode, world), CPU)
    given = shard.ShardingOptions(**({"param_dtype": torch.float32} | options))
    return shard.apply(model, mode, grid, block_classes=set(blocks), options=given)


def three_steps(model: nn.Module, call: Callable[[Tensor, int], Tensor] | None = None) -> None:
    """`call(batch, step)` returns the outputs: without it, `model(batch)`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = batch(dist.get_rank(), step)
        out = model(x) if call is None else call(x, step)
        out.mean().backward()
        update(optimizer)


def method_of_ddp() -> None:
    model = sharded("ddp", build(Net), find_unused_parameters=True)

    def features(x: Tensor, step: int) -> Tensor:
        return model.module.features(x, 0)

    three_steps(model, features)


def method_of_ddp_after_a_step() -> None:
    model = sharded("ddp", build())

    def in_turn(x: Tensor, step: int) -> Tensor:
        return model(x) if step % 2 == 0 else model.module(x)

    three_steps(model, in_turn)


def unfrozen_in_ddp() -> None:
    model = build()
    model.embed.requires_grad_(False)
    model = sharded("ddp", model)
    model.requires_grad_(True)
    three_steps(model)


def frozen_in_ddp() -> None:
    model = sharded("ddp", build())
    model.module.embed.requires_grad_(False)
    three_steps(model)


def heads_by_rank_without_the_option() -> None:
    model = sharded("full_shard", build(Net))

    def own_head(x: Tensor, step: int) -> Tensor:
        return model(x, dist.get_rank())

    three_steps(model, own_head)


def heads_by_rank_in_one_micro_batch() -> None:
    """All ranks have used both heads when the step is made."""
    model = sharded("no_shard", build(Net))

    def both(x: Tensor, step: int) -> Tensor:
        model(x, dist.get_rank()).mean().backward()
        return model(x, 1 - dist.get_rank())

    three_steps(model, both)


def two_backward_passes(mode: str, **options: Any) -> None:
    model = sharded(mode, build(), **options)
    first = model(batch(dist.get_rank(), 0)).mean()
    second = model(batch(dist.get_rank(), 1)).mean()
    first.backward()
    second.backward()


def two_losses(mode: str, **options: Any) -> None:
    model = sharded(mode, build(), **options)
    out = model(batch(dist.get_rank(), 0))
    out.mean().backward(retain_graph=True)
    out.square().mean().backward()


def edited_while_gathered(fsdp: int) -> None:
    model = sharded("full_shard", build(), fsdp=fsdp)
    model(batch(0, 0))
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)
    three_steps(model)


def written_into_data() -> None:
    model = sharded("full_shard", build())
    three_steps(model)
    for p in model.parameters():
        p.data = p.data * 0.9
    three_steps(model)


def evaluated_with_averages() -> None:
    """As many do: `.data` is exchanged, and exchanged back."""
    model = sharded("full_shard", build(), fsdp=1)
    three_steps(model)
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.clone() * 0.9
    with torch.no_grad():
        model(batch(0, 99))
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data = value


def assigned_in_ddp() -> None:
    model = sharded("ddp", build())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    three_steps(model)


def trained_with_a_loose_parameter() -> None:
    model = sharded("ddp", build())
    loose = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    optimizer.step()


def edited_by_one_rank() -> None:
    model = sharded("ddp", build())
    with torch.no_grad():
        model.module.embed.bias.add_(dist.get_rank())
    three_steps(model)


def edited_by_one_rank_later() -> None:
    model = sharded("ddp", build())
    three_steps(model)
    with torch.no_grad():
        model.module.embed.bias.add_(dist.get_rank())
    with patch.object(shard, "LATER_STEPS", 5):
        three_steps(model)


def converted_in_ddp() -> None:
    model = sharded("ddp", build()).double()
    model(batch(0, 0).double())


def converted_and_back_in_ddp() -> None:
    model = sharded("ddp", build())
    three_steps(model)
    three_steps(model.double().float())


def step_in_a_hook_of_ddp() -> None:
    model = sharded("ddp", build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module.embed.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    model(batch(0, 0)).mean().backward()


def loss_with_parameters() -> None:
    model = sharded("full_shard", build())
    criterion = build(Block, width=3)
    loss_optimizer = torch.optim.SGD(criterion.parameters(), lr=0.1)

    def score(x: Tensor, step: int) -> Tensor:
        if step:
            loss_optimizer.step()
        return criterion(model(x))

    three_steps(model, score)


def probe_of_a_frozen_model() -> None:
    """The sharded model makes no step."""
    backbone = sharded("full_shard", build().requires_grad_(False))
    head = build(Block, width=3)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for step in range(2):
        with torch.no_grad():
            features = backbone(batch(dist.get_rank(), step))
        head(features).mean().backward()
        update(optimizer)


def loss_with_parameters_from_the_fifth_step() -> None:
    model = sharded("ddp", build())
    three_steps(model)
    three_steps(model)
    criterion = build(Block, width=3)
    optimizer = torch.optim.SGD(criterion.parameters(), lr=0.1)
    for step in range(2):
        criterion(model(batch(dist.get_rank(), step))).mean().backward()
        update(optimizer)


def clamped_in_forward(mode: str, how: str, **options: Any) -> None:
    net = nn.Sequential(nn.Linear(6, 8), Clamps(how), Clamps(how))
    three_steps(sharded(mode, net, {Clamps}, **options))


class TemperedBlock(Block):
    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


def attribute_of_the_wrapper(mode: str, **options: Any) -> None:
    model: Any = sharded(mode, Tempered(), **options)
    model.temperature = 0.5
    three_steps(model)


def attribute_of_a_wrapped_block(mode: str, **options: Any) -> None:
    model: Any = build()
    model.blocks[1] = TemperedBlock()
    model = sharded(mode, model, {Block, TemperedBlock}, **options)
    getattr(model, "module", model).blocks[1].temperature = 0.5
    three_steps(model)


def keep_attributes_of_parameters() -> None:
    """From which a loop builds its parameter groups."""
    for mode, fsdp in ROWS:
        with torch.device("meta"):
            on_meta = build(Net)
        for model, init_fn in ((build(Net), None), (on_meta, zeros)):
            model.heads[1].weight = model.heads[0].weight
            for name, p in model.named_parameters():
                p.from_name = name
            options = {"ac": "full"}
            if shard.STRATEGIES[mode].engine == "fsdp":
                options["fsdp"] = fsdp
            grid = mesh.build_mesh(shard.mesh_shape(mode, 2, 2 if "hybrid" in mode else None), CPU)
            given = shard.ShardingOptions(param_dtype=torch.float32, **options)
            blocks = {Block}
            model = shard.apply(
                model, mode, grid, block_classes=blocks, init_fn=init_fn, options=given
            )
            for name, p in model.named_parameters():
                assert p.from_name == shard.original_name(name), (mode, fsdp)


def zeros(name: str, shape: torch.Size, *, device: torch.device) -> Tensor:
    return torch.zeros(shape, device=device)


def accumulated_without_a_last() -> None:
    model = sharded("ddp", build())
    three_steps(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shard.accumulation(model, last=False):
        model(batch(dist.get_rank(), 0)).mean().backward()
    optimizer.step()


def hidden_in_an_object() -> None:
    model = sharded("full_shard", ReturnsAnObject(), blocks=())
    three_steps(model, lambda x, step: model(x).out)


def weights_made_for_a_block() -> None:
    three_steps(sharded("full_shard", MakesWeights()))


def norm_of_a_part() -> None:
    model: Any = sharded("full_shard", build(), fsdp=1)
    shard.clip_grad_norm(model.module.heads)


def plain_names_into_ddp() -> None:
    sharded("ddp", build()).load_state_dict(build().state_dict(), strict=False)


def written_into_data_of_zero1() -> None:
    model = sharded("zero1", build())
    kind = torch.optim.SGD
    options = {"parameters_as_bucket_view": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1, **options)
    for step in range(6):
        model(batch(dist.get_rank(), step)).mean().backward()
        if step == 4:
            for p in model.parameters():
                p.data = p.data * 0.9
        update(optimizer)


def stateless_call() -> None:
    model = sharded("ddp", build())
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.func.functional_call(model, values, (batch(0, 0),))


def gradient_of_the_input() -> None:
    model = sharded("no_shard", build(), fsdp=1)

    def along(x: Tensor, step: int) -> Tensor:
        (towards,) = torch.autograd.grad(model(x.requires_grad_()).mean(), x)
        return model((x + towards).detach())

    three_steps(model, along)


def gradient_penalty() -> None:
    """As of WGAN-GP, in every step: FSDP1 would go on with views of its parameters."""
    model = sharded("no_shard", build(), fsdp=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = batch(dist.get_rank(), step).requires_grad_(True)
        out = model(x).mean()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        (out + gradient.square().mean()).backward()
        update(optimizer)


def sharded_twice() -> None:
    model = build()
    model.blocks[0] = sharded("full_shard", model.blocks[0], blocks=())
    sharded("full_shard", model)


def block_twice_in_bf16() -> None:
    net = build()
    net.blocks = nn.Sequential(net.blocks[0], net.blocks[0])
    model = shard.apply(
        net,
        "full_shard",
        mesh.build_mesh((1, 2), CPU),
        block_classes={Block},
        options=shard.ShardingOptions(fsdp=1),
    )
    three_steps(model)


def adafactor_of_fsdp1() -> None:
    model = sharded("full_shard", build(), fsdp=1)
    torch.optim.Adafactor(model.parameters()).step()


def lbfgs_of_zero1() -> None:
    model = sharded("zero1", build())
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.LBFGS).step(lambda: 0.0)


class ByNorms(torch.optim.Optimizer):
    """Divides a gradient by its norm (as LARS and LAMB do), or all by the norm of all (Prodigy)."""

    def __init__(self, params: Any, lr: float, of_all: bool = False) -> None:
        super().__init__(params, {"lr": lr, "of_all": of_all})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            norms = [p.grad.norm() for p in group["params"]]
            for p, norm in zip(group["params"], norms, strict=True):
                if group["of_all"]:
                    norm = torch.stack(norms).norm()
                p.add_(p.grad / norm, alpha=-group["lr"])


def train_by_norms(place: Place, of_all: bool, lr: float = 0.1) -> nn.Module:
    model = place.apply(build())
    optimizer = place.optimizer(model.parameters(), ByNorms, lr=lr, of_all=of_all)
    torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=2)
    for step in range(3):
        place.backward_of(model, step)
        update(optimizer)
    return model


def place_of(mode: str, fsdp: int = 2) -> Place:
    place = Place([dist.get_rank()], partial(apply_in, mode, fsdp), shard.accumulation)
    if mode == "zero1":
        place.optimizer = zero1_optimizer
    return place


def by_norms(mode: str, fsdp: int, of_all: bool) -> None:
    train_by_norms(place_of(mode, fsdp), of_all)


def train_with_whole_tensors() -> None:
    """DTensors, and whatever is not divided, give an optimizer the norms of whole tensors."""
    for of_all in (False, True):
        expected = train_by_norms(Place([0, 1]), of_all).state_dict()
        rows = [("ddp", 2), ("full_shard", 2), ("hybrid_grad_op", 2), ("no_shard", 1)]
        if not of_all:
            rows.append(("zero1", 2))
        for mode, fsdp in rows:
            now = full_parameters(train_by_norms(place_of(mode, fsdp), of_all))
            for name, value in expected.items():
                torch.testing.assert_close(now[name], value, msg=f"{mode} {fsdp} {of_all} {name}")


class ByLargest(torch.optim.Optimizer):
    """Divides a gradient by its largest element, which an empty tensor does not have."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.abs().max(), alpha=group["lr"])


def divide_by_the_largest(place: Place) -> nn.Module:
    model = place.apply(build(outputs=4))  # no rank of four has an empty shard
    optimizer = place.optimizer(model.parameters(), ByLargest, lr=0.01)
    for step in range(3):
        place.backward_of(model, step)
        update(optimizer)
    return model


def train_by_muon(place: Place) -> nn.Module:
    model = place.apply(build(outputs=4))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = place.optimizer(matrices, torch.optim.Muon, lr=0.02)
    for step in range(3):
        place.backward_of(model, step)
        optimizer.step()
        model.zero_grad()
    return model


class ByOneNumber(torch.optim.Optimizer):
    """Computes its rate from numbers that .item() makes of sums, each of a rank's own part."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = math.sqrt(sum(p.grad.square().sum().item() for p in group["params"]))
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / norm)


def by_one_number() -> None:
    model = sharded("full_shard", build())
    optimizer = ByOneNumber(model.parameters(), lr=0.1)
    model(batch(dist.get_rank(), 0)).mean().backward()
    with suppress(RuntimeError):
        optimizer.step()
    optimizer.step()  # it is refused each time


class ByRatios(torch.optim.Optimizer):
    """As LARS: each tensor's rate is a ratio of two norms, computed by .item()."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm().item() / (p.grad.norm().item() + 1e-6)
                p.sub_(p.grad, alpha=group["lr"] * ratio)


def by_ratios(mode: str) -> None:
    model = sharded(mode, build())
    optimizer = ByRatios(model.parameters(), lr=0.1)
    model(batch(dist.get_rank(), 0)).mean().backward()
    optimizer.step()


def by_shape(fsdp: int, kind: str) -> None:
    """An optimizer that treats small matrices like vectors, as FSDP1's parts of tensors."""
    timm_optim = pytest.importorskip("timm.optim")
    model = sharded("full_shard", build(), fsdp=fsdp)
    optimizer = timm_optim.create_optimizer_v2([*model.parameters()], opt=kind, lr=0.01)
    model(batch(dist.get_rank(), 0)).mean().backward()
    optimizer.step()


def measure_by_a_method() -> None:
    """A method given to register_fsdp_forward_method, called without gradients, changes nothing."""
    for mode in ("full_shard", "no_shard"):
        ends = []
        for measured in (False, True):
            model = sharded(mode, build(Net))
            shard.fsdp.register_fsdp_forward_method(model, "features")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                model(batch(dist.get_rank(), step), task="predict_both").mean().backward()
                if measured:
                    with torch.no_grad():
                        model.features(batch(0, 98), 0)
                update(optimizer)
            ends.append(full_parameters(model))
        assert all(map(torch.equal, ends[0].values(), ends[1].values())), mode


def follow_by_a_method() -> None:
    """A teacher that is called by a method alone computes with its newest weights, and so after an
    evaluation of the student by one, changes of its weights are kept."""
    for mode in ("full_shard", "no_shard"):
        plain_teacher = build(Net).requires_grad_(False)
        teacher = sharded(mode, build(Net).requires_grad_(False))
        shard.fsdp.register_fsdp_forward_method(teacher, "features")
        student = sharded(mode, build(Net, seed=1))
        shard.fsdp.register_fsdp_forward_method(student, "features")
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        pairs = list(zip(teacher.parameters(), student.parameters(), strict=True))
        for step in range(3):
            with torch.no_grad():
                found = teacher.features(batch(0, 98), 0)
                expected = plain_teacher.features(batch(0, 98), 0)
            torch.testing.assert_close(found, expected)
            student(batch(dist.get_rank(), step), task="predict_both").square().mean().backward()
            update(optimizer)
            with torch.no_grad():
                student.features(batch(0, 98), 0)
                for p in student.parameters():
                    p.clamp_(-0.1, 0.1)
                for old, new in pairs:
                    old.lerp_(new, 0.5)
            plain_teacher.load_state_dict(full_parameters(teacher))
            clamped = full_parameters(student).values()
            assert max(p.abs().max().item() for p in clamped) < 0.1001


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError


class MayFail(OneHead):
    """Raises an exception in the middle of a pass, as for a bad batch."""

    fails = ""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        hidden = self.embed(x)
        if self.fails == "forward":
            raise ValueError
        if self.fails == "backward":
            hidden = FailsInBackward.apply(hidden)
        return self.heads[0](self.blocks(hidden))

    def score(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def after_a_failure(
    mode: str, fsdp: int, where: str = "forward", method: bool = False, resets: bool = False
) -> nn.Module:
    """The second micro-batch of the second step fails, on all ranks."""
    model = sharded(mode, build(MayFail), fsdp=fsdp)
    if method:
        shard.fsdp.register_fsdp_forward_method(model, "score")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    inner: Any = model if fsdp == 2 else model.module
    for step in range(4):
        model(batch(dist.get_rank(), step)).square().mean().backward()
        if step == 1:
            inner.fails = where
            x = batch(dist.get_rank(), 50 + step)
            with suppress(ValueError):
                loss = model.score(x) if method else model(x).square().mean()
                loss.backward()
            inner.fails = ""
            if resets:
                model.reset_iter_state()
                model(batch(dist.get_rank(), step)).square().mean().backward()
        update(optimizer)
    return model


def go_on_after_an_exception() -> None:
    """As PyTorch 2.14 says, a step is repeated after reset_iter_state()."""
    if not hasattr(shard.FSDPModule, "reset_iter_state"):
        return
    for mode in ("full_shard", "shard_grad_op", "no_shard"):
        whole = sharded(mode, build(MayFail))
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.3)
        for step in range(4):
            whole(batch(dist.get_rank(), step)).square().mean().backward()
            update(optimizer)
        expected = full_parameters(whole)
        for where, method in (("forward", False), ("backward", False), ("forward", True)):
            found = full_parameters(after_a_failure(mode, 2, where, method, resets=True))
            assert all(map(torch.equal, found.values(), expected.values())), (mode, where, method)


class CallsItself(Net):
    """forward() calls a method that may also be called from outside, and one calls forward()."""

    def predict(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.features(x, head))

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self(x).mean(dim=-1, keepdim=True)
        return x


def call_methods_in_methods() -> None:
    """With and without gradients, of all or of the head alone."""
    for mode in ("full_shard", "shard_grad_op", "no_shard"):
        for frozen in (False, True):
            ends = []
            for is_plain in (True, False):
                model = build(CallsItself)
                for module in (model.embed, model.blocks):
                    module.requires_grad_(not frozen)
                ranks = [0, 1]
                if not is_plain:
                    model = sharded(mode, model, find_unused_parameters=SWITCH)
                    shard.fsdp.register_fsdp_forward_method(model, "features")
                    shard.fsdp.register_fsdp_forward_method(model, "generate")
                    ranks = [dist.get_rank()]
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                seen = []
                for step in range(3):
                    with torch.no_grad():
                        seen += [model.generate(batch(0, 98)), model(batch(0, 98))]
                    Place(ranks).backward_of(model, step)
                    update(optimizer)
                ends.append([*seen, *full_parameters(model).values()])
            for one, other in zip(*ends, strict=True):
                torch.testing.assert_close(one, other)


def name_after_compiling() -> None:
    """torch.compile around DDP puts its own name in front of DDP's."""
    model = build()
    decay = shard.weight_decay_names(model)
    compiled: Any = torch.compile(sharded("ddp", model))
    names = {shard.original_name(name) for name, p in compiled.named_parameters() if p.ndim > 1}
    assert names == decay == DECAYED
    shard.build_optimizer(compiled, "ddp", decay, lr=0.1, weight_decay=0.1)


def prune_in_ddp() -> None:
    """DDP averages the gradients of what pruning keeps under another name."""
    model = sharded("ddp", build())
    plain = build()
    pairs = [(model, model.module), (plain, plain)]
    for called, inner in pairs:
        prune.l1_unstructured(inner.embed, "weight", 0.5)
        optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
        ranks = [0, 1] if called is plain else [dist.get_rank()]
        for step in range(3):
            Place(ranks).backward_of(called, step)
            update(optimizer)
    assert (plain.embed.weight == 0).sum() == 24
    torch.testing.assert_close(model.module.embed.weight, plain.embed.weight)


def use_up_models() -> None:
    """A model can be pickled as without us, and leaves nothing in memory."""
    kept_by_pytorch = [(mode, 1) for mode in ("no_shard", "hybrid", "hybrid_grad_op")]  # NO_SHARD
    for mode, fsdp in sorted(set(ROWS) - set(kept_by_pytorch)):
        model = apply_in(mode, fsdp, build(Tempered))
        model.temperature = 1.0  # which it is already
        three_steps(model)
        if mode == "ddp":
            torch.save(model.module, io.BytesIO())
        left = [weakref.ref(module) for module in model.modules()]
        del model
        gc.collect()
        assert not any(module() for module in left), (mode, fsdp)


def train_on_one_rank() -> None:
    """What one rank does alone makes no rank wait: a probe of stored features, an evaluation."""
    backbone = sharded("ddp", build())
    features = backbone(batch(0, 0)).detach()
    head = build(Block, width=3)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(3):
        head(features).mean().backward()
        update(optimizer)
        if dist.get_rank() == 0:
            with torch.no_grad():
                head(backbone(batch(0, 1)))
    own = nn.Parameter(batch(dist.get_rank(), 0))  # an image of this rank's own
    optimizer = torch.optim.SGD([own], lr=0.1)
    optimizer.per_rank = True
    for _ in range(3):
        backbone(own).mean().backward()
        update(optimizer)


def copied(fsdp: int) -> None:
    torch.optim.swa_utils.AveragedModel(sharded("full_shard", build(), fsdp=fsdp))


def clipped_too_early() -> None:
    model = sharded("ddp", build())
    with shard.accumulation(model, last=False):
        model(batch(dist.get_rank(), 0)).mean().backward()
    shard.clip_grad_norm(model)


def norm_of_a_module_around() -> None:
    model = sharded("full_shard", build(), fsdp=1)
    shard.clip_grad_norm(nn.Sequential(model))


def hidden_behind_frozen_blocks() -> None:
    model = build()
    model.blocks.requires_grad_(False)
    model.embed.requires_grad_(False)
    model = sharded("full_shard", HidesOutput(model))
    three_steps(model, lambda x, step: model(x).out)


class HidesOutput(nn.Module):
    """Returns an object with the output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(out=self.inner(x))


def step_before_the_last_micro_batch(clips: bool = False) -> None:
    model = sharded("no_shard", build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shard.accumulation(model, last=False, uses_all=True):
        model(batch(dist.get_rank(), 0)).mean().backward()
    if clips:
        shard.clip_grad_norm(model, 1.0)
    optimizer.step()


def output_changed_in_place() -> None:
    model = sharded("full_shard", build(ReturnsView), blocks=())
    three_steps(model, lambda x, step: model(x).add_(1.0))


class ReturnsView(OneHead):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return super().forward(x)[:, :2]


def optimizer_of_gathered_parameters() -> None:
    model = sharded("full_shard", build(), blocks=())
    out = model(batch(dist.get_rank(), 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out.mean().backward()
    optimizer.step()


class KeepsAParameter(OneHead):
    """Computes with a parameter that a function keeps."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.embed.weight
        self.scale = lambda: weight.mean()

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return super().forward(x) * self.scale()


def parameter_kept_by_a_function() -> None:
    three_steps(sharded("full_shard", build(KeepsAParameter)))


class WritesLoss(Block):
    """Adds a loss of its own to a list, as experts do."""

    def forward(self, x: Tensor, losses: Any = None) -> Tensor:
        losses.append(x.square().mean())
        return super().forward(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WritesLoss(6), WritesLoss(6)])

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return x.mean() + sum(losses)


def list_of_the_caller(fsdp: int) -> None:
    options = {"fsdp": fsdp, "param_dtype": torch.bfloat16}  # in fp32 they get the list itself
    three_steps(sharded("full_shard", build(Experts), blocks=(WritesLoss,), **options))


def after_a_failed_backward(fsdp: int) -> None:
    model = sharded("full_shard", build(), fsdp=fsdp)
    out = model(batch(dist.get_rank(), 0))
    out.register_hook(lambda gradient: 1 / 0)
    inner = model.blocks[0] if fsdp == 2 else model.module.blocks[0]
    inner.register_full_backward_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):
        out.mean().backward()
    three_steps(model)


def zero_on_fsdp() -> None:
    model = sharded("full_shard", build(), fsdp=1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(batch(dist.get_rank(), 0)).mean().backward()
    optimizer.step()


def head_unused_in_the_fifth_step() -> None:
    model = sharded("ddp", build(Net))
    model.find_unused_parameters = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = batch(dist.get_rank(), step)
        task = "predict" if step == 4 else "predict_both"
        model(x, task=task).mean().backward()
        update(optimizer)


def changed_twice_by_recomputing(kind: type[nn.Module]) -> None:
    model = build()
    model.blocks = nn.Sequential(kind(), kind())
    three_steps(sharded("ddp", model, blocks=(kind,), ac="full"))


class Counts(Block):
    """Scales by how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x) / self.calls


class DropsByPython(Block):
    """Is left out at random, by Python's own random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (random.random() < 2)


REFUSED_ON_RANKS = {
    hidden_behind_frozen_blocks: "FSDP2 has not averaged .* not objects that hide them",
    step_before_the_last_micro_batch: r"FSDP2 has not averaged .* accumulation\(model, last=True\)",
    partial(step_before_the_last_micro_batch, clips=True): "not been averaged over ranks yet",
    output_changed_in_place: "FSDP2 has not averaged .* in place",
    optimizer_of_gathered_parameters: "build it before the first call",
    parameter_kept_by_a_function: "computed with a parameter from before shard.apply",
    partial(list_of_the_caller, 1): "wrote into a list that it was given",
    partial(list_of_the_caller, 2): "wrote into a list that it was given",
    partial(after_a_failed_backward, 1): "an exception has ended a forward or backward pass",
    partial(after_a_failed_backward, 2): "an exception has ended a forward or backward pass",
    partial(after_a_failure, "full_shard", 1): "an exception has ended a forward or",
    partial(after_a_failure, "full_shard", 2): "an exception has ended a forward or",
    partial(after_a_failure, "no_shard", 2): "an exception has ended a forward or",
    partial(after_a_failure, "full_shard", 2, method=True): "an exception has ended a forward or",
    zero_on_fsdp: "FSDP shards the optimizer's states itself",
    head_unused_in_the_fifth_step: "got no gradient from the last backward pass",
    partial(changed_twice_by_recomputing, Counts): "calls was changed in forward",
    partial(changed_twice_by_recomputing, DropsByPython): "state of Python's random was changed",
    method_of_ddp: "call the model, not its methods",
    method_of_ddp_after_a_step: "call the model, not its methods",
    unfrozen_in_ddp: "embed.weight was unfrozen after shard.apply, and DDP does not average",
    frozen_in_ddp: "embed.weight was frozen after .* find_unused_parameters=True",
    heads_by_rank_without_the_option: "the ranks used different parameters",
    heads_by_rank_in_one_micro_batch: "the ranks used different parameters",
    partial(two_backward_passes, "ddp"): r"call backward\(\) once",
    partial(two_backward_passes, "no_shard", fsdp=1): r"call backward\(\) once",
    partial(two_losses, "ddp"): r"call backward\(\) once",
    partial(two_losses, "no_shard", fsdp=1): r"call backward\(\) once",
    partial(edited_while_gathered, 1): "evaluate in torch.no_grad",
    partial(edited_while_gathered, 2): "evaluate in torch.no_grad",
    written_into_data: "has new memory",
    evaluated_with_averages: "has new memory",
    assigned_in_ddp: "assign=True would replace the parameters",
    trained_with_a_loose_parameter: "put it into the model before shard.apply",
    edited_by_one_rank: "the ranks hold different weights",
    edited_by_one_rank_later: "the ranks hold different weights or gradients",
    converted_in_ddp: "embed.weight is no longer fp32",
    converted_and_back_in_ddp: "embed.weight was converted to another dtype and back",
    step_in_a_hook_of_ddp: r"step only after backward\(\)",
    loss_with_parameters: "put them into the model before shard.apply",
    probe_of_a_frozen_model: "put them into the model before shard.apply",
    loss_with_parameters_from_the_fifth_step: "put them into the model before shard.apply",
    partial(clamped_in_forward, "full_shard", "data.clamp_"): "fc.weight was changed in forward",
    partial(clamped_in_forward, "full_shard", "data.clamp_", fsdp=1): "fc.weight was changed in",
    partial(clamped_in_forward, "no_shard", "data =", fsdp=1): "fc.weight was changed in forward",
    partial(attribute_of_the_wrapper, "ddp"): "temperature was set on Distr.* Tempered inside",
    partial(attribute_of_the_wrapper, "full_shard", fsdp=1): "temperature was set on Fully.* Tempe",
    partial(attribute_of_a_wrapped_block, "ddp", ac="full"): "set on Checkpoint.* TemperedBlock in",
    partial(attribute_of_a_wrapped_block, "full_shard", ac="full"): "set on FSDPCheckpointWrapper",
    partial(attribute_of_a_wrapped_block, "full_shard", fsdp=1): "set on FullyShardedDataParallel",
    accumulated_without_a_last: r"end a step with accumulation\(model, last=True\)",
    hidden_in_an_object: "returned Hidden, in which FSDP2 finds no tensor",
    weights_made_for_a_block: "as by functional_call, but FSDP2 would",
    norm_of_a_part: "give clip_grad_norm the model that shard.apply returned",
    plain_names_into_ddp: "load them into model.module",
    written_into_data_of_zero1: "has new memory, which zero1 does not send",
    stateless_call: "do not use functional_call",
    gradient_of_the_input: r"was not put back by FSDP1 after torch.autograd.grad",
    gradient_penalty: r"was not put back by FSDP1 after torch.autograd.grad",
    sharded_twice: r"blocks.0.fc.weight is sharded already",
    block_twice_in_bf16: "do not call a block twice either",
    adafactor_of_fsdp1: "use mode ddp, or an elementwise",
    by_one_number: r"ByOneNumber gives different results on FSDP2's .* \.full_tensor\(\)",
    partial(by_ratios, "full_shard"): "ByRatios gives different results on FSDP2's sharded tensors",
    partial(by_shape, 1, "muon"): "Muon needs whole tensors",
    partial(by_shape, 1, "adafactorbv"): "AdafactorBigVision needs whole tensors",
    lbfgs_of_zero1: r"LBFGS could not be tried .* set optimizer.elementwise = True",
    partial(by_norms, "full_shard", 1, False): "ByNorms needs whole tensors",
    partial(by_norms, "shard_grad_op", 1, True): "ByNorms needs whole tensors",
    partial(by_norms, "zero1", 2, True): "ByNorms needs whole tensors",
    partial(copied, 1): "build the model twice",
    partial(copied, 2): "build the model twice",
    clipped_too_early: "not been averaged over ranks yet",
    norm_of_a_module_around: "give clip_grad_norm the model that shard.apply returned",
}


def refuse_loops() -> None:
    """On two ranks."""
    wrong = {}
    for loop, words in REFUSED_ON_RANKS.items():
        try:
            loop()
            wrong[str(loop)] = "was not refused"
        except (RuntimeError, ValueError) as error:
            if not re.search(words, str(error)):
                wrong[str(loop)] = str(error)
    assert not wrong, wrong


def train_in_bf16(mode: str, fsdp: int, evaluated: bool) -> dict[str, Tensor]:
    """The parameters after three steps, between which the model may be called with gradients."""
    model = shard.apply(
        build(),
        mode,
        mesh.build_mesh(shard.mesh_shape(mode, 2, 2 if "hybrid" in mode else None), CPU),
        block_classes={Block},
        options=shard.ShardingOptions(fsdp=fsdp),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(batch(dist.get_rank(), step)).float().mean().backward()
        if evaluated:
            model(batch(0, 98))
        update(optimizer)
    return full_parameters(model)


def evaluate_in_bf16() -> None:
    """A call without a backward pass changes nothing; in FSDP1, the next call is refused."""
    for mode in shard.STRATEGIES:
        plain = train_in_bf16(mode, 2, evaluated=False)
        found = train_in_bf16(mode, 2, evaluated=True)
        assert all(map(torch.equal, plain.values(), found.values())), mode
        if shard.STRATEGIES[mode].engine == "fsdp":
            train_in_bf16(mode, 1, evaluated=False)
            with pytest.raises(RuntimeError, match=r"needs a backward\(\) before a step"):
                train_in_bf16(mode, 1, evaluated=True)


def average_by_torch() -> None:
    model = sharded("ddp", build())
    average = torch.optim.swa_utils.AveragedModel(model)
    three_steps(model)
    average.update_parameters(model)
    values = zip(average.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(mean, p) for mean, p in values)


def step_in_a_hook() -> None:
    """FSDP2 calls a hook once the gradient is averaged: each parameter has its own optimizer."""
    for mode in ("full_shard", "no_shard"):
        ends = []
        for in_hook in (False, True):
            model = sharded(mode, build())
            optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
            if in_hook:
                for p, optimizer in optimizers.items():
                    p.register_post_accumulate_grad_hook(partial(step_of, optimizer))
            for step in range(3):
                model(batch(dist.get_rank(), step)).mean().backward()
                for optimizer in optimizers.values() if not in_hook else ():
                    update(optimizer)
            ends.append(full_parameters(model))
        assert all(map(torch.equal, ends[0].values(), ends[1].values())), mode


def decay_by_original_names() -> None:
    for mode in ("ddp", "full_shard"):
        model = sharded(mode, torch.compile(build(), backend="eager"), ac="full")
        assert shard.weight_decay_names(model) == DECAYED
    with pytest.raises(ValueError, match=r"before shard\.apply"):
        shard.weight_decay_names(sharded("full_shard", build(), fsdp=1))


def step_of(optimizer: torch.optim.Optimizer, p: Tensor) -> None:
    update(optimizer)


@pytest.mark.parametrize("how", ["lerp_", "data.mul_", "data ="])
@pytest.mark.parametrize("mode", ["full_shard", "shard_grad_op"])
def test_a_teacher_that_moves_in_forward_is_refused(single, mode, how):
    model = sharded(mode, MovesTeacher(how))
    with pytest.raises(RuntimeError, match=r"ema.weight was changed in forward\(\)"):
        three_steps(model)


@pytest.mark.parametrize(
    "build_module",
    [
        partial(nn.BatchNorm1d, 8),
        partial(nn.InstanceNorm1d, 4, track_running_stats=True),
        lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        lambda: torch.nn.utils.spectral_norm(nn.Linear(8, 8)),
    ],
)
def test_statistics_are_refused_if_they_are_recomputed(single, build_module):
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(build_module()))
    model = sharded("ddp", model, {nn.Sequential}, ac="full")
    with pytest.raises(RuntimeError, match=r"was changed in forward\(\), and activation"):
        three_steps(model)


@pytest.mark.parametrize("mode", ["ddp", "full_shard"])
def test_a_block_that_counts_is_refused_if_it_is_recomputed(single, mode):
    for ac in ("none", "full"):
        model = nn.Sequential(nn.Linear(6, 8), Counting(), Counting())
        model = sharded(mode, model, {Counting}, ac=ac)
        if ac == "none":
            three_steps(model)
            continue
        with pytest.raises(RuntimeError, match=r"the buffer seen was changed in forward\(\)"):
            three_steps(model)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_hooks_that_fsdp_does_not_call_are_refused(single, fsdp):
    model = sharded("full_shard", build(), fsdp=fsdp)
    next(model.parameters()).register_hook(lambda grad: grad * 0)
    with pytest.raises(RuntimeError, match=r"embed.weight has a hook that FSDP does not call"):
        three_steps(model)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_inference_mode_is_refused(single, fsdp):
    model = sharded("full_shard", build(), fsdp=fsdp)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"use torch\.no_grad\(\)"):
        model(batch(0, 0))


def test_hooks_that_fsdp2_calls_are_called(single):
    model = sharded("full_shard", build())
    seen = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(seen.append)
    three_steps(model)
    assert len(seen) == 3 * len(list(model.parameters()))


@pytest.mark.parametrize("mode", ["full_shard", "shard_grad_op"])
def test_one_autocast_may_surround_several_calls(single, mode):
    ends = []
    for kept in (False, True):
        model = sharded(mode, build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=kept):
                for i in range(2):
                    model(batch(i, step)).mean().backward()
            update(optimizer)
        ends.append(full_parameters(model))
    assert all(map(torch.equal, ends[0].values(), ends[1].values()))


def test_an_optimizer_from_before_is_refused(single):
    model = build()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    model = sharded("full_shard", model)
    model(batch(0, 0)).mean().backward()
    with pytest.raises(RuntimeError, match=r"the optimizer was built before shard\.apply"):
        early.step()


def test_weight_decay_has_original_names(single):
    model = torch.compile(build(), backend="eager")
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    assert shard.weight_decay_names(model) == DECAYED
    model = sharded("full_shard", build())
    with pytest.raises(ValueError, match="no parameter embed to decay"):
        shard.build_optimizer(model, "full_shard", {"embed"}, lr=1.0, weight_decay=1.0)


# --- models that are refused at apply


def with_hook(post: bool) -> nn.Module:
    model = build()
    p = model.embed.weight
    if post:
        p.register_post_accumulate_grad_hook(print)
    else:
        p.register_hook(print)
    return model


def with_parameter(value: Tensor) -> nn.Module:
    model = build()
    model.extra = nn.Parameter(value, requires_grad=False)
    return model


def with_module(module: nn.Module) -> nn.Module:
    model = build()
    model.blocks[0].extra = module
    return model


def with_parameters_in_a_list() -> nn.Module:
    model = build()
    model.gates = [model.embed.weight, model.embed.bias]
    return model


def with_blocks_in_a_list() -> nn.Module:
    model = build()
    model.stages = tuple(model.blocks)
    return model


def with_shared_memory() -> nn.Module:
    model = build()
    model.again = nn.Parameter(model.embed.weight.data[:4])
    return model


# the model, the mode, options, the words that say what to do
WRONG: list[tuple[Callable[[], nn.Module], str, dict[str, Any], str]] = [
    (partial(with_hook, False), "ddp", {}, "register it after shard.apply"),
    (partial(with_hook, True), "full_shard", {}, "register it after shard.apply"),
    (partial(with_parameter, torch.arange(4)), "hybrid", {}, "extra is torch.int64, .* a buffer"),
    (partial(with_parameter, torch.ones(4) * 1j), "ddp", {}, "complex64: store its real and"),
    (partial(with_parameter, torch.ones(0, 2)), "hybrid", {}, "is empty and cannot be sharded"),
    (lambda: with_module(nn.LazyLinear(3)), "ddp", {}, "no shape yet: call the model once"),
    (lambda: with_module(nn.Embedding(9, 3, sparse=True)), "hybrid", {}, "sparse=False"),
    (lambda: with_module(nn.Embedding(9, 3, max_norm=1)), "ddp", {}, "between steps"),
    (
        lambda: torch.compile(build(), backend="eager"),
        "full_shard",
        {"fsdp": 1},
        "compile it after",
    ),
    (with_shared_memory, "zero1", {}, "again and embed.weight share memory"),
    (with_shared_memory, "full_shard", {}, "again and embed.weight share memory"),
    (with_blocks_in_a_list, "full_shard", {"fsdp": 1}, "stages is a tuple of parameters or blocks"),
    (with_parameters_in_a_list, "full_shard", {}, "gates is a list of parameters or blocks"),
    (build, "full_shard", {"blocks": "Block"}, "must be a set of classes"),
    (build, "full_shard", {"blocks": ["Block"]}, "must be a set of classes"),
    (build, "full_shard", {"blocks": Block}, "must be a set of classes"),
    (
        build,
        "full_shard",
        {"blocks": {nn.ModuleList}},
        "heads is a ModuleList, which has no forward",
    ),
    (build, "full_shard", {"fsdp": 1, "find_unused_parameters": True}, "leave it out"),
    (build, "hybrid", {"fsdp": 1, "cpu_offload": True}, "needs a GPU to offload from"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_models_that_would_train_wrongly_are_refused(single, case):
    build_model, mode, given, words = WRONG[case]
    options = {name: value for name, value in given.items() if name != "blocks"}
    with pytest.raises(ValueError, match=words) as caught:
        shard.apply(
            build_model(),
            mode,
            single,
            block_classes=given.get("blocks", {Block}),
            options=shard.ShardingOptions(**options),
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["zero1", "full_shard"])
def test_buffers_may_share_memory(single, mode):
    table = torch.linspace(0, 1, 8)
    model = build()
    for block in model.blocks:
        block.register_buffer("table", table[None])
    model = sharded(mode, model)
    three_steps(model)
    assert sum(torch.equal(buffer[0], table) for buffer in model.buffers()) == 2


def test_buffers_that_no_checkpoint_has_get_their_values(single):
    """As swin's and Llama's: the rest is read from a checkpoint."""
    with torch.device("meta"):
        model = build()
        model.register_buffer("table", torch.zeros(4), persistent=False)
    asked = []

    def init_fn(name: str, shape: torch.Size, device: torch.device) -> Tensor:
        asked.append(name)
        return torch.arange(4.0)

    model = shard.apply(
        model, "full_shard", single, block_classes={Block}, init_fn=init_fn, uninitialized=True
    )
    assert asked == ["table"]
    assert model.table.tolist() == [0, 1, 2, 3]


def test_a_compiled_part_is_left_in_its_place(single):
    model = build()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model = sharded("full_shard", model, {nn.Linear})
    three_steps(model)


@pytest.mark.slow
def test_ordinary_loops_train_as_in_one_process(tmp_path):
    """And those that ranks would make wrong are refused."""
    check_loops(2, DAILY, tmp_path)


@pytest.mark.full
def test_every_loop_in_every_mode(tmp_path):
    check_loops(4, ROWS, tmp_path)
