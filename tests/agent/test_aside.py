"""Standing aside where one way is broken: when, for how long, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent import aside as aside_module
from p2p_dmc.agent.aside import FIRST_S, MOST_S, TRY_S, Aside
from p2p_dmc.wire.trainer_messages import Park


class World:
    """One run as far as it matters here, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.done: list[str] = []
        agreement = SimpleNamespace(cut_off_from=(), rejoin=lambda now: "rejoins")
        self.run = SimpleNamespace(
            agreement=agreement,
            rounds=None,
            desk=SimpleNamespace(up=True),
            waiting="",
            act=self.done.append,
            event=lambda event, **facts: self.done.append(f"{event} {facts['seconds']:g} {facts['missed']}"),
            views=SimpleNamespace(frozen=lambda: self.done.append("frozen")),
            withdraw=lambda reason: self.done.append("withdraws"),
            to_trainer=lambda message: self.done.append(type(message).__name__),
        )
        self.aside = Aside(cast(Any, self.run))

    def miss(self, *peers: str) -> None:
        self.run.agreement.cut_off_from = peers

    def after(self, seconds: float) -> bool:
        self.now_s += seconds
        return self.aside.look()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(aside_module.time, "monotonic", lambda: made.now_s)
    yield made


def test_it_says_whom_it_misses_withdraws_and_tries_again(world: World) -> None:
    assert not world.after(0) and not world.done
    world.miss("b")
    assert world.after(1)
    assert world.done == [f"stands_aside {FIRST_S:g} ['b']", "frozen", "withdraws", Park.__name__]
    assert "waiting for word of b" in world.run.waiting and "again in 10 s" in world.run.waiting
    world.miss()
    assert world.after(FIRST_S - 1) and len(world.done) == 4
    assert not world.after(1) and world.done[4:] == ["rejoins"]


def test_each_time_in_a_row_is_longer(world: World) -> None:
    for seconds in (10, 20, 40, 80, 160, 320, 640, 1280, MOST_S, MOST_S):
        world.miss("b")
        assert world.after(1)
        assert f"again in {seconds:g} s" in world.run.waiting
        world.miss()
        assert not world.after(seconds)


def test_trying_in_vain_counts_as_another_time(world: World) -> None:
    """The others let it learn, and none of their reductions with it goes well."""
    world.miss("b")
    world.after(1)
    world.miss()
    assert not world.after(FIRST_S) and not world.after(TRY_S - 1)
    assert world.after(1)
    assert world.done[5] == f"stands_aside {2 * FIRST_S:g} ['b']"


def test_a_round_ends_all_that(world: World) -> None:
    world.miss("b")
    world.after(1)
    world.miss()
    assert not world.after(FIRST_S)
    world.aside.trains()
    assert not world.after(TRY_S + 1)
    world.miss("b")
    assert world.after(1) and "again in 10 s" in world.run.waiting


def test_whoever_was_let_in_does_not_try_in_vain(world: World) -> None:
    """As a learner it may need long; as a voter it may wait for its first round."""
    world.miss("b")
    world.after(1)
    world.miss()
    assert not world.after(FIRST_S)
    world.run.rounds = cast(Any, SimpleNamespace())
    assert not world.after(TRY_S - 1) and not world.after(TRY_S + 1)
    world.run.rounds = None
    assert not world.after(TRY_S + 1)


def test_a_trainer_that_dies_meanwhile_comes_back_to_a_peer_that_still_stands_aside(world: World) -> None:
    """And the peer does not come back without one."""
    world.miss("b")
    world.after(1)
    world.miss()
    world.run.desk.up = False
    assert world.after(FIRST_S + 5) and world.aside.stands and "rejoins" not in world.done
    world.run.desk.up = True
    assert not world.after(1) and not world.aside.stands and world.done[-1] == "rejoins"
    world.run.desk.up = False
    assert not world.after(TRY_S + 1)


def test_before_there_is_anything_to_agree_on_nobody_stands_aside(world: World) -> None:
    world.run.agreement = cast(Any, None)
    assert not world.after(100) and not world.done
