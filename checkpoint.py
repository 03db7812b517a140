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
from collections import UserDict, defaultdict
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
import torch.distributed.checkpoint.state_dict as state_dicts
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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

T = TypeVar("T")
MANIFEST = "checkpoint.json"
INDEX = ".metadata"
FLAT = state_dicts.StateDictOptions(flatten_optimizer_state_dict=True)
# PyTorch warns of FSDP1 without shards, of reading without ranks and (2.10) of its own code
warnings.filterwarnings("ignore", "When using ``NO_SHARD|torch.distributed is dis|TypedStorage is")


class Damaged(ValueError):
    """A checkpoint that cannot be loaded, and why, in one sentence."""


# --- Model and optimizer as named tensors


def _create_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that AdamW lacks before its first step: DCP would make a step of zeros."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and not optimizer.state[p]:
                state = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                device = p.device if group["fused"] or group["capturable"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                optimizer.state[p] = state


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor of the training state as this rank holds it. Collective.

    The names are "model.NAME" and "optim.state.NAME.LEAF"; sharded tensors are DTensors. Learning
    rate and betas are not included. ValueError where the optimizer's state cannot be saved.
    """
    zero1 = isinstance(optimizer, ZeroRedundancyOptimizer)
    inner = getattr(optimizer, "optim", optimizer)  # of ZeRO-1: the AdamW of this rank's part
    trained = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not trained <= {*model.parameters()}:
        raise ValueError("the optimizer has parameters of another model: build it after sharding")
    adam = type(inner) in (torch.optim.Adam, torch.optim.AdamW)
    if adam and not any(group["amsgrad"] for group in inner.param_groups):
        _create_adam_state(inner)
    elif zero1:
        raise ValueError(f"of mode zero1 only Adam and AdamW are saved, not {type(inner).__name__}")
    state: dict[str, Any] = state_dicts.get_model_state_dict(model)
    tensors: dict[str, Any] = {f"model.{name}": value for name, value in state.items()}
    if zero1:
        for name, p in model.named_parameters():
            name = re.sub(r"^module\.|\b(_checkpoint_wrapped_module|_orig_mod)\.", "", name)
            for leaf, value in inner.state.get(p, {}).items():
                tensors[f"optim.state.{name}.{leaf}"] = value
    else:
        state = state_dicts.get_optimizer_state_dict(model, optimizer, options=FLAT)
        tensors |= {f"optim.{n}": value for n, value in state.items() if n.startswith("state.")}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}, but only tensors are saved")
    return tensors


def _original_name(name: str) -> str:
    """Return the name that a tensor has in the unwrapped model."""
    wrappers = "_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod"
    return re.sub(rf"^module\.|\b({wrappers})\.", "", name)


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

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
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
        self.failures = 0  # in a row
        # what this rank has said for the index of the newest save; the index itself on rank 0
        self.indexed: tuple[dict[str, TensorStorageMetadata], list[WriteResult]] | None = None
        self.index = b""
        self.thread = ThreadPoolExecutor(1) if background else None
        # on a GPU one copy, in pinned memory, serves all saves: slow to allocate, fast to fill
        self.stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self.pending: Future[list[str]] | None = None
        self.step = 0  # of the newest attempt
        self.saved = 0  # of the newest that is on disk

    def save(self, step: int, run_state: dict[str, Any], wait: bool = True) -> list[str]:
        """Save, and store `run_state` (JSON) in the manifest; `wait` for its end. Collective.

        Returns a sentence per failed save, the same on all ranks: this one and, in the background,
        the one before. A failed save leaves the older checkpoints as they were.
        """
        if step < 0 or self.keep < 1:  # it would not be found again, or removed at once
            raise ValueError("give step 0 or more, keep 1 or more")
        run_state = json.loads(json.dumps(run_state))  # as it will be read
        problems = self.finish()
        if problems and self.failures == 2 and not wait:
            return problems  # two failed saves in a row: the caller ends the run
        self.step = step
        writer = _Writer(self.folder, step, run_state, self.keep)
        tensors = named_tensors(self.model, self.optimizer)
        if self.thread is None:
            return problems + self._write(tensors, writer)
        tensors = self.stager.stage(tensors)  # training changes the originals meanwhile
        writer.per_thread_copy_ahead = 0  # nothing is left to copy
        self.pending = self.thread.submit(self._write, tensors, writer)
        return problems + (self.finish() if wait else [])

    def finish(self) -> list[str]:
        """Wait for the save in the background, if any, and return as `save` does. Collective."""
        pending = self.pending
        self.pending = None
        return pending.result() if pending else []

    def _write(self, tensors: dict[str, Tensor], writer: _Writer) -> list[str]:
        """Write one checkpoint; return why it failed, the same sentence on all ranks.

        The index of one save is that of the next, unless a rank has written something else. So the
        ranks send what they have to say for it once, and afterwards only the checksums of files.
        """
        _remove_leftovers(self.folder)
        dist.barrier(self.group)  # no rank writes before the leftovers of a killed run are removed
        own: set[str] = set()
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            own = {name for name in tensors if name.startswith("optim.")}
        buffers = {f"model.{_original_name(name)}" for name, _ in self.model.named_buffers()}
        part = Written()
        why = None
        try:
            part = writer.write(tensors, _Planner(own, buffers, self.group))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        indexed = part.entries, part.results
        changed = self.indexed != indexed
        problem, send = _decide((why, changed), _first_problem, self.group)
        if not problem:
            if not send:
                part = part._replace(entries={}, results=[])
            problem = _decide(part, partial(self._complete, writer, send), self.group)
        self.indexed = None if problem else indexed
        _remove_leftovers(self.folder)
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


def _first_problem(found: list[tuple[str | None, bool]]) -> tuple[str | None, bool]:
    """Return why the first rank has failed, if one has, and whether any has a new index."""
    for rank, (why, _) in enumerate(found):
        if why:
            return f"{why} (rank {rank})", True
    return None, any(changed for _, changed in found)


def save(
    folder: str | Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run_state: dict[str, Any] | None = None,
    *,
    keep: int = 2,
) -> Path:
    """Save one checkpoint and return its folder; OSError on all ranks if it failed. Collective."""
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
            return manifest
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


def _check_shapes(folder: Path, index: Metadata, tensors: dict[str, Tensor], zero1: bool) -> None:
    """Raise Damaged where names or shapes are not those of the checkpoint."""
    entries: dict[str, Any] = index.state_dict_metadata
    # with ZeRO-1 other ranks have the other parameters' state
    more = {name for name in entries if not (zero1 and name.startswith("optim."))}
    for name in sorted(tensors.keys() | more):
        saved = tuple(entries[name].size) if name in entries else "missing"
        own = tuple(tensors[name].shape) if name in tensors else "missing"
        if saved != own:
            raise Damaged(f"{folder}: {name} is {saved} in the checkpoint, {own} in the model")


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizer; return its manifest. Collective.

    That is the saved `run_state`, and the "step". Every file is checked first, by one of the ranks:
    Damaged or OSError, the same on all, leaves the model as it was. A later error does not.
    """
    folder = Path(folder)
    tensors = named_tensors(model, optimizer)
    zero1 = isinstance(optimizer, ZeroRedundancyOptimizer)
    manifest, index = _read_on_rank0(folder, group)
    reader = Reader(folder)

    def prepare() -> None:
        check_files(folder, manifest, dist.get_rank(group), dist.get_world_size(group))
        reader.index = unpickle_index(index)
        _check_shapes(folder, reader.index, tensors, zero1)

    _on_all_ranks(prepare, group)
    _on_all_ranks(partial(reader.read, tensors), group)
    state: Any = {n[len("model.") :]: t for n, t in tensors.items() if n.startswith("model.")}
    state_dicts.set_model_state_dict(model, state)
    if not zero1:  # whose own tensors were loaded into
        state = state_dicts.get_optimizer_state_dict(model, optimizer, options=FLAT)
        state |= {n[len("optim.") :]: t for n, t in tensors.items() if n.startswith("optim.")}
        state_dicts.set_optimizer_state_dict(model, optimizer, state, options=FLAT)
    return manifest


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

    One process, without ranks. ValueError where `out` exists, Damaged, or OSError.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise ValueError(f"{out} exists: give the name of a new file")
    with replacing(out) as file:  # opened before minutes of reading
        weights = Weights(Path(folder))
        model = weights.read(weights)
        torch.save({"model": model, "step": weights.manifest["step"]}, file)
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
