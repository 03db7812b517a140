"""prepare.py against tar, webdataset, numpy and PIL; and what training does with bad images."""

import csv
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
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tifffile
from conftest import ROOT
from PIL import Image
from ranks import Run, environment, free_port, processes_of, read_log, run_ranks
from test_data import noise_image, stream

import checkpoint
import data
import prepare
from runtime import image_source
from storage import image_list, packing, staging

TILES = ROOT / "examples/tiles/train"


def silent(text):
    pass


def listed(root):
    return image_list.list_images(str(root), silent)


def contents(files):
    return [files.read(i) for i in range(len(files))]


def prepared(*argv):
    assert prepare.main([*map(str, argv), "--workers", "1"]) == 0


def class_tree(root, classes=3, each=8, **size):
    """JPEGs in leaf folders two and three levels deep."""
    for i in range(classes * each):
        leaf = i % classes
        folder = root / f"area{leaf % 2}" / ("part" if leaf % 2 else "") / f"class{leaf}"
        folder.mkdir(parents=True, exist_ok=True)
        noise_image(i, **size).save(folder / f"P{i:03}.jpg", quality=95)
    return listed(root)


def broken_tree(root):
    """A class tree, and one of every kind of broken file: path -> what its reason must say."""
    whole = class_tree(root, each=9).read(0)
    kinds = {
        "cut.jpg": (whole[: len(whole) // 2], "truncated"),
        "empty.jpg": (b"", "not an image: it begins with"),
        "html.jpg": (b"<!DOCTYPE html><html>404</html>", "not an image: it begins with"),
        "bands.tif": (b"II*\0" + bytes(300), "`prepare.py pack` reads TIFF of many bands"),
        "nothing.jpg": (None, "No such file"),
    }
    for name, (content, _) in kinds.items():
        path = root / "area0/class0" / name
        if content is None:
            path.symlink_to("vanished.jpg")
        else:
            path.write_bytes(content)
    return {str(root / "area0/class0" / name): reason for name, (_, reason) in kinds.items()}


def ledger(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- the list


def test_a_list_is_kept_in_out_or_read_from_beside_the_folder(tmp_path, capsys):
    """And a copy of it, as a worker gets, is no copy of the paths but a map of the file."""
    root, out, said = tmp_path / "root", str(tmp_path / "out"), []
    plain = class_tree(root)
    assert image_list.find_list(str(root), None, said.append).index_file is None  # not kept
    kept = image_list.find_list(f"{root}/", out, said.append)
    assert kept.index_file == f"{out}/images.index" and not said
    (root / "1 é.jpg").write_bytes(b"new")
    assert len(image_list.find_list(str(root), out, said.append)) == 25  # of the folder as it is
    assert prepare.main(["index", f"{root}/"]) == 0
    assert "root.index: 25 images, 3 classes\n" in capsys.readouterr().out
    shutil.rmtree(out)
    beside = image_list.find_list(str(root), out, said.append)
    assert beside.index_file == f"{root}.index" in said[0] and not os.path.exists(out)
    copied = pickle.loads(pickle.dumps(beside))
    assert len(pickle.dumps(beside)) < 400 and contents(copied) == contents(listed(root))
    assert copied.name(0) == "1 é.jpg" and copied.path(0) == f"{root}/1 é.jpg"
    assert copied.labels.tolist() == [-1, *plain.labels] and copied.classes == plain.classes
    assert contents(pickle.loads(pickle.dumps(plain))) == contents(plain)


def test_an_index_that_is_none_is_refused_and_no_pickle_in_it_is_read(tmp_path):
    path = tmp_path / "index.npy"
    np.save(path, np.array([{}], object), allow_pickle=True)
    for content in (path.read_bytes(), b"not an index"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"index\.npy is not an index written by prepare\.py"):
            image_list.load_index(str(path), str(tmp_path))


def test_a_resume_goes_on_with_the_same_images_only(tmp_path):
    """Names and sizes say so, of a copy, a changed one and a pack."""
    root = tmp_path / "root"
    class_tree(root)
    for name in ("copy", "renamed", "resized"):
        shutil.copytree(root, tmp_path / name, copy_function=shutil.copy)
    one = next((tmp_path / "renamed").rglob("*.jpg"))
    one.rename(one.with_name("zzz.jpg"))
    one = next((tmp_path / "resized").rglob("*.jpg"))
    one.write_bytes(one.read_bytes() + b"\xff\xd9")
    prepared("pack", root, tmp_path / "pack", "--shard-mib", 1)
    flags = ["--steps", "2", "--save-every", "1"]
    cases = "root", "copy", "pack", "renamed", "resized", "resized --allow-changes"
    runs = [
        train(tmp_path / "out", tmp_path / name, *flags, *more)
        for name, *more in map(str.split, cases)
    ]
    first, same, packed, *refused, allowed = run_ranks(1, runs, tmp_path / "ranks")
    for result in (first, same, packed, allowed):
        assert result.status == [0] and ("resumed" in result.output) == (result is not first)
    for result in refused:
        assert result.status == [2]
        assert "image_names_and_sizes" in result.errors and "--allow-changes" in result.errors


# --- bad images


def test_scan_names_every_broken_image_once(tmp_path, capsys):
    """A second scan replaces the list of the first: it once appended the same rows."""
    expected = broken_tree(tmp_path / "root")
    out = tmp_path / "bad.csv"
    for workers in ("2", "1"):
        command = ["scan", str(tmp_path / "root"), "--out", str(out), "--workers", workers]
        assert prepare.main(command) == 1
        printed = capsys.readouterr().out
        assert f"{len(expected)} of 32 images cannot be read: see {out}" in printed
        found = {row["path"]: row["reason"] for row in ledger(out)}
        assert len(ledger(out)) == len(expected) and found.keys() == expected.keys()
        for path, reason in expected.items():
            assert reason in found[path] and f"{path}: {found[path]}" in printed
    prepared("scan", TILES, "--out", tmp_path / "none.csv")
    assert not (tmp_path / "none.csv").exists()
    assert prepare.main(["scan", str(TILES), "--out", f"{tmp_path}/no/bad.csv"]) == 1
    assert f"there is no folder {tmp_path}/no\n" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "resumes"), [("scan A", 0), ("pack A B", 1)])
def test_only_what_resumes_says_so(command, resumes, monkeypatch, capsys):
    for name in ("check_images", "pack"):
        monkeypatch.setattr(prepare, name, Mock(side_effect=KeyboardInterrupt))
    assert prepare.main(command.split()) == 130
    assert ("resume" in capsys.readouterr().err) == resumes


TRAIN = "--model tiny --img-size 32 --device cpu --precision fp32 --mode full_shard --workers 0"


def train(out, root, *flags):
    """A run of the smallest model, for `run_ranks`."""
    argv = [*TRAIN.split(), "--log-every", "2", "--global-batch", "16", "--data", str(root), *flags]
    return Run(argv, params=False, to=str(out))


def test_training_replaces_bad_images_lists_each_once_and_ends_at_too_many(tmp_path):
    """Of 27 good and 5 broken ones: every rank finds others in each epoch."""
    root, out, few = tmp_path / "root", tmp_path / "out", tmp_path / "few"
    expected = broken_tree(root)
    runs = [
        train(out, root, "--steps", "6", "--max-bad", "0.5"),
        train(out, root, "--steps", "8", "--max-bad", "0.5", "--allow-changes"),  # resumed
        train(few, root, "--steps", "6", "--max-bad", "0.05", "--save-every", "100"),
    ]
    first, longer, too_many = run_ranks(2, runs, tmp_path / "ranks")
    assert first.status == longer.status == [0, 0], first.errors + longer.errors
    rows = ledger(out / "bad_images.csv")  # of both runs: none is listed again
    assert sorted(row["path"] for row in rows) == sorted(expected)
    assert all(expected[row["path"]] in row["reason"] for row in rows)
    assert longer.end["reason"] == "done" and longer.end["bad_images"] == 5
    # the step is the first, in the order of the job, in which the image stands or stood in line
    files = listed(root)
    order = np.random.default_rng((0, 0)).permutation(32)
    stands = {files.path(i): 1 + position // 16 for position, i in enumerate(order.tolist())}
    assert all(int(row["step"]) <= stands[row["path"]] for row in rows)
    assert re.search(r"warning: unreadable image \S+ \(.*\): replaced by the next", first.output)
    assert "unreadable image" not in longer.output

    assert too_many.status == [1, 1] and too_many.end["reason"] == "bad"
    count = len(ledger(few / "bad_images.csv"))
    assert count > 0.05 * 32
    assert f"{count} of 32 images are unreadable, more than --max-bad 0.05" in too_many.errors
    assert len(list(few.glob("step_*"))) == 1  # what was trained is kept


# --- packs


def tar_content(folder):
    """Path -> bytes, by tarfile, over all shards in order."""
    content = {}
    for shard in sorted(Path(folder).glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive.getmembers():
                content[member.name] = archive.extractfile(member).read()
    return content


def test_a_pack_is_a_copy_that_tar_and_webdataset_read(tmp_path, capsys):
    """And its stream is that of its tree, the listed substitutes of broken images included."""
    import webdataset

    root, target = tmp_path / "root", tmp_path / "pack"
    broken_tree(root)
    noise_image(99, 800, 800).save(root / "large.jpg", quality=100)  # for a second shard
    prepared("pack", root, target, "--shard-mib", 1)
    assert "33 images in 2 shards, " in (printed := capsys.readouterr().out)
    assert "3 unreadable" in printed  # a link to nothing, TIFF of no known kind; one was empty
    files, packed = listed(root), listed(target)
    paths = [Path(files.path(i)) for i in range(33)]
    lost = ("nothing.jpg", "bands.tif")
    expected = [b"" if path.name in lost else path.read_bytes() for path in paths]
    assert contents(packed) == list(tar_content(target).values()) == expected
    assert list(tar_content(target)) == [packed.name(i) for i in range(33)]
    assert packed.labels.tolist() == files.labels.tolist() and packed.classes == files.classes
    shards = [f"{target}/{name}" for name in packed.shards]
    found = webdataset.WebDataset(shards, shardshuffle=False)
    found = {sample["__key__"] + ".jpg": sample["jpg"] for sample in found if "jpg" in sample}
    assert found == {n: c for n, c in tar_content(target).items() if n.endswith(".jpg")}

    def rows(files, **options):
        names = {files.path(i): files.name(i) for i in range(len(files))}
        found = stream(files, global_batch=8, **{"steps": range(8)} | options)
        return [row._replace(path=names[row.path]) for row in found]

    every = rows(files)
    for options in ({}, {"ranks": 4}, {"ranks": 2, "workers": 2}):
        assert rows(packed, **options) == every
    assert rows(packed, steps=range(5, 8)) == [row for row in every if row.step >= 5]


def test_packing_makes_large_images_smaller(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    smooth = Image.fromarray(np.arange(36, dtype=np.uint8).reshape(3, 4, 3) * 7)
    sizes = {"a.jpg": (900, 300), "b.png": (300, 1000), "c.jpg": (100, 80), "d.tif": (256, 256)}
    for name, size in sizes.items():
        smooth.resize(size, Image.Resampling.BICUBIC).save(root / name)
    (root / "e.jpg").write_bytes(b"broken")
    np.save(root / "f.npy", np.full((5, 600, 300), 7, np.uint16))
    prepared("pack", root, tmp_path / "pack", "--max-side", 256)
    content = tar_content(tmp_path / "pack")
    assert list(content) == ["a.jpg", "b.png.jpg", "c.jpg", "d.tif", "e.jpg", "f.npy"]
    assert content["c.jpg"] == (root / "c.jpg").read_bytes()  # not larger: as it was
    assert content["d.tif"] == (root / "d.tif").read_bytes()
    assert content["e.jpg"] == b""
    array = np.load(io.BytesIO(content["f.npy"]))
    assert array.shape == (5, 256, 128) and array.dtype == np.uint16 and (array == 7).all()
    for name, source, size in (("a.jpg", "a.jpg", (256, 85)), ("b.png.jpg", "b.png", (77, 256))):
        image, found = data.open_image(content[name])
        assert found == size and image.format == "JPEG"
        with Image.open(root / source) as whole:
            expected = np.asarray(whole.resize(size, Image.Resampling.BICUBIC), float)
        assert np.abs(np.asarray(image, float) - expected).mean() < 2


def test_a_killed_pack_resumes(tmp_path, capsys):
    """Killed in its second shard: the first stays, no half of one has the name of a whole."""
    root, target = str(tmp_path / "root"), tmp_path / "pack"
    files = class_tree(tmp_path / "root", width=300, height=300)
    code = """
import os, signal, sys, prepare
from storage import image_list
def read(files, index, read=image_list.ImageList.read):
    if os.path.exists(os.path.join(sys.argv[2], "shard-000000.tar")):
        os.kill(os.getpid(), signal.SIGKILL)
    return read(files, index)
image_list.ImageList.read = read
prepare.main(["pack", *sys.argv[1:], "--workers", "1", "--shard-mib", "1"])
"""
    killed = subprocess.run([sys.executable, "-c", code, root, target], cwd=ROOT, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    half, first = sorted(target.glob("*shard*"))
    assert half.name.startswith(".shard-000001") and first.name == "shard-000000.tar"
    with pytest.raises(ValueError, match="no images found in"):
        listed(target)  # not finished: it does not pass for a pack
    made = first.stat().st_mtime_ns
    prepared("pack", root, target, "--shard-mib", 1)
    assert "1 of 3 shards are there already" in capsys.readouterr().out
    assert first.stat().st_mtime_ns == made and not list(target.glob(".*"))
    assert contents(listed(target)) == contents(files)
    assert prepare.main(["pack", root, str(target), "--shard-mib", "1", "--quality", "80"]) == 1
    assert "was started from other images or with other" in capsys.readouterr().err
    assert prepare.main(["pack", root, f"{root}/../root"]) == 1
    assert "holds the images themselves" in capsys.readouterr().err

    # a shard that is cut or lost later is noticed before a run begins, and written again
    shard = target / "shard-000002.tar"
    whole = shard.read_bytes()
    for content in (whole[: len(whole) // 3], b"\xa7" * 20480, None):
        shard.write_bytes(content) if content else shard.unlink()
        with pytest.raises(ValueError, match=r"000002\.tar is missing or truncated"):
            image_list.find_list(str(target), None, silent)
        prepared("pack", root, target, "--shard-mib", 1)
        assert shard.read_bytes() == whole


def test_a_pack_does_not_take_what_vanishes_for_broken(tmp_path):
    """A file system that goes away meanwhile would leave a pack of empty images."""
    files = class_tree(tmp_path / "root")
    Path(files.path(20)).unlink()
    with pytest.raises(FileNotFoundError):
        packing.write_shard(
            files, f"{tmp_path}/shard", range(20, 21), lambda content: (content, "")
        )
    assert not list(tmp_path.glob("*shard*"))


def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path, monkeypatch):
    (tmp_path / "list").write_text("old")
    full = OSError(errno.ENOSPC, "No space left on device")  # which does not say of which file
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"No space left on device: '.*/list'$"):
        image_list.save_index(class_tree(tmp_path / "root"), f"{tmp_path}/list")
    assert (tmp_path / "list").read_text() == "old" and not list(tmp_path.glob(".*"))


# --- statistics


def measured(root, *argv):
    prepared("stats", root, *argv)
    channels = json.loads(Path(image_source.stats_file(str(root))).read_text())["mean"]
    return image_source.find_stats(str(root), len(channels))


def test_statistics_are_those_of_numpy_in_full_precision(tmp_path):
    """A channel of 123456.7 with a deviation of 1, whose mean was once rounded to 123457."""
    root = tmp_path / "root"
    root.mkdir()
    draw, every = np.random.default_rng(0), []
    for i in range(70):
        every.append(draw.normal([[[123456.7]], [[0.5]]], 1, (2, 20, 30)).astype(np.float32))
        every[-1] = np.concatenate([every[-1], np.full((1, 20, 30), 300.1, np.float32)])
        np.save(root / f"{i}.npy", every[-1])
    noise_image(0).save(root / "other.png")
    found = measured(root)
    whole = np.stack(every).astype(np.float64)
    np.testing.assert_allclose(found.mean, whole.mean((0, 2, 3)), rtol=1e-9)
    np.testing.assert_allclose(found.std[:2], whole.std((0, 2, 3))[:2], rtol=1e-4)
    assert found.std[2] == 1 and found.dtype == "float32"  # a constant is not divided by zero
    assert prepare.main(["stats", str(root), "--workers", "2"]) == 0
    assert image_source.find_stats(f"{root}/", 3) == found


def test_a_pack_takes_the_statistics_of_its_source_along(tmp_path):
    """Without them it trained in silence with ImageNet's; those of arrays are measured."""
    tree, arrays = tmp_path / "tree", tmp_path / "arrays"
    class_tree(tree)
    expected = measured(tree)
    prepared("pack", tree, tmp_path / "pack")
    assert image_source.find_stats(str(tmp_path / "pack"), 3) == expected != data.IMAGENET
    arrays.mkdir()
    np.save(arrays / "a.npy", np.arange(2 * 30, dtype=np.uint16).reshape(2, 5, 6))
    prepared("pack", arrays, tmp_path / "packed")
    assert image_source.find_stats(str(tmp_path / "packed"), 2).mean == (14.5, 44.5)


# --- TIFF of many bands

AS_IT_IS, LAST_FIRST, ONE = (lambda a: a), (lambda a: a.transpose(2, 0, 1)), (lambda a: a[None])
INTERLEAVED, PLANAR = {"planarconfig": "contig"}, {"planarconfig": "separate"}
TILED = PLANAR | {"compression": "zlib", "tile": (16, 16)}
RGBX = {"photometric": "rgb", "extrasamples": [0]}
# name: (shape of one image, dtype, options of tifffile, the array that is meant)
BANDS = {
    "planar": ((13, 20, 24), "u2", PLANAR, AS_IT_IS),
    "by pixel": ((20, 24, 13), ">u2", INTERLEAVED, LAST_FIRST),
    "deflated tiles": ((13, 20, 24), "u2", TILED, AS_IT_IS),
    "a page each": ((13, 20, 24), "u2", {}, AS_IT_IS),
    "two bands": ((20, 24, 2), "f4", INTERLEAVED, LAST_FIRST),
    "one of floats": ((20, 24), "f4", {}, ONE),
    "signed": ((20, 24), "i2", {}, ONE),
    "RGB and infrared": ((20, 24, 4), "u1", RGBX, LAST_FIRST),
}


def write_tiff(path, seed, shape, dtype, options, meant):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(seed).integers(0, 120, shape).astype(dtype)
    tifffile.imwrite(path, array, **{"photometric": "minisblack"} | options)
    return meant(array)


@pytest.mark.parametrize("name", BANDS)
def test_a_tiff_of_many_bands_is_packed_as_an_array(name, tmp_path):
    expected = write_tiff(tmp_path / "root/lake/1.tif", 0, *BANDS[name])
    with tifffile.TiffWriter(tmp_path / "root/lake/grey.tif") as grey:  # Pillow's, as in a tree
        for side in (64, 32):
            grey.write(np.zeros((side, side), np.uint8), subfiletype=side == 32)
    noise_image(0).save(tmp_path / "root/lake/rgb.tif")
    prepared("pack", tmp_path / "root", tmp_path / "pack")
    content = tar_content(tmp_path / "pack")
    assert list(content) == ["lake/1.tif.npy", "lake/grey.tif", "lake/rgb.tif"]
    found = np.load(io.BytesIO(content["lake/1.tif.npy"]))
    np.testing.assert_array_equal(found, expected)
    assert found.dtype.name == ("float32" if name == "signed" else expected.dtype.name)
    for name in ("lake/grey.tif", "lake/rgb.tif"):
        assert content[name] == (tmp_path / "root" / name).read_bytes()
        (tmp_path / "root" / name).unlink()
    found = measured(tmp_path / "root")
    scale = 255 if expected.dtype == np.uint8 else 1
    means = expected.astype(float).mean((1, 2)) / scale
    np.testing.assert_allclose(found.mean, means, rtol=1e-9)


def test_without_tifffile_one_sentence_says_what_to_type(tmp_path, monkeypatch, capsys):
    write_tiff(tmp_path / "root/1.tif", 0, *BANDS["planar"])
    monkeypatch.setitem(sys.modules, "tifffile", None)
    for command in (["stats"], ["pack", str(tmp_path / "pack")]):
        argv = [command[0], str(tmp_path / "root"), *command[1:], "--workers", "1"]
        assert prepare.main(argv) == 1
        assert capsys.readouterr().err.endswith("need tifffile: pip install tifffile\n")
    prepared("pack", TILES, tmp_path / "plain")  # which is needed for nothing else
    monkeypatch.undo()
    content = bytearray((tmp_path / "root/1.tif").read_bytes())
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        content[file.pages[0].tags[259].valueoffset] = 5  # LZW, which tifffile cannot read alone
    (tmp_path / "root/1.tif").write_bytes(content)
    assert prepare.main(["stats", str(tmp_path / "root"), "--workers", "2"]) == 1
    assert capsys.readouterr().err.endswith("need imagecodecs: pip install imagecodecs\n")


def test_a_tree_of_thirteen_bands_trains_on_two_ranks_after_one_command(tmp_path, capsys):
    root, pack = tmp_path / "tiff", tmp_path / "packed"
    for i in range(32):
        kind = list(BANDS)[i % 4]
        write_tiff(root / f"class{i % 2}/{i:02}.tif", i, *BANDS[kind])
    prepared("pack", root, pack)
    flags = ["--channels", "13", "--steps", "2", "--log-every", "1"]
    given = [train(tmp_path / f"out-{folder.name}", folder, *flags) for folder in (pack, root)]
    result, tree = run_ranks(2, given, tmp_path / "ranks")
    assert result.status == [0, 0], result.errors
    assert "pixels: 13 channels of uint16, mean and deviation of the images" in result.output
    assert 0.5 < result.steps[0]["loss"] < 2
    assert result.end["bad_images"] == 0
    assert tree.status == [2, 2] and f"type `python prepare.py stats {root}`" in tree.errors
    prepared("stats", root)
    assert f"type `python prepare.py pack {root} PACK`, then train" in capsys.readouterr().out


# --- node-local copies


def test_whole_shards_are_copied_to_the_node_and_read_there(tmp_path, monkeypatch):
    files = class_tree(tmp_path / "root", width=300, height=300)
    prepared("pack", tmp_path / "root", tmp_path / "pack", "--shard-mib", 1)
    stage, said = tmp_path / "stage", []
    stage.mkdir()
    packed = replace(listed(tmp_path / "pack"), staged=str(stage))
    (stage / ".shard-000001.tar.99").write_bytes(b"half")  # a killed process left it
    before = pickle.loads(pickle.dumps(packed))  # a worker that reads meanwhile
    assert contents(before) == contents(files)
    # a disk with room for one of them, then without, then with enough
    room = iter([shutil._ntuple_diskusage(0, 0, free) for free in (2**21, 2**10, 2**10, 2**10)])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: next(room))
        for _ in range(2):
            staging.copy_shards(packed, 1, said.append)
            assert os.listdir(stage) == ["shard-000001.tar"]  # node 1 begins with the second
        assert "has room for 1 of 3 shards; the other shards are read from where" in said[1]
    staging.copy_shards(packed, 1, said.append)
    assert sorted(os.listdir(stage)) == list(packed.shards)
    for shard in (tmp_path / "pack").glob("*.tar"):
        assert (stage / shard.name).read_bytes() == shard.read_bytes()
        shard.unlink()
    assert contents(pickle.loads(pickle.dumps(packed))) == contents(before) == contents(files)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder, and runs of two ranks: plain, staged, refused twice, reading only."""
    folder = tmp_path_factory.mktemp("runs")
    root, pack, stage = folder / "root", folder / "pack", folder / "stage"
    class_tree(root, each=16)
    prepared("pack", root, pack)
    (folder / "file").write_text("")
    steps = ("--steps", "6")
    given = [
        train(folder / "plain", root, *steps),
        train(folder / "staged", pack, *steps, "--stage-dir", str(stage)),
        train(folder / "refused", pack, *steps, "--stage-dir", str(folder / "file/x")),
        train(folder / "a tree", root, *steps, "--stage-dir", str(stage)),
        train(folder / "io", TILES, "--run", "io", *steps),
    ]
    return folder, run_ranks(2, given, folder / "ranks")


def test_training_with_a_node_local_copy_is_the_same_and_fills_it(runs):
    folder, (plain, staged, *_) = runs
    assert plain.status == staged.status == [0, 0], staged.errors
    assert [step["loss"] for step in plain.steps] == [step["loss"] for step in staged.steps]
    (copy,) = (folder / "stage").glob("pack-*/shard-000000.tar")
    assert copy.read_bytes() == (folder / "pack/shard-000000.tar").read_bytes()


def test_a_stage_dir_that_cannot_be_used_is_refused_on_all_ranks(runs):
    """One that cannot be made, and one for a tree of files, which names the command to type."""
    _, (_, _, *refused, _) = runs
    for result, sentence in zip(refused, ("Not a directory", "prepare.py pack DIR"), strict=True):
        assert result.status == [2, 2]
        assert sentence in result.errors and result.errors.count("error:") == 1


# --- workers: where they come from, what they read, what they leave


def test_io_reports_what_each_rank_read(runs):
    folder, (*_, io) = runs
    assert io.status == [0, 0], io.errors
    lines = [json.loads(line) for line in (folder / "io/log.jsonl").read_text().splitlines()]
    event = next(line for line in lines if line["event"] == "io")
    assert len(event["ranks"]) == 2
    paths = data.scan(str(TILES)).path
    order = np.random.default_rng((0, 0)).permutation(192)[:96].reshape(6, 2, 8)
    for rank, row in enumerate(event["ranks"]):
        read = sum(os.path.getsize(paths(i)) for i in order[:, rank].ravel())  # bytes
        # another rank has a clock of its own
        seconds = io.end["seconds"] if rank == 0 else 48 / row["images_per_second"]
        assert row["mb_per_second"] == pytest.approx(read / seconds / 1e6)
        assert row["images_per_second"] == pytest.approx(48 / seconds)
        assert min(row["read_seconds"], row["decode_seconds"]) > 0
        assert 0 <= row["data_share"] <= 1


def shared_memory(pids):
    """Segments of these processes, whose numbers PyTorch puts into the names."""
    return [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /dev/shm")
def test_a_loader_that_is_killed_leaves_nothing_behind(tmp_path):
    code = """
import sys, time, torch, data
from runtime.device_batches import device_batches
if __name__ == "__main__":
    loader = data.build_loader(data.scan(sys.argv[1]), img_size=96, patches=144, seed=0,
                               global_batch=16, local_batch=16, steps=range(6), workers=2)
    for i, batch in enumerate(device_batches(loader, 1, torch.device("cpu"))):
        if i == 2:
            print("reading", flush=True)
            time.sleep(60)
"""
    (tmp_path / "job.py").write_text(code)
    command, pipes = [sys.executable, "job.py", str(TILES)], {"stdout": -1, "stderr": -1}
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        command, cwd=tmp_path, text=True, env=environ, start_new_session=True, **pipes
    )
    assert job.stdout.readline() == "reading\n", job.stderr.read()
    pids = [line.split()[0] for line in processes_of(job.pid)] + [str(job.pid)]
    job.kill()
    job.communicate(timeout=180)
    deadline = time.monotonic() + 60
    while (processes_of(job.pid) or shared_memory(pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(job.pid) and not shared_memory(pids)


@pytest.mark.parametrize("how", ["Ctrl-C", "a worker is killed"])
def test_a_run_with_workers_saves_when_it_ends_early(tmp_path, how):
    flags = f"{TRAIN} --mode ddp --batch 4 --steps 100000 --log-every 1 --workers 2 --data {TILES}"
    command = [sys.executable, "-u", ROOT / "train_fsdp.py", *flags.split(), "--out", tmp_path]
    pipes = {"stdout": -1, "stderr": -1, "text": True, "start_new_session": True}
    job = subprocess.Popen(command, env=environment(0, 1, free_port()), **pipes)
    while not re.match(r"step +2/", job.stdout.readline()):
        assert job.poll() is None
    if how == "Ctrl-C":
        os.killpg(job.pid, signal.SIGINT)
    else:
        children = [int(line.split()[0]) for line in processes_of(job.pid)]
        named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        os.kill(max(p for p in named if b"forkserver" in named[p]), signal.SIGKILL)
    _, told = job.communicate(timeout=180)
    assert job.returncode == (how != "Ctrl-C") and "Traceback" not in told
    end = read_log(tmp_path / "log.jsonl")[2]  # what was trained is kept
    assert checkpoint.verify(tmp_path / f"step_{end['steps']:08d}") > 0
    if how == "Ctrl-C":
        assert end["reason"] == "signal"
    else:  # with its cause
        cause = r"error: rank 0: the data loader failed \(.*in step \d+.*DataLoader worker"
        assert re.search(cause, told), told
