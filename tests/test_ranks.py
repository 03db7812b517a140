"""tests/ranks.py: the machinery that other tests rely on, where a fault in it would be silent."""

from ranks import already_imported, on_ranks


def test_ranks_are_forked_with_torch_and_the_script_imported(tmp_path):
    # else each rank of each test would import them anew: a sixth of the time of the suite
    assert on_ranks(2, already_imported, tmp_path) == [True, True]
