"""Check on one device that every mode, engine and precision trains as plain PyTorch does on a CPU.

benchmarks.gpu calls it, as its part `matrix`. Each case is trained for a few steps of `tiny`, whose
losses and gradient norms are compared with those of PyTorch alone in fp32. On a GPU a last step
shows that nothing in it waits for the GPU. Saves are loaded in another mode.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import checkpoint
import data
import shard
import train_fsdp
import vit
from benchmarks import step

Row = dict[str, Any]
Cases = Iterator[tuple[str, Callable[[], Row]]]  # the name of a row, and what measures it

STEPS = 6
LR = 1e-3
BATCH = 8
SIDE = 32
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}  # relative, of losses and gradient norms
OPTIONS = (
    *("ddp --accum 2", "zero1 --accum 2", "full_shard --accum 2", "shard_grad_op --accum 2"),
    *("zero1 --clip 0.5", "full_shard --clip 0.5", "full_shard --fsdp 1 --ac full"),
    *("full_shard --ac selective", "full_shard --prefetch none", "full_shard --wrap root"),
)
ON_A_GPU = (
    *("full_shard --cpu-offload", "full_shard --cpu-offload --clip 0.5"),
    *("full_shard --compile --precision bf16", "ddp --compile"),  # last: compiling takes long
)
SAVES = {"full_shard --fsdp 1": "hybrid", "full_shard": "zero1", "ddp": "full_shard --fsdp 1"}


def inputs() -> tuple[Tensor, Tensor]:
    """Draw the images (B, C, H, W) uint8 and the noise (B, L) of every step."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (BATCH, 3, SIDE, SIDE), generator=draw)
    patches = vit.patch_count(vit.MODELS["tiny"], SIDE)
    return images.to(torch.uint8), torch.rand(BATCH, patches, generator=draw)


@cache
def reference(clip: float | None, drawn_on: torch.device) -> list[tuple[float, float]]:
    """Train the model with nothing but PyTorch: the loss and the gradient norm of each step.

    The CPU trains; the initial values are those that the device draws, which differ from a CPU's.
    """
    config = vit.MODELS["tiny"]
    model = vit.ViTMAE(config, SIDE)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(vit.initial_value(config, name, p.shape, device=drawn_on))
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.05}]
    groups += [{"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    images, noise = inputs()
    found = []
    for _ in range(STEPS):
        loss, _, _ = model(data.normalize(images), 0.75, noise)
        loss.backward()
        largest = math.inf if clip is None else clip
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


class Trial:
    """A case in training on the batch of `inputs`."""

    def __init__(self, words: str, device: torch.device) -> None:
        self.args = step.flags(f"--model tiny --img-size {SIDE} --mode {words}", device)
        self.training = train_fsdp.build_training(self.args, device)
        self.guard = train_fsdp.Guard(device)
        images, noise = (tensor.to(device).chunk(self.args.accum) for tensor in inputs())
        self.batches = [*zip(images, noise, strict=True)]
        self.expected = reference(self.args.clip, device)

    def train(self, begin: int) -> float:
        """Take half of the steps; return the largest relative difference to the reference.

        More steps are taken in fp16, where some are not applied until the scaler has its scale.
        """
        found: list[float] = []
        for number in range(STEPS // 2 + 20):
            train_fsdp.train_step(self.training, self.guard, number, self.batches, LR)
            for result in self.guard.results(wait=True):
                if math.isfinite(result.norm):
                    found += [result.loss, result.norm]
            if len(found) == STEPS:
                break
        right = [value for pair in self.expected[begin:] for value in pair]
        if len(found) != STEPS:
            return math.inf
        return max(abs(a - b) / b for a, b in zip(found, right, strict=False))


def check(words: str, device: torch.device, other: str = "") -> Row:
    """Train a case; after half of the steps save it and load it in an `other` mode, if given."""
    trial = Trial(words, device)
    first = trial.train(begin=0)
    model = trial.training.model
    if other:
        again = Trial(other, device)
        with tempfile.TemporaryDirectory() as folder:
            saved = checkpoint.save(folder, STEPS // 2, model, trial.training.optimizer)
            checkpoint.load(saved, again.training.model, again.training.optimizer)
        trial = again
    difference = max(first, trial.train(begin=STEPS // 2))
    if device.type == "cuda" and not trial.args.cpu_offload:  # AdamW on the host needs gradients
        torch.cuda.set_sync_debug_mode("error")  # an operation that waits for the GPU raises
        try:
            train_fsdp.train_step(trial.training, trial.guard, STEPS, trial.batches, LR)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"difference": difference, "ok": difference <= TOLERANCE[trial.args.precision]}


def matrix(device_name: str) -> Cases:
    """Check saves, then every mode and engine in each precision, then options."""
    device = step.start(device_name)
    gpu = device.type == "cuda"
    for one, other in SAVES.items():
        usual = f"--batch {BATCH} --precision fp32"
        work = partial(check, f"{one} {usual}", device, f"{other} {usual}")
        yield f"{one} saved, {other} loaded", work
    precisions = ("fp32", "bf16", "fp16") if gpu else ("fp32",)
    cases: list[str] = []
    for mode, strategy in shard.STRATEGIES.items():
        engines = (" --fsdp 2", " --fsdp 1") if strategy.engine == "fsdp" else ("",)
        for precision in precisions:
            cases += [f"{mode}{engine} --precision {precision}" for engine in engines]
    cases += OPTIONS
    if gpu:
        cases += ON_A_GPU
    for case in cases:
        usual = "" if "--precision" in case else " --precision fp32"
        batch = BATCH // 2 if "--accum 2" in case else BATCH
        yield case, partial(check, f"{case} --batch {batch}{usual}", device)
