"""Compare data.py with its peers: images per second of one core, of two workers, and from a pack.

    python -m benchmarks.data                # 700 generated images, six rounds; some ten minutes
    python -m benchmarks.data --data DIR     # your own tree: class folders below DIR

Each round runs every loader once, so that other load on the machine affects all alike; a ratio is
taken within a round. Peers: torchvision's ImageFolder with the transforms of MAE's recipe, v1
and v2, and timm's loader where it is installed. Images are decoded from the page cache.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import data
import prepare
from storage import checking, image_list

SIDE, BATCH, PATCHES = 224, 32, 196
MEAN, STD = data.IMAGENET.mean, data.IMAGENET.std
SPAN = {"scale": (0.2, 1.0), "interpolation": v1.InterpolationMode.BICUBIC}
SMALLEST, LARGEST, EVERY = 110, 2300, 20  # sides, pixels; one PNG and one TIFF in so many images


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
    """Write so many images in 51 classes two and three levels deep.

    Sides are spread evenly in their logarithm; those of Million-AID are said to be mixed, nobody
    says how.
    """
    for i in range(images):
        generator = np.random.default_rng(i)
        leaf = i % 51
        folder = root / f"area_{leaf % 8}" / (f"part_{leaf % 14}" if leaf % 4 else "") / f"c{leaf}"
        folder.mkdir(parents=True, exist_ok=True)
        width, height = (int(SMALLEST * (LARGEST / SMALLEST) ** x) for x in generator.random(2))
        suffix, options = {7: (".png", {}), 3: (".tif", {})}.get(
            i % EVERY, (".jpg", {"quality": 90})
        )
        picture(generator, width, height).save(folder / f"P{i:07}{suffix}", **options)


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


@cache
def broken_images(root: str) -> set[str]:
    """Decode all images of a tree -> the paths of those that cannot be read."""
    files = image_list.list_images(root, print)
    return {row[0] for row in checking.find_problems(files, range(len(files)))}


def same_images(root: str, steps: int, seed: int, paths: list[str]) -> list[int]:
    """Find where in a peer's list the images are that `ours` reads, in its order.

    timm takes no TIFF, and no peer a broken file: they have to read that much less.
    """
    files, where = data.scan(root), {os.path.realpath(path): i for i, path in enumerate(paths)}
    order = data.ImageOrder(len(files), BATCH, seed)
    wanted = [files.path(order.image_at(position)) for position in range(steps * BATCH)]
    found = [os.path.realpath(path) for path in wanted if path not in broken_images(root)]
    return [where[path] for path in found if path in where]


def peer(dataset: Any, order: list[int], workers: int, collate: Any = None) -> Iterable[Any]:
    """Load the images of a peer's data set in this order by PyTorch's loader."""
    options = {"multiprocessing_context": "forkserver", "prefetch_factor": 4} if workers else {}
    subset = Subset(dataset, order)
    return DataLoader(subset, BATCH, num_workers=workers, collate_fn=collate, **options)  # type: ignore


def image_folder(root: str, transform: Any, workers: int, steps: int, seed: int) -> Iterable[Any]:
    """Load by torchvision; its classes are the first level of folders, which costs nothing here."""
    folder = ImageFolder(root, transform)
    order = same_images(root, steps, seed, [path for path, _ in folder.samples])
    return peer(folder, order, workers)


def timms(root: str, workers: int, steps: int, seed: int) -> Iterable[Any]:
    """Load by timm's data set, transform and collation."""
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root)
    recipe = {"scale": (0.2, 1.0), "ratio": (3 / 4, 4 / 3), "interpolation": "bicubic"}
    recipe |= {"is_training": True, "color_jitter": None}
    parts = {"use_prefetcher": False, "num_workers": 0, "persistent_workers": False}
    loader = create_loader(dataset, (3, SIDE, SIDE), BATCH, **recipe, **parts)  # sets the transform
    paths = [dataset.filename(i, absolute=True) for i in range(len(dataset))]
    return peer(dataset, same_images(root, steps, seed, paths), workers, loader.collate_fn)


CLASSIC = v1.Compose(
    [
        v1.RandomResizedCrop(SIDE, **SPAN),
        v1.RandomHorizontalFlip(),
        v1.ToTensor(),
        v1.Normalize(MEAN, STD),
    ]
)
CLASSIC2 = v2.Compose(
    [
        v2.RandomResizedCrop(SIDE, **SPAN),
        v2.RandomHorizontalFlip(),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
)


def rate(loader: Iterable[Any], steps: int) -> float:
    """Measure images per second, without the start of the workers."""
    batches = iter(loader)
    next(batches)
    started = time.perf_counter()
    seen = sum(1 for _ in islice(batches, steps - 1))
    return seen * BATCH / (time.perf_counter() - started)


def compare(tree: str, pack: str, rounds: int, steps: int) -> Iterator[str]:
    """Yield the lines of a table for one core and for two workers."""
    prepare.main(["pack", tree, pack, "--max-side", "512"])
    found: dict[str, Callable[[int, int, int], Iterable[Any]]] = {
        "ImageFolder, v1": partial(image_folder, tree, CLASSIC),  # the others' ratios are to it
        "ImageFolder, v2": partial(image_folder, tree, CLASSIC2),
        "timm": partial(timms, tree),
        "data.py, exact": partial(ours, tree, True),
        "data.py": partial(ours, tree, False),
        "data.py, pack": partial(ours, pack, False),
    }
    try:
        import timm  # noqa: F401
    except ImportError:
        print(f"timm is not installed: {found.pop('timm') and 'left out'}")
    for workers in (0, 2):
        rates: dict[str, list[float]] = {name: [] for name in found}
        for i in range(rounds):
            names = list(found)
            for name in names[i % len(names) :] + names[: i % len(names)]:
                rates[name].append(rate(found[name](workers, steps, i), steps))
        base = rates["ImageFolder, v1"]
        yield f"\n{'one process, one thread' if workers == 0 else '2 workers':24}" + (
            f"{'images/s':>10}{'ratio':>8}{'from':>8}{'to':>8}   {rounds} rounds of "
            f"{(steps - 1) * BATCH} images"
        )
        for name, values in rates.items():
            ratios = [value / other for value, other in zip(values, base, strict=True)]
            yield (
                f"{name:24}{statistics.median(values):10.1f}{statistics.median(ratios):8.2f}"
                f"{min(ratios):8.2f}{max(ratios):8.2f}"
            )


def main() -> None:
    """Read the command line, make the tree and the pack, print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", help="a tree of class folders (default: one is generated)")
    parser.add_argument("--images", type=int, default=700, help="of the generated tree")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=11, help=f"batches of {BATCH} per turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    Image.MAX_IMAGE_PIXELS = None  # or the peers warn of large images
    with tempfile.TemporaryDirectory() as folder:
        tree = args.data or f"{folder}/tree"
        if not args.data:
            make_tree(Path(tree), args.images)
            share = f"{1 / EVERY:.0%} PNG, {1 / EVERY:.0%} TIFF, the rest JPEG"
            print(f"\n{args.images} images of {SMALLEST} to {LARGEST:,} px, {share}", flush=True)
        for line in compare(tree, f"{folder}/pack", args.rounds, args.steps):
            print(line, flush=True)


if __name__ == "__main__":
    main()
