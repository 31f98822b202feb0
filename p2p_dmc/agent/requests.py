"""What a client may ask an agent: status, placement, leave, stop, evict, leave-run (DESIGN.md section 11)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from p2p_dmc.agent.evicting import evict
from p2p_dmc.agent.placement_facts import Standing, dataset_facts
from p2p_dmc.agent.presence import storing
from p2p_dmc.agent.waiting import waiting
from p2p_dmc.core.membership import MemberState, Role
from p2p_dmc.errors import UserError
from p2p_dmc.wire.messages import ClientReply, ClientRequest, decode_meta
from p2p_dmc.wire.transport import normalise_address

if TYPE_CHECKING:
    from p2p_dmc.agent.agent import Agent

PIECE_CHARACTERS = 1 << 20
"""Of a reply's JSON, which is ASCII: the placement of a large data set fits no single message."""

REASON_CHARACTERS = 10_000
"""Of an error, which may repeat what the client said."""


ITEMS_AT_ONCE = 1000
"""Of a list: json lets no other thread run until it is done with what it was given."""


class Requests:
    """Answers clients: whoever can reach this peer may look, stop a run, ask a peer to leave, or evict one."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def handle(self, request: ClientRequest, reply: Callable[[ClientReply], None], *, local: bool) -> None:
        """One request, one reply, in as many pieces as it takes; what takes long is worked out in a thread."""
        try:
            facts = self._facts(request, local)
        except UserError as error:
            reply(ClientReply(ok=False, body=str(error)[:REASON_CHARACTERS], more=False))
            return
        if callable(facts):
            self._agent.spawn(self._answer_later(facts, reply))
        else:
            _reply(json.dumps(facts), reply)

    async def _answer_later(
        self, facts: Callable[[], dict[str, Any]], reply: Callable[[ClientReply], None]
    ) -> None:
        _reply(await asyncio.to_thread(lambda: "".join(_json(facts()))), reply)

    def _facts(self, request: ClientRequest, local: bool) -> dict[str, Any] | Callable[[], dict[str, Any]]:
        first = request.arguments[0] if request.arguments else ""
        if request.command == "status":
            return self.status()
        if request.command == "placement":
            return self.placement(request.arguments)
        if request.command == "stop":
            return self.stop(first)
        if request.command in ("evict", "evict?"):
            return evict(self, self._agent, request.arguments, ask_only=request.command == "evict?")
        if request.command == "leave":
            return self._leave(first)
        if request.command == "leave-run" and local:
            self._agent.jobs.leave(first, "its join was interrupted")
            return {"run": first}
        raise UserError(f"{request.command!r:.40} is not something to ask an agent; is one of the two newer?")

    def status(self) -> dict[str, Any]:
        """Members, runs and data sets as this peer sees them."""
        agent = self._agent
        return {
            "peer_id": agent.peer_id,
            "name": agent.options.name,
            "address": agent.address,
            "members": [self._member(r) for r in agent.members()],
            "runs": [self._run(name) for name in sorted(agent.runs)] + self.other_runs(),
            "datasets": [self._dataset(m.digest) for m in agent.data.manifests()],
        }

    def _member(self, record: Any) -> dict[str, Any]:
        meta = decode_meta(record.meta)
        trains = record.role is Role.TRAIN or (meta is not None and any(r.ready for r in meta.runs))
        return {
            "peer_id": record.peer_id,
            "name": record.name,
            "address": record.address,
            "bulk_address": record.bulk_address,
            "role": "train" if trains else "store",
            "state": record.state.name,
            "domain": meta.domain if meta is not None else "",
            "weight": meta.weight if meta is not None else 0,
            "boot": record.boot,
            "incarnation": record.incarnation,
        }

    def _run(self, name: str) -> dict[str, Any]:
        run = self._agent.runs[name]
        held, view = run.keeper.current, run.view
        ledger = held.ledger if held is not None else None
        data = run.desk.data
        manifest = self._agent.data.manifest(ledger.dataset_digest) if ledger is not None else None
        named = data.mixture if data is not None else manifest
        counted, skipped, total = ledger.progress() if ledger is not None else (0, 0, 0)
        return {
            "run": name,
            "outcome": run.end.outcome,
            "stopping": run.end.stop_asked,
            "stop_waits_for": list(run.end.waits_for),
            "stop_not_heard": list(run.end.roll.unheard),
            "view_epoch": view.view_epoch if view is not None else None,
            "members": [m.peer_id for m in view.voters] if view is not None else [],
            "learners": [m.peer_id for m in view.learners] if view is not None else [],
            "history": view.history.hex() if view is not None else None,
            "lineage": list(held.ref.lineage) if held is not None else None,
            "digest": held.anchor_digest.hex() if held is not None else None,
            "committed": list(run.committed_lineage) if run.committed_lineage is not None else None,
            "round": held.ref.lineage[1] if held is not None else None,
            "tau": held.tau.tau if held is not None else None,
            "loss": self._agent.jobs.last_round.get(name, {}).get("loss"),
            "dataset": ledger.dataset_digest.hex() if ledger is not None else None,
            "dataset_name": named.name if named is not None else None,
            "parts": [
                {"dataset": p.manifest.digest.hex(), "name": p.manifest.name, "passes": p.passes}
                for p in (data.mixture.parts if data is not None and ledger is not None else ())
            ],
            "epoch": ledger.epoch if ledger is not None else None,
            "epochs": ledger.epochs if ledger is not None else None,
            "epoch_progress": {"counted": counted, "skipped": skipped, "total": total},
            "samples_total": ledger.samples_total if ledger is not None else 0,
            "waiting": waiting(run),
        }

    def other_runs(self) -> list[dict[str, Any]]:
        """Runs that this peer only hears of: whom to ask about them."""
        agent = self._agent
        found: dict[str, dict[str, Any]] = {}
        for record in agent.members():
            meta = decode_meta(record.meta)
            if record.state is not MemberState.ALIVE or meta is None:
                continue
            for run in meta.runs:
                if run.name not in agent.runs and run.view_epoch >= found.get(run.name, {}).get(
                    "view_epoch", 0
                ):
                    found[run.name] = {"run": run.name, "view_epoch": run.view_epoch, "ask": record.address}
        return [found[name] for name in sorted(found)]

    def _dataset(self, dataset: bytes) -> dict[str, Any]:
        data = self._agent.data
        manifest = data.manifest(dataset)
        if manifest is None:
            raise UserError(f"data set {dataset.hex()} is not known here")
        told, copies = data.tally(dataset), data.copies(dataset)
        return {
            "name": manifest.name,
            "dataset": dataset.hex(),
            "first": manifest.first.hex(),
            "generation": manifest.generation,
            "samples": len(manifest),
            "size_bytes": sum(manifest.shard_sizes),
            "shards": len(manifest.shards),
            "replicas": manifest.replicas,
            "held_here": len(data.held(dataset)),
            "fetching": data.fetching(),
            "under_replicated": told.under_replicated if told is not None else len(manifest.shards),
            "lost": told.lost if told is not None else len(manifest.shards),
            "holders": {p: len(c.verified) for p, c in sorted(copies.items()) if len(c.verified)},
        }

    def placement(self, without: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
        """Who should hold what and who does; what would move if the peers ``without`` left. Works it out when called,
        in any thread.
        """
        agent = self._agent
        peers = storing(agent.members())
        gone = {self.peer(text) for text in without}
        seen = [Standing.of(agent.data, manifest, agent.peer_id) for manifest in agent.data.manifests()]
        names = {r.peer_id: r.name for r in agent.members()}
        domains = {p.peer_id: p.domain for p in peers if p.domain}
        return lambda: {
            "datasets": [dataset_facts(one, peers, gone) for one in seen],
            "without": sorted(gone),
            "names": names,
            "domains": domains,
        }

    def peer(self, text: str, remembered: Mapping[str, str] | None = None) -> str:
        """The peer_id that a person means by an id, the start of one, a name or an address; UserError.

        ``remembered``: names by peer_id of more peers than can be seen now.
        """
        members = self._agent.members()
        address = normalise_address(text) if text.startswith("tcp://") else ""
        names = dict(remembered or {}) | {r.peer_id: r.name for r in members}
        at = {r.peer_id for r in members if address and r.address == address}
        found = [p for p, name in names.items() if text and (name == text or p in at)]
        found = found or [p for p in names if text and p.startswith(text)]
        if len(found) != 1:
            known = ", ".join(f"{name} {p[:8]}" for p, name in names.items())
            kind = "no" if not found else "the name of more than one"
            raise UserError(f"{text!r} is {kind} peer; give a name or the start of an id: {known}")
        return found[0]

    def stop(self, name: str) -> dict[str, Any]:
        """Ask for an agreed stop of a run that this peer trains in, or say whom to ask."""
        agent = self._agent
        named = [r for r in agent.runs.values() if not name or r.name == name]
        going = [r for r in named if not r.end.outcome or r.end.roll.attending]
        if len(going) == 1:
            if going[0].view is None:
                reason = waiting(going[0]) or "its trainer starts"
                raise UserError(
                    f"run {going[0].name!r} has not begun here ({reason}); Ctrl-C at its join ends it"
                )
            going[0].end.ask_stop("dmc-peer stop", tell=True)
            return {"run": going[0].name, "stopping": True}
        others = [r for r in self.other_runs() if r["view_epoch"] and (not name or r["run"] == name)]
        names = sorted({r.name for r in going} | {r["run"] for r in others})
        if not going and len(others) == 1:
            return {"run": others[0]["run"], "ask": others[0]["ask"]}
        if not names:
            raise UserError(
                f"no run{f' {name!r}' if name else ''} is under way here; `dmc-peer status` lists them"
            )
        raise UserError(f"runs {', '.join(names)} are under way; choose one with --run")

    def _leave(self, text: str) -> dict[str, Any]:
        """Leave, if this peer is meant ("" means it); else say where the one that is meant listens."""
        peer_id = self.peer(text) if text else self._agent.peer_id
        record = next(r for r in self._agent.members() if r.peer_id == peer_id)
        facts = {"peer_id": peer_id, "name": record.name, "state": record.state.name}
        if peer_id == self._agent.peer_id:
            self._agent.leaving.set()
            return facts
        return facts | {"ask": record.address}


def _reply(body: str, reply: Callable[[ClientReply], None]) -> None:
    pieces = [body[i : i + PIECE_CHARACTERS] for i in range(0, len(body), PIECE_CHARACTERS)]
    for piece in pieces[:-1]:
        reply(ClientReply(ok=True, body=piece, more=True))
    reply(ClientReply(ok=True, body=pieces[-1], more=False))


def _json(value: Any) -> Iterator[str]:
    """The parts of what json.dumps makes of it, none of which takes long."""
    if isinstance(value, dict):
        for number, (key, item) in enumerate(value.items()):
            yield f"{', ' if number else '{'}{json.dumps(key)}: "
            yield from _json(item)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) > ITEMS_AT_ONCE:
        for at in range(0, len(value), ITEMS_AT_ONCE):
            yield (", " if at else "[") + json.dumps(value[at : at + ITEMS_AT_ONCE])[1:-1]
        yield "]"
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield ", " if number else "["
            yield from _json(item)
        yield "]"
    else:
        yield json.dumps(value)
