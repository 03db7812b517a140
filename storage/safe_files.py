"""Open and replace files: never wait for a FIFO, name the file in errors, leave no half file."""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO


def regular(path: str, flags: int) -> int:
    """Open a regular file, as an `opener` of `open`; ValueError for anything else."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)  # a FIFO would wait for its other end
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return descriptor


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Add `path` to an OSError without one: a failed read or write does not say of which file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` once it is written and synced.

    After an error the temporary file is removed, and `path` is as it was.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with naming(path):
            with open(temporary, "xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
