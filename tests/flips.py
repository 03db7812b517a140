"""Flip random single bits of a checkpoint: each is found, or the loaded state is the same.

python tests/flips.py --minutes 20 --seed 1
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import checkpoint  # noqa: E402
import mesh  # noqa: E402


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(16, 8)
    return model, torch.optim.AdamW(model.parameters())


def flips(out: Path, seed: int, seconds: float, at_most: int = 10**9) -> tuple[Counter, list[str]]:
    """Count the flips by (file, "found" or "harmless"), and describe each problem."""
    choose, found, problems = random.Random(seed), Counter(), list[str]()
    model, optimizer = small()
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    expected = {n: t.clone() for n, t in checkpoint.named_tensors(model, optimizer).items()}
    run_state = {"flags": {"model": "tiny", "blr": 1e-3, "clip": None}, "in_a_row": 1}
    folder = checkpoint.save(out, 4, model, optimizer, run_state)
    other, its = small()
    files, deadline = [*sorted(folder.iterdir()), out / "latest"], time.monotonic() + seconds
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
            found_state = checkpoint.load(checkpoint.list_checkpoints(out)[-1], other, its)
            loaded = checkpoint.named_tensors(other, its)
            same = all(torch.equal(t, expected[n]) for n, t in loaded.items())
            if not same or found_state | run_state | {"step": 4} != found_state:
                problems.append(f"{flip}: another state was loaded")
            found[path.name, "harmless"] += 1
        except checkpoint.Damaged as error:
            found[path.name, "found"] += 1
            if "\n" in str(error) or not all(t.isnan().all() for t in other.parameters()):
                problems.append(f"{flip}: {error}, but the model was touched")
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
