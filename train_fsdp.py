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
    for _number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(_number, lambda number, frame: RECEIVED.append(number))

import argparse
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, islice, repeat
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn

import checkpoint
import data
import mesh
import shard
import vit

# Flags (and what follows from them) that decide the result: a resumed run must not change them.
RESULT = (
    "model", "img_size", "mask_ratio", "norm_pix_loss", "precision", "reduce_dtype", "images",
    "global_batch", "blr", "weight_decay", "warmup_steps", "steps", "clip", "seed",
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# MAE's own recipe ends at 1.5e-4 x 4096 / 256 = 2.4e-3; above twice that AdamW tends to diverge.
LARGE_LR = 4.8e-3
LAST_WORD_SECONDS = 5.0  # that a rank leaves to rank 0 for its error

# ---------------------------------------------------------------------------------------------
# Flags


class Parser(argparse.ArgumentParser):
    """Errors are one sentence, printed by rank 0 alone; exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(refuse(message))


def complain(message: str) -> None:
    """Print an error of the whole run."""
    print(f"train_fsdp.py: error: {message}", file=sys.stderr, flush=True)


def refuse(message: str, local: bool = False) -> int:
    """Say why a command is refused before any rank waits for another; returns exit status 2.

    Rank 0 speaks, as the environment names it, nothing else being known yet. The others wait a
    little: a rank that leaves first makes its launcher end rank 0 before it has spoken. Who is
    still there then speaks too where the trouble may be its own (`local`): variables, GPU, disk.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if rank == "0":
        complain(message)
    else:
        time.sleep(LAST_WORD_SECONDS)
        if local:
            complain(f"{message} (rank {rank})")
    return 2


def positive(text: str) -> int:
    """An argparse type: a whole number above zero."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def not_negative(text: str) -> float:
    """An argparse type: a finite number, zero or more."""
    with suppress(ValueError):
        if math.isfinite(float(text)) and float(text) >= 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of zero or more")


def build_parser() -> Parser:
    """The flags, in the order of the data flow. * changes the result, others speed and memory."""
    parser = Parser(description="Pretrain a ViT-MAE. * marks flags that change the result of the "
                    "training; the others change its speed and memory only.")  # fmt: skip
    switch = argparse.BooleanOptionalAction

    add = parser.add_argument_group("model").add_argument
    add("--model", choices=vit.MODELS, default="base", help="* size (default base)")
    add("--img-size", type=positive, default=224, metavar="PIXELS", help="* side (default 224)")
    add("--mask-ratio", type=not_negative, default=0.75, help="* share removed (default 0.75)")
    add("--norm-pix-loss", action=switch, default=True,
        help="* predict patches normalised by their own mean and deviation (default)")  # fmt: skip

    add = parser.add_argument_group("sharding").add_argument
    add("--mode", choices=shard.STRATEGIES, default="hybrid", help="strategy (default hybrid)")
    add("--group", type=positive, metavar="RANKS",
        help="hybrid modes: ranks that share one copy (default: the ranks of a node)")  # fmt: skip
    add("--fsdp", type=int, choices=(1, 2), help="engine: fully_shard 2, or the old 1 (default 2)")
    add("--prefetch", choices=("none", "backward_pre", "backward_post"),
        help="all-gather of the next unit in backward (default backward_pre; post: --fsdp 1 only, "
        "and it prefetches the wrong unit where MAE's decoder meets its encoder)")  # fmt: skip
    add("--forward-prefetch", action="store_true", help="all-gather the next unit in forward")
    add("--limit-all-gathers", action=switch, help="--fsdp 1: bound gathers in flight (default on)")
    add("--cpu-offload", action="store_true", help="parameters, gradients, states in host memory")
    add("--bucket-cap-mb", type=positive, metavar="MIB", help="ddp, zero1: bucket (default 25)")

    add = parser.add_argument_group("memory, speed").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda is ROCm too")
    add("--precision", choices=DTYPES, default="bf16", help="* of the computation (default bf16)")
    add("--reduce-dtype", choices=DTYPES, default="fp32", help="* of gradient sums (default fp32)")
    add("--ac", choices=("none", "selective", "full"), default="none",
        help="activation checkpointing: recompute norms and GELU, or whole blocks")  # fmt: skip
    add("--compile", action="store_true", help="torch.compile every block")

    add = parser.add_argument_group("data").add_argument
    add("--data", metavar="DIR", default="synthetic", help="* images, or `synthetic` (default)")
    add("--run", choices=("real", "syn", "io"), default="real",
        help="real: train (default); syn: the same with one batch kept on the device, compute and "
        "communication only; io: loader and copy only, no model. The rest of the command "
        "may stay as it is")  # fmt: skip
    add("--workers", type=int, metavar="N",
        help="loader processes a rank (default: its CPU cores less one, at most 6)")  # fmt: skip

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch", type=positive, metavar="IMAGES", help="* a rank and step (default 32)")
    add("--global-batch", type=positive, metavar="IMAGES",
        help="* of all ranks and accumulation steps, instead of --batch")  # fmt: skip
    add("--accum", type=positive, default=1, metavar="STEPS", help="* accumulation steps")
    add("--blr", type=not_negative, default=1.5e-4, help="* lr = blr x global batch / 256 (1.5e-4)")
    add("--weight-decay", type=not_negative, default=0.05, help="* of matrices (default 0.05)")
    add("--warmup-steps", type=int, metavar="STEPS", help="* linear (default: 5 %% of the steps)")
    add("--steps", type=positive, help="* optimizer steps (default 100)")
    add("--epochs", type=positive, help="* passes over the data, instead of --steps")
    add("--clip", type=not_negative, metavar="NORM", help="* largest gradient norm (default: none)")
    add("--seed", type=int, default=0, help="* of weights, order, crops, masks (default 0)")

    add = parser.add_argument_group("output").add_argument
    add("--out", metavar="DIR", default="out", help="log.jsonl goes here (default out)")
    add("--log-every", type=positive, default=10, metavar="STEPS", help="(default 10)")
    add("--save-every", type=positive, metavar="STEPS",
        help="a checkpoint (default: only when a signal ends the run)")  # fmt: skip
    add("--keep", type=positive, default=2, metavar="N", help="newest checkpoints kept (default 2)")
    add("--resume", default="auto", metavar="WHAT",
        help="auto: newest good checkpoint in --out, if any (default); none; or PATH")  # fmt: skip
    add("--allow-changes", action="store_true", help="* resume with flags that change the result")
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags with their defaults; a sentence and exit status 2 where they contradict each other."""
    parser = build_parser()
    args = parser.parse_args(argv)
    gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    for sentence in flag_errors(args, "cuda" if gpu else "cpu"):
        parser.error(sentence)
    # What has no meaning in this mode stays None, so that the log does not claim it.
    row = shard.STRATEGIES[args.mode]
    if row.fsdp1 is not None:
        args.fsdp = args.fsdp or 2
    if row.reshard:
        args.prefetch = args.prefetch or "backward_pre"
    if args.fsdp == 1 and args.mode != "no_shard":
        args.limit_all_gathers = args.limit_all_gathers is not False
    return args


def flag_errors(args: argparse.Namespace, device_type: str) -> Iterator[str]:
    """A sentence for each flag, given explicitly, that has no meaning beside the others."""
    mode, ddp = args.mode, args.mode in ("ddp", "zero1")
    row, fsdp1 = shard.STRATEGIES[mode], args.fsdp == 1
    use = "leave it out"
    for wrong, sentence in (
        (args.group and row.group != "group",
         f"--group is for --mode hybrid and hybrid_grad_op, not {mode}: {use}"),
        (args.fsdp and ddp, f"--fsdp chooses between FSDP engines, --mode {mode} is none: {use}"),
        (args.prefetch and not row.reshard,
         f"--prefetch: --mode {mode} gathers nothing in backward: {use}, or use full_shard"),
        (args.prefetch == "backward_post" and not fsdp1,
         "--prefetch backward_post exists in FSDP1 only: add --fsdp 1, or use backward_pre"),
        (args.forward_prefetch and (ddp or mode == "no_shard"),
         f"--forward-prefetch: --mode {mode} gathers no parameters: {use}"),
        (args.limit_all_gathers is not None and (not fsdp1 or mode == "no_shard"),
         f"--limit-all-gathers is for sharded modes of --fsdp 1: {use}, or add --fsdp 1"),
        (args.cpu_offload and ddp, f"--cpu-offload is FSDP's, --mode {mode} has none: {use}"),
        (args.cpu_offload and device_type == "cpu",
         f"--cpu-offload moves parameters off a GPU, but this run is on the CPU: {use}"),
        (args.bucket_cap_mb and not ddp,
         f"--bucket-cap-mb is for --mode ddp and zero1, not {mode}: {use}"),
        (args.batch and args.global_batch, "--batch and --global-batch: give one of them"),
        (args.steps and args.epochs, "--steps and --epochs: give one of them"),
        (args.workers is not None and args.workers < 0, "--workers must be zero or more"),
        (args.seed < 0, "--seed must be zero or more"),
        (args.warmup_steps is not None and args.warmup_steps < 0,
         "--warmup-steps must be zero or more"),
        (args.clip == 0, "--clip 0 would stop all learning: leave it out for no clipping"),
    ):  # fmt: skip
        if wrong:
            yield sentence


# ---------------------------------------------------------------------------------------------
# Batch and learning rate


def batch_sizes(
    world_size: int, accum: int, batch: int | None, global_batch: int | None
) -> tuple[int, int]:
    """(local batch, global batch), in images; ValueError where the latter does not divide."""
    if global_batch is None:
        return batch or 32, (batch or 32) * accum * world_size
    share = world_size * accum
    if global_batch % share:
        below = max(global_batch // share, 1) * share
        raise ValueError(
            f"--global-batch {global_batch} does not divide over {world_size} ranks x {accum} "
            f"accumulation steps: use {below} or {below + share}"
        )
    return global_batch // share, global_batch


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Of step 0 .. steps-1: linear up over `warmup` steps, then half a cosine down towards 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


# ---------------------------------------------------------------------------------------------
# The step


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    finite: mesh.FiniteCheck,
    scaler: torch.amp.GradScaler | None,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    step: int,
    lr: float,
    mask_ratio: float,
    clip: float | None,
    dtype: torch.dtype,
    stop: bool = False,
) -> tuple[Tensor, Tensor]:
    """One optimizer step over the accumulation steps `batches`, each (images, noise) on the device.

    Returns this rank's mean loss () and the gradient norm over all parameters (), on the device:
    nothing here waits for it.
    """
    total = torch.zeros((), device=batches[0][0].device)
    for i, (images, noise) in enumerate(batches):
        with shard.accumulation(model, last=i == len(batches) - 1):
            with shard.autocast(model, images.device, dtype):
                loss, _, _ = model(data.normalize(images), mask_ratio, noise)
            loss = loss / len(batches)
            (scaler.scale(loss) if scaler else loss).backward()
        total += loss.detach()
    if scaler:
        scaler.unscale_(optimizer)
    norm = shard.clip_grad_norm(model, clip or math.inf)
    skip = finite.update(step, total, norm, scaler is not None, stop)
    for group in optimizer.param_groups:
        group["lr"] = lr
    shard.optimizer_step(optimizer, skip)
    if scaler:
        scaler.update()
    optimizer.zero_grad()
    return total, norm


# ---------------------------------------------------------------------------------------------
# The log


class Log:
    """log.jsonl, one object a line, and the lines on the terminal; silent on all ranks but 0."""

    def __init__(self, file: TextIO | None) -> None:
        self.file = file

    def say(self, text: str) -> None:
        """A line for the terminal."""
        if self.file:
            print(text, flush=True)

    def write(self, event: str, **record: Any) -> None:
        if self.file:
            clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                     for k, v in record.items()}  # JSON has no NaN  # fmt: skip
            self.file.write(json.dumps({"event": event, **clean}) + "\n")
            self.file.flush()


def device_memory(device: torch.device) -> dict[str, float | int | None]:
    """Peak GiB of this rank's GPU since the start, and how often the allocator had to retry."""
    names = ("peak_allocated_gib", "peak_reserved_gib", "alloc_retries")
    if device.type != "cuda":
        return dict.fromkeys(names)
    stats = torch.cuda.memory_stats(device)
    allocated = stats.get("allocated_bytes.all.peak", 0) / 2**30
    reserved = stats.get("reserved_bytes.all.peak", 0) / 2**30
    return dict(zip(names, (allocated, reserved, stats.get("num_alloc_retries", 0)), strict=True))


# ---------------------------------------------------------------------------------------------
# The loop

Batch = list[tuple[Tensor, Tensor]]  # (images, noise) of each accumulation step, on the device


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
    peak_flops: float | None


def device_batches(
    loader: Iterable[data.Sample], accum: int, device: torch.device
) -> Iterator[Batch]:
    """The loader's local batches, copied to the device: a list of `accum` for each step."""
    # Workers inherit the mask: a signal to the whole process group must reach this process alone.
    # Set twice, because starting multiprocessing's resource tracker unblocks SIGTERM.
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    batches = iter(loader)
    signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    while step := list(islice(batches, accum)):
        yield [
            (b.image.to(device, non_blocking=True), b.noise.to(device, non_blocking=True))
            for b in step
        ]


def loop(
    job: Job,
    batches: Iterator[Batch],
    log: Log,
    train: Callable[..., tuple[Tensor, Tensor]] | None,
    finite: mesh.FiniteCheck,
    lr_of: Callable[[int], float],
    save: Callable[[int], str | None] | None,
    told_to_stop: Callable[[], bool],
) -> dict[str, Any]:
    """Run the steps; `train` None reads only, `save` None keeps nothing. Returns the end's record.

    `save` writes a checkpoint after so many steps in all, or returns why it could not.
    """
    rates: list[float] = []
    last_losses: deque[Tensor] = deque(maxlen=10)
    started = mark = time.perf_counter()
    waited = all_waited = 0.0
    loss = norm = problem = None
    done = since = job.steps.start
    reason, failures = "done", 0
    for step in job.steps:
        last = step + 1 == job.steps.stop
        log_now = (step + 1) % job.log_every == 0 or last
        save_now = job.save_every is not None and ((step + 1) % job.save_every == 0 or last)
        lr = lr_of(step)

        # fetch
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked

        # step
        if train:
            loss, norm = train(batch, step=step, lr=lr, stop=told_to_stop())
            last_losses.append(loss)
        else:
            nothing = torch.zeros((), device=job.device)
            finite.update(step, nothing, nothing, stop=told_to_stop())

        # stop: every rank reads the same, of the step before unless the device is waited for anyway
        known = step if log_now or save_now else step - 1
        stop = finite.asked_to_stop(known)
        found = finite.read(step if stop else known)
        if found:
            (done, problem), reason = found, "nan"
            break
        done = step + 1

        # log
        if log_now:
            mean_loss = mesh.mean_over_ranks(loss) if loss is not None else None
            if job.device.type == "cuda":
                torch.cuda.synchronize(job.device)  # --run io has read nothing yet
            seconds = (time.perf_counter() - mark) / (done - since)
            rates.append(job.global_batch / seconds)
            write_step(job, log, step, mean_loss, norm, lr, seconds, waited / (done - since))
            all_waited, waited, since, mark = all_waited + waited, 0.0, done, time.perf_counter()

        # save
        if save and (save_now or stop):
            asked = time.perf_counter()
            problem = save(done)
            failures = failures + 1 if problem else 0
            mark += time.perf_counter() - asked  # not the step's time
            if problem and (stop or last or failures == 2):
                reason = "save"
                break
            if problem:
                log.say(f"warning: {problem}; the run goes on, the older checkpoints are kept")
                problem = None
        if stop and not last:
            reason = "signal"
            break

    seconds = time.perf_counter() - started
    record: dict[str, Any] = {"reason": reason, "problem": problem, "steps": done}
    record["images_per_second"] = statistics.median(rates[1:] or rates) if rates else None
    record |= device_memory(job.device)
    record |= {"seconds": seconds, "data_share": (all_waited + waited) / seconds}
    if reason == "done" and last_losses:
        record["loss"] = mesh.mean_over_ranks(torch.stack(list(last_losses)).mean())
    return record


def write_step(
    job: Job, log: Log, step: int, loss: float | None, norm: Tensor | None, lr: float,
    seconds: float, waited: float,
) -> None:  # fmt: skip
    """One line for log.jsonl and one for the terminal; times in seconds a step."""
    rate = job.global_batch / seconds
    flops = rate * job.flops_per_image / job.world_size if loss is not None else None
    memory = device_memory(job.device)
    grad_norm = None if norm is None else norm.item()
    log.write(
        "step", step=step + 1, epoch=step * job.global_batch // job.epoch_samples, loss=loss,
        grad_norm=grad_norm, lr=lr, step_seconds=seconds, data_seconds=waited,
        images_per_second=rate, images_per_second_per_rank=rate / job.world_size,
        tflops_per_rank=flops and flops / 1e12,
        mfu=flops / job.peak_flops if flops and job.peak_flops else None, **memory,
    )  # fmt: skip
    shown = f"loss {loss:7.4f}  norm {grad_norm:8.3f}  lr {lr:.2e}  " if loss is not None else ""
    peak = memory["peak_allocated_gib"]
    left = timedelta(seconds=min(round(seconds * (job.steps.stop - step - 1)), 10**9))
    log.say(
        f"step {step + 1:{len(str(job.steps.stop))}}/{job.steps.stop}  {shown}{rate:8.1f} img/s  "
        f"{'' if peak is None else f'{peak:6.2f} GiB  '}data wait {1e3 * waited:7.1f} ms  "
        f"ETA {left}"
    )


# ---------------------------------------------------------------------------------------------
# main


def open_log(out: str, rank: int) -> Log:
    """Rank 0 makes the folder and opens the log to append; ValueError on all ranks if it cannot."""
    path = os.path.join(out, "log.jsonl")

    def try_it() -> None:
        os.makedirs(out, exist_ok=True)
        open(path, "a", encoding="utf-8").close()

    mesh.together(try_it)
    if rank:
        return Log(None)
    with open(path, "rb") as old:
        cut = bool(old.read()[-1:].strip())  # the run before was killed while it wrote
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115
    file.write("\n" if cut else "")
    return Log(file)


def zero_loss(batch: Batch, patch: int, norm_pix: bool) -> Tensor:
    """The loss () of predicting zero for every patch of a batch: what a model has to beat."""
    patches = vit.patchify(data.normalize(batch[0][0]), patch)
    return vit.reconstruction_target(patches, norm_pix).square().mean()


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that decide about numbers and speed."""
    return {
        "python": platform.python_version(), "torch": torch.__version__,
        "torchvision": torchvision.__version__, "numpy": np.__version__,
        "cuda": torch.version.cuda, "hip": torch.version.hip,
    }  # fmt: skip


def resume(
    what: str, out: str, model: nn.Module, optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None, flags: dict[str, Any], allow_changes: bool,
    group: dist.ProcessGroup, say: Callable[[str], None],
) -> int:  # fmt: skip
    """Load a checkpoint, if any is asked for and there, and return the steps it has done.

    `what` as --resume. `flags` are this run's; those that decide the result must be the
    checkpoint's unless `allow_changes`. ValueError, on all ranks, where that is not so or a named
    checkpoint cannot be loaded. Collective.
    """
    auto, found = what == "auto", mesh.together(partial(checkpoint.candidates, out))
    if what == "none":
        if found:
            raise ValueError(f"{out} holds checkpoints of another run: use another --out")
        return 0
    for path in found if auto else [Path(what)]:
        try:
            facts = mesh.together(partial(checkpoint.read_facts, path))
            then, now = facts.get("flags", {}), json.loads(json.dumps(flags))
            changed = {
                key: f"{key} {then.get(key)} -> {now.get(key)}"
                for key in sorted({*then, *now})
                if then.get(key) != now.get(key)
            }
            decisive = [] if allow_changes else [changed[key] for key in RESULT if key in changed]
            if not decisive:
                checkpoint.load(path, model, optimizer, group=group)
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
        return facts["step"]
    return 0


def describe(start: dict[str, Any]) -> Iterator[str]:
    """The start record in lines for the terminal: what runs, its arithmetic, what to watch."""
    s, row, world = start, shard.STRATEGIES[start["mode"]], start["world_size"]
    copies, group = s["mesh"]["replicate"], s["mesh"]["shard"]
    gflop = s["flops_per_image"] / 1e9
    yield f"{s['model']}: {s['params']:,} parameters, {gflop:.1f} GFLOP an image"
    yield f"{world} ranks on {s['device']}, mesh {copies} x {group} (replicate x shard)"
    yield f"{s['mode']}: shards {row.shards}; a step: {row.traffic}"
    if mesh.straddles(group, s["local_world_size"]):
        node = s["local_world_size"]
        yield f"note: shard groups of {group} on nodes of {node}: gathers go over the network"
    yield f"batch: {s['batch']} images x {world} ranks x {s['accum']} steps = {s['global_batch']}"
    yield f"lr: {s['blr']:g} x {s['global_batch']} / 256 = {s['lr']:.3g}, reached in step " + str(
        s["warmup_steps"] or 1
    )
    if s["lr"] > LARGE_LR:
        yield f"warning: lr {s['lr']:.3g} is very large (MAE's recipe: 2.4e-3); lower --blr"
    left = s["images"] % s["global_batch"]
    yield f"data: {s['data']}, {s['images']} images, {s['epoch_steps']} steps an epoch"
    if left:
        yield f"note: {left} images, others each time, are left out of an epoch"


def main(argv: Sequence[str] | None = None, received: Sequence[int] = ()) -> int:
    """One run; returns the exit status: 0 done or stopped by a signal, 1 failed, 2 refused.

    `received` grows by the numbers of the signals that ask for a stop.
    """
    args = parse_args(argv)
    config, strategy = vit.MODELS[args.model], shard.STRATEGIES[args.mode]

    # ranks and device, and all that can be refused before any rank waits for another
    try:
        ranks = mesh.read_ranks(os.environ)
        device, world = mesh.pick_device(args.device, ranks), ranks.world_size
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
    try:
        mesh.init_ranks(ranks, device)
    except (RuntimeError, OSError) as error:
        complain(f"rank {ranks.rank} of {world} found no others: {str(error).splitlines()[0]}")
        return 1
    gloo: Any = dist.new_group(backend="gloo")  # for checkpoints: nothing is gathered on a GPU
    dist.barrier(gloo)  # connects the ranks now: later, one that dies meanwhile is waited for

    # what rank 0 does for all: list the images, open the log
    try:
        real = args.data != "synthetic"
        files = mesh.together(partial(data.scan, args.data)) if real else None
        images = len(files) if files else data.SYNTHETIC_IMAGES
        epoch_steps = data.steps_per_epoch(images, global_batch)
        log = open_log(args.out, ranks.rank)
    except ValueError as error:
        if ranks.rank == 0:
            complain(str(error))
        dist.destroy_process_group()
        return 2

    # model on no device, then sharded and initialised; optimizer
    with torch.device("meta"):
        model: nn.Module = vit.ViTMAE(config, args.img_size, args.norm_pix_loss)
    params, decay = sum(p.numel() for p in model.parameters()), shard.weight_decay_names(model)
    lr, dtype = args.blr * global_batch / 256, DTYPES[args.precision]
    finite = mesh.FiniteCheck(device, ranks.rank, world)
    steps = args.steps or (args.epochs or 0) * epoch_steps or 100
    warmup = steps // 20 if args.warmup_steps is None else args.warmup_steps
    flags = vars(args) | {
        "group": group, "warmup_steps": warmup, "steps": steps, "batch": local_batch,
        "global_batch": global_batch, "images": images, "world_size": world,
    }  # fmt: skip
    train, save, begin = None, None, 0
    if args.run != "io":
        model = shard.apply(
            model, args.mode, mesh.build_mesh(shape, device), block_classes={vit.Block},
            initial_value=partial(vit.initial_value, config, seed=args.seed), device=device,
            fsdp=args.fsdp or 2, param_dtype=dtype, reduce_dtype=DTYPES[args.reduce_dtype],
            prefetch=args.prefetch or "backward_pre", forward_prefetch=args.forward_prefetch,
            limit_all_gathers=bool(args.limit_all_gathers), cpu_offload=args.cpu_offload,
            bucket_cap_mb=args.bucket_cap_mb, ac=args.ac, compile_blocks=args.compile,
        )  # fmt: skip
        optimizer = shard.build_optimizer(
            model, args.mode, decay, lr=lr, weight_decay=args.weight_decay
        )
        scaler = shard.build_scaler(model, device, dtype)
        train = partial(train_step, model, optimizer, finite, scaler,
                        mask_ratio=args.mask_ratio, clip=args.clip, dtype=dtype)  # fmt: skip
    if args.run == "real":
        try:
            begin = resume(args.resume, args.out, model, optimizer, scaler, flags,
                           args.allow_changes, gloo, log.say)  # fmt: skip
        except (ValueError, RuntimeError) as error:
            if ranks.rank == 0:
                complain(str(error))
            dist.destroy_process_group()
            return 2 if isinstance(error, ValueError) else 1
        if begin < steps and ranks.rank == 0:
            Path(args.out, "done").unlink(missing_ok=True)  # of a run that was shorter

        def save(step: int) -> str | None:
            facts = {"flags": flags, "scaler": scaler.state_dict() if scaler else None}
            return checkpoint.save(args.out, step, model, optimizer, facts=facts, keep=args.keep,
                                   group=gloo)  # fmt: skip

    # data: the first batch is fetched before the clock starts
    workers = min(6, mesh.cpu_cores(ranks) - 1) if args.workers is None else args.workers
    loader = data.build_loader(
        files, img_size=args.img_size, patches=patches, seed=args.seed, global_batch=global_batch,
        local_batch=local_batch, steps=range(begin, begin + 1 if args.run == "syn" else steps),
        rank=ranks.rank, world_size=world, workers=workers, pin_memory=device.type == "cuda",
    )  # fmt: skip
    batches = device_batches(loader, args.accum, device)
    first = next(batches, [])
    batches = repeat(first) if args.run == "syn" else chain([first], batches)

    # what this run is
    flops = vit.flops_per_image(config, args.img_size, args.mask_ratio)
    peak, peak_source = mesh.peak_flops(device)
    start = flags | {
        "workers": workers, "lr": lr, "begin": begin,
        "epoch_steps": epoch_steps, "launcher": ranks.launcher,
        "local_world_size": ranks.local_world_size, "device": device.type,
        "mesh": {"replicate": shape[0], "shard": shape[1], "tp": 1}, "params": params,
        "flops_per_image": flops, "peak_flops_per_rank": peak, "peak_flops_source": peak_source,
        "host": platform.node(), "versions": versions(),
    }  # fmt: skip
    log.write("start", **start)
    for line in describe(start):
        log.say(line)

    # loop
    job = Job(device, world, range(begin, steps), args.log_every, args.save_every, global_batch,
              epoch_steps * global_batch, flops, peak)  # fmt: skip
    lr_of = partial(learning_rate, steps=steps, warmup=warmup, peak=lr)
    end = loop(job, batches, log, train, finite, lr_of, save, lambda: bool(received))

    # summary
    if "loss" in end:
        zero = zero_loss(first, config.patch, args.norm_pix_loss)
        end["loss_of_zero"] = mesh.mean_over_ranks(zero)
        log.say(f"mean loss of the last {min(10, steps)} steps {end['loss']:.4f}; predicting zero "
                f"gives {end['loss_of_zero']:.4f}")  # fmt: skip
    log.write("end", **end)
    if end["reason"] == "done" and args.run == "real" and ranks.rank == 0:
        Path(args.out, "done").touch()
    log.say(f"{end['reason']}: {end['steps']} steps in {end['seconds']:.1f} s, median "
            f"{end['images_per_second'] or 0:.1f} img/s, {end['data_share']:.1%} of the time "
            f"waiting for data; log in {os.path.join(args.out, 'log.jsonl')}")  # fmt: skip
    dist.destroy_process_group()
    if end["problem"] and ranks.rank == 0:
        advice = ": lower --blr, add --clip 1, or look at the images of that step"
        complain(end["problem"] + (advice if end["reason"] == "nan" else ""))
    return 1 if end["problem"] else 0


if __name__ == "__main__":
    raise SystemExit(main(received=RECEIVED))
