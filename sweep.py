"""A grid of runs -> results.csv -> figures, report, and what limits each run in one word.

    python sweep.py quick                                   # minutes on a laptop, report included
    python sweep.py io --models base --data DIR             # real, syn, io: what limits a run?
    python sweep.py options --models 5b --nodes 8 --sbatch "-A PROJECT"   # through Slurm
    python sweep.py scaling --models base,3b,15b --nodes 1,2,4,8 --sbatch "-A PROJECT"
    python sweep.py table.csv -- --img-size 96              # your own; flags for every point
    python sweep.py status DIR                              # DIR is --out, sweep_PLAN if not given
    python sweep.py figures DIR examples/published          # yours over the published ones
    python sweep.py report DIR                              # a page with figures and verdicts

A point is a run of train_fsdp.py under torchrun, or under launch_frontier.sh in a job array for
each number of nodes. The same command starts what is missing, however the last one ended; what has
a result (done, out of memory, failed, timed out) is not run again. plan.py is asked first: what
cannot fit is skipped. A table has the columns `nodes` and `ranks` (of a node); every other column
is a flag, `true` and `false` are switches, an empty cell is left out.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: Ctrl-C meanwhile ends the program without a traceback.
    import os
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from runtime import terminal
from runtime.ranges import MOST_SECONDS, Parser, filled, number, whole
from sweeps import attempts, results, studies
from sweeps.studies import Point

HERE = Path(__file__).resolve().parent

# ---------------------------------------------------------------------------------------------
# Running


class Sweep:
    """A folder of points: `points.csv`, `runs/ID` of each, `results.csv`."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def folder(self, name: str) -> Path:
        """Of a point: its attempts, and plan.json."""
        return self.out / "runs" / name

    def points(self) -> list[Point]:
        """All that were ever asked for here."""
        path = self.out / "points.csv"
        return [cells for _, cells in results.read_cells(path)] if path.exists() else []

    def add(self, points: Sequence[Point], found: Sequence[dict[str, Any]]) -> None:
        """Keep points and their plans; known ones may belong to a further study."""
        known = {point["id"]: point for point in self.points()}
        for point, plan in zip(points, found, strict=True):
            old = known.get(point["id"], point)
            both = sorted({*old["study"].split(), *point["study"].split()})
            known[point["id"]] = point | {"study": " ".join(both)}
            self.folder(point["id"]).mkdir(parents=True, exist_ok=True)
            attempts.write_json(self.folder(point["id"]) / "plan.json", plan)
        flags = {name for point in known.values() for name in point} - {*studies.OWN}
        results.write_table(self.out / "points.csv", known.values(), (*studies.OWN, *sorted(flags)))

    def plan(self, name: str) -> dict[str, Any]:
        """What plan.py said of a point."""
        return attempts.read_json(self.folder(name) / "plan.json")

    def planned(
        self, planner: studies.Planner, point: Point, machine: str | None, memory_gib: float | None
    ) -> dict[str, Any]:
        """The plan of a point: as before, or asked for; without either, for this host's memory."""
        asked = [machine, memory_gib]
        if (self.folder(point["id"]) / "plan.json").exists():
            before = self.plan(point["id"])
            if before["asked"] == asked:
                return before
        if not machine and not memory_gib:
            gpus, memory_gib = planner.ask("device")
            if not gpus or point.get("device") == "cpu":
                memory_gib = studies.host_gib() / int(point["ranks"])
        return planner.plan(point, machine, memory_gib) | {"asked": asked}

    def look(self, name: str) -> tuple[str, int]:
        """(state, attempts so far) of a point; `skipped` and `queued` are ours."""
        folder = self.folder(name)
        state, made = attempts.look(folder, listed)
        if state == "waiting":
            job = folder / "job"
            if job.exists() and listed(job.read_text()):
                return "queued", made
            if self.plan(name)["verdict"] == "NO" and not (folder / "try").exists():
                return "skipped", made
        return state, made

    def collect(self) -> list[results.Row]:
        """results.csv anew: a row a point, and what others have appended to it.

        Those are told by when they were started: on another machine a point has the same id.
        """
        points, path, own = self.points(), self.out / "results.csv", set[tuple[str, str]]()
        for point in points:
            for made in attempts.attempts(self.folder(point["id"])):
                own.add((point["id"], results.start_of(attempts.read_state(made))))
        ids, others = {point["id"] for point in points}, list[results.Row]()
        for row in results.read_table(path) if path.exists() else []:
            started = row["started"] or ""
            if (row["id"], started) not in own and (started or row["id"] not in ids):
                others.append(row | {"source": row["source"] or row["host"]})
        rows = [
            results.row_of(p, self.folder(p["id"]), self.look(p["id"])[0], self.plan(p["id"]))
            for p in points
        ]
        results.write_table(path, [*rows, *others], results.COLUMNS)
        return [*rows, *others]


def run_point(sweep: Sweep, point: Point, script: Path, limit: float, again: bool) -> str:
    """Run a point here unless it has a result or runs already; returns its state.

    Inside a Slurm job launch_frontier.sh starts the ranks, elsewhere torchrun.
    """
    folder, job = sweep.folder(point["id"]), slurm_job(os.environ)
    state, made = sweep.look(point["id"])
    if state == "running":
        newest = attempts.attempts(folder)[-1]
        facts = attempts.read_state(newest)
        if job or facts["job"] or facts["host"] != platform.node():
            return state
        return attempts.adopt(newest)["state"]
    if state not in ("waiting", "queued") and not (again and state in ("failed", "timed out")):
        return state
    more = {"cores": int(os.environ["SLURM_CPUS_ON_NODE"])} if job else {}
    mine = attempts.claim(folder, made + 1, job=job, **more)
    if mine is None:
        return "running"
    unsaved = ["--resume", "none", "--save-every", "none"]
    flags = [*studies.argv_of(point), *unsaved, "--out", str(mine)]
    environ = dict(os.environ)
    if job:
        number = int(os.environ["SLURM_JOB_ID"])
        for name, value in (  # nodes may be shared; a point is short, and its own only round
            ("TASKS_PER_NODE", point["ranks"]),
            ("MASTER_PORT", str(20000 + number % 10000)),
            ("SCRIPTS", str(script.parent)),
            ("AGAIN", "no"),
            ("PREFLIGHT", "no"),
        ):
            environ.setdefault(name, value)
        environ["TASKS_PER_NODE"] = point["ranks"]
        if not {"CONDA_ENV", "ENV_TARBALL"} & {*environ}:
            environ.setdefault("PYTHON", sys.executable)
        command = ["bash", str(HERE / "launch_frontier.sh"), *flags]
    else:
        environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, for one rank too
        command = [sys.executable, str(script), *flags]
        if point["ranks"] != "1":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command[1:1] = [*torchrun, point["ranks"], "--"]
    return attempts.run(mine, command, environ, limit, HERE)["state"]


def run_here(
    sweep: Sweep, points: Sequence[Point], script: Path, limit: float, again: bool
) -> None:
    """One point after the other, the smallest first."""
    for point in points:
        if point["nodes"] != "1":
            raise ValueError(f"{point['id']} needs {point['nodes']} nodes: add --sbatch FLAGS")
    order = sorted(points, key=lambda point: int(point["ranks"]))
    for i, point in enumerate(order, 1):
        print(f"[{i}/{len(order)}] {point['id']:50}", end=" ", flush=True)
        state = run_point(sweep, point, script, limit, again)
        row = next(row for row in sweep.collect() if row["id"] == point["id"])
        rate = row.get("images_per_second")
        print(
            f"{state}{f'  {rate:.1f} img/s' if rate else ''}  {row.get('reason') or ''}", flush=True
        )


# ---------------------------------------------------------------------------------------------
# Slurm


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """The array task that we are in, as squeue names it: JOB_TASK."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return None


def listed(job: str) -> bool:
    """Whether an array task waits or runs; a list from before it was asked for does not count."""
    if job not in slurm_jobs():
        slurm_jobs.cache_clear()
    return job in slurm_jobs()


@lru_cache(maxsize=1)
def slurm_jobs() -> set[str]:
    """The array tasks of this user that wait or run; RuntimeError where Slurm does not answer."""
    try:
        done = subprocess.run(
            ["squeue", "--me", "-h", "-r", "-o", "%i"], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise RuntimeError("squeue is missing: the sweep has jobs, look where Slurm is") from None
    if done.returncode:
        raise RuntimeError(f"squeue does not answer: {done.stderr.strip()}")
    return set(done.stdout.split())


def submit(
    sweep: Sweep, points: Sequence[Point], sbatch: str, script: Path, limit: float, again: bool
) -> None:
    """A job array for each number of nodes, of the points that nobody has run or queued."""
    wanted = ("waiting", "failed", "timed out") if again else ("waiting",)
    left = [point for point in points if sweep.look(point["id"])[0] in wanted]
    network = re.findall(r"^#SBATCH --network.*", (HERE / "launch_frontier.sh").read_text(), re.M)
    jobs = sweep.out / "jobs"
    jobs.mkdir(exist_ok=True)
    for nodes in sorted({int(point["nodes"]) for point in left}):
        mine = [point["id"] for point in left if int(point["nodes"]) == nodes]
        own = ["--script", str(script), "--limit", f"{limit:g}", *["--retry"] * again]
        command = shlex.join([sys.executable, str(HERE / "sweep.py"), "point", str(sweep.out)])
        file = jobs / f"{nodes}-nodes-{os.getpid()}.sh"
        file.write_text(
            "\n".join(
                (
                    "#!/bin/bash",
                    *network,
                    f"points=({' '.join(mine)})",
                    f'exec {command} "${{points[SLURM_ARRAY_TASK_ID]}}" {shlex.join(own)}',
                    "",
                )
            )
        )
        minutes = math.ceil(limit / 60) + 5  # the limit is ours, Slurm's is behind it
        flags = ["-J", "sweep", "-t", str(minutes), *shlex.split(sbatch), "-N", str(nodes)]
        flags += [f"--array=0-{len(mine) - 1}", "-o", str(jobs / "%A_%a.txt")]
        done = subprocess.run(
            ["sbatch", "--parsable", *flags, str(file)], cwd=HERE, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"sbatch refused: {done.stderr.strip()}")
        number = done.stdout.strip().split(";")[0]
        for task, name in enumerate(mine):
            (sweep.folder(name) / "job").write_text(f"{number}_{task}")
        print(f"job {number}: {len(mine)} points on {nodes} nodes", flush=True)


# ---------------------------------------------------------------------------------------------
# main


def whole_numbers(text: str) -> list[int]:
    """An argparse type: 1,2,4."""
    return [whole(1, 100_000)(word) for word in text.split(",")]


def folder(text: str) -> Path:
    """An argparse type: a path, which an empty one is not."""
    return Path(filled(text))


def build_parser() -> Parser:
    """The flags of a sweep."""
    description, _, usage = (__doc__ or "").partition("\n\n")
    parser = Parser(
        "sweep.py",
        description=description,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "what",
        type=filled,
        metavar="PLAN",
        help="quick, options, scaling, io or a CSV file; or status, figures, report",
    )
    add("dirs", type=filled, metavar="DIR", nargs="*", help="of status, figures, report")
    add(
        "--out",
        type=folder,
        metavar="DIR",
        help="(default sweep_PLAN; figures, report: DIR itself, of several sweep_DIR_and_DIR)",
    )
    add(
        "--models",
        type=filled,
        metavar="A,B",
        help="(default: quick tiny or base, io base, options 5b, scaling base,1b,3b,5b,15b)",
    )
    add("--nodes", type=whole_numbers, metavar="1,2,4", help="with --sbatch (default 1,2,4,8)")
    add(
        "--ranks",
        type=whole(1, 1024),
        metavar="N",
        help="of a node (default: GPUs here; 8 with --sbatch; quick on a CPU 4)",
    )
    add(
        "--data",
        metavar="DIR",
        default=str(HERE / "examples" / "tiles" / "train"),
        help="images of real and io (default: the tiles here)",
    )
    add(
        "--sbatch",
        metavar="FLAGS",
        help="through Slurm, with these flags of sbatch; the "
        "environment is that of launch_frontier.sh",
    )
    add(
        "--machine",
        type=filled,
        metavar="NAME",
        help="for plan.py (default: frontier with "
        "--sbatch; else this one's memory, and no planned speed)",
    )
    add("--memory-gib", type=number(0.1, 10**6), metavar="GIB", help="of a rank, for plan.py")
    add(
        "--limit",
        type=number(1, MOST_SECONDS),
        default=900,
        metavar="SECONDS",
        help="a point (default 900)",
    )
    add("--try", action="store_true", dest="attempt_all", help="run what plan.py says cannot fit")
    add("--retry", action="store_true", help="run again what has failed or timed out")
    add(
        "--script",
        type=Path,
        default=HERE / "train_fsdp.py",
        metavar="FILE",
        help="what each point runs (default train_fsdp.py)",
    )
    return parser


def tell(sweep: Sweep) -> None:
    """How many points are in which state, and those that are not done."""
    rows = sweep.collect()
    print(", ".join(f"{n} {state}" for state, n in Counter(r["state"] for r in rows).items()))
    for row in rows:
        if row["state"] not in ("done", "waiting", "queued"):
            where = f"on {row['host']}" if row["state"] == "running" else row.get("reason") or ""
            print(f"{row['state']:14}{row['id']:50} {where}")


def sweep_all(
    what: str,
    out: Path,
    extra: Mapping[str, str],
    script: Path,
    *,
    limit: float,
    retry: bool,
    attempt_all: bool,
    models: str | None,
    nodes: Sequence[int] | None,
    ranks: int | None,
    data: str,
    sbatch: str | None,
    machine: str | None,
    memory_gib: float | None,
) -> int:
    """Plan the points, then run or submit those that have no result yet; returns the status."""
    slurm, planner, sweep = sbatch is not None, studies.Planner(), Sweep(out)
    if slurm and not machine and not memory_gib:
        if os.environ.get("MACHINE", "frontier") != "frontier":
            raise ValueError("which machine is it? --machine dgx-h100, or a JSON file, for plan.py")
        machine = "frontier"
    if (out / "results.csv").exists():
        results.read_table(out / "results.csv")  # or the first point would end in its damage
    try:
        points = studies.finished(
            studies.choose(
                what, models, nodes, ranks, data, slurm, lambda: planner.ask("device")[0]
            ),
            extra,
        )
        print(f"{len(points)} points in {out}", flush=True)
        sweep.add(points, [sweep.planned(planner, p, machine, memory_gib) for p in points])
    finally:
        planner.close()
    for point in points:
        if attempt_all:
            (sweep.folder(point["id"]) / "try").touch()
        elif sweep.look(point["id"])[0] == "skipped":
            print(f"skipped {point['id']}: {sweep.plan(point['id'])['why_not']}", flush=True)
    left = [point for point in points if sweep.look(point["id"])[0] != "skipped"]
    if slurm:
        submit(sweep, left, sbatch or "", script, limit, retry)
        tell(sweep)
        print(
            f"python sweep.py report {out}: what there is by then; "
            "the same command again: what is missing"
        )
        return 0
    run_here(sweep, left, script, limit, retry)
    tell(sweep)
    try:
        from sweeps import report
    except ModuleNotFoundError as error:
        print(f"no figures: {error}")
    else:
        report.write([out], None, True)
    states = [sweep.look(point["id"])[0] for point in points]
    return int(any(state in ("failed", "timed out") for state in states))


def look_at(what: str, folders: Sequence[Path], out: Path | None) -> int:
    """Draw, report on or tell the state of sweeps that there are; returns the status."""
    if not folders:
        raise ValueError("which sweep? name its folder, or examples/published")
    if what == "status":
        for folder in folders:
            if not (folder / "points.csv").exists():
                raise ValueError(f"{folder} is no sweep's folder: it has no points.csv")
            tell(Sweep(folder))
        return 0
    from sweeps import report  # draws by matplotlib, which nothing else needs

    for folder in folders:
        try:
            if (folder / "points.csv").exists():
                Sweep(folder).collect()
        except RuntimeError as error:  # far from the Slurm that runs the rest
            print(f"using results.csv as it is: {error}")
    return report.write(folders, out, what == "report")


def run_one(words: Sequence[str], script: Path, limit: float, again: bool) -> int:
    """Run the point that a folder and an id name: what a job array does."""
    if len(words) != 2:
        raise ValueError("which point? name a sweep's folder and an id of its points.csv")
    sweep, name = Sweep(Path(words[0])), words[1]
    found = [point for point in sweep.points() if point["id"] == name]
    if not found:
        raise ValueError(f"{sweep.out / 'points.csv'} has no point {name}")
    print(run_point(sweep, found[0], script, limit, again))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep, or look at one; exit status 1 if a point or a disk failed, 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    args = parser.parse_args(words[:cut])
    try:
        extra = studies.flags_of(words[cut + 1 :])
        if args.what in ("figures", "report", "status"):
            return look_at(args.what, [Path(name) for name in args.dirs], args.out)
        script = args.script.resolve()
        if not script.is_file():
            raise ValueError(f"there is no {script}: give --script what the points shall run")
        if args.what == "point":
            return run_one(args.dirs, script, args.limit, args.retry)
        if args.dirs:
            raise ValueError(f"{args.what} takes no folder {args.dirs[0]}: where to write is --out")
        out = args.out or Path(f"sweep_{Path(args.what).stem}")
        return sweep_all(
            args.what,
            out.resolve(),
            extra,
            script,
            limit=args.limit,
            retry=args.retry,
            attempt_all=args.attempt_all,
            models=args.models,
            nodes=args.nodes,
            ranks=args.ranks,
            data=args.data,
            sbatch=args.sbatch,
            machine=args.machine,
            memory_gib=args.memory_gib,
        )
    except ModuleNotFoundError as error:
        parser.error(f"{error}: figures need it, python -m pip install {error.name}")
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    except OSError as error:
        where = error.filename or args.out or " ".join(args.dirs) or f"sweep_{args.what}"
        print(f"sweep.py: error: {where}: {error.strerror or error}", file=sys.stderr)
        return 1


def stop(number: int, frame: Any) -> NoReturn:
    """Handle a signal: end what we have started, and say how to go on."""
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.signal(again, signal.SIG_IGN)
    os.write(2, b"\nsweep.py: stopped: the same command runs what is missing\n")
    raise SystemExit(128 + number)


if __name__ == "__main__":
    terminal.make_safe()
    for _number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_number, stop)
    raise SystemExit(main())
