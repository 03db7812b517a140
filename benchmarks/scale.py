"""Simulate what a start, a save and a load ask of rank 0 in a world of many ranks, in one process.

    python -m benchmarks.scale                                   # 3b on 8 to 1,024 ranks
    python -m benchmarks.scale --model 15b --modes hybrid:8 --worlds 1024 8192

What each rank would send is made from the shapes of the model and pickled. Then rank 0 does its
part for real: it unpickles what it gets, plans, and writes the index. "DCP" is `dcp.save` and
`dcp.load` as they are, which plan all ranks on rank 0. Nothing is trained, no tensor is written.
The seconds are of one CPU core of this machine, without the network and the disk. "balance" is the
largest number of bytes that a rank writes, divided by the mean.
"""

import argparse
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

import checkpoint
import vit
from runtime.start_record import rank_row

STATES = ("model.{}", "optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq")


class Cost(NamedTuple):
    """What one save or load asks of rank 0."""

    received: int  # bytes
    seconds: float
    balance: float | None  # of a save


class Grid(NamedTuple):
    """The ranks of a world; those of a row hold one copy together."""

    replicas: int
    shards: int

    @property
    def ranks(self) -> int:
        """Count the ranks."""
        return self.replicas * self.shards


def grid_of(mode: str, ranks: int) -> Grid:
    """Return the grid of "hybrid:GROUP", "full_shard" or "ddp"."""
    if mode == "ddp":
        return Grid(ranks, 1)
    if mode == "full_shard":
        return Grid(1, ranks)
    group = int(mode.removeprefix("hybrid:"))
    return Grid(ranks // group, group)


class State:
    """The names and shapes of what a checkpoint holds: parameters, AdamW's states, buffers."""

    def __init__(self, model: str) -> None:
        with torch.device("meta"):
            built = vit.ViTMAE(vit.MODELS[model], 224)
        self.sharded: dict[str, torch.Size] = {}
        self.plain: dict[str, torch.Size] = {}
        for name, parameter in built.named_parameters():
            for text in STATES:
                self.sharded[text.format(name)] = parameter.shape
            self.plain[f"optim.state.{name}.step"] = torch.Size()
        for name, buffer in built.named_buffers():
            self.plain[f"model.{name}"] = buffer.shape

    def shards_of(self, place: int, shards: int) -> list[WriteItem]:
        """Return the items of one shard of the parameters and their states."""
        items = []
        for name, shape in self.sharded.items():
            if shards == 1:
                items.append(item_of(name, shape, 0, shape[0], WriteItemType.TENSOR))
                continue
            rows = -(-shape[0] // shards)  # of a chunk, as FSDP2 cuts it
            first = min(place * rows, shape[0])
            count = min(rows, shape[0] - first)
            items.append(item_of(name, shape, first, count, WriteItemType.SHARD))
        return items

    def replicated(self) -> list[WriteItem]:
        """Return the items of what every rank holds."""
        return [
            item_of(name, shape, 0, None, WriteItemType.TENSOR)
            for name, shape in self.plain.items()
        ]


def item_of(
    name: str, shape: torch.Size, first: int, count: int | None, kind: WriteItemType
) -> WriteItem:
    """Return DCP's item of some rows of a tensor; all of it if `count` is None."""
    offsets = torch.Size([0] * len(shape))
    sizes = shape
    if count is not None:
        offsets = torch.Size((first, *offsets[1:]))
        sizes = torch.Size((count, *shape[1:]))
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(), size=shape)
    return WriteItem(index=MetadataIndex(name, offsets), type=kind, tensor_data=data)


def results_of(rank: int, items: Sequence[WriteItem]) -> list[WriteResult]:
    """Return where a rank has written its items."""
    results = []
    offset = 0
    for item in items:
        length = checkpoint.item_bytes(item) + 1200  # of torch.save's own
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


def shares_of(state: State, grid: Grid) -> list[list[WriteItem]]:
    """Return what each rank writes of what it holds."""
    plain = state.replicated()
    shares: list[list[WriteItem]] = [[] for _ in range(grid.ranks)]
    for place in range(grid.shards):
        held = state.shards_of(place, grid.shards)
        for replica in range(grid.replicas):
            rank = replica * grid.shards + place
            pieces = [*checkpoint.equal_part(held, replica, grid.replicas)]
            pieces += checkpoint.equal_part(plain, rank, grid.ranks)
            shares[rank] = [piece.item for piece in pieces]
    return shares


def written_by(rank: int, items: Sequence[WriteItem]) -> checkpoint.WrittenPart:
    """Return what a rank tells of what it has written."""
    name = f"__{rank}_0.distcp"
    return checkpoint.WrittenPart([*items], results_of(rank, items), {name: [1, 1]})


def balance_of(plans: Sequence[Sequence[WriteItem]]) -> float:
    """Return the largest share of the bytes, divided by the mean."""
    shares = [sum(checkpoint.item_bytes(item) for item in items) for items in plans]
    return max(shares) * len(shares) / sum(shares)


def write_index(index: Metadata, results: list[list[WriteResult]]) -> int:
    """Write DCP's index to a temporary folder; return its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        writer = dcp.FileSystemWriter(folder)
        writer.finish(index, results)
        return Path(folder, ".metadata").stat().st_size


def our_start(grid: Grid) -> Cost:
    """Simulate what the ranks send before the first step: two votes, and a line of the table.

    Their connections, and what rank 0 sends, are not in it.
    """
    run: Any = SimpleNamespace(world_size=grid.ranks, mesh_shape=(grid.replicas, grid.shards))
    sent = []
    for rank in range(grid.ranks):
        ranks = SimpleNamespace(rank=rank, local_rank=rank % 8)
        session: Any = SimpleNamespace(ranks=ranks, device=torch.device("cuda", rank % 8))
        votes = [pickle.dumps(None), pickle.dumps(None)]  # no error in folders, none in locks
        sent += [*votes, pickle.dumps(rank_row(run, session))]
    seconds: list[float] = []
    with clock(seconds):
        for one in sent:
            pickle.loads(one)
    return Cost(sum(map(len, sent)), seconds[0], None)


def our_save(state: State, grid: Grid) -> tuple[Cost, Cost]:
    """Simulate two saves of checkpoint.py: one after a start, and each that follows."""
    shares = shares_of(state, grid)
    balance = balance_of(shares)
    sent = [pickle.dumps(written_by(rank, items)) for rank, items in enumerate(shares)]
    later = [pickle.dumps(pickle.loads(one)._replace(items=[], results=[])) for one in sent]
    # no error in describing, none in writing; whether the index is new; checksums of what it holds
    keys = ["0" * 32] * 3  # of shards, of their steps, of buffers
    votes = [pickle.dumps(vote) for vote in (None, None, True, keys)] * grid.ranks
    seconds: list[float] = []
    with clock(seconds):
        for vote in votes:
            pickle.loads(vote)
        parts = [pickle.loads(one) for one in sent]
        pickle.dumps(checkpoint.merge_index(parts))
    with clock(seconds):
        for vote in votes:
            pickle.loads(vote)
        files: dict[str, list[int]] = {}
        for one in later:
            files.update(pickle.loads(one).files)
    size = sum(map(len, votes))
    first = Cost(size + sum(map(len, sent)), seconds[0], balance)
    return first, Cost(size + sum(map(len, later)), seconds[1], balance)


def dcp_save(state: State, grid: Grid) -> Cost:
    """Simulate `dcp.save`."""
    names = {name: (name,) for name in (*state.sharded, *state.plain)}
    sent = []
    for place in range(grid.shards):
        items = state.shards_of(place, grid.shards) + state.replicated()
        sent.append(pickle.dumps(SavePlan(items, planner_data=names)))
    seconds: list[float] = []
    with clock(seconds):
        plans = [pickle.loads(sent[rank % grid.shards]) for rank in range(grid.ranks)]
        plans, index = dcp.DefaultSavePlanner().create_global_plan(plans)
        for plan in plans:
            pickle.dumps(plan)
    written = [pickle.dumps(results_of(rank, plan.items)) for rank, plan in enumerate(plans)]
    with clock(seconds):
        write_index(index, [pickle.loads(one) for one in written])
        pickle.dumps(index)  # for all ranks
    size = grid.replicas * sum(map(len, sent)) + sum(map(len, written))
    return Cost(size, sum(seconds), balance_of([plan.items for plan in plans]))


def index_of(shares: Sequence[list[WriteItem]]) -> Metadata:
    """Return the index of a checkpoint of which each rank has written its share."""
    plans, index = create_default_global_save_plan([SavePlan(share) for share in shares])
    index.storage_data = {}
    for rank, plan in enumerate(plans):
        for result in results_of(rank, plan.items):
            index.storage_data[result.index] = result.storage_data
    return index


def read_plan(index: Metadata, held: Sequence[WriteItem]) -> LoadPlan:
    """Return what a rank reads for the chunks that it holds."""
    plan = LoadPlan([])
    for item in held:
        entry = index.state_dict_metadata[item.index.fqn]
        assert isinstance(entry, TensorStorageMetadata) and item.tensor_data
        plan.items += create_read_items_for_chunk_list(
            item.index.fqn, entry, [item.tensor_data.chunk]
        )
    return plan


def our_load(state: State, grid: Grid) -> Cost:
    """Simulate a load of checkpoint.py."""
    content = pickle.dumps(index_of(shares_of(state, grid)))
    held = state.shards_of(0, grid.shards) + state.replicated()
    votes = [pickle.dumps(None)] * (3 * grid.ranks)
    seconds: list[float] = []
    with clock(seconds):
        for vote in votes:
            pickle.loads(vote)
        pickle.dumps(content)  # for all ranks
        read_plan(checkpoint.unpickle_index(content), held)
    return Cost(sum(map(len, votes)), seconds[0], None)


def dcp_load(state: State, grid: Grid) -> Cost:
    """Simulate `dcp.load` of what `dcp.save` has written, with the same ranks."""
    plain = state.replicated()
    shares = [state.shards_of(place, grid.shards) for place in range(grid.shards)]
    index = index_of([shares[0] + plain, *shares[1:]])
    content = pickle.dumps(index)
    sent = []
    for held in shares:
        near = Metadata(dict(index.state_dict_metadata))  # with the chunks of this rank alone
        for item in held:
            entry = index.state_dict_metadata[item.index.fqn]
            assert isinstance(entry, TensorStorageMetadata) and item.tensor_data
            near.state_dict_metadata[item.index.fqn] = replace(
                entry, chunks=[item.tensor_data.chunk]
            )
        sent.append(pickle.dumps(read_plan(near, held + plain)))
    seconds: list[float] = []
    with clock(seconds):
        read_plan(pickle.loads(content), shares[0] + plain)
        plans = [pickle.loads(sent[rank % grid.shards]) for rank in range(grid.ranks)]
        for plan in plans:
            pickle.dumps(plan)
    return Cost(grid.replicas * sum(map(len, sent)), seconds[0], None)


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
    contestants: dict[str, Callable[[State, Grid], Cost]] = {
        "dcp.save": dcp_save,
        "load": our_load,
        "dcp.load": dcp_load,
    }
    for mode in args.modes:
        for ranks in args.worlds:
            grid = grid_of(mode, ranks)
            print(row("start", mode, ranks, our_start(grid)), flush=True)
            first, later = our_save(state, grid)
            print(row("save", mode, ranks, first), flush=True)
            print(row("save again", mode, ranks, later), flush=True)
            for what, simulate in contestants.items():
                if what == "load" or ranks <= args.dcp_up_to:
                    print(row(what, mode, ranks, simulate(state, grid)), flush=True)


if __name__ == "__main__":
    main()
