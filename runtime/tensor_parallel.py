"""Split each block over the ranks of a tensor-parallel group, as in Megatron-LM (arXiv 1909.08053).

Each of n ranks computes 1/n of the attention's heads and 1/n of the features inside the MLP, for
the same images, and holds only the rows or columns of the matrices that belong to them:

    x -> qkv, fc1 (split by rows) -> heads, GELU -> proj, fc2 (split by columns) -> all-reduce -> x

A block has two all-reduces of the activations (B, T, D) in forward and two in backward. Every rank
of the group computes the norms and what is outside the blocks.

`split_block` edits a block of vit.py before FSDP2 shards it; `finish_split` needs an optimizer.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel

import vit

# Layers of a block by how their weights (out, in) are split. PyTorch names the styles after the
# matrix of the formula x W, which is the transposed weight.
SPLIT_BY_ROWS = ("attn.qkv", "mlp.fc1", "mlp.fc1_g", "mlp.fc1_x")
SPLIT_BY_COLUMNS = ("attn.proj", "mlp.fc2")


def split_shape(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """Return the shape of a rank's part of the parameter `name` of the model."""
    layer, _, _ = name.rpartition(".")
    if layer.endswith(SPLIT_BY_ROWS):
        return (shape[0] // tp, *shape[1:])
    if layer.endswith(SPLIT_BY_COLUMNS) and len(shape) > 1:  # every rank has the whole bias
        return (shape[0], shape[1] // tp)
    return shape


def split_block(block: vit.Block, grid: DeviceMesh) -> None:
    """Split a block that has its values; in state dicts qkv has its usual order. Collective."""
    qkv = block.attn.qkv
    tp = grid["tp"].size()
    for p in qkv.parameters():
        p.data = _heads_by_rank(p.data, tp)
    block.attn.heads //= tp
    split: dict[str, Any] = dict.fromkeys(SPLIT_BY_ROWS, parallel.ColwiseParallel())
    split |= dict.fromkeys(SPLIT_BY_COLUMNS, parallel.RowwiseParallel())
    # once for both layers of a gated MLP: one all-reduce of the gradient instead of two
    same = Replicate()
    split["mlp"] = parallel.PrepareModuleInput(input_layouts=same, desired_input_layouts=same)
    plan = {name: split[name] for name, _ in block.named_modules() if name in split}
    # None: each rank has the whole value and keeps its part, without communication
    parallel.parallelize_module(block, grid["tp"], plan, src_data_rank=None)
    qkv.register_state_dict_post_hook(_save_qkv)
    qkv.register_load_state_dict_pre_hook(_load_qkv)


def finish_split(model: nn.Module, optimizer: torch.optim.Optimizer, grid: DeviceMesh) -> None:
    """Share the inputs of a sharded model with split blocks; order the states of its optimizer.

    All ranks of a tensor-parallel group compute with the inputs of its first rank. Otherwise a rank
    whose disk fails would take other images, and no collective averages the gradients of norms and
    embeddings over the group. qkv has its usual order of rows in the optimizer's state dicts, too.
    """
    group = grid["tp"].get_group()

    def broadcast(_: nn.Module, inputs: Any) -> None:
        for tensor in inputs:
            if isinstance(tensor, Tensor):
                dist.broadcast(tensor, group=group, group_src=0)

    model.register_forward_pre_hook(broadcast)
    # DTensor warns each time it uses two collectives where one would do; here they are tiny, or
    # only in a save.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    split: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, vit.Attention):
            split.update(module.qkv.parameters())

    def convert_states(state_dict: dict[str, Any], convert: Any) -> dict[str, Any]:
        states = dict(state_dict["state"])
        for group, named in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            for p, key in zip(group["params"], named["params"], strict=True):
                if p in split and key in states:
                    states[key] = dict(states[key])
                    for name, value in states[key].items():
                        if value.shape == p.shape:  # not the step count
                            states[key][name] = convert(value, p)
        return state_dict | {"state": states}

    optimizer.register_state_dict_post_hook(lambda _, state: convert_states(state, _usual_order))
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: convert_states(state, _split_order)
    )


# The rows of qkv: in the usual order they are q, k, v, each head by head. A rank's part must hold
# q, k and v of its heads, and DTensor shards a tensor into contiguous parts. So the order of the
# rows is a different one while they are split.


def _heads_by_rank(whole: Tensor, tp: int) -> Tensor:
    """Reorder the rows (3 D, ...) from (q, k, v) x ranks to ranks x (q, k, v)."""
    return whole.unflatten(0, (3, tp, -1)).transpose(0, 1).flatten(0, 2)


@torch.no_grad()
def _usual_order(t: DTensor, _: Any = None) -> DTensor:
    """Return a tensor of qkv with its rows in the usual order, sharded again. Collective."""
    tp = t.device_mesh["tp"]
    sharded = t.device_mesh["shard"]
    # gather one mesh dimension after the other: a shard group holds the part of one tp rank
    shape = torch.Size([t.shape[0] // tp.size(), *t.shape[1:]])
    local = DTensor.from_local(t.to_local(), sharded, [Shard(0)], shape=shape, stride=t.stride())
    part = local.full_tensor()
    whole = DTensor.from_local(part, tp, [Shard(0)]).full_tensor()
    rows = whole.unflatten(0, (tp.size(), 3, -1)).transpose(0, 1).flatten(0, 2)
    placements = [p if p.is_replicate() else Shard(0) for p in t.placements]
    return distribute_tensor(rows, t.device_mesh, placements, src_data_rank=None)


@torch.no_grad()
def _split_order(t: DTensor, p: Any) -> DTensor:
    """Undo `_usual_order`, for the parameter `p` or a state of it. Collective."""
    sharded = p.device_mesh["shard"]
    tp = p.device_mesh["tp"]
    rows = _heads_by_rank(t.full_tensor(), tp.size())
    part = rows.chunk(tp.size())[tp.get_local_rank()]
    local = distribute_tensor(part, sharded, [Shard(0)], src_data_rank=None).to_local()
    return DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def _save_qkv(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for leaf, _p in layer.named_parameters():
        state[prefix + leaf] = _usual_order(state[prefix + leaf])


def _load_qkv(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for leaf, p in layer.named_parameters():
        if prefix + leaf in state:
            state[prefix + leaf] = _split_order(state[prefix + leaf], p)
