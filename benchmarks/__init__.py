"""Ratios measured in one run: this project against its peers, on the same machine.

Run them from the top folder as `python -m benchmarks.NAME`.

step: a training step against transformers and timm (`peers`). sharded: the same on several ranks
against DDP of transformers. gpu: all sizes on one GPU. data: images per second against torchvision.
checkpoint: saving and loading against plain files.
"""
