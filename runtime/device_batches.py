"""Open the loader of a run, and copy its batches to the device."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import data
import mesh
from runtime import process
from runtime.run import Run
from runtime.session import Session


@dataclass(frozen=True)
class Batch:
    """The images that a rank trains on in one step."""

    parts: list[tuple[Tensor, Tensor]]  # (images, noise) per accumulation step, on the device
    image_ids: list[int]
    bad: list[tuple[int, str]]  # (image_id, reason): unreadable, replaced by others
    error: Exception | None = None  # why this is the batch of an earlier step


class Batches(Iterator[Batch]):
    """The batches of a run, one per step; `first` is there before the loop's clock starts."""

    def __init__(self, loaded: Iterator[Batch], workers: int) -> None:
        """Fetch the first batch."""
        self.loaded, self.workers = loaded, workers
        self.last = next(loaded)
        self.first: Batch | None = self.last

    def __next__(self) -> Batch:
        """Return the batch of the next step; once the loader has failed, the last one and why."""
        if self.first:
            self.first = None  # its memory is free after its step
        elif not self.last.error:
            try:
                self.last = next(self.loaded)
            except (torch.OutOfMemoryError, torch.AcceleratorError):  # of the GPU, not the loader
                raise
            except Exception as error:  # all ranks learn of it together: none waits for this one
                self.last = replace(self.last, bad=[], error=error)
        return self.last


def worker_count(workers: int | None, ranks: mesh.Ranks) -> int:
    """Return --workers, by default one for each CPU core of this rank but one, at most 6."""
    if workers is not None:
        return workers
    # srun binds a rank to cores of its own; other launchers leave it those of the node
    share = 1 if ranks.launcher == "srun" else ranks.local_world_size
    return min(6, max(1, mesh.process_cores() // share) - 1)


def open_batches(run: Run, session: Session, files: data.ImageSource, steps: range) -> Batches:
    """Start the loader of `steps` and fetch the first batch."""
    config, ranks, device = run.config, session.ranks, session.device
    alone = config.run_mode == "syn"  # compute and communication: the same batch again and again
    workers = worker_count(config.workers, ranks)
    loader = data.build_loader(
        files,
        img_size=config.img_size,
        patches=run.patches,
        seed=config.seed,
        global_batch=run.global_batch,
        local_batch=run.local_batch,
        steps=steps[:1] if alone else steps,
        rank=run.data_rank(ranks.rank),
        world_size=run.data_ranks,
        workers=workers,
        pin_memory=device.type == "cuda",
        exact=config.exact_decode,
        stats=run.channel_stats or data.IMAGENET,
    )
    loaded = device_batches(loader, config.accum, device)
    return Batches(repeat(next(loaded)) if alone else loaded, workers)


def device_batches(
    loader: Iterable[data.LocalBatch], accum: int, device: torch.device
) -> Iterator[Batch]:
    """Yield the batch of each step, of `accum` local batches, on `device`."""
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader.multiprocessing_context = process.fork_server()
        loader.worker_init_fn = process.start_worker
    batches = iter(loader)
    while step := list(islice(batches, accum)):
        parts = [
            (b.image.to(device, non_blocking=True), b.noise.to(device, non_blocking=True))
            for b in step
        ]
        ids = [i for b in step for i in b.image_ids]
        bad = [pair for b in step for pair in b.bad]
        yield Batch(parts, ids, bad)
