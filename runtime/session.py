"""The ranks of a run, from joining to leaving: each error becomes one sentence and exit status."""

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist

import mesh
from runtime import process
from runtime.agreement import AgreedError, run_on_all_ranks, run_on_rank0
from runtime.config import Config
from runtime.devices import is_out_of_memory
from runtime.image_source import check_folders
from runtime.log import Log
from runtime.run import Run, resolve, resolve_on_nodes, try_plan
from runtime.watchdog import STARTUP_FACTOR, Watchdog


class Session:
    """Hold what the ranks of a run share: process group, watchdog, log, requests to stop."""

    def __init__(
        self, ranks: mesh.Ranks, device: torch.device, run: Run, signals: Sequence[int]
    ) -> None:
        """Connect to the other ranks and watch them; ConnectionError if that fails. Collective.

        `signals` is the list of `process.listen_for_signals`: it grows while the run goes on.
        """
        self.ranks = ranks
        self.device = device
        self.run = run
        self.signals = signals
        timeout = run.config.timeout
        self.log = Log(ranks.rank)
        self.locks: list[TextIO] = []  # on rank 0, open as long as the run uses its folder
        self.planned: dict[str, Any] | None = None  # on rank 0, once the run is described
        self.where_saved: Callable[[bool], str] | None = None  # says where the weights are
        self.finish_saves: Callable[[], None] | None = None  # waits for a save in the background
        self.watchdog = Watchdog(ranks.rank, ranks.world_size, timeout, self.give_up)
        self.heartbeat = self.watchdog.heartbeat  # says what this rank does next
        where = ":".join(ranks.rendezvous.values())
        self.heartbeat(f"waiting for all {ranks.world_size} ranks at {where}")
        try:
            minutes = STARTUP_FACTOR * timeout / 60
            mesh.init_ranks(ranks, device, timeout_minutes=minutes)
            if ranks.world_size > 1:
                self.watchdog.connect(os.environ)  # which have this attempt's address now
            # for what the hosts exchange; connected now, because a lost rank is noticed here
            with mesh.quiet_gloo():
                group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
                self.gloo = cast(Any, group)
            dist.barrier(self.gloo)
        except (RuntimeError, OSError, ValueError) as error:
            self.watchdog.stop()
            raise ConnectionError(f"could not join the process group: {cause_of(error)}") from error

    def claim_folder(self, out: str) -> None:
        """Keep other runs out of `out`; AgreedError, status 2, if one is in there. Collective."""
        self.heartbeat(f"preparing {out} for this run alone")

        def lock() -> str:
            # one timeout less than the watchdog allows, so that the lock's own error comes first
            longest = (STARTUP_FACTOR - 1) * self.run.config.timeout
            wait = min(process.REQUEUE_WAIT_SECONDS, longest)
            self.locks.append(process.lock_folder(out, wait))
            return process.read_owner(out)

        owner = run_on_rank0(lock)
        if self.run.config.run_mode == "real":  # the others save nothing
            run_on_all_ranks(partial(process.check_shared, out, owner))
        self.heartbeat("preparing the run")

    def agree_on_nodes(self) -> Run:
        """Return the run, with a node as its default --group; AgreedError, status 2. Collective.

        torchrun tells a rank only how many ranks its own node has, and nodes may differ.
        """
        own = self.ranks.local_world_size
        found = torch.tensor([own, -own])
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.gloo)
        fewest, negative = found.tolist()
        try:
            self.run = resolve_on_nodes(
                self.run.config, self.ranks.world_size, fewest, most=-negative
            )
        except ValueError as error:
            raise AgreedError(str(error), error) from error
        return self.run

    def give_up(self, text: str) -> None:
        """Print and log why the run ends, if not by the training loop itself."""
        process.print_error(f"{text}; {self.where_saved(False)}" if self.where_saved else text)
        self.log.write("end", reason="failed", problem=text)

    def fail(self, error: Exception) -> None:
        """Say what has failed on this rank alone; exit at once if there are other ranks.

        Then their collectives fail, or the watchdog ends them.
        """
        cause = cause_of(error)
        if is_out_of_memory(error):
            plan = try_plan(self.run, self.device, self.log.warn, ran_out=True)
            advice = f"plan: {plan['fit']}" if plan else "try a smaller --batch, or fewer --workers"
            cause = f"out of memory; {advice}; {cause}"
        elif isinstance(error, dist.DistError) or "third_party/gloo" in str(error):
            cause = f"lost connection to another rank: {cause}"
        elif not isinstance(error, OSError) and "DataLoader worker (pid" not in str(error):  # a bug
            traceback.print_exception(error)
        text = f"rank {self.ranks.rank} failed ({self.watchdog.where()}): {cause}"
        if self.ranks.world_size > 1:
            time.sleep(process.RANK0_REPORT_GRACE_SECONDS if self.ranks.rank else 0)
            self.watchdog.exit_now(text)
        if self.finish_saves:  # first, because give_up says what is saved
            try:
                self.finish_saves()
            except Exception as later:  # it must not hide the first error
                text += f"; then {cause_of(later)}"
        self.give_up(text)


def cause_of(error: Exception) -> str:
    """Return the line that names the cause of an error, even one of NCCL or a loader worker."""
    text = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    if "Traceback" in text:
        _, _, last_line = text.strip().rpartition("\n")
        return last_line
    _, last_error, after = text.partition("Last error:\n")  # in NCCL's message
    if last_error and after:
        text = after
    first_line, _, _ = text.partition("\n")
    return first_line


def run_session(
    config: Config, work: Callable[[Run, Session], None], signals: Sequence[int] = ()
) -> int:
    """Join the other ranks, call `work`, leave; return 0, 1 (failed) or 2 (bad input)."""
    try:
        ranks = mesh.read_ranks(os.environ)
        device = mesh.pick_device(config.device, ranks)
    except (ValueError, RuntimeError) as error:
        return process.usage_error(str(error), local=True)
    try:
        # flags that are wrong on any nodes are refused before the ranks meet, by all alike
        run = resolve(config, ranks.world_size, node_ranks=ranks.world_size)
    except ValueError as error:
        return process.usage_error(str(error))
    try:
        session = Session(ranks, device, run, signals)
    except ConnectionError as error:
        process.usage_error(str(error), local=True)
        return 1
    status = 0
    try:
        run = session.agree_on_nodes()
        run_on_all_ranks(partial(check_folders, config))
        work(run, session)
    except AgreedError as error:  # on all ranks, which leave together
        status = error.status
        if ranks.rank == 0:  # first: launchers kill the others when one rank fails
            process.print_error(str(error))
    except Exception as error:  # on this rank alone: it must not keep the others waiting
        status = 1
        session.fail(error)
    if session.finish_saves:  # before the barrier: two threads in one group deadlock
        session.heartbeat("saving")
        session.finish_saves()
    session.watchdog.stop()
    for lock in session.locks:
        lock.close()
    dist.barrier(session.gloo)  # rank 0 serves the store, so it must not leave before the others
    dist.destroy_process_group()
    return status


@contextmanager
def manual_gc() -> Iterator[None]:
    """Collect garbage only when the loop calls gc.collect(): a rank that collects stalls all."""
    gc.collect()
    gc.freeze()  # objects that exist now are permanent: keep the collector from scanning them
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
