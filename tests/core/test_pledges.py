"""The last copy never goes: every schedule of a few peers with loss, repetition, delay and restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import pytest

from p2p_dmc.core.pledges import MOST_SHARDS, Pledges, Question

D = b"d" * 16
KEY = (D, 0)


def pledges(*asks: tuple[int, tuple[str, ...]]) -> Pledges:
    made = Pledges(0)
    for shard, peers in asks:
        made.ask([((D, shard), peers)], 0)
    return made


# -- every schedule ---------------------------------------------------------------------------------------------------

Words = tuple[int, int, int, bool]  # from, to, number of the ask, whether it is the answer


@dataclass(frozen=True)
class World:
    """One shard. A word that was said stays: it may come late, twice or never."""

    has: tuple[bool, ...]
    asking: tuple[tuple[int, frozenset[int], frozenset[int]] | None, ...]  # number, of, pledged
    asks_left: tuple[int, ...]
    said: frozenset[Words]

    def peer(self, i: int, number: int, rules: type[Pledges]) -> Pledges:
        made = rules(number - 1)
        ask = self.asking[i]
        if ask is not None:
            made.ask([(KEY, [str(p) for p in sorted(ask[1])])], 0)
            for p in ask[2]:
                made.pledged(str(p), D, number, [0])
        return made


def put(values: tuple, i: int, value: object) -> tuple:
    return (*values[:i], value, *values[i + 1 :])


def steps(
    world: World, replicas: int, rules: type[Pledges], numbers: Callable[[int, int], int]
) -> Iterator[World]:
    """Whatever may happen next."""
    peers = range(len(world.has))
    for i in peers:
        ask = world.asking[i]
        mine = world.peer(i, ask[0] if ask else 1, rules)
        if ask is None and world.has[i] and world.asks_left[i]:
            number = numbers(i, world.asks_left[i])
            for of in combinations([p for p in peers if p != i], replicas):
                yield replace(
                    world,
                    asking=put(world.asking, i, (number, frozenset(of), frozenset())),
                    asks_left=put(world.asks_left, i, world.asks_left[i] - 1),
                    said=world.said | {(i, p, number, False) for p in of},
                )
        if ask is not None:
            yield replace(world, asking=put(world.asking, i, None))  # given up, or the peer was restarted
            if KEY in mine.secured():
                yield replace(world, has=put(world.has, i, False), asking=put(world.asking, i, None))
    for sender, to, number, is_answer in world.said:
        ask = world.asking[to]
        there = world.peer(to, ask[0] if ask else 1, rules)
        if is_answer and ask is not None:
            there.pledged(str(sender), D, number, [0])
            question = there.questions(0, 0)
            silent = {int(q.peer_id) for q in question}
            yield replace(world, asking=put(world.asking, to, (ask[0], ask[1], ask[1] - silent)))
        elif not is_answer and there.answer(D, [0], lambda _: world.has[to]):  # noqa: B023 - used at once
            yield replace(world, said=world.said | {(to, sender, number, True)})


def explore(
    copies: int, replicas: int, asks: int, rules: type[Pledges], own_numbers: bool = True
) -> tuple[int, list[World]]:
    """How many worlds can come about, and those with too few copies after one was given up."""

    def numbers(i: int, left: int) -> int:
        return 1 + left + 10 * i if own_numbers else 1

    start = World((True,) * copies, (None,) * copies, (asks,) * copies, frozenset())
    seen, edge, bad = {start}, [start], []
    while edge:
        world = edge.pop()
        if not all(world.has) and sum(world.has) < replicas:
            bad.append(world)
            continue
        for following in steps(world, replicas, rules, numbers):
            if following not in seen:
                seen.add(following)
                edge.append(following)
    return len(seen), bad


@pytest.mark.parametrize(("copies", "replicas", "asks"), [(2, 1, 3), (3, 1, 1), (3, 2, 1)])
def test_in_no_schedule_fewer_copies_stay_than_are_wanted(copies: int, replicas: int, asks: int) -> None:
    worlds, bad = explore(copies, replicas, asks, Pledges)
    assert worlds > 1000 and not bad


class Obliging(Pledges):
    """Pledges also for what it asks about itself."""

    def answer(self, dataset: bytes, shards, has):  # type: ignore[no-untyped-def]
        return tuple(shard for shard in shards if has(shard))


def test_a_peer_that_pledges_what_it_asks_about_loses_the_last_copy() -> None:
    assert explore(2, 1, 1, Obliging)[1]


def test_three_in_a_ring_lose_it_too() -> None:
    assert any(not any(world.has) for world in explore(3, 1, 1, Obliging)[1])


def test_asks_that_share_a_number_lose_the_last_copy() -> None:
    assert explore(2, 1, 2, Pledges, own_numbers=False)[1]


# -- what is said -----------------------------------------------------------------------------------------------------


def test_only_what_is_due_and_unanswered_is_asked() -> None:
    one = Pledges(6)
    one.ask([((D, 0), ["b", "c"]), ((D, 3), ["c"])], 0)
    one.ask([((b"e" * 16, 1), ["b"])], 0)
    said = one.questions(100, 0)
    assert said == [
        Question(peer_id="b", dataset=D, number=7, shards=(0,)),
        Question(peer_id="c", dataset=D, number=7, shards=(0, 3)),
        Question(peer_id="b", dataset=b"e" * 16, number=8, shards=(1,)),
    ]
    assert one.questions(100, 99) == [] and one.open_count() == 3
    one.pledged("c", D, 7, [0, 3, 9])
    assert one.secured() == [(D, 3)] and one.open_count() == 2 and one.asked_about(D) == [0, 3]
    assert [(q.peer_id, q.shards) for q in one.questions(100, 100)] == [("b", (0,)), ("b", (1,))]


def test_a_question_fits_its_message() -> None:
    one = Pledges(0)
    one.ask([((D, shard), ["b"]) for shard in range(MOST_SHARDS + 5)], 0)
    first, second = one.questions(100, 0)
    assert (len(first.shards), len(second.shards)) == (MOST_SHARDS, 5)


@pytest.mark.parametrize(
    ("peer_id", "dataset", "number"), [("x", D, 1), ("b", b"e" * 16, 1), ("b", D, 0), ("b", D, 2)]
)
def test_a_pledge_of_another_or_to_another_ask_counts_for_nothing(
    peer_id: str, dataset: bytes, number: int
) -> None:
    one = pledges((0, ("b",)))
    one.pledged(peer_id, dataset, number, [0])
    assert one.secured() == []
    one.pledged("b", D, 1, [0])
    assert one.secured() == [KEY]


def test_the_same_ask_goes_on_and_another_begins_anew() -> None:
    one = pledges((0, ("b",)))
    one.pledged("b", D, 1, [0])
    one.ask([(KEY, ["b"])], 5)
    assert one.secured() == [KEY]
    one.ask([(KEY, ["b", "c"])], 5)
    one.pledged("b", D, 1, [0])
    assert one.secured() == []
    with pytest.raises(ValueError, match="of nobody"):
        one.ask([(KEY, [])], 5)


def test_a_pledger_that_went_or_lives_anew_is_asked_anew() -> None:
    one = pledges((0, ("b", "c")), (1, ("c",)))
    one.gone("b")
    assert one.asked_about(D) == [1]
    one.pledged("b", D, 1, [0])
    assert one.secured() == []


def test_only_open_asks_grow_old() -> None:
    one = pledges((0, ("b",)), (1, ("b",)))
    one.pledged("b", D, 1, [0])
    one.withdraw_older(100, 99)
    assert one.asked_about(D) == [0, 1]
    one.withdraw_older(100, 100)
    assert one.asked_about(D) == [0]
    one.withdraw(KEY)
    one.withdraw(KEY)
    assert one.asked_about(D) == [] and KEY not in one


def test_nothing_is_pledged_that_is_asked_about_or_not_there() -> None:
    one = pledges((0, ("b",)))
    assert one.answer(D, [0, 1, 2], lambda shard: shard != 2) == (1,)
    one.withdraw(KEY)
    assert one.answer(D, [0, 1, 2], lambda shard: shard != 2) == (0, 1)
