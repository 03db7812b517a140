"""prepare.py against tar, numpy and PIL: scan, statistics, packs, scenes of a file per band."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress

import numpy as np
import pytest
from conftest import ROOT
from images import copy_tiles, noise_image, stream
from PIL import Image

import data
import prepare


def prepared(command, *words):
    assert prepare.main([command, *map(str, words), "--workers", "1"]) == 0


def contents(files):
    return [files.read(index) for index in range(len(files))]


def tar_content(folder):
    """Read the members of a pack by tar: name -> content."""
    found = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}
    return found


def broken_tree(root):
    """Make 20 pictures and five that cannot be read -> the names of these."""
    copy_tiles(root, 20)
    whole = (root / "00.jpg").read_bytes()
    bad = {"empty.jpg": b"", "html.jpg": b"<!DOCTYPE html>", "cut.jpg": whole[:-500]}
    bad["zeros.jpg"] = whole[:-2000] + bytes(2000)
    for name, content in bad.items():
        (root / name).write_bytes(content)
    (root / "nothing.jpg").symlink_to("nowhere")
    (root / "text.txt").touch()
    return {*bad, "nothing.jpg"}


def test_scan_names_every_broken_image_once(tmp_path, capsys):
    root = tmp_path / "root"
    broken = broken_tree(root)
    for workers in ("2", "1"):
        assert prepare.main(["scan", str(root), "--workers", workers]) == 1
        said = capsys.readouterr().out
        named = [line for line in said.splitlines() if line.startswith(f"{root}/")]
        assert {line.split(": ")[0] for line in named} == {f"{root}/{name}" for name in broken}
        assert len(named) == 5 and "5 of 25 images cannot be read" in said
        assert "20 images: 3 channels of uint8" in said and "left out 1 other files" in said
        assert "--max-bad" in said


def test_a_failing_disk_is_no_broken_image(tmp_path, monkeypatch, capsys):
    copy_tiles(tmp_path / "root", 3)
    for error in (OSError(errno.EIO, "Input/output error"),):
        monkeypatch.setattr(data.ImageList, "read", lambda *_, error=error: raise_it(error))
        assert prepare.main(["scan", str(tmp_path / "root"), "--workers", "1"]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("prepare.py: error: ") and "cannot be read" not in printed.out


def raise_it(error):
    raise error


# --- packs


def test_a_pack_is_a_copy_that_tar_reads(tmp_path, monkeypatch):
    """And its stream is that of its tree, the listed substitutes of broken images included."""
    root, target = tmp_path / "root", tmp_path / "pack"
    broken_tree(root)
    monkeypatch.setattr(prepare, "SHARD_BYTES", 2**14)
    prepared("pack", root, target)
    files, packed = data.scan(str(root)), data.scan(str(target))
    names = [files.name(index) for index in range(25)]
    lost = ("empty.jpg", "html.jpg", "zeros.jpg", "nothing.jpg")  # `scan` alone finds the cut one
    expected = [b"" if name in lost else (root / name).read_bytes() for name in names]
    assert len(list(target.glob("*.tar"))) > 1
    assert list(tar_content(target).items()) == [*zip(names, expected, strict=True)]
    assert contents(packed) == expected and [packed.name(i) for i in range(25)] == names

    def rows(files, **options):
        found = stream(files, global_batch=8, steps=range(6), **options)
        return [row._replace(path=os.path.basename(row.path)) for row in found]

    assert rows(packed, ranks=2, workers=1) == rows(files)
    with pytest.raises(ValueError, match="is a pack"):
        data.scan(str(target), include=["0*"])
    (target / "pack.index").write_bytes(b"\x80\x04x")
    with pytest.raises(ValueError, match="is damaged"):
        data.scan(str(target))


def test_packing_makes_large_pictures_smaller_and_names_stay_unique(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    smooth = Image.fromarray(np.arange(36, dtype=np.uint8).reshape(3, 4, 3) * 7)
    sizes = {"a.jpg": (900, 300), "b.png": (300, 1000), "b.jpg": (9, 8), "c.tif": (256, 256)}
    for name, size in sizes.items():
        smooth.resize(size, Image.Resampling.BICUBIC).save(root / name)
    np.save(root / "f.npy", np.full((5, 600, 300), 7, np.uint16))
    prepared("pack", root, tmp_path / "pack", "--max-side", 256)
    content = tar_content(tmp_path / "pack")
    made = "b.png.jpg"
    assert list(content) == ["a.jpg", "b.jpg", made, "c.tif", "f.npy"]
    for name in ("b.jpg", "c.tif", "f.npy"):
        assert content[name] == (root / name).read_bytes()
    for name, source, size in (("a.jpg", "a.jpg", (256, 85)), (made, "b.png", (77, 256))):
        image = Image.open(io.BytesIO(content[name]))
        assert (image.size, image.format) == (size, "JPEG")
        expected = Image.open(root / source).resize(size, Image.Resampling.BICUBIC)
        assert np.abs(np.subtract(image, expected, dtype=float)).mean() < 2


def test_a_pack_is_whole_or_not_there(tmp_path, monkeypatch, capsys):
    root, target = tmp_path / "root", tmp_path / "pack"
    copy_tiles(root, 9)
    command = ["pack", str(root), str(target), "--workers", "1"]
    for error in (KeyboardInterrupt(), OSError(errno.EIO, "")):
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(data.ImageList, "read", lambda *_, error=error: raise_it(error))
            assert prepare.main(command) == 1
        assert not target.exists()
    assert prepare.main(command) == 0
    assert contents(data.scan(str(target))) == contents(data.scan(str(root)))
    for folder in (target, root):
        assert prepare.main(["pack", str(root), str(folder)]) == 2
        assert "exists: pack into a new folder" in capsys.readouterr().err
    assert prepare.main(["stats", str(root / "none")]) == 2


def test_without_rasterio_one_sentence_says_what_to_type(tmp_path, monkeypatch, capsys):
    (tmp_path / "root").mkdir()
    Image.new("I;16", (40, 40)).save(tmp_path / "root/x.tif")
    monkeypatch.setitem(sys.modules, "rasterio", None)
    assert prepare.main(["scan", str(tmp_path / "root"), "--workers", "1"]) == 1
    error = capsys.readouterr().err
    assert "x.tif: " in error and "`pip install rasterio`" in error and error.count("\n") == 1


# --- statistics


def test_statistics_are_those_of_numpy_and_go_along(tmp_path, monkeypatch):
    """Each image has the same weight, whatever its size; a pack of the images has them too."""
    root = tmp_path / "root"
    root.mkdir()
    pixels = [noise_image(i, 40 + i, 50) for i in range(5)]
    for i, image in enumerate(pixels):
        image.save(root / f"{i}.png")
    prepared("stats", root)
    found, measured = data.read_stats(data.stats_file(f"{root}/"))
    scaled = [np.asarray(image, np.float64) / 255 for image in pixels]
    mean = np.mean([image.mean((0, 1)) for image in scaled], axis=0)
    square = np.mean([(image**2).mean((0, 1)) for image in scaled], axis=0)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(found.std, np.sqrt(square - mean**2), rtol=1e-12)
    assert measured == data.fingerprint(data.scan(str(root)))
    prepared("pack", root, tmp_path / "pack")
    packed, measured = data.read_stats(data.stats_file(str(tmp_path / "pack")))
    assert packed == found and measured == data.fingerprint(data.scan(str(tmp_path / "pack")))


def test_statistics_of_a_folder_that_cannot_be_written_have_a_place(tmp_path, monkeypatch, capsys):
    (tmp_path / "root").mkdir()
    np.save(tmp_path / "root/0.npy", np.arange(48, dtype=np.uint16).reshape(3, 4, 4) + 1)
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    assert prepare.main(["stats", str(tmp_path / "root"), "--workers", "1"]) == 1
    assert "--stats FILE" in capsys.readouterr().err
    place = tmp_path / "mine/s.json"
    place.parent.mkdir()
    prepared("stats", tmp_path / "root", "--stats", place)
    assert data.read_stats(str(place))[0].dtype == "uint16"
    assert not (tmp_path / "root.stats.json").exists()


WRONG = [{"mean": [1]}, {"std": [0, 1]}, {"mean": [1e999, 1]}, {"dtype": "int8"}, {"std": None}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_statistics_are_refused(wrong, tmp_path):
    good = {"mean": [1, 2], "std": [3, 4], "dtype": "uint16"}
    (tmp_path / "s").write_text(json.dumps(good))
    assert data.read_stats(f"{tmp_path}/s") == (data.ChannelStats((1, 2), (3, 4), "uint16"), None)
    (tmp_path / "s").write_text(json.dumps(good | wrong))
    with pytest.raises(ValueError, match="is not as"):
        data.read_stats(f"{tmp_path}/s")


# --- scenes


def scene(folder, name, **bands):
    folder.mkdir(parents=True, exist_ok=True)
    for band, array in bands.items():
        np.save(folder / f"{name}_{band}.npy", array)


def test_bands_in_files_become_one_array(tmp_path, capsys):
    """In the order that is asked for; a coarser band is enlarged, one that is missing is told."""
    fine = np.arange(64, dtype=np.uint16).reshape(8, 8)
    coarse = np.arange(16, dtype=np.uint16).reshape(4, 4)
    root = tmp_path / "root"
    scene(root / "s1/R10m", "T1", B02=fine, B03=fine + 1)
    scene(root / "s1/R20m", "T1", B8A=coarse)
    scene(root / "s2", "T1", B02=fine, B03=fine)
    scene(root / "s3", "T1", B02=coarse, B03=coarse, B8A=fine)  # not to be reduced
    scene(root / "s4", "T1", B02=fine, B03=fine, B8A=coarse[:, :2])  # of another area
    prepared("pack", root, tmp_path / "pack", "--stack", "B03,B8A,B02")
    packed = data.scan(str(tmp_path / "pack"))
    assert [packed.name(i) for i in range(4)] == ["s1.npy", "s2", "s3", "s4"]
    expected = np.stack([fine + 1, np.kron(coarse, np.ones((2, 2))), fine])
    np.testing.assert_array_equal(np.load(io.BytesIO(packed.read(0))), expected)
    said = capsys.readouterr().out
    for sentence in ("no file of band B8A", "name the finest band first", "they cover other areas"):
        assert said.count(sentence) == 1
    for bands, error in (("B02,B99", "no file of band B99"), ("B02,B02", "is no list of names")):
        with suppress(SystemExit):
            assert prepare.main(["pack", str(root), f"{root}2", "--stack", bands]) == 2
        assert error in capsys.readouterr().err


# --- processes


def run_script(code, folder):
    """Run a script that reads the images in folder/root -> its exit status and output."""
    (folder / "main.py").write_text(code.replace("ROOT", repr(str(folder / "root"))))
    done = subprocess.run(
        [sys.executable, folder / "main.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


LOADER = """
import multiprocessing, os, signal, data
if __name__ == "__main__":
    sizes = dict(img_size=8, patches=4, global_batch=2, micro_batch_size=2, workers=2)
    loader = iter(data.build_loader(data.scan(ROOT), seed=0, steps=range(40), **sizes))
    pids = [process.pid for process in multiprocessing.active_children()]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    for _ in range(20):
        next(loader)
    print(*pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_the_process_that_reads_from_them(tmp_path):
    """However it ends; and a signal that a launcher sends to all of them leaves them at work."""
    copy_tiles(tmp_path / "root", 4)
    status, said = run_script(LOADER, tmp_path)
    pids = said.split()[:2]
    assert status == -signal.SIGKILL and all(pid.isdecimal() for pid in pids), said
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_importing_data_and_reading_change_no_setting_of_pillow_or_of_warnings(tmp_path):
    copy_tiles(tmp_path / "root", 1)
    code = """
import warnings
import torch
from PIL import Image, ImageFile
before = (Image.MAX_IMAGE_PIXELS, ImageFile.MAXBLOCK, [*warnings.filters])
import data
data.decode(data.open_image(data.scan(ROOT).read(0))[0])
assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.MAXBLOCK, [*warnings.filters])
"""
    assert run_script(code, tmp_path) == (0, "")
