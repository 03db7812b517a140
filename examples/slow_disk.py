"""Train with images on a slow disk: opening an image file takes so many milliseconds longer.

    python examples/slow_disk.py 30 --model tiny --img-size 96 --data examples/tiles/train

What follows the milliseconds are flags of train_fsdp.py. The few files of a pack stay open.
"""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from data import ImageList

read = ImageList.read


def read_slowly(self: ImageList, index: int) -> bytes:
    """Read a whole image file, after a pause if it is a file of its own."""
    if not self.packed:
        time.sleep(float(sys.argv[1]) / 1000)
    return read(self, index)


# Here and not below: the processes of the data loader import this file too.
ImageList.read = read_slowly  # type: ignore[method-assign]

if __name__ == "__main__":
    import train_fsdp

    if not sys.argv[1:] or not sys.argv[1].isdigit():
        raise SystemExit(
            "give the milliseconds first: python examples/slow_disk.py 30 --model tiny"
        )
    raise SystemExit(train_fsdp.main(sys.argv[2:]))
