"""The benchmarks run in small."""

import json
import re

import pytest
from ranks import python

from benchmarks import gpu

TORCHRUN = "torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m"


@pytest.mark.full
@pytest.mark.minutes
def test_every_part_for_a_gpu_passes_in_small_on_a_cpu(tmp_path):
    """What the day with a GPU depends on; training equals plain PyTorch's in every mode."""
    python("-m", "benchmarks.gpu", "--device", "cpu", "--out", tmp_path, seconds=1100)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {*gpu.PARTS}
    assert [row for row in rows if not row["ok"]] == []
    matrix = [row for row in rows if row["part"] == "matrix"]
    assert len(matrix) >= 25 and all("difference" in row for row in matrix)
    assert "0 failed" in (tmp_path / "report.md").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("benchmarks.step --model tiny --img-size 32 --batch 2 --rounds 1", 3),
        (f"{TORCHRUN} benchmarks.step --model tiny --img-size 32 --batch 2 --rounds 1", 5),
        ("benchmarks.data --images 64 --rounds 1 --steps 2", 10),
    ],
)
def test_each_comparison_prints_its_rows_and_no_warning(command, rows, tmp_path):
    out = python("-m", *command.format(tmp_path).split())
    found = re.findall(r"^\w.*  [\d.e+-]+(?: +\d+\.\d\d){3}$", out, re.MULTILINE)
    assert len(found) == rows and "Warning" not in out, out
