"""prepare.py against tar, numpy and Pillow: scan, statistics, packs, scenes of a file per band."""

import errno
import io
import json
import os
import sys
import tarfile
from contextlib import suppress
from unittest.mock import Mock

import numpy as np
import pytest
from images import copy_tiles, noise_image, stream
from PIL import Image

import data
import prepare


def prepared(command, *words, status=0):
    """Run a command in this process."""
    assert prepare.main([command, *map(str, words), "--workers", "1"]) == status


def tar_content(folder):
    """Read the members of a pack by tar: name -> content."""
    found = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}
    return found


@pytest.fixture
def root(tmp_path):
    """A folder of 20 pictures, and a path for a pack beside it."""
    copy_tiles(tmp_path / "root", 20)
    return tmp_path / "root"


def break_some(root):
    """Add five pictures that cannot be read -> their names, of which only `scan` finds cut.jpg."""
    whole = (root / "00.jpg").read_bytes()
    broken = {"empty.jpg": b"", "html.jpg": b"<!DOCTYPE html>", "cut.jpg": whole[:-500]}
    broken["zeros.jpg"] = whole[:-2000] + bytes(2000)
    for name, content in broken.items():
        (root / name).write_bytes(content)
    (root / "nothing.jpg").symlink_to("nowhere")
    (root / "text.txt").touch()
    return {*broken, "nothing.jpg"}


@pytest.mark.parametrize("workers", ["2", "1"])
def test_scan_names_every_broken_image_once_and_counts_the_others(root, workers, capsys):
    broken = break_some(root)
    assert prepare.main(["scan", str(root), "--workers", workers]) == 1
    said = capsys.readouterr().out
    named = [line.split(": ")[0] for line in said.splitlines() if line.startswith(f"{root}/")]
    assert sorted(named) == sorted(f"{root}/{name}" for name in broken)
    assert "20 images: 3 channels of uint8" in said and "left out 1 other files" in said
    assert "5 of 25 images cannot be read" in said and "--max-bad" in said


# --- packs


def test_a_pack_is_a_copy_that_tar_reads_and_trains_as_its_tree(root, tmp_path, monkeypatch):
    """The listed substitutes of broken images included."""
    lost = break_some(root) - {"cut.jpg"}
    monkeypatch.setattr(prepare, "SHARD_BYTES", 2**14)
    prepared("pack", root, tmp_path / "pack")
    files = data.scan(str(root))
    packed = data.scan(str(tmp_path / "pack"))
    names = [files.name(index) for index in range(25)]
    expected = {name: b"" if name in lost else (root / name).read_bytes() for name in names}
    assert len(list((tmp_path / "pack").glob("*.tar"))) > 1
    assert [*tar_content(tmp_path / "pack").items()] == [*expected.items()]  # in this order
    assert {packed.name(i): packed.read(i) for i in range(25)} == expected

    def rows(files, **options):
        found = stream(files, global_batch=8, steps=range(6), **options)
        return [row._replace(path=os.path.basename(row.path)) for row in found]

    assert rows(packed, ranks=2, workers=1) == rows(files)
    with pytest.raises(ValueError, match="is a pack"):
        data.scan(str(tmp_path / "pack"), include=["0*"])
    (tmp_path / "pack/pack.index").write_bytes(b"\x80\x04x")
    with pytest.raises(ValueError, match="is damaged"):
        data.scan(str(tmp_path / "pack"))


def test_packing_makes_large_pictures_smaller_and_names_stay_unique(tmp_path, capsys):
    root = tmp_path / "root"
    root.mkdir()
    smooth = Image.fromarray(np.arange(36, dtype=np.uint8).reshape(3, 4, 3) * 7)
    sizes = {"a.jpg": (900, 300), "b.png": (300, 1000), "b.jpg": (9, 8), "c.tif": (256, 256)}
    for name, size in sizes.items():
        smooth.resize(size, Image.Resampling.BICUBIC).save(root / name)
    np.save(root / "f.npy", np.full((5, 600, 300), 7, np.uint16))
    prepared("pack", root, tmp_path / "pack", "--max-side", 256)
    content = tar_content(tmp_path / "pack")
    assert list(content) == ["a.jpg", "b.jpg", "b.png.jpg", "c.tif", "f.npy"]
    for name in ("b.jpg", "c.tif", "f.npy"):
        assert content[name] == (root / name).read_bytes()
    for made, name, size in (("a.jpg", "a.jpg", (256, 85)), ("b.png.jpg", "b.png", (77, 256))):
        image = Image.open(io.BytesIO(content[made]))
        assert (image.size, image.format) == (size, "JPEG")
        expected = Image.open(root / name).resize(size, Image.Resampling.BICUBIC)
        assert np.abs(np.subtract(image, expected, dtype=float)).mean() < 2
    (root / "b.png.jpg").write_bytes(content["b.jpg"])
    prepared("pack", root, tmp_path / "pack2", status=2)
    assert "rename it" in capsys.readouterr().err


def test_a_pack_is_whole_or_not_there(root, tmp_path, monkeypatch, capsys):
    """And a failing disk is no broken image."""
    for error in (KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")):
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(data.ImageList, "read", Mock(side_effect=error))
            prepared("pack", root, tmp_path / "pack", status=1)
        assert not (tmp_path / "pack").exists()
    said = capsys.readouterr()
    assert said.err.startswith("prepare.py: error: ") and "unreadable" not in said.out
    prepared("pack", root, tmp_path / "pack")
    assert len(tar_content(tmp_path / "pack")) == 20
    prepared("pack", root, tmp_path / "pack", status=2)
    assert "exists: pack into a new folder" in capsys.readouterr().err


def test_without_rasterio_one_sentence_says_what_to_type(tmp_path, monkeypatch, capsys):
    Image.new("I;16", (40, 40)).save(tmp_path / "x.tif")
    monkeypatch.setitem(sys.modules, "rasterio", None)
    prepared("scan", tmp_path, status=1)
    said = capsys.readouterr().err
    assert "x.tif: " in said and "`pip install rasterio`" in said and said.count("\n") == 1


# --- statistics


def test_statistics_are_those_of_numpy_and_go_along(tmp_path, monkeypatch, capsys):
    """Each image has the same weight, whatever its size; where nothing can be written they have
    a place; a pack of the images has them too."""
    root = tmp_path / "root"
    root.mkdir()
    means = []
    squares = []
    for i in range(5):
        image = noise_image(i, 40 + i, 50)
        image.save(root / f"{i}.png")
        means.append(np.mean(image, axis=(0, 1)) / 255)
        squares.append(np.mean(np.square(image, dtype=float), axis=(0, 1)) / 255**2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
        prepared("stats", root, status=1)
        assert "--stats FILE" in capsys.readouterr().err
        (tmp_path / "mine").mkdir()
        prepared("stats", root, "--stats", tmp_path / "mine/s.json")
    assert not (tmp_path / "root.stats.json").exists()
    prepared("stats", root)
    found = data.read_stats(data.stats_file(f"{root}/"))
    assert found == data.read_stats(str(tmp_path / "mine/s.json"))
    std = np.sqrt(np.mean(squares, axis=0) - np.square(np.mean(means, axis=0)))
    np.testing.assert_allclose(found[0].mean, np.mean(means, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found[0].std, std, rtol=1e-12)
    assert found[1] == data.fingerprint(data.scan(str(root)))
    prepared("pack", root, tmp_path / "pack")
    packed, images = data.read_stats(data.stats_file(str(tmp_path / "pack")))
    assert packed == found[0] and images == data.fingerprint(data.scan(str(tmp_path / "pack")))


WRONG = [{"mean": [1]}, {"std": [0, 1]}, {"mean": [1e999, 1]}, {"dtype": "int8"}, {"std": None}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_statistics_are_refused(wrong, tmp_path):
    found = {"mean": [1, 2], "std": [3, 4], "dtype": "uint16"} | wrong
    (tmp_path / "s").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="is not as"):
        data.read_stats(f"{tmp_path}/s")


# --- scenes


def test_bands_in_files_become_one_array(tmp_path, capsys):
    """In the order that is asked for; a coarser band is enlarged, one that is missing is told."""
    fine = np.arange(64, dtype=np.uint16).reshape(8, 8)
    coarse = np.arange(16, dtype=np.uint16).reshape(4, 4)
    files = {"s1/R10m/T1_B02": fine, "s1/R10m/T1_B03": fine + 1, "s1/R20m/T1_B8A": coarse}
    files |= {"s2/T1_B02": fine, "s2/T1_B03": fine}
    files |= {"s3/T1_B02": coarse, "s3/T1_B03": coarse, "s3/T1_B8A": fine}  # not to be reduced
    files |= {"s4/T1_B02": fine, "s4/T1_B03": fine, "s4/T1_B8A": coarse[:, :2]}  # another area
    root = tmp_path / "root"
    for name, array in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(root / name, array)
    prepared("pack", root, tmp_path / "pack", "--stack", "B03,B8A,B02")
    content = tar_content(tmp_path / "pack")
    assert list(content) == ["s1.npy", "s2", "s3", "s4"]
    expected = np.stack([fine + 1, np.kron(coarse, np.ones((2, 2))), fine])
    np.testing.assert_array_equal(np.load(io.BytesIO(content["s1.npy"])), expected)
    said = capsys.readouterr().out
    for sentence in ("no file of band B8A", "name the finest band first", "they cover other areas"):
        assert said.count(sentence) == 1
    prepared("pack", root, tmp_path / "other", "--stack", "B02,B99", status=2)
    assert "no file of band B99" in capsys.readouterr().err
