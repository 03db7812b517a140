"""checkpoint.py and its use in train_fsdp.py: any to any, stop and resume, damage, command line."""

import errno
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from conftest import FULL, ROOT
from flips import flips
from parity import ARGV as PARITY
from ranks import (
    Run,
    environment,
    free_port,
    full_parameters,
    join,
    on_ranks,
    one_run,
    read_log,
    read_result,
    run_ranks,
)
from test_train import changed
from torch.distributed.checkpoint.filesystem import FileSystemReader

import checkpoint
import mesh
import shard
import train_fsdp
import vit
from runtime import resume
from runtime.resume import SCALER

ARGV = changed(PARITY, global_batch="12")  # fewer images to decode
CONFIG = vit.ViTConfig(32, 3, 64, 2, 8, decoder_width=32, decoder_depth=2, decoder_heads=2)
CPU = torch.device("cpu")
FSDP_MODES = ["no_shard", "shard_grad_op", "full_shard", "hybrid", "hybrid_grad_op"]
ROWS = [("ddp", 2), ("zero1", 2)] + [(mode, fsdp) for fsdp in (1, 2) for mode in FSDP_MODES]
FULL_SHARD = ROWS.index(("full_shard", 2))


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """No launcher's variables from the shell that runs the tests."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def build(mode, fsdp=2, group=None, *, seed=0, ac="none", config=CONFIG):
    """A sharded model and its optimizer on the ranks that there are."""
    with torch.device("meta"):
        model = vit.ViTMAE(config, 32)
    decay = shard.weight_decay_names(model)
    grid = mesh.build_mesh(shard.mesh_shape(mode, dist.get_world_size(), group), CPU)
    model = shard.apply(
        model,
        mode,
        grid,
        block_classes={vit.Block},
        values=partial(vit.initial_value, config, seed=seed),
        options=shard.ShardingOptions(fsdp=fsdp, ac=ac, param_dtype=torch.float32),
    )
    return model, shard.build_optimizer(model, mode, decay, lr=1e-3, weight_decay=0.05)


def save(folder, step, model, optimizer, *, keep=2, **run_state) -> str | None:
    """Save at once; why that failed, if it did."""
    saver = checkpoint.Saver(str(folder), model, optimizer, keep=keep)
    (problem,) = saver.save(step, run_state) or [None]
    return problem


def train(model, optimizer, steps) -> list[float]:
    """The losses of these steps; a step's images are the same on every rank of every world."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 32, 32, generator=generator)
        loss, _, _ = model(images, 0.75, torch.rand(4, 16, generator=generator))
        loss.backward()
        shard.clip_grad_norm(model, 1.0)
        shard.optimizer_step(optimizer, torch.tensor(0.0))
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- any to any


def start_a_rank() -> Path:
    join()
    return Path(os.environ["CHECKPOINTS"])


def write_every_row() -> dict:
    """On every rank: two steps in each row, a checkpoint, the values, and the next two losses.

    The losses are of full_shard alone where no test loads the checkpoint of every row.
    """
    out, found = start_a_rank(), {}
    for i, (mode, fsdp) in enumerate(ROWS):
        group = 2 if "hybrid" in mode else None
        model, optimizer = build(mode, fsdp, group, ac=("none", "full")[i % 2])
        train(model, optimizer, range(2))
        problem = save(out / str(i), 2, model, optimizer, row=i)
        values = full_parameters(model)
        losses = train(model, optimizer, range(2, 4)) if FULL or i == FULL_SHARD else []
        found[i] = (problem, losses, values)
    dist.destroy_process_group()
    return found


def sources(row: int, world: int) -> list[int]:
    """Whose checkpoints a row loads: on 4 ranks all; on others every third, each row's as often."""
    return [(row + d) % len(ROWS) for d in range(0, len(ROWS), 1 if world == 4 else 3)]


def read_in_every_row() -> dict:
    """On every rank: each row loads the checkpoints of its `sources`, then two losses."""
    out, found = start_a_rank(), {}
    world = dist.get_world_size()
    for i, (mode, fsdp) in enumerate(ROWS):
        for turn, source in enumerate(sources(i, world)):
            group = None if "hybrid" not in mode else 2 if world % 4 == 0 else (1, world)[turn % 2]
            # the row's own checkpoint: activation checkpointing the other way round
            model, optimizer = build(mode, fsdp, group, seed=9, ac=("full", "none")[i % 2])
            manifest = checkpoint.load(out / str(source) / "step_00000002", model, optimizer)
            losses = train(model, optimizer, range(2, 4))
            found[i, source] = (manifest["row"], manifest["step"], losses)
    dist.destroy_process_group()
    return found


def written_by_four(folder: Path) -> tuple[Path, dict]:
    """(folder of a checkpoint for each row, what `write_every_row` found on rank 0)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINTS", str(folder))
        found = on_ranks(4, write_every_row, folder / "ranks")
    assert all(r[i][:2] == found[0][i][:2] for r in found for i in r)
    return folder, found[0]


@pytest.fixture(scope="module")
def of_four_ranks(once):
    return once("rows", written_by_four)


@pytest.mark.slow
def test_every_row_writes_a_complete_checkpoint(of_four_ranks):
    folder, found = of_four_ranks
    with torch.device("meta"):
        model = vit.ViTMAE(CONFIG, 32)
    parameters, buffers = len(list(model.parameters())), len(list(model.buffers()))
    for i, row in enumerate(ROWS):
        assert found[i][0] is None, row
        # a value, two moments, a step count
        _, metadata = checkpoint.check(folder / str(i) / "step_00000002")
        assert len(metadata.state_dict_metadata) == 4 * parameters + buffers, row
        if row in (("zero1", 2), ("hybrid", 1), ("full_shard", 2)):
            assert checkpoint.verify(folder / str(i) / "step_00000002") == 4 * parameters + buffers
        files = {p.name for p in (folder / str(i) / "step_00000002").iterdir()}
        assert files >= {"checkpoint.json", ".metadata"} and not any("sum" in f for f in files)
        assert sorted(p.name for p in (folder / str(i)).iterdir()) == ["latest", "step_00000002"]


@pytest.mark.slow
def test_each_replica_is_written_once(of_four_ranks):
    folder, _ = of_four_ranks
    sizes = []
    for i in range(len(ROWS)):
        files = (folder / str(i) / "step_00000002").glob("*.distcp")
        sizes.append(sum(f.stat().st_size for f in files))
    with torch.device("meta"):
        values = sum(p.numel() for p in vit.ViTMAE(CONFIG, 32).parameters())
    # 12 bytes a parameter; the rest are the envelopes of some hundred small tensors
    payload = []
    for i in range(len(ROWS)):
        _, metadata = checkpoint.check(folder / str(i) / "step_00000002")
        chunks = [c for e in metadata.state_dict_metadata.values() for c in e.chunks]
        payload.append(sum(c.sizes.numel() for c in chunks))
    assert len(set(payload)) == 1 and 3 * values < payload[0] < 3 * values + 2000
    assert all(size > 12 * values for size in sizes)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_any_row_loads_what_any_row_wrote(of_four_ranks, world, tmp_path, monkeypatch):
    folder, written = of_four_ranks
    monkeypatch.setenv("CHECKPOINTS", str(folder))
    found = on_ranks(world, read_in_every_row, tmp_path, 1800)
    assert found[0].keys() == {(i, s) for i in range(len(ROWS)) for s in sources(i, world)}
    differences = [
        abs(a - b) / b
        for (_, source), (*_, losses) in found[0].items()
        for a, b in zip(losses, written[source][1], strict=True)
    ]
    identical = sum(losses == written[s][1] for (_, s), (*_, losses) in found[0].items())
    print(
        f"4 -> {world} ranks: {len(found[0])} pairs, {identical} with the same two losses, "
        f"the others within {max(differences):.1e}"
    )
    for (target, source), (row, step, losses) in found[0].items():
        names = ROWS[target], ROWS[source]
        assert (row, step) == (source, 2), names
        assert losses == pytest.approx(written[source][1], rel=1e-6), names
        if world == 4 and target == source and target > 1:
            assert losses == written[source][1], names


def test_the_losses_would_show_another_state(of_four_ranks, single):
    """The comparison above can fail: with fresh moments, the loss after a step differs."""
    folder, written = of_four_ranks
    model, optimizer = build("full_shard", seed=9)
    checkpoint.load(folder / str(FULL_SHARD) / "step_00000002", model, optimizer)
    optimizer.state.clear()
    first, second = train(model, optimizer, range(2, 4))
    assert first == pytest.approx(written[FULL_SHARD][1][0], rel=1e-6)
    assert second != pytest.approx(written[FULL_SHARD][1][1], rel=1e-4)


# --- command line


def test_consolidated_file_is_the_official_model(of_four_ranks, tmp_path, capsys):
    folder, written = of_four_ranks
    out = tmp_path / "model.pth"
    source = folder / str(FULL_SHARD) / "step_00000002"
    assert checkpoint.main(["consolidate", str(source), str(out)]) == 0
    state = torch.load(out, weights_only=True)
    assert state["step"] == 2
    model = vit.ViTMAE(CONFIG, 32)
    model.load_state_dict(state["model"], strict=True)
    values = written[FULL_SHARD][2]
    assert {n for n, _ in model.named_parameters()} == set(values)
    for name, p in model.named_parameters():
        assert torch.equal(p, values[name]), name
    assert torch.equal(model.pos_embed, vit.sincos_positions(32, 4))
    values = sum(tensor.numel() for tensor in model.state_dict().values())
    sentence = f"{out}: {len(model.state_dict())} parameters and buffers, {values:,} values\n"
    assert capsys.readouterr().out == sentence
    assert [p.name for p in tmp_path.iterdir()] == ["model.pth"]


def test_ls_and_verify(of_four_ranks, tmp_path, capsys):
    folder, _ = of_four_ranks
    for step in (2, 4, 6):
        source = folder / str(FULL_SHARD) / "step_00000002"
        copied = shutil.copytree(source, tmp_path / f"step_{step:08d}")
        edit_manifest(copied, lambda manifest, step=step: manifest.update(step=step))
    (tmp_path / ".step_00000008.writing").mkdir()
    (tmp_path / "step_00000004" / "checkpoint.json").unlink()
    flip(tmp_path / "step_00000006" / "__1_0.distcp")
    assert checkpoint.main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"step_{s:08d}" for s in (2, 4, 6)]
    assert "5 files" in lines[0] and "unreadable" in lines[1] and "checkpoint.json" in lines[1]

    assert checkpoint.main(["verify", str(tmp_path / "step_00000002")]) == 0
    assert "is complete" in capsys.readouterr().out
    for step, sentence in (
        (4, "contains no checkpoint.json"),
        (6, "checksum mismatch in __1_0.distcp"),
    ):
        damaged = tmp_path / f"step_{step:08d}"
        assert checkpoint.main(["verify", str(damaged)]) == 1
        printed = capsys.readouterr()
        assert sentence in printed.err and printed.err.count("\n") == 1 and not printed.out
        assert checkpoint.main(["consolidate", str(damaged), str(tmp_path / "model.pth")]) == 1
        assert sentence in capsys.readouterr().err
    assert not list(tmp_path.glob("model*"))
    assert checkpoint.main(["ls", str(tmp_path / "step_00000002")]) == 0
    assert "no checkpoint in" in capsys.readouterr().out


@pytest.mark.full
def test_the_command_line_needs_no_ranks(of_four_ranks):
    """As a process of its own, copied alone; status 2 for bad usage."""
    folder, _ = of_four_ranks
    command = [sys.executable, str(ROOT / "checkpoint.py")]
    source = str(folder / str(FULL_SHARD) / "step_00000002")
    good = subprocess.run([*command, "verify", source], capture_output=True, text=True, cwd=folder)
    assert good.returncode == 0 and "is complete" in good.stdout and good.stderr == ""
    bad = subprocess.run([*command, "prove", source], capture_output=True, text=True, cwd=folder)
    assert bad.returncode == 2 and "invalid choice: 'prove'" in bad.stderr


# --- damaged and hostile


@pytest.fixture
def single():
    mesh.init_ranks(mesh.read_ranks({}), CPU)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of one rank after two steps."""
    folder = tmp_path_factory.mktemp("good")
    mesh.init_ranks(mesh.read_ranks({}), CPU)
    model, optimizer = build("full_shard")
    train(model, optimizer, range(2))
    assert save(folder, 2, model, optimizer) is None
    dist.destroy_process_group()
    return folder / "step_00000002"


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "step_00000002")


SHARD = "__0_0.distcp"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change(folder: Path, old: str, new: str) -> None:
    """Change the text of checkpoint.json, and nothing else."""
    text = (folder / "checkpoint.json").read_text()
    assert text.count(old) == 1
    (folder / "checkpoint.json").write_text(text.replace(old, new))


def edit_manifest(folder: Path, edit) -> None:
    manifest = json.loads((folder / "checkpoint.json").read_text())
    edit(manifest)
    write_manifest(folder, json.dumps(manifest))


def write_manifest(folder: Path, text: str) -> None:
    """Write a manifest with its right checksum, so that only a later check can find the damage."""
    with suppress(ValueError, RecursionError, AttributeError):  # where they are no manifest
        manifest = json.loads(text)
        text = json.dumps(manifest | {"checksum": checkpoint._manifest_checksum(manifest)})
    (folder / "checkpoint.json").write_text(text)


def fix_checksums(folder: Path, *names: str) -> None:
    """Update the sizes and checksums of files, so that only a later check can find the damage."""

    def fix(manifest):
        for name in names:
            content = (folder / name).read_bytes()
            manifest["files"][name] = [len(content), zlib.crc32(content)]

    edit_manifest(folder, fix)


def edit_metadata(folder: Path, edit) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata = edit(metadata) or metadata
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    fix_checksums(folder, ".metadata")


def save_other(folder: Path, config=CONFIG, more=None) -> None:
    """Replace a checkpoint by a valid one of another model."""
    model, optimizer = build("full_shard", config=config)
    train(model, optimizer, range(1))
    with pytest.MonkeyPatch.context() as patch:
        tensors = checkpoint.named_tensors
        patch.setattr(checkpoint, "named_tensors", lambda m, o: tensors(m, o) | (more or {}))
        assert save(folder.parent, 2, model, optimizer) is None


class Malicious:
    """What happens when it is unpickled is not our decision."""

    def __init__(self, function, *args) -> None:
        self.what = function, args

    def __reduce__(self):
        return self.what


def truncate(folder: Path, name: str = SHARD) -> None:
    os.truncate(folder / name, (folder / name).stat().st_size - 10)


def truncated_metadata(folder: Path) -> None:
    truncate(folder, ".metadata")
    fix_checksums(folder, ".metadata")


def hostile_pickle(folder: Path, function, *args) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(function, *args)))
    fix_checksums(folder, ".metadata")


def hostile_within(folder: Path) -> None:
    """Valid metadata except for one object deep in it."""

    def edit(metadata):
        marker = folder.parent / "marker"
        metadata.planner_data = {"x": [Malicious(os.system, f"touch {marker}")]}

    edit_metadata(folder, edit)


def dotted_pickle(folder: Path) -> None:
    """A dotted name: torch.os.system, as protocol 4 allows."""
    command = f"touch {folder.parent / 'marker'}".encode()
    word = b"\x8c" + bytes([len(command)]) + command
    code = b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93" + word + b"\x85R."
    (folder / ".metadata").write_bytes(code)
    fix_checksums(folder, ".metadata")


def out_of_the_folder(folder: Path, name: str) -> None:
    def edit(metadata):
        key = next(iter(metadata.storage_data))
        old = metadata.storage_data[key]
        metadata.storage_data[key] = replace(old, relative_path=name)

    (folder.parent / "x").write_bytes((folder / SHARD).read_bytes())
    edit_metadata(folder, edit)


def named_file(folder: Path, name: str) -> None:
    content = Path(folder, name).read_bytes()
    entry = [len(content), zlib.crc32(content)]
    edit_manifest(folder, lambda manifest: manifest["files"].update({name: entry}))


def linked(folder: Path) -> None:
    (folder / SHARD).rename(folder.parent / "elsewhere")
    (folder / SHARD).symlink_to(folder.parent / "elsewhere")


def missing_chunk(folder: Path) -> None:
    edit_metadata(folder, lambda m: m.state_dict_metadata["model.norm.weight"].chunks.clear())


def unlisted(folder: Path) -> None:
    """A shard that .metadata needs is missing, in checkpoint.json too."""
    (folder / SHARD).unlink()
    edit_manifest(folder, lambda manifest: manifest["files"].pop(SHARD))


def unlisted_link(folder: Path) -> None:
    linked(folder)
    edit_manifest(folder, lambda manifest: manifest["files"].pop(SHARD))


def no_place(folder: Path) -> None:
    """The index has a tensor without a place."""

    def edit(metadata):
        keys = [k for k in metadata.storage_data if k.fqn == "model.norm.weight"]
        assert keys
        for key in keys:
            del metadata.storage_data[key]

    edit_metadata(folder, edit)


def garbage_in_the_shard(folder: Path) -> None:
    """A shard without tensors, with the right checksum."""
    size = (folder / SHARD).stat().st_size
    (folder / SHARD).write_bytes(b"x" * size)
    fix_checksums(folder, SHARD)


def pickle_in_the_shard(folder: Path) -> None:
    """A shard with a pickle that would touch a file, with the right checksum."""
    buffer = io.BytesIO()
    torch.save(Malicious(os.system, f"touch {folder.parent / 'marker'}"), buffer)
    content = bytearray((folder / SHARD).read_bytes())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(p for k, p in metadata.storage_data.items() if k.fqn == "model.norm.weight")
    evil = buffer.getvalue()
    (folder / SHARD).write_bytes(bytes(content) + evil)
    fix_checksums(folder, SHARD)

    def edit(metadata):
        for key, p in metadata.storage_data.items():
            if p == place:
                at = replace(p, offset=len(content), length=len(evil))
                metadata.storage_data[key] = at

    edit_metadata(folder, edit)


DEEPER, SHALLOWER = replace(CONFIG, depth=4), replace(CONFIG, depth=2)
DAMAGED = {
    "shard truncated": (truncate, r"__0_0\.distcp has \d+ bytes, not \d+"),
    "shard flipped": (lambda f: flip(f / SHARD), r"checksum mismatch in __0_0\.distcp"),
    "shard linked": (linked, r"__0_0\.distcp is not a regular file"),
    "no manifest": (lambda f: (f / "checkpoint.json").unlink(), r"it contains no checkpoint\.json"),
    "manifest not JSON": (
        lambda f: (f / "checkpoint.json").write_text("{"),
        r"checkpoint\.json is not readable",
    ),
    "manifest a list": (
        lambda f: (f / "checkpoint.json").write_text("[1]"),
        r"checkpoint\.json is not readable",
    ),
    "manifest not UTF-8": (
        lambda f: (f / "checkpoint.json").write_bytes(b"\xff\xfe\x00"),
        r"checkpoint\.json is not readable",
    ),
    "format 99": (
        lambda f: edit_manifest(f, lambda x: x.update(format=99)),
        r"has format 99, this code reads 2",
    ),
    "files without checksums": (
        lambda f: edit_manifest(f, lambda x: x["files"].update({SHARD: 7})),
        r"checkpoint\.json",
    ),
    "file of /etc": (
        lambda f: named_file(f, "../../../../../../../../../../etc/passwd"),
        r"names '\S+/etc/passwd'",
    ),
    "file with a path": (lambda f: named_file(f, "/etc/passwd"), r"names '/etc/passwd'"),
    "shard unlisted": (unlisted, r"__0_0\.distcp"),
    "shard unlisted and linked": (unlisted_link, r"__0_0\.distcp"),
    "metadata changed": (lambda f: flip(f / ".metadata"), r"checksum mismatch in \.metadata"),
    "metadata truncated": (truncated_metadata, r"\.metadata is not readable"),
    "metadata os.system": (
        lambda f: hostile_pickle(f, os.system, f"touch {f.parent}/marker"),
        r"\.metadata contains 'posix\.system",
    ),
    "metadata eval": (
        lambda f: hostile_pickle(f, eval, f"open('{f.parent}/marker', 'w')"),
        r"\.metadata contains 'builtins\.eval",
    ),
    "metadata touch": (
        lambda f: hostile_pickle(f, Path.touch, f.parent / "marker"),
        r"\.metadata contains 'builtins\.getattr|contains 'pathlib",
    ),
    "metadata within": (hostile_within, r"\.metadata contains 'posix\.system"),
    "metadata dotted": (dotted_pickle, r"\.metadata contains 'torch\.os\.system"),
    "metadata a list": (lambda f: edit_metadata(f, lambda m: [1]), r"\.metadata is not readable"),
    "metadata of lists": (
        lambda f: edit_metadata(f, lambda m: replace(m, state_dict_metadata=[])),
        r"\.metadata is not readable",
    ),
    "metadata of numbers": (
        lambda f: edit_metadata(
            f, lambda m: m.state_dict_metadata.update({"model.norm.weight": 3})
        ),
        r"model\.norm",
    ),
    "place above": (lambda f: out_of_the_folder(f, "../x"), r"no valid file"),
    "place at a root": (lambda f: out_of_the_folder(f, f"{f.parent}/x"), r"no valid file"),
    "no place": (no_place, r"model\.norm\.weight"),
    "chunk missing": (missing_chunk, r"model\.norm\.weight"),
    "extra key": (
        lambda f: save_other(f, DEEPER),
        r"blocks\.3\.\S+ is \(.*\) in the checkpoint, missing in the model",
    ),
    "extra state": (
        lambda f: save_other(f, more={"optim.state.cls_token.sum": torch.ones(1)}),
        r"optim\.state\.cls_token\.sum is .* missing in the model",
    ),
    "extra kind": (
        lambda f: save_other(f, more={"ema.cls_token": torch.ones(1)}),
        r"ema\.cls_token is .* missing in the model",
    ),
    "missing key": (
        lambda f: save_other(f, SHALLOWER),
        r"model\.blocks\.2\.\S+ is missing in the checkpoint",
    ),
    "wrong shape": (
        lambda f: save_other(f, replace(CONFIG, mlp_width=96)),
        r"model\.blocks\.0\.mlp\.fc1\.\w+ is \(96.*\) in the checkpoint, \(64",
    ),
    "garbage in the shard": (garbage_in_the_shard, r"no plain tensor at byte \d+ of __0_0"),
    "pickle in the shard": (pickle_in_the_shard, r"no plain tensor at byte \d+ of __0_0"),
    "of another step": (
        lambda f: edit_manifest(f, lambda x: x.update(step=3)),
        r"belongs to step 3",
    ),
    "step changed": (lambda f: change(f, '"step": 2', '"step": 3'), r"mismatch in checkpoint"),
    "an object": (
        lambda f: save_other(f, more={"model.note": "text"}),
        r"'model\.note' is not a tensor but a pickled object",
    ),
}


def test_the_valid_checkpoint_loads(good, single):
    """The fixture of the tests below is valid, and the functions that edit it keep it so."""
    model, optimizer = build("full_shard", seed=9)
    before = full_parameters(model)
    edit_metadata(good, lambda m: None)
    manifest = checkpoint.load(good, model, optimizer)
    assert manifest["step"] == 2
    assert any(not torch.equal(v, before[n]) for n, v in full_parameters(model).items())


def read_by_dcp(folder: Path) -> dict:
    """Every tensor of a checkpoint, unsharded, by DCP's own reader."""
    metadata = FileSystemReader(folder).read_metadata()
    entries = metadata.state_dict_metadata.items()
    whole = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries}
    checkpoint.dcp.load(whole, storage_reader=FileSystemReader(folder), no_dist=True)
    return whole


def test_every_value_is_read_as_dcp_reads_it(of_four_ranks, single):
    folder = of_four_ranks[0] / str(FULL_SHARD) / "step_00000002"
    expected = read_by_dcp(folder)
    model, optimizer = build("full_shard", seed=9)
    checkpoint.load(folder, model, optimizer)
    tensors = checkpoint.named_tensors(model, optimizer)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(getattr(tensor, "full_tensor", tensor.clone)(), expected[name]), name


def test_no_pickle_of_a_shard_is_opened(copy, single):
    """Not even by torch.load, which restricts the classes of a pickle but not its memory."""
    content = (copy / SHARD).read_bytes()
    starts = [found.end() for found in re.finditer(rb"archive/data\.pkl[^Z]*Z+\x80", content)]
    assert len(starts) > 100
    changed = bytearray(content)
    for start in starts:
        changed[start : start + 20] = bytes(20)
    (copy / SHARD).write_bytes(changed)
    fix_checksums(copy, SHARD)
    model, optimizer = build("full_shard", seed=9)
    checkpoint.load(copy, model, optimizer)
    (copy / SHARD).write_bytes(content)
    expected = read_by_dcp(copy)
    for name, tensor in checkpoint.named_tensors(model, optimizer).items():
        assert torch.equal(getattr(tensor, "full_tensor", tensor.clone)(), expected[name]), name


def test_a_tensor_of_another_memory_format_is_saved_as_it_is(single, tmp_path, capsys):
    """Of more than 64 KiB, too: where a record of an archive lies is not read from its end.

    It is of another program's model: with a name of ours, and no flags.
    """

    def conv() -> tuple:
        model = torch.nn.Module()
        model.patch_embed = torch.nn.Module()
        model.patch_embed.proj = torch.nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = conv()
    assert save(tmp_path, 1, model, optimizer) is None
    other, its = conv()
    checkpoint.load(tmp_path / "step_00000001", other, its)
    weight = model.patch_embed.proj.weight
    assert torch.equal(other.patch_embed.proj.weight, weight)
    command = ["consolidate", str(tmp_path / "step_00000001"), str(tmp_path / "model.pth")]
    assert checkpoint.main(command) == 0 and checkpoint.main(["ls", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("model.pth: 2 parameters and buffers, 36,928 values")
    assert re.fullmatch(r"step_00000001 +0\.000 GiB +2 files", printed[1])
    written = torch.load(tmp_path / "model.pth")["model"]
    assert torch.equal(written["patch_embed.proj.weight"], weight)


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(kind, copy, single):
    damage, sentence = DAMAGED[kind]
    damage(copy)
    model, optimizer = build("full_shard", seed=9)
    before = full_parameters(model)
    with pytest.raises(checkpoint.Damaged, match=sentence) as caught:
        checkpoint.load(copy, model, optimizer)
    assert str(copy) in str(caught.value) and "\n" not in str(caught.value)
    assert not (copy.parent / "marker").exists()
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name]), name


EVERY_DAY = [("zero1", 2), ("full_shard", 1), ("full_shard", 2)]


@pytest.mark.parametrize(("mode", "fsdp"), ROWS if FULL else EVERY_DAY)
def test_training_after_a_refused_checkpoint_equals_a_fresh_start(mode, fsdp, copy, single):
    """Model and optimizer are unchanged: the next losses are those of a fresh start."""
    flip(copy / SHARD)
    group = 1 if "hybrid" in mode else None
    fresh = train(*build(mode, fsdp, group), range(3))
    model, optimizer = build(mode, fsdp, group)
    with pytest.raises(checkpoint.Damaged):
        checkpoint.load(copy, model, optimizer)
    assert train(model, optimizer, range(3)) == fresh


def test_a_full_disk_is_reported_and_leaves_no_files(tmp_path, single, monkeypatch):
    model, optimizer = build("full_shard")
    train(model, optimizer, range(1))
    assert save(tmp_path, 1, model, optimizer) is None
    values = full_parameters(model)
    train(model, optimizer, range(1, 2))

    def full(self, plan, planner):
        (self.temporary / SHARD).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint._Writer, "write_data", full)
    problem = save(tmp_path, 2, model, optimizer)
    assert problem is not None and "No space left on device" in problem
    assert problem.startswith("step 2 was not saved: ") and "rank 0" in problem
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
    model, optimizer = build("ddp", seed=9)
    checkpoint.load(tmp_path / "step_00000001", model, optimizer)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, values[name.removeprefix("module.")]), name


# --- --resume, --keep, in one process

TINY = "--model tiny --img-size 32 --device cpu --workers 0 --batch 4 --precision fp32 --seed 5"
SMALL = f"{TINY} --blr 1e-2 --steps 6 --log-every 1 --save-every 2".split()


def run(folder: Path, *more: str, received=()) -> int:
    return train_fsdp.main([*SMALL, "--out", str(folder), *more], received)


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
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if "step_" in p.name)


def test_keep_counts_steps_and_latest_names_the_newest(finished, tmp_path):
    assert names(finished) == [f"step_{s:08d}" for s in (2, 4, 6)]
    assert (finished / "latest").read_text().strip() == "step_00000006"
    assert (finished / "done").exists()
    out = tmp_path / "run"
    shutil.copytree(finished / "step_00000002", out / "step_00000002")
    assert run(out, "--keep", "2") == 0
    assert names(out) == ["step_00000004", "step_00000006"]
    os.utime(out / "step_00000004")  # by number, not by time
    assert run(out, "--keep", "2", "--steps", "8", "--allow-changes") == 0
    assert names(out) == ["step_00000006", "step_00000008"]
    assert (out / "latest").read_text().strip() == "step_00000008"


@pytest.mark.parametrize("again", [False, True])
def test_a_kill_during_a_removal_leaves_no_half_checkpoint(again, single, tmp_path, monkeypatch):
    """The oldest of too many, or one of the same step: one of its files is removed already."""
    model, optimizer = build("full_shard")
    for step in (1, 2):
        assert save(tmp_path, step, model, optimizer) is None

    def killed(path, ignore_errors=False):
        if Path(path).exists():
            (Path(path) / "__0_0.distcp").unlink(missing_ok=True)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint.shutil, "rmtree", killed)
        save(tmp_path, 2 if again else 3, model, optimizer)
    left = [checkpoint.verify(path) for path in checkpoint.list_checkpoints(tmp_path)]
    assert len(left) == 2
    assert save(tmp_path, 4, model, optimizer) is None
    assert names(tmp_path) == [f"step_{s:08d}" for s in ((2, 4) if again else (3, 4))]


def test_other_folders_are_neither_counted_nor_removed(folder):
    for name in ("step_1", "step_00000001.bak", "step_00000000x", "steps"):
        (folder / name).mkdir()
    (folder / "step_00000003").write_text("a file")
    assert [p.name for p in checkpoint.list_checkpoints(folder)] == [
        f"step_{s:08d}" for s in (2, 4, 6)
    ]
    assert run(folder, "--keep", "1", "--steps", "8", "--allow-changes") == 0
    assert names(folder) == [
        "step_00000000x",
        "step_00000001.bak",
        "step_00000003",
        "step_00000008",
        "step_1",
    ]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder except the log, which records each start."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "log.jsonl")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def trained(folder: Path) -> int:
    return (folder / "log.jsonl").read_text().count('"event": "step"')


DAMAGES = {
    "shard": (lambda f: flip(f / SHARD), "checksum mismatch in __0_0.distcp"),
    "index": (lambda f: truncate(f, ".metadata"), ".metadata has"),
    "step": (lambda f: change(f, '"step": ', '"step": 1'), "checksum mismatch in checkpoint.json"),
    "10^15": (lambda f: edit_manifest(f, lambda x: x.update(step=10**15)), "is not readable"),
    "flags": (lambda f: edit_manifest(f, lambda x: x.update(flags=None)), "no sound 'flags'"),
    "scaler": (
        lambda f: edit_manifest(f, lambda x: x.update(scaler={"scale": 1})),
        "no sound 'scaler'",
    ),
    "scaler's": (
        lambda f: edit_manifest(f, lambda x: x.update(scaler=dict.fromkeys(SCALER, "1"))),
        "no sound 'scaler'",
    ),
    "in_a_row": (
        lambda f: edit_manifest(f, lambda x: x.update(in_a_row=[])),
        "no sound 'in_a_row'",
    ),
    "manifest": (lambda f: (f / "checkpoint.json").unlink(), "it contains no checkpoint.json"),
    "a pipe": (lambda f: instead(f / SHARD, os.mkfifo), "__0_0.distcp is not a regular file"),
}


def instead(path: Path, make) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_of_one_is_skipped_and_of_all_refused(kind, folder, finished, capsys):
    """The newest loadable checkpoint is resumed; later ones are kept under another name."""
    damage, reason = DAMAGES[kind]
    damage(folder / "step_00000006")
    (folder / "latest").unlink()
    os.mkfifo(folder / "latest")  # which nothing waits for
    assert run(folder) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("warning: skipping unreadable")]
    assert line.startswith(f"warning: skipping unreadable checkpoint {folder}/step_00000006")
    assert reason in line and "step_00000004 at step 4" in out
    assert f"moved to {folder}/set_aside_1" in out and names(folder / "set_aside_1")
    assert losses(folder) == losses(finished)[4:]
    assert checkpoint.verify(folder / "step_00000006")

    for path in checkpoint.list_checkpoints(folder):
        damage(path)
    (folder / "latest").unlink()
    before, steps = tree(folder), trained(folder)
    assert run(folder) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("train_fsdp.py: error: no checkpoint in") and printed.count("\n") == 1
    for path in checkpoint.list_checkpoints(folder):
        assert re.search(rf"{path.name}\b[^;]*{re.escape(reason)}", printed), printed
    assert "--resume PATH" in printed and "another --out" in printed
    assert tree(folder) == before and trained(folder) == steps


class Unreadable:
    """Raise an OSError instead of opening files below a folder, so many times."""

    def __init__(self, open, folder: Path, number: int, times: int) -> None:
        self.open, self.folder, self.number, self.times = open, str(folder), number, times

    def __call__(self, path, *args, **kwargs):
        if self.times and str(path).startswith(self.folder):
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number), str(path))
        return self.open(path, *args, **kwargs)


ERRORS = [
    (io, "open", errno.EIO, "step_00000006"),
    (io, "open", errno.ESTALE, "step_00000006/__0_0"),
    (io, "open", errno.ENOENT, "step_00000006/.metadata"),
    (io, "open", errno.EACCES, "step_"),
    (os, "scandir", errno.EIO, ""),
]


@pytest.mark.parametrize(("module", "name", "number", "where"), ERRORS)
def test_a_transient_error_is_not_damage(
    module, name, number, where, folder, finished, capsys, monkeypatch
):
    """It is retried, then ends the run; no older checkpoint is loaded, no file changed."""
    pauses, slept = len(resume.PAUSES), []
    monkeypatch.setattr(resume.time, "sleep", slept.append)
    before, original = tree(folder), getattr(module, name)
    always = Unreadable(original, folder / where, number, 10**6)
    monkeypatch.setattr(module, name, always)
    assert run(folder) == 1
    always.times = 0
    printed = capsys.readouterr()
    assert os.strerror(number) in printed.err and printed.err.count("\n") == 1
    assert printed.out.count("trying again in") == pauses == len(slept)
    assert 20 < sum(slept) < 70 and "skipping" not in printed.out
    assert tree(folder) == before and losses(folder) == losses(finished)

    monkeypatch.setattr(module, name, Unreadable(original, folder / where, number, 2))
    (folder / "done").unlink()
    assert run(folder, "--steps", "7", "--allow-changes") == 0
    assert "step_00000006 at step 6" in capsys.readouterr().out


def test_a_missing_shard_is_not_damage(folder, capsys, monkeypatch):
    monkeypatch.setattr(resume, "PAUSES", (0.0,))
    (folder / "step_00000006" / SHARD).unlink()
    before = tree(folder)
    assert run(folder) == 1 and tree(folder) == before
    printed = capsys.readouterr().err
    assert f"No such file or directory: '{folder}/step_00000006/{SHARD}'" in printed
    assert "--resume PATH" in printed
    assert run(folder, "--resume", str(folder / "step_00000004")) == 0


def test_auto_starts_fresh_in_an_empty_folder_and_ignores_latest(folder, tmp_path, capsys):
    assert run(tmp_path / "new", "--steps", "1") == 0
    assert "resumed" not in capsys.readouterr().out
    for text in ("step_00000002\n", "../elsewhere\n"):
        (folder / "latest").write_text(text)
        assert run(folder) == 0
        assert "step_00000006 at step 6" in capsys.readouterr().out


def test_later_checkpoints_are_moved_aside(folder, finished, capsys):
    begin = ("--resume", str(folder / "step_00000002"), "--keep", "1")
    before = tree(folder)
    assert run(folder, *begin, "--dry-run", "--world-size", "1") == 0
    assert tree(folder) == before
    capsys.readouterr()
    assert run(folder, *begin, "--steps", "4", "--allow-changes") == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "moved to" in x]
    assert str(folder / "set_aside_1") in line
    assert "step_00000004, step_00000006" in line
    assert names(folder) == ["step_00000004"]
    assert names(folder / "set_aside_1") == ["step_00000004", "step_00000006"]
    assert run(folder, "--steps", "6", "--allow-changes") == 0  # its own, not the ones moved aside
    assert "step_00000004 at step 4" in capsys.readouterr().out
    # nor is a checkpoint of another run at the same step
    at = folder / "set_aside_1" / "step_00000006"
    assert run(folder, "--resume", str(at), "--steps", "8", "--allow-changes") == 0
    assert "step_00000006 at step 6" in capsys.readouterr().out
    assert names(folder / "set_aside_2") == ["step_00000006"] and checkpoint.verify(at)


def test_initial_values_are_not_drawn_for_a_load(folder, finished, tmp_path, monkeypatch):
    drawn, draw = [], vit.initial_value

    def initial_value(config, name, shape, seed=0, device="cpu"):
        drawn.append(name)
        return draw(config, name, shape, seed)

    monkeypatch.setattr(vit, "initial_value", initial_value)
    shutil.rmtree(folder / "step_00000006")
    assert run(folder) == 0
    assert losses(folder) == losses(finished)[4:] and not drawn
    assert run(tmp_path / "new", "--steps", "1") == 0 and len(drawn) > 50


def test_a_flag_that_an_older_checkpoint_lacks_has_not_changed(folder, capsys):
    """A flag of a later version; and format 1, whose manifest has no checksum."""

    def edit(manifest):
        del manifest["flags"]["clip"], manifest["flags"]["keep"]
        manifest["format"] = 1

    edit_manifest(folder / "step_00000006", edit)
    change(folder / "step_00000006", '"checksum"', '"unknown"')
    assert run(folder) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "step_00000006 at step 6" in x]
    assert "clip" not in line and "keep" not in line


def test_later_checkpoints_are_not_removed(single, tmp_path):
    """Ordered by number: a name of nine digits comes after those of eight."""
    model, optimizer = build("full_shard")
    steps = (10, 99_999_999, 100_000_000)
    for step in (*steps, 5, 6):
        keep = 9 if step in steps else 1
        assert save(tmp_path, step, model, optimizer, keep=keep) is None
    assert [checkpoint.step_of(p) for p in checkpoint.list_checkpoints(tmp_path)] == [6, *steps]


@pytest.mark.parametrize(
    "name",
    [".step_00000002.writing", ".step_00000002.removed", ".step_00000001.removed", "latest.new"],
)
def test_nothing_is_written_or_removed_where_a_link_leads(name, single, tmp_path):
    model, optimizer = build("full_shard")
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    assert save(out, 1, model, optimizer) is None
    (out / name).symlink_to(outside / "file" if name == "latest.new" else outside)
    assert save(out, 2, model, optimizer, keep=1) is None
    assert tree(outside) == {"file": b"mine"} and names(out) == ["step_00000002"]
    assert not (out / "step_00000002").is_symlink()


def test_the_saver_knows_the_newest_saved_step(single, tmp_path, monkeypatch):
    model, optimizer = build("full_shard")
    for background in (False, True):
        saver = checkpoint.Saver(str(tmp_path), model, optimizer, background=background)
        assert saver.saved == 0
        assert saver.save(3, {}, wait=False) == saver.finish() == [] and saver.saved == 3
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint._Writer, "write_data", None)
            assert saver.save(4, {}) and saver.saved == 3


def test_a_finished_run_has_nothing_to_do(folder, capsys):
    before = (folder / "step_00000006" / SHARD).stat().st_mtime_ns
    assert run(folder, "--resume", "auto") == 0
    start, steps, end = read_log(folder / "log.jsonl")
    assert start["begin"] == 6 and len(steps) == 6
    assert end["reason"] == "done" and end["steps"] == 6
    assert (folder / "step_00000006" / SHARD).stat().st_mtime_ns == before
    assert "loss" not in end or end["loss"] is not None


def test_done_is_removed_when_a_run_is_extended(folder):
    """A finished run that is extended and stopped by a signal is not done."""
    argv = ("--steps", "20", "--allow-changes")
    assert run(folder, *argv, received=[signal.SIGTERM]) == 0
    assert read_log(folder / "log.jsonl")[2]["reason"] == "signal"
    assert not (folder / "done").exists()


def test_a_named_checkpoint_has_no_fallback(folder, finished, tmp_path, capsys):
    assert run(tmp_path / "new", "--resume", str(folder / "step_00000002")) == 0
    assert losses(tmp_path / "new") == losses(finished)[2:]
    flip(folder / "step_00000006" / SHARD)
    capsys.readouterr()
    for path, sentence in (
        (folder / "step_00000006", "checksum mismatch in __0_0.distcp"),
        (
            folder / "step_00000099",
            "step_00000099: not a checkpoint (it contains no checkpoint.json",
        ),
        (folder, "not a checkpoint (it contains no checkpoint.json"),
    ):
        assert run(folder, "--resume", str(path)) == 2
        printed = capsys.readouterr()
        assert sentence in printed.err and printed.err.count("\n") == 1
        assert printed.err.startswith("train_fsdp.py: error: ")
    assert not dist.is_initialized()


CHANGES = [
    ("--seed 6", "seed 5 -> 6"),
    ("--batch 8", "global_batch 4 -> 8"),
    ("--model other", "model tiny -> other"),
    ("--img-size 48", "img_size 32 -> 48"),
    ("--steps 7", "steps 6 -> 7"),
    ("--blr 1e-3", "blr 0.01 -> 0.001"),
    ("--precision bf16", "precision fp32 -> bf16"),
    ("--no-norm-pix-loss", "norm_pix_loss True -> False"),
    ("--mask-ratio 0.5", "mask_ratio 0.75 -> 0.5"),
]


@pytest.mark.parametrize(("flags", "sentence"), CHANGES)
def test_flags_that_change_the_result_are_refused(flags, sentence, folder, capsys, monkeypatch):
    monkeypatch.setitem(vit.MODELS, "other", replace(vit.MODELS["tiny"], depth=2))
    for how in ("auto", str(folder / "step_00000002")):
        capsys.readouterr()
        assert run(folder, *flags.split(), "--resume", how) == 2
        printed = capsys.readouterr()
        assert f"was trained with other flags ({sentence}" in printed.err
        assert "--allow-changes" in printed.err and printed.err.count("\n") == 1
    assert names(folder) == [f"step_{s:08d}" for s in (2, 4, 6)]


def test_allowed_changes_are_listed(folder, finished, capsys):
    at = str(folder / "step_00000002")
    assert run(folder, "--seed", "6", "--allow-changes", "--resume", at, "--keep", "9") == 0
    assert "at step 2; changed: allow_changes" in (out := capsys.readouterr().out)
    assert "seed 5 -> 6" in out
    new, old = losses(folder), losses(finished)
    assert [s for s, _ in new] == [3, 4, 5, 6] and new[0][1] != old[2][1]
    assert run(folder, "--allow-changes", "--img-size", "48", "--resume", at) == 2  # cannot be
    assert "pos_embed is (1, 17, " in capsys.readouterr().err


def test_resume_none_is_refused_in_a_folder_with_checkpoints(folder, tmp_path, capsys):
    assert run(folder, "--resume", "none") == 2
    assert "holds checkpoints of another run: use another --out" in capsys.readouterr().err
    assert run(tmp_path / "new", "--resume", "none", "--steps", "1") == 0


def test_every_flipped_bit_is_found_or_harmless(single, tmp_path):
    found, problems = flips(tmp_path, seed=1, seconds=60, at_most=400)
    assert not problems
    assert {name for name, what in found if what == "found"} == {
        "checkpoint.json",
        ".metadata",
        SHARD,
    }


# --- damage that a single rank sees

SIX = changed(ARGV, steps="6", save_every="2", keep="9", mode="full_shard")


def resumes() -> None:
    """Run one command in each folder; in "unreadable R" rank R can read the second time only."""
    base, rank = Path(os.environ["CHECKPOINTS"]), int(os.environ["RANK"])
    resume.PAUSES = (0.0, 0.0)
    for case in sorted(p.name for p in base.iterdir()):
        for turn in range(1 + case.startswith("unreadable")):
            with pytest.MonkeyPatch.context() as patch:
                if case == f"unreadable {rank}" and not turn:
                    files = base / case / "step_"
                    patch.setattr(io, "open", Unreadable(io.open, files, errno.EIO, 10**6))
                out = Path(os.environ["FOLDER"]) / f"{case}{turn}"
                job = asdict(Run(SIX, params=False)) | {"out": str(out), "to": str(base / case)}
                one_run(job, rank)


def written_by_two(folder: Path) -> Path:
    """A run of six steps by two ranks, with checkpoints at 2, 4 and 6."""
    (result,) = run_ranks(2, [Run(SIX, params=False, to=str(folder / "run"))], folder / "ranks")
    assert result.status == [0, 0]
    return folder / "run"


@pytest.fixture(scope="module")
def of_two_ranks(once) -> Path:
    return once("two", written_by_two)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4] if FULL else [2])
def test_damage_seen_by_one_rank_is_refused_by_all(world, of_two_ranks, tmp_path, monkeypatch):
    """Each rank checks some of the files; each damage is found by another rank."""
    cases = {name: {6: name} for name in ("__0_0.distcp", "__1_0.distcp", ".metadata")}
    cases |= {"all": {2: "__0_0.distcp", 4: "__1_0.distcp", 6: ".metadata"}}
    cases |= {f"unreadable {world - 1}": {}}
    for case, damaged in cases.items():
        copied = shutil.copytree(of_two_ranks, tmp_path / "runs" / case)
        (copied / "log.jsonl").unlink()
        for step, name in damaged.items():
            flip(copied / f"step_{step:08d}" / name)
    before = {case: tree(tmp_path / "runs" / case) for case in cases}
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path / "runs"))
    on_ranks(world, resumes, tmp_path / "ranks")

    expected = [s["loss"] for s in read_log(of_two_ranks / "log.jsonl")[1]]
    results = {
        case.name: read_result(case, world, tmp_path / "runs" / case.name[:-1])
        for case in (tmp_path / "ranks").iterdir()
        if (case / "status0").exists()
    }
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        result = results[f"{name}0"]
        assert result.status == [0] * world, result.errors
        assert result.output.count("warning: skipping unreadable checkpoint") == 1
        assert f"checksum mismatch in {name}" in result.output and result.start["begin"] == 4
        assert [s["loss"] for s in result.steps] == pytest.approx(expected[4:], rel=1e-6)
    for case, part in (
        ("all0", "checksum mismatch in __1_0"),
        (f"unreadable {world - 1}0", "Input/output error"),
    ):
        result = results[case]
        assert result.status == [1] * world and part in result.errors
        assert result.errors.count("train_fsdp.py: error: ") == 1
        assert "Traceback" not in result.errors
    assert f"(rank {world - 1})" in result.errors
    assert tree(tmp_path / "runs" / "all") == before["all"]
    again = results[f"unreadable {world - 1}1"]
    assert again.status == [0] * world and again.start["begin"] == 6


# --- killed while it saves


tensors_written = count()


def half_written(*args) -> bool:
    """At the tenth tensor of a shard."""
    return next(tensors_written) == 9


# the function that kills its process, the rank, when (given its arguments), the step to resume
POINTS = {
    "while a shard is written": ("torch", "save", 1, half_written, 2),
    "before the rename": ("Path", "rename", 0, lambda path, to: path.name.endswith("writing"), 2),
    "before latest": ("", "_replacing", 0, lambda path: path.name == "latest", 4),
    "in the background": ("torch", "save", 0, half_written, 2),
}


def killed() -> None:
    """A run of which one rank gets SIGKILL at a point of its second save."""
    out, point = Path(os.environ["CHECKPOINTS"]), os.environ["POINT"]
    where, name, rank, when, _ = POINTS[point]
    owner = getattr(checkpoint, where) if where else checkpoint
    original = getattr(owner, name)

    def strike(*args):
        if (out / "step_00000002" / SHARD).exists() and (out / "latest").exists() and when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    if rank == int(os.environ["RANK"]):
        setattr(owner, name, strike)
    argv = [*SIX, *(["--async-save"] if point == "in the background" else [])]
    job = asdict(Run(argv, params=False)) | {"out": os.environ["FOLDER"] + "/0", "to": str(out)}
    one_run(job, int(os.environ["RANK"]))


@pytest.mark.full
def test_a_kill_at_any_point_of_a_save_loses_that_save_alone(of_two_ranks, tmp_path, monkeypatch):
    for i, point in enumerate(POINTS):
        monkeypatch.setenv("CHECKPOINTS", str(tmp_path / point))
        monkeypatch.setenv("POINT", point)
        with pytest.raises(RuntimeError, match=r"ranks .* failed"):
            on_ranks(2, killed, tmp_path / f"ranks{i}", timeout=90)
    runs = [Run(SIX, params=False, to=str(tmp_path / point)) for point in POINTS]
    expected = [s["loss"] for s in read_log(of_two_ranks / "log.jsonl")[1]]
    results = run_ranks(2, runs, tmp_path / "resumed")
    for (point, (*_, begin)), result in zip(POINTS.items(), results, strict=True):
        assert result.status == [0, 0] and result.start["begin"] == begin, point
        assert "warning" not in result.output and (tmp_path / point / "done").exists()
        assert [s["loss"] for s in result.steps[-(6 - begin) :]] == expected[begin:], point
        assert names(tmp_path / point) == [f"step_{s:08d}" for s in (2, 4, 6)], point
        for path in checkpoint.list_checkpoints(tmp_path / point):
            checkpoint.verify(path)


# --- stopped and resumed, on several ranks

TWELVE = changed(ARGV, steps="12", save_every="100")


@pytest.mark.slow
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """A signal on one rank stops all; then the same ranks, and others, finish the same training."""
    sharded = changed(TWELVE, mode="full_shard")
    stopped, others = tmp_path / "stopped", {n: tmp_path / n for n in ("three", "hybrid")}
    whole, first = run_ranks(
        2,
        [Run(sharded), Run(sharded, params=False, to=str(stopped), signal_rank=1, signal_step=4)],
        tmp_path / "first",
    )
    assert whole.status == first.status == [0, 0]
    assert whole.end["reason"] == "done" and first.end["reason"] == "signal"
    at = first.end["steps"]
    assert at in (5, 6) and len(first.steps) == at and first.end["problem"] is None
    assert not (stopped / "done").exists()
    assert names(stopped) == [f"step_{at:08d}"]
    assert (stopped / "latest").read_text().strip() == f"step_{at:08d}"
    for folder in others.values():
        shutil.copytree(stopped, folder)

    again = Run(sharded, to=str(stopped))
    second, third = run_ranks(2, [again, replace(again, params=False)], tmp_path / "second")
    zero1 = Run(changed(TWELVE, mode="zero1"), to=str(others["three"]))
    hybrid = changed(TWELVE, mode="hybrid", fsdp="1", group="3", ac="full", accum="2")
    of_three = run_ranks(3, [zero1, Run(hybrid, to=str(others["hybrid"]))], tmp_path / "three3")

    expected = [s["loss"] for s in whole.steps]
    assert len(set(expected)) == 12
    assert second.status == [0, 0] and second.end["reason"] == "done"
    assert [s["step"] for s in second.steps] == list(range(1, 13))
    assert [s["loss"] for s in second.steps] == expected
    assert [s["lr"] for s in second.steps] == [s["lr"] for s in whole.steps]
    for name, value in whole.params.items():
        assert torch.equal(second.params[name], value), name
    lines = [json.loads(line) for line in (stopped / "log.jsonl").read_text().splitlines()]
    starts = [r for r in lines if r["event"] == "start"]
    assert [r["begin"] for r in starts] == [0, at, 12]  # the last had nothing to do
    assert third.status == [0, 0] and third.end["reason"] == "done" and len(third.steps) == 12
    assert (stopped / "done").exists()

    for result, folder in zip(of_three, others.values(), strict=True):
        assert result.status == [0, 0, 0] and result.start["begin"] == at, result.errors
        assert [s["loss"] for s in result.steps] == pytest.approx(expected, rel=1e-6)
        assert result.replicas_differ == 0 and (folder / "done").exists()


@pytest.mark.slow
def test_bad_steps_in_a_row_are_counted_across_a_resume(tmp_path):
    """--max-skips 2, stopped after two bad steps: the third, after the resume, ends the run."""
    argv = changed(ARGV, mode="full_shard", steps="9", max_skips="2", save_every="5")
    bad = {"poison": "loss", "poison_rank": 1, "poison_steps": (5,), "params": False}
    first = Run(
        argv,
        signal_rank=0,
        signal_step=4,
        to=str(tmp_path / "run"),
        **bad | {"poison_steps": (3, 4)},
    )
    (stopped,) = run_ranks(2, [first], tmp_path / "first")
    assert stopped.status == [0, 0] and stopped.end["reason"] == "signal"
    assert stopped.end["steps"] == 5  # at the fifth step, of which a checkpoint is due anyway
    (ended,) = run_ranks(2, [Run(argv, to=str(tmp_path / "run"), **bad)], tmp_path / "second")
    assert ended.status == [1, 1] and ended.end["reason"] == "nan", ended.output
    assert "at step 6 on rank 1, 3 consecutive bad steps" in ended.errors


# --- in the background


@pytest.mark.slow
def test_saving_in_the_background_changes_nothing(tmp_path):
    """Losses and checkpoints as without it; each checkpoint is of its own step."""
    argv = changed(ARGV, steps="5", save_every="2", keep="9")
    modes = [changed(argv, mode="zero1"), changed(argv, mode="hybrid", fsdp="1", group="2")]
    plain = [Run(argv, params=False) for argv in modes]
    behind = [Run([*argv, "--async-save"], params=False) for argv in modes]
    results = run_ranks(2, plain + behind, tmp_path, 240)
    for i, (now, later) in enumerate(zip(results[:2], results[2:], strict=True)):
        assert now.status == later.status == [0, 0], later.errors
        assert [s["loss"] for s in later.steps] == [s["loss"] for s in now.steps]
        folders = tmp_path / str(i), tmp_path / str(i + 2)
        assert names(folders[1]) == [f"step_{s:08d}" for s in (2, 4, 5)]
        for name in names(folders[1]):
            expected, found = (read_by_dcp(folder / name) for folder in folders)
            assert expected.keys() == found.keys() and len(found) > 100
            for key, value in found.items():
                assert torch.equal(value, expected[key]), (modes[i], name, key)


@pytest.mark.full
@pytest.mark.slow
def test_a_full_disk_in_the_background(tmp_path):
    """As in the foreground, but a failed save is reported at the next one."""
    argv = [*changed(ARGV, mode="full_shard", save_every="2", keep="9"), "--async-save"]
    runs = [
        Run(changed(argv, steps="14"), params=False, full_rank=1, full_saves=(1, 3, 4)),
        Run(changed(argv, steps="4"), params=False, full_rank=0, full_saves=(1,)),
    ]
    ended, last = run_ranks(2, runs, tmp_path)
    assert ended.status == [1, 1] and ended.end["reason"] == "save"
    assert ended.output.count("warning: step 4 was not saved") == 1
    assert "step 10 was not saved" in ended.end["problem"]
    assert names(tmp_path / "0") == [f"step_{s:08d}" for s in (2, 6)]
    assert checkpoint.verify(tmp_path / "0" / "step_00000006") > 0
    assert last.status == [1, 1] and names(tmp_path / "1") == ["step_00000002"]


def test_no_memory_for_the_copy_is_a_failed_save(single, tmp_path, monkeypatch):
    model, optimizer = build("full_shard")
    train(model, optimizer, range(1))
    saver = checkpoint.Saver(str(tmp_path), model, optimizer, background=True)

    def no_memory(self, state_dict):
        raise RuntimeError("not enough memory: you tried to allocate 11 GB")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint._Writer, "stage", no_memory)
        assert saver.save(1, {}) == [
            "step 1 was not saved: RuntimeError: not enough memory: you "
            "tried to allocate 11 GB (rank 0)"
        ]
    assert saver.failures == 1 and not names(tmp_path)
    assert saver.save(2, {}, wait=False) == saver.finish() == []
    assert saver.failures == 0 and names(tmp_path) == ["step_00000002"]


def test_training_continues_while_a_save_is_written(single, tmp_path, monkeypatch):
    """The writer waits until four more steps are done; what it writes is the state before them."""
    model, optimizer = build("full_shard")
    train(model, optimizer, range(1))
    before = {n: p.clone() for n, p in full_parameters(model).items()}
    trained, write_data = Event(), checkpoint._Writer.write_data

    def write_late(self, plan, planner):
        assert trained.wait(60)
        return write_data(self, plan, planner)

    monkeypatch.setattr(checkpoint._Writer, "write_data", write_late)
    saver = checkpoint.Saver(str(tmp_path), model, optimizer, background=True)
    saver.save(1, {}, wait=False)
    train(model, optimizer, range(1, 5))
    assert names(tmp_path) == [".step_00000001.writing"]
    trained.set()
    saver.finish()
    other, its = build("full_shard", seed=9)
    checkpoint.load(tmp_path / "step_00000001", other, its)
    for name, value in full_parameters(other).items():
        assert torch.equal(value, before[name]), name
        assert not torch.equal(value, full_parameters(model)[name]) or "k_bias" in name, name


# --- real signals


def wait_for(what, seconds: float, doing: str):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"time was up: {doing}"
        time.sleep(0.05)
    return found


def members(group: int) -> list[int]:
    """The living processes of a process group (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = re.search(r"SigCgt:\s*(\w+)", status)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


@pytest.fixture
def two_processes(tmp_path):
    """Two ranks of train_fsdp.py with a worker each, that would train for hours."""
    argv = changed(
        TWELVE, model="tiny", steps="100000", save_every="50000", workers="1", mode="full_shard"
    )
    port, processes = free_port(), []
    for rank in range(2):
        with open(tmp_path / f"rank{rank}.txt", "w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "train_fsdp.py", *argv, "--out", str(tmp_path / "run")],
                    env=environment(rank, 2, port),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=ROOT,
                )
            )
    yield processes
    for p in processes:
        if members(p.pid):
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()


def ended_by_signal(processes, folder: Path) -> int:
    """All left with status 0 and a checkpoint of the step they stopped at; that step."""
    try:
        for p in processes:
            assert p.wait(60) == 0, (folder / "rank0.txt").read_text()[-3000:]
        wait_for(lambda: not any(members(p.pid) for p in processes), 15, "processes are left")
        _, _, end = read_log(folder / "run" / "log.jsonl")
        assert end["reason"] == "signal" and end["problem"] is None
        assert names(folder / "run") == [f"step_{end['steps']:08d}"]
        assert checkpoint.verify(folder / "run" / f"step_{end['steps']:08d}") > 0
        assert not (folder / "run" / "done").exists()
    finally:
        texts = [(folder / f"rank{r}.txt").read_text() for r in range(2)]
    assert not any("Traceback" in t or "DataLoader worker" in t for t in texts), "".join(
        re.sub(r"(?m)^(?:step|\[W).*\n", "", t)[-3000:] for t in texts
    )
    return end["steps"]


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux
@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_process_group_of_one_rank(number, two_processes, tmp_path):
    """The workers get it too, and are not killed by it while the rank still needs them."""
    log = tmp_path / "run" / "log.jsonl"
    wait_for(lambda: log.exists() and '"step"' in log.read_text(), 120, "the first step")
    assert len(members(two_processes[1].pid)) >= 2  # the rank, its worker
    os.killpg(two_processes[1].pid, number)
    assert ended_by_signal(two_processes, tmp_path) >= 1


@linux
@pytest.mark.full
def test_a_signal_during_the_imports(two_processes, tmp_path):
    rank0 = two_processes[0].pid
    wait_for(lambda: catches(rank0, signal.SIGTERM), 10, "the handler")
    os.kill(rank0, signal.SIGTERM)
    assert not (tmp_path / "run").exists()  # so early it is
    assert ended_by_signal(two_processes, tmp_path) <= 3
