"""Let each node keep the images that it has read on its own disk (--stage-dir).

A node reads each image from the shared file system once; a background process per node reads ahead
what its ranks will need.
"""

import os
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess

import numpy as np

import data
import mesh
from runtime import agreement, process
from runtime.run import Run
from storage.image_list import ImageList
from storage.staged_images import Staged


def stage(
    run: Run, files: ImageList, ranks: mesh.Ranks, say: Callable[[str], None], steps: range
) -> Staged:
    """Read `files` by way of --stage-dir, which one process per node begins to fill for `steps`.

    AgreedError where some rank cannot write there. Collective.
    """

    def open_folder() -> Staged:
        try:
            return Staged(files, str(run.config.stage_dir))
        except OSError as error:  # refused, as any flag that cannot be used
            raise ValueError(f"--stage-dir: {error}") from None

    staged = agreement.run_on_all_ranks(open_folder)
    if ranks.local_rank == 0:
        last = ranks.rank + ranks.local_world_size - 1
        on_node = range(run.data_rank(ranks.rank), run.data_rank(last) + 1)
        wanted = partial(
            wanted_on_node,
            len(files),
            run.config.seed,
            run.global_batch,
            run.local_batch,
            run.data_ranks,
            on_node,
            steps,
        )
        fill_in_background(staged, wanted)
    warnings = agreement.gather_to_rank0(staged.shortage() if ranks.local_rank == 0 else None)
    for text in sorted({text for text in warnings or [] if text})[:3]:
        say(f"warning: {text}")
    return staged


def wanted_on_node(
    images: int,
    seed: int,
    global_batch: int,
    local_batch: int,
    world_size: int,
    ranks: range,
    steps: range,
) -> np.ndarray:
    """List the images that some of these ranks will read in these steps -> (n,) int64, sorted."""
    order = data.ImageOrder(images, global_batch, seed)
    wanted = np.zeros(images, bool)
    for step in steps:
        dealt = data.deal(step, global_batch, local_batch, world_size)
        positions = dealt[:, ranks.start : ranks.stop].ravel().tolist()
        wanted[[order.image_at(position) for position in positions]] = True
        if wanted.all():
            break
    return np.flatnonzero(wanted)


def fill_in_background(staged: Staged, wanted: Callable[[], np.ndarray]) -> BaseProcess:
    """Start the process that fills a node's disk; it ends when that is done, or with this one."""
    server = process.fork_server()
    helper = server.Process(target=_fill_at_low_priority, args=(staged, wanted), daemon=True)
    helper.start()
    return helper


def _fill_at_low_priority(staged: Staged, wanted: Callable[[], np.ndarray]) -> None:
    process.start_helper()
    os.nice(10)  # the loader workers come first
    staged.fill(wanted)
