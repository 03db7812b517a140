"""Check on one device that training is right in every mode, and that a run goes from end to end.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.gpu_checks matrix
    python -m benchmarks.gpu_checks run

`benchmarks.gpu` calls both. They print one line of JSON for each check. torchrun matters: a rank
that a launcher started binds its process group to its GPU, one process alone does not.
"""

import argparse
import gzip
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import checkpoint
import data
import mesh
import shard
import train_fsdp
import vit
from runtime.agreement import StepGuard
from runtime.config import Config
from runtime.run import resolve

ROOT = Path(__file__).resolve().parent.parent
STEPS = 6
LR = 1e-3
BATCH = 8
IMG_SIZE = 32
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}


def emit(part: str, name: str, ok: bool, **more: Any) -> None:
    """Print one row of the report."""
    print(json.dumps({"part": part, "name": name, "ok": ok, **more}), flush=True)


# --- Every mode, engine and precision against plain PyTorch in fp32 on the CPU


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the images (B, C, H, W) uint8 and the noise (B, L) of every step."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (BATCH, 3, IMG_SIZE, IMG_SIZE), generator=draw)
    patches = vit.patch_count(vit.MODELS["tiny"], IMG_SIZE)
    return images.to(torch.uint8), torch.rand(BATCH, patches, generator=draw)


@cache
def reference(clip: float | None, drawn_on: torch.device) -> list[tuple[float, float]]:
    """Train the model with nothing but PyTorch: the loss and the gradient norm of each step.

    The CPU trains; the initial values are those that the device draws, which differ from a CPU's.
    """
    config = vit.MODELS["tiny"]
    model = vit.ViTMAE(config, IMG_SIZE)
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


def cases(gpu: bool) -> Iterator[tuple[str, Config]]:
    """Yield the cases, each with a name; on a CPU those of fp32 and a few of bf16."""
    precisions = ["fp32", "bf16", "fp16"] if gpu else ["fp32"]
    for mode in shard.STRATEGIES:
        engines = [None] if mode in ("ddp", "zero1") else [2, 1]
        for fsdp, precision in itertools.product(engines, precisions):
            engine = f" FSDP{fsdp}" if fsdp else ""
            config = Config("tiny", IMG_SIZE, mode=mode, fsdp=fsdp, precision=precision)
            yield f"{mode}{engine} {precision}", config
    base = Config("tiny", IMG_SIZE, mode="full_shard", fsdp=2, precision="fp32")
    more: list[dict[str, Any]] = [
        {"mode": "ddp", "accum": 2},
        {"mode": "zero1", "accum": 2},
        {"mode": "full_shard", "accum": 2},
        {"mode": "shard_grad_op", "accum": 2},
        {"mode": "zero1", "clip": 0.5},
        {"mode": "full_shard", "clip": 0.5},
        {"ac": "selective", "precision": "fp32"},
        {"ac": "selective", "precision": "bf16"},
        {"ac": "full", "precision": "fp32"},
        {"ac": "full", "precision": "bf16"},
        {"fsdp": 1, "ac": "full"},
        {"precision": "bf16"},
        {"prefetch": "none"},
        {"forward_prefetch": True},
        {"wrap": "root"},
        {"cpu_offload": True},
    ]
    if gpu:  # FSDP1 pins the memory that it offloads to
        for engine in (1, 2):
            offload = {"cpu_offload": True, "fsdp": engine}
            more += [{**offload, "precision": "bf16"}, {**offload, "clip": 0.5}]
        more += [{"cpu_offload": True, "fsdp": 1, "mode": "shard_grad_op"}]
        more += [{"cpu_offload": True, "fsdp": 2, "accum": 2}]
        # last: compiling takes longer than all others
        more += [{"compile": True, "precision": "bf16"}, {"compile": True, "mode": "ddp"}]
    for change in more:
        config = replace(base, **change)
        if config.mode in ("ddp", "zero1"):
            config = replace(config, fsdp=None)
        yield ", ".join(f"{k} {v}" for k, v in change.items()), config


def make(config: Config, device: torch.device) -> tuple[train_fsdp.Training, StepGuard]:
    """Build the training of a case on this one rank, and what votes on its steps."""
    run = resolve(config, 1, 1)
    training = train_fsdp.build_training(run, mesh.build_mesh(run.mesh_shape, device))
    return training, StepGuard(device, max_skips=STEPS)


def micro_batches(config: Config, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the batch into --accum parts on the device."""
    images, noise = (tensor.to(device) for tensor in inputs())
    return [*zip(images.chunk(config.accum), noise.chunk(config.accum), strict=True)]


def steps_of(
    training: train_fsdp.Training, guard: StepGuard, parts: list, count: int
) -> list[tuple[float, float]]:
    """Make `count` steps that are applied: fp16 skips some while it looks for its loss scale."""
    found: list[tuple[float, float]] = []
    for _ in range(count + 20):
        train_fsdp.train_step(training, guard, parts, LR)
        *_, verdict = guard.read_results(wait=True)
        if math.isfinite(verdict.norm):
            found.append((verdict.loss, verdict.norm))
        if len(found) == count:
            return found
    raise RuntimeError(f"{count + 20} steps, of which only {len(found)} were applied")


def worst(
    found: Sequence[tuple[float, float]], clip: float | None, device: torch.device, begin: int = 0
) -> float:
    """Find the largest relative difference to the reference, of losses and norms."""
    expected = reference(clip, device)[begin : begin + len(found)]
    differences = []
    for (loss, norm), (right_loss, right_norm) in zip(found, expected, strict=True):
        differences.append(abs(loss - right_loss) / right_loss)
        differences.append(abs(norm - right_norm) / right_norm)
    return max(differences)


def evaluate(training: train_fsdp.Training, part: Any) -> None:
    """Compute a loss without gradients between two steps, as --eval-data does."""
    training.model.eval()
    with torch.no_grad():
        training.compute_loss(training.model, part)
    training.model.train()


def check_case(config: Config, device: torch.device) -> float:
    """Train a case, with an evaluation after half of its steps; return the worst difference."""
    training, guard = make(config, device)
    parts = micro_batches(config, device)
    found = steps_of(training, guard, parts, STEPS // 2)
    if not config.compile and config.precision == "fp32":
        evaluate(training, parts[0])
    found += steps_of(training, guard, parts, STEPS - STEPS // 2)
    difference = worst(found, config.clip, device)
    if device.type == "cuda" and not config.cpu_offload:  # AdamW on the host needs the gradients
        step_without_waiting(training, guard, parts)
    return difference


def step_without_waiting(training: train_fsdp.Training, guard: StepGuard, parts: list) -> None:
    """Make a step in which an operation that waits for the GPU raises RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_fsdp.train_step(training, guard, parts, LR)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    guard.read_results(wait=True)


def check_save(first: Config, second: Config, background: bool, device: torch.device) -> float:
    """Train half of the steps in one mode, save, load in another, train the rest; compare both."""
    training, guard = make(first, device)
    with tempfile.TemporaryDirectory() as folder:
        found = steps_of(training, guard, micro_batches(first, device), STEPS // 2)
        group = dist.new_group(backend="gloo")
        saver = checkpoint.Saver(
            folder, training.model, training.optimizer, group=group, background=background
        )
        problems = saver.save(STEPS // 2, {}, wait=not background)
        steps_of(training, guard, micro_batches(first, device), 1)  # while it is written
        problems += saver.finish()
        if problems:
            raise RuntimeError(problems[0])
        again, guard = make(second, device)
        saved = Path(folder) / f"step_{STEPS // 2:08d}"
        checkpoint.load(saved, again.model, again.optimizer, group=group)
        rest = steps_of(again, guard, micro_batches(second, device), STEPS - STEPS // 2)
    return max(worst(found, None, device), worst(rest, None, device, STEPS // 2))


def saved_pairs(gpu: bool) -> Iterator[tuple[str, Config, Config, bool]]:
    """Yield (name, what is saved, what it is loaded in, in the background); on a CPU two."""
    row = {"FSDP1": Config("tiny", IMG_SIZE, mode="full_shard", fsdp=1, precision="fp32")}
    for mode in ("ddp", "zero1", "full_shard", "hybrid"):
        row[mode] = Config("tiny", IMG_SIZE, mode=mode, precision="fp32")
    pairs = [("FSDP1", "hybrid")]
    if gpu:
        for fsdp in (1, 2):
            name = f"full_shard FSDP{fsdp} cpu_offload"
            row[name] = replace(row["full_shard"], fsdp=fsdp, cpu_offload=True)
            pairs += [(name, "ddp"), ("ddp", name)]
        pairs += [("full_shard", "zero1"), ("ddp", "FSDP1")]
    for one, other in pairs:
        yield f"save in {one}, load in {other}", row[one], row[other], False
        yield f"async save in {one}, load in {other}", row[one], row[other], True


def matrix(device_name: str) -> None:
    """Check saves, then all cases; an exception fails its case alone."""
    ranks = mesh.read_ranks(os.environ)
    device = mesh.pick_device(device_name, ranks)
    mesh.init_ranks(ranks, device)
    gpu = device.type == "cuda"
    checks: list[tuple[str, Config, Config | None, bool]] = list(saved_pairs(gpu))
    for name, config in cases(gpu):
        checks.append((name, config, None, False))
    for name, config, other, background in checks:
        started = time.perf_counter()
        try:
            if other:
                found = check_save(config, other, background, device)
            else:
                found = check_case(config, device)
            ok = found <= TOLERANCE[str(config.precision)]
            why = {"difference": found}
        except Exception as error:
            traceback.print_exc()
            ok = False
            why = {"error": f"{type(error).__name__}: {error}"[:300]}
        emit("matrix", name, ok, **why, seconds=round(time.perf_counter() - started, 2))
        torch._dynamo.reset()
    dist.destroy_process_group()


# --- A run from its start through a stop and a resume to scores


def command(*argv: str, torchrun: bool = False) -> list[str]:
    """Make the command line of a script of the top level."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    if torchrun:
        return [sys.executable, *launch, *argv]
    return [sys.executable, *argv]


def log_of(out: Path) -> list[dict[str, Any]]:
    """Read the log of a run, if it has one yet."""
    path = out / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finish(name: str, process: subprocess.Popen, status: int = 0, says: str = "") -> bool:
    """Wait for a command; report whether it ended with `status` and said what it should."""
    text, _ = process.communicate()
    ok = process.returncode == status and says in text
    more = {} if ok else {"error": f"status {process.returncode}: {text[-300:]}"}
    emit("run", name, ok, **more)
    sys.stderr.write(text)
    return ok


def start(argv: Sequence[str]) -> subprocess.Popen:
    """Start a command whose output is read at its end."""
    return subprocess.Popen(
        argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def stop_after(process: subprocess.Popen, out: Path, step: int) -> None:
    """Send SIGUSR1 to the trainer, not to its launcher, once its log has passed a step."""
    while process.poll() is None:
        if any(row.get("event") == "step" and row["step"] >= step for row in log_of(out)):
            os.kill(child_of(process.pid), signal.SIGUSR1)
            return
        time.sleep(0.2)


def child_of(parent: int) -> int:
    """Find the first child of a process in /proc; a sandbox may lack the file `children`."""
    for path in sorted(Path("/proc").glob("[0-9]*/stat")):
        try:
            _, _, rest = path.read_text().rpartition(") ")  # a name may hold anything
        except OSError:  # it has ended
            continue
        _state, its_parent, *_ = rest.split()
        if int(its_parent) == parent:
            return int(path.parent.name)
    raise RuntimeError(f"process {parent} has no child")


def check_trace(folder: Path, gpu: bool) -> None:
    """Report whether the profile of the run holds operators, and on a GPU its kernels."""
    category = "kernel" if gpu else "cpu_op"
    count = 0
    for path in folder.glob("*.json.gz"):
        with gzip.open(path) as file:
            for event in json.load(file)["traceEvents"]:
                count += event.get("cat") == category
    emit("run", f"the profile has events of {category}", count > 0, found=count)


def run(device: str, model: str) -> None:
    """Train, stop by a signal, resume in another engine, score, fine-tune; run out of memory."""
    gpu = device != "cpu" and torch.cuda.is_available()
    tiles = "examples/tiles"
    size = ("--model", model, "--img-size", "224" if gpu else "32", "--device", device)
    sets = ("--data", f"{tiles}/train", "--test", f"{tiles}/heldout", "--device", device)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        train = ["train_fsdp.py", *size, "--data", f"{tiles}/train", "--out", str(out)]
        train += ["--mode", "full_shard", "--steps", "60" if gpu else "20", "--log-every", "2"]
        train += ["--eval-data", f"{tiles}/heldout", "--async-save", "--save-every", "10"]
        train += ["--batch", "32" if gpu else "8", "--workers", "4" if gpu else "1"]
        process = start(command(*train, "--profile", torchrun=True))
        stop_after(process, out, 12)  # the profile is of steps 6 to 8
        finish("train, profile, stop by SIGUSR1", process)
        ends = [row["reason"] for row in log_of(out) if row.get("event") == "end"]
        emit("run", "the log says why it ended", ends == ["signal"], found=ends)
        check_trace(out / "profile", gpu)
        changed = command(*train, "--fsdp", "1", torchrun=True)
        finish("resume in FSDP1 to the end", start(changed))
        steps = [row for row in log_of(out) if row.get("event") == "step"]
        keys = ("loss", "grad_norm", "images_per_second", "tflops_per_rank", "data_seconds")
        keys += ("peak_allocated_gib", "peak_reserved_gib", "mfu") if gpu else ()
        empty = [key for key in keys if not steps or steps[-1].get(key) is None]
        emit("run", "no key of the log is null", not empty, found=empty)
        probe = {
            "knn": ("knn", str(out), *sets, "--out", f"{folder}/knn"),
            "finetune": ("finetune", str(out), *sets, "--epochs", "1", "--out", f"{folder}/tuned"),
            "reconstruct": ("reconstruct", str(out), *sets[:2], *sets[4:], "--images", "2"),
        }
        probe["reconstruct"] += ("--out", f"{folder}/picture.png")
        started = {name: start(command("probe.py", *argv)) for name, argv in probe.items()}
        for name, process in started.items():
            finish(f"probe.py {name}", process)
        if gpu:
            # parameters, gradients and states are 218 GiB
            large = ("train_fsdp.py", "--model", "15b", "--run-mode", "syn", "--batch", "1")
            large += ("--workers", "0", "--steps", "2", "--out", f"{folder}/large")
            process = start(command(*large))
            finish("out of memory: a sentence and status 1", process, 1, "out of memory")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("matrix", "run"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--model", default="base", choices=vit.MODELS)
    args = parser.parse_args()
    if args.part == "matrix":
        matrix(args.device)
    else:
        run(args.device, args.model)
