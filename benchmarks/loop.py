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
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
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
from runtime import bad_images, device_batches
from runtime.config import Config, resolve, with_images
from runtime.log import open_log
from runtime.meter import Meter
from runtime.resume import Saves
from runtime.session import Session
from runtime.step_guard import StepGuard

BEFORE = 3  # steps that nobody counts


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the seconds of a step of each kind and the ratios of their rates."""
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
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    ranks = mesh.read_ranks({})
    device = mesh.pick_device(args.device, ranks)
    mesh.init_ranks(ranks, device)
    grid, config = mesh.build_mesh((1, 1), device), vit.MODELS[args.model]
    options = Config(
        args.model,
        args.img_size,
        mode=args.mode,
        precision=args.precision,
        batch=args.batch,
        steps=args.steps,
    )
    run = with_images(resolve(options, 1, 1), 100 * args.batch, None, data.IMAGENET)
    model, optimizer, scaler = train_fsdp.build_model_and_optimizer(run, grid, device)
    guard = StepGuard(device)
    train = partial(
        train_fsdp.train_step,
        model,
        optimizer,
        scaler,
        guard,
        mask_ratio=0.75,
        clip=None,
        dtype=run.dtype,
    )
    files = data.scan(args.data) if args.data else None
    patches = vit.patch_count(config, args.img_size)
    every = range((args.rounds + 1) * (args.steps + BEFORE))
    loader = data.build_loader(
        files,
        img_size=args.img_size,
        patches=patches,
        seed=0,
        global_batch=args.batch,
        local_batch=args.batch,
        steps=every if files else range(1),
        workers=args.workers if files else 0,
        pin_memory=device.type == "cuda",
    )
    read = device_batches.device_batches(loader, 1, device)
    batch = next(read)
    folder = tempfile.TemporaryDirectory()
    log = open_log(folder.name)
    log.say = lambda text: None  # type: ignore[method-assign] # the table alone is for people

    inputs = bad_images.BadImageLog(folder.name, 1, 1.0, log, str)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def bare() -> float:
        wait()
        started = time.perf_counter()
        for _ in range(args.steps):
            train(batch.parts, lr=1e-5)
        wait()
        return time.perf_counter() - started

    def looped(batches: Iterator[device_batches.Batch], train: Callable[..., Any] = train) -> float:
        session = SimpleNamespace(log=log, heartbeat=lambda phase, step: None)
        guard.begin(0, 0)
        wait()
        started = time.perf_counter()
        train_fsdp.train(
            run,
            cast(Session, session),
            batches,
            train,
            guard,
            Meter(0, args.batch),
            Saves(run, log),
            inputs,
            nullcontext,
        )
        wait()
        return time.perf_counter() - started

    kinds: dict[str, Any] = {"bare": bare, "syn": lambda: looped(repeat(batch))}
    if files:
        kinds["real"] = lambda: looped(read)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    gc.collect()
    gc.freeze()
    gc.disable()  # as main does around the loop
    for i in range(args.rounds + 1):
        names = list(kinds)
        for kind in names[i % len(names) :] + names[: i % len(names)]:
            for _ in range(BEFORE):  # the loader fills up meanwhile
                train(batch.parts, lr=1e-5)
            taken = kinds[kind]() / args.steps
            if i:
                seconds[kind].append(taken)
    alone = looped(repeat(batch), guard.read_only_step) / args.steps
    gc.enable()
    gc.unfreeze()

    print(
        f"{args.model}, {args.mode}, {args.precision}, batch {args.batch}, {args.img_size} px on "
        f"{device}, torch {torch.__version__}; {args.rounds} rounds of {args.steps}"
    )
    for kind, taken in seconds.items():
        middle = statistics.median(taken)
        print(
            f"{kind:5} {middle:8.4f} s per step ({min(taken):.4f}-{max(taken):.4f})  "
            f"{args.batch / middle:8.1f} img/s"
        )
    for over, under in (("syn", "bare"), ("real", "syn")):
        if over in seconds:
            ratios = [a / b for a, b in zip(seconds[under], seconds[over], strict=True)]
            print(
                f"{over} / {under}: {statistics.median(ratios):.3f} in the middle round "
                f"({min(ratios):.3f}-{max(ratios):.3f})"
            )
    print(f"the loop alone {1e6 * alone:.0f} us per step, with its log")
    dist.destroy_process_group()
    folder.cleanup()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
