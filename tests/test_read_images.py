"""--run-mode io, which reads images and trains nothing, ends as training does."""

import errno
import shlex
from unittest.mock import Mock

import pytest
from ranks import TILES, TINY_ARGV, read_log

import train_fsdp

FLAGS = shlex.split("--run-mode io --batch 2 --steps 3 --log-every 1")


@pytest.fixture
def read(tmp_path, capsys):
    """Return a function that reads the tiles -> the exit status, steps, end, standard error."""

    def run():
        out = tmp_path / "out"
        status = train_fsdp.main([*TINY_ARGV, *FLAGS, "--data", TILES, "--out", str(out)])
        _, steps, end = read_log(out / "log.jsonl")
        return status, steps, end, capsys.readouterr().err

    return run


def test_it_reads_every_step_and_has_no_model_and_no_loss(read, monkeypatch):
    monkeypatch.setattr("shard.apply", Mock(side_effect=AssertionError("a model was sharded")))
    status, steps, end, _ = read()
    assert (status, end["reason"], end["steps"]) == (0, "done", 3)
    assert "loss" not in end and end["images_per_second"] > 0
    assert [step["loss"] for step in steps] == [None, None, None]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyError("gain")])
@pytest.mark.parametrize("where", ["ImageList.read", "draw_crop"])
def test_a_failing_disk_ends_it_with_a_sentence_and_a_bug_with_its_traceback(
    where, error, read, monkeypatch, tmp_path
):
    monkeypatch.setattr(f"data.{where}", Mock(side_effect=error))
    status, steps, end, said = read()
    assert (status, steps, end.get("reason")) == (1, [], None)
    assert f"the data loader failed: {type(error).__name__}: {error}" in said
    assert ("Traceback" in said) == isinstance(error, KeyError)
    assert not (tmp_path / "out" / "bad_images.csv").exists()
