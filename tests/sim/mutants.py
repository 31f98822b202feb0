"""Agreement, or what claims are honoured, with one rule left out: the tests have to see it missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from p2p_dmc.agent import work
from p2p_dmc.core import agreement_machine, quorum
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_attempt import Attempt, PeerBook
from p2p_dmc.core.agreement_machine import AgreementMachine
from tests.sim import host


def _quorum(name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(quorum, name, value)


def _method(owner: type, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, value)


def _no_joint(words: Any, records: Any, passed: Any, top: Any) -> list[Any]:
    return sorted({*passed, *([top] if top is not None else [])})


def _no_majority(view: Any, present: Any, accounted: Any) -> Any:
    return replace(_COUNT(view, present, accounted), holds=True)


def _votes_of_former_lives(member: Any, view: Any, present: Any) -> bool:
    word = present.get(member.peer_id)
    return word is not None and view.view_epoch > word.vote_floor


def _votes_given_up(member: Any, view: Any, present: Any) -> bool:
    word = present.get(member.peer_id)
    return word is not None and word.sender == member  # whatever its vote floor


def _forgotten(view: Any, present: Any, accounted: Any) -> Any:
    count = _COUNT(view, present, accounted)
    return count if count.votes else replace(count, holds=True)


def _no_state(words: Any, records: Any, start: Any) -> Any:
    bases = {word.base for word in words} | {record.base for record in records}
    return [], max((base for base in bases if base is not None), default=None)


def _no_promises(words: Any, records: Any) -> Any:
    return _JUDGE(
        [
            replace(word, seen=tuple(replace(r, base=None, pending=()) for r in word.seen if r in records))
            for word in words
        ],
        [replace(record, base=None, pending=()) for record in records],
    )


def _any_witness(view: Any, words: Any, records: Any) -> set[Any]:
    return {record.member for record in records if not record.withdrawn or view.view_epoch <= record.n}


def _hearsay(self: Any, word: Any) -> set[str]:
    return set(word.stopped) - {self.me.peer_id}


def _with_whatever_arrived(self: Any, member: Any, verdict: Any, version: int) -> bool:
    return _JUDGE_PEER(self, member, verdict, 0)


def _forgotten_version(self: Any, **arguments: Any) -> None:
    _INIT(self, **(arguments | {"promises": replace(arguments["promises"], version=0)}))


def _any_sets(self: Attempt) -> list[str]:
    return [peer for peer in self.members if peer not in self.words]


def _last_set_only(self: Any, attempt: Any, why: str) -> None:
    self._pending = {view for view in self._pending if view.view_epoch != attempt.n}
    _SAY(self, attempt, why)


def _base_without_checkpoint(self: Any, state: Any, now_ms: int) -> Any:
    ready = _COMPLETE(self, state, now_ms)
    if ready.accepted:
        self._disk_base = self._base
        self._pending = {view for view in self._pending if view.view_epoch > self._base.view_epoch}
        ready = replace(ready, persist=self.promises)
    return ready


def _no_record(self: Any, **arguments: Any) -> None:
    promises = arguments["promises"]
    _INIT(self, **(arguments | {"promises": replace(promises, n=0, base=None, known=None, pending=())}))


def _not_fresh(self: Any, **arguments: Any) -> None:
    promises = arguments["promises"]
    _INIT(self, **(arguments | {"promises": replace(promises, n=max(0, promises.n - 1), pending=())}))


def _claims_of_any_part(payload: Any, ledger: Any) -> bool:
    return bool(payload.epoch == ledger.epoch)


def _claims_alone(payloads: Any, voting: Any, me: int, ledger: Any) -> bool:
    return _GAVE_UP([payloads[me]], [True], 0, ledger)


_GAVE_UP = work.gave_up_claims
_COUNT = quorum.count_votes
_JUDGE = quorum.judge
_JUDGE_PEER = PeerBook.judge
_SAY = AgreementMachine._say
_COMPLETE = Agreement.complete
_INIT = AgreementMachine.__init__

MUTANTS: dict[str, Callable[[], Any]] = {
    "joint": _quorum("views_to_hold", _no_joint),
    "quorum": _quorum("count_votes", _no_majority),
    "memory": _quorum("has_vote", _votes_of_former_lives),
    "resigned": _quorum("has_vote", _votes_given_up),
    "forgotten": _quorum("count_votes", _forgotten),
    "state": _quorum("walk_bases", _no_state),
    "origin": _quorum("missed_origins", lambda words, start: []),
    "strangers": _quorum("are_strangers", lambda words: False),
    "promises": _quorum("judge", _no_promises),
    "last_promises": _method(PeerBook, "judge", _with_whatever_arrived),
    "one_version": _method(AgreementMachine, "__init__", _forgotten_version),
    "witness": _quorum("accounted_for", _any_witness),
    "hearsay": _method(AgreementMachine, "_admissible", _hearsay),
    "same_sets": _method(Attempt, "unheard", _any_sets),
    "every_set": _method(AgreementMachine, "_say", _last_set_only),
    "with_checkpoint": _method(Agreement, "complete", _base_without_checkpoint),
    "record": _method(AgreementMachine, "__init__", _no_record),
    "part": lambda: mock.patch.object(work, "of_now", _claims_of_any_part),
    "same_claims": lambda: mock.patch.object(host, "gave_up_claims", _claims_alone),
    "roll_call": lambda: mock.patch.object(host.Host, "unheard", ()),
    "fresh": _method(AgreementMachine, "__init__", _not_fresh),
}


@contextmanager
def mutant(name: str | None) -> Iterator[None]:
    """The product without that rule."""
    if name is None:
        yield
        return
    with MUTANTS[name]():
        yield


assert agreement_machine  # the module whose imports are patched through quorum
