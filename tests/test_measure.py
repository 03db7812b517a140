"""A machine that was measured: what is fitted, what --measure writes, who uses the file."""

import json
import os
from dataclasses import replace

import pytest
from parity import TILES
from ranks import on_ranks, read_log

import plan
import train_fsdp
import vit
from planner import fitting, machines
from planner.estimate import BlockSize, Plan, block_seconds, collective_seconds
from planner.machines import BlockSpeed, LinkSpeed
from planner.traffic import PlannedCollective, PlannedRun
from runtime import dry_run, measure_machine

SPEED = BlockSpeed("fp32", 5e10, 1e-7, 6e-9, 2e-9, 3e-3)
NODE = LinkSpeed("node", "all_gather", 2e9, 1e-4, 3e-5)
MINE = replace(
    machines.MACHINES["frontier"],
    name="mine",
    device="cpu",
    ranks_per_package=1,
    ranks_per_node=4,
    blocks=(SPEED, replace(SPEED, precision="bf16")),
    links=(NODE, LinkSpeed("network", "all_gather", 4e9, 1e-3, 1e-4)),
)


def write_machine(path) -> str:
    """Write MINE as --measure does."""
    changes = {
        "device": "cpu",
        "ranks_per_package": 1,
        "ranks_per_node": 4,
        "blocks": MINE.blocks,
        "links": MINE.links,
    }
    text = machines.machine_file(machines.MACHINES["frontier"], changes, ["doubling_loss"])
    path.write_text(text)
    return str(path)


def test_a_machine_file_is_read_as_it_was_written(tmp_path):
    assert machines.read_machine(write_machine(tmp_path / "mine.json")) == MINE


def test_blocks_and_links_are_fitted_to_what_they_took():
    times = []
    for width, heads in ((128, 4), (768, 12)):
        for images, tokens in ((4, 17), (16, 17), (2, 197), (1, 401)):
            size = BlockSize(images, tokens, width, heads, 12 * width**2, width // heads)
            times.append((size, block_seconds(size, SPEED)))
    fitted = fitting.fit_block_speed("fp32", times, host_seconds=0.0)
    for name, value in vars(SPEED).items():
        assert name == "precision" or getattr(fitted, name) == pytest.approx(value, rel=1e-6)
    # a launch, a hop to each of the others, (n - 1) / n of the tensor sent by each rank
    found = [
        fitting.CollectiveTime(
            "node", "all_gather", n, size, 1e-4 + (n - 1) * 3e-5 + size * (n - 1) / n / 2e9
        )
        for n in (2, 4)
        for size in (2**16, 2**20, 2**24)
    ]
    like = machines.MACHINES["frontier"]
    (link,) = fitting.fit_link_speeds(found, node_ranks=4, like=like)
    for name in ("bytes_per_second", "launch_seconds", "hop_seconds"):
        assert getattr(link, name) == pytest.approx(getattr(NODE, name), rel=1e-6)


def test_what_two_nodes_took_plans_many():
    """Two nodes do not tell a launch from hops; a plan of 64 nodes consists of hops."""
    truth = machines.MACHINES["frontier"]
    for scale in (1, 0.1):  # an interconnect of this latency, compared with the nearest machine's
        found = []
        for size in (2**16, 2**20, 2**24):
            launch = scale * (truth.launch_seconds + truth.hop_seconds)
            seconds = launch + size / 2 * 8 / truth.network_bytes_per_second
            found.append(fitting.CollectiveTime("network", "all_gather", 2, size, seconds))
        (link,) = fitting.fit_link_speeds(found, node_ranks=8, like=truth)
        assert link.hop_seconds == pytest.approx(scale * truth.hop_seconds, rel=1e-6)
        assert link.launch_seconds == pytest.approx(scale * truth.launch_seconds, rel=1e-6)
        assert link.bytes_per_second == pytest.approx(truth.network_bytes_per_second, rel=1e-6)


def test_noise_makes_no_cost_negative():
    costs = fitting.fit_costs([(1, 1), (1, 2), (1, 4)], [3.0, 2.0, 1.0])
    assert min(costs) == 0 < max(costs)


def test_the_time_of_a_block_and_of_a_collective_by_hand():
    """Two blocks of width 8; the second block is the decoder's."""
    config = vit.ViTConfig(8, 1, 32, 2, 8, decoder_width=8, decoder_depth=1, decoder_heads=2)
    run = PlannedRun(config, "ddp", 1, 3, 32, 0.75, precision="fp32")
    expected = 0.0
    for tokens in (1 + 4, 1 + 16):
        weights = 3 * 8 * 8 + 3 * 8 + 8 * 8 + 8 + 2 * 8 * 32 + 32 + 8 + 4 * 8
        scores = 3 * 2 * tokens**2
        flops = 6 * (3 * tokens * weights + 2 * scores * 4)
        expected += flops / 5e10 + 3 * tokens * 8 * 1e-7 + scores * 6e-9 + weights * 2e-9 + 3e-3
    outside = vit.flops_per_image(replace(config, depth=0, decoder_depth=0), 32, 0.75)
    expected += 3 * outside / 5e10
    assert Plan(run, MINE).seconds["compute"] == pytest.approx(expected)

    def seconds(ranks, stride):
        sent = PlannedCollective("all_gather", "root", 10**6, 1, ranks, stride)
        return collective_seconds(MINE, 8, sent)

    assert seconds(4, 1) == pytest.approx(1e-4 + 3 * 3e-5 + 0.75e6 / 2e9)
    # over two nodes: each rank has a quarter of its node's network
    assert seconds(2, 4) == pytest.approx(1e-3 + 1e-4 + 0.5e6 / 1e9)


def test_frontier_is_as_fast_as_it_was(capsys):
    """The number of the plan before machines could be measured."""
    flags = "--model 15b --mode hybrid --group 4 --world-size 512 --batch 32 --json"
    assert plan.main([*flags.split(), "--machine", "frontier"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"]["step"] == pytest.approx(3.727125, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "batch", "seconds"),  # of a step in bf16 on one H200, by benchmarks.gpu (torch 2.11)
    [("base", 512, 0.1005), ("huge", 512, 0.3682), ("1b", 512, 0.4611), ("3b", 256, 0.6232)],
)
def test_a_step_on_an_h200_takes_what_it_took(model, batch, seconds, capsys):
    flags = f"--model {model} --mode ddp --world-size 1 --batch {batch} --machine dgx-h200 --json"
    assert plan.main(flags.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"]["step"] == pytest.approx(seconds, rel=0.05)


def measure_small() -> tuple[int, dict]:
    """On every rank: measure, with blocks and tensors of a few numbers."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    measure_machine.ROUND_SECONDS = 1e-3
    measure_machine.CPU_SIZES = measure_machine.Sizes(
        shapes=((16, 2, 64), (32, 2, 128)),
        batches=((1, 5), (2, 5), (1, 17)),
        product_rows=8,
        payloads=(2**10, 2**12, 2**16),
        optimizer_numel=2**10,
        toy=vit.ViTConfig(16, 1, 64, 2, 4, decoder_width=16, decoder_depth=1, decoder_heads=2),
        toy_images=1,
    )
    path = os.environ["FOLDER"] + "/mine.json"
    status = plan.main(["--measure", path, "--device", "cpu", "--timeout", "60"])
    return status, vars(machines.read_machine(path))


def measure_uneven_nodes() -> int:
    """On every rank of three nodes, which have 2, 1 and 1 ranks."""
    node = (0, 0, 1, 2)[int(os.environ["RANK"])]
    ranks = (2, 1, 1)[node]
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK=str(node), LOCAL_RANK="0")
    path = os.environ["FOLDER"] + "/mine.json"
    words = ["--measure", path, "--device", "cpu", "--mode", "full_shard", "--timeout", "60"]
    return plan.main(words)


@pytest.mark.slow
def test_nodes_that_differ_are_not_measured(tmp_path):
    assert on_ranks(4, measure_uneven_nodes, tmp_path) == [2] * 4
    said = (tmp_path / "rank0.txt").read_text()
    assert "as many ranks on each node" in said and "Traceback" not in said
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.full
@pytest.mark.slow
def test_four_ranks_measure_node_and_network(tmp_path, capsys):
    """As two nodes of two ranks; the file plans runs of any number of ranks."""
    found = on_ranks(4, measure_small, tmp_path)
    assert [status for status, _ in found] == [0] * 4
    machine = found[0][1]
    assert machine["ranks_per_node"] == 2 and machine["device"] == "cpu"
    measured = {(link.level, link.kind) for link in machine["links"]}
    assert measured == {(a, b) for a in ("node", "network") for b in machines.COLLECTIVES}
    assert all(link.bytes_per_second > 0 for link in machine["links"])
    assert {speed.precision for speed in machine["blocks"]} == {"fp32", "bf16"}
    path = tmp_path / "mine.json"
    missing = json.loads(path.read_text())["not_measured"]
    assert "package_bytes_per_second" in missing and "network_bytes_per_second" not in missing
    said = (tmp_path / "rank0.txt").read_text()
    assert "products in fp32" in said and "not measured: doubling_loss" in said
    assert plan.main(["--machine", str(path), "--model", "tiny", "--world-size", "8"]) == 0
    assert "ranks of mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "sentence"),
    [("frontier", "is the name of a known machine"), ("no/such/folder/x", "No such file")],
)
def test_where_no_file_can_be_written_nothing_is_measured(path, sentence, monkeypatch, capsys):
    monkeypatch.setattr(measure_machine.Measurement, "all", lambda self: pytest.fail("measured"))
    assert plan.main(["--measure", path, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_the_dry_run_plans_for_a_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "simulate", lambda *a: None)
    path = write_machine(tmp_path / "mine.json")
    flags = ["--model", "tiny", "--img-size", "32", "--batch", "2", "--out", "never-made"]
    flags += ["--dry-run", "--world-size", "8", "--machine"]
    assert train_fsdp.main([*flags, path]) == 0
    said = capsys.readouterr().out
    assert "rank 0 of 8, on nodes of 4 ranks" in said and "plan for mine: FITS" in said
    assert train_fsdp.main([*flags, "dgx-h100"]) == 0
    assert "of 79.1; largest" in capsys.readouterr().out
    with pytest.raises(SystemExit) as leave:
        train_fsdp.main([*flags, "nowhere"])
    error = capsys.readouterr().err
    assert leave.value.code == 2 and error.count("\n") == 1 and "--machine nowhere" in error


@pytest.mark.parametrize("known", [True, False])
def test_a_run_ends_with_what_was_measured_beside_its_plan(known, tmp_path, capsys):
    """On a CPU that was measured; without --machine the plan is of a GPU, and nothing is said."""
    argv = ["--model", "tiny", "--img-size", "32", "--batch", "2", "--steps", "3"]
    argv += ["--data", str(TILES), "--device", "cpu", "--workers", "0", "--log-every", "1"]
    argv += ["--save-every", "none", "--out", str(tmp_path / "out")]
    if known:
        argv += ["--machine", write_machine(tmp_path / "mine.json")]
    assert train_fsdp.main(argv) == 0
    said = capsys.readouterr().out
    start, steps, end = read_log(tmp_path / "out" / "log.jsonl")
    assert ("measured beside the plan for mine: step" in said) == known
    assert ("planned_step_seconds" in end) == known
    if known:
        assert end["planned_step_seconds"] == start["planned"]["seconds"]["step"]
        slowest = max(step["step_seconds"] for step in steps)
        assert 0 < end["step_seconds"] <= slowest
