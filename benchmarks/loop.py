"""Measure what the training loop adds to the bare step, and reading images to the loop.

    python -m benchmarks.loop --model tiny --img-size 96 --batch 16 --threads 1
    python -m benchmarks.loop --data examples/tiles/train --workers 1 --threads 1 ...

Three kinds of segments take turns on one rank: `bare` calls train_fsdp.train_step again and again
and does nothing else; `syn` lets train_fsdp.loop make the same steps with one batch, as --run syn
does, with its log; `real`, with --data, feeds it from a loader. A round's segments are neighbours
in time: its ratios are taken first, then their median. Give a loader cores of its own: --threads 1
and --workers 1 want two.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

import data
import mesh
import train_fsdp
import vit
from runtime import device_batches
from runtime.agreement import StepGuard
from runtime.bad_images import BadImageLog
from runtime.config import Config
from runtime.image_source import SyntheticImages
from runtime.log import Log, Meter, open_log
from runtime.resume import Saves
from runtime.run import Run, resolve, with_images
from runtime.session import Session, manual_gc

BEFORE = 3  # steps that nobody counts
LR = 1e-5


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time the loop against the bare step.")
    add = parser.add_argument
    add("--model", choices=vit.MODELS, default="tiny")
    add("--img-size", type=int, default=96, metavar="PIXELS")
    add("--batch", type=int, default=16, metavar="IMAGES")
    add("--mode", choices=("hybrid", "full_shard", "ddp"), default="ddp")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--steps", type=int, default=20, help="of a segment (default 20)")
    add("--rounds", type=int, default=10, help="(default 10)")
    add("--threads", type=int, default=2, help="of a CPU (default 2)")
    add("--data", metavar="DIR", help="images to read for `real`")
    add("--workers", type=int, default=1, help="loader processes (default 1)")
    return parser.parse_args(argv)


def read_batches(args: argparse.Namespace, device: torch.device) -> Iterator[device_batches.Batch]:
    """Open a loader of --data for all segments, or of one synthetic batch."""
    files = data.scan(args.data) if args.data else SyntheticImages(0, 3)
    every = range((args.rounds + 1) * (args.steps + BEFORE))
    loader = data.build_loader(
        files,
        img_size=args.img_size,
        patches=vit.patch_count(vit.MODELS[args.model], args.img_size),
        seed=0,
        global_batch=args.batch,
        local_batch=args.batch,
        steps=every if args.data else range(1),
        workers=args.workers if args.data else 0,
        pin_memory=device.type == "cuda",
    )
    return device_batches.device_batches(loader, 1, device)


@dataclass
class Segments:
    """The segments of one model, each as a method that makes `run.steps` steps."""

    run: Run
    device: torch.device
    guard: StepGuard
    step: Callable[..., Any]  # train_fsdp.train_step, bound
    batch: device_batches.Batch  # the one of `bare` and `syn`
    log: Log
    inputs: BadImageLog

    def warm_up(self) -> None:
        """Make steps that nobody counts; a loader fills up meanwhile."""
        for _ in range(BEFORE):
            self.step(self.batch.parts, lr=LR)

    def bare(self) -> None:
        """Make the steps alone."""
        for _ in range(self.run.steps):
            self.step(self.batch.parts, lr=LR)

    def looped(self, batches: Iterator[device_batches.Batch], step: Callable[..., Any]) -> None:
        """Let the training loop make the steps."""
        session = SimpleNamespace(log=self.log, heartbeat=lambda phase, step: None)
        self.guard.begin(0, 0)
        train_fsdp.train(
            self.run,
            cast(Session, session),
            batches,
            step,
            self.guard,
            Meter(0, self.run.global_batch),
            Saves(self.run, self.log),
            self.inputs,
            nullcontext,
        )

    def seconds_per_step(self, segment: Callable[[], None]) -> float:
        """Time a segment from an idle device to an idle device."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        started = time.perf_counter()
        segment()
        wait()
        return (time.perf_counter() - started) / self.run.steps


def build(
    args: argparse.Namespace, device: torch.device, batch: device_batches.Batch, out: str
) -> Segments:
    """Make the model and what its loop needs, with a log in the folder `out`."""
    options = Config(
        args.model,
        args.img_size,
        mode=args.mode,
        precision=args.precision,
        batch=args.batch,
        steps=args.steps,
        out=out,
    )
    run = with_images(resolve(options, 1, 1), 100 * args.batch)
    grid, guard = mesh.build_mesh((1, 1), device), StepGuard(device)
    parts = train_fsdp.build_model_and_optimizer(run, grid, device)
    step = partial(train_fsdp.train_step, *parts, guard, **run.step_options())
    log = open_log(out)
    log.begin(run, device, 0)
    log.say = lambda text: None  # type: ignore[method-assign] # the table alone is for people
    return Segments(run, device, guard, step, batch, log, BadImageLog(out, 1, 1.0, log, str))


def measure(
    segments: Segments, kinds: dict[str, Callable[[], None]], rounds: int
) -> dict[str, list[float]]:
    """Time the kinds of segments in turns -> seconds per step, by round; a first is left out."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for i in range(rounds + 1):
        names = list(kinds)
        for kind in names[i % len(names) :] + names[: i % len(names)]:
            segments.warm_up()
            taken = segments.seconds_per_step(kinds[kind])
            if i:
                seconds[kind].append(taken)
    return seconds


def report(seconds: dict[str, list[float]], batch: int) -> Iterator[str]:
    """Yield a line per kind, then the ratios of neighbours in time."""
    for kind, taken in seconds.items():
        middle = statistics.median(taken)
        yield (
            f"{kind:5} {middle:8.4f} s per step ({min(taken):.4f}-{max(taken):.4f})  "
            f"{batch / middle:8.1f} img/s"
        )
    for over, under in (("syn", "bare"), ("real", "syn")):
        if over in seconds:
            ratios = [a / b for a, b in zip(seconds[under], seconds[over], strict=True)]
            yield (
                f"{over} / {under}: {statistics.median(ratios):.3f} in the middle round "
                f"({min(ratios):.3f}-{max(ratios):.3f})"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the seconds per step of each kind and the ratios of their rates."""
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    ranks = mesh.read_ranks({})
    device = mesh.pick_device(args.device, ranks)
    mesh.init_ranks(ranks, device)
    read = read_batches(args, device)
    with tempfile.TemporaryDirectory() as folder:
        segments = build(args, device, next(read), folder)
        guard, again = segments.guard, repeat(segments.batch)
        kinds = {"bare": segments.bare, "syn": lambda: segments.looped(again, segments.step)}
        if args.data:
            kinds["real"] = lambda: segments.looped(read, segments.step)
        with manual_gc():  # as in a run
            seconds = measure(segments, kinds, args.rounds)
            alone = segments.seconds_per_step(lambda: segments.looped(again, guard.read_only_step))
    print(
        f"{args.model}, {args.mode}, {args.precision}, batch {args.batch}, {args.img_size} px on "
        f"{device}, torch {torch.__version__}; {args.rounds} rounds of {args.steps}"
    )
    print("\n".join(report(seconds, args.batch)))
    print(f"the loop alone {1e6 * alone:.0f} us per step, with its log")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
