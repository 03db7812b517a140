"""Classify frozen features, by k nearest neighbours or a linear layer; or train the encoder too.

Shapes: N training features, Q queries, D width of a feature; B images, L patches, T tokens.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vit
from downstream.weights import Pretrained, value_of
from runtime.process import throttled_progress

TEMPERATURE = 0.07  # of k-NN votes
SIMILARITIES = 2**27  # at a time, 512 MiB
EPOCHS = 90
SAMPLES = 2**21  # that a small set is seen at least: 90 epochs of 1,000 images train nothing
WARMUP_SHARE = 1 / 9  # of the steps: 10 of 90 epochs
MOMENTUM, TRUST = 0.9, 0.001  # of LARS


# --- Frozen features


def nearest_vote(bank: Tensor, labels: Tensor, queries: Tensor, classes: int, k: int) -> Tensor:
    """Let the k rows of `bank` (N, D) most similar to each query (Q, D) vote -> (Q, classes) fp64.

    By cosine similarity, each with the weight exp(similarity / 0.07) (Wu et al., arXiv 1805.01978,
    section 3.4, as DINO and others do since). -inf for a class without a vote.
    """
    bank, k, votes = F.normalize(bank, dim=1), min(k, len(bank)), []
    for some in F.normalize(queries, dim=1).split(max(1, SIMILARITIES // len(bank))):
        similarity, index = (some @ bank.T).topk(k)  # 2 x (some, k)
        weight = (similarity.double() / TEMPERATURE).exp().cpu()
        vote = torch.zeros(len(some), classes, dtype=torch.float64)
        votes.append(vote.scatter_add(1, labels[index.cpu()], weight))
    found = torch.cat(votes)
    return found.masked_fill(found == 0, -torch.inf)


@torch.no_grad()
def lars_step(p: Any, velocity: Tensor, lr: float) -> None:
    """Apply the gradient of a parameter, scaled by the norm of the parameter over its own.

    You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1, with momentum and without weight decay;
    vectors (biases) are trained as by SGD.
    """
    scale = TRUST * p.norm() / p.grad.norm().clamp(min=1e-30) if p.ndim > 1 else 1.0
    velocity.mul_(MOMENTUM).add_(p.grad * scale)
    p.sub_(velocity, alpha=lr)
    p.grad = None


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine down to 0."""
    warmup = int(WARMUP_SHARE * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train_linear(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    epochs: int | None = None,
    batch: int = 16384,
    blr: float = 0.1,
    seed: int = 0,
) -> tuple[nn.Module, Tensor]:
    """Train BatchNorm without affine and a linear layer -> the model, the loss of each step (S,).

    The protocol of MAE (arXiv 2111.06377, A.1) on features (N, D) with labels (N,): LARS, no
    weight decay, 90 epochs of which 10 warm up, then a cosine; more on a small set. The seed
    decides initial values and order.
    """
    draw = torch.Generator().manual_seed(seed)
    count, width = features.shape
    batch, epochs = min(batch, count), epochs or max(EPOCHS, math.ceil(SAMPLES / count))
    per_epoch, peak, losses = count // batch, blr * batch / 256, []
    linear = nn.Linear(width, classes)
    nn.init.trunc_normal_(linear.weight, std=0.01, generator=draw)
    nn.init.zeros_(linear.bias)
    model = nn.Sequential(nn.BatchNorm1d(width, eps=1e-6, affine=False), linear)
    model.to(features.device)
    velocities = {p: torch.zeros_like(p) for p in model.parameters()}
    labels = labels.to(features.device)
    progress = throttled_progress(print, "linear classifier")
    images, target = features, labels
    for step in range(steps := epochs * per_epoch):
        if batch < count:  # else a batch is all of them, in any order
            if step % per_epoch == 0:
                order = torch.randperm(count, generator=draw).to(features.device)
            some = order[step % per_epoch * batch :][:batch]
            images, target = features[some], labels[some]
        loss = F.cross_entropy(model(images), target)
        loss.backward()
        for p, velocity in velocities.items():
            lars_step(p, velocity, rate_at(step, steps, peak))
        losses.append(loss.detach())
        progress((step + 1) * batch)
    return model.eval(), torch.stack(losses).cpu()


def has_converged(losses: Tensor) -> bool:
    """Tell from the losses (S,) of a training whether a longer one would hardly change them.

    It would where more than a tenth of their fall came in the second half, or they did not fall.
    """
    tenth = max(1, len(losses) // 10)
    half, last = (losses[start:][:tenth].mean() for start in (len(losses) // 2, -tenth))
    return bool(last < losses[0] and half - last <= 0.1 * (losses[0] - last))


# --- Fine-tuning


class Classifier(vit.ViTMAE):
    """A ViTMAE with a norm and a linear layer on its tokens in the place of its decoder."""

    def __init__(self, config: vit.ViTConfig, img_size: int, classes: int) -> None:
        """Classify the mean of the patches of an image."""
        super().__init__(config, img_size)
        for name in ("embed", "blocks", "norm", "pred", "pos_embed"):
            delattr(self, f"decoder_{name}")
        del self.mask_token
        self.fc_norm = self.norm  # after the mean, not before
        self.norm = cast(Any, nn.Identity())
        self.head = nn.Linear(config.width, classes)

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        """Classify normalised images (B, C, H, W) -> logits (B, classes)."""
        patches = vit.patchify(images, self.config.patch)  # (B, L, P*P*C)
        all_of_them = torch.arange(patches.shape[1], device=images.device)
        x = self.encode(patches, all_of_them.expand(len(images), -1))  # (B, 1+L, D)
        return self.head(self.fc_norm(x[:, 1:].mean(dim=1)))


def classifier_value(
    pretrained: Pretrained, seed: int, name: str, shape: torch.Size, device: torch.device
) -> Tensor:
    """Return the initial value of a parameter or buffer: the pretrained one, but for the head."""
    if name.startswith("head."):  # small, so that the first gradients of the encoder are
        return vit.initial_value(pretrained.config, name, shape, seed, device) * 0.01
    return value_of(pretrained, name.removeprefix("fc_"), shape)
