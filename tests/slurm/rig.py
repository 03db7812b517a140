"""A real Slurm of a few pretended Frontier nodes on this host, for as long as somebody holds it.

    python tests/slurm/rig.py FOLDER [NODES]      start it, say how to use it, end it at Ctrl-D

Needs Debian's packages slurmctld, slurmd, slurm-client and munge, no system service and no root. It
ends when its standard input does, so also when the test that started it is killed. FOLDER is new or
empty, its path short, and goes with the rig; ports are found free: rigs run beside each other.

    with Rig() as rig:
        job = rig.sbatch("-N2", "job.sh")
        rig.wait(job, "COMPLETED", 60)
"""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

LONGEST = 50  # characters of the folder: steps make sockets below it, whose paths Linux limits
HERE = Path(__file__).resolve().parent
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where daemons are, for ordinary users too
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "sbcast", "scontrol", "squeue")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
SLACK = 3


def missing() -> str:
    """What of Slurm is not installed here, or an empty text."""
    return ", ".join(name for name in PROGRAMS if not shutil.which(name, path=PATH))


def clean_environment() -> dict[str, str]:
    """The caller's without a surrounding job's variables, which would steer daemons and srun."""
    prefixes = ("SLURM", "SBATCH_", "TORCHELASTIC", "MASTER_", "NCCL_", "GLOO_", "OMP_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and k not in names}
    return kept | {"PATH": PATH}


# ---------------------------------------------------------------------------------------------
# Holding a rig


class Rig:
    """A running rig; a context manager. Raises RuntimeError with the daemons' logs if it fails.

    `nodes` counts the nodes; `as_user` (root only) is the name of whom the daemons run as.
    """

    def __init__(self, nodes: int = 2, as_user: str = "") -> None:
        self.nodes, self.as_user = nodes, as_user

    def __enter__(self) -> "Rig":
        self.root = Path(tempfile.mkdtemp(prefix="rig")).resolve()  # short, see LONGEST
        self.environ = clean_environment() | {"SLURM_CONF": str(self.root / "slurm.conf")}
        command = [sys.executable, str(HERE / "rig.py"), str(self.root), str(self.nodes)]
        if self.as_user:  # with its own Python: ours may lie where that user may not look
            shutil.chown(self.root, self.as_user)
            command = ["runuser", "-u", self.as_user, "--", "/usr/bin/python3", *command[1:]]
        self.server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean_environment(),
            start_new_session=True,  # Ctrl-C is for the test
        )
        assert self.server.stdout
        if not self.server.stdout.readline().startswith("Slurm is up"):
            text = self.server.communicate("")[0]
            raise RuntimeError(f"the rig did not start:\n{text}")
        return self

    def __exit__(self, *_: object) -> None:
        self.server.communicate("")  # its input ends, and so does the rig
        left = processes(self.root) or (self.root.exists() and self.root)
        assert not left, f"left over: {left}"

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        seconds: float = 30,
    ) -> str:
        """What a command that talks to this Slurm prints; RuntimeError if it fails."""
        if self.as_user:
            command = ("runuser", "-u", self.as_user, "--", *command)
        done = subprocess.run(
            command,
            env=self.environ | dict(env or {}),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stderr}")
        return done.stdout

    def sbatch(
        self, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> int:
        """Submit; the number of the job."""
        return int(self.run("sbatch", "--parsable", *args, env=env, cwd=cwd))

    def job(self, job: int) -> dict[str, str]:
        """`scontrol show job` as a dictionary: JobState, ExitCode, Restarts, Reason, ..."""
        text = self.run("scontrol", "show", "job", str(job))
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s|$)", text))

    def wait(self, job: int, state: str, seconds: float) -> dict[str, str]:
        """Until the job is in that state; RuntimeError if it ends in another or time is up.

        `seconds` of a machine left alone; of a busy one SLACK times as many.
        """
        deadline = time.monotonic() + SLACK * seconds
        while True:
            now = self.job(job)
            if now["JobState"] == state:
                return now
            late = time.monotonic() > deadline
            if late or now["JobState"] in ENDED:
                text = self.output(job)
                raise RuntimeError(
                    f"job {job} is {now['JobState']} ({now['Reason']}), not {state}"
                    f"{f', after {SLACK * seconds} s' if late else ''}; its output:\n{text}"
                )
            time.sleep(0.1)

    def ended(self, job: int, seconds: float) -> dict[str, str]:
        """Until the job is over, in whatever way; `seconds` as of `wait`."""
        deadline = time.monotonic() + SLACK * seconds
        while (now := self.job(job))["JobState"] not in ENDED:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"job {job} is {now['JobState']} after {SLACK * seconds} s; its output:\n"
                    f"{self.output(job)}"
                )
            time.sleep(0.1)
        return now

    def output(self, job: int) -> str:
        """What the job has printed so far."""
        path = Path(self.job(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def daemon(self, node: int) -> int:
        """The process id of a node's slurmd, nodes counted from 1."""
        return int((self.root / f"slurmd.{node_name(node)}.pid").read_text())

    def start_slurmd(self, node: int) -> None:
        """Again, after somebody has killed it."""
        self.run("slurmd", "-N", node_name(node))


def node_name(number: int) -> str:
    """As Frontier's are; they resolve nowhere."""
    return f"frontier{number:05d}"


def processes(root: Path) -> list[str]:
    """Everything of the rig in a folder that still runs, as "PID NAME": daemons, steps, tasks."""
    mark, found = f"SLURM_CONF={root}/slurm.conf".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(f"{folder.name} {(folder / 'comm').read_text().strip()}")
    return found


# ---------------------------------------------------------------------------------------------
# Being the rig


def free_ports(count: int) -> int:
    """The first of `count` ports in a row, below those that the system hands out."""
    for first in range(20000 + os.getpid() * 37 % 10000, 32000):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("0.0.0.0", port))
            return first
    raise RuntimeError("no free ports between 20000 and 32000")


def write_files(root: Path, nodes: int) -> None:
    """The configuration, the key and the pretended GCDs."""
    port = free_ports(nodes + 1)
    names = f"frontier[00001-{nodes:05d}]" if nodes > 1 else node_name(1)
    ports = f"[{port + 1}-{port + nodes}]" if nodes > 1 else str(port + 1)
    values = {
        "ROOT": str(root),
        "HOST": socket.gethostname().split(".")[0],
        "USER": getpass.getuser(),
        "PORT": str(port),
        "NODES": names,
        "PORTS": ports,
    }
    for name in ("slurm.conf", "gres.conf"):
        text = (HERE / name).read_text()
        (root / name).write_text(re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], text))
    shutil.copy(HERE / "prolog.sh", root)
    for name in ("state", "gcd", "munge", *(f"spool.{node_name(n + 1)}" for n in range(nodes))):
        (root / name).mkdir()
    for gcd in range(8):
        (root / "gcd" / str(gcd)).symlink_to("/dev/null")
    (root / "munge").chmod(0o711)  # munged insists
    key = root / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)


def start(root: Path, nodes: int, environ: Mapping[str, str]) -> None:
    """The daemons, until all nodes are idle; RuntimeError if they do not come up."""

    def do(*command: str) -> str:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stdout}{done.stderr}")
        return done.stdout

    munge = root / "munge"
    # --force: the folder may lie below one that only its owner may enter, as pytest's do
    files = [f"--{what}={munge}/{what}" for what in ("socket", "pid-file", "log-file", "seed-file")]
    do("munged", "--force", f"--key-file={munge}/key", *files)
    do("slurmctld", "-i")
    for node in range(nodes):
        do("slurmd", "-N", node_name(node + 1))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(RuntimeError):  # the controller does not answer yet
            if len(do("sinfo", "-hN", "-p", "batch", "-t", "idle", "-o", "%N").split()) == nodes:
                return
        time.sleep(0.1)
    raise RuntimeError("the nodes did not come up")


def kill_all(root: Path) -> None:
    """Everything that runs in this rig's name, until nothing does; its state is thrown away."""
    deadline = time.monotonic() + 20
    while (found := processes(root)) and time.monotonic() < deadline:
        for line in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        time.sleep(0.05)


@contextlib.contextmanager
def serving(root: Path, nodes: int) -> Iterator[None]:
    """A rig in `root`; whatever happens, nothing of it is left."""
    environ = clean_environment() | {"SLURM_CONF": str(root / "slurm.conf")}
    try:
        write_files(root, nodes)
        start(root, nodes, environ)
        yield
    finally:
        kill_all(root)


def main() -> int:
    """Serve until standard input ends or a signal comes."""
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    root, nodes = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) == 3 else 2
    root.mkdir(parents=True, exist_ok=True)
    for wrong, why in (
        (missing(), f"not installed: {missing()}"),
        (any(root.iterdir()), f"{root} is not empty"),
        (re.search(r"[\s#]", str(root)), f"{root} has a space or # in it"),
        (len(str(root)) > LONGEST, f"{root} is longer than {LONGEST} characters"),
    ):
        if wrong:
            print(f"rig.py: error: {why}", flush=True)
            return 1
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # through the `finally` above
    try:
        with serving(root, nodes):
            print(f"Slurm is up: export SLURM_CONF={root}/slurm.conf; Ctrl-D ends it", flush=True)
            sys.stdin.read()
    except RuntimeError as error:
        logs = [f"== {path}\n{path.read_text()[-1500:]}" for path in sorted(root.glob("*.log"))]
        print(f"rig.py: error: {error}", *logs, sep="\n", flush=True)
        return 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
