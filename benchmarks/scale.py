"""Simulate what a save and a load ask of rank 0 in a world of many ranks, in one process.

    python -m benchmarks.scale                                   # 3b on 8 to 1,024 ranks
    python -m benchmarks.scale --model 15b --modes hybrid:8 --worlds 1024

The plan of each rank is made from the shapes of the model, with the shares of checkpoint.py or
those of plain DCP, and pickled. Then rank 0 does its part for real: it unpickles the plans, makes
the global one and pickles it for all, unpickles what all have written, and writes the index; of a
load, it reads the index and plans its own reads. Nothing is trained, no tensor is written. Seconds
are of one CPU core, without network and disk. "balance" is the largest number of bytes that a rank
writes, divided by the mean.
"""

import argparse
import math
import pickle
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

import checkpoint
import vit


class Cost(NamedTuple):
    """What one save or load asks of rank 0."""

    received: int  # bytes
    seconds: float
    balance: float = 0.0  # of a save


class Grid(NamedTuple):
    """The ranks of a world; those of a row hold one copy together."""

    copies: int
    shards: int


def grid_of(mode: str, ranks: int) -> Grid:
    """Return the grid of "hybrid:GROUP", "full_shard" or "ddp"."""
    sizes = {"ddp": 1, "full_shard": ranks}
    shards = sizes[mode] if mode in sizes else int(mode.removeprefix("hybrid:"))
    return Grid(ranks // shards, shards)


class State:
    """The tensors of a checkpoint, on meta: parameters, AdamW's states, buffers."""

    def __init__(self, model: str) -> None:
        with torch.device("meta"):
            built = vit.ViTMAE(vit.MODELS[model], 224)
        self.tensors: dict[str, Any] = {}
        for name, p in built.named_parameters():
            self.tensors[f"model.{name}"] = p.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                self.tensors[f"{checkpoint.STATE}{name}.{key}"] = p.detach()
        self.sharded = {*self.tensors}  # by FSDP
        self.buffers: set[str] = set()
        for name, buffer in built.named_buffers():
            self.buffers.add(f"model.{name}")
            self.tensors[f"model.{name}"] = buffer
        for name, _ in built.named_parameters():
            self.tensors[f"{checkpoint.STATE}{name}.step"] = torch.zeros((), device="meta")

    def items(self, place: int, shards: int) -> list[dcp.WriteItem]:
        """Return the items that a rank at this place of its row holds."""
        found = []
        for name, tensor in self.tensors.items():
            first = 0
            sizes = tensor.shape
            kind = planner.WriteItemType.TENSOR
            if name in self.sharded and shards > 1:
                rows = -(-tensor.shape[0] // shards)  # of a chunk, as FSDP2 cuts it
                first = min(place * rows, tensor.shape[0])
                sizes = torch.Size((min(rows, tensor.shape[0] - first), *tensor.shape[1:]))
                kind = planner.WriteItemType.SHARD
            offsets = torch.Size([first, *[0] * len(sizes)][: len(sizes)])
            chunk = metadata.ChunkStorageMetadata(offsets, sizes)
            data = planner.TensorWriteData(chunk, metadata.TensorProperties(), tensor.shape)
            index = metadata.MetadataIndex(name, offsets)
            found.append(dcp.WriteItem(index, kind, tensor_data=data))
        return found

    def share(self, grid: Grid, rank: int, items: list[dcp.WriteItem]) -> dcp.SavePlan:
        """Return what checkpoint.py lets a rank write of what it holds."""
        sharded = {id(self.tensors[name]) for name in self.sharded}

        def copies_of(tensor: torch.Tensor) -> tuple[int, int]:
            if id(tensor) in sharded:
                return grid.copies, rank // grid.shards
            return grid.copies * grid.shards, rank

        with patch.object(checkpoint, "_copies_of", copies_of):
            own = checkpoint._share(self.tensors, self.buffers)
        return dcp.SavePlan([item for item in items if item.index.fqn in own])


def bytes_of(item: Any) -> int:
    """Return how many bytes an item holds."""
    return 4 * math.prod(item.tensor_data.chunk.sizes)


def results_of(rank: int, items: Sequence[dcp.WriteItem]) -> list[WriteResult]:
    """Return where a rank has written its items."""
    results = []
    offset = 0
    for item in items:
        length = bytes_of(item) + 1200  # of torch.save's own
        place = _StorageInfo(f"__{rank}_0.distcp", offset, length)
        results.append(WriteResult(item.index, length, place))
        offset += length
    return results


def save(state: State, grid: Grid, ours: bool) -> tuple[Cost, bytes]:
    """Simulate `dcp.save`, with or without the shares of checkpoint.py; return its index too."""
    sent = []
    names = {name: (name,) for name in state.tensors}
    held = [state.items(place, grid.shards) for place in range(grid.shards)]
    for rank in range(grid.copies * grid.shards):
        if ours:
            sent.append(pickle.dumps(state.share(grid, rank, held[rank % grid.shards])))
        elif rank < grid.shards:
            sent.append(pickle.dumps(dcp.SavePlan(held[rank], planner_data=names)))
        else:  # all copies plan the same
            sent.append(sent[rank % grid.shards])
    makes_plans = dcp.DefaultSavePlanner(flatten_state_dict=not ours)
    started = time.process_time()  # other programs may use the machine too
    plans, index = makes_plans.create_global_plan([pickle.loads(one) for one in sent])
    for plan in plans:
        pickle.dumps(plan)
    seconds = time.process_time() - started
    written = [pickle.dumps(results_of(rank, plan.items)) for rank, plan in enumerate(plans)]
    # checkpoint.py alone: names and checksums of all ranks, votes without an error
    more = [pickle.dumps({f"__{rank}_0.distcp": [1, 1]}) for rank in range(len(plans))]
    more += len(plans) * [pickle.dumps(1), *8 * [pickle.dumps(None)]]
    with tempfile.TemporaryDirectory() as folder:
        writer = dcp.FileSystemWriter(folder)
        started = time.process_time()
        writer.finish(index, [pickle.loads(one) for one in written])
        pickle.dumps(index)  # for all ranks
        for one in more if ours else ():
            pickle.loads(one)
        seconds += time.process_time() - started
        content = Path(folder, ".metadata").read_bytes()
    shares = [sum(map(bytes_of, plan.items)) for plan in plans]
    balance = max(shares) * len(shares) / sum(shares)
    return Cost(sum(map(len, sent + written)), seconds, balance), content


def load(state: State, grid: Grid, content: bytes) -> Cost:
    """Simulate a load of checkpoint.py, whose ranks plan by themselves."""
    votes = 4 * [pickle.dumps(None)] * (grid.copies * grid.shards)
    held: list[Any] = state.items(0, grid.shards)
    started = time.process_time()
    for vote in votes:
        pickle.loads(vote)
    entries = pickle.loads(content).state_dict_metadata
    for item in held:
        name = item.index.fqn
        create_read_items_for_chunk_list(name, entries[name], [item.tensor_data.chunk])
    return Cost(sum(map(len, votes)), time.process_time() - started)


def print_row(what: str, mode: str, ranks: int, cost: Cost) -> None:
    """Print one result."""
    balance = f"{cost.balance:9.2f}" if cost.balance else ""
    numbers = f"{cost.received / 1e6:12.3f}{cost.seconds:10.3f}{balance}"
    print(f"{mode:12}{ranks:7}  {what:22}{numbers}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each contestant, mode and world."""
    parser = argparse.ArgumentParser(description="Simulate saves and loads of many ranks.")
    add = parser.add_argument
    add("--model", choices=vit.MODELS, default="3b")
    add("--modes", nargs="+", default=["hybrid:2", "hybrid:8", "full_shard", "ddp"])
    add("--worlds", nargs="+", type=int, default=[8, 64, 512, 1024])
    add("--dcp-up-to", type=int, default=1024, metavar="RANKS", help="it needs 4 GiB there")
    args = parser.parse_args(argv)
    state = State(args.model)
    print(f"{args.model:12}{'ranks':>7}  {'':22}{'MB to rank 0':>12}{'seconds':>10}  balance")
    for mode in args.modes:
        for ranks in args.worlds:
            grid = grid_of(mode, ranks)
            saved, index = save(state, grid, ours=True)
            print_row("save", mode, ranks, saved)
            print_row("load", mode, ranks, load(state, grid, index))
            if ranks <= args.dcp_up_to:
                saved, _ = save(state, grid, ours=False)
                print_row("dcp.save", mode, ranks, saved)


if __name__ == "__main__":
    main()
