"""From --data to the batches of a step: which images, by which rank, and what a failure leaves."""

import shutil
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from images import copy_tiles
from ranks import TINY_ARGV, python

import data
import mesh
import train_fsdp
from runtime import image_source
from runtime.config import parse
from runtime.device_batches import open_batches
from runtime.log import Log
from runtime.monitor import Monitor
from runtime.resume import CheckpointSchedule
from runtime.run import resolve

TILES = ROOT / "examples" / "tiles"
ARGV = [*TINY_ARGV, "--steps", "1", "--global-batch", "4"]


# --- the images


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of images as `images` and, by a link, `link`."""
    copy_tiles(tmp_path / "images", 8)
    (tmp_path / "link").symlink_to("images")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--data images --out images/new/out", "--data images"),
        ("--data . --out out", "--data ."),
        (f"--data {TILES}/train --eval-data images --out link/out", "--eval-data images"),
        ("--data nowhere", "there is no folder nowhere: give --data"),
        (f"--data {TILES}/train --eval-data nowhere", "there is no folder nowhere: give --eval-d"),
    ],
)
def test_folders_that_are_wrong_are_refused_before_anything_starts(flags, what, folder, capsys):
    before = sorted(folder.rglob("*"))
    assert train_fsdp.main([*ARGV, *flags.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("train_fsdp.py: error: ") and what in printed.err
    assert printed.err.count("\n") == 1 and not printed.out
    left = {path for path in folder.rglob("*") if path.name not in ("out", ".lock")}
    assert left == set(before)
    image_source.check_folder("images", out="images-out")  # beside them


@pytest.mark.full
def test_a_loader_worker_imports_no_more_than_it_needs(tmp_path):
    code = """
import sys
from runtime import image_source
assert {"shard", "mesh", "vit", "checkpoint", "runtime.config"}.isdisjoint(sys.modules)
files = image_source.list_folder(sys.argv[1])
assert len(files) == 192 and files.read(0)
assert image_source.SyntheticImages(0, 5).read(0).shape == (5, 256, 256)
"""
    shutil.copy(ROOT / "data.py", tmp_path)
    for room in ("runtime", "storage"):
        shutil.copytree(ROOT / room, tmp_path / room)
    python("-c", code, TILES / "train", cwd=tmp_path, alone=True)


# --- the batches


def local_batches(error: Exception | None = None, count: int = 8):
    """What a loader gives, two local batches for a step; then an error."""
    for i in range(count):
        image = torch.full((2, 3, 8, 8), i)
        noise = torch.rand(2, 4)
        yield data.MicroBatch(image, noise, [2 * i, 2 * i + 1], [(i, "bad")])
    if error:
        raise error


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open such batches -> a monitor that takes them, one per step."""

    def open_them(error: Exception | None = None, count: int = 8):
        monkeypatch.setattr(data, "build_loader", Mock(return_value=local_batches(error, count)))
        flags = [*ARGV, "--mode", "ddp", "--accum", "2", "--out", str(tmp_path)]
        run = resolve(parse(flags), 1, 1)
        session = SimpleNamespace(
            device=torch.device("cpu"), ranks=mesh.read_ranks({}), log=Log(0), heartbeat=Mock()
        )
        files = data.scan(TILES / "train")
        checkpoints = CheckpointSchedule(run, session.log)
        batches = open_batches(run, session, files, range(4))
        return Monitor(run, session, files, checkpoints, first=next(batches), rest=batches)

    return open_them


def test_the_batches_are_the_loaders_and_none_is_kept(opened):
    monitor = opened()
    found = []
    kept = weakref.ref(monitor.batch.micro_batches[0][0])
    for step in range(4):
        batch = monitor.next_batch(step)
        found += [int(images[0, 0, 0, 0]) for images, _ in batch.micro_batches]
        assert batch.image_ids == [*range(4 * step, 4 * step + 4)] and monitor.error is None
        assert [number for number, _ in batch.bad] == found[-2:]
        assert (kept() is None) == (step > 0)
    assert found == [*range(8)] and len(monitor.bad_images.unreported) == 8


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), TypeError("a bug")])
def test_after_a_failure_the_last_batch_comes_again_with_the_first_error(error, opened):
    monitor = opened(error, count=4)
    monitor.next_batch(0)
    good = monitor.next_batch(1)
    assert not monitor.error and len(monitor.bad_images.unreported) == 4
    for step in 2, 3:
        assert monitor.next_batch(step) is good and monitor.error is error
    assert len(monitor.bad_images.unreported) == 4  # nothing is counted twice


def test_a_first_batch_that_fails_and_a_full_gpu_are_errors(folder, opened, monkeypatch, capsys):
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error.")
    monkeypatch.setattr(data, "build_loader", Mock(return_value=local_batches(error, 0)))
    assert train_fsdp.main([*ARGV, "--data", "images"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    monitor = opened(torch.OutOfMemoryError("CUDA out of memory"), count=2)
    monitor.next_batch(0)
    with pytest.raises(torch.OutOfMemoryError):
        monitor.next_batch(1)
