"""plan.py: its arithmetic against what really happens, and against published measurements."""

import collections
import itertools
import json
import statistics
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import FULL, ROOT
from ranks import join, on_ranks, status_of
from simulated import AS_A_CPU, Watch, flags_of, hold_against_plan, plan_of, planned_traffic
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import data
import machines
import plan
import shard
import simulate
import train_fsdp
import vit

sys.path.append(str(ROOT / "examples" / "published"))
import check

CPU = torch.device("cpu")
FRONTIER = machines.MACHINES["frontier"]
# Widths that 4 and 6 ranks do not divide, so that everything is padded.
ODD = "tiny:width=36,depth=3,mlp_width=68,heads=2,decoder_width=20,decoder_heads=2"
GATED = (
    "tiny:width=20,depth=2,mlp_width=28,heads=2,gated_mlp=1,"
    "decoder_width=12,decoder_depth=1,decoder_heads=2"
)
SHALLOW = "base:depth=3,decoder_depth=2"  # a step takes a quarter of base's
SMALL = "--img-size 32 --batch 2"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """The plan is of a GPU's attention."""
    monkeypatch.setattr(vit.Attention, "always_fused", True)


def full_only(*cases: tuple) -> list:
    """Rows that make test-all alone runs."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


# --- traffic

# Each mode and engine, with the options that must change bytes or must not.
TRAFFIC = [
    f"--model {ODD} --mode ddp --accum 2 --reduce-dtype bf16",
    f"--model {ODD} --mode zero1 --precision fp32",
    f"--model {ODD} --mode full_shard --fsdp 1 --prefetch none",
    f"--model {ODD} --mode hybrid --group 2 --fsdp 1 --accum 2",
    f"--model {ODD} --mode hybrid --group 2 --wrap root --accum 2",
    f"--model {GATED} --mode shard_grad_op --reduce-dtype bf16 --ac full",
]
if FULL:
    TRAFFIC += [
        f"--model {ODD} --mode no_shard --fsdp 1 --accum 2",
        f"--model {ODD} --mode shard_grad_op --fsdp 1",
        f"--model {ODD} --mode full_shard --fsdp 1 --wrap root",
        f"--model {ODD} --mode hybrid --group 1 --ac selective",
        f"--model {ODD} --mode hybrid_grad_op --group 2 --forward-prefetch",
    ]


def measure_traffic() -> list[collections.Counter]:
    """On every rank: what the fourth step sends, when shard.py has compared the ranks."""
    join()
    found = []
    for command in TRAFFIC:
        args = flags_of(f"{command} {SMALL}", dist.get_world_size())
        training = train_fsdp.build_training(args, CPU)
        guard = train_fsdp.Guard(CPU)
        parts = [(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.rand(2, 16))]
        for step in range(4):
            with Watch("c10d") as watch:  # not the norm, which is of DTensors
                train_fsdp.train_step(training, guard, step, parts * args.accum, lr=1e-3)
        found.append(collections.Counter(c for c in watch.sent if c[-1] > 64))  # not votes
    return found


@pytest.mark.slow
def test_traffic_is_exactly_that_of_a_real_run(tmp_path):
    """Kind, number, group and size of every collective; of DDP's buckets the sum."""
    by_rank = on_ranks(4, measure_traffic, tmp_path, 900)
    for i, command in enumerate(TRAFFIC):
        found = plan_of(flags_of(f"{command} {SMALL}", 4))
        for seen in (rank[i] for rank in by_rank):
            payload: collections.Counter = collections.Counter()
            for (kind, _, size), count in seen.items():
                payload[kind] += size * count
            assert payload == found.json()["payload_bytes"], command
            assert found.run.engine == "ddp" or seen == planned_traffic(found.run), command


def test_a_ring_splits_its_bytes_by_the_placement_of_ranks():
    rings = {(2, 1): (1, 0, 0), (16, 1): (1 / 2, 3 / 8, 1 / 8), (8, 2): (0, 3 / 4, 1 / 4)}
    for (ranks, stride), links in rings.items():
        assert machines.ring_links(FRONTIER, 16, ranks, stride) == pytest.approx(links)
    found = plan_of(flags_of("--model tiny --mode full_shard", 16)).json()
    for kind, payload in found["payload_bytes"].items():
        sent = sum(found["traffic_bytes_per_rank"][kind].values())
        assert sent == pytest.approx(payload * 15 / 16)


@pytest.mark.parametrize("node", [3, 4, 8])
def test_the_network_of_a_node_is_shared_by_the_rings_that_leave_it(node):
    """Counted one by one, also for groups that are not aligned with nodes."""
    machine = machines.with_ranks_per_node(FRONTIER, node)
    for ranks, aligned in itertools.product((2, 3, 6, 12, 24), (True, False)):
        stride = 1 if aligned else 24 // ranks
        leaving: collections.Counter[int] = collections.Counter()
        for group in range(24 // ranks):
            first = group * ranks if aligned else group
            ring = [first + i * stride for i in range(ranks)]
            for sender, receiver in itertools.pairwise([*ring, first]):
                leaving[sender // node] += sender // node != receiver // node
        if max(leaving.values()):
            found = machines.rings_leaving_node(machine, 24, ranks, stride)
            assert found == max(leaving.values()), (ranks, stride)


# --- memory


@pytest.mark.parametrize(
    ("world", "command"),
    [
        (8, f"--model {SHALLOW} --mode full_shard --accum 2 --reduce-dtype bf16"),
        (8, f"--model {SHALLOW} --mode shard_grad_op --ac selective"),
        (8, f"--model {SHALLOW},gated_mlp=1 --mode full_shard"),
        (8, f"--model {SHALLOW} --mode full_shard --wrap root --ac full"),
        *full_only(
            (512, f"--model {SHALLOW} --mode hybrid --group 4 --ac full"),
            (8, "--model base --mode hybrid --group 4 --wrap root"),
            # with fewer blocks: they are alike, and the tracker takes long
            (512, "--model 15b:depth=6,decoder_depth=2 --mode shard_grad_op --ac full"),
            (64, "--model 5b:depth=6,decoder_depth=2 --mode full_shard"),
        ),
    ],
)
def test_memory_is_that_of_the_tracker(world, command):
    """The trainer's own step under PyTorch's tracker, which cannot follow the optimizer."""
    hold_against_plan(flags_of(command, world))


@pytest.mark.parametrize(
    "command",
    [
        "--model base:depth=4,decoder_depth=3 --precision fp32",
        f"--model {SHALLOW}",
        f"--model {SHALLOW} --ac selective",
    ],
)
def test_memory_of_one_rank_is_that_of_the_tracker(command):
    """Under DDP, without its buckets. The optimizer's states apart, as above."""
    args = flags_of(f"{command} --mode ddp", 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = vit.ViTMAE(train_fsdp.model_config(args))
        blocks = shard.find_blocks(model, {vit.Block})
        shard._checkpoint_and_compile(blocks, train_fsdp.sharding_options(args))
        images = torch.empty(32, 3, 224, 224, dtype=torch.uint8)
        noise = torch.rand(32, 196)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            with shard.autocast(model, CPU, train_fsdp.DTYPES[args.precision]):
                loss, _, _ = model(data.normalize(images), 0.75, noise)
            loss.backward()
        seen = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    snapshots = plan_of(args, AS_A_CPU).snapshots
    assert max(s.total - s.bytes["optimizer"] for s in snapshots) == pytest.approx(seen, rel=0.03)


def test_zero1_holds_the_share_of_states_that_pytorch_assigns():
    model = vit.ViTMAE(vit.MODELS["tiny"])
    with simulate.fake_world(4):
        optimizer = shard.build_optimizer(model, "zero1", set(), lr=1.0, weight_decay=0.1)
    load = []
    for groups in optimizer._partition_parameters():
        load.append(sum(p.numel() for group in groups for p in group["params"]))
    zero1 = plan_of(flags_of("--model tiny --mode zero1", 4)).peak.bytes["optimizer"]
    assert zero1 == pytest.approx(8 * max(load), rel=0.05)


@pytest.mark.parametrize(("flags", "kept"), [("", 1), (" --cpu-offload", 0)])
def test_bytes_per_parameter(flags, kept):
    """--cpu-offload takes them off the GPU where it exists: not under DDP and ZeRO-1."""
    _, base = plan.read_command(f"--model 1b --world-size 16 --group 4{flags}".split())
    found = {}
    for other in plan.compare(base):
        held = other.snapshots[-1].bytes
        parts = [held[part] for part in ("parameters", "gradients", "optimizer")]
        found[other.label] = [size / other.json()["params"] for size in parts]
    assert found["ddp"] == [4, 4, 8] and found["zero1"][:2] == [4, 4]
    for mode, group in ("no_shard", 1), ("full_shard", 16), ("hybrid 4", 4):
        expected = [kept * size / group for size in (4, 4, 8)]
        assert found[mode] == pytest.approx(expected, abs=0.01)


# --- against what was published


def test_published_memory():
    """Constants are fitted on base and 3b; 1b is predicted."""
    allocated = [abs(c["error"]) for c in check.cells("peak_allocated_gib", "", "peak_gib")]
    active = [abs(c["error"]) for c in check.cells("peak_active_gib", "", "peak_active_gib")]
    assert len(allocated) == 6 and len(active) == 30
    assert max(allocated) < 0.05
    assert max(active) < 0.12 and statistics.median(active) < 0.04


def test_published_speed():
    """1b, and 16 nodes of base and 3b, are predicted; what is beyond is printed by check.py."""
    cells = check.cells("images_per_second", "", "images_per_second")
    near = [c for c in cells if c["nodes"] <= 16]
    near = [abs(c["error"]) for c in near if c["nodes"] > 8 or c["model"] not in check.FITTED]
    assert len(near) == 21 and statistics.median(near) < 0.05


@pytest.mark.parametrize(
    ("model", "batch", "seconds"),  # of a step in bf16 on one H200, by benchmarks.gpu (torch 2.11)
    [("base", 512, 0.1005), ("huge", 512, 0.3682), ("1b", 512, 0.4611), ("3b", 256, 0.6232)],
)
def test_a_step_on_an_h200_takes_what_it_took(model, batch, seconds):
    args = flags_of(f"--model {model} --mode ddp --batch {batch}", 1)
    found = plan_of(args, machines.MACHINES["dgx-h200"])
    assert found.seconds["step"] == pytest.approx(seconds, rel=0.05)
    flops = vit.flops_per_image(vit.MODELS[model]) * batch / seconds
    assert found.mfu(batch / seconds) == pytest.approx(flops / 989e12)


# --- the command line


def printed(command: str, capsys) -> str:
    assert plan.main(command.split()) == 0
    return capsys.readouterr().out


def test_keys_that_other_programs_rely_on(capsys):
    command = "--model 15b --mode hybrid --group 4 --world-size 512 --json"
    found = json.loads(printed(command, capsys))
    assert found["params"] == 14_665_553_484
    assert found["seconds"]["step"] == pytest.approx(3.727125, rel=1e-6)
    assert {*plan.MEMORY_PARTS, "peak", "peak_active"} == {*found["memory_gib"]}
    assert {*found["traffic_bytes_per_rank"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {*found["traffic_bytes_per_rank"]["all_reduce"]} == {"package", "node", "network"}
    largest = found["max_local_batch"]
    for batch, fits in (largest, True), (largest + 1, False):
        verdict = json.loads(printed(f"{command} --batch {batch}", capsys))["verdict"]
        assert (verdict == "FITS") == fits


def test_compare_sorts_every_mode(capsys):
    command = "--model 15b --world-size 1024 --batch 32 --compare --ac full"
    _, *lines = printed(command, capsys).splitlines()
    _, base = plan.read_command(command.split())
    plans = plan.compare(base)
    assert [line[:18].strip() for line in lines] == [p.label for p in plans]
    assert {p.run.mode for p in plans} == {*shard.STRATEGIES}
    order = [plan.VERDICTS.index(p.verdict) for p in plans]
    assert order == sorted(order) and len({*order}) > 1
    speeds = [p.images_per_second for p in plans if p.verdict == "FITS"]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ({"name": "mine"}, "like"),
        ({"like": "dgx"}, "dgx"),
        ([], "--machine"),
        ({"like": "frontier", "nics": 4}, "nics"),
        ({"like": "frontier", "ranks_per_node": 4.5}, "ranks_per_node 4.5"),
        ({"like": "frontier", "memory_gib": "64"}, "memory_gib"),
        ({"like": "frontier", "network_bytes_per_second": 100e6}, "frontier's 1e+11"),
        ({"like": "frontier", "memory_gib": 64e3}, "memory_gib"),
    ],
)
def test_a_machine_file_is_used_or_refused(content, wrong, tmp_path, capsys):
    """Also figures in another unit."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "dgx-a100-80", "ranks_per_node": 4}))
    a100 = machines.MACHINES["dgx-a100-80"]
    assert machines.read_machine(str(path)) == replace(a100, name="mine", ranks_per_node=4)
    path.write_text(json.dumps(content))
    assert status_of(plan.main, ["--machine", str(path)]) == 2
    error = capsys.readouterr().err
    assert wrong in error and error.count("\n") == 1
