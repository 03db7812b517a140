"""Signals that ask a run to stop: collected from its first moment on, read by the training loop.

It imports nothing heavy, because it is called above the imports of the program.
"""

import signal


def collect() -> list[int]:
    """Collect SIGTERM, SIGUSR1 and SIGINT in the list returned; a second Ctrl-C kills."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, handle)
    return received
