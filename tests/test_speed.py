"""The step waits for no number, and is compiled once."""

import itertools

import pytest
import torch
import torch.distributed as dist
from conftest import FULL
from ranks import join, on_ranks
from small_model import CPU, ROWS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mesh
import train_fsdp

# What hands a number, or a number of numbers, to the host: on a GPU it would wait for the device.
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "bincount"}
READ = ROWS if FULL else [("hybrid", 1), ("full_shard", 2)]
PRECISIONS = ("fp32", "bf16") if FULL else ("bf16",)  # bf16 casts more
# one row for each way of wrapping a block
COMPILED = [("full_shard", 2)]
if FULL:
    COMPILED += [("ddp", 2), ("full_shard", 1), ("hybrid", 2)]


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
    guard = train_fsdp.Guard(device)
    number = itertools.count()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, device=device)
    batches = [(images, torch.rand(2, 16, device=device))] * 2

    def step() -> None:
        train_fsdp.train_step(training, guard, next(number), batches, lr=1e-4)
        if device != CPU:  # as the loop does, one step late: reading it on a CPU is no wait
            list(guard.results(wait=False))

    return step


def step_in_every_row() -> None:
    """On every rank: no host reads; two graphs in the first step, nothing new after the second."""
    join()
    with Reads() as control:
        torch.ones(()).item()
    assert control.seen == ["_local_scalar_dense"]
    for mode, fsdp in READ:
        for precision in PRECISIONS:
            step = stepper(mode, fsdp, precision)
            for _ in range(3):  # in which shard.py compares the ranks
                step()
            with Reads() as seen:
                step()
            assert not seen.seen, (mode, fsdp, precision)

    # What breaks a graph or asks for a new one is the same for each back end; this one is quick.
    compile_module = nn.Module.compile
    nn.Module.compile = lambda self, **options: compile_module(self, backend="aot_eager", **options)
    counters = torch._dynamo.utils.counters
    for mode, fsdp in COMPILED:
        torch._dynamo.reset()
        counters.clear()
        step, graphs = stepper(mode, fsdp, "fp32", compiled=True), []
        for _ in range(5):
            step()
            graphs.append(counters["stats"]["unique_graphs"])
        assert not sum(counters["graph_break"].values()), (mode, fsdp)
        assert graphs[0] == 2 and graphs[1:] == [graphs[1]] * 4, (mode, fsdp)
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.slow
def test_no_mode_reads_a_number_in_a_step_and_blocks_are_compiled_in_the_first_only(tmp_path):
    on_ranks(2, step_in_every_row, tmp_path)


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
