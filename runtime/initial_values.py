"""The values with which a run begins that resumes no checkpoint: drawn, or those of --init-from."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import vit
from runtime.agreement import run_on_rank0
from runtime.run import Run


def initial_values(run: Run, needed: bool = True) -> Callable[[str, torch.Size], Tensor]:
    """Return the function (name, shape) -> whole initial value that shard.apply takes.

    With --init-from, collective: rank 0 checks and reads the file, one tensor at a time, and has
    the values that shard.apply sends to all; AgreedError with status 2 on all ranks where it does
    not fit. Not read unless `needed`: a run that resumes does without the file.
    """
    config, draw = run.config, partial(vit.initial_value, run.model, seed=run.config.seed)
    if not (config.init_from and needed):
        return draw
    from downstream.pretrained import Pretrained, check_fits, read_pretrained, value_of

    heads = run.model.heads, run.model.decoder_heads
    found: list[Pretrained] = []  # on rank 0

    def read() -> None:
        try:
            found.append(read_pretrained(str(config.init_from), heads))
            check_fits(found[0], run.model, config.img_size)
        except (OSError, ValueError) as error:
            raise ValueError(f"--init-from: {error}") from error

    run_on_rank0(read)
    if not found:
        return lambda name, shape: torch.empty(shape)
    return partial(value_of, found[0], config=run.model, seed=config.seed)
