"""launch_frontier.sh, unmodified and through sbatch, on a real Slurm of two pretended nodes.

On Frontier `module` and `conda` are exported functions that write down what was asked of them;
PYTHON is a wrapper that writes down what a rank sees, or a stand-in where no training is needed. On
the foreign cluster jobs share nodes, and conda is a folder as its installer leaves it. Losses are
compared with the same command under torchrun and in a single process.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from ranks import Run, free_port, read_log, run_ranks

sys.path.insert(0, str(ROOT / "tests" / "slurm"))
from rig import Rig, clean_environment, missing, node_name, processes

pytestmark = pytest.mark.skipif(
    bool(missing()),
    reason=f"Slurm is not installed ({missing()}): `make test-slurm` installs it and runs these",
)

LAUNCH = str(ROOT / "launch_frontier.sh")
TRAIN = (
    f"--model tiny --img-size 32 --data {ROOT}/examples/tiles/train --global-batch 16 "
    "--log-every 1 --precision fp32 --device cpu --workers 0 --blr 1e-2 --clip 1"
).split()
HYBRID = ["--mode", "hybrid", "--group", "2"]
STUBS = {
    "BASH_FUNC_module%%": """() { echo "module $*" >> "$ASKED"
        [ "$2" != "${REFUSED:-}" ] || return 1
        [ "$2" != rccl-net-plugin ] || export NCCL_NET_PLUGIN=here
    }""",
    "BASH_FUNC_conda%%": '() { echo "conda $*" >> "$ASKED"; }',
}
MODULES = [
    "PrgEnv-gnu/8.7.0",
    "cpe/26.03",
    "miniforge3/23.11.0-0",
    "rocm/7.1.1",
    "rccl-net-plugin",
    "craype-accel-amd-gfx90a",
]
# What each rank is and sees, written down before it becomes Python.
SEEN = """#!/bin/bash
case "$*" in *--dry-run*) ;; *train_fsdp.py*) echo $$ > "$SEEN/pid.$SLURM_PROCID"
    echo "${ROCR_VISIBLE_DEVICES-none}" > "$SEEN/devices.$SLURM_PROCID" ;; esac
exec "$REAL_PYTHON" "$@"
"""
# A run that obeys orders instead of training.
STAND_IN = """#!/bin/bash
[ "$SLURM_PROCID" = 0 ] || exit 0
case "$*" in *--dry-run*) asked=yes ;; *train_fsdp.py*) asked= ;; *) asked=yes ;; esac
[ ! "$asked" ] || { echo "asked: $*"; exit 0; }
echo "a round: $*, $MASTER_ADDR:$MASTER_PORT, NCCL_NET ${NCCL_NET-unset}, OMP $OMP_NUM_THREADS"
echo "by $0"
%s
"""


@pytest.fixture(scope="module")
def rig():
    with Rig() as rig:
        yield rig


class Case:
    """Submits launch_frontier.sh in a folder of its own."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig, self.folder, self.out = rig, folder, folder / "out"
        folder.mkdir(exist_ok=True)
        self.python = folder / "python"
        self.environ = {
            **STUBS,
            "LMOD_SYSTEM_NAME": "frontier",
            "ASKED": str(folder / "asked"),
            "SEEN": str(folder),
            "PYTHON": str(self.python),
            "REAL_PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "PREFLIGHT": "no",
            "MASTER_PORT": str(free_port()),  # "": the script's own
        }
        self.runs(SEEN)

    def runs(self, script: str) -> None:
        """What PYTHON is."""
        self.python.write_text(script)
        self.python.chmod(0o755)

    def stands_in(self, orders: str) -> None:
        """PYTHON does not train: it obeys a few lines of bash."""
        self.runs(STAND_IN % orders)

    def submit(
        self, *flags: str, sbatch: tuple[str, ...] = ("-N2",), script: str = LAUNCH, **environ: str
    ) -> int:
        output = self.folder / "output-%j"
        return self.rig.sbatch(
            *sbatch,
            "-o",
            str(output),
            script,
            *flags,
            "--out",
            str(self.out),
            cwd=ROOT,
            env=self.environ | environ,
        )

    def steps(self) -> list[dict]:
        with contextlib.suppress(FileNotFoundError, ValueError):  # not yet, or half a line
            return read_log(self.out / "log.jsonl")[1]
        return []

    def until_step(self, number: int, seconds: float = 270) -> None:
        deadline = time.monotonic() + seconds
        while not any(s["step"] >= number for s in self.steps()):
            if time.monotonic() > deadline:
                outputs = [path.read_text() for path in self.folder.glob("output-*")]
                raise RuntimeError(f"step {number} did not come: {outputs}")
            time.sleep(0.05)

    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def case(rig, tmp_path):
    yield Case(rig, tmp_path)
    rig.run("scancel", "--user", str(os.getuid()))
    deadline = time.monotonic() + 90
    while rig.run("squeue", "-h"):  # the next test starts on idle nodes
        assert time.monotonic() < deadline
        time.sleep(0.1)


def losses(out: Path) -> list[float]:
    steps = read_log(out / "log.jsonl")[1]
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    return [s["loss"] for s in steps]


def alone(folder: Path, *flags: str) -> list[float]:
    """Losses of a single process."""
    run_ranks(1, [Run([*TRAIN, *flags], params=False, to=str(folder))], folder / "ranks")
    return losses(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Losses of 3 steps in a single process."""
    return alone(tmp_path_factory.mktemp("alone"), "--steps", "3")


# --- 1: from sbatch to a finished run


@pytest.mark.full  # a minute and a half; a job of real ranks is in test_a_killed_rank_ends_the_job
def test_two_nodes_of_two_ranks(case, reference, tmp_path):
    job = case.submit(
        *TRAIN, *HYBRID, "--steps", "3", TASKS_PER_NODE="2", CONDA_ENV="mae", PREFLIGHT="yes"
    )
    case.rig.wait(job, "COMPLETED", 400)
    output = case.rig.output(job)
    assert case.asked() == [*(f"module load {name}" for name in MODULES), "conda activate mae"]
    for rank in range(4):  # of all that the job has, one device, and the one OLCF publishes
        assert (tmp_path / f"devices.{rank}").read_text().strip() == "45"[rank % 2]
    row = r"^(\d+) +(frontier\d+) +(\d) +cpu +(\d) +(\d): (.*?) {2,}(\d): (.*)$"
    shown = re.findall(row, output, re.MULTILINE)
    assert len(shown) == 8  # four in the first look, four by the run
    for rank, cells in enumerate(shown[:4]):
        first = rank - rank % 2
        assert cells == (
            str(rank),
            node_name(1 + rank // 2),
            str(rank % 2),
            "45"[rank % 2],
            str(rank // 2),
            f"{first} {first + 1}",
            str(rank % 2),
            " ".join(map(str, range(rank % 2, 4, 2))),
        )
    assert "shard groups: 2 of 2 ranks, each in one package" in output
    assert "all-gather of 16 MiB among 2 ranks, all groups at once: " in output
    assert f"torch {torch.__version__}" in output
    assert (case.out / "done").exists()
    assert losses(case.out) == pytest.approx(reference, rel=1e-5)


def test_each_of_eight_ranks_has_the_device_that_olcf_publishes(case, tmp_path):
    case.runs(SEEN.replace('exec "$REAL_PYTHON" "$@"', "exit 0"))
    job = case.submit("--run", "syn", AGAIN="no")
    case.rig.wait(job, "COMPLETED", 60)
    seen = [(tmp_path / f"devices.{rank}").read_text().strip() for rank in range(16)]
    assert "".join(seen) == "45236701" * 2


@pytest.mark.full
def test_two_nodes_of_eight_ranks(case, reference, tmp_path):
    job = case.submit(*TRAIN, *HYBRID, "--steps", "3")
    case.rig.wait(job, "COMPLETED", 240)
    assert losses(case.out) == pytest.approx(reference, rel=1e-5)


# --- 2: walltime


@pytest.mark.full
@pytest.mark.parametrize("cuts", [1, 2])
def test_a_run_that_is_cut_is_one_run(case, tmp_path, cuts):
    """The signal of --signal, by scancel: the true one needs minutes of walltime."""
    flags = [*TRAIN, "--mode", "full_shard", "--steps", "60"]
    job = case.submit(*flags, TASKS_PER_NODE="1")
    saved: list[int] = []
    for restarts in range(cuts):
        case.until_step(saved[-1] + 2 if saved else 2)
        case.rig.run("scancel", "--signal=USR1", str(job))
        deadline = time.monotonic() + 180
        while (
            int((now := case.rig.job(job))["Restarts"]) == restarts or now["JobState"] != "RUNNING"
        ):
            assert time.monotonic() < deadline and now["JobState"] != "COMPLETED", now
            time.sleep(0.1)
        saved.append(int((case.out / "latest").read_text().strip().removeprefix("step_")))
        assert not (case.out / "done").exists()
    case.rig.wait(job, "COMPLETED", 90)
    assert saved == sorted(set(saved)) and saved[0] > 0 and saved[-1] < 60
    output = case.rig.output(job)
    assert [int(n) for n in re.findall(r"resumed \S+ at step (\d+)", output)] == saved
    assert (case.out / "done").exists() and (case.out / "step_00000060").is_dir()
    assert case.rig.job(job)["Restarts"] == str(cuts)
    assert output.count(": requeued") == cuts and "launch_frontier.sh: finished" in output
    assert losses(case.out) == pytest.approx(alone(tmp_path / "uncut", "--steps", "60"), rel=1e-5)


# --- 3: what goes wrong

FOREVER = ["--mode", "full_shard", "--steps", "100000"]


def no_step_hangs(rig: Rig, job: int) -> None:
    assert rig.run("squeue", "-h", "--steps") == ""
    assert rig.job(job)["Restarts"] == "0"
    assert rig.run("squeue", "-h") == ""  # nor a successor


def test_a_killed_rank_ends_the_job(case, tmp_path):
    job = case.submit(*TRAIN, *FOREVER, TASKS_PER_NODE="1")
    case.until_step(2)
    os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGKILL)
    assert case.rig.ended(job, 60)["JobState"] == "FAILED"
    output = case.rig.output(job)
    assert "frontier00002: task 1: Killed" in output
    assert re.search(r"error: the run ended with status \d+: not requeued", output)
    no_step_hangs(case.rig, job)


def test_a_dead_rank_ends_the_job_though_the_others_wait(case):
    """Ranks on gloo notice a death by themselves; those inside a GPU's collective do not."""
    case.runs("""#!/bin/bash
if [ $SLURM_PROCID = 1 ]; then kill -9 $$; fi
sleep 300
""")
    job = case.submit(TASKS_PER_NODE="1")
    assert case.rig.ended(job, 60)["JobState"] == "FAILED"
    assert "frontier00002: task 1: Killed" in case.rig.output(job)
    no_step_hangs(case.rig, job)


@pytest.mark.full
def test_a_lost_node_ends_the_round_and_the_next_one_goes_on(tmp_path):
    """The daemon of the second node is killed. Slurm itself queues the job again."""
    with Rig() as rig:
        case = Case(rig, tmp_path)
        job = case.submit(*TRAIN, *FOREVER, "--save-every", "5", TASKS_PER_NODE="1")
        case.until_step(6)
        os.kill(rig.daemon(2), signal.SIGKILL)
        rig.wait(job, "PENDING", 60)
        assert rig.run("squeue", "-h", "--steps") == ""
        first = rig.output(job)
        assert "srun: error: Node failure on frontier00002" in first and "resumed" not in first
        rig.start_slurmd(2)
        rig.wait(job, "RUNNING", 60)
        saved = int((case.out / "latest").read_text().strip().removeprefix("step_"))
        assert saved >= 5
        case.until_step(saved + 20)
        assert f"at step {saved};" in rig.output(job).removeprefix(first)
        assert rig.job(job)["Restarts"] == "1"


def test_a_bad_flag_is_found_by_one_process(case, tmp_path):
    job = case.submit(*TRAIN, "--mode", "sharded", PREFLIGHT="yes")
    now = case.rig.ended(job, 60)
    assert (now["JobState"], now["ExitCode"]) == ("FAILED", "2:0")
    assert "train_fsdp.py: error: argument --mode: invalid choice: 'sharded'" in case.rig.output(
        job
    )
    assert not list(tmp_path.glob("pid.*"))
    no_step_hangs(case.rig, job)


@pytest.mark.full
def test_a_missing_data_folder_ends_the_job(case):
    job = case.submit(*TRAIN, "--data", "/nowhere/tiles", TASKS_PER_NODE="1")
    assert case.rig.ended(job, 60)["JobState"] == "FAILED"  # by -K1 not always with rank 0's own 2
    sentence = "train_fsdp.py: error: there is no folder /nowhere/tiles: give --data the folder of"
    assert sentence in case.rig.output(job)
    no_step_hangs(case.rig, job)


@pytest.mark.full
@pytest.mark.parametrize("look", ["yes", "no"])
def test_a_port_in_use_ends_the_job(case, tmp_path, look):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = case.submit(
            *TRAIN, *FOREVER, TASKS_PER_NODE="1", MASTER_PORT=str(port), PREFLIGHT=look
        )
        assert case.rig.ended(job, 60)["JobState"] == "FAILED"
    output = case.rig.output(job)
    who = {
        "yes": "runtime.topology: error: rank 0",
        "no": "train_fsdp.py: error: rank 0 of 2 could not join the process group",
    }
    assert re.search(rf"{who[look]}: [0-9.]+:{port}: .*address already in use", output)
    assert ("the pre-flight check of the ranks failed" in output) == (look == "yes")
    assert bool(list(tmp_path.glob("pid.*"))) == (look == "no")  # nothing is trained after that
    no_step_hangs(case.rig, job)


def pack(folder: Path, python: Path) -> Path:
    """An environment as conda-pack makes it, with a megabyte that does not compress."""
    root = folder / "packed"
    (root / "bin").mkdir(parents=True)
    shutil.copy(python, root / "bin" / "python")
    (root / "bin" / "conda-unpack").touch()
    (root / "weight").write_bytes(os.urandom(2**20))
    subprocess.run(["tar", "-czf", "env.tar.gz", "-C", root, "."], cwd=folder, check=True)
    return folder / "env.tar.gz"


@contextlib.contextmanager
def small_disk(folder: Path):
    """A folder with room for half a megabyte."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a full disk needs root and mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_an_environment_is_staged_to_the_nodes(case, tmp_path):
    case.stands_in(f'mkdir -p {tmp_path}/out && touch {tmp_path}/out/done; ls "${{0%/*}}/.."')
    disk = tmp_path / "nvme"
    disk.mkdir()
    job = case.submit(ENV_TARBALL=str(pack(tmp_path, case.python)), NVME_DIR=str(disk))
    case.rig.wait(job, "COMPLETED", 60)
    output = case.rig.output(job)
    assert f"unpacked in {disk}/env-{job} on each node" in output
    assert f"by {disk}/env-{job}/bin/python" in output and "weight" in output
    assert not list(disk.iterdir())  # nothing is left there


@pytest.mark.parametrize(
    "trouble",
    ["full", *(pytest.param(t, marks=pytest.mark.full) for t in ("missing", "no tarball"))],
)
def test_an_environment_that_cannot_be_staged_is_said(case, tmp_path, trouble):
    case.stands_in(f"mkdir -p {tmp_path}/out && touch {tmp_path}/out/done")
    tarball = pack(tmp_path, case.python)
    with contextlib.ExitStack() as stack:
        disk = tmp_path / "nvme"
        if trouble == "full":
            stack.enter_context(small_disk(disk))
        elif trouble == "no tarball":
            disk.mkdir()
            tarball.unlink()
        job = case.submit(ENV_TARBALL=str(tarball), NVME_DIR=str(disk))
        case.rig.wait(job, "COMPLETED", 60)
        assert f"warning: {tarball} was not staged to {disk}" in case.rig.output(job)
        assert f"by {case.python}\n" in case.rig.output(job)
        assert not disk.exists() or not list(disk.iterdir())
    no_step_hangs(case.rig, job)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (
            {"REFUSED": "rocm/7.1.1"},
            "module load rocm/7.1.1 failed (MACHINE is frontier): see 'module avail', set MODULES",
        ),
        ({"MODULES": "rocm/7.1.1"}, "no plugin librccl-net.so for RCCL: load rccl-net-plugin"),
        ({"MACHINE": "summit"}, "MACHINE is summit, but must be frontier or slurm"),
        ({"AGAIN": "maybe"}, "AGAIN is maybe, but must be requeue, chain or no"),
        ({"SCRIPTS": "/"}, "no train_fsdp.py in /: submit from its folder, or set SCRIPTS"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(case, environ, sentence):
    case.stands_in("")
    job = case.submit(**{"PREFLIGHT": "yes"} | environ)
    assert case.rig.ended(job, 60)["JobState"] == "FAILED"
    assert f"launch_frontier.sh: error: {sentence}" in case.rig.output(job)
    assert "asked: " not in case.rig.output(job) and "a round: " not in case.rig.output(job)
    no_step_hangs(case.rig, job)


@pytest.mark.parametrize("preflight", ["yes", "no"])
def test_a_run_that_does_not_fit_is_not_started_unless_told(case, preflight):
    """Of the dry run's exit status: 3 where its plan says NO."""
    case.runs("""#!/bin/bash
case "$*" in *--dry-run*) exit 3 ;; *train_fsdp.py*) echo "a round" ;; esac
""")
    job = case.submit("--run", "syn", PREFLIGHT=preflight, NCCL_NET="Socket")
    state = "COMPLETED" if preflight == "no" else "FAILED"
    assert case.rig.ended(job, 60)["JobState"] == state
    output = case.rig.output(job)
    sentence = "error: by its plan the run does not fit (PREFLIGHT=no starts it)"
    assert (sentence in output) == (preflight == "yes") == ("a round" not in output)


def test_outside_of_a_job_the_script_says_how_to_submit_it():
    done = subprocess.run(["bash", LAUNCH], capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 1
    assert "not in a Slurm job: sbatch -A PROJECT launch_frontier.sh" in done.stderr


# --- rounds, by a stand-in: what becomes of a job whose run left with 0

CUT = "mkdir -p {0}; echo step_$RANDOM$$ > {0}/latest"


def test_two_rounds_without_progress_are_the_last(case):
    case.stands_in("exit 0")
    job = case.submit()
    now = case.rig.ended(job, 90)
    assert (now["JobState"], now["Restarts"]) == ("FAILED", "1")
    output = case.rig.output(job)
    assert output.count("a round: ") == 2 and output.count(": requeued") == 1
    assert "error: two rounds without a new checkpoint" in output


def test_rounds_that_a_node_ends_are_counted_as_well(case):
    """The state that two rounds leave of which none came to its end, as when nodes fail."""
    case.stands_in("sleep 60")
    case.out.mkdir()
    job = case.submit(sbatch=("-N2", "--begin=now+3"))
    (case.out / ".rounds").write_text(f"{job} none 2\n")
    assert case.rig.ended(job, 60)["JobState"] == "FAILED"
    assert "two rounds without a new checkpoint" in case.rig.output(job)
    assert "a round: " not in case.rig.output(job)
    (case.out / ".rounds").write_text(f"{job} none 2\n")
    again = case.submit()  # by hand: a fresh start
    case.rig.wait(again, "RUNNING", 30)
    time.sleep(2)
    assert "a round: " in case.rig.output(again)


@pytest.mark.parametrize(
    ("flags", "environ", "word"),
    [
        ((), {"SLURM_JOB_QOS": "debug"}, "not done: submit the same command again to resume"),
        ((), {"AGAIN": "no"}, "not done: submit the same command again to resume"),
        (("--run-mode", "syn"), {}, "finished"),
        (("--run=io",), {}, "finished"),
    ],
)
def test_what_is_not_started_again(case, flags, environ, word):
    case.stands_in(CUT.format(case.out))
    job = case.submit(*flags, **environ)
    case.rig.wait(job, "COMPLETED", 60)
    assert word in case.rig.output(job)
    no_step_hangs(case.rig, job)


def test_a_chain_of_jobs(case):
    """AGAIN=chain: the next job has the same flags, limits and place, and waits for this one."""
    case.stands_in(f"[ -e {case.out}/latest ] && touch {case.out}/done; {CUT.format(case.out)}")
    job = case.submit(
        "--model",
        "tiny",
        sbatch=("-N2", "-t", "7", "-C", "nvme", "-J", "chained"),
        AGAIN="chain",
        TASKS_PER_NODE="4",
        MASTER_PORT="",
        **{"BASH_FUNC_hostname%%": "() { echo 10.0.0.$SLURM_JOB_ID; }"},
    )
    case.rig.wait(job, "COMPLETED", 60)
    case.rig.wait(job + 1, "COMPLETED", 60)
    with pytest.raises(RuntimeError, match="Invalid job id"):
        case.rig.job(job + 2)
    jobs = [case.rig.job(job), case.rig.job(job + 1)]
    for name in ("NumNodes", "TimeLimit", "Features", "JobName", "Partition", "WorkDir", "Network"):
        assert jobs[0][name] == jobs[1][name], name
    rounds = [
        re.findall(r"a round: (.*)", Path(str(case.folder / f"output-{job}")).read_text()),
        re.findall(r"a round: (.*)", Path(jobs[1]["StdOut"]).read_text()),
    ]
    for number, one in zip((job, job + 1), rounds, strict=True):  # each has a first node of its own
        assert len(one) == 1 and f", 10.0.0.{number}:3442, NCCL_NET OFI, OMP 1" in one[0]
        assert "--model tiny --out" in one[0]
    Path(jobs[1]["StdOut"]).unlink()


# --- 4: the groups of two Frontier nodes

PACKAGES = [{4, 5}, {2, 3}, {6, 7}, {0, 1}]
NODE = {
    1: ([{4}, {5}, {2}, {3}, {6}, {7}, {0}, {1}], "one device"),
    2: (PACKAGES, "one package"),
    4: ([{4, 5, 2, 3}, {6, 7, 0, 1}], "two packages with a double link"),
    8: ([set(range(8))], "one node"),
    16: (None, "2 nodes"),
}


@pytest.mark.full
def test_groups_are_packages_pairs_of_them_and_nodes(rig, tmp_path):
    rig.run(
        "srun",
        "-N2",
        "-n16",
        "-c7",
        "--gpus-per-task=1",
        "--gpu-bind=closest",
        "-K1",
        sys.executable,
        str(ROOT / "tests" / "slurm" / "groups.py"),
        str(tmp_path),
        env={
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        },
        seconds=180,
    )
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(16)]
    for group, (gcds, words) in NODE.items():
        for rank, mine in enumerate(told):
            replicate, shard = mine["groups"][str(group)]
            first = rank - rank % group
            assert shard == list(range(first, first + group))
            assert replicate == list(range(rank % group, 16, group))
            if gcds:  # Slurm's own variables of the ranks in the group
                assert {told[r]["node"] for r in shard} == {told[rank]["node"]}
                assert {told[r]["gcd"] for r in shard} == gcds[rank % 8 // group]
        lines = told[0]["lines"][str(group)]
        assert lines[0].startswith(f"mesh {16 // group} x {group} ")
        assert lines[-1] == f"shard groups: {16 // group} of {group} ranks, each in {words}"
        assert [int(line.split()[3 + 1]) for line in lines[2:18]] == [t["gcd"] for t in told]


# --- 5: devices, names, neighbours


@pytest.mark.full
def test_two_jobs_on_one_host_one_that_sees_all_devices(rig, reference, tmp_path):
    """Both nodes are this host. One job sees a device a rank, the other all of them."""
    flags = [*TRAIN, *HYBRID, "--steps", "3"]
    cases = [Case(rig, tmp_path / name) for name in ("one", "all")]
    jobs = []
    for case, machine in zip(cases, ("frontier", "slurm"), strict=True):
        jobs.append(
            case.submit(
                *flags, sbatch=("-N1",), MACHINE=machine, TASKS_PER_NODE="2", MASTER_PORT=""
            )
        )
    for job in jobs:
        rig.wait(job, "RUNNING", 30)
    for job in jobs:
        rig.wait(job, "COMPLETED", 120)
    seen = [[(c.folder / f"devices.{rank}").read_text() for rank in range(2)] for c in cases]
    assert seen == [["4\n", "5\n"], ["none\n", "none\n"]]  # none hidden: all are seen
    for case in cases:
        assert losses(case.out) == pytest.approx(reference, rel=1e-5)


def test_names_that_do_not_resolve(case):
    """Node names never do here; if not even the host knows its own, its first address is taken."""
    with pytest.raises(OSError):
        socket.getaddrinfo(node_name(1), 1)
    lost = '() { if [ "$1" = -i ]; then return 1; fi; echo "10.1.2.3 10.9.9.9 "; }'
    case.stands_in(CUT.format(case.out))
    job = case.submit(AGAIN="no", MASTER_PORT="", **{"BASH_FUNC_hostname%%": lost})
    case.rig.wait(job, "COMPLETED", 60)
    assert "10.1.2.3:3442, NCCL_NET OFI, OMP 1" in case.rig.output(job)


def test_a_single_node_of_frontier_uses_no_plugin(case):
    case.stands_in(CUT.format(case.out))
    job = case.submit(sbatch=("-N1",), AGAIN="no")
    case.rig.wait(job, "COMPLETED", 60)
    assert "NCCL_NET Socket" in case.rig.output(job)


# --- 6: a foreign cluster: four GPUs of a shared node, an account, a partition, conda

FOREIGN = ("-N2", "-A", "physics", "-p", "shared", "--gpus-per-node=4", "--cpus-per-gpu=2")
# What conda's installer leaves: a shell function in a file, the program behind it.
CONDA_SH = """export CONDA_EXE='{base}/bin/conda'
conda() {{
    case "$1" in
        activate) local lines; lines="$("$CONDA_EXE" shell.posix "$@")" || return; eval "$lines" ;;
        *) "$CONDA_EXE" "$@" ;;
    esac
}}
if [ -z "$CONDA_SHLVL" ]; then export CONDA_SHLVL=0; fi
"""
CONDA = """#!/bin/bash
case "$*" in
    "info --base") echo '{base}' ;;
    "shell.posix activate "*)
        case $3 in */*) env=$3 ;; *) env={base}/envs/$3 ;; esac
        [ -d "$env/conda-meta" ] || {{
            echo "EnvironmentNameNotFound: Could not find conda environment: $3" >&2
            exit 1
        }}
        echo "export CONDA_PREFIX='$env' CONDA_SHLVL=1 PATH='$env/bin:$PATH'" ;;
    *) echo "conda: error: $*" >&2; exit 2 ;;
esac
"""


def install_conda(folder: Path, python: str) -> Path:
    """Make the folder of a conda with the environment `mae`, whose python3 is this script."""
    base = folder / "miniforge3"
    for name, text in {
        "etc/profile.d/conda.sh": CONDA_SH.format(base=base),
        "bin/conda": CONDA.format(base=base),
        "envs/mae/bin/python3": python,
        "envs/mae/conda-meta/history": "",
    }.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
        (base / name).chmod(0o755)
    return base


@pytest.fixture
def foreign(case, tmp_path):
    """The case as on another cluster: nothing of Frontier is there, nor PYTHON."""
    base = install_conda(tmp_path, SEEN)
    for name in (*STUBS, "LMOD_SYSTEM_NAME", "PYTHON", "MASTER_PORT"):
        del case.environ[name]
    case.environ |= {"CONDA_EXE": str(base / "bin" / "conda"), "CONDA_ENV": "mae"}
    return case


def check_foreign_ranks(case: Case, job: int) -> None:
    """Two nodes of four ranks, each of which sees the four devices that the job has there."""
    assert "MACHINE is slurm (this is not Frontier): 2 x 4 ranks, 2 CPUs each" in case.rig.output(
        job
    )
    seen = [(case.folder / f"devices.{rank}").read_text() for rank in range(8)]
    assert len({*seen}) == 1 and seen[0].count(",") == 3


def test_the_ranks_of_a_foreign_cluster(foreign, tmp_path):
    install_conda(tmp_path, SEEN.replace('exec "$REAL_PYTHON" "$@"', "exit 0"))
    job = foreign.submit("--run", "syn", sbatch=FOREIGN)
    foreign.rig.wait(job, "COMPLETED", 60)
    check_foreign_ranks(foreign, job)


@pytest.mark.full
def test_a_run_on_a_foreign_cluster(foreign, reference):
    flags = [*TRAIN, "--mode", "hybrid", "--group", "4", "--steps", "3"]
    job = foreign.submit(*flags, sbatch=FOREIGN, PREFLIGHT="yes")
    foreign.rig.wait(job, "COMPLETED", 400)
    check_foreign_ranks(foreign, job)
    assert "mesh 2 x 4 (replicate x shard): 8 ranks on 2 nodes" in foreign.rig.output(job)
    assert losses(foreign.out) == pytest.approx(reference, rel=1e-5)
    assert (foreign.out / "done").exists()


@pytest.mark.parametrize(
    ("again", "gpus"), [("requeue", "--gpus-per-node=4"), ("chain", "--gres=gpu:4")]
)
def test_the_next_round_has_what_the_first_asked_for(foreign, again, gpus, tmp_path):
    install_conda(
        tmp_path,
        STAND_IN % f"[ -e {foreign.out}/latest ] && touch {foreign.out}/done; "
        f"echo $SLURM_GPUS_ON_NODE GPUs; {CUT.format(foreign.out)}",
    )
    request = ("-N1", "-A", "physics", "-p", "shared", "-t", "7", gpus, "-c8", "--mem=100")
    job = foreign.submit(sbatch=request, AGAIN=again, OMP_NUM_THREADS="")
    last = job + (again == "chain")
    if again == "chain":
        foreign.rig.wait(job, "COMPLETED", 60)
    foreign.rig.wait(last, "COMPLETED", 60)
    now = foreign.rig.job(last)
    assert (now["Account"], now["Partition"], now["TimeLimit"]) == ("physics", "shared", "00:07:00")
    output = foreign.rig.output(last)
    assert output.count("1 x 4 ranks, 2 CPUs each") == 2 - (again == "chain")
    assert f":{20000 + job}, NCCL_NET unset, OMP 2" in output and "4 GPUs" in output
    assert now["MinMemoryNode"] == "100M"
    if again == "chain":
        Path(now["StdOut"]).unlink()


def outside(folder: Path, **environ: str) -> str:
    """What the script prints in a job that is pretended too: srun says which python3 it finds."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "srun").write_text(
        '#!/bin/bash\necho "by $(command -v python3), $MASTER_ADDR"\n'
    )
    (folder / "bin" / "srun").chmod(0o755)
    job = {"JOB_ID": "7", "JOB_NUM_NODES": "1", "CPUS_ON_NODE": "8", "SUBMIT_DIR": str(ROOT)}
    env = clean_environment() | {f"SLURM_{name}": value for name, value in job.items()}
    for name in [name for name in env if name.startswith(("CONDA", "LMOD", "MODULE"))]:
        del env[name]
    env |= {"PATH": f"{folder}/bin:{env['PATH']}", "PREFLIGHT": "no", "AGAIN": "no"} | environ
    command = ["bash", LAUNCH, "--out", str(folder / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"CONDA_EXE": "{base}/bin/conda"}, True),
        ({"CONDA_BASE": "{base}"}, True),
        ({"CONDA_PREFIX": "{base}"}, True),
        ({"PATH": "{base}/bin:{path}"}, True),  # conda info --base
        ({"CONDA_BASE": "{base}", "CONDA_ENV": "{base}/envs/mae"}, True),
        ({}, "CONDA_ENV is mae, but there is no conda: set CONDA_BASE to what 'conda info --base'"),
        (
            {"CONDA_BASE": "{base}", "CONDA_ENV": "mea"},
            "conda activate mea failed: 'conda env list' prints the names and paths to give",
        ),
        ({"CONDA_ENV": "", "PYTHON": "/nowhere/python"}, "there is no /nowhere/python: set PYTHON"),
        ({"CONDA_ENV": "", "SLURM_GPUS_ON_NODE": "9"}, "the job has 8 CPUs per node for 9 ranks"),
        (
            {"CONDA_ENV": "", "PYTHON": "false", "PREFLIGHT": "yes"},
            "false has no torch: set PYTHON",
        ),
        ({"CONDA_ENV": "", "SLURM_GPUS": "8"}, "--gpus does not say how many per node"),
        ({"CONDA_ENV": "", "MODULES": "cuda"}, "there is no module command to load 'cuda'"),
    ],
)
def test_conda_is_found_or_missed(environ, found, tmp_path):
    base = install_conda(tmp_path, "")
    path = f"{tmp_path}/bin:{clean_environment()['PATH']}"
    given = {name: text.format(base=base, path=path) for name, text in environ.items()}
    output = outside(tmp_path, **{"CONDA_ENV": "mae"} | given)
    assert (f"by {base}/envs/mae/bin/python3" if found is True else found) in output, output
    assert ("error: " in output) == (found is not True)
    no_gpu = "warning: Slurm has given this job no GPU" in output
    assert no_gpu != any(name.startswith("SLURM_GPUS") for name in environ)


@pytest.mark.parametrize(
    ("names", "address"), [("10.1.2.3 10.9.9.9 fe80::1", "10.1.2.3"), ("::1", "node7")]
)
def test_an_address_that_other_nodes_can_use(names, address, tmp_path):
    """Many systems give their own name to 127.0.1.1; without an IPv4 address the name is left."""
    local = f'() {{ if [ "$1" = -i ]; then echo 127.0.1.1; else echo "{names}"; fi; }}'
    named = {"BASH_FUNC_hostname%%": local, "BASH_FUNC_uname%%": "() { echo node7; }"}
    assert f"python3, {address}\n" in outside(tmp_path, **named)


def test_modules_by_the_file_that_their_folder_has(tmp_path):
    init = tmp_path / "lmod" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text('module() { echo "module $*"; }\n')
    output = outside(tmp_path, MODULES="cuda/12.8 nccl", MODULESHOME=str(tmp_path / "lmod"))
    assert "module load cuda/12.8\nmodule load nccl\n" in output


# --- the rig itself


def test_two_rigs_at_once_and_nothing_left_when_a_test_fails():
    with pytest.raises(ZeroDivisionError), Rig() as one, Rig() as two:
        assert one.run("sinfo") and two.run("sinfo")
        one.sbatch("-N2", "-o", "/dev/null", "--wrap", "srun sleep 100")
        two.sbatch("-N2", "-o", "/dev/null", "--wrap", "srun sleep 100")
        while not (len(processes(one.root)) > 8 and len(processes(two.root)) > 8):
            time.sleep(0.1)
        assert 1 // 0
    assert not processes(one.root) and not processes(two.root)


def test_a_rig_ends_when_its_test_is_killed():
    code = (
        "import time; from rig import Rig\nwith Rig() as r: print(r.root, flush=1); time.sleep(99)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment() | {"PYTHONPATH": str(ROOT / "tests" / "slurm")},
    ) as test:
        assert test.stdout
        root = Path(test.stdout.readline().strip())
        assert len(processes(root)) > 4
        test.kill()
    deadline = time.monotonic() + 20
    while processes(root) or root.exists():
        assert time.monotonic() < deadline, processes(root)
        time.sleep(0.1)


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests run as an ordinary user already")
def test_an_ordinary_user_can_have_a_rig():
    with Rig(as_user="nobody") as rig:
        (rig.root / "train_fsdp.py").touch()
        python = rig.root / "python"
        python.write_text(STAND_IN % f"id -un; touch {rig.root}/done")
        python.chmod(0o755)
        job = rig.sbatch(
            "-N2",
            "-o",
            f"{rig.root}/out",
            LAUNCH,
            "--out",
            str(rig.root),
            cwd=rig.root,
            env={**STUBS, "ASKED": "/dev/null", "PYTHON": str(python)},
        )
        rig.wait(job, "COMPLETED", 60)
        assert "\nnobody\n" in rig.output(job) and "finished" in rig.output(job)
