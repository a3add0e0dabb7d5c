"""What is said of two processes of which one has not ended well."""

from __future__ import annotations

import pytest

from tests.training.two_ranks import run_two

WORKER = """
import os, signal, sys, time
if sys.argv[1] == "0":
    os.kill(os.getpid(), signal.SIGABRT)
time.sleep(600)
"""


def test_a_signal_is_named_and_who_waits_for_its_peer_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.training.two_ranks.ALONE", 0.5)
    with pytest.raises(AssertionError) as error:
        run_two(WORKER, tmp_path)
    assert "rank 0 was ended by SIGABRT" in str(error.value)
    assert "Current thread" in str(error.value), "where it was is told"
    assert "rank 1 did not end, and was killed" in str(error.value)
