"""Nodes that differ in their number of ranks: what a rank derives from its own node."""

import os
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from ranks import NANO_ARGV, Result, Run, join, on_ranks, one_run, read_log

import prepare
from runtime import devices
from runtime.agreement import AgreedError
from runtime.config import Config
from runtime.image_source import check_same_pack, list_folder
from runtime.run import resolve_on_nodes, try_plan

NODE = (0, 0, 1, 2)  # of each rank: three nodes with 2, 1 and 1 ranks
LOCAL = (0, 1, 0, 0)
COUNT = (2, 2, 1, 1)
SHORT = [*NANO_ARGV, "--mode", "hybrid", "--steps", "2", "--save-every", "none", "--timeout", "20"]
SENTENCE = "the nodes have from 1 to 2 ranks, so --group has no default: type --group N"


def as_torchrun(rank: int) -> dict[str, str]:
    return {
        "LOCAL_RANK": str(LOCAL[rank]),
        "LOCAL_WORLD_SIZE": str(COUNT[rank]),
        "GROUP_RANK": str(NODE[rank]),
    }


def as_srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": str(LOCAL[rank]),
        "SLURM_NODEID": str(NODE[rank]),
        "SLURM_TASKS_PER_NODE": "2,1(x2)",
    }


def train_on_three_nodes() -> list[Result]:
    """On four ranks: the default group by each launcher, then one that is given."""
    rank = int(os.environ["RANK"])
    folder = Path(os.environ["FOLDER"])
    default = Run(SHORT, params=False)
    given = Run([*SHORT, "--group", "2"], params=False)
    os.environ.update(as_torchrun(rank))
    results = [one_run(default, folder / "torchrun", rank)]
    os.environ.update(as_srun(rank))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        del os.environ[name]
    results.append(one_run(default, folder / "srun", rank))
    results.append(one_run(given, folder / "given", rank))
    os.environ["RANK"] = str(rank)
    return results


@pytest.mark.slow
def test_the_ranks_agree_that_nodes_differ_and_say_what_to_type(tmp_path):
    by_rank = on_ranks(4, train_on_three_nodes, tmp_path)
    for results in by_rank:
        assert [result.status for result in results] == [[2], [2], [0]]
    by_torchrun, by_srun, _ = by_rank[0]
    for result in (by_torchrun, by_srun):
        assert result.errors.count("error: ") == 1 and SENTENCE in result.errors, result.errors
        assert "one of 1, 2, 4, or start as many ranks on each node" in result.errors
    start, _, _ = read_log(tmp_path / "given" / "log.jsonl")
    assert start["mesh"]["shard"] == 2


def test_what_needs_no_node_is_not_refused():
    for flags in ({"mode": "full_shard"}, {"mode": "ddp"}, {"mode": "hybrid", "group": 4}):
        run = resolve_on_nodes(Config("tiny", **flags), 4, fewest=1, most=2)
        assert run.node_ranks == 2 and run.mesh_shape in ((1, 4), (4, 1))


def test_the_memory_of_a_cpu_rank_is_its_part_of_the_node(monkeypatch):
    """Under srun too, which sets no LOCAL_WORLD_SIZE."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    seen = []
    original = devices.rank_memory_gib

    def remember(device, node_ranks):
        seen.append(original(device, node_ranks))
        return seen[-1]

    monkeypatch.setattr(devices, "rank_memory_gib", remember)
    for ranks in (1, 4):
        run = resolve_on_nodes(Config("tiny", mode="full_shard"), 4, fewest=1, most=ranks)
        try_plan(run, torch.device("cpu"), pytest.fail)
    assert seen[0] == pytest.approx(4 * seen[1])


def open_a_pack_each() -> str:
    """What a rank says of packs of its own: the same one everywhere, then rank 1's another."""
    rank = join()
    folder = Path(os.environ["FOLDER"])
    check_same_pack(list_folder(str(folder / "new")))
    check_same_pack(list_folder(str(ROOT / "examples" / "tiles" / "heldout")))
    own = "old" if rank == 1 else "new"
    try:
        check_same_pack(list_folder(str(folder / own)))
    except AgreedError as error:
        return str(error)
    return ""


def test_a_pack_of_a_node_is_the_one_of_rank_0(tmp_path):
    """Each rank opens the pack itself: an older copy would have it train on other images."""
    tiles = str(ROOT / "examples" / "tiles" / "heldout")
    for name, more in (("new", []), ("old", ["--exclude", "ice"])):
        assert prepare.main(["pack", tiles, str(tmp_path / name), "--workers", "1", *more]) == 0
    for said in on_ranks(2, open_a_pack_each, tmp_path):
        assert "differs from the pack on the node of rank 0: copy it again (rank 1)" in said
