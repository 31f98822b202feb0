"""Founding where not everybody hears everybody: whoever alone misses somebody stands aside, and the others begin."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from p2p_dmc.core.agreement_messages import MemberId, Promises, Surpassed
from tests.core.agreement_cluster import REACHABLE, UNREACHABLE, Cluster

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
    @pytest.mark.parametrize("way", sorted(permutations("abc", 2)))
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
        cluster = founding("abc", {("b", "c"), ("c", "b")})
        cluster.wait(9_000)
        assert len(cluster.views["a"]) == 1
        assert cluster["c"].cut_off_from == ()

    def test_a_founder_that_died_is_waited_for_by_nobody(self) -> None:
        cluster = founding("abc", {("b", "c")})
        cluster.wait(3_000)
        assert cluster["c"].frozen
        cluster.kill("b", UNREACHABLE)
        cluster.deliver()
        cluster.wait(3_000)
        cluster.standing("ac")

    @pytest.mark.parametrize("first", ["a", "c"])
    def test_a_founder_that_is_restarted_at_once_is_left_out(self, first: str) -> None:
        """Its agent runs and has no trainer: it says nothing. c has never heard it; a or c hears first of its boot."""
        cluster = founding("abc", {("b", "c")})
        cluster.wait(1_000)
        assert cluster["c"].frozen and not cluster["a"].frozen
        del cluster.cores["b"]
        for name in sorted("ac", key=lambda name: name != first):
            cluster.do(name, cluster[name].verdict("b", 2, REACHABLE, cluster.now))
            cluster.deliver()
            cluster.wait(700)
        cluster.wait(5_000)
        cluster.standing("ac")

    def test_who_votes_is_not_dropped_for_silence(self) -> None:
        """It may hear the others, and take one that dies for one that has promised nothing without it."""
        cluster = founding("abc", {("b", "a")})
        stand_aside(cluster, "c")
        cluster.wait(9_000)
        assert cluster["a"].frozen and not cluster.views["a"]
        assert "b" in cluster["a"]._attempt.members  # type: ignore[union-attr]

    def test_whom_nobody_has_heard_is(self) -> None:
        cluster = founding("abc", {("b", "a"), ("b", "c")})
        cluster.wait(1_000)
        cluster.standing("ac")

    def test_nobody_is_dropped_for_silence_with_whom_a_set_was_said(self) -> None:
        """b has installed what a said with it; a follows c to a greater number, and hears nothing of b meanwhile."""
        cluster = Cluster("ab")
        cluster.start("c", disk=Promises(n=1))
        cluster.verdict("b", REACHABLE, by="ac")
        cluster.down = {"c"}
        cluster.do("b", cluster["b"].found(("a", "b", "c"), cluster.now))
        cluster.deliver(hops=2)
        cluster.cut = set(permutations("abc", 2)) - {("a", "c"), ("c", "a")}
        cluster.down = set()
        cluster.mail.clear()
        cluster.do("c", cluster["c"].found(("a", "b", "c"), cluster.now))
        cluster.deliver(hops=1)
        attempt = cluster["a"]._attempt
        assert attempt is not None and attempt.n == 2 and sorted(attempt.voters) == ["a", "c"]
        stand_aside(cluster, "c")
        cluster.wait(9_000)
        assert cluster["a"].frozen and "b" in cluster["a"]._attempt.members  # type: ignore[union-attr]

    @pytest.mark.parametrize("boot", [1, 2])
    def test_who_started_again_does_not_vote_in_the_next_attempt_unasked(self, boot: int) -> None:
        cluster = founding("abc", {("c", "a")})
        cluster.do("a", cluster["a"].verdict("b", boot, REACHABLE, cluster.now))
        word = Surpassed(sender=MemberId(peer_id="c", boot=1), n=7)
        attempt = cluster["a"]._attempt
        assert attempt is not None and sorted(attempt.voters) == ["a", "b", "c"]
        cluster.do("a", cluster["a"].receive(word, cluster.now))
        attempt = cluster["a"]._attempt
        assert attempt is not None and attempt.n == 8
        assert sorted(attempt.voters) == (["a", "b"] if boot == 1 else ["a"]), "and c was not heard"
        assert sorted(attempt.candidates) == ["a", "b", "c"]

    def test_where_there_is_a_view_a_silent_newcomer_is_dropped(self) -> None:
        """Though it was a voter once, in a set that is still promised: it asks to be let in, and says no word."""
        cluster = Cluster("abc").run("abc")
        cluster.cut = {("c", "a"), ("c", "b")}
        cluster.verdict("c", UNREACHABLE, by="ab")
        cluster.deliver()
        cluster.standing("ab")
        assert any("c" in view.peers for view in cluster.disk["a"].pending)
        cluster.now += 20_000
        cluster.verdict("c", REACHABLE, by="ab")
        for name in "ab":
            cluster.do(name, cluster[name].join_requested("c", cluster.now))
        for name in "ab":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert cluster["a"].frozen
        cluster.wait(1_000)
        cluster.standing("ab")

    def test_in_a_reopening_nobody_stands_aside(self) -> None:
        """Who holds what is for the others to count on: all have a history."""
        cluster = Cluster("abc").run("abc")
        for name in "abc":
            done = cluster[name].completed
            cluster.do(name, cluster[name].checkpointed(done.lineage, cluster.now))
            cluster.start(name, completed=done)
        cluster.mail.clear()
        cluster.cut = {("c", "a")}
        cluster.found()
        cluster.wait(20_000)
        assert any(cluster.views[name] for name in "bc") and cluster["a"].cut_off_from == ()

    @pytest.mark.parametrize("crashes", [True, False])
    def test_one_that_is_known_from_hearsay_and_starts_again_is_dropped(self, crashes: bool) -> None:
        """Only x has heard c, and is gone. c's agent runs again, and has no trainer."""
        cluster = Cluster("abcx")
        cluster.verdict("c", REACHABLE)
        cluster.cut = set(permutations("abcx", 2)) - {
            ("a", "b"),
            ("b", "a"),
            ("b", "x"),
            ("x", "c"),
            ("c", "x"),
        }
        cluster.do("a", cluster["a"].found(("a", "b", "c", "x"), cluster.now))
        cluster.deliver()
        cluster.cut = {("c", "a"), ("c", "b"), ("a", "c"), ("b", "c"), ("a", "x")}
        cluster.now += 200
        cluster.do("x", cluster["x"].tick(cluster.now))
        cluster.deliver(hops=2)
        for name in "ab":
            attempt = cluster[name]._attempt
            assert attempt is not None and "c" in attempt.voters and "c" not in attempt.words
        if crashes:
            cluster.kill("x")
        else:
            stand_aside(cluster, "x")
            cluster.down.add("x")
        cluster.mail.clear()
        cluster.cut, cluster.down = set(), set("cx")
        cluster.verdict("c", REACHABLE, by="ab", boot=2)
        cluster.wait(3_000)
        cluster.standing("ab")

    def test_a_newcomer_believes_hearsay_of_who_is_gone(self) -> None:
        """It has been in no view, and hears d, which the others have lost."""
        cluster = Cluster("abd").run("abd")
        cluster.start("x")
        cluster.cut = {("a", "d"), ("b", "d"), ("d", "a"), ("d", "b")}
        for name in "ab":
            cluster.do(name, cluster[name].join_requested("x", cluster.now))
        for name in "ab":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        cluster.wait(300)
        cluster.verdict("d", UNREACHABLE, by="ab")
        cluster.deliver()
        cluster.wait(1_000)
        assert cluster.standing("abx").ref.peers == ("a", "b")

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


class TestWhatWasSaidAlone:
    """It binds nobody once its author takes no part, for it never enters that; what others may have installed does."""

    def alone(self, cluster: Cluster, name: str) -> set[int]:
        return {view.view_epoch for view in cluster.disk[name].pending if view.peers == (name,)}

    def test_a_founders_farewell_leaves_it_out(self) -> None:
        cluster = founding("abc", {("b", "a")})
        assert self.alone(cluster, "a") == {1}
        stopped = cluster["a"].withdraw()
        assert stopped.pending and all(view.peers != ("a",) for view in stopped.pending)
        assert any(view.peers == ("a", "b", "c") for view in stopped.pending)

    def test_a_crash_does_not(self) -> None:
        """Whoever dies may have been about to begin alone, and nobody who was left out knows."""
        cluster = founding("abc", {("b", "a")})
        cluster.kill("a")
        records = cluster["b"]._book.records.values()
        assert any(view.peers == ("a",) for record in records for view in record.pending)

    def test_what_it_installed_alone_stays(self) -> None:
        cluster = Cluster("a")
        cluster.found()
        cluster.standing("a")
        assert [view.peers for view in cluster["a"].withdraw().pending] == [("a",)]

    def test_of_those_who_all_withdrew_nobody_goes_on_alone(self) -> None:
        """No round is complete: no two of them have more than the other, and each has given its vote back."""
        cluster = founding("abc", set())
        cluster.adopt("abc")
        farewells = {name: cluster[name].withdraw() for name in "abc"}
        for name in "abc":
            for other in set("abc") - {name}:
                cluster.do(name, cluster[name].withdrawn(farewells[other], cluster.now))
        for name in "abc":
            cluster.do(name, cluster[name].rejoin(cluster.now))
            assert cluster[name].frozen
        cluster.deliver()
        cluster.wait(3_000)
        cluster.standing("abc")
