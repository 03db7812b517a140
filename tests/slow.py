"""Train with train_fsdp.main, slowed down by a known cause.

`slow_runs` runs on each rank, by `ranks.on_ranks`: every cause and kind of run in the same
processes. They write to $SLOW_RUNS: CAUSE/WORLD-RUN/1/log.jsonl.
"""

import os
import shlex
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ranks import agreed_port
from torch.utils._python_dispatch import TorchDispatchMode

import data
import train_fsdp
import vit

CAUSES = ("input", "communication", "compute")
FLAGS = shlex.split(
    "--model tiny --img-size 32 --device cpu --precision fp32 --batch 4 --steps 8 --log-every 2 "
    "--workers 0 --resume none --save-every none"
)


class Links(TorchDispatchMode):
    """Delay every collective by 100 ms."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            time.sleep(0.1)
        kwargs = {} if kwargs is None else kwargs
        return func(*args, **kwargs)


def slowed(cause: str) -> Any:
    """A patch that slows down the disk, the links or the model.

    Only for a loader without workers: those are processes of their own.
    """
    step = train_fsdp.train_step
    forward = vit.Block.forward
    index = data.ImageOrder.image_at

    def over_slow_links(*args, **kwargs):
        with Links():
            return step(*args, **kwargs)

    def slow_block(self, *args):
        time.sleep(0.15)
        return forward(self, *args)

    def slow_disk(self, position):
        time.sleep(0.15)
        return index(self, position)

    return {
        "input": patch.object(data.ImageOrder, "image_at", slow_disk),
        "communication": patch.object(train_fsdp, "train_step", over_slow_links),
        "compute": patch.object(vit.Block, "forward", slow_block),
    }[cause]


def slow_runs() -> None:
    """Run real, syn and io for each cause on several ranks, syn on one."""
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    if world == 1:
        mode = "no_shard"
        kinds = ["syn"]
    else:
        mode = "full_shard"
        kinds = ["real", "syn", "io"]
    for cause in CAUSES:
        for run in kinds:
            out = Path(os.environ["SLOW_RUNS"], cause, f"{world}-{run}", "1")
            os.environ["MASTER_PORT"] = agreed_port(out, rank)
            with slowed(cause):
                argv = [*FLAGS, "--mode", mode, "--run", run, "--out", str(out)]
                assert train_fsdp.main(argv) == 0
