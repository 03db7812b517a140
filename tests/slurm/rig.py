"""A real Slurm of two or more pretended Frontier nodes on this host, as long as it is held.

Needs Debian's packages slurmctld, slurmd, slurm-client and munge, no system service and no root.

    with Rig() as rig:
        job = int(rig.run("sbatch", "--parsable", "-N2", "job.sh"))
        rig.job(job)["JobState"]
"""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from ranks import free_port, single_environment

HERE = Path(__file__).resolve().parent
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where daemons are, for ordinary users too
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "sbcast", "scontrol", "squeue")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}


def missing() -> str:
    """What of Slurm is not installed here, or an empty text."""
    return ", ".join(name for name in PROGRAMS if not shutil.which(name, path=PATH))


def clean_environment() -> dict[str, str]:
    """The caller's without what would steer daemons, srun or the script."""
    prefixes = ("SBATCH_", "NCCL_", "GLOO_", "OMP_", "CONDA", "LMOD", "MODULE")
    kept = {k: v for k, v in single_environment().items() if not k.startswith(prefixes)}
    return kept | {"PATH": PATH}


class Rig:
    """A running Slurm; a context manager. RuntimeError with the daemons' logs if it fails."""

    def __init__(self, nodes: int = 2) -> None:
        self.nodes = [f"frontier{number:05}" for number in range(1, nodes + 1)]  # resolve nowhere

    def __enter__(self) -> "Rig":
        self.root = Path(tempfile.mkdtemp(prefix="rig")).resolve()  # short: sockets lie in there
        self.environ = clean_environment() | {"SLURM_CONF": str(self.root / "slurm.conf")}
        try:
            self.write_files()
            munge = self.root / "munge"
            names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
            # --force: the folder may lie below one that only its owner may enter
            self.start("munged", "-F", "--force", *(f"--{n}={munge}/{n}" for n in names))
            self.until((munge / "socket").exists)
            self.start("slurmctld", "-D", "-i")
            for node in self.nodes:
                self.start("slurmd", "-D", "-N", node)
            self.until(self.all_idle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self.processes():
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.root, ignore_errors=True)

    def start(self, *command: str) -> None:
        """Start a daemon that ends with this process, however that ends."""
        with open(self.root / f"{command[0]}.log", "a") as log:
            command = ("setpriv", "--pdeathsig", "KILL", "--", *command)
            subprocess.Popen(
                command, env=self.environ, stdout=log, stderr=log, start_new_session=True
            )

    def all_idle(self) -> bool:
        """Tell whether all nodes wait for a job."""
        nodes = self.run("sinfo", "-hN", "-p", "batch", "-t", "idle")
        return nodes.count("\n") == len(self.nodes)

    def until(self, ready) -> None:
        """Wait until `ready()` is true; RuntimeError with the daemons' logs after a minute."""
        for _ in range(600):
            with contextlib.suppress(RuntimeError):  # the controller does not answer yet
                if ready():
                    return
            time.sleep(0.1)
        logs = [path.read_text()[-1500:] for path in self.root.glob("*.log")]
        raise RuntimeError("\n".join(["Slurm did not come up", *logs]))

    def write_files(self) -> None:
        """The configuration, the key and the pretended GPUs."""
        names = f"frontier[{self.nodes[0][-5:]}-{self.nodes[-1][-5:]}]"
        host, _, _ = socket.gethostname().partition(".")
        values = {"ROOT": str(self.root), "HOST": host, "USER": getpass.getuser(), "NODES": names}
        ports = ",".join(str(free_port()) for _ in self.nodes)
        values |= {"PORT": str(free_port()), "PORTS": f"[{ports}]"}
        for name in ("slurm.conf", "gres.conf"):
            text = (HERE / name).read_text()
            for word, value in values.items():
                text = text.replace(f"@{word}@", value)
            (self.root / name).write_text(text)
        for name in ("state", "gpu", "munge", *(f"spool.{node}" for node in self.nodes)):
            (self.root / name).mkdir()
        for gpu in range(8):
            (self.root / "gpu" / str(gpu)).symlink_to("/dev/null")
        (self.root / "munge").chmod(0o711)  # munged insists
        key = self.root / "munge" / "key-file"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def processes(self) -> list[int]:
        """Everything of this Slurm that still runs: daemons, steps, tasks."""
        mark = f"SLURM_CONF={self.root}/slurm.conf".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone meanwhile, or not ours
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def run(self, *command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        """What a command that talks to this Slurm prints; RuntimeError if it fails."""
        done = subprocess.run(
            command,
            env=self.environ if env is None else self.environ | env,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stderr}")
        return done.stdout

    def job(self, job: int) -> dict[str, str]:
        """`scontrol show job` as a dictionary: JobState, ExitCode, Restarts, Reason, ..."""
        text = self.run("scontrol", "show", "job", str(job))
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s|$)", text))

    def output(self, job: int) -> str:
        """What the job has printed so far."""
        path = Path(self.job(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""
