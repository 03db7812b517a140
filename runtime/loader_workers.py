"""Processes that read images for a rank: they share what they import, and end with the rank.

Python has one fork server, and its first start decides what it has imported. So every module that
starts processes gets it from `fork_server` here.
"""

import atexit
import fcntl
import os
import signal
import stat
from contextlib import suppress
from multiprocessing import (
    active_children,
    forkserver,
    get_context,
    parent_process,
    resource_tracker,
)
from multiprocessing.context import ForkServerContext
from threading import Thread

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
