"""Compare data.py with torchvision's ImageFolder: images per second, from files and from a pack.

    python -m benchmarks.data                # 700 generated images, six rounds; some ten minutes
    python -m benchmarks.data --data DIR     # your own: whole images in class folders below DIR

ImageFolder has the transforms of MAE's recipe. `draft and torchvision` is the fastest that a user
makes of Pillow and torchvision: it decodes at a smaller scale and leaves uint8 to be normalised on
the device, both as data.py does, so these two compare like with like. All read the same images in
the same order; each round reads others. Images are decoded from the page cache.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import functional

import data
import prepare
from benchmarks import timing

SIDE = 224
BATCH = 32
SMALLEST = 110  # sides of the generated images, pixels
LARGEST = 2300
BICUBIC = transforms.InterpolationMode.BICUBIC


def make_tree(root: Path, images: int) -> None:
    """Write so many JPEGs in 51 classes, two and three levels deep as in Million-AID.

    Sides are spread evenly in their logarithm; a picture has shapes, finer ones, a little grain.
    """
    for i in range(images):
        generator = np.random.default_rng(i)
        leaf = i % 51
        folder = root / f"area_{leaf % 8}" / (f"part_{leaf % 14}" if leaf % 4 else "") / f"c{leaf}"
        folder.mkdir(parents=True, exist_ok=True)
        width, height = (SMALLEST * (LARGEST / SMALLEST) ** generator.random(2)).astype(int)
        total = np.zeros((height, width, 3), np.float32)
        for cells, weight in ((6, 90), (40, 40), (200, 18)):
            coarse = generator.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
            big = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            total += (np.asarray(big, np.float32) - 128) * (weight / 128)
        grain = generator.integers(-6, 7, (height, width, 1), dtype=np.int8)
        pixels = (total + 128 + grain).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"P{i:07}.jpg", quality=90)


# --- Loaders, each called with workers, steps and seed


def ours(root: str, exact: bool, workers: int, steps: int, seed: int) -> Iterable[Any]:
    """Load a tree or a pack by data.py."""
    sizes: Any = {
        "img_size": SIDE,
        "patches": 196,
        "global_batch": BATCH,
        "micro_batch_size": BATCH,
    }
    options: Any = {"seed": seed, "steps": range(steps), "workers": workers, "exact": exact}
    return data.build_loader(data.scan(root), **sizes, **options)


def image_folder(root: str, workers: int, steps: int, seed: int) -> Iterable[Any]:
    """Load by torchvision, with the transforms of MAE's recipe."""
    recipe = [
        transforms.RandomResizedCrop(SIDE, scale=(0.2, 1.0), interpolation=BICUBIC),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(data.IMAGENET.mean, data.IMAGENET.std),
    ]
    dataset = ImageFolder(root, transforms.Compose(recipe))
    where = {path: i for i, (path, _) in enumerate(dataset.samples)}
    wanted = [where[path] for path in paths(root, steps, seed)]
    return plain_loader(Subset(dataset, wanted), workers)


def drafted(root: str, workers: int, steps: int, seed: int) -> Iterable[Any]:
    """Load by Pillow's draft mode and torchvision."""
    return plain_loader(DraftedImages(paths(root, steps, seed)), workers)


def paths(root: str, steps: int, seed: int) -> list[str]:
    """List the images that `ours` reads, in its order."""
    files = data.scan(root)
    order = data.ImageOrder(len(files), BATCH, seed)
    return [files.path(order.image_at(position)) for position in range(steps * BATCH)]


@dataclass
class DraftedImages(Dataset[Any]):
    """JPEGs, decoded at the smallest scale that a crop allows, cut out, resized and flipped."""

    paths: list[str]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.paths[index])
        crop = transforms.RandomResizedCrop.get_params(image, (0.2, 1.0), (3 / 4, 4 / 3))
        scale = max(n for n in (1, 2, 4, 8) if n == 1 or min(crop[2:]) >= n * SIDE)
        image.draft("RGB", (image.width // scale, image.height // scale))
        part = functional.crop(image, *[pixels // scale for pixels in crop])
        pixels = functional.pil_to_tensor(part)
        pixels = functional.resize(pixels, [SIDE, SIDE], BICUBIC, antialias=True)
        return functional.horizontal_flip(pixels) if torch.rand(()) < 0.5 else pixels


def plain_loader(dataset: Dataset[Any], workers: int) -> Iterable[Any]:
    """Make a DataLoader whose workers start and read ahead as those of data.py do."""
    options: Any = {}
    if workers:
        options = {"multiprocessing_context": "forkserver", "prefetch_factor": data.PREFETCH}
    return DataLoader(dataset, BATCH, num_workers=workers, **options)


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
        tree = args.data
        if tree is None:
            tree = f"{folder}/tree"
            make_tree(Path(tree), args.images)
        pack = f"{folder}/pack"
        prepare.main(["pack", tree, pack, "--max-side", "512"])
        loaders = {
            "ImageFolder": partial(image_folder, tree),
            "draft and torchvision": partial(drafted, tree),
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
