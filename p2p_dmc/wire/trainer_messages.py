"""What agent and trainer of one peer say to each other over ipc:// (DESIGN.md section 2).

The trainer is a DEALER, the agent a ROUTER. The trainer's main thread waits only where the protocol says so: for a
lease, at a round's barrier, for the agent's word on a result. Everything else arrives at its input/output thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from p2p_dmc.wire.codec import message

MAX_SKIPPED = 1024
"""Stretches of skipped samples that one header tells of."""
MOST_LOSS_MICRO = 2**62
"""A loss sum beyond this, in millionths, is said as this."""
MOST_RATE_NANO = 2**52
"""A learning rate beyond this, in billionths, is said as this."""


class Local(IntEnum):
    """What a new view means for the trainer's local parameters and the samples it has consumed or leased."""

    KEEP = 0  # the anchor stands; local parameters, samples since the last round and leases stay as they are
    COUNTED = 1  # local := anchor, samples of the failed round are counted by others; unconsumed leases stay
    RESET = 2  # local := anchor, samples and leases are dropped
    LEARN = 3  # there is no anchor yet: reduce zeros and nothing else until a view says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter of the flat buffer, in order."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", ...


# -- trainer to agent ---------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHello:
    """First word of a trainer."""

    run: str
    pid: int
    script_digest: bytes
    torch_version: str
    device: str
    nccl: bool  # NCCL could be used here


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAlive:
    """Said by the input/output thread of a trainer that has said nothing else for a second."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBye:
    """The script closes its session; its process may go on (a notebook)."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """The script wants this data set; answered by DatasetReady once its manifest and a first shard are here."""

    name: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RunReady:
    """Model, optimizer and loader exist. Run-wide settings, part of the fingerprint except ``batch_size``."""

    dataset: bytes  # digest, of the mixture if it is one
    seed: int
    epochs: int
    batch_size: int
    parameters: tuple[ParameterSpec, ...]
    tau_policy: bytes  # core.adacomm.TauPolicy.to_bytes()
    outer: str  # str(core.outer.OuterPolicy)
    parts: tuple[
        tuple[bytes, int], ...
    ] = ()  # digest and passes of each data set of a mixture; (): no mixture


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWritten:
    """The initial parameters stand in the slot that WriteInitial named; ``digest`` is xxh3_128 of the slot."""

    digest: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Hand out about ``samples`` more samples of my assignment; answered by Lease, LeaseEnd, or after the next view.

    ``ahead``: how many of those that follow are prepared ahead of need, so that it helps to know them.
    """

    samples: int
    ahead: int = 0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRequest:
    """This shard is wanted on local disk (evaluation); answered by ShardReady."""

    dataset: bytes
    shard: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReady:
    """Local steps done. ``samples`` since the last complete round, ``loss_sum_micro`` = sum over samples, 1e-6.

    ``skipped``: which of the samples were not trained on, as [lo, hi) in the order of consumption, sorted.
    """

    view_epoch: int
    round: int
    samples: int
    steps: int
    loss_sum_micro: int
    compute_us: int
    finite: bool
    skipped: tuple[tuple[int, int], ...] = ()
    rate_nano: int = 0  # learning rate in billionths; 0: not known


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """The reduction is done and the candidate anchor stands in the slot that Reduce named; digest xxh3_128 of it.

    A learner's has no digest: the slot holds the averaged delta.
    """

    view_epoch: int
    round: int
    digest: bytes
    comm_us: int
    bytes_sent: int
    bytes_received: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """The trainer waits for a view."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed:
    """The group could not be made or the reduction failed. Scratch memory is lost, nothing else."""

    view_epoch: int
    round: int
    reason: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSet:
    """Rendezvous: publish a value under this view's id to the view's members."""

    view_id: bytes
    key: str
    value: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGet:
    """Rendezvous: a value has not come yet, ask its owner again. Answered by StoreValue when it is there."""

    view_id: bytes
    key: str


# -- agent to trainer ---------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWelcome:
    """The agent knows this trainer."""

    peer_id: str
    name: str
    home: str
    store_root: str
    collective_host: str  # address of this machine that gloo listens on
    checkpoint_every_s: float


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReady:
    """Where the manifest lies."""

    name: str
    digest: bytes
    manifest_path: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class WriteInitial:
    """Write the initial state (flat float32, little endian: parameters, then zeros for the outer momentum if there is
    one) into this file and say InitialWritten."""

    slot_path: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStarted:
    """A view stands and this peer holds its start state. Make its group; rounds count from ``next_round``."""

    view_epoch: int
    view_id: bytes
    history: bytes
    replaced: tuple[bytes, ...]  # histories that this one took the place of
    rank: int
    world: int
    next_round: int
    slot_path: str  # the anchor
    digest: bytes  # xxh3_128 of the slot
    tau: int
    epoch: int
    local: Local
    backend: str  # "gloo" or "nccl"
    group_timeout_ms: int
    may_decay: bool = True  # tau does not ask the learning rate to stay as it is


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreValue:
    """Rendezvous: a value that a member of this view published, pushed when known and in answer to StoreGet."""

    view_id: bytes
    key: str
    value: bytes


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class CancelGroup:
    """Drop this view's group now; whatever is in it fails. The next view follows."""

    view_epoch: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """These samples are this trainer's to consume, in this order: of the stretches (shard, lo, hi in epoch order) of a
    braid, all of one length, the first sample of each, then the second of each, and so on; then the next braid.

    ``ahead``: what will probably be leased next, its shards are on this machine; it is nobody's yet. ``left``: samples
    of the trainer's assignment that are not leased yet, unless a view changes that.
    """

    epoch: int
    braids: tuple[tuple[tuple[int, int, int], ...], ...]
    ahead: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    left: int = 0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnd:
    """Nothing to hand out. Enter a round with what there is (zero samples are fine), then ask again.

    ``epoch`` is the ledger's current epoch: greater than the loader's means that the loader's epoch is over.
    """

    epoch: int
    finished: bool  # the run's epochs are all done


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReady:
    dataset: bytes
    shard: int
    path: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """Stop at the next safe point, say Parked, and wait for a view: this peer is about to join as a learner."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """All headers agree. Reduce ``weight`` x (anchor - local), divide by ``divisor``, new state into the slot.

    In a view to learn in: reduce zeros, and the averaged delta goes into the slot, to the anchor's place.
    """

    view_epoch: int
    round: int
    weight: int
    divisor: int
    slot_path: str
    outer: tuple[float, ...] = ()  # core.outer.OuterStep; (): the new anchor is the average


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundComplete:
    """The round is recorded: the slot that Reduce named is the anchor. ``steps``, ``epoch``: of the next round."""

    view_epoch: int
    round: int
    steps: int  # tau for the slowest member, more for a faster one
    limit_us: int  # of computing: it takes no further step then; 0: no limit
    epoch: int
    reset: bool  # this peer's delta was not finite: leases are dropped, samples are consumed again
    retake: bool  # the rest of the epoch was shared out anew: what is leased and not consumed is others'
    may_decay: bool = True  # as in ViewStarted


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRefused:
    """The result is discarded; the next view says what holds."""

    view_epoch: int
    round: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The run's epochs are done and committed; the final anchor stands in the slot."""

    slot_path: str
    digest: bytes
    final_path: str  # runs/<run>/final/model.safetensors


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStop:
    """Leave the script quietly: the run was stopped, or the peer leaves."""

    reason: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRefused:
    """A user error that ends the script: one line, value and remedy."""

    reason: str


ENV_AGENT = "DMC_AGENT"  # ipc endpoint of the agent
ENV_RUN = "DMC_RUN"
ENV_LIFELINE = "DMC_LIFELINE"  # file descriptor that reads end-of-file when the agent is gone
