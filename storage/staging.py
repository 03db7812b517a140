"""Let each node read a pack from its own disk (--stage-dir): a thread copies the shards there."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from threading import Thread

import mesh
from runtime import agreement
from storage.image_list import ImageList, fingerprint
from storage.safe_files import replacing


def stage(
    files: ImageList, folder: str, ranks: mesh.Ranks, say: Callable[[str], None]
) -> ImageList:
    """Read a pack by way of `folder`, which a thread of each node's first rank begins to fill.

    AgreedError where some rank cannot make a folder there. Collective.
    """

    def open_folder() -> ImageList:
        mine = os.path.join(folder, f"pack-{fingerprint(files)}")  # another pack may be there too
        try:
            os.makedirs(mine, 0o700, exist_ok=True)
        except OSError as error:  # refused, as any flag that cannot be used
            raise ValueError(f"--stage-dir: {error}") from None
        return replace(files, staged=mine)

    found = agreement.run_on_all_ranks(open_folder)
    if ranks.local_rank == 0:
        node = ranks.rank // ranks.local_world_size
        Thread(target=copy_shards, args=(found, node, say), daemon=True).start()
    return found


def copy_shards(files: ImageList, node: int, say: Callable[[str], None]) -> None:
    """Copy the shards of a staged pack until the disk is full, each node from another one on."""
    folder, count = str(files.staged), len(files.shards)
    try:
        for name in (files.shards[(node + i) % count] for i in range(count)):
            if not os.path.exists(f"{folder}/{name}"):
                with (
                    open(f"{files.root}/{name}", "rb") as shard,
                    replacing(f"{folder}/{name}") as to,
                ):
                    shutil.copyfileobj(shard, to, 2**24)
    except OSError as error:
        say(f"warning: --stage-dir: {error}; the other shards are read from where they are")
