"""Pretrain a ViT-MAE with PyTorch FSDP, in any sharding mode, on any number of ranks.

    python train_fsdp.py --model tiny --img-size 96 --data examples/tiles/train     # one process
    torchrun --nproc-per-node 8 train_fsdp.py --model base --mode full_shard --data DIR
    srun python train_fsdp.py --model 3b --mode hybrid --group 2 --data DIR         # Slurm

Read vit.py, data.py, mesh.py and shard.py first, and examples/minimal.py: the same training in 100
lines. What keeps a run alive and observable is in runtime/. This file covers, in order: one step,
the model, the loop, the run.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: a signal during them must not kill the process. Slurm
    # sends one shortly before the time limit; the loop then saves and leaves.
    from runtime import process

    process.ignore_output_errors()
    RECEIVED = process.listen_for_signals()

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
from runtime.device_batches import open_batches
from runtime.image_source import find_images
from runtime.monitor import Monitor
from runtime.resume import CheckpointSchedule, initial_values, list_newest_first, resume
from runtime.run import Run, with_images
from runtime.session import Session, manual_gc, run_session
from runtime.start_record import report_start

COLLECT_EVERY = 100  # steps between two garbage collections

# --- One step


@dataclass
class Training:
    """A sharded model, and what a step of its training needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None  # fp16 needs one
    loss_of: Callable[[nn.Module, Any], Tensor]  # (model, micro-batch) -> loss (), fp32
    dtype: torch.dtype  # of the computation
    clip: float | None  # largest gradient norm


def learning_rate(step: int, run: Run) -> float:
    """Schedule of steps 0 .. steps-1: linear warm-up, then half a cosine down towards 0."""
    if step < run.warmup_steps:
        return run.peak_lr * (step + 1) / run.warmup_steps  # not from 0, which would waste a step
    after = step - run.warmup_steps
    rest = run.steps - run.warmup_steps
    return run.peak_lr * 0.5 * (1 + math.cos(math.pi * after / rest))


def forward_backward(training: Training, micro_batches: Sequence[Any]) -> Tensor:
    """Accumulate the gradients of all micro-batches; return this rank's mean loss ()."""
    model = training.model
    count = len(micro_batches)
    device = micro_batches[0][0].device
    total = torch.zeros((), device=device)
    for i, micro_batch in enumerate(micro_batches):
        # whole gradients are all-reduced after the last micro-batch, sharded ones reduced in each
        with shard.accumulation(model, last=i == count - 1, uses_all=True):
            with shard.autocast(model, device, training.dtype):
                loss = training.loss_of(model, micro_batch)
            loss = loss / count  # the sum is this rank's mean; DDP and FSDP average over ranks
            if training.scaler:
                training.scaler.scale(loss).backward()
            else:
                loss.backward()
        total += loss.detach()
    return total


def train_step(
    training: Training,
    guard: StepGuard,
    micro_batches: Sequence[Any],
    lr: float,
    requests: StepRequests = NO_REQUESTS,
) -> None:
    """Make one optimizer step, unless some rank finds a bad value in it. Collective.

    The `requests` of this rank are sent to all others. After three steps, with AdamW, nothing here
    waits for a GPU, so that the host runs ahead of it.
    """
    optimizer = training.optimizer
    scaler = training.scaler
    loss = forward_backward(training, micro_batches)
    if scaler:
        scaler.unscale_(optimizer)  # the norm must be that of the true gradients
    # over all shards: the same on every rank
    limit = math.inf if training.clip is None else training.clip
    norm = shard.clip_grad_norm(training.model, limit)
    # one small all-reduce: all ranks skip a step with a bad value, or none does
    skip = guard.check_step(loss, norm, requests, scaled=scaler is not None)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)  # fine-tuning has a rate for each layer
    shard.optimizer_step(optimizer, skip)  # scaler.step would make the host wait
    if scaler:
        # The scale is the same on every rank: with DDP all see the same gradients; with shards,
        # FSDP2's DTensors and FSDP1's own scaler ask the other ranks whether theirs are finite.
        scaler.update()
    optimizer.zero_grad()  # to None: the memory of sharded gradients is free


# --- The model: from shapes to a sharded model that trains


def build_training(run: Run, grid: DeviceMesh, resuming: bool = False) -> Training:
    """Build, shard and initialise the model, with its AdamW. Collective.

    With FSDP by blocks no rank ever holds the whole model: it has no memory until it is sharded.
    With `resuming` its memory is uninitialized until a checkpoint is loaded.
    """
    config = run.config
    mode = str(config.mode)
    with torch.device("meta"):  # shapes without memory
        model: nn.Module = vit.ViTMAE(run.model, config.img_size, config.norm_pix_loss)
    decay = shard.weight_decay_names(model)  # by the shapes of whole parameters
    # PyTorch warns that the output is a view that must not be written to; nobody does
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    model = shard.apply(
        model,
        mode,
        grid,
        block_classes={vit.Block},
        init_fn=None if resuming else initial_values(run),
        uninitialized=resuming,
        split_block=tensor_parallel.split_block if config.tp > 1 else None,
        options=run.sharding_options(),
    )
    # after sharding: its states are sharded as the parameters are
    optimizer = shard.build_optimizer(
        model, mode, decay, lr=run.peak_lr, weight_decay=config.weight_decay, betas=config.betas
    )
    if config.tp > 1:
        tensor_parallel.finish_split(model, optimizer, grid)
    scaler = shard.build_scaler(model, torch.device(grid.device_type), run.dtype)
    stats = run.pixel_stats

    def loss_of(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        images, noise = micro_batch  # (B, C, H, W) as loaded, masking noise (B, L)
        loss, _, _ = model(data.normalize(images, stats), config.mask_ratio, noise)
        return loss

    return Training(model, optimizer, scaler, loss_of, run.dtype, config.clip)


# --- The loop


def train(run: Run, training: Training, monitor: Monitor) -> tuple[str, str | None]:
    """Train the steps that are left; return why the run ends, and an error message if it failed.

    Reasons: done, signal, nan, loader_error, bad_images, save_failed.
    """
    guard = monitor.guard
    checkpoints = monitor.checkpoints
    evaluate_every = monitor.evaluate_every
    for step in range(checkpoints.begin, run.steps):
        done = step + 1
        last = done == run.steps
        save_now = last or checkpoints.due_after(done)
        evaluate_now = evaluate_every > 0 and done % evaluate_every == 0
        # fetch: the loader works ahead, so that this seldom waits
        batch = monitor.next_batch(step)
        # step
        monitor.session.heartbeat("training", step)
        lr = learning_rate(step, run)
        train_step(training, guard, batch.micro_batches, lr, monitor.requests())
        if monitor.profile:
            monitor.profile.step()
        # log: what all ranks agreed on; a GPU's result comes one step later, so that nobody waits
        for result in monitor.finished_steps(wait=save_now or evaluate_now):
            monitor.log_step(result, learning_rate(result.step, run))
        if guard.ended:
            return guard.ended, monitor.problem
        # save: at an interval, by some rank's clock, and before the run ends
        ending = last or guard.stop or monitor.bad_images.too_many is not None
        saved = save_now or guard.save or ending
        if saved:
            monitor.session.heartbeat("saving", step)
            with monitor.meter.paused():
                problem = checkpoints.save(guard.done, wait=ending)
            guard.save = False
            if problem:
                return "save_failed", problem
        # stop: too many bad images, or a signal, on whichever rank; there may be little time left
        if monitor.bad_images.too_many:
            return "bad_images", monitor.bad_images.too_many
        if guard.stop and not last:
            return "signal", None
        # evaluate: at an interval of its own, or after each save
        if evaluate_every == 0:
            evaluate_now = saved
        if monitor.evaluation and evaluate_now:
            with monitor.meter.paused():
                monitor.evaluation(guard.done)
        if done % COLLECT_EVERY == 0:
            gc.collect()  # on all ranks at the same step, not at random times on one
    return "done", None


def read_images(run: Run, monitor: Monitor) -> tuple[str, str | None]:
    """Read the images of every step and train nothing, for --run-mode io; return as `train`."""
    guard = monitor.guard
    zero = torch.zeros((), device=monitor.session.device)
    for step in range(run.steps):
        last = step + 1 == run.steps
        monitor.next_batch(step)
        guard.check_step(zero, zero, monitor.requests())
        for result in monitor.finished_steps(wait=last):
            monitor.log_step(result, lr=0.0)
        if guard.ended:
            return guard.ended, None
        if monitor.bad_images.too_many:
            return "bad_images", monitor.bad_images.too_many
        if guard.stop and not last:
            return "signal", None
    return "done", None


# --- The run: each part is made from those before it


def run_training(run: Run, session: Session) -> None:
    """Make one run, on every rank; AgreedError where it has failed."""
    config = run.config
    log = session.log
    session.lock_folder(config.out)  # against a second run
    # rank 0 lists the images for all
    session.heartbeat("listing images")
    find = partial(find_images, config, run.global_batch)
    files, facts = run_on_rank0(find)
    run = with_images(run, facts)
    existing = list_newest_first(run, log.say)
    log.open(run, session.device)
    training = None
    checkpoints = CheckpointSchedule(run, log)
    if config.run_mode != "io":
        session.heartbeat("building the model")
        grid = mesh.build_mesh(run.mesh_shape, session.device)  # replicate x shard (x tp)
        training = build_training(run, grid, resuming=bool(existing))
    if training and config.run_mode == "real":  # the other run modes save nothing
        checkpoints = resume(existing, run, session, training)
        if checkpoints.finished():
            return
    session.heartbeat("reading the first batch")
    batches = open_batches(run, session, files, range(checkpoints.begin, run.steps))
    monitor = Monitor(run, session, files, checkpoints, first=next(batches), rest=batches)
    report_start(run, session, checkpoints.begin)
    if training:
        monitor.watch(training.model)
    with manual_gc():
        if training:
            reason, problem = train(run, training, monitor)
        else:
            reason, problem = read_images(run, monitor)
    monitor.finish(reason, problem)


def main(argv: Sequence[str] | None = None, received: Sequence[int] = ()) -> int:
    """Run the command line; return the exit status: 0 done or stopped, 1 failed, 2 refused.

    Signal handlers append the number of each signal that asks for a stop to `received`.
    """
    config = parse(argv, __doc__)
    if config.dry_run:
        from runtime.dry_run import dry_run

        return dry_run(config, build_training, forward_backward)
    return run_session(config, run_training, received)


if __name__ == "__main__":
    del __file__  # by which multiprocessing would import all of this again in every loader worker
    raise SystemExit(main(received=RECEIVED))
