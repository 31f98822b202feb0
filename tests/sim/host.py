"""One machine: its disk, its agent with the agreement core, its trainer, and the loop between them.

What an agent's shell does around the core (`p2p_dmc/agent/run.py`, `training.py`), without a socket or a clock. The
decisions are the product's: assignment, leases and claims are `agent/work.py`, the ledger and tau are `core/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from p2p_dmc.agent.view_opening import local_mode
from p2p_dmc.agent.work import (
    Hand,
    InFlight,
    ProposalPayload,
    Strike,
    Work,
    bitmap,
    decode_payload,
    encode_payload,
    gave_up_claims,
    in_start,
    opening_ledger,
    plain,
    voters_of,
)
from p2p_dmc.core.adacomm import RoundFacts
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import MemberId, Promises, StateRef, Verdict, View
from p2p_dmc.core.braids import Braid, in_turn, unordered
from p2p_dmc.core.ledger import Ledger, Stretch
from p2p_dmc.core.pace import Pace
from p2p_dmc.wire.trainer_messages import Local
from tests.sim.collective import Collective
from tests.sim.invariants import require
from tests.sim.model import Model, Pieces, after_round, anchor_after
from tests.sim.network import Closed

NOTHING = Hand(0, 0, ())
KEPT_ROUNDS = 4
"""Results that a learner keeps while it downloads the state that they follow."""
DOWNLOAD_STEPS = 3


class Header(NamedTuple):
    """One member's word at a round's barrier."""

    view_id: bytes
    view_epoch: int
    round: int
    digest: bytes
    samples: int
    finite: bool
    change: bool
    closing: bool
    final: bool
    compute_us: int
    loss_micro: int

    def facts(self) -> RoundFacts:
        return RoundFacts(
            samples=self.samples if self.finite else 0,
            steps=1,
            loss_sum_micro=self.loss_micro if self.finite else 0,
            compute_us=self.compute_us,
            comm_us=1_000 if self.finite else 0,
        )


@dataclass
class Trainer:
    """The process that trains: what its parameters are made of, and what it has in hand."""

    base: StateRef | None = None
    """Of the anchor that its parameters come from; None for a new trainer."""
    local: list[Stretch] = field(default_factory=list)
    """Consumed since the anchor: its delta is made of these samples."""
    queue: list[Stretch] = field(default_factory=list)
    """Leased and not consumed: prefetched."""

    def consume(self, samples: int) -> None:
        """The next samples of the queue, fewer if there are no more, go into the local parameters."""
        while samples > 0 and self.queue:
            head = self.queue[0]
            cut = min(head.hi, head.lo + samples)
            self.local.append(Stretch(shard=head.shard, lo=head.lo, hi=cut))
            samples -= cut - head.lo
            if cut < head.hi:
                self.queue[0] = Stretch(shard=head.shard, lo=cut, hi=head.hi)
            else:
                del self.queue[0]

    def entered(self, mode: Local) -> None:
        """What a new view makes of it."""
        if mode is Local.RESET:
            self.queue.clear()
        if mode is not Local.KEEP:
            self.local.clear()

    @property
    def consumed(self) -> int:
        return sum(map(len, self.local))


def pieces(braids: Iterable[Braid]) -> Pieces:
    """The same samples in the same order, in as few stretches as possible."""
    return joined(Stretch(shard=shard, lo=at, hi=at + 1) for shard, at in in_turn(braids))


def joined(pieces: Iterable[Stretch]) -> Pieces:
    """The same samples in the same order, in as few stretches as possible."""
    found: list[Stretch] = []
    for piece in pieces:
        if found and found[-1].shard == piece.shard and found[-1].hi == piece.lo:
            found[-1] = Stretch(shard=piece.shard, lo=found[-1].lo, hi=piece.hi)
        else:
            found.append(piece)
    return tuple(found)


def skipped_more(before: Ledger, after: Ledger) -> bool:
    """Of the same epoch."""
    return after.progress()[1] > before.progress()[1]


def among_voters(view: View) -> View:
    """The view as far as work goes: a learner is assigned nothing."""
    if not view.learners:
        return view
    pairs = zip(view.members, view.payloads, strict=True)
    return replace(
        view,
        members=view.voters,
        payloads=tuple(payload for member, payload in pairs if member in view.voters),
    )


class Host:
    """See the module's docstring. The world calls it; it calls nobody."""

    def __init__(self, peer_id: str, model: Model, shards: int) -> None:
        self.peer_id = peer_id
        self.shards = shards
        self.boot = 1
        self._member = MemberId(peer_id=peer_id, boot=1)
        self.last_version = (0, 0)
        """(boot, promise version) at its last death."""
        self.clock_ms = 0
        """Its monotonic clock is ahead of the world's by this."""
        self.wall_ms = 0
        self.asleep = False
        """SIGSTOP: neither agent nor trainer does anything."""
        self.holdings = set(range(shards))
        self.reachable: frozenset[int] = frozenset()
        """Shards that somebody it reaches has on disk, itself included."""
        self.full = False
        self.speed = 0
        # on disk
        self.disk = Promises()
        self.closed = False
        self.told = True
        """It tells how new its promises are with each sign of life: once it has opened a closed run again, not until
        it has promised more. Its end is a death only until then, for it will be the same member at its next start."""
        self.checkpoint: Model | None = None
        self.first = model
        """What its trainer starts with when there is nothing else."""
        # in shared memory, which an agent's death leaves behind
        self.memory: Model | None = None
        self.reset()

    def reset(self) -> None:
        """The agent is gone, with all it knew."""
        self.core: Agreement | None = None
        self.outcome = ""
        self.trainer: Trainer | None = None
        self.held = self.first
        self.models: dict[bytes, Model] = {}
        self.committed: Model | None = None
        self.stood_in = 0
        self.in_flight: InFlight | None = None
        self.carried = NOTHING
        self.strikes: list[Strike] = []
        self.counted_keys: tuple[tuple[str, int, int], ...] = ()
        self.in_ledger: set[tuple[str, int, int]] = set()
        self.deaths = 0
        self.stop_asked = False
        self.word: Closed | None = None
        """What it says once it has stopped with the run; its process stays for a while."""
        self.roll: tuple[str, ...] = ()
        """The other voters of the view in which it has stopped."""
        self.closings: dict[str, Closed] = {}
        """What each other one said last of having stopped."""
        self.completing = False
        """The core is told of a round: a view that this brings about opens afterwards."""
        self.armed: int | None = None
        """It dies the next time it promises something, having said only so many words."""
        self.heard: dict[str, tuple[int, int, int]] = {}
        """Of each other one: (boot, when it was last heard on this host's clock, its promise version or `UNTOLD`)."""
        self.verdicts: dict[str, tuple[int, Verdict]] = {}
        self.view: View | None = None
        self.early: dict[MemberId, Header] = {}
        """Headers of a view that does not stand here yet, the last of each sender."""
        self.leave_view()

    def leave_view(self) -> None:
        self.opened = False
        self.work: Work | None = None
        self.paces: tuple[Pace, ...] = ()
        """Of the view's voters."""
        self.ledger: Ledger | None = None
        self.said: dict[int, dict[MemberId, Header]] = {}
        """Headers of this view, per round."""
        self.round = 0
        self.last_own: Header | None = None
        """Of the round before: said again to a member that missed it."""
        self.reducing: Collective | None = None
        self.failed = False
        """The group is dropped: no reduction ends well here any more in this view."""
        self.stale = False
        self.kept: dict[int, Model] = {}
        self.download = DOWNLOAD_STEPS
        self.pinned: Model | None = None
        """What a learner downloads: the start, or a newer state when it kept too few rounds since."""

    @property
    def member(self) -> MemberId:
        if self._member.boot != self.boot:
            self._member = MemberId(peer_id=self.peer_id, boot=self.boot)
        return self._member

    @property
    def up(self) -> bool:
        """Whether its agent does anything."""
        return self.core is not None and not self.asleep

    @property
    def training(self) -> bool:
        """Whether rounds can be had here: the view stands, its state is held, there is a trainer."""
        core = self.core
        if core is None or core.frozen or self.asleep or self.outcome:
            return False
        return self.opened or (core.view is self.view and self.learning)

    @property
    def learning(self) -> bool:
        view = self.view
        return view is not None and self.member not in view.voters

    @property
    def unheard(self) -> tuple[str, ...]:
        """The voters that it has not heard to have stopped in its view at its state."""
        word = self.word
        if word is None:
            return self.roll
        at = word.ref, word.view_id
        said = {peer: (closed.ref, closed.view_id) for peer, closed in self.closings.items()}
        return tuple(peer for peer in self.roll if not word.view_id or said.get(peer) != at)

    # -- what a proposal says --------------------------------------------------------------------

    def hand(self) -> Hand:
        """What its trainer has in hand, or had when the last view ended that it trained in."""
        if self.work is not None and self.ledger is not None:
            return Hand(self.ledger.epoch, self.ledger.part, self.work.claims())
        return self.carried if self.stood_in else NOTHING

    def claims(self) -> tuple[Braid, ...]:
        return self.hand().braids

    def payload(self, reachable: frozenset[int]) -> bytes:
        hand = self.hand()
        return encode_payload(
            ProposalPayload(
                view_epoch=self.stood_in,
                epoch=hand.epoch,
                part=hand.part,
                claims=plain(hand.braids),
                holdings=bitmap(self.holdings, self.shards),
                reachable=bitmap(reachable, self.shards),
                speed=self.speed,
                full=self.full,
                strikes=tuple(self.strikes),
                counted=self.counted_keys,
            )
        )

    # -- a view ----------------------------------------------------------------------------------

    def installed(self, view: View) -> None:
        """A view stands; its state may have to be fetched first."""
        payloads = [decode_payload(p) for p in view.payloads]
        mine = payloads[view.members.index(self.member)]
        honoured = mine.view_epoch == max(p.view_epoch for p in payloads)
        self.stood_in = view.view_epoch if honoured and self.stood_in else 0
        self.carried = self.hand()
        self.view = view
        self.leave_view()
        self.round = view.start.lineage[1] + 1
        for member, header in self.early.items():
            if header.view_id == view.view_id and header.round <= self.round + 1:
                self.said.setdefault(header.round, {})[member] = header
        self.early.clear()

    def left_out(self) -> None:
        """A later view stands without this peer: its claims are dead."""
        self.leave_view()
        self.view, self.stood_in, self.carried = None, 0, NOTHING

    def open_view(self, view: View, start: Model, *, skip_lost: bool) -> None:
        """The start state is held: assign the work, tell the trainer what becomes of its parameters."""
        trainer = self.trainer
        assert trainer is not None, "a view without a trainer"
        self.hold(start)
        self.opened = True
        if self.learning:
            self.ledger = start.ledger
            trainer.entered(Local.RESET)
            trainer.base, self.in_flight = None, None
            return
        payloads = [decode_payload(p) for p in view.payloads]
        ledger = opening_ledger(payloads, start.ledger, skip_lost=skip_lost)
        place = view.members.index(self.member)
        mode = local_mode(
            view.start,
            honoured=self.stood_in > 0 and not gave_up_claims(payloads, voters_of(view), place, ledger),
            base=trainer.base,
            counted=in_start(self.in_flight, view.start, payloads[place], start.ledger),
        )
        me = view.voters.index(self.member)
        work = Work.for_view(among_voters(view), me, ledger, keep_leases=mode is not Local.RESET)
        trainer.entered(mode)
        require(
            5,
            pieces(work.claims()) == joined((*trainer.local, *trainer.queue)),
            "{} claims {} in view {}, but its trainer has {} in its parameters and {} in hand",
            self.peer_id,
            work.claims(),
            view.view_epoch,
            trainer.local,
            trainer.queue,
        )
        self.work, self.ledger = work, ledger
        self.paces = tuple(Pace(before=decode_payload(p).speed) for p in among_voters(view).payloads)
        self.stood_in, trainer.base, self.in_flight = view.view_epoch, start.ref, None
        self.in_ledger = {s.key for p in payloads for s in p.strikes}

    def hold(self, model: Model) -> None:
        """The newest state; the one before it is still served, and the view's start."""
        before = self.held
        self.models[model.ref.digest] = model
        self.held = model
        if len(self.models) > 4:
            keep = {model.ref.digest, before.ref.digest}
            if self.view is not None:
                keep.add(self.view.start.digest)
            self.models = {digest: kept for digest, kept in self.models.items() if digest in keep}
        if self.memory is not None:
            self.memory = model

    # -- a round ---------------------------------------------------------------------------------

    def own(self) -> Header | None:
        said = self.said.get(self.round)
        return said.get(self.member) if said is not None else None

    def header(self, *, samples: int, finite: bool = True, final: bool = False) -> Header:
        view, core = self.view, self.core
        assert view is not None and core is not None
        return Header(
            view_id=view.view_id,
            view_epoch=view.view_epoch,
            round=self.round,
            digest=self.held.ref.digest if self.opened else b"",
            samples=samples,
            finite=finite,
            change=core.change_wanted,
            closing=self.stop_asked,
            final=final,
            compute_us=samples * 1_000_000 // self.speed if self.speed else 1_000 * (1 + samples),
            loss_micro=samples * (1_000_000 + 7 * self.held.ref.lineage[1] % 13) // (1 + self.held.depth),
        )

    def step(self, samples: int, prefetch: int) -> None:
        """The trainer's local steps: lease what it lacks, consume, have something prefetched."""
        trainer, work = self.trainer, self.work
        if trainer is None or work is None or self.stale:
            return
        lacking = samples + prefetch - sum(map(len, trainer.queue))
        if lacking > 0:
            trainer.queue += pieces(work.lease(lacking))
        trainer.consume(samples)

    def barrier(self) -> tuple[Header, ...] | None:
        """The voters' headers of the current round in ring order, once all members' are here."""
        view, said = self.view, self.said.get(self.round)
        if view is None or said is None or any(member not in said for member in view.members):
            return None
        return tuple(said[voter] for voter in view.voters)

    def outcome_of(self, collective: Collective | None) -> Model:
        """The state after the round, from this member's own knowledge. Everything before it is recorded is pure."""
        view, work, ledger, headers = self.view, self.work, self.ledger, self.barrier()
        assert view is not None and work is not None and ledger is not None and headers is not None
        weights = [header.samples if header.finite else 0 for header in headers]
        counted = tuple(pieces(work.next_of(i, weight)) for i, weight in enumerate(weights))
        contributions: tuple[Pieces, ...] = ((),) * len(weights)
        if collective is not None:
            contributions = tuple(joined(collective.contributions[voter]) for voter in view.voters)
            require(6, collective.divisor == sum(weights), "divided by {} of {}", weights, contributions)
        for i, said in enumerate(contributions):
            require(
                12,
                said == counted[i],
                "round {} counts {} of {}, but its delta is made of {}",
                (view.view_epoch, self.round),
                counted[i],
                view.voters[i].peer_id,
                said,
            )
        try:
            after = ledger.advance([s for part in counted for s in part])
        except ValueError as error:
            require(12, False, "round {}: {}", (view.view_epoch, self.round), error)
            raise
        for i, header in enumerate(headers):
            for stretch in () if header.finite else unordered(work.next_of(i, header.samples)):
                after = after.strike(stretch) if after.epoch == ledger.epoch else after
        if after.epoch == ledger.epoch and not skipped_more(ledger, after):
            after = after.shared_anew() if self.shared_anew(headers) is not None else after
        return after_round(
            self.held,
            (view.view_epoch, self.round),
            anchor_after(self.held.anchor, contributions, (view.view_epoch, self.round)),
            after,
            tuple(header.facts() for header in headers),
            counted,
            ledger.epoch,
            tuple(voter.peer_id for voter in view.voters),
        )

    def paces_after(self, headers: tuple[Header, ...]) -> tuple[Pace, ...]:
        said = zip(self.paces, headers, strict=True)
        return tuple(pace.after(header.samples, 1, header.compute_us) for pace, header in said)

    def shared_anew(self, headers: tuple[Header, ...]) -> Work | None:
        """The rest of the epoch, if it is shared out anew after the round with these headers."""
        work, view = self.work, self.view
        assert work is not None and view is not None
        weights = [header.samples if header.finite else 0 for header in headers]
        drop = not headers[work.me].finite
        return work.rebalanced(among_voters(view), weights, self.paces_after(headers), drop_leases=drop)

    def completed(self, model: Model) -> None:
        """The core has recorded the round: everything local moves on."""
        view, work, trainer, headers = self.view, self.work, self.trainer, self.barrier()
        assert view is not None and work is not None and trainer is not None and headers is not None
        before, mine = self.ledger, headers[work.me]
        assert before is not None
        self.hold(model)
        trainer.base = model.ref
        self.strikes = [s for s in self.strikes if s.key not in self.in_ledger]
        self.counted_keys = (*self.counted_keys, *sorted(self.in_ledger.difference(self.counted_keys)))[-64:]
        if model.ledger.epoch != before.epoch and not model.ledger.done:
            speeds = [pace.speed for pace in self.paces_after(headers)]
            self.work = Work.for_epoch(among_voters(view), work.me, model.ledger, speeds)
            trainer.queue.clear()
        elif (model.ledger.epoch, model.ledger.part) == (before.epoch, before.part + 1):
            self.work = self.shared_anew(headers)
            assert self.work is not None
            if self.work.leased < sum(map(len, trainer.queue)):
                trainer.queue.clear()
        elif not model.ledger.done:
            work.advance([header.samples if header.finite else 0 for header in headers])
            if not mine.finite:
                work.drop_leases()
                trainer.queue.clear()
        trainer.local.clear()
        self.paces = self.paces_after(headers)
        self.stale = model.ledger.epoch == before.epoch and skipped_more(before, model.ledger)
        self.ledger = model.ledger
        self.in_flight = None
        self.next_round()

    def next_round(self) -> None:
        self.last_own = self.own()
        self.said.pop(self.round, None)
        self.round += 1
        self.reducing = None

    def lose_trainer(self, *, in_hand: bool) -> None:
        """The trainer died; what it had in hand may have killed it. The claims die with it."""
        claims = self.claims()
        if in_hand and claims:
            self.deaths += 1
            self.strikes.append(
                Strike(
                    victim=f"{self.peer_id}:{self.boot}",
                    view_epoch=self.stood_in,
                    death=self.deaths,
                    epoch=self.hand().epoch,
                    stretches=tuple((s.shard, s.lo, s.hi) for s in unordered(claims)),
                )
            )
        self.trainer = None
        self.leave_view()
        self.view = None
        self.stood_in, self.in_flight, self.carried = 0, None, NOTHING

    def learn_strikes(self, strikes: tuple[Strike, ...]) -> None:
        known = {s.key for s in self.strikes}.union(self.counted_keys)
        self.strikes += [s for s in strikes if s.key not in known][: 64 - len(self.strikes)]
