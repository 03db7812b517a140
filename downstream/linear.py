"""Score frozen features by a linear classifier, the protocol of MAE (arXiv 2111.06377, A.1).

BatchNorm without affine and a linear layer, trained by LARS with a base rate of 0.1, no weight
decay, 90 epochs of which 10 warm up, then a cosine. Other than there, features are computed once,
from the centre of each image, not from random crops.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from downstream.scores import add_score_arguments, run_scores
from runtime.config import number, whole

HELP = "a score by training a linear classifier on frozen features"
EPOCHS = 90
SAMPLES = 2**21  # that a small set is seen at least: 90 epochs of 1,000 images train nothing
WARMUP_SHARE = 1 / 9  # of the steps: 10 of 90 epochs
BLOCK = 8192  # rows classified at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this subcommand."""
    add_score_arguments(parser)
    add = parser.add_argument
    add(
        "--epochs",
        type=whole(1, 10**6),
        metavar="N",
        help=f"default {EPOCHS}, more on a small set: what shows two million images",
    )
    add("--batch", type=whole(2, 2**20), default=16384, metavar="B", help="images (16384), or all")
    add("--blr", type=number(0, 1e3), default=0.1, help="lr = blr x batch / 256 (default 0.1)")
    add("--optimizer", choices=("lars", "sgd"), default="lars", help="default lars")


def run(args: argparse.Namespace) -> int:
    """Print and write the scores; ValueError or OSError, one sentence, where that fails."""

    def classify(
        bank: Any, labels: Tensor, queries: Any, classes: int, seed: int, device: torch.device
    ) -> Tensor:
        predict = train_linear(
            bank,
            labels,
            classes,
            epochs=args.epochs,
            batch=args.batch,
            blr=args.blr,
            optimizer=args.optimizer,
            seed=seed,
            device=device,
        )
        return predict(queries)

    settings = {name: getattr(args, name) for name in ("epochs", "batch", "blr", "optimizer")}
    return run_scores(vars(args), "linear", settings, classify)


class LARS(torch.optim.Optimizer):
    """Scale the step of each matrix by its norm over that of its gradient.

    You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1, with momentum and without weight decay;
    vectors (biases) are trained as by SGD.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, trust: float = 0.001) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the gradients; a closure is not called."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.ndim > 1:
                    weight_norm, grad_norm = p.norm(), update.norm()
                    ratio = group["trust"] * weight_norm / grad_norm
                    known = (weight_norm > 0) & (grad_norm > 0)
                    update = update * torch.where(known, ratio, torch.ones_like(ratio))
                state = self.state[p]
                velocity = state.setdefault("momentum_buffer", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).add_(update)
                p.sub_(velocity, alpha=group["lr"])


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine down to 0."""
    warmup = int(WARMUP_SHARE * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train_linear(
    rows: Any,
    labels: Tensor,
    classes: int,
    *,
    epochs: int | None = None,
    batch: int = 16384,
    blr: float = 0.1,
    optimizer: str = "lars",
    seed: int = 0,
    device: torch.device | None = None,
) -> Callable[[Any], Tensor]:
    """Train a classifier on features (N, D) with labels (N,) -> a function (Q, D) -> (Q, classes).

    `rows` is an array, or has `len` and takes an array of row numbers. `epochs` None: 90, and more
    on a small set. The seed decides initial values and order.
    """
    device = device or torch.device("cpu")
    draw = torch.Generator().manual_seed(seed)
    batch, width = min(batch, len(rows)), rows[:1].shape[1]
    epochs = epochs or max(EPOCHS, math.ceil(SAMPLES / len(rows)))
    per_epoch, peak = len(rows) // batch, blr * batch / 256
    linear = nn.Linear(width, classes)
    nn.init.trunc_normal_(linear.weight, std=0.01, generator=draw)
    nn.init.zeros_(linear.bias)
    model = nn.Sequential(nn.BatchNorm1d(width, eps=1e-6, affine=False), linear).to(device)
    if optimizer == "lars":
        chosen: torch.optim.Optimizer = LARS(model.parameters(), lr=peak)
    else:
        chosen = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9)
    whole_set = torch.from_numpy(np.asarray(rows[:])).to(device) if batch == len(rows) else None
    for step in range(epochs * per_epoch):
        if step % per_epoch == 0:
            order = torch.randperm(len(rows), generator=draw)
        some = order[step % per_epoch * batch :][:batch].sort().values  # reads in file order
        if whole_set is not None:  # a batch of all: nothing to read again
            images, target = whole_set, labels.to(device)
        else:
            images = torch.from_numpy(rows[some.numpy()]).to(device)
            target = labels[some].to(device)
        chosen.param_groups[0]["lr"] = rate_at(step, epochs * per_epoch, peak)
        F.cross_entropy(model(images), target).backward()
        chosen.step()
        chosen.zero_grad()
    model.eval()

    @torch.inference_mode()
    def predict(queries: Any) -> Tensor:
        starts = range(0, len(queries), BLOCK)
        parts = [model(torch.from_numpy(queries[i : i + BLOCK]).to(device)) for i in starts]
        return torch.cat(parts).double().cpu()

    return predict
