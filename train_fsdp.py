"""Pretrain a ViT-MAE with PyTorch FSDP, in any sharding mode, on any number of ranks.

    python train_fsdp.py --model tiny --img-size 96 --data examples/tiles/train     # one process
    torchrun --nproc-per-node 8 train_fsdp.py --model base --mode full_shard --data DIR
    srun python train_fsdp.py --model 3b --mode hybrid --group 2 --data DIR         # Slurm

Read vit.py, data.py, mesh.py and shard.py first, and examples/minimal.py: the same training in 100
lines. What keeps a run alive and observable is in runtime/. This file covers, in order: one step,
the model, the loop, the run.
"""

if __name__ == "__main__":
    # Before the imports, which take seconds: a signal that arrives meanwhile must not kill the
    # process. With --signal, Slurm sends one before the time limit; the training loop then saves
    # and ends.
    from runtime import process

    process.ignore_output_errors()  # a closed terminal or a full disk must not end the run
    SIGNALS = process.listen_for_signals()

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import data
import mesh
import shard
import vit
from runtime import tensor_parallel
from runtime.agreement import NO_REQUESTS, StepGuard, StepRequests, run_on_rank0
from runtime.config import parse
from runtime.device_batches import open_batches, steps_ahead
from runtime.evaluation import open_evaluation
from runtime.image_source import check_same_pack, find_images
from runtime.monitor import Monitor
from runtime.resume import CheckpointSchedule, initial_values, list_newest_first, resume
from runtime.run import Run, with_images
from runtime.session import Session, manual_gc, run_session
from runtime.start_record import report_start

# These objects come from runtime/. Run: the flags and what follows from them (sizes, steps).
# Session: what lives as long as the process group (log, watchdog, signals). StepGuard: has all
# ranks take the same decisions in each step. CheckpointSchedule: when to save. Monitor: holds all
# of these, plus the clock and the bad images.

COLLECT_EVERY = 100  # steps between two garbage collections

# --- One step


@dataclass
class Training:
    """A sharded model, and everything else that a training step needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None  # fp16 needs one
    compute_loss: Callable[[nn.Module, Any], Tensor]  # (model, micro-batch) -> loss (), fp32
    dtype: torch.dtype  # in which forward and backward compute
    clip: float | None  # largest gradient norm; None: gradients are not clipped


def learning_rate(step: int, run: Run) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then half a cosine.

    The peak is --lr, or --blr x global batch / 256. Without --warmup-steps, a twentieth of all
    steps are warm-up.
    """
    if step < run.warmup_steps:
        return run.peak_lr * (step + 1) / run.warmup_steps  # not from 0, which would waste a step
    decayed = step - run.warmup_steps
    decay_steps = run.steps - run.warmup_steps
    return run.peak_lr * 0.5 * (1 + math.cos(math.pi * decayed / decay_steps))


def forward_backward(training: Training, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Accumulate the gradients of all micro-batches; return this rank's mean loss, a scalar."""
    model = training.model
    count = len(micro_batches)
    # a micro-batch is (images, masking noise) or, in fine-tuning, (images, labels)
    first_images, _ = micro_batches[0]
    device = first_images.device
    mean_loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(micro_batches):
        is_last = i == count - 1
        # DDP all-reduces gradients once, after the last micro-batch. FSDP reduce-scatters sharded
        # ones after each; with uses_all, FSDP2 all-reduces over replicas after the last one only,
        # which is right because every micro-batch uses all parameters of a ViT-MAE.
        with shard.accumulation(model, last=is_last, uses_all=True):
            with shard.autocast(model, device, training.dtype):
                loss = training.compute_loss(model, micro_batch)
            loss = loss / count  # so the sum is this rank's mean; DDP and FSDP average over ranks
            if training.scaler:
                training.scaler.scale(loss).backward()
            else:
                loss.backward()
        mean_loss += loss.detach()
    return mean_loss


def train_step(
    training: Training,
    guard: StepGuard,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    lr: float,
    requests: StepRequests = NO_REQUESTS,
) -> None:
    """Take one optimizer step, unless some rank has a bad value or its loader failed. Collective.

    With one all-reduce, `guard` has all ranks agree on whether to apply the step. The same
    all-reduce tells them this rank's `requests`, for example to stop or to save. With AdamW nothing
    here waits for a GPU, so the host can run ahead of it, except in the few steps in which shard.py
    compares the ranks.
    """
    optimizer = training.optimizer
    scaler = training.scaler
    loss = forward_backward(training, micro_batches)
    if scaler:
        scaler.unscale_(optimizer)  # the norm is of the unscaled gradients
    limit = math.inf if training.clip is None else training.clip
    # the norm over all shards, the same on every rank
    norm = shard.clip_grad_norm(training.model, limit)
    # one small all-reduce: either all ranks skip the step, or none does
    skip = guard.check_step(loss, norm, requests, scaled=scaler is not None)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)  # fine-tuning has a rate for each layer
    shard.optimizer_step(optimizer, skip)  # scaler.step would make the host wait
    if scaler:
        # All ranks must compute the same scale, so unscale_ must find overflow on all or on none.
        # Under DDP all have the same gradients. Under FSDP2, DTensor reduces the overflow flag over
        # the shard group, and replicas hold equal shards. FSDP1's scaler reduces it over all ranks.
        scaler.update()
    optimizer.zero_grad()  # FSDP's gradients are freed until backward; DDP keeps its buckets


# --- The model: from shapes to a sharded model that trains


def build_training(run: Run, grid: DeviceMesh, resuming: bool = False) -> Training:
    """Build, shard and initialise the model; build its AdamW. Collective.

    A parameter has only a shape until its block is sharded. Then shard.apply allocates it, fills it
    with its full value from `init_fn`, keeps this rank's shard, and frees the rest. So where FSDP
    shards the parameters of blocks (--wrap block), no rank holds the full model while it is built.
    AdamW has states for this rank's shard only.

    If `resuming`, values stay unset until a checkpoint is loaded.
    """
    config = run.config
    mode = str(config.mode)  # never None: fill_defaults (runtime/config.py) has chosen one
    # random values (vit.initial_value), or those of --init-from
    init_fn = None if resuming else initial_values(run)
    with torch.device("meta"):  # shapes without memory
        model: nn.Module = vit.ViTMAE(run.vit_config, config.img_size, config.norm_pix_loss)
    # Before sharding: decay goes by the number of dimensions, which FSDP1 does not keep.
    decay = shard.weight_decay_names(model)
    # FSDP2 warns that the output is a view, which must not be changed in place. Nothing changes it.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    model = shard.apply(
        model,
        mode,
        grid,
        block_classes={vit.Block},
        init_fn=init_fn,
        uninitialized=resuming,
        split_block=tensor_parallel.split_block if config.tp > 1 else None,
        options=run.sharding_options(),
    )
    # After sharding, so that its states are sharded like the parameters.
    optimizer = shard.build_optimizer(
        model, mode, decay, lr=run.peak_lr, weight_decay=config.weight_decay, betas=config.betas
    )
    if config.tp > 1:
        # After sharding: give all ranks of a tp group the inputs of its first rank, in case one of
        # them could not read an image, and have state dicts hold qkv's optimizer states in the
        # order of the rows of an unsplit model.
        tensor_parallel.finish_split(model, optimizer, grid)
    scaler = shard.build_scaler(model, torch.device(grid.device_type), run.dtype)
    stats = run.pixel_stats

    def compute_loss(network: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        images, noise = micro_batch  # (B, C, H, W) as loaded, masking noise (B, L)
        loss, _, _ = network(data.normalize(images, stats), config.mask_ratio, noise)
        return loss

    return Training(model, optimizer, scaler, compute_loss, run.dtype, config.clip)


# --- The loop
#
# A batch reaches the loop through data.Images (read, crop) and data.collate (stack) in the loader's
# workers, then through device_batches (put the micro-batches of a step on the device) and
# Monitor.next_batch.


def train(run: Run, training: Training, monitor: Monitor) -> tuple[str, str | None]:
    """Run the remaining steps; return why the run ends, and an error message if there is one.

    Reasons: done, signal, nan, loader_error (whose message `Monitor.finish` makes), bad_images,
    save_failed. `Monitor.report_end` logs the reason in the record `end`. If an exception ends the
    run, `Session.give_up` logs the reason "failed".
    """
    guard = monitor.guard
    checkpoints = monitor.checkpoints
    evaluate_every = monitor.evaluate_every
    for step in range(checkpoints.begin, run.steps):
        done = step + 1  # the number of steps done, this one included
        last = done == run.steps
        save_scheduled = last or checkpoints.due_after(done)
        evaluate_scheduled = evaluate_every > 0 and done % evaluate_every == 0
        # fetch: the loader works ahead, so this seldom waits
        batch = monitor.next_batch(step)
        # step: forward, backward, and an update unless some rank finds a bad value
        monitor.session.heartbeat("training", step)  # tells the watchdog what this rank is doing
        lr = learning_rate(step, run)
        train_step(training, guard, batch.micro_batches, lr, monitor.requests())
        if monitor.profile:
            monitor.profile.step()
        # log: take each result that has arrived, and log those that are due. On a GPU a result is
        # read one step late, so that the host does not have to wait for it. Reading the results
        # also sets guard.stop, guard.save, guard.end_reason and, for a bad step, monitor.problem.
        for result in monitor.finished_steps(wait=save_scheduled or evaluate_scheduled):
            monitor.log_step(result, learning_rate(result.step, run))
        if guard.end_reason:
            return guard.end_reason, monitor.problem
        # save: on schedule, when some rank's clock says so, or before the run ends. In all these
        # cases finished_steps has waited for the results of all `done` steps.
        too_many_bad = monitor.bad_images.problem is not None
        ending = last or guard.stop or too_many_bad
        save_now = save_scheduled or guard.save or ending
        if save_now:
            monitor.session.heartbeat("saving", step)
            with monitor.meter.paused():
                problem = checkpoints.save(done, wait=ending)
            guard.save = False
            if problem:  # the run's last save has failed, or too many saves in a row have
                return "save_failed", problem
        # stop: after too many bad images, or a signal to any rank, which travels this way:
        # session.signals of one rank -> `stop` in its monitor.requests() -> guard.stop on all. This
        # comes before evaluating, because little time may be left.
        if too_many_bad:
            return "bad_images", monitor.bad_images.problem
        if guard.stop and not last:
            return "signal", None
        # evaluate: every `evaluate_every` steps, or, if that is 0, after every save
        evaluate_now = evaluate_scheduled or (save_now and evaluate_every == 0)
        if monitor.evaluation and evaluate_now:
            with monitor.meter.paused():
                monitor.evaluation(done)
        if done % COLLECT_EVERY == 0:
            gc.collect()  # on all ranks at the same step, not at random times on one
    return "done", None


def read_images(run: Run, monitor: Monitor) -> tuple[str, str | None]:
    """Read the images of every step without training (--run-mode io); return as `train` does.

    Not measured: the first collective, and the batches that the workers have read ahead by then.
    """
    guard = monitor.guard
    zero = torch.zeros((), device=monitor.session.device)
    # the first collective is slow; with a guard of its own it is not counted as a step
    StepGuard(monitor.session.device).check_step(zero, zero)
    monitor.skip_batches(steps_ahead(run.config, monitor.session.ranks))
    for step in range(run.steps):
        last = step + 1 == run.steps
        monitor.next_batch(step)
        # loss and norm are 0: only the requests matter, for example to stop
        guard.check_step(zero, zero, monitor.requests())
        for result in monitor.finished_steps(wait=last):
            monitor.log_step(result, lr=0.0)
        if guard.end_reason:
            return guard.end_reason, None
        if monitor.bad_images.problem:
            return "bad_images", monitor.bad_images.problem
        if guard.stop and not last:
            return "signal", None
    return "done", None


# --- The run: each part is made from those before it


def run_training(run: Run, session: Session) -> None:
    """Do one run, on every rank; AgreedError (runtime/agreement.py) on all of them if it fails."""
    config = run.config
    log = session.log
    session.claim_folder(config.out)  # refuses a second run: process.lock_folder, on OUT/.lock
    session.heartbeat("listing images")
    find = partial(find_images, config, run.global_batch)
    files, image_facts = run_on_rank0(find)  # all ranks get what rank 0 finds
    check_same_pack(files)
    run = with_images(run, image_facts)
    existing = list_newest_first(run, log.say)  # checkpoints to resume from
    log.open(run, session.device)
    training = None  # in --run-mode io, which only reads images
    if config.run_mode != "io":
        session.heartbeat("building the model")
        grid = mesh.build_mesh(run.mesh_shape, session.device)  # replicate x shard (x tp)
        training = build_training(run, grid, resuming=bool(existing))
    if training and config.run_mode == "real":
        checkpoints = resume(existing, run, session, training)
        make_evaluation = partial(open_evaluation, run, session, training.model)
        # True if no step is left; a run that was killed before its last evaluation makes it now
        if checkpoints.finished(make_evaluation):
            return
    else:
        # syn and io do not resume, save or evaluate; syn repeats its first batch (open_batches)
        checkpoints = CheckpointSchedule(run, log)
    session.heartbeat("reading the first batch")
    # the step number alone tells a resumed run where it is in the data (see data.step_positions)
    end = run.steps
    if config.run_mode == "io":
        end += steps_ahead(config, session.ranks)  # these extra steps are not measured
    batches = open_batches(run, session, files, range(checkpoints.begin, end))
    first = next(batches)  # before the monitor starts its clock: workers take a while to start
    monitor = Monitor(run, session, files, checkpoints, first=first, rest=batches)
    report_start(run, session, checkpoints.begin)
    if training:
        monitor.watch(training.model)
    with manual_gc():
        if training:
            reason, problem = train(run, training, monitor)
        else:
            reason, problem = read_images(run, monitor)
    monitor.finish(reason, problem)


def main(argv: Sequence[str] | None = None, signals: Sequence[int] = ()) -> int:
    """Run the command line; return the exit status.

    It is 0 if the run is done or was stopped by a signal, 1 if it failed, 2 if it was refused: for
    its flags (`parse`), its launcher or device (`run_session`), or a ValueError that all ranks
    raise together (`AgreedError`), such as for a folder in use. A dry run returns 0, 2, or 3 if the
    run would not fit into memory.
    `signals` is a list to which runtime/process.py appends each signal that asks the run to stop.
    """
    config = parse(argv, __doc__)
    if config.dry_run:
        from runtime.dry_run import dry_run

        return dry_run(config, build_training, forward_backward)
    return run_session(config, run_training, signals)


if __name__ == "__main__":
    # multiprocessing would find this script by it, and import it again in each loader worker
    del __file__
    raise SystemExit(main(signals=SIGNALS))
