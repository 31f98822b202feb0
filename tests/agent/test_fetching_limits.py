"""How bounds on bulk traffic are written, and that they hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from p2p_dmc.agent import limits
from p2p_dmc.agent.limits import BURST_S, RateLimit
from p2p_dmc.config import parse_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20MB/s", 20_000_000),
        ("20mb", 20_000_000),
        ("1.5 MiB/s", 3 << 19),
        ("100Mbit/s", 12_500_000),
        ("100 mbit", 12_500_000),
        ("8Mbps", 1_000_000),
        ("1Gbit/s", 125_000_000),
        ("5000000", 5_000_000),
    ],
)
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "-20MB/s", "20 MB per s", "1MB/min", "bit", "1e7bit/s"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate; write 20MB/s or 100Mbit/s"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["100", "1kB/s", "7Mbit/s"])
def test_what_is_too_slow(text: str) -> None:
    with pytest.raises(ValueError, match="at least 1MB/s"):
        parse_rate(text)


class Clock:
    """Time moves when somebody sleeps, to the earliest that is slept for."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.now_s += seconds


def test_whatever_is_taken_in_whatever_pieces_the_rate_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(limits, "asyncio", SimpleNamespace(sleep=clock.sleep))

    async def work() -> None:
        limit = RateLimit(1000)
        began_s, total = clock.now_s, 0
        for size in [1, 999, 10_000, 0, 37] * 20:
            await limit.take(size)
            last = size
            total += size
            assert total - last <= 1000 * (clock.now_s - began_s + BURST_S) + 1e-6
        assert clock.now_s - began_s >= (total - last) / 1000 - BURST_S - 1e-6
        clock.now_s += 50.0  # an idle link saves up for a moment only
        slept_s = clock.slept_s
        await limit.take(200)
        assert clock.slept_s == slept_s
        await limit.take(1)
        assert clock.slept_s - slept_s == pytest.approx(0.2 - BURST_S)

    asyncio.run(work())


def test_what_is_given_back_may_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(limits, "asyncio", SimpleNamespace(sleep=clock.sleep))

    async def work() -> None:
        limit = RateLimit(1000)
        for _ in range(50):
            await limit.take(5000)
            limit.give_back(5000)
        assert clock.slept_s == 0.0
        RateLimit().give_back(7)

    asyncio.run(work())


def test_without_a_rate_nothing_waits() -> None:
    async def work() -> None:
        limit = RateLimit()
        for _ in range(100):
            await limit.take(1 << 40)

    asyncio.run(asyncio.wait_for(work(), 10.0))
