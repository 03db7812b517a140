"""examples/tensor_parallel.py: the losses of one process, whatever the ranks."""

import pytest
from conftest import FULL
from ranks import python

LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")


def losses(*command: object) -> list[float]:
    """Return the losses that the example prints, in the order of its steps."""
    printed = python(*command, "--steps", "4", alone=True).splitlines()
    lines = [line.split() for line in printed if line.startswith("step ")]
    assert [int(words[1]) for words in lines] == [1, 2, 3, 4]
    return [float(words[-1]) for words in lines]


@pytest.mark.slow
def test_split_blocks_train_as_whole_ones():
    alone = losses("-m", "examples.tensor_parallel")
    assert alone[-1] < alone[0]
    for ranks, tp in ((2, 2), (4, 2)) if FULL else ((2, 2),):
        split = losses(
            *LAUNCH, "--nproc-per-node", ranks, "-m", "examples.tensor_parallel", "--tp", tp
        )
        assert split == pytest.approx(alone, rel=1e-5), (ranks, tp)
