"""Two hosts with addresses of their own, made of network namespaces: no shared loopback, no names.

Each host has two network cards: one leads to the other host, one nowhere. The run must meet by the
address alone and talk over the right card, by plain rank variables and by torchrun.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from ranks import environment, read_log


def why_not() -> str:
    """Why namespaces cannot be had here, or an empty text."""
    if os.getuid():
        return "only root may make network namespaces"
    if not shutil.which("ip"):
        return "`ip` is not installed (apt-get install iproute2)"
    name = f"mae-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.stderr.strip()


pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no two hosts here: {why_not()}")

PORT = 29500  # nobody else is in there
HERE, THERE, NOBODY = "10.83.0.1", "10.83.0.2", "10.83.0.77"
TRAIN = (
    f"--model tiny --img-size 32 --data {ROOT}/examples/tiles/train --global-batch 16 --steps 3 "
    "--log-every 1 --precision fp32 --device cpu --workers 0 --blr 1e-2 --clip 1"
).split()


class Hosts:
    """Two namespaces and what runs in them."""

    def __init__(self) -> None:
        self.names = [f"mae-{os.getpid()}-{i}" for i in (0, 1)]
        self.running: list[subprocess.Popen[str]] = []

    def ip(self, text: str, host: int | None = None) -> None:
        inside = [] if host is None else ["-n", self.names[host]]
        subprocess.run(["ip", *inside, *text.split()], check=True, capture_output=True)

    def start(self, host: int, *command: str, **environ: str) -> subprocess.Popen[str]:
        """A command on a host that knows no names, not even its own."""
        clean = environment(0, 1, PORT)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            del clean[name]
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self.names[host],
                "unshare",
                "--uts",
                "sh",
                "-c",
                f'hostname nowhere-{host}; exec "$@"',
                "-",
                sys.executable,
                "-u",
                *command,
            ],
            cwd=ROOT,
            env=clean | {"GLOO_SOCKET_IFNAME": "right"} | environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def pairs(self) -> set[tuple[str, str]]:
        """(own address, other's) of connections that stand at this moment on either host."""
        found = set()
        for name in self.names:
            command = ["ip", "netns", "exec", name, "cat", "/proc/net/tcp"]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for own, other, state in re.findall(r": (\w+):\w+ (\w+):\w+ (\w+)", text):
                if state == "01":
                    found.add((dotted(own), dotted(other)))
        return found

    def finish(self, seconds: float = 120) -> tuple[list[str], set[tuple[str, str]]]:
        """Wait for all that was started: outputs, and every pair of addresses that talked."""
        deadline, talked = time.monotonic() + seconds, set()
        while any(p.poll() is None for p in self.running) and time.monotonic() < deadline:
            talked |= self.pairs()
            time.sleep(0.1)
        status, outputs = [p.poll() for p in self.running], self.end()
        assert status == [0] * len(status), (status, outputs)
        return outputs, talked

    def end(self) -> list[str]:
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
        outputs = [process.communicate()[0] for process in self.running]
        self.running = []
        return outputs


def dotted(hexadecimal: str) -> str:
    """An address as /proc/net/tcp writes it."""
    return ".".join(str(b) for b in reversed(bytes.fromhex(hexadecimal)))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        for name in hosts.names:
            hosts.ip(f"netns add {name}")
        cards = [f"name right netns {name}" for name in hosts.names]
        hosts.ip(f"link add {cards[0]} type veth peer {cards[1]}")
        for host, address in enumerate((HERE, THERE)):
            hosts.ip("link add wrong type veth peer name nowhere", host)
            hosts.ip("addr add 10.84.0.1/24 dev wrong", host)  # the same on both: leads nowhere
            hosts.ip(f"addr add {address}/24 dev right", host)
            for card in ("lo", "wrong", "nowhere", "right"):
                hosts.ip(f"link set {card} up", host)
        yield hosts
    finally:
        hosts.end()
        for name in hosts.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def losses(out: Path) -> list[float]:
    return [s["loss"] for s in read_log(out / "log.jsonl")[1]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> list[float]:
    """Losses of a single process."""
    out = tmp_path_factory.mktemp("alone")
    env = environment(0, 1, 0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del env[name]
    command = [sys.executable, "train_fsdp.py", *TRAIN, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, timeout=120)
    return losses(out)


@pytest.mark.full
def test_two_hosts_by_rank_variables(hosts, reference, tmp_path):
    for rank in range(4):
        hosts.start(
            rank // 2,
            "train_fsdp.py",
            *TRAIN,
            "--mode",
            "hybrid",
            "--group",
            "2",
            "--out",
            str(tmp_path),
            RANK=str(rank),
            WORLD_SIZE="4",
            LOCAL_RANK=str(rank % 2),
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR=HERE,
            MASTER_PORT=str(PORT),
        )
    outputs, talked = hosts.finish()
    assert "mesh 2 x 2 (replicate x shard): 4 ranks on 2 nodes" in outputs[0]
    assert re.findall(r"^(\d) +nowhere-(\d)", outputs[0], re.MULTILINE) == [
        ("0", "0"),
        ("1", "0"),
        ("2", "1"),
        ("3", "1"),
    ]
    assert losses(tmp_path) == pytest.approx(reference, rel=1e-5)
    assert {(HERE, THERE), (THERE, HERE)} <= talked
    assert {own for own, _ in talked} <= {HERE, THERE, "127.0.0.1"}


@pytest.mark.full
def test_two_hosts_by_torchrun(hosts, reference, tmp_path):
    """--local-addr and is_host, because torchrun asks for names where it is not told."""
    for host, address in enumerate((HERE, THERE)):
        hosts.start(
            host,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{HERE}:{PORT}",
            "--rdzv-id",
            "mae",
            "--local-addr",
            address,
            "--rdzv-conf",
            f"is_host={host == 0}",
            "--",
            "train_fsdp.py",
            *TRAIN,
            "--mode",
            "hybrid",
            "--group",
            "4",
            "--out",
            str(tmp_path),
        )
    outputs, talked = hosts.finish()
    assert any("mesh 1 x 4 (replicate x shard): 4 ranks on 2 nodes" in text for text in outputs)
    assert losses(tmp_path) == pytest.approx(reference, rel=1e-5)
    assert {(HERE, THERE), (THERE, HERE)} <= talked
    assert {own for own, _ in talked} <= {HERE, THERE, "127.0.0.1"}


@pytest.mark.full
@pytest.mark.parametrize("program", ["topology", "init_ranks"])
def test_a_master_that_is_not_there_is_named(hosts, program):
    """Within its timeout, by the program and by the function."""
    by = {
        "topology": ["-m", "runtime.topology", "--device", "cpu", "--minutes", "0.1"],
        "init_ranks": [
            "-c",
            "import os, torch, mesh; mesh.init_ranks(mesh.read_ranks(os.environ), "
            "torch.device('cpu'), timeout_minutes=0.1)",
        ],
    }
    process = hosts.start(
        1,
        *by[program],
        RANK="1",
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR=NOBODY,
        MASTER_PORT=str(PORT),
    )
    assert process.wait(60) == 1
    (output,) = hosts.end()
    error = {"topology": "error: rank 1: ", "init_ranks": "RuntimeError: "}[program]
    assert f"{error}{NOBODY}:{PORT}: " in output
