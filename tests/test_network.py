"""Two hosts with addresses of their own, made of network namespaces: no shared loopback, no names.

The run must meet by the address alone.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from ranks import python, read_records, single_environment


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

ADDRESSES = "10.83.0.1", "10.83.0.2"
TRAIN = (
    f"--model tiny --img-size 32 --data {ROOT}/examples/tiles/train --global-batch 16 --steps 3 "
    "--log-every 1 --precision fp32 --device cpu --workers 0 --blr 1e-2 --clip 1"
).split()


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, each with one of `ADDRESSES`."""
    names = [f"mae-{os.getpid()}-{i}" for i in (0, 1)]

    def ip(text: str) -> None:
        subprocess.run(["ip", *text.split()], check=True, capture_output=True)

    try:
        for name in names:
            ip(f"netns add {name}")
        here, there = (f"name right netns {name}" for name in names)
        ip(f"link add {here} type veth peer {there}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip(f"-n {name} addr add {address}/24 dev right")
            for card in ("lo", "right"):
                ip(f"-n {name} link set {card} up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def losses(out: Path) -> list[float]:
    return [step["loss"] for step in read_records(out / "log.jsonl", "step")]


def start(host: int, name: str, train: list[str]) -> subprocess.Popen[str]:
    """As docs/cluster.md has it, on a host that knows no names, not even its own."""
    inside = f"ip netns exec {name} unshare --uts sh -c".split()
    launch = (
        "-u -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d "
        f"--rdzv-endpoint {ADDRESSES[0]}:29500 --rdzv-id mae --local-addr {ADDRESSES[host]} "
        f"--rdzv-conf is_host={host == 0} --"
    )
    named = [f'hostname nowhere-{host}; exec "$@"', "-", sys.executable, *launch.split()]
    return subprocess.Popen(
        [*inside, *named, *train],
        cwd=ROOT,
        env=single_environment() | {"GLOO_SOCKET_IFNAME": "right"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.mark.full
def test_two_hosts_train_as_one_process_does(hosts, tmp_path):
    train = ["train_fsdp.py", *TRAIN, "--mode", "hybrid", "--group", "2", "--out"]
    running = [start(i, name, [*train, str(tmp_path / "two")]) for i, name in enumerate(hosts)]
    output = ""
    try:
        for process in running:
            printed, _ = process.communicate(timeout=120)
            output += printed
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
    assert [process.returncode for process in running] == [0, 0], output
    python(*train[:-5], "--out", tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
