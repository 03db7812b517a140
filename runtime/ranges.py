"""Values of a command line: the range of a number, and one sentence for what lies outside of it.

    add("--steps", type=whole(1, 1000))
    add("--mask-ratio", type=number(0, 1))

Digits are 0 to 9, with a minus at most: no `+1`, no ` 1`, no `1_000`; nan and infinity are no
numbers. It needs the standard library alone, so that a program without torch can use it.
"""

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

MOST_SECONDS = 7 * 24 * 3600  # of any limit that waits
MOST_STEPS = 10**8 - 1  # a checkpoint's name has eight digits


class Parser(argparse.ArgumentParser):
    """Print an error as one sentence; exit status 2. Flags are written out, not abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | kwargs))

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(2)


def whole(low: int, high: int) -> Callable[[str], int]:
    """Make an argparse type: a whole number from `low` to `high`."""

    def convert(text: str) -> int:
        # int() itself refuses thousands of digits, and takes those of any alphabet
        if re.fullmatch(r"-?[0-9]{1,20}", text) and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number from {low} to {high}")

    return convert


def number(low: float, high: float) -> Callable[[str], float]:
    """Make an argparse type: a number from `low` to `high`."""

    def convert(text: str) -> float:
        plain = re.fullmatch(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", text)
        if plain and low <= float(text) <= high:
            return float(text)
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number from {low:g} to {high:g}")

    return convert


def filled(text: str) -> str:
    """Be an argparse type: any text but none, which is what an unset variable of a shell gives."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r:.40} is empty: is a shell variable unset?")
    return text
