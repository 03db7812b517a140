"""verify.py tells whether a script trains the same on several ranks, whatever it is written with.

The scripts here are plain PyTorch, with a fault or without; each is verified as a user would do it.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from ranks import single_environment

import verify

LOOP = """
import sys, time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

mode, fault = sys.argv[1:3]
cpu = torch.device("cpu")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if fault == "seeds" else 0)
norm = nn.BatchNorm1d(8) if fault == "batch norm" else nn.Identity()
model = nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 3))
model[0].register_buffer("seen", torch.zeros(()))
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
if fault == "rate":
    optimizer.param_groups[0]["lr"] *= world
for step in range(6):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[rank::world]
    called = plain if fault == "past the wrapper" else model
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


def run_verify(*argv: object, cwd: Path = ROOT) -> tuple[int, dict[str, str], str]:
    """Run verify.py; its status, what it tells of each row, and all that it printed."""
    done = subprocess.run(
        [sys.executable, ROOT / "verify.py", *map(str, argv)],
        cwd=cwd,
        env=single_environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    words = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    rows = {line[0]: line[1] for line in words if line[1:2] and line[1] in VERDICTS}
    return done.returncode, rows, done.stdout + done.stderr


VERDICTS = ("same", "differs", "raised")


@pytest.fixture
def loop(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "resumes.py").write_text(SCRIPT_THAT_RESUMES)
    return tmp_path / "loop.py"


@pytest.mark.slow
def test_a_sound_loop_is_the_same_however_it_is_sharded(loop):
    modes = ["ddp", "fsdp2", "flat", "orig"]
    status, rows, printed = run_verify("--modes", ",".join(modes), loop, "{mode}", "none")
    assert (status, rows) == (0, dict.fromkeys(modes, "same")), printed


FAULTS = {
    "seeds": ("fsdp2", "differs"),
    "batch norm": ("ddp", "differs"),
    "early": ("flat", "differs"),
    "rate": ("ddp", "differs"),
    "past the wrapper": ("ddp", "differs"),
    "factor": ("orig", "differs"),
    "error": ("ddp", "raised"),
    "hang": ("ddp", "raised"),
    "alone": ("fsdp2", "raised"),
    "counts": ("ddp", "differs"),
    "weights": ("ddp", "differs"),
}


DAILY = ("seeds", "early", "past the wrapper", "alone")


@pytest.mark.parametrize(
    "fault", [f if f in DAILY else pytest.param(f, marks=pytest.mark.full) for f in FAULTS]
)
def test_a_fault_is_told(loop, fault):
    mode, verdict = FAULTS[fault]
    command = ("--timeout", "20", "--modes", mode, loop, "{mode}", fault)
    status, rows, printed = run_verify(*command)
    assert (status, rows) == (1, {mode: verdict}), printed


@pytest.mark.slow
def test_a_script_that_takes_no_mode_runs_as_it_is(loop):
    status, _, printed = run_verify("--ranks", "3", loop, "ddp", "none")
    assert status == 1, printed  # 8 samples are not divided evenly by three ranks
    status, _, printed = run_verify(loop, "ddp", "none")
    assert status == 0, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "words,verdict", [(["saves", "states"], "same"), (["saves"], "differs"), ([], "differs")]
)
def test_a_restart_goes_on_where_the_run_was_stopped(loop, words, verdict):
    script = loop.with_name("resumes.py")
    status, _, printed = run_verify("--resume-after", "3", "--steps", "2", script, *words)
    assert status == int(verdict != "same"), printed
    assert f"2 ranks      {verdict}" in printed


@pytest.mark.slow
def test_relative_paths_work_and_the_folder_stays_clean(tmp_path):
    (tmp_path / "data.txt").write_text("3")
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "p = torch.nn.Parameter(torch.ones(int(open(sys.argv[1]).read())))\n"
        "for _ in range(4):\n"
        "    p.sum().backward()\n"
        "    torch.optim.SGD([p], lr=0.1).step()\n"
        "open('written', 'w').close()\n"
    )
    status, _, printed = run_verify("train.py", "data.txt", cwd=tmp_path)
    assert status == 0, printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.txt", "train.py"]


def test_what_has_no_value_in_a_row_is_left_out():
    words = ["{mode}", "{group}", "--fsdp", "{fsdp}", "--group={group}", "--batch", "{8/ranks}"]
    assert verify.fill(words, "ddp", 2) == ["ddp", "", "--batch", "4"]
    found = verify.fill(words, "hybrid/1", 4)
    assert found == ["hybrid", "2", "--fsdp", "1", "--group=2", "--batch", "2"]
    assert verify.fill(["--fsdp", "{fsdp}", "{ranks}"], "full_shard", 2) == ["--fsdp", "2", "2"]


@pytest.mark.parametrize(
    "argv", [["nowhere.py"], ["--ranks", "1", "{}"], ["--modes", "ddp", "{}"], ["{}", "{{fsdp}}"]]
)
def test_a_wrong_command_ends_with_status_2(loop, argv, capsys):
    with pytest.raises(SystemExit) as leave:
        verify.main([word.format(loop) for word in argv])
    assert leave.value.code == 2
    assert capsys.readouterr().err


# --- our own scripts

TILES = ROOT / "examples" / "tiles" / "train"
SHORT = ["--data", TILES, "--img-size", 32, "--workers", 0, "--mode", "{mode}"]
OURS = {
    "own_model": ["examples/own_model.py", "{mode}", "{group}", "--precision", "fp32"],
    "minimal": ["examples/minimal.py", *SHORT, "--batch", "{8/ranks}"],
    "trainer": ["train_fsdp.py", *SHORT, "--model", "tiny", "--global-batch", 8, "--steps", 4],
}
OURS["trainer"] += ["--precision", "fp32", "--device", "cpu", "--out", "run"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_our_scripts_are_the_same_in_two_rows(name):
    engine = [] if name == "minimal" else ["--fsdp", "{fsdp}"]
    rows = "zero1,hybrid" if name == "minimal" else "full_shard,hybrid/1"
    group = [] if name == "own_model" else ["--group", "{group}"]
    status, _, printed = run_verify("--modes", rows, *OURS[name], *engine, *group)
    assert status == 0, printed


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", OURS)
def test_our_scripts_are_the_same_in_all_rows(name, ranks):
    engine = [] if name == "minimal" else ["--fsdp", "{fsdp}"]
    group = [] if name == "own_model" else ["--group", "{group}"]
    status, _, printed = run_verify("--ranks", ranks, *OURS[name], *engine, *group)
    assert status == 0, printed


@pytest.mark.full
def test_a_run_of_the_trainer_goes_on_after_a_restart():
    more = ["--fsdp", "{fsdp}", "--group", "{group}", "--save-every", "2steps"]
    command = ["--resume-after", "2", "--steps", "2", "--modes", "ddp,hybrid", *OURS["trainer"]]
    status, _, printed = run_verify(*command, *more)
    assert status == 0, printed
