"""Sharded checkpoints that load anywhere: saved by any mode, engine and world size, loaded by any.

Built on `torch.distributed.checkpoint` (DCP): each rank writes its own shards, every replica once,
and reads what it needs from the shards of all. Parameters and optimizer states are stored under
their names in the unwrapped model: neither the wrapping nor the number of ranks shows in a file.
One checkpoint is one folder:

    step_00000100/checkpoint.json    the manifest: step, flags, size and CRC-32 of all other files
                  .metadata          DCP's index: which tensor is where (a pickle: see below)
                  __0_0.distcp       the shards of rank 0

It is written under a temporary name, synced to the disk and renamed: a folder with the final name
is complete. One that cannot be loaded raises Damaged (for good) or an OSError (which may pass).

    python checkpoint.py ls DIR                 list the checkpoints of a run
    python checkpoint.py verify DIR             check every checksum and every tensor
    python checkpoint.py consolidate DIR OUT    write the model to one file, for other programs

Copy this one file: it needs only torch.
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
import os
import pickle
import re
import shutil
import stat
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as state_dicts
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.optim import ZeroRedundancyOptimizer

FORMAT = 2  # of the folder; raised when older code could not read it. 1: manifest without checksum
MANIFEST = "checkpoint.json"
MANIFEST_LIMIT = 2**22  # bytes: enough for 80,000 ranks, and little memory whatever it contains
READ_LIMIT = 2**20  # bytes read at once from a file whose content is not trusted yet
FLAT = state_dicts.StateDictOptions(flatten_optimizer_state_dict=True)


class Damaged(ValueError):
    """A checkpoint that cannot be loaded, and why, in one sentence."""


# ---------------------------------------------------------------------------------------------
# Model and optimizer as named tensors


def _unwrapped_name(name: str) -> str:
    """Return the name that a parameter or buffer has in the unwrapped model."""
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
    parts = name.removeprefix("module.").split(".")  # DDP's; a submodule further down keeps it
    return ".".join(part for part in parts if part not in wrappers)


def _is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the state is that of AdamW: two moments and a step count per parameter."""
    plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return plain and not any(group["amsgrad"] for group in optimizer.param_groups)


def _trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _create_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that AdamW lacks before its first step.

    DCP would take a step with zero gradients: a third more memory than the state needs.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and not optimizer.state[p]:
                device = p.device if group["fused"] or group["capturable"] else torch.device("cpu")
                optimizer.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor of the training state as this rank holds it. Collective.

    The names are "model.NAME" and "optim.state.NAME.LEAF"; sharded tensors are DTensors. Numbers
    that the flags decide (learning rate, betas) are not included. Tied parameters have all their
    names, and one state. Frozen parameters have none. Raises ValueError for an optimizer that was
    not built from this model, or has a state that cannot be saved.
    """
    tensors: dict[str, Any] = {
        f"model.{n}": t for n, t in state_dicts.get_model_state_dict(model).items()
    }
    inner = getattr(optimizer, "optim", optimizer)  # ZeRO-1 wraps the one of this rank's parameters
    if not {*_trained(optimizer)} <= {*model.parameters()}:
        raise ValueError("the optimizer has parameters of another model: build it after sharding")
    if _is_adam(inner):
        _create_adam_state(inner)
    elif isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ValueError(f"of mode zero1 only Adam and AdamW are saved, not {type(inner).__name__}")
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        names: dict[Any, str] = {p: _unwrapped_name(n) for n, p in model.named_parameters()}
        for p, state in inner.state.items():
            tensors |= {f"optim.state.{names[p]}.{leaf}": value for leaf, value in state.items()}
    else:
        states = state_dicts.get_optimizer_state_dict(model, optimizer, options=FLAT)
        tensors |= {f"optim.{n}": t for n, t in states.items() if n.startswith("state.")}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}, but only tensors are saved")
    return tensors


def _restore_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Set model and optimizer to tensors that were loaded into `named_tensors`. Collective."""
    parts: dict[str, dict[str, Any]] = {"model": {}, "optim": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    state_dicts.set_model_state_dict(model, parts["model"])
    if not isinstance(optimizer, ZeroRedundancyOptimizer):  # whose own tensors were loaded into
        states: Any = state_dicts.get_optimizer_state_dict(model, optimizer, options=FLAT)
        states |= parts["optim"]
        state_dicts.set_optimizer_state_dict(model, optimizer, states, options=FLAT)


def _expected_shapes(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, tuple[int, ...]]:
    """Return names and unsharded shapes of what `named_tensors` gives. Collective."""
    if not _is_adam(getattr(optimizer, "optim", optimizer)):
        return {name: tuple(t.shape) for name, t in named_tensors(model, optimizer).items()}
    # AdamW's state is known without creating it
    whole: dict[str, Any] = dict(state_dicts.get_model_state_dict(model))
    shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in whole.items()}
    trained = {*_trained(optimizer)}
    for name in [_unwrapped_name(n) for n, p in model.named_parameters() if p in trained]:
        shapes[f"optim.state.{name}.step"] = ()
        for leaf in ("exp_avg", "exp_avg_sq"):
            shapes[f"optim.state.{name}.{leaf}"] = shapes[f"model.{name}"]
    return shapes


# ---------------------------------------------------------------------------------------------
# Files


def _open(path: Path) -> io.BufferedReader:
    """Open a regular file of a checkpoint: a pipe would block, a link could lead anywhere."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise Damaged(f"{path.name} is not a regular file")
    return path.open("rb")


def _crc32(file: io.BufferedReader) -> int:
    """Return the CRC-32 of the rest of a file."""
    crc = 0
    while block := file.read(READ_LIMIT):
        crc = zlib.crc32(block, crc)
    return crc


def _size_and_crc(path: Path) -> tuple[int, int]:
    """Return what the manifest says of a file: its size in bytes and its CRC-32."""
    with _open(path) as file:
        return os.fstat(file.fileno()).st_size, _crc32(file)


@contextmanager
def _replacing(path: Path) -> Iterator[io.BufferedWriter]:
    """Open a new file that replaces `path`, durably, once its block has ended without error."""
    new = path.with_name(path.name + ".new")
    try:
        new.unlink(missing_ok=True)  # it may be a link, or a pipe
        with new.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # makes the new names in it durable
        os.close(folder)
    finally:
        with suppress(OSError):
            new.unlink()


def _rename_for_removal(checkpoint: Path) -> Path:
    """Rename a checkpoint: a kill while it is removed must not leave half of it under its name."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.removed"))


def _remove_leftovers(folder: Path) -> None:
    """Remove partial and renamed checkpoints as far as possible: no reason for a save to fail."""
    with suppress(OSError):
        for path in folder.glob(".step_*"):
            if path.suffix in (".writing", ".removed"):
                path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------------------------------------
# Saving


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, to a temporary folder that the coordinator completes and renames.

    DCP calls `finish` on one rank when all have written, and raises an error of any rank on all of
    them: a full disk on one rank fails the save on all.
    """

    def __init__(self, folder: Path, step: int, run_state: dict[str, Any], keep: int) -> None:
        self.out, self.final = folder, folder / f"step_{step:08d}"
        self.temporary = folder / f".{self.final.name}.writing"
        self.manifest = run_state | {"format": FORMAT, "step": step}
        self.keep = keep
        super().__init__(self.temporary, sync_files=True)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's shards; the checksums of its files follow DCP's own results."""
        if self.temporary.is_symlink():
            raise FileExistsError(f"{self.temporary} is a link: nothing is written where it leads")
        try:
            written: Any = super().write_data(plan, planner).value()
        except RuntimeError as error:
            raise _root_cause(error) from None
        names = {result.storage_data.relative_path for result in written}
        files = {name: _size_and_crc(self.temporary / name) for name in names}
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([*written, files])
        return future

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write index and manifest, rename the folder, remove older checkpoints."""
        files: dict[str, tuple[int, int]] = {}
        for result in results:  # of each rank
            files |= result.pop()
        super().finish(metadata, results)
        files[".metadata"] = _size_and_crc(self.temporary / ".metadata")
        manifest = json.loads(json.dumps(self.manifest | {"files": files}))
        manifest["checksum"] = _manifest_checksum(manifest)
        with _replacing(self.temporary / MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())
        replaced = _rename_for_removal(self.final) if self.final.exists() else None
        try:
            self.temporary.rename(self.final)
        except OSError:
            if replaced:
                replaced.rename(self.final)
            raise
        with _replacing(self.out / "latest") as file:
            file.write(f"{self.final.name}\n".encode())
        with suppress(OSError):
            steps = [p for p in list_checkpoints(self.out) if step_of(p) <= manifest["step"]]
            for old in steps[: -self.keep]:
                _rename_for_removal(old)
        _remove_leftovers(self.out)


def _root_cause(error: Exception) -> Exception:
    """Return the OSError behind an error of torch.save, which fails again as it closes its file."""
    first: BaseException = error
    while first.__context__:
        first = first.__context__
    return first if isinstance(first, OSError) else error


def _manifest_checksum(manifest: dict[str, Any]) -> int:
    """Return the CRC-32 of a manifest without its own checksum."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _write(
    tensors: dict[str, Tensor], writer: _Writer, group: dist.ProcessGroup | None
) -> str | None:
    """Write one checkpoint; return why it failed, the same sentence on all ranks. Collective."""
    first = dist.get_rank() == 0
    if first:
        _remove_leftovers(writer.out)
    dist.barrier(group)  # nobody writes before that
    try:
        for name, tensor in tensors.items():  # values are stored, and read, in the order of indices
            if isinstance(tensor, Tensor) and not tensor.is_contiguous():
                tensors = tensors | {name: tensor.contiguous()}
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        if first:
            _remove_leftovers(writer.out)
        failures = getattr(error, "failures", {0: (error,)})  # of all ranks
        return _failure_message(writer.manifest["step"], {r: f[0] for r, f in failures.items()})
    return None


def _failure_message(step: int, errors: Mapping[int, BaseException]) -> str:
    """Name every rank's error in one sentence."""
    reasons = sorted(f"{type(e).__name__}: {e} (rank {r})" for r, e in errors.items())
    return f"step {step} was not saved: {'; '.join(reasons)}"


class Saver:
    """Save the checkpoints of one run as `folder`/step_XXXXXXXX and keep the newest `keep`.

    `group` coordinates: a gloo group, or objects are gathered in GPU memory. With `background` a
    thread writes from a copy in host memory, and training waits only for the copy; `group` must
    then serve nothing else, because two threads in one group deadlock.
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
        """Save, and store `run_state` (JSON) in the manifest; `wait` for its end. Collective.

        Returns a sentence per failed save, the same on all ranks: this one and, in the background,
        the one before. A failed save leaves the older checkpoints as they were.
        """
        problems = self.finish()
        if self.failures == 2 and not wait:
            return problems  # two failed saves in a row: the caller ends the run
        self.step = step
        writer = _Writer(self.folder, step, run_state, self.keep)
        tensors = named_tensors(self.model, self.optimizer)
        if self.thread is None:
            return problems + self._record(_write(tensors, writer, self.group))
        error = None
        try:
            tensors = writer.stage(tensors)  # the copy: training changes the originals meanwhile
        except Exception as e:  # no memory for it
            error = e
        errors: list[Exception | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error, group=self.group)
        if any(errors):
            known = {rank: e for rank, e in enumerate(errors) if e}
            return problems + self._record(_failure_message(step, known))
        self.pending = self.thread.submit(_write, tensors, writer, self.group)
        return problems + (self.finish() if wait else [])

    def finish(self) -> list[str]:
        """Wait for the save in the background, if any, and return as `save` does. Collective."""
        pending, self.pending = self.pending, None
        return self._record(pending.result()) if pending else []

    def _record(self, problem: str | None) -> list[str]:
        self.failures = self.failures + 1 if problem else 0
        self.saved = self.saved if problem else self.step
        return [problem] if problem else []


def save(
    folder: str | Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run_state: dict[str, Any] | None = None,
    *,
    keep: int = 2,
) -> Path:
    """Save one checkpoint and return its folder; a run that saves often uses a `Saver`. Collective.

    Raises OSError, the same on all ranks, if it failed; the older checkpoints are kept then.
    """
    problems = Saver(str(folder), model, optimizer, keep=keep).save(step, run_state or {})
    if problems:
        raise OSError(problems[0])
    return Path(folder) / f"step_{step:08d}"


# ---------------------------------------------------------------------------------------------
# Loading: nothing in a file is trusted before it is checked


# Besides the classes of Metadata's own module: what DCP's index consists of.
_ALLOWED_GLOBALS = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class _RestrictedUnpickler(pickle._Unpickler):
    """Unpickle DCP's index without running code, in memory that is bounded by the file's size.

    Python's own unpickler, not C's: that one allocates a table as long as the largest memo index.
    """

    dispatch = pickle._Unpickler.dispatch.copy()
    del dispatch[pickle.BYTEARRAY8[0]]  # allocates before it reads

    def __init__(self, file: io.BufferedReader) -> None:
        def read(size: int) -> bytes:
            if size > READ_LIMIT:
                raise Damaged(f".metadata has an argument of {size} bytes")
            return file.read(size)

        source: Any = SimpleNamespace(read=read, readline=None)  # None: no text of unknown length
        super().__init__(source)

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle names, or raise Damaged."""
        if (module, name) in _ALLOWED_GLOBALS:
            return super().find_class(module, name)
        owner = sys.modules[module] if module in ("torch", Metadata.__module__) else None
        found = getattr(owner, name, None)
        if isinstance(found, type) and found.__module__ == Metadata.__module__:
            return found
        if isinstance(found, torch.dtype) and not name.startswith(("q", "bits")):  # no numbers
            return found
        where = f"{module}.{name}"
        raise Damaged(f".metadata contains {where!r}, which this code never writes: refused")


@contextmanager
def _refusing(folder: Path, name: str) -> Iterator[None]:
    """Raise Damaged, in one sentence, for any error but an OSError while a file is examined."""
    try:
        yield
    except OSError:
        raise
    except Damaged as error:
        raise Damaged(f"{folder}: {error}") from None
    except Exception as error:
        raise Damaged(f"{folder}: {name} is not readable ({type(error).__name__})") from None


def _check_index(
    metadata: Any, sizes: dict[str, int], shards: dict[str, io.BufferedReader]
) -> None:
    """Check that each tensor lies wholly in the files of these `sizes`, as values in the `shards`.

    Python's integers do not overflow: what is checked here is relied on later.
    """
    spare = sum(sizes.values())
    for name, entry in metadata.state_dict_metadata.items():
        if not (isinstance(entry, TensorStorageMetadata) and name.isprintable()):
            raise Damaged(f"{name!r} is not a tensor but a pickled object")
        if not _is_tiled(entry.size, entry.chunks):
            raise Damaged(f"{name} is not covered exactly once by its parts")
        for chunk in entry.chunks:
            place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            path = getattr(place, "relative_path", None)
            if path not in sizes:
                raise Damaged(f"{name} has no valid file in this checkpoint, but {path!r}")
            needed = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            begin, end = place.offset, place.offset + place.length
            inside = 0 <= begin <= end - needed and end <= sizes[path]
            if type(begin) is not int or type(end) is not int or not inside:
                raise Damaged(f"{name} does not fit at its position in {path}")
            if path in shards:
                _values_offset(shards[path], place, needed)
            spare -= needed
    if spare < 0:
        raise Damaged(f"the tensors need {-spare} bytes more than the files contain")


def _is_tiled(size: Sequence[int], chunks: Sequence[Any]) -> bool:
    """Return whether the parts of a tensor are the cells of a grid over it.

    A device mesh splits each dimension by itself, so every sharding is such a grid.
    """
    cells = set()
    for chunk in chunks:
        if any(n < 0 for n in chunk.sizes):
            return False
        if 0 not in chunk.sizes:
            ranges = zip(torch.Size(chunk.offsets), torch.Size(chunk.sizes), size, strict=True)
            cells.add(tuple((begin, begin + n) for begin, n, _ in ranges))
    if not cells:
        return 0 in size
    number = 1
    for dim, length in enumerate(size):
        spans = sorted({cell[dim] for cell in cells})
        if [begin for begin, _ in spans] + [length] != [0] + [end for _, end in spans]:
            return False
        number *= len(spans)
    return len(cells) == number


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and validate the manifest of a complete checkpoint; Damaged where it is not valid."""
    with _refusing(folder, MANIFEST):
        try:
            with _open(folder / MANIFEST) as file:
                text = file.read(MANIFEST_LIMIT + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(f"not a checkpoint (it contains no {MANIFEST})") from None
        manifest = json.loads(text if len(text) <= MANIFEST_LIMIT else "")
        version, step, files = manifest["format"], manifest["step"], manifest["files"]
        if version not in (1, FORMAT):
            raise Damaged(f"it has format {version!r:.20}, this code reads {FORMAT}")
        if version > 1 and manifest.pop("checksum") != _manifest_checksum(manifest):
            raise Damaged(f"checksum mismatch in {MANIFEST}")
        numbers = [step, *(number for size, crc in files.values() for number in (size, crc))]
        if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or step >= 10**12:
            raise ValueError("not numbers")
        if ".metadata" not in files:
            raise ValueError("the index would be read unchecked")
        for name in files:
            if not re.fullmatch(r"\.metadata|__[0-9]+_[0-9]+\.distcp", name):
                raise Damaged(f"{MANIFEST} names {name!r}, which this code never writes")
        if re.fullmatch(r"step_[0-9]{8,}", folder.name) and step != step_of(folder):
            raise Damaged(f"{MANIFEST} belongs to step {step}")
    return manifest


# What torch.save writes before the values of a tensor: the header of a record in a zip archive,
# method "stored" (not compressed), of which 30 bytes come before the name. The groups: the lengths
# of the name and of the padding after it, both before the values.
_RECORD_HEADER = re.compile(rb"PK\x03\x04.{4}\0\0.{16}(..)(..)archive/data/0", re.DOTALL)


def _values_offset(file: io.BufferedReader, place: Any, size: int) -> int:
    """Find where the `size` bytes of values of a saved part begin in a file; Damaged if nowhere.

    torch.load would do it with a pickle, which may ask for any amount of memory; here nothing is
    executed, decompressed or allocated.
    """
    file.seek(place.offset)
    found = _RECORD_HEADER.search(file.read(min(place.length, 2**16)))
    if found:
        lengths = (int.from_bytes(group, "little") for group in found.groups())
        begin = place.offset + found.start() + 30 + sum(lengths)
        if begin + size <= place.offset + place.length:
            return begin
    raise Damaged(f"no plain tensor at byte {place.offset} of {place.relative_path}")


class _Reader(dcp.FileSystemReader):
    """DCP's reader, which reads values only and never a pickle. `metadata` is checked before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index that was read before."""
        return self.metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read what this rank needs of each part."""
        places = [self.storage_data[item.storage_index] for item in plan.items]
        with ExitStack() as stack:
            names = {place.relative_path for place in places}
            files = {n: stack.enter_context(_open(Path(self.path) / n)) for n in names}
            for item, place in zip(plan.items, places, strict=True):
                values = self._read_item(item, place, files[place.relative_path])
                target = planner.resolve_tensor(item).detach()
                target.copy_(values.view(target.shape))
        return super().read_data(replace(plan, items=[]), planner)

    def _read_item(self, item: Any, place: Any, file: io.BufferedReader) -> Tensor:
        """Read the wanted rows of a saved part, and take the wanted columns of them."""
        entry: Any = self.metadata.state_dict_metadata[item.storage_index.fqn]
        sizes = next(c.sizes for c in entry.chunks if c.offsets == item.storage_index.offset)
        rows = torch.empty((*item.lengths[:1], *sizes[1:]), dtype=entry.properties.dtype)
        begin = _values_offset(file, place, math.prod(sizes) * rows.itemsize)
        if sizes:
            begin += item.storage_offsets[0] * math.prod(sizes[1:]) * rows.itemsize
        file.seek(begin)
        memory: Any = rows.view(-1).view(torch.uint8).numpy()
        if file.readinto(memory) != rows.nbytes:
            raise OSError(errno.EIO, "ended early", file.name)
        for dim in range(1, rows.ndim):
            rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return rows


def check(folder: Path, part: int = 0, parts: int = 1) -> tuple[dict[str, Any], Metadata]:
    """Check the index and every `parts`-th shard file of a checkpoint, from the `part`-th on.

    Returns its manifest and index; Damaged where a file is not what they say.
    """
    manifest = read_manifest(folder)
    sizes = {name: size for name, (size, _) in manifest["files"].items()}
    mine = sorted(sizes.keys() - {".metadata"})[part::parts]
    with _refusing(folder, ".metadata"), ExitStack() as stack:
        files = {name: stack.enter_context(_open(folder / name)) for name in (".metadata", *mine)}
        for name, file in files.items():
            found = os.fstat(file.fileno()).st_size
            if found != sizes[name]:
                raise Damaged(f"{name} has {found} bytes, not {sizes[name]}")
            if _crc32(file) != manifest["files"][name][1]:
                raise Damaged(f"checksum mismatch in {name}")
        index = files.pop(".metadata")
        index.seek(0)
        metadata = _RestrictedUnpickler(index).load()
        _check_index(metadata, {name: sizes[name] for name in sizes if name != ".metadata"}, files)
    return manifest, metadata


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(folder: str | Path) -> list[Path]:
    """List the checkpoints in a folder by step, damaged ones too.

    OSError where the folder cannot be read: that does not mean that there are none.
    """
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


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizer. Collective.

    Returns its manifest: the `run_state` that was saved, and the "step". Everything is checked
    first, each checksum by one of the ranks: Damaged or OSError, the same on all ranks, leaves
    model and optimizer as they were. Where reading fails after that, by OSError or RuntimeError,
    they are partly loaded: load again, or discard them.
    """
    folder = Path(folder)
    wanted = _expected_shapes(model, optimizer)
    problem: Exception | None = None
    try:
        manifest, metadata = check(folder, dist.get_rank(), dist.get_world_size())
        _check_names_and_shapes(folder, wanted, metadata)
    except (Damaged, OSError) as error:
        problem = error
    problems: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=group)
    _raise_first(folder, dict(enumerate(problems)))
    tensors = named_tensors(model, optimizer)
    _read(tensors, folder, metadata, process_group=group)
    _restore_state(model, optimizer, tensors)
    return manifest


def _read(tensors: dict[str, Tensor], folder: Path, metadata: Metadata, **options: Any) -> None:
    """Read tensors of a checkpoint in place; OSError, Damaged or RuntimeError of any rank."""
    try:
        dcp.load(tensors, storage_reader=_Reader(folder, metadata), **options)
    except CheckpointException as error:
        _raise_first(folder, {rank: wrapped[0] for rank, wrapped in error.failures.items()})
        raise RuntimeError(f"{folder} could not be loaded: {error.failures}") from None


def _raise_first(folder: Path, problems: Mapping[int, BaseException | None]) -> None:
    """Raise an OSError of some rank, which may pass, or else its Damaged."""
    for rank, problem in problems.items():
        if isinstance(problem, OSError):
            raise OSError(f"{folder} cannot be read: {problem} (rank {rank})")
    for problem in problems.values():
        if isinstance(problem, Damaged):
            raise Damaged(str(problem))


def _check_names_and_shapes(
    folder: Path, wanted: dict[str, tuple[int, ...]], metadata: Metadata
) -> None:
    """Damaged unless names and unsharded shapes are the model's: none missing, none more."""
    entries: dict[str, Any] = metadata.state_dict_metadata
    found = {name: tuple(entry.size) for name, entry in entries.items()}
    for name in sorted(wanted.keys() | found.keys()):
        saved, own = found.get(name, "missing"), wanted.get(name, "missing")
        if saved != own:
            raise Damaged(f"{folder}: {name} is {saved} in the checkpoint, {own} in the model")


# ---------------------------------------------------------------------------------------------
# Command line, for a login node: no GPU, no ranks


def _flags(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of train_fsdp.py in a manifest; of another program's, none."""
    return flags if isinstance(flags := manifest.get("flags"), dict) else {}


def ls(folder: str) -> list[str]:
    """Return a line per checkpoint of a folder: name, size, files, how it was trained."""
    lines = []
    for path in list_checkpoints(folder):
        try:
            manifest = read_manifest(path)
        except (Damaged, OSError) as error:
            lines.append(f"{path.name}  unreadable: {error}")
            continue
        gib = sum(size for size, _ in manifest["files"].values()) / 2**30
        flags = _flags(manifest)
        how = " ".join(str(flags[k]) for k in ("model", "mode", "world_size") if k in flags)
        line = f"{path.name}  {gib:8.3f} GiB  {len(manifest['files']):5} files  {how}"
        lines.append(line.rstrip())  # another program's checkpoint need not say how
    return lines


def verify(folder: str | Path) -> int:
    """Read a whole checkpoint and check everything; return the number of its tensors."""
    _, metadata = check(Path(folder))
    return len(metadata.state_dict_metadata)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for; their shapes are known before."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> None:
        self.shapes, self.read = dict(shapes), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def read_model(folder: str | Path) -> tuple[dict[str, Any], LazyTensors]:
    """Open a whole model without ranks -> the manifest, and its CPU tensors by name.

    Checks every file first. Damaged where the checkpoint cannot be read, OSError where a file
    cannot be. What `save` was given beside model and optimizer is in the manifest.
    """
    folder, prefix = Path(folder), "model."
    manifest, metadata = check(folder)
    entries: dict[str, Any] = metadata.state_dict_metadata

    def read(name: str) -> Tensor:
        entry = entries[prefix + name]
        wanted = {prefix + name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing ranks
            _read(wanted, folder, metadata, no_dist=True)
        return wanted[prefix + name]

    shapes = {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in entries.items()
        if name.startswith(prefix)
    }
    return manifest, LazyTensors(shapes, read)


def consolidate(folder: str | Path, out: str | Path) -> dict[str, Tensor]:
    """Write the model to one file under the names of its state dict, and return it.

    `torch.load(out, weights_only=True)["model"]` is what `load_state_dict` takes. Our names are
    those of the official MAE release: ValueError for a training of `--channels` other than its 3.
    Damaged where the checkpoint cannot be read, OSError where the file cannot be written; then
    `out` is as it was.
    """
    out = Path(out)
    try:
        with _replacing(out) as file:  # opened before minutes of reading
            manifest, saved = read_model(folder)
            channels = _flags(manifest).get("channels", 3)
            if channels != 3:
                raise ValueError(
                    f"{folder} is of images with {channels} channels, the official release has 3: "
                    "read this checkpoint with checkpoint.load"
                )
            model = dict(saved)
            torch.save({"model": model, "step": manifest["step"]}, file)
    except (OSError, RuntimeError) as error:
        if isinstance(cause := _root_cause(error), OSError):
            raise OSError(f"{out} was not written: {cause}") from None
        raise
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 1 for a damaged checkpoint, exit with 2 for bad usage."""
    parser = argparse.ArgumentParser(description="List, verify, consolidate checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ls", help="list the checkpoints of a run").add_argument("dir")
    commands.add_parser("verify", help="read and check a whole checkpoint").add_argument("dir")
    command = commands.add_parser("consolidate", help="write its model to one file")
    command.add_argument("dir")
    command.add_argument("out")
    args = parser.parse_args(argv)
    if not os.path.isdir(args.dir):
        parser.error(f"there is no folder {args.dir}")
    if args.command == "consolidate" and os.path.isdir(args.out):
        parser.error(f"{args.out} is a folder: give the file to write")
    try:
        if args.command == "ls":
            print("\n".join(ls(args.dir)) or f"no checkpoint in {args.dir}")
        elif args.command == "verify":
            print(f"{args.dir} is complete: {verify(args.dir)} tensors")
        else:
            model = consolidate(args.dir, args.out)
            values = sum(tensor.numel() for tensor in model.values())
            print(f"{args.out}: {len(model)} parameters and buffers, {values:,} values")
    except (ValueError, OSError) as error:
        print(f"checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with suppress(ImportError):  # copied alone, it does without
        from runtime import process

        process.make_safe()
    raise SystemExit(main())
