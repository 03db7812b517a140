"""Read TIFF of any number of bands, as GeoTIFF often is, by the package tifffile."""

import io
import logging
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

import data

BITS, SAMPLES, EXTRA = 258, 277, 338  # tags of TIFF 6.0: bits and samples per pixel, extra samples


def read_bands(content: bytes) -> np.ndarray | bytes:
    """Decode a TIFF that is no picture -> (C, H, W); any file that data.py reads comes back as is.

    Types that data.py does not take become float32. ImportError where tifffile is missing.
    """
    if content[:4] not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+") or _is_picture(content):
        return content
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what it logs names no file
    series: Any = tifffile.TiffFile(io.BytesIO(content)).series[0]
    bands = series.asarray()
    if series.axes.endswith("S"):  # pixel by pixel, not band by band
        bands = np.moveaxis(bands, -1, 0)
    if bands.ndim == 2 and bands.dtype.name in ("uint8", "uint16"):
        return content  # grey, and a page of another size beside it: an overview, say
    bands = bands.reshape(-1, *bands.shape[-2:])  # also of one band, and of a page each
    return bands if bands.dtype.name in data.ARRAY_DTYPES else bands.astype("float32")


def _is_picture(content: bytes) -> bool:
    """Tell whether Pillow reads all that is in a TIFF: grey, RGB, CMYK, with alpha or without."""
    try:
        image: Any = Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        return False
    tags, samples = image.tag_v2, image.tag_v2.get(SAMPLES, 1)
    deep = samples > 1 and max(tags.get(BITS, (1,))) > 8  # Pillow drops the lower 8 bits
    left_out = 0 in tags.get(EXTRA, ())  # an unspecified sample is neither alpha nor colour
    pages = samples == 1 and image.n_frames > 1  # a band each
    return not (deep or left_out or pages or image.mode in ("I", "F"))
