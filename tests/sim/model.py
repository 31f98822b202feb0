"""The model that is trained here: a state is the history of what went into it, and its digest names all of that."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2p_dmc.agent.state import state_digest
from p2p_dmc.core import adacomm
from p2p_dmc.core.adacomm import RoundFacts, TauPolicy, TauState
from p2p_dmc.core.agreement_messages import Lineage, StateRef
from p2p_dmc.core.ledger import Ledger, Stretch

POLICY = TauPolicy(kind="adacomm", tau0=4, t0_ms=40, tau_max=64)
"""tau moves every few rounds: a round takes some 10 ms here."""

Pieces = tuple[Stretch, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One state: anchor, ledger and tau, with the round that made it and the state before."""

    ref: StateRef
    parent: Model | None
    depth: int
    """Rounds in it."""
    anchor: bytes
    """Digest of the parameters: of everything that was ever added to them."""
    ledger: Ledger
    tau: TauState
    epoch: int = 0
    """Of the data, in which its round counted samples."""
    counted: tuple[Pieces, ...] = ()
    """What each voter's delta in the round was made of, in ring order."""
    facts: tuple[RoundFacts, ...] = ()
    peers: tuple[str, ...] = ()
    """The voters of its round."""

    def descends_from(self, other: Model) -> bool:
        """Whether everything in `other` is in this, too."""
        at: Model | None = self
        while at is not None and at.depth > other.depth:
            at = at.parent
        return at is not None and (at is other or at.ref == other.ref)

    def renamed(self, ref: StateRef) -> Model:
        """The same state under the lineage that was agreed."""
        return self if ref == self.ref else replace(self, ref=ref)


def initial(peer_id: str, counts: Sequence[int], epochs: int) -> Model:
    """What this peer's trainer starts with: every trainer has other random parameters."""
    ledger = Ledger.start(b"the data set", counts, 7, epochs)
    tau = adacomm.start(POLICY)
    anchor = hashlib.blake2b(peer_id.encode(), digest_size=16).digest()
    ref = StateRef(lineage=(0, 0), digest=state_digest(anchor, ledger, tau))
    return Model(ref, None, 0, anchor, ledger, tau)


def anchor_after(anchor: bytes, contributions: Sequence[Pieces], lineage: Lineage) -> bytes:
    """The parameters after a round: other samples, other parameters. Without any they stay."""
    if not any(contributions):
        return anchor
    said = repr([[(s.shard, s.lo, s.hi) for s in pieces] for pieces in contributions]).encode()
    return hashlib.blake2b(anchor + repr(lineage).encode() + said, digest_size=16).digest()


def after_round(
    before: Model,
    lineage: Lineage,
    anchor: bytes,
    ledger: Ledger,
    facts: tuple[RoundFacts, ...],
    counted: tuple[Pieces, ...],
    epoch: int,
    peers: tuple[str, ...],
) -> Model:
    """The state after a complete round, as one member computes it."""
    tau = adacomm.after_round(POLICY, before.tau, facts)
    ref = StateRef(lineage=lineage, digest=state_digest(anchor, ledger, tau))
    return Model(ref, before, before.depth + 1, anchor, ledger, tau, epoch, counted, facts, peers)
