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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import data

# How files start that GDAL may read: TIFF in either byte order, BigTIFF, JPEG 2000, PNG
DRIVERS = dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "GTiff")
DRIVERS |= dict.fromkeys((b"\0\0\0\x0c", b"\xff\x4f\xff\x51"), "JP2OpenJPEG")
DRIVERS |= {b"\x89PNG": "PNG"}
LARGEST_IMAGE = 2**30  # pixels of all bands together
EXACT_IN_FLOAT32 = 2**24  # float32 holds every whole number up to this one
SHARD_BYTES = 2**28  # size of the source files that become one shard
QUALITY = 90  # JPEG quality of pictures that are made smaller
PART = 64  # images that a process reads before it reports
MAX_BAD = 0.01  # share of broken images above which training ends: its default of --max-bad
RESOLUTION_FOLDER = re.compile(r"R\d+m")  # as in a .SAFE
MASK_OF_BAND = re.compile(r"MSK_[A-Z]+_B\d")  # MSK_QUALIT_B02 and the like, of Sentinel-2


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
        raise ImportError("a raster needs a package: type `pip install rasterio`") from None
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
                return read_bands([rasterio.open(page, driver=driver) for page in pages], nodata)
        except rasterio.errors.RasterioError as error:
            raise data.UnreadableImage(f"GDAL cannot read it: {error}") from None


def read_bands(pages: Sequence[Any], nodata: float | None) -> np.ndarray:
    """Read the bands of open rasters, one after the other."""
    from rasterio.enums import MaskFlags

    if len({page.shape for page in pages}) > 1:
        raise data.UnreadableImage("pages of several sizes: give each size files of its own")
    if sum(page.count * math.prod(page.shape) for page in pages) > LARGEST_IMAGE:
        raise data.UnreadableImage("more than a thousand million pixels: cut it into tiles")
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
    if nodata is None or dtype.kind not in "iu":
        return True
    limits = np.iinfo(dtype)
    return float(nodata).is_integer() and limits.min <= nodata <= limits.max


def is_valid(pixels: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """Tell which pixels are not `nodata`, as bool of the same shape; None if it cannot occur."""
    if nodata is None or not can_hold(pixels.dtype, nodata):
        return None
    return pixels != nodata


def for_training(pixels: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """Convert bands (C, H, W) to a dtype of training; those that are not `valid` become NaN."""
    kind = pixels.dtype.kind
    if kind not in "iuf":
        raise data.UnreadableImage(f"pixels of {pixels.dtype}: store real numbers")
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


def read_image(content: bytes, nodata: float | None = None) -> data.AnyImage:
    """Read a file -> a picture, not decoded, if training takes it as one; else (C, H, W).

    With `nodata`, all that GDAL reads is an array.
    """
    if nodata is None or content[:4] not in DRIVERS:
        try:
            image, _ = data.open_image(content)
        except data.NeedsPackingError:
            pass
        else:
            if isinstance(image, Image.Image):
                return image
    array = read_raster(content, nodata)
    data.check_array(array)
    return array


# --- Many images, in several processes


def describe(image: data.AnyImage, path: str) -> str:
    """Say of what kind an image is: a user tells masks by it."""
    if isinstance(image, Image.Image):
        colours = {"RGB": "colour", "CMYK": "colour", "RGBA": "colour", "P": "palette"}
        return f"3 channels of uint8 ({colours.get(image.mode, 'grey')} pictures)"
    packed = "" if path.endswith(".npy") else ", for training only from a pack"
    return f"{len(image)} channels of {image.dtype}{packed}"


@dataclass
class Report:
    """What was found in some images; `add` joins two reports."""

    problems: list[str] = field(default_factory=list)  # a sentence for each unreadable image
    kinds: Counter[str] = field(default_factory=Counter)  # kind -> number of images
    first: dict[str, str] = field(default_factory=dict)  # kind -> path of one image
    # (channels, dtype) -> (4, C) float64: the number of images, and the sums over them of mean,
    # squared mean and variance, all without pixels that are nodata
    sums: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    members: list[tuple[str, int, int]] = field(default_factory=list)  # of a shard: see write_shard

    def count(self, kind: str, path: str) -> None:
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
        for kind, count in self.kinds.most_common():
            print(f"{count} images: {kind}, such as {self.first[kind]}")
        if len(self.kinds) > 1:
            advice = "leave out the others, such as masks, by --include or --exclude PATTERN"
            print(f"training takes one number of channels and one type: {advice}")


@contextmanager
def noting_problems(report: Report, path: str) -> Iterator[None]:
    """Note that an image cannot be read; pass on errors that are not the file's fault."""
    path = path if path.isprintable() else repr(path)
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{path}: {error}") from None
    except (OSError, data.UnreadableImage) as error:
        if isinstance(error, OSError) and not data.is_file_error(error):
            raise
        report.problems.append(f"{path}: {error}")


def for_each(work: Callable[..., Report], workers: int, *columns: Sequence[Any]) -> Iterator[Any]:
    """Yield the results of work as `map` does, in several processes; with one worker in this one.

    The last column has parts of a list of images.
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
    finally:
        pool.shutdown(cancel_futures=True)


def measure_part(files: data.ImageList) -> Report:
    """Read some images and measure them."""
    report = Report()
    for index in range(len(files)):
        path = files.path(index)
        with noting_problems(report, path):
            image = read_image(files.read(index))
            channels: Any = image
            if isinstance(image, Image.Image):
                channels = np.moveaxis(np.asarray(data.decode(image)), 2, 0)
            key = (len(channels), channels.dtype.name)
            report.sums[key] = report.sums.get(key, 0) + measure_channels(channels)
            report.count(describe(image, path), path)
    return report


def measure_channels(channels: np.ndarray) -> np.ndarray:
    """Measure (C, H, W) -> (4, C): 1, mean, squared mean, variance; 0 where all is NaN."""
    found = np.zeros((4, len(channels)))
    for i, channel in enumerate(channels):
        some = channel[~np.isnan(channel)] if channel.dtype.kind == "f" else channel
        if some.size:
            mean = some.mean(dtype=np.float64)
            found[:, i] = (1, mean, mean**2, some.var(dtype=np.float64))
    return found


def measure(files: data.ImageList, workers: int) -> Report:
    """Read every image of a list and measure it."""
    report = Report()
    for found in for_each(measure_part, workers, split(files, np.arange(len(files)) // PART)):
        report.add(found)
    return report


def split(files: data.ImageList, parts: np.ndarray) -> list[data.ImageList]:
    """Split a list where the number of the part (N,) changes."""
    _, firsts = np.unique(parts, return_index=True)
    ends = pairwise([*firsts, len(files)])
    return [replace(files, table=files.table[first:end]) for first, end in ends]


def save_stats(files: data.ImageList, report: Report, path: str, bands: Sequence[str] = ()) -> None:
    """Write statistics of the most frequent kind, and names of the bands, for training to find.

    Every image has the same weight. ValueError if no image can be read.
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
    text = {"mean": (mean / scale).tolist(), "std": (std / scale).tolist(), "dtype": dtype}
    text |= {"images": data.fingerprint(files)} | ({"bands": bands} if bands else {})
    Path(path).write_text(json.dumps(text))
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
            try:
                layer = read_raster(Path(path).read_bytes(), nodata)
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
    scenes: dict[tuple[str, str], np.ndarray] = {}  # (folder, name) -> the file of each band, or -1
    for index in range(len(files)):
        folder, name = os.path.split(files.name(index))
        stem, _ = os.path.splitext(name)
        band = None if MASK_OF_BAND.match(stem) else find_band(stem, bands)
        if band is None:
            continue
        parts = [part for part in folder.split("/") if not RESOLUTION_FOLDER.fullmatch(part)]
        scene = ("/".join(parts), stem.removesuffix(band).rstrip("_.-"))
        rows = scenes.setdefault(scene, np.full(len(bands), -1))
        number = bands.index(band)
        if rows[number] >= 0:
            both = f"{files.path(rows[number])} and {files.path(index)}"
            advice = "leave one out by --include or --exclude PATTERN"
            raise ValueError(f"two files of band {band} in one scene: {both}: {advice}")
        rows[number] = index
    found = np.array([*scenes.values()]).reshape(-1, len(bands))  # (scenes, bands)
    for number, band in enumerate(bands):
        if (found[:, number] < 0).all():
            raise ValueError(f"no file of band {band}: no name ends with it, before its ending")
    print(f"left out, being of no band: {len(files) - (found >= 0).sum()} files")
    names = name_scenes([*scenes], os.path.basename(os.path.realpath(files.root)))
    sources = np.where(found >= 0, files.table["name"][found], b"")
    columns: Any = [("name", names.dtype), ("size", "i8"), ("files", sources.dtype, (len(bands),))]
    table = np.zeros(len(names), columns)
    table["name"] = names
    table["size"] = np.where(found >= 0, files.table["size"][found], 0).sum(axis=1)
    table["files"] = sources
    return SceneList(files.root, np.sort(table, order="name"), bands=bands)


def find_band(stem: str, bands: Sequence[str]) -> str | None:
    """Return the longest of the bands that a file name ends with, at a separator; or None."""
    ends = [band for band in bands if re.search(rf"(^|[_.-]){re.escape(band)}\Z", stem)]
    return max(ends, key=len, default=None)


def name_scenes(scenes: Sequence[tuple[str, str]], root: str) -> np.ndarray:
    """Name scenes (N,) by their folder, if each has one of its own, or by folder and name.

    A scene of neither is called like the root. ValueError if two get one name.
    """
    folders = [folder for folder, _ in scenes]
    if len(set(folders)) == len(scenes) and "" not in folders:
        names = folders
    else:
        names = [os.path.join(folder, start).rstrip("/") or root for folder, start in scenes]
    if len(set(names)) < len(names):
        raise ValueError("two scenes have the same name: pack them one by one, by --include")
    return np.array([os.fsencode(name) for name in names])


# --- Packing


def encode(image: data.AnyImage, content: bytes, max_side: int | None) -> tuple[bytes, str]:
    """Return an image as a pack holds it, and what its name must end with.

    A picture is copied, its `content` (""), or becomes a JPEG if it is larger than `max_side`; an
    array becomes a .npy file, unless it is 8-bit RGB, which takes less space as a picture.
    """
    stream = io.BytesIO()
    ending = ""
    if isinstance(image, np.ndarray):
        if len(image) != 3 or image.dtype != np.uint8 or content.startswith(b"\x93N"):
            np.save(stream, np.ascontiguousarray(image))
            return stream.getvalue(), ".npy"
        image = Image.fromarray(np.moveaxis(image, 0, 2).copy())
        image.save(stream, "PNG")
        content = stream.getvalue()
        ending = ".png"
    if max_side is None or max(image.size) <= max_side:
        return content, ending
    image.draft(None, (2 * max_side, 2 * max_side))  # decode a JPEG no larger than needed
    rgb = data.decode(image)
    rgb.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    smaller = io.BytesIO()
    rgb.save(smaller, "JPEG", quality=QUALITY)
    return smaller.getvalue(), ".jpg"


def write_shard(
    max_side: int | None, nodata: float | None, path: Path, files: data.ImageList
) -> Report:
    """Write a shard of images, a tar file -> a report, with its members: (name, size, start).

    An image that cannot be read becomes an empty file: training finds it unreadable again, and all
    other images keep their numbers.
    """
    report = Report()
    with tarfile.open(path, "w") as tar:
        for index in range(len(files)):
            name = files.name(index)
            content = b""
            with noting_problems(report, files.path(index)):
                if isinstance(files, SceneList):
                    image: Any = files.read_scene(index, nodata)
                    content, ending = encode(image, b"\x93N", None)
                else:
                    source = files.read(index)
                    image = read_image(source, nodata)
                    content, ending = encode(image, source, max_side)
                report.count(describe(image, ".npy"), files.path(index))  # training reads all
                if not name.lower().endswith(ending):
                    name += ending
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with tarfile.open(path) as tar:
        report.members = [(member.name, member.size, member.offset_data) for member in tar]
    return report


def pack(files: data.ImageList, args: argparse.Namespace) -> None:
    """Put images into tar shards, in their order, with an index, and measure them if needed.

    With args.stack, the files of a scene's bands become one array. The folder is called
    NAME.unfinished until it is complete. ValueError if the target exists.
    """
    path = Path(os.path.abspath(args.out))
    if os.path.lexists(path):
        raise ValueError(f"{args.out} exists: pack into a new folder")
    measured = os.path.exists(data.stats_file(files.root))
    if args.stack:
        files = find_scenes(files, args.stack)
    names = {files.name(index) for index in range(len(files))}
    for name in names:
        if any(f"{name}.{ending}" in names for ending in ("jpg", "png", "npy")):
            raise ValueError(f"{name} may be packed under the name of another file: rename it")
    folder = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)  # left by a command that was interrupted
    folder.mkdir(parents=True)
    parts = split(files, (np.cumsum(files.table["size"]) - 1).clip(0) // SHARD_BYTES)
    shards = [folder / f"shard-{number:06}.tar" for number in range(len(parts))]
    report = Report()
    members = []
    write = partial(write_shard, args.max_side, args.nodata)
    for found in for_each(write, args.workers, shards, parts):
        members.append(found.members)
        report.add(found)
    for problem in report.problems:
        print(problem)
    if not report.kinds:
        raise ValueError(f"no image in {files.root} can be read")
    write_index(folder / "pack.index", members)
    folder.rename(path)
    packed = data.scan(args.out)
    size = packed.table["size"].sum() / 2**30
    print(f"{args.out}: {len(packed)} images in {len(shards)} shards, {size:.3f} GiB")
    report.print_kinds()
    if report.problems:
        print(f"{len(report.problems)} of {len(packed)} images are unreadable: now empty files")
    arrays = np.char.endswith(np.char.lower(packed.table["name"]), b".npy").sum()
    if measured or 2 * arrays >= len(packed):
        report = measure(packed, args.workers)
        save_stats(packed, report, data.stats_file(args.out), args.stack)


def write_index(path: Path, members: Sequence[Sequence[tuple[str, int, int]]]) -> None:
    """Write the index of a pack from the members of each shard: the table that data.py reads."""
    names, sizes, starts = zip(*chain.from_iterable(members), strict=True)
    encoded = np.array([os.fsencode(name) for name in names])
    columns = [("name", encoded.dtype), ("size", "i8"), ("shard", "i4"), ("start", "i8")]
    table = np.zeros(len(names), columns)
    table["name"] = encoded
    table["size"] = sizes
    table["shard"] = np.repeat(np.arange(len(members)), [len(some) for some in members])
    table["start"] = starts
    with open(path, "wb") as file:
        np.save(file, table)


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
    print(f"{args.dir}: {len(files)} images; left out {files.left_out} other files")
    if args.command == "pack":
        pack(files, args)
        return 0
    if args.command == "stats":
        path = args.stats or data.stats_file(args.dir)
        if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            advice = "give --stats FILE elsewhere, here and to training"
            raise OSError(f"{path} cannot be written: {advice}")
    report = measure(files, args.workers)
    report.print_kinds()
    if args.command == "stats":
        save_stats(files, report, path)
        return 0
    for problem in report.problems:
        print(problem)
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
