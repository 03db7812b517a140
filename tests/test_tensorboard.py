"""runtime/log.py: what a line says, and that TensorBoard's own reader reads what the log says."""

import io
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from parity import TILES

import train_fsdp
from runtime import log
from runtime.agreement import StepResult
from runtime.config import Config
from runtime.image_source import ImageFacts
from runtime.run import resolve, with_images

ARGV = (
    f"--model tiny --img-size 32 --batch 4 --steps 3 --log-every 1 --save-every 2 --workers 0 "
    f"--device cpu --precision fp32 --data {TILES} --tensorboard"
).split()


def test_tensorboard_reads_what_the_log_says(tmp_path):
    """Of a run that was resumed in its middle too, whose last step is made twice."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert train_fsdp.main([*ARGV, "--out", str(tmp_path)]) == 0
    shutil.rmtree(tmp_path / "step_00000003")
    assert train_fsdp.main([*ARGV, "--out", str(tmp_path)]) == 0
    lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    steps = {line["step"]: line for line in lines if line["event"] == "step"}  # the last counts
    read = reader.EventAccumulator(str(tmp_path / "tensorboard" / "real"), {"scalars": 0})
    read.Reload()
    for key in ("loss", "grad_norm", "lr", "images_per_second"):
        curve = [(e.step, e.value) for e in read.Scalars(f"step/{key}")]
        assert curve == [(step, float(np.float32(steps[step][key]))) for step in (1, 2, 3)]


def test_without_the_package_it_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("runtime.config.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as leave:
        train_fsdp.main(ARGV)
    assert leave.value.code == 2 and capsys.readouterr().err.endswith("pip install it\n")


def test_a_line_has_the_rate_of_its_own_steps_and_the_memory_of_the_device(monkeypatch):
    """Nothing is counted twice, a save not at all; a full disk ends the curves and not the run."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(log, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    monkeypatch.setattr(log, "peak_flops", lambda device: (1e12, "made up"))
    monkeypatch.setattr(log, "device_memory", lambda device: {"peak_allocated_gib": 3.0})

    def full(*arguments):
        raise OSError(28, "No space left on device")

    config = Config("tiny", 32, mode="ddp", batch=4, steps=8, tensorboard=True)
    written, run = log.Log(0), with_images(resolve(config, 1, 1), ImageFacts(100))
    written.run, written.device, written.file = run, torch.device("cuda", 3), io.StringIO()
    written.tensorboard = SimpleNamespace(add_scalar=full)
    meter = log.Meter(0, 4)
    for step in range(6):
        meter.waited += 0.5
        now.seconds += 2
        if step % 2:
            loss = float("nan") if step == 5 else 0.25
            verdict = StepResult(step, loss, 2.0, 0, *[False] * 6)
            written.step(verdict, 1e-3, meter)
            with meter.paused():
                now.seconds += 100
    lines = [json.loads(line) for line in written.file.getvalue().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(2, 0.25), (4, 0.25), (6, None)]
    for line in lines:
        assert (line["step_seconds"], line["data_seconds"]) == (2, 0.5)
        assert line["images_per_second"] == 2
        assert line["peak_allocated_gib"] == 3
        assert line["mfu"] == pytest.approx(2 * run.flops_per_image() / 1e12)
    end = meter.summary()
    assert end["seconds"] == 312 and end["data_wait_fraction"] == 3 / 312
