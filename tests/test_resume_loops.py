"""Loops that are not ours, saved and resumed in another mode: optimizers, schedulers.

Each is compared with one uninterrupted process of plain PyTorch, without any file of this project.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from checkpoints import mesh_of
from ranks import full_parameters, join, on_ranks
from small_model import ROWS
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler

import checkpoint
import shard

STEPS = 6
CUT = 3
BATCH = 12  # which 2, 3 and 4 ranks divide
Row = tuple[str, int]  # mode, FSDP1 or FSDP2


class Net(nn.Module):
    """Layers of which some have fewer rows than there are ranks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, 7))
        self.head = nn.Linear(7, 3, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.head(self.body(x).tanh())


class Lion(torch.optim.Optimizer):
    """Of Chen et al. 2023, with a smooth function instead of the sign."""

    def __init__(self, params: Iterable, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moving"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["count"] = torch.zeros(())
                state["count"] += 1
                moving = state["moving"].to(p.dtype)
                update = (10 * moving.lerp(p.grad, 1 - group["betas"][0])).tanh()
                p.sub_(update, alpha=group["lr"] / state["count"].item())
                state["moving"].copy_(moving.lerp(p.grad, 1 - group["betas"][1]))


EVERYWHERE: dict[str, Callable] = {
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.1, eps=1e-3),
    "SGD": partial(torch.optim.SGD, momentum=0.9, dampening=0.5, weight_decay=0.1),
}
DDP_AND_FSDP2: dict[str, Callable] = {
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True, eps=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1, lr_decay=0.1),
    "Lion": Lion,
}
OPTIMIZERS = EVERYWHERE | DDP_AND_FSDP2
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = torch.optim.Muon
SCHEDULERS: list[Callable] = [
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=5),
]


class Case(NamedTuple):
    """A program that is saved in one row and goes on in another."""

    optimizer: str
    scheduler: int
    several: bool  # two optimizers, one of which is AdamW, instead of two groups
    before: Row
    after: Row


ANY = [row for row in ROWS if row[1] == 2 and row[0] != "zero1"]  # that take any optimizer


def cases_of(pairs: Iterable[tuple[Row, Row]], names: Sequence[str]) -> list[Case]:
    """These optimizers on each pair, in turns with other schedulers."""
    found = []
    for (before, after), name in itertools.product(pairs, names):
        i = len(found)
        several = before in ANY and after in ANY and i % 3 == 0
        found.append(Case(name, i % len(SCHEDULERS), several, before, after))
    return found


# each row is saved once and loaded once
TURNS = [(row, ROWS[(5 * i + 3) % len(ROWS)]) for i, row in enumerate(ROWS)]
DAILY = cases_of(TURNS[::2], ["AdamW"]) + cases_of(TURNS[1::2], ["SGD"])
DAILY += cases_of([(ANY[0], ANY[3]), (ANY[4], ANY[0])], [*DDP_AND_FSDP2])
EVERY_PAIR = cases_of(itertools.product(ROWS, ROWS), [*EVERYWHERE])
EVERY_PAIR += cases_of(itertools.product(ANY, ANY), [*DDP_AND_FSDP2])
# in one row: bf16 in its iteration rounds otherwise in another
MUON = [Case("Muon", 1, True, row, row) for row in (("ddp", 2), ("full_shard", 2), ("hybrid", 2))]


def sharded(model: nn.Module, mode: str, fsdp: int) -> nn.Module:
    """Shard a model; hybrid in groups of two, or of all ranks if their number is odd."""
    world = dist.get_world_size()
    group = (2 if world % 2 == 0 else world) if "hybrid" in mode else None
    options = shard.ShardingOptions(param_dtype=torch.float32)
    if shard.STRATEGIES[mode].engine == "fsdp":
        options = shard.ShardingOptions(param_dtype=torch.float32, fsdp=fsdp)
    of = {nn.Sequential}
    return shard.apply(model, mode, mesh_of(mode, group), block_classes=of, options=options)


class Program:
    """What a user's script builds at every start: model, optimizers, scheduler."""

    def __init__(self, case: Case, row: Row | None, seed: int) -> None:
        """Build it in a row; without one in plain PyTorch, for one process."""
        torch.manual_seed(seed)
        self.model: nn.Module = Net()
        self.part = slice(BATCH)
        self.mode = ""
        if row:
            self.mode, _ = row
            size = BATCH // dist.get_world_size()
            self.part = slice(size * dist.get_rank(), size * (dist.get_rank() + 1))
            self.model = sharded(self.model, *row)
        self.optimizers = self.build_optimizers(case)
        self.scheduler = SCHEDULERS[case.scheduler](self.optimizers[0])

    def build_optimizers(self, case: Case) -> list:
        """Build one with two groups, or two."""
        named = dict(self.model.named_parameters())
        first = [p for n, p in named.items() if not n.endswith("bias")]
        rest = [p for n, p in named.items() if n.endswith("bias")]
        build = OPTIMIZERS[case.optimizer]
        if case.several:
            return [build(first, lr=0.02), torch.optim.AdamW(rest, lr=0.01, eps=1e-3)]
        if self.mode == "zero1":
            build = partial(ZeroRedundancyOptimizer, optimizer_class=build.func, **build.keywords)
        return [build([{"params": first}, {"params": rest, "lr": 0.01}], lr=0.02)]

    def train(self, steps: Iterable[int]) -> list[list[float]]:
        """Train as an ordinary loop does; the rates in each step."""
        rates = []
        for step in steps:
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, 6, generator=draw)[self.part]
            y = torch.randn(BATCH, 3, generator=draw)[self.part]
            (self.model(x) - y).square().mean().backward()
            rates.append([group["lr"] for group in self.optimizers[0].param_groups])
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.scheduler.step()
        return rates


def cut(cases: list[Case], out: Path) -> list[tuple[list, dict[str, Tensor]]]:
    """On every rank: train each case and save it on the way; rates and parameters."""
    join()
    warnings.simplefilter("ignore")
    found = []
    for number, case in enumerate(cases):
        program = Program(case, case.before, seed=0)
        rates = program.train(range(CUT))
        state = {"scheduler": program.scheduler.state_dict()}
        loss = program.model(torch.zeros(1, 6)).sum()  # FSDP may hold whole weights after it
        checkpoint.save(out / str(number), CUT, program.model, program.optimizers, state)
        (0 * loss).backward()
        rates += program.train(range(CUT, STEPS))
        found.append((rates, full_parameters(program.model)))
    dist.destroy_process_group()
    return found


def resume(cases: list[Case], out: Path) -> list[tuple[list, dict[str, Tensor]]]:
    """On every rank: load each case in its other row and finish it; rates and parameters."""
    join()
    warnings.simplefilter("ignore")
    found = []
    for number, case in enumerate(cases):
        program = Program(case, case.after, seed=9)
        newest = checkpoint.find_newest(out / str(number))
        loaded = checkpoint.load(newest, program.model, program.optimizers)
        assert loaded.keys() == {"step", "run_state"} and loaded["step"] == CUT
        program.scheduler.load_state_dict(loaded["run_state"]["scheduler"])
        rates = program.train(range(CUT, STEPS))
        assert [int(buffer) for buffer in program.model.buffers()] == [STEPS + 1]
        found.append((rates, full_parameters(program.model)))
    dist.destroy_process_group()
    return found


def compare(cases: list[Case], before: int, after: int, folder: Path) -> None:
    """Save each case on so many ranks, resume it on others, compare both with one process."""
    out = folder / "out"
    first, *_ = on_ranks(before, partial(cut, cases, out), folder / "before", timeout=1800)
    second, *_ = on_ranks(after, partial(resume, cases, out), folder / "after", timeout=1800)
    wrong = []
    for case, (rates, uncut), (late, resumed) in zip(cases, first, second, strict=True):
        program = Program(case, None, seed=0)
        same = program.train(range(STEPS)) == rates and rates[CUT:] == late
        plain = dict(program.model.named_parameters())
        if case in MUON:
            plain = uncut
        apart = 0.0
        for name, value in plain.items():
            for found in (uncut, resumed):
                apart = max(apart, (found[name] - value).abs().max().item())
        if not same or apart > 1e-5:
            wrong.append((case, same, apart))
    assert not wrong


@pytest.mark.slow
def test_ordinary_loops_continue_in_another_row_on_other_ranks(tmp_path):
    compare(DAILY, 2, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_continues(tmp_path):
    compare(MUON, 2, 2, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 4), (4, 3), (3, 2)])
def test_any_row_loads_what_any_row_saved(before, after, tmp_path):
    compare(EVERY_PAIR, before, after, tmp_path)
