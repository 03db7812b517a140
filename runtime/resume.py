"""Where a run resumes from, and the checkpoints that it saves: --resume, --save-every.

checkpoint.py reads and writes; which flags may change between two runs is decided here.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import checkpoint
from runtime.agreement import AgreedError, run_on_rank0
from runtime.config import save_interval
from runtime.log import Log, rename_old_log
from runtime.run import Run, decisive
from runtime.session import Session

Result = TypeVar("Result")
PAUSES = (1.0, 3.0, 8.0, 20.0)  # seconds before each new attempt at a read that failed
Say = Callable[[str], None]  # prints a line, on rank 0


def list_newest_first(run: Run, say: Say) -> list[Path]:
    """List the checkpoints that --resume allows, the furthest first. Collective.

    None for --run-mode syn and io. AgreedError where --out must not hold any, cannot be listed, or
    holds checkpoints that are further than the one to begin at.
    """
    what, out = run.config.resume, run.config.out

    def find() -> list[Path]:
        found = _retry(lambda: checkpoint.list_checkpoints(out), say)[::-1]
        if what == "auto":
            return found
        if what == "none":
            if found:
                raise ValueError(f"{out} holds checkpoints of another run: use another --out")
            return []
        begin = Path(what)
        step = _retry(lambda: read_manifest(begin), say)["step"]
        further = [p for p in found if checkpoint.step_of(p) >= step and not p.samefile(begin)]
        if further:  # the run would remove them, or take them for its own
            raise ValueError(
                f"{out} holds {further[0].name}, which is further than {what}: give another --out, "
                f"or move it away: mv {further[0]} ELSEWHERE"
            )
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
    """Load the first whole checkpoint of `found` and make --out ready to continue. Collective.

    Returns the saves to come, which know the step to `begin` at: 0 if `found` is empty. AgreedError
    as of `read_run_state`, or where --out cannot be made ready.
    """
    config, log = run.config, session.log

    def load(path: Path) -> None:
        checkpoint.load(path, model, optimizer, group=session.gloo)

    state = read_run_state(found, run, log.say, load)
    if scaler and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    if state["step"] < run.steps:
        mark_done(config.out, False)
    if state["step"] == 0:
        rename_old_log(log, config.out)
    saver = checkpoint.Saver(
        config.out,
        model,
        optimizer,
        keep=config.keep,
        group=session.gloo,
        background=config.async_save,
    )
    return Saves(run, log, saver, scaler, state)


def read_run_state(
    found: Sequence[Path], run: Run, say: Say, load: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """Load the first whole checkpoint of `found`; return its run state. Collective.

    The run state has "step", "flags", "in_a_row" (consecutive bad steps) and "scaler"; step 0 if
    `found` is empty. The flags that decide the result must be those of `run`, unless
    --allow-changes. A damaged checkpoint is renamed, so that none is ever overwritten. Without
    `load` nothing is changed. AgreedError where the flags differ, where the one checkpoint that was
    asked for or all of them are damaged, or where one cannot be read now.
    """
    damaged: list[Path] = []
    for path in found:
        try:
            state = _load_one(path, run, say, load)
        except checkpoint.Damaged as error:
            if run.config.resume != "auto":
                raise AgreedError(str(error), 2) from error
            say(f"warning: skipping unreadable checkpoint {error}")
            damaged.append(path)
            continue
        if load and damaged:
            run_on_rank0(lambda: [p.rename(p.with_name(f"damaged_{p.name}")) for p in damaged])
        return state
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise AgreedError(
            f"no checkpoint in {run.config.out} can be read ({names}): give --resume PATH to begin "
            "at another one, or another --out to begin anew"
        )
    return {"step": 0, "in_a_row": 0, "scaler": None}


def _load_one(
    path: Path, run: Run, say: Say, load: Callable[[Path], None] | None
) -> dict[str, Any]:
    """Read the run state of a checkpoint, check its flags, `load` it; Damaged or AgreedError."""

    def read() -> tuple[dict[str, Any], list[str]] | checkpoint.Damaged:
        try:
            state = _retry(lambda: read_manifest(path), say)
        except checkpoint.Damaged as error:
            return error  # for all ranks to raise
        return state, _changes(path, state["flags"], run)

    found = run_on_rank0(read)
    if isinstance(found, checkpoint.Damaged):
        raise found
    if load:
        try:
            _retry(lambda: load(path), say)
        except OSError as error:  # the same on all ranks
            raise AgreedError(str(error)) from error
    state, changes = found
    say(f"resumed {path} at step {state['step']}; changed: {', '.join(changes) or '-'}")
    return state


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the run state that `Saves` wrote; Damaged or OSError where that is not possible."""
    state: dict[str, Any] = {"flags": {}, "in_a_row": 0, "scaler": None}
    return state | checkpoint.read_manifest(path)  # of another program: no flags


def _retry(work: Callable[[], Result], say: Say) -> Result:
    """Run `work`; after an OSError, which may pass, again after each of the PAUSES."""
    for pause in PAUSES:
        try:
            return work()
        except OSError as error:
            say(f"warning: {error}: trying again in {pause:.0f} s")
            time.sleep(pause)
    try:
        return work()
    except OSError as error:
        advice = "run the command again, or select a checkpoint with --resume PATH"
        raise OSError(f"{error}: {advice}") from None


def _changes(path: Path, then: dict[str, Any], run: Run) -> list[str]:
    """List the flags that differ from the checkpoint's; ValueError where they must not."""
    now = json.loads(json.dumps(run.record()))
    changed = [key for key in sorted(then.keys() & now.keys()) if then[key] != now[key]]
    lists = {key for key in changed if isinstance(now[key], list)}
    changes = {key: f"{key} {then[key]} -> {now[key]}" for key in changed}
    if "precision" in changes:  # its default is that of the device
        changes["precision"] += f" (as before: --precision {then['precision']})"
    changes |= {key: f"{key} changed" for key in lists}  # too long to print
    refused = [changes[key] for key in decisive(run.config) if key in changes]
    if refused and not run.config.allow_changes:
        raise ValueError(
            f"{path} was trained with other flags ({', '.join(refused)}): type them as they were, "
            "add --allow-changes to continue with these, or use another --out"
        )
    return list(changes.values())


class Saves:
    """Save the checkpoints of a run, when one is due, and remember where the weights are.

    Nothing is saved by --run-mode syn and io, which have no saver, or with --save-every none.
    """

    def __init__(
        self,
        run: Run,
        log: Log,
        saver: checkpoint.Saver | None = None,
        scaler: torch.amp.GradScaler | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        """`state` is that of the checkpoint that was resumed."""
        self.saver, self.run, self.log, self.scaler = saver, run, log, scaler
        self.begin, self.consecutive_bad = 0, 0  # the step to begin at, bad steps before it
        if state:
            self.begin, self.consecutive_bad = state["step"], state["in_a_row"]
        self.since, self.problem = time.monotonic(), ""
        self.steps, self.seconds = save_interval(run.config.save_every if saver else "none")
        self.off = not (self.steps or self.seconds)
        if saver:
            saver.saved = self.begin
        if saver and self.off:
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
        if self.saver.saved < step:
            problems.append(self.save(step, consecutive_bad, wait=True) or "")
        for problem in filter(None, problems):
            self.log.warn(problem)

    def report_finished(self) -> None:
        """Say that no step is left to train. Collective."""
        mark_done(self.run.config.out, True)
        steps = f"all {self.run.steps} steps are trained"
        self.log.say(f"already finished: {steps}; nothing to do. {self.where(True)}")

    def where(self, finished: bool) -> str:
        """Say where the weights are, for the end."""
        if self.off or self.saver is None:
            return "nothing saved: --save-every none"
        if not self.saver.saved:
            return f"nothing saved: {self.problem or 'no step was applied'}"
        path, how = self.saver.folder / f"step_{self.saver.saved:08d}", "the same command"
        if (asked := self.run.config.resume) != "auto":
            if self.saver.saved == self.begin:
                path = Path(asked)
            else:
                how += " with --resume auto"
        return f"saved {path}" if finished else f"saved {path}; {how} continues from there"


def mark_done(out: str, done: bool) -> None:
    """Make OUT/done, or remove a shorter run's; AgreedError, status 1, if it cannot. Collective."""
    path = Path(out, "done")

    def change() -> None:
        try:
            path.unlink(missing_ok=True)
            if done:
                path.touch()
        except OSError as error:
            raise OSError(
                f"{path} cannot be {'written' if done else 'removed'} ({error}): move it away, or "
                "make its folder writable"
            ) from None

    run_on_rank0(change)
