"""Run one point of a sweep: claim an attempt, start it, watch it, and record how it ended.

A point has a folder with a folder per attempt, 1, 2, ...: the `--out` of a run, with `state.json`
and `output.txt` (all that the processes printed) next to its log.jsonl. An attempt's folder appears
complete, by a rename that only one process can win: two sweeps never run the same point at once.
Nothing is ever deleted; another attempt follows only one that was interrupted. Needs psutil.
"""

import contextlib
import errno
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import mesh

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can.t allocate memory|cannot allocate memory|MemoryError|"
    r"oom[-_]kill|OUT_OF_MEMORY",
    re.IGNORECASE,
)
KILL_SECONDS = 30.0  # a killed process that writes to a slow disk takes a while to disappear
CLOCK_SECONDS = 2.0  # the start time of a process is known up to a step of the system clock


# ---------------------------------------------------------------------------------------------
# The log and output of a run


@dataclass(frozen=True)
class RunLog:
    """The records of log.jsonl, by event."""

    start: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    broken_line: int | None = None  # the first line, from 1, that is not a complete record


def read_log(path: Path) -> RunLog:
    """Read the last run in a log.jsonl; broken lines are left out, a missing file is empty."""
    log, broken = RunLog(), None
    lines = read_text(path).splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            event = record.pop("event")
        except (ValueError, KeyError, TypeError, AttributeError):
            broken = broken or number
            continue
        if event == "start":  # a resumed run appends to the log of the run before it
            log = RunLog(start=record)
        elif event == "step":
            log.steps.append(record)
        elif event in ("end", "profile"):
            getattr(log, event).update(record)
    return RunLog(log.start, log.steps, log.end, log.profile, broken)


def last_error(text: str) -> str:
    """Find the error in a program's output: our own, else an exception, else the last line."""
    own = re.findall(r"^\S+: error: (.*)", text, re.MULTILINE)
    raised = re.findall(r"(?:^|: )((?:\w+\.)*\w+(?:Error|Exception): .+)$", text, re.MULTILINE)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (own or raised or lines[-1:] or ["no output"])[-1][:300]


def classify(
    code: int | None, log: RunLog, output: str, late: str = "", oom: bool = False
) -> tuple[str, str]:
    """Return (state, reason) of an attempt whose processes have ended.

    `code` is the exit status, None if unknown; `late` a sentence if the time limit was passed;
    `oom` is set if the system killed some process for memory meanwhile.
    """
    reason, problem = log.end.get("reason"), log.end.get("problem") or ""
    where = f"after step {log.steps[-1].get('step')}" if log.steps else "before the first step"
    killed = code is not None and (code in (-9, 137) or "SIGKILL" in output)
    if reason == "done":
        return "done", ""
    if late:
        return "timed out", f"{late}, {where}"
    # before "timeout": so ends the log of rank 0 where the memory of another rank has run out
    lines = [*output.splitlines(), problem]
    found = [line.strip() for line in lines if OUT_OF_MEMORY.search(line)]
    if found or (oom and killed):
        line = found[0][:300] if found else "the system killed a process"
        return "out of memory", f"{where}: {line}"
    if reason == "timeout":
        return "timed out", f"{problem}, {where}"
    if reason in ("nan", "save"):
        return "failed", problem or reason
    if code is None or reason == "signal":
        return "interrupted", f"no result, {where}"
    if log.broken_line:
        line = f"log.jsonl breaks off in line {log.broken_line}"
        return "failed", f"{line}, {where}; exit status {code}"
    if killed:
        return "failed", f"killed by signal 9, {where}"
    return "failed", f"exit status {code}, {where}: {last_error(output)}"


# ---------------------------------------------------------------------------------------------
# Processes


def identify(pid: int) -> list[float]:
    """Return [number, start time] of a process: the system reuses numbers."""
    import psutil  # only where a run is started or looked for: reports need no psutil

    return [pid, psutil.Process(pid).create_time()]


def is_alive(process: Sequence[float] | None) -> bool:
    """Return whether the process that `identify` described still runs."""
    import psutil

    if not process:
        return False
    try:
        found = psutil.Process(int(process[0]))
        same = abs(found.create_time() - process[1]) < CLOCK_SECONDS
        return same and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_tree(pid: int) -> None:
    """Kill a process and all below it, and wait until they have ended.

    By SIGKILL, since a rank that hangs ignores gentler signals; one by one, since torchrun gives
    each rank a session of its own.
    """
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        tree = [parent, *parent.children(recursive=True)]
        known = [[process.pid, process.create_time()] for process in tree]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        deadline = time.monotonic() + KILL_SECONDS
        while any(map(is_alive, known)) and time.monotonic() < deadline:
            time.sleep(0.05)


def oom_kills() -> int:
    """Count the processes that Linux killed for memory since it started; 0 where unknown."""
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


# ---------------------------------------------------------------------------------------------
# Files


def read_text(path: Path) -> str:
    """Read a regular file; ValueError for others: reading a FIFO would never return."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file: move it away")
    return path.read_text(errors="replace")


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote; ValueError, a sentence, if it was damaged since."""
    with contextlib.suppress(json.JSONDecodeError):
        if isinstance(value := json.loads(read_text(path)), dict):
            return value
    raise ValueError(f"{path} is damaged: move {path.parent} away to run its point again")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[TextIO]:
    """Open a file that replaces `path` at the end, completely or not at all; OSError names it."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(new, "w", newline="") as file:
            yield file
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, completely or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=1))


# ---------------------------------------------------------------------------------------------
# Attempts


def list_attempts(folder: Path) -> list[Path]:
    """List the attempts of a point, oldest first."""
    found = [path for path in folder.glob("[0-9]*") if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def read_state(attempt: Path) -> dict[str, Any]:
    """Read the state of an attempt."""
    return read_json(attempt / "state.json")


def update_state(attempt: Path, **facts: Any) -> dict[str, Any]:
    """Add to the state of an attempt; returns it."""
    state = read_state(attempt) | facts
    write_json(attempt / "state.json", state)
    return state


def claim(folder: Path, number: int, **facts: Any) -> Path | None:
    """Create the folder of attempt `number`; None if another process was first."""
    known = {"state": "running", "reason": "", "host": platform.node(), "started": time.time()}
    known |= {"runner": identify(os.getpid()), "cores": mesh.process_cores()}
    folder.mkdir(parents=True, exist_ok=True)
    mine = Path(tempfile.mkdtemp(prefix=".claim", dir=folder))
    mine.chmod(0o755)
    try:
        write_json(mine / "state.json", known | facts)
        return mine.rename(folder / str(number))  # fails if the folder exists
    except OSError as error:
        shutil.rmtree(mine)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return None
        raise


def point_state(folder: Path, in_queue: Callable[[str], bool]) -> tuple[str, int]:
    """Return (state of a point, its number of attempts).

    States: waiting, running, orphaned (the sweep that started the run was killed, the run was not),
    or the final ones: done, out of memory, failed, timed out. `in_queue` says whether a Slurm job
    waits or runs.
    """
    made = list_attempts(folder)
    if not made:
        return "waiting", 0
    state = read_state(made[-1])
    if state["state"] == "running":
        if state.get("job"):
            alive = in_queue(state["job"])
        else:  # nothing is known about the processes of another host
            alive = state["host"] != platform.node() or is_alive(state["runner"])
        if alive:
            return "running", len(made)
        if not state.get("job") and is_alive(state.get("child")):
            return "orphaned", len(made)
        state = read_state(made[-1])  # it may have ended since we read it
        if state["state"] == "running":
            state = finalize(made[-1], None)
    return "waiting" if state["state"] == "interrupted" else state["state"], len(made)


def end_orphan(attempt: Path) -> None:
    """End a run whose sweep was killed; the attempt then counts as interrupted."""
    kill_tree(int(read_state(attempt)["child"][0]))
    finalize(attempt, None)


def finalize(attempt: Path, code: int | None, late: str = "", oom: bool = False) -> dict[str, Any]:
    """Record the end of an attempt whose processes have ended; arguments as in `classify`."""
    output = attempt / "output.txt"
    text = read_text(output) if output.exists() else ""
    state, reason = classify(code, read_log(attempt / "log.jsonl"), text, late, oom)
    return update_state(attempt, state=state, reason=reason, code=code, ended=time.time())


def run_attempt(
    attempt: Path, command: Sequence[str], environ: Mapping[str, str], limit: float, folder: Path
) -> str:
    """Run a command in `folder` for at most `limit` seconds; returns the state of the attempt.

    Whatever ends this process meanwhile, except SIGKILL, ends the command too.
    """
    before, late = oom_kills(), ""
    with open(attempt / "output.txt", "ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            cwd=folder,
            start_new_session=True,  # Ctrl-C is for the sweep
        )
    try:
        update_state(attempt, child=identify(child.pid), command=list(command), limit=limit)
        child.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        kill_tree(child.pid)
        late = f"ran longer than its limit of {limit:g} s"
    except BaseException:
        kill_tree(child.pid)
        finalize(attempt, None)
        raise
    return str(finalize(attempt, child.poll(), late, oom_kills() > before)["state"])
