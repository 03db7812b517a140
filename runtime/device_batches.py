"""Open the loader of a run, and copy its batches to the device.

The way of an image: `ImageList.read` -> bytes; `data.Images.load` -> data.Sample; `data.collate` ->
data.MicroBatch, on the CPU; `device_batches` -> Batch, the images and noise of all
accumulation steps of one step, on the device; `Monitor.next_batch` hands it to the training loop.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import data
import mesh
from runtime import process
from runtime.config import Config
from runtime.run import Run
from runtime.session import Session

MAX_WORKERS = 16  # the default is at most this: each holds a few hundred MB and loaded batches


@dataclass(frozen=True)
class Batch:
    """The images that a rank trains on in one step."""

    micro_batches: list[tuple[Tensor, Tensor]]  # (images, noise), one per accumulation step
    image_ids: list[int]
    bad: list[tuple[int, str]]  # (image_id, reason): unreadable, replaced by others


def worker_count(workers: int | None, ranks: mesh.Ranks) -> int:
    """Return --workers, by default one for each CPU core of this rank but one, at most 16."""
    if workers is not None:
        return workers
    # srun binds a rank to cores of its own; other launchers leave it those of the node
    share = 1 if ranks.launcher == "srun" else ranks.local_world_size
    cores = max(1, mesh.process_cores() // share)
    return min(MAX_WORKERS, cores - 1)


def steps_ahead(config: Config, ranks: mesh.Ranks) -> int:
    """Return the number of steps whose batches may have been read when the clock starts."""
    first_step = 1  # taken before the clock starts; meanwhile the workers read ahead of it
    batches = worker_count(config.workers, ranks) * data.PREFETCH
    return first_step + math.ceil(batches / config.accum)


def open_batches(
    run: Run, session: Session, files: data.ImageSource, steps: range
) -> Iterator[Batch]:
    """Start the loader of `steps`; return their batches, one per step."""
    config = run.config
    ranks = session.ranks
    device = session.device
    alone = config.run_mode == "syn"  # compute and communication: the same batch again and again
    loader = data.build_loader(
        files,
        img_size=config.img_size,
        patches=run.patches,
        seed=config.seed,
        global_batch=run.global_batch,
        micro_batch_size=run.local_batch,
        steps=steps[:1] if alone else steps,
        rank=ranks.rank // config.tp,
        world_size=run.data_ranks,
        workers=worker_count(config.workers, ranks),
        pin_memory=device.type == "cuda",
        exact=config.exact_decode,
        stats=run.pixel_stats,
    )
    loaded = device_batches(loader, config.accum, device)
    return repeat(next(loaded)) if alone else loaded


def device_batches(
    loader: Iterable[data.MicroBatch], accum: int, device: torch.device
) -> Iterator[Batch]:
    """Yield the batch of each step, of `accum` micro-batches, on `device`."""
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader.multiprocessing_context = process.fork_server()
        loader.worker_init_fn = process.start_worker
    batches = iter(loader)
    while True:
        of_this_step = list(islice(batches, accum))
        if not of_this_step:
            return
        batch = Batch(micro_batches=[], image_ids=[], bad=[])
        for local in of_this_step:
            images = local.image.to(device, non_blocking=True)
            noise = local.noise.to(device, non_blocking=True)
            batch.micro_batches.append((images, noise))
            batch.image_ids.extend(local.image_ids)
            batch.bad.extend(local.bad)
        yield batch
