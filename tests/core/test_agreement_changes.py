"""Agreement, one behaviour at a time: joining, being left out, withdrawing, restarting, pausing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_dmc.core.agreement_messages import (
    UNKNOWN_BOOT,
    AgreementSettings,
    Cause,
    MemberId,
    Promises,
    Propose,
    Stopped,
    Surpassed,
    ViewRef,
)
from p2p_dmc.core.quorum import Quorum
from tests.core.agreement_cluster import REACHABLE, UNREACHABLE, Cluster, state


class TestGivenUp:
    """A history that is given up is not forgotten: what was promised there is said there, should it come to that."""

    def given_up(self) -> Cluster:
        """b and c go on without a, b completes a round with c that fails there, and c gives all of it up."""
        cluster = Cluster("abc").run("abc")
        cluster.do("c", cluster["c"].checkpointed((1, 1), cluster.now))
        assert cluster.disk["c"].pending == ()
        cluster.cut = {("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")}
        cluster.verdict("a", UNREACHABLE, "bc")
        cluster.deliver()
        cluster.standing("bc")
        cluster.round("b")
        cluster.do("c", cluster["c"].yield_history(state(0, 0, "c"), cluster.now))
        return cluster

    @pytest.mark.parametrize("boot", [1, 2])
    def test_it_helps_nobody_to_go_on_beside_the_others(self, boot: int) -> None:
        cluster = self.given_up()
        cluster.cut = {("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")}
        if boot == 2:
            cluster.start("c", boot=2)
        cluster.verdict("a", REACHABLE, "c")
        cluster.verdict("b", UNREACHABLE, "ac")
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        cluster.deliver()
        assert cluster["a"].frozen and cluster["c"].frozen
        assert "nobody here remembers view 2" in (cluster["a"].waiting_for() or "")

    def test_nor_in_a_founding_of_its_own(self) -> None:
        cluster = self.given_up()
        cluster.do("c", cluster["c"].found(("c",), cluster.now))
        assert "nobody here remembers view 2" in (cluster["c"].waiting_for() or "")

    def test_another_history_is_not_told(self) -> None:
        cluster = self.given_up()
        other = Cluster("x").run("x")
        other.cores["c"] = cluster["c"]
        other.views["c"] = []
        other.do("x", other["x"].join_requested("c", other.now))
        for _ in range(3):
            other.do("x", other["x"].at_barrier(other.now))
            other.deliver()
            other.wait(2_000)
        assert other["c"].history == other["x"].history
        assert [old.history for old in other.disk["c"].given_up] == [cluster["a"].history]

    def test_let_in_again_it_keeps_its_promises_there(self) -> None:
        cluster = self.given_up()
        promised = cluster.disk["c"].given_up[0].pending
        assert {view.view_epoch for view in promised} == {1, 2}
        cluster.do("b", cluster["b"].at_barrier(cluster.now))
        cluster.deliver()
        cluster.wait(2_000)
        assert cluster["c"].history == cluster["b"].history
        assert cluster.disk["c"].given_up == () and set(promised) <= set(cluster.disk["c"].pending)


class TestJoining:
    def test_a_request_waits_for_the_barrier(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.start("c")
        assert not cluster["a"].change_wanted
        ready = cluster.do("a", cluster["a"].join_requested("c", cluster.now))
        assert not ready.sends and cluster["a"].change_wanted
        for name in "ab":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert cluster.standing("abc").holders == cluster["a"].view.members[:2]  # type: ignore[union-attr]
        assert cluster["c"].history == cluster["a"].history
        assert not cluster["a"].change_wanted

    def test_what_a_newcomer_promised_elsewhere_stops_nobody(self) -> None:
        """n has founded with m, which is gone, and said greater numbers than a and b had."""
        cluster = Cluster("mn")
        for name in "nm":
            cluster.start(name, disk=Promises(n=6))
        cluster.found()
        assert {view.peers for view in cluster["n"].promises.pending} >= {("m", "n")}
        others = Cluster("ab").run("ab")
        others.start("n", boot=2, disk=replace(cluster.disk["n"], history=b"", n=9, base=None, known=None))
        for name in "ab":
            others.do(name, others[name].join_requested("n", others.now))
        for name in "ab":
            others.do(name, others[name].at_barrier(others.now))
        others.deliver()
        others.wait(200)
        assert others.standing("ab").start == state(1, 1), "without n"
        for name in "ab":
            others.do(name, others[name].join_requested("n", others.now))
        others.wait(1_000)
        assert not others["a"].change_wanted, "nor is it tried again at once"
        others.round("ab")
        others.wait(30_000, 500)
        for name in "ab":
            others.do(name, others[name].join_requested("n", others.now))
            others.do(name, others[name].at_barrier(others.now))
        others.deliver()
        assert others.standing("abn").ref.peers == ("a", "b"), (
            "later than all that it promised a round is complete"
        )

    def test_newcomers_that_promised_nothing_are_let_in(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("ab", UNREACHABLE)
        cluster.start("n")
        cluster.do("c", cluster["c"].at_barrier(cluster.now))
        cluster.deliver()
        cluster.do("c", cluster["c"].join_requested("n", cluster.now))
        cluster.deliver()
        attempt = cluster["c"]._attempt
        assert attempt is not None and "n" in attempt.members, "it is not what c waits for"

    def test_a_request_that_is_not_repeated_is_forgotten(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.do("a", cluster["a"].join_requested("c", cluster.now))
        cluster.wait(2_000)
        assert not cluster["a"].change_wanted

    def test_a_joiner_that_is_silent_is_left_out_within_a_moment(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].join_requested("d", cluster.now))
        for name in "abc":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.wait(600)
        assert cluster.standing("abc").stopped == ("d",)

    def test_an_outsider_raises_nothing(self) -> None:
        """It proposes a huge n; the standing view stands and tells it that it is left out."""
        cluster = Cluster("abc").run("abc")
        cluster.start("x", disk=Promises(n=500, history=cluster["a"].history))
        cluster.do("x", cluster["x"].found(("a", "b", "c", "x"), cluster.now))
        cluster.deliver()
        assert cluster.standing("abc").view_epoch == 1
        assert cluster["x"].left_out and cluster["x"].view is None

    def test_newcomers_that_lose_their_host_found_nothing(self) -> None:
        cluster = Cluster("a").run("a")
        for name in "cd":
            cluster.start(name)
            cluster.do("a", cluster["a"].join_requested(name, cluster.now))
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        cluster.cut = {("c", "d"), ("d", "c"), ("c", "a"), ("d", "a")}
        cluster.deliver()
        cluster.cut = {("c", "a"), ("d", "a")}
        cluster.verdict("a", UNREACHABLE, by="cd")
        cluster.wait(10_000)
        assert {cluster[name].view for name in "cd"} == {None}
        assert "nobody here has been in a view" in (cluster["c"].waiting_for() or "")


class TestLeftOut:
    def test_one_that_slept_through_a_change_learns_it_and_comes_back(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.standing("ab")
        cluster.down.clear()
        ready = cluster.do("c", cluster["c"].wants_change("collective failed", cluster.now, at_once=True))
        assert ready.sends
        cluster.deliver()
        assert cluster["c"].left_out and cluster["c"].frozen
        cluster.verdict("c", REACHABLE)
        for name in "ab":
            cluster.do(name, cluster[name].join_requested("c", cluster.now))
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        cluster.standing("abc")
        assert not cluster["c"].left_out

    def test_nobody_waits_at_the_barrier_of_a_view_that_others_have_left(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.down.clear()
        cluster.do("a", cluster["a"].foreign_header("c", 1, cluster.now))
        cluster.deliver()
        assert cluster["c"].left_out
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.down.clear()
        cluster.do("c", cluster["c"].foreign_header("a", 2, cluster.now))
        cluster.deliver()
        assert cluster["c"].left_out

    def test_one_may_be_let_in_again_under_a_number_it_had_said_already(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.down.clear()
        cluster.verdict("c", REACHABLE)
        cluster["c"].at_barrier(cluster.now)  # says 2
        ready = cluster["c"].receive(Surpassed(sender=cluster["b"].me, n=2), cluster.now)  # says 3
        cluster.do("c", ready)
        cluster.deliver()
        assert cluster["c"].left_out and cluster["c"].promises.n == 3
        for name in "ab":
            cluster.do(name, cluster[name].join_requested("c", cluster.now))
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert cluster.standing("abc").view_epoch == 3

    def test_a_laggard_installs_from_the_installed_words_of_others(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.cut = {("a", "c"), ("b", "c")}
        for name in "abc":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert cluster["a"].view is not None and cluster["c"].frozen
        cluster.cut.clear()
        cluster.wait(400)
        cluster.standing("abc")

    def test_a_laggard_that_can_no_longer_enter_is_cause_for_all(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        cluster.cut = {("d", "c")}
        cluster.verdict("d", UNREACHABLE, by="c")  # wrongly
        words = {}
        for name in "abd":
            words[name] = cluster[name].at_barrier(cluster.now)
            cluster.do(name, words[name])
        cluster.mail = [mail for mail in cluster.mail if mail[1] != "c"]
        cluster.do("c", cluster["c"].verdict("d", 1, REACHABLE, cluster.now))
        cluster.do("c", cluster["c"].at_barrier(cluster.now))
        cluster.deliver()
        cluster.do("c", cluster["c"].verdict("d", 1, UNREACHABLE, cluster.now))
        cluster.do("c", cluster["c"].verdict("d", 1, REACHABLE, cluster.now))
        cluster.cut.clear()
        cluster.wait(3_000)
        assert cluster.standing("abcd").view_epoch == 3

    def test_an_older_incarnation_is_fenced(self) -> None:
        cluster = Cluster("abc").run("abc")
        word = cluster["c"].at_barrier(cluster.now).sends[0][1]
        cluster.verdict("c", REACHABLE, boot=2)
        assert not cluster["a"].receive(word, cluster.now).froze

    def test_another_history_is_ignored(self) -> None:
        cluster, other = Cluster("ab").run("ab"), Cluster("bc").run("bc")
        word = other["b"].at_barrier(cluster.now).sends[0][1]
        ready = cluster["a"].receive(word, cluster.now)
        assert not ready.froze and "of history" in ready.trace[0]


class TestWithdrawal:
    def test_the_others_go_on_at_once_and_it_comes_back(self) -> None:
        cluster = Cluster("abc").run("abc")
        stopped = cluster["a"].withdraw()
        assert stopped.withdrawn and cluster["a"].frozen
        assert not cluster["a"].complete(state(1, 2), cluster.now).accepted
        for name in "bc":
            cluster.do(name, cluster[name].withdrawn(stopped, cluster.now))
        cluster.deliver()
        cluster.standing("bc")
        cluster.do("a", cluster["a"].rejoin(cluster.now))
        cluster.deliver()
        assert cluster["a"].left_out
        for name in "bc":
            cluster.do(name, cluster[name].join_requested("a", cluster.now))
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert cluster.standing("abc").holders == cluster["a"].view.members  # type: ignore[union-attr]

    def test_it_answers_proposals_with_its_withdrawal(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster["a"].withdraw()
        for name in "bc":
            cluster.do(name, cluster[name].wants_change("collective failed", cluster.now, at_once=True))
        cluster.deliver()
        cluster.standing("bc")

    def test_strict_quorum_goes_on_too(self) -> None:
        cluster = Cluster("ab", Quorum.STRICT).run("ab")
        stopped = cluster["a"].withdraw()
        cluster.do("b", cluster["b"].withdrawn(stopped, cluster.now))
        cluster.deliver()
        cluster.standing("b")

    def test_all_trainers_at_once(self) -> None:
        cluster = Cluster("abc").run("abc")
        done = cluster.round("b")
        farewells: dict[str, Stopped] = {name: cluster[name].withdraw() for name in "abc"}
        for name in "abc":
            for other in set("abc") - {name}:
                cluster.do(name, cluster[name].withdrawn(farewells[other], cluster.now))
        for name in "cab":
            cluster.do(name, cluster[name].rejoin(cluster.now))
            cluster.wait(700)
        cluster.wait(3_000)
        assert cluster.standing("abc").start == done

    def test_a_late_farewell_does_not_undo_the_return(self) -> None:
        cluster = Cluster("abc").run("abc")
        stopped = cluster["a"].withdraw()
        cluster.do("a", cluster["a"].rejoin(cluster.now))
        cluster.deliver()
        cluster.standing("abc")
        assert not cluster.do("b", cluster["b"].withdrawn(stopped, cluster.now)).accepted
        cluster.deliver()
        cluster.standing("abc")


class TestRestart:
    def restarted(self, names: str = "abc") -> Cluster:
        """All killed at once; c has a newer checkpoint than the others."""
        cluster = Cluster("abc").run("abc")
        for number, name in ((1, "a"), (1, "b"), (1, "c")):
            cluster[name].committed((1, number))
            cluster.do(name, cluster[name].checkpointed((1, number), cluster.now))
        cluster.mail.clear()
        cluster.down = set("abc")
        for name in names:
            cluster.start(name, boot=2, completed=state(1, 2 if name == "c" else 1))
        return cluster

    def test_of_everybody(self) -> None:
        cluster = self.restarted()
        cluster.found()
        view = cluster.standing("abc")
        assert view.start == state(1, 2) and view.view_epoch > 1
        assert view.history == cluster.disk["a"].history

    def test_of_a_majority_waits_for_the_last(self) -> None:
        cluster = self.restarted("ab")
        cluster.found()
        cluster.wait(5_000)
        assert "waiting for c" in (cluster["a"].waiting_for() or "")
        cluster.start("c", boot=2, completed=state(1, 2))
        cluster.do("c", cluster["c"].found(("a", "b", "c"), cluster.now))
        cluster.wait(5_000)
        assert cluster.standing("abc").start == state(1, 2)

    def test_of_one_is_cause_to_go_on_without_its_former_self(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.start("c", boot=2)
        cluster.verdict("c", REACHABLE, boot=2)
        cluster.deliver()
        view = cluster["a"].view
        assert view is not None and view.view_epoch == 2
        assert MemberId(peer_id="c", boot=1) not in view.members


class TestPauses:
    def test_attempts_in_a_row_wait_longer_and_longer(self) -> None:
        cluster = Cluster("ab").run("ab")
        gaps = []
        for _ in range(6):
            asked = cluster.now
            epoch = cluster["a"].view.view_epoch  # type: ignore[union-attr]
            while cluster["a"].view is None or cluster["a"].view.view_epoch == epoch:
                for name in "ab":
                    cluster.do(name, cluster[name].wants_change("flapping", cluster.now, at_once=True))
                cluster.deliver()
                if cluster["a"].view is None or cluster["a"].view.view_epoch == epoch:
                    cluster.wait(50)
            gaps.append(cluster.now - asked)
        assert gaps[0] == 0 and gaps[-1] > 1_000 and max(gaps) <= 8_000
        assert sum(gaps[:3]) < gaps[-1]

    def test_a_calm_makes_the_next_one_immediate(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c")
        cluster.deliver()
        cluster.now += 20_000
        cluster.kill("b")
        cluster.deliver()
        cluster.standing("a")

    def test_deadlines_lie_ahead(self) -> None:
        cluster = Cluster("abc").run("abc")
        assert cluster["a"].next_deadline_ms(cluster.now) > cluster.now + 1_000
        cluster["a"].at_barrier(cluster.now)
        assert cluster.now < cluster["a"].next_deadline_ms(cluster.now) <= cluster.now + 150


class TestAny:
    def test_both_sides_go_on_under_different_histories_and_one_yields(self) -> None:
        cluster = Cluster("abcd", Quorum.ANY).run("abcd")
        old = cluster["a"].history
        cluster.cut = {(x, y) for x in "ab" for y in "cd"} | {(y, x) for x in "ab" for y in "cd"}
        for x, y in sorted(cluster.cut):
            cluster.verdict(y, UNREACHABLE, by=x)
        cluster.deliver()
        assert cluster.standing("ab").history == old
        assert cluster.standing("cd").history not in (old, b"")
        cluster.cut.clear()
        for name in "cd":
            cluster.verdict(name, REACHABLE, by="ab")
            for other in "ab":
                cluster.verdict(other, REACHABLE, by=name)
            cluster.do(name, cluster[name].yield_history(state(0, 0, name), cluster.now))
        cluster.now += 20_000
        for other in "ab":
            for name in "cd":
                cluster.do(other, cluster[other].join_requested(name, cluster.now))
            cluster.do(other, cluster[other].at_barrier(cluster.now))
        cluster.deliver()
        assert cluster.standing("abcd").history == old

    def apart(self) -> Cluster:
        """Side cd has founded a history of its own; then the cut is mended."""
        cluster = Cluster("abcd", Quorum.ANY).run("abcd")
        cluster.cut = {(x, y) for x in "ab" for y in "cd"} | {(y, x) for x in "ab" for y in "cd"}
        for x, y in sorted(cluster.cut):
            cluster.verdict(y, UNREACHABLE, by=x)
        cluster.deliver()
        cluster.cut.clear()
        return cluster

    def test_what_a_side_of_its_own_says_leaves_nobody_out_of_the_other(self) -> None:
        """It has the number of the other's view, and the history that both come from."""
        cluster = self.apart()
        standing = cluster.standing("ab")
        cluster.do("a", cluster["a"].foreign_header("c", standing.view_epoch, cluster.now))
        for name in "cd":
            cluster.do(name, cluster[name].foreign_header("a", standing.view_epoch, cluster.now))
            cluster.do(name, cluster[name].foreign_header("b", standing.view_epoch - 1, cluster.now))
        cluster.deliver()
        assert cluster.standing("ab") == standing and not cluster["a"].left_out and not cluster["b"].left_out

    def test_a_member_of_the_side_of_its_own_that_missed_a_word_gets_in_by_it(self) -> None:
        cluster = Cluster("abcd", Quorum.ANY).run("abcd")
        cluster.cut = {(x, y) for x in "ab" for y in "cd"} | {(y, x) for x in "ab" for y in "cd"}
        for x, y in sorted(cluster.cut):
            cluster.verdict(y, UNREACHABLE, by=x)
        while not (cluster["c"].frozen and cluster["d"].frozen):
            cluster.deliver(hops=1)
        cluster.cut.add(("c", "d"))
        cluster.deliver()
        view = cluster["c"].view
        assert view is not None and view.parent and view.peers == ("c", "d") and cluster["d"].frozen
        cluster.cut.discard(("c", "d"))
        cluster.wait(3_000)
        assert cluster.standing("cd") == view


def test_invariants_are_checked() -> None:
    cluster = Cluster("a").run("a")
    cluster["a"]._n += 1
    with pytest.raises(AssertionError, match="stands, but 2 was said"):
        cluster["a"].check_invariants()


def test_views_name_their_members_in_ring_order() -> None:
    cluster = Cluster("cab")
    cluster.found()
    assert cluster["b"].view is not None
    assert cluster["b"].view.ref == ViewRef(
        view_epoch=1, members=tuple(MemberId(peer_id=name, boot=1) for name in "abc")
    )


def test_a_death_of_whichever_boot_is_that_of_the_one_that_is_known() -> None:
    """Its agent died before it said under which boot it takes part; it comes back under the one that it had."""
    cluster = Cluster("abc").run("abc")
    cluster.down.add("c")
    cluster.verdict("c", UNREACHABLE, boot=UNKNOWN_BOOT)
    cluster.wait(1_000)
    assert cluster.standing("ab").stopped == ("c",)
    cluster.round("ab")
    cluster.now += 20_000
    cluster.down.discard("c")
    cluster.verdict("c", REACHABLE)
    for name in "ab":
        cluster.do(name, cluster[name].join_requested("c", cluster.now))
    for name in "ab":
        cluster.do(name, cluster[name].at_barrier(cluster.now))
    cluster.deliver()
    assert cluster.standing("abc"), "its words are not those of a former life"


class TestBrokenWay:
    """Two cannot hear each other, a third hears both, and membership calls all of them alive."""

    def broken(self, cut: set[tuple[str, str]], names: str = "abc") -> Cluster:
        cluster = Cluster(names).run(names)
        cluster.cut = cut
        for name in names:
            cluster.do(name, cluster[name].wants_change("the collective failed", cluster.now, at_once=True))
        cluster.deliver()
        return cluster

    def stand_aside(self, cluster: Cluster, name: str) -> None:
        stopped = cluster[name].withdraw()
        for other in cluster.up():
            if other != name and (name, other) not in cluster.cut:
                cluster.do(other, cluster[other].withdrawn(stopped, cluster.now))
        cluster.wait(3_000)

    def test_the_greater_of_the_two_stands_aside_and_the_others_go_on(self) -> None:
        cluster = self.broken({("a", "b"), ("b", "a")})
        patience_ms = AgreementSettings().link_patience_ms
        cluster.wait(patience_ms - 100)
        assert [cluster[name].cut_off_from for name in "abc"] == [(), (), ()]
        cluster.wait(200)
        assert [cluster[name].cut_off_from for name in "abc"] == [(), ("a",), ()]
        self.stand_aside(cluster, "b")
        cluster.standing("ac")
        assert cluster["b"].cut_off_from == ()

    @pytest.mark.parametrize("deaf", ["a", "b"])
    def test_whoever_hears_nothing_stands_aside_where_only_one_direction_is_broken(self, deaf: str) -> None:
        mute = "b" if deaf == "a" else "a"
        cluster = self.broken({(mute, deaf)})
        cluster.wait(AgreementSettings().link_patience_ms * 3 // 2 + 100)
        assert [cluster[name].cut_off_from for name in (deaf, mute, "c")] == [(mute,), (), ()]
        self.stand_aside(cluster, deaf)
        cluster.standing(f"{mute}c")

    def test_whoever_misses_several_stands_aside_first(self) -> None:
        cluster = self.broken({("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")}, "abcd")
        cluster.wait(AgreementSettings().link_patience_ms - 100)
        assert [cluster[name].cut_off_from for name in "abcd"] == [("b", "c"), (), (), ()]
        self.stand_aside(cluster, "a")
        cluster.standing("bcd")

    def test_whoever_is_left_out_asks_to_join_and_does_not_stand_aside(self) -> None:
        cluster = self.broken({("a", "b"), ("b", "a")})
        cluster.wait(AgreementSettings().link_patience_ms + 100)
        assert cluster["b"].cut_off_from
        cluster["b"].left_out = True  # of a view that it heard of; its own attempt has a greater number
        assert not cluster["b"].cut_off_from

    def test_nobody_stands_aside_for_one_that_nobody_hears(self) -> None:
        """Its agent answers probes, or one that is in no view hears it. Votes that are given back would be missed."""
        ways = {(x, "d") for x in "abc"} | {("d", x) for x in "abc"}
        cluster = self.broken(ways, "abcd")
        cluster.wait(60_000)
        assert [cluster[name].cut_off_from for name in "abcd"] == [(), (), (), ()]
        cluster.verdict("d", UNREACHABLE, by="abc")
        cluster.deliver()
        cluster.standing("abc")

    def test_nobody_stands_aside_without_whom_the_others_are_too_few(self) -> None:
        """Mended, the way serves again at once."""
        cluster = self.broken({("c", "d"), ("d", "c")}, "abcde")
        for name in "ae":
            cluster.down.add(name)
            cluster.verdict(name, UNREACHABLE, by="bcd")
        cluster.wait(60_000)
        assert [cluster[name].cut_off_from for name in "bcd"] == [(), (), ()]
        cluster.cut.clear()
        cluster.wait(3_000)
        cluster.standing("bcd")

    def test_nobody_stands_aside_for_one_that_is_gone_or_of_whom_nothing_else_is_missing(self) -> None:
        cluster = self.broken({("a", "b"), ("b", "a")})
        cluster.verdict("a", UNREACHABLE, by="b")
        cluster.wait(60_000)
        assert cluster["b"].cut_off_from == ()
        alone = self.broken({("a", "b"), ("b", "a")}, "ab")
        alone.wait(60_000)
        assert alone["a"].cut_off_from == alone["b"].cut_off_from == ()

    def test_nobody_stands_aside_while_now_and_then_a_word_gets_through(self) -> None:
        """The way is bad, not broken: what is said of the view comes through it as well before long."""
        cluster = self.broken({("a", "b"), ("b", "a")})
        patience_ms = AgreementSettings().link_patience_ms
        cluster.wait(patience_ms - 100)
        word = Cause(history=cluster["b"].history, view_epoch=1, sender=MemberId(peer_id="a", boot=1))
        cluster.do("b", cluster["b"].receive(word, cluster.now))
        cluster.wait(patience_ms - 100)
        assert cluster["b"].cut_off_from == ()
        cluster.wait(200)
        assert cluster["b"].cut_off_from == ("a",)

    def test_a_learner_has_no_vote_to_give_back(self) -> None:
        """It goes on asking: to stand aside would only cost it what it has downloaded."""
        cluster = Cluster("abc").run("abc")
        cluster.start("d")
        for turn in range(2):
            cluster.cut = {("a", "d")} if turn else set()
            for name in "abc":
                cluster.do(name, cluster[name].join_requested("d", cluster.now))
                cluster.do(name, cluster[name].at_barrier(cluster.now))
            cluster.deliver()
        assert [cluster[name].frozen for name in "abcd"] == [False, False, False, True]
        cluster.wait(60_000)
        assert cluster["d"].waiting_for() == "attempt 3 waits for the answer of a"
        assert cluster["d"].cut_off_from == ()

    def test_nobody_stands_aside_over_a_view_that_it_does_not_wait_for_any_more(self) -> None:
        """The others have installed one with e; d did not hear e in time, and waits for another without it."""
        cluster = Cluster("abcd").run("abcd")
        cluster.start("e")
        cluster["d"]._raises = 6  # its next attempt is far off
        cluster.cut = {("e", "d")}
        for name in "abcd":
            cluster.do(name, cluster[name].join_requested("e", cluster.now))
        for name in "abcd":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert [cluster[name].frozen for name in "abcde"] == [False, False, False, True, False]
        installed = cluster["a"]._word
        assert installed is not None
        cluster.do("d", cluster["d"].receive(installed, cluster.now))
        cluster.cut |= {("d", name) for name in "abce"}
        cluster.wait(AgreementSettings().link_patience_ms)
        attempt = cluster["d"]._attempt
        assert attempt is not None and attempt.n == 2 and attempt.stopped == {"e"}
        assert attempt.unheard() == ["a", "b", "c"] and attempt.words["a"].installed
        assert cluster["d"].cut_off_from == ()

    def test_nobody_stands_aside_who_has_heard_everybody(self) -> None:
        """c has installed a view with d, which lost its disk since: e may not go on with that, and misses nobody."""
        cluster = Cluster("abcde").run("abcde")
        said: dict[str, Propose] = {}
        for name in "cde":
            for gone in "ab":
                cluster[name].verdict(gone, 1, UNREACHABLE, cluster.now)
            (*_, (_, word)) = cluster[name].at_barrier(cluster.now).sends
            assert isinstance(word, Propose) and word.members == ("c", "d", "e")
            said[name] = word
        for name in "de":
            cluster.do("c", cluster["c"].receive(said[name], cluster.now))
        installed = cluster["c"]._word
        assert installed is not None and installed.installed
        cluster.start("d", boot=2, disk=Promises())
        (*_, (_, word)) = cluster["d"].receive(said["c"], cluster.now).sends
        assert isinstance(word, Propose) and word.sets == installed.sets
        for heard in (installed, word):
            cluster.do("e", cluster["e"].receive(heard, cluster.now))
        for back in "ab":
            cluster.do("e", cluster["e"].verdict(back, 1, REACHABLE, cluster.now))
        attempt = cluster["e"]._attempt
        assert attempt is not None and attempt.unheard() == [] and attempt.words["c"].installed
        assert (
            cluster["e"].waiting_for() == "2 of 4 members of view 1 are here; 3 are needed; waiting for a, b"
        )
        assert cluster["e"].cut_off_from == ()

    def test_whoever_was_out_for_long_does_not_stand_aside_at_once(self) -> None:
        """c was left out while it held an attempt; it waits for b since it is let in, not since then."""
        cluster = Cluster("abc").run("abc")
        (*_, (_, word)) = cluster["a"].at_barrier(cluster.now).sends
        assert isinstance(word, Propose) and word.sets == (("a", "b", "c"), (), ("a", "b", "c"), ())
        core = cluster["c"]
        cluster.do("c", core.at_barrier(cluster.now))
        surpassed = Surpassed(sender=MemberId(peer_id="b", boot=1), n=4)
        cluster.do("c", core.receive(surpassed, cluster.now))
        without = replace(word, candidates=("a", "b"), voters=("a", "b"), installed=True, n=4)
        cluster.do("c", core.receive(without, cluster.now))
        assert core.left_out and core._attempt is not None
        cluster.now += 60_000
        for installed in (False, True):
            cluster.do("c", core.receive(replace(word, n=9, installed=installed), cluster.now))
        assert core.waiting_for() == "attempt 9 waits for the answer of b"
        assert core.cut_off_from == ()
        cluster.now += AgreementSettings().link_patience_ms
        cluster.do("c", core.tick(cluster.now))
        assert core.cut_off_from == ("b",)

    def test_a_founder_does_not_stand_aside(self) -> None:
        """There is no run yet that the others could go on with."""
        cluster = Cluster("abc")
        cluster.cut = {("b", "c")}
        cluster.found()
        assert [cluster[name].frozen for name in "abc"] == [False, False, True]
        installed = cluster["a"]._word
        assert installed is not None
        cluster.do("c", cluster["c"].receive(installed, cluster.now))
        assert cluster["c"].waiting_for() == "attempt 1 waits for the answer of b"
        assert cluster["c"].cut_off_from == ()


def test_nothing_is_proposed_in_the_breath_that_completes_a_round() -> None:
    """What a proposal says of this peer's work would not know the round yet: the shell hears of it afterwards."""
    cluster = Cluster("a").run("a")
    core, view = cluster["a"], cluster.standing("a")
    core._wanted_at_once = "the collective failed"  # it waits for the pause between changes to end
    done = cluster.do("a", core.complete(state(view.view_epoch, core.completed.lineage[1] + 1), cluster.now))
    assert done.accepted and done.installed is None and cluster.standing("a") == view
    assert cluster.do("a", core.tick(cluster.now)).installed is not None
