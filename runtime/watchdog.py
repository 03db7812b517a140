"""End a run when a rank is stuck or lost. Copy this one file: it needs torch."""

import faulthandler
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import NamedTuple, NoReturn

import torch.distributed as dist

# multiplies the time limit of a phase that runs for the first time, and of every save
STARTUP_FACTOR = 4
LATER_FACTOR = 3  # a phase may last this many times as long as it did the last time


class Beat(NamedTuple):
    """What the main thread is doing."""

    number: int  # number of this heartbeat
    phase: str
    step: int | None  # from 0
    since: float  # time on the watchdog's clock


class Watchdog:
    """End a run whose ranks wait for one that makes no progress, and name that rank.

    The main thread calls `heartbeat` when it begins something; a thread publishes that through the
    ranks' store. When a phase of a rank has passed its time limit (`seconds`, or more: `_watch`),
    rank 0 names the ranks that are silent or behind; these print their stacks, and all exit. A
    second thread, which the store cannot block, says if a phase takes long, and ends this rank if
    rank 0 does not answer. If Python itself hangs, faulthandler ends it.
    """

    def __init__(
        self, rank: int, world_size: int, seconds: float, give_up: Callable[[str], None] = print
    ) -> None:
        """Start the second thread. A single process has no limit: it may sit in a debugger."""
        self.rank = rank
        self.world_size = world_size
        self.seconds = seconds
        self.give_up = give_up
        self.interval = min(5.0, seconds / 20)
        self.clock = 0.0  # seconds; it stands still while this process is stopped
        self.late = 0.0  # seconds past the limit of this phase; negative before that
        self.beat = Beat(number=0, phase="starting", step=None, since=0.0)
        self.durations: dict[str, float] = {}  # of each phase that has ended, the last time
        self.store: dist.TCPStore | None = None
        self.ended = Event()
        self.leaving = Lock()
        self.threads = [Thread(target=self._watch, daemon=True)]
        self.threads[0].start()

    def connect(self, environ: Mapping[str, str]) -> None:
        """Start to publish, once all ranks have joined; `environ` has MASTER_ADDR, MASTER_PORT."""
        # a connection of its own: a call that waits would block the process group's connection
        self.store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
        self.threads.append(Thread(target=self._publish, args=[self.store], daemon=True))
        self.threads[1].start()

    def heartbeat(self, phase: str, step: int | None = None) -> None:
        """Say that the main thread is beginning a phase; all ranks do so in the same order."""
        self.durations[self.beat.phase] = self.clock - self.beat.since
        # one assignment: the other threads never see half of it
        self.beat = Beat(self.beat.number + 1, phase, step, since=self.clock)

    def stop(self) -> None:
        """Stop watching, before the process group is destroyed."""
        self.ended.set()
        for thread in self.threads:
            thread.join(2 * self.interval)

    def where(self) -> str:
        """Describe what this rank is doing, for a message."""
        beat = self.beat
        if beat.step is None:
            return f"{beat.phase}, on {platform.node()}"
        return f"{beat.phase} in step {beat.step + 1}, on {platform.node()}"

    def exit_now(self, text: str) -> NoReturn:
        """Give up with a message and exit, whatever the main thread is waiting for."""
        self.leaving.acquire()  # for good: one thread leaves
        self.give_up(text)
        os._exit(1)

    def _watch(self) -> None:
        longest = STARTUP_FACTOR * self.seconds
        while not self.ended.wait(self.interval):
            self.clock += self.interval
            beat = self.beat
            waited = self.clock - beat.since
            new = beat.phase not in self.durations
            just_long = 10 <= waited < 10 + self.interval  # so that it is said once
            if new and just_long and (self.rank == 0 or not self.store):
                print(f"rank {self.rank}: still {self.where()}", file=sys.stderr, flush=True)
            if self.world_size == 1:
                continue
            # Ends the process unless this loop calls it again in time. Its clock runs on while a
            # job is suspended, so a job that was suspended for longer ends when it continues.
            faulthandler.dump_traceback_later(2 * longest, exit=True, file=2)
            if new or beat.phase == "saving":
                limit = longest
            else:
                limit = max(self.seconds, LATER_FACTOR * self.durations[beat.phase])
            self.late = waited - limit
            # rank 0 judges the others; while joining, an error of PyTorch comes first and says more
            if self.late > 10 * self.interval and not (self.store and self.rank == 0):
                who = f"rank {self.rank} of {self.world_size} has no answer from rank 0"
                why = "it is stuck, or its port belongs to another program"
                self.exit_now(f"{who} ({self.where()}): {why}")
        faulthandler.cancel_dump_traceback_later()

    def _publish(self, store: dist.TCPStore) -> None:
        with suppress(RuntimeError):  # the store went with rank 0
            while not self.ended.wait(self.interval):
                self._exchange(store)
                if self.late > 0:
                    store.set("watchdog/late", "")
                if self.rank == 0 and store.check(["watchdog/late"]):
                    self._judge(store)

    def _exchange(self, store: dist.TCPStore) -> None:
        """Say what this rank does; leave if rank 0 has found ranks behind."""
        beat = self.beat
        state = self.clock, beat.number, self.clock - beat.since, self.where()
        store.set(f"watchdog/{self.rank}", json.dumps(state))
        if store.check(["watchdog/behind"]):
            if self.rank in json.loads(store.get("watchdog/behind")):
                faulthandler.dump_traceback(2)
            os._exit(1)

    def _judge(self, store: dist.TCPStore) -> None:
        """End the run and name the ranks that are silent or behind, unless it has gone on."""
        keys = [f"watchdog/{rank}" for rank in range(self.world_size)]
        before = [json.loads(text) for text in store.multi_get(keys)]
        self.ended.wait(4 * self.interval)
        self._exchange(store)
        after = [json.loads(text) for text in store.multi_get(keys)]
        counts = [count for _, count, *_ in after]  # heartbeats of each rank
        if self.ended.is_set() or counts != [count for _, count, *_ in before]:
            store.delete_key("watchdog/late")
            return
        silent = [rank for rank in range(1, self.world_size) if after[rank] == before[rank]]
        behind = silent
        if not silent:
            behind = [rank for rank, count in enumerate(counts) if count == min(counts)]
        names = "; ".join(f"rank {rank} ({after[rank][3]})" for rank in behind[:8])
        who = f"{len(behind)} of {self.world_size} ranks stuck: {names}"
        if len(behind) == self.world_size:
            who += "; if they are only slow, raise --timeout"
        self.leaving.acquire()  # the main thread may fail now, because of those that leave
        waited = max(seconds for _, _, seconds, _ in after)
        self.give_up(f"no progress for {waited:.0f} s, {who}")
        store.set("watchdog/behind", json.dumps(behind))
        time.sleep(max(2.0, 3 * self.interval))  # rank 0 may keep the store: the others read it
        self._exchange(store)
