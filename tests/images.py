"""Images for tests, and what data.py must make of them."""

import io
import shutil
import zlib
from collections import namedtuple
from functools import partial

import numpy as np
from conftest import ROOT
from PIL import Image
from torchvision.transforms.v2 import functional as v2

import data


def noise_image(seed, width=40, height=40):
    """Draw an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def copy_tiles(folder, count):
    """Make a folder with the first of the tiles to train on, as 00.jpg, 01.jpg, and so on."""
    folder.mkdir()
    tiles = sorted((ROOT / "examples" / "tiles" / "train").glob("*/*.jpg"))
    for i in range(count):
        shutil.copy(tiles[i], folder / f"{i:02d}.jpg")


def saved(kind, image, **options):
    """Return the bytes of an image file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


# all there is to know of one sample that was read: its masking order, the CRC of its pixels
Row = namedtuple("Row", "position step path order pixels")
Sample = namedtuple("Sample", "image noise image_id bad")  # of one image


def dataset_of(files, img_size, patches, seed, global_batch, **options):
    """Build the data set of data.build_loader alone."""
    order = data.ImageOrder(len(files), global_batch, seed)
    return data.Images(files, order, img_size, patches, **options)


def sample_at(dataset, position):
    """Read the sample at a position of the stream."""
    image, noise, image_ids, bad = dataset[position]
    return Sample(image, noise, image_ids[0], bad)


def stream(files, *, ranks=1, accum=1, global_batch=48, steps=range(6), **options):
    """List what all ranks read, sorted by position."""
    given = {"img_size": 32, "patches": 16, "seed": 0} | options
    build = partial(data.build_loader, files, global_batch=global_batch, steps=steps, **given)
    rows = []
    for rank in range(ranks):
        loader = build(
            micro_batch_size=global_batch // (ranks * accum), rank=rank, world_size=ranks
        )
        places = list(loader.batch_sampler)
        batches = list(loader)
        assert len(places) == len(batches) == len(steps) * accum
        for i, (place, batch) in enumerate(zip(places, batches, strict=True)):
            samples = zip(place, batch.image, batch.noise, batch.image_ids, strict=True)
            for position, image, noise, image_id in samples:
                order = tuple(noise.argsort().tolist())
                pixels = zlib.crc32(image.numpy())
                path = files.path(image_id)
                rows.append(Row(position, steps[i // accum], path, order, pixels))
    return sorted(rows)


def by_torchvision(pixels, seed, position, side, reduce=1):
    """Make with torchvision what an image (C, H, W) must become at a position of the stream.

    The crop of an image that is decoded at 1/reduce has its edges at multiples of `reduce`.
    """
    size = pixels.shape[:0:-1]  # width, height
    _, flip, (top, left, height, width) = data.draw_augmentation(seed, position, 16, *size)
    edges = (top, left, top + height, left + width)
    top, left, bottom, right = (reduce * round(n / reduce) for n in edges)
    crop = pixels[:, top:bottom, left:right]
    crop = v2.resize(crop, [side, side], v2.InterpolationMode.BICUBIC)
    return (v2.horizontal_flip(crop) if flip else crop).contiguous()
