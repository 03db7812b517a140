"""--tp: checkpoints in both directions, bytes and memory. The same training: tests/parity.py."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from parity import ARGV, SPLIT
from ranks import Run, join, on_ranks, run_ranks
from simulated import hold_against_plan

import mesh
import train_fsdp
import vit
from runtime.config import Config
from runtime.device_batches import open_batches
from runtime.image_source import SyntheticImages
from runtime.run import resolve

CPU = torch.device("cpu")
_, PLAIN, _ = SPLIT


# 60 rows over the three shards of the last: not all are equal
MESHES = [(8, "--mode hybrid --group 2 --tp 2"), (2, "--mode ddp"), (6, "--mode full_shard --tp 2")]


@pytest.mark.full
def test_a_checkpoint_moves_between_meshes(tmp_path):
    """Four steps; under each further mesh from one step later on, of the mesh before.

    Split, qkv has another order of rows: its weights and AdamW's states of them.
    """
    found = []
    for i, (world, flags) in enumerate(MESHES):
        argv = [*ARGV, "--model", PLAIN, *flags.split(), "--save-every", "1", "--keep", "9"]
        argv += ["--global-batch", "12"]  # of 4, 2, 3 and 1 data-parallel ranks
        argv += ["--resume", str(tmp_path / f"out{i - 1}" / f"step_{i:08d}")] if i else []
        found += run_ranks(world, [Run(argv, to=str(tmp_path / f"out{i}"))], tmp_path / str(i))
        assert not any(found[-1].status), found[-1].errors
        pairs = zip(found[-1].steps, found[0].steps[i:], strict=True)
        for step, expected in pairs:
            for key in ("loss", "grad_norm"):
                assert step[key] == pytest.approx(expected[key], rel=1e-5), (i, key)
        for name, p in found[0].params.items():
            torch.testing.assert_close(found[-1].params[name], p, rtol=0, atol=1e-4)


# --- the plan


def run_of(world: int, **more):
    """The run of a tiny model in groups of two."""
    config = Config(
        "tiny:heads=4,depth=3", 32, mode="full_shard", tp=2, batch=2, precision="fp32", **more
    )
    return resolve(config, world, world)


SHALLOW = "15b:depth=2,decoder_depth=1"  # as wide as 15b


@pytest.mark.parametrize(
    ("model", "tp", "world", "ac"),
    [(SHALLOW, 2, 8, "selective"), pytest.param("15b", 4, 32, "full", marks=pytest.mark.full)],
)
def test_memory_and_bytes_are_those_of_the_dry_run(model, tp, world, ac):
    """The peak of hybrid with shard groups of 2, without what PyTorch's tracker does not see."""
    config = Config(model, mode="hybrid", group=2, fsdp=2, tp=tp, batch=16, ac=ac, device="cpu")
    hold_against_plan(resolve(config, world, 8))


def share_inputs() -> list[float]:
    """On every rank: the loss of a step on images of its own."""
    rank = join()
    run = run_of(world=4)
    grid = mesh.build_mesh(run.mesh_shape, CPU)
    model = train_fsdp.build_training(run, grid).model
    draw = torch.Generator().manual_seed(rank)
    images = torch.randn(2, 3, 32, 32, generator=draw)
    noise = torch.rand(2, 16, generator=draw)
    alone, _, _ = vit.ViTMAE(run.vit_config, 32)(images.clone(), 0.75, noise.clone())
    loss, _, _ = model(images, 0.75, noise)
    dist.destroy_process_group()
    return [alone.item(), loss.item()]


def test_a_group_computes_with_the_images_of_its_first_rank(tmp_path):
    """Where a disk fails one of them; else its copies of the norms would drift apart."""
    (a0, b0), (a1, b1), (a2, b2), (a3, b3) = on_ranks(4, share_inputs, tmp_path)
    assert [b0, b1] == pytest.approx([a0, a0]) and [b2, b3] == pytest.approx([a2, a2])
    assert len({round(a, 4) for a in (a0, a1, a2, a3)}) == 4


def test_ranks_of_a_group_read_the_same_images():
    """Each image of a step once per tensor-parallel group."""
    run = run_of(world=8, workers=0)
    assert (run.data_ranks, run.global_batch) == (4, 8)
    seen = []
    for rank in range(8):
        session = SimpleNamespace(ranks=mesh.Ranks(rank, 8, rank, 8, "srun", {}), device=CPU)
        batches = list(open_batches(run, session, SyntheticImages(0), range(1)))
        assert len(batches) == 1
        seen.append(batches[0].image_ids)
    assert seen[::2] == seen[1::2]
    assert len(set(itertools.chain(*seen))) == 8
