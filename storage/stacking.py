"""Stack scenes that have one file per band: Sentinel-2, Landsat, BigEarthNet, SSL4EO.

The bands of a scene are the files in one folder whose names differ only in the band; folders of a
resolution (R10m, R20m, R60m, as in a .SAFE) count as one.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import data
from storage.arrays import Band, Bands, check_bands, read_bands
from storage.image_list import ImageList

NO_FILE = -1
Scenes = dict[tuple[str, str], list[int]]  # (folder, name) -> the file of each band
RESOLUTION_FOLDER = re.compile(r"R\d+m")  # as in a .SAFE
MASK_OF_BAND = re.compile(r"MSK_[A-Z]+_B\d")  # MSK_QUALIT_B02 and the like, of Sentinel-2


@dataclass(frozen=True)
class SceneList:
    """The scenes of a folder; each has one file per band, in the order of `bands`."""

    root: str
    names: list[str]  # N, relative to root, without an ending
    files: np.ndarray  # (N, bands) rows of an ImageList's table; without a name if missing
    bands: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def sizes(self) -> np.ndarray:
        """Return the bytes of the files of each scene (N,)."""
        return self.files["size"].sum(axis=1)

    def part(self, first: int, last: int) -> "SceneList":
        """Return the scenes from `first` to before `last`."""
        return replace(self, names=self.names[first:last], files=self.files[first:last])

    def name(self, index: int) -> str:
        """Return a scene's path relative to the folder."""
        return self.names[index]

    def path(self, index: int) -> str:
        """Return a scene's path for messages."""
        return os.path.join(self.root, self.names[index])

    def read(self, index: int, nodata: float | None) -> Bands:
        """Read the bands of a scene; ValueError if one is missing or unreadable."""
        rows = self.files[index]
        missing = [band for band, row in zip(self.bands, rows, strict=True) if not row["name"]]
        if missing:
            raise ValueError(f"no file of band {', '.join(missing)}")
        bands: list[Band] = []
        for row in rows:
            name = os.fsdecode(row["name"])
            band = self.read_file(name, int(row["size"]), nodata)
            bands.append(band)
            size, first = band.stored.shape, bands[0].stored.shape
            if not cover_the_same(size, first):
                differs = f"{size} pixels (H, W), which cover another area than {first}"
                raise ValueError(f"{os.path.basename(name)}: {differs} of {self.bands[0]}")
        scene = Bands(bands)
        check_bands(scene)
        if any(band.stored.size > bands[0].stored.size for band in bands):
            scene.about = f"larger bands reduced to the size of {self.bands[0]}, the first"
        return scene

    def read_file(self, name: str, size: int, nodata: float | None) -> Band:
        """Read the file of one band, which had so many bytes; a ValueError names it."""
        try:
            with open(os.path.join(self.root, name), "rb", buffering=0) as file:
                bands = read_bands(file, nodata).bands
        except Exception as error:  # Pillow raises many kinds for a broken file
            lost = isinstance(error, FileNotFoundError) and size > 0
            if lost or not data.is_file_error(error):
                raise  # a file that has vanished: the file system failed, not the scene
            raise ValueError(f"{os.path.basename(name)}: {error}") from None
        if len(bands) != 1:
            raise ValueError(f"{os.path.basename(name)}: {len(bands)} bands, not 1")
        return bands[0]


def cover_the_same(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Tell whether two sizes (h, w) differ only in resolution, within one of the larger pixels."""
    differing = abs(shape[0] * other[1] - shape[1] * other[0])
    return differing <= max(shape[0], other[0])


def find_scenes(files: ImageList, bands: Sequence[str]) -> SceneList:
    """Group the files of a folder into scenes by the names of their bands.

    The end of a file's name, before its ending, tells its band: T33_B02.tif belongs to B02. But
    MSK_QUALIT_B02.jp2, a mask that Sentinel-2's products have for each band, is left out.
    ValueError if a band has no file at all, or two in one scene.
    """
    if files.shards:
        raise ValueError(f"{files.root} is a pack: --stack needs the folder of the band files")
    members = []
    others: Counter[str] = Counter()
    for index in range(len(files)):
        stem, _ = os.path.splitext(os.path.basename(files.name(index)))
        band = None if MASK_OF_BAND.match(stem) else find_band(stem, bands)
        if band is None:
            others[guess_band(stem)] += 1
        else:
            members.append((index, stem, band))
    found = {band for _, _, band in members}
    absent = [band for band in bands if band not in found]
    seen = data.describe_counts(dict(others.most_common(12)))
    if absent:
        raise ValueError(f"no file of band {', '.join(absent)}; other names end with: {seen}")
    if others:
        print(f"left out, being of no band: {sum(others.values())} files, ending with: {seen}")
    scenes = group_bands(files, members, bands)
    named = name_scenes(scenes, os.path.basename(os.path.realpath(files.root)))
    names = sorted(named, key=os.fsencode)
    rows_of_scenes = np.array([named[name] for name in names])
    table = files.table[rows_of_scenes]
    table[rows_of_scenes == NO_FILE] = np.zeros((), table.dtype)
    return SceneList(files.root, names, table, tuple(bands))


def group_bands(
    files: ImageList, members: Sequence[tuple[int, str, str]], bands: Sequence[str]
) -> Scenes:
    """Group files (index, stem, band) into scenes; folders of a resolution count as one."""
    scenes: Scenes = {}
    for index, stem, band in members:
        parts = os.path.dirname(files.name(index)).split("/")
        folder = "/".join(part for part in parts if not RESOLUTION_FOLDER.fullmatch(part))
        scene = (folder, stem.removesuffix(band).rstrip("_.-"))
        rows = scenes.setdefault(scene, [NO_FILE] * len(bands))
        number = bands.index(band)
        if rows[number] != NO_FILE:
            both = f"{files.path(rows[number])} and {files.path(index)}"
            advice = "leave one out by --include or --exclude PATTERN"
            raise ValueError(f"two files of band {band} in one scene: {both}: {advice}")
        rows[number] = index
    return scenes


def guess_band(stem: str) -> str:
    """Guess the band of a file: the last word of its name, or the last two with a resolution."""
    words = re.split(r"([_.-])", stem)  # with their separators
    count = 3 if re.fullmatch(r"R?\d+m", words[-1]) else 1
    return "".join(words[-count:])


def find_band(stem: str, bands: Sequence[str]) -> str | None:
    """Return the longest of the bands that a file name ends with, at a separator; or None."""
    for band in sorted(bands, key=len, reverse=True):
        before = stem.removesuffix(band)
        if before != stem and (not before or before[-1] in "_.-"):
            return band
    return None


def name_scenes(scenes: Scenes, root: str) -> dict[str, list[int]]:
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
