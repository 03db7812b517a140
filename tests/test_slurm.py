"""launch_frontier.sh, unmodified and through sbatch, on a real Slurm of two pretended nodes.

On Frontier `module` and `conda` are exported functions that write down what was asked of them, and
PYTHON is a stand-in wherever no training is needed. What needs no Slurm runs without: there a few
variables pretend a job. Losses are compared with those of a single process.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from ranks import Run, free_port, read_records, run_ranks

sys.path.insert(0, str(ROOT / "tests" / "slurm"))
from rig import ENDED, Rig, clean_environment, missing

LAUNCH = str(ROOT / "launch_frontier.sh")
TRAIN = (
    f"--model tiny --img-size 32 --data {ROOT}/examples/tiles/train --global-batch 16 "
    "--log-every 1 --precision fp32 --device cpu --workers 0 --blr 1e-2 --clip 1"
).split()
STUBS = {
    "BASH_FUNC_module%%": """() { echo "module $*" >> "$ASKED"; [ "$2" != "${REFUSED:-}" ]; }""",
    "BASH_FUNC_conda%%": '() { echo "conda $*" >> "$ASKED"; }',
}
# A run that obeys orders instead of training.
STAND_IN = """#!/bin/bash
case "$*" in *plan.py*) exit "${DRY:-0}" ;; *train_fsdp.py*) ;; *) exit 0 ;; esac
echo "rank $SLURM_PROCID of $SLURM_NTASKS: $*, GPUs ${ROCR_VISIBLE_DEVICES-none}, by $0"
%s
"""

slurm = pytest.mark.skipif(
    bool(missing()),
    reason=f"Slurm is not installed ({missing()}): `make test-slurm` installs it and runs these",
)


@pytest.fixture(scope="module")
def rig():
    with Rig() as rig:
        yield rig


class Case:
    """Submits launch_frontier.sh in a folder of its own."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig = rig
        self.folder = folder
        self.out = folder / "out"
        self.python = folder / "python"
        self.environ = {
            **STUBS,
            "LMOD_SYSTEM_NAME": "frontier",
            "ASKED": str(folder / "asked"),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "PREFLIGHT": "no",
            "MASTER_PORT": str(free_port()),
        }

    def stands_in(self, orders: str) -> None:
        """PYTHON does not train: it obeys a few lines of bash."""
        self.python.write_text(STAND_IN % orders)
        self.python.chmod(0o755)
        self.environ["PYTHON"] = str(self.python)

    def submit(self, *flags: str, sbatch: tuple[str, ...] = ("-N2",), **environ: str) -> int:
        command = ["sbatch", "--parsable", *sbatch, "-o", f"{self.folder}/output-%j", LAUNCH]
        command += [*flags, "--out", str(self.out)]
        return int(self.rig.run(*command, cwd=ROOT, env=self.environ | environ))

    def ended(self, job: int, seconds: float = 60) -> tuple[str, str]:
        """Wait until the job is over, in whatever way: its state, its output."""
        deadline = time.monotonic() + 3 * seconds  # of a busy machine
        while True:
            state = self.rig.job(job)["JobState"]
            if state in ENDED:
                break
            assert time.monotonic() < deadline, (state, self.rig.output(job))
            time.sleep(0.1)
        assert self.rig.run("squeue", "-h", "--steps") == ""  # no step hangs
        return state, self.rig.output(job)


@pytest.fixture
def case(rig, tmp_path):
    yield Case(rig, tmp_path)
    rig.run("scancel", "--user", str(os.getuid()))
    deadline = time.monotonic() + 90
    while rig.run("squeue", "-h"):  # the next test starts on idle nodes
        assert time.monotonic() < deadline
        time.sleep(0.1)


def losses(out: Path) -> list[float]:
    steps = read_records(out / "log.jsonl", "step")
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    return [s["loss"] for s in steps]


# --- through sbatch


@slurm
@pytest.mark.full
def test_a_run_that_is_cut_is_one_run(case, tmp_path):
    """The signal of --signal, by scancel: the true one needs minutes of walltime."""
    flags = [*TRAIN, "--mode", "hybrid", "--group", "2", "--steps", "60"]
    job = case.submit(*flags, TASKS_PER_NODE="2", CONDA_ENV="mae", PREFLIGHT="yes")
    log = case.out / "log.jsonl"
    deadline = time.monotonic() + 270
    while not log.exists() or '"step": 2,' not in log.read_text():
        assert time.monotonic() < deadline, case.rig.output(job)
        time.sleep(0.05)
    case.rig.run("scancel", "--signal=USR1", str(job))
    state, output = case.ended(job, 300)
    assert state == "COMPLETED" and (case.out / "done").exists(), output
    asked = (tmp_path / "asked").read_text().splitlines()
    assert "module load rccl-net-plugin" in asked and asked[-1] == "conda activate mae"
    assert "4 ranks on cpu, hybrid, mesh {'replicate': 2, 'shard': 2}" in output
    saved = [int(step) for step in re.findall(r"resumed \S+ at step (\d+)", output)]
    assert len(saved) == 1 and 0 < saved[0] < 60, output
    assert case.rig.job(job)["Restarts"] == "1" and output.count(": requeued") == 1
    alone = Run([*TRAIN, "--steps", "60"], params=False, to=str(tmp_path / "alone"))
    run_ranks(1, [alone], tmp_path / "ranks")
    assert losses(case.out) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@slurm
def test_a_dead_rank_ends_the_job_though_the_others_wait(case):
    """Ranks on gloo notice a death by themselves; those inside a GPU's collective do not."""
    case.stands_in("if [ $SLURM_PROCID = 1 ]; then kill -9 $$; fi; sleep 300")
    job = case.submit(TASKS_PER_NODE="1")
    state, output = case.ended(job)
    assert state == "FAILED" and "frontier00002: task 1: Killed" in output
    assert re.search(r"error: the run ended with status \d+", output)
    assert case.rig.job(job)["Restarts"] == "0"


@slurm
def test_an_environment_is_staged_to_the_nodes(case, tmp_path):
    """An archive as conda-pack makes it."""
    case.stands_in(f"mkdir -p {case.out} && touch {case.out}/done")
    packed = tmp_path / "packed"
    disk = tmp_path / "nvme"
    (packed / "bin").mkdir(parents=True)
    shutil.copy(case.python, packed / "bin" / "python")
    (packed / "bin" / "conda-unpack").touch()
    tarball = tmp_path / "env.tar.gz"
    subprocess.run(["tar", "-czf", tarball, "-C", packed, "."], check=True)
    disk.mkdir()
    job = case.submit(ENV_TARBALL=str(tarball), NVME_DIR=str(disk), TASKS_PER_NODE="1")
    state, output = case.ended(job)
    assert state == "COMPLETED", output
    assert f"by {disk}/env-{job}/bin/python" in output
    assert not list(disk.iterdir())  # nothing is left there


@slurm
@pytest.mark.parametrize("gpus", [4, 0])
def test_the_ranks_of_another_cluster(case, gpus):
    """A rank for each GPU, which sees all that the job has on its node; else CPUs."""
    case.stands_in("")
    del case.environ["LMOD_SYSTEM_NAME"]
    asked = ["--gpus-per-node=4", "--cpus-per-gpu=2"] if gpus else ["-c2"]
    sbatch = ("-N2", "-A", "physics", "-p", "shared", *asked)
    state, output = case.ended(case.submit("--run", "syn", sbatch=sbatch))
    ranks = 8 if gpus else 2
    assert state == "COMPLETED" and f"MACHINE is slurm: 2 x {ranks // 2} ranks" in output, output
    seen = re.findall(rf"rank (\d) of {ranks}: (.*), GPUs (\S+), by", output)
    assert sorted(int(rank) for rank, _, _ in seen) == [*range(ranks)]
    for _, flags, own in seen:
        assert ("--device cuda" in flags) == (gpus > 0)
        assert len(own.split(",")) == max(1, gpus)
    assert ("warning: no GPU in this job" in output) == (gpus == 0)


# --- in a pretended job, whose srun starts one process

JOB = {"JOB_ID": "7", "JOB_NUM_NODES": "1", "CPUS_ON_NODE": "8", "SUBMIT_DIR": str(ROOT)}
SRUN = """#!/bin/bash
echo "$*, exports ${SLURM_EXPORT_ENV-all}, at $MASTER_ADDR:$MASTER_PORT, NCCL_NET ${NCCL_NET-unset}"
echo "GPUs by variable: ${SLURM_GPUS-}${SLURM_GPUS_PER_TASK-}${SLURM_TRES_PER_TASK-}none"
case "$*" in *plan.py*) exit "${DRY:-0}" ;; esac
"""


def pretend(folder: Path, environ: dict[str, str], *flags: str) -> tuple[int, str]:
    """Status and output of the script in a job that is pretended."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": '#!/bin/bash\necho "scontrol $*"\n'}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    env = clean_environment() | {f"SLURM_{name}": value for name, value in JOB.items()}
    env |= STUBS | {"PATH": f"{folder}/bin:{env['PATH']}", "PREFLIGHT": "no", "AGAIN": "no"}
    env |= {"ASKED": str(folder / "asked"), "PYTHON": sys.executable}
    command = ["bash", LAUNCH, *flags, "--out", str(folder / "out")]
    done = subprocess.run(command, env=env | environ, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"SLURM_JOB_ID": ""}, "not in a Slurm job: sbatch -A PROJECT launch_frontier.sh"),
        ({"SCRIPTS": "/"}, "no train_fsdp.py in /: submit from its folder, or set SCRIPTS"),
        ({"MACHINE": "summit"}, "MACHINE is summit, but must be frontier or slurm"),
        (
            {"MACHINE": "frontier", "REFUSED": "rocm/7.1.1"},
            "module load rocm/7.1.1 failed (MACHINE is frontier): see 'module avail', set MODULES",
        ),
        ({"CONDA_ENV": "mae", "BASH_FUNC_conda%%": ""}, "CONDA_ENV is mae, but there is no conda"),
        ({"PYTHON": "false", "PREFLIGHT": "yes"}, "false has no torch: set PYTHON"),
        ({"SLURM_GPUS_ON_NODE": "9"}, "the job has 8 CPUs per node for 9 ranks"),
        ({"PREFLIGHT": "yes", "DRY": "3"}, "by its plan the run does not fit (PREFLIGHT=no starts"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(environ, sentence, tmp_path):
    status, output = pretend(tmp_path, environ)
    assert status == 1 and f"launch_frontier.sh: error: {sentence}" in output, output
    assert "train_fsdp.py --" not in re.sub(r".*plan.py.*", "", output)


@pytest.mark.parametrize(
    ("flags", "environ", "word"),
    [
        ((), {"AGAIN": "requeue", "DRY": "3"}, "scontrol requeue 7"),  # PREFLIGHT=no: started
        ((), {"AGAIN": "requeue", "SLURM_JOB_QOS": "debug"}, "submit the same command again"),
        ((), {}, "submit the same command again"),
        (("--run=io",), {"AGAIN": "requeue"}, "finished"),
    ],
)
def test_what_is_started_again(flags, environ, word, tmp_path):
    status, output = pretend(tmp_path, environ, *flags)
    assert status == 0 and word in output
    assert ("scontrol requeue" in output) == ("requeue" in word)


def test_two_rounds_without_progress_are_the_last(tmp_path):
    """Started again by hand, in another job, it has two more."""
    rounds = [pretend(tmp_path, {"AGAIN": "requeue"}) for _ in range(3)]
    assert [status for status, _ in rounds] == [0, 0, 1]
    assert "error: two rounds without a new checkpoint" in rounds[-1][1]
    status, _ = pretend(tmp_path, {"AGAIN": "requeue", "SLURM_JOB_ID": "8"})
    assert status == 0


@pytest.mark.parametrize(("machine", "port"), [("slurm", 20007), ("frontier", 3442)])
def test_all_ranks_meet_at_an_address_that_other_nodes_can_use(machine, port, tmp_path):
    """Many systems give their own name to 127.0.1.1. Sbatch may export a list, srun all."""
    local = '() { if [ "$1" = -i ]; then echo 127.0.1.1; else echo "10.1.2.3 10.9.9.9"; fi; }'
    given = {"MACHINE": machine, "BASH_FUNC_hostname%%": local, "PREFLIGHT": "yes"}
    given |= {"SLURM_EXPORT_ENV": "PATH", "SLURM_TRES_PER_TASK": "gres/gpu:1"}
    _, output = pretend(tmp_path, given)
    assert machine == "frontier" or "GPUs by variable: none" in output  # they would contradict srun
    assert output.count(f", exports all, at 10.1.2.3:{port}") == 2, output  # dry run, ranks
