"""A checkpoint of 256 shard files, as 256 ranks write it: how many files each rank opens."""

import io
import json
import os
import pickle
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import join, on_ranks
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import checkpoint
import mesh
import shard

SHARDS = 256


def build(mode: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, SHARDS))
    world = dist.get_world_size()
    grid = mesh.build_mesh(shard.mesh_shape(mode, world), torch.device("cpu"))
    options = shard.ShardingOptions(param_dtype=torch.float32)
    model = shard.apply(model, mode, grid, block_classes=set(), options=options)
    return model, shard.build_optimizer(model, mode, set(), lr=1e-3, weight_decay=0.0)


def save_alone() -> list[torch.Tensor]:
    """On one rank: save after one step; weight and first moment."""
    join()
    model, optimizer = build("full_shard")
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    checkpoint.save(os.environ["FOLDER"], 1, model, optimizer)
    weight = model[0].weight
    saved = [t.full_tensor().detach() for t in (weight, optimizer.state[weight]["exp_avg"])]
    dist.destroy_process_group()
    return saved


def split(folder: Path) -> None:
    """Rewrite a checkpoint of one rank as `SHARDS` files with some rows of each tensor."""
    old, new = folder / "step_00000001", folder / "step_00000002"
    metadata = pickle.loads((old / ".metadata").read_bytes())
    parts = [bytearray() for _ in range(SHARDS)]
    places = {}
    for index, place in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        content = (old / place.relative_path).read_bytes()[place.offset :][: place.length]
        whole = torch.load(io.BytesIO(content), weights_only=True)
        pieces = whole.split(len(whole) // SHARDS) if whole.ndim else [whole]
        entry.chunks = []
        for i, piece in enumerate(pieces):
            rows = piece.shape[0] if whole.ndim else 0
            offsets = torch.Size([i * rows, 0][: whole.ndim])
            entry.chunks.append(ChunkStorageMetadata(offsets, piece.shape))
            file = io.BytesIO()
            torch.save(piece.clone(), file)
            name = f"__{i}_0.distcp"
            where = _StorageInfo(name, len(parts[i]), len(file.getvalue()))
            places[MetadataIndex(index.fqn, offsets, i)] = where
            parts[i] += file.getvalue()
    metadata.storage_data = places
    new.mkdir()
    for i, part in enumerate(parts):
        (new / f"__{i}_0.distcp").write_bytes(part)
    (new / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = json.loads((old / checkpoint.MANIFEST).read_text())
    del manifest["checksum"]
    files = {path.name: checkpoint._size_and_crc(path) for path in new.iterdir()}
    manifest = json.loads(json.dumps(manifest | {"step": 2, "files": files}))
    manifest["checksum"] = checkpoint._manifest_checksum(manifest)
    (new / checkpoint.MANIFEST).write_text(json.dumps(manifest))


def load_and_count() -> tuple[Counter, list[torch.Tensor]]:
    """On every rank: resume in full_shard; file operations on checkpoints, and what was loaded."""
    join()
    model, optimizer = build("full_shard")
    seen: Counter = Counter()

    def note(event, arguments):
        if event in ("open", "os.listdir", "os.scandir") and "step_" in str(arguments[0]):
            seen[event] += 1

    def stat(path, *more, original=os.stat, **options):
        seen["stat"] += "step_" in str(path)
        return original(path, *more, **options)

    sys.addaudithook(note)
    os.stat = stat
    newest = checkpoint.find_newest(Path(os.environ["FOLDER"]).parent)
    assert checkpoint.load(newest, model, optimizer)["step"] == 2
    counted = seen.copy()
    weight = model[0].weight
    loaded = [t.full_tensor().detach() for t in (weight, optimizer.state[weight]["exp_avg"])]
    dist.destroy_process_group()
    return counted, loaded


@pytest.mark.slow
def test_a_rank_opens_fewer_files_the_larger_the_world(tmp_path):
    """Of each shard it checks or reads, once for either; none is listed or only looked up."""
    (saved,) = on_ranks(1, save_alone, tmp_path)
    split(tmp_path)
    for world in (2, 8):
        for counted, loaded in on_ranks(world, load_and_count, tmp_path / f"ranks{world}"):
            # two more: the index and the manifest; a share of rows may end inside a file
            assert 2 * SHARDS / world < counted["open"] <= 2 * SHARDS / world + 4
            assert counted["stat"] <= counted["open"] and {*counted} == {"open", "stat"}
            assert all(map(torch.equal, loaded, saved))
