"""Repair as the agent does it: the decisions of core/repair.py, with this peer's store, messages and clock."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Container, Mapping
from functools import partial
from itertools import islice

from p2p_dmc.agent.fetching import Fetching
from p2p_dmc.agent.known import Known
from p2p_dmc.agent.placing import Facts, Placing
from p2p_dmc.agent.scrub import Scrub
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.placement import StoringPeer
from p2p_dmc.core.pledges import MOST_SHARDS, Key, Pledges
from p2p_dmc.core.repair import Repair, RepairSettings, copies_of
from p2p_dmc.core.replication import Copies, Plan, Tally, tally
from p2p_dmc.data.store import Store
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.observe.journal import Journal
from p2p_dmc.wire.messages import PledgeAsked, Pledged

AT_ONCE = 80
"""Shards that are told to be fetched at a time: what is most urgent may change while they come."""


class Repairing:
    """Fetches what this peer is to keep and gives up what others keep. ``changed`` hears when others are to be told."""

    def __init__(
        self,
        *,
        me: str,
        store: Store,
        settings: AgentSettings,
        journal: Journal,
        send: Callable[[str, object, str], None],
        known: Mapping[bytes, Known],
        fetching: Fetching,
        scrub: Scrub,
        in_use: Container[Key],
        storing: Callable[[], tuple[StoringPeer, ...]],
        changed: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        self._me = me
        self._store = store
        self._settings = settings
        self._journal = journal
        self._send = send
        self._known = known
        self._fetching = fetching
        self._scrub = scrub
        self._in_use = in_use
        self._storing = storing
        self._changed = changed
        self._now_s = now_s
        self._pledges = Pledges(secrets.randbits(62))
        self._placing = Placing(self._facts, self._placed)
        self._repairs: dict[bytes, Repair] = {}
        self._own: dict[bytes, tuple[tuple[Known, int, int, bool], Copies]] = {}
        self.leaves = False
        """This peer means to go as soon as every shard is kept by others."""

    # -- facts --------------------------------------------------------------------------------------------------------

    def of(self, known: Known) -> Repair:
        dataset = known.manifest.digest
        if dataset not in self._repairs or self._repairs[dataset].others is not known.others:
            self._repairs[dataset] = Repair(
                me=self._me,
                dataset=dataset,
                shards=len(known.manifest.shards),
                replicas=known.manifest.replicas,
                pledges=self._pledges,
                settings=RepairSettings(
                    fetch_still_ms=self._settings.reconcile_still_ms,
                    drop_still_ms=self._settings.drop_still_ms,
                ),
                others=known.others,
            )
        return self._repairs[dataset]

    def own(self, known: Known) -> Copies:
        """What this peer holds."""
        dataset = known.manifest.digest
        facts = known, known.version, self._store.changes(dataset), self._fetching.full
        before = self._own.get(dataset)
        if before is not None and before[0][0] is known and before[0][1:] == facts[1:]:
            return before[1]
        held = self._store.holdings(dataset)
        made = copies_of(known.verified, held, facts[3], len(known.manifest.shards))
        self._own[dataset] = facts, made
        return made

    def _facts(self, known: Known) -> Facts:
        peers = tuple(sorted(self._storing(), key=lambda peer: peer.peer_id))
        return peers, self.of(known).full(self.own(known))

    def place(self, known: Known) -> None:
        """Follow what is known of peers and of their room."""
        self._placing.follow(known, self.of(known).plan)

    def _placed(self, known: Known, plan: Plan) -> None:
        if known.take(plan.placed):
            self._changed()
        self.of(known).follow(plan, _ms(self._now_s()))

    def gone(self, known: Known, peer_id: str) -> None:
        """A peer went, or lives anew."""
        self.of(known).gone(peer_id)

    def tally(self, known: Known) -> Tally | None:
        """How it stands with a data set; None before it is placed."""
        plan = self.of(known).plan
        staying = {peer.peer_id for peer in self._storing()}
        copies = {p: said.copies for p, said in known.others.items()} | {self._me: self.own(known)}
        return tally(plan, copies, known.manifest.replicas, staying) if plan is not None else None

    def may_leave(self) -> bool:
        """Whether every data set of which something is here is kept by others, who have pledged to; asks them from now
        on.
        """
        self.leaves = True
        concerned = [known for dataset, known in self._known.items() if self._store.holdings(dataset)]
        return all(self.of(known).may_leave() for known in concerned)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Fetch, ask, give up."""
        now_ms = _ms(self._now_s())
        for dataset, known in self._known.items():
            self.place(known)
            repair, own = self.of(known), self.own(known)
            room = AT_ONCE - len(self._fetching)
            if room > 0:
                due = ((dataset, shard) for shard in repair.to_fetch(own, now_ms))
                for key in islice(filter(self._fetching.may_start, due), room):
                    self._fetching.start(key, urgent=False)
            if self.leaves:
                repair.leave(now_ms)
                continue
            repair.give_up(own, partial(self._is_in_use, dataset), now_ms)
            for shard in repair.may_drop():
                self._drop(known, shard)
        for question in self._pledges.questions(self._settings.pledge_again_ms, now_ms):
            asked = PledgeAsked(dataset=question.dataset, number=question.number, shards=question.shards)
            self._send(question.peer_id, asked, "")

    def _is_in_use(self, dataset: bytes, shard: int) -> bool:
        return (dataset, shard) in self._in_use

    def _drop(self, known: Known, shard: int) -> None:
        dataset = known.manifest.digest
        self._store.drop(dataset, shard)
        self._pledges.withdraw((dataset, shard))
        known.doubt(shard)
        known.version += 1
        self._changed()
        self._journal.event("dropped", shard=known.manifest.shard_digests[shard].hex())

    # -- what others ask ----------------------------------------------------------------------------------------------

    def heard(self, sender: str, message: PledgeAsked | Pledged) -> None:
        """RemoteProtocolError for shards that the data set has not, and for more of them than anybody asks about."""
        known = self._known.get(message.dataset)
        if known is None:
            return
        if len(message.shards) > MOST_SHARDS:
            raise RemoteProtocolError(f"{len(message.shards)} shards in one message, more than {MOST_SHARDS}")
        if any(not 0 <= shard < len(known.manifest.shards) for shard in message.shards):
            raise RemoteProtocolError("a shard of no data set")
        if isinstance(message, Pledged):
            self._pledges.pledged(sender, message.dataset, message.number, message.shards)
            return
        kept = self._pledges.answer(message.dataset, message.shards, lambda s: self._has_fast(known, s))
        if kept:
            self._send(sender, Pledged(dataset=message.dataset, number=message.number, shards=kept), "")

    def _has_fast(self, known: Known, shard: int) -> bool:
        """Verified not long ago, and not written to since; else it is looked at now, and pledged when asked again."""
        key = (known.manifest.digest, shard)
        if not self._store.has(*key):
            return False
        if shard in known.verified and self._store.stamp(*key) != known.verified[shard]:
            known.doubt(shard)
            self._changed()
        verified_s = known.verified_s.get(shard)
        if verified_s is None or time.monotonic() - verified_s > self._settings.pledge_fresh_s:
            self._scrub.first(key)
            return False
        return True

    async def close(self) -> None:
        await self._placing.close()


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
