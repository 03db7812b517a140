"""Open the loader of a run, and copy its batches to the device while the step before still runs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import data
import mesh
from runtime import process
from runtime.agreement import AgreedError
from runtime.run import Run


@dataclass(frozen=True)
class Batch:
    """The images that a rank trains on in one step."""

    parts: list[tuple[Tensor, Tensor]]  # (images, noise) per accumulation step, on the device
    image_ids: list[int]
    bad: list[tuple[int, str]]  # (image_id, reason): unreadable, replaced by others
    stats: data.LoadStats
    error: Exception | None = None  # of the loader, which has no further batch


NO_BATCH = Batch([], [], [], data.LoadStats())


class LoaderFailed(RuntimeError):
    """The data loader of this rank failed or ended early."""


class Batches:
    """The batches of a run's steps; after a loader failure the last one again, with its error."""

    def __init__(self, batches: Iterator[Batch], first: Batch, workers: int) -> None:
        self.batches, self.first, self.workers = batches, first, workers
        self.last, self.error = first, cast(Exception | None, None)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            if self.error is None:
                self.last = next(self.batches)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # of the GPU, not the loader
            raise
        except Exception as error:
            self.error = error
        return replace(self.last, error=self.error)


def open_batches(run: Run, session: Any, files: data.ImageSource, steps: range) -> Batches:
    """Start the loader; return the batches of `steps`, the first of which is fetched here.

    Raises LoaderFailed, and AgreedError where --stage-dir cannot be used. Collective.
    """
    ranks, device, say = session.ranks, session.device, session.log.say
    config, workers = run.config, run.config.workers
    if workers is None:
        workers = min(6, mesh.cpu_cores(ranks) - 1)
    if config.stage_dir and config.run != "syn":
        try:
            from storage import staging
        except ModuleNotFoundError:
            text = "--stage-dir needs the folder storage/: copy it too"
            raise AgreedError(text, status=2) from None
        files = staging.stage(run, cast(Any, files), ranks, say, steps)
    loader = data.build_loader(
        files,
        img_size=config.img_size,
        patches=run.patches,
        seed=config.seed,
        global_batch=run.global_batch,
        local_batch=run.local_batch,
        steps=steps[:1] if config.run == "syn" else steps,
        rank=run.data_rank(ranks.rank),
        world_size=run.data_ranks,
        workers=workers,
        pin_memory=device.type == "cuda",
        exact=config.exact_decode,
        stats=run.channel_stats or data.IMAGENET,
    )
    batches = device_batches(loader, config.accum, device)
    first = next(batches, NO_BATCH)  # none where no step is left
    if config.run == "syn":  # compute and communication alone: the same batch again and again
        return Batches(repeat(first), first, workers)
    return Batches(chain([first], batches), first, workers)


def device_batches(
    loader: Iterable[data.LocalBatch], accum: int, device: torch.device
) -> Iterator[Batch]:
    """Yield the batch of each step, of `accum` local batches, on `device`.

    To a GPU they are copied on a stream of their own: requested while the step before still runs, a
    batch is there when that step has ended. Raises LoaderFailed.
    """
    copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with loader_errors():
        if isinstance(loader, DataLoader) and loader.num_workers:
            loader.multiprocessing_context = process.fork_server()
            loader.worker_init_fn = process.start_worker
        batches = iter(loader)
    while step := fetch(batches, accum):
        with torch.cuda.stream(copy_stream):  # type: ignore[arg-type] # None: nothing changes
            parts = [
                (b.image.to(device, non_blocking=True), b.noise.to(device, non_blocking=True))
                for b in step
            ]
        if copy_stream:
            training_stream = torch.cuda.current_stream(device)
            training_stream.wait_stream(copy_stream)
            for tensor in chain.from_iterable(parts):
                tensor.record_stream(training_stream)  # its memory is free when the step is done
        ids = [i for b in step for i in b.image_ids]
        bad = [pair for b in step for pair in b.bad]
        yield Batch(parts, ids, bad, data.total(b.stats for b in step))


def fetch(batches: Iterator[data.LocalBatch], count: int) -> list[data.LocalBatch]:
    """Take the next local batches of a loader; fewer at its end."""
    with loader_errors():
        return list(islice(batches, count))


@contextmanager
def loader_errors() -> Iterator[None]:
    """Turn errors of the loader into LoaderFailed, but not those of a GPU, whose memory it pins."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (RuntimeError, OSError, EOFError, MemoryError) as error:  # a worker or a disk fails
        died = "a DataLoader worker has died: " * isinstance(error, (ConnectionError, EOFError))
        raise LoaderFailed(f"{died}{type(error).__name__}: {error}") from error
