"""The watchdog of a run: ends it when a rank is stuck or lost, and guards its folder.

Copy this one file: it needs torch alone.
"""

import faulthandler
import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any, NoReturn

import torch.distributed as dist


@dataclass(frozen=True)
class Heartbeat:
    """What a rank's main thread does, and since when."""

    count: int = 0  # heartbeats so far: the rank with the fewest is behind
    phase: str = "starting"
    step: int | None = None
    since: float = field(default_factory=time.monotonic)


class Watchdog:
    """End a run whose ranks wait for one that makes no progress, and name that rank.

    The main thread calls `heartbeat` when it begins something; a thread publishes that through the
    ranks' store. A rank without a heartbeat for `seconds` asks rank 0 to compare all ranks: rank 0
    names those that are silent or behind, these print their stacks, and all exit. What is done for
    the first time (connecting, compiling), and each save, may take `startup_factor` times as long.
    Time during which the process itself was stopped does not count.

    A second thread, which no store can block, says what is waited for for long and ends a rank that
    rank 0 does not answer; should Python itself hang, faulthandler prints the stack and exits.
    """

    def __init__(
        self, rank: int, world_size: int, seconds: float, startup_factor: float = 4.0
    ) -> None:
        """Start the second thread. A single process has no limit: it may sit in a debugger."""
        self.rank, self.world_size = rank, world_size
        self.seconds, self.startup_factor = seconds, startup_factor
        self.interval = min(5.0, seconds / 20)
        self.beat, self.known = Heartbeat(), set[str]()
        self.patience: dict[str, float] = {}  # seconds in a phase until a line says so, doubled
        self.last_check = self.grace_start = time.monotonic()
        self.give_up: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
        self.lock: FolderLock | None = None
        self.ended, self.leaving = Event(), Lock()
        self.threads = [Thread(target=self._guard, daemon=True)]
        self.threads[0].start()

    def connect(self, environ: Mapping[str, str]) -> None:
        """Start to publish, with the other ranks there; `environ` has MASTER_ADDR, MASTER_PORT."""
        # a connection of its own: a waiting call blocks that of the process group
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
        self.store.set(f"watchdog/{self.rank}", json.dumps(self._state(0)))
        self.threads.append(Thread(target=self._publish, daemon=True))
        self.threads[-1].start()

    def heartbeat(self, phase: str, step: int | None = None) -> None:
        """Say that the main thread begins a phase; all ranks do so in the same order."""
        self.known.add(self.beat.phase)
        self.beat = Heartbeat(self.beat.count + 1, phase, step)

    def stop(self) -> None:
        """Stop watching, before the process group is destroyed."""
        self.ended.set()
        for thread in self.threads:
            thread.join(2 * self.interval)
        faulthandler.cancel_dump_traceback_later()
        if self.lock:
            self.lock.release()

    def where(self) -> str:
        """Describe what this rank does now, for a message."""
        return _where(self._state(0))

    def exit_now(self, text: str | None, behind: bool = False, pause: float = 0.0) -> NoReturn:
        """Print this rank's stack if it is behind, give up with a message, pause, and exit."""
        self.leaving.acquire()  # for good: one thread leaves
        if behind:
            faulthandler.dump_traceback(2)
        if text is not None:
            self.give_up(text)
        time.sleep(pause)
        os._exit(1)  # the main thread waits in a call that does not return

    def _late(self) -> float:
        """Return the seconds past the limit of this rank's phase; negative before that."""
        now, beat = time.monotonic(), self.beat
        if now - self.last_check > 3 * self.interval + 1:
            self.grace_start = now  # this process was stopped for a while
        self.last_check = now
        first = beat.phase == "saving" or beat.phase not in self.known
        limit = self.seconds * (self.startup_factor if first else 1)
        return now - max(beat.since, self.grace_start) - limit

    def _guard(self) -> None:
        while not self.ended.wait(self.interval):
            joined, late = len(self.threads) > 1, self._late()
            waited = time.monotonic() - self.beat.since
            patience = self.patience.get(self.beat.phase, 10.0)
            if waited > patience and (self.rank == 0 or not joined):
                self.patience[self.beat.phase] = 2 * patience
                text = f"rank {self.rank}: {self.where()}, for {waited:.0f} s so far"
                print(text, file=sys.stderr, flush=True)
            if self.lock and (problem := self.lock.renew()):
                self.exit_now(problem)
            if self.world_size > 1:
                last = 3 * self.seconds * self.startup_factor
                faulthandler.dump_traceback_later(
                    last, exit=True, file=2
                )  # unless this loop comes round
                # while joining, torch's own error may come first and says more
                if late > (10 * self.interval if joined else 10) and not (
                    joined and self.rank == 0
                ):
                    self.exit_now(
                        f"rank {self.rank} of {self.world_size} has no answer from rank 0 "
                        f"({self.where()}): it is stuck, or its port belongs to another program"
                    )

    def _state(self, tick: int) -> list[Any]:
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
                    behind = json.loads(self.store.get("watchdog/verdict"))
                    self.exit_now(None, self.rank in behind)

    def _states(self) -> list[list[Any]]:
        keys = [f"watchdog/{rank}" for rank in range(self.world_size)]
        return [json.loads(text) for text in self.store.multi_get(keys)]

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
        # the others read the verdict from the store that this rank may keep
        self.exit_now(text, 0 in behind, pause=max(2.0, 3 * self.interval))


def _where(state: list[Any]) -> str:
    _, _, phase, step, host, _ = state
    return f"{phase}{'' if step is None else f' in step {step + 1}'}, on {host}"


class FolderLock:
    """Keep other runs out of a folder for as long as this process lives.

    The file FOLDER/.lock is held by flock, which ends with its process, and says who holds it. As
    flock may be missing on a shared file system, or hold on one host only, that record also has a
    number that `renew` counts up: a record that does not change belongs to a run that is dead.
    """

    def __init__(self, folder: str, patience: float = 30.0, settle: float = 2.0) -> None:
        """Lock `folder`, which is made; ValueError, which says who has it, if another run lives.

        Where that is not sure, waits up to `patience` seconds for a sign of life, and `settle`
        seconds in which two runs that begin at once on two hosts see each other.
        """
        self.folder, self.path, self.beats = folder, os.path.join(folder, ".lock"), 0
        job = os.environ.get("SLURM_JOB_ID")
        self.owner = {"host": platform.node(), "pid": os.getpid(), "job": job, "time": time.time()}
        self.made = not os.path.exists(folder)
        try:
            os.makedirs(folder, exist_ok=True)
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ValueError(f"{error}: give --out a folder that can be made") from None
        free = self._is_free(patience)
        with suppress(OSError):  # a full disk: then the lock of the file alone counts
            self._write(self.owner)
        time.sleep(0 if free else settle)
        if (found := self._read()) and found["time"] != self.owner["time"]:
            raise self._refusal(found)

    def _is_free(self, patience: float) -> bool:
        """Tell whether the folder is surely free; return False if it only seems so."""
        first, deadline = None, time.monotonic() + patience
        while True:
            held, found = self._flock(), self._read()
            here = not found or found["host"] == self.owner["host"]
            if held and here:  # nobody was there, or it is dead
                return True
            if held is None and (
                not found or (here and not os.path.exists(f"/proc/{found['pid']}"))
            ):
                return False
            first, late = first or found, time.monotonic() > deadline
            if (found and found != first) or (late and held is False and here):
                raise self._refusal(found)
            if late:  # on another host: a dead node's lock may stay for minutes
                return False
            time.sleep(0.2)

    def renew(self) -> str | None:
        """Give a sign of life; return why the run must end where another has taken the folder."""
        with suppress(OSError):  # a full or absent disk
            found = self._read()
            if found and found["time"] != self.owner["time"]:
                return str(self._refusal(found))
            self.beats += 1
            self._write(self.owner | {"beats": self.beats})
        return None

    def release(self) -> None:
        """Let other runs have the folder; remove it where this run made it and wrote nothing."""
        with suppress(OSError):
            self._write(None)
            if self.made and os.listdir(self.folder) == [".lock"]:
                os.unlink(self.path)
                os.rmdir(self.folder)
        os.close(self.file)

    def _flock(self) -> bool | None:
        """Tell whether this process holds the lock; None where the file system has none."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _read(self) -> dict[str, Any] | None:
        with suppress(OSError, ValueError), open(self.path, "rb") as file:
            return json.loads(file.read())  # opened anew: another host's cache is refreshed
        return None

    def _write(self, record: dict[str, Any] | None) -> None:
        # in place and always as long, so that nobody reads half of it
        text = (json.dumps(record) if record else "").ljust(400)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(file, text.encode(), 0)
        finally:
            os.close(file)

    def _refusal(self, found: dict[str, Any] | None) -> ValueError:
        owner = found or self.owner | {"pid": "unknown", "job": None}
        job = f", Slurm job {owner['job']}" if owner["job"] else ""
        who = f"process {owner['pid']} on {owner['host']}{job}"
        return ValueError(
            f"{self.folder} is in use by another run ({who}): wait for it, stop it, or give "
            f"another --out; a run that is dead is noticed by itself, if not, remove {self.path}"
        )
