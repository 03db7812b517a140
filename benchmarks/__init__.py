"""Ratios measured in one run: this project against its peers, on the same machine.

Run them from the top folder as `python -m benchmarks.NAME`.

step: a training step against plain PyTorch, timm and transformers, on one rank or several. data:
images per second against torchvision. scale: saves of a thousand ranks, simulated. plan_speed:
planned and measured steps. gpu: all on one GPU, saves beside torch.save too.
"""
