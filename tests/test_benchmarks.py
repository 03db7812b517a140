"""The benchmarks of the step run at tiny shapes, and what they compare is the same computation."""

import json

import pytest
from ranks import python


def test_every_part_for_a_gpu_passes_in_small_on_a_cpu(tmp_path):
    """What the day with a GPU depends on; training equals plain PyTorch's in every mode."""
    python("-m", "benchmarks.gpu", "--device", "cpu", "--out", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {*["matrix", "run", "grid", "sharded", "loop", "peers"]}
    assert all(row["ok"] for row in rows)
    matrix = [row for row in rows if row["part"] == "matrix"]
    assert len(matrix) >= 30 and all("difference" in row for row in matrix)
    assert "0 failed" in (tmp_path / "report.md").read_text()


@pytest.mark.full
def test_the_step_is_compared_with_the_peers():
    quick = "--model tiny --device cpu --img-size 32 --rounds 1 --threads 1 --batch 2"
    out = python("-m", "benchmarks.step", *quick.split())
    assert "x transformers" in out and "x timm" in out
