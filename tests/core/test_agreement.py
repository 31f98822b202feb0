"""Agreement, one behaviour at a time; the random world is at the end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import (
    AgreementMessage,
    AgreementSettings,
    Cause,
    MemberId,
    Promises,
    Propose,
    Ready,
    StateRef,
    Stopped,
    Surpassed,
    Verdict,
    View,
    ViewRef,
)
from p2p_dmc.core.quorum import Quorum
from tests.core import agreement_world
from tests.core.agreement_mutants import mutant
from tests.core.agreement_world import Violation, World, run

REACHABLE, UNREACHABLE, CRASHED = Verdict.REACHABLE, Verdict.UNREACHABLE, Verdict.CRASHED


def state(epoch: int, number: int, mark: str = "s") -> StateRef:
    return StateRef(lineage=(epoch, number), digest=mark.encode().ljust(16, b"."))


class Cluster:
    """A few cores and a perfect network, on which messages may be held back. Time moves only when told to."""

    def __init__(self, names: str, quorum: Quorum = Quorum.MAJORITY, seed: int = 0) -> None:
        self.now = 1_000
        self.quorum = quorum
        self.rng = random.Random(seed)
        self.cores: dict[str, Agreement] = {}
        self.disk: dict[str, Promises] = {}
        self.mail: list[tuple[str, str, AgreementMessage]] = []
        self.sent: list[tuple[str, str, AgreementMessage]] = []
        self.down: set[str] = set()
        self.cut: set[tuple[str, str]] = set()
        self.views: dict[str, list[View]] = {}
        self.hops = 0
        for name in names:
            self.start(name)

    def start(
        self, name: str, boot: int = 1, completed: StateRef | None = None, disk: Promises | None = None
    ) -> Agreement:
        self.disk[name] = disk or self.disk.get(name, Promises())
        self.views.setdefault(name, [])
        self.down.discard(name)
        self.cores[name] = Agreement(
            me=MemberId(peer_id=name, boot=boot),
            quorum=self.quorum,
            promises=self.disk[name],
            completed=completed or state(0, 0, name),
            payload=lambda: f"of {name}".encode(),
            rng=random.Random(1),
            settings=AgreementSettings(),
            now_ms=self.now,
        )
        return self.cores[name]

    def __getitem__(self, name: str) -> Agreement:
        return self.cores[name]

    def do(self, name: str, ready: Ready) -> Ready:
        if ready.persist is not None:
            self.disk[name] = ready.persist
        for peer, message in ready.sends:
            self.mail.append((name, peer, message))
            self.sent.append((name, peer, message))
        if ready.installed is not None:
            self.views[name].append(ready.installed)
        self.cores[name].check_invariants()
        return ready

    def deliver(self, *, shuffle: bool = False) -> None:
        """Until nobody says anything more; counts the message delays that took."""
        while self.mail:
            batch, self.mail = self.mail, []
            self.hops += 1
            if shuffle:
                self.rng.shuffle(batch)
            for source, peer, message in batch:
                if peer in self.cores and peer not in self.down and (source, peer) not in self.cut:
                    self.do(peer, self[peer].receive(message, self.now))

    def wait(self, duration_ms: int, step_ms: int = 50) -> None:
        end = self.now + duration_ms
        while self.now < end:
            self.now += step_ms
            for name in self.up():
                self.do(name, self[name].tick(self.now))
            self.deliver()

    def up(self) -> list[str]:
        return [name for name in self.cores if name not in self.down]

    def found(self) -> None:
        for name in self.up():
            self.do(name, self[name].found(tuple(sorted(self.up())), self.now))
        self.deliver()

    def verdict(self, about: str, verdict: Verdict, by: str | None = None, boot: int = 1) -> None:
        for name in by or self.up():
            if name != about and name not in self.down:
                self.do(name, self[name].verdict(about, boot, verdict, self.now))

    def kill(self, names: str, verdict: Verdict = CRASHED) -> None:
        self.down |= set(names)
        for name in names:
            self.verdict(name, verdict)

    def round(self, names: str) -> StateRef:
        """These members complete the next round of their view."""
        view = self[names[0]].view
        assert view is not None
        done = state(view.view_epoch, self[names[0]].completed.lineage[1] + 1)
        for name in names:
            assert self.do(name, self[name].complete(done, self.now)).accepted
        self.deliver()
        return done

    def adopt(self, names: str) -> None:
        for name in names:
            view = self[name].view
            assert view is not None
            self.do(name, self[name].adopted(view.start, self.now))

    def standing(self, names: str) -> View:
        """The view that stands at all of these, and of exactly these."""
        views = {self[name].view for name in names}
        assert len(views) == 1, {name: self[name].waiting_for() for name in names}
        (view,) = views
        assert view is not None and view.peers == tuple(names)
        return view

    def run(self, names: str) -> Cluster:
        """Founded, adopted, one round complete, calm again."""
        self.found()
        self.adopt(names)
        self.round(names)
        self.now += 20_000
        self.sent.clear()
        self.hops = 0
        return self


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

        def case() -> Agreement:
            cluster = Cluster("abcd").run("abcd")
            words = {name: cluster[name].at_barrier(cluster.now).sends[0][1] for name in "abcd"}
            cluster["a"].verdict("d", 1, UNREACHABLE, cluster.now)
            for name in "bc":
                cluster["a"].receive(words[name], cluster.now)
            return cluster["a"]

        assert case().frozen
        with mutant("same_sets"):
            assert not case().frozen

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
        """a has worked alone; b and c were just let in and have nothing yet."""
        cluster = Cluster("a").run("a")
        for name in "bc":
            cluster.start(name)
            cluster.do("a", cluster["a"].join_requested(name, cluster.now))
        cluster.do("a", cluster["a"].at_barrier(cluster.now))
        cluster.deliver()
        cluster.standing("abc")
        cluster.now += 20_000
        return cluster

    def test_newcomers_do_not_go_on_without_what_they_have_not_adopted(self) -> None:
        cluster = self.joined()
        cluster.kill("a")
        cluster.wait(10_000)
        assert cluster["b"].frozen and cluster["c"].frozen
        assert "newer work may be on a" in (cluster["b"].waiting_for() or "")

    def test_one_that_has_adopted_is_enough(self) -> None:
        cluster = self.joined()
        cluster.adopt("b")
        cluster.kill("a")
        cluster.deliver()
        view = cluster.standing("bc")
        assert view.start == state(1, 1) and [member.peer_id for member in view.holders] == ["b"]

    def test_a_download_that_ends_after_the_freeze_is_said_in_the_next_attempt(self) -> None:
        cluster = self.joined()
        cluster.kill("a")
        cluster.deliver()
        assert cluster["b"].frozen
        assert not cluster.do("b", cluster["b"].adopted(state(1, 1), cluster.now)).accepted
        assert cluster["b"].completed == state(0, 0, "b"), "what was said is final"
        cluster.wait(3_000)
        assert cluster.standing("bc").start == state(1, 1) and cluster["b"].completed == state(1, 1)


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


class TestWorld:
    @pytest.mark.parametrize("seed", range(24))
    def test_random_lives_end_well(self, seed: int) -> None:
        world = run(seed, 500)
        assert world.installs > 1 and world.rounds > 0

    @pytest.mark.parametrize("quorum", [Quorum.STRICT, Quorum.ANY])
    def test_other_quorums_are_safe(self, quorum: Quorum) -> None:
        for seed in range(6):
            run(seed, 300, quorum=quorum, settle=quorum is Quorum.STRICT)

    def test_the_same_seed_is_the_same_life(self) -> None:
        lives = [run(5, 300, settle=False) for _ in range(2)]
        assert len({(life.installs, life.rounds, life.now, len(life.net)) for life in lives}) == 1

    def test_faults_happen(self) -> None:
        lives = [run(seed, 500, settle=False) for seed in range(12)]
        assert sum(life.faults for life in lives) > 10 and sum(len(life.commits) for life in lives) > 100

    @pytest.mark.parametrize("rule", ["joint", "quorum", "forgotten", "with_checkpoint", "record", "fresh"])
    def test_it_notices_a_missing_rule(self, rule: str) -> None:
        with mutant(rule), pytest.raises(AssertionError):
            for seed in range(200):
                run(seed, 600, settle=False)

    def test_it_notices_that_nothing_happens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agreement_world, "SETTLE_MS", 5_000)
        world = World(3, 3)
        world.found_all()
        monkeypatch.setattr(world, "linked", lambda source, destination: False)
        for host in world.hosts.values():
            world.force(host)
        with pytest.raises(Violation, match="nothing happens"):
            world.settle()
