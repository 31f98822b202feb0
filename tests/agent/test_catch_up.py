"""A learner's way to its view's state: download and replay against a voter that is computed beside it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent import adoption as adoption_module
from p2p_dmc.agent import catch_up as catch_up_module
from p2p_dmc.agent.catch_up import MOST_FAILURES, MOST_KEPT, SHARE, CatchUp
from p2p_dmc.agent.learning import Learning
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import StateRef
from p2p_dmc.core.outer import parse
from p2p_dmc.errors import UserError
from tests.agent.helpers import NUMEL, PARAMETERS, state, surroundings
from tests.agent.learners import CHUNK_BYTES, Learner, Voters
from tests.agent.test_state import balanced

DEADLINE_S = 30.0


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE_S))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption_module, "RETRY_S", 0.002)


# -- bit for bit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learner", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_download_and_replay_give_what_the_voters_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, learner: int
) -> None:
    """Random rounds (nobody's weight, not finite, an epoch's end), view changes, a download that takes its time."""
    monkeypatch.setattr(catch_up_module, "GIVE_UP_S", 0.05)

    async def work() -> None:
        rng = random.Random(seed * 3 + learner)
        voters = Voters(tmp_path, rng, learner)
        for _ in range(rng.randrange(3)):
            voters.round(voters.keeper)
        voters.next_view()
        one = Learner(tmp_path, voters)
        one.donors.open.clear()
        for step in range(40):
            if step == 20 or rng.random() < 0.15:
                one.donors.open.set()
            if voters.done:
                break
            if rng.random() < 0.1 or one.catch_up.lost or not one.round():
                one.next_view()
            for _ in range(rng.choice((0, 0, 1, 5))):
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                await asyncio.sleep(0.002)
        one.donors.open.set()
        await one.until(lambda: one.is_caught_up() or one.catch_up.lost, "caught up")
        if one.catch_up.lost:  # its start was held no more
            one.next_view()
            await one.caught_up()
        one.check()
        await one.end()
        assert balanced(one.keeper)
        assert not one.hopeless and not [p for p in one.problems if "does not have it" not in p]

    run(work())


def test_every_state_since_the_start_is_told_once_and_in_order(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.donors.open.clear()
        for _ in range(3):
            one.round((2, 3))
        assert one.told == []
        one.donors.open.set()
        await one.caught_up()
        one.round((1, 0))
        await one.caught_up()
        assert [h.ref.lineage for h in one.told] == [(0, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


@pytest.mark.parametrize("outer", ["block(beta=0.3)", "nesterov(lr=0.7, momentum=0.9)"])
def test_the_outer_momentum_comes_with_the_state_and_is_replayed(tmp_path: Path, outer: str) -> None:
    """Rounds here have fewer than 8 steps: Nesterov's momentum stays as it is, block momentum does not."""

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1), outer=parse(outer))
        one = Learner(tmp_path, voters)
        began = voters.held.slot.read_bytes()
        for _ in range(4):
            one.round((2, 3))
        await one.caught_up()
        assert [h.ref.lineage for h in one.told] == [(0, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
        one.check()
        now = one.told[-1].slot.read_bytes()
        assert len(now) == 2 * 4 * NUMEL and now[: 4 * NUMEL] != began[: 4 * NUMEL]
        assert (now[4 * NUMEL :] == began[4 * NUMEL :]) is outer.startswith("nesterov")
        await one.end()
        assert balanced(one.keeper)

    run(work())


# -- before it is let in ----------------------------------------------------------------------------------------------


def test_what_is_offered_is_downloaded_before_the_view_and_told_in_it(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters, enters=False)
        for _ in range(3):  # it asks again and again
            one.catch_up.expect(voters.held.ref)
            await one.until(lambda: one.catch_up._held is not None, "it is here")
        asked = len(one.donors.asked)
        assert one.told == []
        before_s = time.monotonic()
        one.catch_up.enter(voters.view)
        assert one.catch_up.began_s >= before_s, "it counts from the view on"
        assert [h.ref for h in one.told] == [voters.held.ref] and len(one.donors.asked) == asked
        one.round((1, 2))
        await one.caught_up()
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_a_download_that_the_view_comes_into_goes_on_and_yields_there(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters, enters=False)
        one.addresses = ["one"]
        one.donors.open.clear()
        one.catch_up.expect(voters.held.ref)
        await one.until(lambda: one.donors.asked, "it has begun")
        one.catch_up.enter(voters.view)
        one.catch_up.reducing()
        one.donors.open.set()
        await one.until(lambda: any(part == 1 for _, part, _ in one.donors.asked), "the anchor's first range")
        for _ in range(50):  # turns of the loop, which is all that another range would need
            await asyncio.sleep(0)
        ranges = [a for a in one.donors.asked if a[1] == 1]
        assert ranges and one.told == [] and len(set(ranges)) == len(ranges) < 4
        one.catch_up.quiet()
        await one.caught_up()
        ranges = [a for a in one.donors.asked if a[1] == 1]
        assert len(ranges) == 4, "nothing is downloaded twice"
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_a_view_that_starts_from_another_state_than_was_offered(tmp_path: Path) -> None:
    """A round came between; or the same number is another history's."""

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters, enters=False)
        one.catch_up.expect(voters.held.ref)
        await one.until(lambda: one.keeper.by_lineage((0, 0)), "it is here")
        assert voters.round(one.keeper, (1, 1)) is not None
        one.catch_up.enter(voters.next_view())
        await one.caught_up()
        assert [h.ref.lineage for h in one.told] == [(1, 1)]
        one.check()
        await one.end()

    run(work())


def test_the_same_number_of_another_history_is_another_state(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters, enters=False)
        theirs = state(one.keeper.pool(), voters.held.ref.lineage, 5.0)
        one.keeper.remember(theirs)
        one.catch_up.expect(theirs.ref)
        await one.until(lambda: one.catch_up._held is not None, "it is here")
        one.catch_up.enter(voters.view)
        await one.caught_up()
        assert not one.problems and not one.catch_up.lost
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_an_offer_that_comes_to_nothing_is_no_reason_to_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up_module, "GIVE_UP_S", 0.01)

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters, enters=False)
        one.donors.gone = {"one", "two"}
        for _ in range(MOST_FAILURES + 1):
            one.catch_up.expect(voters.held.ref)
            assert not one.catch_up.lost
            await one.until(lambda: one.catch_up.lost, "nobody has it")
        assert not one.problems and not one.hopeless
        one.donors.gone = set()
        one.catch_up.enter(voters.view)
        await one.caught_up()
        one.catch_up.expect(StateRef(lineage=(9, 9), digest=b"9" * 16))
        assert one.catch_up.target == voters.view.start, "in a view, that says where it begins"
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_the_view_gives_a_download_that_began_before_it_time_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up_module, "GIVE_UP_S", 0.05)

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters, enters=False)
        tries: list[StateRef] = []
        adopt = one.keeper.adopt

        def counted(ref: StateRef, *rest: Any, **more: Any) -> Any:
            tries.append(ref)
            return adopt(ref, *rest, **more)

        monkeypatch.setattr(one.keeper, "adopt", counted)
        one.donors.gone = {"one", "two"}
        one.catch_up.expect(voters.held.ref)
        await one.until(lambda: one.donors.asked, "it has begun")
        one.catch_up.enter(voters.view)
        await one.until(lambda: len(tries) == 2, "it begins again")
        one.donors.gone = set()
        await one.caught_up()
        assert not one.problems and tries == [voters.view.start] * 2
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_states_that_are_offered_one_after_another_do_not_add_up(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters, enters=False)
        for number in range(6):
            assert voters.round(one.keeper, (1, 1)) is not None
            one.catch_up.expect(voters.held.ref)
            await one.until(lambda n=number: one.keeper.by_lineage((1, n + 1)), "it is here")
        assert len(one.keeper._recent) == 1
        one.catch_up.enter(voters.next_view())
        await one.caught_up()
        one.check()
        await one.end()

    run(work())


# -- bit for bit, one by one ------------------------------------------------------------------------------------------


def test_a_state_is_told_only_when_a_voter_has_said_its_digest(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        await one.caught_up()
        kept = voters.round(one.keeper, (2, 2))
        assert kept is not None
        one.catch_up.keep(kept)
        held = voters.held.ref.digest
        await one.until(lambda: one.keeper.by_lineage((1, 1)), "the round is replayed")
        assert [h.ref.lineage for h in one.told] == [(0, 0)]
        one.catch_up.heard((1, 1), held)
        assert [h.ref.lineage for h in one.told] == [(0, 0), (1, 1)]
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_a_round_that_comes_out_differently_is_lost_and_the_next_start_downloaded(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        await one.caught_up()
        kept = voters.round(one.keeper, (2, 2))
        assert kept is not None and kept.mean is not None
        kept.mean.write_bytes(b"\1" * 28)  # not what was reduced
        one.catch_up.keep(kept)
        one.catch_up.heard(kept.lineage, voters.held.ref.digest)
        await one.until(lambda: one.catch_up.lost, "it notices")
        assert one.problems == ["state (1, 1) came out differently here"]
        before = len(one.donors.asked)
        one.round((1, 1))  # of no use, and kept nowhere
        assert one.catch_up.lost and len(one.problems) == 1 and one.catch_up._kept == []
        one.next_view()
        assert not one.catch_up.lost
        await one.caught_up()
        assert len(one.donors.asked) > before
        assert [h.ref.lineage for h in one.told] == [(0, 0), (1, 2)]
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_a_state_that_came_out_differently_is_no_start(tmp_path: Path) -> None:
    """The next view starts from that very round."""

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        await one.caught_up()
        kept = voters.round(one.keeper, (2, 2))
        assert kept is not None and kept.mean is not None
        kept.mean.write_bytes(b"\1" * 28)
        one.catch_up.keep(kept)
        one.catch_up.heard(kept.lineage, voters.held.ref.digest)
        await one.until(lambda: one.catch_up.lost, "it notices")
        one.next_view()
        await one.caught_up()
        assert len(one.problems) == 1
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_what_is_replayed_goes_on_from_a_state_that_the_keeper_forgot(tmp_path: Path) -> None:
    """While its agreement is frozen the run takes nothing, and only a few states are remembered."""

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.takes = False
        await one.caught_up()
        pool = one.keeper.pool()
        for i in range(4):
            one.keeper.remember(state(pool, (7, i), value=100.0 + i))
        taken = [pool.take() for _ in range(6)]
        assert one.told[0].slot not in taken
        for slot in taken:
            slot.write_bytes(b"\2" * 28)
            pool.unpin(slot)
        one.round((2, 2))
        await one.caught_up()
        assert not one.problems
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


# -- views ------------------------------------------------------------------------------------------------------------


def test_a_download_goes_on_over_a_view_change(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.donors.open.clear()
        one.round((2, 3))
        await one.until(lambda: one.donors.asked, "it asks")
        target = one.catch_up.target
        one.next_view()
        one.round((1, 1))
        one.next_view()
        assert one.catch_up.target is target
        one.donors.open.set()
        await one.caught_up()
        assert [h.ref.lineage for h in one.told] == [(2, 2)]  # older ones are none of this view
        assert len({(part, offset) for _, part, offset in one.donors.asked}) == len(one.donors.asked)
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_rounds_beyond_the_next_views_start_are_dropped(tmp_path: Path) -> None:
    """The learner's part of a reduction came to its end, no voter's did: the round is not in the history."""

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.donors.open.clear()
        one.round((2, 3))
        ghost = replace(one.catch_up._kept[-1], round=2, mean=one.keeper.take_scratch())
        one.catch_up.keep(ghost)
        one.next_view()
        assert [kept.lineage for kept in one.catch_up._kept] == [(1, 1)] and not one.problems
        one.donors.open.set()
        await one.caught_up()
        one.round((1, 1))
        await one.caught_up()
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_a_replayed_round_that_no_voter_has_is_given_up(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        await one.caught_up()
        header = voters._headers((2, 2))
        view = voters.view
        mean = one.keeper.take_scratch()
        mean.write_bytes(bytes(28))
        one.catch_up.keep(catch_up_module.Kept(view=view, round=1, result=header, mean=mean))
        await one.until(lambda: one.keeper.by_lineage((1, 1)), "it is replayed")
        one.next_view()
        await one.until(lambda: len(one.told) == 2, "the start is held in the new view")
        assert [h.ref for h in one.told] == [voters.held.ref] * 2
        one.round((1, 1))
        await one.caught_up()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_another_start_breaks_a_download_off(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.donors.open.clear()
        await one.until(lambda: one.donors.asked, "it asks")
        voters.round(voters.keeper, (2, 2))  # without this peer
        one.next_view()
        assert one.catch_up.target == voters.view.start
        one.donors.open.set()
        await one.caught_up()
        assert [h.ref.lineage for h in one.told] == [(1, 1)]
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_who_holds_the_start_already_downloads_nothing(tmp_path: Path) -> None:
    """A peer that was only paused: what it has leads to the view's start."""

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        await one.caught_up()
        await one.end()
        asked = len(one.donors.asked)
        again = CatchUp(
            one.keeper,
            voters.learner,
            one.catch_up._policy,
            skip_lost=False,
            donors=lambda: one.addresses,
            on_held=one._held,
            on_problem=one.problems.append,
            on_hopeless=one.hopeless.append,
        )
        again.enter(voters.next_view())
        task = asyncio.ensure_future(again.run())
        await asyncio.sleep(0.01)
        assert len(one.told) == 2 and len(one.donors.asked) == asked
        task.cancel()
        again.close()
        await asyncio.gather(task, return_exceptions=True)
        assert balanced(one.keeper)

    run(work())


# -- too many rounds --------------------------------------------------------------------------------------------------


def test_more_rounds_than_can_be_kept_ask_for_another_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up_module, "SMALL_BYTES", 0)

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.donors.open.clear()
        await one.until(lambda: one.donors.asked, "it asks")
        for _ in range(MOST_KEPT):
            one.round((1, 1))
        assert not one.catch_up.lost
        one.round((1, 1))
        assert one.catch_up.lost and one.catch_up._kept == []
        one.donors.open.set()
        await asyncio.sleep(0.01)
        assert one.told == [], "a start that leads nowhere any more"
        one.next_view()
        one.round((1, 1))
        await one.caught_up()
        assert [h.ref.lineage for h in one.told] == [(1, 9), (2, 10)] and len(one.problems) == 1
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_of_a_small_model_more_rounds_are_kept(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.donors.open.clear()
        for _ in range(3 * MOST_KEPT):
            one.round((1, 0))
        one.donors.open.set()
        await one.caught_up()
        assert len(one.told) == 3 * MOST_KEPT + 1
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


# -- donors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("liars", [{"one"}, {"two"}])
def test_a_donor_that_lies_is_replaced(tmp_path: Path, liars: set[str]) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.donors.liars = liars
        one.round((2, 2))
        await one.caught_up()
        assert not one.problems
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_a_lie_that_comes_late_still_leaves_each_donor_a_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large download may take longer than a peer waits for one that does not begin."""
    monkeypatch.setattr(catch_up_module, "GIVE_UP_S", 0.02)

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.addresses = ["one", "two", "three", "four"]
        one.donors.liars = {"one", "two", "three"}
        one.donors.open.clear()
        await asyncio.sleep(0.05)
        one.donors.open.set()
        await one.caught_up()
        assert not one.problems
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_a_donor_that_goes_leaves_the_rest_to_the_others(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.donors.open.clear()
        await one.until(lambda: one.donors.asked, "it asks")
        one.donors.gone = {"one"}
        one.donors.open.set()
        await one.caught_up()
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_without_a_donor_it_is_lost_and_after_some_views_hopeless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up_module, "GIVE_UP_S", 0.01)

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.donors.gone = {"one", "two"}
        for failures in range(1, MOST_FAILURES + 1):
            assert not one.hopeless
            await one.until(lambda: one.catch_up.lost, "it gives up")
            asked = len(one.donors.asked)
            await asyncio.sleep(0.01)
            assert len(one.donors.asked) == asked, "nothing more is asked for in this view"
            assert len(one.problems) == failures
            one.next_view()
        assert len(one.hopeless) == 1 and "does not have it" in one.hopeless[0]
        one.donors.gone = set()
        await one.caught_up()
        assert one.catch_up._failures == 0  # in a row
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_no_room_for_a_state_is_hopeless_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)

        def full() -> None:
            raise UserError("no room")

        monkeypatch.setattr(one.keeper.pool(), "take", full)
        await one.until(lambda: one.hopeless, "it says so")
        assert one.hopeless == one.problems == ["no room"]
        await one.end()
        assert balanced(one.keeper)

    run(work())


# -- yielding ---------------------------------------------------------------------------------------------------------


def test_the_download_yields_to_a_reduction_but_for_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up_module, "SHARE", 2)

    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        gate, size = one.catch_up._gate, one.keeper.pool().size_bytes
        await one.caught_up()
        one.catch_up.reducing()
        for _ in range(size // 2 // 7):
            await asyncio.wait_for(gate(7), 1)  # its share
        waiting = asyncio.ensure_future(gate(7))
        await asyncio.sleep(0.03)
        assert not waiting.done()
        one.catch_up.quiet()
        await asyncio.wait_for(waiting, 1)
        one.catch_up.reducing()
        await asyncio.wait_for(gate(7), 1)  # the next round has a share of its own
        one.round((1, 1))
        for _ in range(10):
            await asyncio.wait_for(gate(7), 1)  # no reduction, no limit
        await one.end()

    run(work())


def test_a_reduction_holds_a_download_up_and_its_end_lets_it_go(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.catch_up.reducing()
        await asyncio.sleep(0.03)
        anchor = [offset for _, part, offset in one.donors.asked if part == 1]
        assert len(anchor) == 1 + one.keeper.pool().size_bytes // SHARE // (CHUNK_BYTES + 1)
        assert one.told == []
        one.round((1, 1))
        await one.caught_up()
        await one.end()
        assert balanced(one.keeper)

    run(work())


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(0, 40, 3))
def test_whenever_it_is_cancelled_the_pins_balance(tmp_path: Path, turns: int) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.round((1, 1))
        one.round((0, 0))
        one.round((2, 1))
        for _ in range(turns):
            await asyncio.sleep(0 if turns % 2 else 0.0002)
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_a_thread_that_is_left_behind_writes_into_no_other_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is cancelled while a round is replayed gives the slots back only when the thread is through."""

    async def work() -> None:
        entered, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*_: Any) -> bytes:
            loop.call_soon_threadsafe(entered.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)
            return b"d" * 16

        monkeypatch.setattr(catch_up_module, "advance", slow)
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        kept = voters.round(one.keeper, (1, 1))
        assert kept is not None and kept.mean is not None
        one.catch_up.keep(kept)
        await entered.wait()
        one.task.cancel()
        one.catch_up.close()
        await asyncio.gather(one.task, return_exceptions=True)
        assert one.keeper.pool()._pins[kept.mean] == 1
        go_on.set()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_a_round_under_replay_is_of_no_use_to_a_view_that_starts_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        entered, go_on = asyncio.Event(), asyncio.Event()
        loop, advance = asyncio.get_running_loop(), catch_up_module.advance

        def slow(anchor: Path, mean: Path, size: int, coefficients: tuple[float, ...]) -> bytes:
            loop.call_soon_threadsafe(entered.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)
            return advance(anchor, mean, size, coefficients)

        monkeypatch.setattr(catch_up_module, "advance", slow)
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        one.round((1, 1))
        await entered.wait()
        voters.round(voters.keeper, (2, 2))  # without this peer
        one.next_view()
        told = len(one.told)
        go_on.set()
        await one.caught_up()
        assert [h.ref.lineage for h in one.told[told:]] == [(1, 2)]
        assert one.keeper.by_lineage((1, 1)) is None
        one.round((1, 1))
        await one.caught_up()
        one.check()
        await one.end()
        assert balanced(one.keeper)

    run(work())


def test_a_view_of_the_same_start_leaves_what_is_held(tmp_path: Path) -> None:
    async def work() -> None:
        voters = Voters(tmp_path, random.Random(1))
        one = Learner(tmp_path, voters)
        await one.caught_up()
        one.next_view()
        assert [h.ref for h in one.told] == [voters.held.ref] * 2, "the new view has to hear of it, too"
        one.catch_up.heard((9, 9), b"x" * 16)  # of nothing that is here
        assert not one.catch_up.lost
        assert one.catch_up.target == StateRef(lineage=(0, 0), digest=voters.held.ref.digest)
        await one.end()
        assert balanced(one.keeper)

    run(work())


# -- the run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("behind", [True, False])
def test_a_state_is_the_runs_only_when_its_agreement_takes_it(
    tmp_path: Path, frozen: bool, accepted: bool, behind: bool
) -> None:
    """What a peer says of itself in an attempt is final: a state that comes after the freeze waits for the view."""
    around = surroundings(tmp_path)
    a_run = Run("r", RunOptions(), around.services)
    a_run.keeper.open(PARAMETERS)
    held = state(a_run.keeper.pool(), (3, 7))
    asked: list[str] = []

    def ready(what: str) -> SimpleNamespace:
        asked.append(what)
        return SimpleNamespace(
            trace=(), persist=None, sends=(), froze=False, installed=None, accepted=accepted
        )

    a_run.agreement = cast(
        Agreement,
        SimpleNamespace(
            promise_version=0,
            frozen=frozen,
            behind=behind,
            adopted=lambda ref, now: ready("adopted"),
            complete=lambda ref, now: ready("complete"),
        ),
    )
    a_run.views._catch_up = cast(CatchUp, SimpleNamespace(began_s=0.0))
    learning = SimpleNamespace(repeat=lambda: asked.append("repeat"), proved=False)
    a_run.learning = cast(Learning, learning)
    a_run.views._caught_up(held)
    assert asked == [] and a_run.keeper.current is None  # it may be that nobody can reduce with this peer
    learning.proved = True
    a_run.views.proved()
    taken = accepted and not frozen
    word = "adopted" if behind else "complete"
    assert asked == ([] if frozen else [word, "repeat"] if accepted and behind else [word])
    assert (a_run.keeper.current == held) == taken
    assert len(around.named("adopted")) == (taken and behind)
    assert a_run.keeper.pool()._pins[held.slot] == 1 + taken
