"""--profile: the window of a real run, and a disk that is full."""

import gzip
import json
import shlex

from ranks import files_limited

import train_fsdp

RUN = "--model tiny --img-size 32 --batch 2 --workers 0 --device cpu --precision fp32"
RUN += " --save-every none --steps 7 --profile 2 --out "


def test_a_run_with_a_window(tmp_path, capsys):
    assert train_fsdp.main(shlex.split(f"{RUN}{tmp_path}")) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"event": "profile", "first_step": 6} in lines
    trace, table = (tmp_path / "profile" / f"rank_00000.{end}" for end in ("json.gz", "txt"))
    with gzip.open(trace) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if "dur" in event]
    assert names.count("Optimizer.step#AdamW.step") == names.count("wait for data") == 2
    assert "aten::mm " in table.read_text()
    assert f"profile from step 6, in {trace} and {table}\n" in capsys.readouterr().out


def test_a_full_disk_is_a_warning(tmp_path, capsys):
    with files_limited():  # of these files the trace alone is larger
        assert train_fsdp.main(shlex.split(f"{RUN}{tmp_path}")) == 0
    out = capsys.readouterr().out
    assert "warning: no profile: " in out and "done: 7 steps" in out
