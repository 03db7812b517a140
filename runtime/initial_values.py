"""The values with which a run begins that resumes no checkpoint: drawn, or those of --init-from."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import vit
from runtime.agreement import run_on_all_ranks, run_on_rank0
from runtime.config import Run


def initial_values(run: Run, needed: bool = True) -> Callable[[str, torch.Size], Tensor]:
    """Return the function (name, shape) -> whole initial value that shard.apply takes.

    With --init-from, collective: rank 0 checks the file, and every rank reads one tensor at a time
    from it; AgreedError with status 2 where it does not fit. Not read unless `needed`: a run that
    resumes does without the file.
    """
    config, draw = run.config, partial(vit.initial_value, run.model, seed=run.config.seed)
    if not (config.init_from and needed):
        return draw
    from downstream.pretrained import check_fits, read_pretrained, value_of

    heads = run.model.heads, run.model.decoder_heads

    def check() -> str:
        try:
            found = read_pretrained(str(config.init_from), heads)
            check_fits(found, run.model, config.img_size)
        except (OSError, ValueError) as error:
            raise ValueError(f"--init-from: {error}") from error
        return found.name

    name = run_on_rank0(check)  # of the newest whole checkpoint, where a run was given
    found = run_on_all_ranks(partial(read_pretrained, name, heads, checked=True))
    return partial(value_of, found, config=run.model, seed=config.seed)
