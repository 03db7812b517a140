"""Sharded checkpoints: saved in any mode, by any number of ranks, loaded in any other.

PyTorch's distributed checkpointing (DCP) writes and reads the tensors. Added here is what a long
run needs: of what several ranks hold each writes a share, a name appears once all is on the disk,
every byte is checked before the model is touched, and no code is run from a file.

    step_00000100/checkpoint.json    the manifest: step, run_state, settings of the optimizers, size
                                     and CRC-32 of all other files, its own checksum
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

# Private names of PyTorch. Parameters have these names in its get_model_state_dict; ...
original_names = by_name._get_fqns
# ... this attribute tells a part of a model that FSDP1 has flattened, as `model.module`.
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
    if step < 0 or keep == 0:  # it would not be found, or be removed at once
        raise ValueError("give step 0 or more, keep 1 or more")
    out = Path(out)
    new = out / f".step_{step:08d}.writing"
    on_rank0(partial(_remove_leftovers, out))  # of a killed run
    state = _TrainingState(model, optimizer)
    tensors = state.collect()
    run_state = on_all_ranks(partial(_as_json, {} if run_state is None else run_state))
    manifest = {"step": step, "run_state": run_state, "groups": state.groups}
    shared = [(name, tensors[name].shape) for name in sorted(tensors.keys() - state.of_one)]
    writer = _Writer(new)
    planner = _SharePlanner(flatten_state_dict=False)
    planner.of_one = state.of_one
    planner.parameters = {f"model.{name}" for name in state.names.values()}
    try:
        dcp.save(tensors, storage_writer=writer, planner=planner)
        parts = _gather((zlib.crc32(repr((shared, state.groups)).encode()), writer.files))
        on_rank0(partial(_complete, new, manifest, keep, parts))
    except dcp.CheckpointException as failed:  # which is no Exception, and has many lines
        rank, (error, _) = min(failed.failures.items())
        raise OSError(f"{error} (rank {rank})") from failed
    finally:
        on_rank0(partial(_remove_leftovers, out))
    return out / f"step_{step:08d}"


def _complete(
    new: Path, manifest: dict[str, Any], keep: int | None, parts: list[tuple[int, dict]]
) -> None:
    """Write the manifest, give the folder its name, rename those not to keep."""
    if len({checksum for checksum, _ in parts}) > 1:
        raise ValueError(
            "states or settings of the optimizers differ between ranks, and a load would give all "
            "of them the same: keep them equal, or use ZeRO-1 or FSDP2"
        )
    files = {INDEX: _size_and_crc(new / INDEX)}
    for _, files_of_rank in parts:
        files.update(files_of_rank)
    for name, (size, _) in files.items():
        if not (new / name).is_file() or (new / name).stat().st_size != size:
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
    found = list_checkpoints(final.parent)
    older = [path for path in found if step_of(path) <= manifest["step"]]
    for path in older[: -keep if keep else 0]:
        path.rename(path.with_name(f".step_{step_of(path)}.removed"))  # a kill leaves no half of it
    if found[-1] != final:
        what = f"{found[-1]} is further than {final.name}, just saved"
        print(f"warning: {what}: move it away, or find_newest returns it", file=sys.stderr)


def _remove_leftovers(out: Path) -> None:
    """Remove unfinished, replaced and renamed checkpoints."""
    with suppress(OSError):
        for path in {*out.glob(".step_*.*")} - {*list_checkpoints(out)}:
            shutil.rmtree(path, ignore_errors=True)


def load(path: str | Path, model: nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizers. Collective.

    Returns what `save` was given: {"step": int, "run_state": dict}. Settings such as learning rates
    are restored too; an optimizer that the checkpoint has not stays new. The ranks share the work
    of checking all files first: CorruptCheckpointError or OSError on all changes nothing.
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
        except (AttributeError, EOFError, KeyError, RuntimeError, pickle.UnpicklingError):
            raise ValueError(f"{path} is damaged, or not written by consolidate") from None
    if not (path / MANIFEST).exists():
        path = max(list_checkpoints(path), key=step_of, default=path)
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
        self.names = {p: self.original(name) for name, p in self.model.named_parameters()}
        self.of_one: set[str] = set()  # ZeRO-1's states, each on one rank
        self.optimizers: Sequence[Optimizer] = ()
        if optimizer is not None:
            self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self.groups = on_all_ranks(self._describe_groups)

    def original(self, name: str, with_compiler: bool = False) -> str:
        """Return the name that a parameter had before the model was wrapped."""
        return min(original_names(self.model, name, skip_compiler_prefix=not with_compiler))

    def _describe_groups(self) -> list[dict[str, Any]]:
        found = []
        for name, p in self.model.named_parameters():
            if hasattr(p, FLATTENED) and "_fsdp_wrapped_module" not in name:
                raise ValueError(f"{name} is sharded by FSDP1 in a larger model: give that one")
        for optimizer in self.optimizers:
            kind = type(_inner(optimizer)).__name__
            around = [v for v in vars(_inner(optimizer)).values() if isinstance(v, Optimizer)]
            foreign = {*_parameters(optimizer)} - self.names.keys()
            if around or foreign or (self.fsdp1 and len(self.optimizers) > 1):
                raise ValueError(
                    f"{kind} cannot be saved: build it from the sharded model.parameters(), give "
                    "the optimizer inside of another one, and under FSDP1 not more than one"
                )
            for group in optimizer.param_groups:
                settings = {"optimizer": kind, "params": [self.names[p] for p in group["params"]]}
                for key in sorted(group.keys() - NOT_SAVED):
                    value = group[key]
                    if isinstance(value, Tensor):  # the learning rate of a compiled step
                        value = value.item()
                    settings[key] = value
                found.append(_as_json(settings))
        return found

    def collect(self) -> dict[str, Tensor]:
        """Return this rank's tensors; ValueError if one could not be restored. Collective."""
        tensors = {f"model.{name}": value for name, value in self.weights.items()}
        for optimizer in self.optimizers:
            states = {self.names[p]: kept for p, kept in _inner(optimizer).state.items() if kept}
            if self.fsdp1 and any(_gather(bool(states))):  # some rank has taken a step
                with _sharded_states(self.model):
                    converted = FSDP1.optim_state_dict(self.model, optimizer)["state"]
                states = {self.original(name): kept for name, kept in converted.items()}
            for name, kept in states.items():
                found = {f"{STATE}{name}.{key}": value for key, value in kept.items()}
                tensors |= found
                if isinstance(optimizer, ZeroRedundancyOptimizer):
                    self.of_one |= found.keys()
        on_all_ranks(partial(self._check, tensors))
        return tensors

    def _check(self, tensors: Mapping[str, Any]) -> None:
        for entry, value in tensors.items():
            fits = isinstance(value, Tensor)
            if fits and entry.startswith(STATE):
                like: Any = self.weights.get(_parameter_of(entry))  # None: a dot in the state's key
                sharded = isinstance(like, DTensor) and value.ndim > 0
                fits = like is not None and isinstance(value, DTensor) == sharded
                fits = fits and (not sharded or value.shape == like.shape)
            if not fits:
                raise ValueError(
                    f"{entry} cannot be saved: it must be a tensor, and of a sharded parameter "
                    "0-dim, or sharded and shaped like it (in mode ddp, other states can be saved)"
                )

    def allocate(self, path: Path, groups: Sequence[dict], index: Any) -> dict[str, Tensor]:
        """Return room for this rank's part of a checkpoint.

        CorruptCheckpointError if it is of another model or optimizer.
        """
        found = {f"model.{name}": value for name, value in self.weights.items()}
        entries = index.state_dict_metadata
        then = {name: (tuple(e.size), e.properties.dtype) for name, e in entries.items()}
        now = {name: (tuple(value.shape), value.dtype) for name, value in found.items()}
        for name in sorted(then.keys() | now.keys()):
            if not name.startswith(STATE) and then.get(name) != now.get(name):
                what = f"{name} is {then.get(name)} in the checkpoint, {now.get(name)} in the model"
                raise CorruptCheckpointError(f"{path}: {what}")
        if groups and not {*map(_identity, self.groups)} <= {*map(_identity, groups)}:
            what = "was saved with another optimizer, or with other parameter groups"
            raise CorruptCheckpointError(f"{path} {what}: give None to load the model alone")
        mine = set()
        for optimizer in self.optimizers:
            mine |= {self.names[p] for p in _parameters(_inner(optimizer))}
        for entry, (size, dtype) in then.items():
            if not entry.startswith(STATE) or _parameter_of(entry) not in mine:
                continue
            like = self.weights[_parameter_of(entry)]
            if size == tuple(like.shape):
                found[entry] = torch.empty_like(like, dtype=dtype)
            elif size == () or not isinstance(like, DTensor):
                found[entry] = torch.empty(size, dtype=dtype)
            else:
                what = f"{entry} is {size}, which cannot be sharded: load it in mode ddp"
                raise CorruptCheckpointError(f"{path}: {what}")
        return found

    def restore(self, tensors: Mapping[str, Tensor], groups: Sequence[dict]) -> None:
        """Take over what was read into `allocate`'s room, and the settings. Collective."""
        options = by_name.StateDictOptions(strict=False)  # `allocate` has compared the names
        by_name.set_model_state_dict(self.model, self.weights, options=options)
        states: dict[str, dict[str, Tensor]] = {}
        for entry, tensor in tensors.items():
            if entry.startswith(STATE):
                _, _, key = entry.rpartition(".")
                states.setdefault(_parameter_of(entry), {})[key] = tensor
        saved = {_identity(group): group for group in groups}
        described = iter(self.groups)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                settings = saved.get(_identity(next(described)), {})
                for key in settings.keys() - {"optimizer", "params"}:
                    group[key] = _like(settings[key], group.get(key))
            if states:
                self._restore_states(_inner(optimizer), states)

    def _restore_states(self, optimizer: Optimizer, states: Mapping[str, dict]) -> None:
        parameters = _parameters(optimizer)
        names = [self.names[p] for p in parameters]
        found = {number: states[name] for number, name in enumerate(names) if name in states}
        if self.fsdp1:
            given = {}  # by names that keep the prefix of torch.compile
            for name, p in self.model.named_parameters():
                if self.names[p] in states:
                    given[self.original(name, with_compiler=True)] = states[self.names[p]]
            with _sharded_states(self.model):
                flat = FSDP1.optim_state_dict_to_load(self.model, optimizer, {"state": given})
            found = flat["state"]
        optimizer.load_state_dict(optimizer.state_dict() | {"state": found})
        for number, kept in found.items():
            loaded = optimizer.state[parameters[number]]
            for key, value in kept.items():  # which was rounded to the dtype of the parameter
                if loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)


def _inner(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the states: with ZeRO-1 the one inside, of a part of them."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters in the order of the optimizer's state_dict()."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _parameter_of(entry: str) -> str:
    """Return the name of the parameter that a state belongs to."""
    return entry.removeprefix(STATE).rpartition(".")[0]


def _identity(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what must be the same in a checkpoint: the optimizer, and names of parameters."""
    return (group["optimizer"], *group["params"])


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


def _like(value: Any, own: Any) -> Any:
    """Return a saved setting in the type of the program's own."""
    if isinstance(own, Tensor):
        return torch.full_like(own, value)
    return tuple(value) if isinstance(own, tuple) else value


# --- DCP: which rank writes what; reading


class _SharePlanner(dcp.DefaultSavePlanner):
    """Plan this rank's share of what several ranks hold: rank 0 gets no item twice.

    All compute the same shares: the largest tensor first, each to the copy with the least so far.
    """

    parameters: set[str]  # "model.NAME": what else is in the model are buffers
    of_one: set[str]  # that no other rank has

    def create_local_plan(self) -> dcp.SavePlan:
        """Return the items that this rank writes."""
        sizes = {name: value.nbytes for name, value in self.state_dict.items()}
        loads: dict[int, list[int]] = {}  # bytes that each copy writes
        mine = set(self.of_one)
        for name in sorted(sizes.keys() - mine, key=lambda name: (-sizes[name], name)):
            value = self.state_dict[name]
            copies, own = _copies_of(value)
            load = loads.setdefault(copies, [0 for _ in range(copies)])
            writer = load.index(min(load))
            is_buffer = not name.startswith(STATE) and name not in self.parameters
            if not isinstance(value, DTensor) and (is_buffer or value.ndim == 0):
                writer = 0  # it may differ between ranks, or is so small that one file is better
            load[writer] += sizes[name]
            if writer == own:
                mine.add(name)
        plan = super().create_local_plan()
        plan.items[:] = [item for item in plan.items if item.index.fqn in mine]
        return plan


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


class _Writer(dcp.FileSystemWriter):
    """Write as DCP does; remember size and checksum of this rank's files."""

    files: dict[str, list[int]] = {}

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write this rank's items; of an error only a sentence is sent to the other ranks."""
        try:
            written = super().write_data(plan, planner)
            names = {result.storage_data.relative_path for result in written.wait()}
            self.files = {name: _size_and_crc(Path(self.path, name)) for name in names}
            return written
        except Exception as error:
            cause = _cause(error)
            raise OSError(f"{type(cause).__name__}: {cause}") from error

    def storage_meta(self) -> None:
        """Keep the temporary path out of the index."""


def _read_tensors(path: Path, index: dcp.Metadata, tensors: dict[str, Tensor]) -> None:
    """Read this rank's part, in place: `dcp.load(no_dist=True)` by an index that was checked."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    reader = dcp.FileSystemReader(path)
    planner.set_up_planner(tensors, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


class _IndexUnpickler(pickle.Unpickler):
    """Unpickle DCP's index: no code is run. (For BytesStorageMetadata, DCP would run some.)"""

    DCP = "torch.distributed.checkpoint"
    PARTS = {
        *("torch.Size", "torch.serialization._get_layout", f"{DCP}.filesystem._StorageInfo"),
        *(f"{DCP}.metadata.Metadata", f"{DCP}.metadata.MetadataIndex"),
        *(f"{DCP}.metadata.TensorStorageMetadata", f"{DCP}.metadata.ChunkStorageMetadata"),
        *(f"{DCP}.metadata.TensorProperties", f"{DCP}.metadata._MEM_FORMAT_ENCODING"),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a part of an index."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or f"{module}.{name}" in self.PARTS:
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
        raise _cause(error) from None
    finally:
        with suppress(OSError):
            new.unlink()


def _cause(error: BaseException) -> BaseException:
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


def _checksum(manifest: dict[str, Any]) -> int:
    """Return the CRC-32 of a manifest, leaving out its own checksum."""
    return zlib.crc32(json.dumps(manifest | {"checksum": 0}, sort_keys=True).encode())


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint's manifest: {"step", "run_state", "groups", "files", "checksum"}.

    CorruptCheckpointError if it is missing or was altered.
    """
    try:
        manifest = json.loads(Path(path, MANIFEST).read_bytes())
        if manifest["checksum"] == _checksum(manifest) and "run_state" in manifest:
            return manifest
    except (FileNotFoundError, NotADirectoryError):
        what = f"{path}: not a checkpoint (it contains no {MANIFEST})"
        raise CorruptCheckpointError(what) from None
    except (ValueError, LookupError, TypeError):
        pass  # not JSON, or not the JSON object that was written
    raise CorruptCheckpointError(f"{path}: checksum mismatch in {MANIFEST}")


def verify(path: str | Path, part: int = 0, parts: int = 1) -> tuple[dict[str, Any], dcp.Metadata]:
    """Check every `parts`-th file, from number `part` -> manifest and DCP's index.

    CorruptCheckpointError or OSError.
    """
    manifest = read_manifest(path)
    files = manifest["files"]
    share = sorted(files)[part::parts]
    for name in {INDEX, *share}:
        if not Path(path, name).exists():
            raise CorruptCheckpointError(f"{path}: {name} is missing")
        if _size_and_crc(Path(path, name)) != files[name]:
            raise CorruptCheckpointError(f"{path}: checksum mismatch in {name}")
    with Path(path, INDEX).open("rb") as file:
        index = _IndexUnpickler(file).load()
    if not {place.relative_path for place in index.storage_data.values()} <= files.keys():
        raise CorruptCheckpointError(f"{path}: {INDEX} names files that {MANIFEST} lacks")
    return manifest, index


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 1 if the checkpoint is damaged, exit with 2 for bad usage."""
    parser = argparse.ArgumentParser(description="Verify or consolidate a checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("verify", help="check every file of a checkpoint").add_argument("dir")
    command = commands.add_parser("consolidate", help="write its model to one new file")
    command.add_argument("dir")
    command.add_argument("out")
    args = parser.parse_args(argv)
    try:
        if args.command == "verify":
            _, index = verify(args.dir)
            print(f"{args.dir} is complete: {len(index.state_dict_metadata)} tensors")
        else:
            model = consolidate(args.dir, args.out)["model"]
            print(f"{args.out}: {len(model)} parameters and buffers")
    except (OSError, CorruptCheckpointError) as error:
        print(f"checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
