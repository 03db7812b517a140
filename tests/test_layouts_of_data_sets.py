"""Data sets laid out as published ones: from the raw tree to three steps, by docs/images.md.

Each is small and synthetic; the folders, names, types and bands are those of the data set.
"""

import argparse
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


def write(path, pixels, driver="GTiff", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"count": len(pixels), "height": pixels.shape[1], "width": pixels.shape[2]}
    with rasterio.open(path, "w", driver=driver, dtype=pixels.dtype, **about, **options) as file:
        file.write(pixels)


def picture(path, seed, bands=3):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = smooth(seed, bands, 0, 255, "uint8")
    Image.fromarray(np.moveaxis(pixels, 0, -1) if bands > 1 else pixels[0]).save(path)


# --- the trees


def bigearthnet(root):
    """A folder per scene, a GeoTIFF per band, of 10, 20 and 60 m; labels as JSON."""
    sides = {"B02": 48, "B03": 48, "B04": 48, "B08": 48, "B05": 24, "B11": 24, "B01": 16}
    for i in range(COUNT):
        scene = f"S2A_MSIL2A_20170613T101031_{i}_57"
        for band, side in sides.items():
            pixels = smooth(i, 1, 300, 3000, "uint16", side)
            write(root / scene / f"{scene}_{band}.tif", pixels, interleave="band")
        (root / scene / f"{scene}_labels_metadata.json").touch()


def safe(root):
    """Sentinel-2 L2A: JPEG 2000 in folders of a resolution, beside a classification and masks."""
    lossless = {"QUALITY": "100", "REVERSIBLE": "YES", "NBITS": "15"}
    for i in range(COUNT):
        granule = root / f"S2A_{i}.SAFE/GRANULE/L2A_T32TQM_{i}"
        for folder, bands, side in (
            ("R10m", ("B02", "B03", "B04", "B08"), 48),
            ("R20m", ("B02", "B05", "B11", "SCL"), 24),
        ):
            for band in bands:
                name = f"T32TQM_2020010{i}_{band}_{folder[1:]}.jp2"
                pixels = smooth(i, 1, 300, 3000, "uint16", side)
                write(granule / "IMG_DATA" / folder / name, pixels, "JP2OpenJPEG", **lossless)
        picture(granule / "QI_DATA/MSK_CLDPRB_20m.jp2", i, 1)
        (root / f"S2A_{i}.SAFE/manifest.safe").touch()


def landsat(root):
    """Collection 2 level 2: all files of a scene in one folder, quality bands among them."""
    for i in range(COUNT):
        scene = f"LC08_L2SP_19302{i}_20200101_02_T1"
        for band in ("SR_B2", "SR_B3", "SR_B4", "ST_B10"):
            write(root / scene / f"{scene}_{band}.TIF", smooth(i, 1, 7000, 9000, "uint16"))
        for band in ("QA_PIXEL", "SR_QA_AEROSOL"):
            write(root / scene / f"{scene}_{band}.TIF", smooth(i, 1, 0, 9, "uint16"))
        (root / scene / f"{scene}_MTL.txt").touch()


def naip(root):
    for i in range(COUNT):
        write(root / f"m_3907{i}_ne_18_060.tif", smooth(i, 4, 40, 200, "uint8"))


def potsdam(root):
    for i in range(COUNT):
        write(root / f"2_Ortho_RGB/top_potsdam_2_{i}_RGB.tif", smooth(i, 3, 0, 255, "uint8"))
        write(root / f"4_Ortho_RGBIR/top_potsdam_2_{i}_RGBIR.tif", smooth(i, 4, 9, 200, "uint8"))
        write(root / f"5_Labels_all/top_potsdam_2_{i}_label.tif", smooth(i, 3, 0, 2, "uint8"))
        (root / f"2_Ortho_RGB/top_potsdam_2_{i}_RGB.tfw").touch()


def sen12ms(root):
    for i in range(COUNT):
        season = "ROIs1158_spring"
        for sensor, pixels in (
            ("s1", smooth(i, 2, -25, 0, "float32")),
            ("s2", smooth(i, 13, 300, 3000, "uint16")),
            ("lc", smooth(i, 4, 0, 17, "uint16")),
        ):
            write(root / f"{season}/{sensor}_1/{season}_{sensor}_1_p{i}.tif", pixels)


def dfc(root):
    for i in range(COUNT):
        write(root / f"rgb/JAX_{i}.tif", smooth(i, 3, 0, 255, "uint8"), photometric="RGB")
        write(root / f"dem/JAX_{i}.tif", smooth(i, 1, 0, 90, "float32"))
        write(root / f"segmentation/JAX_{i}.tif", smooth(i, 1, 0, 6, "uint8"))


def eurosat(root):
    for i in range(COUNT):
        kind = ("Forest", "River")[i % 2]
        write(root / f"{kind}/{kind}_{i}.tif", smooth(i, 13, 300, 3000, "uint16"))


def enmap(root):
    """Signed 16 bits with nodata at the edge of a scene."""
    for i in range(COUNT):
        pixels = smooth(i, 10, 100, 5000, "int16")
        pixels[:, :, : 8 * i] = -32768
        write(root / f"enmap/{i}.tif", pixels, nodata=-32768)


def loveda(root):
    for i in range(COUNT):
        area = root / "Train" / ("Urban", "Rural")[i % 2]
        picture(area / f"images_png/{i}.png", i)
        picture(area / f"masks_png/{i}.png", i, 1)


def million_aid(root):
    leaves = ("agriculture_land/grassland/meadow", "water_area/beach")
    for i in range(COUNT):
        picture(root / f"train/{leaves[i % 2]}/P{i:07}.jpg", i)


def sky_images(root):
    """Images of the sky (64, 64, 3), each an array of bytes."""
    root.mkdir()
    for i in range(COUNT):
        np.save(root / f"{i}.npy", np.moveaxis(smooth(i, 3, 0, 255, "uint8", 64), 0, -1))


PACK = "python prepare.py pack DIR PACK"
STACK = "python prepare.py pack {} PACK --stack {}"
# tree: (the page's command, or None; its other flags; flags of training)
DATA_SETS = {
    bigearthnet: (STACK.format("BIGEARTHNET", "B02,B03,B04,B08"), "", "--data PACK --channels 4"),
    safe: (
        STACK.format("SAFE", "B02_10m,B03_10m,B04_10m,B08_10m,B11_20m"),
        "",
        "--data PACK --channels 5",
    ),
    landsat: (STACK.format("LANDSAT", "SR_B2,SR_B3,SR_B4"), "", "--data PACK --channels 3"),
    naip: (PACK, "", "--data PACK --channels 4"),
    potsdam: (None, "", "--data DIR --include '*_RGB.tif'"),
    sen12ms: (PACK, "--include 's2_*'", "--data PACK --channels 13"),
    dfc: (None, "", "--data DIR --include rgb"),
    eurosat: (PACK, "", "--data PACK --channels 13"),
    enmap: (PACK, "", "--data PACK --channels 10"),
    loveda: (None, "", "--data DIR --exclude masks_png"),
    million_aid: (None, "", "--data DIR"),
    sky_images: (PACK, "", "--data PACK --channels 3"),
}
DAILY = (safe, loveda)  # trained on by the whole trainer each day


def commands(make, tmp_path, capsys):
    """Make a data set and pack it as the page says -> the flags of training."""
    command, more, flags = DATA_SETS[make]
    root, pack = tmp_path / "raw", tmp_path / "pack"
    make(root)
    if command:
        assert command in PAGE
        words = shlex.split(command)
        argv = ["pack", str(root), str(pack), *words[5:], *shlex.split(more), "--workers", "1"]
        assert prepare.main(argv) == 0
        said = capsys.readouterr().out
        assert f"{COUNT} images: " in said and "cannot be read" not in said, said
    places = {"DIR": str(root), "PACK": str(pack)}
    return [places.get(word, word) for word in shlex.split(flags)]


@pytest.mark.parametrize("make", DATA_SETS, ids=lambda make: make.__name__)
def test_three_steps_of_images_by_the_commands_of_the_page(make, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--exclude", action="append", default=[])
    parser.add_argument("--data")
    args = parser.parse_args(commands(make, tmp_path, capsys))
    files = data.scan(args.data, args.include, args.exclude)
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


@pytest.mark.parametrize("make", DAILY, ids=lambda make: make.__name__)
def test_three_steps_of_training_by_the_commands_of_the_page(make, tmp_path, capsys):
    given = commands(make, tmp_path, capsys)
    argv = [*TRAIN.split(), "--steps", "3", "--log-every", "1", "--out", str(tmp_path / "out")]
    status = train_fsdp.main([*argv, *given])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert "step 3/3" in said.out and "unreadable" not in said.out, said.out
