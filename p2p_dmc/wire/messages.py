"""What agents and clients say to each other, beside the messages of the cores, which are registered here too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from p2p_dmc.config import DOMAIN
from p2p_dmc.core import agreement_messages, membership
from p2p_dmc.core.agreement_messages import DIGEST_BYTES, NUMBER_MAX
from p2p_dmc.core.membership_messages import MAX_META_BYTES
from p2p_dmc.core.placement import MAX_WEIGHT
from p2p_dmc.core.quorum import Quorum
from p2p_dmc.data.mixture import MAX_PARTS
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire import codec
from p2p_dmc.wire.codec import message

for _core_message in (
    membership.Ping,
    membership.PingReq,
    membership.Ack,
    membership.Nack,
    membership.Gossip,
    membership.PushPull,
    agreement_messages.Propose,
    agreement_messages.Cause,
    agreement_messages.Promised,
    agreement_messages.Surpassed,
    agreement_messages.Withdrawal,
):
    message(_core_message)

MEMBERSHIP_MESSAGES = (
    membership.Ping,
    membership.PingReq,
    membership.Ack,
    membership.Nack,
    membership.Gossip,
    membership.PushPull,
)
REPLACED_TOLD = 4
"""Of the histories that a run's one took the place of: what everybody is told is to stay small."""
QUORUMS = ("", *(quorum.name.lower() for quorum in Quorum))  # "": not settled yet
AGREEMENT_MESSAGES = (
    agreement_messages.Propose,
    agreement_messages.Cause,
    agreement_messages.Promised,
    agreement_messages.Surpassed,
    agreement_messages.Withdrawal,
)


# -- what a peer says of itself through membership ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeta:
    """One run as its peer sees it."""

    name: str
    boot: int  # of the member that it is in views; older than the peer's when a closed run was opened again
    history: bytes  # b"" before the first view
    view_epoch: int  # 0 when no view stands
    ready: bool  # a trainer waits or trains
    fingerprint: bytes  # 8 bytes; b"" before the trainer has said what it trains
    samples: int  # committed, to tell two histories apart
    quorum: str  # the run's, for peers whose command names none; "" before it is settled
    backend: str
    on_lost: str
    dataset: bytes = (
        b""  # digest of the version that it trains on, of a mixture each part's; b"" before it has said
    )
    replaced: tuple[bytes, ...] = ()  # whose place `history` took by eviction: who is in one gives it up

    def __post_init__(self) -> None:
        if not 0 <= self.boot <= NUMBER_MAX or self.quorum not in QUORUMS:
            raise ValueError(f"boot {self.boot} or quorum {self.quorum[:20]!r} of a run")
        if len(self.replaced) > REPLACED_TOLD or any(len(h) != DIGEST_BYTES for h in self.replaced):
            raise ValueError(f"{len(self.replaced)} replaced histories, or one that is none")
        if len(self.dataset) % DIGEST_BYTES or len(self.dataset) > MAX_PARTS * DIGEST_BYTES:
            raise ValueError(f"data set {self.dataset!r:.50}")

    @property
    def datasets(self) -> tuple[bytes, ...]:
        """The digests in ``dataset``."""
        starts = range(0, len(self.dataset), DIGEST_BYTES)
        return tuple(self.dataset[at : at + DIGEST_BYTES] for at in starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMeta:
    """The application's part of a membership record."""

    weight: int  # share of the placement, GiB of capacity; 0: it means to leave and is to hold nothing
    domain: str = ""  # what it may fail together with; "": alone
    runs: tuple[RunMeta, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"weight {self.weight} is not in 0..{MAX_WEIGHT}")
        if self.domain and not DOMAIN.fullmatch(self.domain):
            raise ValueError(f"{self.domain[:20]!r} is no failure domain")


def encode_meta(meta: PeerMeta) -> bytes:
    """Of as many runs as there is room for, the last ones."""
    while len(packed := codec.pack_value(meta)) > MAX_META_BYTES and meta.runs:
        meta = replace(meta, runs=meta.runs[1:])
    return packed


def decode_meta(data: bytes) -> PeerMeta | None:
    """None for what another version of the program may have put there."""
    try:
        return codec.unpack_value(PeerMeta, data, MAX_META_BYTES)
    except RemoteProtocolError:
        return None


# -- rounds -----------------------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundHeader:
    """One member's word at a round's barrier (DESIGN.md section 7): where it stands and what it would contribute."""

    view_epoch: int
    view_id: bytes
    round: int
    digest: bytes  # of the state that the round starts from
    payload_spec: bytes  # of the flat buffer: a mismatch would abort the process inside gloo
    samples: int  # consumed: how far the sender's cursor moves
    steps: int
    loss_sum_micro: int
    compute_us: int
    comm_us: int  # of the last round
    wait_us: int  # of the last round
    bytes_sent: int
    bytes_received: int
    finite: bool
    change: bool  # post no payload: a change of view is wanted
    closing: bool  # the run is to be stopped here
    final: bool  # nothing is left to train: this header only commits
    skipped: tuple[tuple[int, int], ...] = ()
    """Samples that could not be decoded, [lo, hi) among those consumed: the ledger counts them as skipped."""
    rate_nano: int = 0  # learning rate in billionths; 0: not known

    @property
    def trained(self) -> int:
        """Samples that the sender's delta comes from: its weight in the average."""
        return self.samples - sum(hi - lo for lo, hi in self.skipped)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed:
    """The sender's collective failed and its group is dropped: no round of this view can complete any more."""

    view_epoch: int
    view_id: bytes
    reason: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue:
    """Rendezvous of one view's group: a value published by a member."""

    view_id: bytes
    key: str
    value: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValueRequest:
    view_id: bytes
    key: str


# -- entering and leaving a run ---------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A ready trainer outside the view asks to be let in. ``fingerprint``: (setting, value) pairs, sorted."""

    fingerprint: tuple[tuple[str, str], ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class StartOffered:
    """To whoever asked to be let in: the view that does so begins with this state, unless a round comes between."""

    start: agreement_messages.StateRef


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRefused:
    """Why not: the first difference, in words."""

    reason: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """The sender no longer takes part (it leaves, or its trainer is gone); its promises are told."""

    stopped: agreement_messages.Stopped
    reason: str
    strikes: bytes  # agent.work.encode_strikes: what trainers had in hand when they died
    completed: agreement_messages.Lineage  # newest round that is complete at the sender


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """Somebody asked the run to stop; every member sets the closing flag in its next header."""

    reason: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RunClosed:
    """The run ended at the sender, at this state. Who was not at the last barrier learns it from this."""

    lineage: tuple[int, int]
    digest: bytes
    finished: bool
    history: bytes
    """The founding that ended so."""
    view_id: bytes
    """Of a stop: the view whose voter the sender was. It says and hears no word of agreement any more, nor has it ever
    said one beyond this view. Else b""."""
    answer: bool
    """The sender has not heard that the receiver has stopped."""


# -- data -------------------------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Which shards of one data set the sender holds. Bitmaps have one bit a shard, in numpy.packbits order."""

    dataset: bytes
    name: str
    version: int
    bitmap: bytes  # verified in this life of the sender
    unverified: bytes  # files that it has not looked at yet
    full: bool  # it has no room for what it lacks
    placement: bytes  # digest of the placement that the sender computed
    answer: bool  # the sender wants to hear the receiver's


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PledgeAsked:
    """The sender wants to give up these shards and asks whether the receiver keeps them (core/pledges.py)."""

    dataset: bytes
    number: int
    shards: tuple[int, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Pledged:
    """The sender keeps these of the shards that it was asked about under this number."""

    dataset: bytes
    number: int
    shards: tuple[int, ...]


class BulkKind(IntEnum):
    MANIFEST = 0
    SHARD = 1
    STATE = 2
    PARTS = 3  # what the peer has of shards that it is receiving


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRequest:
    """A range of something content-addressed. ``name``: "" or the run; ``part``: shard index or slot part."""

    request: int
    kind: BulkKind
    name: str
    digest: bytes
    part: int
    offset: int
    size: int

    def __post_init__(self) -> None:
        if self.offset < 0 or not 0 < self.size <= 4 << 20 or self.part < 0 or len(self.digest) != 16:
            raise ValueError("no such range")


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class BulkReply:
    """Before the data frame. ``total`` is the size of the whole, -1 when the sender does not have it."""

    request: int
    total: int


# -- clients: dmc-peer status and the like -------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    command: str
    arguments: tuple[str, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReply:
    """``body`` is JSON when ``ok``, else one line for the user. ``more``: another reply follows."""

    ok: bool
    body: str
    more: bool


# -- local commands on a running home ------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitScript:
    """Run this script as a trainer of that run. Answered by TrainerOutput, then SubmitEnded."""

    run: str
    script: str
    arguments: tuple[str, ...]
    quorum: str  # "": the run's, else the default
    backend: str
    min_peers: int
    checkpoint_every_s: float
    on_lost: str
    seeds: tuple[str, ...]
    folder: str  # where the script runs: where its join was typed
    environment: tuple[tuple[str, str], ...]  # of that join; over ipc:// within one user's own files
    attach: int  # process id of a trainer that runs already (a notebook); 0: start the script


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLine:
    """Something for the person who waits: ``kind`` is output (bytes of the script), say, round or event (JSON)."""

    kind: str
    data: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitEnded:
    """The run is over on this peer."""

    code: int
    line: str
