"""Measure on one GPU what limits a run: attention, batch size, loader, saves, the host's memory.

    python -m benchmarks.gpu_limits attention   # each backend: its gradients, its time
    python -m benchmarks.gpu_limits batches     # the GPU's time, the host's, that of a plain loop
    python -m benchmarks.gpu_limits precision   # ddp in bf16 against full_shard in bf16
    python -m benchmarks.gpu_limits loader      # images per second by number of workers
    python -m benchmarks.gpu_limits saves       # saving in both ways, and loading
    python -m benchmarks.gpu_limits offload     # a step with --cpu-offload, its pinned memory

`benchmarks.gpu` calls them. They print one line of JSON for each case.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import checkpoint
import mesh
import train_fsdp
import vit
from benchmarks import plain
from benchmarks.data import picture
from benchmarks.gpu_checks import ROOT, command, emit, log_of
from benchmarks.gpu_speed import clear, measure, seconds_of, wait
from planner.memory import host_bytes
from planner.traffic import PlannedRun
from runtime.agreement import StepGuard
from runtime.config import Config
from runtime.run import resolve

PARTS = ("attention", "batches", "precision", "loader", "saves", "offload")
TOLERANCE = 2e-2  # relative, in bf16
GIB = 2**30

# --- Attention

# What PyTorch chooses by itself, then each kernel alone
BACKENDS: dict[str, list[SDPBackend] | None] = {
    "default": None,
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}


def attention_shapes(models: Sequence[str], img_size: int) -> list[tuple[int, int, int]]:
    """List (heads, tokens, features of a head) of the encoders and decoders, each once."""
    found: dict[tuple[int, int, int], None] = {}
    for name in models:
        config = vit.MODELS[name]
        patches = vit.patch_count(config, img_size)
        visible = vit.count_visible(patches, 0.75)
        found[config.heads, 1 + visible, config.width // config.heads] = None
        decoder = config.decoder_heads, 1 + patches, config.decoder_width // config.decoder_heads
        found[decoder] = None
    return list(found)


def attend_backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Compute attention and its gradients: [output, dq, dk, dv]."""
    out = F.scaled_dot_product_attention(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def check_backend(
    backend: list[SDPBackend] | None, inputs: Sequence[Tensor], device: torch.device
) -> tuple[float, float]:
    """Return the worst relative difference from fp64, and the median seconds of both passes."""
    q, k, v, grad = inputs

    def work() -> list[Tensor]:
        if backend is None:
            return attend_backward(q, k, v, grad)
        with sdpa_kernel(backend):
            return attend_backward(q, k, v, grad)

    # the first two images are enough for the values, in fp64
    some = [tensor[:2].detach().double().requires_grad_() for tensor in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        exact = attend_backward(*some, grad[:2].double())
    worst = 0.0
    for found, right in zip(work(), exact, strict=True):
        difference = (found[:2].double() - right).norm() / right.norm()
        worst = max(worst, difference.item())  # NaN is no maximum: see below
        if not torch.isfinite(found).all():
            worst = float("inf")
    times = []
    for _ in range(10):
        _, seconds = seconds_of(work, device)
        times.append(seconds)
    return worst, statistics.median(times[2:])


def attention(models: Sequence[str], img_size: int, batch: int, device: torch.device) -> None:
    """Compare the backends at the shapes of our models, in bf16."""
    for heads, tokens, features in attention_shapes(models, img_size):
        # strides as in vit.Attention: q, k and v are views of one tensor
        qkv = torch.randn(batch, tokens, 3, heads, features, device=device).bfloat16()
        views = [part.transpose(1, 2).detach().requires_grad_() for part in qkv.unbind(2)]
        grad = torch.randn(batch, heads, tokens, features, device=device).bfloat16()
        for name, backend in BACKENDS.items():
            title = f"{tokens} tokens, {features} features, {name}"
            try:
                difference, seconds = check_backend(backend, [*views, grad], device)
            except RuntimeError as error:
                # a kernel that does not take these shapes, or is not for this device
                emit("attention", title, True, note=f"not available: {error}"[:120])
                continue
            ok = difference <= TOLERANCE
            emit("attention", title, ok, difference=difference, step_seconds=seconds)


# --- Batch sizes, and a plain loop


def batches(models: Sequence[str], img_size: int, most: int, device: torch.device) -> None:
    """Time steps of several batches: of the device, of the host alone, and of a plain loop."""
    for model in models:
        for batch in (32, 128, 512):
            if batch > most and batch > 32:
                continue
            batch = min(batch, most)
            config = Config(model, img_size, batch=batch, mode="ddp", precision="bf16")
            try:
                found = measure(config, 1, batch, device)
                clear(device)
                step = plain.our_model_step(config, device)
                for _ in range(3):
                    step()
                seconds = five_in_a_row(step, device)
                del step
            except torch.OutOfMemoryError as error:
                clear(device)
                emit("batches", f"{model} {batch}", True, note=f"out of memory: {error}"[:80])
                continue
            limit = "host" if found["host_seconds"] > 0.9 * found["step_seconds"] else "device"
            ratio = seconds / found["step_seconds"]
            emit("batches", f"{model} {batch}", True, **found, ratio=ratio, note=f"limit: {limit}")


def five_in_a_row(work: Callable[[], object], device: torch.device) -> float:
    """Time five calls in one interval, so that the host may run ahead: seconds of one."""
    wait(device)
    started = time.perf_counter()
    for _ in range(5):
        work()
    wait(device)
    return (time.perf_counter() - started) / 5


# --- Precision


def train_losses(config: Config, steps: int, device: torch.device) -> list[float]:
    """Train on one batch, the same in every call, and return the loss of each step."""
    torch.manual_seed(0)
    run = resolve(config, 1, 1)
    training = train_fsdp.build_training(run, mesh.build_mesh(run.mesh_shape, device))
    guard = StepGuard(device)
    batch = plain.draw_batch(config, device)
    losses: list[float] = []
    for _ in range(steps):
        train_fsdp.train_step(training, guard, [batch], lr=1e-3)
        losses.extend(result.loss for result in guard.read_results(wait=True))
    return losses


def precision(model: str, img_size: int, batch: int, device: torch.device) -> None:
    """Hold 20 steps of bf16 by autocast against bf16 by FSDP2, which casts the weights itself."""
    config = Config(model, img_size, batch=batch, mode="ddp", precision="bf16")
    ddp = train_losses(config, 20, device)
    clear(device)
    fsdp = train_losses(replace(config, mode="full_shard", fsdp=2), 20, device)
    worst = 0.0
    for one, other in zip(ddp, fsdp, strict=True):
        worst = max(worst, abs(one - other) / other)
    emit("precision", "ddp against full_shard", worst <= TOLERANCE, difference=worst, batch=batch)


# --- The loader


def loader(img_size: int, batch: int, device: torch.device) -> None:
    """Read JPEGs of 500 px with several numbers of workers, and train on nothing."""
    counts = (6, 15)
    images = 128  # of 500 px: making more takes longer than reading them
    if device.type == "cpu":
        counts = (1, 2)
        images = 16
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder, "images")
        pictures.mkdir()
        for i in range(images):
            generator = np.random.default_rng(i)
            picture(generator, 500, 500).save(pictures / f"{i:04}.jpg", quality=90)
        for workers in counts:
            out = Path(folder, f"out{workers}")
            flags = ["--run-mode", "io", "--data", str(pictures), "--img-size", str(img_size)]
            flags += ["--batch", str(batch), "--steps", "40", "--workers", str(workers)]
            flags += ["--device", device.type, "--model", "tiny", "--out", str(out)]
            done = subprocess.run(command("train_fsdp.py", *flags), cwd=ROOT, stdout=sys.stderr)
            rate = None
            for row in log_of(out):
                if row["event"] == "end":
                    rate = row["images_per_second"]
            ok = done.returncode == 0 and rate is not None
            note = f"{len(os.sched_getaffinity(0))} cores"
            emit("loader", f"{workers} workers", ok, images_per_second=rate, note=note)


# --- Saves


def saves(models: Sequence[str], img_size: int, device: torch.device) -> None:
    """Time saving and loading a checkpoint: how long training stops, and until it is on disk."""
    group = dist.new_group(backend="gloo")
    for model in models:
        clear(device)
        config = Config(model, img_size, batch=2, mode="full_shard", fsdp=2, precision="bf16")
        run = resolve(config, 1, 1)
        training = train_fsdp.build_training(run, mesh.build_mesh(run.mesh_shape, device))
        guard = StepGuard(device)
        train_fsdp.train_step(training, guard, [plain.draw_batch(config, device)], lr=1e-5)
        bytes_saved = 12 * sum(p.numel() for p in training.model.parameters())
        for background in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                saver = checkpoint.Saver(
                    folder,
                    training.model,
                    training.optimizer,
                    keep=1,
                    group=group,
                    background=background,
                )
                name = f"{model} async save" if background else f"{model} save"
                for step in (1, 2):  # the second finds its pinned memory
                    started = time.perf_counter()
                    problems = saver.save(step, {}, wait=False)
                    stopped = time.perf_counter() - started
                    problems += saver.finish()
                    whole = time.perf_counter() - started
                emit(
                    "saves",
                    name,
                    not problems,
                    step_seconds=stopped,
                    copy_gb_per_second=bytes_saved / whole / 1e9,
                    note=f"on disk after {whole:.2f} s",
                )
                if not background:
                    saved = checkpoint.list_checkpoints(folder)[-1]
                    started = time.perf_counter()
                    checkpoint.load(saved, training.model, training.optimizer, group=group)
                    wait(device)
                    seconds = time.perf_counter() - started
                    rate = bytes_saved / seconds / 1e9
                    emit(
                        "saves",
                        f"{model} load",
                        True,
                        step_seconds=seconds,
                        copy_gb_per_second=rate,
                    )


# --- Offload


def offload(model: str, img_size: int, batch: int, device: torch.device) -> None:
    """Time a step with --cpu-offload, and hold its pinned memory against the plan's."""
    config = Config(
        model, img_size, batch=batch, mode="full_shard", fsdp=2, precision="bf16", cpu_offload=True
    )
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    found = measure(config, 1, batch, device)
    run = resolve(config, 1, 1)
    planned = host_bytes(PlannedRun.from_flags(run.vit_config, run.record()))["--cpu-offload"]
    note = f"host memory planned {planned / GIB:.1f} GiB"
    if device.type == "cuda":
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
        note += f", pinned {pinned / GIB:.1f}"
    emit("offload", f"{model} {batch}", True, **found, note=note)


def run_part(name: str, models: Sequence[str], img_size: int, device: torch.device) -> None:
    """Run one part, in small on a CPU."""
    gpu = device.type == "cuda"
    if name == "attention":
        attention(models, img_size, 64 if gpu else 2, device)
    elif name == "batches":
        batches(models[:2], img_size, 512 if gpu else 2, device)
    elif name == "precision":
        precision(models[0], img_size, 32 if gpu else 2, device)
    elif name == "loader":
        loader(img_size, 64 if gpu else 4, device)
    elif name == "saves":
        saves([models[0], "1b"] if gpu else models[:1], img_size, device)
    else:
        offload("1b" if gpu else models[0], img_size, 32 if gpu else 2, device)


def main() -> None:
    """Run the parts that are named; one that fails leaves the others alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("parts", nargs="+", choices=PARTS)
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--models", nargs="+", choices=vit.MODELS, default=["base", "huge", "1b", "3b", "15b"])
    add("--img-size", type=int, default=224, metavar="PIXELS")
    args = parser.parse_args()
    ranks = mesh.read_ranks({})
    device = mesh.pick_device(args.device, ranks)
    mesh.init_ranks(ranks, device)
    for name in args.parts:
        clear(device)
        try:
            run_part(name, args.models, args.img_size, device)
        except Exception as error:
            traceback.print_exc()
            emit(name, "ran to its end", False, error=f"{type(error).__name__}: {error}"[:300])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
