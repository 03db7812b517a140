"""examples/minimal.py: the losses of train_fsdp.py to the last digit, with four files beside it."""

import contextlib
import io
import os
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from conftest import FULL, ROOT
from ranks import TILES, Run, agreed_port, on_ranks, python, run_ranks

import shard

GROUPS = {"group": [1, 2]}  # of the hybrid modes
ALL = [
    (mode, g) for mode, row in shard.STRATEGIES.items() for g in GROUPS.get(row.shard_over, [None])
]
MODES = ALL if FULL else [("ddp", None), ("hybrid", 2)]
STEPS = 3


def losses_of_minimal() -> list[list[float]]:
    """Train as one rank in each mode, one after another; the losses that rank 0 prints."""
    sys.path.append(str(ROOT / "examples"))
    import minimal

    folder, world = Path(os.environ["FOLDER"]), int(os.environ["WORLD_SIZE"])
    found = []
    for i, (mode, group) in enumerate(MODES):
        if group and world % group:
            continue
        (folder / f"port{i}").mkdir(exist_ok=True)
        os.environ["MASTER_PORT"] = agreed_port(folder / f"port{i}", int(os.environ["RANK"]))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            args = Namespace(
                data=TILES,
                model="tiny",
                img_size=32,
                mode=mode,
                group=group,
                dtype="float32",
                batch=4,
                steps=STEPS,
                workers=0,
            )
            minimal.train(args)
        found.append([float(text) for text in re.findall(r"loss (\S+)", printed.getvalue())])
    return found


@pytest.mark.parametrize("world", [1, 4] if FULL else [2])
def test_its_losses_are_those_of_the_trainer_in_every_mode(world, tmp_path):
    found = on_ranks(world, losses_of_minimal, tmp_path / "minimal")[0]
    base = ["--data", TILES, "--model", "tiny", "--img-size", "32", "--steps", str(STEPS)]
    base += ["--batch", "4", "--workers", "0", "--log-every", "1", "--device", "cpu"]
    base += ["--precision", "fp32"]
    runs = []
    for mode, group in MODES:
        if not group:
            runs.append(Run([*base, "--mode", mode]))
        elif world % group == 0:
            runs.append(Run([*base, "--mode", mode, "--group", str(group)]))
    results = run_ranks(world, runs, tmp_path / "trainer")
    assert found == [[step["loss"] for step in result.steps] for result in results]
    assert all(len(losses) == STEPS for losses in found)


@pytest.mark.full
def test_it_needs_four_files_and_is_short(tmp_path):
    assert len((ROOT / "examples" / "minimal.py").read_text().splitlines()) <= 100
    for name in ("examples/minimal", "vit", "data", "mesh", "shard"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    flags = "--img-size 32 --steps 2 --batch 4 --workers 0 --data"
    printed = python("minimal.py", *flags.split(), TILES, cwd=tmp_path, alone=True)
    assert re.fullmatch(r"(step \d/2  loss 1\.\d+  norm \d\.\d+\n){2}", printed), printed
