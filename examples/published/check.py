"""Compare the plan with the published measurements: print the error of every cell.

python examples/published/check.py
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import vit  # noqa: E402
from planner import estimate, machines  # noqa: E402
from planner.traffic import PlannedRun  # noqa: E402

FITTED = ("base", "3b")  # models the constants come from; their speed on 1 to 8 nodes only


@dataclass(frozen=True)
class Cell:
    """One published number and the planned one."""

    model: str
    mode: str
    group: int | None
    nodes: int | None  # None where it was not published, beside memory
    kind: str
    published: float
    planned: float

    @property
    def error(self) -> float:
        """Relative error of the plan."""
        return self.planned / self.published - 1

    @property
    def predicted(self) -> bool:
        """Whether this speed was not used to fit the constants."""
        return self.model not in FITTED or (self.nodes or 1) > 8


def plan_published(model: str, mode: str, group: int | None, nodes: int) -> estimate.Plan:
    """Plan what was probably run (README.md)."""
    config = vit.MODELS[model]
    side = (16 if model == "base" else 18) * config.patch  # 257 or 325 tokens
    run = PlannedRun(
        config, mode, 8 * nodes, 32, side, 0, group=group, fsdp=1, ac="full", encoder_only=True
    )
    return estimate.Plan(run, machines.MACHINES["frontier"])


def rows(column: str) -> list[dict[str, Any]]:
    """Read the rows with a column that are compared: not ddp, not hybrid of group 1."""
    found = map(json.loads, (HERE / "results.jsonl").read_text().splitlines())
    return [row for row in found if column in row and "caveat" not in row]


def plan_row(row: dict[str, Any]) -> estimate.Plan:
    """Plan the run of a published row."""
    nodes = row["nodes"] or 1
    return plan_published(row["model"], row["mode"], row["group"], nodes)


def make_cell(row: dict[str, Any], kind: str, published: float, planned: float) -> Cell:
    """Compare one number of a row."""
    return Cell(row["model"], row["mode"], row["group"], row["nodes"], kind, published, planned)


def memory_cells() -> list[Cell]:
    """Compare GiB: the peak of active memory, then that of allocated memory."""
    cells = []
    for row in rows("peak_active_gib"):
        planned = plan_row(row).peak_active_gib
        cells.append(make_cell(row, "peak_active", row["peak_active_gib"], planned))
    for row in rows("peak_allocated_gib"):
        planned = plan_row(row).peak_gib
        cells.append(make_cell(row, "max_allocated", row["peak_allocated_gib"], planned))
    return cells


def speed_cells() -> list[Cell]:
    """Compare images/s."""
    cells = []
    for row in rows("images_per_second"):
        if row["studies"] == ["scaling"]:
            planned = plan_row(row).images_per_second
            cells.append(make_cell(row, "img/s", row["images_per_second"], planned))
    return cells


def print_cells(title: str, cells: list[Cell]) -> None:
    """Print a table of cells."""
    print(f"\n{title}")
    print("model mode         group nodes kind           published   planned  error")
    for c in cells:
        group = c.group or ""  # only the hybrid modes have one
        nodes = c.nodes or ""
        print(
            f"{c.model:5} {c.mode:12} {group:5} {nodes:5} {c.kind:13}"
            f"{c.published:11.2f}{c.planned:10.2f}{c.error:+7.1%}"
        )


def print_errors(name: str, cells: list[Cell]) -> None:
    """Print the median and the largest error of some cells."""
    errors = [abs(c.error) for c in cells]
    print(f"{name}: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")


def main() -> int:
    """Print every cell and the medians."""
    memory = memory_cells()
    print_cells("memory, GiB", memory)
    for kind in ("max_allocated", "peak_active"):
        print_errors(kind, [c for c in memory if c.kind == kind])
    speed = speed_cells()
    print_cells("speed", speed)
    many = [c for c in speed if (c.nodes or 1) > 16]
    few = [c for c in speed if c.predicted and c not in many]
    print_errors("predicted, up to 16 nodes", few)
    print_errors("predicted, 32 to 128 nodes", many)
    return 0


if __name__ == "__main__":
    sys.exit(main())
