"""Shard a model over ranks: a table of strategies, and how each engine implements them.

The engines are DDP (plain, or with ZeRO-1's sharded optimizer) and FSDP in two versions: FSDP1
(`FullyShardedDataParallel`, deprecated, used by the study in arXiv 2404.11706) and FSDP2
(`fully_shard`, the maintained one). `apply` is the entry point, for any model in fp32, as in
examples/own_model.py. Copy this one file: it needs only torch.

Three collective operations carry most of the traffic: an all-reduce averages gradients over ranks,
an all-gather gives each rank the shards of all, a reduce-scatter averages gradients and gives each
rank its shard of the result. A unit is what FSDP gathers and frees together: a block, or the root,
which is everything outside the blocks (with wrap="root" the whole model). "Full" values and shapes
are those of an unsharded tensor. "Collective": every rank must call the function.

In order: the strategies and options, `apply`, the engines, one training step, the checks and values
of a model, the checks of the first three steps. Later steps are not checked here: `verify.py` runs
your script on one process and on several, and compares.
"""

import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as optimizers
from torch.utils import checkpoint

# --- The strategies


@dataclass(frozen=True)
class Strategy:
    """One strategy of the table: what is sharded, and over which ranks."""

    engine: Literal["ddp", "zero1", "fsdp"]  # zero1: DDP with ZeRO-1's optimizer
    shard_over: Literal["none", "group", "world"]  # the ranks that share one copy
    reshard_after_forward: bool  # free what was gathered, and gather again in backward
    shards: str  # what each rank holds only a part of
    traffic: str  # the parameter-sized collectives of a step


FULL = "parameters, gradients, states"
GRAD_OP = "gradients and states always; parameters outside of forward and backward"
TWICE = "2 all-gathers, 1 reduce-scatter"
ONCE = "1 all-gather, 1 reduce-scatter"
ACROSS = " in the group; 1 all-reduce of a shard across groups"

STRATEGIES: dict[str, Strategy] = {
    # engine, shard_over, reshard_after_forward, shards, traffic
    "ddp": Strategy("ddp", "none", False, "nothing", "1 all-reduce"),
    "zero1": Strategy("zero1", "none", False, "optimizer states", "1 all-reduce, 1 broadcast"),
    "no_shard": Strategy("fsdp", "none", False, "nothing", "1 all-reduce"),
    "shard_grad_op": Strategy("fsdp", "world", False, GRAD_OP, ONCE),
    "full_shard": Strategy("fsdp", "world", True, FULL, TWICE),
    "hybrid": Strategy("fsdp", "group", True, FULL, TWICE + ACROSS),
    "hybrid_grad_op": Strategy("fsdp", "group", False, GRAD_OP, ONCE + ACROSS),
}


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Options of `apply` besides the mode, mostly named like the flags of train_fsdp.py."""

    fsdp: Literal[1, 2] = 2  # FSDP1 or FSDP2, where the engine is fsdp
    wrap: Literal["block", "root"] = "block"  # FSDP: a unit is a block, or the whole model
    param_dtype: torch.dtype = torch.bfloat16  # for computing; parameters are stored in fp32
    reduce_dtype: torch.dtype = torch.float32  # for averaging gradients over ranks
    cast_inputs: bool = True  # FSDP: cast the inputs of model and blocks to param_dtype
    # FSDP: when to gather the next unit in backward; backward_post is FSDP1's
    prefetch: Literal["none", "backward_pre", "backward_post"] = "backward_pre"
    forward_prefetch: bool = False  # FSDP: gather the next unit ahead of time in forward too
    limit_all_gathers: bool = True  # FSDP1: keep the CPU from gathering far ahead
    cpu_offload: bool = False  # FSDP2: keep shards, gradients and states on the CPU
    bucket_cap_mb: float | None = None  # DDP: size of a bucket in MiB; None is PyTorch's default
    find_unused_parameters: bool = False  # DDP, FSDP2: a rank may leave parameters unused
    ac: Literal["none", "selective", "full"] = "none"  # activation checkpointing of each block
    preserve_rng_state: bool = True  # ac: recompute with the same dropout masks
    compile: bool = False  # torch.compile for each block


def applicable_options(mode: str, fsdp: int) -> dict[str, bool]:
    """Tell whether each option, of those that not all modes and versions of FSDP have, applies."""
    strategy = STRATEGIES[mode]
    is_fsdp = strategy.engine == "fsdp"
    gathers = strategy.shard_over != "none"
    finds_unused = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # from torch 2.14 on
    return {
        "fsdp": is_fsdp,
        "wrap": is_fsdp,
        "prefetch": strategy.reshard_after_forward,  # the others gather nothing in backward
        "forward_prefetch": gathers,
        "limit_all_gathers": gathers and fsdp == 1,
        "cpu_offload": is_fsdp and fsdp == 2,
        "bucket_cap_mb": not is_fsdp,
        "find_unused_parameters": not is_fsdp or (fsdp == 2 and finds_unused),
    }


def check_options(mode: str, options: ShardingOptions) -> None:
    """Raise ValueError for a mode that does not exist, and for options that do not apply to it."""
    if mode not in STRATEGIES:
        raise ValueError(f"there is no mode {mode}: use one of {', '.join(STRATEGIES)}")
    what = f"mode {mode}"
    if STRATEGIES[mode].engine == "fsdp":
        what += f" of FSDP{options.fsdp}"
    for name, applies in applicable_options(mode, options.fsdp).items():
        value = getattr(options, name)
        if value != getattr(ShardingOptions, name) and not applies:
            raise ValueError(f"{name} {value} does not apply to {what}: leave it out")
    if options.prefetch == "backward_post" and options.fsdp == 2:
        raise ValueError("prefetch backward_post is for FSDP1 only: leave it out")
    if options.cpu_offload and options.param_dtype == torch.float16:
        raise ValueError("cpu_offload with fp16 would miss overflows: use bf16")


# --- Applying a strategy: values, activation checkpointing, compile, sharding


def apply(
    model: nn.Module,
    mode: str,
    mesh: DeviceMesh,
    *,
    block_classes: Collection[type[nn.Module]],
    init_fn: Callable[..., Tensor] | None = None,
    options: ShardingOptions = ShardingOptions(),
) -> nn.Module:
    """Shard a model over the mesh; build optimizers afterwards. Collective.

    - `mesh`: dimensions "replicate" and "shard"; mesh.py's `mesh_shape` gives their sizes.
    - `block_classes`: every outermost module of one of these classes is a block; set(): no blocks.
    - `init_fn(name, full shape, device=device)`: for a model on meta; returns the full initial
      value of a parameter or buffer, the same on every rank.

    A model that is not on meta gets rank 0's values. From the inside out:

    1. activation checkpointing of each block: inside FSDP, so that a block is gathered once for
       both its recomputation and its gradient;
    2. torch.compile of each block: its graph contains the recomputation, but not FSDP's hooks;
    3. DDP around the model; or FSDP around each block, then around the model.

    Call the model, not its parts or other methods; under FSDP, the same blocks on all ranks.
    ValueError for arguments and models that are refused, RuntimeError if they differ on a rank.
    """
    check_options(mode, options)
    strategy = STRATEGIES[mode]
    blocks = find_blocks(model, block_classes)
    shards_blocks = strategy.engine == "fsdp" and options.wrap == "block"
    block_units = blocks if shards_blocks else {}
    of_size_1 = {"none": "shard", "world": "replicate"}.get(strategy.shard_over)
    if of_size_1 and mesh[of_size_1].size() > 1:
        raise ValueError(f"{mesh} does not fit mode {mode}: see mesh_shape of mesh.py")
    check_model(model, block_units, strategy)
    original = set(model.parameters())
    values = _InitialValues(model, _device(mesh), init_fn)
    simulated = dist.get_backend() == "fake"  # PyTorch's backend for tensors without values
    if not simulated:
        values.broadcast_from_rank0(must_agree=f"{mode} {list(blocks)} {options}")
    _checkpoint_and_compile(blocks, options)
    if strategy.engine == "fsdp":
        sharded = _fsdp(model, block_units, strategy, mesh, options, values.fill)
    else:
        values.fill(model)
        sharded = _ddp(model.to(_device(mesh)), mesh, options)
    for p in original - set(sharded.parameters()):
        p.replaced_by_sharding = True  # type: ignore[attr-defined]
    if not simulated:
        _check_first_steps(sharded, mesh, options.find_unused_parameters)
    return sharded


def _device(mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank computes on."""
    return torch.empty(0, device=mesh.device_type).device  # with the index of a GPU


def _checkpoint_and_compile(blocks: Mapping[str, nn.Module], options: ShardingOptions) -> None:
    """Have the blocks recompute their activations in backward, and compile them."""
    rng = options.preserve_rng_state
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": rng}
    if options.ac == "selective":
        # only here: Dynamo treats checkpointing with any context_fn as selective
        make_contexts = checkpoint.create_selective_checkpoint_contexts
        settings["context_fn"] = partial(make_contexts, _keep_matmuls)
    if options.compile:
        # By default Dynamo splits each block's graph where DDP's buckets end, so that all-reduces
        # start within a block. One graph is faster, and they still start between blocks.
        torch._dynamo.config.optimize_ddp = False
    for block in blocks.values():
        if options.ac != "none":
            recomputed = partial(checkpoint.checkpoint, block.forward, **settings)
            block.forward = recomputed  # type: ignore[method-assign]
        if options.compile:
            block.compile(dynamic=False)  # a graph for each shape is faster


def _keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> checkpoint.CheckpointPolicy:
    """Save the results of attention and of matrix products; recompute all others when needed.

    But not of a product with fewer output than input features: nothing needs that of an MLP's end.
    """
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        # mm(left, right) or addmm(bias, left, right), where right is (in, out)
        left, right = args[-2:]
        keep = left.shape[-1] <= right.shape[-1]
    else:
        # bmm is attention without a fused kernel
        keep = "scaled_dot_product" in str(op) or op is torch.ops.aten.bmm.default
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if keep else policy.PREFER_RECOMPUTE


# --- The engines


def _ddp(model: nn.Module, mesh: DeviceMesh, options: ShardingOptions) -> nn.Module:
    """DDP: full parameters on every rank, gradients all-reduced in buckets during backward."""
    frozen = not any(p.requires_grad for p in model.parameters())  # a teacher, for example
    if mesh.size() == 1 or frozen:
        return model  # nothing to average: DDP would only add its buckets, or refuse the model
    group = mesh.get_group("replicate")
    sharded = DDP(
        model,
        process_group=group,
        gradient_as_bucket_view=True,  # the gradients lie in the buckets: no second copy
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
    )
    # FSDP does not broadcast buffers at every step either; as an argument this is deprecated
    sharded.broadcast_buffers = False
    if options.reduce_dtype == torch.bfloat16:
        sharded.register_comm_hook(group, default_hooks.bf16_compress_hook)
    elif options.reduce_dtype == torch.float16:
        sharded.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return sharded


def _fsdp(
    model: nn.Module,
    block_units: Mapping[str, nn.Module],
    strategy: Strategy,
    mesh: DeviceMesh,
    options: ShardingOptions,
    fill: Callable[[nn.Module], None],
) -> nn.Module:
    """FSDP1 or FSDP2: give each unit its values, then shard it; the root comes last.

    FSDP2 shards each parameter along dimension 0, FSDP1 a unit's parameters as one flat vector.
    """
    if options.fsdp == 1:
        wrap = _fsdp1_wrapper(strategy, mesh, options)  # returns a new module around its argument
    else:
        wrap = _fsdp2_wrapper(strategy, mesh, options)  # changes its argument, and returns it
    units: list[Any] = []
    for block in block_units.values():
        fill(block)  # full values, until wrap() shards them
        unit = wrap(block)
        _replace(model, block, unit)
        units.append(unit)
    fill(model)  # the root; tensors that already have values are left alone
    sharded = wrap(model)
    if options.fsdp == 2:
        if options.prefetch == "none":
            # only itself, which is gathered already: an empty list would mean the default, the next
            for unit in [*units, sharded]:
                unit.set_modules_to_backward_prefetch([unit])
        if options.forward_prefetch:
            for unit, following in pairwise(units):
                unit.set_modules_to_forward_prefetch([following])
        sharded.register_forward_hook(torch.compiler.disable(_reshard_after_evaluation))
    else:
        for p in sharded.parameters():
            p.flattened_by_fsdp1 = True
    if options.find_unused_parameters:
        sharded.set_reduce_scatter_unused_params(True)
    return sharded


def _replace(model: nn.Module, module: nn.Module, wrapper: nn.Module) -> None:
    """Put a wrapper in the place of a module, under every name that the model has for it."""
    for name, each in [*model.named_modules(remove_duplicate=False)]:
        if each is module:
            model.set_submodule(name, wrapper)


def _reshard_after_evaluation(model: nn.Module, args: Any, output: Any) -> None:
    """Free what FSDP2 has gathered for a forward pass in torch.no_grad(), as no backward will.

    Otherwise the next call would compute with it, even if the shards had changed in between.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


# (shard_over, reshard_after_forward) -> FSDP1's name for the strategy
FSDP1_STRATEGIES = {
    ("world", True): ShardingStrategy.FULL_SHARD,
    ("world", False): ShardingStrategy.SHARD_GRAD_OP,
    ("group", True): ShardingStrategy.HYBRID_SHARD,
    ("group", False): ShardingStrategy._HYBRID_SHARD_ZERO2,
}


def _fsdp1_wrapper(
    strategy: Strategy, mesh: DeviceMesh, options: ShardingOptions
) -> Callable[[nn.Module], Any]:
    """FSDP1: strategy and prefetch are enums; every unit becomes one flat parameter."""
    if mesh["shard"].size() == 1:
        # no other strategy would reduce gradients at all (pytorch#154888)
        sharding = ShardingStrategy.NO_SHARD
        submesh = mesh["replicate"]
        # this warning only advises using DDP
        warnings.filterwarnings("ignore", "The `NO_SHARD`", FutureWarning)
    else:
        sharding = FSDP1_STRATEGIES[strategy.shard_over, strategy.reshard_after_forward]
        submesh = mesh["shard"] if strategy.shard_over == "world" else mesh
    precision = fsdp.MixedPrecision(
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        cast_forward_inputs=options.cast_inputs,
        cast_root_forward_inputs=options.cast_inputs,
    )
    return partial(
        FSDP1,
        device_mesh=submesh,
        sharding_strategy=sharding,
        mixed_precision=precision,
        backward_prefetch=getattr(fsdp.BackwardPrefetch, options.prefetch.upper(), None),
        forward_prefetch=options.forward_prefetch,
        limit_all_gathers=options.limit_all_gathers,
        use_orig_params=True,  # the optimizer sees them, as views: weight decay differs in a unit
        device_id=_device(mesh),  # without it FSDP1 looks for a GPU, even in a CPU run
    )


def _fsdp2_wrapper(
    strategy: Strategy, mesh: DeviceMesh, options: ShardingOptions
) -> Callable[[nn.Module], Any]:
    """FSDP2: the mesh and `reshard_after_forward` set the strategy; parameters become DTensors.

    In backward each unit, the last block first, reduce-scatters its gradients over "shard", then
    all-reduces the resulting shard over "replicate", if the mesh has this dimension.
    """
    offload = fsdp.OffloadPolicy()
    if options.cpu_offload:
        offload = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return partial(
        fsdp.fully_shard,
        mesh=mesh["shard"] if strategy.shard_over == "world" else mesh,
        mp_policy=fsdp.MixedPrecisionPolicy(
            options.param_dtype, options.reduce_dtype, cast_forward_inputs=options.cast_inputs
        ),
        offload_policy=offload,
        # None: free every unit but the root, which is last in forward and first in backward
        reshard_after_forward=None if strategy.reshard_after_forward else False,
    )


# --- One training step: accumulation, autocast, gradient norm


@contextmanager
def accumulation(model: nn.Module, last: bool, *, uses_all: bool = False) -> Iterator[None]:
    """Enclose the forward and backward passes of one micro-batch; `last`: the last of a step.

    Sharded gradients are reduce-scattered after every micro-batch. Over replicas DDP all-reduces
    after the last one only, FSDP after each, which is always right. With `uses_all` FSDP2, and
    no_shard of FSDP1, wait for the last one, too: right only if every micro-batch gives every
    trained parameter a gradient, on every rank.
    """
    deferred: list[Any] = [] if last else [*model.modules()]
    with ExitStack() as stack:
        for module in deferred:
            if isinstance(module, DDP) or (uses_all and _is_unsharded_fsdp1(module)):
                stack.enter_context(module.no_sync())
            if isinstance(module, FSDPModule) and uses_all:
                module.set_requires_all_reduce(False, recurse=False)
                # outside of this context, gradients must be all-reduced as usual
                stack.callback(module.set_requires_all_reduce, True, recurse=False)
        yield


def _is_unsharded_fsdp1(module: Any) -> bool:
    is_root = isinstance(module, FSDP1) and module.check_is_root()
    return is_root and module.sharding_strategy == ShardingStrategy.NO_SHARD


def _contains(model: nn.Module, kind: Any) -> bool:
    """Tell whether a model, or a module in it, is an instance of `kind`."""
    return any(isinstance(module, kind) for module in model.modules())


def autocast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Return an autocast context for `dtype`; it does nothing in fp32, or for FSDP, which casts."""
    if dtype == torch.float32 or _contains(model, FSDP1 | FSDPModule):
        return nullcontext()
    return torch.autocast(device.type, dtype)


def clip_grad_norm(model: nn.Module, max_norm: float = float("inf")) -> Tensor:
    """Compute the norm of all gradients together, and clip them to a norm of at most `max_norm`.

    Returns the norm before clipping, a scalar in fp32, the same on every rank. Collective if
    gradients are sharded. ValueError under FSDP1 if `model` is not what `apply` returned.
    """
    if isinstance(model, FSDP1):
        return model.clip_grad_norm_(max_norm)  # sums over the shard group
    parameters = [p for p in model.parameters() if p.grad is not None]
    if any(hasattr(p, "flattened_by_fsdp1") for p in parameters):
        raise ValueError("FSDP1: give clip_grad_norm the model that shard.apply returned")
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # over all shards
    if max_norm != float("inf"):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# What FSDP1, torch.compile and PyTorch's checkpoint_wrapper insert into the names of parameters
WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}


def original_name(name: str) -> str:
    """Return the name that a parameter had before its model was wrapped."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    # DDP puts "module." in front; a "module" further along is part of the original name
    return ".".join(parts).removeprefix("module.")


def weight_decay_names(model: nn.Module) -> set[str]:
    """List the original names of the parameters to decay: those with two or more dimensions.

    So biases and norms do not decay; tokens such as `cls_token` (1, 1, D) do. Call this before
    `apply`: FSDP1 flattens parameters, which is a ValueError.
    """
    if _contains(model, FSDP1):
        raise ValueError("call weight_decay_names before shard.apply: FSDP1 flattens parameters")
    # a tied parameter has several names: list all of them
    named = model.named_parameters(remove_duplicate=False)
    return {original_name(name) for name, p in named if p.ndim > 1}


def build_optimizer(
    model: nn.Module,
    mode: str,
    decay: Collection[str],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),  # as in MAE
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Build a fused AdamW; `decay` has the original names of the parameters with weight decay.

    An optimizer of your own must be elementwise under FSDP1, like AdamW, because it is given parts
    of tensors. Under zero1 it must update each tensor independently of the others, under FSDP2 it
    must work on DTensors.
    """
    trained = {original_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in trained.items() if name in decay]
    others = [p for name, p in trained.items() if name not in decay]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adamw: Any = torch.optim.AdamW
    if STRATEGIES[mode].engine == "zero1":  # by bucket views a rank sends its part in one piece
        adamw = partial(
            ZeroRedundancyOptimizer, optimizer_class=adamw, parameters_as_bucket_view=True
        )
    return adamw(groups, lr=lr, betas=betas, eps=eps, fused=True)


def optimizer_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Take one optimizer step, unless the scalar tensor `skip`, the same on every rank, is 1."""
    inner: Any = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    # Fused AdamW can skip on the device. Fused SGD could, too, but if its first step is skipped, it
    # starts its momentum from uninitialised memory.
    adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    if not adam or not inner.defaults["fused"]:
        if not skip.item():
            optimizer.step()
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    inner.found_inf = skip.to(parameters[0].device)  # 1: step() changes nothing
    optimizer.step()
    inner.found_inf = None  # a later plain step() must not be skipped too


def build_scaler(
    model: nn.Module, device: torch.device, dtype: torch.dtype
) -> torch.amp.GradScaler | None:
    """Build the gradient scaler that fp16 needs; None for bf16 and fp32.

    All ranks compute the same scale: DDP averages an overflow into every gradient, DTensor reduces
    the overflow flag over the shard group, and FSDP1's scaler reduces it over all ranks.
    """
    if dtype != torch.float16:
        return None
    if _contains(model, FSDP1):
        return ShardedGradScaler(device.type)
    return torch.amp.GradScaler(device.type)


# --- The checks and the initial values of a model


def check_model(model: nn.Module, units: Mapping[str, nn.Module], strategy: Strategy) -> None:
    """Raise ValueError for what is refused; `units` are the blocks that FSDP shards."""
    if "module" in dict(model.named_children()):
        raise ValueError("rename the submodule `module`: DDP needs this name for itself")
    for name, p in model.named_parameters():
        if p.dtype != torch.float32:
            raise ValueError(f"{name} is {p.dtype}, not fp32: call model.float() first")
        if strategy.engine == "fsdp" and (p.ndim == 0 or p.numel() == 0):
            raise ValueError(f"{name} has no rows to shard: give it the shape (1,)")
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(f"{name} has a hook, which would be lost: register it after apply")
    inside = {module for block in units.values() for module in block.modules()}
    places = [(p, name) for name, block in units.items() for p in block.parameters()]
    for module in set(model.modules()) - inside:
        places += [(p, "the root") for p in module.parameters(recurse=False)]
    unit_of: dict[nn.Parameter, str] = {}
    for p, name in places:
        first = unit_of.setdefault(p, name)
        if first != name:  # FSDP would untie it
            where = f"{tuple(p.shape)} is in two units, {first} and {name}"
            raise ValueError(f"a parameter {where}: use other block_classes, wrap root, or ddp")


def find_blocks(model: nn.Module, classes: Collection[type[nn.Module]]) -> dict[str, nn.Module]:
    """Return {name: module} of the outermost modules of these classes; ValueError if none match."""
    wanted = tuple(classes)
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if isinstance(module, wanted) and module is not model and not inside:
            blocks[name] = module
    if classes and not blocks:
        listed = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"block_classes match no module: use set(), or some of {listed}")
    return blocks


class _InitialValues:
    """Gives a model its values, the same on every rank, while it is being sharded."""

    def __init__(self, model: nn.Module, device: torch.device, init_fn: Any) -> None:
        named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        self.name_of = {tensor: name for name, tensor in named}  # before anything is wrapped
        self.device = device
        self.init_fn = init_fn
        # not is_meta, which is true for fake tensors too
        self.on_meta = {tensor for tensor in self.name_of if tensor.device.type == "meta"}
        if bool(self.on_meta) != bool(init_fn):
            raise ValueError("a model on meta, and only such a model, needs `init_fn`")

    @torch.no_grad()
    def broadcast_from_rank0(self, must_agree: str) -> None:
        """Broadcast rank 0's values; RuntimeError if model or `must_agree` differ. Collective."""
        described = [(n, t.shape, t.dtype, t in self.on_meta) for t, n in self.name_of.items()]
        checksum = zlib.crc32(f"{must_agree} {described}".encode())
        if not _same_on_all_ranks(torch.tensor([checksum], device=self.device)):
            raise RuntimeError("the ranks were given different models, modes or options")
        for tensor in self.name_of:
            if tensor.numel() and tensor not in self.on_meta:
                value = tensor.to(self.device).contiguous()
                dist.broadcast(value.view(-1).view(torch.uint8), 0)  # as bytes: any dtype
                tensor.data = value.to(tensor.device)

    @torch.no_grad()
    def fill(self, unit: nn.Module) -> None:
        """Allocate and fill the meta tensors of a module and its submodules."""
        made: dict[Tensor, Tensor] = {}  # tied parameters stay tied
        for module in unit.modules():
            parameters = module.named_parameters(recurse=False, remove_duplicate=False)
            buffers = module.named_buffers(recurse=False, remove_duplicate=False)
            for leaf, tensor in [*parameters, *buffers]:
                if tensor not in self.on_meta:
                    continue
                if tensor not in made:
                    new = torch.empty_like(tensor, device=self.device)
                    new.copy_(self.init_fn(self.name_of[tensor], tensor.shape, device=self.device))
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    made[tensor] = new
                setattr(module, leaf, made[tensor])


def _same_on_all_ranks(numbers: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Tell whether all ranks of a group have the same integers. Collective."""
    extremes = torch.stack([numbers, -numbers])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)  # the largest, and minus the smallest
    return not extremes.sum(0).any().item()


# --- Checks of the first steps: RuntimeError for what would go wrong in silence
CHECKED_STEPS = 3


def _check_first_steps(sharded: nn.Module, mesh: DeviceMesh, unused_allowed: bool) -> None:
    """Check the first steps of the optimizers of a sharded model, by hooks that are then removed.

    Each must have been built after `apply`, and what it trains must have gradients. Afterwards all
    replicas must be equal: they are not if gradients were not averaged, or one rank changed them.
    """
    model = ref(sharded)  # the hooks of optimizers must not keep the model in memory
    names = {id(p): original_name(name) for name, p in sharded.named_parameters()}
    replicas = mesh.get_group("replicate")
    parts: set[int] = set()  # ids of the optimizers inside ZeRO-1's, which have some parameters
    steps = 0

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            parts.add(id(optimizer.optim))

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal steps
        if model() is None or steps >= CHECKED_STEPS or id(optimizer) in parts:
            return
        held: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        if any(hasattr(p, "replaced_by_sharding") for p in held):
            raise RuntimeError("the optimizer was built before shard.apply: build it afterwards")
        own = [p for p in held if id(p) in names]  # an optimizer may be of another model
        if own:
            steps += 1
            _check_step(own, names, replicas, unused_allowed)

    def before_call(model: nn.Module, args: Any) -> None:
        if steps >= CHECKED_STEPS:
            for hook in hooks:  # not in after_step: a step must not remove its own hooks
                hook.remove()

    hooks = [
        optimizers.register_optimizer_step_pre_hook(before_step),
        optimizers.register_optimizer_step_post_hook(after_step),
        sharded.register_forward_pre_hook(torch.compiler.disable(before_call)),
    ]


def _check_step(
    parameters: list[Any], names: Mapping[int, str], replicas: Any, unused_allowed: bool
) -> None:
    """Raise RuntimeError for parameters without gradients, or unequal replicas. Collective."""
    for p in parameters:
        # FSDP1 gives a rank that holds nothing of a parameter no gradient
        if p.requires_grad and p.numel() and p.grad is None and not unused_allowed:
            what = f"{names[id(p)]} has no gradient: freeze what is not trained, end a step with"
            raise RuntimeError(f"{what} accumulation(last=True), or set find_unused_parameters")
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    bits = [shard.detach().view(torch.int32).sum(dtype=torch.int64) for shard in shards]
    if not _same_on_all_ranks(torch.stack(bits), replicas):
        what = "replicas hold different parameters after this step: change them alike on all ranks"
        raise RuntimeError(f"{what}, call the model itself, and end with accumulation(last=True)")


# Names of PyTorch that are private or not documented, and the reason for each:
# ShardingStrategy._HYBRID_SHARD_ZERO2: FSDP1 has no other name for this strategy
# _backward_hooks, _post_accumulate_grad_hooks of a parameter: nothing else tells of its hooks
# torch._dynamo.config.optimize_ddp: the only switch; PyTorch's notes on DDP name it
# found_inf of an optimizer: so GradScaler has a fused optimizer skip a step
