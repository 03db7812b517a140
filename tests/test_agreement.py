"""runtime/agreement.py: work that all ranks do together, and errors that all of them raise."""

from functools import partial

import pytest
import torch
from ranks import join, on_ranks

import checkpoint
from runtime import agreement


def result_or_error(work):
    """What `work` returns, or (status, type, text) of the error that it raises on all ranks."""
    try:
        return work()
    except agreement.AgreedError as error:
        assert str(error).startswith(str(error.error))
        return error.status, type(error.error), str(error)


def four_ranks():
    rank, calls = join(), []

    def fail():
        calls.append("fail")
        raise FileNotFoundError(2, "No such file or directory", "/no/such/folder")

    def work():
        calls.append("work")
        return {"files": ["a", "b"], "rank": rank}

    def refuse():
        raise checkpoint.Damaged("no image lies below x")

    def bug():
        raise KeyError("x")

    def fail_on_rank_2():
        if rank == 2:
            raise PermissionError(13, "Permission denied", "/mnt/x")
        return rank

    return {
        "all ranks": [
            result_or_error(partial(agreement.run_on_all_ranks, do))
            for do in (work, fail_on_rank_2)
        ],
        "rank 0": [
            result_or_error(partial(agreement.run_on_rank0, do)) for do in (fail, work, refuse, bug)
        ],
        "nothing": agreement.run_on_rank0(lambda: None),
        "calls": calls,
        "gathered": agreement.gather_to_rank0({"rank": rank}),
        "mean": agreement.mean_over_ranks(torch.tensor([float(rank)])),
    }


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return on_ranks(4, four_ranks, tmp_path_factory.mktemp("four"))


def test_run_on_rank0_gives_all_ranks_its_result_or_its_error(four):
    """With its type, a bug's excepted; status 2 for a ValueError, which is the user's to mend."""
    for rank, found in enumerate(four):
        assert found["rank 0"] == [
            (1, FileNotFoundError, "[Errno 2] No such file or directory: '/no/such/folder'"),
            {"files": ["a", "b"], "rank": 0},
            (2, checkpoint.Damaged, "no image lies below x"),
            (1, RuntimeError, "KeyError: 'x'"),
        ]
        assert found["nothing"] is None
        assert found["calls"] == (["work", "fail", "work"] if rank == 0 else ["work"])


def test_run_on_all_ranks_gives_each_its_own_result_or_all_the_error_of_one(four):
    problem = 1, PermissionError, "[Errno 13] Permission denied: '/mnt/x' (rank 2)"
    for rank, found in enumerate(four):
        assert found["all ranks"] == [{"files": ["a", "b"], "rank": rank}, problem]


def test_mean_over_ranks_and_gather_to_rank0(four):
    assert [found["mean"] for found in four] == [[1.5]] * 4  # of 0 to 3
    gathered = [[{"rank": r} for r in range(4)], None, None, None]
    assert [found["gathered"] for found in four] == gathered
