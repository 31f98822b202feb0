"""Where a run meets the other peers: their headers, requests and farewells (DESIGN.md sections 6 and 7)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from p2p_dmc.agent import run_files
from p2p_dmc.agent.clock import now_ms
from p2p_dmc.agent.entering import others
from p2p_dmc.agent.training import check_header
from p2p_dmc.agent.work import check_payload, decode_strikes, encode_strikes
from p2p_dmc.core.agreement_messages import AgreementMessage, Promised, Propose, Stopped
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire import messages

if TYPE_CHECKING:
    from p2p_dmc.agent.learning import Learning
    from p2p_dmc.agent.run import Run
    from p2p_dmc.agent.training import Training
    from p2p_dmc.core.agreement import Agreement

MAX_EARLY_MESSAGES = 4096
PUT_OFF_S = 1.0
"""A round that is complete elsewhere is given so long to end here."""
PROMISED_AGAIN_S = 10.0
"""A connection that broke may have taken promises with it, and without them this peer's crash would be only a death."""
OFFER_AGAIN_S = 30.0
"""Whoever was offered a state and is not let in with it waits for longer; another one it is offered only then."""


class MemberDesk:
    """One run's messages from and to other peers, apart from agreement's own."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._early_headers: dict[str, messages.RoundHeader] = {}
        self._put_off: list[Stopped | AgreementMessage] = []
        """A farewell of a member that has completed the round which is still being reduced here, and what the others
        make of it: the round comes to its end first. Else this peer would have to fetch the state from them."""
        self._put_off_since_s = 0.0
        self._promised: Promised | None = None
        """Said last, at `_promised_s`."""
        self._promised_s = 0.0
        self._offered: dict[str, tuple[bytes, float]] = {}
        """What each joiner was offered last, and when."""

    def message(self, sender: str, message: object) -> None:
        """One message of another peer for this run; RemoteProtocolError is the caller's to count."""
        run = self._run
        if run.end.agreed and isinstance(message, (messages.RoundHeader, *messages.AGREEMENT_MESSAGES)):
            run.end.tell(sender)  # it has not heard yet
        elif isinstance(message, messages.RoundHeader):
            self._header(sender, message)
        elif isinstance(message, messages.GroupFailed):
            if run.view is not None and message.view_id == run.view.view_id and sender in run.view.peers:
                run.group_failed(f"{sender[:8]}: {message.reason}")
        elif isinstance(message, messages.AGREEMENT_MESSAGES):
            if isinstance(message, Propose):
                data = run.desk.data
                check_payload(message.payload, len(data.mixture) if data is not None else None)
            self._hear_in_turn(message, put_off=bool(self._put_off))
        elif isinstance(message, messages.JoinRequest):
            self._join_request(sender, message)
        elif isinstance(message, messages.StartOffered):
            run.views.offered(sender, message.start)
        elif isinstance(message, messages.JoinRefused):
            if run.rounds is None and run.desk.up:
                run.desk.refuse(message.reason[:500])
        elif isinstance(message, messages.Withdrawn):
            self._withdrawn(sender, message)
        elif isinstance(message, messages.GroupValue):
            run.values.arrived(sender, message, run.to_trainer)
        elif isinstance(message, messages.GroupValueRequest):
            run.values.asked(sender, message)
        elif isinstance(message, messages.StopAsked):
            run.end.ask_stop(message.reason[:200], tell=False)
        elif isinstance(message, messages.RunClosed):
            run.end.closed_elsewhere(sender, message)

    def _header(self, sender: str, header: messages.RoundHeader) -> None:
        """A member may have opened the view before this peer: its header waits here."""
        check_header(header)
        failed = self._run.said_failed
        if failed is not None and failed.view_id == header.view_id:  # it has not heard, or had not yet
            self._run.to_member(sender, failed)
        rounds, agreement = self._run.rounds, self._run.agreement
        if agreement is not None and agreement.view is not None and header.view_id != agreement.view.view_id:
            # whoever of the two is behind learns it
            self._run.act(agreement.foreign_header(sender, header.view_epoch, now_ms()))
        if rounds is not None and header.view_epoch <= rounds.view.view_epoch:
            rounds.header(sender, header)
        elif len(self._early_headers) < MAX_EARLY_MESSAGES:
            self._early_headers[sender] = header

    def hand_over(self, rounds: Training | Learning) -> None:
        """A view has opened here: headers that came before."""
        early, self._early_headers = self._early_headers, {}
        for sender, header in sorted(early.items()):
            rounds.header(sender, header)

    def _join_request(self, sender: str, request: messages.JoinRequest) -> None:
        run = self._run
        if run.end.agreed:
            run.end.tell(sender)
            return
        if run.training is None:
            return
        difference = run_files.first_difference(run.desk.fingerprint, request.fingerprint)
        if difference is not None:
            reason = f"run {run.name!r}: {difference}; use the same, or another --run name"[:500]
            run.to_member(sender, messages.JoinRefused(reason=reason))
            run.event("join_refused", peer_id=sender, reason=reason)
            return
        run.join_requested(sender)
        self._offer_start(sender)

    def _offer_start(self, joiner: str) -> None:
        """It may download the state while it waits, if it is let in at this round's barrier.

        Not once my header is said: a reduction may follow that the download would slow down.
        """
        training = self._run.training
        if training is None or training.frozen or training.barrier.own is not None:
            return
        start, now_s = training.held.ref, time.monotonic()
        digest, since_s = self._offered.get(joiner, (start.digest, now_s))
        if self._run.change_wanted() and (digest == start.digest or now_s - since_s > OFFER_AGAIN_S):
            self._offered = {p: o for p, o in self._offered.items() if now_s - o[1] <= OFFER_AGAIN_S}
            self._offered[joiner] = start.digest, since_s if digest == start.digest else now_s
            self._run.keeper.expect_request(start.digest)
            self._run.to_member(joiner, messages.StartOffered(start=start))

    def _withdrawn(self, sender: str, message: messages.Withdrawn) -> None:
        if message.stopped.member.peer_id != sender:
            raise RemoteProtocolError("a peer withdraws for itself")
        self._run.end.roll.withdrawn(sender)
        self._run.desk.learn_strikes(decode_strikes(message.strikes))
        self._run.event("trainer_lost", peer_id=sender, reason=message.reason[:200])
        training, member = self._run.training, message.stopped.member
        completed = training is not None and message.completed == training.reducing
        if not self._put_off:
            self._put_off_since_s = time.monotonic()
        in_view = training is not None and member in training.view.members
        self._hear_in_turn(message.stopped, put_off=completed and in_view)  # else it breaks the round

    def _hear_in_turn(self, message: Stopped | AgreementMessage, *, put_off: bool) -> None:
        if put_off and len(self._put_off) < MAX_EARLY_MESSAGES:
            self._put_off.append(message)
            reach("put-off")
        else:
            self.hear_put_off(at_once=True)
            self._hear(message)

    def hear_put_off(self, *, at_once: bool = False) -> None:
        """What was put off till the end of a reduction is heard now, if that is over or comes to nothing."""
        if not self._put_off:
            return
        training = self._run.training
        over = training is None or training.reducing is None
        late = time.monotonic() - self._put_off_since_s > PUT_OFF_S
        if at_once or late or over:
            put_off, self._put_off = self._put_off, []
            for message in put_off:
                self._hear(message)

    def _hear(self, message: Stopped | AgreementMessage) -> None:
        run = self._run
        if isinstance(message, Stopped):
            run.withdrawn(message)
        elif run.agreement is not None and not run.end.agreed:
            run.act(run.agreement.receive(message, now_ms()))

    def say(self, sends: Iterable[tuple[str, AgreementMessage]]) -> None:
        """What agreement says to others."""
        run = self._run
        for peer_id, message in sends:
            if isinstance(message, Promised):
                self._promised, self._promised_s = message, time.monotonic()
            run.services.send(peer_id, message, run.name)

    def say_promises_again(self, agreement: Agreement) -> None:
        """Words are repeated until they are answered; promises are not, and nobody knows that it has missed some."""
        said = self._promised
        if said is None or said.version != agreement.promise_version or (view := agreement.view) is None:
            return
        if time.monotonic() - self._promised_s >= PROMISED_AGAIN_S:
            self.say((peer, said) for peer in view.peers if peer != self._run.me.peer_id)
            self._promised_s = time.monotonic()  # alone, too

    def tell_withdrawal(self, stopped: Stopped, reason: str) -> None:
        """This peer no longer takes part: everybody is told, with what it promised."""
        run = self._run
        run.end.roll.gave_up(stopped.n)
        peers = set(run.view.peers) if run.view else set()
        peers |= {p.peer_id for p in others(run.services, run.name)}
        held = run.keeper.current
        said = messages.Withdrawn(
            stopped=stopped,
            reason=reason,
            strikes=encode_strikes(run.desk.strikes),
            completed=held.ref.lineage if held is not None else (0, 0),
        )
        for peer_id in sorted(peers - {run.me.peer_id}):
            run.to_member(peer_id, said)
        run.event("withdrawn", reason=reason)
