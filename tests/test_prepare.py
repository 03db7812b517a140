"""prepare.py against tar, webdataset and PIL; and what training does with bad images."""

import csv
import errno
import gzip
import json
import os
import pickle
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from ranks import (
    Run,
    environment,
    free_port,
    on_ranks,
    processes_of,
    read_log,
    run_ranks,
    run_script,
    spy_on_worker,
)
from test_data import flat_folder, noise_image, stream

import checkpoint
import data
import prepare
from runtime import log, process
from storage import checking, image_list, packing, staging

TILES = ROOT / "examples/tiles/train"


def silent(text):
    pass


def class_tree(root, classes=3, each=8, **size):
    """JPEGs in leaf folders two and three levels deep."""
    for i in range(classes * each):
        leaf = i % classes
        folder = root / f"area{leaf % 2}" / ("part" if leaf % 2 else "") / f"class{leaf}"
        folder.mkdir(parents=True, exist_ok=True)
        noise_image(i, **size).save(folder / f"P{i:03}.jpg", quality=95)
    return image_list.list_images(str(root))


def broken_tree(root):
    """A class tree, and one of every kind of broken file: path -> what its reason must say."""
    files = class_tree(root)
    whole = Path(files.path(0)).read_bytes()
    kinds = {
        "cut.jpg": (whole[: len(whole) // 2], "truncated"),
        "empty.jpg": (b"", "not an image: it begins with"),
        "html.jpg": (b"<!DOCTYPE html><html>404</html>", "not an image: it begins with"),
        "text.png": (b"P3 is not what this is", "Error"),
        "zero.png": (png_header(0, 0), "rror"),
        "bomb.png": (png_header(40000, 40000), "Image size (1600000000 pixels) exceeds limit"),
        "noise.tif": (os.urandom(300), "not an image: it begins with"),
        "nothing.jpg": (None, "No such file"),
    }
    for name, (content, _) in kinds.items():
        path = root / "area0/class0" / name
        if content is None:
            path.symlink_to("vanished.jpg")
        else:
            path.write_bytes(content)
    return {str(root / "area0/class0" / name): reason for name, (_, reason) in kinds.items()}


def png_header(width, height):
    """A PNG that says it has so many pixels, and has none."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def ledger(path):
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


# --- the list


def test_a_list_is_used_while_it_is_true(tmp_path):
    root, out = tmp_path / "root", str(tmp_path / "out")
    class_tree(root)
    said = []
    files = image_list.find_list(str(root), out, said.append)
    assert files.index_file == f"{out}/images.index" and said == []
    made = os.stat(files.index_file).st_mtime_ns
    again = image_list.find_list(f"{root}/", out, said.append)
    assert os.stat(again.index_file).st_mtime_ns == made and said == []
    assert [again.name(i) for i in range(24)] == [files.name(i) for i in range(24)]

    def remade(why):
        said.clear()
        files = image_list.find_list(str(root), out, said.append)
        assert said == [f"ignoring {out}/images.index: {why}"]
        assert image_list.outdated(files) is None
        return files

    (root / "area0/class0/new.jpg").write_bytes(b"x")
    assert len(remade("the folder area0/class0 has changed")) == 25
    with open(root / "area0/class0/new.jpg", "ab") as file:  # the folder does not show this
        file.write(b"y")
    assert remade("area0/class0/new.jpg has changed").sizes.tolist().count(2) == 1
    os.utime(root / "area0/class0/new.jpg", ns=(1, 1))
    remade("area0/class0/new.jpg has changed")
    for path in (root / "area1/part/class1").iterdir():
        path.unlink()
    (root / "area1/part/class1").rmdir()
    assert len(remade("the folder area1/part has changed")) == 17
    Path(out, "images.index").write_bytes(b"no list")
    said.clear()
    image_list.find_list(str(root), out, said.append)
    assert "is not an index written by prepare.py" in said[0]


def test_a_list_beside_the_data_is_found_and_nothing_is_written(tmp_path, capsys):
    root, out = tmp_path / "root", tmp_path / "out"
    class_tree(root)
    assert prepare.main(["index", f"{root}/"]) == 0
    assert capsys.readouterr().out == f"{root}.index: 24 images, 3 classes\n"
    files = image_list.find_list(str(root), str(out), silent)
    assert files.index_file == f"{root}.index"
    assert image_list.find_list(str(root), None, silent).index_file == f"{root}.index"
    assert not out.exists()
    os.remove(f"{root}.index")
    assert image_list.find_list(str(root), None, silent).index_file is None  # listed, not kept
    assert os.listdir(tmp_path) == ["root"]


def test_a_list_is_the_same_out_of_its_index(tmp_path):
    """And a copy of it, as a worker gets, is no copy of the paths but a map of the file."""
    names = ["z/é 1.jpg", "b.jpg", "a/deep/2.png"]
    for name in names:
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_bytes(name.encode())
    plain = image_list.list_images(str(tmp_path / "root"))
    kept = image_list.save_index(plain, str(tmp_path / "the.index"))
    copied = pickle.loads(pickle.dumps(kept))
    assert len(pickle.dumps(kept)) < 400
    for files in (plain, kept, copied, pickle.loads(pickle.dumps(plain))):
        assert [files.name(i) for i in range(len(files))] == ["a/deep/2.png", "b.jpg", "z/é 1.jpg"]
        assert files.labels.tolist() == [0, -1, 1]
        assert files.classes == ("deep", "z")
        assert files.sizes.tolist() == [12, 5, 10]
        assert files.read(2).decode() == "z/é 1.jpg"
        assert files.path(1) == str(tmp_path / "root/b.jpg")
        assert files.times[1] == os.stat(files.path(1)).st_mtime_ns
        assert files.folders["z"] == (os.stat(tmp_path / "root/z").st_mtime_ns, 1)


@pytest.mark.parametrize("content", [b"", b"not an index", None])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    """None stands for a pickle that would run code."""
    path = tmp_path / "the.index"
    if content is None:
        torch.save({"format": 1, "names": Bomb(str(tmp_path / "ran"))}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"the\.index is not an index written by prepare\.py, or is damaged"
    ):
        image_list.load_index(str(path), str(tmp_path))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(FileNotFoundError):
        image_list.load_index(str(tmp_path / "none"), str(tmp_path))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


LEAVES = {
    "agriculture_land/arable_land": "dry_field greenhouse paddy_field terraced_field",
    "agriculture_land/grassland": "meadow",
    "agriculture_land/woodland": "forest orchard",
    "commercial_land": "commercial_area",
    "industrial_land/factory_area": "storage_tank wastewater_plant works",
    "industrial_land/mining_area": "mine oil_field quarry",
    "industrial_land/power_station": "solar_power_plant substation wind_turbine",
    "public_service_land/leisure_land": "swimming_pool",
    "public_service_land/religious_land": "church",
    "public_service_land/special_land": "cemetery",
    "public_service_land/sports_land": "baseball_field basketball_court golf_course "
    "ground_track_field stadium tennis_court",
    "residential_land": "apartment detached_house mobile_home_park",
    "transportation_land/airport_area": "apron helipad runway",
    "transportation_land/highway_area": "bridge intersection parking_lot road roundabout viaduct",
    "transportation_land/port_area": "pier",
    "transportation_land/railway_area": "railway train_station",
    "unutilized_land": "bare_land desert ice_land island rock_land sparse_shrub_land",
    "water_area": "beach dam lake river",
}


def test_million_aid_has_51_classes_by_name_alone(tmp_path):
    """Its train layout: leaves under two and three levels; and its flat test layout."""
    names = [leaf for folder in LEAVES for leaf in LEAVES[folder].split()]
    for i, (folder, leaf) in enumerate((f, n) for f in LEAVES for n in LEAVES[f].split()):
        place = tmp_path / "train" / folder / leaf
        place.mkdir(parents=True)
        Image.new("RGB", (9, 9), (i, 0, 0)).save(place / f"P{i:07}.jpg")
    files = image_list.list_images(str(tmp_path / "train"))
    assert list(files.classes) == sorted(names) and len(names) == 51
    for i in range(51):
        assert files.classes[files.labels[i]] == Path(files.path(i)).parent.name
    (tmp_path / "test").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "test" / "P0000000.jpg")
    flat = image_list.list_images(str(tmp_path / "test"))
    assert flat.classes == () and flat.labels.tolist() == [-1]


# --- bad images


def test_scan_names_every_broken_image(tmp_path, capsys):
    expected = broken_tree(tmp_path / "root")
    out = tmp_path / "bad.csv"
    command = ["scan", str(tmp_path / "root"), "--out", str(out), "--workers", "2"]
    assert prepare.main(command) == 1
    printed = capsys.readouterr().out
    assert f"{len(expected)} of 32 images cannot be read: see {out}" in printed
    found = {row["path"]: row["reason"] for row in ledger(out)}
    assert found.keys() == expected.keys()
    for path, reason in expected.items():
        assert reason in found[path]
        assert f"{path}: {found[path]}" in printed
    assert prepare.main(["scan", str(TILES), "--out", str(tmp_path / "none.csv")]) == 0
    assert not (tmp_path / "none.csv").exists()


TRAIN = "--model tiny --img-size 32 --device cpu --precision fp32 --mode full_shard --workers 0"


def train(out, root, *flags):
    """A run of the smallest model, for `run_ranks`."""
    argv = [*TRAIN.split(), "--log-every", "2", "--global-batch", "16", "--data", str(root), *flags]
    return Run(argv, params=False, to=str(out))


def test_training_replaces_bad_images_lists_each_once_and_ends_at_too_many(tmp_path):
    """Three epochs of 24 good and 8 broken ones: every rank finds others in each."""
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
    assert longer.end["reason"] == "done" and longer.end["bad_images"] == 8
    # the step is the first, in the order of the job, in which the image stands or stood in line
    files = image_list.list_images(str(root))
    order = np.random.default_rng((0, 0)).permutation(32)
    stands = {files.path(i): 1 + position // 16 for position, i in enumerate(order.tolist())}
    for row in rows:
        assert int(row["step"]) <= stands[row["path"]]
    assert re.search(r"warning: unreadable image \S+ \(.*\): replaced by the next", first.output)
    assert "unreadable image" not in longer.output

    assert too_many.status == [1, 1] and too_many.end["reason"] == "bad"
    listed = len(ledger(few / "bad_images.csv"))
    assert listed > 0.05 * 32
    assert f"{listed} of 32 images are unreadable, more than --max-bad 0.05" in too_many.errors
    assert f"{few}/bad_images.csv" in too_many.errors
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


def test_a_pack_is_a_copy_that_tar_reads(tmp_path, capsys):
    root, target = tmp_path / "root", tmp_path / "pack"
    broken_tree(root)
    files = image_list.list_images(str(root))
    assert prepare.main(["pack", str(root), str(target), "--workers", "1", "--shard-mib", "1"]) == 0
    assert "32 images in " in capsys.readouterr().out
    packed = image_list.list_images(str(target))
    content = tar_content(target)
    assert list(content) == [files.name(i) for i in range(32)]
    assert len(packed.shards) >= 1 and packed.index_file == f"{target}/pack.index"
    for i in range(32):
        where = Path(files.path(i))
        expected = where.read_bytes() if where.exists() else b""  # one is a link to nothing
        assert packed.read(i) == content[packed.name(i)] == expected
    assert packed.labels.tolist() == files.labels.tolist() and packed.classes == files.classes
    listed = subprocess.run(
        ["tar", "tf", packed.path(0).split(".tar")[0] + ".tar"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert listed.splitlines()[0] == files.name(0)


def test_webdataset_reads_a_pack(tmp_path):
    import webdataset as wds

    files = class_tree(tmp_path / "root", width=300, height=300)
    packing.pack(str(tmp_path / "root"), str(tmp_path / "pack"), None, 90, 1, 1, silent)
    shards = sorted(str(p) for p in (tmp_path / "pack").glob("*.tar"))
    assert len(shards) > 1
    found = {
        sample["__key__"] + ".jpg": sample["jpg"]
        for sample in wds.WebDataset(shards, shardshuffle=False)
    }
    assert found == {files.name(i): files.read(i) for i in range(len(files))}


def test_the_stream_from_a_pack_is_that_of_its_tree(tmp_path):
    """The listed substitutes of broken images included."""
    broken_tree(tmp_path / "root")
    packing.pack(str(tmp_path / "root"), str(tmp_path / "pack"), None, 90, None, 1, silent)
    packed, tree = (
        image_list.list_images(str(tmp_path / "pack")),
        image_list.list_images(str(tmp_path / "root")),
    )

    def plain(rows, files):
        names = {files.path(i): files.name(i) for i in range(len(files))}
        return [row._replace(path=names[row.path]) for row in rows]

    expected = plain(stream(tree, global_batch=8, steps=range(8)), tree)
    for files in (packed, tree):
        for options in ({}, {"ranks": 2}, {"ranks": 4}, {"ranks": 8}, {"workers": 2}):
            rows = stream(files, global_batch=8, steps=range(8), **options)
            assert plain(rows, files) == expected
    rest = stream(packed, global_batch=8, steps=range(5, 8), workers=1)
    assert plain(rest, packed) == [row for row in expected if row.step >= 5]


def test_packing_makes_large_images_smaller(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    smooth = Image.fromarray(np.arange(36, dtype=np.uint8).reshape(3, 4, 3) * 7)
    sizes = {"a.jpg": (900, 300), "b.png": (300, 1000), "c.jpg": (100, 80), "d.tif": (256, 256)}
    for name, size in sizes.items():
        smooth.resize(size, Image.Resampling.BICUBIC).save(root / name)
    (root / "e.jpg").write_bytes(b"broken")
    packing.pack(str(root), str(tmp_path / "pack"), 256, 90, None, 1, silent)
    content = tar_content(tmp_path / "pack")
    assert list(content) == ["a.jpg", "b.png.jpg", "c.jpg", "d.tif", "e.jpg"]
    assert content["c.jpg"] == (root / "c.jpg").read_bytes()  # not larger: as it was
    assert content["d.tif"] == (root / "d.tif").read_bytes()
    assert content["e.jpg"] == b""
    assert [row["path"] for row in ledger(tmp_path / "pack/bad_images.csv")] == [
        str(root / "e.jpg")
    ]
    packed = image_list.list_images(str(tmp_path / "pack"))
    for i, size in ((0, (256, 85)), (1, (77, 256))):
        image, found = data.open_image(packed.read(i))
        assert found == size and image.format == "JPEG"
        with Image.open(root / f"{'ab'[i]}{('.jpg', '.png')[i]}") as source:
            expected = np.asarray(source.resize(size, Image.Resampling.BICUBIC), float)
        assert np.abs(np.asarray(image, float) - expected).mean() < 2


def no_disk(text):
    """Instead of printing: fail once the first shards were found."""
    if "are there already" in text:
        raise OSError("no disk")


def test_a_killed_pack_resumes(tmp_path):
    """Killed in its second shard: the first stays, no half of one has the name of a whole."""
    root, target = str(tmp_path / "root"), str(tmp_path / "pack")
    class_tree(tmp_path / "root", width=300, height=300)
    code = """
import os, signal, sys
from storage import image_list, packing
def read(files, index, read=image_list.ImageList.read):
    if os.path.exists(os.path.join(sys.argv[2], "shard-000000.tar")):
        os.kill(os.getpid(), signal.SIGKILL)
    return read(files, index)
image_list.ImageList.read = read
packing.pack(sys.argv[1], sys.argv[2], None, 90, 1, 1, print)
"""
    command = [sys.executable, "-c", code, root, target]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    names = sorted(p.name for p in Path(target).glob("*shard*"))
    assert (
        len(names) == 2 and names[0].startswith(".shard-000001") and names[1] == "shard-000000.tar"
    )
    with pytest.raises(ValueError, match="no images found in"):
        image_list.list_images(target)  # not finished: it does not pass for a pack
    Path(target, ".pack.index.77.1").write_bytes(b"half")
    first = os.stat(Path(target, "shard-000000.tar")).st_mtime_ns

    said = []
    packing.pack(root, target, None, 90, 1, 2, said.append)
    assert said[0].startswith("1 of ") and said[0].endswith(" shards are there already")
    assert os.stat(Path(target, "shard-000000.tar")).st_mtime_ns == first
    assert not list(Path(target).glob(".*"))
    files, packed = image_list.list_images(root), image_list.list_images(target)
    assert [packed.read(i) for i in range(24)] == [files.read(i) for i in range(24)]
    for options in ((256, 90), (None, 80)):
        with pytest.raises(ValueError, match="was started from other images or with other options"):
            packing.pack(root, target, *options, 1, 1, silent)
    with pytest.raises(ValueError, match="holds the images themselves"):
        packing.pack(root, f"{root}/../root", None, 90, 1, 1, silent)

    # a shard that is lost or cut later is noticed before a run begins
    shard = Path(target, packed.shards[-1])
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(ValueError, match=r"\.tar is missing or truncated"):
        image_list.find_list(target, None, silent)
    with pytest.raises(ValueError, match="is truncated"):
        image_list.list_images(target).read(23)
    with pytest.raises(OSError, match="no disk"):  # the index does not outlive its shards
        packing.pack(root, target, None, 90, 1, 1, no_disk)
    assert not Path(target, "pack.index").exists()
    packing.pack(root, target, None, 90, 1, 1, silent)
    assert image_list.list_images(target).read(23) == files.read(23)


DAMAGE = {
    "cut": (lambda shard, whole: shard.write_bytes(whole[: len(whole) // 3]), "written again"),
    "cut in the end": (lambda shard, whole: shard.write_bytes(whole[:-600]), "written again"),
    "empty": (lambda shard, whole: shard.write_bytes(b""), "written again"),
    "junk": (lambda shard, whole: shard.write_bytes(b"\xa7" * 20480), "written again"),
    "gzipped": (lambda shard, whole: shard.write_bytes(gzip.compress(whole)), "written again"),
    "other images": (
        lambda shard, whole: shutil.copy(shard.with_name("shard-000001.tar"), shard),
        "written again",
    ),
    "a FIFO": (lambda shard, whole: (shard.unlink(), os.mkfifo(shard)), "written again"),
    "a folder": (lambda shard, whole: (shard.unlink(), shard.mkdir()), "Is a directory"),
    "no pack.json": (lambda shard, whole: shard.with_name("pack.json").unlink(), "started from"),
    "junk pack.json": (
        lambda shard, whole: shard.with_name("pack.json").write_text("{"),
        "started",
    ),
    "other pack.json": (
        lambda shard, whole: shard.with_name("pack.json").write_text('{"a": 1}'),
        "started from other images",
    ),
    "FIFO pack.json": (
        lambda shard, whole: (
            shard.with_name("pack.json").unlink(),
            os.mkfifo(shard.with_name("pack.json")),
        ),
        "started",
    ),
}


def test_packing_again_mends_or_refuses_what_is_damaged(tmp_path, capsys):
    """A shard gets its name when it is whole: another one is damage, and its source is there."""
    root, target = tmp_path / "root", tmp_path / "pack"
    class_tree(root, width=300, height=300)
    command = ["pack", str(root), str(target), "--workers", "1", "--shard-mib", "1"]
    assert prepare.main(command) == 0
    healthy = {path.name: path.read_bytes() for path in target.iterdir()}
    shard = target / "shard-000000.tar"
    for name, (damage, told) in DAMAGE.items():
        capsys.readouterr()
        damage(shard, healthy[shard.name])
        status, text = prepare.main(command), "".join(capsys.readouterr())
        assert told in text and str(target) in text, (name, text)
        assert status == (0 if told == "written again" else 1), name
        if status:
            shutil.rmtree(target)
            assert prepare.main(command) == 0
        assert {path.name: path.read_bytes() for path in target.iterdir()} == healthy, name


def test_two_packs_do_not_write_into_one_folder(tmp_path):
    class_tree(tmp_path / "root")
    (tmp_path / "pack").mkdir()
    with packing.locked_folder(str(tmp_path / "pack")):
        with pytest.raises(ValueError, match="another process packs into"):
            packing.pack(str(tmp_path / "root"), str(tmp_path / "pack"), None, 90, 1, 1, silent)
        assert list((tmp_path / "pack").iterdir()) == []


def test_a_pack_does_not_take_what_vanishes_for_broken(tmp_path):
    """A file system that goes away meanwhile would leave a pack of empty images."""
    files = class_tree(tmp_path / "root")
    settings = packing.PackSettings("", None, 90, 1)
    Path(files.path(20)).unlink()
    Path(files.path(0)).write_bytes(b"longer or shorter than it was")
    for part, sentence in ((range(1), "has changed meanwhile"), (range(20, 21), "No such file")):
        with pytest.raises((ValueError, OSError), match=sentence):
            packing.write_shard(files, str(tmp_path), settings, packing.Part(0, part))
    assert not list(tmp_path.glob("*shard*"))


# --- odd files and disks


@contextmanager
def small_disk(folder, kib):
    """A file system of so many KiB (root, Linux)."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_named_and_nothing_half_is_left(tmp_path, capsys):
    with small_disk(tmp_path / "disk", 400) as disk:
        root = disk / "root"
        class_tree(root)
        with suppress(OSError):
            (disk / "filler").write_bytes(bytes(2**20))
        there = sorted(path.name for path in disk.iterdir())
        for command, named in (
            (["index", str(root)], f"{root}.index"),
            (["pack", str(root), str(disk / "pack"), "--workers", "1"], f"{disk}/pack/pack.json"),
        ):
            capsys.readouterr()
            assert prepare.main(command) == 1
            told = capsys.readouterr().err
            assert told == (f"prepare.py: error: [Errno 28] No space left on device: '{named}'\n")
        with pytest.raises(OSError, match=r"No space left on device: .*/images\.index'"):
            image_list.find_list(str(root), str(disk), silent)
        filled = (disk / "filler").stat().st_size
        os.truncate(disk / "filler", filled - 16 * 2**10)  # room for pack.json, not for a shard
        with pytest.raises(OSError, match=r"No space left on device: .*/pack/shard-000000\.tar'"):
            packing.pack(str(root), str(disk / "pack"), None, 90, None, 1, silent)
        assert sorted(path.name for path in disk.iterdir()) == sorted([*there, "pack"])
        assert [path.name for path in (disk / "pack").iterdir()] == ["pack.json"]
        assert not [path for path in root.iterdir() if path.is_file()]


@pytest.mark.full
def test_everything_works_below_a_name_that_is_not_utf_8(tmp_path, capfdbinary):
    base = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xe4d"))
    files = class_tree(base / "root")
    for command in (
        ["index", str(base / "root")],
        ["scan", str(base / "root"), "--workers", "1", "--out", str(base / "bad.csv")],
        ["pack", str(base / "root"), str(base / "pack"), "--workers", "1"],
    ):
        environ = os.environ | {"PYTHONIOENCODING": "utf-8"}
        done = subprocess.run([sys.executable, str(ROOT / "prepare.py"), *command], env=environ)
        assert done.returncode == 0, capfdbinary.readouterr().err
    for folder in ("root", "pack"):
        listed = image_list.find_list(str(base / folder), str(base / "out"), silent)
        copy = pickle.loads(pickle.dumps(listed))  # as a worker gets it
        assert [copy.read(i) for i in range(24)] == [files.read(i) for i in range(24)]


FIFOS = {
    "DIR.index": ("root.index", "root", None),
    "OUT/images.index": ("out/images.index", "root", None),
    "pack.index": ("pack/pack.index", "pack", "is not a regular file"),
    "a shard": ("pack/shard-000000.tar", "pack", "is missing or truncated"),
}


@pytest.mark.parametrize("name", FIFOS)
def test_a_fifo_in_the_place_of_a_list_is_not_waited_for(tmp_path, name):
    where, folder, refused = FIFOS[name]
    class_tree(tmp_path / "root")
    (tmp_path / "out").mkdir()
    packing.pack(str(tmp_path / "root"), str(tmp_path / "pack"), None, 90, 1, 1, silent)
    (tmp_path / where).unlink(missing_ok=True)
    os.mkfifo(tmp_path / where)
    said = []
    signal.alarm(20)  # instead of waiting without end
    try:
        if refused:
            with pytest.raises(ValueError, match=refused):
                image_list.find_list(str(tmp_path / folder), str(tmp_path / "out"), said.append)
        else:
            files = image_list.find_list(str(tmp_path / folder), str(tmp_path / "out"), said.append)
            assert len(files) == 24 and "is not a regular file" in said[0]
    finally:
        signal.alarm(0)


def test_too_many_open_files_are_not_the_images_fault(tmp_path, monkeypatch):
    flat_folder(tmp_path, 2)
    files = image_list.list_images(str(tmp_path))

    def read(files, index):
        raise OSError(errno.EMFILE, "Too many open files", files.path(index))

    monkeypatch.setattr(image_list.ImageList, "read", read)
    with pytest.raises(OSError, match="Too many open files"):
        checking.find_problems(files, range(2))


# --- the same images


def test_the_fingerprint_is_of_names_and_sizes(tmp_path):
    def of(folder):
        return image_list.fingerprint(image_list.list_images(str(folder)), times=False)

    class_tree(tmp_path / "root")
    shutil.copytree(tmp_path / "root", tmp_path / "copy", copy_function=shutil.copy)
    packing.pack(str(tmp_path / "root"), str(tmp_path / "pack"), None, 90, 1, 1, silent)
    first = of(tmp_path / "root")
    assert first == of(tmp_path / "copy") == of(tmp_path / "pack")
    one = next((tmp_path / "copy").rglob("*.jpg"))
    one.rename(one.with_name("other.jpg"))
    assert of(tmp_path / "copy") != first
    one.with_name("other.jpg").rename(one)
    assert of(tmp_path / "copy") == first
    one.write_bytes(one.read_bytes() + b"\0")
    assert of(tmp_path / "copy") != first


def test_a_resume_goes_on_with_the_same_images_only(tmp_path):
    class_tree(tmp_path / "root")
    for name in ("copy", "renamed", "resized"):
        shutil.copytree(tmp_path / "root", tmp_path / name, copy_function=shutil.copy)
    one = next((tmp_path / "renamed").rglob("*.jpg"))
    one.rename(one.with_name("zzz.jpg"))
    one = next((tmp_path / "resized").rglob("*.jpg"))
    one.write_bytes(one.read_bytes() + b"\xff\xd9")
    flags = [
        "--model",
        "tiny",
        "--img-size",
        "32",
        "--precision",
        "fp32",
        "--workers",
        "0",
        "--steps",
        "2",
        "--batch",
        "4",
        "--save-every",
        "1",
    ]
    runs = [
        Run([*flags, "--data", str(tmp_path / name), *more], params=False, to=str(tmp_path / "out"))
        for name, *more in (
            ("root",),
            ("copy",),
            ("renamed",),
            ("resized",),
            ("resized", "--allow-changes"),
        )
    ]
    first, same, renamed, resized, allowed = run_ranks(1, runs, tmp_path / "ranks")
    assert first.status == same.status == allowed.status == [0], first.errors
    assert "resumed" in same.output and "resumed" in allowed.output
    for refused in (renamed, resized):
        assert refused.status == [2]
        assert "image_names_and_sizes" in refused.errors and "--allow-changes" in refused.errors


# --- node-local copies


@pytest.mark.full
def test_a_node_reads_each_image_once(tmp_path):
    """Four processes that all read everything, twice: the shared files are read once in all."""
    root, stage = tmp_path / "root", tmp_path / "stage"
    class_tree(root, each=20)
    code = """
import os, sys
from storage import image_list, staging
def reading(files, index, read=image_list.ImageList.read):
    with open(sys.argv[3], "ab", buffering=0) as log:
        log.write(b"%d\\n" % index)  # one write: whole lines, from any process
    return read(files, index)
image_list.ImageList.read = reading
staged = staging.Staged(image_list.load_index(sys.argv[1] + ".index", sys.argv[1]), sys.argv[2])
for turn in range(2):
    for i in range(len(staged)):
        assert staged.read(i) == open(staged.files.path(i), "rb").read(), i
"""
    prepare.main(["index", str(root)])
    log = tmp_path / "log"
    jobs = [
        subprocess.Popen([sys.executable, "-c", code, root, stage, log], cwd=ROOT) for _ in range(4)
    ]
    assert [job.wait(timeout=120) for job in jobs] == [0] * 4
    assert sorted(map(int, log.read_text().split())) == list(range(60))

    # a later process needs the tree no more
    staged = staging.Staged(image_list.load_index(f"{root}.index", str(root)), str(stage))
    whole = [staged.read(i) for i in range(60)]
    root.rename(tmp_path / "gone")
    assert [staged.read(i) for i in range(60)] == whole
    assert staged.shortage() is None
    assert stat.S_IMODE(os.stat(next(stage.iterdir())).st_mode) == 0o600


def test_a_full_disk_means_a_part(tmp_path, monkeypatch):
    files = class_tree(tmp_path / "root")
    room = int(files.sizes[:10].sum())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, room))
    staged = staging.Staged(files, str(tmp_path / "stage"))
    assert f"{tmp_path}/stage has room for 0.00 of 0.00 GiB" in staged.shortage()
    content = [files.read(i) for i in range(24)]
    for _ in range(2):
        assert [staged.read(i) for i in range(24)] == content
        held = os.stat(next((tmp_path / "stage").glob("*.staged"))).st_size
        assert held == room


def test_a_file_that_has_changed_is_not_staged(tmp_path):
    files = class_tree(tmp_path / "root")
    staged = staging.Staged(files, str(tmp_path / "stage"))
    for content in (b"other", b"and another"):
        Path(files.path(3)).write_bytes(content)
        assert staged.read(3) == content


def test_wanted_on_a_node_is_what_its_ranks_read(tmp_path):
    """Against the images that the loaders of these ranks name."""
    files = flat_folder(tmp_path, 50)
    for steps in (range(3), range(2, 9), range(7, 8)):
        for ranks in (range(2), range(2, 4)):
            read = set()
            for rank in ranks:
                loader = data.build_loader(
                    files,
                    img_size=16,
                    patches=4,
                    seed=3,
                    global_batch=16,
                    local_batch=2,
                    steps=steps,
                    rank=rank,
                    world_size=4,
                )
                read |= {i for batch in loader for i in batch.image_ids}
            wanted = staging.wanted_on_node(50, 3, 16, 2, 4, ranks, steps)
            assert set(wanted.tolist()) == read


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder, and runs of two ranks: plain, staged, refused, reading only."""
    folder = tmp_path_factory.mktemp("runs")
    root, stage = folder / "root", folder / "stage"
    class_tree(root, each=16)
    (folder / "file").write_text("")
    flags = ("--steps", "6")
    given = [
        train(folder / "plain", root, *flags),
        train(folder / "staged", root, *flags, "--stage-dir", str(stage)),
        train(folder / "refused", root, *flags, "--stage-dir", str(folder / "file/x")),
        train(folder / "io", TILES, "--run", "io", *flags),
    ]
    return folder, run_ranks(2, given, folder / "ranks")


def test_training_with_a_node_local_copy_is_the_same_and_fills_it(runs):
    folder, (plain, staged, *_) = runs
    assert plain.status == staged.status == [0, 0], staged.errors
    assert [step["loss"] for step in plain.steps] == [step["loss"] for step in staged.steps]
    copy = staging.Staged(image_list.list_images(str(folder / "root")), str(folder / "stage"))
    (folder / "root").rename(folder / "gone")
    assert [len(copy.read(i)) for i in range(48)] == copy.files.sizes.tolist()


def test_a_stage_dir_that_cannot_be_made_is_refused_on_all_ranks(runs):
    _, (_, _, refused, _) = runs
    assert refused.status == [2, 2]
    assert "Not a directory" in refused.errors and refused.errors.count("error:") == 1


# --- where workers come from


def staged_run():
    """In a fresh process, as a script: a run whose first worker is the one that stages."""
    process.start_worker = spy_on_worker
    flags = [
        "--model",
        "tiny",
        "--img-size",
        "32",
        "--device",
        "cpu",
        "--data",
        str(TILES),
        "--run",
        "io",
        "--steps",
        "2",
        "--batch",
        "4",
        "--workers",
        "1",
        "--out",
        f"{os.environ['FOLDER']}/out",
        "--stage-dir",
        f"{os.environ['FOLDER']}/stage",
    ]
    with pytest.raises(SystemExit) as left:
        run_script([str(ROOT / "train_fsdp.py"), *flags])
    return left.value.code


def checked_images():
    process.start_helper = spy_on_worker
    return prepare.main(["scan", str(TILES), "--workers", "2"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("started_by", [staged_run, checked_images])
def test_a_worker_has_what_it_needs_from_its_server_and_no_trainer(tmp_path, started_by):
    """What each imports by itself is its own memory, six times a rank."""
    assert on_ranks(1, started_by, tmp_path) == [0]
    told = json.loads((tmp_path / "told").read_text())
    assert told["torch"]
    if started_by == staged_run:
        assert {"train_fsdp", "shard", "checkpoint", "mesh"}.isdisjoint(told["ours"])
        assert {"data", "storage.staged_images"} <= set(told["ours"])


# --- what a run reports of its input


def test_io_reports_what_each_rank_read(runs):
    folder, (*_, io) = runs
    assert io.status == [0, 0], io.errors
    lines = [json.loads(line) for line in (folder / "io/log.jsonl").read_text().splitlines()]
    event = next(line for line in lines if line["event"] == "io")
    assert len(event["ranks"]) == 2
    files = image_list.list_images(str(TILES))
    order = np.random.default_rng((0, 0)).permutation(192)[:96].reshape(6, 2, 8)
    end = io.end
    for rank, row in enumerate(event["ranks"]):
        read = files.sizes[order[:, rank]].sum()  # bytes, by the file system
        near = 1e-6 if rank == 0 else 0.1  # another rank has a clock of its own
        assert row["mb_per_second"] == pytest.approx(read / end["seconds"] / 1e6, rel=near)
        assert row["images_per_second"] == pytest.approx(48 / end["seconds"], rel=near)
        assert min(row[stage] for stage in log.STAGES) > 0
        assert 0 <= row["data_share"] <= 1


# --- what is left behind


def shared_memory(pids):
    """Segments of these processes, whose numbers PyTorch puts into the names."""
    return [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /dev/shm")
@pytest.mark.parametrize(
    "how",
    [
        "kill",
        *(pytest.param(how, marks=pytest.mark.full) for how in ("end", "interrupt", "exception")),
    ],
)
def test_a_loader_leaves_nothing_behind(tmp_path, how):
    code = """
import gc, os, sys, threading, time, torch, data
from runtime.device_batches import device_batches
if __name__ == "__main__":
    loader = data.build_loader(data.scan(sys.argv[1]), img_size=96, patches=144, seed=0,
                               global_batch=16, local_batch=16, steps=range(6), workers=2)
    fds = []
    for turn in range(3):
        for i, batch in enumerate(device_batches(loader, 1, torch.device("cpu"))):
            if i == 2 and sys.argv[2] != "end":
                print("reading", flush=True)
                if sys.argv[2] == "exception":
                    raise ValueError("on purpose")
                time.sleep(60)
        del batch
        gc.collect()
        deadline = time.monotonic() + 20  # a queue's own thread, which holds a pipe, ends later
        while threading.active_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert threading.active_count() == 1, threading.enumerate()
        fds.append(len(os.listdir("/proc/self/fd")))
    assert fds[1] == fds[2], fds  # the fork server, once started, stays for the next loader
    print("reading", flush=True)
"""
    (tmp_path / "job.py").write_text(code)
    job = subprocess.Popen(
        [sys.executable, "job.py", str(TILES), how],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert job.stdout.readline() == "reading\n", job.stderr.read()
    pids = [line.split()[0] for line in processes_of(job.pid)] + [str(job.pid)]
    if how == "kill":
        job.kill()
    elif how == "interrupt":
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does
    _, told = job.communicate(timeout=180)
    assert (job.returncode == 0) == (how == "end")
    if how == "interrupt":
        assert told.count("KeyboardInterrupt") == 1  # not once more from each worker
    deadline = time.monotonic() + 60
    while (processes_of(job.pid) or shared_memory(pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(job.pid)
    assert not shared_memory(pids)


def started(out, workers):
    """A run of one rank in a process group of its own, in its third step or later."""
    command = [
        sys.executable,
        "-u",
        str(ROOT / "train_fsdp.py"),
        "--model",
        "tiny",
        "--img-size",
        "32",
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--mode",
        "ddp",
        "--data",
        str(TILES),
        "--out",
        str(out),
        "--workers",
        str(workers),
        "--batch",
        "4",
        "--steps",
        "100000",
    ]
    job = subprocess.Popen(
        [*command, "--log-every", "1"],
        env=environment(0, 1, free_port()),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not re.match(r"step +2/", job.stdout.readline()):
        assert job.poll() is None
    return job


def test_ctrl_c_saves_and_ends_a_run(tmp_path):
    job = started(tmp_path / "out", 1)
    os.killpg(job.pid, signal.SIGINT)
    _, told = job.communicate(timeout=180)
    assert job.returncode == 0 and "Traceback" not in told
    assert read_log(tmp_path / "out/log.jsonl")[2]["reason"] == "signal"
    assert (tmp_path / "out/latest").exists()


def test_a_killed_worker_ends_the_run_with_its_cause(tmp_path):
    job = started(tmp_path / "out", 2)
    kill_a_worker(job.pid)
    _, told = job.communicate(timeout=180)
    assert job.returncode == 1
    sentence = (
        r"train_fsdp.py: error: rank 0: the data loader failed \(.*in step \d+.*DataLoader worker"
    )
    assert re.search(sentence, told), told
    steps = read_log(tmp_path / "out/log.jsonl")[2]["steps"]  # what was trained is kept
    assert checkpoint.verify(tmp_path / "out" / f"step_{steps:08d}") > 0


def kill_a_worker(pid):
    """One that has the loader's memory, not the fork server, which has the smallest number."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        forked = []
        for line in processes_of(pid):
            child = int(line.split()[0])
            status = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"forkserver" in status:
                forked.append(child)
        if len(forked) >= 3:
            os.kill(max(forked), signal.SIGKILL)
            return
        time.sleep(0.1)
    raise AssertionError("no worker was found")
