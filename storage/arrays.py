"""Read rasters that are no pictures (see data.py) as bands: TIFF, JPEG 2000, .npy of any type.

The package tifffile reads TIFF. `prepare.py pack` writes these bands into a pack, as arrays.
"""

import io
import logging
import math
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image, TiffImagePlugin, UnidentifiedImageError
from PIL.ExifTags import Base as Tag

import data

GDAL_NODATA = 42113  # a tag of TIFF: the number that stands for a missing pixel, as text
BLACK_IS_ZERO = (1, 2)  # TIFF's tag PhotometricInterpretation, of plain grey and RGB
PALETTE = 3  # and of indices into a table of colours
JPEG_COLOURS = (2, 6)  # RGB and YCbCr
UNCOMPRESSED = 1  # a value of TIFF's tag Compression
JPEG = 7  # and another
MASK = 4  # the bit of TIFF's tag NewSubfileType that says that a page is a mask
NOT_IN_EVERY_PILLOW = ("lzma", "webp", "zstd")  # compressions that its library of TIFF may lack
READ_AT_ONCE = 2**22  # bytes of a TIFF that are held in addition to its pixels
INSTALL = "pip install tifffile imagecodecs"
EXACT_IN_FLOAT32 = 2**24  # float32 holds every whole number up to this one


class RefusedError(ValueError):
    """A file that may be sound, but that we do not read."""


class Band(NamedTuple):
    """One band as a file stores it, and which of its pixels are missing."""

    stored: np.ndarray  # (h, w)
    nodata: float | None = None  # the number for a missing pixel
    mask: np.ndarray | None = None  # (h, w) bool, False for a missing pixel
    about: str = ""  # what the user should know of it


class Bands:
    """An image (C, H, W) of a dtype that training takes, made channel by channel when it is used.

    So memory holds only what the files store, and one channel more. A band of another resolution is
    resampled to that of the first band, by the nearest pixel; missing pixels become NaN. ValueError
    for numbers that no dtype of training holds.
    """

    packed_only = True  # training can read such a file only from a pack

    def __init__(self, bands: Sequence[Band]) -> None:
        self.bands = bands
        self.shape = (len(bands), *bands[0].stored.shape)
        self.dtype = np.result_type(*[type_for_training(band) for band in bands])
        self.about = ", ".join(sorted({band.about for band in bands if band.about}))
        for band in bands:
            check_range(band)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield each channel (H, W)."""
        _, height, width = self.shape
        for band in self.bands:
            yield resample_nearest(pixels_for_training(band, self.dtype), height, width)


def read_image(file: IO[bytes], nodata: float | None = None) -> Image.Image | Bands:
    """Read a file as `pack` does -> a picture, not decoded yet, or bands.

    A pixel becomes NaN if it equals `nodata` (by default the file's own nodata value), or if a mask
    in the file hides it. ValueError, or an error of a decoder, if the file cannot be read;
    ImportError without tifffile.
    """
    image = open_whole_picture(file)
    if image:
        deep = "16" in image.mode or has_deep_colours(image)
        if not can_store(np.dtype(np.uint16 if deep else np.uint8), nodata):
            return image
        if deep and not image.mode.startswith("I"):
            raise ValueError("--nodata of a 16-bit colour PNG: convert it to TIFF (gdal_translate)")
    if image and not is_plain(image):
        bands = Bands(split_bands(np.asarray(data.decode(image)), nodata))
    else:
        bands = read_bands(file, nodata)
    check_bands(bands)
    return bands


def has_deep_colours(image: Any) -> bool:
    """Tell whether Pillow keeps only 8 of the 16 bits of an opened PNG."""
    return image.format == "PNG" and "16" in str(image.tile[0][-1])


def is_plain(image: Image.Image) -> bool:
    """Tell whether a picture, not decoded yet, shows the numbers that its file stores."""
    tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
    return (
        image.mode in ("L", "RGB", "I;16", "I;16B")
        and not image.has_transparency_data
        and tags.get(Tag.PhotometricInterpretation) in (None, *BLACK_IS_ZERO)
        and tags.get(Tag.Orientation, 1) == 1
    )


def open_whole_picture(file: IO[bytes]) -> Image.Image | None:
    """Open a file that training takes as a picture; None if it is more, or no picture at all."""
    start = read_start(file)
    if start.startswith(data.NUMPY_START):
        return None
    try:
        if start.startswith(data.TIFF_STARTS):
            image: Any = Image.open(file)  # reads only the header
            data.check_picture(image)
        else:
            image, _ = data.open_image(file.read())
        if image.format in ("TIFF", "JPEG2000") and image.has_transparency_data:
            data.check_alpha(image)
        if image.info.get("compression") in NOT_IN_EVERY_PILLOW and not can_decode(file):
            return None
    except (data.NeedsPackingError, UnidentifiedImageError):
        return None
    except Image.DecompressionBombError:
        if start.startswith(data.TIFF_STARTS):
            return None  # more than 2**30 pixels, but perhaps less than LARGEST_IMAGE bytes
        raise
    return image


def can_decode(file: IO[bytes]) -> bool:
    """Tell whether Pillow decodes a file."""
    try:
        Image.open(file).load()
    except OSError:
        return False
    file.seek(0)
    return True


def read_start(file: IO[bytes]) -> bytes:
    """Read the bytes that tell the format of a file, and go back."""
    file.seek(0)
    start = file.read(len(data.NUMPY_START))
    file.seek(0)
    return start


def declares_missing(image: Image.Image) -> bool:
    """Tell whether a picture, not decoded yet, says that some of its pixels are missing."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return False
    masks = [page.get(Tag.NewSubfileType, 0) & MASK for page in data.other_pages(image)]
    return GDAL_NODATA in image.tag_v2 or any(masks)


def read_bands(file: IO[bytes], nodata: float | None = None) -> Bands:
    """Read any image file as the bands that it stores; `nodata` as in `read_image`."""
    start = read_start(file)
    if start.startswith(data.TIFF_STARTS):
        return Bands(read_tiff(file, nodata))
    content = file.read()
    if start.startswith(data.NUMPY_START):
        array = data.open_array(content)
        bands = Bands(split_bands(array, nodata))
        bands.packed_only = (array.shape, array.dtype.name) != (bands.shape, bands.dtype.name)
        return bands
    image = data.open_picture(content)
    if image.format == "JPEG2000":
        return Bands(split_bands(read_jpeg2000(image, content), nodata))
    return Bands(split_bands(np.asarray(image), nodata))


def split_bands(array: np.ndarray, nodata: float | None) -> list[Band]:
    """Split an array (C, H, W), (H, W) or (H, W, C) into its bands; ValueError for any other."""
    array = channels_first(array)
    if array.ndim != 3 or not array.size:
        raise ValueError(data.describe_wrong_array(array))
    return [Band(channel, nodata) for channel in array]


def channels_first(array: np.ndarray) -> np.ndarray:
    """Turn (H, W), or (H, W, C) with at most four channels, into (C, H, W)."""
    if array.ndim == 2:
        return array[None]
    if array.ndim == 3 and array.shape[2] <= 4 < min(array.shape[:2]):
        return np.moveaxis(array, 2, 0)
    return array


def read_tiff(file: IO[bytes], nodata: float | None) -> list[Band]:
    """Decode all bands of a TIFF; ValueError if it is broken, ImportError without a package.

    The bands are in the order of the file: page by page, and in a page sample by sample.
    """
    try:
        import tifffile
    except ImportError:
        raise ImportError(f"this TIFF needs a package: type `{INSTALL}`") from None
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what it logs names no file
    try:
        # Pillow may have moved the position in the file: a new reader starts afresh.
        with tifffile.TiffFile(io.BufferedReader(file)) as tiff:  # type: ignore[type-var]
            return decode_tiff(tiff, nodata)
    except Exception as error:  # tifffile raises many kinds for a broken file
        if isinstance(error, ImportError) or "imagecodecs" in str(error):
            raise ImportError(f"{error}: type `{INSTALL}`") from None
        if isinstance(error, RefusedError) or not data.is_file_error(error):
            raise
        raise ValueError(f"broken TIFF, which tifffile cannot read ({error})") from None


def decode_tiff(tiff: Any, nodata: float | None) -> list[Band]:
    """Decode an open tifffile.TiffFile; raises whatever tifffile does."""
    pages = list_pages(tiff)
    # Each page by itself: tifffile's series would put pages of one type together, in another order.
    every = [page for page in pages if not page.subfiletype & data.REDUCED_OR_MASK] or pages
    if every is pages and any(page.subifds for page in pages):
        raise RefusedError("only a thumbnail is in a page of its own: convert it (gdal_translate)")
    same = [page for page in every if page_size(page) == page_size(every[0])]
    about = "indices of a palette" if every[0].photometric == PALETTE else ""
    if len(same) < len(every):
        about = f"without {len(every) - len(same)} pages of another size"
    if any(is_jpeg_of_unknown_colours(page) for page in same):
        raise RefusedError("JPEG of three bands that are no RGB: convert it (gdal_translate)")
    images = tiff.series[:1] if lacks_directories(tiff) else same
    size = sum(image.size * image.dtype.itemsize for image in images)
    if size > data.LARGEST_IMAGE:
        raise RefusedError(f"{size / 2**30:.1f} GiB of pixels by its header: more than 4 GiB")
    tag = every[0].tags.get(GDAL_NODATA)  # not of a thumbnail before it
    if nodata is None and tag:
        nodata = read_nodata(tag.value)
    mask = None
    for page in pages:
        if page.subfiletype & MASK and page not in same and page_size(page) == page_size(every[0]):
            shown = page.asarray() != 0
            mask = shown if mask is None else mask & shown
    bands = []
    for image in images:
        # In one thread: each further one would hold a part of its own.
        pixels = image.asarray(maxworkers=1, buffersize=READ_AT_ONCE)
        bands += [Band(band, nodata, mask, about) for band in split_planes(pixels, image.axes)]
    return bands


def list_pages(tiff: Any) -> list[Any]:
    """List the pages of an open TIFF; ValueError if a part is lost, which tifffile passes over."""
    pages = list(tiff.pages)
    if not all(page.dataoffsets and all(page_size(page)) for page in pages):
        raise ValueError(f"one of {len(pages)} pages is empty")
    file = tiff.filehandle
    for page in pages:
        if page.compression == UNCOMPRESSED:
            page.predictor = 1  # none: with others only a compressor makes differences of pixels
        for start, size in zip(page.dataoffsets, page.databytecounts, strict=False):
            if start + size > file.size:
                raise ValueError("the end of the file is missing")
    file.seek(tiff.pages.next_page_offset)
    link = file.read(tiff.tiff.offsetsize)
    if link != bytes(tiff.tiff.offsetsize):
        raise ValueError(f"the page after number {len(pages)} is missing")
    return pages


def is_jpeg_of_unknown_colours(page: Any) -> bool:
    """Tell whether a decoder would take the three bands of a JPEG for YCbCr, unlike its tags."""
    if page.compression != JPEG or page.samplesperpixel != 3:
        return False
    return page.planarconfig != data.BAND_BY_BAND and page.photometric not in JPEG_COLOURS


def lacks_directories(tiff: Any) -> bool:
    """Tell whether a stack by ImageJ or tifffile may describe only the first of its pages."""
    if len(tiff.pages) != 1 or not (tiff.is_imagej or tiff.is_shaped):
        return False
    # a program that cut a piece out of the image may have copied its description
    stack = tiff.series[0]
    end = tiff.pages[0].dataoffsets[0] + stack.size * stack.dtype.itemsize
    return end <= tiff.filehandle.size


def page_size(page: Any) -> tuple[int, int]:
    """Return the height and width of a page."""
    return page.imagelength, page.imagewidth


def split_planes(pixels: np.ndarray, axes: str) -> list[np.ndarray]:
    """Split an array into planes (h, w), without copying; tifffile names its axes by letters."""
    planes = np.moveaxis(pixels, (axes.index("Y"), axes.index("X")), (-2, -1))
    return [planes[index] for index in np.ndindex(planes.shape[:-2])]


def read_nodata(text: Any) -> float:
    """Read GDAL's tag, which some programs write with a comma; RefusedError if it is no number."""
    try:
        return float(str(text).strip("\0 ").replace(",", "."))
    except ValueError:
        raise RefusedError(f"nodata value {text!r:.40} is no number: give --nodata=N") from None


def read_jpeg2000(image: Image.Image, content: bytes) -> np.ndarray:
    """Decode JPEG 2000 (C, H, W), as stored; ValueError if Pillow would lose bits or signs."""
    components, bits, signed = data.jpeg2000_kind(content)
    if signed:
        raise ValueError("JPEG 2000 of signed numbers")
    pixels = np.asarray(image)
    if bits > 16 or bits > 8 * pixels.dtype.itemsize:
        raise ValueError(
            f"JPEG 2000 of {components} bands of {bits} bits: Pillow keeps 8 of them; "
            "convert it to GeoTIFF (gdal_translate)"
        )
    # Pillow shifts the bits up until they fill the dtype; this undoes it.
    pixels = pixels >> (8 * pixels.dtype.itemsize - bits)
    return channels_first(pixels)


def type_for_training(band: Band) -> np.dtype:
    """Return the dtype of a band in training: its own, or float32; ValueError if it is complex."""
    dtype = band.stored.dtype
    if dtype.kind not in data.REAL_KINDS:
        raise ValueError(f"pixels of {dtype}: store real numbers, such as the magnitude")
    if may_miss_pixels(band):
        return np.dtype(np.float32)
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    return np.dtype(dtype.name if dtype.name in data.ARRAY_DTYPES else np.float32)


def may_miss_pixels(band: Band) -> bool:
    """Tell whether there is a mask, or a number for missing pixels that the dtype can hold."""
    return band.mask is not None or can_store(band.stored.dtype, band.nodata)


def can_store(dtype: np.dtype, nodata: float | None) -> bool:
    """Tell whether a pixel of this dtype can be `nodata`; False for NaN, nodata in any case."""
    if nodata is None or math.isnan(nodata):
        return False
    if dtype.kind == "f":
        return True
    limits = np.iinfo(np.uint8 if dtype.kind == "b" else dtype)
    return nodata.is_integer() and limits.min <= nodata <= limits.max


def find_missing(band: Band) -> np.ndarray:
    """Find the missing pixels of a band (h, w) bool."""
    stored, nodata, mask, _ = band
    missing = np.zeros(stored.shape, bool)
    if nodata is not None and can_store(stored.dtype, nodata):
        if abs(nodata) < data.LARGEST_MEASUREMENT:
            missing |= stored == nodata
        else:  # often the lowest number of a type, and then rounded in the tag
            limit = np.float64(math.copysign(data.LARGEST_MEASUREMENT, nodata))
            missing |= (stored <= limit) if nodata < 0 else (stored >= limit)
    if mask is not None:
        missing |= ~mask
    return missing


def pixels_for_training(band: Band, dtype: np.dtype) -> np.ndarray:
    """Convert a band to a dtype of training (h, w), and missing pixels to NaN."""
    with np.errstate(over="ignore"):  # `check_bands` refuses pixels that become infinite
        if not may_miss_pixels(band):
            return band.stored.astype(dtype, copy=False)
        pixels = band.stored.astype(dtype)
        pixels[find_missing(band)] = np.nan
    return pixels


def resample_nearest(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resample (h, w) to (height, width): each new pixel takes the one nearest to its centre."""
    if pixels.shape == (height, width):
        return pixels
    rows = np.floor((np.arange(height) + 0.5) * pixels.shape[0] / height).astype(int)
    columns = np.floor((np.arange(width) + 0.5) * pixels.shape[1] / width).astype(int)
    return pixels[rows[:, None], columns]


def check_bands(bands: Bands) -> None:
    """Raise ValueError if training cannot take an image of these bands, or all is nodata."""
    try:
        data.check_shape(bands.shape)
    except data.NeedsPackingError:  # which tells users to do what they do
        what = f"{bands.shape} looks like (H, W, C), and images of up to 4 columns are not read"
        raise ValueError(f"{what}: save it as (C, H, W)") from None
    if bands.dtype.kind == "f":
        data.check_pixels(bands)


def check_range(band: Band) -> None:
    """Raise ValueError for numbers that float32 would round, or turn into infinity."""
    dtype = band.stored.dtype
    if dtype.kind not in "iuf" or dtype.itemsize <= (4 if dtype.kind == "f" else 2):
        return
    largest = abs(band.stored[~find_missing(band)].astype(np.float64)).max(initial=0)
    if dtype.kind != "f" and largest > EXACT_IN_FLOAT32:
        raise ValueError(f"numbers up to {largest:.0f}, which float32 would round")
    if np.finfo(np.float32).max < largest < np.inf:
        raise ValueError(f"numbers up to {largest:.4g}: {data.NODATA_ADVICE}")
