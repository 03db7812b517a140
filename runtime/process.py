"""How a process deals with its environment: terminal, signals, folder lock, child processes.

Copy this one file: it needs nothing else.
"""

import atexit
import fcntl
import io
import multiprocessing
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from multiprocessing import forkserver, resource_tracker
from threading import Thread
from typing import Any, TextIO, cast

# --- The terminal


class Lossy(io.FileIO):
    """A file whose writes always succeed: what cannot be written is lost."""

    def write(self, content: Any, /) -> int:
        try:
            written = super().write(content)
        except OSError:  # the reader is gone, or the disk is full
            return len(content)
        if written is None:  # a full pipe that does not block
            return len(content)
        return written


def ignore_output_errors() -> None:
    """Let no write to stdout or stderr fail, whatever its characters; write each line at once."""
    for name in ("stdout", "stderr"):
        with suppress(AttributeError, OSError):  # closed by the caller, or no file at all
            stream = getattr(sys, name)
            lossy = io.BufferedWriter(Lossy(stream.fileno(), "w", closefd=False))
            text = io.TextIOWrapper(lossy, stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, text)


def throttled_progress(doing: str) -> Callable[[int], None]:
    """Make a progress function that prints a count every few seconds; short work prints none."""
    last = time.monotonic()

    def progress(count: int) -> None:
        nonlocal last
        if time.monotonic() > last + 5:
            last = time.monotonic()
            print(f"{doing}: {count} images")

    return progress


# --- Errors of the whole run

PROGRAM = "train_fsdp.py"  # in error messages; `config.make_config` sets it
RANK0_REPORT_GRACE_SECONDS = 5.0  # how long the other ranks let rank 0 print its error first


def print_error(message: str, program: str | None = None) -> None:
    """Print an error of the whole run."""
    if program is None:
        program = PROGRAM
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)


def usage_error(message: str, local: bool = False, program: str | None = None) -> int:
    """Print why a command is refused before any rank waits for another; return exit status 2.

    Rank 0 prints it. The others wait a little first: if one exits early, the launcher may kill
    rank 0 before it has printed. Then they print an error that may be theirs alone (`local`).
    """
    rank = _rank()
    if rank != "0":
        time.sleep(RANK0_REPORT_GRACE_SECONDS)
        message += f" (rank {rank})"
    if local or rank == "0":
        print_error(message, program)
    return 2


def _rank() -> str:
    for variable in ("RANK", "SLURM_PROCID"):
        if os.environ.get(variable):
            return os.environ[variable]
    return "0"


# --- Signals, and what to do if the launcher is gone

# They ask a run to stop. SIGHUP comes when a terminal is closed; torchrun passes it on.
STOP_SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP}


def listen_for_signals() -> list[int]:
    """Collect the STOP_SIGNALS in the list returned; a second Ctrl-C ends the process.

    A thread does so, at once: Python would call a signal handler only after the main thread has
    finished what it computes or waits for. The thread also ends a process whose torchrun is gone.
    The loop looks at the list once per step, so a signal during start-up acts after the first step.
    """
    received: list[int] = []
    read, write = os.pipe()
    os.set_blocking(write, False)
    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # started by nohup
        signal.signal(number, _do_nothing)
    signal.set_wakeup_fd(write)
    Thread(target=_listen, args=(read, received, os.getppid()), daemon=True).start()
    return received


def _do_nothing(number: int, frame: Any) -> None:
    """Handle a signal: Python writes its number to the wake-up pipe, where `_listen` reads it."""


def _listen(pipe: int, received: list[int], launcher: int) -> None:
    """Act on each signal whose number comes out of `pipe`, and on the end of the launcher."""

    def say(text: str) -> None:
        if _rank() == "0":
            print(f"\n{text}", file=sys.stderr, flush=True)

    while True:
        ready, _, _ = select.select([pipe], [], [], 1.0)
        # only under torchrun: a shell may well end before the run that it started
        if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != launcher:
            say(f"{PROGRAM}: error: torchrun is gone: this run ends without saving")
            os._exit(1)
        if not ready:
            continue
        number = ord(os.read(pipe, 1))
        if number == signal.SIGINT and number in received:
            say("ended without saving")
            os._exit(128 + number)
        if number == signal.SIGINT:
            say("stopping after this step; press again to end without saving")
        if number in STOP_SIGNALS:
            received.append(number)


# --- The folder of a run

# A requeued job may find its own lock: a file system notices late that a node is lost.
REQUEUE_WAIT_SECONDS = 300.0
# On a network file system one node may see another's writes late.
SHOWN_AFTER_SECONDS = 90.0  # NFS may remember for 60 s that a file does not exist


def launchers() -> dict[str, str]:
    """Return what started this process: {the variable that counts its restarts: its name}."""
    found = {}
    if "SLURM_JOB_ID" in os.environ:
        found["SLURM_RESTART_COUNT"] = f"Slurm job {os.environ['SLURM_JOB_ID']}"
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent of its ranks
        found["TORCHELASTIC_RESTART_COUNT"] = f"torchrun {os.getppid()} on {platform.node()}"
    return found


def is_restart(earlier: str) -> bool:
    """Tell whether Slurm or torchrun has restarted a run.

    `earlier` has the names of the `launchers` of the run's earlier process, one a line.
    """
    for variable, name in launchers().items():
        count = os.environ.get(variable, "0")
        if count != "0" and name in earlier.splitlines():
            return True
    return False


def read_owner(folder: str) -> str:
    """Return what `lock_folder` wrote about its process; an empty text if there is no lock."""
    try:
        with open(os.path.join(folder, ".lock")) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def check_shared(folder: str, owner: str) -> None:
    """Check that this node sees the lock of `owner`, on another node; ValueError if not."""
    deadline = time.monotonic() + SHOWN_AFTER_SECONDS
    while read_owner(folder) != owner:
        if time.monotonic() > deadline:
            where = f"{folder} on {platform.node()} is not the folder that rank 0 has locked"
            raise ValueError(f"{where}: give --out a folder that all nodes share")
        time.sleep(0.5)


def lock_folder(folder: str, requeue_wait: float = REQUEUE_WAIT_SECONDS) -> TextIO:
    """Make `folder`, and keep other runs out of it until the file returned is closed.

    The lock is an flock on FOLDER/.lock: it is released when this process ends, however it ends. A
    lock that this Slurm job took before it was requeued is waited for, up to `requeue_wait`
    seconds. ValueError if another run has the lock (it says which process), or if the folder cannot
    be written.
    """
    job = os.environ.get("SLURM_JOB_ID")
    job_suffix = f", Slurm job {job}" if job else ""
    deadline = time.monotonic() + requeue_wait
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, ".lock"), "a+")  # noqa: SIM115
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read()
                if job and owner.endswith(job_suffix) and time.monotonic() < deadline:
                    time.sleep(1)
                    continue
                other = f"another run ({owner}): wait for it, stop it, or give another --out"
                raise ValueError(f"{folder} is in use by {other}") from None
            except OSError as error:  # a file system without flock
                print(f"warning: {folder} cannot be locked ({error}): start no other run in it")
            break
        file.truncate(0)
        since = f"since {datetime.now():%Y-%m-%d %H:%M:%S.%f}"  # no two runs write the same
        file.write(f"process {os.getpid()} on {platform.node()} {since}{job_suffix}")
        file.flush()
    except OSError as error:
        raise ValueError(f"{error}: give --out a folder that can be written") from None
    return file


# --- Children: loader workers and helpers


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Start the fork server, if it does not run yet, and return its context.

    A launcher sends its signals to all processes of a rank, but only the rank itself may act on
    them: the server is started with them blocked, and its processes inherit that.
    """
    context = multiprocessing.get_context("forkserver")
    # All workers share what the server imports. Older Pythons' servers find only installed modules.
    context.set_forkserver_preload(["torch", "PIL.Image"])
    resource_tracker.ensure_running()  # first: its start unblocks SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def kill_children() -> None:  # SIGTERM is blocked in them
        for process in multiprocessing.active_children():
            process.kill()

    atexit.register(kill_children)
    return context


def start_worker(worker: int = 0) -> None:
    """Let this process, a worker, end when the process that reads from it does.

    PyTorch watches its parent, the fork server, which lives as long as its workers do.
    """

    def watch() -> None:
        cast(Any, multiprocessing.parent_process()).join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
