"""An image is what its file says: the pixels that rasterio and numpy read, or a sentence."""

import errno
import io
import json
import multiprocessing
import os
import re
import resource
import struct
import sys
import tarfile
import tracemalloc
import zlib
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tifffile
from PIL import Image
from ranks import Run, run_ranks

import data
import prepare
from runtime import image_source
from storage import arrays, checking, classes, image_list, packing, stacking

rasterio = pytest.importorskip("rasterio")
rasterio_shutil = pytest.importorskip("rasterio.shutil")
# The images have no place on Earth.
pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")


def blocks(seed, bands, low, high, dtype="uint16", side=32):
    """Bands (C, side, side) of blocks of 8 x 8 pixels, which JPEG 2000 and bits of 12 keep too."""
    draw = np.random.default_rng(seed).integers(low, high, (bands, side // 8, side // 8))
    return np.kron(draw, np.ones((1, 8, 8))).astype(dtype)


def write_by_gdal(path, pixels, driver="GTiff", **options):
    """Write (C, H, W) as GDAL does by default."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"count": len(pixels), "height": pixels.shape[1], "width": pixels.shape[2]}
    with rasterio.open(path, "w", driver=driver, dtype=pixels.dtype, **about, **options) as file:
        file.write(pixels)


def read_by_gdal(path):
    with rasterio.open(path) as file:
        return file.read()


def read_packed(content, nodata=None):
    """What a pack holds of a file: a picture, or an array (C, H, W)."""
    image = arrays.read_image(io.BytesIO(content), nodata)
    return image if isinstance(image, Image.Image) else np.stack([*image])


def complex_blocks():
    return (blocks(0, 1, 1, 200) + 1j * blocks(1, 1, 1, 200)).astype("complex64")


# name: (pixels, options of GDAL); what training must refuse and pack must keep
BY_GDAL = {
    "RGB and infrared": (blocks(0, 4, 60, 200, "uint8"), {}),
    "thirteen bands, band by band": (
        blocks(0, 13, 300, 3000),
        {"interleave": "band", "compress": "deflate"},
    ),
    "thirteen bands, pixel by pixel": (blocks(0, 13, 300, 3000), {"interleave": "pixel"}),
    "two bytes": (blocks(0, 2, 0, 200, "uint8"), {}),
    "five bytes": (blocks(0, 5, 0, 200, "uint8"), {}),
    "RGB of 16 bits, band by band": (
        blocks(0, 3, 300, 3000),
        {"interleave": "band", "photometric": "RGB"},
    ),
    "grey of 16 bits": (blocks(0, 1, 300, 3000), {}),
    "grey of 16 bits, band by band": (blocks(0, 1, 300, 3000), {"interleave": "band"}),
    "signed bytes": (blocks(0, 1, -100, 100, "int8"), {}),
    "signed": (blocks(0, 3, -3000, 3000, "int16"), {}),
    "32 bits": (blocks(0, 1, 0, 2**20, "uint32"), {}),
    "floats": (blocks(0, 1, 0, 200, "float32"), {}),
    "doubles": (blocks(0, 2, 0, 200, "float64"), {}),
    "BigTIFF": (blocks(0, 6, 300, 3000), {"BIGTIFF": "YES"}),
    "tiles": (
        blocks(0, 6, 0, 200, "uint8", 64),
        {"tiled": True, "blockxsize": 16, "blockysize": 16},
    ),
}


@pytest.mark.parametrize("name", BY_GDAL)
def test_what_is_no_picture_is_refused_in_a_tree_and_whole_in_a_pack(name, tmp_path):
    pixels, options = BY_GDAL[name]
    path = tmp_path / "1.tif"
    write_by_gdal(path, pixels, **options)
    content = path.read_bytes()
    with pytest.raises(data.NeedsPackingError, match=r"`prepare\.py pack`"):
        image, _ = data.open_image(content)
        data.decode(image)
    packed = read_packed(content)
    np.testing.assert_array_equal(packed, read_by_gdal(path))
    assert packed.dtype == (pixels.dtype if pixels.dtype.name in data.ARRAY_DTYPES else "float32")


def test_pages_of_one_size_are_bands_but_masks_and_overviews_are_none(tmp_path):
    path = tmp_path / "pages.tif"
    twelve = blocks(0, 12, 10, 200, "uint8")
    tifffile.imwrite(path, twelve, photometric="minisblack")  # a page each
    with pytest.raises(data.NeedsPackingError, match="several pages"):
        data.open_image(path.read_bytes())
    np.testing.assert_array_equal(read_packed(path.read_bytes()), twelve)
    colours = np.moveaxis(twelve[:6].reshape(2, 3, 32, 32), 1, -1)
    tifffile.imwrite(path, colours, photometric="rgb")  # two pages of three bands
    np.testing.assert_array_equal(read_packed(path.read_bytes()), twelve[:6])
    for count in (3, 5):
        with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
            write_by_gdal(path, twelve[:count], photometric="RGB" if count == 3 else "MINISBLACK")
            with rasterio.open(path, "r+") as file:
                file.write_mask(np.full((32, 32), 255, np.uint8))
                file.build_overviews([2, 4])
        image = read_packed(path.read_bytes())
        if count == 3:
            image = np.moveaxis(np.asarray(data.decode(image)), -1, 0)
        np.testing.assert_array_equal(image, twelve[:count])


def write_pages(path, *pages, **options):
    """Write each page with options of its own: a dictionary, or those for all."""
    with tifffile.TiffWriter(path) as file:
        for page, more in pages:
            file.write(page, photometric="minisblack", metadata=None, **options, **more)


REDUCED = {"subfiletype": 1}
SIX = blocks(0, 6, 0, 200, "uint8")
# name: (pages, and the options of each; the bands that are meant)
PAGES = {
    "types alternate": (
        [(SIX[0].astype("u2"), {}), (SIX[1] / np.float32(3), {}), (SIX[2].astype("u2"), {})],
        [SIX[0], SIX[1] / np.float32(3), SIX[2]],
    ),
    "compressions alternate": (
        [(SIX[i], {"compression": "zlib"} if i % 2 else {}) for i in range(6)],
        SIX,
    ),
    "all reduced": ([(SIX[i], REDUCED) for i in range(6)], SIX),
    "a thumbnail first": ([(SIX[0, ::4, ::4], REDUCED), (SIX[1].astype("u2"), {})], SIX[1:2]),
}


@pytest.mark.parametrize("name", PAGES)
def test_bands_are_in_the_order_of_the_pages(name, tmp_path):
    pages, expected = PAGES[name]
    write_pages(tmp_path / "1.tif", *pages)
    with open(tmp_path / "1.tif", "rb") as file:
        np.testing.assert_array_equal(np.stack([*arrays.read_bands(file)]), expected)


def test_what_a_tiff_holds_besides_its_image_is_said(tmp_path, capsys):
    """Pages of another size that are no overviews; and that numbers are indices of a palette."""
    root = tmp_path / "tree"
    root.mkdir()
    small = (SIX[0, ::2, ::2].astype("u2"), {})
    write_pages(root / "array.tif", (SIX[0].astype("u2"), {}), small, small)
    write_pages(root / "picture.tif", (SIX[0], {}), small)
    write_pages(root / "overview.tif", (SIX[0], {}), (SIX[0, ::2, ::2], REDUCED))
    colours = np.zeros((3, 2**16), "u2")
    path = root / "palette.tif"
    tifffile.imwrite(path, SIX[1].astype("u2"), photometric="palette", colormap=colours)
    for argv in (["scan", root], ["pack", root, tmp_path / "pack"]):
        assert run_prepare(*argv) == 0
        said = capsys.readouterr().out
        assert "1 channels of uint16, without 2 pages of another size" in said
        assert "1 channels of uint8, without 1 pages of another size" in said
        assert "(grey pictures), such as" in said
        assert "1 channels of uint16, indices of a palette" in said
    np.testing.assert_array_equal(read_packed(path.read_bytes()), read_by_gdal(path))


def test_metadata_of_microscopes_changes_nothing(tmp_path):
    """Nor do they lead to other files; a stack by ImageJ may describe only its first page."""
    for name, options in (
        ("1.ome.tif", {"ome": True, "metadata": {"axes": "CYX"}}),
        ("imagej.tif", {"imagej": True}),
        ("one directory.tif", {"imagej": True, "truncate": True}),
    ):
        pixels = SIX.astype("u2")
        tifffile.imwrite(tmp_path / name, pixels, photometric="minisblack", **options)
        np.testing.assert_array_equal(read_packed((tmp_path / name).read_bytes()), pixels)
    part = "<TiffData FirstC='{}' IFD='0'><UUID FileName='{}'>urn:uuid:{}</UUID></TiffData>"
    both = "".join(part.format(i, name, name) for i, name in enumerate(("a.tif", "b.tif")))
    size = "SizeX='32' SizeY='32' SizeC='2' SizeZ='1' SizeT='1'"
    about = f"<Pixels DimensionOrder='XYCZT' Type='uint16' {size}>{both}</Pixels>"
    schema = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
    for i, name in enumerate(("a.tif", "b.tif")):
        xml = f"<OME xmlns='{schema}' UUID='urn:uuid:{name}'><Image>{about}</Image></OME>"
        tifffile.imwrite(tmp_path / name, pixels[i], description=xml, metadata=None)
    for i, name in enumerate(("a.tif", "b.tif")):
        with open(tmp_path / name, "rb", buffering=0) as file:
            np.testing.assert_array_equal([*arrays.read_image(file)], pixels[i : i + 1])


@pytest.mark.parametrize("bigtiff", [False, True])
def test_a_tiff_that_lost_pages_is_broken(bigtiff, tmp_path):
    pixels = SIX.astype("u2")
    path = tmp_path / "1.tif"
    with tifffile.TiffWriter(path, bigtiff=bigtiff) as file:
        for page in pixels:
            file.write(page, photometric="minisblack", metadata=None)
    content = path.read_bytes()
    with tifffile.TiffFile(path) as file:
        starts = [page.offset for page in file.pages]
    damaged = [content[:end] for end in range(64, len(content), 331)]
    for start in starts[1:]:
        damaged += [content[:start], content[: start + 3], content[: start + 40]]
        damaged.append(content[:start] + bytes(len(content) - start))
    for some in damaged:
        with pytest.raises(ValueError, match="broken TIFF"):
            read_packed(some)
    np.testing.assert_array_equal(read_packed(content), pixels)


def test_pictures_stay_pictures(tmp_path):
    """What GDAL writes of one and three bytes; and transparency that is all or nothing."""
    for bands in (1, 3):
        path = tmp_path / f"{bands}.tif"
        pixels = blocks(0, bands, 0, 255, "uint8")
        write_by_gdal(path, pixels)
        for image in data.open_image(path.read_bytes())[0], read_packed(path.read_bytes()):
            found = np.moveaxis(np.asarray(data.decode(image)), -1, 0)
            np.testing.assert_array_equal(found, np.broadcast_to(pixels, (3, 32, 32)))
    pixels = blocks(0, 4, 0, 255, "uint8")
    pixels[3] = 255 * (pixels[3] > 100)
    write_by_gdal(path, pixels, photometric="RGB", alpha="YES")
    found = np.asarray(data.decode(data.open_image(path.read_bytes())[0]))
    expected = np.where(pixels[3] == 255, pixels[:3], 0)
    np.testing.assert_array_equal(np.moveaxis(found, -1, 0), expected)


@pytest.mark.parametrize(
    ("bands", "bits", "dtype"),
    [(1, 8, "uint8"), (3, 8, "uint8"), (1, 15, "uint16"), (1, 12, "uint16")],
)
def test_jpeg_2000_as_gdal_reads_it(bands, bits, dtype, tmp_path):
    path = tmp_path / "1.jp2"
    pixels = blocks(0, bands, 0, min(2**bits, 4000), dtype, 64)
    if bands == 3:  # Pillow does not read GDAL's
        Image.fromarray(np.moveaxis(pixels, 0, -1)).save(path, irreversible=False)
    else:
        lossless = {"QUALITY": "100", "REVERSIBLE": "YES", "NBITS": str(bits)}
        write_by_gdal(path, pixels, "JP2OpenJPEG", **lossless)
    truth = read_by_gdal(path)
    np.testing.assert_array_equal(truth, pixels)
    content = path.read_bytes()
    found = read_packed(content)
    if bits == 8:
        found = np.moveaxis(np.asarray(data.decode(found)), -1, 0)[:bands]
    else:
        with pytest.raises(data.NeedsPackingError, match=f"{bits} bits"):
            data.open_image(content)
    np.testing.assert_array_equal(found, truth)


# --- pictures as other programs read them, or a sentence


def as_rgb(image):
    """A picture, or an array of it, as (3, H, W)."""
    return np.moveaxis(np.asarray(data.decode(image)), -1, 0)


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><tiff:Orientation>6</tiff:Orientation></x:xmpmeta>'


@pytest.mark.parametrize(
    ("ending", "tag"),
    [("tif", (274, "H", 1, turn, True)) for turn in (2, 3, 6, 8)]
    + [("tif", (700, "B", len(XMP), XMP, True)), ("jpg", None)],
    ids=["mirrored", "upside down", "right", "left", "by XMP", "by EXIF"],
)
def test_no_picture_is_turned(ending, tag, tmp_path):
    path = tmp_path / f"tree/1.{ending}"
    path.parent.mkdir()
    pixels = np.moveaxis(blocks(0, 3, 0, 255, "uint8")[:, :24], 0, -1)
    if tag:
        tifffile.imwrite(path, pixels, photometric="rgb", metadata=None, extratags=[tag])
    else:
        exif = Image.Exif()
        exif[274] = 6
        Image.fromarray(pixels).save(path, exif=exif, subsampling=0)
    image, size = data.open_image(path.read_bytes())
    assert size == (32, 24)
    for picture in (image, read_packed(path.read_bytes())):
        assert picture.size == size
        np.testing.assert_array_equal(as_rgb(picture), read_by_gdal(path))
        assert picture.size == size
    argv = [tmp_path / "tree", tmp_path / "pack", "--max-side", "16"]
    assert run_prepare("pack", *argv) == 0
    smaller, _ = data.open_image(image_list.list_images(str(tmp_path / "pack")).read(0))
    assert smaller.size == (16, 12)


def test_nodata_is_read_from_the_page_of_the_image(tmp_path):
    pixels = blocks(0, 1, 1, 200, "float32")[0]
    pixels[:8] = -9999
    nodata = {"extratags": [(42113, "s", 0, "-9999", True)]}
    path = tmp_path / "1.tif"
    write_pages(path, (pixels[::4, ::4].astype("uint8"), REDUCED), (pixels, nodata))
    with rasterio.open(f"GTIFF_DIR:2:{path}") as file:
        expected = file.read(masked=True).filled(np.nan)
    assert np.isnan(expected).mean() == 0.25
    np.testing.assert_array_equal(read_packed(path.read_bytes()), expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_thumbnail_on_the_first_page_is_not_the_image(dtype, tmp_path):
    path = tmp_path / "1.tif"
    pixels = np.moveaxis(blocks(0, 3, 0, 200, dtype), 0, -1)
    with tifffile.TiffWriter(path) as file:
        thumbnail = pixels[::4, ::4].astype("uint8")
        file.write(thumbnail, photometric="rgb", subfiletype=1, metadata=None)
        file.write(pixels, photometric="rgb", metadata=None)
    with pytest.raises(data.NeedsPackingError, match="several pages"):
        data.open_image(path.read_bytes())
    truth = np.moveaxis(tifffile.imread(path, key=1), -1, 0)
    np.testing.assert_array_equal(read_packed(path.read_bytes()), truth)
    tifffile.imwrite(path, thumbnail, photometric="rgb", subfiletype=1, metadata=None)
    image, _ = data.open_image(path.read_bytes())  # nothing else is in the file
    np.testing.assert_array_equal(np.asarray(data.decode(image)), thumbnail)
    with tifffile.TiffWriter(path) as file:  # as in DNG: the image is in a page below the thumbnail
        file.write(thumbnail, photometric="rgb", subfiletype=1, metadata=None, subifds=1)
        file.write(pixels, photometric="rgb", metadata=None)
    for read in (data.open_image, read_packed):
        with pytest.raises(ValueError, match="thumbnail"):
            read(path.read_bytes())


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_a_tiff_that_does_not_say_whether_0_is_black_is_read_as_stored(
    compression, byteorder, tmp_path
):
    path = tmp_path / "1.tif"
    options = {"compression": compression, "byteorder": byteorder, "metadata": None}
    tifffile.imwrite(path, SIX[0], photometric="minisblack", **options)
    order = "little" if byteorder == "<" else "big"
    photometric, unknown = (number.to_bytes(2, order) for number in (262, 65000))
    content = path.read_bytes().replace(photometric + (3).to_bytes(2, order), unknown + bytes(2))
    path.write_bytes(content)
    np.testing.assert_array_equal(tifffile.imread(path), SIX[0])
    np.testing.assert_array_equal(read_by_gdal(path), SIX[:1])
    with pytest.raises(data.NeedsPackingError, match="without PhotometricInterpretation"):
        data.open_image(content)
    np.testing.assert_array_equal(read_packed(content), SIX[:1])


@pytest.mark.parametrize("options", [{"imagej": True}, {}], ids=["ImageJ", "tifffile"])
def test_a_stack_of_bytes_with_one_directory_is_whole(options, tmp_path):
    path = tmp_path / "1.tif"
    tifffile.imwrite(path, SIX, photometric="minisblack", truncate=True, **options)
    with pytest.raises(data.NeedsPackingError, match="several pages"):
        data.open_image(path.read_bytes())
    np.testing.assert_array_equal(read_packed(path.read_bytes()), tifffile.imread(path))


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("description", ['{"shape": [64, 64]}', "ImageJ=1.53\nimages=9\n"])
def test_a_piece_with_the_description_of_the_whole_is_a_piece(description, dtype, tmp_path):
    path = tmp_path / "1.tif"
    pixels = SIX[0].astype(dtype)
    about = {"description": description, "metadata": None}
    tifffile.imwrite(path, pixels, photometric="minisblack", **about)
    found = read_packed(path.read_bytes())
    if dtype == "uint8":
        found = as_rgb(found)[:1]
    np.testing.assert_array_equal(found, read_by_gdal(path))


@pytest.mark.parametrize("infrared", [0, 255])
def test_a_fourth_band_that_is_all_0_does_not_hide_the_others(infrared, tmp_path):
    """GDAL calls the fourth of four bytes alpha, also where it is infrared over water."""
    path = tmp_path / "1.tif"
    pixels = blocks(0, 4, 60, 200, "uint8")
    pixels[3] = infrared
    write_by_gdal(path, pixels)
    image, _ = data.open_image(path.read_bytes())
    if infrared:  # as opaque alpha: the same picture
        np.testing.assert_array_equal(as_rgb(image), pixels[:3])
        return
    with pytest.raises(data.NeedsPackingError, match="mislabelled as alpha"):
        data.decode(image)
    np.testing.assert_array_equal(read_packed(path.read_bytes()), read_by_gdal(path))
    pixels[:] = 0  # nothing is hidden
    write_by_gdal(path, pixels)
    image, _ = data.open_image(path.read_bytes())
    assert not as_rgb(image).any()


def test_jpeg_2000_of_odd_depths_is_refused(tmp_path):
    path = tmp_path / "9 bits.jp2"
    lossless = {"driver": "JP2OpenJPEG", "reversible": True, "quality": 100}
    write_by_gdal(path, blocks(0, 1, 0, 500), NBITS="9", **lossless)
    with pytest.raises(ValueError, match="gdal_translate"):
        read_packed(path.read_bytes())
    path = tmp_path / "1 bit of alpha.jp2"
    pixels = blocks(0, 4, 0, 200, "uint8")
    pixels[3] = 255 * (pixels[3] > 100)
    write_by_gdal(tmp_path / "1.tif", pixels, alpha="YES", photometric="RGB")
    rasterio_shutil.copy(tmp_path / "1.tif", path, **lossless, **{"1BIT_ALPHA": "YES"})
    for read in (data.open_image, read_packed):
        with pytest.raises(ValueError, match=r"differ in depth or sign: .*gdal_translate"):
            read(path.read_bytes())


@pytest.mark.parametrize("scale", [1, 257])
def test_a_palette_of_too_few_bits_is_not_shown_black(scale, tmp_path):
    path = tmp_path / "1.tif"
    colours = np.random.default_rng(0).integers(0, 256, (3, 256)).astype("uint16")
    indices = blocks(0, 1, 0, 256, "uint8")[0]
    tifffile.imwrite(path, indices, photometric="palette", colormap=scale * colours, metadata=None)
    if scale == 1:
        with pytest.raises(data.NeedsPackingError, match="palette of 8-bit, not 16-bit, colours"):
            data.open_image(path.read_bytes())
        np.testing.assert_array_equal(read_packed(path.read_bytes()), indices[None])
    else:
        found = as_rgb(read_packed(path.read_bytes()))
        np.testing.assert_array_equal(found, colours[:, indices])


@pytest.mark.parametrize("photometric", ["MINISBLACK", "MINISWHITE", "PALETTE"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_one_band_is_shown_rightly_however_it_is_stored(bits, photometric, tmp_path):
    """Of PlanarConfiguration 2, uncompressed, Pillow shows other pixels or inverts none."""
    path = tmp_path / "1.tif"
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 2**bits, (1, 48, 48)).astype("uint8")
    colours = {i: (*draw.integers(0, 256, 3).tolist(), 255) for i in range(2**bits)}
    shown = np.broadcast_to(pixels[0] * 255.0 / (2**bits - 1), (3, 48, 48))
    if photometric == "MINISWHITE":
        shown = 255 - shown
    elif photometric == "PALETTE":
        shown = np.moveaxis(np.array([colours[i][:3] for i in pixels.flat]), -1, 0)
        shown = shown.reshape(3, 48, 48)
    tiles = {"tiled": True, "blockxsize": 16, "blockysize": 16}
    about = {"count": 1, "height": 48, "width": 48, "dtype": "uint8", "photometric": photometric}
    if bits < 8:
        about["NBITS"] = bits
    pictures = 0
    for interleave in ("band", "pixel"):
        for more in ({}, {"compress": "deflate"}, tiles, tiles | {"compress": "packbits"}):
            options = about | more | {"interleave": interleave}
            with rasterio.open(path, "w", driver="GTiff", **options) as file:
                if photometric == "PALETTE":
                    file.write_colormap(1, colours)
                file.write(pixels)
            try:
                image, _ = data.open_image(path.read_bytes())
            except data.NeedsPackingError as error:
                assert "band by band" in str(error)
                with suppress(ImportError):  # tifffile needs imagecodecs for 2 and 4 bits
                    np.testing.assert_array_equal(
                        read_packed(path.read_bytes()), read_by_gdal(path)
                    )
                continue
            pictures += 1
            np.testing.assert_allclose(as_rgb(image), shown, atol=1)
    assert pictures >= 4  # only what Pillow may misread is none


@pytest.mark.parametrize("bands", [2, 4])
@pytest.mark.parametrize("compress", [None, "deflate", "packbits"])
def test_alpha_is_not_lost_where_bands_are_stored_apart(bands, compress, tmp_path):
    path = tmp_path / "1.tif"
    pixels = blocks(0, bands, 0, 255, "uint8")
    pixels[-1] = 255 * (pixels[-1] > 100)
    options = {"photometric": "RGB"} if bands == 4 else {}
    if compress:
        options["compress"] = compress
    write_by_gdal(path, pixels, interleave="band", alpha="YES", **options)
    np.testing.assert_array_equal(read_packed(path.read_bytes()), read_by_gdal(path))


@pytest.mark.parametrize(
    ("bits", "nodata"), [(8, 77), (8, 0), (16, 0), (16, 300), (4, 0), (4, 5), (2, 0), (2, 1)]
)
def test_the_transparent_colour_of_a_png_is_black_or_refused(bits, nodata, tmp_path):
    path = tmp_path / "1.png"
    dtype = "uint16" if bits == 16 else "uint8"
    pixels = blocks(0, 1, 0, 2**bits, dtype)
    pixels[:, :8] = nodata
    write_by_gdal(path, pixels, "PNG", nodata=nodata, **({"NBITS": bits} if bits < 8 else {}))
    with rasterio.open(path) as file:
        assert file.nodata == nodata
        truth = file.read(masked=True).filled(0)
    content = path.read_bytes()
    assert content[24] == bits and b"tRNS" in content
    if bits != 8 and nodata:
        with pytest.raises(ValueError, match=f"{bits}-bit PNG with a transparent colour"):
            read_packed(content)
    else:
        found = as_rgb(read_packed(content))[:1]
        np.testing.assert_array_equal(
            found, truth // 257 if bits == 16 else truth * (255 // (2**bits - 1))
        )


def chunk(name, content):
    """A part of a PNG."""
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def test_16_bit_colours_of_png_are_named(tmp_path, capsys):
    """12-bit data in it would turn almost black. Its transparent colour Pillow gets wrong."""
    path = tmp_path / "tree/1.png"
    pixels = blocks(0, 3, 0, 2**16)
    write_by_gdal(path, pixels, "PNG")
    found = as_rgb(read_packed(path.read_bytes()))
    np.testing.assert_array_equal(found, read_by_gdal(path) // 256)
    for argv in (["scan", tmp_path / "tree"], ["pack", tmp_path / "tree", tmp_path / "pack"]):
        assert run_prepare(*argv) == 0
        said = capsys.readouterr().out
        assert "(16-bit RGB pictures)" in said and "divides their values" in said
    header, rest = path.read_bytes().split(b"IDAT", 1)
    transparent = chunk(b"tRNS", struct.pack(">HHH", *pixels[:, 0, 0]))
    with pytest.raises(ValueError, match="16-bit PNG with a transparent colour"):
        read_packed(header[:-4] + transparent + header[-4:] + b"IDAT" + rest)


# name: how a file starts that Pillow takes for an image, or asks another program about
NO_PICTURES = {
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "GRIB": b"GRIB\0\0\0\1" + bytes(100),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n",
    "PGM": b"P5\n4 4\n4095\n" + bytes(32),
}


@pytest.mark.parametrize("name", NO_PICTURES)
def test_other_formats_under_a_false_ending_are_no_images(name, tmp_path, capsys):
    for read in (read_packed, data.open_image):
        with pytest.raises(ValueError, match="Pillow cannot open it as JPEG, PNG"):
            read(NO_PICTURES[name])


@pytest.mark.parametrize("kind", ["five bands", "RGB called grey", "palette", "broken"])
def test_jpeg_2000_that_pillow_misreads_says_what_to_do(kind, tmp_path):
    path = tmp_path / "1.jp2"
    pixels = blocks(0, {"five bands": 5, "palette": 1}.get(kind, 3), 0, 16, "uint8", 64)
    lossless = {"QUALITY": "100", "REVERSIBLE": "YES"}
    if kind == "palette":
        about = {"count": 1, "height": 64, "width": 64, "dtype": "uint8", **lossless}
        with rasterio.open(path, "w", driver="JP2OpenJPEG", **about) as file:
            # Pillow would show the indices 0 and 1, which have one colour, as others.
            file.write_colormap(1, {i: (max(i, 1), 9, 9, 255) for i in range(16)})
            file.write(pixels)
    elif kind == "broken":
        Image.fromarray(np.moveaxis(pixels, 0, -1)).save(path)
        path.write_bytes(path.read_bytes()[:300])
    else:
        write_by_gdal(path, pixels, "JP2OpenJPEG", **lossless)
        np.testing.assert_array_equal(read_by_gdal(path), pixels)  # it is sound
    for read in (read_packed, lambda content: data.open_image(content)[0]):
        with pytest.raises(ValueError, match="gdal_translate"):
            data.decode(read(path.read_bytes()))


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "bool", "float16", "float64"])
def test_arrays_of_any_numbers_are_packed(dtype):
    array = blocks(0, 5, 0, 100).astype(dtype)
    found = read_packed(npy(array))
    np.testing.assert_array_equal(found, array.astype(float))
    assert found.dtype == ("uint8" if dtype == "bool" else "float32")


def test_arrays_of_other_shapes():
    grey, colour = blocks(0, 1, 0, 100)[0], np.moveaxis(blocks(0, 3, 0, 100, "uint8"), 0, -1)
    np.testing.assert_array_equal(read_packed(npy(grey)), grey[None])
    np.testing.assert_array_equal(read_packed(npy(colour)), np.moveaxis(colour, -1, 0))
    with pytest.raises(ValueError, match=r"looks like .*: convert it with `prepare.py pack`"):
        data.open_image(npy(colour))
    by_columns = np.asfortranarray(blocks(0, 5, 0, 100))
    np.testing.assert_array_equal(data.open_image(npy(by_columns))[0], by_columns)


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (complex_blocks(), "real numbers"),
        (np.full((1, 8, 8), 2**24 + 1), "which float32 would round"),
        (np.full((1, 8, 8), np.inf), "infinite"),
        (np.full((1, 8, 8), 1e300), r"1e\+300: .* --nodata"),
        (np.full((1, 8, 8), -3.4028235e38, "f4"), r"the value -3\.4028235e\+38: .* --nodata"),
        (np.full((1, 8, 8), -9999.0), "nodata"),
        (np.zeros((2, 3, 8, 8)), "not one image"),
        (np.zeros(8), "not one image"),
        (np.zeros((64, 64, 13), "uint16"), r"looks like \(H, W, C\)"),
        (np.array([{}], object), "OBJECT"),
    ],
)
def test_what_no_array_can_show_gets_a_sentence(array, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_packed(npy(array), nodata=-9999.0)


@pytest.mark.parametrize(
    "array",
    [
        complex_blocks(),
        np.full((3, 8, 8), "abc"),
        np.zeros((3, 8, 8), "datetime64[s]"),
        np.zeros((8, 8), [("red", "u1"), ("green", "u1")]),
    ],
    ids=["complex", "text", "dates", "fields"],
)
def test_training_does_not_send_to_pack_what_pack_refuses(array):
    with pytest.raises(ValueError, match="real numbers") as raised:
        data.open_image(npy(array))
    assert "prepare.py" not in str(raised.value)
    with pytest.raises(ValueError, match="real numbers"):
        read_packed(npy(array))


def test_a_narrow_tiff_is_not_sent_to_pack_by_pack(tmp_path):
    write_by_gdal(tmp_path / "1.tif", blocks(0, 6, 0, 200, side=64)[..., :4])
    with pytest.raises(ValueError, match=r"not read: save it as \(C, H, W\)$"):
        read_packed((tmp_path / "1.tif").read_bytes())


def test_complex_tiff_is_refused(tmp_path):
    write_by_gdal(tmp_path / "1.tif", complex_blocks())
    with pytest.raises(ValueError, match="real numbers"):
        read_packed((tmp_path / "1.tif").read_bytes())


def huge_tiff():
    """A file of 130 bytes that promises 900 bands of 65,535 x 65,535 pixels."""
    tags = [(256, 4, 65535), (257, 4, 65535), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8)]
    tags += [(277, 3, 900), (278, 4, 65535), (279, 4, 1), (284, 3, 2)]
    rows = [struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags]
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(rows) + bytes(4)


def huge_array():
    header = io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": (900, 65535, 65535)}
    np.lib.format.write_array_header_1_0(header, about)
    return header.getvalue()


def test_headers_that_promise_too_much_are_unreadable_images(tmp_path, capsys):
    write_by_gdal(tmp_path / "tree/good.tif", blocks(0, 5, 1, 200, "uint8"))
    (tmp_path / "tree/huge.tif").write_bytes(huge_tiff())
    (tmp_path / "tree/huge.npy").write_bytes(huge_array())
    assert run_prepare("pack", tmp_path / "tree", tmp_path / "pack") == 0
    said = capsys.readouterr().out
    assert said.count("4 GiB") == 2 and "2 of 3 images cannot be read" in said
    assert run_prepare("scan", tmp_path / "tree") == 1


def run_prepare(*argv):
    return prepare.main([*map(str, argv), "--workers", "1"])


def test_without_memory_one_sentence_names_the_image(tmp_path, monkeypatch, capsys):
    write_by_gdal(tmp_path / "tree/1.tif", blocks(0, 5, 1, 200))

    def fail(file, nodata):
        raise MemoryError

    monkeypatch.setattr(arrays, "read_tiff", fail)
    for command in (["scan"], ["stats"], ["pack"]):
        more = [tmp_path / "pack"] if command == ["pack"] else []
        assert run_prepare(*command, tmp_path / "tree", *more) == 1
        error = capsys.readouterr().err
        assert "1.tif: out of memory: use fewer --workers" in error and error.count("\n") == 1


@pytest.mark.parametrize("nodata", [None, 0], ids=["plain", "nodata"])
@pytest.mark.parametrize(
    "options",
    [
        {"interleave": "band"},
        {"interleave": "pixel"},
        {"interleave": "band", "compress": "deflate"},
        {"interleave": "pixel", "compress": "deflate", "tiled": True},
        None,  # a file for each band
    ],
    ids=["raw", "raw by pixel", "strips", "tiles by pixel", "stack"],
)
def test_pack_holds_an_image_once(options, nodata, tmp_path):
    """As the file stores it, and besides some channels and what is read at once."""
    pixels = blocks(0, 13, 0, 3000, side=1024)
    bands = ()
    if options is None:
        bands = tuple(f"B{i:02}" for i in range(13))
        for i, band in enumerate(bands):
            path = tmp_path / f"tree/T_{band}.tif"
            write_by_gdal(path, pixels[i : i + 1], nodata=nodata, compress="deflate")
    else:
        write_by_gdal(tmp_path / "tree/1.tif", pixels, nodata=nodata, **options)
    files = image_list.list_images(str(tmp_path / "tree"))
    if bands:
        files = stacking.find_scenes(files, bands)
    tracemalloc.start()
    try:
        packing.write_shard(packing.PackOptions(bands=bands), tmp_path / "shard.tar", files)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    channel = 4 * 1024**2  # bytes in float32: one is written, the next is made, with its mask
    assert peak < pixels.nbytes + 3 * channel + arrays.READ_AT_ONCE


# --- nodata


def test_nodata_is_not_measured_and_filled_with_the_mean(tmp_path, capsys):
    root = tmp_path / "tree"
    truth = []
    for i in range(3):
        pixels = blocks(i, 2, 1, 200, "float32")
        pixels[:, :16] = -9999
        write_by_gdal(root / f"{i}.tif", pixels, nodata=-9999)
        with rasterio.open(root / f"{i}.tif") as file:
            truth.append(file.read(masked=True))
    write_by_gdal(root / "3.tif", np.full((2, 32, 32), -9999, "float32"), nodata=-9999)
    assert run_prepare("scan", root) == 1
    said = capsys.readouterr().out
    assert "nodata: 3072 of 6144 values (50.00%)" in said and "nodata (NaN) in all pixels" in said
    assert run_prepare("pack", root, tmp_path / "pack") == 0
    stats, _ = image_source.find_stats(str(tmp_path / "pack"), 2)
    means = [[image[c].mean() for image in truth] for c in range(2)]
    np.testing.assert_allclose(stats.mean, np.mean(means, axis=1), rtol=1e-6)
    every = np.ma.stack([image.astype("float64") for image in truth])
    np.testing.assert_allclose(stats.std, [every[:, c].std() for c in range(2)], rtol=1e-6)
    files = image_list.list_images(str(tmp_path / "pack"))
    found, _ = data.open_image(files.read(0), stats)
    np.testing.assert_array_equal(found[0], truth[0][0].filled(np.float32(stats.mean[0])))


@pytest.mark.parametrize(
    ("nodata", "dtype"), [(0.0, "uint16"), (-32768.0, "int16"), (-1.0, "float64")]
)
def test_nodata_that_is_typed(nodata, dtype):
    array = blocks(0, 2, 1, 200).astype(dtype)
    array[0, :8] = nodata
    found = read_packed(npy(array), nodata=nodata)
    np.testing.assert_array_equal(np.isnan(found), array == nodata)
    assert np.isnan(found).sum() == 8 * 32
    # A number that the type cannot hold is nowhere, and changes nothing.
    assert read_packed(npy(blocks(0, 2, 1, 9)), nodata=-9999.0).dtype == np.uint16


def test_tiles_of_which_only_some_declare_nodata_become_one_kind(tmp_path, capsys):
    for i in range(2):
        options = {"nodata": 0} if i else {}
        write_by_gdal(tmp_path / f"tree/{i}.tif", blocks(i, 2, 0, 9), **options)
    assert run_prepare("scan", tmp_path / "tree") == 0
    assert "`pack --nodata=NUMBER` makes all alike" in capsys.readouterr().out
    assert run_prepare("pack", tmp_path / "tree", tmp_path / "pack", "--nodata", "0") == 0
    said = capsys.readouterr().out
    assert "2 images: 2 channels of float32" in said and "copied" not in said


@pytest.mark.parametrize(
    ("tag", "nodata"),
    [("-3.40282e+38", -3.4028235e38), ("-9999,0", -9999), ("-9999\n", -9999), ("1e+20", 1e20)],
)
def test_nodata_as_other_programs_write_it(tag, nodata, tmp_path):
    """A lowest number of six digits, a decimal comma, the end of a line."""
    path = tmp_path / "1.tif"
    pixels = blocks(0, 2, 1, 200, "float32")
    pixels[0, :8] = nodata
    gdal_nodata = (42113, "s", 0, tag, True)
    options = {"photometric": "minisblack", "planarconfig": "separate", "metadata": None}
    tifffile.imwrite(path, pixels, extratags=[gdal_nodata], **options)
    truth = read_masked(path)
    assert np.isnan(truth).sum() == 8 * 32
    np.testing.assert_array_equal(read_packed(path.read_bytes()), truth)


def test_a_nodata_tag_that_is_no_number_is_refused(tmp_path):
    path = tmp_path / "1.tif"
    gdal_nodata = (42113, "s", 0, "none", True)
    tifffile.imwrite(path, blocks(0, 1, 1, 200)[0], extratags=[gdal_nodata], metadata=None)
    with pytest.raises(ValueError, match=r"^nodata value 'none' is no number: give --nodata"):
        read_packed(path.read_bytes())
    assert not np.isnan(read_packed(path.read_bytes(), nodata=0.0)).any()


def with_mask(path, pixels, internal=True, **options):
    """Write pixels by GDAL with a mask, in the file or beside it: four rows are missing."""
    mask = np.full(pixels.shape[1:], 255, "uint8")
    mask[:4] = 0
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=internal):
        write_by_gdal(path, pixels, **options)
        with rasterio.open(path, "r+") as file:
            file.write_mask(mask)


def read_masked(path):
    with rasterio.open(path) as file:
        return file.read(masked=True).astype("float32").filled(np.nan)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_a_mask_inside_a_geotiff_says_what_is_missing(dtype, tmp_path):
    path = tmp_path / "1.tif"
    with_mask(path, blocks(0, 5, 1, 200, dtype))
    found = read_packed(path.read_bytes())
    assert np.isnan(found).sum() == 5 * 4 * 32
    np.testing.assert_array_equal(found, read_masked(path))


def test_a_mask_beside_a_geotiff_is_no_image_and_said_to_be_left_out(tmp_path, capsys):
    with_mask(tmp_path / "tree/1.tif", blocks(0, 5, 1, 200), internal=False)
    assert sorted(os.listdir(tmp_path / "tree")) == ["1.tif", "1.tif.msk"]
    assert run_prepare("scan", tmp_path / "tree") == 0
    said = capsys.readouterr().out
    assert (
        "1 images; left out 1 with the extension .msk" in said
        and "1 images: 5 channels of uint16" in said
    )


def test_nodata_of_pictures_is_named_and_made_nan_where_it_is_typed(tmp_path, capsys):
    root = tmp_path / "tree"
    pixels = blocks(0, 3, 1, 200, "uint8")
    pixels[:, :8] = 0
    write_by_gdal(root / "declared.tif", pixels, photometric="RGB", nodata=0)
    with_mask(root / "masked.tif", pixels, photometric="RGB")
    write_by_gdal(root / "plain.png", pixels, "PNG")
    for argv in (["scan", root], ["pack", root, tmp_path / "pictures"]):
        assert run_prepare(*argv) == 0
        assert "declares missing pixels but is taken as stored" in capsys.readouterr().out
    assert run_prepare("pack", root, tmp_path / "arrays", "--nodata", "0") == 0
    assert "3 images: 3 channels of float32" in capsys.readouterr().out
    files = image_list.list_images(str(tmp_path / "arrays"))
    truth = np.where(pixels == 0, np.nan, pixels)
    for i in range(3):
        np.testing.assert_array_equal(data.open_array(files.read(i)), truth)
    # A number that no pixel of 8 bits can have leaves pictures as they are.
    kept = read_packed((root / "plain.png").read_bytes(), nodata=-9999.0)
    assert isinstance(kept, Image.Image)


COLOURS = np.random.default_rng(0).integers(1, 256, (8, 3)).astype("uint8")
INDICES = blocks(0, 1, 0, 8, "uint8")[0]
ALPHA = np.where(INDICES > 3, 255, 0).astype("uint8")
RGB = np.moveaxis(blocks(1, 3, 1, 256, "uint8"), 0, -1)


def palette(path):
    image = Image.fromarray(INDICES, "P")
    image.putpalette(COLOURS.tobytes())
    image.save(path)


def with_alpha(path):
    Image.fromarray(np.dstack([RGB, ALPHA])).save(path)


# name: (writer of a picture, what a tree shows of it: (H, W) or (H, W, 3))
NOT_PLAIN = {
    "palette.tif": (palette, COLOURS[INDICES]),
    "palette.png": (palette, COLOURS[INDICES]),
    "white is zero.tif": (
        lambda path: tifffile.imwrite(path, INDICES, photometric="miniswhite"),
        255 - INDICES,
    ),
    "bits.tif": (lambda path: Image.fromarray(ALPHA).convert("1").save(path), ALPHA),
    "alpha.tif": (with_alpha, RGB * (ALPHA[..., None] // 255)),
    "alpha.png": (with_alpha, RGB * (ALPHA[..., None] // 255)),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_nodata_is_that_of_the_pixels_that_a_tree_shows(name, tmp_path):
    write, shown = NOT_PLAIN[name]
    write(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    expected = np.moveaxis(np.broadcast_to(shown.T, (3, *shown.T.shape[-2:])), 1, 2)
    picture = np.moveaxis(np.asarray(data.decode(data.open_image(content)[0])), -1, 0)
    np.testing.assert_array_equal(picture, expected)
    missing = float(expected.flat[0])
    found = read_packed(content, nodata=missing)
    np.testing.assert_array_equal(found, np.where(expected == missing, np.nan, expected))


@pytest.mark.parametrize("bands", [3, 1])
def test_nodata_of_16_bit_png_is_exact_or_refused(bands, tmp_path):
    """Pillow keeps only 8 bits of each colour: small numbers would all be 0."""
    pixels = blocks(0, bands, 0, 3)
    write_by_gdal(tmp_path / "1.png", pixels, "PNG")
    content = (tmp_path / "1.png").read_bytes()
    if bands == 3:
        with pytest.raises(ValueError, match="16-bit colour PNG: convert it"):
            read_packed(content, nodata=0.0)
    else:
        expected = np.where(pixels == 2, np.nan, pixels)
        np.testing.assert_array_equal(read_packed(content, nodata=2.0), expected)


def test_a_number_for_missing_pixels_is_given_as_the_sentence_says(tmp_path, capsys):
    """argparse takes -3.4e+38 for a flag, unless it follows an equals sign."""
    root = tmp_path / "root"
    root.mkdir()
    pixels = blocks(0, 2, 1, 200, "float32")
    pixels[:, :8] = np.finfo("float32").min
    np.save(root / "1.npy", pixels)
    assert run_prepare("pack", root, tmp_path / "pack") == 2
    said = capsys.readouterr().out
    number, advice = re.search("the value (.*): .* `prepare.py pack (.*)`", said).groups()
    assert run_prepare("pack", root, tmp_path / "pack", advice.replace("NUMBER", number)) == 0
    packed = image_list.list_images(str(tmp_path / "pack")).read(0)
    pixels[:, :8] = np.nan
    np.testing.assert_array_equal(np.load(io.BytesIO(packed)), pixels)


def test_the_range_of_numbers_is_that_of_valid_pixels(tmp_path):
    path = tmp_path / "1.tif"
    pixels = blocks(0, 2, 1, 200, "int32")
    pixels[:, :8] = -(2**31)
    write_by_gdal(path, pixels, nodata=-(2**31))
    np.testing.assert_array_equal(read_packed(path.read_bytes()), read_masked(path))


# --- TIFF that leaves out tiles, or is broken


@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"compress": "deflate"}, {"tiled": True, "blockxsize": 16, "blockysize": 16}],
    ids=["strips", "deflate", "tiles"],
)
def test_what_a_sparse_tiff_leaves_out_is_zero(bands, options, tmp_path):
    path = tmp_path / "1.tif"
    about = {"count": bands, "height": 512, "width": 512, "dtype": "uint8", **options}
    part = rasterio.windows.Window(0, 0, 512, 256)
    with rasterio.open(path, "w", driver="GTiff", SPARSE_OK=True, **about) as file:
        file.write(blocks(0, bands, 1, 200, "uint8", 512)[:, :256], window=part)
    with pytest.raises(data.NeedsPackingError, match=r"`prepare\.py pack`"):
        data.open_image(path.read_bytes())
    truth = read_by_gdal(path)
    assert not truth[:, 256:].any()
    np.testing.assert_array_equal(read_packed(path.read_bytes()), truth)


def test_a_scene_of_a_billion_pixels_is_left_to_pack(tmp_path):
    """Pillow would call it an attack, but it takes less than 4 GiB. Not read here."""
    path = tmp_path / "1.tif"
    options = {"driver": "GTiff", "dtype": "uint16", "count": 1, "compress": "deflate"}
    part = rasterio.windows.Window(0, 0, 512, 512)
    size = {"height": 33000, "width": 33000, "tiled": True, "SPARSE_OK": True}
    with rasterio.open(path, "w", **options, **size) as file:
        file.write(np.full((1, 512, 512), 7, "uint16"), window=part)
    with open(path, "rb") as file:
        assert arrays.open_whole_picture(file) is None


def test_a_broken_tiff_gets_one_true_sentence(tmp_path):
    write_by_gdal(tmp_path / "1.tif", blocks(0, 5, 1, 200))
    content = (tmp_path / "1.tif").read_bytes()
    for broken in (b"II*\0junk", content[:300], content[: len(content) // 2]):
        with pytest.raises(ValueError, match="broken TIFF") as raised:
            read_packed(broken)
        assert "prepare.py" not in str(raised.value)


@pytest.mark.parametrize("compress", [None, "deflate", "lzw"])
def test_a_tiff_of_bands_whose_end_is_missing_is_broken(compress, tmp_path):
    path = tmp_path / "1.tif"
    options = {"compress": compress} if compress else {}
    pixels = np.random.default_rng(0).integers(0, 2**16, (5, 32, 32)).astype("uint16")
    write_by_gdal(path, pixels, **options)
    content = path.read_bytes()
    for lost in range(1, 6):
        path.write_bytes(content[:-lost])
        with pytest.raises(rasterio.errors.RasterioError):
            read_by_gdal(path)
        with pytest.raises(ValueError, match="the end of the file is missing"):
            read_packed(path.read_bytes())


@pytest.mark.parametrize(
    ("shape", "dtype", "predictor"),
    [((40, 30), "u2", 2), ((40, 30, 5), "u2", 2), ((40, 30), "f4", 3), ((40, 30, 5), "u1", 2)],
)
def test_a_predictor_counts_only_with_compression(shape, dtype, predictor, tmp_path):
    path = tmp_path / "1.tif"
    pixels = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    options = {"photometric": "minisblack", "metadata": None, "planarconfig": "contig"}
    other = 316  # tifffile itself writes no predictor without compression
    tifffile.imwrite(path, pixels, extratags=[(other, "H", 1, predictor, True)], **options)
    content = path.read_bytes()
    tags = [struct.pack("<HHI", tag, 3, 1) for tag in (other, 317)]
    assert content.count(tags[0]) == 1
    path.write_bytes(content.replace(*tags))
    with tifffile.TiffFile(path) as file:
        assert file.pages[0].predictor == predictor
    found = read_packed(path.read_bytes())
    np.testing.assert_array_equal(found, read_by_gdal(path))
    np.testing.assert_array_equal(found, np.moveaxis(pixels.reshape(40, 30, -1), -1, 0))


@pytest.mark.parametrize("photometric", ["MINISBLACK", "RGB"])
def test_jpeg_of_three_bands_is_what_gdal_reads_or_refused(photometric, tmp_path):
    """A decoder takes three bands without a name for YCbCr, up to 194 of 255 off."""
    path = tmp_path / "1.tif"
    pixels = blocks(0, 3, 60, 200, "uint8")
    options = {"interleave": "pixel", "compress": "JPEG", "JPEG_QUALITY": 95}
    write_by_gdal(path, pixels, photometric=photometric, **options)
    if photometric == "RGB":
        np.testing.assert_allclose(as_rgb(read_packed(path.read_bytes())), pixels, atol=9)
        return
    np.testing.assert_allclose(read_by_gdal(path), pixels, atol=9)
    with pytest.raises(arrays.RefusedError, match="three bands that are no RGB"):
        read_packed(path.read_bytes())


def test_a_missing_package_is_named_with_what_to_type(tmp_path, monkeypatch):
    write_by_gdal(tmp_path / "1.tif", blocks(0, 5, 1, 200))
    # tifffile finds what decodes some compressions only when it needs it.
    needed = ModuleNotFoundError("No module named 'compression'")
    with monkeypatch.context() as patch, pytest.raises(ImportError, match=r"compression.*imagecod"):
        patch.setattr(tifffile.TiffPage, "asarray", Mock(side_effect=needed))
        read_packed((tmp_path / "1.tif").read_bytes())
    monkeypatch.setitem(sys.modules, "tifffile", None)  # as if it were not there
    with pytest.raises(ImportError, match="pip install tifffile imagecodecs"):
        read_packed((tmp_path / "1.tif").read_bytes())


@pytest.mark.parametrize("compression", ["lzma", "webp", "zstd"])
def test_what_pillow_cannot_decode_is_no_picture(compression, tmp_path):
    path = tmp_path / "1.tif"
    options = {"photometric": "RGB", "interleave": "pixel", "WEBP_LOSSLESS": True}
    write_by_gdal(path, blocks(0, 3, 0, 200, "uint8"), compress=compression, **options)
    try:
        found = read_packed(path.read_bytes())
    except ImportError as error:
        assert "pip install tifffile imagecodecs" in str(error)
        return
    if isinstance(found, Image.Image):
        found = np.moveaxis(np.asarray(data.decode(found)), -1, 0)
    np.testing.assert_array_equal(found, read_by_gdal(path))


# --- which files, which kinds


def test_masks_beside_pictures_are_a_kind_of_their_own(tmp_path, capsys):
    root = tmp_path / "tree"
    for i in range(3):
        write_by_gdal(root / f"images/{i}.png", blocks(i, 3, 0, 255, "uint8"), "PNG")
        write_by_gdal(root / f"labels/{i}.png", blocks(i, 1, 0, 5, "uint8"), "PNG")
    for argv in (["scan", root], ["pack", root, tmp_path / "pack"]):
        assert run_prepare(*argv) == 0
        said = capsys.readouterr().out
        assert "3 images: 3 channels of uint8 (RGB pictures)" in said
        assert "3 images: 3 channels of uint8 (grey pictures)" in said
        assert "leave out masks by --include or --exclude" in said


def test_a_pack_says_that_its_images_differ(tmp_path, capsys):
    root = tmp_path / "tree"
    for i in range(6):
        write_by_gdal(root / f"{i}.tif", blocks(i, 5 if i else 2, 1, 200))
    (root / "6.tif").write_bytes(b"II*\0")
    assert run_prepare("pack", root, tmp_path / "pack") == 0
    said = capsys.readouterr().out
    assert "1 images: 2 channels of uint16" in said and "5 images: 5 channels" in said
    assert "1 of 7 images cannot be read" in said


def test_a_line_break_in_a_name_breaks_no_line(tmp_path, capsys):
    for name, content in {"a\nb.png": b"junk", "c\nd.tif": huge_tiff()}.items():
        make_files(tmp_path / "tree", name)
        (tmp_path / "tree" / name).write_bytes(content)
    write_by_gdal(tmp_path / "tree/e\nf.png", blocks(0, 3, 0, 255, "uint8"), "PNG")
    write_by_gdal(tmp_path / "tree/g.png", blocks(0, 1, 0, 255, "uint8"), "PNG")
    assert run_prepare("scan", tmp_path / "tree") == 1
    said = capsys.readouterr().out
    for name in ("a\\nb.png", "c\\nd.tif", "e\\nf.png"):
        assert said.count(f"/{name}'") == 1, said


def test_patterns_that_match_nothing_are_quoted(tmp_path, capsys):
    picture = tmp_path / "tree/images/1.png"
    write_by_gdal(picture, blocks(0, 3, 0, 255, "uint8"), "PNG")
    assert run_prepare("scan", tmp_path / "tree", "--exclude", "MASKS") == 0
    assert "0 excluded by MASKS" in capsys.readouterr().out
    assert run_prepare("pack", tmp_path / "tree", tmp_path / "pack") == 0
    for folder in ("tree", "pack"):
        assert run_prepare("scan", tmp_path / folder, "--include", "image") == 2
        assert "1 not included by image" in capsys.readouterr().err


def test_kinds_and_what_is_left_out_are_counted(tmp_path, capsys):
    root = tmp_path / "tree"
    for i in range(3):
        write_by_gdal(root / f"images/{i}.tif", blocks(i, 5, 1, 200))
        write_by_gdal(root / f"masks/{i}.tif", blocks(i, 1, 0, 5, "uint8"))
        (root / f"images/{i}.tif.aux.xml").touch()
    assert run_prepare("scan", root) == 0
    said = capsys.readouterr().out
    assert "left out 3 with the extension .xml" in said
    assert "3 images: 5 channels of uint16, for training only from a pack" in said
    assert "3 images: 3 channels of uint8" in said and "--exclude PATTERN" in said
    assert run_prepare("stats", root, "--exclude", "masks") == 0
    said = capsys.readouterr().out
    assert "3 excluded by masks" in said and "--exclude" not in said
    assert run_prepare("pack", root, tmp_path / "pack", "--include", "images") == 0
    assert "3 not included" in capsys.readouterr().out
    assert len(image_list.list_images(str(tmp_path / "pack"))) == 3
    assert run_prepare("scan", root, "--include", "imgaes") == 2
    assert "6 not included" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("masks", ["a/masks/1.png", "masks/x/2.png"]),
        ("*_mask.png", ["a/1_mask.png"]),
        ("a/*", ["a/masks/1.png", "a/1_mask.png", "a/b/c.png"]),
        ("a/b/c.png", ["a/b/c.png"]),
        ("[12].png", ["a/masks/1.png", "masks/x/2.png"]),
        ("MASKS", []),
    ],
)
def test_patterns(pattern, matching, tmp_path):
    names = ["a/masks/1.png", "masks/x/2.png", "a/1_mask.png", "a/b/c.png", "z.png"]
    assert [name for name in names if data.matches(name, pattern)] == matching
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    kept = sorted(set(names) - set(matching))
    assert data.scan(str(tmp_path), exclude=[pattern]).names == kept


def test_patterns_choose_the_same_images_of_a_tree_and_of_its_pack(tmp_path, capsys):
    """Although a pack gives large pictures, and bands, another ending."""
    root, pack = tmp_path / "tree", tmp_path / "pack"
    for i, side in enumerate((32, 160)):
        write_by_gdal(root / f"{i}_rgb.png", blocks(i, 3, 0, 255, "uint8", side), "PNG")
        write_by_gdal(root / f"{i}_mask.png", blocks(i, 1, 0, 6, "uint8", side), "PNG")
        write_by_gdal(root / f"{i}.tif", blocks(i, 5, 0, 255, "uint8"))
    assert run_prepare("pack", root, pack, "--max-side", 100) == 0
    capsys.readouterr()
    packed = image_list.list_images(str(pack))
    assert sum(packed.name(i).endswith((".png.jpg", ".tif.npy")) for i in range(6)) == 4
    for patterns in (
        {"exclude": ["*_mask.png"]},
        {"include": ["*_rgb.png"]},
        {"include": ["*.tif"], "exclude": ["1.tif"]},
        {"exclude": ["nothing"]},
    ):
        chosen, said = [], []
        for folder in (root, pack):
            files = image_list.list_images(str(folder), **patterns)
            stems = {Path(files.name(i)).name.partition(".")[0] for i in range(len(files))}
            chosen.append((len(files), stems))
            said.append(capsys.readouterr().out.partition(":")[2])
        assert chosen[0] == chosen[1] and said[0] == said[1] != ""


def test_training_takes_patterns_and_says_what_it_does(tmp_path):
    root = tmp_path / "tree"
    for i in range(4):
        write_by_gdal(root / f"images_png/{i}.png", blocks(i, 3, 0, 255, "uint8"), "PNG")
        write_by_gdal(root / f"masks_png/{i}.png", blocks(i, 1, 0, 6, "uint8"), "PNG")
    flags = "--model tiny --img-size 32 --device cpu --precision fp32 --workers 0 --steps 1"
    argv = [*flags.split(), "--global-batch", "4", "--data", str(root), "--exclude", "masks_*"]
    (result,) = run_ranks(1, [Run(argv, params=False, to=str(tmp_path / "out"))], tmp_path)
    assert result.status == [0], result.errors
    assert "left out 4 excluded by masks_*" in result.output
    assert "ImageNet's" in result.output


def test_training_does_not_start_where_no_image_can_be_read(tmp_path):
    root = tmp_path / "tree"
    for i in range(20):
        write_by_gdal(root / f"{i:02}.tif", blocks(i, 5, 1, 200))
    flags = "--model tiny --img-size 32 --device cpu --precision fp32 --workers 0 --steps 1"
    argv = [*flags.split(), "--global-batch", "4", "--data", str(root)]
    (result,) = run_ranks(1, [Run(argv, params=False, to=str(tmp_path / "out"))], tmp_path)
    assert result.status == [2]
    assert "none of 16 images can be read" in result.errors and "prepare.py pack" in result.errors


# --- statistics, packs, classes


def test_statistics_are_found_under_every_spelling_of_a_folder(tmp_path, monkeypatch):
    root = tmp_path / "images"
    root.mkdir()
    np.save(root / "1.npy", blocks(0, 3, 0, 200, "uint8"))
    (tmp_path / "link").symlink_to("images")
    monkeypatch.chdir(root)
    measured = tmp_path / "images.stats.json"
    for spelling in (".", "../link", "../images/.", "../images/", str(root)):
        assert run_prepare("stats", spelling) == 0
        for other in (".", str(tmp_path / "link"), str(root)):
            assert image_source.find_stats(other, 3)[0] != data.IMAGENET
        measured.unlink()
        assert sorted(os.listdir(tmp_path)) == ["images", "link"]


def read_with_few_files(pack: str) -> tuple[list[str], list]:
    """Read a pack twice in this process, which may open 40 files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
    files = image_list.list_images(pack)
    report = checking.read_part(None, files)
    return report.problems, [data.open_array(files.read(i)) for i in range(len(files))]


@pytest.mark.full
def test_a_pack_of_more_shards_than_open_files(tmp_path, monkeypatch):
    root = tmp_path / "tree"
    root.mkdir()
    for i in range(60):
        np.save(root / f"{i:02}.npy", blocks(i, 2, 0, 200))
    monkeypatch.setattr("storage.packing.SHARD_BYTES", 1)
    assert run_prepare("pack", root, tmp_path / "pack") == 0
    assert len(image_list.list_images(str(tmp_path / "pack")).shards) == 60
    # in a process of its own: nobody knows how many files this one has open
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        problems, read = pool.apply(read_with_few_files, [str(tmp_path / "pack")])
    assert not problems
    np.testing.assert_array_equal(read, [blocks(i, 2, 0, 200) for i in range(60)])


def test_out_of_open_files_is_no_broken_image(tmp_path, monkeypatch):
    (tmp_path / "1.jpg").touch()
    files = image_list.list_images(str(tmp_path))

    def fail(self, index):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(image_list.ImageList, "open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        checking.read_part(None, files)


def test_a_long_member_is_read_in_parts(tmp_path, monkeypatch):
    """Linux reads at most 2,147,479,552 bytes at once."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, start: pread(file, min(size, 100), start))
    (tmp_path / "tree").mkdir()
    array = blocks(0, 3, 0, 200)
    np.save(tmp_path / "tree/1.npy", array)
    assert run_prepare("pack", tmp_path / "tree", tmp_path / "pack") == 0
    files = image_list.list_images(str(tmp_path / "pack"))
    np.testing.assert_array_equal(data.open_array(files.read(0)), array)
    with tarfile.open(tmp_path / "pack/shard-000000.tar") as archive:
        member = archive.extractfile("1.npy")
        np.testing.assert_array_equal(np.load(io.BytesIO(member.read())), array)


def make_files(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return image_list.list_images(str(root))


def test_classes_one_level_above_their_images(tmp_path):
    names = [f"train/{c}/images/{i}.jpg" for c in ("n01", "n02") for i in range(2)]
    files = make_files(tmp_path, *names)
    assert files.classes == ("n01", "n02") and files.labels.tolist() == [0, 0, 1, 1]
    (described,) = classes.describe_classes(files)
    assert "2 classes of 2 to 2 images: n01 (2), n02 (2)" in described


def test_classes_that_are_none_get_a_warning_or_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="a score needs two"):
        classes.describe_classes(make_files(tmp_path / "one", "a/1.jpg", "a/2.jpg", "3.jpg"))
    split = make_files(tmp_path / "split", "train/1.jpg", "Val/1.jpg")
    assert "Val, train do not look like classes" in classes.describe_classes(split)[1]


# --- scenes


def test_scenes_are_stacked_by_the_names_of_their_bands(tmp_path, capsys):
    """With 10 m and 20 m in folders of their own, beside what is of no band."""
    root = tmp_path / "scenes"
    truth = {}
    for scene in ("T1", "T2"):
        ten, twenty = blocks(len(truth), 2, 0, 3000), blocks(9 + len(truth), 1, 0, 3000, side=16)
        for band, pixels in (("B04", ten[:1]), ("B03", ten[1:])):
            write_by_gdal(root / f"{scene}/R10m/{scene}_{band}_10m.tif", pixels)
        write_by_gdal(root / f"{scene}/R20m/{scene}_B11_20m.tif", twenty)
        write_by_gdal(root / f"{scene}/R20m/{scene}_SCL_20m.tif", blocks(0, 1, 0, 9, "uint8"))
        with rasterio.open(root / f"{scene}/R20m/{scene}_B11_20m.tif") as file:
            resampled = file.read(out_shape=(32, 32), resampling=rasterio.enums.Resampling.nearest)
        truth[scene] = np.concatenate([ten, resampled])
    (root / "T3/R10m").mkdir(parents=True)
    (root / "T3/R10m/T3_B04_10m.tif").write_bytes((root / "T1/R10m/T1_B04_10m.tif").read_bytes())
    bands = ["--stack", "B04_10m,B03_10m,B11_20m"]
    assert run_prepare("pack", root, tmp_path / "pack", *bands) == 0
    said = capsys.readouterr().out
    assert "T3: ValueError: no file of band B03_10m, B11_20m" in said
    assert "2 images: 3 channels of uint16" in said and "of no band: 2 files" in said
    files = image_list.list_images(str(tmp_path / "pack"))
    assert [files.name(i) for i in range(3)] == ["T1.npy", "T2.npy", "T3"]
    for i, scene in enumerate(truth):
        np.testing.assert_array_equal(data.open_array(files.read(i)), truth[scene])
    stats = json.loads(Path(image_list.stats_file(str(tmp_path / "pack"))).read_text())
    assert stats["bands"] == ["B04_10m", "B03_10m", "B11_20m"]


def test_a_scene_is_unreadable_where_all_its_bands_are_missing(tmp_path, capsys):
    """One band without a value is kept; what is wrong with a band names its file."""
    empty = np.zeros((1, 32, 32), "uint16")
    for scene, missing in (("T1", ["B2"]), ("T2", ["B2", "B3"])):
        for band in ("B2", "B3"):
            pixels = empty if band in missing else blocks(0, 1, 1, 200)
            write_by_gdal(tmp_path / f"scenes/{scene}_{band}.tif", pixels, nodata=0)
    write_by_gdal(tmp_path / "scenes/T3_B2.tif", empty + 1)
    (tmp_path / "scenes/T3_B3.tif").write_bytes(b"II*\0")
    argv = ["pack", tmp_path / "scenes", tmp_path / "pack", "--stack", "B2,B3"]
    assert run_prepare(*argv) == 0
    said = capsys.readouterr().out
    assert "1 images: 2 channels of float32" in said
    assert "T2: ValueError: nodata (NaN) in all pixels" in said
    assert "T3: ValueError: T3_B3.tif: broken TIFF" in said


def test_names_of_other_bands_are_what_stack_takes(tmp_path, capsys):
    for band in ("B02_10m", "SCL_20m"):
        write_by_gdal(tmp_path / f"scenes/R{band[-3:]}/T1_{band}.tif", blocks(0, 1, 0, 9))
    argv = ["pack", tmp_path / "scenes", tmp_path / "pack", "--stack"]
    assert run_prepare(*argv, "B02") == 2
    assert "other names end with: 1 B02_10m, 1 SCL_20m" in capsys.readouterr().err
    assert run_prepare(*argv, "B02_10m,SCL_20m") == 0


def test_masks_of_bands_are_no_scenes(tmp_path, capsys):
    """Sentinel-2's products name them like bands, in the folder QI_DATA."""
    scene = tmp_path / "scenes/T1.SAFE/GRANULE/L1C_T1"
    for band in ("B02", "B03"):
        write_by_gdal(scene / f"IMG_DATA/T1_{band}.tif", blocks(0, 1, 300, 900))
        mask = np.ones((1, 32, 32), "uint8")
        write_by_gdal(scene / f"QI_DATA/MSK_DETFOO_{band}.tif", mask)
    argv = ["pack", tmp_path / "scenes", tmp_path / "pack", "--stack"]
    assert run_prepare(*argv, "B02_10m,B03_10m") == 2
    assert "no file of band B02_10m, B03_10m; other names end with: 2 B0" in capsys.readouterr().err
    assert run_prepare(*argv, "B02,B03") == 0
    said = capsys.readouterr().out
    assert "left out, being of no band: 2 files, ending with: 1 B02, 1 B03" in said
    assert "1 images: 2 channels of uint16" in said


@pytest.mark.parametrize(
    ("bands", "sentence"),
    [("B4,B3", "no file of band B3; other names end with: 1 QA"), ("B4,B4", "no list of names")],
)
def test_bands_that_are_not_there_get_a_sentence(bands, sentence, tmp_path, capsys):
    for band in ("B4", "QA"):
        write_by_gdal(tmp_path / f"scenes/1_{band}.tif", blocks(0, 1, 0, 9))
    argv = ["pack", str(tmp_path / "scenes"), str(tmp_path / "pack"), "--stack", bands]
    try:
        status = prepare.main(argv)
    except SystemExit as exit:
        status = exit.code
    assert status == 2 and sentence in capsys.readouterr().err
    assert not (tmp_path / "pack").exists()


def test_a_file_of_a_band_is_one_band_of_the_same_area(tmp_path, capsys):
    """Within a pixel of the coarser band; larger bands are reduced, and that is said."""
    sizes = {"T1": (66, 63), "T2": (64, 66), "T3": (44, 42), "T4": (16, 31)}
    for scene, (height, width) in sizes.items():
        write_by_gdal(tmp_path / f"scenes/{scene}_B1.tif", blocks(0, 1, 0, 9, side=24)[:, :22, :21])
        pixels = blocks(1, 1, 0, 9, side=72)[:, :height, :width]
        write_by_gdal(tmp_path / f"scenes/{scene}_B2.tif", pixels)
    write_by_gdal(tmp_path / "scenes/T5_B1.png", blocks(0, 3, 0, 9, "uint8"), "PNG")
    write_by_gdal(tmp_path / "scenes/T5_B2.tif", blocks(0, 1, 0, 9))
    argv = ["pack", tmp_path / "scenes", tmp_path / "pack", "--stack", "B1,B2"]
    assert run_prepare(*argv) == 0
    said = capsys.readouterr().out
    assert "2 images: 2 channels of uint16, larger bands reduced to the size of B1" in said
    for scene in ("T2", "T4"):
        told = f"T{scene[1]}_B2.tif: {sizes[scene]} pixels (H, W), which cover another area"
        assert f"{told} than (22, 21) of B1" in said
    assert "T5: ValueError: T5_B1.png: 3 bands, not 1" in said
    files = image_list.list_images(str(tmp_path / "pack"))
    with rasterio.open(tmp_path / "scenes/T1_B2.tif") as file:
        truth = file.read(1, out_shape=(22, 21), resampling=rasterio.enums.Resampling.nearest)
    np.testing.assert_array_equal(data.open_array(files.read(0))[1], truth)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        # Folders like those of a resolution may be classes.
        (["5m/T1_", "5m/T2_", "10m/T1_"], ["10m/T1", "5m/T1", "5m/T2"]),
        (["5m/T1_", "10m/T2_"], ["10m", "5m"]),
        ([""], ["scenes"]),
        (["a/", "b/x_", "b/y_"], ["a", "b/x", "b/y"]),
    ],
)
def test_scenes_get_names_of_their_own(starts, expected, tmp_path):
    names = [f"{start}B{i}.tif" for start in starts for i in (1, 2)]
    files = make_files(tmp_path / "scenes", *names)
    assert stacking.find_scenes(files, ("B1", "B2")).names == expected


def test_two_scenes_of_one_name_are_refused(tmp_path):
    files = make_files(tmp_path, "a/B1.tif", "a_B1.tif")
    with pytest.raises(ValueError, match="two scenes of the name a: pack them one by one"):
        stacking.find_scenes(files, ("B1",))


def test_two_files_of_one_band_are_refused(tmp_path, capsys):
    for ending in ("tif", "jp2"):
        (tmp_path / f"scenes/1_B2.{ending}").parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / f"scenes/1_B2.{ending}")
    assert run_prepare("pack", tmp_path / "scenes", tmp_path / "pack", "--stack", "B2") == 2
    said = capsys.readouterr().err
    assert "two files of band B2 in one scene" in said and "--include or --exclude" in said


def test_a_scene_that_lacks_a_band_does_not_make_others_of_classes_like_5m_collide(tmp_path):
    names = ("5m/T1_B1", "5m/T1_B2", "10m/T1_B1", "10m/T1_B2", "5m/T2_B1")
    files = make_files(tmp_path / "scenes", *(f"{name}.tif" for name in names))
    scenes = stacking.find_scenes(files, ("B1", "B2"))
    assert scenes.names == ["10m/T1", "5m/T1", "5m/T2"]
    found = [[row["name"].decode() for row in rows] for rows in scenes.files]
    assert found[:2] == [[f"{kind}/T1_B{i}.tif" for i in (1, 2)] for kind in ("10m", "5m")]
    assert found[2] == ["5m/T2_B1.tif", ""]
    # Where no scene is complete, what keeps folders from being joined is still said.
    doubled = make_files(tmp_path / "doubled", "R10m/B1.tif", "R20m/B1.tif", "R60m/B2.tif")
    with pytest.raises(ValueError, match="two files of band B1 in one scene"):
        stacking.find_scenes(doubled, ("B1", "B2"))


def test_a_band_that_has_vanished_ends_the_pack_and_a_link_to_nothing_does_not(tmp_path):
    """A file system that went away is no unreadable scene."""
    root = tmp_path / "scenes"
    for name in ("T1_B1", "T1_B2", "T2_B1", "T2_B2", "T3_B1"):
        write_by_gdal(root / f"{name}.tif", blocks(0, 1, 1, 9))
    (root / "T3_B2.tif").symlink_to("nowhere")
    scenes = stacking.find_scenes(image_list.list_images(str(root)), ("B1", "B2"))
    options = packing.PackOptions(bands=("B1", "B2"))
    members, report = packing.write_shard(options, tmp_path / "1.tar", scenes)
    assert [member.size > 0 for member in members] == [True, True, False]
    assert "T3_B2.tif: " in report.problems[0]
    (root / "T2_B1.tif").unlink()
    with pytest.raises(FileNotFoundError):
        packing.write_shard(options, tmp_path / "2.tar", scenes)
