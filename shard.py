"""Shard a model over ranks: the strategy table, and what each engine does with a row of it.

Three engines: DDP (plain, or with ZeRO-1's sharded optimizer), FSDP1 (`FullyShardedDataParallel`,
deprecated, used by the published study) and FSDP2 (`fully_shard`, the maintained one). `apply` is
the entry point, for any model in fp32; examples/own_model.py is a whole training loop with it.
Copy this one file: it needs torch alone.
"""

import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

InitialValue = Callable[..., Tensor]  # (name, whole shape, device=device) -> whole fp32 value

# --- The strategies


@dataclass(frozen=True)
class Strategy:
    """One row of the table: what is sharded, and over which ranks."""

    engine: Literal["ddp", "zero1", "fsdp"]  # zero1: DDP; fsdp: FSDP1 or FSDP2, as asked for
    group: Literal["1", "group", "world"]  # ranks that together hold one copy of the parameters
    reshard: bool  # free the gathered parameters after forward, gather them again in backward
    shards: str  # what each rank holds only a part of
    traffic: str  # parameter-sized collectives per step


ALL, PART = "parameters, gradients, states", "gradients and states always; parameters between steps"
GATHER1, GATHER2 = "1 all-gather, 1 reduce-scatter", "2 all-gathers, 1 reduce-scatter"
ACROSS = " in the group; 1 all-reduce of a shard across groups"

STRATEGIES: dict[str, Strategy] = {
    "ddp": Strategy("ddp", "1", False, "nothing", "1 all-reduce"),
    "zero1": Strategy("zero1", "1", False, "optimizer states", "1 all-reduce, 1 broadcast"),
    "no_shard": Strategy("fsdp", "1", False, "nothing", "1 all-reduce"),
    "shard_grad_op": Strategy("fsdp", "world", False, PART, GATHER1),
    "full_shard": Strategy("fsdp", "world", True, ALL, GATHER2),
    "hybrid": Strategy("fsdp", "group", True, ALL, GATHER2 + ACROSS),
    "hybrid_grad_op": Strategy("fsdp", "group", False, PART, GATHER1 + ACROSS),
}


def mesh_shape(mode: str, world_size: int, group: int | None = None) -> tuple[int, int]:
    """Return the mesh (replicas, ranks per shard group) of a mode; ValueError where they clash."""
    if mode not in STRATEGIES:
        raise ValueError(f"there is no mode {mode}: use one of {', '.join(STRATEGIES)}")
    if bool(group) != (STRATEGIES[mode].group == "group"):
        raise ValueError("give `group`, the ranks that share a copy, to the hybrid modes alone")
    shard = {"1": 1, "world": world_size, "group": group or 0}[STRATEGIES[mode].group]
    return world_size // shard, shard


# The options that only some strategies have
OPTIONS_OF: dict[str, Callable[[Strategy], bool]] = {
    "group": lambda row: row.group == "group",
    **dict.fromkeys(("fsdp", "wrap", "cpu_offload", "tp"), lambda row: row.engine == "fsdp"),
    **dict.fromkeys(("bucket_cap_mb", "find_unused_parameters"), lambda row: row.engine != "fsdp"),
    "prefetch": lambda row: row.reshard,  # the others gather nothing in backward
    **dict.fromkeys(("forward_prefetch", "limit_all_gathers"), lambda row: row.group != "1"),
}


def misuses(
    mode: str, given: Mapping[str, Any], spell: Callable[[str], str] = str
) -> Iterator[str]:
    """Yield a sentence for each option (name: value; `spell(name)` was typed) without a meaning."""
    fp16 = given.get("precision") == "fp16" or given.get("param_dtype") == torch.float16
    for name, value in given.items():
        has = OPTIONS_OF.get(name, lambda row: True)
        if not has(STRATEGIES[mode]):
            modes = ", ".join(other for other, row in STRATEGIES.items() if has(row))
            yield f"{spell(name)} is for {spell('mode')} {modes}, not {mode}: leave it out"
        elif given.get("fsdp") != 1 and (name == "limit_all_gathers" or value == "backward_post"):
            yield f"{spell(name)} {value} exists in FSDP1 only: add {spell('fsdp')} 1, or leave it"
        elif name == "tp" and (given.get("fsdp") == 1 or given.get("wrap") == "root"):
            yield f"{spell(name)} needs {spell('fsdp')} 2 and {spell('wrap')} block"
        elif name in ("tp", "cpu_offload") and fp16:
            yield f"{spell(name)} is not for fp16: the loss scale would miss overflows: use bf16"


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
    find_unused_parameters: bool = False  # DDP only: some parameters have no gradient in a step
    ac: Literal["none", "selective", "full"] = "none"  # activation checkpointing of each block
    preserve_rng_state: bool = True  # ac: recompute with the same dropout; not needed without any
    compile: bool = False  # each block


def apply(
    model: nn.Module,
    mode: str,
    mesh: DeviceMesh,
    *,
    block_classes: Collection[type[nn.Module]],
    values: InitialValue | None = None,
    split_block: Callable[[Any, DeviceMesh], None] | None = None,
    options: ShardingOptions = ShardingOptions(),
) -> nn.Module:
    """Shard a model over the mesh; afterwards all ranks have the same values. Collective.

    `mesh` has the dimensions ("replicate", "shard") of `mesh_shape`, and with FSDP2 perhaps "tp",
    whose ranks share the work of a block: `split_block(block, mesh)` edits it. FSDP gathers and
    frees unit by unit: the outermost modules of `block_classes` (set(): none), and the rest, the
    root. Values that the model has on rank 0 are kept. What is on meta gets its values unit by
    unit: `values(name, shape, device=...)` returns the whole of one, alike on every rank, or
    `undefined` memory, if a checkpoint is loaded before a step.

    Call the model, not its parts or other methods; in a step the same blocks on every rank, or some
    train on wrong weights in silence; after a forward pass in training mode its backward pass.
    FSDP1 moves a parameter that a step did not use (its gradient is zero, not None) and makes fp64
    buffers fp32: FSDP2 does neither.
    Raises ValueError for invalid arguments, RuntimeError if the ranks have different models.
    """
    _check_arguments(model, mode, mesh, split_block is not None, options)
    row, device, blocks = STRATEGIES[mode], _device(mesh), find_blocks(model, block_classes)
    names = {t: n for n, t in [*model.named_parameters(), *model.named_buffers()]}
    if any(map(_on_meta, names)) != (values is not None):
        raise ValueError("give `values` to a model on meta, and to no other")
    if values is not undefined:  # whoever loads a checkpoint checks its names and shapes
        _check_same_model(model, f"{mode} {[*blocks]} {options}", device)
        _broadcast_values(model, device)

    def fill(module: nn.Module) -> None:
        if values:
            _materialise(module, names, device, values)
        if split_block and module in blocks.values():
            split_block(module, mesh)

    units = blocks if row.engine == "fsdp" and options.wrap == "block" else {}
    _check_units(model, units)
    _prepare_blocks(model, blocks, options)
    if row.engine == "fsdp":
        return _fsdp(model, units, row, mesh["replicate", "shard"], options, fill)
    fill(model)
    return _ddp(model.to(device), mesh, options)


def _device(mesh: DeviceMesh) -> torch.device:
    cuda = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


# --- The engines


def _ddp(model: nn.Module, mesh: DeviceMesh, options: ShardingOptions) -> nn.Module:
    """DDP: whole parameters on every rank, gradients all-reduced in buckets during backward."""
    if mesh.size() == 1:
        return model  # nobody to communicate with: no buckets, a second copy of the gradients
    sharded = DDP(
        model,
        device_ids=[_device(mesh).index] if mesh.device_type == "cuda" else None,
        process_group=mesh.get_group("replicate"),
        gradient_as_bucket_view=True,  # no second copy of the gradients
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
    )
    sharded.broadcast_buffers = False  # at every step; as in FSDP: most are tables
    hooks = {torch.bfloat16: "bf16_compress_hook", torch.float16: "fp16_compress_hook"}
    if hook := hooks.get(options.reduce_dtype):
        sharded.register_comm_hook(mesh.get_group("replicate"), getattr(default_hooks, hook))
    return sharded


def _fsdp(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    row: Strategy,
    mesh: DeviceMesh,
    options: ShardingOptions,
    fill: Callable[[nn.Module], None],
) -> nn.Module:
    """FSDP1 or FSDP2: give each unit its values, then cut it; inner units first, the root last.

    FSDP2 cuts each parameter along dimension 0, FSDP1 all of a unit as one flat vector.
    """
    fsdp1 = options.fsdp == 1
    wrap: Any = FSDP1 if fsdp1 else fully_shard  # FSDP1 returns a wrapper
    settings = (_fsdp1_settings if fsdp1 else _fsdp2_settings)(row, mesh, options)
    for name, module in blocks.items():
        fill(module)  # whole, until it is cut
        unit = model.get_submodule(name)  # the module, or what checkpoints it
        _replace(model, {unit: wrap(unit, **settings)})
    fill(model)  # the rest: what has its values already is left alone
    sharded = wrap(model, **settings)
    units: list[Any] = [model.get_submodule(name) for name in blocks]
    if options.prefetch == "none" and not fsdp1:
        # itself, which is gathered already: an empty list would mean the default, the next unit
        for unit in [*units, sharded]:
            unit.set_modules_to_backward_prefetch([unit])
    if options.forward_prefetch and not fsdp1:
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    return sharded


def _replace(model: nn.Module, wrappers: Mapping[nn.Module, nn.Module]) -> None:
    """Put each wrapper in the place of its module, under every name that this has."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = wrappers.get(child, child) if child else child


def _fsdp1_settings(row: Strategy, mesh: DeviceMesh, options: ShardingOptions) -> dict[str, Any]:
    """FSDP1: the strategy is an enum, so is the prefetch; every unit is one flat parameter."""
    if mesh["shard"].size() == 1:
        # otherwise FSDP1 would not reduce gradients at all (pytorch#154888)
        name, submesh = "NO_SHARD", mesh["replicate"]
        warnings.filterwarnings("ignore", "The `NO_SHARD`", FutureWarning)  # "use DDP"
    elif row.group == "world":
        name, submesh = "FULL_SHARD" if row.reshard else "SHARD_GRAD_OP", mesh["shard"]
    else:
        name, submesh = "HYBRID_SHARD" if row.reshard else "_HYBRID_SHARD_ZERO2", mesh
    precision = fsdp.MixedPrecision(options.param_dtype, options.reduce_dtype)
    precision.cast_forward_inputs = precision.cast_root_forward_inputs = options.cast_inputs
    return {
        "device_mesh": submesh,
        "sharding_strategy": ShardingStrategy[name],
        "mixed_precision": precision,
        "backward_prefetch": getattr(fsdp.BackwardPrefetch, options.prefetch.upper(), None),
        "forward_prefetch": options.forward_prefetch,
        "limit_all_gathers": options.limit_all_gathers,
        "cpu_offload": fsdp.CPUOffload(offload_params=options.cpu_offload),
        "use_orig_params": True,  # weight decay differs by parameter
        "device_id": _device(mesh),  # needed for a CPU too
    }


def _fsdp2_settings(row: Strategy, mesh: DeviceMesh, options: ShardingOptions) -> dict[str, Any]:
    """FSDP2: the strategy is the mesh and `reshard_after_forward`; parameters become DTensors."""
    pinned = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return {
        # of two dimensions: replicated over the first
        "mesh": mesh["shard"] if row.group == "world" else mesh,
        "mp_policy": fsdp.MixedPrecisionPolicy(
            options.param_dtype, options.reduce_dtype, cast_forward_inputs=options.cast_inputs
        ),
        "offload_policy": pinned if options.cpu_offload else fsdp.OffloadPolicy(),
        # None: free all units but the root, used last in forward and first in backward
        "reshard_after_forward": None if row.reshard else False,
    }


# --- A step: accumulation, gradient norm, optimizer, scaler


def accumulation(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Enter around forward and backward of one accumulation step; only the `last` one all-reduces.

    Sharded gradients are reduce-scattered at every step. FSDP1's hybrid modes all-reduce too.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
        return nullcontext()
    unsharded = isinstance(model, DDP) or (
        isinstance(model, FSDP1) and model.sharding_strategy == ShardingStrategy.NO_SHARD
    )
    return model.no_sync() if unsharded and not last else nullcontext()  # type: ignore[operator]


def autocast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
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
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)  # of all shards
    whole = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
    for parameters in groups if max_norm != float("inf") else []:
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
    """List what decays: all but biases and norms. Before wrapping: FSDP1 flattens them."""
    return {name for name, p in model.named_parameters() if p.ndim > 1}


def build_optimizer(
    model: nn.Module,
    mode: str,
    decay: Collection[str],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),  # of the MAE recipe
    eps: float = 1e-8,
    lr_scale: Callable[[str], float] = lambda name: 1.0,
) -> torch.optim.Optimizer:
    """Build a fused AdamW; `decay` has the original names of what decays.

    `lr_scale` is called with an original name; what it returns is the group's "lr_scale", by which
    the schedule multiplies the rate. Another optimizer must be elementwise, as AdamW is: a shard is
    a piece of a tensor.
    """
    found: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, p in ((original_name(n), p) for n, p in model.named_parameters()):
        if p.requires_grad:
            found.setdefault((name in decay, lr_scale(name)), []).append(p)
    groups: list[dict[str, Any]] = [
        {"params": of_mesh, "weight_decay": weight_decay * decays, "lr_scale": scale}
        for (decays, scale), parameters in found.items()
        for of_mesh in by_mesh(parameters)
    ]
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "fused": True}
    if STRATEGIES[mode].engine == "zero1":
        settings["parameters_as_bucket_view"] = True  # each rank sends its parameters in one piece
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings)
    return torch.optim.AdamW(groups, **settings)


def optimizer_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Make one step of any optimizer, or none if `skip` (), the same on every rank, is 1."""
    inner: Any = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    # Not SGD, whose first step, if it is left out, leaves the momentum uninitialised.
    adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    if adam and getattr(inner, "_step_supports_amp_scaling", False):
        # Where `found_inf` is 1, fused AdamW changes nothing; it reads that on the device.
        inner.found_inf = skip.to(optimizer.param_groups[0]["params"][0].device)
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
    return (ShardedGradScaler if isinstance(model, FSDP1) else torch.amp.GradScaler)(device.type)


# --- Arguments, blocks, initial values


def _check_arguments(
    model: nn.Module, mode: str, mesh: DeviceMesh, split: bool, options: ShardingOptions
) -> None:
    """Raise ValueError for arguments of `apply` with which training would go wrong."""
    tp = mesh.shape[2] if split else 1
    hybrid = mode in STRATEGIES and STRATEGIES[mode].group == "group"
    wanted = mesh_shape(mode, dist.get_world_size() // tp, mesh.shape[1] if hybrid else None)
    if mesh.shape[:2] != wanted:
        raise ValueError(f"mode {mode} here needs a mesh that begins with {wanted}, not {mesh}")
    given = {n: v for n, v in vars(options).items() if v != getattr(ShardingOptions, n)}
    for sentence in misuses(mode, given | ({"tp": tp} if tp > 1 else {})):
        raise ValueError(sentence)
    if "module" in dict(model.named_children()):
        raise ValueError("rename the submodule module: DDP uses this name")
    # its buffers stay in fp32, and recomputation would count each batch twice
    low = STRATEGIES[mode].engine == "fsdp" and options.param_dtype != torch.float32
    if (low or options.ac != "none") and any(isinstance(m, _BatchNorm) for m in model.modules()):
        raise ValueError("BatchNorm needs ac none and, in FSDP, param_dtype fp32: use GroupNorm")
    for name, p in model.named_parameters():
        if p.dtype != torch.float32:
            raise ValueError(f"{name} is {p.dtype}, but parameters are stored in fp32: .float()")
        if STRATEGIES[mode].engine == "fsdp" and (p.ndim == 0 or p.numel() == 0):
            raise ValueError(f"{name} {tuple(p.shape)} cannot be sharded: give it one element")


def find_blocks(model: nn.Module, classes: Collection[type[nn.Module]]) -> dict[str, nn.Module]:
    """Find the outermost modules of these classes, by name; ValueError if there are none."""
    wanted = tuple(classes)
    found = {n: m for n, m in model.named_modules() if isinstance(m, wanted) and m is not model}
    if wanted and not found:
        listed = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"block_classes match no module: use set(), or classes out of {listed}")
    inner = {part for block in found.values() for part in block.modules() if part is not block}
    return {name: block for name, block in found.items() if block not in inner}


def _check_units(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for a parameter in two units, which FSDP would untie."""
    inside = {part for unit in units.values() for part in unit.modules()}
    found: dict[nn.Parameter, str] = {}
    for name, unit in [*units.items(), ("the root", model)]:
        modules = [part for part in unit.modules() if unit is not model or part not in inside]
        for p in [p for module in modules for p in module.parameters(recurse=False)]:
            if found.setdefault(p, name) != name:
                where = f"a parameter {tuple(p.shape)} is in two units, {found[p]} and {name}"
                raise ValueError(f"{where}: use other block_classes, wrap root, or mode ddp")


def _prepare_blocks(
    model: nn.Module, blocks: Mapping[str, nn.Module], options: ShardingOptions
) -> None:
    """Checkpoint and compile the blocks."""
    # first, so that a block is gathered once for recomputation and gradient together
    if options.ac != "none":
        how: dict[str, Any] = {"preserve_rng_state": options.preserve_rng_state}
        if options.ac == "selective":
            how["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matmuls)
        _replace(model, {block: checkpoint_wrapper(block, **how) for block in blocks.values()})
    if options.compile:
        # Dynamo would cut each block into graphs that end with DDP's buckets, so that all-reduces
        # start early within a block; DDP starts them between the blocks, and one graph is faster.
        torch._dynamo.config.optimize_ddp = False
        for name in blocks:
            # Not dynamic: one graph for all blocks would be slower than one for each kind.
            model.get_submodule(name).compile(dynamic=False)


def _keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep attention and matrix products, but the MLP's last, whose result no gradient needs."""
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        left, right = args[-2:]
        keep = left.shape[-1] <= right.shape[-1]
    else:  # bmm: attention without a fused kernel
        keep = "scaled_dot_product" in str(op) or op is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def undefined(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """Return memory of any content: for `apply`, where a checkpoint is loaded afterwards."""
    return torch.empty(shape, device=device)


@torch.no_grad()
def _materialise(
    unit: nn.Module, names: Mapping[Tensor, str], device: torch.device, values: InitialValue
) -> None:
    """Give what is on meta in a module and below it memory and values, alike on every rank."""
    made: dict[Tensor, Tensor] = {}  # tied parameters stay tied
    for module in unit.modules():
        for leaf, t in {**module._parameters, **module._buffers}.items():
            if t is not None and _on_meta(t):
                if values is undefined and leaf in module._non_persistent_buffers_set:
                    raise ValueError(f"{names[t]} is in no checkpoint: make this buffer persistent")
                if t not in made:
                    new = torch.empty_like(t, device=device)
                    new.copy_(values(names[t], t.shape, device=device))
                    is_parameter = isinstance(t, nn.Parameter)
                    made[t] = nn.Parameter(new, t.requires_grad) if is_parameter else new
                setattr(module, leaf, made[t])


def _check_same_model(model: nn.Module, arguments: str, device: torch.device) -> None:
    """Raise RuntimeError if the ranks have different models, or arguments. Collective."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = [(n, t.shape, t.dtype, t.requires_grad, _on_meta(t)) for n, t in tensors]
    crc = zlib.crc32(f"{arguments} {found}".encode())
    extremes = torch.tensor([crc, -crc], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)  # the largest, and minus the smallest
    if extremes.sum():
        raise RuntimeError("the ranks were given different models, modes or options")


@torch.no_grad()
def _broadcast_values(model: nn.Module, device: torch.device) -> None:
    """Send the values that a model has, not those on meta, from rank 0 to all. Collective."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.numel() and not _on_meta(tensor):
            value = tensor.to(device).contiguous()
            dist.broadcast(value.view(-1).view(torch.uint8), 0)  # as bytes: any dtype
            tensor.data = value.to(tensor.device)


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # is_meta is true for fake tensors too
