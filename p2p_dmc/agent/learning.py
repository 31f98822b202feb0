"""A learner's rounds while one view stands: it reduces zeros and keeps what each round did (DESIGN.md section 8)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from p2p_dmc.agent.barrier import Barrier, BarrierResult
from p2p_dmc.agent.catch_up import CatchUp, Kept
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.core.agreement_messages import MemberId, View
from p2p_dmc.core.compression import PLAIN, Compression
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire.messages import RoundHeader
from p2p_dmc.wire.trainer_messages import Reduce, RoundReady, RoundRefused, RoundResult

NO_DIGEST = bytes(16)


class LearningHost(Protocol):
    """What the run does for its learning."""

    def to_trainer(self, message: object) -> None: ...
    def to_member(self, peer_id: str, message: object) -> None: ...
    def change_wanted(self) -> bool: ...
    def proved(self) -> None: ...
    def diverged(self, odd: tuple[MemberId, ...], me: bool) -> None: ...
    def stopped(self) -> None: ...


class Learning:
    """One learner's part in one view. The voters wait for its headers, so it says them without doing anything first."""

    def __init__(
        self,
        host: LearningHost,
        view: View,
        me: MemberId,
        catch_up: CatchUp,
        payload_spec: bytes,
        keeper: StateKeeper,
        compression: Compression = PLAIN,
    ) -> None:
        self.host = host
        self.view = view
        self.catch_up = catch_up
        self.payload_spec = payload_spec
        self.keeper = keeper
        self.compression = compression
        self.barrier = Barrier(view, me)
        self.me = view.members.index(me)
        self.frozen = False
        self.frozen_s = 0.0
        self.proved = False
        """A reduction with this peer went well, or there is none to be had before it votes and trains."""
        self._reducing: BarrierResult | None = None
        self._broken = False
        """The view's group is dropped: nothing more is reduced in it, and the voters may have left it already."""

    def start(self) -> None:
        """The view is open."""
        self._say()

    def _say(self) -> None:
        header = RoundHeader(
            view_epoch=self.view.view_epoch,
            view_id=self.view.view_id,
            round=self.barrier.round,
            digest=NO_DIGEST,
            payload_spec=self.payload_spec,
            samples=0,
            steps=0,
            loss_sum_micro=0,
            compute_us=0,
            comm_us=0,
            wait_us=0,
            bytes_sent=0,
            bytes_received=0,
            finite=True,
            change=self._change(),
            closing=False,
            final=False,
        )
        self.barrier.say(header)
        self._tell(header)
        self.check_barrier()

    def _change(self) -> bool:
        return self.catch_up.lost or self.host.change_wanted()

    def _tell(self, header: RoundHeader, only: tuple[MemberId, ...] | None = None) -> None:
        for i, member in enumerate(self.view.members):
            if i != self.me and (only is None or member in only):
                self.host.to_member(member.peer_id, header)

    def header(self, peer_id: str, header: RoundHeader) -> None:
        """A member's header arrived."""
        repeat = self.barrier.add(peer_id, header)
        if repeat is not None and not self.frozen:
            self.host.to_member(peer_id, repeat)
        if self.frozen or header.view_id != self.view.view_id:
            return
        if any(voter.peer_id == peer_id for voter in self.view.voters):
            self.catch_up.heard((self.view.view_epoch, header.round - 1), header.digest)
            weightless = self._weightless()
            if weightless is not None and header.round == self.barrier.round + 1:
                self._keep(weightless, reduced=False)
                return
        self.check_barrier()

    def _weightless(self) -> BarrierResult | None:
        """Everybody stands at the barrier with nothing to reduce: whether the round counts, the voters' next say."""
        result = self.barrier.result()
        return result if result is not None and not any(result.weights) else None

    def repeat(self) -> None:
        """Time has passed: say my header again to whoever has not answered; the flag may have been raised since."""
        own = self.barrier.own
        if self.frozen or own is None:
            return
        if self._weightless() is not None and own.change != self._change():
            own = replace(own, change=self._change())
            self.barrier.say(own)
            self._tell(own)
        else:
            self._tell(own, self.view.voters if self._broken else self.barrier.missing())

    def check_barrier(self) -> None:
        """Everybody's header is here: reduce with them, or wait for what they make of it."""
        result = self.barrier.result()
        if result is None or self._reducing is not None or self.frozen or self._broken:
            return
        odd = result.odd_ones()
        if odd:
            self.frozen = True
            self.host.diverged(tuple(self.view.members[i] for i in odd), self.me in odd)
        elif result.closing and not result.final:
            self.frozen = True
            self.host.stopped()
        elif not any(result.weights):
            self._prove()  # the data may be here that the others wait for
        elif not result.change:  # else the voters propose, or say what it comes to
            self._reducing = result
            self.catch_up.reducing()
            self.host.to_trainer(
                Reduce(
                    view_epoch=self.view.view_epoch,
                    round=self.barrier.round,
                    weight=0,
                    divisor=sum(result.weights),
                    slot_path=str(self.keeper.scratch()),
                    compress=result.scheme(self.compression),
                )
            )

    def _prove(self) -> None:
        if not self.proved:
            self.proved = True
            self.host.proved()

    def round_ready(self, said: RoundReady) -> None:
        """Of no meaning: this trainer contributes nothing yet."""

    def round_result(self, said: RoundResult) -> None:
        """The averaged delta stands in the scratch slot."""
        result = self._reducing
        if result is None or (said.view_epoch, said.round) != (self.view.view_epoch, self.barrier.round):
            self.host.to_trainer(RoundRefused(view_epoch=said.view_epoch, round=said.round))
        else:
            self._keep(result, reduced=True)

    def _keep(self, result: BarrierResult, *, reduced: bool) -> None:
        self._reducing = None
        if reduced:
            self._prove()
        mean = self.keeper.take_scratch() if reduced else None
        self.catch_up.keep(Kept(view=self.view, round=self.barrier.round, result=result, mean=mean))
        reach("learning")
        self.barrier.next_round()
        self._say()

    @property
    def reducing(self) -> bool:
        """Whether the trainer is reducing."""
        return self._reducing is not None and not self._broken

    def group_failed(self) -> None:
        """Whoever has left the view answers my header with the next one."""
        self._reducing, self._broken = None, True
        self.catch_up.quiet()

    def freeze(self) -> None:
        """From here on this view's rounds are none of this peer's."""
        if not self.frozen:
            self.frozen, self.frozen_s = True, time.monotonic()
            self.catch_up.quiet()
        self._reducing = None
