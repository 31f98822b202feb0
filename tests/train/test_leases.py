"""What is handed out next, and what is expected to follow."""

from __future__ import annotations

import pickle
import random

import pytest

from p2p_dmc.train.leases import Batch, Leases
from p2p_dmc.train.tally import Tally
from p2p_dmc.wire.trainer_messages import Lease, LeaseEnd


def lease(
    *stretches: tuple[int, int, int], ahead: tuple[tuple[int, int, int], ...] = (), left: int = 99
) -> Lease:
    return Lease(epoch=0, braids=tuple((s,) for s in stretches), ahead=tuple((s,) for s in ahead), left=left)


def test_batches_of_what_is_leased_and_then_of_what_follows() -> None:
    leases = Leases()
    leases.add(lease((0, 0, 5), (3, 2, 4), ahead=((3, 4, 9), (1, 0, 1))))
    assert list(leases.plan(4, 9)) == [
        Batch(0, (((0, 0, 4),),)),
        Batch(0, (((0, 4, 5),), ((3, 2, 5),))),  # across the end of the lease, and neighbours are one
        Batch(0, (((3, 5, 9),),)),
    ]  # the last sample is not known to be the last
    assert leases.count == 7 and next(iter(leases.plan(4, 1))) == Batch(0, (((0, 0, 4),),))


def test_the_last_batch_is_short_when_it_is_known_to_be_the_last() -> None:
    leases = Leases()
    leases.add(lease((0, 0, 5), ahead=((0, 5, 6),), left=1))
    assert [len(batch) for batch in leases.plan(4, 9)] == [4, 2]
    leases.stop(LeaseEnd(epoch=0, finished=False))
    assert [len(batch) for batch in leases.plan(4, 9)] == [4, 1]


def test_a_batch_goes_to_another_process_whole() -> None:
    for batch in (Batch(3, (((1, 2, 9),), ((2**40, 0, 1), (7, 3, 4)))), Batch(0, ())):
        again = pickle.loads(pickle.dumps(batch))
        assert (again, len(again)) == (batch, len(batch))


def test_batches_are_equal_when_their_samples_come_in_the_same_order() -> None:
    whole = Batch(0, (((0, 0, 3), (1, 5, 8)),))
    cut = Batch(0, (((0, 0, 1), (1, 5, 6)), ((0, 1, 2),), ((1, 6, 7),), ((0, 2, 3), (1, 7, 8))))
    assert whole == cut and hash(whole) == hash(cut) and cut == pickle.loads(pickle.dumps(cut))
    assert whole.pieces == ((0, 0, 1), (1, 5, 6), (0, 1, 2), (1, 6, 7), (0, 2, 3), (1, 7, 8))
    assert Batch(0, (((0, 0, 2),), ((0, 2, 3),))) == Batch(0, (((0, 0, 3),),))
    for other in (
        Batch(1, whole.braids),
        Batch(0, (((1, 5, 8), (0, 0, 3)),)),
        Batch(0, (((0, 0, 3),), ((1, 5, 8),))),
        Batch(0, (((0, 0, 3), (1, 5, 8)), ((2, 0, 1),))),
        "another thing",
    ):
        assert whole != other


def test_only_the_planned_first_is_taken() -> None:
    leases = Leases()
    leases.add(lease((0, 0, 8)))
    first, second = leases.plan(4, 2)
    with pytest.raises(RuntimeError, match="not what is leased"):
        leases.take(second)
    leases = Leases()
    leases.add(lease((0, 0, 4), ahead=((0, 4, 8),)))
    first, second = leases.plan(4, 2)
    leases.take(first)
    with pytest.raises(RuntimeError, match="not what is leased"):
        leases.take(second)  # expected, not leased


def test_cleared_leases_are_nobodys() -> None:
    leases = Leases()
    leases.add(lease((0, 0, 8), ahead=((0, 8, 16),)))
    leases.plan(4, 2)
    leases.clear()
    assert (leases.count, leases.left, leases.generation, list(leases.plan(4, 2))) == (0, None, 1, [])


@pytest.mark.parametrize("seed", range(10))
def test_batches_are_the_order_cut_into_pieces(seed: int) -> None:
    """However it is leased, and however far ahead it is planned: the same samples in the same order."""
    dice = random.Random(seed)
    order = [(shard, lo, lo + dice.randint(1, 9)) for shard in range(20) for lo in (0, 50)]
    flat = [(shard, at) for shard, lo, hi in order for at in range(lo, hi)]
    leases, at, got, size = Leases(), 0, [], dice.randint(1, 7)

    def cut(lo: int, hi: int) -> tuple[tuple[tuple[int, int, int]], ...]:
        return tuple(((shard, place, place + 1),) for shard, place in flat[lo:hi])

    while at < len(flat) or leases.count:
        if leases.count >= size or (at == len(flat) and leases.count):
            planned = list(leases.plan(size, dice.randint(1, 5)))
            leases.take(planned[0])
            got += [(shard, place) for shard, lo, hi in planned[0].pieces for place in range(lo, hi)]
        else:
            end = min(len(flat), at + dice.randint(1, 20))
            known = min(len(flat), end + dice.randint(0, 9))
            leases.add(Lease(epoch=0, braids=cut(at, end), ahead=cut(end, known), left=len(flat) - end))
            at = end
    assert got == flat


def test_the_tally_is_a_list_of_flags() -> None:
    """Against the dumb way: one entry for each sample."""
    dice = random.Random(5)
    tally, consumed, handed_out = Tally(), list[bool](), list[bool]()
    for _ in range(3000):
        match dice.randrange(8):
            case 0:
                tally.restart()
                consumed = []
            case 1:
                tally.forget_handed_out()
                handed_out = []
            case 2 | 3:
                assert tally.in_vain == (not any(handed_out))
                assert tally.consume() == sum(handed_out)
                consumed, handed_out = consumed + handed_out, []
            case _:
                batch = [dice.random() < 0.6 for _ in range(dice.randint(1, 5))]
                tally.hand_out(len(batch), [i for i, trained in enumerate(batch) if not trained])
                handed_out += batch
        assert (tally.consumed, tally.trained) == (len(consumed), sum(consumed))
        assert [i for lo, hi in tally.skipped for i in range(lo, hi)] == [
            i for i, t in enumerate(consumed) if not t
        ]
        assert all(a[1] < b[0] for a, b in zip(tally.skipped, tally.skipped[1:], strict=False))


@pytest.mark.parametrize("seed", range(20))
def test_how_many_stretches_a_round_would_tell_of(seed: int) -> None:
    rng, tally = random.Random(seed), Tally()
    for _ in range(9):
        skipped = sorted(rng.sample(range(6), rng.randint(0, 6)))
        most = tally.told(skipped)
        tally.hand_out(6, skipped)
        assert 0 <= most - len(tally.skipped) - len(tally._left_out) <= 1  # one that goes on is counted again
        if rng.random() < 0.4:
            tally.consume()
        assert len(tally.skipped) <= most
