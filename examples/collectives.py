"""Show the four collectives of data parallelism and FSDP, on tensors of a few numbers.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 4 examples/collectives.py

Rank 0 begins with 1 2 3 4, rank 1 with 10 20 30 40 and so on, so in a sum each digit is a rank's.
In a ring of n ranks each passes on n - 1 of n parts of a tensor of S bytes (Patarasuk and Yuan
2009, https://doi.org/10.1016/j.jpdc.2008.09.002); NCCL and RCCL on GPUs, gloo on CPUs.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor


def show(name: str, before: Tensor, after: Tensor, sent: str) -> None:
    """Print on rank 0 what each rank had and has."""
    had = " ".join(map(str, before.tolist()))
    has = " ".join(map(str, after.tolist()))
    rows: list = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (had, has))
    if dist.get_rank() != 0:
        return
    for rank, (had, has) in enumerate(rows):
        if rank == 0:  # the first row of a collective names it
            print(f"{name:16}{rank:4}   {had:22}{has:22}{sent}")
        else:
            print(f"{'':16}{rank:4}   {had:22}{has}")


def main() -> None:
    """Join the other ranks, and run each collective once."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start several ranks: torchrun --nproc-per-node 4 examples/collectives.py")
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)  # all_gather_object would use GPU 0 on every rank
    stdout = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo of torch 2.10 prints a line of its own
    dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None)
    os.dup2(stdout, 1)
    rank = dist.get_rank()
    n = dist.get_world_size()
    whole = torch.arange(1, n + 1, device=device) * 10**rank  # (n,) int64
    part = whole[rank : rank + 1].clone()  # (1,), the part of a tensor that this rank keeps
    size = whole.nbytes
    once = f"S (n-1)/n = {size * (n - 1) // n}"
    twice = f"2 S (n-1)/n = {2 * size * (n - 1) // n}"
    if rank == 0:
        print(f"{n} ranks, {dist.get_backend()}; S = {size} bytes")
        print(f"{'collective':16}rank   {'before':22}{'after':22}bytes per rank in a ring")

    x = whole.clone()
    dist.broadcast(x, src=0)  # what one rank has, on all
    show("broadcast", whole, x, once)
    x = whole.clone()
    dist.all_reduce(x)  # the sum, on all: DDP's gradients
    show("all-reduce", whole, x, twice)
    x = torch.empty_like(whole)
    dist.all_gather([*x.chunk(n)], part)  # all parts, on all: FSDP's parameters
    show("all-gather", part, x, once)
    x = torch.empty_like(part)
    dist.reduce_scatter(x, [*whole.chunk(n)])  # a part of the sum on each: FSDP's gradients
    show("reduce-scatter", whole, x, once)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
