"""Where a run resumes from, and the checkpoints that it saves: --resume, --save-every."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import checkpoint
from runtime.agreement import AgreedError, run_on_rank0
from runtime.config import save_interval
from runtime.log import Log
from runtime.run import Run, decisive
from runtime.session import Session

PAUSES = (1.0, 3.0, 8.0, 20.0)  # seconds before each new attempt at a read that failed
Say = Callable[[str], None]  # prints a line, on rank 0


def list_newest_first(run: Run, say: Say) -> list[Path]:
    """List the checkpoints that --resume allows, the furthest first. Collective.

    AgreedError where --out must not hold any, or holds some further than the one to begin at.
    """
    what, out = run.config.resume, run.config.out

    def find() -> list[Path]:
        found: list[Path] = _retry(say, checkpoint.list_checkpoints, out)[::-1]
        if what == "none" and found:
            raise ValueError(f"{out} holds checkpoints of another run: use another --out")
        if what in ("auto", "none"):
            return found
        begin = Path(what)
        step = _retry(say, checkpoint.read_manifest, begin)["step"]
        further = [p for p in found if checkpoint.step_of(p) >= step and not p.samefile(begin)]
        if further:  # the run would remove them, or take them for its own
            advice = f"give another --out, or move it away: mv {further[0]} ELSEWHERE"
            raise ValueError(f"{out} holds {further[0].name}, further than {what}: {advice}")
        return [begin]

    return run_on_rank0(find) if run.config.run_mode == "real" else []


def resume(
    found: Sequence[Path],
    run: Run,
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
) -> "Saves":
    """Load the first whole checkpoint of `found`; return the saves to come. Collective.

    They know the step to `begin` at. AgreedError as of `read_run_state`.
    """
    config, log, group = run.config, session.log, session.gloo

    def load(path: Path) -> None:
        checkpoint.load(path, model, optimizer, group=group)

    state = read_run_state(found, run, log.say, load)
    if scaler and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    if state["step"] < run.steps:
        mark_done(config.out, False)
    saver = checkpoint.Saver(
        config.out, model, optimizer, keep=config.keep, group=group, background=config.async_save
    )
    return Saves(run, log, saver, scaler, state)


def read_run_state(
    found: Sequence[Path], run: Run, say: Say, load: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """`load` the first whole checkpoint of `found`; return its run state. Collective.

    That is "step", "flags", "in_a_row" (consecutive bad steps) and "scaler"; step 0 if `found` is
    empty. A damaged one is renamed, so that none is ever overwritten, unless `load` is None.
    AgreedError for other decisive flags without --allow-changes; where the one asked for, or all,
    are damaged; where one cannot be read now.
    """
    damaged: list[Path] = []

    def read() -> dict[str, Any]:
        state: dict[str, Any] = {"flags": {}, "in_a_row": 0, "scaler": None}  # of another program
        try:
            state |= _retry(say, checkpoint.read_manifest, path)
        except checkpoint.Damaged as error:
            return {"damaged": error}  # for all ranks to raise
        return state | {"changes": ", ".join(_changes(path, state["flags"], run)) or "-"}

    for path in found:
        state = run_on_rank0(read)
        try:
            if "damaged" in state:
                raise state["damaged"]
            if load:
                _retry(say, load, path)
        except checkpoint.Damaged as error:
            if run.config.resume != "auto":
                raise AgreedError(str(error), 2) from error
            say(f"warning: skipping unreadable checkpoint {error}")
            damaged.append(path)
            continue
        except OSError as error:  # the same on all ranks
            raise AgreedError(str(error)) from error
        say(f"resumed {path} at step {state['step']}; changed: {state['changes']}")
        if load and damaged:
            run_on_rank0(lambda: [p.rename(p.with_name(f"damaged_{p.name}")) for p in damaged])
        return state
    if damaged:
        advice = "give --resume PATH to begin at another one, or another --out to begin anew"
        raise AgreedError(f"no checkpoint in {run.config.out} can be read: {advice}")
    return {"step": 0, "in_a_row": 0, "scaler": None}


def _retry(say: Say, work: Callable[[Any], Any], path: Any) -> Any:
    """Return work(path); after an OSError, which may pass, try again after each of the PAUSES."""
    for pause in PAUSES:
        try:
            return work(path)
        except OSError as error:
            say(f"warning: {error}: trying again in {pause:.0f} s")
            time.sleep(pause)
    return work(path)


def _changes(path: Path, then: dict[str, Any], run: Run) -> list[str]:
    """List the flags that differ from the checkpoint's; ValueError where they must not."""
    now = json.loads(json.dumps(run.record()))
    changed = [key for key in sorted(then.keys() & now.keys()) if then[key] != now[key]]
    changes = {key: f"{key} {then[key]} -> {now[key]}" for key in changed}
    changes |= {key: f"{key} changed" for key in changed if isinstance(now[key], list)}  # too long
    if "precision" in changes:  # its default is that of the device
        changes["precision"] += f" (as before: --precision {then['precision']})"
    refused = [changes[key] for key in decisive(run.config) if key in changes]
    if refused and not run.config.allow_changes:
        advice = "type them as they were, add --allow-changes, or use another --out"
        raise ValueError(f"{path} was trained with other flags ({', '.join(refused)}): {advice}")
    return list(changes.values())


class Saves:
    """Save the checkpoints of a run, when one is due, and remember where the weights are.

    Nothing is saved without a `saver` (--run-mode syn and io), or with --save-every none. `state`
    is that of the checkpoint that was resumed.
    """

    def __init__(
        self,
        run: Run,
        log: Log,
        saver: checkpoint.Saver | None = None,
        scaler: torch.amp.GradScaler | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.saver, self.run, self.log, self.scaler = saver, run, log, scaler
        self.begin = state["step"] if state else 0
        self.consecutive_bad = state["in_a_row"] if state else 0  # before the step to begin at
        self.since, self.problem = time.monotonic(), ""  # of the newest save
        self.steps, self.seconds = save_interval(run.config.save_every if saver else "none")
        self.off = not (self.steps or self.seconds)
        if saver:
            saver.saved = self.begin
            if self.off:
                log.warn("--save-every none: no checkpoint is saved, whatever ends this run")

    def due_after(self, step: int) -> bool:
        """Tell whether a checkpoint is due after so many steps."""
        return self.steps is not None and step % self.steps == 0

    def due_by_clock(self) -> bool:
        """Tell whether one is due by this rank's clock; the step guard agrees on the step."""
        return self.seconds is not None and time.monotonic() - self.since > self.seconds

    def save(self, step: int, consecutive_bad: int, wait: bool) -> str | None:
        """Save after so many steps; return why the run cannot continue, if so. Collective."""
        if self.off or self.saver is None:
            return None
        start, before = time.monotonic(), self.saver.saved
        state = {"flags": self.run.record(), "in_a_row": consecutive_bad}
        state["scaler"] = self.scaler.state_dict() if self.scaler else None
        problems = self.saver.save(step, state, wait)
        self.since = time.monotonic()
        if self.saver.saved > before:  # in the background: the one before is on disk by now
            self.log.write("save", step=self.saver.saved, seconds=self.since - start)
        failures = self.saver.failures
        self.problem = problems[-1] if failures else ""
        fatal = problems.pop() if failures == 2 or (failures and wait) else None
        for problem in problems:
            self.log.warn(f"{problem}; the run continues, the older checkpoints are kept")
        return fatal

    def save_last(self, step: int, consecutive_bad: int) -> None:
        """Save before a failed run ends, unless that step is saved already. Collective."""
        if self.off or self.saver is None:
            return
        problems = self.saver.finish()  # of the save in the background
        if self.saver.saved < step and (failed := self.save(step, consecutive_bad, wait=True)):
            problems.append(failed)
        for problem in problems:
            self.log.warn(problem)

    def report_finished(self) -> None:
        """Say that no step is left to train. Collective."""
        mark_done(self.run.config.out, True)
        self.log.say(f"already finished: all {self.run.steps} steps; {self.where(True)}")

    def where(self, finished: bool) -> str:
        """Say where the weights are, for the end."""
        if self.off or self.saver is None:
            return "nothing saved: --save-every none"
        if not self.saver.saved:
            return f"nothing saved: {self.problem or 'no step was applied'}"
        path, how = self.saver.folder / f"step_{self.saver.saved:08d}", "the same command"
        if (asked := self.run.config.resume) != "auto":
            new = self.saver.saved > self.begin
            path, how = (path, f"{how} with --resume auto") if new else (Path(asked), how)
        return f"saved {path}" if finished else f"saved {path}; {how} continues from there"


def mark_done(out: str, done: bool) -> None:
    """Make OUT/done, or remove a shorter run's; AgreedError, status 1, if it cannot. Collective."""
    path = Path(out, "done")
    run_on_rank0(lambda: path.touch() if done else path.unlink(missing_ok=True))
