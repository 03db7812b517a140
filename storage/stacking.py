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
RESOLUTION_FOLDER = re.compile(r"R?\d+m")


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
            bands += self.read_file(os.fsdecode(row["name"]), nodata).bands
        scene = Bands(bands)
        check_bands(scene)
        return scene

    def read_file(self, name: str, nodata: float | None) -> Bands:
        """Read the file of one band; a ValueError names it."""
        try:
            with open(os.path.join(self.root, name), "rb", buffering=0) as file:
                return read_bands(file, nodata)
        except Exception as error:  # Pillow raises many kinds for a broken file
            if not data.is_file_error(error):
                raise
            raise ValueError(f"{os.path.basename(name)}: {error}") from None


def find_scenes(files: ImageList, bands: Sequence[str]) -> SceneList:
    """Group the files of a folder into scenes by the names of their bands.

    The end of a file's name, before its ending, tells its band: T33_B02.tif belongs to B02.
    ValueError if a band has no file at all, or two in one scene.
    """
    if files.shards:
        raise ValueError(f"{files.root} is a pack: --stack needs the folder of the band files")
    scenes: dict[tuple[str, str], list[int]] = {}  # (folder, name) -> the file of each band
    found = set()
    others: Counter[str] = Counter()
    for index in range(len(files)):
        folder, file = os.path.split(files.name(index))
        stem, _ = os.path.splitext(file)
        band = find_band(stem, bands)
        if band is None:
            others[guess_band(stem)] += 1
            continue
        found.add(band)
        parts = [part for part in folder.split("/") if not RESOLUTION_FOLDER.fullmatch(part)]
        scene = ("/".join(parts), stem.removesuffix(band).rstrip("_.-"))
        rows = scenes.setdefault(scene, [NO_FILE] * len(bands))
        number = bands.index(band)
        if rows[number] != NO_FILE:
            both = f"{files.path(rows[number])} and {files.path(index)}"
            raise ValueError(f"two files of band {band} in one scene: {both}")
        rows[number] = index
    absent = [band for band in bands if band not in found]
    if absent:
        seen = data.describe_counts(dict(others.most_common(12)))
        raise ValueError(f"no file of band {', '.join(absent)}; other names end with: {seen}")
    if others:
        print(f"left out, being of no band: {sum(others.values())} files")
    named = name_scenes(scenes)
    names = sorted(named, key=os.fsencode)
    rows_of_scenes = np.array([named[name] for name in names])
    table = files.table[rows_of_scenes]
    table[rows_of_scenes == NO_FILE] = np.zeros((), table.dtype)
    return SceneList(files.root, names, table, tuple(bands))


def guess_band(stem: str) -> str:
    """Guess the band of a file: the last word of its name, or the last two with a resolution."""
    words = re.split(r"([_.-])", stem)  # with their separators
    count = 3 if RESOLUTION_FOLDER.fullmatch(words[-1]) else 1
    return "".join(words[-count:])


def find_band(stem: str, bands: Sequence[str]) -> str | None:
    """Return the longest of the bands that a file name ends with, at a separator; or None."""
    for band in sorted(bands, key=len, reverse=True):
        before = stem.removesuffix(band)
        if before != stem and (not before or before[-1] in "_.-"):
            return band
    return None


def name_scenes(scenes: dict[tuple[str, str], list[int]]) -> dict[str, list[int]]:
    """Name scenes by their folder, if each has one of its own, or by folder and name."""
    folders = [folder for folder, _ in scenes]
    if len(set(folders)) == len(scenes) and "" not in folders:
        return {folder: rows for (folder, _), rows in scenes.items()}
    return {os.path.join(folder, start): rows for (folder, start), rows in scenes.items()}
