"""Keep a program running when its terminal output cannot be written.

Call `make_safe` first in a program. From then on a full disk or a closed pipe behind stdout or
stderr loses lines, not the run, and a character that the terminal cannot show is printed as an
escape. Copy this one file: it needs nothing else.
"""

import errno
import io
import os
import sys
from typing import Any


class Lossy(io.FileIO):
    """A file whose writes succeed: what it does not take is lost."""

    lost: OSError | None = None  # to a full disk, say; a reader that went away wanted no more

    def write(self, content: Any, /) -> int:
        try:
            taken = super().write(content)
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.lost = error
            return len(content)
        return len(content) if taken is None else taken  # None: a full pipe that does not block


def make_safe() -> None:
    """Let no write to stdout or stderr fail, and write each line at once."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            lossy = io.BufferedWriter(Lossy(stream.fileno(), "w", closefd=False))
        except (AttributeError, OSError):  # closed by the caller, or no file at all
            continue
        text = io.TextIOWrapper(lossy, stream.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, text)


def lost() -> str | None:
    """Say why part of stdout was lost, for a program that makes nothing else; None if none was."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = raw.lost if isinstance(raw, Lossy) else None
    return f"{os.path.basename(sys.argv[0])}: error: stdout: {error.strerror}" if error else None
