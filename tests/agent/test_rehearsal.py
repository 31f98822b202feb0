"""A dry run names the peers that are there, and about what each of them would hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.agent import rehearsal
from p2p_dmc.agent.client import NoAnswerError
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.rehearsal import THIS, known_peers, say_plan
from p2p_dmc.core.placement import StoringPeer
from p2p_dmc.data.formats import scan
from p2p_dmc.data.seeding import Plan, plan_data_sets
from p2p_dmc.observe.console import Console
from tests.data.helpers import small_tree

OPTIONS = {"leave_when_replicated": False, "capacity": 100 << 30, "domain": "", "peer_name": "mine"}


def member(number: int, **changes: Any) -> dict[str, Any]:
    facts = {"peer_id": f"{number}" * 32, "name": f"p{number}", "state": "ALIVE", "weight": 100, "domain": ""}
    return {**facts, **changes}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_data_sets(scan(small_tree(tmp_path / "tree")), name="small", max_shard_size=10_000)[0]


def asked(monkeypatch: pytest.MonkeyPatch, members: Sequence[dict[str, Any]] | None) -> list[tuple[str, ...]]:
    questions: list[tuple[str, ...]] = []

    def ask(addresses: Sequence[str], command: str, *, timeout_s: float) -> dict[str, Any]:
        questions.append(tuple(addresses))
        if members is None:
            raise NoAnswerError("nobody")
        return {"members": members}

    monkeypatch.setattr(rehearsal, "ask", ask)
    return questions


def test_live_peers_that_store_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [member(1), member(2, weight=7, domain="rack1"), member(3, state="DEAD"), member(4, weight=0)]
    home = Home(tmp_path / "home")
    home.create()
    home.remember_peers({"tcp://127.0.0.1:9": "x"})
    questions = asked(monkeypatch, others)
    peers = known_peers(home, ("tcp://127.0.0.1:8",), OPTIONS)
    assert questions == [("tcp://127.0.0.1:8", "tcp://127.0.0.1:9")]
    assert {(p.peer_id, p.weight, p.domain): name for p, name in peers.items()} == {
        ("1" * 32, 100, ""): "p1",
        ("2" * 32, 7, "rack1"): "p2",
        (THIS, 100, ""): "mine",
    }
    leaving = known_peers(home, (), {**OPTIONS, "leave_when_replicated": True})
    assert THIS not in {peer.peer_id for peer in leaving}


def test_an_agent_of_the_home_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    monkeypatch.setattr(Home, "running_agent", lambda self: {"endpoint": "ipc:///x"})
    monkeypatch.setattr(
        rehearsal, "ask_local", lambda endpoint, command, timeout_s: {"members": [member(1), member(2)]}
    )
    assert sorted(known_peers(home, (), OPTIONS).values()) == ["p1", "p2"]  # it is one of them


def test_each_peers_part_is_said(plan: Plan, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    peers = {StoringPeer(peer_id=str(i) * 32, weight=1 + i, domain=""): f"p{i}" for i in range(4)}
    with Console(as_json=True) as console:
        say_plan(plan, 2, peers, console)
    out, err = capfdbinary.readouterr()
    import json

    [fact] = [json.loads(line) for line in out.splitlines()]
    assert sum(part["shards"] for part in fact["holders"]) == 2 * len(plan.shards)
    assert sum(part["bytes"] for part in fact["holders"]) == 2 * sum(plan.shard_sizes())
    said = err.decode().splitlines()
    assert [line.split(" would hold about ")[0] for line in said[1:]] == [
        f"  p{i} ({str(i) * 8})" for i in range(4)
    ]


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ({}, "no other peer is known, and this machine would wait for some to take it"),
        (
            {StoringPeer(peer_id=THIS, weight=1, domain=""): "mine"},
            "1 more peer would have to join for 2 replicas; until then this machine holds all of it",
        ),
    ],
)
def test_with_too_few_peers_it_says_what_would_happen(
    plan: Plan, capfd: pytest.CaptureFixture[str], peers: dict[StoringPeer, str], said: str
) -> None:
    with Console(as_json=False) as console:
        say_plan(plan, 2, peers, console)
    assert capfd.readouterr().err.splitlines()[1:] == [said]


def test_the_homes_are_asked_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there: a second at most for each, and this machine alone."""
    home = Home(tmp_path / "home")
    assert known_peers(home, (), OPTIONS) == {StoringPeer(peer_id=THIS, weight=100, domain=""): "mine"}
    assert not home.root.exists()
