"""Makes the scripts importable from the tests, and the tests independent of the caller's shell.

PyTorch is imported late: the process that only controls those that run tests does without.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "docs")]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
FULL = "TEST_ALL" in os.environ  # make test-all: whole matrices, and the tests marked `full`
# A shell's background job ignores Ctrl-C, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")


def forget_launcher() -> None:
    """Delete the variables of a launcher: each test is one process, until it says otherwise."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            del os.environ[name]


forget_launcher()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the fork server of this process before any test does: Python has one, and the first
    to start it decides what it has imported."""
    if not getattr(session.config.option, "numprocesses", None):  # not the one that only controls
        import torch
        from ranks import fork_server

        fork_server()
        torch.set_num_threads(1)  # tiny models: more threads only wait for each other


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `full`, unless all are wanted or named; order the others."""
    named = any("::" in argument for argument in config.args)
    left_out = [] if FULL or named else [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    # The longest begin first: one that begins late is left running alone at the end.
    longest = [item for item in items if item.get_closest_marker("minutes")]
    items[:] = longest + [item for item in items if item not in longest]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin, in a process that runs tests, with all modules of tests imported."""
    if not getattr(session.config.option, "numprocesses", None):
        from ranks import freeze_imports

        freeze_imports()


@pytest.fixture(autouse=True)
def without_launcher() -> Iterator[None]:
    """Begin each test as one process, whatever the tests before it have left behind.

    A bug in a run ends its process, and so its process group; in a test the process goes on.
    """
    forget_launcher()
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def single() -> Iterator[DeviceMesh]:
    """A process group of this process alone, and its mesh."""
    import torch

    import mesh

    mesh.init_ranks(mesh.read_ranks({}), torch.device("cpu"))
    yield mesh.build_mesh((1, 1), torch.device("cpu"))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one rank after two steps, which no test changes."""
    import checkpoints

    return checkpoints.save_one(tmp_path_factory.mktemp("good"))


@pytest.fixture
def run(once: Callable, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of two steps on two ranks, saved after each, and its parameters; `nano` is known."""
    import ranks

    import vit

    def train(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
        argv = [*ranks.NANO_ARGV, "--mode", "full_shard", "--steps", "2", "--save-every", "1"]
        argv += ["--mask-ratio", "0.5"]  # not the default
        made = ranks.Run(argv, to=str(folder / "out"))
        results = ranks.run_ranks(2, [made], folder / "ranks")
        return folder / "out", results[0].params

    monkeypatch.setitem(vit.MODELS, "nano", ranks.NANO)
    return once("pretrained", train)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], T]], T]:
    """once(name, make): make(folder), by the first of pytest's processes that asks for it.

    What it returns is pickled for the others, which wait.
    """

    def get(name: str, make: Callable[[Path], T]) -> T:
        base = tmp_path_factory.getbasetemp()
        folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
        folder.mkdir(exist_ok=True)
        kept = folder / "once.pickle"
        with open(folder / "once.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                made = make(folder)
                kept.write_bytes(pickle.dumps(made))
            return pickle.loads(kept.read_bytes())

    return get
