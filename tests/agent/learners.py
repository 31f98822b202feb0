"""Voters and a learner of one run, made by hand: what the learner must come to hold is computed beside it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from p2p_dmc.agent.barrier import BarrierResult
from p2p_dmc.agent.bulk import BulkClient, SourceLostError
from p2p_dmc.agent.catch_up import CatchUp, Kept
from p2p_dmc.agent.state import Held, file_digest
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.agent.training import Measured, Training
from p2p_dmc.agent.work import Work, decode_payload, opening_ledger
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.adacomm import TauPolicy
from p2p_dmc.core.agreement_messages import Promises, View
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.core.outer import AVERAGE, OuterPolicy
from p2p_dmc.train import state as arithmetic
from p2p_dmc.train.outer import advance
from p2p_dmc.wire.messages import BulkKind, BulkRequest, RoundHeader
from p2p_dmc.wire.trainer_messages import Reduce, RoundReady, RoundResult
from tests.agent.helpers import (
    DATASET,
    NUMEL,
    PARAMETERS,
    header_like,
    member,
    payload,
    state,
    surroundings,
    view_of,
)
from tests.agent.test_state import balanced
from tests.agent.test_training import ALL, SPEC, Host

ADACOMM = TauPolicy(kind="adacomm", tau0=4)
CHUNK_BYTES = 8
"""So a state of 28 bytes has several ranges."""


class Voters:
    """Peer 1 is a voter with everything that its agent has; peer 2's part is said for it. Peer ``learner`` learns."""

    def __init__(
        self,
        root: Path,
        rng: random.Random,
        learner: int = 3,
        epochs: int = 2,
        outer: OuterPolicy = AVERAGE,
    ) -> None:
        self.rng = rng
        self.keeper = StateKeeper("r", root / "run1", surroundings(root, me=1).services, Promises())
        self.keeper.open(PARAMETERS, outer)
        self.host = Host(self.keeper)
        self.learner = member(learner)
        self._voters = [i for i in (1, 2, 3) if i != learner][:2]
        self._me = member(self._voters[0])
        self._other = member(self._voters[1])
        self.view_epoch = 0
        self.states: dict[tuple[int, int], tuple[Held, bytes]] = {}
        ledger = Ledger.start(DATASET, [10, 10, 10, 10], 1, epochs)
        self.keeper.hold(state(self.keeper.pool(), (0, 0), 0.0, ledger))
        self.next_view()

    @property
    def held(self) -> Held:
        held = self.keeper.current
        assert held is not None
        return held

    @property
    def done(self) -> bool:
        return self.held.ledger.done

    def next_view(self) -> View:
        """The voters and the learner agree on another one, from what the voters hold."""
        self.view_epoch += 1
        self.host.calls.clear()
        made = view_of(
            [payload(ALL)] * 3, view_epoch=self.view_epoch, members=(1, 2, 3), learners=(self.number(),)
        )
        view = replace(made, start=self.held.ref, holders=made.voters, view_id=bytes([self.view_epoch]) * 16)
        payloads = [decode_payload(p) for p in view.payloads]
        opened = opening_ledger(payloads, self.held.ledger, skip_lost=False)
        me = view.members.index(self._me)
        self.training = Training(
            host=self.host,
            view=view,
            me=self._me,
            held=self.held,
            ledger=opened,
            work=Work.for_view(view, me, opened, keep_leases=False),
            policy=ADACOMM,
            payload_spec=SPEC,
            measured=Measured(),
            keeper=self.keeper,
        )
        self.view = view
        self.keeper.expect_request(view.start.digest)
        self._note()
        return view

    def number(self) -> int:
        return int(self.learner.peer_id, 16)

    def _note(self) -> None:
        self.states[self.held.ref.lineage] = (self.held, self.held.slot.read_bytes())

    # -- a round ------------------------------------------------------------------------------------------------------

    def round(self, learner: StateKeeper, weights: tuple[int, int] | None = None) -> Kept | None:
        """One round of all three; what the learner keeps of it. None when the voters want another view instead."""
        result = self._headers(weights)
        training, number = self.training, self.training.barrier.round
        for member_id, header in zip(self.view.members, result.headers, strict=True):
            if member_id != self._me:
                training.header(member_id.peer_id, header)
        if ("change",) in self.host.calls:
            return None
        mean = None
        if any(result.weights):
            mean = self._reduce(result, learner)
        assert training.barrier.round == number + 1, "the round is not complete"
        self._note()
        return Kept(view=self.view, round=number, result=result, mean=mean)

    def _headers(self, weights: tuple[int, int] | None) -> BarrierResult:
        rng, training = self.rng, self.training
        work = training.work
        samples = {}
        for i, voter in enumerate(self._voters):
            index = self.view.members.index(member(voter))
            left = work.assignment.length(index) - work.cursors[index]
            wanted = rng.choice((0, 1, 3, 9)) if weights is None else weights[i]
            samples[voter] = min(left, wanted)
        mine, other = (samples[voter] for voter in self._voters)
        training.lease(mine)
        mine = min(mine, work.leased - work.cursors[work.me]) if mine else 0
        training.round_ready(
            RoundReady(
                view_epoch=self.view.view_epoch,
                round=training.barrier.round,
                samples=mine,
                steps=rng.randrange(1, 5),
                loss_sum_micro=rng.randrange(1, 5_000_000) * mine,
                compute_us=rng.randrange(1, 2_000_000),
                finite=weights is not None or rng.random() > 0.1,
            )
        )
        own = training.barrier.own
        assert own is not None
        said: dict[str, RoundHeader] = {self._me.peer_id: own}
        said[self._other.peer_id] = header_like(
            own,
            samples=other,
            steps=rng.randrange(1, 5),
            loss_sum_micro=rng.randrange(1, 5_000_000) * other,
            compute_us=rng.randrange(1, 2_000_000),
            comm_us=rng.randrange(1, 90_000),
            finite=weights is not None or rng.random() > 0.1,
        )
        said[self.learner.peer_id] = header_like(own, samples=0, steps=0, digest=bytes(16), finite=True)
        headers = tuple(said[m.peer_id] for m in self.view.members)
        return BarrierResult(headers=headers, voting=tuple(m in self.view.voters for m in self.view.members))

    def _reduce(self, result: BarrierResult, learner: StateKeeper) -> Path:
        """What the trainers do: the voter averages, the learner writes the mean into its scratch slot."""
        order = self.host.trainer[-1]
        assert isinstance(order, Reduce), order
        exponents = [self.rng.uniform(-30, 30) for _ in range(NUMEL)]
        reduced = torch.tensor([self.rng.choice((-1, 1)) * 2**e for e in exponents], dtype=torch.float32)
        anchor = torch.from_numpy(np.fromfile(self.held.slot, dtype="<f4"))
        slot = arithmetic.open_slot(str(learner.scratch()), anchor.numel())
        arithmetic.mean(reduced, order.divisor, out=slot[:NUMEL])
        candidate = arithmetic.open_slot(order.slot_path, anchor.numel())
        advance(anchor, reduced, order.divisor, order.outer, out=candidate)
        self.training.round_result(
            RoundResult(
                view_epoch=order.view_epoch,
                round=order.round,
                digest=file_digest(Path(order.slot_path)),
                comm_us=1000,
                bytes_sent=0,
                bytes_received=0,
            )
        )
        return learner.take_scratch()


class Donors:
    """The bulk client of a learner: answers from a voter's memory, when and how a test likes."""

    def __init__(self, keeper: StateKeeper) -> None:
        self._keeper = keeper
        self.open = asyncio.Event()
        self.open.set()
        self.asked: list[tuple[str, int, int]] = []
        self.liars: set[str] = set()
        self.gone: set[str] = set()

    async def fetch(
        self, address: str, kind: BulkKind, *, digest: bytes, name: str, part: int, offset: int, size: int
    ) -> tuple[int, bytes]:
        self.asked.append((address, part, offset))
        await self.open.wait()
        await asyncio.sleep(0)
        request = BulkRequest(
            request=1, kind=kind, name=name, digest=digest, part=part, offset=offset, size=size
        )
        found = self._keeper.provide(request)
        if address in self.gone or found is None:
            raise SourceLostError(f"{address} does not have it")
        total, data = found[0], bytes(found[1])
        if address in self.liars and part == 1:
            data = bytes(one ^ 1 for one in data)
        return total, data


class Learner:
    """A learner's catch-up, and what it told. ``enters``: at once, else when the test says so."""

    def __init__(self, root: Path, voters: Voters, *, enters: bool = True) -> None:
        self.voters = voters
        self.donors = Donors(voters.keeper)
        around = surroundings(
            root,
            me=voters.number() + 10,
            bulk=cast(BulkClient, self.donors),
            settings=AgentSettings(fetch_chunk_bytes=CHUNK_BYTES),
        )
        self.keeper = StateKeeper("r", root / "learner", around.services, Promises())
        self.keeper.open(PARAMETERS, voters.keeper.outer)
        self.told: list[Held] = []
        self.problems: list[str] = []
        self.hopeless: list[str] = []
        self.addresses = ["one", "two"]
        self.takes = True
        """Whether the run takes what it is told."""
        self.catch_up = CatchUp(
            self.keeper,
            voters.learner,
            ADACOMM,
            skip_lost=False,
            donors=lambda: self.addresses,
            on_held=self._held,
            on_problem=self.problems.append,
            on_hopeless=self.hopeless.append,
        )
        if enters:
            self.catch_up.enter(voters.view)
        self.task = asyncio.ensure_future(self.catch_up.run())

    def _held(self, held: Held) -> None:
        """As the run does it: it is current now."""
        self.told.append(held)
        if not self.takes:
            return
        self.keeper.pool().pin(held.slot)
        self.keeper.hold(held)

    def round(self, weights: tuple[int, int] | None = None) -> bool:
        """One round of the view, and the voters' next headers; False when they want another view instead."""
        kept = self.voters.round(self.keeper, weights)
        if kept is not None:
            self.catch_up.keep(kept)
            self.catch_up.heard(kept.lineage, self.voters.held.ref.digest)
        return kept is not None

    def next_view(self) -> None:
        self.catch_up.enter(self.voters.next_view())

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Let the work go on until this is so."""
        for _ in range(4000):
            if condition():
                return
            assert not self.task.done(), self.task
            await asyncio.sleep(0.001)
        raise AssertionError(f"not so: {what}; problems {self.problems}, told {[h.ref for h in self.told]}")

    def is_caught_up(self) -> bool:
        """Whether it holds what the voters hold."""
        return bool(self.told) and self.told[-1].ref == self.voters.held.ref

    async def caught_up(self) -> None:
        """Wait for that."""
        await self.until(self.is_caught_up, "caught up")

    async def end(self) -> None:
        """As the run ends it."""
        self.task.cancel()
        self.catch_up.close()
        await asyncio.gather(self.task, return_exceptions=True)
        for _ in range(2000):  # a thread may have its slots to give back
            if balanced(self.keeper):
                return
            await asyncio.sleep(0.001)

    def check(self) -> None:
        """Every state that was told is the voters', bit for bit, and each is told once, in order."""
        lineages = [held.ref.lineage for held in self.told]
        assert lineages == sorted(lineages)
        for held in self.told:
            theirs, _ = self.voters.states[held.ref.lineage]
            assert (held.ref, held.anchor_digest, held.ledger, held.tau) == (
                theirs.ref, theirs.anchor_digest, theirs.ledger, theirs.tau,
            )  # fmt: skip
        if self.told:
            last = self.told[-1]
            assert last.slot.read_bytes() == self.voters.states[last.ref.lineage][1]
