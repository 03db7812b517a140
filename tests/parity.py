"""Same training, whatever the sharding: every mode, engine and group on four ranks.

    python tests/parity.py

Compares each run of train_fsdp.py with a single process that shares only the model and the images:
a plain loop over the whole global batch, with PyTorch's own AdamW and clipping.
"""

import math
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ranks import NANO, Result, Run, run_ranks  # noqa: E402

import data  # noqa: E402
import vit  # noqa: E402

TILES = str(ROOT / "examples" / "tiles" / "train")
# whose heads and widths tensor parallelism can split over 4 ranks
SPLIT = {
    "nano": NANO,
    "nano:decoder_heads=4": replace(NANO, decoder_heads=4),
    "nano:decoder_heads=4,gated_mlp=1": replace(NANO, decoder_heads=4, gated_mlp=True),
}
STEPS = 4
BATCH = 48
SIZE = 48
CLIP = 1.0
BLR = 5e-3
ARGV = (
    f"--model nano --img-size {SIZE} --data {TILES} --global-batch {BATCH} --steps {STEPS} "
    f"--log-every 1 --clip {CLIP} --blr {BLR} --warmup-steps 2 --precision fp32 --workers 0 "
    "--device cpu --seed 3"
).split()


@dataclass(frozen=True)
class Case:
    ranks: int
    mode: str
    fsdp: int = 0  # 0: not an FSDP mode
    group: int = 0  # 0: not a hybrid mode
    ac: str = "none"
    accum: int = 1
    wrap: str = ""  # the default
    model: str = "nano"

    def argv(self) -> list[str]:
        more = ["--model", self.model]
        more += ["--mode", self.mode, "--ac", self.ac, "--accum", str(self.accum)]
        more += ["--fsdp", str(self.fsdp)] if self.fsdp else []
        more += ["--group", str(self.group)] if self.group else []
        more += ["--wrap", self.wrap] if self.wrap else []
        return ARGV + more


def modes(ranks: int, groups: list[int]) -> list[Case]:
    """Every mode, engine and group on so many ranks."""
    cases = [Case(ranks, mode) for mode in ("ddp", "zero1")]
    for fsdp in (1, 2):
        cases += [Case(ranks, m, fsdp) for m in ("no_shard", "shard_grad_op", "full_shard")]
        for group in groups:
            cases += [Case(ranks, m, fsdp, group) for m in ("hybrid", "hybrid_grad_op")]
    return cases


def grid() -> list[Case]:
    """Four ranks with and without checkpointing and accumulation; six in groups of three.

    Three ranks, and the whole model as one unit.
    """
    cases = []
    for number, case in enumerate(modes(4, [2])):
        # Each mode with and without checkpointing, and with and without accumulation. Every second
        # mode has both in one run, the others one in each.
        first, second = (1, 2) if number % 2 == 0 else (2, 1)
        cases.append(replace(case, ac="none", accum=first))
        cases.append(replace(case, ac="full", accum=second))
    # groups of one rank, which shard nothing, and one group of all ranks, with one replica
    for case in modes(4, [1, 4]):
        if case.group:
            cases.append(replace(case, ac="full", accum=2))
    cases += [case for case in modes(6, [3]) if case.group]
    cases.append(Case(3, "full_shard", 2, accum=2))
    cases.append(Case(2, "full_shard", 1, ac="full", wrap="root"))
    cases.append(Case(2, "hybrid", 2, group=1, wrap="root"))
    return cases


def reference(
    config: vit.ViTConfig = NANO,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final parameters of the same training, written out plainly."""
    model = vit.ViTMAE(config, SIZE)
    vit.initialize(model, seed=3)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        foreach=False,
    )
    loader = data.build_loader(
        data.scan(TILES),
        img_size=SIZE,
        patches=vit.patch_count(config, SIZE),
        seed=3,
        global_batch=BATCH,
        micro_batch_size=BATCH,
        steps=range(STEPS),
    )
    losses = []
    norms = []
    for step, batch in enumerate(loader):
        peak = BLR * BATCH / 256
        cosine = 0.5 * peak * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2)))
        for group in optimizer.param_groups:
            group["lr"] = [peak / 2, peak][step] if step < 2 else cosine
        loss, _, _ = model(data.normalize(batch.image), 0.75, batch.noise)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


@dataclass
class Difference:
    """How far a run is from the reference: relative, relative, absolute, absolute."""

    loss: float
    norm: float
    params: float
    replicas: float

    def fine(self) -> bool:
        return self.loss < 1e-5 and self.norm < 1e-5 and self.params < 1e-4 and self.replicas == 0


def difference(result: Result, expected: tuple) -> Difference:  # type: ignore[type-arg]
    losses, norms, params = expected
    assert len(result.steps) == STEPS, result
    assert result.params.keys() == params.keys()

    def worst(key: str, wanted: list[float]) -> float:
        pairs = zip(result.steps, wanted, strict=True)
        return max(abs(step[key] - value) / abs(value) for step, value in pairs)

    apart = max((result.params[n] - p).abs().max().item() for n, p in params.items())
    return Difference(
        worst("loss", losses), worst("grad_norm", norms), apart, result.replicas_differ
    )


def compare(cases: list[Case], folder: Path) -> dict[Case, Difference]:
    """Run the cases, ordered by world size, and measure each against the reference."""
    expected = {name: reference(SPLIT[name]) for name in {c.model for c in cases}}
    found = {}
    for ranks in sorted({c.ranks for c in cases}):
        these = [c for c in cases if c.ranks == ranks]
        results = run_ranks(ranks, [Run(c.argv()) for c in these], folder / str(ranks), 3600)
        for case, result in zip(these, results, strict=True):
            found[case] = difference(result, expected[case.model])
    return found


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(grid(), Path(folder))
    for case, apart in found.items():
        print("ok " if apart.fine() else "BAD", case, apart)
    bad = sum(not apart.fine() for apart in found.values())
    seconds = time.monotonic() - started
    print(f"{len(found)} runs, {bad} bad, torch {torch.__version__}, {seconds:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
