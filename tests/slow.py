"""Runs of train_fsdp.main that are slow for a known reason: really so, not by a flag of theirs.

`runs` is executed on each rank, by `ranks.on_ranks`: every cause, every kind of run, in one set of
processes. $SLOW_RUNS is the folder that they write to: CAUSE/WORLD-RUN/1/log.jsonl.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from ranks import agreed_port
from torch.utils._python_dispatch import TorchDispatchMode

import data
import train_fsdp
import vit
from runtime import comm_counter

CAUSES = ("input", "communication", "compute")
FLAGS = [
    "--model",
    "tiny",
    "--img-size",
    "32",
    "--device",
    "cpu",
    "--precision",
    "fp32",
    "--batch",
    "4",
    "--steps",
    "10",
    "--log-every",
    "2",
    "--workers",
    "0",
    "--resume",
    "none",
    "--save-every",
    "none",
]


class Links(TorchDispatchMode):
    """Every collective takes 40 ms longer."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if comm_counter.kind_of(func):
            time.sleep(0.04)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def slowed(cause: str) -> Iterator[None]:
    """A slow disk, slow links or a slow model.

    The disk is that of a loader without workers: those are processes in which nothing is slowed.
    """
    step, forward, index = train_fsdp.train_step, vit.Block.forward, data.Images.index

    def over_slow_links(*args, **kwargs):
        with Links():
            return step(*args, **kwargs)

    def slow_block(self, *args):
        time.sleep(0.06)
        return forward(self, *args)

    def slow_disk(self, position):
        time.sleep(0.15)
        return index(self, position)

    with {
        "input": patch.object(data.Images, "index", slow_disk),
        "communication": patch.object(train_fsdp, "train_step", over_slow_links),
        "compute": patch.object(vit.Block, "forward", slow_block),
    }[cause]:
        yield


def runs() -> None:
    """Of several ranks: real, syn and io for each cause; of one, syn."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for cause in CAUSES:
        for run in ("real", "syn", "io") if world > 1 else ("syn",):
            out = Path(os.environ["SLOW_RUNS"], cause, f"{world}-{run}", "1")
            os.environ["MASTER_PORT"] = agreed_port(out, rank)
            mode = "full_shard" if world > 1 else "no_shard"
            with slowed(cause):
                argv = [*FLAGS, "--mode", mode, "--run", run, "--out", str(out)]
                assert train_fsdp.main(argv) == 0
