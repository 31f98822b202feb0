"""One case per guard of what agreement does with messages and requests: without the guard, the case fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_dmc.core.agreement import IDLE_MS
from p2p_dmc.core.agreement_messages import (
    Cause,
    GivenUp,
    MemberId,
    Promised,
    Promises,
    Propose,
    Ready,
    Stopped,
    Surpassed,
    Withdrawal,
)
from tests.core.agreement_cluster import CRASHED, REACHABLE, UNREACHABLE, Cluster, state
from tests.core.test_guards_transitions import last_word, later, member, refused, voters, with_learner

OTHER = b"other history..."


def told(ready: Ready) -> list[tuple[str, str]]:
    """(to whom, what)"""
    return [(peer, type(message).__name__) for peer, message in ready.sends]


class TestFence:
    def test_nobody_else_speaks_as_this_peer(self) -> None:
        cluster = Cluster("ab").run("ab")
        word = last_word(cluster["b"].at_barrier(cluster.now))
        forged = replace(word, sender=member("a", 5), candidates=("a", "b"), voters=("a", "b"))
        ready = cluster.do("a", cluster["a"].receive(forged, cluster.now))
        assert not ready.froze and cluster["a"]._book.boots.get("a") is None

    def test_promises_of_former_lives_and_of_other_histories_are_dropped(self) -> None:
        cluster = Cluster("ab").run("ab")
        said = Promised(
            history=cluster["a"].history, sender=member("b"), n=70, base=None, pending=(), version=70
        )
        cluster.do("a", cluster["a"].receive(replace(said, history=OTHER), cluster.now))
        assert cluster["a"]._book.promised[member("b")].version < 70
        cluster.do("a", cluster["a"].receive(said, cluster.now))
        assert cluster["a"]._book.promised[member("b")].version == 70
        cluster.do("a", cluster["a"].receive(replace(said, sender=member("b", 2)), cluster.now))
        cluster.do("a", cluster["a"].receive(replace(said, version=80), cluster.now))
        assert cluster["a"]._book.promised[member("b")].version == 70

    def test_withdrawals_of_former_lives_and_of_other_histories_are_dropped(self) -> None:
        cluster = Cluster("abc").run("abc")
        gone = Stopped(member=member("b"), n=1, withdrawn=True)
        for message in (
            Withdrawal(history=OTHER, stopped=gone),
            Withdrawal(history=cluster["a"].history, stopped=replace(gone, member=member("a", 3))),
        ):
            cluster.do("a", cluster["a"].receive(message, cluster.now))
        assert cluster["a"]._book.records == {} and not cluster["a"]._book.gone("b")
        cluster.do("a", cluster["a"].receive(Withdrawal(history=b"", stopped=gone), cluster.now))
        assert cluster["a"]._book.gone("b")

    def test_causes_of_other_histories_are_dropped(self) -> None:
        cluster = Cluster("abc").run("abc")
        for name in "bc":
            message = Cause(history=OTHER, view_epoch=1, sender=member(name))
            cluster.do("a", cluster["a"].receive(message, cluster.now))
        cluster.do("a", cluster["a"].wants_change("failed", cluster.now, at_once=True))
        assert not cluster["a"].frozen


class TestRecords:
    def test_a_crash_is_taken_from_nobody(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster["b"].verdict("c", 1, CRASHED, cluster.now)
        word = last_word(cluster["b"].at_barrier(cluster.now))
        assert word.seen and not word.seen[0].withdrawn
        cluster.do("a", cluster["a"].receive(word, cluster.now))
        assert cluster["a"]._book.records == {}

    def test_a_withdrawal_is(self) -> None:
        cluster = Cluster("abc").run("abc")
        stopped = cluster["c"].withdraw()
        cluster["b"].withdrawn(stopped, cluster.now)
        word = last_word(cluster["b"].at_barrier(cluster.now))
        cluster.do("a", cluster["a"].receive(word, cluster.now))
        assert cluster["a"]._book.records == {member("c"): stopped}

    def test_not_by_the_one_who_is_back(self) -> None:
        cluster = Cluster("abc").run("abc")
        stopped = cluster["a"].withdraw()
        cluster["b"].withdrawn(stopped, cluster.now)
        word = last_word(cluster["b"].at_barrier(cluster.now))
        cluster["a"].rejoin(cluster.now)
        cluster.do("a", cluster["a"].receive(word, cluster.now))
        assert cluster["a"]._book.records == {}

    def test_a_farewell_is_passed_on_to_the_others_alone(self) -> None:
        """Not to the one who said it: it is gone, and what is said to it piles up."""
        cluster = Cluster("abc").run("abc")
        ready = cluster["a"].withdrawn(cluster["c"].withdraw(), cluster.now)
        assert [peer for peer, name in told(ready) if name == "Withdrawal"] == ["b"]
        again = cluster["a"].withdrawn(cluster["a"]._book.records[member("c")], cluster.now)
        assert again.accepted and told(again) == [], "once"

    def test_a_farewell_that_comes_late_is_not_passed_on(self) -> None:
        """c is back. Two who told each other of the farewell all the same would do so for ever."""
        cluster, stopped, word = self.back_again()
        cluster.do("a", cluster["a"].receive(word, cluster.now))
        ready = cluster.do("a", cluster["a"].withdrawn(stopped, cluster.now))
        assert not ready.accepted and ready.sends == () and not cluster["a"]._book.gone("c")

    def test_whoever_is_back_is_not_left_out_on_an_old_farewell(self) -> None:
        """b has heard that c withdrew, and a that it is back since."""
        cluster, stopped, word = self.back_again()
        cluster.do("a", cluster["a"].receive(word, cluster.now))
        cluster["b"].withdrawn(stopped, cluster.now)
        late = last_word(cluster["b"].at_barrier(cluster.now))
        assert late.n == word.n and late.stopped == ("c",) and late.seen == (stopped,)
        cluster.do("a", cluster["a"].receive(late, cluster.now))
        assert last_word(cluster["a"].tick(cluster.now + 200)).members == ("a", "b", "c")

    def back_again(self) -> tuple[Cluster, Stopped, Propose]:
        """c withdrew and came back: its farewell, and its first word after it."""
        cluster = Cluster("abc").run("abc")
        stopped = cluster["c"].withdraw()
        return cluster, stopped, last_word(cluster["c"].rejoin(cluster.now))

    def test_with_whoever_has_left_nothing_more_is_promised(self) -> None:
        """b says in one word that c has left and that e votes. A set of all four would have to be held for nothing."""
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        cluster["b"].withdrawn(cluster["c"].withdraw(), cluster.now)
        word = last_word(cluster["b"].at_barrier(cluster.now))
        assert word.stopped == ("c",)
        more = replace(word, candidates=("a", "b", "c", "e"), voters=("a", "b", "c", "e"))
        cluster.do("a", cluster["a"].receive(more, cluster.now))
        promised = {ref.peers for ref in cluster.disk["a"].pending if ref.view_epoch == word.n}
        assert promised == {("a", "b", "c"), ("a", "b", "e")}


class TestStanding:
    def test_a_later_view_without_this_peer_is_left_to_the_others(self) -> None:
        for n, names, out in ((1, ("b", "c"), True), (2, ("b", "c"), True), (2, ("a", "b", "c"), True)):
            cluster = Cluster("abc").run("abc")
            word = last_word(cluster["b"].at_barrier(cluster.now))
            installed = replace(word, n=n, candidates=names, voters=names, installed=True)
            ready = cluster.do("a", cluster["a"].receive(installed, cluster.now))
            assert cluster["a"].left_out is out and ready.froze is out and not cluster["a"]._attempt

    def test_an_older_view_without_this_peer_is_over(self) -> None:
        cluster = Cluster("abc").run("abc")
        for name in "abc":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        word = cluster["b"]._word
        assert word is not None
        old = replace(word, sender=member("c"), n=1, candidates=("b", "c"), voters=("b", "c"))
        cluster["a"]._book.greatest_n.clear()
        ready = cluster.do("a", cluster["a"].receive(old, cluster.now))
        assert not cluster["a"].left_out
        assert told(ready) == [("c", "Propose")] and last_word(ready).n == 2, "it is told what stands now"

    @pytest.mark.parametrize("parent", [b"", OTHER])
    @pytest.mark.parametrize("history, heard", [(OTHER, False), (None, True)])
    def test_a_member_that_is_in_another_history_is_not_followed(
        self, history: bytes | None, heard: bool, parent: bytes
    ) -> None:
        """Not even in the one that this view took the place of: it has not installed the view, and goes on there."""
        cluster = Cluster("abc").run("abc")
        core, word = cluster["a"], last_word(cluster["b"].at_barrier(cluster.now))
        assert core.view is not None and word.n > 1
        core.view = replace(core.view, parent=parent)
        ready = cluster.do("a", core.receive(replace(word, history=history or word.history), cluster.now))
        assert ready.froze is heard

    @pytest.mark.parametrize("history, heard", [(OTHER, False), (None, True)])
    def test_nor_let_in_under_the_number_of_this_view(self, history: bytes | None, heard: bool) -> None:
        cluster = Cluster("abc").run("abc")
        word = cluster["b"]._word
        assert word is not None and word.n == 1
        names = ("a", "b")
        strange = replace(
            word, history=history or word.history, candidates=names, voters=names, installed=False
        )
        cluster.do("a", cluster["a"].receive(strange, cluster.now))
        assert (cluster["a"]._strays == {"b"}) is heard

    def test_the_word_of_this_very_view_says_nothing_new(self) -> None:
        cluster = Cluster("ab").run("ab")
        word = cluster["b"]._word
        assert word is not None and word.installed
        ready = cluster.do("a", cluster["a"].receive(word, cluster.now))
        assert ready.sends == () and not cluster["a"].left_out and not cluster["a"].change_wanted

    def test_a_laggard_is_told(self) -> None:
        cluster = Cluster("ab").run("ab")
        word = cluster["b"]._word
        assert word is not None
        ready = cluster.do("a", cluster["a"].receive(replace(word, installed=False), cluster.now))
        assert told(ready) == [("b", "Propose")] and last_word(ready).installed
        assert not cluster["a"].change_wanted

    def test_an_older_word_of_a_member_is_answered(self) -> None:
        cluster = Cluster("abc").run("abc")
        words = [last_word(cluster.do(name, cluster[name].at_barrier(cluster.now))) for name in "abc"]
        old = replace(words[1], stopped=("c",))
        cluster.deliver()
        cluster.now += 20_000
        cluster["a"]._book.greatest_n.clear()
        ready = cluster.do("a", cluster["a"].receive(replace(old, n=1), cluster.now))
        assert told(ready) == [("b", "Propose")] and not cluster["a"].change_wanted

    def test_one_that_stayed_in_the_view_that_founded_this_history_is_told_what_stands(self) -> None:
        """It names the history that was evicted beside the new one, and would wait for its start state for ever."""
        cluster = Cluster("abcdef").run("abcdef")
        cluster.kill("abc", UNREACHABLE)
        cluster.wait(5_000)
        for gone in "abc":
            assert cluster.do("d", cluster["d"].evict(gone, cluster.now)).accepted
            cluster.deliver()
        founded = cluster.standing("def")
        stale = cluster["f"]._word
        assert stale is not None and stale.history == founded.parent != stale.minted == founded.history
        cluster.now += 20_000
        cluster.kill("f", UNREACHABLE)
        cluster.deliver()
        assert cluster.standing("de").history == founded.history
        ready = cluster.do("d", cluster["d"].receive(stale, cluster.now))
        assert told(ready) == [("f", "Propose")] and last_word(ready).n > founded.view_epoch

    def test_a_learner_that_says_other_sets_is_no_cause(self) -> None:
        cluster = with_learner()
        word = cluster["c"]._word
        assert word is not None
        odd = replace(word, installed=False, candidates=("a", "b", "c", "d"))
        ready = cluster.do("a", cluster["a"].receive(odd, cluster.now))
        assert told(ready) == [("c", "Propose")] and not cluster["a"].change_wanted

    def test_a_learner_moves_nobody(self) -> None:
        cluster = with_learner()
        word = cluster["c"]._word
        assert word is not None
        ready = cluster.do("a", cluster["a"].receive(replace(word, installed=False, n=3), cluster.now))
        assert told(ready) == [("c", "Propose")] and not ready.froze


class TestInstalledElsewhere:
    """What one that is frozen makes of a view that others have installed."""

    def frozen(self) -> tuple[Cluster, Propose]:
        cluster = Cluster("abc").run("abc")
        word = last_word(cluster["b"].at_barrier(cluster.now))
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        return cluster, replace(word, installed=True)

    def test_its_own_attempt_ends_with_it(self) -> None:
        cluster, word = self.frozen()
        cluster["a"].receive(word, cluster.now)
        ready = cluster["a"].receive(replace(word, sender=member("c")), cluster.now)
        assert ready.installed is not None

    def test_one_without_this_peer_is_left_to_the_others(self) -> None:
        cluster, word = self.frozen()
        others = replace(word, candidates=("b", "c"), voters=("b", "c"))
        cluster.do("a", cluster["a"].receive(others, cluster.now))
        assert cluster["a"].left_out

    def test_and_then_no_late_word_of_that_attempt_lets_it_in_again(self) -> None:
        cluster, word = self.frozen()
        others = replace(word, candidates=("b", "c"), voters=("b", "c"))
        cluster.do("a", cluster["a"].receive(others, cluster.now))
        late = replace(word, sender=member("c"), installed=False)
        ready = cluster.do("a", cluster["a"].receive(late, cluster.now))
        assert cluster["a"].left_out and told(ready) == [("c", "Surpassed")]

    def test_one_with_this_peer_that_it_never_spoke_for_too(self) -> None:
        cluster, word = self.frozen()
        cluster.do("a", cluster["a"].receive(replace(word, n=7), cluster.now))
        assert cluster["a"].left_out

    def test_not_one_that_it_has_moved_on_from(self) -> None:
        cluster, word = self.frozen()
        cluster.do("a", cluster["a"].receive(Surpassed(sender=member("c"), n=2), cluster.now))
        assert cluster["a"].promises.n == 3
        cluster.do("a", cluster["a"].receive(word, cluster.now))
        assert not cluster["a"].left_out

    def test_nor_the_one_that_it_came_from(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        word = cluster["b"]._word
        assert word is not None
        others = replace(word, candidates=("b", "c"), voters=("b", "c"))
        cluster.do("a", cluster["a"].receive(others, cluster.now))
        assert not cluster["a"].left_out

    def test_one_that_was_in_no_view_yet_knows_that_it_is_late(self) -> None:
        cluster, word = self.frozen()
        cluster.start("d")
        cluster.do("d", cluster["d"].receive(word, cluster.now))
        assert cluster["d"].left_out
        assert cluster["d"].waiting_for() == "a later view stands without this peer; it asks to join"

    def test_nor_can_it_enter_one_that_names_it(self) -> None:
        cluster, word = self.frozen()
        cluster.start("d")
        named = replace(word, candidates=("a", "b", "c", "d"))
        cluster.do("d", cluster["d"].receive(named, cluster.now))
        assert cluster["d"].left_out

    def test_it_says_so_once(self) -> None:
        cluster, word = self.frozen()
        cluster.start("d")
        assert cluster["d"].receive(word, cluster.now).trace == ("left out of view 2 of a+b+c",)
        assert cluster["d"].receive(replace(word, sender=member("c")), cluster.now).trace == ()


class TestFrozen:
    """What one that is frozen makes of the words of others."""

    def outside(self) -> tuple[Cluster, Propose]:
        """c is left out of view 2; and a word of that view's next change."""
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.down.clear()
        cluster.do("c", cluster["c"].foreign_header("a", 2, cluster.now))
        cluster.deliver()
        assert cluster["c"].left_out
        return cluster, last_word(cluster["a"].at_barrier(cluster.now))

    def test_one_that_is_left_out_follows_only_to_where_it_is_wanted(self) -> None:
        cluster, word = self.outside()
        outside = replace(word, candidates=("a", "b"), stopped=(), voters=("a", "b"))
        cluster.do("c", cluster["c"].receive(outside, cluster.now))
        assert cluster["c"].left_out and cluster["c"].promises.n < word.n
        inside = replace(word, candidates=("a", "b", "c"), stopped=(), version=9)
        cluster.do("c", cluster["c"].receive(inside, cluster.now))
        core = cluster["c"]
        assert not core.left_out and core.promises.n == word.n

    def test_a_newcomer_does_not_mix_in(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.start("n")
        word = last_word(cluster["a"].at_barrier(cluster.now))
        assert cluster.do("n", cluster["n"].receive(word, cluster.now)).sends == ()
        assert cluster["n"].promises.n == 0

    def test_one_in_an_attempt_follows_to_a_greater_number_without_it(self) -> None:
        """It must not hold on to an attempt that can no longer end."""
        cluster = Cluster("abc").run("abc")
        cluster.do("c", cluster["c"].at_barrier(cluster.now))
        word = last_word(cluster["a"].at_barrier(cluster.now))
        greater = replace(word, n=6, candidates=("a", "b"), voters=("a", "b"))
        cluster.do("c", cluster["c"].receive(greater, cluster.now))
        assert cluster["c"].promises.n == 6

    def test_an_older_number_is_answered_with_the_own_word(self) -> None:
        cluster = Cluster("abc").run("abc")
        word = last_word(cluster["b"].at_barrier(cluster.now))
        cluster["a"].at_barrier(cluster.now)
        cluster.do("a", cluster["a"].receive(Surpassed(sender=member("b"), n=4), cluster.now))
        ready = cluster.do("a", cluster["a"].receive(word, cluster.now))
        assert told(ready) == [("b", "Propose")] and last_word(ready).n == 5

    def test_one_that_is_left_out_says_what_it_has_said_if_it_is_wanted(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.down.clear()
        cluster["c"].at_barrier(cluster.now)
        cluster.do("c", cluster["c"].receive(Surpassed(sender=member("b"), n=5), cluster.now))
        cluster.deliver()
        assert cluster["c"].left_out and cluster["c"]._attempt is not None
        word = last_word(cluster["a"].at_barrier(cluster.now))
        inside = replace(word, candidates=("a", "b", "c"), stopped=())
        assert told(cluster["c"].receive(inside, cluster.now)) == [("a", "Surpassed")]
        outside = replace(word, sender=member("b"), candidates=("a", "b"), stopped=())
        assert cluster["c"].receive(outside, cluster.now).sends == ()

    def test_of_its_own_number_only_if_it_is_in_it(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.down.clear()
        cluster["c"].at_barrier(cluster.now)
        cluster.do("c", cluster["c"].receive(Surpassed(sender=member("b"), n=2), cluster.now))
        cluster.deliver()
        assert cluster["c"].left_out and cluster["c"].promises.n == 3
        word = last_word(cluster["a"].at_barrier(cluster.now))
        assert word.n == 3
        greater = replace(word, sender=member("b"), n=6, candidates=("a", "b"), stopped=())
        cluster.do("c", cluster["c"].receive(greater, cluster.now))
        assert cluster["c"].left_out and cluster["c"].promises.n == 3
        cluster.do("c", cluster["c"].receive(replace(word, candidates=("a", "b"), stopped=()), cluster.now))
        assert cluster["c"].left_out

    def test_it_repeats_itself_only_when_asked(self) -> None:
        cluster = Cluster("abc").run("abc")
        word = last_word(cluster["b"].at_barrier(cluster.now))
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        assert cluster.do("a", cluster["a"].receive(word, cluster.now)).sends == ()
        ready = cluster.do("a", cluster["a"].receive(replace(word, asks=True), cluster.now))
        assert told(ready) == [("b", "Propose")]

    def test_nobody_stops_itself(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster["b"].verdict("a", 1, UNREACHABLE, cluster.now)
        word = last_word(cluster["b"].at_barrier(cluster.now))
        assert word.stopped == ("a",)
        assert last_word(cluster.do("a", cluster["a"].receive(word, cluster.now))).stopped == ()

    def test_whoever_is_gone_here_too_is_stopped_on_anybodys_word(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        for name in "ab":
            cluster[name].verdict("d", 1, UNREACHABLE, cluster.now)
        word = last_word(cluster["b"].at_barrier(cluster.now))
        assert last_word(cluster["a"].receive(word, cluster.now)).stopped == ("d",)

    def test_a_stranger_is_stopped_on_anybodys_word(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster["b"].join_requested("e", cluster.now)
        cluster["b"].at_barrier(cluster.now)
        word = last_word(cluster["b"].verdict("e", 1, UNREACHABLE, cluster.now))
        assert last_word(cluster["a"].receive(word, cluster.now)).stopped == ("e",)


class TestCourting:
    def test_a_newcomer_keeps_to_the_first_history_that_asked(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.start("n")
        cluster.do("a", cluster["a"].join_requested("n", cluster.now))
        word = last_word(cluster["a"].at_barrier(cluster.now))
        ready = cluster.do("n", cluster["n"].receive(word, cluster.now))
        assert ready.persist is not None and ready.persist.courted == cluster["a"].history
        again = cluster.do("n", cluster["n"].receive(replace(word, asks=True), cluster.now))
        assert told(again) == [("a", "Propose")] and again.persist is None, "that is on disk already"
        odd = replace(word, history=OTHER, n=9, sender=member("z"), candidates=("n", "z"), voters=("z",))
        cluster.do("n", cluster["n"].receive(odd, cluster.now))
        assert cluster["n"].promises.courted == cluster["a"].history and cluster["n"].promises.n == word.n

    def test_newcomers_vote_among_themselves_whatever_they_hold(self) -> None:
        cluster = Cluster("ab")
        word = replace(last_word(cluster["a"].found(("a", "b"), cluster.now)), completed=state(5, 3))
        assert last_word(cluster["b"].receive(word, cluster.now)).voters == ("a", "b")
        again = cluster["b"].receive(replace(word, asks=True), cluster.now)
        assert told(again) == [("a", "Propose")] and again.persist is None

    def courted(self) -> Cluster:
        """n was asked to join the history of a and b, whom nobody hears any more; o is a newcomer."""
        cluster = Cluster("ab").run("ab")
        cluster.start("n")
        cluster.start("o")
        cluster.do("a", cluster["a"].join_requested("n", cluster.now))
        cluster.do("n", cluster["n"].receive(last_word(cluster["a"].at_barrier(cluster.now)), cluster.now))
        cluster.down = set("ab")
        cluster.verdict("a", UNREACHABLE, "n")
        cluster.verdict("b", UNREACHABLE, "n")
        assert cluster["n"].promises.courted == cluster["a"].history
        return cluster

    def test_a_courted_newcomer_founds_nothing(self) -> None:
        cluster = self.courted()
        n = cluster["n"].promises.n
        assert not cluster["n"].found(("n", "o"), cluster.now).accepted and cluster["n"].promises.n == n

    def test_it_votes_in_no_founding_beside_its_history_either(self) -> None:
        cluster = self.courted()
        word = replace(last_word(cluster["o"].found(("n", "o"), cluster.now)), n=9)
        said = last_word(cluster["n"].receive(word, cluster.now))
        assert said.n == 9 and said.voters == ("o",) and said.history == cluster["a"].history

    def test_it_is_let_in_by_another_history_that_lives(self) -> None:
        cluster = self.courted()
        before = cluster["n"].promises
        assert before.pending and all("n" not in view.peers for view in before.pending), "it voted nowhere"
        cluster.do("n", cluster["n"].court_another(OTHER, cluster.now))
        after = cluster.disk["n"]
        assert (after.courted, after.pending, after.n) == (OTHER, (), before.n)
        word = last_word(cluster["o"].found(("n", "o"), cluster.now))
        said = last_word(cluster["n"].receive(replace(word, history=OTHER, n=9), cluster.now))
        assert said.history == OTHER and said.voters == ("o",)

    def test_a_set_in_which_it_votes_stays_promised(self) -> None:
        cluster = Cluster("no")
        cluster.do("n", cluster["n"].found(("n", "o"), cluster.now))
        cluster.do("o", cluster["o"].found(("n", "o"), cluster.now))
        founding = cluster.disk["n"].pending
        (word,) = [m for to, _, m in cluster.mail if to == "o" and isinstance(m, Propose)]
        word = replace(word, history=b"z" * 16, n=9, sender=member("z"), candidates=("n", "z"), voters=("z",))
        cluster.do("n", cluster["n"].receive(word, cluster.now))
        cluster.do("n", cluster["n"].court_another(OTHER, cluster.now))
        assert cluster.disk["n"].pending == founding != ()

    def test_one_that_gives_way_before_it_was_let_in_says_there_what_it_promised(self) -> None:
        cluster = self.courted()
        history, promised = cluster["n"].promises.courted, cluster["n"].promises.pending
        cluster.do("n", cluster["n"].yield_history(state(0, 0, "n"), cluster.now))
        assert cluster.disk["n"].pending == () and cluster.disk["n"].given_up[0].history == history
        for other, told in ((history, promised), (OTHER, ())):
            core = cluster.start("n", boot=2)
            word = replace(last_word(cluster["o"].found(("n", "o"), cluster.now)), history=other, n=9)
            said = last_word(core.receive(word, cluster.now))
            assert set(promised) & set(said.pending) == set(told)
            cluster.start("o")

    def test_who_takes_no_part_says_what_it_promised_in_this_history(self) -> None:
        cluster = self.courted()
        promised = cluster["n"].promises.pending
        for history, told in ((cluster["a"].history, promised), (OTHER, ())):
            core = cluster.start("n", disk=Promises(given_up=(GivenUp(history=history, pending=promised),)))
            word = replace(
                last_word(cluster["a"].receive(Surpassed(sender=member("b"), n=9), cluster.now)),
                candidates=("a", "b", "n"),
            )
            core.receive(word, cluster.now)
            assert set(core.withdraw().pending) & set(promised) == set(told)
            cluster = self.courted()

    def test_another_one_is_for_newcomers_that_are_courted(self) -> None:
        cluster = self.courted()
        assert not cluster["o"].court_another(OTHER, cluster.now).accepted
        assert not cluster["a"].court_another(OTHER, cluster.now).accepted
        same = cluster["n"].court_another(cluster["a"].history, cluster.now)
        assert not same.accepted and same.persist is None

    def test_one_that_has_a_history_is_courted_by_none(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.do("b", cluster["b"].receive(last_word(cluster["a"].at_barrier(cluster.now)), cluster.now))
        assert cluster["b"].promises.courted == b""


class TestCauses:
    def test_only_voters_of_the_standing_view_see_cause(self) -> None:
        cluster = with_learner()
        message = Cause(history=cluster["a"].history, view_epoch=2, sender=member("c"))
        ready = cluster.do("a", cluster["a"].receive(message, cluster.now))
        assert told(ready) == [("c", "Propose")], "it is told which view stands"
        assert cluster["a"]._causes == {}

    def test_one_about_an_older_view_is_answered(self) -> None:
        cluster = Cluster("abc").run("abc")
        for name in "abc":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        for epoch, answer in ((1, [("b", "Propose")]), (3, [])):
            message = Cause(history=cluster["a"].history, view_epoch=epoch, sender=member("b"))
            assert told(cluster.do("a", cluster["a"].receive(message, cluster.now))) == answer
        assert cluster["a"]._causes == {}

    def test_whoever_is_frozen_has_no_use_for_one(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster["a"].at_barrier(cluster.now)
        message = Cause(history=cluster["a"].history, view_epoch=1, sender=member("b"))
        assert cluster["a"].receive(message, cluster.now).sends == ()


class TestSurpassed:
    def attempt(self) -> Cluster:
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].join_requested("e", cluster.now))
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        return cluster

    def test_a_member_that_has_said_as_much_is_overtaken(self) -> None:
        cluster = self.attempt()
        cluster.do("a", cluster["a"].receive(Surpassed(sender=member("b"), n=2), cluster.now))
        assert cluster["a"].promises.n == 3

    def test_one_that_has_said_less_is_not(self) -> None:
        cluster = self.attempt()
        for n in (4, 2):
            cluster.do("a", cluster["a"].receive(Surpassed(sender=member("b"), n=n), cluster.now))
        assert cluster["a"].promises.n == 5

    def test_nor_a_stranger(self) -> None:
        cluster = self.attempt()
        cluster.do("a", cluster["a"].receive(Surpassed(sender=member("z"), n=50), cluster.now))
        assert cluster["a"].promises.n == 2

    def test_nor_a_former_life(self) -> None:
        cluster = self.attempt()
        cluster.do("a", cluster["a"].verdict("b", 2, REACHABLE, cluster.now))
        cluster.do("a", cluster["a"].receive(Surpassed(sender=member("b"), n=50), cluster.now))
        assert cluster["a"].promises.n == 2

    def test_a_standing_view_is_not_left_for_it(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].receive(Surpassed(sender=member("b"), n=50), cluster.now))
        assert not cluster["a"].frozen

    def test_a_learner_overtakes_nobody(self) -> None:
        cluster = with_learner()
        cluster.do("c", cluster["c"].receive(last_word(cluster["a"].at_barrier(cluster.now)), cluster.now))
        assert cluster["c"].frozen
        cluster.do("c", cluster["c"].receive(Surpassed(sender=member("b"), n=50), cluster.now))
        assert cluster["c"].promises.n == 3

    def test_one_that_is_left_out_does_not_either(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.down.clear()
        cluster["c"].at_barrier(cluster.now)
        cluster.do("c", cluster["c"].receive(Surpassed(sender=member("b"), n=2), cluster.now))
        cluster.deliver()
        assert cluster["c"].left_out and cluster["c"]._attempt is not None
        cluster.do("c", cluster["c"].receive(Surpassed(sender=member("b"), n=50), cluster.now))
        assert cluster["c"].promises.n == 3


class TestAdopting:
    def test_the_start_of_a_view_comes_from_an_older_one(self) -> None:
        cluster = with_learner()
        cluster.adopt("c")
        said = last_word(cluster["c"].receive(last_word(cluster["a"].at_barrier(cluster.now)), cluster.now))
        assert said.completed == state(1, 1) and said.known is not None and said.known.view_epoch == 1

    def test_a_newer_state_comes_from_the_view_itself(self) -> None:
        cluster = with_learner()
        done = cluster.round("ab")
        cluster.do("c", cluster["c"].adopted(done, cluster.now))
        said = last_word(cluster["c"].receive(last_word(cluster["a"].at_barrier(cluster.now)), cluster.now))
        assert said.completed == done and said.known is not None and said.known.view_epoch == 2

    def test_of_two_that_come_too_late_the_newer_is_said(self) -> None:
        cluster = with_learner()
        one, two = cluster.round("ab"), cluster.round("ab")
        cluster["c"].receive(last_word(cluster["a"].at_barrier(cluster.now)), cluster.now)
        for late in (two, one):
            assert not cluster["c"].adopted(late, cluster.now).accepted
        word = replace(last_word(cluster["a"].tick(cluster.now + 1_000)), n=9)
        said = last_word(cluster["c"].receive(word, cluster.now))
        assert said.completed == two and said.known is not None and said.known.view_epoch == 2

    def test_of_a_state_that_no_view_here_knows_nothing_is_kept(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster["a"].at_barrier(cluster.now)
        for unknown in (state(7, 7), state(1, 1, "other")):
            cluster["a"].adopted(unknown, cluster.now)
            assert cluster["a"]._late is None
        ready = cluster["a"].receive(Surpassed(sender=member("b"), n=4), cluster.now)
        assert last_word(ready).completed == state(1, 1)

    def test_one_that_is_not_behind_adopts_nothing(self) -> None:
        cluster = Cluster("ab").run("ab")
        assert not cluster["a"].adopted(state(1, 7), cluster.now).accepted
        assert cluster["a"].completed == state(1, 1)

    def test_one_that_is_behind_adopts_nothing_older_than_the_start(self) -> None:
        cluster = with_learner()
        assert not cluster["c"].adopted(state(0, 5), cluster.now).accepted and cluster["c"].behind

    def test_a_newcomer_that_waits_keeps_nothing(self) -> None:
        cluster = Cluster("a")
        assert not cluster["a"].adopted(state(0, 1), cluster.now).accepted
        assert cluster["a"]._late is None


class TestChangeWanted:
    def test_for_each_reason(self) -> None:
        cluster = Cluster("abc").run("abc")
        assert [cluster[name].change_wanted for name in "abc"] == [False] * 3
        cluster.do("a", cluster["a"].wants_change("holdings", cluster.now, at_once=False))
        assert cluster["a"].change_wanted and not cluster["a"].frozen
        cluster.do("b", cluster["b"].verdict("c", 1, UNREACHABLE, cluster.now))
        assert cluster["b"].change_wanted, "one opinion is enough for a barrier"
        cluster.do("c", cluster["c"].join_requested("d", cluster.now))
        assert cluster["c"].change_wanted

    def test_not_before_the_pause_is_over(self) -> None:
        cluster = Cluster("ab")
        cluster.found()
        cluster.do("a", cluster["a"].wants_change("holdings", cluster.now, at_once=False))
        assert not cluster["a"].change_wanted
        later(cluster, "a", 400)
        assert cluster["a"].change_wanted

    def test_not_while_frozen(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        cluster.do("a", cluster["a"].wants_change("holdings", cluster.now, at_once=False))
        later(cluster, "a", 10_000)
        assert not cluster["a"].change_wanted

    def test_a_request_at_once_comes_too_late_when_frozen(self) -> None:
        cluster = Cluster("ab").run("ab")
        assert cluster.do("a", cluster["a"].wants_change("failed", cluster.now, at_once=True)).accepted
        cluster["a"].at_barrier(cluster.now)
        assert not cluster["a"].wants_change("failed", cluster.now, at_once=True).accepted
        assert cluster["a"].wants_change("holdings", cluster.now, at_once=False).accepted

    def test_a_failed_reduction_is_held_against_a_learner_once(self) -> None:
        cluster = with_learner()
        for _ in range(2):
            cluster.do("b", cluster["b"].wants_change("failed", cluster.now, at_once=True))
        assert cluster["b"]._failures == {"c": 1}

    def test_one_that_has_become_a_voter_is_kept_out_by_nobody(self) -> None:
        cluster = with_learner()
        cluster["a"]._shunned_ms["c"] = cluster.now + 30_000
        cluster.adopt("c")
        cluster.do("b", cluster["b"].at_barrier(cluster.now))
        cluster.deliver()
        assert voters(cluster, "a") == "abc", "b has let it in"
        assert last_word(cluster["a"].at_barrier(cluster.now)).candidates == ("a", "b", "c")

    def test_a_learner_has_caught_up_when_it_holds_a_state_of_its_view(self) -> None:
        cluster = with_learner()
        assert [cluster[name].caught_up for name in "abc"] == [False] * 3
        cluster.adopt("c")
        assert cluster["c"].caught_up and cluster["c"].change_wanted
        cluster["c"].receive(last_word(cluster["a"].at_barrier(cluster.now)), cluster.now)
        core = cluster["c"]
        assert not core.caught_up


class TestWaitingFor:
    def test_nothing(self) -> None:
        assert Cluster("ab").run("ab")["a"].waiting_for() is None

    def test_a_view(self) -> None:
        cluster = Cluster("ab")
        assert cluster["a"].waiting_for() == "no view has been proposed yet"
        cluster["a"].found(("a", "b"), cluster.now)
        assert cluster["a"].waiting_for() == "attempt 1 waits for the answer of b"

    def test_itself(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster["a"].withdraw()
        assert cluster["a"].waiting_for() == "this peer takes no part for now"

    def test_to_be_let_in(self) -> None:
        cluster, _ = TestFrozen().outside()
        assert cluster["c"].waiting_for() == "a later view stands without this peer; it asks to join"

    def test_voters_that_are_gone(self) -> None:
        cluster = with_learner()
        cluster.verdict("a", UNREACHABLE, by="c")
        assert cluster["c"].waiting_for() == "2 of 3 members of view 2 answer; waiting for a"
        cluster.verdict("b", UNREACHABLE, by="c")
        assert cluster["c"].waiting_for() == "whoever trained in view 2 is gone; waiting for a, b"
        cluster.verdict("b", REACHABLE, by="c")
        assert cluster["c"].waiting_for() == "a later view stands without this peer; it asks to join"


class TestAwaited:
    def test_those_without_whom_nothing_goes_on(self) -> None:
        cluster = refused()
        assert cluster["c"].awaited == ("a", "b")
        cluster = Cluster("abcd").run("abcd")
        for gone in "ab":
            cluster.verdict(gone, UNREACHABLE, by="c")
        assert cluster["c"].awaited == ("a", "b"), "before it has said a word, too"

    def test_nobody_before_anything_was_decided(self) -> None:
        cluster = Cluster("abc")
        assert cluster["a"].awaited == ()
        cluster["a"].found(("a", "b"), cluster.now)
        assert cluster["a"].awaited == ()

    def test_nobody_while_the_others_are_enough(self) -> None:
        cluster = Cluster("ab")
        cluster.found()
        cluster.verdict("b", UNREACHABLE)
        assert not cluster["a"].frozen, "the pause after the last change is not over"
        assert cluster["a"].awaited == ()

    def test_nobody_by_a_learner_whose_voters_are_about_to_go_on(self) -> None:
        """An operator is not told to evict one without whom the others do as well."""
        cluster = Cluster("abc").run("abc")
        cluster.start("d")
        for name in "abc":
            cluster.do(name, cluster[name].join_requested("d", cluster.now))
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert voters(cluster, "d") == "abc"
        cluster.verdict("a", UNREACHABLE, by="d")
        assert cluster["d"].awaited == ("a",)
        for name in "bc":
            cause = Cause(history=cluster["d"].history, view_epoch=2, sender=member(name))
            cluster.do("d", cluster["d"].receive(cause, cluster.now))
        assert cluster["d"].awaited == () and not cluster["d"].evict("a", cluster.now).accepted

    def test_nobody_by_one_that_is_left_out(self) -> None:
        cluster = refused()
        for name in "cd":
            cluster.do(name, cluster[name].receive(Surpassed(sender=member("b"), n=2), cluster.now))
        for name in "cd":
            cluster.do(name, cluster[name].receive(Surpassed(sender=member("d"), n=2), cluster.now))
        cluster.deliver()
        assert cluster["c"].promises.n > 2 and cluster["c"].awaited == ("a", "b")
        word = replace(last_word(Cluster("ab").run("ab")["a"].at_barrier(cluster.now)), installed=True)
        installed = replace(word, history=cluster["c"].history, sender=member("b"))
        cluster.do("c", cluster["c"].receive(installed, cluster.now))
        core = cluster["c"]
        assert core.left_out and core.awaited == ()


class TestDeadlines:
    def test_nothing_is_due_when_nothing_goes_on(self) -> None:
        cluster = Cluster("ab").run("ab")
        assert cluster["a"].next_deadline_ms(cluster.now) == cluster.now + IDLE_MS

    def test_a_joiner_that_is_silent_is_due(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster["a"].join_requested("e", cluster.now)
        cluster["a"].at_barrier(cluster.now)
        attempt = cluster["a"]._attempt
        assert attempt is not None
        attempt.resend_at_ms = attempt.replace_at_ms = cluster.now + 50_000
        assert cluster["a"].next_deadline_ms(cluster.now) == cluster.now + 400
        attempt.words["e"] = attempt.words["a"]
        assert cluster["a"].next_deadline_ms(cluster.now) == cluster.now + 50_000, "b is no joiner"

    def test_one_that_is_left_out_has_none(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.down.clear()
        cluster["c"].at_barrier(cluster.now)
        cluster.do("c", cluster["c"].receive(Surpassed(sender=member("b"), n=2), cluster.now))
        cluster.deliver()
        assert cluster["c"].left_out and cluster["c"]._attempt is not None
        assert cluster["c"].next_deadline_ms(cluster.now) == cluster.now + IDLE_MS

    def test_a_cause_is_repeated(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("b", cluster["b"].verdict("c", 1, UNREACHABLE, cluster.now))
        assert cluster["b"].next_deadline_ms(cluster.now) == cluster.now + 500
        assert told(later(cluster, "b", 400)) == []
        assert told(later(cluster, "b", 100)) == [("a", "Cause"), ("c", "Cause")]

    def test_a_voter_that_fetches_the_start_repeats_its_word(self) -> None:
        """It says no header yet: whoever has left the view learns from this that others have not."""
        cluster = Cluster("abc")
        cluster.found()
        assert cluster["b"].behind and cluster["b"].next_deadline_ms(cluster.now) == cluster.now + 2_000
        assert told(later(cluster, "b", 1_999)) == []
        assert told(later(cluster, "b", 1)) == [("a", "Propose"), ("c", "Propose")]
        assert told(later(cluster, "b", 1_999)) == [] and told(later(cluster, "a", 1)) == []
        cluster.adopt("b")
        assert cluster["b"].next_deadline_ms(cluster.now) == cluster.now + IDLE_MS
        cluster = with_learner()
        assert told(later(cluster, "c", 20_000)) == [], "nobody waits for a learner"
        assert cluster["c"].next_deadline_ms(cluster.now) == cluster.now + IDLE_MS
        cluster["c"].receive(last_word(cluster["a"].at_barrier(cluster.now)), cluster.now)
        assert cluster["c"].next_deadline_ms(cluster.now) == cluster.now + 150

    def test_it_lies_ahead(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster["a"].at_barrier(cluster.now)
        assert cluster["a"].next_deadline_ms(cluster.now + 5_000) == cluster.now + 5_001


class TestRequests:
    def test_more_peers_to_found_with(self) -> None:
        cluster = Cluster("abc")
        cluster["a"].found(("a", "b"), cluster.now)
        ready = cluster["a"].found(("a", "b", "c"), cluster.now)
        assert last_word(ready).n == 1 and last_word(ready).candidates == ("a", "b", "c")
        assert cluster["a"].found(("a", "b", "c"), cluster.now).sends == ()

    def test_nothing_is_founded_in_a_view_or_by_one_that_withdrew(self) -> None:
        cluster = Cluster("ab").run("ab")
        assert not cluster["a"].found(("a", "b"), cluster.now).accepted and not cluster["a"].frozen
        cluster["a"].withdraw()
        ready = cluster["a"].found(("a", "b"), cluster.now)
        assert not ready.accepted and ready.sends == ()

    def test_one_that_is_left_out_reopens_with_a_new_number(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.down.clear()
        cluster["c"].at_barrier(cluster.now)
        cluster.do("c", cluster["c"].receive(Surpassed(sender=member("b"), n=2), cluster.now))
        cluster.deliver()
        assert cluster["c"].left_out and cluster["c"]._attempt is not None
        assert last_word(cluster["c"].found(("a", "b", "c"), cluster.now)).n == 4

    def test_nobody_joins_itself(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.do("a", cluster["a"].join_requested("a", cluster.now))
        assert cluster["a"]._book.joiners == {}

    def test_a_member_that_asks_long_after_the_view_began_cannot_enter_it(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        cluster.do("b", cluster["b"].join_requested("e", cluster.now))
        assert cluster["b"]._strays == set()
        cluster.do("b", cluster["b"].join_requested("c", cluster.now))
        assert cluster["b"]._strays == {"c"} and cluster["b"].change_wanted

    def test_but_soon_after_it_its_request_may_have_been_on_the_way(self) -> None:
        cluster = Cluster("ab")
        cluster.found()
        cluster.do("a", cluster["a"].join_requested("b", cluster.now + 1_000))
        assert cluster["a"]._strays == set()

    def test_one_that_waits_for_a_view_has_no_members(self) -> None:
        cluster = refused()
        cluster.do("c", cluster["c"].join_requested("a", cluster.now))
        assert cluster["c"]._strays == set()

    def test_a_dead_one_does_not_ask_any_more(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.do("a", cluster["a"].join_requested("d", cluster.now))
        cluster.do("a", cluster["a"].verdict("d", 1, REACHABLE, cluster.now))
        assert cluster["a"].change_wanted
        cluster.do("a", cluster["a"].verdict("d", 1, UNREACHABLE, cluster.now))
        cluster.do("a", cluster["a"].verdict("d", 1, REACHABLE, cluster.now))
        assert not cluster["a"].change_wanted

    def test_only_news_hasten(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster["a"]._raises = 6
        cluster["a"].at_barrier(cluster.now)
        attempt = cluster["a"]._attempt
        assert attempt is not None
        cluster["a"].verdict("b", 1, REACHABLE, cluster.now)
        assert attempt.replace_at_ms > cluster.now + 30_000 and cluster["a"]._raises == 6

    def test_a_farewell_of_its_own_is_nothing(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster["a"].withdrawn(Stopped(member=member("a"), n=1, withdrawn=True), cluster.now)
        assert cluster["a"]._book.records == {}

    def test_only_one_that_withdrew_comes_back(self) -> None:
        cluster = Cluster("ab").run("ab")
        assert not cluster["a"].rejoin(cluster.now).froze
        fresh = Cluster("a")
        fresh["a"].withdraw()
        assert fresh["a"].rejoin(fresh.now).sends == () and fresh["a"].promises.n == 0
        assert fresh["a"].found(("a",), fresh.now).installed is not None

    def test_one_that_was_left_out_before_it_withdrew_asks_to_join(self) -> None:
        cluster, _ = TestFrozen().outside()
        n = cluster["c"].promises.n
        cluster["c"].withdraw()
        assert cluster["c"].rejoin(cluster.now).sends == () and cluster["c"].promises.n == n

    def test_at_a_barrier_only_voters_propose(self) -> None:
        cluster = with_learner()
        assert not cluster["c"].at_barrier(cluster.now).accepted
        cluster["a"].at_barrier(cluster.now)
        assert not cluster["a"].at_barrier(cluster.now).accepted and cluster["a"].promises.n == 3

    def test_a_header_of_another_view(self) -> None:
        cluster = Cluster("ab").run("ab")
        assert told(cluster["a"].foreign_header("b", 9, cluster.now)) == [("b", "Cause")]
        assert told(cluster["a"].foreign_header("b", 0, cluster.now)) == [("b", "Propose")]
        cluster["a"].at_barrier(cluster.now)
        ready = cluster["a"].foreign_header("b", 9, cluster.now)
        assert not ready.accepted and ready.sends == ()


class TestCheckpoints:
    def test_a_state_that_was_adopted_is_known_on_disk_without_a_base(self) -> None:
        cluster = with_learner()
        cluster.adopt("c")
        ready = cluster.do("c", cluster["c"].checkpointed((1, 1), cluster.now))
        assert ready.persist is not None and ready.persist.known is not None
        assert ready.persist.known.view_epoch == 1 and ready.persist.base is None

    def test_one_of_no_view_moves_nothing(self) -> None:
        cluster = Cluster("a")
        assert cluster["a"].checkpointed((0, 0), cluster.now).persist is None
        cluster.run("a")
        assert cluster["a"].checkpointed((0, 0), cluster.now).persist is None

    def test_only_what_is_older_than_the_base_is_forgotten(self) -> None:
        cluster = Cluster("ab").run("ab")
        for name in "ab":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        ready = cluster.do("a", cluster["a"].checkpointed((1, 1), cluster.now))
        assert ready.persist is not None and [ref.view_epoch for ref in ready.persist.pending] == [2]


def test_an_established_view_forgives_its_attempts() -> None:
    cluster = Cluster("ab").run("ab")
    cluster["a"]._raises = 3
    cluster["a"].established(7)
    assert cluster["a"]._raises == 3
    cluster["a"].established(1)
    assert cluster["a"]._raises == 0
    cluster["a"]._raises = 3
    cluster["a"].at_barrier(cluster.now)
    cluster["a"].established(1)
    assert cluster["a"]._raises == 3


def test_a_withdrawal_is_answered_only_with_ones_own() -> None:
    cluster = Cluster("ab").run("ab")
    cluster["a"].withdraw()
    word = last_word(cluster["b"].at_barrier(cluster.now))
    assert told(cluster["a"].receive(word, cluster.now)) == [("b", "Withdrawal")]
    assert cluster["a"]._attempt is None and cluster["a"].frozen


def test_promotion_makes_a_voter() -> None:
    cluster = with_learner()
    cluster.adopt("c")
    for name in "ab":
        cluster.do(name, cluster[name].at_barrier(cluster.now))
    cluster.deliver()
    assert voters(cluster, "a") == "abc" and MemberId(peer_id="c", boot=1) in cluster["b"].view.voters  # type: ignore[union-attr]


def test_an_attempt_has_the_greatest_number_said() -> None:
    cluster = Cluster("ab").run("ab")
    cluster["a"].at_barrier(cluster.now)
    cluster["a"]._n += 1
    with pytest.raises(AssertionError, match="attempt 2 while 3 was said"):
        cluster["a"].check_invariants()
