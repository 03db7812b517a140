"""data.py against PIL, torchvision and numpy, and against its promise: the stream of samples is the
same for any number of ranks and workers."""

import errno
import io
import os
import zlib
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image, ImageOps
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as v2

import data
from runtime.image_source import SyntheticImages

# of a machine with fewer cores than the workers asked for
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

TRAIN = Path(__file__).resolve().parent.parent / "examples/tiles/train"  # 8 classes of 24 images


def noise_image(seed, width=40, height=40):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def saved(kind, image, **options):
    """The bytes of an image file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def flat_folder(folder, count, **size):
    """`count` images that all differ; their index is their number."""
    for i in range(count):
        noise_image(i, **size).save(folder / f"{i:03}.jpg")
    return data.scan(str(folder))


# --- which files there are


def listed(root, *made):
    """Make these files; what is listed then: path -> class."""
    for name in made:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    files = data.scan(str(root))
    names = [os.path.relpath(files.path(i), root) for i in range(len(files))]
    assert names == sorted(names) and files.classes == tuple(sorted(files.classes))
    labels = [files.classes[n] if n >= 0 else None for n in files.labels]
    return dict(zip(names, labels, strict=True))


TREES = {
    "mixture": {"1.jpg": None, "z/2.jpg": "z", "a/b/c/3.jpg": "c", "a/4.jpg": "a"},
    "one name twice": {"x/lake/1.jpg": "lake", "y/lake/1.jpg": "lake", "y/dam/1.jpg": "dam"},
    "names": {"sea ice/a b.jpg": "sea ice", "Å/größe 雪.jpg": "Å", "a,'b/1.jpg": "a,'b"},
    "extensions": {f"c/1.{e}": "c" for e in ("JPG", "jpeg", "png", "Tif", "tiff", "bmp", "webp")},
}


@pytest.mark.parametrize("name", TREES)
def test_scan_names_the_class_by_the_leaf_folder(tmp_path, name):
    others = ["c/.hidden.jpg", ".cache/1.jpg", "c/.x/1.jpg", "c/a.txt", "c/jpg", "c/a.jpg.part"]
    assert listed(tmp_path, *TREES[name], *others) == TREES[name]


def test_scan_follows_links_and_lists_no_folder_twice(tmp_path):
    """Links out of the tree, upwards, to a folder that has another one, and in circles."""
    names = ["elsewhere/1.jpg", *(f"root/a/{i}.jpg" for i in range(3)), "root/b/1.jpg"]
    listed(tmp_path, *names)
    root = tmp_path / "root"
    (root / "lake").symlink_to("../elsewhere")
    (root / "a/up").symlink_to("..")
    (root / "a/around").symlink_to("../..")
    for here, there in (("a", "b"), ("b", "a")):
        (root / here / f"to_{there}").symlink_to(f"../{there}")
    expected = {"lake/1.jpg": "lake", "b/1.jpg": "b", **{f"a/{i}.jpg": "a" for i in range(3)}}
    assert listed(root) == expected
    (root / "pond").symlink_to("../elsewhere")
    assert listed(root) == expected


def test_scan_refuses_what_it_cannot_list(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        data.scan(str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^no images found in .*/empty: looked for .jpg .jpeg"):
        data.scan(f"{tmp_path}/empty")


# --- decode


def decoded(content):
    return data.decode(data.open_image(content)[0])


RED, GREEN, BLUE, CYAN = (255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 255, 255)
BLACK, WHITE = (0, 0, 0), (255, 255, 255)


def row(mode, *values):
    """An image one pixel high, from the bytes of its pixels."""
    raw = bytes(values)
    return Image.frombytes(mode, (len(raw) // len(Image.new(mode, (1, 1)).getbands()), 1), raw)


def palette(*indices):
    image = row("P", *indices)
    image.putpalette([*RED, *GREEN, *BLUE])
    return image


def grey16(byte_order):
    """The 8-bit k is k x 257 in 16 bits: both end at their largest number."""
    return Image.fromarray(np.array([[0, 300, 600, 33000, 65278, 65535]], byte_order + "u2"))


GREY16 = [(k, k, k) for k in (0, 1, 2, 128, 254, 255)]
HALF_CLEAR = {"transparency": b"\xff\x80\x00"}
LA = row("LA", 200, 255, 200, 128, 200, 0)
RGBA = row("RGBA", 200, 100, 50, 255, 200, 100, 50, 128, 9, 9, 9, 0)
CMYK = row("CMYK", 255, 0, 0, 0, 0, 255, 255, 0, 0, 0, 0, 255, 0, 0, 0, 0)
# name: (image, format, options of save, pixels by hand)
MODES = {
    "RGB": (row("RGB", 9, 8, 7, *RED), "PNG", {}, [(9, 8, 7), RED]),
    "palette, half": (palette(0, 1, 2), "PNG", HALF_CLEAR, [RED, (0, 128, 0), BLACK]),
    "LA": (LA, "PNG", {}, [(200, 200, 200), (100, 100, 100), BLACK]),
    "RGBA": (RGBA, "PNG", {}, [(200, 100, 50), (100, 50, 25), BLACK]),
    "CMYK": (CMYK, "TIFF", {}, [CYAN, RED, BLACK, WHITE]),
    "16 bit png": (grey16("<"), "PNG", {}, GREY16),
    "16 bit tiff, big endian": (grey16(">"), "TIFF", {}, GREY16),
}


@pytest.mark.parametrize("name", MODES)
def test_decode_every_mode(name):
    image, kind, options, pixels = MODES[name]
    rgb = decoded(saved(kind, image, **options))
    assert rgb.mode == "RGB" and np.asarray(rgb).tolist() == [[list(pixel) for pixel in pixels]]


# The tag says where the stored row 0 and column 0 are seen: 6 is (right, top), and so on.
UPRIGHT = {
    6: lambda a: np.rot90(a, -1),  # clockwise
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_decode_turns_an_image_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG"):
        stored = np.asarray(Image.open(io.BytesIO(saved(kind, noise_image(0, 24, 16)))))
        image, size = data.open_image(saved(kind, noise_image(0, 24, 16), exif=exif))
        expected = UPRIGHT[orientation](stored)
        np.testing.assert_array_equal(np.asarray(data.decode(image)), expected)
        assert size == expected.shape[1::-1]


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("TIFF", {})]
)
def test_a_file_that_is_cut_off_is_unreadable(kind, options):
    whole = saved(kind, noise_image(0, 331, 415), **options)
    for cut in (len(whole) // 2, len(whole) - 2000, len(whole) - 200):
        for rest in [b"", bytes(len(whole) - cut)][: 1 + (kind == "JPEG")]:
            # zeros: Pillow alone gives grey for the rest
            with pytest.raises((ValueError, OSError, SyntaxError)):
                decoded(whole[:cut] + rest)
    padded = decoded(whole + bytes(4096))  # to whole blocks of a disk
    assert padded.tobytes() == Image.open(io.BytesIO(whole)).tobytes()


# --- which rank reads which image when


def test_positions_by_hand():
    """Two steps of 12, rank 1 of 3 in runs of 2: 12 13 | 14 15 | 16 17, then 18 19 | 20 21 | ..."""
    order = data.ImageOrder(100, 12, seed=0)
    sampler = data.RankBatchSampler(order, 12, 2, 1, 3, range(1, 3))
    batches = list(sampler)
    expected = [[14, 15], [20, 21], [26, 27], [32, 33]]
    assert [[position for position, _ in batch] for batch in batches] == expected
    assert len(sampler) == 4
    assert all(index == order.image_at(position) for batch in batches for position, index in batch)
    with pytest.raises(ValueError, match="cannot reshape"):
        data.deal(0, 48, 4, 5)
    assert [data.steps_per_epoch(192, g) for g in (1, 40, 48, 97, 192)] == [192, 4, 4, 1, 1]
    with pytest.raises(ValueError, match=r"^global batch 193 is larger than the data set of 192"):
        stream(tiles(), global_batch=193, steps=range(1))


class Row(NamedTuple):
    """All there is to know of one sample that was read."""

    position: int
    step: int
    path: str
    order: tuple[int, ...]  # of masking
    pixels: int  # their CRC


@lru_cache
def tiles():
    return data.scan(str(TRAIN))


def dataset_of(files, img_size, patches, seed, global_batch, **options):
    order = data.ImageOrder(len(files), global_batch, seed)
    return data.Images(files, order, img_size, patches, **options)


class Sample(NamedTuple):
    image: torch.Tensor
    noise: torch.Tensor
    stats: data.LoadStats
    image_id: int
    bad: list


def sample_at(dataset, position):
    return Sample(*dataset[position, dataset.order.image_at(position)])


def stream(
    files, *, ranks=1, accum=1, global_batch=48, steps=range(6), seed=0, img_size=32, **options
):
    """All rows that all ranks read, sorted by position."""
    rows = []
    for rank in range(ranks):
        loader = data.build_loader(
            files,
            img_size=img_size,
            patches=16,
            seed=seed,
            global_batch=global_batch,
            local_batch=global_batch // (ranks * accum),
            steps=steps,
            rank=rank,
            world_size=ranks,
            **options,
        )
        places = list(loader.batch_sampler)
        batches = list(loader)
        assert len(places) == len(batches) == len(loader) == len(steps) * accum
        for i, (place, batch) in enumerate(zip(places, batches, strict=True)):
            samples = zip(place, batch.image, batch.noise, batch.image_ids, strict=True)
            for (position, _), image, noise, image_id in samples:
                order, pixels = tuple(noise.argsort().tolist()), zlib.crc32(image.numpy())
                path = files.path(image_id)
                rows.append(Row(position, steps[i // accum], path, order, pixels))
    return sorted(rows)


@lru_cache
def one_rank(global_batch, steps):
    return stream(tiles(), global_batch=global_batch, steps=range(steps))


LAYOUTS = [(3, 0, 2, 48), (4, 0, 1, 12), (2, 2, 2, 12)]


@pytest.mark.parametrize(("ranks", "workers", "accum", "global_batch"), LAYOUTS)
def test_ranks_and_workers_change_nothing(ranks, workers, accum, global_batch):
    steps = 240 // global_batch  # one epoch and a quarter
    options = {"ranks": ranks, "workers": workers, "accum": accum, "global_batch": global_batch}
    rows = stream(tiles(), steps=range(steps), **options)
    assert [r.position for r in rows] == list(range(240))
    assert all(r.step == r.position // global_batch for r in rows)
    assert rows == one_rank(global_batch, steps)


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


@pytest.mark.parametrize("first", [1, 4])  # within an epoch, at its end
def test_resuming_gives_the_rest_of_the_stream(first):
    rest = stream(tiles(), ranks=2, steps=range(first, 5))
    assert rest == [r for r in one_rank(48, 5) if r.step >= first]


def test_a_batch_is_what_the_docstring_says():
    """And torch's own generator is neither used nor changed."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = data.build_loader(
        tiles(), img_size=48, patches=9, seed=0, global_batch=12, local_batch=6, steps=range(1)
    )
    batch, _ = loader
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, _ = loader
    assert torch.equal(batch.image, again.image) and torch.equal(batch.noise, again.noise)
    assert (batch.image.shape, batch.image.dtype) == ((6, 3, 48, 48), torch.uint8)
    assert (batch.noise.shape, batch.noise.dtype) == ((6, 9), torch.float32)
    assert batch.image_ids == [data.ImageOrder(192, 12, 0).image_at(p) for p in range(6)]
    assert batch.stats.bytes == sum(os.path.getsize(tiles().path(i)) for i in batch.image_ids)
    assert min(batch.stats) > 0 and batch.bad == []


# --- augmentation


def by_torchvision(image, seed, position, size, reduce=1):
    """The pixels that this image, upright, must have at a position.

    The crop of an image that is decoded at 1/reduce has its edges at multiples of `reduce`.
    """
    _, flip, (top, left, height, width) = data.draw_augmentation(seed, position, 16, *image.size)
    bottom, right = top + height, left + width
    top, left, bottom, right = (reduce * round(n / reduce) for n in (top, left, bottom, right))
    bottom, right = min(bottom, image.height), min(right, image.width)
    crop, bicubic = [top, left, bottom - top, right - left], v2.InterpolationMode.BICUBIC
    pixels = v2.pil_to_tensor(image.convert("RGB"))
    pixels = v2.resized_crop(pixels, *crop, [size, size], bicubic)
    return (v2.horizontal_flip(pixels) if flip else pixels).contiguous()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(300, 200), (50, 170)])
def test_augmentation_equals_torchvision(tmp_path, shape, exact):
    files = flat_folder(tmp_path, 6, width=shape[0], height=shape[1])
    side = 48 if exact else 224  # at which none of these is decoded smaller than it is
    dataset = dataset_of(files, side, 16, seed=3, global_batch=6, exact=exact)
    for position in range(24):
        sample = sample_at(dataset, position)
        with Image.open(files.path(sample.image_id)) as image:
            assert torch.equal(sample.image, by_torchvision(image, 3, position, side))


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


def photograph(width, height):
    """Smooth, as satellite images are to a camera: noise would be all that scales differ in."""
    coarse = np.random.default_rng(1).integers(0, 256, (height // 40, width // 40, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_reduced_decode_shows_the_same_crop(tmp_path, orientation):
    """Against the whole image, upright, cut and resized by PIL: 40 dB, and no shift."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    photograph(1201, 803).save(tmp_path / "x.jpg", exif=exif, quality=95)
    with Image.open(tmp_path / "x.jpg") as stored:
        upright = ImageOps.exif_transpose(stored).convert("RGB")
    dataset = dataset_of(data.scan(str(tmp_path)), 64, 16, seed=0, global_batch=1)
    scales = Counter()
    for position in range(12):
        _, _, crop = data.draw_augmentation(0, position, 16, *upright.size)
        fits = min(crop[2:]) // 64  # the shorter side of the crop still has the target's pixels
        reduce = max(s for s in (1, 2, 4, 8) if s <= fits) if orientation == 1 else 1
        scales[reduce] += 1
        image = sample_at(dataset, position).image.numpy().astype(float)
        expected = by_torchvision(upright, 0, position, 64, reduce)
        error = image - expected.numpy()
        assert np.square(error).mean() < 255**2 / 10**4
        assert np.abs(error).mean() < 1
    assert set(scales) == ({4, 8} if orientation == 1 else {1})


# --- broken images


def break_file(path, how):
    content = {
        "empty": b"",
        "cut": Path(path).read_bytes()[:-500],
        "html": b"<!DOCTYPE html><html>404",
        "float": saved("TIFF", Image.new("F", (40, 40))),
    }
    Path(path).write_bytes(content[how])


def test_the_next_good_image_stands_in_for_a_broken_one(tmp_path):
    files = flat_folder(tmp_path, 24)
    healthy = stream(files, global_batch=6, steps=range(9))  # two epochs and a step
    kinds = ((3, "cut"), (4, "empty"), (10, "float"), (23, "html"))
    broken = {healthy[position].path: how for position, how in kinds}
    for path, how in broken.items():
        break_file(path, how)
    rows = stream(files, global_batch=6, steps=range(8))

    good = [next(h for h in healthy[p:] if h.path not in broken).path for p in range(48)]
    assert [r.path for r in rows] == good  # position 23 takes from the next epoch
    for r, h in zip(rows, healthy, strict=False):
        with Image.open(r.path) as image:
            pixels = by_torchvision(image, 0, r.position, 32)  # its own crop and flip
        assert (r.order, r.pixels) == (h.order, zlib.crc32(pixels.numpy()))
    assert stream(files, ranks=2, workers=1, global_batch=6, steps=range(8)) == rows

    # and each sample names the images that it replaces
    dataset = dataset_of(files, 32, 16, 0, 6)
    reports = [sample_at(dataset, p).bad for p in range(24)]
    assert [len(reports[p]) for p in (2, 3, 4, 5, 10)] == [0, 2, 1, 0, 1]
    assert reports[4][0][1].startswith("ValueError: not an image: it begins with")
    assert "truncated" in reports[3][0][1] and "32-bit image" in reports[10][0][1]


def test_too_many_broken_images_in_a_row_stop_the_run(tmp_path):
    dataset = dataset_of(flat_folder(tmp_path, data.SUBSTITUTES + 4), 8, 4, 0, 1)
    at = [dataset.order.image_at(p) for p in range(data.SUBSTITUTES + 2)]
    for index in at[1 : data.SUBSTITUTES]:  # one less than the limit
        break_file(dataset.files.path(index), "empty")
    sample = sample_at(dataset, 1)
    assert sample.image_id == at[data.SUBSTITUTES] and len(sample.bad) == data.SUBSTITUTES - 1
    break_file(dataset.files.path(at[data.SUBSTITUTES]), "html")
    sentence = f"{data.SUBSTITUTES} images in a row could not be read, the last: "
    with pytest.raises(RuntimeError, match=rf"^{sentence}\({at[data.SUBSTITUTES]}, "):
        sample_at(dataset, 1)


def test_trouble_of_the_node_is_no_broken_file():
    """Another rank may not have it: a substitute would make the streams differ."""

    class Failing(SyntheticImages):
        def read(self, index):
            if index == order.image_at(0):
                raise self.error
            return super().read(index)

    images = Failing(0)
    order = data.ImageOrder(len(images), 1, 0)
    dataset = data.Images(images, order, 8, 4)
    for images.error in (FileNotFoundError(errno.ENOENT, ""), PermissionError(errno.EACCES, "")):
        assert sample_at(dataset, 0).image_id == order.image_at(1)
    for images.error in (OSError(errno.EIO, "Input/output error"), MemoryError()):
        with pytest.raises(type(images.error)):
            sample_at(dataset, 0)


# --- workers


def inside_worker(samples):
    batch, known = data.collate(samples), hasattr(data, "set_by_the_test")
    return batch.image.is_shared() and batch.noise.is_shared(), dist.is_initialized(), known


def test_workers_inherit_nothing_and_share_their_batches(monkeypatch):
    """No network and no variable; a batch that is not shared would be copied to this process."""
    monkeypatch.setattr(data, "set_by_the_test", True, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sizes = {"img_size": 32, "patches": 16, "global_batch": 12, "local_batch": 12}
    try:
        loader = data.build_loader(tiles(), seed=0, steps=range(2), workers=2, **sizes)
        loader.collate_fn = inside_worker
        assert list(loader) == [(True, False, False)] * 2
    finally:
        dist.destroy_process_group()
