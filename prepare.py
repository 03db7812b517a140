"""Prepare a data set: find broken images, measure it, pack it into few large files.

    python prepare.py scan DIR                       decode everything, name what is broken
    python prepare.py stats DIR                      mean and deviation per channel, for --data DIR
    python prepare.py pack SRC DST --max-side 512    tar shards with an index; --data DST trains
    python prepare.py pack SRC DST --stack B02,B03,B04,B08    scenes whose bands are files

A parallel file system serves a hundred large files better than a million small ones: pack where you
can, from a login node or a job of one node. Rasters that training refuses (see data.py) are read by
GDAL, through the package rasterio, and become arrays (C, H, W) in the pack.
"""

import argparse
import io
import json
import math
import os
import re
import shutil
import sys
import tarfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import data

# How files start that GDAL may read: TIFF in either byte order, BigTIFF, JPEG 2000, PNG
DRIVERS = dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "GTiff")
DRIVERS |= dict.fromkeys((b"\0\0\0\x0c", b"\xff\x4f\xff\x51"), "JP2OpenJPEG")
DRIVERS |= {b"\x89PNG": "PNG"}
LARGEST_IMAGE = 2**32  # bytes of one decoded image
EXACT_IN_FLOAT32 = 2**24  # float32 holds every whole number up to this one
SHARD_BYTES = 2**28  # size of the source files that become one shard
QUALITY = 90  # JPEG quality of pictures that are made smaller
PART = 64  # images that a process reads before it reports
LARGE = 2**22  # pixels; of a larger image only some rows and columns are measured
MAX_BAD = 0.01  # share of broken images above which training ends: its default of --max-bad
RESOLUTION_FOLDER = re.compile(r"R\d+m")  # as in a .SAFE
MASK_OF_BAND = re.compile(r"MSK_[A-Z]+_B\d")  # MSK_QUALIT_B02 and the like, of Sentinel-2

MODE_NAMES = {"1": "grey", "L": "grey", "LA": "grey", "P": "palette", "PA": "palette"}

# --- One image, as a pack holds it


def read_raster(content: bytes, nodata: float | None = None) -> np.ndarray:
    """Read all bands of a file by GDAL, or a .npy file -> (C, H, W); the pages of a TIFF are bands.

    A pixel becomes NaN if it equals `nodata`, by default if the file calls it missing (a nodata
    value or a mask). UnreadableImage if GDAL cannot read it, or for numbers that training cannot
    take; ImportError without rasterio.
    """
    if content.startswith(b"\x93NUMPY"):
        with data.reading():
            pixels = np.load(io.BytesIO(content), allow_pickle=False)
        if pixels.ndim == 2:
            pixels = pixels[None]
        elif pixels.ndim == 3 and pixels.shape[2] <= 4 < min(pixels.shape[:2]):
            pixels = np.moveaxis(pixels, 2, 0)
        return for_training(pixels, is_valid(pixels, nodata))
    driver = DRIVERS.get(content[:4])
    if driver is None:
        raise data.UnreadableImage("neither a picture, nor TIFF, JPEG 2000 or .npy")
    try:
        import rasterio
        from rasterio.io import MemoryFile
    except ImportError:
        raise ImportError("this raster needs a package: type `pip install rasterio`") from None
    # From memory, so that GDAL neither lists the folder nor finds other files that belong to it.
    with warnings.catch_warnings(), rasterio.Env(GDAL_ERROR_ON_LIBJPEG_WARNING=True):
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        try:
            with MemoryFile(content) as memory:
                with rasterio.open(memory.name, driver=driver) as file:
                    # named GTIFF_DIR:2:path, all alike but for the number; GDAL lists 10 before 2
                    pages = sorted(file.subdatasets, key=lambda name: (len(name), name))
                    if not pages:
                        return read_bands([file], nodata)
                opened = [rasterio.open(page, driver=driver) for page in pages]
                return read_bands(opened, nodata)
        except rasterio.errors.RasterioError as error:
            raise data.UnreadableImage(f"GDAL cannot read it: {error}") from None


def read_bands(pages: Sequence[Any], nodata: float | None) -> np.ndarray:
    """Read the bands of open rasters, one after the other."""
    from rasterio.enums import MaskFlags

    shapes = {page.shape for page in pages}
    if len(shapes) > 1:
        raise data.UnreadableImage(f"pages of the sizes (H, W) {sorted(shapes)}: give them files")
    size = sum(
        page.count * math.prod(page.shape) * np.dtype(page.dtypes[0]).itemsize for page in pages
    )
    if size > LARGEST_IMAGE:
        raise data.UnreadableImage(
            f"{size / 2**30:.1f} GiB of pixels, more than 4: cut it into tiles"
        )
    bands = []
    for page in pages:
        pixels = page.read()
        valid = is_valid(pixels, nodata)
        for i, flags in enumerate(page.mask_flag_enums):
            # A band that GDAL takes for transparency is infrared more often: it hides nothing.
            masked = MaskFlags.all_valid not in flags and MaskFlags.alpha not in flags
            if nodata is None and masked and can_hold(pixels.dtype, page.nodatavals[i]):
                if valid is None:
                    valid = np.ones(pixels.shape, bool)
                valid[i] = page.read_masks(i + 1) > 0
        bands.append(for_training(pixels, valid))
    return np.concatenate(bands)


def can_hold(dtype: np.dtype, nodata: float | None) -> bool:
    """Tell whether a pixel can be `nodata`; True for None, which stands for a mask."""
    if nodata is None or dtype.kind == "f":
        return True
    limits = np.iinfo(np.uint8 if dtype.kind == "b" else dtype)
    return float(nodata).is_integer() and limits.min <= nodata <= limits.max


def is_valid(pixels: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """Tell which pixels are not `nodata`, as bool of the same shape; None if it cannot occur."""
    if nodata is None or pixels.dtype.kind not in "biuf" or not can_hold(pixels.dtype, nodata):
        return None
    return pixels != nodata


def for_training(pixels: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """Convert bands (C, H, W) to a dtype of training; those that are not `valid` become NaN."""
    kind = pixels.dtype.kind
    if kind not in "biuf":
        raise data.UnreadableImage(f"pixels of {pixels.dtype}: store real numbers")
    if valid is None and kind == "b":
        return pixels.astype(np.uint8)
    if valid is None and pixels.dtype.name in data.ARRAY_DTYPES:
        return pixels.astype(pixels.dtype.name, copy=False)  # in this machine's order of bytes
    if kind in "iu" and pixels.dtype.itemsize > 2:
        used = pixels if valid is None else pixels[valid]
        if np.abs(used.astype(np.float64)).max(initial=0) > EXACT_IN_FLOAT32:
            raise data.UnreadableImage("whole numbers above 2**24, which float32 would round")
    with np.errstate(over="ignore"):  # `data.check_array` refuses pixels that become infinite
        pixels = pixels.astype(np.float32)
    if valid is not None:
        pixels[~valid] = np.nan
    return pixels


def read_image(content: bytes, nodata: float | None = None) -> Image.Image | np.ndarray:
    """Read a file -> a picture, not decoded, if training takes it as one; else (C, H, W)."""
    try:
        image, _ = data.open_image(content)
    except data.NeedsPackingError:
        image = read_raster(content, nodata)
    else:
        if isinstance(image, np.ndarray):
            image = read_raster(content, nodata)
        elif nodata is None or not can_hold(np.dtype(np.uint8), nodata):
            return image
        else:
            grey = image.mode == "L" and not image.has_transparency_data
            pixels = np.asarray(data.decode(image))  # (H, W, 3)
            pixels = np.moveaxis(pixels, 2, 0)[: 1 if grey else 3]
            image = for_training(pixels, pixels != nodata)
    data.check_array(image)
    return image


# --- Many images, in several processes


class Kind(NamedTuple):
    """What images must have in common to be trained on together."""

    channels: int
    dtype: str
    about: str = ""

    def __str__(self) -> str:
        return f"{self.channels} channels of {self.dtype}{self.about}"


def kind_of(image: Image.Image | np.ndarray, path: str) -> Kind:
    """Return the kind that an image, not decoded yet, has in training."""
    if isinstance(image, Image.Image):
        return Kind(3, "uint8", f" ({MODE_NAMES.get(image.mode, image.mode)} pictures)")
    about = "" if path.endswith(".npy") else ", for training only from a pack"
    return Kind(len(image), image.dtype.name, about)


@dataclass
class Report:
    """What was found in some images; `add` joins two reports."""

    problems: list[str] = field(default_factory=list)  # a sentence for each unreadable image
    kinds: Counter[Kind] = field(default_factory=Counter)  # kind -> number of images
    first: dict[Kind, str] = field(default_factory=dict)  # kind -> path of one image
    # (channels, dtype) -> (4, C) float64: the number of images, and the sums over them of mean,
    # squared mean and variance, all without pixels that are nodata
    sums: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    members: list[tuple[str, int, int]] = field(default_factory=list)  # of a shard: see write_shard

    def count(self, kind: Kind, path: str) -> None:
        """Count an image that can be read."""
        self.kinds[kind] += 1
        self.first.setdefault(kind, path)

    def add(self, other: "Report") -> None:
        """Join another report to this one, all but its members."""
        self.problems += other.problems
        self.kinds.update(other.kinds)
        self.first = other.first | self.first
        for key, sums in other.sums.items():
            self.sums[key] = self.sums.get(key, 0) + sums

    def print_kinds(self) -> None:
        """Print how many images there are of each kind, and what to do if they differ."""
        several = len(self.kinds) > 1
        for kind, count in self.kinds.most_common():
            print(f"{count} images: {kind}" + (f", such as {self.first[kind]}" if several else ""))
        if len({(kind.channels, kind.dtype) for kind in self.kinds}) > 1:
            print("training takes one kind: choose it by --include PATTERN or --exclude PATTERN")
        elif several:
            print("training takes all of these: leave out masks by --include or --exclude PATTERN")


@contextmanager
def noting_problems(report: Report, files: data.ImageList, index: int) -> Iterator[None]:
    """Note that an image cannot be read; pass on errors that are not the file's fault."""
    path = files.path(index)
    path = path if path.isprintable() else repr(path)
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{path}: {error}") from None
    except data.UnreadableImage as error:
        report.problems.append(f"{path}: {error}")
    except OSError as error:
        # A file that has vanished: the file system failed, not the image.
        vanished = isinstance(error, FileNotFoundError) and files.sizes[index] > 0
        if vanished or not data.is_file_error(error):
            raise
        report.problems.append(f"{path}: {error}")


def for_each(work: Callable[..., Report], workers: int, *columns: Sequence[Any]) -> Iterator[Any]:
    """Yield the results of work as `map` does, in several processes; with one worker in this one.

    The last column has parts of a list of images. RuntimeError if a worker process dies.
    """
    done = 0
    told = time.monotonic()
    pool = ProcessPoolExecutor(workers, data.fork_server(), data.end_with_parent)
    run: Any = pool.map if workers > 1 else map
    try:
        for part, found in zip(columns[-1], run(work, *columns), strict=True):
            done += len(part)
            if time.monotonic() > told + 5:
                told = time.monotonic()
                print(f"reading: {done} images")
            yield found
    except BrokenProcessPool as error:
        advice = "if host memory ran out, use fewer --workers"
        raise RuntimeError(f"a process that reads images ended: {advice} ({error})") from None
    finally:
        pool.shutdown(cancel_futures=True)


def measure_part(files: data.ImageList) -> Report:
    """Read some images and measure them."""
    report = Report()
    for index in range(len(files)):
        with noting_problems(report, files, index):
            image = read_image(files.read(index))
            kind = kind_of(image, files.path(index))
            if isinstance(image, np.ndarray):
                channels = image
            else:
                channels = np.moveaxis(np.asarray(data.decode(image)), 2, 0)
            key = (kind.channels, kind.dtype)
            report.sums[key] = report.sums.get(key, 0) + measure_channels(channels)
            report.count(kind, files.path(index))
    return report


def measure_channels(channels: np.ndarray) -> np.ndarray:
    """Measure an image (C, H, W) -> (4, C): 1, mean, squared mean, variance; 0 where all is NaN.

    Only every k-th row and column of a large image is measured.
    """
    found = []
    for channel in channels:
        stride = max(1, math.isqrt(channel.size // LARGE))
        some = channel[::stride, ::stride]
        if channel.dtype.kind == "f":
            some = some[~np.isnan(some)]
        if some.size:
            mean = some.mean(dtype=np.float64)
            found.append((1, mean, mean**2, some.var(dtype=np.float64)))
        else:
            found.append((0, 0, 0, 0))
    return np.array(found).T


def measure(files: data.ImageList, workers: int) -> Report:
    """Read every image of a list and measure it."""
    parts = [files.part(first, first + PART) for first in range(0, len(files), PART)]
    report = Report()
    for found in for_each(measure_part, workers, parts):
        report.add(found)
    return report


def save_stats(files: data.ImageList, report: Report, path: str, bands: Sequence[str] = ()) -> None:
    """Write statistics of the most frequent kind, and names of the bands, for training to find.

    Every image has the same weight, as in training. ValueError if no image can be read.
    """
    if not report.sums:
        raise ValueError(f"no image in {files.root} can be read: {report.problems[0]}")
    key = max(report.sums, key=lambda key: report.sums[key][0].max())
    channels, dtype = key
    count, means, squares, variances = report.sums[key]  # (C,) each
    measured = int(count.max())
    count = np.maximum(count, 1)  # it is 0 for a channel that is nodata in all images
    scale = 255 if dtype == "uint8" else 1
    mean = means / count
    std = np.sqrt(np.maximum((variances + squares) / count - mean**2, 0))
    std[std <= 1e-7 * abs(mean)] = scale  # a constant channel: float32 shows no difference
    text: dict[str, Any] = {
        "mean": (mean / scale).tolist(),
        "std": (std / scale).tolist(),
        "dtype": dtype,
        "images": data.fingerprint(files),
    }
    if bands:
        text["bands"] = list(bands)
    write_atomically(path, json.dumps(text).encode())
    print(f"{path}: {measured} of {len(files)} images, {channels} channels of {dtype}")


# --- Scenes that have one file per band: Sentinel-2, Landsat, BigEarthNet


@dataclass(frozen=True)
class SceneList(data.ImageList):
    """The scenes of a folder: its table has a column `files` (bands,), the names of their files."""

    bands: tuple[str, ...] = ()

    def read_scene(self, index: int, nodata: float | None) -> np.ndarray:
        """Read a scene, each band at the size of the first; UnreadableImage names a wrong file."""
        layers: list[np.ndarray] = []
        for band, name in zip(self.bands, self.table["files"][index], strict=True):
            if not name:
                raise data.UnreadableImage(f"no file of band {band}")
            path = os.path.join(self.root, os.fsdecode(name))
            with open(path, "rb") as file:
                content = file.read()
            try:
                layer = read_raster(content, nodata)
                if len(layer) != 1:
                    raise data.UnreadableImage(f"{len(layer)} bands, not 1")
                first = layers[0] if layers else layer
                layers.append(enlarge(layer, first.shape[1], first.shape[2]))
            except data.UnreadableImage as error:
                raise data.UnreadableImage(f"{os.path.basename(path)}: {error}") from None
        scene = np.concatenate(layers)
        data.check_array(scene)
        return scene


def enlarge(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Enlarge (C, h, w) to (C, height, width): each new pixel takes the one nearest to its centre.

    UnreadableImage if it would be reduced, or if the sizes differ in more than the resolution.
    """
    _, h, w = pixels.shape
    sizes = f"{(h, w)} pixels (H, W), the first band {(height, width)}"
    if h > height or w > width:
        raise data.UnreadableImage(f"{sizes}: name the finest band first")
    if abs(h * width - w * height) > max(height, h):  # by one of the larger pixels
        raise data.UnreadableImage(f"{sizes}: they cover other areas")
    rows = np.floor((np.arange(height) + 0.5) * h / height).astype(int)
    columns = np.floor((np.arange(width) + 0.5) * w / width).astype(int)
    return pixels[:, rows[:, None], columns]


def find_scenes(files: data.ImageList, bands: tuple[str, ...]) -> SceneList:
    """Group the files of a folder into scenes by the names of their bands.

    The end of a file's name, before its ending, tells its band: T33_B02.tif belongs to B02. Folders
    of a resolution (R10m) count as one. ValueError if a band has no file, or two in one scene.
    """
    if files.packed:
        raise ValueError(f"{files.root} is a pack: --stack needs the folder of the band files")
    scenes: dict[tuple[str, str], list[int]] = {}  # (folder, name) -> the file of each band, or -1
    others = 0
    for index in range(len(files)):
        folder, name = os.path.split(files.name(index))
        stem, _ = os.path.splitext(name)
        band = None if MASK_OF_BAND.match(stem) else find_band(stem, bands)
        if band is None:
            others += 1
            continue
        parts = [part for part in folder.split("/") if not RESOLUTION_FOLDER.fullmatch(part)]
        scene = ("/".join(parts), stem.removesuffix(band).rstrip("_.-"))
        rows = scenes.setdefault(scene, [-1] * len(bands))
        number = bands.index(band)
        if rows[number] >= 0:
            both = f"{files.path(rows[number])} and {files.path(index)}"
            advice = "leave one out by --include or --exclude PATTERN"
            raise ValueError(f"two files of band {band} in one scene: {both}: {advice}")
        rows[number] = index
    for number, band in enumerate(bands):
        if all(rows[number] < 0 for rows in scenes.values()):
            raise ValueError(f"no file of band {band}: no name ends with it, before its ending")
    if others:
        print(f"left out, being of no band: {others} files")
    named = name_scenes(scenes, os.path.basename(os.path.realpath(files.root)))
    names = sorted(os.fsencode(name) for name in named)
    all_rows = np.array([named[os.fsdecode(name)] for name in names])  # (scenes, bands)
    found = files.table[all_rows]
    found[all_rows < 0] = np.zeros((), found.dtype)
    longest = max(len(name) for name in names)
    files_column = ("files", found.dtype["name"], (len(bands),))
    table = np.zeros(len(names), [("name", f"S{longest}"), ("size", "i8"), files_column])
    table["name"] = names
    table["size"] = found["size"].sum(axis=1)
    table["files"] = found["name"]
    return SceneList(files.root, table, bands=bands)


def find_band(stem: str, bands: Sequence[str]) -> str | None:
    """Return the longest of the bands that a file name ends with, at a separator; or None."""
    ends = [band for band in bands if re.search(rf"(^|[_.-]){re.escape(band)}\Z", stem)]
    return max(ends, key=len, default=None)


def name_scenes(scenes: dict[tuple[str, str], list[int]], root: str) -> dict[str, list[int]]:
    """Name scenes by their folder, if each has one of its own, or by folder and name.

    A scene of neither is called like the root. ValueError if two get one name.
    """
    folders = [folder for folder, _ in scenes]
    if len(set(folders)) == len(scenes) and "" not in folders:
        return {folder: rows for (folder, _), rows in scenes.items()}
    named: dict[str, list[int]] = {}
    for (folder, start), rows in scenes.items():
        name = os.path.join(folder, start).rstrip("/") or root
        if name in named:
            raise ValueError(f"two scenes of the name {name}: pack them one by one, by --include")
        named[name] = rows
    return named


# --- Packing


@dataclass(frozen=True)
class PackOptions:
    """How images become members of a pack."""

    max_side: int | None = None  # longest side of a picture, in pixels
    nodata: float | None = None
    taken: frozenset[str] = frozenset()  # names that no other image may get


def encode(
    image: Image.Image | np.ndarray, content: bytes, max_side: int | None
) -> tuple[bytes, str]:
    """Return an image as a pack holds it, and what its name must end with.

    A picture is copied (""), or becomes a JPEG if it is larger than `max_side`; an array becomes a
    .npy file, unless it is 8-bit RGB, which takes less space as a picture.
    """
    if isinstance(image, np.ndarray):
        stream = io.BytesIO()
        if len(image) != 3 or image.dtype != np.uint8 or content.startswith(b"\x93N"):
            np.save(stream, np.ascontiguousarray(image))
            return stream.getvalue(), ".npy"
        image = Image.fromarray(np.moveaxis(image, 0, 2).copy())
        image.save(stream, "PNG")
        content = stream.getvalue()
        ending = ".png"
    else:
        ending = ""
    if max_side is None or max(image.size) <= max_side:
        return content, ending
    image.draft(None, (2 * max_side, 2 * max_side))  # decode a JPEG no larger than needed
    rgb = data.decode(image)
    rgb.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    smaller = io.BytesIO()
    rgb.save(smaller, "JPEG", quality=QUALITY)
    return smaller.getvalue(), ".jpg"


def write_shard(options: PackOptions, path: Path, files: data.ImageList) -> Report:
    """Write a shard of images, a tar file -> a report, with its members: (name, size, start).

    An image that cannot be read becomes an empty file: training finds it unreadable again, and all
    other images keep their numbers.
    """
    report = Report()
    with tarfile.open(path, "w") as tar:
        for index in range(len(files)):
            name = files.name(index)
            content = b""
            with noting_problems(report, files, index):
                if isinstance(files, SceneList):
                    image: Any = files.read_scene(index, options.nodata)
                    packed, ending = encode(image, b"\x93N", None)
                else:
                    source = files.read(index)
                    image = read_image(source, options.nodata)
                    packed, ending = encode(image, source, options.max_side)
                content = packed
                kind = kind_of(image, ".npy")  # from the pack, training reads all of them
                report.count(kind, files.path(index))
                if not name.lower().endswith(ending):
                    name += ending
                    if name in options.taken:
                        name += f".packed{ending}"
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with tarfile.open(path) as tar:
        report.members = [(member.name, member.size, member.offset_data) for member in tar]
    return report


def split_into_shards(files: data.ImageList) -> list[data.ImageList]:
    """Split a list into parts whose files have about SHARD_BYTES together."""
    ends = np.cumsum(files.sizes)
    _, firsts = np.unique((ends - 1).clip(0) // SHARD_BYTES, return_index=True)
    return [files.part(first, last) for first, last in pairwise([*firsts, len(files)])]


def pack(
    source: data.ImageList,
    target: str,
    workers: int,
    options: PackOptions,
    bands: tuple[str, ...] = (),
) -> None:
    """Put images into tar shards, in their order, with an index, and measure them if needed.

    With `bands`, the files of a scene's bands become one array. The folder is called
    NAME.unfinished until it is complete. ValueError if the target exists.
    """
    path = Path(os.path.abspath(target))
    if os.path.lexists(path):
        raise ValueError(f"{target} exists: pack into a new folder")
    files = find_scenes(source, bands) if bands else source
    names = {files.name(index) for index in range(len(files))}
    taken = frozenset(name for name in names if os.path.splitext(name)[0] in names)
    folder = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)  # left by a command that was interrupted
    folder.mkdir(parents=True)
    parts = split_into_shards(files)
    shards = [folder / f"shard-{number:06}.tar" for number in range(len(parts))]
    report = Report()
    members = []
    for found in for_each(
        partial(write_shard, replace(options, taken=taken)), workers, shards, parts
    ):
        members.append(found.members)
        report.add(found)
    for problem in report.problems:
        print(problem)
    if not report.kinds:
        raise ValueError(f"no image in {source.root} can be read")
    write_index(str(folder), members)
    folder.rename(path)
    packed = data.scan(target)
    size = packed.sizes.sum() / 2**30
    print(f"{target}: {len(packed)} images in {len(shards)} shards, {size:.3f} GiB")
    report.print_kinds()
    if report.problems:
        print(f"{len(report.problems)} of {len(packed)} images are unreadable: now empty files")
    arrays = np.char.endswith(np.char.lower(packed.table["name"]), b".npy").sum()
    if 2 * arrays >= len(packed) or os.path.exists(data.stats_file(source.root)):
        save_stats(packed, measure(packed, workers), data.stats_file(target), bands)


def write_index(folder: str, members: Sequence[Sequence[tuple[str, int, int]]]) -> None:
    """Write the index of a pack from the members of each shard: the table that data.py reads."""
    names, sizes, starts = zip(*chain.from_iterable(members), strict=True)
    encoded = [os.fsencode(name) for name in names]
    longest = max(len(name) for name in encoded)
    columns = [("name", f"S{longest}"), ("size", "i8"), ("shard", "i4"), ("start", "i8")]
    table = np.zeros(len(names), columns)
    table["name"] = encoded
    table["size"] = sizes
    table["shard"] = np.repeat(np.arange(len(members)), [len(some) for some in members])
    table["start"] = starts
    stream = io.BytesIO()
    np.save(stream, table)
    write_atomically(os.path.join(folder, "pack.index"), stream.getvalue())


def write_atomically(path: str, content: bytes) -> None:
    """Write a file that is always as it was or complete, whatever ends this process. OSError."""
    with open(f"{path}.unfinished", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.unfinished", path)


# --- The command line

COMMANDS = {
    "scan": "decode every image, name the broken ones, count the kinds",
    "stats": "mean and deviation of each channel, which training on DIR then uses",
    "pack": "put all images into tar shards, which training reads with --data DST",
}


def band_names(text: str) -> tuple[str, ...]:
    """Be an argparse type: names of bands, separated by commas, each once."""
    names = tuple(text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no list of names: give B02,B03,B04")
    return names


def positive(text: str) -> int:
    """Be an argparse type: a number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no number from 1")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        "prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help in COMMANDS.items():
        add = commands.add_parser(name, help=help, allow_abbrev=False).add_argument
        add("dir", metavar="DIR", help="folder of images")
        if name == "pack":
            add("out", metavar="DST", help="folder of the shards")
            help = "make larger pictures so small (default: as they are)"
            add("--max-side", type=positive, metavar="PIXELS", help=help)
            help = "make one array of each scene, of the files whose names end with these bands"
            add("--stack", type=band_names, default=(), metavar="BANDS", help=help)
            help = "as --nodata=-9999: a missing pixel (default: what a GeoTIFF says, and NaN)"
            add("--nodata", type=float, metavar="NUMBER", help=help)
        if name == "stats":
            help = "write them here; give the same to training (default: beside DIR)"
            add("--stats", metavar="FILE", help=help)
        help = "only images whose name or folder matches, such as '*_rgb.tif'; may be repeated"
        add("--include", action="append", default=[], metavar="PATTERN", help=help)
        help = "no images whose name or folder matches, such as masks; may be repeated"
        add("--exclude", action="append", default=[], metavar="PATTERN", help=help)
        cores = len(os.sched_getaffinity(0))
        help = "processes (default: the number of cores)"
        add("--workers", type=positive, default=cores, metavar="N", help=help)
    return parser


def run_command(args: argparse.Namespace) -> int:
    """Run a command -> 1 where `scan` finds broken images, else 0; raises what it raises."""
    if not os.path.isdir(args.dir):
        raise ValueError(f"there is no folder {args.dir}: give DIR the folder of images")
    files = data.scan(args.dir, args.include, args.exclude)
    if files.left_out:
        print(f"{args.dir}: {len(files)} images; left out {files.left_out}")
    if args.command == "pack":
        pack(files, args.out, args.workers, PackOptions(args.max_side, args.nodata), args.stack)
        return 0
    if args.command == "stats":
        path = args.stats or data.stats_file(args.dir)
        if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            advice = "give --stats FILE elsewhere, here and to training"
            raise OSError(f"{path} cannot be written: {advice}")
        report = measure(files, args.workers)
        report.print_kinds()
        save_stats(files, report, path)
        return 0
    report = measure(files, args.workers)
    for problem in report.problems:
        print(problem)
    report.print_kinds()
    bad = len(report.problems)
    print(f"{bad} of {len(files)} images cannot be read")
    if bad > MAX_BAD * len(files):
        print(f"training ends at more than {MAX_BAD:.0%}: remove them, or raise its --max-bad")
    return 1 if bad else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command -> exit status: 1 where images are broken or it failed, 2 for bad usage."""
    args = build_parser().parse_args(argv)
    try:
        return run_command(args)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    raise SystemExit(main())
