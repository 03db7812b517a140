"""runtime/step_profile.py: traces with known answers, and the window of a real run."""

import json

import pytest

import train_fsdp
from runtime import step_profile


def event(name: str, cat: str, start: float, end: float, tid: int = 1) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "tid": tid}


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
    event("wait for data", "user_annotation", 1000, 1010),
    event("autograd::engine::evaluate_function: X", "cpu_op", 1010, 1090),  # waits inside
    event("aten::mm", "cpu_op", 1010, 1040),
    event("aten::empty", "cpu_op", 1020, 1025),
    event("gloo:all_gather", "user_annotation", 1030, 1060, tid=2),
    event("Optimizer.step#AdamW.step", "user_annotation", 1065, 1095),
    event("aten::_fused_adamw_", "cpu_op", 1070, 1090),
    event("aten::item", "cpu_op", 1096, 1100),
]


def test_intervals():
    assert step_profile.union([(5, 7), (0, 2), (1, 3), (7, 8)]) == [(0, 3), (5, 8)]
    assert step_profile.common([(0, 3), (5, 8)], [(2, 6), (7, 9)]) == [(2, 3), (5, 6), (7, 8)]
    assert step_profile.common([], [(0, 1)]) == [] and step_profile.length([(0, 3), (5, 8)]) == 6


def test_shares_of_a_gpu():
    found = step_profile.shares(GPU, 2)
    micro = {"compute": 40 + 75, "communication": 15, "optimizer": 15, "data": 5 + 20}
    micro["idle"] = 200 - sum(micro.values())
    assert found == pytest.approx({kind: us / 2e6 for kind, us in micro.items()})


def test_shares_of_a_cpu():
    found = step_profile.shares(CPU, 1)
    micro = {"compute": 30 + 4, "communication": 20, "optimizer": 20, "data": 10, "idle": 16}
    assert found == pytest.approx({kind: us / 1e6 for kind, us in micro.items()})


def test_kernels_are_ranked_without_what_they_call():
    assert step_profile.by_kernel(GPU, 2)[:2] == [
        ("gemm", pytest.approx(55e-6)),
        ("ncclDevKernel_AllGather_RING_LL", pytest.approx(20e-6)),
    ]
    found = dict(step_profile.by_kernel(CPU, 1))
    assert found["aten::mm"] == pytest.approx(25e-6) and found["aten::empty"] == pytest.approx(5e-6)
    assert "autograd::engine::evaluate_function: X" not in found


RUN = [
    "--model",
    "tiny",
    "--img-size",
    "32",
    "--batch",
    "2",
    "--workers",
    "0",
    "--device",
    "cpu",
    "--save-every",
    "none",
]


def test_a_run_with_a_window(tmp_path, capsys):
    argv = [*RUN, "--profile", "2", "--out", str(tmp_path)]
    assert train_fsdp.main([*argv, "--steps", "7"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if line["event"] == "profile"]
    assert (found["first_step"], found["steps"], found["ranks"]) == (6, 2, [0])
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert list(found["shares"]) == list(step_profile.KINDS)
    assert found["compute"] > found["optimizer"] > 0 and found["data"] > 0
    events = step_profile.read_trace(tmp_path / "profile" / "rank_00000.json.gz")
    names = [e["name"] for e in events]
    assert names.count("Optimizer.step#AdamW.step") == 2 and "aten::_fused_adamw_" in names
    assert names.count("wait for data") == 2
    ends = [e["ts"] + e["dur"] for e in events if e["name"].startswith("aten::")]
    begin = min(e["ts"] for e in events if e["name"] == "wait for data")
    whole = sum(found[kind] for kind in step_profile.KINDS)
    assert whole == pytest.approx((max(ends) - begin) / 2e6, rel=0.05)
    assert "exposed comm." in capsys.readouterr().out


def test_a_run_too_short_for_a_window_says_so(tmp_path, capsys):
    assert train_fsdp.main([*RUN, "--profile", "--steps", "7", "--out", str(tmp_path)]) == 0
    assert "warning: --profile 3 is left out: it needs 8 steps, 7 remain" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_a_run_without_steps_has_nothing_to_profile(capsys):
    with pytest.raises(SystemExit) as leave:
        train_fsdp.main(["--profile", "--run", "io"])
    assert leave.value.code == 2 and "--run io makes none" in capsys.readouterr().err
