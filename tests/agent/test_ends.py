"""Whose word is believed that the run is finished, and what that makes of whoever did not see it (DESIGN.md 6)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from p2p_dmc.agent.entering import run_meta as told_of
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions
from p2p_dmc.agent.state import Held, SlotPool
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import AgreementSettings, Promises, Replaced, StateRef
from p2p_dmc.core.ledger import Ledger, Stretch
from p2p_dmc.core.quorum import Quorum
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire.messages import JoinRequest, RunClosed
from tests.agent.helpers import (
    NUMEL,
    PARAMETERS,
    Around,
    member,
    payload,
    peer,
    record,
    run_meta,
    state,
    surroundings,
    view_of,
)

MINE, OTHER, NEXT = b"h" * 16, b"o" * 16, b"n" * 16
WAIT_S = 20.0
END = (3, 9)


def core_of(promises: Promises) -> Agreement:
    return Agreement(
        me=member(1),
        quorum=Quorum.MAJORITY,
        promises=promises,
        completed=StateRef(lineage=(0, 0), digest=b"s" * 16),
        payload=lambda: b"",
        rng=random.Random(1),
        settings=AgreementSettings(),
        now_ms=0,
    )


class Here:
    """A peer whose trainer is ready. It adopts what it believes in at once."""

    def __init__(self, root: Path, promises: Promises, at: tuple[int, int] = (1, 4)) -> None:
        self.around: Around = surroundings(root)
        run = self.run = Run("r", RunOptions(), self.around.services)
        slots = run.keeper.slots = SlotPool(self.around.services.memory, NUMEL)
        run.keeper.parameters = PARAMETERS
        run.keeper.hold(state(slots, at))
        run.desk.up, run.agreement = True, core_of(promises)
        self.final = self._state(done=True)
        run.keeper.adopt = self._adopt  # type: ignore[method-assign, assignment]
        run.desk.connected(lambda message: None)

    def _state(self, *, done: bool) -> Held:
        ledger = Ledger.start(b"d" * 16, [4], 1, 1)
        ledger = ledger.advance([Stretch(shard=0, lo=0, hi=4)]) if done else ledger
        assert ledger.done is done
        return state(self.run.keeper.pool(), END, 2.0, ledger)

    async def _adopt(self, ref: StateRef, *_: object, **__: object) -> Held:
        assert ref.digest == self.final.ref.digest
        self.run.keeper.remember(self.final)
        return self.final

    def hear(self, number: int, history: bytes, lineage: tuple[int, int] = END) -> str:
        """How the run has ended here once it has heard that word, which may be refused."""

        async def heard() -> None:
            word = RunClosed(
                lineage=lineage,
                digest=self.final.ref.digest,
                finished=True,
                history=history,
                view_id=b"",
                answer=False,
            )
            self.run.members.message(peer(number), word)
            while len(self.run._tasks):
                await asyncio.sleep(0.001)

        asyncio.run(asyncio.wait_for(heard(), WAIT_S))
        return self.run.end.outcome


def in_a_view(root: Path) -> Here:
    """Peer 1, in the newest view that it knows, with 2 and 3."""
    here = Here(
        root, Promises(n=1, history=MINE, replaced=(Replaced(history=OTHER, lineage=(1, 2), evicted=True),))
    )
    here.run.view = view_of([payload()] * 3)
    return here


BELIEVED: dict[str, tuple[int, bytes, dict[str, Any] | None]] = {
    "a member of the view": (2, MINE, {"history": MINE}),
    "a member whose news is on its way": (2, MINE, {}),
    "one that came since": (4, MINE, {"history": MINE}),
    "a member that was started again and has come back": (2, MINE, {"history": MINE, "boot": 2}),
}
STRANGERS: dict[str, tuple[int, bytes, dict[str, Any] | None]] = {
    "another founding": (4, b"x" * 16, {"history": b"x" * 16}),
    "another founding, in our name": (4, MINE, {"history": NEXT}),
    "one that knows the run's name": (4, MINE, {}),
    "one that only holds shards": (4, MINE, None),
    "nobody that is known": (9, MINE, None),
    "a member, started again, that knows nothing": (2, MINE, {"boot": 2}),
    "a member, of another founding": (2, NEXT, {"history": MINE}),
    "one that was evicted": (4, OTHER, {"history": OTHER}),
    "one of those that went on without this peer": (4, NEXT, {"history": NEXT, "replaced": (MINE,)}),
    "of no founding": (2, b"", {"history": MINE}),
}


def meets(here: Here, number: int, meta: dict[str, Any] | None) -> None:
    if number < 9:
        here.around.members.append(record(number, *([run_meta(**meta)] if meta is not None else [])))


@pytest.mark.parametrize("who", BELIEVED)
def test_the_run_is_finished_when_one_says_so_that_is_in_it(tmp_path: Path, who: str) -> None:
    number, history, meta = BELIEVED[who]
    here = in_a_view(tmp_path)
    meets(here, number, meta)
    assert here.hear(number, history) == "finished"


@pytest.mark.parametrize("who", STRANGERS)
def test_a_strangers_word_is_dropped_and_counted(tmp_path: Path, who: str) -> None:
    number, history, meta = STRANGERS[who]
    here = in_a_view(tmp_path)
    meets(here, number, meta)
    with pytest.raises(RemoteProtocolError, match="finished"):
        here.hear(number, history)
    assert here.run.end.outcome == "" and here.run.agreement is not None


def test_an_earlier_round_of_ones_own_founding_is_no_end(tmp_path: Path) -> None:
    here = in_a_view(tmp_path)
    assert here.hear(2, MINE, lineage=(1, 3)) == ""


def test_a_run_is_not_finished_while_samples_are_left(tmp_path: Path) -> None:
    here = in_a_view(tmp_path)
    here.final = here._state(done=False)
    assert here.hear(2, MINE) == ""
    assert "samples are left" in here.around.named("adoption_failed")[0]["reason"]
    here.final = here._state(done=True)
    assert here.hear(2, MINE) == "finished", "the next word is heard"


# -- whoever comes late -------------------------------------------------------------------------------------------


def newcomer(root: Path, *others: dict[str, Any], courted: bytes = b"", at: tuple[int, int] = (0, 0)) -> Here:
    """Peer 1, which has never been in a view; peers 2, 3, ... are here, and say that of the run."""
    here = Here(root, Promises(courted=courted), at)
    for number, facts in enumerate(others, 2):
        meets(here, number, {"ready": False} | facts)
    return here


def test_a_newcomer_believes_those_that_began_the_run(tmp_path: Path) -> None:
    here = newcomer(
        tmp_path, {"history": MINE, "samples": 40}, {}, at=(7, 1)
    )  # of a history that was given up
    with pytest.raises(RemoteProtocolError):
        here.hear(3, MINE)
    assert here.hear(2, MINE) == "finished"
    told = [m for _, m, _ in here.around.sent if isinstance(m, RunClosed)]
    assert {m.history for m in told} == {MINE} and told_of(here.run).history == MINE, "others ask it, too"
    assert (here.run.folder / "final" / "model.safetensors").exists()


BEGAN = {
    "the one that more is counted in": (
        [{"history": MINE, "samples": 40}, {"history": OTHER, "samples": 30}],
        b"",
    ),
    "the one that took the other's place": (
        [{"history": MINE, "samples": 30, "replaced": (OTHER,)}, {"history": OTHER, "samples": 40}],
        b"",
    ),
    "the one that it was asked to join": (
        [{"history": MINE, "samples": 30}, {"history": OTHER, "samples": 40}],
        MINE,
    ),
    "another one, if nobody of that is here": (
        [{"history": MINE, "samples": 40}, {"history": OTHER, "samples": 30}],
        NEXT,
    ),
}


@pytest.mark.parametrize("which", BEGAN)
def test_of_two_foundings_a_newcomer_believes_the_end_of_one(tmp_path: Path, which: str) -> None:
    others, courted = BEGAN[which]
    here = newcomer(tmp_path, *others, courted=courted)
    with pytest.raises(RemoteProtocolError):
        here.hear(3, OTHER)
    assert here.hear(2, MINE) == "finished"


def test_an_evicted_peer_that_comes_back_after_the_end_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up what it has first, as it would do if the others still trained."""
    here = Here(tmp_path, Promises(n=3, history=MINE), (2, 5))
    run = here.run
    meets(here, 2, {"ready": False, "history": NEXT, "samples": 40, "replaced": (MINE,)})
    with pytest.raises(RemoteProtocolError):
        here.hear(2, NEXT)

    def ask() -> bool:
        run._enter()
        return any(isinstance(m, JoinRequest) for _, m, _ in here.around.sent)

    async def life() -> None:
        run.parked = True
        monkeypatch.setattr(run.entrance, "_retry_s", 0.0)
        while not ask():
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(life(), WAIT_S))
    assert here.around.named("history_given_up") and run.history == b""
    assert here.hear(2, NEXT) == "finished"


def test_a_fault_while_the_end_is_taken_over_leaves_the_next_word_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = in_a_view(tmp_path)
    meets(here, 2, {"history": MINE})

    async def broken(*_: object, **__: object) -> Held:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(here.run.keeper, "adopt", broken)
        assert here.hear(2, MINE) == "" and here.around.named("fault")
    assert here.hear(2, MINE) == "finished"


def test_whoever_has_ended_says_of_which_founding(tmp_path: Path) -> None:
    def said(end: Callable[[Run], object]) -> set[bytes]:
        here = in_a_view(tmp_path / str(random.random()))
        meets(here, 2, {"history": MINE})
        end(here.run)
        return {m.history for _, m, _ in here.around.sent if isinstance(m, RunClosed)}

    assert said(lambda run: run.end.tell(peer(2), run.keeper.current)) == {MINE}
    assert said(lambda run: (run.end.roll.stopped(cast(Any, run.keeper.current).ref, on_disk=True),
                             run.end.tell(peer(2)))) == {MINE}  # fmt: skip
