"""The ranks of a run, from joining to leaving: each error becomes one sentence and exit status.

`run_session` is the one place that decides: usage errors end with status 2 before any rank waits
for another; an AgreedError is raised on all ranks, printed by rank 0, and all leave together; a
lost peer, and memory that has run out, end this rank at once; everything else is a bug and keeps
its traceback.
"""

import gc
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

import mesh
from runtime.agreement import AgreedError, gather_to_rank0, run_on_rank0
from runtime.config import STARTUP_TIMEOUT_FACTOR, Config
from runtime.device_batches import LoaderFailed
from runtime.devices import advise_out_of_memory, is_out_of_memory
from runtime.image_source import check_folders
from runtime.log import Log
from runtime.process import RANK0_REPORT_GRACE_SECONDS, print_error, usage_error
from runtime.run import Run, check_masking, resolve
from runtime.watchdog import Watchdog, exit_if_longer_than, is_peer_failure


class Session:
    """Hold what the ranks of a run share: process group, watchdog, log, requests to stop."""

    def __init__(
        self, ranks: mesh.Ranks, device: torch.device, out: str, signals: Sequence[int]
    ) -> None:
        """`signals` grows by the number of each signal that asks this process to stop."""
        self.ranks, self.device, self.out, self.signals = ranks, device, out, signals
        self.log = Log(None)
        self.where_saved: Callable[[bool], str] | None = None  # says where the weights are
        self.reason = "timeout"  # in the log, where the run is ended from outside the loop

    def join(self, timeout: int) -> None:
        """Connect to the other ranks and start the watchdog; `timeout` in seconds. Collective.

        ConnectionError where they cannot be reached, ValueError as of mesh.init_ranks.
        """
        ranks, limit = self.ranks, STARTUP_TIMEOUT_FACTOR * timeout
        who = f"rank {ranks.rank} of {ranks.world_size}"
        # how many collectives torch records for the watchdog
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")

        def no_answer() -> None:
            where = ":".join(ranks.init[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
            print_error(
                f"{who} has no answer from {where}: rank 0 is stuck, or the port belongs to "
                "another program"
            )

        with exit_if_longer_than(limit + 10, no_answer):
            try:
                mesh.init_ranks(ranks, self.device, timeout_minutes=limit / 60)
                self.watchdog = Watchdog(
                    ranks.rank,
                    ranks.world_size,
                    ranks.init,
                    seconds=timeout,
                    startup_factor=STARTUP_TIMEOUT_FACTOR,
                    folder=os.path.join(self.out, "stalled"),
                    give_up=self.give_up,
                )
                # for what the hosts exchange; connected now, because a lost rank is noticed here
                self.gloo = cast(Any, dist.new_group(backend="gloo"))
                dist.barrier(self.gloo)
            except (RuntimeError, OSError) as error:
                # of NCCL's lines, the one that says why
                cause = (str(error).partition("Last error:\n")[2] or str(error)).partition("\n")[0]
                raise ConnectionError(f"{who} could not join the process group: {cause}") from error

    def heartbeat(self, phase: str, step: int | None = None) -> None:
        """Tell the watchdog what this rank does next."""
        self.watchdog.heartbeat(phase, step)

    def stop_requested(self) -> bool:
        """Tell whether a signal has asked this rank to stop."""
        return bool(self.signals)

    def give_up(self, text: str) -> None:
        """Print and log why the run is ended from outside the training loop."""
        print_error(f"{text}; {self.where_saved(False)}" if self.where_saved else text)
        self.log.write("end", reason=self.reason, problem=text)

    def leave(self) -> None:
        """Leave the process group with all other ranks. Collective."""
        self.watchdog.stop()
        dist.barrier(self.gloo)  # rank 0 serves the store: it exits when nobody needs it any more
        dist.destroy_process_group()

    def exit_after_failure(self, error: RuntimeError | MemoryError, run: Run) -> NoReturn:
        """Exit at once where a peer is lost, or this rank's loader or memory failed.

        Other errors are bugs, and raised again. The launcher or the watchdog ends the other ranks.
        """
        lost, cause = is_peer_failure(error), cause_of(error)
        if isinstance(error, LoaderFailed):
            what = "the data loader failed"
        elif is_out_of_memory(error):
            what, self.reason = "out of memory", "memory"
            advice = advise_out_of_memory(run, self.device, self.ranks.local_world_size)
            # PyTorch adds a page to what it tried to allocate
            cause = f"{'. '.join(cause.split('. ')[:2]).rstrip('.: ')}; {advice}"
        elif lost:
            what = "lost connection to another rank"
        elif lost is None:
            traceback.print_exception(error)
            what = "failed, or lost connection to another rank"
        else:
            raise error
        rank, where = self.ranks.rank, self.watchdog.where()
        self.watchdog.exit_now(
            f"rank {rank}: {what} ({where}): {cause}", RANK0_REPORT_GRACE_SECONDS
        )

    def first_loader_error(self, error: Exception | None, step: int) -> str:
        """Return, on all ranks, the error of the first whose loader failed in `step`. Collective.

        Steps count from 0 here and from 1 in the message.
        """
        if error and not isinstance(error, LoaderFailed):
            traceback.print_exception(error)  # a bug
        errors = gather_to_rank0(error and cause_of(error)) or []

        def message() -> str:
            failed = [rank for rank, text in enumerate(errors) if text]
            more = f"; {len(failed) - 1} more ranks too" if len(failed) > 1 else ""
            first, where = failed[0], f"reading data in step {step + 1}"
            return f"rank {first}: the data loader failed ({where}): {errors[first]}{more}"

        return run_on_rank0(message)


def cause_of(error: Exception) -> str:
    """Return the line of an error that names its cause: for a loader worker, its own error."""
    text = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    lines = text.strip().splitlines() or [type(error).__name__]
    return lines[-1 if "Traceback" in text else 0]


def run_session(
    config: Config, work: Callable[[Run, Session], str | None], signals: Sequence[int] = ()
) -> int:
    """Join the other ranks, call `work`, leave; return the exit status.

    0: done, or stopped by a signal; 1: failed; 2: the command or its input is wrong. `work` returns
    an error message, the same on all ranks, where the run has failed.
    """
    try:  # all that can be refused before any rank waits for another
        ranks = mesh.read_ranks(os.environ)
        device = mesh.pick_device(config.device, ranks)
        if ranks.world_size == 1:  # several ranks look for it together, once they have joined
            check_folders(config)
    except (ValueError, RuntimeError) as error:
        return usage_error(str(error), local=True)
    session = Session(ranks, device, config.out, signals)
    try:
        run = resolve(config, ranks.world_size, ranks.local_world_size)
        check_masking(run.model, config.img_size, config.mask_ratio)
        session.join(config.timeout)
    except ConnectionError as error:
        print_error(str(error))
        return 1
    except ValueError as error:
        return usage_error(str(error))
    try:
        problem, status = work(run, session), 1
    except AgreedError as error:
        problem, status = str(error), error.status
    except (RuntimeError, MemoryError) as error:
        session.exit_after_failure(error, run)
    if problem and ranks.rank == 0:  # first: launchers kill the others when one rank fails
        print_error(problem)
    session.leave()
    return status if problem else 0


@contextmanager
def manual_gc() -> Iterator[None]:
    """Collect garbage only where the loop calls gc.collect(), on all ranks at the same step.

    A collection that Python starts by itself on one rank stalls all the others.
    """
    gc.collect()
    gc.freeze()  # what exists now stays: never to be looked at again
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
