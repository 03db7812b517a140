"""Train a model of your own: copy shard.py, mesh.py and checkpoint.py beside this file.
    python own_model.py                                 # one process
    torchrun --nproc-per-node 4 own_model.py hybrid 2   # two copies, each split over two ranks
    srun python own_model.py full_shard                 # Slurm, one task per GPU
The same command continues from the newest checkpoint in out/, whatever wrote it."""

import gc
import os
import sys

import torch
from torch import Tensor, nn

import checkpoint
import mesh
import shard


class Classifier(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=dropout, batch_first=True)
        self.embed = nn.Embedding(100, 64)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, 16), each of 100 -> (B, 10)
        return self.head(self.encoder(self.embed(tokens)).mean(dim=1))


def train(mode="full_shard", group=None, steps=20, out="out", dropout=0.0, **given):
    options = shard.ShardingOptions(**given)  # by default FSDP2, computed in bf16
    ranks = mesh.read_ranks(os.environ)  # from srun, torchrun or neither
    device = mesh.pick_device("auto", ranks)
    mesh.init_ranks(ranks, device)
    grid = mesh.build_mesh(shard.mesh_shape(mode, ranks.world_size, group), device)
    torch.manual_seed(0)
    model = Classifier(dropout)  # a very large one: on meta, and `init_fn=` for shard.apply
    decay = shard.weight_decay_names(model)
    blocks = {nn.TransformerEncoderLayer}
    model = shard.apply(model, mode, grid, block_classes=blocks, options=options)
    optimizer = shard.build_optimizer(model, mode, decay, lr=2e-4, weight_decay=0.05)
    newest = checkpoint.find_newest(out)  # by whatever mode and number of ranks
    begin = checkpoint.load(newest, model, optimizer)["step"] if newest else 0
    for step in range(begin, steps):
        # every rank reads samples of its own
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(100, (48, 16), generator=generator)
        tokens = batch[ranks.rank :: ranks.world_size].to(device)
        # dropout: another one in each step and on each rank, the same after a resume
        torch.manual_seed(step * ranks.world_size + ranks.rank)
        with shard.autocast(model, device, options.param_dtype):
            logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.float(), tokens[:, 0] % 10)
        loss.backward()
        norm = shard.clip_grad_norm(model, 1.0)  # of all ranks
        optimizer.step()
        optimizer.zero_grad()
        if ranks.rank == 0:
            print(f"step {step + 1}  loss {loss:.4f} of rank 0  norm {norm:.4f}", flush=True)
        if (step + 1) % 10 == 0 or step + 1 == steps:  # on every rank, as all that is collective
            checkpoint.save(out, step + 1, model, optimizer)


if __name__ == "__main__":
    train(*sys.argv[1:2], *map(int, sys.argv[2:3]))
    gc.collect()  # frees the model, a reference cycle: its groups' threads could abort the exit
    torch.distributed.destroy_process_group()
