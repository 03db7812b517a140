"""Your own images behind data.py: its order, augmentation, substitutes and loader.

    python -m examples.own_images       # here; or copy this file and data.py into one folder:
    python own_images.py

The images are windows of one large array on disk, as a scene of 12 bands is often kept. All that a
data set needs is `__len__`, `path` and `read`, and the statistics of its channels.
"""

import os
import tempfile

import numpy as np

import data


class Windows:
    """Windows of an array (C, H, W) in a .npy file, side by side."""

    def __init__(self, file: str, side: int) -> None:
        self.file = file
        self.side = side
        _, height, width = np.load(file, mmap_mode="r").shape
        self.rows = height // side
        self.columns = width // side

    def __len__(self) -> int:
        return self.rows * self.columns

    def path(self, index: int) -> str:
        """Return a name for messages, such as those of images that cannot be read."""
        return f"{self.file} window {index}"

    def read(self, index: int) -> np.ndarray:
        """Return (C, side, side) uint8, uint16 or float32.

        A Pillow image, or the bytes of a file, would do as well. An OSError or
        data.UnreadableImage lets another image stand in; any other exception ends the run.
        """
        row, column = divmod(index, self.columns)
        top = row * self.side
        left = column * self.side
        scene = np.load(self.file, mmap_mode="r")  # reads only what is used of it
        return scene[:, top : top + self.side, left : left + self.side]


def main(file: str) -> None:
    """Load a few batches, as rank 0 of 2 would, and normalise them."""
    windows = Windows(file, side=64)
    pixels = np.stack([windows.read(i) for i in range(len(windows))]).astype(np.float64)
    mean = pixels.mean((0, 2, 3))  # (12,), of values as stored
    std = pixels.std((0, 2, 3))
    stats = data.ChannelStats(tuple(mean.tolist()), tuple(std.tolist()), "uint16")
    steps = range(5)  # range(3, 5) resumes at step 3: the same windows, crops and flips
    # The stream of samples is that of the global batch, whatever the number of ranks and workers.
    loader = data.build_loader(
        windows,
        img_size=32,
        patches=16,
        seed=0,
        global_batch=16,
        micro_batch_size=8,
        steps=steps,
        rank=0,
        world_size=2,
        workers=1,
        stats=stats,
    )
    for step, batch in zip(steps, loader, strict=True):
        images = data.normalize(batch.image, stats)  # (8, 12, 32, 32) float32, for a model
        shape = tuple(images.shape)
        print(f"step {step}: {shape}, windows {batch.image_ids}, mean {images.mean():.2f}")


if __name__ == "__main__":  # loader processes import this file
    with tempfile.TemporaryDirectory() as folder:
        scene = np.random.default_rng(0).integers(0, 10_000, (12, 512, 512), dtype=np.uint16)
        np.save(os.path.join(folder, "scene.npy"), scene)
        main(os.path.join(folder, "scene.npy"))
