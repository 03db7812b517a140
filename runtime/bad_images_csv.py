"""The list of unreadable images: a CSV file of path, reason and step."""

import csv
import os
from collections.abc import Sequence

COLUMNS = ("path", "reason", "step")


def append_rows(path: str, rows: Sequence[tuple[str, str, int | None]]) -> None:
    """Append (path, reason, step or None), with a heading where the file is new; OSError.

    The step is the first in which the image was found, counted from 1.
    """
    if not rows:
        return
    new = not os.path.exists(path)
    with open(path, "a", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerows(rows)


def read_paths(path: str) -> set[str]:
    """Read the paths that are listed, if any; ValueError where `path` is no regular file."""
    if not os.path.exists(path):
        return set()
    if not os.path.isfile(path):  # opening a FIFO would not return
        raise ValueError(f"{path} is no file: move it away")
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return {row["path"] for row in csv.DictReader(file) if row.get("path")}
