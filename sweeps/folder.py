"""Keep the points of a sweep in a folder, with their plans, states and results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.devices import host_gib
from sweeps import attempts, results, slurm, studies
from sweeps.studies import Point


class Sweep:
    """A folder of points: `points.csv`, `runs/ID` per point, `results.csv`."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def folder(self, name: str) -> Path:
        """Return the folder of a point: its attempts and plan.json."""
        return self.out / "runs" / name

    def points(self) -> list[Point]:
        """Read all points of this sweep."""
        table = self.out / "points.csv"
        return [cells for _, cells in results.read_cells(table)] if table.exists() else []

    def add(self, points: Sequence[Point], plans: Sequence[dict[str, Any]]) -> None:
        """Add points and their plans; a known point may now belong to another study too."""
        known = {point["id"]: point for point in self.points()}
        for point, plan in zip(points, plans, strict=True):
            old = known.get(point["id"], point)
            both = sorted({*old["study"].split(), *point["study"].split()})
            known[point["id"]] = point | {"study": " ".join(both)}
            self.folder(point["id"]).mkdir(parents=True, exist_ok=True)
            attempts.write_json(self.folder(point["id"]) / "plan.json", plan)
        own = studies.OWN_COLUMNS
        flags = {name for point in known.values() for name in point} - {*own}
        results.write_table(self.out / "points.csv", known.values(), (*own, *sorted(flags)))

    def plan(self, name: str) -> dict[str, Any]:
        """Read the plan of a point."""
        return attempts.read_json(self.folder(name) / "plan.json")

    def make_plan(
        self, point: Point, machine: str | None, memory_gib: float | None
    ) -> dict[str, Any]:
        """Plan a point for a machine or an amount of memory, by default that of this host.

        An earlier plan for the same stays.
        """
        asked = [machine, memory_gib]
        known = (self.folder(point["id"]) / "plan.json").exists()
        plan = self.plan(point["id"]) if known else {}
        if plan.get("asked") != asked:
            if not machine and not memory_gib:
                gpus, memory_gib = studies.local_gpus()
                if not gpus or point.get("device") == "cpu":
                    memory_gib = host_gib() / int(point["ranks"])
            plan = studies.plan_point(point, machine, memory_gib) | {"asked": asked}
        return plan

    def state(self, name: str) -> tuple[str, int]:
        """Return (state, number of attempts) of a point: as in attempts, or skipped, queued."""
        folder = self.folder(name)
        state, made = attempts.point_state(folder, slurm.in_queue)
        if state == "waiting":
            job = folder / "job"
            if job.exists() and slurm.in_queue(job.read_text()):
                return "queued", made
            plan = self.plan(name)
            if plan["verdict"] == "NO" and not plan.get("try"):
                return "skipped", made
        return state, made

    def collect(self) -> list[results.Row]:
        """Write results.csv: a row per point, and the rows of other machines appended to it.

        The same point has the same id on every machine: their start times differ.
        """
        points, table, own = self.points(), self.out / "results.csv", set[tuple[str, str]]()
        for point in points:
            for made in attempts.list_attempts(self.folder(point["id"])):
                own.add((point["id"], results.start_time(attempts.read_state(made))))
        ids, others = {point["id"] for point in points}, list[results.Row]()
        for row in results.read_table(table) if table.exists() else []:
            started = row["started"] or ""
            if (row["id"], started) not in own and (started or row["id"] not in ids):
                others.append(row | {"source": row["source"] or row["host"]})
        rows = [
            results.make_row(p, self.folder(p["id"]), self.state(p["id"])[0], self.plan(p["id"]))
            for p in points
        ]
        results.write_table(table, [*rows, *others], results.COLUMNS)
        return [*rows, *others]
