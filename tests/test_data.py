"""data.py against Pillow, torchvision and numpy, and against its promise: the stream of samples is
the same for any number of ranks and workers."""

import errno
import io
import os
import pickle
import signal
import subprocess
import sys
import time
import zlib
from functools import lru_cache
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import ROOT
from images import by_torchvision, copy_tiles, dataset_of, noise_image, saved, saved_array, stream
from PIL import Image
from torchvision.transforms.v2 import functional as v2

import data

# of a machine with fewer cores than the workers asked for
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

TRAIN = ROOT / "examples/tiles/train"  # 8 classes of 24 images


@lru_cache
def tiles():
    return data.scan(str(TRAIN))


def flat_folder(folder, count):
    """Make `count` images that all differ; their index is their number."""
    for i in range(count):
        noise_image(i).save(folder / f"{i:03}.jpg")
    return data.scan(str(folder))


class Own(list):
    """A data set of images in memory, as a user would write it: a function is called."""

    def path(self, index):
        return f"own {index}"

    def read(self, index):
        return self[index]() if callable(self[index]) else self[index]


# --- which files there are


def listed(root, made=(), **patterns):
    """Make these files; return the names that are then listed, in the order of their bytes."""
    for name in made:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    files = data.scan(str(root), **patterns)
    names = [files.name(i) for i in range(len(files))]
    assert names == sorted(names, key=os.fsencode)
    return set(names)


def test_scan_lists_every_visible_image_that_the_patterns_choose(tmp_path):
    tree = {"1.jpg", "z/2.jpg", "a/b/c/3.jpg", "sea ice/a b.jpg", "Å/größe 雪.jpg", "a,'b/1.jpg"}
    tree |= {f"e/1.{e}" for e in ("JPG", "jpeg", "png", "Tif", "tiff", "bmp", "webp", "npy", "jp2")}
    others = ["c/.hidden.jpg", ".cache/1.jpg", "c/.x/1.jpg", "c/a.txt", "c/jpg", "c/a.jpg.part"]
    assert listed(tmp_path, [*tree, *others]) == tree
    assert data.scan(str(tmp_path)).left_out == 3
    chosen = {name for name in tree if name[0] in "ez" and name[-3:] not in ("png", "bmp")}
    assert listed(tmp_path, include=["e", "z/*"], exclude=["*.[pb]*"]) == chosen
    with pytest.raises(ValueError, match="no images found"):
        data.scan(str(tmp_path), include=["e_"])


def test_scan_follows_links_and_lists_no_folder_twice(tmp_path):
    """Links out of the tree, upwards, and in circles."""
    root = tmp_path / "root"
    listed(tmp_path, ["elsewhere/1.jpg", "root/a/0.jpg", "root/a/1.jpg", "root/b/1.jpg"])
    links = {"lake": "../elsewhere", "pond": "../elsewhere", "a/up": "..", "a/around": "../.."}
    links |= {"a/to_b": "../b", "b/to_a": "../a"}
    for name, target in links.items():
        (root / name).symlink_to(target)
    # what can be reached in two ways has the name that comes first
    assert listed(root) == {"a/0.jpg", "a/1.jpg", "a/to_b/1.jpg", "a/around/elsewhere/1.jpg"}


def test_a_million_names_take_at_most_100_mb(tmp_path):
    """In the process that lists them, and on the way to a worker."""
    columns = [("name", "S52"), ("size", "i8"), ("shard", "i4"), ("start", "i8")]
    table = np.zeros(1_000_000, columns)
    table["name"] = b"train/agriculture_land/grassland/meadow/P0000000.jpg"
    with open(tmp_path / "pack.index", "wb") as file:
        np.save(file, table)
    files = data.scan(str(tmp_path))
    assert len(files) == 1_000_000 and len(files.name(5)) == 52
    assert len(pickle.dumps(files)) < 100 * 2**20


# --- decode


def decoded(content):
    """Return the pixels (H, W, 3) that training sees of a file."""
    image, _ = data.open_image(content)
    return np.asarray(data.decode(image), int)


PALETTE = Image.frombytes("P", (3, 1), bytes([0, 1, 2]))
PALETTE.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
SEEN = saved("PNG", PALETTE, transparency=b"\xff\x80\x00")  # how much: all, half, none
RGBA = Image.frombytes("RGBA", (3, 1), bytes([200, 100, 50, 255, 200, 100, 50, 128, 9, 9, 9, 0]))
CMYK = Image.frombytes("CMYK", (3, 1), bytes([255, 0, 0, 0, 0, 255, 255, 0, 0, 0, 0, 255]))


@pytest.mark.parametrize(
    ("content", "expected", "error"),
    [
        (SEEN, [[[255, 0, 0], [0, 128, 0], [0, 0, 0]]], 0),
        (saved("PNG", RGBA), [[[200, 100, 50], [100, 50, 25], [0, 0, 0]]], 0),
        (saved("JPEG", CMYK, quality=100, subsampling=0), np.asarray(CMYK.convert("RGB")), 30),
        (saved("BMP", CMYK.convert("L")), np.asarray(CMYK.convert("L").convert("RGB")), 0),
    ],
    ids=["palette", "RGBA", "CMYK", "grey"],
)
def test_every_mode_is_decoded_to_rgb_over_black(content, expected, error):
    np.testing.assert_allclose(decoded(content), expected, atol=error)


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("TIFF", {})]
)
def test_a_file_that_is_cut_off_is_unreadable(kind, options):
    whole = saved(kind, noise_image(0, 331, 415), **options)
    for cut in (len(whole) // 2, len(whole) - 2000, len(whole) - 200):
        # Pillow alone gives grey or black for zeros; in a TIFF they are pixels
        rests = [b""] if kind == "TIFF" else [b"", bytes(len(whole) - cut)]
        for rest in rests:
            with pytest.raises(data.UnreadableImage):
                decoded(whole[:cut] + rest)
    padded = whole + bytes(4096)  # to whole blocks of a disk
    np.testing.assert_array_equal(decoded(padded), np.asarray(Image.open(io.BytesIO(whole))))


# --- which rank reads which image when


@lru_cache
def one_rank():
    """Return what one process reads in an epoch and a quarter, of 16 steps and 4."""
    return stream(tiles(), global_batch=12, steps=range(20))


@pytest.mark.parametrize(
    ("ranks", "workers", "accum", "first"), [(3, 0, 2, 0), (4, 0, 1, 3), (2, 2, 2, 15)]
)
def test_ranks_workers_and_resuming_change_nothing(ranks, workers, accum, first):
    """From the first step, and from within an epoch, over the end of it."""
    options = {"ranks": ranks, "workers": workers, "accum": accum, "global_batch": 12}
    rows = stream(tiles(), steps=range(first, 20), **options)
    assert [row.position for row in rows] == list(range(12 * first, 240))
    assert all(row.step == row.position // 12 for row in rows)
    assert rows == [row for row in one_rank() if row.step >= first]


def test_every_epoch_reads_every_image_once_as_numpy_permutes_them():
    """A look at an image follows from the position: it differs in each epoch, and by the seed."""
    files = sorted(str(path) for path in TRAIN.rglob("*.jpg"))
    looks = set()
    for seed in (0, 1):
        rows = stream(tiles(), steps=range(8), ranks=3, seed=seed)  # two epochs
        for epoch in (0, 1):
            order = np.random.default_rng((seed, epoch)).permutation(192)
            part = rows[192 * epoch : 192 * (epoch + 1)]
            assert [row.path for row in part] == [files[index] for index in order]
        looks |= {(row.path, row.order, row.pixels) for row in rows}
    assert len(looks) == 4 * 192
    with pytest.raises(ValueError, match=r"^global batch 193 exceeds the data set of 192 images"):
        stream(tiles(), global_batch=193, steps=range(1))


# --- augmentation


def noise_array(seed, channels=12, dtype="uint16"):
    return np.random.default_rng(seed).integers(0, 10_000, (channels, 48, 64)).astype(dtype)


SIZES = [(300, 200), (50, 170), (1, 1), (7, 1000), (900, 2)]  # width, height
PICTURES = [noise_image(i, *size) for i, size in enumerate(SIZES)]
BYTES = [np.asfortranarray(noise_array(i, 5, "uint8")) for i in range(3)]
WORDS = [noise_array(i).astype(">u2") for i in range(3)]
FLOATS = [noise_array(i, 1, "float32")[:, ::-1] for i in range(3)]


@pytest.mark.parametrize(
    ("images", "kind", "options"),
    [
        (PICTURES, (3, "uint8"), {"exact": True}),
        ([saved("PNG", image) for image in PICTURES], (3, "uint8"), {}),
        ([saved("JPEG", image) for image in PICTURES], (3, "uint8"), {"img_size": 224}),
        ([saved("JPEG", image) for image in PICTURES], (3, "uint8"), {"exact": True}),
        (BYTES, (5, "uint8"), {}),
        ([saved_array(array) for array in WORDS], (12, "uint16"), {}),
        (FLOATS, (1, "float32"), {}),
    ],
    ids=["opened", "PNG", "JPEG that no crop reduces", "exact JPEG", "uint8", "uint16", "float32"],
)
def test_noise_crop_flip_and_pixels_are_those_of_torchvision(images, kind, options):
    """Of images of any shape, of files and of what a class of one's own returns."""
    channels, dtype = kind
    stats = data.ChannelStats((0.0,) * channels, (1.0,) * channels, dtype)
    options = {"img_size": 48, "global_batch": len(images), "stats": stats} | options
    dataset = dataset_of(Own(images), seed=3, **options)
    for position in range(4 * len(images)):
        sample = dataset[position]
        whole = images[sample.image_ids[0]]
        if isinstance(whole, bytes):
            opened = io.BytesIO(whole)
            whole = np.load(opened) if dtype == "uint16" else Image.open(opened)
        if isinstance(whole, np.ndarray):
            whole = torch.from_numpy(whole.astype("uint8" if dtype == "uint8" else "float32"))
        else:
            whole = v2.pil_to_tensor(whole)
        noise, expected = by_torchvision(whole, 3, position, options["img_size"])
        assert not sample.bad and torch.equal(sample.noise, noise)
        assert torch.equal(sample.image, expected)


def test_a_jpeg_decoded_at_a_smaller_scale_shows_the_same_crop():
    """Against the whole image, cut and resized: 40 dB, and no shift."""
    # smooth, as satellite images are to a camera: noise would be all that scales differ in
    smooth = noise_image(1, 30, 20).resize((1201, 803), Image.Resampling.BICUBIC)
    content = saved("JPEG", smooth, quality=95)
    whole = v2.pil_to_tensor(Image.open(io.BytesIO(content)))
    dataset = dataset_of(Own([content]), 64, 1)
    for position in range(12):
        image = dataset[position].image
        _, expected = by_torchvision(whole, 0, position, 64, scales=(1, 2, 4, 8))
        error = image.double() - expected.double()
        assert 0 < error.abs().mean() < 1 and error.square().mean() < 255**2 / 10**4


def test_without_augment_each_image_comes_once_in_order_with_its_centre():
    """And what stands in for a broken image, or for none beyond the last, is marked."""
    images = [*(noise_image(i, 60, 50) for i in range(6)), b"broken"]
    options = {"img_size": 44, "patches": 4, "global_batch": 4, "micro_batch_size": 2}
    options |= {"world_size": 2, "augment": False}
    found = {}
    for rank in range(2):
        loader = data.build_loader(Own(images), seed=0, steps=range(2), rank=rank, **options)
        for batch in loader:
            found |= dict(zip(batch.image_ids, batch.image, strict=True))
    assert found.keys() == {-1, *range(6)}
    for index in range(6):
        middle = images[index].crop((8, 3, 52, 47))  # 44 of 60 x 50 pixels
        assert torch.equal(found[index], v2.pil_to_tensor(middle))


def test_nodata_becomes_the_mean_of_its_channel():
    array = np.full((2, 4, 4), 5, np.float32)
    array[0, 0, 0] = np.nan
    image, _ = data.open_image(array, data.ChannelStats((7.0, 8.0), (1.0, 1.0), "float32"))
    assert image[0, 0, 0] == 7 and np.isnan(array[0, 0, 0]) and np.delete(image, 0).min() == 5


# --- broken images, and errors that are not theirs


def test_the_next_good_image_stands_in_for_a_broken_one(tmp_path):
    files = flat_folder(tmp_path, 24)
    healthy = stream(files, global_batch=6, steps=range(9))  # two epochs and a step
    floats = saved("TIFF", Image.new("F", (40, 40)))
    kinds = {3: Path(healthy[3].path).read_bytes()[:-500], 4: b"", 10: floats, 23: b"<html>404"}
    broken = {healthy[position].path: content for position, content in kinds.items()}
    for path, content in broken.items():
        Path(path).write_bytes(content)
    rows = stream(files, global_batch=6, steps=range(8))
    good = [next(h for h in healthy[p:] if h.path not in broken).path for p in range(48)]
    assert [row.path for row in rows] == good  # position 23 takes from the next epoch
    for row, own in zip(rows, healthy, strict=False):  # it has the crop and flip of its position
        whole = v2.pil_to_tensor(Image.open(row.path))
        _, pixels = by_torchvision(whole, 0, row.position, 32)
        assert (row.order, row.pixels) == (own.order, zlib.crc32(pixels.numpy()))
    assert stream(files, ranks=2, workers=1, global_batch=6, steps=range(8)) == rows
    # and each sample names the images that it replaces
    dataset = dataset_of(files, 32, 6)
    bad = [dataset[position].bad for position in range(24)]
    assert [len(bad[p]) for p in (2, 3, 4, 5, 10)] == [0, 2, 1, 0, 1]
    assert "truncated" in bad[3][0][1] and "`prepare.py pack`" in bad[10][0][1]


def test_too_many_broken_images_in_a_row_stop_the_run():
    most = data.MAX_UNREADABLE_IN_A_ROW
    files = Own([noise_image(0)] * (most + 4))
    dataset = dataset_of(files, 8, 1)
    at = [dataset.order.image_at(position) for position in range(most + 2)]
    for index in at[1:most]:  # one less than the limit
        files[index] = b""
    sample = dataset[1]
    assert sample.image_ids == [at[most]] and len(sample.bad) == most - 1
    files[at[most]] = b""
    sentence = f"^{most} images in a row could not be read, the last: own {at[most]} "
    with pytest.raises(OSError, match=sentence):
        dataset[1]


BROKEN = [FileNotFoundError(errno.ENOENT, ""), PermissionError(errno.EACCES, "")]
BROKEN += [OSError("image file is truncated"), data.UnreadableImage("mine")]
OTHER = [OSError(errno.EIO, ""), OSError(errno.ENOSPC, ""), MemoryError(), TypeError("x")]
OTHER += [NameError("nosie"), KeyError("gain"), ValueError("shapes"), IndexError("9")]


@pytest.mark.parametrize("error", BROKEN + OTHER, ids=repr)
def test_what_an_error_of_a_read_of_ones_own_means(error):
    """One of a file is replaced and listed; another rank may not have any other, or it is a bug."""
    files = Own([Mock(side_effect=error), *map(noise_image, range(4))])
    dataset = dataset_of(files, 8, 5)
    if error in BROKEN:
        assert [bad for position in range(5) for bad, _ in dataset[position].bad] == [0]
    else:
        with pytest.raises(type(error)):
            [dataset[position] for position in range(5)]


@pytest.mark.parametrize("bug", [*OTHER, FileNotFoundError(errno.ENOENT, "")], ids=repr)
@pytest.mark.parametrize("name", ["draw_augmentation", "draw_crop", "crop_and_resize"])
def test_an_error_of_an_augmentation_is_never_a_broken_image(bug, name, monkeypatch):
    monkeypatch.setattr(data, name, Mock(side_effect=bug))
    with pytest.raises(type(bug)) as raised:
        dataset_of(tiles(), 8, 8)[0]
    assert raised.value is bug


def misspelt():
    return nosie  # noqa: F821


def test_an_error_of_code_in_a_worker_ends_the_run_with_its_traceback():
    files = Own([misspelt, *map(noise_image, range(4))])
    with pytest.raises(NameError, match="in misspelt"):
        stream(files, global_batch=5, steps=range(5), workers=1)


def test_broken_arrays_and_those_of_another_kind_are_replaced_and_say_why():
    good = noise_array(0)
    whole = saved_array(good)
    images = [whole[:-100], whole[:6], saved_array(good.astype(np.int32)), saved_array(good[0])]
    images += [saved_array(good[:, :0]), saved_array(np.array([{}], object))]
    images += [np.full((12, 8, 8), np.nan, np.float32), noise_array(2, 4), noise_image(0), whole]
    stats = data.ChannelStats((5000.0,) * 12, (2500.0,) * 12, "uint16")
    dataset = dataset_of(Own(images), 32, len(images), stats=stats)
    found = dict(pair for position in range(len(images)) for pair in dataset[position].bad)
    assert found.keys() == set(range(9))
    assert found[7] == "4 channels of uint16, not 12 of uint16: see `prepare.py stats`"


# --- processes

LOADER = """
import multiprocessing, os, signal, sys, warnings
import torch
from PIL import Image, ImageFile
settings = (Image.MAX_IMAGE_PIXELS, ImageFile.MAXBLOCK, [*warnings.filters])
import data
if __name__ == "__main__":
    files = data.scan(sys.argv[1])
    data.decode(data.open_image(files.read(0))[0])
    assert settings == (Image.MAX_IMAGE_PIXELS, ImageFile.MAXBLOCK, [*warnings.filters])
    sizes = dict(img_size=8, patches=4, global_batch=2, micro_batch_size=2, workers=2)
    loader = iter(data.build_loader(files, seed=0, steps=range(40), **sizes))
    pids = [process.pid for process in multiprocessing.active_children()]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    for _ in range(20):
        next(loader)
    print(*pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_the_process_that_reads_from_them(tmp_path):
    """However it ends; but a signal that a launcher sends to all of them leaves them at work.

    And neither importing data.py nor reading changes a setting of Pillow or of warnings.
    """
    copy_tiles(tmp_path / "root", 4)
    (tmp_path / "main.py").write_text(LOADER)
    command = [sys.executable, tmp_path / "main.py", tmp_path / "root"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    pids = done.stdout.split()
    assert done.returncode == -signal.SIGKILL and len(pids) == 2, done.stderr
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)
