"""Checkpoints made to block, to exhaust memory or to mislead: each is refused in one sentence."""

import io
import json
import os
import re
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_checkpoint import (  # noqa: F401 - fixtures
    SHARD,
    build,
    copy,
    edit_manifest,
    edit_metadata,
    full_parameters,
    good,
    one_process,
    single,
    write_manifest,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import checkpoint

NAME = "model.norm.weight"


def edit_entry(folder: Path, size, *chunks) -> None:
    """Give one tensor this size in the index, in parts of these (offsets, sizes)."""

    def edit(metadata):
        parts = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
        entry = metadata.state_dict_metadata[NAME]
        metadata.state_dict_metadata[NAME] = replace(entry, size=torch.Size(size), chunks=parts)

    edit_metadata(folder, edit)


def quantized(folder: Path) -> None:
    """Give one tensor a quantized type of the same size in the index."""

    def edit(metadata):
        entry = metadata.state_dict_metadata[NAME]
        properties = replace(entry.properties, dtype=torch.qint32)
        metadata.state_dict_metadata[NAME] = replace(entry, properties=properties)

    edit_metadata(folder, edit)


def edit_place(folder: Path, **changes) -> None:
    """Give every part another place in the index."""

    def edit(metadata):
        for key, place in metadata.storage_data.items():
            metadata.storage_data[key] = replace(place, **changes)

    edit_metadata(folder, edit)


def shared_place(folder: Path) -> None:
    """A hundred tensors in the bytes of one: each fits, all together do not."""

    def edit(metadata):
        entry, names = metadata.state_dict_metadata, list(metadata.state_dict_metadata)
        key = next(k for k in metadata.storage_data if k.fqn == "model.blocks.0.mlp.fc1.weight")
        for i in range(100):
            entry[f"model.x{i}"] = entry[names[names.index(key.fqn)]]
            metadata.storage_data[replace(key, fqn=f"model.x{i}")] = metadata.storage_data[key]

    edit_metadata(folder, edit)


def pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def folder_instead(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def manifest_text(folder: Path, key: str, text: str) -> None:
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest[key] = "HERE"
    write_manifest(folder, json.dumps(manifest).replace('"HERE"', text))


def index(folder: Path, code: bytes, size: int = 0) -> None:
    """Replace the index by this pickle, extended to this size as a sparse file."""
    (folder / ".metadata").write_bytes(code)
    if size:
        os.truncate(folder / ".metadata", size)
    sums = list(checkpoint._size_and_crc(folder / ".metadata"))
    edit_manifest(folder, lambda manifest: manifest["files"].update({".metadata": sums}))


def deflated(folder: Path) -> None:
    """Replace every tensor by an archive of half a MB that inflates to 400 MB."""
    packed = io.BytesIO()
    archive = zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED)
    with archive, archive.open("archive/data/0", "w") as record:
        for _ in range(400):
            record.write(bytes(2**20))
    begin = (folder / SHARD).stat().st_size
    with (folder / SHARD).open("ab") as file:
        file.write(packed.getvalue())
    edit_place(folder, offset=begin, length=packed.tell())
    sums = list(checkpoint._size_and_crc(folder / SHARD))
    edit_manifest(folder, lambda manifest: manifest["files"].update({SHARD: sums}))


UNREADABLE = r"checkpoint\.json is not readable"
INDEX = r"\.metadata is not readable"
COVERED = rf"{NAME} is not covered exactly once|not readable"
HOSTILE = {
    "a tensor of a petabyte": (lambda f: edit_entry(f, [2**48], ([0], [2**48])), r"does not fit"),
    "a size that overflows": (
        lambda f: edit_entry(f, [2**32] * 2, ([0, 0], [2**32] * 2)),
        rf"{NAME}",
    ),
    "negative offset": (lambda f: edit_entry(f, [32], ([-32], [32])), COVERED),
    "offset beyond": (lambda f: edit_entry(f, [32], ([32], [32])), COVERED),
    "negative sizes": (lambda f: edit_entry(f, [32], ([0], [-32]), ([0], [64])), COVERED),
    "a hole under two parts": (lambda f: edit_entry(f, [32], ([0], [16]), ([0], [16])), COVERED),
    "a hole between columns": (
        lambda f: edit_entry(f, [2, 16], ([0, 0], [1, 16]), ([0, 8], [1, 8]), ([1, 0], [1, 8])),
        COVERED,
    ),
    "of other dimensions": (lambda f: edit_entry(f, [32], ([0, 0], [32, 1])), r"not readable"),
    "place before the file": (lambda f: edit_place(f, offset=-1), r"does not fit"),
    "place behind the file": (lambda f: edit_place(f, offset=2**62), r"does not fit"),
    "place of nothing": (lambda f: edit_place(f, length=0), r"does not fit"),
    "place of negative length": (lambda f: edit_place(f, length=-5), r"does not fit"),
    "place of no number": (lambda f: edit_place(f, length=float("nan")), r"does not fit"),
    "quantized": (quantized, r"contains 'torch\.qint32"),
    "many in one place": (shared_place, r"bytes more than the files contain"),
    "pipe as shard": (lambda f: pipe(f, SHARD), r"__0_0\.distcp is not a regular file"),
    "pipe as index": (lambda f: pipe(f, ".metadata"), r"\.metadata is not a regular file"),
    "pipe as manifest": (lambda f: pipe(f, "checkpoint.json"), r"checkpoint\.json is not a reg"),
    "folder as shard": (lambda f: folder_instead(f, SHARD), r"__0_0\.distcp is not a regular file"),
    "folder as manifest": (lambda f: folder_instead(f, "checkpoint.json"), r"json is not a reg"),
    "index unlisted": (
        lambda f: edit_manifest(f, lambda x: x["files"].pop(".metadata")),
        UNREADABLE,
    ),
    "negative step": (lambda f: edit_manifest(f, lambda x: x.update(step=-1)), UNREADABLE),
    "step NaN": (lambda f: manifest_text(f, "step", "NaN"), UNREADABLE),
    "step 1e400": (lambda f: manifest_text(f, "step", "1e400"), UNREADABLE),
    "step true": (lambda f: manifest_text(f, "step", "true"), UNREADABLE),
    "files NaN": (lambda f: manifest_text(f, "files", '{".metadata": [NaN, 0]}'), UNREADABLE),
    "deep": (lambda f: manifest_text(f, "x", "[" * 200_000 + "]" * 200_000), UNREADABLE),
    "step of 10^12": (lambda f: manifest_text(f, "step", "1000000000000"), UNREADABLE),
    "manifest of 2 GiB": (lambda f: os.truncate(f / "checkpoint.json", 2**31), UNREADABLE),
    "index of a huge table": (lambda f: index(f, b"\x80\x04Nr\xff\xff\xff\x0f."), INDEX),
    "index of huge bytes": (lambda f: index(f, b"\x80\x05\x96" + bytes(7) + b"\1."), INDEX),
    "index of an endless line": (lambda f: index(f, b"\x80\x04Np", 2**29), INDEX),
    "index of a huge frame": (
        lambda f: index(f, b"\x80\4\x95\0\0\0\0\1\0\0\0N.", 2**29),
        r"an argument of 4294967296 bytes",
    ),
    "index of a huge word": (
        lambda f: index(f, b"\x80\x04X\0\0\0\x10", 2**29),
        r"an argument of 268435456 bytes",
    ),
    "index of zeros": (lambda f: index(f, b"", 2**29), INDEX),
    "deflated": (deflated, r"no plain tensor"),
    "step of many digits": (lambda f: manifest_text(f, "step", "9" * 10_000), UNREADABLE),
}


@pytest.fixture
def little_memory():
    """Check that at most 200 MiB more than now are used (Linux)."""
    if not sys.platform.startswith("linux"):
        yield
        return
    Path("/proc/self/clear_refs").write_text("5")  # the peak, from here on
    used = in_status("VmRSS")
    yield
    assert in_status("VmHWM") - used < 200 * 1024


def in_status(name: str) -> int:
    """A memory size of this process, KiB."""
    (found,) = re.findall(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_checkpoint_is_refused_everywhere(kind, copy, single, little_memory, capsys):  # noqa: F811
    damage, sentence = HOSTILE[kind]
    damage(copy)
    model, optimizer = build("full_shard", seed=9)
    before = full_parameters(model)
    with pytest.raises(checkpoint.Damaged, match=sentence) as caught:
        checkpoint.load(copy, model, optimizer)
    assert str(copy) in str(caught.value) and "\n" not in str(caught.value)
    assert not optimizer.state
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name]), name
    for command in (["verify", copy], ["consolidate", copy, copy.parent / "model.pth"]):
        assert checkpoint.main([str(word) for word in command]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("checkpoint.py: error: ") and printed.err.count("\n") == 1
    assert not (copy.parent / "model.pth").exists()
    assert checkpoint.main(["ls", str(copy.parent)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
