"""Whom an operator may evict, what is said of those that are not, and what it comes to."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent.agent import Agent
from p2p_dmc.agent.evicting import evict
from p2p_dmc.agent.requests import Requests
from p2p_dmc.agent.run_files import save_run
from p2p_dmc.core.membership import MemberState
from p2p_dmc.errors import UserError
from p2p_dmc.observe import reports
from tests.core.agreement_cluster import UNREACHABLE, Cluster

A, B, C, D = (letter * 32 for letter in "abcd")
NAMES = {A: "alice", B: "bob", C: "carol"}


def core_of(me: str, gone: str) -> Any:
    """This peer's agreement after the others have fallen silent; ids of one letter stand for whole ones."""
    cluster = Cluster("abc").run("abc")
    cluster.kill(gone, UNREACHABLE)
    cluster.wait(5_000)
    core = cluster[me]
    return SimpleNamespace(
        awaited=tuple(32 * p for p in core.awaited),
        evicted=(),
        asked=[],
        waiting_for=core.waiting_for,
        evict=lambda peer_id, now_ms: peer_id,
    )


class Office:
    """An agent with one run, as far as evicting goes."""

    def __init__(
        self, tmp_path: Path, states: dict[str, MemberState], gone: str = "ab", me: str = "c"
    ) -> None:
        self.events: list[tuple[str, str]] = []
        self.done: list[str] = []
        members = tuple(
            SimpleNamespace(peer_id=p, name=NAMES[p], address=f"tcp://{p[0]}:1", state=s, meta=b"")
            for p, s in states.items()
        )
        self.core = core_of(me, gone)
        save_run(tmp_path, names=NAMES)
        self.run = SimpleNamespace(
            name="train",
            end=SimpleNamespace(outcome=""),
            folder=tmp_path,
            services=SimpleNamespace(record=lambda p: next((m for m in members if m.peer_id == p), None)),
            agreement=self.core,
            view=object(),
            desk=SimpleNamespace(up=True),
            rounds=object(),
            waiting="",
            history=b"h" * 16,
            event=lambda kind, peer_id: self.events.append((kind, peer_id)),
            act=self.done.append,
        )
        self.agent = SimpleNamespace(peer_id=32 * me, runs={"train": self.run}, members=lambda: members)

    def ask(self, text: str, run: str = "", *, ask_only: bool = False) -> dict[str, Any]:
        agent = cast(Agent, self.agent)
        return evict(Requests(agent), agent, (text, run), ask_only=ask_only)

    def refusal(self, text: str, run: str = "") -> str:
        with pytest.raises(UserError) as refused:
            self.ask(text, run)
        assert not self.done and not self.events
        return str(refused.value)


def test_one_that_is_waited_for(tmp_path: Path) -> None:
    office = Office(tmp_path, {A: MemberState.DEAD, C: MemberState.ALIVE})
    for text in ("alice", A, A[:3]):
        assert office.ask(text, ask_only=True)["peer_id"] == A
    assert not office.done
    told = office.ask("alice")
    assert (told["run"], told["peer_id"], told["name"]) == ("train", A, "alice (aaaaaaaa)")
    assert told["history"] == (b"h" * 16).hex() and told["waits_for"] == ["bob (bbbbbbbb)"]
    assert office.done == [A] and office.events == [("evict_asked", A)]
    office.core.evicted = (A,)
    assert office.ask("bob")["waits_for"] == []


def test_one_that_nobody_has_heard_of_since_the_power_was_back(tmp_path: Path) -> None:
    """Its name comes from the run's own memory of its peers."""
    office = Office(tmp_path, {C: MemberState.ALIVE})
    assert office.ask("bob")["peer_id"] == B


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        ("carol", None, "carol (cccccccc) is the peer that you ask; `dmc-peer leave` makes it leave"),
        ("alice", MemberState.ALIVE, "alice (aaaaaaaa) is here; `dmc-peer leave aaaaaaaa` makes it leave"),
        ("alice", MemberState.SUSPECT, "silent for a moment only; ask again in a few seconds"),
        ("nobody", None, "'nobody' is no peer; give a name or the start of an id: "),
    ],
)
def test_one_that_is_not_gone(tmp_path: Path, text: str, state: MemberState | None, words: str) -> None:
    states = {C: MemberState.ALIVE} | ({A: state} if state is not None else {})
    said = Office(tmp_path, states).refusal(text)
    assert words in said
    if text == "nobody":
        assert {"alice aaaaaaaa", "bob bbbbbbbb"} <= set(said.partition(": ")[2].split(", "))


def test_one_that_nobody_waits_for(tmp_path: Path) -> None:
    office = Office(tmp_path, {A: MemberState.DEAD, C: MemberState.ALIVE}, gone="a")
    assert office.refusal("alice") == "run 'train' does not wait for alice (aaaaaaaa): it goes on"
    office.run.view = None
    office.run.agreement = None
    assert office.refusal("alice").endswith("its trainer starts")


def test_which_run(tmp_path: Path) -> None:
    office = Office(tmp_path, {A: MemberState.DEAD, C: MemberState.ALIVE})
    assert office.refusal("alice", "other").startswith("no run 'other' is under way here")
    office.agent.runs["second"] = SimpleNamespace(name="second", end=SimpleNamespace(outcome=""))
    assert office.refusal("alice") == "runs second, train are under way; choose one with --run"
    assert office.ask("alice", "train")["run"] == "train"
    office.done.clear(), office.events.clear()
    office.run.end.outcome = "stopped"
    del office.agent.runs["second"]
    assert office.refusal("alice").startswith("no run is under way here")


@pytest.mark.parametrize(("answer", "meant"), [("y\n", True), ("Yes\n", True), ("\n", False), ("", False)])
def test_a_person_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, meant: bool
) -> None:
    said = io.StringIO(answer)
    said.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", said)
    call: Callable[[], None] = lambda: reports._confirm("It is lost")  # noqa: E731
    if meant:
        call()
    else:
        with pytest.raises(UserError, match="nobody was evicted"):
            call()
    assert capsys.readouterr().err == "It is lost.\nGo on? [y/N] "


def test_a_program_has_to_say_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(UserError, match="say --yes if that is meant"):
        reports._confirm("It is lost")
