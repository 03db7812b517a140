"""--profile: the window of a real run."""

import gzip
import json
import shlex

from ranks import TINY_ARGV, read_records

import train_fsdp

ARGV = [*TINY_ARGV, *shlex.split("--batch 2 --save-every none --steps 7 --profile 2 --out")]


def test_a_run_with_a_window(tmp_path):
    assert train_fsdp.main([*ARGV, str(tmp_path)]) == 0
    found = read_records(tmp_path / "log.jsonl", "profile")
    assert found == [{"event": "profile", "first_step": 6}]
    trace, table = (tmp_path / "profile" / f"rank_00000.{end}" for end in ("json.gz", "txt"))
    with gzip.open(trace) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if "dur" in event]
    assert names.count("Optimizer.step#AdamW.step") == 2
    assert "aten::mm " in table.read_text()
