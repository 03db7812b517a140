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
from parity import TILES
from ranks import NANO, Run, agreed_port, on_ranks, one_run, python, read_log

import shard
import vit

GROUPS = {"group": [1, 2]}  # of the hybrid modes
ALL = [
    (mode, g) for mode, row in shard.STRATEGIES.items() for g in GROUPS.get(row.shard_over, [None])
]
MODES = ALL if FULL else [("ddp", None), ("hybrid", 2)]
STEPS = 3
TRAINER = (
    f"--model nano --img-size 32 --data {TILES} --batch 4 --steps {STEPS} --workers 0 "
    "--log-every 1 --device cpu --precision fp32"
).split()


def losses_in_each_mode() -> list[tuple[list[float], list[float]]]:
    """Train as one rank in each mode, one after another: rank 0's losses, and the trainer's."""
    sys.path.append(str(ROOT / "examples"))
    import minimal

    vit.MODELS["nano"] = NANO
    folder = Path(os.environ["FOLDER"])
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    found = []
    for i, (mode, group) in enumerate(MODES):
        if group and world % group:
            continue
        (folder / f"port{i}").mkdir(exist_ok=True)
        os.environ["MASTER_PORT"] = agreed_port(folder / f"port{i}", rank)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            args = Namespace(
                data=TILES,
                model="nano",
                img_size=32,
                mode=mode,
                group=group,
                dtype="float32",
                batch=4,
                steps=STEPS,
                workers=0,
            )
            minimal.train(args)
        losses = [float(text) for text in re.findall(r"loss (\S+)", printed.getvalue())]
        flags = [*TRAINER, "--mode", mode, *(["--group", str(group)] if group else [])]
        one_run(Run(flags, params=False), folder / f"trainer{i}", rank)
        _, steps, _ = read_log(folder / f"trainer{i}" / "log.jsonl")
        found.append((losses, [step["loss"] for step in steps]))
    return found


@pytest.mark.parametrize("world", [2, *([1, 4] if FULL else [])])
def test_its_losses_are_those_of_the_trainer_in_every_mode(world, tmp_path):
    for losses, expected in on_ranks(world, losses_in_each_mode, tmp_path)[0]:
        assert losses == expected and len(losses) == STEPS


@pytest.mark.slow
def test_it_needs_four_files_and_is_short(tmp_path):
    assert len((ROOT / "examples" / "minimal.py").read_text().splitlines()) <= 100
    for name in ("examples/minimal", "vit", "data", "mesh", "shard"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    flags = "--img-size 32 --steps 2 --batch 4 --workers 0 --data"
    printed = python("minimal.py", *flags.split(), TILES, cwd=tmp_path, alone=True)
    assert re.fullmatch(r"(step \d/2  loss 1\.\d+  norm \d\.\d+\n){2}", printed), printed


def test_readme_shows_its_lines():
    shown = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    lines = [line.strip() for line in (ROOT / "examples/minimal.py").read_text().splitlines()]
    assert shown.count("\n") >= 10 and {line.strip() for line in shown.splitlines()} <= {*lines}
