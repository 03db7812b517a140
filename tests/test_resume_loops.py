"""Loops that are not ours, saved and resumed in another mode: optimizers, schedulers, two models.

Each is compared with one uninterrupted process of plain PyTorch, without any file of this project.
"""

import itertools
import os
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import FULL
from ranks import full_parameters, join, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import lr_scheduler

import checkpoint
import mesh
import shard

CPU = torch.device("cpu")
STEPS = 8
CUT = 4
BATCH = 4
FP32 = torch.float32


# --- a model, optimizers that PyTorch has and has not, its schedulers


class Net(nn.Module):
    """A head and a tail; the tail is not used before step `CUT`, so that it has no state then."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7))
        self.head = nn.Linear(7, 3)
        self.tail = nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor, tail: bool) -> Tensor:
        hidden = self.body(x).tanh()
        if tail:
            return self.head(hidden) + self.tail(hidden)
        return self.head(hidden)


class Lion(torch.optim.Optimizer):
    """Of Chen et al. 2023; smooth instead of a sign, and its count of steps is a Python number."""

    def __init__(self, params: Iterable, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "seen": 0, "betas": (beta, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1  # a number of the group, as of Prodigy
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["moving"] = torch.zeros_like(p)
                    state["count"] = 0
                state["count"] += 1
                mean = state["moving"] * group["beta"] + p.grad * (1 - group["beta"])
                rate = group["lr"] / (state["count"] + group["seen"])
                p.add_((10 * mean).tanh(), alpha=-rate)
                state["moving"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])


class MomentumInOneGroup(torch.optim.SGD):
    """Of some parameters it keeps a state, of others none."""

    def __init__(self, params: Iterable, lr: float = 1e-2) -> None:
        super().__init__(params, lr, momentum=0.9)
        self.param_groups[0]["momentum"] = 0.0


OPTIMIZERS: dict[str, tuple[Callable, dict]] = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-3}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True, "eps": 1e-3}),
    "Adam": (torch.optim.Adam, {"eps": 1e-3}),
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "SGD dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "eps": 1e-2}),
    "NAdam": (torch.optim.NAdam, {"eps": 1e-3}),
    "RAdam": (torch.optim.RAdam, {"eps": 1e-3}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"eps": 1e-3}),
    "Adadelta": (torch.optim.Adadelta, {"eps": 1e-3}),
    "ASGD": (torch.optim.ASGD, {"t0": 2, "lambd": 1e-2}),
    "Lion": (Lion, {}),
    "SGD, momentum in one group": (MomentumInOneGroup, {}),
}


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, 0.2, total_iters=3)
    then = lr_scheduler.MultiStepLR(optimizer, [2, 3], 0.5)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[3])


def chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=5)
    return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, 0.8)])


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Of the rates alone: ZeRO-1 does not say that it has a momentum."""
    rates = [0.02, 0.01, 0.02]
    return lr_scheduler.OneCycleLR(optimizer, rates, STEPS + 1, cycle_momentum=False)


SCHEDULERS: dict[str, Callable] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, 3, cycle_momentum=False),
    "OneCycleLR": one_cycle,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, "min", 0.5, patience=0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, 5),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=draw), torch.randn(BATCH, 3, generator=draw)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: lr_scheduler.LRScheduler,
    steps: Iterable[int],
    part: slice,
    tail_from: int,
) -> list[list[float]]:
    """An ordinary loop; the rates in each step of all groups that have parameters."""
    rates = []
    for step in steps:
        x, y = batch(step)
        (model(x[part], step >= tail_from) - y[part]).square().mean().backward()
        rates.append([group["lr"] for group in optimizer.param_groups if group["params"]])
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0 + step % 2)
        else:
            scheduler.step()
    return rates


def evaluate(model: nn.Module) -> None:
    """After it a model must be saved and loaded as before."""
    x, _ = batch(0)
    with torch.no_grad():
        model(x, True)


def groups_of(model: nn.Module, named: Callable[[str], bool], lr: float) -> list[dict]:
    """Two groups and an empty one."""
    found: tuple[list, list] = ([], [])
    for name, p in model.named_parameters():
        found[named(name)].append(p)
    return [{"params": found[0]}, {"params": found[1], "lr": lr / 2}, {"params": []}]


def is_bias(name: str) -> bool:
    return name.endswith("bias")


def built(model: nn.Module, mode: str, optimizer: str, scheduler: str) -> tuple:
    """Optimizer and scheduler, as a user's program builds them at every start."""
    kind, given = OPTIMIZERS[optimizer]
    groups = groups_of(model, is_bias, 0.02)
    if mode == "zero1":
        made = ZeroRedundancyOptimizer(groups, kind, lr=0.02, **given)
    else:
        made = kind(groups, lr=0.02, **given)
    return made, SCHEDULERS[scheduler](made)


# --- on ranks


def sharded(
    model: nn.Module, mode: str, fsdp: int, *, unused: bool = True, blocks: tuple = ()
) -> nn.Module:
    """The model in a mode of two or more ranks; hybrid in groups of two."""
    world = dist.get_world_size()
    grid = mesh.build_mesh(shard.mesh_shape(mode, world, 2 if "hybrid" in mode else None), CPU)
    if shard.STRATEGIES[mode].engine == "fsdp":
        options = shard.ShardingOptions(param_dtype=FP32, fsdp=fsdp)
    else:
        options = shard.ShardingOptions(param_dtype=FP32, find_unused_parameters=unused)
    return shard.apply(model, mode, grid, block_classes=set(blocks), options=options)


@dataclass
class Case:
    """A loop that is saved in one mode and resumed in another."""

    optimizer: str
    scheduler: str
    before: tuple[str, int]  # mode, FSDP1 or FSDP2
    after: tuple[str, int]

    @property
    def tail_from(self) -> int:
        """The step that first uses the tail; FSDP1 steps unused parameters too, as it says."""
        if self.before[1] == 2:
            return CUT
        return 0


MODES = [
    ("ddp", 2),
    ("zero1", 2),
    ("full_shard", 1),
    ("full_shard", 2),
    ("shard_grad_op", 1),
    ("hybrid", 2),
    ("no_shard", 2),
    ("hybrid_grad_op", 1),
    ("no_shard", 1),
]


def daily() -> list[Case]:
    """Each optimizer, scheduler, and mode on either side, at least once."""
    count = max(len(OPTIMIZERS), len(SCHEDULERS))
    cases = []
    for i in range(count):
        optimizer = [*OPTIMIZERS][i % len(OPTIMIZERS)]
        scheduler = [*SCHEDULERS][i % len(SCHEDULERS)]
        before = MODES[i % len(MODES)]
        after = MODES[(2 * i + 3) % len(MODES)]
        cases.append(Case(optimizer, scheduler, before, after))
    return cases


def covering() -> list[Case]:
    """Each optimizer saved in each mode, and loaded in each; of all together each pair of modes."""
    schedulers = itertools.cycle(SCHEDULERS)
    cases = []
    for shift, optimizer in enumerate(OPTIMIZERS):
        for i, before in enumerate(MODES):
            after = MODES[(i + shift) % len(MODES)]
            cases.append(Case(optimizer, next(schedulers), before, after))
    return cases


def part_of_rank() -> slice:
    size = BATCH // dist.get_world_size()
    return slice(size * dist.get_rank(), size * (dist.get_rank() + 1))


def resume_all(cases: list[Case]) -> list[tuple[list, dict[str, Tensor]]]:
    """On every rank: the rates and the last parameters of each case."""
    join()
    found = []
    out = Path(os.environ["FOLDER"], "out")
    for number, case in enumerate(cases):
        torch.manual_seed(0)
        model = sharded(Net(), *case.before)
        optimizer, scheduler = built(model, case.before[0], case.optimizer, case.scheduler)
        rates = train(model, optimizer, scheduler, range(CUT), part_of_rank(), case.tail_from)
        run_state = {"scheduler": scheduler.state_dict()}
        evaluate(model)
        saved = checkpoint.save(out / str(number), CUT, model, optimizer, run_state)

        torch.manual_seed(9)
        model = sharded(Net(), *case.after)
        optimizer, scheduler = built(model, case.after[0], case.optimizer, case.scheduler)
        evaluate(model)
        manifest = checkpoint.load(saved, model, optimizer)
        assert manifest["step"] == CUT
        scheduler.load_state_dict(manifest["scheduler"])
        left = range(CUT, STEPS)
        rates += train(model, optimizer, scheduler, left, part_of_rank(), case.tail_from)
        found.append((rates, full_parameters(model)))
    dist.destroy_process_group()
    return found


def plain(case: Case) -> tuple[list, dict[str, Tensor]]:
    """One process, whole batches, no interruption."""
    torch.manual_seed(0)
    model = Net()
    optimizer, scheduler = built(model, "", case.optimizer, case.scheduler)
    rates = train(model, optimizer, scheduler, range(STEPS), slice(BATCH), case.tail_from)
    return rates, dict(model.named_parameters())


class ResumeAll:
    """`resume_all` of some cases, for `on_ranks`."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases

    def __call__(self) -> list:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return resume_all(self.cases)


def compare_on_ranks(world: int, cases: list[Case], folder: Path) -> None:
    """Resume each case on so many ranks, and compare it with one process."""
    found, *_ = on_ranks(world, ResumeAll(cases), folder, timeout=900)
    wrong = []
    for case, (rates, parameters) in zip(cases, found, strict=True):
        expected_rates, expected = plain(case)
        differences = [(parameters[n] - value).abs().max().item() for n, value in expected.items()]
        if rates != expected_rates or max(differences) > 1e-5:
            wrong.append((case, rates == expected_rates, max(differences)))
    assert not wrong


def test_ordinary_loops_continue_in_another_mode(tmp_path):
    compare_on_ranks(2, daily(), tmp_path)


@pytest.mark.full
def test_every_optimizer_from_and_to_every_mode(tmp_path):
    compare_on_ranks(4, covering(), tmp_path)


# --- several models, several optimizers, none


class Shared(nn.Module):
    """One block under two names, a tied weight in it, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5, bias=False))
        block[2].weight = block[0].weight
        self.first = block
        self.again = block
        self.out = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.out(self.again(self.first(x)))


def step_of(model: nn.Module, optimizers: list, seed: int, size: int) -> None:
    """Gradients of another size in each step, the same on every rank."""
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One of a part by momentum, one of the rest by Adam."""
    parts: tuple[list, list] = ([], [])
    for name, p in model.named_parameters():
        parts["2." in name].append(p)
    return [torch.optim.SGD(parts[0], 0.05, momentum=0.9), torch.optim.Adam(parts[1], 0.05)]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def of_two_optimizers(before: tuple[str, int], after: tuple[str, int], out: Path) -> float:
    """One model with an optimizer for each of its parts."""
    plain_model = layers()
    plain_optimizers = two_optimizers(plain_model)
    for seed in range(4):
        step_of(plain_model, plain_optimizers, seed, 6)
    model = sharded(layers(), *before, unused=False)
    optimizers = two_optimizers(model)
    for seed in range(2):
        step_of(model, optimizers, seed, 6)
    saved = checkpoint.save(out, 2, model, optimizers)
    model = sharded(layers(), *after, unused=False)
    optimizers = two_optimizers(model)
    checkpoint.load(saved, model, optimizers)
    for seed in range(2, 4):
        step_of(model, optimizers, seed, 6)
    return apart(model, plain_model)


def apart(model: nn.Module, plain_model: nn.Module) -> float:
    whole = full_parameters(model)
    return max((whole[n] - p).abs().max().item() for n, p in plain_model.named_parameters())


def of_student_and_teacher(before: tuple[str, int], after: tuple[str, int], out: Path) -> float:
    """Two models in one checkpoint; only one of them is trained. Then the teacher's alone."""

    def build(seed: int, mode: tuple[str, int]) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        student = sharded(nn.Linear(6, 3), *mode, unused=False)
        teacher = sharded(nn.Linear(6, 3), *mode, unused=False)
        both = nn.ModuleDict({"student": student, "teacher": teacher})
        return both, torch.optim.SGD(student.parameters(), 0.1, momentum=0.9)

    torch.manual_seed(1)
    plain_student = nn.Linear(6, 3)
    plain_teacher = nn.Linear(6, 3)
    plain_optimizer = torch.optim.SGD(plain_student.parameters(), 0.1, momentum=0.9)
    both, optimizer = build(1, before)
    for seed in range(2):
        step_of(plain_student, [plain_optimizer], seed, 6)
        step_of(both["student"], [optimizer], seed, 6)
    saved = checkpoint.save(out / "both", 2, both, optimizer)
    alone = checkpoint.save(out / "teacher", 2, both["teacher"], None)
    both, optimizer = build(5, after)
    checkpoint.load(saved, both, optimizer)
    step_of(plain_student, [plain_optimizer], 2, 6)
    step_of(both["student"], [optimizer], 2, 6)
    found = [apart(both["student"], plain_student), apart(both["teacher"], plain_teacher)]
    both, _ = build(6, before)
    checkpoint.load(alone, both["teacher"], None)
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match="was trained by no optimizer, now by SGD"
    ):
        checkpoint.load(alone, both["student"], torch.optim.SGD(both["student"].parameters(), 0.1))
    return max(*found, apart(both["teacher"], plain_teacher))


def of_shared_blocks(before: tuple[str, int], after: tuple[str, int], out: Path) -> float:
    torch.manual_seed(0)
    plain_model = Shared()
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), 0.05, eps=1e-3)
    for seed in range(4):
        step_of(plain_model, [plain_optimizer], seed, 5)

    def build(seed: int, mode: tuple[str, int]) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = sharded(Shared(), *mode, unused=False, blocks=(nn.Sequential,))
        return model, torch.optim.AdamW(model.parameters(), 0.05, eps=1e-3)

    model, optimizer = build(0, before)
    for seed in range(2):
        step_of(model, [optimizer], seed, 5)
    saved = checkpoint.save(out, 2, model, optimizer)
    model, optimizer = build(7, after)
    checkpoint.load(saved, model, optimizer)
    assert [buffer.item() for buffer in model.buffers()] == [2]
    for seed in range(2, 4):
        step_of(model, [optimizer], seed, 5)
    return apart(model, plain_model)


def compiled_unless_fsdp1(mode: tuple[str, int]) -> nn.Module:
    """FSDP1 must be told of a model before it is compiled: shard.apply refuses one that is."""
    if mode[1] == 1:
        return layers()
    return torch.compile(layers(), backend="eager")


def of_a_compiled_model(before: tuple[str, int], after: tuple[str, int], out: Path) -> float:
    """Compiled before it is sharded (not FSDP1) and after it (not FSDP2); loaded into one not."""
    plain_model = layers()
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), 0.05, eps=1e-3)
    for seed in range(4):
        step_of(plain_model, [plain_optimizer], seed, 6)
    model = sharded(compiled_unless_fsdp1(before), *before, unused=False)
    if not isinstance(model, FSDPModule):
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, eps=1e-3)
    for seed in range(2):
        step_of(model, [optimizer], seed, 6)
    saved = checkpoint.save(out, 2, model, optimizer)
    model = sharded(layers(), *after, unused=False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, eps=1e-3)
    checkpoint.load(saved, model, optimizer)
    step_of(model, [optimizer], 2, 6)
    saved = checkpoint.save(out, 3, model, optimizer)
    model = sharded(compiled_unless_fsdp1(before), *before, unused=False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, eps=1e-3)
    checkpoint.load(saved, model, optimizer)
    step_of(model, [optimizer], 3, 6)
    whole = checkpoint.Weights(checkpoint.save(out, 4, model, optimizer))
    return max((whole[n] - p).abs().max().item() for n, p in plain_model.named_parameters())


class Named(torch.optim.Optimizer):
    """The names of its states have dots and percent signs, and one is None at first."""

    def __init__(self, params: Iterable) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"": 0.5, "ema.fast": torch.zeros_like(p), "n.%2E": 0, "late": None}
                if state["late"] is None and state["n.%2E"] == 2:
                    state["late"] = p.grad.clone()
                state["n.%2E"] += 1
                state["ema.fast"].mul_(state[""]).add_(p.grad)
                p.sub_(state["ema.fast"], alpha=group["lr"] / state["n.%2E"])
                if state["late"] is not None:
                    p.sub_(state["late"], alpha=group["lr"])


def of_odd_names_of_states(before: tuple[str, int], after: tuple[str, int], out: Path) -> float:
    plain_model = layers()
    plain_optimizer = Named(plain_model.parameters())
    for seed in range(4):
        step_of(plain_model, [plain_optimizer], seed, 6)
    model = sharded(layers(), *before, unused=False)
    optimizer = Named(model.parameters())
    for seed in range(2):
        step_of(model, [optimizer], seed, 6)
    saved = checkpoint.save(out, 2, model, optimizer)
    model = sharded(layers(), *after, unused=False)
    optimizer = Named(model.parameters())
    checkpoint.load(saved, model, optimizer)
    for seed in range(2, 4):
        step_of(model, [optimizer], seed, 6)
    return apart(model, plain_model)


def of_saves_after_forward(before: tuple[str, int], after: tuple[str, int], out: Path) -> float:
    """FSDP then still holds whole parameters, in the place of those that the optimizer has."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    plain_model = layers()
    plain_optimizer = torch.optim.SGD(plain_model.parameters(), 0.1, momentum=0.9)
    for seed in range(3):
        step_of(plain_model, [plain_optimizer], seed, 6)
    found = []
    for number, mode in enumerate((before, after, ("shard_grad_op", 1), ("shard_grad_op", 2))):
        model = sharded(layers(), *mode, unused=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for seed in range(2):
            step_of(model, [optimizer], seed, 6)
        loss = model(x).square().mean()
        saved = checkpoint.save(out / str(number), 2, model, optimizer)
        loss.backward()
        optimizer.step()
        found.append(apart(model, plain_model))
        model = sharded(layers(), *after, unused=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        checkpoint.load(saved, model, optimizer)
        step_of(model, [optimizer], 2, 6)
        found.append(apart(model, plain_model))
    return max(found)


class Outer(torch.optim.Optimizer):
    """As SAM: another optimizer's states, and its parameter groups."""

    def __init__(self, params: Iterable) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: None = None) -> None:
        self.base.step()


class OfOtherTypes(torch.optim.Optimizer):
    """Its momentum is in bf16."""

    def __init__(self, params: Iterable) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:  # a rank of FSDP1 may have no part of it
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["momentum"].mul_(0.9).add_(p.grad.to(state["momentum"].dtype))
                p.sub_(state["momentum"].float(), alpha=group["lr"])


def of_an_outer_optimizer(before: tuple[str, int], after: tuple[str, int], out: Path) -> float:
    """The schedule is the outer optimizer's; the inner one, which has the states, is saved."""
    schedule = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    return continued(before, after, out, Outer, schedule, inner=lambda outer: outer.base)


def of_states_of_other_types(before: tuple[str, int], after: tuple[str, int], out: Path) -> float:
    schedule = partial(lr_scheduler.StepLR, step_size=1, gamma=0.9)
    return continued(before, after, out, OfOtherTypes, schedule, inner=lambda own: own)


class OfWholeTensors(torch.optim.Optimizer):
    """As a plain Muon under FSDP2: it gathers a gradient, and keeps a whole momentum."""

    def __init__(self, params: Iterable) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(gradient)
                state["momentum"].lerp_(gradient, 0.1)
                update = state["momentum"] / (state["momentum"].norm() + 1e-7)
                if isinstance(p, DTensor):
                    update = distribute_tensor(update, p.device_mesh, p.placements)
                p.sub_(update, alpha=group["lr"])


class OfOwners(torch.optim.Optimizer):
    """As the Muon of modded-nanogpt: each momentum is on one rank, which sends the parameter."""

    def __init__(self, params: Iterable) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for number, p in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size()
            if dist.get_rank() == owner:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 0.1)
                p.sub_(state["momentum"], alpha=0.1)
            dist.broadcast(p, owner)


class Copies(nn.Module):
    """A moving average in buffers, which FSDP2's parameters make DTensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, p in model.named_parameters():
            self.register_buffer(shard.original_name(name).replace(".", "_"), p.detach().clone())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for own, p in zip(self.buffers(), model.parameters(), strict=True):
            own.lerp_(p, 0.3)


def of_copies_in_buffers(before: tuple[str, int], after: tuple[str, int], out: Path) -> float:
    found = []
    for mode in (None, before, after):
        model = layers() if mode is None else sharded(layers(), *mode, unused=False)
        copies = Copies(model)
        both = nn.ModuleDict({"model": model, "copies": copies})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        begin = 0
        if mode is after:
            begin = checkpoint.load(out / "step_00000002", both, optimizer)["step"]
        for seed in range(begin, 4):
            if mode is before and seed == 2:
                checkpoint.save(out, 2, both, optimizer)
            step_of(model, [optimizer], seed, 6)
            copies.update(model)
        found.append([b.full_tensor() if isinstance(b, DTensor) else b for b in copies.buffers()])
    pairs = [pair for other in found[1:] for pair in zip(found[0], other, strict=True)]
    return max((one - other).abs().max().item() for one, other in pairs)


def loops_of_fsdp2() -> list[float]:
    """On every rank: how far loops with states beside FSDP2's are from a plain process."""
    join()
    out = Path(os.environ["FOLDER"])
    constant = partial(lr_scheduler.ConstantLR, factor=1.0)
    pairs = [(("full_shard", 2), ("hybrid", 2)), (("hybrid", 2), ("full_shard", 2))]
    found = []
    for number, (before, after) in enumerate([*pairs, (("full_shard", 2), ("ddp", 2))]):
        own = partial(continued, before, after, out / f"whole{number}", OfWholeTensors, constant)
        found.append(own(inner=lambda optimizer: optimizer))
        found.append(of_copies_in_buffers(before, after, out / f"copies{number}"))
    dist.destroy_process_group()
    return found


def test_states_and_buffers_beside_fsdp2_continue(tmp_path):
    for found in on_ranks(2, loops_of_fsdp2, tmp_path):
        assert len(found) == 6 and max(found) < 1e-5


def continued(
    before: tuple[str, int],
    after: tuple[str, int],
    out: Path,
    kind: Callable,
    schedule: Callable,
    *,
    inner: Callable,
) -> float:
    """How far a run of four steps is from a plain one, if it is saved after two."""
    plain_model = layers()
    plain_optimizer = kind(plain_model.parameters())
    scheduler = schedule(plain_optimizer)
    for seed in range(4):
        step_of(plain_model, [plain_optimizer], seed, 6)
        scheduler.step()
    model = sharded(layers(), *before, unused=False)
    optimizer = kind(model.parameters())
    scheduler = schedule(optimizer)
    for seed in range(2):
        step_of(model, [optimizer], seed, 6)
        scheduler.step()
    state = {"scheduler": scheduler.state_dict()}
    saved = checkpoint.save(out, 2, model, inner(optimizer), state)
    model = sharded(layers(), *after, unused=False)
    optimizer = kind(model.parameters())
    scheduler = schedule(optimizer)
    loaded = checkpoint.load(saved, model, inner(optimizer))
    scheduler.load_state_dict(loaded["scheduler"])
    for seed in range(2, 4):
        step_of(model, [optimizer], seed, 6)
        scheduler.step()
    return apart(model, plain_model)


LOOPS = [
    of_two_optimizers,
    of_an_outer_optimizer,
    of_states_of_other_types,
    of_student_and_teacher,
    of_shared_blocks,
    of_a_compiled_model,
    of_odd_names_of_states,
    of_saves_after_forward,
]
PAIRS = [(("full_shard", 1), ("full_shard", 2)), (("hybrid", 2), ("ddp", 2))]
if FULL:
    PAIRS += [
        (("ddp", 2), ("full_shard", 1)),
        (("full_shard", 2), ("hybrid", 1)),
        (("no_shard", 1), ("shard_grad_op", 2)),
    ]


def all_loops() -> dict[tuple[str, int], float]:
    """On every rank: how far each loop is from one process, or what it raises."""
    join()
    warnings.simplefilter("ignore")
    found = {}
    for number, (before, after) in enumerate(PAIRS):
        for loop in LOOPS:
            out = Path(os.environ["FOLDER"], f"{loop.__name__}{number}")
            try:
                found[loop.__name__, number] = loop(before, after, out)
            except Exception:
                found[loop.__name__, number] = traceback.format_exc()[-1500:]
                break
    dist.destroy_process_group()
    return found


def test_several_models_and_optimizers_continue(tmp_path):
    found, *_ = on_ranks(2, all_loops, tmp_path)
    wrong = {case: apart for case, apart in found.items() if isinstance(apart, str) or apart > 1e-5}
    assert not wrong, next(iter(wrong.values()))
    assert len(found) == len(LOOPS) * len(PAIRS)


# --- what could not be loaded again is refused when it is saved, on all ranks


def with_state(model: nn.Module, **leaves: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[next(model.parameters())] = leaves
    return optimizer


def with_key(model: nn.Module, key: object) -> torch.optim.Optimizer:
    optimizer = with_state(model)
    for p in model.parameters():
        optimizer.state[p] = {key: torch.zeros_like(p)}
    return optimizer


def of_another_model(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(6, 6).parameters(), 0.1)


def with_callable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model.parameters(), "rule": min}], 0.1)


def with_global_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state["total"] = {"steps": torch.ones(1)}
    return optimizer


class CountsSteps(torch.optim.SGD):
    """Its state_dict has a number of its own."""

    def state_dict(self) -> dict:
        return super().state_dict() | {"count": 3}


REFUSED: list[tuple[Callable, str]] = [
    (lambda m: CountsSteps(m.parameters(), 0.1), "state_dict of CountsSteps has count too"),
    (of_another_model, r"parameter of shape \(6, 6\) that the model lacks: build .* sharding"),
    (lambda m: [with_state(m), with_state(m)], "0.weight is in two optimizers"),
    (lambda m: Outer(m.parameters()), "Outer keeps its states in .base: give that optimizer"),
    (lambda m: with_state(m, history=[1.0]), "the state history of 0.weight is list, but only t"),
    (lambda m: with_state(m, parts={"a": 1}), "the state parts of 0.weight is dict, but only t"),
    (lambda m: with_key(m, 0), "a state of 0.weight has the key 0, which is not a string"),
    (lambda m: with_key(m, ("a", 1)), r"has the key \('a', 1\), which is not a string"),
    (lambda m: with_state(m, row=torch.ones(6)), r"row is \(6,\), its parameter \(6, 6\): .* ddp"),
    (with_callable, "rule of a parameter group of SGD is builtin_function_or_method"),
    (with_global_state, "SGD has a state of 'total', which it does not train"),
]


def refusals() -> list[str]:
    """On every rank: what each save says."""
    join()
    out = Path(os.environ["FOLDER"], "out")
    told = []
    model = sharded(layers(), "full_shard", 2)
    for build, _ in REFUSED:
        try:
            checkpoint.save(out, 1, model, build(model))
            told.append("saved")
        except ValueError as error:
            told.append(str(error))
    # of one rank alone
    optimizer = with_state(model)
    if dist.get_rank() == 1:
        optimizer = with_state(model, history="x")
    with pytest.raises(ValueError, match=r"history of .* is str"):
        checkpoint.save(out, 1, model, optimizer)
    # as of a scheduler that follows the loss of each rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + dist.get_rank())
    with pytest.raises(ValueError, match=r"learning rates .* differ between ranks"):
        checkpoint.save(out, 1, model, optimizer)
    # after a load all ranks would hold these, and only their owners would update them
    model_of_owners = sharded(layers(), "ddp", 2)
    optimizer = OfOwners(model_of_owners.parameters())
    step_of(model_of_owners, [optimizer], 0, 6)
    with pytest.raises(ValueError, match="some ranks have optimizer states for parameters for wh"):
        checkpoint.save(out, 1, model_of_owners, optimizer)
    refused_by_fsdp1(out)
    assert checkpoint.list_checkpoints(out) == []
    checkpoint.save(out, 1, model, with_state(model))
    dist.destroy_process_group()
    return told


def refused_by_fsdp1(out: Path) -> None:
    """What FSDP1 cannot convert, also if one rank alone has it, and a part of its model."""
    model = sharded(nn.Sequential(layers(), nn.Tanh()), "full_shard", 1)
    first = next(model.parameters())
    lists = with_state(model)
    if dist.get_rank() == 1:
        lists = with_key(model, 3)
    two_types = {"a": torch.zeros_like(first), "b": torch.zeros_like(first, dtype=torch.half)}
    for optimizer, words in (
        (lists, "has the key 3, which is not a string"),
        (with_state(model, row=torch.ones(1, 6)), "0.0.weight must have its shape or be scalars"),
        (with_state(model, **two_types), "0.0.weight .* have one dtype, under FSDP1: use mode ddp"),
    ):
        with pytest.raises(ValueError, match=words):
            checkpoint.save(out, 1, model, optimizer)
    for make, words in ((with_callable, "is builtin_f"), (with_global_state, "state of 'total'")):
        optimizer = make(model) if dist.get_rank() == 1 else with_state(model)
        with pytest.raises(ValueError, match=words):
            checkpoint.save(out, 1, model, optimizer)
    state = {"rule": print} if dist.get_rank() == 1 else {}
    with pytest.raises(ValueError, match=r"run_state\['rule'\] is builtin_function_or_method"):
        checkpoint.save(out, 1, model, with_state(model), state)
    with pytest.raises(ValueError, match="is sharded by FSDP1 in a larger model: give the w"):
        checkpoint.save(out, 1, model.module[0], None)


def test_what_could_not_be_loaded_again_is_refused_at_the_save(tmp_path):
    for told in on_ranks(2, refusals, tmp_path):
        for sentence, (_, words) in zip(told, REFUSED, strict=True):
            assert re.search(words, sentence), sentence


def test_a_run_state_comes_back_as_it_was(single, tmp_path):
    """Or it is refused: what JSON has no word for, and names that the manifest needs."""
    model = layers()
    state = {
        "position": {3: 0.5, 10: [1, None, {True: "a"}]},
        "milestones": Counter({4: 1, 9: 2}),
        "best": float("inf"),
        "": {"name": "text", "flag": False},
    }
    saved = checkpoint.save(tmp_path, 1, model, None, state)
    loaded = checkpoint.load(saved, model, None)
    assert {key: loaded[key] for key in state} == state
    assert type(loaded["milestones"]) is Counter and type(loaded["position"]) is dict
    for wrong, words in (
        ({"a": {"b": torch.ones(1)}}, r"run_state\['a'\]\['b'\] is Tensor, which JSON cannot hold"),
        ({"files": 1}, "run_state has the key files, which the manifest itself uses"),
        ({"rule": print}, r"run_state\['rule'\] is builtin_function_or_method"),
    ):
        with pytest.raises(ValueError, match=words):
            checkpoint.save(tmp_path, 2, model, None, wrong)


def test_a_thread_that_saves_needs_a_group_of_its_own(single, tmp_path):
    """In one group with training it would meet the collectives of training."""
    for group in (None, dist.group.WORLD):
        with pytest.raises(ValueError, match="background needs a group of its own"):
            checkpoint.Saver(tmp_path, layers(), None, group=group, background=True)


class Counting(nn.Linear):
    """What it counts is no buffer."""

    seen: object = 0

    def get_extra_state(self) -> object:
        return self.seen

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state.clone()


def test_an_extra_state_is_a_tensor(single, tmp_path):
    model = Counting(2, 2)
    with pytest.raises(ValueError, match="_extra_state is int, but of a model only tensors"):
        checkpoint.save(tmp_path, 1, model, None)
    model.seen = torch.tensor([5])
    saved = checkpoint.save(tmp_path, 1, model, None)
    model.seen = torch.tensor([0])
    checkpoint.load(saved, model, None)
    assert model.seen == torch.tensor([5])


class Growing(nn.Linear):
    """What it keeps as an extra state has another size in a new model, as in Transformer Engine."""

    kept = torch.empty(0, dtype=torch.uint8)

    def get_extra_state(self) -> Tensor:
        return self.kept

    def set_extra_state(self, state: Tensor) -> None:
        self.kept = state.clone()


def test_an_extra_state_may_change_its_size(single, tmp_path):
    model = Growing(2, 2)
    model.kept = torch.arange(5, dtype=torch.uint8)
    saved = checkpoint.save(tmp_path, 1, model, None)
    fresh = Growing(2, 2)
    checkpoint.load(saved, fresh, None)
    assert fresh.kept.tolist() == [0, 1, 2, 3, 4]


def without_backbone(model: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}backbone.")]:
        del state[name]


def with_a_backbone() -> nn.Module:
    model = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    model.backbone.requires_grad_(False)
    model.register_state_dict_post_hook(without_backbone)
    return model


def test_what_no_checkpoint_will_have_needs_a_value(single):
    """Else it would be whatever was in memory."""
    grid = mesh.build_mesh((1, 1), CPU)
    with torch.device("meta"):
        model = with_a_backbone()
    with pytest.raises(ValueError, match=r"backbone\.weight is in no checkpoint: give `in"):
        shard.apply(model, "full_shard", grid, block_classes=set(), uninitialized=True)


def test_a_model_may_leave_frozen_parts_out_of_its_state(single, tmp_path):
    model, fresh = with_a_backbone(), with_a_backbone()
    backbone = fresh.backbone.weight.clone()
    saved = checkpoint.save(tmp_path, 1, model, torch.optim.SGD(model.head.parameters(), 0.1))
    checkpoint.load(saved, fresh, torch.optim.SGD(fresh.head.parameters(), 0.1))
    assert torch.equal(fresh.head.weight, model.head.weight)
    assert torch.equal(fresh.backbone.weight, backbone)


def test_a_save_behind_the_newest_checkpoint_warns(single, tmp_path, capsys):
    """The next start would resume from the one that the user has gone back from."""
    model = layers()
    checkpoint.save(tmp_path, 9, model, None)
    checkpoint.save(tmp_path, 6, model, None)
    assert "step_00000009 is further than step 6, just saved: move" in capsys.readouterr().err


def test_other_optimizers_than_those_saved_are_refused(single, tmp_path):
    """Instead of beginning anew without a word."""
    model = layers()
    saved = checkpoint.save(tmp_path, 1, model, torch.optim.SGD(model.parameters(), 0.1))
    parts = [*model.parameters()]
    one_rate = [{"params": parts[:2], "lr": 0.3}, {"params": parts[2:]}]
    two_rates = checkpoint.save(tmp_path, 2, model, torch.optim.SGD(one_rate, 0.1))
    for folder, optimizer, words in (
        (saved, torch.optim.Adam(parts), "0.bias was trained by SGD, now by Adam"),
        (saved, torch.optim.SGD(parts[:3], 0.1), "2.bias was trained by SGD, now by no optimizer"),
        (two_rates, torch.optim.SGD(parts, 0.1), "had different settings, but are in one param"),
    ):
        with pytest.raises(checkpoint.CorruptCheckpointError, match=words):
            checkpoint.load(folder, model, optimizer)
    checkpoint.load(saved, model, None)


def test_a_save_before_the_first_step_changes_nothing(single, tmp_path):
    """A momentum of zeros is another beginning than none."""
    models = [layers(), layers()]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.9)
        if model is models[0]:
            checkpoint.save(tmp_path, 0, model, optimizer)
        step_of(model, [optimizer], 0, 6)
    assert apart(models[0], models[1]) == 0


# --- one process


class Pair(torch.optim.Optimizer):
    """Keeps its optimizers in a list, as wrappers around Muon and AdamW do."""

    def __init__(self, parameters: Iterable) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.optimizers = [torch.optim.SGD(parameters[:1], 0.1), torch.optim.AdamW(parameters[1:])]

    def step(self, closure: Callable | None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def test_states_of_another_dtype_than_their_parameter_keep_every_bit(single, tmp_path):
    def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).bfloat16()
        optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
        for step in range(5):
            model(torch.full((2, 4), step + 1.0, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        optimizer.state[model.weight]["master"] = torch.linspace(0, 1, 16).view(4, 4)
        optimizer.state[model.weight]["counts"] = torch.full((4, 4), 2**24 + 1)
        return model, optimizer

    model, optimizer = trained()
    folder = checkpoint.save(tmp_path, 1, model, optimizer)
    fresh, other = trained()
    for state in other.state.values():
        for value in state.values():
            value.zero_()
    checkpoint.load(folder, fresh, other)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        for leaf, value in optimizer.state[p].items():
            loaded = other.state[q][leaf]
            assert loaded.dtype == value.dtype and torch.equal(loaded, value), leaf


def test_what_no_load_could_restore_is_refused_at_the_save(single, tmp_path):
    model = nn.Linear(2, 2)
    for optimizer, run_state, words in (
        (Pair(model.parameters()), {}, "Pair keeps its states in .optimizers"),
        (None, {0: "x", "epoch": 3}, "a key that is not a string"),
    ):
        with pytest.raises(ValueError, match=words):
            checkpoint.save(tmp_path, 1, model, optimizer, run_state)
    assert not [*tmp_path.glob("step_*")]


def test_flat_parameters_of_fsdp1_are_refused_at_the_save(single, tmp_path):
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=CPU)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="use_orig_params=True"):
        checkpoint.save(tmp_path, 1, model, optimizer)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ("int64", "int32"),
        ("int64", "uint8"),
        ("float32", "int64"),
        ("complex64", "float32"),
        ("int32", "int64"),
        ("float32", "bfloat16"),
    ],
)
def test_a_buffer_takes_only_values_that_it_can_hold(saved, own, single, tmp_path):
    def model_of(dtype: str) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.tensor([300, 7]).to(getattr(torch, dtype)))
        return model

    folder = checkpoint.save(tmp_path, 1, model_of(saved), None)
    model = model_of(own)
    if (saved, own) in (("int32", "int64"), ("float32", "bfloat16")):
        model.table.zero_()
        checkpoint.load(folder, model, None)
        assert model.table.tolist() == [300, 7]
        return
    with pytest.raises(ValueError, match=f"table is torch.{saved} in the checkpoint, torch.{own}"):
        checkpoint.load(folder, model, None)


def test_a_model_on_meta_is_refused(single, tmp_path):
    folder = checkpoint.save(tmp_path, 1, nn.Linear(2, 2), None)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="is on meta"):
        checkpoint.load(folder, model, None)


def test_a_failed_save_of_a_step_that_exists_leaves_it(single, tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    folder = checkpoint.save(tmp_path, 1, model, None)
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name.endswith(".writing"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.save(tmp_path, 1, model, None)
    assert checkpoint.check(folder) and [path.name for path in tmp_path.glob("*step_*")] == [
        "step_00000001"
    ]


def test_a_saver_keeps_its_folder_when_the_program_goes_to_another(single, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saver = checkpoint.Saver("out", nn.Linear(2, 2), None, keep=1)
    saver.save(1, {})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    saver.save(2, {})
    assert [path.name for path in tmp_path.rglob("step_*")] == ["step_00000002"]
