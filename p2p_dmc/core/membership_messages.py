"""What members tell each other about who is here: records, messages, and what the core hands to its shell.

Everything is bounded and checked when it is built, so nothing absurd from the network gets past this file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

INCARNATION_LIMIT = 2**63 - 1
"""Largest boot, incarnation and sequence number: they travel as signed 64-bit integers."""
MAX_NAME_LENGTH = 64
MAX_ADDRESS_LENGTH = 255
MAX_META_BYTES = 2048
MAX_ACCUSERS = 8
MAX_PIGGYBACK_RECORDS = 16
"""Records on any message but PushPull."""
MAX_PUSH_PULL_RECORDS = 1024
MAX_PROMISED = 32
"""Runs of which one message tells the version of the sender's promises."""
MAX_RUN_NAME_LENGTH = 256

_PEER_ID = re.compile(r"[0-9a-f]{32}")
_ADDRESS = re.compile(r"tcp://[\x21-\x7e]+:[0-9]{1,5}")


class MemberState(IntEnum):
    """At one incarnation the larger state wins (SWIM, section 4.2; LEFT is the member's own last word)."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Role(IntEnum):
    """TRAIN computes and stores; STORE only holds and serves shards."""

    TRAIN = 0
    STORE = 1


def _check_peer_id(peer_id: str) -> None:
    if not _PEER_ID.fullmatch(peer_id):
        raise ValueError(f"peer id {peer_id[:80]!r} is not 32 lower-case hex characters")


def _check_number(name: str, value: int) -> None:
    if not 0 <= value <= INCARNATION_LIMIT:
        raise ValueError(f"{name} {value} is outside 0..{INCARNATION_LIMIT}")


def _check_address(name: str, address: str) -> None:
    if len(address) > MAX_ADDRESS_LENGTH or not _ADDRESS.fullmatch(address):
        raise ValueError(
            f"{name} {address[:80]!r} is not tcp://HOST:PORT of at most {MAX_ADDRESS_LENGTH} characters"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """What is said of one member. Its facts are the subject's own; only its state is anybody's to say.

    (boot, incarnation) names one set of facts, so records of a peer with equal numbers differ in state.
    """

    peer_id: str
    boot: int
    """Grows at each start and is persisted by the shell, so that no word of an earlier life outlives it."""
    incarnation: int
    """Grows within one boot when the peer refutes a rumour or changes its own facts."""
    state: MemberState
    name: str
    """For people; need not be unique."""
    address: str
    """Control endpoint, tcp://HOST:PORT."""
    bulk_address: str
    """Bulk endpoint, or empty while there is none."""
    role: Role
    meta: bytes
    """Opaque to membership."""
    accusers: tuple[str, ...] = ()
    """Of a SUSPECT: the members whose own probes of it failed, sorted (Lifeguard, section IV.B)."""
    attested: bool = False
    """Of a DEAD: its host refused a connection or somebody else answers there, so nobody need wait."""

    def __post_init__(self) -> None:
        _check_peer_id(self.peer_id)
        _check_number("boot", self.boot)
        _check_number("incarnation", self.incarnation)
        _check_address("address", self.address)
        if self.bulk_address:
            _check_address("bulk address", self.bulk_address)
        if len(self.name) > MAX_NAME_LENGTH:
            raise ValueError(f"name {self.name[:80]!r} is longer than {MAX_NAME_LENGTH} characters")
        if len(self.meta) > MAX_META_BYTES:
            raise ValueError(f"meta of {len(self.meta)} bytes exceeds {MAX_META_BYTES}")
        if self.accusers and self.state is not MemberState.SUSPECT:
            raise ValueError(f"accusers on a member that is {self.state.name}, not SUSPECT")
        if len(self.accusers) > MAX_ACCUSERS or tuple(sorted(set(self.accusers))) != self.accusers:
            raise ValueError(f"{len(self.accusers)} accusers: at most {MAX_ACCUSERS}, sorted, no repetition")
        for accuser in self.accusers:
            _check_peer_id(accuser)
        if self.attested and self.state is not MemberState.DEAD:
            raise ValueError(f"an attested death on a member that is {self.state.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Who speaks and where it can be answered, also by somebody who does not know it yet."""

    peer_id: str
    boot: int
    incarnation: int
    address: str
    promised: tuple[tuple[str, int], ...] = ()
    """(run, version of its promises) of each run that it has a part in, sorted: every message is a sign of life, and
    whoever sees the sender crash counts it with promises as new as the last one told of. Opaque to membership."""

    def __post_init__(self) -> None:
        _check_peer_id(self.peer_id)
        _check_number("boot", self.boot)
        _check_number("incarnation", self.incarnation)
        _check_address("address", self.address)
        runs = [run for run, _ in self.promised]
        if len(runs) > MAX_PROMISED or sorted(set(runs)) != runs:
            raise ValueError(f"promises in {len(runs)} runs: at most {MAX_PROMISED}, sorted, no repetition")
        for run, version in self.promised:
            if len(run) > MAX_RUN_NAME_LENGTH:
                raise ValueError(f"run name {run[:80]!r} is longer than {MAX_RUN_NAME_LENGTH} characters")
            _check_number("promise version", version)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    sender: Sender
    records: tuple[MemberRecord, ...] = ()
    """News carried along (SWIM, section 4.1)."""

    def __post_init__(self) -> None:
        if len(self.records) > MAX_PIGGYBACK_RECORDS:
            raise ValueError(f"{len(self.records)} records in one message, at most {MAX_PIGGYBACK_RECORDS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered(_Message):
    seq: int
    """Chosen by whoever asks, repeated by whoever answers."""

    def __post_init__(self) -> None:
        _Message.__post_init__(self)
        _check_number("seq", self.seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(_Numbered):
    """Are you there? Whoever receives it answers as itself, even when somebody else was meant."""

    peer_id: str
    """Who is believed to live at this address."""
    boot: int
    incarnation: int
    """The newest that the asker knows of it; whoever answers adds its own record when that is old."""

    def __post_init__(self) -> None:
        _Numbered.__post_init__(self)
        _check_peer_id(self.peer_id)
        _check_number("boot", self.boot)
        _check_number("incarnation", self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class PingReq(_Numbered):
    """Ping somebody for me; answer Ack if it answers, or Nack once timeout_ms has passed without."""

    peer_id: str
    boot: int
    incarnation: int
    address: str
    timeout_ms: int

    def __post_init__(self) -> None:
        _Numbered.__post_init__(self)
        _check_peer_id(self.peer_id)
        _check_number("boot", self.boot)
        _check_number("incarnation", self.incarnation)
        _check_address("address", self.address)
        if not 0 < self.timeout_ms <= 600_000:
            raise ValueError(f"time-out {self.timeout_ms} ms is outside 1..600000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(_Numbered):
    """peer_id answered: the sender itself, or whom the sender pinged for somebody."""

    peer_id: str
    boot: int

    def __post_init__(self) -> None:
        _Numbered.__post_init__(self)
        _check_peer_id(self.peer_id)
        _check_number("boot", self.boot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack(_Numbered):
    """I am well, but whom I pinged for you did not answer in time (Lifeguard, section IV.A)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gossip(_Message):
    """News only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPull(_Numbered):
    """All that the sender knows; a request is answered with all that the other one knows."""

    reply: bool

    def __post_init__(self) -> None:
        if len(self.records) > MAX_PUSH_PULL_RECORDS:
            raise ValueError(f"{len(self.records)} records in one push-pull, at most {MAX_PUSH_PULL_RECORDS}")
        _check_number("seq", self.seq)


MembershipMessage = Ping | PingReq | Ack | Nack | Gossip | PushPull


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """One message to one address."""

    address: str
    peer_id: str | None
    """Who is believed to live there; None for a seed that has not answered yet."""
    message: MembershipMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvent:
    """One change of one member, in the order in which it happened.

    A restart (higher boot) of a member that was ALIVE or SUSPECT is two events: the old boot DEAD, the new
    one ALIVE. An event about this peer itself reports a refutation or an identity clash.
    """

    peer_id: str
    old: MemberState | None
    """None: not known before."""
    new: MemberState
    record: MemberRecord
    reason: str
    """Plain words for logs and people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the shell does next; sends and events are independent of each other."""

    sends: tuple[Send, ...] = ()
    events: tuple[MemberEvent, ...] = ()
