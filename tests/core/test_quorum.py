"""The decision alone: each rule of it has a case in which leaving it out would be wrong."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.agreement_messages import MemberId, Propose, StateRef, Stopped, ViewRef
from p2p_dmc.core.quorum import Quorum, count_votes, decide, start_state
from tests.sim.mutants import mutant


def member(name: str) -> MemberId:
    """`a` is peer a in its first life, `a2` in its second."""
    return MemberId(peer_id=name[0], boot=int(name[1:] or 1))


def view(epoch: int, names: str) -> ViewRef:
    return ViewRef(view_epoch=epoch, members=tuple(sorted(member(name) for name in names.split())))


def state(epoch: int, number: int, mark: str = "s") -> StateRef:
    return StateRef(lineage=(epoch, number), digest=mark.encode().ljust(16, b"."))


def word(
    name: str,
    completed: StateRef,
    *,
    base: ViewRef | None = None,
    known: ViewRef | None = None,
    pending: tuple[ViewRef, ...] = (),
    seen: tuple[Stopped, ...] = (),
    vote_floor: int = 0,
    joined: bool = True,
) -> Propose:
    return Propose(
        history=b"h" * 16,
        n=99,
        sender=member(name),
        candidates=(name[0],),
        stopped=(),
        voters=(name[0],),
        completed=completed,
        base=base,
        known=known,
        pending=pending,
        seen=seen,
        vote_floor=vote_floor,
        joined=joined,
    )


def crash(name: str, base: ViewRef | None = None, *pending: ViewRef) -> Stopped:
    return Stopped(member=member(name), n=98, base=base, pending=pending)


def withdrawal(name: str, n: int, base: ViewRef | None = None) -> Stopped:
    return Stopped(member=member(name), n=n, base=base, withdrawn=True)


def holds(*words: Propose, quorum: Quorum = Quorum.MAJORITY) -> bool:
    return decide(words, quorum).holds


V = view(5, "a b c d")
S = state(5, 7)


def at(name: str, **more: object) -> Propose:
    """A member of V that completed round 7 there."""
    return word(name, S, **({"base": V, "known": V} | more))  # type: ignore[arg-type]


def needs(rule: str, *words: Propose, quorum: Quorum = Quorum.MAJORITY) -> None:
    """The decision is no, and would be yes without the rule: the case tests that very rule."""
    assert not holds(*words, quorum=quorum)
    with mutant(rule):
        assert holds(*words, quorum=quorum), f"the case does not depend on {rule!r}"


class TestCounting:
    def test_majority(self) -> None:
        assert holds(at("a"), at("b"), at("c"))
        needs("quorum", at("c"), at("d"))

    def test_exact_half_counts_with_the_first(self) -> None:
        assert holds(at("a"), at("b"))
        assert not holds(at("b"), at("c"))

    def test_alone(self) -> None:
        alone = view(3, "b")
        assert holds(word("b", state(3, 1), base=alone, known=alone))

    def test_of_two_the_first_goes_on(self) -> None:
        two = view(5, "a b")
        a, b = (word(name, S, base=two, known=two) for name in "ab")
        assert holds(a) and not holds(b) and holds(a, b)

    @given(st.integers(1, 7), st.data())
    @settings(max_examples=200, deadline=None)
    def test_two_disjoint_sets_never_both_hold_a_view(self, size: int, data: st.DataObject) -> None:
        """Whoever is left out as crashed is out on both sides, or has told its own word to one of them."""
        names = "abcdefg"[:size]
        sides = data.draw(st.lists(st.sampled_from("12x"), min_size=size, max_size=size))
        base = view(5, " ".join(names))
        crashed = {member(name) for name, side in zip(names, sides, strict=True) if side == "x"}
        counts = []
        for side in "12":
            inside = [name for name, where in zip(names, sides, strict=True) if where == side]
            present = {name: word(name, S, base=base) for name in inside}
            counts.append(count_votes(base, present, crashed))
        if all(count.votes for count in counts):
            assert not all(count.holds for count in counts)


class TestMemory:
    def test_a_restarted_member_has_no_vote(self) -> None:
        """b2 and c2 forgot what b and c completed; a may be going on with d."""
        old = {"completed": state(0, 0), "base": None, "known": None, "pending": (V,)}
        needs("memory", word("b2", **old), word("c2", **old), word("d2", **old))  # type: ignore[arg-type]

    def test_but_it_leaves_the_count(self) -> None:
        """V needs two of a, c, d, with b2 telling b's promises."""
        assert not holds(at("c"))
        assert not holds(at("c"), word("b2", state(0, 0), pending=(V,)))
        assert holds(at("c"), at("d"), word("b2", state(0, 0), pending=(V,)))

    def test_a_forgotten_view_needs_all_its_peers(self) -> None:
        forgot = [word(f"{peer}2", state(4, 9), base=view(4, "a b"), pending=(V,)) for peer in "abcd"]
        needs("forgotten", *forgot[:3])
        assert holds(*forgot)

    def test_votes_given_up_do_not_come_back(self) -> None:
        """d withdrew from V, a and b left it out and may have gone on: c and d are not half of V any more."""
        five = view(5, "a b c d e")
        stay = {"base": five, "known": five}
        needs("resigned", word("c", S, **stay), word("d", S, **stay), word("e", S, vote_floor=5, **stay))
        assert holds(word("a", S, **stay), word("b", S, **stay), word("e", S, vote_floor=5, **stay))


class TestJoint:
    def test_every_view_said_since_the_base_must_be_held(self) -> None:
        """b said {b, c, d, e, f}: those may have gone on without a and b."""
        later = view(6, "b c d e f")
        needs("joint", at("a"), at("b", pending=(V, later)), at("c", pending=(V,)))
        assert holds(*(at(name, pending=(V, later)) for name in "bcd"))

    def test_older_ones_need_not(self) -> None:
        older = view(4, "x y z")
        assert holds(at("a", pending=(older, V)), at("b"), at("c"))

    def test_the_set_at_hand_need_not(self) -> None:
        assert holds(*(at(name, pending=(view(7, "a b c"),)) for name in "abc"))


class TestState:
    def test_the_greatest_lineage_is_the_start(self) -> None:
        assert decide([at("a"), word("b", state(5, 8), base=V), at("c")], Quorum.MAJORITY).start == state(
            5, 8
        )

    def test_of_equals_the_first_in_ring_order(self) -> None:
        words = [word(name, state(0, 0, name)) for name in "cab"]
        assert start_state(words) == state(0, 0, "a")

    def test_a_newcomer_brings_no_initial_model_of_its_own(self) -> None:
        words = [word(name, state(0, 0, name), joined=name != "a") for name in "cab"]
        assert start_state(words) == state(0, 0, "b")
        words[1] = word("a", state(0, 1, "a"))
        assert start_state(words) == state(0, 1, "a"), "the greatest goes before all"

    def test_a_base_without_its_state_needs_all_its_peers(self) -> None:
        """a crashed as the only one that completed a round of W (and may come back with it): b must wait."""
        w = view(6, "a b")
        b = word("b", S, base=V, pending=(V, w), seen=(crash("a", w, V, w),))
        lonely = [b, *(at(name) for name in "cd")]
        needs("state", *lonely)
        assert holds(*lonely, word("a2", S, base=V, pending=(V, w)))

    def test_survivors_that_are_a_majority_need_no_record(self) -> None:
        """The same crash, but b, c and d are most of W: what a completed alone was not committed."""
        w = view(6, "a b c d")
        record = crash("a", w, w)
        assert holds(*(at(name, pending=(V, w), seen=(record,)) for name in "bcd"))

    def test_a_start_not_adopted_yet_is_not_passed_over(self) -> None:
        """a founded alone, b and c were let in (view 6) and have not adopted its work when it is gone."""
        alone, wider = view(5, "a"), view(6, "a b c")
        b, c = (word(name, state(0, 0, name), known=alone, pending=(wider,)) for name in "bc")
        needs("origin", b, c)
        assert "a" in decide([b, c], Quorum.MAJORITY).describe()
        b = word("b", S, known=alone, pending=(wider,))
        assert holds(b, c), "b has adopted it, and b and c are a majority of view 6"

    def test_where_the_start_comes_from_is_handed_on(self) -> None:
        assert decide([at("a"), word("x", state(0, 0))], Quorum.MAJORITY).known == V
        lost = word("b2", state(5, 3), base=view(4, "b"), pending=(V, view(5, "b c e")))
        everybody = [lost, *(word(f"{name}2", state(0, 0)) for name in "acde")]
        assert decide(everybody, Quorum.MAJORITY).known == ViewRef(
            view_epoch=5, members=tuple(member(name) for name in "abcde")
        )


class TestCrashes:
    def test_who_was_seen_to_crash_leaves_the_count(self) -> None:
        c, d = (at(name, seen=(crash("a", V, V),)) for name in "cd")
        assert not holds(at("c"), at("d"))
        assert holds(c, d)
        assert not holds(c, d, quorum=Quorum.STRICT)

    def test_of_two_either_may_crash(self) -> None:
        two = view(5, "a b")
        assert holds(word("b", S, base=two, known=two, seen=(crash("a", two, two),)))

    def test_only_with_its_promises(self) -> None:
        """a had said {a, b} before it crashed: b may be going on alone."""
        needs("promises", *(at(name, seen=(crash("a", V, V, view(6, "a b")),)) for name in "cd"))

    def test_only_on_the_word_of_a_member(self) -> None:
        """x, which was never in V, cannot know that a said no set without c and d in the meantime."""
        needs("witness", at("c"), at("d"), word("x", state(0, 0), seen=(crash("a", V, V),)))

    def test_withdrawn_members_leave_the_count_even_when_strict(self) -> None:
        c, d = (at(name, seen=(withdrawal("a", 5, V),)) for name in "cd")
        assert holds(c, d, quorum=Quorum.STRICT)

    def test_only_from_views_before_they_withdrew(self) -> None:
        """a came back after view 4 and voted in V again."""
        assert not holds(*(at(name, seen=(withdrawal("a", 4),)) for name in "cd"))

    def test_a_withdrawal_needs_no_witness(self) -> None:
        assert holds(at("c"), at("d"), word("x", state(0, 0), seen=(withdrawal("a", 5, V),)))


class TestStrangers:
    def test_newcomers_alone_found_nothing(self) -> None:
        """a let c and d in and is taken for dead: they are most of {a, c, d}, but its work is not theirs to lose."""
        wider = view(6, "a c d")
        c, d = (word(name, state(0, 0), pending=(wider,), joined=False) for name in "cd")
        needs("strangers", c, d)
        assert not holds(c, d, quorum=Quorum.ANY)
        assert holds(word("a", S, base=V, pending=(wider,)), at("b"), c)


class TestAny:
    def test_a_side_without_quorum_goes_on_thinly(self) -> None:
        decision = decide([at("c"), at("d")], Quorum.ANY)
        assert decision.holds and decision.thin and decision.start == S

    def test_a_side_with_quorum_does_not(self) -> None:
        assert not decide([at("a"), at("b")], Quorum.ANY).thin


def test_founding_needs_nothing() -> None:
    decision = decide([word(name, state(0, 0, name)) for name in "ab"], Quorum.MAJORITY)
    assert decision.holds and not decision.thin and decision.known is None


def test_the_decision_does_not_depend_on_order_or_names() -> None:
    later = view(6, "b c d e f")
    words = [at("a"), at("b", pending=(V, later)), at("c", seen=(crash("d", V, V),)), word("f", state(0, 0))]
    decisions = {repr(decide(order, Quorum.MAJORITY)) for order in itertools.permutations(words)}
    assert len(decisions) == 1


def test_it_says_whom_it_waits_for() -> None:
    decision = decide([at("c"), at("d")], Quorum.MAJORITY)
    assert decision.describe() == "2 of 4 members of view 5 are here; 3 are needed; waiting for a, b"
    forgot = word("b2", state(4, 9), base=view(4, "b"), pending=(V,))
    assert "nobody here remembers view 5" in decide([forgot], Quorum.MAJORITY).describe()


@pytest.mark.parametrize("quorum", list(Quorum))
def test_messages_are_validated(quorum: Quorum) -> None:
    with pytest.raises(ValueError, match="sorted"):
        ViewRef(view_epoch=1, members=(member("b"), member("a")))
    with pytest.raises(ValueError, match="leave itself out"):
        Propose(
            history=b"",
            n=1,
            sender=member("a"),
            candidates=("a",),
            stopped=("a",),
            voters=("a",),
            completed=S,
            base=None,
            known=None,
            pending=(),
            seen=(),
        )
    with pytest.raises(ValueError, match="16 bytes"):
        StateRef(lineage=(1, 1), digest=b"short")
    assert decide([at("a"), at("b"), at("c")], quorum).holds
