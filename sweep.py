"""Run many training jobs; write a page with figures, and what limits each run.

    python sweep.py quick                                   # minutes on a laptop, page included
    python sweep.py io --models base --data DIR             # real, syn, io: what limits a run?
    python sweep.py options --models 5b --nodes 8 --sbatch "-A PROJECT"   # through Slurm
    python sweep.py scaling --models base,3b,15b --nodes 1,2,4,8 --sbatch "-A PROJECT"
    python sweep.py scaling -- --img-size 96                # flags for every point
    python sweep.py report DIR                              # how far it is, and the page
    python sweep.py report DIR examples/published           # yours beside the published ones
A point is a run of train_fsdp.py, started here or, through Slurm, by launch_frontier.sh: a job
array for each number of nodes. The same command runs what is missing: DIR/runs/ID is there once a
point has begun, its result.json once it has ended (done, out of memory, failed, timed out). What
cannot fit according to plan.py is skipped. Flags after `--` are added to every point; if a flag is
given twice, the last one counts. The page needs matplotlib.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

import mesh
import plan
from runtime import config, devices, process
from runtime.config import int_in_range, number
from sweeps import report, results, studies
from sweeps.results import Row
from sweeps.studies import Layout, Point

HERE = Path(__file__).resolve().parent
TRAIN = HERE / "train_fsdp.py"
NETWORK = "--network=disable_rdzv_get"  # as in launch_frontier.sh
END_SECONDS = 60  # that a run may take to end when it is asked to
DEFAULT_NODES = (1, 2, 4, 8)
RETRIED = ("failed", "timed out", "unfinished")  # the states that --retry runs again
PLANS = ("quick", "options", "scaling", "io", "report", "point")
FLAGS_OF_RUNS = ("models", "nodes", "ranks", "data", "sbatch", "machine", "limit", "retry")

# --- Points


def plan_point(point: Point, machine: str | None) -> Row:
    """Make the row of a point: its flags, and its plan; SystemExit for flags that are refused.

    The id is a readable name and a hash of all flags: the same run has the same id everywhere.
    """
    check_run_flags(point.words)
    words = [*point.words, "--world-size", str(point.nodes * point.ranks)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if machine:
        words += ["--machine", machine]
    else:  # of this host, only the memory is known
        words += ["--memory-gib", str(devices.rank_memory_gib(device, point.ranks))]
    flags, planned = plan.read_command(words, node_ranks=point.ranks)
    row: Row = asdict(flags)
    row.pop("machine")  # of the plan, not of the run
    row["id"] = point_id(point, row)
    row["studies"] = [point.study]
    row["words"] = point.words
    row["nodes"] = point.nodes
    row["ranks"] = point.ranks
    row["batch"] = planned.run.batch
    row["fit"] = ""
    if flags.run_mode == "io":  # it has no model
        return row
    row["planned_gib"] = planned.peak_gib
    # a CPU has no memory that only a GPU's libraries take: there the margin says nothing
    on_gpu = machine or device.type == "cuda"
    if on_gpu or planned.peak_gib > planned.memory_gib:
        row["fit"] = planned.fit
    if machine:
        row["planned_images_per_second"] = planned.images_per_second
    return row


# flags of train_fsdp.py that a sweep sets itself, or that make no run
NOT_ALLOWED = ("out", "resume", "save_every", "world_size", "dry_run")


def check_run_flags(words: Sequence[str]) -> None:
    """Refuse flags that train_fsdp.py does not have, or NOT_ALLOWED ones; SystemExit."""
    parser = config.Parser("sweep.py")
    config.add_flags(parser, config.Config, left_out=NOT_ALLOWED)
    _, others = parser.parse_known_args(words)
    if others:
        parser.error(
            f"{others[0]} is no flag of train_fsdp.py, or not one for a sweep: leave it out"
        )


def point_id(point: Point, flags: Row) -> str:
    """Return the name of a point's folder, from all flags of its run."""
    sharding = flags["mode"]
    if flags["group"]:
        sharding += str(flags["group"])
    name = f"{flags['model']}-{sharding}-{point.nodes}x{point.ranks}-{flags['run_mode']}"
    text = json.dumps([point.nodes, flags], sort_keys=True)
    code = hashlib.sha256(text.encode()).hexdigest()
    return re.sub(r"[^\w-]", "_", f"{name}-{code[:6]}")


def choose_points(args: argparse.Namespace, words: list[str]) -> list[Point]:
    """List the points of the command line; `words` are the flags after `--`."""
    gpus = torch.cuda.device_count()
    if args.sbatch is not None:
        layouts = [Layout(nodes=1, ranks=1)]
        for nodes in sorted(args.nodes or DEFAULT_NODES):
            layouts.append(Layout(nodes, ranks=args.ranks or 8))
        gpu = True
    elif args.nodes:
        raise ValueError("--nodes are those of a job: add --sbatch FLAGS")
    else:
        layouts = studies.layouts_here(args.ranks or gpus or 4)
        gpu = gpus > 0
    points = studies.study_points(args.what, args.models, layouts, args.data, gpu)
    for point in points:
        point.words.extend(words)
    return points


# --- One run, and its result


def end_run(child: subprocess.Popen) -> None:
    """Ask a run to end, as a launcher does, and kill it if it does not."""
    with suppress(ProcessLookupError):  # torchrun passes it on to its ranks, srun too
        os.killpg(child.pid, signal.SIGTERM)
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def command_of(row: Row, out: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a run, here or in a task of a job array."""
    words = [*row["words"], "--resume", "none", "--save-every", "none", "--out", str(out)]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return ["bash", str(HERE / "launch_frontier.sh"), *words], job_environment(row)
    environ = {"OMP_NUM_THREADS": "1"} | os.environ
    command = [sys.executable]
    if row["ranks"] > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(row["ranks"]), "--"]
    else:  # without torchrun, it would read its ranks from the Slurm job that runs the sweep
        environ = {name: text for name, text in environ.items() if not name.startswith("SLURM_")}
    return [*command, str(TRAIN), *words], environ


def job_environment(row: Row) -> dict[str, str]:
    """Return the environment of launch_frontier.sh in a task of a job array."""
    environ = dict(os.environ)
    # a point is short: it is not requeued, and may share its nodes with others
    environ.setdefault("AGAIN", "no")
    environ.setdefault("PREFLIGHT", "no")
    port = 20000 + int(environ["SLURM_JOB_ID"]) % 10000
    environ.setdefault("MASTER_PORT", str(port))
    if not environ.keys() & {"CONDA_ENV", "ENV_TARBALL", "PYTHON"}:
        environ["PYTHON"] = sys.executable
    environ["TASKS_PER_NODE"] = str(row["ranks"])
    environ["SCRIPTS"] = str(HERE)
    return environ


def run_point(out: Path, row: Row, args: argparse.Namespace) -> Row:
    """Run a point; return its row. FileExistsError where another sweep has begun it."""
    folder = out / "runs" / row["id"]
    # The lock keeps other sweeps out until lock.close(), or until this process ends.
    try:
        lock = process.lock_folder(str(out / "locks" / row["id"]), requeue_wait=0)
    except ValueError as error:
        raise FileExistsError(f"{row['id']} cannot be locked: {error}") from None
    if args.retry and results.with_state(out, row)["state"] in RETRIED:
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    command, environ = command_of(row, folder)
    late = False
    with open(folder / "output.txt", "wb") as output:
        child = subprocess.Popen(
            command,
            env=environ,
            cwd=HERE,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the sweep
        )
        try:
            child.wait(args.limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end_run(child)
    log = results.read_log(folder / "log.jsonl")
    text = (folder / "output.txt").read_text(errors="replace")
    state, reason = results.classify_end(child.returncode, log, text, late)
    result = results.summarize(log) if state == "done" else {}
    result["state"] = state
    result["reason"] = reason
    result["host"] = os.uname().nodename
    result["cores"] = int(environ.get("SLURM_CPUS_ON_NODE") or mesh.process_cores())
    result["load_after"], _, _ = os.getloadavg()
    results.write_lines(folder / "result.json", [result])
    lock.close()
    return results.with_state(out, row)


# --- Commands


def submit(out: Path, rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Submit a job array per number of nodes; its indices are the lines of points.jsonl."""
    lines = {row["id"]: i for i, row in enumerate(results.read_rows(out))}
    command = [sys.executable, str(HERE / "sweep.py"), "point", str(out), f"--limit={args.limit:g}"]
    if args.retry:
        command.append("--retry")
    # not --wrap: its sh may be one that loses the shell function `module`
    script = f"#!/bin/bash\nexec {shlex.join(command)}"
    minutes = math.ceil(args.limit / 60) + 5  # Slurm's limit only backs up the sweep's own
    for nodes in sorted({row["nodes"] for row in rows}):
        indices = [str(lines[row["id"]]) for row in rows if row["nodes"] == nodes]
        flags = ["-J", "sweep", "-t", str(minutes), "-o", f"{out}/job-%A_%a.txt", NETWORK]
        flags += [*shlex.split(args.sbatch), "-N", str(nodes), "--array", ",".join(indices)]
        done = subprocess.run(
            ["sbatch", *flags], cwd=HERE, input=script, capture_output=True, text=True
        )
        if done.returncode:
            raise ValueError(f"sbatch refused: {done.stderr.strip()}")
        print(f"{done.stdout.strip()}: {len(indices)} points on {nodes} nodes", flush=True)


def run_sweep(args: argparse.Namespace, words: list[str]) -> int:
    """Plan the points, run or submit those that have not begun; return the exit status."""
    in_slurm = args.sbatch is not None
    machine = args.machine
    if in_slurm and not machine:
        machine = "frontier"
    out = Path(f"sweep_{args.what}") if args.out is None else args.out
    out = out.resolve()
    rows = [plan_point(point, machine) for point in choose_points(args, words)]
    if not rows:
        raise ValueError("options needs several ranks: one rank has nothing to gather")
    out.mkdir(parents=True, exist_ok=True)
    rows = results.add_points(out, rows)
    print(f"{len(rows)} points in {out}", flush=True)
    wanted = ["waiting"]
    if args.retry:
        wanted.extend(RETRIED)
    rows = [row for row in rows if results.with_state(out, row)["state"] in wanted]
    if in_slurm:
        submit(out, rows, args)
        print(f"once they have ended: python sweep.py report {out}")
        return 0
    for i, row in enumerate(rows, 1):
        print(f"[{i}/{len(rows)}] {row['id']:50}", end=" ", flush=True)
        try:
            row = run_point(out, row, args)
        except FileExistsError as error:
            print(f"left to another sweep: {error}", flush=True)
            continue
        result = row["reason"]
        if not result:
            result = f"{row.get('images_per_second', math.nan):.1f} img/s"
        print(f"{row['state']}  {result}", flush=True)
    rows = results.read_rows(out)
    if any(row.get("images_per_second") for row in rows):  # write_page needs a result
        report.write_page([out], None)
    if any(row["state"] in RETRIED for row in rows):
        print("--retry runs again what has failed, timed out or is unfinished")
        return 1
    return 0


def run_task(args: argparse.Namespace) -> int:
    """Run the point of the given sweep that this task of a job array is for."""
    out = args.dirs[0]
    row = results.read_rows(out)[int(os.environ["SLURM_ARRAY_TASK_ID"])]
    row = run_point(out, row, args)
    print(row["id"], row["state"])
    return 0


def node_counts(text: str) -> list[int]:
    """Read numbers of nodes, like 1,2,4: an argparse type."""
    read = int_in_range(1, 100_000)
    return [read(word) for word in text.split(",")]


def check_flags(args: argparse.Namespace, parser: config.Parser) -> None:
    """Refuse flags that the plan would ignore; ValueError."""
    unused: tuple[str, ...] = ()
    if args.what == "report":
        unused = FLAGS_OF_RUNS
    elif args.what == "quick":
        unused = ("nodes",)
    for name in unused:
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"{args.what} does not use --{name}: leave it out")
    if args.what == "options" and args.nodes and len(args.nodes) > 1:
        raise ValueError("options runs on one number of nodes: give --nodes one number")


def build_parser() -> config.Parser:
    """Build the parser of the command line."""
    parser = config.Parser("sweep.py", doc=__doc__)
    add = parser.add_argument
    tiles = HERE / "examples" / "tiles" / "train"
    add("what", metavar="PLAN", choices=PLANS, help="quick, options, scaling, io; or report")
    add("dirs", type=Path, metavar="DIR", nargs="*", help="of report")
    add("--out", type=Path, metavar="DIR", help="(default sweep_PLAN; report: the first DIR)")
    text = "(default: quick tiny or base, io base, options 5b, scaling base,1b,3b,5b,15b)"
    add("--models", metavar="A,B", help=text)
    add("--nodes", type=node_counts, metavar="1,2,4", help="with --sbatch (default 1,2,4,8)")
    text = "per node (default: GPUs here, or 4; 8 with --sbatch)"
    add("--ranks", type=int_in_range(1, 1024), metavar="N", help=text)
    text = "images of real and io (default: tiles here)"
    add("--data", metavar="DIR", default=str(tiles), help=text)
    text = "through Slurm, with these flags of sbatch; environment as for launch_frontier.sh"
    add("--sbatch", metavar="FLAGS", help=text)
    text = "for plan.py (default: with --sbatch frontier; else this host's memory, no speed)"
    add("--machine", metavar="NAME", help=text)
    add("--limit", type=number(1), default=900, metavar="SECONDS", help="per point (default 900)")
    add("--retry", action="store_true", help="run again what failed, timed out or did not end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run or show a sweep; exit status 1 if a point failed, 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    added: list[str] = []  # flags of train_fsdp.py, for every point
    if "--" in words:
        cut = words.index("--")
        added = words[cut + 1 :]
        words = words[:cut]
    parser = build_parser()
    args = parser.parse_args(words)
    try:
        check_flags(args, parser)
        if args.what in ("report", "point") and not args.dirs:
            raise ValueError("which sweep? name its folder, or examples/published")
        if args.what == "point":
            return run_task(args)
        if args.what == "report":
            if added:
                raise ValueError("report runs nothing: leave out the flags after --")
            report.write_page(args.dirs, args.out)
            return 0
        if args.dirs:
            raise ValueError(f"{args.what} takes no folder: give --out, or --data")
        return run_sweep(args, added)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))


def stop(number: int, frame: Any) -> NoReturn:
    """Handle a signal: end the run that this sweep has started, and say how to continue."""
    for again in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)
    os.write(2, b"\nsweep.py: stopped: the same command with --retry continues\n")
    raise SystemExit(128 + number)


if __name__ == "__main__":
    process.ignore_output_errors()
    for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(_number, stop)
    raise SystemExit(main())
