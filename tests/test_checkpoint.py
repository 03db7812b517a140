"""checkpoint.py and its use in train_fsdp.py: any to any, damage, kills, resume, command line."""

import errno
import io
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checkpoints import build, names, steps
from conftest import FULL, ROOT
from ranks import (
    LEARNING_ARGV,
    NANO,
    Run,
    files_limited,
    full_parameters,
    join,
    main_with_signals,
    on_ranks,
    read_log,
    run_ranks,
)
from small_model import CONFIG
from torch import nn

import checkpoint
import vit

ARGV = [*LEARNING_ARGV, "--global-batch", "12"]  # fewer images to decode
SHARD = "__0_0.distcp"


# --- command line


@pytest.mark.slow
def test_consolidated_file_is_the_official_model_and_replaces_nothing(run, tmp_path):
    folder, parameters = run
    source = folder / "step_00000002"
    out = tmp_path / "model.pth"
    assert checkpoint.main(["consolidate", str(source), str(out)]) == 0
    state = torch.load(out, weights_only=True)
    assert state.keys() == {"model", "step", "run_state"}
    for path in (out, source, folder):  # the newest of the run is the same
        weights, facts = checkpoint.read_weights(path)
        assert facts == {"step": 2, "run_state": state["run_state"]}
        assert weights.keys() == state["model"].keys()
        assert all(torch.equal(weights[name], value) for name, value in state["model"].items())
    model = vit.ViTMAE(NANO, 32)
    model.load_state_dict(state["model"], strict=True)
    assert state["step"] == 2 and [p.name for p in tmp_path.iterdir()] == ["model.pth"]
    for name, p in model.named_parameters():
        assert torch.equal(p, parameters[name]), name
    for path in (source / SHARD, tmp_path):
        with pytest.raises(SystemExit, match="2"):
            checkpoint.main(["consolidate", str(source), str(path)])
    assert checkpoint.verify(source)


def test_verify(good, tmp_path, capsys):
    for step in (2, 6):
        shutil.copytree(good, tmp_path / f"step_{step:08d}")
    os.truncate(tmp_path / "step_00000006" / SHARD, 1000)
    damaged = str(tmp_path / "step_00000006")
    new = str(tmp_path / "model.pth")
    assert checkpoint.main(["verify", str(tmp_path / "step_00000002")]) == 0
    missing = ["verify", str(tmp_path / "none")]
    for command in (["verify", damaged], ["consolidate", damaged, new], missing):
        assert checkpoint.main(command) == 1
        printed = capsys.readouterr().err
        assert printed.startswith("checkpoint.py: error: ") and printed.count("\n") == 1
    (tmp_path / "step_00000006" / SHARD).unlink()  # as an interrupted copy leaves it
    with pytest.raises(checkpoint.CorruptCheckpointError, match=SHARD):
        checkpoint.verify(damaged)
    assert not list(tmp_path.glob("*model*"))


# --- damage


def flip(path: Path, bit: int | None = None) -> None:
    """Flip one bit of a file, by default in its middle."""
    content = bytearray(path.read_bytes())
    bit = 4 * len(content) if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


# Pickles as an index: what it names, and would call. torch.os.system, as protocol 4 spells it, is a
# name within an allowed module; of DCP's own class, DCP would unpickle an object.
REFUSED = {
    "posix.system": b"cposix\nsystem\n(S'touch marker'\ntR.",
    "torch.os.system": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",
    ".*BytesStorageMetadata": b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n.",
}


@pytest.mark.parametrize("named", REFUSED)
def test_no_code_is_run_from_an_index(named, good, tmp_path, monkeypatch):
    """Whose checksum is right."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(good, tmp_path / good.name)
    content = REFUSED[named]
    (folder / ".metadata").write_bytes(content)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["files"][".metadata"] = [len(content), zlib.crc32(content)]
    manifest["checksum"] = 0  # of the manifest with this zero
    manifest["checksum"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(checkpoint.CorruptCheckpointError):
        checkpoint.verify(folder)
    assert os.listdir() == [folder.name]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (replace(CONFIG, depth=4), r"blocks\.3\."),
        (replace(CONFIG, depth=2), r"blocks\.2\."),
        (replace(CONFIG, mlp_width=96), r"mlp\.fc1\."),
    ],
)
def test_names_and_shapes_must_be_those_of_the_model(config, name, single, tmp_path):
    folder = checkpoint.save(tmp_path, 2, *build(config=config))
    for mode in ("full_shard", "zero1"):
        with pytest.raises(ValueError, match=name):
            checkpoint.load(folder, *build(mode))


class Unreadable:
    """Raise an I/O error instead of opening files below a folder, so many times."""

    def __init__(self, open, folder: Path, times: int = 10**6) -> None:
        self.open = open
        self.folder = str(folder)
        self.times = times

    def __call__(self, path, *args, **kwargs):
        if self.times and str(path).startswith(self.folder):
            self.times -= 1
            raise OSError(errno.EIO, "Input/output error", str(path))
        return self.open(path, *args, **kwargs)


def meet_trouble_on_rank_1() -> list[tuple[str, str]]:
    """On two ranks: an error that rank 1 alone meets, in loads and in saves; what each raises."""
    rank = join()
    out = Path(os.environ["FOLDER"])
    model, optimizer = build(seed=3)
    folder = checkpoint.save(out / "run", 1, model, optimizer)
    before = full_parameters(model)
    if rank == 0:  # whose share to check is the other file
        flip(shutil.copytree(folder, out / "damaged" / folder.name) / "__1_0.distcp")
    dist.barrier()
    model, optimizer = build(seed=9)
    fresh = full_parameters(model)
    raised = []
    for case in (out / "damaged" / folder.name, folder):
        unreadable = Unreadable(io.open, folder, 10**6 * rank)
        with patch.object(io, "open", unreadable):
            try:
                checkpoint.load(case, model, optimizer)
            except (checkpoint.CorruptCheckpointError, OSError) as error:
                raised.append((type(error).__name__, str(error)))
        assert all(map(torch.equal, fresh.values(), full_parameters(model).values()))
    checkpoint.load(folder, model, optimizer)
    assert all(map(torch.equal, before.values(), full_parameters(model).values()))
    for limit in (0, 5_000):  # a disk that is full at once, or after some tensors
        try:
            with files_limited(limit) if rank == 1 else nullcontext():
                checkpoint.save(out / "run", 2, model, optimizer)
        except OSError as error:
            raised.append((type(error).__name__, str(error)))
        assert names(out / "run") == steps(1)
    # what rank 1 alone could not restore, is no longer told, or trains otherwise
    optimizer.state[next(model.parameters())]["history"] = [rank] if rank else torch.ones(())
    raised.append(refusal(out, model, optimizer))
    del optimizer.state[next(model.parameters())]["history"]
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    raised.append(refusal(out, model, optimizer))
    optimizer.param_groups[0]["lr"] = 0.1
    checkpoint.save(out / "run", 2, model, optimizer)
    assert names(out / "run") == steps(1, 2)
    dist.destroy_process_group()
    return raised


def refusal(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """What a save raises, which leaves the older checkpoint alone."""
    try:
        checkpoint.save(out / "run", 2, model, optimizer)
    except (ValueError, OSError) as error:
        assert names(out / "run") == steps(1)
        return type(error).__name__, str(error)
    raise AssertionError("it was saved")


@pytest.mark.slow
def test_what_one_rank_meets_is_raised_on_all(tmp_path):
    first, second = on_ranks(2, meet_trouble_on_rank_1, tmp_path)
    assert first == second
    kinds = ["CorruptCheckpointError", *["OSError"] * 3, *["ValueError"] * 2]
    assert [kind for kind, _ in first] == kinds
    damaged, unreadable, *full, history, _ = (sentence for _, sentence in first)
    assert "__1_0.distcp" in damaged and "Input/output error" in unreadable
    assert all("File too large" in sentence for sentence in full)
    assert "history" in history
    assert not any("\n" in sentence for _, sentence in first)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, then states."""
    found = [*model.parameters()]
    for p in model.parameters():
        found += optimizer.state[p].values()
    return found


def test_every_flipped_bit_is_found_or_harmless(single, tmp_path):
    """FLIP_MINUTES=10 in the environment flips for so long."""
    seconds = 60 * float(os.environ.get("FLIP_MINUTES", 0.05))
    choose = random.Random(1)
    found = set()
    deadline = time.monotonic() + seconds
    model = nn.Linear(16, 8)
    other = nn.Linear(16, 8)
    optimizer, its = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    expected = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    run_state = {"flags": {"model": "tiny", "blr": 1e-3, "clip": None}, "scaler": None}
    folder = checkpoint.save(tmp_path, 4, model, optimizer, run_state)
    for path in itertools.cycle(sorted(folder.iterdir())):
        if time.monotonic() > deadline:
            break
        content = path.read_bytes()
        bit = choose.randrange(8 * len(content))
        flip(path, bit)
        with torch.no_grad():
            for tensor in tensors_of(other, its):
                tensor.fill_(float("nan"))
        try:
            state = checkpoint.load(folder, other, its)
            assert all(map(torch.equal, tensors_of(other, its), expected)), (path, bit)
            assert state == {"step": 4, "run_state": run_state}, (path, bit)
        except checkpoint.CorruptCheckpointError as error:
            found.add(path.name)
            assert "\n" not in str(error)
            assert all(t.isnan().all() for t in other.parameters()), (path, bit)
        path.write_bytes(content)
    assert found == {"checkpoint.json", ".metadata", SHARD}


# --- kills, removals


# the function that kills its process, when (given its arguments), the checkpoints that are left
POINTS = {
    "shard": (torch, "save", lambda tensor, file: file.raw.tell() > 20_000, (1, 2)),
    "manifest": (checkpoint, "atomic_write", lambda path: path.name == "checkpoint.json", (1, 2)),
    "rename": (Path, "rename", lambda path, to: path.name.endswith(".writing"), (1, 2)),
    "replacing": (Path, "rename", lambda path, to: path.name.endswith(".writing"), (1, 2)),
    "latest": (checkpoint, "atomic_write", lambda path: path.name == "latest", (1, 2, 3)),
    "removal": (os, "unlink", lambda path, **_: "distcp" in str(path), (2, 3)),
}


def killed_while_it_saves(point: str) -> None:
    """Save steps 1, 2 and 3, keep two; SIGKILL at a point of the third save."""
    join()
    owner, name, when, _ = POINTS[point]
    model, optimizer = build()
    save = partial(checkpoint.save, os.environ["FOLDER"], model=model, optimizer=optimizer)
    for step in (1, 2):
        save(step=step)
    original = getattr(owner, name)

    def strike(*args, **kwargs):
        if when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, strike)
    save(step=2 if point == "replacing" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_of_a_save_loses_that_save_alone(point, single, tmp_path):
    with pytest.raises(RuntimeError, match="failed"):
        on_ranks(1, partial(killed_while_it_saves, point), tmp_path, timeout=90)
    left = checkpoint.list_checkpoints(tmp_path)
    assert [checkpoint.step_of(path) for path in left] == [*POINTS[point][3]]
    assert all(checkpoint.verify(path) for path in left)
    model, optimizer = build()
    checkpoint.load(left[-1], model, optimizer)
    checkpoint.save(tmp_path, 4, model, optimizer)
    assert names(tmp_path) == [left[-1].name, *steps(4)]  # nothing is left of the killed one


def test_older_checkpoints_alone_are_removed(single, tmp_path):
    """Neither what is not ours nor further ones; a name of nine digits comes after eight."""
    (tmp_path / "step_00000001.bak").mkdir()
    saved = (99_999_999, 100_000_000)
    for step in (*saved, 5, 6, 6):
        checkpoint.save(tmp_path, step, *build(), keep=9 if step in saved else 1)
    assert {*names(tmp_path)} == {"step_00000001.bak", *steps(6, *saved)}
    assert (tmp_path / "latest").read_text() == "step_00000006\n"
    assert checkpoint.find_newest(tmp_path) == tmp_path / "step_100000000"
    assert checkpoint.find_newest(tmp_path / "none") is None


# --- what can be saved, in one process, without a process group


class Around(torch.optim.Optimizer):
    """As SAM: the states are those of another optimizer."""

    def __init__(self, params) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)


def with_state(model: nn.Module, **state: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[next(model.parameters())] = state
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "run_state"),
    [
        (lambda model: Around(model.parameters()), {}),
        (lambda model: torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), {}),
        (lambda model: torch.optim.SGD([{"params": model.parameters(), "rule": min}], 0.1), {}),
        (lambda model: with_state(model, history=[1.0]), {}),
        (lambda model: with_state(model, count=3), {}),
        (lambda model: with_state(model, **{"fast.ema": torch.ones(2)}), {}),
        (lambda model: None, {"best": torch.ones(2)}),
        (lambda model: None, {"milestones": {30: 1}}),  # JSON would give back a text
        (lambda model: None, {"rule": print}),
    ],
)
def test_what_no_load_could_restore_is_refused_at_the_save(optimizer, run_state, tmp_path):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError):
        checkpoint.save(tmp_path, 1, model, optimizer(model), run_state)
    assert not [*tmp_path.iterdir()]


def test_run_state_comes_back_and_a_checkpoint_without_states_leaves_the_optimizer_new(tmp_path):
    model = nn.Linear(2, 2)
    state = {"": {"flags": ["a", None, True, 0.1]}, "best": float("inf"), "step": 7}
    folder = checkpoint.save(tmp_path, 0, model, None, state)
    other = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.3)
    assert checkpoint.load(folder, other, optimizer) == {"step": 0, "run_state": state}
    assert torch.equal(other.weight, model.weight)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.3
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()


SAVE = (
    "import sys, torch, checkpoint; model = torch.nn.Linear(2, 2); "
    "checkpoint.save(sys.argv[1], 1, model, torch.optim.AdamW(model.parameters()))"
)


def test_ranks_of_other_hash_seeds_describe_the_same_in_the_same_order(tmp_path):
    """Else a save of ranks that were not forked from one process would be refused."""
    found = []
    for seed in "12":
        environ = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", SAVE, tmp_path / seed], env=environ, check=True)
        manifest = checkpoint.read_manifest(tmp_path / seed / "step_00000001")
        found.append(json.dumps(manifest["groups"]))
    assert found[0] == found[1]


def test_another_optimizer_or_other_groups_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    folder = checkpoint.save(tmp_path, 1, model, torch.optim.SGD(model.parameters(), 0.1))
    first, second = model.parameters()
    for optimizer in (
        torch.optim.Adam(model.parameters()),
        torch.optim.SGD([{"params": [first]}, {"params": [second]}], 0.1),
    ):
        with pytest.raises(checkpoint.CorruptCheckpointError, match="give None"):
            checkpoint.load(folder, model, optimizer)
    checkpoint.load(folder, model)


def test_a_save_before_the_first_step_changes_nothing(tmp_path):
    """A momentum of zeros is another beginning than none."""
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.9)
        if model is models[0]:
            checkpoint.save(tmp_path, 0, model, optimizer)
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)


def test_states_keep_their_dtype_and_every_bit(tmp_path):
    def state_of(fill: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2).bfloat16()
        master = torch.full((2, 2), fill)
        return model, with_state(model, master=master, row=master[0], count=torch.tensor(2**24 + 1))

    model, optimizer = state_of(1 / 3)
    folder = checkpoint.save(tmp_path, 1, model, optimizer)
    other, its = state_of(0.0)
    checkpoint.load(folder, other, its)
    for key, value in optimizer.state[model.weight].items():
        loaded = its.state[other.weight][key]
        assert loaded.dtype == value.dtype and torch.equal(loaded, value), key


def test_a_failed_save_of_a_step_that_exists_leaves_it(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, 1, model)
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name.endswith(".writing"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fails)
        with pytest.raises(OSError, match="Input/output error"):
            checkpoint.save(tmp_path, 1, nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    assert checkpoint.load(checkpoint.find_newest(tmp_path), other)["step"] == 1
    assert torch.equal(other.weight, model.weight)
    checkpoint.save(tmp_path, 1, model)
    assert names(tmp_path) == steps(1)


# --- --resume, --keep, in one process

TINY = "--model tiny --img-size 32 --device cpu --workers 0 --batch 4 --precision fp32 --seed 5"
SMALL = f"{TINY} --blr 1e-2 --steps 6 --log-every 1 --save-every 2".split()


def run(folder: Path, *more: str, received=()) -> int:
    return main_with_signals([*SMALL, "--out", str(folder), *more], received)


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of the last run in a folder."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    last = max(i for i, line in enumerate(lines) if line["event"] == "start")
    return [(r["step"], r["loss"]) for r in lines[last:] if r["event"] == "step"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six steps with checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    assert run(folder, "--keep", "3") == 0
    assert names(folder) == steps(2, 4, 6) and (folder / "done").exists()
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder except the log and the lock, which record each start."""
    starts = {"log.jsonl", ".lock"}
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in starts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def the_error(capsys) -> str:
    """The one line on stderr."""
    printed = capsys.readouterr().err
    assert printed.startswith("train_fsdp.py: error: ") and printed.count("\n") == 1
    return printed


def test_damage_of_the_newest_is_skipped_and_of_all_refused(folder, finished, capsys):
    flip(folder / "step_00000006" / SHARD)
    assert run(folder) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("warning: skipping a damaged")]
    assert "step_00000006" in line and SHARD in line
    assert "step_00000004 at step 4" in out and losses(folder) == losses(finished)[4:]
    assert names(folder)[-2:] == steps(4, 6) and checkpoint.verify(folder / "step_00000006")
    for path in checkpoint.list_checkpoints(folder):
        flip(path / SHARD)
    before = tree(folder)
    capsys.readouterr()
    assert run(folder) == 2
    assert "--resume PATH" in the_error(capsys) and tree(folder) == before


def test_no_checkpoint_is_further_than_the_one_to_begin_at(folder, tmp_path, capsys):
    """Of this folder, or a copy elsewhere; with --resume none there must be none at all."""
    inside = folder / "step_00000004"
    before = tree(folder)
    for begin in inside, shutil.copytree(inside, tmp_path / "other" / inside.name):
        assert run(folder, "--resume", str(begin)) == 2
        printed = the_error(capsys)
        assert f"{folder} holds step_00000006 besides --resume {begin}" in printed
        assert f"mv {folder}/step_00000006 ELSEWHERE" in printed
    assert run(folder, "--resume", "none") == 2
    assert "holds checkpoints of another run" in the_error(capsys)
    assert tree(folder) == before


def test_flags_that_change_the_result_are_refused(folder, finished, capsys):
    before = tree(folder)
    changes = {"--seed 6": "seed 5 -> 6", "--precision bf16": "precision fp32 -> bf16"}
    for flags, sentence in changes.items():
        assert run(folder, *flags.split()) == 2
        printed = the_error(capsys)
        assert f"was trained with other flags ({sentence}" in printed
        assert "--allow-changes" in printed
    assert tree(folder) == before
    for path in checkpoint.list_checkpoints(folder)[1:]:
        shutil.rmtree(path)
    at = ("--resume", str(folder / "step_00000002"))
    assert run(folder, "--allow-changes", "--img-size", "48", *at) == 2  # cannot be
    assert "pos_embed" in capsys.readouterr().err
    assert run(folder, "--seed", "6", "--allow-changes") == 0
    out = capsys.readouterr().out
    assert "at step 2; changed: " in out
    assert "seed 5 -> 6" in out and losses(folder)[0][1] != losses(finished)[2][1]


def test_a_finished_run_has_nothing_to_do_until_it_is_extended(folder):
    before = tree(folder)
    assert run(folder) == 0 and tree(folder) == before
    assert run(folder, "--steps", "20", "--allow-changes", received=[signal.SIGTERM]) == 0
    start, _, end = read_log(folder / "log.jsonl")
    assert (start["begin"], end["reason"]) == (6, "signal")
    assert not (folder / "done").exists()


def test_a_named_checkpoint_has_no_fallback(folder, finished, tmp_path, capsys):
    assert run(tmp_path / "new", "--resume", str(folder / "step_00000002")) == 0
    assert losses(tmp_path / "new") == losses(finished)[2:]
    flip(folder / "step_00000006" / SHARD)
    capsys.readouterr()
    for path, sentence in (
        (folder / "step_00000006", "__0_0.distcp"),
        (folder / "step_00000099", "step_00000099: there is no such folder"),
    ):
        assert run(folder, "--resume", str(path)) == 2
        assert sentence in the_error(capsys)


# --- stopped and resumed, on several ranks


@pytest.mark.slow
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """A signal on one rank stops all; then the same ranks, and others, finish the same training."""
    sharded = ARGV + shlex.split("--steps 6 --save-every 100 --mode full_shard")
    hybrid = sharded + shlex.split("--mode hybrid --fsdp 1 --group 3 --ac full --accum 2")
    others = {"hybrid": hybrid}
    if FULL:
        others["zero1"] = [*sharded, "--mode", "zero1"]
    stopped = tmp_path / "stopped"
    struck = Run(sharded, params=False, to=str(stopped), signal_rank=1, signal_step=2)
    whole, first = run_ranks(2, [Run(sharded), struck], tmp_path / "first")
    assert whole.status == first.status == [0, 0]
    at = first.end["steps"]
    assert at in (3, 4) and first.end["reason"] == "signal"
    assert names(stopped) == steps(at) and not (stopped / "done").exists()
    for name in others:
        shutil.copytree(stopped, tmp_path / name)

    (second,) = run_ranks(2, [Run(sharded, to=str(stopped))], tmp_path / "second")
    runs = [Run(argv, to=str(tmp_path / name)) for name, argv in others.items()]
    of_three = run_ranks(3, runs, tmp_path / "three")

    expected = [s["loss"] for s in whole.steps]
    assert second.status == [0, 0] and second.end["reason"] == "done"
    assert [s["step"] for s in second.steps] == list(range(1, 7))
    assert [s["loss"] for s in second.steps] == expected and len({*expected}) == 6
    for name, value in whole.params.items():
        assert torch.equal(second.params[name], value), name
    for result, name in zip(of_three, others, strict=True):
        assert result.status == [0, 0, 0] and result.start["begin"] == at, result.errors
        assert [s["loss"] for s in result.steps] == pytest.approx(expected, rel=1e-6)
        assert result.replicas_differ == 0 and (tmp_path / name / "done").exists()
