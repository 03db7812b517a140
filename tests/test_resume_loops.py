"""Loops that are not ours, saved and resumed in another mode: optimizers, schedulers, two models.

Each is compared with one uninterrupted process of plain PyTorch, without any file of this project.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import FULL
from ranks import full_parameters, join, on_ranks
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler

import checkpoint
import mesh
import shard

CPU = torch.device("cpu")
STEPS = 6
CUT = 3
BATCH = 12  # which 2, 3 and 4 ranks divide
ROWS = [("ddp", 2), ("zero1", 2)]
ROWS += [
    (mode, fsdp)
    for fsdp in (1, 2)
    for mode in ("no_shard", "shard_grad_op", "full_shard", "hybrid", "hybrid_grad_op")
]
Row = tuple[str, int]  # mode, FSDP1 or FSDP2


class Net(nn.Module):
    """Layers of which some have fewer rows than there are ranks, a tied weight, a buffer."""

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
    "NAdam": partial(torch.optim.NAdam, eps=1e-3),
    "Lion": Lion,
}
OPTIMIZERS = EVERYWHERE | DDP_AND_FSDP2
SCHEDULERS: list[Callable] = [
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=5),
]


def optimizers_of(model: nn.Module, mode: str, name: str, several: bool) -> list:
    """One with two groups, or two, one of which is AdamW."""
    named = dict(model.named_parameters())
    first = [p for n, p in named.items() if not n.endswith("bias")]
    rest = [p for n, p in named.items() if n.endswith("bias")]
    build = torch.optim.Muon if name == "Muon" else OPTIMIZERS[name]
    if several:
        return [build(first, lr=0.02), torch.optim.AdamW(rest, lr=0.01, eps=1e-3)]
    groups = [{"params": first}, {"params": rest, "lr": 0.01}]
    if mode == "zero1":
        kind = {"optimizer_class": build.func, **build.keywords}
        return [ZeroRedundancyOptimizer(groups, lr=0.02, **kind)]
    return [build(groups, lr=0.02)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=draw), torch.randn(BATCH, 3, generator=draw)


def train(model: nn.Module, optimizers: list, scheduler, steps: Iterable[int], part: slice) -> list:
    """An ordinary loop; the rates in each step."""
    rates = []
    for step in steps:
        x, y = batch(step)
        (model(x[part]) - y[part]).square().mean().backward()
        rates.append([group["lr"] for group in optimizers[0].param_groups])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return rates


Case = tuple[str, int, bool, Row, Row]  # optimizer, scheduler, several optimizers, before, after


def cases_of(pairs: list[tuple[Row, Row]]) -> list[Case]:
    """Each optimizer that all rows take on all pairs, the others on their pairs of rows."""
    cases: list[Case] = []
    for i, (before, after) in enumerate(pairs):
        fsdp1 = 1 in (before[1], after[1])
        zero1 = "zero1" in (before[0], after[0])
        for j, name in enumerate(EVERYWHERE if fsdp1 or zero1 else OPTIMIZERS):
            several = not fsdp1 and not zero1 and (i + j) % 3 == 0
            cases.append((name, (i + j) % len(SCHEDULERS), several, before, after))
    return cases


ROW_TO_ROW = cases_of([(row, ROWS[(3 * i + 4) % len(ROWS)]) for i, row in enumerate(ROWS)])
# each pair of rows, and half of its optimizers: in turns the first and the second of two
DAILY = [case for i, case in enumerate(ROW_TO_ROW) if i % 4 in (0, 3)]
EVERY_PAIR = cases_of(list(itertools.product(ROWS, ROWS)))


def sharded(model: nn.Module, mode: str, fsdp: int) -> nn.Module:
    """The model in a mode; hybrid in groups of two, or of all ranks if their number is odd."""
    world = dist.get_world_size()
    group = (2 if world % 2 == 0 else world) if "hybrid" in mode else None
    grid = mesh.build_mesh(mesh.mesh_shape(shard.STRATEGIES[mode].shard_over, world, group), CPU)
    options = shard.ShardingOptions(param_dtype=torch.float32)
    if shard.STRATEGIES[mode].engine == "fsdp":
        options = shard.ShardingOptions(param_dtype=torch.float32, fsdp=fsdp)
    return shard.apply(model, mode, grid, block_classes={nn.Sequential}, options=options)


def start(case: Case, row: Row, seed: int) -> tuple:
    """Model, optimizers, scheduler, as a user's program builds them at every start."""
    torch.manual_seed(seed)
    model = sharded(Net(), *row)
    optimizers = optimizers_of(model, row[0], case[0], case[2])
    return model, optimizers, SCHEDULERS[case[1]](optimizers[0])


def part_of_rank() -> slice:
    size = BATCH // dist.get_world_size()
    return slice(size * dist.get_rank(), size * (dist.get_rank() + 1))


def cut(cases: list[Case], out: Path) -> list[list]:
    """On every rank: train each case to the cut, and save it; the rates."""
    join()
    warnings.simplefilter("ignore")
    found = []
    for number, case in enumerate(cases):
        model, optimizers, scheduler = start(case, case[3], seed=0)
        found.append(train(model, optimizers, scheduler, range(CUT), part_of_rank()))
        state = {"scheduler": scheduler.state_dict()}
        loss = model(torch.zeros(1, 6)).sum()  # after a forward pass, FSDP may hold whole weights
        checkpoint.save(out / str(number), CUT, model, optimizers, state)
        loss.backward()
    dist.destroy_process_group()
    return found


def resume(cases: list[Case], out: Path) -> list[tuple[list, dict[str, Tensor]]]:
    """On every rank: load each case in its other row and finish it; rates and parameters."""
    join()
    warnings.simplefilter("ignore")
    found = []
    for number, case in enumerate(cases):
        model, optimizers, scheduler = start(case, case[4], seed=9)
        newest = checkpoint.find_newest(out / str(number))
        loaded = checkpoint.load(newest, model, optimizers)
        assert loaded.keys() == {"step", "run_state"} and loaded["step"] == CUT
        scheduler.load_state_dict(loaded["run_state"]["scheduler"])
        rates = train(model, optimizers, scheduler, range(CUT, STEPS), part_of_rank())
        assert [int(buffer) for buffer in model.buffers()] == [STEPS + 1]
        found.append((rates, full_parameters(model)))
    dist.destroy_process_group()
    return found


def plain(case: Case) -> tuple[list, dict[str, Tensor]]:
    """One process, whole batches, no interruption."""
    torch.manual_seed(0)
    model = Net()
    optimizers = optimizers_of(model, "", case[0], case[2])
    scheduler = SCHEDULERS[case[1]](optimizers[0])
    rates = train(model, optimizers, scheduler, range(STEPS), slice(BATCH))
    return rates, dict(model.named_parameters())


def compare(cases: list[Case], before: int, after: int, folder: Path) -> None:
    """Save each case on so many ranks, resume it on others, compare it with one process."""
    out = folder / "out"
    first, *_ = on_ranks(before, partial(cut, cases, out), folder / "before", timeout=1800)
    second, *_ = on_ranks(after, partial(resume, cases, out), folder / "after", timeout=1800)
    wrong = []
    for case, early, (late, parameters) in zip(cases, first, second, strict=True):
        rates, expected = plain(case)
        apart = max((parameters[n] - value).abs().max().item() for n, value in expected.items())
        if early + late != rates or apart > 1e-5:
            wrong.append((case, early + late == rates, apart))
    assert not wrong


@pytest.mark.slow
def test_ordinary_loops_continue_in_another_row_on_other_ranks(tmp_path):
    compare(DAILY, 2, 4, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 4), (4, 3), (3, 2)])
def test_any_row_loads_what_any_row_saved(before, after, tmp_path):
    compare(EVERY_PAIR if FULL else ROW_TO_ROW, before, after, tmp_path)


def muon_cut_and_uncut(out: Path) -> list[bool]:
    """On every rank: whether a run of Muon and AdamW that is saved and loaded ends as one that is
    not. In one row: bf16 in its iteration rounds otherwise in another."""
    join()
    warnings.simplefilter("ignore")
    same = []
    for i, row in enumerate((("ddp", 2), ("full_shard", 2), ("hybrid", 2))):
        case = ("Muon", 1, True, row, row)
        model, optimizers, scheduler = start(case, row, seed=0)
        train(model, optimizers, scheduler, range(CUT), part_of_rank())
        state = {"scheduler": scheduler.state_dict()}
        saved = checkpoint.save(out / str(i), CUT, model, optimizers, state)
        train(model, optimizers, scheduler, range(CUT, STEPS), part_of_rank())
        expected = full_parameters(model)
        model, optimizers, scheduler = start(case, row, seed=9)
        loaded = checkpoint.load(saved, model, optimizers)
        scheduler.load_state_dict(loaded["run_state"]["scheduler"])
        train(model, optimizers, scheduler, range(CUT, STEPS), part_of_rank())
        found = full_parameters(model)
        same.append(all(torch.equal(found[name], expected[name]) for name in expected))
    dist.destroy_process_group()
    return same


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_continues(tmp_path):
    for same in on_ranks(2, partial(muon_cut_and_uncut, tmp_path / "out"), tmp_path):
        assert same == [True, True, True]
