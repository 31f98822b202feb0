"""What a new view means on this peer: the trainer's local parameters, the assignment, who takes over what."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from p2p_dmc.agent.run_files import load_names, save_run
from p2p_dmc.agent.takeovers import takeovers
from p2p_dmc.agent.work import Work, plain
from p2p_dmc.core.agreement_messages import StateRef, View
from p2p_dmc.core.ledger import Ledger, sample_permutation
from p2p_dmc.data.mixture import Mixture
from p2p_dmc.data.samples import read_index
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire.trainer_messages import Local, ViewStarted

if TYPE_CHECKING:
    from p2p_dmc.agent.run import Run
    from p2p_dmc.agent.run_data import RunData
    from p2p_dmc.agent.training import Training

MOST_NAMED = 256
"""Peers whose names a run remembers."""
MOST_KEYS = 16
"""Keys of skipped samples that an event names; a lost shard has many more."""


def local_mode(start: StateRef, *, honoured: bool, base: StateRef | None, counted: bool) -> Local:
    """What becomes of the trainer's local parameters (see ``wire.trainer_messages.Local``).

    ``honoured``: the view counts this peer's claims. ``base``: the state that the trainer's parameters come from, None
    for a new trainer: not by its lineage alone, for initial models share theirs. ``counted``: the start is the round
    whose header this peer said last, and its samples are in it (``work.in_start``).
    """
    if not honoured or base is None:
        return Local.RESET
    if start == base:
        return Local.KEEP
    return Local.COUNTED if counted else Local.RESET


def view_started(run: Run, training: Training, mode: Local) -> ViewStarted:
    """The trainer's word of it."""
    reach("opening")
    held, (steps, _) = training.held, training.course.steps()  # no time limit: nobody's pace is known yet
    started = _started(
        run, training.view, mode, str(held.slot), held.anchor_digest, steps, training.ledger.epoch
    )
    return replace(started, may_decay=held.tau.lowest)


def learning_started(run: Run, view: View) -> ViewStarted:
    """To a learner's trainer: it reduces zeros in this view, and does nothing else."""
    return _started(run, view, Local.LEARN, slot_path="", digest=b"", tau=1, epoch=0)


def _started(
    run: Run, view: View, local: Local, slot_path: str, digest: bytes, tau: int, epoch: int
) -> ViewStarted:
    return ViewStarted(
        view_epoch=view.view_epoch,
        view_id=view.view_id,
        history=view.history,
        replaced=tuple(r.history for r in run.promises.replaced),
        rank=view.members.index(run.me),
        world=len(view.members),
        next_round=view.start.lineage[1] + 1,
        slot_path=slot_path,
        digest=digest,
        tau=tau,
        epoch=epoch,
        local=local,
        backend="gloo" if run.desk.backend == "auto" else run.desk.backend,
        group_timeout_ms=run.services.settings.group_timeout_ms,
    )


def out_of_date(training: Training, data: RunData) -> str:
    """Why the view's assignment no longer fits what can be had of the data; "" while it does."""
    reachable = data.reachable()
    gone = training.work.reachable - reachable
    if training.work.lost & reachable:
        return "lost shards are back"
    if gone and any(s.shard in gone for s in training.ledger.remaining()):
        return "nobody has some shards any more"
    if data.full != training.full:
        return "no room for shards here" if data.full else "room for shards again"
    return ""


def report_view(run: Run, view: View) -> None:
    """A view has been agreed."""
    reach("installed")
    run.event(
        "view",
        view_epoch=view.view_epoch,
        view_id=view.view_id.hex(),
        history=view.history.hex(),
        members=[m.peer_id for m in view.voters],
        learners=[m.peer_id for m in view.learners],
        start=list(view.start.lineage),
        digest=view.start.digest.hex(),
        parent=view.parent.hex(),
    )
    for peer_id in view.evicted:
        run.event("evicted", peer_id=peer_id, view_epoch=view.view_epoch, history=view.history.hex())
    remember_names(run, view)


def remember_names(run: Run, view: View) -> None:
    """After a power cut a peer waits for some that it has not heard of in this life: by these names."""
    known = load_names(run.folder)
    names = {r.peer_id: r.name for r in run.services.members() if r.peer_id in view.peers}
    if not names.items() <= known.items():
        with contextlib.suppress(OSError):  # a full disk: then by their ids
            save_run(run.folder, names=dict(list((known | names).items())[-MOST_NAMED:]))


def report_opening(
    run: Run, view: View, ledger: Ledger, work: Work, old_work: Work | None, old_view: View | None
) -> None:
    """The assignment, with all it follows from (`observe.seen`), and what members that are gone leave to whom."""
    run.event(
        "assignment",
        view_epoch=view.view_epoch,
        epoch=ledger.epoch,
        skipped=ledger.progress()[1],
        assignment=[plain(braids) for braids in work.assignment.lists],
        view_id=view.view_id.hex(),
        history=view.history.hex(),
        members=[m.peer_id for m in view.members],
        voting=[m in view.voters for m in view.members],
        payloads=[payload.hex() for payload in view.payloads],
    )
    if run.desk.data is None or old_work is None or old_view is None:
        return
    for change in takeovers(old_work, old_view, work, view):
        run.event(
            "takeover",
            view_epoch=view.view_epoch,
            shard=run.desk.data.mixture.shard_digest(change.shard).hex(),
            **{"from": change.from_peer, "to": change.to_peer},
            first=change.first,
            samples=change.samples,
        )


def report_given_up(run: Run, skipped: Sequence[Sequence[int]]) -> None:
    """Samples that a round put on record as skipped, [epoch, shard, lo, hi] each: the first few by their keys."""
    data, ready = run.desk.data, run.desk.ready
    if not skipped or data is None or ready is None:
        return
    keys: list[str] = []
    for epoch, shard, lo, hi in skipped:
        count = data.mixture.sample_counts[shard]
        order = sample_permutation(data.mixture.digest, ready.seed, epoch, shard, count)
        places = [order[at] for at in range(lo, min(hi, lo + MOST_KEYS - len(keys)))]
        keys += _keys(run, data.mixture, shard, places)
    run.event("given_up", stretches=skipped, samples=sum(hi - lo for _, _, lo, hi in skipped), keys=keys)


def _keys(run: Run, mixture: Mixture, shard: int, places: Sequence[int]) -> list[str]:
    """Of samples of a shard, of a mixture with the data set's name; without the shard's file their places in it."""
    manifest, at, first = mixture.where(shard)
    store, of_part = run.services.data.store, f"{manifest.name}: " if mixture.is_mixed else ""
    if places and store.has(manifest.digest, at):
        with contextlib.suppress(OSError):
            index = read_index(store.path(manifest.digest, at))
            return [f"{of_part}{index.key(first + place)}" for place in places]
    return [f"{of_part}{manifest.shard_digests[at].hex()[:12]}#{first + place}" for place in places]
