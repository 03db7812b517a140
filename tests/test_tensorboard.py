"""--tensorboard: what TensorBoard's own reader reads is what log.jsonl says."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from parity import TILES
from ranks import environment

import train_fsdp
from runtime.log import Log

ARGV = (
    f"--model tiny --img-size 32 --batch 4 --steps 6 --log-every 1 --save-every 4 --workers 0 "
    f"--device cpu --precision fp32 --data {TILES} --tensorboard"
).split()


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """No launcher's variables from the shell that runs the tests."""
    for name in environment(0, 1, 0):
        if name.startswith(("RANK", "WORLD", "LOCAL", "MASTER")):
            monkeypatch.delenv(name, raising=False)


def curves_of_log(path: Path) -> dict[str, list[tuple[int, float]]]:
    """EVENT/KEY -> (step, value as fp32) of each; a run that resumes makes its steps anew."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        event = record.pop("event")
        if event == "start":
            found = defaultdict(
                dict,
                {
                    tag: {s: v for s, v in curve.items() if s <= record["begin"]}
                    for tag, curve in found.items()
                },
            )
        if step := record.pop("step", None):
            for key, value in record.items():
                if isinstance(value, float | int) and not isinstance(value, bool):
                    found[f"{event}/{key}"][step] = float(np.float32(value))
    return {tag: [*curve.items()] for tag, curve in found.items() if curve}


def test_tensorboard_reads_what_the_log_says(tmp_path):
    """Of a run that was resumed in its middle too, whose last steps are made twice."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = ["--out", str(tmp_path)]
    assert train_fsdp.main([*ARGV, *out]) == 0
    first = curves_of_log(tmp_path / "log.jsonl")
    assert train_fsdp.main([*ARGV, *out, "--resume", str(tmp_path / "step_00000004")]) == 0
    expected = curves_of_log(tmp_path / "log.jsonl")
    assert expected.keys() == first.keys() and expected["step/loss"] == first["step/loss"]
    assert expected["step/step_seconds"][4:] != first["step/step_seconds"][4:]  # made anew
    assert {"step/grad_norm", "step/lr", "step/images_per_second", "save/seconds"} <= {*expected}
    read = reader.EventAccumulator(str(tmp_path / "tensorboard" / "real"), {"scalars": 0})
    read.Reload()
    curves = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert curves == expected
    assert [step for step, _ in curves["step/loss"]] == [1, 2, 3, 4, 5, 6]


def test_without_the_package_it_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("runtime.config.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as leave:
        train_fsdp.main(ARGV)
    printed = capsys.readouterr()
    assert leave.value.code == 2 and printed.err.endswith("not here: pip install it\n")


def test_a_full_disk_ends_the_curves_and_not_the_run(tmp_path, capsys):
    class Full:
        def add_scalar(self, *args):
            raise OSError(28, "No space left on device")

    with open(tmp_path / "log.jsonl", "w") as file:
        log = Log(file)
        log.scalars = Full()
        for step in (1, 2):
            log.write("step", step=step, loss=0.5)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
    assert capsys.readouterr().out.count("warning: ") == 1
