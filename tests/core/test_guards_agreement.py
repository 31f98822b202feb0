"""One case per guard of agreement's books and of its decision: without the guard, the case fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_dmc.core.agreement_attempt import Attempt, PeerBook
from p2p_dmc.core.agreement_messages import (
    MEMBERS_MAX,
    NUMBER_MAX,
    PAYLOAD_MAX_BYTES,
    PEER_ID_MAX,
    PENDING_MAX,
    REPLACED_MAX,
    UNKNOWN_BOOT,
    AgreementSettings,
    GivenUp,
    MemberId,
    Promised,
    Promises,
    Propose,
    Replaced,
    StateRef,
    Stopped,
    Verdict,
    ViewRef,
)
from p2p_dmc.core.quorum import Quorum, count_votes, decide, judge

REACHABLE, UNREACHABLE, CRASHED = Verdict.REACHABLE, Verdict.UNREACHABLE, Verdict.CRASHED


def member(name: str) -> MemberId:
    """`a` is peer a in its first life, `a2` in its second, `a0` in a life unheard of."""
    return MemberId(peer_id=name[0], boot=int(name[1:] or 1))


def view(epoch: int, names: str) -> ViewRef:
    return ViewRef(view_epoch=epoch, members=tuple(sorted(member(name) for name in names.split())))


def state(epoch: int, number: int) -> StateRef:
    return StateRef(lineage=(epoch, number), digest=b"s" * 16)


V = view(5, "a b c d")


def word(name: str, **fields: object) -> Propose:
    """Of a member of V, in attempt 9, about itself alone."""
    usual: dict[str, object] = {
        "history": b"h" * 16,
        "n": 9,
        "sender": member(name),
        "candidates": (name[0],),
        "stopped": (),
        "voters": (name[0],),
        "completed": state(5, 7),
        "base": V,
        "known": V,
        "pending": (),
        "seen": (),
        "joined": True,
    }
    return Propose(**(usual | fields))  # type: ignore[arg-type]


def promised(name: str, version: int, n: int = 5, base: ViewRef | None = V) -> Promised:
    return Promised(history=b"h" * 16, sender=member(name), n=n, base=base, pending=(), version=version)


def farewell(name: str, n: int) -> Stopped:
    return Stopped(member=member(name), n=n, withdrawn=True)


class TestAttempt:
    def attempt(self, first: Propose) -> Attempt:
        attempt = Attempt(n=9, content=first, now_ms=0)
        attempt.hear(first)
        return attempt

    def test_of_one_incarnation_the_larger_word_stays(self) -> None:
        large = word("a", candidates=("a", "b"))
        attempt = self.attempt(large)
        attempt.hear(word("a"))
        assert attempt.words["a"] == large

    def test_the_word_of_a_later_incarnation_takes_the_place_of_a_larger_one(self) -> None:
        attempt = self.attempt(word("a", candidates=("a", "b")))
        attempt.hear(word("a2"))
        assert attempt.words["a"] == word("a2")

    def test_who_has_installed_has_said_its_last_word(self) -> None:
        attempt = self.attempt(word("a", installed=True))
        attempt.hear(word("a"))
        assert attempt.words["a"].installed


class TestIncarnations:
    def test_an_older_one_does_not_come_back(self) -> None:
        book = PeerBook()
        assert book.note(member("a2")) and book.note(member("a2"))
        assert not book.note(member("a1")) and book.member("a") == member("a2")

    def test_a_verdict_about_a_former_life_is_not_about_this_one(self) -> None:
        book = PeerBook()
        book.judge(member("a"), UNREACHABLE, 0)
        assert book.gone("a")
        book.note(member("a2"))
        assert not book.gone("a")


class TestPromises:
    def test_older_ones_that_come_late_are_dropped(self) -> None:
        book = PeerBook()
        book.hear_promises(promised("a", version=3))
        book.hear_promises(promised("a", version=2))
        assert book.promised[member("a")].version == 3

    def test_those_on_their_way_when_the_sender_crashed_are_counted(self) -> None:
        book = PeerBook()
        book.hear_promises(promised("a", version=2))
        book.judge(member("a"), CRASHED, 0)
        book.hear_promises(promised("a", version=3, n=8))
        assert book.records[member("a")].n == 8

    def test_but_a_farewell_is_final(self) -> None:
        book = PeerBook()
        book.withdraw(farewell("a", n=5))
        book.hear_promises(promised("a", version=3, n=8))
        assert book.records[member("a")] == farewell("a", n=5)

    def test_a_word_overtaken_by_a_later_one_is_dropped(self) -> None:
        book = PeerBook()
        assert book.hear_word(word("a", n=7))
        assert not book.hear_word(word("a", n=6, version=9))
        assert book.promised[member("a")].version == 0 and book.greatest_n[member("a")] == 7

    def test_only_a_word_after_the_farewell_says_that_its_sender_is_back(self) -> None:
        book = PeerBook()
        book.withdraw(farewell("a", n=7))
        book.hear_word(word("a", n=7))
        assert book.gone("a")
        book.hear_word(word("a", n=8))
        assert not book.gone("a")


class TestVerdicts:
    def test_whether_one_is_news(self) -> None:
        book = PeerBook()
        assert not book.judge(member("a"), REACHABLE, 0)
        assert book.judge(member("a"), UNREACHABLE, 0)
        assert not book.judge(member("a"), UNREACHABLE, 0)
        assert book.judge(member("a"), CRASHED, 0)

    def test_a_crash_of_one_never_heard_of_has_no_promises(self) -> None:
        book = PeerBook()
        book.judge(member("a"), CRASHED, 0)
        assert book.records == {} and book.gone("a")

    def test_a_crash_without_its_last_promises_is_only_a_death(self) -> None:
        book = PeerBook()
        book.hear_promises(promised("a", version=2))
        book.judge(member("a"), CRASHED, 3)
        assert book.records == {} and book.gone("a")
        book.hear_promises(promised("a", version=2))
        assert book.records == {}

    @pytest.mark.parametrize("version", [3, 4])
    def test_until_they_arrive(self, version: int) -> None:
        book = PeerBook()
        book.judge(member("a"), CRASHED, 3)
        book.hear_promises(promised("a", version=version, n=8))
        assert book.records[member("a")].n == 8

    def test_in_a_word_too(self) -> None:
        book = PeerBook()
        book.judge(member("a"), CRASHED, 3)
        book.hear_word(word("a", n=8, version=3))
        assert book.records[member("a")].n == 8

    def test_or_the_crashed_is_heard_again(self) -> None:
        book = PeerBook()
        book.judge(member("a"), CRASHED, 3)
        book.judge(member("a"), REACHABLE, 0)
        book.hear_promises(promised("a", version=3))
        assert book.records == {} and not book.gone("a")

    def test_or_a_later_life_of_it_is_known(self) -> None:
        book = PeerBook()
        book.judge(member("a"), CRASHED, 3)
        assert book.note(member("a")) and book.crashed == {member("a"): 3}
        assert book.note(member("a2")) and book.crashed == {}

    def test_a_farewell_that_knows_of_more_stays(self) -> None:
        book = PeerBook()
        book.hear_promises(promised("a", version=2, n=5))
        book.withdraw(farewell("a", n=6))
        book.judge(member("a"), CRASHED, 2)
        assert book.records[member("a")] == farewell("a", n=6)
        book.hear_promises(
            promised("a", version=3, n=6)
        )  # said before the farewell: a comes back with a later n
        assert book.records[member("a")] == farewell("a", n=6)
        book.hear_promises(promised("a", version=4, n=7))
        assert book.records[member("a")] == Stopped(member=member("a"), n=7, base=V)

    def test_of_a_crash_the_newest_promises_count(self) -> None:
        book = PeerBook()
        book.hear_promises(promised("a", version=2, base=None))
        book.judge(member("a"), CRASHED, 2)
        book.hear_promises(promised("a", version=3))  # its base moved; it said no other set
        assert book.records[member("a")] == Stopped(member=member("a"), n=5, base=V)

    def test_a_second_agent_of_the_same_member_may_have_promised_more(self) -> None:
        book = PeerBook()
        book.hear_promises(promised("a", version=2))
        book.judge(member("a"), CRASHED, 2)
        book.judge(member("a"), CRASHED, 4)
        book.hear_promises(promised("a", version=3))
        assert book.records == {}
        book.judge(member("a"), CRASHED, 1)  # one that has said nothing yet
        assert book.records == {}
        book.hear_promises(promised("a", version=4))
        assert member("a") in book.records

    def test_only_being_reachable_ends_a_crash(self) -> None:
        book = PeerBook()
        book.hear_promises(promised("a", version=2))
        book.judge(member("a"), CRASHED, 0)
        book.judge(member("a"), UNREACHABLE, 0)
        assert member("a") in book.records
        book.judge(member("a"), REACHABLE, 0)
        assert book.records == {}

    def test_being_reachable_ends_no_withdrawal(self) -> None:
        book = PeerBook()
        book.withdraw(farewell("a", n=5))
        book.judge(member("a"), REACHABLE, 0)
        assert book.records[member("a")].withdrawn and book.gone("a")


class TestFarewells:
    def test_one_of_a_former_life_is_late(self) -> None:
        book = PeerBook()
        book.note(member("a2"))
        assert not book.withdraw(farewell("a", n=5)) and not book.gone("a")

    def test_one_overtaken_by_a_word_is_late(self) -> None:
        book = PeerBook()
        book.hear_word(word("a", n=6))
        assert not book.withdraw(farewell("a", n=5)) and not book.gone("a")

    def test_the_last_one_counts(self) -> None:
        book = PeerBook()
        book.withdraw(farewell("a", n=7))
        book.withdraw(farewell("a", n=5))
        assert book.records[member("a")].n == 7
        book.withdraw(farewell("a", n=8))
        assert book.records[member("a")].n == 8

    def test_one_binds_more_than_a_crash_that_somebody_saw(self) -> None:
        book = PeerBook()
        book.hear_promises(promised("a", version=2, n=7))
        book.judge(member("a"), CRASHED, 0)
        assert book.withdraw(farewell("a", n=6))
        assert book.records[member("a")].withdrawn


def test_what_no_view_names_is_forgotten_but_for_those_who_are_away() -> None:
    book = PeerBook()
    for name in "abc":
        book.hear_word(word(name, n=6))
        book.withdraw(farewell(name, n=6))
        book.judge(member(name), CRASHED, 9)
    book.away -= {member("a"), member("b")}
    book.forget_all_but({member("a")})
    for kept in (book.records, book.promised, book.greatest_n, book.crashed):
        assert sorted(kept) == [member("a"), member("c")]


class TestDecision:
    def test_a_forgotten_view_is_held_by_all_its_peers(self) -> None:
        """And nothing new begins then: it is the same history."""
        forgot = [word(f"{name}2", base=None, known=None, pending=(V,)) for name in "abcd"]
        decision = decide(forgot, Quorum.MAJORITY)
        assert decision.holds and not decision.thin

    def test_whoever_is_accounted_for_is_not_missed(self) -> None:
        count = count_votes(V, {"d": word("d")}, {member("b")})
        assert (count.counted, count.missing, count.holds) == (3, ("a", "c"), False)

    def test_a_member_whose_incarnation_was_unheard_of_has_a_vote(self) -> None:
        """b said the set before it knew a: a's own promises tell whether it was that one."""
        later = view(6, "a0 b")
        assert judge([word("a", pending=(V, view(6, "a b"))), *map(word, "bc")], []).holds
        assert decide([word("a"), word("c"), word("d", pending=(V, later))], Quorum.MAJORITY).holds
        assert not decide([word("c"), word("d", pending=(V, later))], Quorum.MAJORITY).holds
        assert count_votes(later, {"a": word("a")}, ()).votes == (MemberId(peer_id="a", boot=UNKNOWN_BOOT),)

    @pytest.mark.parametrize("quorum", list(Quorum))
    def test_a_view_without_voters_is_none(self, quorum: Quorum) -> None:
        decision = decide([word(name, voters=()) for name in "abcd"], quorum)
        assert not decision.holds
        assert decision.describe() == "nobody here holds what this run has trained, or voted in its last view"

    def test_only_those_who_are_not_here_are_absent(self) -> None:
        """a completed a round of W; b, which was in it, is here."""
        crashed = Stopped(member=member("a"), n=8, base=view(6, "a b"))
        decision = judge([word("b", seen=(crashed,)), word("c"), word("d")], [crashed])
        assert decision.absent == ("a",) and "newer work may be on a; waiting for a" in decision.describe()

    def test_of_a_start_not_adopted_too(self) -> None:
        behind = [word(name, completed=state(5, 7), known=view(6, "a b c")) for name in "bcd"]
        decision = judge(behind, [])
        assert decision.absent == ("a",)

    def test_newcomers_are_told_why_and_wait_for_nobody(self) -> None:
        new = [word(name, base=None, known=None, joined=False, completed=state(0, 0)) for name in "ab"]
        assert decide(new, Quorum.MAJORITY).describe() == "nobody here has been in a view of this run before"

    def test_a_withdrawal_is_not_believed_before_it_is_needed(self) -> None:
        """Its promises bind: d said {d, x} before it withdrew, and the other three need not know."""
        gone = replace(farewell("d", n=7), pending=(view(7, "d x"),))
        assert decide([word(name, seen=(gone,)) for name in "abc"], Quorum.STRICT).holds
        assert not judge([word(name, seen=(gone,)) for name in "abc"], [gone]).holds


class TestMessages:
    """What is too much, or makes no sense, is refused when it is built: from whomever it comes."""

    def test_numbers(self) -> None:
        for n in (-1, NUMBER_MAX + 1):
            with pytest.raises(ValueError, match=r"n -?\d+ is outside"):
                Promises(n=n)
        assert Promises(n=NUMBER_MAX).n == NUMBER_MAX

    def test_names(self) -> None:
        for name in ("", "x" * (PEER_ID_MAX + 1)):
            with pytest.raises(ValueError, match="odd length"):
                MemberId(peer_id=name, boot=1)
            with pytest.raises(ValueError, match="an odd peer id"):
                word("a", candidates=tuple(sorted(("a", name))))
        assert MemberId(peer_id="x" * PEER_ID_MAX, boot=1)

    def test_sets_are_sorted_and_not_too_large(self) -> None:
        many = tuple(f"a{number:05}" for number in range(MEMBERS_MAX))
        assert word("a", candidates=("a", *many[1:])).members[0] == "a"
        for names, what in ((("a", *many), "too many"), (("b", "a"), "sorted"), (("a", "a"), "sorted")):
            with pytest.raises(ValueError, match=what):
                word("a", candidates=names)

    def test_views_have_members(self) -> None:
        for count in (0, MEMBERS_MAX + 1):
            members = tuple(MemberId(peer_id=f"{number:05}", boot=1) for number in range(count))
            with pytest.raises(ValueError, match="1 to 4096 members"):
                ViewRef(view_epoch=1, members=members)

    def test_views_are_counted_from_one(self) -> None:
        for epoch in (0, NUMBER_MAX + 1):
            with pytest.raises(ValueError, match=r"outside 1\.\.2"):
                ViewRef(view_epoch=epoch, members=(member("a"),))
        assert [ViewRef(view_epoch=n, members=(member("a"),)).view_epoch for n in (1, NUMBER_MAX)] == [
            1,
            NUMBER_MAX,
        ]

    def test_lineages_and_digests(self) -> None:
        for lineage in ((1,), (1, 2, 3)):
            with pytest.raises(ValueError, match="a lineage is"):
                StateRef(lineage=lineage, digest=b"s" * 16)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="a lineage is"):
                Replaced(history=b"h" * 16, lineage=lineage)  # type: ignore[arg-type]
        for length in (0, 15, 17):
            with pytest.raises(ValueError, match="a digest has 16 bytes"):
                StateRef(lineage=(1, 2), digest=b"s" * length)
            with pytest.raises(ValueError, match="a history id has 16 bytes"):
                Replaced(history=b"h" * length, lineage=(1, 2))
        for length in (15, 17):
            with pytest.raises(ValueError, match="0 or 16 bytes"):
                Promises(history=b"h" * length)

    def test_promises_are_not_too_many(self) -> None:
        most, more = (V,) * PENDING_MAX, (V,) * (PENDING_MAX + 1)
        told = promised("a", version=1)
        for build in (
            lambda pending: Promises(pending=pending),
            lambda pending: GivenUp(history=b"h" * 16, pending=pending),
            lambda pending: Stopped(member=member("a"), pending=pending),
            lambda pending: word("a", pending=pending),
            lambda pending: replace(told, pending=pending),
        ):
            assert len(build(most).pending) == PENDING_MAX
            with pytest.raises(ValueError, match="pending views are too many"):
                build(more)

    def test_nor_is_what_a_word_brings_besides(self) -> None:
        gone = Replaced(history=b"h" * 16, lineage=(1, 2))
        for field, most, more in (
            ("seen", (farewell("a", n=1),) * MEMBERS_MAX, (farewell("a", n=1),)),
            ("payload", b"p" * PAYLOAD_MAX_BYTES, b"p"),
            ("replaced", (gone,) * REPLACED_MAX, (gone,)),
        ):
            word("a", **{field: most})
            with pytest.raises(ValueError, match=r"too many|too large"):
                word("a", **{field: most + more})  # type: ignore[operator]
        with pytest.raises(ValueError, match="too many"):
            Promises(replaced=(gone,) * (REPLACED_MAX + 1))
        given_up = (GivenUp(history=b"h" * 16, pending=()),) * (REPLACED_MAX + 1)
        assert len(Promises(given_up=given_up[1:]).given_up) == REPLACED_MAX
        with pytest.raises(ValueError, match="given-up histories are too many"):
            Promises(given_up=given_up)

    def test_a_word_fits_itself(self) -> None:
        for fields, what in (
            ({"candidates": ("b",), "voters": ()}, "sender is not a candidate"),
            ({"stopped": ("a",)}, "leave itself out"),
            ({"stopped": ("b",)}, "stopped peers that were never"),
            ({"voters": ("b",)}, "voters that were never"),
        ):
            with pytest.raises(ValueError, match=what):
                word("a", **fields)

    def test_who_is_stopped_is_no_member_and_votes_no_more(self) -> None:
        said = word("a", candidates=("a", "b", "c"), stopped=("b",), voters=("a", "b"))
        assert (said.members, said.voting) == (("a", "c"), ("a",))

    def test_settings_are_positive(self) -> None:
        for name in ("resend_ms", "cause_ttl_ms"):
            with pytest.raises(ValueError, match=f"{name} must be positive"):
                AgreementSettings(**{name: 0})
