"""How a model is spread over the ranks: the strategy table, and what each engine does with a row.

Three engines: DDP (plain, or with ZeRO-1's sharded optimizer), FSDP1 (`FullyShardedDataParallel`,
deprecated, the one of the published study) and FSDP2 (`fully_shard`, the maintained one). `apply`
is the one way in. The model knows nothing of this file; classes, mesh and initial values come as
arguments. Copy this one file: it needs torch alone.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# (name, whole shape) -> whole fp32 value; KeyError where it has none for that name
InitialValue = Callable[[str, torch.Size], Tensor]
Prefetch = Literal["none", "backward_pre", "backward_post"]

# ---------------------------------------------------------------------------------------------
# The strategies


@dataclass(frozen=True)
class Strategy:
    """One row of the table: what is sharded, over whom, and what it costs on the wire."""

    shards: str  # what each rank holds a part of
    group: Literal["1", "group", "world"]  # ranks that together hold one copy of the parameters
    reshard: bool  # free the gathered parameters after forward, gather again in backward
    fsdp1: ShardingStrategy | None  # the same in FSDP1; None: not an FSDP strategy
    traffic: str  # collectives of parameter size a step
    use_when: str


_S = ShardingStrategy
STRATEGIES: dict[str, Strategy] = {
    "ddp": Strategy(
        "nothing", "1", False, None, "1 all-reduce", "everything fits on one device; the baseline"
    ),
    "zero1": Strategy(
        "optimizer states",
        "1",
        False,
        None,
        "1 all-reduce, 1 broadcast",
        "only the optimizer states are too large",
    ),
    "no_shard": Strategy(
        "nothing", "1", False, _S.NO_SHARD, "1 all-reduce", "as ddp, in FSDP's mixed precision"
    ),
    "shard_grad_op": Strategy(
        "gradients, states; parameters between steps",
        "world",
        False,
        _S.SHARD_GRAD_OP,
        "1 all-gather, 1 reduce-scatter",
        "the bf16 parameters fit whole, the states do not",
    ),
    "full_shard": Strategy(
        "parameters, gradients, states",
        "world",
        True,
        _S.FULL_SHARD,
        "2 all-gather, 1 reduce-scatter",
        "nothing else fits; few nodes",
    ),
    "hybrid": Strategy(
        "parameters, gradients, states",
        "group",
        True,
        _S.HYBRID_SHARD,
        "2 all-gather, 1 reduce-scatter in the group; 1 all-reduce of a shard across groups",
        "many nodes; the smallest group that fits",
    ),
    "hybrid_grad_op": Strategy(
        "gradients, states; parameters between steps",
        "group",
        False,
        _S._HYBRID_SHARD_ZERO2,
        "1 all-gather, 1 reduce-scatter in the group; 1 all-reduce of a shard across groups",
        "as hybrid, with room for the whole bf16 parameters",
    ),
}


def mesh_shape(mode: str, world_size: int, group: int | None = None) -> tuple[int, int]:
    """(replicate, shard) of a mode; `group` is needed by the hybrid modes alone.

    Raises ValueError for an unknown mode, or a group given to a mode that has none or vice versa.
    """
    if mode not in STRATEGIES:
        raise ValueError(f"there is no mode {mode}: use one of {', '.join(STRATEGIES)}")
    row = STRATEGIES[mode]
    if (row.group == "group") != (group is not None):
        raise ValueError(f"mode {mode}: a group size belongs to the hybrid modes, got {group}")
    shard = {"1": 1, "world": world_size, "group": group or 0}[row.group]
    return world_size // shard, shard


# ---------------------------------------------------------------------------------------------
# Applying one: activation checkpointing, compile, then sharding


def apply(
    model: nn.Module,
    mode: str,
    mesh: DeviceMesh,
    *,
    block_classes: set[type[nn.Module]],
    initial_value: InitialValue | None,
    device: torch.device,
    fsdp: Literal[1, 2] = 2,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    prefetch: Prefetch = "backward_pre",
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    cpu_offload: bool = False,
    bucket_cap_mb: float | None = None,
    ac: Literal["none", "selective", "full"] = "none",
    compile_blocks: bool = False,
) -> nn.Module:
    """A model on the meta device -> the same, spread over the mesh, every value initialised.

    With `initial_value` None there is memory but no value in it: fake tensors have none.

    The mesh has the dimensions ("replicate", "shard") of `mesh_shape`; each instance of
    `block_classes` becomes a unit of its own, or in FSDP2 one with its neighbours (`unit_ranges`);
    what is left is the root unit. Parameters are fp32,
    computed with in `param_dtype`; gradients are summed over ranks in `reduce_dtype`. Collective.
    Follow each forward in training mode by its backward: without, a unit that is not resharded
    after forward (`Strategy.reshard`) would meet its next forward with parameters out of date.
    Raises ValueError where an option does not exist in the engine, RuntimeError where a value was
    left uninitialised.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = [m for m in model.modules() if type(m) in block_classes]
    together = unit_ranges(
        [names[block] for block in blocks],
        [sum(p.numel() for p in block.parameters()) for block in blocks],
    )

    # The order matters. Checkpointing first, so that what is recomputed is inside the compiled
    # region and inside the unit: a block is gathered once for recomputation and gradient together.
    if ac != "none":
        blocks = [_checkpoint(model, names[block], selective=ac == "selective") for block in blocks]
    if compile_blocks:
        # Blocks of one shape share a compilation, and FSDP's hooks stay out of it. Not dynamic: one
        # graph for encoder and decoder blocks alike would be slower than one for each.
        for block in blocks:
            block.compile(dynamic=False)

    strategy = STRATEGIES[mode]
    if strategy.fsdp1 is None:
        materialize(model, names, initial_value, device)
        sharded = _ddp(model, mesh, device, reduce_dtype, bucket_cap_mb)
    elif fsdp == 1:
        sharded = _fsdp1(
            model,
            strategy,
            mesh,
            {type(block) for block in blocks},
            device,
            MixedPrecision(
                param_dtype,
                reduce_dtype,
                buffer_dtype=torch.float32,  # positions stay exact
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,  # so do the targets
            ),
            prefetch,
            forward_prefetch,
            limit_all_gathers,
            cpu_offload,
            init=lambda module: _fill(module, names, initial_value, device),
        )
    else:
        _fsdp2(
            model,
            strategy,
            mesh,
            [[blocks[i] for i in unit] for unit in together],
            MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
            prefetch,
            forward_prefetch,
            cpu_offload,
            device,
        )
        materialize(model, names, initial_value, torch.device("cpu") if cpu_offload else device)
        for buffer in model.buffers():  # parameters are offloaded, tables are not
            buffer.data = buffer.to(device)
        sharded = model
    if initial_value is not None:
        check_initialised(sharded)
    return sharded


def unit_ranges(names: Sequence[str], numels: Sequence[int]) -> list[range]:
    """Which blocks make one unit of FSDP2: neighbours in a stack, up to the size of the largest.

    Blocks are given in the order of forward, by name (`stack.number`) and number of parameters. A
    small unit has as many collectives as a large one, and between many ranks each of them costs
    its latency: MAE's decoder blocks, small beside those of a large encoder, go together. No unit
    is larger than the largest block, so what must be whole at once does not grow.
    """
    largest, ranges = max(numels, default=0), list[range]()
    for i, name in enumerate(names):
        start = ranges[-1].start if ranges else i
        same = names[start].rpartition(".")[0] == name.rpartition(".")[0]
        if ranges and same and sum(numels[start : i + 1]) <= largest:
            ranges[-1] = range(start, i + 1)
        else:
            ranges.append(range(i, i + 1))
    return ranges


def _checkpoint(model: nn.Module, name: str, selective: bool) -> nn.Module:
    """Put a recomputing wrapper around the module called `name`."""
    parent, _, leaf = name.rpartition(".")
    options: dict[str, Any] = {"preserve_rng_state": False}  # nothing random happens in a block
    if selective:
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(_keep_matmuls)
    wrapper = checkpoint_wrapper(model.get_submodule(name), **options)
    setattr(model.get_submodule(parent), leaf, wrapper)
    return wrapper


def _keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing: keep attention and matrix products, redo norms, GELU and sums.

    A product that narrows, the MLP's last, need not be kept: the block's gradient does not use it.
    """
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        left, right = args[-2:]
        keep = left.shape[-1] <= right.shape[-1]
    elif "linear" in str(op):  # F.linear as one operator, with the weight (D', D)
        keep = args[0].shape[-1] <= args[1].shape[0]
    else:  # bmm: attention in plain products
        keep = "scaled_dot_product" in str(op) or op is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _ddp(
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    reduce_dtype: torch.dtype,
    bucket_cap_mb: float | None,
) -> nn.Module:
    """Whole parameters on every rank; gradients all-reduced in buckets during backward.

    One rank has nobody to agree with: the model stays as it is, without a second home, the buckets,
    for its gradients.
    """
    if mesh.size() == 1:
        return model
    # The position tables never change: no need to send them at every step.
    newer = "forward_sync_buffers" in inspect.signature(DDP.__init__).parameters
    still: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
    sharded = DDP(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=mesh.get_group("replicate"),
        gradient_as_bucket_view=True,  # no second copy of the gradients
        bucket_cap_mb=bucket_cap_mb,
        **still,
    )
    hooks = {torch.bfloat16: "bf16_compress_hook", torch.float16: "fp16_compress_hook"}
    if reduce_dtype in hooks:
        group = mesh.get_group("replicate")
        sharded.register_comm_hook(group, getattr(default_hooks, hooks[reduce_dtype]))
    return sharded


def _fsdp1(
    model: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh,
    unit_classes: set[type[nn.Module]],
    device: torch.device,
    precision: MixedPrecision,
    prefetch: Prefetch,
    forward_prefetch: bool,
    limit_all_gathers: bool,
    cpu_offload: bool,
    init: Callable[[nn.Module], None],
) -> nn.Module:
    """FSDP1: the strategy is an enum, the prefetch too, every unit one flat parameter."""
    how = strategy.fsdp1
    where = mesh if strategy.group == "group" else mesh["shard"]
    if mesh["shard"].size() == 1:
        # FSDP1 does not reduce gradients at all when a shard group has one rank
        # (pytorch#154888): whoever asks for that gets the strategy it is meant to equal.
        how, where = ShardingStrategy.NO_SHARD, mesh["replicate"]
    with warnings.catch_warnings():  # that NO_SHARD is better done by DDP is known
        warnings.filterwarnings("ignore", "The `NO_SHARD`", FutureWarning)
        return FSDP1(
            model,
            device_mesh=where,
            sharding_strategy=how,
            auto_wrap_policy=ModuleWrapPolicy(unit_classes),
            mixed_precision=precision,
            backward_prefetch={
                "none": None,
                "backward_pre": BackwardPrefetch.BACKWARD_PRE,
                "backward_post": BackwardPrefetch.BACKWARD_POST,
            }[prefetch],
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            cpu_offload=CPUOffload(offload_params=cpu_offload),
            use_orig_params=True,  # weight decay by parameter needs the parameters
            param_init_fn=init,
            device_id=device,  # a CPU must be named too
        )


def _fsdp2(
    model: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh,
    units: list[list[nn.Module]],
    precision: MixedPrecisionPolicy,
    prefetch: Prefetch,
    forward_prefetch: bool,
    cpu_offload: bool,
    device: torch.device,
) -> None:
    """FSDP2: the strategy is the mesh and `reshard_after_forward`, every parameter a DTensor."""
    # Two dimensions: sharded over the second, replicated over the first. One: sharded over it.
    where = mesh["shard"] if strategy.group == "world" else mesh
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    for blocks in units:
        fully_shard(
            blocks,
            mesh=where,
            reshard_after_forward=strategy.reshard,
            mp_policy=precision,
            offload_policy=offload,
        )
    # The root unit (tokens, embeddings, norms) is used last in forward and first in backward, so
    # the default, None, keeps it gathered in between.
    fully_shard(
        model,
        mesh=where,
        reshard_after_forward=None if strategy.reshard else False,
        mp_policy=precision,
        offload_policy=offload,
    )
    if prefetch == "backward_post":
        raise ValueError("prefetch backward_post exists in FSDP1 only")
    if prefetch == "none":
        # FSDP2 always prefetches the next unit in backward, unless it is told what to prefetch;
        # an empty list tells it nothing, a unit's own name does: it is gathered already.
        for unit in [*(blocks[0] for blocks in units), model]:
            unit.set_modules_to_backward_prefetch([unit])  # type: ignore[operator]
    if forward_prefetch:
        for unit, following in pairwise(blocks[0] for blocks in units):
            unit.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


# ---------------------------------------------------------------------------------------------
# Initial values


def original_name(name: str) -> str:
    """The name a parameter had before it was wrapped."""
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def materialize(
    model: nn.Module,
    names: dict[nn.Module, str],
    initial_value: InitialValue | None,
    device: torch.device,
) -> None:
    """Give a model on the meta device memory on `device` and the values of `initial_value`."""
    for module in model.modules():
        _fill(module, names, initial_value, device)


@torch.no_grad()
def _fill(
    module: nn.Module,
    names: dict[nn.Module, str],
    initial_value: InitialValue | None,
    device: torch.device,
) -> None:
    """The same for one module's own parameters and buffers; a DTensor gets its local shard.

    The whole value is drawn on every rank, one tensor at a time, and cut locally: nothing is sent,
    and the numbers are those of a single process.
    """
    module.to_empty(device=device, recurse=False)
    if initial_value is None:
        return
    for leaf, tensor in _tensors(module, recurse=False):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        try:
            value = initial_value(f"{names[module]}.{leaf}".removeprefix("."), tensor.shape)
        except KeyError:
            local.fill_(float("nan"))  # for check_initialised to find
            continue
        if isinstance(tensor, DTensor):
            where, how = tensor.device_mesh, tensor.placements
            value = distribute_tensor(value.to(device), where, how, src_data_rank=None).to_local()
        local.copy_(value)


def _tensors(module: nn.Module, recurse: bool = True) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]


def check_initialised(model: nn.Module) -> None:
    """RuntimeError that names the parameters and buffers without a value: on meta, or NaN."""
    bad = []
    for name, tensor in _tensors(model):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta or bool(local.isnan().any()):
            bad.append(original_name(name))
    if bad:
        raise RuntimeError(f"no initial value was given to: {', '.join(bad)}")


# ---------------------------------------------------------------------------------------------
# A step: accumulation, gradient norm, optimizer, scaler


def accumulation(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Around forward and backward of an accumulation step; `last` is the one that all-reduces.

    What is not sharded waits with its all-reduce until the last. What is sharded reduce-scatters
    every time (or whole gradients would pile up) and, in hybrid, all-reduces on the last. FSDP1
    cannot part the two: its hybrid modes all-reduce every time, with the same result.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
        return nullcontext()
    unsharded = isinstance(model, DDP) or (
        isinstance(model, FSDP1) and model.sharding_strategy == ShardingStrategy.NO_SHARD
    )
    return model.no_sync() if unsharded and not last else nullcontext()  # type: ignore[operator]


def autocast(
    model: nn.Module, device: torch.device, dtype: torch.dtype
) -> AbstractContextManager[Any]:
    """Around a forward pass: FSDP casts its units to `dtype` itself, the others need autocast."""
    wanted = not isinstance(model, FSDP1 | FSDPModule) and dtype != torch.float32
    return torch.autocast(device.type, dtype) if wanted else nullcontext()


def clip_grad_norm(model: nn.Module, max_norm: float = float("inf")) -> Tensor:
    """Scale the gradients so that their norm over all parameters is at most `max_norm`.

    Returns the norm before, (), fp32, the same number on every rank. Collective where sharded.
    """
    if isinstance(model, FSDP1):
        return model.clip_grad_norm_(max_norm)  # sums over the shard group
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm  # DTensor: sums its shards
    if max_norm != float("inf"):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)
    return whole


def weight_decay_names(model: nn.Module) -> set[str]:
    """Parameters that decay: all but biases and norms (1-D), as in the MAE recipe.

    Asked of the model before it is wrapped: FSDP1 shows every parameter as 1-D.
    """
    return {name for name, p in model.named_parameters() if p.ndim > 1}


def build_optimizer(
    model: nn.Module, mode: str, decay: Iterable[str], *, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Fused AdamW with betas (0.9, 0.95); `decay` names, as before wrapping, what decays."""
    decays = set(decay)
    parameters = [(original_name(n), p) for n, p in model.named_parameters()]
    groups = [
        {"params": [p for n, p in parameters if n in decays], "weight_decay": weight_decay},
        {"params": [p for n, p in parameters if n not in decays], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "fused": True}
    if mode == "zero1":
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **options)
    return torch.optim.AdamW(groups, **options)


def optimizer_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """One step, or none where `skip` (), fp32, is 1: decided on the device, without a host read."""
    # Fused optimizers take the flag by which a gradient scaler skips; it is theirs to read.
    inner: Any = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    inner.found_inf = skip.to(optimizer.param_groups[0]["params"][0].device)
    optimizer.step()


def compile_seconds() -> float:
    """What torch.compile has taken in this process so far."""
    return torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0)


def build_scaler(
    model: nn.Module, device: torch.device, dtype: torch.dtype
) -> torch.amp.GradScaler | None:
    """The gradient scaler that fp16 needs under this engine; None for bf16 and fp32."""
    if dtype != torch.float16:
        return None
    return (ShardedGradScaler if isinstance(model, FSDP1) else torch.amp.GradScaler)(device.type)
