"""runtime/step_profile.py: traces with known answers, and the window of a real run."""

import json
import shlex

import pytest

import train_fsdp
from runtime import step_profile


def event(name: str, cat: str, start: float, end: float) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start}


# two steps of 100 us on a GPU; what runs on the host is of no account but the wait for data
GPU = [
    event("wait for data", "user_annotation", 0, 10),
    event("gemm", "kernel", 5, 40),
    event("Memcpy HtoD", "gpu_memcpy", 30, 45),
    event("ncclDevKernel_AllGather_RING_LL", "kernel", 20, 60),  # 15 exposed
    event("aten::mm", "cpu_op", 0, 99),
    event("Optimizer.step#AdamW.step", "user_annotation", 0, 95),  # on the host: not the place
    event("Optimizer.step#AdamW.step", "gpu_user_annotation", 65, 90),
    event("adamw", "kernel", 70, 85),
    event("wait for data", "user_annotation", 100, 120),
    event("gemm", "kernel", 125, 200),
]
CPU = [
    event("aten::item", "cpu_op", 900, 1005),  # began before the window
    event("wait for data", "user_annotation", 1000, 1010),
    event("autograd::engine::evaluate_function: X", "cpu_op", 1010, 1090),  # waits inside
    event("aten::mm", "cpu_op", 1010, 1040),
    event("aten::empty", "cpu_op", 1020, 1025),
    event("gloo:all_gather", "user_annotation", 1030, 1060),
    event("Optimizer.step#AdamW.step", "user_annotation", 1065, 1095),
    event("aten::_fused_adamw_", "cpu_op", 1070, 1090),
    event("aten::item", "cpu_op", 1096, 1100),
]
# microseconds of compute, communication, optimizer, data, idle
SHARES = {
    "GPU": (GPU, 2, (40 + 75, 15, 15, 5 + 20, 10 + 15 + 5)),
    "CPU": (CPU, 1, (5 + 30 + 4, 20, 20, 5, 10 + 6)),
}


@pytest.mark.parametrize("place", SHARES)
def test_every_moment_of_a_trace_belongs_to_one_kind(place):
    events, steps, micro = SHARES[place]
    expected = [us / 1e6 / steps for us in micro]
    found = step_profile.shares(events)
    assert [*found] == [*step_profile.KINDS] and [*found.values()] == pytest.approx(expected)


def test_a_run_with_a_window(tmp_path, capsys):
    argv = "--model tiny --img-size 32 --batch 2 --workers 0 --device cpu --precision fp32"
    argv += f" --save-every none --steps 7 --profile 2 --out {tmp_path}"
    assert train_fsdp.main(shlex.split(argv)) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if line["event"] == "profile"]
    assert found["first_step"] == 6
    assert found["compute"] > found["optimizer"] > 0 and found["data"] > 0
    events = step_profile.read_trace(tmp_path / "profile" / "rank_00000.json.gz")
    names = [e["name"] for e in events]
    assert names.count("Optimizer.step#AdamW.step") == names.count("wait for data") == 2
    assert f"profile from step 6, in {tmp_path}/profile/rank_00000" in capsys.readouterr().out
