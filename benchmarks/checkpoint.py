"""Time saving and loading a training state against writing and reading the same bytes plainly.

    python -m benchmarks.checkpoint                        # 1b on 2 ranks: 11.2 GB, some minutes
    python -m benchmarks.checkpoint --model base --repeat 5

Nothing is trained: parameters and AdamW moments get cheap values, which are compared after each
load. The plain side is the least that moves the same bytes: one file and one fsync per rank, and
memory to read it into. Both sides use the same folder in turns. Every read is from the disk: the
page cache is dropped before it (fsync, then POSIX_FADV_DONTNEED). Every read, of both sides, is by
new processes, because memory that was used before is faster than memory that was not. Before a load
they hold the sharded model and an optimizer without states, as at a resume. The memory of a load is
the kernel's high-water mark of the process, without cached pages of files.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import checkpoint
import mesh
import shard
import vit

MODE = "full_shard"
BLOCK = 2**20  # bytes; larger ones were not faster
CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------
# The state


def build(model: str, fsdp: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model of zeros and its optimizer without states. Collective."""
    with torch.device("meta"):
        whole = vit.ViTMAE(vit.MODELS[model])
    grid = mesh.build_mesh(shard.mesh_shape(MODE, dist.get_world_size()), CPU)
    decay = shard.weight_decay_names(whole)
    sharded = shard.apply(
        whole,
        MODE,
        grid,
        block_classes={vit.Block},
        values=lambda name, shape, device: torch.zeros(shape, device=device),
        options=shard.ShardingOptions(fsdp=2 if fsdp == 2 else 1, param_dtype=torch.float32),
    )
    return sharded, shard.build_optimizer(sharded, MODE, decay, lr=1e-3, weight_decay=0.05)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter or state, flat and without gradient."""
    held: Any = tensor.detach()
    return (held.to_local() if hasattr(held, "to_local") else held).view(-1)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the states that AdamW has after a step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = {leaf: torch.zeros_like(p) for leaf in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.zeros(()), **moments}


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each flat local tensor of the state, and the values that it should have."""
    for i, p in enumerate(model.parameters()):
        state = optimizer.state[p]
        if not state:  # FSDP1: no part of this parameter is on this rank
            continue
        for j, tensor in enumerate((p, state["exp_avg"], state["exp_avg_sq"])):
            values, start = local(tensor), 1000 * (3 * i + j) + dist.get_rank()
            yield values, torch.arange(start, start + len(values), dtype=torch.float32)
        yield local(state["step"]), torch.tensor([float(i)])


def fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Give the state the values that `wrong` expects; return its bytes on this rank."""
    size = 0
    for values, right in held(model, optimizer):
        values.copy_(right)
        size += values.nbytes
    return size


def wrong(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Count the tensors on this rank that do not have the values of `fill`."""
    return sum(not torch.equal(values, right) for values, right in held(model, optimizer))


# ---------------------------------------------------------------------------------------------
# Plain files, cached pages, memory


def plain_write(path: Path, tensors: list[Tensor]) -> None:
    """Write the bytes of the tensors to one file, durably."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            view = memoryview(tensor.numpy()).cast("B")
            for start in range(0, len(view), BLOCK):
                block = view[start : start + BLOCK]
                while block:  # a write may be partial
                    block = block[file.write(block) :]
        os.fsync(file.fileno())


def plain_read(path: Path, memory: memoryview) -> None:
    """Read a file into memory of its size."""
    done = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(memory[done : done + BLOCK]):
            done += count
    if done != len(memory):
        raise RuntimeError(f"{path} has {done} bytes, not {len(memory)}")


def drop_pages(folder: Path) -> None:
    """Drop the cached pages of all files under a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # dirty pages cannot be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory(what: str) -> int:
    """Return VmRSS or VmHWM (the highest VmRSS so far) of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{what}:")[1].split()[0])


def reset_peak() -> None:
    """Reset VmHWM to the present VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")


def free_memory() -> None:
    """Return freed memory to the system; a load would reuse what building the model left."""
    gc.collect()
    with suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds from the first rank's start to the last rank's end."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


# ---------------------------------------------------------------------------------------------
# Inside a rank


def write(args: argparse.Namespace, folder: Path, turn: int) -> dict[str, Any]:
    """Save, and write the same bytes plainly, `--repeat` times; one of each remains."""
    model, optimizer = build(args.model, args.fsdp)
    make_states(optimizer)
    size = fill(model, optimizer)
    tensors = [values for values, _ in held(model, optimizer)]
    plain = folder / f"plain{dist.get_rank()}"
    saved, written = [], []

    def save() -> None:
        if problems := checkpoint.Saver(str(folder), model, optimizer).save(1, {}):
            raise RuntimeError(problems[0])

    def clean(path: Path) -> None:
        """Make room for the next turn, and let the disk become idle."""
        dist.barrier()
        if path.is_dir() and dist.get_rank() == 0:
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
        dist.barrier()
        drop_pages(folder)

    for i in range(args.repeat):
        for kind in ("save", "plain")[:: 1 if i % 2 == 0 else -1]:
            clean(folder / "step_00000001" if kind == "save" else plain)
            work = save if kind == "save" else partial(plain_write, plain, tensors)
            (saved if kind == "save" else written).append(timed(work))
    return {"bytes": size, "save": saved, "plain_write": written}


def load(args: argparse.Namespace, folder: Path, turn: int) -> dict[str, Any]:
    """Load, compare the values, measure time and memory."""
    model, optimizer = build(args.model, args.fsdp)
    parameters = sum(local(t).nbytes for t in [*model.parameters(), *model.buffers()])
    free_memory()
    drop_pages(folder)
    reset_peak()
    before = memory("VmRSS")
    work = partial(checkpoint.load, folder / "step_00000001", model, optimizer)
    seconds = timed(work)
    found = {"load": seconds, "held": memory("VmHWM") - before + parameters}
    return found | {"wrong": wrong(model, optimizer)}


def read(args: argparse.Namespace, folder: Path, turn: int) -> dict[str, Any]:
    """Read the plain files into memory, a third of which is in use as parameters are at a load."""
    path = folder / f"plain{dist.get_rank()}"
    space = torch.empty(path.stat().st_size, dtype=torch.uint8)
    space[: len(space) // 3].fill_(0)
    drop_pages(folder)
    return {"plain_read": timed(partial(plain_read, path, memoryview(space.numpy())))}


def rank_main(
    rank: int,
    work: Callable[..., dict[str, Any]],
    args: argparse.Namespace,
    folder: Path,
    turn: int,
) -> None:
    """Run one rank of a group of processes, and write its results to a file."""
    torch.set_num_threads(1)
    rendezvous = folder / f"rendezvous-{work.__name__}{turn}"
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=args.ranks)
    found = work(args, folder, turn)
    (folder / f"found{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------
# The command


def on_ranks(
    work: Callable[..., dict[str, Any]], args: argparse.Namespace, folder: Path, turn: int = 0
) -> list[dict[str, Any]]:
    """Return the result of `work` on each rank of a new group of processes."""
    mp.spawn(rank_main, (work, args, folder, turn), nprocs=args.ranks)
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(args.ranks)]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything once; RuntimeError where the loaded values are not the saved ones."""
    writes = on_ranks(write, args, folder)
    seconds = {kind: writes[0][kind] for kind in ("save", "plain_write")}
    seconds |= {"load": [], "plain_read": []}
    most = 0.0  # memory of a load / bytes that the rank holds
    for turn in range(args.repeat):
        for work in (load, read)[:: 1 if turn % 2 == 0 else -1]:
            found = on_ranks(work, args, folder, turn)
            kind = "load" if work is load else "plain_read"
            seconds[kind].append(found[0][kind])
            if bad := sum(rank.get("wrong", 0) for rank in found):
                raise RuntimeError(f"{bad} tensors were loaded with wrong values")
            for rank, written in zip(found, writes, strict=True):
                most = max(most, rank.get("held", 0) / written["bytes"])
    size = sum(rank["bytes"] for rank in writes)
    median = {kind: statistics.median(s) for kind, s in seconds.items()}
    return {
        "model": args.model,
        "mode": MODE,
        "fsdp": args.fsdp,
        "ranks": args.ranks,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "bytes": size,
        "seconds": seconds,
        "save_ratio": median["save"] / median["plain_write"],
        "load_ratio": median["load"] / median["plain_read"],
        "memory_ratio": most,
    }


def show(found: dict[str, Any]) -> None:
    """Print the table, and everything on one line of JSON."""
    size = found["bytes"]
    print(
        f"{found['model']}, {found['mode']} (FSDP{found['fsdp']}) on {found['ranks']} ranks, "
        f"{found['cores']} cores, torch {found['torch']}: {size / 1e9:.2f} GB"
    )
    for kind, seconds in found["seconds"].items():
        median = statistics.median(seconds)
        turns = " ".join(f"{s:.2f}" for s in seconds)
        print(f"{kind:12} {median:8.2f} s  {size / median / 1e9:6.2f} GB/s  ({turns})")
    for kind, limit in (("save", 1.5), ("load", 1.5), ("memory", 1.3)):
        against = "peak of a load / shard" if kind == "memory" else f"{kind} / plain files"
        print(f"{against:24} {found[f'{kind}_ratio']:5.2f}  (aim: at most {limit})")
    print(json.dumps(found), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure once; exit status 2 for bad usage or a disk that is too small."""
    parser = argparse.ArgumentParser(description="Time checkpoints against plain files.")
    add = parser.add_argument
    add("--model", choices=vit.MODELS, default="1b", help="model size (default 1b)")
    add("--fsdp", type=int, choices=(1, 2), default=2, help="engine (default 2)")
    add("--ranks", type=int, default=2, help="gloo ranks on this machine (default 2)")
    add("--repeat", type=int, default=3, help="repetitions; medians are compared (default 3)")
    add("--dir", default=".", help="parent of a temporary folder (default: the current folder)")
    args = parser.parse_args(argv)
    with torch.device("meta"):
        count = sum(p.numel() for p in vit.ViTMAE(vit.MODELS[args.model]).parameters())
    Path(args.dir).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.dir).free
    if free < 2.2 * 12 * count:  # a checkpoint and the plain files
        parser.error(
            f"{args.dir} has {free / 1e9:.1f} GB free, {26.4 * count / 1e9:.1f} are needed"
        )
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.dir) as folder:
        show(measure(args, Path(folder).resolve()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
