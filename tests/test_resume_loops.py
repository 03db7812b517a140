"""Loops that are not ours, saved and resumed in another mode: optimizers, schedulers, two models.

Each is compared with one uninterrupted process of plain PyTorch, without any file of this project.
"""

import itertools
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import full_parameters, join, on_ranks
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler

import checkpoint
import mesh
import shard

CPU = torch.device("cpu")
STEPS, CUT, BATCH = 8, 4, 4
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
                    state["moving"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                mean = state["moving"] * group["beta"] + p.grad * (1 - group["beta"])
                rate = group["lr"] / (state["count"] + group["seen"])
                p.add_((10 * mean).tanh(), alpha=-rate)
                state["moving"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])


def adafactor_like(params: Iterable, **given: float) -> torch.optim.Optimizer:
    """Whose states are no shape of the parameter's: mode ddp alone."""
    return torch.optim.Adafactor(params, **given)


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
}


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, 0.2, total_iters=3)
    then = lr_scheduler.MultiStepLR(optimizer, [2, 3], 0.5)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[3])


def chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=5)
    return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, 0.8)])


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
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.02, 0.01, 0.02], STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, "min", 0.5, patience=0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, 5),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}
CYCLES_MOMENTUM = {"AdamW", "AdamW amsgrad", "Adam", "SGD momentum", "NAdam", "RAdam", "Adamax"}


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
    if scheduler == "OneCycleLR" and optimizer not in CYCLES_MOMENTUM:
        rates = [0.02, 0.01, 0.02]
        return made, lr_scheduler.OneCycleLR(made, rates, STEPS + 1, cycle_momentum=False)
    return made, SCHEDULERS[scheduler](made)


# --- on ranks


def sharded(
    model: nn.Module, mode: str, fsdp: int, *, unused: bool = True, blocks: tuple = ()
) -> nn.Module:
    """The model in a mode of two or more ranks; hybrid in groups of two."""
    world = dist.get_world_size()
    grid = mesh.build_mesh(shard.mesh_shape(mode, world, 2 if "hybrid" in mode else None), CPU)
    given = {"param_dtype": FP32}
    if shard.STRATEGIES[mode].engine == "fsdp":
        given["fsdp"] = fsdp
    elif unused:
        given["find_unused_parameters"] = True
    options = shard.ShardingOptions(**given)
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
        if (self.before[1], self.after[1]) == (2, 2):
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
        before, after = MODES[i % len(MODES)], MODES[(2 * i + 3) % len(MODES)]
        cases.append(Case(optimizer, scheduler, before, after))
    return cases


def matrix() -> list[Case]:
    """Each optimizer saved in each mode, and loaded in each; the schedulers in turn."""
    schedulers = itertools.cycle(SCHEDULERS)
    products = itertools.product(OPTIMIZERS, MODES, range(len(MODES)))
    cases = []
    for optimizer, before, shift in products:
        after = MODES[(MODES.index(before) + shift) % len(MODES)]
        cases.append(Case(optimizer, next(schedulers), before, after))
    return cases


def part_of_rank() -> slice:
    size = BATCH // dist.get_world_size()
    return slice(size * dist.get_rank(), size * (dist.get_rank() + 1))


def resume_all(cases: list[Case]) -> list[tuple[list, dict[str, Tensor]]]:
    """On every rank: the rates and the last parameters of each case."""
    join()
    found, out = [], Path(os.environ["FOLDER"], "out")
    for number, case in enumerate(cases):
        torch.manual_seed(0)
        model = sharded(Net(), *case.before)
        optimizer, scheduler = built(model, case.before[0], case.optimizer, case.scheduler)
        rates = train(model, optimizer, scheduler, range(CUT), part_of_rank(), case.tail_from)
        run_state = {"scheduler": scheduler.state_dict()}
        saved = checkpoint.save(out / str(number), CUT, model, optimizer, run_state)

        torch.manual_seed(9)
        model = sharded(Net(), *case.after)
        optimizer, scheduler = built(model, case.after[0], case.optimizer, case.scheduler)
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


def compare(cases: list[Case], found: list[tuple[list, dict[str, Tensor]]]) -> None:
    wrong = []
    for case, (rates, parameters) in zip(cases, found, strict=True):
        expected_rates, expected = plain(case)
        differences = [(parameters[n] - value).abs().max().item() for n, value in expected.items()]
        if rates != expected_rates or max(differences) > 1e-5:
            wrong.append((case, rates == expected_rates, max(differences)))
    assert not wrong


class ResumeAll:
    """`resume_all` of some cases, for `on_ranks`."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases

    def __call__(self) -> list:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return resume_all(self.cases)


def test_ordinary_loops_continue_in_another_mode(tmp_path):
    cases = daily()
    compare(cases, on_ranks(2, ResumeAll(cases), tmp_path)[0])


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_every_optimizer_from_every_mode_to_every_mode(world, tmp_path):
    cases = matrix()
    compare(cases, on_ranks(world, ResumeAll(cases), tmp_path, 3000)[0])
