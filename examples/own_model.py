"""Train a model of your own: copy shard.py, mesh.py and checkpoint.py beside this file.
    python own_model.py                                 # one process
    torchrun --nproc-per-node 4 own_model.py hybrid 2   # two copies, each split over two ranks
    srun python own_model.py full_shard                 # Slurm, one task per GPU
The same command continues from the newest checkpoint in out/, whatever wrote it."""

import argparse
import gc
import os

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import checkpoint
import mesh
import shard


class Digits(Dataset):
    """Rows of digits, of which seven or more are the label."""

    def __len__(self) -> int:
        return 4800

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randint(10, (16,), generator=torch.Generator().manual_seed(index))
        row[1:7] = row[0]
        return row, row[0]


class Classifier(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=dropout, batch_first=True)
        self.embed = nn.Embedding(10, 64)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(64, 10)

    def forward(self, rows: Tensor) -> Tensor:  # (B, 16), each of 10 -> (B, 10)
        return self.head(self.encoder(self.embed(rows)).mean(dim=1))


def train(mode="full_shard", group=None, steps=20, out="out", dropout=0.0, batch=48, **given):
    options = shard.ShardingOptions(**given)  # by default FSDP2, computed in bf16
    ranks = mesh.read_ranks(os.environ)  # from srun, torchrun or neither
    device = mesh.pick_device("auto", ranks)
    mesh.init_ranks(ranks, device)
    shard_over = shard.STRATEGIES[mode].shard_over
    grid = mesh.build_mesh(mesh.mesh_shape(shard_over, ranks.world_size, group), device)
    torch.manual_seed(0)
    model = Classifier(dropout)  # a very large one: on meta, and `init_fn=` for shard.apply
    decay = shard.weight_decay_names(model)
    blocks = {nn.TransformerEncoderLayer}
    model = shard.apply(model, mode, grid, block_classes=blocks, options=options)
    optimizer = shard.build_optimizer(model, mode, decay, lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    newest = checkpoint.find_newest(out)  # by whatever mode and number of ranks
    begin = checkpoint.load(newest, model, optimizer)["step"] if newest else 0
    schedule.last_epoch = begin
    # the samples of all ranks in all steps, of which each rank reads every world_size-th
    mine = range(begin * batch + ranks.rank, steps * batch, ranks.world_size)
    loader = DataLoader(Digits(), batch // ranks.world_size, sampler=mine)
    for step, (rows, labels) in enumerate(loader, start=begin):
        # dropout: another one in each step and on each rank, the same after a resume
        torch.manual_seed(step * ranks.world_size + ranks.rank)
        with shard.autocast(model, device, options.param_dtype):
            logits = model(rows.to(device))
        loss = nn.functional.cross_entropy(logits.float(), labels.to(device))
        loss.backward()
        norm = shard.clip_grad_norm(model, 1.0)  # of all ranks
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if ranks.rank == 0:
            print(f"step {step + 1}  loss {loss:.4f} of rank 0  norm {norm:.4f}", flush=True)
        if (step + 1) % 10 == 0 or step + 1 == steps:  # on every rank, as all that is collective
            checkpoint.save(out, step + 1, model, optimizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", nargs="?", default="full_shard", choices=shard.STRATEGIES)
    parser.add_argument("group", nargs="?", type=lambda text: int(text) if text else None)
    parser.add_argument("--fsdp", type=int, default=2, choices=(1, 2))
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    args = parser.parse_args()
    dtype = torch.float32 if args.precision == "fp32" else torch.bfloat16
    train(args.mode, args.group, fsdp=args.fsdp, param_dtype=dtype)
    gc.collect()  # frees the model, a reference cycle: its groups' threads could abort the exit
    torch.distributed.destroy_process_group()
