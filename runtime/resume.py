"""Where a run resumes from, and the checkpoints that it saves: --resume, --save-every.

checkpoint.py reads and writes; which flags may change between two runs is decided here.
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
from torch import nn

import checkpoint
from runtime.agreement import AgreedError, run_on_rank0
from runtime.config import save_interval
from runtime.log import Log, rename_old_log
from runtime.run import Run, decisive
from runtime.session import Session

Result = TypeVar("Result")
PAUSES = (1.0, 3.0, 8.0, 20.0)  # seconds before each new attempt at a read that failed
SCALER = torch.amp.GradScaler("cpu").state_dict().keys()
Say = Callable[[str], None]  # prints a line, on rank 0


def list_newest_first(run: Run, say: Say) -> list[Path]:
    """List the checkpoints that --resume allows, the furthest first. Collective.

    None for --run-mode syn. AgreedError where --out must not hold any, or cannot be listed.
    """
    what, out = run.config.resume, run.config.out
    if run.config.run != "real":
        return []
    try:
        found = _on_rank0(partial(_retry, partial(checkpoint.list_checkpoints, out), say))[::-1]
    except OSError as error:
        raise AgreedError(str(error)) from error
    if what == "none" and found:
        raise AgreedError(f"{out} holds checkpoints of another run: use another --out", 2)
    return found if what in ("auto", "none") else [Path(what)]


def resume(
    found: Sequence[Path],
    run: Run,
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
) -> tuple["Saves", int, int]:
    """Load the first whole checkpoint of `found` and make --out ready to continue. Collective.

    Returns the saves to come, the step to begin at and the consecutive bad steps before it; 0 and 0
    if `found` is empty. AgreedError as of `read_run_state`, or where --out cannot be made ready.
    """
    config, log = run.config, session.log
    load = partial(checkpoint.load, model=model, optimizer=optimizer, group=session.gloo)
    state = read_run_state(found, run, log.say, load, scaler)
    begin = state["step"]
    if begin < run.steps:
        mark_done(config.out, False)
    if begin == 0:
        rename_old_log(log, config.out)
    saver = checkpoint.Saver(
        config.out,
        model,
        optimizer,
        keep=config.keep,
        group=session.gloo,
        background=config.async_save,
    )
    return Saves(run, log, saver, scaler, begin), begin, state["in_a_row"]


def read_run_state(
    found: Sequence[Path],
    run: Run,
    say: Say,
    load: Callable[[Path], Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, Any]:
    """Load the first whole checkpoint of `found`; return its run state. Collective.

    The run state has "step", "flags", "in_a_row" (consecutive bad steps) and "scaler"; step 0 if
    `found` is empty. Checkpoints that are further than it are moved aside. The flags that decide
    the result must be those of `run`, unless --allow-changes. Without `load` nothing is changed.
    AgreedError where the flags differ, where the one checkpoint that was asked for or all of them
    are damaged, or where one cannot be read at the moment.
    """
    try:
        return _resume(found, run, say, load, scaler)
    except (ValueError, OSError) as error:
        raise AgreedError(str(error), 2 if isinstance(error, ValueError) else 1) from error


def _resume(
    found: Sequence[Path],
    run: Run,
    say: Say,
    load: Callable[[Path], Any] | None,
    scaler: torch.amp.GradScaler | None,
) -> dict[str, Any]:
    config, skipped = run.config, []
    for path in found:
        try:
            state = _on_rank0(partial(_retry, partial(_read_run_state, path), say))
            changes = _changes(path, state["flags"], run)
            if load:
                _retry(partial(load, path), say)
        except checkpoint.Damaged as error:
            if config.resume != "auto":
                raise
            say(f"warning: skipping unreadable checkpoint {error}")
            skipped.append(str(error))
            continue
        if scaler and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        if load and (renamed := _on_rank0(partial(_move_aside, config.out, path, state["step"]))):
            say(renamed)
        say(f"resumed {path} at step {state['step']}; changed: {', '.join(changes) or '-'}")
        return state
    if skipped:
        raise OSError(
            f"no checkpoint in {config.out} can be read ({'; '.join(skipped)}): give --resume PATH "
            "to begin at another one, or another --out to begin anew"
        )
    return {"step": 0, "in_a_row": 0}


def _on_rank0(work: Callable[[], Result]) -> Result:
    """Run `work` on rank 0; its result, or its OSError or ValueError, on every rank. Collective."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = work()
        except (OSError, ValueError) as error:  # with its type, unlike agreement.run_on_rank0
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1]:
        raise found[1]
    return found[0]


def _retry(work: Callable[[], Result], say: Say) -> Result:
    """Run `work`; after an OSError, which may pass, again after each of the PAUSES."""
    pauses = iter(PAUSES)
    while True:
        try:
            return work()
        except OSError as error:
            pause = next(pauses, None)
            if pause is None:
                advice = "run the command again, or select a checkpoint with --resume PATH"
                raise OSError(f"{error}: {advice}") from None
            say(f"warning: {error}: trying again in {pause:.0f} s")
            time.sleep(pause)


def _read_run_state(path: Path) -> dict[str, Any]:
    """Read and validate the run state that `Saves` wrote; Damaged where it is not sound."""
    state: dict[str, Any] = {"flags": {}, "in_a_row": 0, "scaler": None}
    state |= checkpoint.read_manifest(path)
    flags, scaler, bad_steps = state["flags"], state["scaler"] or {}, state["in_a_row"]
    sound = {
        "flags": isinstance(flags, dict),
        "scaler": isinstance(scaler, dict)
        and scaler.keys() in (set(), SCALER)
        and all(type(v) in (int, float) and 0 <= v < 2**63 for v in scaler.values()),
        "in_a_row": type(bad_steps) is int and 0 <= bad_steps <= state["step"],
    }
    for name in (name for name, good in sound.items() if not good):
        raise checkpoint.Damaged(f"{path}: {checkpoint.MANIFEST} has no sound {name!r}")
    return state


def _changes(path: Path, then: dict[str, Any], run: Run) -> list[str]:
    """List the flags that differ from the checkpoint's; ValueError where they must not.

    A flag that an older checkpoint does not have counts as unchanged.
    """
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
            f"{path} was trained with other flags ({', '.join(refused)}): add --allow-changes "
            "to continue with these, or use another --out"
        )
    return list(changes.values())


def _move_aside(out: str, begin: Path, step: int) -> str | None:
    """Move the checkpoints in `out` that a run from `begin` has not reached; return a message.

    So that none is mistaken for its own, and none is removed.
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
    """Save the checkpoints of a run, when one is due, and remember where the weights are.

    Nothing is saved by `--run-mode syn` and `io`, which have no saver, or with --save-every none.
    """

    def __init__(
        self,
        run: Run,
        log: Log,
        saver: checkpoint.Saver | None = None,
        scaler: torch.amp.GradScaler | None = None,
        begin: int = 0,
    ) -> None:
        """`begin` is the step that was resumed, or 0."""
        self.saver, self.run, self.log, self.scaler, self.begin = saver, run, log, scaler, begin
        self.since, self.problem = time.monotonic(), ""
        self.evaluate: Callable[[int], None] = lambda step: None  # after each save: --eval-data
        self.steps, self.seconds = save_interval(run.config.save_every if saver else "none")
        self.off = not (self.steps or self.seconds)
        if saver:
            saver.saved = begin
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
        start = time.monotonic()
        state = {"flags": self.run.record(), "in_a_row": consecutive_bad}
        state["scaler"] = self.scaler.state_dict() if self.scaler else None
        problems = self.saver.save(step, state, wait)
        self.since = time.monotonic()
        self.log.write("save", step=step, seconds=self.since - start)
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

    def where(self, finished: bool) -> str:
        """Say where the weights are, for the end."""
        if self.off or self.saver is None:
            return "nothing saved: --save-every none"
        if not self.saver.saved:
            return f"nothing saved: {self.problem or 'no step was applied'}"
        path, how = self.saver.folder / f"step_{self.saver.saved:08d}", "the same command"
        asked = self.run.config.resume
        if asked != "auto":
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
