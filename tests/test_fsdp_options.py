"""Options whose effect shows on several ranks alone: when FSDP1 gathers, and --cpu-offload."""

import pytest
import torch.distributed as dist
from ranks import join, on_ranks
from small_model import CPU, UNITS, build, forward_backward
from torch.profiler import ProfilerActivity, profile

import mesh
import shard

FSDP1_EVENTS = {  # as the profiler names them: a letter for each
    "FullyShardedDataParallel.rate_limiter": "w",  # waits until an earlier unit is freed
    "FullyShardedDataParallel._pre_backward_hook": "B",  # the backward pass of a unit begins
    "FullyShardedDataParallel._post_backward_hook": "E",  # ... and ends
    "c10d::allgather_": "g",
    "c10d::_reduce_scatter_base_": "r",
}
PREFETCH = ("none", "backward_pre", "backward_post")


def events_of_a_step(grid, **options) -> str:
    """Run a step of FSDP1 -> the letters of its events, in their order."""
    model = build("full_shard", grid, fsdp=1, **options)
    for _ in range(2):  # FSDP1 learns the order of the units in the first
        forward_backward(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        forward_backward(model)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return "".join(FSDP1_EVENTS.get(event.name, "") for event in events)


def losses_of_training(grid, mode: str, offload: bool) -> list[float]:
    """Train three steps on batches of this rank's own -> this rank's losses."""
    model = build(mode, grid, cpu_offload=offload)
    optimizer = shard.build_optimizer(model, mode, set(), lr=1e-3, weight_decay=0)
    losses = []
    for step in range(3):
        loss = forward_backward(model, seed=10 * step + dist.get_rank())
        shard.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_each_rank() -> tuple[dict, dict]:
    """Collect what both tests look at, so that ranks are started once."""
    join()
    sharded = mesh.build_mesh((1, 2), CPU)
    replicated = mesh.build_mesh((2, 1), CPU)
    events = {
        prefetch: events_of_a_step(sharded, prefetch=prefetch, limit_all_gathers=False)
        for prefetch in PREFETCH
    }
    events["limited"] = events_of_a_step(sharded, prefetch="none", limit_all_gathers=True)
    losses = {}
    # FSDP1 pins what it keeps on the host, which needs a GPU
    for mode, grid in (("full_shard", sharded), ("hybrid", replicated)):
        for offload in (False, True):
            losses[mode, offload] = losses_of_training(grid, mode, offload)
    dist.destroy_process_group()
    return events, losses


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    return on_ranks(2, on_each_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.full
def test_fsdp1_gathers_when_its_options_say(by_rank):
    """In backward: with its own unit, before the gradients of the unit before it, or after them."""
    events, _ = by_rank[0]
    blocks = UNITS - 1
    backward = {prefetch: text[text.index("B") :] for prefetch, text in events.items()}
    assert backward["none"].count("BgEr") == blocks
    # the gather that backward begins with is of the last block: no gradient is before it
    assert backward["backward_pre"].startswith("BgBgEr")
    assert backward["backward_post"].count("Egr") == blocks - 1
    assert "Eg" not in backward["none"] + backward["backward_pre"]
    for prefetch in PREFETCH:
        assert "w" not in events[prefetch]
    assert events["limited"].count("w") >= blocks
    assert events["limited"].replace("w", "") == events["none"]


@pytest.mark.full
def test_parameters_on_the_host_train_the_same_on_several_ranks(by_rank):
    for _, losses in by_rank:
        for mode in ("full_shard", "hybrid"):
            assert losses[mode, True] == losses[mode, False]
            assert len(losses[mode, True]) == 3
    first, second = [losses["full_shard", True] for _, losses in by_rank]
    assert first != second  # each rank has images of its own
