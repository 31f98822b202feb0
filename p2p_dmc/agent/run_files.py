"""What a run keeps on disk besides checkpoints: its promises, its fingerprint, how it ended (DESIGN.md 6, 11)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from p2p_dmc.agent.checkpoints import closed_is_whole
from p2p_dmc.agent.home import write_json
from p2p_dmc.core.adacomm import TauPolicy
from p2p_dmc.core.agreement_messages import GivenUp, Lineage, MemberId, Promises, Replaced, ViewRef
from p2p_dmc.core.compression import Compression
from p2p_dmc.data.mixture import Mixture
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire.trainer_messages import ParameterSpec, RunReady

Fingerprint = tuple[tuple[str, str], ...]

PART = "part of the data: "
"""Of a mixture: begins the settings that tell its data sets."""
COMPRESSION = "compression"
DEFAULTS = {COMPRESSION: "none"}
"""What a fingerprint means that does not say it: it was written before there was a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the user may set for a run at `join`."""

    quorum: str = ""  # "": the run's, else majority
    backend: str = ""
    min_peers: int = 1
    checkpoint_every_s: float = 60.0
    on_lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """agreement.json of one run: promises, and whether it was closed (then this peer keeps its vote)."""

    promises: Promises
    closed: bool
    boot: int  # of the incarnation that said them


def _view_to_json(view: ViewRef | None) -> Any:
    return None if view is None else [view.view_epoch, [[m.peer_id, m.boot] for m in view.members]]


def _view_from_json(data: Any) -> ViewRef | None:
    if data is None:
        return None
    members = tuple(MemberId(peer_id=str(p), boot=int(b)) for p, b in data[1])
    return ViewRef(view_epoch=int(data[0]), members=members)


def _views_from_json(data: Any) -> tuple[ViewRef, ...]:
    return tuple(view for view in map(_view_from_json, data) if view is not None)


def save_record(folder: Path, record: RunRecord) -> None:
    """Durable before it returns: a promise is on disk before it is said."""
    promises = record.promises
    folder.mkdir(parents=True, exist_ok=True)
    reach("promising")
    write_json(
        folder / "agreement.json",
        {
            "n": promises.n,
            "history": promises.history.hex(),
            "courted": promises.courted.hex(),
            "base": _view_to_json(promises.base),
            "known": _view_to_json(promises.known),
            "pending": [_view_to_json(v) for v in promises.pending],
            "replaced": [[r.history.hex(), list(r.lineage), r.evicted] for r in promises.replaced],
            "given_up": [[g.history.hex(), [_view_to_json(v) for v in g.pending]] for g in promises.given_up],
            "version": promises.version,
            "closed": record.closed,
            "boot": record.boot,
        },
    )
    reach("promised")


def load_record(folder: Path) -> RunRecord | None:
    """None when this peer never took part; UserError when the file is damaged (going on could break a promise)."""
    path = folder / "agreement.json"
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        promises = Promises(
            n=int(data["n"]),
            history=bytes.fromhex(data["history"]),
            courted=bytes.fromhex(data["courted"]),
            base=_view_from_json(data["base"]),
            known=_view_from_json(data["known"]),
            pending=_views_from_json(data["pending"]),
            replaced=tuple(
                Replaced(history=bytes.fromhex(h), lineage=(int(at[0]), int(at[1])), evicted=bool(evicted))
                for h, at, evicted in data.get("replaced", ())
            ),
            given_up=tuple(
                GivenUp(history=bytes.fromhex(h), pending=_views_from_json(views))
                for h, views in data.get("given_up", ())
            ),
            version=int(data.get("version", 0)),
        )
        return RunRecord(promises=promises, closed=bool(data["closed"]), boot=int(data["boot"]))
    except (ValueError, KeyError, TypeError, IndexError, OSError):
        raise UserError(
            f"{path} is damaged; use another --home, or delete the file to join as a new peer"
        ) from None


def own_record(folder: Path) -> RunRecord | None:
    """`load_record`; closed only while the state that it was closed with is whole: without it this peer forgot it."""
    record = load_record(folder)
    return replace(record, closed=record.closed and closed_is_whole(folder)) if record is not None else None


def belongs(promises: Promises, history: bytes, lineage: Lineage) -> bool:
    """Whether a state of this history is one of the history that this peer is in: not one that was given up."""
    if history == promises.history:
        return True
    return any(r.history == history and lineage <= r.lineage for r in promises.replaced)


def boot_for(record: RunRecord | None, boot: int, another: Callable[[], int]) -> int:
    """Of the member that takes part now: the one that closed the run, or one that has said nothing in it yet.

    A script may be run again by an agent (of this ``boot``) that goes on, from a checkpoint: what the first one held
    in memory is gone, and what votes it gave up are given up, so this is somebody else.
    """
    if record is not None and record.closed:
        return record.boot
    return boot if record is None or record.boot < boot else another()


def save_run(folder: Path, **facts: Any) -> None:
    """run.json: the fingerprint that the first view fixed, and the end when it has come."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", load_run(folder) | facts)


def load_run(folder: Path) -> dict[str, Any]:
    try:
        data = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def load_names(folder: Path) -> dict[str, str]:
    """What the peers of the run's views are called, by peer id."""
    names = load_run(folder).get("names", {})
    return {str(peer_id): str(name) for peer_id, name in names.items()} if isinstance(names, dict) else {}


def payload_spec(parameters: Sequence[ParameterSpec], compress: str = "none") -> bytes:
    """16 bytes that two peers share when their flat buffers have the same shape and travel alike."""
    hasher = hashlib.blake2b(digest_size=16)
    if compress != "none":
        hasher.update(f"{compress}\n".encode())
    for p in parameters:
        hasher.update(f"{p.name}\0{p.shape}\0{p.dtype}\n".encode())
    return hasher.digest()


def compression_of(ready: RunReady) -> Compression:
    """How this run's rounds travel; RemoteProtocolError for a word that this version does not know."""
    try:
        return Compression(
            setting=ready.compress, parameters=sum(math.prod(p.shape) for p in ready.parameters)
        )
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from None


class KnownPart(NamedTuple):
    """What a fingerprint says of a data set that its run trains on."""

    name: str
    digest: str  # its first digits
    passes: int  # an epoch

    @classmethod
    def all_of(cls, mixture: Mixture) -> tuple[KnownPart, ...]:
        """Those of a mixture; none of a data set by itself."""
        parts = mixture.parts if mixture.is_mixed else ()
        return tuple(cls(p.manifest.name, p.manifest.digest.hex()[:12], p.passes) for p in parts)


def fingerprint(
    ready: RunReady,
    dataset_name: str,
    quorum: str,
    backend: str,
    on_lost: str,
    parts: Sequence[KnownPart] = (),
) -> Fingerprint:
    """The run-wide settings as (setting, value for people), in the order in which differences are named.

    ``parts``: of a mixture, which is called ``dataset_name``.
    """
    pairs = [
        ("data set", f"{dataset_name} {ready.dataset.hex()[:12]}"),
        ("epochs", str(ready.epochs)),
        ("seed", str(ready.seed)),
        ("tau", _tau_words(TauPolicy.from_bytes(ready.tau_policy))),
        ("outer optimizer", ready.outer),
        (COMPRESSION, ready.compress),
        ("quorum", quorum),
        ("backend", backend),
        ("lost shards", on_lost),
        ("number of parameters", str(len(ready.parameters))),
    ]
    pairs += [
        (f"parameter {p.name}", f"{'x'.join(map(str, p.shape)) or 'scalar'} {p.dtype}")
        for p in ready.parameters
    ]
    pairs += [(f"{PART}{part.name}", f"{part.passes} x {part.digest}") for part in parts]
    return tuple(pairs)


def _tau_words(policy: TauPolicy) -> str:
    if policy.kind == "fixed":
        return f"{policy.tau0}"
    words = [policy.rule, f"tau0={policy.tau0 or 'auto'}", f"t0={policy.t0_ms / 1000:g} s"]
    words += [f"tau_max={policy.tau_max}"]
    words += [f"min_utilisation={policy.utilisation_permille / 1000}"] if policy.utilisation_permille else []
    words += [f"loss_floor={policy.floor_micro / 1_000_000}"] if policy.floor_micro else []
    words += [] if policy.rate else ["lr_ratio=False"]
    return f"AdaComm({', '.join(words)})"


def parts_of(pairs: Iterable[Sequence[str]]) -> tuple[KnownPart, ...]:
    """The data sets of the run with this fingerprint, one by itself once; () when it says nothing of them."""
    settings = {str(name): str(value) for name, value in pairs}
    found = []
    for setting in [name for name in settings if name.startswith(PART)]:
        passes, _, digest = settings[setting].partition(" x ")
        found.append(KnownPart(setting.removeprefix(PART), digest, int(passes)))
    name, _, digest = settings.get("data set", "").rpartition(" ")
    return tuple(found) or ((KnownPart(name, digest, 1),) if digest else ())


def fingerprint_digest(pairs: Fingerprint) -> bytes:
    return hashlib.blake2b(repr(pairs).encode(), digest_size=8).digest()


def first_difference(mine: Fingerprint, theirs: Fingerprint) -> str | None:
    """The first setting in which ``theirs`` differs from the run's, in words; None when they agree."""
    run, other = DEFAULTS | dict(mine), DEFAULTS | dict(theirs)
    for setting in [*dict(mine), *other]:
        if run.get(setting) != other.get(setting):
            return f"{setting} is {other.get(setting, 'missing')} here and {run.get(setting, 'missing')} in the run"
    return None
