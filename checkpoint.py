"""Sharded checkpoints: saved by any mode, engine and world size, loaded by any.

Built on `torch.distributed.checkpoint` (DCP): what several ranks hold is written once, each of them
writes an equal part of it, and each rank reads what it needs, under the names of the unwrapped
model. No rank plans for the others: rank 0 gathers only the index of what was written.

    step_00000100/checkpoint.json    the manifest: step, flags, size and CRC-32 of all other files
                  .metadata          DCP's index: which tensor is where
                  __0_0.distcp       what rank 0 wrote

Written under a temporary name, synced to the disk and renamed: a folder with the final name is
complete. Loading raises Damaged (for good) or an OSError (which may pass).

    python checkpoint.py verify DIR             check every checksum
    python checkpoint.py consolidate DIR OUT    write the model to one file

Copy this one file: it needs only torch.
"""

import argparse
import io
import json
import math
import os
import pickle
import re
import shutil
import sys
import traceback
import warnings
import zlib
from collections import Counter, UserDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

T = TypeVar("T")
MANIFEST = "checkpoint.json"
INDEX = ".metadata"
# what activation checkpointing, FSDP1 and torch.compile put into the names of parameters
WRAPPER_NAMES = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
# PyTorch warns of FSDP1 without shards, of reading without ranks and (2.10) of its own code
warnings.filterwarnings("ignore", "When using ``NO_SHARD|torch.distributed is dis|TypedStorage is")


class Damaged(ValueError):
    """A checkpoint that cannot be loaded, and why, in one sentence."""


# --- Model and optimizers as named tensors


class _Refused(ValueError):
    """A training state that could not be loaded again, and why: nothing is saved."""


def _list_optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Return none, one or several optimizers as a list."""
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    return list(optimizer)


def _stateful(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds the states: of ZeRO-1 the one of this rank's part."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


@contextmanager
def _sharded_states(model: nn.Module) -> Iterator[bool]:
    """Let the state dicts of FSDP1 hold sharded tensors, of their original names and shapes.

    Yields whether there is an FSDP1 module in the model.
    """
    if not FSDP1.fsdp_modules(model):
        yield False
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP.state_dict_type", FutureWarning)
        with FSDP1.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ):
            yield True


def _original_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the name that each parameter or buffer had before parts of the model were wrapped."""
    inside_ddp = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DDP):
            inside_ddp.add(f"{prefix}.module".removeprefix("."))
    originals = {}
    for name in names:
        parts = name.split(".")
        kept = []
        for depth, part in enumerate(parts, start=1):
            if part not in WRAPPER_NAMES and ".".join(parts[:depth]) not in inside_ddp:
                kept.append(part)
        originals[name] = ".".join(kept)
    return originals


def _name_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the original name of each parameter; a tied one has the first of its names."""
    found = dict(model.named_parameters())
    originals = _original_names(model, found)
    return {p: originals[name] for name, p in found.items()}


class _AllParameters(torch.optim.Optimizer):
    """All parameters of a model: FSDP1 converts the states of such an optimizer, and no other."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})


def _read_fsdp1_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]
) -> dict[str, dict[str, Any]]:
    """Return the states of an FSDP1 model's optimizer, as they are sharded elsewhere. Collective.

    FSDP1 wants a state of every parameter that is trained: those that this optimizer does not have
    get one of zeros, which is left out of what is returned.
    """
    every = _AllParameters(model)
    every.state.update(optimizer.state)
    own = {p for group in optimizer.param_groups for p in group["params"]}
    others = [p for p in names if p.requires_grad and p not in own]
    if others:
        leaves = set()
        for state in optimizer.state.values():
            leaves |= {leaf for leaf, t in state.items() if isinstance(t, Tensor) and t.ndim > 0}
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, leaves)  # a rank may hold no piece of the optimizer's part
        for p in others:
            if p.numel() > 0:
                every.state[p] = {leaf: torch.zeros_like(p) for leaf in set().union(*found)}
    states = FSDP1.optim_state_dict(model, every)["state"]
    originals = _original_names(model, states)
    own_names = {names[p] for p in own}
    return {originals[n]: value for n, value in states.items() if originals[n] in own_names}


def _read_states(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: dict[nn.Parameter, str]
) -> dict[str, dict[str, Any]]:
    """Return the optimizer states {parameter: {leaf: value}} that this rank holds. Collective."""
    states: dict[str, dict[str, Any]] = {}
    p: Any
    for optimizer in optimizers:
        with _sharded_states(model) as fsdp1:
            if fsdp1:
                states |= _read_fsdp1_states(model, optimizer, names)
                continue
        for p, leaves in _stateful(optimizer).state.items():
            states[names[p]] = leaves
    return states


def _check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], names: dict[nn.Parameter, str]
) -> None:
    """Raise _Refused for optimizers whose states have no place in a checkpoint."""
    owners: dict[nn.Parameter, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for attribute, value in vars(_stateful(optimizer)).items():
            if isinstance(value, torch.optim.Optimizer):
                raise _Refused(f"{kind} keeps states in its {attribute}: give that optimizer")
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p not in names:
                    raise _Refused(
                        f"{kind} holds a parameter {tuple(p.shape)} that the model does not have: "
                        "build the optimizer from model.parameters(), after sharding"
                    )
                if owners.setdefault(p, optimizer) is not optimizer:
                    raise _Refused(f"{names[p]} is in two optimizers: one of them must leave it")
        key: Any
        for key in _stateful(optimizer).state:
            if owners.get(key) is not optimizer:
                raise _Refused(f"{kind} has a state of {key!r:.40}, which it does not train")


def named_tensors(model: nn.Module, optimizer: Optimizers) -> dict[str, Tensor]:
    """Return every tensor of the training state as this rank holds it. Collective.

    The names are "model.NAME", "optim.state.NAME.LEAF" and, for what is a Python number,
    "optim.number.NAME.LEAF"; sharded tensors are DTensors. `optimizer` is one, several or None.
    ValueError where a state could not be loaded again.
    """
    optimizers = _list_optimizers(optimizer)
    with _sharded_states(model):
        state = model.state_dict()  # first: FSDP2 shards again what an evaluation left gathered
    originals = _original_names(model, state)
    tensors: dict[str, Any] = {f"model.{originals[n]}": value for n, value in state.items()}
    names = _name_parameters(model)
    _check_optimizers(optimizers, names)
    for name, leaves in _read_states(model, optimizers, names).items():
        for leaf, value in leaves.items():
            if value is None:
                continue  # as if it were not there
            if isinstance(value, bool | int | float):
                dtype = torch.float64 if isinstance(value, float) else None
                tensors[f"optim.number.{name}.{leaf}"] = torch.tensor(value, dtype=dtype)
                continue
            _check_leaf(f"{name}.{leaf}", value, tensors[f"model.{name}"])
            tensors[f"optim.state.{name}.{leaf}"] = value
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise _Refused(f"{name} is {type(value).__name__}, but only tensors are saved")
    return tensors


def _parameter_of(entry: str) -> str:
    """Return the parameter of an entry such as "optim.state.PARAMETER.LEAF"."""
    parameter, _, _ = entry.split(".", 2)[2].rpartition(".")
    return parameter


def _check_leaf(name: str, leaf: Any, parameter: Tensor) -> None:
    """Raise _Refused for a state that could not be loaded in every mode."""
    if not isinstance(leaf, Tensor):
        kind = type(leaf).__name__
        raise _Refused(
            f"the optimizer state {name} is {kind}, but only tensors and numbers are saved"
        )
    if isinstance(parameter, DTensor) and leaf.ndim > 0 and leaf.shape != parameter.shape:
        raise _Refused(
            f"the optimizer state {name} is {tuple(leaf.shape)}, its parameter "
            f"{tuple(parameter.shape)}: of a sharded parameter only states of its own shape and "
            "scalars are saved: use mode ddp"
        )


# --- The parameter groups, and the run state, as JSON

# of an optimizer's implementation here, not of its arithmetic: they stay as they were built
NOT_SAVED = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
RESERVED = {"step", "files", "checksum", "optimizers"}  # names in a manifest
KEYED = "not an object of JSON"
WITHOUT = "so its state is not known: give None to load the model alone"


def _to_json(value: Any, where: str) -> Any:
    """Return what JSON can hold and `_from_json` turns back; _Refused for what it would change.

    Keys that are no strings are kept, by pairs: a scheduler's milestones. A tuple becomes a list.
    """
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            pairs.append([_to_json(key, where), _to_json(item, f"{where}[{key!r}]")])
        return {KEYED: type(value).__name__, "pairs": pairs}
    if isinstance(value, list | tuple):
        return [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _Refused(f"{where} is {type(value).__name__}, which JSON cannot hold: save numbers")


def _from_json(value: Any) -> Any:
    """Return what `_to_json` was given."""
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if KEYED not in value:
        return {key: _from_json(item) for key, item in value.items()}
    pairs = {_from_json(key): _from_json(item) for key, item in value["pairs"]}
    return Counter(pairs) if value[KEYED] == "Counter" else pairs


def _describe_groups(
    optimizers: Iterable[torch.optim.Optimizer], names: dict[nn.Parameter, str]
) -> list[dict[str, Any]]:
    """Describe each parameter group: its optimizer, parameters and settings (learning rate, ...).

    _Refused for a setting that JSON cannot hold.
    """
    described = []
    for optimizer in optimizers:
        kind = type(_stateful(optimizer)).__name__
        for group in optimizer.param_groups:
            settings = {}
            for key in group.keys() - NOT_SAVED:
                value = group[key]
                if isinstance(value, Tensor) and value.numel() == 1:
                    value = value.item()  # a learning rate that a compiled step reads
                settings[key] = _to_json(value, f"{key} of a parameter group of {kind}")
            parameters = [names[p] for p in group["params"]]
            described.append({"optimizer": kind, "params": parameters, "settings": settings})
    return described


def _size_and_crc(path: Path) -> list[int]:
    """Return the size of a file in bytes, and its CRC-32."""
    size = 0
    crc = 0
    with path.open("rb") as file:
        for block in iter(partial(file.read, 2**20), b""):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


def _manifest_checksum(manifest: dict[str, Any]) -> int:
    """Return the CRC-32 of a manifest without its own checksum."""
    return zlib.crc32(json.dumps(manifest | {"checksum": 0}, sort_keys=True).encode())


@contextmanager
def replacing(path: Path) -> Iterator[io.BufferedWriter]:
    """Open a new file that replaces `path`, durably, once its block has ended without error."""
    new = path.with_name(f".{path.name}.writing")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except RuntimeError as error:
        raise _first_cause(error) from None
    finally:
        with suppress(OSError):
            new.unlink()


def _first_cause(error: RuntimeError) -> BaseException:
    """Return what made torch.save fail, which then fails once more as it closes its file."""
    if error.__context__ is None:
        return error
    return error.__context__


def _cause(failed: CheckpointException) -> BaseException:
    """Return the error that DCP has met, which it raises in a wrapping of its own."""
    causes = [error for error, _ in failed.failures.values()]
    return causes[0]


def _rename_for_removal(checkpoint: Path) -> None:
    """Rename a checkpoint: a kill while it is removed must not leave half of it under its name."""
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.removed"))


def _remove_leftovers(folder: Path) -> None:
    """Remove, on rank 0, partial and renamed checkpoints: no reason for a save to fail."""
    if dist.get_rank() != 0:
        return
    with suppress(OSError):
        for path in folder.glob(".step_*.*"):
            shutil.rmtree(path, ignore_errors=True)


# --- What ranks tell each other: rank 0 hears all, and all hear what it decided


def _decide(own: Any, decide: Callable[[list[Any]], T], group: dist.ProcessGroup | None) -> T:
    """Gather what every rank has at the first rank of `group`; return its decision. Collective."""
    first = 0 if group is None else dist.get_global_rank(group, 0)
    chosen: list[Any] = [None]
    if dist.get_rank() == first:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.gather_object(own, gathered, dst=first, group=group)
        chosen = [decide(gathered)]
    else:
        dist.gather_object(own, dst=first, group=group)
    dist.broadcast_object_list(chosen, src=first, group=group)
    return chosen[0]


def _on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `work` on every rank; raise, on all, the error of the first that has one. Collective."""
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except (Damaged, OSError) as raised:
        error = raised
    except Exception as raised:  # a bug, perhaps of a type that cannot be sent
        traceback.print_exc()
        error = RuntimeError(f"{type(raised).__name__}: {raised}")
    found = _decide(error, _first_error, group)
    if found:
        raise found
    return result


def _first_error(errors: list[Exception | None]) -> Exception | None:
    for error in errors:
        if error:
            return error
    return None


# --- Saving


def _held_by_one_rank(tensors: Iterable[str], optimizer: Optimizers, model: nn.Module) -> set[str]:
    """Return the names of the states that no other rank holds: those of ZeRO-1."""
    names = _name_parameters(model)
    divided: set[str] = set()
    for each in _list_optimizers(optimizer):
        if isinstance(each, ZeroRedundancyOptimizer):
            for group in each.param_groups:
                divided.update(names[p] for p in group["params"])
    states = {entry for entry in tensors if entry.startswith("optim.")}
    return {entry for entry in states if _parameter_of(entry) in divided}


class _Holders(NamedTuple):
    """The ranks that hold the same chunk of a tensor, and so may share the work of writing it."""

    who: Hashable  # the same on each of them, for all that they hold together
    number: int  # of this rank among them, from 0
    ranks: int


class _Planner(dcp.DefaultSavePlanner):
    """Plan what this rank writes: its part of what it and other ranks hold.

    The ranks that hold the same chunks lay them end to end and cut them into equal parts. All of
    them do the same arithmetic, so no rank needs the plan of another.
    """

    def __init__(
        self, own: Collection[str], buffers: Collection[str], group: dist.ProcessGroup | None
    ) -> None:
        """Plan for the ranks of `group`; `own` names the tensors that this rank alone holds.

        Of `buffers` each rank may have its own values, as BatchNorm does: the first rank's go
        together.
        """
        super().__init__(flatten_state_dict=False)
        self.own = own
        self.buffers = buffers
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.whole: dict[MetadataIndex, WriteItem] = {}  # of each piece: what it was cut from

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        plan = super().create_local_plan()
        held: dict[_Holders, list[WriteItem]] = defaultdict(list)
        for item in plan.items:
            if item.index.fqn not in self.buffers:
                held[self._holders(item)].append(item)
            elif self.rank == 0:
                held[_Holders("this rank", 0, 1)].append(item)
        items: list[WriteItem] = []
        for holders, together in held.items():
            for item, piece in equal_part(together, holders.number, holders.ranks):
                items.append(piece)
                if piece is not item:
                    self.whole[piece.index] = item
        self.plan = replace(plan, items=items)
        return self.plan

    def _holders(self, item: WriteItem) -> _Holders:
        tensor = self.state_dict[item.index.fqn]
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            number = 0
            count = 1
            replicated = [d for d, placed in enumerate(tensor.placements) if placed.is_replicate()]
            for d in replicated:
                number = number * mesh.size(d) + mesh.get_local_rank(d)
                count *= mesh.size(d)
            return _Holders((mesh, *replicated), number, count)
        if item.type != WriteItemType.TENSOR or item.index.fqn in self.own:
            return _Holders("this rank", 0, 1)
        return _Holders("all ranks", self.rank, self.world_size)

    def fingerprint(self) -> int:
        """Return a number that is the same on all ranks if these hold the same tensors."""
        names = sorted(self.state_dict.keys() - set(self.own))
        shapes = [(n, tuple(self.state_dict[n].shape), self.state_dict[n].dtype) for n in names]
        return zlib.crc32(repr(shapes).encode())

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data of a piece: rows of what this rank holds."""
        if write_item.index not in self.whole:
            return super().resolve_data(write_item)
        whole = self.whole[write_item.index]
        tensor: Any = super().resolve_data(whole)
        held: Any = whole.tensor_data
        piece: Any = write_item.tensor_data
        begin = piece.chunk.offsets[0] - held.chunk.offsets[0]
        return tensor.narrow(0, begin, piece.chunk.sizes[0])


def equal_part(
    items: Sequence[WriteItem], part: int, parts: int
) -> Iterator[tuple[WriteItem, WriteItem]]:
    """Yield what lies in one of `parts` equal parts of the bytes of `items`: (item, its piece).

    A piece is the item itself or some of its rows: a row belongs to the part in which it begins.
    Scalars and vectors are not cut. A chunk without elements is left out, an empty tensor not.
    """
    sizes = [item_bytes(item) for item in items]
    begin = sum(sizes) * part // parts
    end = sum(sizes) * (part + 1) // parts
    start = 0  # of the item
    for item, size in zip(items, sizes, strict=True):
        data: Any = item.tensor_data
        rows = 1
        if len(data.chunk.sizes) > 1:
            rows = data.chunk.sizes[0]
        if size == 0:
            if part == 0 and math.prod(data.size) == 0:
                yield item, item
            continue
        first = _rows_before(begin - start, size, rows)
        last = _rows_before(end - start, size, rows)
        if last - first == rows:
            yield item, item
        elif last > first:
            yield item, _rows_of(item, first, last - first)
        start += size


def _rows_before(place: int, size: int, rows: int) -> int:
    """Count the rows that begin before a place in a tensor of so many bytes and rows."""
    count = (place * rows + size - 1) // size  # rounded up
    return min(max(count, 0), rows)


def item_bytes(item: WriteItem) -> int:
    """Return how many bytes an item holds, which DCP's own count takes for the whole tensor's."""
    data: Any = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _rows_of(item: WriteItem, first: int, count: int) -> WriteItem:
    """Return the item of so many rows of an item."""
    data: Any = item.tensor_data
    offsets = torch.Size((data.chunk.offsets[0] + first, *data.chunk.offsets[1:]))
    sizes = torch.Size((count, *data.chunk.sizes[1:]))
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=replace(data, chunk=chunk),
    )


class Written(NamedTuple):
    """What one rank has written."""

    entries: dict[str, TensorStorageMetadata] = {}  # by name; with the chunks of this rank
    results: list[WriteResult] = []  # in which file each chunk is, and where
    files: dict[str, list[int]] = {}  # size and CRC-32 of each file
    fingerprint: int = 0  # of all tensors that this rank holds


class _Attempt(NamedTuple):
    """How the writing of one rank's part has gone."""

    failure: str | None = None  # why it was not written
    refused: bool = False  # because this training state could not be loaded again
    changed: bool = False  # what this rank has to say for the index is not that of the last save


def merge_index(parts: Sequence[Written]) -> Metadata:
    """Make the index, without the places in files, of what all ranks have written.

    ValueError where they do not hold the same tensors, or a part of one is missing or there twice.
    """
    entries: dict[str, TensorStorageMetadata] = {}
    for rank, part in enumerate(parts):
        if part.fingerprint != parts[0].fingerprint:
            raise ValueError(f"ranks 0 and {rank} hold different tensors, so no rank could load it")
        for name, entry in part.entries.items():
            if name in entries:
                entries[name].chunks.extend(entry.chunks)
            else:
                entries[name] = replace(entry, chunks=list(entry.chunks))
    for name, entry in entries.items():
        elements = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        places = {chunk.offsets for chunk in entry.chunks}
        if elements != math.prod(entry.size) or (elements and len(places) < len(entry.chunks)):
            raise ValueError(f"the ranks hold different parts of {name}, which is not whole")
    return Metadata(dict(entries))


class _Writer(dcp.FileSystemWriter):
    """DCP's writer of this rank's files, to a temporary folder that rank 0 completes and renames.

    DCP takes each rank for a single process. What it calls the end is the end of this rank's files.
    """

    def __init__(self, folder: Path, step: int, run_state: dict[str, Any], keep: int) -> None:
        self.out = folder
        self.final = folder / f"step_{step:08d}"
        self.keep = keep
        self.manifest = run_state | {"step": step}
        self.problem: _Refused | None = None  # of this rank's training state
        self.results: list[WriteResult] = []
        super().__init__(folder / f".{self.final.name}.writing")

    def storage_meta(self) -> None:
        """Leave the temporary path out of the index."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name this rank's files by its rank."""
        plans = super().prepare_global_plan(plans)
        plans[0].storage_data.prefix = f"__{dist.get_rank()}_"
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's shards."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise _first_cause(error) from None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep what DCP says of this rank's files: the index is of all ranks."""
        self.results = results[0]

    def write(self, tensors: dict[str, Tensor], planner: _Planner) -> Written:
        """Write this rank's part of the tensors to its files."""
        if self.problem:
            raise self.problem
        try:
            index = dcp.save(tensors, storage_writer=self, planner=planner, no_dist=True)
        except CheckpointException as failed:
            raise _cause(failed) from None
        names = {result.storage_data.relative_path for result in self.results}
        files = {name: _size_and_crc(Path(self.path, name)) for name in names}
        entries: Any = index.state_dict_metadata
        return Written(entries, self.results, files, planner.fingerprint())

    def write_index(self, parts: Sequence[Written]) -> bytes:
        """Write the index of what all ranks have written, and return it."""
        super().finish(merge_index(parts), [part.results for part in parts])
        return Path(self.path, INDEX).read_bytes()

    def complete(self, files: dict[str, list[int]]) -> None:
        """Write the manifest, rename the folder, remove older checkpoints. `files` are all."""
        temporary = Path(self.path)
        for name, (size, _) in files.items():
            path = temporary / name
            if not path.is_file() or path.stat().st_size != size:
                where = f"{path} is not there, though a rank has written it"
                raise OSError(f"{where}: save to a folder that all nodes share")
        manifest = self.manifest | {"files": files}
        manifest["checksum"] = _manifest_checksum(manifest)
        with replacing(temporary / MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())
        if self.final.exists():
            _rename_for_removal(self.final)
        temporary.rename(self.final)
        with replacing(self.out / "latest") as file:
            file.write(f"{self.final.name}\n".encode())
        with suppress(OSError):
            steps = [p for p in list_checkpoints(self.out) if step_of(p) <= manifest["step"]]
            for old in steps[: -self.keep]:
                _rename_for_removal(old)


class Saver:
    """Save the checkpoints of one run as `folder`/step_XXXXXXXX and keep the newest `keep`.

    `group` coordinates: a gloo group, or objects are gathered in GPU memory. With `background` a
    thread writes from a copy in host memory, and training waits only for the copy; `group` must
    then serve nothing else, because two threads in one group deadlock.
    """

    MOST_FAILURES = 2  # in a row: one disk that is full for a while is no reason to end a run

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
        background: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.model = model
        self.optimizer = optimizer
        self.keep = keep
        self.group = group
        self.failures = 0  # saves that failed in a row, up to the newest
        # what this rank has said for the index of the newest save; the index itself on rank 0
        self.indexed: tuple[dict[str, TensorStorageMetadata], list[WriteResult]] | None = None
        self.index = b""
        self.thread = ThreadPoolExecutor(1) if background else None
        # on a GPU one copy, in pinned memory, serves all saves: slow to allocate, fast to fill
        self.stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self.pending: Future[list[str]] | None = None
        self.step = 0  # of the newest attempt
        self.saved = 0  # of the newest that is on disk

    @property
    def hopeless(self) -> bool:
        """Whether so many saves have failed in a row that the caller should end the run."""
        return self.failures >= self.MOST_FAILURES

    def save(self, step: int, run_state: dict[str, Any], wait: bool = True) -> list[str]:
        """Save, and store `run_state` (as JSON) in the manifest; `wait` for its end. Collective.

        Returns a sentence per failed save, the same on all ranks: this one and, in the background,
        the one before. A failed save leaves the older checkpoints as they were. Raises ValueError,
        on all ranks, for what could not be loaded again: in the background perhaps in the next
        call.
        """
        if step < 0 or self.keep < 1:  # it would not be found again, or removed at once
            raise ValueError("give step 0 or more, keep 1 or more")
        taken = RESERVED & run_state.keys()
        if taken:
            raise ValueError(f"run_state has the name {taken.pop()}, which a checkpoint has itself")
        run_state = _to_json(run_state, "run_state")
        problems = self.finish()
        if problems and self.hopeless and not wait:
            return problems
        self.step = step
        writer = _Writer(self.folder, step, run_state, self.keep)
        try:
            tensors = named_tensors(self.model, self.optimizer)
            optimizers, names = _list_optimizers(self.optimizer), _name_parameters(self.model)
            writer.manifest["optimizers"] = _describe_groups(optimizers, names)
        except _Refused as error:
            tensors, writer.problem = {}, error  # perhaps of this rank alone: raised on all
        if self.thread is None:
            return problems + self._write(tensors, writer)
        tensors = self.stager.stage(tensors)  # training changes the originals meanwhile
        writer.per_thread_copy_ahead = 0  # nothing is left to copy
        self.pending = self.thread.submit(self._write, tensors, writer)
        if wait:
            problems += self.finish()
        return problems

    def finish(self) -> list[str]:
        """Wait for the save in the background, if any, and return as `save` does. Collective."""
        if self.pending is None:
            return []
        pending = self.pending
        self.pending = None
        return pending.result()

    def _write(self, tensors: dict[str, Tensor], writer: _Writer) -> list[str]:
        """Write one checkpoint; return why it failed, the same sentence on all ranks.

        The index of one save is that of the next, unless a rank has written something else. So the
        ranks send what they have to say for it once, and afterwards only the checksums of files.
        """
        _remove_leftovers(self.folder)
        dist.barrier(self.group)  # no rank writes before the leftovers of a killed run are removed
        own = _held_by_one_rank(tensors, self.optimizer, self.model)
        names = [name for name, _ in self.model.named_buffers()]
        buffers = {f"model.{name}" for name in _original_names(self.model, names).values()}
        part = Written()
        failure: str | None = None
        refused = False
        try:
            part = writer.write(tensors, _Planner(own, buffers, self.group))
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            refused = isinstance(error, _Refused)
            if refused:
                failure = str(error)
        indexed = part.entries, part.results
        attempt = _Attempt(failure, refused, changed=self.indexed != indexed)
        attempt = _decide(attempt, _first_failure, self.group)
        problem = attempt.failure
        if not problem:
            if not attempt.changed:
                part = part._replace(entries={}, results=[])
            problem = _decide(part, partial(self._complete, writer, attempt.changed), self.group)
        self.indexed = None if problem else indexed
        _remove_leftovers(self.folder)
        if attempt.refused:
            raise ValueError(problem)
        if problem:
            self.failures += 1
            return [f"step {self.step} was not saved: {problem}"]
        self.failures = 0
        self.saved = self.step
        return []

    def _complete(self, writer: _Writer, new: bool, parts: list[Written]) -> str | None:
        """Complete a checkpoint of all ranks' files, its index `new`; return why it failed."""
        files: dict[str, list[int]] = {}
        for part in parts:
            files.update(part.files)
        try:
            if new:
                self.index = writer.write_index(parts)
            else:
                with replacing(Path(writer.path, INDEX)) as file:
                    file.write(self.index)
            files[INDEX] = [len(self.index), zlib.crc32(self.index)]
            writer.complete(files)
        except Exception as error:
            return f"{type(error).__name__}: {error} (rank 0)"
        return None


def _first_failure(attempts: list[_Attempt]) -> _Attempt:
    """Return the attempt of the first rank that has failed; else whether any has a new index."""
    for rank, attempt in enumerate(attempts):
        if attempt.refused:
            return attempt
        if attempt.failure:
            return attempt._replace(failure=f"{attempt.failure} (rank {rank})")
    return _Attempt(changed=any(attempt.changed for attempt in attempts))


def save(
    folder: str | Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizers,
    run_state: dict[str, Any] | None = None,
    *,
    keep: int = 2,
) -> Path:
    """Save one checkpoint and return its folder. Collective.

    `optimizer` is one, several, or None; of several models make one: nn.ModuleDict. The parameter
    groups are saved as they are, learning rates included; a scheduler's state_dict() belongs in
    `run_state`. On all ranks OSError if it failed, ValueError for what could not be loaded again.
    """
    problems = Saver(folder, model, optimizer, keep=keep).save(step, run_state or {})
    if problems:
        raise OSError(problems[0])
    return Path(folder) / f"step_{step:08d}"


# --- Loading: every file is checked before the model is touched


TORCH_TYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
INDEX_TYPES = {  # not BytesStorageMetadata, of which DCP would unpickle an object too
    "collections.OrderedDict",
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    *(f"torch.{name}" for name in TORCH_TYPES),
}


class _Unpickler(pickle.Unpickler):
    """Unpickle DCP's index, which may name what it consists of, and no code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what is named, if it may be."""
        if f"{module}.{name}" in INDEX_TYPES:
            return super().find_class(module, name)
        raise Damaged(f"{INDEX} contains '{module}.{name}', which this code never writes")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a complete checkpoint; Damaged where it is none, or was changed."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["checksum"] == _manifest_checksum(manifest):
            return _from_json(manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{folder}: not a checkpoint (it contains no {MANIFEST})") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        pass  # no JSON, or no object
    raise Damaged(f"{folder}: checksum mismatch in {MANIFEST}")


def read_index(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Read the manifest and the index, still pickled, of a checkpoint; Damaged or OSError."""
    manifest = read_manifest(folder)
    index = (folder / INDEX).read_bytes()
    if [len(index), zlib.crc32(index)] != manifest["files"][INDEX]:
        raise Damaged(f"{folder}: checksum mismatch in {INDEX}")
    return manifest, index


def check_files(folder: Path, manifest: dict[str, Any], part: int = 0, parts: int = 1) -> None:
    """Check every `parts`-th shard file of a checkpoint; Damaged or OSError."""
    files = manifest["files"]
    names = sorted(files.keys() - {INDEX})
    for name in names[part::parts]:
        if _size_and_crc(folder / name) != files[name]:
            raise Damaged(f"{folder}: checksum mismatch in {name}")


def unpickle_index(index: bytes) -> Metadata:
    """Return the index that was pickled; Damaged where it names what it cannot consist of."""
    return _Unpickler(io.BytesIO(index)).load()


def check(folder: Path) -> tuple[dict[str, Any], Metadata]:
    """Check every file of a checkpoint -> manifest and index; Damaged or OSError."""
    manifest, index = read_index(folder)
    check_files(folder, manifest)
    return manifest, unpickle_index(index)


def step_of(folder: Path) -> int:
    """Return the step in a folder's name."""
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(folder: str | Path) -> list[Path]:
    """List the checkpoints in a folder by step, damaged ones too; OSError if it is unreadable."""
    try:
        with os.scandir(folder) as entries:
            named = [e for e in entries if re.fullmatch(r"step_[0-9]{8,}", e.name)]
            return sorted((Path(e.path) for e in named if e.is_dir()), key=step_of)
    except FileNotFoundError:
        return []


def find_newest(folder: str | Path) -> Path | None:
    """Return the newest checkpoint in a folder, the one that rank 0 finds, or None. Collective."""
    found: list[Path | None] = [None]
    if dist.get_rank() == 0:
        found.extend(list_checkpoints(folder))
    newest = found[-1:]
    dist.broadcast_object_list(newest, src=0)  # a shared file system may show ranks different lists
    return newest[0]


class Reader(dcp.FileSystemReader):
    """DCP's reader, with an index that was checked: DCP itself would unpickle anything."""

    index = Metadata({})

    def read_metadata(self) -> Metadata:
        """Return the index."""
        return self.index

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Read tensors in place: what this rank holds of them, without the other ranks."""
        try:
            dcp.load(tensors, storage_reader=self, no_dist=True)
        except CheckpointException as failed:
            raise _cause(failed) from None


def _read_on_rank0(folder: Path, group: dist.ProcessGroup | None) -> tuple[dict[str, Any], bytes]:
    """Read manifest and index on one rank, and send them to all. Collective.

    Of a thousand ranks that open one file at once each would wait for all others.
    """

    def decide(_: list[Any]) -> Any:
        try:
            return read_index(folder)
        except (Damaged, OSError) as error:
            return error

    found = _decide(None, decide, group)
    if isinstance(found, Exception):
        raise found
    return found


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizers; return its manifest. Collective.

    That is the saved `run_state`, and the "step". `optimizer` is one, several, or None, which loads
    the model alone. States and settings (learning rate, ...) become those of the checkpoint, as by
    Optimizer.load_state_dict. Every file is checked first, by one of the ranks: Damaged or OSError,
    the same on all, leaves the model as it was. A later error does not.
    """
    folder = Path(folder)
    optimizers = _list_optimizers(optimizer)
    names = _name_parameters(model)
    _check_optimizers(optimizers, names)
    with _sharded_states(model):
        state = model.state_dict()
    originals = _original_names(model, state)
    tensors: dict[str, Any] = {f"model.{originals[name]}": t for name, t in state.items()}
    manifest, index = _read_on_rank0(folder, group)
    reader = Reader(folder)
    settings: list[list[dict[str, Any]]] = []  # of each optimizer, of each parameter group

    def prepare() -> None:
        check_files(folder, manifest, dist.get_rank(group), dist.get_world_size(group))
        reader.index = unpickle_index(index)
        entries: dict[str, Any] = reader.index.state_dict_metadata
        _check_model(folder, tensors, entries)
        for each in optimizers:
            settings.append(_settings_to_load(folder, each, names, manifest["optimizers"]))
        _check_all_loaded(folder, optimizers, names, manifest["optimizers"])
        tensors.update(_tensors_for_states(folder, tensors, entries, optimizers, names))

    _on_all_ranks(prepare, group)
    _on_all_ranks(partial(reader.read, tensors), group)
    with _sharded_states(model):
        model.load_state_dict(state)
    states = _local_states(model, optimizers, names, tensors)
    for each, its_settings in zip(optimizers, settings, strict=True):
        _load_optimizer(each, its_settings, states)
    return manifest


def _check_model(folder: Path, tensors: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Raise Damaged if the model of a checkpoint has other names or shapes than `tensors`."""
    saved = {name for name in entries if name.startswith("model.")}
    for name in sorted(tensors.keys() | saved):
        then = tuple(entries[name].size) if name in entries else "missing"
        now = tuple(tensors[name].shape) if name in tensors else "missing"
        if then != now:
            raise Damaged(f"{folder}: {name} is {then} in the checkpoint, {now} in the model")


def _settings_to_load(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return what a checkpoint says of each parameter group of an optimizer, found by its names.

    Groups may be cut otherwise now, but Damaged where parameters of one had different settings,
    were of another optimizer, or were not trained.
    """
    kind = type(_stateful(optimizer)).__name__
    of_parameter = {name: group for group in saved for name in group["params"]}
    found = []
    for group in optimizer.param_groups:
        settings: dict[str, Any] | None = None
        for name in (names[p] for p in group["params"]):
            then = of_parameter.get(name)
            if then is None:
                raise Damaged(f"{folder}: {name} is in no optimizer of the checkpoint, {WITHOUT}")
            if then["optimizer"] != kind:
                where = f"{name} was trained by {then['optimizer']}, not {kind}"
                raise Damaged(f"{folder}: {where}, {WITHOUT}")
            if settings is not None and settings != then["settings"]:
                where = f"{name} and {names[group['params'][0]]} had different settings"
                raise Damaged(f"{folder}: {where}, but are in one parameter group now")
            settings = then["settings"]
        found.append({key: _like(group.get(key), v) for key, v in (settings or {}).items()})
    return found


def _like(own: Any, value: Any) -> Any:
    """Return a saved setting as the type that an optimizer has."""
    if isinstance(own, Tensor):
        return torch.full_like(own, value)
    if isinstance(own, tuple):
        return tuple(value)
    return value


def _check_all_loaded(
    folder: Path,
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[nn.Parameter, str],
    saved: Sequence[dict[str, Any]],
) -> None:
    """Raise Damaged if optimizers are given, but do not train all that was trained."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    own = {names[p] for group in groups for p in group["params"]}
    for name in (name for group in saved for name in group["params"]):
        if optimizers and name not in own:
            where = f"{name} was trained by {saved[0]['optimizer']}"
            raise Damaged(f"{folder}: {where}, but is in no optimizer now, {WITHOUT}")


def _tensors_for_states(
    folder: Path,
    tensors: Mapping[str, Tensor],
    entries: Mapping[str, Any],
    optimizers: Iterable[torch.optim.Optimizer],
    names: Mapping[nn.Parameter, str],
) -> dict[str, Tensor]:
    """Allocate what the checkpoint has of this rank's states; each is cut as its parameter is."""
    groups = [group for each in optimizers for group in _stateful(each).param_groups]
    own = {names[p] for group in groups for p in group["params"]}
    found = {}
    for entry in entries:
        if not entry.startswith("optim."):
            continue
        name = _parameter_of(entry)
        if name not in own:
            continue  # of another rank, with ZeRO-1
        parameter = tensors[f"model.{name}"]
        size, dtype = entries[entry].size, entries[entry].properties.dtype
        if size == parameter.shape:
            found[entry] = torch.empty_like(parameter, dtype=dtype)
        elif len(size) == 0 or not isinstance(parameter, DTensor):
            found[entry] = torch.empty(size, dtype=dtype)
        else:
            where = f"{entry} is {tuple(size)}, its parameter {tuple(parameter.shape)}"
            raise Damaged(f"{folder}: {where}: a sharded model cannot load it: use mode ddp")
    return found


def _local_states(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    names: dict[nn.Parameter, str],
    tensors: Mapping[str, Tensor],
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the states that were read, by parameter, as this rank holds them. Collective."""
    states: dict[str, dict[str, Any]] = {}
    for entry, tensor in tensors.items():
        if entry.startswith("optim."):
            name, _, leaf = entry.split(".", 2)[2].rpartition(".")
            number = entry.startswith("optim.number.")
            states.setdefault(name, {})[leaf] = tensor.item() if number else tensor
    with _sharded_states(model) as fsdp1:
        if not (fsdp1 and optimizers):
            return {p: states[name] for p, name in names.items() if name in states}
        every = _AllParameters(model)
        its_names = {}  # FSDP1 leaves torch.compile's prefix in
        for name, p in model.named_parameters():
            parts = [part for part in name.split(".") if part not in WRAPPER_NAMES - {"_orig_mod"}]
            its_names[names[p]] = ".".join(parts)
        given = {
            "state": {its_names[name]: leaves for name, leaves in states.items()},
            "param_groups": [{"params": list(its_names.values())}],
        }
        found = FSDP1.optim_state_dict_to_load(model, every, given)["state"]
    parameters = every.param_groups[0]["params"]
    return {parameters[number]: leaves for number, leaves in found.items()}


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    settings: Sequence[dict[str, Any]],
    states: Mapping[nn.Parameter, dict[str, Any]],
) -> None:
    """Give an optimizer its states and settings."""
    stateful = _stateful(optimizer)
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group, loaded in zip(stateful.param_groups, settings, strict=True):
        for p in group["params"]:
            numbers[p] = len(numbers)
        groups.append({**group, **loaded, "params": [numbers[p] for p in group["params"]]})
    known = {numbers[p]: states[p] for p in numbers if p in states}
    stateful.load_state_dict({"state": known, "param_groups": groups})
    if stateful is not optimizer:  # ZeRO-1 shows all parameters, and steps those of this rank
        for group, loaded in zip(optimizer.param_groups, settings, strict=True):
            group.update(loaded)


class Weights(UserDict[str, Any]):
    """The model of a checkpoint, without ranks: a tensor is read when it is asked for, by name."""

    def __init__(self, folder: Path) -> None:
        """Check every file; Damaged or OSError."""
        super().__init__()
        self.reader = Reader(folder)
        self.manifest, self.reader.index = check(folder)
        entries: Mapping[str, Any] = self.reader.index.state_dict_metadata
        self.data = {n[6:]: entry for n, entry in entries.items() if n.startswith("model.")}

    def __getitem__(self, name: str) -> Tensor:
        return self.read([name])[name]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read several tensors at once: each file is opened once."""
        entries = {name: self.data[name] for name in names}
        found = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
        self.reader.read({f"model.{n}": tensor for n, tensor in found.items()})
        return found


def consolidate(folder: str | Path, out: str | Path) -> dict[str, Tensor]:
    """Write the whole model to a new file, for `torch.load(out)["model"]`, and return it.

    The file also has the "step" and the "run_state" that was saved with the model: what it was
    trained on. One process, without ranks. ValueError where `out` exists, Damaged, or OSError.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise ValueError(f"{out} exists: give the name of a new file")
    with replacing(out) as file:  # opened before minutes of reading
        weights = Weights(Path(folder))
        model = weights.read(weights)
        run_state = dict(weights.manifest)
        for key in RESERVED & run_state.keys():  # of the checkpoint, not of the model
            del run_state[key]
        step = weights.manifest["step"]
        torch.save({"model": model, "step": step, "run_state": run_state}, file)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 1 for a damaged checkpoint, exit with 2 for bad usage."""
    parser = argparse.ArgumentParser(description="Verify or consolidate a checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("verify", help="check every file of a checkpoint").add_argument("dir")
    command = commands.add_parser("consolidate", help="write its model to one new file")
    command.add_argument("dir")
    command.add_argument("out")
    args = parser.parse_args(argv)
    if not os.path.isdir(args.dir):
        parser.error(f"there is no folder {args.dir}")
    try:
        if args.command == "verify":
            _, index = check(Path(args.dir))
            print(f"{args.dir} is complete: {len(index.state_dict_metadata)} tensors")
        else:
            print(f"{args.out}: {len(consolidate(args.dir, args.out))} parameters and buffers")
    except (Damaged, OSError) as error:
        print(f"checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
