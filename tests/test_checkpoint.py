"""checkpoint.py alone: damage, kills, what is refused, its command line."""

import errno
import io
import itertools
import json
import os
import random
import shutil
import signal
import time
import zlib
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checkpoints import SHARD, build, flip, names, steps
from ranks import NANO, files_limited, full_parameters, join, on_ranks
from small_model import CONFIG
from torch import nn

import checkpoint
import vit

# --- the command line


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
    assert all(torch.equal(p, parameters[name]) for name, p in model.named_parameters())
    for path in (source / SHARD, tmp_path):
        with pytest.raises(SystemExit, match="2"):
            checkpoint.main(["consolidate", str(source), str(path)])
    assert [p.name for p in tmp_path.iterdir()] == ["model.pth"] and checkpoint.verify(source)


def test_commands_tell_a_damaged_checkpoint_in_one_sentence(good, tmp_path, capsys):
    assert checkpoint.main(["verify", str(good)]) == 0
    damaged = shutil.copytree(good, tmp_path / "damaged")
    os.truncate(damaged / SHARD, 1000)
    incomplete = shutil.copytree(good, tmp_path / "incomplete")
    (incomplete / SHARD).unlink()  # as an interrupted copy leaves it
    capsys.readouterr()
    for path in (damaged, incomplete, tmp_path / "none"):
        for command in (["verify", path], ["consolidate", path, tmp_path / "model.pth"]):
            assert checkpoint.main([*map(str, command)]) == 1
            printed = capsys.readouterr().err
            assert printed.startswith("checkpoint.py: error: ") and printed.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["damaged", "incomplete"]


# --- damage, and what is not of this model

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
    manifest = checkpoint.read_manifest(folder)
    manifest["files"][".metadata"] = [len(content), zlib.crc32(content)]
    manifest["checksum"] = 0  # of the manifest with this zero
    manifest["checksum"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(checkpoint.CorruptCheckpointError, match=named):
        checkpoint.verify(folder)
    assert os.listdir() == [folder.name]


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, then states."""
    found = [*model.parameters()]
    for p in model.parameters():
        found += optimizer.state[p].values()
    return found


def test_every_flipped_bit_is_found_or_harmless(tmp_path):
    """FLIP_MINUTES=10 in the environment flips for so long."""
    choose = random.Random(1)
    found = set()
    deadline = time.monotonic() + 60 * float(os.environ.get("FLIP_MINUTES", 0.05))
    model = nn.Linear(16, 8)
    other = nn.Linear(16, 8)
    optimizer, its = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    expected = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    run_state = {"": {"blr": 1e-3, "clip": None}, "best": float("inf"), "flags": ["a", True]}
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


def test_another_optimizer_or_other_groups_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    folder = checkpoint.save(tmp_path, 1, model, torch.optim.SGD(model.parameters(), 0.1))
    first, second = model.parameters()
    for optimizer in (
        torch.optim.Adam(model.parameters()),
        torch.optim.SGD([{"params": [first]}, {"params": [second]}], 0.1),
    ):
        with pytest.raises(ValueError, match="give None"):
            checkpoint.load(folder, model, optimizer)
    checkpoint.load(folder, model)


# --- what one rank meets is raised on all


def unreadable(folder: Path, path, *args, **kwargs):
    """Open a file, but none below this folder."""
    if str(path).startswith(str(folder)):
        raise OSError(errno.EIO, "Input/output error", str(path))
    return open(path, *args, **kwargs)


def meet_trouble_on_rank_1() -> list[tuple[str, str]]:
    """On two ranks: an error that rank 1 alone meets, in loads and in saves; what each raises."""
    rank = join()
    out = Path(os.environ["FOLDER"])
    saved = checkpoint.save(out / "run", 1, *build(seed=3))
    damaged = out / "damaged" / saved.name
    if rank == 0:  # whose share to check is the other file
        flip(shutil.copytree(saved, damaged) / "__1_0.distcp")
    dist.barrier()
    model, optimizer = build(seed=9)
    fresh = full_parameters(model)
    first = next(model.parameters())
    raised = []

    def attempt(work, trouble=None) -> None:
        """Do this, with trouble on rank 1; it must raise, and leave all as it was."""
        try:
            with trouble if trouble and rank == 1 else nullcontext():
                work()
        except (ValueError, OSError) as error:
            raised.append((type(error).__name__, str(error)))
        assert names(out / "run") == steps(1)
        assert all(map(torch.equal, fresh.values(), full_parameters(model).values()))

    save = partial(checkpoint.save, out / "run", 2, model, optimizer)
    attempt(partial(checkpoint.load, damaged, model, optimizer))
    on_rank_1 = patch.object(io, "open", partial(unreadable, saved))
    attempt(partial(checkpoint.load, saved, model, optimizer), on_rank_1)
    for limit in (0, 5_000):  # a disk that is full at once, or after some tensors
        attempt(save, files_limited(limit))
    # what rank 1 alone could not restore, is no longer told, or trains otherwise
    optimizer.state[first]["history"] = [rank] if rank else torch.ones(())
    attempt(save)
    del optimizer.state[first]["history"]
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    attempt(save)
    optimizer.param_groups[0]["lr"] = 0.1
    save()
    assert names(out / "run") == steps(1, 2)
    dist.destroy_process_group()
    return raised


@pytest.mark.slow
def test_what_one_rank_meets_is_raised_on_all(tmp_path):
    first, second = on_ranks(2, meet_trouble_on_rank_1, tmp_path)
    assert first == second
    kinds = ["CorruptCheckpointError", *["OSError"] * 3, *["ValueError"] * 2]
    assert [kind for kind, _ in first] == kinds
    damaged, read, *full, history, _ = (sentence for _, sentence in first)
    assert "__1_0.distcp" in damaged and "Input/output error" in read and "history" in history
    assert all("File too large" in sentence for sentence in full)
    assert not any("\n" in sentence for _, sentence in first)


# --- kills, failures, removals

# the function at which a save ends, when (given its arguments), the checkpoints that are left
POINTS = {
    "shard": (torch, "save", lambda tensor, file: file.raw.tell() > 20_000, (1, 2)),
    "manifest": (checkpoint, "atomic_write", lambda path: path.name == "checkpoint.json", (1, 2)),
    "rename": (Path, "rename", lambda path, to: path.name.endswith(".writing"), (1, 2)),
    "replacing": (Path, "rename", lambda path, to: path.name.endswith(".writing"), (1, 2)),
    "latest": (checkpoint, "atomic_write", lambda path: path.name == "latest", (1, 2, 3)),
    "removal": (os, "unlink", lambda path, **_: "distcp" in str(path), (2, 3)),
}


def save_until(point: str, folder: Path, killed: bool) -> None:
    """Save steps 1, 2 and 3, keep two; end at a point of the third, by SIGKILL or an error."""
    owner, name, when, _ = POINTS[point]
    model = nn.Linear(100, 100)
    save = partial(checkpoint.save, folder, model=model, optimizer=torch.optim.AdamW([model.bias]))
    for step in (1, 2):
        save(step=step)
    original = getattr(owner, name)

    def strike(*args, **kwargs):
        if when(*args) and killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if when(*args):
            raise OSError(errno.EIO, "Input/output error")
        return original(*args, **kwargs)

    with patch.object(owner, name, strike):
        save(step=2 if point == "replacing" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("killed", [True, False])
def test_a_save_that_ends_at_any_point_loses_itself_alone(killed, point, tmp_path):
    out = tmp_path / "out"
    if killed:
        with pytest.raises(RuntimeError, match="failed"):
            on_ranks(1, partial(save_until, point, out, killed), tmp_path, timeout=90)
    else:
        with suppress(OSError):
            save_until(point, out, killed)
    left = checkpoint.list_checkpoints(out)
    assert [checkpoint.step_of(path) for path in left] == [*POINTS[point][3]]
    assert all(checkpoint.verify(path) for path in left)
    model = nn.Linear(100, 100)
    checkpoint.load(left[-1], model)
    checkpoint.save(out, 4, model)
    assert names(out) == [left[-1].name, *steps(4)]  # nothing is left of the other


def test_older_checkpoints_alone_are_removed(tmp_path):
    """Neither what is not ours nor further ones; a name of nine digits comes after eight."""
    (tmp_path / "step_00000001.bak").mkdir()
    saved = (99_999_999, 100_000_000)
    for step in (*saved, 5, 6, 6):
        checkpoint.save(tmp_path, step, nn.Linear(2, 2), keep=9 if step in saved else 1)
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
    model, other = (nn.Linear(2, 2).bfloat16() for _ in range(2))
    master = torch.full((2, 2), 1 / 3)
    state = {"master": master, "row": master[0], "count": torch.tensor(2**24 + 1)}
    folder = checkpoint.save(tmp_path, 1, model, with_state(model, **state))
    its = with_state(other)
    checkpoint.load(folder, other, its)
    for key, value in state.items():
        loaded = its.state[other.weight][key]
        assert loaded.dtype == value.dtype and torch.equal(loaded, value), key
