"""--run-mode io, which reads images and trains nothing, ends as training does."""

import errno
import itertools
import json
import signal

import pytest
from conftest import ROOT
from images import noise_image

import data
import train_fsdp

ARGV = (
    f"--run-mode io --model tiny --img-size 32 --batch 2 --steps 6 --log-every 1 --workers 0 "
    f"--device cpu --data {ROOT}/examples/tiles/train"
).split()


@pytest.fixture
def read(tmp_path, capsys):
    """read(*flags, received=...): run it here -> status, end record, standard error."""

    def run(*flags, received=()):
        out = tmp_path / "out"
        status = train_fsdp.main([*ARGV, "--out", str(out), *flags], signals=received)
        lines = (out / "log.jsonl").read_text().splitlines()
        return status, json.loads(lines[-1]), capsys.readouterr().err

    return run


def test_it_reads_every_step_and_has_no_loss(read):
    status, end, _ = read()
    assert (status, end["event"], end["reason"], end["steps"]) == (0, "end", "done", 6)
    assert "loss" not in end and end["images_per_second"] > 0


def test_a_signal_ends_it(read):
    status, end, _ = read(received=[signal.SIGTERM])
    assert (status, end["reason"], end["steps"], end["problem"]) == (0, "signal", 1, None)


def test_a_failed_loader_ends_it_with_a_sentence(read, monkeypatch):
    build_loader = data.build_loader

    def failing_loader(*args, **kwargs):
        yield from itertools.islice(build_loader(*args, **kwargs), 3)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(data, "build_loader", failing_loader)
    status, end, error = read()
    assert status == 1 and end["steps"] == 3 and "Traceback" not in error
    assert end["reason"] not in ("failed", "done")
    assert "rank 0: the data loader failed (reading data in step 4)" in end["problem"]
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
