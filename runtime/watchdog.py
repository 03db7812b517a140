"""The watchdog of a run: ends it when a rank is stuck or lost, and names that rank.

Copy this one file: it needs torch alone.
"""

import faulthandler
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread, Timer
from typing import NoReturn

import torch
import torch.distributed as dist

# Modules that do nothing but call collectives.
COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")


def is_peer_failure(error: Exception) -> bool | None:
    """Tell whether a collective failed because of another rank; None where it may be a bug here.

    NCCL and the store raise types of their own. Gloo raises a bare RuntimeError, recognised by the
    place: a collective, or, perhaps, the code of FSDP and DDP that calls one, and backward.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    if isinstance(error, dist.DistError):
        return True
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = next((name for name in reversed(modules) if name != "torch._ops"), "")
    if type(error) is not RuntimeError:  # OutOfMemoryError, AcceleratorError
        return False
    if place in COLLECTIVES:
        return True
    maybe = place.startswith(("torch.distributed.", "torch.nn.parallel.", "torch.autograd."))
    return None if maybe else False


@dataclass(frozen=True)
class Heartbeat:
    """What a rank's main thread does, and since when."""

    count: int = 0  # heartbeats so far: the rank with the fewest is behind
    phase: str = "starting"
    step: int | None = None
    since: float = field(default_factory=time.monotonic)


@contextmanager
def exit_if_longer_than(seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Exit with status 1, after `give_up()`, if the body takes longer than `seconds`.

    For the time before the watchdog runs: torch waits for ever for a store that accepts a
    connection and then stops, or is not a store at all.
    """

    def leave() -> None:
        give_up()
        os._exit(1)

    timer = Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Watchdog:
    """End a run whose ranks wait for one that makes no progress, and name that rank.

    The main thread calls `heartbeat` when it begins something; a thread of its own publishes that
    to the other ranks through their store. A rank without a heartbeat for `seconds` asks rank 0 to
    compare all ranks: rank 0 names those that are silent or behind, and all exit. A phase that runs
    for the first time (connecting, compiling), and each save, may take `startup_factor` times as
    long, and any phase three times what it took before. Time during which the process itself was
    stopped does not count.

    Every rank writes its last collectives to `folder`, where torch recorded them (its flight
    recorder, switched on by TORCH_FR_BUFFER_SIZE); a rank that is behind prints its stack.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        environ: Mapping[str, str],
        *,
        seconds: float,
        startup_factor: float,
        folder: str,
        give_up: Callable[[str], None],
    ) -> None:
        """Start watching, if there are other ranks.

        `environ` says where the store is (MASTER_ADDR, MASTER_PORT). `give_up` is called with the
        error message on rank 0, or on the others where rank 0 is silent.
        """
        self.rank, self.world_size = rank, world_size
        self.seconds, self.startup_factor = seconds, startup_factor
        self.folder, self.give_up = Path(folder), give_up
        self.interval = min(10.0, seconds / 20)
        self.beat, self.longest = Heartbeat(), dict[str, float]()
        self.last_check = self.grace_start = time.monotonic()
        self.ended, self.leaving = Event(), Lock()
        self.threads: list[Thread] = []
        if world_size > 1:  # a single process may sit in a debugger for hours
            # a connection of its own: a waiting call blocks that of the process group
            address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
            self.store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
            # two threads: a store whose rank is stopped does not answer, not even with an error
            loops = (self._publish, self._watch_rank0)
            self.threads = [Thread(target=loop, daemon=True) for loop in loops]
        for thread in self.threads:
            thread.start()

    def heartbeat(self, phase: str, step: int | None = None) -> None:
        """Say that the main thread begins a phase; all ranks do so in the same order."""
        old, self.beat = self.beat, Heartbeat(self.beat.count + 1, phase, step)
        taken = self.beat.since - old.since
        self.longest[old.phase] = max(taken, self.longest.get(old.phase, 0.0))

    def stop(self) -> None:
        """Stop watching, before the process group is destroyed."""
        self.ended.set()
        for thread in self.threads:
            thread.join(2 * self.interval)

    def where(self) -> str:
        """Describe what this rank does now, for a message."""
        return _where(self._state(0))

    def exit_now(self, text: str, seconds: float) -> NoReturn:
        """Give up with this message, on ranks other than 0 after some seconds, and exit."""
        if self.rank != 0:
            time.sleep(seconds)
        self.leaving.acquire()
        self.give_up(text)
        os._exit(1)  # without waiting for the threads, which may wait for the lost one

    def _late(self) -> float:
        """Return the seconds past the limit of this rank's phase; negative before that."""
        now, beat = time.monotonic(), self.beat
        if now - self.last_check > 3 * self.interval + 1:
            self.grace_start = now  # this process was stopped for a while
        self.last_check = now
        longest = self.longest.get(beat.phase)
        limit = self.seconds * self.startup_factor
        if longest is not None:
            # a save may be slow though the one before was not: only the last one is waited for
            limit = max(limit if beat.phase == "saving" else self.seconds, 3 * longest)
        return now - max(beat.since, self.grace_start) - limit

    def _watch_rank0(self) -> None:
        while not self.ended.wait(self.interval):
            if self.rank != 0 and self._late() > 10 * self.interval:
                text = f"rank 0 does not answer rank {self.rank} ({self.where()})"
                self._leave([], text)

    def _state(self, tick: int) -> list:
        beat, host = self.beat, platform.node()
        return [tick, beat.count, beat.phase, beat.step, host, time.monotonic() - beat.since]

    def _publish(self) -> None:
        tick = 0
        with suppress(RuntimeError):  # the store went with rank 0
            while not self.ended.wait(self.interval):
                tick += 1
                self.store.set(f"watchdog/{self.rank}", json.dumps(self._state(tick)))
                late = self._late() > 0
                if late and self.rank != 0:
                    self.store.set("watchdog/late", str(self.rank))
                if self.rank == 0 and (late or self.store.check(["watchdog/late"])):
                    self._judge(tick)
                elif self.rank != 0 and self.store.check(["watchdog/verdict"]):
                    self._leave(json.loads(self.store.get("watchdog/verdict")), None)

    def _states(self) -> list[list]:
        keys = [f"watchdog/{rank}" for rank in range(self.world_size)]
        there = keys if self.store.check(keys) else [k for k in keys if self.store.check([k])]
        found = dict(zip(there, self.store.multi_get(there), strict=True))
        never = [0, -1, "starting", None, "an unknown host", 0.0]
        return [json.loads(found[k]) if k in found else never for k in keys]

    def _judge(self, tick: int) -> None:
        """Find the ranks that are behind, on rank 0, unless the run continues meanwhile."""
        before = self._states()
        self.ended.wait(4 * self.interval)
        self.store.set("watchdog/0", json.dumps(self._state(tick + 1)))
        after = self._states()
        silent = [r for r in range(self.world_size) if before[r][0] == after[r][0]]
        alive = [r for r in range(self.world_size) if r not in silent]
        if self.ended.is_set() or any(after[r][1] != before[r][1] for r in alive):
            self.store.delete_key("watchdog/late")
            return
        slowest = min(after[r][1] for r in alive)
        behind = silent or [r for r in alive if after[r][1] == slowest]
        seconds = max(after[r][5] for r in (alive if silent else behind))
        text = f"no progress for {seconds:.0f} s: "
        if len(behind) == self.world_size:
            text += f"all ranks wait for each other ({_where(after[0])})"
        else:
            named = "; ".join(f"rank {r} ({_where(after[r])})" for r in behind[:8])
            more = f" and {len(behind) - 8} more" if len(behind) > 8 else ""
            other = next(r for r in alive if r not in behind)
            text += f"{named}{more} {'stopped sending heartbeats' if silent else 'is stuck'}, "
            text += f"rank {other} ({_where(after[other])}) waits"
        self.store.set("watchdog/verdict", json.dumps(behind))
        self._leave(behind, text)

    def _leave(self, behind: list[int], text: str | None) -> None:
        self.leaving.acquire()  # for good: one thread leaves
        trace = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
        with suppress(OSError):
            if trace is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                recorded = trace(includeCollectives=True, onlyActive=False)
                (self.folder / f"rank_{self.rank:05d}.json").write_bytes(recorded)
        if self.rank in behind:
            faulthandler.dump_traceback()
        if text is not None:
            self.give_up(text)
        if self.rank == 0:
            # the others read the verdict from the store that it keeps
            time.sleep(max(2.0, 3 * self.interval))
        os._exit(1)  # the main thread waits in a call that does not return


def _where(state: list) -> str:
    _, _, phase, step, host, _ = state
    return f"{phase}{'' if step is None else f' in step {step + 1}'}, on {host}"
