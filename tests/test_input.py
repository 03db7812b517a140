"""From --data to the batches of a step: which images, and what a failure of the loader leaves."""

import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from ranks import TINY_ARGV

import data
import train_fsdp

ARGV = [*TINY_ARGV, "--steps", "4", "--global-batch", "4", "--mode", "ddp", "--accum", "2"]


def local_batches(error: Exception | None = None, count: int = 8):
    """What a loader gives, two local batches for a step; then an error."""
    for i in range(count):
        image = torch.full((2, 3, 8, 8), i)
        noise = torch.rand(2, 4)
        yield data.MicroBatch(image, noise, [2 * i, 2 * i + 1], [(i, "bad")])
    if error:
        raise error


@pytest.fixture
def opened(monkeypatch):
    """Open such batches -> a train_fsdp.Batches that takes them, its log."""

    def open_them(error: Exception | None = None, count: int = 8):
        monkeypatch.setattr(data, "build_loader", Mock(return_value=local_batches(error, count)))
        args = train_fsdp.parse_flags(ARGV)
        train_fsdp.complete(args, 1, 1, "cpu")
        files = data.scan(str(ROOT / "examples/tiles/train"))
        log = SimpleNamespace(device=torch.device("cpu"), rank=0, bad_images=[], waited=0.0)
        return train_fsdp.Batches(args, files, log, 0), log

    return open_them


def test_the_batches_are_the_loaders_and_none_is_kept(opened):
    batches, log = opened()
    found = []
    kept = weakref.ref(batches.current[0][0])
    for step in range(4):
        found += [int(images[0, 0, 0, 0]) for images, _ in batches.next(step)]
        assert not batches.failed and (kept() is None) == (step > 0)
    assert found == [*range(8)]
    assert [step for _, _, step in log.bad_images] == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), TypeError("a bug")])
def test_after_a_failure_the_last_batch_comes_again_with_the_first_error(error, opened):
    batches, log = opened(error, count=4)
    batches.next(0)
    good = batches.next(1)
    assert not batches.failed and len(log.bad_images) == 4
    for step in 2, 3:
        assert batches.next(step) is good and str(error) in batches.problem
    assert len(log.bad_images) == 4  # nothing is counted twice


@pytest.mark.parametrize("bad", [0, 3, 4])
def test_a_few_broken_images_of_a_small_data_set_do_not_end_a_run(bad, tmp_path, capsys):
    """Although one of 24 is more than the default --max-bad, 1 %."""
    from images import copy_tiles

    copy_tiles(tmp_path / "images", 24)
    for i in range(bad):
        (tmp_path / "images" / f"broken{i}.jpg").write_text("no image")
    flags = [*TINY_ARGV, "--data", str(tmp_path / "images"), "--batch", "8", "--steps", "20"]
    status = train_fsdp.main([*flags, "--out", str(tmp_path / "out")])
    assert status == (1 if bad > 3 else 0)
    listed = tmp_path / "out" / "bad_images.csv"
    lines = listed.read_text().splitlines()[1:] if listed.exists() else []
    assert len(lines) == bad and all("/broken" in line for line in lines)
    if bad > 3:
        assert "4 of 28 images are unreadable, more than --max-bad 0.01" in capsys.readouterr().err
        assert train_fsdp.main([*flags, "--max-bad", "0.2", "--out", str(tmp_path / "out")]) == 0
