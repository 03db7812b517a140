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
from typing import NoReturn

import torch.distributed as dist

STARTUP_FACTOR = 4  # what is done for the first time, and each save, may take so many times as long


class Watchdog:
    """End a run whose ranks wait for one that makes no progress, and name that rank.

    The main thread calls `heartbeat` when it begins something; a thread publishes that through the
    ranks' store. A rank without a heartbeat for `seconds` asks rank 0 to compare all ranks: rank 0
    names those that are silent or behind, these print their stacks, and all exit. A second thread,
    which no store can block, says what takes long and ends a rank that rank 0 does not answer;
    should Python itself hang, faulthandler prints the stack and exits.
    """

    def __init__(
        self, rank: int, world_size: int, seconds: float, give_up: Callable[[str], None] = print
    ) -> None:
        """Start the second thread. A single process has no limit: it may sit in a debugger."""
        self.rank, self.world_size, self.seconds, self.give_up = rank, world_size, seconds, give_up
        self.interval = min(5.0, seconds / 20)
        self.clock = 0.0  # seconds; it stands still while this process is stopped
        # how many heartbeats, phase, step, since when; replaced as a whole
        self.beat: tuple[int, str, int | None, float] = 0, "starting", None, 0.0
        self.known, self.told = set[str](), set[str]()  # phases
        self.store: dist.TCPStore | None = None
        self.ended, self.leaving = Event(), Lock()
        self.threads = [Thread(target=self._guard, daemon=True)]
        self.threads[0].start()

    def connect(self, environ: Mapping[str, str]) -> None:
        """Start to publish, with the other ranks there; `environ` has MASTER_ADDR, MASTER_PORT."""
        # a connection of its own: a waiting call blocks that of the process group
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
        self._tell(self.store)
        self.threads.append(Thread(target=self._publish, args=[self.store], daemon=True))
        self.threads[1].start()

    def heartbeat(self, phase: str, step: int | None = None) -> None:
        """Say that the main thread begins a phase; all ranks do so in the same order."""
        self.known.add(self.beat[1])
        self.beat = self.beat[0] + 1, phase, step, self.clock

    def stop(self) -> None:
        """Stop watching, before the process group is destroyed."""
        self.ended.set()
        for thread in self.threads:
            thread.join(2 * self.interval)
        faulthandler.cancel_dump_traceback_later()

    def where(self) -> str:
        """Describe what this rank does now, for a message."""
        _, phase, step, _ = self.beat
        return f"{phase}{'' if step is None else f' in step {step + 1}'}, on {platform.node()}"

    def exit_now(self, text: str | None, behind: bool = False, pause: float = 0.0) -> NoReturn:
        """Print this rank's stack if it is behind, give up with a message, pause, and exit."""
        self.leaving.acquire()  # for good: one thread leaves
        if behind:
            faulthandler.dump_traceback(2)
        if text:
            self.give_up(text)
        time.sleep(pause)
        os._exit(1)  # the main thread waits in a call that does not return

    def _late(self) -> float:
        """Return the seconds past the limit of this rank's phase; negative before that."""
        _, phase, _, since = self.beat
        first = phase == "saving" or phase not in self.known
        return self.clock - since - self.seconds * (STARTUP_FACTOR if first else 1)

    def _guard(self) -> None:
        while not self.ended.wait(self.interval):
            self.clock += self.interval
            late, (_, phase, _, since), joined = self._late(), self.beat, self.store is not None
            long = phase not in self.told and self.clock > since + 10
            if long and (self.rank == 0 or not joined):
                self.told.add(phase)
                print(f"rank {self.rank}: still {self.where()}", file=sys.stderr, flush=True)
            if self.world_size == 1:
                continue
            # unless this loop comes round
            faulthandler.dump_traceback_later(3 * self.seconds * STARTUP_FACTOR, exit=True, file=2)
            # rank 0 judges; while joining, torch's own error may come first and says more
            if late > (10 * self.interval if joined else 10) and not (joined and self.rank == 0):
                who = f"rank {self.rank} of {self.world_size} has no answer from rank 0"
                why = "it is stuck, or its port belongs to another program"
                self.exit_now(f"{who} ({self.where()}): {why}")

    def _tell(self, store: dist.TCPStore) -> None:
        count, _, _, since = self.beat
        state = self.clock, count, self.clock - since, self.where()
        store.set(f"watchdog/{self.rank}", json.dumps(state))

    def _publish(self, store: dist.TCPStore) -> None:
        with suppress(RuntimeError):  # the store went with rank 0
            while not self.ended.wait(self.interval):
                self._tell(store)
                if self._late() > 0:
                    store.set("watchdog/late", "")
                if self.rank == 0 and store.check(["watchdog/late"]):
                    self._judge(store)
                elif self.rank != 0 and store.check(["watchdog/behind"]):
                    self.exit_now(None, self.rank in json.loads(store.get("watchdog/behind")))

    def _judge(self, store: dist.TCPStore) -> None:
        """Find the ranks that are behind, on rank 0, unless the run continues meanwhile."""
        keys = [f"watchdog/{rank}" for rank in range(self.world_size)]
        before = [json.loads(text) for text in store.multi_get(keys)]
        self.ended.wait(4 * self.interval)
        self._tell(store)
        after = [json.loads(text) for text in store.multi_get(keys)]
        silent = [r for r in range(self.world_size) if before[r][0] == after[r][0]]
        counts = {r: after[r][1] for r in range(self.world_size) if r not in silent}
        if self.ended.is_set() or any(counts[r] != before[r][1] for r in counts):
            store.delete_key("watchdog/late")
            return
        behind = silent or [r for r in counts if counts[r] == min(counts.values())]
        text = f"no progress for {max(after[r][2] for r in counts):.0f} s: "
        if len(behind) == self.world_size:
            text += f"all ranks wait for each other ({after[0][3]})"
        else:
            text += "; ".join(f"rank {r} ({after[r][3]})" for r in behind[:8])
            text += f" and {len(behind) - 8} more" if len(behind) > 8 else ""
            other = next(r for r in counts if r not in behind)
            what = "stopped sending heartbeats" if silent else "is stuck"
            text += f" {what}, rank {other} ({after[other][3]}) waits"
        store.set("watchdog/behind", json.dumps(behind))
        # the others read that from the store that this rank may keep
        self.exit_now(text, 0 in behind, pause=max(2.0, 3 * self.interval))
