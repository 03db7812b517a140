"""The files of the repository, for the tests of what its pages say."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from rebuild import environment


def tracked(*patterns: str) -> list[str]:
    """List the files that git knows, new ones included; skip the test outside of a checkout."""
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def clone(folder: Path) -> dict[str, str]:
    """Copy the tracked files to a folder, with this Python as its .venv; return the environment."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    os.utime(folder / "requirements.txt", (0, 0))  # or make would install again
    return environment(folder) | {"OMP_NUM_THREADS": "1"}
