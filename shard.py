"""Shard a model over ranks: the strategy table, and what each engine does with a row of it.

Three engines: DDP (plain, or with ZeRO-1's sharded optimizer), FSDP1 (`FullyShardedDataParallel`,
deprecated, used by the published study) and FSDP2 (`fully_shard`, the maintained one). `apply` is
the entry point, for any model in fp32; examples/own_model.py is a whole training loop with it.
Copy this one file: it needs torch alone.

To add a strategy: one row of STRATEGIES, and the same row in README's table (a test compares them).
Everything else reads the table. Only a row of a new kind needs more: a new `engine` a function like
`_ddp`, a new `group` a line in `mesh_shape`, and both the collectives in planner/traffic.py.
"""

import inspect
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
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
    if row.group == "group" and not group:
        raise ValueError(f"mode {mode} needs `group`, how many ranks share a copy: those of a node")
    if row.group != "group" and group is not None:
        raise ValueError(f"mode {mode}: a group size belongs to the hybrid modes, got {group}")
    shard = {"1": 1, "world": world_size, "group": group or 0}[row.group]
    return world_size // shard, shard


# ---------------------------------------------------------------------------------------------
# Applying one: activation checkpointing, compile, then sharding


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What `apply` can be asked for beyond the mode, by the names of train_fsdp.py's flags."""

    fsdp: Literal[1, 2] = 2  # the engine of a strategy whose engine is fsdp
    param_dtype: torch.dtype = torch.bfloat16  # of the computation; stored parameters are fp32
    reduce_dtype: torch.dtype = torch.float32  # in which gradients are summed over ranks
    cast_inputs: bool = True  # FSDP: to param_dtype, those of the model, its blocks and its layers
    prefetch: Literal["none", "backward_pre", "backward_post"] = "backward_pre"  # post: FSDP1 only
    forward_prefetch: bool = False  # FSDP only
    limit_all_gathers: bool = True  # FSDP1 only
    cpu_offload: bool = False  # FSDP only
    bucket_cap_mb: float | None = None  # DDP only, MiB; None is PyTorch's default
    ac: Literal["none", "selective", "full"] = "none"  # activation checkpointing of each block
    preserve_rng_state: bool = True  # ac: recompute with the same dropout; not needed without any
    compile: bool = False  # each block


def apply(
    model: nn.Module,
    mode: str,
    mesh: DeviceMesh,
    *,
    block_classes: Collection[type[nn.Module]] | None = None,
    initial_value: InitialValue | None = None,
    load_later: bool = False,
    device: torch.device | None = None,
    options: ShardingOptions = ShardingOptions(),
) -> nn.Module:
    """Shard a model over the mesh; afterwards all ranks have the same values. Collective.

    `mesh` has the dimensions ("replicate", "shard") of `mesh_shape`; `device` is by default its
    own. A block is gathered and freed as a whole (in FSDP2 small neighbours share one unit,
    `unit_ranges`); what is left is the root unit. `block_classes` says which modules are blocks:
    None finds them (`find_blocks`), set() makes the whole model one unit.

    Values: those of a model that has values are kept, rank 0's on all ranks. What is on the meta
    device gets its values unit by unit, so that no rank ever holds the whole model: by
    `initial_value`, or without it by `reset_parameters` of each module, from `torch.initial_seed()`
    of rank 0, the same in every mode and on any number of ranks. With `load_later` nothing is
    drawn or compared: load a checkpoint before the first step.

    Parameters are fp32, and computed with in `param_dtype`: FSDP casts them and the inputs, DDP
    needs `autocast`. Buffers stay fp32: cast them where they are used. Outputs are in param_dtype:
    compute the loss in fp32. BatchNorm is computed in fp32, and its statistics are each rank's own.

    Call the model, not its parts or other methods, and follow each forward pass in training mode
    by its backward pass, or a unit that is not resharded after forward starts the next one with
    outdated parameters. Raises ValueError for what has no meaning; RuntimeError that names the
    parameters and buffers without a value.
    """
    device = device or _device_of(mesh)
    _check(model, mode, mesh, device, options)
    sharded = STRATEGIES[mode].engine == "fsdp"
    # DDP has no units, and needs blocks only for these two
    wanted = block_classes is not None or sharded or options.ac != "none" or options.compile
    blocks = find_blocks(model, block_classes) if wanted else {}
    values = _Values(model, initial_value, load_later, device)
    if not load_later:
        _compare(repr((mode, options, values.description)), device, "models, modes or options")
        for tensor in [*model.parameters(), *model.buffers()]:
            if not _on_meta(tensor):
                values.share(tensor)
    if sharded:
        _check_units(model, blocks)
        _check_calls(model, blocks, options)
    units = _prepare_units(model, blocks, options)
    if not sharded:
        values.fill(model)
        result = _ddp(model.to(device), mesh, device, options)
    elif options.fsdp == 1:
        result = _fsdp1(model, STRATEGIES[mode], mesh, units, device, options, values.fill)
    else:
        result = _fsdp2(model, STRATEGIES[mode], mesh, units, options, values.fill)
    values.check()
    return result


def _device_of(mesh: DeviceMesh) -> torch.device:
    cuda = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


# Options that only some engines have
ENGINES_WITH: dict[str, tuple[str, ...]] = {
    "bucket_cap_mb": ("ddp", "zero1"),
    "prefetch": ("fsdp1", "fsdp2"),
    "forward_prefetch": ("fsdp1", "fsdp2"),
    "cpu_offload": ("fsdp1", "fsdp2"),
    "limit_all_gathers": ("fsdp1",),
}


def _check(
    model: nn.Module, mode: str, mesh: DeviceMesh, device: torch.device, options: ShardingOptions
) -> None:
    """Raise ValueError, one sentence, for arguments of `apply` that have no meaning."""
    world = dist.get_world_size()
    hybrid = mode in STRATEGIES and STRATEGIES[mode].group == "group"
    wanted = mesh_shape(mode, world, mesh.shape[-1] if hybrid else None)
    if mesh.mesh_dim_names != ("replicate", "shard") or mesh.shape != wanted:
        raise ValueError(
            f"mode {mode} on {world} ranks needs a mesh (replicate, shard) of {wanted}, not "
            f"{mesh.mesh_dim_names} of {tuple(mesh.shape)}: build it with shard.mesh_shape"
        )
    if device.type != mesh.device_type:
        raise ValueError(f"device {device} is not of the mesh, which is on {mesh.device_type}")
    for name, hint in get_type_hints(ShardingOptions).items():
        value = getattr(options, name)
        choices = get_args(hint) if get_origin(hint) is Literal else None
        if (choices and value not in choices) or (
            hint is torch.dtype and not isinstance(value, torch.dtype)
        ):
            needed = " or ".join(map(repr, choices)) if choices else "a dtype: torch.bfloat16"
            raise ValueError(f"option {name} is {value!r}, but must be {needed}")
    engine: str = STRATEGIES[mode].engine
    engine = f"fsdp{options.fsdp}" if engine == "fsdp" else engine
    for name, engines in ENGINES_WITH.items():
        if engine not in engines and getattr(options, name) != getattr(ShardingOptions, name):
            raise ValueError(f"option {name} is for {' and '.join(engines)}, not {engine}")
    if options.prefetch == "backward_post" and engine == "fsdp2":
        raise ValueError("prefetch backward_post exists in FSDP1 only")
    if isinstance(model, DDP | FSDP1 | FSDPModule):
        raise ValueError("the model is sharded already: apply takes a plain module, once")
    reserved = WRAPPERS & {name for name, _ in model.named_children()}
    if reserved:
        raise ValueError(f"rename the submodule {min(reserved)}: wrappers use this name")
    for name, p in model.named_parameters():
        if p.dtype != torch.float32:
            raise ValueError(f"{name} is {p.dtype}, but parameters are stored in fp32: .float()")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter requires a gradient: there is nothing to train")


# ---------------------------------------------------------------------------------------------
# Blocks and units


def find_blocks(
    model: nn.Module, block_classes: Collection[type[nn.Module]] | None = None
) -> dict[str, nn.Module]:
    """Find the blocks of a model, by name, in the order of its modules.

    They are the modules of `block_classes`; or, where it is None, the repeated ones: children of
    one class in an nn.ModuleList or nn.Sequential, which have children themselves. Raises
    ValueError, which lists the classes that could be blocks, if there are none.
    """
    if block_classes is None:
        blocks, problem = _repeated(model), "no block is repeated in an nn.ModuleList or Sequential"
    else:
        blocks = [m for m in model.modules() if type(m) in block_classes and m is not model]
        wanted = ", ".join(sorted(c.__name__ for c in block_classes))
        problem = f"block_classes match no module: {wanted} (subclasses do not count)"
    if not blocks and (block_classes is None or block_classes):
        parts = [m for m in model.modules() if m is not model and _has_forward_and_parameters(m)]
        parts = [m for m in parts if any(True for _ in m.children())] or parts
        numels, counts = Counter[str](), Counter(type(m).__name__ for m in parts)
        for module in parts:
            numels[type(module).__name__] += sum(p.numel() for p in module.parameters())
        listed = ", ".join(f"{name} x {counts[name]}" for name, _ in numels.most_common(8))
        raise ValueError(
            f"{problem}; give block_classes, out of {listed or 'none'}, or set() for a single unit"
        )
    chosen = set(blocks)
    return {name: module for name, module in model.named_modules() if module in chosen}


def _has_forward_and_parameters(module: nn.Module) -> bool:
    has_forward = type(module).forward is not nn.Module.forward  # nn.ModuleList has none
    return has_forward and any(True for _ in module.parameters())


def _repeated(module: nn.Module) -> list[nn.Module]:
    """List the repeated modules below this one, the outermost; see `find_blocks`."""
    found: list[nn.Module] = []
    counts = Counter(type(child) for child in module.children())
    for child in module.children():
        repeated = (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and counts[type(child)] > 1
            and any(True for _ in child.children())
            and _has_forward_and_parameters(child)
        )
        # a stage of several blocks, say a Sequential in a Sequential, is not a block itself
        if repeated and not isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            found.append(child)
        else:
            found += _repeated(child) or [child] * repeated
    return found


def _check_units(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Raise ValueError for a module or parameter in two units: FSDP would silently untie it."""
    unit_of: dict[nn.Module | nn.Parameter, str] = {}
    for name, block in blocks.items():
        for part in block.modules():
            if unit_of.setdefault(part, name) != name:
                raise ValueError(
                    f"the blocks {unit_of[part]} and {name} have a module in common: choose "
                    "block_classes that contain it once"
                )
    for name, module in model.named_modules():
        unit = unit_of.get(module, "the root")
        for leaf, p in module.named_parameters(recurse=False):
            if unit_of.setdefault(p, unit) != unit:
                raise ValueError(
                    f"{name}.{leaf} is tied to a parameter of another unit ({unit_of[p]}): choose "
                    "block_classes that leave both in one, or use mode ddp or zero1"
                )


def _check_calls(model: nn.Module, blocks: dict[str, nn.Module], options: ShardingOptions) -> None:
    """Let each layer of the root unit refuse a call outside of the model's, and cast its inputs."""
    inside = {part for block in blocks.values() for part in block.modules()}
    for name, module in model.named_modules():
        shapes = {leaf: p.shape for leaf, p in module.named_parameters(recurse=False)}
        if shapes and module is not model and module not in inside:
            cast = options.cast_inputs and not isinstance(module, _BatchNorm)
            dtype = options.param_dtype if cast else None
            hook = partial(_before_call, name=name, shapes=shapes, dtype=dtype)
            module.register_forward_pre_hook(hook, with_kwargs=True)


def _before_call(
    module: nn.Module,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    *,
    name: str,
    shapes: dict[str, torch.Size],
    dtype: torch.dtype | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for leaf, shape in shapes.items():
        p = getattr(module, leaf)
        if isinstance(p, DTensor) or p.shape != shape:
            raise RuntimeError(
                f"{name} was called outside of the model's forward, where its parameters are not "
                "gathered: call the model itself, and move the call into its forward"
            )

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and dtype else x

    return tuple(cast(x) for x in inputs), {key: cast(x) for key, x in named.items()}


def _prepare_units(
    model: nn.Module, found: dict[str, nn.Module], options: ShardingOptions
) -> Units:
    """Checkpoint and compile the blocks, and group them into units.

    The order matters. Checkpointing comes first, so that the recomputation is inside the compiled
    region and inside the unit: a block is gathered once for recomputation and gradient together.
    """
    numels = [sum(p.numel() for p in block.parameters()) for block in found.values()]
    ranges, blocks = unit_ranges(list(found), numels), list(found.values())
    if options.ac != "none":
        if any(isinstance(part, _BatchNorm) for block in blocks for part in block.modules()):
            raise ValueError(f"ac {options.ac} would count each batch twice in BatchNorm")
        blocks = [_checkpoint(model, name, options) for name in found]
    if options.compile:
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


def _checkpoint(model: nn.Module, name: str, options: ShardingOptions) -> nn.Module:
    """Wrap the module `name` for activation checkpointing."""
    parent, _, leaf = name.rpartition(".")
    how: dict[str, Any] = {"preserve_rng_state": options.preserve_rng_state}
    if options.ac == "selective":
        how["context_fn"] = lambda: create_selective_checkpoint_contexts(_keep_matmuls)
    wrapper = checkpoint_wrapper(model.get_submodule(name), **how)
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
    # Do not broadcast buffers at every step: most are tables, and FSDP does not either.
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
    fill: Callable[[nn.Module], None],
) -> nn.Module:
    """FSDP1: the strategy is an enum, so is the prefetch; every unit is one flat parameter."""
    blocks = {block for unit in units for block in unit}
    name = FSDP1_STRATEGIES[strategy.group, strategy.reshard]
    submesh = mesh if strategy.group == "group" else mesh["shard"]
    if mesh["shard"].size() == 1:
        # FSDP1 does not reduce gradients at all if a shard group has one rank (pytorch#154888).
        # NO_SHARD is what such a strategy is meant to equal.
        name, submesh = ShardingStrategy.NO_SHARD, mesh["replicate"]
    with warnings.catch_warnings():  # its advice to use DDP instead of NO_SHARD; on BatchNorm
        warnings.filterwarnings("ignore", "The `NO_SHARD`", FutureWarning)
        warnings.filterwarnings("ignore", "Both mixed precision and an auto_wrap_policy")
        return FSDP1(
            model,
            device_mesh=submesh,
            sharding_strategy=name,
            auto_wrap_policy=CustomPolicy(lambda module: module in blocks),
            mixed_precision=fsdp.MixedPrecision(
                options.param_dtype,
                options.reduce_dtype,
                buffer_dtype=torch.float32,  # position tables stay exact
                cast_forward_inputs=options.cast_inputs,
                cast_root_forward_inputs=options.cast_inputs,
            ),
            backward_prefetch=getattr(fsdp.BackwardPrefetch, options.prefetch.upper(), None),
            forward_prefetch=options.forward_prefetch,
            limit_all_gathers=options.limit_all_gathers,
            cpu_offload=fsdp.CPUOffload(offload_params=options.cpu_offload),
            use_orig_params=True,  # weight decay differs by parameter
            param_init_fn=fill,
            device_id=device,  # needed for a CPU too
        )


def _fsdp2(
    model: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh,
    units: Units,
    options: ShardingOptions,
    fill: Callable[[nn.Module], None],
) -> nn.Module:
    """FSDP2: the strategy is the mesh and `reshard_after_forward`; parameters become DTensors."""
    pinned = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    shard_unit = partial(
        fully_shard,
        # Two dimensions: sharded over the second, replicated over the first. One: sharded over it.
        mesh=mesh["shard"] if strategy.group == "world" else mesh,
        mp_policy=fsdp.MixedPrecisionPolicy(
            options.param_dtype, options.reduce_dtype, cast_forward_inputs=options.cast_inputs
        ),
        offload_policy=pinned if options.cpu_offload else fsdp.OffloadPolicy(),
    )
    if options.param_dtype != torch.float32:
        # BatchNorm's kernels want parameters in the dtype of its buffers. FSDP1 does the same.
        exact = fsdp.MixedPrecisionPolicy(None, options.reduce_dtype, cast_forward_inputs=False)
        for norm in [m for m in model.modules() if isinstance(m, _BatchNorm) and m.affine]:
            fill(norm)
            shard_unit(norm, mp_policy=exact, reshard_after_forward=strategy.reshard)
    for blocks in units:
        for block in blocks:
            fill(block)  # whole, until the next line cuts it
        shard_unit(blocks, reshard_after_forward=strategy.reshard)
    fill(model)
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

WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module"}


def original_name(name: str) -> str:
    """Return the name that a parameter had before its model was wrapped."""
    parts = name.removeprefix("module.").split(".")  # DDP's; a submodule further down keeps it
    return ".".join(part for part in parts if part not in WRAPPERS - {"module"})


def _compare(text: str, device: torch.device, what: str) -> None:
    """Raise RuntimeError on every rank unless `text` is the same on all. Collective."""
    crc = zlib.crc32(text.encode())
    extremes = torch.tensor([crc, -crc], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if extremes.sum():
        raise RuntimeError(f"the ranks were given different {what}: they must be the same on all")


class _Values:
    """Give the parameters and buffers of one model their values, the same on every rank."""

    def __init__(
        self,
        model: nn.Module,
        initial_value: InitialValue | None,
        load_later: bool,
        device: torch.device,
    ) -> None:
        self.initial_value, self.load_later, self.device = initial_value, load_later, device
        self.seed, self.drawn, self.missing = torch.initial_seed(), "", list[str]()
        self.names = {module: name for name, module in model.named_modules()}
        self.owners: dict[Tensor, tuple[nn.Module, str, str]] = {}  # of what is on meta, the first
        self.description: list[tuple] = []
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            self.description.append((name, t.shape, t.dtype, t.requires_grad, _on_meta(t)))
            if _on_meta(t):
                parent, _, leaf = name.rpartition(".")
                self.owners[t] = model.get_submodule(parent), leaf, name
        if initial_value and self.description and not self.owners:
            raise ValueError("initial_value is for a model on meta, but this one has values")

    @torch.no_grad()
    def share(self, tensor: Tensor) -> None:
        """Replace the values of a tensor by those of rank 0. Collective."""
        value = tensor.to(self.device).contiguous()
        if value.numel() and dist.get_world_size() > 1:
            dist.broadcast(value.view(-1).view(torch.uint8), 0)  # as bytes: any dtype
        tensor.data = value.to(tensor.device)

    @torch.no_grad()
    def fill(self, unit: nn.Module) -> None:
        """Give what is on meta in a module and below it memory and values. Collective."""
        made: dict[Tensor, Tensor] = {}  # tied parameters stay tied
        resets = not self.load_later and self.initial_value is None
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else [], resets):
            # children first, because some modules set the values of their children too
            for module in reversed(list(unit.modules())):
                own = {**module._parameters, **module._buffers}
                for leaf, old in own.items():
                    if old is not None and _on_meta(old):
                        made[old] = made[old] if old in made else self._allocate(old)
                        setattr(module, leaf, made[old])
                # tied parameters get the values of the module that has them first
                first = any(t in made and self.owners[t][0] is module for t in own.values())
                if first and resets:
                    self._reset(module)
        for old, new in made.items() if not self.load_later else []:
            module, leaf, name = self.owners[old]
            if self.initial_value:
                self._draw(self.initial_value, name, new)
                continue
            current = getattr(module, leaf)  # which reset_parameters may have replaced
            untouched = current is new and new._version == 0  # integers cannot be NaN
            self.share(current)
            if untouched or bool(current.isnan().any()):
                self.missing.append(name)

    def _allocate(self, old: Tensor) -> Tensor:
        new = torch.empty_like(old, device=self.device)
        if not self.load_later and new.is_floating_point():
            new.fill_(float("nan"))  # to see what is given a value
        return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new

    def _reset(self, module: nn.Module) -> None:
        """Let a module draw its values, by a seed of its own: the order of the modules is free."""
        torch.manual_seed(zlib.crc32(f"{self.seed}/{self.names[module]}".encode()))
        names = ("reset_parameters", "_reset_parameters")  # the second: nn.MultiheadAttention
        for reset in [getattr(module, name) for name in names if hasattr(module, name)]:
            reset()

    def _draw(self, initial_value: InitialValue, name: str, tensor: Tensor) -> None:
        try:
            value = initial_value(name, tensor.shape)
        except KeyError:
            self.missing.append(name)
            return
        if value.shape != tensor.shape:
            shapes = f"{tuple(value.shape)}, but it is {tuple(tensor.shape)}"
            raise ValueError(f"initial_value gives {name} the shape {shapes}")
        tensor.copy_(value)
        self.drawn += repr(value.flatten()[:8].tolist())

    def check(self) -> None:
        """Raise RuntimeError for what has no value, or other values on other ranks. Collective."""
        if self.missing:
            raise RuntimeError(
                "build the model on the CPU, or pass initial_value: neither it nor a method "
                f"reset_parameters gives a value to {', '.join(sorted(self.missing))}"
            )
        if self.drawn:
            _compare(self.drawn, self.device, "initial values")


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # is_meta is true for fake tensors too


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
    trained = [(original_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in trained if n in decays], "weight_decay": weight_decay},
        {"params": [p for n, p in trained if n not in decays], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
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
