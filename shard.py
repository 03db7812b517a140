"""Shard a model over ranks: the strategy table, and what each engine does with a row of it.

Three engines: DDP (plain, or with ZeRO-1's sharded optimizer), FSDP1 (`FullyShardedDataParallel`,
deprecated, used by the published study) and FSDP2 (`fully_shard`, the maintained one). `apply` is
the entry point. The model knows nothing about this file; block classes, mesh and initial values
are arguments. Copy this one file: it needs torch alone.

To add a strategy: one row of STRATEGIES, and the same row in README's table (a test compares them).
Everything else reads the table. Only a row of a new kind needs more: a new `engine` a function like
`_ddp`, a new `group` a line in `mesh_shape`, and both the collectives in planner/traffic.py.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# (name, whole shape) -> whole fp32 value; KeyError if it has none for that name
InitialValue = Callable[[str, torch.Size], Tensor]
Units = list[list[nn.Module]]  # blocks that are gathered and freed together

# ---------------------------------------------------------------------------------------------
# The strategies


@dataclass(frozen=True)
class Strategy:
    """One row of the table: what is sharded, and over which ranks."""

    engine: Literal["ddp", "zero1", "fsdp"]  # zero1: DDP; fsdp: FSDP1 or FSDP2, as asked for
    group: Literal["1", "group", "world"]  # ranks that together hold one copy of the parameters
    reshard: bool  # free the gathered parameters after forward, gather them again in backward
    use_when: str

    @property
    def shards(self) -> str:
        """Say what each rank holds only a part of."""
        if self.group == "1":
            return "optimizer states" if self.engine == "zero1" else "nothing"
        kept = "gradients and states always; parameters between steps"
        return "parameters, gradients, states" if self.reshard else kept

    @property
    def traffic(self) -> str:
        """Count the parameter-sized collectives per step."""
        if self.group == "1":
            return "1 all-reduce, 1 broadcast" if self.engine == "zero1" else "1 all-reduce"
        inside = f"{1 + self.reshard} all-gather, 1 reduce-scatter"
        across = " in the group; 1 all-reduce of a shard across groups"
        return inside + across * (self.group == "group")


STRATEGIES: dict[str, Strategy] = {
    "ddp": Strategy("ddp", "1", False, "everything fits on one device; the baseline"),
    "zero1": Strategy("zero1", "1", False, "only the optimizer states are too large"),
    "no_shard": Strategy("fsdp", "1", False, "like ddp, but with FSDP's mixed precision"),
    "shard_grad_op": Strategy(
        "fsdp", "world", False, "the bf16 parameters fit whole, the states do not"
    ),
    "full_shard": Strategy("fsdp", "world", True, "nothing else fits; few nodes"),
    "hybrid": Strategy("fsdp", "group", True, "many nodes; the smallest group that fits"),
    "hybrid_grad_op": Strategy(
        "fsdp", "group", False, "like hybrid, if the whole bf16 parameters fit"
    ),
}


def mesh_shape(mode: str, world_size: int, group: int | None = None) -> tuple[int, int]:
    """Return the mesh (replicas, ranks per shard group) of a mode; only hybrid modes take `group`.

    Raises ValueError for an unknown mode, a group that the mode does not take, or a missing one.
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


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What `apply` can be asked for beyond the mode."""

    fsdp: Literal[1, 2] = 2  # the engine of a strategy whose engine is fsdp
    param_dtype: torch.dtype = torch.bfloat16  # of the computation; stored parameters are fp32
    reduce_dtype: torch.dtype = torch.float32  # in which gradients are summed over ranks
    prefetch: Literal["none", "backward_pre", "backward_post"] = "backward_pre"  # post: FSDP1 only
    forward_prefetch: bool = False
    limit_all_gathers: bool = True  # FSDP1 only
    cpu_offload: bool = False  # FSDP only
    bucket_cap_mb: float | None = None  # DDP only, MiB; None is PyTorch's default
    ac: Literal["none", "selective", "full"] = "none"  # activation checkpointing
    compile_blocks: bool = False


def apply(
    model: nn.Module,
    mode: str,
    mesh: DeviceMesh,
    *,
    block_classes: set[type[nn.Module]],
    initial_value: InitialValue | None,
    device: torch.device,
    options: ShardingOptions = ShardingOptions(),
) -> nn.Module:
    """Shard a model that is on the meta device over the mesh, and initialise it. Collective.

    `mesh` has the dimensions ("replicate", "shard") of `mesh_shape`. Each module whose class is in
    `block_classes` becomes a unit, gathered and freed as a whole (in FSDP2 small neighbours share
    one, `unit_ranges`); what is left is the root unit. Parameters are fp32, and computed with in
    `param_dtype`. Cast the inputs in your model, as vit.PatchEmbed does: no engine does it
    (`cast_forward_inputs` is False), because tables and targets among them may need fp32.

    `initial_value` gives the value of each parameter and buffer by its name in the model. If it is
    None their memory stays uninitialised: load a checkpoint before the first step.

    Follow each forward pass in training mode by its backward pass, or a unit that is not resharded
    after forward starts the next one with outdated parameters. Raises ValueError if no module is of
    a block class or the engine lacks an option; RuntimeError that names parameters without a value.
    """
    strategy = STRATEGIES[mode]
    names = {module: name for name, module in model.named_modules()}
    units = _prepare_units(model, block_classes, options)
    fill = partial(_materialize, names=names, initial_value=initial_value, device=device)
    if strategy.engine != "fsdp":
        sharded = _ddp(model.apply(fill), mesh, device, options)
    elif options.fsdp == 1:
        sharded = _fsdp1(model, strategy, mesh, units, device, options, fill)
    else:
        sharded = _fsdp2(model, strategy, mesh, units, options)
        sharded.apply(partial(fill, device=torch.device("cpu")) if options.cpu_offload else fill)
        for buffer in sharded.buffers():  # parameters are offloaded, position tables are not
            buffer.data = buffer.to(device)
    if initial_value is not None:
        check_initialised(sharded)
    return sharded


def _prepare_units(
    model: nn.Module, block_classes: set[type[nn.Module]], options: ShardingOptions
) -> Units:
    """Find the blocks, checkpoint and compile them, and group them into units.

    The order matters. Checkpointing comes first, so that the recomputation is inside the compiled
    region and inside the unit: a block is gathered once for recomputation and gradient together.
    """
    found = {name: m for name, m in model.named_modules() if type(m) in block_classes}
    if not found:
        wanted = ", ".join(sorted(c.__name__ for c in block_classes))
        raise ValueError(f"block_classes match no module: {wanted} (subclasses do not count)")
    numels = [sum(p.numel() for p in block.parameters()) for block in found.values()]
    ranges, blocks = unit_ranges(list(found), numels), list(found.values())
    if options.ac != "none":
        blocks = [_checkpoint(model, name, options.ac == "selective") for name in found]
    if options.compile_blocks:
        # Blocks of one shape share a compilation, and FSDP's hooks stay outside of it. Not dynamic:
        # one graph for encoder and decoder blocks alike would be slower than one for each.
        for block in blocks:
            block.compile(dynamic=False)
    return [[blocks[i] for i in unit] for unit in ranges]


def unit_ranges(names: Sequence[str], numels: Sequence[int]) -> list[range]:
    """Group blocks into units of FSDP2: neighbours in a stack, up to the size of the largest block.

    Blocks are given in the order of forward, by name (`stack.number`) and number of parameters.
    """
    # A small unit has as many collectives as a large one, and over many ranks each costs its
    # latency: so MAE's decoder blocks, small beside those of a large encoder, are grouped. No unit
    # is larger than the largest block: the memory for gathered parameters does not grow.
    largest, ranges = max(numels, default=0), list[range]()
    for i, name in enumerate(names):
        start = ranges[-1].start if ranges else i
        same_stack = names[start].rpartition(".")[0] == name.rpartition(".")[0]
        if ranges and same_stack and sum(numels[start : i + 1]) <= largest:
            ranges[-1] = range(start, i + 1)
        else:
            ranges.append(range(i, i + 1))
    return ranges


def _checkpoint(model: nn.Module, name: str, selective: bool) -> nn.Module:
    """Wrap the module `name` for activation checkpointing."""
    parent, _, leaf = name.rpartition(".")
    options: dict[str, Any] = {"preserve_rng_state": False}  # nothing random happens in a block
    if selective:
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(_keep_matmuls)
    wrapper = checkpoint_wrapper(model.get_submodule(name), **options)
    setattr(model.get_submodule(parent), leaf, wrapper)
    return wrapper


def _keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing: keep attention and matrix products, recompute norms, GELU and sums.

    A product that narrows, the MLP's last, is not kept: no gradient in the block needs its result.
    """
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        left, right = args[-2:]
        keep = left.shape[-1] <= right.shape[-1]
    elif "linear" in str(op):  # F.linear as one operator, with the weight (D', D)
        keep = args[0].shape[-1] <= args[1].shape[0]
    else:  # bmm: attention without a fused kernel
        keep = "scaled_dot_product" in str(op) or op is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


# ---------------------------------------------------------------------------------------------
# The engines


def _ddp(
    model: nn.Module, mesh: DeviceMesh, device: torch.device, options: ShardingOptions
) -> nn.Module:
    """DDP: whole parameters on every rank, gradients all-reduced in buckets during backward."""
    if mesh.size() == 1:
        return model  # nobody to communicate with: no buckets, a second copy of the gradients
    # The position tables never change: do not broadcast them at every step.
    newer = "forward_sync_buffers" in inspect.signature(DDP.__init__).parameters
    constant: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
    group = mesh.get_group("replicate")
    sharded = DDP(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,  # no second copy of the gradients
        bucket_cap_mb=options.bucket_cap_mb,
        **constant,
    )
    hooks = {torch.bfloat16: "bf16_compress_hook", torch.float16: "fp16_compress_hook"}
    if options.reduce_dtype in hooks:
        sharded.register_comm_hook(group, getattr(default_hooks, hooks[options.reduce_dtype]))
    return sharded


# The strategy's name in FSDP1, by group and reshard
FSDP1_STRATEGIES = {
    ("1", False): ShardingStrategy.NO_SHARD,
    ("world", False): ShardingStrategy.SHARD_GRAD_OP,
    ("world", True): ShardingStrategy.FULL_SHARD,
    ("group", False): ShardingStrategy._HYBRID_SHARD_ZERO2,
    ("group", True): ShardingStrategy.HYBRID_SHARD,
}


def _fsdp1(
    model: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh,
    units: Units,
    device: torch.device,
    options: ShardingOptions,
    init: Callable[[nn.Module], None],
) -> nn.Module:
    """FSDP1: the strategy is an enum, so is the prefetch; every unit is one flat parameter."""
    name = FSDP1_STRATEGIES[strategy.group, strategy.reshard]
    submesh = mesh if strategy.group == "group" else mesh["shard"]
    if mesh["shard"].size() == 1:
        # FSDP1 does not reduce gradients at all if a shard group has one rank (pytorch#154888).
        # NO_SHARD is what such a strategy is meant to equal.
        name, submesh = ShardingStrategy.NO_SHARD, mesh["replicate"]
    with warnings.catch_warnings():  # its advice to use DDP instead of NO_SHARD
        warnings.filterwarnings("ignore", "The `NO_SHARD`", FutureWarning)
        return FSDP1(
            model,
            device_mesh=submesh,
            sharding_strategy=name,
            auto_wrap_policy=ModuleWrapPolicy({type(block) for unit in units for block in unit}),
            mixed_precision=fsdp.MixedPrecision(
                options.param_dtype,
                options.reduce_dtype,
                buffer_dtype=torch.float32,  # position tables stay exact
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,  # so do the targets
            ),
            backward_prefetch=getattr(fsdp.BackwardPrefetch, options.prefetch.upper(), None),
            forward_prefetch=options.forward_prefetch,
            limit_all_gathers=options.limit_all_gathers,
            cpu_offload=fsdp.CPUOffload(offload_params=options.cpu_offload),
            use_orig_params=True,  # weight decay differs by parameter
            param_init_fn=init,
            device_id=device,  # needed for a CPU too
        )


def _fsdp2(
    model: nn.Module, strategy: Strategy, mesh: DeviceMesh, units: Units, options: ShardingOptions
) -> nn.Module:
    """FSDP2: the strategy is the mesh and `reshard_after_forward`; parameters become DTensors."""
    if options.prefetch == "backward_post":
        raise ValueError("prefetch backward_post exists in FSDP1 only")
    pinned = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    shard_unit = partial(
        fully_shard,
        # Two dimensions: sharded over the second, replicated over the first. One: sharded over it.
        mesh=mesh["shard"] if strategy.group == "world" else mesh,
        mp_policy=fsdp.MixedPrecisionPolicy(
            options.param_dtype, options.reduce_dtype, cast_forward_inputs=False
        ),
        offload_policy=pinned if options.cpu_offload else fsdp.OffloadPolicy(),
    )
    for blocks in units:
        shard_unit(blocks, reshard_after_forward=strategy.reshard)
    # The root unit (tokens, embeddings, norms) is used last in forward and first in backward: with
    # None, the default, it stays gathered in between.
    shard_unit(model, reshard_after_forward=None if strategy.reshard else False)
    if options.prefetch == "none":
        # In backward FSDP2 prefetches the next unit unless it has a list of what to prefetch. An
        # empty list counts as none; a unit's own name does nothing, since it is gathered already.
        for unit in [*(blocks[0] for blocks in units), model]:
            unit.set_modules_to_backward_prefetch([unit])  # type: ignore[operator]
    if options.forward_prefetch:
        for unit, following in pairwise(blocks[0] for blocks in units):
            unit.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    return model


# ---------------------------------------------------------------------------------------------
# Initial values


def original_name(name: str) -> str:
    """Return the name that a parameter had before its model was wrapped."""
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


@torch.no_grad()
def _materialize(
    module: nn.Module,
    names: dict[nn.Module, str],
    initial_value: InitialValue | None,
    device: torch.device,
) -> None:
    """Give a module's own parameters and buffers memory on `device` and their initial values."""
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
            # Every rank draws the whole value, one tensor at a time, and cuts its shard from it:
            # nothing is sent, and the values do not depend on the number of ranks.
            on, how = tensor.device_mesh, tensor.placements
            value = distribute_tensor(value.to(device), on, how, src_data_rank=None).to_local()
        local.copy_(value)


def _tensors(module: nn.Module, recurse: bool = True) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]


def check_initialised(model: nn.Module) -> None:
    """Raise RuntimeError that names the parameters and buffers that are on meta or hold a NaN."""
    bad = []
    for name, tensor in _tensors(model):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta or bool(local.isnan().any()):
            bad.append(original_name(name))
    if bad:
        raise RuntimeError(f"no initial value for: {', '.join(bad)}")


# ---------------------------------------------------------------------------------------------
# A step: accumulation, gradient norm, optimizer, scaler


def accumulation(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Enter around forward and backward of one accumulation step; only the `last` one all-reduces.

    Sharded gradients are reduce-scattered at every step, or whole gradients would pile up; hybrid
    modes all-reduce them at the last. FSDP1's hybrid modes cannot part the two: they all-reduce at
    every step, with the same result.
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
    """Enter around a forward pass in `dtype`: FSDP casts its units itself, the others need it."""
    needed = not isinstance(model, FSDP1 | FSDPModule) and dtype != torch.float32
    return torch.autocast(device.type, dtype) if needed else nullcontext()


def clip_grad_norm(model: nn.Module, max_norm: float = float("inf")) -> Tensor:
    """Scale the gradients so that their norm over all parameters is at most `max_norm`.

    Returns the norm before, (), fp32, the same on every rank. Collective if gradients are sharded.
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
    """List the parameters that decay: all but biases and norms (1-D), as in the MAE recipe.

    Call it before the model is wrapped: FSDP1 makes every parameter 1-D.
    """
    return {name for name, p in model.named_parameters() if p.ndim > 1}


def build_optimizer(
    model: nn.Module, mode: str, decay: Iterable[str], *, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Build a fused AdamW, betas (0.9, 0.95); `decay` has the original names of what decays."""
    decays = set(decay)
    parameters = [(original_name(n), p) for n, p in model.named_parameters()]
    groups = [
        {"params": [p for n, p in parameters if n in decays], "weight_decay": weight_decay},
        {"params": [p for n, p in parameters if n not in decays], "weight_decay": 0.0},
    ]
    settings: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "fused": True}
    if STRATEGIES[mode].engine == "zero1":
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings)
    return torch.optim.AdamW(groups, **settings)


def optimizer_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Make one step, or none if `skip` (), fp32, is 1; the host does not wait for the device."""
    # A fused optimizer reads the attribute by which a gradient scaler tells it to skip.
    inner: Any = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    inner.found_inf = skip.to(optimizer.param_groups[0]["params"][0].device)
    optimizer.step()


def compile_seconds() -> float:
    """Return the seconds that torch.compile has taken in this process so far."""
    return torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0)


def build_scaler(
    model: nn.Module, device: torch.device, dtype: torch.dtype
) -> torch.amp.GradScaler | None:
    """Build the gradient scaler that fp16 needs; None for bf16 and fp32."""
    if dtype != torch.float16:
        return None
    return (ShardedGradScaler if isinstance(model, FSDP1) else torch.amp.GradScaler)(device.type)
