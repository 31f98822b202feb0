"""The formulas of SWIM, Lifeguard and memberlist, against tables worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dmc.core.suspicion import (
    Awareness,
    Broadcasts,
    MembershipSettings,
    push_pull_scale,
    retransmit_limit,
    suspicion_min_ms,
    suspicion_remaining_ms,
)
from tests.core.gossip_network import peer_id_of, record_of

LAN = MembershipSettings.lan()


@pytest.mark.parametrize(
    ("confirmations", "wanted", "elapsed_s", "left_s"),
    [
        (0, 3, 0, 30.0),
        (1, 3, 2, 14.0),
        (2, 3, 3, 4.81),
        (3, 3, 4, -2.0),
        (4, 3, 5, -3.0),
        (0, 0, 0, 2.0),
        (0, 0, 2, 0.0),
        (5, 0, 3, -1.0),
    ],
)
def test_time_left_of_a_suspicion(confirmations: int, wanted: int, elapsed_s: int, left_s: float) -> None:
    left_ms = suspicion_remaining_ms(
        confirmations=confirmations,
        wanted=wanted,
        elapsed_ms=elapsed_s * 1_000,
        min_ms=2_000,
        max_ms=30_000,
    )
    assert left_ms / 1_000 == pytest.approx(left_s, abs=0.005)


@given(st.integers(0, 10), st.integers(0, 10), st.integers(1, 10_000), st.integers(1, 10))
def test_confirmations_only_shorten(confirmations: int, wanted: int, min_ms: int, times: int) -> None:
    def left(n: int) -> float:
        return suspicion_remaining_ms(
            confirmations=n, wanted=wanted, elapsed_ms=0, min_ms=min_ms, max_ms=min_ms * times
        )

    assert min_ms <= left(confirmations + 1) <= left(confirmations) <= min_ms * times


@pytest.mark.parametrize(("members", "min_ms"), [(1, 1_500), (10, 1_500), (16, 1_806), (100, 3_000)])
def test_shortest_suspicion(members: int, min_ms: int) -> None:
    assert suspicion_min_ms(LAN, members) == min_ms


@pytest.mark.parametrize(
    ("mult", "members", "limit"), [(3, 0, 0), (3, 1, 3), (3, 9, 3), (3, 99, 6), (4, 4, 4), (4, 16, 8)]
)
def test_retransmit_limit(mult: int, members: int, limit: int) -> None:
    assert retransmit_limit(mult, members) == limit


@pytest.mark.parametrize(
    ("members", "scale"), [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3), (128, 3), (1_000, 6)]
)
def test_push_pull_scale(members: int, scale: int) -> None:
    assert push_pull_scale(members) == scale


def test_awareness_stays_within_its_limits() -> None:
    awareness = Awareness(8)
    scales = []
    for delta in (-1, 1, 3, 10, -1, -20):
        awareness.add(delta)
        scales.append(awareness.scale)
    assert scales == [1, 2, 5, 8, 7, 1]


def test_news_is_superseded_limited_and_fair() -> None:
    records = {peer_id_of(n): record_of(n) for n in range(5)}
    news = Broadcasts()
    for peer_id in records:
        news.add(peer_id)
    sent = [record.peer_id for _ in range(10) for record in news.take(records.get, 2, room=1)]
    assert sorted(sent) == sorted([*records, *records])
    assert len(news) == 0
    first = peer_id_of(0)
    news.add(first)
    news.take(records.get, 2)
    records[first] = replace(records[first], meta=b"newer")
    news.add(first)  # what was said before is superseded, its count too
    assert [news.take(records.get, 2)[0].meta for _ in range(2)] == [b"newer"] * 2
    assert news.take(records.get, 2) == ()


def test_news_fits_its_room() -> None:
    records = {peer_id_of(n): record_of(n, meta=bytes(2_048)) for n in range(30)}
    news = Broadcasts()
    for peer_id in records:
        news.add(peer_id)
    assert len(news.take(records.get, 1)) == 8  # 16 KiB
    small = {peer_id: replace(record, meta=b"") for peer_id, record in records.items()}
    assert len(news.take(small.get, 1)) == 16
    assert news.take(lambda _: None, 1) == () and len(news) == 0  # forgotten since


@pytest.mark.parametrize("base_ms", [100, 400, 500, 1_000])
def test_one_period_sets_all(base_ms: int) -> None:
    settings = MembershipSettings.lan(base_ms=base_ms)
    assert settings.probe_timeout_ms * 2 == settings.probe_interval_ms == base_ms
    assert suspicion_min_ms(settings, random.Random(1).randint(1, 10)) == 3 * base_ms


@pytest.mark.parametrize("change", [{"probe_timeout_ms": 500}, {"gossip_fanout": 0}, {"awareness_max": 0}])
def test_settings_that_cannot_work_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(LAN, **change)
