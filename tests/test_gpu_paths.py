"""What a GPU will do, counted on a CPU: fake tensors on a cuda device, a profiler."""

import math
import os
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import join, on_ranks
from small_model import batch, build, forward_backward
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import mesh
import plan
import shard
import vit
from planner.machines import MACHINES
from planner.memory import block_memory, host_bytes
from planner.traffic import PlannedRun, model_units
from runtime.agreement import StepGuard
from runtime.config import Config
from runtime.dry_run import fake_world
from runtime.limits import LimitWarning
from runtime.log import Meter
from runtime.run import resolve

MESH = ("replicate", "shard")
SMALL = vit.ViTConfig(64, 2, 256, 4, 8, decoder_width=64, decoder_depth=2, decoder_heads=4)


@pytest.fixture
def cuda_autocast():
    """Autocast to bf16 of a GPU that is not there: `torch.autocast` would refuse."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


class NormDtypes(TorchDispatchMode):
    """Collect the dtypes of what layer norms read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_layer_norm.default:
            self.found.append({a.dtype for a in args if isinstance(a, Tensor)})
        kwargs = {} if kwargs is None else kwargs
        return func(*args, **kwargs)


# --- norms


def test_autocast_on_a_gpu_keeps_norms_in_bf16(cuda_autocast):
    """A bf16 GPU kernel, whose input is saved as it is: no fp32 copy of a token anywhere."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def restore(tensor: Tensor) -> Tensor:
        return tensor

    with FakeTensorMode(), NormDtypes() as norms:
        with torch.device("cuda"):
            block = vit.Block(64, 4, 256)
            x = torch.empty(2, 10, 64, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, restore):
            x = x + block.mlp(block.norm2(x + block.norm1(x)))  # without attention's own copies
    assert norms.found == [{torch.bfloat16}] * 2 and x.dtype == torch.bfloat16
    fp32 = [t.shape for t in saved if t.dtype == torch.float32]
    assert all(shape.numel() <= 2 * 10 for shape in fp32), fp32  # a number for each token at most


def test_norms_are_pytorchs_in_fp32_and_fsdps_in_bf16():
    """The values are those of nn.LayerNorm; of bf16 tokens, with its weights in bf16."""
    torch.manual_seed(0)
    mine = vit.LayerNorm(64, eps=1e-6)
    theirs = torch.nn.LayerNorm(64, eps=1e-6)
    for p in mine.parameters():
        torch.nn.init.normal_(p)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(3, 5, 64)
    assert torch.equal(mine(x), theirs(x))
    low = x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = mine(low)
    assert found.dtype == torch.bfloat16 and torch.equal(found, theirs.bfloat16()(low))


def test_the_plan_counts_no_fp32_copies_for_autocast():
    def saved(mode: str) -> int:
        run = PlannedRun(SMALL, mode, 1, 8, 64, 0.75)
        _, block, *_ = model_units(SMALL, False)
        return block_memory(run, block, MACHINES["dgx-h100"]).saved

    assert saved("ddp") == saved("full_shard")


# --- attention


def test_attention_copies_no_gradient_in_backward():
    """Beyond the one that joins the gradients of q, k and v for the product that made them."""
    attention = vit.Attention(64, 4)
    attention.always_fused = True
    x = torch.randn(2, 10, 64, requires_grad=True)
    grad = torch.randn(2, 10, 64)
    loss = (attention(x) * grad).sum()
    with profile() as profiler:
        loss.backward()
    calls: Counter[str] = Counter()
    event: Any
    for event in profiler.events():
        calls[event.name] += 1
    assert calls["aten::cat"] + calls["aten::stack"] <= 2 and calls["aten::clone"] == 0


# --- compile


@torch._dynamo.config.patch(optimize_ddp=True)  # and put back afterwards
def test_ddp_does_not_cut_a_compiled_block():
    """Into graphs that end with a bucket: dynamo's default under DDP."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = vit.ViTMAE(SMALL, 16)
    with fake_world(2):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=MESH)
        options = shard.ShardingOptions(compile=True, bucket_cap_mb=0.05)
        model = shard.apply(model, "ddp", mesh, block_classes={vit.Block}, options=options)
        for block in model.modules():
            if isinstance(block, vit.Block):  # once more, without a C++ compiler
                block.compile(dynamic=False, backend=backend)
        model(torch.randn(2, 3, 16, 16), 0.5)
    torch._dynamo.reset()
    assert len(graphs) == 2  # one for encoder blocks, one for decoder blocks


@pytest.mark.parametrize("ac", ["selective", "full"])
@torch._dynamo.config.patch(optimize_ddp=True)
def test_a_compiled_block_may_be_checkpointed(ac):
    torch._dynamo.reset()
    images, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 4)
    model = vit.ViTMAE(SMALL, 16)
    expected, _, _ = model(images, 0.5, noise)
    with fake_world(1):
        mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=MESH)
        options = shard.ShardingOptions(compile=True, ac=ac)
        model = shard.apply(model, "ddp", mesh, block_classes={vit.Block}, options=options)
        for module in model.modules():
            if module._compiled_call_impl:  # once more, without a C++ compiler
                module.compile(dynamic=False, backend="eager")
        loss, _, _ = model(images, 0.5, noise)
    loss.backward()
    torch._dynamo.reset()
    assert torch.allclose(loss, expected) and model.cls_token.grad.norm() > 0


# --- waiting for a GPU


class Event:
    """A GPU's event: whether what was queued before it is done when the host asks."""

    done = False

    def __init__(self, blocking: bool = False) -> None:
        assert blocking, "the host would spin while it waits"

    def record(self) -> None:
        """Nothing is queued."""

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        """Nothing is late."""


@pytest.fixture
def gpu_guard(monkeypatch):
    """A guard that believes in a GPU."""
    zeros = torch.zeros

    def on_a_cpu(*shape, pin_memory=False, device=None, **options):
        return zeros(*shape, device="cpu", **options)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "zeros", on_a_cpu)
    with fake_world(1):
        yield StepGuard(torch.device("cuda"))


@pytest.mark.parametrize(
    ("waiting", "gpu_idle", "said"),
    [
        (0.05, False, []),
        (0.05, True, ["a larger --batch (now 32) costs little time"]),
        (0.3, False, ["30% of the time goes by waiting for images, with 2 loader workers"]),
        (0.3, True, ["30% of the time goes by waiting for images, with 2 loader workers"]),
    ],
)
def test_a_run_says_once_what_it_waits_for(gpu_guard, monkeypatch, waiting, gpu_idle, said):
    monkeypatch.setattr(Event, "done", gpu_idle)
    warnings: list[str] = []
    session: Any = types.SimpleNamespace(
        log=types.SimpleNamespace(warn=warnings.append), ranks=None
    )
    run = resolve(Config("tiny", 32, mode="ddp", precision="fp32", workers=2), 1, 1)
    meter = Meter(begin=100, global_batch=32)
    limits = LimitWarning(run, session)
    one = torch.ones(())
    for step in range(101, 161):
        gpu_guard.check_step(one, one)
        gpu_guard.read_results()
        if step < 110:
            meter.waited += 100.0  # the first steps do not count
        meter.seconds += 1.0
        meter.waited += waiting
        if step % 5 == 0:
            limits.check(step, meter, gpu_guard)
            assert step >= 120 or not warnings
    assert len(warnings) == len(said)
    for text, part in zip(warnings, said, strict=True):
        assert part in text


# --- pinned memory


@pytest.mark.parametrize(("mode", "fsdp"), [("full_shard", 2), ("full_shard", 1), ("zero1", 2)])
def test_pinned_blocks_are_rounded_up_to_powers_of_two(mode, fsdp):
    """Parameters 4 bytes, gradients 4, two moments 8; the first two of --cpu-offload are pinned."""
    tiny = vit.MODELS["tiny"]
    offload = mode != "zero1"
    run = PlannedRun(tiny, mode, 4, 8, 96, 0.75, cpu_offload=offload, async_save=True, fsdp=fsdp)
    model = vit.ViTMAE(tiny, 96)
    shapes = [p.shape for p in model.parameters()]
    if mode == "zero1":
        sizes = [4 * shape.numel() for shape in shapes]
    elif fsdp == 2:
        sizes = [4 * math.ceil(shape[0] / 4) * shape[1:].numel() for shape in shapes]
    else:  # a unit is one flat tensor, a little padded
        units = [*model.blocks, *model.decoder_blocks]
        numels = [sum(p.numel() for p in unit.parameters()) for unit in units]  # 4 bytes / 4 ranks
        sizes = [*numels, sum(shape.numel() for shape in shapes) - sum(numels)]
    pinned = sum(2 ** math.ceil(math.log2(size)) for size in sizes)
    found = host_bytes(run)
    if mode == "full_shard":
        assert found["--cpu-offload"] == pytest.approx(2 * pinned + 2 * sum(sizes), rel=0.01)
        assert found["--async-save"] == pytest.approx(3 * pinned, rel=0.01)
    else:  # whole parameters, and a quarter of the moments
        assert "--cpu-offload" not in found
        assert found["--async-save"] == pytest.approx(pinned * (1 + 2 / 4), rel=0.05)


def test_the_plan_says_what_the_host_holds(capsys):
    argv = ["--model", "1b", "--mode", "full_shard", "--world-size", "8", "--cpu-offload"]
    assert plan.main([*argv, "--async-save"]) == 0
    out = capsys.readouterr().out
    # 0.93e9 parameters: (2 x 1.61 + 2) x 4 bytes / 8, and 3 x 1.61 x 4 / 8
    assert "GiB per rank for --cpu-offload: 2.3" in out
    assert "GiB per rank for --async-save: 2.1" in out
    assert plan.main(argv[:-1]) == 0
    assert "per rank for" not in capsys.readouterr().out


def pretend_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let FSDP1 offload from a CPU to a CPU as it does from a GPU: what is pinned is a copy."""
    prepare = FlatParamHandle.prepare_gradient_for_backward

    def prepare_gradient(handle) -> None:
        flat_param = handle.flat_param
        left = flat_param.grad
        if left is not None and left.shape == flat_param._local_shard.shape:  # an averaged one
            flat_param.grad = None  # on a GPU it is on another device than this pass
        prepare(handle)

    patch.setattr(FlatParamHandle, "prepare_gradient_for_backward", prepare_gradient)
    patch.setattr(Tensor, "pin_memory", Tensor.clone)
    patch.setattr(torch.cpu.Stream, "synchronize", lambda stream: None, raising=False)
    patch.setattr(shard, "_check_arguments", lambda *args: None)  # it refuses this on a CPU


@pytest.fixture
def pretended_gpu(monkeypatch):
    pretend_gpu(monkeypatch)


def train(model, optimizer, seeds) -> list[float]:
    """Take a step for each seed; return the losses."""
    losses = []
    for seed in seeds:
        losses.append(forward_backward(model, seed).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare_offloaded(mode, grid, folder) -> None:
    """Hold FSDP1 with cpu_offload against DDP: new models, and ones that resume."""
    model = build("ddp", grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = train(model, optimizer, range(3))
    checkpoint.save(folder / "ddp", 3, model, optimizer)
    expected += train(model, optimizer, range(3, 6))
    model = build(mode, grid, fsdp=1, cpu_offload=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = train(model, optimizer, range(3))
    checkpoint.save(folder / "fsdp1", 3, model, optimizer)
    found += train(model, optimizer, range(3, 6))
    assert found == pytest.approx(expected, rel=1e-5), (found, expected)
    for saved in ("ddp", "fsdp1"):
        again = build(mode, grid, seed=7, fsdp=1, cpu_offload=True)
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        checkpoint.load(folder / saved / "step_00000003", again, optimizer)
        rest = train(again, optimizer, range(3, 6))
        assert rest == pytest.approx(expected[3:], rel=1e-5), (saved, rest, expected)
    # memory that a loop assigns is refused, as without cpu_offload
    some = next(p for p in model.parameters() if p.numel())
    some.data = some.detach().clone()
    with pytest.raises(RuntimeError, match="new memory"):
        forward_backward(model)


def test_fsdp1_trains_and_resumes_what_it_offloads(single, pretended_gpu, tmp_path):
    compare_offloaded("full_shard", single, tmp_path)


def compare_on_two_ranks() -> None:
    """On every rank: the same data, so that the mean over ranks is the gradient of one."""
    join()
    pretend_gpu(pytest.MonkeyPatch())
    for mode, shape in {"full_shard": (1, 2), "shard_grad_op": (1, 2), "no_shard": (2, 1)}.items():
        grid = mesh.build_mesh(shape, torch.device("cpu"))
        compare_offloaded(mode, grid, Path(os.environ["FOLDER"], mode))
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.slow
def test_fsdp1_trains_and_resumes_what_it_offloads_on_two_ranks(tmp_path):
    on_ranks(2, compare_on_two_ranks, tmp_path)


def test_gradients_that_fsdp1_would_overwrite_when_it_offloads_are_refused(single, pretended_gpu):
    """PyTorch's manual: outside of no_sync() it "will use the newly-reduced gradient instead"."""
    model = build("full_shard", single, fsdp=1, cpu_offload=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    forward_backward(model)
    with pytest.raises(RuntimeError, match="does not accumulate"):  # before any step
        forward_backward(model)
    optimizer.step()
    train(model, optimizer, range(2))
    forward_backward(model)
    with pytest.raises(RuntimeError, match="does not accumulate"):
        forward_backward(model)
    model.zero_grad()  # such as after a bad batch
    for _ in range(2):
        with torch.no_grad():
            model(*batch())  # an evaluation
        train(model, optimizer, range(2))
    problems = shard.invalid_options("full_shard", {"cpu_offload": True, "fsdp": 1, "accum": 2})
    assert "use fsdp 2" in " ".join(problems)


def test_a_second_pass_before_a_less_frequent_optimizer_has_stepped_is_refused(
    single, pretended_gpu
):
    model = build("full_shard", single, fsdp=1, cpu_offload=True)
    first, *others = model.parameters()
    often = torch.optim.AdamW([first], lr=1e-2)
    seldom = torch.optim.AdamW(others, lr=1e-2)
    for _ in range(2):  # both after each backward pass
        forward_backward(model)
        often.step()
        seldom.step()
    forward_backward(model)
    often.step()
    often.zero_grad()
    with pytest.raises(RuntimeError, match="does not accumulate"):
        forward_backward(model)


def test_two_calls_before_a_backward_pass_are_refused_when_fsdp1_offloads(single, pretended_gpu):
    """On a GPU, each call moves the parameters to new tensors; those of the second lack a hook."""
    model = build("full_shard", single, fsdp=1, cpu_offload=True)
    model(*batch())  # a loss that is thrown away, such as one that is not finite
    with pytest.raises(RuntimeError, match="with cpu_offload, before the next call"):
        model(*batch())
