"""Who is asked for which range: as properties, and with peers whose links are simulated on a clock of their own."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.agent.spreading import (
    ACTIVE_S,
    GENTLE_BYTES,
    OVERDUE_S,
    PATIENCE_S,
    WINDOW_MOST_BYTES,
    WINDOW_RANGES,
    Ask,
    ShardPlan,
    Source,
    Spreading,
)

PIECE, RANGE = 128 << 10, 1 << 20
D = b"d" * 16


def plan_of(spreading: Spreading, shard: int = 0, size: int = 4 << 20, urgent: bool = False) -> ShardPlan:
    plan = ShardPlan.of((D, shard), size, spreading.piece_bytes, [], urgent=urgent)
    spreading.plans[plan.key] = plan
    return plan


def answer(spreading: Spreading, ask: Ask, now_s: float) -> list[Ask]:
    """The range came and was written."""
    _, superfluous = spreading.taken(ask)
    spreading.answered(ask, now_s)
    spreading.dropped(ask)
    for other in superfluous:
        spreading.dropped(other)
    return superfluous


# -- pieces -----------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=6),
    st.integers(1, 9),
)
def test_pieces_within_ranges_are_those_that_lie_in_one_as_a_whole(
    size: int, pairs: list[tuple[int, int]], piece: int
) -> None:
    ranges = [(min(a, b), min(size, max(a, b))) for a, b in pairs]
    plan = ShardPlan.of((D, 0), size, piece, ranges, urgent=False)
    whole = [
        number
        for number in range(-(-size // piece))
        if any(a <= number * piece and min(size, (number + 1) * piece) <= b for a, b in ranges)
    ]
    assert plan.done == sum(1 << number for number in whole) == plan.all & ~plan.free


@given(st.integers(1, 64 << 20), st.integers(1, 6))
def test_the_blocks_of_a_shard_are_shared_out_among_its_receivers(size: int, count: int) -> None:
    spreading = Spreading(PIECE, RANGE)
    receivers = [f"p{i}" for i in range(count)]
    owned = []
    for me in receivers:
        plan = plan_of(spreading, size=size)
        plan.share(me, receivers, spreading.block_pieces)
        owned.append(plan.own & plan.all)
    assert sum(owned) == plan.all  # together all of it, nothing twice
    assert max(owned, key=int.bit_count).bit_count() - min(owned, key=int.bit_count).bit_count() <= 8
    plan.share("a stranger", receivers, spreading.block_pieces)
    assert plan.own & plan.all == plan.all


@settings(max_examples=200)
@given(st.data())
def test_whatever_is_answered_lost_or_late_each_piece_comes_once(data: st.DataObject) -> None:
    """Some source has everything and answers in the end; the others fail, are late, have parts of it."""
    spreading = Spreading(1000, 4000)
    sizes = data.draw(st.lists(st.integers(1, 30_000), min_size=1, max_size=3))
    plans = [plan_of(spreading, i, size, urgent=data.draw(st.booleans())) for i, size in enumerate(sizes)]
    for plan in plans:
        plan.holders = frozenset(["good", "flaky"])
        plan.receivers["receiver"] = data.draw(st.integers(0, plan.all))
        plan.share("me", ["me", "receiver"], spreading.block_pieces)
    now_s, outstanding, came = 0.0, [], {plan.key: 0 for plan in plans}
    for _ in range(2000):
        for peer_id in ("good", "flaky", "receiver"):
            while (ask := spreading.next_ask(peer_id, now_s)) is not None:
                assert 0 < ask.size <= 4000 and ask.offset + ask.size <= sizes[ask.key[1]]
                assert not ask.pieces & ~spreading.plans[ask.key].has(peer_id)
                outstanding.append(ask)
        if not outstanding:
            break
        ask = outstanding.pop(data.draw(st.integers(0, len(outstanding) - 1)))
        now_s += data.draw(st.sampled_from([0.0, 0.01, 1.0]))
        plan = spreading.plans[ask.key]
        fate = "answer" if ask.peer_id == "good" else data.draw(st.sampled_from(["answer", "lose"]))
        if fate == "lose":
            plan.lacking.add(ask.peer_id)
            spreading.dropped(ask)
            continue
        news, superfluous = spreading.taken(ask)
        if news:
            assert not came[ask.key] & ask.pieces
            came[ask.key] |= ask.pieces
        spreading.answered(ask, now_s)
        spreading.dropped(ask)
        for other in superfluous:
            outstanding.remove(other)
            spreading.dropped(other)
    assert all(plan.complete and came[plan.key] == plan.all and not plan.stuck() for plan in plans)
    assert all(source.asked_bytes == 0 for source in spreading.sources.values())
    for plan in plans:
        given = list(plan.given.values())
        assert sum(given) == plan.all  # each piece has one giver


def test_a_shard_is_stuck_when_nobody_has_the_rest() -> None:
    spreading = Spreading(PIECE, RANGE)
    plan = plan_of(spreading)
    assert plan.stuck()
    plan.receivers["r"] = 0b11
    assert not plan.stuck()
    for pieces in (0b01, 0b10):
        ask = spreading.next_ask("r", 0.0)
        assert ask is not None and ask.pieces == pieces and not plan.stuck()
        answer(spreading, ask, 0.1)
    assert spreading.next_ask("r", 0.2) is None
    assert plan.stuck() and not plan.complete
    plan.holders = frozenset(["h"])
    assert not plan.stuck()
    plan.lacking.add("h")
    assert plan.stuck()


def test_what_somebody_waits_for_comes_first_and_alone_while_training_needs_the_link() -> None:
    spreading = Spreading(PIECE, RANGE)
    background, urgent = plan_of(spreading, 0), plan_of(spreading, 1, urgent=True)
    background.holders = urgent.holders = frozenset(["h"])
    ask = spreading.next_ask("h", 0.0, urgent_only=True)
    assert ask is not None and ask.key == urgent.key
    second = spreading.next_ask("h", 0.0)
    assert second is not None and second.key == urgent.key
    urgent.free = 0
    answer(spreading, ask, 0.1)
    assert spreading.next_ask("h", 0.0, urgent_only=True) is None and spreading.background_asked() == 0
    third = spreading.next_ask("h", 0.0)
    assert third is not None and third.key == background.key and spreading.background_asked() == 1


def test_where_a_run_trains_little_is_asked_for_at_once_of_what_nobody_waits_for() -> None:
    spreading = Spreading(PIECE, 4 * RANGE)
    background, urgent = plan_of(spreading, 0, 64 << 20), plan_of(spreading, 1, 64 << 20, urgent=True)
    background.holders = urgent.holders = frozenset(["h"])
    urgent.free = 0
    spreading.sources["h"] = Source(window_bytes=WINDOW_MOST_BYTES)

    def asked() -> list[int]:
        return [ask.size for ask in iter(lambda: spreading.next_ask("h", 0.0, gently=True), None)]

    assert asked() == [GENTLE_BYTES // WINDOW_RANGES] * WINDOW_RANGES
    urgent.free = urgent.all
    assert asked() == [4 * RANGE] * ((WINDOW_MOST_BYTES - GENTLE_BYTES) // (4 * RANGE) + 1)
    assert all(ask.key == urgent.key for ask in urgent.asks)


def test_of_what_others_receive_a_holder_is_asked_for_one_range_at_a_time_unless_somebody_waits() -> None:
    spreading = Spreading(PIECE, RANGE)
    plan = plan_of(spreading, 0, 64 << 20)
    plan.holders = frozenset(["h"])
    plan.share("me", ["me", "other", "third"], spreading.block_pieces)
    spreading.sources["h"] = Source(window_bytes=WINDOW_MOST_BYTES)
    own = []
    while (ask := spreading.next_ask("h", 0.0)) is not None:
        assert not ask.pieces & ~plan.own
        own.append(ask)
    assert len(own) == WINDOW_MOST_BYTES // RANGE
    plan.free &= ~plan.own  # nothing of its own is left to ask for
    for ask in own[:-1]:
        answer(spreading, ask, 0.0)
        assert spreading.next_ask("h", 0.0) is None  # others need the holder
    answer(spreading, own[-1], 0.0)
    extra = spreading.next_ask("h", 0.0)
    assert extra is not None and not extra.pieces & plan.own and spreading.next_ask("h", 0.0) is None
    plan.urgent = True
    assert spreading.next_ask("h", 0.0) is not None


def test_the_blocks_of_receivers_that_get_on_are_left_to_them_for_a_while() -> None:
    def asks_at(now_s: float, active_s: dict[str, float]) -> bool:
        """A second after its own were asked for at 10 s."""
        spreading = Spreading(PIECE, RANGE)
        plan = plan_of(spreading, 0, 64 << 20)
        plan.holders = frozenset(["h"])
        plan.share("me", ["me", "other", "third"], spreading.block_pieces)
        spreading.next_ask("h", 9.0)
        spreading.sources["h"].asked_bytes = 0
        plan.free &= ~plan.own
        spreading.active_s = active_s
        spreading.next_ask("h", 10.0)  # its own are all asked for since then
        spreading.sources["h"].asked_bytes = 0
        return spreading.next_ask("h", now_s) is not None

    assert asks_at(10.0, {})  # nobody else is known to receive anything
    assert not asks_at(11.0, {"other": 10.5})
    assert asks_at(11.0, {"a stranger": 10.5})
    assert asks_at(10.0 + ACTIVE_S, {"other": 10.0})  # it tells of nothing any more
    assert asks_at(10.0 + PATIENCE_S, {"other": 10.0 + PATIENCE_S})  # it gets on, and not with these


def test_a_late_range_is_asked_of_another_and_the_first_answer_wins() -> None:
    spreading = Spreading(PIECE, RANGE)
    plan = plan_of(spreading, size=PIECE)
    plan.holders = frozenset(["slow", "quick"])
    first = spreading.next_ask("slow", 0.0)
    assert first is not None and spreading.next_ask("quick", OVERDUE_S * 0.9) is None
    again = spreading.next_ask("quick", OVERDUE_S * 1.1)
    assert again is not None and (again.offset, again.size) == (first.offset, first.size)
    assert spreading.next_ask("quick", 9.0) is None  # it has been asked for it already
    assert answer(spreading, again, OVERDUE_S * 1.2) == [first] and plan.complete
    assert plan.given == {"quick": 1} and spreading.asked_bytes("slow") == 0


# -- simulated links --------------------------------------------------------------------------------------------------


@dataclass
class Link:
    """What a peer sends goes out one range after the other."""

    rate: float
    free_s: float = 0.0
    sent: int = 0

    def send(self, size: int, now_s: float) -> float:
        self.free_s = max(self.free_s, now_s) + size / self.rate
        self.sent += size
        return self.free_s


@dataclass
class Receiver:
    """A peer that receives all shards."""

    name: str
    link: Link
    spreading: Spreading = field(default_factory=lambda: Spreading(PIECE, RANGE))


class World:
    """Holders that have all shards, receivers that want them, and what each of these has as it was LOOK_S ago."""

    LOOK_S, AHEAD = 0.1, 16 << 20

    def __init__(
        self, shards: list[int], holders: dict[str, float], receivers: dict[str, float], seed: int
    ) -> None:
        self.rng = random.Random(seed)
        self.shards = shards
        self.holders = {name: Link(rate) for name, rate in holders.items()}
        self.receivers = {name: Receiver(name, Link(rate)) for name, rate in receivers.items()}
        self.begun: dict[str, int] = dict.fromkeys(receivers, 0)
        self.finished_s: dict[str, float] = {}
        self.asks: dict[str, int] = dict.fromkeys(receivers, 0)

    def begin(self, one: Receiver) -> None:
        while self.begun[one.name] < len(self.shards) and one.spreading.unasked_bytes() < self.AHEAD:
            shard = self.begun[one.name]
            self.begun[one.name] += 1
            plan = plan_of(one.spreading, shard, self.shards[shard])
            plan.holders = frozenset(self.holders)
            order = sorted(self.receivers)
            order = order[shard % len(order) :] + order[: shard % len(order)]
            plan.share(one.name, order, one.spreading.block_pieces)

    def look(self, one: Receiver) -> None:
        for key, plan in one.spreading.plans.items():
            for other in self.receivers.values():
                if other is not one and (theirs := other.spreading.plans.get(key)) is not None:
                    plan.receivers[other.name] = theirs.done

    def run(self) -> float:
        """Until everybody has everything; when that was."""
        events: list[tuple[float, float, str, Ask | None]] = [
            (self.rng.random() * self.LOOK_S, self.rng.random(), name, None) for name in self.receivers
        ]
        while len(self.finished_s) < len(self.receivers):
            now_s, _, name, ask = heapq.heappop(events)
            one = self.receivers[name]
            if ask is None:
                self.look(one)
                if name not in self.finished_s:
                    heapq.heappush(events, (now_s + self.LOOK_S, self.rng.random(), name, None))
            else:
                answer(one.spreading, ask, now_s)
            self.begin(one)
            if self.begun[name] == len(self.shards) and all(p.complete for p in one.spreading.plans.values()):
                self.finished_s.setdefault(name, now_s)
            for source in self.rng.sample(
                sorted({**self.holders, **self.receivers}), len(self.holders) + len(self.receivers)
            ):
                link = self.holders.get(source) or self.receivers[source].link
                while source != name and (more := one.spreading.next_ask(source, now_s)) is not None:
                    self.asks[name] += 1
                    heapq.heappush(
                        events, (link.send(more.size, now_s) + 0.001, self.rng.random(), name, more)
                    )
        return max(self.finished_s.values())


@pytest.mark.parametrize("shards", [[4 << 20] * 100, [64 << 20] * 6, [400 << 20]])
@pytest.mark.parametrize("seed", range(3))
def test_a_lone_holder_sends_each_byte_little_more_than_once(shards: list[int], seed: int) -> None:
    rate = 125e6
    world = World(shards, {"seeder": rate}, {"a": rate, "b": rate, "c": rate}, seed)
    took_s = world.run()
    assert took_s <= 1.3 * sum(shards) / rate
    assert world.holders["seeder"].sent <= 1.25 * sum(shards)


def test_of_holders_each_gives_what_its_link_allows() -> None:
    shards = [4 << 20] * 50
    world = World(shards, {"fast": 100e6, "slow": 10e6, "crawling": 1e5}, {"me": 1e9}, seed=1)
    took_s = world.run()
    sent = {name: link.sent for name, link in world.holders.items()}
    assert took_s <= 1.15 * sum(shards) / 110e6
    assert 7 < sent["fast"] / sent["slow"] < 14 and sent["crawling"] < 1 << 20
