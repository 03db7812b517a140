"""Keep a program running when its terminal output cannot be written.

Call `make_safe` first in a program. From then on a full disk or a closed pipe behind stdout or
stderr loses lines, not the run, and a character that the terminal cannot show is printed as an
escape. Copy this one file: it needs nothing else.
"""

import atexit
import errno
import fcntl
import io
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import (
    active_children,
    forkserver,
    get_context,
    parent_process,
    resource_tracker,
)
from multiprocessing.context import ForkServerContext
from threading import Thread
from typing import Any


class Lossy(io.FileIO):
    """A file whose writes succeed: what it does not take is lost."""

    lost: OSError | None = None  # to a full disk, say; a reader that went away wanted no more

    def write(self, content: Any, /) -> int:
        try:
            taken = super().write(content)
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.lost = error
            return len(content)
        return len(content) if taken is None else taken  # None: a full pipe that does not block


def make_safe() -> None:
    """Let no write to stdout or stderr fail, and write each line at once."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            lossy = io.BufferedWriter(Lossy(stream.fileno(), "w", closefd=False))
        except (AttributeError, OSError):  # closed by the caller, or no file at all
            continue
        text = io.TextIOWrapper(lossy, stream.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, text)


def lost() -> str | None:
    """Say why part of stdout was lost, for a program that makes nothing else; None if none was."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = raw.lost if isinstance(raw, Lossy) else None
    return f"{os.path.basename(sys.argv[0])}: error: stdout: {error.strerror}" if error else None


def collect() -> list[int]:
    """Collect SIGTERM, SIGUSR1 and SIGINT in the list returned; a second Ctrl-C kills."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, handle)
    return received


STOP_SIGNALS = {signal.SIGTERM, signal.SIGUSR1}  # by which a launcher asks a run to stop


def fork_server() -> ForkServerContext:
    """Start the fork server, if it does not run yet, and return its context.

    What a worker imports is memory of its own; what the server has imported is shared by all. A
    launcher sends its signals to all processes of a rank, but only the rank itself may act on them:
    the server is started with them blocked, and its processes inherit that.
    """
    context = get_context("forkserver")
    # no module of ours: the server of older Pythons finds only what is installed
    context.set_forkserver_preload(["torch", "PIL.Image"])
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # which unblocks SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    atexit.unregister(kill_children)  # there may be an earlier call
    atexit.register(kill_children)
    return context


def kill_children() -> None:
    """Kill the processes that this one has started: its end would wait for them for ever.

    multiprocessing ends them by SIGTERM, which is blocked in them.
    """
    for process in active_children():
        process.kill()


def start_worker(worker: int = 0) -> None:
    """Let this process, a worker, end when the process that reads from it does.

    PyTorch watches the parent of a worker, which is the fork server, and that lives as long as its
    workers do. Ctrl-C is left to the reading process.
    """

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enlarge_pipes()
    Thread(target=watch, daemon=True).start()


def start_helper() -> None:
    """Do as `start_worker`, but let SIGTERM end this process: its work can be interrupted."""
    start_worker()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def enlarge_pipes() -> None:
    """Let this process write its messages without waiting for their reader (Linux).

    A worker that is killed in the middle of a message leaves a reader that waits for the rest for
    ever, and messages of several large batches may fill a pipe's usual 64 KiB.
    """
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile, or beyond the limit of an ordinary user
                if stat.S_ISFIFO(os.fstat(int(name)).st_mode):
                    fcntl.fcntl(int(name), fcntl.F_SETPIPE_SZ, 2**20)


def throttled_progress(
    say: Callable[[str], None], doing: str, every: float = 5.0
) -> Callable[[int], None]:
    """Make a progress function that prints a rate every few seconds, and nothing for short work."""
    started = last = time.monotonic()

    def progress(count: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every:
            last = now
            say(f"{doing}: {count} images, {count / (now - started):.0f} per second")

    return progress


def print_error(message: str, program: str | None = None) -> None:
    """Print an error of the whole run."""
    print(f"{program or PROGRAM}: error: {message}", file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        print(TORCHRUN_NOTE, file=sys.stderr, flush=True)


def rank_of_environment() -> str:
    """Return the rank that the launcher has set, before anything else is known of it."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"


def usage_error(message: str, local: bool = False, program: str | None = None) -> int:
    """Print why a command is refused before any rank waits for another; return exit status 2.

    Rank 0 prints it, as the environment names it: nothing else is known yet. The others wait a
    little, because a rank that leaves first makes its launcher end rank 0 before it has printed.
    Where the cause may be the rank's own (`local`: variables, GPU, disk), those that are still
    there print it too.
    """
    rank = rank_of_environment()
    if rank == "0":
        print_error(message, program)
    else:
        time.sleep(RANK0_REPORT_GRACE_SECONDS)
        if local:
            print_error(f"{message} (rank {rank})", program)
    return 2


@contextmanager
def errors_name(program: str) -> Iterator[None]:
    """Let the error messages of a run name another program than train_fsdp.py."""
    global PROGRAM
    before, PROGRAM = PROGRAM, program
    try:
        yield
    finally:
        PROGRAM = before


PROGRAM = "train_fsdp.py"  # in error messages

TORCHRUN_NOTE = "note: ignore the torchrun output below, including its traceback"

RANK0_REPORT_GRACE_SECONDS = 5.0  # that the other ranks leave to rank 0 for its error message
