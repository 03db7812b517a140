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
from planner import estimate  # noqa: E402
from planner.traffic import PlannedRun  # noqa: E402

FITTED = ("base", "3b")  # models the constants come from; their speed on 1 to 8 nodes only


@dataclass(frozen=True)
class Cell:
    """One published number and the planned one."""

    model: str
    mode: str
    group: int | None
    nodes: int | None
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
    return estimate.Plan(run)


def rows(column: str) -> list[dict[str, Any]]:
    """Read the rows with a column that are compared: not ddp, not hybrid of group 1."""
    found = map(json.loads, (HERE / "results.jsonl").read_text().splitlines())
    return [row for row in found if column in row and "caveat" not in row]


def memory_cells() -> list[Cell]:
    """Compare GiB: max_allocated and peak_active."""
    cells = []
    for kind, column in (
        ("peak_active", "peak_active_gib"),
        ("max_allocated", "peak_allocated_gib"),
    ):
        for r in rows(column):
            model, mode, group, nodes = r["model"], r["mode"], r["group"], r["nodes"]
            plan = plan_published(model, mode, group, nodes or 1)
            planned = plan.peak_gib if kind == "max_allocated" else plan.peak_active_gib
            cells.append(Cell(model, mode, group, nodes, kind, r[column], planned))
    return cells


def speed_cells() -> list[Cell]:
    """Compare images/s."""
    cells = []
    for r in [r for r in rows("images_per_second") if r["studies"] == ["scaling"]]:
        model, mode, group, nodes = r["model"], r["mode"], r["group"], r["nodes"]
        planned = plan_published(model, mode, group, nodes).images_per_second
        cells.append(Cell(model, mode, group, nodes, "img/s", r["images_per_second"], planned))
    return cells


def main() -> int:
    """Print every cell and the medians."""
    head = "model mode         group nodes kind           published   planned  error"
    for title, cells in ("memory, GiB", memory_cells()), ("speed", speed_cells()):
        print(f"\n{title}\n{head}")
        for c in cells:
            print(
                f"{c.model:5} {c.mode:12} {c.group or '':5} {c.nodes or '':5} {c.kind:13}"
                f"{c.published:11.2f}{c.planned:10.2f}{c.error:+7.1%}"
            )
        speed = [c for c in cells if c.kind == "img/s"]
        for name, part in (
            ("max_allocated", [c for c in cells if c.kind == "max_allocated"]),
            ("peak_active", [c for c in cells if c.kind == "peak_active"]),
            (
                "predicted, up to 16 nodes",
                [c for c in speed if c.predicted and (c.nodes or 1) <= 16],
            ),
            ("predicted, 32 to 128 nodes", [c for c in speed if (c.nodes or 1) > 16]),
        ):
            if part:
                errors = [abs(c.error) for c in part]
                print(f"{name}: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
