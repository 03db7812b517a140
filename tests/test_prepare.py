"""prepare.py against tar, numpy, tifffile and PIL; and what training does with bad images."""

import csv
import errno
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import tifffile
from conftest import ROOT
from images import noise_image, stream
from PIL import Image
from ranks import Run, environment, files_limited, free_port, processes_of, read_log, run_ranks

import checkpoint
import data
import prepare
import train_fsdp
from runtime import image_source, log
from storage import image_list, packing

TILES = ROOT / "examples/tiles/train"


def listed(root):
    return image_list.list_images(str(root))


def contents(files):
    return [files.read(i) for i in range(len(files))]


def prepared(*argv):
    assert prepare.main([*map(str, argv), "--workers", "1"]) == 0


def make_folder(path):
    os.mkdir(path)
    return path


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
        "empty.jpg": (b"", "Pillow cannot open it as JPEG"),
        "html.jpg": (b"<!DOCTYPE html><html>404</html>", "Pillow cannot open it as JPEG"),
        "bands.tif": (b"II*\0" + bytes(300), "TIFF that Pillow cannot open"),
    }
    folder = root / "area0/class0"
    for name, (content, _) in kinds.items():
        (folder / name).write_bytes(content)
    (folder / "nothing.jpg").symlink_to("vanished.jpg")
    kinds["nothing.jpg"] = b"", "No such file"
    return {str(folder / name): reason for name, (_, reason) in kinds.items()}


def ledger(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- the list


def test_a_list_is_kept_in_out(tmp_path, capsys):
    """And a copy of it, as a worker gets, is no copy of the paths but a map of the file."""
    root, out = tmp_path / "root", str(tmp_path / "out")
    plain = class_tree(root)
    assert listed(root).index_file is None  # not kept
    kept = image_list.list_images(f"{root}/", out)
    assert kept.index_file == f"{out}/images.index" and capsys.readouterr().out == ""
    (root / "1 é.jpg").write_bytes(b"new")
    kept = image_list.list_images(str(root), out)  # of the folder as it is
    copied = pickle.loads(pickle.dumps(kept))
    assert (
        len(kept) == 25
        and len(pickle.dumps(kept)) < 400
        and contents(copied) == contents(listed(root))
    )
    assert copied.name(0) == "1 é.jpg" and copied.path(0) == f"{root}/1 é.jpg"
    assert copied.labels.tolist() == [-1, *plain.labels] and copied.classes == plain.classes
    assert contents(pickle.loads(pickle.dumps(plain))) == contents(plain)


def test_an_index_that_is_none_is_refused_and_no_pickle_in_it_is_read(tmp_path):
    path = tmp_path / "index.npy"
    np.save(path, np.array([{}], object), allow_pickle=True)
    for content in (path.read_bytes(), b"not an index"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"object|magic string"):
            image_list.load_index(str(path), str(tmp_path))


def test_a_resume_goes_on_with_the_same_images_only(tmp_path):
    """Names and sizes say so: a pack has those of its tree."""
    files, pack = class_tree(tmp_path / "root"), tmp_path / "pack"
    prepared("pack", files.root, pack)
    found = [image_list.fingerprint(listed(folder)) for folder in (files.root, pack)]
    path = Path(files.path(0))
    path.write_bytes(path.read_bytes() + b"\xff\xd9")
    found.append(image_list.fingerprint(listed(files.root)))
    path.rename(path.with_name("zzz.jpg"))
    found.append(image_list.fingerprint(listed(files.root)))
    assert found[0] == found[1] and len({*found}) == 3
    flags = ("--steps", "2", "--save-every", "1")
    runs = [train(tmp_path / "out", folder, *flags) for folder in (pack, files.root)]
    first, refused = run_ranks(1, runs, tmp_path / "ranks")
    assert (first.status, refused.status) == ([0], [2])
    assert "image_names_and_sizes" in refused.errors and "--allow-changes" in refused.errors


def test_a_part_of_a_pack_is_the_same_images_as_that_part_of_its_tree(tmp_path):
    root, pack = tmp_path / "root", tmp_path / "pack"
    for name in ("a/0.png", "a/1.png", "b_of_a_long_name_that_is_left_out/0.png"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        noise_image(0).save(path)
    prepared("pack", root, pack)
    for include in ((), ("a",)):
        lists = [image_list.list_images(str(folder), include=include) for folder in (root, pack)]
        names = [name.relative_to(root) for name in sorted(root.rglob("*.png"))][: len(lists[0])]
        width = max(len(str(name)) for name in names)
        crc = zlib.crc32(b"".join(str(name).encode().ljust(width, b"\0") for name in names))
        sizes = np.array([(root / name).stat().st_size for name in names], "int64")
        expected = f"{zlib.crc32(sizes.tobytes(), crc):08x}"
        assert [image_list.fingerprint(files) for files in lists] == [expected, expected]


# --- bad images


def test_scan_names_every_broken_image_once(tmp_path, capsys):
    root = tmp_path / "root"
    expected = broken_tree(root)
    for workers in ("2", "1"):
        assert prepare.main(["scan", str(root), "--workers", workers]) == 1
        said = capsys.readouterr().out.splitlines()
        # A busy machine takes more than the seconds after which progress is told.
        *lines, kind, last = [line for line in said if not line.startswith("reading: ")]
        assert last == f"{len(expected)} of 32 images cannot be read"
        assert kind == "27 images: 3 channels of uint8 (RGB pictures)"
        found = dict(line.split(": ", 1) for line in lines)
        assert found.keys() == expected.keys() and len(lines) == len(expected)
        del found[next(path for path in found if path.endswith(".tif"))]  # tifffile's own words
        assert all(expected[path] in reason for path, reason in found.items())
    prepared("scan", TILES)


TRAIN = "--model tiny --img-size 32 --device cpu --precision fp32 --mode full_shard --workers 0"


def train(out, root, *flags):
    """A run of the smallest model, for `run_ranks`."""
    argv = [*TRAIN.split(), "--log-every", "2", "--global-batch", "16", "--data", str(root), *flags]
    return Run(argv, params=False, to=str(out))


def test_training_replaces_bad_images_and_lists_each_once(tmp_path):
    """Of 27 good and 5 broken ones: every rank finds others in each epoch."""
    root, out = tmp_path / "root", tmp_path / "out"
    expected = broken_tree(root)
    runs = [
        train(out, root, "--steps", "6", "--max-bad", "0.5"),
        train(out, root, "--steps", "8", "--max-bad", "0.5", "--allow-changes"),  # resumed
    ]
    first, longer = run_ranks(2, runs, tmp_path / "ranks")
    assert first.status == longer.status == [0, 0], first.errors + longer.errors
    rows = ledger(out / "bad_images.csv")  # of both runs: none is listed again
    assert sorted(row["path"] for row in rows) == sorted(expected)
    assert all(expected[row["path"]] in row["reason"] for row in rows)
    assert longer.end["bad_images"] == 5
    assert re.search(r"warning: unreadable images, replaced .*first: \S+ \(", first.output)
    assert "unreadable images" not in longer.output


def test_too_many_bad_images_end_a_run_long_before_its_next_log_line(tmp_path):
    root, out = tmp_path / "root", tmp_path / "out"
    files = class_tree(root)
    for index in range(0, len(files), 2):
        Path(files.path(index)).write_bytes(b"broken")
    flags = ("--steps", "60", "--log-every", "100")
    (result,) = run_ranks(2, [train(out, root, *flags)], tmp_path / "ranks")
    assert result.status == [1, 1] and "of 24 images are unreadable, more than" in result.errors
    assert result.end["reason"] == "bad_images" and result.end["steps"] == 10
    listed = [row["path"] for row in ledger(out / "bad_images.csv")]
    assert sorted(listed) == [files.path(index) for index in range(0, len(files), 2)]


@pytest.mark.parametrize("header", [True, False])
def test_a_list_of_bad_images_that_lost_a_part_is_continued(header, tmp_path):
    """A full disk or a lost node may leave no header, zeros, or half a line."""
    rows = [["root/a,b.jpg", "OSError: cut", "3"], ["root/\n.jpg", 'says "no"', "4"]]
    with open(tmp_path / "bad_images.csv", "w", newline="") as file:
        csv.writer(file).writerows([["path", "reason", "step"]] * header + rows)
        file.write("\0" * 50 + "\r\nroot/c.j")
    names = [row[0] for row in rows]
    run = SimpleNamespace(config=SimpleNamespace(out=str(tmp_path)), images=3)
    bad = log.BadImageLog(run, SimpleNamespace(rank=0), [*names, "root/c.jpg"].__getitem__)
    assert bad.known == set(names)


# --- packs


def tar_content(folder):
    """Path -> bytes, by tarfile, over all shards in order."""
    content = {}
    for shard in sorted(Path(folder).glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive.getmembers():
                content[member.name] = archive.extractfile(member).read()
    return content


def test_a_pack_is_a_copy_that_tar_reads(tmp_path, monkeypatch, capsys):
    """And its stream is that of its tree, the listed substitutes of broken images included."""
    root, target = tmp_path / "root", tmp_path / "pack"
    lost = ("nothing.jpg", "bands.tif", "html.jpg", "empty.jpg")
    broken_tree(root)
    noise_image(99, 800, 800).save(root / "large.jpg", quality=100)  # for a second shard
    monkeypatch.setattr(packing, "SHARD_BYTES", 2**20)
    prepared("pack", root, target)
    assert "33 images in 2 shards, " in (printed := capsys.readouterr().out)
    # What cannot be opened is named; whether a picture is cut off, only `scan` finds out.
    assert "4 of 33 images cannot be read" in printed
    assert "copied undecoded: `prepare.py scan` finds the broken ones" in printed
    assert all(f"{root}/area0/class0/{name}: " in printed for name in lost)
    files, packed = listed(root), listed(target)
    paths = [Path(files.path(i)) for i in range(33)]
    expected = [b"" if path.name in lost else path.read_bytes() for path in paths]
    assert contents(packed) == list(tar_content(target).values()) == expected
    assert list(tar_content(target)) == [packed.name(i) for i in range(33)]
    assert packed.labels.tolist() == files.labels.tolist() and packed.classes == files.classes

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
    for name in ("c.jpg", "d.tif"):  # not larger: as it was
        assert content[name] == (root / name).read_bytes()
    assert content["e.jpg"] == b""
    assert content["f.npy"] == (root / "f.npy").read_bytes()
    for name, size in (("a.jpg", (256, 85)), ("b.png", (77, 256))):
        image, found = data.open_image(content[name if name == "a.jpg" else "b.png.jpg"])
        assert found == size and image.format == "JPEG"
        expected = Image.open(root / name).resize(size, Image.Resampling.BICUBIC)
        assert np.abs(np.subtract(image, expected, dtype=float)).mean() < 2


def test_a_pack_is_whole_or_not_there(tmp_path, monkeypatch, capsys):
    root, target = tmp_path / "root", tmp_path / "pack"
    files = class_tree(root, width=300, height=300)
    monkeypatch.setattr(packing, "SHARD_BYTES", 2**20)
    command = ["pack", str(root), str(target), "--workers", "1"]
    gone = FileNotFoundError(errno.ENOENT, "")  # a file system that went away
    for error in (KeyboardInterrupt(), OSError(errno.EIO, ""), gone):
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            opened = Mock(side_effect=[io.BytesIO(b"x" * 2**17) for _ in range(20)] + [error])
            patch.setattr(image_list.ImageList, "open", opened)
            assert prepare.main(command) == 1
        assert not target.exists()
    assert prepare.main(command) == 0 and contents(listed(target)) == contents(files)
    for folder in (target, root):
        assert prepare.main(["pack", str(root), str(folder)]) == 2
        assert "is not empty: pack into a new folder" in capsys.readouterr().err
    assert prepare.main(["stats", str(root / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_on_a_full_disk_what_was_there_stays(tmp_path, monkeypatch):
    (tmp_path / "list").write_text("old")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left on device"):
        image_list.save_index(class_tree(tmp_path / "root"), f"{tmp_path}/list")
    assert (tmp_path / "list").read_text() == "old" and not list(tmp_path.glob(".*"))


def test_a_list_that_cannot_be_written_says_why(tmp_path):
    """Not: 24 requested and 1 written."""
    files = class_tree(tmp_path / "root")
    with files_limited(200), pytest.raises(OSError) as raised:
        image_list.save_index(files, f"{tmp_path}/list")
    assert raised.value.errno == errno.EFBIG and not (tmp_path / "list").exists()


def test_a_pack_may_take_the_place_of_an_empty_folder_behind_a_link(tmp_path, capsys):
    root = class_tree(tmp_path / "root")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    prepared("pack", root.root, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty/pack.index").exists()
    assert contents(listed(tmp_path / "link")) == contents(root)
    assert sorted(os.listdir(tmp_path)) == ["empty", "link", "root"]


@pytest.mark.parametrize("target", ["a mount point", "."])
def test_a_folder_that_cannot_be_replaced_is_refused(target, tmp_path, monkeypatch, capsys):
    """Before the work: a mount point, and the folder that the command is typed in."""
    (tmp_path / "empty").mkdir()
    if target == ".":
        monkeypatch.chdir(tmp_path / "empty")
    else:
        monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "empty")
        target = str(tmp_path / "empty")
    assert prepare.main(["pack", str(TILES), target]) == 2
    printed = capsys.readouterr()
    assert f"{target} cannot be replaced by a pack: give a new" in printed.err and not printed.out
    assert os.listdir(tmp_path) == ["empty"]


# --- statistics


def measured(root):
    prepared("stats", root)
    channels = json.loads(Path(image_list.stats_file(str(root))).read_text())["mean"]
    return image_source.find_stats(str(root), len(channels))[0]


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
    assert image_source.find_stats(f"{root}/", 3)[0] == found


def test_a_pack_takes_the_statistics_of_its_source_along(tmp_path):
    """Without them it trained in silence with ImageNet's; those of arrays are measured."""
    files = class_tree(tmp_path / "tree")
    pixels = [data.decode(data.open_image(content)[0]) for content in contents(files)]
    expected = measured(files.root)
    np.testing.assert_allclose(expected.mean, np.mean(pixels, (0, 1, 2)) / 255, rtol=1e-9)
    prepared("pack", files.root, tmp_path / "pack")
    assert image_source.find_stats(str(tmp_path / "pack"), 3)[0] == expected
    (tmp_path / "arrays").mkdir()
    with open(tmp_path / "arrays/a.NPY", "wb") as file:
        np.save(file, np.arange(2 * 30, dtype=np.uint16).reshape(2, 5, 6))
    prepared("pack", tmp_path / "arrays", tmp_path / "packed")
    assert image_source.find_stats(str(tmp_path / "packed"), 2)[0].mean == (14.5, 44.5)


OF_OTHERS = ["", "--nodata 0", "--include a*", "--exclude b*", "other tree", "other values"]


@pytest.mark.parametrize("flags", OF_OTHERS)
def test_statistics_of_other_images_are_not_taken_along(flags, tmp_path):
    root = tmp_path / "tree"
    root.mkdir()
    draw = np.random.default_rng(0)
    pixels = {name: draw.integers(0, 9, (2, 8, 8)).astype(np.uint16) for name in ("a0", "a1", "b")}
    if flags == "other tree":
        np.save(root / "a0.npy", pixels["a0"][:1])
        measured(root)
        flags = ""
    for name, array in pixels.items():
        np.save(root / f"{name}.npy", array)
    if not (root.parent / "tree.stats.json").exists():
        measured(root)
    if flags == "other values":  # scaled anew: the files have the same names and sizes
        pixels = {name: array * 7 for name, array in pixels.items()}
        for name, array in pixels.items():
            np.save(root / f"{name}.npy", array)
        flags = ""
    prepared("pack", root, tmp_path / "pack", *flags.split())
    chosen = [*pixels.values()]
    if flags.startswith(("--include", "--exclude")):
        chosen = chosen[:2]
    if "nodata" in flags:
        chosen = [np.where(array == 0, np.nan, array) for array in chosen]
    expected = np.mean([np.nanmean(array, (1, 2)) for array in chosen], 0)
    found, _ = image_source.find_stats(str(tmp_path / "pack"), 2)
    np.testing.assert_allclose(found.mean, expected, rtol=1e-9)
    assert found.dtype == ("float32" if "nodata" in flags else "uint16")


def test_statistics_without_a_number_that_training_takes_as_a_value_are_refused(tmp_path, capsys):
    root = tmp_path / "tree"
    root.mkdir()
    pixels = np.full((1, 8, 8), 100, np.float32)
    pixels[0, :4] = -9999
    np.save(root / "1.npy", pixels)
    assert prepare.main(["stats", str(root), "--nodata=-9999"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not (tmp_path / "tree.stats.json").exists()
    assert f"`prepare.py pack {root} DST --nodata=-9999`" in error
    prepared("pack", root, tmp_path / "pack", "--nodata=-9999")
    found, _ = image_source.find_stats(str(tmp_path / "pack"), 1)
    assert found.mean == (100,)


def test_statistics_that_cannot_be_written_are_not_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "tree").mkdir()
    noise_image(0).save(tmp_path / "tree/1.png")
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (str(tmp_path), os.W_OK))
    monkeypatch.setattr(prepare, "read_folder", Mock(side_effect=AssertionError))
    assert prepare.main(["stats", str(tmp_path / "tree")]) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}/tree.stats.json cannot be written: " in error and error.count("\n") == 1


@pytest.mark.parametrize("flags", [[], ["--include", "s2*"]])
def test_statistics_of_a_part_are_used_for_that_part_alone(flags, tmp_path):
    """They were copied for all, and training took them in silence."""
    root, pack = tmp_path / "root", tmp_path / "pack"
    root.mkdir()
    pixels = {}
    for i in range(16):
        name = f"s{1 + i % 2}_{i}"
        pixels[name] = np.random.default_rng(i).normal((-15, 3000)[i % 2], 3, (2, 32, 32))
        np.save(root / f"{name}.npy", pixels[name].astype("f4"))
    prepared("stats", root, "--include", "s2*")
    prepared("pack", root, pack, *flags)
    chosen = [pixels[name] for name in pixels if not flags or name.startswith("s2")]
    found, note = image_source.find_stats(str(pack), 2, image_list.fingerprint(listed(pack)))
    np.testing.assert_allclose(found.mean, np.mean(chosen, (0, 2, 3)), rtol=1e-6)
    assert note == f"of {pack}/stats.json"
    runs = []
    for number, more in enumerate((["--include", "s2*"], ["--include", "s1*"], [])):
        argv = ["--channels", "2", "--steps", "1", "--global-batch", "8", *more]
        runs.append(train(tmp_path / f"out{number}", root, *argv))
    notes = []
    for result in run_ranks(1, runs, tmp_path / "ranks"):
        assert result.status == [0], result.errors
        (line,) = re.findall("^pixels: .*", result.output, re.MULTILINE)
        notes.append("measured on other images" in line)
    assert notes == [False, True, True]


GOOD = {"mean": [4.0, 4.0], "std": [2.0, 2.0], "dtype": "uint16"}
WRONG = {
    "a deviation of 0": GOOD | {"std": [2.0, 0.0]},
    "a deviation below 0": GOOD | {"std": [2.0, -1.0]},
    "no number": GOOD | {"std": [2.0, float("nan")]},
    "infinity": GOOD | {"mean": [2.0, float("inf")]},
    "other lengths": GOOD | {"std": [2.0] * 3},
    "no channel": GOOD | {"mean": [], "std": []},
    "no type": {"mean": GOOD["mean"], "std": GOOD["std"]},
    "another type": GOOD | {"dtype": "int16"},
    "a list as type": GOOD | {"dtype": ["uint16"]},
    "no mean": {"std": GOOD["std"], "dtype": "uint16"},
    "one number": GOOD | {"mean": 4.0},
    "letters": GOOD | {"mean": "44"},
    "words": GOOD | {"mean": ["four", "four"]},
    "large": GOOD | {"mean": [10**400, 1]},
    "a list": [1, 2],
    "text": "mean",
}


@pytest.mark.parametrize("name", [*WRONG, "empty", "bytes"])
def test_wrong_statistics_are_refused_before_any_work(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save(Path(make_folder("root"), "1.npy"), np.ones((2, 32, 32), "uint16"))
    content = {"empty": b"", "bytes": b"\xff\0"}.get(name)
    if content is None:
        content = json.dumps(WRONG[name]).encode()
    Path("root.stats.json").write_bytes(content)
    argv = [*TRAIN.split(), "--data", "root", "--channels", "2", "--out", "out"]
    assert train_fsdp.main([*argv, "--global-batch", "1", "--mode", "ddp", "--steps", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err, printed.err
    assert "root.stats.json is not as `prepare.py stats` writes it (" in printed.err
    assert "step" not in printed.out
    Path("root.stats.json").write_text(json.dumps(GOOD))  # by hand, and right
    found, note = image_source.find_stats("root", 2, "any other")
    assert found == data.ChannelStats((4.0, 4.0), (2.0, 2.0), "uint16")
    assert note == f"of {tmp_path}/root.stats.json"


# --- TIFF of many bands

INTERLEAVED, PLANAR = {"planarconfig": "contig"}, {"planarconfig": "separate"}
RGBX = {"photometric": "rgb", "extrasamples": [0]}
# name: (shape of one image, dtype, options of tifffile)
BANDS = {
    "planar": ((13, 20, 24), "u2", PLANAR),
    "by pixel": ((20, 24, 13), ">u2", INTERLEAVED),
    "a page each": ((13, 20, 24), "u2", {}),
    "two bands": ((20, 24, 2), "f4", INTERLEAVED),
    "one of floats": ((20, 24), "f4", {}),
    "signed": ((20, 24), "i2", {}),
    "RGB and infrared": ((20, 24, 4), "u1", RGBX),
}


def write_tiff(path, seed, shape, dtype, options):
    """Write an image whose shortest axis are the bands; the array (C, H, W) that is meant."""
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(seed).integers(0, 120, shape).astype(dtype)
    tifffile.imwrite(path, array, **{"photometric": "minisblack"} | options)
    return np.moveaxis(array, np.argmin(shape), 0) if array.ndim == 3 else array[None]


def test_tiff_of_many_bands_is_packed_as_arrays(tmp_path, capsys):
    root = tmp_path / "root"
    expected = {
        f"{name}.tif.npy": write_tiff(root / f"{name}.tif", seed, *kind)
        for seed, (name, kind) in enumerate(BANDS.items())
    }
    Image.new("L", (64, 64)).save(root / "grey.tif")  # Pillow's, as in a tree
    noise_image(0).save(root / "rgb.tif")
    prepared("pack", root, tmp_path / "pack")
    content = tar_content(tmp_path / "pack")
    for name in ("grey.tif", "rgb.tif"):
        assert content.pop(name) == (root / name).read_bytes()
    assert content.keys() == expected.keys()
    for name, packed in content.items():
        found, array = np.load(io.BytesIO(packed)), expected[name]
        np.testing.assert_array_equal(found, array)
        assert found.dtype.name == ("float32" if array.dtype == np.int16 else array.dtype.name)
    thirteen = [array.mean((1, 2)) for array in expected.values() if len(array) == 13]
    np.testing.assert_allclose(measured(root).mean, np.mean(thirteen, 0), rtol=1e-9)
    assert f"3 of {len(expected) + 2} images, 13 channels of uint16\n" in capsys.readouterr().out


def test_without_tifffile_one_sentence_says_what_to_type(tmp_path, monkeypatch, capsys):
    write_tiff(path := tmp_path / "root/1.tif", 0, *BANDS["planar"])

    monkeypatch.setitem(sys.modules, "tifffile", None)
    folder, pack = str(path.parent), str(tmp_path / "pack")
    for command in (["stats", folder], ["pack", folder, pack]):
        assert prepare.main([*command, "--workers", "1"]) == 1
        assert f"{path}: this TIFF needs a package" in capsys.readouterr().err
    prepared("pack", TILES, tmp_path / "plain")  # which is needed for nothing else


@pytest.mark.full
def test_a_tree_of_thirteen_bands_trains_after_one_command(tmp_path):
    root, pack = tmp_path / "tiff", tmp_path / "packed"
    for i in range(32):
        kind = list(BANDS.values())[i % 3]
        write_tiff(root / f"class{i % 2}/{i:02}.tif", i, *kind)
    prepared("scan", root)
    prepared("pack", root, pack)
    flags = ["--channels", "13", "--steps", "2", "--log-every", "1"]
    given = [train(tmp_path / f"out-{folder.name}", folder, *flags) for folder in (pack, root)]
    result, tree = run_ranks(2, given, tmp_path / "ranks")
    assert result.status == [0, 0], result.errors
    assert 0.5 < result.steps[0]["loss"] < 2 and result.end["bad_images"] == 0
    assert tree.status == [2, 2] and f"type `python prepare.py stats {root}`" in tree.errors


# --- what workers read, and what they leave


@pytest.mark.skipif(sys.platform != "linux", reason="reads /dev/shm")
@pytest.mark.full
@pytest.mark.parametrize("how", ["Ctrl-C", "a worker is killed", "it is killed"])
def test_a_run_with_workers_that_ends_early_saves_and_leaves_nothing_behind(tmp_path, how):
    flags = f"{TRAIN} --mode ddp --batch 4 --steps 100000 --log-every 1 --workers 2 --data {TILES}"
    command = [sys.executable, "-u", ROOT / "train_fsdp.py", *flags.split(), "--out", tmp_path]
    pipes = {"stdout": -1, "stderr": -1, "text": True, "start_new_session": True}
    job = subprocess.Popen(command, env=environment(0, 1, free_port()), **pipes)
    while not re.match(r"step +2/", job.stdout.readline()):
        assert job.poll() is None
    pids = [int(line.split()[0]) for line in processes_of(job.pid)]
    if how == "Ctrl-C":
        os.killpg(job.pid, signal.SIGINT)
    elif how == "it is killed":
        job.kill()
    else:
        named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        os.kill(max(p for p in named if b"forkserver" in named[p]), signal.SIGKILL)
    _, told = job.communicate(timeout=180)
    deadline = time.monotonic() + 60

    def left():  # PyTorch puts the number of a process into the names of its shared memory
        shared = os.listdir("/dev/shm")
        found = [name for name in shared if any(f"_{pid}_" in name for pid in pids)]
        if how == "a worker is killed":  # perhaps between making a segment and unlinking its name
            found = []
        return processes_of(job.pid) + found

    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left()
    if how != "it is killed":
        assert job.returncode == (how != "Ctrl-C") and "Traceback" not in told
        end = read_log(tmp_path / "log.jsonl")[2]  # what was trained is kept
        assert checkpoint.check(tmp_path / f"step_{end['steps']:08d}")
        assert end["reason"] == ("signal" if how == "Ctrl-C" else "loader_error")
    if how == "a worker is killed":  # with its cause, or what broke while it sent a batch
        cause = r"error: rank 0: the data loader failed \(.*in step \d+.*(DataLoader|Connection)"
        assert re.search(cause, told), told
