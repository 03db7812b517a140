"""A machine that was measured: what --measure writes, and what is planned by it."""

import json
import os
from dataclasses import replace

import pytest
from ranks import on_ranks, status_of

import machines
import plan
import vit
from machines import LinkSpeed

FRONTIER = machines.MACHINES["frontier"]
SMALL = ["--model", "tiny:width=16,heads=2,mlp_width=64", "--img-size", "16", "--batch", "1"]


def test_the_time_of_blocks_and_of_a_collective_by_hand():
    config = vit.ViTConfig(8, 1, 32, 2, 8, decoder_width=8, decoder_depth=3, decoder_heads=2)
    run = plan.PlannedRun(config, "ddp", 1, 5, 32, 0.75, precision="fp32", accum=2)
    root, block, _ = (unit.numel for unit in plan.model_units(config, False))
    assert block == 3 * 8 * 8 + 3 * 8 + 8 * 8 + 8 + 2 * 8 * 32 + 32 + 8 + 4 * 8
    key = machines.part_key
    parts = {
        key("ddp", "fp32", root, 0, 16): 1e-3,
        key("ddp", "fp32", block, 2, 1 + 4): 1e-2,
        key("ddp", "fp32", block, 2, 1 + 16): 1e-1,
    }
    links = {
        "node all_gather": LinkSpeed(2e9, 1e-4, 3e-5),
        "network all_gather": LinkSpeed(4e9, 1e-3, 1e-4),
    }
    mine = replace(FRONTIER, measured="by hand", parts=parts, links=links, ranks_per_node=4)
    mine = replace(mine, name="mine", ranks_per_package=1)
    assert plan.Plan(run, mine).seconds["compute"] == pytest.approx(10 * 0.311)
    with pytest.raises(ValueError, match="mine was measured for other blocks"):
        plan.Plan(replace(run, precision="bf16"), mine)

    def seconds(ranks, stride):
        sent = plan.Collective("all_gather", "root", 10**6, 1, ranks, stride)
        return plan.collective_seconds(mine, 8, sent)

    assert seconds(4, 1) == pytest.approx(1e-4 + 3 * 3e-5 + 0.75e6 / 2e9)
    # over two nodes: each rank has a quarter of its node's network
    assert seconds(2, 4) == pytest.approx(1e-3 + 1e-4 + 0.5e6 / 1e9)


def measure_small() -> int:
    """On every rank: measure with tensors of a few numbers, as one of two nodes of two ranks."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    machines.ROUND_SECONDS = 1e-3
    machines.PAYLOADS = {"cpu": (2**10, 2**16)}
    path = os.environ["FOLDER"] + "/mine.json"
    return status_of(plan.main, ["--measure", path, "--device", "cpu", *SMALL])


@pytest.mark.slow
def test_four_ranks_measure_node_and_network(tmp_path, monkeypatch, capsys):
    """A second model is added. The file plans runs of any number of ranks in any mode."""
    assert on_ranks(4, measure_small, tmp_path) == [0] * 4
    path = str(tmp_path / "mine.json")
    machine = machines.read_machine(path)
    assert machine.ranks_per_node == 2
    measured = {f"{a} {b}" for a in ("node", "network") for b in machines.COLLECTIVES}
    assert {*machine.links} == measured
    assert all(rate > 0 and launch >= 0 for rate, launch, _ in machine.links.values())
    monkeypatch.setattr(machines, "ROUND_SECONDS", 1e-3)
    low = [*SMALL, "--precision", "bf16"]
    assert status_of(plan.main, ["--measure", path, "--device", "cpu", *low]) == 0
    # root, encoder, decoder; unsharded or not; fp32, bf16
    assert len(machines.read_machine(path).parts) == 12
    capsys.readouterr()
    for words in ([*SMALL, "--precision", "fp32"], low):
        assert (
            plan.main([*words, "--machine", path, "--world-size", "8", "--compare", "--json"]) == 0
        )
        plans = json.loads(capsys.readouterr().out)
        assert all(p["machine"] == "mine" and p["seconds"]["compute"] > 0 for p in plans)
    assert status_of(plan.main, ["--machine", path, "--model", "base"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("path", ["frontier", "no/such/folder/x"])
def test_where_no_file_can_be_written_nothing_is_measured(path, monkeypatch, capsys):
    monkeypatch.setattr(machines, "measure_links", lambda *given: pytest.fail("measured"))
    assert status_of(plan.main, ["--measure", path, "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
