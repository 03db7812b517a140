"""Sharded checkpoints: saved in any mode, by any number of ranks, loaded in any other.

PyTorch's distributed checkpointing (DCP) writes and reads the tensors. Added here is what a long
run needs: of what several ranks hold each writes a share, a name appears once all is on the disk,
every byte is checked before the model is touched, and no code is run from a file.

    step_00000100/checkpoint.json    step, run_state, settings of the optimizers, size and CRC-32 of
                                     all other files, its own checksum
                  .metadata          DCP's index: which tensor is where
                  __R_0.distcp       what rank R wrote

    python checkpoint.py verify DIR             check every checksum
    python checkpoint.py consolidate DIR OUT    write the model to one file

Tensors are called "model.NAME" and "optimizer.state.NAME.KEY", NAME as in the unwrapped model. No
process group is needed for one process. Copy this one file: it needs only torch.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as by_name
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# Private names of PyTorch: what gives a parameter's names in get_model_state_dict, and an attribute
# of parameters that FSDP1 has flattened, by which a part of its model, as model.module, is told.
original_names = by_name._get_fqns
FLATTENED = "_fsdp_flattened"

T = TypeVar("T")
Optimizers = Optimizer | Sequence[Optimizer] | None
MANIFEST = "checkpoint.json"
INDEX = ".metadata"
STATE = "optimizer.state."
# settings that choose an implementation: they stay as the program has them
NOT_SAVED = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
warnings.filterwarnings("ignore", "When using ``NO_SHARD|FSDP.state_dict_type|TypedStorage is")
warnings.filterwarnings("ignore", "torch.distributed is disabled")


class CorruptCheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message says why, in one sentence."""


# --- Save and load


def save(
    out: str | Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizers = None,
    run_state: dict[str, Any] | None = None,
    *,
    keep: int | None = 2,
) -> Path:
    """Save `out`/step_XXXXXXXX, remove all but the newest `keep`, return the folder. Collective.

    `optimizer` is one, a list, or None; several models fit into an nn.ModuleDict. `run_state` is
    what JSON holds, such as a scheduler's state_dict(); it and all buffers are saved from rank 0.
    On all ranks, ValueError for what could not be restored, OSError for a save that failed.
    """
    out = Path(out)
    new = out / f".step_{step:08d}.writing"
    on_rank0(partial(_remove_leftovers, out))  # of a killed run
    state = _TrainingState(model, optimizer)
    run_state = on_all_ranks(partial(_as_json, run_state if run_state else {}))
    manifest = {"step": step, "run_state": run_state, "groups": state.groups}
    tensors = state.own_share()
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    try:
        dcp.save(tensors, storage_writer=_Writer(new), planner=planner)
        rank, _ = _rank_and_ranks()
        written = new.glob(f"__{rank}_*")
        own = on_all_ranks(lambda: {path.name: _size_and_crc(path) for path in written})
        on_rank0(partial(_complete, new, manifest, keep, _gather(own)))
    except dcp.CheckpointException as failed:  # which is no Exception, and has many lines
        rank, (error, _) = min(failed.failures.items())
        raise OSError(f"{error} (rank {rank})") from failed
    finally:
        on_rank0(partial(_remove_leftovers, out))
    return out / f"step_{step:08d}"


class _Writer(dcp.FileSystemWriter):
    """Write as DCP does, but tell the cause of a failure, and no temporary path."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write this rank's items; of an error only a sentence is sent to the other ranks."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause = error.__context__ or error  # torch.save raises again on closing
            raise OSError(f"{type(cause).__name__}: {cause}") from error

    def storage_meta(self) -> None:
        """Keep the path out of the index."""


def _complete(new: Path, manifest: dict[str, Any], keep: int | None, written: list[dict]) -> None:
    """Write the manifest, give the folder its name, rename those not to keep."""
    files = {INDEX: _size_and_crc(new / INDEX)}
    for of_rank in written:
        files |= of_rank
    sizes = {path.name: path.stat().st_size for path in new.iterdir()}
    for name, (size, _) in files.items():
        if sizes.get(name) != size:
            where = f"rank 0 does not see all of {new / name}, which another rank wrote"
            raise OSError(f"{where}: save to a folder that all nodes share")
    manifest["files"] = files
    manifest["checksum"] = _checksum(manifest)
    with atomic_write(new / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode())
    final = new.with_name(f"step_{manifest['step']:08d}")
    if final.exists():  # it is found under this name until the new one has its own
        final.rename(final.with_name(f".{final.name}.replaced"))
    new.rename(final)
    with atomic_write(final.with_name("latest")) as file:
        file.write(f"{final.name}\n".encode())
    up_to_now = [p for p in list_checkpoints(final.parent) if step_of(p) <= manifest["step"]]
    if keep:
        for path in up_to_now[:-keep]:
            # renamed first: a kill leaves no half of it under its name
            path.rename(path.with_name(f".step_{step_of(path)}.removed"))


def _remove_leftovers(out: Path) -> None:
    """Remove unfinished, replaced and renamed checkpoints."""
    with suppress(OSError):
        for path in {*out.glob(".step_*.*")} - {*list_checkpoints(out)}:
            shutil.rmtree(path, ignore_errors=True)


def load(path: str | Path, model: nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizers. Collective.

    Returns what `save` was given: {"step": int, "run_state": dict}. Settings such as learning rates
    are restored too; an optimizer without saved states is left as it is. First the ranks together
    check all files: CorruptCheckpointError, or ValueError for another model, changes nothing.
    """
    path = Path(path)
    state = _TrainingState(model, optimizer)
    manifest, index = on_all_ranks(partial(verify, path, *_rank_and_ranks()))
    tensors = on_all_ranks(partial(state.allocate, path, manifest["groups"], index))
    on_all_ranks(partial(_read_tensors, path, index, tensors))
    state.restore(tensors, manifest["groups"])
    return {"step": manifest["step"], "run_state": manifest["run_state"]}


def find_newest(out: str | Path) -> Path | None:
    """Return the newest checkpoint that rank 0 finds in a folder, or None. Collective."""
    found = on_rank0(partial(list_checkpoints, out))
    return found[-1] if found else None


def list_checkpoints(out: str | Path) -> list[Path]:
    """List the checkpoints in a folder by step, even damaged ones; OSError if it is unreadable."""
    found = {}
    with suppress(FileNotFoundError):
        for path in sorted(Path(out).iterdir()):  # .step_X.replaced comes before step_X
            if re.fullmatch(r"step_\d{8,}|\.step_\d{8,}\.replaced", path.name) and path.is_dir():
                found[step_of(path)] = path
    return [found[step] for step in sorted(found)]


def step_of(path: Path) -> int:
    """Return the step in a folder's name."""
    return int("".join(filter(str.isdigit, path.name)))


# --- Without the other ranks


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the model of a run (its newest checkpoint), a checkpoint, or a consolidated file.

    Returns tensors by name, on the CPU, and {"step", "run_state"}. ValueError if it is none of
    these, or damaged; OSError.
    """
    path = Path(path)
    if path.is_file():
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            return found.pop("model"), {"step": found["step"], "run_state": found["run_state"]}
        except (
            AttributeError,
            TypeError,
            EOFError,
            KeyError,
            RuntimeError,
            pickle.UnpicklingError,
        ):
            raise ValueError(f"{path} is damaged, or not written by consolidate") from None
    if not (path / MANIFEST).exists():
        path = [path, *list_checkpoints(path)][-1]
    manifest, index = verify(path)
    weights = {}
    entries: dict[str, Any] = index.state_dict_metadata
    for name, entry in entries.items():
        if name.startswith("model."):
            weights[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _read_tensors(path, index, weights)
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    return weights, {"step": manifest["step"], "run_state": manifest["run_state"]}


def consolidate(path: str | Path, file: str | Path) -> dict[str, Any]:
    """Write {"model": tensors by name, "step", "run_state"} to a new file, and return it.

    ValueError if the file exists, and the errors of `read_weights`.
    """
    if os.path.lexists(file):
        raise ValueError(f"{file} exists: give the name of a new file")
    with atomic_write(Path(file)) as opened:  # first: it may fail, and reading takes minutes
        weights, facts = read_weights(path)
        content = {"model": weights, **facts}
        torch.save(content, opened)
    return content


# --- The training state as named tensors, the same in every mode


class _TrainingState:
    """A model and its optimizers, by the names of the unwrapped model.

    Without get_optimizer_state_dict, which takes a step if none was taken, and fails for ZeRO-1.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers) -> None:
        """Take what `save` takes. Collective."""
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.fsdp1 = bool(FSDP1.fsdp_modules(model))
        # before the names: after a forward pass, this makes FSDP put back the sharded parameters
        self.weights: dict[str, Any] = by_name.get_model_state_dict(self.model)
        named = self.model.named_parameters()
        self.names = {p: min(original_names(self.model, name)) for name, p in named}
        self.optimizers: Sequence[Optimizer] = ()
        if optimizer is not None:
            self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self.groups = on_all_ranks(self._describe_groups)

    def _describe_groups(self) -> list[dict[str, Any]]:
        for name, p in self.model.named_parameters():
            if hasattr(p, FLATTENED) and "_fsdp_wrapped_module" not in name:
                raise ValueError(f"{name} is sharded by FSDP1 in a larger model: give that one")
        if self.fsdp1 and len(self.optimizers) > 1:
            raise ValueError("FSDP1 saves one optimizer: give it several groups, or use FSDP2")
        found = []
        for optimizer in self.optimizers:
            inner = _inner(optimizer)
            around = any(isinstance(value, Optimizer) for value in vars(inner).values())
            if around or not {*_parameters(optimizer)} <= self.names.keys():
                what = "build it from the sharded model.parameters(), not around another optimizer"
                raise ValueError(f"{type(inner).__name__} cannot be saved: {what}")
            for group in optimizer.param_groups:
                whose = [type(inner).__name__, *(self.names[p] for p in group["params"])]
                settings = {key: group[key] for key in sorted(group.keys() - NOT_SAVED)}
                found.append({"whose": whose, "settings": _as_json(settings)})
        return found

    def own_share(self) -> dict[str, Tensor]:
        """Return the tensors that this rank is to write. Collective.

        ValueError if one could not be restored, or if the ranks differ in what they share.
        """
        tensors = {f"model.{name}": value for name, value in self.weights.items()}
        of_one: set[str] = set()  # ZeRO-1's states, each on one rank
        for optimizer in self.optimizers:
            states = {self.names[p]: kept for p, kept in _inner(optimizer).state.items() if kept}
            if self.fsdp1 and any(_gather(bool(states))):  # some rank has taken a step
                with _sharded_states(self.model):
                    states = FSDP1.optim_state_dict(self.model, optimizer)["state"]
                states = {min(original_names(self.model, n)): kept for n, kept in states.items()}
            found = on_all_ranks(partial(self._name_states, states))
            tensors |= found
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                of_one |= found.keys()
        shared = {name: tensors[name] for name in sorted(tensors.keys() - of_one)}
        known = repr(([(name, value.shape) for name, value in shared.items()], self.groups))
        if len({*_gather(zlib.crc32(known.encode()))}) > 1:
            what = "states or settings of the optimizers differ between ranks"
            raise ValueError(f"{what}: keep them equal, or use ZeRO-1 or FSDP2")
        buffers = {f"model.{name}" for name in self.weights.keys() - self.names.values()}
        own = of_one | _share(shared, buffers)
        return {name: value for name, value in tensors.items() if name in own}

    def _name_states(self, states: Mapping[str, dict]) -> dict[str, Tensor]:
        named = {}
        for name, kept in states.items():
            for key, value in kept.items():
                like = self.weights[name]
                fits = isinstance(value, Tensor) and "." not in key
                if fits:
                    sharded = isinstance(like, DTensor) and value.ndim > 0
                    fits = isinstance(value, DTensor) == sharded
                    fits = fits and (not sharded or value.shape == like.shape)
                if not fits:
                    what = "it must be a tensor, and if sharded, 0-dim or shaped like its parameter"
                    raise ValueError(f"state {key} of {name} cannot be saved: {what}")
                named[f"{STATE}{name}.{key}"] = value
        return named

    def allocate(self, path: Path, groups: Sequence[dict], index: Any) -> dict[str, Tensor]:
        """Return room for this rank's part; ValueError for another model or optimizer."""
        found = {f"model.{name}": value for name, value in self.weights.items()}
        entries = index.state_dict_metadata
        differ = {name for name in entries if not name.startswith(STATE)} ^ found.keys()
        if differ:  # shapes are compared by DCP
            what = f"{min(differ)} is only in one of the checkpoint and the model"
            raise ValueError(f"{path}: {what}")
        ours = [group["whose"] for group in self.groups]
        saved = [group["whose"] for group in groups]
        if ours and saved and ours != saved:
            what = "was saved with another optimizer, or with other parameter groups"
            raise ValueError(f"{path} {what}: give None to load the model alone")
        held = set()
        for optimizer in self.optimizers:
            held |= {self.names[p] for p in _parameters(_inner(optimizer))}
        for entry, kept in entries.items():
            name, _ = _parameter_and_key(entry)
            if entry.startswith(STATE) and name in held:
                like = self.weights[name]
                dtype = kept.properties.dtype
                if kept.size == like.shape or (kept.size and isinstance(like, DTensor)):
                    found[entry] = torch.empty_like(like, dtype=dtype)
                else:
                    found[entry] = torch.empty(kept.size, dtype=dtype)
        return found

    def restore(self, tensors: Mapping[str, Tensor], groups: Sequence[dict]) -> None:
        """Take over what was read into `allocate`'s room, and the settings. Collective."""
        by_name.set_model_state_dict(self.model, self.weights)
        states: dict[str, dict[str, Tensor]] = {}
        for entry, tensor in tensors.items():
            if entry.startswith(STATE):
                name, key = _parameter_and_key(entry)
                states.setdefault(name, {})[key] = tensor
        own: list[dict[str, Any]] = []
        for optimizer in self.optimizers:
            own += optimizer.param_groups
        for group, saved in zip(own, groups, strict=False):  # either may be empty
            for key, value in saved["settings"].items():
                group[key] = tuple(value) if isinstance(value, list) else value
        if states:
            for optimizer in self.optimizers:
                self._restore_states(_inner(optimizer), states)

    def _restore_states(self, optimizer: Optimizer, states: Mapping[str, dict]) -> None:
        parameters = _parameters(optimizer)
        names = [self.names[p] for p in parameters]
        found = {number: states[name] for number, name in enumerate(names) if name in states}
        if self.fsdp1:
            given = {}  # by names that keep the prefix of torch.compile
            for name, p in self.model.named_parameters():
                theirs = min(original_names(self.model, name, skip_compiler_prefix=False))
                if self.names[p] in states:
                    given[theirs] = states[self.names[p]]
            with _sharded_states(self.model):
                flat = FSDP1.optim_state_dict_to_load(self.model, optimizer, {"state": given})
            found = flat["state"]
        optimizer.load_state_dict(optimizer.state_dict() | {"state": found})
        for number, kept in found.items():
            loaded = optimizer.state[parameters[number]]
            for key, value in kept.items():
                # load_state_dict has cast states to the dtype of the parameter: undo that
                if loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)


def _inner(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the states: with ZeRO-1 the one inside, of a part of them."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters in the order of the optimizer's state_dict()."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _parameter_and_key(entry: str) -> tuple[str, str]:
    """Split the name of a state into the name of its parameter and its key."""
    name, _, key = entry.removeprefix(STATE).rpartition(".")
    return name, key


def _sharded_states(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, FSDP1 gives and takes sharded states of the original shapes."""
    options = fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig()
    return FSDP1.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT, *options)


def _as_json(value: Any) -> Any:
    """Return what JSON would give back, lists for tuples; ValueError if more would change."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    what = "numbers, texts, lists, and dictionaries whose keys are texts"
    raise ValueError(f"run_state and settings of optimizers may be {what}, not {value!r:.60}")


# --- Which rank writes what; reading


def _share(tensors: Mapping[str, Tensor], buffers: set[str]) -> set[str]:
    """Name those of `tensors` that this rank writes, of each one copy: buffers are rank 0's.

    All compute the same shares: the largest tensor first, each to the copy with the least so far.
    """
    loads: dict[int, list[int]] = {}  # bytes that each copy writes
    own = set()
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        copies, number = _copies_of(tensors[name])
        load = loads.setdefault(copies, [0 for _ in range(copies)])
        writer = 0 if name in buffers else load.index(min(load))  # buffers may differ
        load[writer] += sizes[name]
        if writer == number:
            own.add(name)
    return own


def _copies_of(value: Tensor) -> tuple[int, int]:
    """Return how many copies of a tensor the ranks hold, and the number of this rank's copy."""
    if not isinstance(value, DTensor):
        rank, ranks = _rank_and_ranks()
        return ranks, rank
    copies = 1
    number = 0
    for dim, placement in enumerate(value.placements):
        if isinstance(placement, Replicate):
            copies *= value.device_mesh.size(dim)
            number *= value.device_mesh.size(dim)
            number += value.device_mesh.get_local_rank(dim)
    return copies, number


def _read_tensors(path: Path, index: dcp.Metadata, tensors: dict[str, Tensor]) -> None:
    """Read this rank's part, in place: `dcp.load(no_dist=True)` by an index that was checked."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    reader = dcp.FileSystemReader(path)
    planner.set_up_planner(tensors, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


class _IndexUnpickler(pickle.Unpickler):
    """Unpickle DCP's index, of which no code is run."""

    # not BytesStorageMetadata: what DCP reads for it may run code
    PARTS = (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "Size"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout"),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return a part of an index."""
        is_dtype = isinstance(getattr(torch, name, None), torch.dtype)
        if f"{module}.".startswith("torch.") and (name in self.PARTS or is_dtype):
            return super().find_class(module, name)
        raise CorruptCheckpointError(f"{INDEX} names {module}.{name}, which is no part of it")


# --- What the ranks do together


def _rank_and_ranks() -> tuple[int, int]:
    """Return this rank and their number; without a process group 0 and 1."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _gather(own: T) -> list[T]:
    """Return what all ranks give. Collective."""
    _, ranks = _rank_and_ranks()
    found = [own for _ in range(ranks)]
    if dist.is_initialized():
        dist.all_gather_object(found, own)
    return found


def on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work`, nothing collective, on each rank; all raise the first one's error. Collective."""
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    sent = error
    if error and not isinstance(error, OSError | ValueError):  # a bug: others may lack its class
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    for first in filter(None, _gather(sent)):
        raise first from error  # where it was raised, with its traceback
    return result


def on_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0; all ranks return its result or raise its error. Collective."""
    rank, _ = _rank_and_ranks()
    found: list[Any] = [on_all_ranks(work if rank == 0 else lambda: None)]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


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
        raise error.__context__ or error from None  # torch.save raises again on closing
    finally:
        with suppress(OSError):
            new.unlink()


def _size_and_crc(path: Path) -> list[int]:
    """Return the size of a file in bytes, and its CRC-32."""
    crc = 0
    with path.open("rb") as file:
        for block in iter(partial(file.read, 2**20), b""):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def _checksum(manifest: dict[str, Any]) -> int:
    """Return the CRC-32 of a manifest, leaving out its own checksum."""
    return zlib.crc32(json.dumps(manifest | {"checksum": 0}, sort_keys=True).encode())


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint's manifest: {"step", "run_state", "groups", "files", "checksum"}.

    CorruptCheckpointError if it is missing or was altered.
    """
    with suppress(FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
        manifest = json.loads(Path(path, MANIFEST).read_bytes())
        if manifest["checksum"] == _checksum(manifest):
            return manifest
    raise CorruptCheckpointError(f"{path}: {MANIFEST} is missing or damaged")


def verify(path: str | Path, part: int = 0, parts: int = 1) -> tuple[dict[str, Any], dcp.Metadata]:
    """Check every `parts`-th file, from number `part` -> manifest and DCP's index.

    CorruptCheckpointError or OSError.
    """
    manifest = read_manifest(path)
    files = manifest["files"]
    names = sorted(files)
    for name in {INDEX, *names[part::parts]}:
        file = Path(path, name)
        if not file.exists() or _size_and_crc(file) != files[name]:
            raise CorruptCheckpointError(f"{path}: {name} is missing or damaged")
    with Path(path, INDEX).open("rb") as opened:
        return manifest, _IndexUnpickler(opened).load()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 1 if the checkpoint is damaged, exit with 2 for bad usage."""
    parser = argparse.ArgumentParser(description="Verify or consolidate a checkpoint.")
    parser.add_argument("command", choices=("verify", "consolidate"))
    parser.add_argument("dir", help="the checkpoint")
    parser.add_argument("out", nargs="?", help="of consolidate: a new file for its model")
    args = parser.parse_args(argv)
    if (args.command == "consolidate") != bool(args.out):
        parser.error("give either verify DIR, or consolidate DIR OUT")
    try:
        if args.out:
            model = consolidate(args.dir, args.out)["model"]
            print(f"{args.out}: {len(model)} parameters and buffers")
        else:
            _, index = verify(args.dir)
            print(f"{args.dir} is complete: {len(index.state_dict_metadata)} tensors")
    except (OSError, CorruptCheckpointError) as error:
        print(f"checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
