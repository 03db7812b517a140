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
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as state_dicts
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.optim import ZeroRedundancyOptimizer

MANIFEST, INDEX = "checkpoint.json", ".metadata"
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
        super().__init__(folder / f".{self.final.name}.writing")

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
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer
        self.keep, self.group, self.failures = keep, group, 0  # in a row
        self.thread = ThreadPoolExecutor(1) if background else None
        # on a GPU one copy, in pinned memory, serves all saves: slow to allocate, fast to fill
        self.stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self.pending: Future[list[str]] | None = None
        self.step = self.saved = 0  # of the newest attempt; of the newest that is on disk

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
        pending, self.pending = self.pending, None
        return pending.result() if pending else []

    def _write(self, tensors: dict[str, Tensor], writer: _Writer) -> list[str]:
        """Write one checkpoint; return why it failed, the same sentence on all ranks."""
        try:
            _remove_leftovers(self.folder)  # of a killed run, before rank 0 lets any rank write
            dcp.save(tensors, storage_writer=writer, process_group=self.group)
        except CheckpointException as failed:  # with the errors of all ranks
            self.failures += 1
            rank, (error, _) = next(iter(failed.failures.items()))
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
            return manifest
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
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizer; return its manifest. Collective.

    That is the saved `run_state`, and the "step". Every file is checked first, by one of the ranks:
    Damaged or OSError, the same on all, leaves the model as it was. A later error does not.
    """
    reader, tensors = Reader(Path(folder)), named_tensors(model, optimizer)
    zero1 = isinstance(optimizer, ZeroRedundancyOptimizer)
    try:
        manifest, reader.index = check(Path(folder), dist.get_rank(), dist.get_world_size())
        entries: dict[str, Any] = reader.index.state_dict_metadata
        # with ZeRO-1 other ranks have the other parameters' state
        more = {name for name in entries if not (zero1 and name.startswith("optim."))}
        for name in sorted(tensors.keys() | more):
            saved = tuple(entries[name].size) if name in entries else "missing"
            own = tuple(tensors[name].shape) if name in tensors else "missing"
            if saved != own:
                raise Damaged(f"{folder}: {name} is {saved} in the checkpoint, {own} in the model")
    except (Damaged, OSError) as error:
        reader.problem = error
    reader.read(tensors, process_group=group)
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
        self.reader.read({f"model.{n}": tensor for n, tensor in found.items()}, no_dist=True)
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
        for key in "step", "files", "checksum":  # of the checkpoint, not of the model
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
