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
    _check_model(model, strategy, options)
    _check_units(model, units)
    before = set(model.parameters())
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
    _check_optimizers(replaced=before - set(sharded.parameters()))
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
            _check_forward(wrapper, wrapper.named_buffers, CHANGED_BUFFER)
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
    if not any(p.requires_grad for p in model.parameters()):
        _LoopChecks(model, [], mesh, unused_allowed=True)
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
    _LoopChecks(sharded, [], mesh, unused_allowed=options.find_unused_parameters)
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
        if options.fsdp == 2:  # FSDP1 raises an error by itself
            _check_forward(unit, unit.named_parameters, CHANGED_PARAMETER)
    if dist.get_backend() != "fake":
        allowed = options.find_unused_parameters
        _LoopChecks(sharded, [*units, sharded], mesh, unused_allowed=allowed)
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
    if torch.is_grad_enabled() and _may_need_backward(output):
        return
    if isinstance(module, FSDPModule):
        module.reshard()
    elif module._handle is not None and module._handle.uses_sharded_strategy:
        reshard_fsdp1(module, module._handle, True)  # FSDP1 has no public name for it


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
        checks = getattr(module, "loop_checks", None)
        if checks is not None and not checks.averaged:
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


def _check_model(model: nn.Module, strategy: Strategy, options: ShardingOptions) -> None:
    """Raise ValueError for a model with which training would go wrong."""
    sharded = strategy.engine == "fsdp"
    if sharded and options.fsdp == 1 and hasattr(model, "_orig_mod"):
        raise ValueError("FSDP1 cannot save a compiled model: compile it after shard.apply")
    if "module" in dict(model.named_children()):
        raise ValueError("rename the submodule module: DDP uses this name")
    low_precision = sharded and options.param_dtype != torch.float32
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats and low_precision:
            raise ValueError(f"{name} keeps statistics, in fp32: use param_dtype fp32 or GroupNorm")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.max_norm is not None:
                raise ValueError(
                    f"{name} has max_norm, which changes weights in forward(), on each rank "
                    "others: renormalise them between two steps"
                )
            if module.sparse and sharded:
                raise ValueError(f"{name} has sparse gradients, unknown to FSDP: sparse=False")
    for name, p in model.named_parameters():
        for wrong, sentence in _parameter_table(p, sharded):
            if wrong:
                raise ValueError(f"{original_name(name)} {sentence}")


def _parameter_table(p: nn.Parameter, sharded: bool) -> list[tuple[bool, str]]:
    """Return (condition, sentence) of each reason why a parameter cannot be sharded."""
    if isinstance(p, nn.parameter.UninitializedParameter):
        return [(True, "has no shape yet: call the model once before shard.apply")]
    imaginary = "store its real and imaginary part, as torch.view_as_real does"
    shape = tuple(p.shape)
    return [
        (p.is_complex(), f"is {p.dtype}: {imaginary}"),
        (not p.is_floating_point(), f"is {p.dtype}, which is not trained: make it a buffer"),
        (p.dtype != torch.float32, f"is {p.dtype}, but parameters are stored in fp32: .float()"),
        (sharded and p.ndim == 0, "() cannot be sharded: give it one element, the shape (1,)"),
        (sharded and p.numel() == 0, f"{shape} cannot be sharded, it is empty: make it a buffer"),
        (_has_hook(p, True), "has a hook, which would be lost: register it after shard.apply"),
    ]


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


# --- Checks of a running loop: what sharding would make wrong in silence raises RuntimeError
#
# 1. before each call and step, of every parameter: replaced, edited in vain, a hook that is not
#    called, frozen or unfrozen too late;
# 2. in a forward pass: tensors that a module changes itself;
# 3. after each gradient: a backward pass that belongs to no call;
# 4. before each step: an optimizer of other parameters; and, in the first three steps (it makes a
#    GPU wait), ranks that used other parameters, and replicas that are no longer the same.
# A simulation (the backend "fake") has no values, and none of 1, 3 and 4.

REPLACED = (
    "was replaced after shard.apply, and would not be trained together: replace it "
    "before, or write into it, by copy_() or load_state_dict() without assign=True"
)
EDITED_IN_VAIN = (
    "was changed after a forward pass with gradients that no backward() followed, and FSDP2 loses "
    "that: evaluate in torch.no_grad()"
)
OTHER_MEMORY = (
    "has other memory or another dtype than before, which FSDP2 does not see: write into it, by "
    "copy_() or mul_(), not into .data"
)
LOST_HOOK = (
    "has a hook that FSDP does not call: change its .grad between backward() and the step, or use "
    "register_post_accumulate_grad_hook with FSDP2"
)
OTHER_DTYPE = "is no longer fp32, which DDP averages: use shard.autocast for lower precision"
UNFROZEN = (
    "was frozen at shard.apply, and DDP does not average its gradient: freeze it after "
    "shard.apply, or use mode no_shard"
)
FROZEN = (
    "was frozen after shard.apply, and DDP waits for its gradient: use find_unused_parameters=True"
)


class _LoopChecks:
    """What a loop can do wrong with a sharded model."""

    def __init__(
        self, model: Any, units: list[Any], mesh: DeviceMesh, *, unused_allowed: bool
    ) -> None:
        self.model = model
        self.units = units  # of FSDP; DDP has none
        self.fsdp1 = isinstance(model, FSDP1)
        self.fsdp2 = isinstance(model, FSDPModule)
        # of FSDP1, which then loses gradients if two calls come before a backward pass
        self.low_precision = self.fsdp1 and model.mixed_precision.param_dtype != torch.float32
        self.device = _device(mesh)
        self.replicas = mesh.get_group("replicate")  # ranks that hold the same values
        self.unused_allowed = unused_allowed
        self.owners = _owners(model)
        self.trained = {p for *_, p in self.owners if p.requires_grad}
        self.memory: dict[str, Any] = {}  # of each parameter at its first check
        self.gathered: dict[str, tuple[Any, int]] = {}  # left so by a forward pass; its version
        self.calls = 0  # with gradients
        self.last_call: dict[Tensor, int] = {}  # of which each tensor has its gradient
        self.averaged = True  # the last gradients, over ranks
        self.used = 0  # checksum of which parameters have a gradient after each micro-batch
        self.steps = 0
        for *_, p in self.owners:
            p.loop_checks = self  # for an optimizer
        model.loop_checks = self  # for clip_grad_norm
        model.register_load_state_dict_pre_hook(_refuse_assign)
        # before FSDP's own hooks
        model.register_forward_pre_hook(torch.compiler.disable(self.before_call), prepend=True)
        if units:
            model.__deepcopy__ = _refuse_copy
            model.register_forward_hook(torch.compiler.disable(self.after_call))
        for tensor in _averaged_in_hooks(model, units):
            tensor.register_post_accumulate_grad_hook(self.after_gradient)

    def __deepcopy__(self, memo: Any) -> "_LoopChecks":
        """Stay with this model: its copy by DDP, an average of weights, is not trained."""
        return self

    def before_call(self, module: nn.Module, args: Any) -> None:
        """Check the parameters before a forward pass."""
        if self.units and torch.is_inference_mode_enabled():
            raise RuntimeError(
                "FSDP could not train afterwards: use torch.no_grad(), no inference_mode"
            )
        if self.low_precision:
            self.check_backward()
        self.check_parameters()
        if torch.is_grad_enabled():
            self.calls += 1
            self.note_used()

    def after_call(self, module: nn.Module, args: Any, output: Any) -> None:
        """Remember what FSDP keeps gathered for a backward pass to come, in place of a shard."""
        self.gathered = {}
        for name, owner, leaf, p in self.owners:
            now = getattr(owner, leaf, None)
            # FSDP1 shows shards that it does not read again before a backward pass
            if isinstance(now, Tensor) and (now is not p or self.fsdp1):
                self.gathered[name] = (now, now._version)

    def after_gradient(self, tensor: Tensor) -> None:
        """Raise RuntimeError for a gradient that belongs to no call: it would not be averaged."""
        self.averaged = _averages(self.model)
        if self.averaged and self.last_call.get(tensor, 0) == self.calls:
            raise RuntimeError(
                f"{type(self.model).__name__} averages the gradient of one backward() after each "
                "call: call the model, not its methods or parts, and call backward() once"
            )
        self.last_call[tensor] = self.calls

    def before_step(self) -> None:
        """Check the parameters before a step of an optimizer, and compare the ranks."""
        if _in_backward():  # a step in a hook
            if not self.units:
                raise RuntimeError("DDP has not averaged this gradient: step after backward()")
            return  # other units may still need what they gathered
        self.check_backward()
        self.check_parameters()
        self.note_used()
        if self.gathered and self.fsdp2:
            for unit in self.units:
                unit.reshard()  # as the backward pass would have done that did not come
        self.gathered = {}
        self.steps += 1
        if self.steps <= 3:
            self.compare_ranks()
        self.used = 0

    def check_parameters(self) -> None:
        """Raise RuntimeError for the first parameter with which something is wrong."""
        trains = torch.is_grad_enabled() and any(p.requires_grad for *_, p in self.owners)
        waits = self.fsdp1 and any(_fsdp1_waits_for_backward(unit) for unit in self.units)
        for name, owner, leaf, p in self.owners:
            now: Any = getattr(owner, leaf, None)
            gathered, version = self.gathered.get(name, (p, p._version))
            in_use = now is not p or waits
            edited_in_vain = in_use and now is gathered and gathered._version != version
            memory = _memory_of_fsdp2(p)
            late = trains and not p.requires_grad and p in self.trained
            ddp = not self.units
            for wrong, sentence in (
                (now is not p and now is not gathered, REPLACED),
                (edited_in_vain, EDITED_IN_VAIN),
                (self.memory.setdefault(name, memory) != memory, OTHER_MEMORY),
                (not ddp and _has_hook(p, post_accumulate=self.fsdp1), LOST_HOOK),
                (ddp and p.dtype != torch.float32, OTHER_DTYPE),
                (ddp and p.requires_grad and p not in self.trained, UNFROZEN),
                (ddp and late and not self.unused_allowed, FROZEN),
            ):
                if wrong:
                    raise RuntimeError(f"{name} {sentence}")

    def check_backward(self) -> None:
        """Raise RuntimeError if FSDP1 was called, and its backward pass has not come."""
        if self.fsdp1 and any(_fsdp1_waits_for_backward(unit) for unit in self.units):
            raise RuntimeError(
                "FSDP1 needs a backward() after a call with gradients, before a step and, in low "
                "precision, before the next call: evaluate in torch.no_grad(), give two batches "
                "to one call, or use fsdp 2"
            )

    def note_used(self) -> None:
        """Note which parameters have a gradient after a micro-batch."""
        if self.steps < 3:
            used = [p.grad is not None for *_, p in self.owners]
            self.used = zlib.crc32(f"{self.used} {used}".encode())

    def compare_ranks(self) -> None:
        """Raise RuntimeError for ranks that are about to make different steps. Collective."""
        compares_used = self.fsdp2 and not self.unused_allowed
        if compares_used and not _same_on_all_ranks(str(self.used), self.device):
            raise RuntimeError(
                "the ranks used different parameters, and FSDP2 mixes up their gradients: "
                "use find_unused_parameters=True (torch 2.14), or mode ddp with it"
            )
        trained = [p for *_, p in self.owners if p.requires_grad]
        values = _bits([*trained, *(p.grad for p in trained)])
        if not _same_on_all_ranks(values, self.device, self.replicas):
            raise RuntimeError(
                "the ranks hold different weights or gradients: change both in the same way on "
                "all ranks, and take gradients by backward()"
            )
        loose = str(_loose_gradients)
        _loose_gradients.clear()
        if not _same_on_all_ranks(loose, self.device):
            raise RuntimeError(
                "an optimizer trains parameters of no model that shard.apply returned, and their "
                "gradients differ by rank: put them into the model before shard.apply, or set "
                "optimizer.of_one_rank = True"
            )


def _owners(model: nn.Module) -> list[tuple[str, nn.Module, str, Any]]:
    """List (original name, module, name in this module, parameter) of a model."""
    found: list[tuple[str, nn.Module, str, Any]] = []
    for path, module in model.named_modules():
        for leaf, p in module._parameters.items():
            if p is not None:
                found.append((original_name(f"{path}.{leaf}".lstrip(".")), module, leaf, p))
    return found


def _bits(tensors: Iterable[Any]) -> str:
    """Return sums of the bits of tensors: exact on any device, and the same for NaN."""
    sums = []
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            sums.append(local.detach().float().view(torch.int32).sum(dtype=torch.int64))
    return str(torch.stack(sums).tolist()) if sums else ""


def _refuse_assign(module: Any, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
    """Raise RuntimeError for load_state_dict(assign=True), whose parameters are other ones."""
    if metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            "assign=True would replace the parameters of a sharded model: load_state_dict "
            "without it"
        )


def _refuse_copy(memo: Any) -> None:
    """Raise RuntimeError for deepcopy."""
    raise RuntimeError(
        "a model sharded by FSDP cannot be copied, nor given to AveragedModel: build the model "
        "twice, and give each to shard.apply"
    )


def _check_forward(
    module: nn.Module, named: Callable[[], Iterable[tuple[str, Tensor]]], message: str
) -> None:
    """Raise RuntimeError if a module changes the tensors that `named` lists in a forward pass.

    In the first three passes of a training only: sums of values make a GPU wait.
    """
    before: dict[str, Any] = {}
    further_passes = iter(range(2))

    def values() -> Iterator[tuple[str, Any]]:
        for name, tensor in named():
            # of a frozen one the sum: averages are often written to `.data`, without a new version
            if not isinstance(tensor, DTensor):  # of another unit, which has not gathered it
                changes = tensor._version if tensor.requires_grad else f"{tensor.detach().sum()}"
                yield name, (tensor.shape, changes)

    def remember(module: nn.Module, args: Any) -> None:
        before.clear()
        if torch.is_grad_enabled() and module.training:
            before.update(values())

    def compare(module: nn.Module, args: Any, output: Any) -> None:
        if not before:
            return
        for name, new in values():
            old = before.get(name, new)
            # another shape: a table that is built when it is first needed
            if old[0] == new[0] and old != new:
                raise RuntimeError(message.format(name=original_name(name)))
        if next(further_passes, None) is None:
            for hook in hooks:
                hook.remove()

    # after FSDP has gathered the tensors, and before it frees them
    hooks = [
        module.register_forward_pre_hook(torch.compiler.disable(remember)),
        module.register_forward_hook(torch.compiler.disable(compare), prepend=True),
    ]


CHANGED_PARAMETER = (
    "{name} was changed in forward(), and FSDP2 loses that: change parameters between two steps, "
    "in torch.no_grad()"
)
CHANGED_BUFFER = (
    "the buffer {name} was changed in forward(), and activation checkpointing would change it a "
    "second time: use ac none, or other block_classes"
)

_loose_gradients: list[str] = []  # of optimizers of other parameters, since the last comparison


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError for an optimizer that would train nothing, or apart on each rank."""
    if hasattr(optimizer, "part_of_zero1"):
        return  # of this rank alone: the whole was checked
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.optim.part_of_zero1 = True
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(hasattr(p, "replaced_by_sharding") for p in parameters):
        raise RuntimeError(
            "the optimizer was built before shard.apply, which replaced the parameters: build it "
            "afterwards"
        )
    loose = [p for p in parameters if not hasattr(p, "loop_checks")]
    if loose and dist.is_initialized() and dist.get_world_size() > 1:
        _check_loose(optimizer, loose, len(parameters))
    models = dict.fromkeys(p.loop_checks for p in parameters if hasattr(p, "loop_checks"))
    _check_whole_tensors(optimizer, any(checks.fsdp1 for checks in models))
    for checks in models:  # in the same order on all ranks
        checks.before_step()


def _check_loose(optimizer: torch.optim.Optimizer, loose: list[Any], count: int) -> None:
    """Raise RuntimeError for a parameter that no engine averages, beside others that one does.

    Gradients of an optimizer of loose parameters alone are compared with the next sharded step.
    """
    if len(loose) < count:
        raise RuntimeError(
            f"a parameter {tuple(loose[0].shape)} is in no model that shard.apply returned, and "
            "each rank would train its own: put it into the model before shard.apply"
        )
    if not hasattr(optimizer, "of_one_rank") and len(_loose_gradients) < 3:
        _loose_gradients.append(_bits(p.grad for p in loose if not isinstance(p, DTensor)))


def _check_whole_tensors(optimizer: torch.optim.Optimizer, fsdp1: bool) -> None:
    """Raise RuntimeError for an optimizer that computes with more than an engine shows it."""
    zero1 = isinstance(optimizer, ZeroRedundancyOptimizer)
    inner: Any = getattr(optimizer, "optim", optimizer)  # ZeRO's
    refused: set[type] = set()
    if fsdp1:
        refused = {torch.optim.LBFGS, torch.optim.Adafactor}
    elif zero1:
        refused = {torch.optim.LBFGS}
    if type(inner) in refused:
        raise RuntimeError(
            f"{type(inner).__name__} needs whole tensors, of which zero1 and FSDP1 give it a part: "
            "use fsdp 2, mode ddp, or an elementwise optimizer such as AdamW"
        )


def _check_optimizers(replaced: Iterable[nn.Parameter]) -> None:
    """Have every optimizer checked at its steps, also for parameters that were replaced."""
    for p in replaced:
        p.replaced_by_sharding = True  # type: ignore[attr-defined]
    _register_once()


@cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_check_optimizer)


# --- What torch (2.10 to 2.14) tells by private names alone, most of it about FSDP1


def _fsdp1_waits_for_backward(unit: Any) -> bool:
    """Tell whether FSDP1 was called, and its backward pass has not come.

    Until then it keeps what it gathered and, in low precision, loses the gradient of a next call.
    """
    if unit._handle is None or not unit._handle.flat_param.requires_grad:
        return False
    return hasattr(unit._handle.flat_param, "_post_backward_hook_state")


def _memory_of_fsdp2(p: Any) -> Any:
    """Return what differs if `.data` of a parameter is replaced; DDP and FSDP1 notice that."""
    if isinstance(p, DTensor):
        return p.dtype, p.untyped_storage()._cdata  # it has no address
    return None


def _has_hook(p: Any, post_accumulate: bool) -> bool:
    """Tell whether a parameter has a hook on its gradient, perhaps of the second kind."""
    if post_accumulate and p._post_accumulate_grad_hooks:
        return True
    return bool(p._backward_hooks)


def _averaged_in_hooks(model: Any, units: list[Any]) -> list[Any]:
    """List the tensors whose gradients DDP, or FSDP1, averages when they are computed."""
    tensors: list[Any] = []
    if isinstance(model, DDP):
        tensors = [*model.parameters()]
    elif isinstance(model, FSDP1):
        tensors = [unit._handle.flat_param for unit in units if unit._handle is not None]
    return [tensor for tensor in tensors if tensor.requires_grad]


def _averages(model: Any) -> bool:
    """Tell whether DDP, or FSDP1, averages the gradients of a backward pass: not in `no_sync`."""
    if isinstance(model, DDP):
        return model.require_backward_grad_sync
    return model._sync_gradients


def _in_backward() -> bool:
    """Tell whether this is called in a backward pass, by a hook."""
    return torch._C._current_graph_task_id() != -1
