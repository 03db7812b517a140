"""Compare data.py with its peers: images per second of one core, of two workers, and from a pack.

    python -m benchmarks.data                    # a generated tree, six rounds; some ten minutes
    python -m benchmarks.data --data DIR         # your own tree: class folders below DIR
    python -m benchmarks.data --index 1000000    # the list of so many files instead

Each round runs every loader once, so that other load on the machine affects all alike; a ratio is
taken within a round. Peers: torchvision's ImageFolder with the transforms of MAE's recipe, v1
and v2, and timm's loader where it is installed. Images are decoded from the page cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

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


# ---------------------------------------------------------------------------------------------
# Images to read


def picture(generator: np.random.Generator, width: int, height: int) -> Image.Image:
    """Something between a photograph and noise: coarse shapes, finer ones, a little grain."""
    total = np.zeros((height, width, 3), np.float32)
    for cells, weight in ((6, 90), (40, 40), (200, 18)):
        coarse = generator.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        big = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        total += (np.asarray(big, np.float32) - 128) * (weight / 128)
    grain = generator.integers(-6, 7, (height, width, 1), dtype=np.int8)
    return Image.fromarray(np.clip(total + 128 + grain, 0, 255).astype(np.uint8))


class Mixture(NamedTuple):
    """Images of a data set: JPEGs of quality 90, PNG, uncompressed TIFF."""

    smallest: int  # side, pixels; sides are spread evenly in their logarithm
    largest: int
    every: int  # one PNG and one TIFF in so many images
    huge: int  # JPEGs of 8,000 px besides

    def __str__(self) -> str:
        share = f"{1 / self.every:.0%}"
        return (
            f"{self.smallest} to {self.largest:,} px, {share} PNG, {share} TIFF, the rest JPEG; "
            f"{self.huge} JPEGs of 8,000 px"
        )


# Sides of Million-AID are said to be mixed; nobody says how.
MIXTURES = {"jpeg": Mixture(256, 2000, 50, 9), "mixed": Mixture(110, 2300, 20, 0)}


def make_tree(root: Path, images: int, mixture: Mixture) -> None:
    """Write so many images in 51 classes two and three levels deep, and the huge ones."""
    low, high, every, huge = mixture
    for i in range(images + huge):
        generator = np.random.default_rng(i)
        leaf = i % 51
        folder = root / f"area_{leaf % 8}" / (f"part_{leaf % 14}" if leaf % 4 else "") / f"c{leaf}"
        folder.mkdir(parents=True, exist_ok=True)
        width, height = (int(low * (high / low) ** x) for x in generator.random(2))
        if i >= images:
            width = height = 8000
        suffix, options = ".jpg", {"quality": 90}
        if i < images and i % every in (7, 23 % every):
            suffix, options = ((".png", {}), (".tif", {}))[i % every != 7]
        picture(generator, width, height).save(folder / f"P{i:07}{suffix}", **options)


# ---------------------------------------------------------------------------------------------
# Loaders


def ours(root: str, workers: int, steps: int, seed: int, exact: bool = False) -> Iterable[Any]:
    return data.build_loader(
        image_list.list_images(root),
        img_size=SIDE,
        patches=PATCHES,
        seed=seed,
        global_batch=BATCH,
        local_batch=BATCH,
        steps=range(steps),
        workers=workers,
        exact=exact,
    )


def same_images(root: str, steps: int, seed: int, samples: list[tuple[str, int]]) -> list[int]:
    """Where in a peer's list the images are that `ours` reads, in its order.

    timm takes no TIFF, and no peer a broken file: they have to read that much less.
    """
    files, broken = data.scan(root), broken_images(root)
    order = data.ImageOrder(len(files), BATCH, seed)
    where = {os.path.realpath(path): i for i, (path, _) in enumerate(samples)}
    indices = [order.image_at(position) for position in range(steps * BATCH)]
    paths = [os.path.realpath(files.path(i)) for i in indices if i not in broken]
    return [where[path] for path in paths if path in where]


@cache
def broken_images(root: str) -> set[int]:
    """Decode all images of a tree -> those that cannot be read."""
    files = image_list.list_images(root)
    return {i for i, _ in checking.find_problems(files, range(len(files)))}


def peer(dataset: Any, order: list[int], workers: int, collate: Any = None) -> Iterable[Any]:
    context = get_context("forkserver") if workers else None
    return DataLoader(
        Subset(dataset, order),
        BATCH,
        num_workers=workers,
        collate_fn=collate,
        multiprocessing_context=context,
        prefetch_factor=4 if workers else None,
    )


def image_folder(root: str, workers: int, steps: int, seed: int, transform: Any) -> Iterable[Any]:
    """Its classes are the first level of folders only, which costs nothing here."""
    folder = ImageFolder(root, transform)
    return peer(folder, same_images(root, steps, seed, folder.samples), workers)


def timms(root: str, workers: int, steps: int, seed: int) -> Iterable[Any]:
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root)
    loader = create_loader(  # gives the data set its transform
        dataset,
        (3, SIDE, SIDE),
        BATCH,
        is_training=True,
        use_prefetcher=False,
        color_jitter=None,
        scale=(0.2, 1.0),
        ratio=(3 / 4, 4 / 3),
        interpolation="bicubic",
        num_workers=0,
        persistent_workers=False,
    )
    samples = [(dataset.filename(i, absolute=True), 0) for i in range(len(dataset))]
    return peer(dataset, same_images(root, steps, seed, samples), workers, loader.collate_fn)


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


def loaders(tree: str, pack: str) -> dict[str, Callable[[int, int, int], Iterable[Any]]]:
    """Each is called with workers, steps and seed; the first is what the others are compared to."""
    found: dict[str, Callable[[int, int, int], Iterable[Any]]] = {
        "ImageFolder, v1": lambda w, n, s: image_folder(tree, w, n, s, CLASSIC),
        "ImageFolder, v2": lambda w, n, s: image_folder(tree, w, n, s, CLASSIC2),
    }
    try:
        import timm  # noqa: F401

        found["timm"] = lambda w, n, s: timms(tree, w, n, s)
    except ImportError:
        print("timm is not installed: left out")
    found["data.py, exact"] = lambda w, n, s: ours(tree, w, n, s, exact=True)
    found["data.py"] = lambda w, n, s: ours(tree, w, n, s)
    found["data.py, pack"] = lambda w, n, s: ours(pack, w, n, s)
    return found


def rate(loader: Iterable[Any], steps: int) -> float:
    """Measure images per second, without the start of the workers."""
    batches = iter(loader)
    next(batches)
    started = time.perf_counter()
    seen = sum(1 for _ in islice(batches, steps - 1))
    return seen * BATCH / (time.perf_counter() - started)


def compare(tree: str, pack: str, rounds: int, steps: int) -> Iterator[str]:
    """Lines of a table for one core and for two workers."""
    prepare.main(["pack", tree, pack, "--max-side", "512"])
    found = loaders(tree, pack)
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


# ---------------------------------------------------------------------------------------------
# One very large image


def memory_mib(what: str) -> float:
    """Of this process: VmRSS, what it holds now, or VmHWM, the most it has held."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 2**10 for line in text.splitlines() if what in line)


def read_once(path: str, how: str) -> None:
    """In a process of its own: seconds and MiB that one image takes, beyond a small one."""
    files = data.scan(path)
    images = data.Images(files, data.ImageOrder(len(files), 1, 0), SIDE, PATCHES)

    def read() -> None:
        if how == "ours":
            images[0, 0]
        else:
            with Image.open(files.path(0)) as image:
                CLASSIC(image.convert("RGB"))

    small = Image.new("RGB", (300, 300))
    CLASSIC(small)
    small.save(Path(path) / ".small.jpg")
    data.decode(data.open_image((Path(path) / ".small.jpg").read_bytes())[0])
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory_mib("VmRSS")
    read()
    memory = memory_mib("VmHWM") - before
    started = time.perf_counter()
    read()
    print(time.perf_counter() - started, memory)


def one_large(rounds: int) -> Iterator[str]:
    """8,000 x 8,000 pixels, each reading in a fresh process, in turns."""
    Image.MAX_IMAGE_PIXELS = None
    with tempfile.TemporaryDirectory() as folder:
        picture(np.random.default_rng(0), 8000, 8000).save(Path(folder) / "x.jpg", quality=90)
        seen: dict[str, list[list[float]]] = {"ours": [], "classic": []}
        for _ in range(rounds):
            for how in seen:
                command = [sys.executable, "-m", "benchmarks.data", "--read-once", folder, how]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                seen[how].append([float(x) for x in done.stdout.split()])
        ours_s, ours_m = (statistics.median(x) for x in zip(*seen["ours"], strict=True))
        other_s, other_m = (statistics.median(x) for x in zip(*seen["classic"], strict=True))
    yield f"\n8,000 x 8,000 JPEG: {ours_s:.3f} s and {ours_m:.0f} MiB more; whole: {other_s:.3f} s "
    yield f"and {other_m:.0f} MiB: {other_s / ours_s:.1f} times as fast, {rounds} rounds"


# ---------------------------------------------------------------------------------------------
# A million files


def proportional_kib(pid: int) -> int:
    """Memory of a process, KiB, in which a page that n processes map counts 1/n."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def hold(path: str | None, root: str, orders: Any, go: Any) -> None:
    """A worker that has the list and has touched all of it."""
    if path:
        files = image_list.load_index(path, root)
        total = int(files.names.sum()) + int(files.ends.sum()) + int(files.sizes.sum())
        total += int(files.labels.sum()) + int(files.times.sum())
        assert total
    orders.put(os.getpid())
    go.wait()


def memory_of_workers(path: str | None, root: str, count: int) -> float:
    """MiB of so many processes together."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "storage.image_list"])
    ready, go = context.Queue(), context.Event()
    workers = [context.Process(target=hold, args=(path, root, ready, go)) for _ in range(count)]
    for worker in workers:
        worker.start()
    pids = [ready.get() for _ in workers]
    total = sum(proportional_kib(pid) for pid in pids) / 2**10
    go.set()
    for worker in workers:
        worker.join()
    return total


def index_of(count: int) -> Iterator[str]:
    """Build, load, memory and shuffle of a list of so many (empty) files in 51 folders."""
    with tempfile.TemporaryDirectory() as above:
        folder = f"{above}/tree"
        for leaf in range(51):
            (Path(folder) / f"area_{leaf % 8}" / f"class_{leaf}").mkdir(parents=True)
        for i in range(count):
            leaf = i % 51
            place = f"{folder}/area_{leaf % 8}/class_{leaf}/P{i:07}.jpg"
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
        started = time.perf_counter()
        files = image_list.list_images(folder)
        built = time.perf_counter() - started
        path = f"{above}/the.index"
        started = time.perf_counter()
        image_list.save_index(files, path)
        saved = time.perf_counter() - started
        started = time.perf_counter()
        files = image_list.load_index(path, folder)
        loaded = time.perf_counter() - started
        started = time.perf_counter()
        problem = image_list.outdated(files)
        checked = time.perf_counter() - started
        assert problem is None, problem
        size = os.path.getsize(path) / 2**20
        without, with_list = (memory_of_workers(p, folder, 8) for p in (None, path))
        order = data.ImageOrder(len(files), BATCH, seed=0)
        shuffles = []
        for epoch in range(5):
            started = time.perf_counter()
            order.image_at(epoch * order.epoch_samples)
            shuffles.append(time.perf_counter() - started)
    yield f"{count} files: listed in {built:.1f} s, {count / built:,.0f} per second; written in "
    yield f"{saved:.2f} s, {size:.0f} MiB; loaded in {1e3 * loaded:.1f} ms, checked in "
    yield f"{1e3 * checked:.1f} ms; 8 workers that touched it all: {with_list - without:.0f} MiB "
    yield f"more together; shuffle {1e3 * statistics.median(shuffles):.0f} ms per epoch"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", help="a tree of class folders (default: one is generated)")
    parser.add_argument("--mixture", choices=[*MIXTURES], help="of generated images (default: all)")
    parser.add_argument("--images", type=int, default=700, help="of each generated tree")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=11, help=f"batches of {BATCH} per turn")
    parser.add_argument("--index", type=int, metavar="FILES", help="measure the list of files")
    parser.add_argument("--read-once", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.read_once:
        read_once(*args.read_once)
        return
    if args.index:
        print("".join(index_of(args.index)))
        return
    Image.MAX_IMAGE_PIXELS = None  # or the peers warn of large images
    with tempfile.TemporaryDirectory() as folder:
        trees = {args.data: args.data} if args.data else {}
        for name in () if args.data else [args.mixture] if args.mixture else MIXTURES:
            trees[f"{args.images} images of {MIXTURES[name]}"] = f"{folder}/{name}"
            make_tree(Path(folder, name), args.images, MIXTURES[name])
        for title, tree in trees.items():
            print(f"\n{title}", flush=True)
            pack = f"{folder}/pack of {Path(tree).name}"
            for line in compare(tree, pack, args.rounds, args.steps):
                print(line, flush=True)
        print("".join(one_large(args.rounds)))


if __name__ == "__main__":
    main()
