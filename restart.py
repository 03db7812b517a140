"""Where a run goes on from, and what it leaves behind: --resume, --save-every, --allow-changes.

checkpoint.py writes and reads; what may change between two runs is decided here.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import agree
import checkpoint
from flags import RESULT, save_interval
from log import Log


def resume(
    what: str, out: str, load: Callable[[Path], Any], scaler: torch.amp.GradScaler | None,
    flags: dict[str, Any], allow_changes: bool, say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """`load` a checkpoint, if any is asked for and there; return its facts, of step 0 if none.

    `what` as --resume. `flags` are this run's; those that decide the result must be the
    checkpoint's unless `allow_changes`. ValueError, on all ranks, where that is not so or a named
    checkpoint cannot be loaded. Collective.
    """
    auto, found = what == "auto", agree.together(partial(checkpoint.candidates, out))
    if what == "none":
        if found:
            raise ValueError(f"{out} holds checkpoints of another run: use another --out")
        return {"step": 0}
    for path in found if auto else [Path(what)]:
        try:
            facts = agree.together(partial(checkpoint.read_facts, path))
            then, now = facts.get("flags", {}), json.loads(json.dumps(flags))
            changed = {
                key: f"{key} {then.get(key)} -> {now.get(key)}"
                for key in sorted({*then, *now})
                if then.get(key) != now.get(key)
            }
            decisive = [] if allow_changes else [changed[key] for key in RESULT if key in changed]
            if not decisive:
                load(path)
        except ValueError as error:
            if not auto:
                raise
            say(f"warning: a checkpoint is left out: {error}")
            continue
        if decisive:
            raise ValueError(
                f"{path} was trained with other flags ({', '.join(decisive)}): add --allow-changes "
                "to go on with these, or take another --out"
            )
        if scaler and facts.get("scaler"):
            scaler.load_state_dict(facts["scaler"])
        say(
            f"resumed {path} at step {facts['step']}; changed: {', '.join(changed.values()) or '-'}"
        )
        return facts
    return {"step": 0}


class Saves:
    """The checkpoints of a run: when one is due, and what it means that one has failed.

    With --save-every none there are none.
    """

    def __init__(
        self, saver: checkpoint.Saver, log: Log, flags: dict[str, Any],
        scaler: torch.amp.GradScaler | None, begin: int,
    ) -> None:  # fmt: skip
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
