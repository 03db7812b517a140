"""Sharded checkpoints: saved by any mode, engine and world size, loaded by any.

Built on `torch.distributed.checkpoint` (DCP). Tensors have the names of the unwrapped model. What
several ranks hold is deduplicated: each of them writes an equal part. Each rank reads what it
needs. No rank plans for the others: rank 0 gathers only the index of what was written.

    step_00000100/checkpoint.json    the manifest: step, run state, settings of the optimizers, size
                                     and CRC-32 of all other files, its own checksum
                  .metadata          DCP's index: which tensor is where
                  __R_0.distcp       what rank R wrote

A checkpoint is written under a temporary name, synced to the disk and renamed: a folder with the
final name is complete. Loading raises CorruptCheckpointError (permanent) or an OSError (which may
pass).

    python checkpoint.py verify DIR             check every checksum
    python checkpoint.py consolidate DIR OUT    write the model to one file

Copy this one file: it needs only torch.
"""

from __future__ import annotations

import argparse
import hashlib
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp._common_utils import FSDP_FLATTENED, FSDP_WRAPPED_MODULE
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

T = TypeVar("T")
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
MANIFEST = "checkpoint.json"
INDEX = ".metadata"
RESERVED = {"step", "files", "checksum", "optimizers"}  # names in a manifest
# Silence PyTorch's warnings about FSDP1 and (2.10) about code of its own that is deprecated.
warnings.filterwarnings("ignore", "When using ``NO_SHARD|FSDP.state_dict_type|TypedStorage is")


class CorruptCheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message says why, in one sentence."""


class _Refused(ValueError):
    """A training state cannot be saved and restored; the message says why, in one sentence."""


# --- Save


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

    `optimizer` is one, several, or None. To save several models, put them into one nn.ModuleDict.
    The settings of the parameter groups are saved too, learning rates included; put a scheduler's
    state_dict() into `run_state`. Raises on all ranks: OSError if the save failed, ValueError for a
    state that could not be restored.
    """
    problems = Saver(folder, model, optimizer, keep=keep).save(step, run_state or {})
    if problems:
        raise OSError(problems[0])
    return Path(folder) / f"step_{step:08d}"


class Saver:
    """Save the checkpoints of one run as `folder`/step_XXXXXXXX and keep the newest `keep`.

    The ranks coordinate through `group`: give a gloo group, because NCCL would gather objects in
    GPU memory. With `background` a thread writes from a copy in host memory, and training waits
    only for the copy. Nothing else may use `group` then: two threads in one group deadlock. Call
    `finish` before the process group is destroyed, or the last save is lost.
    ValueError for `background` without a group of its own.
    """

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
        if background and group in (None, dist.group.WORLD):
            raise ValueError('background needs a group of its own: dist.new_group(backend="gloo")')
        self.folder = Path(folder).absolute()  # a later os.chdir() must not change it
        self.model = model
        self.optimizer = optimizer
        self.keep = keep
        self.group = group
        # These two change only when a save has been waited for: they are the same on all ranks.
        self.failures = 0  # consecutive failed saves; 0 after a save that succeeded
        self.saved = 0  # the step of the newest save that has been waited for
        self.on_disk = 0  # the same, set at once by the thread that writes: ranks may differ
        # the index entries that this rank last sent to rank 0, which also keeps the index
        self.sent_entries: tuple[list[WriteItem], list[WriteResult]] | None = None
        self.index = b""
        self.thread = ThreadPoolExecutor(1) if background else None
        # Made by the first `_stage`. With a GPU it reuses one copy in pinned memory for all saves:
        # slow to allocate, fast to fill.
        self.stager: BlockingAsyncStager
        self.staged: dict[str, Any] | None = None  # shape and dtype of what that copy has
        self.pending: tuple[int, Future[str | None]] | None = None  # its step, and why it failed

    def save(self, step: int, run_state: dict[str, Any], wait: bool = True) -> list[str]:
        """Save, with rank 0's `run_state` in the manifest; `wait` until it is done. Collective.

        Returns one sentence per failed save, the same on all ranks: for this save and, if saves run
        in the background, for the one before. A failed save leaves the older checkpoints as they
        were. Raises ValueError, on all ranks, for a state that could not be restored.
        """
        if step < 0 or self.keep < 1:  # the checkpoint would not be found, or be removed at once
            raise ValueError("give step 0 or more, keep 1 or more")
        problems = self.finish()
        _remove_leftovers(self.folder, self.group)  # left by a killed run; before any rank writes
        describe = partial(self._describe, step, run_state)
        manifest, state, tensors, held = _on_all_ranks(describe, self.group)
        settings = json.dumps(manifest["optimizers"], sort_keys=True)
        names = zlib.crc32(" ".join(state.names.values()).encode())
        own = _RankSummary([*held], zlib.crc32(settings.encode()), names, state.states_checksum)
        keys_by_rank = _gather_decide_broadcast(own, _keys_if_ranks_agree, self.group)
        pieces = share(held, keys_by_rank, dist.get_rank(self.group))
        if self.thread is None:
            problem = self._write(tensors, manifest, pieces)
            return problems + self._record_outcome(step, problem)
        tensors = self._stage(tensors)  # a copy: training goes on to change the originals
        self.pending = step, self.thread.submit(self._write, tensors, manifest, pieces)
        if wait:
            problems += self.finish()
        return problems

    def _describe(
        self, step: int, run_state: dict[str, Any]
    ) -> tuple[dict[str, Any], TrainingState, dict[str, Tensor], Held]:
        """Return manifest, state, this rank's tensors, and these grouped by `group_by_holders`."""
        # first what is collective: if one rank refuses something below, none waits for it
        state = TrainingState(self.model, self.optimizer)
        tensors = state.tensors()
        taken = RESERVED & run_state.keys()
        if taken:
            raise _Refused(f"run_state has the key {taken.pop()}, which the manifest itself uses")
        manifest = _to_json(run_state, "run_state")
        if KEYED in manifest:
            raise _Refused("run_state has a key that is not a string: use strings")
        manifest["step"] = step
        manifest["optimizers"] = state.describe_groups()
        # Buffers may differ between ranks (BatchNorm statistics): the first rank's are saved. Of a
        # buffer that is itself sharded (a copy of a sharded parameter), every rank saves its part.
        if dist.get_rank(self.group) != 0:
            tensors = {
                name: tensor
                for name, tensor in tensors.items()
                if isinstance(tensor, DTensor) or state.origins[name] != "buffer"
            }
        return manifest, state, tensors, group_by_holders(tensors, state.origins)

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of the tensors in host memory."""
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if shapes != self.staged:  # such as states made by the first step: the old copy has no room
            cached = torch.cuda.is_available()
            self.stager = BlockingAsyncStager(cache_staged_state_dict=cached)
            self.staged = shapes
        staged = dict(self.stager.stage(tensors))
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor) and tensor.ndim == 0:  # PyTorch would not copy it
                staged[name] = tensor.detach().clone()
        return staged

    def finish(self) -> list[str]:
        """Wait for a save in the background, if any; return what `save` returns. Collective."""
        if self.pending is None:
            return []
        step, written = self.pending
        self.pending = None
        return self._record_outcome(step, written.result())

    def _record_outcome(self, step: int, problem: str | None) -> list[str]:
        """Record a finished save as failed or saved; return the problems, none or one."""
        if problem:
            self.failures += 1
            return [problem]
        self.failures = 0
        self.saved = step
        return []

    def _write(
        self, tensors: dict[str, Tensor], manifest: dict[str, Any], pieces: list[Piece]
    ) -> str | None:
        """Write one checkpoint; return None, or why it failed, in the same sentence on all ranks.

        The index seldom changes between saves. So the ranks send their entries only if those of
        some rank have changed, and otherwise just the sizes and checksums of their files.
        """
        step = manifest["step"]
        temporary = self.folder / f".step_{step:08d}.writing"
        problem = None
        try:
            write = partial(self._write_part, temporary, tensors, pieces)
            written = _on_all_ranks(write, self.group)
            entries = written.items, written.results
            new = _gather_decide_broadcast(entries != self.sent_entries, any, self.group)
            if not new:
                written = written._replace(items=[], results=[])
            self.sent_entries = None  # until the save has succeeded
            complete = partial(self._complete, temporary, manifest, new)
            _gather_decide_broadcast(written, complete, self.group)
            self.sent_entries = entries
            self.on_disk = step
        except OSError as error:
            problem = f"step {step} was not saved: {error}"
        _remove_leftovers(self.folder, self.group)
        return problem

    def _write_part(
        self, temporary: Path, tensors: dict[str, Tensor], pieces: list[Piece]
    ) -> WrittenPart:
        """Write this rank's pieces of the tensors, with DCP as if there were no other rank."""
        with _as_failure():
            writer = dcp.FileSystemWriter(temporary)
            if self.thread:
                writer.per_thread_copy_ahead = 0  # the tensors are in host memory already
            writer.set_up_storage_writer(True, rank=dist.get_rank(), use_collectives=False)
            planner = _PiecePlanner(pieces)
            planner.set_up_planner(tensors, is_coordinator=True)
            plan = writer.prepare_local_plan(SavePlan([piece.item for piece in pieces]))
            results = writer.write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in results}
            files = {name: _size_and_crc(temporary / name) for name in names}
        return WrittenPart(plan.items, results, files)

    def _complete(
        self, temporary: Path, manifest: dict[str, Any], new: bool, parts: list[WrittenPart]
    ) -> None:
        """On rank 0 write index and manifest, rename the folder, remove the oldest checkpoints."""
        files: dict[str, list[int]] = {}
        for part in parts:
            files.update(part.files)
        with _as_failure():
            for name, (size, _) in files.items():
                path = temporary / name
                if not path.is_file() or path.stat().st_size != size:
                    where = f"rank 0 does not see all of {path}, which another rank wrote"
                    raise OSError(f"{where}: save to a folder that all nodes share")
            if new:
                self.index = pickle.dumps(merge_index(parts))
            with atomic_write(temporary / INDEX) as file:
                file.write(self.index)
            files[INDEX] = [len(self.index), zlib.crc32(self.index)]
            manifest["files"] = files
            manifest["checksum"] = _manifest_checksum(manifest)
            with atomic_write(temporary / MANIFEST) as file:
                file.write(json.dumps(manifest, indent=1).encode())
            final = self.folder / f"step_{manifest['step']:08d}"
            removed = _rename_for_removal(final) if final.exists() else None
            try:
                temporary.rename(final)
            except OSError:
                if removed:
                    removed.rename(final)
                raise
            with atomic_write(self.folder / "latest") as file:
                file.write(f"{final.name}\n".encode())
        with suppress(OSError):
            every = list_checkpoints(self.folder)
            steps = [path for path in every if step_of(path) <= manifest["step"]]
            for old in steps[: -self.keep]:
                _rename_for_removal(old)
            if len(steps) < len(every):
                further = f"{every[-1]} is further than step {manifest['step']}, just saved"
                text = f"warning: {further}: move it away, or find_newest returns it"
                print(text, file=sys.stderr, flush=True)


class _RankSummary(NamedTuple):
    """What the first rank compares before a save."""

    keys: list[str]  # of what the rank holds (`group_by_holders`)
    settings: int  # checksum of the settings of the optimizers
    parameters: int  # checksum of the names of its parameters
    states: int  # checksum of the names of those that have states; 0 with ZeRO-1


def _keys_if_ranks_agree(of_ranks: list[_RankSummary]) -> list[list[str]]:
    """Return the keys of each rank; _Refused if the optimizers differ between ranks."""
    if len({rank.settings for rank in of_ranks}) > 1:
        raise _Refused(
            "the learning rates or other settings of the optimizers differ between ranks: give a "
            "scheduler values that are the same on all, such as a loss averaged over ranks"
        )
    states_of: dict[int, int] = {}
    for rank in of_ranks:
        # Loading gives every rank the states of all its parameters. If only one goes on updating
        # them, the next save would mix its states with those that the others were given.
        if states_of.setdefault(rank.parameters, rank.states) != rank.states:
            raise _Refused(
                "some ranks have optimizer states for parameters for which others have none: keep "
                "them on all ranks, divide them by ZeroRedundancyOptimizer, or use FSDP2"
            )
    return [rank.keys for rank in of_ranks]


@contextmanager
def _as_failure() -> Iterator[None]:
    """Re-raise any exception of the block as an OSError that names it and this rank."""
    try:
        yield
    except Exception as error:
        cause = _cause(error)
        where = f"{type(cause).__name__}: {cause} (rank {dist.get_rank()})"
        raise OSError(where) from error


# --- Load: every file is checked before the model is changed


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizers; return its manifest. Collective.

    The manifest has the saved `run_state`, the "step", and keys of its own. `optimizer` is one,
    several, or None, which loads the model alone. States and settings (learning rate, ...) become
    those of the checkpoint, as with Optimizer.load_state_dict. The ranks share the work of checking
    every file first: CorruptCheckpointError or OSError, the same on all ranks, leaves the model
    unchanged. After a later error it may be partly loaded.
    """
    folder = Path(folder)

    def collect() -> tuple[TrainingState, dict[str, Tensor]]:
        state = TrainingState(model, optimizer)
        return state, state.model_tensors()

    def check_all() -> Metadata:
        check_files(folder, manifest, dist.get_rank(group), dist.get_world_size(group))
        index = unpickle_index(pickled)
        state.resize_extra_states(tensors, index.state_dict_metadata)
        try:
            _check_model(tensors, index.state_dict_metadata)
            state.read_settings(manifest["optimizers"])
            tensors.update(state.empty_states(tensors, index.state_dict_metadata))
        except _Refused as error:
            raise CorruptCheckpointError(f"{folder}: {error}") from None
        return index

    state, tensors = _on_all_ranks(collect, group)
    # on the first rank only: a thousand ranks would wait for one file
    manifest, pickled = _gather_decide_broadcast(None, lambda _: read_index(folder), group)
    index = _on_all_ranks(check_all, group)
    _on_all_ranks(partial(read_tensors, folder, index, tensors), group)
    with _sharded_states(model):
        # not strict: a model may leave frozen parts out of its state_dict(). `_check_model` has
        # compared all names that it does have.
        model.load_state_dict(state.of_model, strict=False)
    state.load_states(tensors)
    return manifest


def find_newest(folder: str | Path) -> Path | None:
    """Return the newest checkpoint that rank 0 finds in a folder, or None. Collective."""
    # A shared file system may show different lists to different ranks.
    found = _gather_decide_broadcast(None, lambda _: list_checkpoints(folder), None)
    return found[-1] if found else None


def list_checkpoints(folder: str | Path) -> list[Path]:
    """List the checkpoints in a folder by step, even damaged ones; OSError if it is unreadable."""
    try:
        with os.scandir(folder) as entries:
            named = [e for e in entries if re.fullmatch(r"step_[0-9]{8,}", e.name)]
            return sorted((Path(e.path) for e in named if e.is_dir()), key=step_of)
    except FileNotFoundError:
        return []


def step_of(folder: Path) -> int:
    """Return the step in a folder's name."""
    return int(folder.name.removeprefix("step_"))


# --- Communication between ranks: gather on the first rank, broadcast its decision


def _gather_decide_broadcast(
    own: Any, decide: Callable[[list[Any]], T], group: dist.ProcessGroup | None
) -> T:
    """Gather every rank's `own` on the first rank of `group` and call `decide` there. Collective.

    All ranks return its decision, or raise the error that it raised.
    """
    gathered: list[Any] | None = None
    if dist.get_rank(group) == 0:
        gathered = [None] * dist.get_world_size(group)
    dist.gather_object(own, gathered, group=group, group_dst=0)
    outcome: list[Any] = [None, None]  # the decision, an error
    if gathered is not None:
        try:
            outcome[0] = decide(gathered)
        except Exception as raised:
            outcome[1] = _to_send(raised)
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1]:
        raise outcome[1]
    return outcome[0]


def _on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `work` on every rank; if any fails, raise the first one's error on all. Collective."""
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        error = _to_send(raised)
    errors = [e for e in _gather_decide_broadcast(error, list, group) if e]
    if errors:
        raise errors[0]
    return result


def _to_send(error: Exception) -> Exception:
    """Return an error that can be sent to all ranks; print the traceback of a bug here."""
    if isinstance(error, CorruptCheckpointError | _Refused | OSError):
        return error
    traceback.print_exception(error)
    # not the error itself: another rank may not be able to unpickle its type
    return RuntimeError(f"{type(error).__name__}: {error}")


# --- The training state as named tensors, the same in every mode

# Keys of a parameter group that are not settings, or that choose an implementation, not the
# arithmetic: those keep the values that the optimizer was built with.
NOT_SAVED = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}


def _sharded_states(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, state dicts of FSDP1 hold sharded tensors with their original names and shapes."""
    if not FSDP1.fsdp_modules(model):
        return nullcontext()
    kind = StateDictType.SHARDED_STATE_DICT
    options = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    return FSDP1.state_dict_type(model, kind, *options)


def _original_name(model: nn.Module, name: str, skip_compiler_prefix: bool = True) -> str:
    """Return the name that a parameter or buffer had before the model was wrapped."""
    return next(iter(_get_fqns(model, name, skip_compiler_prefix=skip_compiler_prefix)))


def _stateful(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds the states: inside ZeRO-1 the one of this rank's part."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    parameters = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


def _name_entry(name: str, leaf: str, value: Any, parameter: Tensor) -> str:
    """Name a state "optim.KIND.NAME.LEAF"; `name` is that of its parameter.

    KIND is "whole" if an optimizer keeps a whole tensor for a sharded parameter. A dot in the
    leaf's own name is replaced, because it would divide the name.
    """
    kind = "state"
    if value is None:
        kind = "none"
    elif not isinstance(value, Tensor):
        kind = "number"
    elif isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.ndim > 0:
        kind = "whole"
    return f"optim.{kind}.{name}.{leaf.replace('%', '%25').replace('.', '%2E')}"


def _split_entry(entry: str) -> tuple[str, str, str]:
    """Return kind, parameter and leaf of a name that `_name_entry` made."""
    _, kind, name = entry.split(".", maxsplit=2)
    parameter, leaf = name.rsplit(".", maxsplit=1)
    return kind, parameter, leaf.replace("%2E", ".").replace("%25", "%")


class TrainingState:
    """A model and its optimizers: collects their state for saving, and restores it."""

    def __init__(self, model: nn.Module, optimizer: Optimizers) -> None:
        """Take no, one or several optimizers; _Refused if the states of one cannot be saved.

        A tied parameter is known by the first of its names. Collective.
        """
        self.model = model
        _refuse_part_of_fsdp1(model)
        # Must come before the names: between forward and backward it makes FSDP put back the
        # sharded parameters, which the optimizer has.
        with _sharded_states(model):
            self.of_model = model.state_dict()
        self.optimizers: list[torch.optim.Optimizer] = []
        if isinstance(optimizer, torch.optim.Optimizer):
            self.optimizers = [optimizer]
        elif optimizer is not None:
            self.optimizers = list(optimizer)
        self.fsdp1 = bool(FSDP1.fsdp_modules(model))
        if self.optimizers:
            _refuse_flat_parameters(model)
        self.names = {p: _original_name(model, name) for name, p in model.named_parameters()}
        self.owners: dict[nn.Parameter, torch.optim.Optimizer] = {}
        # the name of each of the `tensors` -> "parameter", "buffer", "optimizer 0", ...
        self.origins: dict[str, str] = {}
        # of the names of the parameters that have states; 0 with ZeRO-1, which divides them
        self.states_checksum = 0
        # what `read_settings` has found, for each parameter group of each optimizer
        self.settings: list[dict[str, Any]] = []
        if self.fsdp1:  # no rank may go on alone to what is collective
            _on_all_ranks(self._check_optimizers, None)
        else:
            self._check_optimizers()

    def _check_optimizers(self) -> None:
        for optimizer in self.optimizers:
            self._check(optimizer)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__name__
        for attribute, value in vars(_stateful(optimizer)).items():
            parts = [value]
            if isinstance(value, list | tuple):
                parts = [*value]
            elif isinstance(value, dict):
                parts = [*value.values()]
            if any(isinstance(part, torch.optim.Optimizer) for part in parts):
                advice = f"give that optimizer, and in run_state what {kind} itself keeps"
                raise _Refused(f"{kind} keeps its states in .{attribute}: {advice}")
        for p in _parameters_of(optimizer):
            if p not in self.names:
                raise _Refused(
                    f"{kind} holds a parameter of shape {tuple(p.shape)} that the model lacks: "
                    "build the optimizer from model.parameters(), after sharding"
                )
            if self.owners.setdefault(p, optimizer) is not optimizer:
                raise _Refused(f"{self.names[p]} is in two optimizers: remove it from one of them")
        key: Any
        for key in _stateful(optimizer).state:
            if self.owners.get(key) is not optimizer:
                raise _Refused(f"{kind} has a state of {key!r:.40}, which it does not train")

    # saving

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model's state dict by the names of `tensors`."""
        found = {}
        for key, value in self.of_model.items():
            name = f"model.{_original_name(self.model, key)}"
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise _Refused(f"{name} is {kind}, but of a model only tensors are saved")
            found[name] = value
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors of the training state, by name; fill in `origins`. Collective.

        The names are "model.NAME" and those of `_name_entry`, where LEAF is a key in the state of a
        parameter, and KIND tells a Python number or None from a tensor. Sharded tensors are
        DTensors. _Refused, a ValueError, if a state could not be restored.
        """
        tensors = self.model_tensors()
        self.origins = dict.fromkeys(tensors, "parameter")
        others = [name for name, _ in self.model.named_buffers(remove_duplicate=False)]
        others += [name for name in self.of_model if name.endswith("_extra_state")]
        for name in others:
            self.origins[f"model.{_original_name(self.model, name)}"] = "buffer"
        with_states: set[str] = set()
        for number, optimizer in enumerate(self.optimizers):
            states = self._states_of(optimizer)
            if not isinstance(optimizer, ZeroRedundancyOptimizer):
                with_states |= states.keys()
            for name, leaves in states.items():
                for leaf, value in leaves.items():
                    _check_leaf(name, leaf, value)
                    parameter = tensors[f"model.{name}"]
                    entry = _name_entry(name, leaf, value, parameter)
                    if not isinstance(value, Tensor):
                        dtype = torch.float64 if isinstance(value, float) else None
                        value = torch.tensor(0 if value is None else value, dtype=dtype)
                    _check_shape(entry, value.shape, parameter)
                    tensors[entry] = value
                    self.origins[entry] = f"optimizer {number}"
        if with_states:
            self.states_checksum = zlib.crc32(" ".join(sorted(with_states)).encode())
        return tensors

    def _states_of(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Return the states {parameter: {leaf: value}} that this rank holds. Collective."""
        if self.fsdp1:
            return self._fsdp1_states_of(optimizer)
        stateful = _stateful(optimizer)
        state_dict = stateful.state_dict()  # a hook may reorder the states, as with --tp
        _check_keys(stateful, state_dict)
        states = state_dict["state"]
        names = [self.names[p] for p in _parameters_of(stateful)]
        return {names[number]: leaves for number, leaves in states.items()}

    def _fsdp1_states_of(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Return the states in the shapes that the parameters had before FSDP1 flattened them.

        FSDP1 converts the states of exactly the parameters that are trained. So parameters without
        states, or of other optimizers, are given states of zeros, which are left out of the result.
        """
        _check_keys(optimizer, optimizer.state_dict())
        own = _on_all_ranks(partial(self._sharded_leaves, optimizer), None)
        # from all ranks, because one may hold no part of these parameters
        leaves: dict[str, torch.dtype] = {}
        with_states: set[str] = set()
        for leaves_of_rank, names_of_rank in _gather_decide_broadcast(own, list, None):
            leaves |= leaves_of_rank
            with_states |= names_of_rank
        optimizer_of_all = torch.optim.SGD(self.model.parameters())
        optimizer_of_all.state.update(optimizer.state)
        for p, name in self.names.items():
            if p.requires_grad and p.numel() > 0 and name not in with_states:
                zeros = {leaf: torch.zeros_like(p, dtype=dtype) for leaf, dtype in leaves.items()}
                optimizer_of_all.state[p] = zeros
        with _sharded_states(self.model):
            converted = FSDP1.optim_state_dict(self.model, optimizer_of_all)["state"]
        named = {_original_name(self.model, name): state for name, state in converted.items()}
        return {name: state for name, state in named.items() if name in with_states}

    def _sharded_leaves(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, torch.dtype], set[str]]:
        """Return which states FSDP1 has sharded, and the names of the parameters that have states.

        _Refused for a state that FSDP1 cannot convert.
        """
        whole = ShardingStrategy.NO_SHARD
        sharded = any(m.sharding_strategy is not whole for m in FSDP1.fsdp_modules(self.model))
        leaves = {}
        p: Any
        for p, state in optimizer.state.items():
            shapes = {p.shape}
            dtypes = set()
            for leaf, value in state.items():
                _check_leaf(self.names[p], leaf, value)
                if isinstance(value, Tensor) and value.ndim > 0:
                    leaves[leaf] = value.dtype
                    shapes.add(value.shape)
                    dtypes.add(value.dtype)
            if sharded and (len(shapes) > 1 or len(dtypes) > 1):
                where = f"the states of {self.names[p]} must have its shape or be scalars"
                raise _Refused(f"{where}, and have one dtype, under FSDP1: use mode ddp")
        with_states = {name for p, name in self.names.items() if optimizer.state.get(p)}
        return leaves, with_states

    def describe_groups(self) -> list[dict[str, Any]]:
        """Describe each parameter group: its optimizer, parameters, settings (learning rate, ...).

        _Refused if JSON cannot hold a setting.
        """
        described = []
        for optimizer in self.optimizers:
            kind = type(_stateful(optimizer)).__name__
            for group in optimizer.param_groups:
                settings = {}
                for key in group.keys() - NOT_SAVED:
                    value = group[key]
                    if isinstance(value, Tensor) and value.numel() == 1:
                        value = value.item()  # the learning rate of a compiled optimizer step
                    settings[key] = _to_json(value, f"{key} of a parameter group of {kind}")
                names = [self.names[p] for p in group["params"]]
                described.append({"optimizer": kind, "params": names, "settings": settings})
        return described

    # loading

    def read_settings(self, saved: Sequence[dict[str, Any]]) -> None:
        """Find the settings of each parameter group in what `describe_groups` returned at the save.

        Parameters may be grouped differently now, as by --tp, but _Refused if those of one group
        had different settings, or if one is trained by another kind of optimizer than before.
        """
        groups = self.describe_groups()
        then = _group_of_each(saved)
        now = _group_of_each(groups)
        for name in sorted(then.keys() | now.keys()):
            before = then[name]["optimizer"] if name in then else "no optimizer"
            after = now[name]["optimizer"] if name in now else "no optimizer"
            if self.optimizers and before != after:
                where = f"{name} was trained by {before}, now by {after}"
                raise _Refused(f"{where}: give None to load the model alone")
        for group in groups:
            settings: dict[str, Any] = {}
            for name in group["params"]:
                first = group["params"][0]
                settings = then[first]["settings"]
                if then[name]["settings"] != settings:
                    where = f"{name} and {first} had different settings"
                    raise _Refused(f"{where}, but are in one parameter group now")
            self.settings.append(settings)

    def resize_extra_states(self, tensors: dict[str, Tensor], entries: Mapping[str, Any]) -> None:
        """Allocate what modules keep by `get_extra_state` in its saved size, which may vary."""
        for key in self.of_model:
            name = f"model.{_original_name(self.model, key)}"
            if key.endswith("_extra_state") and name in entries:
                saved = entries[name]
                if saved.size != tensors[name].shape:
                    device = tensors[name].device
                    new = torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
                    tensors[name] = new
                    self.of_model[key] = new

    def empty_states(
        self, tensors: Mapping[str, Tensor], entries: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Allocate this rank's part of the saved optimizer states, sharded like the parameters."""
        own = set()
        for optimizer in self.optimizers:
            # with ZeRO-1 only those that this rank updates
            own |= {self.names[p] for p in _parameters_of(_stateful(optimizer))}
        found = {}
        for entry, saved in entries.items():
            if not entry.startswith("optim."):
                continue
            kind, name, _ = _split_entry(entry)
            if name not in own:
                continue
            parameter = tensors[f"model.{name}"]
            _check_shape(entry, saved.size, parameter)
            dtype = saved.properties.dtype
            if kind == "whole":
                found[entry] = torch.empty(saved.size, dtype=dtype, device=parameter.device)
            elif saved.size == parameter.shape:
                found[entry] = torch.empty_like(parameter, dtype=dtype)
            else:
                found[entry] = torch.empty(saved.size, dtype=dtype)
        return found

    def load_states(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the states that were read, and the settings, of the optimizers. Collective."""
        named: dict[str, dict[str, Any]] = {}
        for entry, tensor in tensors.items():
            if entry.startswith("optim."):
                kind, name, leaf = _split_entry(entry)
                value: Any = tensor
                if kind == "number":
                    value = tensor.item()
                elif kind == "none":
                    value = None
                named.setdefault(name, {})[leaf] = value
        if self.fsdp1 and self.optimizers:
            states = self._shard_for_fsdp1(named)
        else:
            states = {p: named[name] for p, name in self.names.items() if name in named}
        remaining = iter(self.settings)
        for optimizer in self.optimizers:
            stateful = _stateful(optimizer)
            order = _parameters_of(stateful)
            state = {number: states[p] for number, p in enumerate(order) if p in states}
            groups = stateful.state_dict()["param_groups"]
            for group, own_group in zip(groups, optimizer.param_groups, strict=True):
                settings = {k: _like(own_group.get(k), v) for k, v in next(remaining).items()}
                group.update(settings)
                # also in ZeRO-1's wrapper, which lists all parameters but updates only this rank's
                own_group.update(settings)
            own_groups = stateful.param_groups
            stateful.load_state_dict({"state": state, "param_groups": groups})
            # load_state_dict() makes new groups, but a scheduler or an optimizer around this one
            # may hold the old ones
            for own_group, loaded in zip(own_groups, stateful.param_groups, strict=True):
                own_group.update(loaded)
            stateful.param_groups = own_groups
            # load_state_dict() has also rounded states to the dtype of their parameter
            for p in order:
                for leaf, value in states.get(p, {}).items():
                    now = stateful.state[p][leaf]
                    if isinstance(value, Tensor) and now.dtype != value.dtype:
                        stateful.state[p][leaf] = value.to(now.device)

    def _shard_for_fsdp1(
        self, named: Mapping[str, dict[str, Any]]
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the states by parameter, flattened and sharded as FSDP1 holds them. Collective."""
        optimizer_of_all = torch.optim.SGD(self.model.parameters())  # FSDP1 wants one
        given = {}
        for name, p in self.model.named_parameters():
            if self.names[p] in named:
                # FSDP1's names keep the prefix of torch.compile
                fsdp1_name = _original_name(self.model, name, skip_compiler_prefix=False)
                given[fsdp1_name] = named[self.names[p]]
        with _sharded_states(self.model):
            found = FSDP1.optim_state_dict_to_load(self.model, optimizer_of_all, {"state": given})
        order = _parameters_of(optimizer_of_all)
        return {order[number]: leaves for number, leaves in found["state"].items()}


def _group_of_each(groups: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each parameter the description of its group."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        found |= dict.fromkeys(group["params"], group)
    return found


def _refuse_part_of_fsdp1(model: nn.Module) -> None:
    """Raise _Refused for a part of a model of FSDP1: it has no names and shapes of its own."""
    for name, p in model.named_parameters():
        if getattr(p, FSDP_FLATTENED, False) and FSDP_WRAPPED_MODULE not in name:
            raise _Refused(f"{name} is sharded by FSDP1 in a larger model: give the whole model")


def _refuse_flat_parameters(model: nn.Module) -> None:
    """Raise _Refused for FSDP1 whose optimizer sees only flat parameters, of several names each."""
    for module in FSDP1.fsdp_modules(model):
        handle: Any = module._handle
        if handle is not None and not handle._use_orig_params:
            raise _Refused(
                "FSDP1 without use_orig_params=True gives the optimizer flat parameters, whose "
                "states have no names: build it with use_orig_params=True"
            )


def _check_keys(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise _Refused for an optimizer whose state_dict has more than states and groups."""
    more = state_dict.keys() - {"state", "param_groups"}
    if more:
        kind = type(optimizer).__name__
        raise _Refused(f"the state_dict of {kind} has {more.pop()} too, which is not saved")


def _check_leaf(parameter: str, leaf: Any, value: Any) -> None:
    """Raise _Refused for a state of a parameter that could not be restored under its key."""
    if not isinstance(leaf, str):
        raise _Refused(f"a state of {parameter} has the key {leaf!r:.40}, which is not a string")
    if value is not None and not isinstance(value, Tensor | bool | int | float):
        kind = type(value).__name__
        where = f"the state {leaf} of {parameter} is {kind}"
        raise _Refused(f"{where}, but only tensors and numbers are saved")


def _check_shape(entry: str, size: torch.Size, parameter: Tensor) -> None:
    """Raise _Refused for a state that cannot be sharded like its parameter."""
    if isinstance(parameter, DTensor) and len(size) > 0 and size != parameter.shape:
        raise _Refused(
            f"{entry} is {tuple(size)}, its parameter {tuple(parameter.shape)}: states of a "
            "sharded parameter must have its shape or be scalars: use mode ddp"
        )


def _check_model(tensors: Mapping[str, Tensor], entries: Mapping[str, Any]) -> None:
    """Raise _Refused unless the model in a checkpoint has the names and shapes of `tensors`."""
    saved = {name for name in entries if name.startswith("model.")}
    for name in sorted(tensors.keys() | saved):
        then = tuple(entries[name].size) if name in entries else "missing"
        now = tuple(tensors[name].shape) if name in tensors else "missing"
        if then != now:
            raise _Refused(f"{name} is {then} in the checkpoint, {now} in the model")
        saved_dtype = entries[name].properties.dtype
        own = tensors[name]
        if own.device.type == "meta":
            raise _Refused(f"{name} is on meta: call model.to_empty(device=...) first")
        if not _can_hold(own.dtype, saved_dtype):
            raise _Refused(f"{name} is {saved_dtype} in the checkpoint, {own.dtype} in the model")


def _can_hold(own: torch.dtype, saved: torch.dtype) -> bool:
    """Tell whether a tensor can take values of the saved dtype; floats may be rounded."""
    if saved.is_floating_point or saved.is_complex:
        return torch.can_cast(saved, own)
    return torch.promote_types(saved, own) == own


def _like(own: Any, value: Any) -> Any:
    """Return a saved setting in the type of the optimizer's own value."""
    if isinstance(own, Tensor):
        return torch.full_like(own, value)
    if isinstance(own, tuple):
        return tuple(value)
    return value


# --- The manifest, as JSON

KEYED = "not a JSON object"  # a key that marks a dictionary stored as pairs


def _to_json(value: Any, where: str) -> Any:
    """Return a form that JSON can hold and `_from_json` restores; _Refused if there is none.

    A dictionary whose keys are numbers (a scheduler's milestones) is stored as pairs. A tuple
    becomes a list.
    """
    if isinstance(value, dict):
        items = {key: _to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        if all(isinstance(key, str) for key in items):
            return items
        for key in items:
            if not isinstance(key, str | bool | int | float):
                raise _Refused(f"{where} has the key {key!r:.40}, which JSON cannot hold")
        return {KEYED: type(value).__name__, "pairs": [*items.items()]}
    if isinstance(value, list | tuple):
        return [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _Refused(f"{where} is {type(value).__name__}, which JSON cannot hold: save numbers")


def _from_json(found: dict[str, Any]) -> dict[Any, Any]:
    """Restore the dictionary that `_to_json` was given from a JSON object that was read."""
    if KEYED not in found:
        return found
    pairs = dict(found["pairs"])
    return Counter(pairs) if found[KEYED] == "Counter" else pairs


def _manifest_checksum(manifest: dict[str, Any]) -> int:
    """Return the CRC-32 of a manifest, leaving out its own checksum."""
    return zlib.crc32(json.dumps(manifest | {"checksum": 0}, sort_keys=True).encode())


# --- Which rank writes what (an item is a shard of a tensor that a rank holds, or a whole tensor)


class WrittenPart(NamedTuple):
    """What one rank has written."""

    items: list[WriteItem] = []
    results: list[WriteResult] = []  # the file of each item, and its place in that file
    files: dict[str, list[int]] = {}  # name of a file -> its size and CRC-32


# What a rank holds, by a checksum that is the same on all ranks that hold the same items
Held = dict[str, list[WriteItem]]


def group_by_holders(tensors: dict[str, Tensor], origins: Mapping[str, str]) -> Held:
    """Group what this rank holds, so that any other rank holds all of a group or nothing of it.

    Replicas in a mesh hold the same shards. All ranks hold what is not sharded, except for the
    states of ZeRO-1: each of those is on one rank.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors)
    by_layout = defaultdict(list)
    for item in planner.create_local_plan().items:
        tensor = tensors[item.index.fqn]
        layout: list[Any] = [origins[item.index.fqn], item.type]
        if isinstance(tensor, DTensor):
            layout += [tensor.device_mesh.mesh_dim_names, tensor.placements]
        by_layout[str(layout)].append(item)
    held = {}
    for layout_name, items in by_layout.items():
        places = [(item.index.fqn, item.tensor_data) for item in items]
        key = hashlib.blake2b(f"{layout_name} {places}".encode(), digest_size=16)
        held[key.hexdigest()] = items
    return held


def share(held: Held, keys_by_rank: Sequence[Sequence[str]], rank: int) -> list[Piece]:
    """Return the pieces that a rank writes: an equal share of each group among its holders."""
    pieces: list[Piece] = []
    for key, items in held.items():
        holders = [other for other, keys in enumerate(keys_by_rank) if key in keys]
        pieces += equal_part(items, holders.index(rank), len(holders))
    return pieces


class Piece(NamedTuple):
    """The part of an item that one rank writes."""

    item: WriteItem
    whole: WriteItem  # the item that this is a part of
    rows: Any  # what selects its rows from the tensor of `whole`: a slice, or ... for all


def equal_part(items: Sequence[WriteItem], part: int, parts: int) -> Iterator[Piece]:
    """Lay `items` end to end, cut their bytes into `parts` equal parts, yield the pieces of one.

    A row belongs to the part in which it begins. Scalars and vectors are not divided. An empty
    chunk is skipped, unless its whole tensor is empty.
    """
    sizes = [item_bytes(item) for item in items]
    begin = sum(sizes) * part // parts  # this part, in bytes: from `begin` to before `end`
    end = sum(sizes) * (part + 1) // parts
    start = 0  # where the item begins, in bytes
    for item, size in zip(items, sizes, strict=True):
        data: Any = item.tensor_data
        rows = 1
        if len(data.chunk.sizes) > 1:
            rows = data.chunk.sizes[0]
        if size == 0:
            if part == 0 and math.prod(data.size) == 0:
                yield Piece(item, item, ...)
            continue
        first = _rows_before(begin - start, size, rows)
        last = _rows_before(end - start, size, rows)
        if last - first == rows:
            yield Piece(item, item, ...)
        elif last > first:
            yield Piece(_rows_of(item, first, last), item, slice(first, last))
        start += size


def _rows_before(place: int, size: int, rows: int) -> int:
    """Count the rows that begin before byte `place` of a tensor of `size` bytes and `rows` rows."""
    count = (place * rows + size - 1) // size  # rounded up
    return min(max(count, 0), rows)


def item_bytes(item: WriteItem) -> int:
    """Return how many bytes an item holds. DCP's own count gives those of the whole tensor."""
    data: Any = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _rows_of(item: WriteItem, first: int, last: int) -> WriteItem:
    """Return the part of an item from row `first` to before row `last`, as an item."""
    data: Any = item.tensor_data
    offsets = torch.Size((data.chunk.offsets[0] + first, *data.chunk.offsets[1:]))
    sizes = torch.Size((last - first, *data.chunk.sizes[1:]))
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=replace(data, chunk=chunk),
    )


class _PiecePlanner(dcp.DefaultSavePlanner):
    """Let DCP write pieces of what this rank holds, instead of all of it."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        """Take the pieces to write."""
        super().__init__(flatten_state_dict=False)
        self.pieces = {piece.item.index: piece for piece in pieces}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data of a piece."""
        piece = self.pieces[write_item.index]
        whole: Any = super().resolve_data(piece.whole)
        return whole[piece.rows]


def merge_index(parts: Sequence[WrittenPart]) -> Metadata:
    """Make the index of what all ranks have written; ValueError if a tensor is incomplete."""
    entries: dict[str, Any] = {}
    storage_data = {}
    for part in parts:
        for item in part.items:
            name = item.index.fqn
            data: Any = item.tensor_data
            if name not in entries:
                entries[name] = TensorStorageMetadata(data.properties, data.size, [])
            entries[name].chunks.append(data.chunk)
        for result in part.results:
            storage_data[result.index] = result.storage_data
    for name, entry in entries.items():
        elements = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        places = {chunk.offsets for chunk in entry.chunks}
        if elements != math.prod(entry.size) or (elements and len(places) < len(entry.chunks)):
            raise ValueError(f"{name} would be incomplete: the ranks do not hold the same tensors")
    return Metadata(entries, storage_data=storage_data)


# --- Files: written durably, checked before they are read


@contextmanager
def atomic_write(path: Path) -> Iterator[io.BufferedWriter]:
    """Write `path` atomically and durably: a new file replaces it only if the block succeeds."""
    new = path.with_name(f".{path.name}.writing")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except RuntimeError as error:
        raise _cause(error) from None
    finally:
        with suppress(OSError):
            new.unlink()


def _cause(error: Exception) -> BaseException:
    """Return the original cause: after a failed write, torch.save raises again on closing."""
    if isinstance(error, RuntimeError) and error.__context__:
        return error.__context__
    return error


def _size_and_crc(path: Path) -> list[int]:
    """Return the size of a file in bytes, and its CRC-32."""
    size = 0
    crc = 0
    with path.open("rb") as file:
        for block in iter(partial(file.read, 2**20), b""):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


def _rename_for_removal(checkpoint: Path) -> Path:
    """Rename a checkpoint: a kill during its removal must not leave half of it under its name."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.removed"))


def _remove_leftovers(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Remove, on the first rank, partial and renamed checkpoints; a save goes on if that fails."""
    if dist.get_rank(group) != 0:
        return
    with suppress(OSError):
        for path in folder.glob(".step_*.*"):
            shutil.rmtree(path, ignore_errors=True)


TORCH_TYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
# Without BytesStorageMetadata: for it DCP would unpickle arbitrary objects from another file.
INDEX_TYPES = {
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
    """Unpickle DCP's index safely: only classes of an allow-list, so no code is run."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class if it is allowed."""
        if f"{module}.{name}" in INDEX_TYPES:
            return super().find_class(module, name)
        raise CorruptCheckpointError(
            f"{INDEX} contains '{module}.{name}', which this code never writes"
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint; CorruptCheckpointError if it is missing or was altered."""
    try:
        content = (folder / MANIFEST).read_bytes()
        manifest = json.loads(content)
        if manifest["checksum"] == _manifest_checksum(manifest):
            return json.loads(content, object_hook=_from_json)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptCheckpointError(
            f"{folder}: not a checkpoint (it contains no {MANIFEST})"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        pass  # not JSON, or not the JSON object that was written
    raise CorruptCheckpointError(f"{folder}: checksum mismatch in {MANIFEST}")


def read_index(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Read and check the manifest and the index of a checkpoint; the index stays pickled.

    CorruptCheckpointError if one is damaged, OSError if one cannot be read.
    """
    manifest = read_manifest(folder)
    index = (folder / INDEX).read_bytes()
    if [len(index), zlib.crc32(index)] != manifest["files"][INDEX]:
        raise CorruptCheckpointError(f"{folder}: checksum mismatch in {INDEX}")
    return manifest, index


def check_files(folder: Path, manifest: dict[str, Any], part: int = 0, parts: int = 1) -> None:
    """Check every `parts`-th shard file, from number `part`; CorruptCheckpointError or OSError."""
    files = manifest["files"]
    names = sorted(files.keys() - {INDEX})
    for name in names[part::parts]:
        if _size_and_crc(folder / name) != files[name]:
            raise CorruptCheckpointError(f"{folder}: checksum mismatch in {name}")


def unpickle_index(index: bytes) -> Metadata:
    """Unpickle an index; CorruptCheckpointError if it contains a class that is not allowed."""
    return _Unpickler(io.BytesIO(index)).load()


def check(folder: Path) -> tuple[dict[str, Any], Metadata]:
    """Check every file of a checkpoint -> manifest and index; CorruptCheckpointError or OSError."""
    manifest, index = read_index(folder)
    check_files(folder, manifest)
    return manifest, unpickle_index(index)


def read_tensors(folder: Path, index: Metadata, tensors: dict[str, Tensor]) -> None:
    """Read this rank's part of the tensors, in place, with DCP but without the other ranks.

    Give an `index` that `unpickle_index` has checked: DCP itself would unpickle anything.
    """
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    reader = dcp.FileSystemReader(folder)
    planner.set_up_planner(tensors, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


# --- Without a process group


class Weights(UserDict[str, Any]):
    """The model in a checkpoint: a tensor is read when it is looked up, by its name."""

    def __init__(self, folder: Path) -> None:
        """Check every file; CorruptCheckpointError or OSError."""
        super().__init__()
        self.folder = folder
        self.manifest, self.index = check(folder)
        entries: Mapping[str, Any] = self.index.state_dict_metadata
        self.data = {n[6:]: entry for n, entry in entries.items() if n.startswith("model.")}

    def __getitem__(self, name: str) -> Tensor:
        return self.read([name])[name]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read several tensors at once, so that each file is opened only once."""
        entries = {name: self.data[name] for name in names}
        found = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
        tensors = {f"model.{name}": tensor for name, tensor in found.items()}
        read_tensors(self.folder, self.index, tensors)
        return found


def consolidate(folder: str | Path, out: str | Path) -> dict[str, Tensor]:
    """Write the whole model to a new file, for `torch.load(out)["model"]`, and return it.

    The file also has the "step" and the "run_state" that was saved with the model: what it was
    trained on. Needs one process only. ValueError if `out` exists; CorruptCheckpointError or
    OSError if the checkpoint cannot be read.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise ValueError(f"{out} exists: give the name of a new file")
    with atomic_write(out) as file:  # opened first: it may fail, and reading takes minutes
        weights = Weights(Path(folder))
        model = weights.read(weights)
        manifest = weights.manifest
        run_state = {key: value for key, value in manifest.items() if key not in RESERVED}
        torch.save({"model": model, "step": manifest["step"], "run_state": run_state}, file)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 1 if the checkpoint is damaged, exit with 2 for bad usage."""
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
    except (CorruptCheckpointError, OSError) as error:
        print(f"checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
