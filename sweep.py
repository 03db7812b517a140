"""Run a grid of training runs; write results.csv, figures and a report of what limits each run.

    python sweep.py quick                                   # minutes on a laptop, report included
    python sweep.py io --models base --data DIR             # real, syn, io: what limits a run?
    python sweep.py options --models 5b --nodes 8 --sbatch "-A PROJECT"   # through Slurm
    python sweep.py scaling --models base,3b,15b --nodes 1,2,4,8 --sbatch "-A PROJECT"
    python sweep.py ladder --models base                    # one technique after the other
    python sweep.py table.csv -- --img-size 96              # your own; flags for every point
    python sweep.py status DIR                              # DIR is --out, sweep_PLAN by default
    python sweep.py figures DIR examples/published          # yours over the published ones
    python sweep.py report DIR                              # a page with figures and limits

A point is a run of train_fsdp.py under torchrun, or under launch_frontier.sh in a job array per
number of nodes. The same command runs what is missing, however the last one ended; a point with a
result (done, out of memory, failed, timed out) is not run again. Points that cannot fit according
to plan.py are skipped. A table has the columns `nodes` and `ranks` (per node); every other column
is a flag: `true` and `false` are switches, empty cells are left out. `-- --profile` adds where the
time goes and the bytes sent. Needs psutil and matplotlib.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: Ctrl-C meanwhile ends the program without a traceback.
    import os
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from runtime import process
from runtime.config import MOST_SECONDS, Parser, filled, number, whole
from sweeps import attempts, results, slurm, studies
from sweeps.folder import Sweep
from sweeps.studies import Point

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Options:
    """The command line."""

    what: str
    dirs: list[str]
    out: Path | None
    models: str | None
    nodes: list[int] | None
    ranks: int | None
    data: str
    sbatch: str | None
    machine: str | None
    memory_gib: float | None
    limit: float
    try_all: bool
    retry: bool
    script: Path
    extra: Point  # flags after `--`, as cells


def run_point(sweep: Sweep, point: Point, options: Options) -> str:
    """Run a point here, unless it has a result or runs already; returns its state."""
    folder, job = sweep.folder(point["id"]), slurm.array_task(os.environ)
    state, made = sweep.state(point["id"])
    if state == "orphaned":  # its sweep was killed: end it, two runs at once would slow each other
        attempts.end_orphan(attempts.list_attempts(folder)[-1])
        state, made = sweep.state(point["id"])
    again = options.retry and state in ("failed", "timed out")
    if state not in ("waiting", "queued") and not again:
        return state
    cores = {"cores": int(os.environ["SLURM_CPUS_ON_NODE"])} if job else {}
    mine = attempts.claim(folder, made + 1, job=job, **cores)
    if mine is None:
        return "running"
    flags = [*studies.flags_from_cells(point), "--resume", "none", "--save-every", "none"]
    flags += ["--out", str(mine)]
    environ = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if job:
        environ = slurm.launch_environ(point["ranks"], options.script)
        command = ["bash", str(HERE / "launch_frontier.sh"), *flags]
    else:
        command = [sys.executable, str(options.script), *flags]
        if point["ranks"] != "1":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command[1:1] = [*torchrun, point["ranks"], "--"]
    return attempts.run_attempt(mine, command, environ, options.limit, HERE)


def run_here(sweep: Sweep, points: Sequence[Point], options: Options) -> None:
    """Run one point after the other, the smallest first."""
    for point in points:
        if point["nodes"] != "1":
            raise ValueError(f"{point['id']} needs {point['nodes']} nodes: add --sbatch FLAGS")
    order = sorted(points, key=lambda point: int(point["ranks"]))
    for i, point in enumerate(order, 1):
        print(f"[{i}/{len(order)}] {point['id']:50}", end=" ", flush=True)
        state = run_point(sweep, point, options)
        row = next(row for row in sweep.collect() if row["id"] == point["id"])
        rate = row.get("images_per_second")
        speed = f"  {rate:.1f} img/s" if rate else ""
        print(f"{state}{speed}  {row.get('reason') or ''}", flush=True)


# ---------------------------------------------------------------------------------------------
# Commands


def print_states(sweep: Sweep) -> None:
    """Print how many points are in which state, and those that are not done."""
    rows = sweep.collect()
    print(", ".join(f"{n} {state}" for state, n in Counter(r["state"] for r in rows).items()))
    for row in rows:
        if row["state"] not in ("done", "waiting", "queued"):
            where = f"on {row['host']}" if row["state"] == "running" else row.get("reason") or ""
            print(f"{row['state']:14}{row['id']:50} {where}")


def run_sweep(options: Options) -> int:
    """Plan the points, run or submit those without a result; returns the exit status."""
    in_slurm, machine = options.sbatch is not None, options.machine
    out = (options.out or Path(f"sweep_{Path(options.what).stem}")).resolve()
    sweep = Sweep(out)
    elsewhere = options.what == "ladder" and options.nodes and not in_slurm  # only planned
    if (in_slurm or elsewhere) and not machine and not options.memory_gib:
        machine = os.environ.get("MACHINE") or os.environ.get("LMOD_SYSTEM_NAME")
        if machine != "frontier":  # the rule of launch_frontier.sh
            raise ValueError(
                "this is not Frontier: give --machine a name of `plan.py --machines` or a JSON file"
            )
    if (out / "results.csv").exists():
        results.read_table(out / "results.csv")  # refuse damage before the first point runs
    points = studies.choose_points(
        options.what, options.models, options.nodes, options.ranks, options.data, in_slurm
    )
    points = studies.with_ids(points, options.extra)
    print(f"{len(points)} points in {out}", flush=True)
    plans = [sweep.make_plan(point, machine, options.memory_gib) for point in points]
    sweep.add(points, [plan | {"try": True} if options.try_all else plan for plan in plans])
    left = [point for point in points if sweep.state(point["id"])[0] != "skipped"]
    for point in points:
        if point not in left:
            print(f"skipped {point['id']}: {sweep.plan(point['id'])['why_not']}", flush=True)
    if in_slurm:
        wanted = ("waiting", "failed", "timed out") if options.retry else ("waiting",)
        missing = [point for point in left if sweep.state(point["id"])[0] in wanted]
        words = ["--script", str(options.script), *["--retry"] * options.retry]
        slurm.submit(out, missing, options.sbatch or "", words, options.limit)
        print_states(sweep)
        print(f"python sweep.py report {out} shows the results so far")
        print("the same command runs what is missing then")
        return 0
    run_here(sweep, [] if elsewhere else left, options)
    print_states(sweep)
    try:
        from sweeps import report
    except ModuleNotFoundError as error:
        print(f"no figures: {error}")
    else:
        report.write([out], None, page=True)
    states = [sweep.state(point["id"])[0] for point in points]
    return int(any(state in ("failed", "timed out") for state in states))


def show(what: str, folders: Sequence[Path], out: Path | None) -> int:
    """Print the states of existing sweeps, or draw them; returns the exit status."""
    if not folders:
        raise ValueError("which sweep? name its folder, or examples/published")
    if what == "status":
        for folder in folders:
            if not (folder / "points.csv").exists():
                raise ValueError(f"{folder} is not the folder of a sweep: it has no points.csv")
            print_states(Sweep(folder))
        return 0
    from sweeps import report  # needs matplotlib

    for folder in folders:
        try:
            if (folder / "points.csv").exists():
                Sweep(folder).collect()
        except RuntimeError as error:  # this host is not the one with Slurm
            print(f"using results.csv as it is: {error}")
    return report.write(folders, out, page=what == "report")


def run_one(options: Options) -> int:
    """Run the point that a folder and an id name: what a job array does."""
    if len(options.dirs) != 2:
        raise ValueError("which point? name the folder of a sweep and an id in its points.csv")
    sweep, name = Sweep(Path(options.dirs[0])), options.dirs[1]
    found = [point for point in sweep.points() if point["id"] == name]
    if not found:
        raise ValueError(f"{sweep.out / 'points.csv'} has no point {name}")
    print(run_point(sweep, found[0], options))
    return 0


# ---------------------------------------------------------------------------------------------
# Command line


def node_counts(text: str) -> list[int]:
    """Parse an argument like 1,2,4."""
    return [whole(1, 100_000)(word) for word in text.split(",")]


def path(text: str) -> Path:
    """Parse a path that is not empty."""
    return Path(filled(text))


def build_parser() -> Parser:
    """Build the parser of the command line."""
    description, _, usage = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("sweep.py", description=description, epilog=usage, formatter_class=raw)
    add = parser.add_argument
    text = "quick, options, scaling, io, ladder or a CSV file; or status, figures, report"
    add("what", type=filled, metavar="PLAN", help=text)
    add("dirs", type=filled, metavar="DIR", nargs="*", help="of status, figures, report")
    text = "(default sweep_PLAN; figures, report: DIR itself, of several sweep_DIR_and_DIR)"
    add("--out", type=path, metavar="DIR", help=text)
    text = "(default: quick tiny or base, io, ladder base, options 5b, scaling base,1b,3b,5b,15b)"
    add("--models", type=filled, metavar="A,B", help=text)
    text = "with --sbatch (default 1,2,4,8); ladder: also without, which plans it for these nodes"
    add("--nodes", type=node_counts, metavar="1,2,4", help=text)
    text = "per node (default: GPUs here; 8 with --sbatch; quick on a CPU 4)"
    add("--ranks", type=whole(1, 1024), metavar="N", help=text)
    tiles = str(HERE / "examples" / "tiles" / "train")
    add("--data", metavar="DIR", default=tiles, help="images of real and io (default: tiles here)")
    text = "through Slurm, with these flags of sbatch; environment as for launch_frontier.sh"
    add("--sbatch", metavar="FLAGS", help=text)
    text = "for plan.py (default: with --sbatch frontier, there; else this host's memory, no speed)"
    add("--machine", type=filled, metavar="NAME", help=text)
    add("--memory-gib", type=number(0.1, 10**6), metavar="GIB", help="per rank, for plan.py")
    limit = number(1, MOST_SECONDS)
    add("--limit", type=limit, default=900, metavar="SECONDS", help="per point (default 900)")
    add("--try", action="store_true", dest="try_all", help="run what plan.py says cannot fit")
    add("--retry", action="store_true", help="run again what has failed or timed out")
    script, text = HERE / "train_fsdp.py", "what each point runs (default train_fsdp.py)"
    add(
        "--script",
        type=lambda name: Path(name).resolve(),
        default=script,
        metavar="FILE",
        help=text,
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run or show a sweep; exit status 1 if a point or a disk failed, 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    args = parser.parse_args(words[:cut])
    try:
        args.script = args.script.resolve()
        options = Options(**vars(args), extra=studies.cells_from_flags(words[cut + 1 :]))
        if options.what in ("figures", "report", "status"):
            return show(options.what, [Path(name) for name in options.dirs], options.out)
        if not options.script.is_file():
            raise ValueError(f"{options.script} not found: --script names what each point runs")
        if options.what == "point":
            return run_one(options)
        if options.dirs:
            raise ValueError(f"{options.what} takes no folder: --out names where to write")
        return run_sweep(options)
    except ModuleNotFoundError as error:
        parser.error(f"{error}: sweeps need it, python -m pip install {error.name}")
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    except OSError as error:
        where = error.filename or args.out or " ".join(args.dirs) or f"sweep_{args.what}"
        print(f"sweep.py: error: {where}: {error.strerror or error}", file=sys.stderr)
        return 1


def stop(number: int, frame: Any) -> NoReturn:
    """Handle a signal: end the run that this sweep has started, and say how to continue."""
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.signal(again, signal.SIG_IGN)
    os.write(2, b"\nsweep.py: stopped: the same command runs what is missing\n")
    raise SystemExit(128 + number)


if __name__ == "__main__":
    process.make_safe()
    for _number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_number, stop)
    raise SystemExit(main())
