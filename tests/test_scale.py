"""A save and a load in a world of many ranks: shares, what is sent, what is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import ROOT
from ranks import Run, join, on_ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import checkpoint
import mesh
import shard
from benchmarks import scale

# --- shares


def rows_of(items) -> list[tuple[str, int, int]]:
    """(name, first row, number of rows) of each item; of a scalar (name, 0, 1)."""
    found = []
    for item in items:
        chunk = item.tensor_data.chunk
        found.append((item.index.fqn, (*chunk.offsets, 0)[0], (*chunk.sizes, 1)[0]))
    return found


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
def test_the_parts_of_replicas_are_the_whole_and_nothing_twice(parts):
    """Row by row, in tensors of few rows and many, in vectors, scalars and empty tensors."""
    shapes = {"a": (5, 3), "b": (1000, 2), "c": (7,), "d": (), "e": (0, 4), "f": (1, 300), "g": ()}
    kind = scale.WriteItemType.TENSOR
    items = [scale.item_of(n, torch.Size(s), 0, None, kind) for n, s in shapes.items()]
    written = set()
    for part in range(parts):
        pieces = checkpoint.equal_part(items, part, parts)
        for name, first, count in rows_of([piece.item for piece in pieces]):
            rows = {(name, row) for row in range(first, first + count)} or {(name, None)}
            assert not rows & written
            written |= rows
    assert written == {
        *(("a", row) for row in range(5)),
        *(("b", row) for row in range(1000)),
        *(("c", row) for row in range(7)),
        *(("d", 0), ("e", None), ("f", 0), ("g", 0)),
    }


@pytest.mark.parametrize("model", ["3b", "15b"])
@pytest.mark.parametrize("group", [2, 8])
def test_at_1024_ranks_no_share_is_larger_than_13_tenths_of_the_mean(model, group):
    state = scale.State(model)
    grid = scale.grid_of(f"hybrid:{group}", 1024)
    held = state.shards_of(0, group)
    plain = state.replicated()
    shares = []
    for replica in range(0, grid.replicas, 16):
        pieces = [*checkpoint.equal_part(held, replica, grid.replicas)]
        pieces += checkpoint.equal_part(plain, group * replica, 1024)
        shares.append(sum(checkpoint.item_bytes(piece.item) for piece in pieces))
    whole = sum(map(checkpoint.item_bytes, held)) + sum(map(checkpoint.item_bytes, plain)) / group
    assert max(shares) < 1.3 * whole / grid.replicas < 1.7 * min(shares)


# --- on ranks: what is written, sent and refused


class Wide(nn.Module):
    """Layers of one matrix that is most of the model: without cuts one rank would write it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 512)
        self.norm = nn.BatchNorm1d(512)
        self.narrow = nn.Linear(512, 3)

    def forward(self, x):
        return self.narrow(self.norm(self.wide(x))).sum()


def sharded(mode: str, group: int | None = None, seed: int = 0):
    torch.manual_seed(seed)
    model = Wide()
    grid = mesh.build_mesh(
        shard.mesh_shape(mode, dist.get_world_size(), group), torch.device("cpu")
    )
    options = shard.ShardingOptions(param_dtype=torch.float32)
    model = shard.apply(model, mode, grid, block_classes={nn.Linear}, options=options)
    optimizer = shard.build_optimizer(model, mode, set(), lr=1e-2, weight_decay=0.1)
    return model, optimizer


def step(model, optimizer) -> None:
    rows = torch.arange(2)[:, None] + dist.get_rank()
    model(torch.ones(2, 64) * rows).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model, optimizer) -> dict[str, torch.Tensor]:
    found = checkpoint.TrainingState(model, optimizer).tensors()
    return {
        n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in found.items()
    }


def save_twice_in_every_mode() -> list:
    """On four ranks: per mode the sizes of the files, what rank 0 received, the whole state."""
    join()
    found = []
    for mode, group in (("hybrid", 2), ("ddp", None), ("no_shard", None), ("full_shard", None)):
        model, optimizer = sharded(mode, group)
        saver = checkpoint.Saver(Path(os.environ["FOLDER"], mode), model, optimizer, keep=2)
        for number in (1, 2):
            step(model, optimizer)
            assert saver.save(number, {}) == []
        found.append((mode, whole(model, optimizer)))
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_each_replica_writes_an_equal_part_and_dcp_reads_it(tmp_path):
    """Both saves of a run, of which the second sends no index."""
    found, *_ = on_ranks(4, save_twice_in_every_mode, tmp_path)
    for mode, state in found:
        folder = tmp_path / mode / "step_00000002"
        sizes = [path.stat().st_size for path in folder.glob("__*_0.distcp")]
        assert len(sizes) == 4 and max(sizes) < 1.5 * sum(sizes) / 4, (mode, sizes)
        checkpoint.check(tmp_path / mode / "step_00000001")
        checkpoint.check(folder)
        read = {name: torch.full_like(tensor, 7) for name, tensor in state.items()}
        dcp.load(read, checkpoint_id=folder, no_dist=True)
        for name, tensor in state.items():
            # of buffers, rank 0's: BatchNorm's statistics differ by rank
            assert torch.equal(read[name], tensor), (mode, name)


def save_what_differs_by_rank() -> list[str]:
    """On two ranks of DDP: a state that rank 1 alone holds, and then none."""
    rank = join()
    model, optimizer = sharded("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    momentum = optimizer.state[next(model.parameters())]
    if rank == 1:
        momentum["extra"] = torch.ones(3)
    saver = checkpoint.Saver(os.environ["FOLDER"], model, optimizer)
    problems = saver.save(1, {})
    momentum.pop("extra", None)
    problems += saver.save(2, {})
    # what all ranks hold beside shards of FSDP1, which a program of its own has made
    sharded_by_fsdp1 = FullyShardedDataParallel(
        nn.Linear(64, 64), device_id=torch.device("cpu"), use_orig_params=True
    )
    mixed = nn.ModuleDict({"sharded": sharded_by_fsdp1, "plain": nn.Linear(64, 64)})
    saved = checkpoint.save(os.environ["FOLDER"], 3, mixed, None)
    checkpoint.load(saved, mixed, None)
    dist.destroy_process_group()
    return problems


@pytest.mark.slow
def test_what_no_rank_could_load_is_not_saved(tmp_path):
    first, second = on_ranks(2, save_what_differs_by_rank, tmp_path)
    assert first == second and len(first) == 1
    assert "step 1 was not saved: ValueError: optim.state." in first[0]
    assert "would be incomplete: the ranks do not hold the same tensors" in first[0]
    saved = [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(tmp_path)]
    assert saved == [2, 3]


# --- 32 real ranks

MANY = (
    "--model tiny:depth=1 --img-size 32 --global-batch 64 --workers 0 --precision fp32 "
    f"--device cpu --data {ROOT}/examples/tiles/train --log-every 1 --timeout 120 "
    "--mode hybrid --group 8 --save-every 100"
).split()


@pytest.mark.full
def test_16_ranks_save_and_8_resume(tmp_path):
    out = str(tmp_path / "out")
    (first,) = run_ranks(16, [Run([*MANY, "--steps", "3"], to=out)], tmp_path / "of16", 900)
    assert first.status == [0] * 16 and first.replicas_differ == 0
    saved = tmp_path / "out" / "step_00000003"
    assert len(json.loads((saved / "checkpoint.json").read_text())["files"]) == 17
    more = ["--steps", "5", "--allow-changes"]
    (second,) = run_ranks(8, [Run([*MANY, *more], to=out)], tmp_path / "of8", 900)
    assert second.status == [0] * 8 and second.start["begin"] == 3
    assert [step["step"] for step in second.steps] == [1, 2, 3, 4, 5]


# --- the benchmark


def test_the_simulated_chunks_are_those_of_dtensor():
    """Of rank 5 of 8, on the shards of FSDP2."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    state = scale.State("base")
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    grid = mesh.build_mesh((1, 8), torch.device("cpu"))["shard"]
    for item in state.shards_of(5, 8)[::7]:
        data = item.tensor_data
        tensor = distribute_tensor(torch.empty(data.size), grid, [Shard(0)])
        (real,) = create_default_local_items(item.index.fqn, tensor)
        assert real.tensor_data.chunk == data.chunk, item.index
    dist.destroy_process_group()


def create_default_local_items(name, tensor):
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({name: tensor})
    return planner.create_local_plan().items


def test_rank_0_does_a_tenth_of_what_dcp_asks_of_it():
    """In a world of 64 ranks; make benchmarks/scale.py print 1,024."""
    state = scale.State("tiny")
    grid = scale.grid_of("hybrid:2", 64)
    first, later = scale.our_save(state, grid)
    theirs = scale.dcp_save(state, grid)
    assert 10 * first.received < theirs.received and 100 * later.received < theirs.received
    assert 100 * scale.our_load(state, grid).received < scale.dcp_load(state, grid).received
