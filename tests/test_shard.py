"""shard.py: every row of the table on real process groups, every option really on."""

import dataclasses
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import (
    LEARNING_ARGV,
    NANO,
    TILES,
    Result,
    Run,
    full_parameters,
    join,
    on_ranks,
    run_ranks,
)
from small_model import CONFIG, CPU, UNITS, batch, build, forward_backward
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import data
import mesh
import shard
import vit

# --- one process


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_a_single_rank_is_not_wrapped(single, mode):
    """No buckets hold its gradients between steps, and it still computes in bf16 by autocast."""
    model = build(mode, single)
    assert type(model) is vit.ViTMAE
    with shard.autocast(model, CPU, torch.bfloat16):
        loss, pred, _ = model(*batch())
    loss.backward()
    assert pred.dtype == torch.bfloat16
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g.dtype == torch.float32 and g._base is None for g in grads)  # a bucket's are views


def test_fsdp1_gets_its_options(single):
    given = {"prefetch": "backward_post", "forward_prefetch": True, "limit_all_gathers": False}
    on, off = (
        build("full_shard", single, fsdp=1, **more) for more in (given, {"prefetch": "none"})
    )
    assert str(on.backward_prefetch).endswith("BACKWARD_POST") and off.backward_prefetch is None
    assert on.forward_prefetch and not off.forward_prefetch
    assert off.limit_all_gathers and not on.limit_all_gathers


@pytest.mark.parametrize("ac", ["none", "selective", "full"])
def test_checkpointing_recomputes_what_it_says(single, ac):
    """By torch's own counter: full all products but a block's last, selective none of them."""
    plain = vit.ViTConfig(32, 2, 64, 2, 8, decoder_width=32, decoder_depth=1, decoder_heads=2)
    for config in (plain, dataclasses.replace(plain, gated_mlp=True)):
        model = build("full_shard", single, config=config, ac=ac)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(*batch())[0].backward()
        formula = vit.flops_per_image(config, 32)
        # depth and tokens of encoder and decoder, and the MLP's products but the last
        for depth, tokens, mlp in ((2, 5, 64 * (1 + config.gated_mlp)), (1, 17, 128)):
            again = 4 * 32**2 + 32 * mlp + 2 * tokens * 32  # width 32: qkv, proj, MLP, attention
            formula += 2 * depth * tokens * again * (ac == "full")
        assert 2 * formula == pytest.approx(counter.get_total_flops(), rel=0.001)


@pytest.mark.parametrize("row", [("ddp", 2), ("zero1", 2), ("full_shard", 1), ("full_shard", 2)])
def test_the_optimizer_decays_by_name_and_takes_betas_and_eps(single, row):
    with torch.device("meta"):
        decay = shard.weight_decay_names(vit.ViTMAE(CONFIG, 32))
    model = build(row[0], single, fsdp=row[1], ac="full")
    rates = {"lr": 0.1, "weight_decay": 0.05}
    optimizer = shard.build_optimizer(model, row[0], decay, **rates, betas=(0.8, 0.9), eps=1e-6)
    assert all((g["betas"], g["eps"]) == ((0.8, 0.9), 1e-6) for g in optimizer.param_groups)
    names = {p: shard.original_name(n) for n, p in model.named_parameters()}
    decays = {names[p]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert len(decays) == len(names)
    for name, value in decays.items():
        assert value == (0 if name.endswith("bias") or "norm" in name else 0.05), name


@pytest.mark.parametrize(
    ("mode", "make"),
    [
        ("full_shard", partial(torch.optim.AdamW, lr=0.1)),
        ("full_shard", partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        ("zero1", partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, lr=0.1)),
        ("zero1", partial(shard.build_optimizer, decay=(), lr=0.1, weight_decay=0.0)),
    ],
)
def test_any_optimizer_leaves_out_a_step_that_is_to_be_skipped(single, mode, make):
    model = build(mode, single)
    ours = make.func is shard.build_optimizer
    optimizer = make(model, mode) if ours else make(model.parameters())
    before = full_parameters(model)
    model(*batch())[0].backward()
    next(model.parameters()).grad.mul_(float("nan"))
    shard.optimizer_step(optimizer, torch.tensor(1.0))
    assert all(map(torch.equal, before.values(), full_parameters(model).values()))
    # a plain step first: nothing is left of the skip
    for step in optimizer.step, partial(shard.optimizer_step, optimizer, torch.tensor(0.0)):
        optimizer.zero_grad()
        model(*batch())[0].backward()
        step()
        after = full_parameters(model)
        assert all(p.isfinite().all() and not torch.equal(p, before[n]) for n, p in after.items())
        before = after


def test_cpu_offload_of_fsdp2_trains_the_same(single):
    losses = []
    for offload in (False, True):
        model = build("full_shard", single, cpu_offload=offload)
        optimizer = shard.build_optimizer(model, "full_shard", set(), lr=1e-3, weight_decay=0)
        for seed in range(2):
            losses.append(forward_backward(model, seed).item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[:2] == losses[2:]


@pytest.mark.parametrize(("mode", "fsdp"), [("ddp", 2), ("full_shard", 1), ("full_shard", 2)])
def test_mixed_precision_computes_in_bf16_and_keeps_fp32(single, mode, fsdp):
    model = build(mode, single, fsdp=fsdp, dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with shard.autocast(model, CPU, torch.bfloat16):
        loss, _, _ = model(*batch())
    loss.backward()
    assert seen == [torch.bfloat16] * (4 * (UNITS - 1) + 2)
    assert loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 == p.grad.dtype for p in model.parameters())
    positions = {shard.original_name(n): b for n, b in model.named_buffers()}["pos_embed"]
    assert torch.equal(positions, vit.sincos_positions(32, 4))  # not rounded to bf16


# --- two ranks: what is gathered when


def events_of_prefetch() -> list[list[str]]:
    """On every rank: what the profiler sees of a forward and backward pass, in its order."""
    join()
    grid, found = mesh.build_mesh((1, 2), CPU), []
    for given in ({"prefetch": "backward_pre"}, {"prefetch": "none"}, {"forward_prefetch": True}):
        model = build("full_shard", grid, **given)
        for _ in range(2):
            forward_backward(model)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            forward_backward(model)
        seen = sorted((e.time_range.start, e.name) for e in profiler.events())
        found.append([name for _, name in seen])
    dist.destroy_process_group()
    return found


def test_prefetch_is_what_it_says(tmp_path):
    """In backward the gather of a unit comes before or after the gradient of the unit before it."""
    backward_pre, none, forward_prefetch = on_ranks(2, events_of_prefetch, tmp_path)[0]

    def order(names: list[str]) -> list[str]:
        start = names.index("FSDP::pre_backward")
        wanted = r"FSDP::(all_gather|pre_backward|post_backward_reduce) \((blocks\.\d)\)"
        return [f"{m[1]} {m[2]}" for n in names[start:] if (m := re.fullmatch(wanted, n))]

    early, late = order(backward_pre), order(none)
    for i in (1, 0):
        gather, before = f"all_gather blocks.{i}", f"post_backward_reduce blocks.{i + 1}"
        assert early.index(gather) < early.index(before)
        assert late.index(gather) > late.index(before)

    def gathered_ahead(names: list[str]) -> bool:
        gather, before = "FSDP::all_gather (blocks.1)", "FSDP::post_forward (blocks.0)"
        return names.index(gather) < names.index(before)

    assert gathered_ahead(forward_prefetch) and not gathered_ahead(backward_pre)


# --- same training, whatever the sharding


# every engine, shards with and without replicas, accumulation, checkpointing
MODES = {
    2: [
        "--mode ddp --accum 2",
        "--mode zero1 --ac full",
        "--mode shard_grad_op --fsdp 1 --accum 2",
        "--mode full_shard --ac full",
    ],
    4: ["--mode hybrid --group 2 --accum 2"],
}


def plain_training() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return losses, gradient norms and final parameters of what LEARNING_ARGV means.

    In one process, over whole batches, with PyTorch's own AdamW and clipping.
    """
    model = vit.ViTMAE(NANO, 48)
    vit.initialize(model, seed=3)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)
    loader = data.build_loader(
        data.scan(TILES),
        img_size=48,
        patches=vit.patch_count(NANO, 48),
        seed=3,
        global_batch=48,
        micro_batch_size=48,
        steps=range(4),
    )
    peak = 5e-3 * 48 / 256
    rates = [peak / 2, peak, peak, peak / 2]  # warm-up, then half of the cosine
    losses: list[float] = []
    norms: list[float] = []
    for rate, images in zip(rates, loader, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, _, _ = model(data.normalize(images.image), 0.75, images.noise)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_same_training_whatever_the_sharding(tmp_path):
    """Loss and gradient norm within 1e-5 of one process's, parameters within 1e-4, replicas equal.

    In all rows and groups: test_verify.py.
    """
    losses, norms, expected = plain_training()
    results: list[Result] = []
    for world, modes in MODES.items():
        runs = [Run([*LEARNING_ARGV, *flags.split()]) for flags in modes]
        results += run_ranks(world, runs, tmp_path / str(world))
    assert len(results) == 5
    for result in results:
        assert [step["loss"] for step in result.steps] == pytest.approx(losses, rel=1e-5)
        assert [step["grad_norm"] for step in result.steps] == pytest.approx(norms, rel=1e-5)
        assert result.params.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(result.params[name], value, rtol=0, atol=1e-4)
        assert result.replicas_differ == 0
