"""Compare one training step of this project with its peers': time and memory, in one run.

    python -m benchmarks.step --model base --batch 8 --threads 2                # CPU, eager
    python -m benchmarks.step --device cuda --batch 128 --precision bf16 --compile eager compiled

Peers are transformers' ViTMAE (attention by sdpa) and an MAE built from timm's parts (peers.py),
with the same weights, images, masks, precision (bf16: autocast over fp32 weights) and fused AdamW.
`vit` is our model in that same loop. `ddp` is train_fsdp.train_step in one process, with all that
it does besides: normalise uint8 images, gradient norm, check for bad values. `hybrid` (with --only)
is the same in FSDP2, which shards nothing here but copies as if it did. Before anything is timed,
all must compute the same loss.

Rounds are interleaved and each begins with another contestant, so that all see the same machine;
medians are compared, the spread is from the smallest to the largest. A forward pass ends with the
loss. Memory is the peak of a separate process (CPU: resident; GPU: allocated) above what it held
before the model. If compiled, peers are compiled whole, ours block by block as in training.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import data
import mesh
import train_fsdp
import vit
from runtime.agreement import StepGuard
from runtime.config import DTYPES, Config
from runtime.run import resolve

CONTESTANTS = ("vit", "ddp", "hybrid", "transformers", "timm")
OURS = ("vit", "ddp", "hybrid")
MASK_RATIO = 0.75


@dataclass(frozen=True)
class Case:
    """The step that all contestants make."""

    model: str
    img_size: int
    batch: int  # images per step
    device: str
    precision: str
    compiled: bool
    threads: int

    @property
    def config(self) -> vit.ViTConfig:
        return vit.MODELS[self.model]


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    """Draw images (B, 3, H, W) uint8 and noise (B, L) on the device, the same for all."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (case.batch, 3, case.img_size, case.img_size), generator=draw)
    noise = torch.rand(case.batch, vit.patch_count(case.config, case.img_size), generator=draw)
    return images.to(torch.uint8).to(case.device), noise.to(case.device)


def synchronize(device: str) -> None:
    """Wait for a GPU; a CPU has finished when its call returns."""
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------
# Contestants: each a function that makes one step and returns (forward seconds, seconds, loss)

Step = Callable[[], tuple[float, float, float]]


def plain_step(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    parameters: Any,
    decay: Callable[[Tensor], bool],
    case: Case,
) -> Step:
    """Make the step that peers and our model share: forward, backward, fused AdamW."""
    images, noise = inputs(case)
    images, parameters = data.normalize(images), list(parameters)
    groups = [
        {"params": [p for p in parameters if decay(p)], "weight_decay": 0.05},
        {"params": [p for p in parameters if not decay(p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), fused=True)
    dtype = DTYPES[case.precision]

    def step() -> tuple[float, float, float]:
        synchronize(case.device)
        start = time.perf_counter()
        with torch.autocast(case.device, dtype, enabled=dtype != torch.float32):
            loss = loss_of(images, noise)
        synchronize(case.device)
        forward = time.perf_counter() - start
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(case.device)
        return forward, time.perf_counter() - start, loss.item()

    return step


class LossOnly(nn.Module):
    """Give our model the peers' interface."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        loss: Tensor = self.model(images, MASK_RATIO, noise)[0]
        return loss


def script_step(mode: str, case: Case) -> Step:
    """Make a train_fsdp.train_step with one rank."""
    ranks = mesh.read_ranks({})
    device = mesh.pick_device(case.device, ranks)
    if not dist.is_initialized():
        mesh.init_ranks(ranks, device)
    grid = mesh.build_mesh((1, 1), device)
    options = Config(
        case.model, case.img_size, mode=mode, precision=case.precision, compile=case.compiled
    )
    run = resolve(options, 1, 1)
    training = train_fsdp.build_training(run, grid)
    guard, batch, forward = StepGuard(device), inputs(case), [0.0]

    def mark(*_: Any) -> None:
        synchronize(case.device)
        forward[0] = time.perf_counter()

    training.model.register_forward_hook(mark)  # after FSDP's own

    def step() -> tuple[float, float, float]:
        synchronize(case.device)
        start = time.perf_counter()
        train_fsdp.train_step(training, guard, [batch], lr=1e-5)
        synchronize(case.device)
        seconds = time.perf_counter() - start
        return forward[0] - start, seconds, guard.settle(wait=True)[-1].loss

    return step


def contestant(name: str, case: Case) -> Step:
    """Build a contestant with the weights of seed 0."""
    if name in ("hybrid", "ddp"):
        return script_step(name, case)
    mine = vit.ViTMAE(vit.MODELS[case.model], case.img_size).to(case.device)  # of seed 0
    if name == "vit":
        if case.compiled:
            for block in (*mine.blocks, *mine.decoder_blocks):
                block.compile()
        return plain_step(LossOnly(mine), mine.parameters(), lambda p: p.ndim > 1, case)
    from benchmarks import peers  # here: ours can be measured without them

    theirs: nn.Module = getattr(peers, f"{name}_mae")(mine, MASK_RATIO).to(case.device)
    if case.compiled:
        theirs.compile()
    parameters = [p for p in theirs.parameters() if p.requires_grad]
    return plain_step(theirs, parameters, lambda p: p.ndim > 1, case)


# ---------------------------------------------------------------------------------------------
# Measuring


def resident(what: str) -> int:
    """Read VmRSS or VmHWM (the peak since it was cleared) of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{what}:")[1].split()[0])


def peak_memory(name: str, case: Case) -> float:
    """Measure the peak memory of a contestant's steps in GiB; call it in a separate process."""
    torch.set_num_threads(case.threads)
    if name not in OURS:
        from benchmarks import peers  # noqa: F401 (what an import holds is not the model's)
    gpu, before = case.device == "cuda", resident("VmRSS")
    step = contestant(name, case)
    step()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        step()
    return (torch.cuda.max_memory_allocated() if gpu else resident("VmHWM") - before) / 2**30


def alone(name: str, case: Case) -> float:
    """Call `peak_memory` in a new process whose C library returns freed memory at once (glibc)."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_memory, (name, case))


def measure(case: Case, names: Sequence[str], rounds: int, memory: bool) -> dict[str, Any]:
    """Time each round of each contestant; RuntimeError if their losses differ."""
    peaks = {name: alone(name, case) if memory else None for name in names}
    built, losses, compiling = {}, {}, {}
    for name in names:
        torch._dynamo.reset()
        started = time.perf_counter()
        built[name] = contestant(name, case)
        losses[name] = built[name]()[2]
        compiling[name] = time.perf_counter() - started
    limit = 1e-4 if case.precision == "fp32" else 2e-2
    first = losses[names[0]]
    if any(abs(loss - first) > limit * first for loss in losses.values()):
        raise RuntimeError(f"the contestants find different losses: {losses}")
    for step in built.values():
        step()  # memory and threads are warm from here on
    found: dict[str, Any] = {
        name: {"forward": [], "step": [], "peak_gib": peaks[name], "first_step": compiling[name]}
        for name in names
    }
    for i in range(rounds):
        for name in (*names[i % len(names) :], *names[: i % len(names)]):
            forward, seconds, _ = built[name]()
            found[name]["forward"].append(forward)
            found[name]["step"].append(seconds)
    return found


def table(case: Case, found: dict[str, Any]) -> list[str]:
    """Format medians, spreads, and the speed relative to each peer."""
    peers = [name for name in found if name not in OURS]
    lines = [
        f"{case.precision}, {'compiled' if case.compiled else 'eager'}, {case.device}: "
        f"{case.model}, batch {case.batch}, {case.img_size} px",
        f"{'':14}{'forward s':>24}{'step s':>24}{'img/s':>9}{'GiB':>7}"
        + "".join(f"{'x ' + peer:>16}" for peer in peers),
    ]

    def middle(name: str, what: str) -> float:
        return statistics.median(found[name][what])

    for name, row in found.items():
        cells = ""
        for what in ("forward", "step"):
            seconds = row[what]
            spread = f"({min(seconds):.3f}-{max(seconds):.3f})"
            cells += f"{statistics.median(seconds):8.3f} {spread:>15}"
        gib = row["peak_gib"]
        cells += f"{case.batch / middle(name, 'step'):9.1f}{gib or float('nan'):7.2f}"
        for peer in peers:
            ratio = middle(peer, "step") / middle(name, "step")
            cells += f"{ratio:16.2f}"
        lines.append(f"{name:14}{cells}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases; print the tables, then everything as one line of JSON."""
    parser = argparse.ArgumentParser(description="Time a training step against the peers'.")
    add = parser.add_argument
    add("--model", choices=vit.MODELS, default="base")
    add("--img-size", type=int, default=224, metavar="PIXELS")
    add("--batch", type=int, default=8, metavar="IMAGES")
    add("--rounds", type=int, default=6, help="per contestant (default 6)")
    add("--threads", type=int, default=2, help="CPU threads (default 2)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    add("--compile", nargs="+", choices=("eager", "compiled"), default=["eager"])
    add(
        "--only",
        nargs="+",
        choices=CONTESTANTS,
        metavar="NAME",
        default=["vit", "ddp", "transformers", "timm"],
        help=f"some of {', '.join(CONTESTANTS)} (default all but hybrid)",
    )
    add("--no-memory", action="store_true", help="leave out the peak memory")
    args = parser.parse_args(argv)
    gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    torch.set_num_threads(args.threads)
    result = {"torch": torch.__version__, "cpu": platform.processor(), "cases": []}
    cores = mesh.process_cores()
    name = torch.cuda.get_device_name() if gpu else f"{args.threads} threads on {cores} cores"
    print(f"torch {torch.__version__}, {name}, {args.rounds} rounds", flush=True)
    for how in args.compile:
        for precision in args.precision:
            case = Case(
                args.model,
                args.img_size,
                args.batch,
                "cuda" if gpu else "cpu",
                precision,
                how == "compiled",
                args.threads,
            )
            found = measure(case, args.only, args.rounds, not args.no_memory)
            print("\n".join(["", *table(case, found)]), flush=True)
            result["cases"].append(vars(case) | {"found": found})
    print(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
