"""launch_frontier.sh, unmodified and through sbatch, on a real Slurm of two pretended nodes.

`module` and `conda` are exported functions that write down what was asked of them; PYTHON is a
wrapper that writes down what a rank sees, or a stand-in where no training is needed. Losses are
compared with the same command under torchrun and in a single process.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from ranks import environment, read_log

sys.path.insert(0, str(ROOT / "tests" / "slurm"))
from rig import PROGRAMS, Rig, missing, node_name, processes

pytestmark = pytest.mark.skipif(
    bool(missing()),
    reason=f"Slurm is not installed ({missing()}): `make test-slurm` installs it and runs these",
)

LAUNCH = str(ROOT / "launch_frontier.sh")
TRAIN = (
    f"--model tiny --img-size 32 --data {ROOT}/examples/tiles/train --global-batch 16 --log-every 1 "
    "--precision fp32 --device cpu --workers 0 --blr 1e-2 --clip 1"
).split()
HYBRID = ["--mode", "hybrid", "--group", "2"]
STUBS = {
    "BASH_FUNC_module%%": '() { echo "module $*" >> "$ASKED"; [ "$2" != "${REFUSED:-}" ] || return 1;'
    ' [ "$2" != rccl-net-plugin ] || export NCCL_NET_PLUGIN=here; }',
    "BASH_FUNC_conda%%": '() { echo "conda $*" >> "$ASKED"; }',
}  # fmt: skip
MODULES = [
    "PrgEnv-gnu/8.7.0", "cpe/26.03", "miniforge3/23.11.0-0", "rocm/7.1.1", "rccl-net-plugin",
    "craype-accel-amd-gfx90a",
]  # fmt: skip
# What each rank is and sees, written down before it becomes Python.
SEEN = """#!/bin/bash
case "$*" in *train_fsdp.py*) echo $$ > "$SEEN/pid.$SLURM_PROCID"
    echo "${ROCR_VISIBLE_DEVICES-none}" > "$SEEN/devices.$SLURM_PROCID" ;; esac
exec "$REAL_PYTHON" "$@"
"""
# A run that obeys orders instead of training.
STAND_IN = """#!/bin/bash
[ "$SLURM_PROCID" = 0 ] || exit 0
case "$*" in *train_fsdp.py*) ;; *) echo "asked: $*"; exit 0 ;; esac
echo "a round: $*, $MASTER_ADDR:$MASTER_PORT, NCCL_NET ${NCCL_NET-unset}, OMP $OMP_NUM_THREADS"
echo "by $0"
%s
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    with Rig(tmp_path_factory.mktemp("slurm") / "rig") as rig:
        yield rig


class Case:
    """Submits launch_frontier.sh in a folder of its own."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig, self.folder, self.out = rig, folder, folder / "out"
        self.python = folder / "python"
        self.environ = {
            **STUBS, "ASKED": str(folder / "asked"), "SEEN": str(folder), "PYTHON": str(self.python),
            "REAL_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PREFLIGHT": "no",
        }  # fmt: skip
        self.runs(SEEN)

    def runs(self, script: str) -> None:
        """What PYTHON is."""
        self.python.write_text(script)
        self.python.chmod(0o755)

    def stands_in(self, orders: str) -> None:
        """PYTHON does not train: it obeys a few lines of bash."""
        self.runs(STAND_IN % orders)

    def submit(self, *flags: str, sbatch: tuple[str, ...] = ("-N2",), script: str = LAUNCH,
               **environ: str) -> int:  # fmt: skip
        output = self.folder / "output-%j"
        return self.rig.sbatch(
            *sbatch, "-o", str(output), script, *flags, "--out", str(self.out), cwd=ROOT,
            env=self.environ | environ,
        )  # fmt: skip

    def steps(self) -> list[dict]:
        with contextlib.suppress(FileNotFoundError, ValueError):  # not yet, or half a line
            return read_log(self.out / "log.jsonl")[1]
        return []

    def until_step(self, number: int, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not any(s["step"] >= number for s in self.steps()):
            assert time.monotonic() < deadline, "no step"
            time.sleep(0.05)

    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def case(rig, tmp_path):
    yield Case(rig, tmp_path)
    rig.run("scancel", "--user", str(os.getuid()))
    deadline = time.monotonic() + 30
    while rig.run("squeue", "-h"):  # the next test starts on idle nodes
        assert time.monotonic() < deadline
        time.sleep(0.1)


def losses(out: Path) -> list[float]:
    steps = read_log(out / "log.jsonl")[1]
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    return [s["loss"] for s in steps]


def alone(folder: Path, *flags: str) -> list[float]:
    """Losses of a single process."""
    env = environment(0, 1, 0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del env[name]
    command = [sys.executable, "train_fsdp.py", *TRAIN, *flags, "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, timeout=120)
    return losses(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Losses of 6 steps in a single process."""
    return alone(tmp_path_factory.mktemp("alone"), "--steps", "6")


# --- 1: from sbatch to a finished run


@pytest.mark.slow
def test_two_nodes_of_four_ranks(case, reference, tmp_path):
    job = case.submit(*TRAIN, *HYBRID, "--steps", "6", TASKS_PER_NODE="4", CONDA_ENV="mae",
                      PREFLIGHT="yes")  # fmt: skip
    case.rig.wait(job, "COMPLETED", 180)
    output = case.rig.output(job)
    assert case.asked() == [*(f"module load {name}" for name in MODULES), "conda activate mae"]
    for rank in range(8):  # of all that the job has, one device, and the one OLCF publishes
        assert (tmp_path / f"devices.{rank}").read_text().strip() == "4523"[rank % 4]
    shown = re.findall(r"^(\d+) +(frontier\d+) +(\d) +cpu +(\d) +(\d): (.*?) {2,}(\d): (.*)$", output,
                       re.MULTILINE)  # fmt: skip
    assert len(shown) == 16  # eight in the first look, eight by the run
    for rank, row in enumerate(shown[:8]):
        first = rank - rank % 2
        assert row == (
            str(rank), node_name(1 + rank // 4), str(rank % 4), "4523"[rank % 4], str(rank // 2),
            f"{first} {first + 1}", str(rank % 2), " ".join(map(str, range(rank % 2, 8, 2))),
        )  # fmt: skip
    assert "shard groups: 4 of 2 ranks, each in one package" in output
    assert "all-gather of 16 MiB among 2 ranks, all groups at once: " in output
    assert f"torch {__import__('torch').__version__}" in output
    assert (case.out / "done").exists()
    assert losses(case.out) == pytest.approx(reference, rel=1e-5)

    out = tmp_path / "torchrun"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", "--",
         "train_fsdp.py", *TRAIN, *HYBRID, "--steps", "6", "--out", str(out)],
        cwd=ROOT, env=environment(0, 1, 0), check=True, capture_output=True, timeout=180,
    )  # fmt: skip
    assert losses(case.out) == pytest.approx(losses(out), rel=1e-5)


@pytest.mark.slow
def test_two_nodes_of_eight_ranks(case, reference, tmp_path):
    job = case.submit(*TRAIN, *HYBRID, "--steps", "6")
    case.rig.wait(job, "COMPLETED", 240)
    seen = [(tmp_path / f"devices.{rank}").read_text().strip() for rank in range(16)]
    assert "".join(seen) == "45236701" * 2
    assert losses(case.out) == pytest.approx(reference, rel=1e-5)


# --- 2: walltime


@pytest.mark.slow
def test_two_cuts_are_one_run(case, tmp_path):
    """The signal of --signal, by scancel: the true one needs minutes of walltime."""
    flags = [*TRAIN, "--mode", "full_shard", "--steps", "60"]
    job = case.submit(*flags, TASKS_PER_NODE="1")
    saved = []
    for restarts in range(2):
        case.until_step(saved[-1] + 2 if saved else 2)
        case.rig.run("scancel", "--signal=USR1", str(job))
        deadline = time.monotonic() + 60
        while (
            int((now := case.rig.job(job))["Restarts"]) == restarts or now["JobState"] != "RUNNING"
        ):
            assert time.monotonic() < deadline and now["JobState"] != "COMPLETED", now
            time.sleep(0.1)
        saved.append(int((case.out / "latest").read_text().strip().removeprefix("step_")))
        assert not (case.out / "done").exists()
    case.rig.wait(job, "COMPLETED", 90)
    assert 0 < saved[0] < saved[1] < 60
    output = case.rig.output(job)
    assert [int(n) for n in re.findall(r"resumed \S+ at step (\d+)", output)] == saved
    assert (case.out / "done").exists() and case.rig.job(job)["Restarts"] == "2"
    assert output.count(": requeued") == 2 and "launch_frontier.sh: finished" in output
    assert losses(case.out) == pytest.approx(alone(tmp_path / "uncut", "--steps", "60"), rel=1e-5)
