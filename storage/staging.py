"""Let each node read a pack from its own disk (--stage-dir): a thread copies the shards there."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import mesh
from runtime.agreement import run_on_all_ranks
from storage.image_list import ImageList, fingerprint
from storage.safe_files import replacing

RESERVE = 0.05  # of a node-local disk, left free


def stage(
    files: ImageList, folder: str, ranks: mesh.Ranks, say: Callable[[str], None]
) -> ImageList:
    """Read a pack by way of `folder`, which a thread of each node's first rank begins to fill.

    AgreedError where some rank cannot make a folder there. Collective.
    """
    mine = os.path.join(folder, f"pack-{fingerprint(files)}")  # another pack may be there too

    def make_folder() -> None:
        try:
            os.makedirs(mine, 0o700, exist_ok=True)
        except OSError as error:  # refused, as any flag that cannot be used
            raise ValueError(f"--stage-dir: {error}") from None

    run_on_all_ranks(make_folder)
    staged = replace(files, staged=mine)
    if ranks.local_rank == 0:
        node = ranks.rank // ranks.local_world_size
        Thread(target=copy_shards, args=(staged, node, say), daemon=True).start()
    return staged


def copy_shards(files: ImageList, node: int, say: Callable[[str], None]) -> None:
    """Copy the shards of a staged pack until the disk is full, each node from another one on."""
    folder, first = str(files.staged), node % len(files.shards)
    try:
        for half in Path(folder).glob(".shard-*"):  # what a killed process left
            half.unlink()
        for name in (*files.shards[first:], *files.shards[:first]):
            source, copy = os.path.join(files.root, name), os.path.join(folder, name)
            if os.path.exists(copy):
                continue
            disk = shutil.disk_usage(folder)
            if disk.free - os.path.getsize(source) < RESERVE * disk.total:
                raise OSError(f"{folder} is full")
            with open(source, "rb") as shard, replacing(copy) as to:
                shutil.copyfileobj(shard, to, 2**24)
    except OSError as error:
        say(f"warning: --stage-dir: {error}; the other shards are read from where they are")
