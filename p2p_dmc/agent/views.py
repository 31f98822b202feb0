"""What a new view means on this peer: as a voter it trains, as a learner it catches up (DESIGN.md sections 6 and 8)."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from p2p_dmc.agent import run_files
from p2p_dmc.agent.adoption import AdoptionFailedError
from p2p_dmc.agent.catch_up import CatchUp
from p2p_dmc.agent.clock import now_ms
from p2p_dmc.agent.entering import others
from p2p_dmc.agent.learning import Learning
from p2p_dmc.agent.state import Held
from p2p_dmc.agent.training import Training
from p2p_dmc.agent.view_opening import (
    learning_started,
    local_mode,
    report_opening,
    report_view,
    view_started,
)
from p2p_dmc.agent.work import Hand, Work, decode_payload, gave_up_claims, in_start, opening_ledger, voters_of
from p2p_dmc.core.agreement_messages import StateRef, View
from p2p_dmc.errors import UserError
from p2p_dmc.wire.trainer_messages import CancelGroup, Local

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Iterable

    from p2p_dmc.agent.run import Run


SPARE_SLOTS = 2
"""A learner may have kept many rounds' results. A voter has use for so many slots besides those of its states."""
REACH_THEM = "see that the other peers' ports can be reached from here"


class Views:
    """Ends what was going on in one view and begins what goes on in the next."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._carried = Hand(0, 0, ())
        self._trainer_base: StateRef | None = None
        """The state whose anchor the trainer's local parameters come from."""
        self.in_ledger: set[tuple[str, int, int]] = set()
        """Strikes that this view's members brought: the ledger of its first complete round has them."""
        self._catch_up: CatchUp | None = None
        self._catching_up: Task[None] | None = None
        self._offering: tuple[str, ...] = ()
        """Peers that have the state which is offered to this one while it waits to be let in."""
        self._withheld: Held | None = None
        """What this learner holds and does not say yet: it would be made a voter, and perhaps stop the others."""

    # -- the end of one ---------------------------------------------------------------------------------------------

    def frozen(self) -> None:
        """Nothing of the standing view completes any more."""
        rounds = self._run.rounds
        if rounds is not None:
            rounds.freeze()
            self._run.end.round_over()
            self._run.to_trainer(CancelGroup(view_epoch=rounds.view.view_epoch))

    def end(self) -> None:
        """The rounds of the view that stood are over."""
        run = self._run
        if run.training is not None:
            self._carried = self.hand()
        if run.rounds is not None:
            run.rounds.freeze()
        run.training = run.learning = None

    def forget(self) -> None:
        """Whatever this peer had in hand is others' now: it takes no part, or another history's."""
        self.end()
        self._run.end.round_over()
        self.stop_learning()
        self._run.stood_in, self._trainer_base, self._run.in_flight = 0, None, None

    def stop_learning(self) -> None:
        """What a learner has collected is of no use any more."""
        if self._catching_up is not None:
            self._catching_up.cancel()
        if self._catch_up is not None:
            self._catch_up.close()
            self._run.keeper.pool().trim(SPARE_SLOTS)
        self._catch_up = self._catching_up = None

    def hand(self) -> Hand:
        """What the trainer has in hand, or had when the last view ended that it trained in."""
        training = self._run.training
        if training is None:
            return self._carried if self._run.stood_in else Hand(0, 0, ())
        return Hand(training.ledger.epoch, training.ledger.part, training.work.claims())

    def new_trainer(self) -> None:
        """It has done nothing yet."""
        self._trainer_base = None

    def based_on(self, held: Held) -> None:
        """The trainer's parameters come from this state now."""
        self._trainer_base = held.ref

    # -- the beginning of the next ----------------------------------------------------------------------------------

    def installed(self, view: View) -> None:
        """A view stands. Learn in it; or adopt its start state if need be, then open it."""
        run = self._run
        mine = view.members.index(run.me)
        payloads = [decode_payload(p) for p in view.payloads]
        honoured = payloads[mine].view_epoch == max(p.view_epoch for p in payloads)
        votes = run.me in view.voters
        run.stood_in = view.view_epoch if honoured and run.stood_in and votes else 0
        old_training, old_view = run.training, run.view
        old_work = old_training.work if old_training is not None else None
        self.end()
        run.view, run.keeper.history = view, view.history
        run.values.view_changed(view)
        report_view(run, view)
        with contextlib.suppress(OSError):  # a full disk: others know the settings, too
            run_files.save_run(run.folder, fingerprint=[list(pair) for pair in run.desk.fingerprint])
        run.services.meta_changed()
        if votes:
            self.stop_learning()
            run.spawn(self._open(view, old_work, old_view))
        elif run.desk.up:
            self._learn(view)

    def offered(self, sender: str, start: StateRef) -> None:
        """The next view, which lets this peer in, probably starts from this state."""
        run, agreement = self._run, self._run.agreement
        if agreement is None or not run.desk.up or run.end.outcome:
            return
        if not (agreement.frozen or agreement.left_out):
            return  # a view stands, which says where it starts
        if run.unproven:
            return  # it may not be let in for long, and outside a view it would yield to no reduction
        theirs = {p.peer_id: (p.meta.history, p.meta.view_epoch) for p in others(run.services, run.name)}
        if sender in theirs:
            self._offering = tuple(p for p, view in theirs.items() if view == theirs[sender])
            self._catch_up_here().expect(start)

    def _donors(self, view: View) -> list[str]:
        """Bulk addresses of those that hold the view's start state, or adopt it as this peer does."""
        return self._addresses(m.peer_id for m in view.holders if m != self._run.me)

    def _learners_donors(self) -> list[str]:
        learning = self._run.learning
        return self._donors(learning.view) if learning is not None else self._addresses(self._offering)

    def _addresses(self, peers: Iterable[str]) -> list[str]:
        records = map(self._run.services.record, peers)
        return [r.bulk_address for r in records if r is not None]

    async def _open(self, view: View, old_work: Work | None, old_view: View | None) -> None:
        run = self._run
        held = run.keeper.current
        if held is None or held.ref != view.start:
            started_s = time.monotonic()
            try:
                await run.keeper.adopt(view.start, lambda: self._donors(view), give_up_s=60.0)
            except (AdoptionFailedError, UserError, OSError) as error:
                run.event("adoption_failed", reason=str(error))
                if run.view is view and run.agreement is not None and not run.agreement.frozen:
                    # the others stand at the barrier, and in the next view this peer would fail likewise
                    run.desk.refuse(f"{error}; {REACH_THEM}")
                return
            seconds = round(time.monotonic() - started_s, 3)
            run.event("adopted", lineage=list(view.start.lineage), seconds=seconds)
        if run.view is not view or run.agreement is None or run.agreement.frozen or not run.desk.up:
            return
        held = run.keeper.make_current(view.start)
        run.act(run.agreement.adopted(view.start, now_ms()))
        self._train(view, held, old_work, old_view)

    def _train(self, view: View, held: Held, old_work: Work | None, old_view: View | None) -> None:
        run = self._run
        assert run.desk.ready is not None and run.desk.policy is not None, "a view without a ready trainer"
        payloads = [decode_payload(p) for p in view.payloads]
        ledger = opening_ledger(payloads, held.ledger, skip_lost=run.desk.on_lost == "skip")
        me = view.members.index(run.me)
        mode = local_mode(
            view.start,
            honoured=run.stood_in > 0 and not gave_up_claims(payloads, voters_of(view), me, ledger),
            base=self._trainer_base,
            counted=in_start(run.in_flight, view.start, payloads[me], held.ledger),
        )
        work = Work.for_view(view, me, ledger, keep_leases=mode != Local.RESET)
        if view.learners:
            run.keeper.expect_request(view.start.digest)
            run.spawn(run.keeper.pool().prepare(1))  # the start stays where it is, and rounds go on
        run.training = Training(
            host=run,
            view=view,
            me=run.me,
            held=held,
            ledger=ledger,
            work=work,
            policy=run.desk.policy,
            payload_spec=run_files.payload_spec(run.desk.ready.parameters, run.desk.ready.compress),
            measured=run.measured,
            keeper=run.keeper,
            compression=run.desk.compression,
        )
        run.stood_in, self._trainer_base, run.in_flight = view.view_epoch, held.ref, None
        self.in_ledger = {s.key for p in payloads for s in p.strikes}
        report_opening(run, view, ledger, work, old_work, old_view)
        run.parked = False
        run.services.meta_changed()
        run.to_trainer(view_started(run, run.training, mode))
        run.values.flush(run.to_trainer)
        run.training.start()
        run.members.hand_over(run.training)
        run.serve_early_lease()

    def _learn(self, view: View) -> None:
        run = self._run
        assert run.desk.ready is not None, "a view without a ready trainer"
        spec = run_files.payload_spec(run.desk.ready.parameters, run.desk.ready.compress)
        catch_up = self._catch_up_here()
        self._withheld = None
        run.learning = Learning(run, view, run.me, catch_up, spec, run.keeper, run.desk.compression)
        catch_up.enter(view)
        run.to_trainer(learning_started(run, view))
        run.values.flush(run.to_trainer)
        run.learning.start()
        run.members.hand_over(run.learning)

    def _catch_up_here(self) -> CatchUp:
        """This learner's; it has begun with the first one who asks for it."""
        run = self._run
        if self._catch_up is None:
            assert run.desk.policy is not None, "only a ready trainer learns"
            self._catch_up = CatchUp(
                run.keeper,
                run.me,
                run.desk.policy,
                skip_lost=run.desk.on_lost == "skip",
                donors=self._learners_donors,
                on_held=self._caught_up,
                on_problem=lambda reason: run.event("adoption_failed", reason=reason),
                on_hopeless=lambda reason: run.desk.refuse(f"{reason}; {REACH_THEM}"),
            )
            self._catching_up = run.spawn(self._catch_up.run())
        return self._catch_up

    def proved(self) -> None:
        """This learner can be reduced with."""
        held, self._withheld = self._withheld, None
        if held is not None:
            self._caught_up(held)

    def _caught_up(self, held: Held) -> None:
        """A state that the voters have, too, is held: the first one is adopted, each later one is one round more."""
        run, agreement, catch_up = self._run, self._run.agreement, self._catch_up
        if agreement is None or catch_up is None or run.learning is None or agreement.frozen:
            return  # the next view's start confirms it, or nothing does
        if not run.learning.proved:
            self._withheld = held
            return
        was_behind = agreement.behind
        if was_behind:
            ready = agreement.adopted(held.ref, now_ms())
        else:
            ready = agreement.complete(held.ref, now_ms())
        if run.act(ready).accepted:
            run.keeper.pool().pin(held.slot)
            run.keeper.hold(held)
        if was_behind and ready.accepted:
            seconds = round(time.monotonic() - catch_up.began_s, 3)
            run.event("adopted", lineage=list(held.ref.lineage), seconds=seconds)
            run.learning.repeat()
