"""Sharded checkpoints: saved by any mode, engine and world size, loaded by any.

Built on `torch.distributed.checkpoint` (DCP): what several ranks hold is written once, each of them
writes an equal part of it, and each rank reads what it needs, under the names of the unwrapped
model. No rank plans for the others: rank 0 gathers only the index of what was written.

    step_00000100/checkpoint.json    the manifest: step, flags, size and CRC-32 of all other files
                  .metadata          DCP's index: which tensor is where
                  __0_0.distcp       what rank 0 wrote

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
    StateDictType,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

T = TypeVar("T")
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
MANIFEST = "checkpoint.json"
INDEX = ".metadata"
RESERVED = {"step", "files", "checksum", "optimizers"}  # names in a manifest
# PyTorch warns of FSDP1's own ways, of reading without ranks and (2.10) of its own code
warnings.filterwarnings("ignore", "When using ``NO_SHARD|FSDP.state_dict_type")
warnings.filterwarnings("ignore", "torch.distributed is dis|TypedStorage is")


class CorruptCheckpointError(ValueError):
    """A checkpoint that cannot be loaded, and why, in one sentence."""


class _Refused(ValueError):
    """A training state that cannot be saved so that it can be loaded, and why, in one sentence."""


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

    `optimizer` is one, several, or None; of several models make one: nn.ModuleDict. The parameter
    groups are saved as they are, learning rates included; a scheduler's state_dict() belongs in
    `run_state`. On all ranks OSError if it failed, ValueError for what could not be loaded again.
    """
    problems = Saver(folder, model, optimizer, keep=keep).save(step, run_state or {})
    if problems:
        raise OSError(problems[0])
    return Path(folder) / f"step_{step:08d}"


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
        self.saved = 0  # the step of the newest that is on disk
        # what this rank has told of the newest save for its index; the index itself on rank 0
        self.sent_entries: tuple[list[WriteItem], list[WriteResult]] | None = None
        self.index = b""
        self.thread = ThreadPoolExecutor(1) if background else None
        # on a GPU one copy, in pinned memory, serves all saves: slow to allocate, fast to fill
        self.stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self.pending: Future[list[str]] | None = None

    def save(self, step: int, run_state: dict[str, Any], wait: bool = True) -> list[str]:
        """Save, and store `run_state` (as JSON) in the manifest; `wait` for its end. Collective.

        Returns a sentence per failed save, the same on all ranks: this one and, in the background,
        the one before. A failed save leaves the older checkpoints as they were. Raises ValueError,
        on all ranks, for what could not be loaded again.
        """
        if step < 0 or self.keep < 1:  # it would not be found again, or removed at once
            raise ValueError("give step 0 or more, keep 1 or more")
        problems = self.finish()
        _remove_leftovers(self.folder)  # of a killed run, before any rank writes
        describe = partial(self._describe, step, run_state)
        manifest, tensors, held = _on_all_ranks(describe, self.group)
        keys_by_rank = _gather_decide_broadcast([*held], list, self.group)
        pieces = share(held, keys_by_rank, dist.get_rank(self.group))
        if self.thread is None:
            return problems + self._write(tensors, manifest, pieces)
        tensors = self.stager.stage(tensors)  # training changes the originals meanwhile
        self.pending = self.thread.submit(self._write, tensors, manifest, pieces)
        if wait:
            problems += self.finish()
        return problems

    def _describe(
        self, step: int, run_state: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Tensor], Held]:
        """Return the manifest, this rank's tensors, and these as `group_by_holders` does."""
        taken = RESERVED & run_state.keys()
        if taken:
            raise _Refused(f"run_state has the name {taken.pop()}, which a checkpoint has itself")
        manifest = _to_json(run_state, "run_state")
        manifest["step"] = step
        state = _TrainingState(self.model, self.optimizer)
        manifest["optimizers"] = state.describe_groups()
        tensors = state.tensors()
        # Each rank may have its own buffers, as of BatchNorm: those of the first rank are saved.
        if dist.get_rank(self.group) != 0:
            tensors = {name: t for name, t in tensors.items() if state.origins[name] != "buffer"}
        return manifest, tensors, group_by_holders(tensors, state.origins)

    def finish(self) -> list[str]:
        """Wait for the save in the background, if any, and return as `save` does. Collective."""
        if self.pending is None:
            return []
        pending = self.pending
        self.pending = None
        return pending.result()

    def _write(
        self, tensors: dict[str, Tensor], manifest: dict[str, Any], pieces: list[Piece]
    ) -> list[str]:
        """Write one checkpoint; return why it failed, the same sentence on all ranks.

        The index of one save is that of the next, unless a rank has written something else. So the
        ranks send what they have to tell for it once, and afterwards only the checksums of files.
        """
        step = manifest["step"]
        temporary = self.folder / f".step_{step:08d}.writing"
        problems = []
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
            self.failures = 0
            self.saved = step
        except OSError as error:
            self.failures += 1
            problems.append(f"step {step} was not saved: {error}")
        _remove_leftovers(self.folder)
        return problems

    def _write_part(
        self, temporary: Path, tensors: dict[str, Tensor], pieces: list[Piece]
    ) -> WrittenPart:
        """Write this rank's part of the tensors, with DCP as if there were no other rank."""
        with _as_failure():
            writer = dcp.FileSystemWriter(temporary)
            if self.thread:
                writer.per_thread_copy_ahead = 0  # nothing is left to copy from a GPU
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
        """Write index and manifest of all ranks' files, rename the folder, remove older ones."""
        files: dict[str, list[int]] = {}
        for part in parts:
            files.update(part.files)
        with _as_failure():
            for name, (size, _) in files.items():
                path = temporary / name
                if not path.is_file() or path.stat().st_size != size:
                    where = f"{path} is not there, though a rank has written it"
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
            if final.exists():
                _rename_for_removal(final)
            temporary.rename(final)
            with atomic_write(self.folder / "latest") as file:
                file.write(f"{final.name}\n".encode())
        with suppress(OSError):
            steps = [p for p in list_checkpoints(self.folder) if step_of(p) <= manifest["step"]]
            for old in steps[: -self.keep]:
                _rename_for_removal(old)


@contextmanager
def _as_failure() -> Iterator[None]:
    """Raise an error of the block as an OSError that says what it is, and on which rank."""
    try:
        yield
    except Exception as error:
        cause = _cause(error)
        where = f"{type(cause).__name__}: {cause} (rank {dist.get_rank()})"
        raise OSError(where) from error


# --- Load: every file is checked before the model is touched


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizers; return its manifest. Collective.

    The manifest is the saved `run_state`, plus the "step". `optimizer` is one, several, or None,
    which loads the model alone. States and settings (learning rate, ...) become those of the
    checkpoint, as with Optimizer.load_state_dict. The ranks share the work of checking every file
    first: CorruptCheckpointError or OSError, the same on all ranks, leaves the model unchanged.
    After a later error it may be partly loaded.
    """
    folder = Path(folder)

    def read_on_first_rank(_: list[None]) -> tuple[dict[str, Any], bytes]:
        return read_index(folder)  # a thousand ranks that open one file wait for each other

    def check_all() -> Metadata:
        check_files(folder, manifest, dist.get_rank(group), dist.get_world_size(group))
        index = unpickle_index(pickled)
        try:
            _check_model(tensors, index.state_dict_metadata)
            state.read_settings(manifest["optimizers"])
            tensors.update(state.empty_states(tensors, index.state_dict_metadata))
        except _Refused as error:
            raise CorruptCheckpointError(f"{folder}: {error}") from None
        return index

    state = _on_all_ranks(partial(_TrainingState, model, optimizer), group)
    model_state, tensors = state.model_state()
    manifest, pickled = _gather_decide_broadcast(None, read_on_first_rank, group)
    index = _on_all_ranks(check_all, group)
    _on_all_ranks(partial(read_tensors, folder, index, tensors), group)
    with _sharded_states(model):
        model.load_state_dict(model_state)
    state.load_states(tensors)
    return manifest


def find_newest(folder: str | Path) -> Path | None:
    """Return the newest checkpoint in a folder, the one that rank 0 finds, or None. Collective."""

    def find_on_first_rank(_: list[None]) -> Path | None:
        found = list_checkpoints(folder)
        return found[-1] if found else None

    # a shared file system may show ranks different lists
    return _gather_decide_broadcast(None, find_on_first_rank, None)


def list_checkpoints(folder: str | Path) -> list[Path]:
    """List the checkpoints in a folder by step, damaged ones too; OSError if it is unreadable."""
    try:
        with os.scandir(folder) as entries:
            named = [e for e in entries if re.fullmatch(r"step_[0-9]{8,}", e.name)]
            return sorted((Path(e.path) for e in named if e.is_dir()), key=step_of)
    except FileNotFoundError:
        return []


def step_of(folder: Path) -> int:
    """Return the step in a folder's name."""
    return int(folder.name.removeprefix("step_"))


# --- What ranks tell each other: rank 0 hears all, and all hear what it decided


def _gather_decide_broadcast(
    own: Any, decide: Callable[[list[Any]], T], group: dist.ProcessGroup | None
) -> T:
    """Gather what every rank has at the first rank of `group`; return its decision. Collective.

    What `decide` raises there is raised on all ranks.
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
    """Run `work` on every rank; raise, on all, the error of the first that has one. Collective."""
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
    """Return an error as it is sent to all ranks; the traceback of a bug is printed here."""
    if isinstance(error, CorruptCheckpointError | _Refused | OSError):
        return error
    traceback.print_exception(error)
    return RuntimeError(f"{type(error).__name__}: {error}")  # its own type may be unknown there


# --- The training state as named tensors, the same in every mode

# of an optimizer's implementation here, not of its arithmetic: they stay as they were built
NOT_SAVED = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}


def named_tensors(model: nn.Module, optimizer: Optimizers) -> dict[str, Tensor]:
    """Return every tensor of the training state as this rank holds it. Collective.

    The names are "model.NAME", "optim.state.NAME.LEAF" and, for what is a Python number,
    "optim.number.NAME.LEAF"; sharded tensors are DTensors. `optimizer` is one, several or None.
    ValueError where a state could not be loaded again.
    """
    return _TrainingState(model, optimizer).tensors()


def _sharded_states(model: nn.Module) -> AbstractContextManager[Any]:
    """Enter to let the state dicts of FSDP1 hold sharded tensors, of original names and shapes."""
    if not FSDP1.fsdp_modules(model):
        return nullcontext()
    kind = StateDictType.SHARDED_STATE_DICT
    options = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    return FSDP1.state_dict_type(model, kind, *options)


def _original_name(model: nn.Module, name: str, skip_compiler_prefix: bool = True) -> str:
    """Return the name that a parameter or buffer had before parts of the model were wrapped."""
    return next(iter(_get_fqns(model, name, skip_compiler_prefix=skip_compiler_prefix)))


def _stateful(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds the states: of ZeRO-1 the one of this rank's part."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(_stateful(optimizer)).__name__


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    parameters = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


def _split_entry(entry: str) -> tuple[str, str]:
    """Split "optim.state.PARAMETER.LEAF" into parameter and leaf; "optim.number." likewise."""
    name = entry.split(".", maxsplit=2)[2]
    parameter, leaf = name.rsplit(".", maxsplit=1)
    return parameter, leaf


class _TrainingState:
    """A model and its optimizers: what is saved of them, and how they are given it back."""

    def __init__(self, model: nn.Module, optimizer: Optimizers) -> None:
        """Take none, one or several optimizers; _Refused where a checkpoint has no place for one.

        A tied parameter has the first of its names.
        """
        self.model = model
        self.optimizers: list[torch.optim.Optimizer] = []
        if isinstance(optimizer, torch.optim.Optimizer):
            self.optimizers = [optimizer]
        elif optimizer is not None:
            self.optimizers = list(optimizer)
        self.fsdp1 = bool(FSDP1.fsdp_modules(model))
        self.names = {p: _original_name(model, name) for name, p in model.named_parameters()}
        self.owners: dict[nn.Parameter, torch.optim.Optimizer] = {}
        # of each of the `tensors`: "parameter", "buffer", "optimizer 0", ...
        self.origins: dict[str, str] = {}
        # of each parameter group of each optimizer: what `read_settings` has found
        self.settings: list[dict[str, Any]] = []
        for each in self.optimizers:
            self._check(each)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__name__
        for attribute, value in vars(_stateful(optimizer)).items():
            if isinstance(value, torch.optim.Optimizer):
                raise _Refused(f"{kind} keeps states in its {attribute}: give that optimizer")
        for p in _parameters_of(optimizer):
            if p not in self.names:
                raise _Refused(
                    f"{kind} holds a parameter {tuple(p.shape)} that the model does not have: "
                    "build the optimizer from model.parameters(), after sharding"
                )
            if self.owners.setdefault(p, optimizer) is not optimizer:
                raise _Refused(f"{self.names[p]} is in two optimizers: one of them must leave it")
        key: Any
        for key in _stateful(optimizer).state:
            if self.owners.get(key) is not optimizer:
                raise _Refused(f"{kind} has a state of {key!r:.40}, which it does not train")

    # what is saved

    def model_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's state dict as it is, and with the names of `named_tensors`."""
        with _sharded_states(self.model):
            state = self.model.state_dict()
        return state, {f"model.{_original_name(self.model, n)}": t for n, t in state.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return what `named_tensors` does, and note the `origins`. Collective."""
        _, tensors = self.model_state()  # first: FSDP2 shards again what was left gathered
        self.origins = dict.fromkeys(tensors, "parameter")
        for name, _ in self.model.named_buffers(remove_duplicate=False):
            self.origins[f"model.{_original_name(self.model, name)}"] = "buffer"
        for number, optimizer in enumerate(self.optimizers):
            for name, leaves in self._states_of(optimizer).items():
                for leaf, value in leaves.items():
                    entry = f"optim.state.{name}.{leaf}"
                    if isinstance(value, bool | int | float):
                        entry = f"optim.number.{name}.{leaf}"
                        dtype = torch.float64 if isinstance(value, float) else None
                        value = torch.tensor(value, dtype=dtype)
                    if value is not None:
                        tensors[entry] = value
                        self.origins[entry] = f"optimizer {number}"
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise _Refused(f"{name} is {kind}, but only tensors and numbers are saved")
            if name.startswith("optim.state."):
                parameter, _ = _split_entry(name)
                _check_shape(name, value.shape, tensors[f"model.{parameter}"])
        return tensors

    def _states_of(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Return the states {parameter: {leaf: value}} that this rank holds. Collective."""
        if self.fsdp1:
            return self._fsdp1_states_of(optimizer)
        stateful = _stateful(optimizer)
        states = stateful.state_dict()["state"]  # its hooks may change them, as with --tp
        names = [self.names[p] for p in _parameters_of(stateful)]
        return {names[number]: leaves for number, leaves in states.items()}

    def _fsdp1_states_of(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Return the states in the shapes that the parameters had before they were flattened.

        FSDP1 converts states of all parameters that are trained, and no others: those that this
        optimizer does not have get one of zeros, which is left out of what is returned.
        """
        leaves = set()
        for state in optimizer.state.values():
            leaves |= {leaf for leaf, t in state.items() if isinstance(t, Tensor) and t.ndim > 0}
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, leaves)  # a rank may hold no piece of its parameters
        every = torch.optim.SGD(self.model.parameters())
        every.state.update(optimizer.state)
        for p in self.names:
            if p.requires_grad and p.numel() > 0 and self.owners.get(p) is not optimizer:
                every.state[p] = {leaf: torch.zeros_like(p) for leaf in set().union(*found)}
        with _sharded_states(self.model):
            converted = FSDP1.optim_state_dict(self.model, every)["state"]
        own = {self.names[p] for p in _parameters_of(optimizer)}
        named = {_original_name(self.model, name): state for name, state in converted.items()}
        return {name: state for name, state in named.items() if name in own}

    def describe_groups(self) -> list[dict[str, Any]]:
        """Describe each parameter group: its optimizer, parameters, settings (learning rate, ...).

        _Refused for a setting that JSON cannot hold.
        """
        described = []
        for optimizer in self.optimizers:
            kind = _kind(optimizer)
            for group in optimizer.param_groups:
                settings = {}
                for key in group.keys() - NOT_SAVED:
                    value = group[key]
                    if isinstance(value, Tensor) and value.numel() == 1:
                        value = value.item()  # a learning rate that a compiled step reads
                    settings[key] = _to_json(value, f"{key} of a parameter group of {kind}")
                names = [self.names[p] for p in group["params"]]
                described.append({"optimizer": kind, "params": names, "settings": settings})
        return described

    # what is loaded

    def read_settings(self, saved: Sequence[dict[str, Any]]) -> None:
        """Find the settings of each parameter group in what `describe_groups` had said.

        Groups may be cut otherwise now, as by --tp, but _Refused where parameters of one had
        different settings, or not each is trained by the same kind of optimizer as before.
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

    def empty_states(
        self, tensors: Mapping[str, Tensor], entries: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Allocate this rank's states that a checkpoint has, each cut as its parameter."""
        own = set()
        for optimizer in self.optimizers:
            # with ZeRO-1 the others are of other ranks
            own |= {self.names[p] for p in _parameters_of(_stateful(optimizer))}
        found = {}
        for entry, saved in entries.items():
            if not entry.startswith("optim."):
                continue
            name, _ = _split_entry(entry)
            if name not in own:
                continue
            parameter = tensors[f"model.{name}"]
            _check_shape(entry, saved.size, parameter)
            if saved.size == parameter.shape:
                found[entry] = torch.empty_like(parameter, dtype=saved.properties.dtype)
            else:
                found[entry] = torch.empty(saved.size, dtype=saved.properties.dtype)
        return found

    def load_states(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the optimizers the states that were read, and their settings. Collective."""
        named: dict[str, dict[str, Any]] = {}
        for entry, tensor in tensors.items():
            if entry.startswith("optim."):
                name, leaf = _split_entry(entry)
                number = entry.startswith("optim.number.")
                named.setdefault(name, {})[leaf] = tensor.item() if number else tensor
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
            for group, shown in zip(groups, optimizer.param_groups, strict=True):
                settings = {key: _like(shown.get(key), v) for key, v in next(remaining).items()}
                group.update(settings)
                shown.update(settings)  # ZeRO-1 shows all parameters, steps those of this rank
            stateful.load_state_dict({"state": state, "param_groups": groups})

    def _shard_for_fsdp1(
        self, named: Mapping[str, dict[str, Any]]
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the states, by parameter, as FSDP1 holds them. Collective."""
        every = torch.optim.SGD(self.model.parameters())
        given = {}
        for name, p in self.model.named_parameters():
            if self.names[p] in named:
                # FSDP1 leaves torch.compile's prefix in its names
                its_name = _original_name(self.model, name, skip_compiler_prefix=False)
                given[its_name] = named[self.names[p]]
        with _sharded_states(self.model):
            found = FSDP1.optim_state_dict_to_load(self.model, every, {"state": given})["state"]
        order = _parameters_of(every)
        return {order[number]: leaves for number, leaves in found.items()}


def _group_of_each(groups: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the description of the parameter group that each parameter is in."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        found |= dict.fromkeys(group["params"], group)
    return found


def _check_shape(entry: str, size: torch.Size, parameter: Tensor) -> None:
    """Raise _Refused for a state that cannot be cut as its parameter is."""
    if isinstance(parameter, DTensor) and len(size) > 0 and size != parameter.shape:
        raise _Refused(
            f"{entry} is {tuple(size)}, its parameter {tuple(parameter.shape)}: a sharded "
            "parameter can have states of its own shape and scalars only: use mode ddp"
        )


def _check_model(tensors: Mapping[str, Tensor], entries: Mapping[str, Any]) -> None:
    """Raise _Refused if the model of a checkpoint has other names or shapes than `tensors`."""
    saved = {name for name in entries if name.startswith("model.")}
    for name in sorted(tensors.keys() | saved):
        then = tuple(entries[name].size) if name in entries else "missing"
        now = tuple(tensors[name].shape) if name in tensors else "missing"
        if then != now:
            raise _Refused(f"{name} is {then} in the checkpoint, {now} in the model")


def _like(own: Any, value: Any) -> Any:
    """Return a saved setting as the type that an optimizer has."""
    if isinstance(own, Tensor):
        return torch.full_like(own, value)
    if isinstance(own, tuple):
        return tuple(value)
    return value


# --- The manifest, as JSON

KEYED = "not an object of JSON"


def _to_json(value: Any, where: str) -> Any:
    """Return what JSON can hold and `_from_json` turns back; _Refused for what it would change.

    Keys that are numbers are kept, by pairs: a scheduler's milestones. A tuple becomes a list.
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
    """Return the dictionary that `_to_json` was given, for an object that was read."""
    if KEYED not in found:
        return found
    pairs = dict(found["pairs"])
    return Counter(pairs) if found[KEYED] == "Counter" else pairs


def _manifest_checksum(manifest: dict[str, Any]) -> int:
    """Return the CRC-32 of a manifest without its own checksum."""
    return zlib.crc32(json.dumps(manifest | {"checksum": 0}, sort_keys=True).encode())


# --- Which rank writes what


class WrittenPart(NamedTuple):
    """What one rank has written."""

    items: list[WriteItem] = []
    results: list[WriteResult] = []  # in which file each item is, and where
    files: dict[str, list[int]] = {}  # size and CRC-32 of each file


Held = dict[str, list[WriteItem]]  # by a checksum, which is the same on all that hold the same


def group_by_holders(tensors: dict[str, Tensor], origins: Mapping[str, str]) -> Held:
    """Group what this rank holds so that each other rank holds all of a group, or nothing of it.

    The replicas of a mesh hold the same shards, and all ranks what is not sharded, but for the
    states of ZeRO-1.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors)
    alike = defaultdict(list)
    for item in planner.create_local_plan().items:
        tensor = tensors[item.index.fqn]
        layout: list[Any] = [origins[item.index.fqn], item.type]
        if isinstance(tensor, DTensor):
            layout += [tensor.device_mesh.mesh_dim_names, tensor.placements]
        alike[str(layout)].append(item)
    held = {}
    for layout_name, items in alike.items():
        places = [(item.index.fqn, item.tensor_data) for item in items]
        key = hashlib.blake2b(f"{layout_name} {places}".encode(), digest_size=16)
        held[key.hexdigest()] = items
    return held


def share(held: Held, keys_by_rank: Sequence[Sequence[str]], rank: int) -> list[Piece]:
    """Return the pieces that a rank writes: of each group an equal part for each of its holders."""
    pieces: list[Piece] = []
    for key, items in held.items():
        holders = [other for other, keys in enumerate(keys_by_rank) if key in keys]
        pieces += equal_part(items, holders.index(rank), len(holders))
    return pieces


class Piece(NamedTuple):
    """What one rank writes of an item that it holds."""

    item: WriteItem
    whole: WriteItem  # what it was cut from
    rows: slice | None  # of that; None: all of it


def equal_part(items: Sequence[WriteItem], part: int, parts: int) -> Iterator[Piece]:
    """Yield what lies in one of `parts` equal parts of the bytes of `items`, laid end to end.

    A row belongs to the part in which it begins. Scalars and vectors are not cut. A chunk without
    elements is left out, an empty tensor not.
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
                yield Piece(item, item, None)
            continue
        first = _rows_before(begin - start, size, rows)
        last = _rows_before(end - start, size, rows)
        if last - first == rows:
            yield Piece(item, item, None)
        elif last > first:
            yield Piece(_rows_of(item, first, last), item, slice(first, last))
        start += size


def _rows_before(place: int, size: int, rows: int) -> int:
    """Count the rows that begin before a place in a tensor of so many bytes and rows."""
    count = (place * rows + size - 1) // size  # rounded up
    return min(max(count, 0), rows)


def item_bytes(item: WriteItem) -> int:
    """Return how many bytes an item holds, which DCP's own count takes for the whole tensor's."""
    data: Any = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _rows_of(item: WriteItem, first: int, last: int) -> WriteItem:
    """Return the item of some rows of an item."""
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
    """Let DCP write pieces of what this rank holds."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        """Take the pieces that are written."""
        super().__init__(flatten_state_dict=False)
        self.pieces = {piece.item.index: piece for piece in pieces}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data of a piece."""
        piece = self.pieces[write_item.index]
        data: Any = super().resolve_data(piece.whole)
        if piece.rows is None:
            return data
        return data[piece.rows]


def merge_index(parts: Sequence[WrittenPart]) -> Metadata:
    """Make the index of what all ranks have written; ValueError where a tensor is not whole."""
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
            raise ValueError(f"{name} would not be whole: the ranks do not hold the same tensors")
    return Metadata(entries, storage_data=storage_data)


# --- Files: what is written, and checked before it is read


@contextmanager
def atomic_write(path: Path) -> Iterator[io.BufferedWriter]:
    """Open a new file that replaces `path`, durably, once its block has ended without error."""
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
    """Return what made torch.save fail, which then fails once more as it closes its file."""
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
        pass  # no JSON, or no object
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
    """Check every `parts`-th shard file of a checkpoint; CorruptCheckpointError or OSError."""
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
    """Read tensors in place with DCP: what this rank holds of them, without the other ranks.

    The `index` was checked: DCP itself would unpickle anything.
    """
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    reader = dcp.FileSystemReader(folder)
    planner.set_up_planner(tensors, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


# --- Without ranks


class Weights(UserDict[str, Any]):
    """The model of a checkpoint, without ranks: a tensor is read when it is asked for, by name."""

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
        """Read several tensors at once: each file is opened once."""
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
    with atomic_write(out) as file:  # opened before minutes of reading
        weights = Weights(Path(folder))
        model = weights.read(weights)
        manifest = weights.manifest
        run_state = {key: value for key, value in manifest.items() if key not in RESERVED}
        torch.save({"model": model, "step": manifest["step"], "run_state": run_state}, file)
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
    except (CorruptCheckpointError, OSError) as error:
        print(f"checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
