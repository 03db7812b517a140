"""Shard a model over ranks: the strategy table, and what each engine does with a row of it.

Three engines: DDP (plain, or with ZeRO-1's sharded optimizer), FSDP1 (`FullyShardedDataParallel`,
deprecated, used by the published study) and FSDP2 (`fully_shard`, the maintained one). `apply` is
the entry point, for any model in fp32; examples/own_model.py is a whole training loop with it.
Copy this one file: it needs torch alone.
"""

import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp._runtime_utils import _reshard as reshard_fsdp1
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

InitFunction = Callable[..., Tensor]  # (name, whole shape, device=device) -> whole fp32 value

# --- The strategies


@dataclass(frozen=True)
class Strategy:
    """One row of the table: what is sharded, and over which ranks."""

    engine: Literal["ddp", "zero1", "fsdp"]  # zero1: DDP; fsdp: FSDP1 or FSDP2, as asked for
    shard_over: Literal["none", "group", "world"]  # ranks that hold one copy of the parameters
    reshard_after_forward: bool  # free gathered parameters, gather them again in backward
    shards: str  # what each rank holds only a part of

    def traffic(self, *, replicas: int = 2, one_unit: bool = False) -> str:
        """Describe the parameter-sized collectives of a step.

        A model of one unit (wrap root) keeps its gathered parameters until backward.
        """
        if self.engine == "zero1":
            return "1 all-reduce, 1 broadcast"
        if self.shard_over == "none":
            return "1 all-reduce"
        if self.reshard_after_forward and not one_unit:
            text = "2 all-gathers, 1 reduce-scatter"
        else:
            text = "1 all-gather, 1 reduce-scatter"
        if self.shard_over == "group" and replicas > 1:
            text += " in the group; 1 all-reduce of a shard across groups"
        return text


ALL = "parameters, gradients, states"
PART = "gradients and states always; parameters between steps"

STRATEGIES: dict[str, Strategy] = {
    "ddp": Strategy("ddp", "none", False, "nothing"),
    "zero1": Strategy("zero1", "none", False, "optimizer states"),
    "no_shard": Strategy("fsdp", "none", False, "nothing"),
    "shard_grad_op": Strategy("fsdp", "world", False, PART),
    "full_shard": Strategy("fsdp", "world", True, ALL),
    "hybrid": Strategy("fsdp", "group", True, ALL),
    "hybrid_grad_op": Strategy("fsdp", "group", False, PART),
}


def mesh_shape(mode: str, world_size: int, group: int | None = None) -> tuple[int, int]:
    """Return the mesh (replicas, ranks per shard group) of a mode; ValueError where they clash."""
    if mode not in STRATEGIES:
        raise ValueError(f"there is no mode {mode}: use one of {', '.join(STRATEGIES)}")
    shard_over = STRATEGIES[mode].shard_over
    if (shard_over == "group") != bool(group):
        raise ValueError("give `group`, the ranks that share a copy, to the hybrid modes alone")
    if shard_over == "none":
        return world_size, 1
    if shard_over == "world" or group is None:
        return 1, world_size
    if world_size % group:
        raise ValueError(f"{world_size} ranks cannot be split into shard groups of {group}")
    return world_size // group, group


# The options that only some strategies have
FSDP_OPTIONS = {"fsdp", "wrap", "cpu_offload", "tp"}
DDP_OPTIONS = {"bucket_cap_mb"}
GATHER_OPTIONS = {"forward_prefetch", "limit_all_gathers"}


def has_option(strategy: Strategy, name: str) -> bool:
    """Tell whether an option has a meaning for a strategy."""
    if name == "group":
        return strategy.shard_over == "group"
    if name in FSDP_OPTIONS:
        return strategy.engine == "fsdp"
    if name in DDP_OPTIONS:
        return strategy.engine != "fsdp"
    if name in GATHER_OPTIONS:
        return strategy.shard_over != "none"
    if name == "prefetch":
        return strategy.reshard_after_forward  # the others gather nothing in backward
    return True


def invalid_options(
    mode: str, given: Mapping[str, Any], flag_name: Callable[[str], str] = str
) -> Iterator[str]:
    """Yield a sentence for each option (name: value) that has no meaning in a mode.

    `flag_name(name)` is what the user typed for an option.
    """
    strategy = STRATEGIES[mode]
    fsdp1 = given.get("fsdp") == 1
    fp16 = given.get("precision") == "fp16" or given.get("param_dtype") == torch.float16
    for name, value in given.items():
        flag = flag_name(name)
        if not has_option(strategy, name):
            modes = [other for other, row in STRATEGIES.items() if has_option(row, name)]
            yield f"{flag} is for {flag_name('mode')} {', '.join(modes)}, not {mode}: leave it out"
        elif not fsdp1 and (name == "limit_all_gathers" or value == "backward_post"):
            yield f"{flag} {value} exists in FSDP1 only: add {flag_name('fsdp')} 1, or leave it"
        elif name == "tp" and (fsdp1 or given.get("wrap") == "root"):
            yield f"{flag} needs {flag_name('fsdp')} 2 and {flag_name('wrap')} block"
        elif name in ("tp", "cpu_offload") and fp16:
            yield f"{flag} is not for fp16: the loss scale would miss overflows: use bf16"
        elif name == "find_unused_parameters" and strategy.engine == "fsdp":
            if fsdp1:
                yield f"{flag} has no meaning in FSDP1, which reduces whole units: leave it out"
            elif not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
                yield f"{flag} needs torch 2.14 with FSDP2, not {torch.__version__}: use mode ddp"


# --- Applying one: values, activation checkpointing, compile, sharding


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What `apply` can be asked for beyond the mode, by the names of train_fsdp.py's flags."""

    fsdp: Literal[1, 2] = 2  # FSDP1 or FSDP2, where the engine is fsdp
    wrap: Literal["block", "root"] = "block"  # FSDP: a unit is a block, or the whole model
    param_dtype: torch.dtype = torch.bfloat16  # of the computation; stored parameters are fp32
    reduce_dtype: torch.dtype = torch.float32  # in which gradients are averaged over ranks
    cast_inputs: bool = True  # FSDP: to param_dtype, those of the model and of its blocks
    prefetch: Literal["none", "backward_pre", "backward_post"] = "backward_pre"  # post: FSDP1 only
    forward_prefetch: bool = False  # FSDP only
    limit_all_gathers: bool = True  # FSDP1 only
    cpu_offload: bool = False  # FSDP only
    bucket_cap_mb: float | None = None  # DDP only, MiB; None is PyTorch's default
    find_unused_parameters: bool = False  # DDP, FSDP2: some rank does not use some parameters
    ac: Literal["none", "selective", "full"] = "none"  # activation checkpointing of each block
    preserve_rng_state: bool = True  # ac: recompute with the same dropout; not needed without any
    compile: bool = False  # each block


def apply(
    model: nn.Module,
    mode: str,
    mesh: DeviceMesh,
    *,
    block_classes: Collection[type[nn.Module]],
    init_fn: InitFunction | None = None,
    uninitialized: bool = False,
    split_block: Callable[[Any, DeviceMesh], None] | None = None,
    options: ShardingOptions = ShardingOptions(),
) -> nn.Module:
    """Shard a model over the mesh; afterwards all ranks have the same values. Collective.

    `mesh` has the dimensions ("replicate", "shard") of `mesh_shape`, and with FSDP2 perhaps "tp",
    whose ranks share the work of a block: `split_block(block, mesh)` edits it. FSDP gathers and
    frees unit by unit: the outermost modules of `block_classes` (set(): none), and the rest, the
    root. Rank 0's values are kept. A tensor on meta gets its value when its unit is sharded:
    `init_fn(name, shape, device=...)` returns the whole of it, the same on every rank. With
    `uninitialized` it gets memory of any content, for a checkpoint to be loaded; then `init_fn` is
    called only for buffers that no checkpoint has.

    The wrappers, from the inside to the outside:

    1. checkpoint_wrapper around each block, so that FSDP gathers a block once for both its
       recomputation and its gradient;
    2. torch.compile of each block;
    3. DDP around the model; or FSDP around each block, then around the model.

    Build optimizers and register hooks on parameters afterwards. Call the model, not its parts or
    other methods; in a step the same blocks on every rank, or some train on wrong weights without
    an error. FSDP1 moves a parameter that a step did not use (its gradient is zero, not None) and
    makes fp64 buffers fp32: FSDP2 does neither.

    Raises ValueError for invalid arguments, RuntimeError if the ranks have different models.
    """
    strategy = _check_arguments(mode, mesh, split_block is not None, options)
    blocks = find_blocks(model, block_classes)
    units: Mapping[str, nn.Module] = {}
    if strategy.engine == "fsdp" and options.wrap == "block":
        units = blocks
    _check_model(model, blocks, strategy, options)
    _check_units(model, units)
    before = list(model.parameters())
    values = _InitialValues(model, _device(mesh), init_fn, uninitialized)
    values.share(f"{mode} {list(blocks)} {options}")

    def fill(module: nn.Module) -> None:
        values.fill(module)
        if split_block and module in blocks.values():
            split_block(module, mesh)

    _prepare_blocks(model, blocks, options)
    if strategy.engine == "fsdp":
        sharded = _fsdp(model, units, strategy, mesh["replicate", "shard"], options, fill)
    else:
        fill(model)
        sharded = _ddp(model.to(_device(mesh)), mesh, options)
    _mark_parameters(before, sharded)
    return sharded


def _device(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _prepare_blocks(
    model: nn.Module, blocks: Mapping[str, nn.Module], options: ShardingOptions
) -> None:
    """Checkpoint and compile the blocks."""
    context: Callable[[], Any] = noop_context_fn
    if options.ac == "selective":
        context = partial(create_selective_checkpoint_contexts, _keep_matmuls)
    if options.ac != "none":
        for block in blocks.values():
            wrapper = checkpoint_wrapper(
                block, preserve_rng_state=options.preserve_rng_state, context_fn=context
            )
            _replace(model, {block: wrapper})
            _ForwardCheck(wrapper, _own_tensors(block, "_buffers"), CHANGED_BUFFER)
    if options.compile:
        # Dynamo would cut each block into graphs that end with DDP's buckets, so that all-reduces
        # start early within a block; DDP starts them between the blocks, and one graph is faster.
        torch._dynamo.config.optimize_ddp = False
        for name in blocks:
            # Not dynamic: one graph for all blocks would be slower than one for each kind.
            model.get_submodule(name).compile(dynamic=False)


def _replace(model: nn.Module, wrappers: Mapping[nn.Module, nn.Module]) -> None:
    """Put each wrapper in the place of its module, under every name that this has."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = wrappers.get(child, child)


def _keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep attention and matrix products, but the MLP's last, whose result no gradient needs."""
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        left, right = args[-2:]
        keep = left.shape[-1] <= right.shape[-1]
    else:  # bmm: attention without a fused kernel
        keep = "scaled_dot_product" in str(op) or op is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


# --- The engines


def _ddp(model: nn.Module, mesh: DeviceMesh, options: ShardingOptions) -> nn.Module:
    """DDP: whole parameters on every rank, gradients all-reduced in buckets during backward."""
    if mesh.size() == 1:
        return model  # nobody to communicate with: no buckets, a second copy of the gradients
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        _before_each_call(model, partial(_check_frozen, model, trained, True))
        return model  # a teacher, which DDP would refuse
    group = mesh.get_group("replicate")
    sharded = DDP(
        model,
        device_ids=[_device(mesh).index] if mesh.device_type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,  # no second copy of the gradients
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
    )
    sharded.broadcast_buffers = False  # at every step; as in FSDP: most are tables
    if options.reduce_dtype == torch.bfloat16:
        sharded.register_comm_hook(group, default_hooks.bf16_compress_hook)
    elif options.reduce_dtype == torch.float16:
        sharded.register_comm_hook(group, default_hooks.fp16_compress_hook)
    check_frozen = partial(_check_frozen, model, trained, options.find_unused_parameters)
    _before_each_call(sharded, check_frozen)
    _AverageCheck(sharded, model.parameters())
    _WeightsCheck(sharded, [])
    _ReplicaCheck(sharded, group)
    return sharded


def _fsdp(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    strategy: Strategy,
    mesh: DeviceMesh,
    options: ShardingOptions,
    fill: Callable[[nn.Module], None],
) -> nn.Module:
    """FSDP1 or FSDP2: give each unit its values, then cut it; inner units first, the root last.

    FSDP2 cuts each parameter along dimension 0, FSDP1 all of a unit as one flat vector.
    """
    if options.fsdp == 1:
        wrap = _fsdp1_wrapper(strategy, mesh, options)  # returns a new module around its argument
    else:
        wrap = _fsdp2_wrapper(strategy, mesh, options)  # changes its argument, and returns it
    for name, module in blocks.items():
        fill(module)  # whole, until it is cut
        unit = model.get_submodule(name)  # the module, or what checkpoints it
        _replace(model, {unit: wrap(unit)})
    fill(model)  # the rest: what has its values already is left alone
    sharded = wrap(model)
    units: list[Any] = [model.get_submodule(name) for name in blocks]
    if options.fsdp == 2:
        _set_prefetch(units, sharded, options)
    if options.find_unused_parameters:
        sharded.set_reduce_scatter_unused_params(True)
    reshard = torch.compiler.disable(_reshard_without_backward)
    for unit in [*units, sharded]:
        unit.register_forward_hook(reshard)
    _check_fsdp([*units, sharded], options, _device(mesh))
    if mesh["replicate"].size() > 1 and dist.get_backend() != "fake":
        _ReplicaCheck(sharded, mesh.get_group("replicate"))
    return sharded


def _set_prefetch(units: list[Any], root: Any, options: ShardingOptions) -> None:
    """Tell FSDP2 which units to gather ahead of time; by default the next one in backward."""
    if options.prefetch == "none":
        # itself, which is gathered already: an empty list would mean the default, the next unit
        for unit in [*units, root]:
            unit.set_modules_to_backward_prefetch([unit])
    if options.forward_prefetch:
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])


def _fsdp1_wrapper(
    strategy: Strategy, mesh: DeviceMesh, options: ShardingOptions
) -> Callable[[nn.Module], Any]:
    """FSDP1: the strategy is an enum, so is the prefetch; every unit is one flat parameter."""
    submesh = mesh
    if mesh["shard"].size() == 1:
        # otherwise FSDP1 would not reduce gradients at all (pytorch#154888)
        sharding = ShardingStrategy.NO_SHARD
        submesh = mesh["replicate"]
        warnings.filterwarnings("ignore", "The `NO_SHARD`", FutureWarning)  # "use DDP"
    elif strategy.shard_over == "world" and strategy.reshard_after_forward:
        sharding = ShardingStrategy.FULL_SHARD
        submesh = mesh["shard"]
    elif strategy.shard_over == "world":
        sharding = ShardingStrategy.SHARD_GRAD_OP
        submesh = mesh["shard"]
    elif strategy.reshard_after_forward:
        sharding = ShardingStrategy.HYBRID_SHARD
    else:
        sharding = ShardingStrategy._HYBRID_SHARD_ZERO2
    prefetch = {
        "none": None,
        "backward_pre": fsdp.BackwardPrefetch.BACKWARD_PRE,
        "backward_post": fsdp.BackwardPrefetch.BACKWARD_POST,
    }
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
        backward_prefetch=prefetch[options.prefetch],
        forward_prefetch=options.forward_prefetch,
        limit_all_gathers=options.limit_all_gathers,
        cpu_offload=fsdp.CPUOffload(offload_params=options.cpu_offload),
        use_orig_params=True,  # weight decay differs by parameter
        device_id=_device(mesh),  # needed for a CPU too
    )


def _fsdp2_wrapper(
    strategy: Strategy, mesh: DeviceMesh, options: ShardingOptions
) -> Callable[[nn.Module], Any]:
    """FSDP2: the strategy is the mesh and `reshard_after_forward`; parameters become DTensors."""
    offload = fsdp.OffloadPolicy()
    if options.cpu_offload:
        offload = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return partial(
        fully_shard,
        # of two dimensions: replicated over the first
        mesh=mesh["shard"] if strategy.shard_over == "world" else mesh,
        mp_policy=fsdp.MixedPrecisionPolicy(
            options.param_dtype, options.reduce_dtype, cast_forward_inputs=options.cast_inputs
        ),
        offload_policy=offload,
        # None: free all units but the root, used last in forward and first in backward
        reshard_after_forward=None if strategy.reshard_after_forward else False,
    )


def _reshard_without_backward(module: Any, args: Any, output: Any) -> None:
    """Free what a unit of FSDP gathered, after a forward pass that no backward pass will follow.

    Otherwise the root, and in the grad_op modes every unit, would stay gathered: FSDP1 would go on
    with those values when the sharded ones change, and FSDP2's parameters would not be the
    optimizer's.
    """
    if not (torch.is_grad_enabled() and _may_need_backward(output)):
        _reshard(module)


def _reshard(module: Any) -> None:
    """Free what a unit of FSDP gathered."""
    if isinstance(module, FSDPModule):
        module.reshard()
    elif module._handle is not None and module._handle.uses_sharded_strategy:
        reshard_fsdp1(module, module._handle, True)


def _may_need_backward(output: Any) -> bool:
    """Tell whether an output of a module contains a tensor with a gradient, or may contain one."""
    if isinstance(output, Tensor):
        return output.requires_grad
    if isinstance(output, Mapping):
        return any(_may_need_backward(value) for value in output.values())
    if isinstance(output, list | tuple):
        return any(_may_need_backward(value) for value in output)
    return not isinstance(output, int | float | str | None)


# --- A step: accumulation, gradient norm, optimizer, scaler


@contextmanager
def accumulation(model: nn.Module, last: bool, *, uses_all: bool = False) -> Iterator[None]:
    """Enter around forward and backward of each micro-batch of a step; say which is the `last`.

    Sharded gradients are reduce-scattered after every micro-batch. With `uses_all` every micro-
    batch gives every trained parameter a gradient, on every rank: only then FSDP2 all-reduces over
    replicas after the last one alone, and so does FSDP1's no_shard. DDP does so always.
    """
    defer = uses_all and not last
    with ExitStack() as stack:
        for module in model.modules():
            check = getattr(module, "used_check", None)
            if uses_all and isinstance(check, _UsedCheck):
                check.all_used = True
            if isinstance(module, FSDPModule) and defer:
                module.set_requires_all_reduce(False, recurse=False)
                # or a later backward pass, outside of this function, would not be averaged
                stack.callback(module.set_requires_all_reduce, True, recurse=False)
            if isinstance(module, DDP) and not last:
                stack.enter_context(module.no_sync())
            if isinstance(module, FSDP1) and defer and _is_no_shard_root(module):
                stack.enter_context(module.no_sync())
        yield


def _is_no_shard_root(module: FSDP1) -> bool:
    """Tell whether a module is the outermost unit of FSDP1, without shards."""
    return module.sharding_strategy == ShardingStrategy.NO_SHARD and module.check_is_root()


def _has(model: nn.Module, kind: Any) -> bool:
    """Tell whether a model, or a part of it, is of a kind."""
    return any(isinstance(module, kind) for module in model.modules())


def autocast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Enter around a forward pass in `dtype`: FSDP casts its units itself, the others need it."""
    if dtype == torch.float32 or _has(model, FSDP1 | FSDPModule):
        return nullcontext()
    return torch.autocast(device.type, dtype)


def clip_grad_norm(model: nn.Module, max_norm: float = float("inf")) -> Tensor:
    """Scale the gradients so that their norm over all parameters is at most `max_norm`.

    Returns the norm before, (), fp32, the same on every rank. Collective if gradients are sharded.
    ValueError for a module that contains a model sharded by FSDP1; RuntimeError for gradients that
    are not averaged yet.
    """
    for module in model.modules():
        check = getattr(module, "average_check", None)
        if check is not None and not check.averaged:
            raise RuntimeError(
                "the gradients are not averaged over ranks yet: clip them after the micro-batch "
                "that is the last"
            )
    if isinstance(model, FSDP1):
        return model.clip_grad_norm_(max_norm)  # sums over the shard group
    if _has(model, FSDP1):
        raise ValueError("FSDP1: give clip_grad_norm the model that shard.apply returned")
    groups = by_mesh(p for p in model.parameters() if p.grad is not None)
    norms: list[Tensor] = []
    for parameters in groups:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)  # of all shards
    whole = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
    if max_norm != float("inf"):
        for parameters in groups:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)
    return whole


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by their device mesh: --tp has two, PyTorch computes with one at a time."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return list(groups.values())


WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}


def original_name(name: str) -> str:
    """Return the name that a parameter had before its model was wrapped."""
    parts = name.removeprefix("module.").split(".")  # DDP's; a submodule further down keeps it
    return ".".join(part for part in parts if part not in WRAPPERS)


def weight_decay_names(model: nn.Module) -> set[str]:
    """List the original names of what decays: all parameters but biases and norms.

    ValueError for FSDP1, which flattens parameters: call it before `apply`.
    """
    if _has(model, FSDP1):
        raise ValueError("call weight_decay_names before shard.apply: FSDP1 flattens parameters")
    # a shared parameter under all of its names
    named = model.named_parameters(remove_duplicate=False)
    return {original_name(name) for name, p in named if p.ndim > 1}


def build_optimizer(
    model: nn.Module,
    mode: str,
    decay: Collection[str],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),  # of the MAE recipe
    eps: float = 1e-8,
    lr_scale: Callable[[str], float] | None = None,
) -> torch.optim.Optimizer:
    """Build a fused AdamW; `decay` has the original names of what decays.

    `lr_scale` is called with an original name; what it returns is the group's "lr_scale", by which
    the schedule multiplies the rate. Another optimizer must be elementwise, as AdamW is: a shard is
    a piece of a tensor. ValueError if `decay` has names that the model does not have.
    """
    all_names = {original_name(n) for n, _ in model.named_parameters(remove_duplicate=False)}
    unknown = sorted(set(decay) - all_names)
    if unknown:
        raise ValueError(f"the model has no parameter {unknown[0]} to decay: use original names")
    found: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for wrapped_name, p in model.named_parameters():
        name = original_name(wrapped_name)
        scale = 1.0 if lr_scale is None else lr_scale(name)
        if p.requires_grad:
            found.setdefault((name in decay, scale), []).append(p)
    groups: list[dict[str, Any]] = []
    for (decays, scale), parameters in found.items():
        decay_of_group = weight_decay if decays else 0.0
        for of_mesh in by_mesh(parameters):
            group = {"params": of_mesh, "weight_decay": decay_of_group, "lr_scale": scale}
            groups.append(group)
    if STRATEGIES[mode].engine == "zero1":
        return ZeroRedundancyOptimizer(
            groups,
            torch.optim.AdamW,
            parameters_as_bucket_view=True,  # each rank sends its parameters in one piece
            lr=lr,
            betas=betas,
            eps=eps,
            fused=True,
        )
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def optimizer_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Make one step of any optimizer, or none if `skip` (), the same on every rank, is 1."""
    inner: Any = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    # Not SGD: in a first step that is skipped, fused SGD makes a momentum of uninitialised memory.
    adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    if adam and getattr(inner, "_step_supports_amp_scaling", False):
        # Where `found_inf` is 1, fused AdamW changes nothing; it reads that on the device.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        inner.found_inf = skip.to(parameters[0].device)
    elif skip.item():
        return
    optimizer.step()
    inner.found_inf = None  # or a later plain step() would be skipped too


def build_scaler(
    model: nn.Module, device: torch.device, dtype: torch.dtype
) -> torch.amp.GradScaler | None:
    """Build the gradient scaler that fp16 needs; None for bf16 and fp32."""
    if dtype != torch.float16:
        return None
    if _has(model, FSDP1):
        return ShardedGradScaler(device.type)
    return torch.amp.GradScaler(device.type)


# --- Arguments, blocks


def _check_arguments(
    mode: str, mesh: DeviceMesh, split: bool, options: ShardingOptions
) -> Strategy:
    """Return the strategy; ValueError for a mesh or options with which training would go wrong."""
    tp = mesh.shape[2] if split else 1
    group = None
    if mode in STRATEGIES and STRATEGIES[mode].shard_over == "group":
        group = mesh.shape[1]
    wanted = mesh_shape(mode, dist.get_world_size() // tp, group)
    if mesh.shape[:2] != wanted:
        raise ValueError(f"mode {mode} here needs a mesh that begins with {wanted}, not {mesh}")
    given = {n: v for n, v in vars(options).items() if v != getattr(ShardingOptions, n)}
    if tp > 1:
        given["tp"] = tp
    problem = next(invalid_options(mode, given), None)
    if problem:
        raise ValueError(problem)
    if options.cpu_offload and options.fsdp == 1 and mesh.device_type == "cpu":
        raise ValueError("cpu_offload with fsdp 1 needs a GPU to offload from: leave it out")
    return STRATEGIES[mode]


def _check_model(
    model: nn.Module, blocks: Mapping[str, nn.Module], strategy: Strategy, options: ShardingOptions
) -> None:
    """Raise ValueError for a model with which training would go wrong."""
    sharded = strategy.engine == "fsdp"
    if sharded and options.fsdp == 1 and hasattr(model, "_orig_mod"):
        raise ValueError("FSDP1 cannot save a compiled model: compile it after shard.apply")
    if "module" in dict(model.named_children()):
        raise ValueError("rename the submodule module: DDP uses this name")
    recomputed: set[nn.Module] = set()
    if options.ac != "none":
        for block in blocks.values():
            recomputed |= set(block.modules())
    low_precision = sharded and options.param_dtype != torch.float32
    for name, module in model.named_modules():
        _check_statistics(module, module in recomputed, low_precision)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(name, module, sharded)
    for name, p in model.named_parameters():
        _check_parameter(original_name(name), p, sharded)


def _check_statistics(module: nn.Module, recomputed: bool, low_precision: bool) -> None:
    """Raise ValueError for a module that keeps statistics of its forward passes."""
    running = isinstance(module, _NormBase) and module.track_running_stats
    if running and (recomputed or low_precision):
        # recomputation would count each batch twice; FSDP leaves the statistics in fp32
        raise ValueError("BatchNorm needs ac none and, in FSDP, param_dtype fp32: use GroupNorm")
    hooks = module._forward_pre_hooks.values()
    names = {type(part).__name__ for part in [module, *hooks]}
    if recomputed and names & {"_SpectralNorm", "SpectralNorm"}:
        raise ValueError("spectral_norm needs ac none: recomputation would iterate it twice")


def _check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag, sharded: bool) -> None:
    """Raise ValueError for an embedding that several ranks cannot train."""
    if module.max_norm is not None:
        raise ValueError(
            f"{name} has max_norm, which changes weights in forward(), on each rank others: "
            "renormalise them between two steps"
        )
    if module.sparse and sharded:
        raise ValueError(f"{name} has sparse gradients, which FSDP cannot use: sparse=False")


def _check_parameter(name: str, p: nn.Parameter, sharded: bool) -> None:
    """Raise ValueError for a parameter that cannot be sharded."""
    if isinstance(p, nn.parameter.UninitializedParameter):
        raise ValueError(f"{name} has no shape yet: call the model once before shard.apply")
    if p.is_complex():
        raise ValueError(
            f"{name} is {p.dtype}: store its real and imaginary part, as torch.view_as_real does"
        )
    if not p.is_floating_point():
        raise ValueError(f"{name} is {p.dtype}, which is not trained: register it as a buffer")
    if p.dtype != torch.float32:
        raise ValueError(f"{name} is {p.dtype}, but parameters are stored in fp32: .float()")
    if sharded and p.ndim == 0:
        raise ValueError(f"{name} () cannot be sharded: give it one element, the shape (1,)")
    if sharded and p.numel() == 0:
        shape = tuple(p.shape)
        raise ValueError(f"{name} {shape} cannot be sharded, for it is empty: make it a buffer")
    if p._backward_hooks or p._post_accumulate_grad_hooks:
        raise ValueError(f"the hook on {name} would be lost: register it after shard.apply")


def _check_units(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for a parameter in two units, which FSDP would untie."""
    inside: set[nn.Module] = set()
    found: list[tuple[str, nn.Parameter]] = []
    for name, unit in units.items():
        inside |= set(unit.modules())
        found += [(name, p) for p in unit.parameters()]
    for module in model.modules():
        if module not in inside:
            found += [("the root", p) for p in module.parameters(recurse=False)]
    unit_of: dict[nn.Parameter, str] = {}
    for name, p in found:
        first = unit_of.setdefault(p, name)
        if first != name:
            where = f"a parameter {tuple(p.shape)} is in two units, {first} and {name}"
            raise ValueError(f"{where}: use other block_classes, wrap root, or mode ddp")


def find_blocks(model: nn.Module, classes: Collection[type[nn.Module]]) -> dict[str, nn.Module]:
    """Find the outermost modules of these classes, by name; ValueError if there are none."""
    if isinstance(classes, type | str) or not all(isinstance(c, type) for c in classes):
        raise ValueError(f"block_classes is a set of classes, such as {{Block}}, not {classes!r}")
    wanted = tuple(classes)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, wanted) and module is not model:
            found[name] = module
    if wanted and not found:
        listed = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"block_classes match no module: use set(), or classes out of {listed}")
    inner: set[nn.Module] = set()
    for name, block in found.items():
        if type(block).forward is nn.Module.forward:
            kind = type(block).__name__
            raise ValueError(f"{name} is a {kind}, which has no forward(): name its items' class")
        inner |= set(block.modules()) - {block}
    return {name: block for name, block in found.items() if block not in inner}


# --- Initial values


class _InitialValues:
    """The values of a model when it is sharded, the same on every rank."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        init_fn: InitFunction | None,
        uninitialized: bool,
    ) -> None:
        named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        self.names = {tensor: name for name, tensor in named}
        self.device = device
        self.init_fn = init_fn
        self.uninitialized = uninitialized
        on_meta = any(_on_meta(tensor) for tensor in self.names)
        if on_meta != (uninitialized or init_fn is not None):
            raise ValueError(
                "give `init_fn` or `uninitialized` to a model on meta, and to no other"
            )

    @torch.no_grad()
    def share(self, arguments: str) -> None:
        """Send the values that a model has, not those on meta, from rank 0 to all. Collective.

        RuntimeError if the ranks have different models, or arguments.
        """
        if self.uninitialized:
            return  # whoever loads a checkpoint checks its names and shapes
        found = []
        for tensor, name in self.names.items():
            kind = (tensor.shape, tensor.dtype, tensor.requires_grad, _on_meta(tensor))
            found.append((name, kind))
        if not _same_on_all_ranks(f"{arguments} {found}", self.device):
            raise RuntimeError("the ranks were given different models, modes or options")
        for tensor in self.names:
            if tensor.numel() and not _on_meta(tensor):
                value = tensor.to(self.device).contiguous()
                dist.broadcast(value.view(-1).view(torch.uint8), 0)  # as bytes: any dtype
                tensor.data = value.to(tensor.device)

    @torch.no_grad()
    def fill(self, unit: nn.Module) -> None:
        """Give what is on meta in a module and below it memory and values."""
        made: dict[Tensor, Tensor] = {}  # tied parameters stay tied
        for module in unit.modules():
            for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or not _on_meta(tensor):
                    continue
                if tensor not in made:
                    new = torch.empty_like(tensor, device=self.device)
                    if not self.uninitialized or leaf in module._non_persistent_buffers_set:
                        new.copy_(self.value(tensor))
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    made[tensor] = new
                setattr(module, leaf, made[tensor])

    def value(self, tensor: Tensor) -> Tensor:
        """Return the whole value of a tensor on meta; ValueError if nothing can give it one."""
        name = self.names[tensor]
        if self.init_fn is None:
            raise ValueError(
                f"{name} is in no checkpoint: give `init_fn` too, or build this buffer on the CPU"
            )
        return self.init_fn(name, tensor.shape, device=self.device)


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # is_meta is true for fake tensors too


def _same_on_all_ranks(text: str, device: torch.device | None, group: Any = None) -> bool:
    """Tell whether all ranks, or those of a group, have the same text. Collective."""
    crc = zlib.crc32(text.encode())
    extremes = torch.tensor([crc, -crc], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)  # the largest, and minus the smallest
    return extremes.sum().item() == 0


# --- Checks: what sharding would make wrong without an error raises one


def _before_each_call(model: nn.Module, check: Callable[[nn.Module, Any], None]) -> None:
    """Have `check(model, args)` called before each forward pass, and before FSDP's own hooks."""
    model.register_forward_pre_hook(torch.compiler.disable(check), prepend=True)


def _check_fsdp(units: list[Any], options: ShardingOptions, device: torch.device) -> None:
    """Start the checks of a model of FSDP, whose root is the last of its units."""
    root = units[-1]
    real = dist.get_backend() != "fake"  # a simulation has no memory that could be replaced
    if real:
        _WeightsCheck(root, units)
    _before_each_call(root, partial(_check_hooks, list(root.named_parameters())))
    if options.fsdp == 1:
        handles = [unit._handle for unit in units]
        _AverageCheck(root, [handle.flat_param for handle in handles if handle is not None])
        return
    for unit in units:  # FSDP1 raises an error by itself
        _ForwardCheck(unit, _own_tensors(unit, "_parameters"), CHANGED_PARAMETER)
    if real and dist.get_world_size() > 1 and not options.find_unused_parameters:
        _UsedCheck(root, device)


CHANGED_PARAMETER = (
    "{name} was changed in forward(), and FSDP2 loses that: change parameters between two steps, "
    "in torch.no_grad()"
)
CHANGED_BUFFER = (
    "the buffer {name} was changed in forward(), and activation checkpointing would change it a "
    "second time: use ac none, or other block_classes"
)


def _own_tensors(
    unit: nn.Module, kind: Literal["_parameters", "_buffers"]
) -> list[tuple[str, nn.Module, str]]:
    """List (name, module, name in this module) of the tensors of a unit, not of units inside."""
    inner: set[nn.Module] = set()
    for module in unit.modules():
        if isinstance(module, FSDPModule) and module is not unit:
            inner |= set(module.modules())
    found = []
    for path, module in unit.named_modules():
        if module not in inner:
            for leaf in getattr(module, kind):
                found.append((original_name(f"{path}.{leaf}").lstrip("."), module, leaf))
    return found


class _ForwardCheck:
    """Raise RuntimeError if a module changes tensors of its own in a forward pass.

    In the first three passes of a training only: sums of values make a GPU wait.
    """

    def __init__(
        self, module: nn.Module, owners: list[tuple[str, nn.Module, str]], message: str
    ) -> None:
        self.owners = owners  # of each tensor, as `_own_tensors` lists them
        self.message = message
        self.before: list[Any] = []
        self.passes = 0
        self.hooks: list[Any] = []
        if owners:
            # after FSDP has gathered the tensors, and before it frees them
            before = torch.compiler.disable(self.before_forward)
            after = torch.compiler.disable(self.after_forward)
            self.hooks.append(module.register_forward_pre_hook(before))
            self.hooks.append(module.register_forward_hook(after, prepend=True))

    def describe(self) -> list[Any]:
        """Return (shape, what differs if the values do) of each tensor."""
        found: list[Any] = []
        for _, module, leaf in self.owners:
            tensor: Any = getattr(module, leaf)
            if tensor is None:
                found.append((None, None))
            elif isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                found.append((tensor.shape, tensor._version))
            else:  # an average of other weights is often written to `.data`: no new version
                found.append((tensor.shape, str(tensor.detach().sum().item())))
        return found

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Remember the tensors."""
        self.before = []
        if torch.is_grad_enabled() and module.training:
            self.before = self.describe()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare the tensors."""
        if not self.before:
            return
        for (name, _, _), old, new in zip(self.owners, self.before, self.describe(), strict=True):
            # another shape: a table that is built when it is first needed
            if old[0] == new[0] and old != new:
                raise RuntimeError(self.message.format(name=name))
        self.passes += 1
        if self.passes == 3:
            for hook in self.hooks:
                hook.remove()


def _check_hooks(parameters: list[tuple[str, Any]], model: nn.Module, args: Any) -> None:
    """Raise RuntimeError for inference mode, and for hooks on parameters that FSDP never calls."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "FSDP could not train afterwards: use torch.no_grad(), no inference_mode"
        )
    if not torch.is_grad_enabled():
        return
    fsdp1 = isinstance(model, FSDP1)
    for name, p in parameters:
        if p._backward_hooks or (fsdp1 and p._post_accumulate_grad_hooks):
            raise RuntimeError(
                f"FSDP does not call the hook on {original_name(name)}: change its .grad between "
                "backward() and the step, or use register_post_accumulate_grad_hook with FSDP2"
            )


def _check_frozen(
    model: nn.Module, averaged: set[str], unused_allowed: bool, ddp: nn.Module, args: Any
) -> None:
    """Raise RuntimeError if DDP would not notice that a parameter was frozen, or is no longer.

    DDP averages the gradients of the parameters of `model` that are named in `averaged`.
    """
    if not torch.is_grad_enabled():
        return
    if not any(p.requires_grad for p in model.parameters()):
        return  # there is no backward pass
    for name, p in model.named_parameters():
        if p.requires_grad and name not in averaged:
            raise RuntimeError(
                f"DDP does not average the gradient of {name}, which was frozen at "
                "shard.apply: freeze it after shard.apply, or use mode no_shard"
            )
        if name in averaged and not p.requires_grad and not unused_allowed:
            raise RuntimeError(
                f"DDP waits for a gradient of {name}, which was frozen after shard.apply: "
                "use find_unused_parameters=True"
            )


class _AverageCheck:
    """Raise RuntimeError for a gradient that DDP, or FSDP1, does not average over ranks."""

    def __init__(self, model: Any, tensors: Iterable[Tensor]) -> None:
        self.model = model
        self.calls = 0  # of the model, with gradients
        self.last_call: dict[Tensor, int] = {}  # of which each tensor has its gradient
        self.averaged = True  # the last gradients, over ranks
        model.average_check = self  # for clip_grad_norm
        _before_each_call(model, self.before_forward)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self.after_gradient)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Count a call."""
        if torch.is_grad_enabled():
            self.calls += 1

    def after_gradient(self, tensor: Tensor) -> None:
        """Check that there was a call since the last gradient."""
        if isinstance(self.model, DDP):
            averages = self.model.require_backward_grad_sync
        else:
            averages = self.model._sync_gradients
        if averages and self.last_call.get(tensor, 0) == self.calls:
            raise RuntimeError(
                f"{type(self.model).__name__} averages the gradient of one backward() after each "
                "call: call the model, not its methods or parts, and call backward() once"
            )
        self.last_call[tensor] = self.calls
        self.averaged = averages


class _UsedCheck:
    """Raise RuntimeError if ranks use different parameters, whose gradients FSDP2 would mix up.

    In the first three steps, unless `accumulation` is told that all are used.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        self.device = device
        self.all_used = False  # as the caller says
        self.steps = 0
        _before_each_call(model, self.before_forward)
        model.used_check = self
        _check_before_step(self.parameters, self)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Compare the ranks after a micro-batch, before the next one. Collective."""
        if torch.is_grad_enabled():
            self.compare()

    def before_step(self) -> None:
        """Compare the ranks after the last micro-batch. Collective."""
        self.compare()
        self.steps += 1

    def compare(self) -> None:
        """Compare the ranks by which parameters have gradients. Collective."""
        if self.all_used or self.steps >= 3:
            return
        used = [p.grad is not None for p in self.parameters]
        if not _same_on_all_ranks(str(used), self.device):
            raise RuntimeError(
                "the ranks used different parameters, and FSDP2 mixes up their gradients: "
                "use find_unused_parameters=True (torch 2.14), or mode ddp with it"
            )


class _WeightsCheck:
    """Raise RuntimeError for weights that were replaced, or changed where the engine loses that."""

    def __init__(self, model: nn.Module, units: list[Any]) -> None:
        self.units = units  # of FSDP
        self.owners: list[tuple[str, nn.Module, str, Any]] = []
        for path, module in model.named_modules():
            for leaf, p in module._parameters.items():
                if p is not None:
                    name = original_name(f"{path}.{leaf}".lstrip("."))
                    self.owners.append((name, module, leaf, p))
        self.storage: dict[str, Any] = {}
        self.gathered: dict[str, tuple[Any, int]] = {}  # left so by a forward pass: its version
        self.fsdp1 = isinstance(model, FSDP1)
        _before_each_call(model, self.before_forward)
        if units:
            model.register_forward_hook(torch.compiler.disable(self.after_forward))
        if self.fsdp1:
            model.register_load_state_dict_pre_hook(_check_assign)
        _check_before_step(model.parameters(), self)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Compare the parameters with those of shard.apply."""
        self.compare()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Remember what is gathered still, for a backward pass to come."""
        self.gathered = {}
        for name, owner, leaf, p in self.owners:
            now = getattr(owner, leaf, None)
            if self.fsdp1:  # which shows the sharded parameter, and keeps the gathered one
                self.storage[name] = _storage(p)
            if isinstance(now, Tensor) and (self.fsdp1 or now is not p):
                self.gathered[name] = (now, now._version)

    def before_step(self) -> None:
        """Compare, and free what waits for a backward pass that did not come."""
        self.compare()
        for unit in self.units:
            if self.gathered and _is_gathered(unit):
                _reshard(unit)
        self.gathered = {}

    def compare(self) -> None:
        """Compare the parameters with what they were."""
        may_lose = False  # FSDP1 shows the sharded parameters all the time
        if self.gathered:
            may_lose = any(_is_gathered(unit) for unit in self.units)
        for i, (name, owner, leaf, p) in enumerate(self.owners):
            now: Any = getattr(owner, leaf, None)
            gathered: Any
            gathered, version = self.gathered.get(name, (None, None))
            if may_lose and now is not None and now is gathered and now._version != version:
                raise RuntimeError(
                    f"{name} was changed after a forward pass with gradients that no "
                    "backward() followed, and FSDP loses that: evaluate in torch.no_grad()"
                )
            if now is p:
                self.compare_storage(name, p)
            elif isinstance(now, DTensor):  # load_state_dict(assign=True), which FSDP2 follows
                self.owners[i] = (name, owner, leaf, now)
                self.storage.pop(name, None)
                _mark_parameters([p], owner)
                _check_before_step([now], self)
            elif now is not gathered or now is None:
                raise RuntimeError(
                    f"{name} was replaced after shard.apply, and would not be trained together: "
                    "replace it before, or write into it, with copy_() or load_state_dict()"
                )

    def compare_storage(self, name: str, p: Any) -> None:
        """Compare where a parameter is stored; FSDP1 settles this in its first forward pass."""
        if name not in self.storage and not self.fsdp1:
            self.storage[name] = _storage(p)
        if name in self.storage and self.storage[name] != _storage(p):
            raise RuntimeError(
                f"{name} has other memory or another dtype than before, which its engine "
                "does not see: write into it, with copy_() or mul_(), not into .data"
            )


def _is_gathered(unit: Any) -> bool:
    """Tell whether a unit of FSDP may be gathered; always for FSDP2, which frees nothing twice."""
    if isinstance(unit, FSDPModule):
        return True
    handle = unit._handle
    if handle is None or not handle.uses_sharded_strategy:
        return False
    return not handle.needs_unshard()


def _storage(p: Any) -> Any:
    """Return what differs when memory of a parameter is replaced; under DDP, only its dtype."""
    if isinstance(p, DTensor):
        return p.dtype, p.untyped_storage()._cdata
    if p.flat:
        return p.dtype, p.untyped_storage().data_ptr()
    return p.dtype


def _check_assign(module: Any, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
    """Raise RuntimeError for load_state_dict(assign=True) into FSDP1, which would load nothing."""
    if metadata.get("assign_to_params_buffers"):
        raise RuntimeError("FSDP1 would load nothing: load_state_dict without assign=True")


class _ReplicaCheck:
    """Raise RuntimeError if replicas are about to make different steps.

    In the first three steps of an optimizer only: sums of values make a GPU wait.
    """

    def __init__(self, model: Any, group: Any) -> None:
        self.parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        self.group = group
        self.model = model
        self.steps = 0
        _check_before_step(self.parameters, self)

    def before_step(self) -> None:
        """Compare the values and the gradients. Collective."""
        self.steps += 1
        if self.steps > 3:
            return
        sums = []
        for p in self.parameters:
            for tensor in (p, p.grad):
                if tensor is not None:
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    # of bits: exact on any device, and the same for NaN
                    bits = local.detach().view(torch.int32)
                    sums.append(bits.sum(dtype=torch.int64))
        if not sums:
            return
        found = torch.stack(sums).cpu().numpy().tobytes().hex()
        if not _same_on_all_ranks(found, self.parameters[0].device, self.group):
            raise RuntimeError(
                "the ranks hold different weights or gradients: change both in the same way on "
                "all ranks, and take gradients by backward()"
            )


def _check_before_step(parameters: Iterable[Any], check: Any) -> None:
    """Have `check.before_step()` called before a step of an optimizer of these parameters."""
    for p in parameters:
        p.sharding_checks = [*getattr(p, "sharding_checks", []), check]


def _mark_parameters(before: Iterable[nn.Parameter], sharded: nn.Module) -> None:
    """Mark the parameters that may be trained, and those that a model has no longer."""
    now = set(sharded.parameters())
    for p in before:
        if p not in now:
            p.replaced_by_sharding = True  # type: ignore[attr-defined]
    for p in now:
        p.sharding_checks = getattr(p, "sharding_checks", [])  # type: ignore[attr-defined]
        p.flat = isinstance(sharded, FSDP1)  # type: ignore[attr-defined]
    _check_optimizers()


@cache
def _check_optimizers() -> None:
    """Have every optimizer checked at its steps."""
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError for an optimizer that would train nothing, or apart on each rank."""
    checks: dict[Any, None] = {}  # in the same order on all ranks
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if hasattr(p, "replaced_by_sharding"):
            raise RuntimeError(
                "the optimizer was built before shard.apply, which replaced the parameters, or "
                "before load_state_dict(assign=True): build it afterwards"
            )
        for check in getattr(p, "sharding_checks", []):
            checks[check] = None
    _check_membership(optimizer, parameters)
    for check in checks:
        check.before_step()


def _check_membership(optimizer: torch.optim.Optimizer, parameters: list[Any]) -> None:
    """Raise RuntimeError for parameters that no engine averages, or that a shard cannot train."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    outside = [p for p in parameters if not hasattr(p, "sharding_checks")]
    if outside and len(outside) < len(parameters):
        raise RuntimeError(
            f"a parameter {tuple(outside[0].shape)} is in no model that shard.apply returned, and "
            "each rank would train its own: put it into the model before shard.apply"
        )
    if outside and not hasattr(optimizer, "warned"):
        optimizer.warned = True  # type: ignore[attr-defined]
        warnings.warn(
            "an optimizer trains parameters of no model that shard.apply returned: their "
            "gradients are not averaged over ranks by it",
            stacklevel=4,
        )
    whole_tensors = isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor)
    if whole_tensors and any(getattr(p, "flat", False) for p in parameters):
        raise RuntimeError(
            f"{type(optimizer).__name__} needs whole tensors, of which FSDP1 gives it pieces: "
            "use fsdp 2, mode ddp, or an elementwise optimizer such as AdamW"
        )
