"""Sharded checkpoints: saved by any mode, engine and world size, loaded by any.

Built on `torch.distributed.checkpoint` (DCP): each shard is written once, by one of the ranks that
hold it, and each rank reads what it needs, under the names of the unwrapped model.

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
import os
import pickle
import re
import shutil
import sys
import warnings
import zlib
from collections import Counter, UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

MANIFEST, INDEX = "checkpoint.json", ".metadata"
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
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            size, crc = size + len(block), zlib.crc32(block, crc)
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
        raise error.__context__ or error from None  # torch.save fails again as it closes
    finally:
        with suppress(OSError):
            new.unlink()


def _rename_for_removal(checkpoint: Path) -> None:
    """Rename a checkpoint: a kill while it is removed must not leave half of it under its name."""
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.removed"))


def _remove_leftovers(folder: Path) -> None:
    """Remove, on rank 0, partial and renamed checkpoints: no reason for a save to fail."""
    with suppress(OSError):
        for path in folder.glob(".step_*.*") if dist.get_rank() == 0 else ():
            shutil.rmtree(path, ignore_errors=True)


# --- Saving


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, to a temporary folder that rank 0 completes and renames.

    DCP calls `finish` on rank 0 when all have written, and raises an error of any rank on all.
    """

    def __init__(self, folder: Path, step: int, run_state: dict[str, Any], keep: int) -> None:
        self.out, self.final, self.keep = folder, folder / f"step_{step:08d}", keep
        self.manifest = run_state | {"step": step}
        self.problem: _Refused | None = None  # of this rank's training state
        super().__init__(folder / f".{self.final.name}.writing")

    def set_up_storage_writer(self, *args: Any, **options: Any) -> None:
        """Raise, on all ranks and before any of them writes, what one has found."""
        if self.problem:
            raise self.problem
        super().set_up_storage_writer(*args, **options)

    def storage_meta(self) -> None:
        """Leave the temporary path out of the index."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's shards; the checksums of its files follow DCP's own results."""
        folder = Path(self.path)
        folder.mkdir(parents=True, exist_ok=True)  # again: rank 0 has removed leftovers
        try:
            written: Any = super().write_data(plan, planner).value()
        except RuntimeError as error:
            raise error.__context__ or error from None  # torch.save fails again as it closes
        names = {result.storage_data.relative_path for result in written}
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([*written, {name: _size_and_crc(folder / name) for name in names}])
        return future

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write index and manifest, rename the folder, remove older checkpoints."""
        temporary, files = Path(self.path), dict[str, list[int]]()
        for result in results:  # of each rank
            files |= result.pop()
        for name, (size, _) in files.items():
            path = temporary / name
            if not path.is_file() or path.stat().st_size != size:
                where = f"{path} is not there, though a rank has written it"
                raise OSError(f"{where}: save to a folder that all nodes share")
        super().finish(metadata, results)
        files[INDEX] = _size_and_crc(temporary / INDEX)
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
        self.thread = ThreadPoolExecutor(1) if background else None
        # on a GPU one copy, in pinned memory, serves all saves: slow to allocate, fast to fill
        self.stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self.pending: Future[list[str]] | None = None
        self.step = self.saved = 0  # of the newest attempt; of the newest that is on disk

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
        pending, self.pending = self.pending, None
        return pending.result()

    def _write(self, tensors: dict[str, Tensor], writer: _Writer) -> list[str]:
        """Write one checkpoint; return why it failed, the same sentence on all ranks."""
        try:
            _remove_leftovers(self.folder)  # of a killed run, before rank 0 lets any rank write
            dcp.save(tensors, storage_writer=writer, process_group=self.group)
        except CheckpointException as failed:  # with the errors of all ranks
            rank, (error, _) = next(iter(failed.failures.items()))
            if isinstance(error, _Refused):
                raise ValueError(str(error)) from None
            self.failures += 1
            why = f"{type(error).__name__}: {error} (rank {rank})"
            return [f"step {self.step} was not saved: {why}"]
        finally:
            _remove_leftovers(self.folder)
        self.failures, self.saved = 0, self.step
        return []


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


class _Unpickler(pickle.Unpickler):
    """Unpickle DCP's index, which may name what it consists of, and no code."""

    allowed = re.compile(  # not BytesStorageMetadata, which DCP would unpickle too
        r"collections\.OrderedDict|torch\.(Size|bool|(b?float|u?int|complex)\d\w*)|"
        r"torch\.(serialization\._get_layout|distributed\.checkpoint\.(filesystem\._StorageInfo|"
        r"metadata\.((TensorStorage|ChunkStorage)?Metadata|MetadataIndex|StorageMeta|"
        r"TensorProperties|_MEM_FORMAT_ENCODING)))"
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return what is named, if it may be."""
        if self.allowed.fullmatch(f"{module}.{name}"):
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


def check(folder: Path, part: int = 0, parts: int = 1) -> tuple[dict[str, Any], Metadata]:
    """Check the index and every `parts`-th shard file -> manifest and index; Damaged or OSError."""
    manifest = read_manifest(folder)
    files, index = manifest["files"], (folder / INDEX).read_bytes()
    found = {INDEX: [len(index), zlib.crc32(index)]}
    for name in sorted(files.keys() - {INDEX})[part::parts]:
        found[name] = _size_and_crc(folder / name)
    for name, size_and_crc in found.items():
        if size_and_crc != files[name]:
            raise Damaged(f"{folder}: checksum mismatch in {name}")
    return manifest, _Unpickler(io.BytesIO(index)).load()


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
    found = [list_checkpoints(folder)[-1:] if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(found, src=0)  # a shared file system may show ranks different lists
    return found[0][0] if found[0] else None


class Reader(dcp.FileSystemReader):
    """DCP's reader, with an index that was checked: DCP itself would unpickle anything."""

    index = Metadata({})
    problem: Exception | None = None  # of this rank

    def read_metadata(self) -> Metadata:
        """Return the index."""
        return self.index

    def set_up_storage_reader(self, *args: Any, **options: Any) -> None:
        """Raise, on all ranks and before any of them reads, what one has found."""
        if self.problem:
            raise self.problem
        super().set_up_storage_reader(*args, **options)

    def read(self, tensors: dict[str, Tensor], **options: Any) -> None:
        """Read tensors in place; raise the error of the first rank that has one."""
        try:
            dcp.load(tensors, storage_reader=self, **options)
        except CheckpointException as failed:  # with the errors of all ranks
            raise next(iter(failed.failures.values()))[0] from None


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
    optimizers, names = _list_optimizers(optimizer), _name_parameters(model)
    _check_optimizers(optimizers, names)
    with _sharded_states(model):
        state = model.state_dict()
    originals = _original_names(model, state)
    tensors: dict[str, Any] = {f"model.{originals[name]}": t for name, t in state.items()}
    reader, settings = Reader(folder), list[list[dict[str, Any]]]()
    try:
        manifest, reader.index = check(folder, dist.get_rank(), dist.get_world_size())
        entries: dict[str, Any] = reader.index.state_dict_metadata
        _check_model(folder, tensors, entries)
        for each in optimizers:
            settings.append(_settings_to_load(folder, each, names, manifest["optimizers"]))
        _check_all_loaded(folder, optimizers, names, manifest["optimizers"])
        tensors |= _tensors_for_states(folder, tensors, entries, optimizers, names)
    except (Damaged, OSError) as error:
        reader.problem = error
    reader.read(tensors, process_group=group)
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
        name = entry.split(".", 2)[2].rpartition(".")[0]
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
        self.reader.read({f"model.{n}": tensor for n, tensor in found.items()}, no_dist=True)
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
            tensors = check(Path(args.dir))[1].state_dict_metadata
            print(f"{args.dir} is complete: {len(tensors)} tensors")
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
