"""One case per guard of agreement's transitions: without the guard, the case fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_dmc.core.agreement_messages import MemberId, Promises, Propose, Ready, Surpassed
from p2p_dmc.core.quorum import Quorum
from tests.core.agreement_cluster import CRASHED, REACHABLE, UNREACHABLE, Cluster, state

STUCK_MS = 2_000
"""An attempt that cannot end as it is has been replaced by then."""


def member(name: str, boot: int = 1) -> MemberId:
    return MemberId(peer_id=name, boot=boot)


def last_word(ready: Ready) -> Propose:
    return [message for _, message in ready.sends if isinstance(message, Propose)][-1]


def voters(cluster: Cluster, name: str) -> str:
    view = cluster[name].view
    assert view is not None
    return "".join(view.ref.peers)


def with_learner() -> Cluster:
    """a and b vote, c was let in as a learner."""
    cluster = Cluster("ab").run("ab")
    cluster.start("c")
    for name in "ab":
        cluster.do(name, cluster[name].join_requested("c", cluster.now))
        cluster.do(name, cluster[name].at_barrier(cluster.now))
    cluster.deliver()
    assert voters(cluster, "c") == "ab"
    cluster.now += 20_000
    return cluster


def refused() -> Cluster:
    """c and d, half of the view without its first, have agreed and may not go on: a and b are silent."""
    cluster = Cluster("abcd").run("abcd")
    cluster.down = set("ab")
    for name in "cd":
        cluster.do(name, cluster[name].at_barrier(cluster.now))
    cluster.deliver()
    for gone in "ab":
        cluster.verdict(gone, UNREACHABLE)
    cluster.deliver()
    assert cluster["c"].promises.n == 2
    assert "2 of 4 members of view 1 are here" in (cluster["c"].waiting_for() or "")
    return cluster


def later(cluster: Cluster, name: str, ms: int = STUCK_MS) -> Ready:
    """This one's clock goes on, and nobody answers it."""
    cluster.now += ms
    return cluster.do(name, cluster[name].tick(cluster.now))


class TestPreVote:
    """Nobody leaves a standing view on its own cause alone: the half and the majority of `_enough_causes`."""

    def test_a_cause_is_worth_nothing_after_a_while(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("b", cluster["b"].wants_change("failed", cluster.now, at_once=True))
        cluster.deliver()
        cluster.now += 3_000
        cluster.do("a", cluster["a"].wants_change("failed", cluster.now, at_once=True))
        assert not cluster["a"].frozen

    def test_the_cause_of_one_who_is_gone_counts_no_more(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("b", cluster["b"].wants_change("failed", cluster.now, at_once=True))
        cluster.deliver()
        cluster.do("a", cluster["a"].verdict("b", 1, UNREACHABLE, cluster.now))
        assert not cluster["a"].frozen

    def test_the_first_one_alone_is_no_half(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        cluster.do("a", cluster["a"].wants_change("failed", cluster.now, at_once=True))
        assert not cluster["a"].frozen

    def test_a_vote_is_in_the_count(self) -> None:
        """d withdrew after it had seen cause, and asks to join again."""
        cluster = Cluster("abcd").run("abcd")
        cluster.do("d", cluster["d"].wants_change("failed", cluster.now, at_once=True))
        cluster.deliver()
        cluster.do("b", cluster["b"].withdrawn(cluster["d"].withdraw(), cluster.now))
        cluster.do("b", cluster["b"].join_requested("d", cluster.now))
        cluster.do("b", cluster["b"].wants_change("failed", cluster.now, at_once=True))
        assert not cluster["b"].frozen, "b and d are not more than half of four"

    def test_former_lives_leave_the_count(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        for name in "cd":
            cluster.do("a", cluster["a"].verdict(name, 2, REACHABLE, cluster.now))
        assert cluster["a"].frozen, "a is half of a and b"

    def test_strict_counts_who_was_seen_to_crash(self) -> None:
        cluster = Cluster("ab", Quorum.STRICT).run("ab")
        cluster.kill("a")
        assert not cluster["b"].frozen

    def test_a_withdrawal_from_an_older_view_is_over(self) -> None:
        cluster = Cluster("ab").run("ab")
        stopped = cluster["a"].withdraw()
        cluster.do("b", cluster["b"].withdrawn(stopped, cluster.now))
        cluster.deliver()
        cluster.do("a", cluster["a"].rejoin(cluster.now))
        cluster.deliver()
        for _ in range(2):  # as a learner, then as a voter
            for name in "ab":
                cluster.do("b", cluster["b"].join_requested("a", cluster.now))
                cluster.do(name, cluster[name].at_barrier(cluster.now))
            cluster.deliver()
        assert voters(cluster, "b") == "ab"
        cluster.now += 20_000
        cluster.kill("a", UNREACHABLE)
        assert not cluster["b"].frozen

    def test_any_counts_those_who_answer(self) -> None:
        cluster = Cluster("abcd", Quorum.ANY).run("abcd")
        cluster.do("b", cluster["b"].verdict("a", 1, UNREACHABLE, cluster.now))
        assert not cluster["b"].frozen, "c and d answer and see no cause"

    def test_a_learner_sees_no_cause(self) -> None:
        cluster = with_learner()
        ready = cluster.do("c", cluster["c"].verdict("b", 1, UNREACHABLE, cluster.now))
        assert ready.sends == () and not cluster["c"].change_wanted


class TestJoiners:
    def test_a_member_that_asks_is_no_cause_for_a_change(self) -> None:
        cluster = Cluster("ab")
        cluster.found()
        cluster.do("a", cluster["a"].join_requested("b", cluster.now))
        later(cluster, "a", 1_000)
        assert not cluster["a"].change_wanted

    def test_nor_is_one_that_membership_takes_for_dead(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.do("a", cluster["a"].verdict("c", 1, UNREACHABLE, cluster.now))
        cluster.do("a", cluster["a"].join_requested("c", cluster.now))
        assert not cluster["a"].change_wanted

    def test_they_enter_an_attempt_only_once_it_was_refused(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        assert cluster["a"].join_requested("e", cluster.now).sends == ()
        cluster = refused()
        ready = cluster.do("c", cluster["c"].join_requested("e", cluster.now))
        assert last_word(ready).members == ("c", "d", "e")


class TestOneSelf:
    def back(self) -> Cluster:
        """a withdrew, was left out, and is here in a new life, of which its farewell says nothing."""
        cluster = Cluster("abc").run("abc")
        stopped = cluster["a"].withdraw()
        for name in "bc":
            cluster.do(name, cluster[name].withdrawn(stopped, cluster.now))
        cluster.deliver()
        cluster.start("a", boot=2, completed=state(1, 1))
        for turn in range(2):
            for name in "bc":
                cluster.do(name, cluster[name].verdict("a", 2, REACHABLE, cluster.now))
                cluster.do(name, cluster[name].join_requested("a", cluster.now))
                cluster.do(name, cluster[name].at_barrier(cluster.now))
            if turn:
                cluster.do("a", cluster["a"].at_barrier(cluster.now))
            cluster.deliver()
        assert voters(cluster, "a") == "abc"
        return cluster

    def test_a_peer_is_not_gone_to_itself(self) -> None:
        cluster = self.back()
        assert cluster["a"]._book.gone("a"), "else the case shows nothing"
        cluster.now += 20_000
        assert not cluster["a"].change_wanted and cluster["a"].tick(cluster.now).sends == ()

    def test_a_peer_knows_its_own_incarnation(self) -> None:
        cluster = self.back()
        word = last_word(cluster["a"].at_barrier(cluster.now))
        assert member("a", 2) in word.pending[-1].members and word.pending[-1].view_epoch == word.n


class TestFreezing:
    def test_is_told_once(self) -> None:
        cluster = Cluster("abc").run("abc")
        assert cluster["a"].at_barrier(cluster.now).froze
        ready = cluster["a"].receive(Surpassed(sender=member("b"), n=7), cluster.now)
        assert cluster["a"].promises.n == 8 and not ready.froze


class TestPauses:
    def test_after_a_calm_all_is_forgiven(self) -> None:
        cluster = Cluster("ab").run("ab")
        for _ in range(6):
            for name in "ab":
                cluster.do(name, cluster[name].at_barrier(cluster.now))
            cluster.deliver()
        assert cluster["a"]._not_before_ms > cluster.now + 1_000
        cluster.now += 20_000
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        assert cluster["a"]._not_before_ms <= cluster.now + 300, "one and a half pauses"

    def test_news_hasten_an_attempt_that_is_stuck(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster["a"]._raises = 6
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        attempt = cluster["a"]._attempt
        assert attempt is not None and attempt.replace_at_ms > cluster.now + 30_000
        cluster.do("a", cluster["a"].verdict("b", 1, UNREACHABLE, cluster.now))
        assert attempt.replace_at_ms <= cluster.now + STUCK_MS


class TestForgetting:
    def test_a_checkpoint_forgets_those_whom_no_view_names(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        cluster.kill("d")
        cluster.deliver()
        cluster.round("abc")
        cluster.now += 20_000
        cluster.kill("c")
        assert sorted(cluster["a"]._book.records) == [member("c"), member("d")]
        cluster.do("a", cluster["a"].checkpointed((2, 2), cluster.now))
        assert sorted(cluster["a"]._book.records) == [member("c")]

    def test_one_that_was_in_no_view_of_this_life_forgets_all_the_same(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.do("a", cluster["a"].checkpointed((1, 1), cluster.now))
        again = cluster.start("a", boot=2, completed=state(1, 1))
        assert cluster.do("a", again.checkpointed((1, 1), cluster.now)).persist is not None


class TestStandingViews:
    def test_one_that_can_no_longer_enter_is_cause(self) -> None:
        """c said other sets under the number of the view that the others have installed."""
        cluster = Cluster("abcd").run("abcd")
        words = {name: last_word(cluster.do(name, cluster[name].at_barrier(cluster.now))) for name in "abcd"}
        cluster.deliver()
        cluster.now += 20_000
        odd = replace(words["c"], candidates=("a", "b", "c", "d", "e"))
        ready = cluster.do("b", cluster["b"].receive(odd, cluster.now))
        assert "c cannot enter view 2" in ready.trace[0] and cluster["b"].change_wanted

    def test_a_learner_is_not_lost_without_its_voters_reason(self) -> None:
        cluster = with_learner()
        cluster.verdict("a", UNREACHABLE, by="c")
        assert cluster["c"].view is not None
        cluster.verdict("b", UNREACHABLE, by="c")
        assert cluster["c"].left_out and cluster["c"].view is None

    def test_a_voter_that_asks_to_be_let_in_is_lost_to_it_too(self) -> None:
        cluster = with_learner()
        cluster.verdict("a", UNREACHABLE, by="c")
        cluster.do("c", cluster["c"].join_requested("b", cluster.now))
        assert cluster["c"].left_out


class TestOpening:
    def test_what_was_adopted_too_late_is_said_in_the_next_attempt(self) -> None:
        cluster = Cluster("abc").run("abc")
        done = cluster.round("ab")
        for name in "abc":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert cluster["c"].behind
        said = last_word(cluster["c"].at_barrier(cluster.now))
        assert said.completed == state(1, 1)
        assert not cluster["c"].adopted(done, cluster.now).accepted
        ready = cluster["c"].receive(Surpassed(sender=member("a"), n=9), cluster.now)
        assert last_word(ready).n == 10 and last_word(ready).completed == done

    def test_such_an_attempt_waits_for_nobody(self) -> None:
        cluster = Cluster("abc").run("abc")
        done = cluster.round("ab")
        for name in "abc":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        cluster["c"].at_barrier(cluster.now)
        cluster["c"].adopted(done, cluster.now)
        assert last_word(later(cluster, "c")).completed == done

    def test_a_learner_replaces_no_attempt(self) -> None:
        cluster = with_learner()
        cluster.do("c", cluster["c"].receive(last_word(cluster["a"].at_barrier(cluster.now)), cluster.now))
        cluster["c"].adopted(state(1, 1), cluster.now)
        assert cluster["c"]._late == state(1, 1)
        later(cluster, "c")
        assert cluster["c"].frozen and cluster["c"].promises.n == 3

    def test_a_restarted_voter_does_not_vote_in_its_new_life(self) -> None:
        cluster = Cluster("abc").run("abc")
        for name in "ab":
            cluster.do(name, cluster[name].verdict("c", 2, REACHABLE, cluster.now))
        cluster.deliver()
        assert cluster["a"].frozen and last_word(later(cluster, "a", 200)).voters == ("a", "b")

    def test_what_it_says_for_people(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.do("a", cluster["a"].join_requested("c", cluster.now))
        ready = cluster.do("a", cluster["a"].at_barrier(cluster.now))
        assert ready.trace == ("proposes 2 a+b teaching c without none: agreed at the barrier",)
        ready = cluster.do("a", cluster["a"].verdict("c", 1, UNREACHABLE, cluster.now))
        assert ready.trace == ("proposes 2 a+b without c: the sets grew",)
        cluster = refused()
        ready = cluster.do("c", cluster["c"].evict("a", cluster.now))
        assert ready.trace == ("proposes 2 c+d without a+b, evicted a: the sets grew",)
        cluster = Cluster("ab").run("ab")
        cluster.start("c")
        for name in "ab":
            cluster.do(name, cluster[name].join_requested("c", cluster.now))
        words = [last_word(cluster.do(name, cluster[name].at_barrier(cluster.now))) for name in "ba"]
        cluster.do("a", cluster["a"].receive(words[0], cluster.now))
        answer = last_word(cluster.do("c", cluster["c"].receive(words[1], cluster.now)))
        ready = cluster.do("a", cluster["a"].receive(answer, cluster.now))
        assert ready.trace == ("installed view 2 a+b teaching c from (1, 1)",)
        cluster = Cluster("a")
        assert cluster["a"].found(("a",), 0).trace[-1] == "installed view 1 a from (0, 0)"


class TestAdvancing:
    def test_the_same_words_are_judged_once(self) -> None:
        cluster = refused()
        assert later(cluster, "c", 10).trace == ()

    def test_one_that_is_left_out_repeats_nothing(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c", UNREACHABLE)
        cluster.deliver()
        cluster.down.clear()
        cluster["c"].at_barrier(cluster.now)
        cluster.do("c", cluster["c"].receive(Surpassed(sender=member("b"), n=2), cluster.now))
        cluster.deliver()
        assert cluster["c"].left_out and cluster["c"]._attempt is not None
        assert later(cluster, "c", 300).sends == ()

    def test_an_attempt_that_ended_is_not_replaced(self) -> None:
        """d is back before the last word is in: it is let in by the next change, not by undoing this one."""
        cluster = Cluster("abcd").run("abcd")
        words = {}
        for name in "abc":
            cluster[name].at_barrier(cluster.now)
            words[name] = last_word(cluster[name].verdict("d", 1, UNREACHABLE, cluster.now))
        cluster["a"].receive(words["b"], cluster.now)
        cluster["a"].verdict("d", 1, REACHABLE, cluster.now)
        cluster["a"].join_requested("d", cluster.now)
        attempt = cluster["a"]._attempt
        assert attempt is not None
        attempt.replace_at_ms = cluster.now
        ready = cluster["a"].receive(words["c"], cluster.now)
        assert ready.installed is not None and not cluster["a"].frozen

    def test_a_silent_voter_is_not_dropped(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        assert last_word(later(cluster, "a", 450)).stopped == ()


class TestHistories:
    def test_words_of_two_make_no_view(self) -> None:
        cluster = Cluster("abc")
        words = {}
        for name in "abc":
            words[name] = last_word(cluster[name].found(("a", "b", "c"), cluster.now))
        for name in "ab":
            cluster["c"].receive(words[name], cluster.now)
        for name in "ab":
            said = replace(words[name], voters=("a", "b", "c"), installed=True, history=name.encode() * 16)
            ready = cluster["c"].receive(said, cluster.now)
        assert ready.installed is None and "mixes histories" in "".join(ready.trace)
        assert cluster["c"].waiting_for() is None, "nobody to wait for would help"

    def test_newcomers_that_were_asked_to_join_one_found_no_second(self) -> None:
        """c and d were about to found, and a, of a history, was among them for a moment."""
        cluster = Cluster("acd")
        for name in "cd":
            cluster.start(name, disk=Promises(n=1))
            words = cluster[name].found(("a", "c", "d"), cluster.now)
        word = last_word(words)
        cluster.do("a", cluster["a"].found(("a",), cluster.now))
        cluster.do("a", cluster["a"].join_requested("c", cluster.now))
        cluster.do("a", cluster["a"].join_requested("d", cluster.now))
        cluster.do("c", cluster["c"].receive(last_word(cluster["a"].at_barrier(cluster.now)), cluster.now))
        cluster.do("c", cluster["c"].verdict("a", 1, UNREACHABLE, cluster.now))
        said = replace(word, stopped=("a",), voters=("a", "c", "d"))
        ready = cluster.do("c", cluster["c"].receive(said, cluster.now))
        assert "would found a second history" in "".join(ready.trace) and cluster["c"].view is None


class TestReplacing:
    """An attempt that cannot end as it is gives way to another, but only if that one may end better."""

    def test_for_a_voter_that_is_back(self) -> None:
        cluster = refused()
        later(cluster, "c", 10_000)
        assert cluster["c"].promises.n == 2, "nothing has changed"
        cluster.verdict("a", REACHABLE, by="c")
        word = last_word(later(cluster, "c"))
        assert (word.n, word.stopped) == (3, ("b",))

    def test_for_one_that_is_back_before_anything_was_decided(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        cluster.verdict("c", UNREACHABLE, by="a")
        cluster.verdict("c", REACHABLE, by="a")
        word = last_word(later(cluster, "a"))
        assert (word.n, word.stopped) == (3, ())

    def test_not_for_a_stranger_unless_it_asks(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].join_requested("e", cluster.now))
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        assert last_word(later(cluster, "a", 450)).stopped == ("e",)
        later(cluster, "a", 10_000)
        assert cluster["a"].promises.n == 2, "e did not answer, and nobody needs it"
        cluster.now += STUCK_MS
        word = last_word(cluster.do("a", cluster["a"].join_requested("e", cluster.now)))
        assert word.n == 3 and word.candidates == ("a", "b", "c", "e") and word.stopped == ()

    def test_for_whoever_may_hold_newer_work(self) -> None:
        """a completed a round alone and crashed: its next life is no voter, and needed."""
        cluster = Cluster("ab").run("ab")
        for name in "ab":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        cluster.round("a")
        cluster.now += 20_000
        cluster.kill("a")
        cluster.deliver()
        assert cluster["b"].waiting_for() == "newer work may be on a; waiting for a"
        cluster.verdict("a", REACHABLE, boot=2)
        word = last_word(later(cluster, "b"))
        assert (word.n, word.stopped) == (4, ())

    def test_for_whoever_is_missing_in_a_count(self) -> None:
        """All were restarted: c is nobody's voter, and needed."""
        cluster = Cluster("abc").run("abc")
        for name in "abc":
            cluster.do(name, cluster[name].checkpointed((1, 1), cluster.now))
        cluster.mail.clear()
        for name in "ab":
            cluster.start(name, boot=2, completed=state(1, 1))
        cluster.down.add("c")
        for name in "ab":
            cluster.do(name, cluster[name].found(("a", "b", "c"), cluster.now))
        cluster.deliver()
        cluster.verdict("c", UNREACHABLE)
        cluster.deliver()
        assert "waiting for c" in (cluster["a"].waiting_for() or "")
        n = cluster["a"].promises.n
        cluster.verdict("c", REACHABLE, boot=2)
        word = last_word(later(cluster, "a"))
        assert (word.n, word.stopped) == (n + 1, ())

    def test_for_one_that_restarted_after_its_word(self) -> None:
        cluster = Cluster("abc").run("abc")
        word = last_word(cluster["b"].at_barrier(cluster.now))
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        cluster.do("a", cluster["a"].receive(word, cluster.now))
        later(cluster, "a", 10_000)
        assert cluster["a"].promises.n == 2, "c is silent, and that is all"
        cluster.verdict("b", REACHABLE, by="a", boot=2)
        assert last_word(later(cluster, "a")).n == 3

    def test_not_for_one_that_restarted_after_it_was_stopped(self) -> None:
        cluster = Cluster("abc").run("abc")
        word = last_word(cluster["b"].at_barrier(cluster.now))
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        cluster.do("a", cluster["a"].receive(word, cluster.now))
        cluster.verdict("b", UNREACHABLE, by="a")
        cluster.verdict("b", REACHABLE, by="a", boot=2)
        later(cluster, "a", 10_000)
        assert cluster["a"].promises.n == 2
        cluster.now += STUCK_MS
        word = last_word(cluster.do("a", cluster["a"].join_requested("b", cluster.now)))
        assert (word.n, word.stopped) == (3, ()), "but if it asks"

    def test_for_one_that_says_other_sets(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster["b"].at_barrier(cluster.now)
        word = last_word(cluster["b"].verdict("c", 1, UNREACHABLE, cluster.now))
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        cluster.do("a", cluster["a"].receive(word, cluster.now))
        assert cluster["a"].waiting_for() == "attempt 2 waits for the answer of b, c"
        assert last_word(later(cluster, "a")).n == 3

    def test_with_all_that_are_here_and_none_that_is_gone(self) -> None:
        """d and e asked to join and ask no more: d answered, e is dead."""
        cluster = Cluster("abc").run("abc")
        for name in "de":
            cluster.start(name)
            cluster.do("a", cluster["a"].join_requested(name, cluster.now))
        word = last_word(cluster.do("a", cluster["a"].at_barrier(cluster.now)))
        cluster.do("a", cluster["a"].receive(last_word(cluster["d"].receive(word, cluster.now)), cluster.now))
        cluster.verdict("e", UNREACHABLE, by="a")
        word = last_word(later(cluster, "a", 10_000))
        assert word.n == 3 and word.candidates == ("a", "b", "c", "d")


class TestInstalling:
    def test_the_base_on_disk_outlives_a_change(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].checkpointed((1, 1), cluster.now))
        base = cluster["a"].promises.base
        for name in "abc":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert base is not None and cluster["a"].promises.base == base
        assert last_word(cluster["a"].at_barrier(cluster.now)).known == base

    def test_what_was_said_with_incarnations_unheard_of_is_said_right(self) -> None:
        """a hears from b that c votes too before it hears from c."""
        cluster = Cluster("abc")
        first = last_word(cluster["a"].found(("a", "b", "c"), cluster.now))
        of_b = last_word(cluster["b"].receive(first, cluster.now))
        of_c = last_word(cluster["c"].receive(of_b, cluster.now))
        cluster["a"].receive(last_word(cluster["b"].receive(of_c, cluster.now)), cluster.now)
        assert member("c", 0) in cluster["a"].promises.pending[-1].members
        ready = cluster["a"].receive(of_c, cluster.now)
        assert ready.installed is not None
        said = [ref for ref in cluster["a"].promises.pending if ref.peers == ("a", "b", "c")]
        assert said == [ready.installed.ref]

    def test_other_sets_and_other_numbers_stay_promised(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        for name in "abcd":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        cluster.now += 20_000
        for name in "abc":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.mail.clear()
        cluster.kill("d")
        cluster.deliver()
        cluster.standing("abc")
        said = [(ref.view_epoch, "".join(ref.peers)) for ref in cluster["a"].promises.pending]
        assert said[-3:] == [(2, "abcd"), (3, "abc"), (3, "abcd")]
        for name in "abc":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        said = [(ref.view_epoch, "".join(ref.peers)) for ref in cluster["a"].promises.pending]
        assert said[-3:] == [(3, "abc"), (3, "abcd"), (4, "abc")]

    def test_who_was_evicted_in_vain_is_not_named(self) -> None:
        """b is back before all that are waited for are given up: the history goes on."""
        cluster = refused()
        history = cluster["c"].history
        for name in "cd":
            cluster.do(name, cluster[name].evict("a", cluster.now))
        cluster.down.discard("b")
        for name in "cd":
            cluster.verdict("b", REACHABLE, by=name)
        cluster.verdict("a", UNREACHABLE, by="b")
        cluster.wait(STUCK_MS)
        view = cluster.standing("bcd")
        assert (view.history, view.parent, view.evicted) == (history, b"", ())

    def test_a_new_history_begins_without_promises(self) -> None:
        cluster = Cluster("abcd", Quorum.ANY).run("abcd")
        for name in "cd":
            cluster.do(name, cluster[name].checkpointed((1, 1), cluster.now))
        cluster.down = set("ab")
        for gone in "ab":
            cluster.verdict(gone, UNREACHABLE)
        cluster.deliver()
        view = cluster.standing("cd")
        promises = cluster["c"].promises
        assert (promises.base, promises.known, promises.pending) == (None, None, (view.ref,))
        word = last_word(cluster["c"].at_barrier(cluster.now))
        assert (word.base, word.known) == (None, None)


@pytest.mark.parametrize("verdict", [UNREACHABLE, CRASHED])
def test_a_verdict_about_oneself_is_nothing(verdict: object) -> None:
    cluster = Cluster("ab").run("ab")
    assert cluster["a"].verdict("a", 1, verdict, cluster.now).sends == ()  # type: ignore[arg-type]
    assert not cluster["a"].change_wanted and "a" not in cluster["a"]._book.verdicts


def test_flapping_makes_changes_wait_but_not_for_the_dead() -> None:
    """No round of a view with a dead member completes: there is nothing to go on with meanwhile."""
    cluster = Cluster("abcd").run("abcd")
    for _ in range(6):  # attempts in a row
        for name in cluster.up():
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
    pause_ms = cluster["a"]._not_before_ms - cluster.now
    assert pause_ms > 1_000
    cluster.kill("d")
    cluster.deliver()
    assert cluster.standing("abc").view_epoch > 2, "at once"
