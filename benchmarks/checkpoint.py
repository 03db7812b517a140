"""Compare saving and loading a training state with writing and reading the same bytes plainly.

    python -m benchmarks.checkpoint             # 1b on 2 ranks: 11 GB twice on disk, some minutes
    python -m benchmarks.checkpoint --model base --repeat 5

Nothing is trained. The plain side is the least that moves the same bytes: one file and one fsync
per rank, and memory to read it into. Both sides use the same folder in turns. Every read is from
the disk: the page cache is dropped before it. Every read, of both sides, is by new processes,
because memory that was used before is faster than memory that was not. Before a load they hold the
sharded model and an optimizer without states, as at a resume. The memory of a load is the highest
resident one of the process, without what it held before the model.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from runtime.config import Config
from runtime.run import resolve
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import checkpoint
import mesh
import train_fsdp
import vit
from benchmarks import timing

SAVED = "step_00000001"
Found = dict[str, list[float]]
Work = Callable[[argparse.Namespace, Path], Found]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter or state, without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build(model: str) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Return a sharded model of ones, its optimizer without states, its local bytes. Collective."""
    ranks = dist.get_world_size()
    run = resolve(Config(model, mode="full_shard", precision="fp32"), ranks, ranks)
    grid = mesh.build_mesh(run.mesh_shape, torch.device("cpu"))
    training = train_fsdp.build_training(run, grid, resuming=True)
    tensors = [local(t) for t in (*training.model.parameters(), *training.model.buffers())]
    for tensor in tensors:
        tensor.fill_(1)
    return training.model, training.optimizer, sum(t.nbytes for t in tensors)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return this rank's parts of all that a checkpoint holds."""
    found = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        found += state.values()
    return [local(tensor) for tensor in found]


def plain_write(path: Path, tensors: Sequence[Tensor]) -> None:
    """Write the bytes of the tensors to one file, durably."""
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(tensor.numpy())
        file.flush()
        os.fsync(file.fileno())


def plain_read(path: Path, memory: memoryview) -> None:
    """Read a file into memory of its size."""
    with path.open("rb") as file:
        file.readinto(memory)


def drop_pages(folder: Path) -> None:
    """Drop the cached pages of all files under a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # dirty pages cannot be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- Inside a rank


def write(args: argparse.Namespace, folder: Path) -> Found:
    """Save, and write the same bytes plainly, `--repeat` times; one of each remains."""
    model, optimizer, _ = build(args.model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # which creates the optimizer's states
    optimizer.zero_grad()
    tensors = tensors_of(model, optimizer)
    for tensor in tensors:
        tensor.fill_(1)
    plain = folder / f"plain{dist.get_rank()}"
    works = {
        "save": partial(checkpoint.save, folder, 1, model, optimizer),
        "plain write": partial(plain_write, plain, tensors),
    }
    seconds = defaultdict(list)
    for name in timing.turns([*works], args.repeat):
        dist.barrier()
        if name == "save":
            shutil.rmtree(folder / SAVED, ignore_errors=True)
        else:
            plain.unlink(missing_ok=True)
        dist.barrier()
        drop_pages(folder)  # the disk becomes idle
        seconds[name].append(timing.seconds_of(works[name], dist.barrier))
    return seconds


def load(args: argparse.Namespace, folder: Path) -> Found:
    """Load; measure the seconds, and the memory in GB against that of the state."""
    model, optimizer, held = build(args.model)
    gc.collect()  # and give free memory back: the load would use what building the model left
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    drop_pages(folder)
    timing.reset_peak()
    before = timing.resident("VmRSS") - held
    work = partial(checkpoint.load, folder / SAVED, model, optimizer)
    seconds = timing.seconds_of(work, dist.barrier)
    peak = timing.resident("VmHWM") - before
    size = sum(tensor.nbytes for tensor in tensors_of(model, optimizer))
    return {"load": [seconds], "peak while loading": [peak / 1e9], "state": [size / 1e9]}


def read(args: argparse.Namespace, folder: Path) -> Found:
    """Read the plain files into memory, a third of which is in use as parameters are at a load."""
    path = folder / f"plain{dist.get_rank()}"
    space = torch.empty(path.stat().st_size, dtype=torch.uint8)
    space[: len(space) // 3].fill_(0)
    drop_pages(folder)
    work = partial(plain_read, path, memoryview(space.numpy()))
    return {"plain read": [timing.seconds_of(work, dist.barrier)]}


def rank_main(rank: int, work: Work, args: argparse.Namespace, folder: Path, own: str) -> None:
    """Run one rank of a group of processes, and write its results to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{own}/ranks", rank=rank, world_size=args.ranks)
    Path(own, f"{rank}.json").write_text(json.dumps(work(args, folder)))
    dist.destroy_process_group()


# --- The command


def measure(args: argparse.Namespace, folder: Path) -> Found:
    """Measure all; each rank adds its results."""
    found: Found = defaultdict(list)
    for work in (write, *timing.turns([load, read], args.repeat)):
        with tempfile.TemporaryDirectory() as own:
            mp.spawn(rank_main, (work, args, folder, own), nprocs=args.ranks)
            for path in sorted(Path(own).glob("*.json")):
                for name, values in json.loads(path.read_text()).items():
                    found[name] += values
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure in a temporary folder."""
    parser = argparse.ArgumentParser(description="Compare checkpoints with plain files.")
    add = parser.add_argument
    add("--model", choices=vit.MODELS, default="1b", help="model size (default 1b)")
    add("--ranks", type=int, default=2, help="gloo ranks on this machine (default 2)")
    add("--repeat", type=int, default=3, help="turns of each (default 3)")
    add("--dir", default=".", help="parent of a temporary folder (default: the current folder)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.dir) as folder:
        found = measure(args, Path(folder).resolve())
    title = f"{args.model}, {args.ranks} ranks"
    for name, unit, base in (
        ("save", "s", "plain write"),
        ("load", "s", "plain read"),
        ("peak while loading", "GB", "state"),
    ):
        print(timing.table(title, unit, {key: found[key] for key in (name, base)}, base))


if __name__ == "__main__":
    main()
