"""The first peers of each shard, kept so that peers can enter and go without ranking the others again.

A row of the ranking is one shard. Entering a peer computes that peer's scores alone and touches the rows in which it
comes before somebody who is there; a peer that goes leaves holes only in the rows in which it was, and these are
ranked anew. A full ranking is the same thing: everybody enters an empty one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2p_dmc.core import hrw
from p2p_dmc.core.hrw import U64

I32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]

NOBODY = -1
GONE = -2
_ROWS_PER_BLOCK = 1 << 16  # the handful of arrays of a block, 512 KiB each, stays in a cache


@dataclass(frozen=True, slots=True, kw_only=True)
class StoringPeer:
    """A peer that stores shards.

    ``weight`` is its capacity in any unit all peers share, such as GiB. ``domain`` is what it may fail together with (a
    rack, a house, a power line), by a name that all peers share; "" is a domain of its own.
    """

    peer_id: str
    weight: int = 1
    domain: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.weight, int) or not 1 <= self.weight <= hrw.MAX_WEIGHT:
            raise ValueError(f"weight {self.weight!r} of peer {self.peer_id!r} is not in 1..{hrw.MAX_WEIGHT}")


class Field:
    """Who takes part in a ranking: peers sorted by peer_id, each meant by its place ("column")."""

    __slots__ = ("domain_of", "domains", "keys", "peers", "weights")

    def __init__(self, peers: Sequence[StoringPeer], *, with_domains: bool = True) -> None:
        self.peers = tuple(peers)
        self.keys = np.array([hrw.peer_key(peer.peer_id) for peer in peers], dtype=np.uint64)
        self.weights = np.array([peer.weight for peer in peers], dtype=np.uint64)
        names = sorted({peer.domain for peer in peers if peer.domain and with_domains})
        number = {name: len(peers) + i for i, name in enumerate(names)}
        own = [number.get(peer.domain, column) for column, peer in enumerate(peers)]
        self.domains = len(set(own))
        self.domain_of = np.array([*own, NOBODY], dtype=np.int32)  # the last is NOBODY's

    @property
    def has_shared_domains(self) -> bool:
        return self.domains < len(self.peers)

    def likely_cost(self, ranks: int) -> int:
        """Of nearly all shards the first ranks cost less: a bound that spares work, and may be wrong.

        Costs are exponential draws, so those of all peers together are a Poisson process whose rate is the sum of the
        weights. Without shared domains the bound is wrong for one shard in ten million.
        """
        if not ranks or self.domains < 2 * ranks:
            return hrw.NO_COST
        draws = ranks + 5 * math.sqrt(ranks) + 10
        return min(hrw.NO_COST, int(draws / float(self.weights.sum()) * hrw.COST_UNIT))

    def order(self, columns: Sequence[int]) -> list[int]:
        """In which order they enter: the result does not depend on it, the work does.

        Somebody of each domain first, for a row with a free place lets everybody in; then by weight, because the sieve
        is made anew for each.
        """
        first: dict[int, int] = {}
        for column in columns:
            first.setdefault(int(self.domain_of[column]), column)
        leaders = set(first.values())
        return sorted(columns, key=lambda column: (column not in leaders, self.weights[column], column))


class Ranking:
    """Arrays of shape (ranks, shards), best peer first; a free place has the column NOBODY and the cost NO_COST.

    Each row's peers are of different domains and in the order (cost, -score, column): the best of its domain stands for
    each domain, and the best domains are there. There are never more ranks than domains, so no place stays free.
    """

    __slots__ = ("columns", "costs", "field", "scores")

    def __init__(self, field: Field, columns: I32, costs: U64, scores: U64) -> None:
        self.field = field
        self.columns = columns
        self.costs = costs
        self.scores = scores

    @classmethod
    def empty(cls, field: Field, ranks: int, shards: int) -> Ranking:
        """Nobody of the field has entered yet."""
        shape = (ranks, shards)
        return cls(
            field,
            np.full(shape, NOBODY, dtype=np.int32),
            np.full(shape, hrw.NO_COST, dtype=np.uint64),
            np.zeros(shape, dtype=np.uint64),
        )

    @classmethod
    def of(cls, keys: U64, field: Field, ranks: int) -> Ranking:
        """Everybody of the field, for the shards of these keys."""
        everybody, likely = range(len(field.peers)), field.likely_cost(ranks)
        result = cls.empty(field, ranks, len(keys))
        result._enter_blocks(keys, everybody, likely)
        unlikely = np.flatnonzero((result.costs > likely).any(axis=0))
        again = cls.empty(field, ranks, len(unlikely))
        again._enter_blocks(keys[unlikely], everybody, hrw.NO_COST)
        result.put(unlikely, again)
        return result

    def changed(self, keys: U64, field: Field, ranks: int) -> Ranking:
        """The ranking of another field for the same shards, from this one."""
        column_of = {peer: column for column, peer in enumerate(field.peers)}
        translate = np.array(
            [*(column_of.get(peer, GONE) for peer in self.field.peers), NOBODY], dtype=np.int32
        )
        if not (translate >= 0).any():
            return Ranking.of(keys, field, ranks)
        result = Ranking(
            field, translate.take(self.columns[:ranks]), self.costs[:ranks].copy(), self.scores[:ranks].copy()
        )
        if len(result.columns) < ranks:
            result = result.above(Ranking.empty(field, ranks - len(result.columns), len(keys)))
        holes = np.flatnonzero((result.columns == GONE).any(axis=0))
        result.costs[:, holes] = 0  # nobody enters: these rows are ranked anew
        added = sorted(set(range(len(field.peers))) - set(translate.tolist()))
        result._enter_blocks(keys, added, hrw.NO_COST)
        result.put(holes, Ranking.of(keys[holes], field, ranks))
        return result

    def take(self, rows: Rows | slice) -> Ranking:
        """These rows: a copy, or for a slice the same memory."""
        return Ranking(self.field, self.columns[:, rows], self.costs[:, rows], self.scores[:, rows])

    def above(self, other: Ranking) -> Ranking:
        """The ranks of both, this one's first."""
        return Ranking(
            self.field,
            np.concatenate([self.columns, other.columns]),
            np.concatenate([self.costs, other.costs]),
            np.concatenate([self.scores, other.scores]),
        )

    def put(self, rows: Rows, other: Ranking) -> None:
        """Overwrite these rows with all of the other's."""
        self.columns[:, rows] = other.columns
        self.costs[:, rows] = other.costs
        self.scores[:, rows] = other.scores

    def _enter_blocks(self, keys: U64, columns: Sequence[int], most_cost: int) -> None:
        """Let these peers, none of whom is here yet, take the places that they deserve.

        One that costs more than ``most_cost`` may be left out, also where another one that costs more gets in.
        """
        order = self.field.order(columns)
        for start in range(0, len(keys) if order else 0, _ROWS_PER_BLOCK):
            block = slice(start, start + _ROWS_PER_BLOCK)
            self.take(block)._enter(keys[block], order, np.uint64(most_cost))

    def _enter(self, keys: U64, order: Sequence[int], most_cost: np.uint64) -> None:
        field, weight = self.field, np.uint64(0)
        for column in order:
            if field.weights[column] != weight:
                weight = field.weights[column]
                sieve = hrw.least_scores(np.minimum(self.costs[-1], most_cost), weight)
            scores = hrw.scores(keys, field.keys[column])
            rows = np.flatnonzero(scores >= sieve)
            if len(rows):
                self._enter_one(rows, scores[rows], column)
                sieve[rows] = hrw.least_scores(np.minimum(self.costs[-1, rows], most_cost), weight)

    def _enter_one(self, rows: Rows, scores: U64, column: int) -> None:
        """One peer into those of these rows in which it comes before the last, or before its own domain's."""
        field = self.field
        costs = hrw.costs(scores, field.weights[column])
        old = self.take(rows)
        behind = old.columns > column
        behind = (old.scores < scores) | ((old.scores == scores) & behind)
        behind = (old.costs > costs) | ((old.costs == costs) & behind)
        place = len(behind) - behind.sum(axis=0)
        free = np.full(len(rows), len(behind) - 1)  # the rank whose peer goes
        if field.has_shared_domains:
            alike = field.domain_of[old.columns] == field.domain_of[column]
            free = np.where(alike.any(axis=0), alike.argmax(axis=0), free)
        enters = np.flatnonzero(place <= free)
        place, free = place[enters], free[enters]
        rank = np.arange(len(behind))[:, None]
        source = rank - ((rank > place) & (rank <= free))
        new = old.take(enters)
        for values, value in (
            (new.columns, np.int32(column)),
            (new.costs, costs[enters]),
            (new.scores, scores[enters]),
        ):
            values[...] = np.take_along_axis(values, source, axis=0)
            values[place, np.arange(len(enters))] = value
        self.put(rows[enters], new)


def merged(spread: I32, flat: I32) -> I32:
    """Columns of ``spread``, then those of ``flat`` that are not among them: as many ranks as ``flat`` has."""
    result = np.concatenate([spread, np.full_like(flat[len(spread) :], NOBODY)])
    ends = np.full(flat.shape[1], len(spread))
    for columns in flat:
        rows = np.flatnonzero((columns != spread).all(axis=0) & (ends < len(flat)))
        result[ends[rows], rows] = columns[rows]
        ends[rows] += 1
    return result
