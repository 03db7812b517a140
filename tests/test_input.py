"""From --data to the batches of a step: which images, by which rank, and what a failure leaves."""

import os
import shutil
import subprocess
import sys
import time
import weakref

import pytest
import torch
from conftest import ROOT
from ranks import Run, run_ranks

import data
import train_fsdp
from runtime import image_source
from runtime.device_batches import NO_BATCH, Batches, LoaderFailed, device_batches
from storage import image_list

TILES = ROOT / "examples" / "tiles"
ARGV = ["--model", "tiny", "--img-size", "32", "--device", "cpu", "--precision", "fp32"]
ARGV += ["--steps", "1", "--workers", "0", "--global-batch", "4"]


# --- the images


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of images as `images` and, by a link, `link`; no launcher's variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "images").mkdir()
    for i, tile in enumerate(sorted(TILES.glob("train/*/*.jpg"))[:8]):
        shutil.copy(tile, tmp_path / "images" / f"{i}.jpg")
    (tmp_path / "link").symlink_to("images")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--data images --out images/new/out", "--data images"),
        ("--data images --out link", "--data images"),
        ("--data link --out images", "--data link"),
        ("--data . --out out", "--data ."),
        (f"--data {TILES}/train --eval-data images --out link/out", "--eval-data images"),
        ("--data nowhere", "there is no folder nowhere: give --data"),
        (f"--data {TILES}/train --eval-data nowhere", "there is no folder nowhere: give --eval-d"),
        (f"--data {TILES}/train --eval-data empty", "no images found"),
    ],
)
def test_folders_that_are_wrong_are_refused_before_anything_starts(flags, what, folder, capsys):
    (folder / "empty").mkdir()
    before = sorted(folder.rglob("*"))
    assert train_fsdp.main([*ARGV, *flags.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("train_fsdp.py: error: ") and what in printed.err
    assert printed.err.count("\n") == 1 and not printed.out
    assert sorted(folder.rglob("*")) == before


def test_pictures_never_join_the_images_on_any_rank(folder):
    beside, inside = ([*ARGV, "--data", str(folder / name)] for name in ("link", "images"))
    runs = [
        Run(beside, params=False, to=str(folder / "images-out")),  # no folder of the images
        Run(inside, params=False, to=str(folder / "link" / "out")),
    ]
    trained, refused = run_ranks(2, runs, folder / "ranks")
    assert trained.status == [0, 0], trained.errors
    assert refused.status == [2, 2] and "lies in --data" in refused.errors
    assert len(data.scan(str(folder / "images"))) == 8


def test_a_listing_that_takes_long_says_so(folder, monkeypatch):
    find, said = image_list.find_list, []

    def slowly(*args):
        time.sleep(0.5)
        return find(*args)

    monkeypatch.setattr(image_list, "find_list", slowly)
    monkeypatch.setattr(image_source, "ANNOUNCED_EVERY", 0.2)
    image_source.list_folder("images", None, said.append)
    assert len(said) == 2 and all("still listing images" in text for text in said)
    time.sleep(0.3)
    assert len(said) == 2  # and no more once it has ended


@pytest.mark.full
def test_a_copy_without_storage_reads_plain_folders(tmp_path):
    """And a loader worker that reads synthetic images imports no more than it needs."""
    code = """
import os, sys, torch.distributed as dist
from types import SimpleNamespace
from runtime import image_source
assert {"shard", "mesh", "vit", "runtime.config"}.isdisjoint(sys.modules)
from runtime import agreement, config, device_batches
from runtime.run import resolve
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
real = config.Config(data=sys.argv[1])
files, facts = image_source.share_images(real, 48)
assert len(files) == facts["images"] == 192 and files.read(0)
synthetic, made = image_source.share_images(config.Config(channels=5), 48)
assert synthetic.read(0).shape == (5, 256, 256) and made["channel_stats"].mean == (0.5,) * 5
assert image_source.find_images(real, None, 48, print)[1] == facts
os.mkdir("pack")
open("pack/pack.index", "w").close()
run = resolve(config.Config("tiny", mode="ddp", batch=8, stage_dir="node", workers=0), 1, 1)
session = SimpleNamespace(ranks=None, device=None)
for needed in (
    lambda: image_source.share_images(config.Config(data="pack"), 48),
    lambda: device_batches.open_batches(run, session, files, range(1)),
):
    try:
        needed()
    except (ModuleNotFoundError, agreement.AgreedError) as error:
        assert "No module named 'storage'" in str(error), error
    else:
        raise AssertionError
dist.destroy_process_group()
"""
    for name in ("vit.py", "data.py", "mesh.py", "shard.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "runtime", tmp_path / "runtime")
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", code, str(TILES / "train")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- the batches


def local_batches(error: Exception | None = None, count: int = 8):
    """What a loader gives, two local batches for a step; then an error."""
    for i in range(count):
        image, noise = torch.full((2, 3, 8, 8), i), torch.rand(2, 4)
        yield data.LocalBatch(image, noise, [2 * i, 2 * i + 1], [(i, "bad")], data.LoadStats(i))
    if error:
        raise error


def opened(error: Exception | None = None, count: int = 8, repeat: bool = False) -> Batches:
    loaded = device_batches(local_batches(error, count), 2, torch.device("cpu"))
    return Batches(loaded, 0, repeat)


def test_the_batches_are_the_loaders_and_none_is_kept():
    batches = opened()
    assert batches.first.image_ids == [0, 1, 2, 3]
    first = weakref.ref(batches.first.parts[0][0])
    found = []
    for step in range(4):
        batch = next(batches)
        found += [int(images[0, 0, 0, 0]) for images, _ in batch.parts]
        assert batch.image_ids == [*range(4 * step, 4 * step + 4)] and batch.error is None
        assert [number for number, _ in batch.bad] == found[-2:]
        assert batch.stats.bytes == sum(found[-2:])
        assert (first() is None) == (step > 0)
    assert found == [*range(8)]
    assert opened(count=0).first is NO_BATCH
    again = opened(count=2, repeat=True)  # compute alone
    assert [again.first] * 3 == [next(again), next(again), next(again)]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), TypeError("a bug")])
def test_after_a_failure_the_last_batch_comes_again_with_the_first_error(error):
    batches = opened(error, count=4)
    next(batches)
    good, *again = next(batches), next(batches), next(batches)
    for batch in again:
        assert batch.parts is good.parts and batch.image_ids == good.image_ids
        assert not batch.bad and str(error) in str(batch.error)  # nothing is counted twice
        assert isinstance(batch.error, TypeError if isinstance(error, TypeError) else LoaderFailed)
    assert again[0].error is again[1].error and good.error is None


def test_a_first_batch_that_fails_and_a_gpu_that_is_full_are_errors():
    with pytest.raises(LoaderFailed, match="Input/output error"):
        opened(OSError(5, "Input/output error"), count=0)
    batches = opened(torch.OutOfMemoryError("CUDA out of memory"), count=2)
    next(batches)
    with pytest.raises(torch.OutOfMemoryError):
        next(batches)
