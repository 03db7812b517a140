"""Sharded checkpoints that load anywhere: written by any mode, engine and world size, read by any.

On `torch.distributed.checkpoint` (DCP): every rank writes its shards, each replica once, and reads
what it needs of anybody's. Parameters and optimizer states go by their names in the model, so that
neither the wrapping nor the number of ranks shows. One checkpoint is one folder:

    step_00000100/checkpoint.json    step, flags, format, size and checksum of every other file
                  .metadata          which tensor lies where (DCP's own, a pickle: read with care)
                  __0_0.distcp       the shards that rank 0 wrote

It is written under another name, made durable, and renamed: a folder of that name is complete. One
that cannot be read is either Damaged, for good, or an OSError, which may pass.

    python checkpoint.py ls DIR                 what is there
    python checkpoint.py verify DIR             every checksum right, every tensor whole
    python checkpoint.py consolidate DIR OUT    one plain file with the official MAE's names

Copy this one file: it needs torch alone.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: Ctrl-C meanwhile ends the program without a traceback.
    import os
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import errno
import io
import json
import math
import operator
import os
import pickle
import pickletools
import re
import shutil
import stat
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

FORMAT = 2  # of the folder; raised when older code could not read it. 1: no checksum of MANIFEST
MANIFEST = "checkpoint.json"
MANIFEST_LIMIT = 2**22  # bytes: enough for 80,000 ranks, and little memory for whatever they hold
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Damaged(ValueError):
    """A checkpoint that cannot be loaded, and why, in one sentence."""


# ---------------------------------------------------------------------------------------------
# Model and optimizer as named tensors


def _unwrapped_name(name: str) -> str:
    """The name that a parameter or buffer had before it was wrapped."""
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself; within ZeRO-1's the one that updates this rank's parameters."""
    return getattr(optimizer, "optim", optimizer)


def _create_adamw_state(
    optimizer: torch.optim.Optimizer, moment: Callable[[Tensor], Tensor] = torch.zeros_like
) -> None:
    """Give AdamW the states it lacks before its first step.

    DCP would make them by a step with gradients of zeros: a third more memory than the state has.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state[p]:
                where = p.device if group["fused"] or group["capturable"] else torch.device("cpu")
                optimizer.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=where),
                    "exp_avg": moment(p.detach()),
                    "exp_avg_sq": moment(p.detach()),
                }


def _zero1_states(model: nn.Module, inner: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The states of the parameters that this rank updates."""
    names = {p: _unwrapped_name(n) for n, p in model.named_parameters()}
    return {
        f"state.{names[p]}.{leaf}": value
        for group in inner.param_groups
        for p in group["params"]
        for leaf, value in inner.state[p].items()
    }


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of a training state, "model.NAME" and "optim.state.NAME.LEAF", as held here.

    Sharded ones are DTensors. Numbers that the flags decide (learning rate, betas) are not in it.
    Collective.
    """
    tensors: dict[str, Any] = {f"model.{n}": t for n, t in get_model_state_dict(model).items()}
    inner = _local_optimizer(optimizer)
    if isinstance(inner, torch.optim.AdamW):
        _create_adamw_state(inner)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        states: dict[str, Any] = dict(_zero1_states(model, inner))
    else:
        states = dict(get_optimizer_state_dict(model, optimizer, options=FLAT))
    return tensors | {f"optim.{n}": t for n, t in states.items() if n.startswith("state.")}


def _restore_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Give model and optimizer what was loaded into their `named_tensors`. Collective."""
    of_model: dict[str, Any] = {
        n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")
    }
    set_model_state_dict(model, of_model)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return  # they were loaded in place
    states: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=FLAT))
    states |= {n.removeprefix("optim."): t for n, t in tensors.items() if n.startswith("optim.")}
    set_optimizer_state_dict(model, optimizer, states, options=FLAT)


# ---------------------------------------------------------------------------------------------
# Writing


def _size_and_crc(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file; the next block is read while one is summed."""
    size = crc = turn = 0
    with _open(path) as file, ThreadPoolExecutor(1) as reader:
        room = min(2**23, os.fstat(file.fileno()).st_size + 1)
        blocks = [memoryview(bytearray(room)) for _ in range(2)]
        coming = reader.submit(file.readinto, blocks[0])
        while count := coming.result():
            block, turn = blocks[turn], 1 - turn
            coming = reader.submit(file.readinto, blocks[turn])
            size, crc = size + count, zlib.crc32(block[:count], crc)
    return size, crc


def _write_durably(path: Path, text: str) -> None:
    """Replace a small file so that a crash leaves the old text or the new."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # which may be a link, or a pipe
    with new.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Summed(io.BufferedWriter):
    """A file that knows the CRC-32 of what was written to it, so that it need not be read again.

    It has the kernel write to the disk meanwhile, not only at the end, in fsync.
    """

    size = crc = begun = 0

    def write(self, data: Any) -> int:
        count = super().write(data)
        self.size, self.crc = self.size + count, zlib.crc32(data, self.crc)
        if hasattr(os, "posix_fadvise") and self.size - self.begun >= 2**26:
            self.begun = self.size
            os.posix_fadvise(self.fileno(), 0, self.begun, os.POSIX_FADV_DONTNEED)
        return count


class _Files(FileSystem):
    """DCP's access to files; keeps the size and sum of each that was written."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        if mode != "wb":
            raise ValueError(f"{path}: written once, not opened by {mode}")
        with _Summed(open(path, mode, buffering=0)) as file:
            yield file
            self.sums[os.path.basename(path)] = (file.size, file.crc)


class _Writer(FileSystemWriter):
    """DCP's writer into a temporary folder, which the coordinator completes and renames.

    DCP calls `finish` on one rank when all have written, and tells all ranks of any error, so that
    a full disk on one of them fails the save on all.
    """

    def __init__(self, folder: Path, step: int, run_state: dict[str, Any], keep: int) -> None:
        self.out, self.final = folder, folder / f"step_{step:08d}"
        self.temporary = folder / f".step_{step:08d}.writing"
        self.manifest = run_state | {"format": FORMAT, "step": step}
        self.keep = keep
        super().__init__(self.temporary, sync_files=True)
        self.fs: Any = _Files()

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.temporary.is_symlink():
            raise FileExistsError(f"{self.temporary} is a link: nothing is written where it leads")
        twice = get_crc32_options()
        set_crc32_options(False)  # of each tensor by torch.save: _Files takes the sum of all
        try:
            future = super().write_data(plan, planner)
        except RuntimeError as error:
            raise _root_cause(error) from None
        finally:
            set_crc32_options(twice)
        for name, sums in self.fs.sums.items():
            (self.temporary / f"{name}.sum").write_text(json.dumps(sums))
        return future

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        files = {}
        for path in sorted(self.temporary.glob("*.sum")):
            files[path.stem] = json.loads(path.read_text())
            path.unlink()
        files[".metadata"] = self.fs.sums[".metadata.tmp"]
        manifest = json.loads(json.dumps(self.manifest | {"files": files}))
        manifest["checksum"] = _checksum(manifest)
        _write_durably(self.temporary / MANIFEST, json.dumps(manifest, indent=1))
        _sync_folder(self.temporary)
        gone = []
        if self.final.exists():  # the same step saved again
            gone.append(_rename_for_removal(self.final))
        try:
            self.temporary.rename(self.final)
        except OSError:
            for old in gone:
                old.rename(self.final)
            raise
        _write_durably(self.out / "latest", self.final.name + "\n")
        with suppress(OSError):
            older = [p for p in list_checkpoints(self.out) if step_of(p) <= self.manifest["step"]]
            gone += [_rename_for_removal(old) for old in older[: -self.keep]]
        for path in gone:
            _remove(path)


def _root_cause(error: Exception) -> Exception:
    """What torch.save met first: ending its file on a full disk, it fails again."""
    first: BaseException = error
    while first.__context__:
        first = first.__context__
    return first if isinstance(first, OSError) else error


def _checksum(manifest: dict[str, Any]) -> int:
    """Return the CRC-32 of a manifest without its own checksum."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def save(
    folder: str,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run_state: dict[str, Any],
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> str | None:
    """Write `folder`/step_XXXXXXXX from all ranks and name it in `latest`; keep the newest `keep`.

    `run_state` (JSON) is stored in the manifest. `group` coordinates: one of gloo, so that
    nothing is gathered in GPU memory. Returns None, or on every rank the same sentence why it
    could not be written; then the older checkpoints are as they were. Collective.
    """
    writer = _Writer(Path(folder), step, run_state, keep)
    return _write(named_tensors(model, optimizer), writer, group)


def _write(
    tensors: dict[str, Tensor], writer: _Writer, group: dist.ProcessGroup | None
) -> str | None:
    first = dist.get_rank() == 0
    if first:
        _remove_partial_saves(writer.out)  # what a killed process left
    dist.barrier(group)  # nobody writes before that
    try:
        for name, tensor in tensors.items():  # in the order of their indices: so they are read
            if isinstance(tensor, Tensor) and not tensor.is_contiguous():
                tensors = tensors | {name: tensor.contiguous()}
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except (Exception, CheckpointException) as error:  # the latter, no Exception, has all ranks'
        if first:
            _remove_partial_saves(writer.out)
        failures = getattr(error, "failures", {0: (error,)})
        return _failure_message(writer.manifest["step"], {r: f[0] for r, f in failures.items()})
    return None


def _failure_message(step: int, errors: dict[int, BaseException]) -> str:
    reasons = sorted(f"{type(e).__name__}: {e} (rank {r})" for r, e in errors.items())
    return f"step {step} was not saved: {'; '.join(reasons)}"


class Saver:
    """The checkpoints of one run, one at a time; in the `background`, if wanted, while it trains.

    In the background the tensors are copied in host memory first, which is all that training waits
    for, and written by a thread. `group` must then be nobody else's: two threads that wait in one
    group wait for ever. Whether a save went well is learned at the next one, by all ranks alike.
    """

    def __init__(
        self,
        folder: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
        background: bool = False,
    ) -> None:
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer
        self.keep, self.group = keep, group
        self.thread = ThreadPoolExecutor(1) if background else None
        self.pending: Future[str | None] | None = None
        self.failures = 0  # in a row
        self.step = self.saved = 0  # of the newest attempt; of the newest that is on disk

    def save(self, step: int, run_state: dict[str, Any], wait: bool = True) -> list[str]:
        """As the function `save`; `wait` for its end, in the background too. Collective.

        Returns a sentence for each save that turned out to have failed: this one and, in the
        background, the one before.
        """
        problems = self.finish()
        if self.failures == 2 and not wait:
            return problems  # enough
        self.step = step
        writer = _Writer(self.folder, step, run_state, self.keep)
        tensors = named_tensors(self.model, self.optimizer)
        if self.thread is None:
            return problems + self._record(_write(tensors, writer, self.group))
        errors: list[Exception | None] = [None] * dist.get_world_size()
        mine = None
        try:
            tensors = writer.stage(tensors)  # copies: training goes on to change the originals
        except Exception as error:  # no memory for them
            mine = error
        dist.all_gather_object(errors, mine, group=self.group)
        if any(errors):
            problem = _failure_message(step, {r: e for r, e in enumerate(errors) if e})
            return problems + self._record(problem)
        self.pending = self.thread.submit(_write, tensors, writer, self.group)
        return problems + (self.finish() if wait else [])

    def finish(self) -> list[str]:
        """Wait for the save that is under way, if one is; as `save`. Collective."""
        pending, self.pending = self.pending, None
        return self._record(pending.result()) if pending else []

    def _record(self, problem: str | None) -> list[str]:
        self.failures = self.failures + 1 if problem else 0
        self.saved = self.saved if problem else self.step
        return [problem] if problem else []


def _rename_for_removal(checkpoint: Path) -> Path:
    """Rename what is to be removed: a kill meanwhile must not leave half of it under its name."""
    aside = checkpoint.with_name(f".{checkpoint.name}.removed")
    _remove(aside)
    return checkpoint.rename(aside)


def _remove(folder: Path) -> None:
    """Remove a folder, or a link in its place, as far as that can be done."""
    with suppress(OSError):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)


def _remove_partial_saves(folder: Path) -> None:
    """Remove what a kill left: no reason to fail, or to hang."""
    with suppress(OSError):
        for left in folder.glob(".step_*"):
            if left.suffix in (".writing", ".removed"):
                _remove(left)


# ---------------------------------------------------------------------------------------------
# Reading


# What DCP's own .metadata is made of. Everything else in a pickle is refused, unexecuted.
_ALLOWED_GLOBALS = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "TensorProperties",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED_GLOBALS.get(module, ()):
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype) and not name.startswith(("q", "bits")):  # no numbers
            return found
        raise Damaged(f".metadata contains {module}.{name}, which this code never writes: refused")


# Size of an opcode's argument, or of the length before it. Those that DCP never needs are absent:
# ended by a newline, of 8 bytes' length, or a number that pickle makes a table as long as.
_LENGTHS = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4U: 4}
_ARGUMENTS = {
    op.code.encode("latin-1"): op.arg.n if op.arg else 0
    for op in pickletools.opcodes
    if op.name != "LONG_BINPUT" and (op.arg is None or op.arg.n >= 0 or op.arg.n in _LENGTHS)
}
_FRAME, _ARGUMENT_LIMIT = b"\x95", 2**20


def _check_pickle(file: Any) -> None:
    """Damaged where pickle would take much more memory than it has read."""
    while (opcode := file.read(1)) != b".":
        if not opcode:
            raise EOFError
        if opcode not in _ARGUMENTS:
            raise Damaged(f".metadata has an opcode {opcode!r}, which this code never writes")
        size = _ARGUMENTS[opcode]
        if size < 0:
            size = int.from_bytes(file.read(_LENGTHS[size]), "little")
        argument = file.read(min(size, _ARGUMENT_LIMIT))
        if opcode == _FRAME:
            size = int.from_bytes(argument, "little")
        if size > _ARGUMENT_LIMIT:
            raise Damaged(f".metadata has an argument of {size} bytes")


def _open(path: Path, buffering: int = 0) -> Any:
    """A regular file of a checkpoint: a pipe would be waited for, a link lead elsewhere."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise Damaged(f"{path.parent}: {path.name} is not a regular file")
    return path.open("rb", buffering)


class _Reader(FileSystemReader):
    """DCP's reader, without its trust in what it reads: values alone, never a pickle.

    With `once` nobody else reads the same bytes: the kernel need not keep them.
    """

    def __init__(self, folder: Path, metadata: Metadata, once: bool = False) -> None:
        super().__init__(folder)
        self.known, self.once = metadata, once and hasattr(os, "posix_fadvise")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.known

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        with ExitStack() as stack:
            opened: dict[str, io.FileIO] = {}
            for item in plan.items:
                name = self.storage_data[item.storage_index].relative_path
                if name not in opened:
                    opened[name] = stack.enter_context(_open(Path(self.path) / name))
                self._read_into(planner.resolve_tensor(item).detach(), item, opened[name])
        return super().read_data(replace(plan, items=[]), planner)

    def _read_into(self, target: Tensor, item: ReadItem, file: io.FileIO) -> None:
        """Read the wanted rows of a saved part, straight into a tensor that lies as they do.

        Where memory is new, most time goes into the kernel's work on its pages: a copy doubles it,
        and taking pages back from the file's cache, when memory is short, doubles it again.
        """
        entry: Any = self.known.state_dict_metadata[item.storage_index.fqn]
        sizes = next(c.sizes for c in entry.chunks if c.offsets == item.storage_index.offset)
        dtype, lengths = entry.properties.dtype, tuple(item.lengths)
        values = _values_offset(file, self.storage_data[item.storage_index], sizes, dtype)
        rows_above = item.storage_offsets[0] if sizes else 0
        begin = values + rows_above * math.prod(sizes[1:]) * dtype.itemsize
        rows, straight = target, target.device.type == "cpu" and target.dtype == dtype
        if not straight or not target.is_contiguous() or lengths[1:] != sizes[1:]:
            rows = torch.empty((*lengths[:1], *sizes[1:]), dtype=dtype)
        file.seek(begin)
        left: Any = memoryview(rows.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        while left:
            count = file.readinto(left)
            if not count:
                raise OSError(errno.EIO, "ended early", file.name)
            left = left[count:]
        if rows is not target:
            for dim in range(1, rows.ndim):
                rows = rows.narrow(dim, item.storage_offsets[dim], lengths[dim])
            target.copy_(rows)
        if self.once:
            os.posix_fadvise(file.fileno(), begin, rows.nbytes, os.POSIX_FADV_DONTNEED)


def _values_offset(file: io.FileIO, place: Any, sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Where the values of a saved part begin, in the archive by torch.save that lies in a file.

    Nothing of the archive is executed. Damaged where it has not just these, uncompressed.
    """
    end = place.offset + place.length
    tail = max(place.offset, end - 2**16)  # an archive's table is at its end
    file.seek(tail)
    try:
        with zipfile.ZipFile(io.BytesIO(file.read(end - tail))) as archive:
            (record,) = (r for r in archive.infolist() if re.search(r"/data/\d+$", r.filename))
        header = tail + record.header_offset  # the offset is told from `tail`, and may be < 0
        if header >= place.offset and record.compress_type == zipfile.ZIP_STORED:
            # 30 bytes, of which the last tell the lengths of what follows before the values
            file.seek(header + 26)
            begin = header + 30 + sum(int.from_bytes(file.read(2), "little") for _ in range(2))
            size = math.prod(sizes) * dtype.itemsize
            if begin + size <= end and record.file_size == size:
                return begin
    except OSError:
        raise
    except Exception:  # zipfile has many
        pass
    where = Path(str(file.name))
    raise Damaged(f"{where.parent}: no plain tensor lies at byte {place.offset} of {where.name}")


def read_metadata(folder: Path) -> Metadata:
    """DCP's index of a checkpoint, read without executing anything.

    Damaged unless it names whole tensors and, for each part, a place in a file of the manifest.
    """
    files = read_manifest(folder)["files"]
    try:
        with _open(folder / ".metadata", -1) as file:
            _check_pickle(file)
            file.seek(0)
            metadata = _RestrictedUnpickler(file).load()
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        if not (isinstance(tensors, dict) and isinstance(places, dict)):
            raise Damaged(".metadata holds no tables")
        room = sum(size for size, _ in files.values())
        for name, entry in tensors.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise Damaged(f"{name} is not a tensor but a pickled object")
            # Python's own arithmetic, which does not overflow: what is read here is believed later.
            values = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if values != math.prod(entry.size):
                raise Damaged(f"{name} has {values} of {math.prod(entry.size)} values")
            if _overlap(entry.chunks):  # then as many values are missing elsewhere
                raise Damaged(f"{name} has overlapping parts")
            for chunk in entry.chunks:
                ends = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
                if any(not 0 <= start <= start + n <= size for start, n, size in ends):
                    raise Damaged(f"{name} has a part outside its shape")
                index = MetadataIndex(name, chunk.offsets)
                place = places[index].relative_path if index in places else "no file"
                if not re.fullmatch(r"__\d+_\d+\.distcp", place) or place not in files:
                    raise Damaged(f"{name} has no valid file in this checkpoint ({place})")
                start, length = places[index].offset, places[index].length
                needed = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
                if not 0 <= start <= start + length <= files[place][0] or needed > length:
                    raise Damaged(f"{name} does not fit at its position in {place}")
                if getattr(places[index], "transform_descriptors", None):
                    raise Damaged(
                        f"{name} is compressed or transformed, which this code never does"
                    )
                room -= needed
        if room < 0:
            raise Damaged(f"the tensors need {-room} bytes more than the files contain")
    except OSError:
        raise
    except Damaged as error:
        raise Damaged(f"{folder}: {error}") from None
    except Exception as error:
        raise Damaged(f"{folder}: .metadata is not readable ({type(error).__name__})") from None
    metadata.storage_meta = None
    return metadata


def _overlap(chunks: Sequence[Any]) -> bool:
    """Whether two parts of a tensor (offsets, sizes) have a value in common."""
    boxes = [(tuple(c.offsets), tuple(map(operator.add, c.offsets, c.sizes))) for c in chunks]
    boxes = sorted(box for box in boxes if all(map(operator.lt, *box)))
    for i, (begin, end) in enumerate(boxes):
        for later, its_end in (boxes[k] for k in range(i + 1, len(boxes))):
            if later[:1] >= end[:1]:
                break  # and so do all that follow: slices of rows are compared once each
            if all(map(operator.lt, begin, its_end)) and all(map(operator.lt, later, end)):
                return True
    return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and validate the manifest of a checkpoint; Damaged where a field is not valid."""
    try:
        with _open(folder / MANIFEST) as file:
            text = file.read(MANIFEST_LIMIT + 1)
        manifest = json.loads(text.decode() if len(text) <= MANIFEST_LIMIT else "")
        version, step, files = manifest["format"], manifest["step"], manifest["files"]
        if version not in (1, FORMAT):
            raise Damaged(f"{folder} has format {version}, this code reads {FORMAT}")
        if version > 1 and manifest.pop("checksum") != _checksum(manifest):
            raise Damaged(f"{folder}: checksum mismatch in {MANIFEST}")
        numbers = [step, *(number for pair in files.values() for number in pair)]
        if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or step >= 10**12:
            raise ValueError("not numbers")
        if any(len(pair) != 2 for pair in files.values()) or ".metadata" not in files:
            raise ValueError("no index")  # it would be read unchecked
        for name in files:
            if not re.fullmatch(r"\.metadata|__[0-9]+_[0-9]+\.distcp", name):
                raise Damaged(f"{folder}: {MANIFEST} names {name!r}, which this code never writes")
        if re.fullmatch(r"step_[0-9]{8,}", folder.name) and step != step_of(folder):
            raise Damaged(f"{folder}: {MANIFEST} belongs to step {step}")
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{folder} is not a checkpoint: it contains no {MANIFEST}") from None
    except (Damaged, OSError):
        raise
    except Exception as error:
        raise Damaged(f"{folder}: {MANIFEST} is not readable ({type(error).__name__})") from None
    return manifest


def check(folder: Path, part: int = 0, parts: int = 1) -> tuple[dict[str, Any], Metadata]:
    """Manifest and index of a checkpoint; Damaged where every `parts`-th file is not as listed."""
    manifest = read_manifest(folder)
    shards = sorted(manifest["files"].keys() - {".metadata"})[part::parts]
    for name in (".metadata", *shards):
        size, crc = manifest["files"][name]
        with _open(folder / name) as file:
            found = os.fstat(file.fileno()).st_size
        if found != size:
            raise Damaged(f"{folder}: {name} has {found} bytes, not {size}")
        if _size_and_crc(folder / name) != (size, crc):
            raise Damaged(f"{folder}: checksum mismatch in {name}")
    metadata = read_metadata(folder)
    entries: dict[str, Any] = metadata.state_dict_metadata
    with ExitStack() as stack:
        opened = {name: stack.enter_context(_open(folder / name)) for name in shards}
        for name, entry in entries.items():
            for chunk in entry.chunks:
                place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                if place.relative_path in opened:
                    file = opened[place.relative_path]
                    _values_offset(file, place, chunk.sizes, entry.properties.dtype)
    return manifest, metadata


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, by step: those that were renamed, damaged or not.

    OSError where the folder cannot be listed: that does not mean that there are none.
    """
    try:
        with os.scandir(folder) as entries:
            named = [e for e in entries if re.fullmatch(r"step_[0-9]{8,}", e.name)]
            return sorted((Path(e.path) for e in named if e.is_dir()), key=step_of)
    except FileNotFoundError:
        return []


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizer; returns its manifest. Collective.

    Everything is checked first, the checksums by all ranks in turns: Damaged or OSError, the same
    on all ranks, leaves model and optimizer as they were. Where reading fails after that, by
    OSError or RuntimeError, they hold a part of it: to be loaded again, or thrown away.
    """
    folder = Path(folder)
    wanted = _expected_shapes(model)
    found: tuple[dict[str, Any], Metadata] | None = None
    problem: Exception | None = None
    try:
        found = check(folder, dist.get_rank(), dist.get_world_size())
        _check_names_and_shapes(folder, wanted, found[1])
    except (Damaged, OSError) as error:
        problem = error
    problems: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=group)
    _raise_first(folder, dict(enumerate(problems)))
    assert found
    manifest, metadata = found
    _create_adamw_state(
        _local_optimizer(optimizer), torch.empty_like
    )  # all of it is about to be overwritten
    tensors = named_tensors(model, optimizer)
    states = (t for name, t in tensors.items() if name.startswith("optim.") and t.ndim)
    once = all(_is_sharded(tensor) for tensor in states)
    try:
        dcp.load(tensors, storage_reader=_Reader(folder, metadata, once), process_group=group)
    except CheckpointException as error:
        _raise_first(folder, {rank: wrapped[0] for rank, wrapped in error.failures.items()})
        raise RuntimeError(f"{folder} could not be loaded: {error.failures}") from None
    _restore_state(model, optimizer, tensors)
    return manifest


def _raise_first(folder: Path, problems: Mapping[int, BaseException | None]) -> None:
    """Of what the ranks have met: an error of this moment, if there is one, before any damage."""
    for rank, problem in problems.items():
        if isinstance(problem, OSError):
            raise OSError(f"{folder} cannot be read: {problem} (rank {rank})")
    for problem in problems.values():
        if isinstance(problem, Damaged):
            raise Damaged(str(problem))


def _is_sharded(tensor: Tensor) -> bool:
    """Whether no two ranks hold the same part of it."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() != dist.get_world_size():
        return False
    dims = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return all(size == 1 or placement.is_shard() for size, placement in dims)


def _expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names and whole shapes of all that `named_tensors` gives for AdamW. Collective."""
    whole: dict[str, Any] = dict(get_model_state_dict(model))
    shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in whole.items()}
    for name in whole.keys() - {_unwrapped_name(n) for n, _ in model.named_buffers()}:
        shapes[f"optim.state.{name}.step"] = ()
        for leaf in ("exp_avg", "exp_avg_sq"):
            shapes[f"optim.state.{name}.{leaf}"] = shapes[f"model.{name}"]
    return shapes


def _check_names_and_shapes(
    folder: Path, wanted: dict[str, tuple[int, ...]], metadata: Metadata
) -> None:
    """Names and whole shapes must be the model's: nothing missing, nothing more; else Damaged."""
    entries: dict[str, Any] = metadata.state_dict_metadata
    found = {name: tuple(entry.size) for name, entry in entries.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            raise Damaged(f"{folder} has no {name}")
        if name not in wanted:
            raise Damaged(f"{folder} has {name}, which this model does not have")
        if found[name] != wanted[name]:
            raise Damaged(f"{folder}: {name} has shape {found[name]}, not {wanted[name]}")


# ---------------------------------------------------------------------------------------------
# On a login node: no GPU, no ranks


def ls(folder: str) -> list[str]:
    """A line for each checkpoint of a folder: step, bytes, files, how it was trained."""
    lines = []
    for path in list_checkpoints(folder):
        try:
            manifest = read_manifest(path)
        except (Damaged, OSError) as error:
            lines.append(f"{path.name}  unreadable: {error}")
            continue
        size = sum(size for size, _ in manifest["files"].values())
        flags = manifest["flags"] if isinstance(manifest.get("flags"), dict) else {}
        how = " ".join(str(flags[k]) for k in ("model", "mode", "world_size") if k in flags)
        lines.append(
            f"{path.name}  {size / 2**30:8.3f} GiB  {len(manifest['files']):5} files  {how}"
        )
    return lines


def verify(folder: str | Path) -> int:
    """Read a whole checkpoint: checksums, index, where each tensor lies; the number of tensors."""
    _, metadata = check(Path(folder))
    return len(metadata.state_dict_metadata)


def _read_whole(folder: Path, metadata: Metadata, names: list[str]) -> dict[str, Tensor]:
    """Whole tensors by name, without ranks; Damaged where they cannot be read."""
    entries: dict[str, Any] = {name: metadata.state_dict_metadata[name] for name in names}
    try:
        whole = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no ranks is as it should be
            dcp.load(whole, storage_reader=_Reader(folder, metadata), no_dist=True)
    except CheckpointException as error:
        raise error.failures[0][0] from None
    return whole


def consolidate(folder: str | Path, out: str | Path) -> int:
    """Write the model alone to one file with the keys of the official MAE release; parameters.

    `torch.load(out, weights_only=True)["model"]` is what `load_state_dict` takes. Damaged where the
    checkpoint cannot be read, OSError where the file cannot be written; then nothing is left of it.
    """
    folder, out = Path(folder), Path(out)
    new = out.with_name(out.name + ".new")
    try:
        new.unlink(missing_ok=True)  # which may be a link, or a pipe
        with new.open("xb") as file:  # before minutes of reading
            manifest, metadata = check(folder)
            names = [n for n in metadata.state_dict_metadata if n.startswith("model.")]
            whole = _read_whole(folder, metadata, names)
            model = {n.removeprefix("model."): t for n, t in whole.items()}
            torch.save({"model": model, "step": manifest["step"]}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(out)
    except (OSError, RuntimeError) as error:
        if isinstance(cause := _root_cause(error), OSError):
            raise OSError(f"{out} was not written: {cause}") from None
        raise
    finally:
        with suppress(OSError):
            new.unlink()
    return sum(t.numel() for n, t in model.items() if not n.endswith("pos_embed"))


def main(argv: Sequence[str] | None = None) -> int:
    """The three commands; exit status 1 for a damaged checkpoint, 2 for bad usage."""
    parser = argparse.ArgumentParser(description="List, verify, consolidate checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, helped in (
        ("ls", "what is in a run's folder"),
        ("verify", "read all of one"),
        ("consolidate", "one plain file with the model"),
    ):
        command = commands.add_parser(name, help=helped)
        command.add_argument("dir", help="a run's folder" if name == "ls" else "step_XXXXXXXX")
        if name == "consolidate":
            command.add_argument("out", help="the file to write")
    args = parser.parse_args(argv)
    into = os.path.dirname(args.out) or "." if args.command == "consolidate" else args.dir
    for folder in (args.dir, into):
        if not os.path.isdir(folder):
            parser.error(f"there is no folder {folder}")
    if args.command == "consolidate" and os.path.isdir(args.out):
        parser.error(f"{args.out} is a folder: give the file to write")
    try:
        if args.command == "ls":
            print("\n".join(ls(args.dir)) or f"no checkpoint in {args.dir}")
        elif args.command == "verify":
            print(f"{args.dir} is complete: {verify(args.dir)} tensors")
        else:
            print(f"{args.out}: {consolidate(args.dir, args.out):,} parameters")
    except (Damaged, OSError) as error:
        print(f"checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with suppress(ImportError):  # copied alone, it does without
        from runtime import terminal

        terminal.make_safe()
    raise SystemExit(main())
