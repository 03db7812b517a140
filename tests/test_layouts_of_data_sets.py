"""Data sets laid out as published ones: from the raw tree to three steps, by docs/images.md.

Each is small and synthetic; the folders, names, types and bands are those of the data set.
"""

import os
import shlex

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

import data
import prepare
import train_fsdp

rasterio = pytest.importorskip("rasterio")
pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")

PAGE = (ROOT / "docs" / "images.md").read_text()
COUNT = 4  # images
TRAIN = "--model tiny --img-size 32 --device cpu --precision fp32 --workers 0 --global-batch 4"


def smooth(seed, bands, low, high, dtype, side=48):
    draw = np.random.default_rng(seed).integers(low, high, (bands, side // 8, side // 8))
    return np.kron(draw, np.ones((1, 8, 8))).astype(dtype)


def write(path, pixels, **options):
    """Write an array (C, H, W) in the format of the name's ending."""
    ending = path.suffix.lower()
    last = np.moveaxis(pixels, 0, -1)
    if ending == ".npy":
        np.save(path, last)
    elif ending in (".png", ".jpg"):
        Image.fromarray(last if len(pixels) > 1 else pixels[0]).save(path)
    else:
        options["driver"] = "JP2OpenJPEG" if ending == ".jp2" else "GTiff"
        if ending == ".jp2":
            options |= {"QUALITY": "100", "REVERSIBLE": "YES"}
        about = {"count": len(pixels), "height": pixels.shape[1], "width": pixels.shape[2]}
        with rasterio.open(path, "w", dtype=pixels.dtype, **about, **options) as file:
            file.write(pixels)


RGB = (3, 0, 255, "uint8")
GREY = (1, 0, 255, "uint8")
S2 = (1, 300, 3000, "uint16")
FULL = (13, 300, 3000, "uint16")
SCENE = "S2A_MSIL2A_20170613T101031_{i}_57"
GRANULE = "S2A_{i}.SAFE/GRANULE/L2A_T32TQM_{i}"
LANDSAT = "LC08_L2SP_19302{i}_20200101_02_T1"
ROI = "ROIs1158_spring"
# data set: {file of image {i}: what `smooth` draws, or None for an empty file}
TREES = {
    # a folder per scene, a GeoTIFF per band, of 10, 20 and 60 m; labels as JSON
    "bigearthnet": {
        **{f"{SCENE}/{SCENE}_{band}.tif": S2 for band in ("B02", "B03", "B04", "B08")},
        **{f"{SCENE}/{SCENE}_{band}.tif": (*S2, 24) for band in ("B05", "B11")},
        f"{SCENE}/{SCENE}_B01.tif": (*S2, 16),
        f"{SCENE}/{SCENE}_labels_metadata.json": None,
    },
    # Sentinel-2 L2A: JPEG 2000 in folders of a resolution, beside a classification and masks
    "safe": {
        **{
            f"{GRANULE}/IMG_DATA/R10m/T32TQM_2020010{{i}}_{band}_10m.jp2": S2
            for band in ("B02", "B03", "B04", "B08")
        },
        **{
            f"{GRANULE}/IMG_DATA/R20m/T32TQM_2020010{{i}}_{band}_20m.jp2": (*S2, 24)
            for band in ("B02", "B05", "B11", "SCL")
        },
        f"{GRANULE}/QI_DATA/MSK_CLDPRB_20m.jp2": GREY,
        "S2A_{i}.SAFE/manifest.safe": None,
    },
    # Collection 2 level 2: all files of a scene in one folder, quality bands among them
    "landsat": {
        **{
            f"{LANDSAT}/{LANDSAT}_{band}.TIF": (1, 7000, 9000, "uint16")
            for band in ("SR_B2", "SR_B3", "SR_B4", "ST_B10", "QA_PIXEL", "SR_QA_AEROSOL")
        },
        f"{LANDSAT}/{LANDSAT}_MTL.txt": None,
    },
    "naip": {"m_3907{i}_ne_18_060.tif": (4, 40, 200, "uint8")},
    "potsdam": {
        "2_Ortho_RGB/top_potsdam_2_{i}_RGB.tif": RGB,
        "2_Ortho_RGB/top_potsdam_2_{i}_RGB.tfw": None,
        "4_Ortho_RGBIR/top_potsdam_2_{i}_RGBIR.tif": (4, 9, 200, "uint8"),
        "5_Labels_all/top_potsdam_2_{i}_label.tif": (3, 0, 2, "uint8"),
    },
    "sen12ms": {
        f"{ROI}/s1_1/{ROI}_s1_1_p{{i}}.tif": (2, -25, 0, "float32"),
        f"{ROI}/s2_1/{ROI}_s2_1_p{{i}}.tif": FULL,
        f"{ROI}/lc_1/{ROI}_lc_1_p{{i}}.tif": (4, 0, 17, "uint16"),
    },
    "dfc": {
        "rgb/JAX_{i}.tif": RGB,
        "dem/JAX_{i}.tif": (1, 0, 90, "float32"),
        "segmentation/JAX_{i}.tif": (1, 0, 6, "uint8"),
    },
    "eurosat": {"Forest/Forest_{i}.tif": FULL},
    "enmap": {"enmap/{i}.tif": (10, 100, 5000, "int16")},  # with nodata at the edge of a scene
    "loveda": {"Train/Urban/images_png/{i}.png": RGB, "Train/Urban/masks_png/{i}.png": GREY},
    "million_aid": {"train/agriculture_land/grassland/meadow/P000000{i}.jpg": RGB},
    "sky_images": {"{i}.npy": (*RGB, 64)},  # (64, 64, 3)
}

PACK = "python prepare.py pack DIR PACK"
STACK = "python prepare.py pack {} PACK --stack {}"
# data set: (the page's command, or None; its other flags; flags of training)
DATA_SETS = {
    "bigearthnet": (STACK.format("BIGEARTHNET", "B02,B03,B04,B08"), "", "--data PACK --channels 4"),
    "safe": (
        STACK.format("SAFE", "B02_10m,B03_10m,B04_10m,B08_10m,B11_20m"),
        "",
        "--data PACK --channels 5",
    ),
    "landsat": (STACK.format("LANDSAT", "SR_B2,SR_B3,SR_B4"), "", "--data PACK --channels 3"),
    "naip": (PACK, "", "--data PACK --channels 4"),
    "potsdam": (None, "", "--data DIR --include '*_RGB.tif'"),
    "sen12ms": (PACK, "--include 's2_*'", "--data PACK --channels 13"),
    "dfc": (None, "", "--data DIR --include rgb"),
    "eurosat": (PACK, "", "--data PACK --channels 13"),
    "enmap": (PACK, "", "--data PACK --channels 10"),
    "loveda": (None, "", "--data DIR --exclude masks_png"),
    "million_aid": (None, "", "--data DIR"),
    "sky_images": (PACK, "", "--data PACK --channels 3"),
}


def make_tree(name, root):
    for i in range(COUNT):
        for file, drawn in TREES[name].items():
            path = root / file.format(i=i)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not drawn:
                path.touch()
                continue
            pixels = smooth(i, *drawn)
            options = {}
            if name == "enmap":
                pixels[:, :, : 8 * i] = -32768
                options = {"nodata": -32768}
            if path.suffix == ".jp2" and pixels.dtype == "uint16":
                options = {"NBITS": "15"}
            write(path, pixels, **options)


DAILY = ("safe", "loveda")  # trained on by the whole trainer each day


def commands(name, tmp_path, capsys):
    """Make a data set and pack it as the page says -> the flags of training."""
    command, more, flags = DATA_SETS[name]
    root, pack = tmp_path / "raw", tmp_path / "pack"
    make_tree(name, root)
    if command:
        assert command in PAGE
        words = shlex.split(command)
        argv = ["pack", str(root), str(pack), *words[5:], *shlex.split(more), "--workers", "1"]
        assert prepare.main(argv) == 0
        said = capsys.readouterr().out
        assert f"{COUNT} images: " in said and "cannot be read" not in said, said
    places = {"DIR": str(root), "PACK": str(pack)}
    return [places.get(word, word) for word in shlex.split(flags)]


@pytest.mark.parametrize("name", DATA_SETS)
def test_three_steps_of_images_by_the_commands_of_the_page(name, tmp_path, capsys):
    args = train_fsdp.parse_flags(
        [*TRAIN.split(), "--steps", "3", *commands(name, tmp_path, capsys)]
    )
    files = data.scan(args.data, args.include or (), args.exclude or ())
    assert len(files) == COUNT
    stats = data.IMAGENET
    if os.path.exists(data.stats_file(args.data)):
        stats, measured = data.read_stats(data.stats_file(args.data))
        assert measured == data.fingerprint(files)
    assert len(stats.mean) == args.channels
    sizes = {"img_size": 32, "patches": 16, "global_batch": COUNT, "micro_batch_size": COUNT}
    for batch in data.build_loader(files, seed=0, steps=range(3), stats=stats, **sizes):
        images = data.normalize(batch.image, stats)
        assert images.shape == (COUNT, args.channels, 32, 32) and images.isfinite().all()
        assert not batch.bad and images.std() > 0.1


@pytest.mark.parametrize("name", DAILY)
def test_three_steps_of_training_by_the_commands_of_the_page(name, tmp_path, capsys):
    given = commands(name, tmp_path, capsys)
    argv = [*TRAIN.split(), "--steps", "3", "--log-every", "1", "--out", str(tmp_path / "out")]
    status = train_fsdp.main([*argv, *given])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert "step 3/3" in said.out and "unreadable" not in said.out, said.out
