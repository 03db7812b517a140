"""Same training, whatever the sharding: the whole grid, or a part of it.

    python tests/parity.py                   # everything, about 300 runs
    python tests/parity.py --ranks 4 --ac none --accum 1

Compares each run of train_fsdp.py with a single process that shares only the model and the images:
a plain loop over the whole global batch, with PyTorch's own AdamW and clipping.
"""

import argparse
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
STEPS, BATCH, SIZE, CLIP, BLR = 4, 48, 48, 1.0, 5e-3
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
    tp: int = 1
    model: str = "nano"

    def argv(self) -> list[str]:
        more = ["--model", self.model, "--tp", str(self.tp)]
        more += ["--mode", self.mode, "--ac", self.ac, "--accum", str(self.accum)]
        more += ["--fsdp", str(self.fsdp)] if self.fsdp else []
        more += ["--group", str(self.group)] if self.group else []
        more += ["--wrap", self.wrap] if self.wrap else []
        return ARGV + more


def modes(ranks: int, groups: list[int], **rest: object) -> list[Case]:
    """Every mode, engine and group on so many ranks."""
    cases = [Case(ranks, mode, **rest) for mode in ("ddp", "zero1")]  # type: ignore[arg-type]
    for fsdp in (1, 2):
        for mode in ("no_shard", "shard_grad_op", "full_shard"):
            cases.append(Case(ranks, mode, fsdp, **rest))  # type: ignore[arg-type]
        for mode in ("hybrid", "hybrid_grad_op"):
            cases += [Case(ranks, mode, fsdp, g, **rest) for g in groups]  # type: ignore[arg-type]
    return cases


def grid() -> list[Case]:
    """What is promised: 2, 3, 4 and 8 ranks, groups 1, 2, 4 (and 3 of 6), checkpointing, accum."""
    cases = []
    for ac in ("none", "full"):
        for accum in (1, 2):
            for ranks, groups in ((2, [1, 2]), (3, [1, 3]), (4, [1, 2, 4]), (8, [1, 2, 4])):
                cases += modes(ranks, groups, ac=ac, accum=accum)
            cases += [c for c in modes(6, [3], ac=ac, accum=accum) if c.group]
    for model in list(SPLIT)[1:]:
        for ac, accum in (("none", 1), ("full", 2), ("selective", 1)):
            cases += split_cases(model, ac=ac, accum=accum)
    return cases


def split_cases(model: str, **rest: object) -> list[Case]:
    """Tensor parallelism over 2 and 4 ranks, 1 and 2 shards, 1 and 2 replicas: on 2 to 8 ranks."""
    cases = []
    for tp in (2, 4):
        for shard, replicate in ((1, 1), (1, 2), (2, 1), (2, 2)):
            ranks = tp * shard * replicate
            if ranks <= 8:
                more = {"tp": tp, "model": model, **rest}
                cases.append(Case(ranks, "hybrid", 2, shard, **more))  # type: ignore[arg-type]
                mode = "full_shard" if replicate == 1 else "no_shard" if shard == 1 else ""
                cases += [Case(ranks, mode, 2, **more)] if mode else []  # type: ignore[arg-type]
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
        local_batch=BATCH,
        steps=range(STEPS),
    )
    losses, norms = [], []
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
    found, expected = {}, {name: reference(SPLIT[name]) for name in {c.model for c in cases}}
    for ranks in sorted({c.ranks for c in cases}):
        these = [c for c in cases if c.ranks == ranks]
        results = run_ranks(ranks, [Run(c.argv()) for c in these], folder / str(ranks), 3600)
        for case, result in zip(these, results, strict=True):
            found[case] = difference(result, expected[case.model])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--ac", choices=("none", "full"))
    parser.add_argument("--accum", type=int)
    args = parser.parse_args()
    wanted = {k: v for k, v in vars(args).items() if v is not None}
    cases = [c for c in grid() if all(getattr(c, k) == v for k, v in wanted.items())]
    started, found = time.monotonic(), {}
    for ranks in sorted({c.ranks for c in cases}):
        with tempfile.TemporaryDirectory() as folder:
            these = compare([c for c in cases if c.ranks == ranks], Path(folder))
        found |= these
        for case, d in these.items():
            print(
                f"{'ok ' if d.fine() else 'BAD'} {case.ranks} ranks {case.mode:14} fsdp {case.fsdp}"
                f" group {case.group} ac {case.ac:4} accum {case.accum} tp {case.tp} {case.model}  "
                f"loss {d.loss:.1e} "
                f"norm {d.norm:.1e} params {d.params:.1e} replicas {d.replicas:.1e}",
                flush=True,
            )
    bad = sum(not d.fine() for d in found.values())
    worst = {k: max(getattr(d, k) for d in found.values()) for k in ("loss", "norm", "params")}
    print(
        f"{len(found)} runs, {bad} bad, torch {torch.__version__}, "
        f"{time.monotonic() - started:.0f} s; worst: "
        + ", ".join(f"{key} {value:.1e}" for key, value in worst.items())
    )
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
