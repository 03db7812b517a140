"""Read what is no picture as an array (C, H, W): TIFF of any bands, JPEG 2000, .npy of any type.

TIFF is read by the package tifffile. Training reads what comes out of here from a pack.
"""

import io
import logging
import math
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import data

GDAL_NODATA = 42113  # tag of TIFF: the number that stands for a missing pixel, as text
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MASK = 4  # a bit of a page's subfile type
INSTALL = "pip install tifffile imagecodecs"
EXACT_IN_FLOAT32 = 2**24  # every whole number up to it


class TooLargeError(ValueError):
    """A header promises more pixels than are read."""


def read_image(content: bytes, nodata: float | None = None) -> data.AnyImage:
    """Read a file as `pack` does -> a picture, not decoded yet, or an array (C, H, W).

    Arrays are of a type that training takes. Pixels of `nodata`, or of what the file calls so, are
    NaN in float32. ValueError, or what a decoder raises, where it cannot be read; ImportError where
    tifffile is missing.
    """
    if not content.startswith(b"\x93NUMPY"):
        try:
            image, _ = data.open_image(content)
            assert isinstance(image, Image.Image)
            if image.format in ("TIFF", "JPEG2000") and image.has_transparency_data:
                data.check_alpha(image)
            if nodata is None or not can_hold(image, nodata):
                return image
        except data.NotAPictureError:
            pass
    bands = read_bands(content, nodata)
    data.check_array(bands)
    return bands


def can_hold(image: Image.Image, nodata: float) -> bool:
    """Tell whether a pixel of a picture can have this value."""
    largest = 2**16 if image.mode.startswith("I") else 2**8
    return nodata.is_integer() and 0 <= nodata < largest


def declares_missing(image: Image.Image) -> bool:
    """Tell whether a picture, not decoded yet, says that some of its pixels are missing."""
    tags = getattr(image, "tag_v2", None)
    if image.format != "TIFF" or tags is None:
        return False
    if GDAL_NODATA in tags:
        return True
    masks = [page for page in data.other_pages(image) if page.get(data.SUBFILE_TYPE, 0) & MASK]
    return len(masks) > 0


def read_bands(content: bytes, nodata: float | None = None) -> np.ndarray:
    """Read any image file as an array (C, H, W) of the values that it stores, as `read_image`.

    All its pixels may be nodata.
    """
    if content.startswith(TIFF_STARTS):
        tiff = read_tiff(content)
        if nodata is None:
            nodata = tiff.nodata
        return to_training_type(tiff.bands, nodata, tiff.mask)
    if content.startswith(b"\x93NUMPY"):
        return to_training_type(channels_first(data.open_array(content)), nodata)
    image = data.open_picture(content)
    if image.format == "JPEG2000":
        return to_training_type(read_jpeg2000(image, content), nodata)
    if image.mode in ("1", "P", "PA"):  # of bits, and of colours in a table
        image = image.convert("RGB")
    return to_training_type(channels_first(np.asarray(image)), nodata)


def channels_first(array: np.ndarray) -> np.ndarray:
    """Make (C, H, W) of (H, W), and of (H, W, C) with at most four channels."""
    if array.ndim == 2:
        return array[None]
    if array.ndim == 3 and array.shape[2] <= 4 < min(array.shape[:2]):
        return np.moveaxis(array, 2, 0)
    return array


class Tiff(NamedTuple):
    """What a TIFF holds."""

    bands: np.ndarray  # (C, H, W), as stored
    nodata: float | None  # the number for missing pixels, if it has one
    mask: np.ndarray | None  # (H, W) bool, False where a pixel is missing


def read_tiff(content: bytes) -> Tiff:
    """Decode all bands of a TIFF; ValueError where it is broken, ImportError without a package.

    Bands are in the order of the file: page by page, and in a page sample by sample.
    """
    try:
        import tifffile
    except ImportError:
        raise ImportError(f"this TIFF needs a package: type `{INSTALL}`") from None
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what it logs names no file
    try:
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            return decode_tiff(file)
    except Exception as error:  # tifffile raises many kinds for a broken file
        if "imagecodecs" in str(error):
            raise ImportError(f"{error}: type `{INSTALL}`") from None
        if isinstance(error, TooLargeError) or not data.is_file_error(error):
            raise
        raise ValueError(f"broken TIFF, which tifffile cannot read ({error})") from None


def decode_tiff(file: Any) -> Tiff:
    """Decode an open tifffile.TiffFile; raises whatever tifffile does."""
    every = [series for series in file.series if not is_reduced_or_mask(series)]
    first = every[0]
    same = [series for series in every if plane_size(series) == plane_size(first)]
    size = sum(series.size * series.dtype.itemsize for series in same)
    if size > data.LARGEST_IMAGE:
        raise TooLargeError(f"{size / 2**30:.1f} GiB of pixels by its header: more than 4 GiB")
    parts = [bands_first(series.asarray(maxworkers=1), series.axes) for series in same]
    bands = parts[0] if len(parts) == 1 else np.concatenate(parts)
    tag = file.pages.first.tags.get(GDAL_NODATA)
    nodata = read_nodata(tag.value) if tag else None
    mask = None
    for page in file.pages:
        if page.subfiletype & MASK and page.shape[:2] == bands.shape[1:]:
            shown = page.asarray() != 0
            mask = shown if mask is None else mask & shown
    return Tiff(bands, nodata, mask)


def is_reduced_or_mask(series: Any) -> bool:
    """Tell whether a series of pages shows another one smaller, or which of its pixels count."""
    return bool(series.keyframe.subfiletype & data.REDUCED_OR_MASK)


def plane_size(series: Any) -> tuple[int, int]:
    """Return the height and width of a series of pages."""
    return series.keyframe.imagelength, series.keyframe.imagewidth


def bands_first(pixels: np.ndarray, axes: str) -> np.ndarray:
    """Make (C, H, W) of an array whose axes tifffile names by letters."""
    rows = axes.index("Y")
    columns = axes.index("X")
    others = [i for i in range(pixels.ndim) if i not in (rows, columns)]
    height, width = pixels.shape[rows], pixels.shape[columns]
    return pixels.transpose(*others, rows, columns).reshape(-1, height, width)


def read_nodata(text: Any) -> float | None:
    """Read GDAL's tag; None where it holds no number."""
    try:
        return float(str(text).strip("\0 "))
    except ValueError:
        return None


def read_jpeg2000(image: Image.Image, content: bytes) -> np.ndarray:
    """Decode JPEG 2000 (C, H, W), as stored; ValueError for what Pillow does not keep."""
    components, bits, signed = data.jpeg2000_kind(content)
    if signed:
        raise ValueError("JPEG 2000 of signed numbers")
    if bits > 16 or (bits > 8 and components > 1):
        raise ValueError(
            f"JPEG 2000 of {components} bands of {bits} bits: Pillow keeps 8 of them; "
            "convert it to GeoTIFF (gdal_translate)"
        )
    pixels = np.asarray(image)
    # Pillow moves the bits up until they fill the type.
    pixels = pixels >> (8 * pixels.dtype.itemsize - bits)
    return channels_first(pixels)


def to_training_type(
    bands: np.ndarray, nodata: float | None = None, mask: np.ndarray | None = None
) -> np.ndarray:
    """Convert (C, H, W) to a type that training takes; `nodata` and what is not in `mask` to NaN.

    uint8, uint16 and float32 stay as they are, but for nodata; all else becomes float32. ValueError
    for complex numbers, and for whole numbers that float32 would round.
    """
    if bands.dtype.kind not in "biuf":
        raise ValueError(f"pixels of {bands.dtype}: store real numbers, such as the magnitude")
    if bands.dtype == bool:
        bands = bands.astype(np.uint8)
    missing = find_nodata(bands, nodata)
    if mask is not None:
        outside = np.broadcast_to(~mask, bands.shape)
        missing = outside if missing is None else missing | outside
    if bands.dtype.name not in data.ARRAY_DTYPES or missing is not None:
        if bands.dtype.kind in "iu" and bands.dtype.itemsize > 2 and bands.size:
            valid = bands if missing is None else bands[~missing]
            largest = max(abs(int(valid.min(initial=0))), abs(int(valid.max(initial=0))))
            if largest > EXACT_IN_FLOAT32:
                raise ValueError(f"numbers up to {largest}, which float32 would round")
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            bands = bands.astype(np.float32)
    if missing is not None:
        bands[missing] = np.nan
    return bands


def find_nodata(bands: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """Find the pixels of nodata (C, H, W) bool; None where the type cannot hold that number."""
    if nodata is None or math.isnan(nodata):
        return None  # NaN is nodata in any case
    if bands.dtype.kind in "iu":
        limits = np.iinfo(bands.dtype)
        if not nodata.is_integer() or not limits.min <= nodata <= limits.max:
            return None
    with np.errstate(over="ignore"):
        return bands == bands.dtype.type(nodata)
