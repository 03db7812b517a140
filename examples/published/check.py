"""Compare the plan with the published measurements: print the error of every cell.

python examples/published/check.py
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import plan  # noqa: E402

Row = dict[str, Any]
FITTED = ("base", "3b")  # models the constants come from; their speed on 1 to 8 nodes only


def cells(column: str, kind: str, attribute: str) -> list[Row]:
    """Compare a column of the published rows with an attribute of their plans."""
    found = []
    for line in (HERE / "results.jsonl").read_text().splitlines():
        row: Row = json.loads(line)
        if column not in row or "caveat" in row or "options" in row["studies"]:
            continue
        # what was probably run (README.md): 257 or 325 tokens
        size = 256 if row["model"] == "base" else 252
        nodes = row["nodes"] if row["nodes"] else 1
        words = f"--model {row['model']} --mode {row['mode']} --batch 32 --img-size {size}"
        words += f" --world-size {8 * nodes} --mask-ratio 0 --encoder-only --fsdp 1 --ac full"
        if row["group"]:
            words += f" --group {row['group']}"
        _, its_plan = plan.read_command([*words.split(), "--machine", "frontier"])
        row |= {"kind": kind, "published": row[column], "planned": getattr(its_plan, attribute)}
        row["error"] = row["planned"] / row["published"] - 1
        found.append(row)
    return found


def print_cells(title: str, rows: list[Row]) -> None:
    """Print a table of cells."""
    print(f"\n{title}")
    print("model mode         group nodes kind           published   planned  error")
    for row in rows:
        group, nodes = (row[name] if row[name] else "" for name in ("group", "nodes"))
        print(
            f"{row['model']:5} {row['mode']:12} {group:5} {nodes:5} {row['kind']:13}"
            f"{row['published']:11.2f}{row['planned']:10.2f}{row['error']:+7.1%}"
        )


def print_errors(name: str, rows: list[Row]) -> None:
    """Print the median and the largest error of some cells."""
    errors = [abs(row["error"]) for row in rows]
    print(f"{name}: median {median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    active = cells("peak_active_gib", "peak_active", "peak_active_gib")
    allocated = cells("peak_allocated_gib", "max_allocated", "peak_gib")
    print_cells("memory, GiB", [*active, *allocated])
    print_errors("max_allocated", allocated)
    print_errors("peak_active", active)
    speed = cells("images_per_second", "img/s", "images_per_second")
    print_cells("speed", speed)
    many = [row for row in speed if row["nodes"] > 16]
    few = [row for row in speed if row["nodes"] > 8 or row["model"] not in FITTED]
    print_errors("predicted, up to 16 nodes", [row for row in few if row not in many])
    print_errors("predicted, 32 to 128 nodes", many)
