"""Nodes that differ in their number of ranks: what a rank derives from its own node."""

import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import ROOT
from ranks import join, on_ranks

import data
import mesh
import prepare
import run

PLACES = {  # (local rank, ranks on the node) of four ranks
    "even": ((0, 2), (1, 2), (0, 2), (1, 2)),
    "one node": ((0, 4), (1, 4), (2, 4), (3, 4)),
    "uneven": ((0, 2), (1, 2), (0, 1), (0, 1)),
    "round robin": ((0, 2), (0, 2), (1, 2), (1, 2)),
}


def check_places() -> list[str]:
    """On every rank: what is said of each of PLACES."""
    rank = join()
    found = []
    for places in PLACES.values():
        local_rank, on_node = places[rank]
        try:
            mesh.check_nodes(mesh.Ranks(rank, 4, local_rank, on_node, "srun", {}))
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_all_ranks_refuse_nodes_on_which_groups_would_be_spread(tmp_path):
    for even, one, uneven, robin in on_ranks(4, check_places, tmp_path):
        assert even == one == ""
        assert "from 1 to 2 ranks: start equally many on each node" in uneven
        assert "not numbered node by node" in robin and "--distribution=block" in robin


def open_a_pack_each() -> str:
    """What a rank says of packs of its own: the same one everywhere, then rank 1's another."""
    rank = join()
    folder = Path(os.environ["FOLDER"])

    def find(pack: Path) -> None:
        run.find_images(Namespace(include=None, exclude=None), str(pack))

    find(folder / "new")
    find(ROOT / "examples" / "tiles" / "heldout")
    own = "old" if rank == 1 else "new"
    scan = data.scan
    data.scan = lambda path, *patterns: scan(str(folder / own), *patterns)
    try:
        find(folder / "new")
    except run.Refused as error:
        return str(error)
    return ""


def test_a_pack_of_a_node_is_the_one_of_rank_0(tmp_path):
    """Each rank opens the pack itself: an older copy would have it train on other images."""
    tiles = str(ROOT / "examples" / "tiles" / "heldout")
    for name, more in (("new", []), ("old", ["--exclude", "ice"])):
        assert prepare.main(["pack", tiles, str(tmp_path / name), "--workers", "1", *more]) == 0
    for said in on_ranks(2, open_a_pack_each, tmp_path):
        assert "is not the pack that rank 0 sees: copy it again" in said
