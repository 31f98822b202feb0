"""The clock of the cores: one that a suspended machine does not stop."""

from __future__ import annotations

import sys
import time

import pytest

from p2p_dmc.agent.clock import now_ms


def test_the_time_for_which_a_machine_was_suspended_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was heard before that was not heard just now."""
    counts_sleep = time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC
    suspended_ns = {counts_sleep: 3_600 * 10**9}
    asked = time.clock_gettime_ns
    before_ms = now_ms()
    monkeypatch.setattr(time, "clock_gettime_ns", lambda which: asked(which) + suspended_ns.get(which, 0))
    assert 3_600_000 <= now_ms() - before_ms < 3_660_000
