"""Run the points of a sweep through Slurm: a job array per number of nodes."""

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from sweeps.studies import Point

ROOT = Path(__file__).resolve().parent.parent


def array_task(environ: Mapping[str, str]) -> str | None:
    """Return the array task of this process as squeue names it, JOB_TASK; None outside of one."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return None


def launch_environ(ranks: str, script: Path) -> dict[str, str]:
    """Return the environment in which launch_frontier.sh runs a point in an array task."""
    own = {"TASKS_PER_NODE": ranks}
    if not {"CONDA_ENV", "ENV_TARBALL"} & {*os.environ}:
        own["PYTHON"] = os.environ.get("PYTHON", sys.executable)
    defaults = {  # a point is short, its only round, and may share its nodes with others
        "MASTER_PORT": str(20000 + int(os.environ["SLURM_JOB_ID"]) % 10000),
        "SCRIPTS": str(script.parent),
        "AGAIN": "no",
        "PREFLIGHT": "no",
    }
    return defaults | os.environ | own


def in_queue(job: str) -> bool:
    """Return whether an array task waits or runs; a task newer than the last list asks again."""
    if job not in queued_jobs():
        queued_jobs.cache_clear()
    return job in queued_jobs()


@lru_cache(maxsize=1)
def queued_jobs() -> set[str]:
    """List the array tasks of this user that wait or run; RuntimeError without an answer."""
    command = ["squeue", "--me", "-h", "-r", "-o", "%i"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError("this sweep has Slurm jobs: run this where squeue is") from None
    if done.returncode:
        raise RuntimeError(f"squeue does not answer: {done.stderr.strip()}")
    return set(done.stdout.split())


def submit(
    out: Path, points: Sequence[Point], sbatch: str, words: Sequence[str], limit: float
) -> None:
    """Submit a job array per number of nodes; each task runs one point of the sweep in `out`."""
    launcher = (ROOT / "launch_frontier.sh").read_text()
    network = re.findall(r"^#SBATCH --network.*", launcher, re.MULTILINE)
    command = [sys.executable, str(ROOT / "sweep.py"), "point", str(out)]
    words = [*words, "--limit", f"{limit:g}"]
    jobs = out / "jobs"
    jobs.mkdir(exist_ok=True)
    for nodes in sorted({int(point["nodes"]) for point in points}):
        mine = [point["id"] for point in points if int(point["nodes"]) == nodes]
        file = jobs / f"{nodes}-nodes-{os.getpid()}.sh"
        task = f'exec {shlex.join(command)} "${{points[SLURM_ARRAY_TASK_ID]}}" {shlex.join(words)}'
        lines = ["#!/bin/bash", *network, f"points=({' '.join(mine)})", task]
        file.write_text("\n".join(lines) + "\n")
        minutes = math.ceil(limit / 60) + 5  # Slurm's limit only backs up the sweep's own
        flags = ["-J", "sweep", "-t", str(minutes), *shlex.split(sbatch), "-N", str(nodes)]
        flags += [f"--array=0-{len(mine) - 1}", "-o", str(jobs / "%A_%a.txt")]
        done = subprocess.run(
            ["sbatch", "--parsable", *flags, str(file)], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"sbatch refused: {done.stderr.strip()}")
        number = done.stdout.strip().split(";")[0]
        for i, name in enumerate(mine):
            (out / "runs" / name / "job").write_text(f"{number}_{i}")
        print(f"job {number}: {len(mine)} points on {nodes} nodes", flush=True)
