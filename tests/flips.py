"""Flip random single bits of a checkpoint: each is found, or the loaded state is the same.

    python tests/flips.py --minutes 20 --seed 1

Every file gets as many flips. The checkpoint is read by `resume`, as a run reads it.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import checkpoint  # noqa: E402
import mesh  # noqa: E402
from runtime import resume  # noqa: E402
from runtime.agreement import AgreedError  # noqa: E402
from runtime.config import Config  # noqa: E402
from runtime.run import Run  # noqa: E402

FLAGS = {"model": "tiny", "seed": 0, "blr": 1e-3, "clip": None, "out": "a", "steps": 10}
RUN_STATE = {
    "flags": FLAGS,
    "in_a_row": 1,
    "scaler": {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 3,
    },
}


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(16, 8)
    return model, torch.optim.AdamW(model.parameters())


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in checkpoint.named_tensors(model, optimizer).items()}


def flips(out: Path, seed: int, seconds: float, at_most: int = 10**9) -> tuple[Counter, list[str]]:
    """Count the flips by (file, "found" or "harmless"), and describe each problem."""
    choose, found, problems = random.Random(seed), Counter(), list[str]()
    model, optimizer = small()
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    expected = values(model, optimizer)
    assert checkpoint.Saver(str(out), model, optimizer).save(4, RUN_STATE) == []
    folder = out / "step_00000004"
    files = [*sorted(folder.iterdir()), out / "latest"]
    other, its = small()
    load = partial(checkpoint.load, model=other, optimizer=its)
    config = Config(out=str(out))
    run = cast(Run, SimpleNamespace(config=config, record=lambda: FLAGS))
    scaler = torch.amp.GradScaler("cpu")
    deadline = time.monotonic() + seconds
    for turn in range(at_most):
        if time.monotonic() > deadline:
            break
        path = files[turn % len(files)]
        content = path.read_bytes()
        bit = choose.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with torch.no_grad():
            for tensor in checkpoint.named_tensors(other, its).values():
                tensor.fill_(float("nan"))
        flip = f"bit {bit} of {path.name}"
        try:
            paths = checkpoint.list_checkpoints(out)[::-1]
            run_state = resume.read_run_state(paths, run, lambda _: None, load, scaler)
            same = all(torch.equal(t, expected[n]) for n, t in values(other, its).items())
            if not same or run_state | RUN_STATE | {"step": 4} != run_state:
                problems.append(f"{flip}: another state was loaded")
            found[path.name, "harmless"] += 1
        except AgreedError as error:
            found[path.name, "found"] += 1
            if "no checkpoint in" not in str(error) or "\n" in str(error):
                problems.append(f"{flip}: {error}")
        except Exception as error:
            problems.append(f"{flip}: {type(error).__name__}: {error}")
        path.write_bytes(content)
    return found, problems


def main() -> int:
    parser = argparse.ArgumentParser(description="Flip random bits of a checkpoint, and load it.")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mesh.init_ranks(mesh.read_ranks({}), torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        found, problems = flips(Path(folder), args.seed, 60 * args.minutes)
    dist.destroy_process_group()
    for (name, outcome), number in sorted(found.items()):
        print(f"{name:16} {outcome:9} {number:8}")
    print(f"{sum(found.values())} flips, {len(problems)} problems", *problems[:20], sep=os.linesep)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
