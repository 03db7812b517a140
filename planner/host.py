"""Count the host memory that a rank needs for --cpu-offload and --async-save.

Both use pinned memory, which a GPU copies to and from at full speed. PyTorch rounds each pinned
block up to a power of two (see torch.cuda.memory.host_memory_stats): a tensor of 9 MB takes 16 MB.
"""

import math
from collections.abc import Iterator

from planner.memory import states_held
from planner.traffic import FP32, PlannedRun, run_units


def pinned_block(size: int) -> int:
    """Round the bytes of a pinned tensor up to a power of two."""
    return 1 << (size - 1).bit_length()


def shards(run: PlannedRun) -> Iterator[tuple[int, int]]:
    """Yield (bytes, count) of the fp32 tensors that hold a rank's parameters.

    FSDP2 shards each parameter, FSDP1 the flat parameter of each unit; DDP shards none.
    """
    for unit in run_units(run):
        if run.engine == "fsdp1":
            yield FP32 * unit.padded(run) // run.shard, unit.count
            continue
        for shape, size in zip(unit.shapes, unit.sizes, strict=True):
            rows = math.ceil(shape[0] / run.shard)
            yield FP32 * rows * (size // shape[0]), unit.count


def host_bytes(run: PlannedRun) -> dict[str, float]:
    """Count the bytes of a rank in host memory, by the flag that needs them.

    --cpu-offload keeps parameters and gradients in pinned memory, AdamW's two moments in ordinary
    memory. --async-save makes a pinned copy of the parameters and moments that this rank holds.
    """
    plain = sum(size * count for size, count in shards(run))
    pinned = sum(pinned_block(size) * count for size, count in shards(run))
    found: dict[str, float] = {}
    if run.cpu_offload:
        found["--cpu-offload"] = 2 * pinned + 2 * plain
    if run.async_save:
        # Under ZeRO-1 a rank holds, and saves, only its share of the moments.
        moments = 2 * FP32 * states_held(run) * pinned / plain
        found["--async-save"] = pinned + moments
    return found
