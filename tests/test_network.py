"""Two hosts with addresses of their own, made of network namespaces: no shared loopback, no names.

The run must meet by the address alone.
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
from ranks import python, read_log, single_environment


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

    def start(self, host: int, command: list[str], **environ: str) -> subprocess.Popen[str]:
        """A command on a host that knows no names, not even its own."""
        inside = f"ip netns exec {self.names[host]} unshare --uts sh -c".split()
        named = [f'hostname nowhere-{host}; exec "$@"', "-", sys.executable, "-u"]
        process = subprocess.Popen(
            [*inside, *named, *command],
            cwd=ROOT,
            env=single_environment() | {"GLOO_SOCKET_IFNAME": "right"} | environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def finish(self, seconds: float = 120) -> str:
        """Wait for all that was started, and return what it printed."""
        deadline = time.monotonic() + seconds
        while any(p.poll() is None for p in self.running) and time.monotonic() < deadline:
            time.sleep(0.1)
        status, output = [p.poll() for p in self.running], self.end()
        assert status == [0] * len(status), (status, output)
        return output

    def end(self) -> str:
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
        outputs = [process.communicate()[0] for process in self.running]
        self.running = []
        return "".join(outputs)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        for name in hosts.names:
            hosts.ip(f"netns add {name}")
        cards = [f"name right netns {name}" for name in hosts.names]
        hosts.ip(f"link add {cards[0]} type veth peer {cards[1]}")
        for host, address in enumerate((HERE, THERE)):
            hosts.ip(f"addr add {address}/24 dev right", host)
            for card in ("lo", "right"):
                hosts.ip(f"link set {card} up", host)
        yield hosts
    finally:
        hosts.end()
        for name in hosts.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def losses(out: Path) -> list[float]:
    return [s["loss"] for s in read_log(out / "log.jsonl")[1]]


def by_torchrun(host: int) -> list[str]:
    """As docs/cluster.md has it: torchrun asks for names where it is not told."""
    flags = (
        f"--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint {HERE}:{PORT} "
        f"--rdzv-id mae --local-addr {(HERE, THERE)[host]} --rdzv-conf is_host={host == 0} --"
    )
    return ["-m", "torch.distributed.run", *flags.split()]


@pytest.mark.full
def test_two_hosts_train_as_one_process_does(hosts, tmp_path):
    train = ["train_fsdp.py", *TRAIN, "--mode", "hybrid", "--group", "2", "--out"]
    for host in range(2):
        hosts.start(host, [*by_torchrun(host), *train, str(tmp_path / "two")])
    output = hosts.finish()
    assert "mesh 2 x 2 (replicate x shard): 4 ranks on 2 nodes" in output
    rows = re.findall(r"^(\d) +nowhere-(\d)", output, re.MULTILINE)
    assert rows == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
    python(*train[:-5], "--out", tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_master_that_is_not_there_is_named(hosts):
    """Within its timeout: nobody hangs."""
    numbers = {"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    environ = {name: str(n) for name, n in numbers.items()}
    environ |= {"MASTER_ADDR": NOBODY, "MASTER_PORT": str(PORT)}
    code = "import os, torch, mesh; mesh.init_ranks(mesh.read_ranks(os.environ), "
    hosts.start(1, ["-c", code + "torch.device('cpu'), timeout_minutes=0.05)"], **environ)
    assert hosts.running[0].wait(60) == 1
    printed = hosts.end()
    assert NOBODY in printed and str(PORT) in printed
