"""The step waits for no number, is compiled once, and its loop keeps the collector out."""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import FULL
from ranks import join, on_ranks
from test_shard import CPU, ROWS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mesh
import shard
import train_fsdp
from runtime.agreement import StepGuard
from runtime.config import Config
from runtime.run import resolve

# What hands a number, or a number of numbers, to the host: on a GPU it would wait for the device.
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "bincount"}
READ = ROWS if FULL else [("zero1", 2), ("hybrid", 1), ("full_shard", 2)]
COMPILED = ROWS if FULL else [("full_shard", 2)]
PRECISIONS = ("fp32", "bf16")


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
    """A function of the step's number that makes train_fsdp's step on this rank."""
    world = dist.get_world_size()
    group = world if "hybrid" in mode else None
    grid = mesh.build_mesh(shard.mesh_shape(mode, world, group), device)
    flags = {"mode": mode, "group": group, "fsdp": fsdp, "precision": precision}
    run = resolve(Config("tiny", 32, batch=2, clip=1.0, compile=compiled, **flags), world, world)
    parts = train_fsdp.build_model_and_optimizer(run, grid, device)
    guard = StepGuard(device)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, device=device)
    batches = [(images, torch.rand(2, 16, device=device))] * 2

    def step(number: int) -> None:
        train_fsdp.train_step(*parts, guard, batches, lr=1e-4, **run.step_options())
        if number:
            guard.read(number - 1)  # as the loop does

    return step


def reads_and_recompilations() -> dict:
    """On each rank: host reads of a step by mode and precision; compilations early and late."""
    join()
    found: dict = {"reads": {}, "compiled": {}}
    for mode, fsdp in READ:
        for precision in PRECISIONS:
            step = stepper(mode, fsdp, precision)
            step(0)
            step(1)
            with Reads() as reads:
                step(2)
            found["reads"][mode, fsdp, precision] = reads.seen
    with Reads() as reads:
        torch.ones(()).item()
    found["control"] = reads.seen

    # What breaks a graph or asks for a new one is the same for each back end; this one is quick.
    compile_module = nn.Module.compile
    nn.Module.compile = lambda self, **options: compile_module(self, backend="aot_eager", **options)
    counters = torch._dynamo.utils.counters
    for mode, fsdp in COMPILED:
        torch._dynamo.reset()
        counters.clear()
        step = stepper(mode, fsdp, "fp32", compiled=True)
        graphs = []
        for number in range(5):
            step(number)
            graphs.append(counters["stats"]["unique_graphs"])
        found["compiled"][mode, fsdp] = graphs, sum(counters["graph_break"].values())
    nn.Module.compile = compile_module
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found(once):
    return once("reads", partial(on_ranks, 2, reads_and_recompilations))


@pytest.mark.slow
def test_no_mode_reads_a_number_in_a_step(found):
    for rank in found:
        assert rank["control"] == ["_local_scalar_dense"]
        assert len(rank["reads"]) == 2 * len(READ)
        assert not any(rank["reads"].values()), rank["reads"]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "fsdp"), COMPILED)
def test_blocks_are_compiled_in_the_first_steps_only(found, mode, fsdp):
    """Two graphs, of encoder and decoder blocks; no break, nothing new after the second step."""
    for rank in found:
        graphs, breaks = rank["compiled"][mode, fsdp]
        assert breaks == 0 and graphs[1:] == [graphs[1]] * 4
        assert graphs[0] == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("mode", "fsdp"), ROWS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_mode_waits_for_a_gpu(mode, fsdp, precision):
    """CUDA's own check raises where a step synchronises with the device."""
    device = torch.device("cuda", 0)
    mesh.init_ranks(mesh.read_ranks({}), device)
    try:
        step = stepper(mode, fsdp, precision, device)
        step(0)
        step(1)
        torch.cuda.set_sync_debug_mode("error")
        step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()


def test_no_garbage_is_collected_within_a_step(tmp_path, monkeypatch):
    """Python's collector is off in every step, though the program around the run has it on."""
    inside, gc_on, update = [], gc.isenabled(), shard.optimizer_step

    def watched(*arguments):
        inside.append(gc.isenabled())
        return update(*arguments)

    monkeypatch.setattr(shard, "optimizer_step", watched)
    argv = "--model tiny --img-size 32 --batch 2 --workers 0 --device cpu --precision fp32"
    argv += f" --save-every none --steps 5 --log-every 2 --out {tmp_path}"
    assert train_fsdp.main(argv.split()) == 0
    assert inside == [False] * 5 and gc.isenabled() == gc_on
