"""What a GPU will do, counted on a CPU: fake tensors on a cuda device, a profiler."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import machines
import plan
import shard
import vit
from simulate import fake_world

MESH = ("replicate", "shard")
SMALL = vit.ViTConfig(64, 2, 256, 4, 8, decoder_width=64, decoder_depth=2, decoder_heads=4)


class NormDtypes(TorchDispatchMode):
    """Collect the dtypes of what layer norms read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_layer_norm.default:
            self.found.append({a.dtype for a in args if isinstance(a, Tensor)})
        return func(*args, **({} if kwargs is None else kwargs))


def test_autocast_on_a_gpu_keeps_norms_in_bf16():
    """A bf16 GPU kernel, whose input is saved as it is; the plan counts no fp32 copies either."""
    saved: list[Tensor] = []
    torch.set_autocast_dtype("cuda", torch.bfloat16)  # `torch.autocast` would refuse: no GPU
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(), NormDtypes() as norms:
            with torch.device("cuda"):
                block = vit.Block(64, 4, 256)
                x = torch.empty(2, 10, 64, dtype=torch.bfloat16, requires_grad=True)
            keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, id)
            with keep:
                x = x + block.mlp(block.norm2(x + block.norm1(x)))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert norms.found == [{torch.bfloat16}] * 2 and x.dtype == torch.bfloat16
    fp32 = [t.numel() for t in saved if t.dtype == torch.float32]
    assert all(size <= 2 * 10 for size in fp32), fp32  # a number for each token at most
    held = []
    for mode in ("ddp", "full_shard"):
        planned = plan.PlannedRun(SMALL, mode, 1, 8, 64, 0.75)
        _, unit, *_ = plan.model_units(SMALL, False)
        held.append(plan.block_memory(planned, unit, machines.MACHINES["dgx-h100"]).saved)
    assert held[0] == held[1]


def test_norms_are_pytorchs_in_fp32_and_fsdps_in_bf16():
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
        assert torch.equal(mine(low), theirs.bfloat16()(low))


@pytest.mark.parametrize("ac", ["none", "selective", "full"])
@torch._dynamo.config.patch(optimize_ddp=True)  # and put back afterwards
def test_a_compiled_block_is_one_graph_under_ddp_and_computes_the_same(ac):
    """Dynamo's default would cut it where a bucket ends; it may be checkpointed too."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    images, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 4)
    model = vit.ViTMAE(SMALL, 16)
    expected, _, _ = model(images, 0.5, noise)
    with fake_world(2):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=MESH)
        options = shard.ShardingOptions(compile=True, ac=ac, bucket_cap_mb=0.05)
        wrapped = shard.apply(model, "ddp", mesh, block_classes={vit.Block}, options=options)
        for module in wrapped.modules():
            if module._compiled_call_impl:  # once more, without a C++ compiler
                module.compile(dynamic=False, backend=backend)
        loss, _, _ = wrapped(images, 0.5, noise)
        torch._dynamo.reset()
    assert torch.allclose(loss, expected)
    if ac == "none":
        assert len(graphs) == 2  # one for encoder blocks, one for decoder blocks


def test_pinned_blocks_are_rounded_up_to_powers_of_two():
    """Parameters 4 bytes and gradients 4, both pinned; two moments 8."""
    tiny = vit.MODELS["tiny"]
    planned = plan.PlannedRun(tiny, "full_shard", 4, 8, 96, 0.75, cpu_offload=True)
    shapes = [p.shape for p in vit.ViTMAE(tiny, 96).parameters()]
    sizes = [4 * math.ceil(shape[0] / 4) * shape[1:].numel() for shape in shapes]
    pinned = sum(2 ** math.ceil(math.log2(size)) for size in sizes)
    assert plan.host_bytes(planned) == pytest.approx(2 * pinned + 2 * sum(sizes), rel=0.01)
