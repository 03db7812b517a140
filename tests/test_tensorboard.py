"""runtime/log.py: what a line says, and that TensorBoard's own reader reads what the log says."""

import io
import json
import shutil
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from parity import TILES

import train_fsdp
from runtime import log
from runtime.config import Config
from runtime.run import resolve, with_images

ARGV = (
    f"--model tiny --img-size 32 --batch 4 --steps 6 --log-every 1 --save-every 4 --workers 0 "
    f"--device cpu --precision fp32 --data {TILES} --tensorboard"
).split()


def test_tensorboard_reads_what_the_log_says(tmp_path):
    """Of a run that was resumed in its middle too, whose last steps are made twice."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert train_fsdp.main([*ARGV, "--out", str(tmp_path)]) == 0
    shutil.rmtree(tmp_path / "step_00000006")
    assert train_fsdp.main([*ARGV, "--out", str(tmp_path)]) == 0
    expected: dict[str, dict[int, float]] = defaultdict(dict)  # the last that was logged counts
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        event, step = record.pop("event"), record.pop("step", None)
        for key, value in record.items():
            if step and type(value) in (int, float):
                expected[f"{event}/{key}"][step] = float(np.float32(value))
    assert {"step/grad_norm", "step/lr", "step/images_per_second", "save/seconds"} <= {*expected}
    read = reader.EventAccumulator(str(tmp_path / "tensorboard" / "real"), {"scalars": 0})
    read.Reload()
    curves = {tag: {e.step: e.value for e in read.Scalars(tag)} for tag in read.Tags()["scalars"]}
    assert curves == expected and [*curves["step/loss"]] == [1, 2, 3, 4, 5, 6]
    assert len(read.Scalars("step/loss")) == 6


def test_without_the_package_it_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("runtime.config.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as leave:
        train_fsdp.main(ARGV)
    printed = capsys.readouterr()
    assert leave.value.code == 2 and printed.err.endswith("not here: pip install it\n")


def test_a_full_disk_ends_the_curves_and_not_the_run(tmp_path, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    written = log.Log(io.StringIO())
    written.tensorboard = SimpleNamespace(add_scalar=full)
    written.write("step", step=1, loss=0.5)
    assert json.loads(written.file.getvalue()) == {"event": "step", "step": 1, "loss": 0.5}
    assert capsys.readouterr().out.startswith("warning: TensorBoard's file cannot be written now")


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(log, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def test_a_line_has_the_rate_of_its_own_steps_and_the_memory_of_the_device(clock, monkeypatch):
    """Nothing is counted twice, a save not at all."""
    monkeypatch.setattr(log, "peak_flops", lambda device: (1e12, "made up"))
    monkeypatch.setattr(log, "device_power", lambda device: {})
    monkeypatch.setattr(
        log, "device_memory", lambda device: {"peak_allocated_gib": float(device.index)}
    )
    # with --cpu-offload the norm is on the CPU, the memory is that of the GPU
    config = Config("tiny", 32, mode="ddp", batch=4, steps=8)
    written, run = log.Log(io.StringIO()), with_images(resolve(config, 1, 1), 100)
    written.begin(run, torch.device("cuda", 3), 0)
    meter = log.Meter(0, 4)
    for step in range(6):
        with meter.data_wait():
            clock.seconds += 0.5
        clock.seconds += 1.5
        if step % 2:
            loss = float("nan") if step == 5 else 0.25
            written.step(step, loss, 2.0, 1e-3, meter, SimpleNamespace(count=7))
            with meter.paused():
                clock.seconds += 100
    lines = [json.loads(line) for line in written.file.getvalue().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert [line["loss"] for line in lines] == [0.25, 0.25, None]
    for line in lines:
        assert (line["step_seconds"], line["data_seconds"]) == (2, 0.5)
        assert line["images_per_second"] == 2 and line["bad_images"] == 7
        assert line["peak_allocated_gib"] == 3
        assert line["mfu"] == pytest.approx(2 * run.flops_per_image() / 1e12)
    end = meter.summary()
    assert end["step_seconds"] == 2 and end["seconds"] == 312 and end["data_share"] == 3 / 312
