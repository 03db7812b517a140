"""One step of train_fsdp.py on three ranks: what all skip, fp16's scale, no wait for a number."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from conftest import FULL
from ranks import NANO, NANO_ARGV, Run, Seen, join, on_ranks, poisoned, read_log
from small_model import CPU, ROWS, build, forward_backward
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mesh
import shard
import train_fsdp
import vit
from train_fsdp import Guard, Requests

NAN = float("nan")
INF = float("inf")
# name: (scaled, {(rank, step): loss}, {step: norm on all ranks}, steps skipped, of 0 to 6)
FINITE = {
    "all finite": (False, {}, {}, "0000000"),
    "one loss": (False, {(2, 4): NAN}, {}, "0000111"),
    "two ranks": (False, {(0, 5): NAN, (1, 3): -INF}, {}, "0001111"),
    "the norm alone": (False, {}, {2: INF}, "0011111"),
    "scaled, infinite norms": (True, {}, {0: INF, 3: NAN}, "1001000"),
    "scaled, a loss": (True, {(2, 4): NAN}, {1: INF}, "0100111"),
}
FLAGS = {  # (rank, step)
    "stop": {(1, 3), (1, 4)},
    "save": {(0, 5)},
    "no_batch": {(2, 7)},
    "bad_images": {(0, 2), (2, 2)},
}
SCALED = [("ddp", 2), ("zero1", 2), ("full_shard", 1), ("full_shard", 2)]
# What hands a number, or a number of numbers, to the host: on a GPU it would wait for the device.
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "bincount"}


def guarded(rank: int) -> dict:
    """By name: whether each step is skipped, and its result."""
    found = {}
    for name, (scaled, losses, norms, _) in FINITE.items():
        guard = Guard(CPU)
        found[name] = []
        for step in range(8):  # in the last one a rank has no batch
            loss = torch.tensor(losses.get((rank, step), float(rank)))
            norm = torch.tensor(norms.get(step, 1.0))
            asked = Requests(**{flag: (rank, step) in where for flag, where in FLAGS.items()})
            skip = guard.check(step, loss, norm, asked, scaled)
            (result,) = guard.results(wait=False)
            found[name].append((skip.item(), result))
    return found


def scales_of_training(rank: int, mode: str, fsdp: int) -> list[float]:
    """fp16's scale after each of three steps; rank 1 alone has an infinite gradient in step 1."""
    grid = mesh.build_mesh(mesh.mesh_shape(shard.STRATEGIES[mode].shard_over, 3), CPU)
    options = shard.ShardingOptions(param_dtype=torch.float16, fsdp=fsdp)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))  # fp16 is slow on a CPU
    model = shard.apply(model, mode, grid, block_classes=set(), options=options)
    optimizer = shard.build_optimizer(model, mode, set(), lr=1e-3, weight_decay=0.0)
    scaler = shard.build_scaler(model, CPU, torch.float16)
    micro_batch = torch.ones(2, 4), torch.ones(())

    def compute_loss(network, micro_batch):
        images, _ = micro_batch
        loss = network(images).float().square().mean()
        return loss * (INF if (rank, len(scales)) == (1, 1) else 1)

    training = train_fsdp.Training(model, optimizer, scaler, compute_loss, torch.float16)
    scales: list[float] = []
    for step in range(3):
        train_fsdp.train_step(training, Guard(CPU), step, [micro_batch], lr=1e-3)
        scales.append(scaler.get_scale())
    return scales


def losses_of_training(offload: bool) -> list[float]:
    """Train three steps of FSDP2 on batches of this rank's own -> this rank's losses."""
    model = build("full_shard", mesh.build_mesh((1, 3), CPU), cpu_offload=offload)
    optimizer = shard.build_optimizer(model, "full_shard", set(), lr=1e-3, weight_decay=0)
    losses = []
    for step in range(3):
        losses.append(forward_backward(model, seed=10 * step + dist.get_rank()).item())
        shard.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Reads(TorchDispatchMode):
    """Lists the operations of `READS`, and copies to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in READS or (name == "_to_copy" and kwargs.get("device") not in (None, CPU)):
            self.seen.append(name)
        return func(*args, **kwargs)


def stepper(mode: str, fsdp: int, precision: str, device=CPU, compiled=False):
    """A function that makes train_fsdp's step on this rank, and reads its verdict."""
    # two blocks of each kind: the second must not be compiled anew
    flags = f"--model tiny:depth=2,decoder_depth=2 --img-size 32 --batch 2 --clip 1 --mode {mode}"
    flags += f" --precision {precision}"
    if mode not in ("ddp", "zero1"):
        flags += f" --fsdp {fsdp}"
    args = train_fsdp.parse_flags([*flags.split(), *(["--compile"] if compiled else [])])
    world = dist.get_world_size()
    train_fsdp.complete(args, world, world, device.type)
    training = train_fsdp.build_training(args, device)
    guard = Guard(device)
    number = itertools.count()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, device=device)
    batches = [(images, torch.rand(2, 16, device=device))] * 2

    def step() -> None:
        train_fsdp.train_step(training, guard, next(number), batches, lr=1e-4)
        if device != CPU:  # as the loop does, one step late: reading it on a CPU is no wait
            list(guard.results(wait=False))

    return step


def reads_of_a_step(mode: str, fsdp: int) -> list[str]:
    """What the fourth step reads on this rank; in three, shard.py compares the ranks."""
    step = stepper(mode, fsdp, "bf16")  # it casts more than fp32
    for _ in range(3):
        step()
    with Reads() as seen:
        step()
    return seen.seen


def graphs_of_steps() -> list[int]:
    """How many graphs there are after each step; -1 for a break.

    What breaks a graph or asks for a new one is the same for each back end; this one is quick.
    """
    compile_module = nn.Module.compile
    nn.Module.compile = lambda self, **options: compile_module(self, backend="aot_eager", **options)
    counters = torch._dynamo.utils.counters
    step = stepper("full_shard", 2, "fp32", compiled=True)
    graphs = []
    for _ in range(5):
        step()
        broken = sum(counters["graph_break"].values())
        graphs.append(-1 if broken else counters["stats"]["unique_graphs"])
    return graphs


def three_ranks() -> dict:
    rank = join()
    with Reads() as control:
        torch.ones(()).item()
    assert control.seen == ["_local_scalar_dense"]
    found = {
        "guard": guarded(rank),
        "scales": {row: scales_of_training(rank, *row) for row in SCALED},
        "losses": [losses_of_training(offload) for offload in (True, False) if FULL],
        "reads": {row: reads_of_a_step(*row) for row in ROWS if FULL},
        "graphs": graphs_of_steps() if FULL else [],
    }
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def three(once):
    return once("three", lambda folder: on_ranks(3, three_ranks, folder))


@pytest.mark.parametrize("name", FINITE)
def test_all_ranks_skip_the_same_steps_and_know_why(three, name):
    scaled, losses, norms, skips = FINITE[name]
    for found in three:
        for step, (skip, result) in enumerate(found["guard"][name]):
            assert result.step == step and skip == float((skips + "1")[step]), step
            bad = any((rank, step) in losses for rank in range(3))
            assert not math.isfinite(result.loss) if bad else result.loss == pytest.approx(1.0)
            assert bool(result.bad_norm) == (step in norms)
            assert bool(result.bad) == (bad or (step in norms and not scaled))
            for flag, where in FLAGS.items():
                asking = sum((rank, step) in where for rank in range(3))
                assert getattr(result, flag) == asking, flag


def test_all_ranks_have_the_same_scale(three):
    for row, scales in three[0]["scales"].items():
        assert scales[1] < scales[0] and scales[2] == scales[1], row
        assert all(other["scales"][row] == scales for other in three), row


@pytest.mark.full
def test_parameters_on_the_host_train_the_same(three):
    for found in three:
        host, device = found["losses"]
        assert host == device and len(host) == 3
    assert three[0]["losses"] != three[1]["losses"]  # each rank has images of its own


@pytest.mark.full
def test_no_step_reads_a_number_or_is_compiled_again(three):
    for found in three:
        assert {*found["reads"]} == {*ROWS} and not any(found["reads"].values())
        first, second, *later = found["graphs"]
        assert first == 2 and second > 0 and later == [second] * 3


class Event:
    """In the place of a GPU's."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


@pytest.mark.parametrize("late", [False, True])
def test_a_late_reader_gets_the_same_results(late, single, monkeypatch):
    """As for a GPU, whose results are read one step later, but for a stop, a save, the end."""
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: Event())
    guard = Guard(CPU)
    guard.late = late
    one = torch.tensor(1.0)

    def read(step: int | None = None, wait: bool = False, **asked: bool) -> list[int]:
        if step is not None:
            guard.check(step, one, one, Requests(**asked))
        return [result.step for result in guard.results(wait)]

    assert read(0) == ([] if late else [0])
    assert read(1) == ([0] if late else [1])
    assert read(wait=True) == ([1] if late else [])
    assert read(2, stop=True) == ([] if late else [2])
    assert read(3) == ([2, 3] if late else [3])  # what is applied by then is what is saved


def test_fp16_gradients_that_stay_nan_end_the_run(tmp_path, monkeypatch):
    """Once the scale is at its end: a skipped step is otherwise none to end for."""
    monkeypatch.setitem(vit.MODELS, "nano", NANO)
    argv = [*NANO_ARGV, "--steps", "60", "--precision", "fp16", "--global-batch", "2"]
    always = Run([], poison="gradient", poison_steps=(0,))
    with poisoned(always, Seen(step=0)):
        status = train_fsdp.main([*argv, "--save-every", "none", "--out", str(tmp_path)])
    _, _, end = read_log(tmp_path / "log.jsonl")
    assert (status, end["reason"], end["steps"]) == (1, "nan", train_fsdp.MAX_OVERFLOWS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("mode", "fsdp"), ROWS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_mode_waits_for_a_gpu(mode, fsdp, precision):
    """CUDA's own check raises where a step synchronises with the device."""
    device = torch.device("cuda", 0)
    mesh.init_ranks(mesh.read_ranks({}), device)
    try:
        step = stepper(mode, fsdp, precision, device)
        for _ in range(3):  # in which shard.py compares the ranks
            step()
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
