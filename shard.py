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
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpointing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, _recursive_wrap, size_based_auto_wrap_policy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _cast_forward_inputs
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# (name, whole shape) -> whole fp32 value; KeyError if it has none for that name
InitialValue = Callable[[str, torch.Size], Tensor]
Fill = Callable[[nn.Module], None]  # gives values to what is on meta in a module
Units = list[list[nn.Module]]  # each the modules that are gathered and freed together

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
    for sentence in misuses(mode, {"group": group} if group else {}):
        raise ValueError(sentence)
    row = STRATEGIES[mode]
    if row.group == "group" and not group:
        raise ValueError(f"mode {mode} needs `group`, how many ranks share a copy: those of a node")
    shard = {"1": 1, "world": world_size, "group": group or 0}[row.group]
    return world_size // shard, shard


# The options that only some strategies have
OPTIONS_OF: dict[str, Callable[[Strategy], bool]] = {
    "group": lambda row: row.group == "group",
    "fsdp": lambda row: row.engine == "fsdp",
    "wrap": lambda row: row.engine == "fsdp",
    "cpu_offload": lambda row: row.engine == "fsdp",
    "bucket_cap_mb": lambda row: row.engine != "fsdp",
    "prefetch": lambda row: row.reshard,  # the others gather nothing in backward
    "forward_prefetch": lambda row: row.group != "1",
    "tp": lambda row: row.engine == "fsdp",
    "limit_all_gathers": lambda row: row.group != "1",
}


def misuses(
    mode: str, given: Mapping[str, Any], spell: Callable[[str], str] = str
) -> Iterator[str]:
    """Yield a sentence for each given option (name: value) that has no meaning in this mode.

    `spell` turns the name of an option into what was typed for it.
    """
    for name, value in given.items():
        has = OPTIONS_OF.get(name, lambda row: True)
        if not has(STRATEGIES[mode]):
            modes = " and ".join(other for other, row in STRATEGIES.items() if has(row))
            yield f"{spell(name)} is for {spell('mode')} {modes}, not {mode}: leave it out"
        elif given.get("fsdp") != 1 and (name == "limit_all_gathers" or value == "backward_post"):
            shown = f"{spell(name)} {value}" if name == "prefetch" else spell(name)
            yield f"{shown} exists in FSDP1 only: add {spell('fsdp')} 1, or leave it out"
        elif given.get("fsdp") == 1 and (name, value) == ("wrap", "auto"):
            yield f"{spell(name)} auto exists in FSDP2 only: use block, or no {spell('fsdp')} 1"
        elif name == "tp" and (given.get("fsdp") == 1 or unit_size(given.get("wrap") or "block")):
            yield f"{spell(name)} needs whole blocks and FSDP2: use {spell('wrap')} block"


# ---------------------------------------------------------------------------------------------
# Applying one: activation checkpointing, compile, then sharding


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What `apply` can be asked for beyond the mode, by the names of train_fsdp.py's flags."""

    fsdp: Literal[1, 2] = 2  # FSDP1 or FSDP2, where the engine is fsdp
    wrap: str = "block"  # FSDP: the units, block, auto (FSDP2 only), root or size:N (`find_units`)
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
    values_on_rank0: bool = False,
    load_later: bool = False,
    split_block: Callable[[nn.Module], None] | None = None,
    options: ShardingOptions = ShardingOptions(),
) -> nn.Module:
    """Shard a model over the mesh; afterwards all ranks have the same values. Collective.

    `mesh` has the dimensions ("replicate", "shard") of `mesh_shape`; with FSDP2 also "tp", whose
    ranks share the work of a block that `split_block` has edited (runtime/tensor_parallel.py). A
    unit is gathered and freed as a whole: a block, unless `options.wrap` says otherwise
    (`find_units`); what is left is the root unit. `block_classes` says which modules are blocks:
    None finds them (`find_blocks`), set() is for a model without any.

    Values that the model has on rank 0 are kept. What is on meta gets its values unit by unit, so
    that no rank ever holds the whole model: by `initial_value`, or by each module's method
    `reset_parameters` from `torch.initial_seed()`, the same in every mode and on any number of
    ranks. Each value of `initial_value` is drawn by one rank and sent to all: by rank 0 with
    `values_on_rank0`. With `load_later` nothing is drawn: load a checkpoint before a step.

    Parameters are fp32, and computed with in `param_dtype`: FSDP casts them and the inputs, DDP
    needs `autocast`. Buffers stay fp32: cast them where they are used. Outputs are in param_dtype:
    compute the loss in fp32. BatchNorm is computed in fp32, and its statistics are each rank's own.

    Call the model, not its parts or other methods, and follow each forward pass in training mode
    by its backward pass, or a unit that is not resharded after forward keeps outdated parameters.
    Raises ValueError for invalid arguments, RuntimeError that names what is left without a value.
    """
    for sentence in _problems(model, mode, mesh, split_block is not None, options):
        raise ValueError(sentence)
    row, device = STRATEGIES[mode], _device(mesh)
    mesh = mesh["replicate", "shard"] if mesh.ndim == 3 else mesh
    sharded = row.engine == "fsdp"
    # DDP has no units, and needs blocks only for these two
    wanted = sharded or options.ac != "none" or options.compile
    blocks = find_blocks(model, block_classes) if wanted else {}
    names = find_units(model, list(blocks), options.wrap) if sharded else []
    values = _Values(model, initial_value, values_on_rank0, device)
    fill = _fill_and_split(partial(values.fill, draw=not load_later), blocks, split_block)
    if not load_later:
        _share_values(model, f"{mode} {options}", device)
    if sharded:
        _prepare_root(model, blocks, names, options)
    _prepare_blocks(model, blocks, options)
    units = [[model.get_submodule(name) for name in unit] for unit in names]
    if not sharded:
        fill(model)
        result = _ddp(model.to(device), mesh, options)
    elif options.fsdp == 1:
        result = _fsdp1(model, row, mesh, units, options, fill)
    else:
        result = _fsdp2(model, row, mesh, units, options, fill)
    values.check_complete()
    return result


def _device(mesh: DeviceMesh) -> torch.device:
    cuda = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


# ---------------------------------------------------------------------------------------------
# The engines


def _ddp(model: nn.Module, mesh: DeviceMesh, options: ShardingOptions) -> nn.Module:
    """DDP: whole parameters on every rank, gradients all-reduced in buckets during backward."""
    if mesh.size() == 1:
        return model  # nobody to communicate with: no buckets, a second copy of the gradients
    # Do not broadcast buffers at every step: most are tables, and FSDP does not either.
    newer = "forward_sync_buffers" in inspect.signature(DDP.__init__).parameters
    constant: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
    group = mesh.get_group("replicate")
    sharded = DDP(
        model,
        device_ids=[_device(mesh).index] if mesh.device_type == "cuda" else None,
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
    options: ShardingOptions,
    fill: Fill,
) -> nn.Module:
    """FSDP1: the strategy is an enum, so is the prefetch; every unit is one flat parameter."""
    wrapped = {module for unit in units for module in unit}
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
            auto_wrap_policy=CustomPolicy(lambda module: module in wrapped),
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
            device_id=_device(mesh),  # needed for a CPU too
        )


def _fsdp2(
    model: nn.Module,
    strategy: Strategy,
    mesh: DeviceMesh,
    units: Units,
    options: ShardingOptions,
    fill: Fill,
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
    units = [unit for unit in units if not isinstance(unit[0], FSDPModule)]  # one of these norms
    for unit in units:
        for module in unit:
            fill(module)  # whole, until the next line cuts it
        shard_unit(unit, reshard_after_forward=strategy.reshard)
    fill(model)
    # The root unit (tokens, embeddings, norms) is used last in forward and first in backward: with
    # None, the default, it stays gathered in between.
    shard_unit(model, reshard_after_forward=None if strategy.reshard else False)
    if options.prefetch == "none":
        # In backward FSDP2 prefetches the next unit unless it has a list of what to prefetch. An
        # empty list counts as none; a unit's own name does nothing, since it is gathered already.
        for module in [*(unit[0] for unit in units), model]:
            module.set_modules_to_backward_prefetch([module])  # type: ignore[operator]
    if options.forward_prefetch:
        for module, following in pairwise(unit[0] for unit in units):
            module.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    return model


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
    groups, norms = by_mesh(p for p in model.parameters() if p.grad is not None), list[Tensor]()
    for parameters in groups:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)  # sums its shards
    whole = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
    for parameters in groups if max_norm != float("inf") else []:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)
    return whole


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by their device mesh: PyTorch computes with those of one mesh at a time.

    There are two with tensor parallelism: that of split layers has one dimension more.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return list(groups.values())


WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module"}


def original_name(name: str) -> str:
    """Return the name that a parameter had before its model was wrapped."""
    parts = name.removeprefix("module.").split(".")  # DDP's; a submodule further down keeps it
    return ".".join(part for part in parts if part not in WRAPPERS - {"module"})


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
    decaying = [p for n, p in trained if n in decays]
    others = [p for n, p in trained if n not in decays]
    groups: list[dict[str, Any]] = [
        {"params": of_mesh, "weight_decay": rate}
        for parameters, rate in ((decaying, weight_decay), (others, 0.0))
        for of_mesh in by_mesh(parameters)
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


def build_scaler(
    model: nn.Module, device: torch.device, dtype: torch.dtype
) -> torch.amp.GradScaler | None:
    """Build the gradient scaler that fp16 needs; None for bf16 and fp32."""
    if dtype != torch.float16:
        return None
    return (ShardedGradScaler if isinstance(model, FSDP1) else torch.amp.GradScaler)(device.type)


# ---------------------------------------------------------------------------------------------
# Blocks and units


def find_blocks(
    model: nn.Module, block_classes: Collection[type[nn.Module]] | None = None
) -> dict[str, nn.Module]:
    """Find the blocks of a model, by name: the outermost modules of `block_classes`.

    By default these are the classes that occur repeatedly in an nn.ModuleList or nn.Sequential and
    have children; a Sequential, say a stage of blocks, only if there is no other. Raises
    ValueError, which lists the classes that could be blocks, if there are none.
    """
    classes = set(block_classes or [])
    wanted = ", ".join(sorted(cls.__name__ for cls in classes))
    problem = f"block_classes match no module: {wanted} (subclasses do not count)"
    # with children, and a forward, which a ModuleList does not have
    parts = {m: type(m) for m in model.modules() if m is not model and [*m.children()]}
    parts = {m: cls for m, cls in parts.items() if cls.forward is not nn.Module.forward}
    if block_classes is None:
        problem = "no block is repeated in an nn.ModuleList or Sequential"
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        counts = [Counter(parts[child] for child in m.children() if child in parts) for m in lists]
        repeated = {cls for count in counts for cls in count if count[cls] > 1}
        classes = {cls for cls in repeated if not issubclass(cls, nn.Sequential)} or repeated
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in blocks)
        if type(module) in classes and module is not model and not inner:
            blocks[name] = module
    if not blocks and block_classes != set():
        listed = Counter(cls.__name__ for cls in parts.values()).most_common(8)
        choices = ", ".join(f"{name} x {count}" for name, count in listed) or "none"
        raise ValueError(f"{problem}; give block_classes, out of {choices}, or set() for none")
    return blocks


def unit_size(wrap: str) -> int | None:
    """Return N of the wrap size:N, None for block, auto and root; ValueError for any other text."""
    if wrap in ("block", "auto", "root"):
        return None
    if found := re.fullmatch("size:([1-9][0-9]{0,17})", wrap):
        return int(found[1])
    raise ValueError(
        f"wrap is {wrap!r:.40}, but must be block, auto, root or size:N, where N is the smallest "
        "number of parameters in a unit, as size:1000000"
    )


def find_units(model: nn.Module, blocks: Sequence[str], wrap: str) -> list[list[str]]:
    """Name the modules of each unit, in the order of forward, an inner unit before the outer one.

    The root, which has the rest, is left out. block: each of the `blocks` (names of `find_blocks`).
    auto: small neighbours among them together. root: none. size:N: what PyTorch's
    `size_based_auto_wrap_policy` wraps, a module with N or more parameters that are in no unit yet.
    Raises ValueError for another `wrap`.
    """
    found: list[nn.Module] = []

    def listed(module: nn.Module) -> nn.Module:
        found.append(module)
        return module

    if smallest := unit_size(wrap):
        policy = partial(size_based_auto_wrap_policy, min_num_params=smallest)
        # FSDP1's own walk through the modules, which lists here what it would wrap
        _recursive_wrap(model, policy, listed, set(), set(), only_wrap_children=True)
        names = {module: name for name, module in model.named_modules()}
        return [[names[module]] for module in dict.fromkeys(found)]
    if wrap == "auto":
        numels = [sum(p.numel() for p in model.get_submodule(b).parameters()) for b in blocks]
        return [[blocks[i] for i in unit] for unit in unit_ranges(blocks, numels)]
    return [[block] for block in blocks] if wrap == "block" else []


def unit_of(parameter: str, units: Sequence[list[str]]) -> list[str]:
    """Find the unit of a parameter, by name, among those of `find_units`; [] is the root."""
    return next((u for u in units if any(parameter.startswith(f"{m}.") for m in u)), [])


def _prepare_root(
    model: nn.Module, blocks: dict[str, nn.Module], units: list[list[str]], options: ShardingOptions
) -> None:
    """Let blocks, and layers outside of them, cast their inputs where no unit does it.

    Raises ValueError for a parameter in two units: FSDP would silently untie it.
    """
    found: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        unit = unit_of(name, units)
        if found.setdefault(p, unit) != unit:
            first, second = ((u or ["the root"])[0] for u in (found[p], unit))
            raise ValueError(
                f"{name} is in two units, {first} and {second}: choose block_classes that leave "
                "it in one, wrap root, or use mode ddp or zero1"
            )
    outer = set(blocks.values())
    inside = {part for block in outer for part in block.modules()} - outer
    inside |= {part for u in units for name in u for part in model.get_submodule(name).modules()}
    for name, layer in model.named_modules():
        cast = options.cast_inputs and not isinstance(layer, _BatchNorm)
        own = any(True for _ in layer.parameters(recurse=False))
        if (cast if layer in outer else own) and layer is not model and layer not in inside:
            before = partial(_before_layer, name, options.param_dtype if cast else None)
            layer.register_forward_pre_hook(before, with_kwargs=True)


def _before_layer(
    name: str, dtype: torch.dtype | None, layer: nn.Module, inputs: Any, named: Any
) -> Any:
    if any(isinstance(p, DTensor) for p in layer.parameters(recurse=False)):
        raise RuntimeError(
            f"{name} was called outside of the model's forward, where its parameters are not "
            "gathered: call the model itself, and move the call into its forward"
        )
    return _cast_forward_inputs(dtype, *inputs, **named)


def _prepare_blocks(
    model: nn.Module, found: dict[str, nn.Module], options: ShardingOptions
) -> None:
    """Checkpoint and compile the blocks.

    The order matters. Checkpointing comes first, so that the recomputation is inside the compiled
    region and inside the unit: a block is gathered once for recomputation and gradient together.
    """
    blocks = list(found.values())
    if options.ac != "none":
        if any(isinstance(part, _BatchNorm) for block in blocks for part in block.modules()):
            raise ValueError(f"ac {options.ac} would count each batch twice in BatchNorm")
        how: dict[str, Any] = {"preserve_rng_state": options.preserve_rng_state}
        if options.ac == "selective":
            how["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matmuls)
        wrap, plain = partial(checkpointing.checkpoint_wrapper, **how), set(blocks)
        checkpointing.apply_activation_checkpointing(model, wrap, plain.__contains__)
        blocks = [model.get_submodule(name) for name in found]
    if options.compile:
        # Blocks of one shape share a compilation, and FSDP's hooks stay outside of it. Not dynamic:
        # one graph for encoder and decoder blocks alike would be slower than one for each.
        for block in blocks:
            block.compile(dynamic=False)


def unit_ranges(names: Sequence[str], numels: Sequence[int]) -> list[range]:
    """Group blocks into the units of wrap auto: neighbours in a stack, up to the largest block.

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
# Checks and initial values


def _problems(
    model: nn.Module, mode: str, mesh: DeviceMesh, split: bool, options: ShardingOptions
) -> Iterator[str]:
    """Yield a sentence for each argument of `apply` that has no meaning."""
    names = ("replicate", "shard", "tp")[: max(mesh.ndim, 2)]
    shape, tp = mesh.shape[:2], mesh.shape[2] if mesh.ndim == 3 else 1
    hybrid = mode in STRATEGIES and STRATEGIES[mode].group == "group"
    world = dist.get_world_size() // tp  # ranks with images of their own
    wanted = mesh_shape(mode, world, shape[-1] if hybrid else None)
    if mesh.mesh_dim_names != names or shape != wanted:
        yield (
            f"mode {mode} on {world} ranks needs a mesh (replicate, shard) of {wanted}, not "
            f"{mesh.mesh_dim_names} of {tuple(mesh.shape)}: build it with shard.mesh_shape"
        )
    if split != (mesh.ndim == 3):
        yield "a mesh with the dimension tp needs split_block, and split_block needs such a mesh"
    for name, hint in get_type_hints(ShardingOptions).items():
        value = getattr(options, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            yield f"{name} is {value!r}, but must be {' or '.join(map(repr, get_args(hint)))}"
        if hint is torch.dtype and not isinstance(value, torch.dtype):
            yield f"{name} is {value!r}, but must be a dtype: torch.bfloat16"
    given = {n: v for n, v in vars(options).items() if v != getattr(ShardingOptions, n)}
    yield from misuses(mode, given | ({"tp": tp} if tp > 1 else {}))
    if isinstance(model, DDP | FSDP1 | FSDPModule):
        yield "the model is sharded already: apply takes a plain module, once"
    for name in WRAPPERS & dict(model.named_children()).keys():
        yield f"rename the submodule {name}: wrappers use this name"
    for name, p in model.named_parameters():
        if p.dtype != torch.float32:
            yield f"{name} is {p.dtype}, but parameters are stored in fp32: .float()"
    if not any(p.requires_grad for p in model.parameters()):
        yield "no parameter requires a gradient: there is nothing to train"


class _Values:
    """Give the parameters and buffers of one model their values, the same on all ranks."""

    def __init__(
        self,
        model: nn.Module,
        initial_value: InitialValue | None,
        values_on_rank0: bool,
        device: torch.device,
    ) -> None:
        self.initial_value, self.device, self.seed = initial_value, device, torch.initial_seed()
        self.sources = 1 if values_on_rank0 or not initial_value else dist.get_world_size()
        self.names = {module: name for name, module in model.named_modules()}
        self.missing, self.problem = list[str](), ""
        if initial_value and not any(map(_on_meta, [*model.parameters(), *model.buffers()])):
            raise ValueError("initial_value is for a model on meta, but this one has values")

    @torch.no_grad()
    def fill(self, unit: nn.Module, draw: bool = True) -> None:
        """Give what is on meta in a module and below it memory and values. Collective."""
        made: dict[Tensor, Tensor] = {}  # tied parameters stay tied
        owners: dict[Tensor, tuple[nn.Module, str]] = {}
        # Children first, because some modules set the values of their children too. Of the modules
        # that have a tied parameter the first sets it last.
        for module in reversed(list(unit.modules())):
            own = {**module._parameters, **module._buffers}
            meta = {leaf: t for leaf, t in own.items() if t is not None and _on_meta(t)}
            for leaf, t in meta.items():
                made[t] = made[t] if t in made else _allocate(t, self.device)
                setattr(module, leaf, made[t])
                owners[t] = module, leaf
            if meta and draw and self.initial_value is None:
                self._reset(module)
        if not draw:
            return
        # The largest first, each by the next rank: they are what takes time.
        order = sorted(owners, key=Tensor.numel, reverse=True)
        source = {t: i % self.sources for i, t in enumerate(order)}
        for t in order if self.initial_value else []:
            # What is no floating-point number cannot be NaN: each rank sees whether it is set.
            if dist.get_rank() == source[t] or not t.is_floating_point():
                self._draw(*owners[t])
        for t, (module, leaf) in owners.items():
            value = getattr(module, leaf)  # which reset_parameters may have replaced
            untouched = value is made[t] and value._version == 0
            _share(value, self.device, source[t])
            if bool(value.isnan().any()) or (untouched and not value.is_floating_point()):
                self.missing.append(f"{self.names[module]}.{leaf}".lstrip("."))

    def check_complete(self) -> None:
        """Raise RuntimeError that names what was given no value; ValueError for a wrong shape."""
        if self.problem:
            raise ValueError(self.problem)
        if self.missing:
            raise RuntimeError(
                "build the model on the CPU, or pass initial_value: neither it nor a method "
                f"reset_parameters gives a value to {', '.join(sorted(self.missing))}"
            )

    def _reset(self, module: nn.Module) -> None:
        """Draw the values of one module by its own method, independently of all others."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(zlib.crc32(f"{self.seed}/{self.names[module]}".encode()))
            for name in ("reset_parameters", "_reset_parameters"):  # nn.MultiheadAttention's
                getattr(module, name, lambda: None)()

    def _draw(self, module: nn.Module, leaf: str) -> None:
        """Copy the value of `initial_value` into a parameter or buffer, if it has one for it."""
        assert self.initial_value is not None
        name, tensor = f"{self.names[module]}.{leaf}".lstrip("."), getattr(module, leaf)
        with suppress(KeyError):
            value = self.initial_value(name, tensor.shape)
            if value.shape != tensor.shape:
                # Raised at the end, when no other rank waits for this one.
                shapes = f"{tuple(value.shape)}, but it is {tuple(tensor.shape)}"
                self.problem = f"initial_value gives {name} the shape {shapes}"
                return
            tensor.copy_(value)


def _fill_and_split(
    fill: Fill, blocks: Mapping[str, nn.Module], split_block: Callable[[nn.Module], None] | None
) -> Fill:
    """Make a `fill` that splits each block, too, once it has its values and is not yet sharded."""
    if split_block is None:
        return fill
    whole = set(blocks.values())

    def fill_and_split(module: nn.Module) -> None:
        fill(module)
        for block in [part for part in module.modules() if part in whole]:
            whole.remove(block)
            split_block(block)

    return fill_and_split


def _allocate(t: Tensor, device: torch.device) -> Tensor:
    new = torch.empty_like(t, device=device)
    if new.is_floating_point():
        new.fill_(float("nan"))  # to see what is given a value
    return nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new


def _share_values(model: nn.Module, arguments: str, device: torch.device) -> None:
    """Send the values that a model has from rank 0 to all; RuntimeError if the models differ."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    found = [(n, t.shape, t.dtype, t.requires_grad, _on_meta(t)) for n, t in tensors.items()]
    crc = zlib.crc32(f"{arguments} {found}".encode())
    extremes = torch.tensor([crc, -crc], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if extremes.sum():
        raise RuntimeError("the ranks were given different models, modes or options")
    for tensor in tensors.values():
        if not _on_meta(tensor):
            _share(tensor, device)


@torch.no_grad()
def _share(tensor: Tensor, device: torch.device, source: int = 0) -> None:
    """Replace the values of a tensor by those of one rank. Collective."""
    value = tensor.to(device).contiguous()
    if value.numel() and dist.get_world_size() > 1:
        dist.broadcast(value.view(-1).view(torch.uint8), source)  # as bytes: any dtype
    tensor.data = value.to(tensor.device)


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # is_meta is true for fake tensors too
