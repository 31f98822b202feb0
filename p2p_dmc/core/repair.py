"""One peer's care for its part of one data set: what to fetch next, which copies to give up, and when they may go.

Told what everybody says, asked what to do. It does nothing itself, so that thousands of schedules with losses, restarts
and damage run the same decisions as an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2p_dmc.core.pledges import Key, Pledges
from p2p_dmc.core.replication import I64, Copies, Duty, Plan
from p2p_dmc.core.shard_set import Mask, ShardSet, union

Indexes = npt.NDArray[np.intp]
LOOKED_AT = 2048
"""Surplus copies that one call considers: each costs a look at who is to keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairSettings:
    """Times in ms."""

    fetch_still_ms: int
    """A shard is fetched when it has been this peer's to keep for so long."""
    drop_still_ms: int
    """A copy is given up when it has not been this peer's to keep for so long."""
    most_asked: int = 256
    """Copies that are being given up at once; while a peer asks about a shard it pledges nothing for it."""
    patience_ms: int = 60_000
    """An ask that is open for so long is given up for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What another peer says of a data set."""

    copies: Copies
    placement: bytes
    """Digest of the placement that it means."""
    boot: int = 0
    """Which life of the peer says so."""
    version: int = 0
    """Grows with every change in that life."""

    @property
    def shards(self) -> ShardSet:
        """What can be had of it."""
        return self.copies.there


class Repair:
    """``pledges`` are shared by the data sets of one peer.

    Invariant: ``others`` are live peers, each in its present life.
    """

    def __init__(
        self,
        *,
        me: str,
        dataset: bytes,
        shards: int,
        replicas: int,
        pledges: Pledges,
        settings: RepairSettings,
        others: dict[str, Said] | None = None,
    ) -> None:
        self.plan: Plan | None = None
        self.others: dict[str, Said] = {} if others is None else others
        self._me = me
        self._dataset = dataset
        self._shards = shards
        self._replicas = replicas
        self._pledges = pledges
        self._settings = settings
        self._duty = Duty(shards)
        self._looked = 0

    # -- facts --------------------------------------------------------------------------------------------------------

    def full(self, own: Copies) -> dict[str, ShardSet]:
        """The peers without room, with what each has: an argument of the plan."""
        said = {p: s.copies for p, s in self.others.items()} | {self._me: own}
        return {p: copies.there for p, copies in said.items() if copies.full}

    def follow(self, plan: Plan, now_ms: int) -> None:
        """Who is to keep what, from now on."""
        if plan is not self.plan:
            self.plan = plan
            self._duty.follow(plan.ranks_of(self._me), now_ms)

    def heard(self, peer_id: str, said: Said) -> None:
        before = self.others.get(peer_id)
        self.others[peer_id] = said
        if before is not None and before.copies.verified != said.copies.verified:
            lost = before.copies.verified.mask() & ~said.copies.verified.mask()
            self._pledges.lost(peer_id, self._dataset, np.flatnonzero(lost).tolist())

    def gone(self, peer_id: str) -> None:
        """A peer went, or lives anew: what it said and pledged is about something that may not be there any more."""
        self.others.pop(peer_id, None)
        self._pledges.gone(peer_id)

    def agreed(self) -> bool:
        """Whether everybody that placement counts means this placement."""
        if self.plan is None:
            return False
        digest, placed = self.plan.placed.digest(), self.plan.placed.peers
        return all(
            p.peer_id == self._me or (p.peer_id in self.others and self.others[p.peer_id].placement == digest)
            for p in placed
        )

    # -- decisions ----------------------------------------------------------------------------------------------------

    def to_fetch(self, own: Copies, now_ms: int) -> list[int]:
        """Shards to fetch, most urgent first: this peer's to keep, not here, and had by somebody.

        Those with the fewest copies come first, in the same order everywhere: peers that receive the same shards at
        the same time begin with different ranges of them and pass these on.
        """
        due = self._duty.to_keep(self._settings.fetch_still_ms, now_ms) & ~own.there.mask()
        if own.full or not due.any():
            return []
        shards = np.flatnonzero(due & self._elsewhere())
        copies = self._counted(shards)
        order = np.lexsort((shards, copies))
        return [int(shard) for shard in shards[order]]

    def _elsewhere(self) -> Mask:
        return union([said.copies.there for said in self.others.values()], self._shards).mask()

    def _counted(self, shards: Indexes) -> I64:
        """Verified copies that others have, of each of these shards."""
        total = np.zeros(len(shards), dtype=np.int64)
        for said in self.others.values():
            total += said.copies.verified.at(shards)
        return total

    def give_up(self, own: Copies, held_fast: Callable[[int], bool], now_ms: int) -> None:
        """Ask about copies that others are to keep and say they have; ``held_fast``: needed here all the same."""
        surplus = self._duty.to_give_up(self._settings.drop_still_ms, now_ms) & own.there.mask()
        agreed = self.agreed()
        for shard in self._pledges.asked_about(self._dataset):
            if not (agreed and surplus[shard]) or held_fast(shard):
                self._pledges.withdraw((self._dataset, shard))
        self._pledges.withdraw_older(self._settings.patience_ms, now_ms)
        if agreed:
            self._ask(np.flatnonzero(surplus), held_fast, now_ms)

    def leave(self, now_ms: int) -> None:
        """Ask about every shard, here or not: this peer may go once `may_leave`."""
        self._pledges.withdraw_older(self._settings.patience_ms, now_ms)
        self._ask(np.arange(self._shards), lambda shard: False, now_ms)

    def _ask(self, shards: Indexes, held_fast: Callable[[int], bool], now_ms: int) -> None:
        room = self._settings.most_asked - self._pledges.open_count()
        if room <= 0 or not len(shards):
            return
        at = int(np.searchsorted(shards, self._looked)) % len(shards)
        looked = np.concatenate([shards[at:], shards[:at]])[:LOOKED_AT]
        asked: list[tuple[Key, tuple[str, ...]]] = []
        for shard in looked[self._counted(looked) >= self._replicas].tolist():
            if (self._dataset, shard) not in self._pledges and not held_fast(shard):
                keepers = self._keepers_that_have(shard)
                asked += [((self._dataset, shard), keepers)] if keepers else []
            if len(asked) == room:
                self._looked = shard + 1
                break
        else:
            self._looked = int(looked[-1]) + 1
        self._pledges.ask(asked, now_ms)

    def _keepers_that_have(self, shard: int) -> tuple[str, ...]:
        """Those that are to keep the shard when they are as many as wanted and all say they have it; else nobody."""
        keepers = self.plan.keepers(shard) if self.plan is not None else ()
        have = all(p in self.others and shard in self.others[p].copies.verified for p in keepers)
        return keepers if have and len(keepers) >= self._replicas and self._me not in keepers else ()

    def may_drop(self) -> list[int]:
        """Copies that may go now, at once or not at all."""
        return [shard for dataset, shard in self._pledges.secured() if dataset == self._dataset]

    def may_leave(self) -> bool:
        """Whether all that are to keep each shard have pledged to."""
        return (
            not self._pledges.open_count() and len(self._pledges.asked_about(self._dataset)) == self._shards
        )


def copies_of(verified: Mapping[int, object], held: frozenset[int], full: bool, shards: int) -> Copies:
    """A peer's own: ``held`` are files that are there, of which some are ``verified``."""
    sure = [shard for shard in verified if shard in held]
    return Copies(
        verified=ShardSet.of(sure, shards),
        unverified=ShardSet.of(held.difference(sure), shards),
        full=full,
    )
