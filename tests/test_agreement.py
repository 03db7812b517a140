"""runtime/agreement.py: work that all ranks do together, and errors that all of them raise."""

from functools import partial

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


def two_ranks():
    rank = join()
    calls = []

    def work():
        calls.append(rank)
        return {"files": ["a", "b"], "rank": rank}

    def missing():
        raise FileNotFoundError(2, "No such file or directory", "/no/such/folder")

    def refuse():
        raise checkpoint.CorruptCheckpointError("no image lies below x")

    def bug():
        raise KeyError("x")

    def fail_on_rank_1():
        if rank == 1:
            raise PermissionError(13, "Permission denied", "/mnt/x")

    on_rank0 = (work, missing, refuse, bug)
    return {
        "rank 0": [result_or_error(partial(agreement.run_on_rank0, do)) for do in on_rank0],
        "calls": len(calls),
        "own": agreement.run_on_all_ranks(work),
        "all": result_or_error(partial(agreement.run_on_all_ranks, fail_on_rank_1)),
        "gathered": agreement.gather_to_rank0({"rank": rank}),
    }


def test_all_ranks_have_one_result_or_one_error(tmp_path):
    """With its type, a bug's excepted; status 2 for a ValueError, which is the user's to mend."""
    for rank, found in enumerate(on_ranks(2, two_ranks, tmp_path)):
        assert found["rank 0"] == [
            {"files": ["a", "b"], "rank": 0},
            (1, FileNotFoundError, "[Errno 2] No such file or directory: '/no/such/folder'"),
            (2, checkpoint.CorruptCheckpointError, "no image lies below x"),
            (1, RuntimeError, "KeyError: 'x'"),
        ]
        assert found["calls"] == (rank == 0)
        assert found["own"]["rank"] == rank
        problem = "[Errno 13] Permission denied: '/mnt/x' (rank 1)"
        assert found["all"] == (1, PermissionError, problem)
        assert found["gathered"] == (None if rank else [{"rank": 0}, {"rank": 1}])
