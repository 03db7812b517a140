"""Data sets laid out as published ones: from the raw tree to three steps, by docs/images.md.

Each is small and synthetic; the folders, names, types and bands are those of the data set.
"""

import shlex

import numpy as np
import pytest
from conftest import FULL, ROOT
from PIL import Image
from ranks import TINY_ARGV

import prepare
import train_fsdp

rasterio = pytest.importorskip("rasterio")
pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")

PAGE = (ROOT / "docs" / "images.md").read_text()
COUNT = 4  # images
FLAGS = [*TINY_ARGV, *shlex.split("--global-batch 4 --steps 3 --log-every 1 --max-bad 0")]
DAILY = ("safe", "loveda")  # the others only read their images daily, and are trained on in `full`

# number of bands, lowest and highest value, type, side
RGB = (3, 0, 255, "uint8", 48)
GREY = (1, 0, 255, "uint8", 48)
FINE = (1, 300, 3000, "uint16", 48)
COARSE = (1, 300, 3000, "uint16", 24)
FULL_S2 = (13, 300, 3000, "uint16", 48)
SCENE = "S2A_MSIL2A_20170613T101031_{i}_57/S2A_MSIL2A_20170613T101031_{i}_57"
DATA = "S2A_{i}.SAFE/GRANULE/L2A_T32TQM_{i}/IMG_DATA"
LANDSAT = "LC08_L2SP_19302{i}_20200101_02_T1/LC08_L2SP_19302{i}_20200101_02_T1"
ROI = "ROIs1158_spring"
# data set: {files of image {i}, for each name in {a,b,c}: what is drawn, None for an empty file}
TREES = {
    # a folder per scene, a GeoTIFF per band, of 10, 20 and 60 m; labels as JSON
    "bigearthnet": {
        SCENE + "_{B02,B03,B04,B08}.tif": FINE,
        SCENE + "_{B05,B11}.tif": COARSE,
        SCENE + "_B01.tif": (1, 300, 3000, "uint16", 16),
        SCENE + "_labels_metadata.json": None,
    },
    # Sentinel-2 L2A: JPEG 2000 in folders of a resolution, beside a classification and masks
    "safe": {
        DATA + "/R10m/T32TQM_2020010{i}_{B02,B03,B04,B08}_10m.jp2": FINE,
        DATA + "/R20m/T32TQM_2020010{i}_{B02,B05,B11,SCL}_20m.jp2": COARSE,
        DATA + "/../QI_DATA/MSK_CLDPRB_20m.jp2": GREY,
        "S2A_{i}.SAFE/manifest.safe": None,
    },
    # Collection 2 level 2: all files of a scene in one folder, quality bands among them
    "landsat": {
        LANDSAT + "_{SR_B2,SR_B3,SR_B4,ST_B10,QA_PIXEL}.TIF": (1, 7000, 9000, "uint16", 48),
        LANDSAT + "_MTL.txt": None,
    },
    "naip": {"m_3907{i}_ne_18_060.tif": (4, 40, 200, "uint8", 48)},
    "potsdam": {
        "2_Ortho_RGB/top_potsdam_2_{i}_RGB.tif": RGB,
        "2_Ortho_RGB/top_potsdam_2_{i}_RGB.tfw": None,
        "4_Ortho_RGBIR/top_potsdam_2_{i}_RGBIR.tif": (4, 9, 200, "uint8", 48),
        "5_Labels_all/top_potsdam_2_{i}_label.tif": RGB,
    },
    "sen12ms": {
        f"{ROI}/s1_1/{ROI}_s1_1_p{{i}}.tif": (2, -25, 0, "float32", 48),
        f"{ROI}/s2_1/{ROI}_s2_1_p{{i}}.tif": FULL_S2,
        f"{ROI}/lc_1/{ROI}_lc_1_p{{i}}.tif": (4, 0, 17, "uint16", 48),
    },
    "dfc": {
        "rgb/JAX_{i}.tif": RGB,
        "dem/JAX_{i}.tif": (1, 0, 90, "float32", 48),
        "segmentation/JAX_{i}.tif": GREY,
    },
    "eurosat": {"Forest/Forest_{i}.tif": FULL_S2},
    "enmap": {"enmap/{i}.tif": (10, 100, 5000, "int16", 48)},  # nodata at the edge of a scene
    "loveda": {"Train/Urban/images_png/{i}.png": RGB, "Train/Urban/masks_png/{i}.png": GREY},
    "million_aid": {"train/agriculture_land/grassland/meadow/P000000{i}.jpg": RGB},
    "sky_images": {"{i}.npy": (3, 0, 255, "uint8", 64)},  # (64, 64, 3)
}

PACK = "prepare.py pack DIR PACK"
SAFE = "prepare.py pack SAFE PACK --stack B02_10m,B03_10m,B04_10m,B08_10m,B11_20m"
# data set: (the page's command, or none; its other flags; flags of training)
DATA_SETS = {
    "bigearthnet": ("prepare.py pack BIGEARTHNET PACK --stack B02,B03,B04,B08", "", "--channels 4"),
    "safe": (SAFE, "", "--channels 5"),
    "landsat": ("prepare.py pack LANDSAT PACK --stack SR_B2,SR_B3,SR_B4", "", "--channels 3"),
    "naip": (PACK, "", "--channels 4"),
    "potsdam": ("", "", "--include '*_RGB.tif'"),
    "sen12ms": (PACK, "--include 's2_*'", "--channels 13"),
    "dfc": ("", "", "--include rgb"),
    "eurosat": (PACK, "", "--channels 13"),
    "enmap": (PACK, "", "--channels 10"),
    "loveda": ("", "", "--exclude masks_png"),
    "million_aid": ("", "", ""),
    "sky_images": (PACK, "", "--channels 3"),
}


def write(path, i, bands, low, high, dtype, side):
    """Draw image number i, (bands, side, side), in the format of the name's ending."""
    coarse = np.random.default_rng(i).integers(low, high, (bands, side // 8, side // 8))
    pixels = np.kron(coarse, np.ones((1, 8, 8))).astype(dtype)
    last = np.moveaxis(pixels, 0, -1)
    options = {"driver": "GTiff"}
    if dtype == "int16":
        pixels[:, :, : 8 * i] = -32768
        options["nodata"] = -32768
    if path.suffix == ".jp2":
        options = {"driver": "JP2OpenJPEG", "QUALITY": "100", "REVERSIBLE": "YES"}
    if path.suffix == ".npy":
        np.save(path, last)
    elif path.suffix in (".png", ".jpg"):
        Image.fromarray(last if bands > 1 else pixels[0]).save(path)
    else:
        about = {"count": bands, "height": side, "width": side, "dtype": dtype}
        with rasterio.open(path, "w", **about, **options) as file:
            file.write(pixels)


def make_tree(name, root):
    """Write all files of a data set."""
    for pattern, drawn in TREES[name].items():
        start, _, rest = pattern.replace("{i}", "@").partition("{")
        bands, _, end = rest.partition("}")
        for band in bands.split(","):
            for i in range(COUNT):
                path = root / f"{start}{band}{end}".replace("@", str(i))
                path.parent.mkdir(parents=True, exist_ok=True)
                if drawn:
                    write(path, i, *drawn)
                else:
                    path.touch()


@pytest.mark.parametrize("name", DATA_SETS)
def test_three_steps_by_the_commands_of_the_page(name, tmp_path, capsys):
    command, more, flags = DATA_SETS[name]
    source = tmp_path / "raw"
    make_tree(name, source)
    if command:
        assert command in PAGE
        words = [*shlex.split(command)[4:], *shlex.split(more), "--workers", "1"]
        assert prepare.main(["pack", str(source), str(tmp_path / "pack"), *words]) == 0
        source = tmp_path / "pack"
        said = capsys.readouterr().out
        assert f"{COUNT} images: " in said and "unreadable" not in said, said
    given = ["--data", str(source), *shlex.split(flags)]
    if not FULL and name not in DAILY:
        given += ["--run-mode", "io"]
    status = train_fsdp.main([*FLAGS, *given, "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert f"{COUNT} images" in said.out and "step 3/3" in said.out, said.out
    assert not (tmp_path / "out" / "bad_images.csv").exists()
