"""Images for tests, and what data.py must make of them."""

import io
import shutil
import zlib
from collections import namedtuple

import numpy as np
import torch
from conftest import ROOT
from PIL import Image
from torchvision.transforms import RandomResizedCrop
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


def saved_array(array):
    """Return the bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# all there is to know of one sample that was read: its masking order, the CRC of its pixels
Row = namedtuple("Row", "position step path order pixels")


def dataset_of(files, img_size, global_batch, seed=0, **options):
    """Build the data set of data.build_loader alone, for 16 patches."""
    order = data.ImageOrder(len(files), global_batch, seed)
    return data.Images(files, order, img_size, 16, **options)


def stream(files, *, ranks=1, accum=1, global_batch=48, steps=range(6), **options):
    """List what all ranks read, sorted by position."""
    options = {"img_size": 32, "patches": 16, "seed": 0, "world_size": ranks} | options
    options |= {"global_batch": global_batch, "steps": steps}
    options["micro_batch_size"] = global_batch // (ranks * accum)
    rows = []
    for rank in range(ranks):
        loader = data.build_loader(files, rank=rank, **options)
        places = list(loader.batch_sampler)
        before = torch.get_rng_state()
        batches = list(loader)
        assert torch.equal(torch.get_rng_state(), before)
        assert len(places) == len(batches) == len(steps) * accum
        for i, (place, batch) in enumerate(zip(places, batches, strict=True)):
            samples = zip(place, batch.image, batch.noise, batch.image_ids, strict=True)
            for position, image, noise, image_id in samples:
                order = tuple(noise.argsort().tolist())
                pixels = zlib.crc32(image.numpy())
                rows.append(Row(position, steps[i // accum], files.path(image_id), order, pixels))
    return sorted(rows)


def by_torchvision(pixels, seed, position, side, scales=(1,)):
    """Make with torchvision what an image (C, H, W) becomes at a position -> its noise, pixels.

    It is decoded at the smallest of the scales 1/n at which the crop has the target's pixels; the
    edges of the crop are then multiples of n.
    """
    word = int(np.random.SeedSequence((seed, position)).generate_state(1)[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(word)
        noise = torch.randperm(16).float()
        flip = torch.rand(()) < 0.5
        crop = RandomResizedCrop.get_params(pixels, [0.2, 1.0], [3 / 4, 4 / 3])
    top, left, height, width = crop
    n = max(scale for scale in scales if scale == 1 or min(height, width) >= scale * side)
    edges = (top, left, top + height, left + width)
    top, left, bottom, right = (n * round(edge / n) for edge in edges)
    part = pixels[:, top:bottom, left:right]
    part = v2.resize(part, [side, side], v2.InterpolationMode.BICUBIC)
    return noise, (v2.horizontal_flip(part) if flip else part).contiguous()
