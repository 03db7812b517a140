"""verify.py tells whether a script trains the same on several ranks, whatever it is written with.

The scripts here are plain PyTorch, with a fault or without; each row is one of them.
"""

import contextlib
import io
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from ranks import on_ranks, status_of

import verify

LOOP = """
import gc, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

mode, fault = sys.argv[1].split(":")
cpu = torch.device("cpu")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if fault == "seeds" else 0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
model[0].register_buffer("seen", torch.zeros(()))
if fault == "batch norm":
    model[1] = nn.BatchNorm1d(8)
early = torch.optim.AdamW(model.parameters(), lr=1e-2)
plain = model
if world > 1 and mode == "ddp":
    model = DistributedDataParallel(model)
elif world > 1 and mode == "fsdp2":
    for layer in (model[0], model[-1], model):
        fully_shard(layer)
elif world > 1 and mode in ("flat", "orig"):
    model[0] = FullyShardedDataParallel(model[0], use_orig_params=mode == "orig", device_id=cpu)
    model = FullyShardedDataParallel(model, use_orig_params=mode == "orig", device_id=cpu)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if fault == "early":
    optimizer = early
gc.freeze()  # as a trainer may, so that rows of FSDP1 find their modules nevertheless
if fault == "rate":
    optimizer.param_groups[0]["lr"] *= world
for step in range(6):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[rank::world]
    called = plain if fault == "past" else model
    loss = called(x).square().mean()
    if fault == "factor":
        loss = loss * world
    if fault == "error" and world > 1 and step == 2:
        raise ValueError("a bad batch")
    if fault == "hang" and rank == 1:
        time.sleep(1000)
    loss.backward()
    if fault == "alone" and rank == 1 and step == 1:
        continue
    optimizer.step()
    optimizer.zero_grad()
    if fault == "counts":
        plain[0].seen += world
    if fault == "weights" and step == 1 and rank == 1:
        with torch.no_grad():
            plain[-1].bias.add_(0.5)
"""
SCRIPT_THAT_RESUMES = """
import os, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
begin = 0
if os.path.exists("saved.pt"):
    begin, weights, states = torch.load("saved.pt")
    model.load_state_dict(weights)
    if "states" in sys.argv:
        optimizer.load_state_dict(states)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.distributed.init_process_group("gloo")
for step in range(begin, 10):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))[rank::world]
    model(x).square().mean().backward()
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
    optimizer.zero_grad()
    torch.distributed.barrier()
    if rank == 0 and "saves" in sys.argv:
        torch.save((step + 1, model.state_dict(), optimizer.state_dict()), "saved.pt")
"""


VERDICTS = ("same", "differs", "raised")


def call_verify(argv: list[str]) -> tuple[int, str]:
    """In a process that has imported PyTorch: verify.main's status, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = status_of(verify.main, argv)
    return status, printed.getvalue()


def run_verify(folder: Path, *argv: object) -> tuple[int, dict[str, str], str]:
    """Run verify.py -> its status, its verdict on each row, all that it printed."""
    command = [*map(str, argv)]
    status, printed = on_ranks(1, partial(call_verify, command), folder / "verify", 500)[0]
    rows: dict[str, str] = {}
    for verdict in VERDICTS:
        lines = [line.partition(f"  {verdict} ") for line in printed.splitlines()]
        rows |= {row.strip(): verdict for row, found, _ in lines if found}
    return status, rows, printed


@pytest.fixture
def loop(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "resumes.py").write_text(SCRIPT_THAT_RESUMES)
    return tmp_path / "loop.py"


DAILY = {f"{mode}:none": "same" for mode in ("ddp", "fsdp2", "flat", "orig")}
DAILY |= dict.fromkeys(("fsdp2:seeds", "flat:early", "ddp:past", "ddp:weights"), "differs")
REST = dict.fromkeys(("fsdp2:early", "ddp:rate", "orig:factor", "ddp:counts"), "differs")
REST |= dict.fromkeys(("ddp:error", "ddp:hang", "fsdp2:alone"), "raised")


@pytest.mark.parametrize("rows", [DAILY, pytest.param(REST, marks=pytest.mark.full)])
def test_sound_loops_are_the_same_and_faults_are_told(loop, rows):
    """With one line for each row, and one sentence for each kind of fault that is known."""
    rows = {"ddp:none": "same"} | rows
    command = ("--timeout", 60 if rows.keys() >= DAILY.keys() else 20, "--modes", ",".join(rows))
    status, found, printed = run_verify(loop.parent, *command, loop, "{mode}")
    assert (status, found) == (1, rows), printed
    if "ddp:past" in rows:
        assert "ddp:past: each rank has gradients of its own" in printed
        assert "flat:early: no gradient" in printed
    else:
        assert "ddp:counts: buffers" in printed


@pytest.mark.parametrize("bound", [1e-3, 1e-9, 0.0])
def test_what_is_not_a_number_differs_more_than_any_bound_allows(bound):
    for value in (math.nan, math.inf, -3e38):
        found = [{"fc.weight": torch.tensor([0.0, value])}]
        worst = verify.find_worst(found, {"fc.weight": torch.zeros(2)}, {"fc.weight": bound})
        assert worst[0] > 1, value


def test_a_script_that_takes_no_mode_runs_as_it_is(loop):
    """All is the same: status 0, and nothing is left behind; with BatchNorm, it is named."""
    status, rows, printed = run_verify(loop.parent, "--steps", 2, loop, "ddp:none")
    assert (status, rows) == (0, {"2 ranks": "same"}), printed
    assert "outputs" not in printed
    status, rows, printed = run_verify(loop.parent, "--steps", 2, loop, "ddp:batch norm")
    assert (status, rows) == (1, {"2 ranks": "differs"}), printed
    assert "2 ranks: buffers differ, such as BatchNorm's" in printed


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (["saves", "states"], "same"),
        pytest.param(["saves"], "differs", marks=pytest.mark.full),
        pytest.param([], "differs", marks=pytest.mark.full),
    ],
)
def test_a_restart_goes_on_where_the_run_was_stopped(loop, words, verdict):
    script = loop.with_name("resumes.py")
    command = ("--resume-after", 3, "--steps", 2, script, *words)
    status, rows, printed = run_verify(loop.parent, *command)
    assert status == int(verdict != "same"), printed
    assert rows == dict.fromkeys(("one process", "2 ranks"), verdict), printed
    assert ("until the restart" in printed) == (verdict != "same")


def test_words_are_filled_in_and_paths_found(tmp_path, monkeypatch):
    words = ["{mode}", "{group}", "--fsdp", "{fsdp}", "--group={group}", "--batch", "{8/ranks}"]
    assert verify.fill(words, "ddp", 2) == ["ddp", "", "--batch", "4"]
    found = verify.fill(words, "hybrid/1", 4)
    assert found == ["hybrid", "2", "--fsdp", "1", "--group=2", "--batch", "2"]
    assert verify.fill(["--fsdp", "{fsdp}", "{ranks}"], "full_shard", 2) == ["--fsdp", "2", "2"]
    (tmp_path / "data.txt").touch()
    monkeypatch.chdir(tmp_path)
    words = [verify.absolute(word) for word in ("data.txt", "--data=data.txt", "--fast", "no.txt")]
    path = str(tmp_path / "data.txt")
    assert words == [path, f"--data={path}", "--fast", "no.txt"]


@pytest.mark.parametrize(
    "argv",
    [
        ["nowhere.py"],
        ["--ranks", "1", "{}"],
        ["--modes", "ddp", "{}"],
        ["{}", "{{fsdp}}"],
        ["--ranks", "3", "{}", "{{8/ranks}}"],
    ],
)
def test_a_wrong_command_ends_with_status_2(loop, argv, capsys):
    with pytest.raises(SystemExit) as leave:
        verify.main([word.format(loop) for word in argv])
    assert leave.value.code == 2
    assert capsys.readouterr().err


# --- our own scripts

TILES = ROOT / "examples" / "tiles" / "train"
SHORT = ["--data", TILES, "--img-size", 32, "--workers", 0, "--mode", "{mode}"]
GROUPS = ["--group", "{group}"]
ENGINES = ["--fsdp", "{fsdp}", *GROUPS]
OURS = {
    "own_model": ["examples/own_model.py", "{mode}", "{group}", "--precision", "fp32"],
    "minimal": ["examples/minimal.py", *SHORT, "--batch", "{8/ranks}", *GROUPS],
    "trainer": ["train_fsdp.py", *SHORT, "--model", "tiny", "--global-batch", 8, "--steps", 4],
}
OURS["own_model"] += ["--fsdp", "{fsdp}"]
OURS["trainer"] += ["--precision", "fp32", "--device", "cpu", "--out", "run", *ENGINES]


@pytest.mark.parametrize("name", OURS)
def test_our_scripts_are_the_same_in_a_row(name, tmp_path):
    rows = {"own_model": "full_shard/1", "minimal": "zero1", "trainer": "hybrid"}
    command = ("--steps", 2, "--modes", rows[name], *OURS[name])
    status, found, printed = run_verify(tmp_path, *command)
    assert (status, found) == (0, {rows[name]: "same"}), printed


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", OURS)
def test_our_scripts_are_the_same_in_all_rows(name, ranks, tmp_path):
    status, found, printed = run_verify(tmp_path, "--ranks", ranks, *OURS[name])
    assert status == 0 and len(found) == (7 if name == "minimal" else 12), printed


@pytest.mark.full
def test_a_run_of_the_trainer_goes_on_after_a_restart(tmp_path):
    command = ["--resume-after", "2", "--steps", "2", "--modes", "ddp,hybrid", *OURS["trainer"]]
    status, _, printed = run_verify(tmp_path, *command, "--save-every", "2steps")
    assert status == 0, printed
