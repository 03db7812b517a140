"""The step waits for no number, is compiled once, and its loop keeps the collector out."""

import collections
import gc
import json
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
READS = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "item",
    "unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
}
READ = ROWS if FULL else [("zero1", 2), ("hybrid", 1), ("full_shard", 2)]
COMPILED = ROWS if FULL else [("full_shard", 2)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Reads(TorchDispatchMode):
    """Counts the operations of `READS`, and copies to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in READS or (name == "_to_copy" and kwargs.get("device") not in (None, CPU)):
            self.seen[name] += 1
        return func(*args, **kwargs)


def tiny_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    images = torch.randint(0, 256, (2, 3, 32, 32), generator=generator).to(torch.uint8)
    return images, torch.rand(2, 16, generator=generator)


def stepper(mode: str, fsdp: int, precision: str, device=CPU, **options):
    """A function of the step's number that makes train_fsdp's step on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = world if "hybrid" in mode else None
    grid = mesh.build_mesh(shard.mesh_shape(mode, world, group), device)
    ac_and_more = {"compile": options.pop("compile_blocks", False), **options}
    config = Config(
        "tiny", 32, mode=mode, group=group, fsdp=fsdp, precision=precision, batch=2, **ac_and_more
    )
    run = resolve(config, world, world)
    model, optimizer, scaler = train_fsdp.build_model_and_optimizer(run, grid, device)
    guard = StepGuard(device)
    batches = [tuple(t.to(device) for t in tiny_batch(rank))] * 2

    def step(number: int) -> None:
        train_fsdp.train_step(
            model,
            optimizer,
            scaler,
            guard,
            batches,
            lr=1e-4,
            mask_ratio=0.75,
            clip=1.0,
            dtype=run.dtype,
        )
        if number:
            guard.read(number - 1)  # as the loop does

    return step


def reads_and_recompilations() -> dict:
    """On each rank: host reads of a step by mode and precision; compilations early and late."""
    join()
    found: dict = {"reads": {}, "compiled": {}}
    for mode, fsdp in READ:
        for precision in DTYPES:
            step = stepper(mode, fsdp, precision)
            step(0)
            step(1)
            with Reads() as reads:
                step(2)
            found["reads"][mode, fsdp, precision] = dict(reads.seen)
    with Reads() as reads:
        torch.ones(()).item()
    found["control"] = dict(reads.seen)

    # What breaks a graph or asks for a new one is the same for each back end; this one is quick.
    compile_module = nn.Module.compile
    nn.Module.compile = lambda self, **options: compile_module(self, backend="aot_eager", **options)
    counters = torch._dynamo.utils.counters
    for mode, fsdp in COMPILED:
        torch._dynamo.reset()
        counters.clear()
        step = stepper(mode, fsdp, "fp32", compile_blocks=True)
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
        assert rank["control"] == {"_local_scalar_dense": 1}
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
@pytest.mark.parametrize("precision", DTYPES)
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


RUN = [
    "--model",
    "tiny",
    "--img-size",
    "32",
    "--batch",
    "2",
    "--workers",
    "0",
    "--device",
    "cpu",
    "--save-every",
    "none",
]


def test_the_collector_runs_between_log_steps_never(tmp_path, monkeypatch):
    """Off in every step, though the program around the run has it on; run at the log step."""
    inside, collected, gc_on, train_step = [], [], gc.isenabled(), train_fsdp.train_step
    called = []

    def watched(model, optimizer, scaler, guard, *args, **rest):
        inside.append((guard.voted, gc.isenabled()))
        return train_step(model, optimizer, scaler, guard, *args, **rest)

    def callback(phase, info):
        if phase == "start" and inside:
            collected.append(inside[-1][0])

    monkeypatch.setattr(train_fsdp, "train_step", watched)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(called.append, name))
    gc.callbacks.append(callback)
    try:
        argv = [*RUN, "--steps", "9", "--log-every", "3", "--precision", "fp32"]
        assert train_fsdp.main([*argv, "--out", str(tmp_path)]) == 0
    finally:
        gc.callbacks.remove(callback)
    assert [step for step, _ in inside] == list(range(9))
    assert not any(on for _, on in inside)
    assert {step for step in collected if step < 8} == {2, 5}
    assert gc.isenabled() == gc_on and called == ["freeze", "unfreeze"]


@pytest.mark.full
def test_compile_seconds_are_logged(tmp_path, monkeypatch):
    earlier, total = 1e4, train_fsdp.compile_seconds  # earlier: of another model
    monkeypatch.setattr(train_fsdp, "compile_seconds", lambda: earlier + total())
    argv = [*RUN, "--steps", "4", "--log-every", "1", "--out", str(tmp_path)]
    assert train_fsdp.main([*argv, "--compile"]) == 0
    *_, end = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert 0 < end["compile_seconds"] < end["seconds"]
    assert train_fsdp.main([*argv, "--resume", "none"]) == 0
    *_, end = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert end["compile_seconds"] is None
