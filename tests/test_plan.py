"""plan.py: its arithmetic against what really happens, and against published measurements."""

import collections
import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import fields, replace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import FULL, ROOT
from ranks import join, on_ranks, status_of
from simulated import AS_A_CPU, ROWS, Watch, hold_against_plan, planned_traffic, simulated
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import data
import mesh
import plan
import shard
import train_fsdp
import vit
from downstream import finetune
from planner import estimate, machines, memory, traffic
from runtime import dry_run
from runtime.agreement import StepGuard
from runtime.config import DTYPES, Config, model_config
from runtime.run import Run, resolve, try_plan

sys.path.append(str(ROOT / "examples" / "published"))
import check

CPU = torch.device("cpu")
# Widths that 4 and 6 ranks do not divide, so that everything is padded.
ODD = "tiny:width=36,depth=3,mlp_width=68,heads=2,decoder_width=20,decoder_heads=2"
GATED = (
    "tiny:width=20,depth=2,mlp_width=28,heads=2,gated_mlp=1,"
    "decoder_width=12,decoder_depth=1,decoder_heads=2"
)
FRONTIER = machines.MACHINES["frontier"]
GROUPS = {"hybrid": 4, "hybrid_grad_op": 4}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """The plan is of a GPU's attention."""
    monkeypatch.setattr(vit.Attention, "always_fused", True)


def planned(model: str, world: int, machine: machines.Machine = FRONTIER, **case) -> estimate.Plan:
    run = traffic.PlannedRun(
        model_config(model), world_size=world, img_size=224, mask_ratio=0.75, batch=32, **case
    )
    return estimate.Plan(run, machine)


def run_of(model: str, world: int, **case) -> Run:
    """The run of the trainer, of bf16 on GPUs if not said otherwise."""
    given = {"precision": "bf16", "group": GROUPS.get(case["mode"])} | case
    return resolve(Config(model, device="cuda", **given), world, 8)


def plan_of(run: Run, machine: machines.Machine = FRONTIER) -> estimate.Plan:
    return estimate.Plan(traffic.PlannedRun.from_flags(run.vit_config, run.record()), machine)


def full_only(*cases: tuple) -> list:
    """Rows that make test-all alone runs."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


# --- traffic


# Each mode and engine, with the options that must change bytes or must not. FSDP2's traffic is
# held against the plan in the dry run too, in test_dryrun.py.
TRAFFIC: list[tuple[str, dict]] = [
    (ODD, {"mode": "ddp", "accum": 2, "reduce_dtype": "bf16"}),
    (ODD, {"mode": "zero1", "precision": "fp32"}),
    (ODD, {"mode": "full_shard", "fsdp": 1, "prefetch": "none"}),
    (ODD, {"mode": "hybrid", "group": 2, "fsdp": 1, "accum": 2}),
    (ODD, {"mode": "hybrid", "group": 2, "fsdp": 2, "wrap": "root", "accum": 2}),
    (GATED, {"mode": "shard_grad_op", "fsdp": 2, "reduce_dtype": "bf16", "ac": "full"}),
]
if FULL:
    TRAFFIC += [
        (ODD, {"mode": "no_shard", "fsdp": 1, "accum": 2}),
        (ODD, {"mode": "shard_grad_op", "fsdp": 1}),
        (ODD, {"mode": "shard_grad_op", "fsdp": 2, "reduce_dtype": "bf16", "accum": 2}),
        (ODD, {"mode": "full_shard", "fsdp": 2, "ac": "full"}),
        (ODD, {"mode": "full_shard", "fsdp": 1, "wrap": "root"}),
        (ODD, {"mode": "hybrid", "group": 1, "fsdp": 2, "ac": "selective"}),
        (ODD, {"mode": "hybrid_grad_op", "group": 2, "fsdp": 2, "forward_prefetch": True}),
        (GATED, {"mode": "full_shard"}),
    ]
SMALL = {"img_size": 32, "batch": 2}


def measure_traffic() -> list[collections.Counter]:
    """On every rank: what the last of a few steps sends; DDP's buckets are final in the third."""
    join()
    found = []
    for model, case in TRAFFIC:
        run = run_of(model, dist.get_world_size(), **case, **SMALL)
        training = train_fsdp.build_training(run, mesh.build_mesh(run.mesh_shape, CPU))
        guard = StepGuard(CPU)
        parts = [(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.rand(2, 16))]
        for _ in range(3 if case["mode"] in ("ddp", "zero1") else 1):
            with Watch("c10d") as watch:  # not the norm, which is of DTensors
                train_fsdp.train_step(training, guard, parts * run.config.accum, lr=1e-3)
        found.append(collections.Counter(c for c in watch.sent if c[-1] > 64))  # not votes
    return found


@pytest.mark.slow
def test_traffic_is_exactly_that_of_a_real_run(tmp_path):
    """Kind, number, group and size of every collective; of DDP's buckets the sum."""
    world = 4
    by_rank = on_ranks(world, measure_traffic, tmp_path, 900)
    for i, (model, case) in enumerate(TRAFFIC):
        found = plan_of(run_of(model, world, **case, **SMALL))
        expected = planned_traffic(found.run)
        for seen in (rank[i] for rank in by_rank):
            payload: collections.Counter = collections.Counter()
            for (kind, _, size), count in seen.items():
                payload[kind] += size * count
            assert payload == found.json()["payload_bytes"], case
            assert found.run.engine == "ddp" or seen == expected, case


# --- memory

SHALLOW = "base:depth=3,decoder_depth=2"  # a step takes a quarter of base's


@pytest.mark.parametrize(
    ("model", "world", "mode", "flags"),
    [
        (SHALLOW, 8, "full_shard", {"accum": 2, "reduce_dtype": "bf16"}),
        (SHALLOW, 8, "shard_grad_op", {"ac": "selective"}),
        (f"{SHALLOW},gated_mlp=1", 8, "full_shard", {}),
        (SHALLOW, 8, "full_shard", {"wrap": "root", "ac": "full"}),
        *full_only(
            (SHALLOW, 512, "hybrid", {"ac": "full"}),
            ("base", 8, "hybrid", {"wrap": "root"}),
            # with fewer blocks: they are alike, and the tracker takes long
            ("15b:depth=6,decoder_depth=2", 512, "shard_grad_op", {"ac": "full"}),
            ("5b:depth=6,decoder_depth=2", 64, "full_shard", {}),
        ),
    ],
)
def test_memory_is_that_of_the_tracker(model, world, mode, flags):
    """The trainer's own step under PyTorch's tracker, which cannot follow the optimizer."""
    hold_against_plan(run_of(model, world, mode=mode, **flags))


@pytest.mark.parametrize(
    ("ranks", "flags", "group"),
    [
        (64, {"mode": "hybrid", "group": 8, "accum": 2}, 8),
        (5, {"mode": "shard_grad_op", "ac": "full"}, 5),
    ],
)
def test_what_a_rank_keeps_is_what_arithmetic_says(ranks, flags, group):
    """fp32 parameters and gradients, two moments of AdamW: of the first of `group` shards."""
    small = "tiny:depth=2,decoder_depth=1"
    shapes = [p.shape for p in vit.ViTMAE(model_config(small), 32).parameters()]
    rows = [math.ceil(s[0] / group) * s[1:].numel() for s in shapes]  # FSDP2 cuts dimension 0
    peak, watch = simulated(run_of(small, ranks, precision="fp32", **flags, **SMALL))
    after = watch.after
    assert after["Sharded Param"] == peak["Sharded Param"] == 4 * sum(rows)
    assert after["Sharded Grad"] == 4 * sum(rows) >= peak["Sharded Grad"]
    assert peak["OptState"] == 8 * sum(rows) + 4 * len(rows)
    tables = 4 * (1 + 4 * 4) * (192 + 128)  # positions of 16 patches and cls, both widths
    assert after["Buffer"] == tables
    images = 2 * 3 * 32 * 32  # uint8
    noise = 4 * 2 * 16  # fp32
    assert after["Inputs"] == flags.get("accum", 1) * (images + noise)
    whole = [n for n in ("Unsharded Param", "All Gather", "Reduce Scatter") if after[n]]
    assert not whole and sum(after.values()) + peak["OptState"] < sum(peak.values())
    assert sorted(peak) == sorted(itertools.chain(*ROWS))
    assert sorted(itertools.chain(*ROWS.values())) == sorted(memory.MEMORY_PARTS)


def test_the_plan_of_fine_tuning_is_of_whole_images_and_no_decoder(monkeypatch):
    """What the log begins with, against PyTorch's tracker; the linear layer is small."""
    config = finetune.Tuning(SHALLOW, test="x", mode="full_shard", batch=32, precision="bf16")
    run = resolve(config, 8, 8)
    known = {row.name: getattr(run, row.name) for row in fields(run)}
    tuning = finetune.TuningRun(**known, classes=4)
    found = try_plan(tuning, CPU, pytest.fail)["memory_gib"]
    with dry_run.fake_world(8):
        grid = mesh.build_mesh(run.mesh_shape, CPU)
        monkeypatch.setattr(mesh, "build_mesh", Mock(return_value=grid))  # not of fake tensors
        with dry_run.fake_tensors():
            training = finetune.build_tuning(tuning, None, CPU, resuming=True)
            images = torch.empty(32, 3, 224, 224, dtype=torch.uint8)
            tracker = dry_run.FSDPMemTracker(training.model)
            tracker.track_inputs((images,))
            with tracker:
                training.model(data.normalize(images)).sum().backward()
    seen = tracker.get_tracker_snapshot("peak")[CPU]["Total"] / 2**30
    live = found["peak"] - found["optimizer"] - found["workspace"]
    assert live == pytest.approx(seen, rel=0.03)


@pytest.mark.parametrize(
    ("size", "precision", "ac"),
    [
        ("base:depth=4,decoder_depth=3", "fp32", "none"),
        (SHALLOW, "bf16", "none"),
        (SHALLOW, "bf16", "selective"),
        *full_only(("base", "bf16", "full")),
    ],
)
def test_memory_of_one_rank_is_that_of_the_tracker(size, precision, ac):
    """Without DDP's buckets. The optimizer's states apart, as above."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = vit.ViTMAE(model_config(size))
        options = shard.ShardingOptions(ac=ac, preserve_rng_state=False)
        shard._checkpoint_and_compile(model, shard.find_blocks(model, {vit.Block}), options)
        images = torch.empty(32, 3, 224, 224, dtype=torch.uint8)
        noise = torch.rand(32, 196)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            with shard.autocast(model, CPU, DTYPES[precision]):
                loss, _, _ = model(data.normalize(images), 0.75, noise)
            loss.backward()
        seen = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    found = planned(size, 1, AS_A_CPU, mode="ddp", ac=ac, precision=precision)
    live = max(s.total - s.bytes["optimizer"] for s in found.snapshots)
    assert live == pytest.approx(seen, rel=0.03)


def test_ddp_holds_all_states_and_zero1_its_share():
    """ZeRO-1 against the parts that PyTorch makes, of whole tensors."""
    model = vit.ViTMAE(vit.MODELS["tiny"])
    numel = sum(p.numel() for p in model.parameters())
    ddp = planned("tiny", 4, mode="ddp").peak.bytes
    held = [ddp[part] for part in ("parameters", "gradients", "optimizer")]
    assert held == [4 * numel, 4 * numel, 8 * numel]
    with dry_run.fake_world(4):
        decay = shard.weight_decay_names(model)
        optimizer = shard.build_optimizer(model, "zero1", decay, lr=1.0, weight_decay=0.1)
        load = []
        for groups in optimizer._partition_parameters():
            params = itertools.chain(*(group["params"] for group in groups))
            load.append(sum(p.numel() for p in params))
    zero1 = planned("tiny", 4, mode="zero1").peak.bytes["optimizer"]
    assert zero1 == pytest.approx(8 * max(load), rel=0.05)


@pytest.mark.parametrize("flags", [{}, {"fsdp": 1}, {"wrap": "root"}, {"prefetch": "none"}])
@pytest.mark.parametrize("mode", ["ddp", "full_shard", "hybrid"])
@pytest.mark.parametrize("depths", [(12, 8), (3, 2), (2, 5), (1, 1)])
def test_blocks_that_are_alike_need_not_be_walked_through(mode, flags, depths):
    model = "base:depth={},decoder_depth={}".format(*depths)
    run = planned(model, 16, mode=mode, group=GROUPS.get(mode), **flags).run

    def peaks(walk: memory.StepMemory) -> list[float]:
        moments = list(walk.snapshots())
        return [max(s.total for s in moments), max(s.total + s.pending for s in moments)]

    some = memory.StepMemory(run, FRONTIER)
    every = memory.StepMemory(run, FRONTIER)
    every.ends = range(sum(depths))
    assert peaks(some) == pytest.approx(peaks(every), rel=1e-12)


def test_published_memory():
    """Constants are fitted on base and 3b; 1b is predicted."""
    cells = check.memory_cells()
    allocated = [abs(c.error) for c in cells if c.kind == "max_allocated"]
    active = [abs(c.error) for c in cells if c.kind == "peak_active"]
    assert len(allocated) == 6 and len(active) == 30
    assert max(allocated) < 0.05
    assert max(active) < 0.12 and statistics.median(active) < 0.04


# --- speed


def test_published_speed():
    """1b, and 16 nodes of base and 3b, are predicted; what is beyond is printed by check.py."""
    near = [abs(c.error) for c in check.speed_cells() if c.predicted and c.nodes <= 16]
    assert len(near) == 21 and statistics.median(near) < 0.05


def test_full_shard_over_the_machine_is_no_tie_where_it_collapsed():
    """Published: it falls behind at 64 nodes at the latest."""
    for model, nodes in itertools.product(("base", "1b", "3b"), (64, 128)):
        plans = estimate.compare(check.plan_published(model, "full_shard", None, nodes))
        best = plans[0]
        tied = [p.run.mode for p in plans if p.images_per_second > 0.95 * best.images_per_second]
        assert "full_shard" not in tied, model
        full = next(p for p in plans if p.run.mode == "full_shard")
        assert full.seconds["exposed"] > 2 * best.seconds["exposed"]


def test_a_ring_splits_its_bytes_by_the_placement_of_ranks():
    for world, ranks, stride, links in (
        (16, 2, 1, (1, 0, 0)),
        (16, 4, 1, (1 / 2, 1 / 2, 0)),
        (16, 16, 1, (1 / 2, 3 / 8, 1 / 8)),
        (16, 2, 8, (0, 0, 1)),
        (16, 8, 2, (0, 3 / 4, 1 / 4)),
        (8, 8, 1, (1 / 2, 1 / 2, 0)),
    ):
        assert machines.ring_links(FRONTIER, world, ranks, stride) == pytest.approx(links)
    found = planned("tiny", 16, mode="full_shard").json()
    for kind, payload in found["payload_bytes"].items():
        sent = sum(found["traffic_bytes_per_rank"][kind].values())
        assert sent == pytest.approx(payload * 15 / 16)


@pytest.mark.parametrize("node", [3, 4, 8])
def test_the_network_of_a_node_is_shared_by_the_rings_that_leave_it(node):
    """Counted one by one, also for groups that are not aligned with nodes."""
    machine = machines.with_ranks_per_node(FRONTIER, node)
    for world in (24, 96):
        for ranks in (2, 3, 6, 12, world):
            for stride in (1, world // ranks):
                leaving: collections.Counter[int] = collections.Counter()
                groups = world // ranks
                for group in range(groups):
                    first = group * ranks if stride == 1 else group
                    ring = [first + i * stride for i in range(ranks)]
                    for sender, receiver in zip(ring, [*ring[1:], ring[0]], strict=True):
                        leaving[sender // node] += sender // node != receiver // node
                most = max(leaving.values())
                if most:
                    found = machines.rings_leaving_node(machine, world, ranks, stride)
                    assert found == most, (world, ranks, stride)


def test_a_run_is_planned_with_the_ranks_that_its_nodes_have():
    """3b in groups of 4 on two nodes of 4 GPUs: gradients cross the network, parameters do not."""
    config = Config(model="3b", mode="hybrid", group=4, batch=2, machine="dgx-a100-80")
    found = try_plan(resolve(config, 8, 4), None, print)
    sent = found["traffic_bytes_per_rank"]
    assert sent["all_reduce"]["node"] == sent["all_gather"]["network"] == 0
    assert sent["all_reduce"]["network"] > 0 and sent["all_gather"]["node"] > 0


# --- machines


def test_gpus_of_one_workstation_do_not_send_over_a_network():
    """More of them than the known machine has in a node."""
    run = resolve(Config("base", mode="ddp", machine="rtx-4090"), 4, 4)
    traffic = try_plan(run, torch.device("cpu"), pytest.fail)["traffic_bytes_per_rank"]
    assert traffic["all_reduce"]["network"] == 0 < traffic["all_reduce"]["node"]


def test_broadcasts_in_turn_follow_each_other_around_the_ring():
    """1,024 of them on 1,024 ranks: about 2,048 hops of 60 us and launches of 50 us, no million."""
    seconds = []
    for mode in ("ddp", "zero1"):
        argv = ["--model", "base", "--mode", mode, "--world-size", "1024", "--batch", "32"]
        _, found = plan.read_command(argv)
        seconds.append(found.seconds["communication"])
    assert 2048 * 60e-6 < seconds[1] - seconds[0] < 2048 * 60e-6 + 1024 * 50e-6 + 0.1


@pytest.mark.parametrize(
    ("device", "gib", "machine"),  # as PyTorch reports them
    [
        ("AMD Instinct MI250X", 63.98, "frontier"),
        ("NVIDIA A100-SXM4-40GB", 39.49, "dgx-a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.25, "dgx-a100-80"),
        ("NVIDIA H100 PCIe", 79.2, "dgx-h100"),
        ("Tesla V100-SXM2-16GB", 15.8, "frontier"),  # not known
    ],
)
def test_a_device_finds_its_machine(device, gib, machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", Mock(return_value=device))
    properties = Mock(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Mock(return_value=properties))
    run = resolve(Config("tiny", mode="ddp"), 1, 1)
    found = try_plan(run, torch.device("cuda", 0), pytest.fail)
    assert found["machine"] == machine and found["available_gib"] == pytest.approx(gib)


def test_machine_files(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "dgx-a100-80", "ranks_per_node": 4}))
    a100 = machines.MACHINES["dgx-a100-80"]
    assert machines.read_machine(str(path)) == replace(a100, name="mine", ranks_per_node=4)
    for content, sentence in (
        ({"name": "mine"}, '"like", the nearest of frontier, dgx'),
        ({"like": "dgx"}, '"like", the nearest of frontier, dgx'),
        ({"like": ["frontier"]}, '"like", the nearest of frontier, dgx'),
        ([], "{...}"),
        ({"like": "frontier", "nics": 4}, "no field nics; use name, ranks_per_package"),
        ({"like": "frontier", "ranks_per_node": 4.5}, "ranks_per_node must be a whole number"),
        ({"like": "frontier", "memory_gib": "64"}, "memory_gib must be a number without quotes"),
        ({"like": "frontier", "memory_gib": True}, "memory_gib must be a number"),
        ({"like": "frontier", "memory_gib": 0}, "memory_gib must be above 0, not 0"),
        ({"like": "frontier", "name": 3}, "name must be a text in quotes"),
        ({"like": "frontier", "links": 3}, "links must be a list"),
        ({"like": "frontier", "links": [{"level": "node"}]}, "links must hold objects of "),
        ({"like": "frontier", "blocks": [{"precision": "fp32", "flops_per_second": 1}]}, "bf16"),
        ("{", "is not JSON"),
    ):
        path.write_text(content if content == "{" else json.dumps(content))
        with pytest.raises(SystemExit) as leave:
            plan.main(["--machine", str(path)])
        error = capsys.readouterr().err
        assert leave.value.code == 2 and sentence in error and error.count("\n") == 1


# --- the command line


def printed(command: str, capsys) -> list[str]:
    assert plan.main(command.split()) == 0
    return capsys.readouterr().out.splitlines()


def test_keys_that_other_programs_rely_on(capsys):
    command = "--model 15b --mode hybrid --group 4 --world-size 512 --json"
    found = json.loads("".join(printed(command, capsys)))
    assert found["params"] == 14_665_553_484
    parts = {"parameters", "gradients", "optimizer", "unsharded", "activations"}
    assert {*parts, "peak", "peak_active"} <= {*found["memory_gib"]}
    assert found["verdict"] in ("FITS", "TIGHT", "NO") and 0 < found["efficiency"] <= 1
    assert {*found["traffic_bytes_per_rank"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {*found["traffic_bytes_per_rank"]["all_reduce"]} == {"package", "node", "network"}
    assert found["step_seconds_lower_bound"] * found["images_per_second_upper_bound"] > 0
    batch = found["max_local_batch"]
    verdicts = [
        json.loads("".join(printed(f"{command} --batch {n}", capsys)))["verdict"]
        for n in (batch, batch + 1)
    ]
    assert verdicts[0] == "FITS" != verdicts[1]


def test_compare_sorts_every_mode(capsys):
    command = "--model 15b --world-size 1024 --batch 32 --compare --ac full"
    _, *lines = printed(command, capsys)
    _, run_plan = plan.read_command(command.split())
    plans = estimate.compare(run_plan)
    assert [line[:18].strip() for line in lines] == [p.label for p in plans]
    assert {p.run.mode for p in plans} == {*shard.STRATEGIES}
    order = [estimate.VERDICTS.index(p.verdict) for p in plans]
    assert order == sorted(order) and len({*order}) > 1
    speeds = [p.images_per_second for p in plans if p.verdict == "FITS"]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize(("flags", "kept"), [("", 1), (" --cpu-offload", 0)])
def test_bytes_per_parameter(flags, kept):
    """--cpu-offload takes them off the GPU where it exists: not under DDP and ZeRO-1."""
    _, plan_ = plan.read_command(f"--model 1b --world-size 16 --group 4{flags}".split())
    found = {}
    plans = estimate.compare(plan_)
    assert {other.run.mode for other in plans} == {*shard.STRATEGIES}
    for other in plans:
        numel = other.json()["params"]
        held = other.snapshots[-1].bytes
        parts = ("parameters", "gradients", "optimizer")
        found[other.label] = [held[part] / numel for part in parts]
    assert found["ddp"] == [4, 4, 8] and found["zero1"][:2] == [4, 4]
    for mode, group in ("no_shard", 1), ("full_shard", 16), ("hybrid 4", 4):
        expected = [kept * size / group for size in (4, 4, 8)]
        assert found[mode] == pytest.approx(expected, abs=0.01)


def test_a_deep_model_is_planned_in_seconds(capsys):
    start = time.process_time()
    lines = printed("--model base:depth=3000 --world-size 64 --mode full_shard --explain", capsys)
    assert time.process_time() - start < 10
    assert any(line.startswith(("FITS", "NO")) for line in lines)


COMMANDS = """
--model 3b
--mode full_shard
--group 2 --accum 2
--fsdp 1
--group 3
--mode ddp --group 2
--mode zero1 --cpu-offload
--global-batch 9
--prefetch backward_post
--bucket-cap-mb 8
--mode full_shard --limit-all-gathers
--mask-ratio 0
--mode zero3
"""


@pytest.mark.parametrize("command", COMMANDS.splitlines())
def test_training_and_plan_refuse_and_default_alike(command, monkeypatch, capsys):
    """By the dry run, which is the trainer's own reading of a command that no launcher started."""
    planned_with = []
    original = estimate.StepMemory

    def watched(run, *args):
        planned_with.append(run)
        return original(run, *args)

    monkeypatch.setattr(estimate, "StepMemory", watched)
    monkeypatch.setattr(dry_run, "simulate", Mock(return_value=None))

    def what_comes(program, *flags: str) -> tuple:
        """The status, the sentence, and the first run that is planned."""
        planned_with.clear()
        status = status_of(program.main, [*command.split(), *flags])
        _, _, error = capsys.readouterr().err.partition("error: ")
        return status, error, planned_with[:1]

    for world in ("1", "8"):
        found = what_comes(plan, "--world-size", world)
        dry = what_comes(train_fsdp, "--world-size", world, "--dry-run", "--out", "never-made")
        assert dry == found  # and the plan in the log of a run is that of the command
        status, error, runs = found
        assert status in (0, 2) and (status == 0) == (error == "") == bool(runs)
