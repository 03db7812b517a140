"""Time contestants in turns, and print a table of ratios."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def turns(contestants: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield each contestant once per round; every round begins with another one."""
    for i in range(rounds):
        first = i % len(contestants)
        yield from (*contestants[first:], *contestants[:first])


def seconds_of(work: Callable[[], object], wait: Callable[[], object]) -> float:
    """Time a call from one `wait`, for the GPU or for the other ranks, to the next."""
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def table(title: str, unit: str, found: Mapping[str, Sequence[float]], base: str) -> str:
    """Format the median of each row, and its ratios to the row `base`.

    A ratio is taken within each round; the columns are the median, the smallest and the largest.
    """
    lines = [f"\n{title:28}{unit:>10}{'ratio':>8}{'from':>8}{'to':>8}"]
    for name, values in found.items():
        ratios = [value / other for value, other in zip(values, found[base], strict=True)]
        columns = "".join(f"{f(ratios):8.2f}" for f in (median, min, max))
        lines.append(f"{name:28}{median(values):10.4g}{columns}")
    return "\n".join(lines)
