"""Compare sharded steps on several CPU ranks with plain `fully_shard`: seconds, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.sharded --batch 8

All make the same fp32 step. `full_shard` and `ddp` are those of train_fsdp.py, `fully_shard` is
that of PyTorch on our model, a unit per block, with AdamW and nothing else: what FSDP2 itself
costs. Beside them, transformers' model in DDP.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mesh
import vit
from benchmarks import peers, plain, timing
from runtime.config import Config

CPU = torch.device("cpu")


def fully_sharded(config: Config) -> Callable[[], None]:
    """Make a step of PyTorch's FSDP2 on our model, as its tutorial does."""
    model = vit.ViTMAE(vit.MODELS[config.model], config.img_size)
    for block in [*model.blocks, *model.decoder_blocks]:
        fully_shard(block)
    fully_shard(model)

    def loss_of(images: Tensor, noise: Tensor) -> Tensor:
        loss, _, _ = model(images, 0.75, noise)
        return loss

    return plain.plain_step(loss_of, model.parameters(), config, CPU)


def transformers_ddp(config: Config) -> Callable[[], None]:
    """Make a step of transformers' model in DDP."""
    model = peers.transformers_mae(vit.MODELS[config.model], config.img_size)
    return peers.transformers_step(
        DistributedDataParallel(model, gradient_as_bucket_view=True), config, CPU
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each contestant."""
    parser = argparse.ArgumentParser(description="Compare sharded steps with fully_shard.")
    add = parser.add_argument
    add("--model", choices=vit.MODELS, default="tiny")
    add("--img-size", type=int, default=96, metavar="PIXELS")
    add("--batch", type=int, default=32, metavar="IMAGES", help="per rank and step")
    add("--rounds", type=int, default=10)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    mesh.init_ranks(mesh.read_ranks(os.environ), CPU)
    config = Config(args.model, args.img_size, batch=args.batch, precision="fp32")
    steps = {
        "full_shard": plain.train_fsdp_step(replace(config, mode="full_shard"), CPU),
        "fully_shard": fully_sharded(config),
        "ddp": plain.train_fsdp_step(replace(config, mode="ddp"), CPU),
        "transformers in DDP": transformers_ddp(config),
    }
    for step in [*steps.values()] * 3:
        step()  # DDP rebuilds its buckets after the first
    seconds = defaultdict(list)
    for name in timing.turns([*steps], args.rounds):
        seconds[name].append(timing.seconds_of(steps[name], dist.barrier))
    if dist.get_rank() == 0:
        print(
            timing.table(
                f"{args.model}, {dist.get_world_size()} ranks", "s", seconds, "fully_shard"
            )
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
