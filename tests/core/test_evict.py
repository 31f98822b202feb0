"""Evicting: an operator says who is gone for good, and the others go on under a new history (DESIGN section 6)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from p2p_dmc.core.agreement_messages import REPLACED_MAX, Propose, Replaced, View
from p2p_dmc.core.quorum import Quorum
from tests.core.agreement_cluster import CRASHED, REACHABLE, UNREACHABLE, Cluster, state

SILENT = UNREACHABLE


def evict(cluster: Cluster, at: str, who: str) -> list[bool]:
    """An operator says so at one peer, of each in turn; whether it was accepted."""
    accepted = [cluster.do(at, cluster[at].evict(peer, cluster.now)).accepted for peer in who]
    cluster.deliver()
    return accepted


def power_cut(cluster: Cluster, names: str, back: str, *, boot: int = 2) -> None:
    """All stop at once with a checkpoint of the last round; some start again."""
    for name in names:
        cluster.do(name, cluster[name].checkpointed(cluster[name].completed.lineage, cluster.now))
    done = {name: cluster[name].completed for name in names}
    cluster.mail.clear()
    cluster.cores.clear()
    for name in back:
        cluster.start(name, boot=boot, completed=done[name])
    cluster.now += 20_000
    cluster.found()
    cluster.wait(3_000)


def check_new_history(cluster: Cluster, names: str, old: View, gone: Sequence[str]) -> View:
    """A view of these stands, of a history that takes the old one's place from the old one's newest state on."""
    view = cluster.standing(names)
    assert view.history not in (b"", old.history)
    assert (view.parent, view.evicted) == (old.history, tuple(gone))
    for name in names:
        newest = cluster.disk[name].replaced[0]
        assert newest == Replaced(history=old.history, lineage=view.start.lineage, evicted=True)
        assert cluster.disk[name].history == view.history
    return view


# -- what it does -------------------------------------------------------------------------------------------------


def test_of_two_the_one_that_is_not_first_goes_on() -> None:
    cluster = Cluster("ab").run("ab")
    old = cluster.standing("ab")
    cluster.kill("a", SILENT)
    cluster.wait(5_000)
    assert cluster["b"].awaited == ("a",) and cluster["b"].waiting_for() is not None
    assert evict(cluster, "b", "a") == [True]
    view = check_new_history(cluster, "b", old, "a")
    assert view.start == state(1, 1) and view.view_epoch > old.view_epoch
    assert cluster["b"].awaited == () and cluster["b"].waiting_for() is None
    cluster.round("b")


def test_the_first_of_two_waits_for_nobody() -> None:
    cluster = Cluster("ab").run("ab")
    cluster.kill("b", SILENT)
    cluster.wait(1_000)
    old = cluster.standing("a")
    assert evict(cluster, "a", "b") == [False] and cluster.standing("a") == old and not old.parent


@pytest.mark.parametrize("quorum", [Quorum.MAJORITY, Quorum.STRICT])
@pytest.mark.parametrize("at", "de")
def test_all_who_are_missing_have_to_be_evicted(quorum: Quorum, at: str) -> None:
    """Three of five are gone. One operator says so at one of the two that are left."""
    cluster = Cluster("abcde", quorum).run("abcde")
    old = cluster.standing("abcde")
    cluster.kill("abc", SILENT)
    cluster.wait(5_000)
    assert cluster[at].awaited == ("a", "b", "c")
    assert evict(cluster, at, "ab") == [True, True]
    cluster.wait(3_000)
    assert cluster["d"].view is None or not cluster["d"].view.parent
    assert "waiting for a, b, c" in (cluster[at].waiting_for() or "")
    assert evict(cluster, at, "c") == [True]
    cluster.wait(3_000)
    check_new_history(cluster, "de", old, "abc")


def test_operators_at_two_peers_add_up() -> None:
    cluster = Cluster("abcde").run("abcde")
    old = cluster.standing("abcde")
    cluster.kill("abc", SILENT)
    cluster.wait(5_000)
    evict(cluster, "d", "ab")
    cluster.wait(1_000)
    evict(cluster, "e", "c")
    cluster.wait(3_000)
    check_new_history(cluster, "de", old, "abc")


def test_after_a_power_cut_one_that_stays_away_is_evicted() -> None:
    """Nobody remembers the view, so all its peers are needed: or evicted."""
    cluster = Cluster("abc").run("abc")
    old = cluster.standing("abc")
    power_cut(cluster, "abc", "bc")
    assert cluster["b"].awaited == cluster["c"].awaited == ("a",)
    assert evict(cluster, "c", "a") == [True]
    view = check_new_history(cluster, "bc", old, "a")
    assert view.start == state(1, 1)


def test_a_newcomer_may_come_along() -> None:
    cluster = Cluster("ab").run("ab")
    old = cluster.standing("ab")
    cluster.kill("a", SILENT)
    cluster.wait(5_000)
    cluster.start("n")
    evict(cluster, "b", "a")
    cluster.do("b", cluster["b"].join_requested("n", cluster.now))
    cluster.do("b", cluster["b"].at_barrier(cluster.now))
    cluster.deliver()
    view = cluster["b"].view
    assert (
        view is not None
        and view.ref.peers == ("b",)
        and view.peers == ("b", "n")
        and view.history != old.history
    )
    assert cluster.disk["n"].replaced == cluster.disk["b"].replaced, (
        "it knows what was replaced before it came"
    )


def test_any_quorum_needs_no_operator() -> None:
    cluster = Cluster("ab", Quorum.ANY).run("ab")
    old = cluster.standing("ab")
    cluster.kill("a", SILENT)
    cluster.wait(3_000)
    view = cluster.standing("b")
    assert (view.parent, view.evicted) == (old.history, ())
    assert not cluster.disk["b"].replaced[0].evicted, "whoever is in the old one is not bound to give it up"


# -- when it is refused, or comes to nothing ----------------------------------------------------------------------


def test_whoever_is_here_is_not_evicted() -> None:
    cluster = Cluster("abc").run("abc")
    before = cluster["a"].promises
    assert evict(cluster, "a", "b") == [False]
    assert evict(cluster, "a", "x") == [False]
    assert evict(cluster, "a", "a") == [False]
    assert cluster["a"].promises == before and cluster.standing("abc")


def test_who_takes_no_part_waits_for_nobody() -> None:
    """Its trainer is lost, or the others have gone on without it: nothing that it is told changes that."""
    cluster = Cluster("abcde").run("abcde")
    cluster.kill("abc", SILENT)
    cluster.wait(5_000)
    assert cluster["d"].awaited == ("a", "b", "c")
    cluster["d"].withdraw()
    assert cluster["d"].awaited == () and evict(cluster, "d", "a") == [False]
    other = Cluster("abc").run("abc")
    other.cut |= {("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")}
    other.verdict("c", SILENT, by="ab")
    other.wait(3_000)
    other.cut.clear()
    other.do("c", other["c"].wants_change("a collective failed", other.now, at_once=True))
    other.wait(5_000)
    assert other["c"].left_out and other["c"].awaited == () and evict(other, "c", "a") == [False]


def test_one_that_comes_back_in_time_is_a_member_again() -> None:
    """Two of three are evicted, the third comes back: a majority, under the old history; and all is forgotten."""
    cluster = Cluster("abcde").run("abcde")
    old = cluster.standing("abcde")
    cluster.kill("abc", SILENT)
    cluster.wait(5_000)
    evict(cluster, "d", "ab")
    cluster.down.discard("c")
    cluster.verdict("c", REACHABLE)
    for gone in "ab":
        cluster.verdict(gone, SILENT, by="c")
    for peer in "de":
        cluster.verdict(peer, REACHABLE, by="c")
    cluster.wait(10_000)
    view = cluster.standing("cde")
    assert view.history == old.history and not view.parent
    cluster.sent.clear()
    cluster.kill("c", SILENT)
    cluster.wait(5_000)
    said = [message for _, _, message in cluster.sent if isinstance(message, Propose)]
    assert said and all(word.evicted == () for word in said), "what was said for one wait holds for no other"


def test_a_restart_forgets_what_the_operator_said() -> None:
    cluster = Cluster("abc").run("abc")
    power_cut(cluster, "abc", "c")
    assert evict(cluster, "c", "a") == [True]
    cluster.start("c", boot=3, completed=state(1, 1))
    cluster.now += 20_000
    cluster.found()
    assert evict(cluster, "c", "b") == [True]
    cluster.wait(3_000)
    assert cluster["c"].view is None and cluster["c"].awaited == ("a", "b")


def test_strangers_found_nothing_whoever_is_evicted() -> None:
    """A newcomer that lost those who let it in knows nothing of the run: there is nothing to go on with."""
    cluster = Cluster("ab").run("ab")
    cluster.start("n")
    cluster.do("a", cluster["a"].join_requested("n", cluster.now))
    for name in "ab":
        cluster.do(name, cluster[name].at_barrier(cluster.now))
    cluster.mail = [m for m in cluster.mail if m[1] == "n"]
    cluster.deliver()
    cluster.kill("ab", SILENT)
    cluster.wait(5_000)
    evict(cluster, "n", "ab")
    cluster.wait(5_000)
    assert cluster["n"].view is None


# -- the evicted --------------------------------------------------------------------------------------------------


def test_what_the_evicted_says_is_not_heard() -> None:
    """It comes back as it was: the others are of another history, and form no view with it."""
    cluster = Cluster("ab").run("ab")
    old = cluster.standing("ab")
    cluster.cut |= {("a", "b"), ("b", "a")}
    cluster.verdict("a", SILENT)
    cluster.wait(5_000)
    evict(cluster, "b", "a")
    view = check_new_history(cluster, "b", old, "a")
    cluster.cut.clear()
    cluster.verdict("a", REACHABLE)
    cluster.wait(10_000)
    assert cluster["b"].view == view
    assert cluster["a"].history == old.history


def test_the_evicted_comes_back_as_a_newcomer() -> None:
    cluster = Cluster("ab").run("ab")
    old = cluster.standing("ab")
    cluster.kill("a", SILENT)
    cluster.wait(5_000)
    evict(cluster, "b", "a")
    cluster.round("b")
    cluster.now += 20_000
    cluster.start("a", boot=2, completed=state(1, 1))
    cluster.verdict("a", REACHABLE, boot=2)
    cluster.do("a", cluster["a"].yield_history(state(0, 0, "a"), cluster.now))
    assert cluster.disk["a"].history == b"" and cluster.disk["a"].replaced == ()
    cluster.do("b", cluster["b"].join_requested("a", cluster.now))
    cluster.do("b", cluster["b"].at_barrier(cluster.now))
    cluster.deliver()
    view = cluster["b"].view
    assert view is not None and view.ref.peers == ("b",) and view.peers == ("a", "b"), "it learns"
    assert view.history != old.history and cluster["a"].view == view
    assert cluster.disk["a"].replaced == cluster.disk["b"].replaced


def test_two_that_evict_each_other_are_two_histories() -> None:
    """Of four, two on each side of a cut, after a power cut: neither side's replaces the other's."""
    cluster = Cluster("abcd").run("abcd")
    old = cluster.standing("abcd")
    power_cut(cluster, "abcd", "ab")
    left, right = cluster, Cluster("")
    right.disk, right.now = dict(cluster.disk), cluster.now
    for name in "cd":
        right.start(name, boot=2, completed=state(1, 1))
    right.found()
    right.wait(3_000)
    evict(left, "a", "cd")
    evict(right, "c", "ab")
    one = check_new_history(left, "ab", old, "cd")
    two = check_new_history(right, "cd", old, "ab")
    assert one.history != two.history
    for history, other in ((one.history, right), (two.history, left)):
        assert all(r.history != history for disk in other.disk.values() for r in disk.replaced)


def test_only_the_newest_replaced_are_remembered() -> None:
    cluster = Cluster("ab", Quorum.ANY).run("ab")
    seen = [cluster.standing("ab").history]
    for boot in range(2, REPLACED_MAX + 4):
        cluster.kill("a", SILENT) if boot == 2 else cluster.verdict("a", SILENT, boot=boot - 1)
        cluster.down.add("a")
        cluster.wait(30_000)
        seen.append(cluster.standing("b").history)
        cluster.start("a", boot=boot)
        cluster.verdict("a", REACHABLE, boot=boot)
        cluster.do("a", cluster["a"].yield_history(state(0, 0, "a"), cluster.now))
        cluster.do("b", cluster["b"].join_requested("a", cluster.now))
        cluster.do("b", cluster["b"].at_barrier(cluster.now))
        cluster.deliver()
        cluster.do("a", cluster["a"].adopted(cluster.views["a"][-1].start, cluster.now))
        for name in "ab":
            cluster.do(name, cluster[name].at_barrier(cluster.now))
        cluster.deliver()
        cluster.adopt("ab")
        cluster.now += 20_000
    replaced = [r.history for r in cluster.disk["b"].replaced]
    assert replaced == seen[::-1][1 : REPLACED_MAX + 1] and len(replaced) == REPLACED_MAX


def test_a_crash_that_was_seen_needs_no_eviction() -> None:
    """And what was seen changes nothing for those that are only silent."""
    cluster = Cluster("abc").run("abc")
    old = cluster.standing("abc")
    cluster.kill("a", CRASHED)
    cluster.wait(1_000)
    assert cluster.standing("bc").history == old.history
