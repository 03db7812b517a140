"""data.py against PIL, torchvision and numpy, and against its promise: the stream of samples is the
same for any number of ranks and workers."""

import errno
import io
import math
import os
import re
import sys
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


def flat_folder(folder, count, suffix=".jpg", **size):
    """`count` images that all differ; their index is their number."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        noise_image(i, **size).save(folder / f"{i:03}{suffix}")
    return data.scan(str(folder))


# --- which files there are


def tree(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    files = data.scan(str(root))
    listed = [os.path.relpath(files.path(i), root) for i in range(len(files))]
    labels = [files.classes[n] if n >= 0 else None for n in files.labels]
    assert sorted(listed) == listed
    return dict(zip(listed, labels, strict=True)), files.classes


TREES = {
    "class folders": {"lake/1.jpg": "lake", "lake/2.jpg": "lake", "dam/1.jpg": "dam"},
    "two levels": {"water/lake/1.jpg": "lake", "arable/paddy/1.jpg": "paddy"},
    "three levels": {
        "land/arable/paddy/1.jpg": "paddy",
        "land/arable/field/1.jpg": "field",
        "area/water/lake/1.jpg": "lake",
        "area/water/lake/2.jpg": "lake",
    },
    "flat": {"1.jpg": None, "2.jpg": None},
    "mixture": {"1.jpg": None, "z/2.jpg": "z", "a/b/c/3.jpg": "c", "a/4.jpg": "a"},
    "one name twice": {"x/lake/1.jpg": "lake", "y/lake/1.jpg": "lake", "y/dam/1.jpg": "dam"},
    "names": {"sea ice/a b.jpg": "sea ice", "Å/größe 雪.jpg": "Å", "a,'b/1.jpg": "a,'b"},
    "extensions": {f"c/1.{e}": "c" for e in ("JPG", "jpeg", "png", "Tif", "tiff", "bmp", "webp")},
}


@pytest.mark.parametrize("name", TREES)
def test_scan_names_the_class_by_the_leaf_folder(tmp_path, name):
    found, classes = tree(tmp_path, *TREES[name])
    assert found == TREES[name]
    assert classes == tuple(sorted({leaf for leaf in TREES[name].values() if leaf}))


def test_scan_leaves_out_what_is_hidden_or_no_image(tmp_path):
    others = ["c/.hidden.jpg", ".cache/1.jpg", "c/.x/1.jpg", "._c/1.jpg", "c/a.txt", "c/jpg"]
    others += ["notes/README.md", "c/a.jpg.part"]
    assert tree(tmp_path, "c/1.jpg", *others) == ({"c/1.jpg": "c"}, ("c",))


def test_scan_follows_links(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/1.jpg").touch()
    (tmp_path / "root").mkdir()
    (tmp_path / "root/lake").symlink_to("../elsewhere")
    assert tree(tmp_path / "root")[0] == {"lake/1.jpg": "lake"}


def test_scan_lists_nothing_twice_where_a_link_points_upwards(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c/up").symlink_to("..")
    assert tree(tmp_path, "c/1.jpg")[0] == {"c/1.jpg": "c"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_scan_finds_names_that_are_not_utf8(tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.jpg", "w"):
        pass
    files = data.scan(str(tmp_path))
    assert len(files) == 1
    assert os.path.exists(files.path(0))


def test_scan_refuses_what_holds_no_image(tmp_path):
    (tmp_path / "empty/c").mkdir(parents=True)
    (tmp_path / "empty/c/notes.txt").touch()
    for name in ("missing", "empty/c/notes.txt"):
        path = tmp_path / name
        sentence = f"there is no folder {path}: give --data the folder of your images"
        with pytest.raises(FileNotFoundError, match=f"^{re.escape(sentence)}$"):
            data.scan(str(path))
    sentence = f"no images found in {tmp_path}/empty: looked for .jpg .jpeg .png"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        data.scan(f"{tmp_path}/empty")


# --- decode


def read_rgb(path):
    return data.decode(data.open_image(Path(path).read_bytes())[0])


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
# name: (image, suffix, options of save, mode as the file is opened, pixels by hand)
MODES = {
    "RGB": (row("RGB", 9, 8, 7, *RED), ".png", {}, "RGB", [(9, 8, 7), RED]),
    "grey": (row("L", 0, 7, 255), ".png", {}, "L", [BLACK, (7, 7, 7), WHITE]),
    "1 bit": (Image.frombytes("1", (4, 1), b"\xb0"), ".png", {}, "1", [WHITE, BLACK, WHITE, WHITE]),
    "palette": (palette(2, 1, 0), ".png", {}, "P", [BLUE, GREEN, RED]),
    "palette, one transparent": (
        palette(2, 1, 0),
        ".png",
        {"transparency": 1},
        "P",
        [BLUE, BLACK, RED],
    ),
    "palette, half transparent": (
        palette(0, 1, 2),
        ".png",
        {"transparency": b"\xff\x80\x00"},
        "P",
        [RED, (0, 128, 0), BLACK],
    ),
    "grey, one transparent": (row("L", 9, 7), ".png", {"transparency": 7}, "L", [(9, 9, 9), BLACK]),
    "RGB, one transparent": (
        row("RGB", *RED, *CYAN),
        ".png",
        {"transparency": CYAN},
        "RGB",
        [RED, BLACK],
    ),
    "LA": (
        row("LA", 200, 255, 200, 128, 200, 0),
        ".png",
        {},
        "LA",
        [(200, 200, 200), (100, 100, 100), BLACK],
    ),
    "RGBA": (
        row("RGBA", 200, 100, 50, 255, 200, 100, 50, 128, 9, 9, 9, 0),
        ".png",
        {},
        "RGBA",
        [(200, 100, 50), (100, 50, 25), BLACK],
    ),
    "RGBA webp": (
        row("RGBA", *RED, 255, *RED, 0),
        ".webp",
        {"lossless": True, "exact": True},
        "RGBA",
        [RED, BLACK],
    ),
    "CMYK": (
        row("CMYK", 255, 0, 0, 0, 0, 255, 255, 0, 0, 0, 0, 255, 0, 0, 0, 0),
        ".tif",
        {},
        "CMYK",
        [CYAN, RED, BLACK, WHITE],
    ),
    "16 bit png": (grey16("<"), ".png", {}, "I;16", GREY16),
    "16 bit tiff": (grey16("<"), ".tif", {}, "I;16", GREY16),
    "16 bit tiff, big endian": (grey16(">"), ".tif", {}, "I;16B", GREY16),
}


@pytest.mark.parametrize("name", MODES)
def test_decode_every_mode(tmp_path, name):
    image, suffix, options, mode, pixels = MODES[name]
    path = tmp_path / f"x{suffix}"
    image.save(path, **options)
    with Image.open(path) as opened:
        assert opened.mode == mode
    rgb = read_rgb(str(path))
    assert rgb.mode == "RGB"
    assert np.asarray(rgb).tolist() == [[list(pixel) for pixel in pixels]]


def test_decode_a_cmyk_jpeg(tmp_path):
    """Such files hold inverted inks, and JPEG is not exact."""
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "x.jpg", quality=95)
    rgb = np.asarray(read_rgb(str(tmp_path / "x.jpg"))).astype(int)
    assert np.abs(rgb - RED).max() <= 4


@pytest.mark.parametrize(
    "pixels",
    [
        np.array([[0.0, 0.5]], np.float32),
        np.array([[0, 65536]], np.int32),
        np.array([[0, 255]], np.int32),
    ],
)
def test_decode_refuses_pixels_of_unknown_range(tmp_path, pixels):
    Image.fromarray(pixels).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match=r"^32-bit image with an unknown range"):
        read_rgb(str(tmp_path / "x.tif"))


# The tag says where the stored row 0 and column 0 are seen: 6 is (right, top), and so on.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),  # clockwise
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_decode_turns_an_image_upright(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    noise_image(0, 24, 16).save(tmp_path / "plain.jpg", quality=95)
    noise_image(0, 24, 16).save(tmp_path / "x.jpg", quality=95, exif=exif)
    with Image.open(tmp_path / "plain.jpg") as image:
        stored = np.asarray(image)
    rgb = np.asarray(read_rgb(str(tmp_path / "x.jpg")))
    np.testing.assert_array_equal(rgb, UPRIGHT[orientation](stored))

    grey = np.arange(6, dtype=np.uint16).reshape(2, 3)
    Image.fromarray(grey * 257).save(tmp_path / "x.png", exif=exif)
    rgb = np.asarray(read_rgb(str(tmp_path / "x.png")))
    np.testing.assert_array_equal(rgb[..., 0], UPRIGHT[orientation](grey))


# --- who reads which one when


def test_positions_by_hand():
    """Two steps of 12, rank 1 of 3 in runs of 2: 12 13 | 14 15 | 16 17, then 18 19 | 20 21 | ..."""
    order = data.ImageOrder(100, 12, seed=0)
    batches = list(data.RankBatchSampler(order, 12, 2, 1, 3, range(1, 3)))
    assert [[position for position, _ in batch] for batch in batches] == [
        [14, 15],
        [20, 21],
        [26, 27],
        [32, 33],
    ]
    assert all(index == order.image_at(position) for batch in batches for position, index in batch)


def test_a_batch_that_does_not_divide_is_refused():
    sentence = "^a global batch of 48 is not a multiple of 5 ranks x 4 images$"
    with pytest.raises(ValueError, match=sentence):
        data.deal(0, 48, 4, 5)


def test_steps_per_epoch():
    assert [data.steps_per_epoch(192, g) for g in (1, 40, 48, 97, 192)] == [192, 4, 4, 1, 1]
    sentence = (
        "a global batch of 193 is larger than the data set of 192 images: "
        "use fewer ranks or a --batch that keeps the global batch at 192 or less"
    )
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        data.steps_per_epoch(192, 193)
    with pytest.raises(ValueError, match=f"^{sentence}$"):
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


def dataset_of(files, img_size, patches, seed, global_batch, exact=False, stats=data.IMAGENET):
    order = data.ImageOrder(len(files), global_batch, seed)
    return data.Images(files, order, img_size, patches, exact, stats)


def sample_at(dataset, position):
    return dataset[position, dataset.order.image_at(position)]


def stream(
    files,
    *,
    ranks=1,
    workers=0,
    accum=1,
    global_batch=48,
    steps=range(6),
    seed=0,
    img_size=32,
    **options,
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
            workers=workers,
            **options,
        )
        places = list(loader.batch_sampler)
        batches = list(loader)
        assert len(places) == len(batches) == len(steps) * accum
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


LAYOUTS = [
    (1, 0, 2, 48),
    (2, 0, 1, 48),
    (3, 0, 2, 48),
    (4, 0, 1, 12),
    (2, 0, 2, 12),
    (1, 1, 1, 48),
    (2, 3, 1, 12),
    *(
        pytest.param(*layout, marks=pytest.mark.full)
        for layout in (
            (2, 0, 2, 48),
            (3, 0, 1, 48),
            (4, 0, 2, 48),
            (2, 0, 1, 12),
            (3, 0, 2, 12),
            (2, 1, 2, 48),
            (3, 1, 1, 12),
            (4, 1, 1, 48),
            (1, 3, 1, 48),
            (3, 3, 2, 48),
        )
    ),
]


@pytest.mark.parametrize(("ranks", "workers", "accum", "global_batch"), LAYOUTS)
def test_ranks_and_workers_change_nothing(ranks, workers, accum, global_batch):
    steps = 240 // global_batch  # one epoch and a quarter
    rows = stream(
        tiles(),
        ranks=ranks,
        workers=workers,
        accum=accum,
        global_batch=global_batch,
        steps=range(steps),
    )
    assert [r.position for r in rows] == list(range(240))
    assert all(r.step == r.position // global_batch for r in rows)
    assert rows == one_rank(global_batch, steps)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_image_is_read_once_in_an_epoch(ranks):
    rows = stream(tiles(), ranks=ranks, steps=range(8))
    paths = sorted(str(p) for p in TRAIN.rglob("*.jpg"))
    for epoch in (rows[:192], rows[192:]):  # of all ranks: one read twice would be here twice
        assert sorted(r.path for r in epoch) == paths


def test_an_epoch_ends_with_its_last_whole_batch():
    whole = stream(tiles(), steps=range(8))
    rows = stream(tiles(), ranks=2, global_batch=40, steps=range(8))
    for epoch in (0, 1):
        order = [r.path for r in whole[192 * epoch : 192 * (epoch + 1)]]
        assert [r.path for r in rows[160 * epoch : 160 * (epoch + 1)]] == order[:160]


def image_order(seed, global_batch, epoch, count=192):
    order = data.ImageOrder(count, global_batch, seed)
    length = count // global_batch * global_batch
    return [order.image_at(p) for p in range(epoch * length, (epoch + 1) * length)]


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = {(s, e): image_order(s, 48, e) for s in (0, 1) for e in (0, 1, 2)}
    assert all(sorted(order) == list(range(192)) for order in orders.values())
    for a, b in [((0, 0), (0, 1)), ((0, 1), (0, 2)), ((0, 0), (1, 0)), ((0, 1), (1, 0))]:
        same = sum(x == y for x, y in zip(orders[a], orders[b], strict=True))
        assert same < 10  # one is expected of two random permutations
    for global_batch in (1, 40, 64):
        other = image_order(0, global_batch, 2)
        assert other == orders[0, 2][: len(other)]


def test_positions_may_be_asked_in_any_order():
    """Workers take turns, and one may be an epoch ahead."""
    order, again = (data.ImageOrder(192, 48, seed=0) for _ in range(2))
    forwards = [order.image_at(p) for p in range(0, 600, 50)]
    assert [again.image_at(p) for p in range(550, -50, -50)] == forwards[::-1]


@pytest.mark.parametrize("first", [1, 3, 4, 5])
def test_resuming_gives_the_rest_of_the_stream(first):
    rest = stream(tiles(), ranks=2, steps=range(first, 6))
    assert rest == [r for r in one_rank(48, 6) if r.step >= first]


def test_a_batch_is_what_the_docstring_says():
    loader = data.build_loader(
        tiles(), img_size=48, patches=9, seed=0, global_batch=12, local_batch=6, steps=range(1)
    )
    batch = next(iter(loader))
    assert (batch.image.shape, batch.image.dtype) == ((6, 3, 48, 48), torch.uint8)
    assert (batch.noise.shape, batch.noise.dtype) == ((6, 9), torch.float32)
    assert batch.image_ids == [data.ImageOrder(192, 12, 0).image_at(p) for p in range(6)]
    assert batch.stats.bytes == sum(os.path.getsize(tiles().path(i)) for i in batch.image_ids)
    assert min(batch.stats) > 0 and batch.bad == []


# --- one image


def by_torchvision(image, seed, position, size, reduce=1):
    """The pixels that this image, upright, must have at a position, and those by Pillow.

    The crop of an image that is decoded at 1/reduce has its edges at multiples of `reduce`.
    """
    _, flip, (top, left, height, width) = data.draw_augmentation(seed, position, 16, *image.size)
    bottom, right = top + height, left + width
    top, left, bottom, right = (reduce * round(n / reduce) for n in (top, left, bottom, right))
    bottom, right = min(bottom, image.height), min(right, image.width)
    crop, bicubic = [top, left, bottom - top, right - left], v2.InterpolationMode.BICUBIC
    both = [
        v2.resized_crop(v2.pil_to_tensor(image.convert("RGB")), *crop, [size, size], bicubic),
        v2.pil_to_tensor(v2.resized_crop(image.convert("RGB"), *crop, [size, size], bicubic)),
    ]
    return [(v2.horizontal_flip(x) if flip else x).contiguous() for x in both]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [None, (300, 200), (50, 170)])
def test_augmentation_equals_torchvision(tmp_path, shape, exact):
    files = flat_folder(tmp_path, 6, width=shape[0], height=shape[1]) if shape else tiles()
    side = 48 if exact else 224  # at which none of these is decoded smaller than it is
    dataset = dataset_of(files, side, 16, seed=3, global_batch=6, exact=exact)
    for position in range(24):
        sample = sample_at(dataset, position)
        with Image.open(files.path(sample.image_id)) as image:
            expected, by_pil = by_torchvision(image, 3, position, side)
            noise, _, _ = data.draw_augmentation(3, position, 16, *image.size)
        assert torch.equal(sample.image, expected)
        assert (sample.image.float() - by_pil.float()).abs().mean() < 0.5
        assert torch.equal(sample.noise, noise)


@pytest.mark.parametrize("size", [(300, 200), (1, 1), (7, 1000), (900, 2), (256, 256)])
def test_draws_are_those_of_torchvision(size):
    """From the same generator: noise, flip, then RandomResizedCrop's own."""
    for position in range(100):
        word = int(np.random.SeedSequence((9, position)).generate_state(1)[0])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(word)
            noise, flip = torch.randperm(16).float(), bool(torch.rand(()) < 0.5)
            blank = torch.empty(1, size[1], size[0])
            crop = RandomResizedCrop.get_params(blank, [0.2, 1.0], [3 / 4, 4 / 3])
        found = data.draw_augmentation(9, position, 16, *size)
        assert torch.equal(found[0], noise) and found[1:] == (flip, tuple(crop))


FORMATS = {".jpg": "JPEG", ".tif": "TIFF", ".png": "PNG"}
# Files of which a part may be decoded alone: the suffix, the options of save, a change of mode.
PARTS = {
    "JPEG": (".jpg", {}, "RGB"),
    "all colours": (".jpg", {"subsampling": "4:4:4"}, "RGB"),
    "half of the colours": (".jpg", {"subsampling": "4:2:2"}, "RGB"),
    "progressive": (".jpg", {"progressive": True}, "RGB"),
    "restarts": (".jpg", {"restart_marker_blocks": 5}, "RGB"),
    "grey": (".jpg", {}, "L"),
    "CMYK": (".jpg", {}, "CMYK"),
    "comment": (".jpg", {"comment": b"\xff\xc0\x00\x11\x08\x00\x10\x00\x10"}, "RGB"),
    "TIFF": (".tif", {}, "RGB"),
    "deflated TIFF": (".tif", {"compression": "tiff_deflate"}, "RGB"),
    "PNG": (".png", {}, "RGB"),
}


@pytest.mark.parametrize("kind", PARTS)
def test_rows_that_are_not_needed_change_nothing(tmp_path, kind):
    """Whole and at 1/2, 1/4, 1/8: the pixels of the crop are those of a whole decode."""
    suffix, options, mode = PARTS[kind]
    file = io.BytesIO()
    noise_image(0, 331, 415).convert(mode).save(file, FORMATS[suffix], **options)
    for reduce in (1, 2, 4, 8) if suffix == ".jpg" else (1,):
        whole = np.asarray(data.decode(data.open_image(file.getvalue())[0], reduce))
        for top, bottom in ((0, 1), (3, 96), (100, 208), (17, 399), (330, 415)):
            image, _ = data.open_image(file.getvalue())
            data.skip_rows(image, top, bottom)
            rows = slice(top // reduce, -(-bottom // reduce))
            part = np.asarray(data.decode(image, reduce))
            np.testing.assert_array_equal(part[rows], whole[rows])
            if top == 0 and kind not in ("deflated TIFF", "TIFF"):  # it was not decoded whole
                assert (part[-1] == part[-1, 0]).all()


@pytest.mark.parametrize("kind", PARTS)
def test_a_file_that_is_cut_off_is_unreadable_wherever_its_crop_lies(tmp_path, kind):
    suffix, options, mode = PARTS[kind]
    file = io.BytesIO()
    noise_image(0, 331, 415).convert(mode).save(file, FORMATS[suffix], **options)
    whole = file.getvalue()
    for cut in (len(whole) * 3 // 4, len(whole) - 2000, len(whole) - 200):
        with pytest.raises((ValueError, OSError, SyntaxError)):
            image, _ = data.open_image(whole[:cut])
            data.skip_rows(image, 0, 50)
            data.decode(image)


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_that_ends_in_zeros_is_not_half_read(progressive):
    """What a copy that was cut off leaves: Pillow alone gives grey for the rest of a large one."""
    file = io.BytesIO()
    noise_image(0, 400, 400).save(file, "JPEG", progressive=progressive)
    whole = file.getvalue()
    for cut in (len(whole) // 4, len(whole) // 2, len(whole) - 10, len(whole) - 1):
        with pytest.raises((ValueError, OSError), match="truncated"):
            data.decode(data.open_image(whole[:cut] + bytes(len(whole) - cut))[0])
    padded = data.decode(data.open_image(whole + bytes(4096))[0])  # to whole blocks of a disk
    assert padded.tobytes() == Image.open(file).tobytes()


def photograph(width, height):
    """Smooth, as satellite images are to a camera: noise would be all that scales differ in."""
    coarse = np.random.default_rng(1).integers(0, 256, (height // 40, width // 40, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
@pytest.mark.parametrize("name", ["x.jpg", "x.png"])
def test_a_reduced_decode_shows_the_same_crop(tmp_path, name, orientation):
    """Against the whole image, upright, cut and resized by PIL: 40 dB, and no shift."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    photograph(1201, 803).save(tmp_path / name, exif=exif, quality=95)
    with Image.open(tmp_path / name) as stored:
        upright = ImageOps.exif_transpose(stored).convert("RGB")
    dataset = dataset_of(data.scan(str(tmp_path)), 64, 16, seed=0, global_batch=1)
    scales = Counter()
    for position in range(12):
        _, _, crop = data.draw_augmentation(0, position, 16, *upright.size)
        with Image.open(tmp_path / name) as stored:
            reduce = data.reduction(stored, crop, 64)
        scales[reduce] += 1
        image = sample_at(dataset, position).image.numpy().astype(float)
        expected, _ = by_torchvision(upright, 0, position, 64, reduce)
        error = image - expected.numpy()
        assert np.square(error).mean() < 255**2 / 10**4
        assert np.abs(error).mean() < 1
    assert set(scales) == ({4, 8} if (name, orientation) == ("x.jpg", 1) else {1})


def test_reduction_by_hand(tmp_path):
    """The largest scale at which the shorter side of the crop still has the target's pixels."""
    Image.new("RGB", (8, 8)).save(tmp_path / "x.jpg")
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    table = {
        (223, 999): 1,
        (224, 224): 1,
        (447, 900): 1,
        (448, 900): 2,
        (896, 896): 4,
        (3000, 1791): 4,
        (1792, 1792): 8,
        (9000, 9000): 8,
    }
    with Image.open(tmp_path / "x.jpg") as jpeg, Image.open(tmp_path / "x.png") as png:
        for (height, width), scale in table.items():
            assert data.reduction(jpeg, [5, 5, height, width], 224) == scale
            assert data.reduction(png, [5, 5, height, width], 224) == 1


def test_an_image_has_a_budget_of_memory_and_not_of_pixels(tmp_path, monkeypatch):
    """4 bytes a pixel as decoded; a progressive JPEG keeps all of its coefficients besides."""
    image = photograph(1600, 1600)
    image.save(tmp_path / "plain.jpg")
    image.save(tmp_path / "progressive.jpg", progressive=True)
    image.save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # not Pillow's to judge

    def read(name, reduce, budget):
        opened, size = data.open_image((tmp_path / name).read_bytes(), budget)
        assert size == (1600, 1600)
        return data.decode(opened, reduce, budget).size

    whole, eighth = 4 * 1600**2, 4 * 200**2
    assert read("plain.jpg", 1, whole) == read("x.png", 1, whole) == (1600, 1600)
    assert read("plain.jpg", 8, eighth) == (200, 200)
    assert read("progressive.jpg", 8, 6 * 1600**2 + eighth) == (200, 200)
    sentence = r"^1600 x 1600 pixels take .* GiB to decode, more than .*: make it smaller by"
    for name, reduce, budget in (
        ("plain.jpg", 1, whole),
        ("plain.jpg", 8, eighth),
        ("x.png", 8, whole),
        ("progressive.jpg", 8, 6 * 1600**2),
    ):
        with pytest.raises(ValueError, match=sentence):
            read(name, reduce, budget - 1)
    assert Image.MAX_IMAGE_PIXELS == 1000  # as it was


@pytest.fixture(scope="module")
def draws():
    """1500 of an image of 400 x 300."""
    return [data.draw_augmentation(0, position, 4, 400, 300) for position in range(1500)]


def test_crops_have_the_area_and_aspect_of_the_recipe(draws):
    areas, aspects = [], []
    for top, left, h, w in (crop for _, _, crop in draws):
        assert top >= 0 <= left
        assert (top + h <= 300) and (left + w <= 400)
        assert (h + 0.5) * (w + 0.5) >= 0.2 * 400 * 300  # up to rounding of h and w
        assert (h - 0.5) * (w - 0.5) <= 400 * 300
        assert (w + 0.5) / (h - 0.5) >= 3 / 4
        assert (w - 0.5) / (h + 0.5) <= 4 / 3
        areas.append(h * w / 400 / 300)
        aspects.append(math.log(w / h))
    assert min(areas) < 0.21  # the whole range is used, not a part of it
    assert max(areas) > 0.95
    assert min(aspects) < math.log(0.76)
    assert max(aspects) > math.log(1.32)


def test_flips_and_masks_are_fair(draws):
    assert 0.45 < sum(flip for _, flip, _ in draws) / 1500 < 0.55  # 4 deviations
    orders = Counter(tuple(noise.tolist()) for noise, _, _ in draws)
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(orders) == 24  # each of 4! about 62 times
    assert max(orders.values()) < 100
    first = [noise[0].item() for noise, _, _ in draws]
    assert abs(np.corrcoef(first, [flip for _, flip, _ in draws])[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("width", "height", "crop"), [(400, 40, (0, 173, 40, 53)), (40, 400, (173, 0, 53, 40))]
)
def test_a_strip_is_cut_in_the_middle(width, height, crop):
    """No crop of a fifth of its area fits the aspects: 40 x 53, 4 / 3, is taken instead."""
    assert all(data.draw_augmentation(0, p, 4, width, height)[2] == crop for p in range(20))


def test_an_image_looks_different_in_each_epoch_and_for_each_seed():
    """And so does its mask: draws go by position, not by image."""
    first, other = stream(tiles(), steps=range(8)), stream(tiles(), steps=range(4), seed=1)
    epochs = [{r.path: r for r in rows} for rows in (first[:192], first[192:], other)]
    for path, r in epochs[0].items():
        for later in (epochs[1][path], epochs[2][path]):
            assert r.pixels != later.pixels
            assert r.order != later.order


def test_reading_leaves_torchs_generator_alone():
    dataset = dataset_of(tiles(), 32, 16, 0, 48)
    samples = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        samples.append(sample_at(dataset, 5))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(samples[0].noise, samples[1].noise)  # nor does it depend on it
    assert torch.equal(samples[0].image, samples[1].image)


def test_the_loader_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    stream(tiles(), steps=range(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_normalize_equals_numpy():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 4), dtype=np.uint8)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = ((pixels.transpose(0, 2, 3, 1) / 255 - mean) / std).transpose(0, 3, 1, 2)
    images = torch.from_numpy(pixels.copy())
    x = data.normalize(images)
    assert x.dtype == torch.float32
    np.testing.assert_allclose(x.numpy(), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(images.numpy(), pixels)


# --- synthetic images


def test_synthetic_images_are_a_function_of_seed_and_index():
    keys = [(s, i) for s in (0, 1) for i in (0, 1, 2)]
    pictures = {(s, i): np.asarray(SyntheticImages(s).read(i)) for s, i in keys}
    for key, picture in pictures.items():
        assert picture.shape == (256, 256, 3)
        assert picture.std() > 30  # there is something to see,
        assert np.abs(np.diff(picture.astype(int), axis=0)).mean() < 5  # and it is smooth
        for other, its in pictures.items():
            assert (key == other) == np.array_equal(picture, its)
        coarse = np.random.default_rng(key).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        whole = Image.fromarray(coarse).resize((256, 256), Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(picture, whole)


def test_synthetic_stream_needs_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = SyntheticImages(5)
    dataset = dataset_of(images, 32, 16, seed=5, global_batch=8)
    for position in (3, 4):
        sample = sample_at(dataset, position)
        expected, _ = by_torchvision(images.read(sample.image_id), 5, position, 32)
        assert torch.equal(sample.image, expected)
    rows = stream(images, global_batch=8, steps=range(2))
    assert rows == stream(images, ranks=2, global_batch=8, steps=range(2))
    assert len({r.path for r in rows}) == 16


# --- broken images


def break_file(path, how):
    whole = Path(path).read_bytes()
    content = {"empty": b"", "cut": whole[: len(whole) // 2], "html": b"<!DOCTYPE html><html>404"}
    if how in content:
        Path(path).write_bytes(content[how])
    else:  # whole, but of a kind that is refused
        Image.new("F", (40, 40)).save(path, "TIFF")


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
            pixels, _ = by_torchvision(image, 0, r.position, 32)  # its own crop and flip
        assert (r.order, r.pixels) == (h.order, zlib.crc32(pixels.numpy()))
    assert stream(files, ranks=3, global_batch=6, steps=range(8)) == rows
    assert stream(files, ranks=2, workers=1, global_batch=6, steps=range(8)) == rows

    # and each sample names the images that it replaces, in the order in which they were tried
    dataset = dataset_of(files, 32, 16, 0, 6)
    reports = [sample_at(dataset, p).bad for p in range(24)]
    for position, bad in enumerate(reports):
        expected = []
        for h in healthy[position:]:
            if h.path not in broken:
                break
            expected.append(h.path)
        assert [files.path(index) for index, _ in bad] == expected
    assert [len(reports[p]) for p in (2, 3, 4, 5, 10)] == [0, 2, 1, 0, 1]
    assert reports[4][0][1] == "ValueError: not an image: the file is empty"
    assert "truncated" in reports[3][0][1]
    assert "32-bit image" in reports[10][0][1]


def test_too_many_broken_images_in_a_row_stop_the_run(tmp_path):
    files = flat_folder(tmp_path, data.SUBSTITUTES + 4)
    dataset = dataset_of(files, 8, 4, 0, 1)
    image_at = dataset.order.image_at
    paths = [files.path(image_at(p)) for p in range(data.SUBSTITUTES + 2)]
    for path in paths[1 : data.SUBSTITUTES]:  # one less than the limit
        break_file(path, "empty")
    sample = sample_at(dataset, 1)
    assert files.path(sample.image_id) == paths[data.SUBSTITUTES]
    assert len(sample.bad) == data.SUBSTITUTES - 1

    break_file(paths[data.SUBSTITUTES], "html")
    sentence = f"{data.SUBSTITUTES} images in a row could not be read, the last one number "
    with pytest.raises(RuntimeError, match=rf"^{sentence}{image_at(data.SUBSTITUTES)} "):
        sample_at(dataset, 1)


@pytest.mark.parametrize(
    ("error", "stands_in"),
    [
        (OSError(errno.EIO, "Input/output error"), False),
        (MemoryError(), False),
        (FileNotFoundError(errno.ENOENT, "vanished"), True),
        (PermissionError(errno.EACCES, "not yours"), True),
    ],
)
def test_trouble_of_the_node_is_no_broken_file(tmp_path, monkeypatch, error, stands_in):
    """Another rank may not meet it: a substitute would make the streams differ."""
    dataset = dataset_of(flat_folder(tmp_path, 4), 8, 4, 0, 1)
    first, read = dataset.order.image_at(0), data.ImageFolder.read

    def fail_once(files, index):
        if index == first:
            raise error
        return read(files, index)

    monkeypatch.setattr(data.ImageFolder, "read", fail_once)
    if stands_in:
        assert sample_at(dataset, 0).image_id == dataset.order.image_at(1)
    else:
        with pytest.raises(type(error)):
            sample_at(dataset, 0)


def test_a_folder_that_may_not_be_read_is_not_left_out(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "x.png")
    listing = os.scandir

    def scandir(path):
        if str(path).endswith("b"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="Permission denied"):
        data.scan(str(tmp_path))


# --- workers


def inside_worker(batch):
    return {
        "shared": batch.image.is_shared() and batch.noise.is_shared(),
        "worker": torch.utils.data.get_worker_info() is not None,
        "parent": os.getppid(),
        "network": dist.is_initialized(),
        "device": torch.cuda.is_initialized(),
        "inherited": hasattr(data, "set_by_the_test"),
    }


def test_workers_inherit_neither_network_nor_device(monkeypatch):
    monkeypatch.setattr(data, "set_by_the_test", True, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loader = data.build_loader(
            tiles(),
            img_size=32,
            patches=16,
            seed=0,
            global_batch=12,
            local_batch=12,
            steps=range(2),
            workers=2,
        )
        loader.collate_fn = inside_worker
        reports = list(loader)
    finally:
        dist.destroy_process_group()
    for t in reports:
        assert t.pop("parent") != os.getpid()
        assert t.pop("shared")  # or it would be copied on its way to this process
        assert t == {"worker": True, "network": False, "device": False, "inherited": False}
    assert loader.multiprocessing_context.get_start_method() != "fork"


def test_workers_do_not_grow():
    """Three epochs of real tiles: what a worker holds at the end of each, but for the first."""
    loader = data.build_loader(
        tiles(),
        img_size=96,
        patches=144,
        seed=0,
        global_batch=16,
        local_batch=16,
        steps=range(36),
        workers=2,
    )
    held = []
    for i, _ in enumerate(batches := iter(loader)):
        if i % 12 == 11:
            pids = [worker.pid for worker in batches._workers]
            assert len(held) == 0 or pids == held[-1][0]  # the same ones all the time
            held.append((pids, [resident(pid) for pid in pids]))
    for _, now in held[1:]:
        assert all(abs(a / b - 1) < 0.05 for a, b in zip(now, held[0][1], strict=True)), held


def resident(pid):
    """KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status).group(1))
