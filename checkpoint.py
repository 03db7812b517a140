"""Sharded checkpoints that load anywhere: written by any mode, engine and world size, read by any.

On `torch.distributed.checkpoint` (DCP): every rank writes its shards, each replica once, and reads
what it needs of anybody's. Parameters and optimizer states go by their names in the model, so that
neither the wrapping nor the number of ranks shows. One checkpoint is one folder:

    step_00000100/checkpoint.json    step, flags, format, size and sum of every other file
                  .metadata          which tensor lies where (DCP's own, a pickle: read with care)
                  __0_0.distcp       the shards that rank 0 wrote

It is written under another name, made durable, and renamed: a folder of that name is complete.

    python checkpoint.py ls DIR                 what is there
    python checkpoint.py verify DIR             every file there, its sum right, every tensor whole
    python checkpoint.py consolidate DIR OUT    one plain file with the official MAE's names

Copy this one file: it needs torch alone.
"""

import argparse
import io
import json
import math
import operator
import os
import pickle
import re
import shutil
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
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

FORMAT = 1  # of the folder; raised when older code could not read it
FACTS = "checkpoint.json"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Damaged(ValueError):
    """A checkpoint that cannot be loaded, and why, in one sentence."""


# ---------------------------------------------------------------------------------------------
# Model and optimizer as named tensors


def _plain_name(name: str) -> str:
    """The name that a parameter or buffer had before it was wrapped."""
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself; within ZeRO-1's the one that updates this rank's parameters."""
    return getattr(optimizer, "optim", optimizer)


def _make_states(
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
                    "exp_avg": moment(p.detach()), "exp_avg_sq": moment(p.detach()),
                }  # fmt: skip


def _zero1_states(model: nn.Module, inner: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The states of the parameters that this rank updates."""
    names = {p: _plain_name(n) for n, p in model.named_parameters()}
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
    inner = _inner(optimizer)
    if isinstance(inner, torch.optim.AdamW):
        _make_states(inner)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        states: dict[str, Any] = dict(_zero1_states(model, inner))
    else:
        states = dict(get_optimizer_state_dict(model, optimizer, options=FLAT))
    return tensors | {f"optim.{n}": t for n, t in states.items() if n.startswith("state.")}


def _put_back(
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


def _sum(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file; the next block is read while one is summed."""
    size = crc = turn = 0
    blocks = [memoryview(bytearray(2**23)) for _ in range(2)]
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as reader:
        coming = reader.submit(file.readinto, blocks[0])
        while count := coming.result():
            block, turn = blocks[turn], 1 - turn
            coming = reader.submit(file.readinto, blocks[turn])
            size, crc = size + count, zlib.crc32(block[:count], crc)
    return size, crc


def _write_durably(path: Path, text: str) -> None:
    """Replace a small file so that a crash leaves the old text or the new."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
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

    def __init__(self, folder: Path, step: int, facts: dict[str, Any], keep: int) -> None:
        self.out, self.final = folder, folder / f"step_{step:08d}"
        self.temporary = folder / f".step_{step:08d}.writing"
        self.facts, self.keep = facts, keep
        super().__init__(self.temporary, sync_files=True)
        self.fs: Any = _Files()

    def write_data(self, plan: Any, planner: Any) -> Any:
        twice = get_crc32_options()
        set_crc32_options(False)  # of each tensor by torch.save: _Files takes the sum of all
        try:
            future = super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save, ending its file after the disk was full, fails again, in its own words.
            first: BaseException = error
            while first.__context__:
                first = first.__context__
            raise (first if isinstance(first, OSError) else error) from None
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
        _write_durably(self.temporary / FACTS, json.dumps(self.facts | {"files": files}, indent=1))
        _sync_folder(self.temporary)
        gone = []
        if self.final.exists():  # saved again after a resume from an older step
            gone.append(_set_aside(self.final))
        self.temporary.rename(self.final)
        _write_durably(self.out / "latest", self.final.name + "\n")
        older = [p for p in complete(self.out) if p.name <= self.final.name]
        with suppress(OSError):
            gone += [_set_aside(old) for old in older[: -self.keep]]
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)


def save(
    folder: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *,
    facts: dict[str, Any], keep: int = 2, group: dist.ProcessGroup | None = None,
) -> str | None:  # fmt: skip
    """Write `folder`/step_XXXXXXXX from all ranks and name it in `latest`; keep the newest `keep`.

    `facts` (JSON) is kept beside the tensors. `group` coordinates: one of gloo, so that nothing is
    gathered in a GPU's memory. Returns None, or on every rank the same sentence why it could not be
    written; then the older checkpoints are as they were. Collective.
    """
    writer = _Writer(Path(folder), step, facts | {"format": FORMAT, "step": step}, keep)
    return _write(named_tensors(model, optimizer), writer, group)


def _write(
    tensors: dict[str, Tensor], writer: _Writer, group: dist.ProcessGroup | None
) -> str | None:
    first = dist.get_rank() == 0
    if first:
        _clear(writer.out)  # what a killed process left
    dist.barrier(group)  # nobody writes before that
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except (Exception, CheckpointException) as error:  # the latter, no Exception, has all ranks'
        if first:
            _clear(writer.out)
        failures = getattr(error, "failures", {0: (error,)})
        return _sentence(writer.facts["step"], {r: f[0] for r, f in failures.items()})
    return None


def _sentence(step: int, errors: dict[int, BaseException]) -> str:
    reasons = sorted(f"{type(e).__name__}: {e} (rank {r})" for r, e in errors.items())
    return f"step {step} was not saved: {'; '.join(reasons)}"


class Saver:
    """The checkpoints of one run, one at a time; in the `background`, if wanted, while it trains.

    In the background the tensors are copied in host memory first, which is all that training waits
    for, and written by a thread. `group` must then be nobody else's: two threads that wait in one
    group wait for ever. Whether a save went well is learned at the next one, by all ranks alike.
    """

    def __init__(
        self, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: int = 2,
        group: dist.ProcessGroup | None = None, background: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer
        self.keep, self.group = keep, group
        self.thread = ThreadPoolExecutor(1) if background else None
        self.pending: Future[str | None] | None = None
        self.failures = 0  # in a row
        self.step = self.saved = 0  # of the newest attempt; of the newest that is on disk

    def save(self, step: int, facts: dict[str, Any], wait: bool = True) -> list[str]:
        """As the function `save`; `wait` for its end, in the background too. Collective.

        Returns a sentence for each save that turned out to have failed: this one and, in the
        background, the one before.
        """
        problems = self.finish()
        if self.failures == 2 and not wait:
            return problems  # enough
        self.step = step
        writer = _Writer(self.folder, step, facts | {"format": FORMAT, "step": step}, self.keep)
        tensors = named_tensors(self.model, self.optimizer)
        if self.thread is None:
            return problems + self._ended(_write(tensors, writer, self.group))
        errors: list[Exception | None] = [None] * dist.get_world_size()
        mine = None
        try:
            tensors = writer.stage(tensors)  # copies: training goes on to change the originals
        except Exception as error:  # no memory for them
            mine = error
        dist.all_gather_object(errors, mine, group=self.group)
        if any(errors):
            problem = _sentence(step, {r: e for r, e in enumerate(errors) if e})
            return problems + self._ended(problem)
        self.pending = self.thread.submit(_write, tensors, writer, self.group)
        return problems + (self.finish() if wait else [])

    def finish(self) -> list[str]:
        """Wait for the save that is under way, if one is; as `save`. Collective."""
        pending, self.pending = self.pending, None
        return self._ended(pending.result()) if pending else []

    def _ended(self, problem: str | None) -> list[str]:
        self.failures = self.failures + 1 if problem else 0
        self.saved = self.saved if problem else self.step
        return [problem] if problem else []


def _set_aside(checkpoint: Path) -> Path:
    """Rename what is to be removed: a kill meanwhile must not leave half of it under its name."""
    aside = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)


def _clear(folder: Path) -> None:
    """Remove what a kill left, as far as that can be done: no reason to fail, or to hang."""
    with suppress(OSError):
        for left in folder.glob(".step_*"):
            if left.suffix in (".writing", ".removed"):
                shutil.rmtree(left, ignore_errors=True)


# ---------------------------------------------------------------------------------------------
# Reading


# What DCP's own .metadata is made of. Everything else in a pickle is refused, unexecuted.
_PLAIN = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise Damaged(f".metadata names {module}.{name}, which no checkpoint of ours does")


class _Reader(FileSystemReader):
    """DCP's reader, without its trust in what it reads.

    With `once` nobody else reads the same bytes: the kernel need not keep them.
    """

    def __init__(self, folder: Path, metadata: Metadata, once: bool = False) -> None:
        super().__init__(folder)
        self.known, self.once = metadata, once and hasattr(os, "posix_fadvise")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.known

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        """Straight into the tensors that lie as in the file; the others DCP's way, by a copy.

        Where memory is new, most time goes into the kernel's work on its pages: a copy doubles it,
        and taking pages back from the file's cache, when memory is short, doubles it again.
        """
        others = []
        with ExitStack() as stack:
            opened: dict[str, io.FileIO] = {}
            for item in plan.items:
                name = self.storage_data[item.storage_index].relative_path
                if name not in opened:
                    opened[name] = stack.enter_context((Path(self.path) / name).open("rb", 0))
                if not self._read_into(planner.resolve_tensor(item).detach(), item, opened[name]):
                    others.append(item)
        return super().read_data(replace(plan, items=others), planner)

    def _read_into(self, target: Tensor, item: ReadItem, file: io.FileIO) -> bool:
        """Read whole rows of a saved part that lie so in memory; False where that cannot be."""
        entry: Any = self.known.state_dict_metadata[item.storage_index.fqn]
        sizes = next(c.sizes for c in entry.chunks if c.offsets == item.storage_index.offset)
        dtype = entry.properties.dtype
        if target.device.type != "cpu" or target.dtype != dtype or not target.is_contiguous():
            return False
        if target.shape[1:] != sizes[1:]:
            return False
        found = _numbers(file, self.storage_data[item.storage_index])
        if not found or found[1] != math.prod(sizes) * dtype.itemsize:
            return False
        rows_above = item.storage_offsets[0] if sizes else 0
        begin = found[0] + rows_above * math.prod(sizes[1:]) * dtype.itemsize
        file.seek(begin)
        left: Any = memoryview(target.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        while left:
            count = file.readinto(left)
            if not count:
                raise EOFError(f"{file.name} ended early")
            left = left[count:]
        if self.once:
            os.posix_fadvise(file.fileno(), begin, target.nbytes, os.POSIX_FADV_DONTNEED)
        return True


def _numbers(file: io.FileIO, place: Any) -> tuple[int, int] | None:
    """First byte and size of the one tensor in an archive of torch.save, which lies in a file.

    None where that is not one uncompressed record. Nothing of the archive is executed.
    """
    end = place.offset + place.length
    tail = max(place.offset, end - 2**16)  # an archive's table is at its end
    file.seek(tail)
    try:
        with zipfile.ZipFile(io.BytesIO(file.read(end - tail))) as archive:
            (record,) = (r for r in archive.infolist() if re.search(r"/data/\d+$", r.filename))
    except (zipfile.BadZipFile, ValueError):
        return None
    # Before the numbers stand 30 bytes, of which the last tell the lengths of what follows them.
    file.seek(tail + record.header_offset + 26)  # the offset is told from `tail`, and may be < 0
    begin = file.tell() + 4 + sum(int.from_bytes(file.read(2), "little") for _ in range(2))
    inside = place.offset <= begin <= begin + record.file_size <= end
    stored = record.compress_type == zipfile.ZIP_STORED
    return (begin, record.file_size) if inside and stored else None


def read_metadata(folder: Path) -> Metadata:
    """DCP's index of a checkpoint, read without executing anything.

    Damaged unless it names whole tensors, and for each part a place in a file that the facts list.
    """
    files = read_facts(folder)["files"]
    try:
        metadata = _PlainUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        if not (isinstance(tensors, dict) and isinstance(places, dict)):
            raise Damaged(".metadata holds no tables")
        room = sum(size for size, _ in files.values())
        for name, entry in tensors.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise Damaged(f"{name} is no tensor but a pickled object")
            # Python's own arithmetic, which does not overflow: what is read here is believed later.
            values = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if values != math.prod(entry.size):
                raise Damaged(f"{name} has {values} of {math.prod(entry.size)} values")
            if _overlap(entry.chunks):  # then as many values are missing elsewhere
                raise Damaged(f"{name} has a part that lies over another")
            for chunk in entry.chunks:
                ends = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
                if any(not 0 <= start <= start + n <= size for start, n, size in ends):
                    raise Damaged(f"{name} has a part that lies outside of it")
                index = MetadataIndex(name, chunk.offsets)
                place = places[index].relative_path if index in places else "no file"
                if not re.fullmatch(r"__\d+_\d+\.distcp", place) or place not in files:
                    raise Damaged(f"{name} lies in {place}, which is no file of this checkpoint")
                start, length = places[index].offset, places[index].length
                needed = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
                if not 0 <= start <= start + length <= files[place][0] or needed > length:
                    raise Damaged(f"{name} does not fit where it should lie in {place}")
                if getattr(places[index], "transform_descriptors", None):
                    raise Damaged(f"{name} is compressed or the like, which ours never are")
                room -= needed
        if room < 0:
            raise Damaged(f"{-room} more bytes of tensors than its files have")
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


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of a complete checkpoint; Damaged where they are missing or of another format."""
    try:
        if (folder / FACTS).exists() and not (folder / FACTS).is_file():
            raise ValueError("a pipe would be waited for")
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        version = facts["format"]
        whole = [facts["step"], *(number for pair in facts["files"].values() for number in pair)]
        pairs = facts["files"].values()
        if not all(type(n) is int and n >= 0 for n in whole) or any(len(p) != 2 for p in pairs):
            raise ValueError("not numbers")
        if ".metadata" not in facts["files"]:
            raise ValueError("no index")  # it would be read unchecked
    except FileNotFoundError:
        raise Damaged(f"{folder} is no checkpoint: it has no {FACTS}") from None
    except Exception as error:
        raise Damaged(f"{folder}: {FACTS} is not readable ({type(error).__name__})") from None
    if version != FORMAT:
        raise Damaged(f"{folder} has format {version}, this code reads {FORMAT}")
    return facts


def check_files(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Compare every file's size, and each `parts`-th file's sum, with the facts; else Damaged."""
    files = read_facts(folder)["files"]
    for i, (name, (size, crc)) in enumerate(sorted(files.items())):
        path = folder / name
        if os.path.basename(name) != name or path.is_symlink():
            raise Damaged(f"{folder}: {name} leaves the folder")
        if not path.is_file() or path.stat().st_size != size:
            found = path.stat().st_size if path.is_file() else "no"
            raise Damaged(f"{folder}: {name} has {found} bytes, not {size}")
        if i % parts == part and _sum(path) != (size, crc):
            raise Damaged(f"{folder}: the sum of {name} is wrong")


def complete(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, oldest first: those that were renamed, damaged or not."""
    found = Path(folder).glob("step_*")
    return sorted(p for p in found if re.fullmatch(r"step_\d{8,}", p.name) and p.is_dir())


def candidates(folder: str | Path) -> list[Path]:
    """Which checkpoints to try, best first: the one that `latest` names, then by falling step."""
    found = complete(folder)[::-1]
    try:
        name = Path(folder) / "latest"
        latest = name.read_text().strip() if name.is_file() else ""  # a pipe would be waited for
    except (OSError, ValueError):  # the latter: not even text
        latest = ""
    return sorted(found, key=lambda p: p.name != latest)  # a stable sort


def load(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Load a checkpoint into a sharded model and its optimizer; returns its facts. Collective.

    Everything is checked first, the sums by all ranks in turns: Damaged, raised on all ranks alike,
    leaves model and optimizer as they were. RuntimeError where reading fails after that: then they
    hold a part of it, to be thrown away.
    """
    folder = Path(folder)
    wanted = _shapes(model)
    problem: str | None = None
    try:
        facts = read_facts(folder)
        check_files(folder, dist.get_rank(), dist.get_world_size())
        metadata = read_metadata(folder)
        _compare(folder, wanted, metadata)
    except (Damaged, OSError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=group)
    for problem in problems:
        if problem:
            raise Damaged(problem)
    _make_states(_inner(optimizer), torch.empty_like)  # all of it is about to be overwritten
    tensors = named_tensors(model, optimizer)
    states = (t for name, t in tensors.items() if name.startswith("optim.") and t.ndim)
    once = all(_is_sharded(tensor) for tensor in states)
    try:
        dcp.load(tensors, storage_reader=_Reader(folder, metadata, once), process_group=group)
    except CheckpointException as error:
        raise RuntimeError(f"{folder} could not be read to its end: {error.failures}") from None
    _put_back(model, optimizer, tensors)
    return facts


def _is_sharded(tensor: Tensor) -> bool:
    """Whether no two ranks hold the same part of it."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() != dist.get_world_size():
        return False
    dims = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return all(size == 1 or placement.is_shard() for size, placement in dims)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names and whole shapes of all that `named_tensors` gives for AdamW. Collective."""
    whole: dict[str, Any] = dict(get_model_state_dict(model))
    shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in whole.items()}
    for name in whole.keys() - {_plain_name(n) for n, _ in model.named_buffers()}:
        shapes[f"optim.state.{name}.step"] = ()
        for leaf in ("exp_avg", "exp_avg_sq"):
            shapes[f"optim.state.{name}.{leaf}"] = shapes[f"model.{name}"]
    return shapes


def _compare(folder: Path, wanted: dict[str, tuple[int, ...]], metadata: Metadata) -> None:
    """Names and whole shapes must be the model's: nothing missing, nothing more; else Damaged."""
    entries: dict[str, Any] = metadata.state_dict_metadata
    found = {name: tuple(entry.size) for name, entry in entries.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            raise Damaged(f"{folder} has no {name}")
        if name not in wanted:
            raise Damaged(f"{folder} has {name}, which this model has not")
        if found[name] != wanted[name]:
            raise Damaged(f"{folder}: {name} has shape {found[name]}, not {wanted[name]}")


# ---------------------------------------------------------------------------------------------
# On a login node: no GPU, no ranks


def listing(folder: str) -> list[str]:
    """A line for each checkpoint of a folder: step, bytes, files, how it was trained."""
    lines = []
    for path in complete(folder):
        try:
            facts = read_facts(path)
        except Damaged as error:
            lines.append(f"{path.name}  damaged: {error}")
            continue
        size = sum(size for size, _ in facts["files"].values())
        flags = facts.get("flags", {})
        how = " ".join(str(flags[k]) for k in ("model", "mode", "world_size") if k in flags)
        lines.append(f"{path.name}  {size / 2**30:8.3f} GiB  {len(facts['files']):5} files  {how}")
    return lines


def verify(folder: str | Path) -> int:
    """Read a whole checkpoint: sums, index, every tensor; the number of tensors, or Damaged."""
    folder = Path(folder)
    check_files(folder)
    metadata = read_metadata(folder)
    names = list(metadata.state_dict_metadata)
    for start in range(0, len(names), 100):  # not all of it in memory at once
        _read_whole(folder, metadata, names[start : start + 100])
    return len(names)


def _read_whole(folder: Path, metadata: Metadata, names: list[str]) -> dict[str, Tensor]:
    """Whole tensors by name, without ranks; Damaged where they cannot be read."""
    entries: dict[str, Any] = {name: metadata.state_dict_metadata[name] for name in names}
    try:
        whole = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no ranks is as it should be
            dcp.load(whole, storage_reader=_Reader(folder, metadata), no_dist=True)
    except (Exception, CheckpointException) as error:
        raise Damaged(f"{folder} is not readable: {error}") from None
    return whole


def consolidate(folder: str | Path, out: str | Path) -> int:
    """Write the model alone to one file with the keys of the official MAE release; parameters.

    `torch.load(out, weights_only=True)["model"]` is what `load_state_dict` takes. Damaged where the
    checkpoint cannot be read.
    """
    folder, out = Path(folder), Path(out)
    check_files(folder)
    metadata = read_metadata(folder)
    names = [n for n in metadata.state_dict_metadata if n.startswith("model.")]
    whole = _read_whole(folder, metadata, names)
    model = {n.removeprefix("model."): t for n, t in whole.items()}
    new = out.with_name(out.name + ".new")
    torch.save({"model": model, "step": read_facts(folder)["step"]}, new)
    new.replace(out)
    return sum(t.numel() for n, t in model.items() if not n.endswith("pos_embed"))


def main(argv: Sequence[str] | None = None) -> int:
    """The three commands; exit status 1 for a damaged checkpoint, 2 for bad usage."""
    parser = argparse.ArgumentParser(description="List, verify, consolidate checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, helped in (("ls", "what is in a run's folder"), ("verify", "read all of one"),
                         ("consolidate", "one plain file with the model")):  # fmt: skip
        command = commands.add_parser(name, help=helped)
        command.add_argument("dir", help="a run's folder" if name == "ls" else "step_XXXXXXXX")
        if name == "consolidate":
            command.add_argument("out", help="the file to write")
    args = parser.parse_args(argv)
    try:
        if args.command == "ls":
            print("\n".join(listing(args.dir)) or f"no checkpoint in {args.dir}")
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
        import terminal

        terminal.make_safe()
    raise SystemExit(main())
