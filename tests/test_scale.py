"""A save and a load in a world of many ranks: shares, files that plain DCP reads, rank 0's work."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import mesh_of
from ranks import join, on_ranks
from small_model import CPU
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import checkpoint
import mesh
import shard
from benchmarks import scale

MODES = ["hybrid", "ddp", "zero1", "no_shard", "full_shard"]


class Layers(nn.Module):
    """Equal matrices, so that equal shares are possible, and statistics that differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x):
        return self.norm(self.layers(x)).square().sum()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def save_in_every_mode() -> list[dict[str, torch.Tensor]]:
    """On four ranks: per mode the whole training state after a step, as plain PyTorch has it."""
    rank = join()
    found = []
    for mode in MODES:
        torch.manual_seed(0)
        options = shard.ShardingOptions(param_dtype=torch.float32)
        grid = mesh_of(mode, 2 if mode == "hybrid" else None)
        model = shard.apply(Layers(), mode, grid, block_classes={nn.Linear}, options=options)
        optimizer = shard.build_optimizer(model, mode, set(), lr=1e-2, weight_decay=0.1)
        model(torch.arange(128.0).view(2, 64) + rank).backward()
        optimizer.step()
        checkpoint.save(Path(os.environ["FOLDER"], mode), 1, model, optimizer)
        state = {}
        states = optimizer.optim.state if mode == "zero1" else optimizer.state
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            name = shard.original_name(name)
            state[f"model.{name}"] = whole(tensor)
            for key, value in states.get(tensor, {}).items():
                state[f"optimizer.state.{name}.{key}"] = whole(value)
        found.append(state)
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_each_rank_writes_an_equal_share_and_plain_dcp_reads_it(tmp_path):
    """Of buffers, rank 0's: BatchNorm's statistics differ by rank."""
    by_rank = on_ranks(4, save_in_every_mode, tmp_path)
    for number, mode in enumerate(MODES):
        expected: dict[str, torch.Tensor] = {}
        for states in reversed(by_rank):  # with ZeRO-1 each rank has a part
            expected |= states[number]
        folder = tmp_path / mode / "step_00000001"
        sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
        assert len(sizes) == 4 and max(sizes) < 1.4 * sum(sizes) / 4, (mode, sizes)
        read = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
        dcp.load(read, checkpoint_id=folder, no_dist=True)
        dcp_to_torch_save(folder, tmp_path / "all.pth")
        found = torch.load(tmp_path / "all.pth", weights_only=True)
        assert found.keys() == read.keys() == expected.keys(), mode
        for name, tensor in expected.items():
            assert torch.equal(read[name], tensor), (mode, name)
            assert torch.equal(found[name], tensor), (mode, name)


# --- simulated by benchmarks/scale.py


def test_the_simulated_chunks_are_those_of_dtensor():
    """Of rank 5 of 8, on the shards of FSDP2."""
    state = scale.State("base")
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    grid = mesh.build_mesh((1, 8), CPU)["shard"]
    for item in [item for item in state.items(5, 8) if item.index.fqn in state.sharded][::7]:
        planner = dcp.DefaultSavePlanner()
        whole = torch.empty(item.tensor_data.size)
        planner.set_up_planner({item.index.fqn: distribute_tensor(whole, grid, [Shard(0)])})
        (real,) = planner.create_local_plan().items
        assert real.tensor_data.chunk == item.tensor_data.chunk, item.index
    dist.destroy_process_group()


def chunks_of(index: bytes) -> list[tuple]:
    """Every chunk that an index of DCP names."""
    entries = pickle.loads(index).state_dict_metadata.items()
    chunks = [(name, c.offsets, c.sizes) for name, entry in entries for c in entry.chunks]
    return sorted(chunks)


def test_the_work_of_rank_0_is_a_tenth_of_what_dcp_asks_and_its_shares_are_the_whole():
    """In a world of 64 ranks; make benchmarks/scale.py print 1,024."""
    state = scale.State("tiny")
    for mode in ("hybrid:2", "ddp"):
        grid = scale.grid_of(mode, 64)
        ours, index = scale.save(state, grid, ours=True)
        theirs, others = scale.save(state, grid, ours=False)
        assert 8 * ours.received < theirs.received
        assert scale.load(state, grid, index).received < ours.received
        assert chunks_of(index) == chunks_of(others)
