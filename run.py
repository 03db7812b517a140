"""What keeps a run of train_fsdp.py alive and seen: time limit, log, resume, saves, evaluation.

In this order: how a run is refused and how it ends; its images; its log; where it begins, and when
it saves; evaluation. `args` are the flags, completed by train_fsdp.py. "Collective" means that
every rank must call the function.
"""

import argparse
import csv
import faulthandler
import fcntl
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import checkpoint
import data

T = TypeVar("T")
# A resumed run must have the same values of these, unless --allow-changes is given.
DECISIVE = (
    *("model", "img_size", "channels", "mask_ratio", "norm_pix_loss", "precision", "reduce_dtype"),
    *("include", "exclude", "exact_decode", "global_batch", "blr", "lr", "betas", "weight_decay"),
    *("clip", "warmup_steps", "steps", "seed", "images", "image_names_and_sizes", "image_dtype"),
    *("channel_mean", "channel_std"),
)
LONG = 4  # multiplies the time limit of what takes longer than a step: start-up, saves
LOADER_SHARE = 0.75  # of the time limit: a loader that hangs raises an error, and the run saves
FEW_BAD = 3  # so many unreadable images do not end a run, unless --max-bad is 0
REQUEUE_WAIT = 300  # seconds that a restarted run waits for the lock of its launch on a lost node

# --- How a run is refused, and how it ends


class Refused(Exception):
    """What all ranks raise together: the run ends with one sentence and this exit status."""

    def __init__(self, error: object, status: int = 2) -> None:
        super().__init__(str(error))
        self.status = 1 if isinstance(error, OSError) else status


@contextmanager
def refusing() -> Iterator[None]:
    """Turn an error that all ranks meet alike into Refused; bugs keep their traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise Refused(error) from error


def refuse(message: str, program: str = "train_fsdp.py", local: bool = False) -> int:
    """Print on rank 0 why a command is refused; return exit status 2.

    Other ranks wait, because launchers kill all when one exits, and print what is `local`.
    """
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if rank != "0":
        time.sleep(5)
        message += f" (rank {rank})"
    if local or rank == "0":
        print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    return 2


def check_host(args: argparse.Namespace) -> None:
    """Check what this computer must have for the flags; ValueError."""
    folder = tempfile.gettempdir()
    if args.workers != 0 and len(folder) > 70:
        where = f"TMPDIR {folder} is too long a path for the sockets of loader processes"
        raise ValueError(f"{where}: export TMPDIR=/tmp, or type --workers 0")
    if args.tensorboard and not find_spec("tensorboard"):
        raise ValueError("--tensorboard needs tensorboard, which is not here: pip install it")
    if args.stats and not os.path.exists(args.stats):
        raise ValueError(f"there is no {args.stats}: see --stats")
    for flag, folder in (("--data", args.data), ("--eval-data", args.eval_data)):
        if folder in ("synthetic", None):
            continue
        if not os.path.isdir(folder):
            raise ValueError(f"there is no folder {folder}: give {flag} the folder of images")
        if Path(args.out).resolve().is_relative_to(Path(folder).resolve()):
            raise ValueError(f"--out {args.out} lies in {flag} {folder}: give a folder outside it")


class Ending(NamedTuple):
    """How the steps of a run have ended."""

    # done, signal, nan, loader_error, bad_images, save_failed; after an exception "failed"
    reason: str
    steps: int  # done in all
    problem: str | None = None  # an error message


def cause_of(error: Exception) -> str:
    """Return the last line of an error: it names the cause, even that of a loader's worker."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[-1]


def fail(error: Exception, ranks: Any, log: Any) -> None:
    """Say what has failed on this rank alone; end the process if there are other ranks."""
    if limit.left <= 0:
        time.sleep(60)  # it has spoken, and ends this process
    what = "lost the connection to another rank"
    if not isinstance(error, dist.DistError) and "third_party/gloo" not in str(error):
        what = "failed"
        traceback.print_exception(error)
    problem = f"rank {ranks.rank} on {platform.node()} {what}: {cause_of(error)}"
    print(f"train_fsdp.py: error: {problem}", file=sys.stderr, flush=True)
    if log:
        log.write("end", {"reason": "failed", "problem": problem})
    if ranks.world_size > 1:  # then their collectives fail, or their time limit ends them
        os._exit(1)


def gather(value: T) -> list[T]:
    """Return the values of all ranks on each of them. Collective."""
    values: list[Any] = [None for _ in range(dist.get_world_size())]
    dist.all_gather_object(values, value)
    return values


def first(problem: str | None) -> str | None:
    """Return on all ranks the first rank's problem, if any has one. Collective."""
    return next(filter(None, gather(problem)), None)


def launcher() -> str:
    """Name what has started this run, and starts it again after a failure."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"Slurm job {job}" if job else f"process {os.getppid()} on {platform.node()}"


def restarted() -> bool:
    """Tell whether Slurm or torchrun has started this run again."""
    counts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return any(os.environ.get(name, "0") != "0" for name in counts)


def lock_folder(out: str) -> TextIO:
    """Make OUT, and keep other runs out of it until the file returned is closed; ValueError."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        file = open(Path(out, ".lock"), "a+")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"{error}: give --out a folder that can be written") from None
    # a file system notices late that a node is lost
    seconds = REQUEUE_WAIT if restarted() else 0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if seconds <= 0:
                other = f"another run ({Path(out, '.lock').read_text()})"
                advice = "wait for it, stop it, or give another --out"
                raise ValueError(f"{out} is in use by {other}: {advice}") from None
        seconds -= 1
        time.sleep(1)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return file


class TimeLimit:
    """End this process if its main thread makes no progress, and leave its stacks in a file."""

    left = math.inf  # seconds
    log: Any = None  # the run's Log, once there is one

    def start(self, out: str, rank: int, seconds: float) -> None:
        """Set the limit of a step, from now on and then again by `arm`."""
        self.folder = Path(out, "stacks")
        self.rank = rank
        self.seconds = seconds
        self.log = None
        self.over = Event()
        self.arm(LONG)
        Thread(target=self._watch, args=[self.over, os.getppid()], daemon=True).start()

    def arm(self, factor: float = 1) -> None:
        """Give what comes next `factor` times the limit of a step."""
        self.left = factor * self.seconds
        # for C code that lets no thread of Python run: it prints the stacks
        faulthandler.dump_traceback_later(2 * LONG * self.seconds, exit=True, file=2)

    def stop(self) -> None:
        """Set no limit any more."""
        self.over.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self, over: Event, launcher: int) -> None:
        problem = ""
        while not problem:
            if over.wait(0.5):
                return
            self.left -= 0.5  # not by the clock: a job may be suspended for longer
            # only of torchrun: a shell may well end before the run that it started
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != launcher:
                problem = "torchrun is gone: this run ends without saving"
            elif self.left <= 0:
                what = f"no step or save has ended in time (--timeout {self.seconds:g})"
                problem = f"{what}: the stacks of each rank are in {self.folder}"
                with suppress(OSError):  # a full disk
                    self.folder.mkdir(parents=True, exist_ok=True)
                    path = self.folder / f"rank_{self.rank}.txt"
                    faulthandler.dump_traceback(path.open("w"))
        if self.rank == 0:
            print(f"train_fsdp.py: error: {problem}", file=sys.stderr, flush=True)
        if self.log:
            self.log.write("end", {"reason": "failed", "problem": problem})
        time.sleep(3)  # launchers kill all ranks when one exits: let them write their stacks
        os._exit(1)


limit = TimeLimit()

# --- The images


def find_images(args: argparse.Namespace, folder: str) -> Any:
    """List the images of a folder on rank 0; return the list on all ranks. Collective."""
    if folder == "synthetic":
        return data.SyntheticImages(args.seed, args.channels)

    def check_copy() -> None:  # each rank opens a pack itself
        if files.packed and data.fingerprint(data.scan(folder)) != data.fingerprint(files):
            where = f"{folder} on {platform.node()}"
            raise ValueError(f"{where} is not the pack that rank 0 sees: copy it again")

    with refusing():
        list_all = partial(data.scan, folder, args.include or (), args.exclude or ())
        files = checkpoint.on_rank0(list_all)
        checkpoint.on_all_ranks(check_copy)
    return files


def find_stats(args: argparse.Namespace, files: Any) -> None:
    """Set channel_stats, if they were measured, and image_names_and_sizes of `args`. Collective."""

    def find() -> tuple[data.ChannelStats, str | None]:
        if args.data == "synthetic":
            return args.channel_stats, None
        stats = args.channel_stats
        images = data.fingerprint(files)
        path = args.stats or data.stats_file(args.data)
        if os.path.exists(path):
            stats, measured = data.read_stats(path)
            if measured not in (images, None):
                print(f"warning: {path} was measured on other images", file=sys.stderr)
        elif args.channels != 3:
            command = f"`python prepare.py stats {args.data}`"
            raise ValueError(f"--channels {args.channels} needs statistics: type {command}")
        if len(stats.mean) != args.channels:
            found = f"{path} is of {len(stats.mean)} channels"
            raise ValueError(f"{found}, not {args.channels}: see --channels")
        return stats, images

    with refusing():
        args.channel_stats, args.image_names_and_sizes = checkpoint.on_rank0(find)


def open_loader(
    args: argparse.Namespace, files: Any, log: Any, steps: range, augment: bool = True
) -> Any:
    """Open this rank's loader of some steps (data.build_loader)."""
    return data.build_loader(
        files,
        img_size=args.img_size,
        patches=args.patches,
        seed=args.seed,
        global_batch=args.global_batch,
        micro_batch_size=args.batch,
        steps=steps,
        rank=log.rank,
        world_size=args.world_size,
        workers=args.workers,
        pin_memory=log.device.type == "cuda",
        timeout=LOADER_SHARE * args.timeout,
        exact=args.exact_decode,
        stats=args.channel_stats,
        augment=augment,
    )


# --- The log


def memory_of(device: torch.device) -> dict[str, float | int | None]:
    """Return the peak GiB of this rank's GPU since the start, and the allocator's retries."""
    if device.type != "cuda":
        return dict.fromkeys(("peak_allocated_gib", "peak_reserved_gib", "alloc_retries"))
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }


class Log:
    """Write on rank 0: lines on the terminal, OUT/log.jsonl, OUT/tensorboard, OUT/bad_images.csv.

    Rates are means since the line before, by the host's clock, without what is `paused`.
    """

    file: TextIO | None = None
    lock: TextIO | None = None
    tensorboard: Any = None

    def __init__(self, args: argparse.Namespace, rank: int, device: torch.device) -> None:
        """Open the log, to append to it. Collective."""
        self.args = args
        self.rank = rank
        self.device = device
        self.losses: deque[float] = deque(maxlen=10)  # of the last steps
        self.bad_images: list[tuple[str, str, int]] = []  # this rank's new ones: path, reason, step
        self.known_bad: set[str] = set()  # paths of those of all ranks since the start
        with refusing():
            checkpoint.on_rank0(self._open)
        self.start_clock(0)
        limit.log = self

    def _open(self) -> None:
        self.lock = lock_folder(self.args.out)
        path = Path(self.args.out, "log.jsonl")
        self.file = open(path, "a")  # noqa: SIM115
        if path.read_bytes()[-1:] not in (b"", b"\n"):  # a node was lost while it wrote a line
            self.file.write("\n")

    def close(self) -> None:
        """Let other runs use OUT."""
        for file in (self.file, self.lock):
            if file:
                file.close()

    def start_clock(self, step: int) -> None:
        """Begin to measure before `step`."""
        self.first = self.begin = step
        self.begun = self.started = time.perf_counter()
        self.waited = self.waited_before = 0.0  # seconds spent waiting for batches
        self.rates: list[float] = []  # images/s of each interval

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block (a save, an evaluation) out of the seconds per step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.begun += time.perf_counter() - start

    def say(self, *lines: str) -> None:
        """Print lines on the terminal."""
        if self.rank == 0:
            with suppress(OSError):  # a full disk, or a reader that is gone
                print(*lines, sep="\n", flush=True)

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Add a line to log.jsonl; a full disk costs the line, not the run."""
        if self.file is None:
            return
        record = {"event": event} | values
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[key] = None  # JSON has no NaN
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            if self.args.tensorboard and "step" in values:
                self._write_tensorboard(event, values)
        except OSError as error:
            self.say(f"warning: the log cannot be written now: {error}")

    def _write_tensorboard(self, event: str, values: dict[str, Any]) -> None:
        if self.tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(self.args.out, "tensorboard", self.args.run_mode)
            # hide the later steps that an earlier launch of this run may have written
            self.tensorboard = SummaryWriter(folder, purge_step=values["step"])
        for key, value in values.items():
            if type(value) in (int, float) and key != "step":
                self.tensorboard.add_scalar(f"{event}/{key}", value, values["step"])
        self.tensorboard.flush()

    def step(self, result: Any, lr: float) -> None:
        """Count a step; every --log-every steps log it, with the rates since the last line.

        Loss and norm are those of this step, over all ranks; memory and waiting are rank 0's.
        """
        args = self.args
        trained = args.run_mode != "io"
        done = result.step + 1
        if trained and math.isfinite(result.loss):
            self.losses.append(result.loss)
        if done % args.log_every and done != args.steps:
            return
        now = time.perf_counter()
        seconds = (now - self.begun) / (done - self.begin)
        waited = (self.waited - self.waited_before) / (done - self.begin)
        rate = args.global_batch / seconds
        self.rates.append(rate)
        self.begin = done
        self.begun = now
        self.waited_before = self.waited
        values = {
            "step": done,
            "epoch": result.step // args.epoch_steps,
            "loss": result.loss,
            "grad_norm": result.norm,
            "lr": lr,
            "step_seconds": seconds,
            "data_seconds": waited,
            "images_per_second": rate,
            "images_per_second_per_rank": rate / args.world_size,
            "tflops_per_rank": rate / args.world_size * args.flops_per_image / 1e12,
        }
        text = f"loss {result.loss:7.4f}  norm {result.norm:8.3f}  lr {lr:.2e}  "
        if not trained:
            values |= {"loss": None, "grad_norm": None, "lr": 0.0, "tflops_per_rank": None}
            text = ""
        memory = memory_of(self.device)
        self.write("step", values | memory)
        text += f"{rate:8.1f} img/s  "
        if memory["peak_allocated_gib"] is not None:
            text += f"{memory['peak_allocated_gib']:6.2f} GiB  "
        left = timedelta(seconds=round(seconds * (args.steps - done)))
        text += f"data wait {1e3 * waited:7.1f} ms {waited / seconds:4.0%}  ETA {left}"
        self.say(f"step {done:{len(str(args.steps))}}/{args.steps}  {text}")

    def list_bad_images(self) -> str | None:
        """List the new ones of all ranks; return an error message if too many. Collective."""
        new = []
        for row in chain.from_iterable(gather(self.bad_images)):
            if row[0] not in self.known_bad:
                self.known_bad.add(row[0])
                new.append(row)
        self.bad_images = []
        if new and self.rank == 0:
            path = Path(self.args.out, "bad_images.csv")
            example, reason, _ = new[0]
            what = f"{len(new)} unreadable images, such as {example} ({reason})"
            self.say(f"warning: replaced {what}")
            try:
                with path.open(
                    "a", encoding="utf-8", errors="surrogateescape", newline=""
                ) as file:  # any bytes
                    table = csv.writer(file)
                    if file.tell() == 0:
                        table.writerow(["path", "reason", "step"])
                    table.writerows(new)
            except OSError as error:
                self.say(f"warning: {error}")
        share = self.args.max_bad
        bad = len(self.known_bad)
        if bad <= share * self.args.images or (share and bad <= FEW_BAD):
            return None
        text = f"{bad} of {self.args.images} images are unreadable, more than --max-bad {share:g}"
        return f"{text} allows: they are listed in {self.args.out}/bad_images.csv"

    def end(self, ending: Ending, to_beat: dict[str, float]) -> None:
        """Write the record `end`, and a summary to the terminal."""
        seconds = time.perf_counter() - self.started
        rate = None
        if self.rates:  # the first interval includes the warm-up of caches, buckets and compilers
            rate = statistics.median(self.rates[1:] or self.rates)
        if self.rates and self.args.run_mode == "io":  # batches of several workers come together
            images = (self.begin - self.first) * self.args.global_batch
            rate = images / (self.begun - self.started)
        values: dict[str, Any] = ending._asdict() | {"skipped": int(ending.reason == "nan")}
        values |= {"bad_images": len(self.known_bad), "images_per_second": rate}
        values |= {"seconds": seconds, "data_wait_fraction": self.waited / seconds}
        values |= memory_of(self.device)
        if self.losses:
            values |= {"loss": sum(self.losses) / len(self.losses)} | to_beat
            self.say(
                f"mean loss of the last {len(self.losses)} steps {values['loss']:.4f}; predicting "
                f"zero gives {to_beat['loss_of_zero']:.4f}, the mean colour of the visible patches "
                f"{to_beat['loss_of_mean_colour']:.4f}"
            )
        self.write("end", values)
        speed = f" {rate:.1f} img/s," if rate else ""
        self.say(
            f"{ending.reason}: {ending.steps - self.first} steps in {seconds:.1f} s,{speed} "
            f"{self.waited / seconds:.1%} of the time waiting for data; log in "
            f"{self.args.out}/log.jsonl"
        )


def record(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags and what follows, by the names that checkpoints and the log use."""
    found = vars(args).copy()
    stats = found.pop("channel_stats")
    found |= {"image_dtype": stats.dtype, "channel_mean": stats.mean, "channel_std": stats.std}
    if args.blr is not None:
        found["lr"] = None  # it follows from --blr
    return found


def describe(args: argparse.Namespace, log: Log, begin: int) -> None:
    """Write the record `start`, and what will run to the terminal."""
    device = log.device.type
    gflop = args.flops_per_image / 1e9
    mesh = dict(zip(("replicate", "shard"), args.mesh_shape, strict=True))
    batch = f"{args.batch} images x {args.world_size} ranks x {args.accum} accumulation steps"
    mean = ", ".join(f"{value:.5g}" for value in args.channel_stats.mean)
    log.say(
        f"{args.model}: {args.params:,} parameters, {gflop:.1f} GFLOP per image",
        f"{args.world_size} ranks on {device}, {args.mode}, mesh {mesh}, {args.precision}",
        f"batch: {batch} = {args.global_batch}; lr: {args.lr:.3g}",
        f"data: {args.data}, {args.images} images, {args.epoch_steps} steps per epoch",
        f"pixels: {args.channels} channels, mean {mean}",
    )
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    follows = {"peak_lr": args.lr, "device": device, "mesh": mesh, "versions": versions}
    log.write("start", record(args) | follows | {"begin": begin})


def open_profile(args: argparse.Namespace, log: Log, begin: int) -> Any:
    """Return a started profiler of --profile steps of rank 0, after five others; or None."""
    if not args.profile or log.rank:
        return None
    folder = Path(args.out, "profile")

    def write(profiler: torch.profiler.profile) -> None:
        key = "self_cpu_time_total" if log.device.type == "cpu" else "self_device_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=20)
        try:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / "rank_00000.json.gz"))
            (folder / "rank_00000.txt").write_text(table)
        except (OSError, RuntimeError) as error:  # a full disk
            log.say(f"warning: no profile: {error}")
            return
        log.write("profile", {"first_step": begin + 6})
        log.say(f"profile in {folder}: open the trace in https://ui.perfetto.dev")

    plan = torch.profiler.schedule(wait=4, warmup=1, active=args.profile, repeat=1)
    profiler = torch.profiler.profile(schedule=plan, on_trace_ready=write, acc_events=True)
    profiler.start()
    return profiler


# --- Where a run begins, and when it saves


def choose_checkpoints(args: argparse.Namespace) -> list[Path]:
    """List the checkpoints to try, the newest first. Collective.

    Refused if --resume forbids those in OUT, so that none is mixed with those of another run.
    """
    if args.run_mode != "real":  # the others save nothing
        return []
    with refusing():
        return checkpoint.on_rank0(partial(_choose, args))


def _choose(args: argparse.Namespace) -> list[Path]:
    found = [*reversed(checkpoint.list_checkpoints(args.out))]
    if args.resume == "auto":
        return found
    if found and restarted():  # it goes on with what it has saved, if that is its own
        state = checkpoint.read_manifest(found[0])["run_state"]
        if state.get("launcher") == launcher():
            return found
    if args.resume == "none":
        if found:
            raise ValueError(f"{args.out} holds checkpoints of another run: give another --out")
        return []
    begin = Path(args.resume)
    if not begin.exists():
        raise ValueError(f"--resume {begin}: there is no such folder")
    begin = max(checkpoint.list_checkpoints(begin), key=checkpoint.step_of, default=begin)
    step = checkpoint.read_manifest(begin)["step"]
    for path in found:
        other = path.resolve().parent != begin.resolve().parent
        if other or checkpoint.step_of(path) > step:  # this run would take it for its own
            advice = f"give another --out, or move it away: mv {path} ELSEWHERE"
            raise ValueError(f"{args.out} holds {path.name} besides --resume {begin}: {advice}")
    return [begin]


class Checkpoints:
    """Where a run begins, when it saves, and where its weights are."""

    def __init__(self, args: argparse.Namespace, log: Log, training: Any) -> None:
        self.args = args
        self.log = log
        self.training = training  # a train_fsdp.Training; None in --run-mode io
        self.begin = 0  # steps done before this run
        self.saved = -1  # the newest step in OUT
        self.failures = 0  # of saves, in a row
        self.saved_at = time.monotonic()
        when = args.save_every if args.run_mode == "real" else "none"
        self.steps, self.seconds = save_interval(when)

    def due_by_clock(self) -> bool:
        """Tell whether to save by this rank's clock; the guard has all ranks agree on the step."""
        return time.monotonic() - self.saved_at > self.seconds

    def save(self, step: int, final: bool = False) -> str | None:
        """Save after so many steps; return why the run cannot go on, if so. Collective.

        A checkpoint holds model, optimizer, step, flags and fp16's scale. No random state and no
        place in the data: both follow from the step. A failed save is only warned of, unless it
        is the second in a row, or `final`.
        """
        never = self.steps == self.seconds == math.inf
        if step == self.saved or never:
            return None
        limit.arm(LONG)
        start = time.monotonic()
        model = self.training.model
        optimizer = self.training.optimizer
        scaler = self.training.scaler
        state: dict[str, Any] = {"flags": record(self.args), "launcher": launcher()}
        state["scaler"] = scaler.state_dict() if scaler else None
        try:
            with self.log.paused():
                checkpoint.save(self.args.out, step, model, optimizer, state, keep=self.args.keep)
        except OSError as error:
            self.failures += 1
            problem = f"step {step} was not saved: {error}"
            if final or self.failures > 1:
                return problem
            self.log.say(f"warning: {problem}; the run goes on, the older checkpoints are kept")
        else:
            self.failures = 0
            self.saved = step
            self.log.write("save", {"step": step, "seconds": time.monotonic() - start})
        self.saved_at = time.monotonic()
        return None

    def resume(self, found: Sequence[Path], defaults: Mapping[str, Any]) -> None:
        """Load the first whole checkpoint of `found`; Refused if flags forbid it.

        `defaults` are those of flags that an older checkpoint may lack. Collective.
        """
        optimizer = self.training.optimizer
        scaler = self.training.scaler
        settings = []
        for group in optimizer.param_groups:
            settings.append({key: group[key] for key in group if key != "params"})
        for path in found:
            limit.arm(LONG)
            try:
                state, changes = checkpoint.on_rank0(partial(self._compare, path, defaults))
                self.begin = checkpoint.load(path, self.training.model, optimizer)["step"]
            except (ValueError, OSError) as error:
                if not isinstance(error, checkpoint.CorruptCheckpointError):
                    raise Refused(error) from error
                if path == found[-1]:  # the oldest
                    raise Refused(f"{error}: give another --resume PATH or --out") from error
                self.log.say(f"warning: skipping a damaged checkpoint: {error}")
                continue
            for group, flags in zip(optimizer.param_groups, settings, strict=True):
                group.update(flags)  # the flags hold: with --allow-changes they may differ
            # A scale below 1 comes from overflows that no scale could cure.
            scale = state.get("scaler")
            if scaler and scale and scale["scale"] >= 1:
                scaler.load_state_dict(scale)
            if path.resolve().parent == Path(self.args.out).resolve():
                self.saved = self.begin
            self.log.say(f"resumed {path} at step {self.begin}; changed: {changes or '-'}")
            return

    def _compare(self, path: Path, defaults: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the run state, and which flags differ; ValueError for one that must not."""
        manifest = checkpoint.read_manifest(path)
        state = manifest["run_state"]
        if "flags" not in state or not manifest["step"]:  # of another program, or of convert.py
            return state, ""
        now, then = json.loads(json.dumps([record(self.args), defaults]))
        then |= state["flags"]
        if self.args.epochs and then["global_batch"] != now["global_batch"]:
            why = "with --epochs, the steps done would count as another number of epochs"
            raise ValueError(f"{path}: {why}: give --global-batch {then['global_batch']}")
        changed = {}
        for key, value in now.items():
            if then.get(key, value) != value:
                changed[key] = f"{key} {then[key]} -> {value}"
        refused = [changed[key] for key in changed if key in DECISIVE]
        if refused and not self.args.allow_changes:
            what = f"{path} was trained with other flags ({', '.join(refused)})"
            advice = "type them as they were, add --allow-changes, or use another --out"
            raise ValueError(f"{what}: {advice}")
        return state, ", ".join(changed.values())

    def where(self) -> str:
        """Say where the weights are."""
        if self.saved < 0:
            return "nothing saved"
        return f"saved {self.args.out}/step_{self.saved:08d}"


def save_interval(text: str) -> tuple[float, float]:
    """Parse --save-every into (steps, seconds); infinity for what was not given; ValueError."""
    with suppress(ValueError):
        if text == "none":
            return math.inf, math.inf
        if text.endswith("m") and 0 < float(text[:-1]) < math.inf:
            return math.inf, 60 * float(text[:-1])
        if int(text) > 0:
            return int(text), math.inf
    raise ValueError(f"--save-every takes steps (500), minutes (30m) or none, not {text}")


def is_done(out: str) -> bool:
    """Tell whether OUT/done is there. Collective."""
    return checkpoint.on_rank0(Path(out, "done").exists)


def mark_done(out: str, done: bool) -> None:
    """Make OUT/done, until which launch_frontier.sh goes on, or remove it. Collective."""
    path = Path(out, "done")
    with refusing():
        checkpoint.on_rank0(path.touch if done else partial(path.unlink, missing_ok=True))


# --- Evaluation


@torch.no_grad()
def evaluate(
    args: argparse.Namespace,
    model: nn.Module,
    losses_of: Callable[[Tensor, Tensor], Tensor],
    files: Any,
    log: Log,
    step: int,
) -> None:
    """Log the mean loss of all held-out images, and of two that it has to beat. Collective.

    `losses_of` takes images (B, C, H, W) as loaded and noise (B, L), and returns the losses (3, B)
    of the model, of zero and of the mean colour. All ranks call it equally often, because the model
    is sharded. The numbers are the same for any mode and any number of ranks: of each image the
    centre is cut out, and its mask depends only on --seed and its index.
    """
    steps = range(math.ceil(len(files) / args.global_batch))  # the last one may be incomplete
    batches = iter(open_loader(args, files, log, steps, augment=False))
    pixels = torch.zeros(args.batch, args.channels, args.img_size, args.img_size)
    noise = torch.zeros(args.batch, args.patches)
    blank = data.MicroBatch(pixels, noise, [-1] * args.batch, [])  # its images do not count
    sums = torch.zeros(4, dtype=torch.float64, device=log.device)  # number of images, losses
    bad: list[str] = []
    model.eval()
    for _ in range(len(steps) * args.accum):
        limit.arm(LONG)
        try:
            batch = next(batches)
        except (OSError, RuntimeError) as error:  # it costs an evaluation, not the run
            batches = repeat(blank)
            batch = blank
            bad.append(str(error))
        counts = torch.tensor([image >= 0 for image in batch.image_ids], device=log.device)
        losses = losses_of(batch.image.to(log.device), batch.noise.to(log.device)).double()
        sums += torch.cat([counts[None], losses * counts]).sum(1)
        bad += [f"{files.path(index)} ({reason})" for index, reason in batch.bad]
    model.train()
    dist.all_reduce(sums)
    left_out = set(chain.from_iterable(gather(bad)))
    if left_out:
        what = f"{len(left_out)} of {len(files)} held-out images cannot be read"
        log.say(f"warning: {what}, such as {min(left_out)}")
    count, *totals = sums.tolist()
    if count == 0:
        return
    loss, zero, colour = (total / count for total in totals)
    values = {"eval_loss": loss, "loss_of_zero": zero, "loss_of_mean_colour": colour}
    log.write("eval", {"step": step, "images": int(count)} | values)
    log.say(
        f"evaluation: loss {loss:.4f} (predicting zero {zero:.4f}, the mean colour of the visible "
        f"patches {colour:.4f}) over {count:.0f} of {len(files)} images"
    )
