"""Shard a model over ranks: a table of strategies, and how each engine implements them.

The engines are DDP (plain, or with ZeRO-1's sharded optimizer), and FSDP in two versions: FSDP1
(`FullyShardedDataParallel`, deprecated, used by the study in arXiv 2404.11706) and FSDP2
(`fully_shard`, the maintained one). `apply` is the entry point, for any model in fp32;
examples/own_model.py is a whole training loop that uses it.
Copy this one file: it needs only torch.

Three collective operations carry most of the traffic. An all-reduce of gradients averages them over
the ranks. An all-gather gives each rank the shards of all ranks. A reduce-scatter averages
gradients, and gives each rank its shard of the result.

A unit is what FSDP gathers and frees together: a block, or the root, which is everything outside
the blocks (the whole model with wrap="root"). "Full" values and shapes are those of an unsharded
tensor. In docstrings, "Collective" means that every rank must call the function: a rank that has
called it waits for the others.
"""

import random
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod, WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import _common_utils as fsdp_utils
from torch.distributed.fsdp._runtime_utils import _reshard as reshard_fsdp1
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

InitFunction = Callable[..., Tensor]  # (name, full shape, device=device) -> full fp32 tensor

# --- The strategies


@dataclass(frozen=True)
class Strategy:
    """One strategy of the table: what is sharded, and over which ranks."""

    engine: Literal["ddp", "zero1", "fsdp"]  # zero1: DDP with ZeRO-1's optimizer
    shard_over: Literal["none", "group", "world"]  # the ranks that share one copy
    reshard_after_forward: bool  # free what was gathered, and gather again in backward
    shards: str  # what each rank holds only a part of

    def traffic(self, *, several_replicas: bool = True, one_unit: bool = False) -> str:
        """Describe the parameter-sized collectives of a step.

        - `several_replicas`: there are several shard groups, each with a copy of the model.
        - `one_unit`: the whole model is one unit (wrap root), which keeps its gathered parameters
          until backward.
        """
        if self.engine == "zero1":
            return "1 all-reduce, 1 broadcast"
        if self.shard_over == "none":
            return "1 all-reduce"
        if self.reshard_after_forward and not one_unit:
            text = "2 all-gathers, 1 reduce-scatter"
        else:
            text = "1 all-gather, 1 reduce-scatter"
        if self.shard_over == "group" and several_replicas:
            text += " in the group; 1 all-reduce of a shard across groups"
        return text


FULL = "parameters, gradients, states"
GRAD_OP = "gradients and states always; parameters outside of forward and backward"

STRATEGIES: dict[str, Strategy] = {
    # engine, shard_over, reshard_after_forward, shards
    "ddp": Strategy("ddp", "none", False, "nothing"),
    "zero1": Strategy("zero1", "none", False, "optimizer states"),
    "no_shard": Strategy("fsdp", "none", False, "nothing"),
    "shard_grad_op": Strategy("fsdp", "world", False, GRAD_OP),
    "full_shard": Strategy("fsdp", "world", True, FULL),
    "hybrid": Strategy("fsdp", "group", True, FULL),
    "hybrid_grad_op": Strategy("fsdp", "group", False, GRAD_OP),
}


def mesh_shape(mode: str, world_size: int, group: int | None = None) -> tuple[int, int]:
    """Return the mesh shape (replicas, ranks per shard group) of a mode.

    ValueError if mode, world size and group do not fit together.
    """
    if mode not in STRATEGIES:
        raise ValueError(f"there is no mode {mode}: use one of {', '.join(STRATEGIES)}")
    shard_over = STRATEGIES[mode].shard_over
    needs_group = shard_over == "group"
    has_group = bool(group)
    if needs_group != has_group:
        raise ValueError(
            "the hybrid modes need `group`, the number of ranks that share one copy, and no other "
            "mode takes it"
        )
    if shard_over == "none":
        return world_size, 1
    if shard_over == "world":
        return 1, world_size
    assert group  # as checked above
    if world_size % group:
        sizes = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
        what = f"{world_size} ranks cannot be split into shard groups of {group}"
        raise ValueError(f"{what}: use {', '.join(sizes)}, or start a different number of ranks")
    return world_size // group, group


# Options that apply to some strategies only
FSDP_OPTIONS = {"fsdp", "wrap", "cpu_offload", "tp"}
DDP_OPTIONS = {"bucket_cap_mb"}
GATHER_OPTIONS = {"forward_prefetch", "limit_all_gathers"}


def has_option(strategy: Strategy, name: str) -> bool:
    """Tell whether an option applies to a strategy."""
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
    """Yield a sentence for each option that is not allowed in a mode, or with another option.

    `given` maps names to values: fields of ShardingOptions, or flags of the trainer, where
    `param_dtype` is called `precision`. `flag_name` turns a name into what the sentences call it,
    such as `--cpu-offload`; by default (`str`) that is the name itself.
    """
    strategy = STRATEGIES[mode]
    fsdp1 = given.get("fsdp") == 1
    fp16 = given.get("precision") == "fp16" or given.get("param_dtype") == torch.float16
    for name, value in given.items():
        flag = flag_name(name)
        backward_post = name == "prefetch" and value == "backward_post"
        fsdp1_only = name == "limit_all_gathers" or backward_post
        if not has_option(strategy, name):
            modes = [other for other, row in STRATEGIES.items() if has_option(row, name)]
            yield f"{flag} is for {flag_name('mode')} {', '.join(modes)}, not {mode}: leave it out"
        elif fsdp1_only and not fsdp1:
            add = f"add {flag_name('fsdp')} 1, or leave {flag} out"
            yield f"{flag} {value} is for FSDP1 only: {add}"
        elif name == "tp" and (fsdp1 or given.get("wrap") == "root"):
            yield f"{flag} needs {flag_name('fsdp')} 2 and {flag_name('wrap')} block"
        elif name in ("tp", "cpu_offload") and fp16:
            yield f"{flag} does not work with fp16: its scaler would miss overflows; use bf16"
        elif name == "cpu_offload" and fsdp1 and given.get("accum", 1) > 1:
            yield f"{flag} with FSDP1 needs {flag_name('accum')} 1; or use {flag_name('fsdp')} 2"
        elif name == "find_unused_parameters" and strategy.engine == "fsdp":
            if fsdp1:
                yield f"{flag} does not apply to FSDP1, which reduces whole units: leave it out"
            elif not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
                yield f"{flag} with FSDP2 needs torch 2.14, not {torch.__version__}: use mode ddp"


# --- Applying a strategy: values, activation checkpointing, compile, sharding


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Options of `apply` besides the mode, mostly named like the flags of train_fsdp.py."""

    fsdp: Literal[1, 2] = 2  # FSDP1 or FSDP2, where the engine is fsdp
    wrap: Literal["block", "root"] = "block"  # FSDP: a unit is a block, or the whole model
    param_dtype: torch.dtype = torch.bfloat16  # for computing; parameters are stored in fp32
    reduce_dtype: torch.dtype = torch.float32  # for averaging gradients over ranks
    cast_inputs: bool = True  # FSDP: cast the inputs of model and blocks to param_dtype
    # FSDP: when to gather the next unit in backward; backward_post is in FSDP1 only
    prefetch: Literal["none", "backward_pre", "backward_post"] = "backward_pre"
    forward_prefetch: bool = False  # FSDP: gather the next unit ahead of time in forward too
    limit_all_gathers: bool = True  # FSDP1: keep the CPU from gathering far ahead
    cpu_offload: bool = False  # FSDP: keep shards, gradients and states on the CPU
    bucket_cap_mb: float | None = None  # DDP: size of a bucket in MiB; None is PyTorch's default
    find_unused_parameters: bool = False  # DDP, FSDP2: a rank may leave parameters unused
    ac: Literal["none", "selective", "full"] = "none"  # activation checkpointing of each block
    preserve_rng_state: bool = True  # ac: recompute with the same dropout masks
    compile: bool = False  # torch.compile for each block


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
    """Shard a model over the mesh. Collective.

    - `mesh`: dimensions "replicate" and "shard", with the sizes that `mesh_shape` returns; FSDP2
      allows a third, "tp".
    - `block_classes`: every outermost module of one of these classes is a block; set(): no blocks.
    - `init_fn`: for a model on meta; returns the full initial value, the same on every rank.
    - `uninitialized`: a model on meta gets no values here, because a checkpoint is loaded next;
      `init_fn` is then used only for what the model's state_dict() lacks, such as some buffers.
    - `split_block(block, mesh)`: splits a block over "tp", in place.

    A model that is not on meta gets rank 0's values. The wrappers, from the inside out:

    1. checkpoint_wrapper around each block: inside FSDP, so that a block is gathered once for both
       its recomputation and its gradient;
    2. torch.compile of each block: its graph contains the recomputation, but not FSDP's hooks;
    3. DDP around the model; or FSDP around each block, then around the model.

    Build optimizers and register hooks on parameters afterwards. Call the model, not its parts or
    other methods. Under FSDP all ranks must call the same blocks in a step, or some silently train
    on wrong weights. FSDP1 also updates parameters unused in a step, and makes fp64 buffers fp32.

    Raises ValueError for invalid arguments, RuntimeError if the ranks have different models.
    """
    _check_arguments(mode, mesh, split_block is not None, options)
    strategy = STRATEGIES[mode]
    blocks = find_blocks(model, block_classes)
    shards_blocks = strategy.engine == "fsdp" and options.wrap == "block"
    block_units = blocks if shards_blocks else {}
    _check_model(model, blocks, strategy, options)
    _check_units(model, block_units)
    original = _parameters_by_name(model)
    values = _InitialValues(model, _device(mesh), init_fn, uninitialized)
    if dist.get_backend() != "fake":  # PyTorch's backend of simulations: tensors have no values
        values.broadcast_from_rank0(must_agree=f"{mode} {list(blocks)} {options}")

    def fill_and_split(module: nn.Module) -> None:
        values.fill(module)
        if split_block and module in blocks.values():
            split_block(module, mesh)

    _checkpoint_and_compile(model, blocks, options)
    if strategy.engine == "fsdp":
        sharded = _fsdp(model, block_units, strategy, mesh, options, fill_and_split)
    else:
        fill_and_split(model)
        sharded = _ddp(model.to(_device(mesh)), mesh, options)
    _copy_attributes(original, sharded)
    _watch_optimizers(sharded, original.values())
    return sharded


def _parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their original names, a tied one under each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {original_name(name): p for name, p in named}


def _copy_attributes(original: Mapping[str, nn.Parameter], sharded: nn.Module) -> None:
    """Copy the attributes that a user set on the original parameters to their replacements.

    Training loops build parameter groups from attributes such as `p.no_weight_decay`.
    """
    for name, p in _parameters_by_name(sharded).items():
        if name not in original:  # split_block has made it
            continue
        for attribute, value in vars(original[name]).items():
            if not hasattr(p, attribute):
                setattr(p, attribute, value)


def _device(mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank computes on."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _checkpoint_and_compile(
    model: nn.Module, blocks: Mapping[str, nn.Module], options: ShardingOptions
) -> None:
    """Wrap the blocks for activation checkpointing, and compile them."""
    settings: dict[str, Any] = {"preserve_rng_state": options.preserve_rng_state}
    if options.ac == "selective":
        # For each operation, _keep_matmuls tells whether its result is saved. context_fn is set
        # only for this `ac`, because Dynamo treats checkpointing with any context_fn as selective.
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matmuls)
    if options.ac != "none":
        for block in blocks.values():
            wrapper = checkpoint_wrapper(block, **settings)
            _replace(model, {block: wrapper})
            # raise an error if forward() changes these: recomputing it would change them again
            _refuse_changes_in_forward(wrapper, wrapper.named_buffers, CHANGED_BUFFER)
            list_state = partial(_numbers_and_random_states, block)
            _refuse_changes_in_forward(wrapper, list_state, CHANGED_STATE, fingerprint=hash)
    if options.compile:
        # By default Dynamo splits each block's graph where DDP's buckets end, so that all-reduces
        # start within a block. One graph is faster, and the all-reduces still start between blocks.
        torch._dynamo.config.optimize_ddp = False
        for name in blocks:
            # Not dynamic: one graph for blocks of any shape would be slower than one per shape.
            block = model.get_submodule(name)  # or the checkpoint_wrapper around it
            block.compile(dynamic=False)


def _replace(model: nn.Module, wrappers: Mapping[nn.Module, nn.Module]) -> None:
    """Replace each module by its wrapper, under every name by which the model holds it."""
    parents = [*model.modules()]  # as they are now: a wrapper must not be put inside itself
    for parent in parents:
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = wrappers.get(child, child)


def _keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results of attention and of matrix products; recompute all others when needed.

    A product with fewer output than input features is not saved. In a transformer block, that
    product is the MLP's last one (fc2), whose output no gradient needs.
    """
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        # mm(left, right) or addmm(bias, left, right), where right is (in, out)
        left, right = args[-2:]
        keep = left.shape[-1] <= right.shape[-1]
    else:
        # bmm is attention without a fused kernel
        keep = "scaled_dot_product" in str(op) or op is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


# --- The engines


def _ddp(model: nn.Module, mesh: DeviceMesh, options: ShardingOptions) -> nn.Module:
    """DDP: full parameters on every rank, gradients all-reduced in buckets during backward."""
    if mesh.size() == 1:
        return model  # a single rank averages nothing: DDP would only add its buckets
    if not any(p.requires_grad for p in model.parameters()):
        _LoopChecks(model, units=[], mesh=mesh, unused_allowed=True).register()
        return model  # a frozen model, such as a teacher, which DDP would refuse
    group = mesh.get_group("replicate")
    sharded = DDP(
        model,
        device_ids=[_device(mesh).index] if mesh.device_type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,  # the gradients lie in the buckets: no second copy
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
    )
    # DDP would broadcast the buffers at every step; FSDP does not, and most are constant tables.
    # Set here, because the constructor's argument is deprecated (torch 2.14).
    sharded.broadcast_buffers = False
    if options.reduce_dtype == torch.bfloat16:
        sharded.register_comm_hook(group, default_hooks.bf16_compress_hook)
    elif options.reduce_dtype == torch.float16:
        sharded.register_comm_hook(group, default_hooks.fp16_compress_hook)
    _LoopChecks(sharded, [], mesh, unused_allowed=options.find_unused_parameters).register()
    return sharded


def _fsdp(
    model: nn.Module,
    block_units: Mapping[str, nn.Module],
    strategy: Strategy,
    mesh: DeviceMesh,
    options: ShardingOptions,
    fill_and_split: Callable[[nn.Module], None],
) -> nn.Module:
    """FSDP1 or FSDP2: give each unit its values, then shard it; the root comes last.

    FSDP2 shards each parameter along dimension 0, FSDP1 a unit's parameters as one flat vector.
    """
    mesh = mesh["replicate", "shard"]  # without "tp"
    if options.fsdp == 1:
        wrap = _fsdp1_wrapper(strategy, mesh, options)  # returns a new module around its argument
    else:
        wrap = _fsdp2_wrapper(strategy, mesh, options)  # changes its argument, and returns it
    for name, block in block_units.items():
        fill_and_split(block)  # full values, until wrap() shards them
        unit = model.get_submodule(name)  # the block, or the checkpoint_wrapper around it
        _replace(model, {unit: wrap(unit)})
    fill_and_split(model)  # the root; tensors that already have values are left alone
    sharded = wrap(model)
    wrapped_blocks: list[Any] = [model.get_submodule(name) for name in block_units]
    units = [*wrapped_blocks, sharded]
    if options.fsdp == 2:
        _set_prefetch(wrapped_blocks, sharded, options)
    elif options.cpu_offload:
        _pin_offloaded(units)
    if options.find_unused_parameters:
        sharded.set_reduce_scatter_unused_params(True)
    # FSDP1 computes with a copy of a unit's parameters (gathered, cast or moved), or else with the
    # parameters themselves.
    low_precision = options.param_dtype != torch.float32
    uses_copy = mesh["shard"].size() > 1 or low_precision or options.cpu_offload
    for unit in units:
        if options.fsdp == 1:
            _add_fsdp1_hooks(unit, uses_copy)
        else:
            _add_fsdp2_hooks(unit, is_root=unit is sharded)
    simulated = dist.get_backend() == "fake"  # then tensors have no values to check
    if not simulated:
        allowed = options.find_unused_parameters
        _LoopChecks(sharded, units, mesh, unused_allowed=allowed).register()
    return sharded


def _pin_offloaded(units: list[Any]) -> None:
    """Move FSDP1's offloaded parameters to pinned memory, where they stay. Collective.

    The first forward pass would do so too. But if nothing is sharded, calling state_dict() before
    that pass would create the pinned copy too early: values loaded from a checkpoint afterwards
    would not reach the copy, and training would start from the old ones.
    """
    for unit in reversed(units):  # FSDP1 needs the root first
        with FSDP1.summon_full_params(unit, recurse=False, writeback=False):
            pass  # on leaving this `with`, the parameters become views of the pinned copy


def _add_fsdp1_hooks(unit: Any, uses_copy: bool) -> None:
    """Register the hooks that run around the forward pass of an FSDP1 unit.

    The order in a call: FSDP1 gathers, the wrapped module is watched, FSDP1 frees, and
    `_reshard_without_backward` runs.
    """
    # With `uses_copy`, forward computes with a copy of the parameters, and any write into it is
    # lost: values are compared. Otherwise a write reaches the parameter itself, and only a new
    # `.data` is lost: the memory is compared.
    fingerprint = _fingerprint if uses_copy else _memory_of
    list_tensors = partial(_gathered_by_fsdp1, unit)
    module = unit._fsdp_wrapped_module
    _refuse_changes_in_forward(module, list_tensors, CHANGED_PARAMETER, fingerprint)
    _refuse_writes_to_arguments(unit, module)
    # torch.compile must not trace a hook, here and below
    unit.register_forward_hook(torch.compiler.disable(_reshard_without_backward))


def _add_fsdp2_hooks(unit: Any, is_root: bool) -> None:
    """Register the hooks that run around the forward pass of an FSDP2 unit.

    The order in a call: the hooks with `prepend` run, FSDP2 gathers, the unit is watched, FSDP2
    frees, and `_reshard_without_backward` runs.
    """
    clear = torch.compiler.disable(_clear_autocast_cache)
    unit.register_forward_pre_hook(clear, prepend=True)
    if not is_root:
        # `_LoopChecks.before_call` checks all parameters when the model is called, but the model
        # may then call a block by functional_call, with other tensors in place of its parameters.
        refuse = torch.compiler.disable(_refuse_stand_ins)
        unit.register_forward_pre_hook(refuse, prepend=True)
    _refuse_changes_in_forward(unit, unit.named_parameters, CHANGED_PARAMETER)
    _refuse_writes_to_arguments(unit, unit)
    _count_passes(unit)
    unit.register_forward_hook(torch.compiler.disable(_reshard_without_backward))


# FSDP2 unit -> its passes that have begun but not ended. An optimizer step clears the counts: no
# pass is running then, but one that an exception has ended may still be counted.
PASSES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def _count_passes(unit: Any) -> None:
    """Count the passes of an FSDP2 unit that have begun but not ended, in PASSES.

    A pass is a call of forward(), or of a method given to `register_fsdp_forward_method`; one may
    call another. FSDP2 runs no hooks around such a method. It calls `state._pre_forward` and
    `state._post_forward`, which are replaced here. For forward() these replacements change nothing:
    FSDP2 has already registered the original two as its hooks.
    """

    def begin(module: Any, args: Any) -> None:
        if not _in_backward():  # a recomputation may end early, by an exception
            PASSES[module] = PASSES.get(module, 0) + 1

    def end(module: Any, args: Any, output: Any) -> None:
        if not _in_backward():
            # the count is 0 already if a hook before `begin` has raised, or a step has cleared it
            PASSES[module] = max(0, PASSES.get(module, 0) - 1)

    unit.register_forward_pre_hook(torch.compiler.disable(begin), prepend=True)
    unit.register_forward_hook(torch.compiler.disable(end), always_call=True)
    state = unit._get_fsdp_state()
    pre_forward = state._pre_forward
    post_forward = state._post_forward

    def begin_method(module: Any, args: Any, kwargs: Any) -> Any:
        begin(module, args)
        return pre_forward(module, args, kwargs)

    def end_method(module: Any, args: Any, output: Any) -> Any:
        output = post_forward(module, args, output)
        end(module, args, output)
        return _reshard_without_backward(module, args, output)

    state._pre_forward = begin_method
    state._post_forward = end_method


def _casts_inputs(options: ShardingOptions) -> bool:
    """Tell whether FSDP casts inputs; in fp32 it would only round fp64 inputs."""
    return options.cast_inputs and options.param_dtype != torch.float32


def _set_prefetch(blocks: list[Any], root: Any, options: ShardingOptions) -> None:
    """Tell FSDP2 which units to gather ahead of time; its default is the next unit in backward."""
    if options.prefetch == "none":
        # Each unit prefetches only itself, which is gathered already: an empty list would mean
        # FSDP2's default, the next unit.
        for unit in [*blocks, root]:
            unit.set_modules_to_backward_prefetch([unit])
    if options.forward_prefetch:
        for unit, following in pairwise(blocks):
            unit.set_modules_to_forward_prefetch([following])


# (shard_over, reshard_after_forward) -> PyTorch's name for the strategy
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
    prefetch = {
        "none": None,
        "backward_pre": fsdp.BackwardPrefetch.BACKWARD_PRE,
        "backward_post": fsdp.BackwardPrefetch.BACKWARD_POST,
    }
    precision = fsdp.MixedPrecision(
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        cast_forward_inputs=_casts_inputs(options),
        cast_root_forward_inputs=_casts_inputs(options),
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
        # Show the optimizer the original parameters, as views of the flat one: weight decay differs
        # between parameters of a unit.
        use_orig_params=True,
        device_id=_device(mesh),  # without it FSDP1 looks for a GPU, even in a CPU run
    )


def _fsdp2_wrapper(
    strategy: Strategy, mesh: DeviceMesh, options: ShardingOptions
) -> Callable[[nn.Module], Any]:
    """FSDP2: the mesh and `reshard_after_forward` set the strategy; parameters become DTensors.

    On a mesh of two dimensions it shards over the second and replicates over the first. In
    backward each unit, the last block first, reduce-scatters its gradients over "shard", then
    all-reduces the resulting shard over "replicate".
    """
    offload = fsdp.OffloadPolicy()
    if options.cpu_offload:
        offload = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return partial(
        fully_shard,
        mesh=mesh["shard"] if strategy.shard_over == "world" else mesh,
        mp_policy=fsdp.MixedPrecisionPolicy(
            options.param_dtype, options.reduce_dtype, cast_forward_inputs=_casts_inputs(options)
        ),
        offload_policy=offload,
        # None: free every unit but the root, which is last in forward and first in backward
        reshard_after_forward=None if strategy.reshard_after_forward else False,
    )


def _clear_autocast_cache(unit: nn.Module, args: Any) -> None:
    """Clear autocast's cache, which may hold converted copies of tensors that have been freed."""
    torch.clear_autocast_cache()


def _refuse_stand_ins(unit: nn.Module, args: Any) -> None:
    """Raise RuntimeError if tensors stand in for parameters: FSDP2 would use its own instead."""
    for module in unit.modules():
        for name, p in module._parameters.items():
            if p is not None and not isinstance(p, nn.Parameter):
                raise RuntimeError(
                    f"{name} was replaced for one call, as by functional_call, but FSDP2 would "
                    "ignore the replacement: use mode ddp, or other block_classes"
                )


def _reshard_without_backward(module: Any, args: Any, output: Any) -> Any:
    """Free what an FSDP unit gathered, after a forward pass that no backward pass will follow.

    Without this hook the root, and in the grad_op modes every unit, would stay gathered: FSDP1
    would keep using the gathered values after the shards have changed; under FSDP2 the module would
    hold parameters other than those that the optimizer updates.

    Returns the output; a parameter in it, whose memory is freed here, is replaced by a copy.
    """
    if torch.is_grad_enabled() and _may_need_backward(output):
        return output
    fsdp2 = isinstance(module, FSDPModule)
    if fsdp2 and PASSES.get(module, 0) > 0:  # this pass is in another that has not ended
        return output
    if fsdp2:
        gathered = [p for p in module.parameters() if not isinstance(p, DTensor)]
    else:
        gathered = [tensor for _, tensor in _gathered_by_fsdp1(module)]
    freed = {_memory_of(tensor) for tensor in gathered}

    def copy_if_freed(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) or _memory_of(tensor) not in freed:
            return tensor
        return tensor.clone()

    output = tree_map_only(Tensor, copy_if_freed, output)
    if fsdp2:
        module.reshard()
    # FSDP1's `_handle` manages a unit's flat parameter; None if the unit has no parameters.
    elif module._handle is not None and module._handle.uses_sharded_strategy:
        # FSDP1 has no public name for it
        reshard_fsdp1(module, module._handle, free_unsharded_flat_param=True)
    return output


def _may_need_backward(output: Any) -> bool:
    """Tell whether a module's output contains, or may contain, a tensor that needs a gradient."""
    if isinstance(output, Tensor):
        return output.requires_grad
    if isinstance(output, Mapping):
        return any(_may_need_backward(value) for value in output.values())
    if isinstance(output, list | tuple):
        return any(_may_need_backward(value) for value in output)
    return not isinstance(output, int | float | str | None)  # other objects may contain one


# --- A step: accumulation, gradient norm, optimizer, scaler


@contextmanager
def accumulation(model: nn.Module, last: bool, *, uses_all: bool = False) -> Iterator[None]:
    """Enclose the forward and backward passes of one micro-batch; `last`: the last of a step.

    Sharded gradients are reduce-scattered after every micro-batch. By default FSDP also all-reduces
    over replicas after every micro-batch, which is always right. DDP always all-reduces only after
    the last one. With `uses_all=True` so do FSDP2 in every mode, and FSDP1 in mode no_shard. You
    thereby promise that every micro-batch gives every trained parameter a gradient, on every rank.
    If you break the promise, and a unit gets no gradient in the last micro-batch, FSDP2 never
    all-reduces the unit's earlier gradients.
    """
    defer = uses_all and not last
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, FSDPModule) and defer:
                module.set_requires_all_reduce(False, recurse=False)
                # outside of this context, gradients must be all-reduced as usual
                stack.callback(module.set_requires_all_reduce, True, recurse=False)
            if isinstance(module, DDP) and not last:
                stack.enter_context(module.no_sync())
            if isinstance(module, FSDP1) and defer and _is_no_shard_root(module):
                stack.enter_context(module.no_sync())
        yield


def _is_no_shard_root(module: FSDP1) -> bool:
    """Tell whether a module is the root unit of a model that FSDP1 does not shard (NO_SHARD)."""
    return module.sharding_strategy == ShardingStrategy.NO_SHARD and module.check_is_root()


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
    gradients are sharded. ValueError under FSDP1 if `model` is not what `apply` returned, but a
    module around or inside it; RuntimeError if the gradients are not averaged over ranks yet.
    """
    checks = _checks_in(model)
    if not all(each.all_averaged() for each in checks):
        raise RuntimeError(
            "the gradients have not been averaged over ranks yet: clip them after the step's last "
            "micro-batch"
        )
    if isinstance(model, FSDP1):
        return model.clip_grad_norm_(max_norm)  # sums over the shard group
    # FSDP1 inside the given module, or around it
    if _contains(model, FSDP1) or any(each.flattened for each in checks):
        raise ValueError("FSDP1: give clip_grad_norm the model that shard.apply returned")
    groups = by_mesh(p for p in model.parameters() if p.grad is not None)
    norms: list[Tensor] = []
    for parameters in groups:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)  # over all shards
    total = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
    if max_norm != float("inf"):
        for parameters in groups:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _checks_in(model: nn.Module) -> "set[_LoopChecks]":
    """Find the checks of a model, if it is sharded, or of sharded models inside or around it."""
    if hasattr(model, "loop_checks"):
        own: Any = model.loop_checks
        return {own}
    # vars(): hasattr() is slow if a module lacks the name
    of_modules = [vars(module).get("loop_checks") for module in model.modules()]
    # parameters lead to the checks of a sharded model that contains this one
    of_parameters = [_checks_of(p) for p in model.parameters()]
    return {checks for checks in [*of_modules, *of_parameters] if checks}


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by their device mesh: with tensor parallelism there are two meshes.

    PyTorch computes a norm over parameters of one mesh at a time.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return list(groups.values())


# What activation checkpointing, FSDP1 and torch.compile insert into the names of parameters
WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}


def original_name(name: str) -> str:
    """Return the name that a parameter had before its model was wrapped."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    # DDP puts "module." in front; a "module" further along is part of the original name
    return ".".join(parts).removeprefix("module.")


def weight_decay_names(model: nn.Module) -> set[str]:
    """List the original names of the parameters to decay: those with two or more dimensions.

    So biases and norms do not decay; tokens such as `cls_token` (1, 1, D) do. Dimensions are those
    before sharding. ValueError for FSDP1, which flattens parameters: call this before `apply`.
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
    lr_scale: Callable[[str], float] | None = None,
) -> torch.optim.Optimizer:
    """Build a fused AdamW; `decay` has the original names of the parameters with weight decay.

    The result of `lr_scale(original name)` is stored as the group's "lr_scale", by which the
    schedule multiplies the learning rate. ValueError if `decay` has names that the model lacks.

    Under FSDP1 an optimizer of your own must be elementwise, like AdamW, because it is given parts
    of tensors. Under zero1 it must update each tensor independently of the others, because it is
    given whole tensors, but not all of them. Under FSDP2 it must work on DTensors, without .item()
    on a sum.
    """
    all_names = {original_name(n) for n, _ in model.named_parameters(remove_duplicate=False)}
    unknown = sorted(set(decay) - all_names)
    if unknown:
        raise ValueError(f"the model has no parameter {unknown[0]} to decay: use original names")
    groups: dict[Any, dict[str, Any]] = {}
    for wrapped_name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        name = original_name(wrapped_name)
        decay_of_p = weight_decay if name in decay else 0.0
        scale = 1.0 if lr_scale is None else lr_scale(name)
        # the fused AdamW takes parameters of one mesh at a time: tensor parallelism has two meshes
        key = (name in decay, scale, getattr(p, "device_mesh", None))
        empty = {"params": [], "weight_decay": decay_of_p, "lr_scale": scale}
        groups.setdefault(key, empty)["params"].append(p)
    if STRATEGIES[mode].engine == "zero1":
        return ZeroRedundancyOptimizer(
            [*groups.values()],
            torch.optim.AdamW,
            parameters_as_bucket_view=True,  # each rank sends its parameters in one piece
            lr=lr,
            betas=betas,
            eps=eps,
            fused=True,
        )
    return torch.optim.AdamW([*groups.values()], lr=lr, betas=betas, eps=eps, fused=True)


def optimizer_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Take one optimizer step, unless the scalar tensor `skip`, the same on every rank, is 1."""
    inner: Any = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    # Fused AdamW can skip on the device. Fused SGD could, too, but if its first step is skipped, it
    # starts its momentum from uninitialised memory.
    adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    skips_on_device = adam and getattr(inner, "_step_supports_amp_scaling", False)
    if not skips_on_device:
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

    All ranks compute the same scale. DDP averages an overflow into every rank's gradient. Under
    FSDP2, DTensor reduces the overflow flag over the shard group, and replicas hold equal shards.
    FSDP1's scaler reduces the flag over all ranks.
    """
    if dtype != torch.float16:
        return None
    if _contains(model, FSDP1):
        return ShardedGradScaler(device.type)
    return torch.amp.GradScaler(device.type)


# --- Checks of the arguments, and the blocks


def _check_arguments(mode: str, mesh: DeviceMesh, split: bool, options: ShardingOptions) -> None:
    """Raise ValueError for a mode, a mesh or options that would make training go wrong."""
    tp = mesh.shape[2] if split else 1
    group = None
    # mesh_shape refuses a mode that does not exist
    if mode in STRATEGIES and STRATEGIES[mode].shard_over == "group":
        group = mesh.shape[1]
    wanted = mesh_shape(mode, dist.get_world_size() // tp, group)
    if mesh.shape[:2] != wanted:
        raise ValueError(f"mode {mode} needs a mesh whose shape begins with {wanted}, not {mesh}")
    given: dict[str, Any] = {}
    for name, value in vars(options).items():
        if value != getattr(ShardingOptions, name):  # not the default
            given[name] = value
    if tp > 1:
        given["tp"] = tp
    problem = next(invalid_options(mode, given), None)
    if problem:
        raise ValueError(problem)
    if options.cpu_offload and options.fsdp == 1 and mesh.device_type == "cpu":
        raise ValueError("cpu_offload with fsdp 1 needs a GPU to offload from: leave it out")


def _check_model(
    model: nn.Module, blocks: Mapping[str, nn.Module], strategy: Strategy, options: ShardingOptions
) -> None:
    """Raise ValueError for a model whose training would go wrong."""
    sharded = strategy.engine == "fsdp"
    if sharded:
        blocks_are_wrapped = options.ac != "none" or options.fsdp == 1
        _check_lists(model, wrapped=blocks if blocks_are_wrapped else {})
    if sharded and options.fsdp == 1 and hasattr(model, "_orig_mod"):
        raise ValueError("FSDP1 cannot save a compiled model: compile it after shard.apply")
    if "module" in dict(model.named_children()):
        raise ValueError("rename the submodule `module`: DDP needs this name for itself")
    low_precision = sharded and options.param_dtype != torch.float32
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats and low_precision:
            raise ValueError(
                f"{name} keeps running statistics in fp32, which FSDP would update in "
                f"{options.param_dtype}: use param_dtype torch.float32, or GroupNorm"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.max_norm is not None:
                raise ValueError(
                    f"{name} has max_norm, which changes weights in forward(), differently on each "
                    "rank: renormalise them between steps"
                )
            if module.sparse and sharded:
                raise ValueError(
                    f"{name} has sparse gradients, which FSDP does not support: use sparse=False"
                )
    for name, p in model.named_parameters():
        if _checks_of(p):
            raise ValueError(f"{original_name(name)} is sharded already: call shard.apply once")
        reason = _reason_not_to_shard(p, sharded)
        if reason:
            raise ValueError(f"{original_name(name)} {reason}")
    if strategy.engine != "ddp":
        _check_memory(model)


def _check_lists(model: nn.Module, wrapped: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for a plain list, tuple or dict that holds parameters or wrapped blocks.

    FSDP replaces them in the modules, but does not see such a container.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            # two belong to nn.Module; an nn.LSTM keeps the third up to date by itself
            if name in ("_parameters", "_modules", "_flat_weights"):
                continue
            items: Iterable[Any] = ()
            if isinstance(value, dict):
                items = value.values()
            elif isinstance(value, list | tuple):
                items = value
            for item in items:
                if isinstance(item, nn.Parameter) or any(item is b for b in wrapped.values()):
                    where = f"{path}.{name}".lstrip(".")
                    raise ValueError(
                        f"{where} is a {type(value).__name__} of parameters or blocks, in which "
                        "sharding cannot replace them: use nn.ParameterList or nn.ModuleList, or "
                        "make each an attribute of its own"
                    )


class _MemoryRange(NamedTuple):
    """The memory of a tensor; ranges are sorted by their first byte."""

    first: int
    end: int  # the byte after the last
    name: str


def _check_memory(model: nn.Module) -> None:
    """Raise ValueError for a parameter that shares memory with another, or with a buffer."""
    ranges: list[_MemoryRange] = []
    buffers = dict(model.named_buffers())
    for name, tensor in [*model.named_parameters(), *buffers.items()]:
        dense = tensor.layout == torch.strided and tensor.is_contiguous()
        if dense and tensor.numel() and not _on_meta(tensor):
            first = tensor.data_ptr()
            end = first + tensor.numel() * tensor.element_size()
            ranges.append(_MemoryRange(first, end, name))
    last = _MemoryRange(0, 0, "")  # the range so far that ends last
    for each in sorted(ranges):
        # two buffers may share memory: buffers are not sharded
        both_buffers = each.name in buffers and last.name in buffers
        if each.first < last.end and not both_buffers:
            raise ValueError(
                f"{last.name} and {each.name} share memory, which sharding would divide: use "
                "one nn.Parameter for both, or clone()"
            )
        if each.end > last.end:
            last = each


def _reason_not_to_shard(p: nn.Parameter, sharded: bool) -> str:
    """Return why `apply` refuses a parameter, as a sentence without its subject, or ""."""
    if isinstance(p, nn.parameter.UninitializedParameter):
        return "has no shape yet: call the model once before shard.apply"
    if p.is_complex():
        return f"is {p.dtype}: store its real and imaginary parts, as torch.view_as_real does"
    if not p.is_floating_point():
        return f"is {p.dtype}, which is not trained: make it a buffer"
    if p.dtype != torch.float32:
        return f"is {p.dtype}, but parameters are stored in fp32: call model.float() first"
    if sharded and p.ndim == 0:
        return "has no dimension to shard: give it the shape (1,)"
    if sharded and p.numel() == 0:
        return f"{tuple(p.shape)} is empty and cannot be sharded: make it a buffer"
    if _has_hook(p, post_accumulate=True):
        return "has a hook, which would be lost: register it after shard.apply"
    return ""


def _check_units(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for a tied parameter in two units, which FSDP would untie."""
    inside: set[nn.Module] = set()
    pairs: list[tuple[str, nn.Parameter]] = []
    for name, unit in units.items():
        inside |= set(unit.modules())
        pairs += [(name, p) for p in unit.parameters()]
    for module in model.modules():
        if module not in inside:
            pairs += [("the root", p) for p in module.parameters(recurse=False)]
    unit_of: dict[nn.Parameter, str] = {}
    for name, p in pairs:
        first = unit_of.setdefault(p, name)
        if first != name:
            where = f"a parameter of shape {tuple(p.shape)} is in two units, {first} and {name}"
            raise ValueError(f"{where}: use other block_classes, wrap root, or mode ddp")


def find_blocks(model: nn.Module, classes: Collection[type[nn.Module]]) -> dict[str, nn.Module]:
    """Return {name: module} of the outermost modules of these classes; ValueError if none match."""
    if isinstance(classes, type | str) or not all(isinstance(c, type) for c in classes):
        raise ValueError(f"block_classes must be a set of classes like {{Block}}, not {classes!r}")
    wanted = tuple(classes)
    blocks = {}
    for name, module in model.named_modules():
        if isinstance(module, wanted) and module is not model:
            blocks[name] = module
    if wanted and not blocks:
        listed = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"block_classes match no module: use set(), or some of {listed}")
    inner: set[nn.Module] = set()
    for name, block in blocks.items():
        if type(block).forward is nn.Module.forward:
            kind = type(block).__name__
            raise ValueError(
                f"{name} is a {kind}, which has no forward(): give the class of its items instead"
            )
        inner |= set(block.modules()) - {block}
    return {name: block for name, block in blocks.items() if block not in inner}


# --- Initial values


class _InitialValues:
    """Gives a model its values, the same on every rank, while it is being sharded."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        init_fn: InitFunction | None,
        uninitialized: bool,
    ) -> None:
        named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        self.name_of = {tensor: name for name, tensor in named}  # before anything is wrapped
        self.in_checkpoint: set[Tensor] = set()  # what has a value in a checkpoint, by any name
        if uninitialized:
            names = set(model.state_dict())
            parameters = model.named_parameters(remove_duplicate=False)
            buffers = model.named_buffers(remove_duplicate=False)
            for name, tensor in [*parameters, *buffers]:
                if name in names:
                    self.in_checkpoint.add(tensor)
        self.device = device
        self.init_fn = init_fn
        self.uninitialized = uninitialized
        on_meta = any(_on_meta(tensor) for tensor in self.name_of)
        expects_meta = uninitialized or init_fn is not None
        if on_meta != expects_meta:
            raise ValueError(
                "a model on meta, and only such a model, needs `init_fn` or `uninitialized`"
            )

    @torch.no_grad()
    def broadcast_from_rank0(self, must_agree: str) -> None:
        """Broadcast rank 0's values of all tensors that are not on meta. Collective.

        RuntimeError if the model or the text `must_agree` differs between ranks.
        """
        described = []
        for tensor, name in self.name_of.items():
            kind = (tensor.shape, tensor.dtype, tensor.requires_grad, _on_meta(tensor))
            described.append((name, kind))
        if not _same_on_all_ranks(f"{must_agree} {described}", self.device):
            raise RuntimeError("the ranks were given different models, modes or options")
        for tensor in self.name_of:
            if tensor.numel() and not _on_meta(tensor):
                value = tensor.to(self.device).contiguous()
                dist.broadcast(value.view(-1).view(torch.uint8), 0)  # as bytes: any dtype
                tensor.data = value.to(tensor.device)

    @torch.no_grad()
    def fill(self, unit: nn.Module) -> None:
        """Allocate and fill the meta tensors of a module and its submodules."""
        made: dict[Tensor, Tensor] = {}  # tied parameters stay tied
        for module in unit.modules():
            for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or not _on_meta(tensor):
                    continue
                if tensor not in made:
                    new = torch.empty_like(tensor, device=self.device)
                    # a checkpoint that is loaded next lacks non-persistent buffers, and what the
                    # model's state_dict() leaves out, such as frozen parts
                    if not self.uninitialized or tensor not in self.in_checkpoint:
                        new.copy_(self.value(tensor))
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    made[tensor] = new
                setattr(module, leaf, made[tensor])

    def value(self, tensor: Tensor) -> Tensor:
        """Return the full value of a tensor on meta; ValueError without an `init_fn`."""
        name = self.name_of[tensor]
        if self.init_fn is None:
            raise ValueError(
                f"{name} is in no checkpoint: give `init_fn` too, or build it on the CPU"
            )
        return self.init_fn(name, tensor.shape, device=self.device)


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # not is_meta, which is true for fake tensors too


def _same_on_all_ranks(text: str, device: torch.device | None, group: Any = None) -> bool:
    """Tell whether all ranks, or those of a group, have the same text. Collective."""
    crc = zlib.crc32(text.encode())
    extremes = torch.tensor([crc, -crc], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)  # the largest, and minus the smallest
    return extremes.sum().item() == 0


# --- Checks of a running loop: RuntimeError for mistakes that would go unnoticed under sharding
#
# 1. Before each call and each step, every parameter is checked: it must not have been replaced, or
#    changed in a way that the engine ignores; it must not have a hook that is never called; and,
#    under DDP, it must not have been unfrozen after sharding, or frozen (unless parameters may be
#    unused). FSDP1 with cpu_offload: no gradients may be left that a backward pass would overwrite.
# 2. After a forward pass: the module must not have changed its own tensors (first three passes),
#    nor returned an object in which FSDP2 finds no tensor.
# 3. DDP and FSDP1, when a tensor gets a gradient: the model must have been called since its
#    previous gradient.
# 4. Before each step: the optimizer must have the parameters of the sharded model. In the first
#    three steps, in every thousandth, and after a backward pass that averaged nothing: replicas
#    must be equal and, under FSDP2, all ranks must have used the same parameters (unless parameters
#    may be unused). If an optimizer's parameters are in no sharded model, their gradients must be
#    the same on all ranks (first three steps).
# Values are compared only rarely, because reading them makes the CPU wait for the GPU.
# In a simulation of FSDP (backend "fake") tensors have no values: there is no _LoopChecks. The
# other checks are left: of what a forward pass changes, and that the optimizer has the parameters
# of the sharded model.
#
# Attributes that the checks set on PyTorch objects:
#   loop_checks           on a sharded model: its _LoopChecks
#   replaced_by_sharding  on a parameter in whose place `apply` has put another
#   gathered_by_fsdp      on a gathered parameter that FSDP2 left in a module after a forward pass
#   checked_by_another    on an optimizer inside another one, or in a trial
#   calls_at_last_step, steps_compared
#                         on an optimizer of parameters that are in no sharded model
#   passed_trial          on an optimizer that `_check_whole_tensors` has let pass
#   elementwise           set by a user on an optimizer that does not need whole tensors
#   per_rank              set by a user on an optimizer whose parameters may differ between ranks,
#                         or that only one rank has
#   zero_grad, reset_iter_state, __deepcopy__
#                         on a model of FSDP, in place of PyTorch's own

FIRST_STEPS = 3  # values are compared in this many steps, or passes, ...
LATER_STEPS = 1000  # ... and in every step whose number is a multiple of this

REPLACED = (
    "was replaced after shard.apply, and each rank would train its own copy: replace it before "
    "shard.apply, or write into it with copy_() or load_state_dict(assign=False); do not use "
    "functional_call"
)
NOT_PUT_BACK = (
    "was not put back by FSDP1 after torch.autograd.grad: call backward() instead, or use fsdp 2"
)
EDITED_IN_VAIN = (
    "was changed after a forward pass that still awaits its backward(), and FSDP would lose the "
    "change: evaluate in torch.no_grad()"
)
OTHER_MEMORY = (
    "has new memory or a new dtype, which FSDP may miss: write into it with copy_() or mul_(), and "
    "do not assign to .data"
)
LOST_HOOK = (
    "has a hook that FSDP does not call: change its .grad between backward() and the step, or use "
    "register_post_accumulate_grad_hook with FSDP2"
)
LOST_AVERAGE = (
    "was converted to another dtype and back, and DDP no longer averages its gradient: use "
    "shard.autocast for lower precision"
)
OTHER_DTYPE = "is no longer fp32, which DDP needs: use shard.autocast for lower precision"
UNFROZEN = (
    "was unfrozen after shard.apply, and DDP does not average its gradient: freeze it only after "
    "shard.apply, with find_unused_parameters=True, or use mode no_shard"
)
FROZEN = (
    "was frozen after shard.apply, and DDP waits for its gradient: use find_unused_parameters=True"
)


class _HeldParameter(NamedTuple):
    """A parameter, and the module that holds it."""

    name: str  # the original one
    module: nn.Module
    leaf: str  # the name within that module
    parameter: Any


# (is_broken, sentence): is_broken(name, p, now) tells whether the parameter `p` breaks the rule,
# where `now` is what the module holds in its place; the error is then "NAME SENTENCE".
Rule = tuple[Callable[[str, Any, Any], bool], str]


class _LoopChecks:
    """Checks what a loop does with a sharded model, through hooks that raise RuntimeError."""

    calls_of_all: ClassVar[int] = 0  # forward passes, of any model, that every rank makes

    def __init__(
        self, model: Any, units: list[Any], mesh: DeviceMesh, *, unused_allowed: bool
    ) -> None:
        self.model = model
        self.units = units  # of FSDP, the root last; empty for DDP
        self.fsdp = bool(units)
        self.fsdp1 = isinstance(model, FSDP1)
        self.fsdp2 = isinstance(model, FSDPModule)
        self.offloaded_by_fsdp1 = self.fsdp1 and model.cpu_offload.offload_params
        self.sharded = mesh["shard"].size() > 1
        self.flattened = self.fsdp1 and self.sharded  # a rank has parts of tensors
        # If FSDP1 casts or moves parameters, each call computes with new tensors. FSDP1 registers
        # its hook only on the tensors of the first call, so gradients of a second call would be
        # lost.
        self.needs_backward_after_call = self.offloaded_by_fsdp1 or (
            self.fsdp1 and model.mixed_precision.param_dtype != torch.float32
        )
        self.device = _device(mesh)
        self.replicas = mesh.get_group("replicate")  # ranks that hold the same values
        self.unused_allowed = unused_allowed
        self.held = _held_parameters(model)
        self.trained = {held.parameter for held in self.held if held.parameter.requires_grad}
        self.trains = False  # whether the call or step being checked trains any parameter
        self.first_memory: dict[str, int] = {}  # FSDP: name -> memory at the first check
        self.nodes: dict[Any, Any] = {}  # DDP: parameter -> autograd node that carries DDP's hook
        self.checked_tensor: dict[str, Tensor] = {}  # DDP: name -> tensor whose node was checked
        # name -> (tensor that the module held after the last forward pass, its version then);
        # `_version` is PyTorch's count of in-place changes
        self.after_forward: dict[str, tuple[Any, int]] = {}
        self.calls = 0  # forward passes of the model with gradients enabled
        self.last_call: dict[Tensor, int] = {}  # tensor -> the call its last gradient came from
        self.averaged = True  # whether the last gradients were averaged over ranks
        # For FSDP1 with cpu_offload:
        self.optimized: set[nn.Parameter] = set()  # of every optimizer that has taken a step
        self.applied: set[nn.Parameter] = set()  # whose last averaged gradient has been applied

        self.usage_checksum = 0  # tells which parameters had a gradient after each micro-batch
        self.steps = 0
        self.wrappers: list[tuple[Any, set[str]]] = []  # with the names of their own attributes
        # Parameters that FSDP has replaced, as long as something else still holds them. None had a
        # gradient when it was replaced: if one has a gradient now, the model has computed with it.
        self.replaced: WeakSet[nn.Parameter] = WeakSet()

    def register(self) -> None:
        """Put the methods below on the model, as hooks or in place of its own methods."""
        model = self.model
        for held in self.held:
            CHECKS_BY_ID[id(held.parameter)] = self
        model.loop_checks = self
        model.register_load_state_dict_pre_hook(_refuse_assign)
        if isinstance(model, DDP):
            model.register_load_state_dict_pre_hook(_refuse_other_names)
        # this hook must run before FSDP's own
        model.register_forward_pre_hook(torch.compiler.disable(self.before_call), prepend=True)
        if self.fsdp:
            model.__deepcopy__ = _refuse_copy  # copy.deepcopy looks for it on the object
            model.register_forward_hook(torch.compiler.disable(self.after_call))
            model.zero_grad = self.zero_grad
        if hasattr(model, "reset_iter_state"):  # FSDP2 in torch 2.14
            model.reset_iter_state = self.reset_iter_state
        if isinstance(model, DDP):
            self.nodes = {p: get_gradient_edge(p).node for p in self.trained}
        for tensor in _tensors_averaged_in_hooks(model, self.units):
            tensor.register_post_accumulate_grad_hook(_hold_weakly(self.after_gradient))
        for module in model.modules():
            if isinstance(module, DDP | FSDP1 | CheckpointWrapper):
                self.wrappers.append((module, set(vars(module))))

    def __deepcopy__(self, memo: Any) -> "_LoopChecks":
        """Return the same checks: a DDP model is copied for averaging (EMA), not for training."""
        return self

    def before_call(self, module: nn.Module, args: Any) -> None:
        """Check the parameters before a forward pass."""
        if self.fsdp and torch.is_inference_mode_enabled():
            raise RuntimeError(
                "FSDP could not train after a call in inference_mode: use torch.no_grad() instead"
            )
        # An outer pass is rightly unfinished in two cases: in a backward pass that recomputes
        # activations, and in a method, such as generate(), that calls the model.
        if not _in_backward() and not self.in_pass():
            self.check_interrupted()
            if self.offloaded_by_fsdp1:
                self.check_applied()
        if self.needs_backward_after_call:
            self.check_backward()
        self.note_trains()
        self.check_parameters()
        self.check_attributes()
        # Count calls that all ranks must make, to gather parameters or average gradients. Any other
        # call may be one rank's own.
        if self.sharded or self.trains:
            _LoopChecks.calls_of_all += 1
        if torch.is_grad_enabled():
            self.calls += 1
            self.update_usage()

    def in_pass(self) -> bool:
        """Tell whether an outer pass of an FSDP2 model is unfinished when `before_call` runs."""
        return self.fsdp2 and PASSES.get(self.model, 0) > 0

    def after_call(self, module: nn.Module, args: Any, output: Any) -> None:
        """Remember what the module holds; until a backward pass, FSDP would lose changes to it."""
        if self.fsdp2 and len(self.units) == 1:  # with blocks, FSDP2 sees the blocks' outputs
            self.check_output(output)
        self.after_forward = {}
        for name, module_of_p, leaf, p in self.held:
            now = _tensor_in_module(module_of_p, leaf)
            # FSDP2 still has gathered parameters in the module. FSDP1 may have its shards there,
            # but until the backward pass it computes with what it gathered, and misses a change.
            gathered = now is not p
            if (gathered or self.fsdp1) and isinstance(now, Tensor):
                self.after_forward[name] = (now, now._version)
            if gathered and isinstance(now, nn.Parameter):
                now.gathered_by_fsdp = True  # type: ignore[attr-defined]

    def check_output(self, output: Any) -> None:
        """Raise RuntimeError for an object that may hide the model's outputs from FSDP2.

        A backward pass would leave the parameters without gradients.
        """
        if self.trains and _may_need_backward(output) and not _tensors_for_fsdp2(output):
            raise RuntimeError(
                f"the model returned {type(output).__name__}, in which FSDP2 finds no tensor: "
                "return a tensor, or a tuple, list or dict of tensors"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of FSDP's parameters, in place of nn.Module.zero_grad().

        Between a forward pass and its backward pass, nn.Module's method would see gathered tensors
        instead of the parameters, and leave the previous step's gradients.
        """
        for held in self.held:
            if set_to_none:
                held.parameter.grad = None
            elif held.parameter.grad is not None:
                held.parameter.grad.detach().zero_()

    def reset_iter_state(self) -> None:
        """Reset FSDP2 after an exception, as its own method does, and clear all gradients.

        FSDP2's own method leaves the gradients that it has not averaged yet, and the next backward
        pass would add to them.
        """
        type(self.model).reset_iter_state(self.model)
        PASSES.clear()
        for unit in self.units:
            for group in _fsdp2_param_groups(unit):
                for p in group.fsdp_params:
                    p.unsharded_accumulated_grad = None
                    gathered = getattr(p, "_unsharded_param", None)
                    if gathered is not None:
                        gathered.grad = None
        self.zero_grad()
        self.after_forward = {}

    def after_gradient(self, tensor: Tensor) -> None:
        """Raise RuntimeError if there has been no call since this tensor's previous gradient.

        The new gradient would not be averaged over ranks.
        """
        self.averaged = _averages(self.model)
        self.applied.clear()  # there are new gradients, which no step has applied yet
        if self.averaged and self.last_call.get(tensor, 0) == self.calls:
            raise RuntimeError(
                f"{type(self.model).__name__} averages the gradients of only one backward() per "
                "call: call the model, not its methods or parts, and call backward() once; under "
                "FSDP1 in low precision or with cpu_offload, do not call a block twice either"
            )
        self.last_call[tensor] = self.calls

    def all_averaged(self) -> bool:
        """Tell whether all gradients are averaged over ranks."""
        return self.averaged and not any(_holds_unaveraged_gradients(unit) for unit in self.units)

    def check_averaged(self) -> None:
        """Raise RuntimeError if FSDP2 or DDP has not averaged a gradient of the last pass."""
        if any(_holds_unaveraged_gradients(unit) for unit in self.units):
            raise RuntimeError(
                "FSDP2 has not averaged all gradients over ranks: end a step with accumulation("
                "model, last=True), return tensors from the model, not objects that hide them, and "
                "do not change its outputs in place"
            )
        if not self.fsdp and not self.unused_allowed and self.averaged:
            self.check_all_used()

    def check_all_used(self) -> None:
        """Raise RuntimeError if the last backward pass left out a parameter that DDP averages."""
        newest = max(self.last_call.values(), default=0)
        for p in self.trained:
            if p.requires_grad and self.last_call.get(p, 0) != newest:
                raise RuntimeError(
                    "a trained parameter got no gradient from the last backward pass, and DDP "
                    "waits for it before averaging: use find_unused_parameters=True"
                )

    def check_interrupted(self) -> None:
        """Raise RuntimeError if an exception has ended a forward or backward pass of FSDP."""
        if any(_is_interrupted(unit) for unit in self.units):
            raise RuntimeError(
                "an exception has ended a forward or backward pass, after which FSDP would go on "
                "in a wrong state: load a checkpoint in a new process; or, with FSDP2 in torch "
                "2.14, call model.reset_iter_state() on all ranks, and repeat the whole step"
            )

    def before_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Check the model before an optimizer step, and in some steps compare the ranks.

        `parameters` are those of the optimizer.
        """
        if _in_backward():  # a hook takes the step
            if not self.fsdp:
                raise RuntimeError("DDP has not averaged this gradient: step only after backward()")
            # the code below calls reshard(), but other units still need what they gathered
            return
        PASSES.clear()
        self.check_interrupted()
        self.check_backward()
        self.note_trains()
        self.check_parameters()
        if self.fsdp1:
            self.check_put_back()
        self.check_averaged()
        if any(p.grad is not None for p in self.replaced):
            raise RuntimeError(
                "the model computed with a parameter from before shard.apply, which it keeps in an "
                "object, a function or the like: keep parameters in attributes of modules"
            )
        self.update_usage()
        if self.fsdp2:
            # A call with gradients but without backward() leaves units gathered, as does a method
            # given to register_fsdp_forward_method; the step would make these values stale.
            # reshard() does nothing where a backward pass has resharded.
            for unit in self.units:
                unit.reshard()
        self.after_forward = {}
        # If the last backward pass did not average (no_sync), the loop may have done so itself.
        # Nothing guarantees that, so each such step is compared.
        if self.compares_values() or not self.averaged:
            self.compare_ranks()
        self.steps += 1
        if self.offloaded_by_fsdp1:
            # an optimizer may have parameters of other models too
            own = [p for p in parameters if _checks_of(p) is self]
            self.optimized.update(own)
            self.applied.update(own)
        self.usage_checksum = 0

    def compares_values(self) -> bool:
        """Tell whether values are compared between ranks in the next step."""
        return self.steps < FIRST_STEPS or self.steps % LATER_STEPS == 0

    def note_trains(self) -> None:
        """Note whether the call or step that is being checked trains any parameter."""
        trainable = any(held.parameter.requires_grad for held in self.held)
        self.trains = trainable and torch.is_grad_enabled()

    def check_parameters(self) -> None:
        """Raise RuntimeError for the first parameter that breaks one of the rules below."""
        rules = self.rules_of_fsdp() if self.fsdp else self.rules_of_ddp()
        for name, module, leaf, p in self.held:
            now = _tensor_in_module(module, leaf)
            if now is not p:
                self.check_replaced(name, p, now)
            for is_broken, sentence in rules:
                if is_broken(name, p, now):
                    raise RuntimeError(f"{name} {sentence}")

    def check_replaced(self, name: str, p: Any, now: Any) -> None:
        """Raise RuntimeError unless FSDP put `now` in the place of `p`, or DDP still trains `p`."""
        if name in self.after_forward:
            held_then, _ = self.after_forward[name]
            if now is held_then:
                return
        # under activation checkpointing of the whole model, FSDP1 puts another tensor of its own in
        # the place of the parameter
        if self.fsdp1 and _is_gathered_by_fsdp1(now, self.units):
            return
        # a method given to register_fsdp_forward_method gathers parameters without a call
        if self.fsdp2 and _is_gathered_by_fsdp2(now, self.units):
            return
        # pruning and parametrizations keep the parameter under another name, and DDP averages it
        still_trained = any(p is own for own in self.model.parameters())
        if not self.fsdp and not isinstance(now, nn.Parameter) and still_trained:
            return
        # If an FSDP1 unit gathers nothing, it computes with views of its parameters until backward.
        is_view = self.fsdp1 and _same_memory(now, p)
        raise RuntimeError(f"{name} {NOT_PUT_BACK if is_view else REPLACED}")

    def rules_of_fsdp(self) -> list[Rule]:
        """List the rules that apply now to parameters under FSDP, with a sentence for each."""
        rules: list[Rule] = []
        called_since_step = bool(self.after_forward)  # before_step empties it
        if called_since_step:
            rules.append((self.was_changed_in_vain, EDITED_IN_VAIN))
        # FSDP1 makes `p` itself a view of what it gathered, which always has other memory. FSDP2
        # puts another tensor in the place of `p`.
        may_be_gathered = self.fsdp1 and called_since_step
        if not may_be_gathered:
            rules.append((self.has_other_memory, OTHER_MEMORY))
        rules.append((self.has_lost_hook, LOST_HOOK))
        return rules

    def rules_of_ddp(self) -> list[Rule]:
        """List the rules that apply now to parameters under DDP, with a sentence for each."""
        rules: list[Rule] = [
            (self.has_other_dtype, OTHER_DTYPE),
            (self.has_lost_average, LOST_AVERAGE),
            (self.was_unfrozen, UNFROZEN),
        ]
        if self.trains and not self.unused_allowed:
            rules.append((self.was_frozen, FROZEN))
        return rules

    # Each rule tells whether the parameter `p` breaks it. `now` is what the module holds in its
    # place: `p` itself, or the gathered tensor that the last forward pass left.

    def was_changed_in_vain(self, name: str, p: Any, now: Any) -> bool:
        # A change is lost if it is made to a gathered tensor (`now is not p`), which FSDP throws
        # away, or to a shard of FSDP1 before the backward pass, which does not read the shard.
        if name not in self.after_forward:
            return False
        held_then, version_then = self.after_forward[name]
        changed = now is held_then and held_then._version != version_then
        gathered = now is not p
        return changed and (gathered or self.awaits_backward())

    def has_other_memory(self, name: str, p: Any, now: Any) -> bool:
        # FSDP2 goes on using the old memory. FSDP1 copies the new values into that memory. In a
        # loop that swaps in EMA weights, this overwrites the trained weights that the loop keeps
        # there.
        memory = _memory_of(p)
        first = self.first_memory.setdefault(name, memory)
        # an empty shard has no memory to keep
        return memory != first and p.numel() > 0

    def has_lost_hook(self, name: str, p: Any, now: Any) -> bool:
        # FSDP computes the gradients of other tensors, so hooks of `p` are never called, except for
        # post-accumulate hooks under FSDP2.
        return _has_hook(p, post_accumulate=self.fsdp1)

    def has_other_dtype(self, name: str, p: Any, now: Any) -> bool:
        # DDP's buckets keep the dtype of the parameters that it was given.
        return p.dtype != torch.float32

    def has_lost_average(self, name: str, p: Any, now: Any) -> bool:
        # DDP's hook is on the node that adds up the gradients; a change of dtype makes a new node.
        if p not in self.nodes or not p.requires_grad:
            return False
        # The node is looked up only if p has new memory, as it does after any change of dtype.
        if _same_memory(self.checked_tensor.get(name), p):
            return False
        # this keeps the memory alive, so that no other tensor gets its address
        self.checked_tensor[name] = p.detach()
        return get_gradient_edge(p).node is not self.nodes[p]

    def was_unfrozen(self, name: str, p: Any, now: Any) -> bool:
        # DDP averages only the gradients of parameters that required them when it was built.
        return p.requires_grad and p not in self.trained

    def was_frozen(self, name: str, p: Any, now: Any) -> bool:
        # DDP's bucket waits for a gradient that does not come.
        return p in self.trained and not p.requires_grad

    def check_attributes(self) -> None:
        """Raise RuntimeError for an attribute set on a wrapper, not on the module inside."""
        for wrapper, own_attributes in self.wrappers:
            if isinstance(wrapper, CheckpointWrapper):
                inner = wrapper._checkpoint_wrapped_module
            else:
                inner = wrapper.module
            for name in vars(wrapper).keys() - own_attributes:
                value = vars(wrapper)[name]
                if not hasattr(inner, name):
                    own_attributes.add(name)  # FSDP1 adds some in its first call
                    continue
                inside = getattr(inner, name)
                # == of tensors has no single answer
                comparable = type(inside) is type(value) and isinstance(value, int | float | str)
                same = inside is value or (comparable and inside == value)
                if not same and not callable(value):  # a callable is meant for the wrapper
                    raise RuntimeError(
                        f"{name} was set on {type(wrapper).__name__}, and the "
                        f"{type(inner).__name__} inside does not see it: set it on that module, "
                        "which model.modules() lists"
                    )

    def awaits_backward(self) -> bool:
        """Tell whether FSDP1 was called with gradients but its backward pass has not run yet."""
        return self.fsdp1 and any(_fsdp1_awaits_backward(unit) for unit in self.units)

    def check_backward(self) -> None:
        """Raise RuntimeError if FSDP1 still awaits a backward pass."""
        if self.awaits_backward():
            raise RuntimeError(
                "after a call with gradients, FSDP1 needs a backward() before a step and, in low "
                "precision or with cpu_offload, before the next call: evaluate in torch.no_grad(), "
                "pass two batches to the model as one, or use fsdp 2"
            )

    def check_applied(self) -> None:
        """Raise RuntimeError if the next backward pass would overwrite a gradient not yet applied.

        FSDP1 does not add to gradients that it has averaged and moved to the CPU:
        https://docs.pytorch.org/docs/stable/fsdp.html
        """
        # Before the first step any parameter may belong to an optimizer.
        optimized = self.optimized or self.trained
        for p in optimized:
            if p.grad is None:
                # Nothing is left to apply. This is noted before an evaluation too, because FSDP1
                # restores old gradients during it.
                self.applied.add(p)
        not_applied = optimized - self.applied
        if self.averaged and torch.is_grad_enabled() and not_applied:
            raise RuntimeError(
                "FSDP1 with cpu_offload does not accumulate gradients over backward() calls: "
                "take a step or call zero_grad() before the next call, or use fsdp 2"
            )

    def check_put_back(self) -> None:
        """Raise RuntimeError if FSDP1 has not put its parameters back after the backward pass."""
        for name, module, leaf, p in self.held:
            if _tensor_in_module(module, leaf) is not p:
                raise RuntimeError(f"{name} {NOT_PUT_BACK}")

    def update_usage(self) -> None:
        """Record in the checksum which parameters have a gradient; `compare_ranks` compares it.

        It runs before each call and before the step, so it sees what each micro-batch left.
        """
        if self.compares_values():
            has_gradient = [held.parameter.grad is not None for held in self.held]
            self.usage_checksum = zlib.crc32(f"{self.usage_checksum} {has_gradient}".encode())

    def compare_ranks(self) -> None:
        """Raise RuntimeError if the ranks are about to take different steps. Collective."""
        compares_used = self.fsdp2 and not self.unused_allowed
        if compares_used and not _same_on_all_ranks(str(self.usage_checksum), self.device):
            raise RuntimeError(
                "the ranks used different parameters, and FSDP2 mixes up their gradients: "
                "use find_unused_parameters=True, with torch 2.14 or in mode ddp"
            )
        trained_now = [held.parameter for held in self.held if held.parameter.requires_grad]
        gradients = [p.grad for p in trained_now]
        values = _checksums([*trained_now, *gradients])
        if not _same_on_all_ranks(values, self.device, self.replicas):
            raise RuntimeError(
                "the ranks hold different weights or gradients: change both in the same way on "
                "all ranks, compute gradients with backward(), end a step with accumulation(model, "
                "last=True), and give DDP find_unused_parameters=True if a rank leaves some "
                "parameters unused"
            )


# id of a parameter -> the checks of its model, whose `held` keeps the parameter, so that no other
# object gets its id. Not an attribute: Module.to() drops a DTensor's attributes, and a reference
# from a parameter to its model would keep both in memory for ever.
CHECKS_BY_ID: WeakValueDictionary[int, _LoopChecks] = WeakValueDictionary()


def _checks_of(p: Any) -> _LoopChecks | None:
    """Return the checks of the sharded model that a parameter belongs to, if any."""
    return CHECKS_BY_ID.get(id(p))


def _hold_weakly(method: Any) -> Callable[[Tensor], None]:
    """Return a hook that calls a method, but does not keep the method's object in memory."""
    weak = WeakMethod(method)

    def call(tensor: Tensor) -> None:
        bound = weak()
        if bound:
            bound(tensor)

    return call


def _held_parameters(model: nn.Module) -> list[_HeldParameter]:
    """List the parameters of a model, a tied one once for each of its places."""
    found: list[_HeldParameter] = []
    for path, module in model.named_modules():
        for leaf, p in module._parameters.items():
            if p is not None:
                name = original_name(f"{path}.{leaf}".lstrip("."))
                found.append(_HeldParameter(name, module, leaf, p))
    return found


def _tensor_in_module(module: nn.Module, leaf: str) -> Any:
    """Return what a module holds under the name of a parameter; None if it holds nothing."""
    # It looks where getattr() would, in the same order, but is several times faster.
    own = vars(module)
    if leaf in own:
        return own[leaf]
    if leaf in module._parameters:
        return module._parameters[leaf]
    return getattr(module, leaf, None)


def _checksums(tensors: Iterable[Any]) -> str:
    """Sum the bits of each tensor, not its values: exact on any device, and NaN equals NaN."""
    sums = []
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.is_sparse:
                local = local.to_dense()
            sums.append(local.detach().float().view(torch.int32).sum(dtype=torch.int64))
    return str(torch.stack(sums).tolist()) if sums else ""


def _refuse_assign(module: Any, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
    """Raise RuntimeError for load_state_dict(assign=True), which would replace the parameters."""
    if metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            "assign=True would replace the parameters of a sharded model: call load_state_dict "
            "without it"
        )


def _refuse_other_names(module: Any, state: Any, prefix: str, *args: Any) -> None:
    """Raise RuntimeError if DDP would load no weights; with strict=False it would not say so."""
    if state and not any(name.startswith(f"{prefix}module.") for name in state):
        raise RuntimeError(
            "the names of the loaded weights do not begin with `module.`, unlike DDP's: load them "
            "into model.module"
        )


def _refuse_copy(memo: Any) -> None:
    """Raise RuntimeError for copy.deepcopy of a model that FSDP sharded."""
    raise RuntimeError(
        "a model sharded by FSDP cannot be copied, nor given to AveragedModel: build the model "
        "twice, and give each to shard.apply"
    )


def _fingerprint(tensor: Tensor) -> str:
    """Return a string that changes with the tensor's values, even for writes through `.data`.

    `_version`, PyTorch's count of changes, would not. A string, because fake tensors have no
    numbers to return.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integer_of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().view(integer_of_size[tensor.element_size()])
    return f"{bits.sum(dtype=torch.int64)}"


def _refuse_changes_in_forward(
    module: nn.Module,
    list_items: Callable[[], Iterable[tuple[str, Any]]],
    message: str,
    fingerprint: Callable[[Any], Any] = _fingerprint,
) -> None:
    """Register hooks that raise RuntimeError if a forward pass changes what a module holds.

    They compare the `fingerprint` of each item that `list_items()` yields, usually a tensor, before
    and after each of the first three training passes.
    """
    before: dict[str, Any] = {}
    passes_left = FIRST_STEPS

    def list_fingerprints() -> Iterator[tuple[str, Any, Any]]:
        for name, item in list_items():
            # A DTensor belongs to another unit, and is not gathered now.
            if not isinstance(item, DTensor):
                yield name, getattr(item, "shape", None), fingerprint(item)

    def remember(module: nn.Module, args: Any) -> None:
        before.clear()
        if torch.is_grad_enabled() and module.training:
            for name, shape, found in list_fingerprints():
                before[name] = shape, found

    def compare(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal passes_left
        if not before:
            return
        for name, shape, found in list_fingerprints():
            if name not in before:
                continue
            shape_before, found_before = before[name]
            # the shape may change: a table may be built when it is first needed
            if shape == shape_before and found != found_before:
                raise RuntimeError(message.format(name=original_name(name)))
        passes_left -= 1
        if passes_left == 0:
            for hook in hooks:
                hook.remove()

    # the hooks run after FSDP has gathered the tensors, and before it frees them
    hooks = [
        module.register_forward_pre_hook(torch.compiler.disable(remember)),
        module.register_forward_hook(torch.compiler.disable(compare), prepend=True),
    ]


CHANGED_PARAMETER = (
    "{name} was changed in forward(), and FSDP would lose the change: change parameters between "
    "steps, in torch.no_grad()"
)
CHANGED_STATE = (
    "{name} was changed in forward(), and activation checkpointing would change it a second time: "
    "use ac none, or torch.rand() for random numbers"
)
CHANGED_BUFFER = (
    "the buffer {name} was changed in forward(), and activation checkpointing would change it a "
    "second time: use ac none, or other block_classes"
)


def _numbers_and_random_states(block: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of what a block may change besides tensors: numbers, random states."""
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int | float):
                yield f"{path}.{name}".lstrip("."), value
            if isinstance(value, torch.Generator):
                yield f"{path}.{name}".lstrip("."), value.get_state().numpy().tobytes()
    yield "the state of Python's random", random.getstate()


def _refuse_writes_to_arguments(unit: nn.Module, module: nn.Module) -> None:
    """Register hooks that raise RuntimeError if a module writes into FSDP's copy of an argument.

    The caller calls `unit`; FSDP may give `module` (in FSDP2 the unit itself) copies of lists,
    dicts, sets and dataclasses. The caller would not see what is written into a copy.
    """
    given: set[int] = set()  # ids of the caller's containers in the newest call
    # For each call that has begun, the innermost last: (copy, its items before the call)
    calls: list[list[tuple[Any, list[Any]]]] = []

    def note_given(unit: nn.Module, args: Any, kwargs: Any) -> None:
        given.clear()
        given.update(id(container) for container in _containers([*args, *kwargs.values()]))

    def remember(module: nn.Module, args: Any, kwargs: Any) -> None:
        containers = _containers([*args, *kwargs.values()])
        copies = [container for container in containers if id(container) not in given]
        calls.append([(copy, _items(copy)) for copy in copies])

    def compare(module: nn.Module, args: Any, output: Any) -> None:
        if not calls:  # an earlier check ended this call before `remember` ran
            return
        returned = {id(container) for container in _containers([output])}
        for container, before in calls.pop():
            if id(container) in returned:  # then the caller gets what was written
                continue
            # what is only removed is not lost: the caller still has it
            if not _is_subsequence(_items(container), before):
                raise RuntimeError(
                    f"{type(module).__name__} wrote into a {type(container).__name__} that it was "
                    "given, but FSDP passes only a copy of it: return the result instead"
                )

    note_given = torch.compiler.disable(note_given)
    unit.register_forward_pre_hook(note_given, with_kwargs=True, prepend=True)
    module.register_forward_pre_hook(torch.compiler.disable(remember), with_kwargs=True)
    # always_call: also if an exception ends the call
    compare = torch.compiler.disable(compare)
    module.register_forward_hook(compare, prepend=True, always_call=True)


def _is_subsequence(items: list[Any], before: list[Any]) -> bool:
    """Tell whether `items` are those of `before`, in the same order, with some left out."""
    rest = iter(before)
    for item in items:
        found = any(item is old for old in rest)  # takes items from `rest` until it finds this one
        if not found:
            return False
    return True


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    """Yield each list, dict, set and dataclass instance among values, and inside them, once."""
    waiting = [*values]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        is_record = is_dataclass(value) and not isinstance(value, type)
        if isinstance(value, dict | list | set) or is_record:
            yield value
        if isinstance(value, dict | list | set | tuple) or is_record:
            waiting += _items(value)


def _items(container: Any) -> list[Any]:
    """List the items of a list, set or tuple, or the values of a dict or dataclass."""
    if is_dataclass(container):
        # None: a field may not be set yet
        return [getattr(container, field.name, None) for field in fields(container)]
    return [*container.values()] if isinstance(container, dict) else [*container]


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError for an optimizer that would train nothing, or let the ranks diverge."""
    if hasattr(optimizer, "checked_by_another"):
        return  # zero1's inner optimizer, which updates this rank's part, or a copy for a trial
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.optim.checked_by_another = True
        _check_buckets(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # vars(): hasattr() is slow if a tensor lacks the name
    if any("replaced_by_sharding" in vars(p) for p in parameters):
        raise RuntimeError(
            "the optimizer was built before shard.apply, which replaced the parameters: build it "
            "afterwards"
        )
    if any("gathered_by_fsdp" in vars(p) for p in parameters):
        raise RuntimeError(
            "the optimizer was built between a forward pass and its backward(), from gathered "
            "parameters: build it before the first call"
        )
    loose = [p for p in parameters if not _checks_of(p)]
    if loose and dist.is_initialized() and dist.get_world_size() > 1:
        _check_loose(optimizer, loose, len(parameters))
    # a dictionary keeps the order, which is the same on all ranks
    found = dict.fromkeys(_checks_of(p) for p in parameters)
    checks_of_models = [checks for checks in found if checks]
    _check_whole_tensors(optimizer, checks_of_models)
    for checks in checks_of_models:
        checks.before_step(parameters)


def _check_loose(optimizer: torch.optim.Optimizer, loose: list[Any], count: int) -> None:
    """Raise RuntimeError if each rank would train its own copy of loose parameters. Collective.

    They are in no model that `apply` returned, so nothing averages their gradients over ranks.
    """
    if len(loose) < count:
        raise RuntimeError(
            f"a parameter of shape {tuple(loose[0].shape)} is in no model that shard.apply "
            "returned, and each rank would train its own copy: put it into the model before "
            "shard.apply"
        )
    if getattr(optimizer, "per_rank", False):
        return
    # If all ranks call a sharded model between an optimizer's steps, the optimizer belongs to that
    # model's loop, on all ranks. Any other optimizer, such as that of a probe on stored features,
    # may be on one rank only, which would wait for the others for ever.
    calls = _LoopChecks.calls_of_all
    # at the first step there is no earlier one, so no call counts
    previous_calls = getattr(optimizer, "calls_at_last_step", calls)
    steps_compared = getattr(optimizer, "steps_compared", 0)
    optimizer.calls_at_last_step = calls  # type: ignore[attr-defined]
    in_a_loop = calls > previous_calls
    if in_a_loop and steps_compared < FIRST_STEPS:
        optimizer.steps_compared = steps_compared + 1  # type: ignore[attr-defined]
        values = _checksums(p.grad for p in loose if not isinstance(p, DTensor))
        if not _same_on_all_ranks(values, loose[0].device):
            raise RuntimeError(
                "an optimizer trains parameters that are in no model that shard.apply returned, "
                "and their gradients differ between ranks: put them into the model before "
                "shard.apply, or, if each rank trains its own, set optimizer.per_rank = True"
            )


def _check_whole_tensors(
    optimizer: torch.optim.Optimizer, checks_of_models: Collection[_LoopChecks]
) -> None:
    """Raise RuntimeError for an optimizer that changes sharded tensors differently from whole ones.

    FSDP1 gives each rank parts of flattened tensors, and ZeRO-1 gives it some of the tensors. FSDP2
    gives it DTensors: operations on these return the same as on whole tensors, but .item() on a sum
    returns only this rank's part.
    """
    zero1 = isinstance(optimizer, ZeroRedundancyOptimizer)
    if zero1 and any(checks.fsdp for checks in checks_of_models):
        raise RuntimeError("FSDP shards the optimizer's states itself: use AdamW, or mode zero1")
    flattened = any(checks.flattened for checks in checks_of_models)
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    name = type(inner).__name__
    known = type(inner) in ELEMENTWISE or getattr(optimizer, "elementwise", False)
    if known or hasattr(optimizer, "passed_trial"):
        return
    has_dtensors = any(checks.fsdp2 and checks.sharded for checks in checks_of_models)
    if has_dtensors and not _steps_equally_on_dtensors(inner):
        raise RuntimeError(
            f"{name} gives different results on FSDP2's sharded tensors and on whole tensors, for "
            "example because it calls .item() on a norm: call .full_tensor() first, or use mode "
            "ddp; if it updates each element independently, set optimizer.elementwise = True"
        )
    if zero1 or flattened:
        _check_parts(inner, flattened)
    optimizer.passed_trial = True  # type: ignore[attr-defined]


def _check_parts(optimizer: torch.optim.Optimizer, flattened: bool) -> None:
    """Raise RuntimeError for an optimizer that needs whole tensors, or that cannot be tried."""
    name = type(optimizer).__name__
    try:
        elementwise = _steps_equally_on_parts(optimizer, flattened)
    except Exception as error:
        raise RuntimeError(
            f"{name} could not be tried on a rank's part, as zero1 and FSDP1 give it "
            f"({type(error).__name__}: {error}): use mode ddp, or set optimizer.elementwise = True "
            "if it updates each element independently of the others"
        ) from error
    if not elementwise:
        raise RuntimeError(
            f"{name} needs whole tensors, and all of them. FSDP1 gives it parts of them, and zero1 "
            "gives it some of them: use mode ddp, or an elementwise optimizer such as AdamW"
        )


# PyTorch's optimizers that update each element independently of the others. Any other optimizer is
# tried on small tensors.
ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}


def _steps_equally_on_parts(optimizer: torch.optim.Optimizer, flattened: bool) -> bool:
    """Find out by trial whether an optimizer changes parts of tensors just as it would whole ones.

    The trial imitates two ranks, with a matrix and a tensor of four elements. Each rank gets a part
    of each, flattened as in FSDP1, or one of the tensors, as with ZeRO-1. It is run with a small
    and a large matrix, because some optimizers treat matrices of fewer than 128 rows like vectors.
    """
    # the small matrix first: the step of some optimizers takes minutes on the large one
    for rows, columns in ((3, 4), (130, 132)):
        if not _steps_equally_on_parts_of(optimizer, flattened, rows, columns):
            return False
    return True


def _steps_equally_on_parts_of(
    optimizer: torch.optim.Optimizer, flattened: bool, rows: int, columns: int
) -> bool:
    """Run the trial of `_steps_equally_on_parts` with a matrix of this size."""
    size = rows * columns
    cut = size // 2 - 1  # inside a row
    matrix = torch.arange(size).view(rows, columns)  # indices of the elements
    other = torch.arange(size, size + 4)  # a vector
    if flattened:
        ranks = [[matrix.flatten()[:cut], other[:1]], [matrix.flatten()[cut:], other[1:]]]
    else:
        other = other.view(2, 2)  # no vector: Muon takes none
        ranks = [[matrix], [other]]
    for group in optimizer.param_groups:
        change = partial(_change_in_trial, optimizer, group, count=size + 4)
        whole = change([matrix, other])
        parts = [change(indices) for indices in ranks]
        in_parts = parts[0] + parts[1]  # each is zero where the other is not
        if not torch.allclose(in_parts, whole, rtol=1e-6, atol=1e-14):
            return False
    return True


def _steps_equally_on_dtensors(optimizer: torch.optim.Optimizer) -> bool:
    """Find out by trial whether an optimizer changes DTensors as it would change whole tensors.

    Collective. True also if a step raises an exception, because then nothing is known.
    """
    rows = max(3, dist.get_world_size())  # so that no rank's part is empty
    wide = torch.arange(4 * rows).view(rows, 4)  # indices of the elements of two matrices
    narrow = torch.arange(4 * rows, 6 * rows).view(rows, 2)
    indices = [wide, narrow]
    for group in optimizer.param_groups:
        sharded = next((p for p in group["params"] if isinstance(p, DTensor)), None)
        if sharded is None:
            continue
        shard_tensor = partial(
            distribute_tensor, device_mesh=sharded.device_mesh, placements=sharded.placements
        )
        change = partial(_change_in_trial, optimizer, group, indices, count=6 * rows)
        try:
            whole = change()
            in_shards = change(shard_tensor=shard_tensor)
        except Exception:
            return True
        # Muon computes in bf16, where the order of summation alone changes the result by 2% on four
        # ranks. An optimizer that takes the norm of one rank's part differs by 27% or more.
        tolerance = 0.1 * whole.abs().max().item()
        if not torch.allclose(in_shards, whole, rtol=0, atol=tolerance):
            return False
    return True


def _change_in_trial(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    indices: list[Tensor],
    *,
    count: int,
    shard_tensor: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return how a copy of an optimizer changes the elements with these indices, in ten steps.

    The copy has one parameter group, with these elements and the settings of `group`. The elements'
    values and gradients follow from the indices; `shard_tensor` turns each tensor into a DTensor.
    Returns the changes in fp64, each at its index, in a vector of length `count`; zero elsewhere.
    """
    device = group["params"][0].device if group["params"] else None
    angles = [index.to(device, torch.float64) for index in indices]
    if shard_tensor:
        angles = [shard_tensor(angle) for angle in angles]
    parameters = [nn.Parameter(angle.cos()) for angle in angles]
    settings = {name: deepcopy(value) for name, value in group.items() if name != "params"}
    if "initial_lr" in settings:  # a schedule's base rate; its first rate may be 0
        settings["lr"] = settings["initial_lr"]
    if "lr" in settings and settings["lr"] == 0:
        settings["lr"] = 0.01
    tried = _copy_for_trial(optimizer, [settings | {"params": parameters}])
    step: Any = type(optimizer).step
    for factor in range(2, 12):
        for p, angle in zip(parameters, angles, strict=True):
            # divided: so that norms of parts differ much from those of whole tensors
            p.grad = (p.detach() + torch.sin(angle * factor) / 2) / (1 + angle)
        step.__wrapped__(tried)  # without the hooks that PyTorch calls around it
    change = torch.zeros(count, dtype=torch.float64)
    for p, angle, index in zip(parameters, angles, indices, strict=True):
        difference = p.detach() - angle.cos()
        if isinstance(difference, DTensor):
            difference = difference.full_tensor()
        change[index] = difference.cpu()
    return change


# A scheduler sets `step` on its optimizer; a copied `step` would step the original optimizer.
NOT_COPIED = {"state", "param_groups", "step"}


def _copy_for_trial(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Any:
    """Return an optimizer of the same kind, without states or hooks, for other parameters."""
    copied: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            setattr(copied, name, _copy_for_trial(value, groups))  # SAM, for example, holds one
        elif name not in NOT_COPIED and not name.startswith("_optimizer_"):  # hooks
            setattr(copied, name, deepcopy(value))
    copied.checked_by_another = True
    own = {"state": defaultdict(dict), "param_groups": groups}
    torch.optim.Optimizer.__setstate__(copied, own)  # makes empty lists of hooks, too
    return copied


def _check_buckets(optimizer: ZeroRedundancyOptimizer) -> None:
    """Raise RuntimeError for a trained parameter that is no longer in a bucket of ZeRO-1.

    The optimizer sends its buckets to the other ranks.
    """
    known = {_memory_of(bucket) for bucket in _buckets_of(optimizer)}
    if not known:  # there are no buckets, or the next step makes new ones
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and _memory_of(p) not in known:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} has new memory, which zero1 does not "
                    "send: write into it with copy_() or mul_(), and do not assign to .data"
                )


def _watch_optimizers(sharded: nn.Module, original: Iterable[nn.Parameter]) -> None:
    """Have every optimizer checked before each step; `original`: the parameters before sharding."""
    # FSDP replaces parameters; `fill` replaces those of a model on meta; DDP replaces none
    replaced = set(original) - set(sharded.parameters())
    # a simulation has no checks, and neither do ddp and zero1 on one rank
    checks: Any = getattr(sharded, "loop_checks", None)
    for p in replaced:
        p.replaced_by_sharding = True  # type: ignore[attr-defined]
        if checks and p.grad is None:
            checks.replaced.add(p)
    _register_step_check()


@cache  # so that it is registered only once
def _register_step_check() -> None:
    register_optimizer_step_pre_hook(torch.compiler.disable(_check_optimizer))


# --- Facts that torch (2.10 to 2.14) exposes only through private names


def _fsdp1_awaits_backward(unit: Any) -> bool:
    """Tell whether a unit of FSDP1 was called with gradients but its backward pass has not run.

    Until that pass runs, the unit keeps what it gathered and, in low precision or with cpu_offload,
    would lose the gradient of another call.
    """
    if unit._handle is None or not unit._handle.flat_param.requires_grad:
        return False
    return hasattr(unit._handle.flat_param, "_post_backward_hook_state")


def _fsdp2_param_groups(unit: Any) -> list[Any]:
    """List the parameter groups of an FSDP2 unit; none if it has no parameters of its own."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.14
        groups = state._fsdp_param_groups
    else:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _is_gathered_by_fsdp2(tensor: Any, units: list[Any]) -> bool:
    """Tell whether FSDP2 itself has put a tensor in the place of a parameter."""
    groups = [group for unit in units for group in _fsdp2_param_groups(unit)]
    parameters = [p for group in groups for p in group.fsdp_params]
    return any(tensor is getattr(p, "_unsharded_param", None) for p in parameters)


def _holds_unaveraged_gradients(unit: Any) -> bool:
    """Tell whether a unit of FSDP2 has gradients that it has not averaged over ranks."""
    if not isinstance(unit, FSDPModule):
        return False
    for group in _fsdp2_param_groups(unit):
        if group._partial_reduce_output is not None:  # reduced over shards, not over replicas
            return True
        for p in group.fsdp_params:
            gathered = getattr(p, "_unsharded_param", None)
            if p.unsharded_accumulated_grad is not None:
                return True
            if gathered is not None and gathered.grad is not None:
                return True
    return False


def _is_interrupted(unit: Any) -> bool:
    """Tell whether an exception has ended a forward or backward pass of a unit."""
    if isinstance(unit, FSDPModule):
        return unit._get_fsdp_state()._training_state.name != "IDLE"
    return unit._handle is not None and unit._handle._training_state.name != "IDLE"


def _gathered_by_fsdp1(unit: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, what the module holds now) for each parameter of a unit of FSDP1."""
    if unit._handle is not None:
        for leaf, module, path in unit._handle.flat_param._param_infos:
            yield f"{path}.{leaf}".lstrip("."), getattr(module, leaf)


def _is_gathered_by_fsdp1(tensor: Any, units: list[Any]) -> bool:
    """Tell whether FSDP1 itself has put a tensor in the place of a parameter."""
    handles = [unit._handle for unit in units if unit._handle is not None]
    return any(tensor is own for handle in handles for own in handle.flat_param._tensors)


def _same_memory(one: Any, other: Tensor) -> bool:
    """Tell whether `one` is a tensor that shares the memory of `other`."""
    return isinstance(one, Tensor) and _memory_of(one) == _memory_of(other)


def _memory_of(tensor: Tensor) -> int:
    """Return a number that no other memory in use has; all views of a tensor share it."""
    return tensor.untyped_storage()._cdata  # DTensors and fake tensors have no data_ptr()


def _tensors_for_fsdp2(output: Any) -> list[Tensor]:
    """List the tensors in a model's output that FSDP2 sees, and whose gradients it waits for."""
    # torch 2.14 uses collect_grad_tensors; 2.10 uses tree_leaves
    seen = getattr(fsdp_utils, "collect_grad_tensors", tree_leaves)(output)
    return [leaf for leaf in seen if isinstance(leaf, Tensor) and leaf.requires_grad]


def _has_hook(p: Any, post_accumulate: bool) -> bool:
    """Tell whether a parameter has a hook on its gradient.

    With `post_accumulate`, hooks from register_post_accumulate_grad_hook count too.
    """
    if post_accumulate and p._post_accumulate_grad_hooks:
        return True
    return bool(p._backward_hooks)


def _tensors_averaged_in_hooks(model: Any, units: list[Any]) -> list[Any]:
    """List the tensors whose gradients DDP or FSDP1 averages in its own hooks, in backward."""
    tensors: list[Any] = []
    if isinstance(model, DDP):
        tensors = [*model.parameters()]
    elif isinstance(model, FSDP1):
        tensors = [unit._handle.flat_param for unit in units if unit._handle is not None]
    return [tensor for tensor in tensors if tensor.requires_grad]


def _averages(model: Any) -> bool:
    """Tell whether DDP or FSDP1 averages gradients now, which it does not do in `no_sync`."""
    if isinstance(model, DDP):
        return model.require_backward_grad_sync
    return model._sync_gradients


def _buckets_of(optimizer: Any) -> list[Tensor]:
    """List the buckets that ZeRO-1 sends from; none without parameters_as_bucket_view."""
    if optimizer._get_is_trainable_mask() != optimizer._is_trainable_mask:
        return []  # the next step makes new buckets
    return [bucket for of_device in optimizer._buckets for bucket in of_device]


def _in_backward() -> bool:
    """Tell whether a hook calls this during a backward pass."""
    return torch._C._current_graph_task_id() != -1
