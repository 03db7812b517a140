"""Compare data.py with torchvision's ImageFolder: images per second, from files and from a pack.

    python -m benchmarks.data                # 700 generated images, six rounds; some ten minutes
    python -m benchmarks.data --data DIR     # your own: whole images in class folders below DIR

ImageFolder has the transforms of MAE's recipe, and reads the same images in the same order. Each
round reads others. Images are decoded from the page cache.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

import data
import prepare
from benchmarks import timing
from storage import image_list

SIDE, BATCH, PATCHES = 224, 32, 196
SMALLEST, LARGEST = 110, 2300  # sides, pixels


def picture(generator: np.random.Generator, width: int, height: int) -> Image.Image:
    """Draw something between a photograph and noise: shapes, finer ones, a little grain."""
    total = np.zeros((height, width, 3), np.float32)
    for cells, weight in ((6, 90), (40, 40), (200, 18)):
        coarse = generator.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        big = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        total += (np.asarray(big, np.float32) - 128) * (weight / 128)
    grain = generator.integers(-6, 7, (height, width, 1), dtype=np.int8)
    return Image.fromarray(np.clip(total + 128 + grain, 0, 255).astype(np.uint8))


def make_tree(root: Path, images: int) -> None:
    """Write so many JPEGs in 51 classes two and three levels deep, as Million-AID has them.

    Sides are spread evenly in their logarithm; nobody says how those of Million-AID are.
    """
    for i in range(images):
        generator = np.random.default_rng(i)
        leaf = i % 51
        folder = root / f"area_{leaf % 8}" / (f"part_{leaf % 14}" if leaf % 4 else "") / f"c{leaf}"
        folder.mkdir(parents=True, exist_ok=True)
        width, height = (int(SMALLEST * (LARGEST / SMALLEST) ** x) for x in generator.random(2))
        picture(generator, width, height).save(folder / f"P{i:07}.jpg", quality=90)


# --- Loaders, each called with workers, steps and seed


def ours(root: str, exact: bool, workers: int, steps: int, seed: int) -> Iterable[Any]:
    """Load a tree or a pack by data.py."""
    return data.build_loader(
        image_list.list_images(root, print),
        img_size=SIDE,
        patches=PATCHES,
        seed=seed,
        global_batch=BATCH,
        local_batch=BATCH,
        steps=range(steps),
        workers=workers,
        exact=exact,
    )


def image_folder(root: str, workers: int, steps: int, seed: int) -> Iterable[Any]:
    """Load by torchvision the images that `ours` reads, in its order."""
    bicubic = transforms.InterpolationMode.BICUBIC
    recipe = [
        transforms.RandomResizedCrop(SIDE, scale=(0.2, 1.0), interpolation=bicubic),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(data.IMAGENET.mean, data.IMAGENET.std),
    ]
    dataset, files = ImageFolder(root, transforms.Compose(recipe)), data.scan(root)
    where = {path: i for i, (path, _) in enumerate(dataset.samples)}
    order = data.ImageOrder(len(files), BATCH, seed)
    wanted = [where[files.path(order.image_at(position))] for position in range(steps * BATCH)]
    options = {"multiprocessing_context": "forkserver", "prefetch_factor": 4} if workers else {}
    return DataLoader(Subset(dataset, wanted), BATCH, num_workers=workers, **options)


def rate(loader: Iterable[Any], steps: int) -> float:
    """Measure images per second, without the start of the workers."""
    batches = iter(loader)
    next(batches)
    started = time.perf_counter()
    seen = sum(1 for _ in islice(batches, steps - 1))
    return seen * BATCH / (time.perf_counter() - started)


def main() -> None:
    """Make the images and a pack of them; print a table for one core and one for two workers."""
    parser = argparse.ArgumentParser(description="Compare data.py with torchvision's ImageFolder.")
    parser.add_argument("--data", help="a tree of class folders (default: one is generated)")
    parser.add_argument("--images", type=int, default=700, help="of the generated tree")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=11, help=f"batches of {BATCH} per turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    Image.MAX_IMAGE_PIXELS = None  # or Pillow warns of large images
    with tempfile.TemporaryDirectory() as folder:
        tree, pack = args.data or f"{folder}/tree", f"{folder}/pack"
        if not args.data:
            make_tree(Path(tree), args.images)
        prepare.main(["pack", tree, pack, "--max-side", "512"])
        loaders = {
            "ImageFolder": partial(image_folder, tree),
            "data.py --exact-decode": partial(ours, tree, True),
            "data.py": partial(ours, tree, False),
            "data.py from the pack": partial(ours, pack, False),
        }
        for workers, title in (0, "one process, one thread"), (2, "2 workers"):
            rates = defaultdict(list)
            for i, name in enumerate(timing.turns([*loaders], args.rounds)):
                loader = loaders[name](workers, args.steps, i // len(loaders))
                rates[name].append(rate(loader, args.steps))
            print(timing.table(title, "images/s", rates, "ImageFolder"), flush=True)


if __name__ == "__main__":
    main()
