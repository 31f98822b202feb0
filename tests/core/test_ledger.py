"""The ledger against a dumb one that keeps a set of samples, and against its own replay (invariant 12)."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.ledger import (
    Ledger,
    Stretch,
    check_exact,
    common,
    sample_index,
    sample_permutation,
    shard_order,
    subtract,
    total,
    union,
)
from p2p_dmc.errors import RemoteProtocolError

DIGEST = bytes(range(32))
SHARDS = st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any)
POSITIONS = st.frozensets(st.integers(0, 14))
GOLDEN_SHARDS = (5, 2, 3, 0, 6, 4, 1, 7)
GOLDEN_SAMPLES = (3, 4, 2, 0, 6, 7, 5, 1)


def stretch(shard: int, lo: int, hi: int) -> Stretch:
    return Stretch(shard=shard, lo=lo, hi=hi)


def intervals(positions: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """The dumb way to write a set of positions as intervals."""
    starts = sorted(p for p in positions if p - 1 not in positions)
    ends = sorted(p + 1 for p in positions if p + 1 not in positions)
    return tuple(zip(starts, ends, strict=True))


def random_stretch(rng: random.Random, counts: list[int]) -> Stretch:
    shard = rng.choice([s for s, count in enumerate(counts) if count])
    lo = rng.randrange(counts[shard])
    return stretch(shard, lo, rng.randint(lo + 1, counts[shard]))


# --- order -----------------------------------------------------------------------------------------------


def test_orders_are_the_same_on_every_machine() -> None:
    """Golden vectors: if they change, peers and checkpoints disagree about what has been seen."""
    assert shard_order(DIGEST, 0, 0, 8) == GOLDEN_SHARDS
    assert sample_permutation(DIGEST, 7, 2, 3, 8) == GOLDEN_SAMPLES


@given(
    st.binary(max_size=40),
    st.integers(0, 2**63 - 1),
    st.integers(0, 99),
    st.integers(0, 99),
    st.integers(0, 300),
)
def test_orders_are_permutations(digest: bytes, seed: int, epoch: int, shard: int, count: int) -> None:
    assert sorted(shard_order(digest, seed, epoch, count)) == list(range(count))
    order = sample_permutation(digest, seed, epoch, shard, count)
    assert sorted(order) == list(range(count))
    assert tuple(sample_index(digest, seed, epoch, shard, count, p) for p in range(count)) == order


def test_orders_depend_on_each_of_their_keys() -> None:
    keys = [(DIGEST, 0, 0, 0), (b"other", 0, 0, 0), (DIGEST, 1, 0, 0), (DIGEST, 0, 1, 0), (DIGEST, 0, 0, 1)]
    assert len({sample_permutation(*key, 50) for key in keys}) == len(keys)
    assert len({shard_order(*key[:3], 50) for key in keys}) == 4
    assert shard_order(DIGEST, 0, 0, 50) != sample_permutation(DIGEST, 0, 0, 0, 50)


def test_each_sample_comes_first_about_equally_often() -> None:
    firsts = [sample_index(DIGEST, 0, epoch, 0, 8, 0) for epoch in range(4000)]
    assert all(400 < firsts.count(i) < 600 for i in range(8))


@pytest.mark.parametrize("by", ["seed", "epoch", "shard"])
def test_all_orders_of_a_few_samples_come_equally_often(by: str) -> None:
    """Each of the 24, over 4800 keys that differ in one number alone: chi-square with 23 degrees of freedom."""
    where = {"seed": 0, "epoch": 0, "shard": 0}
    found = Counter(
        sample_permutation(DIGEST, **(where | {by: number}), count=4)  # type: ignore[arg-type]
        for number in range(4800)
    )
    assert len(found) == 24
    assert sum((times - 200) ** 2 / 200 for times in found.values()) < 49.7  # one in a thousand is above


def test_a_position_outside_the_shard_is_refused() -> None:
    for position in (-1, 5):
        with pytest.raises(ValueError, match="positions 0 to 4"):
            sample_index(DIGEST, 0, 0, 0, 5, position)


# --- sets of positions -----------------------------------------------------------------------------------


@given(POSITIONS, POSITIONS)
def test_interval_arithmetic_is_set_arithmetic(a: frozenset[int], b: frozenset[int]) -> None:
    assert union(intervals(a), intervals(b)) == intervals(a | b)
    assert subtract(intervals(a), intervals(b)) == intervals(a - b)
    assert common(intervals(a), intervals(b)) == intervals(a & b)
    assert total(intervals(a)) == len(a)


@given(SHARDS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_what_counted_and_what_was_given_up_is_all_there_is(
    counts: list[int], epochs: int, rng: random.Random
) -> None:
    ledger = Ledger.start(DIGEST, counts, 0, epochs)
    counted: list[tuple[int, Stretch]] = []
    given_up: list[tuple[int, Stretch]] = []
    while not ledger.done:
        piece = rng.choice(ledger.remaining())
        piece = stretch(piece.shard, piece.lo, rng.randint(piece.lo + 1, piece.hi))
        action = rng.choice(["advance", "skip", "strike"])
        now = [piece] if action == "advance" else []
        after = getattr(ledger, action)(piece if action == "strike" else [piece])
        counted += [(ledger.epoch, s) for s in now]
        given_up += after.given_up_since(ledger, now)
        ledger = after
    assert check_exact(counts, epochs, counted, given_up) == []


# --- transitions against the dumb ledger -----------------------------------------------------------------


class DumbLedger:
    """Sets of (shard, position); the same transitions without a single interval."""

    def __init__(self, counts: list[int], epochs: int) -> None:
        self.all = {(s, p) for s, count in enumerate(counts) for p in range(count)}
        self.epochs, self.epoch, self.samples_total = epochs, 0, 0
        self.counted: set[tuple[int, int]] = set()
        self.skipped: set[tuple[int, int]] = set()
        self.struck: set[tuple[int, int]] = set()

    def apply(self, action: str, piece: Stretch) -> None:
        samples = {(piece.shard, p) for p in range(piece.lo, piece.hi)}
        open_ones = samples - self.counted - self.skipped
        if action == "advance":
            if open_ones != samples:
                raise ValueError("twice")
            self.counted |= samples
            self.samples_total += len(samples)
        elif action == "skip":
            self.skipped |= open_ones
        else:
            self.skipped |= open_ones & self.struck
            self.struck |= open_ones
        if self.counted | self.skipped == self.all:
            self.epoch += 1
            self.counted, self.skipped, self.struck = set(), set(), set()

    def agrees_with(self, ledger: Ledger) -> None:
        def expanded(pieces: object) -> set[tuple[int, int]]:
            assert isinstance(pieces, tuple)
            return {(s.shard, p) for s in pieces for p in range(s.lo, s.hi)}

        def flat(per_shard: tuple[tuple[tuple[int, int], ...], ...]) -> set[tuple[int, int]]:
            return {(s, p) for s, pieces in enumerate(per_shard) for lo, hi in pieces for p in range(lo, hi)}

        assert (ledger.epoch, ledger.samples_total) == (self.epoch, self.samples_total)
        assert (flat(ledger.counted), flat(ledger.skipped)) == (self.counted, self.skipped)
        assert expanded(ledger.strikes) == self.struck - self.counted - self.skipped
        assert ledger.progress() == (len(self.counted), len(self.skipped), len(self.all))
        assert ledger.done == (self.epoch == self.epochs)
        if not ledger.done:
            assert expanded(ledger.remaining()) == self.all - self.counted - self.skipped


@given(SHARDS, st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_transitions_match_the_dumb_ledger(counts: list[int], epochs: int, seed: int) -> None:
    rng = random.Random(seed)
    ledger, dumb = Ledger.start(DIGEST, counts, 3, epochs), DumbLedger(counts, epochs)
    for _ in range(60):
        if ledger.done:
            break
        action = rng.choice(["advance", "advance", "advance", "skip", "strike"])
        piece = rng.choice(ledger.remaining()) if rng.random() < 0.5 else random_stretch(rng, counts)
        before = ledger
        try:
            dumb.apply(action, piece)
        except ValueError:
            with pytest.raises(ValueError, match="twice"):
                ledger.advance([piece])
            assert ledger is before
            continue
        if action == "advance":
            ledger = ledger.advance([piece])
        else:
            ledger = ledger.skip([piece]) if action == "skip" else ledger.strike(piece)
        dumb.agrees_with(ledger)
        assert Ledger.from_bytes(ledger.to_bytes()) == ledger


@given(SHARDS, st.integers(0, 2**32))
def test_the_order_of_a_rounds_stretches_does_not_matter(counts: list[int], seed: int) -> None:
    rng = random.Random(seed)
    ledger = Ledger.start(DIGEST, counts, 0, 2)
    pieces = [stretch(s.shard, p, p + 1) for s in ledger.remaining() for p in range(s.lo, s.hi)]
    some = rng.sample(pieces, rng.randint(0, len(pieces)))
    assert ledger.advance(some).to_bytes() == ledger.advance(sorted(some)).to_bytes()


def test_remaining_comes_in_the_epochs_order() -> None:
    ledger = Ledger.start(DIGEST, [4] * 6, 1, 2)
    assert tuple(s.shard for s in ledger.remaining()) == shard_order(DIGEST, 1, 0, 6)
    later = ledger.advance(ledger.remaining())
    assert (
        tuple(s.shard for s in later.remaining())
        == shard_order(DIGEST, 1, 1, 6)
        != shard_order(DIGEST, 1, 0, 6)
    )


@pytest.mark.parametrize(
    "consumed",
    [
        [stretch(0, 3, 6)],  # partly counted
        [stretch(0, 8, 9), stretch(0, 7, 10)],  # twice in one round
        [stretch(1, 1, 2)],  # skipped
        [stretch(0, 9, 11)],  # beyond the shard
        [stretch(2, 0, 1)],  # no such shard
    ],
)
def test_what_cannot_count_raises_and_changes_nothing(consumed: list[Stretch]) -> None:
    ledger = Ledger.start(DIGEST, [10, 4], 0, 1).advance([stretch(0, 0, 5)]).skip([stretch(1, 0, 4)])
    before = ledger.to_bytes()
    with pytest.raises(ValueError):
        ledger.advance([stretch(0, 5, 7), *consumed])
    assert ledger.to_bytes() == before


def test_nothing_counts_after_the_last_epoch() -> None:
    ledger = Ledger.start(DIGEST, [2], 0, 1).advance([stretch(0, 0, 2)])
    assert ledger.done and ledger.remaining() == () and ledger.advance([]) == ledger
    for act in (ledger.strike, ledger.struck_out, lambda s: ledger.advance([s]), lambda s: ledger.skip([s])):
        with pytest.raises(ValueError, match="epochs are over"):
            act(stretch(0, 0, 1))


def test_only_the_part_struck_twice_is_quarantined() -> None:
    ledger = Ledger.start(DIGEST, [10], 0, 1).strike(stretch(0, 0, 6))
    assert ledger.skipped == ((),) and ledger.struck_out(stretch(0, 4, 9)) == (stretch(0, 4, 6),)
    ledger = ledger.strike(stretch(0, 4, 9))
    assert ledger.skipped == (((4, 6),),)
    assert ledger.strikes == (stretch(0, 0, 4), stretch(0, 6, 9))


def test_what_one_death_had_in_hand_is_struck_once() -> None:
    begun = Ledger.start(DIGEST, [10, 10], 0, 1).strike(stretch(1, 2, 4))
    at_once = begun.strike(stretch(0, 0, 3), stretch(1, 3, 6), stretch(0, 2, 5), stretch(0, 5, 6))
    assert at_once.strikes == (stretch(0, 0, 6), stretch(1, 2, 3), stretch(1, 4, 6))
    assert at_once.skipped == ((), ((3, 4),)) and begun.strike() == begun
    assert at_once == begun.strike(stretch(0, 0, 6)).strike(stretch(1, 3, 6))


def test_a_strike_is_forgotten_when_the_samples_count_after_all() -> None:
    ledger = Ledger.start(DIGEST, [10], 0, 1).strike(stretch(0, 0, 6)).advance([stretch(0, 0, 3)])
    assert ledger.strikes == (stretch(0, 3, 6),)
    assert ledger.strike(stretch(0, 0, 4)).skipped == (((3, 4),),)


def test_the_last_strike_can_end_the_epoch() -> None:
    ledger = Ledger.start(DIGEST, [3], 0, 2).advance([stretch(0, 0, 2)]).strike(stretch(0, 2, 3))
    ledger = ledger.strike(stretch(0, 2, 3))
    assert (ledger.epoch, ledger.strikes, ledger.samples_total) == (1, (), 2)


# --- bytes -----------------------------------------------------------------------------------------------


def busy_ledger() -> Ledger:
    ledger = Ledger.start(DIGEST, [300, 0, 5, 70_000], 11, 3).advance(
        [stretch(0, 3, 250), stretch(3, 0, 66_000)]
    )
    return ledger.skip([stretch(2, 1, 2)]).strike(stretch(0, 250, 260)).strike(stretch(3, 66_000, 66_001))


def test_a_ledger_is_small() -> None:
    assert len(busy_ledger().to_bytes()) < 100
    assert len(Ledger.start(DIGEST, [1000] * 256, 0, 1).to_bytes()) < 1500


def test_every_truncation_and_any_trailing_junk_is_refused() -> None:
    data = busy_ledger().to_bytes()
    assert Ledger.from_bytes(data) == busy_ledger()
    for end in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            Ledger.from_bytes(data[:end])
    for junk in (b"\x00", b"\xc0", data):
        with pytest.raises(RemoteProtocolError):
            Ledger.from_bytes(data + junk)


@given(st.integers(0, 200), st.binary(min_size=1, max_size=4))
@settings(max_examples=500)
def test_damage_is_refused_or_is_another_valid_ledger(at: int, change: bytes) -> None:
    data = busy_ledger().to_bytes()
    damaged = data[: at % len(data)] + change + data[at % len(data) + len(change) :]
    with contextlib.suppress(RemoteProtocolError):
        assert Ledger.from_bytes(damaged).to_bytes() == damaged


def reencoded(change: Callable[[list[object]], None]) -> bytes:
    fields = msgpack.unpackb(busy_ledger().to_bytes())
    change(fields)
    packed: bytes = msgpack.packb(fields)
    return packed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, 1),
        (1, "text"),
        (2, -1),
        (2, 1.0),
        (3, 0),
        (4, [300, 0, 5]),
        (4, []),
        (5, 4),
        (5, True),
        (6, [[3, 250], [], [], [66_000, 0]]),
        (6, [[3, 250, 249, 260], [], [], []]),
        (6, [[3, 100, 100, 250], [], [], [0, 66_000]]),
        (6, [[3, 250], [], [1, 2], [0, 66_000]]),
        (6, [[3], [], [], []]),
        (6, [["a", "b"], [], [], []]),
        (7, None),
        (8, [[0, 240, 260]]),
        (8, [[0, 250, 260, 1]]),
        (8, [[9, 250, 260]]),
        (8, [[3, 66_000, 66_001], [0, 250, 260]]),
        (9, 5),
        (9, 10**9),
    ],
)
def test_wrong_content_is_refused(field: int, value: object) -> None:
    def change(fields: list[object]) -> None:
        fields[field] = value

    with pytest.raises(RemoteProtocolError, match="not a ledger"):
        Ledger.from_bytes(reencoded(change))


# --- the oracle of the replay ----------------------------------------------------------------------------


def test_the_replay_finds_each_kind_of_fault() -> None:
    counted = [(0, stretch(0, 0, 4)), (0, stretch(0, 3, 6)), (0, stretch(1, 1, 3)), (1, stretch(0, 0, 1))]
    assert check_exact([6, 3], 1, counted, [(0, stretch(1, 0, 2))]) == [
        "epoch 0, shard 0, positions 3 to 3: counted 2 times",
        "epoch 0, shard 1, positions 1 to 1: both counted and skipped",
    ]
    assert check_exact([6, 3], 1, counted) == [
        "epoch 0, shard 0, positions 3 to 3: counted 2 times",
        "epoch 0, shard 1, positions 0 to 0: never counted",
    ]
    assert check_exact([2], 0, [(0, stretch(0, 1, 4)), (0, stretch(5, 0, 1))]) == [
        "epoch 0, shard 0, positions 2 to 3: does not exist",
        "epoch 0, shard 5, positions 0 to 0: does not exist",
    ]


def test_the_replay_is_content_with_an_exact_run() -> None:
    counted = [(0, stretch(0, 2, 6)), (0, stretch(0, 0, 2)), (1, stretch(0, 0, 5))]
    assert check_exact([6], 1, counted) == []
    assert check_exact([6], 2, counted) == ["epoch 1, shard 0, positions 5 to 5: never counted"]
    assert check_exact([6], 2, counted, [(1, stretch(0, 5, 6))]) == []


def test_a_new_epoch_begins_with_its_first_part() -> None:
    begun = Ledger.start(b"d" * 16, [4, 4], 0, 2)
    shared = begun.shared_anew().shared_anew()
    assert (begun.part, shared.part) == (0, 2) and Ledger.from_bytes(shared.to_bytes()) == shared
    half = shared.advance([Stretch(shard=0, lo=0, hi=4)])
    over = half.advance([Stretch(shard=1, lo=0, hi=4)])
    assert (half.epoch, half.part, over.epoch, over.part) == (0, 2, 1, 0)
