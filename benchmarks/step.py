"""Compare a training step with its peers: images per second in one run, in turns.

    python -m benchmarks.step --model base --batch 8 --threads 2                    # CPU
    python -m benchmarks.step --device cuda --batch 128 --precision bf16 --compile
    torchrun --nproc-per-node 2 -m benchmarks.step --model tiny --img-size 96 --batch 32

All have the same shapes, batch and precision (bf16 is autocast over fp32 weights, or FSDP's) and a
fused AdamW. Ours is the whole step of train_fsdp.py, with gradient norm and vote on bad values.
Beside it: our model with nothing but PyTorch (in DDP on several ranks), and transformers' ViT-MAE.
On several ranks also full_shard beside a plain fully_shard of each block. With --compile,
transformers' model is compiled whole, all others block by block.
"""

import argparse
import itertools
import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import data
import mesh
import train_fsdp
import vit
from benchmarks import timing

Step = Callable[[], None]
TABLES = {  # base of the ratios: what is compared with it
    "plain PyTorch": ("train_fsdp.py ddp", "transformers"),
    "fully_shard": ("train_fsdp.py full_shard",),
}

# --- Steps


def flags(words: str, device: torch.device) -> Namespace:
    """Read the flags of train_fsdp.py, as for a run on these ranks."""
    args = train_fsdp.parse_flags(words.split())
    world_size = dist.get_world_size()
    train_fsdp.complete(args, world_size, world_size, device.type)
    return args


def draw_batch(args: Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw one rank's images (B, C, H, W) uint8 and masking noise (B, L)."""
    shape = (args.batch, args.channels, args.img_size, args.img_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    return images.to(device), torch.rand(args.batch, args.patches).to(device)


def our_step(args: Namespace, device: torch.device) -> Step:
    """Make a step of train_fsdp.py, with all that its loop does in one."""
    training = train_fsdp.build_training(args, device)
    guard = train_fsdp.Guard(device)
    batch = draw_batch(args, device)
    numbers = itertools.count()

    def step() -> None:
        train_fsdp.train_step(training, guard, next(numbers), [batch], lr=1e-5)
        for _ in guard.results(wait=False):
            pass

    return step


def our_model(args: Namespace, device: torch.device, sharded: bool) -> nn.Module:
    """Build our model, compiled and sharded block by block by PyTorch alone."""
    model = vit.ViTMAE(vit.MODELS[args.model], args.img_size).to(device)
    for block in [*model.blocks, *model.decoder_blocks]:
        if args.compile:
            block.compile()
        if sharded:
            fully_shard(block)
    return fully_shard(model) if sharded else model


def transformers_mae(config: vit.ViTConfig, img_size: int) -> nn.Module:
    """Build Hugging Face's model, with attention by scaled_dot_product_attention."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    options = ViTMAEConfig(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp_width,
        patch_size=config.patch,
        num_channels=config.channels,
        image_size=img_size,
        decoder_hidden_size=config.decoder_width,
        decoder_num_hidden_layers=config.decoder_depth,
        decoder_num_attention_heads=config.decoder_heads,
        decoder_intermediate_size=4 * config.decoder_width,
        layer_norm_eps=1e-6,
        norm_pix_loss=True,
        mask_ratio=0.75,
        attn_implementation="sdpa",
    )
    return ViTMAEForPreTraining(options)


def make_step(name: str, words: str, device: torch.device) -> Step:
    """Make the step of a contestant of TABLES, with these flags of train_fsdp.py.

    All but ours: autocast, forward, backward, fused AdamW.
    """
    if name.startswith("train_fsdp.py"):
        _, mode = name.split()
        return our_step(flags(f"{words} --mode {mode}", device), device)
    args = flags(f"{words} --mode ddp", device)
    if name == "transformers":
        network = transformers_mae(vit.MODELS[args.model], args.img_size).to(device)
        if args.compile:
            network.compile()
    else:
        network = our_model(args, device, sharded=name == "fully_shard")
    if name != "fully_shard" and dist.get_world_size() > 1:
        network = DistributedDataParallel(network, gradient_as_bucket_view=True)
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), fused=True)
    images, noise = draw_batch(args, device)
    dtype = train_fsdp.DTYPES[args.precision]

    def step() -> None:
        pixels = data.normalize(images)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            if name == "transformers":
                loss = network(pixel_values=pixels, noise=noise).loss
            else:
                loss, _, _ = network(pixels, args.mask_ratio, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- Measuring


def start(device_name: str) -> torch.device:
    """Choose the device, and join the ranks of torchrun, or be the only one."""
    ranks = mesh.read_ranks(os.environ if "RANK" in os.environ else {})
    device = mesh.pick_device(device_name, ranks)
    mesh.init_ranks(ranks, device)
    return device


def rates(
    names: Sequence[str], words: str, device: torch.device, rounds: int, repeat: int = 1
) -> dict[str, list[float]]:
    """Time `repeat` steps of each contestant in turns -> images per second of each round."""
    steps = {name: make_step(name, words, device) for name in names}
    for step in [*steps.values()] * 3:
        step()  # memory, threads, compiled code and DDP's buckets are there from here on
    batch = flags(words, device).batch * dist.get_world_size()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        if dist.get_world_size() > 1:
            dist.barrier()

    def several(step: Step) -> None:
        for _ in range(repeat):
            step()

    found = defaultdict(list)
    for name in timing.turns([*steps], rounds):
        seconds = timing.seconds_of(partial(several, steps[name]), wait)
        found[name].append(repeat * batch / seconds)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table for each base."""
    parser = argparse.ArgumentParser(description="Compare a training step with its peers.")
    add = parser.add_argument
    add("--model", choices=vit.MODELS, default="base")
    add("--img-size", default="224", metavar="PIXELS")
    add("--batch", default="8", metavar="IMAGES", help="per rank")
    add("--rounds", type=int, default=6, help="per contestant (default 6)")
    add("--repeat", type=int, default=1, help="steps in one interval, 5 for a GPU (default 1)")
    add("--threads", type=int, default=1, help="CPU threads (default 1)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--compile", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    device = start(args.device)
    words = f"--model {args.model} --img-size {args.img_size} --batch {args.batch}"
    words += f" --precision {args.precision} --device {device.type}"
    words += " --compile" if args.compile else ""
    tables = TABLES if dist.get_world_size() > 1 else {"plain PyTorch": TABLES["plain PyTorch"]}
    names = [*tables, *itertools.chain(*tables.values())]
    found = rates(names, words, device, args.rounds, args.repeat)
    for base, others in tables.items():
        rows = {name: found[name] for name in (*others, base)}
        if dist.get_rank() == 0:
            print(timing.table(words, "images/s", rows, base), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
