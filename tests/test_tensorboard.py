"""runtime/log.py: what a line says, and that TensorBoard's own reader reads what the log says."""

import io
import json
import shlex
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from parity import TILES
from ranks import TINY_ARGV, read_records

import train_fsdp
from runtime import log
from runtime.agreement import StepResult
from runtime.config import Config
from runtime.image_source import ImageFacts
from runtime.run import resolve, with_images

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


def test_without_the_package_it_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("runtime.config.find_spec", Mock(return_value=None))
    with pytest.raises(SystemExit) as leave:
        train_fsdp.main(ARGV)
    assert leave.value.code == 2 and capsys.readouterr().err.endswith("pip install it\n")


def result_of(step: int, loss: float) -> StepResult:
    """A step in which nothing else happened."""
    return StepResult(
        step=step,
        loss=loss,
        norm=2.0,
        consecutive=0,
        bad_loss=False,
        local_loss_nonfinite=False,
        stop=False,
        save=False,
        no_batch=False,
        bad_images=False,
    )


def test_a_line_has_the_rate_of_its_own_steps_and_the_memory_of_the_device(monkeypatch):
    """Nothing is counted twice, a save not at all; a full disk ends the curves and not the run."""
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(log, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(log, "peak_flops", Mock(return_value=(1e12, "made up")))
    monkeypatch.setattr(log, "device_memory", Mock(return_value={"peak_allocated_gib": 3.0}))
    config = Config("tiny", 32, mode="ddp", batch=4, steps=8, tensorboard=True)
    run = with_images(resolve(config, 1, 1), ImageFacts(100))
    written = log.Log(0)
    written.run = run
    written.device = torch.device("cuda", 3)
    written.file = io.StringIO()
    full = OSError(28, "No space left on device")
    written.tensorboard = SimpleNamespace(add_scalar=Mock(side_effect=full))
    meter = log.Meter(0, 4)
    for step, loss in enumerate((0.25, 0.25, 0.25, 0.25, 0.25, float("nan"))):
        meter.waited += 0.5
        clock.return_value += 2
        if step % 2 == 1:
            written.step(result_of(step, loss), 1e-3, meter)
            with meter.paused():
                clock.return_value += 100
    lines = [json.loads(line) for line in written.file.getvalue().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(2, 0.25), (4, 0.25), (6, None)]
    for line in lines:
        assert (line["step_seconds"], line["data_seconds"]) == (2, 0.5)
        assert line["images_per_second"] == 2
        assert line["peak_allocated_gib"] == 3
        assert line["mfu"] == pytest.approx(2 * run.flops_per_image() / 1e12)
    end = meter.summary(reads_only=False)
    assert end["seconds"] == 312 and end["data_wait_fraction"] == 3 / 312
