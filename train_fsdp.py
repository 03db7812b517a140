"""Pretrain a ViT-MAE with PyTorch FSDP, in any sharding mode, on any number of ranks.

    python train_fsdp.py --model tiny --img-size 96 --data examples/tiles/train     # one process
    torchrun --nproc-per-node 8 train_fsdp.py --model base --mode full_shard --data DIR
    srun python train_fsdp.py --model 3b --mode hybrid --group 2 --data DIR         # Slurm

Read vit.py, data.py, mesh.py and shard.py first, and examples/minimal.py: the same training in 100
lines. This file covers, in order: the flags, what follows from them, one step, the model, the loop,
the run. What keeps a run alive and seen (its log, checkpoints, time limit) is in run.py.
"""

import os
import signal
from typing import Any

# Signals that have asked this run to stop. The loop looks at them once per step.
SIGNALS: list[int] = []


def note_signal(number: int, frame: Any) -> None:
    """Remember a signal; a second Ctrl-C ends the process at once."""
    SIGNALS.append(number)
    if number == signal.SIGINT:
        os.write(2, b"\nstopping after this step; press again to end without saving\n")
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    # Before the imports, which take seconds: a signal that arrives meanwhile must not kill the
    # process. With --signal, Slurm sends one before the time limit; the run then saves and ends.
    for stop_signal in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(stop_signal, note_signal)

import argparse
import gc
import math
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import data
import mesh
import run
import shard
import vit

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLR = 1.5e-4  # the base learning rate of MAE's pretraining
# fp16: a scaler begins at 2**16 and halves its scale after each overflow. After so many in a row
# the scale is 2**-24, so there is another cause.
MAX_OVERFLOWS = 40
COLLECT_EVERY = 100  # steps between two garbage collections
REPORT_EVERY = 10  # steps between two reports of unreadable images

# --- The flags: to add one, add a line here and use it; one with * also in run.DECISIVE


class Parser(argparse.ArgumentParser):
    """Refuse a command with one sentence, on rank 0 only; exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(run.refuse(message, self.prog))


def number(low: float, high: float = math.inf, kind: type = float) -> Callable[[str], Any]:
    """Make an argparse type: a finite number of this kind from `low` to `high`."""

    def convert(text: str) -> Any:
        with suppress(ValueError):
            value = kind(text)
            if low <= value <= high and value != math.inf:
                return value
        what = "whole number" if kind is int else "number"
        limits = f"from {low:g} up" if high == math.inf else f"from {low:g} to {high:g}"
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a {what} {limits}")

    return convert


def path(text: str) -> str:
    """Expand ~ in a path, as an argparse type; refuse an empty one, as an unset variable gives."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r:.40} is empty: is a shell variable unset?")
    return os.path.expanduser(text)


def two_betas(text: str) -> tuple[float, float]:
    """Convert "0.9,0.95", as an argparse type does."""
    with suppress(ValueError):
        first, second = (float(part) for part in text.split(","))
        if 0 <= first < 1 and 0 <= second < 1:
            return first, second
    raise argparse.ArgumentTypeError(f"{text!r:.40} is not two numbers below 1, as in 0.9,0.95")


def build_parser(prog: str = "train_fsdp.py", doc: str = __doc__) -> Parser:
    """Build the parser. None means not given: see `complete`, `count_steps`, `main`."""
    about, examples, *_ = doc.split("\n\n")
    note = "* marks flags that a resumed run must not change without --allow-changes."
    parser = Parser(prog, description=f"{about}\n{note}", epilog=examples, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    count = number(1, kind=int)
    natural = number(0, kind=int)
    amount = number(0)
    rate = number(1e-12)
    switch = argparse.BooleanOptionalAction

    add = parser.add_argument_group("model").add_argument
    add("--model", default="base", help=f"* {', '.join(vit.MODELS)}; or base:depth=6,mlp_width=512")
    add("--img-size", type=count, default=224, help="* side of an image in pixels")
    add("--channels", type=count, default=3, help="* of an image (not 3: .npy, TIFF in packs)")
    add("--mask-ratio", type=amount, default=0.75, help="* fraction of patches masked")
    add("--norm-pix-loss", action=switch, default=True, help="* normalise each target patch")

    add = parser.add_argument_group("sharding").add_argument
    add("--mode", choices=shard.STRATEGIES, help="default hybrid; one process: ddp")
    add("--group", type=count, help="hybrid: ranks that share a copy (default: those of a node)")
    add("--fsdp", type=int, choices=(1, 2), help="2: fully_shard (default); 1: FSDP1")
    add("--wrap", choices=("block", "root"), help="FSDP: the unit (default block)")
    prefetches = ("none", "backward_pre", "backward_post")
    add("--prefetch", choices=prefetches, help="when backward gathers (default backward_pre)")
    add("--forward-prefetch", action="store_true", help="all-gather the next unit in forward too")
    add("--limit-all-gathers", action=switch, help="FSDP1: few at a time (default)")
    add("--cpu-offload", action="store_true", help="FSDP2: parameters and AdamW on the host")
    add("--bucket-cap-mb", type=count, help="ddp, zero1: MiB of a bucket (default 25)")

    add = parser.add_argument_group("speed").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda: ROCm too")
    add("--precision", choices=DTYPES, help="* default: bf16 on a GPU, fp32 on a CPU")
    add("--reduce-dtype", choices=DTYPES, default="fp32", help="* of gradients over ranks")
    recomputed = ("none", "selective", "full")
    add("--ac", choices=recomputed, default="none", help="recompute norms and GELU, or blocks")
    add("--compile", action="store_true", help="torch.compile every block")

    add = parser.add_argument_group("data").add_argument
    add("--data", type=path, default="synthetic", help="folder of images, or a pack")
    add("--stats", type=path, help="statistics of --data, a file of prepare.py stats")
    add("--eval-data", type=path, help="folder of held-out images: their loss at each save")
    add("--include", action="append", metavar="PATTERN", help="* only of such a name or folder")
    add("--exclude", action="append", metavar="PATTERN", help="* none of such a name or folder")
    what = "real: train; syn: the same batch each step, not saved; io: loader and copy only"
    add("--run-mode", "--run", choices=("real", "syn", "io"), default="real", help=what)
    add("--workers", type=natural, help="loader processes per rank (default cores - 1, up to 16)")
    add("--max-bad", type=number(0, 1), default=0.01, help="largest share of unreadable images")
    add("--exact-decode", action="store_true", help="* decode JPEGs at full size (slower)")

    group = parser.add_argument_group("optimisation")
    add = group.add_argument
    one = group.add_mutually_exclusive_group().add_argument
    one("--batch", type=count, help="images per rank and accumulation step (default 32)")
    one("--global-batch", type=count, help="* images per step of all ranks")
    add("--accum", type=count, default=1, help="accumulation steps")
    one = group.add_mutually_exclusive_group().add_argument
    one("--blr", type=rate, help=f"* lr = blr x global batch / 256 (default {BLR:g})")
    one("--lr", type=rate, help="* peak learning rate, instead of --blr")
    add("--betas", type=two_betas, default=(0.9, 0.95), help="* of AdamW")
    add("--weight-decay", type=amount, default=0.05, help="* of AdamW, not of biases and norms")
    add("--warmup-steps", type=natural, help="* linear warm-up (default 5 %% of all steps)")
    one = group.add_mutually_exclusive_group().add_argument
    one("--steps", type=count, help="* optimizer steps (default 100)")
    one("--epochs", type=count, help="passes over the data, instead of --steps")
    add("--clip", type=rate, help="* largest gradient norm (default: none)")
    add("--seed", type=natural, default=0, help="* of weights, image order, crops and masks")

    add = parser.add_argument_group("output").add_argument
    add("--out", type=path, default="out", help="log and checkpoints go here")
    add("--log-every", type=count, default=10, help="steps between two log lines")
    add("--tensorboard", action="store_true", help="write the log's numbers to OUT/tensorboard too")
    add("--save-every", default="30m", metavar="WHEN", help="steps (500), minutes (30m) or none")
    add("--keep", type=count, default=2, help="newest checkpoints to keep")
    add("--resume", type=path, default="auto", help="auto: the newest in OUT; none; or a path")
    add("--allow-changes", action="store_true", help="resume although flags marked * differ")
    add("--timeout", type=count, default=300, help="seconds without progress that end the run")
    add("--profile", type=count, nargs="?", const=3, metavar="STEPS", help="into OUT/profile (3)")
    return parser


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags of a run; print one sentence and exit with status 2 if they clash."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        run.save_interval(args.save_every)
        model_config(args)
    except ValueError as error:
        parser.error(str(error))
    return args


# --- What follows from the flags


def model_config(args: argparse.Namespace) -> vit.ViTConfig:
    """Return the sizes of the model; ValueError."""
    return vit.model_config(args.model, args.channels)


def complete(args: argparse.Namespace, world_size: int, node_ranks: int, device_type: str) -> None:
    """Fill in what was not given, for so many ranks, `node_ranks` of them on a node.

    Sets also mesh_shape, world_size, patches, flops_per_image, params and channel_stats.
    ValueError if flags clash.
    """
    complete_sharding(args, world_size, node_ranks, device_type)
    share = world_size * args.accum
    if args.batch is None:
        args.batch = 32
    if args.global_batch is None:
        args.global_batch = share * args.batch
    if args.global_batch % share:
        parts = f"{world_size} ranks x {args.accum} accumulation steps"
        raise ValueError(f"--global-batch {args.global_batch} is not a multiple of {parts}")
    args.batch = args.global_batch // share
    if args.lr is None:
        if args.blr is None:
            args.blr = BLR
        args.lr = args.blr * args.global_batch / 256  # as in MAE's recipe
    config = model_config(args)
    args.patches = vit.patch_count(config, args.img_size)
    if vit.count_visible(args.patches, args.mask_ratio) == args.patches:
        raise ValueError(f"--mask-ratio {args.mask_ratio} removes no patch: nothing to learn")
    args.flops_per_image = vit.flops_per_image(config, args.img_size, args.mask_ratio)
    with torch.device("meta"):
        args.params = sum(p.numel() for p in vit.ViTMAE(config, args.img_size).parameters())
    args.channel_stats = data.IMAGENET  # unless run.find_stats finds others
    if args.channels != 3:
        half = (0.5,) * args.channels
        args.channel_stats = data.ChannelStats(mean=half, std=(0.25,) * args.channels)


def complete_sharding(
    args: argparse.Namespace, world_size: int, node_ranks: int, device_type: str
) -> None:
    """Fill in mode, options of sharding, precision and mesh_shape; ValueError if they clash."""

    def applies(mode: str) -> dict[str, bool]:
        has_group = shard.STRATEGIES[mode].shard_over == "group"
        return shard.applicable_options(mode, args.fsdp or 2) | {"group": has_group}

    flags = [name for name in applies("ddp") if getattr(args, name, None) is not None]
    given = [name for name in flags if getattr(args, name) or name == "limit_all_gathers"]
    if args.mode is None:
        # one process has nothing to shard, unless it is given a flag that ddp does not have
        alone = world_size == 1 and all(applies("ddp")[name] for name in given)
        args.mode = "ddp" if alone else "hybrid"
    for name in given:
        if not applies(args.mode)[name]:
            what = f"--{name.replace('_', '-')} does not apply to --mode {args.mode}"
            if applies(args.mode)["fsdp"]:
                what += f" with --fsdp {args.fsdp or 2}"
            raise ValueError(f"{what}: leave it out, or change these")
    if args.cpu_offload and device_type == "cpu":
        raise ValueError("--cpu-offload moves parameters off a GPU, but this run is on the CPU")
    for name in ("fsdp", "wrap", "prefetch", "limit_all_gathers"):
        # a flag that does not apply stays None, so the log does not claim that it was used
        if getattr(args, name) is None and applies(args.mode)[name]:
            setattr(args, name, getattr(shard.ShardingOptions, name))
    if args.precision is None:
        args.precision = "fp32" if device_type == "cpu" else "bf16"
    shard.check_options(args.mode, sharding_options(args))
    if args.group is None and applies(args.mode)["group"]:
        args.group = mesh.default_group(world_size, node_ranks)
    shard_over = shard.STRATEGIES[args.mode].shard_over
    args.mesh_shape = mesh.mesh_shape(shard_over, world_size, args.group)
    args.world_size = world_size


def count_steps(args: argparse.Namespace, images: int) -> None:
    """Set images, epoch_steps, steps and warmup_steps; ValueError if the images are too few."""
    args.images = images
    args.epoch_steps = data.steps_per_epoch(images, args.global_batch)
    if args.epochs is not None:
        args.steps = args.epochs * args.epoch_steps
    if args.steps is None:
        args.steps = 100
    if args.warmup_steps is None:
        args.warmup_steps = args.steps // 20
    if args.warmup_steps > args.steps:
        never = f"the {args.steps} steps of the run: the rate would never reach its peak"
        raise ValueError(f"--warmup-steps {args.warmup_steps} is more than {never}")


def sharding_options(args: argparse.Namespace) -> shard.ShardingOptions:
    """Return the options of shard.apply."""
    names = ["fsdp", "wrap", "prefetch", "forward_prefetch", "limit_all_gathers"]
    names += ["cpu_offload", "bucket_cap_mb", "ac", "compile"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return shard.ShardingOptions(
        param_dtype=DTYPES[args.precision],
        reduce_dtype=DTYPES[args.reduce_dtype],
        cast_inputs=False,  # the model casts the patches itself: their targets stay fp32
        preserve_rng_state=False,  # the model has no dropout
        **given,
    )


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then half a cosine."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps  # not from 0, which would waste a step
    decayed = step - args.warmup_steps
    decay_steps = args.steps - args.warmup_steps
    return args.lr * 0.5 * (1 + math.cos(math.pi * decayed / decay_steps))


# --- One step

MicroBatch = tuple[Tensor, Tensor]  # images (B, C, H, W) as loaded, masking noise (B, L)


@dataclass
class Training:
    """A sharded model, and everything else that a training step needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None  # fp16 needs one
    compute_loss: Callable[[nn.Module, MicroBatch], Tensor]  # -> loss (), fp32
    dtype: torch.dtype  # in which forward and backward compute
    clip: float = math.inf  # largest gradient norm


def forward_backward(training: Training, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Accumulate the gradients of all micro-batches; return this rank's mean loss, a scalar."""
    model = training.model
    count = len(micro_batches)
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


class Requests(NamedTuple):
    """What one rank asks of all others in a step."""

    stop: bool = False  # a signal has come
    save: bool = False  # by this rank's clock a checkpoint is due
    no_batch: bool = False  # this rank's loader has failed
    bad_images: bool = False  # this rank has unreadable images to report


NO_REQUESTS = Requests()


class Result(NamedTuple):
    """What the ranks found in one step, the same on all."""

    step: int  # from 0
    loss: float  # mean over all ranks
    bad: float  # ranks whose loss or norm is not finite: the step is not applied, the run ends
    bad_norm: float  # ranks whose norm is not finite: in fp16 only this step is not applied
    stop: float  # ranks that ask to stop, ...
    save: float  # ... to save, ...
    no_batch: float  # ... that have no batch, ...
    bad_images: float  # ... that have unreadable images to report
    norm: float  # of the gradients


class Guard:
    """Have all ranks agree, by one small all-reduce per step, whether it is applied, and on more.

    A step is not applied if on any rank the loss or the gradient norm is not finite, or there is no
    batch. Nor is any later one: the run ends. A GPU knows that before the host does, which reads
    results one step late, without waiting. With a gradient scaler (fp16), a norm that is not finite
    only skips its own step, unless there have been more than MAX_OVERFLOWS in a row.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.late = device.type == "cuda"
        self.ended = torch.zeros((), dtype=torch.bool, device=device)
        self.overflows = torch.zeros((), device=device)  # in a row
        self.pending: deque[tuple[int, Tensor, Any]] = deque()  # results on their way to the host

    def check(
        self, step: int, loss: Tensor, norm: Tensor, requests: Requests, scaled: bool = False
    ) -> Tensor:
        """Agree on a step after its backward pass; return () fp32, 1 to skip it. Collective."""
        loss = loss.to(self.device).double()
        norm = norm.detach().to(self.device).double()
        bad_norm = ~norm.isfinite()
        self.overflows = torch.where(bad_norm, self.overflows + 1, 0)
        bad = ~loss.isfinite() | (self.overflows > MAX_OVERFLOWS if scaled else bad_norm)
        asked = [torch.full_like(bad, value) for value in requests]
        mean = loss / dist.get_world_size()
        sums = torch.stack([mean, bad, bad_norm, *asked])  # in float64
        dist.all_reduce(sums)
        # in the order of the fields of Result
        any_bad, any_bad_norm, _, _, any_no_batch, _ = sums[1:] > 0
        skip = any_bad | any_bad_norm | any_no_batch | self.ended
        self.ended = self.ended | any_bad | any_no_batch
        copy = torch.cat([sums, norm.view(1)]).to("cpu", non_blocking=True)  # the host goes on
        copied = None
        if self.late:
            copied = torch.cuda.Event(blocking=True)  # the host sleeps, and loaders have its core
            copied.record()
        self.pending.append((step, copy, copied))
        return skip.float()

    def results(self, wait: bool) -> Iterator[Result]:
        """Yield new results; leave a GPU's newest for the next call, unless `wait` is set.

        Or unless an earlier result asks to stop, to save or to report images.
        """
        while len(self.pending) > int(self.late and not wait):
            step, copy, copied = self.pending.popleft()
            if copied:
                copied.synchronize()
            result = Result(step, *copy.tolist())
            wait = wait or result.stop + result.save + result.bad_images > 0
            yield result


def train_step(
    training: Training,
    guard: Guard,
    step: int,
    micro_batches: Sequence[MicroBatch],
    lr: float,
    requests: Requests = NO_REQUESTS,
) -> None:
    """Take one optimizer step, unless some rank has a bad value or no batch. Collective.

    Nothing here waits for a GPU, so the host can run ahead of it.
    """
    optimizer = training.optimizer
    scaler = training.scaler
    loss = forward_backward(training, micro_batches)
    if scaler:
        scaler.unscale_(optimizer)  # the norm is of the unscaled gradients
    # the norm over all shards, the same on every rank
    norm = shard.clip_grad_norm(training.model, training.clip)
    skip = guard.check(step, loss, norm, requests, scaled=scaler is not None)
    for group in optimizer.param_groups:
        group["lr"] = lr
    shard.optimizer_step(optimizer, skip)  # scaler.step would make the host wait
    if scaler:
        scaler.update()
    optimizer.zero_grad()  # FSDP's gradients are freed until backward; DDP keeps its buckets


# --- The model: from shapes to a sharded model that trains


def build_training(args: argparse.Namespace, device: torch.device) -> Training:
    """Build, shard and initialise the model; build its AdamW. Collective.

    A parameter has only a shape until its block is sharded. Then shard.apply allocates it, fills it
    with its full value from `init_fn`, keeps this rank's shard, and frees the rest. So where FSDP
    shards the parameters of blocks (--wrap block), no rank holds the full model while it is built.
    """
    config = model_config(args)
    dtype = DTYPES[args.precision]
    grid = mesh.build_mesh(args.mesh_shape, device)
    with torch.device("meta"):  # shapes without memory
        model: nn.Module = vit.ViTMAE(config, args.img_size, args.norm_pix_loss)
    # Before sharding: decay goes by the number of dimensions, which FSDP1 does not keep.
    decay = shard.weight_decay_names(model)
    # FSDP2 warns that the output is a view, which must not be changed in place. Nothing changes it.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    model = shard.apply(
        model,
        args.mode,
        grid,
        block_classes={vit.Block},
        init_fn=partial(vit.initial_value, config, seed=args.seed),
        options=sharding_options(args),
    )
    # After sharding, so that its states are sharded like the parameters.
    optimizer = shard.build_optimizer(
        model, args.mode, decay, lr=args.lr, weight_decay=args.weight_decay, betas=args.betas
    )
    scaler = shard.build_scaler(model, device, dtype)

    def compute_loss(network: nn.Module, micro_batch: MicroBatch) -> Tensor:
        images, noise = micro_batch
        loss, _, _ = network(data.normalize(images, args.channel_stats), args.mask_ratio, noise)
        return loss

    return Training(model, optimizer, scaler, compute_loss, dtype, args.clip or math.inf)


# --- The loop


class Batches:
    """The micro-batches of each step, read by the loader's workers, put on the device."""

    def __init__(self, args: argparse.Namespace, files: Any, log: run.Log, begin: int) -> None:
        """Open the loader, and wait for the batch of step `begin`: workers take a while to start.

        The step number alone tells a resumed run where it is in the data (data.step_positions).
        """
        self.args = args
        self.files = files
        self.log = log
        self.failed = False
        self.problem: str | None = None  # an error message of the loader
        self.current: list[MicroBatch] = []
        self.again = False  # the next batch is the current one
        ahead = 0
        if args.run_mode == "io":  # it does not measure what workers have read before it begins
            ahead = 1 + math.ceil(args.workers * data.PREFETCH / args.accum)
        self.loaded = iter(run.open_loader(args, files, log, range(begin, args.steps + ahead)))
        for _ in range(max(1, ahead)):
            self.next(begin)
        self.again = args.run_mode != "io"

    def next(self, step: int) -> list[MicroBatch]:
        """Return the batch of a step; once the loader has failed, the last batch again.

        All ranks learn of the failure together, when the step is checked: none waits for this one.
        """
        if self.again or self.failed:
            self.again = self.args.run_mode == "syn"
            return self.current
        start = time.perf_counter()
        try:
            self.current = self.read(step)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # the GPU's, not the loader's
            raise
        except Exception as error:
            self.failed = True
            self.problem = f"rank {self.log.rank}: the data loader failed: {run.cause_of(error)}"
            if not isinstance(error, (OSError, RuntimeError)):  # a bug
                traceback.print_exception(error)
        self.log.waited += time.perf_counter() - start
        return self.current

    def read(self, step: int) -> list[MicroBatch]:
        """Read the micro-batches of a step."""
        micro_batches = []
        for batch in islice(self.loaded, self.args.accum):
            images = batch.image.to(self.log.device, non_blocking=True)
            noise = batch.noise.to(self.log.device, non_blocking=True)
            micro_batches.append((images, noise))
            for index, reason in batch.bad:
                self.log.bad_images.append((self.files.path(index), reason, step + 1))
        return micro_batches


def train(
    args: argparse.Namespace,
    training: Training | None,
    batches: Batches,
    log: run.Log,
    checkpoints: run.Checkpoints,
    evaluate: Callable[[int], None] | None,
) -> run.Ending:
    """Run the remaining steps; return how the run ends."""
    guard = Guard(log.device)
    profile = run.open_profile(args, log, checkpoints.begin)
    zero = torch.zeros((), device=log.device)
    for step in range(checkpoints.begin, args.steps):
        done = step + 1  # the number of steps done, this one included
        last = done == args.steps
        run.limit.arm()
        # data: the loader works ahead, so this seldom waits
        micro_batches = batches.next(step)
        requests = Requests(
            stop=bool(SIGNALS),
            save=checkpoints.due_by_clock(),
            no_batch=batches.failed,
            bad_images=bool(log.bad_images) and (last or done % REPORT_EVERY == 0),
        )
        # step: forward, backward, and an update unless some rank finds a bad value
        if training:
            train_step(training, guard, step, micro_batches, learning_rate(step, args), requests)
        else:  # --run-mode io
            guard.check(step, zero, zero, requests)
        if profile:
            profile.step()
        # log: a GPU's results are read one step late, without waiting, but for a stop or a save
        save = last or done % checkpoints.steps == 0
        stop = False
        problem = None
        for result in guard.results(wait=save):
            if result.no_batch or result.bad:
                return end_early(result, batches, log, checkpoints)
            log.step(result, learning_rate(result.step, args))
            save = save or result.save > 0
            stop = stop or result.stop > 0
            if result.bad_images:
                problem = log.list_bad_images()
        # save: on schedule, when some rank's clock says so, or before the run ends
        ends = last or stop or problem is not None
        if save or ends:
            failed = checkpoints.save(done, final=ends)
            if failed:
                return run.Ending("save_failed", done, failed)
        # stop: after a signal to any rank; before evaluating, because little time may be left
        if problem:
            return run.Ending("bad_images", done, problem)
        if stop and not last:
            return run.Ending("signal", done)
        if save and evaluate:
            with log.paused():
                evaluate(done)
        if done % COLLECT_EVERY == 0:
            gc.collect()  # on all ranks at the same step, not at random times on one
    return run.Ending("done", args.steps)


def end_early(
    result: Result, batches: Batches, log: run.Log, checkpoints: run.Checkpoints
) -> run.Ending:
    """Save the weights from before a step that was not applied; say why. Collective."""
    if result.no_batch:
        reason = "loader_error"
        problem = run.first(batches.problem)
    else:
        reason = "nan"
        what = "gradient norm" if math.isfinite(result.loss) else "loss"
        log.write("skip", {"step": result.step + 1, "what": what})
        advice = "lower --blr (or --lr) or add --clip 1, with --allow-changes"
        problem = f"the {what} is not finite at step {result.step + 1}: {advice}"
    failed = checkpoints.save(result.step, final=True)
    if failed:
        log.say(f"warning: {failed}")
    return run.Ending(reason, result.step, problem)


# --- The run: each part is made from those before it


def losses_to_beat(args: argparse.Namespace, images: Tensor, noise: Tensor) -> Tensor:
    """Compute the losses of predicting zero and the mean colour for images as loaded -> (2, B)."""
    _, mask = vit.random_masking(noise, args.mask_ratio)
    x = data.normalize(images, args.channel_stats)
    return vit.baseline_losses(x, mask, model_config(args).patch, args.norm_pix_loss)


def image_losses(
    args: argparse.Namespace, training: Training, images: Tensor, noise: Tensor
) -> Tensor:
    """Compute the loss of each image (B, C, H, W), and the two to beat -> (3, B). Collective."""
    x = data.normalize(images, args.channel_stats)
    with shard.autocast(training.model, images.device, training.dtype):
        _, prediction, mask = training.model(x, args.mask_ratio, noise)
    losses = vit.loss_per_image(x, prediction, mask, model_config(args).patch, args.norm_pix_loss)
    return torch.cat([losses[None], losses_to_beat(args, images, noise)])


def run_training(args: argparse.Namespace, log: run.Log) -> None:
    """Do one run, on every rank; run.Refused on all of them if it fails. Collective."""
    files = run.find_images(args, args.data)
    held_out = run.find_images(args, args.eval_data) if args.eval_data else None
    run.find_stats(args, files)
    with run.refusing():
        count_steps(args, len(files))
    found = run.choose_checkpoints(args)
    training = None  # in --run-mode io, which only reads images
    if args.run_mode != "io":
        training = build_training(args, log.device)
    checkpoints = run.Checkpoints(args, log, training)
    evaluate = None
    if training and args.run_mode == "real":  # syn and io neither resume, save nor evaluate
        checkpoints.resume(found, defaults=vars(build_parser().parse_args([])))
        if held_out:
            losses_of = partial(image_losses, args, training)
            evaluate = partial(run.evaluate, args, training.model, losses_of, held_out, log)
        if checkpoints.begin >= args.steps:
            log.say(f"already finished: all {args.steps} steps; {checkpoints.where()}")
            if evaluate and not run.is_done(args.out):  # it was killed before its evaluation
                evaluate(checkpoints.begin)
        run.mark_done(args.out, checkpoints.begin >= args.steps)
        if checkpoints.begin >= args.steps:
            return
    run.describe(args, log, checkpoints.begin)
    run.limit.arm(run.LONG)  # workers take a while to start
    batches = Batches(args, files, log, checkpoints.begin)
    problem = run.first(batches.problem)
    if problem:
        raise run.Refused(problem, status=1)
    to_beat = {}
    if training:
        losses = [losses_to_beat(args, *batch).mean(1) for batch in batches.current]
        mean = torch.stack(losses).mean(0) / args.world_size
        dist.all_reduce(mean)
        zero, colour = mean.tolist()
        to_beat = {"loss_of_zero": zero, "loss_of_mean_colour": colour}
    gc.collect()
    gc.freeze()  # objects that exist now are permanent: keep the collector from scanning them
    gc.disable()  # it would stop one rank at a time, and so stall all
    log.start_clock(checkpoints.begin)
    ending = train(args, training, batches, log, checkpoints, evaluate)
    run.limit.arm(run.LONG)
    log.list_bad_images()  # what was found since the last report
    log.end(ending, to_beat)
    if args.run_mode == "real":
        log.say(checkpoints.where())
        if ending.reason == "done":
            run.mark_done(args.out, True)
    if ending.problem:
        raise run.Refused(ending.problem, status=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    It is 0 if the run is done or was stopped by a signal, 1 if it failed, 2 if it was refused.
    """
    words = sys.argv[1:] if argv is None else argv
    if "--dry-run" in words:  # with --world-size N: simulate a step of rank 0, train nothing
        import simulate

        return simulate.main(words)
    args = parse_flags(words)
    try:
        ranks = mesh.read_ranks(os.environ)
        device = mesh.pick_device(args.device, ranks)
        run.check_host(args)
    except (ValueError, RuntimeError) as error:
        return run.refuse(str(error), local=True)
    try:
        complete(args, ranks.world_size, ranks.local_world_size, device.type)
    except ValueError as error:
        return run.refuse(str(error))
    if args.workers is None:  # srun binds a rank to cores of its own; torchrun does not
        share = 1 if ranks.launcher == "srun" else ranks.local_world_size
        args.workers = min(16, max(1, mesh.process_cores() // share) - 1)
    log = None
    status = 0
    run.limit.start(args.out, ranks.rank, args.timeout)
    try:
        # longer than the time limit, which ends a rank that waits, and leaves its stacks
        mesh.init_ranks(ranks, device, timeout_minutes=2 * run.LONG * args.timeout / 60)
    except (RuntimeError, OSError, ValueError) as error:
        run.limit.stop()
        run.refuse(f"could not join the other ranks: {error}", local=True)
        return 2 if dist.is_initialized() else 1
    try:
        log = run.Log(args, ranks.rank, device)
        run_training(args, log)
    except run.Refused as error:  # on all ranks, which leave together
        status = error.status
        if ranks.rank == 0:  # first: launchers kill the others when one rank exits
            print(f"train_fsdp.py: error: {error}", file=sys.stderr, flush=True)
    except Exception as error:  # on this rank alone: the others must not wait for it
        status = 1
        run.fail(error, ranks, log)
    run.limit.arm(run.LONG)
    gc.enable()
    if dist.is_initialized():
        dist.barrier()  # rank 0 serves the store, so it must not leave before the others
        dist.destroy_process_group()
    run.limit.stop()
    if log:
        log.close()
    return status


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        cast(Any, stream).reconfigure(errors="backslashreplace")  # a name may have any bytes
    # multiprocessing would find this script by it, and import it again in each loader worker
    del __file__
    raise SystemExit(main())
