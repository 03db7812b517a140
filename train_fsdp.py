"""Pretrain a ViT-MAE with PyTorch FSDP, in any sharding mode, on any number of ranks.

    python train_fsdp.py --model tiny --img-size 96 --data examples/tiles/train     # one process
    torchrun --nproc-per-node 8 -- train_fsdp.py --model base --mode full_shard --data DIR
    srun python train_fsdp.py --model 3b --mode hybrid --group 2 --data DIR         # Slurm

Flags -> ranks -> mesh -> model -> shard -> data -> loop. Read vit.py, data.py, mesh.py and shard.py
beside it.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: a signal meanwhile must not kill the process. Slurm
    # announces the end of the allocation by one; the loop saves and leaves.
    import signal

    RECEIVED: list[int] = []

    def _note(number: int, frame: object) -> None:
        RECEIVED.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C does not ask

    for _number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(_number, _note)

import gc
import json
import math
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import agree
import checkpoint
import data
import dryrun
import intake
import kernels
import mesh
import prepare
import profiling
import shard
import vit
from flags import (
    DTYPES,
    LAST_WORD_SECONDS,
    PATIENCE,
    RESULT,
    batch_sizes,
    complain,
    parse_args,
    refuse,
)
from log import Log, describe, device_memory, open_log, versions

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
    finite: agree.FiniteCheck,
    scaler: torch.amp.GradScaler | None,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    step: int,
    lr: float,
    mask_ratio: float,
    clip: float | None,
    dtype: torch.dtype,
    stop: bool = False,
    news: bool = False,
) -> tuple[Tensor, Tensor]:
    """One optimizer step over the accumulation steps `batches`, each (images, noise) on the device.

    Returns this rank's mean loss () and the gradient norm over all parameters (), on the device:
    nothing here waits for it.
    """
    total = gradients(model, scaler, batches, mask_ratio=mask_ratio, dtype=dtype)
    norm = update(model, optimizer, finite, scaler, total, step=step, lr=lr, clip=clip, stop=stop,
                  news=news)  # fmt: skip
    return total, norm


def gradients(
    model: nn.Module, scaler: torch.amp.GradScaler | None,
    batches: Sequence[tuple[Tensor, Tensor]], *, mask_ratio: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
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
    model: nn.Module, optimizer: torch.optim.Optimizer, finite: agree.FiniteCheck,
    scaler: torch.amp.GradScaler | None, total: Tensor, *, step: int, lr: float,
    clip: float | None, stop: bool = False, news: bool = False,
) -> Tensor:  # fmt: skip
    """Apply the gradients, unless the ranks find them bad; returns their norm ()."""
    if scaler:
        scaler.unscale_(optimizer)
    norm = shard.clip_grad_norm(model, clip or math.inf)
    skip = finite.update(step, total, norm, scaler is not None, stop, news)
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
    save_every: int | None
    global_batch: int
    epoch_samples: int  # images of an epoch, whole global batches
    flops_per_image: int
    hardware_flops_per_image: int | None  # with what is recomputed; None where nothing is
    peak_flops: float | None


def loop(
    job: Job,
    batches: Iterator[intake.Batch],
    log: Log,
    train: Callable[..., tuple[Tensor, Tensor]] | None,
    finite: agree.FiniteCheck,
    lr_of: Callable[[int], float],
    save: Callable[[int, int, bool], str | None] | None,
    told_to_stop: Callable[[], bool],
    moved: Callable[[str, int], None],
    name_of: Callable[[int], str],
    inputs: intake.Intake,
) -> dict[str, Any]:
    """Run the steps; `train` None reads only, `save` None keeps nothing. Returns the end's record.

    `save(steps done, bad steps in a row, wait)` writes a checkpoint, or returns why the run cannot
    go on. `moved` hears what is done next, `name_of` gives the path of an image.
    """
    rates: list[float] = []
    last_losses: deque[Tensor] = deque(maxlen=10)
    last_batches: deque[intake.Batch] = deque(maxlen=2)
    started = mark = time.perf_counter()
    waited = all_waited = 0.0
    loss = norm = problem = None
    done = since = unread = job.steps.start
    reason, stop, news, skipped, in_a_row = "done", False, False, 0, 0
    for step in job.steps:
        last = step + 1 == job.steps.stop
        log_now = (step + 1) % job.log_every == 0 or last
        save_now = job.save_every is not None and ((step + 1) % job.save_every == 0 or last)
        lr = lr_of(step)

        # fetch
        moved("reading data", step)
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        last_batches.append(batch)
        bad = [(name_of(index), why) for index, why in batch.bad]
        inputs.met(step, bad, batch.cost, len(batch.image_ids))

        # step
        moved("training", step)
        if train:
            loss, norm = train(batch.parts, step=step, lr=lr, stop=told_to_stop(), news=inputs.news)
            last_losses.append(loss)
        else:
            nothing = torch.zeros((), device=job.device)
            finite.update(step, nothing, nothing, stop=told_to_stop(), news=inputs.news)

        # skip, stop: every rank reads the same; not of this step yet unless it is waited for anyway
        while unread <= (step if log_now or save_now or stop else step - 1):
            verdict = finite.read(unread)
            stop, news, in_a_row = stop or verdict.stop, news or verdict.news, verdict.in_a_row
            if in_a_row:
                skipped += 1
                ids = last_batches[unread - step - 1].image_ids  # of this step or the one before
                mine = ids if verdict.mine or not verdict.loss else []
                problem = log.skip(unread, verdict, [name_of(i) for i in mine])
            if in_a_row > finite.max_skips:
                break
            unread += 1
        if in_a_row > finite.max_skips:
            done, reason = unread, "nan"
            break
        done, problem = step + 1, None

        # bad images: told when the host has waited for the device anyway
        too_many = None
        if news and unread == step + 1:
            news, too_many = False, inputs.share()
            stop = stop or bool(too_many)

        # log
        if log_now:
            mean_loss = agree.mean_over_ranks(loss) if loss is not None else None
            if job.device.type == "cuda":
                torch.cuda.synchronize(job.device)  # --run io has read nothing yet
            seconds = (time.perf_counter() - mark) / (done - since)
            rates.append(job.global_batch / seconds)
            flops = job.flops_per_image if train else None
            log.step(
                step, job.steps.stop, loss=mean_loss, norm=norm, lr=lr,
                epoch=step * job.global_batch // job.epoch_samples, seconds=seconds,
                waited=waited / (done - since), global_batch=job.global_batch,
                world_size=job.world_size, flops_per_image=flops, peak_flops=job.peak_flops,
                hardware_flops_per_image=job.hardware_flops_per_image, device=job.device,
                bad_images=inputs.count,
            )  # fmt: skip
            all_waited, waited, since, mark = all_waited + waited, 0.0, done, time.perf_counter()
            gc.collect()  # not at a moment of Python's choosing, on one rank while others wait

        # save
        if save and (save_now or stop):
            moved("saving", step)
            asked = time.perf_counter()
            problem = save(done, in_a_row, stop or last)
            seconds = time.perf_counter() - asked
            mark += seconds  # not the step's time
            log.write("save", step=done, seconds=seconds)
            if problem:
                reason = "save"
                break
        if too_many:
            reason, problem = "bad", too_many
            break
        if stop and not last:
            reason = "signal"
            break

    seconds = time.perf_counter() - started
    inputs.share()  # what was met since
    record: dict[str, Any] = {"reason": reason, "problem": problem, "steps": done}
    rate = statistics.median(rates[1:] or rates) if rates else None
    record |= {"skipped": skipped, "bad_images": inputs.count, "images_per_second": rate}
    record["step_seconds"] = job.global_batch / rate if rate else None
    record |= device_memory(job.device)
    record |= {"seconds": seconds, "data_share": (all_waited + waited) / seconds}
    if reason == "done" and last_losses:
        record["loss"] = agree.mean_over_ranks(torch.stack(list(last_losses)).nanmean())
    return record


# ---------------------------------------------------------------------------------------------
# What a real run and a dry run have in common


def completed(flags: dict[str, Any], images: int, epoch_steps: int) -> dict[str, Any]:
    """The flags of a run with the numbers that follow from its data."""
    steps = flags["steps"] or (flags["epochs"] or 0) * epoch_steps or 100
    warmup = steps // 20 if flags["warmup_steps"] is None else flags["warmup_steps"]
    return flags | {"steps": steps, "warmup_steps": warmup, "images": images}


def blank_model(
    config: vit.ViTConfig, img_size: int, norm_pix_loss: bool, device: torch.device
) -> nn.Module:
    """The model, for a device but not on it yet: shapes alone."""
    cpu = device.type == "cpu"  # the fast products and attention of a GPU are PyTorch's own
    own = vit.Kernels(kernels.Linear, kernels.attention) if cpu else vit.PYTORCH
    with torch.device("meta"):
        return vit.ViTMAE(config, img_size, norm_pix_loss, own)


def spread(
    model: nn.Module, grid: DeviceMesh, *, seed: int | None, device: torch.device, mode: str,
    precision: str, reduce_dtype: str, lr: float, weight_decay: float, **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler | None]:  # fmt: skip
    """A blank model -> sharded and initialised (unless `seed` is None); its optimizer and scaler.

    `options` are shard.apply's.
    """
    decay, config = shard.weight_decay_names(model), cast(vit.ViTMAE, model).config
    values = None if seed is None else partial(vit.initial_value, config, seed=seed)
    model = shard.apply(
        model, mode, grid, block_classes={vit.Block}, initial_value=values, device=device,
        param_dtype=DTYPES[precision], reduce_dtype=DTYPES[reduce_dtype], **options,
    )  # fmt: skip
    optimizer = shard.build_optimizer(model, mode, decay, lr=lr, weight_decay=weight_decay)
    return model, optimizer, shard.build_scaler(model, device, DTYPES[precision])


def attention_kernels(
    config: vit.ViTConfig, chosen: dict[str, Any], device: torch.device
) -> dict[str, str]:
    """What computes attention in the encoder and in the decoder, which sees all patches."""
    c, dtype = config, DTYPES[chosen["precision"]]
    patches = vit.patch_count(c, chosen["img_size"])
    kept = vit.kept_patches(patches, chosen["mask_ratio"])
    return {
        part: kernels.attention_kernel(heads, width // heads, tokens + 1, dtype, device)
        for part, heads, width, tokens in (
            ("encoder", c.heads, c.width, kept),
            ("decoder", c.decoder_heads, c.decoder_width, patches),
        )
    }


def start_record(
    chosen: dict[str, Any], config: vit.ViTConfig, ranks: mesh.Ranks, device: torch.device,
    shape: tuple[int, int], *, params: int, lr: float, epoch_steps: int, begin: int, workers: int,
) -> dict[str, Any]:  # fmt: skip
    """What this run is: its flags (`chosen`, completed) and what follows from them."""
    peak, peak_source = mesh.peak_flops(device)
    plan = dryrun.planned(config, chosen) or {}
    counted = config, chosen["img_size"], chosen["mask_ratio"]
    keys = ("memory_gib", "payload_bytes", "traffic_bytes_per_rank", "step_seconds_lower_bound")
    return chosen | {
        "planned": {key: plan[key] for key in keys} if plan else None,  # for Frontier's nodes
        "workers": workers, "lr": lr, "begin": begin,
        "epoch_steps": epoch_steps, "launcher": ranks.launcher,
        "local_world_size": ranks.local_world_size, "device": device.type,
        "mesh": {"replicate": shape[0], "shard": shape[1], "tp": 1}, "params": params,
        "flops_per_image": vit.flops_per_image(*counted),
        "hardware_flops_per_image":
            vit.flops_per_image(*counted, recompute=True) if chosen["ac"] == "full" else None,
        "peak_flops_per_rank": peak, "peak_flops_source": peak_source,
        "sdpa": attention_kernels(config, chosen, device),
        "host": platform.node(), "versions": versions(),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Beside the loop


def zero_loss(batch: intake.Batch, patch: int, norm_pix: bool) -> Tensor:
    """The loss () of predicting zero for every patch of a batch: what a model has to beat."""
    patches = vit.patchify(data.normalize(batch.parts[0][0]), patch)
    return vit.reconstruction_target(patches, norm_pix).square().mean()


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


def counted_once(
    train: Callable[..., tuple[Tensor, Tensor]], grid: Any, found: list[dryrun.Collective], at: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`train`, whose collectives are counted in step `at`, to stand beside the plan's."""

    def step_and_count(batches: Any, *, step: int, **rest: Any) -> tuple[Tensor, Tensor]:
        if step != at:
            return train(batches, step=step, **rest)
        try:
            context = dryrun.counting(grid, found)
        except dryrun.Unsupported:  # by this version of PyTorch
            context = nullcontext()
        with context:
            return train(batches, step=step, **rest)

    return step_and_count


def tell_profile(log: Log, first: int, steps: int, found: dict[str, float] | None) -> None:
    """What the profiled ranks found, in the log and on the terminal. Collective."""
    every = agree.gathered(found) or []
    ranks = {rank: seconds for rank, seconds in enumerate(every) if seconds}
    if ranks:
        mean = {k: statistics.fmean(r[k] for r in ranks.values()) for k in profiling.KINDS}
        whole = sum(mean.values())
        log.write("profile", first_step=first + 1, steps=steps, ranks=list(ranks), **mean,
                  shares={kind: seconds / whole for kind, seconds in mean.items()})  # fmt: skip
        for line in profiling.table(ranks, first):
            log.say(line)


def lost_a_rank(error: RuntimeError) -> bool:
    """Whether a collective failed, which is what the others see of a rank that died."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


# ---------------------------------------------------------------------------------------------
# A dry run


def dry_run(
    flags: dict[str, Any], config: vit.ViTConfig, ranks: mesh.Ranks, shape: tuple[int, int],
    lr: float, build: Callable[..., Any],
) -> int:  # fmt: skip
    """The same command up to one step without numbers; prints a plan, trains and writes nothing."""
    try:
        with dryrun.pretended_world(ranks.world_size):
            for line in rehearse(flags, config, ranks, shape, lr, build):
                print(line, flush=True)
    except (ValueError, OSError, dryrun.Unsupported) as error:
        complain(str(error))
        return 1 if isinstance(error, dryrun.Unsupported) else 2
    return 0


def rehearse(
    flags: dict[str, Any], config: vit.ViTConfig, ranks: mesh.Ranks, shape: tuple[int, int],
    lr: float, build: Callable[..., Any],
) -> Iterator[str]:  # fmt: skip
    """Lines that tell what a real run would be: in the order of `main`, and with its errors."""
    yield f"dry run: rank 0 of {ranks.world_size}, on nodes of {ranks.local_world_size} ranks"
    said: list[str] = []
    scan = partial(intake.find_images, flags["data"], None, flags["global_batch"], said.append)
    files, images, epoch_steps = agree.together(scan)
    agree.together(partial(dryrun.check_folder, flags["out"]))
    chosen = completed(flags | {"dry_run": False}, images, epoch_steps)
    begin = 0
    if flags["run"] == "real":
        begin = resume(flags["resume"], flags["out"], lambda path: None, None, chosen,
                       flags["allow_changes"], said.append)["step"]  # fmt: skip
    yield from said

    gpu = torch.device("cuda" if flags["device"] != "cpu" else "cpu")  # of the job, not of here
    blank = partial(blank_model, config, flags["img_size"], flags["norm_pix_loss"], gpu)
    params = sum(p.numel() for p in blank().parameters())
    start = start_record(chosen, config, ranks, dryrun.CPU, shape, params=params, lr=lr,
                         epoch_steps=epoch_steps, begin=begin, workers=0)  # fmt: skip
    elsewhere = {} if flags["device"] == "cpu" else {"device": "a GPU each", "sdpa": None}
    yield from describe(start | elsewhere)
    patches = vit.patch_count(config, flags["img_size"])
    loader = data.build_loader(
        files, img_size=flags["img_size"], patches=patches, seed=flags["seed"],
        global_batch=flags["global_batch"], local_batch=flags["batch"],
        steps=range(begin, chosen["steps"]), world_size=ranks.world_size,
        workers=flags["workers"] or 0,
    )  # fmt: skip
    yield from dryrun.first_samples(loader, flags["workers"])

    why_not, simulation = dryrun.unsimulated(flags["mode"], flags["fsdp"], flags["run"]), None
    if why_not is None:
        simulation = fake_step(flags, blank, build, mesh.build_mesh(shape, dryrun.CPU), patches, lr)
    yield why_not or "one step of rank 0, simulated" + ", without --compile" * flags["compile"]
    plan = dryrun.planned(config, chosen)
    yield from dryrun.report(simulation, plan, shape, flags["cpu_offload"])


def fake_step(
    flags: dict[str, Any], blank: Callable[[], nn.Module], build: Callable[..., Any],
    grid: DeviceMesh, patches: int, lr: float,
) -> dryrun.Simulation:  # fmt: skip
    """`train_step` in its two parts, on tensors without memory."""
    batch, side = flags["batch"], flags["img_size"]

    def finish(model: nn.Module, optimizer: Any, scaler: Any, total: Tensor) -> Tensor:
        finite = agree.FiniteCheck(dryrun.CPU)
        return update(model, optimizer, finite, scaler, total, step=0, lr=lr, clip=flags["clip"])

    return dryrun.simulate(
        grid, lambda: build(blank(), grid, seed=None, compile_blocks=False),
        partial(gradients, mask_ratio=flags["mask_ratio"], dtype=DTYPES[flags["precision"]]),
        finish, [((batch, 3, side, side), torch.uint8), ((batch, patches), torch.float32)],
        flags["accum"],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# main


def main(argv: Sequence[str] | None = None, received: Sequence[int] = ()) -> int:
    """One run; returns the exit status: 0 done or stopped by a signal, 1 failed, 2 refused.

    `received` grows by the numbers of the signals that ask for a stop.
    """
    args = parse_args(argv)
    config, strategy = vit.MODELS[args.model], shard.STRATEGIES[args.mode]

    # ranks and device, and all that can be refused before any rank waits for another
    try:
        node = int(os.environ.get("LOCAL_WORLD_SIZE", 0))  # so launch_frontier.sh tells
        pretend = partial(dryrun.pretended_ranks, args.world_size, node)
        ranks = pretend() if args.dry_run else mesh.read_ranks(os.environ)
        device = dryrun.CPU if args.dry_run else mesh.pick_device(args.device, ranks)
        world = ranks.world_size
        if args.data != "synthetic" and not os.path.isdir(args.data):
            raise ValueError(f"there is no folder {args.data}: give --data the folder of images")
    except (ValueError, RuntimeError) as error:
        return refuse(str(error), local=True)
    try:
        group = (args.group or ranks.local_world_size) if strategy.group == "group" else None
        mesh.check_group(world, group or 1)
        shape = shard.mesh_shape(args.mode, world, group)
        local_batch, global_batch = batch_sizes(world, args.accum, args.batch, args.global_batch)
        patches = vit.patch_count(config, args.img_size)
        if vit.kept_patches(patches, args.mask_ratio) == patches:
            raise ValueError(f"--mask-ratio {args.mask_ratio} removes no patch: nothing to learn")
    except ValueError as error:
        return refuse(str(error))

    # what is known now; the model, whenever it is asked for
    lr, dtype = args.blr * global_batch / 256, DTYPES[args.precision]
    flags = vars(args) | {
        "group": group, "batch": local_batch, "global_batch": global_batch, "world_size": world,
    }  # fmt: skip
    build = partial(
        spread, seed=args.seed, device=device, mode=args.mode, precision=args.precision,
        reduce_dtype=args.reduce_dtype, lr=lr, weight_decay=args.weight_decay, fsdp=args.fsdp or 2,
        prefetch=args.prefetch or "backward_pre", forward_prefetch=args.forward_prefetch,
        limit_all_gathers=bool(args.limit_all_gathers), cpu_offload=args.cpu_offload,
        bucket_cap_mb=args.bucket_cap_mb, ac=args.ac, compile_blocks=args.compile,
    )  # fmt: skip
    if args.dry_run:
        return dry_run(flags, config, ranks, shape, lr, build)

    # the ranks find each other
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that the watchdog may dump
    log = Log(None)

    def give_up(text: str) -> None:
        complain(text)
        log.write("end", reason="timeout", problem=text)

    def no_answer() -> None:
        where = ":".join(ranks.init[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        complain(f"rank {ranks.rank} of {world} has no answer from {where}: rank 0 stands still, "
                 "or the port is another program's")  # fmt: skip

    with agree.at_most(PATIENCE * args.timeout + 10, no_answer):
        try:
            mesh.init_ranks(ranks, device, timeout_minutes=PATIENCE * args.timeout / 60)
        except (RuntimeError, OSError) as error:
            complain(f"rank {ranks.rank} of {world} found no others: {str(error).splitlines()[0]}")
            return 1
        watch = agree.Watchdog(
            ranks.rank, world, ranks.init, seconds=args.timeout, patience=PATIENCE,
            folder=os.path.join(args.out, "stalled"), give_up=give_up,
        )  # fmt: skip
        gloo: Any = dist.new_group(backend="gloo")  # for checkpoints: nothing is gathered on a GPU
        dist.barrier(gloo)  # connects the ranks now: later, one that dies meanwhile is waited for

    def leave(status: int) -> int:
        watch.stop()
        dist.barrier(gloo)  # rank 0 keeps the store: it goes when nobody needs it any more
        dist.destroy_process_group()
        return status

    def abandon(error: RuntimeError) -> NoReturn:
        if not isinstance(error, intake.NoData) and not lost_a_rank(error):
            raise error
        what = "has no data" if isinstance(error, intake.NoData) else "lost contact with another"
        lines = str(error).strip().splitlines()
        cause = lines[-1 if "Traceback" in str(error) else 0]  # of a worker, its own error
        watch.abandon(f"rank {ranks.rank} {what} ({watch.where()}): {cause}", LAST_WORD_SECONDS)

    # what rank 0 does for all: list the images, open the log
    try:
        files, images, epoch_steps = intake.share_images(args.data, args.out, global_batch)
        log = open_log(args.out, ranks.rank)
        for line in mesh.topology(ranks, device, shape, os.environ):
            log.say(line)
        inputs = intake.Intake(os.path.join(args.out, "bad_images.csv"), images, args.max_bad,
                               log.say)  # fmt: skip
    except ValueError as error:
        if ranks.rank == 0:
            complain(str(error))
        return leave(2)

    # model on no device, then sharded and initialised; optimizer
    chosen = completed(flags, images, epoch_steps)
    steps = chosen["steps"]
    model = blank_model(config, args.img_size, args.norm_pix_loss, device)
    params = sum(p.numel() for p in model.parameters())
    finite = agree.FiniteCheck(device, args.max_skips)
    train: Callable[..., tuple[Tensor, Tensor]] | None = None
    save, begin, saver = None, 0, None
    if args.run != "io":
        grid = mesh.build_mesh(shape, device)
        model, optimizer, scaler = build(model, grid)
        train = partial(train_step, model, optimizer, finite, scaler,
                        mask_ratio=args.mask_ratio, clip=args.clip, dtype=dtype)  # fmt: skip
    if args.run == "real":
        try:
            load = partial(checkpoint.load, model=model, optimizer=optimizer, group=gloo)
            facts = resume(args.resume, args.out, load, scaler, chosen, args.allow_changes, log.say)
        except (ValueError, RuntimeError) as error:
            if ranks.rank == 0:
                complain(str(error))
            return leave(2 if isinstance(error, ValueError) else 1)
        begin = facts["step"]
        finite.row.fill_(facts.get("in_a_row", 0))
        if begin < steps and ranks.rank == 0:
            Path(args.out, "done").unlink(missing_ok=True)  # of a run that was shorter
        saver = checkpoint.Saver(args.out, model, optimizer, keep=args.keep, group=gloo,
                                 background=args.async_save)  # fmt: skip
        save = partial(save_step, saver, log, chosen, scaler)

    sent: list[dryrun.Collective] = []
    if train and ranks.rank == 0:  # the third step of this process: by then DDP's buckets are final
        train = counted_once(train, grid, sent, begin + 2)

    # data: the first batch is fetched before the clock starts
    workers = min(6, mesh.cpu_cores(ranks) - 1) if args.workers is None else args.workers
    source: data.Files | None = files
    if files and args.stage_dir and args.run != "syn":
        wanted = partial(prepare.wanted_on_node, images, args.seed, global_batch, local_batch,
                         world, steps=range(begin, steps))  # fmt: skip
        try:
            source = intake.stage(files, args.stage_dir, ranks, log.say, wanted)
        except ValueError as error:
            if ranks.rank == 0:
                complain(str(error))
            return leave(2)
    loader = data.build_loader(
        source, img_size=args.img_size, patches=patches, seed=args.seed, global_batch=global_batch,
        local_batch=local_batch, steps=range(begin, begin + 1 if args.run == "syn" else steps),
        rank=ranks.rank, world_size=world, workers=workers, pin_memory=device.type == "cuda",
        exact=args.exact_decode,
    )  # fmt: skip
    batches = intake.device_batches(loader, args.accum, device)
    try:
        first = list(islice(batches, 1))  # none where nothing is left to do
    except intake.NoData as error:
        abandon(error)
    batches = repeat(first[0]) if args.run == "syn" else chain(first, batches)

    if args.profile and train:
        if begin + profiling.WARM + args.profile > steps:
            log.warn(f"no profile: it needs {profiling.WARM + args.profile} steps to go")
        else:
            window = profiling.Window(
                first=begin + profiling.WARM, steps=args.profile, rank=ranks.rank, device=device,
                ranks=args.profile_ranks or [0], folder=os.path.join(args.out, "profile"),
                report=partial(tell_profile, log, begin + profiling.WARM, args.profile),
            )  # fmt: skip
            train, batches = window.train(train), window.batches(batches, begin)

    # what this run is
    start = start_record(chosen, config, ranks, device, shape, params=params, lr=lr,
                         epoch_steps=epoch_steps, begin=begin, workers=workers)  # fmt: skip
    log.write("start", **start)
    for line in describe(start):
        log.say(line)

    # loop
    job = Job(device, world, range(begin, steps), args.log_every, args.save_every, global_batch,
              epoch_steps * global_batch, start["flops_per_image"],
              start["hardware_flops_per_image"], start["peak_flops_per_rank"])  # fmt: skip
    lr_of = partial(learning_rate, steps=steps, warmup=chosen["warmup_steps"], peak=lr)
    name_of = files.path if files else "synthetic image {}".format
    compiled = shard.compile_seconds() if args.compile else None  # by others in this process
    gc.collect()
    gc.freeze()  # what is there now stays: never to be looked at again
    gc.disable()
    try:
        end = loop(job, batches, log, train, finite, lr_of, save, lambda: bool(received),
                   watch.moved, name_of, inputs)  # fmt: skip
    except RuntimeError as error:
        abandon(error)
    finally:
        gc.enable()
        gc.unfreeze()
    watch.moved("ending")
    for problem in saver.finish() if saver else []:
        log.warn(f"{problem}; the older checkpoints are kept")

    # summary
    read = inputs.report(end["seconds"], end["data_share"])
    log.write("io", **read)
    for line in intake.describe(read["ranks"]) if args.run == "io" and read else []:
        log.say(line)
    end["compile_seconds"] = None if compiled is None else shard.compile_seconds() - compiled
    end["payload_bytes"] = dryrun.payload(sent, shape)
    if "loss" in end and first:
        zero = zero_loss(first[0], config.patch, args.norm_pix_loss)
        end["loss_of_zero"] = agree.mean_over_ranks(zero)
        log.say(f"mean loss of the last {min(10, steps)} steps {end['loss']:.4f}; predicting zero "
                f"gives {end['loss_of_zero']:.4f}")  # fmt: skip
    log.write("end", **end)
    if end["reason"] == "done" and args.run == "real" and ranks.rank == 0:
        Path(args.out, "done").touch()
    log.say(f"{end['reason']}: {end['steps']} steps in {end['seconds']:.1f} s, median "
            f"{end['images_per_second'] or 0:.1f} img/s, {end['data_share']:.1%} of the time "
            f"waiting for data; log in {os.path.join(args.out, 'log.jsonl')}")  # fmt: skip
    leave(0)
    if end["problem"] and ranks.rank == 0:
        advice = {"nan": ": lower --blr, add --clip 1, or look at the images of that step"}
        complain(end["problem"] + advice.get(end["reason"], ""))
    return 1 if end["problem"] else 0


if __name__ == "__main__":
    raise SystemExit(main(received=RECEIVED))
