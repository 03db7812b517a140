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

    Types that data.py does not take become float32. ImportError where a package is missing.
    """
    if content[:4] not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+") or _is_picture(content):
        return content
    try:
        import tifffile

        logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what it logs names no file
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            series: Any = file.series[0]
            bands, axes = series.asarray(), series.axes
    except IndexError:  # it has no images
        raise ValueError("no picture in this TIFF") from None
    except (ImportError, ValueError) as error:  # compressed files need imagecodecs, it says
        name = "tifffile" if isinstance(error, ImportError) else "imagecodecs"
        if name == "imagecodecs" and name not in str(error):
            raise
        raise ImportError(f"this kind of TIFF needs a package: pip install {name}") from None
    order = [i for i, axis in enumerate(axes) if axis not in "YX"]  # S, or of pages
    if len(order) > 1:
        raise ValueError(f"not (C, H, W): the axes of this TIFF are {axes}")
    bands = bands.transpose(*order, axes.index("Y"), axes.index("X"))  # planar or by pixel
    if bands.ndim == 2 and bands.dtype.name in ("uint8", "uint16"):
        return content  # grey, and a page of another size beside it: an overview, say
    known = bands.dtype.name in data.ARRAY_DTYPES
    bands = bands.astype(bands.dtype.name if known else "float32", order="C")  # of this machine
    return bands[None] if bands.ndim == 2 else bands


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
