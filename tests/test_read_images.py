"""--run-mode io, which reads images and trains nothing, ends as training does."""

import errno
import itertools
import shlex
import signal
from unittest.mock import Mock

import pytest
from images import noise_image
from ranks import TILES, TINY_ARGV, main_with_signals, read_log, read_records

import data

FLAGS = shlex.split("--run-mode io --batch 2 --steps 6 --log-every 1")
ARGV = [*TINY_ARGV, *FLAGS, "--data", TILES]


@pytest.fixture
def read(tmp_path, capsys):
    """read(*flags, received=...): run it here -> status, end record, standard error."""

    def run(*flags, received=()):
        out = tmp_path / "out"
        status = main_with_signals([*ARGV, "--out", str(out), *flags], received)
        records = read_records(out / "log.jsonl")
        return status, records[-1], capsys.readouterr().err

    return run


def test_it_reads_every_step_and_has_no_model_and_no_loss(read, monkeypatch, tmp_path):
    monkeypatch.setattr("shard.apply", Mock(side_effect=AssertionError("a model was sharded")))
    status, end, _ = read()
    assert (status, end["event"], end["reason"], end["steps"]) == (0, "end", "done", 6)
    assert "loss" not in end and end["images_per_second"] > 0
    _, steps, _ = read_log(tmp_path / "out" / "log.jsonl")
    assert [step["loss"] for step in steps] == [None, None, None, None, None, None]


def test_a_signal_ends_it(read):
    status, end, _ = read(received=[signal.SIGTERM])
    assert (status, end["reason"], end["steps"], end["problem"]) == (0, "signal", 1, None)


def test_a_failed_loader_ends_it_with_a_sentence(read, monkeypatch):
    build_loader = data.build_loader

    def failing_loader(*args, **kwargs):
        yield from itertools.islice(build_loader(*args, **kwargs), 3)  # one is not measured
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(data, "build_loader", failing_loader)
    status, end, error = read()
    assert status == 1 and end["steps"] == 2 and "Traceback" not in error
    assert end["reason"] not in ("failed", "done")
    assert "rank 0: the data loader failed" in end["problem"]
    assert end["problem"] in error


def test_too_many_bad_images_end_it_with_a_sentence(read, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(6):
        noise_image(i).save(folder / f"{i}.jpg")
    (folder / "6.jpg").write_bytes(b"not an image")
    status, end, error = read("--data", str(folder), "--max-bad", "0")
    assert status == 1 and "Traceback" not in error
    assert end["reason"] not in ("failed", "done")
    assert "1 of 7 images are unreadable, more than --max-bad 0 allows" in end["problem"]
    assert end["problem"] in error
