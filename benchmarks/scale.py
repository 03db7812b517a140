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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

import checkpoint
import vit


class Cost(NamedTuple):
    """What one save or load asks of rank 0."""

    received: int  # bytes
    seconds: float
    balance: float | None  # of a save


class Grid(NamedTuple):
    """The ranks of a world; those of a row hold one copy together."""

    copies: int
    shards: int


def grid_of(mode: str, ranks: int) -> Grid:
    """Return the grid of "hybrid:GROUP", "full_shard" or "ddp"."""
    if mode == "ddp":
        return Grid(ranks, 1)
    if mode == "full_shard":
        return Grid(1, ranks)
    group = int(mode.removeprefix("hybrid:"))
    return Grid(ranks // group, group)


class State:
    """The tensors of a checkpoint, on meta: parameters, AdamW's states, buffers."""

    def __init__(self, model: str) -> None:
        with torch.device("meta"):
            built = vit.ViTMAE(vit.MODELS[model], 224)
        self.tensors: dict[str, Any] = {}
        self.parameters: set[str] = set()
        for name, p in built.named_parameters():
            self.parameters.add(f"model.{name}")
            self.tensors[f"model.{name}"] = p.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                self.tensors[f"{checkpoint.STATE}{name}.{key}"] = p.detach()
            self.tensors[f"{checkpoint.STATE}{name}.step"] = torch.zeros((), device="meta")
        for name, buffer in built.named_buffers():
            self.tensors[f"model.{name}"] = buffer

    def is_sharded(self, name: str) -> bool:
        """Tell whether FSDP shards a tensor."""
        return name in self.parameters or ".exp_avg" in name

    def items(self, place: int, shards: int) -> list[dcp.WriteItem]:
        """Return the items that a rank at this place of its row holds."""
        found = []
        for name, tensor in self.tensors.items():
            if self.is_sharded(name) and shards > 1:
                rows = -(-tensor.shape[0] // shards)  # of a chunk, as FSDP2 cuts it
                first = min(place * rows, tensor.shape[0])
                count = min(rows, tensor.shape[0] - first)
                found.append(item_of(name, tensor.shape, first, count, WriteItemType.SHARD))
            else:
                found.append(item_of(name, tensor.shape, 0, None, WriteItemType.TENSOR))
        return found

    def share(self, grid: Grid, rank: int, items: list[dcp.WriteItem]) -> dcp.SavePlan:
        """Return what checkpoint.py lets a rank write of what it holds."""
        ranks = grid.copies * grid.shards
        sharded = {id(t) for name, t in self.tensors.items() if self.is_sharded(name)}

        def copies_of(tensor: torch.Tensor) -> tuple[int, int]:
            if id(tensor) in sharded:
                return grid.copies, rank // grid.shards
            return ranks, rank

        buffers = {n for n in self.tensors if n[:6] == "model." and n not in self.parameters}
        with patch.object(checkpoint, "_copies_of", copies_of):
            own = checkpoint._share(self.tensors, buffers)
        return dcp.SavePlan([item for item in items if item.index.fqn in own])


def item_of(
    name: str, shape: torch.Size, first: int, count: int | None, kind: WriteItemType
) -> dcp.WriteItem:
    """Return DCP's item of some rows of a tensor; all of it if `count` is None."""
    offsets = torch.Size([0] * len(shape))
    sizes = shape
    if count is not None:
        offsets = torch.Size((first, *offsets[1:]))
        sizes = torch.Size((count, *shape[1:]))
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(), size=shape)
    return dcp.WriteItem(index=MetadataIndex(name, offsets), type=kind, tensor_data=data)


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
        results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
        offset += length
    return results


@contextmanager
def clock(seconds: list[float]) -> Iterator[None]:
    """Add the seconds that the block takes."""
    started = time.process_time()  # other programs may use the machine too
    yield
    seconds.append(time.process_time() - started)


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
    seconds: list[float] = []
    planner = dcp.DefaultSavePlanner(flatten_state_dict=not ours)
    with clock(seconds):
        plans, index = planner.create_global_plan([pickle.loads(one) for one in sent])
        for plan in plans:
            pickle.dumps(plan)
    written = [pickle.dumps(results_of(rank, plan.items)) for rank, plan in enumerate(plans)]
    # checkpoint.py alone: names and checksums of all ranks, votes without an error
    files = [pickle.dumps({f"__{rank}_0.distcp": [1, 1]}) for rank in range(len(plans))]
    files += len(plans) * [pickle.dumps(1)]
    votes = 8 * [pickle.dumps(None)] * len(plans)
    with tempfile.TemporaryDirectory() as folder:
        writer = dcp.FileSystemWriter(folder)
        with clock(seconds):
            writer.finish(index, [pickle.loads(one) for one in written])
            pickle.dumps(index)  # for all ranks
            for one in [*files, *votes] if ours else ():
                pickle.loads(one)
        content = Path(folder, ".metadata").read_bytes()
    shares = [sum(map(bytes_of, plan.items)) for plan in plans]
    balance = max(shares) * len(shares) / sum(shares)
    received = sum(map(len, sent)) + sum(map(len, written))
    return Cost(received, sum(seconds), balance), content


def read_plan(index: Any, held: Sequence[Any]) -> dcp.LoadPlan:
    """Return what a rank reads for the chunks that it holds."""
    plan = dcp.LoadPlan([])
    for item in held:
        name = item.index.fqn
        entry = index.state_dict_metadata[name]
        plan.items += create_read_items_for_chunk_list(name, entry, [item.tensor_data.chunk])
    return plan


def load(state: State, grid: Grid, content: bytes) -> Cost:
    """Simulate a load of checkpoint.py, whose ranks plan by themselves."""
    votes = 4 * [pickle.dumps(None)] * (grid.copies * grid.shards)
    held = state.items(0, grid.shards)
    seconds: list[float] = []
    with clock(seconds):
        for vote in votes:
            pickle.loads(vote)
        read_plan(pickle.loads(content), held)
    return Cost(sum(map(len, votes)), seconds[0], None)


def row(what: str, mode: str, ranks: int, cost: Cost) -> str:
    """Format one result."""
    balance = "" if cost.balance is None else f"{cost.balance:9.2f}"
    megabytes = cost.received / 1e6
    return f"{mode:12}{ranks:7}  {what:22}{megabytes:12.3f}{cost.seconds:10.3f}{balance}"


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
            print(row("save", mode, ranks, saved), flush=True)
            print(row("load", mode, ranks, load(state, grid, index)), flush=True)
            if ranks <= args.dcp_up_to:
                saved, _ = save(state, grid, ours=False)
                print(row("dcp.save", mode, ranks, saved), flush=True)


if __name__ == "__main__":
    main()
