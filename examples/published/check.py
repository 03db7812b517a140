"""The plan against the published measurements: prints the error of every cell.

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
    """One published number beside the planned one."""

    model: str
    mode: str
    group: int | None
    nodes: int | None
    kind: str
    published: float
    planned: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.planned / self.published - 1


def planned(
    model: str, mode: str, group: int | None, nodes: int, measured_ips: float | None = None
) -> estimate.Plan:
    """The plan of what was probably run (README.md)."""
    config = vit.MODELS[model]
    side = (16 if model == "base" else 18) * config.patch  # 257 or 325 tokens
    run = PlannedRun(
        config, mode, 8 * nodes, 32, side, 0, group, fsdp=1, ac="full", encoder_only=True
    )
    return estimate.make_plan(run, measured_ips=measured_ips)


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a table that are compared: not ddp, not hybrid of group 1."""
    with open(HERE / name, newline="") as file:
        found = list(csv.DictReader(file))
    return [r for r in found if r["mode"] != "ddp" and r["group"] != "1"]


def whole(text: str) -> int | None:
    """A number, or None for an empty cell."""
    return int(text) if text else None


def memory_cells() -> list[Cell]:
    """GiB: max_allocated and peak_active."""
    cells = []
    for r in rows("memory.csv"):
        if r["kind"] == "max_reserved":
            continue
        found = planned(r["model"], r["mode"], whole(r["group"]), whole(r["nodes"]) or 1)
        gib = found.peak_gib if r["kind"] == "max_allocated" else found.peak_active_gib
        cells.append(
            Cell(
                r["model"],
                r["mode"],
                whole(r["group"]),
                whole(r["nodes"]),
                r["kind"],
                float(r["gib"]),
                gib,
            )
        )
    return cells


def speed_cells(measured: bool) -> list[Cell]:
    """Images/s; `measured`: given the published run on one node of the same mode."""
    table = rows("throughput.csv")
    first = {
        (r["model"], r["fsdp_mode_name"]): float(r["images_per_second"])
        for r in table
        if r["nodes"] == "1"
    }
    cells = []
    for r in table:
        given = first[r["model"], r["fsdp_mode_name"]] if measured else None
        found = planned(r["model"], r["mode"], whole(r["group"]), int(r["nodes"]), given)
        cells.append(
            Cell(
                r["model"],
                r["mode"],
                whole(r["group"]),
                whole(r["nodes"]),
                "img/s",
                float(r["images_per_second"]),
                found.images_per_second,
            )
        )
    return cells


def predicted(cell: Cell) -> bool:
    """Whether a speed took no part in the fit."""
    return cell.model not in FITTED or (cell.nodes or 1) > 8


def main() -> int:
    """Print every cell and the medians."""
    if sys.argv[1:] == ["--json"]:
        print(json.dumps([asdict(cell) for cell in (*memory_cells(), *speed_cells(False))]))
        return 0
    for title, cells in (
        ("memory, GiB", memory_cells()),
        ("speed", speed_cells(False)),
        ("speed, given the run on one node", speed_cells(True)),
    ):
        print(
            f"\n{title}\nmodel mode         group nodes kind           published   planned  error"
        )
        for c in cells:
            print(
                f"{c.model:5} {c.mode:12} {c.group or '':5} {c.nodes or '':5} {c.kind:13}"
                f"{c.published:11.2f}{c.planned:10.2f}{c.error:+7.1%}"
            )
        for name, part in (
            ("max_allocated", [c for c in cells if c.kind == "max_allocated"]),
            ("peak_active", [c for c in cells if c.kind == "peak_active"]),
            (
                "predicted, up to 16 nodes",
                [c for c in cells if c.kind == "img/s" and predicted(c) and (c.nodes or 1) <= 16],
            ),
            (
                "predicted, 32 to 128 nodes",
                [c for c in cells if c.kind == "img/s" and (c.nodes or 1) > 16],
            ),
        ):
            if part:
                errors = [abs(c.error) for c in part]
                print(f"{name}: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
