"""shard.py: every row of the table on real process groups, every option really on."""

import collections
import dataclasses
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from parity import ARGV, Case, compare, modes
from ranks import Run, join, on_ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import mesh
import shard
import vit

CONFIG = vit.ViTConfig(32, 3, 64, 2, 8, decoder_width=32, decoder_depth=2, decoder_heads=2)
UNITS = 3 + 2 + 1  # encoder blocks, decoder blocks, root
SMALL_DECODER = dataclasses.replace(CONFIG, decoder_width=16)  # its blocks: one unit of wrap auto
CPU = torch.device("cpu")
FSDP_MODES = ["no_shard", "shard_grad_op", "full_shard", "hybrid", "hybrid_grad_op"]
ROWS = [("ddp", 2), ("zero1", 2)] + [(mode, fsdp) for fsdp in (1, 2) for mode in FSDP_MODES]


# --- the table


def test_mesh_shapes():
    for mode in ("ddp", "zero1", "no_shard"):
        assert shard.mesh_shape(mode, 8) == (8, 1)
    for mode in ("shard_grad_op", "full_shard"):
        assert shard.mesh_shape(mode, 8) == (1, 8)
    for mode in ("hybrid", "hybrid_grad_op"):
        assert [shard.mesh_shape(mode, 8, g) for g in (1, 2, 8)] == [(8, 1), (4, 2), (1, 8)]


def test_mesh_shape_refuses_what_has_no_meaning():
    with pytest.raises(ValueError, match="there is no mode zero3: use one of ddp, zero1, no_shard"):
        shard.mesh_shape("zero3", 8)
    with pytest.raises(ValueError, match="group is for mode hybrid and hybrid_grad_op, not full"):
        shard.mesh_shape("full_shard", 8, 2)
    with pytest.raises(ValueError, match="mode hybrid needs `group`, how many ranks share a copy"):
        shard.mesh_shape("hybrid", 8)


def test_small_blocks_of_one_stack_make_a_unit():
    def sizes(encoder: list[int], decoder: list[int]) -> list[list[int]]:
        names = [f"blocks.{i}" for i in range(len(encoder))]
        names += [f"decoder_blocks.{i}" for i in range(len(decoder))]
        numels = encoder + decoder
        return [[numels[i] for i in unit] for unit in shard.unit_ranges(names, numels)]

    assert sizes([9, 9], [4, 4, 4, 4, 4]) == [[9], [9], [4, 4], [4, 4], [4]]
    assert sizes([9, 9], [5, 5]) == [[9], [9], [5], [5]]  # two would be larger than a block
    assert sizes([2, 2], [8, 8]) == [[2, 2], [8], [8]]  # whichever stack is small
    assert sizes([4, 4, 4], [4, 8]) == [[4, 4], [4], [4], [8]]  # never across stacks
    assert sizes([], []) == []


@pytest.mark.parametrize(
    ("wrap", "units"),
    [
        ("block", [[f"blocks.{i}"] for i in range(3)] + [[f"decoder_blocks.{i}"] for i in (0, 1)]),
        ("auto", [*([f"blocks.{i}"] for i in range(3)), ["decoder_blocks.0", "decoder_blocks.1"]]),
        ("root", []),
        ("size:9000", []),  # more than a block has
        ("size:8000", [[f"blocks.{i}"] for i in range(3)]),
    ],
)
def test_units_of_each_wrap(wrap, units):
    model = vit.ViTMAE(SMALL_DECODER, 32)
    assert shard.find_units(model, list(shard.find_blocks(model, {vit.Block})), wrap) == units


@pytest.mark.parametrize("smallest", [1, 1000, 3000, 4200, 8000])
def test_units_by_size_are_those_of_fsdp1(single, smallest):
    """The modules that FSDP1 itself wraps by PyTorch's policy; at 4200 a unit is inside another."""
    policy = partial(size_based_auto_wrap_policy, min_num_params=smallest)
    theirs = FSDP1(vit.ViTMAE(CONFIG, 32), auto_wrap_policy=policy, device_id=CPU)
    wrapped = {n for n, m in theirs.named_modules() if isinstance(m, FSDP1)} - {""}
    wrapped = {shard.original_name(f"{name}.x")[:-2] for name in wrapped}
    model = vit.ViTMAE(CONFIG, 32)
    units = shard.find_units(model, list(shard.find_blocks(model, {vit.Block})), f"size:{smallest}")
    assert {name for (name,) in units} == wrapped and len(units) == len(wrapped) > 3
    assert [n for n, _ in model.named_parameters()] == [
        n for n, _ in vit.ViTMAE(CONFIG, 32).named_parameters()
    ]


def test_original_names():
    for name in (
        "module.blocks.0.mlp.fc1.weight",
        "blocks.0._checkpoint_wrapped_module.mlp.fc1.weight",
        "_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.mlp.fc1.weight",
        "blocks.0._orig_mod.mlp.fc1.weight",
    ):
        assert shard.original_name(name) == "blocks.0.mlp.fc1.weight"


# --- one process


@pytest.fixture
def single():
    mesh.init_ranks(mesh.read_ranks({}), CPU)
    yield mesh.build_mesh((1, 1), CPU)
    dist.destroy_process_group()


def build(mode: str, grid, *, dtype=torch.float32, config=CONFIG, **options) -> nn.Module:
    with torch.device("meta"):
        model = vit.ViTMAE(config, 32)
    return shard.apply(
        model,
        mode,
        grid,
        block_classes={vit.Block},
        initial_value=partial(vit.initial_value, config, seed=0),
        options=shard.ShardingOptions(param_dtype=dtype, cast_inputs=False, **options),
    )


def batch(seed: int = 0) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, 32, 32, generator=generator)
    return images, 0.75, torch.rand(2, 16, generator=generator)


@pytest.mark.parametrize(("mode", "fsdp"), [("ddp", 2), ("full_shard", 1), ("full_shard", 2)])
def test_a_forgotten_parameter_is_found_by_name(single, mode, fsdp):
    class Scaled(vit.Block):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.gamma = nn.Parameter(torch.empty(32))

        def forward(self, x):
            return self.gamma * super().forward(x)

    with torch.device("meta"):
        model = vit.ViTMAE(CONFIG, 32)
        model.blocks[1] = Scaled(32, 2, 64)
    values = partial(vit.initial_value, CONFIG)
    with pytest.raises(RuntimeError, match=r"gives a value to blocks\.1\.gamma$"):
        shard.apply(
            model,
            mode,
            single,
            block_classes={vit.Block, Scaled},
            initial_value=values,
            options=shard.ShardingOptions(fsdp=fsdp),
        )


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


def test_block_classes_that_match_no_module_are_refused(single):
    with torch.device("meta"):
        model = vit.ViTMAE(CONFIG, 32)
    with pytest.raises(ValueError, match="block_classes match no module: Conv1d"):
        shard.apply(model, "full_shard", single, block_classes={nn.Conv1d})


def test_backward_post_is_refused_by_fsdp2(single):
    with pytest.raises(ValueError, match="backward_post exists in FSDP1 only"):
        build("full_shard", single, prefetch="backward_post")


def test_fsdp1_gets_its_options(single):
    on = build(
        "full_shard",
        single,
        fsdp=1,
        prefetch="backward_post",
        forward_prefetch=True,
        limit_all_gathers=False,
    )
    off = build("full_shard", single, fsdp=1, prefetch="none")
    assert str(on.backward_prefetch).endswith("BACKWARD_POST") and off.backward_prefetch is None
    assert on.forward_prefetch and not off.forward_prefetch
    assert off.limit_all_gathers and not on.limit_all_gathers


class Count(TorchDispatchMode):
    """Counts the operations that are really executed."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: collections.Counter = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func] += 1
        return func(*args, **(kwargs or {}))


def test_checkpointing_recomputes_what_it_says(single):
    """Four products, two norms a block: full redoes all but the last product, selective norms."""

    def executed(ac: str) -> tuple[int, int]:
        model = build("full_shard", single, ac=ac)
        with Count() as count:
            model(*batch())[0].backward()
        aten = torch.ops.aten
        return count.ops[aten.addmm.default], count.ops[aten.native_layer_norm.default]

    blocks = UNITS - 1
    plain, norms = executed("none")
    assert (plain, norms) == (4 * blocks + 3, 2 * blocks + 2)
    assert executed("full") == (plain + 3 * blocks, norms + 2 * blocks)
    assert executed("selective") == (plain, norms + 2 * blocks)


@pytest.mark.parametrize("name", ["tiny", "5b"])
def test_flops_with_recomputation_are_those_executed(single, name):
    """By torch's own counter, which sees plain matrix products; 5b has the gated MLP."""
    plain = vit.ViTConfig(32, 2, 64, 2, 8, decoder_width=32, decoder_depth=1, decoder_heads=2)
    config = dataclasses.replace(plain, gated_mlp=vit.MODELS[name].gated_mlp)
    for ac in ("none", "full"):
        with torch.device("meta"):
            model = vit.ViTMAE(config, 32)
        model = shard.apply(
            model,
            "full_shard",
            single,
            block_classes={vit.Block},
            initial_value=partial(vit.initial_value, config, seed=0),
            options=shard.ShardingOptions(ac=ac, param_dtype=torch.float32),
        )
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(*batch())[0].backward()
        formula = vit.flops_per_image(config, 32, recompute=ac == "full")
        assert 2 * formula == pytest.approx(counter.get_total_flops(), rel=0.001), ac


@pytest.mark.full
def test_compiled_blocks_are_compiled_once_and_give_the_same(single):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain, compiled = build("full_shard", single), build("full_shard", single, compile=True)
    losses = [model(*batch())[0] for model in (plain, compiled, compiled)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert losses[2].item() == losses[1].item()
    # encoder and decoder blocks have their own shapes: one graph each, or one for both
    assert 1 <= counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


def test_the_optimizer_is_fused_decays_by_name_and_can_skip(single):
    for mode, fsdp in (("ddp", 2), ("zero1", 2), ("full_shard", 1), ("full_shard", 2)):
        with torch.device("meta"):
            decay = shard.weight_decay_names(vit.ViTMAE(CONFIG, 32))
        model = build(mode, single, fsdp=fsdp, ac="full")
        optimizer = shard.build_optimizer(model, mode, decay, lr=0.1, weight_decay=0.05)
        names = {p: shard.original_name(n) for n, p in model.named_parameters()}
        decays = {names[p]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
        assert len(decays) == len(names)
        for name, value in decays.items():
            plain = name.endswith("bias") or "norm" in name
            assert value == (0 if plain else 0.05), name
        inner = getattr(optimizer, "optim", optimizer)
        assert all(g["fused"] and g["betas"] == (0.9, 0.95) for g in inner.param_groups)

        def values(model=model):
            return torch.cat(
                [
                    getattr(p, "full_tensor", lambda p=p: p)().detach().flatten().clone()
                    for p in model.parameters()
                ]
            )

        before = values()
        model(*batch())[0].backward()
        shard.optimizer_step(optimizer, torch.tensor(1.0))
        assert torch.equal(values(), before)
        shard.optimizer_step(optimizer, torch.tensor(0.0))
        assert not torch.equal(values(), before)


def test_cpu_offload_of_fsdp2_trains_the_same(single):
    losses = []
    for offload in (False, True):
        model = build("full_shard", single, cpu_offload=offload)
        optimizer = shard.build_optimizer(model, "full_shard", set(), lr=1e-3, weight_decay=0)
        for seed in range(2):
            loss, _, _ = model(*batch(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]


@pytest.mark.parametrize(("mode", "fsdp"), [("ddp", 2), ("full_shard", 1), ("full_shard", 2)])
def test_mixed_precision_computes_in_bf16_and_keeps_fp32(single, mode, fsdp):
    model = build(mode, single, fsdp=fsdp, dtype=torch.bfloat16)
    seen = {}

    def watch(name):
        return lambda module, args, out: seen.update({name: out.dtype})

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(watch(shard.original_name(name)))
    with shard.autocast(model, CPU, torch.bfloat16):
        loss, _, _ = model(*batch())
    loss.backward()
    assert len(seen) == 4 * (UNITS - 1) + 2 and set(seen.values()) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 == p.grad.dtype for p in model.parameters())
    positions = {shard.original_name(n): b for n, b in model.named_buffers()}["pos_embed"]
    assert torch.equal(positions, vit.sincos_positions(32, 4))  # not rounded to bf16


# --- four ranks: what goes over the wire, who holds what


def forward_backward(model: nn.Module, seed: int = 0) -> None:
    model(*batch(seed))[0].backward()


def events(model: nn.Module, last: bool = True) -> list[str]:
    """What the profiler of rank 0 sees of a forward and backward pass, in its order.

    The other ranks join its collectives; profiling all would take four times as long.
    """
    first = dist.get_rank() == 0
    profiler = profile(activities=[ProfilerActivity.CPU]) if first else nullcontext()
    with profiler, shard.accumulation(model, last):
        forward_backward(model, dist.get_rank())
    found = sorted((e.time_range.start, e.name) for e in profiler.events()) if first else []
    return [name for _, name in found]


def collectives(names: list[str]) -> dict[str, int]:
    kinds = {"all_gather": "allgather", "reduce_scatter": "reduce_scatter"}
    kinds["all_reduce"] = "allreduce"
    c10d = [name for name in names if name.startswith("c10d::")]
    return {kind: sum(part in name for name in c10d) for kind, part in kinds.items()}


def local_parts(tensors) -> list[torch.Tensor]:
    """What this rank holds of them."""
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None]


def facts_of_a_row(mode: str, fsdp: int) -> dict:
    """Collectives with and without synchronisation, what this rank holds, sums in bf16."""
    grid = mesh.build_mesh(shard.mesh_shape(mode, 4, 2 if "hybrid" in mode else None), CPU)
    model = build(mode, grid, fsdp=fsdp)
    for _ in range(2):
        forward_backward(model)
    found = {"collectives": collectives(events(model))}
    found["inner"] = collectives(events(model, last=False))
    found["local"] = sum(p.numel() for p in local_parts(model.parameters()))

    model = build(mode, grid, fsdp=fsdp, reduce_dtype=torch.bfloat16)
    forward_backward(model, dist.get_rank())
    grads = local_parts(p.grad for p in model.parameters())
    found["bf16_sums"] = all(torch.equal(g, g.bfloat16().float()) for g in grads)
    return found


def facts_of_units(grid) -> dict:
    """Collectives and whole gradients, of small blocks together and of single blocks."""
    found = {}
    for name, options in {"units": {}, "recomputed": {"ac": "full"}}.items():
        for key, wrap in {name: "auto", f"{name}, single blocks": "block"}.items():
            model = build("full_shard", grid, config=SMALL_DECODER, wrap=wrap, **options)
            forward_backward(model)
            model.zero_grad()
            sent = collectives(events(model))
            found[key] = sent, [p.grad.full_tensor() for p in model.parameters()]
    return found


def events_of_prefetch(grid, **options) -> list[str]:
    model = build("full_shard", grid, **options)
    for _ in range(2):
        forward_backward(model)
    return events(model)


def all_reduces_of_ddp(cap: int) -> int:
    """Of 9 MiB of gradients in buckets of so many MiB."""
    with torch.device("meta"):
        model = vit.ViTMAE(vit.MODELS["tiny"], 32)
    model = shard.apply(
        model,
        "ddp",
        mesh.build_mesh((4, 1), CPU),
        block_classes={vit.Block},
        initial_value=partial(vit.initial_value, vit.MODELS["tiny"]),
        options=shard.ShardingOptions(bucket_cap_mb=cap),
    )
    for _ in range(2):
        forward_backward(model)
    return collectives(events(model))["all_reduce"]


def facts_of_four_ranks() -> dict:
    """Runs on every rank; what the tests below look at."""
    join()
    rows = {row: facts_of_a_row(*row) for row in ROWS}
    grid = mesh.build_mesh((1, 4), CPU)
    found = {
        "rows": rows,
        **facts_of_units(grid),
        "backward_pre": events_of_prefetch(grid, prefetch="backward_pre"),
        "none": events_of_prefetch(grid, prefetch="none"),
        "forward_prefetch": events_of_prefetch(grid, forward_prefetch=True),
        "buckets": [all_reduces_of_ddp(cap) for cap in (25, 1)],
    }
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def facts(once):
    results = once("facts", partial(on_ranks, 4, facts_of_four_ranks))
    return results[0] | {"ranks": [r["rows"] for r in results]}


@pytest.mark.parametrize(("mode", "fsdp"), ROWS)
def test_collectives_are_those_of_the_table(facts, mode, fsdp):
    """One unit, one collective of each kind; the root unit stays gathered for backward."""
    found, inner = map(facts["rows"][mode, fsdp].get, ("collectives", "inner"))
    if mode in ("ddp", "zero1"):
        assert found == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 1}
        assert inner == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    elif mode == "no_shard":
        assert found["all_reduce"] == UNITS and inner["all_reduce"] == 0
        if fsdp == 1:  # FSDP2 calls the collectives of a group of one, which send nothing
            assert found["all_gather"] == found["reduce_scatter"] == 0
    else:
        again = UNITS - 1 if shard.STRATEGIES[mode].reshard else 0
        across = UNITS if "hybrid" in mode else 0
        expected = {"all_gather": UNITS + again, "reduce_scatter": UNITS, "all_reduce": across}
        assert found == expected
        # accumulation: the group reduce-scatters every time, FSDP2 waits with the all-reduce
        assert inner == expected | {"all_reduce": across if fsdp == 1 else 0}


@pytest.mark.parametrize(("mode", "fsdp"), ROWS)
def test_each_rank_holds_its_part_of_the_parameters(facts, mode, fsdp):
    with torch.device("meta"):
        whole = sum(p.numel() for p in vit.ViTMAE(CONFIG, 32).parameters())
    parts = [rows[mode, fsdp]["local"] for rows in facts["ranks"]]
    share = {"1": 1, "group": 2, "world": 4}[shard.STRATEGIES[mode].group]
    assert sum(parts) == whole * 4 // share
    assert max(parts) < 1.1 * whole / share


@pytest.mark.parametrize(("mode", "fsdp"), ROWS)
def test_gradients_are_summed_in_the_reduce_dtype(facts, mode, fsdp):
    assert facts["rows"][mode, fsdp]["bf16_sums"]


def test_units_of_several_blocks_send_less_often_and_learn_the_same(facts):
    """3 encoder blocks and a root with 2 decoder blocks: as one unit, or a unit each."""
    for name in ("units", "recomputed"):
        (few, mine), (many, single) = facts[name], facts[f"{name}, single blocks"]
        assert few == {"all_gather": 2 * 4 + 1, "reduce_scatter": 5, "all_reduce": 0}
        assert many == {"all_gather": 2 * 5 + 1, "reduce_scatter": 6, "all_reduce": 0}
        assert len(mine) == len(single) > 60
        assert all(torch.equal(a, b) for a, b in zip(mine, single, strict=True))


def test_prefetch_is_what_it_says(facts):
    """In backward the gather of a unit comes before or after the gradient of the unit before it."""

    def order(names: list[str]) -> list[str]:
        start = names.index("FSDP::pre_backward")
        wanted = r"FSDP::(all_gather|pre_backward|post_backward_reduce) \((blocks\.\d)\)"
        return [f"{m[1]} {m[2]}" for n in names[start:] if (m := re.fullmatch(wanted, n))]

    early, late = order(facts["backward_pre"]), order(facts["none"])
    for i in (1, 0):
        gather, before = f"all_gather blocks.{i}", f"post_backward_reduce blocks.{i + 1}"
        assert early.index(gather) < early.index(before)
        assert late.index(gather) > late.index(before)

    def gathered_ahead(names: list[str]) -> bool:
        return names.index("FSDP::all_gather (blocks.1)") < names.index(
            "FSDP::post_forward (blocks.0)"
        )

    assert gathered_ahead(facts["forward_prefetch"]) and not gathered_ahead(facts["backward_pre"])


def test_bucket_size_counts_the_all_reduces_of_ddp(facts):
    large, small = facts["buckets"]
    assert large == 1 and 6 <= small <= 12  # 9 MiB in buckets of 25 and of 1 MiB


# --- same training, whatever the sharding


def covering() -> list[Case]:
    """Every mode and engine, checkpointing and accumulation by turns, on 4 ranks where there are
    groups; the group that FSDP1 gets wrong by itself (1), the one that is the world; three ranks.
    """
    cases = []
    for i, c in enumerate(modes(4, [2])):
        ranks, ac, accum = 4 if c.group else 2, ("none", "full")[i % 2], 1 + i // 2 % 2
        cases.append(Case(ranks, c.mode, c.fsdp, c.group, ac, accum))
    cases += [Case(2, "hybrid", 1, 1), Case(2, "hybrid", 2, 2, "full")]
    cases += [Case(2, "full_shard", 2, wrap="auto"), Case(2, "hybrid", 2, 1, wrap="root")]
    cases += [Case(2, "full_shard", 1, ac="full", wrap="root")]
    cases += [Case(2, "full_shard", fsdp, 0, "full", fsdp, "size:6000") for fsdp in (1, 2)]
    return [*cases, Case(3, "full_shard", 2, 0, "none", 2)]


@pytest.mark.slow
def test_same_training_whatever_the_sharding(tmp_path):
    """Loss and gradient norm within 1e-5 of one process's, parameters within 1e-4, replicas equal.

    The whole grid: python tests/parity.py
    """
    found = compare(covering(), tmp_path)
    bad = {case: d for case, d in found.items() if not d.fine()}
    assert not bad and len(found) == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "rows"),
    [
        (8, [("zero1", 2), ("hybrid", 1), ("full_shard", 2)]),
        pytest.param(50, ROWS, marks=pytest.mark.full),
    ],
)
def test_bf16_stays_near_fp32(steps, rows, tmp_path):
    """Each step's loss within 2 %."""
    argv = [*ARGV, "--steps", str(steps), "--batch", "8", "--img-size", "32"]
    argv = [
        a for i, a in enumerate(argv) if a != "--global-batch" and argv[i - 1] != "--global-batch"
    ]
    runs = [Run([*argv, "--mode", "ddp"], params=False)]
    for mode, fsdp in rows:
        engine = [] if mode in ("ddp", "zero1") else ["--fsdp", str(fsdp)]
        more = ["--mode", mode, *engine, "--precision", "bf16"]
        runs.append(Run([*argv, *more], params=False))
    fp32, *rest = run_ranks(2, runs, tmp_path, 900)
    for (mode, fsdp), result in zip(rows, rest, strict=True):
        assert len(result.steps) == steps
        for a, b in zip(fp32.steps, result.steps, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=0.02), (mode, fsdp, a["step"])
