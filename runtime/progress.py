"""Print how far a long piece of work is."""

import time
from collections.abc import Callable


def throttled_progress(
    say: Callable[[str], None], doing: str, every: float = 5.0
) -> Callable[[int], None]:
    """Make a progress function that prints a rate every few seconds, and nothing for short work."""
    started = last = time.monotonic()

    def progress(count: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every:
            last = now
            say(f"{doing}: {count} images, {count / (now - started):.0f} per second")

    return progress
