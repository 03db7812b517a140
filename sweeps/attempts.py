"""One point of a sweep: claimed, started, watched, judged. Needs nothing but Python.

A point has a folder, and in it a folder for each attempt, 1, 2, ...: the `--out` of a run, with
`state.json` and `output.txt` (all that the processes printed) beside its log.jsonl. An attempt
appears whole, by a rename that only one can win: two sweeps never run the same point. Nothing is
ever deleted; a further attempt follows only one that came to no result.
"""

import contextlib
import errno
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

# Of an attempt that has come to a result. Out of memory is one too.
FINAL = ("done", "out of memory", "failed", "timed out")
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can.t allocate memory|cannot allocate memory|MemoryError|"
    r"oom[-_]kill|OUT_OF_MEMORY",
    re.IGNORECASE,
)
KILL_SECONDS = 30.0  # until killed processes are gone: those that write to a disk may take a while


# ---------------------------------------------------------------------------------------------
# What a run tells


@dataclass(frozen=True)
class Log:
    """log.jsonl of one run, as far as it can be read."""

    start: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    cut: int | None = None  # the first line that is no whole record, from 1


def read_log(path: Path) -> Log:
    """The last run in a log.jsonl; a broken line is left out, a missing file is an empty log."""
    log, cut = Log(), None
    lines = read_text(path).splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            event = record.pop("event")
        except (ValueError, KeyError, TypeError, AttributeError):
            cut = cut or number
            continue
        if event == "start":
            log = Log(start=record)
        elif event == "step":
            log.steps.append(record)
        elif event in ("end", "profile"):
            getattr(log, event).update(record)
    return Log(log.start, log.steps, log.end, log.profile, cut)


def last_error(text: str) -> str:
    """The sentence that ends a run's output: ours, else the last exception, else the last line."""
    ours = re.findall(r"^\S+: error: (.*)", text, re.MULTILINE)
    thrown = re.findall(r"(?:^|: )((?:\w+\.)*\w+(?:Error|Exception): .+)$", text, re.MULTILINE)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (ours or thrown or lines[-1:] or ["it printed nothing"])[-1][:300]


def judge(code: int | None, log: Log, output: str, late: str, killed: bool) -> tuple[str, str]:
    """(state, reason) of an attempt whose processes are gone.

    `code` is the exit status, None where nobody saw it; `late` says that the limit was passed;
    `killed` that the system has killed a process for memory meanwhile.
    """
    reason, problem = log.end.get("reason"), log.end.get("problem") or ""
    where = f"after step {log.steps[-1].get('step')}" if log.steps else "before the first step"
    died = code is not None and (code in (-9, 137) or "SIGKILL" in output)
    if reason == "done":
        return "done", ""
    if late or reason == "timeout":
        return "timed out", f"{late or problem}, {where}"
    if reason in ("nan", "save"):
        return "failed", problem or reason
    if OUT_OF_MEMORY.search(output) or (killed and died):
        return "out of memory", f"{where}: {memory_error(output)}"
    if code is None or reason == "signal":
        return "interrupted", f"no result, {where}"
    if log.cut:
        return "failed", f"log.jsonl breaks off in line {log.cut}, {where}; exit status {code}"
    if died:
        return "failed", f"killed by signal 9, {where}"
    return "failed", f"exit status {code}, {where}: {last_error(output)}"


def memory_error(text: str) -> str:
    """The line that tells of it."""
    found = [line.strip() for line in text.splitlines() if OUT_OF_MEMORY.search(line)]
    return found[0][:300] if found else "the system killed a process"


# ---------------------------------------------------------------------------------------------
# Processes


def identity(pid: int) -> str | None:
    """A process as "PID:START", for numbers are used again; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else f"{pid}:{fields[19]}"
    except OSError:
        if Path("/proc/self").exists():
            return None
    try:  # no Linux
        os.kill(pid, 0)
    except OSError:
        return None
    return f"{pid}:"


def runs(process: str | None) -> bool:
    """Whether what `identity` told is still there."""
    return bool(process) and identity(int(str(process).split(":")[0])) == process


def parents() -> Iterator[tuple[int, int]]:
    """(process, its parent) of all that run."""
    if not Path("/proc/self").exists():
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            pid, parent = line.split()
            yield int(pid), int(parent)
        return
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            yield int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])


def family(pid: int) -> list[int]:
    """A process and all below it: torchrun gives each rank a session of its own."""
    found, known = [pid], list(parents())
    for member in found:  # grows
        found += [child for child, parent in known if parent == member]
    return found


def kill_family(pid: int) -> None:
    """By a signal that none can ignore: a rank that hangs would not hear a gentler one."""
    members = [m for m in map(identity, family(pid)) if m]
    for member in members:
        with contextlib.suppress(OSError):
            os.kill(int(member.split(":")[0]), signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while any(map(runs, members)) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # or a child of ours would stay as a zombie
        time.sleep(0.05)


def oom_kills() -> int:
    """Processes that this Linux has killed for memory since it was started."""
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def core_count() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------
# Attempts


def attempts(folder: Path) -> list[Path]:
    """Of a point, oldest first."""
    found = [p for p in folder.glob("[0-9]*") if p.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def read_state(attempt: Path) -> dict[str, Any]:
    """What is known of an attempt."""
    return read_json(attempt / "state.json")


def read_text(path: Path) -> str:
    """Read a regular file; ValueError for anything else: a FIFO would keep us waiting for ever."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file: move it away")
    return path.read_text(errors="replace")


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote; ValueError, a sentence, where it was damaged since."""
    with contextlib.suppress(json.JSONDecodeError):
        if isinstance(value := json.loads(read_text(path)), dict):
            return value
    raise ValueError(f"{path} is damaged: move {path.parent} away, and its point runs anew")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Write a file at once or not at all; OSError names it."""
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
    """At once or not at all."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1))


def note(attempt: Path, **facts: Any) -> dict[str, Any]:
    """Add to what is known of an attempt."""
    state = read_state(attempt) | facts
    write_json(attempt / "state.json", state)
    return state


def claim(folder: Path, number: int, **facts: Any) -> Path | None:
    """The folder of attempt `number`, made by us; None where somebody else was first."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = Path(tempfile.mkdtemp(prefix=".claim", dir=folder))
    mine.chmod(0o755)
    known = {"state": "running", "reason": "", "host": platform.node(), "started": time.time()}
    known |= {"runner": identity(os.getpid()), "cores": core_count()}
    try:
        write_json(mine / "state.json", known | facts)
        return mine.rename(folder / str(number))
    except OSError as error:
        shutil.rmtree(mine)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return None
        raise


def look(folder: Path, listed: Callable[[str], bool]) -> tuple[str, int]:
    """(state of a point, its attempts so far): waiting, running, or one of FINAL.

    `listed` tells whether a Slurm job is queued or runs. An attempt of this host whose sweep has
    gone but whose run has not is still running: `adopt` takes it over.
    """
    made = attempts(folder)
    if not made:
        return "waiting", 0
    state = read_state(made[-1])
    if state["state"] == "interrupted":
        return "waiting", len(made)
    if state["state"] != "running":
        return state["state"], len(made)
    if state.get("job"):
        alive = listed(state["job"])
    else:  # of another host nothing is known: it may well run
        alive = (
            state["host"] != platform.node() or runs(state["runner"]) or runs(state.get("child"))
        )
    if alive:
        return "running", len(made)
    state = read_state(made[-1])  # it may have come to its end since we read
    if state["state"] == "running":
        state = settle(made[-1], None, "")
    return ("waiting" if state["state"] == "interrupted" else state["state"]), len(made)


def settle(attempt: Path, code: int | None, late: str, killed: bool = False) -> dict[str, Any]:
    """Judge an attempt whose processes are gone, and keep the verdict."""
    output = attempt / "output.txt"
    text = read_text(output) if output.exists() else ""
    state, reason = judge(code, read_log(attempt / "log.jsonl"), text, late, killed)
    return note(attempt, state=state, reason=reason, code=code, ended=time.time())


def run(
    attempt: Path, command: Sequence[str], environ: Mapping[str, str], limit: float, folder: Path
) -> dict[str, Any]:
    """Run a command to its end or for `limit` seconds, in a folder; returns the attempt's state.

    Whatever ends us meanwhile, but for SIGKILL, ends the command too.
    """
    before = oom_kills()
    with open(attempt / "output.txt", "ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            cwd=folder,
            start_new_session=True,  # Ctrl-C is for us
        )
    try:
        note(attempt, child=identity(child.pid), command=list(command), limit=limit)
        late = watch(lambda: child.poll() is None, time.time() + limit, limit, child.pid)
    except BaseException:
        kill_family(child.pid)
        settle(attempt, None, "")
        raise
    return settle(attempt, child.poll(), late, oom_kills() > before)


def adopt(attempt: Path) -> dict[str, Any]:
    """Wait for a run of this host that another sweep started, which may have been killed."""
    while runs(read_state(attempt)["runner"]):
        time.sleep(0.2)
    state = read_state(attempt)
    if state["state"] != "running" or not state.get("child"):
        return state if state["state"] != "running" else settle(attempt, None, "")
    pid, limit = int(state["child"].split(":")[0]), state["limit"]
    late = watch(lambda: runs(state["child"]), state["started"] + limit, limit, pid)
    return settle(attempt, None, late)


def watch(alive: Callable[[], bool], deadline: float, limit: float, pid: int) -> str:
    """Until it is over, or kill it; returns a sentence in the latter case."""
    while alive():
        if time.time() > deadline:
            kill_family(pid)
            return f"ran longer than its limit of {limit:g} s"
        time.sleep(0.1)
    return ""
