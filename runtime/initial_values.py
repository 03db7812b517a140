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

    With --init-from both are collective: rank 0 reads the file, AgreedError of status 2 on all.
    """
    path, seed = run.config.init_from, run.config.seed
    if not path:
        return partial(vit.initial_value, run.model, seed=seed)
    from downstream.weights import Pretrained, check_fits, epsilon_note, read_pretrained, value_of

    found: list[Pretrained] = []  # on rank 0

    def read_file() -> None:
        try:
            found.append(read_pretrained(path, run.model))
            check_fits(found[0], run.model, run.config.img_size)
            if note := epsilon_note(found[0]):
                print(note)
        except (OSError, ValueError) as error:
            raise ValueError(f"--init-from: {error}") from error

    def read_tensor(name: str, whole: Tensor) -> None:
        whole.copy_(value_of(found[0], name, whole.shape, config=run.model, seed=seed))

    def value(name: str, shape: torch.Size, device: torch.device) -> Tensor:
        whole = torch.empty(shape, device=device)
        run_on_rank0(partial(read_tensor, name, whole))
        dist.broadcast(whole, 0)
        return whole

    run_on_rank0(read_file)
    return value
