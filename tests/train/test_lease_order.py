"""A trainer consumes what was leased in the order that the agents count it in."""

from __future__ import annotations

import random

import pytest

from p2p_dmc.agent.work import plain
from p2p_dmc.core.braids import in_turn, part, size, weave
from p2p_dmc.core.ledger import Stretch
from p2p_dmc.train.leases import Leases
from p2p_dmc.wire.trainer_messages import Lease


@pytest.mark.parametrize("seed", range(20))
def test_leases_in_pieces_are_taken_in_the_order_of_the_whole(seed: int) -> None:
    rng, leases = random.Random(seed), Leases()
    braids = weave(
        [Stretch(shard=i, lo=5, hi=5 + rng.randint(1, 30)) for i in range(rng.randint(1, 12))],
        rng.randint(1, 8),
    )
    given, taken, whole = 0, [], size(braids)
    while len(taken) < whole:
        more, ahead = rng.randint(1, 20), rng.randint(0, 20)
        known = part(braids, given + more, given + more + ahead)
        leased = part(braids, given, given + more)
        given = min(given + more, whole)
        leases.add(Lease(epoch=3, braids=plain(leased), ahead=plain(known), left=whole - given))
        batch_size = rng.randint(1, 20)
        while leases.count >= batch_size or (given == whole and leases.count):
            batch = leases.plan(batch_size, rng.randint(1, 3))[0]
            leases.take(batch)
            taken += [(batch.epoch, shard, at) for shard, lo, hi in batch.pieces for at in range(lo, hi)]
            assert leases.count == given - len(taken)
    assert taken == [(3, shard, at) for shard, at in in_turn(braids)]
