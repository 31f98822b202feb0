"""Where a run meets its trainer: what it trains, its initial state, what it had in hand at its death."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from p2p_dmc.agent import run_files
from p2p_dmc.agent.entering import others
from p2p_dmc.agent.run_data import RunData
from p2p_dmc.agent.work import MAX_STRIKES, Strike, encode_strikes
from p2p_dmc.core import adacomm
from p2p_dmc.core.adacomm import TauPolicy
from p2p_dmc.core.braids import unordered
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.core.outer import parse
from p2p_dmc.data.mixture import mixture_of
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire import trainer_messages as local

if TYPE_CHECKING:
    from p2p_dmc.agent.run import Run

MAX_BYTES = 1 << 17
"""Of all strikes together: they have to fit this peer's next proposal."""


class TrainerDesk:
    """One run's trainer, as far as it is not about rounds. It may come, die and come again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._send: Callable[[object], None] | None = None
        self.ready: local.RunReady | None = None
        self.data: RunData | None = None
        """Of what it trains on, as far as it is on this peer; there once ``ready`` is."""
        self.policy: TauPolicy | None = None
        self.fingerprint: run_files.Fingerprint = ()
        self.quorum, self.backend, self.on_lost = "", "", ""
        self.up = False
        """The trainer waits for a view, or trains in one."""
        self.strikes: list[Strike] = []
        """Known to this peer and not yet in the ledger."""
        self.counted: tuple[tuple[str, int, int], ...] = ()
        """Keys of the last ones that the ledger got: their victim, who was not there, brings them once more."""
        self._deaths = 0
        self._initial_slot: Path | None = None

    def connected(self, send: Callable[[object], None]) -> None:
        """A trainer has said hello; ``send`` reaches it."""
        self._send = send

    def send(self, message: object) -> None:
        """To the trainer, if there is one."""
        if self._send is not None:
            self._send(message)

    def run_ready(self, ready: local.RunReady) -> None:
        """Model, optimizer and loader exist: compare the run's settings, find or ask for a state."""
        run = self._run
        try:
            mixture = mixture_of(ready.parts or ((ready.dataset, 1),), run.services.data.manifest)
        except UserError as error:
            self.refuse(str(error))
            return
        if mixture.digest != ready.dataset:
            raise RemoteProtocolError("a mixture of another digest than the trainer says")
        try:
            outer = parse(ready.outer)
        except ValueError as error:
            raise RemoteProtocolError(str(error)) from None
        stored = tuple((str(a), str(b)) for a, b in run_files.load_run(run.folder).get("fingerprint", ()))
        self._settle(dict(stored))
        parts = run_files.KnownPart.all_of(mixture)
        pairs = run_files.fingerprint(ready, mixture.name, self.quorum, self.backend, self.on_lost, parts)
        difference = run_files.first_difference(stored, pairs) if stored else None
        if difference is not None:
            self.refuse(f"run {run.name!r}: {difference}; use the same, or another --run name")
            return
        self.data, self.ready, self.fingerprint = RunData(run.services.data, mixture), ready, pairs
        self.policy = TauPolicy.from_bytes(ready.tau_policy)
        if run.keeper.slots is None:
            run.keeper.open(ready.parameters, outer)
        if run.keeper.current is not None:
            self._ready_to_train()
        else:
            self._initial_slot = run.keeper.pool().take()
            self.send(local.WriteInitial(slot_path=str(self._initial_slot)))

    def _settle(self, stored: dict[str, str]) -> None:
        """Settings that the command left open are the run's: as this home knows it, or as others say."""
        run = self._run
        metas = [p.meta for p in others(run.services, run.name) if p.meta.history]
        said = metas[0] if metas else None

        def settle(option: str, setting: str, run_says: str, default: str) -> str:
            return option or stored.get(setting, "") or run_says or default

        options = run.options
        self.quorum = settle(options.quorum, "quorum", said.quorum if said else "", "majority")
        self.backend = settle(options.backend, "backend", said.backend if said else "", "auto")
        self.on_lost = settle(options.on_lost, "lost shards", said.on_lost if said else "", "wait")

    def initial_written(self, message: local.InitialWritten) -> None:
        """The trainer's own initial parameters: the run's, if it is founded and this peer is first in the ring."""
        keeper = self._run.keeper
        if keeper.current is None and self._initial_slot and self.data and self.ready and self.policy:
            mixture = self.data.mixture
            ledger = Ledger.start(mixture.digest, mixture.sample_counts, self.ready.seed, self.ready.epochs)
            keeper.found(self._initial_slot, message.digest, ledger, adacomm.start(self.policy))
        self._ready_to_train()

    def _ready_to_train(self) -> None:
        held, end = self._run.keeper.current, self._run.end
        if held is not None and end.outcome == "finished":
            end.tell_trainer(held, end.detail)
        elif held is not None and not end.outcome:
            self.up = True
            self._run.trainer_ready()

    def refuse(self, reason: str) -> None:
        """The trainer ends with this one line; the peer leaves the run, and nobody waits for it at a barrier."""
        self.send(local.TrainerRefused(reason=reason))
        self._run.event("refused", reason=reason)
        self.up = False
        self._run.withdraw(reason)
        self._run.end.over("refused", reason)

    def lost(self, reason: str, *, in_hand: bool) -> None:
        """The trainer is gone, which somebody saw: no time-out is spent on it. ``in_hand``: perhaps of a sample."""
        self._send = None
        if not self.up:
            return
        self.up = False
        hand = self._run.views.hand()
        if in_hand and hand.braids:
            self._deaths += 1
            self.strikes.append(
                Strike(
                    victim=f"{self._run.me.peer_id}:{self._run.services.boot}",
                    view_epoch=self._run.stood_in,
                    death=self._deaths,
                    epoch=hand.epoch,
                    stretches=tuple((s.shard, s.lo, s.hi) for s in unordered(hand.braids)),
                )
            )
            while len(self.strikes) > MAX_STRIKES or len(encode_strikes(self.strikes)) > MAX_BYTES:
                self.strikes.pop(0)
        self._run.withdraw(reason)

    def learn_strikes(self, strikes: tuple[Strike, ...]) -> None:
        """What another peer's trainer had in hand when it died."""
        known = {s.key for s in self.strikes}.union(self.counted)
        for strike in strikes:
            told = [*self.strikes, strike]
            if (
                strike.key not in known
                and len(told) <= MAX_STRIKES
                and len(encode_strikes(told)) <= MAX_BYTES
            ):
                self.strikes = told
                known.add(strike.key)

    def forget_strikes(self, counted: set[tuple[str, int, int]]) -> None:
        """The ledger has these now."""
        self.strikes = [s for s in self.strikes if s.key not in counted]
        self.counted = (*self.counted, *sorted(counted.difference(self.counted)))[-MAX_STRIKES:]
