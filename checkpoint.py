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

from __future__ import annotations

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
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
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
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
MANIFEST = "checkpoint.json"
INDEX = ".metadata"
RESERVED = {"step", "files", "checksum", "optimizers"}  # names in a manifest
# PyTorch warns of FSDP1 without shards, of reading without ranks and (2.10) of its own code
warnings.filterwarnings("ignore", "When using ``NO_SHARD|torch.distributed is dis|TypedStorage is")


class Damaged(ValueError):
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
        self.saved = 0  # the step of the newest that is on disk
        # what this rank has told of the newest save for its index; the index itself on rank 0
        self.told: tuple[dict[str, TensorStorageMetadata], list[WriteResult]] | None = None
        self.index = b""
        self.thread = ThreadPoolExecutor(1) if background else None
        # on a GPU one copy, in pinned memory, serves all saves: slow to allocate, fast to fill
        self.stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self.pending: Future[list[str]] | None = None

    @property
    def hopeless(self) -> bool:
        """Whether so many saves have failed in a row that the caller should end the run."""
        return self.failures >= self.MOST_FAILURES

    def save(self, step: int, run_state: dict[str, Any], wait: bool = True) -> list[str]:
        """Save, and store `run_state` (as JSON) in the manifest; `wait` for its end. Collective.

        Returns a sentence per failed save, the same on all ranks: this one and, in the background,
        the one before. A failed save leaves the older checkpoints as they were. Raises ValueError,
        on all ranks, for what could not be loaded again.
        """
        if step < 0 or self.keep < 1:  # it would not be found again, or removed at once
            raise ValueError("give step 0 or more, keep 1 or more")
        problems = self.finish()
        if problems and self.hopeless and not wait:
            return problems

        def describe() -> tuple[dict[str, Any], dict[str, Tensor], _Planner]:
            _remove_leftovers(self.folder)  # of a killed run, before any rank writes
            manifest = _to_manifest(run_state, step)
            state = _TrainingState(self.model, self.optimizer)
            manifest["optimizers"] = state.describe_groups()
            tensors = state.tensors()
            own = state.held_by_one_rank(tensors)
            # Of buffers each rank may have its own values, as of BatchNorm: the first rank's go.
            for name in state.buffers() & tensors.keys():
                own.add(name)
                if dist.get_rank(self.group) != 0:
                    del tensors[name]
            return manifest, tensors, _Planner(own, self.group)

        manifest, tensors, planner = _on_all_ranks(describe, self.group)
        if self.thread is None:
            return problems + self._write(tensors, manifest, planner)
        tensors = self.stager.stage(tensors)  # training changes the originals meanwhile
        self.pending = self.thread.submit(self._write, tensors, manifest, planner)
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

    def _write(
        self, tensors: dict[str, Tensor], manifest: dict[str, Any], planner: _Planner
    ) -> list[str]:
        """Write one checkpoint; return why it failed, the same sentence on all ranks.

        The index of one save is that of the next, unless a rank has written something else. So the
        ranks send what they have to tell for it once, and afterwards only the checksums of files.
        """
        step = manifest["step"]
        temporary = self.folder / f".step_{step:08d}.writing"
        problems = []
        try:
            written = _on_all_ranks(
                partial(self._write_part, temporary, tensors, planner), self.group
            )
            told = written.entries, written.results
            new = _decide(self.told != told, any, self.group)
            if not new:
                written = written._replace(entries={}, results=[])
            self.told = None  # until it has succeeded
            _decide(written, partial(self._complete, temporary, manifest, new), self.group)
            self.told = told
            self.failures = 0
            self.saved = step
        except OSError as error:
            self.failures += 1
            problems.append(f"step {step} was not saved: {error}")
        _remove_leftovers(self.folder)
        return problems

    def _write_part(
        self, temporary: Path, tensors: dict[str, Tensor], planner: _Planner
    ) -> Written:
        """Write this rank's part of the tensors, with DCP as if there were no other rank."""
        with _as_failure():
            writer = dcp.FileSystemWriter(temporary)
            if self.thread:
                writer.per_thread_copy_ahead = 0  # nothing is left to copy from a GPU
            planner.set_up_planner(tensors, is_coordinator=True)
            writer.set_up_storage_writer(is_coordinator=True)
            plan = writer.prepare_local_plan(planner.create_local_plan())
            plans, index = create_default_global_save_plan([plan])
            plan = writer.prepare_global_plan(plans)[0]
            plan.storage_data.prefix = f"__{dist.get_rank()}_"  # of the file's name
            results = writer.write_data(planner.finish_plan(plan), planner).wait()
            names = {result.storage_data.relative_path for result in results}
            files = {name: _size_and_crc(temporary / name) for name in names}
        entries: Any = index.state_dict_metadata
        return Written(entries, results, files, planner.fingerprint())

    def _complete(
        self, temporary: Path, manifest: dict[str, Any], new: bool, parts: list[Written]
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
            with replacing(temporary / INDEX) as file:
                file.write(self.index)
            files[INDEX] = [len(self.index), zlib.crc32(self.index)]
            manifest["files"] = files
            manifest["checksum"] = _manifest_checksum(manifest)
            with replacing(temporary / MANIFEST) as file:
                file.write(json.dumps(manifest, indent=1).encode())
            final = self.folder / f"step_{manifest['step']:08d}"
            if final.exists():
                _rename_for_removal(final)
            temporary.rename(final)
            with replacing(self.folder / "latest") as file:
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

    That is the saved `run_state`, and the "step". `optimizer` is one, several, or None, which loads
    the model alone. States and settings (learning rate, ...) become those of the checkpoint, as by
    Optimizer.load_state_dict. Every file is checked first, by one of the ranks: Damaged or OSError,
    the same on all, leaves the model as it was. A later error does not.
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
            raise Damaged(f"{folder}: {error}") from None
        return index

    state = _on_all_ranks(partial(_TrainingState, model, optimizer), group)
    model_state, tensors = state.model_state()
    manifest, pickled = _decide(None, read_on_first_rank, group)
    index = _on_all_ranks(check_all, group)
    _on_all_ranks(partial(read_tensors, folder, index, tensors), group)
    with _sharded_states(model):
        model.load_state_dict(model_state)
    state.load_states(tensors)
    return manifest


def find_newest(folder: str | Path) -> Path | None:
    """Return the newest checkpoint in a folder, the one that rank 0 finds, or None. Collective."""
    found: list[Path | None] = [None]
    if dist.get_rank() == 0:
        found.extend(list_checkpoints(folder))
    newest = found[-1:]
    dist.broadcast_object_list(newest, src=0)  # a shared file system may show ranks different lists
    return newest[0]


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


def _decide(own: Any, decide: Callable[[list[Any]], T], group: dist.ProcessGroup | None) -> T:
    """Gather what every rank has at the first rank of `group`; return its decision. Collective.

    What `decide` raises there is raised on all ranks.
    """
    first = 0 if group is None else dist.get_global_rank(group, 0)
    outcome: list[Any] = [None, None]  # the decision, an error
    if dist.get_rank() == first:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.gather_object(own, gathered, dst=first, group=group)
        try:
            outcome[0] = decide(gathered)
        except Exception as raised:
            outcome[1] = _to_send(raised)
    else:
        dist.gather_object(own, dst=first, group=group)
    dist.broadcast_object_list(outcome, src=first, group=group)
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
    error = _decide(error, _first_error, group)
    if error:
        raise error
    return result


def _first_error(errors: list[Exception | None]) -> Exception | None:
    for error in errors:
        if error:
            return error
    return None


def _to_send(error: Exception) -> Exception:
    """Return an error as it is sent to all ranks; the traceback of a bug is printed here."""
    if isinstance(error, Damaged | _Refused | OSError):
        return error
    traceback.print_exception(error)
    return RuntimeError(f"{type(error).__name__}: {error}")  # its own type may be unknown there


# --- The training state as named tensors, the same in every mode

# what activation checkpointing, FSDP1 and torch.compile put into the names of parameters
WRAPPER_NAMES = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}
# of an optimizer's implementation here, not of its arithmetic: they stay as they were built
NOT_SAVED = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}


def named_tensors(model: nn.Module, optimizer: Optimizers) -> dict[str, Tensor]:
    """Return every tensor of the training state as this rank holds it. Collective.

    The names are "model.NAME", "optim.state.NAME.LEAF" and, for what is a Python number,
    "optim.number.NAME.LEAF"; sharded tensors are DTensors. `optimizer` is one, several or None.
    ValueError where a state could not be loaded again.
    """
    return _TrainingState(model, optimizer).tensors()


@contextmanager
def _sharded_states(model: nn.Module) -> Iterator[None]:
    """Let the state dicts of FSDP1 hold sharded tensors, of their original names and shapes."""
    if not FSDP1.fsdp_modules(model):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP.state_dict_type", FutureWarning)
        with FSDP1.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ):
            yield


def _original_names(
    model: nn.Module, names: Iterable[str], wrapper_names: Collection[str] = WRAPPER_NAMES
) -> dict[str, str]:
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
            if part not in wrapper_names and ".".join(parts[:depth]) not in inside_ddp:
                kept.append(part)
        originals[name] = ".".join(kept)
    return originals


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
        parameters = dict(model.named_parameters())
        originals = _original_names(model, parameters)
        self.names = {p: originals[name] for name, p in parameters.items()}
        self.owners: dict[nn.Parameter, torch.optim.Optimizer] = {}
        # of each optimizer, of each of its parameter groups: what `read_settings` has found
        self.settings: list[list[dict[str, Any]]] = []
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
        originals = _original_names(self.model, state)
        return state, {f"model.{originals[name]}": value for name, value in state.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return what `named_tensors` does. Collective."""
        _, tensors = self.model_state()  # first: FSDP2 shards again what was left gathered
        for optimizer in self.optimizers:
            for name, leaves in self._states_of(optimizer).items():
                for leaf, value in leaves.items():
                    if isinstance(value, bool | int | float):
                        dtype = torch.float64 if isinstance(value, float) else None
                        tensors[f"optim.number.{name}.{leaf}"] = torch.tensor(value, dtype=dtype)
                    elif value is not None:
                        tensors[f"optim.state.{name}.{leaf}"] = value
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise _Refused(f"{name} is {kind}, but only tensors and numbers are saved")
            if name.startswith("optim.state."):
                _check_shape(name, value.shape, tensors[f"model.{_split_entry(name)[0]}"])
        return tensors

    def _states_of(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Return the states {parameter: {leaf: value}} that this rank holds. Collective."""
        if not self.fsdp1:
            stateful = _stateful(optimizer)
            states = stateful.state_dict()["state"]  # its hooks may change them, as with --tp
            names = [self.names[p] for p in _parameters_of(stateful)]
            return {names[number]: leaves for number, leaves in states.items()}
        # FSDP1 converts states of all parameters that are trained, and no others: those that this
        # optimizer does not have get one of zeros, which is left out of what is returned.
        every = torch.optim.SGD(self.model.parameters())
        every.state.update(optimizer.state)
        others = []
        for p in self.names:
            if p.requires_grad and self.owners.get(p) is not optimizer:
                others.append(p)
        if others:
            leaves = set()
            for state in optimizer.state.values():
                leaves |= {leaf for leaf, t in state.items() if isinstance(t, Tensor) and t.ndim}
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, leaves)  # a rank may hold no piece of its parameters
            for p in others:
                if p.numel() > 0:
                    every.state[p] = {leaf: torch.zeros_like(p) for leaf in set().union(*found)}
        with _sharded_states(self.model):
            converted = FSDP1.optim_state_dict(self.model, every)["state"]
        originals = _original_names(self.model, converted)
        own = {self.names[p] for p in _parameters_of(optimizer)}
        return {originals[n]: state for n, state in converted.items() if originals[n] in own}

    def held_by_one_rank(self, tensors: Iterable[str]) -> set[str]:
        """Return which of the named tensors no other rank holds: the states of ZeRO-1."""
        divided = set()
        for p, optimizer in self.owners.items():
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                divided.add(self.names[p])
        states = {name for name in tensors if name.startswith("optim.")}
        return {name for name in states if _split_entry(name)[0] in divided}

    def buffers(self) -> set[str]:
        """Return the names of the buffers, as among the named tensors."""
        names = [name for name, _ in self.model.named_buffers()]
        return {f"model.{name}" for name in _original_names(self.model, names).values()}

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

        Groups may be cut otherwise now, but _Refused where parameters of one had different
        settings, or not each is trained by the same kind of optimizer as before.
        """
        settings_of = {}
        then = {}
        for group in saved:
            for name in group["params"]:
                settings_of[name] = group["settings"]
                then[name] = group["optimizer"]
        now = {self.names[p]: _kind(optimizer) for p, optimizer in self.owners.items()}
        for name in sorted(then.keys() | now.keys()):
            if self.optimizers and then.get(name) != now.get(name):
                where = f"{name} was trained by {then.get(name, 'no optimizer')}"
                where += f", now by {now.get(name, 'no optimizer')}"
                raise _Refused(f"{where}: give None to load the model alone")
        for optimizer in self.optimizers:
            groups = []
            for group in optimizer.param_groups:
                names = [self.names[p] for p in group["params"]]
                settings: dict[str, Any] = {}
                if names:
                    settings = settings_of[names[0]]
                for name in names:
                    if settings_of[name] != settings:
                        where = f"{name} and {names[0]} had different settings"
                        raise _Refused(f"{where}, but are in one parameter group now")
                groups.append({key: _like(group.get(key), v) for key, v in settings.items()})
            self.settings.append(groups)

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
            if not entry.startswith("optim.") or _split_entry(entry)[0] not in own:
                continue
            parameter = tensors[f"model.{_split_entry(entry)[0]}"]
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
            states = self._cut_for_fsdp1(named)
        else:
            states = {p: named[name] for p, name in self.names.items() if name in named}
        for optimizer, settings in zip(self.optimizers, self.settings, strict=True):
            stateful = _stateful(optimizer)
            numbers = {p: number for number, p in enumerate(_parameters_of(stateful))}
            groups = []
            for group, loaded in zip(stateful.param_groups, settings, strict=True):
                groups.append({**group, **loaded, "params": [numbers[p] for p in group["params"]]})
            state = {number: states[p] for p, number in numbers.items() if p in states}
            stateful.load_state_dict({"state": state, "param_groups": groups})
            if stateful is not optimizer:  # ZeRO-1 shows all parameters, steps those of this rank
                for group, loaded in zip(optimizer.param_groups, settings, strict=True):
                    group.update(loaded)

    def _cut_for_fsdp1(
        self, named: Mapping[str, dict[str, Any]]
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the states, by parameter, as FSDP1 holds them. Collective."""
        every = torch.optim.SGD(self.model.parameters())
        parameters = dict(self.model.named_parameters())
        # FSDP1 leaves torch.compile's prefix in its names
        of_fsdp1 = _original_names(self.model, parameters, WRAPPER_NAMES - {"_orig_mod"})
        its_names = {self.names[p]: of_fsdp1[name] for name, p in parameters.items()}
        given = {
            "state": {its_names[name]: leaves for name, leaves in named.items()},
            "param_groups": [{"params": list(its_names.values())}],
        }
        with _sharded_states(self.model):
            found = FSDP1.optim_state_dict_to_load(self.model, every, given)["state"]
        order = _parameters_of(every)
        return {order[number]: leaves for number, leaves in found.items()}


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


def _to_manifest(run_state: dict[str, Any], step: int) -> dict[str, Any]:
    """Begin the manifest of a step; _Refused for names that it has itself."""
    taken = RESERVED & run_state.keys()
    if taken:
        raise _Refused(f"run_state has the name {taken.pop()}, which a checkpoint has itself")
    return {**_to_json(run_state, "run_state"), "step": step}


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


def _manifest_checksum(manifest: dict[str, Any]) -> int:
    """Return the CRC-32 of a manifest without its own checksum."""
    return zlib.crc32(json.dumps(manifest | {"checksum": 0}, sort_keys=True).encode())


# --- Which rank writes what


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

    def __init__(self, own: set[str], group: dist.ProcessGroup | None) -> None:
        """Plan for the ranks of `group`; `own` names the tensors that this rank alone writes."""
        super().__init__(flatten_state_dict=False)
        self.own = own
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.whole: dict[MetadataIndex, WriteItem] = {}  # of each piece: what it was cut from

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        plan = super().create_local_plan()
        held: dict[_Holders, list[WriteItem]] = defaultdict(list)
        for item in plan.items:
            held[self._holders(item)].append(item)
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
        if item.index.fqn in self.own:
            return _Holders("this rank", 0, 1)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            copies = []  # (mesh, dimension) over which each rank has the same
            for d, placement in enumerate(tensor.placements):
                if placement.is_replicate():
                    copies.append((mesh, d))
            root = mesh._get_root_mesh()  # --tp: what is not split is on a mesh without "tp"
            members = set(mesh.mesh.flatten().tolist())
            for d in range(root.ndim):
                line = dist.get_process_group_ranks(root.get_group(d))
                if len(members.intersection(line)) == 1:  # this rank's
                    copies.append((root, d))
            number = 0
            count = 1
            for grid, d in copies:
                number = number * grid.size(d) + grid.get_local_rank(d)
                count *= grid.size(d)
            return _Holders((mesh, *copies), number, count)
        if item.type != WriteItemType.TENSOR:  # a shard of FSDP1
            return _Holders("this rank", 0, 1)
        return _Holders("all ranks", self.rank, self.world_size)

    def fingerprint(self) -> int:
        """Return a number that is the same on all ranks if these hold the same tensors."""
        names = sorted(self.state_dict.keys() - self.own)
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
    """Make the index of what all ranks have written.

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
    storage_data = {}
    for part in parts:
        for result in part.results:
            storage_data[result.index] = result.storage_data
    return Metadata(dict(entries), storage_data=storage_data)


# --- Files: what is written, and checked before it is read


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
        """Check every file; Damaged or OSError."""
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
