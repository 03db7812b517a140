"""Where a run begins, and what it saves: --init-from, --resume, --save-every.

A second run into the same folder is refused while the first still runs (process.lock_folder).
Later it continues at the newest undamaged checkpoint, unless --resume says otherwise
(`list_newest_first`), or flags that decide the training have changed (`_changes`).

The mode and the number of ranks may change: `checkpoint.load` gives each rank its part of the saved
tensors, and `data.step_positions` divides the images of a step among the ranks that there are. The
global batch must stay the same, so give --global-batch: --batch is multiplied by the number of
ranks.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import checkpoint
import vit
from runtime.agreement import AgreedError, run_on_rank0
from runtime.config import COMPARED, RESULT, Config, names, save_interval
from runtime.log import Log
from runtime.pretrained import Pretrained, check_fits, read_pretrained, say_assumed, value_of
from runtime.process import is_restart, launchers
from runtime.run import Run
from runtime.session import Session

RETRY_DELAYS = (1.0, 3.0, 8.0, 20.0)  # seconds before each retry of a failed read
MAX_CONSECUTIVE_FAILURES = 2  # so many failed saves end a run; a disk may be full for a while
Say = Callable[[str], None]  # prints a line, on rank 0


def initial_values(run: Run) -> Callable[..., Tensor]:
    """Return the init_fn of shard.apply: (name, shape, device) -> unsharded initial value.

    With --init-from both are collective: rank 0 reads the file; if that fails, AgreedError on all.
    """
    path = run.config.init_from
    model = run.vit_config
    seed = run.config.seed
    if path is None:
        return partial(vit.initial_value, model, seed=seed)
    found: list[Pretrained] = []  # on rank 0

    def read_file() -> None:
        found.append(read_pretrained(path, model))
        check_fits(found[0], model)
        say_assumed(found[0], "img_size")

    def value(name: str, shape: torch.Size, device: torch.device) -> Tensor:
        whole = torch.empty(shape, device=device)
        if found:
            whole.copy_(value_of(found[0], name, shape, seed))
        dist.broadcast(whole, src=0)
        return whole

    run_on_rank0(read_file)
    return value


def list_newest_first(run: Run, say: Say, dry_run: bool = False) -> list[Path]:
    """List the checkpoints that --resume allows, the furthest first. Collective.

    A `dry_run` leaves no trace in --out. AgreedError if --out has checkpoints despite --resume
    none, or others than PATH despite --resume PATH. But if Slurm or torchrun restarts a job that
    began here, it goes on with what it has saved. With PATH in --out, earlier ones are allowed.
    """
    if run.config.run_mode != "real":
        return []

    def find() -> list[Path]:
        out = run.config.out
        found: list[Path] = list(reversed(_retry(say, checkpoint.list_checkpoints, out)))
        launchers_file = Path(out, ".launchers")  # what started the newest run in --out
        restart = launchers_file.exists() and is_restart(launchers_file.read_text())
        chosen = _choose_checkpoints(run, say, found, restart)
        if not dry_run:
            launchers_file.write_text("\n".join(launchers().values()))
        return chosen

    return run_on_rank0(find)


def _choose_checkpoints(run: Run, say: Say, found: list[Path], restart: bool) -> list[Path]:
    """Return the checkpoints to try. ValueError if --resume forbids those in --out (`found`)."""
    what = run.config.resume
    out = run.config.out
    if what == "none" and found and not restart:
        raise ValueError(f"{out} holds checkpoints of another run: use another --out")
    if what in ("auto", "none"):
        return found
    begin = Path(what)
    if restart and found and not begin.exists():  # it was in --out, and --keep has removed it
        return found
    step = _retry(say, checkpoint.read_manifest, begin)["step"]
    further = [p for p in found if checkpoint.step_of(p) >= step and not p.samefile(begin)]
    if further and restart:
        return [*further, begin]
    if further:  # the run would take them for its own
        advice = f"give another --out, or move it away: mv {further[0]} ELSEWHERE"
        raise ValueError(f"{out} holds {further[0].name}, further than {what}: {advice}")
    if found and not restart and not any(path.samefile(begin) for path in found):
        # with --keep, the next saves would remove them
        advice = f"give another --out, or move all of them away: mv {out}/step_* ELSEWHERE"
        raise ValueError(f"{out} holds {found[0].name}, perhaps of another run: {advice}")
    return [begin]


def read_run_state(
    found: Sequence[Path], run: Run, say: Say, load: Callable[[Path], object] | None = None
) -> dict[str, Any]:
    """`load` the first undamaged checkpoint of `found`; return its run state. Collective.

    It has "step", "flags", "scaler", and the checkpoint's "path"; step 0 if `found` is empty. If
    `load` is given, damaged ones before it are renamed, so that none is overwritten. AgreedError if
    flags have changed, if all are damaged, if the only one that --resume PATH allows is, or if one
    cannot be read now.
    """
    new = {"step": 0, "flags": {}, "scaler": None, "path": None}
    damaged: list[Path] = []

    def read(path: Path) -> dict[str, Any]:
        state = new | _retry(say, checkpoint.read_manifest, path)  # another program has no flags
        return state | {"changes": _changes(path, state["flags"], run), "path": path}

    for path in found:
        try:
            state = run_on_rank0(partial(read, path))
            if load:
                _retry(say, load, path)
        except (AgreedError, checkpoint.CorruptCheckpointError, OSError) as raised:
            error: Any = getattr(raised, "error", raised)  # the same on all ranks
            # a file that is still missing after all retries will not come back
            corrupt = isinstance(error, checkpoint.CorruptCheckpointError | FileNotFoundError)
            only_choice = list(found) == [Path(run.config.resume)]  # --resume PATH
            if only_choice or not corrupt:
                raise AgreedError(str(raised), error=error) from raised
            say(f"warning: skipping unreadable checkpoint {raised}")
            damaged.append(path)
            continue
        say(f"resumed {path} at step {state['step']}; changed: {state['changes']}")
        if load and damaged:
            run_on_rank0(partial(_rename_damaged, damaged))
        return state
    if damaged:
        advice = "give --resume PATH to begin at another one, or another --out to begin anew"
        raise AgreedError(f"no checkpoint in {run.config.out} can be read: {advice}")
    return new


def _rename_damaged(paths: Sequence[Path]) -> None:
    for path in paths:
        new = path.with_name(f"damaged_{path.name}")
        count = 1
        while new.exists():  # a step may be damaged again after it was trained again
            count += 1
            new = path.with_name(f"damaged_{path.name}_{count}")
        path.rename(new)


def _retry(say: Say, work: Callable[[Any], Any], path: Any) -> Any:
    """Return work(path); retry after an OSError, which may pass, with the RETRY_DELAYS."""
    for delay in RETRY_DELAYS:
        try:
            return work(path)
        except OSError as error:
            say(f"warning: {error}: trying again in {delay:.0f} s")
            time.sleep(delay)
    return work(path)


def _changes(path: Path, then: dict[str, Any], run: Run) -> str:
    """List the flags that differ from the checkpoint's; ValueError for one that must not."""
    now = json.loads(json.dumps(run.record()))
    # not the path of --data: the same images may lie elsewhere by now
    images = ("images", "image_names_and_sizes", "image_dtype", "channel_mean", "channel_std")
    decisive = names(RESULT, table=type(run.config)) + images
    # RESULT marks the flags with a star in --help. Not listed: what follows from the mode.
    listed = {*decisive, *names(COMPARED), "mode", "world_size"}
    batch = then.get("global_batch")  # None: another program saved the checkpoint
    changed = batch not in (None, now["global_batch"])
    if run.config.epochs and changed:
        what = f"{path} was trained with a global batch of {batch}"
        why = "with --epochs, the steps already done would count as a different number of epochs"
        advice = f"give --global-batch {batch}"
        if type(run.config) is Config:  # fine-tuning has no --steps
            advice += ", or --steps instead of --epochs, with --allow-changes"
        raise ValueError(f"{what}: {why}: {advice}")
    changes = []
    refused = []
    for key in sorted(listed & then.keys() & now.keys()):
        if then[key] == now[key]:
            continue
        change = f"{key} {then[key]} -> {now[key]}"
        changes.append(change)
        if key in decisive:
            refused.append(change)
    if refused and not run.config.allow_changes:
        what = f"{path} was trained with other flags ({', '.join(refused)})"
        advice = "type them as they were, add --allow-changes, or use another --out"
        raise ValueError(f"{what}: {advice}")
    return ", ".join(changes) if changes else "-"


class CheckpointSchedule:
    """Save the checkpoints of a run when they are due, and remember where the weights are.

    `resume` makes it, with the run state of the checkpoint that was resumed. Without a saver
    (--save-every none, --run-mode syn or io) nothing is saved.
    """

    saver: checkpoint.Saver | None = None
    scaler: torch.amp.GradScaler | None = None

    def __init__(self, run: Run, log: Log, step: int = 0) -> None:
        self.run = run
        self.log = log
        self.begin = step
        self.began_at: Path | None = None  # the checkpoint that was resumed
        self.begins_in_out = True  # the same is in --out, or there is none
        self.logged = 0  # the newest checkpoint that is in the log
        self.since = time.monotonic()  # the time of the newest save
        self.steps, self.seconds = save_interval(run.config.save_every)

    def due_after(self, step: int) -> bool:
        """Tell whether a checkpoint is due after so many steps."""
        return self.saver is not None and self.steps is not None and step % self.steps == 0

    def due_by_clock(self) -> bool:
        """Tell whether one is due by this rank's clock; the step guard agrees on the step."""
        if self.saver is None or self.seconds is None:
            return False
        return time.monotonic() - self.since > self.seconds

    def save(self, step: int, wait: bool) -> str | None:
        """Save after so many steps; return why the run cannot continue, if so. Collective.

        A checkpoint holds the model, the optimizer and the step, which `checkpoint.Saver` takes
        itself, and the run state made here: the flags and what follows from them (`Run.record`:
        world size, group, batch sizes, number of steps, statistics of the images), and the scale of
        fp16. No random state and no place in the data: both follow from the step.

        After a failed save a run goes on with a warning, and tries again when the next save is due.
        After the second failure in a row, or if the last save of a run fails, `train_fsdp.train`
        ends the run: reason "save_failed", and the sentence returned here.
        """
        if not self.saver:
            return None
        start = time.monotonic()
        problems = self.saver.finish()  # now, so that this save is logged by itself
        self.log_saved(start)
        scaler = self.scaler.state_dict() if self.scaler else None
        state = {"flags": self.run.record(), "scaler": scaler}
        problems += self.saver.save(step, state, wait)
        self.log_saved(start)
        self.since = time.monotonic()
        fatal = None
        if self.saver.failures >= MAX_CONSECUTIVE_FAILURES or (self.saver.failures and wait):
            fatal = problems.pop()
        for problem in problems:
            self.log.warn(f"{problem}; the run continues, the older checkpoints are kept")
        return fatal

    def log_saved(self, start: float) -> None:
        """Log the newest save unless it is logged; training has waited for it since `start`."""
        if self.saver and self.saver.saved > self.logged:
            self.logged = self.saver.saved
            self.log.write("save", step=self.logged, seconds=time.monotonic() - start)

    def save_last(self, step: int) -> None:
        """Save before a failed run ends, unless that step is saved already. Collective."""
        if not self.saver:
            return
        self.finish()
        if self.saver.saved < step:
            failed = self.save(step, wait=True)
            if failed:
                self.log.warn(failed)

    def finish(self) -> None:
        """Wait for a save in the background, if any; warn if it failed. Collective."""
        if not self.saver:
            return
        start = time.monotonic()
        for problem in self.saver.finish():
            self.log.warn(problem)
        self.log_saved(start)

    def finished(self, open_evaluation: Callable[[], Any]) -> bool:
        """Tell whether no step is left to train, and if so print it. Collective.

        `open_evaluation` returns the run's evaluation, or None. A run that was killed before its
        last evaluation ended has left no OUT/done: then the evaluation is made now.
        """
        steps = self.run.steps
        if self.begin < steps:
            return False
        self.log.say(f"already finished: all {steps} steps; {self.where(True)}")
        if self.begins_in_out:
            out = self.run.config.out
            if not run_on_rank0(Path(out, "done").exists):
                evaluation = open_evaluation()
                if evaluation:
                    evaluation(self.begin)
                mark_done(out, True)
        return True

    def where(self, finished: bool) -> str:
        """Say where the weights are, for the end."""
        newest = 0
        if self.saver:
            newest = max(self.saver.saved, self.saver.on_disk)
        if newest == 0 and self.began_at:
            return f"began at {self.began_at}, nothing saved"
        if newest == 0:
            return "nothing saved"
        path = Path(self.run.config.out, f"step_{newest:08d}")
        if finished:
            return f"saved {path}"
        command = "the same command"
        if self.run.config.resume != "auto":
            command += " with --resume auto"
        return f"saved {path}; {command} continues from there"


def resume(found: Sequence[Path], run: Run, session: Session, training: Any) -> CheckpointSchedule:
    """Load the first whole checkpoint of `found` into a train_fsdp.Training. Collective.

    Returns the schedule of the saves to come, from the step to `begin` at. AgreedError as in
    `read_run_state`.
    """
    config = run.config
    log = session.log
    model = training.model
    optimizer = training.optimizer
    scaler = training.scaler

    def load(path: Path) -> None:
        checkpoint.load(path, model, optimizer, group=session.gloo)
        for group, settings in zip(optimizer.param_groups, settings_of_flags, strict=True):
            group.update(settings)

    # The flags hold (--betas, --weight-decay, --layer-decay), not the settings in the checkpoint:
    # with --allow-changes they may differ.
    settings_of_flags = []
    for group in optimizer.param_groups:
        settings_of_flags.append({name: group[name] for name in group if name != "params"})
    state = read_run_state(found, run, log.say, load)
    schedule = CheckpointSchedule(run, log, state["step"])
    session.where_saved = schedule.where
    session.finish_saves = schedule.finish
    schedule.began_at = state["path"]
    if schedule.began_at:
        folder = schedule.began_at.resolve().parent
        schedule.begins_in_out = folder == Path(config.out).resolve()
    if schedule.begin < run.steps:
        mark_done(config.out, False)
    # A scale below 1 comes from overflows that no scale could cure. Restored, it would make
    # gradients underflow for thousands of steps; a new one finds its level in a few.
    if scaler and state["scaler"] and state["scaler"]["scale"] >= 1:
        scaler.load_state_dict(state["scaler"])
    schedule.scaler = scaler
    if config.save_every == "none":
        return schedule
    schedule.saver = checkpoint.Saver(
        config.out,
        model,
        optimizer,
        keep=config.keep,
        group=session.gloo,
        background=config.async_save,
    )
    if schedule.begins_in_out:  # --resume PATH may lie elsewhere
        schedule.saver.saved = schedule.begin
        schedule.logged = schedule.begin
    return schedule


def mark_done(out: str, done: bool) -> None:
    """Make OUT/done, or remove a shorter run's; AgreedError, status 1, if it cannot. Collective."""
    path = Path(out, "done")
    if done:
        run_on_rank0(path.touch)
    else:
        run_on_rank0(partial(path.unlink, missing_ok=True))
