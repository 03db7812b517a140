"""Pretrain a ViT-MAE with PyTorch FSDP, in any sharding mode, on any number of ranks.

    python train_fsdp.py --model tiny --img-size 96 --data examples/tiles/train     # one process
    torchrun --nproc-per-node 8 train_fsdp.py --model base --mode full_shard --data DIR
    srun python train_fsdp.py --model 3b --mode hybrid --group 2 --data DIR         # Slurm

Read vit.py, data.py, mesh.py and shard.py first. What keeps a run alive and observable is in
runtime/. This file covers, in order: one step, the model, the loop, the run.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: a signal during them must not kill the process. Slurm
    # sends one shortly before the time limit; the loop then saves and leaves.
    from runtime import process

    process.make_safe()
    RECEIVED = process.collect()

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import data
import mesh
import shard
import vit
from runtime import devices, image_source, tensor_parallel, topology
from runtime.agreement import StepGuard, mean_over_ranks, run_on_rank0
from runtime.bad_images import BadImageLog
from runtime.config import parse
from runtime.device_batches import NO_BATCH, Batch, open_batches
from runtime.initial_values import initial_values
from runtime.log import Meter, compile_seconds, open_log, open_tensorboard
from runtime.record import finish, loss_of_zero, report_start
from runtime.resume import Saves, list_newest_first, resume
from runtime.run import Run, with_images
from runtime.session import Session, manual_gc, run_session

# ---------------------------------------------------------------------------------------------
# One step


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Schedule of steps 0 .. steps-1: linear warm-up, then half a cosine down towards 0."""
    if step < warmup:
        return peak * (step + 1) / warmup  # not from 0, which would waste a step
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def forward_backward(
    model: nn.Module,
    scaler: torch.amp.GradScaler | None,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    *,
    mask_ratio: float,
    dtype: torch.dtype,
    stats: data.ChannelStats = data.IMAGENET,
) -> Tensor:
    """Accumulate the gradients of all micro-batches; return this rank's mean loss ().

    Each micro-batch is (images (B, C, H, W) as loaded, masking noise (B, L)), on the device.
    """
    total = torch.zeros((), device=micro_batches[0][0].device)
    for i, (images, noise) in enumerate(micro_batches):
        # whole gradients are all-reduced after the last micro-batch, sharded ones reduced in each
        with shard.accumulation(model, last=i == len(micro_batches) - 1):
            with shard.autocast(model, images.device, dtype):
                loss, _, _ = model(data.normalize(images, stats), mask_ratio, noise)
            loss = loss / len(micro_batches)  # so that the sum is the mean of the whole batch
            (scaler.scale(loss) if scaler else loss).backward()
        total += loss.detach()
    return total


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    guard: StepGuard,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    *,
    lr: float,
    mask_ratio: float,
    clip: float | None,
    dtype: torch.dtype,
    stats: data.ChannelStats = data.IMAGENET,
) -> tuple[Tensor, Tensor]:
    """Make one optimizer step; return this rank's mean loss () and the gradient norm ().

    Both stay on the device: nothing here waits for it, so that the host runs ahead of the device.
    """
    loss = forward_backward(
        model, scaler, micro_batches, mask_ratio=mask_ratio, dtype=dtype, stats=stats
    )
    if scaler:
        scaler.unscale_(optimizer)  # the norm must be that of the true gradients
    norm = shard.clip_grad_norm(model, clip or math.inf)  # over all shards: the same on every rank
    # one small all-reduce: all ranks skip a step with a bad value, or none does
    skip = guard.vote(loss, norm, scaled=scaler is not None)
    for group in optimizer.param_groups:
        group["lr"] = lr  # the same for all: MAE has no layer-wise decay in pretraining
    shard.optimizer_step(optimizer, skip)  # skipped on the device, without asking the host
    if scaler:
        scaler.update()
    optimizer.zero_grad()  # to None: their memory is free until the next backward
    return loss, norm


# ---------------------------------------------------------------------------------------------
# The model: from shapes to a sharded model that trains


def build_meta_model(run: Run, device: torch.device) -> nn.Module:
    """Build the model on the meta device, shapes without memory, for later use on `device`."""
    with torch.device("meta"):
        model = vit.ViTMAE(run.model, run.config.img_size, run.config.norm_pix_loss)
    if device.type == "cpu":  # on a GPU PyTorch's own kernels are the fast ones
        devices.apply_to(model)
    return model


def build_model_and_optimizer(
    run: Run,
    grid: DeviceMesh,
    device: torch.device,
    *,
    initialise: bool = True,
    meta_model: nn.Module | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler | None]:
    """Build, shard and initialise the model; return it with its AdamW and, for fp16, a scaler.

    No rank ever holds the whole model: it has no memory until it is sharded. Without `initialise`
    its values are undefined until a checkpoint is loaded. `meta_model` is built unless given.
    """
    c, mode = run.config, str(run.config.mode)
    model = meta_model or build_meta_model(run, device)
    decay = shard.weight_decay_names(model)  # by the shapes of whole parameters
    model = shard.apply(
        model,
        mode,
        grid,
        block_classes={vit.Block},
        initial_value=initial_values(run, needed=initialise),
        values_on_rank0=bool(c.init_from),
        load_later=not initialise,
        split_block=partial(tensor_parallel.split_block, grid=grid) if c.tp > 1 else None,
        options=run.sharding_options(),
    )
    # after sharding: its states are sharded as the parameters are
    optimizer = shard.build_optimizer(model, mode, decay, lr=run.lr, weight_decay=c.weight_decay)
    if c.tp > 1:
        tensor_parallel.share_inputs(model, grid)
        tensor_parallel.keep_state_layout(model, optimizer)
    return model, optimizer, shard.build_scaler(model, device, run.dtype)


# ---------------------------------------------------------------------------------------------
# The loop


def log_step(
    run: Run,
    session: Session,
    step: int,
    loss: Tensor,
    norm: Tensor,
    lr: float,
    guard: StepGuard,
    meter: Meter,
    bad_images: BadImageLog,
) -> None:
    """Log a step, and the bad images of all ranks since the last one. Collective."""
    pending = torch.full_like(loss, bad_images.pending)
    mean_loss, any_pending = mean_over_ranks(torch.stack([loss, pending]))
    seconds, waited = meter.interval(guard.done)
    with meter.paused():
        if any_pending:
            bad_images.sync()
        session.log.step(run, step, mean_loss, norm, lr, seconds, waited, bad_images.count)
        gc.collect()  # on all ranks at the same step, not at random times on one


def train(
    run: Run,
    session: Session,
    batches: Iterator[Batch],
    step_fn: Callable[..., tuple[Tensor, Tensor]],
    guard: StepGuard,
    meter: Meter,
    saves: Saves,
    bad_images: BadImageLog,
    observe: Callable[[int], AbstractContextManager],
) -> tuple[str, str | None]:
    """Train the steps that are left; return why the run ends, and an error message if it failed.

    Reasons: done, signal, nan, data, bad, save. `observe(step)` surrounds a step, for a profiler.
    """
    batch, steps = NO_BATCH, range(guard.done, run.steps)
    for step in steps:
        last = step + 1 == run.steps
        log_now = last or (step + 1) % run.config.log_every == 0
        save_now = last or saves.due_after(step + 1)
        lr = learning_rate(step, run.steps, run.warmup_steps, run.lr)
        with observe(step):
            # fetch: the loader works ahead, so that this seldom waits
            session.heartbeat("reading data", step)
            with meter.data_wait(), guard.catch_loader_error():
                batch = next(batches)
                bad_images.record(step, batch)
            # step
            session.heartbeat("training", step)
            loss, norm = step_fn(batch.parts, lr=lr)  # train_step, bound in prepare_training
            meter.losses.append(loss)
        # what all ranks agreed on: read one step late, or now if the host must wait anyway
        if not guard.settle(batch.image_ids, log_now or save_now, bad_images.log_skipped_step):
            return guard.ended, guard.problem
        # log
        if log_now:
            log_step(run, session, step, loss, norm, lr, guard, meter, bad_images)
        elif step == steps.start:
            session.log.first_step(run, step, loss)
        # save
        ending = last or guard.stop or bad_images.too_many is not None
        if save_now or guard.save or ending:
            session.heartbeat("saving", step)
            with meter.paused():
                failed = saves.save(guard.done, guard.consecutive, wait=ending)
                if not failed:
                    saves.evaluate(guard.done)
            guard.save = False
            if failed:
                return "save", failed
        # stop: a signal, or too many bad images, on whichever rank
        if bad_images.too_many:
            return "bad", bad_images.too_many
        if guard.stop and not last:
            return "signal", None
    return "done", None


# ---------------------------------------------------------------------------------------------
# The run: each part is made from those before it


def prepare_training(
    run: Run, session: Session, guard: StepGuard
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Saves, DeviceMesh | None]:
    """Make the model, with a checkpoint's values or initial ones; return step, saves and mesh."""
    config, log, device = run.config, session.log, session.device
    if config.run == "io":  # no model
        return guard.read_only_step, Saves(run, log), None
    grid = mesh.build_mesh(run.mesh_shape, device)  # replicate x shard (x tp), ranks in rows
    found = list_newest_first(run, log.say)
    model, optimizer, scaler = build_model_and_optimizer(run, grid, device, initialise=not found)
    saves = Saves(run, log)  # saves nothing
    if config.run == "real":
        saves, step, consecutive_bad = resume(found, run, session, model, optimizer, scaler)
        guard.begin(step, consecutive_bad)
    if config.eval_data and config.run == "real":
        from runtime.evaluation import Evaluation

        saves.evaluate = Evaluation(run, session, model)
    step_fn = partial(train_step, model, optimizer, scaler, guard, **run.step_options())
    return step_fn, saves, grid


def run_training(run: Run, session: Session) -> str | None:
    """Make one run, on every rank; return an error message where it has failed."""
    config, ranks, device = run.config, session.ranks, session.device
    session.heartbeat("listing images")
    # rank 0 lists the images and opens the log for all
    files, found, _ = image_source.share_images(config, run.global_batch)
    session.log = log = open_log(config.out)
    log.say_all(topology.describe_topology(ranks, device, run.mesh_shape, os.environ))
    run = run_on_rank0(partial(with_images, run, **found))
    bad_images = BadImageLog(config.out, run.images, config.max_bad, log, files.path)

    guard = StepGuard(device, config.max_skips)
    session.heartbeat("building the model")
    step_fn, saves, grid = prepare_training(run, session, guard)
    if config.tensorboard:
        open_tensorboard(log, run, guard.done)
    guard.stop_requested, guard.save_due = session.stop_requested, saves.due_by_clock
    session.where_saved = saves.where if config.run == "real" else None

    steps = range(guard.done, run.steps)
    session.heartbeat("reading the first batch")
    batches, first, workers = open_batches(run, ranks, device, files, steps, log.say)
    zero = loss_of_zero(first, run)  # what a model that learns nothing would score
    report_start(run, session, guard.done, workers)
    profile, observe = None, cast(Callable[[int], AbstractContextManager], nullcontext)
    if config.profile and grid and ranks.rank == 0:
        from runtime.step_profile import RunProfile

        profile = RunProfile(run, log, device, grid, steps)
        observe = profile.step

    compiled_before, meter = compile_seconds(), Meter(guard.done, run.global_batch)
    with manual_gc():
        ended = train(run, session, batches, step_fn, guard, meter, saves, bad_images, observe)
    measured = {
        "compile_seconds": compile_seconds() - compiled_before if config.compile else None,
        "payload_bytes": profile.payload_bytes() if profile else None,
    }
    return finish(run, session, ended, guard, meter, saves, bad_images, zero, measured)


def main(argv: Sequence[str] | None = None, received: Sequence[int] = ()) -> int:
    """Run the command line; return the exit status: 0 done or stopped, 1 failed, 2 refused.

    Signal handlers append the number of each signal that asks for a stop to `received`.
    """
    config = parse(argv)
    if config.dry_run:
        from planner.dry_run import dry_run

        return dry_run(config)
    return run_session(config, run_training, received)


if __name__ == "__main__":
    del __file__  # by which multiprocessing would import all of this again in every loader worker
    raise SystemExit(main(received=RECEIVED))
