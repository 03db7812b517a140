"""Where a run goes on from, and what it leaves behind: --resume, --save-every, --allow-changes.

checkpoint.py writes and reads; what may change between two runs is decided here.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import checkpoint
from runtime.flags import RESULT, save_interval
from runtime.log import Log

T = TypeVar("T")
PAUSES = (1.0, 3.0, 8.0, 20.0)  # seconds before each new try to read what cannot be read now
SCALER = torch.amp.GradScaler("cpu").state_dict().keys()


def candidates(what: str, out: str, say: Callable[[str], None]) -> list[Path]:
    """The checkpoints to try, best first; `what` as --resume. Collective.

    ValueError where `out` must not hold any and does, OSError where it cannot be listed.
    """
    found = _on_rank0(partial(_patiently, partial(checkpoint.list_checkpoints, out), say))[::-1]
    if what == "none" and found:
        raise ValueError(f"{out} holds checkpoints of another run: use another --out")
    return found if what in ("auto", "none") else [Path(what)]


def resume(
    found: Sequence[Path],
    auto: bool,
    out: str,
    load: Callable[[Path], Any] | None,
    scaler: torch.amp.GradScaler | None,
    flags: dict[str, Any],
    allow_changes: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """`load` the first of the `candidates` that is whole; its facts, of step 0 if there are none.

    Checkpoints in `out` that are further than it are moved aside. `flags` are this run's; those
    that decide the result must be the checkpoint's unless `allow_changes`. Without `load` nothing
    is changed. ValueError where the flags are others or the one checkpoint that was asked for is
    damaged; OSError where all are, or one cannot be read now. The same on all ranks. Collective.
    """
    skipped = []
    for path in found:
        try:
            facts = _on_rank0(partial(_patiently, partial(_read_facts, path), say))
            changes = _changes(path, facts["flags"], flags, allow_changes)
            if load:
                _patiently(partial(load, path), say)
        except checkpoint.Damaged as error:
            if not auto:
                raise
            say(f"warning: skipping unreadable checkpoint {error}")
            skipped.append(str(error))
            continue
        if scaler and facts["scaler"]:
            scaler.load_state_dict(facts["scaler"])
        if load and (moved := _on_rank0(partial(_move_aside, out, path, facts["step"]))):
            say(moved)
        say(f"resumed {path} at step {facts['step']}; changed: {', '.join(changes) or '-'}")
        return facts
    if skipped:
        raise OSError(
            f"no checkpoint in {out} can be read ({'; '.join(skipped)}): give --resume PATH to "
            "begin at another one, or another --out to begin anew"
        )
    return {"step": 0}


def _on_rank0(work: Callable[[], T]) -> T:
    """`work()` of rank 0, or its OSError or ValueError, on every rank. Collective."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = work()
        except (OSError, ValueError) as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1]:
        raise found[1]
    return found[0]


def _patiently(work: Callable[[], T], say: Callable[[str], None]) -> T:
    """`work()`; after an OSError, which may pass, again after each of the PAUSES."""
    pauses = iter(PAUSES)
    while True:
        try:
            return work()
        except OSError as error:
            pause = next(pauses, None)
            if pause is None:
                advice = "the same command tries again, --resume PATH takes another checkpoint"
                raise OSError(f"{error}: {advice}") from None
            say(f"warning: {error}: trying again in {pause:.0f} s")
            time.sleep(pause)


def _read_facts(path: Path) -> dict[str, Any]:
    """A checkpoint's facts with those that `Saves` gave; Damaged where they are not sound."""
    facts: dict[str, Any] = {"flags": {}, "in_a_row": 0, "scaler": None}
    facts |= checkpoint.read_manifest(path)
    flags, scaler, in_a_row = facts["flags"], facts["scaler"] or {}, facts["in_a_row"]
    sound = {
        "flags": isinstance(flags, dict),
        "scaler": isinstance(scaler, dict)
        and scaler.keys() in (set(), SCALER)
        and all(type(v) in (int, float) and 0 <= v < 2**63 for v in scaler.values()),
        "in_a_row": type(in_a_row) is int and 0 <= in_a_row <= facts["step"],
    }
    for name in (name for name, good in sound.items() if not good):
        raise checkpoint.Damaged(f"{path}: {checkpoint.MANIFEST} has no sound {name!r}")
    return facts


def _changes(path: Path, then: dict[str, Any], flags: dict[str, Any], allowed: bool) -> list[str]:
    """The flags that are not as they were; ValueError where they may not change.

    What an older checkpoint does not tell is not known to have changed.
    """
    now = json.loads(json.dumps(flags))
    changed = [key for key in sorted(then.keys() & now.keys()) if then[key] != now[key]]
    told = {key: f"{key} {then[key]} -> {now[key]}" for key in changed}
    decisive = [] if allowed else [told[key] for key in RESULT if key in told]
    if decisive:
        raise ValueError(
            f"{path} was trained with other flags ({', '.join(decisive)}): add --allow-changes "
            "to go on with these, or take another --out"
        )
    return list(told.values())


def _move_aside(out: str, begin: Path, step: int) -> str | None:
    """Rename the checkpoints in `out` that a run beginning at `begin` has not reached; a sentence.

    So none of them is mistaken for its own, and none is removed.
    """
    further = [
        path
        for path in checkpoint.list_checkpoints(out)
        if checkpoint.step_of(path) >= step and not (begin.exists() and path.samefile(begin))
    ]
    if not further:
        return None
    aside = next(p for n in count(1) if not (p := Path(out, f"set_aside_{n}")).exists())
    aside.mkdir()
    for path in further:
        path.rename(aside / path.name)
    names = ", ".join(path.name for path in further)
    return f"moved to {aside}, because this run begins at step {step}: {names}"


class Saves:
    """The checkpoints of a run: when one is due, and what it means that one has failed.

    With --save-every none there are none.
    """

    def __init__(
        self,
        saver: checkpoint.Saver,
        log: Log,
        flags: dict[str, Any],
        scaler: torch.amp.GradScaler | None,
        begin: int,
    ) -> None:
        """`flags` as the checkpoints keep them; `begin` is the step that was resumed, or 0."""
        self.saver, self.log, self.flags, self.scaler = saver, log, flags, scaler
        self.off = flags["save_every"] == "none"
        self.steps, self.seconds = save_interval(flags["save_every"])
        self.begin = saver.saved = begin
        self.since, self.problem = time.monotonic(), ""
        if self.off:
            log.warn("--save-every none: no checkpoint is saved, whatever ends this run")

    def due_after(self, step: int) -> bool:
        """Whether so many steps ask for one."""
        return self.steps is not None and step % self.steps == 0

    def due_by_clock(self) -> bool:
        """Whether this rank's clock asks for one; the ranks agree on the step by their flags."""
        return self.seconds is not None and time.monotonic() - self.since > self.seconds

    def save(self, step: int, in_a_row: int, wait: bool) -> str | None:
        """A checkpoint after so many steps; why the run cannot go on, if it cannot. Collective."""
        if self.off:
            return None
        begun = time.monotonic()
        facts = {"flags": self.flags, "in_a_row": in_a_row}
        facts["scaler"] = self.scaler.state_dict() if self.scaler else None
        problems = self.saver.save(step, facts, wait)
        self.since = time.monotonic()
        self.log.write("save", step=step, seconds=self.since - begun)
        failures = self.saver.failures
        self.problem = problems[-1] if failures else ""
        fatal = problems.pop() if failures == 2 or (failures and wait) else None
        for problem in problems:
            self.log.warn(f"{problem}; the run goes on, the older checkpoints are kept")
        return fatal

    def save_last(self, step: int, in_a_row: int) -> None:
        """That state, unless it is saved already, before a run that has failed ends. Collective."""
        problems = self.saver.finish()  # of the one under way
        if self.saver.saved < step:
            problems.append(self.save(step, in_a_row, wait=True) or "")
        for problem in filter(None, problems):
            self.log.warn(problem)

    def where(self, finished: bool) -> str:
        """Where the weights are, in a sentence for the end."""
        if self.off:
            return "nothing saved: --save-every none"
        if not self.saver.saved:
            return f"nothing saved: {self.problem or 'no step was applied'}"
        path, how = self.saver.folder / f"step_{self.saver.saved:08d}", "the same command"
        if self.flags["resume"] != "auto":
            if self.saver.saved == self.begin:
                path = Path(self.flags["resume"])
            else:
                how += " with --resume auto"
        return f"saved {path}" if finished else f"saved {path}; {how} continues from there"
