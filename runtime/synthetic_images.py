"""Images without files: what --data synthetic trains on. Loader workers import this file."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

SIDE = 256  # pixels


@dataclass(frozen=True)
class SyntheticImages:
    """Smooth random pictures of uint8 from (seed, index), learnable: a data.ImageSource."""

    seed: int
    channels: int = 3
    count: int = 1_000_848  # as many as Million-AID has: train 10,000 + test 990,848

    def __len__(self) -> int:
        return self.count

    def path(self, index: int) -> str:
        """Return a name for messages."""
        return f"synthetic image {index}"

    def read(self, index: int) -> Image.Image | np.ndarray:
        """Make a picture: RGB, or an array (C, H, W)."""
        draw = np.random.default_rng((self.seed, index))
        coarse = draw.integers(0, 256, (8, 8, self.channels), dtype=np.uint8)
        channels = (Image.fromarray(coarse[..., c].copy()) for c in range(self.channels))
        smooth = [channel.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for channel in channels]
        if self.channels == 3:
            return Image.merge("RGB", smooth)
        return np.stack([np.asarray(channel) for channel in smooth])
