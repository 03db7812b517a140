"""A pack holds the array that was written; a tree shows what another reader shows, or refuses."""

import io
import json

import numpy as np
import pytest
from images import noise_image, saved
from PIL import Image

import data
import prepare

rasterio = pytest.importorskip("rasterio")
pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")


def noise(bands, dtype, side=40, low=0, high=None):
    """Draw an array (bands, side, side) whose bands all differ."""
    draw = np.random.default_rng(bands)
    if np.dtype(dtype).kind in "fc":
        return draw.normal(500, 100, (bands, side, side)).astype(dtype)
    limits = np.iinfo(dtype)
    high = min(limits.max, 30_000) if high is None else high
    return draw.integers(max(limits.min, low), high, (bands, side, side)).astype(dtype)


def write(path, pixels, driver="GTiff", mask=None, overviews=(), **options):
    """Write an array (C, H, W) by GDAL; `mask` (H, W) hides pixels where it is 0."""
    about = {"count": len(pixels), "height": pixels.shape[1], "width": pixels.shape[2]}
    inside = rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True)
    with (
        inside,
        rasterio.open(path, "w", driver=driver, dtype=pixels.dtype, **about, **options) as file,
    ):
        file.write(pixels)
        if mask is not None:
            file.write_mask(mask)
        if overviews:
            file.build_overviews(overviews)


def packed(folder, *flags):
    """Pack a folder -> the images of the pack, opened as training does, in order."""
    target = f"{folder}-pack"
    assert prepare.main(["pack", str(folder), target, "--workers", "1", *flags]) == 0
    files = data.scan(target)
    return [data.open_image(files.read(index))[0] for index in range(len(files))]


def pixels_of(image):
    """Return the pixels (C, H, W) of an opened image; grey has one channel."""
    if isinstance(image, np.ndarray):
        return image
    pixels = np.asarray(data.decode(image))
    return np.moveaxis(pixels, 2, 0)[: 1 if image.mode == "L" else 3]


def with_nan(pixels, missing):
    return np.where(missing, np.nan, pixels).astype(np.float32)


LOSSLESS = {"driver": "JP2OpenJPEG", "QUALITY": "100", "REVERSIBLE": "YES"}
# name: (array, options of GDAL); whole numbers stay, all but uint8 and uint16 become float32
KINDS = {
    "grey": (noise(1, "uint8"), {}),
    "RGB": (noise(3, "uint8"), {"photometric": "RGB"}),
    "RGB without saying so": (noise(3, "uint8"), {}),
    "infrared": (noise(4, "uint8"), {}),
    "infrared called alpha": (noise(4, "uint8"), {"photometric": "RGB", "alpha": "YES"}),
    "grey and infrared": (noise(2, "uint8"), {}),
    "thirteen bands": (noise(13, "uint16"), {}),
    "band by band": (noise(13, "uint16"), {"interleave": "band", "compress": "deflate"}),
    "RGB band by band": (noise(3, "uint8"), {"interleave": "band", "photometric": "RGB"}),
    "16-bit RGB": (noise(3, "uint16"), {"photometric": "RGB", "interleave": "band"}),
    "16-bit grey": (noise(1, "uint16"), {}),
    "12 bits": (noise(4, "uint16", high=4095), {"NBITS": 12}),
    "one bit": (noise(1, "uint8", high=2), {"NBITS": 1}),
    "white is zero": (noise(1, "uint8"), {"photometric": "MINISWHITE"}),
    "int8": (noise(1, "int8", low=-100), {}),
    "int16": (noise(10, "int16", low=-5000), {}),
    "int32": (noise(2, "int32", low=-70_000), {}),
    "uint32": (noise(2, "uint32"), {}),
    "float32": (noise(2, "float32"), {}),
    "float64": (noise(2, "float64"), {}),
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
    "JPEG 2000, 5 bands": (noise(5, "uint16"), LOSSLESS),
    "16-bit PNG": (noise(1, "uint16"), {"driver": "PNG"}),
    "16-bit RGB PNG": (noise(3, "uint16"), {"driver": "PNG"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_pack_holds_the_array_that_was_written(name, tmp_path, capsys):
    """In the type of training; and a tree holds the same, or says that it must be packed."""
    pixels, options = KINDS[name]
    endings = {"JP2OpenJPEG": "jp2", "PNG": "png"}
    path = tmp_path / f"tree/x.{endings.get(options.get('driver'), 'tif')}"
    path.parent.mkdir()
    write(path, pixels, **options)
    (image,) = packed(path.parent)
    wanted = pixels if pixels.dtype.name in data.ARRAY_DTYPES else pixels.astype(np.float32)
    np.testing.assert_array_equal(pixels_of(image), wanted)
    assert pixels_of(image).dtype == wanted.dtype
    try:
        image, _ = data.open_image(path.read_bytes())
    except data.NeedsPackingError as error:
        assert "`prepare.py pack`" in str(error)
        assert name not in ("grey", "RGB", "tiles", "packbits")
    else:
        np.testing.assert_array_equal(pixels_of(image), pixels)


def test_pages_are_bands(tmp_path):
    pixels = noise(12, "uint8")
    pages = [Image.fromarray(page) for page in pixels]
    (tmp_path / "tree").mkdir()
    pages[0].save(tmp_path / "tree/x.tif", save_all=True, append_images=pages[1:])
    np.testing.assert_array_equal(packed(tmp_path / "tree")[0], pixels)


def test_missing_pixels_become_nan_and_are_not_measured(tmp_path):
    """By a number of the file, by its mask, by --nodata; a number that no pixel can be is none."""
    pixels = noise(2, "uint16", low=1)
    hole = np.zeros((40, 40), bool)
    hole[:10] = True
    holed = np.where(hole, 0, pixels)
    for name, array, about, flags, wanted in (
        ("number", holed, {"nodata": 0}, (), with_nan(pixels, hole)),
        ("mask", pixels, {"mask": (~hole * 255).astype("uint8")}, (), with_nan(pixels, hole)),
        ("flag", holed, {}, ("--nodata", "0"), with_nan(pixels, hole)),
        ("lowest", with_nan(pixels, hole), {"nodata": -3.4028234663852886e38}, (), None),
        ("never", pixels, {"nodata": None}, ("--nodata=-9999",), pixels),
    ):
        (tmp_path / name).mkdir()
        if name == "lowest":
            array = np.nan_to_num(array, nan=np.finfo("float32").min)
            wanted = with_nan(pixels, hole)
        write(tmp_path / name / "x.tif", array, **about)
        (image,) = packed(tmp_path / name, *flags)
        np.testing.assert_array_equal(image, wanted)
        stats = json.loads((tmp_path / f"{name}-pack/stats.json").read_text())
        mean = np.nanmean(wanted, axis=(1, 2), dtype=np.float64)
        np.testing.assert_allclose(stats["mean"], mean, rtol=1e-6)


def test_a_picture_with_a_number_for_missing_pixels_becomes_an_array(tmp_path):
    picture = noise_image(0)
    (tmp_path / "tree").mkdir()
    picture.save(tmp_path / "tree/x.png")
    pixels = np.moveaxis(np.asarray(picture), 2, 0)
    (image,) = packed(tmp_path / "tree", "--nodata", "7")
    np.testing.assert_array_equal(image, with_nan(pixels, pixels == 7))


def test_what_training_cannot_take_is_named(tmp_path, capsys):
    (tmp_path / "tree").mkdir()
    write(tmp_path / "tree/complex.tif", noise(1, "complex64"))
    write(tmp_path / "tree/large.tif", noise(1, "uint32") + np.uint32(2**24))
    write(tmp_path / "tree/huge.tif", noise(1, "float64") * 1e300)
    write(tmp_path / "tree/good.tif", noise(2, "uint16"))
    content = (tmp_path / "tree/good.tif").read_bytes()
    (tmp_path / "tree/cut.tif").write_bytes(content[:-3000])
    grey = [Image.new("L", (size, 40)) for size in (40, 20)]
    grey[0].save(tmp_path / "tree/sizes.tif", save_all=True, append_images=grey[1:])
    assert prepare.main(["scan", str(tmp_path / "tree"), "--workers", "1"]) == 1
    said = capsys.readouterr().out
    for name in ("complex", "large", "huge", "cut", "sizes"):
        assert said.count(f"/{name}.tif: ") == 1
    assert "5 of 6 images cannot be read" in said and "--max-bad" in said


def random_tiff(seed):
    """Write a random TIFF -> its bytes: by GDAL or Pillow, sometimes with a few bytes changed."""
    draw = np.random.default_rng(seed)
    picture = Image.fromarray(noise(3, "uint8", 24).transpose(1, 2, 0).copy())
    if seed % 3 == 0:
        modes = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr", "LAB")
        mode = modes[draw.integers(len(modes))]
        image = picture.convert("L") if mode == "I;16" else picture
        compressions = (None, "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "group4")
        stream = io.BytesIO()
        tags = {274: int(draw.integers(1, 9)), 317: 1, 266: int(draw.integers(1, 3))}
        image.convert(mode).save(
            stream, "TIFF", compression=compressions[draw.integers(6)], tiffinfo=tags
        )
        content = stream.getvalue()
    else:
        bands = int(draw.integers(1, 6))
        dtype = ("uint8", "uint8", "uint8", "uint16", "int16", "float32")[draw.integers(6)]
        options = {"interleave": ("pixel", "band")[draw.integers(2)]}
        options["compress"] = ("none", "lzw", "deflate", "packbits", "zstd")[draw.integers(5)]
        options["photometric"] = ("MINISBLACK", "MINISWHITE", "RGB")[draw.integers(3)]
        options["SPARSE_OK"] = bool(draw.integers(2))
        if options["photometric"] == "RGB":
            bands = max(bands, 3)
        pixels = noise(bands, dtype, 24)
        pixels[:, : draw.integers(24)] = 0
        with rasterio.MemoryFile() as memory:
            write(memory.name, pixels, **options)
            content = memory.read()
    if seed % 5 == 0:
        changed = bytearray(content)
        for place in draw.integers(0, len(changed), 3):
            changed[place] = draw.integers(256)
        content = bytes(changed)
    return content


def by_gdal(content):
    with rasterio.MemoryFile(content) as memory, memory.open() as file:
        return file.read()


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
        np.testing.assert_array_equal(pixels, by_gdal(content), err_msg=str(seed))
        shown += 1
    assert shown > 10


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "BMP", "WEBP", "NPY"])
def test_damaged_files_raise_nothing_but_that_they_are_unreadable(kind):
    """Whatever Pillow and numpy raise: anything else would be taken for an error of code."""
    stream = io.BytesIO()
    np.save(stream, noise(3, "uint8"))
    whole = stream.getvalue() if kind == "NPY" else saved(kind, noise_image(0))
    draw = np.random.default_rng(0)
    for _ in range(200):
        content = bytearray(whole)
        for place in draw.integers(0, min(len(whole), 600), draw.integers(1, 6)):
            content[place] = draw.integers(256)
        content = bytes(content[: draw.integers(1, len(whole) + 1)])
        try:
            image, _ = data.open_image(content, data.IMAGENET)
            data.crop_and_resize(image, (0, 0, 20, 20), 8)
        except data.UnreadableImage:
            pass
