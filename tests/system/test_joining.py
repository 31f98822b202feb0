"""Joining is free: peers that join a running one, die, fall silent or are lied to while they do (DESIGN.md section 8).

A joiner is first a learner, then a voter; whatever happens to it, the others go on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2p_dmc.agent.home import Home
from p2p_dmc.observe.phases import give
from tests.system import lying_peer
from tests.system.cluster import Cluster, Peer
from tests.system.scenario import (
    SILENCE_S,
    START_S,
    arguments,
    finish,
    go_on_without,
    obeys,
    start,
    struck,
    train_together,
)

LARGE = ("--hidden", "30000")
"""A model of some ranges: each donor is asked for some of them."""


def named_so_that_it_sorts(cluster: Cluster, name: str, where: str, other: Peer) -> Peer:
    """A new peer whose id is less than the other's ("first") or greater ("last")."""
    peer = cluster.peer(name)
    home = Home(peer.home)
    home.create()
    while (home.start_identity().peer_id < other.peer_id) != (where == "first"):
        (peer.home / "identity.json").unlink()
    return peer


def learned_first(peer: Peer, after: float = 0.0) -> None:
    """Each view that the peer installed since then had it as a learner, until one had it as a voter."""
    views = [v for v in peer.events("view") if v["time"] > after]
    roles = ["voter" if peer.peer_id in v["members"] else "learner" for v in views]
    first = roles.index("voter")
    assert first > 0 and set(roles[first:]) == {"voter"}, roles
    assert all(peer.peer_id in v["learners"] for v in views[:first]), views
    held = peer.events("adopted")[-1]["time"]
    assert views[0]["time"] < held < views[first]["time"], "it voted before it held the state"


def one_more(cluster: Cluster, seed: Peer, *script: str) -> Peer:
    """A joiner whose agent is up."""
    joiner = cluster.join("c", seed, *arguments(cluster, *script))
    cluster.listening(joiner)
    return joiner


def wait_for_its_vote(cluster: Cluster, peers: Sequence[Peer], after: float = 0.0) -> None:
    train_together(cluster, peers, after)
    learned_first(peers[-1], after)


def test_one_joins_a_pair_and_comes_back_after_a_pause(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    pair = start(cluster, seed, ["a", "b"])
    joiner = one_more(cluster, seed)
    peers = [*pair, joiner]
    wait_for_its_vote(cluster, peers)
    taught = [v for v in pair[0].events("view") if v["learners"] == [joiner.peer_id]]
    assert taught and sorted(taught[0]["members"]) == sorted(p.peer_id for p in pair)

    when = joiner.stop()
    go_on_without(cluster, pair, joiner.peer_id, when, limit_s=SILENCE_S)
    joiner.go_on()
    woken = time.time()
    wait_for_its_vote(cluster, peers, after=woken)
    finish(cluster, peers)


@pytest.mark.long
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_founder_alone_goes_on_when_its_joiner_does_not(cluster: Cluster, data: Path, where: str) -> None:
    """Killed in the middle of its download, which it begins while it waits to be let in; killed, then stopped when it

    is in the view and learns. The ids decide who comes first in a ring of two.
    """
    seed = cluster.seed(data, "--name", "tiny", name="a")
    [founder] = start(cluster, seed, ["a"])
    joiner = named_so_that_it_sorts(cluster, "b", where, founder)
    orders = obeys(cluster, joiner)
    give(orders, "adopting", "kill")
    cluster.join("b", seed, *arguments(cluster))
    cluster.listening(joiner)
    when = struck(cluster, orders, "adopting")
    cluster.wait(
        lambda: founder.events("member", peer_id=joiner.peer_id, state="DEAD"), "it is dead", START_S
    )
    rounds = len(founder.rounds())
    cluster.wait(lambda: len(founder.rounds()) > rounds + 1, "the founder trains", START_S)
    assert not any(joiner.peer_id in [*v["members"], *v["learners"]] for v in founder.events("view"))

    give(orders, "learning", "kill")
    cluster.wait(lambda: not joiner.running, "it is dead", START_S)
    cluster.restart(joiner)
    when = struck(cluster, orders, "learning")
    go_on_without(cluster, [founder], joiner.peer_id, when)

    give(orders, "learning", "stop")
    cluster.wait(lambda: not joiner.running, "it is dead", START_S)
    cluster.restart(joiner)
    when = struck(cluster, orders, "learning", times=2)
    go_on_without(cluster, [founder], joiner.peer_id, when, limit_s=SILENCE_S)
    joiner.go_on()
    woken = time.time()
    wait_for_its_vote(cluster, [founder, joiner], after=woken)
    assert not any(joiner.peer_id in v["members"] for v in founder.events("view") if v["time"] < woken)
    finish(cluster, [founder, joiner])


@pytest.mark.long
def test_four_join_at_once(cluster: Cluster, data: Path) -> None:
    """Two views are the least: they learn, then they vote. A round ends between any two requests at most once,

    for a round lasts longer than they take; so there are two batches at most, the second of which learns in the
    view in which the first begins to vote, and perhaps a learner that was a moment too late to vote: four views.
    """
    seed = cluster.seed(data, "--name", "tiny", name="a")
    slowly = ("--delay-ms", "400")
    start(cluster, seed, ["a"], script=slowly)
    gate = cluster.root / "gate"
    joiners = [
        cluster.join(n, seed, *arguments(cluster, *slowly, "--gate", str(gate), f"{gate}-{n}"))
        for n in ("b", "c", "d", "e")
    ]
    for joiner in joiners:
        cluster.listening(joiner)
    cluster.wait(lambda: len(list(cluster.root.glob("gate-*"))) == 4, "four scripts at the gate", START_S)
    opened = time.time()
    gate.touch()
    train_together(cluster, [seed, *joiners], after=opened)
    for joiner in joiners:
        learned_first(joiner)
    views = [v for v in seed.events("view") if v["time"] > opened]
    assert 2 <= len(views) <= 4, [(v["members"], v["learners"]) for v in views]
    finish(cluster, [seed, *joiners])


@pytest.mark.long
def test_a_donor_is_killed_while_it_serves(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    orders = obeys(cluster, cluster.peer("b"))
    a, b = start(cluster, seed, ["a", "b"], script=LARGE)
    give(orders, "serving", "kill")
    joiner = one_more(cluster, seed, *LARGE)
    when = struck(cluster, orders, "serving")
    go_on_without(cluster, [a], b.peer_id, when)
    wait_for_its_vote(cluster, [a, joiner])
    assert a.events("member", peer_id=b.peer_id, state="DEAD")
    finish(cluster, [a, joiner])


@pytest.mark.long
def test_a_donor_that_lies_is_replaced(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny", name="a")
    liar = named_so_that_it_sorts(cluster, "b", "first", seed)
    lies = cluster.root / "lies"
    liar.environment[lying_peer.ENV_LIES] = str(lies)
    liar.prefix = [sys.executable, lying_peer.__file__]
    a, b = start(cluster, seed, ["a", "b"], script=LARGE)
    lies.touch()
    joiner = one_more(cluster, seed, *LARGE)
    wait_for_its_vote(cluster, [a, b, joiner])
    assert lies.read_text().splitlines(), "it was not asked for anything"
    assert not joiner.events("adoption_failed")
    finish(cluster, [a, b, joiner])
