"""--tensorboard: its own reader reads what the log says."""

import shlex
import shutil

import numpy as np
import pytest
from ranks import TILES, TINY_ARGV, read_records

import train_fsdp

FLAGS = shlex.split("--batch 4 --steps 3 --log-every 1 --save-every 2 --tensorboard")
ARGV = [*TINY_ARGV, *FLAGS, "--data", TILES]


def test_tensorboard_reads_what_the_log_says(tmp_path):
    """Of a run that was resumed in its middle too, whose last step is made twice."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert train_fsdp.main([*ARGV, "--out", str(tmp_path)]) == 0
    shutil.rmtree(tmp_path / "step_00000003")
    assert train_fsdp.main([*ARGV, "--out", str(tmp_path)]) == 0
    records = read_records(tmp_path / "log.jsonl", "step")
    steps = {record["step"]: record for record in records}  # the last counts
    read = reader.EventAccumulator(str(tmp_path / "tensorboard" / "real"), {"scalars": 0})
    read.Reload()
    for key in ("loss", "grad_norm", "lr", "images_per_second"):
        curve = [(e.step, e.value) for e in read.Scalars(f"step/{key}")]
        assert curve == [(step, float(np.float32(steps[step][key]))) for step in (1, 2, 3)]
