"""fp16: the ranks agree on the gradient scale, and gradients that stay NaN end a run."""

import torch
import torch.distributed as dist
from conftest import FULL
from ranks import NANO, NANO_ARGV, Run, Seen, join, on_ranks, poisoned, read_log
from torch import nn

import mesh
import shard
import train_fsdp
import vit

CPU = torch.device("cpu")
ROWS = [("ddp", 2), ("full_shard", 1), ("full_shard", 2)]
if FULL:
    ROWS += [("zero1", 2), ("no_shard", 1), ("hybrid", 2), ("shard_grad_op", 1)]


def scales_after_one_bad_rank() -> list[list[float]]:
    """On every rank: its scale after each step; rank 1 alone has an infinite gradient in step 1."""
    rank = join()
    found = [scales_of_training(rank, mode, fsdp) for mode, fsdp in ROWS]
    dist.destroy_process_group()
    return found


def scales_of_training(rank: int, mode: str, fsdp: int) -> list[float]:
    """Train a small model for three steps in one mode -> the scale after each."""
    group = 2 if mode == "hybrid" else None
    shape = mesh.mesh_shape(shard.STRATEGIES[mode].shard_over, 2, group)
    grid = mesh.build_mesh(shape, CPU)
    if shard.STRATEGIES[mode].engine == "fsdp":
        options = shard.ShardingOptions(param_dtype=torch.float16, fsdp=fsdp)
    else:
        options = shard.ShardingOptions(param_dtype=torch.float16)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model = shard.apply(model, mode, grid, block_classes=set(), options=options)
    optimizer = shard.build_optimizer(model, mode, set(), lr=1e-3, weight_decay=0.0)
    scaler = shard.build_scaler(model, CPU, torch.float16)
    guard = train_fsdp.Guard(CPU)
    scales = []
    for step in range(3):
        with shard.autocast(model, CPU, torch.float16):
            loss = model(torch.ones(2, 4)).float().square().mean()
        if (rank, step) == (1, 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = shard.clip_grad_norm(model)
        skip = guard.check(step, loss.detach(), norm, train_fsdp.NO_REQUESTS, scaled=True)
        shard.optimizer_step(optimizer, skip)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def test_all_ranks_have_the_same_scale(tmp_path):
    first, second = on_ranks(2, scales_after_one_bad_rank, tmp_path)
    assert first == second
    for row, scales in zip(ROWS, first, strict=True):
        assert scales[1] < scales[0] and scales[2] == scales[1], row


def test_infinite_norms_are_bad_once_the_scale_is_at_its_end(single):
    """A good step between them begins a new search."""
    guard = train_fsdp.Guard(CPU)
    one = torch.tensor(1.0)
    nan = torch.tensor(float("nan"))

    def bad(norm: torch.Tensor) -> bool:
        skip = guard.check(0, one, norm, train_fsdp.NO_REQUESTS, scaled=True)
        (result,) = guard.results(wait=False)
        assert bool(skip) == bool(result.bad or norm is nan)
        return bool(result.bad)

    searching = [nan for _ in range(train_fsdp.MAX_OVERFLOWS)]
    assert not any(bad(norm) for norm in [*searching, one, *searching])
    assert bad(nan)


def test_gradients_that_stay_nan_end_the_run(tmp_path, monkeypatch):
    """In one process; tests/test_train.py has a bad step of one rank."""
    monkeypatch.setitem(vit.MODELS, "nano", NANO)
    argv = [*NANO_ARGV, "--steps", "60", "--precision", "fp16", "--global-batch", "2"]
    always = Run([], poison="gradient", poison_steps=(0,))
    with poisoned(always, Seen(step=0)):
        status = train_fsdp.main([*argv, "--save-every", "none", "--out", str(tmp_path)])
    _, _, end = read_log(tmp_path / "log.jsonl")
    assert status == 1 and end["reason"] == "nan"
    assert end["steps"] == train_fsdp.MAX_OVERFLOWS
