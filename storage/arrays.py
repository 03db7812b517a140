"""Read what is no picture as an array (C, H, W): TIFF of any bands, JPEG 2000, .npy of any type.

TIFF is read by the package tifffile. Training reads what comes out of here from a pack.
"""

import io
import logging
import math
from typing import Any

import numpy as np
from PIL import Image

import data

GDAL_NODATA = 42113  # tag of TIFF: the number that stands for a missing pixel, as text
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
EXACT_IN_FLOAT32 = 2**24  # every whole number up to it


def read_image(content: bytes, nodata: float | None = None) -> data.AnyImage:
    """Read a file as `pack` does -> a picture, not decoded yet, or an array (C, H, W).

    Arrays are of a type that training takes. Pixels of `nodata`, or of what the file calls so, are
    NaN in float32. ValueError, or what a decoder raises, where it cannot be read; ImportError where
    tifffile is missing.
    """
    if content.startswith(b"\x93NUMPY"):
        return to_training_type(channels_first(data.open_array(content)), nodata)
    try:
        image, _ = data.open_image(content)
        assert isinstance(image, Image.Image)
        if image.format in ("TIFF", "JPEG2000") and image.has_transparency_data:
            data.check_alpha(image)
        return image
    except data.NotAPictureError:
        return read_bands(content, nodata)


def read_bands(content: bytes, nodata: float | None = None) -> np.ndarray:
    """Read any image file as an array (C, H, W) of the values that it stores, as `read_image`."""
    if content.startswith(TIFF_STARTS):
        bands, declared = read_tiff(content)
        return to_training_type(bands, declared if nodata is None else nodata)
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


def read_tiff(content: bytes) -> tuple[np.ndarray, float | None]:
    """Decode all bands of a TIFF (C, H, W), as stored; and the number for nodata, if it has one.

    Bands are in the order of the file: page by page, and in a page sample by sample.
    """
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what it logs names no file
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        every = [series for series in file.series if not is_reduced_or_mask(series)]
        first = every[0]
        same = [series for series in every if plane_size(series) == plane_size(first)]
        size = sum(series.size * series.dtype.itemsize for series in same)
        if size > data.LARGEST_IMAGE:
            raise ValueError(f"{size / 2**30:.1f} GiB of pixels by its header: more than 4 GiB")
        parts = [bands_first(series.asarray(maxworkers=1), series.axes) for series in same]
        tag = file.pages.first.tags.get(GDAL_NODATA)
    bands = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return bands, read_nodata(tag.value) if tag else None


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


def to_training_type(bands: np.ndarray, nodata: float | None = None) -> np.ndarray:
    """Convert (C, H, W) to a type that training takes, `nodata` to NaN; ValueError.

    uint8, uint16 and float32 stay as they are, but for nodata; all else becomes float32. ValueError
    for complex numbers, and for whole numbers that float32 would round.
    """
    if bands.dtype.kind not in "biuf":
        raise ValueError(f"pixels of {bands.dtype}: store real numbers, such as the magnitude")
    if bands.dtype == bool:
        bands = bands.astype(np.uint8)
    missing = find_nodata(bands, nodata)
    if bands.dtype.name not in data.ARRAY_DTYPES or missing is not None:
        if bands.dtype.kind in "iu" and bands.dtype.itemsize > 2 and bands.size:
            largest = max(abs(int(bands.min())), abs(int(bands.max())))
            if largest > EXACT_IN_FLOAT32:
                raise ValueError(f"numbers up to {largest}, which float32 would round")
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            bands = bands.astype(np.float32)
    if missing is not None:
        bands[missing] = np.nan
    data.check_array(bands)
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
