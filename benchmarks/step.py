"""Compare a training step with that of transformers' ViT-MAE: images per second and memory.

    python -m benchmarks.step --model base --batch 8 --threads 2                # CPU
    python -m benchmarks.step --device cuda --batch 128 --precision bf16 --compile

Both have the same shapes, batch, precision (bf16: autocast over fp32 weights) and fused AdamW. That
both compute the same loss and gradients, tests/test_vit.py shows. Ours is the whole step of
train_fsdp.py in one process, with gradient norm and a check for bad values. Memory is the peak of a
separate process (CPU: resident; GPU: allocated) above what it held before the model. With
--compile, transformers' model is compiled whole, ours block by block as in training.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing import get_context

import torch
import torch.distributed as dist

import mesh
import vit
from benchmarks import peers, plain, timing
from runtime.config import Config

OURS = "train_fsdp.py"
THEIRS = "transformers"


def device_of(config: Config) -> torch.device:
    """Choose the device, and make this process the only rank."""
    ranks = mesh.read_ranks({})
    device = mesh.pick_device(config.device, ranks)
    if not dist.is_initialized():
        mesh.init_ranks(ranks, device)
    return device


def build(name: str, config: Config, device: torch.device) -> Callable[[], None]:
    """Build a contestant's step."""
    if name == OURS:
        return plain.train_fsdp_step(config, device)
    model = peers.transformers_mae(vit.MODELS[config.model], config.img_size).to(device)
    if config.compile:
        model.compile()
    return peers.transformers_step(model, config, device)


def measure(config: Config, rounds: int) -> dict[str, list[float]]:
    """Time each round of each contestant -> images per second."""
    torch._dynamo.reset()
    device = device_of(config)
    steps = {name: build(name, config, device) for name in (OURS, THEIRS)}
    for step in (*steps.values(), *steps.values()):
        step()  # memory, threads and compiled code are there from here on
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rates = defaultdict(list)
    for name in timing.turns([*steps], rounds):
        assert config.batch
        rates[name].append(config.batch / timing.seconds_of(steps[name], wait))
    return rates


def peak_memory(name: str, config: Config) -> float:
    """Measure the peak memory of a contestant's steps, in GiB."""
    before = timing.resident("VmRSS")
    device = device_of(config)
    step = build(name, config, device)
    step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        timing.reset_peak()
    step()
    step()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return (timing.resident("VmHWM") - before) / 2**30


def in_new_process(name: str, config: Config) -> float:
    """Call `peak_memory` where the C library (glibc) returns freed memory at once."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    threads = torch.get_num_threads()
    with get_context("spawn").Pool(1, torch.set_num_threads, (threads,)) as pool:
        return pool.apply(peak_memory, (name, config))


def main(argv: Sequence[str] | None = None) -> None:
    """Print two tables for each precision."""
    parser = argparse.ArgumentParser(description="Compare a step with transformers' ViT-MAE.")
    add = parser.add_argument
    add("--model", choices=vit.MODELS, default="base")
    add("--img-size", type=int, default=224, metavar="PIXELS")
    add("--batch", type=int, default=8, metavar="IMAGES")
    add("--rounds", type=int, default=6, help="per contestant (default 6)")
    add("--threads", type=int, default=2, help="CPU threads (default 2)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    add("--compile", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    shapes = {key: getattr(args, key) for key in ("model", "img_size", "batch", "device")}
    print(", ".join(f"{key} {value}" for key, value in vars(args).items()))
    for precision in args.precision:
        config = Config(**shapes, mode="ddp", precision=precision, compile=args.compile)
        memory = {name: [in_new_process(name, config)] for name in (OURS, THEIRS)}
        print(
            timing.table(f"a step in {precision}", "images/s", measure(config, args.rounds), THEIRS)
        )
        print(timing.table(f"its memory in {precision}", "GiB", memory, THEIRS), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
