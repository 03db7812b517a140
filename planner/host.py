"""What a rank needs of its host's memory: for --cpu-offload and --async-save.

Both use pinned memory, which a GPU copies to and from at full speed. PyTorch rounds each block of
it up to a power of two (documented at torch.cuda.memory.host_memory_stats): a tensor of 9 MB takes
16.
"""

from collections.abc import Iterator

from planner.memory import states_held
from planner.traffic import FP32, PlannedRun, run_units


def pinned_block(size: int) -> int:
    """Round the bytes of a pinned tensor up to a power of two."""
    return 1 << (size - 1).bit_length()


def shards(run: PlannedRun) -> Iterator[tuple[int, int]]:
    """Yield (bytes, count) of the fp32 tensors that together are a rank's parameters.

    FSDP2 cuts each parameter, FSDP1 a unit as one flat parameter; under DDP they are whole.
    """
    for unit in run_units(run):
        if run.engine == "fsdp1":
            yield FP32 * unit.padded(run) // run.shard, unit.count
            continue
        for shape, size in zip(unit.shapes, unit.sizes, strict=True):
            rows = -(-shape[0] // run.shard)
            yield FP32 * rows * (size // shape[0]), unit.count


def host_bytes(run: PlannedRun) -> dict[str, float]:
    """Count the bytes of a rank in host memory, by the flag that needs them.

    --cpu-offload: parameters and gradients, pinned, and two moments that are not. --async-save: a
    pinned copy of the parameters and of the moments that this rank holds.
    """
    plain = sum(size * count for size, count in shards(run))
    pinned = sum(pinned_block(size) * count for size, count in shards(run))
    found: dict[str, float] = {}
    if run.cpu_offload:
        found["--cpu-offload"] = 2 * pinned + 2 * plain
    if run.async_save:
        # under ZeRO-1 a rank holds, and saves, its share of the moments
        moments = 2 * FP32 * states_held(run) * pinned / plain
        found["--async-save"] = pinned + moments
    return found
