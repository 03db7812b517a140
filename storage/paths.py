"""Where what is known of a folder of images is kept."""

import os


def is_pack(folder: str) -> bool:
    """Tell whether `folder` is a pack of images, not a tree of files."""
    return os.path.exists(os.path.join(folder, "pack.index"))


def stats_file(folder: str) -> str:
    """Return where `prepare.py stats` keeps the mean and deviation of each channel.

    Every spelling of a folder gives the same path: `.`, a link to it, or one with a slash behind.
    """
    folder = os.path.realpath(folder)
    if is_pack(folder):
        return os.path.join(folder, "stats.json")
    # beside a tree, not in it, where a new file would make the list of its files outdated
    return f"{folder}.stats.json"
