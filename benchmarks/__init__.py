"""Ratios measured in one run: this project against its peers, on the same machine.

Run them from the top folder as `python -m benchmarks.NAME`.

step: a training step against transformers. sharded: the same on several ranks against plain
fully_shard. data: images per second against torchvision. checkpoint: saving and loading against
plain files. gpu: all sizes on one GPU.
"""
