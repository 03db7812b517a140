"""Batches on the device, from the local batches of a loader."""

import json
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch import Tensor

import data
import mesh
from runtime.config import Run


@dataclass(frozen=True)
class Batch:
    """What a rank trains on in one step."""

    parts: list[tuple[Tensor, Tensor]]  # (images, noise) of each accumulation step, on the device
    image_ids: list[int]
    bad: list[tuple[int, str]]  # (image, reason): unreadable, others stand in for them
    cost: Tensor  # (5,) as in data.Sample, of all its images


NO_BATCH = Batch([], [], [], torch.zeros(5))


class LoaderFailed(RuntimeError):
    """The data loader of this rank failed or ended early."""


def open_batches(
    run: Run,
    ranks: mesh.Ranks,
    device: torch.device,
    files: data.ImageFiles | None,
    steps: range,
    say: Callable[[str], None],
) -> tuple[Iterator[Batch], Batch, int]:
    """Start the loader; return the batches of `steps`, the first of them, the number of workers.

    The first batch is fetched here, before the loop's clock starts.
    """
    config, workers = run.config, run.config.workers
    if workers is None:
        workers = min(6, mesh.cpu_cores(ranks) - 1)
    source: data.Files | None = files
    if files and config.stage_dir and config.run != "syn":
        from storage import staging

        source = staging.stage(run, files, ranks, say, steps)
    loader = data.build_loader(
        source,
        img_size=config.img_size,
        patches=run.patches,
        seed=config.seed,
        global_batch=run.global_batch,
        local_batch=run.local_batch,
        steps=steps[:1] if config.run == "syn" else steps,
        rank=ranks.rank,
        world_size=run.world_size,
        workers=workers,
        pin_memory=device.type == "cuda",
        exact=config.exact_decode,
    )
    batches = device_batches(loader, config.accum, device)
    first = next(batches, NO_BATCH)  # none where no step is left
    if config.run == "syn":  # compute and communication alone: the same batch again and again
        return repeat(first), first, workers
    return chain([first], batches), first, workers


def device_batches(
    loader: Iterable[data.Sample], accum: int, device: torch.device
) -> Iterator[Batch]:
    """The loader's local batches, copied to the device, `accum` of them for each step.

    To a GPU on a stream of its own: asked for while the step before still runs, a batch is there
    when it has ended. LoaderFailed where the loader fails.
    """
    copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with loading(), signals_blocked():
        batches = iter(loader)
    while step := fetch(batches, accum):
        with torch.cuda.stream(copy_stream):  # type: ignore[arg-type] # None: nothing changes
            parts = [
                (b.image.to(device, non_blocking=True), b.noise.to(device, non_blocking=True))
                for b in step
            ]
        if copy_stream:
            steps_stream = torch.cuda.current_stream(device)
            steps_stream.wait_stream(copy_stream)
            for copy in chain.from_iterable(parts):
                copy.record_stream(steps_stream)  # its memory is free when the step is done
        ids: Any = [b.image_id for b in step]  # (B,) each, on the host
        bad = [
            (index, reason)
            for b in step
            for text in b.bad
            if text
            for index, reason in json.loads(text)
        ]
        cost = torch.stack([b.cost.sum(0) for b in step]).sum(0)  # (5,)
        yield Batch(parts, torch.cat(ids).tolist(), bad, cost)


@contextmanager
def loading() -> Iterator[None]:
    """Turn errors of the loader into LoaderFailed, but not those of a GPU, whose memory it pins."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, OSError, EOFError) as error:  # a worker was killed, a disk fails
        died = "a DataLoader worker has died: " * isinstance(error, (ConnectionError, EOFError))
        raise LoaderFailed(f"{died}{type(error).__name__}: {error}") from error


def fetch(batches: Iterator[data.Sample], count: int) -> list[data.Sample]:
    """The loader's next local batches; fewer at its end."""
    with loading():
        return list(islice(batches, count))


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started meanwhile never get the signals that ask this one to stop.

    A launcher sends them to all processes of a rank, and they must reach the rank's own alone. Set
    twice, because starting multiprocessing's resource tracker unblocks SIGTERM.
    """
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
