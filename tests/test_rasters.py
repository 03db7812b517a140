"""A pack holds the array that was written; a tree shows what another reader shows, or refuses."""

import json

import numpy as np
import pytest
from images import noise_image, saved, saved_array
from PIL import Image

import data
import prepare

rasterio = pytest.importorskip("rasterio")
pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")


def noise(bands, dtype, side=40, low=0, high=30_000):
    """Draw an array (bands, side, side) whose bands all differ."""
    draw = np.random.default_rng(bands)
    if np.dtype(dtype).kind in "fc":
        return draw.normal(500, 100, (bands, side, side)).astype(dtype)
    limits = np.iinfo(dtype)
    size = (bands, side, side)
    return draw.integers(max(limits.min, low), min(limits.max, high), size).astype(dtype)


def write(path, pixels, driver="GTiff", mask=None, overviews=(), **options):
    """Write an array (C, H, W) by GDAL; `mask` (H, W) hides pixels where it is 0."""
    options |= {"count": len(pixels), "height": pixels.shape[1], "width": pixels.shape[2]}
    options |= {"driver": driver, "dtype": pixels.dtype}
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True), rasterio.open(path, "w", **options) as file:
        file.write(pixels)
        if mask is not None:
            file.write_mask(mask)
        if overviews:
            file.build_overviews(overviews)


def packed(path, *flags):
    """Pack the folder of this file alone -> the image, opened as training does."""
    target = f"{path.parent}-pack"
    assert prepare.main(["pack", str(path.parent), target, "--workers", "1", *flags]) == 0
    image, _ = data.open_image(data.scan(target).read(0))
    return pixels_of(image)


def pixels_of(image):
    """Return the pixels (C, H, W) of an opened image; grey has one channel."""
    if isinstance(image, np.ndarray):
        return image
    pixels = np.moveaxis(np.asarray(data.decode(image)), 2, 0)
    return pixels[:1] if image.mode == "L" else pixels


LOSSLESS = {"driver": "JP2OpenJPEG", "QUALITY": "100", "REVERSIBLE": "YES"}
# name: (array, options of GDAL); whole numbers stay, all but uint8 and uint16 become float32
KINDS = {
    "grey": (noise(1, "uint8"), {}),
    "RGB": (noise(3, "uint8"), {"photometric": "RGB"}),
    "RGB without saying so": (noise(3, "uint8"), {}),
    "infrared called alpha": (noise(4, "uint8"), {"photometric": "RGB", "alpha": "YES"}),
    "grey and infrared": (noise(2, "uint8"), {}),
    "thirteen bands": (noise(13, "uint16"), {}),
    "band by band": (noise(13, "uint16"), {"interleave": "band", "compress": "deflate"}),
    "RGB band by band": (noise(3, "uint8"), {"interleave": "band", "photometric": "RGB"}),
    "16-bit RGB": (noise(3, "uint16"), {"photometric": "RGB", "interleave": "band"}),
    "16-bit grey": (noise(1, "uint16"), {}),
    "12 bits": (noise(4, "uint16", high=4095), {"NBITS": 12}),
    "white is zero": (noise(1, "uint8"), {"photometric": "MINISWHITE"}),
    "int8": (noise(1, "int8", low=-100), {}),
    "int16": (noise(10, "int16", low=-5000), {}),
    "int32": (noise(2, "int32", low=-70_000), {}),
    "uint32": (noise(2, "uint32"), {}),
    "float32": (noise(2, "float32"), {}),
    "tiles": (noise(3, "uint8", 80), {"tiled": True, "blockxsize": 32, "blockysize": 32}),
    "overviews": (noise(3, "uint8", 128), {"overviews": (2, 4), "photometric": "RGB"}),
    "overviews of 4 bands": (noise(4, "uint16", 128), {"overviews": (2, 4), "tiled": True}),
    "LZW, differences": (noise(5, "uint16"), {"compress": "lzw", "predictor": 2}),
    "LZW, differences of floats": (noise(2, "float32"), {"compress": "lzw", "predictor": 3}),
    "ZSTD": (noise(5, "uint16"), {"compress": "zstd"}),
    "LERC": (noise(2, "float32"), {"compress": "lerc"}),
    "packbits": (noise(1, "uint8"), {"compress": "packbits"}),
    "BigTIFF": (noise(4, "uint16"), {"BIGTIFF": "YES"}),
    "other order of bytes": (noise(4, "uint16"), {"ENDIANNESS": "BIG"}),
    "JPEG 2000": (noise(3, "uint8"), LOSSLESS),
    "JPEG 2000, 15 bits": (noise(1, "uint16"), LOSSLESS | {"NBITS": "15"}),
    "16-bit PNG": (noise(1, "uint16"), {"driver": "PNG"}),
    "twelve pages": (noise(12, "uint8"), {"pages": True}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_pack_holds_the_array_that_was_written(name, tmp_path, capsys):
    """In the type of training; and a tree holds the same, or says that it must be packed."""
    pixels, options = KINDS[name]
    path = tmp_path / "x.tif"  # whatever the kind: names do not decide
    if "pages" in options:
        first, *others = map(Image.fromarray, pixels)
        first.save(path, save_all=True, append_images=others)
    else:
        write(path, pixels, **options)
    image = packed(path)
    wanted = pixels if pixels.dtype.name in data.ARRAY_DTYPES else pixels.astype(np.float32)
    np.testing.assert_array_equal(image, wanted)
    assert image.dtype == wanted.dtype
    try:
        image, _ = data.open_image(path.read_bytes())
    except data.NeedsPackingError as error:
        assert "`prepare.py pack`" in str(error)
        assert name not in ("grey", "RGB", "tiles", "packbits")
    else:
        np.testing.assert_array_equal(pixels_of(image), pixels)


HOLE = np.arange(1600).reshape(40, 40) < 400
WHOLE = noise(2, "uint16", low=1)
HOLED = np.where(HOLE, 0, WHOLE)
LOWEST = np.finfo("float32").min
RGB = np.moveaxis(np.asarray(noise_image(0)), 2, 0)


@pytest.mark.parametrize(
    ("pixels", "options", "flags", "missing"),
    [
        (HOLED, {"nodata": 0}, (), HOLE),
        (WHOLE, {"mask": np.where(HOLE, 0, 255).astype("uint8")}, (), HOLE),
        (HOLED, {}, ("--nodata", "0"), HOLE),
        (np.where(HOLE, LOWEST, WHOLE).astype("float32"), {"nodata": LOWEST}, (), HOLE),
        (WHOLE, {}, ("--nodata=-9999",), None),  # which no pixel can be
        (RGB, {"driver": "PNG"}, ("--nodata", "7"), RGB == 7),
    ],
    ids=["number", "mask", "flag", "lowest number", "impossible number", "picture"],
)
def test_missing_pixels_become_nan_and_are_not_measured(pixels, options, flags, missing, tmp_path):
    write(tmp_path / "x.tif", pixels, **options)
    image = packed(tmp_path / "x.tif", *flags)
    wanted = pixels if missing is None else np.where(missing, np.nan, pixels).astype(np.float32)
    np.testing.assert_array_equal(image, wanted)
    stats = json.loads((tmp_path.parent / f"{tmp_path.name}-pack/stats.json").read_text())
    mean = np.nanmean(wanted, axis=(1, 2), dtype=np.float64)
    np.testing.assert_allclose(stats["mean"], mean, rtol=1e-6)


def test_what_training_cannot_take_is_named(tmp_path, capsys):
    write(tmp_path / "complex.tif", noise(1, "complex64"))
    write(tmp_path / "large.tif", noise(1, "uint32") + np.uint32(2**24))
    write(tmp_path / "huge.tif", noise(1, "float64") * 1e300)
    write(tmp_path / "good.tif", noise(2, "uint16"))
    (tmp_path / "cut.tif").write_bytes((tmp_path / "good.tif").read_bytes()[:-3000])
    pages = [Image.new("L", (size, 40)) for size in (40, 20)]
    pages[0].save(tmp_path / "sizes.tif", save_all=True, append_images=pages[1:])
    assert prepare.main(["scan", str(tmp_path), "--workers", "1"]) == 1
    said = capsys.readouterr().out
    for name in ("complex", "large", "huge", "cut", "sizes"):
        assert said.count(f"/{name}.tif: ") == 1
    assert "5 of 6 images cannot be read" in said


# --- random files


def one_of(draw, *choices):
    return choices[draw.integers(len(choices))]


def damaged(draw, content, first):
    """Change three bytes, of the first so many."""
    changed = bytearray(content)
    for place in draw.integers(0, min(first, len(content)), 3):
        changed[place] = draw.integers(256)
    return bytes(changed)


def random_tiff(seed):
    """Write a random TIFF by GDAL or Pillow -> its bytes, of some seeds with a few changed."""
    draw = np.random.default_rng(seed)
    if seed % 3 == 0:
        modes = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr", "LAB")
        mode = one_of(draw, *modes)
        image = noise_image(seed, 24, 24)
        image = image.convert("L") if mode == "I;16" else image
        packing = (None, "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "group4")
        tags = {274: int(draw.integers(1, 9)), 317: 1, 266: int(draw.integers(1, 3))}
        options = {"compression": one_of(draw, *packing), "tiffinfo": tags}
        content = saved("TIFF", image.convert(mode), **options)
    else:
        options = {"interleave": one_of(draw, "pixel", "band")}
        options["compress"] = one_of(draw, "none", "lzw", "deflate", "packbits", "zstd")
        options["photometric"] = one_of(draw, "MINISBLACK", "MINISWHITE", "RGB")
        options["SPARSE_OK"] = one_of(draw, True, False)
        bands = one_of(draw, 1, 1, 2, 3, 3, 4)
        if options["photometric"] == "RGB":
            bands = max(bands, 3)
        pixels = noise(bands, one_of(draw, "uint8", "uint8", "uint8", "uint16", "float32"), 24)
        pixels[:, : draw.integers(24)] = 0
        with rasterio.MemoryFile() as memory:
            write(memory.name, pixels, **options)
            content = memory.read()
    return damaged(draw, content, len(content)) if seed % 5 == 0 else content


@pytest.mark.filterwarnings("ignore")
def test_a_tree_shows_300_random_tiffs_as_gdal_does_or_refuses_them():
    shown = 0
    for seed in range(300):
        try:
            content = random_tiff(seed)
        except (OSError, ValueError, KeyError, rasterio.errors.RasterioError):
            continue  # no such kind
        try:
            image, _ = data.open_image(content)
            pixels = pixels_of(image)
        except data.UnreadableImage:
            continue
        with rasterio.MemoryFile(content) as memory, memory.open() as file:
            np.testing.assert_array_equal(pixels, file.read(), err_msg=str(seed))
        shown += 1
    assert shown > 10


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "BMP", "WEBP", "NPY"])
def test_damaged_files_raise_nothing_but_that_they_are_unreadable(kind):
    """Whatever Pillow and numpy raise: anything else would be taken for an error of code."""
    whole = saved_array(noise(3, "uint8")) if kind == "NPY" else saved(kind, noise_image(0))
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(100):
        content = damaged(draw, whole, 600)[: draw.integers(1, 2 * len(whole))]
        try:
            image, _ = data.open_image(content, data.IMAGENET)
            data.crop_and_resize(image, (0, 0, 20, 20), 8)
        except data.UnreadableImage:
            refused += 1
    assert refused > 40
