"""Where the files that describe a folder of images are kept."""

import os


def is_pack(folder: str) -> bool:
    """Tell whether `folder` is a pack of images, not a folder of image files."""
    return os.path.exists(os.path.join(folder, "pack.index"))


def stats_file(folder: str) -> str:
    """Return where `prepare.py stats` keeps the mean and standard deviation of each channel.

    Every spelling of a folder gives the same path: `.`, a link to it, or a slash at its end.
    """
    folder = os.path.realpath(folder)
    if is_pack(folder):
        return os.path.join(folder, "stats.json")
    # beside a folder, not in it: a new file in it would change the list of its files
    return f"{folder}.stats.json"
