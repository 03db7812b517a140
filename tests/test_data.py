"""data.py against PIL, torchvision and numpy, and against its promise: the stream of samples is the
same for any number of ranks and workers."""

import errno
import io
import os
import pickle
import zlib
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from images import by_torchvision, dataset_of, noise_image, sample_at, saved, stream
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as v2

import data

# of a machine with fewer cores than the workers asked for
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

TRAIN = Path(__file__).resolve().parent.parent / "examples/tiles/train"  # 8 classes of 24 images


def flat_folder(folder, count, **size):
    """`count` images that all differ; their index is their number."""
    for i in range(count):
        noise_image(i, **size).save(folder / f"{i:03}.jpg")
    return data.scan(str(folder))


# --- which files there are


def listed(root, *made, **patterns):
    """Make these files; the names that are listed then."""
    for name in made:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    files = data.scan(str(root), **patterns)
    names = [os.path.relpath(files.path(i), root) for i in range(len(files))]
    assert names == sorted(names, key=os.fsencode)
    return set(names)


def test_scan_lists_every_visible_image(tmp_path):
    tree = {"1.jpg", "z/2.jpg", "a/b/c/3.jpg", "sea ice/a b.jpg", "Å/größe 雪.jpg", "a,'b/1.jpg"}
    tree |= {f"e/1.{e}" for e in ("JPG", "jpeg", "png", "Tif", "tiff", "bmp", "webp", "npy", "jp2")}
    others = ["c/.hidden.jpg", ".cache/1.jpg", "c/.x/1.jpg", "c/a.txt", "c/jpg", "c/a.jpg.part"]
    assert listed(tmp_path, *tree, *others) == tree
    assert data.scan(str(tmp_path)).left_out == 3
    assert listed(tmp_path, include=["e", "z/*"], exclude=["*.[pb]*"]) == {
        name for name in tree if name[0] in "ez" and name[-3:] not in ("png", "bmp")
    }
    with pytest.raises(ValueError, match="no images found"):
        data.scan(str(tmp_path), include=["e_"])


def test_scan_follows_links_and_lists_no_folder_twice(tmp_path):
    """Links out of the tree, upwards, and in circles."""
    names = ["elsewhere/1.jpg", *(f"root/a/{i}.jpg" for i in range(3)), "root/b/1.jpg"]
    listed(tmp_path, *names)
    root = tmp_path / "root"
    for name in ("lake", "pond"):
        (root / name).symlink_to("../elsewhere")
    (root / "a/up").symlink_to("..")
    (root / "a/around").symlink_to("../..")
    for here, there in (("a", "b"), ("b", "a")):
        (root / here / f"to_{there}").symlink_to(f"../{there}")
    own = {*(f"a/{i}.jpg" for i in range(3)), "a/to_b/1.jpg"}  # which comes first
    assert listed(root) == own | {"a/around/elsewhere/1.jpg"}


def test_a_million_names_take_at_most_100_mb_and_are_there_in_seconds(tmp_path):
    """In a process that lists them, and in one that receives the list."""
    count = 1_000_000
    columns = [("name", "S52"), ("size", "i8"), ("shard", "i4"), ("start", "i8")]
    table = np.zeros(count, columns)
    table["name"] = [f"train/agriculture_land/meadow/P{i:07}.jpg".encode() for i in range(count)]
    np.save(tmp_path / "pack", table)
    (tmp_path / "pack.npy").rename(tmp_path / "pack.index")
    files = data.scan(str(tmp_path))
    assert len(files) == count and files.name(5) == "train/agriculture_land/meadow/P0000005.jpg"
    assert len(pickle.dumps(files)) < 100 * 2**20


# --- decode


def decoded(content):
    return data.decode(data.open_image(content)[0])


RED, GREEN, BLUE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 0)
PALETTE = Image.frombytes("P", (3, 1), bytes([0, 1, 2]))
PALETTE.putpalette([*RED, *GREEN, *BLUE])
RGBA = Image.frombytes("RGBA", (3, 1), bytes([200, 100, 50, 255, 200, 100, 50, 128, 9, 9, 9, 0]))
CMYK = Image.frombytes("CMYK", (3, 1), bytes([255, 0, 0, 0, 0, 255, 255, 0, 0, 0, 0, 255]))
GREY = CMYK.convert("L")


def test_decode_every_mode():
    half = saved("PNG", PALETTE, transparency=b"\xff\x80\x00")
    assert np.asarray(decoded(half)).tolist() == [[[*RED], [0, 128, 0], [*BLACK]]]
    expected = [[[200, 100, 50], [100, 50, 25], [*BLACK]]]
    assert np.asarray(decoded(saved("PNG", RGBA))).tolist() == expected
    inks = decoded(saved("JPEG", CMYK, quality=100, subsampling=0))
    for found, image, error in ((inks, CMYK, 30), (decoded(saved("BMP", GREY)), GREY, 0)):
        assert found.mode == "RGB"
        np.testing.assert_allclose(
            np.asarray(found, int), np.asarray(image.convert("RGB"), int), atol=error
        )


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("TIFF", {})]
)
def test_a_file_that_is_cut_off_is_unreadable(kind, options):
    whole = saved(kind, noise_image(0, 331, 415), **options)
    for cut in (len(whole) // 2, len(whole) - 2000, len(whole) - 200):
        for rest in [b"", bytes(len(whole) - cut)][: 1 + (kind != "TIFF")]:
            # zeros: Pillow alone gives grey or black for the rest
            with pytest.raises(data.UnreadableImage):
                decoded(whole[:cut] + rest)
    padded = decoded(whole + bytes(4096))  # to whole blocks of a disk
    assert padded.tobytes() == Image.open(io.BytesIO(whole)).tobytes()


def test_a_whole_webp_may_end_in_zeros():
    """So no zeros at its end can tell an interrupted copy."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:16] = noise_image(0, 64, 16)
    whole = saved("WEBP", Image.fromarray(pixels), lossless=True, quality=0, method=0)
    assert whole.endswith(bytes(1000))
    np.testing.assert_array_equal(np.asarray(decoded(whole)), pixels)


# --- which rank reads which image when


def test_positions_by_hand():
    """Two steps of 12, rank 1 of 3 in runs of 2: 12 13 | 14 15 | 16 17, then 18 19 | 20 21 | ..."""
    sampler = data.RankBatchSampler(12, 2, 1, 3, range(1, 3))
    assert list(sampler) == [[14, 15], [20, 21], [26, 27], [32, 33]]
    assert [data.steps_per_epoch(192, g) for g in (1, 40, 48, 97, 192)] == [192, 4, 4, 1, 1]
    with pytest.raises(ValueError, match=r"^global batch 193 exceeds the data set of 192 images"):
        stream(tiles(), global_batch=193, steps=range(1))


@lru_cache
def tiles():
    return data.scan(str(TRAIN))


@lru_cache
def one_rank(global_batch, steps):
    return stream(tiles(), global_batch=global_batch, steps=range(steps))


@pytest.mark.parametrize(
    ("ranks", "workers", "accum", "global_batch", "first"),
    [(3, 0, 2, 48, 0), (4, 0, 1, 12, 3), (2, 2, 2, 12, 0), (2, 0, 1, 12, 16)],
)
def test_ranks_workers_and_resuming_change_nothing(ranks, workers, accum, global_batch, first):
    """From the first step, from within an epoch, from its end."""
    steps = 240 // global_batch  # one epoch and a quarter
    options = {"ranks": ranks, "workers": workers, "accum": accum, "global_batch": global_batch}
    rows = stream(tiles(), steps=range(first, steps), **options)
    assert [r.position for r in rows] == list(range(first * global_batch, 240))
    assert all(r.step == r.position // global_batch for r in rows)
    assert rows == [r for r in one_rank(global_batch, steps) if r.step >= first]


def test_every_image_is_read_once_in_an_epoch_and_looks_different_in_each():
    """By all ranks together; and with another seed: draws go by position, not by image."""
    rows, other = stream(tiles(), ranks=3, steps=range(8)), stream(tiles(), steps=range(4), seed=1)
    epochs = [{r.path: r for r in part} for part in (rows[:192], rows[192:], other)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(str(p) for p in TRAIN.rglob("*.jpg"))
    for path, r in epochs[0].items():
        for later in (epochs[1][path], epochs[2][path]):
            assert r.pixels != later.pixels and r.order != later.order


def test_the_order_is_a_function_of_seed_and_epoch():
    """An epoch of 4 steps of 48 is numpy's permutation; in whatever order positions are asked."""
    for seed in (0, 1):
        order = data.ImageOrder(192, 48, seed)
        for epoch in (2, 0, 1):
            found = [order.image_at(192 * epoch + i) for i in range(192)]
            assert found == np.random.default_rng((seed, epoch)).permutation(192).tolist()


def test_a_batch_is_what_the_docstring_says():
    """And torch's own generator is neither used nor changed."""
    sizes = {"img_size": 48, "patches": 9, "global_batch": 12, "micro_batch_size": 6}
    loader = data.build_loader(tiles(), seed=0, steps=range(1), **sizes)
    before = torch.get_rng_state()
    batch, _ = loader
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, _ = loader
    assert torch.equal(batch.image, again.image) and torch.equal(batch.noise, again.noise)
    assert (batch.image.shape, batch.image.dtype) == ((6, 3, 48, 48), torch.uint8)
    assert (batch.noise.shape, batch.noise.dtype) == ((6, 9), torch.float32)
    assert batch.bad == []


# --- augmentation


def pixels_of(image):
    return v2.pil_to_tensor(image.convert("RGB"))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(300, 200), (50, 170)])
def test_augmentation_equals_torchvision(tmp_path, shape, exact):
    files = flat_folder(tmp_path, 6, width=shape[0], height=shape[1])
    side = 48 if exact else 224  # at which none of these is decoded smaller than it is
    dataset = dataset_of(files, side, 16, seed=3, global_batch=6, exact=exact)
    for position in range(24):
        sample = sample_at(dataset, position)
        with Image.open(files.path(sample.image_id)) as image:
            expected = by_torchvision(pixels_of(image), 3, position, side)
            assert torch.equal(sample.image, expected)


@pytest.mark.parametrize("size", [(300, 200), (1, 1), (7, 1000), (900, 2)])
def test_draws_are_those_of_torchvision(size):
    """From the same generator: noise, flip, then RandomResizedCrop's own."""
    for position in range(50):
        word = int(np.random.SeedSequence((9, position)).generate_state(1)[0])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(word)
            noise, flip = torch.randperm(16).float(), bool(torch.rand(()) < 0.5)
            blank = torch.empty(1, size[1], size[0])
            crop = RandomResizedCrop.get_params(blank, [0.2, 1.0], [3 / 4, 4 / 3])
        found = data.draw_augmentation(9, position, 16, *size)
        assert torch.equal(found[0], noise) and found[1:] == (flip, tuple(crop))


def test_a_reduced_decode_shows_the_same_crop(tmp_path):
    """Against the whole image, cut and resized: 40 dB, and no shift."""
    # smooth, as satellite images are to a camera: noise would be all that scales differ in
    smooth = noise_image(1, 30, 20).resize((1201, 803), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "x.jpg", quality=95)
    with Image.open(tmp_path / "x.jpg") as stored:
        whole = pixels_of(stored)
    dataset = dataset_of(data.scan(str(tmp_path)), 64, 16, seed=0, global_batch=1)
    scales = Counter()
    for position in range(12):
        _, _, crop = data.draw_augmentation(0, position, 16, *whole.shape[:0:-1])
        fits = min(crop[2:]) // 64  # the shorter side of the crop still has the target's pixels
        reduce = max(s for s in (1, 2, 4, 8) if s <= fits)
        scales[reduce] += 1
        image = sample_at(dataset, position).image.numpy().astype(float)
        expected = by_torchvision(whole, 0, position, 64, reduce)
        error = image - expected.numpy()
        assert np.square(error).mean() < 255**2 / 10**4
        assert np.abs(error).mean() < 1
    assert set(scales) == {4, 8}


# --- broken images


def test_the_next_good_image_stands_in_for_a_broken_one(tmp_path):
    files = flat_folder(tmp_path, 24)
    healthy = stream(files, global_batch=6, steps=range(9))  # two epochs and a step
    cut = Path(healthy[3].path).read_bytes()[:-500]
    floats = saved("TIFF", Image.new("F", (40, 40)))
    kinds = {3: cut, 4: b"", 10: floats, 23: b"<!DOCTYPE html><html>404"}
    broken = {healthy[position].path: content for position, content in kinds.items()}
    for path, content in broken.items():
        Path(path).write_bytes(content)
    rows = stream(files, global_batch=6, steps=range(8))

    good = [next(h for h in healthy[p:] if h.path not in broken).path for p in range(48)]
    assert [r.path for r in rows] == good  # position 23 takes from the next epoch
    for r, h in zip(rows, healthy, strict=False):
        with Image.open(r.path) as image:
            pixels = by_torchvision(pixels_of(image), 0, r.position, 32)  # its own crop and flip
        assert (r.order, r.pixels) == (h.order, zlib.crc32(pixels.numpy()))
    assert stream(files, ranks=2, workers=1, global_batch=6, steps=range(8)) == rows

    # and each sample names the images that it replaces
    dataset = dataset_of(files, 32, 16, 0, 6)
    reports = [sample_at(dataset, p).bad for p in range(24)]
    assert [len(reports[p]) for p in (2, 3, 4, 5, 10)] == [0, 2, 1, 0, 1]
    assert "truncated" in reports[3][0][1] and "`prepare.py pack`" in reports[10][0][1]


def test_too_many_broken_images_in_a_row_stop_the_run(tmp_path):
    most = data.MAX_UNREADABLE_IN_A_ROW
    dataset = dataset_of(flat_folder(tmp_path, most + 4), 8, 4, 0, 1)
    at = [dataset.order.image_at(p) for p in range(most + 2)]
    for index in at[1:most]:  # one less than the limit
        Path(dataset.files.path(index)).write_bytes(b"")
    sample = sample_at(dataset, 1)
    assert sample.image_id == at[most] and len(sample.bad) == most - 1
    Path(dataset.files.path(at[most])).write_bytes(b"")
    sentence = rf"^{most} images in a row could not be read, the last: \S*{at[most]:03}\.jpg \("
    with pytest.raises(OSError, match=sentence):
        sample_at(dataset, 1)


class Own(list):
    """A data set of images in memory, as a user would write it: a function is called."""

    def path(self, index):
        return f"own {index}"

    def read(self, index):
        return self[index]() if callable(self[index]) else self[index]


def raising(error):
    def read():
        raise error

    return read


GOOD = [noise_image(i) for i in range(4)]
MISSING = FileNotFoundError(errno.ENOENT, "No such file")
FORBIDDEN = PermissionError(errno.EACCES, "Permission denied")
BROKEN = [MISSING, FORBIDDEN, OSError("image file is truncated"), data.UnreadableImage("mine")]
OTHER = [OSError(errno.EIO, "Input/output error"), OSError(errno.ENOSPC, "No space left")]
OTHER += [MemoryError(), KeyError("gain"), NameError("nosie"), ValueError("shape"), TypeError("x")]


@pytest.mark.parametrize("error", BROKEN + OTHER, ids=repr)
def test_what_an_error_of_a_read_of_ones_own_means(error):
    """One of a file is replaced and listed; another rank may not have any other, or it is a bug."""
    dataset = dataset_of(Own([raising(error), *GOOD]), 8, 4, 0, 5)
    if error in OTHER:
        with pytest.raises(type(error)):
            list(map(partial(sample_at, dataset), range(5)))
    else:
        samples = [sample_at(dataset, position) for position in range(5)]
        assert [bad for sample in samples for bad, _ in sample.bad] == [0]


def no_such_name(*args):
    return nosie  # noqa: F821


def no_such_key(*args):
    return {}["gain"]


def wrong_shape(*args):
    return np.zeros(2) + np.zeros(3)


def no_such_table(*args):
    return open("/no/such/table").read()


ERRORS = [no_such_name, no_such_key, wrong_shape, no_such_table]


@pytest.mark.parametrize("broken", ERRORS)
@pytest.mark.parametrize("name", ["draw_augmentation", "draw_crop", "crop_and_resize"])
def test_an_error_of_code_is_never_a_broken_image(broken, name, monkeypatch):
    """Not one of an augmentation either: it ends the run in the first batch."""
    dataset = dataset_of(tiles(), 8, 4, 0, 8)
    monkeypatch.setattr(data, name, broken)
    with pytest.raises((NameError, KeyError, ValueError, OSError)) as raised:
        sample_at(dataset, 0)
    assert not isinstance(raised.value, data.UnreadableImage)


def test_an_error_of_code_in_a_worker_ends_the_run_with_its_traceback():
    sizes = {"img_size": 8, "patches": 4, "global_batch": 5, "micro_batch_size": 5}
    own = Own([no_such_name, *GOOD])
    with pytest.raises(NameError, match="in no_such_name"):
        list(data.build_loader(own, seed=0, steps=range(5), workers=1, **sizes))


# --- arrays, and evaluation


def encoded(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def noise_array(seed, channels=12, dtype="uint16"):
    return np.random.default_rng(seed).integers(0, 10_000, (channels, 48, 64)).astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "channels", "change"),
    [
        ("uint8", 5, np.asfortranarray),
        ("uint16", 12, lambda a: a.astype(">u2")),
        ("float32", 1, lambda a: a[:, ::-1]),
    ],
)
def test_augmentation_of_arrays_equals_torchvisions(dtype, channels, change):
    """From a hook and from a .npy file: the same pixels as by v2 on the same draws."""
    arrays = [change(noise_array(i, channels, dtype=dtype)) for i in range(6)]
    stats = data.ChannelStats(tuple(np.zeros(channels)), tuple(np.ones(channels)), dtype)
    for images in (arrays, [encoded(array) for array in arrays]):
        dataset = dataset_of(Own(images), 32, 16, seed=3, global_batch=6, stats=stats)
        for position in range(12):
            sample = sample_at(dataset, position)
            whole = arrays[sample.image_id].astype("uint8" if dtype == "uint8" else "float32")
            expected = by_torchvision(torch.from_numpy(whole.copy()), 3, position, 32)
            assert not sample.bad and torch.equal(sample.image, expected), position


def test_broken_arrays_and_those_of_another_kind_are_replaced_and_say_why():
    good = noise_array(0)
    whole = encoded(good)
    images = [whole[:-100], whole[:6], encoded(good.astype(np.int32)), encoded(good[0])]
    images += [encoded(good[:, :0]), encoded(np.array([{}], object))]
    images += [encoded(np.full((12, 8, 8), np.nan, np.float32)), noise_array(2, 4), GOOD[0], whole]
    stats = data.ChannelStats((5000.0,) * 12, (2500.0,) * 12, "uint16")
    dataset = dataset_of(Own(images), 32, 16, 0, len(images), stats=stats)
    found = {}
    for position in range(len(images)):
        found |= dict(sample_at(dataset, position).bad)
    assert found.keys() == set(range(9))
    assert found[7] == "4 channels of uint16, not 12 of uint16: see `prepare.py stats`"


def test_nodata_becomes_the_mean_of_its_channel():
    array = np.full((2, 4, 4), 5, np.float32)
    array[0, 0, 0] = np.nan
    image, _ = data.open_image(array, data.ChannelStats((7.0, 8.0), (1.0, 1.0), "float32"))
    assert image[0, 0, 0] == 7 and np.isnan(array[0, 0, 0]) and np.delete(image, 0).min() == 5


def test_without_augment_each_image_comes_once_in_order_with_its_centre():
    """And what stands in for a broken image, or for none beyond the last, is marked."""
    images = [*(noise_image(i, 60, 50) for i in range(6)), b"broken"]
    sizes = {"img_size": 44, "patches": 4, "global_batch": 4, "micro_batch_size": 2}
    found = []
    for rank in range(2):
        loader = data.build_loader(
            Own(images), seed=0, steps=range(2), rank=rank, world_size=2, augment=False, **sizes
        )
        for batch in loader:
            rows = zip(batch.image_ids, batch.image, batch.noise, strict=True)
            found += [row for row in rows if row[0] >= 0]
    found.sort(key=lambda row: row[0])
    assert [index for index, _, _ in found] == list(range(6))
    for index, image, noise in found:
        box = (8, 3, 52, 47)  # the middle 44 of 60 x 50 pixels
        assert torch.equal(image, pixels_of(images[index].crop(box)))
        assert torch.equal(noise, data.draw_augmentation(0, index, 4, 1, 1)[0])


# --- workers


def inside_worker(samples):
    batch, known = data.collate(samples), hasattr(data, "set_by_the_test")
    return batch.image.is_shared() and batch.noise.is_shared(), dist.is_initialized(), known


def test_workers_inherit_nothing_and_share_their_batches(monkeypatch):
    """No network and no variable; a batch that is not shared would be copied to this process."""
    monkeypatch.setattr(data, "set_by_the_test", True, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sizes = {"img_size": 32, "patches": 16, "global_batch": 12, "micro_batch_size": 12}
    try:
        loader = data.build_loader(tiles(), seed=0, steps=range(2), workers=2, **sizes)
        loader.collate_fn = inside_worker
        assert list(loader) == [(True, False, False)] * 2
    finally:
        dist.destroy_process_group()
