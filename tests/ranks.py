"""Run train_fsdp.main on several gloo ranks, many runs in one set of processes, and look inside.

    results = run_ranks(4, [Run(["--mode", "full_shard", ...])], folder)

Importing torch is what takes long: a fork server does it once for all ranks of all tests, and the
processes of `run_ranks` make many runs, each with a process group of its own.
"""

import contextlib
import ctypes
import errno
import functools
import gc
import io
import itertools
import json
import os
import pickle
import random
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import vit  # noqa: E402

# `--model nano` of `run_ranks`: a step takes half of what `tiny` takes; no width divides by 3
NANO = vit.ViTConfig(40, 2, 84, 4, 8, decoder_width=28, decoder_depth=2, decoder_heads=2)
NANO_ARGV = (
    "--model nano --img-size 32 --global-batch 8 --workers 0 --precision fp32 --device cpu "
    f"--data {ROOT}/examples/tiles/train"
).split()


@dataclass
class Run:
    """One call of train_fsdp.main on all ranks."""

    argv: list[str]
    poison: str = ""  # "loss" or "gradient": make it non-finite ...
    poison_rank: int = 0  # ... on this rank
    poison_steps: tuple[int, ...] = ()  # ... in these steps, from 0
    params: bool = True  # gather the parameters at every step, compare replicas, keep the last
    to: str = ""  # --out, where it is not a folder of this run's own
    signal_rank: int = -1  # this rank receives a signal ...
    signal_step: int = 0  # ... during this step, from 0
    fault: str = ""  # a name in `FAULTS`: what goes wrong ...
    fault_rank: int = -1  # ... on this rank, or on all ...
    fault_saves: tuple[int, ...] = ()  # ... when the run saves for the first time (0), second, ...
    plain: bool = False  # no --save-every of ours where argv has none
    due_rank: int = -1  # by the clock of this rank, and no other, a checkpoint is always due
    lost_rank: int = -1  # the data loader of this rank fails ...
    lost_step: int = 0  # ... in this step, from 0


@dataclass
class Result:
    """What came of it."""

    status: list[int]  # of main, by rank
    start: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    replicas_differ: float = 0.0  # the largest difference over all steps
    params: dict[str, Any] = field(default_factory=dict)  # after the last step
    moved: list[float] = field(default_factory=list)  # the largest change, step by step
    output: str = ""  # of rank 0
    errors: str = ""


def free_port() -> int:
    """Below what the system hands out: nobody is given it while the ranks still import torch."""
    while True:
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", random.SystemRandom().randrange(20000, 32000)))
            return s.getsockname()[1]


def processes_of(group: int) -> list[str]:
    """The processes of a process group that still run, as "PID NAME" (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            name, _, rest = entry.read_text().partition("(")[2].rpartition(")")
            state, _, pgrp = rest.split()[:3]
            if int(pgrp) == group and state != "Z":
                found.append(f"{entry.parent.name} {name}")
    return found


def single_environment() -> dict[str, str]:
    """The caller's without a surrounding Slurm or torchrun; the scripts can be imported."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launchers = ("SLURM_", "TORCHELASTIC")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launchers) and k not in names}
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return single_environment() | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def python(*argv: object, cwd: Path = ROOT, seconds: float = 240, alone: bool = False) -> str:
    """What `python argv...` prints in a folder; `alone`: it cannot import what lies elsewhere."""
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env=single_environment() | ({"PYTHONPATH": ""} if alone else {}),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_ranks(world: int, runs: list[Run], folder: Path, timeout: float = 600) -> list[Result]:
    """Execute the runs one after another on `world` processes; RuntimeError if they do not end."""
    jobs = [asdict(run) | {"out": str(folder / str(i))} for i, run in enumerate(runs)]
    start_ranks(world, partial(_all_runs, jobs), folder, 0, timeout)
    return [read_result(Path(job["out"]), world, Path(job["to"] or job["out"])) for job in jobs]


def on_ranks(world: int, function: Callable[[], Any], folder: Path, timeout: float = 300) -> list:
    """What `function`, of a module in this folder, returns on each of `world` gloo ranks.

    They find `folder` as FOLDER in their environment.
    """
    start_ranks(world, partial(_call, function, folder), folder, free_port(), timeout)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world)]


def start_ranks(
    world: int, work: Callable[[], None], folder: Path, port: int, timeout: float
) -> None:
    """`work()` as ranks 0, 1, ...; RuntimeError with what they printed if they fail."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(world):
        given = environment(rank, world, port), folder / f"rank{rank}.txt", work
        processes.append(fork_server().Process(target=_become, args=given))
        processes[-1].start()
    deadline = time.monotonic() + timeout
    try:
        while any(p.is_alive() for p in processes):
            failed = [r for r, p in enumerate(processes) if p.exitcode]
            if failed or time.monotonic() > deadline:
                time.sleep(2)  # let the others print
                break
            time.sleep(0.05)
        failed = [r for r, p in enumerate(processes) if p.exitcode != 0]
        if failed:
            texts = [(folder / f"rank{r}.txt").read_text()[-3000:] for r in failed]
            raise RuntimeError(f"ranks {failed} failed or time was up:\n" + "\n".join(texts))
    finally:
        for p in processes:
            if p.is_alive():
                os.killpg(p.pid, signal.SIGKILL)
            p.join()


def fork_server() -> Any:
    """Processes forked from one that has imported what ranks need, with one thread each.

    Started by conftest.py, before a test can start it without the imports.
    """
    server = get_context("forkserver")
    server.set_forkserver_preload(["train_fsdp", "torch._dynamo"])
    with patch.dict(os.environ, environment(0, 1, 0)):
        ensure_running()
    return server


def freeze_imports() -> None:
    """Keep what exists now out of all later collections of garbage, those of `manual_gc` too.

    Each run begins with one, which would go through 350,000 objects of imported modules: 0.15 s.
    """
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _become(environ: dict[str, str], output: Path, work: Callable[[], None]) -> None:
    """A rank as if a launcher had started it: its environment, its output, its process group."""
    os.setsid()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(ROOT)
    freeze_imports()
    work()


def _all_runs(jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        one_run(job, int(os.environ["RANK"]))


def run_script(argv: list[str]) -> None:
    """What `python argv...` does."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.modules.pop(argv[1], None)  # preloaded by the fork server
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def join() -> int:
    """Join the other processes of `on_ranks` as a gloo rank; the rank."""
    import torch

    import mesh

    torch.set_num_threads(1)
    ranks = mesh.read_ranks(os.environ)
    mesh.init_ranks(ranks, torch.device("cpu"), timeout_minutes=2)
    # Each mesh starts threads that poll for as long as the process lives: one of each shape.
    mesh.build_mesh = functools.cache(mesh.build_mesh)
    return ranks.rank


def _call(function: Callable[[], Any], folder: Path) -> None:
    os.environ["FOLDER"] = str(folder)
    (folder / os.environ["RANK"]).write_bytes(pickle.dumps(function()))


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """(start, steps, end) of a log.jsonl; strict JSON, so NaN is an error."""

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    by = {event: [r for r in lines if r["event"] == event] for event in ("start", "step", "end")}
    return (by["start"] or [{}])[-1], by["step"], (by["end"] or [{}])[-1]


def read_result(out: Path, world: int, to: Path) -> Result:
    status = [int((out / f"status{rank}").read_text()) for rank in range(world)]
    texts = (out / "output").read_text(), (out / "errors").read_text()
    result = Result(status, output=texts[0], errors=texts[1])
    if (to / "log.jsonl").exists():
        result.start, result.steps, result.end = read_log(to / "log.jsonl")
    if (out / "params.pickle").exists():
        result.params = pickle.loads((out / "params.pickle").read_bytes())
        result.replicas_differ = result.params.pop("replicas_differ")
        result.moved = result.params.pop("moved")
    return result


# --------------------------------------------------------------------------------------------- #
# Inside a rank


def full_parameters(model):
    """Every parameter whole, by its original name, as this rank's shard group holds it."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
    from torch.distributed.tensor import DTensor

    import shard

    def values(tensors):
        return {
            shard.original_name(n): (p.full_tensor() if isinstance(p, DTensor) else p)
            .detach()
            .cpu()
            .clone()
            for n, p in tensors.items()
        }

    parameters = dict(model.named_parameters())
    if isinstance(model, FSDP1):
        with FSDP1.summon_full_params(model, writeback=False):
            return values(parameters)
    # a state dict has the rows of qkv in their usual order, also where tensor parallelism splits it
    names = {shard.original_name(n) for n in parameters}
    found = {n: t for n, t in model.state_dict().items() if shard.original_name(n) in names}
    return values(found)


def agreed_port(out: Path, rank: int) -> str:
    """A free port that rank 0 chooses just before it is used, so that nobody else has taken it."""
    if rank == 0:
        (out / "port.new").write_text(str(free_port()))
        (out / "port.new").rename(out / "port")
    while not (out / "port").exists():
        time.sleep(0.01)
    return (out / "port").read_text()


# What can go wrong while a checkpoint is written: context managers around the save of `step` to
# `folder`. Where it can be had, the kernel itself refuses.


@contextlib.contextmanager
def files_limited(folder: Path, step: int):
    """No file of this process may grow beyond 100 kB (EFBIG; Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def bound_by_permissions():
    """Root does without its privilege to ignore permissions (Linux; of this thread)."""

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    libc, header = ctypes.CDLL(None, use_errno=True), Header(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the same of those above 31
    assert libc.capget(ctypes.byref(header), sets) == 0
    effective = sets[0]
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(ctypes.byref(header), sets) == 0
    yield
    sets[0] = effective
    assert libc.capset(ctypes.byref(header), sets) == 0


def failing(where: str, name: str, when: Callable[..., bool] = lambda *_: True, number=errno.EIO):
    """An OSError in an attribute `name` of checkpoint.py's `where`, if `when` of its arguments."""

    @contextlib.contextmanager
    def fault(folder: Path, step: int):
        import checkpoint

        owner = getattr(checkpoint, where) if where else checkpoint
        original = getattr(owner, name)

        def fail(*args, **kwargs):
            if when(*args):
                raise OSError(number, os.strerror(number))
            return original(*args, **kwargs)

        with patch.object(owner, name, fail):
            yield

    return fault


FAULTS: dict[str, Callable] = {
    "limit": files_limited,
    "full": failing("_Writer", "write_data", number=errno.ENOSPC),
    "latest": failing("", "_replacing", lambda path: path.name == "latest"),
}


@dataclass
class Seen:
    """What the hooks of one run have seen on this rank."""

    step: int = -1
    received: list[int] = field(default_factory=list)  # signals
    params: dict[str, Any] = field(default_factory=dict)
    flat: Any = None  # the same, in one tensor
    moved: list[float] = field(default_factory=list)  # largest change, step by step
    replicas_differ: float = 0.0

    def look_at(self, model) -> None:
        """Gather the parameters, and compare them with those of other ranks and before."""
        import torch
        import torch.distributed as dist

        self.params, before = full_parameters(model), self.flat
        self.flat = torch.cat([v.flatten() for v in self.params.values()])
        low, high = self.flat.clone(), self.flat.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        self.replicas_differ = max(self.replicas_differ, (high - low).max().item())
        self.moved.append(0.0 if before is None else (self.flat - before).abs().max().item())


def watched_step(job: dict[str, Any], rank: int, seen: Seen, train_step: Callable) -> Callable:
    """train_step, in which a signal may arrive, and after which the model is looked at."""

    def step(training, guard, *args, **kwargs):
        seen.step = guard.voted
        if (rank, seen.step) == (job["signal_rank"], job["signal_step"]):
            seen.received.append(signal.SIGTERM)
        train_step(training, guard, *args, **kwargs)
        if job["params"]:
            seen.look_at(training.model)

    return step


def poisoned(job: dict[str, Any], seen: Seen) -> Any:
    """A patch by which the loss or its gradient is not finite in some steps."""
    import data

    normalize, forward = data.normalize, vit.ViTMAE.forward

    def bad_images(images, stats):
        x = normalize(images, stats)
        return x * float("nan") if seen.step in job["poison_steps"] else x

    def bad_gradient(self, *args, **kwargs):
        loss, pred, mask = forward(self, *args, **kwargs)
        if seen.step in job["poison_steps"]:
            loss.register_hook(lambda g: g * float("inf"))
        return loss, pred, mask

    if job["poison"] == "loss":
        return patch.object(data, "normalize", bad_images)
    return patch.object(vit.ViTMAE, "forward", bad_gradient)


def lost_images(job: dict[str, Any]) -> Any:
    """A patch by which the data loader fails in some step."""
    import data

    build_loader = data.build_loader

    def failing_loader(*args, **kwargs):
        yield from itertools.islice(build_loader(*args, **kwargs), job["lost_step"])
        raise OSError(errno.EIO, "Input/output error")

    return patch.object(data, "build_loader", failing_loader)


def faulty_saves(job: dict[str, Any], rank: int) -> Any:
    """A patch by which some saves meet one of `FAULTS`."""
    import torch.distributed as dist

    import checkpoint

    attempts, write = itertools.count(), checkpoint.Saver._write

    def write_with_fault(self, tensors, writer):
        wrong = next(attempts) in job["fault_saves"] and job["fault_rank"] in (-1, rank)
        fault = FAULTS[job["fault"]](self.folder, self.step) if wrong else contextlib.nullcontext()
        dist.barrier(self.group)  # what is wrong with the folder is so for all
        with fault:
            dist.barrier(self.group)
            problem = write(self, tensors, writer)
            dist.barrier(self.group)
            return problem

    return patch.object(checkpoint.Saver, "_write", write_with_fault)


def hooks(job: dict[str, Any], rank: int, seen: Seen) -> Iterator[Any]:
    """The patches that a job asks for on this rank."""
    import train_fsdp
    from runtime import resume

    step = watched_step(job, rank, seen, train_fsdp.train_step)
    yield patch.object(train_fsdp, "train_step", step)
    if job["lost_rank"] == rank:
        yield lost_images(job)
    if job["due_rank"] >= 0:
        due = job["due_rank"] == rank
        yield patch.object(resume.Saves, "due_by_clock", lambda self: due)
    if job["fault"]:
        yield faulty_saves(job, rank)
    if job["poison"] and job["poison_rank"] == rank:
        yield poisoned(job, seen)


def one_run(job: dict[str, Any], rank: int) -> None:
    """Call train_fsdp.main with the hooks that the job asks for, and leave what they saw."""
    import train_fsdp

    vit.MODELS["nano"] = NANO
    out, seen = Path(job["out"]), Seen()
    out.mkdir(exist_ok=True)
    os.environ["MASTER_PORT"] = agreed_port(out, rank)
    argv = [*job["argv"], "--out", job["to"] or str(out)]
    if "--save-every" not in argv and not job["plain"]:  # saving takes time
        argv += ["--save-every", "none"]
    output, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            for hook in hooks(job, rank, seen):
                stack.enter_context(hook)
            stack.enter_context(contextlib.redirect_stdout(output))
            stack.enter_context(contextlib.redirect_stderr(errors))
            status = train_fsdp.main(argv, received=seen.received)
    except SystemExit as leave:
        status = int(leave.code or 0)
    finally:
        sys.stderr.write(output.getvalue() + errors.getvalue())
    (out / f"status{rank}").write_text(str(status))
    if rank == 0:
        (out / "output").write_text(output.getvalue())
        (out / "errors").write_text(errors.getvalue())
        if seen.params:
            kept = {"replicas_differ": seen.replicas_differ, "moved": seen.moved}
            (out / "params.pickle").write_bytes(pickle.dumps(seen.params | kept))
