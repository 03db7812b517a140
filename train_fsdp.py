"""Pretrain a ViT-MAE with PyTorch FSDP, in any sharding mode, on any number of ranks.

    python train_fsdp.py --model tiny --img-size 96 --data examples/tiles/train     # one process
    torchrun --nproc-per-node 8 -- train_fsdp.py --model base --mode full_shard --data DIR
    srun python train_fsdp.py --model 3b --mode hybrid --group 2 --data DIR         # Slurm

Flags -> ranks -> mesh -> model -> shard -> resume -> data -> loop. Read vit.py, data.py, mesh.py
and shard.py beside it.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: a signal meanwhile must not kill the process. Slurm
    # announces the end of the allocation by one; the loop saves and leaves.
    import signal

    from runtime import terminal

    terminal.make_safe()
    RECEIVED: list[int] = []

    def _note(number: int, frame: object) -> None:
        RECEIVED.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C does not ask

    for _number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(_number, _note)

import gc
import math
import os
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import checkpoint
import data
import mesh
import shard
import vit
from planner import dry_run
from runtime import agreement, bad_images, device_batches, image_source, step_profile, topology
from runtime.assemble import build_meta_model, completed, planned, spread, start_record
from runtime.comm_counter import Collective, counted_once, payload
from runtime.flags import (
    DTYPES,
    RANK0_REPORT_GRACE_SECONDS,
    STARTUP_TIMEOUT_FACTOR,
    TORCHRUN_NOTE,
    check_masking,
    parse_args,
    print_error,
    sizes,
    usage_error,
)
from runtime.log import Log, describe, device_memory, open_log, start_over
from runtime.resume import Saves, candidates, resume

# ---------------------------------------------------------------------------------------------
# The step


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Of step 0 .. steps-1: linear up over `warmup` steps, then half a cosine down towards 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    finite: agreement.StepGuard,
    scaler: torch.amp.GradScaler | None,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    step: int,
    lr: float,
    mask_ratio: float,
    clip: float | None,
    dtype: torch.dtype,
    flags: agreement.StepFlags = agreement.NO_FLAGS,
) -> tuple[Tensor, Tensor]:
    """One optimizer step over the accumulation steps `batches`, each (images, noise) on the device.

    Returns this rank's mean loss () and the gradient norm over all parameters (), on the device:
    nothing here waits for it.
    """
    total = gradients(model, scaler, batches, mask_ratio=mask_ratio, dtype=dtype)
    norm = update(model, optimizer, finite, scaler, total, step=step, lr=lr, clip=clip, flags=flags)
    return total, norm


def gradients(
    model: nn.Module,
    scaler: torch.amp.GradScaler | None,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    mask_ratio: float,
    dtype: torch.dtype,
) -> Tensor:
    """Forward and backward of every accumulation step; returns this rank's mean loss ()."""
    total = torch.zeros((), device=batches[0][0].device)
    for i, (images, noise) in enumerate(batches):
        with shard.accumulation(model, last=i == len(batches) - 1):
            with shard.autocast(model, images.device, dtype):
                loss, _, _ = model(data.normalize(images), mask_ratio, noise)
            loss = loss / len(batches)
            (scaler.scale(loss) if scaler else loss).backward()
        total += loss.detach()
    return total


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    finite: agreement.StepGuard,
    scaler: torch.amp.GradScaler | None,
    total: Tensor,
    *,
    step: int,
    lr: float,
    clip: float | None,
    flags: agreement.StepFlags = agreement.NO_FLAGS,
) -> Tensor:
    """Apply the gradients, unless the ranks find them bad; returns their norm ()."""
    if scaler:
        scaler.unscale_(optimizer)
    norm = shard.clip_grad_norm(model, clip or math.inf)
    skip = finite.update(step, total, norm, scaler is not None, flags)
    for group in optimizer.param_groups:
        group["lr"] = lr
    shard.optimizer_step(optimizer, skip)
    if scaler:
        scaler.update()
    optimizer.zero_grad()
    return norm


# ---------------------------------------------------------------------------------------------
# The loop


@dataclass(frozen=True)
class Job:
    """What the loop needs to know of the run."""

    device: torch.device
    world_size: int
    steps: range  # of this process: from where a checkpoint left off to the end
    log_every: int
    global_batch: int
    epoch_samples: int  # images of an epoch, whole global batches
    flops_per_image: int
    hardware_flops_per_image: int | None  # with what is recomputed; None where nothing is
    peak_flops: float | None


def loop(
    job: Job,
    batches: Iterator[device_batches.Batch],
    log: Log,
    train: Callable[..., tuple[Tensor, Tensor]] | None,
    finite: agreement.StepGuard,
    lr_of: Callable[[int], float],
    saves: Saves | None,
    told_to_stop: Callable[[], bool],
    moved: Callable[[str, int], None],
    name_of: Callable[[int], str],
    inputs: bad_images.BadImageLog,
) -> dict[str, Any]:
    """Run the steps; `train` None reads only, `saves` None keeps nothing. Returns the end's record.

    `moved` hears what is done next, `name_of` gives the path of an image. Whatever ends the run
    while all ranks are alive, the state of the last step that was applied is saved first.
    """
    rates: list[float] = []
    last_losses: deque[Tensor] = deque(maxlen=10)
    last_batches: deque[device_batches.Batch] = deque(maxlen=2)
    started = mark = time.perf_counter()
    waited = all_waited = 0.0
    loss = norm = problem = failure = None
    done = since = unread = job.steps.start
    reason, stop, news, due, skipped, in_a_row = "done", False, False, False, 0, 0
    for step in job.steps:
        last = step + 1 == job.steps.stop
        log_now = (step + 1) % job.log_every == 0 or last
        save_now = saves is not None and (last or saves.due_after(step + 1))
        lr = lr_of(step)

        # fetch
        moved("reading data", step)
        asked = time.perf_counter()
        try:
            if failure is None:
                last_batches.append(next(batches))
        except Exception as error:  # this rank alone: the others must not lose what was trained
            failure = f"(reading data in step {step + 1}): {loader_error(error)}"
            if not isinstance(error, device_batches.LoaderFailed):
                traceback.print_exc()  # a bug
        if failure:  # the batch before stands in until all ranks know, in steps not applied
            last_batches.append(last_batches[-1])
        waited += time.perf_counter() - asked
        batch = last_batches[-1]
        if failure is None:
            bad = [(name_of(index), why) for index, why in batch.bad]
            inputs.record(step, bad, batch.cost, len(batch.image_ids))

        # step
        moved("training", step)
        flags = agreement.StepFlags(
            stop=told_to_stop(),
            bad_images=inputs.pending,
            save=saves is not None and saves.due_by_clock(),
            no_batch=failure is not None,
        )
        if train:
            loss, norm = train(batch.parts, step=step, lr=lr, flags=flags)
            last_losses.append(loss)
        else:
            nothing = torch.zeros((), device=job.device)
            finite.update(step, nothing, nothing, flags=flags)

        # skip, stop: every rank reads the same; not of this step yet unless it is waited for anyway
        while unread <= (step if log_now or save_now or stop or due else step - 1):
            verdict = finite.read(unread)
            told, in_a_row = verdict.flags, verdict.in_a_row
            stop, news, due = stop or told.stop, news or told.bad_images, due or told.save
            if told.no_batch:
                reason = "data"
                break
            if in_a_row:
                skipped += 1
                ids = last_batches[unread - step - 1].image_ids  # of this step or the one before
                mine = ids if verdict.mine or not verdict.loss else []
                problem = log.skip(unread, verdict, [name_of(i) for i in mine])
            if in_a_row > finite.max_skips:
                reason = "nan"
                break
            unread += 1
        if reason != "done":
            done = unread
            break
        done, problem = step + 1, None

        # bad images: told when the host has waited for the device anyway
        too_many = None
        if news and unread == step + 1:
            news, too_many = False, inputs.sync()
            stop = stop or bool(too_many)

        # log
        if log_now:
            mean_loss = agreement.mean_over_ranks(loss) if loss is not None else None
            if job.device.type == "cuda":
                torch.cuda.synchronize(job.device)  # --run io has read nothing yet
            seconds = (time.perf_counter() - mark) / (done - since)
            rates.append(job.global_batch / seconds)
            flops = job.flops_per_image if train else None
            log.step(
                step,
                job.steps.stop,
                loss=mean_loss,
                norm=norm,
                lr=lr,
                epoch=step * job.global_batch // job.epoch_samples,
                seconds=seconds,
                waited=waited / (done - since),
                global_batch=job.global_batch,
                world_size=job.world_size,
                flops_per_image=flops,
                peak_flops=job.peak_flops,
                hardware_flops_per_image=job.hardware_flops_per_image,
                device=job.device,
                bad_images=inputs.count,
            )
            all_waited, waited, since, mark = all_waited + waited, 0.0, done, time.perf_counter()
            gc.collect()  # not at a moment of Python's choosing, on one rank while others wait

        # save
        if saves and (save_now or due or stop):
            moved("saving", step)
            due = False
            asked = time.perf_counter()
            problem = saves.save(done, in_a_row, stop or last)
            mark += time.perf_counter() - asked  # not the step's time
            if problem:
                reason = "save"
                break
        if too_many:
            reason, problem = "bad", too_many
            break
        if stop and not last:
            reason = "signal"
            break

    if reason == "data":
        problem = first_problem(failure)
    if saves and reason in ("nan", "data"):
        moved("saving", done)
        if reason == "nan":  # the same command meets the bad steps again
            saves.save_last(done + 1 - in_a_row, 0)
        else:
            saves.save_last(done, in_a_row)
    seconds = time.perf_counter() - started
    inputs.sync()  # what was met since
    record: dict[str, Any] = {"reason": reason, "problem": problem, "steps": done}
    rate = statistics.median(rates[1:] or rates) if rates else None
    record |= {"skipped": skipped, "bad_images": inputs.count, "images_per_second": rate}
    record["step_seconds"] = job.global_batch / rate if rate else None
    record |= device_memory(job.device)
    record |= {"seconds": seconds, "data_share": (all_waited + waited) / seconds}
    if reason == "done" and last_losses:
        record["loss"] = agreement.mean_over_ranks(torch.stack(list(last_losses)).nanmean())
    return record


def loader_error(error: Exception) -> str:
    """The line of it that names the cause: of a worker, its own error."""
    text = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    lines = text.strip().splitlines() or [type(error).__name__]
    return lines[-1 if "Traceback" in text else 0]


def first_problem(failure: str | None) -> str:
    """The sentence, on all ranks, of the first whose loader has failed. Collective."""
    every = agreement.gather_to_rank0(failure) or []

    def sentence() -> str:
        failed = [rank for rank, text in enumerate(every) if text]
        more = f"; {len(failed) - 1} more ranks too" if len(failed) > 1 else ""
        return f"rank {failed[0]} has no data {every[failed[0]]}{more}"

    return agreement.run_on_rank0(sentence)


# ---------------------------------------------------------------------------------------------
# Beside the loop


class Crew:
    """The ranks of a run that have found each other: watched, and leaving together."""

    def __init__(
        self,
        ranks: mesh.Ranks,
        device: torch.device,
        *,
        timeout: int,
        folder: str,
        give_up: Callable[[str], None],
    ) -> None:
        """ConnectionError where this rank finds no others, ValueError as of mesh. Collective.

        `timeout` in seconds, as --timeout; `folder` and `give_up` as of agreement.Watchdog.
        """
        self.rank, who = ranks.rank, f"rank {ranks.rank} of {ranks.world_size}"
        # collectives that the watchdog may dump
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")

        def no_answer() -> None:
            where = ":".join(ranks.init[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
            print_error(
                f"{who} has no answer from {where}: rank 0 stands still, or the port is "
                "another program's"
            )

        with agreement.exit_if_longer_than(STARTUP_TIMEOUT_FACTOR * timeout + 10, no_answer):
            try:
                mesh.init_ranks(
                    ranks, device, timeout_minutes=STARTUP_TIMEOUT_FACTOR * timeout / 60
                )
                self.watch = agreement.Watchdog(
                    ranks.rank,
                    ranks.world_size,
                    ranks.init,
                    seconds=timeout,
                    patience=STARTUP_TIMEOUT_FACTOR,
                    folder=folder,
                    give_up=give_up,
                )
                self.gloo = cast(Any, dist.new_group(backend="gloo"))  # for files, not for GPUs
                dist.barrier(self.gloo)  # connects now: later, a lost one is waited for
            except (RuntimeError, OSError) as error:
                cause = str(error).splitlines()[0]
                raise ConnectionError(f"{who} found no others: {cause}") from error

    def leave(self, status: int) -> int:
        """The ranks part; returns the exit status. Collective."""
        self.watch.stop()
        dist.barrier(self.gloo)  # rank 0 keeps the store: it goes when nobody needs it any more
        dist.destroy_process_group()
        return status

    def refuse(self, error: Exception) -> int:
        """Rank 0 says what all have found wrong, and all leave. Returns the exit status."""
        if isinstance(error, RuntimeError) and agreement.is_peer_failure(error) is not False:
            self.abandon(error)
        if self.rank == 0:
            print_error(str(error))
        return self.leave(2 if isinstance(error, ValueError) else 1)

    def abandon(self, error: RuntimeError) -> NoReturn:
        """Leave at once where the others are lost or this rank has no data; other errors go up."""
        lost = agreement.is_peer_failure(error)
        if isinstance(error, device_batches.LoaderFailed):
            what = "has no data"
        elif lost:
            what = "lost contact with another"
        elif lost is None:
            traceback.print_exception(error)
            what = "failed, or lost contact with another"
        else:
            raise error
        cause, where = loader_error(error), self.watch.where()
        self.watch.abandon(
            f"rank {self.rank} {what} ({where}): {cause}", RANK0_REPORT_GRACE_SECONDS
        )


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Garbage is collected when the loop says so: all ranks wait for one that does it by itself."""
    gc.collect()
    gc.freeze()  # what is there now stays: never to be looked at again
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def zero_loss(batch: device_batches.Batch, patch: int, norm_pix: bool) -> Tensor:
    """The loss () of predicting zero for every patch of a batch: what a model has to beat."""
    patches = vit.patchify(data.normalize(batch.parts[0][0]), patch)
    return vit.reconstruction_target(patches, norm_pix).square().mean()


def profile_window(
    log: Log, rank: int, device: torch.device, out: str, begin: int, left: int, steps: int
) -> step_profile.Window | None:
    """Of so many `steps` of rank 0; None, with a warning, where too few are `left`."""
    needed, first = step_profile.WARM + steps, begin + step_profile.WARM
    if needed > left:
        log.warn(f"no profile: it needs {needed} steps to go")
        return None
    return step_profile.Window(
        first=first,
        steps=steps,
        rank=rank,
        device=device,
        ranks=[0],
        folder=os.path.join(out, "profile"),
        report=partial(tell_profile, log, first, steps),
    )


def tell_profile(log: Log, first: int, steps: int, found: dict[str, float] | str | None) -> None:
    """What the profiled ranks found, in the log and on the terminal. Collective."""
    every = agreement.gather_to_rank0(found) or []
    ranks = {rank: seconds for rank, seconds in enumerate(every) if isinstance(seconds, dict)}
    for problem in sorted({text for text in every if isinstance(text, str)}):
        log.warn(f"no profile: {problem}")
    if ranks:
        mean = {k: statistics.fmean(r[k] for r in ranks.values()) for k in step_profile.KINDS}
        whole = sum(mean.values())
        log.write(
            "profile",
            first_step=first + 1,
            steps=steps,
            ranks=list(ranks),
            **mean,
            shares={kind: seconds / whole for kind, seconds in mean.items()},
        )
        for line in step_profile.table(ranks, first):
            log.say(line)


def tell_end(
    log: Log,
    end: dict[str, Any],
    inputs: bad_images.BadImageLog,
    io: bool,
    steps: int,
    out: str,
    saved: str | None,
) -> None:
    """The records `io` and `end`; what was read, how it went, where the weights are. Collective."""
    read = inputs.report(end["seconds"], end["data_share"])
    log.write("io", **read)
    for line in bad_images.describe(read["ranks"]) if io and read else []:
        log.say(line)
    if "loss_of_zero" in end:
        log.say(
            f"mean loss of the last {min(10, steps)} steps {end['loss']:.4f}; predicting zero "
            f"gives {end['loss_of_zero']:.4f}"
        )
    log.write("end", **end)
    log.say(
        f"{end['reason']}: {end['steps']} steps in {end['seconds']:.1f} s, median "
        f"{end['images_per_second'] or 0:.1f} img/s, {end['data_share']:.1%} of the time "
        f"waiting for data; log in {os.path.join(out, 'log.jsonl')}"
    )
    if saved:
        log.say(saved)
    if "TORCHELASTIC_RUN_ID" in os.environ and end["reason"] == "signal":
        log.say(TORCHRUN_NOTE)


def mark_done(out: str, done: bool) -> None:
    """Make OUT/done, or remove a shorter run's; ValueError on all ranks if not. Collective."""
    path = Path(out, "done")

    def change() -> None:
        try:
            path.unlink(missing_ok=True)
            if done:
                path.touch()
        except OSError as error:
            raise ValueError(
                f"{path} cannot be {'written' if done else 'removed'} ({error}): move "
                "it away, or make its folder writable"
            ) from None

    agreement.run_on_rank0(change)


# ---------------------------------------------------------------------------------------------
# main


def main(argv: Sequence[str] | None = None, received: Sequence[int] = ()) -> int:
    """One run; returns the exit status: 0 done or stopped by a signal, 1 failed, 2 refused.

    `received` grows by the numbers of the signals that ask for a stop.
    """
    joined: list[Crew] = []
    try:
        return run(argv, received, joined.append)
    except RuntimeError as error:
        for crew in joined:
            crew.abandon(error)
        raise


def run(argv: Sequence[str] | None, received: Sequence[int], joined: Callable[[Crew], None]) -> int:
    """As `main`, but errors of the ranks that have `joined` go up."""
    args = parse_args(argv)
    config = vit.MODELS[args.model]

    # ranks and device, and all that can be refused before any rank waits for another
    try:
        pretend = partial(dry_run.fake_ranks, args.world_size, os.environ)
        ranks = pretend() if args.dry_run else mesh.read_ranks(os.environ)
        device = dry_run.CPU if args.dry_run else mesh.pick_device(args.device, ranks)
        world = ranks.world_size
        if world == 1:  # several look for it together, once they have met
            image_source.check_folder(args.data)
    except (ValueError, RuntimeError) as error:
        return usage_error(str(error), local=True)
    try:
        group, shape, local_batch, global_batch = sizes(args, world, ranks.local_world_size)
        patches = check_masking(config, args.img_size, args.mask_ratio)
    except ValueError as error:
        return usage_error(str(error))

    # what is known now; the model, whenever it is asked for
    lr, dtype = args.blr * global_batch / 256, DTYPES[args.precision]
    flags = vars(args) | {
        "group": group,
        "batch": local_batch,
        "global_batch": global_batch,
        "world_size": world,
    }
    build = partial(
        spread,
        seed=args.seed,
        device=device,
        mode=args.mode,
        precision=args.precision,
        reduce_dtype=args.reduce_dtype,
        lr=lr,
        weight_decay=args.weight_decay,
        fsdp=args.fsdp or 2,
        prefetch=args.prefetch or "backward_pre",
        forward_prefetch=args.forward_prefetch,
        limit_all_gathers=bool(args.limit_all_gathers),
        cpu_offload=args.cpu_offload,
        bucket_cap_mb=args.bucket_cap_mb,
        ac=args.ac,
        compile_blocks=args.compile,
    )
    if args.dry_run:
        halves = (
            partial(gradients, mask_ratio=args.mask_ratio, dtype=dtype),
            partial(update, step=0, lr=lr, clip=args.clip),
        )
        return dry_run.dry_run(flags, config, ranks, shape, lr, build, *halves)

    # the ranks find each other
    log = Log(None)
    saves: Saves | None = None

    def give_up(text: str) -> None:
        print_error(f"{text}; {saves.where(False)}" if saves else text)
        log.write("end", reason="timeout", problem=text)

    try:
        stalled = os.path.join(args.out, "stalled")
        crew = Crew(ranks, device, timeout=args.timeout, folder=stalled, give_up=give_up)
    except ConnectionError as error:
        print_error(str(error))
        return 1
    except ValueError as error:
        return usage_error(str(error))
    joined(crew)

    # what rank 0 does for all: list the images, open the log
    try:
        files, images, epoch_steps = image_source.share_images(args.data, args.out, global_batch)
        log = open_log(args.out)
        for line in topology.describe_topology(ranks, device, shape, os.environ):
            log.say(line)
        inputs = bad_images.BadImageLog(
            os.path.join(args.out, "bad_images.csv"), images["images"], args.max_bad, log.say
        )
        chosen = completed(flags | images, epoch_steps)
    except ValueError as error:
        return crew.refuse(error)

    # model on no device, then sharded and initialised; optimizer
    steps = chosen["steps"]
    model = build_meta_model(config, args.img_size, args.norm_pix_loss, device)
    params = sum(p.numel() for p in model.parameters())
    finite = agreement.StepGuard(device, args.max_skips)
    train: Callable[..., tuple[Tensor, Tensor]] | None = None
    begin = 0
    found: list[Path] = []
    if args.run == "real":
        try:
            found = candidates(args.resume, args.out, log.say)
        except (ValueError, OSError) as error:
            return crew.refuse(error)
    if args.run != "io":
        grid = mesh.build_mesh(shape, device)
        seed = None if found else args.seed  # a checkpoint has all values
        model, optimizer, scaler = build(model, grid, seed=seed)
        train = partial(
            train_step,
            model,
            optimizer,
            finite,
            scaler,
            mask_ratio=args.mask_ratio,
            clip=args.clip,
            dtype=dtype,
        )

    # resume
    if args.run == "real":
        try:
            load = partial(checkpoint.load, model=model, optimizer=optimizer, group=crew.gloo)
            facts = resume(
                found,
                args.resume == "auto",
                args.out,
                load,
                scaler,
                chosen,
                args.allow_changes,
                log.say,
            )
        except (ValueError, OSError) as error:
            return crew.refuse(error)
        except RuntimeError as error:
            crew.abandon(error)
        begin = facts["step"]
        finite.consecutive_bad_steps.fill_(facts.get("in_a_row", 0))
        saver = checkpoint.Saver(
            args.out, model, optimizer, keep=args.keep, group=crew.gloo, background=args.async_save
        )
        saves = Saves(saver, log, chosen, scaler, begin)
        try:
            if begin < steps:
                mark_done(args.out, False)
            if begin == 0:
                start_over(log, args.out)
        except ValueError as error:
            return crew.refuse(OSError(str(error)))

    # data: the first batch is fetched before the clock starts
    workers = min(6, mesh.cpu_cores(ranks) - 1) if args.workers is None else args.workers
    source: data.Files | None = files
    if files and args.stage_dir and args.run != "syn":
        from storage import staging

        wanted = partial(
            staging.wanted_on_node,
            chosen["images"],
            args.seed,
            global_batch,
            local_batch,
            world,
            steps=range(begin, steps),
        )
        try:
            source = staging.stage(files, args.stage_dir, ranks, log.say, wanted)
        except ValueError as error:
            return crew.refuse(error)
    loader = data.build_loader(
        source,
        img_size=args.img_size,
        patches=patches,
        seed=args.seed,
        global_batch=global_batch,
        local_batch=local_batch,
        steps=range(begin, begin + 1 if args.run == "syn" else steps),
        rank=ranks.rank,
        world_size=world,
        workers=workers,
        pin_memory=device.type == "cuda",
        exact=args.exact_decode,
    )
    batches = device_batches.device_batches(loader, args.accum, device)
    first = list(islice(batches, 1))  # none where nothing is left to do
    batches = repeat(first[0]) if args.run == "syn" else chain(first, batches)

    # what the clock and the counter see of the steps
    sent: list[Collective] = []
    if train and ranks.rank == 0:  # the third step of this process: by then DDP's buckets are final
        train = counted_once(train, grid, sent, begin + 2)
    if train and args.profile:
        window = profile_window(
            log, ranks.rank, device, args.out, begin, steps - begin, args.profile
        )
        if window:
            train, batches = window.train(train), window.batches(batches, begin)

    # what this run is
    plan = planned(config, chosen, log.warn) if ranks.rank == 0 else None
    start = start_record(
        chosen,
        config,
        ranks,
        device,
        shape,
        plan,
        params=params,
        lr=lr,
        epoch_steps=epoch_steps,
        begin=begin,
        workers=workers,
    )
    log.write("start", **start)
    for line in describe(start):
        log.say(line)

    # loop
    job = Job(
        device,
        world,
        range(begin, steps),
        args.log_every,
        global_batch,
        epoch_steps * global_batch,
        start["flops_per_image"],
        start["hardware_flops_per_image"],
        start["peak_flops_per_rank"],
    )
    lr_of = partial(learning_rate, steps=steps, warmup=chosen["warmup_steps"], peak=lr)
    name_of = files.path if files else "synthetic image {}".format
    compiled = shard.compile_seconds() if args.compile else None  # by others in this process
    with garbage_kept():
        end = loop(
            job,
            batches,
            log,
            train,
            finite,
            lr_of,
            saves,
            lambda: bool(received),
            crew.watch.moved,
            name_of,
            inputs,
        )
    crew.watch.moved("ending")

    # summary
    end["compile_seconds"] = None if compiled is None else shard.compile_seconds() - compiled
    end["payload_bytes"] = payload(sent, shape)
    if "loss" in end and first:
        zero = zero_loss(first[0], config.patch, args.norm_pix_loss)
        end["loss_of_zero"] = agreement.mean_over_ranks(zero)
    kept = None
    if saves:
        finished = end["reason"] == "done"
        try:
            if finished:
                mark_done(args.out, True)
        except ValueError as error:
            end["problem"] = str(error)
        kept = saves.where(finished)
    tell_end(log, end, inputs, args.run == "io", steps, args.out, kept)
    crew.leave(0)
    if end["problem"] and ranks.rank == 0:
        advice = {"nan": ": lower --blr, add --clip 1, or look at the images of that step"}
        print_error(end["problem"] + advice.get(end["reason"], ""))
    return 1 if end["problem"] else 0


if __name__ == "__main__":
    del __file__  # by which multiprocessing would import all of this again in every loader worker
    raise SystemExit(main(received=RECEIVED))
