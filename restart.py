"""Where a run goes on from, and what it leaves behind: --resume, --save-every, --allow-changes.

checkpoint.py writes and reads; what may change between two runs is decided here.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import agree
import checkpoint
from flags import RESULT
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


def save_step(
    saver: checkpoint.Saver, log: Log, flags: dict[str, Any],
    scaler: torch.amp.GradScaler | None, step: int, in_a_row: int, wait: bool,
) -> str | None:  # fmt: skip
    """A checkpoint after so many steps; returns why the run cannot go on, if it cannot."""
    facts = {"flags": flags, "in_a_row": in_a_row}
    facts["scaler"] = scaler.state_dict() if scaler else None
    problems = saver.save(step, facts, wait)
    fatal = problems.pop() if saver.failures == 2 or (saver.failures and wait) else None
    for problem in problems:
        log.warn(f"{problem}; the run goes on, the older checkpoints are kept")
    return fatal
