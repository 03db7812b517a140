"""A handful of the rounds of kill.py, which runs a hundred."""

import sys

import pytest
from kill import kill


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_is_lost_whatever_kills_a_run(tmp_path):
    assert kill(3, 2878, tmp_path) == []
