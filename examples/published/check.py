"""Compare the plan with the published measurements: print the error of every cell.

python examples/published/check.py            # --json: every cell, for programs
"""

import csv
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

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


def plan_published(
    model: str, mode: str, group: int | None, nodes: int, measured_ips: float | None = None
) -> estimate.Plan:
    """Plan what was probably run (README.md)."""
    config = vit.MODELS[model]
    side = (16 if model == "base" else 18) * config.patch  # 257 or 325 tokens
    run = PlannedRun(
        config, mode, 8 * nodes, 32, side, 0, group=group, fsdp=1, ac="full", encoder_only=True
    )
    return estimate.Plan(run, measured_ips=measured_ips)


def rows(name: str) -> list[dict[str, str]]:
    """Read the rows of a table that are compared: not ddp, not hybrid of group 1."""
    with open(HERE / name, newline="") as file:
        found = list(csv.DictReader(file))
    return [r for r in found if r["mode"] != "ddp" and r["group"] != "1"]


def optional_int(text: str) -> int | None:
    """Convert a cell to a number, None where it is empty."""
    return int(text) if text else None


def memory_cells() -> list[Cell]:
    """Compare GiB: max_allocated and peak_active."""
    cells = []
    for r in rows("memory.csv"):
        model, mode, kind, gib = r["model"], r["mode"], r["kind"], float(r["gib"])
        group, nodes = optional_int(r["group"]), optional_int(r["nodes"])
        plan = plan_published(model, mode, group, nodes or 1)
        if kind == "max_allocated":
            cells.append(Cell(model, mode, group, nodes, kind, gib, plan.peak_gib))
        elif kind == "peak_active":
            cells.append(Cell(model, mode, group, nodes, kind, gib, plan.peak_active_gib))
    return cells


def speed_cells(measured: bool) -> list[Cell]:
    """Compare images/s; `measured`: the plan is given the published run on one node."""
    table = rows("throughput.csv")
    one_node = {
        (r["model"], r["fsdp_mode_name"]): float(r["images_per_second"])
        for r in table
        if r["nodes"] == "1"
    }
    cells = []
    for r in table:
        model, mode, ips = r["model"], r["mode"], float(r["images_per_second"])
        group, nodes = optional_int(r["group"]), int(r["nodes"])
        given = one_node[model, r["fsdp_mode_name"]] if measured else None
        plan = plan_published(model, mode, group, nodes, given)
        cells.append(Cell(model, mode, group, nodes, "img/s", ips, plan.images_per_second))
    return cells


def main() -> int:
    """Print every cell and the medians."""
    if sys.argv[1:] == ["--json"]:
        print(json.dumps([asdict(cell) for cell in (*memory_cells(), *speed_cells(False))]))
        return 0
    head = "model mode         group nodes kind           published   planned  error"
    for title, cells in (
        ("memory, GiB", memory_cells()),
        ("speed", speed_cells(False)),
        ("speed, given the run on one node", speed_cells(True)),
    ):
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
