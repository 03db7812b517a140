"""What imports what, and that copies work: the plan of the files, as README's table has it."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from pages import tracked
from ranks import python

ALONE = ["vit", "data", "mesh", "shard", "checkpoint", "verify"]
CORE = ["vit", "data", "mesh", "shard", "checkpoint", "run", "train_fsdp"]
IMPORTS = {  # what a file may import of the others; the commands: any file of the core too
    **{name: set() for name in ALONE},
    "run": {"vit", "data", "mesh", "shard", "checkpoint"},
    "train_fsdp": {*CORE, "simulate"},
    "machines": {*CORE},
    "plan": {*CORE, "machines", "simulate"},
    "simulate": {*CORE, "plan", "machines"},
    "sweep": {*CORE, "plan", "machines"},
}


def imports(tree: ast.AST) -> set[str]:
    """The first names of all modules imported anywhere in a file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name.split(".", 1)[0] for name in found}


def test_imports_follow_the_plan():
    ours = {name.removesuffix(".py") for name in tracked("*.py") if "/" not in name}
    for name in ours:
        found = imports(ast.parse((ROOT / f"{name}.py").read_text()))
        assert found & ours <= IMPORTS.get(name, {*CORE}), name
        if name in ALONE:
            packages = {"torch"} | ({"numpy", "PIL"} if name == "data" else set())
            assert found - set(sys.stdlib_module_names) <= packages, name


def test_launch_script_is_clean():
    script = ROOT / "launch_frontier.sh"
    assert os.access(script, os.X_OK) and "\nset -euo pipefail\n" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: `make test-slurm` installs it")
    command = ["shellcheck", "launch_frontier.sh", ".ci/run"]
    found = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert found.returncode == 0, found.stdout


# --- copies

TRAIN = (
    "--model tiny --img-size 32 --batch 4 --steps 3 --log-every 1 --workers 0 --device cpu "
    f"--precision fp32 --out out --data {ROOT / 'examples' / 'tiles' / 'train' / 'desert'}"
).split()


def copy(folder: Path, names: list[str]) -> None:
    for name in names:
        shutil.copy(ROOT / f"{name}.py", folder)


def test_the_trainer_needs_only_the_core(tmp_path):
    copy(tmp_path, CORE)
    tiles = TRAIN[-1]
    python("train_fsdp.py", *TRAIN, "--eval-data", tiles, cwd=tmp_path, alone=True)
    assert (tmp_path / "out" / "done").exists()


# One of each that docs/manual.md says how to add: what is inserted, and behind which text.
ADDED = {
    "a size": ("vit.py", r"MODELS = {\n", '"mine": ViTConfig(40, 2, 84, 4, 8, 28, 2, 2),\n'),
    "a strategy": ("shard.py", r'(?s)"hybrid": (Strategy\(.*?\)),\n', '"mine": \\1,\n'),
    "a flag": (
        "train_fsdp.py",
        r"\n +add\(\"--log-every.*\n",
        '    add("--lr-floor", type=float, default=0.0, help="lowest share of lr")\n',
    ),
    "a schedule": (
        "train_fsdp.py",
        r"\n    return (?=args\.lr \* 0\.5)",
        "args.lr_floor * args.lr + (1 - args.lr_floor) * ",
    ),
}
ONE_OF_EACH = """
import json, sys
import train_fsdp
mine = "--model mine --mode mine --lr-floor 0.5".split()
assert train_fsdp.main([*sys.argv[1:], *mine]) == 0
start, *records = [json.loads(line) for line in open("out/log.jsonl")]
assert (start["model"], start["mode"], start["lr_floor"]) == ("mine", "mine", 0.5)
shares = [round(r["lr"] / start["lr"], 9) for r in records if r["event"] == "step"]
assert shares == [1, 0.875, 0.625], shares
"""


@pytest.mark.full
def test_one_of_each_is_added_to_a_copy_as_the_manual_says(tmp_path):
    copy(tmp_path, CORE)
    for file, behind, text in ADDED.values():
        path = tmp_path / file
        changed, times = re.subn(behind, rf"\g<0>{text}", path.read_text())
        assert times == 1, (file, behind)
        path.write_text(changed)
    python("-c", ONE_OF_EACH, *TRAIN, cwd=tmp_path, alone=True)
