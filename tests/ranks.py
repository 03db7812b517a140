"""Run train_fsdp.main on several gloo ranks, many runs in one set of processes, and look inside.

    results = run_ranks(4, [Run(["--mode", "full_shard", ...])], folder)

Importing torch is what takes long: a fork server does it once for all ranks of all tests, and the
processes of `run_ranks` make many runs, each with a process group of its own.
"""

import contextlib
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
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import checkpoint
import data
import mesh
import run as run_module
import shard
import train_fsdp
import vit

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")
TILES = str(ROOT / "examples" / "tiles" / "train")
# `--model nano` of `run_ranks`: a step takes half of what `tiny` takes; no width divides by 3
NANO = vit.ViTConfig(40, 2, 84, 4, 8, decoder_width=28, decoder_depth=2, decoder_heads=2)
NANO_ARGV = (
    "--model nano --img-size 32 --global-batch 8 --workers 0 --precision fp32 --device cpu "
    f"--data {TILES}"
).split()
# four steps of a training that tests/test_shard.py writes out plainly
LEARNING_ARGV = (
    f"--model nano --img-size 48 --data {TILES} --global-batch 48 --steps 4 --log-every 1 "
    "--clip 1.0 --blr 5e-3 --warmup-steps 2 --precision fp32 --workers 0 --device cpu --seed 3"
).split()
# the start of a command for one process, of made-up images
TINY_ARGV = shlex.split("--model tiny --img-size 32 --device cpu --precision fp32 --workers 0")


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
    full_saves: tuple[int, ...] = ()  # in these saves, from 0, the disk of rank 1 is full
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
            port = random.SystemRandom().randrange(20000, 32000)
            s.bind(("127.0.0.1", port))
            return port


def processes_of(group: int) -> list[str]:
    """The processes of a process group that still run, as "PID NAME" (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            pid, _, named = entry.read_text().partition(" (")
            name, _, rest = named.rpartition(") ")
            state, _, process_group, *_ = rest.split()
            if int(process_group) == group and state != "Z":
                found.append(f"{pid} {name}")
    return found


def single_environment() -> dict[str, str]:
    """The caller's without a surrounding Slurm or torchrun; the scripts can be imported."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, world, rank, world, "127.0.0.1", port)
    return single_environment() | dict(zip(names, map(str, values), strict=True))


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
    by_rank = on_ranks(world, partial(_all_runs, runs, folder), folder, timeout)
    for i, (run, result) in enumerate(zip(runs, by_rank[0], strict=True)):
        result.status = [results[i].status[0] for results in by_rank]
        out = Path(run.to) if run.to else folder / str(i)
        log = out / "log.jsonl"
        if log.exists():
            result.start, result.steps, result.end = read_log(log)
    return by_rank[0]


def on_ranks(world: int, function: Callable[[], Any], folder: Path, timeout: float = 300) -> list:
    """What `function`, of a module in this folder, returns on each of `world` gloo ranks.

    They find `folder` as FOLDER in their environment. RuntimeError with what they printed if they
    fail.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = []
    for rank in range(world):
        output = folder / f"rank{rank}.txt"
        given = environment(rank, world, port), output, partial(_call, function, folder)
        processes.append(fork_server().Process(target=become, args=given))
        processes[-1].start()
    deadline = time.monotonic() + timeout
    try:
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            if any(p.exitcode for p in processes):
                deadline = min(deadline, time.monotonic() + 2)  # let the others print
            time.sleep(0.02)
        failed = [r for r, p in enumerate(processes) if p.exitcode != 0]
        if failed:
            texts = [(folder / f"rank{r}.txt").read_text() for r in failed]
            ends = "\n".join(text[-3000:] for text in texts)
            raise RuntimeError(f"ranks {failed} failed or time was up:\n{ends}")
    finally:
        for p in processes:
            if p.is_alive():
                os.killpg(p.pid, signal.SIGKILL)
            p.join()
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(world)]


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
    """Keep what exists now out of all later collections of garbage, those of a run too.

    Each run begins with one, which would go through 350,000 objects of imported modules: 0.15 s.
    """
    gc.freeze()
    gc.freeze = do_nothing
    gc.unfreeze = do_nothing


def do_nothing() -> None:
    """Stand in the place of gc.freeze and gc.unfreeze."""


def become(environ: dict[str, str], output: Path, work: Callable[[], None]) -> None:
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


def _all_runs(runs: list[Run], folder: Path) -> list[Result]:
    rank = int(os.environ["RANK"])
    return [one_run(run, folder / str(i), rank) for i, run in enumerate(runs)]


def run_script(argv: list[str]) -> None:
    """What `python argv...` does."""
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def join() -> int:
    """Join the other processes of `on_ranks` as a gloo rank; the rank."""
    torch.set_num_threads(1)
    ranks = mesh.read_ranks(os.environ)
    mesh.init_ranks(ranks, torch.device("cpu"), timeout_minutes=2)
    # Each mesh starts threads that poll for as long as the process lives: one of each shape.
    mesh.build_mesh = functools.cache(mesh.build_mesh)
    return ranks.rank


def _call(function: Callable[[], Any], folder: Path) -> None:
    os.environ["FOLDER"] = str(folder)
    (folder / f"rank{os.environ['RANK']}").write_bytes(pickle.dumps(function()))


def read_records(path: Path, event: str = "") -> list[dict[str, Any]]:
    """Read a log.jsonl, or its records of one event; strict JSON, so NaN is an error."""

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    lines = path.read_bytes().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    return [record for record in records if event in ("", record["event"])]


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Read a log.jsonl: its last start, its steps, its last end."""
    starts = read_records(path, "start")
    ends = read_records(path, "end")
    start = starts[-1] if starts else {}
    end = ends[-1] if ends else {}
    return start, read_records(path, "step"), end


def main_with_signals(argv: list[str], signals: Any = ()) -> int:
    """Call train_fsdp.main as if these signals had come, or came while it runs."""
    with patch.object(train_fsdp, "SIGNALS", signals):
        return train_fsdp.main(argv)


def status_of(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Call a program's main; return the status that the program would end with."""
    try:
        return main(argv)
    except SystemExit as leave:  # argparse refuses
        assert isinstance(leave.code, int), leave
        return leave.code


# --- Inside a rank


def full_parameters(model):
    """Every parameter whole, by its original name, as this rank's shard group holds it."""
    names = [shard.original_name(n) for n, _ in model.named_parameters()]
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: whole[name].detach().cpu().clone() for name in names}


def agreed_port(out: Path, rank: int) -> str:
    """A free port that rank 0 chooses just before it is used, so that nobody else has taken it."""
    if rank == 0:
        (out / "port.new").write_text(str(free_port()))
        (out / "port.new").rename(out / "port")
    while not (out / "port").exists():
        time.sleep(0.01)
    return (out / "port").read_text()


@contextlib.contextmanager
def files_limited(size: int = 100_000):
    """No file of this process may grow beyond so many bytes (EFBIG; Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
        before = self.flat
        self.params = full_parameters(model)
        self.flat = torch.cat([v.flatten() for v in self.params.values()])
        low = self.flat.clone()
        high = self.flat.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        self.replicas_differ = max(self.replicas_differ, (high - low).max().item())
        self.moved.append(0.0 if before is None else (self.flat - before).abs().max().item())


def watched_step(run: Run, rank: int, seen: Seen, train_step: Callable) -> Callable:
    """train_step, in which a signal may arrive, and after which the model is looked at."""

    def step(training, guard, number, *args, **kwargs):
        seen.step = number
        if (rank, seen.step) == (run.signal_rank, run.signal_step):
            seen.received.append(signal.SIGTERM)
        train_step(training, guard, number, *args, **kwargs)
        if run.params:
            seen.look_at(training.model)

    return step


def poisoned(run: Run, seen: Seen) -> Any:
    """A patch by which the loss or its gradient is not finite in some steps."""
    normalize = data.normalize
    forward = vit.ViTMAE.forward

    def bad_images(images, stats):
        x = normalize(images, stats)
        return x * float("nan") if seen.step in run.poison_steps else x

    def bad_gradient(self, *args, **kwargs):
        loss, pred, mask = forward(self, *args, **kwargs)
        if seen.step in run.poison_steps:
            loss.register_hook(make_infinite)
        return loss, pred, mask

    def make_infinite(gradient):
        return gradient * float("inf")

    if run.poison == "loss":
        return patch.object(data, "normalize", bad_images)
    return patch.object(vit.ViTMAE, "forward", bad_gradient)


def lost_images(run: Run) -> Any:
    """A patch by which the data loader fails in some step."""
    build_loader = data.build_loader

    def failing_loader(*args, **kwargs):
        yield from itertools.islice(build_loader(*args, **kwargs), run.lost_step)
        raise OSError(errno.EIO, "Input/output error")

    return patch.object(data, "build_loader", failing_loader)


def saves_on_a_full_disk(run: Run) -> Any:
    """A patch by which some saves cannot write whole files."""
    attempts = itertools.count()
    save = checkpoint.save

    def limited(*given, **named):
        full = next(attempts) in run.full_saves
        with files_limited() if full else contextlib.nullcontext():
            return save(*given, **named)

    return patch.object(checkpoint, "save", limited)


def hooks(run: Run, rank: int, seen: Seen) -> Iterator[Any]:
    """The patches that a run asks for on this rank."""
    step = watched_step(run, rank, seen, train_fsdp.train_step)
    yield patch.object(train_fsdp, "train_step", step)
    if run.lost_rank == rank:
        yield lost_images(run)
    if run.due_rank >= 0:
        due = run.due_rank == rank
        yield patch.object(run_module.Checkpoints, "due_by_clock", return_value=due)
    if run.full_saves and rank == 1:
        yield saves_on_a_full_disk(run)
    if run.poison and run.poison_rank == rank:
        yield poisoned(run, seen)


def one_run(run: Run, out: Path, rank: int) -> Result:
    """Call train_fsdp.main with the hooks that the run asks for; what came of it on this rank."""
    vit.MODELS["nano"] = NANO
    seen = Seen()
    output = io.StringIO()
    errors = io.StringIO()
    out.mkdir(exist_ok=True)
    os.environ["MASTER_PORT"] = agreed_port(out, rank)
    argv = [*run.argv, "--out", run.to if run.to else str(out)]
    if "--save-every" not in argv and not run.plain:  # saving takes time
        argv += ["--save-every", "none"]
    main = partial(main_with_signals, signals=seen.received)
    try:
        with contextlib.ExitStack() as stack:
            for hook in hooks(run, rank, seen):
                stack.enter_context(hook)
            stack.enter_context(contextlib.redirect_stdout(output))
            stack.enter_context(contextlib.redirect_stderr(errors))
            status = status_of(main, argv)
    finally:
        sys.stderr.write(output.getvalue() + errors.getvalue())
    result = Result([status], output=output.getvalue(), errors=errors.getvalue())
    if rank == 0:
        result.params = seen.params
        result.moved = seen.moved
        result.replicas_differ = seen.replicas_differ
    return result
