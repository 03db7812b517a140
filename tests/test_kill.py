"""A handful of the rounds of kill.py, which runs a hundred."""

import sys

import pytest
from kill import kill


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_is_lost_whatever_kills_a_run(tmp_path):
    report = kill(3, 2878, tmp_path)  # a seed with a bit of everything
    assert report.problems == []
    assert report.last_step > 0 and sum(report.kinds.values()) == 3
    signals = {kind.split()[0] for kind in report.kinds}
    assert {"SIGKILL", "SIGSTOP"} < signals  # and one that asks for a stop
    assert any("to one" in kind for kind in report.kinds)
