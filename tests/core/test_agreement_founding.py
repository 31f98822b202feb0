"""Founding where not everybody hears everybody: whoever alone misses somebody stands aside, and the others begin."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from p2p_dmc.core.agreement_messages import MemberId, Promises, Stopped
from p2p_dmc.core.quorum import Quorum, decide
from tests.core.agreement_cluster import UNREACHABLE, Cluster, state
from tests.core.test_quorum import view, word

Way = tuple[str, str]


def founding(names: str, cut: set[Way]) -> Cluster:
    cluster = Cluster(names)
    cluster.cut = cut
    cluster.found()
    return cluster


def stand_aside(cluster: Cluster, name: str) -> None:
    stopped = cluster[name].withdraw()
    for other in cluster.up():
        if other != name and (name, other) not in cluster.cut:
            cluster.do(other, cluster[other].withdrawn(stopped, cluster.now))
    cluster.deliver()


def begun(cluster: Cluster, *, within_ms: int) -> str:
    """Who stands aside until the others train together, in this order."""
    aside = ""
    end_ms = cluster.now + within_ms
    while cluster.now < end_ms:
        cluster.wait(100)
        for name in cluster.up():
            if cluster[name].cut_off_from:
                stand_aside(cluster, name)
                aside += name
    left = "".join(name for name in cluster.up() if name not in aside)
    cluster.standing(left)
    cluster.adopt(left)
    cluster.round(left)
    return aside


class TestBrokenWay:
    @pytest.mark.parametrize("way", permutations("abc", 2))
    def test_one_direction(self, way: Way) -> None:
        """The deaf one gives way, whoever it is; the first one later."""
        cluster = founding("abc", {way})
        assert begun(cluster, within_ms=18_000) == way[1]

    @pytest.mark.parametrize("pair", ["ab", "ac", "bc"])
    def test_both_directions(self, pair: str) -> None:
        """Of the two, the greater gives way."""
        a, b = pair
        cluster = founding("abc", {(a, b), (b, a)})
        assert begun(cluster, within_ms=18_000) == b

    def test_few_views_are_installed_before(self) -> None:
        """A founder that knows that the founding stands elsewhere drops nobody for silence."""
        cluster = founding("abc", {("b", "c"), ("c", "b")})
        cluster.wait(9_000)
        assert len(cluster.views["a"]) <= 3
        assert cluster["c"].cut_off_from == ()

    def test_a_founder_that_died_is_waited_for_by_nobody(self) -> None:
        cluster = founding("abc", {("b", "c")})
        cluster.wait(3_000)
        assert cluster["c"].frozen
        cluster.kill("b", UNREACHABLE)
        cluster.deliver()
        cluster.wait(3_000)
        cluster.standing("ac")

    def test_nobody_gives_way_without_whom_the_others_are_too_few(self) -> None:
        """a and b, of which one is away: c alone has what a majority needs."""
        cluster = founding("abc", {("b", "c")})
        cluster.wait(3_000)
        cluster.verdict("a", UNREACHABLE, by="c")
        cluster["c"]._attempt.stopped.clear()  # type: ignore[union-attr]
        cluster.wait(100)
        assert cluster["c"].cut_off_from == ()

    def test_who_comes_back_joins(self) -> None:
        cluster = founding("abc", {("b", "c"), ("c", "b")})
        assert begun(cluster, within_ms=18_000) == "c"
        cluster.cut = set()
        cluster.do("c", cluster["c"].rejoin(cluster.now))
        for _ in range(2):  # until then others tell of its farewell
            for name in "ab":
                cluster.do(name, cluster[name].join_requested("c", cluster.now))
            for name in "ab":
                cluster.do(name, cluster[name].at_barrier(cluster.now))
            cluster.deliver()
        assert cluster.standing("abc").ref.peers == ("a", "b")


class TestNumbersThatWereSaidBefore:
    def courted(self) -> Cluster:
        """x and y have said 2 in a founding of their own when a and b let them in under that number."""
        cluster = Cluster("ab").run("ab")
        for name in "xy":
            cluster.start(name, disk=Promises(n=1))
        cluster.down = set("ab")
        cluster.do("x", cluster["x"].found(("x", "y"), cluster.now))
        cluster.mail.clear()
        cluster.down = set("y")
        for name in "ab":
            cluster.do(name, cluster[name].join_requested("x", cluster.now))
        for name in "ab":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        cluster.down = set()
        cluster.wait(3_000)
        return cluster

    def test_an_installed_word_tells_its_history(self) -> None:
        """x said its word as a founder: whoever is of a third history knows nevertheless that it is none of theirs."""
        cluster = self.courted()
        cluster.standing("abxy")
        said = cluster["x"]._said
        assert said.history == b"" and said.minted == cluster["a"].history
        third = Cluster("uvz").run("uvz")
        third.do("z", third["z"].receive(said, third.now))
        third.standing("uvz")

    @pytest.mark.parametrize("installed", [False, True])
    def test_who_is_let_in_again_begins_to_wait_then(self, installed: bool) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.cut = {("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")}
        cluster.do("c", cluster["c"].at_barrier(cluster.now))
        cluster.wait(5_000)
        core = cluster["c"]
        attempt = core._attempt
        assert attempt is not None
        core.left_out = True  # a later view stood without it
        own, sender = attempt.words["c"], MemberId(peer_id="a", boot=1)
        cluster.do("c", core.receive(replace(own, sender=sender, installed=installed), cluster.now))
        assert not core.left_out and core._waits_since_ms == cluster.now
        cluster.wait(1_000)
        cluster.do("c", core.receive(replace(own, sender=sender, installed=True), cluster.now))
        assert core._waits_since_ms == cluster.now - 1_000, "it has waited since"


class TestFarewellsOfFounders:
    """What a founder said alone stops nobody once it has withdrawn, unless it began something there."""

    def words(self, **farewell: object) -> list[object]:
        alone = view(1, "a")
        gone = Stopped(
            **(
                {"member": MemberId(peer_id="a", boot=1), "n": 2, "base": None, "pending": (alone,)}
                | {"withdrawn": True}
                | farewell
            )
        )  # type: ignore[arg-type]
        said = [
            word(name, state(0, 0), pending=(view(1, name), view(1, f"a0 {name}")), seen=(gone,), joined=False)
            for name in "bc"
        ]
        return [replace(one, history=b"") for one in said]

    def test_they_go_on(self) -> None:
        assert decide(self.words(), Quorum.MAJORITY).holds  # type: ignore[arg-type]

    def test_not_if_its_farewell_is_older(self) -> None:
        assert not decide(self.words(n=0), Quorum.MAJORITY).holds  # type: ignore[arg-type]

    def test_not_if_it_has_begun(self) -> None:
        assert not decide(self.words(base=view(1, "a")), Quorum.MAJORITY).holds  # type: ignore[arg-type]

    def test_not_if_it_was_another_incarnation(self) -> None:
        assert not decide(self.words(pending=(view(1, "a2"),)), Quorum.MAJORITY).holds  # type: ignore[arg-type]

    def test_nor_where_it_only_crashed(self) -> None:
        assert not decide(self.words(withdrawn=False), Quorum.MAJORITY).holds  # type: ignore[arg-type]
