"""The values with which a run begins that resumes no checkpoint: drawn, or those of --init-from."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import vit
from runtime.agreement import run_on_rank0
from runtime.run import Run


def initial_values(run: Run) -> Callable[..., Tensor]:
    """Return the function (name, shape, device) -> whole initial value that shard.apply takes.

    With --init-from this and each call of the function are collective: rank 0 checks and reads the
    file, one tensor at a time, and sends it to all; AgreedError with status 2 on all ranks where
    it does not fit, or where a value is not finite.
    """
    config = run.config
    if not config.init_from:
        return partial(vit.initial_value, run.model, seed=config.seed)
    from downstream.pretrained import Pretrained, check_fits, read_pretrained, value_of

    found: list[Pretrained] = []  # on rank 0

    def read_file() -> None:
        try:
            heads = run.model.heads, run.model.decoder_heads
            found.append(read_pretrained(str(config.init_from), heads))
            check_fits(found[0], run.model, config.img_size)
        except (OSError, ValueError) as error:
            raise ValueError(f"--init-from: {error}") from error

    def value(name: str, shape: torch.Size, device: torch.device) -> Tensor:
        whole = torch.empty(shape, device=device)

        def read_tensor() -> None:
            whole.copy_(value_of(found[0], name, shape, config=run.model, seed=config.seed))
            if not whole.isfinite().all():
                raise ValueError(f"--init-from: {config.init_from}: {name} is not finite")

        run_on_rank0(read_tensor)
        dist.broadcast(whole, 0)
        return whole

    run_on_rank0(read_file)
    return value
