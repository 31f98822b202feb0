"""Agreement, one behaviour at a time: founding, deaths, freezing, promises, adoption."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import (
    Cause,
    MemberId,
    Propose,
    Surpassed,
)
from p2p_dmc.core.quorum import Quorum
from tests.core.agreement_cluster import CRASHED, REACHABLE, UNREACHABLE, Cluster, state
from tests.sim.mutants import mutant


class TestFounding:
    def test_all_install_the_same_view(self) -> None:
        cluster = Cluster("abcd")
        cluster.found()
        view = cluster.standing("abcd")
        assert view.start == state(0, 0, "a") and view.holders == (MemberId(peer_id="a", boot=1),)
        assert view.payloads == (b"of a", b"of b", b"of c", b"of d")
        assert len({cluster[name].history for name in "abcd"}) == 1 and len(view.history) == 16

    def test_alone_at_once(self) -> None:
        cluster = Cluster("a")
        ready = cluster.do("a", cluster["a"].found(("a",), cluster.now))
        assert ready.installed is not None and not ready.sends

    @given(st.integers(0, 10_000), st.integers(2, 6))
    @settings(max_examples=40, deadline=None)
    def test_in_any_order_of_arrival(self, seed: int, size: int) -> None:
        names = "abcdef"[:size]
        cluster = Cluster(names, seed=seed)
        starters = cluster.rng.sample(names, cluster.rng.randrange(1, size + 1))
        for name in starters:
            cluster.do(name, cluster[name].found(tuple(names), cluster.now))
        cluster.deliver(shuffle=True)
        cluster.standing(names)

    def test_a_silent_one_is_left_out_after_a_moment(self) -> None:
        cluster = Cluster("abc")
        cluster.down.add("c")
        for name in "ab":
            cluster.do(name, cluster[name].found(("a", "b", "c"), cluster.now))
        cluster.deliver()
        assert cluster["a"].waiting_for() == "attempt 1 waits for the answer of c"
        cluster.wait(600)
        assert cluster.standing("ab").stopped == ("c",)

    def test_histories_differ_between_foundings(self) -> None:
        one, two = Cluster("ab"), Cluster("ac")
        one.found()
        two.found()
        assert one["a"].history != two["a"].history


class TestSteadyState:
    def test_it_costs_nothing(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        cluster.wait(600_000, step_ms=1_000)
        assert cluster.sent == []

    def test_rounds_follow_the_view_and_each_other(self) -> None:
        cluster = Cluster("ab").run("ab")
        for wrong in (state(1, 1), state(1, 3), state(2, 2)):
            assert not cluster["a"].complete(wrong, cluster.now).accepted
        assert cluster["a"].complete(state(1, 2), cluster.now).accepted

    def test_the_first_round_tells_the_members_the_new_promises(self) -> None:
        """Whoever crashes later is counted with them."""
        cluster = Cluster("abc")
        cluster.found()
        cluster.adopt("abc")
        version = cluster["a"].promise_version
        ready = cluster["a"].complete(state(1, 1), cluster.now)
        assert [peer for peer, _ in ready.sends] == ["b", "c"] and cluster["a"].promise_version > version
        assert not cluster["a"].complete(state(1, 2), cluster.now).sends


class TestDeath:
    def test_a_crash_takes_a_few_message_delays_and_no_timer(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        done = cluster.round("abcd")
        cluster.hops = 0
        cluster.kill("a")
        cluster.deliver()
        view = cluster.standing("bcd")
        assert view.start == done and view.holders == view.members and cluster.hops <= 4

    def test_a_round_that_some_completed_is_kept(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        done = cluster.round("cd")
        cluster.kill("a")
        cluster.deliver()
        view = cluster.standing("bcd")
        assert view.start == done and [member.peer_id for member in view.holders] == ["c", "d"]

    def test_one_opinion_is_not_enough(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        cluster.verdict("a", UNREACHABLE, by="b")
        cluster.deliver()
        cluster.wait(5_000)
        assert all(isinstance(message, Cause) for _, _, message in cluster.sent)
        cluster.standing("abcd")

    def test_a_minority_stays_where_it_is_and_says_so(self) -> None:
        cluster = Cluster("abcd").run("abcd")
        cluster.cut = {(x, y) for x in "ab" for y in "cd"} | {(y, x) for x in "ab" for y in "cd"}
        for x, y in sorted(cluster.cut):
            cluster.verdict(y, UNREACHABLE, by=x)
        cluster.deliver()
        cluster.wait(3_000)
        assert cluster.standing("ab").view_epoch == 2
        assert cluster["c"].view is not None and cluster["c"].view.view_epoch == 1
        assert cluster["c"].waiting_for() == "2 of 4 members of view 1 answer; waiting for a, b"

    @pytest.mark.parametrize("victim", "ab")
    def test_of_two_either_may_crash(self, victim: str) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.kill(victim)
        cluster.deliver()
        cluster.standing("b" if victim == "a" else "a")

    def test_of_two_a_silent_first_one_stops_the_other(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.kill("a", UNREACHABLE)
        cluster.wait(10_000)
        assert [view.view_epoch for view in cluster.views["b"]] == [1]
        cluster = Cluster("ab").run("ab")
        cluster.kill("b", UNREACHABLE)
        cluster.wait(1_000)
        cluster.standing("a")

    def test_strict_leaves_nobody_out_for_being_seen_to_crash(self) -> None:
        cluster = Cluster("ab", Quorum.STRICT).run("ab")
        cluster.kill("a")
        cluster.wait(10_000)
        assert [view.view_epoch for view in cluster.views["b"]] == [1]

    def test_a_crash_whose_last_promises_did_not_arrive_is_only_a_death(self) -> None:
        cluster = Cluster("ab").run("ab")
        cluster.down.add("a")
        unheard = cluster["a"].promise_version + 1
        cluster.do("b", cluster["b"].verdict("a", 1, CRASHED, cluster.now, version=unheard))
        cluster.wait(10_000)
        assert [view.view_epoch for view in cluster.views["b"]] == [1]

    def test_one_that_dies_during_the_change_is_left_out_of_it(self) -> None:
        cluster = Cluster("abcde").run("abcde")
        cluster.kill("a")
        cluster.down.add("b")  # before it says a word
        cluster.deliver()
        assert cluster["c"].frozen
        cluster.verdict("b", CRASHED)
        cluster.deliver()
        assert cluster.standing("cde").stopped == ("a", "b")
        assert cluster["c"].view.view_epoch == 2  # type: ignore[union-attr]

    def test_a_failed_collective_freezes_before_anybody_knows_why(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.down.add("a")
        for name in "bc":
            cluster.do(name, cluster[name].wants_change("collective failed", cluster.now, at_once=True))
        cluster.deliver()
        assert cluster["b"].frozen and cluster["c"].frozen
        cluster.verdict("a", CRASHED)
        cluster.deliver()
        cluster.standing("bc")


class TestFreeze:
    def test_nothing_completes_after_the_word(self) -> None:
        """What was said to be completed is final: rule "freeze"."""
        cluster = Cluster("abc").run("abc")
        ready = cluster.do("a", cluster["a"].at_barrier(cluster.now))
        assert ready.froze and cluster["a"].frozen
        assert not cluster["a"].complete(state(1, 2), cluster.now).accepted
        assert cluster["a"].completed == state(1, 1)

    def test_following_freezes_too(self) -> None:
        cluster = Cluster("abc").run("abc")
        ready = cluster["a"].at_barrier(cluster.now)
        _, word = ready.sends[0]
        assert cluster["b"].receive(word, cluster.now).froze
        assert not cluster["b"].complete(state(1, 2), cluster.now).accepted

    def test_the_content_is_fixed_at_the_first_word(self) -> None:
        cluster = Cluster("abc").run("abc")
        first = cluster["a"].at_barrier(cluster.now).sends[0][1]
        more = cluster["a"].verdict("c", 1, UNREACHABLE, cluster.now).sends[0][1]
        assert isinstance(first, Propose) and isinstance(more, Propose) and more.stopped == ("c",)
        assert (first.n, first.completed, first.payload) == (more.n, more.completed, more.payload)


class TestPromises:
    def test_they_are_on_disk_before_they_are_said(self) -> None:
        """Rules "record" and "every_set": each set said is in the promises that come with it."""
        cluster = Cluster("abcd").run("abcd")
        said = []
        for ready in (
            cluster["a"].at_barrier(cluster.now),
            cluster["a"].verdict("c", 1, UNREACHABLE, cluster.now),
            cluster["a"].verdict("d", 1, UNREACHABLE, cluster.now),
        ):
            word = ready.sends[0][1]
            assert isinstance(word, Propose) and ready.persist is not None
            said.append((word.n, word.members))
            kept = [(view.view_epoch, view.peers) for view in ready.persist.pending]
            assert set(said) <= set(kept) and ready.persist.n == word.n
            assert word.pending == ready.persist.pending
        assert len(set(said)) == 3

    def test_a_restarted_peer_never_says_an_old_number(self) -> None:
        """Rule "fresh"."""
        cluster = Cluster("abc").run("abc")
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        word = next(message for _, peer, message in cluster.mail if peer == "b")
        again = cluster.start("b", boot=2, disk=replace(cluster.disk["b"], n=2))
        ready = again.receive(word, cluster.now)
        assert ready.sends == (("a", Surpassed(sender=again.me, n=2)),) and ready.persist is None
        ready = again.found(("a", "b"), cluster.now)
        assert ready.persist is not None and ready.persist.n == 3

    def test_whoever_hears_that_goes_above_it(self) -> None:
        cluster = Cluster("abc").run("abc")
        cluster.kill("c")
        cluster.deliver()
        cluster.start("c", boot=2, disk=replace(cluster.disk["c"], n=40))
        cluster.verdict("c", REACHABLE, boot=2)
        for name in "ab":
            cluster.do(name, cluster[name].join_requested("c", cluster.now))
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert cluster.standing("abc").view_epoch == 41

    def test_the_base_moves_on_disk_only_with_a_checkpoint(self) -> None:
        """Rule "with_checkpoint"."""
        cluster = Cluster("ab").run("ab")
        promises = cluster["a"].promises
        assert promises.base is None and promises.pending[-1] == cluster["a"].view.ref  # type: ignore[union-attr]
        cluster["a"].committed((1, 1))
        ready = cluster["a"].checkpointed((1, 1), cluster.now)
        assert ready.persist is not None and ready.persist.base == ready.persist.known == promises.pending[-1]
        assert ready.persist.pending == ()

    def test_a_checkpoint_of_an_older_view_moves_nothing(self) -> None:
        cluster = Cluster("abc").run("abc")
        before = cluster["a"].promises
        cluster.kill("c")
        cluster.deliver()
        cluster.round("ab")
        assert cluster["a"].checkpointed((1, 1), cluster.now).persist is None
        assert cluster["a"].promises.base == before.base


class TestSameSets:
    def test_words_about_other_sets_do_not_count(self) -> None:
        """a hears everybody, but b and c have not heard that d is gone: rule "same_sets"."""

        def case(cluster: Cluster) -> Agreement:
            words = {name: cluster[name].at_barrier(cluster.now).sends[0][1] for name in "abcd"}
            cluster["a"].verdict("d", 1, UNREACHABLE, cluster.now)
            for name in "bc":
                cluster["a"].receive(words[name], cluster.now)
            return cluster["a"]

        assert case(Cluster("abcd").run("abcd")).frozen
        founded = Cluster("abcd").run("abcd")
        with mutant("same_sets"):
            assert not case(founded).frozen

    def test_a_view_is_installed_once_and_never_late(self) -> None:
        """Rule "increasing"."""
        cluster = Cluster("abc")
        cluster.found()
        old = [(source, peer, message) for source, peer, message in cluster.sent]
        cluster.adopt("abc")
        cluster.round("abc")
        cluster.now += 20_000
        cluster.kill("c")
        cluster.deliver()
        installed = {name: len(cluster.views[name]) for name in "ab"}
        cluster.mail = old
        cluster.deliver()
        cluster.standing("ab")
        assert {name: len(cluster.views[name]) for name in "ab"} == installed


class TestHearsay:
    def test_a_member_in_contact_is_not_dropped_on_hearsay(self) -> None:
        def case(*, crashed: bool = False) -> tuple[str, ...]:
            cluster = Cluster("abcd").run("abcd")
            cluster.do("b", cluster["b"].verdict("d", 1, CRASHED if crashed else UNREACHABLE, cluster.now))
            word = next(m for _, m in cluster["b"].at_barrier(cluster.now).sends if isinstance(m, Propose))
            assert word.stopped == ("d",)
            said = [m for _, m in cluster["a"].receive(word, cluster.now).sends if isinstance(m, Propose)]
            return said[-1].stopped

        assert case() == ()
        assert case(crashed=True) == ("d",), "a crash that somebody saw is no hearsay"
        with mutant("hearsay"):
            assert case() == ("d",)

    def test_an_attempt_at_odds_is_replaced(self) -> None:
        """b took d for dead and was wrong."""
        cluster = Cluster("abcd").run("abcd")
        cluster.verdict("d", UNREACHABLE, by="b")
        for name in "abcd":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        assert all(cluster[name].frozen for name in "abcd")
        cluster.verdict("d", REACHABLE, by="b")
        cluster.wait(4_000)
        assert cluster.standing("abcd").view_epoch == 3


class TestAdoption:
    def test_whoever_is_behind_completes_nothing(self) -> None:
        """Rule "adopt"."""
        cluster = Cluster("ab")
        cluster.found()
        done = state(1, 1)
        assert not cluster["b"].complete(done, cluster.now).accepted
        assert cluster["b"].completed == state(0, 0, "b")
        cluster.adopt("b")
        assert cluster["b"].completed == state(0, 0, "a")
        assert cluster["b"].complete(done, cluster.now).accepted

    def test_only_the_start_or_newer_is_adopted(self) -> None:
        cluster = Cluster("ab").run("ab")
        assert not cluster["a"].adopted(state(0, 0, "z"), cluster.now).accepted
        assert cluster["a"].completed == state(1, 1)

    def joined(self) -> Cluster:
        """a has worked alone; b and c were just let in as learners and have nothing yet."""
        cluster = Cluster("a").run("a")
        for name in "bc":
            cluster.start(name)
            cluster.do("a", cluster["a"].join_requested(name, cluster.now))
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        cluster.deliver()
        view = cluster.standing("abc")
        assert [member.peer_id for member in view.voters] == ["a"]
        assert view.ref.peers == ("a",), "votes are counted without learners"
        cluster.now += 20_000
        return cluster

    def promoted(self, name: str) -> Cluster:
        """One of the two has caught up, and the next view made it a voter."""
        cluster = self.joined()
        cluster.adopt(name)
        assert cluster[name].caught_up and cluster[name].change_wanted
        for peer in "abc":
            cluster.do(peer, cluster[peer].at_barrier(cluster.now))
        cluster.deliver()
        assert [member.peer_id for member in cluster.standing("abc").voters] == ["a", name]
        cluster.now += 20_000
        return cluster

    def test_newcomers_do_not_go_on_without_what_they_have_not_adopted(self) -> None:
        cluster = self.joined()
        cluster.kill("a")
        cluster.wait(10_000)
        assert cluster["b"].left_out and cluster["c"].left_out
        assert "waiting for a" in (cluster["b"].waiting_for() or "")
        for name in "bc":
            cluster.do(name, cluster[name].found(("b", "c"), cluster.now))
        cluster.wait(10_000)
        assert cluster["b"].frozen and cluster["c"].frozen
        assert "nobody here remembers view 2" in (cluster["b"].waiting_for() or "")

    def test_a_learner_completes_nothing_and_nobody_waits_for_it(self) -> None:
        cluster = self.joined()
        assert not cluster["b"].complete(state(2, 2), cluster.now).accepted
        assert cluster.round("a").lineage == (2, 2)
        assert not cluster["b"].caught_up and not cluster["b"].change_wanted

    def test_a_learner_adopts_the_newest_state_of_its_view(self) -> None:
        cluster = self.joined()
        newest = cluster.round("a")
        assert cluster.do("b", cluster["b"].adopted(newest, cluster.now)).accepted
        assert cluster["b"].caught_up and cluster["b"].completed == newest

    def test_a_learner_that_caught_up_has_no_vote_yet(self) -> None:
        cluster = self.joined()
        cluster.adopt("b")
        cluster.kill("a")
        cluster.wait(10_000)
        assert cluster["b"].frozen and "waiting for a" in (cluster["b"].waiting_for() or "")

    def test_a_silent_learner_is_left_out_by_the_voters(self) -> None:
        cluster = self.promoted("b")
        cluster.down.add("c")
        cluster.verdict("c", UNREACHABLE)
        cluster.wait(1_000)
        assert [member.peer_id for member in cluster.standing("ab").voters] == ["a", "b"]

    def test_a_learner_never_raises_an_attempt(self) -> None:
        cluster = self.joined()
        ready = cluster["b"].at_barrier(cluster.now)
        assert not ready.accepted and not cluster["b"].frozen
        cluster.verdict("c", UNREACHABLE, by="b")
        cluster.wait(3_000)
        assert cluster["b"].view is not None and cluster["b"].view.view_epoch == 2

    def fail_with_b(self, cluster: Cluster) -> None:
        """The reduction of a view in which b learns fails, as each voter is told."""
        view = cluster["a"].view
        assert view is not None and "b" in [learner.peer_id for learner in view.learners]
        cluster.do("a", cluster["a"].wants_change("broken", cluster.now, at_once=True))
        cluster.do("a", cluster["a"].wants_change("b: broken", cluster.now, at_once=True))
        cluster.deliver()
        cluster.wait(1_000)

    def ask(self, cluster: Cluster) -> bool:
        """b asks to be let in; whether that changes the view."""
        cluster.do("a", cluster["a"].join_requested("b", cluster.now))
        wanted = cluster["a"].change_wanted
        if wanted:
            cluster.do("a", cluster["a"].at_barrier(cluster.now))
            cluster.deliver()
        return wanted

    def test_a_learner_with_whom_nothing_works_is_let_in_less_and_less(self) -> None:
        cluster = Cluster("a").run("a")
        cluster.start("b")
        assert self.ask(cluster)
        cluster.now += 20_000
        self.fail_with_b(cluster)
        assert cluster.standing("ab").view_epoch == 3, "once may be anybody's fault"
        pauses = []
        for _ in range(3):
            cluster.now += 20_000
            self.fail_with_b(cluster)
            cluster.standing("a")
            cluster["a"].complete(
                state(cluster["a"].view.view_epoch, cluster["a"].completed.lineage[1] + 1), cluster.now
            )  # type: ignore[union-attr]
            failed = cluster.now
            while not self.ask(cluster):
                cluster.now += 500
            pauses.append(cluster.now - failed)
        assert pauses[0] < pauses[1] < pauses[2]
        cluster.now += 20_000
        cluster.round("a")
        self.fail_with_b(cluster)
        assert "b" in cluster.standing("ab").peers, "a round with it went well in between"

    def with_two_learners(self) -> Cluster:
        """a and b train, c and d learn, in a view that has stood for a while."""
        cluster = Cluster("ab").run("ab")
        for name in "cd":
            cluster.start(name)
        self.let_in(cluster, "cd")
        cluster.standing("abcd")
        return cluster

    def let_in(self, cluster: Cluster, names: str) -> None:
        for voter in "ab":
            for name in names:
                cluster.do(voter, cluster[voter].join_requested(name, cluster.now))
        for voter in "ab":
            if not cluster[voter].frozen:
                cluster.do(voter, cluster[voter].at_barrier(cluster.now))
        cluster.deliver()
        cluster.now += 2_000

    def test_of_learners_only_the_one_that_cannot_enter_is_blamed_and_once_a_view(self) -> None:
        cluster, lines = self.with_two_learners(), []
        for view in range(2):
            for _ in range(3):  # alone b, which is not the first of the two, cannot leave the view
                lines += [
                    line for line in cluster["b"].join_requested("c", cluster.now).trace if "lets" in line
                ]
            assert len(lines) == view, "once may be anybody's fault, and asking again is no other view"
            cluster.do("a", cluster["a"].join_requested("c", cluster.now))
            cluster.wait(3_000)
            if not view:
                assert "c" in cluster.standing("abcd").peers
        assert lines == ["lets c not in for 30000 ms: 2 views with it failed"]
        assert cluster.standing("abd").peers == ("a", "b", "d")

    def test_only_a_voter_that_goes_on_without_a_learner_is_followed_in_that(self) -> None:
        for sender, kept in (("b", False), ("e", True)):
            cluster = self.with_two_learners()
            cluster["a"].at_barrier(cluster.now)
            word = cluster["b"].at_barrier(cluster.now).sends[0][1]
            assert isinstance(word, Propose)
            names = tuple(sorted({"a", "b", "d", sender}))
            other = replace(
                word, n=9, sender=MemberId(peer_id=sender, boot=1), candidates=names, voters=("a", "b")
            )
            cluster["a"].receive(other, cluster.now)
            attempt = cluster["a"]._attempt
            assert attempt is not None and attempt.n == 9 and ("c" in attempt.candidates) == kept

    def test_one_that_became_a_voter_is_enough(self) -> None:
        cluster = self.promoted("b")
        done = cluster.round("ab")
        cluster.kill("a", UNREACHABLE)
        cluster.wait(5_000)
        standing = cluster["b"].view
        assert standing is not None and "a" in standing.peers, "a is the first of two voters"
        cluster.kill("a")
        cluster.wait(5_000)
        view = cluster.standing("bc")
        assert view.start == done and [member.peer_id for member in view.voters] == ["b"]

    def test_a_download_that_ends_after_the_freeze_is_said_in_the_next_attempt(self) -> None:
        cluster = self.joined()
        cluster.cut = {("c", "a"), ("c", "b")}  # the attempt cannot end before b has it
        for peer in "ab":
            cluster.do(peer, cluster[peer].at_barrier(cluster.now))
        cluster.deliver()
        assert cluster["b"].frozen
        assert not cluster.do("b", cluster["b"].adopted(state(1, 1), cluster.now)).accepted
        assert cluster["b"].completed == state(0, 0, "b"), "what was said is final"
        cluster.wait(3_000)
        assert cluster["b"].completed == state(1, 1) and not cluster["b"].behind
